/* FILE.csv.partial: results of a sweep as they are finished, so that a killed run can be taken up (sim --resume).
 * base/partial.h has the format; a record is a result as it lies in memory, then its arrays. Units are finished in one
 * fixed order, so record i is own unit i. */
#pragma once

#include "base/partial.h"
#include "sim/sweep.h"

#include <stdbool.h>
#include <stddef.h>

/* What a result's arrays are made of. */
typedef struct journal_shape {
    size_t heads;     /* n_layer * n_head */
    bool loss;        /* first-order and Fisher parts are there */
    size_t n_fisher;  /* samples, where loss is */
    size_t lifetimes; /* n_layer * n_kv_head * T where lifetimes are kept, else 0 */
} journal_shape;

typedef partial journal;

/* Open, or create. ERR_USAGE, with nothing changed: another process has it open; it is of another command; it is of
 * the same command but bound to other traces, calibration, shard or version; it is no journal. */
int journal_open(const char *path, const char *command, const char *binding, journal **out);

/* The next result that is there already; arrays owned by the caller (sweep_result_free), lifetimes included. *found =
 * false: no further one is; from here on results are appended. */
int journal_take(journal *j, const journal_shape *shape, sweep_result *out, bool *found);

/* Add the next result. It survives the process from here on, and the machine from journal_sync on. ERR_DATA where the
 * disk is full; what was added before stays. */
int journal_append(journal *j, const journal_shape *shape, const sweep_result *r);
int journal_sync(journal *j);

/* The work is done: remove the file. Or it is not: keep it, unless it holds nothing. Both free j; j may be NULL. */
void journal_remove(journal *j);
void journal_keep(journal *j);
