/* What changed between two sets of results: configurations matched by their keys, each with the change of its metrics
 * and whether that is more than chance. */
#pragma once

#include "analyze/bootstrap.h"

/* Of all changes that are called significant a tenth is expected to be chance: Benjamini and Hochberg, "Controlling the
 * false discovery rate" (1995). */
#define CHANGES_FALSE 0.1

/* One side: results with what stands beside them. */
typedef struct changes_side {
    results *results;
    evidence *evidence;
    bootstrap *bootstrap;
} changes_side;

/* Read a results file. `seed`: of the resamples; equal seeds pair equal sequences. Returns 0 or ERR_DATA. Release with
 * changes_side_free either way. */
int changes_read(const char *const *path, uint64_t seed, changes_side *out);
void changes_side_free(changes_side *s);

/* Are both about the same sequences of the same traces, so that they can be paired? NULL words if so; else a sentence
 * that says how they differ is put into *why, which the caller frees. Returns 0 or ERR_DATA (memory). */
int changes_can_pair(const changes_side *a, const changes_side *b, char **why);

typedef struct change {
    const result *a, *b;
    estimate by[RESULTS_METRICS]; /* b less a; NaN where one of them has no value */
    double p[RESULTS_METRICS];    /* of there being no change; NaN where unknown */
    bool same;                    /* all values and costs are equal */
    bool significant;             /* in the tested metric */
} change;

typedef struct changes {
    change *item; /* [n] in the order of a */
    size_t n, capacity;
    const result **only_a, **only_b; /* [n_only_a], [n_only_b] */
    size_t n_only_a, n_only_b;
    size_t metric;                 /* that is tested */
    size_t shown[RESULTS_METRICS]; /* the tested one, then the others that both have, lost mass among them */
    size_t n_shown;
    size_t n_same;
    size_t tested, better, worse; /* that differ in the tested metric and have a p value; significantly so */
    size_t unknown;               /* that have none, unless the metric is equal on both sides */
    bool same;                    /* nothing differs at all */
} changes;

/* Returns 0, or ERR_DATA: no configuration in common, no metric in common, memory. Release with changes_free either
 * way.
 */
int changes_find(changes_side *a, changes_side *b, changes *out);
void changes_free(changes *c);

/* Benjamini and Hochberg: the largest p that is significant among n sorted ones at a share of false ones, -1 if none
 * is. */
double changes_threshold(const double *sorted, size_t n, double share);
