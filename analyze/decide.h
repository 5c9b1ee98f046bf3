/* From results to a decision: the knee of a lag curve, the lag to recommend, what waiting gains, who is ahead.
 *
 * Everything here stands on paired resamples (bootstrap.h); levels are 90 % unless said otherwise. Functions return 0
 * or ERR_DATA (memory). */
#pragma once

#include "analyze/bootstrap.h"

/* Loss against the lag of one series at one budget and pending. */
typedef struct lag_curve {
    size_t n;             /* at least 2 */
    const result **point; /* [n] configurations by ascending lag, all with a value of the metric */
} lag_curve;

/* All of them, in the order of the results; oracles that hold entries for the lag are curves, too. Release with
 * lag_curves_free either way. */
typedef struct lag_curves {
    lag_curve *item;
    size_t n, capacity;
} lag_curves;
int lag_curves_find(const results *r, size_t metric, lag_curves *out);
void lag_curves_free(lag_curves *c);

/* Curve i is the first of its series; others are the same at other budgets and pending. */
bool lag_curves_opens_series(const lag_curves *c, size_t i);

/* Where lags stand on an axis: 0 at 0, 1 at 1, and every doubling one further. */
double lag_position(double lag);

/* The knee: the lag beyond which waiting brings little more. Kneedle (Satopää, Albrecht, Irwin and Raghavan, "Finding a
 * 'kneedle' in a haystack", 2011): the point farthest below the chord from the first to the last lag, both axes scaled
 * to 0..1, lags at lag_position. Against noise the curve is first made to fall: least squares (pool adjacent violators)
 * down to its lowest point, and level from there on, where a longer lag only costs. Found only if resamples agree: the
 * 5 % point of the fall is above 0, and that of the depth under the chord above DECIDE_LEAST_DEPTH of the fall. */
#define DECIDE_LEAST_DEPTH 0.1
typedef struct knee {
    bool found;
    const char *why;       /* where not found, in a few words: "too few lags", "flat", "no bend" */
    const result *at;      /* NULL where not found */
    double lag_lo, lag_hi; /* 5 and 95 % points of the knees of resampled curves */
    estimate depth;        /* of the curve under the chord, share of the fall */
} knee;
int decide_knee(bootstrap *b, const lag_curve *c, size_t metric, knee *out);

/* The lag to recommend: the smallest whose loss is statistically no worse than that of the best lag. Multiple
 * comparisons with the best (Hsu 1984), on resamples and for all lags at once as in Westfall and Young's min-p
 * ("Resampling-based multiple testing", 1993): lag L is worse if the share of resamples in which it costs less than the
 * best is below DECIDE_LAG_LEVEL of the smallest such shares, over lags, that resamples have among themselves. */
#define DECIDE_LAG_LEVEL 0.05
typedef struct lag_choice {
    const result *best;        /* the lowest value */
    const result *recommended; /* NULL where there are no replicates */
    estimate excess;           /* loss of recommended less loss of best */
} lag_choice;
int decide_lag(bootstrap *b, const lag_curve *c, size_t metric, lag_choice *out);

/* What waiting gains, at one lag of a curve (DESIGN section 8). */
typedef struct gain {
    const result *at;
    estimate gain;        /* loss(lag 0) - loss(L); NaN where the curve has no lag 0 */
    double p;             /* of there being no gain; NaN where unknown */
    const result *filter; /* the best policy without a lag at this budget, oracles apart; NULL: none */
    estimate over_filter; /* its loss less loss(L) */
    const result
        *oracle;     /* the better oracle with hold=lag at L under the same budget, sinks, pending, schedule; NULL */
    estimate closed; /* share: gain / (loss(lag 0) - loss(oracle)); NaN with a reason in closed_why */
    const char *closed_why; /* NULL, or why `closed` is not available: "no oracle(...,hold=lag) with these sinks at this
                               lag", ... */
} gain;
/* *out [c->n], owned by the caller (mem_free). Curves of oracles have no oracle of their own. */
int decide_gains(bootstrap *b, const results *r, const lag_curve *c, size_t metric, gain **out);

/* Policies at one budget, best first; those with a lag at their best one, pending charged where there is a choice. */
typedef struct ranked {
    const result *config;
    estimate loss;
    size_t rank;     /* 1 + how many are better by a paired 90 % interval that does not hold 0: ties share a rank */
    estimate behind; /* loss less the first one's */
    double p;        /* of there being no such difference; NaN for the first, or without replicates */
} ranked;
/* Without replicates ranks are plain places. *out [*n] owned by the caller (mem_free). */
int decide_ranking(bootstrap *b, const results *r, const char *budget_asked, size_t metric, bool oracles, ranked **out,
                   size_t *n);
