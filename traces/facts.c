#include "traces/facts.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/text.h"
#include "base/utf8.h"
#include "traces/check.h"
#include "traces/lifetimes.h"
#include "traces/reader_private.h"
#include "traces/zstd_filter.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

enum { PREVIEW_BYTES = 72 };

/* ---- datasets --------------------------------------------------------------------------------------------------- */

static const char *type_name(hid_t set) {
    hid_t type = H5Dget_type(set);
    H5T_class_t class = H5Tget_class(type);
    size_t size = H5Tget_size(type);
    bool is_signed = class == H5T_INTEGER && H5Tget_sign(type) == H5T_SGN_2;
    H5Tclose(type);
    if (class == H5T_FLOAT) return size == 2 ? "f16" : size == 4 ? "f32" : size == 8 ? "f64" : "float";
    if (class == H5T_INTEGER && size == 1) return is_signed ? "i8" : "u8";
    if (class == H5T_INTEGER && size == 4) return is_signed ? "i32" : "u32";
    if (class == H5T_INTEGER && size == 8) return is_signed ? "i64" : "u64";
    return class == H5T_INTEGER ? "integer" : class == H5T_ENUM ? "bool" : "other";
}

/* Does the first chunk that is stored end in a checksum? -1 = no zstd chunk there. */
static int first_checksum(hid_t set, const hdf_layout *l) {
    hsize_t n = 0, offset[H5S_MAX_RANK], bytes = 0;
    haddr_t address;
    unsigned skipped;
    int answer = -1;
    if (!l->ours) return -1;
    hid_t space = H5Dget_space(set);
    if (H5Dget_num_chunks(set, space, &n) >= 0 && n &&
        H5Dget_chunk_info(set, space, 0, offset, &skipped, &address, &bytes) >= 0 &&
        bytes <= zstd_frame_bound((size_t)hdf_chunk_bytes(l))) {
        void *frame = mem_new((size_t)bytes, 1, "chunk");
        uint32_t mask;
        if (frame && H5Dread_chunk(set, H5P_DEFAULT, offset, &mask, frame) >= 0 && !(mask & 2))
            answer = zstd_frame_has_checksum(frame, (size_t)bytes);
        mem_free(frame);
    }
    H5Sclose(space);
    return answer;
}

static int add_dataset(cJSON *list, hid_t h5, const char *name) {
    hdf_layout l;
    hid_t set = H5Dopen2(h5, name, H5P_DEFAULT);
    if (set < 0) return hdf_error("%s", name);
    int code = hdf_get_layout(set, &l);
    double raw = (double)l.size, stored = (double)H5Dget_storage_size(set);
    cJSON *d = cJSON_CreateObject(), *shape = cJSON_CreateArray();
    for (int i = 0; i < l.rank && !code; i++) {
        raw *= (double)l.dims[i];
        cJSON_AddItemToArray(shape, cJSON_CreateNumber((double)l.dims[i]));
    }
    int checksum = first_checksum(set, &l);
    cJSON_AddStringToObject(d, "path", name);
    cJSON_AddItemToObject(d, "shape", shape);
    cJSON_AddStringToObject(d, "type", type_name(set));
    cJSON_AddNumberToObject(d, "raw", raw);
    cJSON_AddNumberToObject(d, "stored", stored);
    if (stored > 0) cJSON_AddNumberToObject(d, "ratio", raw / stored);
    else cJSON_AddNullToObject(d, "ratio");
    if (checksum < 0) cJSON_AddNullToObject(d, "checksum");
    else cJSON_AddBoolToObject(d, "checksum", checksum);
    cJSON_AddItemToArray(list, d);
    H5Dclose(set);
    return code;
}

static int add_datasets(cJSON *facts, hid_t h5) {
    char **name;
    size_t n;
    TRY(hdf_list_datasets(h5, &name, &n));
    cJSON *list = cJSON_AddArrayToObject(facts, "datasets");
    int code = 0;
    for (size_t i = 0; i < n && !code; i++) code = add_dataset(list, h5, name[i]);
    hdf_free_names(name, n);
    return code;
}

static int add_attribute(cJSON *facts, hid_t object, const char *name) {
    char *value = mem_string("");
    if (!value) return ERR_DATA;
    int code = hdf_get_text(object, name, false, &value);
    cJSON_AddStringToObject(facts, name, value);
    mem_free(value);
    return code;
}

/* ---- traces ----------------------------------------------------------------------------------------------------- */

/* The first characters of the text: valid UTF-8 on one line, '?' for what is not. */
static int add_preview(cJSON *facts, const trace_sequence *s) {
    text t = {0};
    size_t n = s->pieces ? (size_t)s->piece_offset[s->n_tokens] : 0, at = 0;
    int code = text_add(&t, "%s", "");
    while (at < n && at < PREVIEW_BYTES && !code) {
        size_t length = utf8_length((const char *)s->pieces + at, n - at);
        bool control = length == 1 && (s->pieces[at] < 0x20 || s->pieces[at] == 0x7f);
        if (control || !length) code = text_add(&t, "%s", control ? " " : "?");
        else code = text_add_bytes(&t, s->pieces + at, length);
        at += length ? length : 1;
    }
    if (at < n && !code) code = text_add(&t, "...");
    if (!code) cJSON_AddStringToObject(facts, "text", t.data);
    text_free(&t);
    return code;
}

static void add_word(cJSON *list, bool there, const char *word) {
    if (there) cJSON_AddItemToArray(list, cJSON_CreateString(word));
}

static void add_arrays(cJSON *facts, const trace *t, size_t i) {
    const trace_sequence *s = &t->seq[i];
    char name[64];
    snprintf(name, sizeof name, "seq/%04zu", i);
    hid_t seq = H5Gopen2(t->h5, name, H5P_DEFAULT);
    cJSON *attention = cJSON_AddArrayToObject(facts, "attention");
    add_word(attention, s->has_dense, "dense");
    add_word(attention, s->has_factored, "factored");
    add_word(attention, s->has_v, "values");
    add_word(attention, s->has_lse, "lse");
    cJSON *logits = cJSON_AddArrayToObject(facts, "logits");
    add_word(logits, s->target_logprob, "target_logprob");
    add_word(logits, s->correct, "correct");
    add_word(logits, s->entropy, "entropy");
    add_word(logits, hdf_has(seq, "logits/topk_id"), "topk");
    add_word(logits, hdf_has(seq, "logits/full"), "full");
    cJSON *gradients = cJSON_AddArrayToObject(facts, "gradients");
    snprintf(name, sizeof name, "fisher:%d", s->n_fisher);
    add_word(gradients, s->has_grad_loss, "loss");
    add_word(gradients, s->n_fisher > 0, name);
    H5Gclose(seq);
}

static double stored_bytes(const trace *t, size_t seq, const char *array) {
    char name[64];
    snprintf(name, sizeof name, "seq/%04zu/attn/%s", seq, array);
    hid_t set = H5Dopen2(t->h5, name, H5P_DEFAULT);
    if (set < 0) return 0;
    double bytes = (double)H5Dget_storage_size(set);
    H5Dclose(set);
    return bytes;
}

static void add_bytes_per_entry(cJSON *facts, const trace *t, size_t i) {
    const trace_sequence *s = &t->seq[i];
    double T = s->n_tokens, entries = (double)t->model.n_layer * t->model.n_head * (T * (T + 1) / 2);
    cJSON_AddNumberToObject(facts, "entries", entries);
    cJSON *each = cJSON_AddObjectToObject(facts, "bytes_per_entry");
    if (s->has_dense) cJSON_AddNumberToObject(each, "dense", stored_bytes(t, i, "probs") / entries);
    if (s->has_factored)
        cJSON_AddNumberToObject(each, "factored", (stored_bytes(t, i, "q") + stored_bytes(t, i, "k")) / entries);
}

/* What f16 lost of the rows: 1 - attn/row_sum. */
static int add_lost_mass(cJSON *facts, const trace *t, size_t i) {
    char name[64];
    snprintf(name, sizeof name, "seq/%04zu/attn/row_sum", i);
    if (!hdf_has(t->h5, name)) return 0;
    int64_t dims[3] = {-1, -1, -1};
    void *values;
    TRY(hdf_read_all(t->h5, name, HDF_FLOAT, H5T_NATIVE_FLOAT, 3, dims, &values));
    const float *sum = values;
    int64_t n = dims[0] * dims[1] * dims[2];
    double mean = 0, most = -1;
    for (int64_t k = 0; k < n; k++) {
        double lost = 1 - (double)sum[k];
        mean += lost / (double)n;
        most = fmax(most, lost);
    }
    mem_free(values);
    cJSON *lost = cJSON_AddObjectToObject(facts, "lost_to_f16");
    cJSON_AddNumberToObject(lost, "mean", mean);
    cJSON_AddNumberToObject(lost, "max", most);
    return 0;
}

static void add_model(cJSON *facts, const trace_model *m) {
    cJSON *o = cJSON_AddObjectToObject(facts, "model");
    cJSON_AddStringToObject(o, "name", m->name);
    cJSON_AddStringToObject(o, "arch", m->arch);
    cJSON_AddNumberToObject(o, "n_layer", m->n_layer);
    cJSON_AddNumberToObject(o, "n_head", m->n_head);
    cJSON_AddNumberToObject(o, "n_kv_head", m->n_kv_head);
    cJSON_AddNumberToObject(o, "head_dim", m->head_dim);
    cJSON_AddNumberToObject(o, "n_embd", m->n_embd);
    cJSON_AddNumberToObject(o, "n_vocab", m->n_vocab);
    cJSON_AddItemToObject(o, "window", cJSON_CreateIntArray(m->window, m->n_layer));
    cJSON_AddNumberToObject(o, "scale", (double)m->scale);
    cJSON_AddNumberToObject(o, "softcap", (double)m->softcap);
    cJSON_AddStringToObject(o, "rope", m->rope);
    cJSON_AddStringToObject(o, "backend", m->backend);
    cJSON_AddStringToObject(o, "device", m->device);
    cJSON_AddStringToObject(o, "compute", m->compute);
}

static void add_verified(cJSON *list, bool there, const char *format, ...) __attribute__((format(printf, 3, 4)));
static void add_verified(cJSON *list, bool there, const char *format, ...) {
    char word[96];
    va_list values;
    va_start(values, format);
    vsnprintf(word, sizeof word, format, values);
    va_end(values);
    add_word(list, there, word);
}

static void add_check(cJSON *facts, const trace_sequence *s, const check_sequence *c) {
    cJSON *o = cJSON_AddObjectToObject(facts, "check");
    if (c->dense) cJSON_AddNumberToObject(o, "sum_error", c->sum_error);
    if (c->dense && c->factored) cJSON_AddNumberToObject(o, "difference", c->difference);
    if (c->factored && s->has_lse) cJSON_AddNumberToObject(o, "lse_error", c->lse_error);
    cJSON *list = cJSON_AddArrayToObject(o, "verified");
    add_verified(list, s->piece_offset, "text");
    add_verified(list, c->dense, "%d stored rows a head", s->n_tokens);
    add_verified(list, c->factored, "%d of %d rows of q and k", c->n_rows, s->n_tokens);
    add_verified(list, s->target_logprob || s->correct || s->entropy, "%d predictions", s->n_tokens - 1);
    add_verified(list, c->n_topk, "top %lld", (long long)c->n_topk);
    add_verified(list, c->has_full_logits, "full logits");
    add_verified(list, s->has_grad_loss, "gradients of %d counted steps", c->n_counted);
    add_verified(list, s->n_fisher, "labels of %d sample%s", s->n_fisher, s->n_fisher == 1 ? "" : "s");
}

static int add_sequence(cJSON *list, const trace *t, size_t i, const check_sequence *check) {
    const trace_sequence *s = &t->seq[i];
    char name[24];
    cJSON *o = cJSON_CreateObject();
    cJSON_AddItemToArray(list, o);
    snprintf(name, sizeof name, "%04zu", i);
    cJSON_AddStringToObject(o, "name", name);
    cJSON_AddNumberToObject(o, "tokens", s->n_tokens);
    cJSON_AddNumberToObject(o, "prompt", s->n_prompt);
    cJSON_AddStringToObject(o, "source", s->source);
    cJSON_AddNumberToObject(o, "probes", (double)s->n_probes);
    TRY(add_preview(o, s));
    add_arrays(o, t, i);
    add_bytes_per_entry(o, t, i);
    if (check) add_check(o, s, check);
    return add_lost_mass(o, t, i);
}

static int check_all(trace *t, bool every_row, check_sequence **out) {
    pool *p;
    *out = mem_new(t->n_seq, sizeof **out, "check");
    if (!*out) return ERR_DATA;
    TRY(pool_new(0, &p));
    int code = check_trace(t, every_row, p, *out);
    pool_free(p);
    return code;
}

static int trace_facts(const char *path, facts_check check, cJSON *facts) {
    trace *t;
    check_sequence *checked = NULL;
    TRY(trace_open(path, &t));
    int code = add_attribute(facts, t->h5, "creator");
    if (!code) code = add_attribute(facts, t->h5, "command");
    cJSON_AddStringToObject(facts, "content_hash", t->hash);
    cJSON_AddStringToObject(facts, "hash_of", t->hash_stored ? "content" : "file");
    add_model(facts, &t->model);
    cJSON *list = cJSON_AddArrayToObject(facts, "sequences");
    if (!code && check) code = check_all(t, check == FACTS_CHECK_ALL, &checked);
    for (size_t i = 0; i < t->n_seq && !code; i++) code = add_sequence(list, t, i, checked ? &checked[i] : NULL);
    if (!code) code = add_datasets(facts, t->h5);
    mem_free(checked);
    trace_close(t);
    return code;
}

/* ---- lifetimes -------------------------------------------------------------------------------------------------- */

static int read_evictions(const lifetimes *l, size_t config, size_t seq, const int64_t shape[3]) {
    size_t n = (size_t)(shape[0] * shape[1] * shape[2]);
    int32_t *evict_at = mem_new(n, sizeof *evict_at, "lifetimes");
    if (!evict_at) return ERR_DATA;
    int code = lifetimes_read(l, config, seq, (int)shape[0], (int)shape[1], (int32_t)shape[2], evict_at);
    mem_free(evict_at);
    return code;
}

static int add_lifetimes_seq(cJSON *list, const lifetimes *l, size_t config, size_t seq, bool check) {
    const lifetimes_seq *s = lifetimes_get_seq(l, config, seq);
    int64_t shape[3];
    char name[24];
    if (!s) return 0;
    TRY(lifetimes_shape(l, config, seq, shape));
    if (check) TRY(read_evictions(l, config, seq, shape));
    cJSON *o = cJSON_CreateObject(), *dims = cJSON_CreateArray();
    for (int d = 0; d < 3; d++) cJSON_AddItemToArray(dims, cJSON_CreateNumber((double)shape[d]));
    snprintf(name, sizeof name, "%04zu", seq);
    cJSON_AddStringToObject(o, "name", name);
    cJSON_AddItemToObject(o, "shape", dims);
    cJSON_AddStringToObject(o, "budget", s->budget);
    cJSON_AddStringToObject(o, "hold", s->hold);
    cJSON_AddStringToObject(o, "sinks", s->sinks);
    cJSON_AddItemToArray(list, o);
    return 0;
}

static int add_config(cJSON *list, const lifetimes *l, size_t config, bool check) {
    const lifetimes_config *c = lifetimes_get_config(l, config);
    cJSON *o = cJSON_CreateObject();
    cJSON_AddItemToArray(list, o);
    cJSON_AddStringToObject(o, "policy", c->policy);
    cJSON_AddStringToObject(o, "spec", c->spec);
    cJSON_AddStringToObject(o, "budget_asked", c->budget_asked);
    cJSON_AddStringToObject(o, "lag", c->lag);
    cJSON_AddStringToObject(o, "unit", c->unit);
    cJSON_AddStringToObject(o, "schedule", c->schedule);
    cJSON_AddStringToObject(o, "pending", c->pending);
    cJSON_AddStringToObject(o, "resolved", c->resolved);
    cJSON *seqs = cJSON_AddArrayToObject(o, "sequences");
    for (size_t i = 0; i < lifetimes_n_sequences(l, config); i++)
        TRY(add_lifetimes_seq(seqs, l, config, lifetimes_sequence_number(l, config, i), check));
    return 0;
}

static int lifetimes_facts(const char *path, bool check, cJSON *facts) {
    lifetimes *l;
    TRY(lifetimes_open(path, &l));
    cJSON_AddStringToObject(facts, "trace", lifetimes_label(l));
    cJSON_AddStringToObject(facts, "content_hash", lifetimes_hash(l));
    cJSON *list = cJSON_AddArrayToObject(facts, "configs");
    int code = 0;
    for (size_t i = 0; i < lifetimes_n_configs(l) && !code; i++) code = add_config(list, l, i, check);
    lifetimes_close(l);
    return code;
}

/* ---- blocks ----------------------------------------------------------------------------------------------------- */

static int blocks_facts(hid_t h5, cJSON *facts) {
    hid_t set;
    int64_t dims[2] = {-1, 64};
    TRY(hdf_open_shaped(h5, "lost_mass", HDF_FLOAT, 2, dims, &set));
    H5Dclose(set);
    cJSON_AddNumberToObject(facts, "rows", (double)dims[0]);
    return add_datasets(facts, h5);
}

/* ---- any file --------------------------------------------------------------------------------------------------- */

/* `format` and `version` of any HDF5 file; a file without them is not ours. */
static int read_format(const char *path, hid_t h5, cJSON *facts, char **format) {
    struct stat st = {0};
    int64_t version = 0;
    if (!hdf_has_attribute(h5, "format")) return err_set(ERR_DATA, "not a kvlag file (no attribute 'format')");
    TRY(hdf_get_text(h5, "format", true, format));
    TRY(hdf_get_int(h5, "version", true, 1, INT32_MAX, &version));
    stat(path, &st);
    cJSON_AddStringToObject(facts, "file", text_base_name(path));
    cJSON_AddStringToObject(facts, "format", *format);
    cJSON_AddNumberToObject(facts, "version", (double)version);
    cJSON_AddNumberToObject(facts, "bytes", (double)st.st_size);
    return 0;
}

static int gather(const char *path, facts_check check, cJSON *facts) {
    hid_t h5;
    char *format = NULL;
    int code = hdf_open(path, &h5);
    if (code) return err_prefix(code, "%s", path);
    code = read_format(path, h5, facts, &format);
    bool is_trace = !code && strcmp(format, "kvlag-trace") == 0,
         is_blocks = !code && strcmp(format, "kvlag-blocks") == 0;
    bool is_lifetimes = !code && strcmp(format, "kvlag-lifetimes") == 0;
    if (is_blocks) code = blocks_facts(h5, facts);
    if (!code && !is_trace && !is_blocks && !is_lifetimes)
        code = err_set(ERR_DATA, "not a kvlag file (format '%s')", format);
    if (code) err_prefix(code, "%s", path);
    H5Fclose(h5);
    mem_free(format);
    TRY(code);
    if (is_trace) return trace_facts(path, check, facts);
    return is_lifetimes ? lifetimes_facts(path, check, facts) : 0;
}

int facts_of_file(const char *path, facts_check check, cJSON **out) {
    *out = NULL;
    cJSON *facts = cJSON_CreateObject();
    if (!facts) return err_set(ERR_DATA, "out of memory");
    int code = gather(path, check, facts);
    if (!code) cJSON_AddBoolToObject(facts, "checked", check != FACTS_ONLY);
    if (code) cJSON_Delete(facts);
    else *out = facts;
    return code;
}
