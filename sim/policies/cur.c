/* CurDKV: approximate leverage scores of keys and values (Sengupta et al. 2025, arXiv:2509.15038; kvpress CURPress).
 *
 * The leverage of a resident is its squared norm as a share of the squared norms in its run of local_window_size
 * residents, counted from the first resident (0: of no run, the squared norm itself); keys and values are joined by
 * product, mean, or one of them is taken alone. Scores are made anew over the residents whenever something must leave,
 * so in a stream the runs are of neighbours in the cache, not in the text. Larger units: the mean over their kv heads
 * of scores that sum to 1. Not here: the paper's random projection before the norms (off by default in kvpress). */
#include "sim/policies/presets.h"
#include "sim/policies/vectors.h"

#include <string.h>

enum { OF_PRODUCT, OF_MEAN, OF_KEY, OF_VALUE };

static int init(policy_setup *s) {
    int type = policy_get(s, "leverage_type")->word;
    s->needs = type == OF_KEY ? NEEDS_KEYS : type == OF_VALUE ? NEEDS_VALUES : NEEDS_KEYS | NEEDS_VALUES;
    return 0;
}

static int fields(const policy_setup *s) {
    (void)s;
    return 2; /* leverage of keys and of values while scores are made */
}

static void observe(const policy_setup *s, const policy_view *v) {
    (void)s;
    (void)v;
}

static void scale_to_one(double *x, int32_t n) {
    double sum = 0;
    for (int32_t j = 0; j < n; j++) sum += x[j];
    for (int32_t j = 0; j < n && sum > 0; j++) x[j] /= sum;
}

static void leverage(const policy_view *v, const float *x, size_t dim, int32_t window, double *out) {
    for (int32_t j = 0; j < v->n; j++) {
        const float *one = x + (size_t)v->entry[j] * dim;
        out[j] = vec_dot(one, one, dim);
    }
    for (int32_t j = 0; window && j < v->n; j += window) scale_to_one(out + j, v->n - j < window ? v->n - j : window);
}

static double join(int type, double key, double value) {
    if (type == OF_KEY) return key;
    if (type == OF_VALUE) return value;
    return type == OF_MEAN ? (key + value) / 2 : key * value;
}

static const double *score(const policy_setup *s, const policy_view *v, double *scratch) {
    const policy_layer *d = v->data;
    size_t dim = (size_t)d->shape.head_dim;
    int type = policy_get(s, "leverage_type")->word;
    int32_t window = (int32_t)policy_get(s, "local_window_size")->number;
    double *key = v->field[0], *value = v->field[1];
    memset(scratch, 0, (size_t)v->n * sizeof *scratch);
    for (int32_t kv = 0; kv < d->shape.n_kv; kv++) {
        if (type != OF_VALUE) leverage(v, d->k[kv], dim, window, key);
        if (type != OF_KEY) leverage(v, d->v[kv], dim, window, value);
        for (int32_t j = 0; j < v->n; j++) key[j] = join(type, key[j], value[j]);
        scale_to_one(key, v->n);
        for (int32_t j = 0; j < v->n; j++) scratch[j] += key[j] / d->shape.n_kv;
    }
    return scratch;
}

const policy policy_cur = {
    .abi = POLICY_ABI,
    .name = "cur",
    .help = "keep keys and values of large leverage: their share of the squared norms near by",
    .source = "Sengupta et al. 2025, CurDKV, arXiv:2509.15038",
    .family = FAMILY_STATIC,
    .params =
        (const policy_param[]){
            {.name = "leverage_type",
             .type = PARAM_WORD,
             .initial = "kv_product",
             .words = "kv_product|kv_avg|key|value",
             .help = "how the leverages of key and value join"},
            {.name = "local_window_size",
             .type = PARAM_COUNT,
             .initial = "16",
             .max = 1e6,
             .help = "residents in a run; 0 takes squared norms as they are"},
            POLICY_GUARDS("4", "0", "head", ""),
        },
    .init = init,
    .fields = fields,
    .observe = observe,
    .score = score,
};
