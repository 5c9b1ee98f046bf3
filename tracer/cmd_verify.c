/* kvlag verify: rerun a model for real with what configurations evict, and write what it cost. */
#include "base/err.h"
#include "base/mem.h"
#include "base/options_file.h"
#include "base/outfile.h"
#include "base/progress.h"
#include "sim/policy_plugin.h"
#include "sim/results.h"
#include "sim/spec.h"
#include "tracer/model_files.h"
#include "tracer/plugin.h"
#include "tracer/tracer.h"
#include "tracer/verify.h"
#include "tracer/verify_asks.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define SWEEP_BYTES ((size_t)1 << 30)
#define DIFFERS_MOST 1e-2 /* nats between the model's log probabilities and the trace's, in the same arithmetic */

typedef struct settings {
    const char *out, *budgets, *lags, *schedule, *unit, *pending, *from_lifetimes, *mode, *calibrate;
    long long n_prompt, pick, threads, seed;
    bool force, quiet, verbose, has_prompt, has_seed;
    char seed_text[24];
    plugin_choice compute;
    opt_file grid;
    opt_list plugins, files, specs; /* MODEL TRACE [RESULTS.csv] */
} settings;

/* One rerun of a sequence. */
typedef struct run {
    sim_config config; /* of given lifetimes only n_prompt is set */
    size_t given;      /* their number in the file */
    int32_t *evict_at; /* [n_layer][n_kv_head][T] of the open loop */
    int family;
} run;

/* One row to write. */
typedef struct row {
    results_key key;
    size_t run; /* of its sequence */
    truth truth;
} row;

typedef struct job {
    settings *set;
    bool closed;
    char *command;
    trace *trace;
    model *model;
    const backend *backend;
    backend_state *state;
    pool *pool;
    lifetimes *given;
    verify_asks asks;
    text skipped; /* "# skipped: ..." lines */

    /* the sequence being worked on */
    size_t seq, first_row;
    run *runs;
    size_t n_runs, run_capacity;

    row *rows;
    size_t n_rows, row_capacity;
    calibration_point *points;
    size_t n_points, point_capacity;

    double reruns_s, full_s, gflop; /* seconds and 1e9 operations of the model, over all sequences */
    size_t n_reruns, n_full;
    double differs; /* see verify_full */
} job;

/* ---- the model and the trace ------------------------------------------------------------------------------------ */

static int check_facts(const job *j) {
    const trace_model *t = trace_get_model(j->trace);
    const model *m = j->model;
    const struct {
        const char *name;
        double of_trace, of_model;
        bool known;
    } facts[] = {{"n_layer", t->n_layer, m->n_layer, true},
                 {"n_head", t->n_head, m->n_head, true},
                 {"n_kv_head", t->n_kv_head, m->n_kv_head, true},
                 {"head_dim", t->head_dim, m->head_dim, true},
                 {"n_embd", t->n_embd, m->n_embd, t->n_embd > 0},
                 {"n_vocab", t->n_vocab, m->n_vocab, t->n_vocab > 0},
                 {"scale", t->scale, m->scale, true},
                 {"softcap", t->softcap, m->softcap, true}};
    for (size_t i = 0; i < sizeof facts / sizeof *facts; i++)
        if (facts[i].known && fabs(facts[i].of_trace - facts[i].of_model) > 1e-6 * fabs(facts[i].of_model))
            return err_set(ERR_DATA, "%s is a trace of another model: its %s is %g, that of %s is %g",
                           trace_path(j->trace), facts[i].name, facts[i].of_trace, m->path, facts[i].of_model);
    for (int layer = 0; layer < m->n_layer; layer++)
        if (t->window[layer] != m->window[layer])
            return err_set(ERR_DATA, "%s is a trace of another model: the window of layer %d is %d, that of %s is %d",
                           trace_path(j->trace), layer, t->window[layer], m->path, m->window[layer]);
    return 0;
}

static int check_sequence(const job *j, size_t seq) {
    const trace_sequence *s = trace_get_sequence(j->trace, seq);
    const char *path = trace_path(j->trace);
    if (!s->tokens) return err_set(ERR_DATA, "%s: sequence %zu has no tokens, which verify needs", path, seq);
    if (s->n_tokens > j->model->n_context)
        return err_set(ERR_DATA, "%s: sequence %zu has %d tokens, more than the model's %d positions", path, seq,
                       s->n_tokens, j->model->n_context);
    for (int32_t t = 0; t < s->n_tokens; t++)
        if (s->tokens[t] < 0 || s->tokens[t] >= j->model->n_vocab)
            return err_set(ERR_DATA, "%s: sequence %zu, token %d: id %d is outside the vocabulary of %d", path, seq, t,
                           s->tokens[t], j->model->n_vocab);
    if (j->set->n_prompt > s->n_tokens)
        return err_set(ERR_USAGE, "--prompt %lld: sequence %zu of %s has %d tokens", j->set->n_prompt, seq, path,
                       s->n_tokens);
    return 0;
}

/* ---- configurations --------------------------------------------------------------------------------------------- */

static int gather_asks(job *j) {
    const settings *s = j->set;
    if (s->files.n == 3)
        return verify_asks_of_results(s->files.item[2], trace_label(j->trace), trace_n_sequences(j->trace),
                                      (size_t)s->pick, &j->asks);
    if (s->from_lifetimes) return results_open_given(s->from_lifetimes, j->trace, &j->given);
    const sim_flags flags = {.budgets = s->budgets,
                             .lags = s->lags,
                             .schedule = s->schedule,
                             .unit = s->unit,
                             .pending = s->pending,
                             .seed = s->has_seed ? s->seed_text : NULL,
                             .n_prompt = (int32_t)s->n_prompt};
    sim_asks asks;
    int code = sim_asks_build(s->specs.item, s->specs.n, &flags, &asks);
    for (size_t i = 0; i < asks.n && !code; i++)
        code = verify_asks_add(&j->asks,
                               &(verify_ask){.ask = asks.ask[i], .every_seq = true, .n_prompt = (int32_t)s->n_prompt});
    sim_asks_free(&asks);
    return code;
}

static int resolve(const job *j, const verify_ask *a, sim_config *c) {
    const trace_sequence *s = trace_get_sequence(j->trace, j->seq);
    const sim_flags flags = {.n_prompt = a->n_prompt};
    TRY(sim_config_resolve(&a->ask, &flags, s->n_tokens, s->n_prompt, c));
    TRY(sweep_check_policy(j->trace, j->seq, c));
    return j->closed ? verify_closed_allows(c) : 0;
}

/* A point that cannot run: an error where it was asked for alone, a line where it is one of many. */
static int skip(job *j, const sim_ask *ask, int code) {
    char *name = sim_ask_name(ask);
    if (!name) return ERR_DATA;
    if (!ask->in_grid || code != ERR_USAGE) {
        err_prefix(code, "%s", name);
    } else {
        say("skipped %s: %s", name, err_message());
        code =
            text_add(&j->skipped, "# skipped: %s seq %zu %s: %s\n", trace_label(j->trace), j->seq, name, err_message());
    }
    mem_free(name);
    return code;
}

static int add_row(job *j, size_t run_index, row **out) {
    TRY(mem_grow((void **)&j->rows, &j->row_capacity, j->n_rows + 1, sizeof *j->rows, "rows"));
    *out = &j->rows[j->n_rows++];
    **out = (row){.run = run_index};
    return 0;
}

static int add_run(job *j, const run *r) {
    TRY(mem_grow((void **)&j->runs, &j->run_capacity, j->n_runs + 1, sizeof *j->runs, "configurations"));
    j->runs[j->n_runs++] = *r;
    return 0;
}

static int plan_ask(job *j, const verify_ask *a) {
    sim_config c;
    row *r;
    int code = resolve(j, a, &c);
    if (code) {
        sim_config_free(&c);
        return skip(j, &a->ask, code);
    }
    size_t k = 0;
    while (k < j->n_runs && !sim_config_same(&j->runs[k].config, &c)) k++;
    code = add_row(j, k, &r);
    if (!code) code = results_key_of(trace_label(j->trace), j->seq, &c, &r->key);
    if (!code && k == j->n_runs) {
        code = add_run(j, &(run){.config = c, .family = spec_family(c.spec)});
        if (!code) return 0;
    }
    sim_config_free(&c);
    return code;
}

static int plan_given(job *j, size_t config) {
    const trace_sequence *s = trace_get_sequence(j->trace, j->seq);
    int32_t n_prompt = j->set->n_prompt >= 0 ? (int32_t)j->set->n_prompt : s->n_prompt;
    row *r;
    if (!lifetimes_get_seq(j->given, config, j->seq)) return 0;
    TRY(add_row(j, j->n_runs, &r));
    TRY(add_run(j, &(run){.config = {.n_prompt = n_prompt}, .given = config, .family = -1}));
    sim_config c = results_config_of_given(j->given, config, j->seq, n_prompt);
    return results_key_of_given(trace_label(j->trace), j->given, config, j->seq, &c, &r->key);
}

static int plan(job *j) {
    for (size_t i = 0; j->given && i < lifetimes_n_configs(j->given); i++) TRY(plan_given(j, i));
    for (size_t i = 0; i < j->asks.n; i++)
        if (j->asks.ask[i].every_seq || j->asks.ask[i].seq == j->seq) TRY(plan_ask(j, &j->asks.ask[i]));
    for (size_t i = 1; i < j->n_runs; i++)
        if (j->runs[i].config.n_prompt != j->runs[0].config.n_prompt)
            return err_set(ERR_DATA,
                           "%s: rows of sequence %zu have prompts of %d and of %d steps; verify one at a time",
                           j->set->files.item[2], j->seq, j->runs[0].config.n_prompt, j->runs[i].config.n_prompt);
    return 0;
}

/* ---- lifetimes and Fisher terms, from the trace ----------------------------------------------------------------- */

static size_t lifetimes_bytes(const job *j) {
    const model *m = j->model;
    return (size_t)m->n_layer * (size_t)m->n_kv_head * (size_t)trace_get_sequence(j->trace, j->seq)->n_tokens *
           sizeof(int32_t);
}

static int keep_lifetimes(void *context, size_t index, const sweep_result *result) {
    job *j = context;
    if (!j->given) memcpy(j->runs[index].evict_at, result->evict_at, lifetimes_bytes(j));
    return 0;
}

static int hand_in_lifetimes(void *context, size_t index, int32_t *out) {
    const job *j = context;
    memcpy(out, j->runs[index].evict_at, lifetimes_bytes(j));
    return 0;
}

static int sweep(job *j, const sim_config *configs, sweep_result *results) {
    sweep_cost cost;
    sweep_given given = {.read = hand_in_lifetimes, .context = j};
    sweep_options options = {.loss = j->set->calibrate != NULL,
                             .keep_lifetimes = !j->given,
                             .memory = SWEEP_BYTES,
                             .done = keep_lifetimes,
                             .context = j};
    return sweep_sequence(j->trace, j->seq, configs, j->n_runs, j->given ? &given : NULL, &options, j->pool, results,
                          &cost);
}

static int read_given(job *j) {
    const model *m = j->model;
    int32_t n_tokens = trace_get_sequence(j->trace, j->seq)->n_tokens;
    for (size_t i = 0; i < j->n_runs; i++)
        TRY(lifetimes_read(j->given, j->runs[i].given, j->seq, m->n_layer, m->n_kv_head, n_tokens,
                           j->runs[i].evict_at));
    return 0;
}

static int add_points(job *j, const sweep_result *results, const truth *truths) {
    for (size_t i = 0; i < j->n_runs; i++) {
        TRY(mem_grow((void **)&j->points, &j->point_capacity, j->n_points + 1, sizeof *j->points, "calibration"));
        j->points[j->n_points++] =
            (calibration_point){.family = j->runs[i].family, .fisher = results[i].fisher, .true_kl = truths[i].kl};
    }
    return 0;
}

/* ---- reruns ----------------------------------------------------------------------------------------------------- */

/* 1e9 operations of one run of the model as verify does it. */
static double gflop_of(const job *j, int32_t n_tokens, int32_t n_counted) {
    const model *m = j->model;
    /* Open loop projects the counted steps only; closed loop attends to what a cache holds, counted here as nothing. */
    double open = model_flops(m, n_tokens) - 2.0 * m->n_embd * m->n_vocab * (n_tokens - n_counted);
    return 1e-9 * (j->closed ? model_flops(m, 1) * n_tokens : open);
}

static void add_costs(job *j, int32_t n_tokens, const verify_full *f) {
    j->reruns_s += f->reruns_s;
    j->full_s += f->seconds;
    j->n_reruns += j->n_runs;
    j->n_full++;
    j->gflop += gflop_of(j, n_tokens, f->n_counted) * (double)(1 + j->n_runs);
    if (!(f->differs <= j->differs)) j->differs = f->differs;
    say_more("sequence %zu: full cache perplexity %.4f over %d counted tokens", j->seq, exp(f->nll), f->n_counted);
}

static int rerun(job *j, const sim_config *configs, truth *out) {
    const trace_sequence *s = trace_get_sequence(j->trace, j->seq);
    const int32_t **evict_at = mem_new(j->n_runs, sizeof *evict_at, "lifetimes");
    verify_text x = {.backend = j->backend,
                     .state = j->state,
                     .model = j->model,
                     .pool = j->pool,
                     .tokens = s->tokens,
                     .n_tokens = s->n_tokens,
                     .n_prompt = configs[0].n_prompt,
                     .sequence = (int32_t)j->seq,
                     .counted = s->counted,
                     .target_logprob = s->target_logprob};
    verify_full full;
    if (!evict_at) return ERR_DATA;
    for (size_t i = 0; i < j->n_runs; i++) evict_at[i] = j->runs[i].evict_at;
    int code = j->closed ? verify_closed(&x, configs, evict_at, j->n_runs, out, &full)
                         : verify_open(&x, evict_at, j->n_runs, out, &full);
    mem_free(evict_at);
    if (!code) add_costs(j, s->n_tokens, &full);
    return code;
}

static int work_runs(job *j, sim_config *configs, sweep_result *results, truth *truths) {
    size_t bytes = lifetimes_bytes(j);
    for (size_t i = 0; i < j->n_runs; i++) {
        configs[i] = j->runs[i].config; /* a view: the run owns its texts */
        j->runs[i].evict_at = mem_new(bytes, 1, "lifetimes");
        if (!j->runs[i].evict_at) return ERR_DATA;
    }
    if (j->given) TRY(read_given(j));
    if (!j->given || j->set->calibrate) TRY(sweep(j, configs, results));
    TRY(rerun(j, configs, truths));
    for (size_t i = j->first_row; i < j->n_rows; i++) j->rows[i].truth = truths[j->rows[i].run];
    return j->set->calibrate ? add_points(j, results, truths) : 0;
}

static void free_runs(job *j) {
    for (size_t i = 0; i < j->n_runs; i++) {
        sim_config_free(&j->runs[i].config);
        mem_free(j->runs[i].evict_at);
    }
    j->n_runs = 0;
}

static int work_sequence(job *j) {
    j->first_row = j->n_rows;
    TRY(plan(j));
    if (!j->n_runs) return 0;
    size_t n = j->n_runs;
    sim_config *configs = mem_new(n, sizeof *configs, "configurations");
    sweep_result *results = mem_new(n, sizeof *results, "configurations");
    truth *truths = mem_new(n, sizeof *truths, "configurations");
    int code = configs && results && truths ? work_runs(j, configs, results, truths) : ERR_DATA;
    for (size_t i = 0; i < n && results; i++) sweep_result_free(&results[i]);
    mem_free(configs);
    mem_free(results);
    mem_free(truths);
    free_runs(j);
    return code;
}

/* ---- writing ---------------------------------------------------------------------------------------------------- */

static int add_truth(const job *j, const row *r, text *csv) {
    const results_key *k = &r->key;
    const char *texts[] = {k->policy, k->spec, k->budget_asked, k->budget, k->lag, k->unit, k->schedule, k->pending};
    TRY(text_add_csv(csv, k->trace));
    TRY(text_add(csv, ",%zu,", k->seq));
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        TRY(text_add_csv(csv, texts[i]));
        TRY(text_add(csv, ","));
    }
    TRY(text_add(csv, "%d,%s,%.9g,%.9g,%.9g,%.9g,%.9g,", k->n_prompt, j->set->mode, r->truth.dloss, r->truth.kl,
                 r->truth.kl_p99, r->truth.top1_flips, r->truth.exact));
    return isnan(r->truth.overlap) ? text_add(csv, "\n") : text_add(csv, "%.9g\n", r->truth.overlap);
}

static int compose(const job *j, text *csv) {
    TRY(text_add(csv, "# kvlag truth v1\n# command: %s\n# trace: %s %s\n# mode: %s loop\n", j->command,
                 trace_label(j->trace), trace_hash(j->trace), j->set->mode));
    TRY(policy_plugins_note(&j->set->plugins, csv));
    TRY(text_add_bytes(csv, j->skipped.data, j->skipped.n));
    TRY(text_add(csv, "trace,seq,policy,spec,budget_asked,budget,lag,unit,schedule,pending,n_prompt,mode,true_dloss,"
                      "true_kl,kl_p99,top1_flips,exact_match,kept_overlap\n"));
    for (size_t i = 0; i < j->n_rows; i++) TRY(add_truth(j, &j->rows[i], csv));
    return 0;
}

static int write_truth(const job *j, const outfile *f) {
    text csv = {0};
    int code = compose(j, &csv);
    if (!code) code = outfile_write(f, csv.data, csv.n);
    text_free(&csv);
    return code;
}

/* Budgets as asked, without repetition, as far as they fit. */
static void list_budgets(const job *j, char *out, size_t size) {
    size_t used = 0;
    for (size_t i = 0; i < j->n_rows; i++) {
        const char *budget = j->rows[i].key.budget_asked;
        bool seen = !*budget || used + strlen(budget) + 2 > size;
        for (size_t k = 0; k < i && !seen; k++) seen = strcmp(j->rows[k].key.budget_asked, budget) == 0;
        if (!seen) used += (size_t)snprintf(out + used, size - used, "%s%s", used ? "," : "", budget);
    }
}

static int write_calibration(const job *j) {
    calibration c;
    int code = calibration_fit(j->points, j->n_points, &c);
    if (code) return err_prefix(code, "--calibrate %s", j->set->calibrate);
    snprintf(c.model, sizeof c.model, "%s", trace_get_model(j->trace)->name);
    for (size_t seq = 0; seq < trace_n_sequences(j->trace); seq++) {
        int32_t n_tokens = trace_get_sequence(j->trace, seq)->n_tokens;
        if (n_tokens > c.n_tokens) c.n_tokens = n_tokens;
    }
    list_budgets(j, c.budgets, sizeof c.budgets);
    TRY(calibration_write(j->set->calibrate, j->set->force, &c));
    say("%s: c = %.3f, spread %.3f from %d of %zu reruns", j->set->calibrate, exp(c.log_c), exp(c.s), c.n, j->n_points);
    return 0;
}

static void close_with(const job *j) {
    double each = j->reruns_s / (double)j->n_reruns, seconds = j->reruns_s + j->full_s;
    char passes[48] = "";
    if (j->full_s > 0) snprintf(passes, sizeof passes, ", %.2f full passes", each / (j->full_s / (double)j->n_full));
    const char *there = trace_get_model(j->trace)->compute, *here = j->backend->compute(j->state);
    if (*there && strcmp(there, here) != 0)
        say("the trace was computed in %s, these reruns in %s: log probabilities differ by up to %.3g", there, here,
            j->differs);
    else if (!(j->differs <= DIFFERS_MOST))
        say("warning: this model's log probabilities differ from the trace's by up to %.3g: is it the model, in the "
            "same quantisation, that was traced?",
            j->differs);
    say("%s: %zu rows from %zu reruns, %s loop, in %.2f s (%.3f s a rerun%s; %.0f GFLOP/s)", j->set->out, j->n_rows,
        j->n_reruns, j->set->mode, seconds, each, passes, j->gflop / seconds);
}

/* ---- the command ------------------------------------------------------------------------------------------------ */

/* Nothing is computed for a calibration file that could not be written. */
static int check_calibration_file(const settings *s, const char *const *inputs, int n_inputs) {
    outfile f;
    if (!s->calibrate) return 0;
    TRY(model_check_output(s->files.item[0], s->calibrate));
    TRY(outfile_begin(&f, s->calibrate, s->force, inputs, n_inputs));
    outfile_abort(&f);
    return 0;
}

static int begin_files(const settings *s, outfile *csv) {
    const char *inputs[5];
    int n = 0;
    for (size_t i = 0; i < s->files.n; i++) inputs[n++] = s->files.item[i];
    if (s->from_lifetimes) inputs[n++] = s->from_lifetimes;
    if (s->grid.path) inputs[n++] = s->grid.path;
    TRY(model_check_output(s->files.item[0], s->out));
    TRY(outfile_begin(csv, s->out, s->force, inputs, n));
    return check_calibration_file(s, inputs, n);
}

/* What the inputs lack is found before the weights are loaded. */
static int open_inputs(job *j) {
    const settings *s = j->set;
    TRY(trace_open(s->files.item[1], &j->trace));
    TRY(model_open(s->files.item[0], &j->model));
    TRY(check_facts(j));
    TRY(gather_asks(j));
    sweep_options options = {.loss = s->calibrate != NULL};
    for (size_t seq = 0; seq < trace_n_sequences(j->trace); seq++) {
        const trace_sequence *of = trace_get_sequence(j->trace, seq);
        TRY(check_sequence(j, seq));
        if (j->closed || !j->given || s->calibrate)
            TRY(sweep_check_sequence(j->trace, seq, s->n_prompt >= 0 ? (int32_t)s->n_prompt : of->n_prompt, &options));
    }
    return 0;
}

static int work(job *j) {
    TRY(plugin_backend(j->set->compute.backend, &j->backend));
    TRY(open_inputs(j));
    TRY(pool_new((int)j->set->threads, &j->pool));
    TRY(plugin_load(&j->set->compute, &j->backend, j->model, j->pool, &j->state));
    int code = 0;
    size_t n = trace_n_sequences(j->trace);
    progress_begin("verify", NULL, (double)n);
    for (j->seq = 0; j->seq < n && !code; j->seq++) {
        progress_next(1);
        code = work_sequence(j);
        if (code && n > 1) err_prefix(code, "sequence %zu", j->seq);
    }
    progress_end();
    TRY(code);
    return j->n_rows ? 0 : err_set(ERR_USAGE, "no configuration is left to rerun");
}

static void release(job *j) {
    free_runs(j);
    for (size_t i = 0; i < j->n_rows; i++) results_key_free(&j->rows[i].key);
    if (j->state) j->backend->unload(j->state);
    if (j->given) lifetimes_close(j->given);
    verify_asks_free(&j->asks);
    model_close(j->model);
    trace_close(j->trace);
    pool_free(j->pool);
    text_free(&j->skipped);
    mem_free(j->runs);
    mem_free(j->rows);
    mem_free(j->points);
    mem_free(j->command);
}

static int check(const settings *s) {
    bool from_results = s->files.n == 3;
    if (s->files.n < 2 || s->files.n > 3)
        return err_set(ERR_USAGE,
                       "verify needs a model and a trace: kvlag verify MODEL TRACE [RESULTS.csv] -o TRUTH.csv");
    if (!s->out) return err_set(ERR_USAGE, "verify needs -o TRUTH.csv");
    if (from_results + (s->from_lifetimes != NULL) + (s->specs.n > 0) != 1)
        return err_set(ERR_USAGE, "verify needs configurations from one place: RESULTS.csv, --from-lifetimes or -p");
    if (s->pick && !from_results) return err_set(ERR_USAGE, "--pick takes rows of RESULTS.csv, which is not given");
    if (!s->specs.n && (s->budgets || s->lags || s->schedule || s->unit || s->pending || s->has_seed))
        return err_set(ERR_USAGE,
                       "%s brings its configurations: -b, -L, --schedule, --unit, --pending and --seed do not apply",
                       from_results ? "RESULTS.csv" : "--from-lifetimes");
    if (from_results && s->has_prompt)
        return err_set(ERR_USAGE, "RESULTS.csv brings its prompts: --prompt does not apply");
    if (s->from_lifetimes && strcmp(s->mode, "closed") == 0)
        return err_set(ERR_USAGE, "--mode closed needs policies; lifetimes that stand in a file are open loop");
    return 0;
}

static int verify_with(const opt *table, settings *s, int argc, char **argv) {
    TRY(opt_parse(table, argc, argv, &s->files));
    TRY(opt_file_read(&s->grid, table));
    say_level(s->quiet ? SAY_QUIET : s->verbose ? SAY_MORE : SAY_NORMAL);
    s->has_prompt = opt_given(table, &s->n_prompt);
    s->has_seed = opt_given(table, &s->seed);
    snprintf(s->seed_text, sizeof s->seed_text, "%lld", s->seed);
    TRY(check(s));
    TRY(policy_plugins_load(&s->plugins));
    job j = {.set = s, .closed = strcmp(s->mode, "closed") == 0};
    outfile csv = {0};
    j.command = opt_command("verify", table, &s->files);
    int code = j.command ? begin_files(s, &csv) : ERR_DATA;
    if (!code) code = work(&j);
    if (!code) code = write_truth(&j, &csv);
    if (!code) code = outfile_commit(&csv);
    if (!code) close_with(&j);
    if (!code && s->calibrate) code = write_calibration(&j); /* where that fails the reruns are not lost */
    outfile_abort(&csv);
    release(&j);
    return code;
}

int cmd_verify(int argc, char **argv) {
    settings s = {.mode = "open", .n_prompt = -1, .compute = PLUGIN_CHOICE};
    const opt table[] = {
        {"output", 'o', OPT_FILE, false, &s.out, "TRUTH.csv", "where the true costs go", 0, 0},
        {"policy", 'p', OPT_LIST, true, &s.specs, "SPEC", "a policy, e.g. 'rmm(lag=0|8|64)'; may repeat", 0, 0},
        POLICY_PLUGIN_OPTION(s.plugins),
        {"budget", 'b', OPT_TEXT, true, &s.budgets, "LIST", "budgets: tokens or shares, e.g. 64,128,25%", 0, 0},
        {"lag", 'L', OPT_TEXT, true, &s.lags, "LIST", "lags: 8,16 or 0:64:8 or 0:256:x2 or budget/2", 0, 0},
        {"schedule", 0, OPT_TEXT, true, &s.schedule, "step|every:P|watermark:F|block:N|prompt",
         "when to evict (default: as the policy says, or step)", 0, 0},
        {"unit", 0, OPT_CHOICE, true, &s.unit, "head|layer|model", "what evicts on its own", 0, 0},
        {"pending", 0, OPT_CHOICE, true, &s.pending, "charged|free|both",
         "do entries held for the lag count in the budget", 0, 0},
        {"prompt", 0, OPT_INT, true, &s.n_prompt, "N", "steps that see everything (default: the trace's)", 0, 1 << 30},
        {"pick", 0, OPT_INT, true, &s.pick, "N", "rerun N rows of RESULTS.csv, spread over families, budgets, lags", 1,
         1 << 20},
        {"from-lifetimes", 0, OPT_FILE, true, &s.from_lifetimes, "FILE.h5", "rerun with these lifetimes", 0, 0},
        {"mode", 0, OPT_CHOICE, true, &s.mode, "open|closed",
         "decide from the full run's rows, or from the evicting run's own (default open)", 0, 0},
        {"calibrate", 0, OPT_FILE, false, &s.calibrate, "FILE.json",
         "fit the estimates of loss to these reruns, for sim --calibration", 0, 0},
        PLUGIN_OPTIONS(s.compute),
        {"threads", 0, OPT_INT, false, &s.threads, "N", "worker threads (default: all processors)", 1, 4096},
        {"seed", 0, OPT_INT, true, &s.seed, "N", "of policies that draw random numbers", 0, 1LL << 53},
        OPT_GRID(s.grid),
        {"force", 0, OPT_FLAG, false, &s.force, NULL, "replace existing output files", 0, 0},
        {"quiet", 'q', OPT_FLAG, false, &s.quiet, NULL, "say nothing but errors", 0, 0},
        {"verbose", 'v', OPT_FLAG, false, &s.verbose, NULL, "explain", 0, 0},
        {.name = NULL}};
    int code = verify_with(table, &s, argc, argv);
    opt_list_free(&s.files);
    opt_list_free(&s.specs);
    opt_file_free(&s.grid);
    opt_list_free(&s.plugins);
    return code;
}
