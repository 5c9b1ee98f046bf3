/* Models from folders as Hugging Face writes them: config.json (of transformers 4 or 5), safetensors, tokenizer.json.
 */
#include "base/err.h"
#include "base/mem.h"
#include "base/text.h"
#include "tracer/model_source.h"
#include "tracer/safetensors.h"
#include "tracer/tokenizer_json.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { FILE_MAX = 64 << 20 };

typedef struct source {
    model_source s; /* first: a pointer to one is a pointer to the other */
    safetensors *file;
    cJSON *config;
    char *config_path; /* for messages */
} source;

static const source *source_of(const model *m) {
    return (const source *)m->source;
}

/* ---- files ------------------------------------------------------------------------------------------------------ */

/* A whole file of the folder, NUL-terminated; *out NULL where it is not there. */
static int read_file(const char *folder, const char *name, char **out) {
    char *path;
    text t = {0};
    *out = NULL;
    TRY(text_path(folder, name, &path));
    FILE *f = fopen(path, "rb");
    int code = f || errno == ENOENT ? 0 : err_set(ERR_DATA, "%s: %s", path, strerror(errno));
    char buffer[65536];
    for (size_t n; f && !code && (n = fread(buffer, 1, sizeof buffer, f)) > 0;) {
        code = text_add_bytes(&t, buffer, n);
        if (!code && t.n > FILE_MAX) code = err_set(ERR_DATA, "%s: larger than %d MiB", path, FILE_MAX >> 20);
    }
    if (f && !code && ferror(f)) code = err_set(ERR_DATA, "%s: cannot be read", path);
    if (f && !code && !t.data) code = text_add(&t, "%s", "");
    if (f) fclose(f);
    mem_free(path);
    if (code) text_free(&t);
    else *out = t.data;
    return code;
}

static int parse_config(source *s, const char *folder) {
    char *words;
    TRY(text_path(folder, "config.json", &s->config_path));
    TRY(read_file(folder, "config.json", &words));
    if (!words)
        return err_set(ERR_DATA,
                       "%s: there is no such file; a model is a GGUF file, or a folder with config.json and "
                       "safetensors",
                       s->config_path);
    s->config = cJSON_Parse(words);
    mem_free(words);
    return cJSON_IsObject(s->config) ? 0 : err_set(ERR_DATA, "%s: is no JSON object", s->config_path);
}

/* ---- config.json ------------------------------------------------------------------------------------------------ */

/* A value, or NULL where it is absent or null. */
static const cJSON *get(const cJSON *o, const char *key) {
    const cJSON *x = cJSON_GetObjectItemCaseSensitive(o, key);
    return cJSON_IsNull(x) ? NULL : x;
}

static int want(const model *m, const char *key, const char *what) {
    return err_set(ERR_DATA, "%s: %s %s", source_of(m)->config_path, key, what);
}

static int get_number(const model *m, const cJSON *o, const char *key, double fallback, double *out) {
    const cJSON *x = get(o, key);
    *out = x ? x->valuedouble : fallback;
    return !x || cJSON_IsNumber(x) ? 0 : want(m, key, "is no number");
}

/* Under the first of two names that is there; fallback below min: it must be there. */
static int get_int(const model *m, const char *key, const char *other, int32_t min, int32_t max, int32_t fallback,
                   int32_t *out) {
    const cJSON *c = source_of(m)->config;
    double x;
    if (other && !get(c, key)) key = other;
    if (!get(c, key) && fallback < min) return want(m, key, "is missing");
    TRY(get_number(m, c, key, fallback, &x));
    if (!(x >= min && x <= max) || x != floor(x))
        return err_set(ERR_DATA, "%s: %s is %g (want a whole number, %d to %d)", source_of(m)->config_path, key, x, min,
                       max);
    *out = (int32_t)x;
    return 0;
}

static bool get_bool(const model *m, const char *key, bool fallback) {
    const cJSON *x = get(source_of(m)->config, key);
    return x ? cJSON_IsTrue(x) : fallback;
}

static const char *get_word(const cJSON *o, const char *key) {
    const cJSON *x = get(o, key);
    return cJSON_IsString(x) ? x->valuestring : NULL;
}

static int find_arch(model *m) {
    const char *type = get_word(source_of(m)->config, "model_type");
    char known[256];
    if (!type) return want(m, "model_type", "is missing or no text");
    m->arch = arch_find_type(type, strlen(type));
    if (m->arch) return 0;
    return err_set(ERR_DATA, "%s: model_type '%.60s' is not supported (supported: %s)", source_of(m)->config_path, type,
                   arch_types(known, sizeof known));
}

/* The table's row says which activation the family computes with; a config that names another is another model. */
static int check_activation(const model *m) {
    static const char *const names[] = {
        [ARCH_SILU] = "silu|swish", [ARCH_GELU_TANH] = "gelu_pytorch_tanh|gelu_new|gelu_fast"};
    const cJSON *c = source_of(m)->config;
    const char *key = get(c, "hidden_activation") ? "hidden_activation"
                      : get(c, "hidden_act")      ? "hidden_act"
                                                  : "activation_function";
    const char *name = get_word(c, key);
    if (!name || text_find_word(names[m->arch->activation], name) >= 0) return 0;
    return err_set(ERR_DATA, "%s: %s '%.40s' is not supported for %s (want %s)", source_of(m)->config_path, key, name,
                   m->arch->name, names[m->arch->activation]);
}

/* What changes the computation in ways that nothing here knows. */
static int refuse_extras(const model *m) {
    static const char *const numbers[] = {"num_local_experts", "num_experts", "logits_scaling", "residual_multiplier"};
    static const char *const flags[] = {"mlp_bias", "use_bidirectional_attention", "scale_attn_by_inverse_layer_idx",
                                        "add_cross_attention", "use_qk_norm"};
    const cJSON *c = source_of(m)->config;
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (get(c, numbers[i])) return want(m, numbers[i], "is not supported");
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++)
        if (get_bool(m, flags[i], false)) return want(m, flags[i], "true is not supported");
    if (!get_bool(m, "scale_attn_weights", true)) return want(m, "scale_attn_weights", "false is not supported");
    return get(c, "quantization_config") ? want(m, "quantization_config", "is not supported (give a GGUF file)") : 0;
}

static int read_sizes(model *m) {
    double eps;
    TRY(get_int(m, "num_hidden_layers", "n_layer", 1, MODEL_LAYERS_MAX, 0, &m->n_layer));
    TRY(get_int(m, "hidden_size", "n_embd", 1, MODEL_DIMENSION_MAX, 0, &m->n_embd));
    TRY(get_int(m, "num_attention_heads", "n_head", 1, 65536, 0, &m->n_head));
    TRY(get_int(m, "num_key_value_heads", NULL, 1, m->n_head, m->n_head, &m->n_kv_head));
    TRY(get_int(m, "head_dim", NULL, 1, 65536, m->n_embd / m->n_head, &m->head_dim));
    int32_t n_ff = m->n_embd <= MODEL_DIMENSION_MAX / 4 ? 4 * m->n_embd : 0;
    bool gpt2 = m->arch->learned_positions;
    TRY(get_int(m, "intermediate_size", "n_inner", 1, MODEL_DIMENSION_MAX, gpt2 ? n_ff : 0, &m->n_ff));
    TRY(get_int(m, "max_position_embeddings", "n_positions", 1, INT32_MAX, 0, &m->n_context));
    if (m->n_head % m->n_kv_head)
        return err_set(ERR_DATA, "%s: %d query heads cannot share %d kv heads evenly", source_of(m)->config_path,
                       m->n_head, m->n_kv_head);
    const char *key = gpt2 ? "layer_norm_epsilon" : "rms_norm_eps";
    TRY(get_number(m, source_of(m)->config, key, gpt2 ? 1e-5 : 1e-6, &eps));
    if (!(eps >= 0 && eps < 1)) return want(m, key, "is no epsilon");
    m->norm_eps = (float)eps;
    return 0;
}

static int read_scores(model *m) {
    const cJSON *c = source_of(m)->config;
    double value;
    TRY(get_number(m, c, "query_pre_attn_scalar", m->head_dim, &value));
    if (!(value > 0)) return want(m, "query_pre_attn_scalar", "is not positive");
    m->scale = (float)(1 / sqrt(value));
    TRY(get_number(m, c, "attn_logit_softcapping", 0, &value));
    m->softcap = (float)value;
    TRY(get_number(m, c, "final_logit_softcapping", 0, &value));
    m->logit_softcap = (float)value;
    if (m->arch->scaled_embedding) m->embedding_scale = sqrtf((float)m->n_embd);
    return 0;
}

/* ---- layers ----------------------------------------------------------------------------------------------------- */

static bool is_type(const model *m, const char *type) {
    return strcmp(m->arch->types, type) == 0;
}

/* What a config without layer_types means by a window: which layers it binds. */
static bool slides_by_default(const model *m, int32_t layer, int32_t pattern, int32_t first) {
    if (is_type(m, "gemma3_text")) return (layer + 1) % pattern != 0;
    if (is_type(m, "gemma2")) return layer % 2 == 0;
    if (is_type(m, "qwen2") || is_type(m, "qwen3")) return layer >= first;
    return true;
}

static int read_windows(model *m) {
    const cJSON *c = source_of(m)->config, *types = get(c, "layer_types");
    int32_t window, pattern, first;
    bool used =
        get_bool(m, "use_sliding_window", !is_type(m, "qwen2") && !is_type(m, "qwen3") && !is_type(m, "smollm3"));
    m->window = mem_new((size_t)m->n_layer, sizeof *m->window, "windows");
    if (!m->window) return ERR_DATA;
    TRY(get_int(m, "sliding_window", NULL, 0, INT32_MAX, 0, &window));
    TRY(get_int(m, "sliding_window_pattern", NULL, 1, INT32_MAX, 6, &pattern));
    TRY(get_int(m, "max_window_layers", NULL, 0, INT32_MAX, 0, &first));
    if (types && cJSON_GetArraySize(types) != m->n_layer)
        return err_set(ERR_DATA, "%s: layer_types has %d entries for %d layers", source_of(m)->config_path,
                       cJSON_GetArraySize(types), m->n_layer);
    for (int32_t i = 0; i < m->n_layer; i++) {
        const cJSON *t = types ? cJSON_GetArrayItem(types, i) : NULL;
        const char *type = cJSON_IsString(t) ? t->valuestring : "";
        bool slides = types ? strcmp(type, "sliding_attention") == 0 : slides_by_default(m, i, pattern, first);
        if (types && !slides && strcmp(type, "full_attention") != 0)
            return err_set(ERR_DATA,
                           "%s: layer_types names '%.40s' for layer %d (full_attention and sliding_attention "
                           "are supported)",
                           source_of(m)->config_path, type, i);
        m->window[i] = slides && used ? window : 0;
    }
    return 0;
}

/* One set of RoPE parameters: transformers 5 keeps all in one object, 4 the base outside of it. */
static int read_scaling(model *m, const cJSON *o, double base, rope_ask *ask) {
    const char *type = get_word(o, "rope_type") ? get_word(o, "rope_type") : get_word(o, "type");
    static const char names[] = "default|linear|llama3|yarn|longrope";
    char known[64] = "";
    int which = type ? text_find_word(names, type) : 0;
    if (type && strcmp(type, "su") == 0) which = ROPE_LONG; /* its name before */
    if (which < 0)
        return err_set(ERR_DATA, "%s: RoPE type '%.40s' is not supported (%s are)", source_of(m)->config_path, type,
                       text_list_words(names, known, sizeof known));
    ask->type = (rope_type)which;
    TRY(get_number(m, o, "rope_theta", base, &ask->base));
    TRY(get_number(m, o, "factor", 1, &ask->factor));
    double original = m->n_context;
    TRY(get_number(m, source_of(m)->config, "original_max_position_embeddings", original, &original));
    TRY(get_number(m, o, "original_max_position_embeddings", original, &ask->original));
    TRY(get_number(m, o, "low_freq_factor", 0, &ask->low_freq_factor));
    TRY(get_number(m, o, "high_freq_factor", 0, &ask->high_freq_factor));
    TRY(get_number(m, o, "beta_fast", 32, &ask->beta_fast));
    TRY(get_number(m, o, "beta_slow", 1, &ask->beta_slow));
    TRY(get_number(m, o, "attention_factor", 0, &ask->attention_factor));
    ask->truncate = !cJSON_IsFalse(get(o, "truncate"));
    if (ask->type == ROPE_YARN && (get(o, "mscale") || get(o, "mscale_all_dim")))
        return want(m, "mscale", "of yarn is not supported");
    return 0;
}

/* Factors for short texts; beyond `original` others apply, to entries that were rotated already: such texts are
 * refused, by n_context. */
static int read_long(model *m, const cJSON *o, rope_ask *ask, float **divisor) {
    const cJSON *list = get(o, "short_factor");
    if (ask->type != ROPE_LONG) return 0;
    if (cJSON_GetArraySize(list) != m->rope_dims / 2)
        return err_set(ERR_DATA, "%s: short_factor has %d values for %d rotated dimensions", source_of(m)->config_path,
                       cJSON_GetArraySize(list), m->rope_dims);
    float *d = *divisor = mem_new((size_t)m->rope_dims / 2, sizeof *d, "short_factor");
    if (!d) return ERR_DATA;
    const cJSON *x;
    cJSON_ArrayForEach(x, list) *d++ = (float)x->valuedouble;
    ask->factor = m->n_context / ask->original;
    if (m->n_context > ask->original) m->n_context = (int32_t)ask->original;
    return 0;
}

static int add_rope(model *m, const cJSON *o, double base) {
    rope_ask ask = {0};
    float *divisor = NULL;
    TRY(read_scaling(m, o, base, &ask));
    int code = read_long(m, o, &ask, &divisor);
    ask.divisor = divisor;
    if (!code) code = model_add_rope(m, source_of(m)->config_path, &ask);
    mem_free(divisor);
    return code;
}

static int read_rope_dims(model *m, const cJSON *parameters) {
    const cJSON *c = source_of(m)->config;
    double share;
    TRY(get_number(m, c, "partial_rotary_factor", 1, &share));
    TRY(get_number(m, parameters, "partial_rotary_factor", share, &share));
    m->rope_dims = (int32_t)(m->head_dim * share);
    if (m->rope_dims < 2 || m->rope_dims > m->head_dim || m->rope_dims % 2)
        return err_set(ERR_DATA, "%s: %d of %d dimensions to rotate", source_of(m)->config_path, m->rope_dims,
                       m->head_dim);
    return 0;
}

static int read_ropes(model *m) {
    const cJSON *c = source_of(m)->config, *p = get(c, "rope_parameters");
    double base, local;
    if (m->arch->learned_positions) return 0;
    m->rope_kind = ARCH_ROPE_HALVES;
    if (!p) p = get(c, "rope_scaling");
    bool two = is_type(m, "gemma3_text");
    TRY(get_number(m, c, "rope_theta", two ? 1e6 : is_type(m, "smollm3") ? 2e6 : 1e4, &base));
    TRY(get_number(m, c, "rope_local_base_freq", 1e4, &local));
    TRY(read_rope_dims(m, p));
    const cJSON *full = get(p, "full_attention"), *sliding = get(p, "sliding_attention");
    TRY(add_rope(m, full ? full : p, base));
    return two ? add_rope(m, sliding, local) : 0;
}

static int choose_ropes(model *m) {
    const cJSON *list = get(source_of(m)->config, "no_rope_layers");
    int32_t interval;
    TRY(get_int(m, "no_rope_layer_interval", NULL, 1, INT32_MAX, 4, &interval));
    bool smollm3 = is_type(m, "smollm3");
    if (smollm3 && list && cJSON_GetArraySize(list) != m->n_layer)
        return err_set(ERR_DATA, "%s: no_rope_layers has %d entries for %d layers", source_of(m)->config_path,
                       cJSON_GetArraySize(list), m->n_layer);
    for (int32_t i = 0; i < m->n_layer; i++) {
        bool turned = !smollm3 || (list ? cJSON_GetArrayItem(list, i)->valueint != 0 : (i + 1) % interval != 0);
        m->layer[i].rope = m->arch->learned_positions || !turned ? -1 : m->n_rope == 2 && m->window[i] ? 1 : 0;
    }
    return model_describe_layers(m);
}

/* ---- tokenizer -------------------------------------------------------------------------------------------------- */

static int read_tokenizer(const model *m, tokenizer **out) {
    char *words, *config, *path;
    *out = NULL;
    TRY(text_path(m->path, "tokenizer.json", &path));
    int code = read_file(m->path, "tokenizer.json", &words);
    if (!code) code = read_file(m->path, "tokenizer_config.json", &config);
    else config = NULL;
    if (!code && !words) code = err_set(ERR_DATA, "%s: there is no such file, and no other tokenizer is read", path);
    if (!code) code = tokenizer_from_json(words, config, path, (size_t)m->n_vocab, out);
    mem_free(words);
    mem_free(config);
    mem_free(path);
    return code;
}

/* The text under "chat_template", or the one named "default" of several. */
static const char *template_in(const cJSON *config) {
    const cJSON *list = get(config, "chat_template"), *x;
    if (!cJSON_IsArray(list)) return get_word(config, "chat_template");
    cJSON_ArrayForEach(x, list) {
        const char *name = get_word(x, "name");
        if (name && strcmp(name, "default") == 0) return get_word(x, "template");
    }
    return NULL;
}

/* chat_template.jinja, or what tokenizer_config.json holds. */
static int read_chat_template(const model *m, char **out) {
    char *config;
    TRY(read_file(m->path, "chat_template.jinja", out));
    if (*out) return 0;
    TRY(read_file(m->path, "tokenizer_config.json", &config));
    cJSON *o = config ? cJSON_Parse(config) : NULL;
    const char *words = template_in(o);
    if (words) *out = mem_string(words);
    int code = words && !*out ? ERR_DATA : 0;
    cJSON_Delete(o);
    mem_free(config);
    return code;
}

/* ---- opening ---------------------------------------------------------------------------------------------------- */

static const tensor *find_tensor(const model_source *s, const char *name) {
    return safetensors_find(((const source *)s)->file, name);
}

static size_t count(const model_source *s) {
    return safetensors_n_tensors(((const source *)s)->file);
}

static const tensor *tensor_at(const model_source *s, size_t i) {
    return safetensors_tensor_at(((const source *)s)->file, i);
}

static void close_source(model_source *base) {
    source *s = (source *)base;
    safetensors_close(s->file);
    cJSON_Delete(s->config);
    mem_free(s->config_path);
    mem_free(s);
}

/* GPT-2's causal masks, and frequencies that follow from the config: both were stored once. */
static bool is_known(const char *name) {
    static const char *const endings[] = {".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"};
    size_t n = strlen(name);
    for (size_t i = 0; i < sizeof endings / sizeof *endings; i++)
        if (n > strlen(endings[i]) && strcmp(name + n - strlen(endings[i]), endings[i]) == 0) return true;
    return false;
}

/* Logits without weights of their own take the embedding's, unless the config says that they have some. */
static int check_tied(const model *m) {
    bool apart = cJSON_IsFalse(get(source_of(m)->config, "tie_word_embeddings"));
    if (!apart || m->output.tensor != m->embedding.tensor) return 0;
    return err_set(ERR_DATA, "%s: tensor '%s' is missing (%s says that it is not tied to the embedding)", m->path,
                   m->arch->output, source_of(m)->config_path);
}

/* A trailing '/' is no name. */
static int read_name(model *m) {
    size_t n = strlen(m->path);
    while (n > 1 && m->path[n - 1] == '/') n--;
    char *folder = mem_string_n(m->path, n);
    m->name = folder ? mem_string(text_base_name(folder)) : NULL;
    mem_free(folder);
    return m->name ? 0 : ERR_DATA;
}

int model_open_folder(const char *path, model *m) {
    source *s = mem_new(1, sizeof *s, "model");
    if (!s) return ERR_DATA;
    s->s = (model_source){find_tensor, count, tensor_at, read_tokenizer, read_chat_template, close_source, false};
    m->source = &s->s;
    TRY(parse_config(s, path));
    TRY(find_arch(m));
    TRY(check_activation(m));
    TRY(refuse_extras(m));
    TRY(read_sizes(m));
    TRY(read_scores(m));
    TRY(read_ropes(m));
    TRY(safetensors_open(path, &s->file));
    TRY(model_find_weights(m));
    TRY(check_tied(m));
    TRY(read_windows(m));
    TRY(choose_ropes(m));
    TRY(read_name(m));
    model_report_unused(m, is_known);
    return 0;
}
