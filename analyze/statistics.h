/* The few statistics that hold estimates against truths. */
#pragma once

#include <stddef.h>

/* Mean, and standard deviation with n-1 in its divisor; NaN where n is too small (0; 0 or 1). */
double statistics_mean(const double *x, size_t n);
double statistics_deviation(const double *x, size_t n);

/* Pearson's correlation; NaN where n < 2 or one side does not vary. */
double statistics_pearson(const double *x, const double *y, size_t n);

/* Spearman's rank correlation: Pearson's of the ranks, equal values sharing their mean rank. Returns 0, or ERR_DATA
 * (memory). */
int statistics_spearman(const double *x, const double *y, size_t n, double *out);

/* P(X <= k) and P(X >= k) for X binomial, n trials of probability 0 < p < 1: exact sums, to about 1e-12 relative. */
double statistics_binomial_most(size_t k, size_t n, double p);
double statistics_binomial_least(size_t k, size_t n, double p);

/* Ascending; no value may be NaN. */
void statistics_sort(double *x, size_t n);

/* Make y never rise, by least squares (pool adjacent violators). `pool` is room for n. */
typedef struct statistics_pool {
    double mean;
    size_t n;
} statistics_pool;
void statistics_fall(double *y, size_t n, statistics_pool *pool);

/* The middle value, or the mean of the two in the middle; sorts x. NaN where n is 0. */
double statistics_median(double *x, size_t n);
