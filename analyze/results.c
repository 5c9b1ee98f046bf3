#include "analyze/results.h"
#include "base/csv.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/text.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

const results_metric results_metrics[RESULTS_METRICS] = {
    [DLOSS_EST] = {"dloss_est", "dloss_lo", "dloss_hi", "estimated loss change (nats/token)", "loss change",
                   METRIC_LOSS},
    [KL_EST] = {"kl_est", "kl_lo", "kl_hi", "estimated KL to the full cache (nats/token)", "KL", METRIC_LOSS},
    [OUT_ERR] = {"out_err", NULL, NULL, "output error (mean over layers and steps)", "output error",
                 METRIC_DISTURBANCE},
    [LOST_MASS] = {"lost_mass", NULL, NULL, "lost attention mass (mean over heads and steps)", "lost mass",
                   METRIC_DISTURBANCE},
    [DLOSS_FIRST] = {"dloss_first", NULL, NULL, "first-order loss change (nats/token)", "first order", METRIC_PART},
    [FISHER] = {"fisher", NULL, NULL, "Fisher term (nats/token)", "Fisher term", METRIC_PART},
};

const char *const results_costs[RESULTS_COSTS] = {
    [COST_KV_BYTES] = "kv_bytes", [COST_DECODE_US] = "decode_us",         [COST_RESIDENT] = "resident",
    [COST_PEAK] = "peak",         [COST_SCORE_UPDATES] = "score_updates",
};

/* Columns of text. Two rows with equal keys are the same configuration; a series is what is equal but for budget, lag
 * and pending. The lag is part of the key, too, as a number. */
static const struct {
    const char *column;
    size_t offset;
    bool needed, key, series;
    const char *absent; /* where the file has no such column; NULL: "" */
} texts[] = {
    {"spec", offsetof(result, spec), true, true, true, NULL},
    {"unit", offsetof(result, unit), true, true, true, NULL},
    {"schedule", offsetof(result, schedule), true, true, true, NULL},
    {"n_prompt", offsetof(result, n_prompt), false, true, true, NULL},
    {"seed", offsetof(result, seed), false, true, true, NULL},
    {"kv_bits", offsetof(result, kv_bits), false, true, true, "16"},
    {"pending_bits", offsetof(result, pending_bits), false, true, true, "16"},
    {"budget_asked", offsetof(result, budget_asked), true, true, false, NULL},
    {"pending", offsetof(result, pending), true, true, false, NULL},
    {"policy", offsetof(result, policy), true, false, false, NULL},
    {"hold", offsetof(result, hold), false, false, false, NULL},
    {"sinks", offsetof(result, sinks), false, false, false, NULL},
    {"trace", offsetof(result, trace), true, false, false, NULL},
    {"seq", offsetof(result, seq), true, false, false, NULL},
};
enum { N_TEXTS = sizeof texts / sizeof *texts };

static const char *text_of(const result *r, size_t i) {
    return *(const char *const *)((const char *)r + texts[i].offset);
}

/* ---- reading ---------------------------------------------------------------------------------------------------- */

/* One file being read, and where its columns are. */
typedef struct reader {
    csv file;
    size_t text_column[N_TEXTS], budget_column, lag_column;
    size_t metric_column[RESULTS_METRICS], lo_column[RESULTS_METRICS], hi_column[RESULTS_METRICS];
    size_t cost_column[RESULTS_COSTS];
    bool is_truth;
    size_t mode_column, true_dloss_column, true_kl_column;
} reader;

static size_t find(const reader *f, const char *column) {
    return column ? csv_find(&f->file, column) : CSV_ABSENT;
}

static int find_columns(reader *f) {
    for (size_t i = 0; i < N_TEXTS; i++)
        if (texts[i].needed) TRY(csv_need(&f->file, texts[i].column, &f->text_column[i]));
        else f->text_column[i] = find(f, texts[i].column);
    TRY(csv_need(&f->file, "budget", &f->budget_column));
    TRY(csv_need(&f->file, "lag", &f->lag_column));
    if (f->is_truth) {
        f->mode_column = find(f, "mode");
        TRY(csv_need(&f->file, "true_dloss", &f->true_dloss_column));
        return csv_need(&f->file, "true_kl", &f->true_kl_column);
    }
    for (size_t m = 0; m < RESULTS_METRICS; m++) {
        f->metric_column[m] = find(f, results_metrics[m].column);
        f->lo_column[m] = find(f, results_metrics[m].lo);
        f->hi_column[m] = find(f, results_metrics[m].hi);
    }
    for (size_t k = 0; k < RESULTS_COSTS; k++) f->cost_column[k] = find(f, results_costs[k]);
    return 0;
}

static int read_key(const reader *f, result *r) {
    const csv *c = &f->file;
    r->line = c->line;
    for (size_t i = 0; i < N_TEXTS; i++) {
        const char *absent = texts[i].absent ? texts[i].absent : "";
        *(const char **)((char *)r + texts[i].offset) =
            f->text_column[i] == CSV_ABSENT ? absent : c->field[f->text_column[i]];
    }
    TRY(csv_number(c, f->budget_column, 1, &r->budget));
    r->lag = -1;
    return *c->field[f->lag_column] ? csv_number(c, f->lag_column, 0, &r->lag) : 0;
}

/* NaN where the column or the value is not there. */
static int read_optional(const csv *c, size_t column, double *out) {
    *out = NAN;
    return column == CSV_ABSENT || !*c->field[column] ? 0 : csv_number(c, column, -INFINITY, out);
}

static int read_metrics(const reader *f, result *r) {
    for (size_t m = 0; m < RESULTS_METRICS; m++) {
        TRY(read_optional(&f->file, f->metric_column[m], &r->metric[m]));
        TRY(read_optional(&f->file, f->lo_column[m], &r->lo[m]));
        TRY(read_optional(&f->file, f->hi_column[m], &r->hi[m]));
        if (r->lo[m] > r->hi[m])
            return err_set(ERR_DATA, "%s:%zu: %s %g is above %s %g", f->file.path, r->line, results_metrics[m].lo,
                           r->lo[m], results_metrics[m].hi, r->hi[m]);
        if (isnan(r->lo[m]) || isnan(r->hi[m])) r->lo[m] = r->hi[m] = NAN;
    }
    for (size_t k = 0; k < RESULTS_COSTS; k++) TRY(read_optional(&f->file, f->cost_column[k], &r->cost[k]));
    return 0;
}

static bool is_full(const result *r) {
    return strcmp(r->policy, "full") == 0;
}

/* The full cache at full precision costs nothing: it is what all others are compared with. */
static bool is_reference(const result *r) {
    return is_full(r) && strcmp(r->kv_bits, "16") == 0;
}

/* A true KL that should be 0 may come out below it by a rounding. */
static int read_truth(const reader *f, result_truth *t) {
    TRY(read_key(f, &t->key));
    t->mode = f->mode_column == CSV_ABSENT ? "" : f->file.field[f->mode_column];
    TRY(csv_number(&f->file, f->true_dloss_column, -INFINITY, &t->dloss));
    return csv_number(&f->file, f->true_kl_column, -INFINITY, &t->kl);
}

/* What the files' rows are collected in. */
typedef struct collected {
    results *r;
    size_t rows, truths; /* room for so many */
} collected;

static int add_row(const reader *f, size_t file, size_t at, collected *to) {
    results *r = to->r;
    TRY(mem_grow((void **)&r->rows, &to->rows, r->n_rows + 1, sizeof *r->rows, "results"));
    result *row = &r->rows[r->n_rows];
    row->file = file;
    row->row = at;
    TRY(read_key(f, row));
    TRY(read_metrics(f, row));
    r->n_rows++;
    return 0;
}

static int add_truth(const reader *f, size_t file, collected *to) {
    results *r = to->r;
    TRY(mem_grow((void **)&r->truths, &to->truths, r->n_truths + 1, sizeof *r->truths, "truths"));
    result_truth *truth = &r->truths[r->n_truths];
    truth->key.file = file;
    TRY(read_truth(f, truth));
    r->n_truths += !is_full(&truth->key);
    return 0;
}

static int read_rows(reader *f, size_t file, collected *to) {
    f->is_truth = csv_has_comment(&f->file, "# kvlag truth") || find(f, "true_kl") != CSV_ABSENT;
    to->r->uncalibrated |= !f->is_truth && csv_has_comment(&f->file, "# calibration: uncalibrated");
    TRY(find_columns(f));
    bool more;
    for (size_t n = 0;; n++) {
        TRY(csv_next(&f->file, &more));
        if (!more) return n ? 0 : err_set(ERR_DATA, "%s: no data rows", f->file.path);
        TRY(f->is_truth ? add_truth(f, file, to) : add_row(f, file, n, to));
    }
}

static int read_file(const char *path, size_t file, collected *to) {
    reader f = {0};
    int code = csv_open(path, NULL, &f.file);
    if (!code) code = read_rows(&f, file, to);
    to->r->file_text[file] = csv_keep(&f.file);
    csv_close(&f.file);
    return code;
}

/* ---- configurations --------------------------------------------------------------------------------------------- */

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

int result_compare(const result *a, const result *b) {
    int c = compare_config(a, b);
    return c ? c : compare_sequence(&a, &b);
}

static int compare_row(const void *pa, const void *pb) {
    const result *a = *(const result *const *)pa, *b = *(const result *const *)pb;
    int c = result_compare(a, b);
    return c ? c : (a > b) - (a < b);
}

static int compare_place(const void *pa, const void *pb) {
    const result *a = pa, *b = pb;
    if (a->file != b->file) return a->file < b->file ? -1 : 1;
    return (a->line > b->line) - (a->line < b->line);
}

/* Every run may write rows for the full cache, so that those may come again in another file. */
static int refuse_duplicates(const results *r, const result *const *sorted, const char *const *paths) {
    for (size_t i = 1; i < r->n_rows; i++) {
        const result *a = sorted[i - 1], *b = sorted[i];
        if (!is_full(a) && result_compare(a, b) == 0)
            return err_set(ERR_DATA, "%s:%zu: the same configuration as %s:%zu (%s, budget %s, trace %s, seq %s)",
                           paths[b->file], b->line, paths[a->file], a->line, b->spec, b->budget_asked, b->trace,
                           b->seq);
    }
    return 0;
}

/* Of equal rows of the full cache the first stays. Returns how many rows are left. */
static size_t drop_repeated(const result **sorted, size_t n) {
    size_t left = 0;
    for (size_t i = 0; i < n; i++)
        if (!left || !is_full(sorted[i]) || result_compare(sorted[left - 1], sorted[i]) != 0)
            sorted[left++] = sorted[i];
    return left;
}

/* The mean of n rows of one configuration. It takes the place of the earliest of them. So do the ends of its intervals,
 * which then are too wide rather than too narrow; bootstrap.h knows better where there are sums over blocks. */
static result mean_of(const result *const *row, size_t n) {
    result mean = *row[0];
    mean.trace = mean.seq = "";
    mean.part = row;
    mean.n_parts = n;
    for (size_t i = 1; i < n; i++) {
        if (compare_place(row[i], &mean) < 0) {
            mean.file = row[i]->file;
            mean.line = row[i]->line;
            mean.row = row[i]->row;
        }
        mean.budget += row[i]->budget;
        for (size_t k = 0; k < RESULTS_COSTS; k++) mean.cost[k] += row[i]->cost[k];
        for (size_t m = 0; m < RESULTS_METRICS; m++) {
            mean.metric[m] += row[i]->metric[m];
            mean.lo[m] += row[i]->lo[m];
            mean.hi[m] += row[i]->hi[m];
        }
    }
    mean.budget /= (double)n;
    for (size_t k = 0; k < RESULTS_COSTS; k++) mean.cost[k] /= (double)n;
    for (size_t m = 0; m < RESULTS_METRICS; m++) {
        mean.metric[m] /= (double)n;
        mean.lo[m] /= (double)n;
        mean.hi[m] /= (double)n;
    }
    return mean;
}

static void average(results *r, const result *const *sorted, size_t n_sorted) {
    for (size_t i = 0, n; i < n_sorted; i += n) {
        for (n = 1; i + n < n_sorted && compare_config(sorted[i], sorted[i + n]) == 0;) n++;
        if (is_reference(sorted[i])) continue;
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
        if (!result_evicts(&r->configs[i])) continue;
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
    const result **sorted = r->sorted = mem_new(r->n_rows, sizeof *sorted, "results");
    if (!sorted) return ERR_DATA;
    for (size_t i = 0; i < r->n_rows; i++) sorted[i] = &r->rows[i];
    qsort(sorted, r->n_rows, sizeof *sorted, compare_sequence);
    for (size_t i = 0; i < r->n_rows; i++)
        r->n_sequences += i == 0 || compare_sequence(&sorted[i - 1], &sorted[i]) != 0;
    qsort(sorted, r->n_rows, sizeof *sorted, compare_row);
    int code = refuse_duplicates(r, sorted, paths);
    r->configs = code ? NULL : mem_new(r->n_rows, sizeof *r->configs, "configurations");
    if (r->configs) average(r, sorted, drop_repeated(sorted, r->n_rows));
    return r->configs ? collect_budgets(r) : ERR_DATA;
}

int results_read(const char *const *paths, size_t n, results **out) {
    results *r = mem_new(1, sizeof *r, "results");
    if (!r) return ERR_DATA;
    collected to = {.r = r};
    r->n_files = n;
    r->paths = paths;
    r->file_text = mem_new(n, sizeof *r->file_text, "results");
    int code = r->file_text ? 0 : ERR_DATA;
    for (size_t i = 0; i < n && !code; i++) code = read_file(paths[i], i, &to);
    if (!code && !r->n_rows)
        code = err_set(ERR_DATA, "%s: true reruns only; give the results of kvlag sim beside them", paths[0]);
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
    mem_free(r->sorted);
    mem_free(r->truths);
    mem_free(r->configs);
    mem_free(r->budgets);
    mem_free(r);
}

/* ---- questions -------------------------------------------------------------------------------------------------- */

size_t results_pick_metrics(const results *r, size_t out[RESULTS_METRICS]) {
    for (metric_kind kind = METRIC_LOSS; kind <= METRIC_DISTURBANCE; kind++) {
        size_t n = 0;
        for (size_t m = 0; m < RESULTS_METRICS; m++) {
            bool any = false;
            for (size_t i = 0; i < r->n_configs; i++) any |= !isnan(r->configs[i].metric[m]);
            if (any && results_metrics[m].kind == kind) out[n++] = m;
        }
        if (n) return n;
    }
    return 0;
}

bool result_evicts(const result *c) {
    return !is_full(c);
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

/* FNV-1a over the columns of text, each with its end. */
static uint32_t hash_texts(const result *c, bool series) {
    uint32_t hash = 2166136261u;
    for (size_t i = 0; i < N_TEXTS; i++) {
        if (series ? !texts[i].series : !texts[i].key) continue;
        const char *word = text_of(c, i);
        for (size_t k = 0, n = strlen(word) + 1; k < n; k++) hash = (hash ^ (unsigned char)word[k]) * 16777619u;
    }
    return hash;
}

uint32_t result_series_hash(const result *c) {
    return hash_texts(c, true);
}

uint32_t result_hash(const result *c) {
    char lag[32];
    uint32_t hash = hash_texts(c, false);
    for (const char *word = text_number(lag, c->lag); *word; word++) hash = (hash ^ (unsigned char)*word) * 16777619u;
    return hash;
}

/* Precision is named where it is not the usual: kv_bits that are not 16, and pending_bits that are not kv_bits. Other
 * columns are where some series of the same spec has another value. */
static bool must_be_named(const results *r, const result *c, size_t i) {
    if (texts[i].offset == offsetof(result, kv_bits)) return strcmp(c->kv_bits, "16") != 0;
    if (texts[i].offset == offsetof(result, pending_bits)) return strcmp(c->pending_bits, c->kv_bits) != 0;
    for (size_t k = 0; k < r->n_configs; k++) {
        const result *o = &r->configs[k];
        if (strcmp(o->spec, c->spec) == 0 && strcmp(text_of(o, i), text_of(c, i)) != 0) return true;
    }
    return false;
}

char *result_series_name(const results *r, const result *c) {
    text name = {0};
    int code = text_add(&name, "%s", c->spec);
    for (size_t i = 1; i < N_TEXTS && !code; i++) {
        if (!texts[i].series) continue;
        if (must_be_named(r, c, i)) code = text_add(&name, ", %s %s", texts[i].column, text_of(c, i));
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
