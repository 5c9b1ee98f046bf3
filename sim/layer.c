/* The work on one layer: tile by tile, rows are produced, policies replayed, lifetimes priced. */
#include "base/err.h"
#include "base/progress.h"
#include "sim/pass.h"

#include <string.h>

enum { REPLAYS_A_TASK = 4 };

/* ---- what the parts share --------------------------------------------------------------------------------------- */

const float *row_of(const pass *w, int head, int32_t r) {
    return w->rows + ((size_t)head * (size_t)w->n_rows + (size_t)r) * w->row_stride;
}

size_t chunks_of(const pass *w) {
    return ((size_t)w->n_rows + LAYER_ROWS - 1) / LAYER_ROWS;
}

void chunk_rows(const pass *w, size_t index, int32_t *from, int32_t *to) {
    *from = (int32_t)index * LAYER_ROWS;
    *to = *from + LAYER_ROWS < w->n_rows ? *from + LAYER_ROWS : w->n_rows;
}

int pass_read_tile(pass *w, int32_t row0) {
    w->row0 = row0;
    w->n_rows = w->n_tokens - row0 < w->tile ? w->n_tokens - row0 : w->tile;
    w->row_stride = kernel_pad((size_t)(row0 + w->n_rows)); /* no longer than needed: what lies behind is cleared */
    if (w->n_sets) TRY(trace_layer_read_grad(w->attention, row0, w->n_rows, w->p));
    return trace_layer_rows(w->attention, row0, w->n_rows, w->rows, w->row_stride, w->p);
}

void step_streams(const pass *w, int head, int32_t from, int32_t to, int sets, float *out) {
    size_t dim = (size_t)w->m->head_dim;
    const float *values = w->values + (size_t)(head / w->group) * w->stride * dim;
    for (int k = 0; k < sets; k++)
        kernels()->scores(trace_layer_grad(w->attention, k, head) + (size_t)from * dim, (size_t)(to - from), values,
                          (size_t)(w->row0 + to), dim, 1.0f, out + (size_t)k * LAYER_ROWS * w->stride, w->stride);
}

/* ---- replay ----------------------------------------------------------------------------------------------------- */

/* The units of a task: one, or all of a layer where they compete. */
static int units_of_task(const task *k) {
    return k->r->c->share == SHARE_LAYER ? k->r->n_units : 1;
}

/* One row for the units of a task. */
static void replay_row(pass *w, const task *k, int32_t row) {
    const run *r = k->r;
    int n = w->m->n_head / r->n_units, units = units_of_task(k);
    const float *heads[w->m->n_head];
    for (int u = k->unit; u < k->unit + units; u++) {
        for (int h = u * n; h < (u + 1) * n; h++) heads[h] = row_of(w, h, row);
        if (r->c->needs & (NEEDS_FUTURE | NEEDS_OUT | NEEDS_LOSS | NEEDS_FISHER)) full_run_offer(w, r, u, row);
        replay_attend(r->replay[u], w->row0 + row, heads + u * n, &w->facts[w->row0 + row]);
        if (price_wanted(w, w->row0 + row)) replay_gone(r->replay[u], price_gone_at(w, r, u, row));
    }
    replay_evict_together(r->replay + k->unit, units);
}

/* A few configurations go through the tile side by side, so that a row is in the first-level cache for all but one. */
static int replay_task(void *context, size_t index, int worker) {
    (void)worker;
    pass *w = context;
    const task *from = w->tasks + index * REPLAYS_A_TASK, *end = w->tasks + w->n_tasks;
    if (end - from > REPLAYS_A_TASK) end = from + REPLAYS_A_TASK;
    for (int32_t row = 0; row < w->n_rows; row++)
        for (const task *k = from; k < end; k++) replay_row(w, k, row);
    for (const task *k = from; k < end; k++)
        for (int u = k->unit; u < k->unit + units_of_task(k); u++) {
            span *s = price_span(w, k->r, u);
            replay_range(k->r->replay[u], &s->first_missing, &s->left_end);
            TRY(replay_check(k->r->replay[u]));
        }
    return 0;
}

/* Lifetimes that were handed in, for the current layer. */
static void load_given(pass *w, run *r) {
    for (int u = 0; u < r->n_units; u++) {
        const int32_t *from = r->given + ((size_t)w->layer * (size_t)w->m->n_kv_head + (size_t)u) * (size_t)w->n_tokens;
        int32_t *to = r->evict_at + (size_t)u * w->stride;
        span *s = price_span(w, r, u);
        *s = (span){.first_missing = w->n_tokens + 1};
        for (size_t i = 0; i < w->stride; i++) to[i] = w->n_tokens + 1;
        for (int32_t i = 0; i < w->n_tokens; i++) {
            to[i] = from[i];
            if (from[i] < s->first_missing) s->first_missing = from[i];
            if (from[i] <= w->n_tokens) s->left_end = i + 1;
        }
    }
}

static void begin_run(pass *w, run *r) {
    if (r->is_given) {
        load_given(w, r);
        return;
    }
    for (int u = 0; u < r->n_units; u++) {
        bool whole = r->c->unit == UNIT_LAYER;
        replay_unit unit = {
            .sequence = (int32_t)w->seq,
            .layer = w->layer,
            .kv_head = whole ? 0 : u,
            .window = w->m->window[w->layer],
            .n_head = whole ? w->m->n_head : w->group,
            .data = whole ? &w->data.whole : &w->data.head[u],
        };
        replay_begin(r->replay[u], &unit, r->evict_at + (size_t)u * w->stride);
    }
}

static int pack_values_task(void *context, size_t kv, int worker) {
    (void)worker;
    const pass *w = context;
    size_t dim = (size_t)w->m->head_dim;
    kernels()->pack_keys(trace_layer_v(w->attention, (int)kv), (size_t)w->n_tokens, dim,
                         w->values + kv * w->stride * dim);
    return 0;
}

/* Streams that do not depend on the step, of values v. */
static int fixed_streams(void *context, const float *v, estimate_streams *out) {
    const pass *w = context;
    if (!w->o->out_err) return 0;
    if (w->o->out_err_exact) return estimate_value_streams(w->m, v, w->n_tokens, out);
    return estimate_probe_streams(w->m, w->layer, v, w->n_tokens, w->wo, out);
}

static int open_streams(pass *w) {
    if (w->n_sets) TRY(pool_run(w->p, (size_t)w->m->n_kv_head, pack_values_task, w));
    if (w->o->out_err || (w->data.needs & NEEDS_WO)) TRY(trace_read_wo(w->t, w->layer, w->wo));
    TRY(layer_data_open(&w->data, w->layer, w->attention, w->wo, w->p));
    TRY(fixed_streams(w, trace_layer_v(w->attention, 0), &w->streams));
    if (w->width.n) TRY(trace_layer_keep_q(w->attention, w->tile));
    return widths_open(&w->width, w->attention, fixed_streams, w, w->p);
}

int layer_work(pass *w, double progress) {
    TRY(open_streams(w));
    TRY(hindsight_begin(w));
    for (size_t i = 0; i < w->n_runs; i++) begin_run(w, &w->runs[i]);
    for (int32_t row0 = 0; row0 < w->n_tokens; row0 += w->tile) {
        TRY(hindsight_ahead(w, row0));
        TRY(pass_read_tile(w, row0));
        TRY(full_run_evidence(w));
        TRY(hindsight_tile(w));
        TRY(pool_run(w->p, (w->n_tasks + REPLAYS_A_TASK - 1) / REPLAYS_A_TASK, replay_task, w));
        TRY(price_tile(w));
        progress_at(progress + (double)(row0 + w->n_rows));
    }
    return price_finish(w);
}
