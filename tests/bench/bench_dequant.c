/* bench_dequant [REPEATS]: how fast one core makes f32 of each type of weights, in GB of f32 a second of processor
 * time, the best of the repeats. F32 is a plain copy. The values do not fit into the caches. */
#include "base/mem.h"
#include "tests/bench/cost.h"
#include "tracer/dequant.h"

#include <stdio.h>
#include <stdlib.h>

enum { VALUES = 1 << 24, TYPES_END = 64 };

static double measure(const dequant_type *t, const unsigned char *from, float *to, int repeats) {
    double best = 0;
    for (int i = 0; i < repeats; i++) {
        cost start = cost_now();
        t->run(from, VALUES / t->block, to);
        double rate = VALUES * sizeof *to / cost_since(start).processor * 1e-9;
        best = rate > best ? rate : best;
    }
    return best;
}

int main(int argc, char **argv) {
    int repeats = argc > 1 ? atoi(argv[1]) : 5;
    unsigned char *from = mem_new(VALUES, sizeof(float), "blocks");
    float *to = mem_new(VALUES, sizeof *to, "values");
    if (!from || !to) return 1;
    /* Scales of ordinary size wherever they lie: bytes 0x28..0x2f make f16 of 0.03 to 0.11. */
    for (size_t i = 0; i < VALUES * sizeof(float); i++) from[i] = (unsigned char)(0x28 | (i * 2654435761u >> 13 & 7));
    for (uint32_t i = 0; i < TYPES_END; i++) {
        const dequant_type *t = dequant_find(i);
        if (t && t->run) printf("%-7s %6.2f GB/s\n", t->name, measure(t, from, to, repeats));
    }
    mem_free(from);
    mem_free(to);
    return 0;
}
