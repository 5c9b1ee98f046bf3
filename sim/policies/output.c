#include "sim/policies/output.h"
#include "base/err.h"

#include <math.h>

int output_init(policy_setup *s, unsigned needs) {
    TRY(mix_init(s));
    if (policy_get(s, "memory")->word == MEMORY_AGE)
        return err_set(ERR_USAGE, "%s: memory age is a time, no amount of attention", s->policy->name);
    s->needs |= needs;
    return 0;
}

double output_value_norm(const policy_view *v, int32_t i) {
    size_t dim = (size_t)v->data->shape.head_dim;
    int n_kv = v->data->shape.n_kv;
    double sum = 0;
    for (int kv = 0; kv < n_kv; kv++) {
        const float *x = v->data->v[kv] + (size_t)i * dim;
        for (size_t c = 0; c < dim; c++) sum += fabs((double)x[c]);
    }
    return sum / n_kv;
}
