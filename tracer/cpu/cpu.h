/* The CPU backend: f32 throughout, OpenBLAS on tiles of fixed size under our own threads.
 *
 * Weights stay in the mapped file. Vectors are kept in f32; matrices become f32 when they are multiplied with: those of
 * one layer at a time for a pass over a text, some rows at a time for the steps and for the output matrix. So memory is
 * the file's (which the system may drop and read again), one layer in f32 and the activations. */
#pragma once

#include "tracer/backend.h"

extern const backend cpu_backend;
extern const backend_options cpu_options; /* the only ones it takes */

/* Weights in f32, by slot; NULL where the layer has none. Vectors, padded: of every layer. Matrices [outputs][inputs]:
 * of the layer that cpu_take_layer took last, in memory that all layers share. q, k and v stand one after another, so
 * that at[SLOT_Q] is one matrix that gives all three; so do their biases, of which missing ones are 0 where any is
 * there. */
typedef struct cpu_layer {
    float *at[SLOT_COUNT];
} cpu_layer;

/* Some rows of one matrix on their way to f32: a task of cpu_take_layer. */
typedef struct cpu_part {
    arch_slot slot;
    size_t row0, n;
} cpu_part;

struct backend_state {
    const model *m;
    pool *p;
    cpu_layer *layer;                   /* [n_layer] */
    float *positions /* NULL = none */; /* [n_context][n_embd] */
    float *output_norm, *output_norm_bias /* NULL = none */;
    float **panel;  /* [threads] scratch for cpu_rows */
    cpu_part *part; /* [n_parts] the matrices of a layer */
    size_t n_parts;
    int taken; /* whose matrices stand in f32; -1: no layer's */
    void *block;
    char device[160];
};

/* The matrices of a layer in f32. */
int cpu_take_layer(backend_state *s, int layer);

/* A matrix in the file: one weight, or q, k and v, whose outputs follow one another. */
typedef struct cpu_matrix {
    const model_weight *weight; /* [n] */
    size_t part[3], n;          /* outputs of each weight */
    size_t outputs, inputs;
} cpu_matrix;

cpu_matrix cpu_matrix_of(const model *m, int layer, arch_slot slot); /* SLOT_Q: with k and v */
cpu_matrix cpu_output_matrix(const model *m);

/* Rows row0 .. row0+n-1 in f32: where they lie, if the file holds just these values, else put into `panel`. A panel
 * takes TILE_COLS_MAX rows of n_embd inputs, or CPU_STRIP_ROWS of any matrix. Thread-safe. */
enum { CPU_STRIP_ROWS = 64 };
int cpu_rows(const cpu_matrix *w, size_t row0, size_t n, float *panel, const float **out);

/* x [n_embd] = what token `token` at position t enters the first layer with. */
int cpu_embed_token(const backend_state *s, int32_t token, size_t t, float *x);

/* Refuse texts that are longer than a table of positions. */
int cpu_check_length(const backend_state *s, int32_t n);

/* What `load` reads and refuses; `s` has its model and pool. */
int cpu_weights_new(backend_state *s);
void cpu_weights_free(backend_state *s);

int cpu_forward(backend_state *s, const int32_t *tokens, int32_t n, const int32_t *evict_at, const forward_sink *sink);
int cpu_forward_backward(backend_state *s, const int32_t *tokens, int32_t n, const int32_t *evict_at,
                         const forward_sink *sink, const label_plan *labels, const gradient_sink *gradients);
