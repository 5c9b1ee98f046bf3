/* The seam to the device: memory, streams, copies, matrix products. device_cuda.cu fills it with the CUDA runtime and
 * cuBLAS; tests/cuda/device_fibers.cc with malloc and OpenBLAS, so that the whole backend runs, and is tested, on a
 * CPU. C and C++ read this header.
 *
 * Functions return 0 or ERR_DATA with a message that names the failed call, file and line, and what device_at said.
 * Work on one stream runs in order; the two streams run side by side but where device_wait ties them. One thread. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct device device;
typedef enum device_lane { STREAM_COMPUTE, STREAM_COPY, N_STREAMS } device_lane;

/* Open a device: "" = the first that CUDA_VISIBLE_DEVICES shows, else its index in text. Without a driver or device:
 * "no CUDA device (driver not found); use --backend cpu". */
int device_open(const char *index, device **out);
void device_close(device *d); /* accepts NULL; releases what is left */
/* "NVIDIA H200 (sm_90, CUDA 13.0)". Owned by the device. */
const char *device_name(const device *d);
size_t device_free_bytes(const device *d);
/* What is under way, for messages: "layer 3, 8192 tokens". Copied. */
void device_at(device *d, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The cudaStream_t of a lane (NULL on the CPU). */
void *device_stream(const device *d, device_lane lane);
/* The state of a launch just made: 0 or the error, named by kernel, file and line. */
int device_launched(device *d, const char *kernel, const char *file, int line);

/* ---- memory ----------------------------------------------------------------------------------------------------- */

/* `bytes` of device memory, 256-byte aligned, contents undefined. Too little: "out of device memory for WHAT: N MiB
 * needed, M MiB free; use fewer --tokens, --precision bf16, --weights blocks or --offload". */
int device_new(device *d, size_t bytes, const char *what, void **out);
void device_release(device *d, void *p); /* accepts NULL; waits for the device */
/* Page-locked host memory, which copies run from and to without the host's help. Zeroed. */
int device_pinned(device *d, size_t bytes, const char *what, void **out);
void device_unpin(device *d, void *p); /* accepts NULL */

/* Copies, ordered on a lane. Host memory that is not pinned makes the call wait. Rows: `width` bytes from each of n
 * rows, strides in bytes. */
int device_to(device *d, device_lane lane, void *to, const void *from, size_t bytes);
int device_from(device *d, device_lane lane, void *to, const void *from, size_t bytes);
int device_from_rows(device *d, device_lane lane, void *to, size_t ld_to, const void *from, size_t ld_from,
                     size_t width, size_t n);
int device_copy(device *d, device_lane lane, void *to, const void *from, size_t bytes); /* within the device */
int device_fill(device *d, device_lane lane, void *to, int byte, size_t bytes);

/* ---- order ------------------------------------------------------------------------------------------------------ */

/* A point in a lane's work. */
typedef struct device_mark device_mark;
int device_mark_new(device *d, device_mark **out);
void device_mark_free(device_mark *m); /* accepts NULL */
int device_mark_set(device *d, device_mark *m, device_lane lane); /* here: after all that was ordered so far */
int device_wait(device *d, device_lane lane, const device_mark *m); /* the lane waits for the point */
int device_reach(device *d, const device_mark *m);                  /* the host waits for it */
int device_sync(device *d);                                         /* the host waits for everything */

/* Seconds a lane was busy between device_busy_begin and device_busy_end pairs so far (events on the lane). */
int device_busy_begin(device *d, device_lane lane);
int device_busy_end(device *d, device_lane lane);
double device_busy(device *d, device_lane lane);

/* ---- products --------------------------------------------------------------------------------------------------- */

typedef enum dtype { DTYPE_F32, DTYPE_BF16 } dtype;
static inline size_t dtype_size(dtype t) {
    return t == DTYPE_F32 ? 4 : 2;
}

/* out[r][c] = (accumulate ? out[r][c] : 0) + sum over i < inner of a[r][i] * b, with b[c][i] (a weight matrix, stored
 * [outputs][inputs]) or, `back`, b[i][c]. Row-major, strides in elements; a and b of one type, out f32. F32 products
 * are full f32 (no TF32); BF16 accumulates in f32. Sums never depend on chance: the same shapes give the same bits. */
typedef struct device_product {
    size_t rows, cols, inner;
    dtype type;
    const void *a, *b;
    size_t lda, ldb;
    bool back, accumulate;
    float *out;
    size_t ldo;
} device_product;
int device_multiply(device *d, const device_product *p); /* on the compute lane */

#ifdef __cplusplus
}
#endif
