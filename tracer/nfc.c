#include "tracer/nfc.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/utf8.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

/* No character before this one decomposes, is a combining mark, or merges with what stands before it. */
enum { FIRST_OF_INTEREST = 0x300 };
enum { BEFORE_FINALS = 0x11a7 };
/* No character decomposes into more. */
enum { PARTS_MAX = 8 };
/* A key: combining class, place, character. */
enum { CLASS_SHIFT = 53, PLACE_SHIFT = 21 };
#define RUNE_MASK ((UINT64_C(1) << PLACE_SHIFT) - 1)

/* The character at text, and its bytes; 0 bytes: it is no UTF-8. */
static int32_t rune_at(const char *text, size_t n, size_t *length) {
    utf8proc_int32_t rune = -1;
    *length = n ? utf8_length(text, n) : 0;
    if (*length) utf8proc_iterate((const utf8proc_uint8_t *)text, (utf8proc_ssize_t)*length, &rune);
    return rune;
}

static int combining_class(int32_t rune) {
    return utf8proc_get_property(rune)->combining_class;
}

/* What two neighbours merge into, -1 if they do not. A Korean vowel that stands where the first final consonant would
 * is none, but versions of the library up to 2.8 drop it behind a syllable. */
static int32_t merged(int32_t left, int32_t right) {
    utf8proc_int32_t pair[2] = {left, right};
    if (right == BEFORE_FINALS) return -1;
    return utf8proc_normalize_utf32(pair, 2, UTF8PROC_COMPOSE | UTF8PROC_STABLE) == 1 ? pair[0] : -1;
}

static int decompose(int32_t rune, int32_t part[PARTS_MAX], int *n) {
    int boundary = 0;
    utf8proc_ssize_t found = utf8proc_decompose_char(rune, part, PARTS_MAX, UTF8PROC_DECOMPOSE, &boundary);
    if (found < 1 || found > PARTS_MAX) return err_set(ERR_DATA, "character U+%04X does not decompose", (unsigned)rune);
    *n = (int)found;
    return 0;
}

static int put(nfc *f, const int32_t *part, int n) {
    TRY(mem_grow((void **)&f->key, &f->key_capacity, f->n_keys + (size_t)n, sizeof *f->key, "text"));
    for (int i = 0; i < n; i++, f->n_keys++)
        f->key[f->n_keys] =
            (uint64_t)combining_class(part[i]) << CLASS_SHIFT | (uint64_t)f->n_keys << PLACE_SHIFT | (uint64_t)part[i];
    return 0;
}

/* What a character that is no combining mark may merge with, behind `last` and these parts. -1 for nothing, as behind a
 * mark: no character that holds a mark merges with one that is none. */
static int32_t end_of(int32_t last, const int32_t *part, int n) {
    for (int i = 0; i < n; i++) {
        int32_t whole = last >= 0 ? merged(last, part[i]) : -1;
        last = combining_class(part[i]) ? -1 : whole >= 0 ? whole : part[i];
    }
    return last;
}

static int gather(nfc *f, const char *text, size_t n, size_t *length) {
    int32_t part[PARTS_MAX], last = -1, rune;
    int n_parts = 0;
    size_t at = 0;
    f->n_keys = 0;
    for (size_t bytes; (rune = rune_at(text + at, n - at, &bytes)) >= 0; at += bytes) {
        if (at && rune < FIRST_OF_INTEREST) break;
        TRY(decompose(rune, part, &n_parts));
        if (at && combining_class(*part) == 0 && (last < 0 || merged(last, *part) < 0)) break;
        last = end_of(last, part, n_parts);
        TRY(put(f, part, n_parts));
    }
    *length = at;
    return 0;
}

static int compare(const void *x, const void *y) {
    uint64_t a = *(const uint64_t *)x, b = *(const uint64_t *)y;
    return (a > b) - (a < b);
}

/* Marks between two characters that are none, by class; equal ones keep their order. */
static void order(nfc *f) {
    for (size_t from = 0, to; from < f->n_keys; from = to + 1) {
        for (to = from; to < f->n_keys && f->key[to] >> CLASS_SHIFT; to++) continue;
        qsort(f->key + from, to - from, sizeof *f->key, compare);
    }
}

static int compose(nfc *f) {
    TRY(mem_grow((void **)&f->rune, &f->rune_capacity, f->n_keys, sizeof *f->rune, "text"));
    TRY(mem_grow((void **)&f->text, &f->text_capacity, 4 * f->n_keys, 1, "text"));
    for (size_t i = 0; i < f->n_keys; i++) f->rune[i] = (int32_t)(f->key[i] & RUNE_MASK);
    utf8proc_ssize_t n =
        utf8proc_normalize_utf32(f->rune, (utf8proc_ssize_t)f->n_keys, UTF8PROC_COMPOSE | UTF8PROC_STABLE);
    if (n < 0) return err_set(ERR_DATA, "text: %s", utf8proc_errmsg(n));
    f->n = 0;
    for (utf8proc_ssize_t i = 0; i < n; i++)
        f->n += (size_t)utf8proc_encode_char(f->rune[i], (utf8proc_uint8_t *)f->text + f->n);
    return 0;
}

static int keep(nfc *f, const char *text, size_t n) {
    TRY(mem_grow((void **)&f->text, &f->text_capacity, n, 1, "text"));
    memcpy(f->text, text, n);
    f->n = n;
    return 0;
}

int nfc_next(nfc *f, const char *text, size_t n, size_t *length) {
    size_t behind;
    int32_t rune = rune_at(text, n, length);
    if (rune < 0) *length = 1;
    bool plain = rune < FIRST_OF_INTEREST && rune_at(text + *length, n - *length, &behind) < FIRST_OF_INTEREST;
    if (rune < 0 || plain) return keep(f, text, *length);
    TRY(gather(f, text, n, length));
    order(f);
    return compose(f);
}

void nfc_free(nfc *f) {
    mem_free(f->text);
    mem_free(f->key);
    mem_free(f->rune);
    *f = (nfc){0};
}
