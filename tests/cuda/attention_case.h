/* Random attention at odd sizes, and what it comes to by slow loops in f64. Memory of a case is the device's, which
 * is plain memory here: what lies behind a row's end is NaN, and must be read by nobody. */
#pragma once

#include "base/err.h"
#include "base/rng.h"
#include "tracer/cuda/kernels.h"
#include "traces/kernels.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define OK(call) \
    if (call) fail_msg("%s", err_message())

typedef struct sizes {
    size_t T;
    int n_head, n_kv_head, head_dim, window;
    float softcap;
    bool evict;
} sizes;

typedef struct attention_case {
    attention_shape s;
    float *qkv;
    int32_t *evict_at; /* NULL without */
    size_t width, ld_o;
    double *p, *slope; /* [n_head][T][T], of the softcap */
    double *o, *lse;   /* [T][width], [n_head][T] */
} attention_case;

static inline void *device_memory(device *d, size_t bytes) {
    void *p;
    OK(device_new(d, bytes, "test", &p));
    return p;
}

static inline float *device_floats(device *d, size_t n) {
    return device_memory(d, n * sizeof(float));
}

static inline float random_value(uint32_t stream, size_t i) {
    return (float)rng_normal(rng_philox(5, (uint32_t)i, (uint32_t)(i >> 32), stream, 0));
}

/* Rows of `width` random values; the rest of each stays NaN. */
static inline float *random_rows(device *d, uint32_t stream, size_t rows, size_t width, size_t ld) {
    float *x = device_floats(d, rows * ld);
    for (size_t r = 0; r < rows; r++)
        for (size_t i = 0; i < width; i++) x[r * ld + i] = random_value(stream, r * width + i);
    return x;
}

static inline bool case_sees(const attention_case *c, int head, size_t t, size_t i) {
    size_t kv_head = (size_t)(head / (c->s.n_head / c->s.n_kv_head));
    if (i >= t) return i == t;
    if (c->s.window && t - i >= (size_t)c->s.window) return false;
    return !c->evict_at || c->evict_at[kv_head * kernel_pad(c->s.T) + i] > (int32_t)t;
}

static inline const float *case_row(const attention_case *c, int head, size_t t) {
    return c->qkv + t * c->s.ld + (size_t)head * (size_t)c->s.head_dim;
}
static inline int case_key_head(const attention_case *c, int head) {
    return c->s.n_head + head / (c->s.n_head / c->s.n_kv_head);
}

static inline double dot64(const float *a, const float *b, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += (double)a[i] * (double)b[i];
    return sum;
}

static inline void case_row_solve(attention_case *c, int head, size_t t) {
    size_t T = c->s.T, at = ((size_t)head * T + t) * T;
    int key_head = case_key_head(c, head), value_head = key_head + c->s.n_kv_head, dim = c->s.head_dim;
    double cap = (double)c->s.softcap, sum = 0, *o = c->o + t * c->width + (size_t)(head * dim);
    for (size_t i = 0; i <= t; i++) {
        double x = (double)c->s.scale * dot64(case_row(c, head, t), case_row(c, key_head, i), dim);
        double y = cap > 0 ? tanh(x / cap) : 0;
        c->slope[at + i] = 1 - y * y;
        c->p[at + i] = case_sees(c, head, t, i) ? exp(cap > 0 ? cap * y : x) : 0;
        sum += c->p[at + i];
    }
    for (int k = 0; k < dim; k++) o[k] = 0;
    for (size_t i = 0; i <= t; i++) {
        c->p[at + i] /= sum;
        for (int k = 0; k < dim; k++) o[k] += c->p[at + i] * (double)case_row(c, value_head, i)[k];
    }
    c->lse[(size_t)head * T + t] = log(sum);
}

static inline void case_solve(attention_case *c) {
    for (int head = 0; head < c->s.n_head; head++)
        for (size_t t = 0; t < c->s.T; t++) case_row_solve(c, head, t);
}

static inline void case_begin(attention_case *c, device *d, const sizes *z) {
    size_t T = z->T, heads = (size_t)z->n_head, all = heads + 2 * (size_t)z->n_kv_head, dim = (size_t)z->head_dim;
    *c = (attention_case){.width = heads * dim, .ld_o = kernel_pad(heads * dim) + 16};
    c->s = (attention_shape){.T = T,
                             .n_head = z->n_head,
                             .n_kv_head = z->n_kv_head,
                             .head_dim = z->head_dim,
                             .scale = 1 / sqrtf((float)z->head_dim),
                             .softcap = z->softcap,
                             .window = z->window,
                             .ld = kernel_pad(all * dim) + 16};
    c->s.qkv = c->qkv = random_rows(d, 1, T, all * dim, c->s.ld);
    if (z->evict) {
        size_t padded = kernel_pad(T), n = (size_t)z->n_kv_head * padded;
        c->s.evict_at = c->evict_at = device_memory(d, n * sizeof(int32_t));
        for (size_t i = 0; i < n; i++) {
            rng_block r = rng_philox(6, (uint32_t)i, 0, 0, 0);
            c->evict_at[i] = r.v[0] % 3 ? (int32_t)(i % padded + r.v[1] % T) : INT32_MAX;
        }
    }
    c->p = calloc(heads * T * T, sizeof *c->p);
    c->slope = calloc(heads * T * T, sizeof *c->slope);
    c->o = calloc(T * c->width, sizeof *c->o);
    c->lse = calloc(heads * T, sizeof *c->lse);
    assert_true(c->p && c->slope && c->o && c->lse);
    case_solve(c);
}

static inline void case_end(attention_case *c) {
    free(c->p);
    free(c->slope);
    free(c->o);
    free(c->lse);
}

/* Rows of f32 against f64, within `bound` of the largest (or of 1: all may be zero); and what lies behind the rows'
 * ends is untouched. */
static inline void check_rows(const float *got, size_t ld, const double *want, size_t rows, size_t width,
                              double bound) {
    double most = 1, worst = 0;
    for (size_t i = 0; i < rows * width; i++) most = fmax(most, fabs(want[i]));
    for (size_t r = 0; r < rows; r++) {
        for (size_t i = 0; i < width; i++) {
            double error = fabs((double)got[r * ld + i] - want[r * width + i]);
            if (!(error <= worst)) worst = error;
        }
        for (size_t i = width; i < ld; i++) assert_true(isnan(got[r * ld + i]));
    }
    if (!(worst <= bound * most)) fail_msg("error %g of %g", worst, most);
}

/* Each test has a device of its own, which gives back what the test took. */
static device *d;
static inline int open_device(void **state) {
    (void)state;
    return device_open("", &d);
}
static inline int close_device(void **state) {
    (void)state;
    device_close(d);
    return 0;
}
#define TEST(f) cmocka_unit_test_setup_teardown(f, open_device, close_device)
