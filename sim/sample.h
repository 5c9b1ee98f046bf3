/* A stratified sample of the steps, for quick looks: the steps that are priced are cut into strata of equal length, two
 * steps are drawn from each, and each stands for half of its stratum. Sums over the sample are unbiased, and the two
 * draws of a stratum say how far they scatter (Cochran, Sampling Techniques, chapter 5). A drawn step is taken for all
 * layers and heads at once, since the estimate sums over them before it squares. */
#pragma once

#include <stddef.h>
#include <stdint.h>

typedef struct sample {
    int32_t n;      /* steps */
    int32_t strata; /* 0: every step is taken */
    int32_t first;  /* the first step of the first stratum */
    float *weight;  /* [first + n] what a step counts for; 0 = not taken. NULL where every step is taken */
    int32_t *drawn; /* [strata][2] */
} sample;

/* Steps first .. first+n-1, of which `wanted` are to be taken (rounded down to an even number, at least 4); as many as
 * there are, or more: all. Drawn from the counter-based generator by (seed, stratum, sequence). Arrays go to
 * sample_free. Returns 0 or ERR_DATA. */
int sample_new(int32_t first, int32_t n, int32_t wanted, uint64_t seed, uint32_t sequence, sample *out);
void sample_free(sample *s);

/* What step t counts for: 1 everywhere where every step is taken. */
static inline double sample_weight(const sample *s, int32_t t) {
    return s->weight ? (double)s->weight[t] : 1;
}

/* The variance of the estimated sum of x over all steps, or the covariance of those of x and y (x == y: variance). x
 * and y [first + n] hold the values of the steps taken. 0 where every step is taken. */
double sample_covariance(const sample *s, const double *x, const double *y);
