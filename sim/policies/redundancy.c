#include "sim/policies/redundancy.h"
#include "sim/policies/vectors.h"

#include <string.h>

size_t redundancy_state(const policy_setup *s, const policy_shape *shape) {
    (void)s;
    return (size_t)shape->head_dim;
}

static void softmax(double *x, int32_t n) {
    double most = x[0], sum = 0;
    for (int32_t j = 1; j < n; j++) most = fmax(most, x[j]);
    for (int32_t j = 0; j < n; j++) sum += x[j] = exp(x[j] - most);
    for (int32_t j = 0; j < n; j++) x[j] /= sum;
}

/* The cosines are summed through the sum of normalised keys; the excused ones are taken out again. */
void redundancy_of(const policy_view *v, int32_t kv, const redundancy_rule *rule, double *inverse, double *out) {
    size_t dim = (size_t)v->data->shape.head_dim;
    const float *keys = v->data->k[kv];
    double *total = v->state;
#define KEY(j) (keys + (size_t)v->entry[j] * dim)
    memset(total, 0, dim * sizeof *total);
    for (int32_t j = 0; j < v->n; j++) {
        double length = vec_norm(KEY(j), dim);
        inverse[j] = length > 0 ? 1 / length : 0;
        vec_add(total, KEY(j), inverse[j], dim);
    }
    for (int32_t j = 0; j < v->n; j++) out[j] = inverse[j] * vec_dot_f64(KEY(j), total, dim) - (inverse[j] > 0 ? 1 : 0);
    for (int32_t j = 0; j < v->n; j++) {
        int32_t i = v->n - 1;
        double cosine = 0;
        for (; i >= 0; i--) {
            cosine = i == j ? 0 : inverse[i] * inverse[j] * vec_dot(KEY(i), KEY(j), dim);
            if (i != j && cosine > rule->similar) break;
        }
        if (i >= 0) out[i] -= cosine;
        else if (!rule->excuse_nothing) out[0] -= cosine; /* of the last one tried, which is the first */
    }
#undef KEY
    for (int32_t j = 0; j < v->n; j++) out[j] /= v->n;
    softmax(out, v->n);
}
