#include "tracer/capture_tiles.h"
#include "base/err.h"
#include "base/mem.h"

/* Where a chunk stands, and how much of it is filled. */
typedef struct place {
    size_t head, row, col; /* row and col in tiles */
    size_t rows, cols;
} place;

static size_t at_most(size_t n, size_t most) {
    return n < most ? n : most;
}

static place place_of(const capture_tiles *t, size_t index) {
    size_t tiles = (t->T + TRACE_TILE - 1) / TRACE_TILE;
    place p = {0};
    if (t->array == TRACE_PROBS) {
        size_t each = tiles * (tiles + 1) / 2;
        p.head = index / each;
        p.col = index % each;
        while (p.col > p.row) p.col -= ++p.row;
        p.cols = at_most(t->T - p.col * TRACE_TILE, TRACE_TILE);
    } else {
        p.head = index / tiles;
        p.row = index % tiles;
        p.cols = (size_t)t->c->model->head_dim;
    }
    p.rows = at_most(t->T - p.row * TRACE_TILE, TRACE_TILE);
    return p;
}

static int pack_tile(void *context, size_t task, int worker) {
    (void)worker;
    capture_tiles *t = context;
    static const char *const name[] = {
        [TRACE_PROBS] = "attention probabilities", [TRACE_Q] = "q", [TRACE_K] = "k", [TRACE_V] = "v"};
    place p = place_of(t, t->first + task);
    size_t edge = at_most(t->T, TRACE_TILE), probs = t->array == TRACE_PROBS;
    size_t bytes = edge * (probs ? edge : (size_t)t->c->model->head_dim) * 2;
    float *sum = probs && t->row_sum ? t->sum + task * TRACE_TILE : NULL;
    int code = trace_pack_half(t->c->writer, t->array, t->bytes + task * bytes, p.rows, p.cols, sum, &t->chunk[task]);
    return code ? err_prefix(code, "%s of layer %d, head %zu", name[t->array], t->layer, p.head) : 0;
}

static int put_tile(capture_tiles *t, size_t task) {
    place p = place_of(t, t->first + task);
    if (t->array == TRACE_PROBS && t->row_sum) {
        float *row_sum = t->row_sum + p.head * t->T + p.row * TRACE_TILE;
        for (size_t r = 0; r < p.rows; r++) row_sum[r] += t->sum[task * TRACE_TILE + r];
    }
    return trace_put(t->c->writer, t->array, t->layer, (int)p.head, (int)p.row, (int)p.col, &t->chunk[task]);
}

int capture_tiles_take(capture_tiles *t, trace_array array, int layer, size_t first, size_t n, const uint8_t *bytes) {
    TRY(mem_grow((void **)&t->chunk, &t->chunks, n, sizeof *t->chunk, "packed chunks"));
    TRY(mem_grow((void **)&t->sum, &t->sums, n * TRACE_TILE, sizeof *t->sum, "packed chunks"));
    t->array = array;
    t->layer = layer;
    t->first = first;
    t->bytes = bytes;
    TRY(pool_run(t->c->pool, n, pack_tile, t));
    for (size_t i = 0; i < n; i++) TRY(put_tile(t, i));
    return 0;
}

void capture_tiles_free(capture_tiles *t) {
    /* After a failure some chunks are packed and not put. */
    for (size_t i = 0; i < t->chunks; i++) trace_chunk_free(&t->chunk[i]);
    mem_free(t->chunk);
    mem_free(t->sum);
}
