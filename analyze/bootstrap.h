/* Intervals by resampling (Efron and Tibshirani, "An Introduction to the Bootstrap", 1993; Künsch 1989, and Politis and
 * Romano 1992 for the circular block bootstrap).
 *
 * What is resampled: with BOOTSTRAP_LEAST_SEQUENCES sequences or more whole sequences (the statement is then about
 * texts like these); with fewer, runs of BOOTSTRAP_RUN neighbouring blocks of each sequence, around a circle, since
 * neighbouring positions are alike (the statement is about these texts). All configurations see the same resamples, so
 * that differences between them are paired: what is peculiar to a resample cancels.
 *
 * Few units make a bootstrap's intervals too short. Deviations from the estimate are therefore widened by
 * sqrt(m/(m-1)) times the ratio of Student's to the normal 95 % point at m-1 degrees of freedom, m the units
 * (Hesterberg, "What teachers should know about the bootstrap", 2015). Deviations of a Fisher term are taken on the log
 * scale, so it stays positive.
 *
 * Calibration error: an estimate of KL is off by a factor exp(sd e), sd from the row's own 90 % interval.
 * docs/fidelity.csv says how much of that two configurations share: BOOTSTRAP_SHARE_* below are the shares of its
 * variance that belong to the sequence, to the series (a policy with its parameters) within it, and to the
 * configuration alone; nothing is shared between texts. What an uncalibrated estimate's spread has beyond
 * BOOTSTRAP_OWN_SPREAD is taken to be shared by everything. */
#pragma once

#include "analyze/evidence.h"
#include "analyze/results.h"

#include <stdint.h>

enum { BOOTSTRAP_RESAMPLES = 2000, BOOTSTRAP_RUN = 8, BOOTSTRAP_LEAST_SEQUENCES = 5 };
#define BOOTSTRAP_LEVEL 0.9
#define BOOTSTRAP_SHARE_SEQUENCE 0.20
#define BOOTSTRAP_SHARE_SERIES 0.30
#define BOOTSTRAP_OWN_SPREAD 0.34 /* of log(true KL / estimate) between configurations under one calibration */

typedef struct bootstrap bootstrap;

/* Draw the resamples. e may be NULL: then only results of BOOTSTRAP_LEAST_SEQUENCES and more have replicates. Both must
 * outlive *out. Returns 0 and *out, or ERR_DATA (memory). */
int bootstrap_new(const results *r, const evidence *e, uint64_t seed, bootstrap **out);
void bootstrap_free(bootstrap *b); /* accepts NULL */

/* Whole sequences are resampled: intervals speak of texts like these. */
bool bootstrap_over_sequences(const bootstrap *b);

/* The metric of one of the results' configurations in each of BOOTSTRAP_RESAMPLES resamples, belonging to b; the k-th
 * of every configuration is of the same resample. *out NULL: the metric has no value there, or no sums over blocks.
 * Returns 0 or ERR_DATA (memory). */
int bootstrap_replicates(bootstrap *b, const result *config, size_t metric, const double **out);

/* A value and its BOOTSTRAP_LEVEL interval; lo and hi NaN where there is none. */
typedef struct estimate {
    double value, lo, hi;
} estimate;

/* The interval between the replicates' 5 % and 95 % points. Any replicate NaN, or replicate NULL: none. ERR_DATA
 * (memory). */
int bootstrap_interval(double value, const double *replicate, estimate *out);

/* A configuration's metric. */
int bootstrap_estimate(bootstrap *b, const result *config, size_t metric, estimate *out);

/* What `a` costs more than `c`, paired, and the two-sided p value of there being no difference: twice the share of
 * replicates on the other side of 0, at least 1/BOOTSTRAP_RESAMPLES. NaN p where there are no replicates; 1 where both
 * are equal in all of them. */
int bootstrap_difference(bootstrap *b, const result *a, const result *c, size_t metric, estimate *out, double *p);

/* The same between configurations of two results, each with its own resamples. With one seed and the same sequences
 * both drew the same blocks, and the same errors of calibration for the same configuration: the difference is paired.
 * With two seeds it is not. */
int bootstrap_difference_between(bootstrap *b_a, const result *a, bootstrap *b_c, const result *c, size_t metric,
                                 estimate *out, double *p);
