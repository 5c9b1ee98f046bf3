#include "sim/quantise.h"
#include "base/half.h"

#include <math.h>
#include <string.h>

/* The value of largest magnitude. */
static float extreme(const float *x, size_t n) {
    float most = 0;
    for (size_t j = 0; j < n; j++)
        if (fabsf(x[j]) > fabsf(most)) most = x[j];
    return most;
}

static bool quantise_block(int bits, const float *x, size_t n, float *out) {
    float most = extreme(x, n), d = bits == 8 ? fabsf(most) / 127 : most / -8, scale = half_to_f32(half_from_f32(d));
    if (!isfinite(scale)) return false;
    if (scale == 0) { /* all values are 0, or vanish with their scale */
        memset(out, 0, n * sizeof *out);
        return true;
    }
    float inverse = 1 / d;
    for (size_t j = 0; j < n; j++) {
        float q = bits == 8 ? roundf(x[j] * inverse) : fminf(truncf(x[j] * inverse + 8.5f), 15) - 8;
        out[j] = scale * q;
    }
    return true;
}

bool quantise(int bits, const float *x, size_t n, float *out) {
    if (bits == 16) {
        memmove(out, x, n * sizeof *out);
        return true;
    }
    for (size_t i = 0; i < n; i += QUANTISE_BLOCK)
        if (!quantise_block(bits, x + i, n - i < QUANTISE_BLOCK ? n - i : QUANTISE_BLOCK, out + i)) return false;
    return true;
}

size_t quantise_bytes(int bits, size_t n) {
    if (bits == 16) return 2 * n;
    size_t blocks = (n + QUANTISE_BLOCK - 1) / QUANTISE_BLOCK;
    return 2 * blocks + (bits == 8 ? n : (n + 1) / 2);
}
