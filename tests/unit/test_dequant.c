/* Every type of weights by values worked out by hand; tests/parity/blocks.py compares random bytes with ggml's package.
 * Bytes that a test does not set are 0. */
#include "base/half.h"
#include "tracer/dequant.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

enum { F16 = 1, Q5_0 = 6, Q5_1, Q2_K = 10, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL = 20, IQ4_XS = 23 };
enum { BF16 = 30, MXFP4 = 39, MOST = 256 };

typedef struct expected {
    int at;
    float value;
} expected;

/* Two equal blocks, unaligned, give these values and, everywhere else, `rest` (NAN: whatever). */
static void check(uint32_t number, const unsigned char *block, float rest, const expected *list, size_t n) {
    const dequant_type *t = dequant_find(number);
    unsigned char bytes[1 + 2 * 210];
    float out[2 * MOST + 1];
    bool named[MOST] = {0};
    memcpy(bytes + 1, block, t->block_bytes);
    memcpy(bytes + 1 + t->block_bytes, block, t->block_bytes);
    out[2 * t->block] = 12345;
    t->run(bytes + 1, 2, out);
    assert_true(out[2 * t->block] == 12345);
    assert_memory_equal(out, out + t->block, t->block * sizeof *out);
    for (size_t i = 0; i < n; i++) {
        named[list[i].at] = true;
        if (out[list[i].at] != list[i].value)
            fail_msg("%s: value %d is %g, not %g", t->name, list[i].at, (double)out[list[i].at], (double)list[i].value);
    }
    for (uint32_t i = 0; i < t->block && !isnan(rest); i++)
        if (!named[i] && out[i] != rest)
            fail_msg("%s: value %u is %g, not %g", t->name, i, (double)out[i], (double)rest);
}

#define CHECK(number, block, rest, ...) \
    check(number, block, rest, (expected[]){__VA_ARGS__}, sizeof((expected[]){__VA_ARGS__}) / sizeof(expected))

/* Halves: 0x3400 is 0.25, 0x3800 0.5, 0x3c00 1, 0x4000 2, 0xbc00 -1. */

/* All 65536 halves, in runs of every length and place within a vector. */
static void halves_are_converted(void **state) {
    (void)state;
    static uint16_t in[65536];
    static float out[65536];
    for (size_t i = 0; i < 65536; i++) in[i] = (uint16_t)i;
    for (size_t n = 1; n < 40; n++) {
        for (size_t i = 0; i < 65536; i += n) dequant_find(F16)->run(in + i, i + n < 65536 ? n : 65536 - i, out + i);
        for (size_t i = 0; i < 65536; i++)
            if (half_bits_of(out[i]) != half_bits_of(half_to_f32(in[i]))) fail_msg("half %zx", i);
        for (size_t i = 0; i < 65536; i += n) dequant_find(BF16)->run(in + i, i + n < 65536 ? n : 65536 - i, out + i);
        for (size_t i = 0; i < 65536; i++)
            if (half_bits_of(out[i]) != (uint32_t)i << 16) fail_msg("bfloat %zx", i);
    }
}

/* d 0.5; value 0 has q 1, value 16 q 2, value 17 q 15; fifth bits of values 0 and 17. */
static void q5_0_has_these_values(void **state) {
    (void)state;
    unsigned char b[22] = {0x00, 0x38, 0x01, 0x00, 0x02, 0x00, 0x21, 0xf0};
    CHECK(Q5_0, b, -8, {0, 0.5f}, {16, -7}, {1, -8}, {17, 7.5f});
    b[5] = 0x80; /* value 31 */
    CHECK(Q5_0, b, -8, {0, 0.5f}, {16, -7}, {17, 7.5f}, {31, 0});
}

/* The same with d 2 and m -1. */
static void q5_1_has_these_values(void **state) {
    (void)state;
    unsigned char b[24] = {0x00, 0x40, 0x00, 0xbc, 0x01, 0x00, 0x02, 0x00, 0x21, 0xf0};
    CHECK(Q5_1, b, -1, {0, 33}, {16, 3}, {1, -1}, {17, 61});
}

/* d 0.5, m 1. Scales and offsets: 3, 1 of values 0..15; 2, 0 of 32..47; 1, 3 of 64..79; 15, 1 of 144..159. */
static void q2_k_has_these_values(void **state) {
    (void)state;
    unsigned char b[84] = {[0] = 0x13, [2] = 0x02, [4] = 0x31, [9] = 0x1f, [80] = 0x00, 0x38, 0x00, 0x3c};
    b[16] = 0xe7; /* values 0, 32, 64, 96: 3, 1, 2, 3 */
    b[64] = 0x02; /* value 144: 2 */
    CHECK(Q2_K, b, NAN, {0, 3.5f}, {1, -1}, {15, -1}, {16, 0}, {32, 1}, {33, 0}, {64, -2}, {65, -3}, {96, 0}, {144, 14},
          {145, -1}, {159, -1}, {160, 0}, {255, 0});
}

/* d 0.25. Scales: 53 - 32 of values 0..15, 33 - 32 of 128..143, 28 - 32 of 80..95, 0 - 32 elsewhere. */
static void q3_k_has_these_values(void **state) {
    (void)state;
    unsigned char b[110] = {[0] = 0x11, [16] = 0x04, [96] = 0x15, [101] = 0x0c, [104] = 0x23, 0x04, [108] = 0x00, 0x34};
    b[32] = 0xe7; /* values 0, 32, 64, 96: 3, 1, 2, 3 */
    b[64] = 0x02; /* value 128: 2 */
    b[48] = 0x30; /* value 80: 3 */
    CHECK(Q3_K, b, NAN, {0, 15.75f}, {1, -21}, {32, 24}, {64, 16}, {96, 8}, {128, 0.5f}, {129, -1}, {80, -3}, {81, 4},
          {16, 32}, {17, 32}, {255, 32});
}

/* d 0.5, m 0.25. Scales and offsets: 3, 2 of values 0..31; 1, 0 of 32..63; 21, 41 of 128..159; 63, 1 of 224..255. */
static void q4_k_has_these_values(void **state) {
    (void)state;
    unsigned char b[144] = {0x00, 0x38, 0x00, 0x34, 0x43, 0x01, 0x00, 0xc0, 0x82, 0x00, 0x00, 0x00, 0x95, 0, 0, 0x1f};
    b[16] = 0xa7, b[80] = 0x02, b[112] = 0x10; /* values 0 and 32: 7, 10; 128: 2; 224: 1 */
    CHECK(Q4_K, b, NAN, {0, 10}, {1, -0.5f}, {31, -0.5f}, {32, 5}, {33, 0}, {64, 0}, {128, 10.75f}, {129, -10.25f},
          {160, 0}, {224, 31.25f}, {225, -0.25f}, {255, -0.25f});
}

/* The same with fifth bits of values 0, 128 and 224. */
static void q5_k_has_these_values(void **state) {
    (void)state;
    unsigned char b[176] = {0x00, 0x38, 0x00, 0x34, 0x43, 0x01, 0x00, 0xc0, 0x82, 0x00, 0x00, 0x00, 0x95, 0, 0, 0x1f};
    b[16] = 0x91, b[48] = 0xa7, b[112] = 0x02, b[144] = 0x10;
    CHECK(Q5_K, b, NAN, {0, 34}, {1, -0.5f}, {32, 5}, {33, 0}, {64, 0}, {128, 178.75f}, {129, -10.25f}, {160, 0},
          {224, 535.25f}, {225, -0.25f});
}

/* d 0.5; scales of values 0..15, 16..31, 32..47, 64..79, 96..111, 128..143: 3, -128, -2, 1, 127, 2. */
static void q6_k_has_these_values(void **state) {
    (void)state;
    unsigned char b[210] = {[0] = 0x21, [32] = 0x43, [64] = 0x05, [128] = 0xd9, [160] = 0x02, [208] = 0x00, 0x38};
    b[192] = 3, b[193] = 0x80, b[194] = 0xfe, b[196] = 1, b[198] = 127, b[200] = 2;
    CHECK(Q6_K, b, NAN, {0, -22.5f}, {1, -48}, {16, 2048}, {32, -3}, {33, 32}, {64, -7}, {65, -16}, {96, 1270},
          {97, -2032}, {128, 5}, {129, -32}, {255, 0});
}

/* d 2; byte j holds j and 15 - j: the whole list, up and down. */
static void iq4_nl_has_these_values(void **state) {
    (void)state;
    unsigned char b[18] = {0x00, 0x40};
    for (int j = 0; j < 16; j++) b[2 + j] = (unsigned char)((15 - j) << 4 | j);
    CHECK(IQ4_NL, b, NAN, {0, -254}, {1, -208}, {2, -166}, {3, -130}, {4, -98}, {5, -70}, {6, -44}, {7, -20}, {8, 2},
          {9, 26}, {10, 50}, {11, 76}, {12, 106}, {13, 138}, {14, 178}, {15, 226}, {16, 226}, {17, 178}, {30, -208},
          {31, -254});
}

/* d 0.5. Scales: 37 - 32 of values 0..31, 49 - 32 of 32..63, 34 - 32 of 224..255, 0 - 32 elsewhere. */
static void iq4_xs_has_these_values(void **state) {
    (void)state;
    unsigned char b[136] = {0x00, 0x38, 0x0e, 0x80, 0x15, 0x00, 0x00, 0x20, [8] = 0x8f, [24] = 0x01, [120] = 0x70};
    CHECK(IQ4_XS, b, NAN, {0, 282.5f}, {1, -317.5f}, {16, 2.5f}, {32, -884}, {33, -1079.5f}, {48, -1079.5f}, {64, 2032},
          {223, 2032}, {224, -127}, {240, -10});
}

/* Numbers 0.5 and 6, -0.5 and -6, 0 and -0; with the scale 1, then with the smallest ones and the largest. */
static void mxfp4_has_these_values(void **state) {
    (void)state;
    unsigned char b[17] = {127, 0x71, 0xf9, 0x80};
    CHECK(MXFP4, b, 0, {0, 0.5f}, {16, 6}, {1, -0.5f}, {17, -6});
    b[0] = 0;
    CHECK(MXFP4, b, 0, {0, 0x1p-128f}, {16, 0x1.8p-125f}, {1, -0x1p-128f}, {17, -0x1.8p-125f});
    b[0] = 1;
    CHECK(MXFP4, b, 0, {0, 0x1p-127f}, {16, 0x1.8p-124f}, {1, -0x1p-127f}, {17, -0x1.8p-124f});
    b[0] = 2;
    CHECK(MXFP4, b, 0, {0, 0x1p-126f}, {16, 0x1.8p-123f}, {1, -0x1p-126f}, {17, -0x1.8p-123f});
    b[0] = 254;
    CHECK(MXFP4, b, 0, {0, 0x1p126f}, {16, INFINITY}, {1, -0x1p126f}, {17, -INFINITY});
}

static void types_are_listed(void **state) {
    (void)state;
    char list[256], small[9];
    assert_string_equal(dequant_supported(list, sizeof list), "F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, "
                                                              "Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, BF16, MXFP4");
    assert_string_equal(dequant_supported(small, sizeof small), "F32, F16");
    assert_null(dequant_find(42));
    assert_null(dequant_find(UINT32_MAX));
    assert_string_equal(dequant_find(16)->name, "IQ2_XXS");
    assert_true(!dequant_find(15)->run && !dequant_find(16)->run && !dequant_find(34)->run);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(halves_are_converted),    cmocka_unit_test(q5_0_has_these_values),
        cmocka_unit_test(q5_1_has_these_values),   cmocka_unit_test(q2_k_has_these_values),
        cmocka_unit_test(q3_k_has_these_values),   cmocka_unit_test(q4_k_has_these_values),
        cmocka_unit_test(q5_k_has_these_values),   cmocka_unit_test(q6_k_has_these_values),
        cmocka_unit_test(iq4_nl_has_these_values), cmocka_unit_test(iq4_xs_has_these_values),
        cmocka_unit_test(mxfp4_has_these_values),  cmocka_unit_test(types_are_listed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
