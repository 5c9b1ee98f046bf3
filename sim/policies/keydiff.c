/* KeyDiff: keep the keys that differ from the rest.
 *
 * The score of a resident is minus the cosine of its key to the mean of the residents' normalised keys, the newest
 * included (Park et al. 2025, arXiv:2504.15364; kvpress KeyDiffPress). The mean is taken anew whenever something must
 * leave, over the residents of that moment, as the paper does block by block: schedule=every:P is its block of P.
 * Larger units: the mean over their kv heads. A key of zeros has no direction: its cosine counts as 0. */
#include "sim/policies/presets.h"
#include "sim/policies/vectors.h"

#include <string.h>

static int init(policy_setup *s) {
    s->needs = NEEDS_KEYS;
    return 0;
}

static int fields(const policy_setup *s) {
    (void)s;
    return 1; /* 1/|k| while scores are made */
}

static size_t state(const policy_setup *s, const policy_shape *shape) {
    (void)s;
    return (size_t)shape->head_dim; /* the sum of normalised keys; its length does not matter */
}

static void observe(const policy_setup *s, const policy_view *v) {
    (void)s;
    (void)v;
}

static const double *score(const policy_setup *s, const policy_view *v, double *scratch) {
    (void)s;
    const policy_layer *d = v->data;
    size_t dim = (size_t)d->shape.head_dim;
    double *sum = v->state, *inverse = v->field[0];
    memset(scratch, 0, (size_t)v->n * sizeof *scratch);
    for (int32_t kv = 0; kv < d->shape.n_kv; kv++) {
        memset(sum, 0, dim * sizeof *sum);
        for (int32_t j = 0; j < v->n; j++) {
            const float *k = d->k[kv] + (size_t)v->entry[j] * dim;
            double length = vec_norm(k, dim);
            inverse[j] = length > 0 ? 1 / length : 0;
            vec_add(sum, k, inverse[j], dim);
        }
        double whole = vec_norm_f64(sum, dim) * d->shape.n_kv;
        if (whole <= 0) continue;
        for (int32_t j = 0; j < v->n; j++)
            scratch[j] -= inverse[j] * vec_dot_f64(d->k[kv] + (size_t)v->entry[j] * dim, sum, dim) / whole;
    }
    return scratch;
}

const policy policy_keydiff = {
    .abi = POLICY_ABI,
    .name = "keydiff",
    .help = "evict the keys most like the mean key of the residents",
    .source = "Park et al. 2025, KeyDiff, arXiv:2504.15364",
    .family = FAMILY_STATIC,
    .params = (const policy_param[]){POLICY_GUARDS("0", "0", "head", "")},
    .init = init,
    .fields = fields,
    .state = state,
    .observe = observe,
    .score = score,
};
