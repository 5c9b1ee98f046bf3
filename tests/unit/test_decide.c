#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "analyze/decide.h"
#include "tests/unit/results_build.h"

enum { STEPS = 1024, LAGS = 9, CURVES = 100 };
static const double lags[LAGS] = {0, 1, 2, 4, 8, 16, 32, 64, 128};

/* Curves of one file, each a series of its own, of the same shape and with noise of its own: per-step values scatter by
 * noise * 32, so that means over 1024 steps scatter by `noise`. `common` scatters the same way in all lags of a curve,
 * which paired differences do not see. */
static void make_curves(made *m, const double value[LAGS], size_t n, double noise, double common) {
    double x[STEPS];
    made_begin(m, "decide", STEPS, true);
    for (uint32_t c = 0; c < n; c++)
        for (uint32_t l = 0; l < LAGS; l++) {
            char spec[32];
            snprintf(spec, sizeof spec, "rmm(sinks=%u)", c);
            for (size_t t = 0; t < STEPS; t++)
                x[t] =
                    value[l] + 32 * (noise * made_normal(100 + c * LAGS + l, t) + common * made_normal(50000 + c, t));
            made_add(m, (made_row){.seq = "0", .spec = spec, .lag = lags[l], .first = x});
        }
    made_read(m, 7);
}

typedef struct tally {
    size_t found, flat, no_bend;  /* knees */
    size_t knee[LAGS], lag[LAGS]; /* how often each was the knee, the recommended lag */
} tally;

static size_t index_of(double lag) {
    size_t i = 0;
    while (lags[i] != lag) i++;
    return i;
}

static tally decide_all(made *m) {
    tally t = {0};
    lag_curves curves;
    assert_int_equal(lag_curves_find(m->r, DLOSS_FIRST, &curves), 0);
    for (size_t i = 0; i < curves.n; i++) {
        knee k;
        lag_choice c;
        assert_int_equal(curves.item[i].n, LAGS);
        assert_int_equal(decide_knee(m->b, &curves.item[i], DLOSS_FIRST, &k), 0);
        assert_int_equal(decide_lag(m->b, &curves.item[i], DLOSS_FIRST, &c), 0);
        t.found += k.found;
        t.flat += !k.found && strcmp(k.why, "flat") == 0;
        t.no_bend += !k.found && strcmp(k.why, "no bend") == 0;
        if (k.found) t.knee[index_of(k.at->lag)]++;
        if (k.found) assert_true(k.lag_lo <= k.at->lag && k.at->lag <= k.lag_hi);
        t.lag[index_of(c.recommended->lag)]++;
    }
    lag_curves_free(&curves);
    return t;
}

static tally tally_of(const double value[LAGS], double noise, double common) {
    made m;
    make_curves(&m, value, CURVES, noise, common);
    tally t = decide_all(&m);
    print_message("found %zu flat %zu no bend %zu; knees", t.found, t.flat, t.no_bend);
    for (int i = 0; i < LAGS; i++) print_message(" %zu", t.knee[i]);
    print_message("; lags");
    for (int i = 0; i < LAGS; i++) print_message(" %zu", t.lag[i]);
    print_message("\n");
    made_free(&m);
    return t;
}

/* Equal losses: in at most 5 % (here, with its own scatter, 12 of 100) of cases is lag 0 found to be worse. */
static void test_flat(void **state) {
    (void)state;
    const double value[LAGS] = {1, 1, 1, 1, 1, 1, 1, 1, 1};
    tally t = tally_of(value, 0.02, 0.1);
    assert_true(t.found <= 5);
    assert_true(t.lag[0] >= 88);
    t = tally_of(value, 0, 0.1);
    assert_int_equal(t.flat, CURVES);
    assert_int_equal(t.lag[0], CURVES);
}

/* Every doubling brings the same: no knee, and the longest lag is the one to take. */
static void test_linear(void **state) {
    (void)state;
    const double value[LAGS] = {.9, .8, .7, .6, .5, .4, .3, .2, .1};
    tally t = tally_of(value, 0, 0.1);
    assert_int_equal(t.no_bend, CURVES);
    assert_int_equal(t.lag[8], CURVES);
    t = tally_of(value, 0.02, 0.1);
    assert_true(t.found <= 5);
    assert_true(t.lag[8] + t.lag[7] >= 95);
}

/* Falls to lag 4 and stays: the knee and the lag to take are 4. */
static void test_elbow(void **state) {
    (void)state;
    const double value[LAGS] = {1, .7, .4, .1, .1, .1, .1, .1, .1};
    tally t = tally_of(value, 0, 0.1);
    assert_int_equal(t.knee[3], CURVES);
    assert_int_equal(t.lag[3], CURVES);
    t = tally_of(value, 0.02, 0.2);
    assert_true(t.knee[3] >= 95);
    assert_true(t.lag[3] >= 90);
}

/* The same under noise of a tenth of the fall: the knee is 4 or a neighbour. Lag 2 costs .3 more, two and a half
 * standard errors of a difference: in part of the cases that is no evidence against it. */
static void test_noisy_elbow(void **state) {
    (void)state;
    const double value[LAGS] = {1, .7, .4, .1, .1, .1, .1, .1, .1};
    tally t = tally_of(value, 0.09, 0.2);
    assert_true(t.found >= 90);
    assert_true(t.knee[2] + t.knee[3] + t.knee[4] >= 0.95 * (double)t.found);
    assert_true(t.lag[2] + t.lag[3] >= 95 && t.lag[3] >= 50);
}

/* A bend without an end: halves with every doubling. Kneedle's knee of 2^-x over 0..8 is where the slope is the
 * chord's: x = 2.5, so lag 2 (x = 2) or 4 (x = 3); of the two the depth at x = 2 is 1 - .25 - (.25 - .0039)/.9961 =
 * .503, at 3 it is .625 - .1217 = .503: .5030 against .5034. The lag to take is the longest, since each is truly
 * better. */
static void test_halving(void **state) {
    (void)state;
    const double value[LAGS] = {1, .5, .25, .125, .0625, .03125, .015625, .0078125, .00390625};
    tally t = tally_of(value, 0, 0.1);
    assert_int_equal(t.knee[3], CURVES);
    assert_int_equal(t.lag[8], CURVES);
}

/* Falls to lag 8, then rises as pending entries crowd the budget: the knee is the bottom, not the end. */
static void test_non_monotone(void **state) {
    (void)state;
    const double value[LAGS] = {1, .75, .5, .25, .05, .3, .5, .8, 1.2};
    tally t = tally_of(value, 0, 0.1);
    assert_int_equal(t.knee[4], CURVES);
    assert_int_equal(t.lag[4], CURVES);
    t = tally_of(value, 0.03, 0.1);
    assert_true(t.knee[4] >= 90);
    assert_true(t.lag[4] >= 90);
}

/* Only the longest lags help, or waiting only costs: no knee. */
static void test_no_knee(void **state) {
    (void)state;
    const double late[LAGS] = {1, 1, 1, 1, 1, 1, .9, .6, .1}, rising[LAGS] = {.1, .2, .3, .4, .5, .6, .7, .8, .9};
    tally t = tally_of(late, 0.01, 0.1);
    assert_true(t.found <= 2);
    assert_int_equal(t.lag[8], CURVES);
    t = tally_of(rising, 0.02, 0.1);
    assert_true(t.found <= 2);
    assert_true(t.lag[0] >= 98);
}

/* Uncalibrated estimates that fall from 2 to .4: each is off by a factor of its own, which two lags of a series share
 * in half (bootstrap.h), so a ratio of 5 is ln 5 / (.34 sqrt(.5 + .5)) = 4.7 of its standard errors. As amounts the
 * errors of the large one have a long tail upwards, which must not hide the difference. */
static void test_errors_are_factors(void **state) {
    (void)state;
    double first[STEPS] = {0}, kl[STEPS];
    const double value[] = {2, 1, 0.4, 0.4}, at[] = {0, 4, 16, 32};
    made m;
    lag_curves curves;
    lag_choice c;
    made_begin(&m, "factors", STEPS, false);
    for (size_t i = 0; i < 4; i++) {
        for (size_t t = 0; t < STEPS; t++) kl[t] = value[i];
        made_add(&m, (made_row){.seq = "0", .spec = "rmm", .lag = at[i], .first = first, .kl = kl, .spread = 0.67});
    }
    made_read(&m, 7);
    assert_int_equal(lag_curves_find(m.r, DLOSS_EST, &curves), 0);
    assert_int_equal(decide_lag(m.b, &curves.item[0], DLOSS_EST, &c), 0);
    assert_true(c.recommended->lag == 16);
    lag_curves_free(&curves);
    made_free(&m);
}

/* ---- gains, by hand --------------------------------------------------------------------------------------------- */

static double constant[STEPS];

static void add(made *m, const char *spec, double lag, const char *pending, double loss) {
    for (size_t t = 0; t < STEPS; t++) constant[t] = loss;
    made_add(m, (made_row){.seq = "0", .spec = spec, .lag = lag, .pending = pending, .first = constant});
}

/* rmm loses 1 at lag 0 and .4 at lag 8, the oracle that waits as long .2 at 8: gain .6, closed .6 / .8 = 75 %. The best
 * filter loses .7. */
static void test_gains(void **state) {
    (void)state;
    made m;
    lag_curves curves;
    gain *g;
    made_begin(&m, "gains", STEPS, true);
    add(&m, "rmm", 0, "charged", 1);
    add(&m, "rmm", 8, "charged", .4);
    add(&m, "rmm", 16, "charged", .3);
    add(&m, "oracle(mass,hold=lag)", 8, "charged", .2);
    add(&m, "oracle(loss,hold=lag)", 8, "charged", .25);
    add(&m, "oracle(mass,hold=lag)", 16, "free", .1);
    add(&m, "h2o", -1, "", .8);
    add(&m, "ema", -1, "", .7);
    add(&m, "oracle(mass)", -1, "", .1);
    made_read(&m, 8);
    assert_int_equal(lag_curves_find(m.r, DLOSS_FIRST, &curves), 0);
    assert_int_equal(curves.n, 1);
    assert_int_equal(curves.item[0].n, 3);
    assert_int_equal(decide_gains(m.b, m.r, &curves.item[0], DLOSS_FIRST, &g), 0);
    assert_float_equal(g[0].gain.value, 0, 0);
    assert_float_equal(g[1].gain.value, .6, 1e-9);
    assert_float_equal(g[1].gain.lo, .6, 1e-9);
    assert_float_equal(g[1].closed.value, .75, 1e-9);
    assert_float_equal(g[1].closed.hi, .75, 1e-9);
    assert_string_equal(g[1].oracle->spec, "oracle(mass,hold=lag)");
    assert_string_equal(g[1].filter->spec, "ema");
    assert_float_equal(g[1].over_filter.value, .3, 1e-9);
    assert_null(g[2].oracle); /* free is not charged */
    assert_string_equal(g[2].closed_why, "no oracle(...,hold=lag) with these sinks at this lag");
    assert_true(isnan(g[2].closed.value));
    mem_free(g);
    lag_curves_free(&curves);
    made_free(&m);
}

/* Where lag 0 already loses what the oracle loses there is no share to close. */
static void test_no_share(void **state) {
    (void)state;
    made m;
    lag_curves curves;
    gain *g;
    made_begin(&m, "no_share", STEPS, true);
    add(&m, "rmm", 0, "charged", .2);
    add(&m, "rmm", 8, "charged", .2);
    add(&m, "oracle(mass,hold=lag)", 8, "charged", .2);
    made_read(&m, 8);
    assert_int_equal(lag_curves_find(m.r, DLOSS_FIRST, &curves), 0);
    assert_int_equal(decide_gains(m.b, m.r, &curves.item[0], DLOSS_FIRST, &g), 0);
    assert_string_equal(g[1].closed_why, "lag 0 and the oracle cannot be told apart");
    assert_null(g[1].filter);
    mem_free(g);
    lag_curves_free(&curves);
    made_free(&m);
}

/* ---- ranking ---------------------------------------------------------------------------------------------------- */

/* Two that tie (their scatter is their own), one clearly behind both, free pending left out, oracles on demand. */
static void test_ranking(void **state) {
    (void)state;
    made m;
    ranked *list;
    size_t n;
    double x[STEPS];
    made_begin(&m, "ranking", STEPS, true);
    const char *const specs[] = {"window", "h2o", "ema"};
    const double loss[] = {1, .51, .5};
    for (uint32_t i = 0; i < 3; i++) {
        for (size_t t = 0; t < STEPS; t++) x[t] = loss[i] + made_normal(900 + i, t);
        made_add(&m, (made_row){.seq = "0", .spec = specs[i], .lag = -1, .first = x});
    }
    add(&m, "rmm", 8, "free", .1);
    add(&m, "rmm", 8, "charged", .9);
    add(&m, "oracle(mass)", -1, "", .05);
    made_read(&m, 9);
    assert_int_equal(decide_ranking(m.b, m.r, "64", DLOSS_FIRST, false, &list, &n), 0);
    assert_int_equal(n, 4);
    assert_int_equal(list[0].rank, 1);
    assert_int_equal(list[1].rank, 1); /* h2o and ema, either first */
    assert_true(list[1].p > 0.1);
    assert_string_equal(list[2].config->spec, "rmm");
    assert_float_equal(list[2].loss.value, .9, 1e-9);
    assert_int_equal(list[2].rank, 3);
    assert_string_equal(list[3].config->spec, "window");
    assert_true(list[3].rank == 4 || list[3].rank == 3);
    assert_true(list[3].behind.lo > 0 && list[3].p < 0.1);
    mem_free(list);
    assert_int_equal(decide_ranking(m.b, m.r, "64", DLOSS_FIRST, true, &list, &n), 0);
    assert_string_equal(list[0].config->policy, "oracle");
    mem_free(list);
    assert_int_equal(decide_ranking(NULL, m.r, "64", DLOSS_FIRST, false, &list, &n), 0);
    for (size_t i = 0; i < n; i++) assert_int_equal(list[i].rank, i + 1);
    assert_true(isnan(list[1].p));
    mem_free(list);
    made_free(&m);
}

/* Without blocks there is a best lag and no recommendation. */
static void test_without_resamples(void **state) {
    (void)state;
    made m;
    lag_curves curves;
    lag_choice c;
    knee k;
    made_begin(&m, "without", STEPS, true);
    add(&m, "rmm", 0, "charged", 1);
    add(&m, "rmm", 8, "charged", .4);
    made_read(&m, 8);
    assert_int_equal(lag_curves_find(m.r, DLOSS_FIRST, &curves), 0);
    assert_int_equal(decide_lag(NULL, &curves.item[0], DLOSS_FIRST, &c), 0);
    assert_null(c.recommended);
    assert_float_equal(c.best->lag, 8, 0);
    assert_int_equal(decide_knee(NULL, &curves.item[0], DLOSS_FIRST, &k), 0);
    assert_false(k.found);
    assert_string_equal(k.why, "no resamples");
    lag_curves_free(&curves);
    made_free(&m);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_flat),    cmocka_unit_test(test_linear),
        cmocka_unit_test(test_elbow),   cmocka_unit_test(test_noisy_elbow),
        cmocka_unit_test(test_halving), cmocka_unit_test(test_non_monotone),
        cmocka_unit_test(test_no_knee), cmocka_unit_test(test_errors_are_factors),
        cmocka_unit_test(test_gains),   cmocka_unit_test(test_no_share),
        cmocka_unit_test(test_ranking), cmocka_unit_test(test_without_resamples),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
