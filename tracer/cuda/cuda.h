/* The CUDA backend: what its parts share. Host logic is C; kernels.h and device.h are what it runs on, so the same code
 * runs on a CPU under the tests' device. All device work is ordered on the compute lane; copies of results and of
 * offloaded layers run beside it. */
#pragma once

#include "tracer/backend.h"
#include "tracer/cuda/device.h"

extern const backend kvlag_cuda_backend;

/* One layer on the device. Matrices [outputs][inputs] without padding, of the state's type; q, k and v stand together.
 * Valid until the next cuda_layer_get. */
typedef struct cuda_layer {
    const float *attn_norm, *ffn_norm, *qkv_bias /* NULL = none */;
    const void *qkv, *o, *gate, *up, *down;
} cuda_layer;

typedef struct cuda_weights cuda_weights;

struct backend_state {
    const model *m;
    pool *p;
    device *d;
    dtype type; /* of the products' inputs */
    cuda_weights *w;
    void *cast; /* scratch: rows of a product's input in bf16 */
    size_t cast_bytes;
};

/* Refuse by name a model that asks for what is not computed here (supports.c). */
int cuda_check_model(const model *m);

/* ---- weights (weights.c) ---------------------------------------------------------------------------------------- */

int cuda_weights_new(backend_state *s, const backend_options *o);
void cuda_weights_free(backend_state *s);
/* Layer `layer`, ready for work ordered from now on; `next` is the one that comes after it (-1: none): where layers
 * live in host memory its copy starts now. */
int cuda_layer_get(backend_state *s, int layer, int next, cuda_layer *out);
/* x[r] = embedding of ids[r] (device). */
int cuda_embed(backend_state *s, const int32_t *ids, size_t rows, float *x, size_t ld);
/* Rows of the output matrix in f32: row r is that of ids[r] (device; negative: zeros). */
int cuda_output_rows(backend_state *s, const int32_t *ids, size_t rows, float *out, size_t ld);
const float *cuda_output_norm(const backend_state *s);
/* The output matrix from id `first` on: *n rows of it at *w, until the next call. */
int cuda_output_slice(backend_state *s, size_t first, size_t *n, const void **w);

/* ---- products (products.c) -------------------------------------------------------------------------------------- */

/* out (+)= in * w^T or, `back`, in * w, with `in` of the state's type. w is [outputs][inputs] without padding: `inner`
 * and `cols` are its inputs and outputs, or the other way round. */
typedef struct cuda_product {
    size_t rows, inner, cols;
    const void *in, *w;
    size_t ld_in, ld_out;
    float *out;
    bool back, accumulate;
} cuda_product;
int cuda_multiply(backend_state *s, const cuda_product *p);
/* The same with `in` in f32, rounded on the way where the state's type is bf16. */
int cuda_multiply_f32(backend_state *s, const cuda_product *p);
/* Logits of n rows of final hidden states, or, back, what gradients p of logits (of the state's type) ask of them. */
int cuda_logits(backend_state *s, const float *hidden, size_t ld, size_t n, float *logits, size_t ld_logits);
int cuda_logits_back(backend_state *s, const void *p, size_t ld_p, size_t n, float *out, size_t ld);

/* ---- passes ----------------------------------------------------------------------------------------------------- */

int cuda_forward(backend_state *s, const int32_t *tokens, int32_t n, const int32_t *evict_at, const forward_sink *sink);
int cuda_forward_backward(backend_state *s, const int32_t *tokens, int32_t n, const int32_t *evict_at,
                          const forward_sink *sink, const label_plan *labels, const gradient_sink *gradients);
int cuda_project(backend_state *s, const float *hidden, size_t n, size_t stride, float *out, size_t stride_out);

int cuda_steps_new(backend_state *s, size_t n, const bool *wants_rows, int32_t n_tokens, backend_steps **out);
void cuda_steps_free(backend_steps *steps);
int cuda_steps_next(backend_steps *steps, int32_t token, step_view *out);
void cuda_steps_forget(backend_steps *steps, size_t copy, int layer, int kv_head, const int32_t *evict_at);
