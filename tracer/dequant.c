#include "tracer/dequant.h"
#include "base/half.h"

#include <stdio.h>
#include <string.h>

typedef unsigned char byte;

/* Loops of 16 and 32 values over bytes that do not overlap the output: compilers make vectors of them. Every value is
 * rounded as it is in ggml: scale times step first, then the product with the number, then the offset. */

static float half_at(const byte *p) {
    half h;
    memcpy(&h, p, sizeof h);
    return half_to_f32(h);
}

static void run_f32(const void *src, size_t n, float *out) {
    memcpy(out, src, n * sizeof *out);
}

/* half_to_f32 without branches, so that it goes into vectors. */
static inline float half_value(half h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, rest = h & 0x7fffu;
    uint32_t subnormal = half_bits_of((float)(int32_t)rest * 0x1p-24f), is_subnormal = -(uint32_t)(rest < 0x400);
    uint32_t normal = (rest << 13) + 0x38000000u + (uint32_t)(rest >= 0x7c00) * 0x38000000u;
    return half_from_bits(sign | (subnormal & is_subnormal) | (normal & ~is_subnormal));
}

static void run_f16(const void *src, size_t n, float *restrict out) {
    const byte *p = src;
    half h[16];
    for (; n >= 16; n -= 16, p += 32, out += 16) {
        memcpy(h, p, sizeof h);
        for (int j = 0; j < 16; j++) out[j] = half_value(h[j]);
    }
    for (size_t j = 0; j < n; j++) out[j] = half_at(p + 2 * j);
}

static void run_bf16(const void *src, size_t n, float *restrict out) {
    const byte *p = src;
    uint16_t b[16];
    for (; n >= 16; n -= 16, p += 32, out += 16) {
        memcpy(b, p, sizeof b);
        for (int j = 0; j < 16; j++) out[j] = bf16_to_f32(b[j]);
    }
    memcpy(b, p, n * sizeof *b);
    for (size_t j = 0; j < n; j++) out[j] = bf16_to_f32(b[j]);
}

/* ---- blocks of 32 ----------------------------------------------------------------------------------------------- */

/* f16 d, 32 x i8 q: value = q d. */
static void run_q8_0(const void *src, size_t n, float *restrict out) {
    const byte *p = src;
    for (; n > 0; n--, p += 34, out += 32) {
        float d = half_at(p);
        for (int j = 0; j < 32; j++) out[j] = (float)(int8_t)p[2 + j] * d;
    }
}

/* f16 d, 16 bytes whose low halves are values 0..15 and high halves values 16..31: value = (q - 8) d. */
static void run_q4_0(const void *src, size_t n, float *restrict out) {
    const byte *p = src;
    for (; n > 0; n--, p += 18, out += 32) {
        float d = half_at(p);
        for (int j = 0; j < 16; j++) out[j] = (float)((p[2 + j] & 15) - 8) * d;
        for (int j = 0; j < 16; j++) out[j + 16] = (float)((p[2 + j] >> 4) - 8) * d;
    }
}

/* f16 d, f16 m, 16 bytes as in Q4_0: value = q d + m. */
static void run_q4_1(const void *src, size_t n, float *restrict out) {
    const byte *p = src;
    for (; n > 0; n--, p += 20, out += 32) {
        float d = half_at(p), m = half_at(p + 2);
        for (int j = 0; j < 16; j++) out[j] = (float)(p[4 + j] & 15) * d + m;
        for (int j = 0; j < 16; j++) out[j + 16] = (float)(p[4 + j] >> 4) * d + m;
    }
}

/* The fifth bits of 32 values, one bit each, and 16 bytes with their low four bits as in Q4_0. */
static inline void five_bits(const byte *p, uint32_t *restrict q) {
    static const uint32_t bit[8] = {1, 2, 4, 8, 16, 32, 64, 128}; /* no vectors of shifts: old processors have none */
    for (int k = 0; k < 4; k++)
        for (int j = 0; j < 8; j++) q[8 * k + j] = (p[k] & bit[j]) == bit[j] ? 16 : 0;
    for (int j = 0; j < 16; j++) q[j] |= p[4 + j] & 15;
    for (int j = 0; j < 16; j++) q[j + 16] |= p[4 + j] >> 4;
}

/* f16 d, five bits a value: value = (q - 16) d. */
static void run_q5_0(const void *src, size_t n, float *restrict out) {
    const byte *p = src;
    uint32_t q[32];
    for (; n > 0; n--, p += 22, out += 32) {
        float d = half_at(p);
        five_bits(p + 2, q);
        for (int j = 0; j < 32; j++) out[j] = (float)((int32_t)q[j] - 16) * d;
    }
}

/* f16 d, f16 m, five bits a value: value = q d + m. */
static void run_q5_1(const void *src, size_t n, float *restrict out) {
    const byte *p = src;
    uint32_t q[32];
    for (; n > 0; n--, p += 24, out += 32) {
        float d = half_at(p), m = half_at(p + 2);
        five_bits(p + 4, q);
        for (int j = 0; j < 32; j++) out[j] = (float)(int32_t)q[j] * d + m;
    }
}

/* 16 bytes as in Q4_0 that number 16 values of a list. */
static void look_up(const byte *p, const float values[16], float d, float *restrict out) {
    for (int j = 0; j < 16; j++) out[j] = values[p[j] & 15] * d;
    for (int j = 0; j < 16; j++) out[j + 16] = values[p[j] >> 4] * d;
}

static const float nonlinear[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

/* f16 d, 16 bytes: value = nonlinear[q] d. */
static void run_iq4_nl(const void *src, size_t n, float *restrict out) {
    const byte *p = src;
    for (; n > 0; n--, p += 18, out += 32) look_up(p + 2, nonlinear, half_at(p), out);
}

/* A power of two e, 16 bytes with E2M1 numbers (OCP Microscaling Formats 1.0): value = number 2^(e - 127). The numbers
 * stand here doubled, and the scale is halved for it, so that all are whole; the halved scale of e 0 and 1 is
 * subnormal. */
static void run_mxfp4(const void *src, size_t n, float *restrict out) {
    static const float doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    const byte *p = src;
    for (; n > 0; n--, p += 17, out += 32) {
        uint32_t e = *p;
        look_up(p + 1, doubled, half_from_bits(e < 2 ? 0x200000u << e : (e - 1) << 23), out);
    }
}

/* ---- blocks of 256: a scale for every 16 or 32 values, in steps of the block's ----------------------------------- */

/* 16 x (scale, offset) of four bits each, 64 bytes of which every 32 hold 128 values, two bits a value and the lowest
 * bits first, f16 d, f16 m: value = q (scale d) - offset m. */
static void run_q2_k(const void *src, size_t n, float *restrict out) {
    const byte *p = src;
    for (; n > 0; n--, p += 84, out += 256) {
        float d = half_at(p + 80), m = half_at(p + 82);
        for (int k = 0; k < 16; k++) {
            const byte *q = p + 16 + k / 8 * 32 + k % 2 * 16;
            int shift = k % 8 / 2 * 2;
            float scale = d * (float)(p[k] & 15), offset = m * (float)(p[k] >> 4);
            for (int j = 0; j < 16; j++) out[16 * k + j] = scale * (float)(q[j] >> shift & 3) - offset;
        }
    }
}

/* 32 bytes of third bits, bit k for values 32k..32k+31; 64 bytes as in Q2_K; 16 scales of six bits: the low four of
 * scales 0..7 and 8..15 in the halves of 8 bytes, the high two of all in 4; f16 d. A third bit that is not set takes 4
 * away: value = (q - 4 or 0) ((scale - 32) d). */
static void run_q3_k(const void *src, size_t n, float *restrict out) {
    const byte *p = src;
    for (; n > 0; n--, p += 110, out += 256) {
        const byte *s = p + 96;
        float d = half_at(p + 108);
        for (int k = 0; k < 16; k++) {
            const byte *q = p + 32 + k / 8 * 32 + k % 2 * 16, *third = p + k % 2 * 16;
            int shift = k % 8 / 2 * 2, steps = (s[k % 8] >> k / 8 * 4 & 15) | (s[8 + k % 4] >> k / 4 * 2 & 3) << 4;
            float scale = d * (float)(steps - 32);
            for (int j = 0; j < 16; j++)
                out[16 * k + j] = scale * (float)((q[j] >> shift & 3) + (third[j] >> k / 2 & 1) * 4 - 4);
        }
    }
}

/* Scale and offset of 32 values, number k of 8, six bits each, in 12 bytes: the first four bytes hold scales 0..3, the
 * next offsets 0..3, the last the low four bits of scales and offsets 4..7, whose high two bits stand above the
 * others. */
static void scale_and_offset(const byte *s, int k, float *scale, float *offset) {
    if (k < 4) {
        *scale = (float)(s[k] & 63);
        *offset = (float)(s[k + 4] & 63);
        return;
    }
    *scale = (float)((s[k + 4] & 15) | s[k - 4] >> 6 << 4);
    *offset = (float)(s[k + 4] >> 4 | s[k] >> 6 << 4);
}

/* f16 d, f16 m, 12 bytes of scales and offsets, 128 bytes of which every 32 hold 64 values, low halves first:
 * value = q (scale d) - offset m. */
static void run_q4_k(const void *src, size_t n, float *restrict out) {
    const byte *p = src;
    for (; n > 0; n--, p += 144, out += 256) {
        float d = half_at(p), m = half_at(p + 2), scale, offset;
        for (int k = 0; k < 8; k++) {
            const byte *q = p + 16 + k / 2 * 32;
            int shift = k % 2 * 4;
            scale_and_offset(p + 4, k, &scale, &offset);
            scale *= d, offset *= m;
            for (int j = 0; j < 32; j++) out[32 * k + j] = scale * (float)(q[j] >> shift & 15) - offset;
        }
    }
}

/* As Q4_K, with 32 bytes of fifth bits before the others, bit k for values 32k..32k+31. */
static void run_q5_k(const void *src, size_t n, float *restrict out) {
    const byte *p = src;
    for (; n > 0; n--, p += 176, out += 256) {
        float d = half_at(p), m = half_at(p + 2), scale, offset;
        for (int k = 0; k < 8; k++) {
            const byte *fifth = p + 16, *q = p + 48 + k / 2 * 32;
            int shift = k % 2 * 4;
            scale_and_offset(p + 4, k, &scale, &offset);
            scale *= d, offset *= m;
            for (int j = 0; j < 32; j++)
                out[32 * k + j] = scale * (float)((q[j] >> shift & 15) + (fifth[j] >> k & 1) * 16) - offset;
        }
    }
}

/* 128 bytes of which every 64 hold the low four bits of 128 values, low halves first; 64 bytes of which every 32 hold
 * the high two, lowest first; 16 x i8 scale; f16 d: value = (q - 32) (scale d). */
static void run_q6_k(const void *src, size_t n, float *restrict out) {
    const byte *p = src;
    for (; n > 0; n--, p += 210, out += 256) {
        float d = half_at(p + 208);
        for (int k = 0; k < 16; k++) {
            const byte *low = p + k / 8 * 64 + k % 4 * 16, *high = p + 128 + k / 8 * 32 + k % 2 * 16;
            int low_shift = k % 8 / 4 * 4, high_shift = k % 8 / 2 * 2;
            float scale = d * (float)(int8_t)p[192 + k];
            for (int j = 0; j < 16; j++)
                out[16 * k + j] = scale * (float)((low[j] >> low_shift & 15) + (high[j] >> high_shift & 3) * 16 - 32);
        }
    }
}

/* f16 d, the high two bits of 8 scales in two bytes and the low four in four, 128 bytes as in IQ4_NL:
 * value = nonlinear[q] ((scale - 32) d). */
static void run_iq4_xs(const void *src, size_t n, float *restrict out) {
    const byte *p = src;
    for (; n > 0; n--, p += 136, out += 256) {
        float d = half_at(p);
        for (int k = 0; k < 8; k++) {
            int steps = (p[4 + k / 2] >> k % 2 * 4 & 15) | (p[2 + k / 4] >> k % 4 * 2 & 3) << 4;
            look_up(p + 8 + 16 * k, nonlinear, d * (float)(steps - 32), out + 32 * k);
        }
    }
}

/* 4, 5, 31..33 and 36..38 were withdrawn from ggml. */
static const dequant_type types[] = {
    {0, "F32", 1, 4, run_f32},        {1, "F16", 1, 2, run_f16},        {2, "Q4_0", 32, 18, run_q4_0},
    {3, "Q4_1", 32, 20, run_q4_1},    {4, "Q4_2", 16, 10, NULL},        {5, "Q4_3", 16, 12, NULL},
    {6, "Q5_0", 32, 22, run_q5_0},    {7, "Q5_1", 32, 24, run_q5_1},    {8, "Q8_0", 32, 34, run_q8_0},
    {9, "Q8_1", 32, 40, NULL},        {10, "Q2_K", 256, 84, run_q2_k},  {11, "Q3_K", 256, 110, run_q3_k},
    {12, "Q4_K", 256, 144, run_q4_k}, {13, "Q5_K", 256, 176, run_q5_k}, {14, "Q6_K", 256, 210, run_q6_k},
    {15, "Q8_K", 256, 292, NULL},     {16, "IQ2_XXS", 256, 66, NULL},   {17, "IQ2_XS", 256, 74, NULL},
    {18, "IQ3_XXS", 256, 98, NULL},   {19, "IQ1_S", 256, 50, NULL},     {20, "IQ4_NL", 32, 18, run_iq4_nl},
    {21, "IQ3_S", 256, 110, NULL},    {22, "IQ2_S", 256, 82, NULL},     {23, "IQ4_XS", 256, 136, run_iq4_xs},
    {24, "I8", 1, 1, NULL},           {25, "I16", 1, 2, NULL},          {26, "I32", 1, 4, NULL},
    {27, "I64", 1, 8, NULL},          {28, "F64", 1, 8, NULL},          {29, "IQ1_M", 256, 56, NULL},
    {30, "BF16", 1, 2, run_bf16},     {31, "Q4_0_4_4", 32, 18, NULL},   {32, "Q4_0_4_8", 32, 18, NULL},
    {33, "Q4_0_8_8", 32, 18, NULL},   {34, "TQ1_0", 256, 54, NULL},     {35, "TQ2_0", 256, 66, NULL},
    {36, "IQ4_NL_4_4", 32, 18, NULL}, {37, "IQ4_NL_4_8", 32, 18, NULL}, {38, "IQ4_NL_8_8", 32, 18, NULL},
    {39, "MXFP4", 32, 17, run_mxfp4}, {40, "NVFP4", 64, 36, NULL},      {41, "Q1_0", 128, 18, NULL},
};
enum { N_TYPES = sizeof types / sizeof *types };

const dequant_type *dequant_find(uint32_t number) {
    for (size_t i = 0; i < N_TYPES; i++)
        if (types[i].number == number) return &types[i];
    return NULL;
}

const char *dequant_supported(char *out, size_t size) {
    size_t at = 0;
    out[0] = 0;
    for (size_t i = 0; i < N_TYPES && at < size; i++)
        if (types[i].run) at += (size_t)snprintf(out + at, size - at, "%s%s", at ? ", " : "", types[i].name);
    return out;
}
