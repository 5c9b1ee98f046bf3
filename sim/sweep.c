#include "sim/sweep.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/progress.h"
#include "sim/pass.h"
#include "sim/together.h"

#include <math.h>
#include <string.h>

enum { TILE_MOST = 64, TILE_LEAST = 8, TILE_BYTES = 8 << 20 };

/* ---- what is asked of the trace --------------------------------------------------------------------------------- */

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
    if (options->loss && !s->has_grad_loss)
        return err_set(ERR_DATA, "%s: trace has no grad/loss, which loss needs (trace again with --gradients fisher:1)",
                       name);
    if (options->loss && !s->has_v) return err_set(ERR_DATA, "%s: trace has no attn/v, which loss needs", name);
    if (options->loss && n_prompt < s->n_prompt)
        return err_set(ERR_USAGE, "--prompt %d: the trace's gradients begin after its own prompt of %d", n_prompt,
                       s->n_prompt);
    for (int32_t step = n_prompt; step < s->n_tokens - 1; step++) counted += !s->counted || s->counted[step];
    if (!counted)
        return err_set(ERR_DATA, "%s: no counted step in sequence %zu (%d tokens, prompt %d)", name, seq, s->n_tokens,
                       n_prompt);
    return 0;
}

int sweep_check_policy(const trace *t, size_t seq, const sim_config *config) {
    const trace_sequence *s = trace_get_sequence(t, seq);
    if ((config->needs & NEEDS_CORRECT) && !s->correct)
        return err_set(ERR_DATA, "%s: trace has no logits/correct, which %s needs", trace_path(t), config->spec);
    if ((config->needs & NEEDS_CONFIDENCE) && !s->target_logprob)
        return err_set(ERR_DATA, "%s: trace has no logits/target_logprob, which %s needs", trace_path(t), config->spec);
    unsigned evidence = config->needs & (NEEDS_OUT | NEEDS_LOSS | NEEDS_FISHER);
    if (evidence && !s->has_v)
        return err_set(ERR_DATA, "%s: trace has no attn/v, which %s needs", trace_path(t), config->spec);
    if ((evidence & (NEEDS_LOSS | NEEDS_FISHER)) && !s->has_grad_loss)
        return err_set(ERR_DATA, "%s: trace has no grad/loss, which %s needs (trace again with --gradients fisher:1)",
                       trace_path(t), config->spec);
    if ((evidence & NEEDS_FISHER) && s->n_fisher < 1)
        return err_set(ERR_DATA, "%s: trace has no grad/fisher, which %s needs (trace again with --gradients fisher:1)",
                       trace_path(t), config->spec);
    if ((config->needs & NEEDS_ENTROPY) && !s->entropy)
        return err_set(ERR_DATA, "%s: trace has no logits/entropy, which %s needs", trace_path(t), config->spec);
    TRY(together_check(t, config));
    return layer_data_check(t, seq, config->needs, config->spec);
}

/* ---- memory ----------------------------------------------------------------------------------------------------- */

/* Are its lifetimes to be handed in, instead of made layer by layer? */
static bool needs_given(const sim_config *c, const sweep_given *given) {
    return given || together_wanted(c);
}

static int units_of(const pass *w, const sim_config *c, bool is_given) {
    return c->unit == UNIT_LAYER && !is_given ? 1 : w->m->n_kv_head;
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
    size_t cells = (size_t)w->m->n_layer * heads, priced = w->priced_sets ? cells : 0;
    r->head_lost = mem_carve(&m, cells, sizeof *r->head_lost);
    r->head_first = mem_carve(&m, priced, sizeof *r->head_first);
    r->head_fisher = mem_carve(&m, priced, sizeof *r->head_fisher);
    size_t samples = w->priced_sets ? (size_t)w->priced_sets - 1 : 0;
    r->fisher = mem_carve(&m, samples * (size_t)w->n_tokens, sizeof *r->fisher);
    size_t steps = w->steps.strata ? (size_t)w->n_tokens : 0;
    r->step_lost = mem_carve(&m, steps, sizeof *r->step_lost);
    r->step_first = mem_carve(&m, priced ? steps : 0, sizeof *r->step_first);
    r->given = mem_carve(&m, r->is_given ? lifetimes_cells(w) : 0, sizeof *r->given);
    return m.used;
}

static size_t run_bytes(const pass *w, const sim_config *c, const sweep_given *given) {
    run r = {.is_given = needs_given(c, given)};
    r.n_units = units_of(w, c, r.is_given);
    size_t bytes = carve_run(w, &r, NULL);
    policy_shape shape = layer_data_shape(w->m, c->unit);
    bytes += price_run_bytes(w);
    if (!r.is_given) bytes += (size_t)r.n_units * replay_bytes(c, w->n_tokens, &shape);
    else if (!given) bytes += together_bytes(c, w->m, w->n_tokens);
    return bytes + (w->o->keep_lifetimes ? lifetimes_cells(w) * sizeof(int32_t) : 0);
}

/* Streams and evidence follow from the metrics and from what the policies look at. */
static void choose_streams(pass *w, const sim_config *configs, size_t n) {
    const unsigned full_run = NEEDS_FUTURE | NEEDS_OUT | NEEDS_LOSS | NEEDS_FISHER;
    unsigned needs = 0;
    for (size_t i = 0; i < n; i++) {
        needs |= configs[i].needs;
        w->layer_unit |= configs[i].unit == UNIT_LAYER && (configs[i].needs & full_run);
    }
    w->evidence = needs & (NEEDS_OUT | NEEDS_LOSS | NEEDS_FISHER);
    bool gradients = w->o->loss || (needs & (NEEDS_LOSS | NEEDS_FISHER));
    w->n_fixed = !w->o->out_err ? 0 : w->o->out_err_exact ? w->m->head_dim : ESTIMATE_PROBES;
    w->n_sets = gradients ? 1 + w->s->n_fisher : 0;
    w->priced_sets = w->o->loss ? w->n_sets : 0;
    w->n_streams = w->n_fixed + w->priced_sets;
    w->width = (widths){.m = w->m, .n_tokens = w->n_tokens, .stride = w->stride, .gradients = w->priced_sets > 0};
    for (size_t i = 0; i < n && w->n_streams; i++) widths_want(&w->width, &configs[i]);
}

/* Of the queries that the reader keeps. */
static size_t row_q_bytes(const pass *w) {
    return (size_t)w->m->n_head * (size_t)w->tile * (size_t)w->m->head_dim * sizeof(float);
}

static void choose_tile(pass *w) {
    size_t row = (size_t)w->m->n_head * w->stride * sizeof(float), rows = TILE_BYTES / row;
    w->tile = rows > TILE_MOST ? TILE_MOST : rows < TILE_LEAST ? TILE_LEAST : (int)(rows / 8 * 8);
}

static void carve_evidence(mem_carver *m, pass *w) {
    size_t rows = w->evidence ? (size_t)w->tile * w->stride : 0, n_kv = (size_t)w->m->n_kv_head;
    w->gain = mem_carve(m, n_kv * (size_t)w->n_sets * rows, sizeof *w->gain);
    w->out_head = mem_carve(m, w->evidence & NEEDS_OUT ? n_kv * rows : 0, sizeof *w->out_head);
    w->evidence_head = mem_carve(m, 3 * n_kv * rows, sizeof *w->evidence_head);
    w->evidence_layer = mem_carve(m, 3 * rows, sizeof *w->evidence_layer);
}

static void carve_widths(mem_carver *m, pass *w) {
    size_t threads = w->width.n ? (size_t)pool_threads(w->p) : 0, rows = LAYER_ROWS * (size_t)(1 + w->n_streams);
    widths_carve(m, &w->width);
    for (int k = 0, next = 0; k < KV_WIDTHS; k++) w->slot[k] = w->width.of[k].wanted ? next++ : -1;
    w->mean = mem_carve(m, threads * LAYER_ROWS * (size_t)w->group * (size_t)w->n_streams, sizeof *w->mean);
    w->wide = mem_carve(m, threads * (size_t)w->width.n * rows * w->stride, sizeof *w->wide);
    w->sight = mem_carve(m, threads * 2 * w->stride / KERNEL_LANES, sizeof *w->sight);
}

/* Carve what all runs share (NULL: only count). */
static size_t carve_pass(pass *w, void *block) {
    mem_carver m = {.base = block};
    size_t tokens = (size_t)w->n_tokens, threads = (size_t)pool_threads(w->p), heads = (size_t)w->m->n_head;
    w->counted = mem_carve(&m, tokens, 1);
    w->block = mem_carve(&m, tokens, 1);
    w->facts = mem_carve(&m, tokens, sizeof *w->facts);
    w->rows = mem_carve(&m, heads * (size_t)w->tile * w->stride, sizeof *w->rows);
    hindsight_carve(w, &m);
    carve_evidence(&m, w);
    carve_widths(&m, w);
    size_t dim = (size_t)w->m->head_dim, sets = (size_t)w->n_sets;
    w->values = mem_carve(&m, sets ? (size_t)w->m->n_kv_head * w->stride * dim : 0, sizeof *w->values);
    size_t priced = (size_t)w->group * (size_t)w->n_streams;
    w->stream_rows = (priced > sets ? priced : sets) * LAYER_ROWS;
    w->stream = mem_carve(&m, threads * w->stream_rows * w->stride, sizeof *w->stream);
    w->deviation = mem_carve(&m, w->evidence ? threads * sets * w->stride : 0, sizeof *w->deviation);
    w->scratch = mem_carve(&m, threads * (tokens + 2), sizeof *w->scratch);
    size_t embd = (size_t)w->m->n_embd;
    bool wo = w->o->out_err || (w->data.needs & NEEDS_WO);
    w->wo = mem_carve(&m, wo ? heads * dim * embd : 0, sizeof *w->wo);
    w->embd = mem_carve(&m, w->o->out_err ? threads * embd : 0, sizeof *w->embd);
    return m.used;
}

/* ---- setting up ------------------------------------------------------------------------------------------------- */

void sweep_facts(const trace_sequence *s, int32_t n_prompt, replay_facts *facts) {
    for (int32_t t = 0; t < s->n_tokens; t++) {
        bool last = t == s->n_tokens - 1; /* nothing follows to be predicted: it counts as wrong */
        facts[t].correct = !last && s->correct && s->correct[t];
        facts[t].confidence = !last && s->target_logprob ? exp((double)s->target_logprob[t]) : 0;
        facts[t].entropy = !last && s->entropy ? (double)s->entropy[t] : 0;
        facts[t].counted = !last && t >= n_prompt && (!s->counted || s->counted[t]);
    }
}

static void fill_facts(pass *w) {
    int64_t steps = (int64_t)w->n_tokens - 1 - w->n_prompt;
    sweep_facts(w->s, w->n_prompt, w->facts);
    for (int32_t t = 0; t < w->n_tokens; t++) w->counted[t] = w->facts[t].counted;
    for (int b = 0; b < BLOCKS_PER_ROW; b++) {
        int64_t from = b * steps / BLOCKS_PER_ROW, to = (b + 1) * steps / BLOCKS_PER_ROW;
        for (int64_t u = from; u < to; u++) w->block[w->n_prompt + u] = (uint8_t)b;
    }
}

static int start_run(pass *w, run *r) {
    size_t bytes = carve_run(w, r, NULL);
    void *block = mem_new(bytes, 1, "configuration");
    if (!block) return ERR_DATA;
    carve_run(w, r, block);
    policy_shape shape = layer_data_shape(w->m, r->c->unit);
    for (int u = 0; u < r->n_units && !r->is_given; u++) TRY(replay_new(r->c, w->n_tokens, &shape, &r->replay[u]));
    sweep_result *out = r->out;
    *out = (sweep_result){.updates = r->is_given ? -1 : 0};
    if (w->o->keep_lifetimes) {
        out->evict_at = mem_new(lifetimes_cells(w), sizeof *out->evict_at, "lifetimes");
        if (!out->evict_at) return ERR_DATA;
    }
    size_t cells = (size_t)w->m->n_layer * (size_t)w->m->n_head;
    out->head_lost_mass = mem_new(cells, sizeof *out->head_lost_mass, "results");
    if (!w->priced_sets) return out->head_lost_mass ? 0 : ERR_DATA;
    out->n_fisher = w->priced_sets - 1;
    out->head_first = mem_new(cells, sizeof *out->head_first, "results");
    out->head_fisher = mem_new(cells, sizeof *out->head_fisher, "results");
    out->block_fisher = mem_new((size_t)out->n_fisher * BLOCKS_PER_ROW, sizeof *out->block_fisher, "results");
    return out->head_lost_mass && out->head_first && out->head_fisher && out->block_fisher ? 0 : ERR_DATA;
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
            if (!w->runs[i].is_given && unit < (w->runs[i].c->share == SHARE_LAYER ? 1 : w->runs[i].n_units))
                w->tasks[w->n_tasks++] = (task){&w->runs[i], unit};
}

/* ---- a pass ----------------------------------------------------------------------------------------------------- */

static void finish_loss(const pass *w, run *r) {
    sweep_result *out = r->out;
    size_t cells = (size_t)w->m->n_layer * (size_t)w->m->n_head, tokens = (size_t)w->n_tokens;
    double n = (double)out->n_counted, first = 0, fisher = 0;
    for (int b = 0; b < BLOCKS_PER_ROW; b++) first += out->block_first[b];
    for (int k = 0; k < out->n_fisher; k++)
        for (int32_t t = w->n_prompt; t < w->n_tokens - 1; t++) {
            double y = r->fisher[(size_t)k * tokens + (size_t)t];
            out->block_fisher[k * BLOCKS_PER_ROW + w->block[t]] += sample_weight(&w->steps, t) * 0.5 * y * y;
        }
    for (int k = 0; k < out->n_fisher * BLOCKS_PER_ROW; k++) fisher += out->block_fisher[k];
    out->dloss_first = first / n;
    out->fisher = out->n_fisher ? fisher / (n * out->n_fisher) : 0;
    for (size_t k = 0; k < cells; k++) {
        out->head_first[k] = (float)(r->head_first[k] / n);
        out->head_fisher[k] = (float)(r->head_fisher[k] / n);
    }
}

/* What the sampling of steps adds to the variance of the means. */
static void finish_sampling(const pass *w, run *r) {
    sweep_sampling *s = &r->out->sampling;
    size_t tokens = (size_t)w->n_tokens;
    double n = (double)r->out->n_counted, cells = (double)w->m->n_layer * w->m->n_head, scale = 1 / (n * n);
    s->lost_mass = sample_covariance(&w->steps, r->step_lost, r->step_lost) * scale / (cells * cells);
    if (!w->priced_sets) return;
    s->first = sample_covariance(&w->steps, r->step_first, r->step_first) * scale;
    int samples = r->out->n_fisher;
    for (size_t t = 0; t < tokens && samples; t++) { /* the first sample's row becomes the mean of their squares */
        double sum = 0;
        for (int k = 0; k < samples; k++) sum += r->fisher[(size_t)k * tokens + t] * r->fisher[(size_t)k * tokens + t];
        r->fisher[t] = 0.5 * sum / samples;
    }
    if (!samples) return;
    s->fisher = sample_covariance(&w->steps, r->fisher, r->fisher) * scale;
    s->first_fisher = sample_covariance(&w->steps, r->step_first, r->fisher) * scale;
}

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
    if (w->priced_sets) finish_loss(w, r);
    if (w->steps.strata) finish_sampling(w, r);
}

static int work_layers(pass *w) {
    list_tasks(w);
    for (w->layer = 0; w->layer < w->m->n_layer; w->layer++) {
        int code = trace_layer_open(w->t, w->seq, w->layer, w->o->form, w->p, &w->attention);
        if (!code) code = layer_work(w, (double)w->layer * w->n_tokens);
        estimate_streams_free(&w->streams);
        widths_close(&w->width);
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

/* Lifetimes of the configurations whose units span layers. */
static int replay_together(pass *w) {
    together_run *runs = mem_new(w->n_runs, sizeof *runs, "configurations");
    size_t n = 0;
    if (!runs) return ERR_DATA;
    for (size_t i = 0; i < w->n_runs; i++)
        if (w->runs[i].is_given) {
            run *r = &w->runs[i];
            r->out->updates = 0;
            runs[n++] = (together_run){.config = r->c, .evict_at = r->given, .updates = &r->out->updates};
        }
    int code = n ? together_replay(w->t, w->seq, w->o->form, w->facts, w->p, runs, n) : 0;
    mem_free(runs);
    return code;
}

/* Runs from .. from+n-1 of the whole list. */
static int run_pass(pass *w, const sim_config *configs, const sweep_given *given, sweep_result *results, size_t from,
                    size_t n) {
    w->n_runs = n;
    w->runs = mem_new(n, sizeof *w->runs, "configurations");
    w->tasks = mem_new(n * (size_t)w->m->n_kv_head, sizeof *w->tasks, "configurations");
    int code = w->runs && w->tasks ? price_open(w) : ERR_DATA;
    for (size_t i = 0; i < n && !code; i++) {
        const sim_config *c = &configs[from + i];
        w->runs[i] = (run){.c = c, .out = &results[from + i], .is_given = needs_given(c, given)};
        w->runs[i].is_quantised = w->width.n && kv_bits_quantised(c);
        w->runs[i].n_units = units_of(w, c, w->runs[i].is_given);
        w->runs[i].future = hindsight_of(w, c);
        code = start_run(w, &w->runs[i]);
        if (!code && given) code = given->read(given->context, from + i, w->runs[i].given);
    }
    if (!code && !given) code = replay_together(w);
    if (!code) code = work_layers(w);
    if (!code) code = hand_over(w, from);
    for (size_t i = 0; i < n && w->runs; i++) end_run(&w->runs[i]);
    mem_free(w->runs);
    mem_free(w->tasks);
    price_close(w);
    return code;
}

/* How many configurations from `from` on fit beside the fixed part; at least one, or 0 if not even that. */
static size_t fit(const pass *w, const sim_config *configs, size_t n, size_t from, const sweep_given *given,
                  size_t fixed, sweep_cost *cost) {
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
    double rows = (double)w->m->n_layer * w->n_tokens;
    for (size_t from = 0; from < n; cost->passes++) {
        size_t k = fit(w, configs, n, from, given, cost->fixed, cost);
        if (k == 0)
            return err_set(ERR_USAGE, "--memory: %zu MiB are not enough for one configuration (%zu MiB needed)",
                           w->o->memory >> 20, (cost->fixed + cost->per_config + (1 << 20) - 1) >> 20);
        progress_next(rows * (double)k / (double)n);
        progress_begin("sim", "rows", rows);
        int code = run_pass(w, configs, given, results, from, k);
        progress_end();
        TRY(code);
        from += k;
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
    for (size_t i = 0; i < n; i++) TRY(kv_bits_check(t, seq, options->form, &configs[i]));
    pass w = {.t = t, .seq = seq, .m = m, .s = s, .o = options, .p = p, .n_tokens = s->n_tokens};
    w.n_prompt = configs[0].n_prompt;
    w.stride = kernel_pad((size_t)s->n_tokens);
    w.group = m->n_head / m->n_kv_head;
    TRY(sample_new(w.n_prompt, s->n_tokens - 1 - w.n_prompt, options->sample_steps, options->seed, (uint32_t)seq,
                   &w.steps));
    choose_streams(&w, configs, n);
    choose_tile(&w);
    unsigned needs = 0;
    bool together = false;
    for (size_t i = 0; i < n && !given; i++) needs |= configs[i].needs;
    int code = layer_data_new(m, needs, 1, &w.data);
    if (!code) code = hindsight_new(&w, configs, n);
    size_t bytes = carve_pass(&w, NULL), streams = (size_t)m->n_head * (size_t)w.n_fixed * w.stride * sizeof(float);
    size_t gradients = w.n_sets ? trace_layer_grad_bytes(t, seq, w.tile) : 0;
    cost->fixed = bytes + streams + gradients + trace_layer_bytes(t, seq, options->form);
    cost->fixed += layer_data_bytes(t, seq, w.width.n ? needs | NEEDS_KEYS : needs); /* keys are loaded once for both */
    if (w.width.n) cost->fixed += (size_t)w.width.n * streams + row_q_bytes(&w);
    for (size_t i = 0; i < n && !given; i++) together |= together_wanted(&configs[i]);
    if (together) cost->fixed += together_fixed_bytes(t, seq, options->form, needs);
    void *block = code ? NULL : mem_new(bytes, 1, "sweep");
    if (!block) code = ERR_DATA;
    if (!code) {
        carve_pass(&w, block);
        fill_facts(&w);
        progress_begin("sim", "rows", (double)m->n_layer * s->n_tokens);
        code = plan_and_run(&w, configs, n, given, results, cost);
        progress_end();
    }
    sample_free(&w.steps);
    layer_data_free(&w.data);
    hindsight_free(&w);
    mem_free(block);
    return code;
}

void sweep_result_free(sweep_result *r) {
    mem_free(r->head_lost_mass);
    mem_free(r->head_first);
    mem_free(r->head_fisher);
    mem_free(r->block_fisher);
    mem_free(r->evict_at);
    *r = (sweep_result){0};
}
