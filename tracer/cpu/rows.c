#include "tracer/cpu/rows.h"
#include "traces/kernels.h"

#include <math.h>

/* Four lanes: what every processor has without asking the compiler for more. */
typedef float v4f __attribute__((vector_size(16)));
typedef int32_t v4i __attribute__((vector_size(16)));
#define INLINE static inline __attribute__((always_inline))

INLINE v4f splat(float x) {
    return x - (v4f){0};
}

/* exp for x <= 0 with Cephes' expf polynomial, good to 2 units in the last place; 0 below -87. */
INLINE v4f exp4(v4f x) {
    v4i normal = x >= splat(-87.0f);
    x = (v4f)((v4i)x & normal);
    const v4f round = splat(12582912.0f); /* 1.5 * 2^23: adding it leaves the nearest integer in the low bits */
    v4f n = x * splat(1.44269504088896341f) + round;
    v4i power = (v4i)n - (v4i)round;
    n -= round;
    v4f r = x - n * splat(0.693359375f) + n * splat(2.12194440e-4f);
    v4f p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    v4f e = p * r * r + r + splat(1.0f);
    return (v4f)(((v4i)e + (power << 23)) & normal);
}

void rows_rms_norm(const float *x, const float *weight, size_t n, float eps, float *out) {
    double mean = kernels()->dot(x, x, n) / (double)n;
    v4f inverse = splat((float)(1.0 / sqrt(mean + (double)eps)));
    for (size_t i = 0; i < n; i += 4) *(v4f *)(out + i) = *(const v4f *)(x + i) * inverse * *(const v4f *)(weight + i);
}

void rows_rms_norm_back(const float *x, const float *weight, size_t n, float eps, float *d_out, float *d_x) {
    double mean = kernels()->dot(x, x, n) / (double)n, inverse = 1.0 / sqrt(mean + (double)eps);
    for (size_t i = 0; i < n; i += 4) *(v4f *)(d_out + i) *= *(const v4f *)(weight + i);
    /* Moving x along itself hardly moves the output (not at all with eps 0): that part is taken out. */
    v4f along = splat((float)(kernels()->dot(d_out, x, n) * inverse * inverse / (double)n)), by = splat((float)inverse);
    for (size_t i = 0; i < n; i += 4)
        *(v4f *)(d_x + i) += by * (*(const v4f *)(d_out + i) - along * *(const v4f *)(x + i));
}

/* sigmoid(g) = *top / *bottom: 1/(1+z) for g >= 0 and z/(1+z) for g < 0, with z = exp(-|g|). */
INLINE void sigmoid4(v4f g, v4f *top, v4f *bottom) {
    v4i negative = g < splat(0.0f);
    v4f z = exp4((v4f)((v4i)g | (v4i)splat(-0.0f)));
    *top = (v4f)(((v4i)z & negative) | ((v4i)splat(1.0f) & ~negative));
    *bottom = splat(1.0f) + z;
}

void rows_silu_gate(const float *gate, float *up, size_t n) {
    for (size_t i = 0; i < n; i += 4) {
        v4f g = *(const v4f *)(gate + i), top, bottom;
        sigmoid4(g, &top, &bottom);
        *(v4f *)(up + i) *= g * top / bottom;
    }
}

void rows_silu_gate_slopes(float *gate, float *up, size_t n) {
    for (size_t i = 0; i < n; i += 4) {
        v4f g = *(const v4f *)(gate + i), top, bottom;
        sigmoid4(g, &top, &bottom);
        v4f sigmoid = top / bottom, silu = g * sigmoid;
        *(v4f *)(gate + i) = silu;
        *(v4f *)(up + i) *= sigmoid + silu * (splat(1.0f) - sigmoid);
    }
}

void rows_silu_gate_back(const float *slope_up, const float *slope_gate, float *d_up, float *d_gate, size_t n) {
    for (size_t i = 0; i < n; i += 4) {
        v4f d_out = *(const v4f *)(d_up + i);
        *(v4f *)(d_up + i) = d_out * *(const v4f *)(slope_up + i);
        *(v4f *)(d_gate + i) = d_out * *(const v4f *)(slope_gate + i);
    }
}

void rows_rope_angles(int32_t position, int32_t dims, const double *inverse, double scale, float *table) {
    for (int32_t i = 0; i < dims / 2; i++) {
        double angle = (double)position * inverse[i];
        table[2 * i] = (float)(scale * cos(angle));
        table[2 * i + 1] = (float)(scale * sin(angle));
    }
}

INLINE void turn(float *heads, int n_head, int32_t head_dim, int32_t dims, arch_rope kind, const float *table,
                 float way) {
    size_t step = kind == ARCH_ROPE_INTERLEAVED ? 2 : 1, mate = kind == ARCH_ROPE_INTERLEAVED ? 1 : (size_t)dims / 2;
    for (int h = 0; h < n_head; h++) {
        float *x = heads + (size_t)h * (size_t)head_dim;
        for (size_t i = 0; i < (size_t)dims / 2; i++) {
            float a = x[i * step], b = x[i * step + mate], cosine = table[2 * i];
            float sine = way * table[2 * i + 1];
            x[i * step] = a * cosine - b * sine;
            x[i * step + mate] = a * sine + b * cosine;
        }
    }
}

void rows_rope(float *heads, int n_head, int32_t head_dim, int32_t dims, arch_rope kind, const float *table) {
    turn(heads, n_head, head_dim, dims, kind, table, 1);
}

void rows_rope_back(float *heads, int n_head, int32_t head_dim, int32_t dims, arch_rope kind, const float *table) {
    turn(heads, n_head, head_dim, dims, kind, table, -1);
}
