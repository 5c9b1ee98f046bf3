#include "analyze/statistics.h"
#include "base/err.h"
#include "base/mem.h"

#include <math.h>
#include <stdlib.h>

double statistics_mean(const double *x, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += x[i];
    return n ? sum / (double)n : NAN;
}

double statistics_deviation(const double *x, size_t n) {
    double mean = statistics_mean(x, n), squares = 0;
    for (size_t i = 0; i < n; i++) squares += (x[i] - mean) * (x[i] - mean);
    return n > 1 ? sqrt(squares / (double)(n - 1)) : NAN;
}

double statistics_pearson(const double *x, const double *y, size_t n) {
    double x_mean = statistics_mean(x, n), y_mean = statistics_mean(y, n), xx = 0, yy = 0, xy = 0;
    for (size_t i = 0; i < n; i++) {
        double dx = x[i] - x_mean, dy = y[i] - y_mean;
        xx += dx * dx;
        yy += dy * dy;
        xy += dx * dy;
    }
    return xx > 0 && yy > 0 ? xy / sqrt(xx) / sqrt(yy) : NAN;
}

/* qsort has no context, so values bring their place. */
typedef struct placed {
    double value;
    size_t place;
} placed;

static int compare_placed(const void *pa, const void *pb) {
    const placed *a = pa, *b = pb;
    return (a->value > b->value) - (a->value < b->value);
}

static void rank(const double *x, size_t n, placed *scratch, double *ranks) {
    for (size_t i = 0; i < n; i++) scratch[i] = (placed){x[i], i};
    qsort(scratch, n, sizeof *scratch, compare_placed);
    for (size_t i = 0, end; i < n; i = end) {
        for (end = i + 1; end < n && scratch[end].value == scratch[i].value;) end++;
        for (size_t k = i; k < end; k++) ranks[scratch[k].place] = (double)(i + end + 1) / 2;
    }
}

int statistics_spearman(const double *x, const double *y, size_t n, double *out) {
    *out = NAN;
    if (n < 2) return 0;
    placed *scratch = mem_new(n, sizeof *scratch, "ranks");
    double *ranks = mem_new(2 * n, sizeof *ranks, "ranks");
    if (scratch && ranks) {
        rank(x, n, scratch, ranks);
        rank(y, n, scratch, ranks + n);
        *out = statistics_pearson(ranks, ranks + n, n);
    }
    int code = scratch && ranks ? 0 : ERR_DATA;
    mem_free(scratch);
    mem_free(ranks);
    return code;
}

/* Sum of P(X = i) over i in first..last. */
static double binomial_sum(size_t first, size_t last, size_t n, double p) {
    double sum = 0, trials = (double)n;
    for (size_t i = first; i <= last; i++) {
        double k = (double)i;
        sum += exp(lgamma(trials + 1) - lgamma(k + 1) - lgamma(trials - k + 1) + k * log(p) + (trials - k) * log1p(-p));
    }
    return fmin(sum, 1);
}

double statistics_binomial_most(size_t k, size_t n, double p) {
    return binomial_sum(0, k < n ? k : n, n, p);
}

double statistics_binomial_least(size_t k, size_t n, double p) {
    return k > n ? 0 : binomial_sum(k, n, n, p);
}

static int ascending(const void *pa, const void *pb) {
    double a = *(const double *)pa, b = *(const double *)pb;
    return (a > b) - (a < b);
}

void statistics_sort(double *x, size_t n) {
    qsort(x, n, sizeof *x, ascending);
}

void statistics_fall(double *y, size_t n, statistics_pool *pool) {
    size_t pools = 0;
    for (size_t i = 0; i < n; i++) {
        pool[pools++] = (statistics_pool){y[i], 1};
        for (; pools > 1 && pool[pools - 1].mean > pool[pools - 2].mean; pools--) {
            statistics_pool *a = &pool[pools - 2], *b = &pool[pools - 1];
            a->mean = (a->mean * (double)a->n + b->mean * (double)b->n) / (double)(a->n + b->n);
            a->n += b->n;
        }
    }
    for (size_t k = 0, i = 0; k < pools; k++)
        for (size_t j = 0; j < pool[k].n; j++) y[i++] = pool[k].mean;
}

double statistics_median(double *x, size_t n) {
    if (!n) return NAN;
    statistics_sort(x, n);
    return (x[(n - 1) / 2] + x[n / 2]) / 2;
}
