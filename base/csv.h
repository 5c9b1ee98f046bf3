/* CSV files read by column name: RFC 4180 records behind a header line, and before that any lines that start with '#'.
 * A byte order mark is skipped; line ends may be CRLF. Refused, naming file and line: NUL bytes, quotes that are not
 * closed or stand inside a field, two columns of one name, a record with more or fewer fields than the header. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

enum { CSV_COLUMNS_MAX = 256 };
#define CSV_ABSENT ((size_t)-1)

typedef struct csv {
    const char *path;
    size_t line;                         /* on which the current record began, from 1 */
    const char *column[CSV_COLUMNS_MAX]; /* names, from the header */
    size_t n_columns;
    const char *field[CSV_COLUMNS_MAX]; /* of the current record, NUL-terminated, never NULL */

    char *text, *at, *end; /* the file, which fields point into; what is still to read */
    size_t next_line;      /* of `at` */
} csv;

/* Read the file and its header. `kind` "results": a comment line "# kvlag results vN" with N other than 1 is refused;
 * NULL: of any kind. `path` must outlive *out. Returns 0 or ERR_DATA; release with csv_close either way. */
int csv_open(const char *path, const char *kind, csv *out);
/* Frees the text, unless csv_keep took it. Safe on a zeroed csv. */
void csv_close(csv *c);

/* Take the text that all fields, past and to come, point into; the caller frees it with mem_free. */
char *csv_keep(csv *c);

/* The next record. *more = false at the end of the file. */
int csv_next(csv *c, bool *more);

/* Is there a line before the header that begins with `start` ("# calibration: uncalibrated")? */
bool csv_has_comment(const csv *c, const char *start);

/* Index of a column, or CSV_ABSENT. */
size_t csv_find(const csv *c, const char *name);
/* The same; ERR_DATA where there is none. */
int csv_need(const csv *c, const char *name, size_t *at);
/* The current record's field as a finite number >= least; `at` as from csv_find. */
int csv_number(const csv *c, size_t at, double least, double *out);
