/* How far estimates can be trusted: results of `kvlag sim` held against true reruns of `kvlag verify` (DESIGN sections
 * 6 and 8).
 *
 * An estimate and a truth belong together where trace, seq, spec, budget_asked, lag, unit, schedule, pending and
 * n_prompt are equal. Ratios and the coverage that decides count true KLs of FIDELITY_LEAST_KL and more only: below
 * that both sides are noise. */
#pragma once

#include "analyze/results.h"

#define FIDELITY_LEAST_KL 0.003

/* Policies that lose alike, by the policy's name. */
typedef enum fidelity_family {
    FIDELITY_WINDOW,
    FIDELITY_STATIC,
    FIDELITY_ATTENTION,
    FIDELITY_ORACLE,
    FIDELITY_OTHER,
    FIDELITY_FAMILIES
} fidelity_family;
extern const char *const fidelity_families[FIDELITY_FAMILIES];
fidelity_family fidelity_family_of(const char *policy);

typedef struct fidelity_pair {
    const result *row; /* the estimates */
    double true_dloss, true_kl;
    fidelity_family family;
} fidelity_pair;

/* All pairs whose truth is of one mode, in the order of the truths. Those that lost nothing are left out: an estimate
 * of 0 for a full cache is no merit. */
typedef struct fidelity {
    const char *mode;
    fidelity_pair *pairs;
    size_t n, n_sequences; /* pairs; distinct sequences among them */
} fidelity;

typedef struct fidelity_list {
    fidelity *item;
    size_t n;
} fidelity_list;

/* Join the rows with the truths; an empty list where there are no truths. Returns 0, or ERR_DATA where no truth has an
 * estimate, naming the first key of both sides. *out points into r; free it with fidelity_free either way. */
int fidelity_join(const results *r, fidelity_list *out);
void fidelity_free(fidelity_list *list);

/* Correlations of one metric with the truth over the pairs that have it. Pearson's with the true KL is that of the
 * logarithms, over the pairs with a true KL of FIDELITY_LEAST_KL and more; NaN if the metric is not positive in all of
 * these. */
typedef struct fidelity_correlation {
    size_t n;
    double kl_spearman, kl_pearson, dloss_spearman, dloss_pearson;
} fidelity_correlation;
int fidelity_correlate(const fidelity *f, size_t metric, fidelity_correlation *out); /* 0 or ERR_DATA */

/* true KL / metric: exp of the mean and exp of the standard deviation of its logarithm. For a family, for all pairs
 * (FIDELITY_ALL), or for all with the deviations from each family's own mean (FIDELITY_WITHIN; its scale is NaN). */
enum { FIDELITY_ALL = FIDELITY_FAMILIES, FIDELITY_WITHIN };
typedef struct fidelity_ratio {
    size_t n;
    double scale, spread; /* NaN where too few */
} fidelity_ratio;
int fidelity_compare(const fidelity *f, size_t metric, int family, fidelity_ratio *out); /* 0 or ERR_DATA */

/* How many of n stated 90 % intervals hold the truth, and the exact binomial test of a coverage of 85 to 95 %. It
 * stands unless either tail is below .005, that is at the 1 % level. */
typedef struct fidelity_coverage {
    size_t held, n;
    double too_low;  /* P(X <= held | .85) */
    double too_high; /* P(X >= held | .95) */
    bool stands;
} fidelity_coverage;
/* metric: KL_EST or DLOSS_EST. least_kl: pairs with a smaller true KL are left out. */
fidelity_coverage fidelity_cover(const fidelity *f, size_t metric, double least_kl);

/* Print correlations, ratios and coverage. */
int fidelity_print(const fidelity *f, const results *r);
