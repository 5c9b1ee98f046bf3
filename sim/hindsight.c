/* Hindsight: what the rows that are still to come hold for each entry, for policies that look at view.future.
 *
 * After step t that is, over a horizon H, the sum of the counted rows t+1 .. t+H: of the unit's mean row, or of its
 * Fisher evidence. Only sums of columns are kept, never T x T values. Where all rows ahead count, they are the totals
 * less the rows seen. Else rows are read once more, H steps ahead, and what lies ahead is the sum up to row t+H less
 * the sum up to row t; both add the same numbers in the same order, so that nothing ahead is exactly 0. */
#include "base/err.h"
#include "sim/pass.h"

#include <string.h>

enum { COLUMNS_A_TASK = 256 };

/* ---- which futures ---------------------------------------------------------------------------------------------- */

/* What a configuration looks at, without memory; where the prompt's policy looks ahead, too, it is the same. A horizon
 * that reaches beyond the text is all that follows. */
static future wanted_by(const pass *w, const sim_config *c) {
    double horizon = c->setup.needs & NEEDS_FUTURE ? c->setup.horizon : c->prompt->setup.horizon;
    return (future){.fisher = (c->needs & NEEDS_FISHER) != 0,
                    .horizon = horizon < w->n_tokens ? (int32_t)horizon : w->n_tokens};
}

const future *hindsight_of(const pass *w, const sim_config *c) {
    if (!(c->needs & NEEDS_FUTURE)) return NULL;
    future wanted = wanted_by(w, c);
    for (size_t k = 0; k < w->n_futures; k++)
        if (w->future[k].fisher == wanted.fisher && w->future[k].horizon == wanted.horizon) return &w->future[k];
    return NULL;
}

int hindsight_new(pass *w, const sim_config *configs, size_t n) {
    w->future = mem_new(n, sizeof *w->future, "futures");
    if (!w->future) return ERR_DATA;
    for (size_t i = 0; i < n; i++)
        if ((configs[i].needs & NEEDS_FUTURE) && !hindsight_of(w, &configs[i]))
            w->future[w->n_futures++] = wanted_by(w, &configs[i]);
    return 0;
}

void hindsight_free(pass *w) {
    mem_free(w->future);
    w->future = NULL;
    w->n_futures = 0;
}

static bool is_finite(const pass *w, const future *f) {
    return f->horizon < w->n_tokens;
}

static bool any(const pass *w, bool fisher, bool finite) {
    for (size_t k = 0; k < w->n_futures; k++)
        if (w->future[k].fisher == fisher && (!finite || is_finite(w, &w->future[k]))) return true;
    return false;
}

void hindsight_carve(pass *w, mem_carver *m) {
    size_t units = full_run_units(w), sums = units * (size_t)w->n_tokens;
    for (size_t k = 0; k < w->n_futures; k++) {
        future *f = &w->future[k];
        f->sum = mem_carve(m, sums, sizeof *f->sum);
        f->after = mem_carve(m, units * (size_t)w->tile * w->stride, sizeof *f->after);
    }
    for (int kind = 0; kind < 2; kind++)
        w->seen[kind] = mem_carve(m, any(w, kind == 1, true) ? sums : 0, sizeof *w->seen[kind]);
}

/* ---- a piece of work -------------------------------------------------------------------------------------------- */

/* One unit (number n_kv_head is the layer), some columns of the tile's rows. */
typedef struct columns {
    int unit, h0, h1; /* its query heads */
    int32_t from, n;
} columns;

static size_t column_chunks(const pass *w) {
    return (w->stride + COLUMNS_A_TASK - 1) / COLUMNS_A_TASK;
}

static columns columns_at(const pass *w, size_t index) {
    int unit = (int)(index / column_chunks(w));
    bool whole = unit == w->m->n_kv_head;
    columns c = {.unit = unit, .from = (int32_t)(index % column_chunks(w) * COLUMNS_A_TASK)};
    c.n = w->n_tokens - c.from < COLUMNS_A_TASK ? w->n_tokens - c.from : COLUMNS_A_TASK;
    c.h0 = whole ? 0 : unit * w->group;
    c.h1 = whole ? w->m->n_head : c.h0 + w->group;
    return c;
}

/* What row r adds to the sums of the unit's columns: its mean row, or its Fisher evidence. */
static void row_values(const pass *w, const columns *c, bool fisher, int32_t r, double *value) {
    int32_t n = w->row0 + r + 1 - c->from < c->n ? w->row0 + r + 1 - c->from : c->n;
    memset(value, 0, (size_t)c->n * sizeof *value);
    if (fisher) {
        const float *row = full_run_fisher(w, c->unit, r) + c->from;
        for (int32_t i = 0; i < n; i++) value[i] = (double)row[i];
        return;
    }
    for (int h = c->h0; h < c->h1; h++) {
        const float *row = row_of(w, h, r) + c->from;
        for (int32_t i = 0; i < n; i++) value[i] += (double)row[i];
    }
    for (int32_t i = 0; i < n; i++) value[i] /= c->h1 - c->h0;
}

static double *columns_of(const pass *w, const columns *c, double *sums) {
    return sums + (size_t)c->unit * (size_t)w->n_tokens + c->from;
}

static double *after_row(const pass *w, const future *f, int unit, int32_t r) {
    return f->after + ((size_t)unit * (size_t)w->tile + (size_t)r) * w->stride;
}

const double *hindsight_after(const pass *w, const future *f, int unit, int32_t r) {
    return after_row(w, f, unit, r);
}

static void add(double *sum, const double *value, int32_t n, double sign) {
    for (int32_t i = 0; i < n; i++) sum[i] += sign * value[i];
}

static int each_column(pass *w, pool_task work, void *context) {
    return pool_run(w->p, full_run_units(w) * column_chunks(w), work, context);
}

/* ---- reading ahead ---------------------------------------------------------------------------------------------- */

/* The steps from .. to-1 whose last rows, `horizon` ahead, are being read. Those before 0 are there to begin the sums:
 * row s is the last one of step s - horizon. */
typedef struct lead {
    pass *w;
    int32_t from, to;
} lead;

static void add_rows(const lead *l, const columns *c, bool fisher) {
    const pass *w = l->w;
    double value[COLUMNS_A_TASK];
    for (int32_t r = 0; r < w->n_rows; r++) {
        int32_t s = w->row0 + r;
        bool known = false;
        for (size_t k = 0; k < w->n_futures; k++) {
            const future *f = &w->future[k];
            int32_t t = s - f->horizon;
            double *sum = columns_of(w, c, f->sum);
            if (f->fisher != fisher || t < l->from || t >= l->to) continue;
            if (w->counted[s]) {
                if (!known) row_values(w, c, fisher, r, value);
                known = true;
                add(sum, value, c->n, 1);
            }
            if (t >= 0) memcpy(after_row(w, f, c->unit, t - l->from) + c->from, sum, (size_t)c->n * sizeof *sum);
        }
    }
}

static int add_rows_task(void *context, size_t index, int worker) {
    (void)worker;
    const lead *l = context;
    columns c = columns_at(l->w, index);
    add_rows(l, &c, false);
    add_rows(l, &c, true);
    return 0;
}

/* The first row from `row` on that is the last one of a step from .. to-1; T if there is none. */
static int32_t next_row(const lead *l, int32_t row) {
    const pass *w = l->w;
    int32_t next = w->n_tokens;
    for (size_t k = 0; k < w->n_futures; k++) {
        int64_t first = (int64_t)l->from + w->future[k].horizon, end = (int64_t)l->to + w->future[k].horizon;
        if (first < row) first = row;
        if (first < end && first < next) next = (int32_t)first;
    }
    return next;
}

static int read_ahead(pass *w, int32_t from, int32_t to) {
    lead l = {w, from, to};
    for (int32_t row = next_row(&l, 0); row < w->n_tokens; row = next_row(&l, w->row0 + w->n_rows)) {
        TRY(pass_read_tile(w, row));
        if (any(w, true, false)) TRY(full_run_evidence(w));
        TRY(each_column(w, add_rows_task, &l));
    }
    return 0;
}

int hindsight_begin(pass *w) {
    size_t bytes = full_run_units(w) * (size_t)w->n_tokens * sizeof(double);
    for (size_t k = 0; k < w->n_futures; k++) memset(w->future[k].sum, 0, bytes);
    for (int kind = 0; kind < 2; kind++)
        if (any(w, kind == 1, true)) memset(w->seen[kind], 0, bytes);
    return read_ahead(w, -w->n_tokens, 0);
}

int hindsight_ahead(pass *w, int32_t row0) {
    return read_ahead(w, row0, w->n_tokens - row0 < w->tile ? w->n_tokens : row0 + w->tile);
}

/* ---- the tile at hand ------------------------------------------------------------------------------------------- */

/* Step t has seen its row. */
static void spend(const pass *w, const columns *c, const future *f, int32_t r, const double *value) {
    int32_t t = w->row0 + r;
    double *sum = columns_of(w, c, f->sum), *after = after_row(w, f, c->unit, r) + c->from;
    if (!is_finite(w, f) && w->counted[t]) add(sum, value, c->n, -1);
    /* At the end of the text the rows ahead are fewer than the horizon, and the sum has all of them. */
    if (t + (int64_t)f->horizon >= w->n_tokens) memcpy(after, sum, (size_t)c->n * sizeof *sum);
    if (is_finite(w, f)) add(after, columns_of(w, c, w->seen[f->fisher]), c->n, -1);
}

static void spend_rows(const pass *w, const columns *c, bool fisher) {
    double value[COLUMNS_A_TASK];
    bool finite = any(w, fisher, true);
    for (int32_t r = 0; r < w->n_rows && any(w, fisher, false); r++) {
        bool counted = w->counted[w->row0 + r];
        if (counted) row_values(w, c, fisher, r, value);
        if (counted && finite) add(columns_of(w, c, w->seen[fisher]), value, c->n, 1);
        for (size_t k = 0; k < w->n_futures; k++)
            if (w->future[k].fisher == fisher) spend(w, c, &w->future[k], r, value);
    }
}

static int spend_task(void *context, size_t index, int worker) {
    (void)worker;
    const pass *w = context;
    columns c = columns_at(w, index);
    spend_rows(w, &c, false);
    spend_rows(w, &c, true);
    return 0;
}

int hindsight_tile(pass *w) {
    return w->n_futures ? each_column(w, spend_task, w) : 0;
}
