#include "base/options_file.h"
#include "base/err.h"
#include "base/mem.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

enum { MOST_BYTES = 1 << 20 };

static int own(opt_file *f, char *bytes) {
    if (!bytes) return ERR_DATA;
    if (mem_grow((void **)&f->owned, &f->capacity, f->n + 1, sizeof *f->owned, "options")) {
        mem_free(bytes);
        return ERR_DATA;
    }
    f->owned[f->n++] = bytes;
    return 0;
}

/* The whole file, NUL-terminated, in f->owned[0]. */
static int read_bytes(opt_file *f) {
    TRY(own(f, mem_new(MOST_BYTES + 2, 1, "options")));
    FILE *in = fopen(f->path, "rb");
    if (!in) return err_set(ERR_DATA, "%s: %s", f->path, strerror(errno));
    size_t n = fread(f->owned[0], 1, MOST_BYTES + 1, in);
    bool failed = ferror(in);
    int reason = errno;
    fclose(in);
    if (failed) return err_set(ERR_DATA, "%s: %s", f->path, strerror(reason));
    if (n > MOST_BYTES) return err_set(ERR_DATA, "%s: larger than 1 MiB; lines of key = value are wanted", f->path);
    if (memchr(f->owned[0], 0, n))
        return err_set(ERR_DATA, "%s: holds NUL bytes; lines of key = value are wanted", f->path);
    return 0;
}

static void cut_comment(char *line) {
    for (char *c = line; *c; c++) {
        if (*c != '#' || (c > line && !isspace((unsigned char)c[-1]))) continue;
        *c = 0;
        return;
    }
}

static char *trim(char *line) {
    while (isspace((unsigned char)*line)) line++;
    size_t n = strlen(line);
    while (n && isspace((unsigned char)line[n - 1])) line[--n] = 0;
    return line;
}

/* A file that is named relative to this one. */
static int from_our_folder(opt_file *f, const char **value) {
    const char *slash = strrchr(f->path, '/');
    if (!slash || **value == '/') return 0;
    size_t folder = (size_t)(slash - f->path) + 1, n = strlen(*value);
    char *path = mem_new(folder + n + 1, 1, "options");
    TRY(own(f, path));
    memcpy(path, f->path, folder);
    memcpy(path + folder, *value, n);
    *value = path;
    return 0;
}

static int set(opt_file *f, const opt *table, const bool *on_line, const char *key, const char *value) {
    const opt *o = opt_find(table, key);
    if (!o) return opt_unknown(table, "key ", key);
    if (o->target == &f->path) return err_set(ERR_USAGE, "'%s' cannot stand in a file", key);
    if (!*value) return err_set(ERR_USAGE, "%s: no value (%s)", key, o->kind == OPT_FLAG ? "true or false" : o->arg);
    if (on_line[o - table]) return 0;
    if (o->kind == OPT_FILE || o->kind == OPT_FILES) TRY(from_our_folder(f, &value));
    return opt_set(table, o, value);
}

static int read_line(opt_file *f, const opt *table, const bool *on_line, char *line) {
    cut_comment(line);
    char *key = trim(line), *equals = strchr(key, '=');
    if (!*key) return 0;
    if (!equals) return err_set(ERR_USAGE, "'%s' is not key = value", key);
    *equals = 0;
    return set(f, table, on_line, trim(key), trim(equals + 1));
}

int opt_file_read(opt_file *f, const opt *table) {
    bool on_line[OPT_MOST] = {false};
    if (!f->path) return 0;
    for (size_t i = 0; table[i].name; i++) on_line[i] = opt_given(table, table[i].target);
    TRY(read_bytes(f));
    char *rest = f->owned[0], *line;
    for (int number = 1; (line = strsep(&rest, "\n")); number++) {
        int code = read_line(f, table, on_line, line);
        if (code) return err_prefix(code, "%s:%d", f->path, number);
    }
    return 0;
}

void opt_file_free(opt_file *f) {
    for (size_t i = 0; i < f->n; i++) mem_free(f->owned[i]);
    mem_free(f->owned);
    *f = (opt_file){0};
}
