/* Growing text and small helpers on names and numbers. */
#pragma once

#include <stdarg.h>
#include <stddef.h>

typedef struct text {
    char *data; /* NUL-terminated once anything was added; NULL before */
    size_t n, capacity;
} text;

int text_add(text *t, const char *format, ...) __attribute__((format(printf, 2, 3))); /* 0 or ERR_DATA */
int text_add_list(text *t, const char *format, va_list args) __attribute__((format(printf, 2, 0)));
int text_add_bytes(text *t, const void *bytes, size_t n);
int text_add_shell(text *t, const char *word); /* quoted for a shell only where it must be */
int text_add_csv(text *t, const char *field);  /* quoted as RFC 4180 only where it must be */
void text_free(text *t);

/* "folder/name", with one slash between; text_path's is owned by the caller (mem_free). 0 or ERR_DATA. */
int text_add_path(text *t, const char *folder, const char *name);
int text_path(const char *folder, const char *name, char **out);

const char *text_base_name(const char *path); /* after the last '/'; points into path */

/* The shortest decimal that reads back as the same f64 ("0.98", "1e-06", "inf", "-inf", "nan"); '.' under every
 * locale. `out` needs 32 bytes; returns out. */
char *text_number(char out[32], double value);

/* Whole-string number: optional sign, digits, fraction, exponent, or "inf". Returns 0 and *value, or -1. */
int text_parse_number(const char *s, double *value);
/* Index of `word` in "a|b|c", or -1; "" is no word. */
int text_find_word(const char *words, const char *word);
/* "a, b, c" of "a|b|c", behind what `out` holds, with ", " between; cut at `size` bytes, NUL included. Returns out. */
char *text_list_words(const char *words, char *out, size_t size);
/* The K of "WORD:K", from `least` (0 or more) to `most`; -1 where the text is anything else. */
long text_counted_word(const char *s, const char *word, long least, long most);
