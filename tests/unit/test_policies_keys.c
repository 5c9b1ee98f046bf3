/* Policies of keys and values, worked out by hand on two channels. */
#include "base/err.h"
#include "base/mem.h"
#include "sim/config.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { MOST = 40, FIELDS = 4, DIM = 2 };

typedef float vectors[MOST][DIM];

/* One or two kv heads, each with `group` query heads; heads without vectors of their own share those of the first. */
typedef struct layer {
    int n_kv, group;
    vectors k[2], v[2], q[4];
    float wo[4][DIM][2];
    int32_t rope_dims;
    bool rope_neox;
} layer;

static sim_config config_of(const char *spec) {
    sim_flags flags = {.budgets = "900", .n_prompt = -1};
    sim_asks asks = {0};
    sim_config c = {0};
    if (sim_asks_build(&spec, 1, &flags, &asks) || sim_config_resolve(&asks.ask[0], &flags, 1000, 0, &c))
        fail_msg("%s", err_message());
    sim_asks_free(&asks);
    return c;
}

/* The scores of entries 0 .. n-1 after step n-1, when nothing has left before. */
static void scores_of(const char *spec, const layer *l, int32_t n, double score[MOST]) {
    const float *k[2], *v[2], *q[4], *wo[4];
    double memory[FIELDS][MOST] = {{0}}, *field[FIELDS], scratch[MOST];
    int32_t entry[MOST];
    sim_config c = config_of(spec);
    const policy *p = c.setup.policy;
    for (int i = 0; i < 2; i++) k[i] = l->k[i][0], v[i] = l->v[i][0];
    for (int i = 0; i < 4; i++) q[i] = l->q[i][0], wo[i] = l->wo[i][0], field[i] = memory[i];
    policy_layer data = {.shape = {1, l->n_kv * l->group, l->n_kv, DIM, 2},
                         .k = k,
                         .v = v,
                         .q = q,
                         .wo = wo,
                         .scale = 1,
                         .rope_base = 1e4,
                         .rope_dims = l->rope_dims,
                         .rope_interleaved = !l->rope_neox};
    assert_true(p->fields(&c.setup) <= FIELDS);
    double *unit = mem_new(p->state ? p->state(&c.setup, &data.shape) + 1 : 1, sizeof *unit, "state");
    for (int32_t t = 0; t < n; t++) {
        entry[t] = t;
        policy_view view = {.t = t, .n = t + 1, .entry = entry, .field = field, .data = &data, .state = unit};
        p->observe(&c.setup, &view);
        const double *made = p->score(&c.setup, &view, scratch);
        memcpy(score, made, (size_t)(t + 1) * sizeof *score);
        for (int32_t j = 0; j <= t; j++) assert_true(isfinite(score[j]));
    }
    mem_free(unit);
    sim_config_free(&c);
}

#define ASSERT_SCORES(spec, l, ...)                                                                               \
    do {                                                                                                          \
        const double want_[] = {__VA_ARGS__};                                                                     \
        double score_[MOST];                                                                                      \
        size_t n_ = sizeof want_ / sizeof *want_;                                                                 \
        scores_of(spec, l, (int32_t)n_, score_);                                                                  \
        for (size_t j_ = 0; j_ < n_; j_++)                                                                        \
            if (fabs(score_[j_] - want_[j_]) > 1e-5)                                                              \
                fail_msg("%s: score %zu is %.9g, not %.9g (line %d)", spec, j_, score_[j_], want_[j_], __LINE__); \
    } while (0)

static void norms(void **state) {
    (void)state;
    layer l = {.n_kv = 2,
               .group = 1,
               .k = {{{3, 4}, {0, 1}}, {{1, 0}, {0, 7}}},
               .v = {{{1, 0}, {0, 2}, {3, 4}}, {{3, 0}, {0, 2}, {0, 0}}},
               .wo = {{{1, 0}, {0, 3}}, {{1, 0}, {2, 0}}}};
    ASSERT_SCORES("knorm(unit=layer)", &l, -3, -4);
    ASSERT_SCORES("mix(evidence=valuenorm,memory=static)", &l, 2, 2, 2.5);
    /* Head 0: (1,0) (0,6) (3,12); head 1: (3,0) (4,0) (0,0). */
    ASSERT_SCORES("mix(evidence=outnorm,memory=static)", &l, 2, 5, sqrt(153) / 2);
    /* Two query heads of one kv head: (3,4) becomes (3,12) and (11,0). */
    l.n_kv = 1;
    l.group = 2;
    ASSERT_SCORES("mix(evidence=outnorm,memory=static)", &l, 1, 5, (sqrt(153) + 11) / 2);
    ASSERT_SCORES("knorm", &l, -5, -1);
}

static void similarity_to_the_mean_key(void **state) {
    (void)state;
    layer l = {.n_kv = 1, .group = 1, .k = {{{2, 0}, {0, 5}, {-1, 0}}, {{1, 0}, {-3, 0}, {1, 0}}}};
    /* Sums of normalised keys: (1,0), (1,1), (0,1). */
    ASSERT_SCORES("mix(evidence=keysim,memory=static)", &l, -1, -sqrt(.5), 0);
    ASSERT_SCORES("keydiff", &l, -sqrt(.5), -sqrt(.5));
    ASSERT_SCORES("keydiff", &l, 0, -1, 0);
    /* The second head's sum is (1,0): -1, 1, -1. */
    l.n_kv = 2;
    ASSERT_SCORES("keydiff(unit=layer)", &l, -.5, 0, -.5);
}

static void leverage_within_runs(void **state) {
    (void)state;
    /* Squared norms of keys 1 9 4 1, of values 1 2 4 1: shares in runs of two .1 .9 .8 .2 and 1/3 2/3 .8 .2. */
    layer l = {.n_kv = 1, .group = 1, .k = {{{1, 0}, {0, 3}, {2, 0}, {0, 1}}}, .v = {{{1, 0}, {1, 1}, {2, 0}, {0, 1}}}};
    double sum = .1 / 3 + .6 + .64 + .04;
    ASSERT_SCORES("cur(local_window_size=2)", &l, .1 / 3 / sum, .6 / sum, .64 / sum, .04 / sum);
    ASSERT_SCORES("cur(local_window_size=2,leverage_type=key)", &l, .05, .45, .4, .1);
    ASSERT_SCORES("cur(local_window_size=2,leverage_type=kv_avg)", &l, 13. / 120, 47. / 120, .4, .1);
    ASSERT_SCORES("cur(local_window_size=0,leverage_type=value)", &l, .125, .25, .5, .125);
    ASSERT_SCORES("cur(local_window_size=3,leverage_type=key)", &l, 1. / 28, 9. / 28, 4. / 28, .5);
}

static void parts_against_the_next(void **state) {
    (void)state;
    /* After a sink, parts of two. Channels of the second part range over 0..1 and 0..2: the first part is mapped to
     * (0,1) and (1,1), standard deviations 1/sqrt(2) and 0. Values say the same of both. */
    layer l = {.n_kv = 1,
               .group = 1,
               .k = {{{9, 9}, {0, 2}, {1, 2}, {0, 0}, {1, 2}, {5, 5}, {7, 9}}},
               .v = {{{9, 9}, {1, 1}, {1, 1}, {0, 1}, {1, 2}, {0, 0}, {1, 1}}}};
    double share = 1 / (1 + exp(-sqrt(.5))) / 2 + .25;
    ASSERT_SCORES("lagkv(lag_size=2,sinks=1)", &l, 1, 1, 1, 1);
    ASSERT_SCORES("lagkv(lag_size=2,sinks=1)", &l, 1, .5, 0, 1, 1);
    ASSERT_SCORES("lagkv(lag_size=2,sinks=1)", &l, 1, .5, 0, 1, 1, 1);
    ASSERT_SCORES("lagkv(lag_size=2,sinks=1,cross_scoring=yes)", &l, 1, share, 1 - share, 1, 1);
    /* The third part ranges over 5..7 and 5..9: (0,0) and (1,2) become (-2.5,-1.25) and (-2,-.75), alike; values (0,1)
     * and (1,2) against 0..1: deviations 1/sqrt(2) twice. A tie: the older one is the lower. */
    ASSERT_SCORES("lagkv(lag_size=2,sinks=1)", &l, 1, .5, 0, 0, .5, 1, 1);
}

static void coming_queries(void **state) {
    (void)state;
    /* Before RoPE every query is (1,0). The next position after step 2 is 3, so u = (cos 3, sin 3) is expected. */
    layer l = {
        .n_kv = 1, .group = 1, .k = {{{1, 0}, {-1, 0}, {0, 1}}}, .v = {{{10, 0}, {1, 0}, {0, 2}}}, .rope_dims = 2};
    for (int t = 0; t < 3; t++) l.q[0][t][0] = cosf((float)t), l.q[0][t][1] = sinf((float)t);
    double a = exp(cos(3)), b = exp(-cos(3)), c = exp(sin(3)), sum = a + b + c;
    ASSERT_SCORES("expected(sinks=0,n_future=1,use_vnorm=no)", &l, a / sum, b / sum, c / sum);
    ASSERT_SCORES("expected(sinks=0,n_future=1)", &l, 10 * a / sum, b / sum, 2 * c / sum);
    ASSERT_SCORES("expected(sinks=0,n_future=1,epsilon=0.5)", &l, 10 * (a / sum + .5), b / sum + .5,
                  2 * (c / sum + .5));
    /* Behind a sink two entries and two queries are left. */
    ASSERT_SCORES("expected(sinks=1,n_future=1,use_vnorm=no)", &l, 0, b / (b + c), c / (b + c));
    double x = (cos(3) + cos(4)) / 2, y = (sin(3) + sin(4)) / 2;
    a = exp(x), b = exp(-x), c = exp(y), sum = a + b + c;
    ASSERT_SCORES("expected(sinks=0,n_future=2,use_vnorm=no)", &l, a / sum, b / sum, c / sum);
}

static void queries_that_vary(void **state) {
    (void)state;
    /* Before RoPE (1,0), (-1,0), (0,0): mean 0, variance 2/3 along u; logits (k.u)^2 / 3. */
    layer l = {.n_kv = 1, .group = 1, .k = {{{1, 0}, {-1, 0}, {0, 1}}}, .rope_dims = 2, .rope_neox = true};
    l.q[0][0][0] = 1;
    l.q[0][1][0] = -cosf(1), l.q[0][1][1] = -sinf(1);
    double a = exp(cos(3) * cos(3) / 3), c = exp(sin(3) * sin(3) / 3), sum = 2 * a + c;
    ASSERT_SCORES("expected(sinks=0,n_future=1,use_vnorm=no)", &l, a / sum, a / sum, c / sum);
    ASSERT_SCORES("expected(sinks=0,n_future=1,use_vnorm=no,use_covariance=no)", &l, 1. / 3, 1. / 3, 1. / 3);
    /* A second query head that asks for nothing: the mean of both. */
    l.group = 2;
    ASSERT_SCORES("expected(sinks=0,n_future=1,use_vnorm=no)", &l, (a / sum + 1. / 3) / 2, (a / sum + 1. / 3) / 2,
                  (c / sum + 1. / 3) / 2);
}

/* More residents than a block of the kernels holds: 36 keys alike and one that is asked for. */
static void many_residents(void **state) {
    (void)state;
    layer l = {.n_kv = 1, .group = 1, .rope_dims = 2};
    for (int t = 0; t < 37; t++) l.q[0][t][0] = cosf((float)t), l.q[0][t][1] = sinf((float)t);
    l.k[0][33][0] = 2;
    double score[MOST], a = exp(2 * cos(37));
    scores_of("expected(sinks=0,n_future=1,use_vnorm=no)", &l, 37, score);
    for (int j = 0; j < 37; j++) assert_true(fabs(score[j] - (j == 33 ? a : 1) / (36 + a)) < 1e-5);
}

/* Vectors of zeros, and of values near the end of what a trace can hold, give finite scores. */
static void scores_are_finite(void **state) {
    (void)state;
    static const char *const specs[] = {
        "knorm",
        "mix(evidence=valuenorm,memory=static)",
        "mix(evidence=outnorm,memory=static)",
        "mix(evidence=keysim,memory=static)",
        "keydiff",
        "lagkv(lag_size=3,sinks=1)",
        "lagkv(lag_size=2,cross_scoring=yes)",
        "cur",
        "cur(local_window_size=0)",
        "expected",
        "expected(use_covariance=no,sinks=30)",
    };
    double score[MOST];
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++) {
        layer l = {.n_kv = 1, .group = 2, .rope_dims = 2};
        scores_of(specs[i], &l, 20, score);
        for (int t = 0; t < 20; t++)
            for (int c = 0; c < DIM; c++) {
                float large = ((t + c) % 3 ? 3e38f : -3e38f);
                l.k[0][t][c] = large, l.v[0][t][c] = -large, l.q[0][t][c] = large, l.q[1][t][c] = t == c ? 1e-45f : 0;
                l.wo[0][c][t % 2] = large;
            }
        scores_of(specs[i], &l, 20, score);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(norms),
        cmocka_unit_test(similarity_to_the_mean_key),
        cmocka_unit_test(leverage_within_runs),
        cmocka_unit_test(parts_against_the_next),
        cmocka_unit_test(coming_queries),
        cmocka_unit_test(queries_that_vary),
        cmocka_unit_test(many_residents),
        cmocka_unit_test(scores_are_finite),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
