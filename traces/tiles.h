/* Reading one dataset of a trace in tiles: rectangles of its last two dimensions.
 *
 * Where the dataset has our own filter pipeline and one tile a chunk, the calling thread reads raw chunks and the pool
 * checks, decompresses and unshuffles them. Any other chunking, filter or float type is read through HDF5. */
#pragma once

#include "base/pool.h"
#include "traces/hdf.h"
#include "traces/zstd_filter.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { TILES_BATCH = 32, TILES_RANK = 8 };

typedef struct tiles {
    const char *file; /* for messages; the caller's */
    char name[64];    /* "seq/0000/attn/q" */
    hid_t set;
    hdf_layout layout;
    bool packed;        /* raw chunks, else through HDF5 */
    bool planes;        /* set by the caller where packed and size is 2: chunks stay shuffled, see zstd_unpack_planes */
    size_t size;        /* bytes of a value handed out: 2 = half, 4 = f32 */
    int32_t rows, cols; /* of a tile; the tiles at the edges are padded */
    int64_t cache;      /* bytes HDF5 may use for its chunk cache */

    zstd_work **work; /* one for each worker seen so far */
    int n_work;
    void *frame[TILES_BATCH]; /* room for raw chunks */
} tiles;

/* A chunk to read and unpack. */
typedef struct tiles_job {
    hsize_t offset[TILES_RANK]; /* its first element */
    void *to;                   /* the chunk's values in row-major order */
    bool may_be_absent;         /* then `to` becomes zeros */
    size_t bytes;               /* set: stored size, 0 = absent */
    unsigned skipped;           /* set: HDF5's filter mask */
} tiles_job;

/* Open the dataset `name` (floats, of this rank) in `h5`; `whole_rows`: tiles must be as wide as the dataset.
 * `file` names it in messages. Zeroed t: nothing to close. */
int tiles_open(tiles *t, hid_t h5, const char *file, const char *name, int rank, bool whole_rows);
void tiles_close(tiles *t); /* safe on a zeroed t, and twice */

/* Bytes that reading will hold at most beside the caller's arrays, with this many threads. */
size_t tiles_bytes(const tiles *t, int threads);

/* Read up to TILES_BATCH chunks of a packed dataset. A broken one is an error: "FILE: corrupt chunk at (layer 1, head
 * 2, row 256) of seq/0000/attn/probs: why". */
int tiles_run(tiles *t, tiles_job *job, size_t n, pool *p); /* p NULL: on the calling thread alone */

/* Of a dataset [layers, heads, rows, columns], or [samples, layers, ...]: what to read and where to put it. Tile (row
 * i, column j) of head h goes to `to` + (h - head0) * head_stride + (i - row0) * row_stride + j * rows*cols*size, in
 * bytes. */
typedef struct tiles_block {
    int sample, layer, head0, n_heads;
    int32_t row0, n_rows, col0, n_cols; /* in tiles */
    char *to;
    size_t head_stride, row_stride;
    bool sparse; /* absent chunks are zeros; else an error */
} tiles_block;
int tiles_read(tiles *t, const tiles_block *b, pool *p); /* p NULL: on the calling thread alone */
