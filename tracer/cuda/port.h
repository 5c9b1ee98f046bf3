/* What a kernel is written in. Kernel bodies are single source: under nvcc they are CUDA; with KVLAG_FIBERS defined they
 * are C++ whose blocks run on the CPU, one fiber a thread (tests/cuda/fibers.h supplies threadIdx, blockIdx, blockDim,
 * gridDim, __global__, __device__, __shared__, __syncthreads, __syncwarp, warp shuffles and votes, atomics). Kernels
 * use nothing else: no textures, no dynamic shared memory, no cooperative groups, no inline assembly. */
#pragma once

#ifdef KVLAG_FIBERS
#include "tests/cuda/fibers.h"
#include <functional>
#else
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#endif

#include "tracer/cuda/device.h"

#include <stdint.h>

enum { WARP = 32 };

#ifdef KVLAG_FIBERS
/* The host's own conversions, tested bit by bit elsewhere. */
#include "base/half.h"
static inline uint16_t f16_of(float x) {
    return half_from_f32(x);
}
static inline float of_f16(uint16_t h) {
    return half_to_f32(h);
}
#else
static __device__ inline uint16_t f16_of(float x) {
    return __half_as_ushort(__float2half_rn(x));
}
static __device__ inline float of_f16(uint16_t h) {
    return __half2float(__ushort_as_half(h));
}
#endif

#ifdef KVLAG_FIBERS
/* Order work on the compute lane (tests/cuda/device_fibers.cc). */
void fibers_order(device *d, std::function<void()> work);
/* Arguments are taken now, as by CUDA, whenever the kernel runs. */
template <typename KERNEL, typename... ARGUMENTS>
static void fibers_launch(device *d, dim3 grid, dim3 block, fibers_site at, KERNEL kernel, ARGUMENTS... of) {
    auto body = [=] { kernel(of...); };
    fibers_order(d, [=] { fibers_run(grid, block, body, at.file, at.function, at.line); });
}
#endif

/* Run `kernel` over a grid on the compute stream; an error names kernel, file, line and grid. Gives 0 or ERR_DATA:
 *
 *     return LAUNCH(d, norm_rows, dim3(rows), dim3(256), x, weight, n);
 */
#ifdef KVLAG_FIBERS
#define LAUNCH(d, kernel, grid, block, ...)                                                                           \
    (fibers_launch((d), (grid), (block), {__FILE__, __func__, __LINE__}, [](auto... of) { kernel(of...); },            \
                   __VA_ARGS__),                                                                                       \
     device_launched((d), #kernel, __FILE__, __LINE__))
#else
#define LAUNCH(d, kernel, grid, block, ...)                                                                           \
    (kernel<<<(grid), (block), 0, (cudaStream_t)device_stream((d), STREAM_COMPUTE)>>>(__VA_ARGS__),                    \
     device_launched((d), #kernel, __FILE__, __LINE__))
#endif
