#include "traces/content_hash.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/text.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

typedef struct entry {
    char *path;
    uint64_t shape[2 + 8]; /* rank, size of a value, dims */
    XXH3_state_t *values;
} entry;

struct content_hash {
    text facts;
    entry *entry;
    size_t n, capacity;
};

int content_hash_new(content_hash **out) {
    *out = mem_new(1, sizeof **out, "content hash");
    if (!*out) return ERR_DATA;
    return text_add(&(*out)->facts, "kvlag-trace content 1\n");
}

void content_hash_free(content_hash *c) {
    if (!c) return;
    for (size_t i = 0; i < c->n; i++) {
        mem_free(c->entry[i].path);
        XXH3_freeState(c->entry[i].values);
    }
    mem_free(c->entry);
    text_free(&c->facts);
    mem_free(c);
}

int content_hash_model(content_hash *c, const trace_model *m) {
    char scale[32], softcap[32];
    TRY(text_add(&c->facts, "name=%s\narch=%s\nn_layer=%d\nn_head=%d\nn_kv_head=%d\nhead_dim=%d\n", m->name, m->arch,
                 m->n_layer, m->n_head, m->n_kv_head, m->head_dim));
    TRY(text_add(&c->facts, "n_embd=%d\nn_vocab=%d\nscale=%s\nsoftcap=%s\nrope=%s\nwindow=", m->n_embd, m->n_vocab,
                 text_number(scale, m->scale), text_number(softcap, m->softcap), m->rope));
    for (int l = 0; l < m->n_layer; l++) TRY(text_add(&c->facts, "%d,", m->window[l]));
    return text_add(&c->facts, "\n");
}

int content_hash_sequence(content_hash *c, size_t seq, const trace_sequence *s) {
    return text_add(&c->facts, "seq=%04zu n_tokens=%d n_prompt=%d source=%s\n", seq, s->n_tokens, s->n_prompt,
                    s->source);
}

int content_hash_dataset(content_hash *c, const char *path, int rank, const uint64_t *dims, size_t size, size_t *id) {
    if (rank > 8) return err_set(ERR_DATA, "%s: has %d dimensions; the content hash knows up to 8", path, rank);
    TRY(mem_grow((void **)&c->entry, &c->capacity, c->n + 1, sizeof *c->entry, "content hash"));
    entry *e = &c->entry[c->n];
    *e = (entry){.path = mem_string(path), .shape = {(uint64_t)rank, size}, .values = XXH3_createState()};
    if (!e->path || !e->values) {
        mem_free(e->path);
        XXH3_freeState(e->values);
        return err_set(ERR_DATA, "content hash: out of memory");
    }
    for (int d = 0; d < rank; d++) e->shape[2 + d] = dims[d];
    XXH3_128bits_reset(e->values);
    *id = c->n++;
    return 0;
}

void content_hash_chunk(content_hash *c, size_t id, int rank, const uint64_t *offset, uint64_t hash) {
    XXH3_128bits_update(c->entry[id].values, offset, (size_t)rank * sizeof *offset);
    XXH3_128bits_update(c->entry[id].values, &hash, sizeof hash);
}

void content_hash_values(content_hash *c, size_t id, const void *values, size_t bytes) {
    XXH3_128bits_update(c->entry[id].values, values, bytes);
}

static int by_path(const void *a, const void *b) {
    return strcmp(((const entry *)a)->path, ((const entry *)b)->path);
}

static void to_hex(XXH3_state_t *state, char hex[CONTENT_HASH_HEX]) {
    XXH128_canonical_t bytes;
    XXH128_canonicalFromHash(&bytes, XXH3_128bits_digest(state));
    for (size_t i = 0; i < sizeof bytes.digest; i++) snprintf(hex + 2 * i, 3, "%02x", bytes.digest[i]);
}

int content_hash_finish(content_hash *c, char hex[CONTENT_HASH_HEX]) {
    XXH3_state_t *all = XXH3_createState();
    if (!all) return err_set(ERR_DATA, "content hash: out of memory");
    if (c->n) qsort(c->entry, c->n, sizeof *c->entry, by_path);
    XXH3_128bits_reset(all);
    XXH3_128bits_update(all, c->facts.data, c->facts.n);
    for (size_t i = 0; i < c->n; i++) {
        const entry *e = &c->entry[i];
        to_hex(e->values, hex);
        XXH3_128bits_update(all, e->path, strlen(e->path) + 1);
        XXH3_128bits_update(all, e->shape, (size_t)(2 + e->shape[0]) * sizeof *e->shape);
        XXH3_128bits_update(all, hex, CONTENT_HASH_HEX - 1);
    }
    to_hex(all, hex);
    XXH3_freeState(all);
    return 0;
}

int content_hash_of_file(const char *path, char hex[CONTENT_HASH_HEX]) {
    enum { PIECE = 1 << 20 };
    FILE *f = fopen(path, "rb");
    if (!f) return err_set(ERR_DATA, "cannot be opened: %s", strerror(errno));
    XXH3_state_t *state = XXH3_createState();
    void *piece = mem_new(PIECE, 1, "file piece");
    int code = state && piece ? 0 : err_set(ERR_DATA, "content hash: out of memory");
    if (!code) {
        XXH3_128bits_reset(state);
        for (size_t n; (n = fread(piece, 1, PIECE, f)) > 0;) XXH3_128bits_update(state, piece, n);
        if (ferror(f)) code = err_set(ERR_DATA, "read failed: %s", strerror(errno));
        else to_hex(state, hex);
    }
    XXH3_freeState(state);
    mem_free(piece);
    fclose(f);
    return code;
}
