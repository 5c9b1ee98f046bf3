#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "analyze/canvas.h"
#include "analyze/memory.h"
#include "tests/unit/results_build.h"

/* The loss whose place on the curves' scale is s. */
static double loss(double s) {
    return AXIS_LINEAR_TO * sinh(s);
}

static void near(double got, double want) {
    if (!(got == want || fabs(got - want) <= 1e-9 * fabs(want))) fail_msg("%.17g, not %.17g", got, want);
}

/* ---- by hand ---------------------------------------------------------------------------------------------------- */

static result config(const char *spec, const char *asked, double entries, double lag, double s) {
    result c = {.trace = "", .seq = "", .policy = strncmp(spec, "oracle", 6) ? "p" : "oracle", .spec = spec};
    c.budget_asked = asked;
    c.unit = "head";
    c.schedule = "step";
    c.pending = "charged";
    c.n_prompt = c.seed = c.sinks = "";
    c.kv_bits = c.pending_bits = "16";
    c.budget = entries;
    c.lag = lag;
    for (size_t m = 0; m < RESULTS_METRICS; m++) c.metric[m] = c.lo[m] = c.hi[m] = NAN;
    for (size_t k = 0; k < RESULTS_COSTS; k++) c.cost[k] = NAN;
    c.metric[KL_EST] = loss(s);
    return c;
}

static void at_loss(const memory_curve *c, double s, double want) {
    estimate e;
    assert_int_equal(memory_at_loss(NULL, c, loss(s), &e), 0);
    near(e.value, want);
    assert_true(isnan(e.lo) && isnan(e.hi));
}

static void at_memory(const memory_curve *c, double memory, double want) {
    estimate e;
    assert_int_equal(memory_loss_at(NULL, c, memory, &e, NULL), 0);
    near(e.value, loss(want));
    assert_true(isnan(e.lo) && isnan(e.hi));
}

static void test_between_two_budgets(void **state) {
    (void)state;
    result two[] = {config("h2o", "256", 256, -1, 2), config("h2o", "64", 64, -1, 4)};
    results r = {.configs = two, .n_configs = 2};
    memory_curves all;
    text why = {0};
    estimate e;
    assert_int_equal(memory_curves_find(&r, KL_EST, &all), 0);
    assert_int_equal(all.n, 1);
    const memory_curve *c = &all.item[0];
    assert_true(c->measure == MEMORY_ENTRIES && c->n == 2 && memory_least(c) == 64 && memory_most(c) == 256);
    at_memory(c, 64, 4);
    at_memory(c, 128, 3);
    at_memory(c, 256, 2);
    assert_int_equal(memory_loss_at(NULL, c, 300, &e, &why), 0);
    assert_true(isnan(e.value));
    assert_string_equal(why.data, "outside of 64..256 entries");
    at_loss(c, 2.5, 64 * pow(4, .75));
    at_loss(c, 4.5, -INFINITY);
    at_loss(c, 1.5, INFINITY);
    text_free(&why);
    memory_curves_free(&all);
}

/* 4 1 3 0 falls as 4 2 2 0. The loss at a memory is not made to fall. */
static void test_made_to_fall(void **state) {
    (void)state;
    result four[] = {config("h2o", "64", 64, -1, 4), config("h2o", "128", 128, -1, 1), config("h2o", "256", 256, -1, 3),
                     config("h2o", "512", 512, -1, 0)};
    results r = {.configs = four, .n_configs = 4};
    memory_curves all;
    assert_int_equal(memory_curves_find(&r, KL_EST, &all), 0);
    at_loss(&all.item[0], 3, 64 * sqrt(2));
    at_loss(&all.item[0], 2.2, 64 * pow(2, .9));
    at_loss(&all.item[0], 1.9, 256 * pow(2, .05));
    at_loss(&all.item[0], 1, 256 * sqrt(2));
    at_memory(&all.item[0], 128 * sqrt(2), 2);
    memory_curves_free(&all);
}

static void test_what_a_curve_is_made_of(void **state) {
    (void)state;
    result c[] = {
        config("rmm", "10%", 64, 8, 4),      config("rmm", "10%", 64, 16, 3), /* the better lag */
        config("rmm", "25%", 128, 16, 2),    config("rmm", "25%", 128, 8, 1),    config("rmm", "25%", 128, 16, 0),
        config("oracle", "10%", 64, 4, 1),   config("oracle", "25%", 128, 4, 0), config("oracle", "10%", 64, -1, 1),
        config("oracle", "128", 128, -1, 0), config("lone", "10%", 64, -1, 1),   config("twice", "64", 64, -1, 3),
        config("twice", "10%", 64, -1, 2), /* one memory, asked for twice */
        config("twice", "25%", 128, -1, 1),
    };
    c[4].pending = "free"; /* costs no memory: left out */
    results r = {.configs = c, .n_configs = sizeof c / sizeof *c};
    memory_curves all;
    assert_int_equal(memory_curves_find(&r, KL_EST, &all), 0);
    assert_int_equal(all.n, 3);
    assert_ptr_equal(all.item[0].point[0], &c[1]);
    assert_ptr_equal(all.item[0].point[1], &c[3]);
    assert_int_equal(all.item[0].n, 2);
    assert_ptr_equal(all.item[1].point[0], &c[7]);
    assert_int_equal(all.item[2].n, 2);
    assert_ptr_equal(all.item[2].point[0], &c[11]);
    assert_ptr_equal(all.item[2].point[1], &c[12]);
    assert_true(memory_is_real(&c[0]) && !memory_is_real(&c[4]) && !memory_is_real(&c[7]));
    memory_curves_free(&all);

    for (size_t i = 0; i + 1 < r.n_configs; i++) c[i].cost[COST_KV_BYTES] = 1000 * c[i].budget;
    assert_true(memory_pick_measure(&r) == MEMORY_ENTRIES);
    c[12].cost[COST_KV_BYTES] = 250000;
    assert_true(memory_pick_measure(&r) == MEMORY_KV_BYTES);
    assert_int_equal(memory_curves_find(&r, KL_EST, &all), 0);
    near(memory_most(&all.item[2]), 250000);
    memory_curves_free(&all);
}

static void test_references_and_round_losses(void **state) {
    (void)state;
    result c[] = {
        config("low", "64", 64, -1, 3),     config("low", "256", 256, -1, 2.9), /* 2.95 in the middle */
        config("best", "64", 64, -1, 4),    config("best", "256", 256, -1, 1),  /* 2.5 */
        config("rmm", "64", 64, 8, 1.5),    config("rmm", "256", 256, 8, .1),
        config("oracle", "64", 64, -1, .1), config("oracle", "256", 256, -1, 0),
    };
    results r = {.configs = c, .n_configs = sizeof c / sizeof *c};
    memory_curves all;
    const memory_curve *found;
    double losses[3];
    assert_int_equal(memory_curves_find(&r, KL_EST, &all), 0);
    assert_int_equal(memory_find_reference(&r, &all, NULL, &found), 0);
    assert_ptr_equal(found, &all.item[1]);
    assert_int_equal(memory_find_reference(&r, &all, "rmm", &found), 0);
    assert_ptr_equal(found, &all.item[2]);
    assert_int_equal(memory_find_reference(&r, &all, "tova", &found), 0);
    assert_null(found);
    /* best is between .0035 and .082, rmm between .0003 and .0064, low between .027 and .030. */
    assert_int_equal(memory_round_losses(&all, 3, losses), 1);
    near(losses[0], .005);
    c[0].metric[KL_EST] = .09; /* low: .027 to .09, shared with best: .05 (both), .005 (best and rmm) */
    assert_int_equal(memory_round_losses(&all, 3, losses), 2);
    near(losses[0], .005);
    near(losses[1], .05);
    c[2].kv_bits = c[3].kv_bits = "8"; /* coarse ones are no reference where there are others */
    assert_int_equal(memory_find_reference(&r, &all, NULL, &found), 0);
    assert_ptr_equal(found, &all.item[0]);
    c[0].kv_bits = c[1].kv_bits = "4";
    assert_int_equal(memory_find_reference(&r, &all, NULL, &found), 0);
    assert_ptr_equal(found, &all.item[1]);
    memory_curves_free(&all);
}

static void test_pareto(void **state) {
    (void)state;
    result c[] = {config("a", "1", 1, -1, 5), config("b", "1", 1, -1, 4), config("c", "2", 2, -1, 4),
                  config("d", "2", 2, -1, 3), config("e", "2", 2, -1, 3), config("f", "3", 3, -1, 3),
                  config("g", "4", 4, -1, 1), config("h", "4", 4, -1, 0)};
    double cost[] = {1, 1, 2, 2, 2, 3, 4, NAN};
    results r = {.configs = c, .n_configs = 8};
    const result **front;
    size_t n;
    assert_int_equal(memory_pareto(&r, cost, KL_EST, &front, &n), 0);
    assert_int_equal(n, 3);
    assert_ptr_equal(front[0], &c[1]);
    assert_ptr_equal(front[1], &c[3]);
    assert_ptr_equal(front[2], &c[6]);
    mem_free(front);
}

static void test_words(void **state) {
    (void)state;
    result two[] = {config("h2o", "64", 64, -1, 4), config("h2o", "512", 512, -1, 2)};
    const result *point[] = {&two[0], &two[1]};
    memory_curve c = {.n = 2, .point = point, .measure = MEMORY_ENTRIES};
    text t = {0};
    assert_int_equal(memory_add_estimate(&t, &c, (estimate){128, -INFINITY, 300}), 0);
    assert_int_equal(text_add(&t, "; "), 0);
    assert_int_equal(memory_add_estimate(&t, &c, (estimate){INFINITY, 500, INFINITY}), 0);
    assert_int_equal(text_add(&t, "; "), 0);
    assert_int_equal(memory_add_estimate(&t, &c, (estimate){100, NAN, NAN}), 0);
    assert_int_equal(text_add(&t, "; "), 0);
    assert_int_equal(memory_add_words(&t, MEMORY_KV_BYTES, 2600640), 0);
    assert_int_equal(text_add(&t, "; "), 0);
    assert_int_equal(memory_add_words(&t, MEMORY_KV_BYTES, 999.7), 0);
    assert_string_equal(t.data, "128 entries (<64 entries..300 entries); >512 entries (500 entries..>512 entries); "
                                "100 entries; 2.6 MB; 1 kB");
    text_free(&t);
}

/* ---- resampled -------------------------------------------------------------------------------------------------- */

enum { STEPS = 1024 };

static void add_row(made *m, const char *spec, const char *budget, double entries, double value, double noise) {
    double x[STEPS];
    for (size_t t = 0; t < STEPS; t++) x[t] = value * (1 + noise * made_normal(5, t));
    made_add(m, (made_row){.seq = "0", .spec = spec, .budget = budget, .entries = entries, .lag = -1, .first = x});
}

/* Every loss of both policies has the same noise, so that `half` needs half the memory of `whole` in every resample,
 * although neither memory is certain. */
static void test_shares_are_paired(void **state) {
    (void)state;
    made m;
    memory_curves all;
    estimate own, share, at;
    made_begin(&m, "memory", STEPS, true);
    for (int k = 0; k < 3; k++) {
        static const char *const asked[] = {"64", "128", "256", "512"};
        double value = .4 * pow(.25, k);
        add_row(&m, "half", asked[k], 64 << k, value, 3);
        add_row(&m, "whole", asked[k + 1], 64 << (k + 1), value, 3);
    }
    made_read(&m, 3);
    assert_int_equal(memory_curves_find(m.r, DLOSS_FIRST, &all), 0);
    assert_int_equal(all.n, 2);
    const memory_curve *half = &all.item[0], *whole = &all.item[1];
    assert_int_equal(memory_at_loss(m.b, half, .1, &own), 0);
    assert_true(own.lo > 64 && own.lo < .95 * own.value && own.hi > 1.05 * own.value && own.hi < 256);
    assert_int_equal(memory_share(m.b, half, whole, .1, &share), 0);
    near(share.value, .5);
    near(share.lo, .5);
    near(share.hi, .5);
    assert_int_equal(memory_share(m.b, whole, half, .1, &share), 0);
    near(share.hi, 2);
    /* At a budget that was run the loss is that configuration's, interval and all. */
    assert_int_equal(memory_loss_at(m.b, half, 128, &at, NULL), 0);
    assert_int_equal(bootstrap_estimate(m.b, half->point[1], DLOSS_FIRST, &own), 0);
    near(at.value, own.value);
    near(at.lo, own.lo);
    near(at.hi, own.hi);
    memory_curves_free(&all);
    made_free(&m);
}

/* What resamples say of a loss near an end of the curve, and of one beyond it. */
static void test_open_ends(void **state) {
    (void)state;
    made m;
    memory_curves all;
    estimate e;
    made_begin(&m, "ends", STEPS, true);
    add_row(&m, "h2o", "64", 64, .4, 3);
    add_row(&m, "h2o", "256", 256, .1, 3);
    add_row(&m, "flat", "64", 64, .05, 0);
    add_row(&m, "flat", "256", 256, .02, 0);
    made_read(&m, 3);
    assert_int_equal(memory_curves_find(m.r, DLOSS_FIRST, &all), 0);
    const memory_curve *h2o = &all.item[0], *flat = &all.item[1];
    double least = h2o->point[0]->metric[DLOSS_FIRST], most = h2o->point[1]->metric[DLOSS_FIRST];
    assert_int_equal(memory_at_loss(m.b, h2o, .98 * least, &e), 0);
    assert_true(isfinite(e.value) && e.lo == -INFINITY && e.hi > 64 && e.hi < 256);
    assert_int_equal(memory_at_loss(m.b, h2o, 1.02 * most, &e), 0);
    assert_true(isfinite(e.value) && e.lo > 64 && e.lo < 256 && e.hi == INFINITY);
    assert_int_equal(memory_at_loss(m.b, h2o, 10 * least, &e), 0);
    assert_true(e.value == -INFINITY && e.lo == -INFINITY && e.hi == -INFINITY);
    /* flat reaches .15 below 64, at an unknown memory: of what h2o needs that is between nothing and 64's share. */
    assert_int_equal(memory_at_loss(m.b, h2o, .2, &e), 0);
    estimate share;
    assert_int_equal(memory_share(m.b, flat, h2o, .2, &share), 0);
    assert_true(isnan(share.value) && share.lo == 0);
    near(share.hi, 64 / e.lo);
    assert_int_equal(memory_share(m.b, h2o, flat, .2, &share), 0);
    assert_true(isnan(share.value) && share.hi == INFINITY);
    near(share.lo, e.lo / 64);
    memory_curves_free(&all);
    made_free(&m);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_between_two_budgets),
        cmocka_unit_test(test_made_to_fall),
        cmocka_unit_test(test_what_a_curve_is_made_of),
        cmocka_unit_test(test_references_and_round_losses),
        cmocka_unit_test(test_pareto),
        cmocka_unit_test(test_words),
        cmocka_unit_test(test_shares_are_paired),
        cmocka_unit_test(test_open_ends),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
