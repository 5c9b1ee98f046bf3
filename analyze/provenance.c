#include "analyze/provenance.h"
#include "base/err.h"
#include "base/mem.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <xxhash.h>

static int hash_stream(FILE *f, const char *path, char out[33]) {
    static char buffer[65536];
    XXH3_state_t *state = XXH3_createState();
    if (!state) return err_set(ERR_DATA, "out of memory");
    XXH3_128bits_reset(state);
    for (size_t n; (n = fread(buffer, 1, sizeof buffer, f)) > 0;) XXH3_128bits_update(state, buffer, n);
    XXH128_hash_t hash = XXH3_128bits_digest(state);
    XXH3_freeState(state);
    if (ferror(f)) return err_set(ERR_DATA, "%s: cannot be read", path);
    snprintf(out, 33, "%016llx%016llx", (unsigned long long)hash.high64, (unsigned long long)hash.low64);
    return 0;
}

static int hash_file(const char *path, char out[33]) {
    FILE *f = fopen(path, "rb");
    if (!f) return err_set(ERR_DATA, "%s: %s", path, strerror(errno));
    int code = hash_stream(f, path, out);
    fclose(f);
    return code;
}

static int copy_comments(const char *line, text *out) {
    if (strncmp(line, "\xef\xbb\xbf", 3) == 0) line += 3;
    for (; *line == '#'; line += *line == '\n') {
        line += 1 + (line[1] == ' ');
        size_t n = strcspn(line, "\r\n");
        TRY(text_add(out, "%.*s\n", (int)n, line));
        line += strcspn(line, "\n");
    }
    return 0;
}

static int add(provenance *p, const char *path, const char *role, const char *csv) {
    provenance_file *f = &p->item[p->n++];
    f->path = path;
    f->role = role;
    TRY(hash_file(path, f->hash));
    return csv ? copy_comments(csv, &f->comments) : 0;
}

static bool has_rows(const results *r, size_t file) {
    for (size_t i = 0; i < r->n_rows; i++)
        if (r->rows[i].file == file) return true;
    return false;
}

int provenance_read(const results *r, const char *lifetimes, const char *trace, provenance *out) {
    *out = (provenance){0};
    out->item = mem_new(r->n_files + 2, sizeof *out->item, "files");
    if (!out->item) return ERR_DATA;
    for (size_t i = 0; i < r->n_files; i++)
        TRY(add(out, r->paths[i], has_rows(r, i) ? "results" : "truths", r->file_text[i]));
    if (lifetimes) TRY(add(out, lifetimes, "lifetimes", NULL));
    return trace ? add(out, trace, "trace", NULL) : 0;
}

void provenance_free(provenance *p) {
    for (size_t i = 0; i < p->n; i++) text_free(&p->item[i].comments);
    mem_free(p->item);
    *p = (provenance){0};
}

int provenance_values(const provenance_file *f, const char *key, text *out) {
    size_t n = strlen(key);
    for (const char *line = f->comments.n ? f->comments.data : ""; *line; line += strcspn(line, "\n") + 1) {
        if (strncmp(line, key, n) != 0 || strncmp(line + n, ": ", 2) != 0) continue;
        const char *value = line + n + 2;
        TRY(text_add(out, "%.*s\n", (int)strcspn(value, "\n"), value));
    }
    return 0;
}
