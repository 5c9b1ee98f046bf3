/* Opening a trace: every fact is read and checked here, so that the rest of the program may rely on them. */
#include "base/err.h"
#include "base/mem.h"
#include "base/text.h"
#include "traces/reader_private.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { HEADS_MAX = 1 << 20, TOKENS_MAX = INT32_MAX - 1, SAMPLES_MAX = 1 << 16 };

/* ---- the model -------------------------------------------------------------------------------------------------- */

static int read_count(hid_t h5, const char *name, bool required, int64_t min, int64_t max, int32_t *out) {
    int64_t value = 0;
    TRY(hdf_get_int(h5, name, required, min, max, &value));
    *out = (int32_t)value;
    return 0;
}

static int read_names(hid_t h5, trace_model *m) {
    struct {
        const char *name;
        char **to;
    } fact[] = {{"name", &m->name},       {"arch", &m->arch},     {"rope", &m->rope},
                {"backend", &m->backend}, {"device", &m->device}, {"compute", &m->compute}};
    for (size_t i = 0; i < sizeof fact / sizeof *fact; i++) {
        *fact[i].to = mem_string("");
        if (!*fact[i].to) return ERR_DATA;
        TRY(hdf_get_text(h5, fact[i].name, false, fact[i].to));
    }
    return 0;
}

static int read_model(hid_t h5, trace_model *m) {
    TRY(read_names(h5, m));
    TRY(read_count(h5, "n_layer", true, 1, HEADS_MAX, &m->n_layer));
    TRY(read_count(h5, "n_head", true, 1, HEADS_MAX, &m->n_head));
    TRY(read_count(h5, "n_kv_head", true, 1, m->n_head, &m->n_kv_head));
    TRY(read_count(h5, "head_dim", true, 1, HEADS_MAX, &m->head_dim));
    TRY(read_count(h5, "n_embd", false, 0, INT32_MAX, &m->n_embd));
    TRY(read_count(h5, "n_vocab", false, 0, INT32_MAX, &m->n_vocab));
    if (m->n_head % m->n_kv_head)
        return err_set(ERR_DATA, "n_head %d is not a multiple of n_kv_head %d", m->n_head, m->n_kv_head);
    double scale = 1 / sqrt(m->head_dim), softcap = 0;
    TRY(hdf_get_number(h5, "scale", &scale));
    TRY(hdf_get_number(h5, "softcap", &softcap));
    m->scale = (float)scale;
    m->softcap = (float)softcap;
    if (!isfinite(m->scale) || m->scale == 0) return err_set(ERR_DATA, "attribute 'scale' is %g", scale);
    if (!isfinite(m->softcap) || m->softcap < 0) return err_set(ERR_DATA, "attribute 'softcap' is %g", softcap);
    m->window = mem_new((size_t)m->n_layer, sizeof *m->window, "windows");
    if (!m->window) return ERR_DATA;
    TRY(hdf_get_ints(h5, "window", m->window, (size_t)m->n_layer));
    for (int l = 0; l < m->n_layer; l++)
        if (m->window[l] < 0) return err_set(ERR_DATA, "attribute 'window' is %d at layer %d", m->window[l], l);
    return 0;
}

/* ---- a sequence's small arrays ---------------------------------------------------------------------------------- */

/* Read `name` if the sequence has it; else *out is NULL. */
static int read_optional(hid_t seq, const char *name, hdf_kind kind, hid_t type, int rank, int64_t *dims, void **out) {
    *out = NULL;
    return hdf_has(seq, name) ? hdf_read_all(seq, name, kind, type, rank, dims, out) : 0;
}

static int read_tokens(hid_t seq, const trace_model *m, trace_sequence *s) {
    void *values;
    TRY(read_optional(seq, "tokens", HDF_INTEGER, H5T_NATIVE_INT32, 1, (int64_t[]){s->n_tokens}, &values));
    s->tokens = values;
    for (int32_t t = 0; s->tokens && t < s->n_tokens; t++)
        if (s->tokens[t] < 0 || (m->n_vocab && s->tokens[t] >= m->n_vocab))
            return err_set(ERR_DATA, "tokens: token %d is %d, outside the vocabulary of %d", t, s->tokens[t],
                           m->n_vocab);
    return 0;
}

static int read_pieces(hid_t seq, trace_sequence *s) {
    void *values;
    int64_t bytes = -1;
    if (hdf_has(seq, "pieces") != hdf_has(seq, "piece_offset"))
        return err_set(ERR_DATA, "pieces and piece_offset: one is there without the other");
    TRY(read_optional(seq, "pieces", HDF_INTEGER, H5T_NATIVE_UINT8, 1, &bytes, &values));
    s->pieces = values;
    TRY(read_optional(seq, "piece_offset", HDF_INTEGER, H5T_NATIVE_INT64, 1, (int64_t[]){(int64_t)s->n_tokens + 1},
                      &values));
    s->piece_offset = values;
    if (!s->pieces) return 0;
    int64_t before = 0;
    for (int32_t t = 0; t <= s->n_tokens; t++) {
        int64_t at = s->piece_offset[t];
        if (at < before || at > bytes)
            return err_set(ERR_DATA, "piece_offset: entry %d is %lld after %lld; offsets ascend within 0 .. %lld", t,
                           (long long)at, (long long)before, (long long)bytes);
        before = at;
    }
    return 0;
}

static int read_marks(hid_t seq, trace_sequence *s) {
    void *values;
    int64_t probes[2] = {-1, 2};
    TRY(read_optional(seq, "counted", HDF_INTEGER, H5T_NATIVE_UINT8, 1, (int64_t[]){s->n_tokens - 1}, &values));
    s->counted = values;
    TRY(read_optional(seq, "probes", HDF_INTEGER, H5T_NATIVE_INT32, 2, probes, &values));
    s->probes = values;
    for (int32_t t = 0; s->counted && t < s->n_tokens - 1; t++)
        if (s->counted[t] > 1) return err_set(ERR_DATA, "counted: step %d is %d, not 0 or 1", t, s->counted[t]);
    if (!s->probes) return 0;
    s->n_probes = (size_t)probes[0];
    for (size_t i = 0; i < s->n_probes; i++) {
        int32_t entry = s->probes[2 * i], step = s->probes[2 * i + 1];
        if (entry < 0 || step <= entry || step >= s->n_tokens)
            return err_set(ERR_DATA, "probes: probe %zu is (entry %d, step %d); want 0 <= entry < step < %d", i, entry,
                           step, s->n_tokens);
    }
    return 0;
}

static int check_finite(const char *name, const float *values, int32_t n, float min, float max) {
    for (int32_t t = 0; values && t < n; t++)
        if (!(values[t] >= min && values[t] <= max))
            return err_set(ERR_DATA, "%s: step %d is %g", name, t, (double)values[t]);
    return 0;
}

static int read_logits(hid_t seq, const trace_model *m, trace_sequence *s) {
    void *values;
    int64_t steps[1] = {s->n_tokens - 1}, top[2] = {s->n_tokens, -1};
    const float slack = 1e-3f; /* rounding may lift a certain prediction above log 1 */
    TRY(read_optional(seq, "logits/target_logprob", HDF_FLOAT, H5T_NATIVE_FLOAT, 1, steps, &values));
    s->target_logprob = values;
    TRY(read_optional(seq, "logits/correct", HDF_INTEGER, H5T_NATIVE_UINT8, 1, steps, &values));
    s->correct = values;
    TRY(read_optional(seq, "logits/entropy", HDF_FLOAT, H5T_NATIVE_FLOAT, 1, steps, &values));
    s->entropy = values;
    TRY(check_finite("logits/target_logprob", s->target_logprob, s->n_tokens - 1, -3e38f, slack));
    TRY(check_finite("logits/entropy", s->entropy, s->n_tokens - 1, -slack, 3e38f));
    for (int32_t t = 0; s->correct && t < s->n_tokens - 1; t++)
        if (s->correct[t] > 1) return err_set(ERR_DATA, "logits/correct: step %d is %d, not 0 or 1", t, s->correct[t]);
    hid_t set;
    struct {
        const char *name;
        hdf_kind kind;
        int64_t cols;
    } wide[] = {{"logits/topk_id", HDF_INTEGER, -1},
                {"logits/topk_logprob", HDF_FLOAT, -1},
                {"logits/full", HDF_FLOAT, m->n_vocab ? m->n_vocab : -1}};
    for (size_t i = 0; i < sizeof wide / sizeof *wide; i++) {
        if (!hdf_has(seq, wide[i].name)) continue;
        if (wide[i].cols > 0) top[1] = wide[i].cols;
        TRY(hdf_open_shaped(seq, wide[i].name, wide[i].kind, 2, top, &set)); /* top-k: both must have the same k */
        H5Dclose(set);
    }
    return 0;
}

/* ---- attention and gradients: shapes only ----------------------------------------------------------------------- */

static int has_shaped(hid_t seq, const char *name, int rank, const int64_t *want, bool *has) {
    int64_t dims[5];
    hid_t set;
    *has = hdf_has(seq, name);
    if (!*has) return 0;
    memcpy(dims, want, (size_t)rank * sizeof *dims);
    TRY(hdf_open_shaped(seq, name, HDF_FLOAT, rank, dims, &set));
    H5Dclose(set);
    return 0;
}

static int check_attention(hid_t seq, const trace_model *m, trace_sequence *s) {
    int64_t L = m->n_layer, H = m->n_head, K = m->n_kv_head, T = s->n_tokens, D = m->head_dim;
    bool q, k, row_sum;
    TRY(has_shaped(seq, "attn/probs", 4, (int64_t[]){L, H, T, T}, &s->has_dense));
    TRY(has_shaped(seq, "attn/q", 4, (int64_t[]){L, H, T, D}, &q));
    TRY(has_shaped(seq, "attn/k", 4, (int64_t[]){L, K, T, D}, &k));
    TRY(has_shaped(seq, "attn/v", 4, (int64_t[]){L, K, T, D}, &s->has_v));
    TRY(has_shaped(seq, "attn/lse", 3, (int64_t[]){L, H, T}, &s->has_lse));
    TRY(has_shaped(seq, "attn/row_sum", 3, (int64_t[]){L, H, T}, &row_sum));
    if (q != k) return err_set(ERR_DATA, "attn/%s is there without attn/%s", q ? "q" : "k", q ? "k" : "q");
    s->has_factored = q && k;
    return 0;
}

/* A gradient without its scales, or the other way round, cannot be read. */
static int has_scaled(hid_t seq, const char *name, const char *scale, int rank, const int64_t *want, bool *has) {
    bool scaled;
    TRY(has_shaped(seq, name, rank, want, has));
    TRY(has_shaped(seq, scale, rank - 1, want, &scaled));
    if (*has == scaled) return 0;
    return err_set(ERR_DATA, "%s is there without %s", *has ? name : scale, *has ? scale : name);
}

static int check_labels(hid_t seq, const trace_model *m, int64_t samples, int64_t steps) {
    void *values;
    int64_t dims[2] = {samples, steps};
    TRY(read_optional(seq, "grad/fisher_label", HDF_INTEGER, H5T_NATIVE_INT32, 2, dims, &values));
    const int32_t *label = values;
    int code = 0;
    for (int64_t i = 0; label && i < samples * steps && !code; i++)
        if (label[i] < -1 || (m->n_vocab && label[i] >= m->n_vocab))
            code = err_set(ERR_DATA, "grad/fisher_label: sample %lld, step %lld is %d; want -1 or a token below %d",
                           (long long)(i / steps), (long long)(i % steps), label[i], m->n_vocab);
    mem_free(values);
    return code;
}

/* The length of the sample axis; -1: there is no grad/fisher. */
static int count_samples(hid_t seq, int64_t *samples) {
    hdf_layout layout = {0};
    *samples = -1;
    if (!hdf_has(seq, "grad/fisher")) return 0;
    hid_t set = H5Dopen2(seq, "grad/fisher", H5P_DEFAULT);
    if (set < 0) return hdf_error("grad/fisher: is not a dataset");
    int code = hdf_get_layout(set, &layout);
    H5Dclose(set);
    TRY(code);
    *samples = (int64_t)layout.dims[0];
    if (*samples >= 1 && *samples <= SAMPLES_MAX) return 0;
    return err_set(ERR_DATA, "grad/fisher: %lld samples", (long long)*samples);
}

static int check_gradients(hid_t seq, const trace_model *m, trace_sequence *s) {
    int64_t L = m->n_layer, H = m->n_head, T = s->n_tokens, D = m->head_dim, S;
    bool fisher;
    TRY(count_samples(seq, &S));
    TRY(has_scaled(seq, "grad/loss", "grad/loss_scale", 4, (int64_t[]){L, H, T, D}, &s->has_grad_loss));
    TRY(has_scaled(seq, "grad/fisher", "grad/fisher_scale", 5, (int64_t[]){S, L, H, T, D}, &fisher));
    s->n_fisher = fisher ? (int32_t)S : 0;
    return fisher ? check_labels(seq, m, S, T - 1) : 0;
}

/* ---- sequences -------------------------------------------------------------------------------------------------- */

/* A trace made elsewhere may leave n_tokens to the shape of what it holds. */
static int read_length(hid_t seq, trace_sequence *s) {
    static const struct {
        const char *name;
        int rank, dim;
    } source[] = {{"attn/probs", 4, 2}, {"attn/q", 4, 2}, {"tokens", 1, 0}};
    int64_t n = 0, prompt = 0;
    for (size_t i = 0; i < sizeof source / sizeof *source && !n; i++) {
        if (!hdf_has(seq, source[i].name)) continue;
        hid_t set = H5Dopen2(seq, source[i].name, H5P_DEFAULT);
        hdf_layout layout = {0};
        if (set < 0 || hdf_get_layout(set, &layout)) return hdf_error("%s: is not a dataset", source[i].name);
        H5Dclose(set);
        if (layout.rank == source[i].rank) n = (int64_t)layout.dims[source[i].dim];
    }
    TRY(hdf_get_int(seq, "n_tokens", n == 0, 1, TOKENS_MAX, &n));
    if (n < 1 || n > TOKENS_MAX) return err_set(ERR_DATA, "%lld tokens", (long long)n);
    TRY(hdf_get_int(seq, "n_prompt", false, 0, n, &prompt));
    s->n_tokens = (int32_t)n;
    s->n_prompt = (int32_t)prompt;
    s->source = mem_string("");
    return s->source ? hdf_get_text(seq, "source", false, &s->source) : ERR_DATA;
}

static int read_sequence(trace *t, size_t i) {
    char name[32];
    trace_sequence *s = &t->seq[i];
    snprintf(name, sizeof name, "seq/%04zu", i);
    hid_t seq = H5Gopen2(t->h5, name, H5P_DEFAULT);
    if (seq < 0) return hdf_error("%s: is not a group", name);
    int code = read_length(seq, s);
    if (!code) code = read_tokens(seq, &t->model, s);
    if (!code) code = read_pieces(seq, s);
    if (!code) code = read_marks(seq, s);
    if (!code) code = read_logits(seq, &t->model, s);
    if (!code) code = check_attention(seq, &t->model, s);
    if (!code) code = check_gradients(seq, &t->model, s);
    H5Gclose(seq);
    return code ? err_prefix(code, "%s", name) : 0;
}

static int read_wo_shape(trace *t) {
    trace_model *m = &t->model;
    int64_t rows = (int64_t)m->n_head * m->head_dim, dims[3] = {m->n_layer, rows, m->n_embd ? m->n_embd : -1};
    hid_t set;
    if (!hdf_has(t->h5, "model/wo")) return 0;
    TRY(hdf_open_shaped(t->h5, "model/wo", HDF_FLOAT, 3, dims, &set));
    H5Dclose(set);
    if (dims[2] < 1 || dims[2] > INT32_MAX) return err_set(ERR_DATA, "model/wo: %lld columns", (long long)dims[2]);
    m->n_embd = (int32_t)dims[2];
    t->has_wo = true;
    return 0;
}

static int read_hash(trace *t) {
    char *stored = NULL;
    t->hash_stored = hdf_has_attribute(t->h5, "content_hash");
    if (!t->hash_stored) return content_hash_of_file(t->path, t->hash);
    TRY(hdf_get_text(t->h5, "content_hash", true, &stored));
    bool fine = strlen(stored) == CONTENT_HASH_HEX - 1 && strspn(stored, "0123456789abcdef") == CONTENT_HASH_HEX - 1;
    if (fine) memcpy(t->hash, stored, CONTENT_HASH_HEX);
    mem_free(stored);
    return fine ? 0 : err_set(ERR_DATA, "attribute 'content_hash' is not 32 hexadecimal digits");
}

static int open_trace(trace *t) {
    int64_t complete = 0;
    TRY(hdf_open(t->path, &t->h5));
    TRY(hdf_check_format(t->h5, "kvlag-trace", TRACE_VERSION));
    TRY(hdf_get_int(t->h5, "complete", false, 0, INT64_MAX, &complete));
    if (!complete)
        return err_set(ERR_DATA,
                       "not complete: its writer was stopped before the end (attribute 'complete' is not set)");
    TRY(read_model(t->h5, &t->model));
    TRY(read_wo_shape(t));
    size_t n = 0;
    TRY(hdf_count_numbered(t->h5, "seq", &n));
    if (!n) return err_set(ERR_DATA, "holds no sequence (/seq/0000)");
    t->seq = mem_new(n, sizeof *t->seq, "sequences");
    if (!t->seq) return ERR_DATA;
    for (t->n_seq = 0; t->n_seq < n;) {
        t->n_seq++; /* first, so that a sequence that fails half way is released */
        TRY(read_sequence(t, t->n_seq - 1));
    }
    return read_hash(t);
}

static char *label_of(const char *path) {
    const char *name = text_base_name(path);
    size_t n = strlen(name);
    if (n > 3 && strcmp(name + n - 3, ".h5") == 0) n -= 3;
    return mem_string_n(name, n);
}

int trace_open(const char *path, trace **out) {
    *out = NULL;
    trace *t = mem_new(1, sizeof *t, "trace");
    if (!t) return ERR_DATA;
    t->h5 = H5I_INVALID_HID;
    t->path = mem_string(path);
    t->label = label_of(path);
    int code = t->path && t->label ? open_trace(t) : ERR_DATA;
    if (!code) {
        *out = t;
        return 0;
    }
    trace_close(t);
    return err_prefix(code, "%s", path);
}

static void free_model(trace_model *m) {
    char *fact[] = {m->name, m->arch, m->rope, m->backend, m->device, m->compute};
    for (size_t i = 0; i < sizeof fact / sizeof *fact; i++) mem_free(fact[i]);
    mem_free(m->window);
}

static void free_sequence(trace_sequence *s) {
    const void *array[] = {s->tokens, s->pieces,         s->piece_offset, s->counted,
                           s->probes, s->target_logprob, s->correct,      s->entropy};
    for (size_t i = 0; i < sizeof array / sizeof *array; i++) mem_free((void *)(uintptr_t)array[i]);
    mem_free(s->source);
}

void trace_close(trace *t) {
    if (!t) return;
    if (t->h5 >= 0) H5Fclose(t->h5);
    for (size_t i = 0; i < t->n_seq; i++) free_sequence(&t->seq[i]);
    mem_free(t->seq);
    for (int i = 0; i < 2; i++) mem_free(t->spare[i]);
    free_model(&t->model);
    mem_free(t->path);
    mem_free(t->label);
    mem_free(t);
}

const trace_model *trace_get_model(const trace *t) {
    return &t->model;
}
const char *trace_path(const trace *t) {
    return t->path;
}
const char *trace_label(const trace *t) {
    return t->label;
}
const char *trace_hash(const trace *t) {
    return t->hash;
}
size_t trace_n_sequences(const trace *t) {
    return t->n_seq;
}
const trace_sequence *trace_get_sequence(const trace *t, size_t seq) {
    return &t->seq[seq];
}
bool trace_has_wo(const trace *t) {
    return t->has_wo;
}
