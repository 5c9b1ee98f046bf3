#include "tracer/model.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/progress.h"
#include "base/text.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

enum { DIMENSION_MAX = 1 << 24, LAYERS_MAX = 1 << 20, KEY_MAX = 128 };

/* ---- hyper-parameters ------------------------------------------------------------------------------------------- */

/* "llama.block_count" for "block_count". */
static const char *key_of(const model *m, char key[KEY_MAX], const char *name) {
    snprintf(key, KEY_MAX, "%s.%s", m->arch->name, name);
    return key;
}

static bool has(const model *m, const char *name) {
    char key[KEY_MAX];
    return gguf_has(m->file, key_of(m, key, name));
}

static int get_int(const model *m, const char *name, int64_t min, int64_t max, int32_t *out) {
    char key[KEY_MAX];
    int64_t value;
    TRY(gguf_int(m->file, key_of(m, key, name), min, max, &value));
    *out = (int32_t)value;
    return 0;
}

static int get_int_or(const model *m, const char *name, int64_t min, int64_t max, int32_t fallback, int32_t *out) {
    *out = fallback;
    return has(m, name) ? get_int(m, name, min, max, out) : 0;
}

static int get_number_or(const model *m, const char *name, double fallback, double *out) {
    char key[KEY_MAX];
    *out = fallback;
    return has(m, name) ? gguf_number(m->file, key_of(m, key, name), out) : 0;
}

static int find_arch(model *m) {
    const char *name;
    size_t n;
    char known[256];
    TRY(gguf_text(m->file, "general.architecture", &name, &n));
    m->arch = arch_find(name, n);
    if (m->arch) return 0;
    return err_set(ERR_DATA, "%s: architecture '%.*s' is not supported (supported: %s)", gguf_path(m->file),
                   (int)(n < 60 ? n : 60), name, arch_names(known, sizeof known));
}

/* head_count_kv is one number, or one for each layer (they must agree), or absent: as many as query heads. */
static int read_kv_heads(model *m) {
    char key[KEY_MAX];
    m->n_kv_head = m->n_head;
    if (!has(m, "attention.head_count_kv")) return 0;
    key_of(m, key, "attention.head_count_kv");
    size_t n = 0;
    if (gguf_array_length(m->file, key, &n) != 0)
        return get_int(m, "attention.head_count_kv", 1, m->n_head, &m->n_kv_head);
    int64_t *heads;
    TRY(gguf_ints(m->file, key, &heads, &n));
    int code = 0;
    if (n != (size_t)m->n_layer)
        code = err_set(ERR_DATA, "%s: key '%s' has %zu entries for %d layers", gguf_path(m->file), key, n, m->n_layer);
    for (size_t i = 0; i < n && !code; i++)
        if (heads[i] != heads[0] || heads[i] < 1 || heads[i] > m->n_head)
            code = err_set(ERR_DATA, "%s: key '%s': %lld kv heads in layer %zu (want 1 to %d, the same in every layer)",
                           gguf_path(m->file), key, (long long)heads[i], i, m->n_head);
    if (!code) m->n_kv_head = (int32_t)heads[0];
    mem_free(heads);
    return code;
}

static int read_heads(model *m) {
    const char *file = gguf_path(m->file);
    TRY(get_int(m, "attention.head_count", 1, 65536, &m->n_head));
    TRY(read_kv_heads(m));
    if (m->n_head % m->n_kv_head)
        return err_set(ERR_DATA, "%s: %d query heads cannot share %d kv heads evenly", file, m->n_head, m->n_kv_head);
    if (!has(m, "attention.key_length") && m->n_embd % m->n_head)
        return err_set(ERR_DATA, "%s: n_embd %d is not a multiple of %d heads and %s.attention.key_length is missing",
                       file, m->n_embd, m->n_head, m->arch->name);
    TRY(get_int_or(m, "attention.key_length", 1, 65536, m->n_embd / m->n_head, &m->head_dim));
    int32_t value_length;
    TRY(get_int_or(m, "attention.value_length", 1, 65536, m->head_dim, &value_length));
    if (value_length != m->head_dim)
        return err_set(ERR_DATA, "%s: values of %d dimensions beside keys of %d are not supported", file, value_length,
                       m->head_dim);
    m->scale = (float)(1.0 / sqrt((double)m->head_dim));
    return 0;
}

static int read_rope(model *m) {
    const char *file = gguf_path(m->file);
    char key[KEY_MAX];
    TRY(get_number_or(m, "rope.freq_base", 10000.0, &m->rope_base));
    if (!(m->rope_base > 0 && isfinite(m->rope_base)))
        return err_set(ERR_DATA, "%s: %s.rope.freq_base %g is not a positive number", file, m->arch->name,
                       m->rope_base);
    TRY(get_int_or(m, "rope.dimension_count", 2, m->head_dim, m->head_dim, &m->rope_dims));
    if (m->rope_dims % 2)
        return err_set(ERR_DATA, "%s: %s.rope.dimension_count %d is odd", file, m->arch->name, m->rope_dims);
    if (has(m, "rope.scaling.type")) {
        const char *type;
        size_t n;
        TRY(gguf_text(m->file, key_of(m, key, "rope.scaling.type"), &type, &n));
        if (n != 4 || memcmp(type, "none", 4) != 0)
            return err_set(ERR_DATA, "%s: rope scaling '%.*s' is not supported", file, (int)(n < 60 ? n : 60), type);
    }
    double factor;
    TRY(get_number_or(m, "rope.scale_linear", 1.0, &factor));
    if (factor != 1.0) return err_set(ERR_DATA, "%s: rope scaling 'linear' (factor %g) is not supported", file, factor);
    if (gguf_find(m->file, "rope_freqs.weight"))
        return err_set(ERR_DATA, "%s: rope scaling 'llama3' (tensor 'rope_freqs.weight') is not supported", file);
    return 0;
}

/* Keys that change the computation in ways no row of the table has. */
static int refuse_extras(const model *m) {
    static const char *const extras[] = {
        "expert_count",  "attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping",
        "logit_scale",   "attention.clamp_kqv",      "attention.scale",        "embedding_scale",
        "residual_scale"};
    for (size_t i = 0; i < sizeof extras / sizeof *extras; i++) {
        double value;
        TRY(get_number_or(m, extras[i], 0, &value));
        if (value != 0)
            return err_set(ERR_DATA, "%s: %s.%s %g is not supported", gguf_path(m->file), m->arch->name, extras[i],
                           value);
    }
    return 0;
}

static int read_hyper_parameters(model *m) {
    double eps;
    char key[KEY_MAX];
    TRY(get_int(m, "block_count", 1, LAYERS_MAX, &m->n_layer));
    TRY(get_int(m, "embedding_length", 1, DIMENSION_MAX, &m->n_embd));
    TRY(get_int(m, "feed_forward_length", 1, DIMENSION_MAX, &m->n_ff));
    TRY(get_int(m, "context_length", 1, INT32_MAX, &m->n_context));
    TRY(read_heads(m));
    TRY(read_rope(m));
    TRY(refuse_extras(m));
    TRY(gguf_number(m->file, key_of(m, key, "attention.layer_norm_rms_epsilon"), &eps));
    if (!(eps >= 0 && eps < 1))
        return err_set(ERR_DATA, "%s: key '%s': %g is no epsilon", gguf_path(m->file), key, eps);
    m->norm_eps = (float)eps;
    return 0;
}

/* ---- tensors ---------------------------------------------------------------------------------------------------- */

void model_slot_shape(const model *m, arch_slot slot, int64_t *outputs, int64_t *inputs) {
    int64_t q = (int64_t)m->n_head * m->head_dim, kv = (int64_t)m->n_kv_head * m->head_dim;
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
        *outputs = 1, *inputs = q;
        break;
    case SLOT_K_BIAS:
    case SLOT_V_BIAS:
        *outputs = 1, *inputs = kv;
        break;
    default:
        *outputs = 1;
        break;
    }
}

/* `outputs` -1: any number of rows. */
static int take(const model *m, const char *name, bool optional, int64_t outputs, int64_t inputs,
                const gguf_tensor **out) {
    const gguf_tensor *t = *out = gguf_find(m->file, name);
    if (!t && optional) return 0;
    if (!t) return err_set(ERR_DATA, "%s: tensor '%s' is missing", gguf_path(m->file), name);
    if (t->dims[0] == (uint64_t)inputs && (outputs < 0 || t->dims[1] == (uint64_t)outputs) && t->n_dims <= 2) return 0;
    char want[24] = "any";
    if (outputs >= 0) snprintf(want, sizeof want, "%lld", (long long)outputs);
    return err_set(ERR_DATA, "%s: tensor '%s' has shape [%llu, %llu], want [%lld, %s]", gguf_path(m->file), name,
                   (unsigned long long)t->dims[0], (unsigned long long)t->dims[1], (long long)inputs, want);
}

static int find_layer(model *m, int32_t index) {
    /* Grown layer by layer: a file that claims 100000 layers fails at the first missing tensor. */
    TRY(mem_grow((void **)&m->layer, &m->layer_capacity, (size_t)index + 1, sizeof *m->layer, "layers"));
    for (int slot = 0; slot < SLOT_COUNT; slot++) {
        arch_tensor row = m->arch->layer[slot];
        if (!row.name) continue;
        char name[KEY_MAX];
        int64_t outputs, inputs;
        snprintf(name, sizeof name, "blk.%d.%s", index, row.name);
        model_slot_shape(m, (arch_slot)slot, &outputs, &inputs);
        int code = take(m, name, row.optional, outputs, inputs, &m->layer[index].tensor[slot]);
        if (code && !gguf_find(m->file, name))
            return err_set(code, "%s: tensor '%s' is missing (%s.block_count says %d layers)", gguf_path(m->file), name,
                           m->arch->name, m->n_layer);
        TRY(code);
    }
    return 0;
}

static int find_tensors(model *m) {
    TRY(take(m, m->arch->embedding, false, -1, m->n_embd, &m->embedding));
    if (m->embedding->dims[1] > DIMENSION_MAX)
        return err_set(ERR_DATA, "%s: a vocabulary of %llu tokens is not supported", gguf_path(m->file),
                       (unsigned long long)m->embedding->dims[1]);
    m->n_vocab = (int32_t)m->embedding->dims[1];
    TRY(take(m, m->arch->output_norm, false, 1, m->n_embd, &m->output_norm));
    TRY(take(m, m->arch->output, true, m->n_vocab, m->n_embd, &m->output));
    if (!m->output) m->output = m->embedding;
    for (int32_t i = 0; i < m->n_layer; i++) TRY(find_layer(m, i));
    m->window = mem_new((size_t)m->n_layer, sizeof *m->window, "windows");
    return m->window ? 0 : ERR_DATA;
}

static bool is_used(const model *m, const gguf_tensor *t) {
    if (t == m->embedding || t == m->output_norm || t == m->output) return true;
    for (int32_t i = 0; i < m->n_layer; i++)
        for (int slot = 0; slot < SLOT_COUNT; slot++)
            if (m->layer[i].tensor[slot] == t) return true;
    return false;
}

static void report_unused(const model *m) {
    size_t n = 0;
    for (size_t i = 0; i < gguf_n_tensors(m->file); i++) {
        const gguf_tensor *t = gguf_tensor_at(m->file, i);
        if (is_used(m, t)) continue;
        n++;
        say_more("%s: tensor '%s' is not used", text_base_name(gguf_path(m->file)), t->name);
    }
    if (n) say("%s: %zu tensors are not used (-v lists them)", text_base_name(gguf_path(m->file)), n);
}

/* ---- opening ---------------------------------------------------------------------------------------------------- */

static int read_name(model *m) {
    const char *name;
    size_t n;
    if (gguf_has(m->file, "general.name") && gguf_text(m->file, "general.name", &name, &n) == 0)
        m->name = mem_string_n(name, n);
    else m->name = mem_string(text_base_name(gguf_path(m->file)));
    return m->name ? 0 : ERR_DATA;
}

static int open_file(model *m, const char *path) {
    struct stat st;
    if (stat(path, &st) == 0 && S_ISDIR(st.st_mode))
        return err_set(ERR_DATA, "%s: is a folder; this version reads models from GGUF files", path);
    TRY(gguf_open(path, &m->file));
    TRY(find_arch(m));
    TRY(read_hyper_parameters(m));
    TRY(find_tensors(m));
    TRY(read_name(m));
    report_unused(m);
    return 0;
}

int model_open(const char *path, model **out) {
    *out = NULL;
    model *m = mem_new(1, sizeof *m, "model");
    if (!m) return ERR_DATA;
    int code = open_file(m, path);
    if (code) model_close(m);
    else *out = m;
    return code;
}

void model_close(model *m) {
    if (!m) return;
    gguf_close(m->file);
    mem_free(m->name);
    mem_free(m->window);
    mem_free(m->layer);
    mem_free(m);
}

/* Numbers in one matrix of a layer: multiplications for one token. */
static double slot_size(const model *m, arch_slot slot) {
    int64_t outputs, inputs;
    model_slot_shape(m, slot, &outputs, &inputs);
    return outputs > 1 ? (double)outputs * (double)inputs : 0;
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

/* ---- tokenizer -------------------------------------------------------------------------------------------------- */

/* What the file says, with the arrays that tokenizer_new borrows. */
typedef struct vocabulary {
    tokenizer_facts facts;
    token_text *tokens, *merges;
    int64_t *types;
    char *pre;
} vocabulary;

static int read_texts(const gguf *g, const char *key, token_text **out, size_t *n) {
    gguf_string *strings;
    TRY(gguf_strings(g, key, &strings, n));
    *out = mem_new(*n, sizeof **out, key);
    for (size_t i = 0; *out && i < *n; i++) (*out)[i] = (token_text){strings[i].text, strings[i].n};
    mem_free(strings);
    return *out ? 0 : ERR_DATA;
}

static int read_special(const model *m, const char *key, int64_t n_tokens, int64_t *out) {
    *out = -1;
    return gguf_has(m->file, key) ? gguf_int(m->file, key, 0, n_tokens - 1, out) : 0;
}

static int read_vocabulary(const model *m, vocabulary *v) {
    const gguf *g = m->file;
    tokenizer_facts *f = &v->facts;
    const char *kind, *pre;
    size_t n, n_types;
    f->file = gguf_path(g);
    TRY(gguf_text(g, "tokenizer.ggml.model", &kind, &n));
    if (n != 4 || memcmp(kind, "gpt2", 4) != 0)
        return err_set(ERR_DATA, "%s: tokenizer '%.*s' is not supported (supported: gpt2)", f->file,
                       (int)(n < 60 ? n : 60), kind);
    TRY(gguf_text(g, "tokenizer.ggml.pre", &pre, &n));
    v->pre = mem_string_n(pre, n);
    if (!v->pre) return ERR_DATA;
    f->pre = v->pre;
    TRY(read_texts(g, "tokenizer.ggml.tokens", &v->tokens, &f->n_tokens));
    if (f->n_tokens == 0 || f->n_tokens > (size_t)m->n_vocab)
        return err_set(ERR_DATA, "%s: %zu tokens in the vocabulary, %d rows in '%s'", f->file, f->n_tokens, m->n_vocab,
                       m->arch->embedding);
    TRY(read_texts(g, "tokenizer.ggml.merges", &v->merges, &f->n_merges));
    if (gguf_has(g, "tokenizer.ggml.token_type")) {
        TRY(gguf_ints(g, "tokenizer.ggml.token_type", &v->types, &n_types));
        if (n_types != f->n_tokens)
            return err_set(ERR_DATA, "%s: %zu token types for %zu tokens", f->file, n_types, f->n_tokens);
    }
    f->tokens = v->tokens;
    f->merges = v->merges;
    f->types = v->types;
    TRY(read_special(m, "tokenizer.ggml.bos_token_id", (int64_t)f->n_tokens, &f->bos));
    TRY(read_special(m, "tokenizer.ggml.eos_token_id", (int64_t)f->n_tokens, &f->eos));
    if (gguf_has(g, "tokenizer.ggml.add_bos_token")) TRY(gguf_bool(g, "tokenizer.ggml.add_bos_token", &f->add_bos));
    return 0;
}

int model_tokenizer(const model *m, tokenizer **out) {
    *out = NULL;
    vocabulary v = {0};
    int code = read_vocabulary(m, &v);
    if (!code) code = tokenizer_new(&v.facts, out);
    mem_free(v.tokens);
    mem_free(v.merges);
    mem_free(v.types);
    mem_free(v.pre);
    return code;
}
