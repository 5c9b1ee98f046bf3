/* Sums over f32 vectors in f64, in one fixed order: four running sums, so that an addition need not wait for the one
 * before it. */
#pragma once

#include <math.h>
#include <stddef.h>

/* x.y, n elements each. */
static inline double vec_dot(const float *x, const float *y, size_t n) {
    double a[4] = {0};
    size_t i = 0;
    for (; i + 4 <= n; i += 4)
        for (size_t k = 0; k < 4; k++) a[k] += (double)x[i + k] * (double)y[i + k];
    for (; i < n; i++) a[0] += (double)x[i] * (double)y[i];
    return a[0] + a[1] + (a[2] + a[3]);
}

/* The same where y is f64. */
static inline double vec_dot_f64(const float *x, const double *y, size_t n) {
    double a[4] = {0};
    size_t i = 0;
    for (; i + 4 <= n; i += 4)
        for (size_t k = 0; k < 4; k++) a[k] += (double)x[i + k] * y[i + k];
    for (; i < n; i++) a[0] += (double)x[i] * y[i];
    return a[0] + a[1] + (a[2] + a[3]);
}

static inline double vec_norm(const float *x, size_t n) {
    return sqrt(vec_dot(x, x, n));
}

/* sum += factor * x. */
static inline void vec_add(double *sum, const float *x, double factor, size_t n) {
    for (size_t i = 0; i < n; i++) sum[i] += factor * (double)x[i];
}

static inline double vec_norm_f64(const double *x, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += x[i] * x[i];
    return sqrt(sum);
}
