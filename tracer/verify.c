#include "tracer/verify.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/progress.h"
#include "sim/replay.h"
#include "traces/kernels.h"

#include <math.h>
#include <string.h>

enum { TILE_ROWS = 256, TILE_BYTES = 64 << 20 };
#define BATCH_BYTES ((size_t)256 << 20) /* hidden states kept between the passes and the logits */
#define CLOSED_BYTES ((size_t)1 << 30)  /* rows and caches of the configurations that advance together */

/* ---- counted steps ---------------------------------------------------------------------------------------------- */

static bool is_counted(const verify_text *x, int32_t t) {
    return t >= x->n_prompt && t < x->n_tokens - 1 && (!x->counted || x->counted[t]);
}

/* Does an answer, a run of consecutive counted steps, begin at t? */
static bool begins(const verify_text *x, int32_t t) {
    return is_counted(x, t) && (t == 0 || !is_counted(x, t - 1));
}

static int32_t count(const verify_text *x) {
    int32_t n = 0;
    for (int32_t t = 0; t < x->n_tokens; t++) n += is_counted(x, t);
    return n;
}

static int check_counted(const verify_text *x) {
    if (count(x)) return 0;
    return err_set(ERR_DATA, "no counted step in sequence %d (%d tokens, prompt %d)", x->sequence, x->n_tokens,
                   x->n_prompt);
}

static int check_finite(const verify_text *x, double lse, int32_t t) {
    if (isfinite(lse)) return 0;
    return err_set(ERR_DATA, "non-finite logits at layer %d (output), token %d", x->model->n_layer, t);
}

/* Take a counted step of the full run into its summary. */
static void add_full(const verify_text *x, int32_t t, const float *logits, double lse, verify_full *full) {
    double logprob = (double)logits[x->tokens[t + 1]] - lse;
    full->nll -= logprob;
    full->n_counted++;
    if (!x->target_logprob) return;
    double differs = fabs(logprob - (double)x->target_logprob[t]);
    if (!(differs <= full->differs)) full->differs = differs;
}

/* ---- open loop -------------------------------------------------------------------------------------------------- */

/* Configurations first .. first+n-1 of all, in one batch. */
typedef struct open_pass {
    const verify_text *x;
    verify_full *full;
    int32_t *step; /* [n_counted] counted steps, ascending */
    size_t n_counted, ld, ld_logits, tile_rows, batch;
    float *hidden;                   /* [1 + batch][n_counted][ld] of the full run, then of the batch */
    float *to;                       /* where the running pass puts its own */
    int32_t *lifetimes;              /* [n_layer][n_kv_head][pad(T)] of the running pass */
    float *full_logits, *p, *logits; /* [tile_rows][ld_logits] */
    truth_full *base;                /* [tile_rows] */
    truth_step *steps;               /* [batch][n_counted] */
    size_t row0;                     /* current tile, counted steps */
    truth_step *steps_of;            /* of the configuration being compared */
    void *block;
} open_pass;

static void carve_open(open_pass *o, mem_carver *c) {
    const model *m = o->x->model;
    size_t units = (size_t)m->n_layer * (size_t)m->n_kv_head, tile = o->tile_rows * o->ld_logits;
    o->step = mem_carve(c, o->n_counted, sizeof *o->step);
    o->hidden = mem_carve(c, (1 + o->batch) * o->n_counted * o->ld, sizeof *o->hidden);
    o->lifetimes = mem_carve(c, units * kernel_pad((size_t)o->x->n_tokens), sizeof *o->lifetimes);
    o->full_logits = mem_carve(c, tile, sizeof *o->full_logits);
    o->p = mem_carve(c, tile, sizeof *o->p);
    o->logits = mem_carve(c, tile, sizeof *o->logits);
    o->base = mem_carve(c, o->tile_rows, sizeof *o->base);
    o->steps = mem_carve(c, o->batch * o->n_counted, sizeof *o->steps);
}

static int open_begin(const verify_text *x, size_t n, verify_full *full, open_pass *o) {
    const model *m = x->model;
    *o = (open_pass){.x = x, .full = full, .n_counted = (size_t)count(x)};
    o->ld = kernel_pad((size_t)m->n_embd);
    o->ld_logits = kernel_pad((size_t)m->n_vocab);
    size_t rows = TILE_BYTES / (o->ld_logits * sizeof(float)), each = o->n_counted * o->ld * sizeof(float);
    o->tile_rows = rows > TILE_ROWS ? TILE_ROWS : rows ? rows : 1;
    o->batch = BATCH_BYTES / each ? BATCH_BYTES / each : 1;
    if (o->batch > n) o->batch = n;
    mem_carver size = {0};
    carve_open(o, &size);
    o->block = mem_new(size.used, 1, "verify");
    if (!o->block) return ERR_DATA;
    mem_carver c = {.base = o->block};
    carve_open(o, &c);
    size_t k = 0;
    for (int32_t t = 0; t < x->n_tokens; t++)
        if (is_counted(x, t)) o->step[k++] = t;
    return 0;
}

static int keep_hidden(void *context, const float *hidden, size_t stride) {
    open_pass *o = context;
    for (size_t i = 0; i < o->n_counted; i++)
        memcpy(o->to + i * o->ld, hidden + (size_t)o->step[i] * stride, (size_t)o->x->model->n_embd * sizeof *o->to);
    return 0;
}

/* One forward pass; `evict_at` NULL: the full cache. */
static int run_masked(open_pass *o, const int32_t *evict_at, float *to) {
    const verify_text *x = o->x;
    size_t T = (size_t)x->n_tokens, padded = kernel_pad(T);
    size_t units = (size_t)x->model->n_layer * (size_t)x->model->n_kv_head;
    for (size_t u = 0; u < units && evict_at; u++) {
        for (size_t i = T; i < padded; i++) o->lifetimes[u * padded + i] = x->n_tokens + 1;
        memcpy(o->lifetimes + u * padded, evict_at + u * T, T * sizeof *evict_at);
    }
    forward_sink sink = {.context = o, .hidden = keep_hidden};
    o->to = to;
    return x->backend->forward(x->state, x->tokens, x->n_tokens, evict_at ? o->lifetimes : NULL, &sink);
}

static int full_row(void *context, size_t row, int worker) {
    (void)worker;
    open_pass *o = context;
    truth_of_full(o->full_logits + row * o->ld_logits, (size_t)o->x->model->n_vocab, o->p + row * o->ld_logits,
                  &o->base[row]);
    return check_finite(o->x, o->base[row].lse, o->step[o->row0 + row]);
}

static int compare_row(void *context, size_t row, int worker) {
    (void)worker;
    open_pass *o = context;
    size_t n_vocab = (size_t)o->x->model->n_vocab, at = row * o->ld_logits;
    int32_t t = o->step[o->row0 + row], top;
    double lse = truth_lse(o->logits + at, n_vocab, &top);
    TRY(check_finite(o->x, lse, t));
    truth_step *step = &o->steps_of[o->row0 + row];
    *step = truth_of_step(o->logits + at, lse, top, n_vocab, o->full_logits + at, o->p + at, &o->base[row],
                          o->x->tokens[t + 1]);
    step->begins = begins(o->x, t);
    return 0;
}

/* One tile of counted steps: the full run's logits once, then those of n configurations. */
static int compare_tile(open_pass *o, size_t rows, size_t n, bool is_first) {
    const verify_text *x = o->x;
    double start = progress_seconds();
    TRY(x->backend->project(x->state, o->hidden + o->row0 * o->ld, rows, o->ld, o->full_logits, o->ld_logits));
    TRY(pool_run(x->pool, rows, full_row, o));
    double middle = progress_seconds();
    for (size_t r = 0; r < rows && is_first; r++)
        add_full(x, o->step[o->row0 + r], o->full_logits + r * o->ld_logits, o->base[r].lse, o->full);
    for (size_t i = 0; i < n; i++) {
        const float *hidden = o->hidden + ((1 + i) * o->n_counted + o->row0) * o->ld;
        TRY(x->backend->project(x->state, hidden, rows, o->ld, o->logits, o->ld_logits));
        o->steps_of = o->steps + i * o->n_counted;
        TRY(pool_run(x->pool, rows, compare_row, o));
    }
    o->full->seconds += is_first ? middle - start : 0;
    o->full->reruns_s += progress_seconds() - (is_first ? middle : start);
    return 0;
}

static int compare(open_pass *o, size_t n, bool is_first, truth *out) {
    for (o->row0 = 0; o->row0 < o->n_counted; o->row0 += o->tile_rows) {
        size_t left = o->n_counted - o->row0;
        TRY(compare_tile(o, left < o->tile_rows ? left : o->tile_rows, n, is_first));
    }
    for (size_t i = 0; i < n; i++) TRY(truth_mean(o->steps + i * o->n_counted, o->n_counted, &out[i]));
    return 0;
}

static int run_open(open_pass *o, const int32_t *const *evict_at, size_t n, truth *out) {
    double start = progress_seconds();
    TRY(run_masked(o, NULL, o->hidden));
    o->full->seconds = progress_seconds() - start;
    for (size_t first = 0; first < n; first += o->batch) {
        size_t batch = n - first < o->batch ? n - first : o->batch;
        start = progress_seconds();
        for (size_t i = 0; i < batch; i++) {
            TRY(run_masked(o, evict_at[first + i], o->hidden + (1 + i) * o->n_counted * o->ld));
            progress_at((double)(first + i));
        }
        o->full->reruns_s += progress_seconds() - start;
        TRY(compare(o, batch, first == 0, out + first));
    }
    o->full->nll /= (double)o->n_counted;
    return 0;
}

int verify_open(const verify_text *x, const int32_t *const *evict_at, size_t n, truth *out, verify_full *full) {
    open_pass o;
    *full = (verify_full){0};
    TRY(check_counted(x));
    progress_begin("verify", "reruns", (double)n);
    int code = open_begin(x, n, full, &o);
    if (!code) code = run_open(&o, evict_at, n, out);
    progress_end();
    mem_free(o.block);
    return code;
}

/* ---- closed loop ------------------------------------------------------------------------------------------------ */

/* One unit of one configuration. */
typedef struct closed_unit {
    replay *replay;
    int config, layer, first_kv, n_kv; /* the kv heads it decides for */
    int32_t *evict_at;                 /* [pad(T)] */
} closed_unit;

/* n configurations that advance together; copy 0 of the model is the full cache, copy 1+i configuration i. */
typedef struct closed_pass {
    const verify_text *x;
    verify_full *full;
    const sim_config *configs;
    size_t n, n_counted, n_units;
    closed_unit *units;
    int32_t *evict_at;   /* [n_units][pad(T)] */
    replay_facts *facts; /* [n] of the current step */
    truth_step *steps;   /* [n][n_counted] */
    float *p;            /* [pad(n_vocab)] probabilities of the full run */
    truth_full base;
    bool *wants_rows; /* [1 + n] */
    backend_steps *run;
    step_view view;
    int32_t t;
    size_t counted_so_far;
    void *block;
} closed_pass;

int verify_closed_allows(const sim_config *config) {
    unsigned live = NEEDS_ROW | NEEDS_CORRECT | NEEDS_CONFIDENCE | NEEDS_ENTROPY;
    if (config->unit == UNIT_MODEL || config->share != SHARE_NONE)
        return err_set(ERR_USAGE,
                       "%s: units that span layers or compete are not replayed by --mode closed: --mode open",
                       config->spec);
    if (!(config->needs & ~live)) return 0;
    return err_set(ERR_USAGE,
                   "%s looks at more than rows and predictions (the full run's future, gradients, keys ...), which "
                   "--mode closed does not have: --mode open",
                   config->spec);
}

static size_t units_of(const verify_text *x, const sim_config *c) {
    return (size_t)x->model->n_layer * (c->unit == UNIT_LAYER ? 1 : (size_t)x->model->n_kv_head);
}

static void carve_closed(closed_pass *w, mem_carver *c) {
    w->units = mem_carve(c, w->n_units, sizeof *w->units);
    w->evict_at = mem_carve(c, w->n_units * kernel_pad((size_t)w->x->n_tokens), sizeof *w->evict_at);
    w->facts = mem_carve(c, w->n, sizeof *w->facts);
    w->steps = mem_carve(c, w->n * w->n_counted, sizeof *w->steps);
    w->p = mem_carve(c, kernel_pad((size_t)w->x->model->n_vocab), sizeof *w->p);
    w->wants_rows = mem_carve(c, 1 + w->n, sizeof *w->wants_rows);
}

static int start_units(closed_pass *w) {
    const model *m = w->x->model;
    int group = m->n_head / m->n_kv_head;
    size_t u = 0;
    for (size_t i = 0; i < w->n; i++) {
        const sim_config *c = &w->configs[i];
        int n_kv = c->unit == UNIT_LAYER ? m->n_kv_head : 1;
        w->wants_rows[1 + i] = c->needs & NEEDS_ROW;
        for (size_t k = 0; k < units_of(w->x, c); k++, u++) {
            closed_unit *unit = &w->units[u];
            *unit = (closed_unit){.config = (int)i, .n_kv = n_kv};
            unit->layer = (int)(k * (size_t)n_kv / (size_t)m->n_kv_head);
            unit->first_kv = (int)(k * (size_t)n_kv % (size_t)m->n_kv_head);
            unit->evict_at = w->evict_at + u * kernel_pad((size_t)w->x->n_tokens);
            policy_shape shape = {m->n_layer, group * n_kv, n_kv, m->head_dim, m->n_embd};
            TRY(replay_new(c, w->x->n_tokens, &shape, &unit->replay));
            replay_unit place = {.sequence = w->x->sequence,
                                 .layer = unit->layer,
                                 .kv_head = unit->first_kv,
                                 .window = m->window[unit->layer],
                                 .n_head = group * n_kv};
            replay_begin(unit->replay, &place, unit->evict_at);
        }
    }
    return 0;
}

static int closed_begin(closed_pass *w) {
    for (size_t i = 0; i < w->n; i++) w->n_units += units_of(w->x, &w->configs[i]);
    mem_carver size = {0};
    carve_closed(w, &size);
    w->block = mem_new(size.used, 1, "verify");
    if (!w->block) {
        w->n_units = 0;
        return ERR_DATA;
    }
    mem_carver c = {.base = w->block};
    carve_closed(w, &c);
    TRY(start_units(w));
    return w->x->backend->steps_new(w->x->state, 1 + w->n, w->wants_rows, w->x->n_tokens, &w->run);
}

static void closed_end(closed_pass *w) {
    for (size_t u = 0; u < w->n_units; u++) replay_free(w->units[u].replay);
    w->x->backend->steps_free(w->run);
    mem_free(w->block);
}

static const float *logits_of(const closed_pass *w, size_t copy) {
    return w->view.logits + copy * w->view.ld_logits;
}

/* What configuration `i` predicted at this step: its policy's facts, and the cost where the step counts. */
static int judge_task(void *context, size_t i, int worker) {
    (void)worker;
    closed_pass *w = context;
    const verify_text *x = w->x;
    const float *logits = logits_of(w, 1 + i);
    size_t n_vocab = (size_t)x->model->n_vocab;
    int32_t top;
    double lse = truth_lse(logits, n_vocab, &top);
    TRY(check_finite(x, lse, w->t));
    w->facts[i] = (replay_facts){0};
    if (w->t == x->n_tokens - 1) return 0; /* nothing follows to be predicted: it counts as wrong */
    int32_t next = x->tokens[w->t + 1];
    w->facts[i] = (replay_facts){top == next, exp((double)logits[next] - lse), 0, is_counted(x, w->t)};
    if (w->configs[i].needs & NEEDS_ENTROPY) w->facts[i].entropy = truth_entropy(logits, lse, n_vocab);
    if (!w->facts[i].counted) return 0;
    truth_step *step = &w->steps[i * w->n_counted + w->counted_so_far];
    *step = truth_of_step(logits, lse, top, n_vocab, logits_of(w, 0), w->p, &w->base, next);
    step->begins = begins(x, w->t);
    return 0;
}

/* One unit observes the step and evicts. */
static int decide_task(void *context, size_t u, int worker) {
    (void)worker;
    closed_pass *w = context;
    const closed_unit *unit = &w->units[u];
    const model *m = w->x->model;
    size_t copy = 1 + (size_t)unit->config;
    int group = m->n_head / m->n_kv_head, n = group * unit->n_kv;
    const float *heads[n], *rows = w->view.rows[copy];
    size_t first = (size_t)unit->layer * (size_t)m->n_head + (size_t)(unit->first_kv * group);
    for (int h = 0; h < n; h++) heads[h] = rows ? rows + (first + (size_t)h) * w->view.ld_rows : NULL;
    replay_step(unit->replay, w->t, heads, &w->facts[unit->config]);
    for (int kv = unit->first_kv; kv < unit->first_kv + unit->n_kv; kv++)
        w->x->backend->steps_forget(w->run, copy, unit->layer, kv, unit->evict_at);
    return replay_check(unit->replay);
}

static int closed_step(closed_pass *w, bool is_first) {
    const verify_text *x = w->x;
    bool counted = is_counted(x, w->t);
    TRY(x->backend->steps_next(w->run, x->tokens[w->t], &w->view));
    truth_of_full(logits_of(w, 0), (size_t)x->model->n_vocab, w->p, &w->base);
    TRY(check_finite(x, w->base.lse, w->t));
    if (counted && is_first) add_full(x, w->t, logits_of(w, 0), w->base.lse, w->full);
    TRY(pool_run(x->pool, w->n, judge_task, w));
    w->counted_so_far += counted;
    return pool_run(x->pool, w->n_units, decide_task, w);
}

/* The overlap of configuration i's lifetimes with the open loop's, mean over layers and kv heads. */
static double overlap(const closed_pass *w, size_t i, const int32_t *open, int32_t *scratch) {
    const model *m = w->x->model;
    double sum = 0;
    for (size_t u = 0; u < w->n_units; u++) {
        const closed_unit *unit = &w->units[u];
        if (unit->config != (int)i) continue;
        for (int kv = unit->first_kv; kv < unit->first_kv + unit->n_kv; kv++) {
            size_t at = (size_t)unit->layer * (size_t)m->n_kv_head + (size_t)kv;
            sum += truth_overlap(unit->evict_at, open + at * (size_t)w->x->n_tokens, w->x->n_tokens, w->x->n_prompt,
                                 scratch);
        }
    }
    return sum / ((double)m->n_layer * m->n_kv_head);
}

static int closed_finish(const closed_pass *w, const int32_t *const *open, truth *out) {
    int32_t *scratch = mem_new(2 * (size_t)(w->x->n_tokens + 2), sizeof *scratch, "verify");
    int code = scratch ? 0 : ERR_DATA;
    for (size_t i = 0; i < w->n && !code; i++) {
        code = truth_mean(w->steps + i * w->n_counted, w->n_counted, &out[i]);
        out[i].overlap = overlap(w, i, open[i], scratch);
    }
    mem_free(scratch);
    return code;
}

/* Configurations first .. first+n-1 of a call with n_all. */
static int closed_batch(const verify_text *x, const sim_config *configs, const int32_t *const *open, size_t first,
                        size_t n, size_t n_all, truth *out, verify_full *full) {
    closed_pass w = {.x = x, .full = full, .configs = configs + first, .n = n, .n_counted = (size_t)count(x)};
    int code = closed_begin(&w);
    for (w.t = 0; w.t < x->n_tokens && !code; w.t++) {
        code = closed_step(&w, first == 0);
        progress_at(((double)first * x->n_tokens + (double)n * (w.t + 1)) / (double)n_all);
    }
    if (!code) code = closed_finish(&w, open + first, out + first);
    closed_end(&w);
    return code;
}

/* Bytes that a configuration's rows and cache may take. */
static size_t closed_bytes(const verify_text *x, const sim_config *c) {
    const model *m = x->model;
    size_t T = (size_t)x->n_tokens, held = (size_t)c->budget + 1 < T ? 2 * ((size_t)c->budget + 1) : T;
    size_t rows = (size_t)m->n_layer * (size_t)m->n_head * T;
    return sizeof(float) * (rows + 2 * held * (size_t)m->n_layer * (size_t)m->n_kv_head * (size_t)m->head_dim);
}

int verify_closed(const verify_text *x, const sim_config *configs, const int32_t *const *open, size_t n, truth *out,
                  verify_full *full) {
    *full = (verify_full){0};
    TRY(check_counted(x));
    for (size_t i = 0; i < n; i++) TRY(verify_closed_allows(&configs[i]));
    double start = progress_seconds();
    int code = 0;
    progress_begin("verify", "tokens", x->n_tokens);
    for (size_t first = 0, batch; first < n && !code; first += batch) {
        size_t bytes = 0;
        for (batch = 0; first + batch < n; batch++) {
            bytes += closed_bytes(x, &configs[first + batch]);
            if (batch && bytes > CLOSED_BYTES) break;
        }
        code = closed_batch(x, configs, open, first, batch, n, out, full);
    }
    progress_end();
    full->nll /= full->n_counted ? full->n_counted : 1;
    full->reruns_s = progress_seconds() - start;
    return code;
}
