/* A model as its file describes it: hyper-parameters, the tensors of each layer, the tokenizer. Nothing is dequantised
 * here; a backend takes the weights from the mapped file. */
#pragma once

#include "tracer/arch.h"
#include "tracer/gguf.h"
#include "tracer/tokenizer.h"

#include <stddef.h>
#include <stdint.h>

typedef struct model_layer {
    const gguf_tensor *tensor[SLOT_COUNT]; /* NULL: an optional one that the file does not have */
} model_layer;

typedef struct model {
    gguf *file;
    const arch *arch;
    char *name; /* general.name, or the file's name */
    int32_t n_layer, n_head, n_kv_head, head_dim, n_embd, n_ff, n_vocab;
    int32_t n_context; /* positions the model was made for */
    int32_t rope_dims; /* of head_dim; the rest is not turned */
    double rope_base;
    float norm_eps;
    float scale;     /* scores = scale * q.k */
    float softcap;   /* 0 = none */
    int32_t *window; /* [n_layer]; 0 = no window */
    const gguf_tensor *embedding, *output_norm;
    const gguf_tensor *output; /* == embedding where tied */
    model_layer *layer;        /* [n_layer] */
    size_t layer_capacity;
} model;

/* Open a GGUF file, check every hyper-parameter against the shapes of the tensors, by name, before anything large is
 * allocated. Unknown architectures, rope scaling and mixtures of experts are refused by name. Unused tensors are
 * counted on stderr, and listed with -v. */
int model_open(const char *path, model **out);
void model_close(model *m); /* accepts NULL */

/* The tokenizer that the file carries. */
int model_tokenizer(const model *m, tokenizer **out);

/* The shape of a slot: outputs x inputs; a vector has 1 output. */
void model_slot_shape(const model *m, arch_slot slot, int64_t *outputs, int64_t *inputs);

/* Multiplications and additions of one forward pass over n tokens, causal attention counted as the triangle it is. */
double model_flops(const model *m, int32_t n);

/* What gradients of `sets` label sets add to it: layers computed again from their inputs, and the way back. */
double model_gradient_flops(const model *m, int32_t n, int32_t sets);
