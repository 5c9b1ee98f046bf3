/* The content hash of a trace: XXH3-128 over what it says, not over how it is stored, so it does not depend on the
 * version of zstd or HDF5.
 *
 * It covers the model's numbers, every sequence's facts, and of every dataset, in strcmp order of their paths: path,
 * shape, size of a value, and a digest of its values. Datasets of four and more dimensions (attention, gradients) that
 * have our filters and chunks of 1 in all but the last two dimensions are digested chunk by chunk: (coordinates,
 * XXH3-64 of the chunk's values) in index order over the chunks that are there; all others as one row-major run.
 * traces/FORMAT.md states it in full. */
#pragma once

#include "traces/trace.h"

#include <stddef.h>
#include <stdint.h>

enum { CONTENT_HASH_HEX = 33, CONTENT_HASH_CHUNKED_RANK = 4 };

typedef struct content_hash content_hash;

int content_hash_new(content_hash **out);
void content_hash_free(content_hash *c); /* accepts NULL */

int content_hash_model(content_hash *c, const trace_model *m);
/* Sequences in order. */
int content_hash_sequence(content_hash *c, size_t seq, const trace_sequence *s);

/* Start a dataset's digest; *id names it in the calls below. */
int content_hash_dataset(content_hash *c, const char *path, int rank, const uint64_t *dims, size_t size, size_t *id);
/* The next chunk, at these coordinates in elements, with the XXH3-64 of its values (padding included). */
void content_hash_chunk(content_hash *c, size_t id, int rank, const uint64_t *offset, uint64_t hash);
/* The next bytes of the row-major values. */
void content_hash_values(content_hash *c, size_t id, const void *values, size_t bytes);

int content_hash_finish(content_hash *c, char hex[CONTENT_HASH_HEX]);

/* XXH3-128 of a file's bytes, for traces that carry no hash. */
int content_hash_of_file(const char *path, char hex[CONTENT_HASH_HEX]);
