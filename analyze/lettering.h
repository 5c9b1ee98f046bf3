/* Foreign words in pictures. Where no font has a character, Pango draws a box of its code, which gnuplot's png and pdf
 * terminals blow up over the whole picture. So the script asks fontconfig (fc-list), once for each 256 characters of
 * Unicode that are used, and writes U+25A1 (a white square) or '?' for those it lacks. An SVG is not asked about: who
 * shows it has fonts of their own. */
#pragma once

#include "base/text.h"

#include <stddef.h>
#include <stdint.h>

/* The characters that a script will write, beyond Latin ones. */
typedef struct lettering {
    uint32_t *item; /* ascending */
    size_t n, capacity;
} lettering;

/* Note the characters of UTF-8 words. Returns 0 or ERR_DATA (memory). */
int lettering_note(lettering *l, const char *words, size_t bytes);
/* Append what lettering_quote relies on, once a script, before the first. */
int lettering_define(const lettering *l, text *script);
/* Append words, all noted, as a gnuplot string expression in parentheses or, where they are Latin, a string. */
int lettering_quote(text *script, const char *words);
void lettering_free(lettering *l);
