/* Wrappers: what their spellings come to, and what cut-offs, tapers, competition and prompts do, by hand. */
#include "base/err.h"
#include "base/mem.h"
#include "sim/config.h"
#include "sim/registry.h"
#include "sim/replay.h"
#include "sim/wrapper.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { T_MAX = 32, UNITS_MAX = 3 };

static sim_config config_of(const char *spec, const char *budget, const char *schedule, int32_t n_tokens,
                            int32_t n_prompt) {
    sim_flags flags = {.budgets = budget, .schedule = schedule, .n_prompt = n_prompt};
    sim_asks asks;
    sim_config c;
    if (sim_asks_build(&spec, 1, &flags, &asks)) fail_msg("%s", err_message());
    assert_int_equal(asks.n, 1);
    if (sim_config_resolve(&asks.ask[0], &flags, n_tokens, 0, &c)) fail_msg("%s", err_message());
    sim_asks_free(&asks);
    return c;
}

/* ---- spellings -------------------------------------------------------------------------------------------------- */

static void wrappers_are_parameters(void **state) {
    (void)state;
    static const char *const cases[][2] = {
        {"lag(8,h2o)", "h2o(cutoff=lag)"},
        {"lag( h2o , lag = 8 )", "h2o(cutoff=lag)"},
        {"lag(inf,ema(alpha=.9))", "ema(alpha=0.9)"},
        {"ada(h2o)", "h2o(share=layer)"},
        {"ada(tova,0.1)", "tova(unit=head,share=layer,floor=0.1)"},
        {"flat(h2o)", "h2o(share=model,floor=0)"},
        {"flat(tova(unit=layer),floor=.20)", "tova(share=model)"},
        {"pyramid(h2o)", "h2o(taper=20)"},
        {"pyramid(window,beta=3)", "window(taper=3)"},
        {"blocks(4,window)", "window"}, /* the schedule has a column of its own */
        {"then(ema(hold=2,alpha=0.50),lru)", "lru(prompt=ema(alpha=0.5,hold=2))"},
        {"then(oracle(mass),h2o)", "h2o(prompt=oracle(mass))"},
        {"lag(4,ada(then(window,pyramid(h2o,2)),0))", "h2o(cutoff=lag,share=layer,floor=0,taper=2,prompt=window)"},
    };
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        sim_config c = config_of(cases[k][0], "12", NULL, 30, 6);
        assert_string_equal(c.spec, cases[k][1]);
        if (strstr(c.spec, "lag")) { /* the lag, too, has its column */
            sim_config_free(&c);
            continue;
        }
        sim_config again = config_of(c.spec, "12", c.schedule_text, 30, 6);
        assert_string_equal(again.spec, c.spec);
        assert_string_equal(again.resolved, c.resolved);
        sim_config_free(&again);
        sim_config_free(&c);
    }
}

static void wrappers_are_refused_by_name(void **state) {
    (void)state;
    static const char *const cases[][2] = {
        {"adda(h2o)", "did you mean ada?"},
        {"ada", "goes around a policy: ada(POLICY"},
        {"ada()", "empty argument"},
        {"ada(h2o,flor=1)", "ada has no 'flor'"},
        {"ada(h2o,0.1,0.2)", "too many arguments"},
        {"ada(h2o,0.1,floor=0.2)", "given twice"},
        {"ada(h2o,floor=2)", "out of range"},
        {"ada(flat(h2o))", "'share' is given twice"},
        {"ada(full)", "no parameter 'share'"},
        {"ada(tova(unit=layer))", "nobody to compete"},
        {"ada(h20)", "did you mean h2o"},
        {"ada(h2o", "')' is missing"},
        {"ada(h2o))", "after the closing"},
        {"lag(h2o)", "needs a lag"},
        {"lag(-1,h2o)", "out of range"},
        {"lag(8,lag(8,h2o))", "'cutoff' is given twice"},
        {"lag(8,rmm(lag=2))", "'lag' is given twice"},
        {"lag(8,oracle(mass))", "looks ahead"},
        {"blocks(h2o)", "n is missing"},
        {"blocks(0,h2o)", "block:n"},
        {"pyramid(h2o,0.5)", "out of range"},
        {"pyramid(h2o(unit=model),2)", "one budget"},
        {"then(h2o)", "first is missing"},
        {"then(full,h2o)", "evicts nothing"},
        {"then(oracle,h2o)", "needs of"},
        {"then(h2o(unit=layer),h2o)", "unit is a matter of the policy that goes on"},
        {"then(ada(h2o),h2o)", "unit is a matter"},
        {"then(h2o(hold=1|2),h2o)", "a list cannot stand in it"},
        {"then(oracle(mass),oracle(loss))", "different futures"},
        {"h2o(floor=0.1)", "floor goes with share"},
        {"flat(oracle(mass))", "full run"},
        {"lag(1,lag(1,lag(1,lag(1,lag(1,lag(1,lag(1,lag(1,lag(1,lag(1,lag(1,lag(1,lag(1,lag(1,lag(1,lag(1,lag(1,lag(1,"
         "h2o))))))))))))))))))",
         "nested too deeply"},
    };
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        sim_flags flags = {.budgets = "8", .n_prompt = 4};
        sim_asks asks;
        sim_config c = {0};
        int code = sim_asks_build(&cases[k][0], 1, &flags, &asks);
        if (!code) code = sim_config_resolve(&asks.ask[0], &flags, 32, 0, &c);
        assert_int_equal(code, ERR_USAGE);
        if (!strstr(err_message(), cases[k][1])) fail_msg("'%s': %s", cases[k][0], err_message());
        sim_config_free(&c);
        sim_asks_free(&asks);
    }
}

static void no_wrapper_has_a_policys_name(void **state) {
    (void)state;
    for (const wrapper *w = wrappers; w->name; w++) {
        assert_non_null(w->usage);
        assert_non_null(w->help);
        assert_null(policy_find(w->name));
    }
}

static void a_lag_may_be_a_list(void **state) {
    (void)state;
    const char *specs[] = {"lag(0|3,h2o)", "lag(window)"};
    sim_flags flags = {.budgets = "8", .lags = "1,2,4", .n_prompt = -1};
    sim_asks asks;
    assert_int_equal(sim_asks_build(specs, 2, &flags, &asks), 0);
    assert_int_equal(asks.n, 2 + 3);
    sim_config c;
    assert_int_equal(sim_config_resolve(&asks.ask[1], &flags, 32, 0, &c), 0);
    assert_int_equal(c.lag, 3);
    assert_int_equal(c.cutoff, 3);
    assert_int_equal(c.hold, 4); /* h2o's own */
    sim_config_free(&c);
    assert_int_equal(sim_config_resolve(&asks.ask[4], &flags, 32, 0, &c), 0);
    assert_int_equal(c.lag, 4);
    sim_config_free(&c);
    sim_asks_free(&asks);
}

/* ---- budgets of layers ------------------------------------------------------------------------------------------ */

#define ASSERT_BUDGETS(c, ...)                                                                               \
    do {                                                                                                     \
        const int32_t want_[] = {__VA_ARGS__};                                                               \
        int n_ = (int)(sizeof want_ / sizeof *want_);                                                        \
        for (int l_ = 0; l_ < n_; l_++) assert_int_equal(sim_config_limits(&(c), l_, n_).budget, want_[l_]); \
    } while (0)

/* B 12, beta 3: the last layer has 12/3 = 4, the first 24 - 4 = 20. */
static void budgets_fall_from_layer_to_layer(void **state) {
    (void)state;
    sim_config c = config_of("pyramid(h2o,beta=3)", "12", NULL, 100, -1);
    ASSERT_BUDGETS(c, 20, 16, 12, 8, 4);
    ASSERT_BUDGETS(c, 12);                                        /* one layer has it all */
    assert_int_equal(sim_config_limits(&c, 0, 5).guard.hold, 10); /* budget/2 of its own */
    assert_int_equal(sim_config_limits(&c, 4, 5).guard.hold, 2);
    sim_config_free(&c);
    c = config_of("pyramid(window,beta=3)", "12", NULL, 16, -1); /* no more than there is */
    ASSERT_BUDGETS(c, 16, 14, 12, 10, 8);
    sim_config_free(&c);
    c = config_of("pyramid(window,beta=2)", "5", NULL, 100, -1); /* 7.5, 5, 2.5: halves go to the even side */
    ASSERT_BUDGETS(c, 8, 5, 2);
    sim_config_free(&c);
    c = config_of("pyramid(h2o(hold=6),beta=3)", "12", NULL, 100, -1); /* 4 entries cannot hold 6 */
    ASSERT_BUDGETS(c, 12, 12, 12);
    assert_non_null(strstr(c.resolved, "taper=1,"));
    sim_config_free(&c);
}

/* ---- replays ---------------------------------------------------------------------------------------------------- */

typedef struct outcome {
    int32_t resident[UNITS_MAX][T_MAX], n[UNITS_MAX];
} outcome;

/* rows[unit][t][0..t], one query head a unit; NULL = the same for all entries. */
static outcome replay_units(const sim_config *c, int n_units, int32_t n_tokens, const float (*rows)[T_MAX][T_MAX]) {
    replay *r[UNITS_MAX];
    int32_t evict_at[UNITS_MAX][T_MAX];
    float even[T_MAX];
    outcome out;
    policy_shape shape = {.n_layer = 1, .n_head = 1, .n_kv = 1};
    for (int i = 0; i < T_MAX; i++) even[i] = 1;
    for (int u = 0; u < n_units; u++) {
        assert_int_equal(replay_new(c, n_tokens, &shape, &r[u]), 0);
        replay_begin(r[u], &(replay_unit){.kv_head = u, .n_head = 1}, evict_at[u]);
    }
    for (int32_t t = 0; t < n_tokens; t++) {
        const float *heads[UNITS_MAX];
        for (int u = 0; u < n_units; u++) {
            heads[u] = rows ? rows[u][t] : even;
            replay_attend(r[u], t, &heads[u], &(replay_facts){.correct = true, .counted = true});
        }
        replay_evict_together(r, n_units);
    }
    for (int u = 0; u < n_units; u++) {
        const int32_t *resident = replay_residents(r[u], &out.n[u]);
        memcpy(out.resident[u], resident, (size_t)out.n[u] * sizeof *resident);
        replay_free(r[u]);
    }
    return out;
}

#define ASSERT_RESIDENTS(o, u, ...)                                \
    do {                                                           \
        const int32_t want_[] = {__VA_ARGS__};                     \
        assert_int_equal((o).n[u], sizeof want_ / sizeof *want_);  \
        assert_memory_equal((o).resident[u], want_, sizeof want_); \
    } while (0)

/* Sums after step 2: entry 0 has 1 + .1 + .05 = 1.15, entry 1 has .9 + .9 = 1.8. Cut off at the own row they are 1 and
 * .9; at the row after it, 1.1 and 1.8. */
static void evidence_ends_at_the_cut_off(void **state) {
    (void)state;
    static const float rows[1][T_MAX][T_MAX] = {{{1}, {.1f, .9f}, {.05f, .9f, .05f}}};
    sim_config c = config_of("h2o(hold=1)", "2", NULL, 3, -1);
    outcome o = replay_units(&c, 1, 3, rows);
    ASSERT_RESIDENTS(o, 0, 1, 2);
    sim_config_free(&c);
    c = config_of("lag(0,h2o(hold=1))", "2", NULL, 3, -1);
    o = replay_units(&c, 1, 3, rows);
    ASSERT_RESIDENTS(o, 0, 0, 2);
    sim_config_free(&c);
    c = config_of("lag(1,h2o(hold=1))", "2", NULL, 3, -1);
    o = replay_units(&c, 1, 3, rows);
    ASSERT_RESIDENTS(o, 0, 1, 2);
    sim_config_free(&c);
}

/* Divisors end there as well: after step 3 the mean of entry 0 is (1+.5+.4+0)/4 = .475, or at row 1 (1+.5)/2 = .75;
 * that of entry 1 is (.5+.5+1)/3 = .667, or at row 2 .5. */
static void divisors_and_last_uses_end_at_the_cut_off(void **state) {
    (void)state;
    static const float rows[1][T_MAX][T_MAX] = {
        {{1}, {.5f, .5f}, {.4f, .5f, .1f}, {0, 1, 0, 0}, {0, 0, 1, 0, 0}, {0, 0, 1, 0, 0, 0}}};
    static const char *const specs[] = {"lru(tau=0.3,hold=0)", "lag(1,lru(tau=0.3,hold=0))"};
    /* Last uses after step 5: entry 0 at 2, 1 at 3, 2 at 5, the others at arrival. Cut off one row after arrival: 1, 2,
     * 2, 3, 4, 5. */
    static const int32_t stay[2][3] = {{2, 4, 5}, {3, 4, 5}};
    for (int k = 0; k < 2; k++) {
        sim_config c = config_of(specs[k], "3", "watermark:1", 6, 6);
        outcome o = replay_units(&c, 1, 6, rows);
        assert_int_equal(o.n[0], 3);
        assert_memory_equal(o.resident[0], stay[k], sizeof stay[k]);
        sim_config_free(&c);
    }
    sim_config c = config_of("mix(memory=mean)", "1", NULL, 4, 4);
    outcome o = replay_units(&c, 1, 4, rows);
    ASSERT_RESIDENTS(o, 0, 1);
    sim_config_free(&c);
    c = config_of("lag(1,mix(memory=mean))", "1", NULL, 4, 4);
    o = replay_units(&c, 1, 4, rows);
    ASSERT_RESIDENTS(o, 0, 0);
    sim_config_free(&c);
}

/* Two units with B 2 after step 2: of six entries two leave, the lowest of all. */
static void units_compete_for_what_they_have_together(void **state) {
    (void)state;
    static const float rows[2][T_MAX][T_MAX] = {{{1}, {.5f, .5f}, {.5f, .3f, .2f}},
                                                {{1}, {.5f, .5f}, {.34f, .33f, .33f}}};
    static const struct {
        const char *spec;
        int32_t n[2], first[3], second[3];
    } cases[] = {
        {"mix(memory=last,share=layer,floor=0)", {1, 3}, {0}, {0, 1, 2}},
        {"mix(memory=last,share=layer,floor=0.5)", {1, 3}, {0}, {0, 1, 2}},
        {"mix(memory=last,share=layer,floor=0.9)", {1, 3}, {0}, {0, 1, 2}}, /* 0.9 of 2 is one whole entry */
        {"mix(memory=last,share=layer,floor=1)", {2, 2}, {0, 1}, {0, 2}},
        {"mix(memory=last,share=layer,hold=1)", {2, 2}, {0, 2}, {0, 2}}, /* .3 and, of the two .33, the first */
        {"mix(memory=last,share=model,sinks=1,hold=1)", {2, 2}, {0, 2}, {0, 2}},
    };
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        sim_config c = config_of(cases[k].spec, "2", NULL, 3, 3);
        outcome o = replay_units(&c, 2, 3, rows);
        const int32_t *want[2] = {cases[k].first, cases[k].second};
        for (int u = 0; u < 2; u++) {
            if (o.n[u] != cases[k].n[u]) fail_msg("%s: unit %d keeps %d", cases[k].spec, u, o.n[u]);
            assert_memory_equal(o.resident[u], want[u], (size_t)o.n[u] * sizeof **want);
        }
        sim_config_free(&c);
    }
}

/* Nothing tells the entries apart: the first unit loses its oldest first. */
static void ties_go_to_the_first_unit(void **state) {
    (void)state;
    sim_config c = config_of("mix(memory=last,share=layer,floor=0)", "2", NULL, 4, 4);
    outcome o = replay_units(&c, 3, 4, NULL);
    assert_int_equal(o.n[0], 0);
    ASSERT_RESIDENTS(o, 1, 2, 3);
    ASSERT_RESIDENTS(o, 2, 0, 1, 2, 3);
    sim_config_free(&c);
    c = config_of("mix(memory=last,share=layer,floor=0.2)", "2", NULL, 4, 4); /* one entry at least */
    o = replay_units(&c, 3, 4, NULL);
    ASSERT_RESIDENTS(o, 0, 3);
    ASSERT_RESIDENTS(o, 1, 3);
    ASSERT_RESIDENTS(o, 2, 0, 1, 2, 3);
    sim_config_free(&c);
}

/* Blocks of two; the mean of a block decides, whoever's it is. */
static void blocks_of_all_units_compete(void **state) {
    (void)state;
    static const float rows[2][T_MAX][T_MAX] = {{{1}, {1, 1}, {1, 1, 1}, {.1f, .1f, .4f, .4f}},
                                                {{1}, {1, 1}, {1, 1, 1}, {.2f, .2f, .3f, .3f}}};
    sim_config c = config_of("mix(memory=last,share=layer,floor=0)", "3", "block:2", 4, 4);
    outcome o = replay_units(&c, 2, 4, rows); /* 8 entries, 6 may stay */
    ASSERT_RESIDENTS(o, 0, 2, 3);
    ASSERT_RESIDENTS(o, 1, 0, 1, 2, 3);
    sim_config_free(&c);
}

/* The window with two sinks evicts at the prompt's end, after step 5: 0, 1 and 5 stay. Then the sums decide: 0 and 1
 * are the oldest. With the window alone it would be 6, 7, 8. */
static void another_policy_evicts_at_the_prompts_end(void **state) {
    (void)state;
    sim_config c = config_of("then(streaming(sinks=2),h2o(hold=1))", "3", NULL, 9, 6);
    outcome o = replay_units(&c, 1, 6, NULL);
    ASSERT_RESIDENTS(o, 0, 0, 1, 5);
    o = replay_units(&c, 1, 9, NULL);
    ASSERT_RESIDENTS(o, 0, 0, 1, 8);
    sim_config_free(&c);
    c = config_of("then(streaming(sinks=2),window)", "3", NULL, 9, 6);
    o = replay_units(&c, 1, 9, NULL);
    ASSERT_RESIDENTS(o, 0, 6, 7, 8);
    sim_config_free(&c);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(wrappers_are_parameters),
        cmocka_unit_test(wrappers_are_refused_by_name),
        cmocka_unit_test(no_wrapper_has_a_policys_name),
        cmocka_unit_test(a_lag_may_be_a_list),
        cmocka_unit_test(budgets_fall_from_layer_to_layer),
        cmocka_unit_test(evidence_ends_at_the_cut_off),
        cmocka_unit_test(divisors_and_last_uses_end_at_the_cut_off),
        cmocka_unit_test(units_compete_for_what_they_have_together),
        cmocka_unit_test(ties_go_to_the_first_unit),
        cmocka_unit_test(blocks_of_all_units_compete),
        cmocka_unit_test(another_policy_evicts_at_the_prompts_end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
