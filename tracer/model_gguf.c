/* Models from GGUF files: keys become hyper-parameters, names those of the format. */
#include "base/err.h"
#include "base/mem.h"
#include "base/text.h"
#include "tracer/gguf.h"
#include "tracer/model_source.h"
#include "tracer/tokenizer_gguf.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { KEY_MAX = 128 };

typedef struct source {
    model_source s; /* first: a pointer to one is a pointer to the other */
    gguf *file;
} source;

static const gguf *file_of(const model *m) {
    return ((const source *)m->source)->file;
}

/* ---- hyper-parameters ------------------------------------------------------------------------------------------- */

/* "llama.block_count" for "block_count". */
static const char *key_of(const model *m, char key[KEY_MAX], const char *name) {
    snprintf(key, KEY_MAX, "%s.%s", m->arch->name, name);
    return key;
}

static bool has(const model *m, const char *name) {
    char key[KEY_MAX];
    return gguf_has(file_of(m), key_of(m, key, name));
}

static int get_int(const model *m, const char *name, int64_t min, int64_t max, int32_t *out) {
    char key[KEY_MAX];
    int64_t value;
    TRY(gguf_int(file_of(m), key_of(m, key, name), min, max, &value));
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
    return has(m, name) ? gguf_number(file_of(m), key_of(m, key, name), out) : 0;
}

static int find_arch(model *m) {
    const char *name;
    size_t n;
    char known[256];
    TRY(gguf_text(file_of(m), "general.architecture", &name, &n));
    m->arch = arch_find(name, n);
    if (m->arch) return 0;
    return err_set(ERR_DATA, "%s: architecture '%.*s' is not supported (supported: %s)", m->path,
                   (int)(n < 60 ? n : 60), name, arch_names(known, sizeof known));
}

/* head_count_kv is one number, or one for each layer (they must agree), or absent: as many as query heads. */
static int read_kv_heads(model *m) {
    char key[KEY_MAX];
    m->n_kv_head = m->n_head;
    if (!has(m, "attention.head_count_kv")) return 0;
    key_of(m, key, "attention.head_count_kv");
    size_t n = 0;
    if (gguf_array_length(file_of(m), key, &n) != 0)
        return get_int(m, "attention.head_count_kv", 1, m->n_head, &m->n_kv_head);
    int64_t *heads;
    TRY(gguf_ints(file_of(m), key, &heads, &n));
    int code = 0;
    if (n != (size_t)m->n_layer)
        code = err_set(ERR_DATA, "%s: key '%s' has %zu entries for %d layers", m->path, key, n, m->n_layer);
    for (size_t i = 0; i < n && !code; i++)
        if (heads[i] != heads[0] || heads[i] < 1 || heads[i] > m->n_head)
            code = err_set(ERR_DATA, "%s: key '%s': %lld kv heads in layer %zu (want 1 to %d, the same in every layer)",
                           m->path, key, (long long)heads[i], i, m->n_head);
    if (!code) m->n_kv_head = (int32_t)heads[0];
    mem_free(heads);
    return code;
}

static int read_heads(model *m) {
    const char *file = m->path;
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

/* A tensor of factors for each pair of dimensions, or NULL. Owned by the caller. */
static int read_divisors(const model *m, const char *name, float **out) {
    const tensor *t = gguf_find(file_of(m), name);
    *out = NULL;
    if (!t) return 0;
    if (t->n_dims != 1 || t->dims[0] != (uint64_t)m->rope_dims / 2)
        return err_set(ERR_DATA, "%s: tensor '%s' has %llu values for %d rotated dimensions", m->path, name,
                       (unsigned long long)t->dims[0], m->rope_dims);
    *out = mem_new((size_t)t->dims[0], sizeof **out, name);
    return *out ? tensor_rows(t, 0, 1, *out) : ERR_DATA;
}

static int read_scaling(const model *m, rope_ask *ask) {
    static const char types[] = "none|linear|llama3|yarn|longrope";
    const char *type = "none";
    char key[KEY_MAX], word[24];
    size_t n = 4;
    if (has(m, "rope.scaling.type")) TRY(gguf_text(file_of(m), key_of(m, key, "rope.scaling.type"), &type, &n));
    snprintf(word, sizeof word, "%.*s", (int)n, type);
    int which = text_find_word(types, word);
    if (which < 0)
        return err_set(ERR_DATA, "%s: RoPE scaling '%s' is not supported (none, linear, yarn, longrope are)", m->path,
                       word);
    ask->type = (rope_type)which;
    TRY(get_number_or(m, "rope.scale_linear", 1.0, &ask->factor));
    if (ask->factor != 1.0 && ask->type == ROPE_PLAIN) ask->type = ROPE_LINEAR;
    TRY(get_number_or(m, "rope.scaling.factor", ask->factor, &ask->factor));
    TRY(get_number_or(m, "rope.scaling.original_context_length", m->n_context, &ask->original));
    TRY(get_number_or(m, "rope.scaling.attn_factor", 0, &ask->attention_factor));
    TRY(get_number_or(m, "rope.scaling.yarn_beta_fast", 32, &ask->beta_fast));
    TRY(get_number_or(m, "rope.scaling.yarn_beta_slow", 1, &ask->beta_slow));
    ask->truncate = true;
    /* There it multiplies the paper's factor, here it replaces it. */
    if (ask->type == ROPE_YARN && ask->attention_factor > 0) ask->attention_factor *= 0.1 * log(ask->factor) + 1;
    return 0;
}

/* Longrope has factors for texts up to the original length and others beyond. Which apply depends on the length of each
 * text, and entries that were rotated by the one kind do not fit the other: texts beyond are refused, by n_context. */
static int read_long(model *m, rope_ask *ask, float **divisor) {
    if (!gguf_find(file_of(m), "rope_factors_short.weight")) return 0;
    TRY(read_divisors(m, "rope_factors_short.weight", divisor));
    ask->type = ROPE_LONG;
    ask->factor = m->n_context / ask->original;
    if (m->n_context > ask->original) m->n_context = (int32_t)ask->original;
    return 0;
}

static int read_rope(model *m) {
    rope_ask ask = {0};
    float *divisor = NULL;
    if (m->arch->learned_positions) return 0;
    TRY(get_int_or(m, "rope.dimension_count", 2, m->head_dim, m->head_dim, &m->rope_dims));
    if (m->rope_dims % 2)
        return err_set(ERR_DATA, "%s: %s.rope.dimension_count %d is odd", m->path, m->arch->name, m->rope_dims);
    m->rope_kind = m->arch->gguf_rope;
    TRY(get_number_or(m, "rope.freq_base", 10000.0, &ask.base));
    TRY(read_scaling(m, &ask));
    int code = read_divisors(m, "rope_freqs.weight", &divisor);
    if (!code && !divisor) code = read_long(m, &ask, &divisor);
    ask.divisor = divisor;
    if (!code) code = model_add_rope(m, m->path, &ask);
    mem_free(divisor);
    return code;
}

/* Keys that change the computation in ways that nothing here knows. */
static int refuse_extras(const model *m) {
    static const char *const extras[] = {"expert_count",    "logit_scale",    "attention.clamp_kqv",
                                         "embedding_scale", "residual_scale", "attention.max_alibi_bias"};
    for (size_t i = 0; i < sizeof extras / sizeof *extras; i++) {
        double value;
        TRY(get_number_or(m, extras[i], 0, &value));
        if (value != 0)
            return err_set(ERR_DATA, "%s: %s.%s %g is not supported", m->path, m->arch->name, extras[i], value);
    }
    return 0;
}

/* Which layers see a window only is in no key: every second one of Gemma 2, beginning with the first, and all but every
 * sixth of Gemma 3 (of which the others have a RoPE of their own, base 10000). Files of the Llama row do not say that
 * they were Mistral's, and such windows were longer than most texts. */
static int read_windows(model *m) {
    int32_t window;
    m->window = mem_new((size_t)m->n_layer, sizeof *m->window, "windows");
    if (!m->window) return ERR_DATA;
    TRY(get_int_or(m, "attention.sliding_window", 0, INT32_MAX, 0, &window));
    bool gemma2 = strcmp(m->arch->name, "gemma2") == 0, gemma3 = strcmp(m->arch->name, "gemma3") == 0;
    if (has(m, "attention.sliding_window_pattern"))
        return err_set(ERR_DATA, "%s: %s.attention.sliding_window_pattern is not supported", m->path, m->arch->name);
    if ((gemma2 || gemma3) && !window)
        return err_set(ERR_DATA, "%s: key '%s.attention.sliding_window' is missing", m->path, m->arch->name);
    for (int32_t i = 0; i < m->n_layer; i++)
        m->window[i] = gemma2 ? (i % 2 ? 0 : window) : gemma3 ? ((i + 1) % 6 ? window : 0) : window;
    return 0;
}

static int read_scores(model *m) {
    double value;
    TRY(get_number_or(m, "attn_logit_softcapping", 0, &value));
    m->softcap = (float)value;
    TRY(get_number_or(m, "final_logit_softcapping", 0, &value));
    m->logit_softcap = (float)value;
    /* Only the 27B models of Gemma 2 and 3 scale by n_embd / n_head, and no key says so but the number of layers. */
    bool big = (strcmp(m->arch->name, "gemma2") == 0 && m->n_layer == 46) ||
               (strcmp(m->arch->name, "gemma3") == 0 && m->n_layer == 62);
    TRY(get_number_or(m, "attention.scale", 1 / sqrt(big ? (double)m->n_embd / m->n_head : m->head_dim), &value));
    m->scale = (float)value;
    if (m->arch->scaled_embedding) m->embedding_scale = sqrtf((float)m->n_embd);
    return 0;
}

/* Which RoPE each layer has; after the layers are there. */
static int choose_ropes(model *m) {
    bool gemma3 = strcmp(m->arch->name, "gemma3") == 0, smollm3 = strcmp(m->arch->name, "smollm3") == 0;
    if (gemma3) {
        rope_ask local = {.base = 10000};
        TRY(get_number_or(m, "rope.freq_base_swa", 10000, &local.base));
        TRY(model_add_rope(m, m->path, &local));
    }
    for (int32_t i = 0; i < m->n_layer; i++) {
        m->layer[i].rope = m->arch->learned_positions ? -1 : gemma3 && m->window[i] ? 1 : 0;
        if (smollm3 && (i + 1) % 4 == 0) m->layer[i].rope = -1;
    }
    return model_describe_layers(m);
}

static int read_hyper_parameters(model *m) {
    double eps;
    char key[KEY_MAX];
    TRY(get_int(m, "block_count", 1, MODEL_LAYERS_MAX, &m->n_layer));
    TRY(get_int(m, "embedding_length", 1, MODEL_DIMENSION_MAX, &m->n_embd));
    TRY(get_int(m, "feed_forward_length", 1, MODEL_DIMENSION_MAX, &m->n_ff));
    TRY(get_int(m, "context_length", 1, INT32_MAX, &m->n_context));
    TRY(read_heads(m));
    TRY(read_rope(m));
    TRY(refuse_extras(m));
    const char *name =
        m->arch->norm == ARCH_NORM_LAYER ? "attention.layer_norm_epsilon" : "attention.layer_norm_rms_epsilon";
    TRY(gguf_number(file_of(m), key_of(m, key, name), &eps));
    if (!(eps >= 0 && eps < 1)) return err_set(ERR_DATA, "%s: key '%s': %g is no epsilon", m->path, key, eps);
    m->norm_eps = (float)eps;
    return read_scores(m);
}

/* ---- tokenizer -------------------------------------------------------------------------------------------------- */

/* No key says that Phi-3's control tokens take the white space behind them along, as its tokenizer.json has it. */
static int read_tokenizer(const model *m, tokenizer **out) {
    const char *kind;
    size_t n;
    bool phi3 = strcmp(m->arch->name, "phi3") == 0;
    TRY(gguf_text(file_of(m), "tokenizer.ggml.model", &kind, &n));
    bool pieces = n == 5 && memcmp(kind, "llama", 5) == 0;
    return tokenizer_from_gguf(file_of(m), m->path, (size_t)m->n_vocab, phi3 && pieces, out);
}

static int read_chat_template(const model *m, char **out) {
    const char *words;
    size_t n;
    *out = NULL;
    if (!gguf_has(file_of(m), "tokenizer.chat_template")) return 0;
    TRY(gguf_text(file_of(m), "tokenizer.chat_template", &words, &n));
    *out = mem_string_n(words, n);
    return *out ? 0 : ERR_DATA;
}

/* ---- opening ---------------------------------------------------------------------------------------------------- */

static int read_name(model *m) {
    const char *name;
    size_t n;
    if (gguf_has(file_of(m), "general.name") && gguf_text(file_of(m), "general.name", &name, &n) == 0)
        m->name = mem_string_n(name, n);
    else m->name = mem_string(text_base_name(m->path));
    return m->name ? 0 : ERR_DATA;
}

static const tensor *find_tensor(const model_source *s, const char *name) {
    return gguf_find(((const source *)s)->file, name);
}

static size_t count(const model_source *s) {
    return gguf_n_tensors(((const source *)s)->file);
}

static const tensor *tensor_at(const model_source *s, size_t i) {
    return gguf_tensor_at(((const source *)s)->file, i);
}

static void close_source(model_source *s) {
    gguf_close(((source *)s)->file);
    mem_free(s);
}

/* RoPE's factors are read where they apply; those for long texts never do. */
static bool is_known(const char *name) {
    return strcmp(name, "rope_freqs.weight") == 0 || strncmp(name, "rope_factors_", 13) == 0;
}

int model_open_gguf(const char *path, model *m) {
    source *s = mem_new(1, sizeof *s, "model");
    if (!s) return ERR_DATA;
    s->s = (model_source){find_tensor, count, tensor_at, read_tokenizer, read_chat_template, close_source, true};
    m->source = &s->s;
    TRY(gguf_open(path, &s->file));
    TRY(find_arch(m));
    TRY(read_hyper_parameters(m));
    TRY(model_find_weights(m));
    TRY(read_windows(m));
    TRY(choose_ropes(m));
    TRY(read_name(m));
    model_report_unused(m, is_known);
    return 0;
}
