#include "sim/sample.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/rng.h"

enum { STREAM = 3 /* of the random numbers: probes have 0, labels 2 */ };

/* Steps before stratum h. */
static int32_t start_of(const sample *s, int32_t h) {
    return (int32_t)((int64_t)h * s->n / s->strata);
}

int sample_new(int32_t first, int32_t n, int32_t wanted, uint64_t seed, uint32_t sequence, sample *out) {
    *out = (sample){.n = n, .first = first};
    if (wanted <= 0 || wanted >= n || n < 4) return 0;
    out->strata = wanted < 4 ? 2 : wanted / 2;
    out->weight = mem_new((size_t)first + (size_t)n, sizeof *out->weight, "sample of steps");
    out->drawn = mem_new((size_t)out->strata * 2, sizeof *out->drawn, "sample of steps");
    if (!out->weight || !out->drawn) {
        sample_free(out);
        return ERR_DATA;
    }
    for (int32_t h = 0; h < out->strata; h++) {
        int32_t from = start_of(out, h), size = start_of(out, h + 1) - from;
        rng_block r = rng_philox(seed, (uint32_t)h, sequence, 0, STREAM);
        int32_t a = (int32_t)(rng_uniform(r.v[0]) * size), b = (int32_t)(rng_uniform(r.v[1]) * (size - 1));
        if (b >= a) b++; /* two different ones */
        int32_t pick[2] = {first + from + a, first + from + b};
        for (int i = 0; i < 2; i++) {
            out->drawn[2 * h + i] = pick[i];
            out->weight[pick[i]] = (float)size / 2;
        }
    }
    return 0;
}

void sample_free(sample *s) {
    mem_free(s->weight);
    mem_free(s->drawn);
    *s = (sample){0};
}

double sample_covariance(const sample *s, const double *x, const double *y) {
    double sum = 0;
    for (int32_t h = 0; h < s->strata; h++) {
        double size = start_of(s, h + 1) - start_of(s, h);
        int32_t a = s->drawn[2 * h], b = s->drawn[2 * h + 1];
        /* size^2 (1 - 2/size) S / 2, with S the covariance of two values. */
        sum += size * (size - 2) / 2 * (x[a] - x[b]) * (y[a] - y[b]) / 2;
    }
    return sum;
}
