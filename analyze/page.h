/* Tokens laid out in lines of a fixed-width font. */
#pragma once

#include "analyze/glyphs.h"

#include <stddef.h>
#include <stdint.h>

/* What a token puts on one line. Most tokens have one segment; one that holds a line break or is too long has more. */
typedef struct page_segment {
    int32_t token, line, column, columns; /* lines and columns from 0 */
    size_t from, to;                      /* its glyphs from .. to-1; a blank that begins a wrapped line is left out */
} page_segment;

typedef struct page {
    page_segment *item;
    size_t n, capacity;
    int32_t n_lines;
} page;

/* Lay out all n_tokens. A line holds `width` columns, and behind them, if need be, the marks of line breaks (several in
 * a row stand on one line). Lines break at the breaks of the text and where else they must: before a token that begins
 * with a blank or follows one, or at a wide character; inside a word only where it is longer than a line. Returns 0 or
 * ERR_DATA (memory). */
int page_lay_out(const glyphs *g, int32_t n_tokens, int32_t width, page *out);
void page_free(page *p);
