/* Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011),
 * checked against the known answers of Random123. A number is a function of (seed, counter), so results do not depend
 * on order, threads or machine. */
#pragma once

#include <stdint.h>

typedef struct rng_block {
    uint32_t v[4];
} rng_block;

/* key = (low, high) half of seed; counter = (a, b, c, d). */
rng_block rng_philox(uint64_t seed, uint32_t a, uint32_t b, uint32_t c, uint32_t d);

/* Uniform in (0, 1) from one 32-bit word: (w + 0.5) / 2^32, exact in f64. */
static inline double rng_uniform(uint32_t word) {
    return ((double)word + 0.5) * 0x1p-32;
}

/* Standard normal from words v[0] and v[1] of a block (Box-Muller, cosine branch). */
double rng_normal(rng_block block);
