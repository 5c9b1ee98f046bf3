/* Pricing: what the lifetimes of each configuration cost in the rows of a tile (DESIGN section 6). */
#include "base/err.h"
#include "sim/pass.h"

#include <math.h>
#include <string.h>

/* Losses fall on the steps from the end of the prompt to the last one that predicts something. */
static bool is_priced(const pass *w, int32_t t) {
    if (t < w->n_prompt || t >= w->n_tokens - 1 || sample_weight(&w->steps, t) == 0) return false;
    return w->counted[t] || w->priced_sets;
}

static void estimate_one(pass *w, run *r, int kv, const estimate_row *row, double *sums) {
    int unit = r->n_units == 1 ? 0 : kv;
    if (row->t < r->first_missing[unit]) {
        memset(sums, 0, (size_t)(1 + w->n_streams) * sizeof *sums);
        return;
    }
    int floored = estimate_masked(row, r->evict_at + (size_t)unit * w->stride, r->left_end[unit], sums);
    if (floored) atomic_fetch_add_explicit(&r->floored, 1, memory_order_relaxed);
}

static void estimate_head(pass *w, int head, int32_t from, int32_t to, int worker) {
    while (from < to && !is_priced(w, w->row0 + from)) from++;
    while (from < to && !is_priced(w, w->row0 + to - 1)) to--;
    if (from == to) return;
    const float *steps = w->priced_sets ? step_streams(w, head, from, to, w->priced_sets, worker) : NULL;
    float *d = w->deviation + (size_t)worker * (size_t)w->n_streams_most * w->stride;
    for (int32_t r = from; r < to; r++) {
        const float *s[w->n_streams + 1];
        estimate_row row;
        if (!is_priced(w, w->row0 + r)) continue;
        for (int k = 0; k < w->n_fixed; k++)
            s[k] = w->streams.s + ((size_t)head * (size_t)w->n_fixed + (size_t)k) * w->stride;
        for (int k = 0; k < w->priced_sets; k++)
            s[w->n_fixed + k] = steps + ((size_t)k * LAYER_ROWS + (size_t)(r - from)) * w->stride;
        estimate_prepare(row_of(w, head, r), w->row0 + r, s, w->n_streams, w->stride, d, &row);
        size_t place = ((size_t)r * (size_t)w->m->n_head + (size_t)head) * (size_t)(1 + w->n_streams);
        for (size_t i = 0; i < w->n_runs; i++)
            estimate_one(w, &w->runs[i], head / w->group, &row, w->runs[i].sums + place);
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
    if (w->row0 + to <= w->n_prompt) return 0;
    for (int h = kv * w->group; h < (kv + 1) * w->group; h++) estimate_head(w, h, from, to, worker);
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
    if (w->o->out_err && lost != 0) r->out_err += weight * output_error(w, sums, worker);
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

/* Add a tile's sums to one configuration's totals, in order of step and head. */
static int add_task(void *context, size_t index, int worker) {
    pass *w = context;
    run *r = &w->runs[index];
    for (int32_t row = 0; row < w->n_rows; row++) {
        int32_t t = w->row0 + row;
        const double *sums = r->sums + (size_t)row * (size_t)w->m->n_head * (size_t)(1 + w->n_streams);
        if (!is_priced(w, t)) continue;
        if (w->counted[t]) add_mass(w, r, t, sums, worker);
        if (w->priced_sets) add_loss(w, r, t, sums);
    }
    return 0;
}

/* Footprint and lifetimes of the finished layer. */
static int finish_task(void *context, size_t index, int worker) {
    pass *w = context;
    run *r = &w->runs[index];
    int32_t *scratch = w->scratch + (size_t)worker * ((size_t)w->n_tokens + 2);
    for (int u = 0; u < r->n_units; u++)
        footprint_add(&r->out->use, r->evict_at + (size_t)u * w->stride, w->n_tokens, w->m->window[w->layer],
                      w->s->probes, w->s->n_probes, scratch);
    for (int kv = 0; kv < w->m->n_kv_head && r->out->evict_at; kv++) {
        size_t unit = (size_t)w->layer * (size_t)w->m->n_kv_head + (size_t)kv;
        memcpy(r->out->evict_at + unit * (size_t)w->n_tokens,
               r->evict_at + (r->n_units == 1 ? 0 : (size_t)kv) * w->stride,
               (size_t)w->n_tokens * sizeof *r->out->evict_at);
    }
    return 0;
}

int price_tile(pass *w) {
    TRY(pool_run(w->p, 1 + (size_t)w->m->n_kv_head * chunks_of(w), estimate_task, w));
    return pool_run(w->p, w->n_runs, add_task, w);
}

int price_finish(pass *w) {
    return pool_run(w->p, w->n_runs, finish_task, w);
}
