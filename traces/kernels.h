/* The inner loops of traces and sim, one source compiled for several instruction sets and chosen at run time.
 *
 * Every path gives the same bits: 16 f32 lanes whatever the register width, explicit fused multiply-add, one
 * polynomial exp, lanes combined in f64 in one order, no contraction by the compiler. So results from one trace are
 * the same bytes on every machine (DESIGN section 9). tests/unit/test_kernels.c compares every path with plain loops.
 *
 * Arrays are 64-byte aligned and padded to a multiple of 16 elements where "padded" stands. */
#pragma once

#include "base/half.h"

#include <stddef.h>
#include <stdint.h>

enum { KERNEL_LANES = 16, KERNEL_STREAMS_MAX = 12 };

static inline size_t kernel_pad(size_t n) {
    return (n + KERNEL_LANES - 1) / KERNEL_LANES * KERNEL_LANES;
}

typedef struct kernel_table {
    const char *name; /* "avx512", "avx2", "portable" */

    /* Conversions; bit-equal to half.h for all values but the payload of NaNs. Any n, any alignment. */
    void (*f16_to_f32)(const half *from, float *to, size_t n);
    void (*f32_to_f16)(const float *from, half *to, size_t n);

    /* HDF5's byte shuffle for 2-byte elements: all low bytes, then all high bytes. n elements, any alignment. */
    void (*shuffle2)(const void *from, void *to, size_t n);
    void (*unshuffle2)(const void *from, void *to, size_t n);
    /* unshuffle2 and f16_to_f32 in one, for any part of the two planes: n low bytes, n high bytes. */
    void (*unshuffle2_to_f32)(const uint8_t *low, const uint8_t *high, float *to, size_t n);

    /* Keys [n][dim] -> blocks [pad(n)/16][dim][16], zero beyond n: the layout `scores` reads. */
    void (*pack_keys)(const float *keys, size_t n, size_t dim, float *packed);

    /* out[r*stride + i] = scale * (sum over d of q[r*dim+d] * key_i[d], fused, d ascending), for r < rows and
     * i < pad(n). out padded: stride is a multiple of 16. */
    void (*scores)(const float *q, size_t rows, const float *packed, size_t n, size_t dim, float scale, float *out,
                   size_t stride);

    /* In place on one padded row: entries first .. last (inclusive) become their softmax, all others up to pad(last+1)
     * become 0; softcap > 0 applies cap*tanh(x/cap) first. Entries with evict_at[i] <= last are out of reach too
     * (evict_at padded; NULL = all are in reach; entry `last` itself must be). Returns the log of the normaliser (lse),
     * NaN when any of the scores in reach is not finite. */
    double (*softmax)(float *row, size_t first, size_t last, float softcap, const int32_t *evict_at);

    /* The same without the division: each score in reach becomes exp(score - the largest), which *top receives. Returns
     * their sum, NaN when any of the scores in reach is not finite. */
    double (*exponentials)(float *row, size_t first, size_t last, float softcap, float *top);

    /* Sum of a padded row's n entries (lanes f32, total f64). */
    double (*sum)(const float *x, size_t n);
    /* Divide a padded row by `sum` of its n entries, in place; those before `first` are zero. Returns the sum, or NaN
     * if an entry is negative or the sum is no positive finite number; the row is then as it was. */
    double (*normalise)(float *row, size_t first, size_t n);
    /* Sum of x[i] * y[i], fused in lanes. Both padded. */
    double (*dot)(const float *x, const float *y, size_t n);

    /* d[i] = a[i] * (mean - s[i]) for i < pad(n). */
    void (*deviation)(const float *a, const float *s, float mean, float *d, size_t n);

    /* Masks stand as bit i % 16 of mask[i / 16]. For i < pad(n): is entry i gone at step t, evict_at[i] <= t? */
    void (*gone_mask)(const int32_t *evict_at, int32_t t, size_t n, uint16_t *mask);
    /* The masked sums of DESIGN section 6, piece by piece: the lanes of x[k][i], i < n, that are in the mask (or, if
     * `others`, that are not) are added to lanes[k]. n_x <= KERNEL_STREAMS_MAX rows, padded with zeros. */
    void (*masked_lanes)(const float *const *x, int n_x, const uint16_t *mask, int others, size_t n,
                         float (*lanes)[KERNEL_LANES]);
    /* out[k] = sum of lanes[k] in f64; lanes 64-byte aligned. */
    void (*totals)(const float (*lanes)[KERNEL_LANES], int n, double *out);

    /* Index of the lowest of n >= 1 values, the first of equal ones. No NaN. Any alignment. */
    size_t (*lowest)(const double *x, size_t n);

    /* f[j] = keep * f[j] + gain * (factor * a[j]) for j < n, each operation rounded. f padded. */
    void (*blend)(double *f, const float *a, double keep, double gain, double factor, size_t n);

    /* f[j] += factor * a[j]; mean[j] = f[j] / (t - entry[j]) for j < n, each operation rounded. Any alignment. */
    void (*add_mean)(double *f, double *mean, const float *a, const int32_t *entry, double factor, int32_t t, size_t n);

    /* The unit's row over its residents (DESIGN section 4, step 2): row[j] = combination over heads h < n_head of
     * heads[h][entry[j]] / (sum over j' of heads[h][entry[j']]); the mean, or the max if take_max; for j >= from, what
     * is before need not be set. A head whose resident mass is 0 (below 2^-126) contributes 0. The residents come
     * twice: n > from ascending entries, and bit i % 16 of mask[i / 16] for each. heads: entries up to the last
     * resident, any alignment. row has room for pad(n) + 16, scratch for 4 pad(n). */
    void (*resident_row)(const float *const *heads, int n_head, const int32_t *entry, const uint16_t *mask, size_t n,
                         size_t from, int take_max, float *scratch, float *row);
} kernel_table;

/* The best table this processor runs; KVLAG_KERNELS=portable|avx2|avx512 in the environment asks for a lower one (an
 * unknown or unavailable name is ignored with a line on stderr). Never NULL. */
const kernel_table *kernels(void);

/* All tables this processor can run, for tests. Returns their number (at most 3). */
int kernels_available(const kernel_table *list[3]);
