#include "base/csv.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/text.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

static int read_file(const char *path, char **out, size_t *bytes) {
    FILE *f = fopen(path, "rb");
    if (!f) return err_set(ERR_DATA, "%s: %s", path, strerror(errno));
    char *data = NULL;
    size_t n = 0, capacity = 0, got = 0;
    int code = 0;
    do {
        n += got;
        code = mem_grow((void **)&data, &capacity, n + 65536, 1, "CSV file");
    } while (!code && (got = fread(data + n, 1, capacity - n - 1, f)) > 0);
    if (!code && ferror(f)) code = err_set(ERR_DATA, "%s: %s", path, strerror(errno));
    fclose(f);
    if (!code && memchr(data, 0, n)) code = err_set(ERR_DATA, "%s: holds NUL bytes, so it is no CSV file", path);
    if (code) {
        mem_free(data);
        return code;
    }
    data[n] = 0;
    *out = data;
    *bytes = n;
    return 0;
}

static int bad_record(const csv *c, const char *what) {
    return err_set(ERR_DATA, "%s:%zu: %s", c->path, c->line, what);
}

static bool at_end_of_field(const csv *c) {
    return c->at == c->end || *c->at == ',' || *c->at == '\n' || (*c->at == '\r' && c->at[1] == '\n');
}

/* Step over the field's end: a comma, a line end or the end of the file. *more: another field of this record follows.
 */
static void end_of_field(csv *c, char *write, bool *more) {
    *more = c->at < c->end && *c->at == ',';
    if (!*more && c->at < c->end) {
        if (*c->at == '\r' && c->at[1] == '\n') c->at++;
        c->next_line++;
    }
    if (c->at < c->end) c->at++;
    *write = 0;
}

/* Fields are unquoted in place: what is written never overtakes what is read. */
static int read_quoted(csv *c, bool *more) {
    char *write = ++c->at;
    for (;; c->at++) {
        if (c->at == c->end) return bad_record(c, "a quoted field is not closed");
        if (*c->at == '"' && *++c->at != '"') break;
        c->next_line += *c->at == '\n';
        *write++ = *c->at;
    }
    if (!at_end_of_field(c)) return bad_record(c, "text after a closing quote");
    end_of_field(c, write, more);
    return 0;
}

static int read_record(csv *c, size_t *n_fields) {
    bool more = true;
    c->line = c->next_line;
    for (*n_fields = 0; more; ++*n_fields) {
        if (*n_fields == CSV_COLUMNS_MAX) return bad_record(c, "more than 256 fields");
        bool quoted = c->at < c->end && *c->at == '"';
        c->field[*n_fields] = c->at + quoted;
        if (quoted) {
            TRY(read_quoted(c, &more));
            continue;
        }
        for (; !at_end_of_field(c); c->at++)
            if (*c->at == '"') return bad_record(c, "a quote inside a field that is not quoted");
        end_of_field(c, c->at, &more);
    }
    return 0;
}

/* Is this line "# kvlag KIND vN", with a number N other than 1? */
static bool other_version(const char *line, const char *kind) {
    static const char ours[] = "# kvlag ";
    if (strncmp(line, ours, sizeof ours - 1) != 0) return false;
    const char *word = line + sizeof ours - 1;
    size_t length = kind ? strlen(kind) : strcspn(word, " \r\n");
    if (kind && strncmp(word, kind, length) != 0) return false;
    if (strncmp(word + length, " v", 2) != 0) return false;
    const char *version = word + length + 2;
    size_t digits = strspn(version, "0123456789");
    return digits && strchr("\r\n", version[digits]) && (digits != 1 || *version != '1');
}

static int skip_comments(csv *c, const char *kind) {
    if (c->end - c->at >= 3 && memcmp(c->at, "\xef\xbb\xbf", 3) == 0) c->at += 3;
    for (c->next_line = 1; c->at < c->end && *c->at == '#'; c->next_line++) {
        int n = (int)strcspn(c->at, "\r\n");
        if (other_version(c->at, kind))
            return err_set(ERR_DATA, "%s:%zu: '%.*s' is not supported (want v1)", c->path, c->next_line, n, c->at);
        c->at += strcspn(c->at, "\n");
        if (c->at < c->end) c->at++;
    }
    return 0;
}

static int read_header(csv *c, const char *kind) {
    TRY(skip_comments(c, kind));
    if (c->at == c->end) return err_set(ERR_DATA, "%s: no header line", c->path);
    TRY(read_record(c, &c->n_columns));
    memcpy(c->column, c->field, sizeof c->column);
    for (size_t i = 0; i < c->n_columns; i++)
        if (csv_find(c, c->column[i]) < i)
            return err_set(ERR_DATA, "%s:%zu: two columns '%s'", c->path, c->line, c->column[i]);
    return 0;
}

int csv_open(const char *path, const char *kind, csv *out) {
    size_t bytes = 0;
    *out = (csv){.path = path};
    TRY(read_file(path, &out->text, &bytes));
    out->at = out->text;
    out->end = out->text + bytes;
    return read_header(out, kind);
}

void csv_close(csv *c) {
    mem_free(c->text);
    *c = (csv){0};
}

char *csv_keep(csv *c) {
    char *kept = c->text;
    c->text = NULL;
    return kept;
}

int csv_next(csv *c, bool *more) {
    size_t n;
    *more = c->at < c->end;
    if (!*more) return 0;
    TRY(read_record(c, &n));
    if (n == c->n_columns) return 0;
    return err_set(ERR_DATA, "%s:%zu: %zu fields, the header has %zu", c->path, c->line, n, c->n_columns);
}

bool csv_has_comment(const csv *c, const char *start) {
    size_t n = strlen(start);
    const char *line = c->text + (strncmp(c->text, "\xef\xbb\xbf", 3) == 0 ? 3 : 0);
    for (; *line == '#'; line += *line == '\n') {
        if (strncmp(line, start, n) == 0) return true;
        line += strcspn(line, "\n");
    }
    return false;
}

size_t csv_find(const csv *c, const char *name) {
    for (size_t i = 0; i < c->n_columns; i++)
        if (strcmp(c->column[i], name) == 0) return i;
    return CSV_ABSENT;
}

int csv_need(const csv *c, const char *name, size_t *at) {
    *at = csv_find(c, name);
    return *at == CSV_ABSENT ? err_set(ERR_DATA, "%s:%zu: no column '%s'", c->path, c->line, name) : 0;
}

int csv_number(const csv *c, size_t at, double least, double *out) {
    const char *s = c->field[at], *name = c->column[at];
    if (text_parse_number(s, out) != 0 || !isfinite(*out))
        return err_set(ERR_DATA, "%s:%zu: %s '%s' is not a number", c->path, c->line, name, s);
    if (*out < least) return err_set(ERR_DATA, "%s:%zu: %s %s is below %g", c->path, c->line, name, s, least);
    return 0;
}
