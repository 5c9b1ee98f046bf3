/* The way back through causal attention. With P the probabilities and dO a head's gradient,
 *
 *     dP = dO V^T    dS = P o (dP - rowsum(P o dP))    dQ = scale dS K    dK = scale dS^T Q    dV = P^T dO
 *
 * (Dao et al. 2022, appendix B.4). A strip of rows of P is computed again once and serves all label sets. A task is a
 * chunk of a head's rows: it owns its rows of dQ and sums dK and dV of its own; these are then added up over a group's
 * heads and chunks in index order. */
#include "base/err.h"
#include "tracer/cpu/backward.h"
#include "tracer/cpu/heads.h"
#include "traces/kernels.h"

#include <cblas.h>
#include <math.h>

enum {
    STRIP_ROWS = 128,
    WANTED_TASKS = 32,
    SUM_ROWS = 64 /* rows of one task that adds up dK and dV */
};
_Static_assert(2 * STRIP_ROWS <= BACKEND_ROW_TILE, "a worker's scratch holds two strips: P and dS");

static size_t count_strips(size_t T) {
    return (T + STRIP_ROWS - 1) / STRIP_ROWS;
}

size_t cpu_back_chunks(const model *m, size_t T) {
    size_t wanted = (WANTED_TASKS + (size_t)m->n_head - 1) / (size_t)m->n_head, strips = count_strips(T);
    return wanted < strips ? wanted : strips;
}

/* The first row of a chunk: chunks are whole strips and have about the same share of the triangle. */
static size_t chunk_start(const cpu_back *b, size_t chunk) {
    size_t T = b->run.T, strips = count_strips(T);
    size_t strip = (size_t)((double)strips * sqrt((double)chunk / (double)b->chunks) + 0.5);
    return strip < strips ? strip * STRIP_ROWS : T;
}

/* dK (which = 0) or dV (1) of a set, as one chunk of one head has it: [T][head_dim], of which the rows before the
 * chunk's end are set. */
static float *sum_of(const cpu_back *b, size_t head, size_t chunk, size_t set, size_t which) {
    size_t index = ((head * b->chunks + chunk) * b->sets + set) * 2 + which;
    return b->d_kv + index * b->run.T * (size_t)b->run.s->m->head_dim;
}

/* dP becomes -dS: the sign goes with `scale`. */
static void scores_back(const cpu_run *r, size_t head, size_t row0, size_t n, const float *p, float *d_p) {
    float cap = r->s->m->softcap;
    for (size_t i = 0; i < n; i++, p += r->ld_scores, d_p += r->ld_scores) {
        size_t cols = row0 + i + 1;
        kernels()->deviation(p, d_p, (float)kernels()->dot(p, d_p, cols), d_p, row0 + n);
        /* The slope of cap * tanh(x / cap) is 1 - tanh^2; the capped score is log p + lse. */
        float lse = r->lse[head * r->T + row0 + i];
        for (size_t j = 0; cap > 0 && j < cols; j++) {
            float tanh_x = p[j] > 0 ? (logf(p[j]) + lse) / cap : 0;
            d_p[j] *= 1 - tanh_x * tanh_x;
        }
    }
}

/* out (+)= alpha * a^T b over n rows: a [n][rows], b [n][dim]. */
static void product_of_columns(size_t rows, size_t dim, size_t n, float alpha, const float *a, size_t lda,
                               const float *b, size_t ldb, bool accumulate, float *out) {
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, (blasint)rows, (blasint)dim, (blasint)n, alpha, a,
                (blasint)lda, b, (blasint)ldb, accumulate ? 1.0f : 0.0f, out, (blasint)dim);
}

/* Rows row0 .. row0+n-1 of one head, all sets. `first`: the chunk's sums begin here. */
static int strip_back(cpu_back *b, size_t head, size_t chunk, size_t row0, size_t n, bool first, int worker) {
    cpu_run *r = &b->run;
    const model *m = r->s->m;
    size_t dim = (size_t)m->head_dim, end = row0 + n, kv_head = head / (size_t)(m->n_head / m->n_kv_head);
    const float *q = r->qkv + row0 * r->ld_qkv + head * dim;
    const float *k = r->qkv + ((size_t)m->n_head + kv_head) * dim, *v = k + (size_t)m->n_kv_head * dim;
    float *p = r->scratch[worker], *d_s = p + STRIP_ROWS * r->ld_scores;
    TRY(cpu_attention_rows(r, (int)head, row0, n, kernel_pad(end), p));
    for (size_t set = 0; set < b->sets; set++) {
        size_t row = set * r->T + row0;
        const float *d_o = b->d_mix + row * r->ld_mix + head * dim;
        float *d_q = b->d_qkv + row * r->ld_qkv + head * dim;
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (blasint)n, (blasint)end, (blasint)dim, 1.0f, d_o,
                    (blasint)r->ld_mix, v, (blasint)r->ld_qkv, 0.0f, d_s, (blasint)r->ld_scores);
        scores_back(r, head, row0, n, p, d_s);
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (blasint)n, (blasint)dim, (blasint)end, -m->scale, d_s,
                    (blasint)r->ld_scores, k, (blasint)r->ld_qkv, 0.0f, d_q, (blasint)r->ld_qkv);
        product_of_columns(end, dim, n, -m->scale, d_s, r->ld_scores, q, r->ld_qkv, !first,
                           sum_of(b, head, chunk, set, 0));
        product_of_columns(end, dim, n, 1.0f, p, r->ld_scores, d_o, r->ld_mix, !first, sum_of(b, head, chunk, set, 1));
    }
    return 0;
}

/* Strips from last to first: the last one reaches all columns, and so begins the sums. */
static int chunk_back(void *context, size_t task, int worker) {
    cpu_back *b = context;
    size_t head = task / b->chunks, chunk = task % b->chunks;
    size_t from = chunk_start(b, chunk), to = chunk_start(b, chunk + 1), row0;
    for (size_t end = to; end > from; end = row0) {
        row0 = (end - 1) / STRIP_ROWS * STRIP_ROWS;
        TRY(strip_back(b, head, chunk, row0, end - row0, end == to, worker));
    }
    return 0;
}

/* out = what all chunks that reach step t and all heads of a group came to. */
static void sum_group(const cpu_back *b, size_t kv_head, size_t set, size_t which, size_t t, float *out) {
    const model *m = b->run.s->m;
    size_t dim = (size_t)m->head_dim, group = (size_t)(m->n_head / m->n_kv_head);
    for (size_t d = 0; d < dim; d++) out[d] = 0;
    for (size_t head = kv_head * group; head < (kv_head + 1) * group; head++)
        for (size_t chunk = 0; chunk < b->chunks; chunk++) {
            size_t from = chunk_start(b, chunk), to = chunk_start(b, chunk + 1);
            if (from == to || to <= t) continue;
            const float *part = sum_of(b, head, chunk, set, which) + t * dim;
            for (size_t d = 0; d < dim; d++) out[d] += part[d];
        }
}

/* Some steps of one set: k and v summed, q and k turned back and through their norms. */
static int sum_rows(void *context, size_t task, int worker) {
    (void)worker;
    cpu_back *b = context;
    const cpu_run *r = &b->run;
    const model *m = r->s->m;
    size_t tasks = (r->T + SUM_ROWS - 1) / SUM_ROWS, set = task / tasks, from = task % tasks * SUM_ROWS;
    size_t dim = (size_t)m->head_dim, kv_heads = (size_t)m->n_kv_head;
    for (size_t t = from; t < from + SUM_ROWS && t < r->T; t++) {
        float *row = b->d_qkv + (set * r->T + t) * r->ld_qkv, *kv = row + (size_t)m->n_head * dim;
        for (size_t i = 0; i < 2 * kv_heads; i++) sum_group(b, i % kv_heads, set, i / kv_heads, t, kv + i * dim);
        heads_turn_back(m, row, m->n_head + m->n_kv_head, heads_angles_of(m, r->layer, r->angles, r->T, t));
        if (r->raw) heads_norm_back(r->s, r->layer, r->raw + t * r->ld_qkv, row);
    }
    return 0;
}

int cpu_attention_back(cpu_back *b) {
    pool *p = b->run.s->p;
    TRY(pool_run(p, (size_t)b->run.s->m->n_head * b->chunks, chunk_back, b));
    return pool_run(p, b->sets * ((b->run.T + SUM_ROWS - 1) / SUM_ROWS), sum_rows, b);
}
