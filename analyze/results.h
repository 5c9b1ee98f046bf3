/* Results tables (DESIGN section 8): the CSV files `kvlag sim` writes, read by column name.
 *
 * Lines that start with '#' may stand before the header; then RFC 4180 records. Unknown columns are ignored. Refused,
 * naming file and line: a missing column, a malformed record, a value that is no number, a configuration given twice.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

/* What a configuration costs; less is better in all of them. */
typedef struct results_metric {
    const char *column; /* in the CSV */
    const char *axis;   /* what an axis says: the whole name with its unit */
    const char *brief;  /* what a title says */
    bool loss;          /* an estimate of loss, preferred to the plain disturbances */
} results_metric;
enum { RESULTS_METRICS = 4 };
extern const results_metric results_metrics[RESULTS_METRICS];

/* A row of a file, or a configuration: the mean of its rows over all sequences. Texts are the CSV's, never NULL; those
 * of the columns that a file may lack (n_prompt, seed) are "" then. */
typedef struct result {
    const char *trace, *seq; /* "" in a configuration */
    const char *policy, *spec, *budget_asked, *unit, *schedule, *pending, *n_prompt, *seed;
    double budget;                  /* entries */
    double lag;                     /* -1: the policy has none */
    double metric[RESULTS_METRICS]; /* NaN: no value */
    size_t file, line;              /* where it stands: index of the path, line from 1 */
} result;

typedef struct results_budget {
    const char *asked;
    double entries; /* resolved, mean over configurations */
} results_budget;

typedef struct results {
    result *rows; /* in the order of the files */
    size_t n_rows;
    /* In order of first appearance, without the full cache (all its costs are zero) and without those that lack a
     * sequence which others have. */
    result *configs;
    size_t n_configs;
    size_t n_incomplete;     /* configurations left out because they lack a sequence */
    results_budget *budgets; /* of the configurations, smallest first */
    size_t n_budgets;
    size_t n_sequences; /* distinct (trace, seq) */
    char **file_text;   /* the files' bytes: every text above points into them */
    size_t n_files;
} results;

/* Read all n files. Returns 0 and *out, owned by the caller, or ERR_DATA. */
int results_read(const char *const *paths, size_t n, results **out);
void results_free(results *r); /* accepts NULL */

/* Metrics to show, as indices into results_metrics: the estimates of loss that have a value anywhere, else the plain
 * disturbances that have. Returns their number, 0 if there is none. */
size_t results_pick_metrics(const results *r, size_t out[RESULTS_METRICS]);

bool result_is_oracle(const result *c);
bool result_is_free(const result *c); /* pending entries do not count against the budget */

/* Same policy, parameters, unit, schedule, prompt and seed: the two differ in budget, lag or pending only. */
bool result_same_series(const result *a, const result *b);

/* The spec, and after it what sets this series apart from others of the same spec: "tova, unit head". Owned by the
 * caller; NULL on failure. */
char *result_series_name(const results *r, const result *c);

/* "25%", as asked. The number and, for a share, true in *share; the resolved entries where it is not one of both. */
double result_budget_asked(const result *c, bool *share);
