/* The report as a list of parts, and what writes it: as one HTML file that needs nothing beside it, and as Markdown.
 * Both say the same, since neither knows more than the parts.
 *
 * All words are plain UTF-8; the writers escape them. Functions return 0 or ERR_DATA (memory). */
#pragma once

#include "base/text.h"

#include <stddef.h>

typedef enum report_kind {
    REPORT_SECTION,   /* words: the heading */
    REPORT_GROUP,     /* words: a heading inside a section */
    REPORT_LEAD,      /* words: a paragraph that stands out */
    REPORT_PARAGRAPH, /* words */
    REPORT_ITEM,      /* words: of a list, which neighbouring items form */
    REPORT_CODE,      /* words: lines in a fixed-width font */
    REPORT_TABLE,     /* words: its caption; cells, the first row being the header */
    REPORT_FIGURE,    /* words: its caption */
    REPORT_FRAGMENT   /* only HTML can show it */
} report_kind;

typedef struct report_part {
    report_kind kind;
    text words;
    text cells; /* of a table: n_cells texts, each ended by a NUL, row by row */
    size_t n_cells, n_columns;
    const char *align; /* a letter a column: 'l' or 'r' */
    text picture;      /* of a figure: an SVG file, or empty */
    text link;         /* of a figure: a file beside the report that shows it, or empty */
    text instead;      /* of a figure: words for who cannot see it */
    text html;         /* of a fragment: elements */
} report_part;

typedef struct report {
    text title;
    text style; /* a <style> element that fragments rely on, or empty */
    report_part *part;
    size_t n, capacity;
} report;
void report_free(report *r);

int report_add(report *r, report_kind kind, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Begin a table with its header; `align` is a literal with a letter for each of the columns. Then one call a cell. */
int report_add_table(report *r, const char *caption, const char *align, const char *const *column);
int report_cell(report *r, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* A cell of words that were put together elsewhere; frees them. `code` is passed on. */
int report_cell_text(report *r, text *words, int code);

/* picture and html are taken over and emptied. */
int report_add_figure(report *r, text *picture, const char *link, const char *words, const char *instead);
int report_add_fragment(report *r, text *html);

int report_write_html(const report *r, text *out);
int report_write_markdown(const report *r, text *out);
