/* The CPU backend: f32 throughout, OpenBLAS on tiles of fixed size under our own threads. */
#pragma once

#include "tracer/backend.h"

extern const backend cpu_backend;
extern const backend_options cpu_options; /* the only ones it takes */

/* Weights in f32. Matrices [outputs][inputs]; q, k and v stand together, in this order, so that one product gives all
 * three. */
typedef struct cpu_layer {
    float *attn_norm, *qkv, *qkv_bias /* NULL = none */, *o, *ffn_norm, *gate, *up, *down;
} cpu_layer;

struct backend_state {
    const model *m;
    pool *p;
    cpu_layer *layer; /* [n_layer] */
    float *embedding, *output_norm, *output /* == embedding where tied */;
    void *block; /* holds all weights */
    char device[160];
};

int cpu_load(const model *m, pool *p, const backend_options *o, backend_state **out);
void cpu_unload(backend_state *s);
int cpu_forward(backend_state *s, const int32_t *tokens, int32_t n, const int32_t *evict_at, const forward_sink *sink);
int cpu_forward_backward(backend_state *s, const int32_t *tokens, int32_t n, const int32_t *evict_at,
                         const forward_sink *sink, const label_plan *labels, const gradient_sink *gradients);
