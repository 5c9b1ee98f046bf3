/* Pictures by gnuplot (5.2 or later), which runs as a child process and reads its script from a pipe. */
#pragma once

#include "base/text.h"

/* A kind of picture: --format NAME, file ending, and the `set terminal` line that makes it. */
typedef struct gnuplot_format {
    const char *name;
    const char *terminal; /* what follows `set terminal`; may use width, height, columns, rows */
} gnuplot_format;
extern const gnuplot_format gnuplot_formats[]; /* ends with a NULL name */

/* Append `word` as a gnuplot string: in single quotes, in which gnuplot expands nothing; a quote that cannot stand in
 * them is joined to them, so that it is a string expression. Control bytes become '?'. A string must not stand inside a
 * block in braces: gnuplot counts braces in strings there. 0 or ERR_DATA. */
int gnuplot_quote(text *t, const char *word);

/* Append the head of a script: which picture is made, from which data. Run in its folder the script makes NAME.png
 * from NAME.dat; the variables format, data and picture change that. The canvas is `width` x `height` inches. The rest
 * of the script may use `paper`: not a text terminal. */
int gnuplot_header(text *t, const char *name, double width, double height);

/* Run a script made with gnuplot_header on the file `data` to make `picture`. Decimal points are points in every
 * locale and the user's gnuplot settings are not read. Returns 0, or ERR_DATA where gnuplot is not installed
 * ("gnuplot not found (data written to DATA)"), fails, or leaves no picture; an empty one is removed. */
int gnuplot_draw(const text *script, const char *format, const char *data, const char *picture);
