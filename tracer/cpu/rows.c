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

/* ---- norms ------------------------------------------------------------------------------------------------------ */

static void rms_norm(const float *x, const float *weight, size_t n, float eps, float *out) {
    double mean = kernels()->dot(x, x, n) / (double)n;
    v4f inverse = splat((float)(1.0 / sqrt(mean + (double)eps)));
    for (size_t i = 0; i < n; i += 4) *(v4f *)(out + i) = *(const v4f *)(x + i) * inverse * *(const v4f *)(weight + i);
}

static void rms_norm_back(const float *x, const float *weight, size_t n, float eps, float *d_out, float *d_x) {
    double mean = kernels()->dot(x, x, n) / (double)n, inverse = 1.0 / sqrt(mean + (double)eps);
    for (size_t i = 0; i < n; i += 4) *(v4f *)(d_out + i) *= *(const v4f *)(weight + i);
    /* Moving x along itself hardly moves the output (not at all with eps 0): that part is taken out. */
    v4f along = splat((float)(kernels()->dot(d_out, x, n) * inverse * inverse / (double)n)), by = splat((float)inverse);
    for (size_t i = 0; i < n; i += 4)
        *(v4f *)(d_x + i) += by * (*(const v4f *)(d_out + i) - along * *(const v4f *)(x + i));
}

static double inverse_deviation(const float *x, double mean, size_t n, float eps) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += ((double)x[i] - mean) * ((double)x[i] - mean);
    return 1.0 / sqrt(sum / (double)n + (double)eps);
}

/* Weight and bias are zero behind the last element, and so is what comes out. */
static void layer_norm(const float *x, const float *weight, const float *bias, size_t n, float eps, float *out) {
    double mean = kernels()->sum(x, n) / (double)n;
    v4f inverse = splat((float)inverse_deviation(x, mean, n, eps)), middle = splat((float)mean);
    for (size_t i = 0; i < n; i += 4) {
        v4f y = (*(const v4f *)(x + i) - middle) * inverse * *(const v4f *)(weight + i);
        *(v4f *)(out + i) = bias ? y + *(const v4f *)(bias + i) : y;
    }
}

/* Neither moving all of x together nor moving it along its deviation moves the output: both parts are taken out. */
static void layer_norm_back(const float *x, const float *weight, size_t n, float eps, float *d_out, float *d_x) {
    double mean = kernels()->sum(x, n) / (double)n, inverse = inverse_deviation(x, mean, n, eps), sum = 0, along = 0;
    for (size_t i = 0; i < n; i++) {
        d_out[i] *= weight[i];
        sum += (double)d_out[i];
        along += (double)d_out[i] * ((double)x[i] - mean);
    }
    sum /= (double)n;
    along *= inverse * inverse / (double)n;
    for (size_t i = 0; i < n; i++)
        d_x[i] += (float)(inverse * ((double)d_out[i] - sum - along * ((double)x[i] - mean)));
}

void rows_norm(arch_norm kind, const float *x, const float *weight, const float *bias, size_t n, float eps,
               float *out) {
    if (kind == ARCH_NORM_LAYER) layer_norm(x, weight, bias, n, eps, out);
    else rms_norm(x, weight, n, eps, out);
}

void rows_norm_back(arch_norm kind, const float *x, const float *weight, size_t n, float eps, float *d_out,
                    float *d_x) {
    if (kind == ARCH_NORM_LAYER) layer_norm_back(x, weight, n, eps, d_out, d_x);
    else rms_norm_back(x, weight, n, eps, d_out, d_x);
}

static double inverse_root(const float *x, size_t n, float eps) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += (double)x[i] * (double)x[i];
    return 1.0 / sqrt(sum / (double)n + (double)eps);
}

void rows_head_norm(float *x, const float *weight, size_t n, float eps) {
    float inverse = (float)inverse_root(x, n, eps);
    for (size_t i = 0; i < n; i++) x[i] = x[i] * inverse * weight[i];
}

void rows_head_norm_back(const float *x, const float *weight, size_t n, float eps, float *d) {
    double inverse = inverse_root(x, n, eps), along = 0;
    for (size_t i = 0; i < n; i++) {
        d[i] *= weight[i];
        along += (double)d[i] * (double)x[i];
    }
    along *= inverse * inverse / (double)n;
    for (size_t i = 0; i < n; i++) d[i] = (float)(inverse * ((double)d[i] - along * (double)x[i]));
}

/* ---- activations ------------------------------------------------------------------------------------------------ */

/* sigmoid(g) = *top / *bottom: 1/(1+z) for g >= 0 and z/(1+z) for g < 0, with z = exp(-|g|). */
INLINE void sigmoid4(v4f g, v4f *top, v4f *bottom) {
    v4i negative = g < splat(0.0f);
    v4f z = exp4((v4f)((v4i)g | (v4i)splat(-0.0f)));
    *top = (v4f)(((v4i)z & negative) | ((v4i)splat(1.0f) & ~negative));
    *bottom = splat(1.0f) + z;
}

/* Every activation is x * sigmoid(y): SiLU with y = x, GELU's tanh form with y = 2 sqrt(2/pi) (x + .044715 x^3), since
 * (1 + tanh u) / 2 = sigmoid(2u). */
INLINE v4f inner4(arch_activation kind, v4f x) {
    const v4f two_root = splat(1.5957691216057308f);
    return kind == ARCH_SILU ? x : two_root * (x + splat(0.044715f) * x * x * x);
}

/* dy/dx */
INLINE v4f inner_slope4(arch_activation kind, v4f x) {
    const v4f two_root = splat(1.5957691216057308f);
    return kind == ARCH_SILU ? splat(1.0f) : two_root * (splat(1.0f) + splat(3 * 0.044715f) * x * x);
}

INLINE void gate_with(arch_activation kind, const float *gate, float *up, size_t n) {
    for (size_t i = 0; i < n; i += 4) {
        v4f g = *(const v4f *)(gate + i), top, bottom;
        sigmoid4(inner4(kind, g), &top, &bottom);
        *(v4f *)(up + i) *= g * top / bottom;
    }
}

INLINE void slopes_with(arch_activation kind, float *gate, float *up, size_t n) {
    for (size_t i = 0; i < n; i += 4) {
        v4f g = *(const v4f *)(gate + i), top, bottom;
        sigmoid4(inner4(kind, g), &top, &bottom);
        v4f sigmoid = top / bottom, value = g * sigmoid;
        *(v4f *)(gate + i) = value;
        *(v4f *)(up + i) *= sigmoid + value * (splat(1.0f) - sigmoid) * inner_slope4(kind, g);
    }
}

void rows_gate(arch_activation kind, const float *gate, float *up, size_t n) {
    if (kind == ARCH_SILU) gate_with(ARCH_SILU, gate, up, n);
    else gate_with(ARCH_GELU_TANH, gate, up, n);
}

void rows_gate_slopes(arch_activation kind, float *gate, float *up, size_t n) {
    if (kind == ARCH_SILU) slopes_with(ARCH_SILU, gate, up, n);
    else slopes_with(ARCH_GELU_TANH, gate, up, n);
}

void rows_gate_back(const float *slope_up, const float *slope_gate, float *d_up, float *d_gate, size_t n) {
    for (size_t i = 0; i < n; i += 4) {
        v4f d_out = *(const v4f *)(d_up + i);
        *(v4f *)(d_up + i) = d_out * *(const v4f *)(slope_up + i);
        *(v4f *)(d_gate + i) = d_out * *(const v4f *)(slope_gate + i);
    }
}

/* tanh |y| = (1 - z) / (1 + z) with z = exp(-2 |y|). Adding x - x keeps what is not finite. */
void rows_softcap(float *x, size_t n, float cap) {
    const v4i sign = (v4i)splat(-0.0f);
    for (size_t i = 0; i < n; i += 4) {
        v4f y = *(v4f *)(x + i), z = exp4(splat(-2.0f) * (v4f)((v4i)(y / splat(cap)) & ~sign));
        v4f t = splat(cap) * (splat(1.0f) - z) / (splat(1.0f) + z);
        *(v4f *)(x + i) = (v4f)((v4i)t | ((v4i)y & sign)) + (y - y);
    }
}

void rows_softcap_slope(const float *capped, size_t n, float cap, float *p) {
    for (size_t i = 0; i < n; i++) p[i] *= 1 - capped[i] / cap * (capped[i] / cap);
}

/* ---- rotation --------------------------------------------------------------------------------------------------- */

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
