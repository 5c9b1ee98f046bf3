/* Attention from a backend that packs by itself: its chunks are compressed by the pool and put into the file. */
#pragma once

#include "tracer/capture.h"

/* One sequence's. Starts as {.c, .T, .row_sum}; memory grows to the longest run of chunks. */
typedef struct capture_tiles {
    const capture *c;
    size_t T;
    float *row_sum; /* [n_head][T] of the current layer: sums of probabilities are added; NULL = not wanted */
    /* the run at hand */
    trace_array array;
    int layer;
    size_t first;
    const uint8_t *bytes;
    trace_chunk *chunk;  /* [n] packed, not yet put */
    float *sum;          /* [n][TRACE_TILE] of the rows of each chunk */
    size_t chunks, sums; /* room */
} capture_tiles;

/* n chunks from number `first` on, as forward_sink.tiles hands them over. */
int capture_tiles_take(capture_tiles *t, trace_array array, int layer, size_t first, size_t n, const uint8_t *bytes);
void capture_tiles_free(capture_tiles *t);
