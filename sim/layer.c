/* The work on one layer: tile by tile, rows are produced, policies replayed, lifetimes priced. */
#include "base/err.h"
#include "base/mem.h"
#include "base/progress.h"
#include "sim/pass.h"

#include <math.h>
#include <string.h>

enum { COLUMNS_A_TASK = 256, REPLAYS_A_TASK = 4 };

static const float *row_of(const pass *w, int head, int32_t r) {
    return w->rows + ((size_t)head * (size_t)w->n_rows + (size_t)r) * w->row_stride;
}

static size_t chunks_of(const pass *w) {
    return ((size_t)w->n_rows + LAYER_ROWS - 1) / LAYER_ROWS;
}

/* Units for which evidence and future of the full run are kept: the kv heads, then the layer where some unit is one. */
static size_t full_run_units(const pass *w) {
    return (size_t)w->m->n_kv_head + w->layer_unit;
}

/* Rows from .. to-1 of the tile's chunk number `index`. */
static void chunk_rows(const pass *w, size_t index, int32_t *from, int32_t *to) {
    *from = (int32_t)index * LAYER_ROWS;
    *to = *from + LAYER_ROWS < w->n_rows ? *from + LAYER_ROWS : w->n_rows;
}

static int read_tile(pass *w, int32_t row0) {
    w->row0 = row0;
    w->n_rows = w->n_tokens - row0 < w->tile ? w->n_tokens - row0 : w->tile;
    w->row_stride = kernel_pad((size_t)(row0 + w->n_rows)); /* no longer than needed: what lies behind is cleared */
    if (w->n_sets) TRY(trace_layer_read_grad(w->attention, row0, w->n_rows, w->p));
    return trace_layer_rows(w->attention, row0, w->n_rows, w->rows, w->row_stride, w->p);
}

/* s(t, i) = g_t . v_i of a query head for some rows of the tile and the first `sets` label sets, into the worker's
 * memory: row r of set k at the result + (k * LAYER_ROWS + r - from) * stride. */
static float *step_streams(const pass *w, int head, int32_t from, int32_t to, int sets, int worker) {
    float *out = w->stream + (size_t)worker * (size_t)w->n_sets * LAYER_ROWS * w->stride;
    size_t dim = (size_t)w->m->head_dim;
    const float *values = w->values + (size_t)(head / w->group) * w->stride * dim;
    for (int k = 0; k < sets; k++)
        kernels()->scores(trace_layer_grad(w->attention, k, head) + (size_t)from * dim, (size_t)(to - from), values,
                          (size_t)(w->row0 + to), dim, 1.0f, out + (size_t)k * LAYER_ROWS * w->stride, w->stride);
    return out;
}

/* ---- evidence of the full run (DESIGN section 5) ---------------------------------------------------------------- */

/* Evidence of kind 0 out, 1 loss, 2 fisher for row r of a unit. */
static float *evidence_row(const pass *w, float *of_unit, int kind, int32_t r) {
    return of_unit + ((size_t)kind * (size_t)w->tile + (size_t)r) * w->stride;
}
static float *evidence_of_head(const pass *w, int kv) {
    return w->evidence_head + (size_t)kv * 3 * (size_t)w->tile * w->stride;
}
static float *gain_row(const pass *w, int kv, int set, int32_t r) {
    return w->gain + (((size_t)kv * (size_t)w->n_sets + (size_t)set) * (size_t)w->tile + (size_t)r) * w->stride;
}
static float *out_row(const pass *w, int kv, int32_t r) {
    return w->out_head + ((size_t)kv * (size_t)w->tile + (size_t)r) * w->stride;
}

static float over(float a) {
    float rest = 1.0f - a;
    return 1.0f / (rest > 1e-3f ? rest : 1e-3f);
}

/* gain += g.e for each label set, e = a / max(1-a, 1e-3) (o - v). */
static void add_gains(const pass *w, int kv, int head, int32_t from, int32_t to, int worker) {
    const float *s = step_streams(w, head, from, to, w->n_sets, worker);
    float *d = w->deviation + (size_t)worker * (size_t)w->n_streams_most * w->stride;
    for (int32_t r = from; r < to; r++) {
        const float *a = row_of(w, head, r), *stream[w->n_sets];
        estimate_row row;
        for (int k = 0; k < w->n_sets; k++) stream[k] = s + ((size_t)k * LAYER_ROWS + (size_t)(r - from)) * w->stride;
        estimate_prepare(a, w->row0 + r, stream, w->n_sets, w->stride, d, &row);
        for (int k = 0; k < w->n_sets; k++) {
            float *gain = gain_row(w, kv, k, r);
            for (int32_t i = 0; i <= row.t; i++) gain[i] += d[(size_t)k * w->stride + (size_t)i] * over(a[i]);
        }
    }
}

/* out += |e|. */
static void add_norms(const pass *w, int kv, int head, int32_t from, int32_t to) {
    size_t dim = (size_t)w->m->head_dim;
    const float *v = trace_layer_v(w->attention, kv);
    for (int32_t r = from; r < to; r++) {
        const float *a = row_of(w, head, r);
        float *out = out_row(w, kv, r);
        double o[dim];
        memset(o, 0, sizeof o);
        for (int32_t i = 0; i <= w->row0 + r; i++)
            for (size_t c = 0; c < dim; c++) o[c] += (double)a[i] * (double)v[(size_t)i * dim + c];
        for (int32_t i = 0; i <= w->row0 + r; i++) {
            double square = 0;
            for (size_t c = 0; c < dim; c++) {
                double x = o[c] - (double)v[(size_t)i * dim + c];
                square += x * x;
            }
            out[i] += a[i] * over(a[i]) * (float)sqrt(square);
        }
    }
}

/* One kv head, some rows: sums over its query heads. */
static int gather_evidence_task(void *context, size_t index, int worker) {
    pass *w = context;
    int kv = (int)(index / chunks_of(w));
    int32_t from, to;
    chunk_rows(w, index % chunks_of(w), &from, &to);
    size_t bytes = (size_t)(to - from) * w->stride * sizeof(float);
    for (int k = 0; k < w->n_sets; k++) memset(gain_row(w, kv, k, from), 0, bytes);
    if (w->evidence & NEEDS_OUT) memset(out_row(w, kv, from), 0, bytes);
    for (int h = kv * w->group; h < (kv + 1) * w->group; h++) {
        if (w->evidence & (NEEDS_LOSS | NEEDS_FISHER)) add_gains(w, kv, h, from, to, worker);
        if (w->evidence & NEEDS_OUT) add_norms(w, kv, h, from, to);
    }
    return 0;
}

/* The three kinds for one row of a unit that spans kv heads kv0 .. kv1-1. */
static void finish_evidence_row(const pass *w, int kv0, int kv1, int32_t r, float *of_unit) {
    float *out = evidence_row(w, of_unit, 0, r), *loss = evidence_row(w, of_unit, 1, r),
          *fisher = evidence_row(w, of_unit, 2, r);
    int samples = w->n_sets - 1;
    for (int32_t i = 0; i <= w->row0 + r; i++) {
        float norm = 0, gain = 0, squares = 0;
        for (int kv = kv0; kv < kv1 && (w->evidence & NEEDS_OUT); kv++) norm += out_row(w, kv, r)[i];
        for (int kv = kv0; kv < kv1 && w->n_sets > 0; kv++) gain += gain_row(w, kv, 0, r)[i];
        for (int k = 1; k <= samples; k++) {
            float sum = 0;
            for (int kv = kv0; kv < kv1; kv++) sum += gain_row(w, kv, k, r)[i];
            squares += sum * sum;
        }
        out[i] = norm / (float)((kv1 - kv0) * w->group);
        loss[i] = gain;
        fisher[i] = samples > 0 ? 0.5f * squares / (float)samples : 0;
    }
    if (w->row0 + r == 0) out[0] = loss[0] = fisher[0] = 0; /* a = 1: nothing else could be attended to */
}

static int finish_evidence_task(void *context, size_t index, int worker) {
    (void)worker;
    pass *w = context;
    int unit = (int)(index / chunks_of(w)), n_kv = w->m->n_kv_head;
    int32_t from, to;
    chunk_rows(w, index % chunks_of(w), &from, &to);
    for (int32_t r = from; r < to; r++)
        if (unit < n_kv) finish_evidence_row(w, unit, unit + 1, r, evidence_of_head(w, unit));
        else finish_evidence_row(w, 0, n_kv, r, w->evidence_layer);
    return 0;
}

static int compute_evidence(pass *w) {
    if (!w->evidence) return 0;
    TRY(pool_run(w->p, (size_t)w->m->n_kv_head * chunks_of(w), gather_evidence_task, w));
    return pool_run(w->p, full_run_units(w) * chunks_of(w), finish_evidence_task, w);
}

/* ---- hindsight -------------------------------------------------------------------------------------------------- */

/* One unit (number n_kv_head is the layer), some columns of the tile's rows. */
typedef struct columns {
    int unit, h0, h1; /* its query heads */
    int32_t from, to; /* columns */
    float *evidence;  /* of the unit */
} columns;

static size_t column_chunks(const pass *w) {
    return (w->stride + COLUMNS_A_TASK - 1) / COLUMNS_A_TASK;
}

static columns columns_at(const pass *w, size_t index) {
    int unit = (int)(index / column_chunks(w)), n_kv = w->m->n_kv_head;
    bool whole = unit == n_kv;
    columns c = {.unit = unit, .from = (int32_t)(index % column_chunks(w) * COLUMNS_A_TASK)};
    c.to = c.from + COLUMNS_A_TASK < w->n_tokens ? c.from + COLUMNS_A_TASK : w->n_tokens;
    c.h0 = whole ? 0 : unit * w->group;
    c.h1 = whole ? w->m->n_head : c.h0 + w->group;
    if (w->evidence) c.evidence = whole ? w->evidence_layer : evidence_of_head(w, unit);
    return c;
}

/* What row r adds to the sums of the unit's columns: its mean row, or its Fisher evidence. */
static void row_values(const pass *w, const columns *c, bool fisher, int32_t r, double *value) {
    int32_t end = w->row0 + r + 1 < c->to ? w->row0 + r + 1 : c->to;
    memset(value, 0, (size_t)(c->to - c->from) * sizeof *value);
    if (fisher) {
        const float *row = evidence_row(w, c->evidence, 2, r);
        for (int32_t i = c->from; i < end; i++) value[i - c->from] = (double)row[i];
        return;
    }
    for (int h = c->h0; h < c->h1; h++) {
        const float *row = row_of(w, h, r);
        for (int32_t i = c->from; i < end; i++) value[i - c->from] += (double)row[i];
    }
    for (int32_t i = c->from; i < end; i++) value[i - c->from] /= c->h1 - c->h0;
}

static double *sums_of(const pass *w, const future *f, int unit) {
    return unit == w->m->n_kv_head ? f->layer : f->head + (size_t)unit * (size_t)w->n_tokens;
}

static double *after_row(const pass *w, const future *f, int unit, int32_t r) {
    double *of_unit =
        unit == w->m->n_kv_head ? f->after_layer : f->after_head + (size_t)unit * (size_t)w->tile * w->stride;
    return of_unit + (size_t)r * w->stride;
}

/* First pass: sums over the counted rows, in order of step. */
static void add_future(const pass *w, const columns *c, const future *f, bool fisher) {
    double value[COLUMNS_A_TASK], *sum = sums_of(w, f, c->unit) + c->from;
    for (int32_t r = 0; r < w->n_rows && f->wanted; r++) {
        if (!w->counted[w->row0 + r]) continue;
        row_values(w, c, fisher, r, value);
        for (int32_t i = 0; i < c->to - c->from; i++) sum[i] += value[i];
    }
}

/* Second pass: take the rows away again, and keep what is left after each. */
static void spend_future(const pass *w, const columns *c, const future *f, bool fisher) {
    double value[COLUMNS_A_TASK], *sum = sums_of(w, f, c->unit) + c->from;
    size_t bytes = (size_t)(c->to - c->from) * sizeof *sum;
    for (int32_t r = 0; r < w->n_rows && f->wanted; r++) {
        if (w->counted[w->row0 + r]) {
            row_values(w, c, fisher, r, value);
            for (int32_t i = 0; i < c->to - c->from; i++) sum[i] -= value[i];
        }
        memcpy(after_row(w, f, c->unit, r) + c->from, sum, bytes);
    }
}

static int add_future_task(void *context, size_t index, int worker) {
    (void)worker;
    pass *w = context;
    columns c = columns_at(w, index);
    add_future(w, &c, &w->mass, false);
    add_future(w, &c, &w->fisher, true);
    return 0;
}

static int spend_future_task(void *context, size_t index, int worker) {
    (void)worker;
    pass *w = context;
    columns c = columns_at(w, index);
    spend_future(w, &c, &w->mass, false);
    spend_future(w, &c, &w->fisher, true);
    return 0;
}

static int each_column(pass *w, pool_task work) {
    if (!w->mass.wanted && !w->fisher.wanted) return 0;
    return pool_run(w->p, full_run_units(w) * column_chunks(w), work, w);
}

static void clear_future(const pass *w, const future *f) {
    size_t bytes = (size_t)w->n_tokens * sizeof(double);
    if (!f->wanted) return;
    memset(f->head, 0, (size_t)w->m->n_kv_head * bytes);
    memset(f->layer, 0, bytes);
}

/* First pass over a layer: column sums, over the counted steps, of the mean row and of the Fisher evidence. */
static int sum_future(pass *w) {
    clear_future(w, &w->mass);
    clear_future(w, &w->fisher);
    for (int32_t row0 = 0; row0 < w->n_tokens; row0 += w->tile) {
        TRY(read_tile(w, row0));
        if (w->fisher.wanted) TRY(compute_evidence(w));
        TRY(each_column(w, add_future_task));
    }
    return 0;
}

/* ---- replay ----------------------------------------------------------------------------------------------------- */

/* What the full run knows of a row, for policies that look at it. */
static void offer(const pass *w, run *r, int unit, int32_t row) {
    int place = r->c->unit_layer ? w->m->n_kv_head : unit;
    const future *f = r->c->setup.needs & NEEDS_FISHER ? &w->fisher : &w->mass;
    const float *evidence[3] = {NULL};
    if (w->evidence) {
        float *of_unit = r->c->unit_layer ? w->evidence_layer : evidence_of_head(w, unit);
        for (int kind = 0; kind < 3; kind++) evidence[kind] = evidence_row(w, of_unit, kind, row);
    }
    replay_offer(r->replay[unit], evidence[0], evidence[1], evidence[2],
                 f->wanted ? after_row(w, f, place, row) : NULL);
}

/* One row for one unit of a configuration. */
static void replay_row(pass *w, const task *k, int32_t row) {
    run *r = k->r;
    bool whole = r->c->unit_layer;
    int n = whole ? w->m->n_head : w->group, h0 = whole ? 0 : k->unit * w->group;
    const float *heads[n];
    for (int h = 0; h < n; h++) heads[h] = row_of(w, h0 + h, row);
    if (r->c->setup.needs & (NEEDS_FUTURE | NEEDS_OUT | NEEDS_LOSS | NEEDS_FISHER)) offer(w, r, k->unit, row);
    replay_step(r->replay[k->unit], w->row0 + row, heads, &w->facts[w->row0 + row]);
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
        replay_range(k->r->replay[k->unit], &k->r->first_missing[k->unit], &k->r->left_end[k->unit]);
    return 0;
}

/* Lifetimes that were handed in, for the current layer. */
static void load_given(pass *w, run *r) {
    for (int u = 0; u < r->n_units; u++) {
        const int32_t *from = r->given + ((size_t)w->layer * (size_t)w->m->n_kv_head + (size_t)u) * (size_t)w->n_tokens;
        int32_t *to = r->evict_at + (size_t)u * w->stride;
        r->first_missing[u] = w->n_tokens + 1;
        r->left_end[u] = 0;
        for (size_t i = 0; i < w->stride; i++) to[i] = w->n_tokens + 1;
        for (int32_t i = 0; i < w->n_tokens; i++) {
            to[i] = from[i];
            if (from[i] < r->first_missing[u]) r->first_missing[u] = from[i];
            if (from[i] <= w->n_tokens) r->left_end[u] = i + 1;
        }
    }
}

static void begin_run(pass *w, run *r) {
    if (r->is_given) {
        load_given(w, r);
        return;
    }
    for (int u = 0; u < r->n_units; u++) {
        bool whole = r->c->unit_layer;
        replay_unit unit = {
            .sequence = (int32_t)w->seq,
            .layer = w->layer,
            .kv_head = whole ? 0 : u,
            .window = w->m->window[w->layer],
            .n_head = whole ? w->m->n_head : w->group,
        };
        replay_begin(r->replay[u], &unit, r->evict_at + (size_t)u * w->stride);
    }
}

/* ---- pricing ---------------------------------------------------------------------------------------------------- */

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

/* ---- the layer -------------------------------------------------------------------------------------------------- */

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

static int pack_values_task(void *context, size_t kv, int worker) {
    (void)worker;
    const pass *w = context;
    size_t dim = (size_t)w->m->head_dim;
    kernels()->pack_keys(trace_layer_v(w->attention, (int)kv), (size_t)w->n_tokens, dim,
                         w->values + kv * w->stride * dim);
    return 0;
}

static int open_streams(pass *w) {
    if (w->n_sets) TRY(pool_run(w->p, (size_t)w->m->n_kv_head, pack_values_task, w));
    if (!w->o->out_err) return 0;
    TRY(trace_read_wo(w->t, w->layer, w->wo));
    if (w->o->out_err_exact) return estimate_value_streams(w->m, w->attention, w->n_tokens, &w->streams);
    return estimate_probe_streams(w->m, w->layer, w->attention, w->n_tokens, w->wo, &w->streams);
}

int layer_work(pass *w, double progress) {
    TRY(open_streams(w));
    if (w->mass.wanted || w->fisher.wanted) TRY(sum_future(w));
    for (size_t i = 0; i < w->n_runs; i++) begin_run(w, &w->runs[i]);
    for (int32_t row0 = 0; row0 < w->n_tokens; row0 += w->tile) {
        TRY(read_tile(w, row0));
        TRY(compute_evidence(w));
        TRY(each_column(w, spend_future_task));
        TRY(pool_run(w->p, (w->n_tasks + REPLAYS_A_TASK - 1) / REPLAYS_A_TASK, replay_task, w));
        TRY(pool_run(w->p, 1 + (size_t)w->m->n_kv_head * chunks_of(w), estimate_task, w));
        TRY(pool_run(w->p, w->n_runs, add_task, w));
        progress_at(progress + (double)(row0 + w->n_rows));
    }
    return pool_run(w->p, w->n_runs, finish_task, w);
}
