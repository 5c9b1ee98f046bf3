/* Small kernels with known answers, for test_fibers.c. Arrays are device memory; launchers give LAUNCH's code. */
#pragma once

#include "tracer/cuda/device.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct probe_dim {
    unsigned x, y, z;
} probe_dim;

/* out[number of the thread in the whole grid, x fastest] = its indices as decimal digits: block zyx, thread zyx. */
int probe_indices(device *d, probe_dim grid, probe_dim block, int *out);
/* Each thread starts with its own number in the block; `rounds` times, all take their right neighbour's (in a ring)
 * through shared memory. With `barriers` false the barriers are left out: a race. */
int probe_ring(device *d, unsigned blocks, probe_dim block, int rounds, bool barriers, int *out);
/* One block of n threads (a multiple of 32). Each out [n]. */
typedef struct probe_exchanged {
    int *from_3, *xor_5, *down_4, *up_4;
    double *wide;                      /* __shfl_xor_sync 1 of a double: number + 0.25 */
    unsigned *odd;                     /* ballot of odd numbers */
    unsigned *half;                    /* ballot among the own half warp (a mask of 16) of numbers divisible by 3 */
    int *any, *all;                    /* bit 0: of number == 33; bit 1: of number >= 32 */
    int *count, *block_or, *block_and; /* of number >= 32, over the block; bit 1 of the latter two: of number == 0 */
} probe_exchanged;
int probe_exchange(device *d, unsigned n, const probe_exchanged *out);
/* out[0] = sum of all numbers by warps' shuffles, shared memory and one barrier; in f32. */
int probe_sum(device *d, unsigned n, float *out);
typedef struct probe_counters {
    int least, most, total;
    unsigned long long wide_total, wide_most;
    unsigned set, replaced, swaps;
} probe_counters;
/* Over blocks * n threads with number i: atomics on -i, i, 1; i << 32; bit i % 32; the first thread to run swaps. */
int probe_atomics(device *d, unsigned blocks, unsigned n, probe_counters *c);
/* out[i] = i for i < n, whose other threads return at once. */
int probe_early(device *d, unsigned blocks, unsigned threads, int n, int *out);
/* out[0], out[1]: block and thread that ran last. */
int probe_last(device *d, unsigned blocks, unsigned threads, unsigned *out);
/* out[..]: results of single operations, in the order of probe_arithmetic's source. */
enum { PROBE_VALUES = 16 };
int probe_arithmetic(device *d, double *out);

/* What CUDA does not define; each ends the process. A block of n threads. */
typedef enum probe_fault {
    FAULT_BARRIER_LEFT,      /* thread 7 returns, the others wait */
    FAULT_BARRIER_ELSEWHERE, /* even and odd threads at two barriers */
    FAULT_BARRIER_SHUFFLE,   /* lane 5 goes to the barrier while its warp shuffles */
    FAULT_LANE_LEFT,         /* lane 9 returns, its warp shuffles */
    FAULT_OWN_MASK,          /* lane 4 calls with a mask without lane 4 */
    FAULT_OTHER_MASK,        /* lane 4's mask is not its neighbours' */
    FAULT_SOURCE,            /* lanes 0 .. 15 read lane 20, which is not in their mask */
    FAULT_SHORT_WARP,        /* a full mask; for n = 48 */
    FAULT_NESTED             /* a launch from a kernel */
} probe_fault;
int probe_misuse(device *d, unsigned n, probe_fault fault);

#ifdef __cplusplus
}
#endif
