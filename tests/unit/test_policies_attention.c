/* The policies of attention worked out by hand: scores after a few rows that all entries saw. */
#include "base/err.h"
#include "sim/config.h"
#include "sim/policies/rows.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { MOST = 8, FIELDS = 512 };

typedef struct bench {
    int32_t n_prompt, score_from; /* score is asked for in steps score_from .. n-1 */
    float k[MOST * 2], q[2][MOST * 2];
    int n_head;
    double score[MOST];
} bench;

static sim_config config_of(const char *spec) {
    sim_flags flags = {.budgets = "90", .n_prompt = -1};
    sim_asks asks = {0};
    sim_config c = {0};
    if (sim_asks_build(&spec, 1, &flags, &asks) || sim_config_resolve(&asks.ask[0], &flags, 100, 0, &c))
        fail_msg("%s", err_message());
    sim_asks_free(&asks);
    return c;
}

/* Show the policy rows 0 .. n-1 of one unit, of which nothing leaves. */
static void score_rows(bench *b, const char *spec, const float *const *rows, int32_t n) {
    static double memory[FIELDS][MOST], state[MOST];
    static double *field[FIELDS];
    const float *k[] = {b->k}, *q[] = {b->q[0], b->q[1]};
    int heads = b->n_head ? b->n_head : 1;
    policy_layer layer = {.shape = {1, heads, 1, 2, 0}, .k = k, .q = q, .scale = 1};
    int32_t entry[MOST];
    sim_config c = config_of(spec);
    const policy *p = c.setup.policy;
    assert_true(p->fields(&c.setup) <= FIELDS);
    memset(memory, 0, sizeof memory);
    for (int f = 0; f < FIELDS; f++) field[f] = memory[f];
    for (int32_t t = 0; t < n; t++) {
        entry[t] = t;
        policy_view v = {.t = t,
                         .n = t + 1,
                         .entry = entry,
                         .row = rows[t],
                         .field = field,
                         .n_head = heads,
                         .data = &layer,
                         .state = state,
                         .n_prompt = b->n_prompt};
        p->observe(&c.setup, &v);
        if (t < n - 1 && (!b->score_from || t < b->score_from)) continue;
        const double *score = p->score(&c.setup, &v, b->score);
        if (score != b->score) memcpy(b->score, score, (size_t)(t + 1) * sizeof *score);
    }
    sim_config_free(&c);
}

#define ASSERT_SCORES(b, ...)                                                                               \
    do {                                                                                                    \
        const double want_[] = {__VA_ARGS__};                                                               \
        for (size_t j_ = 0; j_ < sizeof want_ / sizeof *want_; j_++)                                        \
            if (!(fabs((b)->score[j_] - want_[j_]) <= 1e-6 * (1 + fabs(want_[j_]))))                        \
                fail_msg("score %zu is %.9g, not %.9g (line %d)", j_, (b)->score[j_], want_[j_], __LINE__); \
    } while (0)

static const float r0[] = {1}, r1[] = {.65f, .35f}, r2[] = {.2f, .4f, .4f}, r3[] = {.5f, .09f, .1f, .31f},
                   r4[] = {.1f, .05f, .4f, .05f, .4f};
static const float *const rows[] = {r0, r1, r2, r3, r4};

static void lfu_counts_uses(void **state) {
    (void)state;
    bench b = {0};
    score_rows(&b, "lfu(tau=0.3)", rows, 4);
    ASSERT_SCORES(&b, 3, 2, 1, 1);
    /* The mean share: 1, 1/2, 1/3, 1/4. */
    score_rows(&b, "lfu", rows, 4);
    ASSERT_SCORES(&b, 3, 1, 1, 1);
}

static void flavours_of_h2o(void **state) {
    (void)state;
    bench b = {0};
    score_rows(&b, "h2o-mean", rows, 4);
    ASSERT_SCORES(&b, 2.35 / 4, .84 / 3, .5 / 2, .31);
    score_rows(&b, "h2o-last", rows, 4);
    ASSERT_SCORES(&b, .5, .09, .1, .31);
    b.n_prompt = 3;
    score_rows(&b, "h2o-prompt", rows, 5); /* entries 3 and 4 arrived after the prompt */
    ASSERT_SCORES(&b, 1.85, .75, .4, 0, 0);
}

static void openvino_pools_ahead(void **state) {
    (void)state;
    bench b = {0};
    /* Rows by pairs: 1; .65 .35; .4 .4 .4; .5 .1 .31 .31. */
    score_rows(&b, "h2o-openvino(sinks=0,hold=3,ahead=2,aggregate=sum)", rows, 4);
    ASSERT_SCORES(&b, 2.55, .85, .71, .31);
    score_rows(&b, "h2o-openvino(sinks=0,hold=3,ahead=2)", rows, 4);
    ASSERT_SCORES(&b, 2.55 / 4, .85 / 3, .71 / 2, .31);
    /* A prompt of 3: its sum 1.85 .75 .4 is pooled once; then row 3 is added. */
    b.n_prompt = 3;
    score_rows(&b, "h2o-openvino(sinks=0,hold=3,ahead=3,window=0,aggregate=sum)", rows, 4);
    ASSERT_SCORES(&b, 1.85 + .5, .75 + .31, .4 + .31, .31);
    /* Of the prompt only the last two rows: .85 .75 .4, seen 2 2 1 times; row 3 once more. */
    score_rows(&b, "h2o-openvino(sinks=0,hold=3,ahead=1,window=2)", rows, 4);
    ASSERT_SCORES(&b, 1.35 / 3, .84 / 3, .5 / 2, .31);
}

static void scissorhands_charges_low_attention(void **state) {
    (void)state;
    bench b = {0};
    /* Below the mean share: 1 in row 1 (.35 < 1/2), 0 in row 2, 1 and 2 in row 3. */
    score_rows(&b, "scissorhands", rows, 4);
    ASSERT_SCORES(&b, -1, -2, -1, 0);
    score_rows(&b, "scissorhands(window=2)", rows, 4);
    ASSERT_SCORES(&b, -1, -1, -1, 0);
    score_rows(&b, "scissorhands(window=1,tau=0.1)", rows, 4);
    ASSERT_SCORES(&b, 0, -1, 0, 0);
    score_rows(&b, "scissorhands-sum(window=2)", rows, 4);
    ASSERT_SCORES(&b, .7, .49, .5, .31);
}

/* Histories longer than the bits of one field, around the ring more than once. */
static void scissorhands_remembers_as_far_as_its_window(void **state) {
    (void)state;
    static double memory[9];
    double *field[9], score[1];
    for (int f = 0; f < 9; f++) field[f] = &memory[f];
    const int32_t entry = 0;
    sim_config c = config_of("scissorhands(window=100,tau=0.5)");
    const policy *p = c.setup.policy;
    assert_int_equal(p->fields(&c.setup), 3);
    memset(memory, 0, sizeof memory);
    int charged = 0;
    for (int32_t t = 0; t < 350; t++) {
        float a = t % 3 == 0 ? .1f : .9f;
        policy_view v = {.t = t, .n = 1, .entry = &entry, .row = &a, .field = field};
        p->observe(&c.setup, &v);
        charged += (t % 3 == 0) - (t >= 100 && (t - 100) % 3 == 0);
        assert_true(p->score(&c.setup, &v, score)[0] == -charged);
    }
    sim_config_free(&c);
}

static void roco_protects_unsteady_entries(void **state) {
    (void)state;
    static const float s1[] = {.5f, .5f}, s2[] = {.4f, .02f, .58f}, s3[] = {.3f, .02f, .3f, .38f},
                       s4[] = {.2f, .02f, .2f, .28f, .3f};
    static const float *const unsteady[] = {r0, s1, s2, s3, s4};
    bench b = {0};
    /* Means .48 .14 .36 .33 .3; deviations .28 .21 .16 .05 0. All but the largest deviation may go. */
    score_rows(&b, "roco(protect=0,young=0)", unsteady, 5);
    ASSERT_SCORES(&b, 2.48, .14, .36, .33, .3);
    /* Half of 4 protected, the newest first of all: entries 2 and 3 may go, the lowest mean, 1, stays. */
    score_rows(&b, "roco(protect=0.5,young=1)", unsteady, 5);
    ASSERT_SCORES(&b, 2.48, 2.14, .36, .33, 2.3);
    score_rows(&b, "roco(protect=1,young=4)", unsteady, 5); /* one always may */
    ASSERT_SCORES(&b, .48, 2.14, 2.36, 2.33, 2.3);
    score_rows(&b, "roco", rows, 1);
    ASSERT_SCORES(&b, 1);
}

static void snapkv_pools_what_the_window_saw(void **state) {
    (void)state;
    static const float p4[] = {.3f, .05f, .05f, .18f, .42f};
    static const float *const last[] = {r0, r1, r2, r3, p4};
    bench b = {0};
    score_rows(&b, "snapkv(window=1,kernel=3)", last, 5);
    ASSERT_SCORES(&b, .35 / 3, .4 / 3, .28 / 3, .23 / 3, 2);
    score_rows(&b, "snapkv(window=1,kernel=3,pool=max)", last, 5);
    ASSERT_SCORES(&b, .3, .3, .18, .18, 2);
    /* Rows 3 and 4; entries 3 and 4 are the window. */
    score_rows(&b, "snapkv(window=2,kernel=1)", last, 5);
    ASSERT_SCORES(&b, .8, .14, .15, 3, 3);
    /* Pooling ends where the window begins; wider than all there is. */
    score_rows(&b, "pyramidkv(window=2)", last, 5);
    ASSERT_SCORES(&b, .8, .8, .8, 3, 3);
    score_rows(&b, "snapkv", last, 5);
    ASSERT_SCORES(&b, 65, 65, 65, 65, 65);
}

static void lazy_compares_rest_with_the_longest_interval(void **state) {
    (void)state;
    bench b = {0};
    double h = 2 / (1 + exp(.5)), one = 2 / (1 + exp(1)), two = 2 / (1 + exp(2));
    /* Uses (>= .3): 0 at 0 1 3, interval 2, at rest for 1; 1 at 1 2, interval 1, rest 2; 2 at 2 4, interval 2, rest 0;
     * 3 at 3, interval 1 (arrival), rest 1; 4 at 4. */
    score_rows(&b, "lazy(alpha=0.3)", rows, 5);
    ASSERT_SCORES(&b, h + one, two + 1, 1 + one, one + 1, 1 + 1);
    score_rows(&b, "lazy-code(alpha=0.3)", rows, 5);
    ASSERT_SCORES(&b, 2 / (1 + exp(1.5)) + one, 2 / (1 + exp(3)) + 1, one + one, two + 1, one + 1);
    score_rows(&b, "lazy(alpha=1)", rows, 5); /* entry 0 at step 0 only; the others never */
    ASSERT_SCORES(&b, 2 / (1 + exp(4)) + 1, 0, 0, 0, 0);
}

static void rkv_trades_importance_for_redundancy(void **state) {
    (void)state;
    bench b = {.k = {1, 0, 1, 0, 0, 1, 1, 0}, .q = {{0, 0, 0, 0, 0, 0, 0, 1}, {0, 0, 0, 0, 0, 0, .5f, 0}}, .n_head = 2};
    /* Keys 0, 1, 3 are alike. 0 and 1 excuse 3, 3 excuses 1, 2 has none like it and excuses the first. Left over the
     * four rows: 2 for entry 0, 1 for entry 1, nothing for the others. */
    double e[] = {exp(.5), exp(.25), 1, 1}, sum = e[0] + e[1] + 2;
    score_rows(&b, "rkv(window=1,lambda=0,kernel=1)", rows, 4);
    ASSERT_SCORES(&b, -e[0] / sum, -e[1] / sum, -e[2] / sum, 2);
    /* Query 3 of the heads: (0,1) and (.5,0). Scores by key: .5 .5 1. */
    double i[] = {exp(.5), exp(.5), exp(1)}, all = i[0] + i[1] + i[2];
    score_rows(&b, "rkv(window=1,lambda=1,kernel=1)", rows, 4);
    ASSERT_SCORES(&b, i[0] / all, i[1] / all, i[2] / all, 2);
    score_rows(&b, "rkv(window=1,lambda=0.25,kernel=3)", rows, 4);
    ASSERT_SCORES(&b, .25 * i[0] / all - .75 * e[0] / sum, .25 * i[2] / all - .75 * e[1] / sum,
                  .25 * i[2] / all - .75 * e[2] / sum, 2);
    score_rows(&b, "rkv(window=8)", rows, 4);
    ASSERT_SCORES(&b, 2, 2, 2, 2);
}

static void gkv_remembers_between_decisions(void **state) {
    (void)state;
    static const float s3[] = {.6f, .1f, .2f, .1f}, s4[] = {.05f, .05f, .4f, .1f, .4f};
    static const float *const two[] = {r0, r1, r2, s3, s4};
    bench b = {.k = {1, 0, 1, 0, 0, 1, 1, 0, 0, 2}, .score_from = 3};
    /* After step 3 the entries before it have 1 1/6 1/3; row 4 says 1/8 1/8 1 1/4. */
    score_rows(&b, "gkv(window=1,lambda=1)", two, 5);
    ASSERT_SCORES(&b, .8, .8 / 6, 1, .25, 2);
    score_rows(&b, "gkv(window=1,lambda=1,alpha=0)", two, 5);
    ASSERT_SCORES(&b, .125, .125, 1, .25, 2);
    b.score_from = 0; /* asked for the first time after step 4 */
    score_rows(&b, "gkv(window=1,lambda=1)", two, 5);
    ASSERT_SCORES(&b, .125, .125, 1, .25, 2);
    /* As in R-KV, but who has none like it excuses nobody: over four rows 2 1 0 0 are left. */
    double e[] = {exp(.5), exp(.25), 1};
    score_rows(&b, "gkv(window=1,lambda=0)", two, 4);
    ASSERT_SCORES(&b, -1, -e[1] / e[0], -e[2] / e[0], 2);
    score_rows(&b, "gkv(window=1,lambda=0.5)", two, 4);
    ASSERT_SCORES(&b, 0, .5 / 6 - .5 * e[1] / e[0], .5 / 3 - .5 * e[2] / e[0], 2);
}

static void pooling_at_the_ends(void **state) {
    (void)state;
    const double x[] = {4, 1, 2, 8};
    double out[4];
    pool_around(POOL_AVG, x, 4, 5, out);
    assert_true(out[0] == 7.0 / 5 && out[1] == 15.0 / 5 && out[2] == 15.0 / 5 && out[3] == 11.0 / 5);
    pool_around(POOL_MAX, x, 4, 3, out);
    assert_true(out[0] == 4 && out[1] == 4 && out[2] == 8 && out[3] == 8);
    pool_around(POOL_MAX, x, 1, 63, out);
    assert_true(out[0] == 4);
    memcpy(out, x, sizeof out);
    pool_ahead(out, 4, 2);
    assert_true(out[0] == 4 && out[1] == 2 && out[2] == 8 && out[3] == 8);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lfu_counts_uses),
        cmocka_unit_test(flavours_of_h2o),
        cmocka_unit_test(openvino_pools_ahead),
        cmocka_unit_test(scissorhands_charges_low_attention),
        cmocka_unit_test(scissorhands_remembers_as_far_as_its_window),
        cmocka_unit_test(roco_protects_unsteady_entries),
        cmocka_unit_test(snapkv_pools_what_the_window_saw),
        cmocka_unit_test(lazy_compares_rest_with_the_longest_interval),
        cmocka_unit_test(rkv_trades_importance_for_redundancy),
        cmocka_unit_test(gkv_remembers_between_decisions),
        cmocka_unit_test(pooling_at_the_ends),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
