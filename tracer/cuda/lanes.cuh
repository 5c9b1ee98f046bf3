/* Neighbouring values that a thread moves at once: 16 bytes of f32 are what memory serves best. Rows that are not
 * aligned for it, and their last values, go one by one. */
#pragma once

#include "tracer/cuda/port.h"

#include <stddef.h>

/* bf16, round to nearest even; NaN stays NaN. */
static __device__ inline uint16_t bf16_of(float x) {
    uint32_t u = __float_as_uint(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(u >> 16 | 0x40u);
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

/* An output of either type: float, or uint16_t that holds bf16. */
static __device__ inline void put(float *p, float x) {
    *p = x;
}
static __device__ inline void put(uint16_t *p, float x) {
    *p = bf16_of(x);
}

template <typename T, int N> struct alignas(N * sizeof(T)) lanes { T v[N]; };
typedef lanes<float, 4> quad;

/* Values i .. i+3 of a row of n; 0 behind its end. */
static __device__ inline quad load_quad(const float *row, size_t i, size_t n) {
    const float *from = row + i;
    if (i + 4 <= n && (uintptr_t)from % sizeof(quad) == 0) return *(const quad *)from;
    quad q;
    for (int k = 0; k < 4; k++) q.v[k] = i + k < n ? from[k] : 0.0f;
    return q;
}

/* One store of a whole vector. nvcc takes some assignments apart, to four stores that each touch every line; the
 * intrinsic for the ordinary kind of store stays whole. */
template <typename V> static __device__ inline void store_vector(V *p, V v) {
#ifdef KVLAG_FIBERS
    *p = v;
#else
    __stwb(p, v);
#endif
}
static __device__ inline void put(float *p, const quad &q) {
    store_vector((float4 *)p, make_float4(q.v[0], q.v[1], q.v[2], q.v[3]));
}
static __device__ inline void put(uint16_t *p, const quad &q) {
    store_vector((ushort4 *)p, make_ushort4(bf16_of(q.v[0]), bf16_of(q.v[1]), bf16_of(q.v[2]), bf16_of(q.v[3])));
}

/* The other way; nothing is written behind the row's end. */
template <typename T> static __device__ inline void store_quad(T *row, size_t i, size_t n, const quad &q) {
    T *to = row + i;
    if (i + 4 <= n && (uintptr_t)to % (4 * sizeof(T)) == 0) {
        put(to, q);
    } else {
        for (int k = 0; k < 4; k++)
            if (i + k < n) put(to + k, q.v[k]);
    }
}

/* A launch over `rows` rows (blockIdx.x), `items` of each, one a thread: item lane_item() of the row. Blocks of at most
 * 256 threads, cut so that few threads are left without one. */
struct cover {
    dim3 grid, block;
    cover(size_t rows, size_t items) {
        size_t parts = (items + 255) / 256, each = (items + parts - 1) / parts;
        grid = dim3((unsigned)rows, (unsigned)parts);
        block = dim3((unsigned)((each + WARP - 1) / WARP * WARP));
    }
};
static __device__ inline size_t lane_item() {
    return (size_t)blockIdx.y * blockDim.x + threadIdx.x;
}
