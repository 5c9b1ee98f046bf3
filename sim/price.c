/* Pricing: what the lifetimes of each configuration cost in the rows of a tile (DESIGN section 6). */
#include "base/err.h"
#include "base/mem.h"
#include "sim/pass.h"

#include <math.h>
#include <string.h>

enum { RUNS_A_TASK = 4 };

/* Losses fall on the steps from the end of the prompt to the last one that predicts something. */
bool price_wanted(const pass *w, int32_t t) {
    if (t < w->n_prompt || t >= w->n_tokens - 1 || sample_weight(&w->steps, t) == 0) return false;
    return w->counted[t] || w->priced_sets;
}

uint16_t *price_gone_at(const pass *w, const run *r, int unit, int32_t row) {
    size_t place = ((size_t)row * (size_t)w->m->n_kv_head + (size_t)unit) * w->n_runs + (size_t)(r - w->runs);
    return w->gone + place * (w->stride / KERNEL_LANES);
}

span *price_span(const pass *w, const run *r, int unit) {
    return w->spans + (size_t)unit * w->n_runs + (r - w->runs);
}

static size_t row_sums(const pass *w) {
    return (size_t)w->m->n_head * (size_t)(1 + w->n_streams);
}

double *price_sums(const pass *w, const run *r, int32_t row) {
    return w->sums + ((size_t)row * w->n_runs + (size_t)(r - w->runs)) * row_sums(w);
}

static size_t run_masks(const pass *w) {
    return (size_t)w->tile * (size_t)w->m->n_kv_head * w->stride / KERNEL_LANES;
}

size_t price_run_bytes(const pass *w) {
    size_t of_worker = sizeof *w->lost + estimate_lanes(1) * sizeof *w->lanes;
    return (size_t)w->m->n_kv_head * sizeof *w->spans + run_masks(w) * sizeof *w->gone +
           (size_t)w->tile * row_sums(w) * sizeof *w->sums + (size_t)pool_threads(w->p) * of_worker;
}

int price_open(pass *w) {
    size_t n = w->n_runs, threads = (size_t)pool_threads(w->p);
    w->spans = mem_new(n * (size_t)w->m->n_kv_head, sizeof *w->spans, "configurations");
    w->gone = mem_new(n * run_masks(w), sizeof *w->gone, "configurations");
    w->sums = mem_new(n * (size_t)w->tile * row_sums(w), sizeof *w->sums, "configurations");
    w->lost = mem_new(threads * n, sizeof *w->lost, "configurations");
    w->lanes = mem_new(threads * estimate_lanes(n), sizeof *w->lanes, "configurations");
    return w->spans && w->gone && w->sums && w->lost && w->lanes ? 0 : ERR_DATA;
}

void price_close(pass *w) {
    mem_free(w->spans);
    mem_free(w->gone);
    mem_free(w->sums);
    mem_free(w->lost);
    mem_free(w->lanes);
}

/* Replays leave masks behind; lifetimes that were handed in are compared here. */
static int given_masks_task(void *context, size_t index, int worker) {
    (void)worker;
    pass *w = context;
    run *r = &w->runs[index];
    for (int u = 0; u < r->n_units && r->is_given; u++)
        for (int32_t row = 0; row < w->n_rows; row++)
            if (price_wanted(w, w->row0 + row))
                kernels()->gone_mask(r->evict_at + (size_t)u * w->stride, w->row0 + row, (size_t)(w->row0 + row) + 1,
                                     price_gone_at(w, r, u, row));
    return 0;
}

/* A worker's memory for the streams of one kv head's query heads: row r of stream k of its head h. */
static float *stream_row(const pass *w, int worker, int h, int k, int32_t r) {
    size_t of_worker = (size_t)worker * w->stream_rows;
    return w->stream + (of_worker + (size_t)(h * w->n_streams + k) * LAYER_ROWS + (size_t)r) * w->stride;
}

/* Rows from .. to-1 of the tile for one head: each stream s becomes its deviation, where it stands. */
static void prepare_head(pass *w, int kv, int h, int32_t from, int32_t to, int worker, estimate_row *rows) {
    int head = kv * w->group + h;
    if (w->priced_sets) step_streams(w, head, from, to, w->priced_sets, stream_row(w, worker, h, w->n_fixed, 0));
    for (int32_t r = from; r < to; r++) {
        const float *s[w->n_streams + 1];
        for (int k = 0; k < w->n_fixed; k++)
            s[k] = w->streams.s + ((size_t)head * (size_t)w->n_fixed + (size_t)k) * w->stride;
        for (int k = w->n_fixed; k < w->n_streams; k++) s[k] = stream_row(w, worker, h, k, r - from);
        size_t place = (size_t)((r - from) * w->group + h);
        float *mean = w->width.n
                          ? w->mean + ((size_t)worker * LAYER_ROWS * (size_t)w->group + place) * (size_t)w->n_streams
                          : NULL;
        estimate_prepare(row_of(w, head, r), w->row0 + r, s, w->n_streams, LAYER_ROWS * w->stride,
                         stream_row(w, worker, h, 0, r - from), mean, &rows[place]);
    }
}

/* All configurations at one step of a kv head. */
static void price_row(pass *w, int kv, int32_t row, const estimate_row *rows, int worker) {
    size_t each = (size_t)(1 + w->n_streams), n = 0;
    estimate_lost *lost = w->lost + (size_t)worker * w->n_runs;
    for (size_t i = 0; i < w->n_runs; i++) {
        run *r = &w->runs[i];
        int unit = r->n_units == 1 ? 0 : kv;
        const span *s = price_span(w, r, unit);
        double *out = price_sums(w, r, row) + (size_t)(kv * w->group) * each;
        if (w->row0 + row < s->first_missing) memset(out, 0, (size_t)w->group * each * sizeof *out);
        else lost[n++] = (estimate_lost){price_gone_at(w, r, unit, row), s->left_end, out, i, 0};
    }
    if (!estimate_masked(rows, w->group, lost, n, w->lanes + (size_t)worker * estimate_lanes(w->n_runs))) return;
    for (size_t k = 0; k < n; k++) {
        run *r = &w->runs[lost[k].id];
        if (!r->is_quantised) atomic_fetch_add_explicit(&r->floored, lost[k].floored, memory_order_relaxed);
    }
}

/* Task 0 reads ahead for the next tile, beside the others. The others: one kv head, some rows of the tile; each row is
 * prepared once and priced for every configuration. */
static int estimate_task(void *context, size_t index, int worker) {
    pass *w = context;
    if (index-- == 0) return trace_layer_prefetch(w->attention, w->row0 + w->n_rows);
    int kv = (int)(index / chunks_of(w));
    int32_t from, to;
    chunk_rows(w, index % chunks_of(w), &from, &to);
    while (from < to && !price_wanted(w, w->row0 + from)) from++;
    while (from < to && !price_wanted(w, w->row0 + to - 1)) to--;
    if (from == to) return 0;
    estimate_row rows[LAYER_ROWS * w->group];
    for (int h = 0; h < w->group; h++) prepare_head(w, kv, h, from, to, worker, rows);
    for (int32_t r = from; r < to; r++)
        if (price_wanted(w, w->row0 + r)) price_row(w, kv, r, rows + (r - from) * w->group, worker);
    for (int h = 0; h < w->group && w->width.n; h++)
        TRY(price_widths(w, kv * w->group + h, from, to, worker, rows + h));
    return 0;
}

/* |Wo delta| of a layer at one step, from the heads' sums. */
static double output_error(const pass *w, const double *sums, int worker) {
    size_t step = (size_t)(1 + w->n_streams);
    double total = 0;
    if (!w->o->out_err_exact) {
        for (int k = 0; k < w->n_fixed; k++) {
            double y = 0;
            for (int h = 0; h < w->m->n_head; h++) y += sums[(size_t)h * step + 1 + (size_t)k];
            total += y * y;
        }
        return sqrt(total / w->n_fixed) / ESTIMATE_PROBE_MEAN;
    }
    double *y = w->embd + (size_t)worker * (size_t)w->m->n_embd;
    memset(y, 0, (size_t)w->m->n_embd * sizeof *y);
    for (int h = 0; h < w->m->n_head; h++)
        for (int c = 0; c < w->m->head_dim; c++) {
            double delta = sums[(size_t)h * step + 1 + (size_t)c];
            const float *wo = w->wo + ((size_t)h * (size_t)w->m->head_dim + (size_t)c) * (size_t)w->m->n_embd;
            if (delta != 0)
                for (int j = 0; j < w->m->n_embd; j++) y[j] += delta * (double)wo[j];
        }
    for (int j = 0; j < w->m->n_embd; j++) total += y[j] * y[j];
    return sqrt(total);
}

static void add_mass(pass *w, run *r, int32_t t, const double *sums, int worker) {
    size_t step = (size_t)(1 + w->n_streams), heads = (size_t)w->m->n_head;
    double lost = 0, weight = sample_weight(&w->steps, t);
    for (size_t h = 0; h < heads; h++) {
        lost += sums[h * step];
        r->head_lost[(size_t)w->layer * heads + h] += weight * sums[h * step];
    }
    r->out->block_lost_mass[w->block[t]] += weight * lost;
    if (w->steps.strata) r->step_lost[t] += lost;
    if (w->o->out_err && (lost != 0 || r->is_quantised)) r->out_err += weight * output_error(w, sums, worker);
}

/* First order: g.delta adds up. Fisher: each sample's sum over layers and heads is squared only when it is whole. */
static void add_loss(pass *w, run *r, int32_t t, const double *sums) {
    size_t step = (size_t)(1 + w->n_streams), heads = (size_t)w->m->n_head;
    int samples = w->priced_sets - 1;
    double weight = sample_weight(&w->steps, t);
    for (size_t h = 0; h < heads; h++) {
        const double *x = sums + h * step + 1 + w->n_fixed;
        size_t cell = (size_t)w->layer * heads + h;
        r->out->block_first[w->block[t]] += weight * x[0];
        r->head_first[cell] += weight * x[0];
        if (w->steps.strata) r->step_first[t] += x[0];
        for (int k = 0; k < samples; k++) {
            r->fisher[(size_t)k * (size_t)w->n_tokens + (size_t)t] += x[1 + k];
            r->head_fisher[cell] += weight * 0.5 * x[1 + k] * x[1 + k] / samples;
        }
    }
}

/* Add a tile's sums to the totals of a few configurations that stand side by side, in order of step and head. */
static int add_task(void *context, size_t index, int worker) {
    pass *w = context;
    run *from = w->runs + index * RUNS_A_TASK, *end = w->runs + w->n_runs;
    if (end - from > RUNS_A_TASK) end = from + RUNS_A_TASK;
    for (int32_t row = 0; row < w->n_rows; row++) {
        int32_t t = w->row0 + row;
        if (!price_wanted(w, t)) continue;
        for (run *r = from; r < end; r++) {
            const double *sums = price_sums(w, r, row);
            if (w->counted[t]) add_mass(w, r, t, sums, worker);
            if (w->priced_sets) add_loss(w, r, t, sums);
        }
    }
    return 0;
}

/* Footprint and lifetimes of the finished layer. */
static int finish_task(void *context, size_t index, int worker) {
    pass *w = context;
    run *r = &w->runs[index];
    int32_t *scratch = w->scratch + (size_t)worker * ((size_t)w->n_tokens + 2);
    for (int u = 0; u < r->n_units; u++)
        footprint_add(&r->out->use, r->evict_at + (size_t)u * w->stride, w->n_tokens, w->n_prompt,
                      w->m->window[w->layer], r->c->hold, w->s->probes, w->s->n_probes, scratch);
    for (int u = 0; u < r->n_units && !r->is_given; u++) r->out->updates += replay_updates(r->replay[u]);
    for (int kv = 0; kv < w->m->n_kv_head && r->out->evict_at; kv++) {
        size_t unit = (size_t)w->layer * (size_t)w->m->n_kv_head + (size_t)kv;
        memcpy(r->out->evict_at + unit * (size_t)w->n_tokens,
               r->evict_at + (r->n_units == 1 ? 0 : (size_t)kv) * w->stride,
               (size_t)w->n_tokens * sizeof *r->out->evict_at);
    }
    return 0;
}

int price_tile(pass *w) {
    bool some_given = false;
    for (size_t i = 0; i < w->n_runs; i++) some_given |= w->runs[i].is_given;
    if (some_given) TRY(pool_run(w->p, w->n_runs, given_masks_task, w));
    TRY(pool_run(w->p, 1 + (size_t)w->m->n_kv_head * chunks_of(w), estimate_task, w));
    return pool_run(w->p, (w->n_runs + RUNS_A_TASK - 1) / RUNS_A_TASK, add_task, w);
}

int price_finish(pass *w) {
    return pool_run(w->p, w->n_runs, finish_task, w);
}
