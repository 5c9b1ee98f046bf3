#include "analyze/fidelity.h"
#include "analyze/statistics.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/progress.h"
#include "base/text.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *const fidelity_families[FIDELITY_FAMILIES] = {"window", "static", "attention", "oracle", "other"};

fidelity_family fidelity_family_of(const char *policy) {
    static const struct {
        const char *policy;
        fidelity_family family;
    } known[] = {
        {"window", FIDELITY_WINDOW}, {"streaming", FIDELITY_STATIC}, {"random", FIDELITY_STATIC},
        {"h2o", FIDELITY_ATTENTION}, {"ema", FIDELITY_ATTENTION},    {"tova", FIDELITY_ATTENTION},
        {"lru", FIDELITY_ATTENTION}, {"rmm", FIDELITY_ATTENTION},    {"mix", FIDELITY_ATTENTION},
        {"oracle", FIDELITY_ORACLE},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strcmp(known[i].policy, policy) == 0) return known[i].family;
    return FIDELITY_OTHER;
}

/* ---- the join --------------------------------------------------------------------------------------------------- */

static int compare_rows(const void *pa, const void *pb) {
    return result_compare(*(const result *const *)pa, *(const result *const *)pb);
}

static int compare_truths(const void *pa, const void *pb) {
    const result_truth *a = *(const result_truth *const *)pa, *b = *(const result_truth *const *)pb;
    int c = result_compare(&a->key, &b->key);
    return c ? c : strcmp(a->mode, b->mode);
}

static int refuse_twice(const results *r, const result_truth *const *sorted) {
    for (size_t i = 1; i < r->n_truths; i++) {
        const result *a = &sorted[i - 1]->key, *b = &sorted[i]->key;
        if (compare_truths(&sorted[i - 1], &sorted[i]) == 0)
            return err_set(ERR_DATA, "%s:%zu: the same true rerun as %s:%zu (%s, budget %s, trace %s, seq %s)",
                           r->paths[b->file], b->line, r->paths[a->file], a->line, b->spec, b->budget_asked, b->trace,
                           b->seq);
    }
    return 0;
}

/* "trace t, seq 0, h2o, budget 64, lag 8, unit head, schedule step, pending charged, prompt 0" */
static int add_key(text *t, const result *r) {
    TRY(text_add(t, "trace %s, seq %s, %s, budget %s, ", r->trace, r->seq, r->spec, r->budget_asked));
    TRY(r->lag < 0 ? text_add(t, "no lag") : text_add(t, "lag %g", r->lag));
    TRY(text_add(t, ", unit %s, schedule %s, pending %s, prompt %s", r->unit, r->schedule, r->pending, r->n_prompt));
    if (strcmp(r->kv_bits, "16") == 0 && strcmp(r->pending_bits, "16") == 0) return 0;
    return text_add(t, ", kv_bits %s, pending_bits %s", r->kv_bits, r->pending_bits);
}

static int nothing_in_common(const results *r) {
    const result *row = r->rows, *truth = &r->truths[0].key;
    text keys[2] = {{0}, {0}};
    while (row + 1 < r->rows + r->n_rows && strcmp(row->policy, "full") == 0) row++;
    int code = add_key(&keys[0], row);
    if (!code) code = add_key(&keys[1], truth);
    if (!code)
        code = err_set(ERR_DATA, "%s and %s have no configuration in common: %s; %s", r->paths[row->file],
                       r->paths[truth->file], keys[0].data, keys[1].data);
    text_free(&keys[0]);
    text_free(&keys[1]);
    return code;
}

/* The group of a mode, begun if it is not there. */
static int find_mode(fidelity_list *list, size_t *capacity, const result_truth *truth, size_t most, fidelity **out) {
    for (size_t i = 0; i < list->n; i++) {
        *out = &list->item[i];
        if (strcmp(list->item[i].mode, truth->mode) == 0) return 0;
    }
    TRY(mem_grow((void **)&list->item, capacity, list->n + 1, sizeof *list->item, "truths"));
    *out = &list->item[list->n];
    **out = (fidelity){.mode = truth->mode, .pairs = mem_new(most, sizeof(fidelity_pair), "truths")};
    if (!(*out)->pairs) return ERR_DATA;
    list->n++;
    return 0;
}

static void add_pair(fidelity *f, const result *row, const result_truth *truth) {
    bool fresh = true;
    for (size_t i = 0; i < f->n && fresh; i++)
        fresh = strcmp(f->pairs[i].row->trace, row->trace) != 0 || strcmp(f->pairs[i].row->seq, row->seq) != 0;
    f->n_sequences += fresh;
    f->pairs[f->n++] = (fidelity_pair){row, truth->dloss, truth->kl, fidelity_family_of(row->policy)};
}

static int join_sorted(const results *r, const result *const *rows, const result_truth *const *truths,
                       fidelity_list *out) {
    size_t capacity = 0, missing = 0;
    TRY(refuse_twice(r, truths));
    for (size_t i = 0; i < r->n_truths; i++) {
        const result *key = &r->truths[i].key;
        const result *const *found = bsearch(&key, rows, r->n_rows, sizeof *rows, compare_rows);
        fidelity *f;
        missing += !found;
        if (!found || ((*found)->metric[LOST_MASS] == 0 && r->truths[i].kl == 0)) continue;
        TRY(find_mode(out, &capacity, &r->truths[i], r->n_truths, &f));
        add_pair(f, *found, &r->truths[i]);
    }
    if (missing == r->n_truths) return nothing_in_common(r);
    if (missing) say("%zu of %zu true reruns have no estimate and are left out", missing, r->n_truths);
    return 0;
}

int fidelity_join(const results *r, fidelity_list *out) {
    *out = (fidelity_list){0};
    if (!r->n_truths) return 0;
    const result **rows = mem_new(r->n_rows, sizeof *rows, "results");
    const result_truth **truths = mem_new(r->n_truths, sizeof *truths, "truths");
    int code = rows && truths ? 0 : ERR_DATA;
    if (!code) {
        for (size_t i = 0; i < r->n_rows; i++) rows[i] = &r->rows[i];
        for (size_t i = 0; i < r->n_truths; i++) truths[i] = &r->truths[i];
        qsort(rows, r->n_rows, sizeof *rows, compare_rows);
        qsort(truths, r->n_truths, sizeof *truths, compare_truths);
        code = join_sorted(r, rows, truths, out);
    }
    mem_free(rows);
    mem_free(truths);
    return code;
}

void fidelity_free(fidelity_list *list) {
    for (size_t i = 0; i < list->n; i++) mem_free(list->item[i].pairs);
    mem_free(list->item);
    *list = (fidelity_list){0};
}

/* ---- statistics ------------------------------------------------------------------------------------------------- */

static double log_or_nan(double x) {
    return x > 0 ? log(x) : NAN;
}

int fidelity_correlate(const fidelity *f, size_t metric, fidelity_correlation *out) {
    size_t n = 0, large = 0;
    double *columns = mem_new(5 * f->n, sizeof *columns, "correlations");
    if (!columns) return ERR_DATA;
    double *value = columns, *kl = value + f->n, *dloss = kl + f->n, *log_value = dloss + f->n,
           *log_kl = log_value + f->n;
    for (size_t i = 0; i < f->n; i++) {
        const fidelity_pair *p = &f->pairs[i];
        if (isnan(p->row->metric[metric])) continue;
        value[n] = p->row->metric[metric];
        kl[n] = p->true_kl;
        dloss[n++] = p->true_dloss;
        if (p->true_kl < FIDELITY_LEAST_KL) continue;
        log_value[large] = log_or_nan(p->row->metric[metric]);
        log_kl[large++] = log(p->true_kl);
    }
    *out = (fidelity_correlation){.n = n,
                                  .kl_pearson = statistics_pearson(log_value, log_kl, large),
                                  .dloss_pearson = statistics_pearson(value, dloss, n)};
    int code = statistics_spearman(value, kl, n, &out->kl_spearman);
    if (!code) code = statistics_spearman(value, dloss, n, &out->dloss_spearman);
    mem_free(columns);
    return code;
}

/* Logarithms of true KL over metric, of one family or of all. */
static size_t log_ratios(const fidelity *f, size_t metric, int family, double *out) {
    size_t n = 0;
    for (size_t i = 0; i < f->n; i++) {
        const fidelity_pair *p = &f->pairs[i];
        if ((family != FIDELITY_ALL && (int)p->family != family) || p->true_kl < FIDELITY_LEAST_KL) continue;
        if (p->row->metric[metric] > 0) out[n++] = log(p->true_kl / p->row->metric[metric]);
    }
    return n;
}

int fidelity_compare(const fidelity *f, size_t metric, int family, fidelity_ratio *out) {
    double *ratio = mem_new(f->n, sizeof *ratio, "ratios"), squares = 0;
    size_t families = 0;
    if (!ratio) return ERR_DATA;
    if (family != FIDELITY_WITHIN) {
        out->n = log_ratios(f, metric, family, ratio);
        out->scale = exp(statistics_mean(ratio, out->n));
        out->spread = exp(statistics_deviation(ratio, out->n));
        mem_free(ratio);
        return 0;
    }
    *out = (fidelity_ratio){.scale = NAN};
    for (int k = 0; k < FIDELITY_FAMILIES; k++) {
        size_t n = log_ratios(f, metric, k, ratio);
        double deviation = statistics_deviation(ratio, n);
        if (n > 1) squares += deviation * deviation * (double)(n - 1);
        families += n > 0;
        out->n += n;
    }
    out->spread = out->n > families ? exp(sqrt(squares / (double)(out->n - families))) : NAN;
    mem_free(ratio);
    return 0;
}

fidelity_coverage fidelity_cover(const fidelity *f, size_t metric, double least_kl) {
    fidelity_coverage c = {0};
    for (size_t i = 0; i < f->n; i++) {
        const fidelity_pair *p = &f->pairs[i];
        double truth = metric == KL_EST ? p->true_kl : p->true_dloss;
        if (isnan(p->row->lo[metric]) || p->true_kl < least_kl) continue;
        c.n++;
        c.held += p->row->lo[metric] <= truth && truth <= p->row->hi[metric];
    }
    c.too_low = statistics_binomial_most(c.held, c.n, 0.85);
    c.too_high = statistics_binomial_least(c.held, c.n, 0.95);
    c.stands = c.too_low >= 0.005 && c.too_high >= 0.005;
    return c;
}

/* ---- the table -------------------------------------------------------------------------------------------------- */

/* The number, or a dash where there is none. */
static void print_number(int width, double value) {
    if (isnan(value)) printf(" %*s", width, "-");
    else printf(" %*.3f", width, value);
}

static int print_correlations(const fidelity *f) {
    static const size_t shown[] = {LOST_MASS, OUT_ERR, DLOSS_FIRST, FISHER, KL_EST, DLOSS_EST};
    printf("%-12s %23s %23s\n%-12s %9s %13s %9s %13s %6s\n", "", "---- true KL ----", "- true loss change -", "",
           "Spearman", "Pearson, logs", "Spearman", "Pearson", "n");
    for (size_t i = 0; i < sizeof shown / sizeof *shown; i++) {
        fidelity_correlation c;
        TRY(fidelity_correlate(f, shown[i], &c));
        if (!c.n) continue;
        printf("%-12s", results_metrics[shown[i]].column);
        print_number(9, c.kl_spearman);
        print_number(13, c.kl_pearson);
        print_number(9, c.dloss_spearman);
        print_number(13, c.dloss_pearson);
        printf(" %6zu\n", c.n);
    }
    return 0;
}

static int print_ratios(const fidelity *f) {
    static const size_t shown[] = {KL_EST, FISHER};
    fidelity_ratio all, one;
    TRY(fidelity_compare(f, KL_EST, FIDELITY_ALL, &all));
    if (!all.n) return 0;
    printf("\n%-18s %19s %19s\n%-18s", "", "- true KL / kl_est -", "- true KL / fisher -", "");
    for (int i = 0; i < 2; i++) printf(" %9s %9s", "scale", "spread");
    printf(" %6s\n", "n");
    for (int k = 0; k <= FIDELITY_WITHIN; k++) {
        /* All, each family, within families. */
        int family = k == 0 ? FIDELITY_ALL : k == FIDELITY_WITHIN ? FIDELITY_WITHIN : k - 1;
        TRY(fidelity_compare(f, KL_EST, family, &all));
        if (!all.n) continue;
        printf("%-18s", k == 0 ? "all" : k == FIDELITY_WITHIN ? "within families" : fidelity_families[family]);
        for (int i = 0; i < 2; i++) {
            TRY(fidelity_compare(f, shown[i], family, &one));
            print_number(9, one.scale);
            print_number(9, one.spread);
        }
        printf(" %6zu\n", all.n);
    }
    return 0;
}

static void print_coverage(const fidelity *f) {
    static const struct {
        const char *what;
        size_t metric;
        double least_kl;
    } shown[] = {
        {"kl, true KL >= .003", KL_EST, FIDELITY_LEAST_KL},
        {"kl, all", KL_EST, -INFINITY},
        {"dloss, true KL >= .003", DLOSS_EST, FIDELITY_LEAST_KL},
        {"dloss, all", DLOSS_EST, -INFINITY},
    };
    bool any = false;
    for (size_t i = 0; i < sizeof shown / sizeof *shown; i++) {
        fidelity_coverage c = fidelity_cover(f, shown[i].metric, shown[i].least_kl);
        if (!c.n) continue;
        if (!any)
            printf("\n%-22s %12s %7s %12s %12s  %s\n", "90 % interval", "held", "share", "P(<=k | .85)", "P(>=k | .95)",
                   "85 to 95 % at the 1 % level");
        any = true;
        printf("%-22s %5zu of %3zu %6.1f%% %12.4g %12.4g  %s\n", shown[i].what, c.held, c.n,
               100 * (double)c.held / (double)c.n, c.too_low, c.too_high,
               c.stands                 ? "not rejected"
               : c.too_low < c.too_high ? "rejected: too low"
                                        : "rejected: too high");
    }
}

int fidelity_print(const fidelity *f, const results *r) {
    size_t large = 0;
    for (size_t i = 0; i < f->n; i++) large += f->pairs[i].true_kl >= FIDELITY_LEAST_KL;
    printf("\nEstimates against true reruns%s%s: %zu on %zu sequence%s, %zu of them with a true KL of %g or more%s\n\n",
           *f->mode ? ", mode " : "", f->mode, f->n, f->n_sequences, f->n_sequences == 1 ? "" : "s", large,
           FIDELITY_LEAST_KL, r->uncalibrated ? "; uncalibrated" : "");
    TRY(print_correlations(f));
    TRY(print_ratios(f));
    print_coverage(f);
    return 0;
}
