#include "sim/requests.h"
#include "base/csv.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/progress.h"
#include "sim/sweep.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *pool_rule_name(pool_rule rule) {
    return rule == POOL_FAIR ? "fair" : "lowest";
}

/* ---- who asks --------------------------------------------------------------------------------------------------- */

/* A request before it is resolved. */
typedef struct asked {
    size_t seq;
    int64_t arrival;
    const char *spec, *budget; /* "" = none */
    size_t line;               /* of the file; 0 without one */
} asked;

typedef struct asked_list {
    asked *item;
    size_t n, capacity;
} asked_list;

static int push(asked_list *list, const asked *a) {
    TRY(mem_grow((void **)&list->item, &list->capacity, list->n + 1, sizeof *a, "requests"));
    list->item[list->n++] = *a;
    return 0;
}

static int read_count(const csv *c, size_t at, double most, double *out) {
    TRY(csv_number(c, at, 0, out));
    if (*out == floor(*out) && *out <= most) return 0;
    return err_set(ERR_DATA, "%s:%zu: %s '%s' is not a whole number up to %.0f", c->path, c->line, c->column[at],
                   c->field[at], most);
}

/* Where a file's columns are. */
typedef struct columns {
    size_t seq, arrival, policy, budget;
} columns;

static int find_columns(const csv *c, columns *at) {
    TRY(csv_need(c, "seq", &at->seq));
    TRY(csv_need(c, "arrival", &at->arrival));
    TRY(csv_need(c, "policy", &at->policy));
    at->budget = csv_find(c, "budget");
    for (size_t i = 0; i < c->n_columns; i++)
        if (i != at->seq && i != at->arrival && i != at->policy && i != at->budget)
            return err_set(ERR_DATA, "%s:%zu: column '%s' is none of seq, arrival, policy, budget", c->path, c->line,
                           c->column[i]);
    return 0;
}

static int read_request(const csv *c, const columns *at, const trace *t, asked_list *out) {
    double seq, arrival;
    TRY(read_count(c, at->seq, 1e9, &seq));
    TRY(read_count(c, at->arrival, 1e9, &arrival));
    size_t sequences = trace_n_sequences(t);
    if (seq >= (double)sequences)
        return err_set(ERR_DATA, "%s:%zu: seq %.0f: %s has %zu sequence%s", c->path, c->line, seq, trace_path(t),
                       sequences, sequences == 1 ? "" : "s");
    for (size_t i = 0; i < out->n; i++)
        if (out->item[i].seq == (size_t)seq)
            return err_set(ERR_DATA, "%s:%zu: seq %.0f stands in line %zu already", c->path, c->line, seq,
                           out->item[i].line);
    if (!*c->field[at->policy]) return err_set(ERR_DATA, "%s:%zu: policy is empty", c->path, c->line);
    asked a = {.seq = (size_t)seq, .arrival = (int64_t)arrival, .spec = c->field[at->policy], .line = c->line};
    a.budget = at->budget == CSV_ABSENT ? "" : c->field[at->budget];
    return push(out, &a);
}

static int read_file(const trace *t, csv *c, asked_list *out) {
    columns at;
    TRY(find_columns(c, &at));
    for (bool more;;) {
        TRY(csv_next(c, &more));
        if (!more) break;
        TRY(read_request(c, &at, t, out));
    }
    return out->n ? 0 : err_set(ERR_DATA, "%s: no request", c->path);
}

static int round_robin(const pool_ask *ask, const char *budget, const trace *t, asked_list *out) {
    for (size_t seq = 0; seq < trace_n_sequences(t); seq++)
        TRY(push(out, &(asked){.seq = seq,
                               .arrival = (int64_t)seq * ask->between,
                               .spec = ask->spec[seq % ask->n_specs],
                               .budget = budget ? budget : ""}));
    return 0;
}

/* ---- what they are ---------------------------------------------------------------------------------------------- */

static int32_t min_i32(int32_t a, int32_t b) {
    return a < b ? a : b;
}

/* Sinks, held entries and the one that arrives; in whole blocks where those that touch a guarded entry stay. */
static int32_t least_of(const sim_config *c, int32_t n_tokens) {
    if (c->is_full) return n_tokens;
    int64_t least = (int64_t)c->sinks + c->hold + 1;
    if (c->schedule == SCHEDULE_BLOCK) {
        int64_t n = (int64_t)c->schedule_argument;
        least = (c->sinks + n - 1) / n * n + c->hold + n;
    }
    int32_t most = min_i32(c->budget, n_tokens);
    return least < most ? (int32_t)least : most;
}

static int check_fit(const requests *q, const request *r, const char **column) {
    const sim_config *c = &r->config;
    *column = "budget";
    if (!c->is_full && c->budget > q->entries)
        return err_set(ERR_USAGE, "%d entries are more than a pool of %d has", c->budget, q->entries);
    *column = "policy";
    if (r->least > q->entries)
        return err_set(ERR_USAGE, "%d entries that never leave do not fit a pool of %d", r->least, q->entries);
    *column = "seq";
    if (r->need > q->entries)
        return err_set(ERR_USAGE, "a prompt of %d entries never fits a pool of %d", r->need, q->entries);
    return 0;
}

/* A pool is one kv head's, or one layer's: nothing that spans more, and nothing of the full run. */
static int check_config(const sim_config *c) {
    const unsigned of_full_run = NEEDS_FUTURE | NEEDS_OUT | NEEDS_LOSS | NEEDS_FISHER;
    if (c->is_full) return 0;
    if (c->unit == UNIT_MODEL) return err_set(ERR_USAGE, "unit=model: a pool belongs to a layer or a kv head");
    if (c->share != SHARE_NONE)
        return err_set(ERR_USAGE, "share: in a pool requests compete, not the units of one request");
    if (policy_get(&c->setup, "taper")->number > 1)
        return err_set(ERR_USAGE, "taper: a pool has as many entries in every layer");
    if (c->needs & of_full_run)
        return err_set(ERR_USAGE, "it looks at the full run (its future, outputs or gradients), which is not at hand "
                                  "in a pool");
    return 0;
}

/* One spec, one budget: one configuration. *column: what a message is about. */
static int resolve(const requests *q, const trace *t, const sim_flags *flags, const asked *a, bool is_crowded,
                   request *out, const char **column) {
    const trace_sequence *s = trace_get_sequence(t, a->seq);
    *column = "policy";
    if (flags->n_prompt > s->n_tokens)
        return err_set(ERR_USAGE, "--prompt %d: there are %d tokens", flags->n_prompt, s->n_tokens);
    char entries[24];
    snprintf(entries, sizeof entries, "%d", q->entries);
    sim_flags own = *flags;
    own.budgets = *a->budget ? a->budget : entries;
    own.is_shared = is_crowded;
    *out = (request){.seq = a->seq, .arrival = a->arrival, .n_tokens = s->n_tokens};
    sim_asks asks;
    int code = sim_asks_build(&a->spec, 1, &own, &asks);
    if (code && strncmp(err_message(), "-b ", 3) == 0) *column = "budget";
    if (!code && asks.n != 1)
        code = err_set(ERR_USAGE, "'%s' stands for %zu configurations, and a request has one", a->spec, asks.n);
    if (!code) code = sim_config_resolve(asks.ask, &own, s->n_tokens, s->n_prompt, &out->config);
    sim_asks_free(&asks);
    TRY(code);
    sim_config *c = &out->config;
    TRY(check_config(c));
    TRY(sweep_check_policy(t, a->seq, c));
    snprintf(c->budget_asked, sizeof c->budget_asked, "pool:%d", q->entries);
    out->evicts_alone = *a->budget || c->schedule != SCHEDULE_STEP;
    out->lead = c->n_prompt > 1 ? c->n_prompt - 1 : 0;
    out->least = least_of(c, s->n_tokens);
    out->need = out->least > c->n_prompt ? out->least : c->n_prompt;
    return check_fit(q, out, column);
}

/* What is wrong with a request is said with its place in the file. */
static int resolve_all(requests *q, const trace *t, const sim_flags *flags, const asked_list *list, const char *file) {
    int64_t tokens = 0;
    q->item = mem_new(list->n, sizeof *q->item, "requests");
    if (!q->item) return ERR_DATA;
    for (size_t i = 0; i < list->n; i++) tokens += trace_get_sequence(t, list->item[i].seq)->n_tokens;
    for (size_t i = 0; i < list->n; i++) {
        const asked *a = &list->item[i];
        const char *column;
        int code = resolve(q, t, flags, a, tokens > q->entries, &q->item[q->n++], &column);
        if (code && a->line) return err_prefix(code, "%s:%zu: %s", file, a->line, column);
        if (code) return err_prefix(code, "seq %zu: %s", a->seq, a->spec);
    }
    return 0;
}

/* Requests of one pool have units of one kind; a full cache goes with any. */
static int find_unit(requests *q) {
    const request *first = NULL;
    for (size_t i = 0; i < q->n; i++) {
        const request *r = &q->item[i];
        if (r->config.is_full) continue;
        if (!first) first = r;
        if (r->config.unit != first->config.unit)
            return err_set(ERR_USAGE,
                           "a pool has units of one kind, but %s (seq %zu) has unit=%s, %s (seq %zu) unit=%s (--unit "
                           "says it for all)",
                           first->config.spec, first->seq, sim_unit_name(first->config.unit), r->config.spec, r->seq,
                           sim_unit_name(r->config.unit));
    }
    q->unit = first ? first->config.unit : UNIT_HEAD;
    return 0;
}

static int check_rule(const requests *q) {
    const sim_config *a = &q->item[0].config;
    for (size_t i = 0; i < q->n && q->rule == POOL_LOWEST; i++) {
        const sim_config *b = &q->item[i].config;
        if (b->schedule == SCHEDULE_BLOCK)
            return err_set(ERR_USAGE, "--pool-rule lowest: blocks leave whole, not entry by entry (%s, seq %zu)",
                           b->spec, q->item[i].seq);
        if (strcmp(a->spec, b->spec) != 0 || a->lag != b->lag || strcmp(a->schedule_text, b->schedule_text) != 0)
            return err_set(ERR_USAGE,
                           "--pool-rule lowest: scores of different policies do not compare (%s of seq %zu, %s of "
                           "seq %zu)",
                           a->spec, q->item[0].seq, b->spec, q->item[i].seq);
    }
    return 0;
}

static int read_watermark(const char *source, requests *q) {
    double f = 1;
    if (source && (text_parse_number(source, &f) != 0 || !(f > 0 && f <= 1)))
        return err_set(ERR_USAGE, "--pool-watermark: '%s' is not a share above 0 and up to 1", source);
    q->low = (int32_t)floor(f * q->entries);
    if (q->low < 1)
        return err_set(ERR_USAGE, "--pool-watermark: %s leaves nothing of a pool of %d", source, q->entries);
    return 0;
}

/* Who waits for want of room may want to know why there is none. */
static void say_what_is_reserved(const requests *q) {
    for (size_t i = 0; i < q->n; i++) {
        const request *r = &q->item[i];
        if (r->start == r->arrival || r->config.is_full || 2 * (int64_t)r->least <= q->entries) continue;
        say("seq %zu waits %lld steps: %s reserves %d of %d entries for itself (\"budget/2\" goes by the pool where a "
            "request has no budget of its own)",
            r->seq, (long long)(r->start - r->arrival), r->config.spec, r->least, q->entries);
        return;
    }
}

static int settle(requests *q, const trace *t, const sim_flags *flags, const asked_list *list, const char *file) {
    TRY(resolve_all(q, t, flags, list, file));
    TRY(find_unit(q));
    TRY(check_rule(q));
    TRY(requests_admit(q));
    say_what_is_reserved(q);
    return 0;
}

int requests_make(const pool_ask *ask, const sim_flags *flags, const trace *t, requests *out) {
    *out = (requests){.entries = (int32_t)ask->entries, .rule = ask->rule};
    asked_list list = {0};
    csv file = {0};
    int code = read_watermark(ask->watermark, out);
    if (!code && ask->file) code = csv_open(ask->file, NULL, &file);
    if (!code) code = ask->file ? read_file(t, &file, &list) : round_robin(ask, flags->budgets, t, &list);
    if (!code) code = settle(out, t, flags, &list, ask->file);
    csv_close(&file);
    mem_free(list.item);
    return code;
}

void requests_free(requests *q) {
    for (size_t i = 0; i < q->n; i++) sim_config_free(&q->item[i].config);
    mem_free(q->item);
    mem_free(q->queue);
    *q = (requests){0};
}

/* ---- when they come --------------------------------------------------------------------------------------------- */

/* By arrival; requests of one arrival stay in order. */
static void sort_queue(requests *q) {
    for (size_t i = 0; i < q->n; i++) {
        size_t at = i;
        for (; at > 0 && q->item[q->queue[at - 1]].arrival > q->item[i].arrival; at--) q->queue[at] = q->queue[at - 1];
        q->queue[at] = i;
    }
}

/* What those that were admitted before place `next` of the queue keep at global step g. */
static int64_t kept(const requests *q, size_t next, int64_t g) {
    int64_t sum = 0;
    for (size_t i = 0; i < next; i++) {
        const request *r = &q->item[q->queue[i]];
        if (r->end > g) sum += r->start == g ? r->need : r->least;
    }
    return sum;
}

/* The next global step after g at which somebody may keep less than before. */
static int64_t next_change(const requests *q, size_t next, int64_t g) {
    int64_t soonest = INT64_MAX;
    for (size_t i = 0; i < next; i++) {
        const request *r = &q->item[q->queue[i]];
        if (r->start == g && r->need > r->least) return g + 1;
        if (r->end > g && r->end < soonest) soonest = r->end;
    }
    return soonest;
}

int requests_admit(requests *q) {
    q->queue = mem_new(q->n, sizeof *q->queue, "requests");
    if (!q->queue) return ERR_DATA;
    sort_queue(q);
    int64_t g = 0;
    for (size_t next = 0; next < q->n; next++) { /* first come, first served: nobody overtakes */
        request *r = &q->item[q->queue[next]];
        if (r->arrival > g) g = r->arrival;
        while (kept(q, next, g) + r->need > q->entries) g = next_change(q, next, g);
        r->start = g;
        r->end = g + r->n_tokens - r->lead;
    }
    return 0;
}
