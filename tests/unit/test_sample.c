/* The stratified sample of steps: weights by hand, sums without bias, variances that say how far they scatter. */
#include "base/mem.h"
#include "base/rng.h"
#include "sim/sample.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum { FIRST = 7, N = 203, WANTED = 41, DRAWS = 4000 };

static void weights_add_up(void **state) {
    (void)state;
    for (int32_t wanted = 1; wanted < N; wanted += 13) {
        sample s;
        int32_t strata = wanted < 4 ? 2 : wanted / 2;
        int taken = 0;
        double sum = 0;
        assert_int_equal(sample_new(FIRST, N, wanted, 5, 1, &s), 0);
        assert_int_equal(s.strata, strata);
        for (int32_t t = 0; t < FIRST + N; t++) {
            assert_true(t >= FIRST || s.weight[t] == 0);
            taken += s.weight[t] > 0;
            sum += sample_weight(&s, t);
        }
        assert_int_equal(taken, 2 * strata); /* never the same step twice */
        assert_float_equal(sum, N, 1e-6);
        sample_free(&s);
    }
}

static void all_steps_need_no_sample(void **state) {
    (void)state;
    static const int32_t wanted[] = {0, N, N + 1};
    for (int i = 0; i < 3; i++) {
        sample s;
        assert_int_equal(sample_new(FIRST, N, wanted[i], 5, 1, &s), 0);
        assert_true(sample_weight(&s, FIRST) == 1 && sample_weight(&s, 0) == 1);
        assert_true(sample_covariance(&s, NULL, NULL) == 0);
        sample_free(&s);
    }
}

/* Two strata of 3 and 2 steps, worked out: weights 1.5 and 1; variance 3 (3-2)/2 (difference)^2/2, and none from a
 * stratum that is taken whole. */
static void variance_by_hand(void **state) {
    (void)state;
    sample s;
    assert_int_equal(sample_new(0, 5, 4, 9, 0, &s), 0);
    assert_int_equal(s.strata, 2);
    double x[5] = {1, 4, 9, 16, 25}, y[5] = {2, 0, 1, 7, 5};
    int32_t size = s.weight[s.drawn[0]] == 1 ? 2 : 3, h = size == 3 ? 0 : 1; /* which stratum has three steps */
    int32_t a = s.drawn[2 * h], b = s.drawn[2 * h + 1];
    assert_float_equal(s.weight[a], 1.5, 0);
    assert_float_equal(sample_covariance(&s, x, x), 0.75 * (x[a] - x[b]) * (x[a] - x[b]), 1e-12);
    assert_float_equal(sample_covariance(&s, x, y), 0.75 * (x[a] - x[b]) * (y[a] - y[b]), 1e-12);
    sample_free(&s);
}

static void sums_have_no_bias(void **state) {
    (void)state;
    double x[FIRST + N], y[FIRST + N], truth = 0, mean = 0, square = 0, product = 0, variance = 0, covariance = 0;
    double truth_y = 0;
    for (uint32_t t = 0; t < FIRST + N; t++) { /* a trend, a heavy tail */
        double u = rng_uniform(rng_philox(1, t, 0, 0, 0).v[0]);
        x[t] = t < FIRST ? NAN : 0.01 * t + 1 / (u * u + 0.01);
        y[t] = t < FIRST ? NAN : sqrt(x[t]) - 0.02 * t;
        if (t >= FIRST) truth += x[t], truth_y += y[t];
    }
    for (uint64_t seed = 0; seed < DRAWS; seed++) {
        sample s;
        double sum = 0, sum_y = 0;
        assert_int_equal(sample_new(FIRST, N, WANTED, seed, 3, &s), 0);
        for (int32_t t = FIRST; t < FIRST + N; t++) {
            if (s.weight[t] == 0) continue;
            sum += sample_weight(&s, t) * x[t];
            sum_y += sample_weight(&s, t) * y[t];
        }
        mean += sum / DRAWS;
        square += (sum - truth) * (sum - truth) / DRAWS;
        product += (sum - truth) * (sum_y - truth_y) / DRAWS;
        variance += sample_covariance(&s, x, x) / DRAWS;
        covariance += sample_covariance(&s, x, y) / DRAWS;
        sample_free(&s);
    }
    assert_true(fabs(mean - truth) < 4 * sqrt(square / DRAWS));
    assert_true(fabs(variance / square - 1) < 0.1);
    assert_true(fabs(covariance / product - 1) < 0.1);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(weights_add_up), cmocka_unit_test(all_steps_need_no_sample),
                                       cmocka_unit_test(variance_by_hand), cmocka_unit_test(sums_have_no_bias)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
