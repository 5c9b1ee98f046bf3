/* R-KV: importance to the last queries, less what other keys say as well.
 *
 * For residents older than the window: the scores q.k of the last `window` queries, the largest of the kv head's query
 * heads, become a softmax over these residents, are averaged over the queries and max-pooled over `kernel` neighbours.
 * score = lambda importance - (1-lambda) redundancy (redundancy.h, over all residents). Entries of the window rank
 * above all others (hold=window sets them aside, as published). Larger units: the mean over their kv heads. Cai et al.
 * 2025, arXiv:2505.24133: window 8, lambda .1, every 128 tokens; kernel 7 and .5 for similar from the code, whose run
 * script says lambda .07. All of it is worked out anew for each score, so schedule=step takes long: use
 * schedule=every:128. */
#include "sim/policies/presets.h"
#include "sim/policies/redundancy.h"
#include "sim/policies/rows.h"
#include "sim/policies/vectors.h"

#include <string.h>

enum { IMPORTANCE, WORK, N_FIELDS };

static int init(policy_setup *s) {
    s->needs = NEEDS_KEYS | NEEDS_QUERIES;
    return rows_check(s);
}

static int fields(const policy_setup *s) {
    (void)s;
    return N_FIELDS;
}

static void observe(const policy_setup *s, const policy_view *v) {
    (void)s;
    (void)v;
}

/* weight[j] += share * softmax over the first `older` residents of the largest score of the kv head's query heads. */
static void add_attention(const policy_view *v, int32_t kv, int32_t step, int32_t older, double share, double *logit,
                          double *weight) {
    const policy_layer *d = v->data;
    size_t dim = (size_t)d->shape.head_dim;
    int32_t group = d->shape.n_head / d->shape.n_kv;
    double most = -INFINITY, sum = 0;
    for (int32_t j = 0; j < older; j++) {
        const float *key = d->k[kv] + (size_t)v->entry[j] * dim;
        logit[j] = -INFINITY;
        for (int32_t h = kv * group; h < (kv + 1) * group; h++)
            logit[j] = fmax(logit[j], d->scale * vec_dot(d->q[h] + (size_t)step * dim, key, dim));
        most = fmax(most, logit[j]);
    }
    for (int32_t j = 0; j < older; j++) sum += logit[j] = exp(logit[j] - most);
    for (int32_t j = 0; j < older; j++) weight[j] += share * logit[j] / sum;
}

static void add_kv_head(const policy_setup *s, const policy_view *v, int32_t kv, int32_t older, double *score) {
    int window = (int)policy_get(s, "window")->number, kernel = (int)policy_get(s, "kernel")->number;
    double lambda = policy_get(s, "lambda")->number, *importance = v->field[IMPORTANCE], *work = v->field[WORK];
    int32_t first = v->t - window + 1 < 0 ? 0 : v->t - window + 1;
    memset(importance, 0, (size_t)v->n * sizeof *importance);
    for (int32_t step = first; step <= v->t; step++)
        add_attention(v, kv, step, older, 1.0 / (v->t - first + 1), work, importance);
    pool_around(POOL_MAX, importance, older, kernel, work);
    for (int32_t j = 0; j < older; j++) score[j] += lambda * work[j] / v->data->shape.n_kv;
    redundancy_rule rule = {.similar = policy_get(s, "similar")->number};
    redundancy_of(v, kv, &rule, work, importance);
    for (int32_t j = 0; j < older; j++) score[j] -= (1 - lambda) * importance[j] / v->data->shape.n_kv;
}

static const double *score(const policy_setup *s, const policy_view *v, double *scratch) {
    int32_t older = rows_older(v, (int)policy_get(s, "window")->number);
    memset(scratch, 0, (size_t)v->n * sizeof *scratch);
    for (int32_t kv = 0; kv < v->data->shape.n_kv && older; kv++) add_kv_head(s, v, kv, older, scratch);
    for (int32_t j = older; j < v->n; j++) scratch[j] = 2; /* lambda times a share is below 1 */
    return scratch;
}

const policy policy_rkv = {
    .abi = POLICY_ABI,
    .name = "rkv",
    .help = "importance to the last queries less redundancy among keys; published with schedule=every:128",
    .source = "Cai et al. 2025, R-KV, arXiv:2505.24133",
    .family = FAMILY_ATTENTION,
    .params =
        (const policy_param[]){
            ROWS_WINDOW("8"),
            ROWS_KERNEL("7", "neighbours whose largest importance one gets (odd)"),
            {.name = "lambda",
             .type = PARAM_NUMBER,
             .initial = "0.1",
             .max = 1,
             .help = "weight of importance; the rest is that of redundancy"},
            REDUNDANCY_SIMILAR,
            POLICY_GUARDS("0", "8", "head", ""),
        },
    .init = init,
    .fields = fields,
    .state = redundancy_state,
    .observe = observe,
    .score = score,
};
