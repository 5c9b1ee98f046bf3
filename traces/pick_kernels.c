#include "traces/kernels.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern const kernel_table kernels_portable, kernels_avx2, kernels_avx512;

int kernels_available(const kernel_table *list[3]) {
    int n = 0;
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        list[n++] = &kernels_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) list[n++] = &kernels_avx2;
    list[n++] = &kernels_portable;
    return n;
}

static const kernel_table *chosen;

static void choose(void) {
    const kernel_table *list[3];
    int n = kernels_available(list);
    chosen = list[0];
    const char *wish = getenv("KVLAG_KERNELS");
    if (!wish || !*wish) return;
    for (int i = 0; i < n; i++)
        if (strcmp(list[i]->name, wish) == 0) {
            chosen = list[i];
            return;
        }
    fprintf(stderr, "kvlag: KVLAG_KERNELS=%s is not available here, using %s\n", wish, chosen->name);
}

const kernel_table *kernels(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, choose);
    return chosen;
}
