#include "sim/estimate.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/rng.h"

#include <string.h>

static int new_streams(const trace_model *m, int32_t n_tokens, int n_streams, estimate_streams *out) {
    *out = (estimate_streams){.n_streams = n_streams, .stride = kernel_pad((size_t)n_tokens)};
    out->s = mem_new((size_t)m->n_head * (size_t)n_streams * out->stride, sizeof *out->s, "streams");
    return out->s ? 0 : ERR_DATA;
}

void estimate_streams_free(estimate_streams *e) {
    mem_free(e->s);
    *e = (estimate_streams){0};
}

/* The fixed probes of a layer, r[p][j]. */
static void draw_probes(int layer, size_t width, double *r) {
    for (uint32_t p = 0; p < ESTIMATE_PROBES; p++)
        for (size_t j = 0; j < width; j++)
            r[p * width + j] = rng_normal(rng_philox(ESTIMATE_PROBE_SEED, (uint32_t)j, p, (uint32_t)layer, 0));
}

/* x[p][c] = sum over j of Wo[h*head_dim + c][j] r[p][j]. */
static void probe_vectors(const trace_model *m, int head, const float *wo, const double *r, float *x) {
    size_t dim = (size_t)m->head_dim, width = (size_t)m->n_embd;
    for (size_t c = 0; c < dim; c++) {
        const float *row = wo + ((size_t)head * dim + c) * width;
        double sum[ESTIMATE_PROBES] = {0};
        for (size_t j = 0; j < width; j++)
            for (size_t p = 0; p < ESTIMATE_PROBES; p++) sum[p] += (double)row[j] * r[p * width + j];
        for (size_t p = 0; p < ESTIMATE_PROBES; p++) x[p * dim + c] = (float)sum[p];
    }
}

int estimate_probe_streams(const trace_model *m, int layer, const trace_layer *l, int32_t n_tokens, const float *wo,
                           estimate_streams *out) {
    TRY(new_streams(m, n_tokens, ESTIMATE_PROBES, out));
    size_t dim = (size_t)m->head_dim, width = (size_t)m->n_embd;
    double *r = mem_new(ESTIMATE_PROBES * width, sizeof *r, "probes");
    float *x = mem_new(ESTIMATE_PROBES * dim, sizeof *x, "probes");
    float *packed = mem_new(out->stride * dim, sizeof *packed, "values");
    int code = r && x && packed ? 0 : ERR_DATA;
    if (!code) draw_probes(layer, width, r);
    for (int h = 0; h < m->n_head && !code; h++) {
        kernels()->pack_keys(trace_layer_v(l, h / (m->n_head / m->n_kv_head)), (size_t)n_tokens, dim, packed);
        probe_vectors(m, h, wo, r, x);
        kernels()->scores(x, ESTIMATE_PROBES, packed, (size_t)n_tokens, dim, 1.0f,
                          out->s + (size_t)h * ESTIMATE_PROBES * out->stride, out->stride);
    }
    mem_free(r);
    mem_free(x);
    mem_free(packed);
    return code;
}

int estimate_value_streams(const trace_model *m, const trace_layer *l, int32_t n_tokens, estimate_streams *out) {
    TRY(new_streams(m, n_tokens, m->head_dim, out));
    size_t dim = (size_t)m->head_dim;
    for (int h = 0; h < m->n_head; h++) {
        const float *v = trace_layer_v(l, h / (m->n_head / m->n_kv_head));
        float *s = out->s + (size_t)h * dim * out->stride;
        for (size_t i = 0; i < (size_t)n_tokens; i++)
            for (size_t c = 0; c < dim; c++) s[c * out->stride + i] = v[i * dim + c];
    }
    return 0;
}

void estimate_prepare(const float *a, int32_t t, const float *const *s, int n_streams, size_t stride, float *d,
                      estimate_row *out) {
    const kernel_table *k = kernels();
    size_t n = (size_t)t + 1;
    *out = (estimate_row){.t = t, .n_streams = n_streams, .z = k->sum(a, n), .a = a, .d = d, .stride = stride};
    for (int x = 0; x < n_streams; x++) {
        float all = (float)(k->dot(a, s[x], n) / out->z);
        k->deviation(a, s[x], all, d + (size_t)x * stride, n);
    }
}

/* Sums of a and the deviations over one side, a few rows at a time. */
static void sums(const estimate_row *row, const int32_t *evict_at, int evicted, size_t n, double *out) {
    for (int done = 0; done < row->n_streams + 1; done += KERNEL_STREAMS_MAX) {
        const float *x[KERNEL_STREAMS_MAX];
        int take = row->n_streams + 1 - done;
        if (take > KERNEL_STREAMS_MAX) take = KERNEL_STREAMS_MAX;
        for (int k = 0; k < take; k++) x[k] = done + k == 0 ? row->a : row->d + (size_t)(done + k - 1) * row->stride;
        kernels()->masked_sums(x, take, evict_at, row->t, evicted, n, out + done);
    }
}

int estimate_masked(const estimate_row *row, const int32_t *evict_at, int32_t left_end, double *out) {
    int32_t n = row->t + 1;
    sums(row, evict_at, 1, (size_t)(left_end < n ? left_end : n), out);
    double lost = out[0], visible = row->z - lost, sign = 1;
    if (lost > 0.5 * row->z) { /* the lost side is the larger one: its sums cancel, the visible side's do not */
        sums(row, evict_at, 0, (size_t)n, out);
        visible = out[0];
        sign = -1;
    }
    out[0] = sign > 0 ? lost / row->z : 1 - visible / row->z;
    int floored = visible < 1e-6 * row->z;
    if (floored) visible = 1e-6 * row->z;
    for (int k = 1; k <= row->n_streams; k++) out[k] = sign * out[k] / visible;
    return floored;
}
