/* results.csv and results.blocks.h5 (DESIGN section 8): one row for each (trace, sequence, configuration). */
#pragma once

#include "base/text.h"
#include "sim/calibration.h"
#include "sim/device.h"
#include "sim/sweep.h"
#include "traces/lifetimes.h"

/* The identifying texts of a row, exactly as they stand in the CSV and in lifetimes.h5; "" = empty. */
typedef struct results_key {
    char *trace, *policy, *spec, *resolved, *budget_asked, *budget, *lag, *hold, *sinks, *unit, *schedule, *pending;
    int kv_bits, pending_bits;
    size_t seq;
    int32_t n_prompt;
} results_key;
void results_key_free(results_key *k);

/* The key of a resolved configuration. Returns 0 or ERR_DATA. */
int results_key_of(const char *label, size_t seq, const sim_config *c, results_key *out);

/* Open lifetimes that are to stand in for policies on this trace. Refuses lifetimes of another trace and sequences that
 * the trace does not have. */
int results_open_given(const char *path, const trace *t, lifetimes **out);
/* The key of one of its configurations, which must hold the sequence; `c` says how many prompt steps and bits it is
 * priced with. Returns 0 or ERR_DATA. */
int results_key_of_given(const char *label, const lifetimes *given, size_t config, size_t seq, const sim_config *c,
                         results_key *out);
/* As far as pricing is concerned, that configuration: its hold, and whether it is tied to its lag. */
sim_config results_config_of_given(const lifetimes *given, size_t config, size_t seq, int32_t n_prompt);

/* What turns results into rows, for all rows of a call. */
typedef struct results_terms {
    const sweep_options *options;
    const calibration *scale;
    const device *device; /* hbm 0: none was given */
} results_terms;

/* A request's time in a pool (pool.h). */
typedef struct results_stay {
    int64_t arrival, waited; /* global steps */
    double held;             /* entries after a step, mean over its global steps and units */
} results_stay;

/* dloss_est where it is known, else what comes nearest: dloss_first, out_err, lost_mass. *name: which. */
double results_loss(const results_key *k, const sweep_result *r, const results_terms *terms, const char **name);

/* The header row, and one data row, both with the columns of `stay` where there is a pool. Columns whose metric was not
 * computed are empty. kl_est, dloss_est and their 90 % intervals come from the calibration of the row's family (DESIGN
 * section 6); the interval of dloss adds, in quadrature, the standard error of the first-order part over blocks of
 * steps. */
int results_add_header(text *csv, bool has_stay);
int results_add_key(text *csv, const results_key *k); /* a data row's first columns, up to n_prompt */
int results_add_row(text *csv, const results_key *k, const sweep_result *r, const results_terms *terms,
                    const trace_model *m, int32_t n_tokens, const results_stay *stay); /* NULL: no pool */
