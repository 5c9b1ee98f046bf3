/* Results tables (DESIGN section 8): the CSV files that `kvlag sim` writes, and beside them the truths that `kvlag
 * verify` writes, read by column name.
 *
 * Lines that start with '#' may stand before the header; then RFC 4180 records. A file whose comment says "# kvlag
 * truth" or that has a column true_kl holds truths. Unknown columns are ignored. Refused, naming file and line: a
 * missing column, a malformed record, a value that is no number, a configuration given twice. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What a configuration costs, less being better: an estimate of loss; a plain disturbance, shown where there is no such
 * estimate; or a part of an estimate, which is only held against the truth. */
typedef enum metric_kind { METRIC_LOSS, METRIC_DISTURBANCE, METRIC_PART } metric_kind;
typedef struct results_metric {
    const char *column;  /* in the CSV */
    const char *lo, *hi; /* columns of its 90 % interval; NULL: it has none */
    const char *axis;    /* what an axis says: the whole name with its unit */
    const char *brief;   /* what a title says */
    metric_kind kind;
} results_metric;
enum { DLOSS_EST, KL_EST, OUT_ERR, LOST_MASS, DLOSS_FIRST, FISHER, RESULTS_METRICS };
extern const results_metric results_metrics[RESULTS_METRICS];

/* What a configuration costs beside loss: docs/costs.md. */
typedef enum result_cost {
    COST_KV_BYTES,
    COST_DECODE_US,
    COST_RESIDENT,
    COST_PEAK,
    COST_SCORE_UPDATES,
    RESULTS_COSTS
} result_cost;
extern const char *const results_costs[RESULTS_COSTS]; /* columns */

/* A row of a file, or a configuration: the mean of its rows over all sequences. Texts are the CSV's, never NULL; those
 * of the columns that a file may lack are "" then (n_prompt, seed, hold, sinks) or "16" (kv_bits, pending_bits). */
typedef struct result {
    const char *trace, *seq; /* "" in a configuration */
    const char *policy, *spec, *budget_asked, *unit, *schedule, *pending, *n_prompt, *seed, *hold, *sinks;
    const char *kv_bits, *pending_bits;
    double budget;                                   /* entries */
    double lag;                                      /* -1: the policy has none */
    double metric[RESULTS_METRICS];                  /* NaN: no value */
    double lo[RESULTS_METRICS], hi[RESULTS_METRICS]; /* 90 % interval; NaN: none */
    double cost[RESULTS_COSTS];                      /* NaN: no value */
    size_t file, line;                               /* where it stands: index of the path, line from 1 */
    size_t row;                                      /* which data row of the file, from 0 */
    /* Of a configuration: its rows, one a sequence, the k-th of the same sequence in all configurations. NULL in a
     * row. Owned by the results. */
    const struct result *const *part;
    size_t n_parts;
} result;

/* What a true rerun of a configuration cost. */
typedef struct result_truth {
    result key;       /* without metrics */
    const char *mode; /* "open" or "closed"; "" where the file does not say */
    double dloss, kl; /* nats per token */
} result_truth;

typedef struct results_budget {
    const char *asked;
    double entries; /* resolved, mean over configurations */
} results_budget;

typedef struct results {
    result *rows; /* in the order of the files */
    size_t n_rows;
    const result **sorted; /* the rows by configuration, then sequence */
    /* In order of first appearance, without the full cache at full precision (all its costs are zero) and without those
     * that lack a sequence which others have. */
    result *configs;
    size_t n_configs;
    size_t n_incomplete;     /* configurations left out because they lack a sequence */
    results_budget *budgets; /* of the configurations that evict, smallest first */
    size_t n_budgets;
    size_t n_sequences;   /* distinct (trace, seq) of the rows */
    result_truth *truths; /* in the order of the files, without the full cache */
    size_t n_truths;
    bool uncalibrated;        /* a file says that its estimates are */
    const char *const *paths; /* the caller's */
    char **file_text;         /* the files' bytes: every text above points into them */
    size_t n_files;
} results;

/* Read all n files, at least one of them with rows; `paths` must outlive *out. Returns 0 and *out, owned by the caller,
 * or ERR_DATA. */
int results_read(const char *const *paths, size_t n, results **out);
void results_free(results *r); /* accepts NULL */

/* Metrics to show, as indices into results_metrics: the estimates of loss that have a value anywhere, else the plain
 * disturbances that have. Returns their number, 0 if there is none. */
size_t results_pick_metrics(const results *r, size_t out[RESULTS_METRICS]);

/* Order by the key of DESIGN section 8: the configuration, then the sequence. */
int result_compare(const result *a, const result *b);

bool result_evicts(const result *c); /* all but the full cache at low precision, which has no budget */
bool result_is_oracle(const result *c);
bool result_is_free(const result *c); /* pending entries do not count against the budget */

/* Same policy, parameters, unit, schedule, prompt, seed and bits: the two differ in budget, lag or pending only. */
bool result_same_series(const result *a, const result *b);

/* A number for what both have in common, or for the whole configuration: the same in whatever file it stands. */
uint32_t result_series_hash(const result *c);
uint32_t result_hash(const result *c);

/* The spec, and after it what sets this series apart from others of the same spec: "tova, unit head"; precision where
 * it is not the usual: "h2o, kv_bits 8", "h2o, kv_bits 8, pending_bits 4". Owned by the caller; NULL on failure. */
char *result_series_name(const results *r, const result *c);

/* "25%", as asked. The number and, for a share, true in *share; the resolved entries where it is not one of both. */
double result_budget_asked(const result *c, bool *share);
