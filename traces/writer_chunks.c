/* Attention in a trace being written: packed by any thread, put by one in index order. */
#include "base/mem.h"
#include "base/progress.h"
#include "traces/kernels.h"
#include "traces/writer_private.h"

#include <pthread.h>
#include <string.h>
#include <xxhash.h>

/* Chunks may be packed by any thread: it borrows from this list. */
struct pack_list {
    pthread_mutex_t lock;
    pack_work *idle;
    size_t large;   /* elements of the largest chunk, if over TRACE_TILE * TRACE_TILE */
    double seconds; /* that chunks took, of all threads together */
};

int writer_at_file(const trace_writer *w, int code) {
    return code ? err_prefix(code, "%s", w->file.path) : 0;
}

int writer_misuse(const char *what) {
    return err_set(ERR_DATA, "internal error: trace writer: %s", what);
}

static bool overflows(const half *h, size_t n) {
    unsigned bad = 0;
    for (size_t i = 0; i < n; i++) bad |= (h[i] & 0x7c00u) == 0x7c00u;
    return bad != 0;
}

static int overflow_error(const half *h, const float *values, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (overflows(h + i, 1))
            return err_set(ERR_DATA, "value %g does not fit f16 (at most 65504)", (double)values[i]);
    return 0;
}

int writer_convert(const float *values, half *h, size_t n) {
    kernels()->f32_to_f16(values, h, n);
    return overflows(h, n) ? overflow_error(h, values, n) : 0;
}

static hsize_t tile_rows(const trace_writer *w) {
    return w->n_tokens < TRACE_TILE ? (hsize_t)w->n_tokens : TRACE_TILE;
}

/* Heads, rows per chunk and columns per chunk of an array of the current sequence. */
void writer_array_shape(const trace_writer *w, trace_array a, hsize_t dims[4], hsize_t chunk[4]) {
    bool own_heads = a == TRACE_PROBS || a == TRACE_Q;
    dims[0] = (hsize_t)w->model.n_layer;
    dims[1] = (hsize_t)(own_heads ? w->model.n_head : w->model.n_kv_head);
    dims[2] = (hsize_t)w->n_tokens;
    dims[3] = (hsize_t)(a == TRACE_PROBS ? w->n_tokens : w->model.head_dim);
    chunk[0] = chunk[1] = 1;
    chunk[2] = tile_rows(w);
    chunk[3] = a == TRACE_PROBS ? tile_rows(w) : dims[3];
}

/* ---- memory for packing ------------------------------------------------------------------------------------------ */

int writer_packs_new(int32_t head_dim, pack_list **out) {
    *out = mem_new(1, sizeof **out, "packing");
    if (!*out) return ERR_DATA;
    pthread_mutex_init(&(*out)->lock, NULL);
    size_t widest = (size_t)head_dim * TRACE_TILE;
    if (widest > TRACE_TILE * TRACE_TILE) (*out)->large = widest;
    return 0;
}

void writer_packs_free(pack_list *list) {
    if (!list) return;
    for (pack_work *p = list->idle, *next; p; p = next) {
        next = p->next;
        zstd_work_free(p->zstd);
        mem_free(p->large);
        mem_free(p);
    }
    pthread_mutex_destroy(&list->lock);
    mem_free(list);
}

static int new_pack_work(const pack_list *list, pack_work **out) {
    pack_work *p = mem_new(1, sizeof *p, "packing");
    if (!p) return ERR_DATA;
    int code = zstd_work_new(&p->zstd);
    if (!code && list->large && !(p->large = mem_new(list->large, sizeof *p->large, "packing"))) code = ERR_DATA;
    if (code) {
        zstd_work_free(p->zstd);
        mem_free(p);
        return code;
    }
    *out = p;
    return 0;
}

int writer_borrow(pack_list *list, pack_work **out) {
    pthread_mutex_lock(&list->lock);
    pack_work *p = list->idle;
    if (p) list->idle = p->next;
    pthread_mutex_unlock(&list->lock);
    if (!p) TRY(new_pack_work(list, &p));
    p->since = progress_seconds();
    *out = p;
    return 0;
}

void writer_give_back(pack_list *list, pack_work *p) {
    double seconds = progress_seconds() - p->since;
    pthread_mutex_lock(&list->lock);
    list->seconds += seconds;
    p->next = list->idle;
    list->idle = p;
    pthread_mutex_unlock(&list->lock);
}

double writer_pack_seconds(pack_list *list) {
    pthread_mutex_lock(&list->lock);
    double seconds = list->seconds;
    pthread_mutex_unlock(&list->lock);
    return seconds;
}

half *writer_chunk_values(pack_work *p) {
    return p->large ? p->large : p->values;
}

/* ---- packed chunks ---------------------------------------------------------------------------------------------- */

/* The sum of a row as it was stored: what f16 kept of it. */
static float stored_sum(pack_work *p, const half *row, size_t n) {
    kernels()->f16_to_f32(row, p->row, n);
    memset(p->row + n, 0, (kernel_pad(n) - n) * sizeof *p->row);
    return (float)kernels()->sum(p->row, n);
}

static int pack(pack_work *p, const hsize_t chunk[4], const float *values, size_t rows, size_t cols, size_t stride,
                float *row_sum, trace_chunk *out) {
    size_t height = (size_t)chunk[2], width = (size_t)chunk[3];
    half *tile = writer_chunk_values(p);
    for (size_t r = 0; r < rows; r++) {
        half *row = tile + r * width;
        TRY(writer_convert(values + r * stride, row, cols));
        memset(row + cols, 0, (width - cols) * sizeof *row);
        if (row_sum) row_sum[r] += stored_sum(p, row, cols);
    }
    memset(tile + rows * width, 0, (height - rows) * width * sizeof *tile);
    out->hash = XXH3_64bits(tile, height * width * sizeof *tile);
    return zstd_pack(p->zstd, tile, height * width, sizeof *tile, &out->data, &out->bytes);
}

/* The chunk's shape, and memory for packing rows x cols values into it. */
static int begin_pack(const trace_writer *w, trace_array array, size_t rows, size_t cols, const float *row_sum,
                      hsize_t chunk[4], pack_work **out) {
    hsize_t dims[4];
    writer_array_shape(w, array, dims, chunk);
    if (rows > chunk[2] || cols > chunk[3] || (row_sum && array != TRACE_PROBS))
        return writer_misuse("chunk too large");
    return writer_borrow(w->packs, out);
}

int trace_pack(const trace_writer *w, trace_array array, const float *values, size_t rows, size_t cols, size_t stride,
               float *row_sum, trace_chunk *out) {
    hsize_t chunk[4];
    pack_work *p;
    *out = (trace_chunk){0};
    TRY(begin_pack(w, array, rows, cols, row_sum, chunk, &p));
    int code = pack(p, chunk, values, rows, cols, stride, row_sum, out);
    writer_give_back(w->packs, p);
    return code;
}

/* The content hash covers the values in their order, so what came shuffled is turned back once. */
int writer_pack_planes(pack_work *p, const uint8_t *planes, size_t n, trace_chunk *out) {
    half *tile = writer_chunk_values(p);
    kernels()->unshuffle2(planes, tile, n);
    if (overflows(tile, n)) return err_set(ERR_DATA, "a value does not fit f16 (at most 65504)");
    out->hash = XXH3_64bits(tile, n * sizeof *tile);
    return zstd_pack(p->zstd, planes, n * sizeof *tile, 1, &out->data, &out->bytes);
}

int trace_pack_half(const trace_writer *w, trace_array array, const uint8_t *planes, size_t rows, size_t cols,
                    float *row_sum, trace_chunk *out) {
    hsize_t chunk[4];
    pack_work *p;
    *out = (trace_chunk){0};
    TRY(begin_pack(w, array, rows, cols, row_sum, chunk, &p));
    int code = writer_pack_planes(p, planes, (size_t)(chunk[2] * chunk[3]), out);
    for (size_t r = 0; r < rows && row_sum && !code; r++)
        row_sum[r] = stored_sum(p, writer_chunk_values(p) + r * chunk[3], cols);
    writer_give_back(w->packs, p);
    return code;
}

void trace_chunk_free(trace_chunk *c) {
    mem_free(c->data);
    *c = (trace_chunk){0};
}

/* The place of a chunk in the order in which chunks must come. */
static uint64_t chunk_index(const hsize_t dims[4], const hsize_t chunk[4], trace_array array, const uint64_t at[4]) {
    uint64_t tiles = (dims[2] + chunk[2] - 1) / chunk[2], row = at[2];
    if (array != TRACE_PROBS) return (at[0] * dims[1] + at[1]) * tiles + row;
    return (at[0] * dims[1] + at[1]) * (tiles * (tiles + 1) / 2) + row * (row + 1) / 2 + at[3];
}

int trace_put(trace_writer *w, trace_array array, int layer, int head, int row_tile, int column_tile, trace_chunk *c) {
    open_set *s = &w->array[array];
    hsize_t dims[4], chunk[4], offset[4];
    uint64_t at[4] = {(uint64_t)layer, (uint64_t)head, (uint64_t)row_tile, (uint64_t)column_tile}, place[4];
    writer_array_shape(w, array, dims, chunk);
    bool expected = s->id >= 0 && column_tile <= row_tile && chunk_index(dims, chunk, array, at) == s->next;
    int code = expected ? 0 : writer_misuse("chunk out of order");
    writer_call call = {CALL_PUT, {(int32_t)array, layer, head, row_tile, column_tile}, c->hash};
    if (!code) code = writer_tell(w, call, c, NULL);
    for (int d = 0; d < 4; d++) place[d] = offset[d] = at[d] * chunk[d];
    if (!code) {
        content_hash_chunk(w->hash, s->digest, 4, place, c->hash);
        s->next++;
        w->raw += (int64_t)(chunk[2] * chunk[3] * sizeof(half));
        w->stored += (int64_t)c->bytes;
        code = writer_later(w, s, offset, NULL, c->data, c->bytes);
        c->data = NULL;
    }
    trace_chunk_free(c);
    return writer_at_file(w, code);
}
