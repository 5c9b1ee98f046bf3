#include "tracer/cpu/heads.h"
#include "tracer/cpu/rows.h"

size_t heads_turned(const model *m) {
    return (size_t)(m->n_head + m->n_kv_head) * (size_t)m->head_dim;
}

/* ---- rotation --------------------------------------------------------------------------------------------------- */

void heads_angles(const model *m, int32_t t0, size_t n, float *angles) {
    for (int i = 0; i < m->n_rope; i++)
        for (size_t t = 0; t < n; t++, angles += m->rope_dims)
            rows_rope_angles(t0 + (int32_t)t, m->rope_dims, m->rope[i].inverse, m->rope[i].scale, angles);
}

const float *heads_angles_of(const model *m, int layer, const float *angles, size_t n, size_t t) {
    int32_t rope = m->layer[layer].rope;
    return rope < 0 ? NULL : angles + ((size_t)rope * n + t) * (size_t)m->rope_dims;
}

void heads_turn(const model *m, float *heads, int n_head, const float *angles) {
    if (angles) rows_rope(heads, n_head, m->head_dim, m->rope_dims, m->rope_kind, angles);
}

void heads_turn_back(const model *m, float *heads, int n_head, const float *angles) {
    if (angles) rows_rope_back(heads, n_head, m->head_dim, m->rope_dims, m->rope_kind, angles);
}

/* ---- norms ------------------------------------------------------------------------------------------------------ */

/* Norms of n_head heads: each on its own, or all together. */
static void norm(const model *m, const float *weight, int n_head, float *heads) {
    size_t n = (size_t)n_head * (size_t)m->head_dim;
    size_t width = m->arch->qk_norm == ARCH_QK_NORM_WHOLE ? n : (size_t)m->head_dim;
    for (size_t i = 0; i < n; i += width) rows_head_norm(heads + i, weight, width, m->norm_eps);
}

static void norm_back(const model *m, const float *weight, int n_head, const float *raw, float *d) {
    size_t n = (size_t)n_head * (size_t)m->head_dim;
    size_t width = m->arch->qk_norm == ARCH_QK_NORM_WHOLE ? n : (size_t)m->head_dim;
    for (size_t i = 0; i < n; i += width) rows_head_norm_back(raw + i, weight, width, m->norm_eps, d + i);
}

void heads_norm(const backend_state *s, int layer, float *row) {
    const model *m = s->m;
    if (m->arch->qk_norm == ARCH_QK_NORM_NONE) return;
    norm(m, s->layer[layer].at[SLOT_Q_NORM], m->n_head, row);
    norm(m, s->layer[layer].at[SLOT_K_NORM], m->n_kv_head, row + m->n_head * m->head_dim);
}

void heads_norm_back(const backend_state *s, int layer, const float *raw, float *d_row) {
    const model *m = s->m;
    size_t k = (size_t)m->n_head * (size_t)m->head_dim;
    if (m->arch->qk_norm == ARCH_QK_NORM_NONE) return;
    norm_back(m, s->layer[layer].at[SLOT_Q_NORM], m->n_head, raw, d_row);
    norm_back(m, s->layer[layer].at[SLOT_K_NORM], m->n_kv_head, raw + k, d_row + k);
}
