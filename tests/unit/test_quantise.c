#include "sim/quantise.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

static void reads(int bits, const float *x, size_t n, const float *want) {
    float out[64];
    assert_true(quantise(bits, x, n, out));
    for (size_t i = 0; i < n; i++)
        if (out[i] != want[i]) fail_msg("%d bits, value %zu: %.9g reads %.9g", bits, i, (double)x[i], (double)out[i]);
}
#define READS(bits, n, x, ...) reads(bits, (const float[n])x, n, (const float[n])__VA_ARGS__)
#define V(...) \
    { __VA_ARGS__ }

static void eight_bits_by_hand(void **state) {
    (void)state;
    READS(8, 6, V(127, 1.5f, -1.5f, 0.49f, -0.5f, -127), {127, 2, -2, 0, -1, -127}); /* halves away from zero */
    READS(8, 3, V(-254, 3, 100), {-254, 4, 100});                                    /* d = 2 */
    READS(8, 2, V(0, -0.0f), {0, 0});
    /* d = 1/127 is 0x2010 in f16, 0.007873535: a little less. q = 127, 64. */
    READS(8, 2, V(1, 0.5f), {127 * 0.00787353515625f, 64 * 0.00787353515625f});
}

static void four_bits_by_hand(void **state) {
    (void)state;
    READS(4, 6, V(-8, 7, 7.6f, 0.5f, -0.5f, 8),
          {-8, 7, 7, 1, 0, 7}); /* d = 1: the first of two extremes, 8 has no place */
    READS(4, 4, V(4, 0.25f, -0.25f, -3.9f), {4, -0.0f, -0.5f, -3.5f}); /* d = -.5: halves go up in q */
    READS(4, 2, V(0, 0), {0, 0});
}

/* The 33rd value begins a block with a scale of its own. */
static void blocks_have_their_own_scales(void **state) {
    (void)state;
    float x[40] = {[0] = 127, [31] = 0.4f, [32] = 1.27f, [39] = 0.02f}, out[40];
    assert_true(quantise(8, x, 40, out));
    assert_true(out[0] == 127 && out[31] == 0);
    assert_true(fabsf(out[32] - 1.27f) < 1e-3f && fabsf(out[39] - 0.02f) < 1e-4f);
    assert_true(quantise(16, x, 40, out));
    for (int i = 0; i < 40; i++) assert_true(out[i] == x[i]);
}

static void scales_beyond_f16(void **state) {
    (void)state;
    float large[2] = {1e7f, 1}, small[2] = {1e-30f, 0}, out[2] = {5, 5};
    assert_false(quantise(8, large, 2, out));
    assert_false(quantise(4, large, 2, out));
    assert_true(quantise(8, small, 2, out) && out[0] == 0 && out[1] == 0);
    assert_true(quantise(4, small, 2, out) && out[0] == 0 && out[1] == 0);
}

static void bytes_by_hand(void **state) {
    (void)state;
    assert_int_equal(quantise_bytes(16, 64), 128);
    assert_int_equal(quantise_bytes(8, 64), 68);
    assert_int_equal(quantise_bytes(4, 64), 36);
    assert_int_equal(quantise_bytes(8, 40), 44); /* 34, and 2 + 8 */
    assert_int_equal(quantise_bytes(4, 40), 24);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(eight_bits_by_hand),
        cmocka_unit_test(four_bits_by_hand),
        cmocka_unit_test(blocks_have_their_own_scales),
        cmocka_unit_test(scales_beyond_f16),
        cmocka_unit_test(bytes_by_hand),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
