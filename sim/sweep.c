#include "sim/sweep.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/progress.h"
#include "sim/estimate.h"
#include "sim/replay.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

enum { TILE_MOST = 64, TILE_LEAST = 8, TILE_BYTES = 8 << 20, ROWS_A_TASK = 8, COLUMNS_A_TASK = 256 };

/* One configuration in flight. */
typedef struct run {
    const sim_config *c;
    sweep_result *out;
    bool is_given;
    int32_t *given;                    /* [n_layer][n_kv_head][T] lifetimes to price, where is_given */
    int n_units;                       /* units in a layer: n_kv_head or 1 */
    replay **replay;                   /* [n_units] */
    int32_t *evict_at;                 /* [n_units][stride] of the current layer */
    int32_t *first_missing, *left_end; /* [n_units] see replay_range */
    double *sums;                      /* [tile][n_head][1 + n_streams] of the current tile */
    double *head_lost;                 /* [n_layer][n_head] */
    atomic_llong floored;
    double out_err; /* sum over layers and counted steps */
} run;

typedef struct task {
    run *r;
    int unit;
} task;

/* Everything one pass over a sequence holds. */
typedef struct pass {
    trace *t;
    size_t seq;
    const trace_model *m;
    const trace_sequence *s;
    const sweep_options *o;
    pool *p;
    int32_t n_tokens, n_prompt;
    size_t stride; /* of rows and lifetimes: T padded */
    int tile, group, n_streams;
    bool future; /* some policy needs the full run's future */

    run *runs;
    size_t n_runs;
    task *tasks; /* replays of a layer, those of one kv head together */
    size_t n_tasks;

    uint8_t *counted;     /* [T] */
    uint8_t *block;       /* [T] block of each step from n_prompt on */
    replay_facts *facts;  /* [T] */
    float *rows;          /* [n_head][tile][stride] */
    float *wo;            /* [n_head*head_dim][n_embd] */
    double *future_head;  /* [n_kv_head][T] */
    double *future_layer; /* [T] */
    float *deviation;     /* [threads][n_streams][stride] */
    double *embd;         /* [threads][n_embd] exact output error */
    int32_t *scratch;     /* [threads][T+2] */

    /* The layer being worked on. */
    int layer;
    trace_layer *attention;
    estimate_streams streams;
    int32_t row0, n_rows;
} pass;

/* ---- what is asked of the trace -----------------------------------------------------------------------------------
 */

int sweep_check_sequence(const trace *t, size_t seq, int32_t n_prompt, const sweep_options *options) {
    const trace_sequence *s = trace_get_sequence(t, seq);
    const char *name = trace_path(t);
    int32_t counted = 0;
    if (options->form == TRACE_DENSE && !s->has_dense) return err_set(ERR_DATA, "%s: trace has no attn/probs", name);
    if (options->form == TRACE_FACTORED && !s->has_factored)
        return err_set(ERR_DATA, "%s: trace has no attn/q and attn/k", name);
    if (!s->has_dense && !s->has_factored) return err_set(ERR_DATA, "%s: trace has no attention", name);
    if (options->out_err && !s->has_v) return err_set(ERR_DATA, "%s: trace has no attn/v, which out_err needs", name);
    if (options->out_err && !trace_has_wo(t))
        return err_set(ERR_DATA, "%s: trace has no model/wo, which out_err needs", name);
    for (int32_t step = n_prompt; step < s->n_tokens - 1; step++) counted += !s->counted || s->counted[step];
    if (!counted)
        return err_set(ERR_DATA, "%s: no counted step in sequence %zu (%d tokens, prompt %d)", name, seq, s->n_tokens,
                       n_prompt);
    return 0;
}

int sweep_check_policy(const trace *t, size_t seq, const sim_config *config) {
    const trace_sequence *s = trace_get_sequence(t, seq);
    if ((config->setup.needs & NEEDS_CORRECT) && !s->correct)
        return err_set(ERR_DATA, "%s: trace has no logits/correct, which %s needs", trace_path(t), config->spec);
    if ((config->setup.needs & NEEDS_CONFIDENCE) && !s->target_logprob)
        return err_set(ERR_DATA, "%s: trace has no logits/target_logprob, which %s needs", trace_path(t), config->spec);
    return 0;
}

/* ---- memory -------------------------------------------------------------------------------------------------------
 */

static int units_of(const pass *w, const sim_config *c) {
    return c->unit_layer ? 1 : w->m->n_kv_head;
}

static size_t lifetimes_cells(const pass *w) {
    return (size_t)w->m->n_layer * (size_t)w->m->n_kv_head * (size_t)w->n_tokens;
}

/* Carve a run's arrays out of `block` (NULL: only count). */
static size_t carve_run(const pass *w, run *r, void *block) {
    mem_carver m = {.base = block};
    size_t units = (size_t)r->n_units, heads = (size_t)w->m->n_head;
    r->replay = mem_carve(&m, units, sizeof *r->replay);
    r->evict_at = mem_carve(&m, units * w->stride, sizeof *r->evict_at);
    r->first_missing = mem_carve(&m, units, sizeof *r->first_missing);
    r->left_end = mem_carve(&m, units, sizeof *r->left_end);
    r->sums = mem_carve(&m, (size_t)w->tile * heads * (size_t)(1 + w->n_streams), sizeof *r->sums);
    r->head_lost = mem_carve(&m, (size_t)w->m->n_layer * heads, sizeof *r->head_lost);
    r->given = mem_carve(&m, r->is_given ? lifetimes_cells(w) : 0, sizeof *r->given);
    return m.used;
}

static size_t run_bytes(const pass *w, const sim_config *c, bool given) {
    run r = {.n_units = given ? w->m->n_kv_head : units_of(w, c), .is_given = given};
    size_t bytes = carve_run(w, &r, NULL);
    if (!given) bytes += (size_t)r.n_units * replay_bytes(c, w->n_tokens);
    return bytes + (w->o->keep_lifetimes ? lifetimes_cells(w) * sizeof(int32_t) : 0);
}

static void choose_tile(pass *w) {
    size_t row = (size_t)w->m->n_head * w->stride * sizeof(float), rows = TILE_BYTES / row;
    w->tile = rows > TILE_MOST ? TILE_MOST : rows < TILE_LEAST ? TILE_LEAST : (int)(rows / 8 * 8);
}

/* Carve what all runs share (NULL: only count). */
static size_t carve_pass(pass *w, void *block) {
    mem_carver m = {.base = block};
    size_t tokens = (size_t)w->n_tokens, threads = (size_t)pool_threads(w->p), heads = (size_t)w->m->n_head;
    w->counted = mem_carve(&m, tokens, 1);
    w->block = mem_carve(&m, tokens, 1);
    w->facts = mem_carve(&m, tokens, sizeof *w->facts);
    w->rows = mem_carve(&m, heads * (size_t)w->tile * w->stride, sizeof *w->rows);
    w->future_head = mem_carve(&m, w->future ? (size_t)w->m->n_kv_head * tokens : 0, sizeof *w->future_head);
    w->future_layer = mem_carve(&m, w->future ? tokens : 0, sizeof *w->future_layer);
    w->deviation = mem_carve(&m, threads * (size_t)w->n_streams * w->stride, sizeof *w->deviation);
    w->scratch = mem_carve(&m, threads * (tokens + 2), sizeof *w->scratch);
    size_t embd = w->o->out_err ? (size_t)w->m->n_embd : 0;
    w->wo = mem_carve(&m, heads * (size_t)w->m->head_dim * embd, sizeof *w->wo);
    w->embd = mem_carve(&m, threads * embd, sizeof *w->embd);
    return m.used;
}

/* ---- setting up ---------------------------------------------------------------------------------------------------
 */

static void fill_facts(pass *w) {
    const trace_sequence *s = w->s;
    int64_t steps = (int64_t)w->n_tokens - 1 - w->n_prompt;
    for (int32_t t = 0; t < w->n_tokens; t++) {
        bool last = t == w->n_tokens - 1; /* nothing follows to be predicted: it counts as wrong */
        w->counted[t] = !last && t >= w->n_prompt && (!s->counted || s->counted[t]);
        w->facts[t].correct = !last && s->correct && s->correct[t];
        w->facts[t].confidence = !last && s->target_logprob ? exp((double)s->target_logprob[t]) : 0;
        w->facts[t].counted = w->counted[t];
    }
    for (int b = 0; b < BLOCKS_PER_ROW; b++) {
        int64_t from = b * steps / BLOCKS_PER_ROW, to = (b + 1) * steps / BLOCKS_PER_ROW;
        for (int64_t u = from; u < to; u++) w->block[w->n_prompt + u] = (uint8_t)b;
    }
}

static int start_run(pass *w, run *r) {
    size_t bytes = carve_run(w, r, NULL);
    void *block = mem_new(bytes, 1, "configuration");
    if (!block) {
        r->replay = NULL;
        return ERR_DATA;
    }
    carve_run(w, r, block);
    for (int u = 0; u < r->n_units && !r->is_given; u++) TRY(replay_new(r->c, w->n_tokens, &r->replay[u]));
    sweep_result *out = r->out;
    *out = (sweep_result){0};
    if (w->o->keep_lifetimes) {
        out->evict_at = mem_new(lifetimes_cells(w), sizeof *out->evict_at, "lifetimes");
        if (!out->evict_at) return ERR_DATA;
    }
    size_t cells = (size_t)w->m->n_layer * (size_t)w->m->n_head;
    out->head_lost_mass = mem_new(cells, sizeof *out->head_lost_mass, "results");
    return out->head_lost_mass ? 0 : ERR_DATA;
}

static void end_run(run *r) {
    if (!r->replay) return;
    for (int u = 0; u < r->n_units; u++) replay_free(r->replay[u]);
    mem_free(r->replay); /* the block begins with it */
}

/* Replays of one kv head stand together, so that its rows stay in cache while the configurations pass. */
static void list_tasks(pass *w) {
    w->n_tasks = 0;
    for (int unit = 0; unit < w->m->n_kv_head; unit++)
        for (size_t i = 0; i < w->n_runs; i++)
            if (unit < w->runs[i].n_units && !w->runs[i].is_given) w->tasks[w->n_tasks++] = (task){&w->runs[i], unit};
}

/* ---- a tile -------------------------------------------------------------------------------------------------------
 */

static const float *row_of(const pass *w, int head, int32_t r) {
    return w->rows + ((size_t)head * (size_t)w->n_rows + (size_t)r) * w->stride;
}

static int replay_task(void *context, size_t index, int worker) {
    (void)worker;
    pass *w = context;
    run *r = w->tasks[index].r;
    int unit = w->tasks[index].unit, n = r->c->unit_layer ? w->m->n_head : w->group;
    int h0 = r->c->unit_layer ? 0 : unit * w->group;
    const float *heads[n];
    for (int32_t row = 0; row < w->n_rows; row++) {
        for (int h = 0; h < n; h++) heads[h] = row_of(w, h0 + h, row);
        replay_step(r->replay[unit], w->row0 + row, heads, &w->facts[w->row0 + row]);
    }
    replay_range(r->replay[unit], &r->first_missing[unit], &r->left_end[unit]);
    return 0;
}

static size_t chunks_of(const pass *w) {
    return ((size_t)w->n_rows + ROWS_A_TASK - 1) / ROWS_A_TASK;
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

/* One kv head, some rows of the tile: each row is prepared once and priced for every configuration. */
static int estimate_task(void *context, size_t index, int worker) {
    pass *w = context;
    size_t chunks = chunks_of(w);
    int kv = (int)(index / chunks);
    int32_t from = (int32_t)(index % chunks) * ROWS_A_TASK, to = from + ROWS_A_TASK;
    float *d = w->deviation + (size_t)worker * (size_t)w->n_streams * w->stride;
    for (int32_t r = from; r < to && r < w->n_rows; r++) {
        int32_t t = w->row0 + r;
        if (!w->counted[t]) continue;
        for (int h = kv * w->group; h < (kv + 1) * w->group; h++) {
            estimate_row row;
            const float *s = w->n_streams ? w->streams.s + (size_t)h * (size_t)w->n_streams * w->stride : NULL;
            estimate_prepare(row_of(w, h, r), t, s, w->n_streams, w->stride, d, &row);
            for (size_t i = 0; i < w->n_runs; i++)
                estimate_one(w, &w->runs[i], kv, &row,
                             w->runs[i].sums +
                                 ((size_t)r * (size_t)w->m->n_head + (size_t)h) * (size_t)(1 + w->n_streams));
        }
    }
    return 0;
}

/* |Wo delta| of a layer at one step, from the heads' sums. */
static double output_error(const pass *w, const double *sums, int worker) {
    size_t step = (size_t)(1 + w->n_streams);
    double total = 0;
    if (!w->o->out_err_exact) {
        for (int k = 0; k < w->n_streams; k++) {
            double y = 0;
            for (int h = 0; h < w->m->n_head; h++) y += sums[(size_t)h * step + 1 + (size_t)k];
            total += y * y;
        }
        return sqrt(total / w->n_streams) / ESTIMATE_PROBE_MEAN;
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

/* Add a tile's sums to one configuration's totals, in order of step and head. */
static int add_task(void *context, size_t index, int worker) {
    pass *w = context;
    run *r = &w->runs[index];
    size_t step = (size_t)(1 + w->n_streams), heads = (size_t)w->m->n_head;
    for (int32_t row = 0; row < w->n_rows; row++) {
        int32_t t = w->row0 + row;
        if (!w->counted[t]) continue;
        const double *sums = r->sums + (size_t)row * heads * step;
        double lost = 0;
        for (size_t h = 0; h < heads; h++) {
            lost += sums[h * step];
            r->head_lost[(size_t)w->layer * heads + h] += sums[h * step];
        }
        r->out->block_lost_mass[w->block[t]] += lost;
        if (w->o->out_err && lost != 0) r->out_err += output_error(w, sums, worker);
    }
    return 0;
}

/* ---- a layer ------------------------------------------------------------------------------------------------------
 */

static int read_tile(pass *w, int32_t row0) {
    w->row0 = row0;
    w->n_rows = w->n_tokens - row0 < w->tile ? w->n_tokens - row0 : w->tile;
    return trace_layer_rows(w->attention, row0, w->n_rows, w->rows, w->stride, w->p);
}

/* One kv head, some columns: sums in order of step and head. */
static int future_task(void *context, size_t index, int worker) {
    (void)worker;
    pass *w = context;
    size_t chunks = (w->stride + COLUMNS_A_TASK - 1) / COLUMNS_A_TASK, kv = index / chunks;
    int32_t from = (int32_t)(index % chunks * COLUMNS_A_TASK), end = from + COLUMNS_A_TASK;
    double *total = w->future_head + kv * (size_t)w->n_tokens;
    for (int32_t r = 0; r < w->n_rows; r++) {
        int32_t t = w->row0 + r, to = t + 1 < end ? t + 1 : end;
        if (!w->counted[t]) continue;
        for (int h = (int)kv * w->group; h < ((int)kv + 1) * w->group; h++) {
            const float *a = row_of(w, h, r);
            for (int32_t i = from; i < to; i++) total[i] += (double)a[i];
        }
    }
    return 0;
}

/* First pass over a layer, for hindsight: column sums of the mean row over the counted steps. */
static int sum_future(pass *w) {
    size_t n = (size_t)w->n_tokens, n_kv = (size_t)w->m->n_kv_head;
    memset(w->future_head, 0, n_kv * n * sizeof *w->future_head);
    for (int32_t row0 = 0; row0 < w->n_tokens; row0 += w->tile) {
        TRY(read_tile(w, row0));
        TRY(pool_run(w->p, n_kv * ((w->stride + COLUMNS_A_TASK - 1) / COLUMNS_A_TASK), future_task, w));
    }
    for (size_t i = 0; i < n; i++) {
        w->future_layer[i] = 0;
        for (size_t kv = 0; kv < n_kv; kv++) {
            w->future_layer[i] += w->future_head[kv * n + i];
            w->future_head[kv * n + i] /= w->group;
        }
        w->future_layer[i] /= w->m->n_head;
    }
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

static void begin_layer(pass *w, run *r) {
    if (r->is_given) {
        load_given(w, r);
        return;
    }
    for (int u = 0; u < r->n_units; u++) {
        bool whole = r->c->unit_layer;
        const double *future = whole ? w->future_layer : w->future_head + (size_t)u * (size_t)w->n_tokens;
        replay_unit unit = {
            .sequence = (int32_t)w->seq,
            .layer = w->layer,
            .kv_head = whole ? 0 : u,
            .window = w->m->window[w->layer],
            .n_head = whole ? w->m->n_head : w->group,
            .future_total = r->c->setup.needs & NEEDS_FUTURE ? future : NULL,
        };
        replay_begin(r->replay[u], &unit, r->evict_at + (size_t)u * w->stride);
    }
}

/* Footprint and lifetimes of the finished layer. */
static int finish_layer_task(void *context, size_t index, int worker) {
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

static int open_streams(pass *w) {
    if (!w->o->out_err) return 0;
    TRY(trace_read_wo(w->t, w->layer, w->wo));
    if (w->o->out_err_exact) return estimate_value_streams(w->m, w->attention, w->n_tokens, &w->streams);
    return estimate_probe_streams(w->m, w->layer, w->attention, w->n_tokens, w->wo, &w->streams);
}

static int work_layer(pass *w, double progress) {
    TRY(open_streams(w));
    if (w->future) TRY(sum_future(w));
    for (size_t i = 0; i < w->n_runs; i++) begin_layer(w, &w->runs[i]);
    for (int32_t row0 = 0; row0 < w->n_tokens; row0 += w->tile) {
        TRY(read_tile(w, row0));
        TRY(pool_run(w->p, w->n_tasks, replay_task, w));
        TRY(pool_run(w->p, (size_t)w->m->n_kv_head * chunks_of(w), estimate_task, w));
        TRY(pool_run(w->p, w->n_runs, add_task, w));
        progress_at(progress + (double)(row0 + w->n_rows));
    }
    return pool_run(w->p, w->n_runs, finish_layer_task, w);
}

/* ---- a pass -------------------------------------------------------------------------------------------------------
 */

static void finish_run(pass *w, run *r) {
    size_t heads = (size_t)w->m->n_head, layers = (size_t)w->m->n_layer;
    sweep_result *out = r->out;
    double lost = 0;
    for (int32_t t = 0; t < w->n_tokens; t++)
        if (w->counted[t]) {
            out->block_steps[w->block[t]]++;
            out->n_counted++;
        }
    for (int b = 0; b < BLOCKS_PER_ROW; b++) {
        out->block_lost_mass[b] /= (double)(layers * heads);
        lost += out->block_lost_mass[b];
    }
    double n = (double)out->n_counted;
    out->lost_mass = lost / n;
    out->out_err = r->out_err / (n * (double)layers);
    for (size_t k = 0; k < layers * heads; k++) out->head_lost_mass[k] = (float)(r->head_lost[k] / n);
    out->floored = atomic_load(&r->floored);
}

static int work_layers(pass *w, double progress) {
    list_tasks(w);
    for (w->layer = 0; w->layer < w->m->n_layer; w->layer++) {
        int code = trace_layer_open(w->t, w->seq, w->layer, w->o->form, w->p, &w->attention);
        if (!code) code = work_layer(w, progress + (double)w->layer * w->n_tokens);
        estimate_streams_free(&w->streams);
        trace_layer_close(w->attention);
        w->attention = NULL;
        TRY(code);
    }
    for (size_t i = 0; i < w->n_runs; i++) finish_run(w, &w->runs[i]);
    return 0;
}

static int hand_over(pass *w, size_t from) {
    for (size_t i = 0; i < w->n_runs && w->o->done; i++) {
        TRY(w->o->done(w->o->context, from + i, w->runs[i].out));
        mem_free(w->runs[i].out->evict_at);
        w->runs[i].out->evict_at = NULL;
    }
    return 0;
}

/* Runs from .. from+n-1 of the whole list. */
static int run_pass(pass *w, const sim_config *configs, const sweep_given *given, sweep_result *results, size_t from,
                    size_t n, double progress) {
    w->n_runs = n;
    w->runs = mem_new(n, sizeof *w->runs, "configurations");
    w->tasks = mem_new(n * (size_t)w->m->n_kv_head, sizeof *w->tasks, "configurations");
    int code = w->runs && w->tasks ? 0 : ERR_DATA;
    for (size_t i = 0; i < n && !code; i++) {
        const sim_config *c = &configs[from + i];
        w->runs[i] = (run){.c = c, .out = &results[from + i], .is_given = given != NULL};
        w->runs[i].n_units = given ? w->m->n_kv_head : units_of(w, c);
        code = start_run(w, &w->runs[i]);
        if (!code && given) code = given->read(given->context, from + i, w->runs[i].given);
    }
    if (!code) code = work_layers(w, progress);
    if (!code) code = hand_over(w, from);
    for (size_t i = 0; i < n && w->runs; i++) end_run(&w->runs[i]);
    mem_free(w->runs);
    mem_free(w->tasks);
    return code;
}

/* How many configurations from `from` on fit beside the fixed part; at least one, or 0 if not even that. */
static size_t fit(const pass *w, const sim_config *configs, size_t n, size_t from, bool given, size_t fixed,
                  sweep_cost *cost) {
    size_t used = fixed, k = 0;
    for (; from + k < n; k++) {
        size_t bytes = run_bytes(w, &configs[from + k], given);
        if (bytes > cost->per_config) cost->per_config = bytes;
        if (used + bytes > w->o->memory) break;
        used += bytes;
    }
    if (used > cost->planned) cost->planned = used;
    return k;
}

static int plan_and_run(pass *w, const sim_config *configs, size_t n, const sweep_given *given, sweep_result *results,
                        sweep_cost *cost) {
    double rows = (double)w->m->n_layer * w->n_tokens, done = 0;
    for (size_t from = 0; from < n; cost->passes++) {
        size_t k = fit(w, configs, n, from, given != NULL, cost->fixed, cost);
        if (k == 0)
            return err_set(ERR_USAGE, "--memory: %zu MiB are not enough for one configuration (%zu MiB needed)",
                           w->o->memory >> 20, (cost->fixed + cost->per_config + (1 << 20) - 1) >> 20);
        TRY(run_pass(w, configs, given, results, from, k, done));
        from += k;
        done += rows * (double)k / (double)n;
    }
    return 0;
}

int sweep_sequence(trace *t, size_t seq, const sim_config *configs, size_t n, const sweep_given *given,
                   const sweep_options *options, pool *p, sweep_result *results, sweep_cost *cost) {
    const trace_model *m = trace_get_model(t);
    const trace_sequence *s = trace_get_sequence(t, seq);
    memset(results, 0, n * sizeof *results);
    *cost = (sweep_cost){0};
    TRY(sweep_check_sequence(t, seq, configs[0].n_prompt, options));
    for (size_t i = 0; i < n; i++) TRY(sweep_check_policy(t, seq, &configs[i]));
    pass w = {.t = t, .seq = seq, .m = m, .s = s, .o = options, .p = p, .n_tokens = s->n_tokens};
    w.n_prompt = configs[0].n_prompt;
    w.stride = kernel_pad((size_t)s->n_tokens);
    w.group = m->n_head / m->n_kv_head;
    w.n_streams = !options->out_err ? 0 : options->out_err_exact ? m->head_dim : ESTIMATE_PROBES;
    for (size_t i = 0; i < n; i++) w.future |= (configs[i].setup.needs & NEEDS_FUTURE) != 0;
    choose_tile(&w);
    size_t bytes = carve_pass(&w, NULL), streams = (size_t)m->n_head * (size_t)w.n_streams * w.stride * sizeof(float);
    cost->fixed = bytes + streams + trace_layer_bytes(t, seq, options->form);
    void *block = mem_new(bytes, 1, "sweep");
    if (!block) return ERR_DATA;
    carve_pass(&w, block);
    fill_facts(&w);
    progress_begin("sim", "rows", (double)m->n_layer * s->n_tokens);
    int code = plan_and_run(&w, configs, n, given, results, cost);
    progress_end();
    mem_free(block);
    return code;
}

void sweep_result_free(sweep_result *r) {
    mem_free(r->head_lost_mass);
    mem_free(r->evict_at);
    *r = (sweep_result){0};
}
