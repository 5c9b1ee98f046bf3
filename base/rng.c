#include "base/rng.h"

#include <math.h>

rng_block rng_philox(uint64_t seed, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * a, p1 = (uint64_t)0xCD9E8D57u * c;
        uint32_t na = (uint32_t)(p1 >> 32) ^ b ^ k0, nc = (uint32_t)(p0 >> 32) ^ d ^ k1;
        b = (uint32_t)p1;
        d = (uint32_t)p0;
        a = na;
        c = nc;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return (rng_block){{a, b, c, d}};
}

double rng_normal(rng_block block) {
    const double two_pi = 6.283185307179586476925286766559;
    return sqrt(-2.0 * log(rng_uniform(block.v[0]))) * cos(two_pi * rng_uniform(block.v[1]));
}
