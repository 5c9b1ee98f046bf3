/* The worked examples of DESIGN section 4, guards and schedules by hand, and masked sums by hand. */
#include "base/err.h"
#include "base/mem.h"
#include "sim/config.h"
#include "sim/estimate.h"
#include "sim/footprint.h"
#include "sim/replay.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { T_MAX = 64 };

/* What one replay of one unit left behind. */
typedef struct outcome {
    int32_t evict_at[T_MAX];
    int32_t resident[T_MAX], n;
} outcome;

typedef struct setting {
    const char *budget, *lags, *schedule, *pending;
    int32_t n_tokens, n_prompt, window;
} setting;

/* Equal attention on everything visible. */
static void fill_uniform(float *row, int32_t t) {
    for (int32_t i = 0; i <= t; i++) row[i] = 1.0f / (float)(t + 1);
}

/* rows[head][t] points to t+1 values; NULL = uniform with one head. */
static outcome replay_one(const char *spec, const setting *s, const float *const rows[][T_MAX], int n_head,
                          const replay_facts *facts) {
    sim_flags flags = {
        .budgets = s->budget, .lags = s->lags, .schedule = s->schedule, .pending = s->pending, .n_prompt = s->n_prompt};
    sim_asks asks;
    sim_config c;
    replay *r;
    outcome out = {.n = 0};
    if (sim_asks_build(&spec, 1, &flags, &asks)) fail_msg("%s", err_message());
    assert_int_equal(asks.n, 1);
    if (sim_config_resolve(&asks.ask[0], &flags, s->n_tokens, 0, &c)) fail_msg("%s", err_message());
    assert_int_equal(replay_new(&c, s->n_tokens, &(policy_shape){.n_layer = 1, .n_head = n_head, .n_kv = 1}, &r), 0);
    replay_unit unit = {.n_head = n_head, .window = s->window};
    replay_begin(r, &unit, out.evict_at);
    for (int32_t t = 0; t < s->n_tokens; t++) {
        float uniform[T_MAX];
        const float *heads[4] = {uniform};
        fill_uniform(uniform, t);
        for (int h = 0; rows && h < n_head; h++) heads[h] = rows[h][t];
        replay_facts plain = {.correct = true, .counted = t < s->n_tokens - 1};
        replay_step(r, t, heads, facts ? &facts[t] : &plain);
    }
    const int32_t *resident = replay_residents(r, &out.n);
    memcpy(out.resident, resident, (size_t)out.n * sizeof *resident);
    replay_free(r);
    sim_config_free(&c);
    sim_asks_free(&asks);
    return out;
}

#define ASSERT_RESIDENTS(o, ...)                                \
    do {                                                        \
        const int32_t want_[] = {__VA_ARGS__};                  \
        assert_int_equal((o).n, sizeof want_ / sizeof *want_);  \
        assert_memory_equal((o).resident, want_, sizeof want_); \
    } while (0)

static void streaming_example(void **state) {
    (void)state;
    outcome o = replay_one("streaming(sinks=4)", &(setting){.budget = "8", .n_tokens = 21}, NULL, 1, NULL);
    ASSERT_RESIDENTS(o, 0, 1, 2, 3, 17, 18, 19, 20);
    /* Entry 4 is the first to go, after step 8: query 9 no longer sees it. */
    assert_int_equal(o.evict_at[4], 9);
    assert_int_equal(o.evict_at[16], 21);
    assert_int_equal(o.evict_at[0], 22);
    outcome w = replay_one("window", &(setting){.budget = "8", .n_tokens = 21}, NULL, 1, NULL);
    ASSERT_RESIDENTS(w, 13, 14, 15, 16, 17, 18, 19, 20);
}

static const float r0[] = {1}, r1[] = {.6f, .4f}, r2[] = {.5f, .3f, .2f}, r3[] = {.1f, .6f, .2f, .1f};
static const float q1[] = {.2f, .8f}, q2[] = {.1f, .8f, .1f}, q3[] = {.3f, .1f, .4f, .2f};
static const float *const example[2][T_MAX] = {{r0, r1, r2, r3}, {r0, q1, q2, q3}};

static void h2o_example(void **state) {
    (void)state;
    outcome o = replay_one("h2o(recent=1)", &(setting){.budget = "2", .n_tokens = 3}, example, 1, NULL);
    ASSERT_RESIDENTS(o, 0, 2);
    assert_int_equal(o.evict_at[1], 3);
    o = replay_one("h2o(recent=1)", &(setting){.budget = "2", .n_tokens = 3}, example, 2, NULL);
    ASSERT_RESIDENTS(o, 0, 2);
    /* Step 3: row .25 .5 .25 over {0,2,3}; sums 2.35, .7, .25; 3 is held, so 2 goes. */
    o = replay_one("h2o(recent=1)", &(setting){.budget = "2", .n_tokens = 4}, example, 1, NULL);
    ASSERT_RESIDENTS(o, 0, 3);
}

static void a_tie_goes_to_the_lowest_index(void **state) {
    (void)state;
    static const float a[] = {1}, b[] = {.5f, .5f}, c[] = {.25f, .25f, .5f};
    static const float *const rows[1][T_MAX] = {{a, b, c}};
    outcome o = replay_one("tova(unit=head)", &(setting){.budget = "2", .n_tokens = 3}, rows, 1, NULL);
    ASSERT_RESIDENTS(o, 1, 2);
}

static void every_never_exceeds_the_budget(void **state) {
    (void)state;
    /* B=8, P=4: after steps 7, 11, 15 ... down to 5. After step 7 entries 3..7; after 11 entries 7..11. */
    outcome o = replay_one("window", &(setting){.budget = "8", .schedule = "every:4", .n_tokens = 14}, NULL, 1, NULL);
    ASSERT_RESIDENTS(o, 7, 8, 9, 10, 11, 12, 13);
    assert_int_equal(o.evict_at[2], 8);
    assert_int_equal(o.evict_at[3], 12);
    footprint f = {0};
    int32_t scratch[T_MAX];
    footprint_add(&f, o.evict_at, 14, 0, 0, 0, NULL, 0, scratch);
    assert_true(f.peak == 9); /* 8 residents and the arriving one see each other in its row */
    assert_true(f.evictions == 7 && f.batches == 2);
}

static void watermark_goes_down_to_a_share(void **state) {
    (void)state;
    /* B=10, f=.7: after step 10 (11 residents) down to 7: entries 4..10. */
    outcome o =
        replay_one("window", &(setting){.budget = "10", .schedule = "watermark:0.7", .n_tokens = 13}, NULL, 1, NULL);
    ASSERT_RESIDENTS(o, 4, 5, 6, 7, 8, 9, 10, 11, 12);
    assert_int_equal(o.evict_at[3], 11);
}

static void blocks_leave_whole(void **state) {
    (void)state;
    /* B=10, blocks of 4, one sink: block 0..3 holds the sink; after step 10 block 4..7 leaves. */
    outcome o = replay_one("streaming(sinks=1)", &(setting){.budget = "10", .schedule = "block:4", .n_tokens = 11},
                           NULL, 1, NULL);
    ASSERT_RESIDENTS(o, 0, 1, 2, 3, 8, 9, 10);
}

static void prompt_evicts_once(void **state) {
    (void)state;
    outcome o = replay_one("window", &(setting){.budget = "3", .schedule = "prompt", .n_tokens = 9, .n_prompt = 6},
                           NULL, 1, NULL);
    ASSERT_RESIDENTS(o, 3, 4, 5, 6, 7, 8);
    assert_int_equal(o.evict_at[2], 6); /* after step 5 */
    /* Under `step` nothing leaves inside the prompt either. */
    o = replay_one("window", &(setting){.budget = "3", .n_tokens = 9, .n_prompt = 6}, NULL, 1, NULL);
    ASSERT_RESIDENTS(o, 6, 7, 8);
    assert_int_equal(o.evict_at[0], 6);
    assert_int_equal(o.evict_at[3], 7);
}

static void pending_entries_are_free_or_charged(void **state) {
    (void)state;
    setting s = {.budget = "4", .lags = "3", .pending = "charged", .n_tokens = 20};
    outcome o = replay_one("rmm", &s, NULL, 1, NULL);
    assert_int_equal(o.n, 4); /* three held, one judged */
    assert_int_equal(o.resident[1], 17);
    s.pending = "free";
    o = replay_one("rmm", &s, NULL, 1, NULL);
    assert_int_equal(o.n, 7); /* the pool holds 4, three more are pending */
    assert_int_equal(o.resident[4], 17);
}

static void rmm_measures_what_follows_an_arrival(void **state) {
    (void)state;
    /* Entry 1 is attended to at step 2 (prediction right), entry 0 at step 1 (prediction wrong). B=2, lag 1: after
     * step 2 the candidates are 0 (0/1) and 1 (.7/1): 0 leaves although its raw attention was higher. */
    static const float a[] = {1}, b[] = {.9f, .1f}, c[] = {.2f, .7f, .1f};
    static const float *const rows[1][T_MAX] = {{a, b, c}};
    replay_facts facts[3] = {{.correct = true}, {.correct = false}, {.correct = true}};
    setting s = {.budget = "2", .lags = "1", .n_tokens = 3};
    outcome o = replay_one("rmm", &s, rows, 1, facts);
    ASSERT_RESIDENTS(o, 1, 2);
    o = replay_one("rmm(signal=uniform)", &s, rows, 1, facts);
    ASSERT_RESIDENTS(o, 0, 2);
    outcome m = replay_one("mix(evidence=attn,memory=first:1,hold=1)", &(setting){.budget = "2", .n_tokens = 3}, rows,
                           1, facts);
    assert_memory_equal(o.evict_at, m.evict_at, 3 * sizeof(int32_t));
}

static void a_window_expires_free_of_charge(void **state) {
    (void)state;
    /* Window 4, budget 3: entries inside the window count. Entry i is gone at step i+4 at the latest. */
    outcome o = replay_one("streaming(sinks=1)", &(setting){.budget = "3", .n_tokens = 8, .window = 4}, NULL, 1, NULL);
    assert_int_equal(o.evict_at[0], 4); /* the sink expires at step 4 */
    assert_int_equal(o.evict_at[1], 4); /* evicted after step 3, its last step in the window but one */
    ASSERT_RESIDENTS(o, 5, 6, 7);
    footprint f = {0};
    int32_t scratch[T_MAX];
    outcome full = replay_one("full", &(setting){.budget = "3", .n_tokens = 8, .window = 4}, NULL, 1, NULL);
    footprint_add(&f, full.evict_at, 8, 0, 4, 0, NULL, 0, scratch);
    assert_true(f.evictions == 0 && f.peak == 4 && f.visible == 1 + 2 + 3 + 4 * 5);
}

static void a_budget_of_everything_evicts_nothing(void **state) {
    (void)state;
    const char *specs[] = {"window", "streaming", "random", "h2o", "ema", "tova", "lru", "rmm(lag=2)", "oracle(mass)"};
    for (size_t k = 0; k < sizeof specs / sizeof *specs; k++) {
        outcome o = replay_one(specs[k], &(setting){.budget = "100%", .n_tokens = 20}, NULL, 1, NULL);
        for (int i = 0; i < 20; i++) assert_int_equal(o.evict_at[i], 21);
    }
}

static void delta_of_one_evicted_entry(void **state) {
    (void)state;
    /* p = .5 .3 .2, v = 1 2 3, entry 0 evicted: o = 1.7, o' = 2.4, kept .5, delta = a/(1-a) (o - v). */
    float a[16] __attribute__((aligned(64))) = {.5f, .3f, .2f}, v[16] __attribute__((aligned(64))) = {1, 2, 3},
                d[16] __attribute__((aligned(64)));
    _Alignas(64) float lanes[2 * KERNEL_STREAMS_MAX * KERNEL_LANES];
    assert_int_equal(estimate_lanes(2), sizeof lanes / sizeof *lanes);
    uint16_t none = 0, first = 1, both = 3;
    estimate_row row;
    double out[3][2];
    estimate_lost lost[] = {{&first, 1, out[0], 0, 0}, {&both, 2, out[1], 1, 0}, {&none, 0, out[2], 2, 0}};
    estimate_prepare(a, 2, (const float *const[]){v}, 1, 16, d, NULL, &row);
    estimate_masked(&row, 1, lost, 2, lanes);
    assert_true(fabs(out[0][0] - .5) < 1e-6 && fabs(out[0][1] - .7) < 1e-6);
    assert_true(fabs(out[1][0] - .8) < 1e-6 && fabs(out[1][1] - 1.3) < 1e-6); /* the visible side is summed */
    estimate_masked(&row, 1, lost + 2, 1, lanes);
    assert_true(out[2][0] == 0 && out[2][1] == 0);
    assert_int_equal(lost[0].floored + lost[1].floored + lost[2].floored, 0);
}

/* Two heads of 8 streams are 18 rows, more than one piece; entries reach over several pieces of a row. Against plain
 * loops. */
static void many_streams_and_pieces_sum_up(void **state) {
    (void)state;
    enum { T = 3000, HEADS = 2, STREAMS = 8, CONFIGS = 3, STRIDE = 3008 };
    float *a = mem_new(HEADS * STRIDE, sizeof *a, "test"), *s = mem_new(STREAMS * STRIDE, sizeof *s, "test");
    float *d = mem_new(HEADS * STREAMS * STRIDE, sizeof *d, "test");
    float *lanes = mem_new(estimate_lanes(CONFIGS), sizeof *lanes, "test");
    uint16_t gone[CONFIGS][STRIDE / KERNEL_LANES] = {{0}};
    estimate_row rows[HEADS];
    estimate_lost lost[CONFIGS];
    double out[CONFIGS][HEADS][1 + STREAMS];
    const float *stream[STREAMS];
    for (int i = 0; i < T; i++) {
        for (int h = 0; h < HEADS; h++) a[h * STRIDE + i] = (float)((i * 7 + h) % 13 + 1);
        for (int k = 0; k < STREAMS; k++) s[k * STRIDE + i] = (float)((i * (k + 3)) % 11);
        for (int c = 0; c < CONFIGS; c++)
            if (i < 1000 * (c + 1) && i % (4 - c) == 0) gone[c][i / 16] |= (uint16_t)(1u << i % 16);
    }
    for (int k = 0; k < STREAMS; k++) stream[k] = s + k * STRIDE;
    for (int h = 0; h < HEADS; h++)
        estimate_prepare(a + h * STRIDE, T - 1, stream, STREAMS, STRIDE, d + h * STREAMS * STRIDE, NULL, &rows[h]);
    for (int c = 0; c < CONFIGS; c++) lost[c] = (estimate_lost){gone[c], 1000 * (c + 1), out[c][0], 0, 0};
    estimate_masked(rows, HEADS, lost, CONFIGS, lanes);
    for (int c = 0; c < CONFIGS; c++)
        for (int h = 0; h < HEADS; h++) {
            double z = 0, lost_mass = 0, all[STREAMS] = {0}, seen[STREAMS] = {0};
            for (int i = 0; i < T; i++) {
                double x = (double)a[h * STRIDE + i];
                bool is_gone = gone[c][i / 16] >> i % 16 & 1;
                z += x;
                if (is_gone) lost_mass += x;
                for (int k = 0; k < STREAMS; k++) {
                    all[k] += x * (double)s[k * STRIDE + i];
                    if (!is_gone) seen[k] += x * (double)s[k * STRIDE + i];
                }
            }
            assert_true(fabs(out[c][h][0] - lost_mass / z) < 1e-5);
            for (int k = 0; k < STREAMS; k++)
                assert_true(fabs(out[c][h][1 + k] - (seen[k] / (z - lost_mass) - all[k] / z)) < 1e-4);
        }
    mem_free(a);
    mem_free(s);
    mem_free(d);
    mem_free(lanes);
}

static void specs_are_refused_by_name(void **state) {
    (void)state;
    static const struct {
        const char *spec, *message;
    } cases[] = {
        {"h20", "did you mean h2o"},
        {"h2o(", "')' is missing"},
        {"h2o(hold=1)x", "after the closing"},
        {"h2o(hodl=1)", "has no parameter 'hodl'"},
        {"h2o(hold=1,recent=2)", "given twice"},
        {"h2o(hold=1.5)", "not a whole number"},
        {"ema(alpha=2)", "out of range"},
        {"ema(alpha=0.9junk)", "not a number"},
        {"h2o(lag=8)", "has no lag"},
        {"h2o(hold=lag)", "needs a lag"},
        {"tova(unit=row)", "not one of"},
        {"mix(evidence=attn)", "needs memory"},
        {"mix(memory=ema)", "needs an argument"},
        {"mix(memory=ema:2)", "0..1"},
        {"oracle", "needs of"},
        {"h2o()", "empty argument"},
        {"rmm(lag=)", "empty value"},
        {"", "no policy name"},
        {"mix(memory=static)", "go with memory static"},
    };
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        sim_flags flags = {.budgets = "8", .n_prompt = -1};
        sim_asks asks;
        sim_config c = {0};
        int code = sim_asks_build(&cases[k].spec, 1, &flags, &asks);
        if (!code) code = sim_config_resolve(&asks.ask[0], &flags, 32, 0, &c);
        assert_int_equal(code, ERR_USAGE);
        if (!strstr(err_message(), cases[k].message)) fail_msg("'%s': %s", cases[k].spec, err_message());
        sim_config_free(&c);
        sim_asks_free(&asks);
    }
}

static void lists_and_precedence(void **state) {
    (void)state;
    const char *specs[] = {"rmm(lag=0|8|08)", "tova", "h2o(recent=4,unit=head)", "rmm"};
    sim_flags flags = {.budgets = "16, 16,50%", .lags = "0:4:x2", .unit = "layer", .pending = "both", .n_prompt = -1};
    sim_asks asks;
    assert_int_equal(sim_asks_build(specs, 4, &flags, &asks), 0);
    /* rmm: 2 lags (8 and 08 are one) x 2 budgets x 2 pending, then lags 0 1 2 4 of the last spec, of which 0 is known.
     */
    assert_int_equal(asks.n, 8 + 2 + 2 + 12);
    text t = {0};
    assert_int_equal(sim_ask_spec(&asks.ask[0], &t), 0);
    assert_string_equal(t.data, "rmm(unit=layer)"); /* the flag differs from the policy's default; lag is left out */
    text_free(&t);
    sim_ask_spec(&asks.ask[8], &t);
    assert_string_equal(t.data, "tova");
    text_free(&t);
    sim_ask_spec(&asks.ask[10], &t);
    assert_string_equal(t.data, "h2o(hold=4)"); /* the spec beats the flag */
    text_free(&t);
    sim_config c;
    assert_int_equal(sim_config_resolve(&asks.ask[9], &flags, 33, 0, &c), 0);
    assert_int_equal(c.budget, 16); /* floor(16.5) */
    sim_config_free(&c);
    sim_asks_free(&asks);
}

static void guards_must_fit(void **state) {
    (void)state;
    const char *specs[] = {"streaming(sinks=8)", "h2o(hold=7)", "h2o(hold=7)"};
    const char *schedules[] = {"step", "every:2", "watermark:0.8"};
    const char *messages[] = {NULL, NULL, "exceed the 6 entries"};
    for (int k = 0; k < 3; k++) {
        sim_flags flags = {.budgets = "8", .schedule = schedules[k], .n_prompt = -1};
        sim_asks asks;
        sim_config c;
        assert_int_equal(sim_asks_build(&specs[k], 1, &flags, &asks), 0);
        int code = sim_config_resolve(&asks.ask[0], &flags, 100, 0, &c);
        assert_int_equal(code, messages[k] ? ERR_USAGE : 0);
        if (messages[k] && !strstr(err_message(), messages[k])) fail_msg("%s", err_message());
        sim_config_free(&c);
        sim_asks_free(&asks);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(streaming_example),
        cmocka_unit_test(h2o_example),
        cmocka_unit_test(a_tie_goes_to_the_lowest_index),
        cmocka_unit_test(every_never_exceeds_the_budget),
        cmocka_unit_test(watermark_goes_down_to_a_share),
        cmocka_unit_test(blocks_leave_whole),
        cmocka_unit_test(prompt_evicts_once),
        cmocka_unit_test(pending_entries_are_free_or_charged),
        cmocka_unit_test(rmm_measures_what_follows_an_arrival),
        cmocka_unit_test(a_window_expires_free_of_charge),
        cmocka_unit_test(a_budget_of_everything_evicts_nothing),
        cmocka_unit_test(delta_of_one_evicted_entry),
        cmocka_unit_test(many_streams_and_pieces_sum_up),
        cmocka_unit_test(specs_are_refused_by_name),
        cmocka_unit_test(lists_and_precedence),
        cmocka_unit_test(guards_must_fit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
