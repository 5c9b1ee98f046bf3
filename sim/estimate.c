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

/* The values that a query head sees. */
static const float *values_of(const trace_model *m, const float *v, int head, int32_t n_tokens) {
    return v + (size_t)(head / (m->n_head / m->n_kv_head)) * (size_t)n_tokens * (size_t)m->head_dim;
}

int estimate_probe_streams(const trace_model *m, int layer, const float *v, int32_t n_tokens, const float *wo,
                           estimate_streams *out) {
    TRY(new_streams(m, n_tokens, ESTIMATE_PROBES, out));
    size_t dim = (size_t)m->head_dim, width = (size_t)m->n_embd;
    double *r = mem_new(ESTIMATE_PROBES * width, sizeof *r, "probes");
    float *x = mem_new(ESTIMATE_PROBES * dim, sizeof *x, "probes");
    float *packed = mem_new(out->stride * dim, sizeof *packed, "values");
    int code = r && x && packed ? 0 : ERR_DATA;
    if (!code) draw_probes(layer, width, r);
    for (int h = 0; h < m->n_head && !code; h++) {
        kernels()->pack_keys(values_of(m, v, h, n_tokens), (size_t)n_tokens, dim, packed);
        probe_vectors(m, h, wo, r, x);
        kernels()->scores(x, ESTIMATE_PROBES, packed, (size_t)n_tokens, dim, 1.0f,
                          out->s + (size_t)h * ESTIMATE_PROBES * out->stride, out->stride);
    }
    mem_free(r);
    mem_free(x);
    mem_free(packed);
    return code;
}

int estimate_value_streams(const trace_model *m, const float *v, int32_t n_tokens, estimate_streams *out) {
    TRY(new_streams(m, n_tokens, m->head_dim, out));
    size_t dim = (size_t)m->head_dim;
    for (int h = 0; h < m->n_head; h++) {
        const float *of_head = values_of(m, v, h, n_tokens);
        float *s = out->s + (size_t)h * dim * out->stride;
        for (size_t i = 0; i < (size_t)n_tokens; i++)
            for (size_t c = 0; c < dim; c++) s[c * out->stride + i] = of_head[i * dim + c];
    }
    return 0;
}

void estimate_prepare(const float *a, int32_t t, const float *const *s, int n_streams, size_t stride, float *d,
                      float *mean, estimate_row *out) {
    const kernel_table *k = kernels();
    size_t n = (size_t)t + 1;
    *out = (estimate_row){t, n_streams, k->sum(a, n), a, d, stride, mean};
    for (int x = 0; x < n_streams; x++) {
        float all = (float)(k->dot(a, s[x], n) / out->z);
        if (mean) mean[x] = all;
        k->deviation(a, s[x], all, d + (size_t)x * stride, n);
    }
}

/* Bytes of rows that stay in the first-level cache beside masks. */
enum { PIECE_BYTES = 36 << 10, AHEAD = 3 };

size_t estimate_lanes(size_t n) {
    return n * KERNEL_STREAMS_MAX * KERNEL_LANES;
}

/* Masks and sums of a configuration that comes later: they are far away, and each is touched once a step. */
static void fetch_ahead(const estimate_lost *lost, int32_t from, int32_t n, size_t place) {
    const int line = 64 / sizeof *lost->gone;
    for (int32_t b = from / KERNEL_LANES; b < (from + n) / KERNEL_LANES; b += line) __builtin_prefetch(lost->gone + b);
    __builtin_prefetch(lost->out + place, 1);
    __builtin_prefetch(lost->out + place + KERNEL_STREAMS_MAX / 2, 1);
}

/* Some rows, over what each configuration lost: out[place + k] = sum of x[k]. */
static void sum_lost(const float *const *x, int n_x, int32_t end, const estimate_lost *lost, size_t n, size_t place,
                     float (*lanes)[KERNEL_LANES]) {
    const kernel_table *table = kernels();
    int32_t piece = (int32_t)(PIECE_BYTES / sizeof(float) / (size_t)n_x / KERNEL_LANES * KERNEL_LANES);
    memset(lanes, 0, n * (size_t)n_x * sizeof *lanes);
    for (int32_t from = 0; from < end; from += piece) {
        const float *here[KERNEL_STREAMS_MAX];
        for (int k = 0; k < n_x; k++) here[k] = x[k] + from;
        for (size_t i = 0; i < n; i++) {
            if (i + AHEAD < n) fetch_ahead(&lost[i + AHEAD], from, end - from < piece ? end - from : piece, place);
            int32_t to = lost[i].end < end ? lost[i].end : end;
            if (to - from > piece) to = from + piece;
            if (to > from)
                table->masked_lanes(here, n_x, lost[i].gone + from / KERNEL_LANES, 0, (size_t)(to - from),
                                    lanes + i * (size_t)n_x);
        }
    }
    for (size_t i = 0; i < n; i++)
        table->totals((const float(*)[KERNEL_LANES])(lanes + i * (size_t)n_x), n_x, lost[i].out + place);
}

/* The same over the visible entries, for one head and one configuration. */
static void sum_visible(const estimate_row *row, const uint16_t *gone, double *out) {
    for (int done = 0; done < row->n_streams + 1; done += KERNEL_STREAMS_MAX) {
        _Alignas(64) float lanes[KERNEL_STREAMS_MAX][KERNEL_LANES] = {{0}};
        const float *x[KERNEL_STREAMS_MAX];
        int take = row->n_streams + 1 - done;
        if (take > KERNEL_STREAMS_MAX) take = KERNEL_STREAMS_MAX;
        for (int k = 0; k < take; k++) x[k] = done + k == 0 ? row->a : row->d + (size_t)(done + k - 1) * row->stride;
        kernels()->masked_lanes(x, take, gone, 1, (size_t)row->t + 1, lanes);
        kernels()->totals((const float(*)[KERNEL_LANES])lanes, take, out + done);
    }
}

/* From sums to m and x.delta, in place. */
static int finish(const estimate_row *row, const estimate_lost *lost, double *out) {
    double gone = out[0], visible = row->z - gone, sign = 1;
    if (gone > 0.5 * row->z) { /* the lost side is the larger one: its sums cancel, the visible side's do not */
        sum_visible(row, lost->gone, out);
        visible = out[0];
        sign = -1;
    }
    out[0] = sign > 0 ? gone / row->z : 1 - visible / row->z;
    int floored = visible < 1e-6 * row->z;
    if (floored) visible = 1e-6 * row->z;
    for (int k = 1; k <= row->n_streams; k++) out[k] = sign * out[k] / visible;
    return floored;
}

int estimate_masked(const estimate_row *rows, int n_heads, estimate_lost *lost, size_t n, float *lanes) {
    int each = 1 + rows->n_streams, all = n_heads * each;
    int parts = (all + KERNEL_STREAMS_MAX - 1) / KERNEL_STREAMS_MAX, done = 0;
    for (int part = 0; part < parts; part++) {
        const float *x[KERNEL_STREAMS_MAX];
        int take = (all - done + parts - part - 1) / (parts - part);
        for (int k = 0; k < take; k++) {
            const estimate_row *row = &rows[(done + k) / each];
            int stream = (done + k) % each;
            x[k] = stream == 0 ? row->a : row->d + (size_t)(stream - 1) * row->stride;
        }
        sum_lost(x, take, rows->t + 1, lost, n, (size_t)done, (float(*)[KERNEL_LANES])lanes);
        done += take;
    }
    int floored = 0;
    for (size_t i = 0; i < n; i++) {
        lost[i].floored = 0;
        for (int h = 0; h < n_heads; h++) lost[i].floored += finish(&rows[h], &lost[i], lost[i].out + h * each);
        floored += lost[i].floored;
    }
    return floored;
}
