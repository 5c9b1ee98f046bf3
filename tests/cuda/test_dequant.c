/* Dequantisation on the device, bit by bit against tracer/dequant.c, on random bytes. */
#include "base/err.h"
#include "tests/cuda/arrays.h"
#include "tracer/cuda/kernels.h"
#include "tracer/dequant.h"

#include <string.h>

enum { F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q8_0 = 8, BF16 = 30, TYPES_END = 64 };

/* Random bytes hold every sign, exponent, subnormal and NaN. */
static uint8_t *random_bytes(uint32_t seed, size_t n) {
    uint8_t *p = mem_new(n, 1, "test");
    assert_non_null(p);
    for (size_t i = 0; i < n; i++) p[i] = (uint8_t)(rng_philox(seed, (uint32_t)(i / 4), 0, 0, 0).v[0] >> 8 * (i % 4));
    return p;
}

/* A NaN is a NaN, whatever its payload. */
static void expect_same(float got, float want, size_t row, size_t i) {
    if (!(isnan(got) && isnan(want))) expect_bits(half_bits_of(got), half_bits_of(want), "dequantised", row, i);
}

typedef struct tensor {
    const dequant_type *type;
    uint8_t *bytes;
    const uint8_t *blocks;
    size_t rows, n, row_bytes;
} tensor;

/* `off` bytes off alignment, `gap` bytes between rows; the last row ends where the memory ends. */
static tensor tensor_new(uint32_t ggml_type, size_t rows, size_t n, size_t off, size_t gap) {
    tensor t = {.type = dequant_find(ggml_type), .rows = rows, .n = n};
    size_t row = n / t.type->block * t.type->block_bytes;
    t.row_bytes = row + gap;
    t.bytes = random_bytes(ggml_type, off + rows * t.row_bytes - gap);
    t.blocks = t.bytes + off;
    return t;
}

static void check_tensor(device *d, const tensor *t, const int32_t *ids, size_t n_ids, size_t ld) {
    size_t rows = ids ? n_ids : t->rows;
    float *out = array_nan(rows * ld, sizeof *out), *want = mem_new(t->n, sizeof *want, "test");
    uint16_t *rounded = array_nan(rows * ld, sizeof *rounded);
    uint32_t type = t->type->number;
    assert_int_equal(k_dequant(d, type, t->blocks, t->row_bytes, ids, rows, t->n, DTYPE_F32, out, ld), 0);
    assert_int_equal(k_dequant(d, type, t->blocks, t->row_bytes, ids, rows, t->n, DTYPE_BF16, rounded, ld), 0);
    for (size_t r = 0; r < rows; r++) {
        size_t from = ids ? (size_t)ids[r] : r;
        memset(want, 0, t->n * sizeof *want); /* what a negative id gives */
        if (!ids || ids[r] >= 0) t->type->run(t->blocks + from * t->row_bytes, t->n / t->type->block, want);
        for (size_t i = 0; i < t->n; i++) {
            expect_same(out[r * ld + i], want[i], r, i);
            expect_same(bf16_to_f32(rounded[r * ld + i]), bf16_to_f32(slow_bf16(want[i])), r, i);
        }
    }
    expect_untouched(out, sizeof *out, rows, t->n, ld);
    expect_untouched(rounded, sizeof *rounded, rows, t->n, ld);
    mem_free(out), mem_free(want), mem_free(rounded);
}

static void every_type_has_the_cpus_bits(void **state) {
    static const uint32_t plain[] = {F32, F16, BF16}, blocked[] = {Q4_0, Q4_1, Q8_0};
    static const size_t plain_n[] = {1, 3, 31, 33, 257, 2048}, blocked_n[] = {32, 64, 96, 576, 2080, 320};
    for (int i = 0; i < 3; i++)
        for (size_t s = 0; s < 6; s++)
            for (size_t off = 0; off < 4; off++) {
                tensor a = tensor_new(plain[i], 3, plain_n[s], off, 0);
                tensor b = tensor_new(blocked[i], 3, blocked_n[s], off, s % 2);
                check_tensor(*state, &a, NULL, 0, kernel_pad(a.n));
                check_tensor(*state, &b, NULL, 0, kernel_pad(b.n) + off);
                mem_free(a.bytes), mem_free(b.bytes);
            }
}

static void ids_choose_rows(void **state) {
    static const int32_t ids[] = {4, 0, -1, 4, 2};
    static const uint32_t all[] = {F32, F16, BF16, Q4_0, Q4_1, Q8_0};
    for (int i = 0; i < 6; i++) {
        tensor t = tensor_new(all[i], 5, 96, 1, 0);
        check_tensor(*state, &t, ids, 5, 112);
        assert_int_equal(k_dequant(*state, all[i], t.blocks, t.row_bytes, ids, 0, 96, DTYPE_F32, NULL, 112), 0);
        mem_free(t.bytes);
    }
}

/* d = 0.5, m = -2; byte 1 holds 3 (value 1) and 15 (value 17). */
static void a_block_by_hand(void **state) {
    uint8_t q4_1[20] = {0x00, 0x38, 0x00, 0xc0, 0, 0xf3}, q4_0[18] = {0x00, 0x38, 0, 0xf3},
            q8_0[34] = {0x00, 0x38, 0xff};
    float out[32];
    assert_int_equal(k_dequant(*state, Q4_1, q4_1, 20, NULL, 1, 32, DTYPE_F32, out, 32), 0);
    assert_true(out[0] == -2 && out[1] == -0.5f && out[17] == 5.5f);
    assert_int_equal(k_dequant(*state, Q4_0, q4_0, 18, NULL, 1, 32, DTYPE_F32, out, 32), 0);
    assert_true(out[0] == -4 && out[1] == -2.5f && out[17] == 3.5f);
    assert_int_equal(k_dequant(*state, Q8_0, q8_0, 34, NULL, 1, 32, DTYPE_F32, out, 32), 0);
    assert_true(out[0] == -0.5f && out[1] == 0);
}

/* What the device does not read comes as the host's f32: no type may be the device's alone. */
static void what_the_device_reads_the_cpu_reads(void **state) {
    size_t n = 0;
    for (uint32_t i = 0; i < TYPES_END; i++) {
        const dequant_type *type = dequant_find(i);
        assert_true(!k_dequant_can(i) || (type && type->run));
        n += k_dequant_can(i);
    }
    assert_int_equal(n, 6);
    assert_int_equal(k_dequant(*state, Q5_0, NULL, 22, NULL, 1, 32, DTYPE_F32, NULL, 32), ERR_DATA);
    assert_string_equal(err_message(), "internal error: the device does not read tensors of type 6");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_type_has_the_cpus_bits),
        cmocka_unit_test(ids_choose_rows),
        cmocka_unit_test(a_block_by_hand),
        cmocka_unit_test(what_the_device_reads_the_cpu_reads),
    };
    return cmocka_run_group_tests(tests, open_device, close_device);
}
