/* A model as its file or folder describes it: hyper-parameters, the weights of each layer, the tokenizer. Nothing is
 * dequantised here; a backend takes the weights from the mapped files. */
#pragma once

#include "tracer/arch.h"
#include "tracer/tensor.h"
#include "tracer/tokenizer.h"

#include <stddef.h>
#include <stdint.h>

/* Where a weight lies: a tensor, or rows of a fused one, or a transposed one. tensor NULL: the layer has none. */
typedef struct model_weight {
    const tensor *tensor;
    uint64_t row0;   /* of the tensor's outputs (of a vector: its first element) */
    bool transposed; /* stored as [inputs][outputs] */
    bool plus_one;   /* the weight is what is stored, plus 1 */
} model_weight;

typedef struct model_layer {
    model_weight weight[SLOT_COUNT];
    int32_t rope; /* index of model.rope; -1: positions are not turned in (NoPE) */
} model_layer;

/* One way of turning positions into angles: dimension pair i of token t is turned by t * inverse[i] radians, and both
 * values are multiplied by `scale` (YaRN's attention factor; 1 elsewhere). */
typedef struct model_rope {
    double *inverse; /* [rope_dims/2] */
    double scale;
} model_rope;

enum { MODEL_ROPES = 2 }; /* Gemma 3 has two: of local and of global layers */

typedef struct model {
    const arch *arch;
    char *path; /* of the file or folder, as given */
    char *name; /* general.name, or the file's or folder's name */
    int32_t n_layer, n_head, n_kv_head, head_dim, n_embd, n_ff, n_vocab;
    int32_t n_context; /* positions the model was made for */
    arch_rope rope_kind;
    int32_t rope_dims; /* of head_dim; the rest is not turned. 0: learned positions */
    int32_t n_rope;
    model_rope rope[MODEL_ROPES];
    char *rope_text; /* "base 10000, neox, 64 dims", its scaling, and which layers differ: for the trace */
    float norm_eps;
    float scale;           /* scores = scale * q.k */
    float softcap;         /* of scores: cap * tanh(score / cap); 0 = none */
    float logit_softcap;   /* of the final logits; 0 = none */
    float embedding_scale; /* 1, or what embeddings are multiplied by */
    model_weight embedding, positions, output_norm, output_norm_bias;
    model_weight output; /* the same tensor as `embedding` where tied */
    model_layer *layer;  /* [n_layer] */
    int32_t *window;     /* [n_layer] entries that a step sees, its own included; 0 = all */
    size_t layer_capacity;
    struct model_source *source; /* the open file (model_gguf.c) or folder (model_folder.c) */
} model;

/* Open a GGUF file (any shard of a split one) or a folder with config.json and safetensors. Every hyper-parameter is
 * checked against the shapes of the tensors, by name, before anything large is allocated. Unknown architectures, RoPE
 * types, activations, mixtures of experts and whatever else changes the computation and is not known are refused by
 * name. Unused tensors are counted on stderr, and listed with -v. */
int model_open(const char *path, model **out);
void model_close(model *m); /* accepts NULL */

/* The tokenizer that the file or folder carries. */
int model_tokenizer(const model *m, tokenizer **out);

/* The chat template that it carries (Jinja), NUL-terminated, owned by the caller (mem_free); *out NULL where there is
 * none. */
int model_chat_template(const model *m, char **out);

/* The shape of a slot: outputs x inputs; a vector has 1 output. */
void model_slot_shape(const model *m, arch_slot slot, int64_t *outputs, int64_t *inputs);

/* Values of outputs row0 .. row0+n-1 of a weight with `inputs` inputs as f32, [n][inputs]; of a vector, row 0 of 1.
 * Thread-safe. A transposed one must be of a type without blocks. */
int model_read(const model_weight *w, size_t inputs, size_t row0, size_t n, float *out);

/* Multiplications and additions of one forward pass over n tokens, causal attention counted as the triangle it is. */
double model_flops(const model *m, int32_t n);

/* What gradients of `sets` label sets add to it: layers computed again from their inputs, and the way back. */
double model_gradient_flops(const model *m, int32_t n, int32_t sets);
