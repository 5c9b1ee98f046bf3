/* A model of a few numbers as a GGUF file in memory, right or wrong as a test wants it. All tensors are F32. */
#pragma once

#include "tests/unit/gguf_build.h"

#include <stdbool.h>
#include <stdint.h>

typedef struct mini {
    const char *arch;               /* default "llama" */
    uint32_t n_layer;               /* written tensors; default 2 */
    uint32_t block_count;           /* the key; default n_layer */
    uint32_t n_embd, n_ff, n_vocab; /* default 8, 16, 5 */
    uint32_t n_head, n_kv_head;     /* default 2, 1 */
    int kv_kind;                    /* 0 scalar, 1 absent, 2 one for each layer, 3 the same but the last one larger */
    uint32_t key_length;            /* 0: key absent */
    bool output, bias;              /* write output.weight; q, k, v biases */
    const char *without, *extra;    /* a tensor left out, one added */
    const char *wide;               /* a tensor with one column too many */
    const char *text_key, *text;    /* a further key */
    const char *u32_key;
    uint32_t u32;
    bool hollow; /* no bytes of the tensors are written: a hole of their size */
    /* Element i of a tensor; NULL: all 0. */
    float (*value)(const char *name, size_t i);
} mini;

typedef struct mini_tensor {
    char name[64];
    uint64_t dims[2];
} mini_tensor;

static inline void mini_defaults(mini *m) {
    if (!m->arch) m->arch = "llama";
    if (!m->n_layer) m->n_layer = 2;
    if (!m->block_count) m->block_count = m->n_layer;
    if (!m->n_embd) m->n_embd = 8;
    if (!m->n_ff) m->n_ff = 16;
    if (!m->n_vocab) m->n_vocab = 5;
    if (!m->n_head) m->n_head = 2;
    if (!m->n_kv_head) m->n_kv_head = 1;
}

static inline size_t mini_add(const mini *m, mini_tensor *list, size_t n, const char *name, uint64_t cols,
                              uint64_t rows) {
    if (m->without && strcmp(m->without, name) == 0) return n;
    snprintf(list[n].name, sizeof list[n].name, "%s", name);
    list[n].dims[0] = cols + (m->wide && strcmp(m->wide, name) == 0);
    list[n].dims[1] = rows;
    return n + 1;
}

static inline size_t mini_layer(const mini *m, mini_tensor *list, size_t n, uint32_t layer) {
    uint64_t dim = m->key_length ? m->key_length : m->n_embd / m->n_head;
    uint64_t q = m->n_head * dim, kv = (m->kv_kind == 1 ? m->n_head : m->n_kv_head) * dim;
    const struct {
        const char *name;
        uint64_t cols, rows;
    } all[] = {{"attn_norm.weight", m->n_embd, 1},
               {"attn_q.weight", m->n_embd, q},
               {"attn_k.weight", m->n_embd, kv},
               {"attn_v.weight", m->n_embd, kv},
               {"attn_output.weight", q, m->n_embd},
               {"ffn_norm.weight", m->n_embd, 1},
               {"ffn_gate.weight", m->n_embd, m->n_ff},
               {"ffn_up.weight", m->n_embd, m->n_ff},
               {"ffn_down.weight", m->n_ff, m->n_embd},
               {"attn_q.bias", q, 1},
               {"attn_k.bias", kv, 1},
               {"attn_v.bias", kv, 1}};
    for (size_t i = 0; i < (m->bias ? 12u : 9u); i++) {
        char name[64];
        snprintf(name, sizeof name, "blk.%u.%s", layer, all[i].name);
        n = mini_add(m, list, n, name, all[i].cols, all[i].rows);
    }
    return n;
}

static inline void mini_keys(const mini *m, text *b) {
    char key[64];
    build_key_text(b, "general.architecture", m->arch);
#define MINI_KEY(name, value) (snprintf(key, sizeof key, "%s." name, m->arch), build_key_u32(b, key, value))
    MINI_KEY("block_count", m->block_count);
    MINI_KEY("context_length", 4096);
    MINI_KEY("embedding_length", m->n_embd);
    MINI_KEY("feed_forward_length", m->n_ff);
    MINI_KEY("attention.head_count", m->n_head);
    if (m->key_length) MINI_KEY("attention.key_length", m->key_length);
    if (m->key_length) MINI_KEY("attention.value_length", m->key_length);
    if (m->kv_kind == 0) MINI_KEY("attention.head_count_kv", m->n_kv_head);
#undef MINI_KEY
    if (m->kv_kind >= 2) {
        snprintf(key, sizeof key, "%s.attention.head_count_kv", m->arch);
        build_array(b, key, BUILD_I32, m->n_layer);
        for (uint32_t i = 0; i < m->n_layer; i++)
            build_int(b, m->n_kv_head + (m->kv_kind == 3 && i + 1 == m->n_layer), 4);
    }
    snprintf(key, sizeof key, "%s.attention.layer_norm_rms_epsilon", m->arch);
    build_key(b, key, BUILD_F32);
    build_f32(b, 0);
    if (m->text_key) build_key_text(b, m->text_key, m->text);
    if (m->u32_key) build_key_u32(b, m->u32_key, m->u32);
}

/* The file's descriptor; *path is good until it is closed. */
static inline int mini_file(mini m, char path[32]) {
    mini_defaults(&m);
    mini_tensor list[64];
    size_t n = mini_add(&m, list, 0, "token_embd.weight", m.n_embd, m.n_vocab);
    n = mini_add(&m, list, n, "output_norm.weight", m.n_embd, 1);
    if (m.output) n = mini_add(&m, list, n, "output.weight", m.n_embd, m.n_vocab);
    if (m.extra) n = mini_add(&m, list, n, m.extra, 4, 1);
    for (uint32_t i = 0; i < m.n_layer; i++) n = mini_layer(&m, list, n, i);
    uint64_t n_keys = 7 + (m.kv_kind != 1) + 2 * (m.key_length != 0) + (m.text_key != NULL) + (m.u32_key != NULL);
    text b = {0};
    build_start(&b, 3, n, n_keys);
    mini_keys(&m, &b);
    uint64_t at = 0;
    for (size_t i = 0; i < n; i++) {
        build_tensor(&b, list[i].name, list[i].dims[1] > 1 ? 2 : 1, list[i].dims, 0, at);
        at += (list[i].dims[0] * list[i].dims[1] * 4 + 31) / 32 * 32;
    }
    build_align(&b, 32);
    for (size_t i = 0; i < n && !m.hollow; i++) {
        for (size_t k = 0; k < list[i].dims[0] * list[i].dims[1]; k++)
            build_f32(&b, m.value ? m.value(list[i].name, k) : 0);
        build_align(&b, 32);
    }
    int fd = build_memory_file(b.data, b.n, path);
    if (m.hollow && ftruncate(fd, (off_t)(b.n + at))) abort();
    text_free(&b);
    return fd;
}
