/* Gradients of one layer: f16 (or f32) rows times a scale each, read by bands (one row of chunks of all heads), so that
 * a layer of a long text is never held whole unless it is asked for whole. */
#include "base/err.h"
#include "base/mem.h"
#include "traces/reader_private.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static size_t n_sets(const trace_sequence *s) {
    return s->has_grad_loss ? 1 + (size_t)s->n_fisher : 0;
}

size_t trace_layer_grad_bytes(const trace *t, size_t seq, int32_t rows) {
    const trace_sequence *s = &t->seq[seq];
    size_t heads = (size_t)t->model.n_head, dim = (size_t)t->model.head_dim, sets = n_sets(s);
    size_t band = TRACE_TILE < s->n_tokens ? TRACE_TILE : (size_t)s->n_tokens;
    return sets * heads * (((size_t)rows + 2 * band) * dim + (size_t)s->n_tokens) * sizeof(float);
}

/* ---- opening ---------------------------------------------------------------------------------------------------- */

/* Bytes of one head's band. */
static size_t band_bytes(const grad_source *g, size_t dim) {
    return (size_t)g->tiles.rows * dim * g->tiles.size;
}

static int read_scale(const trace_layer *l, const grad_source *g, const char *name, int sample) {
    int rank = g->tiles.layout.rank - 1;
    size_t heads = (size_t)l->t->model.n_head, T = (size_t)l->n_tokens;
    hsize_t dims[H5S_MAX_RANK], start[4] = {(hsize_t)sample, (hsize_t)l->layer}, count[4] = {1, 1, heads, T};
    hid_t set;
    char path[80];
    snprintf(path, sizeof path, "%s_scale", name);
    int code = hdf_open_dataset(l->t->h5, path, HDF_FLOAT, rank, dims, &set);
    if (!code) {
        code = hdf_read_block(set, H5T_NATIVE_FLOAT, rank, start + 4 - rank, count + 4 - rank,
                              g->scale + (size_t)sample * heads * T);
        if (code) err_prefix(code, "%s", path);
        H5Dclose(set);
    }
    return code ? err_prefix(code, "%s", l->t->path) : 0;
}

static int open_source(const trace_layer *l, const char *array, int rank, int n, grad_source *g) {
    size_t heads = (size_t)l->t->model.n_head, T = (size_t)l->n_tokens;
    char name[64];
    snprintf(name, sizeof name, "seq/%04zu/grad/%s", l->seq, array);
    TRY(tiles_open(&g->tiles, l->t->h5, l->t->path, name, rank, true));
    g->n = n;
    g->band = g->next_band = -1;
    g->stored = mem_new((size_t)n * heads, band_bytes(g, l->dim), name);
    g->scale = mem_new((size_t)n * heads * T, sizeof *g->scale, name);
    if (!g->stored || !g->scale) return ERR_DATA;
    for (int sample = 0; sample < n; sample++) TRY(read_scale(l, g, name, sample));
    return 0;
}

static int open_sources(trace_layer *l) {
    const trace_sequence *s = &l->t->seq[l->seq];
    if (l->grad_of[0].n) return 0;
    if (!s->has_grad_loss)
        return err_set(ERR_DATA, "%s: seq/%04zu has no grad/loss (the gradients)", l->t->path, l->seq);
    if (s->n_fisher) TRY(open_source(l, "fisher", 5, s->n_fisher, &l->grad_of[1]));
    return open_source(l, "loss", 4, 1, &l->grad_of[0]);
}

void reader_close_grad(trace_layer *l) {
    for (int i = 0; i < 2; i++) {
        grad_source *g = &l->grad_of[i];
        tiles_close(&g->tiles);
        mem_free(g->stored);
        mem_free(g->next_stored);
        mem_free(g->scale);
        *g = (grad_source){0};
    }
    mem_free(l->grad);
    l->grad = NULL;
}

/* ---- reading ---------------------------------------------------------------------------------------------------- */

static int read_band(const trace_layer *l, grad_source *g, int32_t band, char *to, pool *p) {
    size_t heads = (size_t)l->t->model.n_head, bytes = band_bytes(g, l->dim);
    for (int sample = 0; sample < g->n; sample++) {
        tiles_block b = {
            .sample = sample, .layer = l->layer, .n_heads = (int)heads, .row0 = band, .n_rows = 1, .n_cols = 1};
        b.to = to + (size_t)sample * heads * bytes;
        b.head_stride = bytes;
        TRY(tiles_read(&g->tiles, &b, p));
    }
    return 0;
}

static int load_band(const trace_layer *l, grad_source *g, int32_t band, pool *p) {
    if (band == g->band) return 0;
    g->band = -1;
    if (band == g->next_band) {
        char *stored = g->stored;
        g->stored = g->next_stored;
        g->next_stored = stored;
        g->next_band = -1;
    } else TRY(read_band(l, g, band, g->stored, p));
    g->band = band;
    return 0;
}

int reader_prefetch_grad(trace_layer *l, int32_t row) {
    for (int i = 0; i < 2; i++) {
        grad_source *g = &l->grad_of[i];
        int32_t band = g->n ? row / g->tiles.rows : -1;
        if (!g->n || band == g->band || band == g->next_band) continue;
        size_t heads = (size_t)g->n * (size_t)l->t->model.n_head;
        g->next_band = -1;
        if (!g->next_stored && !(g->next_stored = mem_new(heads, band_bytes(g, l->dim), g->tiles.name)))
            return ERR_DATA;
        TRY(read_band(l, g, band, g->next_stored, NULL));
        g->next_band = band;
    }
    return 0;
}

/* Rows t0 .. t0+n-1 of the loaded band, of every set and head. */
typedef struct widen_job {
    const trace_layer *l;
    const grad_source *g;
    int32_t t0, n;
    float *to; /* row t0 of the source's first set and head */
    size_t head_stride;
} widen_job;

static int widen_head(void *context, size_t task, int worker) {
    (void)worker;
    const widen_job *j = context;
    const trace_layer *l = j->l;
    const grad_source *g = j->g;
    size_t T = (size_t)l->n_tokens, dim = l->dim, t0 = (size_t)j->t0, n = (size_t)j->n;
    float *row = j->to + task * j->head_stride;
    const char *stored = g->stored + task * band_bytes(g, dim) + t0 % (size_t)g->tiles.rows * dim * g->tiles.size;
    reader_widen(stored, g->tiles.size, row, n * dim);
    for (size_t t = t0; t < t0 + n; t++, row += dim) {
        float scale = g->scale[task * T + t], sum = 0;
        for (size_t d = 0; d < dim; d++) {
            row[d] *= scale;
            sum += row[d] - row[d]; /* NaN if this is not finite, else 0 */
        }
        if (!isfinite(sum) || !isfinite(scale))
            return err_set(ERR_DATA, "%s: %s: not a finite number at layer %d, head %zu, row %zu", l->t->path,
                           g->tiles.name, l->layer, task % (size_t)l->t->model.n_head, t);
    }
    return 0;
}

static int read_rows(trace_layer *l, grad_source *g, int32_t row0, int32_t n, float *to, pool *p) {
    size_t heads = (size_t)l->t->model.n_head;
    for (int32_t done = 0, now; done < n; done += now) {
        int32_t row = row0 + done, left = g->tiles.rows - row % g->tiles.rows;
        now = n - done < left ? n - done : left;
        TRY(load_band(l, g, row / g->tiles.rows, p));
        widen_job j = {l, g, row, now, to + (size_t)done * l->dim, (size_t)n * l->dim};
        TRY(pool_run(p, (size_t)g->n * heads, widen_head, &j));
    }
    return 0;
}

int trace_layer_read_grad(trace_layer *l, int32_t row0, int32_t n, pool *p) {
    size_t each = (size_t)l->t->model.n_head * (size_t)n * l->dim, need = n_sets(&l->t->seq[l->seq]) * each;
    TRY(open_sources(l));
    if (row0 < 0 || n < 1 || n > l->n_tokens - row0)
        return err_set(ERR_DATA, "internal error: gradients of rows %d + %d of %d", row0, n, l->n_tokens);
    if (need > l->grad_capacity) {
        mem_free(l->grad);
        l->grad_capacity = 0;
        l->grad = mem_new(need, sizeof *l->grad, "gradients");
        if (!l->grad) return ERR_DATA;
        l->grad_capacity = need;
    }
    l->grad_rows = n;
    TRY(read_rows(l, &l->grad_of[0], row0, n, l->grad, p));
    return l->grad_of[1].n ? read_rows(l, &l->grad_of[1], row0, n, l->grad + each, p) : 0;
}

const float *trace_layer_grad(const trace_layer *l, int set, int head) {
    size_t heads = (size_t)l->t->model.n_head;
    return l->grad + ((size_t)set * heads + (size_t)head) * (size_t)l->grad_rows * l->dim;
}
