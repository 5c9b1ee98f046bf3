#include "tests/cuda/fiber_probe.h"
#include "tracer/cuda/port.h"

static __device__ unsigned number() {
    return (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
}

static __global__ void indices(int *out) {
    unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    unsigned digits[6] = {blockIdx.z, blockIdx.y, blockIdx.x, threadIdx.z, threadIdx.y, threadIdx.x};
    int value = 0;
    for (unsigned digit : digits) value = 10 * value + (int)digit;
    out[block * blockDim.x * blockDim.y * blockDim.z + number()] = value;
}

int probe_indices(device *d, probe_dim grid, probe_dim block, int *out) {
    return LAUNCH(d, indices, dim3(grid.x, grid.y, grid.z), dim3(block.x, block.y, block.z), out);
}

template <bool BARRIERS> static __global__ void ring(int rounds, int *out) {
    __shared__ int values[1024];
    unsigned n = blockDim.x * blockDim.y * blockDim.z, i = number();
    int value = (int)i;
    for (int r = 0; r < rounds; r++) {
        values[i] = value;
        if (BARRIERS) __syncthreads();
        value = values[(i + 1) % n];
        if (BARRIERS) __syncthreads();
    }
    out[blockIdx.x * n + i] = value;
}

int probe_ring(device *d, unsigned blocks, probe_dim block, int rounds, bool barriers, int *out) {
    dim3 threads(block.x, block.y, block.z);
    if (barriers) return LAUNCH(d, ring<true>, dim3(blocks), threads, rounds, out);
    return LAUNCH(d, ring<false>, dim3(blocks), threads, rounds, out);
}

static __global__ void exchange(probe_exchanged out) {
    const unsigned full = 0xffffffffu;
    int i = (int)threadIdx.x;
    out.from_3[i] = __shfl_sync(full, i, 3);
    out.xor_5[i] = __shfl_xor_sync(full, i, 5);
    out.down_4[i] = __shfl_down_sync(full, i, 4);
    out.up_4[i] = __shfl_up_sync(full, i, 4);
    out.wide[i] = __shfl_xor_sync(full, i + 0.25, 1);
    out.odd[i] = __ballot_sync(full, i % 2);
    out.half[i] = __ballot_sync(i % 32 < 16 ? 0x0000ffffu : 0xffff0000u, i % 3 == 0);
    out.any[i] = (__any_sync(full, i == 33) != 0) | (__any_sync(full, i >= 32) != 0) << 1;
    out.all[i] = (__all_sync(full, i == 33) != 0) | (__all_sync(full, i >= 32) != 0) << 1;
    out.count[i] = __syncthreads_count(i >= 32);
    out.block_or[i] = (__syncthreads_or(i >= 32) != 0) | (__syncthreads_or(i == 0) != 0) << 1;
    out.block_and[i] = (__syncthreads_and(i >= 0) != 0) | (__syncthreads_and(i == 0) != 0) << 1;
}

int probe_exchange(device *d, unsigned n, const probe_exchanged *out) {
    return LAUNCH(d, exchange, dim3(1), dim3(n), *out);
}

static __global__ void sum(float *out) {
    __shared__ float part[32];
    float value = (float)threadIdx.x;
    for (int step = 16; step; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
    if (threadIdx.x % WARP == 0) part[threadIdx.x / WARP] = value;
    __syncthreads();
    if (threadIdx.x >= WARP) return;
    value = threadIdx.x < blockDim.x / WARP ? part[threadIdx.x] : 0.0f;
    for (int step = 16; step; step /= 2) value += __shfl_down_sync(0xffffffffu, value, (unsigned)step);
    if (threadIdx.x == 0) *out = value;
}

int probe_sum(device *d, unsigned n, float *out) {
    return LAUNCH(d, sum, dim3(1), dim3(n), out);
}

static __global__ void atomics(probe_counters *c) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    atomicMin(&c->least, -i);
    atomicMax(&c->most, i);
    atomicAdd(&c->total, 1);
    atomicAdd(&c->wide_total, (unsigned long long)i << 32);
    atomicMax(&c->wide_most, (unsigned long long)i << 32);
    atomicOr(&c->set, 1u << i % 32);
    if (atomicCAS(&c->replaced, 0u, 5u) == 0) atomicExch(&c->swaps, atomicAdd(&c->swaps, 1u) + 1);
}

int probe_atomics(device *d, unsigned blocks, unsigned n, probe_counters *c) {
    return LAUNCH(d, atomics, dim3(blocks), dim3(n), c);
}

static __global__ void early(int n, int *out) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= n) return;
    out[i] = i;
}

int probe_early(device *d, unsigned blocks, unsigned threads, int n, int *out) {
    return LAUNCH(d, early, dim3(blocks), dim3(threads), n, out);
}

static __global__ void last(unsigned *out) {
    out[0] = blockIdx.x;
    out[1] = threadIdx.x;
}

int probe_last(device *d, unsigned blocks, unsigned threads, unsigned *out) {
    return LAUNCH(d, last, dim3(blocks), dim3(threads), out);
}

static __global__ void arithmetic(double *out) {
    size_t large = (size_t)1 << 40;
    float4 v = make_float4(1, 2, 3, 4);
    *out++ = (double)min(large, (size_t)7);
    *out++ = (double)max(large, 7u);
    *out++ = (double)min(-1, 1u); /* meet as unsigned */
    *out++ = (double)max(-3, 2);
    *out++ = (double)min(NAN, 2.5f);
    *out++ = (double)max(2.5f, NAN);
    *out++ = (double)max(1.5f, 2.25);
    *out++ = (double)__float_as_uint(1.0f);
    *out++ = (double)__uint_as_float(0xc0000000u);
    *out++ = (double)rsqrtf(16.0f);
    *out++ = (double)__popc(0xf0f0u);
    *out++ = (double)__ffs(8);
    *out++ = (double)__clz(1);
    *out++ = (double)__clz(0);
    *out++ = (double)__ldg(&v.w) + (double)sizeof(uchar4);
    *out++ = (double)__fadd_rn(__fmul_rn(1.0f + 0x1p-12f, 1.0f + 0x1p-12f), -1.0f); /* fused: + 2^-24 */
}

int probe_arithmetic(device *d, double *out) {
    return LAUNCH(d, arithmetic, dim3(1), dim3(1), out);
}

static __global__ void misuse(device *d, probe_fault fault) {
    const unsigned full = 0xffffffffu;
    unsigned i = threadIdx.x;
    int value = (int)i;
    switch (fault) {
    case FAULT_BARRIER_LEFT:
        if (i != 7) __syncthreads();
        break;
    case FAULT_BARRIER_ELSEWHERE:
        if (i % 2) __syncthreads();
        else __syncthreads();
        break;
    case FAULT_BARRIER_SHUFFLE:
        if (i != 5) value = __shfl_sync(full, value, 0);
        __syncthreads();
        break;
    case FAULT_LANE_LEFT:
        if (i != 9) value = __shfl_sync(full, value, 0);
        break;
    case FAULT_OWN_MASK:
        __syncwarp(~16u);
        break;
    case FAULT_OTHER_MASK:
        __syncwarp(i == 4 ? 0x3fu : full);
        break;
    case FAULT_SOURCE:
        if (i < 16) value = __shfl_sync(0xffffu, value, 20);
        break;
    case FAULT_SHORT_WARP:
        __syncwarp();
        break;
    case FAULT_NESTED:
        LAUNCH(d, last, dim3(1), dim3(1), nullptr);
        break;
    }
    if (value < 0) __syncthreads();
}

int probe_misuse(device *d, unsigned n, probe_fault fault) {
    return LAUNCH(d, misuse, dim3(2), dim3(n), d, fault);
}
