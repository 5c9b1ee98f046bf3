#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/student.h"
#include "tests/unit/results_build.h"

enum { STEPS = 1024, REPEATS = 1000 };

/* How many of the intervals of all configurations hold the value that their data were drawn around. */
static size_t count_held(made *m, size_t metric, double truth) {
    size_t held = 0;
    for (size_t i = 0; i < m->r->n_configs; i++) {
        estimate e;
        assert_int_equal(bootstrap_estimate(m->b, &m->r->configs[i], metric, &e), 0);
        assert_true(e.lo <= e.value && e.value <= e.hi);
        held += e.lo <= truth && truth <= e.hi;
    }
    return held;
}

/* 86 to 94 % of 1000 */
static void check_coverage(const char *what, size_t held) {
    print_message("%s: %.1f %% held\n", what, 100.0 * (double)held / REPEATS);
    assert_in_range(held, 860, 940);
}

/* Repeats are configurations of one file: the resamples are shared, the data are drawn anew. Of each repeat n_sequences
 * are made, whose means scatter by `between`; values correlate along the text, and are skewed as losses are: a square.
 */
static void cover(const char *what, size_t n_sequences, double phi, double between, bool skewed) {
    made m;
    double x[STEPS];
    made_begin(&m, "cover", STEPS, true);
    for (uint32_t i = 0; i < REPEATS; i++)
        for (uint32_t s = 0; s < n_sequences; s++) {
            char seq[16], spec[32];
            snprintf(seq, sizeof seq, "%u", s);
            snprintf(spec, sizeof spec, "mix(seed=%u)", i);
            made_correlated(x, STEPS, phi, i * 64 + s);
            double mean = between * made_normal(1000000 + i * 64 + s, 0);
            for (size_t t = 0; t < STEPS; t++) x[t] = mean + (skewed ? x[t] * x[t] - 1 : x[t]);
            made_add(&m, (made_row){.seq = seq, .spec = spec, .lag = -1, .first = x});
        }
    made_read(&m, 1);
    assert_int_equal(m.r->n_configs, REPEATS);
    assert_int_equal(bootstrap_over_sequences(m.b), n_sequences >= BOOTSTRAP_LEAST_SEQUENCES);
    check_coverage(what, count_held(&m, DLOSS_FIRST, 0));
    made_free(&m);
}

static void test_coverage_of_one_text(void **state) {
    (void)state;
    cover("one text", 1, 0.0, 0, false);
    cover("one text, correlated .8", 1, 0.8, 0, false);
    cover("one text, correlated .9, skewed", 1, 0.9, 0, true);
}

static void test_coverage_of_a_few_texts(void **state) {
    (void)state;
    cover("three texts, correlated .8, skewed", 3, 0.8, 0, true);
}

static void test_coverage_of_texts_like_these(void **state) {
    (void)state;
    cover("five texts", 5, 0.8, 0.3, false);
    cover("eight texts, skewed", 8, 0.8, 0.3, true);
    cover("twenty texts", 20, 0.8, 0.3, true);
}

/* Estimates of KL that are off by a factor of their own, a third of its variance shared by a text and a series: what
 * the row's interval says, the bootstrap's must hold. */
static void test_coverage_with_calibration_error(void **state) {
    (void)state;
    made m;
    double x[STEPS], kl[STEPS], zero[STEPS] = {0}, spread = 0.34;
    made_begin(&m, "calibrated", STEPS, true);
    for (uint32_t i = 0; i < REPEATS; i++)
        for (uint32_t s = 0; s < 3; s++) {
            char seq[16], spec[32];
            snprintf(seq, sizeof seq, "%u", s);
            snprintf(spec, sizeof spec, "mix(seed=%u)", i);
            made_correlated(x, STEPS, 0.5, i * 8 + s);
            double off = exp(-spread * made_normal(2000000 + i * 8 + s, 0));
            for (size_t t = 0; t < STEPS; t++) kl[t] = 0.1 * x[t] * x[t] * off;
            made_add(
                &m, (made_row){.seq = seq, .spec = spec, .lag = -1, .first = zero, .kl = kl, .spread = 1.645 * spread});
        }
    made_read(&m, 2);
    check_coverage("kl, factors of .34", count_held(&m, KL_EST, 0.1));
    made_free(&m);
}

/* Two policies that cost the same on the whole and differ step by step share most of what happens: the paired test
 * finds a difference in one of ten cases, and its interval is far shorter than that of either. */
static void test_paired_test_keeps_its_level(void **state) {
    (void)state;
    made m;
    double common[STEPS], own[STEPS], x[STEPS];
    size_t found = 0, shorter = 0;
    made_begin(&m, "paired", STEPS, true);
    for (uint32_t i = 0; i < REPEATS; i++) {
        made_correlated(common, STEPS, 0.8, 3000000 + i);
        for (uint32_t k = 0; k < 2; k++) {
            char spec[48];
            snprintf(spec, sizeof spec, "mix(seed=%u,hold=%u)", i, k);
            made_correlated(own, STEPS, 0.5, 4000000 + 2 * i + k);
            for (size_t t = 0; t < STEPS; t++) x[t] = common[t] + 0.2 * own[t];
            made_add(&m, (made_row){.seq = "0", .spec = spec, .lag = -1, .first = x});
        }
    }
    made_read(&m, 3);
    for (size_t i = 0; i < 2 * REPEATS; i += 2) {
        estimate d, level;
        double p;
        const result *a = &m.r->configs[i], *b = &m.r->configs[i + 1];
        assert_int_equal(bootstrap_difference(m.b, a, b, DLOSS_FIRST, &d, &p), 0);
        assert_int_equal(bootstrap_estimate(m.b, a, DLOSS_FIRST, &level), 0);
        assert_int_equal(p<0.1, d.lo> 0 || d.hi < 0);
        found += p < 0.1;
        shorter += d.hi - d.lo < 0.5 * (level.hi - level.lo);
    }
    print_message("paired: found in %.1f %%\n", 100.0 * (double)found / REPEATS);
    assert_in_range(found, 60, 140);
    assert_true(shorter > 0.95 * REPEATS);
    made_free(&m);
}

/* By hand: constant values have no spread, and a difference of constants is certain. With a spread of e^1 the KL's
 * interval is near 90 % of that factor, since nothing else varies; a configuration's difference to itself is 0. */
static void test_what_is_certain(void **state) {
    (void)state;
    made m;
    double two[STEPS], three[STEPS], kl[STEPS];
    for (size_t t = 0; t < STEPS; t++) two[t] = 2, three[t] = 3, kl[t] = 0.5;
    made_begin(&m, "certain", STEPS, true);
    made_add(&m, (made_row){.seq = "0", .spec = "h2o", .lag = -1, .first = two});
    made_add(&m, (made_row){.seq = "0", .spec = "ema", .lag = -1, .first = three});
    made_add(&m, (made_row){.seq = "0", .spec = "lru", .lag = -1, .first = two, .kl = kl, .spread = 1});
    made_read(&m, 4);
    const result *h2o = &m.r->configs[0], *ema = &m.r->configs[1], *lru = &m.r->configs[2];
    estimate e;
    double p;
    assert_int_equal(bootstrap_estimate(m.b, h2o, DLOSS_EST, &e), 0);
    assert_float_equal(e.lo, 2, 1e-9);
    assert_float_equal(e.hi, 2, 1e-9);
    assert_int_equal(bootstrap_difference(m.b, ema, h2o, DLOSS_EST, &e, &p), 0);
    assert_float_equal(e.lo, 1, 1e-9);
    assert_float_equal(p, 1.0 / BOOTSTRAP_RESAMPLES, 1e-12);
    assert_int_equal(bootstrap_difference(m.b, ema, ema, DLOSS_EST, &e, &p), 0);
    assert_float_equal(e.hi, 0, 0);
    assert_float_equal(p, 1, 0);
    assert_int_equal(bootstrap_estimate(m.b, lru, KL_EST, &e), 0);
    assert_float_equal(log(e.lo / 0.5), -1, 0.08);
    assert_float_equal(log(e.hi / 0.5), 1, 0.08);
    assert_int_equal(bootstrap_estimate(m.b, lru, DLOSS_EST, &e), 0);
    assert_float_equal(log((e.hi - 2) / 0.5), 1, 0.08);
    made_free(&m);
}

/* The shares of the calibration's error: two lags of one policy differ by less than two policies do, which differ by
 * less than two texts would. Their log ratio's deviation is spread times sqrt(2 * (1 - shared)). */
static void test_calibration_error_is_shared(void **state) {
    (void)state;
    made m;
    double zero[STEPS] = {0}, kl[STEPS];
    for (size_t t = 0; t < STEPS; t++) kl[t] = 0.1;
    made_begin(&m, "shared", STEPS, true);
    const double spread = 0.34 * 1.6448536269514722;
    made_add(&m, (made_row){.seq = "0", .spec = "rmm", .lag = 4, .first = zero, .kl = kl, .spread = spread});
    made_add(&m, (made_row){.seq = "0", .spec = "rmm", .lag = 8, .first = zero, .kl = kl, .spread = spread});
    made_add(&m, (made_row){.seq = "0", .spec = "h2o", .lag = -1, .first = zero, .kl = kl, .spread = spread});
    made_read(&m, 5);
    const double expected[] = {0.34 * sqrt(2 * 0.5), 0.34 * sqrt(2 * 0.8)};
    const double *a, *b;
    assert_int_equal(bootstrap_replicates(m.b, &m.r->configs[0], KL_EST, &a), 0);
    for (size_t k = 0; k < 2; k++) {
        double squares = 0;
        assert_int_equal(bootstrap_replicates(m.b, &m.r->configs[k + 1], KL_EST, &b), 0);
        for (size_t i = 0; i < BOOTSTRAP_RESAMPLES; i++) squares += log(a[i] / b[i]) * log(a[i] / b[i]);
        assert_float_equal(sqrt(squares / BOOTSTRAP_RESAMPLES), expected[k], 0.02);
    }
    made_free(&m);
}

/* An uncalibrated estimate's error beyond what configurations have of their own is common to all texts: more texts do
 * not take it away. */
static void test_uncalibrated_error_stays(void **state) {
    (void)state;
    for (int calibrated = 0; calibrated <= 1; calibrated++) {
        made m;
        double zero[STEPS] = {0}, kl[STEPS];
        estimate e;
        for (size_t t = 0; t < STEPS; t++) kl[t] = 0.1;
        made_begin(&m, "uncalibrated", STEPS, calibrated);
        for (int s = 0; s < 40; s++) {
            char seq[16];
            snprintf(seq, sizeof seq, "%02d", s);
            made_add(&m, (made_row){.seq = seq,
                                    .spec = "h2o",
                                    .lag = -1,
                                    .first = zero,
                                    .kl = kl,
                                    .spread = 1.6448536269514722 * log(1.5)});
        }
        made_read(&m, 6);
        assert_int_equal(bootstrap_estimate(m.b, &m.r->configs[0], KL_EST, &e), 0);
        double model = calibrated ? 0 : sqrt(log(1.5) * log(1.5) - 0.34 * 0.34), own = calibrated ? log(1.5) : 0.34;
        double expected = 1.645 * sqrt(model * model + own * own / 40);
        assert_float_equal(log(e.hi / e.lo) / 2, expected, 0.1 * expected);
        made_free(&m);
    }
}

/* Tables: 6.3138 at 1 degree of freedom, 2.1318 at 4, 1.7531 at 15. */
static void test_student(void **state) {
    (void)state;
    assert_float_equal(student_95(1), 6.3138, 1e-4);
    assert_float_equal(student_95(4), 2.1318, 1e-4);
    assert_float_equal(student_95(15), 1.7531, 1e-4);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_coverage_of_one_text),
        cmocka_unit_test(test_coverage_of_a_few_texts),
        cmocka_unit_test(test_coverage_of_texts_like_these),
        cmocka_unit_test(test_coverage_with_calibration_error),
        cmocka_unit_test(test_paired_test_keeps_its_level),
        cmocka_unit_test(test_what_is_certain),
        cmocka_unit_test(test_calibration_error_is_shared),
        cmocka_unit_test(test_uncalibrated_error_stays),
        cmocka_unit_test(test_student),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
