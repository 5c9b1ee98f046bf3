#include "analyze/table.h"
#include "analyze/decide.h"
#include "base/err.h"
#include "base/mem.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TABLE_ROWS = 30, NAME_COLUMN_MOST = 40, INTERVAL_WIDTH = 20 };

typedef struct table {
    const results *results;
    bootstrap *bootstrap;
    const size_t *metric;
    size_t n_metrics;
    bool interval; /* of the first metric; some configuration has one */
    bool ranks;    /* resamples tell who is better than whom */
    int width;     /* of the names */
} table;

/* qsort has no context, so rows bring the value to sort by. */
typedef struct table_row {
    const result *config;
    double value;
} table_row;

static int compare_row(const void *pa, const void *pb) {
    const table_row *a = pa, *b = pb;
    if (isnan(a->value) || isnan(b->value)) return isnan(a->value) - isnan(b->value);
    if (a->value != b->value) return a->value < b->value ? -1 : 1;
    return (a->config > b->config) - (a->config < b->config); /* order of the file */
}

/* The first metric's is lo..hi: of resamples where there are any, else the results' own. */
static int print_interval(const table *t, const result *c) {
    char interval[64] = "";
    size_t m = t->metric[0];
    estimate e;
    TRY(bootstrap_estimate(t->bootstrap, c, m, &e));
    if (isnan(e.lo)) e = (estimate){c->metric[m], c->lo[m], c->hi[m]};
    if (!isnan(e.lo)) snprintf(interval, sizeof interval, "%.3g..%.3g", e.lo, e.hi);
    printf("  %-*s", INTERVAL_WIDTH, interval);
    return 0;
}

/* Oracles and free pending entries are bounds: they take part in no ranking. */
static void print_rank(const table *t, const ranked *ranking, size_t n, const result *c) {
    char rank[16] = "";
    for (size_t i = 0; i < n; i++)
        if (ranking[i].config == c) snprintf(rank, sizeof rank, "%zu", ranking[i].rank);
    if (t->ranks) printf("%4s  ", rank);
}

static int print_row(const table *t, const result *c) {
    char lag[32] = "";
    char *name = result_series_name(t->results, c);
    if (!name) return ERR_DATA;
    if (c->lag >= 0) snprintf(lag, sizeof lag, "%.10g", c->lag);
    printf("%-*s  %8s  %6s  %-8s", t->width, name, c->budget_asked, lag, c->pending);
    mem_free(name);
    for (size_t m = 0; m < t->n_metrics; m++) {
        double value = c->metric[t->metric[m]];
        if (isnan(value)) printf("  %10s", "");
        else printf("  %10.4g", value);
        if (m == 0 && t->interval) TRY(print_interval(t, c));
    }
    printf("\n");
    return 0;
}

/* Is there a better lag of the same policy at the same budget and pending? The earlier of two that tie stays. */
static bool beaten(const table *t, const table_row *row) {
    const results *r = t->results;
    for (size_t i = 0; i < r->n_configs; i++) {
        const result *c = &r->configs[i];
        if (c == row->config || !result_same_series(c, row->config) ||
            result_is_free(c) != result_is_free(row->config) ||
            strcmp(c->budget_asked, row->config->budget_asked) != 0 || (c->lag < 0) != (row->config->lag < 0))
            continue;
        if (compare_row(&(table_row){c, c->metric[t->metric[0]]}, row) < 0) return true;
    }
    return false;
}

static int print_budget(const table *t, const char *asked, size_t most, table_row *rows) {
    const results *r = t->results;
    size_t n = 0;
    for (size_t i = 0; i < r->n_configs; i++) {
        rows[n] = (table_row){&r->configs[i], r->configs[i].metric[t->metric[0]]};
        n += strcmp(r->configs[i].budget_asked, asked) == 0 && !beaten(t, &rows[n]);
    }
    qsort(rows, n, sizeof *rows, compare_row);
    ranked *ranking = NULL;
    size_t ranks = 0;
    int code = t->ranks ? decide_ranking(t->bootstrap, r, asked, t->metric[0], false, &ranking, &ranks) : 0;
    for (size_t i = 0; i < n && i < most && !code; i++) {
        print_rank(t, ranking, ranks, rows[i].config);
        code = print_row(t, rows[i].config);
    }
    if (n > most) printf("%s%-*s  %8s  and %zu more\n", t->ranks ? "      " : "", t->width, "...", asked, n - most);
    mem_free(ranking);
    return code;
}

static int measure(table *t) {
    t->width = (int)strlen("policy");
    for (size_t i = 0; i < t->results->n_configs; i++) {
        const result *c = &t->results->configs[i];
        char *name = result_series_name(t->results, c);
        if (!name) return ERR_DATA;
        int n = (int)strlen(name);
        if (n > t->width) t->width = n < NAME_COLUMN_MOST ? n : NAME_COLUMN_MOST;
        mem_free(name);
        estimate e;
        TRY(bootstrap_estimate(t->bootstrap, c, t->metric[0], &e));
        t->ranks |= !isnan(e.lo);
        t->interval |= !isnan(e.lo) || !isnan(c->lo[t->metric[0]]);
    }
    return 0;
}

static void print_header(const table *t) {
    if (t->ranks) printf("%4s  ", "rank");
    printf("%-*s  %8s  %6s  %-8s", t->width, "policy", "budget", "lag", "pending");
    for (size_t m = 0; m < t->n_metrics; m++) {
        printf("  %10s", results_metrics[t->metric[m]].column);
        if (m == 0 && t->interval) printf("  %-*s", INTERVAL_WIDTH, "90% interval");
    }
    printf("\n");
}

int table_print(const results *r, bootstrap *b, const size_t *metric, size_t n_metrics) {
    table t = {.results = r, .bootstrap = b, .metric = metric, .n_metrics = n_metrics};
    size_t most = r->n_budgets < TABLE_ROWS ? TABLE_ROWS / r->n_budgets : 1;
    TRY(measure(&t));
    table_row *rows = mem_new(r->n_configs, sizeof *rows, "table");
    if (!rows) return ERR_DATA;
    print_header(&t);
    int code = 0;
    for (size_t k = 0; k < r->n_budgets && !code; k++) code = print_budget(&t, r->budgets[k].asked, most, rows);
    if (!code) code = print_budget(&t, "", most, rows); /* the full cache at low precision */
    mem_free(rows);
    return code;
}
