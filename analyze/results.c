#include "analyze/results.h"
#include "base/csv.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/text.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

const results_metric results_metrics[RESULTS_METRICS] = {
    {"dloss_est", "estimated loss change (nats/token)", "loss change", true},
    {"kl_est", "estimated KL to the full cache (nats/token)", "KL", true},
    {"out_err", "output error (mean over layers and steps)", "output error", false},
    {"lost_mass", "lost attention mass (mean over heads and steps)", "lost mass", false},
};

/* Columns of text. Two rows with equal keys are the same configuration; a series is what is equal but for budget, lag
 * and pending. The lag is part of the key, too, as a number. */
static const struct {
    const char *column;
    size_t offset;
    bool needed, key, series;
} texts[] = {
    {"spec", offsetof(result, spec), true, true, true},
    {"unit", offsetof(result, unit), true, true, true},
    {"schedule", offsetof(result, schedule), true, true, true},
    {"n_prompt", offsetof(result, n_prompt), false, true, true},
    {"seed", offsetof(result, seed), false, true, true},
    {"budget_asked", offsetof(result, budget_asked), true, true, false},
    {"pending", offsetof(result, pending), true, true, false},
    {"policy", offsetof(result, policy), true, false, false},
    {"trace", offsetof(result, trace), true, false, false},
    {"seq", offsetof(result, seq), true, false, false},
};
enum { N_TEXTS = sizeof texts / sizeof *texts };

static const char *text_of(const result *r, size_t i) {
    return *(const char *const *)((const char *)r + texts[i].offset);
}

/* ---- reading ---------------------------------------------------------------------------------------------------- */

/* One file being read, and where its columns are. */
typedef struct reader {
    csv file;
    size_t text_column[N_TEXTS], budget_column, lag_column, metric_column[RESULTS_METRICS];
} reader;

static int find_columns(reader *f) {
    for (size_t i = 0; i < N_TEXTS; i++)
        if (texts[i].needed) TRY(csv_need(&f->file, texts[i].column, &f->text_column[i]));
        else f->text_column[i] = csv_find(&f->file, texts[i].column);
    TRY(csv_need(&f->file, "budget", &f->budget_column));
    TRY(csv_need(&f->file, "lag", &f->lag_column));
    for (size_t i = 0; i < RESULTS_METRICS; i++) f->metric_column[i] = csv_find(&f->file, results_metrics[i].column);
    return 0;
}

static int read_row(const reader *f, result *r) {
    const csv *c = &f->file;
    r->line = c->line;
    for (size_t i = 0; i < N_TEXTS; i++)
        *(const char **)((char *)r + texts[i].offset) =
            f->text_column[i] == CSV_ABSENT ? "" : c->field[f->text_column[i]];
    TRY(csv_number(c, f->budget_column, 1, &r->budget));
    r->lag = -1;
    if (*c->field[f->lag_column]) TRY(csv_number(c, f->lag_column, 0, &r->lag));
    for (size_t i = 0; i < RESULTS_METRICS; i++) {
        r->metric[i] = NAN;
        if (f->metric_column[i] != CSV_ABSENT && *c->field[f->metric_column[i]])
            TRY(csv_number(c, f->metric_column[i], -INFINITY, &r->metric[i]));
    }
    return 0;
}

static int read_rows(reader *f, size_t file, results *r, size_t *capacity) {
    size_t before = r->n_rows;
    bool more;
    TRY(find_columns(f));
    for (;;) {
        TRY(csv_next(&f->file, &more));
        if (!more) break;
        TRY(mem_grow((void **)&r->rows, capacity, r->n_rows + 1, sizeof *r->rows, "results"));
        r->rows[r->n_rows].file = file;
        TRY(read_row(f, &r->rows[r->n_rows]));
        r->n_rows++;
    }
    return r->n_rows > before ? 0 : err_set(ERR_DATA, "%s: no data rows", f->file.path);
}

static int read_results(const char *path, size_t file, results *r, size_t *capacity) {
    reader f;
    int code = csv_open(path, "results", &f.file);
    if (!code) code = read_rows(&f, file, r, capacity);
    r->file_text[file] = csv_keep(&f.file);
    csv_close(&f.file);
    return code;
}

/* ---- configurations --------------------------------------------------------------------------------------------- */

static bool is_full(const result *r) {
    return strcmp(r->policy, "full") == 0;
}

static int compare_config(const result *a, const result *b) {
    for (size_t i = 0; i < N_TEXTS; i++) {
        int c = texts[i].key ? strcmp(text_of(a, i), text_of(b, i)) : 0;
        if (c) return c;
    }
    return (a->lag > b->lag) - (a->lag < b->lag);
}

static int compare_sequence(const void *pa, const void *pb) {
    const result *a = *(const result *const *)pa, *b = *(const result *const *)pb;
    int c = strcmp(a->trace, b->trace);
    return c ? c : strcmp(a->seq, b->seq);
}

static int compare_row(const void *pa, const void *pb) {
    const result *a = *(const result *const *)pa, *b = *(const result *const *)pb;
    int c = compare_config(a, b);
    if (!c) c = compare_sequence(pa, pb);
    return c ? c : (a > b) - (a < b);
}

static int compare_place(const void *pa, const void *pb) {
    const result *a = pa, *b = pb;
    if (a->file != b->file) return a->file < b->file ? -1 : 1;
    return (a->line > b->line) - (a->line < b->line);
}

/* Every run writes a row for the full cache, so that one may come again in another file. */
static int refuse_duplicates(const results *r, const result *const *sorted, const char *const *paths) {
    for (size_t i = 1; i < r->n_rows; i++) {
        const result *a = sorted[i - 1], *b = sorted[i];
        if (!is_full(a) && compare_config(a, b) == 0 && compare_sequence(&a, &b) == 0)
            return err_set(ERR_DATA, "%s:%zu: the same configuration as %s:%zu (%s, budget %s, trace %s, seq %s)",
                           paths[b->file], b->line, paths[a->file], a->line, b->spec, b->budget_asked, b->trace,
                           b->seq);
    }
    return 0;
}

/* The mean of n rows of one configuration. It takes the place of the earliest of them. */
static result mean_of(const result *const *row, size_t n) {
    result mean = *row[0];
    mean.trace = mean.seq = "";
    for (size_t i = 1; i < n; i++) {
        if (compare_place(row[i], &mean) < 0) {
            mean.file = row[i]->file;
            mean.line = row[i]->line;
        }
        mean.budget += row[i]->budget;
        for (size_t m = 0; m < RESULTS_METRICS; m++) mean.metric[m] += row[i]->metric[m];
    }
    mean.budget /= (double)n;
    for (size_t m = 0; m < RESULTS_METRICS; m++) mean.metric[m] /= (double)n;
    return mean;
}

static void average(results *r, const result *const *sorted) {
    for (size_t i = 0, n; i < r->n_rows; i += n) {
        for (n = 1; i + n < r->n_rows && compare_config(sorted[i], sorted[i + n]) == 0;) n++;
        if (is_full(sorted[i])) continue;
        if (n == r->n_sequences) r->configs[r->n_configs++] = mean_of(sorted + i, n);
        else r->n_incomplete++;
    }
    qsort(r->configs, r->n_configs, sizeof *r->configs, compare_place);
}

static int compare_budget(const void *pa, const void *pb) {
    const results_budget *a = pa, *b = pb;
    return (a->entries > b->entries) - (a->entries < b->entries);
}

static int collect_budgets(results *r) {
    double *count = mem_new(r->n_configs + 1, sizeof *count, "budgets");
    r->budgets = mem_new(r->n_configs + 1, sizeof *r->budgets, "budgets");
    for (size_t i = 0; count && r->budgets && i < r->n_configs; i++) {
        size_t b = 0;
        while (b < r->n_budgets && strcmp(r->budgets[b].asked, r->configs[i].budget_asked) != 0) b++;
        r->n_budgets += b == r->n_budgets;
        r->budgets[b].asked = r->configs[i].budget_asked;
        r->budgets[b].entries += (r->configs[i].budget - r->budgets[b].entries) / ++count[b];
    }
    if (count && r->budgets) qsort(r->budgets, r->n_budgets, sizeof *r->budgets, compare_budget);
    mem_free(count);
    return count && r->budgets ? 0 : ERR_DATA;
}

static int make_configs(results *r, const char *const *paths) {
    const result **sorted = mem_new(r->n_rows, sizeof *sorted, "results");
    if (!sorted) return ERR_DATA;
    for (size_t i = 0; i < r->n_rows; i++) sorted[i] = &r->rows[i];
    qsort(sorted, r->n_rows, sizeof *sorted, compare_sequence);
    for (size_t i = 0; i < r->n_rows; i++)
        r->n_sequences += i == 0 || compare_sequence(&sorted[i - 1], &sorted[i]) != 0;
    qsort(sorted, r->n_rows, sizeof *sorted, compare_row);
    int code = refuse_duplicates(r, sorted, paths);
    r->configs = code ? NULL : mem_new(r->n_rows, sizeof *r->configs, "configurations");
    if (r->configs) average(r, sorted);
    mem_free(sorted);
    return r->configs ? collect_budgets(r) : ERR_DATA;
}

int results_read(const char *const *paths, size_t n, results **out) {
    results *r = mem_new(1, sizeof *r, "results");
    if (!r) return ERR_DATA;
    size_t capacity = 0;
    r->n_files = n;
    r->file_text = mem_new(n, sizeof *r->file_text, "results");
    int code = r->file_text ? 0 : ERR_DATA;
    for (size_t i = 0; i < n && !code; i++) code = read_results(paths[i], i, r, &capacity);
    if (!code) code = make_configs(r, paths);
    if (code) results_free(r);
    else *out = r;
    return code;
}

void results_free(results *r) {
    if (!r) return;
    for (size_t i = 0; r->file_text && i < r->n_files; i++) mem_free(r->file_text[i]);
    mem_free(r->file_text);
    mem_free(r->rows);
    mem_free(r->configs);
    mem_free(r->budgets);
    mem_free(r);
}

/* ---- questions -------------------------------------------------------------------------------------------------- */

size_t results_pick_metrics(const results *r, size_t out[RESULTS_METRICS]) {
    for (int loss = 1; loss >= 0; loss--) {
        size_t n = 0;
        for (size_t m = 0; m < RESULTS_METRICS; m++) {
            bool any = false;
            for (size_t i = 0; i < r->n_configs; i++) any |= !isnan(r->configs[i].metric[m]);
            if (any && results_metrics[m].loss == (bool)loss) out[n++] = m;
        }
        if (n) return n;
    }
    return 0;
}

bool result_is_oracle(const result *c) {
    return strcmp(c->policy, "oracle") == 0;
}

bool result_is_free(const result *c) {
    return strcmp(c->pending, "free") == 0;
}

bool result_same_series(const result *a, const result *b) {
    for (size_t i = 0; i < N_TEXTS; i++)
        if (texts[i].series && strcmp(text_of(a, i), text_of(b, i)) != 0) return false;
    return true;
}

char *result_series_name(const results *r, const result *c) {
    text name = {0};
    int code = text_add(&name, "%s", c->spec);
    for (size_t i = 1; i < N_TEXTS && !code; i++) {
        if (!texts[i].series) continue;
        bool varies = false;
        for (size_t k = 0; k < r->n_configs; k++)
            varies |=
                strcmp(r->configs[k].spec, c->spec) == 0 && strcmp(text_of(&r->configs[k], i), text_of(c, i)) != 0;
        if (varies) code = text_add(&name, ", %s %s", texts[i].column, text_of(c, i));
    }
    if (!code) return name.data;
    text_free(&name);
    return NULL;
}

double result_budget_asked(const result *c, bool *share) {
    char number[32];
    size_t n = strlen(c->budget_asked);
    double value;
    *share = n > 1 && n < sizeof number && c->budget_asked[n - 1] == '%';
    if (*share) {
        memcpy(number, c->budget_asked, n - 1);
        number[n - 1] = 0;
        if (text_parse_number(number, &value) == 0) return value;
        *share = false;
    }
    return c->budget;
}
