/* The work list of a sweep: which configurations are computed ("units"), in which sequence, and which rows take them.
 *
 * Everything is planned before anything is computed, in the order of traces, sequences and asks. Rows that resolve to
 * one configuration share a unit. */
#pragma once

#include "sim/config.h"
#include "sim/pool.h"
#include "sim/results.h"
#include "sim/shard.h"
#include "sim/sweep.h"
#include "sim/widths.h"

/* What is asked of which traces. The plan borrows all of it. */
typedef struct question {
    trace **trace; /* each once */
    size_t n_traces;
    sim_flags flags;
    sim_asks asks;
    lifetimes *given;         /* of the first trace, to be priced instead of the asks; or NULL */
    const requests *requests; /* of the first trace, replayed in a pool instead of the asks; or NULL */
    const pooled *pooled;     /* [requests->n] their lifetimes, once they are there */
    kv_bits_list bits;        /* everything is priced with each of these */
    sweep_options options;
} question;

/* Find what cannot work before any work is done: ERR_ and the name of the ask or sequence. */
int question_check(const question *q);

typedef struct plan_row {
    size_t trace, unit;
    size_t config; /* its number in the lifetimes file written or given */
    results_key key;
} plan_row;

/* This shard's units of one sequence, own units first .. first+n-1. */
typedef struct plan_run {
    size_t trace, seq, first, n;
} plan_run;

typedef struct plan {
    shard part;
    plan_row *row; /* all of the call's; shard_owns(part, row.unit) tells whose */
    size_t n_rows, row_capacity;
    size_t n_units;     /* of the call */
    sim_config *config; /* of own units; own unit i is unit i n + k-1 of the call */
    size_t n_own, config_capacity;
    plan_run *run;
    size_t n_runs, run_capacity;
    text skipped; /* "# skipped: ..." lines */
} plan;

/* Says what is skipped. ERR_USAGE where nothing is left. Release with plan_free either way. */
int plan_make(const question *q, shard part, plan *out);
void plan_free(plan *p);

/* End a comment that began at `from`: one line, whatever the name of a file in it holds. */
int plan_end_comment(text *t, size_t from);
