#include "tracer/arch.h"
#include "base/text.h"

#include <string.h>

#define BIT(slot) (1u << SLOT_##slot)
#define ATTENTION (BIT(Q) | BIT(K) | BIT(V) | BIT(O))
#define GATED (BIT(GATE) | BIT(UP) | BIT(DOWN))
#define PRE_NORMS (BIT(ATTN_NORM) | BIT(FFN_NORM))
#define POST_NORMS (BIT(ATTN_POST_NORM) | BIT(FFN_POST_NORM))
#define QK_NORMS (BIT(Q_NORM) | BIT(K_NORM))
#define QKV_BIASES (BIT(Q_BIAS) | BIT(K_BIAS) | BIT(V_BIAS))

/* Hugging Face's names, in most families. */
#define LLAMA_ATTENTION                                                                                                \
    [SLOT_ATTN_NORM] = "model.layers.%d.input_layernorm.weight", [SLOT_Q] = "model.layers.%d.self_attn.q_proj.weight", \
    [SLOT_K] = "model.layers.%d.self_attn.k_proj.weight", [SLOT_V] = "model.layers.%d.self_attn.v_proj.weight",        \
    [SLOT_Q_BIAS] = "model.layers.%d.self_attn.q_proj.bias", [SLOT_K_BIAS] = "model.layers.%d.self_attn.k_proj.bias",  \
    [SLOT_V_BIAS] = "model.layers.%d.self_attn.v_proj.bias",                                                           \
    [SLOT_Q_NORM] = "model.layers.%d.self_attn.q_norm.weight",                                                         \
    [SLOT_K_NORM] = "model.layers.%d.self_attn.k_norm.weight", [SLOT_O] = "model.layers.%d.self_attn.o_proj.weight",   \
    [SLOT_O_BIAS] = "model.layers.%d.self_attn.o_proj.bias"
#define LLAMA_FEED_FORWARD                                                                                  \
    [SLOT_GATE] = "model.layers.%d.mlp.gate_proj.weight", [SLOT_UP] = "model.layers.%d.mlp.up_proj.weight", \
    [SLOT_DOWN] = "model.layers.%d.mlp.down_proj.weight"
#define LLAMA_TOP \
    .embedding = "model.embed_tokens.weight", .output_norm = "model.norm.weight", .output = "lm_head.weight"

static const char *const llama_names[SLOT_COUNT] = {
    LLAMA_ATTENTION,
    LLAMA_FEED_FORWARD,
    [SLOT_FFN_NORM] = "model.layers.%d.post_attention_layernorm.weight",
};

/* Gemma 2 and 3: norms before and after both halves. */
static const char *const gemma_names[SLOT_COUNT] = {
    LLAMA_ATTENTION,
    LLAMA_FEED_FORWARD,
    [SLOT_ATTN_POST_NORM] = "model.layers.%d.post_attention_layernorm.weight",
    [SLOT_FFN_NORM] = "model.layers.%d.pre_feedforward_layernorm.weight",
    [SLOT_FFN_POST_NORM] = "model.layers.%d.post_feedforward_layernorm.weight",
};

/* OLMo 2: norms after both halves only. */
static const char *const olmo2_names[SLOT_COUNT] = {
    LLAMA_ATTENTION,
    LLAMA_FEED_FORWARD,
    [SLOT_ATTN_POST_NORM] = "model.layers.%d.post_attention_layernorm.weight",
    [SLOT_FFN_POST_NORM] = "model.layers.%d.post_feedforward_layernorm.weight",
};

static const char *const phi3_names[SLOT_COUNT] = {
    [SLOT_ATTN_NORM] = "model.layers.%d.input_layernorm.weight",
    [SLOT_Q] = "model.layers.%d.self_attn.qkv_proj.weight",
    [SLOT_K] = "model.layers.%d.self_attn.qkv_proj.weight",
    [SLOT_V] = "model.layers.%d.self_attn.qkv_proj.weight",
    [SLOT_O] = "model.layers.%d.self_attn.o_proj.weight",
    [SLOT_FFN_NORM] = "model.layers.%d.post_attention_layernorm.weight",
    [SLOT_GATE] = "model.layers.%d.mlp.gate_up_proj.weight",
    [SLOT_UP] = "model.layers.%d.mlp.gate_up_proj.weight",
    [SLOT_DOWN] = "model.layers.%d.mlp.down_proj.weight",
};

static const char *const gpt2_names[SLOT_COUNT] = {
    [SLOT_ATTN_NORM] = "transformer.h.%d.ln_1.weight",   [SLOT_ATTN_NORM_BIAS] = "transformer.h.%d.ln_1.bias",
    [SLOT_Q] = "transformer.h.%d.attn.c_attn.weight",    [SLOT_K] = "transformer.h.%d.attn.c_attn.weight",
    [SLOT_V] = "transformer.h.%d.attn.c_attn.weight",    [SLOT_Q_BIAS] = "transformer.h.%d.attn.c_attn.bias",
    [SLOT_K_BIAS] = "transformer.h.%d.attn.c_attn.bias", [SLOT_V_BIAS] = "transformer.h.%d.attn.c_attn.bias",
    [SLOT_O] = "transformer.h.%d.attn.c_proj.weight",    [SLOT_O_BIAS] = "transformer.h.%d.attn.c_proj.bias",
    [SLOT_FFN_NORM] = "transformer.h.%d.ln_2.weight",    [SLOT_FFN_NORM_BIAS] = "transformer.h.%d.ln_2.bias",
    [SLOT_UP] = "transformer.h.%d.mlp.c_fc.weight",      [SLOT_UP_BIAS] = "transformer.h.%d.mlp.c_fc.bias",
    [SLOT_DOWN] = "transformer.h.%d.mlp.c_proj.weight",  [SLOT_DOWN_BIAS] = "transformer.h.%d.mlp.c_proj.bias",
};

static const arch table[] = {
    {.name = "llama",
     .types = "llama|mistral",
     .gguf_rope = ARCH_ROPE_INTERLEAVED,
     .needs = PRE_NORMS | ATTENTION | GATED,
     .may = QKV_BIASES | BIT(O_BIAS),
     .names = llama_names,
     LLAMA_TOP},
    {.name = "qwen2",
     .types = "qwen2",
     .gguf_rope = ARCH_ROPE_HALVES,
     .needs = PRE_NORMS | ATTENTION | QKV_BIASES | GATED,
     .names = llama_names,
     LLAMA_TOP},
    {.name = "qwen3",
     .types = "qwen3",
     .gguf_rope = ARCH_ROPE_HALVES,
     .qk_norm = ARCH_QK_NORM_HEADS,
     .needs = PRE_NORMS | ATTENTION | QK_NORMS | GATED,
     .may = QKV_BIASES | BIT(O_BIAS),
     .names = llama_names,
     LLAMA_TOP},
    {.name = "gemma",
     .types = "gemma",
     .gguf_rope = ARCH_ROPE_HALVES,
     .activation = ARCH_GELU_TANH,
     .scaled_embedding = true,
     .norm_plus_one = true,
     .needs = PRE_NORMS | ATTENTION | GATED,
     .names = llama_names,
     LLAMA_TOP},
    {.name = "gemma2",
     .types = "gemma2",
     .gguf_rope = ARCH_ROPE_HALVES,
     .activation = ARCH_GELU_TANH,
     .scaled_embedding = true,
     .norm_plus_one = true,
     .needs = PRE_NORMS | POST_NORMS | ATTENTION | GATED,
     .names = gemma_names,
     LLAMA_TOP},
    {.name = "gemma3",
     .types = "gemma3_text",
     .gguf_rope = ARCH_ROPE_HALVES,
     .activation = ARCH_GELU_TANH,
     .qk_norm = ARCH_QK_NORM_HEADS,
     .scaled_embedding = true,
     .norm_plus_one = true,
     .needs = PRE_NORMS | POST_NORMS | ATTENTION | QK_NORMS | GATED,
     .names = gemma_names,
     LLAMA_TOP},
    {.name = "phi3",
     .types = "phi3",
     .gguf_rope = ARCH_ROPE_HALVES,
     .fused = true,
     .needs = PRE_NORMS | ATTENTION | GATED,
     .names = phi3_names,
     LLAMA_TOP},
    {.name = "gpt2",
     .types = "gpt2",
     .norm = ARCH_NORM_LAYER,
     .activation = ARCH_GELU_TANH,
     .learned_positions = true,
     .fused = true,
     .transposed = true,
     .needs = PRE_NORMS | BIT(ATTN_NORM_BIAS) | BIT(FFN_NORM_BIAS) | ATTENTION | QKV_BIASES | BIT(O_BIAS) | BIT(UP) |
              BIT(UP_BIAS) | BIT(DOWN) | BIT(DOWN_BIAS),
     .names = gpt2_names,
     .embedding = "transformer.wte.weight",
     .positions = "transformer.wpe.weight",
     .output_norm = "transformer.ln_f.weight",
     .output_norm_bias = "transformer.ln_f.bias",
     .output = "lm_head.weight"},
    {.name = "smollm3",
     .types = "smollm3",
     .gguf_rope = ARCH_ROPE_INTERLEAVED,
     .needs = PRE_NORMS | ATTENTION | GATED,
     .may = QKV_BIASES | BIT(O_BIAS),
     .names = llama_names,
     LLAMA_TOP},
    {.name = "olmo2",
     .types = "olmo2",
     .gguf_rope = ARCH_ROPE_HALVES,
     .qk_norm = ARCH_QK_NORM_WHOLE,
     .needs = POST_NORMS | ATTENTION | QK_NORMS | GATED,
     .names = olmo2_names,
     LLAMA_TOP},
};
enum { N_ARCH = sizeof table / sizeof *table };

size_t arch_count(void) {
    return N_ARCH;
}

const arch *arch_at(size_t i) {
    return &table[i];
}

const arch *arch_find(const char *name, size_t n) {
    for (int i = 0; i < N_ARCH; i++)
        if (strlen(table[i].name) == n && memcmp(table[i].name, name, n) == 0) return &table[i];
    return NULL;
}

const arch *arch_find_type(const char *type, size_t n) {
    for (int i = 0; i < N_ARCH; i++)
        for (const char *word = table[i].types; word; word = strchr(word, '|') ? strchr(word, '|') + 1 : NULL)
            if (strcspn(word, "|") == n && memcmp(word, type, n) == 0) return &table[i];
    return NULL;
}

const char *arch_gguf_name(const arch *a, arch_slot slot) {
    static const char *const names[SLOT_COUNT] = {
        [SLOT_ATTN_NORM] = "attn_norm.weight",
        [SLOT_ATTN_NORM_BIAS] = "attn_norm.bias",
        [SLOT_Q] = "attn_q.weight",
        [SLOT_K] = "attn_k.weight",
        [SLOT_V] = "attn_v.weight",
        [SLOT_Q_BIAS] = "attn_q.bias",
        [SLOT_K_BIAS] = "attn_k.bias",
        [SLOT_V_BIAS] = "attn_v.bias",
        [SLOT_Q_NORM] = "attn_q_norm.weight",
        [SLOT_K_NORM] = "attn_k_norm.weight",
        [SLOT_O] = "attn_output.weight",
        [SLOT_O_BIAS] = "attn_output.bias",
        [SLOT_ATTN_POST_NORM] = "post_attention_norm.weight",
        [SLOT_FFN_NORM] = "ffn_norm.weight",
        [SLOT_FFN_NORM_BIAS] = "ffn_norm.bias",
        [SLOT_GATE] = "ffn_gate.weight",
        [SLOT_UP] = "ffn_up.weight",
        [SLOT_UP_BIAS] = "ffn_up.bias",
        [SLOT_DOWN] = "ffn_down.weight",
        [SLOT_DOWN_BIAS] = "ffn_down.bias",
        [SLOT_FFN_POST_NORM] = "post_ffw_norm.weight",
    };
    if (a->fused && (slot == SLOT_Q || slot == SLOT_K || slot == SLOT_V)) return "attn_qkv.weight";
    if (a->fused && (slot == SLOT_Q_BIAS || slot == SLOT_K_BIAS || slot == SLOT_V_BIAS)) return "attn_qkv.bias";
    if (a->fused && slot == SLOT_GATE) return "ffn_up.weight";
    return names[slot];
}

char *arch_names(char *out, size_t size) {
    out[0] = 0;
    for (int i = 0; i < N_ARCH; i++) text_list_words(table[i].name, out, size);
    return out;
}

char *arch_types(char *out, size_t size) {
    out[0] = 0;
    for (int i = 0; i < N_ARCH; i++) text_list_words(table[i].types, out, size);
    return out;
}
