/* Attention: attn/probs as it is stored, and the rows that q and k give. */
#include "base/err.h"
#include "base/mem.h"
#include "traces/check_private.h"
#include "traces/kernels.h"
#include "traces/tiles.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const double SUM_TOLERANCE = 1e-2, ROW_SUM_TOLERANCE = 1e-5;
static const double FORMS_TOLERANCE = 4e-3, LSE_TOLERANCE = 1e-3; /* beside what the rounding of q and k explains */
static const size_t ROWS_BYTES = (size_t)32 << 20;
enum { ROWS_AT_ONCE = 64, ROWS_SAMPLED = 2048 };

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
    return err_set(ERR_DATA, "%s: %s: %s %.6g at layer %d, head %d, step %d", j->t->path, j->source->name, what, value,
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

/* One layer, [n_head][T], of attn/`array`, if the sequence has it. */
static int read_layer_values(trace *t, size_t seq, const char *array, int layer, float *out, bool *has) {
    char name[64];
    hid_t set;
    hsize_t dims[3];
    snprintf(name, sizeof name, "seq/%04zu/attn/%s", seq, array);
    *has = hdf_has(t->h5, name);
    if (!*has) return 0;
    TRY(hdf_open_dataset(t->h5, name, HDF_FLOAT, 3, dims, &set));
    int code = hdf_read_block(set, H5T_NATIVE_FLOAT, 3, (hsize_t[]){(hsize_t)layer, 0, 0},
                              (hsize_t[]){1, dims[1], dims[2]}, out);
    H5Dclose(set);
    return code ? err_prefix(code, "%s: %s", t->path, name) : 0;
}

int check_dense(trace *t, size_t seq, pool *p, check_sequence *c) {
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
        code = read_layer_values(t, seq, "row_sum", j.layer, row_sum, &has);
        j.row_sum = has ? row_sum : NULL;
        if (!code) code = check_dense_layer(&j, &s, tile, p);
    }
    for (size_t h = 0; h < H && !code; h++) c->sum_error = fmax(c->sum_error, j.worst[h]);
    mem_free(tile);
    mem_free(row_sum);
    mem_free(j.row);
    mem_free(j.worst);
    tiles_close(&s);
    return code;
}

/* ---- rows as q and k give them ---------------------------------------------------------------------------------- */

typedef struct rows_job {
    const trace *t;
    size_t seq;
    int layer;
    int32_t row0, n;
    size_t stride;
    trace_layer *factored, *dense;  /* dense: NULL where there is none */
    float *rows, *dense_rows;       /* [n_head][n][stride] */
    const double *reach;            /* [n_kv_head][T] the largest norm of a key up to this one */
    const float *lse;               /* [n_head][T] of this layer, or NULL */
    double *difference, *lse_error; /* [n_head] */
    double unit;                    /* how far a product of two stored numbers may be off, relatively */
} rows_job;

static double norm(const float *x, size_t n) {
    double sum = 0;
    for (size_t d = 0; d < n; d++) sum += (double)x[d] * (double)x[d];
    return sqrt(sum);
}

static int rows_fault(const rows_job *j, int head, int32_t t, const char *what, double off, double allowed) {
    return err_set(ERR_DATA,
                   "%s: seq/%04zu/attn/%s: %.3g off what q and k give at layer %d, head %d, step %d (%.3g allowed)",
                   j->t->path, j->seq, what, off, j->layer, head, t, allowed);
}

static int check_lse(const rows_job *j, int head, int32_t t, const float *row, const float *q, double rounding) {
    const trace_model *m = &j->t->model;
    size_t best = 0, dim = (size_t)m->head_dim;
    for (size_t i = 1; i <= (size_t)t; i++)
        if (row[i] > row[best]) best = i;
    const float *k = trace_layer_k(j->factored, head / (m->n_head / m->n_kv_head)) + best * dim;
    double score = 0, cap = (double)m->softcap;
    for (size_t d = 0; d < dim; d++) score += (double)q[d] * (double)k[d];
    score *= (double)m->scale;
    if (cap > 0) score = cap * tanh(score / cap);
    double off = fabs(score - log((double)row[best]) -
                      (double)j->lse[(size_t)head * (size_t)j->t->seq[j->seq].n_tokens + (size_t)t]);
    if (!(off <= LSE_TOLERANCE + rounding)) return rows_fault(j, head, t, "lse", off, LSE_TOLERANCE + rounding);
    if (off > j->lse_error[head]) j->lse_error[head] = off;
    return 0;
}

static int check_forms(const rows_job *j, int head, int32_t t, const float *row, const float *dense, double rounding) {
    float most = 0;
    for (size_t i = 0; i <= (size_t)t; i++) {
        float d = fabsf(row[i] - dense[i]);
        most = d > most ? d : most;
    }
    double off = (double)most, allowed = FORMS_TOLERANCE + 2 * rounding;
    if (off > allowed) return rows_fault(j, head, t, "probs", off, allowed);
    if (off > j->difference[head]) j->difference[head] = off;
    return 0;
}

/* A score is off by no more than its rounding, and so is the logarithm of the sum: a probability by twice that,
 * relatively. */
static int rows_task(void *context, size_t head, int worker) {
    (void)worker;
    const rows_job *j = context;
    const trace_model *m = &j->t->model;
    size_t T = (size_t)j->t->seq[j->seq].n_tokens, kv = head / (size_t)(m->n_head / m->n_kv_head);
    for (int32_t r = 0; r < j->n; r++) {
        int32_t t = j->row0 + r;
        size_t at = (head * (size_t)j->n + (size_t)r) * j->stride;
        const float *q = trace_layer_row_q(j->factored, (int)head) + (size_t)r * (size_t)m->head_dim;
        double rounding =
            j->unit * fabs((double)m->scale) * norm(q, (size_t)m->head_dim) * j->reach[kv * T + (size_t)t];
        if (j->lse) TRY(check_lse(j, (int)head, t, j->rows + at, q, rounding));
        if (j->dense) TRY(check_forms(j, (int)head, t, j->rows + at, j->dense_rows + at, rounding));
    }
    return 0;
}

static int check_rows_of(rows_job *j, pool *p) {
    j->stride = kernel_pad((size_t)j->row0 + (size_t)j->n);
    TRY(trace_layer_rows(j->factored, j->row0, j->n, j->rows, j->stride, p));
    if (j->dense) TRY(trace_layer_rows(j->dense, j->row0, j->n, j->dense_rows, j->stride, p));
    return pool_run(p, (size_t)j->t->model.n_head, rows_task, j);
}

static void largest_keys(const rows_job *j, double *reach) {
    const trace_model *m = &j->t->model;
    size_t T = (size_t)j->t->seq[j->seq].n_tokens, dim = (size_t)m->head_dim;
    for (int kv = 0; kv < m->n_kv_head; kv++, reach += T)
        for (size_t i = 0; i < T; i++) {
            double size = norm(trace_layer_k(j->factored, kv) + i * dim, dim);
            reach[i] = i && reach[i - 1] > size ? reach[i - 1] : size;
        }
}

/* Rows in bands of `each`, every one or some that are spread evenly from the first to the last. */
static int check_layer_rows(rows_job *j, int32_t each, bool every_row, pool *p, int32_t *n_rows) {
    int32_t T = j->t->seq[j->seq].n_tokens, bands = (T + each - 1) / each, some = ROWS_SAMPLED / each;
    if (every_row || some > bands) some = bands;
    *n_rows = 0;
    for (int32_t b = 0; b < some; b++) {
        j->row0 = (some > 1 ? (int32_t)((int64_t)b * (bands - 1) / (some - 1)) : 0) * each;
        j->n = T - j->row0 < each ? T - j->row0 : each;
        TRY(check_rows_of(j, p));
        *n_rows += j->n;
    }
    return 0;
}

static int check_factored_layer(trace *t, rows_job *j, double *reach, float *lse, int32_t each, bool every_row, pool *p,
                                check_sequence *c) {
    bool has_lse = false;
    int code = trace_layer_open(t, j->seq, j->layer, TRACE_FACTORED, p, &j->factored);
    if (!code && c->dense) code = trace_layer_open(t, j->seq, j->layer, TRACE_DENSE, p, &j->dense);
    if (!code) code = trace_layer_keep_q(j->factored, each);
    if (!code) code = trace_layer_load_k(j->factored, p);
    if (!code) code = read_layer_values(t, j->seq, "lse", j->layer, lse, &has_lse);
    j->lse = has_lse ? lse : NULL;
    if (!code) largest_keys(j, reach);
    if (!code) code = check_layer_rows(j, each, every_row, p, &c->n_rows);
    trace_layer_close(j->factored);
    trace_layer_close(j->dense);
    j->factored = j->dense = NULL;
    return code;
}

/* bf16 keeps 8 bits of a number, f16 11; two numbers meet in a product. */
static double unit_of(const trace_model *m) {
    return strstr(m->compute, "bf16") ? 0x1p-7 : 0x1p-10;
}

int check_factored(trace *t, size_t seq, bool every_row, pool *p, check_sequence *c) {
    const trace_model *m = &t->model;
    size_t T = (size_t)t->seq[seq].n_tokens, H = (size_t)m->n_head, row = H * kernel_pad(T) * sizeof(float);
    size_t each = ROWS_BYTES / row < 1 ? 1 : ROWS_BYTES / row < ROWS_AT_ONCE ? ROWS_BYTES / row : ROWS_AT_ONCE;
    rows_job j = {.t = t, .seq = seq, .unit = unit_of(m)};
    j.rows = mem_new(each, row, "rows");
    j.dense_rows = c->dense ? mem_new(each, row, "rows") : NULL;
    double *reach = mem_new((size_t)m->n_kv_head * T, sizeof *reach, "norms");
    float *lse = mem_new(H * T, sizeof *lse, "lse");
    j.reach = reach;
    j.difference = mem_new(H, sizeof *j.difference, "differences");
    j.lse_error = mem_new(H, sizeof *j.lse_error, "differences");
    bool there = j.rows && (j.dense_rows || !c->dense) && reach && lse && j.difference && j.lse_error;
    int code = there ? 0 : ERR_DATA;
    for (j.layer = 0; j.layer < m->n_layer && !code; j.layer++)
        code = check_factored_layer(t, &j, reach, lse, (int32_t)each, every_row, p, c);
    for (size_t h = 0; h < H && !code; h++) {
        c->difference = fmax(c->difference, j.difference[h]);
        c->lse_error = fmax(c->lse_error, j.lse_error[h]);
    }
    mem_free(j.rows);
    mem_free(j.dense_rows);
    mem_free(reach);
    mem_free(lse);
    mem_free(j.difference);
    mem_free(j.lse_error);
    return code;
}
