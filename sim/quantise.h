/* The quantised cache types that are deployed, as llama.cpp defines them: q8_0 and q4_0.
 *
 * A vector of one head is cut into blocks of 32 values (the last may be shorter, where llama.cpp would refuse it). A
 * block holds an f16 scale d and a whole number q for each value, which then reads d q. q8_0: d = max |x| / 127, q = x
 * / d rounded to the nearest, halves away from zero. q4_0: d = m / -8 with m the value of largest magnitude (the first
 * of equal ones), q = x / d rounded to the nearest, halves upwards, from -8 to 7. x / d is x times the reciprocal of
 * the scale before it became f16. This is the rounding of the reference functions (quantize_row_q8_0_ref,
 * quantize_row_q4_0_ref in ggml-quants.c); vector code there may round exact halves otherwise. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

enum { QUANTISE_BLOCK = 32 };

/* n values as they read after they were stored in 16 (as they are), 8 (q8_0) or 4 bits (q4_0). False where a scale
 * overflows f16. `out` may be `x`. */
bool quantise(int bits, const float *x, size_t n, float *out);

/* Bytes of n values: 2 n, or 34 or 18 for each whole block. */
size_t quantise_bytes(int bits, size_t n);
