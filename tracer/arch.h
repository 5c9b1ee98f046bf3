/* Architectures as data: what differs from one model family to the next is a row of one table, and one forward and one
 * backward pass read it through `model`. A row holds what no file says; what files say (sizes, windows, RoPE scaling,
 * optional biases) stands in `model`. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The weights of one layer. Matrices are [outputs][inputs]. */
typedef enum arch_slot {
    SLOT_ATTN_NORM,      /* [n_embd]; absent: attention reads the residual stream as it is (OLMo2) */
    SLOT_ATTN_NORM_BIAS, /* [n_embd] of a LayerNorm */
    SLOT_Q,              /* [n_head*head_dim][n_embd] */
    SLOT_K,              /* [n_kv_head*head_dim][n_embd] */
    SLOT_V,              /* [n_kv_head*head_dim][n_embd] */
    SLOT_Q_BIAS,         /* [n_head*head_dim] */
    SLOT_K_BIAS,         /* [n_kv_head*head_dim] */
    SLOT_V_BIAS,         /* [n_kv_head*head_dim] */
    SLOT_Q_NORM,         /* [head_dim], or [n_head*head_dim] where qk_norm is ARCH_QK_NORM_WHOLE */
    SLOT_K_NORM,         /* [head_dim], or [n_kv_head*head_dim] */
    SLOT_O,              /* [n_embd][n_head*head_dim] */
    SLOT_O_BIAS,         /* [n_embd] */
    SLOT_ATTN_POST_NORM, /* [n_embd] of what attention adds to the residual stream */
    SLOT_FFN_NORM,       /* [n_embd] */
    SLOT_FFN_NORM_BIAS,  /* [n_embd] */
    SLOT_GATE,           /* [n_ff][n_embd]; absent: no gate */
    SLOT_UP,             /* [n_ff][n_embd] */
    SLOT_UP_BIAS,        /* [n_ff] */
    SLOT_DOWN,           /* [n_embd][n_ff] */
    SLOT_DOWN_BIAS,      /* [n_embd] */
    SLOT_FFN_POST_NORM,  /* [n_embd] of what the feed-forward adds */
    SLOT_COUNT
} arch_slot;

/* Which dimensions rotary position embedding (Su et al. 2021) turns together. */
typedef enum arch_rope {
    ARCH_ROPE_INTERLEAVED, /* 2i with 2i+1: the paper's form; GGUF permutes Llama's q and k rows to it */
    ARCH_ROPE_HALVES       /* i with i + dims/2: "neox", and all of Hugging Face's */
} arch_rope;

typedef enum arch_norm {
    ARCH_NORM_RMS,  /* x / sqrt(mean x^2 + eps) * weight (Zhang and Sennrich 2019) */
    ARCH_NORM_LAYER /* (x - mean) / sqrt(variance + eps) * weight + bias (Ba et al. 2016) */
} arch_norm;

typedef enum arch_activation {
    ARCH_SILU,     /* x / (1 + exp(-x)) */
    ARCH_GELU_TANH /* x/2 (1 + tanh(sqrt(2/pi) (x + .044715 x^3))): "gelu_new", "gelu_pytorch_tanh" */
} arch_activation;

/* Norms of queries and keys before RoPE, always RMS. */
typedef enum arch_qk_norm {
    ARCH_QK_NORM_NONE,
    ARCH_QK_NORM_HEADS, /* each head on its own (Qwen3, Gemma3) */
    ARCH_QK_NORM_WHOLE  /* all heads together (OLMo2) */
} arch_qk_norm;

typedef struct arch {
    const char *name;    /* general.architecture of GGUF, and the prefix of its keys */
    const char *types;   /* model_type of config.json: "llama|mistral"; the first is the usual one */
    arch_rope gguf_rope; /* of its GGUF files; safetensors always have ARCH_ROPE_HALVES */
    arch_norm norm;
    arch_activation activation;
    arch_qk_norm qk_norm;
    bool learned_positions;   /* a table of position embeddings in place of RoPE (GPT-2) */
    bool scaled_embedding;    /* embeddings times sqrt(n_embd) (Gemma) */
    bool norm_plus_one;       /* safetensors hold norm weights less 1 (Gemma) */
    bool fused;               /* q, k, v in one tensor, one after another; gate and up likewise where there is a gate */
    bool transposed;          /* safetensors hold matrices as [inputs][outputs] (GPT-2's Conv1D) */
    uint32_t needs, may;      /* bit 1 << SLOT_x: slots that every layer has; slots that it may have */
    const char *const *names; /* [SLOT_COUNT] safetensors' names of a layer's weights, with %d for the layer */
    const char *embedding, *positions, *output_norm, *output_norm_bias, *output; /* safetensors' names; NULL: none */
} arch;

size_t arch_count(void);
const arch *arch_at(size_t i);

/* The row whose GGUF name it is, or whose model_type; n bytes. NULL: none. */
const arch *arch_find(const char *name, size_t n);
const arch *arch_find_type(const char *type, size_t n);

/* GGUF's name of a slot behind "blk.N.", the same in all families; of fused ones that of the fused tensor. */
const char *arch_gguf_name(const arch *a, arch_slot slot);

/* "llama, ...": every name (or every model_type), for messages. `out` has `size` bytes; returns out. */
char *arch_names(char *out, size_t size);
char *arch_types(char *out, size_t size);
