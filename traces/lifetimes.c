#include "traces/lifetimes.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/outfile.h"
#include "traces/hdf.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LIFETIMES_VERSION = 1 };

/* The texts of a configuration and of a sequence, in the order of their structs. */
static const char *const config_field[] = {"policy", "spec",     "budget_asked", "lag",
                                           "unit",   "schedule", "pending",      "resolved"};
static const char *const seq_field[] = {"budget", "hold", "sinks"};
enum {
    CONFIG_FIELDS = sizeof config_field / sizeof *config_field,
    CONFIG_SPEC = 1,
    SEQ_FIELDS = sizeof seq_field / sizeof *seq_field
};

/* ---- writing ---------------------------------------------------------------------------------------------------- */

struct lifetimes_writer {
    outfile file;
    hid_t h5, configs;
};

static int begin(lifetimes_writer *w, const char *label, const char *hash) {
    TRY(hdf_create(w->file.temp, &w->h5));
    TRY(hdf_put_text(w->h5, "format", "kvlag-lifetimes"));
    TRY(hdf_put_int(w->h5, "version", LIFETIMES_VERSION));
    TRY(hdf_put_text(w->h5, "trace", label));
    TRY(hdf_put_text(w->h5, "content_hash", hash));
    return hdf_new_group(w->h5, "config", &w->configs);
}

int lifetimes_writer_new(const char *path, bool force, const char *const *inputs, int n_inputs, const char *label,
                         const char *hash, lifetimes_writer **out) {
    *out = NULL;
    lifetimes_writer *w = mem_new(1, sizeof *w, "lifetimes writer");
    if (!w) return ERR_DATA;
    w->h5 = w->configs = H5I_INVALID_HID;
    int code = outfile_begin(&w->file, path, force, inputs, n_inputs);
    if (code) {
        mem_free(w);
        return code;
    }
    code = begin(w, label, hash);
    if (code) {
        err_prefix(code, "%s", path);
        lifetimes_writer_abort(w);
    } else {
        *out = w;
    }
    return code;
}

static int put_texts(hid_t group, const char *const *name, const char *const *value, int n) {
    for (int i = 0; i < n; i++) TRY(hdf_put_text(group, name[i], value[i] ? value[i] : ""));
    return 0;
}

static int write_config(lifetimes_writer *w, size_t config, const lifetimes_config *c) {
    const char *value[CONFIG_FIELDS] = {c->policy, c->spec,     c->budget_asked, c->lag,
                                        c->unit,   c->schedule, c->pending,      c->resolved};
    char name[32];
    hid_t group, seqs = H5I_INVALID_HID;
    snprintf(name, sizeof name, "%04zu", config);
    TRY(hdf_new_group(w->configs, name, &group));
    int code = put_texts(group, config_field, value, CONFIG_FIELDS);
    if (!code) code = hdf_new_group(group, "seq", &seqs);
    if (seqs >= 0) H5Gclose(seqs);
    H5Gclose(group);
    return code;
}

int lifetimes_write_config(lifetimes_writer *w, size_t config, const lifetimes_config *c) {
    int code = write_config(w, config, c);
    return code ? err_prefix(code, "%s", w->file.path) : 0;
}

static int write_seq(lifetimes_writer *w, size_t config, size_t seq, const lifetimes_seq *s, const hsize_t dims[3],
                     const int32_t *evict_at) {
    const char *value[SEQ_FIELDS] = {s->budget, s->hold, s->sinks};
    char name[64];
    hid_t group;
    snprintf(name, sizeof name, "%04zu/seq/%04zu", config, seq);
    TRY(hdf_new_group(w->configs, name, &group));
    int code = put_texts(group, seq_field, value, SEQ_FIELDS);
    if (!code) code = hdf_write_all(group, "evict_at", H5T_STD_I32LE, 3, dims, evict_at);
    H5Gclose(group);
    return code;
}

int lifetimes_write_seq(lifetimes_writer *w, size_t config, size_t seq, const lifetimes_seq *s, int n_layer,
                        int n_kv_head, int32_t n_tokens, const int32_t *evict_at) {
    hsize_t dims[3] = {(hsize_t)n_layer, (hsize_t)n_kv_head, (hsize_t)n_tokens};
    int code = write_seq(w, config, seq, s, dims, evict_at);
    return code ? err_prefix(code, "%s", w->file.path) : 0;
}

int lifetimes_writer_finish(lifetimes_writer *w) {
    H5Gclose(w->configs);
    w->configs = H5I_INVALID_HID;
    hid_t h5 = w->h5;
    w->h5 = H5I_INVALID_HID;
    int code = hdf_finish(h5);
    if (code) {
        err_prefix(code, "%s", w->file.path);
        lifetimes_writer_abort(w);
        return code;
    }
    code = outfile_commit(&w->file);
    mem_free(w);
    return code;
}

void lifetimes_writer_abort(lifetimes_writer *w) {
    if (!w) return;
    if (w->configs >= 0) H5Gclose(w->configs);
    if (w->h5 >= 0) H5Fclose(w->h5);
    outfile_abort(&w->file);
    mem_free(w);
}

/* ---- reading ---------------------------------------------------------------------------------------------------- */

typedef struct seq_entry {
    size_t seq;
    char *text[SEQ_FIELDS];
    lifetimes_seq view;
} seq_entry;

typedef struct config_entry {
    char *text[CONFIG_FIELDS];
    lifetimes_config view;
    seq_entry *seq; /* ascending */
    size_t n_seq, capacity;
} config_entry;

struct lifetimes {
    char *path, *label, *hash;
    hid_t h5;
    config_entry *config;
    size_t n_configs;
};

static int get_texts(hid_t group, const char *const *name, char **value, int n, int required) {
    for (int i = 0; i < n; i++) {
        value[i] = mem_string("");
        if (!value[i]) return ERR_DATA;
        TRY(hdf_get_text(group, name[i], i == required, &value[i]));
    }
    return 0;
}

/* Is this the name of sequence *seq: four digits or more, nothing else? */
static bool sequence_name(const char *name, size_t *seq) {
    char again[32];
    if (strlen(name) > 9 || strspn(name, "0123456789") != strlen(name)) return false;
    *seq = strtoul(name, NULL, 10);
    snprintf(again, sizeof again, "%04zu", *seq);
    return strcmp(name, again) == 0;
}

static int read_seq(hid_t seqs, const char *name, seq_entry *s) {
    hid_t group = H5Gopen2(seqs, name, H5P_DEFAULT);
    if (group < 0) return hdf_error("is not a group");
    int64_t dims[3] = {-1, -1, -1};
    hid_t set;
    int code = get_texts(group, seq_field, s->text, SEQ_FIELDS, -1);
    if (!code && !hdf_has(group, "evict_at")) code = err_set(ERR_DATA, "has no evict_at");
    if (!code) code = hdf_open_shaped(group, "evict_at", HDF_INTEGER, 3, dims, &set);
    if (!code) H5Dclose(set);
    H5Gclose(group);
    s->view = (lifetimes_seq){s->text[0], s->text[1], s->text[2]};
    return code;
}

static int by_number(const void *a, const void *b) {
    size_t x = ((const seq_entry *)a)->seq, y = ((const seq_entry *)b)->seq;
    return (x > y) - (x < y);
}

static int read_seqs(hid_t seqs, config_entry *c) {
    H5G_info_t info;
    if (H5Gget_info(seqs, &info) < 0) return hdf_error("seq");
    for (hsize_t i = 0; i < info.nlinks; i++) {
        char name[32];
        size_t seq;
        ssize_t n = H5Lget_name_by_idx(seqs, ".", H5_INDEX_NAME, H5_ITER_INC, i, name, sizeof name, H5P_DEFAULT);
        if (n < 0 || n >= (ssize_t)sizeof name || !sequence_name(name, &seq))
            return err_set(ERR_DATA, "seq: '%s' is not a sequence (0000, 0001, ...)", n < 0 ? "?" : name);
        TRY(mem_grow((void **)&c->seq, &c->capacity, c->n_seq + 1, sizeof *c->seq, "sequences"));
        c->seq[c->n_seq].seq = seq;
        int code = read_seq(seqs, name, &c->seq[c->n_seq++]);
        if (code) return err_prefix(code, "seq/%s", name);
    }
    if (!c->n_seq) return err_set(ERR_DATA, "has no sequence");
    qsort(c->seq, c->n_seq, sizeof *c->seq, by_number);
    return 0;
}

static int read_config(hid_t h5, size_t i, config_entry *c) {
    char name[32];
    snprintf(name, sizeof name, "config/%04zu", i);
    hid_t group = H5Gopen2(h5, name, H5P_DEFAULT), seqs = H5I_INVALID_HID;
    if (group < 0) return hdf_error("%s", name);
    int code = get_texts(group, config_field, c->text, CONFIG_FIELDS, CONFIG_SPEC);
    if (!code && !hdf_has(group, "seq")) code = err_set(ERR_DATA, "has no sequence");
    if (!code && (seqs = H5Gopen2(group, "seq", H5P_DEFAULT)) < 0) code = hdf_error("seq");
    if (!code) code = read_seqs(seqs, c);
    if (seqs >= 0) H5Gclose(seqs);
    H5Gclose(group);
    char **t = c->text;
    c->view = (lifetimes_config){t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7]};
    return code ? err_prefix(code, "%s", name) : 0;
}

static int open_lifetimes(lifetimes *l) {
    TRY(hdf_open(l->path, &l->h5));
    TRY(hdf_check_format(l->h5, "kvlag-lifetimes", LIFETIMES_VERSION));
    TRY(hdf_get_text(l->h5, "trace", false, &l->label));
    TRY(hdf_get_text(l->h5, "content_hash", false, &l->hash));
    size_t n;
    TRY(hdf_count_numbered(l->h5, "config", &n));
    if (!n) return err_set(ERR_DATA, "holds no configuration (/config/0000)");
    l->config = mem_new(n, sizeof *l->config, "configurations");
    if (!l->config) return ERR_DATA;
    while (l->n_configs < n) {
        l->n_configs++; /* first, so that a configuration that fails half way is released */
        TRY(read_config(l->h5, l->n_configs - 1, &l->config[l->n_configs - 1]));
    }
    return 0;
}

int lifetimes_open(const char *path, lifetimes **out) {
    *out = NULL;
    lifetimes *l = mem_new(1, sizeof *l, "lifetimes");
    if (!l) return ERR_DATA;
    l->h5 = H5I_INVALID_HID;
    l->path = mem_string(path);
    l->label = mem_string("");
    l->hash = mem_string("");
    int code = l->path && l->label && l->hash ? open_lifetimes(l) : ERR_DATA;
    if (!code) {
        *out = l;
        return 0;
    }
    lifetimes_close(l);
    return err_prefix(code, "%s", path);
}

void lifetimes_close(lifetimes *l) {
    if (!l) return;
    for (size_t i = 0; i < l->n_configs; i++) {
        config_entry *c = &l->config[i];
        for (size_t s = 0; s < c->n_seq; s++)
            for (int f = 0; f < SEQ_FIELDS; f++) mem_free(c->seq[s].text[f]);
        for (int f = 0; f < CONFIG_FIELDS; f++) mem_free(c->text[f]);
        mem_free(c->seq);
    }
    mem_free(l->config);
    if (l->h5 >= 0) H5Fclose(l->h5);
    mem_free(l->path);
    mem_free(l->label);
    mem_free(l->hash);
    mem_free(l);
}

const char *lifetimes_label(const lifetimes *l) {
    return l->label;
}
const char *lifetimes_hash(const lifetimes *l) {
    return l->hash;
}
size_t lifetimes_n_configs(const lifetimes *l) {
    return l->n_configs;
}
const lifetimes_config *lifetimes_get_config(const lifetimes *l, size_t config) {
    return &l->config[config].view;
}

size_t lifetimes_n_sequences(const lifetimes *l, size_t config) {
    return l->config[config].n_seq;
}
size_t lifetimes_sequence_number(const lifetimes *l, size_t config, size_t i) {
    return l->config[config].seq[i].seq;
}

const lifetimes_seq *lifetimes_get_seq(const lifetimes *l, size_t config, size_t seq) {
    const config_entry *c = &l->config[config];
    seq_entry key = {.seq = seq}, *found = bsearch(&key, c->seq, c->n_seq, sizeof key, by_number);
    return found ? &found->view : NULL;
}

static void place(char name[64], size_t config, size_t seq) {
    snprintf(name, 64, "config/%04zu/seq/%04zu/evict_at", config, seq);
}

int lifetimes_shape(const lifetimes *l, size_t config, size_t seq, int64_t shape[3]) {
    char name[64];
    hid_t set;
    place(name, config, seq);
    shape[0] = shape[1] = shape[2] = -1;
    int code = hdf_open_shaped(l->h5, name, HDF_INTEGER, 3, shape, &set);
    if (code) return err_prefix(code, "%s", l->path);
    H5Dclose(set);
    return 0;
}

static int check_values(const char *name, int n_layer, int n_kv_head, int32_t n_tokens, const int32_t *evict_at) {
    for (int layer = 0; layer < n_layer; layer++)
        for (int head = 0; head < n_kv_head; head++, evict_at += n_tokens)
            for (int32_t i = 0; i < n_tokens; i++)
                if (evict_at[i] <= i || evict_at[i] > n_tokens + 1)
                    return err_set(ERR_DATA, "%s: layer %d, kv head %d, entry %d leaves at %d (want %d to %d)", name,
                                   layer, head, i, evict_at[i], i + 1, n_tokens + 1);
    return 0;
}

int lifetimes_read(const lifetimes *l, size_t config, size_t seq, int n_layer, int n_kv_head, int32_t n_tokens,
                   int32_t *out) {
    char name[64];
    hid_t set;
    hsize_t start[3] = {0}, count[3] = {(hsize_t)n_layer, (hsize_t)n_kv_head, (hsize_t)n_tokens};
    place(name, config, seq);
    int code = hdf_open_shaped(l->h5, name, HDF_INTEGER, 3, (int64_t[]){n_layer, n_kv_head, n_tokens}, &set);
    if (!code) {
        code = hdf_read_block(set, H5T_NATIVE_INT32, 3, start, count, out);
        if (code) err_prefix(code, "%s", name);
        H5Dclose(set);
    }
    if (!code) code = check_values(name, n_layer, n_kv_head, n_tokens, out);
    return code ? err_prefix(code, "%s", l->path) : 0;
}
