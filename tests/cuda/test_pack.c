/* Packed tiles against the writer's own steps: conversion and shuffle of traces/kernels.h. */
#include "tests/cuda/arrays.h"
#include "tracer/cuda/kernels.h"
#include "traces/trace.h"

#include <string.h>

static const struct {
    size_t T;
    int dim;
} sizes[] = {{1, 64}, {31, 5}, {33, 80}, {255, 6}, {256, 32}, {257, 64}, {600, 128}, {300, 256}, {70, 3}};
enum { N_SIZES = sizeof sizes / sizeof *sizes };

static head_shape shape_of(int i) {
    head_shape s = {.T = sizes[i].T, .n_head = 3, .n_kv_head = 1, .head_dim = sizes[i].dim};
    s.ld = kernel_pad((size_t)(s.n_head + 2 * s.n_kv_head) * (size_t)s.head_dim) + 16;
    return s;
}

static size_t height_of(const head_shape *s) {
    return s->T < TRACE_TILE ? s->T : TRACE_TILE;
}

static size_t tile_bytes(const head_shape *s) {
    return 2 * height_of(s) * (size_t)s->head_dim;
}

static size_t tiles_of(const head_shape *s) {
    return (s->T + height_of(s) - 1) / height_of(s);
}

/* The tile that starts at row0 of values [T][dim], as the writer lays it out before compression. */
static void expect_tile(const uint8_t *got, const head_shape *s, const float *values, size_t row0, const char *what) {
    size_t dim = (size_t)s->head_dim, height = height_of(s), rows = s->T - row0 < height ? s->T - row0 : height;
    half *tile = mem_new(height * dim, sizeof *tile, "test");
    uint8_t *want = mem_new(tile_bytes(s), 1, "test");
    kernels()->f32_to_f16(values + row0 * dim, tile, rows * dim);
    kernels()->shuffle2(tile, want, height * dim);
    for (size_t i = 0; i < tile_bytes(s); i++) expect_bits(got[i], want[i], what, row0, i);
    mem_free(tile), mem_free(want);
}

static float *head_values(const float *rows, const head_shape *s, size_t ld, int head) {
    size_t dim = (size_t)s->head_dim;
    float *values = mem_new(s->T * dim, sizeof *values, "test");
    assert_non_null(values);
    for (size_t t = 0; t < s->T; t++)
        memcpy(values + t * dim, rows + t * ld + (size_t)head * dim, dim * sizeof *values);
    return values;
}

static void check_heads(device *d, head_shape s, int head0, int n, size_t off) {
    size_t width = (size_t)(s.n_head + 2 * s.n_kv_head) * (size_t)s.head_dim + off, tiles = tiles_of(&s);
    float *qkv = array_rows(21, s.T, width, s.ld);
    uint8_t *out = array_nan((size_t)n * tiles * tile_bytes(&s) + 16, 1);
    assert_int_equal(k_pack_heads(d, &s, qkv + off, head0, n, out), 0);
    for (int h = 0; h < n; h++) {
        float *values = head_values(qkv + off, &s, s.ld, head0 + h);
        for (size_t tile = 0; tile < tiles; tile++)
            expect_tile(out + ((size_t)h * tiles + tile) * tile_bytes(&s), &s, values, tile * height_of(&s), "head");
        mem_free(values);
    }
    expect_untouched(out, 1, 1, (size_t)n * tiles * tile_bytes(&s), (size_t)n * tiles * tile_bytes(&s) + 16);
    mem_free(qkv), mem_free(out);
}

static void heads_are_the_writers_tiles(void **state) {
    for (int i = 0; i < N_SIZES; i++) {
        head_shape s = shape_of(i);
        check_heads(*state, s, 0, 3, 0);
        check_heads(*state, s, 3, 2, 0);
        check_heads(*state, s, 1, 1, 1);
        assert_int_equal(k_pack_heads(*state, &s, NULL, 0, 0, NULL), 0);
    }
}

/* 65519 rounds to the largest f16, 65520 does not fit; 1 is 3c00, -2 is c000. */
static void heads_by_hand(void **state) {
    head_shape s = {.T = 1, .n_head = 1, .n_kv_head = 1, .head_dim = 4, .ld = 16};
    float qkv[16] = {65519, 65520, 1, -2};
    static const uint8_t want[8] = {0xff, 0x00, 0x00, 0x00, 0x7b, 0x7c, 0x3c, 0xc0};
    uint8_t out[8];
    assert_int_equal(k_pack_heads(*state, &s, qkv, 0, 1, out), 0);
    assert_memory_equal(out, want, 8);
}

/* Some rows of head 0 become extreme: zero, subnormal, one value as large as f32 knows. */
static void make_extreme(float *d_o, const head_shape *s, size_t ld) {
    size_t dim = (size_t)s->head_dim;
    if (s->T < 4) return;
    for (size_t i = 0; i < dim; i++) {
        d_o[i] = i % 2 ? -0.0f : 0.0f;
        d_o[ld + i] *= 1e-42f;
        d_o[2 * ld + i] *= 1e-20f;
    }
    d_o[(s->T - 1) * ld + dim - 1] = -3.4e38f;
}

static void check_gradients(device *d, head_shape s, size_t off) {
    size_t dim = (size_t)s.head_dim, ld = kernel_pad((size_t)s.n_head * dim + off), tiles = tiles_of(&s);
    float *d_o = array_rows(22, s.T, (size_t)s.n_head * dim + off, ld), *scale;
    make_extreme(d_o + off, &s, ld);
    uint8_t *out = array_nan((size_t)s.n_head * tiles * tile_bytes(&s), 1);
    scale = array_nan((size_t)s.n_head * s.T, sizeof *scale);
    assert_int_equal(k_pack_gradients(d, &s, d_o + off, ld, out, scale), 0);
    for (int h = 0; h < s.n_head; h++) {
        float *values = head_values(d_o + off, &s, ld, h);
        for (size_t t = 0; t < s.T; t++) {
            float most = 0;
            for (size_t i = 0; i < dim; i++) most = fmaxf(most, fabsf(values[t * dim + i]));
            for (size_t i = 0; i < dim; i++) values[t * dim + i] = most > 0 ? values[t * dim + i] / most : 0;
            expect_bits(half_bits_of(scale[(size_t)h * s.T + t]), half_bits_of(most), "scale", t, (size_t)h);
        }
        for (size_t tile = 0; tile < tiles; tile++)
            expect_tile(out + ((size_t)h * tiles + tile) * tile_bytes(&s), &s, values, tile * height_of(&s), "grad");
        mem_free(values);
    }
    mem_free(d_o), mem_free(out), mem_free(scale);
}

static void gradients_are_the_writers_tiles(void **state) {
    for (int i = 0; i < N_SIZES; i++)
        for (size_t off = 0; off < 2; off++) check_gradients(*state, shape_of(i), off);
}

static void what_is_not_finite_shows_in_the_scale(void **state) {
    head_shape s = {.T = 3, .n_head = 1, .n_kv_head = 1, .head_dim = 64};
    float *d_o = array_rows(23, 3, 64, 64), scale[3];
    uint8_t out[2 * 3 * 64];
    d_o[40] = NAN;
    d_o[64 + 63] = -INFINITY;
    assert_int_equal(k_pack_gradients(*state, &s, d_o, 64, out, scale), 0);
    assert_false(isfinite(scale[0]));
    assert_false(isfinite(scale[1]));
    assert_true(isfinite(scale[2]));
    mem_free(d_o);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(heads_are_the_writers_tiles),
        cmocka_unit_test(heads_by_hand),
        cmocka_unit_test(gradients_are_the_writers_tiles),
        cmocka_unit_test(what_is_not_finite_shows_in_the_scale),
    };
    return cmocka_run_group_tests(tests, open_device, close_device);
}
