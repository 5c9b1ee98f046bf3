/* Gradients of one layer: f16 (or f32) rows times a scale each. */
#include "base/err.h"
#include "base/mem.h"
#include "traces/reader_private.h"

#include <math.h>
#include <stdio.h>

static size_t n_sets(const trace_sequence *s) {
    return s->has_grad_loss ? 1 + (size_t)s->n_fisher : 0;
}

size_t trace_layer_grad_bytes(const trace *t, size_t seq) {
    const trace_sequence *s = &t->seq[seq];
    size_t rows = (size_t)t->model.n_head * (size_t)s->n_tokens, dim = (size_t)t->model.head_dim, sets = n_sets(s);
    size_t stored =
        (rows + (size_t)t->model.n_head * TRACE_TILE) * dim + rows; /* one set and its scales, for a while */
    return sets ? (sets * rows * dim + stored) * sizeof(float) : 0;
}

/* One label set of the layer being read. */
typedef struct grad_job {
    const trace_layer *l;
    const tiles *source;
    const char *stored; /* [n_head][rows, padded][dim] */
    size_t head_bytes;
    const float *scale; /* [n_head][n_tokens] */
    float *to;          /* [n_head][n_tokens][dim] */
} grad_job;

static int scale_head(void *context, size_t head, int worker) {
    (void)worker;
    const grad_job *j = context;
    size_t T = (size_t)j->l->n_tokens, dim = j->l->dim;
    float *row = j->to + head * T * dim;
    reader_widen(j->stored + head * j->head_bytes, j->source->size, row, T * dim);
    for (size_t t = 0; t < T; t++, row += dim) {
        float scale = j->scale[head * T + t], sum = 0;
        for (size_t d = 0; d < dim; d++) {
            row[d] *= scale;
            sum += row[d] - row[d]; /* NaN if this is not finite, else 0 */
        }
        if (!isfinite(sum) || !isfinite(scale))
            return err_set(ERR_DATA, "%s: %s: not a finite number at layer %d, head %zu, row %zu", j->l->t->path,
                           j->source->name, j->l->layer, head, t);
    }
    return 0;
}

static int read_scale(const trace_layer *l, const char *name, int rank, int sample, float *scale) {
    hsize_t dims[H5S_MAX_RANK], start[4] = {(hsize_t)sample, (hsize_t)l->layer},
                                count[4] = {1, 1, (hsize_t)l->t->model.n_head, (hsize_t)l->n_tokens};
    hid_t set;
    char path[80];
    snprintf(path, sizeof path, "%s_scale", name);
    int code = hdf_open_dataset(l->t->h5, path, HDF_FLOAT, rank, dims, &set);
    if (!code) {
        code = hdf_read_block(set, H5T_NATIVE_FLOAT, rank, start + 4 - rank, count + 4 - rank, scale);
        if (code) err_prefix(code, "%s", path);
        H5Dclose(set);
    }
    return code ? err_prefix(code, "%s", l->t->path) : 0;
}

/* Label sets of one dataset, `name` with its scales beside it. */
static int read_sets(const trace_layer *l, tiles *s, int n, float *to, pool *p) {
    size_t heads = (size_t)l->t->model.n_head, T = (size_t)l->n_tokens;
    int32_t n_rows = (l->n_tokens + s->rows - 1) / s->rows;
    size_t tile_bytes = (size_t)s->rows * l->dim * s->size, head_bytes = (size_t)n_rows * tile_bytes;
    char *stored = mem_new(heads, head_bytes, s->name);
    float *scale = mem_new(heads * T, sizeof *scale, s->name);
    int code = stored && scale ? 0 : ERR_DATA;
    for (int sample = 0; sample < n && !code; sample++, to += heads * T * l->dim) {
        tiles_block b = {.sample = sample, .layer = l->layer, .n_heads = (int)heads, .n_rows = n_rows, .n_cols = 1};
        b.to = stored;
        b.head_stride = head_bytes;
        b.row_stride = tile_bytes;
        code = tiles_read(s, &b, p);
        if (!code) code = read_scale(l, s->name, s->layout.rank - 1, sample, scale);
        if (!code) code = pool_run(p, heads, scale_head, &(grad_job){l, s, stored, head_bytes, scale, to});
    }
    mem_free(stored);
    mem_free(scale);
    return code;
}

static int read_grad(const trace_layer *l, const char *array, int rank, int n, float *to, pool *p) {
    char name[64];
    tiles s;
    snprintf(name, sizeof name, "seq/%04zu/grad/%s", l->seq, array);
    TRY(tiles_open(&s, l->t->h5, l->t->path, name, rank, true));
    int code = read_sets(l, &s, n, to, p);
    tiles_close(&s);
    return code;
}

int trace_layer_read_grad(trace_layer *l, pool *p) {
    const trace_sequence *s = &l->t->seq[l->seq];
    size_t each = (size_t)l->t->model.n_head * (size_t)l->n_tokens * l->dim;
    if (l->grad) return 0;
    if (!s->has_grad_loss)
        return err_set(ERR_DATA, "%s: seq/%04zu has no grad/loss (the gradients)", l->t->path, l->seq);
    l->grad = mem_new(n_sets(s), each * sizeof *l->grad, "gradients");
    if (!l->grad) return ERR_DATA;
    int code = read_grad(l, "loss", 4, 1, l->grad, p);
    if (!code && s->n_fisher) code = read_grad(l, "fisher", 5, s->n_fisher, l->grad + each, p);
    if (code) {
        mem_free(l->grad);
        l->grad = NULL;
    }
    return code;
}

const float *trace_layer_grad(const trace_layer *l, int set, int head) {
    size_t heads = (size_t)l->t->model.n_head;
    return l->grad + ((size_t)set * heads + (size_t)head) * (size_t)l->n_tokens * l->dim;
}
