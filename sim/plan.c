#include "sim/plan.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/progress.h"

#include <string.h>

/* ---- checks ----------------------------------------------------------------------------------------------------- */

static int32_t prompt_of(const question *q, const trace_sequence *s) {
    return q->flags.n_prompt >= 0 ? q->flags.n_prompt : s->n_prompt;
}

static int check_sequence(const question *q, const trace *t, size_t seq) {
    const trace_sequence *s = trace_get_sequence(t, seq);
    if (q->flags.n_prompt > s->n_tokens)
        return err_set(ERR_USAGE, "--prompt %d: sequence %zu of %s has %d tokens", q->flags.n_prompt, seq,
                       trace_path(t), s->n_tokens);
    return sweep_check_sequence(t, seq, prompt_of(q, s), &q->options);
}

/* A point that cannot run is an error where it was asked for alone ... */
static int refuse(const sim_ask *ask, int code) {
    char *name = sim_ask_name(ask);
    if (!name) return ERR_DATA;
    err_prefix(code, "%s", name);
    mem_free(name);
    return code;
}

/* Can this ask run in this sequence? *c is to be freed either way. */
static int resolve_ask(const question *q, const sim_ask *ask, const trace *t, size_t seq, sim_config *c) {
    const trace_sequence *s = trace_get_sequence(t, seq);
    TRY(sim_config_resolve(ask, &q->flags, s->n_tokens, s->n_prompt, c));
    return ask->optional ? sweep_check_policy(t, seq, c) : 0;
}

/* An error if the ask must run in this sequence and cannot. */
static int check_ask(const question *q, const sim_ask *ask, const trace *t, size_t seq) {
    sim_config c;
    int code = resolve_ask(q, ask, t, seq, &c);
    if (code) code = ask->in_grid ? 0 : refuse(ask, code);
    else if (!ask->optional) code = sweep_check_policy(t, seq, &c);
    sim_config_free(&c);
    return code;
}

static bool is_given(const question *q, size_t seq) {
    for (size_t i = 0; i < lifetimes_n_configs(q->given); i++)
        if (lifetimes_get_seq(q->given, i, seq)) return true;
    return false;
}

/* The requests themselves were checked as they were made. */
static int check_requests(const question *q) {
    for (size_t i = 0; i < q->requests->n; i++) TRY(check_sequence(q, q->trace[0], q->requests->item[i].seq));
    return 0;
}

int question_check(const question *q) {
    if (q->requests) return check_requests(q);
    for (size_t i = 0; i < q->n_traces; i++)
        for (size_t seq = 0; seq < trace_n_sequences(q->trace[i]); seq++) {
            if (!q->given || is_given(q, seq)) TRY(check_sequence(q, q->trace[i], seq));
            for (size_t a = 0; a < q->asks.n; a++) TRY(check_ask(q, &q->asks.ask[a], q->trace[i], seq));
        }
    return 0;
}

/* ---- numbers in a lifetimes file -------------------------------------------------------------------------------- */

/* The numbers of one ask's configurations, from *next on: one for all sequences in which it resolves to the same
 * values ("budget/2" of a share differs with the length). */
static int number_ask(const question *q, const sim_ask *ask, size_t n_seq, size_t *number, size_t *next) {
    sim_config *c = mem_new(n_seq, sizeof *c, "configurations");
    if (!c) return ERR_DATA;
    for (size_t seq = 0; seq < n_seq; seq++) {
        if (resolve_ask(q, ask, q->trace[0], seq, &c[seq])) {
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

/* A lifetimes file numbers its configurations in the order of the asks, without gaps, whatever is skipped:
 * *out [asks.n][sequences], owned by the caller. */
static int number_configs(const question *q, size_t **out) {
    size_t n_seq = trace_n_sequences(q->trace[0]), next = 0;
    *out = mem_new(q->asks.n * n_seq, sizeof **out, "configurations");
    if (!*out) return ERR_DATA;
    for (size_t a = 0; a < q->asks.n; a++) TRY(number_ask(q, &q->asks.ask[a], n_seq, *out + a * n_seq, &next));
    return 0;
}

/* ---- what is left out ------------------------------------------------------------------------------------------- */

int plan_end_comment(text *t, size_t from) {
    for (size_t i = from; i < t->n; i++)
        if ((unsigned char)t->data[i] < 0x20) t->data[i] = '?';
    return text_add(t, "\n");
}

/* ... and a line where it is one of many. */
static int skip(plan *p, const sim_ask *ask, const char *label, size_t seq) {
    char *name = sim_ask_name(ask);
    if (!name) return ERR_DATA;
    say("skipped %s: %s", name, err_message());
    size_t from = p->skipped.n;
    int code = text_add(&p->skipped, "# skipped: %s seq %zu %s: %s", label, seq, name, err_message());
    mem_free(name);
    return code ? code : plan_end_comment(&p->skipped, from);
}

/* What a trace cannot give is left out of the default set with one line a policy, not one a point. */
static int leave_out(plan *p, const sim_ask *ask, const char *label, size_t seq) {
    text line = {0};
    const char *why = strstr(err_message(), ": "); /* behind the trace's path */
    int code = text_add(&line, "# skipped: %s seq %zu ", label, seq);
    if (!code) code = sim_ask_spec(ask, &line);
    if (!code) code = text_add(&line, "%s", why ? why : ": ?");
    if (!code) code = plan_end_comment(&line, 0);
    if (!code && !(p->skipped.data && strstr(p->skipped.data, line.data))) {
        say("left out %s: %s", ask->policy->name, err_message());
        code = text_add_bytes(&p->skipped, line.data, line.n);
    }
    text_free(&line);
    return code;
}

/* ---- rows and units --------------------------------------------------------------------------------------------- */

/* The configurations of one sequence, without repetition. */
typedef struct found {
    sim_config *config;
    size_t n, capacity;
} found;

static int add_row(plan *p, size_t trace_index, size_t config, size_t unit, plan_row **out) {
    TRY(mem_grow((void **)&p->row, &p->row_capacity, p->n_rows + 1, sizeof *p->row, "rows"));
    *out = &p->row[p->n_rows++];
    **out = (plan_row){.trace = trace_index, .config = config, .unit = unit};
    return 0;
}

static int add_config(found *f, const sim_config *c) {
    TRY(mem_grow((void **)&f->config, &f->capacity, f->n + 1, sizeof *c, "configurations"));
    f->config[f->n++] = *c;
    return 0;
}

/* An ask with item `bits` of the widths. */
static int plan_ask(const question *q, plan *p, found *f, size_t trace_index, size_t seq, size_t a, size_t number,
                    size_t bits) {
    const trace *t = q->trace[trace_index];
    const sim_ask *ask = &q->asks.ask[a];
    sim_config c;
    int code = resolve_ask(q, ask, t, seq, &c);
    if (code) {
        bool is_lacking = c.is_resolved;
        sim_config_free(&c);
        if (bits) return 0; /* said before */
        return is_lacking ? leave_out(p, ask, trace_label(t), seq) : skip(p, ask, trace_label(t), seq);
    }
    if (!kv_bits_apply(&q->bits, bits, &c)) {
        sim_config_free(&c);
        return 0;
    }
    size_t k = 0;
    while (k < f->n && !(sim_config_same(&f->config[k], &c) && kv_bits_same(&f->config[k], &c))) k++;
    plan_row *r;
    code = add_row(p, trace_index, number, p->n_units + k, &r);
    if (!code) code = results_key_of(trace_label(t), seq, &c, &r->key);
    bool is_new = k == f->n;
    if (!code && is_new) code = add_config(f, &c);
    if (code || !is_new) sim_config_free(&c);
    return code;
}

/* Lifetimes that were handed in: one unit a row; a configuration knows no more than its prompt and its bits. */
static int plan_given(const question *q, plan *p, found *f, size_t seq) {
    const trace *t = q->trace[0];
    int32_t n_prompt = prompt_of(q, trace_get_sequence(t, seq));
    for (size_t i = 0; i < lifetimes_n_configs(q->given); i++) {
        if (!lifetimes_get_seq(q->given, i, seq)) continue;
        sim_config c = results_config_of_given(q->given, i, seq, n_prompt);
        for (size_t bits = 0; bits < q->bits.n; bits++) {
            plan_row *r;
            if (!kv_bits_apply(&q->bits, bits, &c)) continue;
            TRY(add_row(p, 0, i, p->n_units + f->n, &r));
            TRY(results_key_of_given(trace_label(t), q->given, i, seq, &c, &r->key));
            TRY(add_config(f, &c));
        }
    }
    return 0;
}

/* The number of a request's configuration in a lifetimes file: equal ones share it. */
static size_t number_request(const question *q, const plan *p, size_t i) {
    const sim_config *c = &q->requests->item[i].config;
    size_t next = 0;
    for (size_t k = 0; k < i; k++) {
        const sim_config *b = &q->requests->item[k].config;
        if (strcmp(b->spec, c->spec) == 0 && strcmp(b->resolved, c->resolved) == 0) return p->row[k].config;
        if (p->row[k].config >= next) next = p->row[k].config + 1;
    }
    return next;
}

/* A request of a pool: one unit and one row, whose lifetimes will be handed in. */
static int plan_request(const question *q, plan *p, found *f, size_t i) {
    const request *r = &q->requests->item[i];
    plan_row *row;
    TRY(add_row(p, 0, number_request(q, p, i), p->n_units, &row));
    TRY(results_key_of(trace_label(q->trace[0]), r->seq, &r->config, &row->key));
    return add_config(f, &(sim_config){.n_prompt = r->config.n_prompt, .kv_bits = 16, .pending_bits = 16});
}

/* Keep this shard's configurations of a sequence; the others are released. */
static int keep_own(plan *p, found *f, size_t trace_index, size_t seq) {
    plan_run run = {.trace = trace_index, .seq = seq, .first = p->n_own};
    TRY(mem_grow((void **)&p->config, &p->config_capacity, p->n_own + f->n, sizeof *p->config, "configurations"));
    TRY(mem_grow((void **)&p->run, &p->run_capacity, p->n_runs + 1, sizeof *p->run, "sequences"));
    for (size_t i = 0; i < f->n; i++, p->n_units++) {
        if (shard_owns(p->part, p->n_units)) p->config[p->n_own++] = f->config[i];
        else sim_config_free(&f->config[i]);
    }
    f->n = 0;
    run.n = p->n_own - run.first;
    if (run.n) p->run[p->n_runs++] = run;
    return 0;
}

static int plan_sequence(const question *q, plan *p, size_t trace_index, size_t seq, const size_t *number) {
    found f = {0};
    size_t n_seq = trace_n_sequences(q->trace[trace_index]);
    int code = q->given ? plan_given(q, p, &f, seq) : 0;
    for (size_t a = 0; a < q->asks.n && !code; a++)
        for (size_t bits = 0; bits < q->bits.n && !code; bits++)
            code = plan_ask(q, p, &f, trace_index, seq, a, number ? number[a * n_seq + seq] : 0, bits);
    if (!code) code = keep_own(p, &f, trace_index, seq);
    for (size_t i = 0; i < f.n; i++) sim_config_free(&f.config[i]);
    mem_free(f.config);
    return code;
}

static int plan_requests(const question *q, plan *p) {
    int code = 0;
    for (size_t i = 0; i < q->requests->n && !code; i++) {
        found f = {0};
        code = plan_request(q, p, &f, i);
        if (!code) code = keep_own(p, &f, 0, q->requests->item[i].seq);
        mem_free(f.config);
    }
    return code;
}

int plan_make(const question *q, shard part, plan *out) {
    *out = (plan){.part = part};
    if (q->requests) return plan_requests(q, out);
    size_t *number = NULL;
    int code = q->options.keep_lifetimes && !q->given ? number_configs(q, &number) : 0;
    for (size_t i = 0; i < q->n_traces && !code; i++)
        for (size_t seq = 0; seq < trace_n_sequences(q->trace[i]) && !code; seq++)
            code = plan_sequence(q, out, i, seq, number);
    mem_free(number);
    if (!code && !out->n_rows) code = err_set(ERR_USAGE, "no configuration is left to run");
    return code;
}

void plan_free(plan *p) {
    for (size_t i = 0; i < p->n_rows; i++) results_key_free(&p->row[i].key);
    for (size_t i = 0; i < p->n_own; i++) sim_config_free(&p->config[i]);
    mem_free(p->row);
    mem_free(p->config);
    mem_free(p->run);
    text_free(&p->skipped);
    *p = (plan){0};
}
