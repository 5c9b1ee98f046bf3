/* VATP, CAOTE, OBCache and CriticalKV worked out by hand; CAOTE against taking entries away; what a server knows. */
#include "base/err.h"
#include "base/rng.h"
#include "sim/config.h"
#include "sim/replay.h"
#include "tracer/truth.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { MOST = 8, FIELDS = 80 };

/* A step's view of n residents 0 .. n-1 and one configuration's scores in it. */
typedef struct bench {
    sim_config config;
    float row[2][MOST], k[2][MOST * 2], v[2][MOST * 2], q[2][MOST * 2], wo[2][4];
    double field[FIELDS][MOST], score[MOST];
    policy_layer layer;
    int n_head;
} bench;

static sim_config config_of(const char *spec, const char *budget, const char *lags, int32_t n_tokens) {
    sim_flags flags = {.budgets = budget, .lags = lags, .n_prompt = -1};
    sim_asks asks = {0};
    sim_config c = {0};
    if (sim_asks_build(&spec, 1, &flags, &asks) || sim_config_resolve(&asks.ask[0], &flags, n_tokens, 0, &c))
        fail_msg("%s", err_message());
    sim_asks_free(&asks);
    return c;
}

/* Scores after observing a single row, of step n-1, over n residents; the arrivals before it are observed with empty
 * rows, so that every entry has what a policy notes when it comes. */
static void score_row(bench *b, const char *spec, const char *budget, int32_t n) {
    const float *k[2] = {b->k[0], b->k[1]}, *v[2] = {b->v[0], b->v[1]}, *q[2] = {b->q[0], b->q[1]};
    const float *wo[2] = {b->wo[0], b->wo[1]}, *heads[2];
    float mean[MOST], zero[MOST] = {0};
    double *field[FIELDS];
    int32_t entry[MOST];
    if (!b->layer.shape.head_dim) b->layer.shape = (policy_shape){1, b->n_head, 1, 1, 2};
    b->layer.k = k;
    b->layer.v = v;
    b->layer.q = q;
    b->layer.wo = wo;
    b->config = config_of(spec, budget, NULL, 100);
    const policy *p = b->config.setup.policy;
    assert_true(p->fields(&b->config.setup) <= FIELDS);
    memset(b->field, 0, sizeof b->field);
    for (int f = 0; f < FIELDS; f++) field[f] = b->field[f];
    for (int32_t t = 0; t < n; t++) {
        entry[t] = t;
        mean[t] = 0;
        for (int h = 0; h < b->n_head && t == n - 1; h++)
            for (int32_t i = 0; i < n; i++) mean[i] += b->row[h][i] / (float)b->n_head;
        for (int h = 0; h < b->n_head; h++) heads[h] = t == n - 1 ? b->row[h] : zero;
        policy_view view = {.t = t,
                            .n = t + 1,
                            .entry = entry,
                            .row = t == n - 1 ? mean : zero,
                            .field = field,
                            .heads = heads,
                            .n_head = b->n_head,
                            .data = &b->layer};
        p->observe(&b->config.setup, &view);
        if (t < n - 1) continue;
        const double *score = p->score(&b->config.setup, &view, b->score);
        if (score != b->score) memcpy(b->score, score, (size_t)n * sizeof *score);
    }
    sim_config_free(&b->config);
    for (int32_t j = 0; j < n; j++) assert_true(isfinite(b->score[j]));
}

#define ASSERT_SCORES(b, ...)                                                                               \
    do {                                                                                                    \
        const double want_[] = {__VA_ARGS__};                                                               \
        for (size_t j_ = 0; j_ < sizeof want_ / sizeof *want_; j_++)                                        \
            if (fabs((b)->score[j_] - want_[j_]) > 1e-6 * (1 + fabs(want_[j_])))                            \
                fail_msg("score %zu is %.9g, not %.9g (line %d)", j_, (b)->score[j_], want_[j_], __LINE__); \
    } while (0)

static void fill(float *to, size_t n, const float *from) {
    memcpy(to, from, n * sizeof *to);
}

static void vatp_weighs_attention_by_the_value(void **state) {
    (void)state;
    bench b = {.n_head = 1};
    b.layer.shape = (policy_shape){1, 1, 1, 2, 0};
    fill(b.row[0], 3, (const float[]){.6f, .3f, .1f});
    fill(b.v[0], 6, (const float[]){.1f, -.1f, 1, -1, 2, 3});
    score_row(&b, "vatp(sinks=0)", "2", 3);
    ASSERT_SCORES(&b, .6 * .2, .3 * 2, .1 * 5);
    /* Entry 0 has the most attention and would go first: sinks keep it. */
    assert_true(b.score[0] < b.score[1]);
    score_row(&b, "vatp(memory=last,sinks=1,hold=1)", "2", 3);
    ASSERT_SCORES(&b, .12, .6, .5);
}

/* |output without entry n - output|, values of both kv heads side by side. */
static double removed(const bench *b, int32_t n, int32_t gone, const double *weight) {
    double total = 0, left = 0, square = 0;
    for (int32_t i = 0; i < n; i++) {
        total += weight[i];
        left += i == gone ? 0 : weight[i];
    }
    for (int kv = 0; kv < 2; kv++)
        for (int c = 0; c < 2; c++) {
            double before = 0, after = 0;
            for (int32_t i = 0; i < n; i++) {
                double x = (double)b->v[kv][2 * i + c];
                before += weight[i] / total * x;
                after += i == gone ? 0 : weight[i] / left * x;
            }
            square += (after - before) * (after - before);
        }
    return sqrt(square);
}

static void caote_is_the_change_of_the_output(void **state) {
    (void)state;
    for (uint32_t round = 0; round < 50; round++) {
        bench b = {.n_head = 2};
        b.layer.shape = (policy_shape){1, 2, 2, 2, 0};
        int32_t n = 2 + (int32_t)(round % 6);
        double weight[MOST] = {0};
        for (int h = 0; h < 2; h++)
            for (int32_t i = 0; i < n; i++) {
                rng_block r = rng_philox(7, round, (uint32_t)h, (uint32_t)i, 0);
                b.row[h][i] = (float)pow(rng_uniform(r.v[0]), 4);
                b.v[h][2 * i] = (float)rng_normal(r);
                b.v[h][2 * i + 1] = (float)rng_uniform(r.v[2]);
            }
        for (int32_t i = 0; i < n; i++) weight[i] = ((double)b.row[0][i] + (double)b.row[1][i]) / 2;
        score_row(&b, "caote", "1", n);
        for (int32_t i = 0; i < n; i++)
            assert_float_equal(b.score[i], removed(&b, n, i, weight), 1e-5 * (1 + b.score[i]));
    }
}

static void caote_by_hand(void **state) {
    (void)state;
    bench b = {.n_head = 1};
    fill(b.row[0], 3, (const float[]){.5f, .25f, .25f});
    fill(b.v[0], 3, (const float[]){4, 0, 8}); /* output 4, mean 4 */
    score_row(&b, "caote", "2", 3);
    ASSERT_SCORES(&b, 0, 4. / 3, 4. / 3); /* .5/.5 |4-4|, .25/.75 |4-0|, .25/.75 |4-8| */
    b.v[0][0] = 6;                        /* output 5, mean 14/3 */
    score_row(&b, "caote(fast)", "2", 3);
    ASSERT_SCORES(&b, 4. / 3, 14. / 9, 10. / 9);
    /* All the weight on one entry: without it nothing is left of the output. */
    fill(b.row[0], 3, (const float[]){1, 0, 0});
    score_row(&b, "caote", "2", 3);
    ASSERT_SCORES(&b, 6, 0, 0);
    fill(b.row[0], 3, (const float[]){0, 0, 0});
    score_row(&b, "caote", "2", 3);
    ASSERT_SCORES(&b, 0, 0, 0);
    score_row(&b, "caote(fast)", "2", 1);
}

static void obcache_by_hand(void **state) {
    (void)state;
    bench b = {.n_head = 1, .layer = {.scale = .5}};
    fill(b.row[0], 2, (const float[]){.5f, .5f});
    fill(b.v[0], 2, (const float[]){1, 3}); /* output 2 */
    fill(b.k[0], 2, (const float[]){2, 2});
    b.q[0][1] = 1; /* logits 1, 1 */
    score_row(&b, "obcache(value)", "1", 2);
    ASSERT_SCORES(&b, .25, 2.25);
    score_row(&b, "obcache(value,p=1)", "1", 2);
    ASSERT_SCORES(&b, .5, 1.5);
    score_row(&b, "obcache(value,vnorm=no)", "1", 2);
    ASSERT_SCORES(&b, .25, .25);
    score_row(&b, "obcache(key)", "1", 2);
    ASSERT_SCORES(&b, .25, .25); /* .25 (1-2)^2, .25 (3-2)^2 */
    score_row(&b, "obcache", "1", 2);
    ASSERT_SCORES(&b, 0, 4); /* .25 (1 + (1-2))^2, .25 (3 + (3-2))^2 */
    score_row(&b, "obcache(nocross)", "1", 2);
    ASSERT_SCORES(&b, .5, 2.5);
}

static void obcache_joins_heads_and_pools(void **state) {
    (void)state;
    bench b = {.n_head = 2};
    fill(b.row[0], 4, (const float[]){.5f, .5f, 0, 0});
    fill(b.row[1], 4, (const float[]){.1f, .1f, .2f, .6f});
    for (int i = 0; i < 4; i++) b.v[0][i] = 1;
    score_row(&b, "obcache(value)", "2", 4); /* squares first: (mean)^2 would be .09 .09 .01 .09 */
    ASSERT_SCORES(&b, .13, .13, .02, .18);
    score_row(&b, "obcache(value,row=max)", "2", 4);
    ASSERT_SCORES(&b, .25, .25, .04, .36);
    /* window 1: the newest entry is not pooled. */
    score_row(&b, "obcache(value,pool=avg,kernel=3,window=1)", "2", 4);
    ASSERT_SCORES(&b, .26 / 3, .28 / 3, .15 / 3, .18);
    score_row(&b, "obcache(value,pool=max,kernel=3,window=0)", "2", 4);
    ASSERT_SCORES(&b, .13, .13, .18, .18);
}

static void critical_by_hand(void **state) {
    (void)state;
    bench b = {.n_head = 1};
    fill(b.row[0], 4, (const float[]){.4f, .3f, .2f, .1f});
    fill(b.v[0], 4, (const float[]){1, 1, -4, 1});
    fill(b.wo[0], 2, (const float[]){.5f, -.5f}); /* |v Wo| = |v| */
    score_row(&b, "critical(memory=last,window=0,kernel=1,first=1,epsilon=0)", "2", 4);
    assert_true(b.score[0] > 1e200);
    ASSERT_SCORES(&b, b.score[0], .3, .8, .1);
    score_row(&b, "critical(memory=last,window=0,kernel=1,first=0,epsilon=0.1)", "2", 4);
    ASSERT_SCORES(&b, .5, .4, 1.2, .2);
    score_row(&b, "critical(memory=last,window=1,kernel=3,first=0,epsilon=0)", "2", 4);
    ASSERT_SCORES(&b, .7 / 3, .9 / 3, 4 * .5 / 3, 1.3); /* the window's own: 1 above the highest */
    /* budget/2 of one is one; recent:2 is a mean of two rows, of which the first was empty. */
    score_row(&b, "critical(memory=recent:2,window=0,kernel=1,epsilon=0)", "1", 4);
    assert_true(b.score[0] > 1e200);
    ASSERT_SCORES(&b, b.score[0], .15, .4, .05);
    /* Of equal ones the newest is chosen. */
    fill(b.row[0], 4, (const float[]){.25f, .25f, .25f, .25f});
    score_row(&b, "critical(memory=last,window=0,kernel=1,first=2,epsilon=0)", "3", 4);
    assert_true(b.score[2] > 1e200 && b.score[3] > 1e200);
    ASSERT_SCORES(&b, .25, .25);
}

static void rows_of_zeros_have_scores(void **state) {
    (void)state;
    const char *const specs[] = {"vatp(sinks=0)", "caote",          "caote(fast)",
                                 "obcache",       "obcache(value)", "obcache(value,p=1,vnorm=no)",
                                 "critical"};
    for (size_t k = 0; k < sizeof specs / sizeof *specs; k++)
        for (int32_t n = 1; n <= 4; n++) {
            bench b = {.n_head = 2, .layer = {.scale = 1}};
            score_row(&b, specs[k], "4", n); /* zero keys and values, too */
        }
}

/* ---- what a server knows ---------------------------------------------------------------------------------------- */

/* Lifetimes of one unit of 12 tokens with equal attention within three residents. */
static void replay_facts_of(const char *spec, const replay_facts *facts, int32_t *evict_at) {
    enum { T = 12 };
    sim_config c = config_of(spec, "4", "2", T);
    replay *r;
    assert_int_equal(replay_new(&c, T, &(policy_shape){.n_layer = 1, .n_head = 1, .n_kv = 1}, &r), 0);
    replay_begin(r, &(replay_unit){.n_head = 1, .sequence = 3}, evict_at);
    for (int32_t t = 0; t < T; t++) {
        float row[32] = {0};
        const float *heads[] = {row};
        for (int32_t i = 0; i <= t; i++) row[i] = 1.0f / (1 + (float)((7 * i + 3 * t) % 5));
        replay_step(r, t, heads, &facts[t]);
    }
    replay_free(r);
    sim_config_free(&c);
}

static void signals_weigh_rows(void **state) {
    (void)state;
    replay_facts facts[12], sampled[12];
    int32_t a[32], b[32], agreed = 0;
    for (int32_t t = 0; t < 12; t++) {
        facts[t] = (replay_facts){.confidence = 1, .counted = true};
        sampled[t] = (replay_facts){.confidence = .5, .counted = true};
        sampled[t].correct = rng_uniform(rng_philox(9, (uint32_t)t, UINT32_MAX, UINT32_MAX, 3).v[0]) < .5;
        agreed += sampled[t].correct;
    }
    assert_true(agreed > 2 && agreed < 10);
    /* Certain of the right token, a sample agrees; certain of its prediction, a row counts in full. */
    replay_facts_of("rmm(signal=uniform)", facts, a);
    replay_facts_of("rmm(signal=agrees)", facts, b);
    assert_memory_equal(a, b, 12 * sizeof *a);
    replay_facts_of("rmm(signal=entropy)", facts, b);
    assert_memory_equal(a, b, 12 * sizeof *a);
    /* The draw is the counter's: sequence 3, seed 9. */
    replay_facts_of("rmm(signal=correct)", sampled, a);
    replay_facts_of("rmm(signal=agrees,seed=9)", sampled, b);
    assert_memory_equal(a, b, 12 * sizeof *a);
    replay_facts_of("rmm(signal=agrees,seed=10)", sampled, b);
    assert_memory_not_equal(a, b, 12 * sizeof *a);
    /* exp(-ln 2) is a probability of one half. */
    for (int32_t t = 0; t < 12; t++) {
        facts[t].confidence = t % 3 ? 1 : .5;
        facts[t].entropy = t % 3 ? 0 : log(2);
    }
    replay_facts_of("rmm(signal=confidence)", facts, a);
    replay_facts_of("rmm(signal=entropy)", facts, b);
    assert_memory_equal(a, b, 12 * sizeof *a);
}

static void entropy_of_logits(void **state) {
    (void)state;
    int32_t top;
    const float flat[] = {5, 5, 5, 5}, two[] = {-80, 1, 1 + 1.0986123f};
    assert_float_equal(truth_entropy(flat, truth_lse(flat, 4, &top), 4), log(4), 1e-12);
    /* 1/4, 3/4 */
    assert_float_equal(truth_entropy(two, truth_lse(two, 3, &top), 3), .25 * log(4) + .75 * log(4. / 3), 1e-7);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(vatp_weighs_attention_by_the_value),
        cmocka_unit_test(caote_is_the_change_of_the_output),
        cmocka_unit_test(caote_by_hand),
        cmocka_unit_test(obcache_by_hand),
        cmocka_unit_test(obcache_joins_heads_and_pools),
        cmocka_unit_test(critical_by_hand),
        cmocka_unit_test(rows_of_zeros_have_scores),
        cmocka_unit_test(signals_weigh_rows),
        cmocka_unit_test(entropy_of_logits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
