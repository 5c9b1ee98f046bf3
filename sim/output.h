/* The files of a sweep (DESIGN section 8): FILE.csv, FILE.blocks.h5 beside it, and lifetimes. */
#pragma once

#include "base/outfile.h"
#include "sim/plan.h"

/* Everything that the files are made of; borrowed. */
typedef struct output {
    const char *path;
    bool force;
    const question *q;
    const plan *p;
    const sweep_result *result; /* [p->n_own] */
    const calibration *scale;
    const device *device;
    text head;              /* see output_head; owned by the caller */
    const shard_note *note; /* NULL where this is no shard */
} output;

/* The comment lines that are known before the sweep: the command, traces, calibration (read from the file
 * `calibration_path`; NULL: none), positions. Says where the calibration does not fit a trace. */
int output_head(const question *q, const char *command, const calibration *scale, const char *calibration_path,
                text *out);

/* The blocks file is opened last, since its size is known last. That it can be is made sure first. */
int output_try_blocks(const char *csv_path, bool force, const char *const *inputs, int n_inputs);

/* A finished unit's lifetimes, for every row that takes it; `own` is its place among the shard's own. */
int output_lifetimes(const question *q, const plan *p, size_t own, const sweep_result *result, lifetimes_writer *w);

/* Write and commit all of them. What may fail comes first, and the CSV, which vouches for the others, appears last.
 * Finishes *w (NULL: none) and sets it to NULL. */
int output_write(const output *o, outfile *csv, lifetimes_writer **w);

/* The short table of a pool's requests: loss of each, and how fairly they fared. */
int output_requests(const output *o, text *out);

/* Jain's index of n shares, (sum x)^2 / (n sum x^2): 1 where all are equal, 1/n where one has everything. */
double jain_index(const double *x, size_t n);

/* "# floored: ..." for the rows of a whole call (nothing where n = 0) or of a shard (always). */
int output_floored(text *csv, long long n, bool is_shard);
