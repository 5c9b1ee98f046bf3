/* kvlag compare A.csv B.csv: what changed between two sets of results. */
#include "analyze/analyze.h"
#include "analyze/changes.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/options.h"
#include "base/outfile.h"
#include "base/progress.h"
#include "base/text.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_ROWS = 20, NAME_MOST = 44 };

typedef struct job {
    opt_list files;
    const char *out;
    bool unpaired, json, force, quiet, verbose;
    changes_side a, b;
    changes changes;
    bool paired;
} job;

static int parse(job *j, int argc, char **argv) {
    const opt table[] = {
        {"output", 'o', OPT_FILE, false, &j->out, "FILE.csv", "write the change of every configuration", 0, 0},
        {"unpaired", 0, OPT_FLAG, true, &j->unpaired, NULL, "compare results of different traces all the same", 0, 0},
        {"json", 0, OPT_FLAG, false, &j->json, NULL, "for programs", 0, 0},
        {"force", 0, OPT_FLAG, false, &j->force, NULL, "replace FILE.csv", 0, 0},
        {"quiet", 'q', OPT_FLAG, false, &j->quiet, NULL, "say nothing on stderr", 0, 0},
        {"verbose", 'v', OPT_FLAG, false, &j->verbose, NULL, "say more", 0, 0},
        {0},
    };
    TRY(opt_parse(table, argc, argv, &j->files));
    say_level(j->quiet ? SAY_QUIET : j->verbose ? SAY_MORE : SAY_NORMAL);
    if (j->files.n == 2) return 0;
    return err_set(ERR_USAGE, "compare: two results files, got %zu (kvlag compare A.csv B.csv)", j->files.n);
}

/* ---- reading ---------------------------------------------------------------------------------------------------- */

static int read_sides(job *j) {
    char *why;
    TRY(changes_read(j->files.item, 0, &j->a));
    TRY(changes_read(j->files.item + 1, j->unpaired ? 1 : 0, &j->b));
    j->paired = !j->unpaired;
    if (j->unpaired) return 0;
    TRY(changes_can_pair(&j->a, &j->b, &why));
    int code =
        why ? err_set(ERR_DATA,
                      "%s and %s cannot be paired: %s (--unpaired compares their means, with far wider intervals)",
                      j->files.item[0], j->files.item[1], why)
            : 0;
    mem_free(why);
    return code;
}

/* ---- the table -------------------------------------------------------------------------------------------------- */

/* What rows are sorted by: qsort has no context. */
typedef struct weighed {
    const change *of;
    double p, size; /* of the tested metric */
} weighed;

/* Significant ones, then by p value, then by size; unknown ones last. */
static int by_weight(const void *pa, const void *pb) {
    const weighed *a = pa, *b = pb;
    if (a->of->significant != b->of->significant) return a->of->significant ? -1 : 1;
    if (isnan(a->p) != isnan(b->p)) return isnan(a->p) ? 1 : -1;
    if (a->p < b->p || a->p > b->p) return a->p < b->p ? -1 : 1;
    if (isnan(a->size) != isnan(b->size)) return isnan(a->size) ? 1 : -1;
    if (a->size < b->size || a->size > b->size) return a->size > b->size ? -1 : 1;
    return (a->of > b->of) - (a->of < b->of);
}

static void print_change(const job *j, const change *c, const char *name) {
    size_t m = j->changes.metric;
    char lag[32] = "", interval[64] = "", p[32] = "";
    if (c->a->lag >= 0) snprintf(lag, sizeof lag, "%.10g", c->a->lag);
    if (!isnan(c->by[m].lo)) snprintf(interval, sizeof interval, "%.3g..%.3g", c->by[m].lo, c->by[m].hi);
    if (!isnan(c->p[m])) snprintf(p, sizeof p, "%.2g", c->p[m]);
    printf("%-*.*s %7s %5s %-8s %10.4g %10.4g %+11.3g  %-20s %7s%s\n", 26, NAME_MOST, name, c->a->budget_asked, lag,
           c->a->pending, c->a->metric[m], c->b->metric[m], c->by[m].value, interval, p, c->significant ? " *" : "");
}

static int print_changes(const job *j) {
    const changes *c = &j->changes;
    weighed *sorted = mem_new(c->n, sizeof *sorted, "changes");
    if (!sorted) return ERR_DATA;
    for (size_t i = 0; i < c->n; i++) {
        const change *x = &c->item[i];
        sorted[i] = (weighed){x, x->p[c->metric], fabs(x->by[c->metric].value)};
    }
    qsort(sorted, c->n, sizeof *sorted, by_weight);
    printf("%-26s %7s %5s %-8s %10s %10s %11s  %-20s %7s\n", "policy", "budget", "lag", "pending", "A", "B", "B - A",
           c->tested ? "90% interval" : "", c->tested ? "p" : "");
    int code = 0;
    for (size_t i = 0; i < c->n && i < MOST_ROWS && !code; i++) {
        char *name = result_series_name(j->a.results, sorted[i].of->a);
        if (name) print_change(j, sorted[i].of, name);
        else code = ERR_DATA;
        mem_free(name);
    }
    if (c->n > MOST_ROWS) printf("... and %zu more%s\n", c->n - MOST_ROWS, j->out ? "" : " (-o FILE.csv has them all)");
    mem_free(sorted);
    return code;
}

static int print_only(const results *r, const result *const *list, size_t n, const char *path) {
    if (n) printf("\nOnly in %s: %zu\n", path, n);
    for (size_t i = 0; i < n && i < MOST_ROWS; i++) {
        char *name = result_series_name(r, list[i]);
        if (!name) return ERR_DATA;
        printf("  %s, budget %s", name, list[i]->budget_asked);
        if (list[i]->lag >= 0) printf(", lag %.10g", list[i]->lag);
        printf("%s\n", result_is_free(list[i]) ? ", pending free" : "");
        mem_free(name);
    }
    if (n > MOST_ROWS) printf("  ... and %zu more\n", n - MOST_ROWS);
    return 0;
}

static void print_summary(const job *j) {
    const changes *c = &j->changes;
    const char *column = results_metrics[c->metric].column;
    if (c->same) {
        printf("%s and %s hold the same %zu configurations with the same values.\n", j->files.item[0], j->files.item[1],
               c->n);
        return;
    }
    if (!c->tested && c->unknown) {
        printf("%zu configurations are in both; whether %s changed more than by chance is not known, since one of them "
               "has no FILE.blocks.h5 beside it.\n",
               c->n, column);
        return;
    }
    printf(
        "%zu of %zu configurations changed significantly in %s (%s; Benjamini and Hochberg, 10 %% false): %zu better, "
        "%zu worse; %zu did not change at all.\n",
        c->better + c->worse, c->n, column, j->paired ? "paired" : "unpaired", c->better, c->worse, c->n_same);
    if (results_metrics[c->metric].kind == METRIC_LOSS && j->a.results->uncalibrated != j->b.results->uncalibrated)
        printf(
            "One of them is uncalibrated: changes of estimates are partly those of the calibration; lost mass is free "
            "of it.\n");
}

static int print_all(const job *j) {
    const changes *c = &j->changes;
    printf("A: %s\nB: %s\n\n", j->files.item[0], j->files.item[1]);
    if (!c->same) TRY(print_changes(j));
    TRY(print_only(j->a.results, c->only_a, c->n_only_a, j->files.item[0]));
    TRY(print_only(j->b.results, c->only_b, c->n_only_b, j->files.item[1]));
    if (!c->same) printf("\n");
    print_summary(j);
    return 0;
}

/* ---- CSV -------------------------------------------------------------------------------------------------------- */

static int add_number(text *t, double value) {
    char number[32];
    return isnan(value) ? text_add(t, ",") : text_add(t, ",%s", text_number(number, value));
}

static int add_row(const changes *c, const change *x, text *t) {
    const result *a = x->a;
    const char *const words[] = {a->budget_asked, a->unit,    a->schedule,    a->pending,
                                 a->n_prompt,     a->kv_bits, a->pending_bits};
    TRY(text_add_csv(t, a->spec));
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        TRY(text_add(t, ","));
        TRY(text_add_csv(t, words[i]));
    }
    TRY(add_number(t, a->lag < 0 ? NAN : a->lag));
    for (size_t k = 0; k < c->n_shown; k++) {
        size_t m = c->shown[k];
        const double values[] = {a->metric[m], x->b->metric[m], x->by[m].value, x->by[m].lo, x->by[m].hi, x->p[m]};
        for (size_t i = 0; i < sizeof values / sizeof *values; i++) TRY(add_number(t, values[i]));
    }
    return text_add(t, ",%d\n", x->significant);
}

static int make_csv(const job *j, text *t) {
    const changes *c = &j->changes;
    TRY(text_add(t, "# kvlag changes v1\nspec,budget_asked,unit,schedule,pending,n_prompt,kv_bits,pending_bits,lag"));
    for (size_t k = 0; k < c->n_shown; k++) {
        const char *m = results_metrics[c->shown[k]].column;
        TRY(text_add(t, ",%s_a,%s_b,%s_change,%s_change_lo,%s_change_hi,%s_p", m, m, m, m, m, m));
    }
    TRY(text_add(t, ",significant\n"));
    for (size_t i = 0; i < c->n; i++) TRY(add_row(c, &c->item[i], t));
    return 0;
}

static int write_csv(const job *j, outfile *out) {
    text t = {0};
    int code = make_csv(j, &t);
    if (!code) code = outfile_write(out, t.data, t.n);
    if (!code) code = outfile_commit(out);
    text_free(&t);
    return code;
}

/* ---- JSON ------------------------------------------------------------------------------------------------------- */

static cJSON *number(double value) {
    return isfinite(value) ? cJSON_CreateNumber(value) : cJSON_CreateNull();
}

/* What lacks memory is found by counting: *bad is set where anything could not be added. */
static void put(cJSON *to, const char *key, cJSON *item, bool *bad) {
    *bad |= !item || !(key ? cJSON_AddItemToObject(to, key, item) : cJSON_AddItemToArray(to, item));
}

static cJSON *json_config(const results *r, const result *c, bool *bad) {
    cJSON *o = cJSON_CreateObject();
    char *name = result_series_name(r, c);
    put(o, "name", cJSON_CreateString(name ? name : ""), bad);
    put(o, "spec", cJSON_CreateString(c->spec), bad);
    put(o, "budget_asked", cJSON_CreateString(c->budget_asked), bad);
    put(o, "lag", number(c->lag < 0 ? NAN : c->lag), bad);
    put(o, "pending", cJSON_CreateString(c->pending), bad);
    put(o, "unit", cJSON_CreateString(c->unit), bad);
    put(o, "schedule", cJSON_CreateString(c->schedule), bad);
    put(o, "kv_bits", cJSON_CreateString(c->kv_bits), bad);
    put(o, "pending_bits", cJSON_CreateString(c->pending_bits), bad);
    mem_free(name);
    return o;
}

static cJSON *json_change(const job *j, const change *x, bool *bad) {
    const changes *c = &j->changes;
    cJSON *o = json_config(j->a.results, x->a, bad);
    for (size_t k = 0; k < c->n_shown; k++) {
        size_t m = c->shown[k];
        cJSON *v = cJSON_CreateObject();
        put(v, "a", number(x->a->metric[m]), bad);
        put(v, "b", number(x->b->metric[m]), bad);
        put(v, "change", number(x->by[m].value), bad);
        put(v, "lo", number(x->by[m].lo), bad);
        put(v, "hi", number(x->by[m].hi), bad);
        put(v, "p", number(x->p[m]), bad);
        put(o, results_metrics[m].column, v, bad);
    }
    put(o, "significant", cJSON_CreateBool(x->significant), bad);
    return o;
}

static void fill(const job *j, cJSON *root, bool *bad) {
    const changes *c = &j->changes;
    cJSON *all = cJSON_CreateArray(), *only_a = cJSON_CreateArray(), *only_b = cJSON_CreateArray();
    put(root, "format", cJSON_CreateString("kvlag-changes"), bad);
    put(root, "version", cJSON_CreateNumber(1), bad);
    put(root, "a", cJSON_CreateString(text_base_name(j->files.item[0])), bad);
    put(root, "b", cJSON_CreateString(text_base_name(j->files.item[1])), bad);
    put(root, "same", cJSON_CreateBool(c->same), bad);
    put(root, "paired", cJSON_CreateBool(j->paired), bad);
    put(root, "metric", cJSON_CreateString(results_metrics[c->metric].column), bad);
    put(root, "in_both", cJSON_CreateNumber((double)c->n), bad);
    put(root, "unchanged", cJSON_CreateNumber((double)c->n_same), bad);
    put(root, "tested", cJSON_CreateNumber((double)c->tested), bad);
    put(root, "better", cJSON_CreateNumber((double)c->better), bad);
    put(root, "worse", cJSON_CreateNumber((double)c->worse), bad);
    put(root, "false_discoveries", cJSON_CreateNumber(CHANGES_FALSE), bad);
    put(root, "configurations", all, bad);
    put(root, "only_in_a", only_a, bad);
    put(root, "only_in_b", only_b, bad);
    for (size_t i = 0; i < c->n && !*bad; i++) put(all, NULL, json_change(j, &c->item[i], bad), bad);
    for (size_t i = 0; i < c->n_only_a && !*bad; i++)
        put(only_a, NULL, json_config(j->a.results, c->only_a[i], bad), bad);
    for (size_t i = 0; i < c->n_only_b && !*bad; i++)
        put(only_b, NULL, json_config(j->b.results, c->only_b[i], bad), bad);
}

static int print_json(const job *j) {
    bool bad = false;
    cJSON *root = cJSON_CreateObject();
    if (root) fill(j, root, &bad);
    char *json = root && !bad ? cJSON_Print(root) : NULL;
    if (json) puts(json);
    int code = json ? 0 : err_set(ERR_DATA, "out of memory");
    free(json);
    cJSON_Delete(root);
    return code;
}

/* ---- the command ------------------------------------------------------------------------------------------------ */

static int work(job *j, int argc, char **argv, outfile *out) {
    TRY(parse(j, argc, argv));
    if (j->out) TRY(outfile_begin(out, j->out, j->force, j->files.item, (int)j->files.n));
    TRY(read_sides(j));
    TRY(changes_find(&j->a, &j->b, &j->changes));
    TRY(j->json ? print_json(j) : print_all(j));
    return j->out ? write_csv(j, out) : 0;
}

int cmd_compare(int argc, char **argv) {
    job j = {0};
    outfile out = {0};
    int code = work(&j, argc, argv, &out);
    outfile_abort(&out);
    changes_free(&j.changes);
    changes_side_free(&j.a);
    changes_side_free(&j.b);
    opt_list_free(&j.files);
    return code;
}
