/* IEEE 754 half precision and bfloat16, converted in our own code: HDF5 1.10.8 rounds f32 to f16 wrongly where the
 * carry reaches the exponent (1.5249285751529568e-05 must become 2^-16). Round to nearest, ties to even; overflow
 * becomes infinity (callers that must not lose values check for it); NaN stays NaN. */
#pragma once

#include <stdint.h>
#include <string.h>

typedef uint16_t half;

static inline uint32_t half_bits_of(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

static inline float half_from_bits(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static inline float half_to_f32(half h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, e = (h >> 10) & 31u, m = h & 0x3ffu;
    if (e == 31) return half_from_bits(sign | 0x7f800000u | m << 13);
    if (e) return half_from_bits(sign | (e + 112) << 23 | m << 13);
    /* Subnormal: m * 2^-24 is exact in f32. */
    float magnitude = (float)m * 0x1p-24f;
    return half_from_bits(half_bits_of(magnitude) | sign);
}

static inline half half_from_f32(float f) {
    uint32_t u = half_bits_of(f), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
    if (a > 0x7f800000u) return (half)(sign | 0x7e00u);
    if (a >= 0x47800000u) return (half)(sign | 0x7c00u); /* 65536 and more */
    if (a < 0x33000000u) return (half)sign;              /* below 2^-25: zero */
    uint32_t shift = 13, m;
    if (a < 0x38800000u) { /* below 2^-14: subnormal */
        shift = 126 - (a >> 23);
        m = (a & 0x7fffffu) | 0x800000u;

    } else {
        m = a - 0x38000000u; /* rebias 127 -> 15; the exponent rides along, so a carry flows into it */
    }
    uint32_t kept = m >> shift, rest = m & ((1u << shift) - 1), halfway = 1u << (shift - 1);
    if (rest > halfway || (rest == halfway && (kept & 1))) kept++;
    return (half)(sign | kept);
}

static inline float bf16_to_f32(uint16_t b) {
    return half_from_bits((uint32_t)b << 16);
}
