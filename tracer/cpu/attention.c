/* Causal attention in row tiles: a tile's scores fill the columns up to its own end, so memory is linear in T. */
#include "base/err.h"
#include "tracer/cpu/forward.h"
#include "traces/kernels.h"

#include <cblas.h>
#include <math.h>
#include <string.h>

/* A strip's scores stay in the second-level cache up to some thousand columns. */
enum { STRIP_ROWS = 128 };
_Static_assert(BACKEND_ROW_TILE % STRIP_ROWS == 0, "a row tile is whole strips");

/* Probabilities handed to the sink between two rows_done, at most: what bounds the memory of the sink. */
#define BATCH_ENTRIES ((size_t)64 << 20)

typedef struct batch {
    cpu_run *r;
    size_t first, row_tiles; /* task i is tile (first + i): head, row tile */
} batch;

/* Turn rows row0 .. row0+n-1 of scores into probabilities: zero above the diagonal up to column `cols`. */
static int softmax_rows(const cpu_run *r, int head, size_t row0, size_t n, size_t cols, float *scores) {
    const model *m = r->s->m;
    size_t window = (size_t)m->window[r->layer];
    size_t unit = (size_t)r->layer * (size_t)m->n_kv_head + (size_t)(head / (m->n_head / m->n_kv_head));
    const int32_t *evict_at = r->evict_at ? r->evict_at + unit * kernel_pad(r->T) : NULL;
    for (size_t i = 0; i < n; i++) {
        size_t t = row0 + i, first = window && t >= window ? t - window + 1 : 0, done = kernel_pad(t + 1);
        float *row = scores + i * r->ld_scores;
        double lse = kernels()->softmax(row, first, t, m->softcap, evict_at);
        if (isnan(lse))
            return err_set(ERR_DATA, "non-finite logits at layer %d, token %zu (attention head %d)", r->layer, t, head);
        if (done < cols) memset(row + done, 0, (cols - done) * sizeof *row);
        r->lse[(size_t)head * r->T + t] = (float)lse;
    }
    return 0;
}

int cpu_attention_rows(const cpu_run *r, int head, size_t row0, size_t n, size_t cols, float *scores) {
    const model *m = r->s->m;
    size_t dim = (size_t)m->head_dim, kv_head = (size_t)(head / (m->n_head / m->n_kv_head)), end = row0 + n;
    const float *q = r->qkv + row0 * r->ld_qkv + (size_t)head * dim;
    const float *k = r->qkv + ((size_t)m->n_head + kv_head) * dim;
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (blasint)n, (blasint)end, (blasint)dim, m->scale, q,
                (blasint)r->ld_qkv, k, (blasint)r->ld_qkv, 0.0f, scores, (blasint)r->ld_scores);
    return softmax_rows(r, head, row0, n, cols, scores);
}

/* Rows row0 .. row0+n-1 of one head: probabilities into `scores` up to column `cols` (padded), output into mix. */
static int attend(cpu_run *r, int head, size_t row0, size_t n, size_t cols, float *scores) {
    const model *m = r->s->m;
    size_t dim = (size_t)m->head_dim, kv_head = (size_t)(head / (m->n_head / m->n_kv_head)), end = row0 + n;
    const float *v = r->qkv + ((size_t)(m->n_head + m->n_kv_head) + kv_head) * dim;
    TRY(cpu_attention_rows(r, head, row0, n, cols, scores));
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (blasint)n, (blasint)dim, (blasint)end, 1.0f, scores,
                (blasint)r->ld_scores, v, (blasint)r->ld_qkv, 0.0f, r->mix + row0 * r->ld_mix + (size_t)head * dim,
                (blasint)r->ld_mix);
    return 0;
}

static int attend_tile(void *context, size_t task, int worker) {
    const batch *b = context;
    cpu_run *r = b->r;
    int head = (int)((b->first + task) / b->row_tiles);
    size_t row0 = (b->first + task) % b->row_tiles * BACKEND_ROW_TILE, left = r->T - row0;
    size_t n = left < BACKEND_ROW_TILE ? left : BACKEND_ROW_TILE;
    float *scores = r->scratch[worker];
    for (size_t i = 0; i < n; i += STRIP_ROWS) {
        size_t strip = n - i < STRIP_ROWS ? n - i : STRIP_ROWS;
        /* Strips of a tile that is handed out stand one below the other, each as wide as the tile. */
        if (r->sink->rows) TRY(attend(r, head, row0 + i, strip, kernel_pad(row0 + n), scores + i * r->ld_scores));
        else TRY(attend(r, head, row0 + i, strip, row0 + i + strip, scores));
    }
    if (!r->sink->rows) return 0;
    return r->sink->rows(r->sink->context, r->layer, head, (int32_t)row0, (int32_t)n, scores, r->ld_scores);
}

/* How many tiles from `first` on fit a batch; at least one. */
static size_t batch_size(const batch *b, size_t total) {
    size_t n = 0, entries = 0;
    while (b->first + n < total) {
        entries += ((b->first + n) % b->row_tiles + 1) * BACKEND_ROW_TILE * BACKEND_ROW_TILE;
        if (n && entries > BATCH_ENTRIES) break;
        n++;
    }
    return n;
}

int cpu_attention(cpu_run *r) {
    batch b = {.r = r, .row_tiles = (r->T + BACKEND_ROW_TILE - 1) / BACKEND_ROW_TILE};
    size_t total = b.row_tiles * (size_t)r->s->m->n_head;
    while (b.first < total) {
        size_t n = r->sink->rows ? batch_size(&b, total) : total;
        TRY(pool_run(r->s->p, n, attend_tile, &b));
        if (r->sink->rows_done) TRY(r->sink->rows_done(r->sink->context, r->layer));
        b.first += n;
    }
    return 0;
}
