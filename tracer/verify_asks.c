#include "tracer/verify_asks.h"
#include "base/csv.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/progress.h"
#include "sim/spec.h"

#include <string.h>

/* What brings a configuration back. Texts are the CSV's. */
typedef struct row {
    const char *trace, *spec, *budget, *lag, *unit, *schedule, *pending;
    size_t seq, line;
    int32_t n_prompt;
    int family;
    bool taken;
} row;

static const struct {
    const char *column;
    size_t offset;
} texts[] = {{"trace", offsetof(row, trace)},    {"spec", offsetof(row, spec)}, {"budget_asked", offsetof(row, budget)},
             {"lag", offsetof(row, lag)},        {"unit", offsetof(row, unit)}, {"schedule", offsetof(row, schedule)},
             {"pending", offsetof(row, pending)}};
enum { N_TEXTS = sizeof texts / sizeof *texts };

typedef struct table {
    csv file;
    row *rows;
    size_t n, capacity;
} table;

/* ---- reading ---------------------------------------------------------------------------------------------------- */

static int read_count(const csv *c, size_t at, size_t end, size_t *out) {
    double x;
    TRY(csv_number(c, at, 0, &x));
    *out = (size_t)x;
    if (x >= (double)end || (double)*out != x)
        return err_set(ERR_DATA, "%s:%zu: %s %s is not a whole number below %zu", c->path, c->line, c->column[at],
                       c->field[at], end);
    return 0;
}

static int read_rows(table *t, const char *label, size_t n_sequences) {
    const csv *c = &t->file;
    size_t column[N_TEXTS], seq_column, prompt_column, n_prompt;
    const size_t bits[] = {csv_find(c, "kv_bits"), csv_find(c, "pending_bits")};
    bool more;
    for (size_t i = 0; i < N_TEXTS; i++) TRY(csv_need(c, texts[i].column, &column[i]));
    TRY(csv_need(c, "seq", &seq_column));
    TRY(csv_need(c, "n_prompt", &prompt_column));
    for (;;) {
        TRY(csv_next(&t->file, &more));
        if (!more) break;
        row r = {.line = c->line};
        for (size_t i = 0; i < N_TEXTS; i++) *(const char **)((char *)&r + texts[i].offset) = c->field[column[i]];
        if (strcmp(r.trace, label) != 0) continue;
        for (size_t i = 0; i < 2; i++)
            if (bits[i] != CSV_ABSENT && strcmp(c->field[bits[i]], "16") != 0)
                return err_set(ERR_DATA,
                               "%s:%zu: %s is %s, but a rerun keeps keys and values as they are: give results of a "
                               "sweep at 16 bits",
                               c->path, c->line, c->column[bits[i]], c->field[bits[i]]);
        TRY(read_count(c, seq_column, n_sequences, &r.seq));
        TRY(read_count(c, prompt_column, INT32_MAX, &n_prompt));
        r.n_prompt = (int32_t)n_prompt;
        r.family = spec_family(r.spec);
        TRY(mem_grow((void **)&t->rows, &t->capacity, t->n + 1, sizeof r, "rows"));
        t->rows[t->n++] = r;
    }
    return t->n ? 0 : err_set(ERR_DATA, "%s: no row of trace '%s'", c->path, label);
}

/* ---- picking ---------------------------------------------------------------------------------------------------- */

enum { N_LIKENESSES = 5 };

static void count_alike(const table *t, const row *r, size_t count[N_LIKENESSES]) {
    memset(count, 0, N_LIKENESSES * sizeof *count);
    for (size_t i = 0; i < t->n; i++) {
        const row *o = &t->rows[i];
        if (!o->taken) continue;
        bool family = o->family == r->family, budget = strcmp(o->budget, r->budget) == 0;
        count[0] += family;
        count[1] += family && budget;
        count[2] += budget;
        count[3] += family && strcmp(o->spec, r->spec) == 0;
        count[4] += family && strcmp(o->lag, r->lag) == 0;
    }
}

static bool is_fewer(const size_t a[N_LIKENESSES], const size_t b[N_LIKENESSES]) {
    size_t i = 0;
    while (i + 1 < N_LIKENESSES && a[i] == b[i]) i++;
    return a[i] < b[i];
}

static void take_rows(table *t, size_t pick) {
    size_t taken = 0;
    for (; taken < pick; taken++) {
        size_t least[N_LIKENESSES], count[N_LIKENESSES];
        row *best = NULL;
        for (size_t i = 0; i < t->n; i++) {
            row *r = &t->rows[i];
            if (r->taken || strcmp(r->spec, "full") == 0) continue;
            count_alike(t, r, count);
            if (best && !is_fewer(count, least)) continue;
            best = r;
            memcpy(least, count, sizeof least);
        }
        if (!best) break;
        best->taken = true;
    }
    if (taken < pick) say("--pick %zu: %s has only %zu rows to pick from", pick, t->file.path, taken);
}

/* ---- asks ------------------------------------------------------------------------------------------------------- */

void verify_asks_free(verify_asks *asks) {
    mem_free(asks->ask);
    *asks = (verify_asks){0};
}

int verify_asks_add(verify_asks *asks, const verify_ask *ask) {
    TRY(mem_grow((void **)&asks->ask, &asks->capacity, asks->n + 1, sizeof *ask, "configurations"));
    asks->ask[asks->n++] = *ask;
    return 0;
}

static int add_row(const table *t, const row *r, verify_asks *out) {
    const sim_flags flags = {.budgets = *r->budget ? r->budget : NULL,
                             .lags = *r->lag ? r->lag : NULL,
                             .schedule = r->schedule,
                             .unit = r->unit,
                             .pending = r->pending,
                             .n_prompt = r->n_prompt};
    sim_asks one;
    int code = sim_asks_build(&r->spec, 1, &flags, &one);
    if (!code && one.n != 1) code = err_set(ERR_DATA, "'%s' is not one configuration", r->spec);
    if (!code) code = verify_asks_add(out, &(verify_ask){.ask = one.ask[0], .seq = r->seq, .n_prompt = r->n_prompt});
    else err_prefix(code, "%s:%zu", t->file.path, r->line);
    sim_asks_free(&one);
    return code ? ERR_DATA : 0;
}

int verify_asks_of_results(const char *path, const char *label, size_t n_sequences, size_t pick, verify_asks *out) {
    table t = {0};
    *out = (verify_asks){0};
    int code = csv_open(path, NULL, &t.file);
    if (!code) code = read_rows(&t, label, n_sequences);
    if (!code && pick) take_rows(&t, pick);
    for (size_t i = 0; i < t.n && !code; i++)
        if (!pick || t.rows[i].taken) code = add_row(&t, &t.rows[i], out);
    mem_free(t.rows);
    csv_close(&t.file);
    return code;
}
