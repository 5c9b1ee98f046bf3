/* What the CUDA backend computes, of all that the table of architectures can ask for. */
#include "base/err.h"
#include "tracer/cuda/cuda.h"

enum { HEAD_DIM_MAX = 256 /* of the attention kernels */ };

/* Slots that no kernel reads, or that every layer must have. */
static const struct {
    arch_slot slot;
    bool needed;
    const char *name;
} slots[] = {{SLOT_ATTN_NORM, true, "layers without a norm before attention"},
             {SLOT_FFN_NORM, true, "layers without a norm before the feed-forward"},
             {SLOT_ATTN_POST_NORM, false, "norms behind attention"},
             {SLOT_FFN_POST_NORM, false, "norms behind the feed-forward"},
             {SLOT_Q_NORM, false, "norms of queries"},
             {SLOT_K_NORM, false, "norms of keys"},
             {SLOT_GATE, true, "feed-forwards without a gate"},
             {SLOT_O_BIAS, false, "biases of the output projection"},
             {SLOT_UP_BIAS, false, "biases of the feed-forward"},
             {SLOT_DOWN_BIAS, false, "biases of the feed-forward"}};

static const char *missing_of_slots(const model *m) {
    for (size_t i = 0; i < sizeof slots / sizeof *slots; i++)
        for (int32_t layer = 0; layer < m->n_layer; layer++)
            if ((m->layer[layer].weight[slots[i].slot].tensor != NULL) != slots[i].needed) return slots[i].name;
    return NULL;
}

static const char *missing_of_weights(const model *m) {
    for (int32_t layer = 0; layer < m->n_layer; layer++)
        for (int slot = 0; slot < SLOT_COUNT; slot++) {
            const model_weight *w = &m->layer[layer].weight[slot];
            if (w->transposed) return "transposed weights";
            if (w->plus_one) return "norm weights that are stored less 1";
        }
    return m->output_norm.plus_one ? "norm weights that are stored less 1" : NULL;
}

/* The first thing that is not computed, or NULL. */
static const char *missing(const model *m) {
    if (m->arch->norm != ARCH_NORM_RMS) return "LayerNorm";
    if (m->arch->learned_positions) return "learned positions";
    if (m->arch->activation != ARCH_SILU) return "GELU";
    if (m->embedding_scale != 1) return "scaled embeddings";
    if (m->logit_softcap > 0) return "soft-capped logits";
    if (m->n_rope != 1) return "more than one RoPE";
    const char *slot = missing_of_slots(m);
    return slot ? slot : missing_of_weights(m);
}

int cuda_check_model(const model *m) {
    if (m->head_dim > HEAD_DIM_MAX)
        return err_set(ERR_DATA, "%s: heads of %d dimensions; the CUDA backend serves up to %d; use --backend cpu",
                       m->name, m->head_dim, HEAD_DIM_MAX);
    const char *what = missing(m);
    if (!what) return 0;
    return err_set(ERR_DATA, "%s (%s): the CUDA backend does not compute %s; use --backend cpu", m->name, m->arch->name,
                   what);
}
