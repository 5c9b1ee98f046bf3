/* What tests of kernels share: an open device, arrays of random numbers, comparisons. Device memory is host memory. */
#pragma once

#include "base/half.h"
#include "base/mem.h"
#include "base/rng.h"
#include "tracer/cuda/device.h"
#include "traces/kernels.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

static inline int open_device(void **state) {
    return device_open("", (device **)state);
}
static inline int close_device(void **state) {
    device_close(*state);
    return 0;
}

/* n values, 64-byte aligned, all bits set: NaN as f32 and as bf16. */
static inline void *array_nan(size_t n, size_t size) {
    void *p = mem_new(n, size, "test");
    assert_non_null(p);
    memset(p, 0xff, n * size);
    return p;
}

static inline float normal_at(uint32_t seed, size_t i) {
    return (float)rng_normal(rng_philox(seed, (uint32_t)i, 0, 0, 0));
}

/* rows of n standard normal values, `ld` apart, NaN behind each row's end: a kernel that reads those shows it. */
static inline float *array_rows(uint32_t seed, size_t rows, size_t n, size_t ld) {
    float *x = array_nan(rows * ld, sizeof *x);
    for (size_t r = 0; r < rows; r++)
        for (size_t i = 0; i < n; i++) x[r * ld + i] = normal_at(seed, r * n + i);
    return x;
}

/* One row for the CPU backend: padded with zeros. */
static inline float *array_padded(const float *row, size_t n) {
    float *x = mem_new(kernel_pad(n), sizeof *x, "test");
    assert_non_null(x);
    memcpy(x, row, n * sizeof *x);
    return x;
}

/* bf16 by the rule in f64: the nearer neighbour of the two, of equally near ones the even one. */
static inline uint16_t slow_bf16(float x) {
    uint32_t below = half_bits_of(x) >> 16;
    if (isnan(x)) return (uint16_t)(below | 0x40);
    if (isinf(x)) return (uint16_t)below;
    double low = bf16_to_f32((uint16_t)below), high = bf16_to_f32((uint16_t)(below + 1));
    if (isinf(high)) high = copysign(0x1p128, x);
    double to_low = fabs(x - low), to_high = fabs(high - x);
    return (uint16_t)(to_low < to_high || (to_low == to_high && below % 2 == 0) ? below : below + 1);
}

/* Equal, or |got - want| <= tolerance * max(|want|, size). */
static inline void expect_near(double got, double want, double size, double tolerance, const char *what, size_t row,
                               size_t i) {
    double scale = fabs(want) > size ? fabs(want) : size;
    if (got != want && !(fabs(got - want) <= tolerance * scale))
        fail_msg("%s, row %zu, %zu: %.9g is not %.9g", what, row, i, got, want);
}

static inline void expect_bits(uint32_t got, uint32_t want, const char *what, size_t row, size_t i) {
    if (got != want) fail_msg("%s, row %zu, %zu: bits %x are not %x", what, row, i, got, want);
}

/* Values n .. ld-1 of each row are as array_nan left them: nothing was written behind a row's end. */
static inline void expect_untouched(const void *x, size_t size, size_t rows, size_t n, size_t ld) {
    const unsigned char *bytes = x;
    for (size_t r = 0; r < rows; r++)
        for (size_t i = (r * ld + n) * size; i < (r + 1) * ld * size; i++)
            if (bytes[i] != 0xff) fail_msg("row %zu: written behind its end, at byte %zu", r, i - r * ld * size);
}
