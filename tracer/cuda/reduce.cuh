/* Sums and maxima over the lanes of a warp and the threads of a block, in an order that does not depend on chance;
 * every participant receives the result. Blocks are one-dimensional: whole warps, at most 1024 threads. */
#pragma once

#include "tracer/cuda/port.h"

/* Over a warp. All 32 lanes must call; no barrier, no shared memory. */
template <typename T> static __device__ inline T warp_sum(T x) {
    for (int apart = WARP / 2; apart > 0; apart /= 2) x += __shfl_xor_sync(0xffffffffu, x, apart);
    return x;
}

/* NaN counts as less than any number. */
static __device__ inline float warp_max(float x) {
    for (int apart = WARP / 2; apart > 0; apart /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, apart));
    return x;
}

/* Over a block. All its threads must call. Two barriers: one before the warps' results are written, so that calls may
 * follow one another and what the caller did to shared memory before is done, and one after. Every warp then combines
 * the results for itself, in the same order. */
static __device__ inline double block_sum(double x) {
    __shared__ double of_warp[WARP];
    unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    x = warp_sum(x);
    __syncthreads();
    if (lane == 0) of_warp[warp] = x;
    __syncthreads();
    return warp_sum(lane < blockDim.x / WARP ? of_warp[lane] : 0.0);
}

/* Barriers as in block_sum. NaN counts as less than any number. */
static __device__ inline float block_max(float x) {
    __shared__ float of_warp[WARP];
    unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    x = warp_max(x);
    __syncthreads();
    if (lane == 0) of_warp[warp] = x;
    __syncthreads();
    return warp_max(of_warp[lane < blockDim.x / WARP ? lane : 0]);
}
