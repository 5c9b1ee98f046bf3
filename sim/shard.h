/* One of n parts of a sweep, and what its results file says about itself.
 *
 * Computed configurations ("units") are numbered over the whole call, in the order of traces, sequences and asks; the
 * k-th of n shards has the units u with u mod n = k-1, so rows that share a configuration stay together. Its CSV holds
 * its own rows only and says so in three lines behind the first:
 *
 *     # shard: 2/3
 *     # shard work: 38 rows, kvlag 0.1.0, XXH3 0123456789abcdef
 *     # shard rows: 1,4,7-9
 *
 * Rows count from 0 in the CSV of the whole call. The work is a hash of everything that its results depend on. */
#pragma once

#include "base/text.h"

#include <stdbool.h>

typedef struct shard {
    size_t k, n; /* from 1; {1, 1} is everything */
} shard;

/* "2/3". ERR_USAGE names what is wrong. */
int shard_parse(const char *spec, shard *out);
bool shard_owns(shard s, size_t unit);

typedef struct shard_note {
    shard part;
    size_t total; /* rows of the whole call */
    char *work;   /* "38 rows, kvlag 0.1.0, XXH3 0123456789abcdef"; owned */
    size_t *row;  /* ascending; owned */
    size_t n_rows, capacity;
} shard_note;
void shard_note_free(shard_note *note);
int shard_note_add_row(shard_note *note, size_t row);

/* The three lines. */
int shard_note_write(const shard_note *note, text *csv);
/* Take one line in (NUL-terminated, without its end; the work before the rows). *mine = false: it is no line of ours.
 * ERR_DATA where it is one and damaged. */
int shard_note_read(shard_note *note, const char *line, bool *mine);
