/* Unicode's canonical composition, form NFC (UAX #15), one stretch after the other, so that what each became is known.
 * Equal to that of the `tokenizers` library (tests/parity). libutf8proc knows the characters. */
#pragma once

#include <stddef.h>
#include <stdint.h>

/* All 0 at first. */
typedef struct nfc {
    char *text; /* [n] the form of the stretch that was read last */
    size_t n;

    uint64_t *key; /* decomposed characters in an order that can be sorted */
    int32_t *rune;
    size_t text_capacity, n_keys, key_capacity, rune_capacity;
} nfc;

/* Read the stretch at text, of *length bytes: a character and those behind it that may change places or merge with it.
 * A byte that is no UTF-8 is a stretch of its own and stays what it is. n > 0. Linear but for long runs of combining
 * marks, which are sorted. Returns 0, or ERR_DATA where memory runs out. */
int nfc_next(nfc *f, const char *text, size_t n, size_t *length);
void nfc_free(nfc *f);
