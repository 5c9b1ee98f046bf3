/* Row kernels against the CPU backend's row functions. */
#include "tests/cuda/arrays.h"
#include "tracer/cpu/rows.h"
#include "tracer/cuda/kernels.h"

#include <string.h>

static const size_t sizes[] = {1, 3, 31, 33, 64, 257, 576, 5000};
enum { N_SIZES = sizeof sizes / sizeof *sizes };
static const float eps = 1e-5f;

/* ---- norm ------------------------------------------------------------------------------------------------------- */

static void check_norm(device *d, size_t rows, size_t n) {
    size_t ld = kernel_pad(n) + 16;
    float *x = array_rows(1, rows, n, ld), *weight = array_rows(2, 1, n, kernel_pad(n));
    float *out = array_nan(rows * ld, sizeof *out), *want = mem_new(kernel_pad(n), sizeof *want, "test");
    uint16_t *rounded = array_nan(rows * ld, sizeof *rounded);
    assert_int_equal(k_norm(d, x, ld, weight, rows, n, eps, DTYPE_F32, out, ld), 0);
    assert_int_equal(k_norm(d, x, ld, weight, rows, n, eps, DTYPE_BF16, rounded, ld), 0);
    float *padded_weight = array_padded(weight, n);
    for (size_t r = 0; r < rows; r++) {
        float *padded = array_padded(x + r * ld, n);
        rows_norm(ARCH_NORM_RMS, padded, padded_weight, NULL, n, eps, want);
        for (size_t i = 0; i < n; i++) {
            expect_near(out[r * ld + i], want[i], 0, 1e-6, "norm", r, i);
            expect_bits(rounded[r * ld + i], slow_bf16(out[r * ld + i]), "norm to bf16", r, i);
        }
        mem_free(padded);
    }
    expect_untouched(out, sizeof *out, rows, n, ld);
    expect_untouched(rounded, sizeof *rounded, rows, n, ld);
    mem_free(x), mem_free(weight), mem_free(out), mem_free(want), mem_free(rounded), mem_free(padded_weight);
}

static void norm_is_the_cpu_backends(void **state) {
    for (int i = 0; i < N_SIZES; i++) check_norm(*state, 1 + (size_t)i % 3, sizes[i]);
    assert_int_equal(k_norm(*state, NULL, 16, NULL, 0, 4, eps, DTYPE_F32, NULL, 16), 0);
}

/* The root mean square of 3, 4 and two zeros is 2.5. */
static void norm_by_hand(void **state) {
    float x[16] = {3, 4, 0, 0}, weight[16] = {1, 10, 1, 1}, out[16];
    assert_int_equal(k_norm(*state, x, 16, weight, 1, 4, 0, DTYPE_F32, out, 16), 0);
    expect_near(out[0], 1.2, 0, 1e-7, "norm", 0, 0);
    expect_near(out[1], 16, 0, 1e-7, "norm", 0, 1);
    assert_true(out[2] == 0 && out[3] == 0);
}

/* `rows` gradient rows over T rows of x; the last set may be short. */
static void check_norm_back(device *d, size_t T, size_t rows, size_t n) {
    size_t ld = kernel_pad(n) + 16;
    float *x = array_rows(3, T, n, ld), *weight = array_rows(4, 1, n, kernel_pad(n));
    float *d_out = array_rows(5, rows, n, ld), *d_x = array_rows(6, rows, n, ld), *before = array_rows(6, rows, n, ld);
    assert_int_equal(k_norm_back(d, x, T, weight, rows, n, eps, d_out, d_x, ld), 0);
    float *padded_weight = array_padded(weight, n);
    for (size_t r = 0; r < rows; r++) {
        float *px = array_padded(x + r % T * ld, n), *pd = array_padded(d_out + r * ld, n);
        float *want = array_padded(before + r * ld, n);
        rows_norm_back(ARCH_NORM_RMS, px, padded_weight, n, eps, pd, want);
        for (size_t i = 0; i < n; i++) expect_near(d_x[r * ld + i], want[i], 1, 3e-6, "norm back", r, i);
        mem_free(px), mem_free(pd), mem_free(want);
    }
    expect_untouched(d_x, sizeof *d_x, rows, n, ld);
    mem_free(x), mem_free(weight), mem_free(d_out), mem_free(d_x), mem_free(before), mem_free(padded_weight);
}

static void norm_back_is_the_cpu_backends(void **state) {
    static const size_t T[] = {1, 3, 5}, rows[] = {1, 9, 12};
    for (int i = 0; i < N_SIZES; i++) check_norm_back(*state, T[i % 3], rows[i % 3], sizes[i]);
    check_norm_back(*state, 5, 3, 33);
}

/* ---- heads ------------------------------------------------------------------------------------------------------ */

static const head_shape shapes[] = {
    {.T = 1, .n_head = 1, .n_kv_head = 1, .head_dim = 32, .rope_dims = 32, .rope = ARCH_ROPE_INTERLEAVED},
    {.T = 5, .n_head = 9, .n_kv_head = 3, .head_dim = 64, .rope_dims = 64, .rope = ARCH_ROPE_INTERLEAVED},
    {.T = 5, .n_head = 8, .n_kv_head = 1, .head_dim = 80, .rope_dims = 80, .rope = ARCH_ROPE_HALVES},
    {.T = 3, .n_head = 3, .n_kv_head = 1, .head_dim = 96, .rope_dims = 24, .rope = ARCH_ROPE_HALVES},
    {.T = 3, .n_head = 3, .n_kv_head = 1, .head_dim = 96, .rope_dims = 24, .rope = ARCH_ROPE_INTERLEAVED},
    {.T = 2, .n_head = 2, .n_kv_head = 2, .head_dim = 128, .rope_dims = 128, .rope = ARCH_ROPE_HALVES},
    {.T = 2, .n_head = 2, .n_kv_head = 2, .head_dim = 256, .rope_dims = 20, .rope = ARCH_ROPE_HALVES},
    {.T = 2, .n_head = 3, .n_kv_head = 1, .head_dim = 20, .rope_dims = 8, .rope = ARCH_ROPE_HALVES},
    {.T = 2, .n_head = 3, .n_kv_head = 1, .head_dim = 18, .rope_dims = 8, .rope = ARCH_ROPE_INTERLEAVED},
    {.T = 7, .n_head = 2, .n_kv_head = 1, .head_dim = 6, .rope_dims = 6, .rope = ARCH_ROPE_INTERLEAVED},
    {.T = 7, .n_head = 2, .n_kv_head = 1, .head_dim = 5, .rope_dims = 4, .rope = ARCH_ROPE_HALVES},
    {.T = 7, .n_head = 2, .n_kv_head = 1, .head_dim = 5, .rope_dims = 2, .rope = ARCH_ROPE_INTERLEAVED},
};
enum { N_SHAPES = sizeof shapes / sizeof *shapes };

static size_t width_of(const head_shape *s) {
    return (size_t)(s->n_head + 2 * s->n_kv_head) * (size_t)s->head_dim;
}

static float *angles_of(const head_shape *s) {
    size_t dims = (size_t)s->rope_dims;
    float *angles = mem_new(s->T * dims, sizeof *angles, "test");
    assert_non_null(angles);
    double inverse[128];
    for (size_t i = 0; i < dims / 2; i++) inverse[i] = pow(10000, -2.0 * (double)i / (double)dims);
    for (size_t t = 0; t < s->T; t++) rows_rope_angles((int32_t)t + 1, s->rope_dims, inverse, 1, angles + t * dims);
    return angles;
}

/* `off` floats off alignment. */
static void check_finish(device *d, head_shape s, bool with_bias, size_t off) {
    size_t n = width_of(&s), dims = (size_t)s.rope_dims;
    s.ld = kernel_pad(n + off) + 16;
    float *got = array_rows(7, s.T, n + off, s.ld), *want = array_rows(7, s.T, n + off, s.ld);
    float *bias = array_rows(8, 1, n + off, n + off), *angles = angles_of(&s);
    assert_int_equal(k_heads_finish(d, &s, with_bias ? bias + off : NULL, angles, got + off), 0);
    for (size_t t = 0; t < s.T; t++) {
        float *row = want + t * s.ld + off;
        for (size_t i = 0; with_bias && i < n; i++) row[i] += bias[off + i];
        rows_rope(row, s.n_head + s.n_kv_head, s.head_dim, s.rope_dims, s.rope, angles + t * dims);
        for (size_t i = 0; i < n; i++) expect_near(got[t * s.ld + off + i], row[i], 1, 1e-6, "finish", t, i);
    }
    expect_untouched(got, sizeof *got, s.T, n + off, s.ld);
    mem_free(got), mem_free(want), mem_free(bias), mem_free(angles);
}

static void heads_finish_is_the_cpu_backends(void **state) {
    for (int i = 0; i < N_SHAPES; i++)
        for (int with_bias = 0; with_bias < 2; with_bias++)
            for (size_t off = 0; off < 2; off++) check_finish(*state, shapes[i], with_bias, off);
}

static void check_back(device *d, head_shape s, size_t rows) {
    size_t n = width_of(&s), dims = (size_t)s.rope_dims;
    s.ld = kernel_pad(n);
    float *got = array_rows(9, rows, n, s.ld), *want = array_rows(9, rows, n, s.ld), *angles = angles_of(&s);
    assert_int_equal(k_heads_back(d, &s, angles, rows, got), 0);
    for (size_t r = 0; r < rows; r++) {
        float *row = want + r * s.ld;
        rows_rope_back(row, s.n_head + s.n_kv_head, s.head_dim, s.rope_dims, s.rope, angles + r % s.T * dims);
        for (size_t i = 0; i < n; i++) expect_near(got[r * s.ld + i], row[i], 1, 1e-6, "back", r, i);
    }
    expect_untouched(got, sizeof *got, rows, n, s.ld);
    mem_free(got), mem_free(want), mem_free(angles);
}

static void heads_back_is_the_cpu_backends(void **state) {
    for (int i = 0; i < N_SHAPES; i++) {
        check_back(*state, shapes[i], 3 * shapes[i].T);
        check_back(*state, shapes[i], 2 * shapes[i].T + 1);
    }
}

/* ---- gate ------------------------------------------------------------------------------------------------------- */

/* gate and up in one row, side by side, so that up is not aligned where n is odd. Some gates are extreme. */
static float *gates_and_ups(size_t rows, size_t n, size_t ld) {
    float *both = array_rows(10, rows, 2 * n, ld);
    static const float extreme[] = {0.0f, -0.0f, 100.0f, -100.0f, 3e38f, -3e38f, -87.5f, 1e-30f};
    for (size_t i = 0; i < n && i < 8; i++) both[(rows - 1) * ld + n - 1 - i] = extreme[i];
    return both;
}

static void check_gate(device *d, size_t rows, size_t n) {
    size_t ld = kernel_pad(2 * n), ld_out = kernel_pad(n) + 16;
    float *both = gates_and_ups(rows, n, ld), *out = array_nan(rows * ld_out, sizeof *out);
    uint16_t *rounded = array_nan(rows * ld_out, sizeof *rounded);
    assert_int_equal(k_gate(d, both, both + n, ld, rows, n, DTYPE_F32, out, ld_out), 0);
    assert_int_equal(k_gate(d, both, both + n, ld, rows, n, DTYPE_BF16, rounded, ld_out), 0);
    for (size_t r = 0; r < rows; r++) {
        float *gate = array_padded(both + r * ld, n), *want = array_padded(both + r * ld + n, n);
        rows_gate(ARCH_SILU, gate, want, n);
        for (size_t i = 0; i < n; i++) {
            expect_near(out[r * ld_out + i], want[i], 1e-20, 1e-6, "gate", r, i);
            expect_bits(rounded[r * ld_out + i], slow_bf16(out[r * ld_out + i]), "gate to bf16", r, i);
        }
        mem_free(gate), mem_free(want);
    }
    expect_untouched(out, sizeof *out, rows, n, ld_out);
    expect_untouched(rounded, sizeof *rounded, rows, n, ld_out);
    mem_free(both), mem_free(out), mem_free(rounded);
}

static void gate_is_the_cpu_backends(void **state) {
    for (int i = 0; i < N_SIZES; i++) check_gate(*state, 1 + (size_t)i % 3, sizes[i]);
}

/* Each with d_up, d_gate or neither in d_out's place; bf16 is the f32 result, rounded. */
enum in_place { UP, GATE, NEITHER, N_PLACES };
static void check_gate_back(device *d, size_t T, size_t rows, size_t n, enum in_place place) {
    size_t ld = kernel_pad(2 * n) + 16, all = rows * ld;
    float *both = gates_and_ups(T, n, ld), *d_out = array_rows(11, rows, n, ld), *given = array_rows(11, rows, n, ld);
    float *d_up = place == UP ? d_out : array_nan(all, sizeof *d_up);
    float *d_gate = place == GATE ? d_out : array_nan(all, sizeof *d_gate);
    uint16_t *up16 = array_nan(all, sizeof *up16), *gate16 = array_nan(all, sizeof *gate16);
    assert_int_equal(k_gate_back(d, both, both + n, ld, T, rows, n, given, DTYPE_BF16, gate16, up16, ld), 0);
    assert_int_equal(k_gate_back(d, both, both + n, ld, T, rows, n, d_out, DTYPE_F32, d_gate, d_up, ld), 0);
    for (size_t r = 0; r < rows; r++) {
        float *gate = array_padded(both + r % T * ld, n), *up = array_padded(both + r % T * ld + n, n);
        float *want_up = array_padded(given + r * ld, n), *want_gate = array_padded(given + r * ld, n);
        rows_gate_slopes(ARCH_SILU, gate, up, n);
        rows_gate_back(gate, up, want_up, want_gate, n);
        for (size_t i = 0; i < n; i++) {
            expect_near(d_up[r * ld + i], want_up[i], 1e-20, 1e-6, "d_up", r, i);
            /* The slope is a sum that crosses zero near -1.28: its terms, up to 1, set the error. */
            double size = fabs((double)given[r * ld + i] * both[r % T * ld + n + i]);
            expect_near(d_gate[r * ld + i], want_gate[i], size, 3e-7, "d_gate", r, i);
            expect_bits(up16[r * ld + i], slow_bf16(d_up[r * ld + i]), "d_up to bf16", r, i);
            expect_bits(gate16[r * ld + i], slow_bf16(d_gate[r * ld + i]), "d_gate to bf16", r, i);
        }
        mem_free(gate), mem_free(up), mem_free(want_up), mem_free(want_gate);
    }
    expect_untouched(d_up, sizeof *d_up, rows, n, ld);
    expect_untouched(d_gate, sizeof *d_gate, rows, n, ld);
    if (place != UP) mem_free(d_up);
    if (place != GATE) mem_free(d_gate);
    mem_free(both), mem_free(d_out), mem_free(given), mem_free(up16), mem_free(gate16);
}

static void gate_back_is_the_cpu_backends(void **state) {
    for (int i = 0; i < N_SIZES; i++) check_gate_back(*state, 3, 9, sizes[i], (enum in_place)(i % N_PLACES));
    check_gate_back(*state, 1, 4, 33, NEITHER);
    check_gate_back(*state, 5, 7, 33, GATE);
}

/* ---- conversion ------------------------------------------------------------------------------------------------- */

static void cast_by_hand(void **state) {
    static const struct {
        uint32_t f32;
        uint16_t bf16;
    } cases[] = {
        {0x3f800000, 0x3f80}, {0x3f807fff, 0x3f80}, {0x3f808000, 0x3f80}, {0x3f808001, 0x3f81},
        {0x3f818000, 0x3f82}, {0x3fffffff, 0x4000}, {0x7f7fffff, 0x7f80}, {0xff7f7fff, 0xff7f},
        {0x7f800000, 0x7f80}, {0xff800000, 0xff80}, {0x7f800001, 0x7fc0}, {0xffffffff, 0xffff},
        {0x00000001, 0x0000}, {0x00008001, 0x0001}, {0x80000000, 0x8000}, {0x807f8000, 0x8080},
    };
    float in[16];
    uint16_t out[16];
    for (size_t i = 0; i < 16; i++) in[i] = half_from_bits(cases[i].f32);
    assert_int_equal(k_cast(*state, in, 16, 1, 16, out, 16), 0);
    for (size_t i = 0; i < 16; i++) {
        expect_bits(out[i], cases[i].bf16, "cast", 0, i);
        expect_bits(slow_bf16(in[i]), cases[i].bf16, "the test's own rounding", 0, i);
    }
}

static void cast_rows_of_all_sizes(void **state) {
    for (int s = 0; s < N_SIZES; s++) {
        size_t n = sizes[s], ld = kernel_pad(n), ld_out = ld + 3, rows = 3;
        float *in = array_rows(12, rows, n, ld);
        uint16_t *out = array_nan(rows * ld_out, sizeof *out);
        assert_int_equal(k_cast(*state, in, ld, rows, n, out, ld_out), 0);
        for (size_t r = 0; r < rows; r++)
            for (size_t i = 0; i < n; i++) expect_bits(out[r * ld_out + i], slow_bf16(in[r * ld + i]), "cast", r, i);
        expect_untouched(out, sizeof *out, rows, n, ld_out);
        mem_free(in), mem_free(out);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(norm_is_the_cpu_backends),       cmocka_unit_test(norm_by_hand),
        cmocka_unit_test(norm_back_is_the_cpu_backends),  cmocka_unit_test(heads_finish_is_the_cpu_backends),
        cmocka_unit_test(heads_back_is_the_cpu_backends), cmocka_unit_test(gate_is_the_cpu_backends),
        cmocka_unit_test(gate_back_is_the_cpu_backends),  cmocka_unit_test(cast_by_hand),
        cmocka_unit_test(cast_rows_of_all_sizes),
    };
    return cmocka_run_group_tests(tests, open_device, close_device);
}
