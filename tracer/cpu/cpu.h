/* The CPU backend: f32 throughout, OpenBLAS on tiles of fixed size under our own threads. */
#pragma once

#include "tracer/backend.h"

extern const backend cpu_backend;
extern const backend_options cpu_options; /* the only ones it takes */

/* Weights in f32, by slot; NULL where the layer has none. Matrices [outputs][inputs], vectors padded. q, k and v stand
 * one after another, so that at[SLOT_Q] is one matrix that gives all three; so do their biases, of which missing ones
 * are 0 where any is there. */
typedef struct cpu_layer {
    float *at[SLOT_COUNT];
} cpu_layer;

struct backend_state {
    const model *m;
    pool *p;
    cpu_layer *layer; /* [n_layer] */
    float *embedding, *positions /* NULL = none */, *output /* == embedding where tied */;
    float *output_norm, *output_norm_bias /* NULL = none */;
    void *block; /* holds all weights */
    char device[160];
};

/* x [n_embd] = what token `token` at position t enters the first layer with. */
void cpu_embed_token(const backend_state *s, int32_t token, size_t t, float *x);

/* Refuse texts that are longer than a table of positions. */
int cpu_check_length(const backend_state *s, int32_t n);

int cpu_load(const model *m, pool *p, const backend_options *o, backend_state **out);
void cpu_unload(backend_state *s);
int cpu_forward(backend_state *s, const int32_t *tokens, int32_t n, const int32_t *evict_at, const forward_sink *sink);
int cpu_forward_backward(backend_state *s, const int32_t *tokens, int32_t n, const int32_t *evict_at,
                         const forward_sink *sink, const label_plan *labels, const gradient_sink *gradients);
