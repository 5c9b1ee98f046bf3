#include "traces/check.h"
#include "base/err.h"
#include "base/mem.h"
#include "traces/kernels.h"
#include "traces/reader_private.h"
#include "traces/tiles.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <xxhash.h>

static const double SUM_TOLERANCE = 1e-2, FORMS_TOLERANCE = 0.05, ROW_SUM_TOLERANCE = 1e-5;
enum { ROWS_AT_ONCE = 64 };
static const size_t SLAB_BYTES = (size_t)64 << 20;

/* ---- every value of every dataset ------------------------------------------------------------------------------- */

/* Bit patterns of IEEE numbers, for types that lie in memory as they are stored. */
static bool all_finite(const void *values, size_t n, size_t size) {
    bool bad = false;
    if (size == 2) {
        const half *h = values;
        for (size_t i = 0; i < n; i++) bad |= (h[i] & 0x7c00u) == 0x7c00u;
    } else if (size == 4) {
        const float *f = values;
        for (size_t i = 0; i < n; i++) bad |= (half_bits_of(f[i]) & 0x7f800000u) == 0x7f800000u;
    } else {
        const double *d = values;
        for (size_t i = 0; i < n; i++) bad |= !isfinite(d[i]);
    }
    return !bad;
}

static int not_finite(const trace *t, const char *name) {
    return err_set(ERR_DATA, "%s: %s: holds a value that is not finite", t->path, name);
}

typedef struct scan {
    trace *t;
    const char *name;
    content_hash *hash; /* NULL: the file carries none */
    size_t digest;
    bool floats; /* of a type that all_finite knows */
} scan;

/* By chunks: decoded in the pool, in index order over those that are there. */
typedef struct chunk_scan {
    scan *s;
    tiles_job *job;
    size_t values, size;
    uint64_t hash[TILES_BATCH];
} chunk_scan;

static int scan_chunk(void *context, size_t i, int worker) {
    (void)worker;
    chunk_scan *c = context;
    if (!c->job[i].bytes) return 0;
    c->hash[i] = XXH3_64bits(c->job[i].to, c->values * c->size);
    return all_finite(c->job[i].to, c->values, c->size) ? 0 : not_finite(c->s->t, c->s->name);
}

static int scan_batch(scan *s, tiles *source, tiles_job *job, size_t n, pool *p) {
    chunk_scan c = {.s = s, .job = job, .size = source->size};
    c.values = (size_t)hdf_chunk_bytes(&source->layout) / source->size;
    TRY(tiles_run(source, job, n, p));
    TRY(pool_run(p, n, scan_chunk, &c));
    for (size_t i = 0; i < n; i++) {
        uint64_t place[TILES_RANK];
        for (int d = 0; d < source->layout.rank; d++) place[d] = job[i].offset[d];
        if (s->hash && job[i].bytes) content_hash_chunk(s->hash, s->digest, source->layout.rank, place, c.hash[i]);
    }
    return 0;
}

/* The next chunk in index order; false after the last. */
static bool next_chunk(const hdf_layout *l, hsize_t *offset) {
    for (int d = l->rank - 1; d >= 0; d--) {
        offset[d] += l->chunk[d];
        if (offset[d] < l->dims[d]) return true;
        offset[d] = 0;
    }
    return false;
}

static int scan_packed(scan *s, tiles *source, pool *p) {
    size_t bytes = (size_t)hdf_chunk_bytes(&source->layout), n = 0;
    char *values = mem_new(TILES_BATCH, bytes, s->name);
    if (!values) return ERR_DATA;
    tiles_job job[TILES_BATCH];
    hsize_t offset[TILES_RANK] = {0};
    int code = 0;
    bool more = true;
    while (more && !code) {
        job[n] = (tiles_job){.to = values + n * bytes, .may_be_absent = true};
        memcpy(job[n++].offset, offset, sizeof offset);
        more = next_chunk(&source->layout, offset);
        if (more && n < TILES_BATCH) continue;
        code = scan_batch(s, source, job, n, p);
        n = 0;
    }
    mem_free(values);
    return code;
}

/* As one row-major run, in slabs over the first dimensions. */
static int scan_slabs(scan *s, hid_t set, hid_t type, const hdf_layout *l) {
    hsize_t start[H5S_MAX_RANK] = {0}, count[H5S_MAX_RANK];
    size_t bytes = l->size, whole = (size_t)l->rank, n = 1; /* dimensions from `whole` on are read whole */
    for (; whole > 0 && (bytes * l->dims[whole - 1] <= SLAB_BYTES || whole == (size_t)l->rank); whole--)
        bytes *= (size_t)l->dims[whole - 1];
    for (size_t d = 0; d < (size_t)l->rank; d++) count[d] = d < whole ? 1 : l->dims[d];
    hdf_layout step = *l;
    memcpy(step.chunk, count, sizeof count);
    n = bytes / l->size;
    void *values = mem_new(n, l->size, s->name);
    if (!values) return ERR_DATA;
    int code = 0;
    do {
        code = hdf_read_block(set, type, l->rank, start, count, values);
        if (code) err_prefix(code, "%s: %s", s->t->path, s->name);
        else if (s->hash) content_hash_values(s->hash, s->digest, values, bytes);
        if (!code && s->floats && !all_finite(values, n, l->size)) code = not_finite(s->t, s->name);
    } while (!code && next_chunk(&step, start));
    mem_free(values);
    return code;
}

static bool is_empty(const hdf_layout *l) {
    for (int d = 0; d < l->rank; d++)
        if (!l->dims[d]) return true;
    return false;
}

static int scan_dataset(scan *s, hid_t set, pool *p) {
    hdf_layout l;
    TRY(hdf_get_layout(set, &l));
    hid_t type = H5Dget_type(set);
    bool numbers = H5Tget_class(type) == H5T_INTEGER || H5Tget_class(type) == H5T_FLOAT;
    s->floats =
        H5Tequal(type, hdf_f16()) > 0 || H5Tequal(type, H5T_IEEE_F32LE) > 0 || H5Tequal(type, H5T_IEEE_F64LE) > 0;
    uint64_t dims[H5S_MAX_RANK];
    for (int d = 0; d < l.rank; d++) dims[d] = l.dims[d];
    int code = 0;
    if (s->hash) code = content_hash_dataset(s->hash, s->name, l.rank, dims, l.size, &s->digest);
    if (!code && numbers && l.rank > 0 && !is_empty(&l)) {
        tiles source = {0};
        bool chunks = l.rank >= CONTENT_HASH_CHUNKED_RANK && l.rank <= TILES_RANK && H5Tget_class(type) == H5T_FLOAT;
        if (chunks) code = tiles_open(&source, s->t->h5, s->t->path, s->name, l.rank, false);
        if (!code) code = chunks && source.packed ? scan_packed(s, &source, p) : scan_slabs(s, set, type, &l);
        tiles_close(&source);
    }
    H5Tclose(type);
    return code;
}

static int scan_all(trace *t, content_hash *hash, pool *p) {
    char **name;
    size_t n;
    TRY(hdf_list_datasets(t->h5, &name, &n));
    int code = 0;
    for (size_t i = 0; i < n && !code; i++) {
        hid_t set = H5Dopen2(t->h5, name[i], H5P_DEFAULT);
        scan s = {.t = t, .name = name[i], .hash = hash};
        code = set < 0 ? hdf_error("%s: %s", t->path, name[i]) : scan_dataset(&s, set, p);
        if (set >= 0) H5Dclose(set);
    }
    hdf_free_names(name, n);
    return code;
}

static int check_content(trace *t, pool *p) {
    content_hash *hash = NULL;
    char hex[CONTENT_HASH_HEX];
    if (!t->hash_stored) return scan_all(t, NULL, p);
    int code = content_hash_new(&hash);
    if (!code) code = content_hash_model(hash, &t->model);
    for (size_t i = 0; i < t->n_seq && !code; i++) code = content_hash_sequence(hash, i, &t->seq[i]);
    if (!code) code = scan_all(t, hash, p);
    if (!code) code = content_hash_finish(hash, hex);
    content_hash_free(hash);
    if (!code && strcmp(hex, t->hash) != 0)
        code = err_set(ERR_DATA, "%s: content hash is %s, but the content's is %s: the file was changed", t->path,
                       t->hash, hex);
    return code;
}

/* ---- dense rows as stored --------------------------------------------------------------------------------------- */

typedef struct dense_job {
    const trace *t;
    const tiles *source;
    int layer;
    int32_t row0, n, n_tokens, window;
    const char *tile; /* [n_head][across][rows][cols] */
    size_t head_bytes, tile_bytes, padded;
    float *row;           /* [workers][padded] */
    const float *row_sum; /* [n_head][T] of this layer, or NULL */
    double *worst;        /* [n_head] */
} dense_job;

static int dense_fault(const dense_job *j, int head, int32_t t, const char *what, double value) {
    return err_set(ERR_DATA, "%s: %s: %s %.6g at layer %d, head %d, row %d", j->t->path, j->source->name, what, value,
                   j->layer, head, t);
}

static void gather_row(const dense_job *j, int head, int32_t r, float *row) {
    const tiles *s = j->source;
    const char *line = j->tile + (size_t)head * j->head_bytes + (size_t)r * (size_t)s->cols * s->size;
    for (int32_t col = 0; col < j->n_tokens; col += s->cols, line += j->tile_bytes) {
        size_t n = (size_t)(j->n_tokens - col < s->cols ? j->n_tokens - col : s->cols);
        if (s->size == 2) kernels()->f16_to_f32((const half *)(const void *)line, row + col, n);
        else memcpy(row + col, line, n * sizeof *row);
    }
}

static int check_dense_row(const dense_job *j, int head, int32_t t, const float *row) {
    int32_t first = j->window > 0 && t >= j->window ? t - j->window + 1 : 0;
    for (int32_t i = 0; i < j->n_tokens; i++) {
        if (!(row[i] >= 0 && row[i] <= 65504)) return dense_fault(j, head, t, "a probability of", (double)row[i]);
        if (row[i] != 0 && i > t) return dense_fault(j, head, t, "an entry above the diagonal,", (double)row[i]);
        if (row[i] != 0 && i < first) return dense_fault(j, head, t, "an entry outside the window,", (double)row[i]);
    }
    double sum = kernels()->sum(row, (size_t)j->n_tokens);
    if (fabs(sum - 1) > SUM_TOLERANCE) return dense_fault(j, head, t, "a row that sums to", sum);
    if (j->row_sum &&
        fabs(sum - (double)j->row_sum[(size_t)head * (size_t)j->n_tokens + (size_t)t]) > ROW_SUM_TOLERANCE)
        return dense_fault(j, head, t, "attn/row_sum does not match a row that sums to", sum);
    if (fabs(sum - 1) > j->worst[head]) j->worst[head] = fabs(sum - 1);
    return 0;
}

static int dense_task(void *context, size_t head, int worker) {
    const dense_job *j = context;
    float *row = j->row + (size_t)worker * j->padded;
    for (int32_t r = 0; r < j->n; r++) {
        gather_row(j, (int)head, r, row);
        TRY(check_dense_row(j, (int)head, j->row0 + r, row));
    }
    return 0;
}

static int check_dense_layer(dense_job *j, tiles *source, char *tile, pool *p) {
    int32_t across = (j->n_tokens + source->cols - 1) / source->cols;
    int n_head = j->t->model.n_head;
    for (j->row0 = 0; j->row0 < j->n_tokens; j->row0 += source->rows) {
        tiles_block b = {.layer = j->layer, .n_heads = n_head, .row0 = j->row0 / source->rows, .n_rows = 1};
        b.n_cols = across;
        b.to = tile;
        b.head_stride = j->head_bytes;
        b.sparse = true;
        TRY(tiles_read(source, &b, p));
        j->n = j->n_tokens - j->row0 < source->rows ? j->n_tokens - j->row0 : source->rows;
        TRY(pool_run(p, (size_t)n_head, dense_task, j));
    }
    return 0;
}

static int read_row_sum(trace *t, size_t seq, int layer, float *out, bool *has) {
    char name[64];
    hid_t set;
    hsize_t dims[3];
    snprintf(name, sizeof name, "seq/%04zu/attn/row_sum", seq);
    *has = hdf_has(t->h5, name);
    if (!*has) return 0;
    TRY(hdf_open_dataset(t->h5, name, HDF_FLOAT, 3, dims, &set));
    int code = hdf_read_block(set, H5T_NATIVE_FLOAT, 3, (hsize_t[]){(hsize_t)layer, 0, 0},
                              (hsize_t[]){1, dims[1], dims[2]}, out);
    H5Dclose(set);
    return code ? err_prefix(code, "%s: %s", t->path, name) : 0;
}

static int check_dense(trace *t, size_t seq, pool *p, double *sum_error) {
    char name[64];
    tiles s;
    snprintf(name, sizeof name, "seq/%04zu/attn/probs", seq);
    TRY(tiles_open(&s, t->h5, t->path, name, 4, false));
    size_t T = (size_t)t->seq[seq].n_tokens, H = (size_t)t->model.n_head,
           across = (T + (size_t)s.cols - 1) / (size_t)s.cols;
    dense_job j = {.t = t, .source = &s, .n_tokens = (int32_t)T, .padded = kernel_pad(T)};
    j.tile_bytes = (size_t)s.rows * (size_t)s.cols * s.size;
    j.head_bytes = across * j.tile_bytes;
    char *tile = mem_new(H, j.head_bytes, name);
    float *row_sum = mem_new(H * T, sizeof *row_sum, name);
    j.tile = tile;
    j.row = mem_new((size_t)pool_threads(p) * j.padded, sizeof *j.row, name);
    j.worst = mem_new(H, sizeof *j.worst, name);
    int code = tile && row_sum && j.row && j.worst ? 0 : ERR_DATA;
    for (j.layer = 0; j.layer < t->model.n_layer && !code; j.layer++) {
        bool has = false;
        j.window = t->model.window[j.layer];
        code = read_row_sum(t, seq, j.layer, row_sum, &has);
        j.row_sum = has ? row_sum : NULL;
        if (!code) code = check_dense_layer(&j, &s, tile, p);
    }
    *sum_error = 0;
    for (size_t h = 0; h < H && !code; h++) *sum_error = fmax(*sum_error, j.worst[h]);
    mem_free(tile);
    mem_free(row_sum);
    mem_free(j.row);
    mem_free(j.worst);
    tiles_close(&s);
    return code;
}

/* ---- rows as the reader hands them out -------------------------------------------------------------------------- */

static double largest_difference(const float *a, const float *b, size_t n) {
    float most = 0;
    for (size_t i = 0; i < n; i++) {
        float d = fabsf(a[i] - b[i]);
        most = d > most ? d : most;
    }
    return (double)most;
}

static int compare_layer(trace_layer *const form[2], const trace_model *m, int32_t T, float *const rows[2], pool *p,
                         double *difference) {
    for (int32_t row = 0; row < T; row += ROWS_AT_ONCE) {
        int32_t n = T - row < ROWS_AT_ONCE ? T - row : ROWS_AT_ONCE;
        size_t stride = kernel_pad((size_t)row + (size_t)n);
        for (int f = 0; f < 2; f++)
            if (form[f]) TRY(trace_layer_rows(form[f], row, n, rows[f], stride, p));
        if (!form[0] || !form[1]) continue;
        double d = largest_difference(rows[0], rows[1], (size_t)m->n_head * (size_t)n * stride);
        if (d > *difference) *difference = d;
    }
    return 0;
}

static int check_rows(trace *t, size_t seq, pool *p, check_sequence *c) {
    const trace_model *m = &t->model;
    size_t T = (size_t)t->seq[seq].n_tokens, floats = (size_t)m->n_head * ROWS_AT_ONCE * kernel_pad(T);
    float *rows[2] = {c->dense ? mem_new(floats, sizeof(float), "rows") : NULL,
                      c->factored ? mem_new(floats, sizeof(float), "rows") : NULL};
    int code = (c->dense && !rows[0]) || (c->factored && !rows[1]) ? ERR_DATA : 0;
    for (int layer = 0; layer < m->n_layer && !code; layer++) {
        trace_layer *form[2] = {NULL, NULL};
        if (c->dense) code = trace_layer_open(t, seq, layer, TRACE_DENSE, p, &form[0]);
        if (c->factored && !code) code = trace_layer_open(t, seq, layer, TRACE_FACTORED, p, &form[1]);
        for (int32_t row = 0; row < (int32_t)T && t->seq[seq].has_grad_loss && !code; row += TRACE_TILE)
            code = trace_layer_read_grad(form[0] ? form[0] : form[1], row,
                                         (int32_t)T - row < TRACE_TILE ? (int32_t)T - row : TRACE_TILE, p);
        if (!code) code = compare_layer(form, m, (int32_t)T, rows, p, &c->difference);
        trace_layer_close(form[0]);
        trace_layer_close(form[1]);
        if (!code && c->difference > FORMS_TOLERANCE)
            code = err_set(ERR_DATA, "%s: seq/%04zu: dense and factored attention differ by %.3g in layer %d", t->path,
                           seq, c->difference, layer);
    }
    mem_free(rows[0]);
    mem_free(rows[1]);
    return code;
}

static int check_topk(trace *t, size_t seq) {
    char name[64];
    int64_t dims[2] = {-1, -1};
    void *values;
    snprintf(name, sizeof name, "seq/%04zu/logits/topk_id", seq);
    if (!hdf_has(t->h5, name)) return 0;
    int code = hdf_read_all(t->h5, name, HDF_INTEGER, H5T_NATIVE_INT32, 2, dims, &values);
    if (code) return err_prefix(code, "%s", t->path);
    const int32_t *id = values;
    for (int64_t i = 0; i < dims[0] * dims[1] && !code; i++)
        if (id[i] < 0 || (t->model.n_vocab && id[i] >= t->model.n_vocab))
            code = err_set(ERR_DATA, "%s: %s: token %lld has id %d, outside the vocabulary of %d", t->path, name,
                           (long long)(i / dims[1]), id[i], t->model.n_vocab);
    mem_free(values);
    return code;
}

int check_trace(trace *t, pool *p, check_sequence *seq) {
    TRY(check_content(t, p));
    for (size_t i = 0; i < t->n_seq; i++) {
        seq[i] = (check_sequence){.dense = t->seq[i].has_dense, .factored = t->seq[i].has_factored};
        TRY(check_topk(t, i));
        if (seq[i].dense) TRY(check_dense(t, i, p, &seq[i].sum_error));
        if (seq[i].dense || seq[i].factored) TRY(check_rows(t, i, p, &seq[i]));
    }
    return 0;
}
