#include "tracer/dequant.h"
#include "base/half.h"

#include <stdio.h>
#include <string.h>

typedef unsigned char byte;

static float half_at(const byte *p) {
    half h;
    memcpy(&h, p, sizeof h);
    return half_to_f32(h);
}

static void run_f32(const void *src, size_t n, float *out) {
    memcpy(out, src, n * sizeof *out);
}

static void run_f16(const void *src, size_t n, float *out) {
    const byte *p = src;
    for (size_t i = 0; i < n; i++) out[i] = half_at(p + 2 * i);
}

static void run_bf16(const void *src, size_t n, float *out) {
    const byte *p = src;
    for (size_t i = 0; i < n; i++) {
        uint16_t b;
        memcpy(&b, p + 2 * i, sizeof b);
        out[i] = bf16_to_f32(b);
    }
}

/* f16 d, 32 x i8 q: value = q d. */
static void run_q8_0(const void *src, size_t n, float *out) {
    const byte *p = src;
    for (; n > 0; n--, p += 34, out += 32) {
        float d = half_at(p);
        for (int j = 0; j < 32; j++) out[j] = (float)(int8_t)p[2 + j] * d;
    }
}

/* f16 d, 16 bytes whose low halves are values 0..15 and high halves values 16..31: value = (q - 8) d. */
static void run_q4_0(const void *src, size_t n, float *out) {
    const byte *p = src;
    for (; n > 0; n--, p += 18, out += 32) {
        float d = half_at(p);
        for (int j = 0; j < 16; j++) {
            out[j] = (float)((p[2 + j] & 15) - 8) * d;
            out[j + 16] = (float)((p[2 + j] >> 4) - 8) * d;
        }
    }
}

/* f16 d, f16 m, 16 bytes as in Q4_0: value = q d + m. */
static void run_q4_1(const void *src, size_t n, float *out) {
    const byte *p = src;
    for (; n > 0; n--, p += 20, out += 32) {
        float d = half_at(p), m = half_at(p + 2);
        for (int j = 0; j < 16; j++) {
            out[j] = (float)(p[4 + j] & 15) * d + m;
            out[j + 16] = (float)(p[4 + j] >> 4) * d + m;
        }
    }
}

/* 4, 5, 31..33 and 36..38 were withdrawn from ggml. */
static const dequant_type types[] = {
    {0, "F32", 1, 4, run_f32},        {1, "F16", 1, 2, run_f16},        {2, "Q4_0", 32, 18, run_q4_0},
    {3, "Q4_1", 32, 20, run_q4_1},    {4, "Q4_2", 16, 10, NULL},        {5, "Q4_3", 16, 12, NULL},
    {6, "Q5_0", 32, 22, NULL},        {7, "Q5_1", 32, 24, NULL},        {8, "Q8_0", 32, 34, run_q8_0},
    {9, "Q8_1", 32, 40, NULL},        {10, "Q2_K", 256, 84, NULL},      {11, "Q3_K", 256, 110, NULL},
    {12, "Q4_K", 256, 144, NULL},     {13, "Q5_K", 256, 176, NULL},     {14, "Q6_K", 256, 210, NULL},
    {15, "Q8_K", 256, 292, NULL},     {16, "IQ2_XXS", 256, 66, NULL},   {17, "IQ2_XS", 256, 74, NULL},
    {18, "IQ3_XXS", 256, 98, NULL},   {19, "IQ1_S", 256, 50, NULL},     {20, "IQ4_NL", 32, 18, NULL},
    {21, "IQ3_S", 256, 110, NULL},    {22, "IQ2_S", 256, 82, NULL},     {23, "IQ4_XS", 256, 136, NULL},
    {24, "I8", 1, 1, NULL},           {25, "I16", 1, 2, NULL},          {26, "I32", 1, 4, NULL},
    {27, "I64", 1, 8, NULL},          {28, "F64", 1, 8, NULL},          {29, "IQ1_M", 256, 56, NULL},
    {30, "BF16", 1, 2, run_bf16},     {31, "Q4_0_4_4", 32, 18, NULL},   {32, "Q4_0_4_8", 32, 18, NULL},
    {33, "Q4_0_8_8", 32, 18, NULL},   {34, "TQ1_0", 256, 54, NULL},     {35, "TQ2_0", 256, 66, NULL},
    {36, "IQ4_NL_4_4", 32, 18, NULL}, {37, "IQ4_NL_4_8", 32, 18, NULL}, {38, "IQ4_NL_8_8", 32, 18, NULL},
    {39, "MXFP4", 32, 17, NULL},      {40, "NVFP4", 64, 36, NULL},      {41, "Q1_0", 128, 18, NULL},
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
