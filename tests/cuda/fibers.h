/* CUDA kernels as C++ on the CPU, for tests: the words a kernel is written in, over blocks whose threads are fibers.
 *
 * Blocks run one after another on the calling thread. A thread of a block runs until it ends or waits at a barrier or a
 * warp's exchange; then the next one runs: ascending by index, or with KVLAG_FIBERS_ORDER=reverse in the environment
 * descending, and the blocks, too. Correct kernels give the same bits in both orders; most races do not.
 *
 * What CUDA leaves undefined ends the process with a line that names launch, kernel, block and thread:
 *   - a barrier that not all threads of the block reach, those that returned early included;
 *   - threads of a block at different barriers, lanes of a warp at different exchanges or with different masks;
 *   - a mask that leaves out its caller, or names a lane that has returned or does not exist;
 *   - a shuffle from a lane outside the mask.
 *
 * __shared__ variables are statics: their addresses are the same for all threads of a block, they are not undefined at
 * a block's start but hold what the last block left, and their kernel must not be started from within a kernel. */
#pragma once

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __shared__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

/* ---- indices and vectors ---------------------------------------------------------------------------------------- */

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

#define FIBERS_HIDDEN __attribute__((visibility("hidden")))
extern FIBERS_HIDDEN uint3 threadIdx, blockIdx;
extern FIBERS_HIDDEN dim3 blockDim, gridDim;
constexpr int warpSize = 32;

/* Aligned as CUDA's, so that the undefined-behaviour sanitizer reports vectors at other addresses. */
#define FIBERS_VECTORS(name, type)                                  \
    struct alignas(2 * sizeof(type)) name##2 {                      \
        type x, y;                                                  \
    };                                                              \
    struct alignas(4 * sizeof(type)) name##4 {                      \
        type x, y, z, w;                                            \
    };                                                              \
    inline name##2 make_##name##2(type x, type y) {                 \
        return {x, y};                                              \
    }                                                               \
    inline name##4 make_##name##4(type x, type y, type z, type w) { \
        return {x, y, z, w};                                        \
    }
FIBERS_VECTORS(float, float)
FIBERS_VECTORS(int, int)
FIBERS_VECTORS(uint, unsigned)
FIBERS_VECTORS(short, short)
FIBERS_VECTORS(ushort, unsigned short)
FIBERS_VECTORS(char, signed char)
FIBERS_VECTORS(uchar, unsigned char)
#undef FIBERS_VECTORS

struct alignas(16) double2 {
    double x, y;
};
inline double2 make_double2(double x, double y) {
    return {x, y};
}

/* ---- launching -------------------------------------------------------------------------------------------------- */

/* A place in a source. As a default argument, the caller's. */
struct fibers_site {
    const char *file, *function;
    int line;
};
#define FIBERS_HERE \
    const char *file = __builtin_FILE(), const char *function = __builtin_FUNCTION(), int line = __builtin_LINE()

/* Run body(context) for every thread of every block. A grid or block that CUDA refuses is not run; it stays to be
 * asked for. */
void fibers_run_body(dim3 grid, dim3 block, void (*body)(void *context), void *context, fibers_site launch);
/* Why the last launch was refused, or NULL; forgets it. */
const char *fibers_refused(void);

template <typename F> void fibers_run(dim3 grid, dim3 block, F kernel, FIBERS_HERE) {
    fibers_run_body(grid, block, [](void *context) { (*(F *)context)(); }, &kernel, {file, function, line});
}

/* ---- barriers --------------------------------------------------------------------------------------------------- */

/* Wait for all threads of the block; gives for how many of them `predicate` held. */
int fibers_barrier(const char *what, bool predicate, const char *file, const char *function, int line);

inline void __syncthreads(FIBERS_HERE) {
    fibers_barrier("__syncthreads", false, file, function, line);
}
inline int __syncthreads_count(int predicate, FIBERS_HERE) {
    return fibers_barrier("__syncthreads_count", predicate != 0, file, function, line);
}
inline int __syncthreads_or(int predicate, FIBERS_HERE) {
    return fibers_barrier("__syncthreads_or", predicate != 0, file, function, line) != 0;
}
inline int __syncthreads_and(int predicate, FIBERS_HERE) {
    return fibers_barrier("__syncthreads_and", predicate == 0, file, function, line) == 0;
}
inline void __threadfence() {}
inline void __threadfence_block() {}

/* ---- exchange within a warp -------------------------------------------------------------------------------------- */

/* Wait for the lanes of `mask`. Gives the value of lane `source`, or for the source FIBERS_BALLOT the lanes whose value
 * is not zero. */
enum { FIBERS_BALLOT = -1 };
uint64_t fibers_exchange(const char *what, unsigned mask, uint64_t value, int source, const char *file,
                         const char *function, int line);
int fibers_lane(void);

template <typename T>
T fibers_shuffle(const char *what, unsigned mask, T value, int source, const char *file, const char *function,
                 int line) {
    static_assert(std::is_arithmetic<T>::value && sizeof(T) >= 4, "CUDA shuffles words of 4 and 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = fibers_exchange(what, mask, bits, source, file, function, line);
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The width is always 32; a source beyond the warp is the lane itself, as in CUDA. */
template <typename T> T __shfl_sync(unsigned mask, T value, int source, FIBERS_HERE) {
    return fibers_shuffle("__shfl_sync", mask, value, source & 31, file, function, line);
}
template <typename T> T __shfl_xor_sync(unsigned mask, T value, int bits, FIBERS_HERE) {
    int lane = fibers_lane(), source = lane ^ bits;
    return fibers_shuffle("__shfl_xor_sync", mask, value, source < 32 ? source : lane, file, function, line);
}
template <typename T> T __shfl_down_sync(unsigned mask, T value, unsigned delta, FIBERS_HERE) {
    unsigned lane = (unsigned)fibers_lane(), source = lane + delta;
    return fibers_shuffle("__shfl_down_sync", mask, value, (int)(source < 32 ? source : lane), file, function, line);
}
template <typename T> T __shfl_up_sync(unsigned mask, T value, unsigned delta, FIBERS_HERE) {
    unsigned lane = (unsigned)fibers_lane();
    return fibers_shuffle("__shfl_up_sync", mask, value, (int)(delta <= lane ? lane - delta : lane), file, function,
                          line);
}

inline void __syncwarp(unsigned mask = 0xffffffffu, FIBERS_HERE) {
    fibers_exchange("__syncwarp", mask, 0, FIBERS_BALLOT, file, function, line);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, FIBERS_HERE) {
    return (unsigned)fibers_exchange("__ballot_sync", mask, predicate != 0, FIBERS_BALLOT, file, function, line);
}
inline int __any_sync(unsigned mask, int predicate, FIBERS_HERE) {
    return fibers_exchange("__any_sync", mask, predicate != 0, FIBERS_BALLOT, file, function, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, FIBERS_HERE) {
    return fibers_exchange("__all_sync", mask, predicate == 0, FIBERS_BALLOT, file, function, line) == 0;
}

/* ---- atomics: one thread runs at a time -------------------------------------------------------------------------- */

/* Give what stood there before. */
template <typename T> T fibers_replace(T *at, T value) {
    static_assert(std::is_integral<T>::value && sizeof(T) >= 4, "kernels use atomics on integers alone");
    T old = *at;
    *at = value;
    return old;
}
/* T from the pointer alone, so that the value converts as to CUDA's overloads. */
template <typename T> using fibers_same = typename std::enable_if<true, T>::type;
template <typename T> T atomicMin(T *at, fibers_same<T> value) {
    return fibers_replace(at, value < *at ? value : *at);
}
template <typename T> T atomicMax(T *at, fibers_same<T> value) {
    return fibers_replace(at, value > *at ? value : *at);
}
template <typename T> T atomicAdd(T *at, fibers_same<T> value) {
    return fibers_replace(at, (T)((typename std::make_unsigned<T>::type) * at + value));
}
template <typename T> T atomicOr(T *at, fibers_same<T> value) {
    return fibers_replace(at, (T)(*at | value));
}
template <typename T> T atomicExch(T *at, fibers_same<T> value) {
    return fibers_replace(at, value);
}
template <typename T> T atomicCAS(T *at, fibers_same<T> expected, fibers_same<T> value) {
    return fibers_replace(at, *at == expected ? value : *at);
}

/* ---- arithmetic ------------------------------------------------------------------------------------------------- */

/* These sources are compiled without contraction, so that plain operators round once. */
inline float __fmul_rn(float a, float b) {
    return a * b;
}
inline float __fadd_rn(float a, float b) {
    return a + b;
}
inline float __fsub_rn(float a, float b) {
    return a - b;
}
inline float __fdiv_rn(float a, float b) {
    return a / b;
}
inline float __fsqrt_rn(float a) {
    return sqrtf(a);
}
inline float __fmaf_rn(float a, float b, float c) {
    return fmaf(a, b, c);
}
inline double __dmul_rn(double a, double b) {
    return a * b;
}
inline double __dadd_rn(double a, double b) {
    return a + b;
}
inline float rsqrtf(float a) {
    return 1.0f / sqrtf(a);
}
inline float __expf(float a) {
    return expf(a);
}
inline float __logf(float a) {
    return logf(a);
}
inline float __fdividef(float a, float b) {
    return a / b;
}

template <typename To, typename From> To fibers_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
inline unsigned __float_as_uint(float a) {
    return fibers_bits<unsigned>(a);
}
inline int __float_as_int(float a) {
    return fibers_bits<int>(a);
}
inline float __uint_as_float(unsigned a) {
    return fibers_bits<float>(a);
}
inline float __int_as_float(int a) {
    return fibers_bits<float>(a);
}

/* As CUDA's overloads: mixed arguments meet in their common type, and the number wins over NaN. */
template <typename A, typename B> constexpr std::common_type_t<A, B> min(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point<T>::value)
        return std::is_same<T, float>::value ? fminf((float)a, (float)b) : fmin(a, b);
    else return (T)b < (T)a ? (T)b : (T)a;
}
template <typename A, typename B> constexpr std::common_type_t<A, B> max(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point<T>::value)
        return std::is_same<T, float>::value ? fmaxf((float)a, (float)b) : fmax(a, b);
    else return (T)a < (T)b ? (T)b : (T)a;
}

template <typename T> T __ldg(const T *p) {
    return *p;
}
inline int __popc(unsigned a) {
    return __builtin_popcount(a);
}
inline int __popcll(unsigned long long a) {
    return __builtin_popcountll(a);
}
inline int __ffs(int a) {
    return __builtin_ffs(a);
}
inline int __clz(int a) {
    return a == 0 ? 32 : __builtin_clz((unsigned)a);
}
