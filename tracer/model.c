#include "tracer/model.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/progress.h"
#include "base/text.h"
#include "tracer/model_source.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

enum { KEY_MAX = 160 };

/* ---- weights ---------------------------------------------------------------------------------------------------- */

void model_slot_shape(const model *m, arch_slot slot, int64_t *outputs, int64_t *inputs) {
    int64_t q = (int64_t)m->n_head * m->head_dim, kv = (int64_t)m->n_kv_head * m->head_dim;
    bool whole = m->arch->qk_norm == ARCH_QK_NORM_WHOLE;
    *outputs = 1;
    *inputs = m->n_embd;
    switch (slot) {
    case SLOT_Q:
        *outputs = q;
        break;
    case SLOT_K:
    case SLOT_V:
        *outputs = kv;
        break;
    case SLOT_O:
        *outputs = m->n_embd, *inputs = q;
        break;
    case SLOT_GATE:
    case SLOT_UP:
        *outputs = m->n_ff;
        break;
    case SLOT_DOWN:
        *outputs = m->n_embd, *inputs = m->n_ff;
        break;
    case SLOT_Q_BIAS:
        *inputs = q;
        break;
    case SLOT_K_BIAS:
    case SLOT_V_BIAS:
        *inputs = kv;
        break;
    case SLOT_Q_NORM:
        *inputs = whole ? q : m->head_dim;
        break;
    case SLOT_K_NORM:
        *inputs = whole ? kv : m->head_dim;
        break;
    case SLOT_UP_BIAS:
        *inputs = m->n_ff;
        break;
    default:
        break;
    }
}

static bool is_vector(arch_slot slot) {
    return slot != SLOT_Q && slot != SLOT_K && slot != SLOT_V && slot != SLOT_O && slot != SLOT_GATE &&
           slot != SLOT_UP && slot != SLOT_DOWN;
}

static bool is_norm(arch_slot slot) {
    return slot == SLOT_ATTN_NORM || slot == SLOT_ATTN_POST_NORM || slot == SLOT_FFN_NORM ||
           slot == SLOT_FFN_POST_NORM || slot == SLOT_Q_NORM || slot == SLOT_K_NORM;
}

/* The outputs of the tensor that a slot lies in, and the first of its own. */
static void place_in_fused(const model *m, arch_slot slot, int64_t *outputs, uint64_t *row0) {
    int64_t q = (int64_t)m->n_head * m->head_dim, kv = (int64_t)m->n_kv_head * m->head_dim;
    *row0 = 0;
    switch (slot) {
    case SLOT_Q:
    case SLOT_Q_BIAS:
        *outputs = q + 2 * kv;
        break;
    case SLOT_K:
    case SLOT_K_BIAS:
        *outputs = q + 2 * kv, *row0 = (uint64_t)q;
        break;
    case SLOT_V:
    case SLOT_V_BIAS:
        *outputs = q + 2 * kv, *row0 = (uint64_t)(q + kv);
        break;
    case SLOT_GATE:
        *outputs = 2 * (int64_t)m->n_ff;
        break;
    case SLOT_UP:
        if (m->arch->needs & 1u << SLOT_GATE) *outputs = 2 * (int64_t)m->n_ff, *row0 = (uint64_t)m->n_ff;
        break;
    default:
        break;
    }
}

/* Files of some families leave out the first part of every name ("h.0.attn..." for "transformer.h.0.attn..."). */
static const tensor *find(const model *m, const char *name) {
    const tensor *t = m->source->find(m->source, name);
    const char *rest = strchr(name, '.');
    if (t || m->source->gguf || !rest) return t;
    return strncmp(name, "model.", 6) == 0 || strncmp(name, "transformer.", 12) == 0
               ? m->source->find(m->source, rest + 1)
               : NULL;
}

/* `rows` -1: any number; a vector has dims[1] 1. */
static int take(const model *m, const char *name, bool optional, uint64_t row_length, int64_t rows,
                const tensor **out) {
    const tensor *t = *out = find(m, name);
    if (!t && optional) return 0;
    if (!t) return err_set(ERR_DATA, "%s: tensor '%s' is missing", m->path, name);
    if (t->dims[0] == row_length && (rows < 0 || t->dims[1] == (uint64_t)rows) && t->n_dims <= 2) return 0;
    char want[24] = "any";
    if (rows >= 0) snprintf(want, sizeof want, "%lld", (long long)rows);
    return err_set(ERR_DATA, "%s: tensor '%s' has shape [%llu, %llu], want [%llu, %s]", m->path, name,
                   (unsigned long long)t->dims[0], (unsigned long long)t->dims[1], (unsigned long long)row_length,
                   want);
}

static int take_slot(model *m, int32_t layer, arch_slot slot, model_weight *w) {
    const arch *a = m->arch;
    bool gguf = m->source->gguf, vector = is_vector(slot);
    char name[KEY_MAX], inner[KEY_MAX];
    int64_t outputs, inputs;
    model_slot_shape(m, slot, &outputs, &inputs);
    w->transposed = a->transposed && !gguf && !vector;
    w->plus_one = a->norm_plus_one && !gguf && is_norm(slot);
    if (gguf) snprintf(name, sizeof name, "blk.%d.%s", layer, arch_gguf_name(a, slot));
    else {
        snprintf(inner, sizeof inner, "%s", a->names[slot]);
        snprintf(name, sizeof name, "%.*s%d%s", (int)(strstr(inner, "%d") - inner), inner, layer,
                 strstr(inner, "%d") + 2);
    }
    int64_t *length = vector ? &inputs : &outputs;
    if (a->fused) place_in_fused(m, slot, length, &w->row0);
    bool optional = !(a->needs & 1u << slot);
    int code = w->transposed ? take(m, name, optional, (uint64_t)outputs, inputs, &w->tensor)
                             : take(m, name, optional, (uint64_t)inputs, outputs, &w->tensor);
    if (code && !find(m, name))
        return err_set(code, "%s: tensor '%s' is missing (the file says that there are %d layers)", m->path, name,
                       m->n_layer);
    return code;
}

static int find_layer(model *m, int32_t layer) {
    /* Grown layer by layer: a file that claims 100000 layers fails at the first missing tensor. */
    TRY(mem_grow((void **)&m->layer, &m->layer_capacity, (size_t)layer + 1, sizeof *m->layer, "layers"));
    for (int slot = 0; slot < SLOT_COUNT; slot++)
        if ((m->arch->needs | m->arch->may) & 1u << slot)
            TRY(take_slot(m, layer, (arch_slot)slot, &m->layer[layer].weight[slot]));
    return 0;
}

int model_find_weights(model *m) {
    const arch *a = m->arch;
    bool gguf = m->source->gguf;
    uint64_t n = (uint64_t)m->n_embd;
    TRY(take(m, gguf ? "token_embd.weight" : a->embedding, false, n, -1, &m->embedding.tensor));
    if (m->embedding.tensor->dims[1] > MODEL_DIMENSION_MAX)
        return err_set(ERR_DATA, "%s: a vocabulary of %llu tokens is not supported", m->path,
                       (unsigned long long)m->embedding.tensor->dims[1]);
    m->n_vocab = (int32_t)m->embedding.tensor->dims[1];
    if (a->learned_positions)
        TRY(take(m, gguf ? "position_embd.weight" : a->positions, false, n, m->n_context, &m->positions.tensor));
    TRY(take(m, gguf ? "output_norm.weight" : a->output_norm, false, n, 1, &m->output_norm.tensor));
    m->output_norm.plus_one = a->norm_plus_one && !gguf;
    if (a->norm == ARCH_NORM_LAYER)
        TRY(take(m, gguf ? "output_norm.bias" : a->output_norm_bias, false, n, 1, &m->output_norm_bias.tensor));
    TRY(take(m, gguf ? "output.weight" : a->output, true, n, m->n_vocab, &m->output.tensor));
    if (!m->output.tensor) m->output = m->embedding;
    for (int32_t i = 0; i < m->n_layer; i++) TRY(find_layer(m, i));
    return 0;
}

static bool is_used(const model *m, const tensor *t) {
    if (t == m->embedding.tensor || t == m->positions.tensor || t == m->output_norm.tensor ||
        t == m->output_norm_bias.tensor || t == m->output.tensor)
        return true;
    for (int32_t i = 0; i < m->n_layer; i++)
        for (int slot = 0; slot < SLOT_COUNT; slot++)
            if (m->layer[i].weight[slot].tensor == t) return true;
    return false;
}

void model_report_unused(const model *m, bool (*known)(const char *name)) {
    size_t n = 0;
    for (size_t i = 0; i < m->source->count(m->source); i++) {
        const tensor *t = m->source->at(m->source, i);
        if (is_used(m, t) || (known && known(t->name))) continue;
        n++;
        say_more("%s: tensor '%s' is not used", text_base_name(m->path), t->name);
    }
    if (n) say("%s: %zu tensors are not used (-v lists them)", text_base_name(m->path), n);
}

/* ---- reading ---------------------------------------------------------------------------------------------------- */

/* Columns row0 .. row0+n-1 of a tensor that is stored [inputs][outputs], patch by patch through the cache. */
static int read_transposed(const model_weight *w, size_t inputs, size_t row0, size_t n, float *out) {
    enum { PATCH = 16 };
    float patch[PATCH][PATCH];
    for (size_t o = 0; o < n; o += PATCH)
        for (size_t i = 0; i < inputs; i += PATCH) {
            size_t across = n - o < PATCH ? n - o : PATCH, down = inputs - i < PATCH ? inputs - i : PATCH;
            for (size_t r = 0; r < down; r++)
                TRY(tensor_columns(w->tensor, i + r, w->row0 + row0 + o, across, patch[r]));
            for (size_t c = 0; c < across; c++)
                for (size_t r = 0; r < down; r++) out[(o + c) * inputs + i + r] = patch[r][c];
        }
    return 0;
}

int model_read(const model_weight *w, size_t inputs, size_t row0, size_t n, float *out) {
    if (w->transposed) return read_transposed(w, inputs, row0, n, out);
    if (w->tensor->dims[0] != inputs) return tensor_columns(w->tensor, 0, w->row0, inputs, out); /* of a fused bias */
    TRY(tensor_rows(w->tensor, w->row0 + row0, n, out));
    for (size_t i = 0; w->plus_one && i < n * inputs; i++) out[i] += 1;
    return 0;
}

/* ---- opening ---------------------------------------------------------------------------------------------------- */

static int open_any(const char *path, model *m) {
    struct stat st;
    m->path = mem_string(path);
    if (!m->path) return ERR_DATA;
    m->embedding_scale = 1;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode) ? model_open_folder(path, m) : model_open_gguf(path, m);
}

int model_open(const char *path, model **out) {
    *out = NULL;
    model *m = mem_new(1, sizeof *m, "model");
    if (!m) return ERR_DATA;
    int code = open_any(path, m);
    if (code) model_close(m);
    else *out = m;
    return code;
}

void model_close(model *m) {
    if (!m) return;
    if (m->source) m->source->close(m->source);
    for (int i = 0; i < m->n_rope; i++) mem_free(m->rope[i].inverse);
    mem_free(m->path);
    mem_free(m->name);
    mem_free(m->rope_text);
    mem_free(m->window);
    mem_free(m->layer);
    mem_free(m);
}

int model_tokenizer(const model *m, tokenizer **out) {
    return m->source->tokenizer(m, out);
}

int model_chat_template(const model *m, char **out) {
    return m->source->chat_template(m, out);
}

/* ---- work ------------------------------------------------------------------------------------------------------- */

/* Numbers in one matrix of a layer: multiplications for one token. */
static double slot_size(const model *m, arch_slot slot) {
    int64_t outputs, inputs;
    if (is_vector(slot) || !(m->arch->needs & 1u << slot)) return 0;
    model_slot_shape(m, slot, &outputs, &inputs);
    return (double)outputs * (double)inputs;
}

/* Pairs of a step and an entry it sees, of all heads of a layer. */
static double layer_entries(const model *m, int32_t n) {
    return (double)n * ((double)n + 1) / 2 * m->n_head;
}

double model_flops(const model *m, int32_t n) {
    double per_layer = 0;
    for (int slot = 0; slot < SLOT_COUNT; slot++) per_layer += slot_size(m, (arch_slot)slot);
    double per_token = per_layer * m->n_layer + (double)m->n_embd * m->n_vocab;
    return 2 * per_token * n + 4 * layer_entries(m, n) * m->head_dim * m->n_layer;
}

double model_gradient_flops(const model *m, int32_t n, int32_t sets) {
    double qkv = slot_size(m, SLOT_Q) + slot_size(m, SLOT_K) + slot_size(m, SLOT_V), o = slot_size(m, SLOT_O);
    double ffn = slot_size(m, SLOT_GATE) + slot_size(m, SLOT_UP), down = slot_size(m, SLOT_DOWN), L = m->n_layer;
    /* The first layer's attention is not gone through: nothing before it is asked for. */
    double per_token = (L - 1) * (1 + sets) * qkv + L * sets * (o + down) + L * (1 + sets) * ffn;
    per_token += (double)m->n_embd * m->n_vocab;
    return 2 * per_token * n + 2 * (1 + 4.0 * sets) * layer_entries(m, n) * m->head_dim * (L - 1);
}
