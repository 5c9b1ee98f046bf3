#include "base/text.h"
#include "base/err.h"
#include "base/mem.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int reserve(text *t, size_t more) {
    return mem_grow((void **)&t->data, &t->capacity, t->n + more + 1, 1, "text");
}

int text_add_bytes(text *t, const void *bytes, size_t n) {
    TRY(reserve(t, n));
    if (n) memcpy(t->data + t->n, bytes, n);
    t->n += n;
    t->data[t->n] = 0;
    return 0;
}

int text_add_list(text *t, const char *format, va_list args) {
    va_list again;
    va_copy(again, args);
    int n = vsnprintf(NULL, 0, format, args);
    int code = n < 0 ? err_set(ERR_DATA, "text: cannot format") : reserve(t, (size_t)n);
    if (!code) {
        vsnprintf(t->data + t->n, (size_t)n + 1, format, again);
        t->n += (size_t)n;
    }
    va_end(again);
    return code;
}

int text_add(text *t, const char *format, ...) {
    va_list args;
    va_start(args, format);
    int code = text_add_list(t, format, args);
    va_end(args);
    return code;
}

int text_add_shell(text *t, const char *word) {
    const char *safe = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_@%+=:,./-";
    if (*word && strspn(word, safe) == strlen(word)) return text_add(t, "%s", word);
    TRY(text_add(t, "'"));
    for (; *word; word++)
        if (*word == '\'') TRY(text_add(t, "'\\''"));
        else TRY(text_add_bytes(t, word, 1));
    return text_add(t, "'");
}

int text_add_csv(text *t, const char *field) {
    if (!strpbrk(field, ",\"\r\n")) return text_add(t, "%s", field);
    TRY(text_add(t, "\""));
    for (; *field; field++) TRY(*field == '"' ? text_add(t, "\"\"") : text_add_bytes(t, field, 1));
    return text_add(t, "\"");
}

int text_add_path(text *t, const char *folder, const char *name) {
    size_t n = strlen(folder);
    return text_add(t, "%s%s%s", folder, n && folder[n - 1] == '/' ? "" : "/", name);
}

int text_path(const char *folder, const char *name, char **out) {
    text t = {0};
    int code = text_add_path(&t, folder, name);
    *out = t.data;
    return code;
}

void text_free(text *t) {
    mem_free(t->data);
    *t = (text){0};
}

const char *text_base_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

char *text_number(char out[32], double value) {
    if (isnan(value)) return strcpy(out, "nan");
    if (isinf(value)) return strcpy(out, value > 0 ? "inf" : "-inf");
    if (fabs(value) < 1e15 && value == floor(value)) {
        snprintf(out, 32, "%.0f", value == 0 ? 0.0 : value);
        return out;
    }
    for (int digits = 1; digits <= 17; digits++) {
        snprintf(out, 32, "%.*g", digits, value);
        if (strtod(out, NULL) == value) break;
    }
    return out; /* the program never calls setlocale, so the point is '.' */
}

int text_find_word(const char *words, const char *word) {
    size_t n = strlen(word);
    int index = 0;
    for (const char *w = words; w; w = strchr(w, '|') ? strchr(w, '|') + 1 : NULL, index++)
        if (n && strncmp(w, word, n) == 0 && (w[n] == '|' || w[n] == 0)) return index;
    return -1;
}

char *text_list_words(const char *words, char *out, size_t size) {
    size_t used = strlen(out);
    for (const char *w = words; w && used < size; w = strchr(w, '|')) {
        w += *w == '|';
        used += (size_t)snprintf(out + used, size - used, "%s%.*s", used ? ", " : "", (int)strcspn(w, "|"), w);
    }
    return out;
}

long text_counted_word(const char *s, const char *word, long least, long most) {
    size_t n = strlen(word);
    char *end;
    if (strncmp(s, word, n) != 0 || s[n] != ':' || s[n + 1] < '0' || s[n + 1] > '9') return -1;
    long k = strtol(s + n + 1, &end, 10);
    return *end || k < least || k > most ? -1 : k;
}

int text_parse_number(const char *s, double *value) {
    if (strcmp(s, "inf") == 0) {
        *value = INFINITY;
        return 0;
    }
    if (!*s || strspn(s, "0123456789.eE+-") != strlen(s)) return -1;
    char *end;
    *value = strtod(s, &end);
    return *end || !isfinite(*value) ? -1 : 0;
}
