/* bench_load [REPEATS]: how fast one core loads f32 values that lie in its caches, by working set. Nothing that has to
 * look at every entry of a row can be faster. Each value is loaded once and added to one of 8 vectors, the widest that
 * the processor has. */
#include "base/mem.h"
#include "tests/bench/cost.h"

#include <stdio.h>
#include <stdlib.h>

typedef float vector __attribute__((vector_size(64)));
enum { LANES = 16, AT_ONCE = 8 };

/* Pass `times` over n vectors, a multiple of AT_ONCE. */
#if defined __x86_64__
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
static float
load(const vector *x, size_t n, size_t times) {
    vector a = {0}, b = a, c = a, d = a, e = a, f = a, g = a, h = a;
    float total = 0;
    for (size_t k = 0; k < times; k++) {
        for (size_t i = 0; i < n; i += AT_ONCE) {
            a += x[i], b += x[i + 1], c += x[i + 2], d += x[i + 3];
            e += x[i + 4], f += x[i + 5], g += x[i + 6], h += x[i + 7];
        }
        __asm__ volatile("" ::: "memory"); /* the next pass loads again */
    }
    a += b + c + d + e + f + g + h;
    for (size_t lane = 0; lane < LANES; lane++) total += a[lane];
    return total;
}

int main(int argc, char **argv) {
    static const size_t kib[] = {16, 32, 256, 1024};
    enum { SETS = sizeof kib / sizeof *kib };
    int repeats = argc > 1 ? atoi(argv[1]) : 5;
    vector *x = mem_new(kib[SETS - 1] << 10, 1, "values");
    double checksum = 0;
    if (!x) return 1;
    for (int i = 0; i < repeats; i++) {
        printf("repeat");
        for (size_t set = 0; set < SETS; set++) {
            size_t bytes = kib[set] << 10, times = ((size_t)1 << 31) / bytes;
            cost start = cost_now();
            checksum += (double)load(x, bytes / sizeof *x, times);
            cost c = cost_since(start);
            printf("  kib%zu %.5f s (%.5f s)", kib[set], c.wall, c.processor);
        }
        printf("\n");
    }
    printf("%.0f bytes in each, checksum %g\n", 0x1p31, checksum);
    mem_free(x);
    return 0;
}
