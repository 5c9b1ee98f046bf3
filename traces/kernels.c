/* Compiled several times: -DKERNELS=kernels_avx512 etc. with that instruction set (see the Makefile). Everything is
 * written on vectors of 16 f32 lanes; only the few operations that the vector extension lacks differ by target. */
#include "traces/kernels.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
enum { LANES = KERNEL_LANES };

/* Below this a mass has no reciprocal in f32. */
#define LEAST_MASS 0x1p-126

typedef float v16f __attribute__((vector_size(64)));
typedef int32_t v16i __attribute__((vector_size(64)));
typedef float v8f __attribute__((vector_size(32)));
typedef double v8d __attribute__((vector_size(64)));
typedef double v4d __attribute__((vector_size(32)));
typedef double v2d __attribute__((vector_size(16)));

/* ---- what differs between the targets --------------------------------------------------------------------------- */

#if defined(__AVX512F__)
#define NAME "avx512"
enum { TILE_ROWS = 8, TILE_BLOCKS = 2 };
typedef __mmask16 mask16;
INLINE v16f fma16(v16f a, v16f b, v16f c) {
    return (v16f)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
INLINE mask16 mask_le(v16i a, v16i b) {
    return _mm512_cmple_epi32_mask((__m512i)a, (__m512i)b);
}
INLINE mask16 lanes_in(uint16_t bits) {
    return bits;
}
INLINE uint16_t bits_of(mask16 m) {
    return m;
}
INLINE v16f masked_add(v16f acc, mask16 m, v16f x) {
    return (v16f)_mm512_mask_add_ps((__m512)acc, m, (__m512)acc, (__m512)x);
}
INLINE v16f gather16(const float *base, const int32_t *index) {
    return (v16f)_mm512_i32gather_ps(_mm512_loadu_si512(index), base, 4);
}
/* The first n < 16 lanes; the others are 0. */
INLINE v16f gather_some(const float *base, const int32_t *index, size_t n) {
    mask16 m = (mask16)((1u << n) - 1);
    __m512i at = _mm512_maskz_loadu_epi32(m, index);
    return (v16f)_mm512_mask_i32gather_ps(_mm512_setzero_ps(), m, at, base, 4);
}
#else
typedef v16i mask16;
INLINE mask16 mask_le(v16i a, v16i b) {
    return a <= b;
}
INLINE mask16 lanes_in(uint16_t bits) {
    const v16i lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return -(((int32_t)bits - (v16i){0}) >> lane & 1);
}
INLINE uint16_t bits_of(mask16 m) {
    uint16_t bits = 0;
    for (int l = 0; l < LANES; l++) bits |= (uint16_t)((m[l] & 1) << l);
    return bits;
}
INLINE v16f masked_add(v16f acc, mask16 m, v16f x) {
    return acc + (v16f)((v16i)x & m);
}
INLINE v16f gather16(const float *base, const int32_t *index) {
    v16f v;
    for (int l = 0; l < LANES; l++) v[l] = base[index[l]];
    return v;
}
INLINE v16f gather_some(const float *base, const int32_t *index, size_t n) {
    v16f v = {0};
    for (size_t l = 0; l < n; l++) v[l] = base[index[l]];
    return v;
}
#if defined(__FMA__)
#define NAME "avx2"
enum { TILE_ROWS = 4, TILE_BLOCKS = 1 };
INLINE v16f fma16(v16f a, v16f b, v16f c) {
    union {
        v16f v;
        __m256 half[2];
    } x = {.v = a}, y = {.v = b}, z = {.v = c};
    z.half[0] = _mm256_fmadd_ps(x.half[0], y.half[0], z.half[0]);
    z.half[1] = _mm256_fmadd_ps(x.half[1], y.half[1], z.half[1]);
    return z.v;
}
#else
#define NAME "portable"
enum { TILE_ROWS = 2, TILE_BLOCKS = 1 };
INLINE v16f fma16(v16f a, v16f b, v16f c) {
    for (int l = 0; l < LANES; l++) c[l] = fmaf(a[l], b[l], c[l]);
    return c;
}
#endif
#endif

/* ---- small helpers ---------------------------------------------------------------------------------------------- */

INLINE v16f splat(float x) {
    return x - (v16f){0};
}
INLINE v16i splat_i(int32_t x) {
    return x - (v16i){0};
}
INLINE v16f select16(v16i mask, v16f yes, v16f no) {
    return (v16f)(((v16i)yes & mask) | ((v16i)no & ~mask));
}
INLINE v16f load(const float *p) {
    return *(const v16f *)p;
}
INLINE void store(float *p, v16f v) {
    *(v16f *)p = v;
}

/* The lanes in f64, halves onto halves: 8, 4, 2, 1 of them. */
INLINE double total(v16f v) {
    union {
        v16f v;
        v8f half[2];
    } x = {.v = v};
    union {
        v8d v;
        v4d half[2];
    } eight = {.v = __builtin_convertvector(x.half[0], v8d) + __builtin_convertvector(x.half[1], v8d)};
    union {
        v4d v;
        v2d half[2];
    } four = {.v = eight.half[0] + eight.half[1]};
    v2d two = four.half[0] + four.half[1];
    return two[0] + two[1];
}

static const v16i lane_number = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* exp for x <= 0 (to about 1 unit in the last place; Cephes' expf polynomial); below -87 it is 0. */
INLINE v16f exp16(v16f x) {
    v16i tiny = x < splat(-87.0f);
    x = select16(tiny, splat(0.0f), x);
    const v16f round = splat(12582912.0f); /* 1.5 * 2^23: adding it leaves the nearest integer in the low bits */
    v16f n = x * splat(1.44269504088896341f) + round;
    v16i power = (v16i)n - (v16i)round;
    n = n - round;
    v16f r = fma16(n, splat(-0.693359375f), x);
    r = fma16(n, splat(2.12194440e-4f), r);
    v16f p = splat(1.9875691500e-4f);
    p = fma16(p, r, splat(1.3981999507e-3f));
    p = fma16(p, r, splat(8.3334519073e-3f));
    p = fma16(p, r, splat(4.1665795894e-2f));
    p = fma16(p, r, splat(1.6666665459e-1f));
    p = fma16(p, r, splat(5.0000001201e-1f));
    v16f e = fma16(p * r, r, r) + splat(1.0f);
    e = (v16f)((v16i)e + (power << 23));
    return select16(tiny, splat(0.0f), e);
}

/* tanh through exp of a non-positive argument: tanh|y| = (1 - z) / (1 + z), z = exp(-2|y|). */
INLINE v16f tanh16(v16f y) {
    v16i sign = (v16i)y & splat_i(INT32_MIN);
    v16f z = exp16(splat(-2.0f) * (v16f)((v16i)y & splat_i(INT32_MAX)));
    v16f t = (splat(1.0f) - z) / (splat(1.0f) + z);
    return (v16f)((v16i)t | sign);
}

/* ---- conversions ------------------------------------------------------------------------------------------------ */

static void f16_to_f32(const half *from, float *to, size_t n) {
    size_t i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= n; i += 16)
        _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(from + i))));
#elif defined(__F16C__)
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const void *)(from + i))));
#endif
    for (; i < n; i++) to[i] = half_to_f32(from[i]);
}

static void f32_to_f16(const float *from, half *to, size_t n) {
    size_t i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= n; i += 16)
        _mm256_storeu_si256((void *)(to + i), _mm512_cvtps_ph(_mm512_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((void *)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < n; i++) to[i] = half_from_f32(from[i]);
}

static void shuffle2(const void *from, void *to, size_t n) {
    const uint8_t *in = from;
    uint8_t *restrict low = to, *restrict high = low + n;
    for (size_t i = 0; i < n; i++) {
        low[i] = in[2 * i];
        high[i] = in[2 * i + 1];
    }
}

static void unshuffle2(const void *from, void *to, size_t n) {
    const uint8_t *low = from, *high = low + n;
    uint8_t *restrict out = to;
    for (size_t i = 0; i < n; i++) {
        out[2 * i] = low[i];
        out[2 * i + 1] = high[i];
    }
}

static void unshuffle2_to_f32(const uint8_t *low, const uint8_t *high, float *to, size_t n) {
    size_t i = 0;
#if defined(__F16C__)
    for (; i + 16 <= n; i += 16) {
        __m128i l = _mm_loadu_si128((const void *)(low + i)), h = _mm_loadu_si128((const void *)(high + i));
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_unpacklo_epi8(l, h)));
        _mm256_storeu_ps(to + i + 8, _mm256_cvtph_ps(_mm_unpackhi_epi8(l, h)));
    }
#endif
    for (; i < n; i++) to[i] = half_to_f32((half)(low[i] | high[i] << 8));
}

/* ---- scores ----------------------------------------------------------------------------------------------------- */

static void pack_keys(const float *keys, size_t n, size_t dim, float *packed) {
    for (size_t block = 0; block < kernel_pad(n) / LANES; block++)
        for (size_t d = 0; d < dim; d++)
            for (size_t l = 0; l < LANES; l++) {
                size_t i = block * LANES + l;
                packed[(block * dim + d) * LANES + l] = i < n ? keys[i * dim + d] : 0.0f;
            }
}

/* rows x blocks outputs in registers; each output is one chain of fused multiply-adds over d, so that the size of the
 * tile does not change a bit. */
INLINE void score_tile(const float *q, const float *packed, size_t dim, float scale, float *out, size_t stride,
                       const int rows, const int blocks) {
    v16f acc[TILE_ROWS][TILE_BLOCKS];
    for (int r = 0; r < rows; r++)
        for (int b = 0; b < blocks; b++) acc[r][b] = splat(0.0f);
    for (size_t d = 0; d < dim; d++)
        for (int b = 0; b < blocks; b++) {
            v16f key = load(packed + ((size_t)b * dim + d) * LANES);
            for (int r = 0; r < rows; r++) acc[r][b] = fma16(splat(q[(size_t)r * dim + d]), key, acc[r][b]);
        }
    for (int r = 0; r < rows; r++)
        for (int b = 0; b < blocks; b++) store(out + (size_t)r * stride + (size_t)b * LANES, acc[r][b] * splat(scale));
}

static void scores(const float *q, size_t rows, const float *packed, size_t n, size_t dim, float scale, float *out,
                   size_t stride) {
    size_t blocks = kernel_pad(n) / LANES;
    /* Keys outside, rows inside: a block of keys stays in the first-level cache for all rows. */
    for (size_t b = 0; b < blocks;) {
        size_t take = b + TILE_BLOCKS <= blocks ? TILE_BLOCKS : 1;
        const float *keys = packed + b * dim * LANES;
        float *column = out + b * LANES;
        size_t r = 0;
        if (take == TILE_BLOCKS)
            for (; r + TILE_ROWS <= rows; r += TILE_ROWS)
                score_tile(q + r * dim, keys, dim, scale, column + r * stride, stride, TILE_ROWS, TILE_BLOCKS);
        else
            for (; r + TILE_ROWS <= rows; r += TILE_ROWS)
                score_tile(q + r * dim, keys, dim, scale, column + r * stride, stride, TILE_ROWS, 1);
        for (; r < rows; r++)
            for (size_t k = 0; k < take; k++)
                score_tile(q + r * dim, keys + k * dim * LANES, dim, scale, column + r * stride + k * LANES, stride, 1,
                           1);
        b += take;
    }
}

/* ---- softmax ---------------------------------------------------------------------------------------------------- */

/* Lanes of block b that lie in first .. last. */
INLINE v16i reachable(size_t b, size_t first, size_t last) {
    v16i i = lane_number + splat_i((int32_t)(b * LANES));
    return (i >= splat_i((int32_t)first)) & (i <= splat_i((int32_t)last));
}

INLINE double exponentials_of(float *row, size_t first, size_t last, float softcap, const int32_t *evict_at,
                              float *max) {
    size_t b0 = first / LANES, b1 = last / LANES;
    if (b0) memset(row, 0, b0 * LANES * sizeof *row);
    v16f top = splat(-INFINITY), bad = splat(0.0f);
    for (size_t b = b0; b <= b1; b++) {
        v16f x = load(row + b * LANES);
        v16i in = reachable(b, first, last);
        if (evict_at) in &= *(const v16i *)(evict_at + b * LANES) > splat_i((int32_t)last);
        bad += (v16f)((v16i)(x - x) & in); /* NaN for an infinite or NaN score, else 0 */
        if (softcap > 0) x = splat(softcap) * tanh16(x / splat(softcap));
        x = select16(in, x, splat(-INFINITY));
        top = select16(x > top, x, top);
        store(row + b * LANES, x);
    }
    if (isnan(total(bad))) return NAN;
    *max = top[0];
    for (int l = 1; l < LANES; l++)
        if (top[l] > *max) *max = top[l];
    v16f sum = splat(0.0f), largest = splat(*max);
    for (size_t b = b0; b <= b1; b++) {
        v16f e = exp16(load(row + b * LANES) - largest);
        sum += e;
        store(row + b * LANES, e);
    }
    return total(sum);
}

INLINE double softmax_of(float *row, size_t first, size_t last, float softcap, const int32_t *evict_at) {
    float max;
    double z = exponentials_of(row, first, last, softcap, evict_at, &max);
    if (isnan(z)) return NAN;
    v16f inverse = splat((float)(1.0 / z));
    for (size_t b = first / LANES; b <= last / LANES; b++) store(row + b * LANES, load(row + b * LANES) * inverse);
    return (double)max + log(z);
}

static double softmax(float *row, size_t first, size_t last, float softcap, const int32_t *evict_at) {
    if (evict_at) return softmax_of(row, first, last, softcap, evict_at);
    return softcap > 0 ? softmax_of(row, first, last, softcap, NULL) : softmax_of(row, first, last, 0.0f, NULL);
}

static double exponentials(float *row, size_t first, size_t last, float softcap, float *top) {
    return softcap > 0 ? exponentials_of(row, first, last, softcap, NULL, top)
                       : exponentials_of(row, first, last, 0.0f, NULL, top);
}

/* ---- sums ------------------------------------------------------------------------------------------------------- */

static double sum(const float *x, size_t n) {
    v16f acc = splat(0.0f);
    for (size_t i = 0; i < n; i += LANES) acc += load(x + i);
    return total(acc);
}

static double normalise(float *row, size_t first, size_t n) {
    v16f acc = splat(0.0f);
    v16i negative = splat_i(0);
    first = first / LANES * LANES;
    for (size_t i = first; i < n; i += LANES) {
        v16f x = load(row + i);
        acc += x;
        negative |= x < splat(0.0f);
    }
    double mass = total(acc);
    int32_t bad = !(mass >= LEAST_MASS && mass < INFINITY);
    for (int l = 0; l < LANES; l++) bad |= negative[l];
    if (bad) return NAN;
    v16f inverse = splat((float)(1 / mass));
    for (size_t i = first; i < n; i += LANES) store(row + i, load(row + i) * inverse);
    return mass;
}

static double dot(const float *x, const float *y, size_t n) {
    v16f acc = splat(0.0f);
    for (size_t i = 0; i < n; i += LANES) acc = fma16(load(x + i), load(y + i), acc);
    return total(acc);
}

static void deviation(const float *a, const float *s, float mean, float *d, size_t n) {
    for (size_t i = 0; i < n; i += LANES) store(d + i, load(a + i) * (splat(mean) - load(s + i)));
}

static void gone_mask(const int32_t *evict_at, int32_t t, size_t n, uint16_t *mask) {
    for (size_t b = 0; b < kernel_pad(n) / LANES; b++)
        mask[b] = bits_of(mask_le(*(const v16i *)(evict_at + b * LANES), splat_i(t)));
}

INLINE void masked_lanes_of(const float *const *x, const int n_x, const uint16_t *mask, uint16_t flip, size_t n,
                            float (*lanes)[LANES]) {
    v16f acc[KERNEL_STREAMS_MAX];
    for (int k = 0; k < n_x; k++) acc[k] = load(lanes[k]);
    for (size_t i = 0; i < n; i += LANES) {
        mask16 m = lanes_in(mask[i / LANES] ^ flip);
        for (int k = 0; k < n_x; k++) acc[k] = masked_add(acc[k], m, load(x[k] + i));
    }
    for (int k = 0; k < n_x; k++) store(lanes[k], acc[k]);
}

static void masked_lanes(const float *const *x, int n_x, const uint16_t *mask, int others, size_t n,
                         float (*lanes)[LANES]) {
    uint16_t flip = others ? 0xffff : 0;
#define ROWS(n_)                                      \
    case n_:                                          \
        masked_lanes_of(x, n_, mask, flip, n, lanes); \
        break
    switch (n_x) {
        ROWS(1);
        ROWS(2);
        ROWS(3);
        ROWS(4);
        ROWS(5);
        ROWS(6);
        ROWS(7);
        ROWS(8);
        ROWS(9);
        ROWS(10);
        ROWS(11);
        ROWS(12);
    default:
        break;
    }
#undef ROWS
}

static void totals(const float (*lanes)[LANES], int n, double *out) {
    for (int k = 0; k < n; k++) out[k] = total(load(lanes[k]));
}

typedef double v8d_anywhere __attribute__((vector_size(64), aligned(8)));
typedef int64_t v8l __attribute__((vector_size(64)));

/* Is any lane of a comparison true? */
INLINE bool any8(v8l m) {
#if defined(__AVX512F__)
    return _mm512_test_epi64_mask((__m512i)m, (__m512i)m) != 0;
#else
    int64_t any = 0;
    for (int l = 0; l < 8; l++) any |= m[l];
    return any != 0;
#endif
}
INLINE v8d lower8(v8d a, v8d b) {
#if defined(__AVX512F__)
    return (v8d)_mm512_min_pd((__m512d)a, (__m512d)b);
#else
    v8l less = a < b;
    return (v8d)(((v8l)a & less) | ((v8l)b & ~less));
#endif
}

/* First the lowest value, in four chains that do not wait for each other, then where it stands. */
static size_t lowest(const double *x, size_t n) {
    double least = x[0];
    size_t i = 0;
    if (n >= 32) {
        v8d low[4];
        for (int c = 0; c < 4; c++) low[c] = *(const v8d_anywhere *)(x + 8 * c);
        for (i = 32; i + 32 <= n; i += 32)
            for (size_t c = 0; c < 4; c++) low[c] = lower8(*(const v8d_anywhere *)(x + i + 8 * c), low[c]);
        v8d one = lower8(lower8(low[0], low[1]), lower8(low[2], low[3]));
        for (int l = 0; l < 8; l++)
            if (one[l] < least) least = one[l];
    }
    for (; i < n; i++)
        if (x[i] < least) least = x[i];
    v8d wanted = least - (v8d){0};
    for (i = 0; i + 32 <= n; i += 32) {
        v8l there = {0};
        for (size_t c = 0; c < 4; c++) there |= *(const v8d_anywhere *)(x + i + 8 * c) == wanted;
        if (any8(there)) break;
    }
    while (x[i] != least) i++;
    return i;
}

typedef float v8f_anywhere __attribute__((vector_size(32), aligned(4)));
typedef int32_t v8i_anywhere __attribute__((vector_size(32), aligned(4)));

static void blend(double *f, const float *a, double keep, double gain, double factor, size_t n) {
    size_t j = 0;
    for (; j + 8 <= n; j += 8) {
        v8d x = __builtin_convertvector(*(const v8f_anywhere *)(a + j), v8d);
        v8d *to = (v8d *)(f + j);
        *to = keep * *to + gain * (factor * x);
    }
    for (; j < n; j++) f[j] = keep * f[j] + gain * (factor * (double)a[j]);
}

static void add_mean(double *f, double *mean, const float *a, const int32_t *entry, double factor, int32_t t,
                     size_t n) {
    size_t j = 0;
    for (; j + 8 <= n; j += 8) {
        v8d x = __builtin_convertvector(*(const v8f_anywhere *)(a + j), v8d);
        v8d age = __builtin_convertvector(t - *(const v8i_anywhere *)(entry + j), v8d);
        v8d sum = *(const v8d_anywhere *)(f + j) + factor * x;
        *(v8d_anywhere *)(f + j) = sum;
        *(v8d_anywhere *)(mean + j) = sum / age;
    }
    for (; j < n; j++) {
        f[j] += factor * (double)a[j];
        mean[j] = f[j] / (t - entry[j]);
    }
}

/* ---- the row over the residents --------------------------------------------------------------------------------- */

enum { HEADS_AT_ONCE = 4 };

/* Some heads of the unit: what their row over the residents is made from. */
typedef struct residents {
    const float *head[HEADS_AT_ONCE];
    const int32_t *entry;
    const uint16_t *mask;
    size_t n, from; /* residents; the first whose value is wanted */
    int take_max;
    bool first; /* nothing is in the row yet */
    double share;
} residents;

/* Picking by index takes some 22 cycles a head and 16 residents, walking over all entries by mask some 2 a head and 16
 * entries. The choice must not hang on the processor: the two sum in another order. */
INLINE bool is_dense(const residents *r) {
    return (size_t)r->entry[r->n - 1] < r->n * 10;
}

INLINE void invert(const residents *r, const int count, const v16f *acc, v16f *inverse) {
    for (int h = 0; h < count; h++) {
        double mass = total(acc[h]);
        inverse[h] = splat(mass >= LEAST_MASS ? (float)(1.0 / (mass * r->share)) : 0.0f);
    }
}

INLINE v16f join(v16f a, v16f b, int take_max) {
    return take_max ? select16(b > a, b, a) : a + b;
}

/* By mask: lanes of block b, 0 where no resident is. Of the last block only its residents are read. */
INLINE v16f masked_block(const float *head, const uint16_t *mask, size_t b, bool last) {
#if defined(__AVX512F__)
    (void)last;
    return (v16f)_mm512_maskz_loadu_ps(mask[b], head + b * LANES);
#else
    typedef float v16f_anywhere __attribute__((vector_size(64), aligned(4)));
    v16f v = {0};
    if (last) {
        for (int l = 0; l < LANES; l++)
            if (mask[b] >> l & 1) v[l] = head[b * LANES + (size_t)l];
        return v;
    }
    return (v16f)((v16i)(v16f) * (const v16f_anywhere *)(head + b * LANES) & lanes_in(mask[b]));
#endif
}

/* Append the lanes of `m` to row[j ..] (or join them with what is there); whole vectors may be stored behind them. */
INLINE size_t append_lanes(v16f v, uint16_t m, const residents *r, float *row, size_t j) {
#if defined(__AVX512F__)
    v16f packed = (v16f)_mm512_maskz_compress_ps(m, (__m512)v);
    if (!r->first) packed = join((v16f)_mm512_loadu_ps(row + j), packed, r->take_max);
    _mm512_storeu_ps(row + j, (__m512)packed);
    return j + (size_t)__builtin_popcount(m);
#else
    for (; m; m &= (uint16_t)(m - 1), j++) {
        float x = v[__builtin_ctz(m)];
        if (r->first) row[j] = x;
        else if (!r->take_max) row[j] += x;
        else if (x > row[j]) row[j] = x;
    }
    return j;
#endif
}

INLINE void rows_by_mask(const residents *r, const int count, float *row) {
    size_t end = (size_t)r->entry[r->n - 1] / LANES, begin = (size_t)r->entry[r->from] / LANES, j = r->from;
    v16f acc[HEADS_AT_ONCE], inverse[HEADS_AT_ONCE];
    for (int h = 0; h < count; h++) acc[h] = splat(0.0f);
    for (size_t b = 0; b <= end; b++)
        for (int h = 0; h < count; h++) acc[h] += masked_block(r->head[h], r->mask, b, b == end);
    invert(r, count, acc, inverse);
    for (size_t b = begin; b <= end; b++) {
        uint16_t m = r->mask[b];
        if (b == begin) m &= (uint16_t)(0xffffu << r->entry[r->from] % LANES);
        if (!m) continue;
        v16f v = masked_block(r->head[0], r->mask, b, b == end) * inverse[0];
        for (int h = 1; h < count; h++)
            v = join(v, masked_block(r->head[h], r->mask, b, b == end) * inverse[h], r->take_max);
        j = append_lanes(v, m, r, row, j);
    }
}

/* By index: each head's values are gathered into its part of `scratch` for its mass, then joined. */
INLINE void rows_by_index(const residents *r, const int count, float *scratch, float *row) {
    size_t padded = kernel_pad(r->n), j = 0;
    v16f acc[HEADS_AT_ONCE], inverse[HEADS_AT_ONCE];
    for (int h = 0; h < count; h++) acc[h] = splat(0.0f);
    for (; j < r->n; j += LANES)
        for (int h = 0; h < count; h++) {
            bool whole = j + LANES <= r->n;
            v16f v = whole ? gather16(r->head[h], r->entry + j) : gather_some(r->head[h], r->entry + j, r->n - j);
            store(scratch + (size_t)h * padded + j, v);
            acc[h] += v;
        }
    invert(r, count, acc, inverse);
    for (j = r->from / LANES * LANES; j < r->n; j += LANES) {
        v16f v = load(scratch + j) * inverse[0];
        for (int h = 1; h < count; h++) v = join(v, load(scratch + (size_t)h * padded + j) * inverse[h], r->take_max);
        store(row + j, r->first ? v : join(load(row + j), v, r->take_max));
    }
}

INLINE void some_heads(const residents *r, const int count, float *scratch, float *row) {
    if (is_dense(r)) rows_by_mask(r, count, row);
    else rows_by_index(r, count, scratch, row);
}

static void resident_row(const float *const *heads, int n_head, const int32_t *entry, const uint16_t *mask, size_t n,
                         size_t from, int take_max, float *scratch, float *row) {
    residents r = {.entry = entry, .mask = mask, .n = n, .from = from, .take_max = take_max};
    r.share = take_max ? 1 : n_head;
    for (int h = 0; h < n_head; h += HEADS_AT_ONCE) {
        int count = n_head - h < HEADS_AT_ONCE ? n_head - h : HEADS_AT_ONCE;
        for (int k = 0; k < count; k++) r.head[k] = heads[h + k];
        r.first = h == 0;
        switch (count) {
        case 1:
            some_heads(&r, 1, scratch, row);
            break;
        case 2:
            some_heads(&r, 2, scratch, row);
            break;
        case 3:
            some_heads(&r, 3, scratch, row);
            break;
        default:
            some_heads(&r, HEADS_AT_ONCE, scratch, row);
        }
    }
}

extern const kernel_table KERNELS;
const kernel_table KERNELS = {
    .name = NAME,
    .f16_to_f32 = f16_to_f32,
    .f32_to_f16 = f32_to_f16,
    .shuffle2 = shuffle2,
    .unshuffle2 = unshuffle2,
    .unshuffle2_to_f32 = unshuffle2_to_f32,
    .pack_keys = pack_keys,
    .scores = scores,
    .softmax = softmax,
    .exponentials = exponentials,
    .sum = sum,
    .normalise = normalise,
    .dot = dot,
    .deviation = deviation,
    .gone_mask = gone_mask,
    .masked_lanes = masked_lanes,
    .totals = totals,
    .lowest = lowest,
    .blend = blend,
    .add_mean = add_mean,
    .resident_row = resident_row,
};
