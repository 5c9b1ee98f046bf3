/* What stands beside results: FILE.blocks.h5 next to each FILE.csv (traces/blocks.h), which holds every row's sums over
 * 64 blocks of steps and its values by layer and head. */
#pragma once

#include "analyze/results.h"
#include "traces/blocks.h"

typedef struct evidence evidence;

/* Read the blocks files of all results files. *out is NULL where some results have none: then one line on stderr says
 * which, since nothing that stands on them can be told. Returns 0, or ERR_DATA: a file that is no blocks file, or one
 * that belongs to other results (another number of rows, or sums that are not what the CSV's columns say). Release with
 * evidence_free. */
int evidence_read(const results *r, evidence **out);
void evidence_free(evidence *e); /* accepts NULL */

/* Of a row of a file (not of a configuration: of its parts). Points into e. */
blocks_row evidence_row(const evidence *e, const result *row);

/* Shape of that row's values by head, and its number of Fisher samples (0: none). Values of layers and heads that this
 * row's trace does not have are NaN. */
typedef struct evidence_shape {
    size_t n_layer, n_head, n_fisher;
} evidence_shape;
evidence_shape evidence_get_shape(const evidence *e, const result *row);
