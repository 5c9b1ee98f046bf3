#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "analyze/advice.h"
#include "tests/unit/results_build.h"

enum { STEPS = 256 };

/* A row whose loss is the same in every step, so that resamples do not differ and intervals have no width. */
static void add(made *m, const char *spec, const char *budget, double lag, double loss) {
    double x[STEPS];
    for (size_t t = 0; t < STEPS; t++) x[t] = loss;
    made_add(m, (made_row){.seq = "0", .spec = spec, .budget = budget, .lag = lag, .first = x});
}

/* 1 at lag 0, `least` at 8 and, with more pending, a bit more at 64. Knee by hand: lags at 0, 4 and 7 of 7, the chord
 * falls to the lowest point, so the depth at lag 8 is 1 - 4/7. */
static void add_waiting(made *m, const char *budget, double least) {
    add(m, "rmm", budget, 0, 1);
    add(m, "rmm", budget, 8, least);
    add(m, "rmm", budget, 64, least + 0.0625);
}

/* n values that scatter by 1, each by itself, around exactly `mean`. */
static void scatter(double *x, uint32_t stream, double mean) {
    double sum = 0;
    for (size_t t = 0; t < STEPS; t++) sum += x[t] = made_normal(stream, t);
    for (size_t t = 0; t < STEPS; t++) x[t] += mean - sum / STEPS;
}

static advice_list advise(made *m, double max_loss) {
    advice_list l;
    made_read(m, 3);
    assert_int_equal(advice_make(m->b, m->e, m->r, DLOSS_EST, max_loss, &l), 0);
    return l;
}

static void says(const advice_list *l, size_t i, const char *want) {
    text words = {0};
    assert_int_equal(advice_words(l, i, &words), 0);
    assert_string_equal(words.data, want);
    text_free(&words);
}

static void finish(made *m, advice_list *l) {
    advice_free(l);
    made_free(m);
}

static void test_waiting_is_best(void **state) {
    (void)state;
    made m;
    made_begin(&m, "advice", STEPS, true);
    add(&m, "h2o", NULL, -1, 0.375);
    add(&m, "ema", NULL, -1, 0.5);
    add_waiting(&m, NULL, 0.25);
    advice_list l = advise(&m, NAN);
    says(&l, 0,
         "For this text, at a budget of 64 entries, use rmm with lag 8: it costs 0.250 nats/token (90 % interval 0.250 "
         "to 0.250), 0.125 less than h2o, the best policy that does not wait (0.125 to 0.125, p < 0.001). Shorter lags "
         "cost more, and longer ones bring nothing; the knee is at lag 8.");
    finish(&m, &l);
}

static void test_not_waiting_is_best(void **state) {
    (void)state;
    made m;
    made_begin(&m, "advice", STEPS, false);
    add(&m, "ema", NULL, -1, 0.125);
    add_waiting(&m, NULL, 0.25);
    advice_list l = advise(&m, NAN);
    says(&l, 0,
         "For this text, at a budget of 64 entries, use ema: it costs 0.125 nats/token (90 % interval 0.125 to 0.125; "
         "uncalibrated), 0.125 less than rmm with lag 8, the best policy that waits (0.125 to 0.125, p < 0.001). "
         "Waiting does not pay at this budget; of the lags of rmm, 8 is the shortest that is no worse than its best, "
         "and the knee is at lag 8.");
    finish(&m, &l);
}

static void test_still_falling(void **state) {
    (void)state;
    made m;
    made_begin(&m, "advice", STEPS, true);
    add(&m, "rmm", NULL, 0, 1);
    add(&m, "rmm", NULL, 8, 0.25);
    add(&m, "oracle(mass)", NULL, -1, 0.0625);
    advice_list l = advise(&m, NAN);
    says(
        &l, 0,
        "For this text, at a budget of 64 entries, use rmm with lag 8: it costs 0.250 nats/token (90 % interval 0.250 "
        "to 0.250); no other policy was priced there. The loss still falls at the longest lag that was tried; there is "
        "no knee (too few lags).");
    finish(&m, &l);
}

static void test_nobody_waits(void **state) {
    (void)state;
    made m;
    made_begin(&m, "advice", STEPS, true);
    add(&m, "h2o", "25%", -1, 0.375);
    add(&m, "ema", "25%", -1, 0.5);
    advice_list l = advise(&m, NAN);
    says(&l, 0,
         "For this text, at a budget of 25 % (64 entries), use h2o: it costs 0.375 nats/token (90 % interval 0.375 to "
         "0.375), 0.125 less than ema, the next best (0.125 to 0.125, p < 0.001). No policy that waits was priced at "
         "this budget.");
    finish(&m, &l);
}

/* Bounds are never recommended: neither oracles nor entries that wait for free. */
static void test_bounds_are_no_choice(void **state) {
    (void)state;
    made m;
    double x[STEPS];
    made_begin(&m, "advice", STEPS, true);
    add(&m, "h2o", NULL, -1, 0.375);
    add(&m, "oracle(mass)", NULL, -1, 0.0625);
    for (size_t t = 0; t < STEPS; t++) x[t] = 0.125;
    made_add(&m, (made_row){.seq = "0", .spec = "rmm", .lag = 8, .pending = "free", .first = x});
    add(&m, "oracle(mass)", "32", -1, 0.125);
    advice_list l = advise(&m, NAN);
    assert_int_equal(l.n, 2);
    for (size_t i = 0; i < l.n; i++)
        if (strcmp(l.item[i].budget->asked, "64") == 0) assert_string_equal(l.item[i].pick->spec, "h2o");
        else assert_null(l.item[i].pick);
    l.main = strcmp(l.item[0].budget->asked, "32") == 0 ? 0 : 1;
    says(&l, l.main,
         "For this text, at a budget of 64 entries: nothing to recommend, since no policy but oracles has a value "
         "there.");
    finish(&m, &l);
}

/* Losses that scatter by 1 a step around means that differ by a thousandth: a tie, whatever the resamples. */
static void test_tie_names_the_cheaper(void **state) {
    (void)state;
    made m;
    double x[STEPS];
    made_begin(&m, "advice", STEPS, true);
    for (uint32_t i = 0; i < 3; i++) {
        static const char *const spec[] = {"h2o", "ema", "streaming"};
        static const double updates[] = {64, 60, 8};
        scatter(x, i, 0.5 + 0.001 * i);
        made_add(&m, (made_row){.seq = "0", .spec = spec[i], .lag = -1, .first = x, .updates = updates[i]});
    }
    advice_list l = advise(&m, NAN);
    const advice *a = &l.item[0];
    assert_string_equal(a->pick->spec, "h2o");
    assert_true(a->over.lo < 0 && a->over.hi > 0 && a->p > 0.1);
    assert_string_equal(a->cheaper->spec, "streaming"); /* 60 is no tenth below 64 */
    text words = {0};
    assert_int_equal(advice_words(&l, 0, &words), 0);
    assert_non_null(strstr(words.data, ", and cannot be told apart from ema, the next best (0.00"));
    assert_non_null(strstr(words.data, "The cheapest to run that these data cannot tell apart from it is streaming ("));
    assert_non_null(strstr(words.data, "it updates 8 scores a step instead of 64."));
    text_free(&words);
    finish(&m, &l);
}

/* Lag 4 cannot be told apart from lag 8, which is best; but it costs more than ema, and lag 8 does not. */
static void test_recommended_lag_must_stay_ahead(void **state) {
    (void)state;
    static const double at[] = {0, 4, 8}, loss[] = {2, 0.5, 0.35};
    made m;
    double x[STEPS];
    made_begin(&m, "advice", STEPS, true);
    for (uint32_t i = 0; i < 3; i++) {
        scatter(x, i, loss[i]);
        made_add(&m, (made_row){.seq = "0", .spec = "rmm", .lag = at[i], .first = x});
    }
    add(&m, "ema", NULL, -1, 0.4);
    advice_list l = advise(&m, NAN);
    assert_true(l.item[0].lag.recommended->lag == 4 && l.item[0].lag.best->lag == 8);
    assert_true(l.item[0].pick->lag == 8);
    text words = {0};
    assert_int_equal(advice_words(&l, 0, &words), 0);
    assert_non_null(strstr(words.data, "The lag is not settled: with this many compared, lag 4 is not ruled out (0.15 "
                                       "more, "));
    text_free(&words);
    finish(&m, &l);
}

static void add_three_budgets(made *m) {
    static const double h2o[] = {0.75, 0.25, 0.125}, ema[] = {0.5, 0.375, 0.25};
    static const char *const budget[] = {"10", "20", "40"};
    double x[STEPS];
    for (size_t i = 0; i < 6; i++) {
        for (size_t t = 0; t < STEPS; t++) x[t] = (i % 2 ? ema : h2o)[i / 2];
        made_add(m, (made_row){.seq = "0",
                               .spec = i % 2 ? "ema" : "h2o",
                               .budget = budget[i / 2],
                               .entries = 10 << i / 2,
                               .lag = -1,
                               .first = x});
    }
}

static const advice *at_main(const advice_list *l, const char *budget, const char *spec) {
    const advice *a = &l->item[l->main];
    assert_string_equal(a->budget->asked, budget);
    assert_string_equal(a->pick->spec, spec);
    return a;
}

static void test_main_budget(void **state) {
    (void)state;
    made m;
    made_begin(&m, "advice", STEPS, true);
    add_three_budgets(&m);
    advice_list l = advise(&m, NAN);
    assert_int_equal(l.n, 3);
    at_main(&l, "20", "h2o");
    advice_free(&l);
    assert_int_equal(advice_make(m.b, m.e, m.r, DLOSS_EST, 0.5, &l), 0);
    at_main(&l, "10", "ema");
    says(&l, l.main,
         "For this text, to lose at most 0.5, take a budget of 10 entries and ema: it costs 0.500 nats/token (90 % "
         "interval 0.500 to 0.500), 0.250 less than h2o, the next best (0.250 to 0.250, p < 0.001). No policy that "
         "waits was priced at this budget.");
    advice_free(&l);
    assert_int_equal(advice_make(m.b, m.e, m.r, DLOSS_EST, 0.375, &l), 0);
    at_main(&l, "20", "h2o");
    assert_true(l.met);
    /* From .75 at 10 to .25 at 20 on logarithmic scales: .375 at 10 2^(ln 2 / ln 3) = 15.49. */
    says(&l, l.main,
         "For this text, to lose at most 0.375, take a budget of 20 entries and h2o: it costs 0.250 nats/token (90 % "
         "interval 0.250 to 0.250), 0.125 less than ema, the next best (0.125 to 0.125, p < 0.001). By interpolation "
         "h2o "
         "loses 0.375 at 15.49 entries. No policy that waits was priced at this budget.");
    advice_free(&l);
    assert_int_equal(advice_make(m.b, m.e, m.r, DLOSS_EST, 0.1, &l), 0);
    at_main(&l, "40", "h2o");
    assert_false(l.met);
    says(&l, l.main,
         "No budget that was priced keeps the loss at 0.1 or less. For this text, at the largest one, 40 entries, use "
         "h2o: it costs 0.125 nats/token (90 % interval 0.125 to 0.125), 0.125 less than ema, the next best (0.125 to "
         "0.125, p < 0.001). No policy that waits was priced at this budget.");
    says(
        &l, 0,
        "At a budget of 10 entries, use ema: it costs 0.500 nats/token (90 % interval 0.500 to 0.500), 0.250 less than "
        "h2o, the next best (0.250 to 0.250, p < 0.001).");
    finish(&m, &l);
}

static void test_without_resamples(void **state) {
    (void)state;
    made m;
    made_begin(&m, "advice", STEPS, true);
    add(&m, "h2o", NULL, -1, 0.375);
    add_waiting(&m, NULL, 0.25);
    advice_list l = advise(&m, NAN);
    bootstrap *bare;
    advice_free(&l);
    assert_int_equal(bootstrap_new(m.r, NULL, 3, &bare), 0);
    assert_int_equal(advice_make(bare, NULL, m.r, DLOSS_EST, NAN, &l), 0);
    says(&l, 0,
         "For this text, at a budget of 64 entries, the lowest estimate is that of rmm with lag 8: it costs 0.250 "
         "nats/token, 0.125 less than h2o, the best policy that does not wait. There are no intervals, so these "
         "differences may be chance: no FILE.blocks.h5 stands beside the results, and there are fewer than 5 "
         "sequences.");
    bootstrap_free(bare);
    finish(&m, &l);
}

/* A value as its interval deserves: two digits of a third of the width. */
static void test_numbers(void **state) {
    (void)state;
    static const struct {
        estimate e;
        const char *value, *interval;
    } cases[] = {
        {{0.03117, 0.02214, 0.04302}, "0.0312", "0.0221 to 0.0430"}, /* .0209 / 3 = .0070: four decimals */
        {{0.3117, 0.1214, 0.7302}, "0.31", "0.12 to 0.73"},
        {{12.34, 5.1, 45.2}, "12", "5 to 45"},
        {{-0.00041, -0.03, 0.03}, "0.000", "-0.030 to 0.030"}, /* no -0.000 */
        {{1234.5, NAN, NAN}, "1234", ""},
        {{0.0312345, NAN, NAN}, "0.0312", ""},
        {{0, NAN, NAN}, "0.000", ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        text t = {0};
        assert_int_equal(advice_value(&t, cases[i].e), 0);
        assert_string_equal(t.data, cases[i].value);
        t.n = 0;
        if (*cases[i].interval) {
            assert_int_equal(advice_interval(&t, cases[i].e), 0);
            assert_string_equal(t.data, cases[i].interval);
        }
        text_free(&t);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_waiting_is_best),
        cmocka_unit_test(test_not_waiting_is_best),
        cmocka_unit_test(test_still_falling),
        cmocka_unit_test(test_nobody_waits),
        cmocka_unit_test(test_bounds_are_no_choice),
        cmocka_unit_test(test_tie_names_the_cheaper),
        cmocka_unit_test(test_recommended_lag_must_stay_ahead),
        cmocka_unit_test(test_main_budget),
        cmocka_unit_test(test_without_resamples),
        cmocka_unit_test(test_numbers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
