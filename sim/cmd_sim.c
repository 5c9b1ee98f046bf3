/* kvlag sim: replay configurations over traces and write what they cost. */
#include "base/err.h"
#include "base/mem.h"
#include "base/options.h"
#include "base/outfile.h"
#include "base/progress.h"
#include "sim/results.h"
#include "sim/sim.h"
#include "traces/lifetimes.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One row to write: which computed result it takes. Rows that resolve to the same configuration share one. */
typedef struct row {
    size_t trace, config; /* trace in the call; number of the configuration in lifetimes files */
    size_t result;        /* in job.result */
    results_key key;
} row;

typedef struct job {
    /* the command line */
    opt_list traces, specs;
    const char *out, *budgets, *lags, *schedule, *unit, *pending, *metrics, *attention, *lifetimes, *from_lifetimes,
        *calibration;
    long long n_prompt, memory, threads, seed;
    bool force, quiet, verbose;
    char seed_text[24];
    char *command;

    trace **trace;
    sim_flags flags;
    sim_asks asks;
    size_t *number; /* [asks.n][sequences] see number_configs; NULL where no lifetimes are written */
    sweep_options options;
    calibration scale;
    pool *pool;
    lifetimes *given;
    lifetimes_writer *lifetimes_out;

    row *rows;
    size_t n_rows, row_capacity;
    sweep_result *results;
    size_t n_results, result_capacity;
    text skipped; /* "# skipped: ..." lines */
    sweep_cost cost;

    /* the sequence being swept, for the lifetimes hand-over */
    size_t first_row, first_result;
} job;

/* ---- the command line ------------------------------------------------------------------------------------------- */

static int parse(job *j, int argc, char **argv) {
    const opt table[] = {
        {"output", 'o', OPT_FILE, false, &j->out, "FILE.csv", "where results go (and FILE.blocks.h5 beside it)", 0, 0},
        {"policy", 'p', OPT_LIST, true, &j->specs, "SPEC", "a policy, e.g. 'rmm(lag=0|8|64)'; may repeat", 0, 0},
        {"budget", 'b', OPT_TEXT, true, &j->budgets, "LIST", "budgets: tokens or shares, e.g. 64,128,25%", 0, 0},
        {"lag", 'L', OPT_TEXT, true, &j->lags, "LIST", "lags: 8,16 or 0:64:8 or 0:256:x2 or budget/2", 0, 0},
        {"schedule", 0, OPT_TEXT, true, &j->schedule, "S", "step, every:P, watermark:f, block:n, prompt", 0, 0},
        {"unit", 0, OPT_CHOICE, true, &j->unit, "head|layer", "what evicts on its own", 0, 0},
        {"pending", 0, OPT_CHOICE, true, &j->pending, "charged|free|both",
         "do entries held for the lag count in the budget", 0, 0},
        {"prompt", 0, OPT_INT, true, &j->n_prompt, "N", "steps that see everything (default: the trace's)", 0, 1 << 30},
        {"metrics", 0, OPT_TEXT, true, &j->metrics, "LIST", "lost_mass, loss, out_err, out_err=exact", 0, 0},
        {"attention", 0, OPT_CHOICE, true, &j->attention, "dense|factored", "which stored form to read", 0, 0},
        {"lifetimes", 0, OPT_FILE, false, &j->lifetimes, "FILE.h5", "write when each entry left", 0, 0},
        {"from-lifetimes", 0, OPT_FILE, true, &j->from_lifetimes, "FILE.h5",
         "price these lifetimes instead of policies", 0, 0},
        {"calibration", 0, OPT_FILE, true, &j->calibration, "FILE.json",
         "what verify --calibrate wrote: scale and error bar", 0, 0},
        {"memory", 0, OPT_SIZE, false, &j->memory, "N", "bound on memory, e.g. 512M (default 1G)", 1 << 20, 1LL << 46},
        {"threads", 0, OPT_INT, false, &j->threads, "N", "worker threads (default: all processors)", 1, 4096},
        {"seed", 0, OPT_INT, true, &j->seed, "N", "of policies that draw random numbers", 0, 1LL << 53},
        {"force", 0, OPT_FLAG, false, &j->force, NULL, "replace existing output files", 0, 0},
        {"quiet", 'q', OPT_FLAG, false, &j->quiet, NULL, "say nothing but errors", 0, 0},
        {"verbose", 'v', OPT_FLAG, false, &j->verbose, NULL, "explain", 0, 0},
        {.name = NULL},
    };
    TRY(opt_parse(table, argc, argv, &j->traces));
    if (!opt_given(table, &j->n_prompt)) j->n_prompt = -1;
    if (opt_given(table, &j->seed)) snprintf(j->seed_text, sizeof j->seed_text, "%lld", j->seed);
    j->command = opt_command("sim", table, &j->traces);
    return j->command ? 0 : ERR_DATA;
}

static int check_command(const job *j) {
    if (!j->traces.n) return err_set(ERR_USAGE, "sim: no TRACE given (kvlag help sim)");
    if (!j->out) return err_set(ERR_USAGE, "sim: -o FILE.csv is missing");
    if (j->lifetimes && j->traces.n > 1) return err_set(ERR_USAGE, "--lifetimes takes one trace, got %zu", j->traces.n);
    if (!j->from_lifetimes) return 0;
    if (j->traces.n > 1) return err_set(ERR_USAGE, "--from-lifetimes takes one trace, got %zu", j->traces.n);
    if (j->specs.n || j->budgets || j->lags || j->schedule || j->unit || j->pending)
        return err_set(
            ERR_USAGE,
            "--from-lifetimes brings its configurations: -p, -b, -L, --schedule, --unit and --pending do not apply");
    return 0;
}

static bool can_out_err(const trace *t) {
    bool can = trace_has_wo(t);
    for (size_t seq = 0; seq < trace_n_sequences(t); seq++) can &= trace_get_sequence(t, seq)->has_v;
    return can;
}

/* Blocks files have one number of samples for all rows. */
static int check_samples(const job *j) {
    int32_t samples = trace_get_sequence(j->trace[0], 0)->n_fisher;
    for (size_t i = 0; i < j->traces.n && j->options.loss; i++)
        for (size_t seq = 0; seq < trace_n_sequences(j->trace[i]); seq++)
            if (trace_get_sequence(j->trace[i], seq)->n_fisher != samples)
                return err_set(ERR_USAGE, "%s has %d samples in grad/fisher, %s has %d: price them in separate calls",
                               trace_path(j->trace[0]), samples, trace_path(j->trace[i]),
                               trace_get_sequence(j->trace[i], seq)->n_fisher);
    return 0;
}

static bool can_loss(const trace *t) {
    for (size_t seq = 0; seq < trace_n_sequences(t); seq++) {
        const trace_sequence *s = trace_get_sequence(t, seq);
        if (!s->has_grad_loss || !s->has_v) return false;
    }
    return true;
}

static int choose_metrics(job *j) {
    if (!j->metrics) {
        j->options.loss = j->options.out_err = true;
        for (size_t i = 0; i < j->traces.n; i++) {
            j->options.loss &= can_loss(j->trace[i]);
            j->options.out_err &= can_out_err(j->trace[i]);
        }
        j->options.out_err &= !j->options.loss;
        return 0;
    }
    for (const char *s = j->metrics;; s++) {
        size_t n = strcspn(s, ",");
        if (n == 4 && strncmp(s, "loss", n) == 0) j->options.loss = true;
        else if (n == 7 && strncmp(s, "out_err", n) == 0) j->options.out_err = true;
        else if (n == 13 && strncmp(s, "out_err=exact", n) == 0) j->options.out_err = j->options.out_err_exact = true;
        else if (n != 9 || strncmp(s, "lost_mass", n) != 0)
            return err_set(ERR_USAGE, "--metrics: '%.*s' is not one of lost_mass, loss, out_err, out_err=exact", (int)n,
                           s);
        s += n;
        if (!*s) return 0;
    }
}

/* A line for what is missing, once the call is known to be a good one. */
static void say_what_is_left_out(const job *j) {
    if (j->metrics || j->options.out_err || j->options.loss) return;
    size_t i = 0;
    while (can_out_err(j->trace[i])) i++;
    say("out_err is left out: %s has no attn/v or model/wo", trace_path(j->trace[i]));
}

/* ---- traces ----------------------------------------------------------------------------------------------------- */

static int open_traces(job *j) {
    j->trace = mem_new(j->traces.n, sizeof *j->trace, "traces");
    if (!j->trace) return ERR_DATA;
    for (size_t i = 0; i < j->traces.n; i++) {
        TRY(trace_open(j->traces.item[i], &j->trace[i]));
        for (size_t k = 0; k < i; k++)
            if (strcmp(trace_label(j->trace[i]), trace_label(j->trace[k])) == 0 &&
                strcmp(trace_hash(j->trace[i]), trace_hash(j->trace[k])) != 0)
                return err_set(ERR_USAGE, "%s and %s have the same name but different content; rename one",
                               trace_path(j->trace[k]), trace_path(j->trace[i]));
    }
    return 0;
}

static bool seen_before(const job *j, size_t index) {
    for (size_t k = 0; k < index; k++)
        if (strcmp(trace_label(j->trace[k]), trace_label(j->trace[index])) == 0) return true;
    return false;
}

static int32_t prompt_of(const job *j, const trace_sequence *s) {
    return j->n_prompt >= 0 ? (int32_t)j->n_prompt : s->n_prompt;
}

static int check_sequence(const job *j, const trace *t, size_t seq) {
    const trace_sequence *s = trace_get_sequence(t, seq);
    if (j->n_prompt > s->n_tokens)
        return err_set(ERR_USAGE, "--prompt %lld: sequence %zu of %s has %d tokens", j->n_prompt, seq, trace_path(t),
                       s->n_tokens);
    return sweep_check_sequence(t, seq, prompt_of(j, s), &j->options);
}

/* ---- configurations of one sequence ----------------------------------------------------------------------------- */

/* Configurations to compute, without repetition, and the rows that want them. */
typedef struct plan {
    sim_config *config;
    size_t n, capacity;
} plan;

static int add_row(job *j, size_t trace_index, size_t config, size_t result, row **out) {
    TRY(mem_grow((void **)&j->rows, &j->row_capacity, j->n_rows + 1, sizeof *j->rows, "rows"));
    *out = &j->rows[j->n_rows++];
    **out = (row){.trace = trace_index, .config = config, .result = result};
    return 0;
}

/* A comment is one line, whatever the name of a file holds. */
static int end_comment(text *t, size_t from) {
    for (size_t i = from; i < t->n; i++)
        if ((unsigned char)t->data[i] < 0x20) t->data[i] = '?';
    return text_add(t, "\n");
}

/* A point that cannot run is an error where it was asked for alone ... */
static int refuse(const sim_ask *ask, int code) {
    char *name = sim_ask_name(ask);
    if (!name) return ERR_DATA;
    err_prefix(code, "%s", name);
    mem_free(name);
    return code;
}

/* ... and a line where it is one of many. */
static int skip(job *j, const sim_ask *ask, const char *label, size_t seq) {
    char *name = sim_ask_name(ask);
    if (!name) return ERR_DATA;
    say("skipped %s: %s", name, err_message());
    size_t from = j->skipped.n;
    int code = text_add(&j->skipped, "# skipped: %s seq %zu %s: %s", label, seq, name, err_message());
    mem_free(name);
    return code ? code : end_comment(&j->skipped, from);
}

/* Can this ask run in this sequence? *c is to be freed either way. */
static int resolve_ask(const job *j, const sim_ask *ask, const trace *t, size_t seq, sim_config *c) {
    const trace_sequence *s = trace_get_sequence(t, seq);
    TRY(sim_config_resolve(ask, &j->flags, s->n_tokens, s->n_prompt, c));
    return ask->optional ? sweep_check_policy(t, seq, c) : 0;
}

/* An error if the ask must run in this sequence and cannot. */
static int check_ask(const job *j, const sim_ask *ask, const trace *t, size_t seq) {
    sim_config c;
    int code = resolve_ask(j, ask, t, seq, &c);
    if (code) code = ask->in_grid ? 0 : refuse(ask, code);
    else if (!ask->optional) code = sweep_check_policy(t, seq, &c);
    sim_config_free(&c);
    return code;
}

/* Find what cannot work before any work is done. */
static int check_asks(const job *j) {
    for (size_t i = 0; i < j->traces.n; i++)
        for (size_t seq = 0; seq < trace_n_sequences(j->trace[i]); seq++) {
            TRY(check_sequence(j, j->trace[i], seq));
            for (size_t a = 0; a < j->asks.n; a++) TRY(check_ask(j, &j->asks.ask[a], j->trace[i], seq));
        }
    return 0;
}

/* The numbers of one ask's configurations, from *next on: one for all sequences in which it resolves to the same
 * values ("budget/2" of a share differs with the length). */
static int number_ask(const job *j, const sim_ask *ask, size_t n_seq, size_t *number, size_t *next) {
    sim_config *c = mem_new(n_seq, sizeof *c, "configurations");
    if (!c) return ERR_DATA;
    for (size_t seq = 0; seq < n_seq; seq++) {
        if (resolve_ask(j, ask, j->trace[0], seq, &c[seq])) {
            sim_config_free(&c[seq]);
            continue;
        }
        size_t k = 0;
        while (!c[k].resolved || strcmp(c[k].resolved, c[seq].resolved) != 0) k++;
        number[seq] = k < seq ? number[k] : (*next)++;
    }
    for (size_t seq = 0; seq < n_seq; seq++) sim_config_free(&c[seq]);
    mem_free(c);
    return 0;
}

/* A lifetimes file numbers its configurations in the order of the asks, without gaps, whatever is skipped. */
static int number_configs(job *j) {
    size_t n_seq = trace_n_sequences(j->trace[0]), next = 0;
    j->number = mem_new(j->asks.n * n_seq, sizeof *j->number, "configurations");
    if (!j->number) return ERR_DATA;
    for (size_t a = 0; a < j->asks.n; a++) TRY(number_ask(j, &j->asks.ask[a], n_seq, j->number + a * n_seq, &next));
    return 0;
}

/* What a trace cannot give is left out of the default set with one line a policy, not one a point. */
static int leave_out(job *j, const sim_ask *ask, const char *label, size_t seq) {
    text line = {0};
    const char *why = strstr(err_message(), ": "); /* behind the trace's path */
    int code = text_add(&line, "# skipped: %s seq %zu ", label, seq);
    if (!code) code = sim_ask_spec(ask, &line);
    if (!code) code = text_add(&line, "%s", why ? why : ": ?");
    if (!code) code = end_comment(&line, 0);
    if (!code && !(j->skipped.data && strstr(j->skipped.data, line.data))) {
        say("left out %s: %s", ask->policy->name, err_message());
        code = text_add_bytes(&j->skipped, line.data, line.n);
    }
    text_free(&line);
    return code;
}

static int plan_ask(job *j, plan *p, size_t trace_index, size_t seq, size_t a) {
    trace *t = j->trace[trace_index];
    const sim_ask *ask = &j->asks.ask[a];
    sim_config c;
    int code = resolve_ask(j, ask, t, seq, &c);
    if (code) {
        bool is_lacking = c.is_resolved;
        sim_config_free(&c);
        return is_lacking ? leave_out(j, ask, trace_label(t), seq) : skip(j, ask, trace_label(t), seq);
    }
    size_t k = 0;
    while (k < p->n && !sim_config_same(&p->config[k], &c)) k++;
    row *r;
    code = add_row(j, trace_index, j->number ? j->number[a * trace_n_sequences(t) + seq] : 0, j->first_result + k, &r);
    if (!code) code = results_key_of(trace_label(t), seq, &c, &r->key);
    if (!code && k == p->n) code = mem_grow((void **)&p->config, &p->capacity, p->n + 1, sizeof c, "configurations");
    if (code || k < p->n) sim_config_free(&c);
    else p->config[p->n++] = c;
    return code;
}

/* ---- sweeping --------------------------------------------------------------------------------------------------- */

/* Write a finished configuration's lifetimes for every row that shares it. */
static int write_lifetimes(void *context, size_t index, const sweep_result *result) {
    job *j = context;
    if (!j->lifetimes_out) return 0;
    const trace_model *m = trace_get_model(j->trace[0]);
    for (size_t i = j->first_row; i < j->n_rows; i++) {
        const row *r = &j->rows[i];
        if (r->result != j->first_result + index) continue;
        const results_key *k = &r->key;
        lifetimes_config c = {k->policy, k->spec,     k->budget_asked, k->lag,
                              k->unit,   k->schedule, k->pending,      k->resolved};
        lifetimes_seq s = {k->budget, k->hold, k->sinks};
        bool first = true;
        for (size_t b = 0; b < j->first_row; b++) first &= j->rows[b].config != r->config;
        if (first) TRY(lifetimes_write_config(j->lifetimes_out, r->config, &c));
        TRY(lifetimes_write_seq(j->lifetimes_out, r->config, k->seq, &s, m->n_layer, m->n_kv_head,
                                trace_get_sequence(j->trace[0], k->seq)->n_tokens, result->evict_at));
    }
    return 0;
}

static int sweep(job *j, size_t trace_index, size_t seq, const sim_config *configs, size_t n,
                 const sweep_given *given) {
    sweep_cost cost;
    if (n == 0) return 0;
    TRY(mem_grow((void **)&j->results, &j->result_capacity, j->first_result + n, sizeof *j->results, "results"));
    j->n_results = j->first_result + n;
    TRY(sweep_sequence(j->trace[trace_index], seq, configs, n, given, &j->options, j->pool,
                       j->results + j->first_result, &cost));
    if (cost.planned > j->cost.planned) j->cost = cost;
    return 0;
}

static int sweep_asks(job *j, size_t trace_index, size_t seq) {
    plan p = {0};
    int code = 0;
    for (size_t a = 0; a < j->asks.n && !code; a++) code = plan_ask(j, &p, trace_index, seq, a);
    if (!code) code = sweep(j, trace_index, seq, p.config, p.n, NULL);
    for (size_t i = 0; i < p.n; i++) sim_config_free(&p.config[i]);
    mem_free(p.config);
    return code;
}

/* ---- lifetimes that were handed in ------------------------------------------------------------------------------ */

static int read_given(void *context, size_t index, int32_t *out) {
    const job *j = context;
    const trace_model *m = trace_get_model(j->trace[0]);
    const row *r = &j->rows[j->first_row + index];
    return lifetimes_read(j->given, r->config, r->key.seq, m->n_layer, m->n_kv_head,
                          trace_get_sequence(j->trace[0], r->key.seq)->n_tokens, out);
}

static int sweep_given_seq(job *j, size_t seq) {
    size_t n = lifetimes_n_configs(j->given), k = 0;
    int32_t n_prompt = prompt_of(j, trace_get_sequence(j->trace[0], seq));
    sim_config *configs = mem_new(n, sizeof *configs, "configurations");
    int code = configs ? 0 : ERR_DATA;
    for (size_t i = 0; i < n && !code; i++) {
        row *r;
        if (!lifetimes_get_seq(j->given, i, seq)) continue;
        configs[k] = (sim_config){.n_prompt = n_prompt};
        code = add_row(j, 0, i, j->first_result + k, &r);
        if (!code) code = results_key_of_given(trace_label(j->trace[0]), j->given, i, seq, n_prompt, &r->key);
        k++;
    }
    sweep_given given = {.read = read_given, .context = j};
    if (!code && k) code = check_sequence(j, j->trace[0], seq);
    if (!code) code = sweep(j, 0, seq, configs, k, &given);
    mem_free(configs);
    return code;
}

/* ---- writing ---------------------------------------------------------------------------------------------------- */

static const char *form_read(const job *j, size_t trace_index) {
    if (j->options.form != TRACE_AUTO) return j->attention;
    return trace_get_sequence(j->trace[trace_index], 0)->has_factored ? "factored" : "dense";
}

/* What differs between the reruns behind the calibration and a trace; "" if nothing does. */
static void mismatch(const job *j, size_t trace_index, char *out, size_t size) {
    const trace *t = j->trace[trace_index];
    const char *model = trace_get_model(t)->name;
    int32_t n_tokens = trace_get_sequence(t, 0)->n_tokens;
    *out = 0;
    if (strcmp(model, j->scale.model) != 0)
        snprintf(out, size, "made with model '%s', not '%s'", j->scale.model, model);
    else if (n_tokens != j->scale.n_tokens)
        snprintf(out, size, "made with %d tokens, not %d", j->scale.n_tokens, n_tokens);
}

static int compose_calibration(const job *j, text *csv) {
    const calibration *c = &j->scale;
    if (!j->options.loss) return text_add(csv, "# calibration: none\n");
    if (c->is_default) return text_add(csv, "# calibration: uncalibrated (scale 1.5, spread a factor 1.5)\n");
    size_t from = csv->n;
    TRY(text_add(csv, "# calibration: %s, model %s, %d tokens, budgets %s, %d reruns, scale %.4g, spread a factor %.4g",
                 text_base_name(j->calibration), c->model, c->n_tokens, c->budgets, c->n, exp(c->log_c), exp(c->s)));
    TRY(end_comment(csv, from));
    for (size_t i = 0; i < j->traces.n; i++) {
        char why[512];
        mismatch(j, i, why, sizeof why);
        if (!*why || seen_before(j, i)) continue;
        say("calibration %s: %s (%s)", j->calibration, why, trace_label(j->trace[i]));
        from = csv->n;
        TRY(text_add(csv, "# calibration mismatch: %s: %s", trace_label(j->trace[i]), why));
        TRY(end_comment(csv, from));
    }
    return 0;
}

static int compose(const job *j, text *csv) {
    TRY(text_add(csv, "# kvlag results v1\n"));
    size_t from = csv->n;
    TRY(text_add(csv, "# command: %s", j->command));
    TRY(end_comment(csv, from));
    for (size_t i = 0; i < j->traces.n; i++) {
        if (seen_before(j, i)) continue;
        from = csv->n;
        TRY(text_add(csv, "# trace: %s %s attention=%s", trace_label(j->trace[i]), trace_hash(j->trace[i]),
                     form_read(j, i)));
        TRY(end_comment(csv, from));
    }
    TRY(compose_calibration(j, csv));
    TRY(text_add(csv, "# positions: original positions, open loop\n"));
    int64_t floored = 0;
    for (size_t i = 0; i < j->n_rows; i++) floored += j->results[j->rows[i].result].floored;
    if (floored)
        TRY(text_add(csv, "# floored: %lld times a head kept less than 1e-6 of its mass\n", (long long)floored));
    TRY(text_add_bytes(csv, j->skipped.data, j->skipped.n));
    TRY(results_add_header(csv));
    for (size_t i = 0; i < j->n_rows; i++) {
        const row *r = &j->rows[i];
        int32_t n_tokens = trace_get_sequence(j->trace[r->trace], r->key.seq)->n_tokens;
        TRY(results_add_row(csv, &r->key, &j->results[r->result], &j->options, &j->scale, n_tokens));
    }
    return 0;
}

static int write_blocks(const job *j, blocks_writer *b) {
    for (size_t i = 0; i < j->n_rows; i++) {
        const sweep_result *r = &j->results[j->rows[i].result];
        const trace_model *m = trace_get_model(j->trace[j->rows[i].trace]);
        blocks_row block = {
            .lost_mass = r->block_lost_mass, .steps = r->block_steps, .head_lost_mass = r->head_lost_mass};
        if (j->options.loss) {
            block.first = r->block_first;
            block.fisher = r->block_fisher;
            block.head_first = r->head_first;
            block.head_fisher = r->head_fisher;
        }
        TRY(blocks_write_row(b, i, m->n_layer, m->n_head, &block));
    }
    return 0;
}

static int write_csv(const job *j, const outfile *f) {
    text csv = {0};
    int code = compose(j, &csv);
    if (!code) code = outfile_write(f, csv.data, csv.n);
    text_free(&csv);
    return code;
}

static int finish_lifetimes(job *j) {
    lifetimes_writer *w = j->lifetimes_out;
    j->lifetimes_out = NULL;
    return w ? lifetimes_writer_finish(w) : 0;
}

/* The blocks file is opened last, since its size is known last. That it can be is made sure first. */
static int try_blocks(const job *j, const char *const *inputs, int n_inputs) {
    outfile f;
    char *path = results_blocks_path(j->out);
    int code = path ? outfile_begin(&f, path, j->force, inputs, n_inputs) : ERR_DATA;
    if (!code) outfile_abort(&f);
    mem_free(path);
    return code;
}

static int open_blocks(const job *j, blocks_writer **out) {
    int n_layer = 0, n_head = 0, n_fisher = j->options.loss ? trace_get_sequence(j->trace[0], 0)->n_fisher : 0;
    for (size_t i = 0; i < j->traces.n; i++) {
        const trace_model *m = trace_get_model(j->trace[i]);
        if (m->n_layer > n_layer) n_layer = m->n_layer;
        if (m->n_head > n_head) n_head = m->n_head;
    }
    char *path = results_blocks_path(j->out);
    if (!path) return ERR_DATA;
    int code = blocks_writer_new(path, j->force, j->n_rows, n_layer, n_head, n_fisher, j->options.loss, out);
    mem_free(path);
    return code;
}

/* What may still fail comes first, and the CSV, which vouches for the others, appears last. */
static int write_results(job *j, outfile *csv) {
    blocks_writer *blocks;
    TRY(write_csv(j, csv));
    TRY(open_blocks(j, &blocks));
    int code = write_blocks(j, blocks);
    if (!code) code = finish_lifetimes(j);
    if (code) {
        blocks_writer_abort(blocks);
        return code;
    }
    TRY(blocks_writer_finish(blocks));
    return outfile_commit(csv);
}

/* ---- the command ------------------------------------------------------------------------------------------------ */

static int sweep_all(job *j) {
    for (size_t i = 0; i < j->traces.n; i++) {
        if (seen_before(j, i)) continue;
        for (size_t seq = 0; seq < trace_n_sequences(j->trace[i]); seq++) {
            j->first_row = j->n_rows;
            j->first_result = j->n_results;
            TRY(j->given ? sweep_given_seq(j, seq) : sweep_asks(j, i, seq));
        }
    }
    return j->n_rows ? 0 : err_set(ERR_USAGE, "no configuration is left to run");
}

static int prepare(job *j) {
    say_level(j->quiet ? SAY_QUIET : j->verbose ? SAY_MORE : SAY_NORMAL);
    TRY(check_command(j));
    j->flags =
        (sim_flags){j->budgets,          j->lags, j->schedule, j->unit, j->pending, *j->seed_text ? j->seed_text : NULL,
                    (int32_t)j->n_prompt};
    if (!j->from_lifetimes) TRY(sim_asks_build(j->specs.item, j->specs.n, &j->flags, &j->asks));
    TRY(pool_new((int)j->threads, &j->pool));
    TRY(open_traces(j));
    j->options = (sweep_options){
        .keep_lifetimes = j->lifetimes != NULL, .memory = (size_t)j->memory, .done = write_lifetimes, .context = j};
    if (j->attention) j->options.form = strcmp(j->attention, "dense") == 0 ? TRACE_DENSE : TRACE_FACTORED;
    TRY(choose_metrics(j));
    TRY(check_samples(j));
    calibration_none(&j->scale);
    if (j->calibration) {
        if (!j->options.loss)
            return err_set(ERR_USAGE,
                           "--calibration: no loss is estimated (--metrics loss, and a trace with gradients)");
        TRY(calibration_read(j->calibration, &j->scale));
    }
    TRY(j->from_lifetimes ? results_open_given(j->from_lifetimes, j->trace[0], &j->given) : check_asks(j));
    if (j->lifetimes && !j->from_lifetimes) TRY(number_configs(j));
    say_what_is_left_out(j);
    return 0;
}

static int work(job *j, outfile *csv) {
    double start = progress_seconds();
    const char *inputs[j->traces.n + 2];
    int n_inputs = 0;
    for (size_t i = 0; i < j->traces.n; i++) inputs[n_inputs++] = j->traces.item[i];
    if (j->from_lifetimes) inputs[n_inputs++] = j->from_lifetimes;
    if (j->calibration) inputs[n_inputs++] = j->calibration;
    TRY(outfile_begin(csv, j->out, j->force, inputs, n_inputs));
    if (j->lifetimes)
        TRY(lifetimes_writer_new(j->lifetimes, j->force, inputs, n_inputs, trace_label(j->trace[0]),
                                 trace_hash(j->trace[0]), &j->lifetimes_out));
    TRY(try_blocks(j, inputs, n_inputs));
    TRY(sweep_all(j));
    TRY(write_results(j, csv));
    double seconds = progress_seconds() - start;
    say("%s: %zu rows from %zu configurations in %.2f s (%.3f s each), memory planned %.1f MiB (%.1f fixed, up to %.2f "
        "a configuration, %d pass%s)",
        j->out, j->n_rows, j->n_results, seconds, seconds / (double)j->n_results, (double)j->cost.planned / 1048576,
        (double)j->cost.fixed / 1048576, (double)j->cost.per_config / 1048576, j->cost.passes,
        j->cost.passes == 1 ? "" : "es");
    return 0;
}

static void release(job *j) {
    for (size_t i = 0; i < j->n_rows; i++) results_key_free(&j->rows[i].key);
    for (size_t i = 0; i < j->n_results; i++) sweep_result_free(&j->results[i]);
    for (size_t i = 0; j->trace && i < j->traces.n; i++) trace_close(j->trace[i]);
    if (j->lifetimes_out) lifetimes_writer_abort(j->lifetimes_out);
    if (j->given) lifetimes_close(j->given);
    sim_asks_free(&j->asks);
    pool_free(j->pool);
    text_free(&j->skipped);
    mem_free(j->number);
    mem_free(j->rows);
    mem_free(j->results);
    mem_free(j->trace);
    mem_free(j->command);
    opt_list_free(&j->traces);
    opt_list_free(&j->specs);
}

int cmd_sim(int argc, char **argv) {
    job j = {.memory = 1LL << 30};
    outfile csv = {0};
    int code = parse(&j, argc, argv);
    if (!code) code = prepare(&j);
    if (!code) code = work(&j, &csv);
    outfile_abort(&csv);
    release(&j);
    return code;
}
