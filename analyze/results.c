#include "analyze/results.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/text.h"

#include <errno.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
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
enum { N_TEXTS = sizeof texts / sizeof *texts, MAX_COLUMNS = 256 };

static const char *text_of(const result *r, size_t i) {
    return *(const char *const *)((const char *)r + texts[i].offset);
}

/* ---- reading ---------------------------------------------------------------------------------------------------- */

/* One file being read. Fields are unquoted in place: what is written never overtakes what is read. */
typedef struct reader {
    const char *path;
    char *at, *end;
    size_t line;  /* of `at` */
    size_t start; /* line on which the last record began */
    char *field[MAX_COLUMNS];
    size_t n_fields;
    size_t header_fields;
    size_t text_column[N_TEXTS], budget_column, lag_column, metric_column[RESULTS_METRICS];
} reader;
static const size_t ABSENT = SIZE_MAX;

static int read_file(const char *path, char **out, size_t *bytes) {
    FILE *f = fopen(path, "rb");
    if (!f) return err_set(ERR_DATA, "%s: %s", path, strerror(errno));
    char *data = NULL;
    size_t n = 0, capacity = 0, got = 0;
    int code = 0;
    do {
        n += got;
        code = mem_grow((void **)&data, &capacity, n + 65536, 1, "results file");
    } while (!code && (got = fread(data + n, 1, capacity - n - 1, f)) > 0);
    if (!code && ferror(f)) code = err_set(ERR_DATA, "%s: %s", path, strerror(errno));
    fclose(f);
    if (!code && memchr(data, 0, n)) code = err_set(ERR_DATA, "%s: holds NUL bytes, so it is no CSV file", path);
    if (code) {
        mem_free(data);
        return code;
    }
    data[n] = 0;
    *out = data;
    *bytes = n;
    return 0;
}

static int bad_record(const reader *f, const char *what) {
    return err_set(ERR_DATA, "%s:%zu: %s", f->path, f->start, what);
}

/* Step over the field's end: a comma, a line end or the end of the file. *more: another field of this record follows.
 */
static void end_of_field(reader *f, char *write, bool *more) {
    *more = f->at < f->end && *f->at == ',';
    if (!*more && f->at < f->end) {
        if (*f->at == '\r' && f->at[1] == '\n') f->at++;
        f->line++;
    }
    if (f->at < f->end) f->at++;
    *write = 0;
}

static bool at_end_of_field(const reader *f) {
    return f->at == f->end || *f->at == ',' || *f->at == '\n' || (*f->at == '\r' && f->at[1] == '\n');
}

static int read_quoted(reader *f, bool *more) {
    char *write = ++f->at;
    f->field[f->n_fields++] = write;
    for (;; f->at++) {
        if (f->at == f->end) return bad_record(f, "a quoted field is not closed");
        if (*f->at == '"' && *++f->at != '"') break;
        f->line += *f->at == '\n';
        *write++ = *f->at;
    }
    if (!at_end_of_field(f)) return bad_record(f, "text after a closing quote");
    end_of_field(f, write, more);
    return 0;
}

static int read_record(reader *f) {
    bool more = true;
    f->start = f->line;
    for (f->n_fields = 0; more;) {
        if (f->n_fields == MAX_COLUMNS) return bad_record(f, "more than 256 fields");
        if (f->at < f->end && *f->at == '"') {
            TRY(read_quoted(f, &more));
            continue;
        }
        f->field[f->n_fields++] = f->at;
        for (; !at_end_of_field(f); f->at++)
            if (*f->at == '"') return bad_record(f, "a quote inside a field that is not quoted");
        end_of_field(f, f->at, &more);
    }
    return 0;
}

static int skip_comments(reader *f) {
    const char *version = "# kvlag results v1";
    if (f->end - f->at >= 3 && memcmp(f->at, "\xef\xbb\xbf", 3) == 0) f->at += 3;
    for (f->line = 1; f->at < f->end && *f->at == '#'; f->line++) {
        int n = (int)strcspn(f->at, "\r\n");
        bool ours = strncmp(f->at, version, strlen(version) - 1) == 0;
        if (ours && ((size_t)n != strlen(version) || strncmp(f->at, version, strlen(version)) != 0))
            return err_set(ERR_DATA, "%s:%zu: '%.*s' is not supported (want v1)", f->path, f->line, n, f->at);
        f->at += strcspn(f->at, "\n");
        if (f->at < f->end) f->at++;
    }
    return 0;
}

static size_t find_column(const reader *f, const char *name) {
    for (size_t i = 0; i < f->n_fields; i++)
        if (strcmp(f->field[i], name) == 0) return i;
    return ABSENT;
}

static int need_column(const reader *f, const char *name, size_t *at) {
    *at = find_column(f, name);
    return *at == ABSENT ? err_set(ERR_DATA, "%s:%zu: no column '%s'", f->path, f->start, name) : 0;
}

static int read_header(reader *f) {
    TRY(skip_comments(f));
    if (f->at == f->end) return err_set(ERR_DATA, "%s: no header line", f->path);
    TRY(read_record(f));
    f->header_fields = f->n_fields;
    for (size_t i = 0; i < f->n_fields; i++)
        if (find_column(f, f->field[i]) < i)
            return err_set(ERR_DATA, "%s:%zu: two columns '%s'", f->path, f->start, f->field[i]);
    for (size_t i = 0; i < N_TEXTS; i++)
        if (texts[i].needed) TRY(need_column(f, texts[i].column, &f->text_column[i]));
        else f->text_column[i] = find_column(f, texts[i].column);
    TRY(need_column(f, "budget", &f->budget_column));
    TRY(need_column(f, "lag", &f->lag_column));
    for (size_t i = 0; i < RESULTS_METRICS; i++) f->metric_column[i] = find_column(f, results_metrics[i].column);
    return 0;
}

static int read_number(const reader *f, const char *column, size_t at, double least, double *out) {
    const char *s = f->field[at];
    if (text_parse_number(s, out) != 0 || !isfinite(*out))
        return err_set(ERR_DATA, "%s:%zu: %s '%s' is not a number", f->path, f->start, column, s);
    if (*out < least) return err_set(ERR_DATA, "%s:%zu: %s %s is below %g", f->path, f->start, column, s, least);
    return 0;
}

static int read_row(reader *f, result *r) {
    TRY(read_record(f));
    if (f->n_fields != f->header_fields)
        return err_set(ERR_DATA, "%s:%zu: %zu fields, the header has %zu", f->path, f->start, f->n_fields,
                       f->header_fields);
    r->line = f->start;
    for (size_t i = 0; i < N_TEXTS; i++)
        *(const char **)((char *)r + texts[i].offset) = f->text_column[i] == ABSENT ? "" : f->field[f->text_column[i]];
    TRY(read_number(f, "budget", f->budget_column, 1, &r->budget));
    r->lag = -1;
    if (*f->field[f->lag_column]) TRY(read_number(f, "lag", f->lag_column, 0, &r->lag));
    for (size_t i = 0; i < RESULTS_METRICS; i++) {
        r->metric[i] = NAN;
        if (f->metric_column[i] != ABSENT && *f->field[f->metric_column[i]])
            TRY(read_number(f, results_metrics[i].column, f->metric_column[i], -INFINITY, &r->metric[i]));
    }
    return 0;
}

static int read_rows(const char *path, size_t file, results *r, size_t *capacity) {
    size_t bytes = 0, before = r->n_rows;
    TRY(read_file(path, &r->file_text[file], &bytes));
    reader f = {.path = path, .at = r->file_text[file], .end = r->file_text[file] + bytes};
    TRY(read_header(&f));
    while (f.at < f.end) {
        TRY(mem_grow((void **)&r->rows, capacity, r->n_rows + 1, sizeof *r->rows, "results"));
        r->rows[r->n_rows].file = file;
        TRY(read_row(&f, &r->rows[r->n_rows]));
        r->n_rows++;
    }
    return r->n_rows > before ? 0 : err_set(ERR_DATA, "%s: no data rows", path);
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
    for (size_t i = 0; i < n && !code; i++) code = read_rows(paths[i], i, r, &capacity);
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
