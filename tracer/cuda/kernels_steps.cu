/* Closed loop: what a single step needs beside the kernels of a pass. */
#include "tracer/cuda/kernels.h"
#include "tracer/cuda/port.h"

/* One block a (copy, kv head): its key and value move from the row of q | k | v to entry t of the caches. */
static __global__ void append(step_shape s, const float *qkv, size_t ld, float *keys, float *values) {
    size_t dim = (size_t)s.head_dim, head = blockIdx.x % (unsigned)s.n_kv_head, copy = blockIdx.x / (unsigned)s.n_kv_head;
    const float *k = qkv + copy * ld + ((size_t)s.n_head + head) * dim, *v = k + (size_t)s.n_kv_head * dim;
    size_t at = (blockIdx.x * s.capacity + s.t) * dim;
    for (size_t i = threadIdx.x; i < dim; i += blockDim.x) {
        keys[at + i] = k[i];
        values[at + i] = v[i];
    }
}

int k_append(device *d, const step_shape *s, const float *qkv, size_t ld, float *keys, float *values) {
    return LAUNCH(d, append, dim3((unsigned)(s->copies * (size_t)s->n_kv_head)), dim3(64), *s, qkv, ld, keys, values);
}
