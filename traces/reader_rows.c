/* Attention rows of one layer, from probabilities (dense) or from q and k (factored). */
#include "base/err.h"
#include "base/mem.h"
#include "traces/kernels.h"
#include "traces/reader_private.h"
#include "traces/tiles.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { TASK_ROWS = 16 }; /* rows of one head that one thread does at a time */

/* ---- sizes ------------------------------------------------------------------------------------------------------ */

static size_t tiles_across(const tiles *s) {
    return ((size_t)s->layout.dims[3] + (size_t)s->cols - 1) / (size_t)s->cols;
}

static size_t band_bytes(const tiles *s, const trace_model *m) {
    return (size_t)m->n_head * tiles_across(s) * (size_t)s->rows * (size_t)s->cols * s->size;
}

static void name_of(char name[64], size_t seq, const char *array) {
    snprintf(name, 64, "seq/%04zu/attn/%s", seq, array);
}

static bool use_dense(const trace_sequence *s, trace_form form) {
    return form == TRACE_DENSE || (form == TRACE_AUTO && !s->has_factored);
}

size_t trace_layer_bytes(const trace *t, size_t seq, trace_form form) {
    const trace_sequence *s = &t->seq[seq];
    const trace_model *m = &t->model;
    bool dense = use_dense(s, form);
    size_t T = (size_t)s->n_tokens, dim = (size_t)m->head_dim, kv = (size_t)m->n_kv_head;
    size_t bytes = sizeof(trace_layer);
    char name[64];
    tiles source;
    name_of(name, seq, dense ? "probs" : "q");
    if (tiles_open(&source, t->h5, t->path, name, 4, !dense) == 0) {
        bytes += 2 * band_bytes(&source, m) + tiles_bytes(&source, 1); /* one is read ahead */
        if (!dense) bytes += 2 * (size_t)m->n_head * (size_t)source.rows * dim * sizeof(float);
        tiles_close(&source);
    }
    if (!dense) bytes += kv * kernel_pad(T) * dim * sizeof(float);
    if (s->has_v) bytes += kv * T * dim * sizeof(float);
    /* While k and v are loaded, one head of them is there twice more. */
    return bytes + (dense && !s->has_v ? 0 : 2 * (T + TRACE_TILE) * dim * sizeof(float));
}

/* ---- opening ---------------------------------------------------------------------------------------------------- */

void reader_widen(const void *from, size_t size, float *to, size_t n) {
    if (size == 2) kernels()->f16_to_f32(from, to, n);
    else memcpy(to, from, n * sizeof *to);
}

static int check_finite(const tiles *s, int layer, int head, const float *x, size_t rows, size_t dim) {
    unsigned bad = 0;
    for (size_t i = 0; i < rows * dim; i++) bad |= (half_bits_of(x[i]) & 0x7f800000u) == 0x7f800000u;
    if (!bad) return 0;
    size_t i = 0;
    while (i + 1 < rows * dim && isfinite(x[i])) i++;
    return err_set(ERR_DATA, "%s: %s: not a finite number at layer %d, head %d, row %zu", s->file, s->name, layer, head,
                   i / dim);
}

/* One kv head of attn/k or attn/v, as f32 [n_tokens][dim] into `to`. `stored` has room for its padded tiles. */
static int read_head(tiles *s, int layer, int head, char *stored, float *to, pool *p) {
    size_t T = (size_t)s->layout.dims[2], dim = (size_t)s->layout.dims[3],
           n_rows = (T + (size_t)s->rows - 1) / (size_t)s->rows;
    tiles_block b = {.layer = layer, .head0 = head, .n_heads = 1, .n_rows = (int32_t)n_rows, .n_cols = 1};
    b.to = stored;
    b.row_stride = (size_t)s->rows * dim * s->size;
    TRY(tiles_read(s, &b, p));
    reader_widen(stored, s->size, to, T * dim);
    return check_finite(s, layer, head, to, T, dim);
}

/* All heads of an array, as it is or packed for the kernels, into new memory at *to. */
static int read_heads(trace_layer *l, const char *array, int n_heads, bool packed, float **to, pool *p) {
    size_t T = (size_t)l->n_tokens, heads = (size_t)n_heads, per_head = packed ? l->keys_stride : T * l->dim;
    char name[64];
    tiles s;
    name_of(name, l->seq, array);
    TRY(tiles_open(&s, l->t->h5, l->t->path, name, 4, true));
    *to = mem_new(heads, per_head * sizeof **to, name);
    char *stored = mem_new(T + (size_t)s.rows, l->dim * s.size, name);
    float *plain = packed ? mem_new(T * l->dim, sizeof *plain, name) : NULL;
    int code = *to && stored && (plain || !packed) ? 0 : ERR_DATA;
    for (size_t h = 0; h < heads && !code; h++) {
        float *out = *to + h * per_head;
        code = read_head(&s, l->layer, (int)h, stored, packed ? plain : out, p);
        if (!code && packed) kernels()->pack_keys(plain, T, l->dim, out);
    }
    mem_free(stored);
    mem_free(plain);
    tiles_close(&s);
    return code;
}

/* Bands are large, and are overwritten before they are read: those that the layer before left save clearing others. */
static int take_band(trace *t, size_t bytes, const char *name, char **out) {
    for (int i = 0; i < 2; i++) {
        if (!t->spare[i]) continue;
        char *band = t->spare[i];
        t->spare[i] = NULL;
        if (t->spare_bytes == bytes) {
            *out = band;
            return 0;
        }
        mem_free(band);
    }
    *out = mem_new(bytes, 1, name);
    return *out ? 0 : ERR_DATA;
}

static void leave_bands(trace_layer *l) {
    trace *t = l->t;
    size_t bytes = l->tile || l->next_tile ? band_bytes(&l->source, &t->model) : 0;
    char *mine[2] = {l->tile, l->next_tile};
    for (int i = 0; i < 2; i++) {
        mem_free(t->spare[i]);
        t->spare[i] = mine[i];
    }
    t->spare_bytes = bytes;
}

static int open_layer(trace_layer *l, pool *p) {
    const trace_model *m = &l->t->model;
    char name[64];
    name_of(name, l->seq, l->dense ? "probs" : "q");
    TRY(tiles_open(&l->source, l->t->h5, l->t->path, name, 4, !l->dense));
    tiles *s = &l->source;
    s->planes = l->dense && s->packed && s->size == 2; /* dense rows are taken from the chunks as they are */
    l->tile_bytes = (size_t)s->rows * (size_t)s->cols * s->size;
    l->head_bytes = tiles_across(s) * l->tile_bytes;
    TRY(take_band(l->t, band_bytes(s, m), name, &l->tile));
    if (!l->dense) {
        l->keys_stride = kernel_pad((size_t)l->n_tokens) * l->dim;
        l->q = mem_new((size_t)m->n_head * (size_t)s->rows * l->dim, sizeof *l->q, name);
        if (!l->q) return ERR_DATA;
        TRY(read_heads(l, "k", m->n_kv_head, true, &l->keys, p));
    }
    return l->t->seq[l->seq].has_v ? read_heads(l, "v", m->n_kv_head, false, &l->v, p) : 0;
}

int trace_layer_open(trace *t, size_t seq, int layer, trace_form form, pool *p, trace_layer **out) {
    *out = NULL;
    const trace_sequence *s = &t->seq[seq];
    bool dense = use_dense(s, form);
    if (!s->has_dense && !s->has_factored)
        return err_set(ERR_DATA, "%s: seq/%04zu has no attention (neither attn/probs nor attn/q and attn/k)", t->path,
                       seq);
    if (dense ? !s->has_dense : !s->has_factored)
        return err_set(ERR_DATA, "%s: seq/%04zu has no %s", t->path, seq,
                       dense ? "attn/probs (the dense form)" : "attn/q and attn/k (the factored form)");
    trace_layer *l = mem_new(1, sizeof *l, "layer");
    if (!l) return ERR_DATA;
    *l = (trace_layer){.t = t, .seq = seq, .layer = layer, .dense = dense, .band = -1, .next_band = -1};
    l->n_tokens = s->n_tokens;
    l->window = t->model.window[layer];
    l->dim = (size_t)t->model.head_dim;
    int code = open_layer(l, p);
    if (code) trace_layer_close(l);
    else *out = l;
    return code;
}

void trace_layer_close(trace_layer *l) {
    if (!l) return;
    leave_bands(l);
    tiles_close(&l->source);
    mem_free(l->q);
    mem_free(l->next_q);
    mem_free(l->row_q);
    mem_free(l->keys);
    mem_free(l->v);
    mem_free(l->plain_k);
    mem_free(l->plain_q);
    reader_close_grad(l);
    mem_free(l);
}

const float *trace_layer_v(const trace_layer *l, int kv_head) {
    return l->v ? l->v + (size_t)kv_head * (size_t)l->n_tokens * l->dim : NULL;
}

static int load_plain(trace_layer *l, const char *array, int n_heads, float **to, pool *p) {
    if (*to) return 0;
    if (!l->t->seq[l->seq].has_factored)
        return err_set(ERR_DATA, "%s: seq/%04zu has no attn/%s", l->t->path, l->seq, array);
    return read_heads(l, array, n_heads, false, to, p);
}

int trace_layer_load_k(trace_layer *l, pool *p) {
    return load_plain(l, "k", l->t->model.n_kv_head, &l->plain_k, p);
}

int trace_layer_load_q(trace_layer *l, pool *p) {
    return load_plain(l, "q", l->t->model.n_head, &l->plain_q, p);
}

const float *trace_layer_k(const trace_layer *l, int kv_head) {
    return l->plain_k + (size_t)kv_head * (size_t)l->n_tokens * l->dim;
}

const float *trace_layer_q(const trace_layer *l, int head) {
    return l->plain_q + (size_t)head * (size_t)l->n_tokens * l->dim;
}

size_t trace_layer_plain_bytes(const trace *t, size_t seq, bool keys, bool queries) {
    const trace_model *m = &t->model;
    size_t heads = (keys ? (size_t)m->n_kv_head : 0) + (queries ? (size_t)m->n_head : 0);
    return heads * (size_t)t->seq[seq].n_tokens * (size_t)m->head_dim * sizeof(float);
}

/* ---- rows ------------------------------------------------------------------------------------------------------- */

/* The oldest entry that the query of a step can reach. */
static int32_t first_reachable(const trace_layer *l, int32_t step) {
    return l->window > 0 && step >= l->window ? step - l->window + 1 : 0;
}

/* A band into `tile`, and its queries into `q`. */
static int read_band(trace_layer *l, int32_t band, char *tile, float *q, pool *p) {
    tiles *s = &l->source;
    const trace_model *m = &l->t->model;
    int32_t row0 = band * s->rows, last = l->n_tokens - row0 > s->rows ? row0 + s->rows - 1 : l->n_tokens - 1;
    tiles_block b = {.layer = l->layer, .n_heads = m->n_head, .row0 = band, .n_rows = 1, .n_cols = 1};
    b.to = tile;
    b.head_stride = l->head_bytes;
    if (l->dense) {
        b.col0 = first_reachable(l, row0) / s->cols;
        b.n_cols = last / s->cols - b.col0 + 1;
    }
    TRY(tiles_read(s, &b, p));
    size_t per_head = (size_t)s->rows * l->dim;
    for (int h = 0; h < m->n_head && !l->dense; h++)
        reader_widen(tile + (size_t)h * l->head_bytes, s->size, q + (size_t)h * per_head, per_head);
    return 0;
}

static void swap_bands(trace_layer *l) {
    char *tile = l->tile;
    float *q = l->q;
    l->tile = l->next_tile;
    l->q = l->next_q;
    l->next_tile = tile;
    l->next_q = q;
    l->band = l->next_band;
    l->next_band = -1;
}

static int load_band(trace_layer *l, int32_t band, pool *p) {
    if (band == l->band) return 0;
    if (band == l->next_band) {
        swap_bands(l);
        return 0;
    }
    l->band = -1;
    TRY(read_band(l, band, l->tile, l->q, p));
    l->band = band;
    return 0;
}

int trace_layer_prefetch(trace_layer *l, int32_t row) {
    tiles *s = &l->source;
    int32_t band = row / s->rows;
    if (row < 0 || row >= l->n_tokens) return 0;
    if (band != l->band && band != l->next_band) {
        size_t queries = l->dense ? 0 : (size_t)l->t->model.n_head * (size_t)s->rows * l->dim;
        l->next_band = -1;
        if (!l->next_tile) TRY(take_band(l->t, band_bytes(s, &l->t->model), s->name, &l->next_tile));
        if (!l->next_q && queries && !(l->next_q = mem_new(queries, sizeof *l->next_q, s->name))) return ERR_DATA;
        TRY(read_band(l, band, l->next_tile, l->next_q, NULL));
        l->next_band = band;
    }
    return reader_prefetch_grad(l, row);
}

typedef struct rows_job {
    trace_layer *l;
    int32_t row0, n;    /* this band's part of the rows asked for */
    int32_t tasks_each; /* per head */
    float *rows;        /* row row0 of head 0 */
    size_t stride, head_stride;
} rows_job;

static int bad_row(const trace_layer *l, int head, int32_t row, const char *what) {
    return err_set(ERR_DATA, "%s: %s: %s at layer %d, head %d, row %d", l->t->path, l->source.name, what, l->layer,
                   head, row);
}

static int bad_dense_row(const trace_layer *l, int head, int32_t t, const float *row) {
    for (int32_t i = 0; i <= t; i++)
        if (row[i] < 0) return bad_row(l, head, t, "a negative probability");
    return bad_row(l, head, t, "a row that cannot be normalised (its sum is 0, below 2^-126 or not finite)");
}

/* n values of a row of a tile, from its column 0 on. */
static void tile_row(const tiles *s, const char *tile, int32_t row, float *to, size_t n) {
    size_t cols = (size_t)s->cols, at = (size_t)row * cols;
    const uint8_t *low = (const uint8_t *)tile + at;
    if (s->planes) kernels()->unshuffle2_to_f32(low, low + (size_t)s->rows * cols, to, n);
    else reader_widen(tile + at * s->size, s->size, to, n);
}

static int dense_row(const trace_layer *l, int head, int32_t t, float *row, size_t stride) {
    const tiles *s = &l->source;
    int32_t first = first_reachable(l, t);
    const char *tile = l->tile + (size_t)head * l->head_bytes;
    for (int32_t col = first / s->cols * s->cols; col <= t; col += s->cols) {
        int32_t n = t + 1 - col < s->cols ? t + 1 - col : s->cols;
        tile_row(s, tile + (size_t)(col / s->cols) * l->tile_bytes, t % s->rows, row + col, (size_t)n);
    }
    memset(row, 0, (size_t)first * sizeof *row);
    memset(row + t + 1, 0, (stride - (size_t)t - 1) * sizeof *row);
    return isnan(kernels()->normalise(row, (size_t)first, (size_t)t + 1)) ? bad_dense_row(l, head, t, row) : 0;
}

/* Scores of some rows of one head against every key that one of them can reach, then each row's softmax. */
static int factored_rows(const trace_layer *l, int head, int32_t t0, int32_t n, float *rows, size_t stride) {
    const trace_model *m = &l->t->model;
    const tiles *s = &l->source;
    size_t start = (size_t)first_reachable(l, t0) / KERNEL_LANES * KERNEL_LANES, end = (size_t)(t0 + n);
    const float *q = l->q + ((size_t)head * (size_t)s->rows + (size_t)(t0 % s->rows)) * l->dim;
    const float *keys = l->keys + (size_t)(head / (m->n_head / m->n_kv_head)) * l->keys_stride + start * l->dim;
    kernels()->scores(q, (size_t)n, keys, end - start, l->dim, m->scale, rows + start, stride);
    for (int32_t t = t0; t < t0 + n; t++, rows += stride) {
        if (!isfinite(kernels()->softmax(rows, (size_t)first_reachable(l, t), (size_t)t, m->softcap, NULL)))
            return bad_row(l, head, t, "scores that are not finite");
        size_t done = kernel_pad((size_t)t + 1);
        memset(rows + done, 0, (stride - done) * sizeof *rows);
    }
    return 0;
}

static int rows_task(void *context, size_t task, int worker) {
    (void)worker;
    const rows_job *j = context;
    int head = (int)(task / (size_t)j->tasks_each);
    int32_t at = (int32_t)(task % (size_t)j->tasks_each) * TASK_ROWS, n = j->n - at < TASK_ROWS ? j->n - at : TASK_ROWS;
    float *rows = j->rows + (size_t)head * j->head_stride + (size_t)at * j->stride;
    if (!j->l->dense) return factored_rows(j->l, head, j->row0 + at, n, rows, j->stride);
    for (int32_t r = 0; r < n; r++)
        TRY(dense_row(j->l, head, j->row0 + at + r, rows + (size_t)r * j->stride, j->stride));
    return 0;
}

int trace_layer_keep_q(trace_layer *l, int32_t rows) {
    size_t heads = (size_t)l->t->model.n_head;
    l->row_q = l->dense ? NULL : mem_new(heads * (size_t)rows * l->dim, sizeof *l->row_q, "queries");
    if (l->dense) return err_set(ERR_DATA, "%s: queries were asked of attn/probs", l->t->path);
    return l->row_q ? 0 : ERR_DATA;
}

const float *trace_layer_row_q(const trace_layer *l, int head) {
    return l->row_q + (size_t)head * (size_t)l->n_row_q * l->dim;
}

/* Rows done .. done+now-1 of those asked for are in the band at hand, from its row `at` on. */
static void keep_queries(trace_layer *l, int32_t at, int32_t done, int32_t now) {
    size_t dim = l->dim;
    for (size_t h = 0; h < (size_t)l->t->model.n_head; h++)
        memcpy(l->row_q + (h * (size_t)l->n_row_q + (size_t)done) * dim,
               l->q + (h * (size_t)l->source.rows + (size_t)at) * dim, (size_t)now * dim * sizeof *l->q);
}

int trace_layer_rows(trace_layer *l, int32_t row0, int32_t n, float *rows, size_t stride, pool *p) {
    if (row0 < 0 || n < 0 || n > l->n_tokens - row0 || stride < kernel_pad((size_t)row0 + (size_t)n) ||
        stride % KERNEL_LANES)
        return err_set(ERR_DATA, "internal error: rows %d + %d of %d at stride %zu", row0, n, l->n_tokens, stride);
    int32_t high = l->source.rows, done = 0;
    l->n_row_q = n;
    while (done < n) {
        int32_t row = row0 + done, left = high - row % high, now = n - done < left ? n - done : left;
        TRY(load_band(l, row / high, p));
        rows_job j = {
            l, row, now, (now + TASK_ROWS - 1) / TASK_ROWS, rows + (size_t)done * stride, stride, (size_t)n * stride};
        TRY(pool_run(p, (size_t)l->t->model.n_head * (size_t)j.tasks_each, rows_task, &j));
        if (l->row_q) keep_queries(l, row % high, done, now);
        done += now;
    }
    return 0;
}

/* ---- the output projection -------------------------------------------------------------------------------------- */

int trace_read_wo(trace *t, int layer, float *out) {
    if (!t->has_wo) return err_set(ERR_DATA, "%s: has no model/wo (the output projection)", t->path);
    const trace_model *m = &t->model;
    hsize_t rows = (hsize_t)m->n_head * (hsize_t)m->head_dim, cols = (hsize_t)m->n_embd, dims[3];
    hid_t set;
    int code = hdf_open_dataset(t->h5, "model/wo", HDF_FLOAT, 3, dims, &set);
    if (code) return err_prefix(code, "%s", t->path);
    hid_t type = H5Dget_type(set);
    bool f16 = H5Tequal(type, hdf_f16()) > 0;
    H5Tclose(type);
    void *stored = f16 ? mem_new(rows * cols, sizeof(half), "model/wo") : out;
    hsize_t start[3] = {(hsize_t)layer, 0, 0}, count[3] = {1, rows, cols};
    code = stored ? hdf_read_block(set, f16 ? hdf_f16() : H5T_NATIVE_FLOAT, 3, start, count, stored) : ERR_DATA;
    if (code) err_prefix(code, "%s: model/wo: layer %d", t->path, layer);
    else if (f16) reader_widen(stored, sizeof(half), out, rows * cols);
    if (f16) mem_free(stored);
    H5Dclose(set);
    return code;
}
