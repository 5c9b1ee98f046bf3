/* FILE.partial: pieces of a work as they are finished, so that a killed run can be taken up (--resume).
 *
 *     magic line, command <newline> binding <newline>
 *     records: u64 number, bytes, XXH3-64 of what follows (seeded with the number); bytes as the work has them
 *
 * Work is done in one fixed order, so what the file holds is always its beginning. A record that is torn or damaged
 * ends it: that piece and what follows is done again. The binding names everything that a piece depends on, so that
 * nothing of another work is ever taken in. The file is locked while it is open. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

/* What one command keeps; texts for the file and for messages. */
typedef struct partial_kind {
    const char *magic;    /* "kvlag journal v1\n" */
    const char *piece;    /* "configuration": what a record belongs to */
    const char *bound_to; /* "traces, calibration ... or version": what the binding is made of */
} partial_kind;

typedef struct partial partial;

/* Open, or create. `kind` must outlive the file. ERR_USAGE, with nothing changed: another process has it open; it is of
 * another command; it is of the same command but bound to something else; it is no file of this kind. */
int partial_open(const char *path, const partial_kind *kind, const char *command, const char *binding, partial **out);
const char *partial_path(const partial *p);

/* Where the next record is read, or written. */
typedef struct partial_place {
    long long at; /* bytes */
    size_t n;     /* records before it */
} partial_place;
partial_place partial_tell(const partial *p);

/* The next record, valid until the next call; `want`: its size where that is known, else 0. *bytes NULL: there is none
 * (a torn or damaged one is said, and cut off), and from here on records are appended. */
int partial_read(partial *p, size_t want, const void **bytes, size_t *n);

/* Read on from a place; with `cut`, what stands behind it is given up. */
int partial_go(partial *p, partial_place place, bool cut);

/* Add a record made of n parts; all that there were must have been read. It survives the process from here on, and the
 * machine from partial_sync on. ERR_DATA where the disk is full; what was added before stays. */
typedef struct partial_part {
    const void *bytes;
    size_t n;
} partial_part;
int partial_append(partial *p, const partial_part *parts, size_t n);
int partial_sync(partial *p);

/* The work is done: remove the file. Or it is not: keep it, unless it holds no record. Both free p; p may be NULL. */
void partial_remove(partial *p);
void partial_keep(partial *p);
