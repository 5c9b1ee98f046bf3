/* LagKV: judge a part of the text by how far it departs from the part that follows (Liang et al. 2025,
 * arXiv:2504.04704; kvpress LagKVPress).
 *
 * The positions after the sinks come in parts of lag_size. When a part is whole, the one before it is judged, once and
 * for all: each channel of its keys is mapped so that the range of that channel in the newer part becomes 0..1, the
 * standard deviation of the mapped channels is an entry's departure, and the softmax of departures within the part its
 * share; values alike. The score is the rank of the mean of both shares, from 0 for the lowest, over lag_size; with
 * cross_scoring=yes the mean of shares itself, so that parts compete. Entries not judged yet score 1: where only such
 * are left the oldest goes, a sliding window.
 *
 * As in a stream an entry may leave before its part is judged, shares and ranks are over the part's residents. A
 * channel without a range in the newer part tells nothing and counts as 0. Larger units: the mean over their kv heads.
 * The sinks stand before the first part, which is why this policy looks at their number. */
#include "sim/policies/presets.h"

#include <math.h>
#include <string.h>

typedef struct lagkv_plan {
    int64_t sinks, part;
    bool cross;
} lagkv_plan;
_Static_assert(sizeof(lagkv_plan) <= POLICY_PLAN_BYTES, "plan");

enum { SCORE, SHARE, DEPARTURE, N_FIELDS };

static int init(policy_setup *s) {
    lagkv_plan *plan = (lagkv_plan *)(void *)s->plan;
    plan->sinks = (int64_t)policy_get(s, "sinks")->number;
    plan->part = (int64_t)policy_get(s, "lag_size")->number;
    plan->cross = policy_get(s, "cross_scoring")->word == 1;
    s->needs = NEEDS_KEYS | NEEDS_VALUES;
    return 0;
}

static int fields(const policy_setup *s) {
    (void)s;
    return N_FIELDS;
}

static size_t state(const policy_setup *s, const policy_shape *shape) {
    (void)s;
    return 2 * (size_t)shape->head_dim; /* of each channel: its least value in the newer part, 1/range */
}

static int32_t first_at(const policy_view *v, int64_t position) {
    int32_t j = v->n;
    while (j > 0 && v->entry[j - 1] >= position) j--;
    return j;
}

/* Residents from .. to-1 are the newer part. */
static void measure_range(const policy_view *v, const float *x, size_t dim, int32_t from, int32_t to) {
    double *least = v->state, *inverse = v->state + dim;
    for (size_t c = 0; c < dim; c++) {
        float low = INFINITY, high = -INFINITY;
        for (int32_t j = from; j < to; j++) {
            float one = x[(size_t)v->entry[j] * dim + c];
            low = fminf(low, one);
            high = fmaxf(high, one);
        }
        double range = (double)high - (double)low;
        least[c] = (double)low;
        inverse[c] = range > 0 ? 1 / range : 0;
    }
}

static double departure(const policy_view *v, const float *x, size_t dim) {
    const double *least = v->state, *inverse = v->state + dim;
    double mean = 0, squares = 0;
    for (size_t c = 0; c < dim; c++) mean += ((double)x[c] - least[c]) * inverse[c];
    mean /= (double)dim;
    for (size_t c = 0; c < dim; c++) {
        double off = ((double)x[c] - least[c]) * inverse[c] - mean;
        squares += off * off;
    }
    return dim > 1 ? sqrt(squares / (double)(dim - 1)) : 0;
}

/* Half the shares of residents from .. to-1, by what x says, are added to SHARE; the newer part ends at `end`. */
static void add_shares(const policy_view *v, const float *x, size_t dim, int32_t from, int32_t to, int32_t end) {
    double *d = v->field[DEPARTURE], most = 0, sum = 0;
    measure_range(v, x, dim, to, end);
    for (int32_t j = from; j < to; j++) {
        d[j] = departure(v, x + (size_t)v->entry[j] * dim, dim);
        most = fmax(most, d[j]);
    }
    for (int32_t j = from; j < to; j++) sum += d[j] = exp(d[j] - most);
    for (int32_t j = from; j < to; j++) v->field[SHARE][j] += d[j] / sum / 2;
}

static int32_t rank_of(const double *share, int32_t j, int32_t from, int32_t to) {
    int32_t rank = 0;
    for (int32_t i = from; i < to; i++) rank += share[i] < share[j] || (share[i] == share[j] && i < j);
    return rank;
}

static void judge(const lagkv_plan *plan, const policy_view *v, int32_t from, int32_t to) {
    const policy_layer *d = v->data;
    size_t dim = (size_t)d->shape.head_dim;
    double *score = v->field[SCORE], *share = v->field[SHARE];
    for (int32_t j = from; j < to; j++) score[j] = 0;
    for (int32_t kv = 0; kv < d->shape.n_kv; kv++) {
        for (int32_t j = from; j < to; j++) share[j] = 0;
        add_shares(v, d->k[kv], dim, from, to, v->n);
        add_shares(v, d->v[kv], dim, from, to, v->n);
        for (int32_t j = from; j < to; j++) {
            double one = plan->cross ? share[j] : rank_of(share, j, from, to) / (double)plan->part;
            score[j] += one / d->shape.n_kv;
        }
    }
}

static void observe(const policy_setup *s, const policy_view *v) {
    const lagkv_plan *plan = (const lagkv_plan *)(const void *)s->plan;
    int64_t after_sinks = v->t + 1 - plan->sinks;
    v->field[SCORE][v->n - 1] = 1;
    if (after_sinks < 2 * plan->part || after_sinks % plan->part != 0) return;
    judge(plan, v, first_at(v, v->t + 1 - 2 * plan->part), first_at(v, v->t + 1 - plan->part));
}

static const double *score(const policy_setup *s, const policy_view *v, double *scratch) {
    (void)s;
    (void)scratch;
    return v->field[SCORE];
}

#define LAGKV(symbol, name_, cross_, help_, source_)                             \
    const policy symbol = {                                                      \
        .abi = POLICY_ABI,                                                       \
        .name = name_,                                                           \
        .help = help_,                                                           \
        .source = source_,                                                       \
        .family = FAMILY_STATIC,                                                 \
        .params =                                                                \
            (const policy_param[]){                                              \
                {.name = "lag_size",                                             \
                 .type = PARAM_COUNT,                                            \
                 .initial = "128",                                               \
                 .min = 1,                                                       \
                 .max = 4096,                                                    \
                 .help = "positions of a part"},                                 \
                {.name = "cross_scoring",                                        \
                 .type = PARAM_WORD,                                             \
                 .initial = cross_,                                              \
                 .words = "no|yes",                                              \
                 .help = "compare shares between parts, not ranks within each"}, \
                POLICY_GUARDS("4", "0", "head", ""),                             \
            },                                                                   \
        .init = init,                                                            \
        .fields = fields,                                                        \
        .state = state,                                                          \
        .observe = observe,                                                      \
        .score = score,                                                          \
    }

#define PAPER "Liang et al. 2025, LagKV, arXiv:2504.04704"
LAGKV(policy_lagkv, "lagkv", "no", "judge each part of the text by how its keys and values depart from the next part",
      PAPER);
LAGKV(policy_lagkv_cross, "lagkv-cross", "yes",
      "lagkv with an entry's share itself in place of its rank, so that parts compete",
      PAPER " (kvpress LagKVPress, cross_scoring=True)");
