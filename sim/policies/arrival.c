#include "sim/policies/arrival.h"
#include "sim/policies/vectors.h"

unsigned arrival_needs(arrival_kind kind) {
    static const unsigned needs[] = {NEEDS_KEYS, NEEDS_VALUES, NEEDS_VALUES | NEEDS_WO, NEEDS_KEYS};
    return needs[kind];
}

/* Elements of a lower triangle with its diagonal. */
static size_t triangle(size_t dim) {
    return dim * (dim + 1) / 2;
}

size_t arrival_state(arrival_kind kind, const policy_shape *shape) {
    size_t dim = (size_t)shape->head_dim;
    if (kind == ARRIVAL_OUTNORM) return (size_t)shape->n_head * triangle(dim);
    return kind == ARRIVAL_KEYSIM ? (size_t)shape->n_kv * dim : 0;
}

/* |v Wo|^2 = v G v with G = Wo Wo^T, made once a unit: head_dim^2 operations an entry in place of head_dim * n_embd. */
static void fill_gram(const float *wo, size_t dim, size_t width, double *gram) {
    for (size_t a = 0; a < dim; a++)
        for (size_t b = 0; b <= a; b++) *gram++ = vec_dot(wo + a * width, wo + b * width, width);
}

static double gram_norm(const float *x, size_t dim, const double *gram) {
    double sum = 0;
    for (size_t a = 0; a < dim; gram += ++a)
        sum += (double)x[a] * (2 * vec_dot_f64(x, gram, a) + gram[a] * (double)x[a]);
    return sqrt(fmax(sum, 0));
}

static double outnorm(const policy_view *v) {
    const policy_layer *d = v->data;
    const policy_shape *shape = &d->shape;
    size_t dim = (size_t)shape->head_dim, at = (size_t)v->t * dim;
    int32_t group = shape->n_head / shape->n_kv;
    double sum = 0;
    for (int32_t h = 0; h < shape->n_head; h++) {
        double *gram = v->state + (size_t)h * triangle(dim);
        if (v->t == 0) fill_gram(d->wo[h], dim, (size_t)shape->n_embd, gram);
        sum += gram_norm(d->v[h / group] + at, dim, gram);
    }
    return sum / shape->n_head;
}

/* The unit's state is the sum of the normalised keys of each kv head. */
static double similarity(const float *k, size_t dim, double *sum) {
    double length = vec_norm(k, dim);
    if (length > 0) vec_add(sum, k, 1 / length, dim);
    double whole = length * vec_norm_f64(sum, dim);
    return whole > 0 ? vec_dot_f64(k, sum, dim) / whole : 0;
}

double arrival_score(arrival_kind kind, const policy_view *v) {
    const policy_layer *d = v->data;
    size_t dim = (size_t)d->shape.head_dim, at = (size_t)v->t * dim;
    if (kind == ARRIVAL_OUTNORM) return outnorm(v);
    double sum = 0;
    for (int32_t kv = 0; kv < d->shape.n_kv; kv++) {
        if (kind == ARRIVAL_KEYNORM) sum -= vec_norm(d->k[kv] + at, dim);
        else if (kind == ARRIVAL_VALUENORM) sum += vec_norm(d->v[kv] + at, dim);
        else sum -= similarity(d->k[kv] + at, dim, v->state + (size_t)kv * dim);
    }
    return sum / d->shape.n_kv;
}
