/* A random model of a few numbers for any row of the table of architectures, without a file: its weights as they are,
 * and a `model` that finds them as a safetensors folder of the family stores them (fused, transposed, less 1). */
#pragma once

#include "base/mem.h"
#include "base/rng.h"
#include "tracer/model.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FAMILY_LAYERS = 3, FAMILY_TENSORS = FAMILY_LAYERS * SLOT_COUNT + 8, FAMILY_CONTEXT = 200 };

typedef struct family {
    model m;
    float *w[FAMILY_LAYERS][SLOT_COUNT]; /* [outputs][inputs]; NULL: none */
    float *embedding, *positions, *output_norm, *output_norm_bias, *output;
    tensor tensors[FAMILY_TENSORS];
    size_t n_tensors, n_owned;
    void *owned[4 * FAMILY_TENSORS];
    uint32_t drawn; /* arrays */
} family;

static inline void *family_own(family *f, size_t n, size_t size) {
    void *p = mem_new(n ? n : 1, size, "test");
    if (!p) abort();
    return f->owned[f->n_owned++] = p;
}

/* n normal numbers around `mean`. */
static inline float *family_draw(family *f, size_t n, double mean, double deviation) {
    float *x = family_own(f, n, sizeof *x);
    f->drawn++;
    for (size_t i = 0; i < n; i++)
        x[i] = (float)(mean + deviation * rng_normal(rng_philox(11, (uint32_t)i, f->drawn, 0, 0)));
    return x;
}

static inline const tensor *family_tensor(family *f, const char *name, uint64_t cols, uint64_t rows,
                                          const float *data) {
    tensor *t = &f->tensors[f->n_tensors++];
    *t = (tensor){.type_name = "F32", .n_dims = rows > 1 ? 2 : 1, .dims = {cols, rows, 1, 1}, .data = data};
    t->bytes = (size_t)(cols * rows) * sizeof *data;
    t->file = "family";
    snprintf(t->name, sizeof t->name, "%s", name);
    return t;
}

static inline size_t family_outputs(const family *f, arch_slot slot) {
    int64_t outputs, inputs;
    model_slot_shape(&f->m, slot, &outputs, &inputs);
    return (size_t)outputs;
}

static inline size_t family_inputs(const family *f, arch_slot slot) {
    int64_t outputs, inputs;
    model_slot_shape(&f->m, slot, &outputs, &inputs);
    return (size_t)inputs;
}

static inline bool family_is_norm(arch_slot slot) {
    return slot == SLOT_ATTN_NORM || slot == SLOT_ATTN_POST_NORM || slot == SLOT_FFN_NORM ||
           slot == SLOT_FFN_POST_NORM || slot == SLOT_Q_NORM || slot == SLOT_K_NORM;
}

/* n slots as one tensor, one after another. */
static inline void family_store(family *f, int layer, arch_slot first, int n) {
    const arch *a = f->m.arch;
    bool vector = family_outputs(f, first) == 1, turned = a->transposed && !vector;
    bool less_one = a->norm_plus_one && family_is_norm(first);
    size_t inputs = vector ? 1 : family_inputs(f, first), total = 0, at = 0;
    for (int i = 0; i < n; i++) {
        arch_slot slot = (arch_slot)((int)first + i);
        total += vector ? family_inputs(f, slot) : family_outputs(f, slot);
    }
    float *data = family_own(f, total * inputs, sizeof *data);
    const tensor *t = vector ? family_tensor(f, "vector", total, 1, data)
                             : family_tensor(f, "matrix", turned ? total : inputs, turned ? inputs : total, data);
    for (int i = 0; i < n; i++) {
        arch_slot slot = (arch_slot)((int)first + i);
        size_t outputs = vector ? family_inputs(f, slot) : family_outputs(f, slot);
        f->m.layer[layer].weight[slot] = (model_weight){t, at, turned, less_one};
        for (size_t o = 0; o < outputs; o++, at++)
            for (size_t k = 0; k < inputs; k++)
                data[turned ? k * total + at : at * inputs + k] =
                    f->w[layer][slot][o * inputs + k] - (less_one ? 1.0f : 0.0f);
    }
}

static inline void family_layer(family *f, int layer) {
    const arch *a = f->m.arch;
    uint32_t has = a->needs | a->may;
    for (int slot = 0; slot < SLOT_COUNT; slot++) {
        size_t outputs = family_outputs(f, (arch_slot)slot), inputs = family_inputs(f, (arch_slot)slot);
        if (!(has & 1u << slot)) continue;
        if (outputs > 1) f->w[layer][slot] = family_draw(f, outputs * inputs, 0, 1.6 / sqrt((double)inputs));
        else f->w[layer][slot] = family_draw(f, inputs, family_is_norm((arch_slot)slot) ? 1 : 0, 0.3);
    }
    for (int slot = 0; slot < SLOT_COUNT; slot++) {
        bool joint = a->fused && (slot == SLOT_Q || slot == SLOT_Q_BIAS || (slot == SLOT_GATE && has & 1u << slot));
        int n = !joint ? 1 : slot == SLOT_GATE ? 2 : 3;
        if (has & 1u << slot) family_store(f, layer, (arch_slot)slot, n);
        slot += n - 1;
    }
}

static inline void family_rope(family *f, int rope, double base, double scale) {
    f->m.rope[rope].inverse = family_own(f, (size_t)f->m.head_dim, sizeof(double));
    f->m.rope[rope].scale = scale;
    for (int i = 0; i < f->m.rope_dims / 2; i++) f->m.rope[rope].inverse[i] = pow(base, -2.0 * i / f->m.rope_dims);
}

static inline void family_top(family *f) {
    model *m = &f->m;
    size_t n = (size_t)m->n_embd, table = n * (size_t)m->n_vocab;
    bool less_one = m->arch->norm_plus_one;
    f->embedding = family_draw(f, table, 0, m->arch->scaled_embedding ? 0.3 : 1);
    m->embedding.tensor = family_tensor(f, "embedding", n, (uint64_t)m->n_vocab, f->embedding);
    f->output = family_draw(f, table, 0, 1.6 / sqrt((double)n));
    m->output.tensor = family_tensor(f, "output", n, (uint64_t)m->n_vocab, f->output);
    f->output_norm = family_draw(f, n, 1, 0.3);
    float *stored = family_own(f, n, sizeof *stored);
    for (size_t i = 0; i < n; i++) stored[i] = f->output_norm[i] - (less_one ? 1.0f : 0.0f);
    m->output_norm = (model_weight){.tensor = family_tensor(f, "output_norm", n, 1, stored), .plus_one = less_one};
    if (m->arch->norm == ARCH_NORM_LAYER) {
        f->output_norm_bias = family_draw(f, n, 0, 0.3);
        m->output_norm_bias.tensor = family_tensor(f, "output_norm_bias", n, 1, f->output_norm_bias);
    }
    if (!m->arch->learned_positions) return;
    f->positions = family_draw(f, n * FAMILY_CONTEXT, 0, 0.5);
    m->positions.tensor = family_tensor(f, "positions", n, FAMILY_CONTEXT, f->positions);
}

/* Heads of 6 dimensions, of which RoPE turns 4; nothing is a multiple of 16. Two RoPEs are there; n_rope is 1. */
static inline family *family_new(const arch *a) {
    family *f = mem_new(1, sizeof *f, "test");
    if (!f) abort();
    model *m = &f->m;
    *m = (model){.arch = a,
                 .n_layer = FAMILY_LAYERS,
                 .n_head = 4,
                 .n_kv_head = 2,
                 .head_dim = 6,
                 .n_embd = 20,
                 .n_ff = 28,
                 .n_vocab = 50,
                 .n_context = FAMILY_CONTEXT,
                 .rope_kind = a->gguf_rope,
                 .rope_dims = a->learned_positions ? 0 : 4,
                 .n_rope = a->learned_positions ? 0 : 1,
                 .norm_eps = 1e-5f,
                 .scale = 0.4f,
                 .embedding_scale = a->scaled_embedding ? sqrtf(20) : 1};
    m->path = m->name = (char *)(uintptr_t) "family";
    m->layer = family_own(f, FAMILY_LAYERS, sizeof *m->layer);
    m->window = family_own(f, FAMILY_LAYERS, sizeof *m->window);
    family_rope(f, 0, 100, 1);
    family_rope(f, 1, 7, 1.2);
    for (int layer = 0; layer < FAMILY_LAYERS; layer++) {
        family_layer(f, layer);
        m->layer[layer].rope = a->learned_positions ? -1 : 0;
    }
    family_top(f);
    return f;
}

static inline void family_free(family *f) {
    for (size_t i = 0; i < f->n_owned; i++) mem_free(f->owned[i]);
    mem_free(f);
}
