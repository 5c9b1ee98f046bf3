/* What to use: the choice at each budget, and the words that say it. The terminal, both forms of the report and
 * summary.json take the words from here, so that they say the same.
 *
 * The choice at a budget is the policy that decide_ranking puts first, oracles and free pending entries apart, at the
 * lag that decide_lag recommends for it, or at its best one where the recommended lag would cost more than the next
 * policy. Policies that cannot be told apart from it are named with what they cost to run, since then that decides. */
#pragma once

#include "analyze/decide.h"
#include "analyze/memory.h"
#include "base/text.h"

typedef enum advice_rival {
    ADVICE_ALONE,  /* nothing to compare with */
    ADVICE_FILTER, /* the choice has a lag; the best that has none */
    ADVICE_WAITS,  /* the choice has none; the best that has one */
    ADVICE_NEXT    /* only one of both kinds is there; the second best */
} advice_rival;

typedef struct advice {
    const results_budget *budget;
    ranked *ranking; /* [n] of decide_ranking, oracles apart */
    size_t n;
    const result *pick; /* NULL: nothing but oracles was priced here */
    estimate loss;      /* the pick's */
    advice_rival rival_is;
    const result *rival;
    estimate over; /* the rival's loss less the pick's */
    double p;      /* of there being no such difference; NaN without resamples */

    /* Of the policies that cannot be told apart from the pick, and whose estimate is not above its interval, the one
     * that is the cheapest to run, by the scores that it brings up to date in a step; NULL where none is cheaper by a
     * tenth or more. */
    const result *cheaper;
    estimate cheaper_costs; /* its loss less the pick's */

    /* Of the series that waits, the pick's or the rival's. */
    bool has_curve;
    double first_lag, last_lag;
    lag_choice lag;
    knee knee;
} advice;

typedef struct advice_list {
    advice *item; /* one a budget, smallest first */
    size_t n;
    size_t main;     /* the one to put first */
    size_t metric;   /* index into results_metrics */
    double max_loss; /* NaN: not asked */
    bool met;        /* the main budget keeps it */
    /* Where the loss of the main pick's series, at its best lags, comes down to max_loss; NaN where that is not between
     * budgets that were priced. */
    memory_measure measure;
    estimate memory;
    const results *results;
    bool whole;          /* sequences were resampled: statements are about texts like these */
    const char *why_not; /* no resamples: why; NULL where there are some */
} advice_list;

/* The main budget is the smallest that has a policy whose loss is at most max_loss (the upper end of its interval where
 * there is one), which then is the pick there; without max_loss (NaN), or where none has, the middle one, or the
 * largest where a max_loss was asked. Returns 0 or ERR_DATA (memory). Release with advice_free either way. */
int advice_make(bootstrap *b, const evidence *e, const results *r, size_t metric, double max_loss, advice_list *out);
void advice_free(advice_list *list);

/* Append the recommendation at budget i in plain sentences, one line: what to use and how sure that is, and at the main
 * budget what is known of its lag and what is cheaper to run. */
int advice_words(const advice_list *list, size_t i, text *out);

/* "rmm(sinks=4) with lag 8". */
int advice_name(const results *r, const result *c, text *out);
/* "25 % (128 entries)", "64 entries". */
int advice_budget_name(const results_budget *budget, text *out);

/* A number as its interval's width deserves: "0.031 (90 % interval 0.022 to 0.043)", or "0.0312" where there is none.
 * Alone: the value; interval: only "0.022 to 0.043". */
int advice_value(text *t, estimate e);
int advice_interval(text *t, estimate e);
/* "p = 0.03", "p < 0.001" with `before` "p " and `equal` "= ". */
int advice_p(text *t, const char *before, const char *equal, double p);
