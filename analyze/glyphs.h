/* Pieces of tokens as characters that can be shown: whole, visible, each in one or two columns of a fixed-width font.
 *
 * What cannot stand as it is gets a mark. U+21B5 is a line break, U+2192 a tab, ^@ and the like are other control
 * bytes. U+FFFD is a byte that is no UTF-8, and what XML has no room for. A character that several tokens share stands
 * in the first of them, and the others say U+25C2 (a small triangle that points back). A token without bytes, or with
 * nothing but invisible characters, says U+25AF (an empty box). Characters that turn the direction of a text are left
 * out. Marks that combine join the character before them in the same token, or U+25CC (a dotted circle) where there is
 * none. */
#pragma once

#include "base/text.h"

#include <stddef.h>
#include <stdint.h>

#define GLYPH_LINE_BREAK "\xe2\x86\xb5"
#define GLYPH_CONTINUED "\xe2\x97\x82"

typedef enum glyph_kind { GLYPH_PLAIN, GLYPH_SPACE, GLYPH_BREAK } glyph_kind;

typedef struct glyph {
    size_t at;       /* its first byte in the text */
    uint8_t bytes;   /* how many */
    uint8_t columns; /* 1 or 2: East Asian wide characters and emoji take two */
    uint8_t kind;    /* a glyph_kind; a break is the mark, after which a new line begins */
} glyph;

typedef struct glyphs {
    text text;     /* UTF-8, without control characters */
    glyph *item;   /* n */
    size_t *begin; /* [n_tokens+1] token t has the glyphs begin[t] .. begin[t+1]-1, at least one */
    size_t n, capacity;
} glyphs;

/* How many columns a character takes: 0 for marks that join the one before them, 2 for wide ones, else 1. */
int glyph_columns(uint32_t c);

/* Token t has the bytes pieces[offset[t]] .. pieces[offset[t+1]-1], as in a trace. Returns 0 or ERR_DATA (memory). */
int glyphs_read(const uint8_t *pieces, const int64_t *offset, int32_t n_tokens, glyphs *out);
void glyphs_free(glyphs *g);

size_t glyphs_columns(const glyphs *g, size_t from, size_t to); /* of the glyphs from .. to-1 */
/* Append those glyphs to a text. */
int glyphs_add(const glyphs *g, size_t from, size_t to, text *out);
