#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "analyze/statistics.h"

#include <math.h>

/* Constants were computed with scipy 1.17.1: stats.pearsonr, stats.spearmanr, stats.binom.cdf(k, n, p) and
 * stats.binom.sf(k - 1, n, p), and numpy's std(ddof=1). */

static const double x[] = {.003, .02, .02, .4, .9, .07, .02, 1.5};
static const double y[] = {.004, .015, .03, .3, 1.2, .03, .01, .9};

static void near(double got, double want) {
    if (!(fabs(got - want) <= 1e-11 * fabs(want))) fail_msg("%.17g, not %.17g", got, want);
}

static void test_moments(void **state) {
    (void)state;
    near(statistics_mean(x, 8), 0.36662500000000003);
    near(statistics_deviation(x, 8), 0.55430753132689292);
    assert_true(isnan(statistics_mean(x, 0)));
    assert_true(isnan(statistics_deviation(x, 1)));
}

static void test_median(void **state) {
    (void)state;
    double odd[] = {5, 1, 3}, even[] = {4, 1, 2, 8};
    assert_true(statistics_median(odd, 3) == 3);
    assert_true(statistics_median(even, 4) == 3);
    assert_true(isnan(statistics_median(odd, 0)));
}

static void test_pearson(void **state) {
    (void)state;
    double log_x[8], log_y[8], flat[] = {2, 2, 2};
    for (int i = 0; i < 8; i++) {
        log_x[i] = log(x[i]);
        log_y[i] = log(y[i]);
    }
    near(statistics_pearson(x, y, 8), 0.89348278129564396);
    near(statistics_pearson(log_x, log_y, 8), 0.97563940272415628);
    assert_true(isnan(statistics_pearson(x, y, 1)));
    assert_true(isnan(statistics_pearson(flat, y, 3)));
}

static double spearman(const double *a, const double *b, size_t n) {
    double r = 0;
    assert_int_equal(statistics_spearman(a, b, n, &r), 0);
    return r;
}

static void test_spearman(void **state) {
    (void)state;
    const double up[] = {1, 10, 100, 1000}, down[] = {3, 2, 1, -5};
    near(spearman(x, y, 8), 0.93267331798025022); /* with ties on both sides */
    near(spearman(up, down, 4), -1);
    assert_true(isnan(spearman(up, down, 1)));
}

static void test_binomial(void **state) {
    (void)state;
    static const struct {
        size_t k, n;
        double p, most, least;
    } known[] = {
        {33, 36, .85, 0.92237535938832138, 0.19055131470230552},
        {33, 36, .95, 0.26792192584409946, 0.89632119904115248},
        {27, 36, .85, 0.080104384391593453, 0.96486548757189661},
        {36, 36, .95, 1, 0.15777921478822679},
        {170, 240, .85, 1.7060289127962777e-08, 0.99999999288888841},
        {228, 240, .95, 0.54134653602363414, 0.57599032513250759},
        {239, 240, .95, 0.99999549530626697, 6.1406088255020521e-05},
        {1000, 1200, .85, 0.058988836095847361, 0.94969021715558422},
        {0, 1, .85, 0.15000000000000002, 1},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        near(statistics_binomial_most(known[i].k, known[i].n, known[i].p), known[i].most);
        near(statistics_binomial_least(known[i].k, known[i].n, known[i].p), known[i].least);
    }
    assert_true(statistics_binomial_least(3, 2, .5) == 0);
    near(statistics_binomial_most(3, 2, .5), 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_moments),  cmocka_unit_test(test_median),   cmocka_unit_test(test_pearson),
        cmocka_unit_test(test_spearman), cmocka_unit_test(test_binomial),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
