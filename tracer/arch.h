/* Architectures as data: what differs from one model family to the next is a row of one table, and the one forward
 * pass reads the row.
 *
 * All rows so far share: RMS norms before attention and feed-forward, separate q, k, v projections with optional
 * biases, a SiLU-gated feed-forward, full causal attention, no soft-cap and no scale on the embedding. A family that
 * differs brings the field for it, and its case in the forward pass, together with its row. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

/* The tensors of one layer. Matrices are [outputs][inputs], as GGUF stores them. */
typedef enum arch_slot {
    SLOT_ATTN_NORM, /* [n_embd] */
    SLOT_Q,         /* [n_head*head_dim][n_embd] */
    SLOT_K,         /* [n_kv_head*head_dim][n_embd] */
    SLOT_V,         /* [n_kv_head*head_dim][n_embd] */
    SLOT_Q_BIAS,    /* [n_head*head_dim] */
    SLOT_K_BIAS,    /* [n_kv_head*head_dim] */
    SLOT_V_BIAS,    /* [n_kv_head*head_dim] */
    SLOT_O,         /* [n_embd][n_head*head_dim] */
    SLOT_FFN_NORM,  /* [n_embd] */
    SLOT_GATE,      /* [n_ff][n_embd] */
    SLOT_UP,        /* [n_ff][n_embd] */
    SLOT_DOWN,      /* [n_embd][n_ff] */
    SLOT_COUNT
} arch_slot;

/* Which dimensions rotary position embedding (Su et al. 2021) turns together. */
typedef enum arch_rope {
    ARCH_ROPE_INTERLEAVED, /* 2i with 2i+1: the paper's form; GGUF permutes Llama's q and k rows to it */
    ARCH_ROPE_HALVES       /* i with i + dims/2: "neox" */
} arch_rope;

typedef struct arch_tensor {
    const char *name; /* behind "blk.N."; NULL: this family has no such tensor */
    bool optional;
} arch_tensor;

typedef struct arch {
    const char *name; /* general.architecture, and the prefix of the family's keys */
    arch_rope rope;
    const char *embedding, *output_norm;
    const char *output; /* absent in the file: tied to the embedding */
    arch_tensor layer[SLOT_COUNT];
} arch;

/* The row of that name (n bytes), or NULL. */
const arch *arch_find(const char *name, size_t n);

/* "llama, ...": every name, for messages. `out` has `size` bytes; returns out. */
char *arch_names(char *out, size_t size);
