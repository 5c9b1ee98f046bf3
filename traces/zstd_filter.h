/* HDF5 filter 32015: zstd in its registered wire form, one frame a chunk, and the same form packed and unpacked by
 * our own threads (h5py with hdf5plugin reads and writes it too).
 *
 * Frames that we write carry content size and checksum, at level 1: on shuffled attention level 3 gains a thousandth
 * and takes twice as long. A frame is refused if it does not state its content size or states more than the chunk
 * holds, so a damaged file cannot ask for more memory than its header declares. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

enum { ZSTD_FILTER_ID = 32015, ZSTD_FILTER_LEVEL = 1 };

/* Register the filter with HDF5 in this process; harmless when repeated. */
int zstd_filter_register(void);

/* Frames that HDF5 decodes on this thread may hold at most `bytes` from now on; 0 = HDF5's own limit of 4 GiB. HDF5
 * does not tell a filter the size of its chunk, so readers say it before they read. */
void zstd_filter_limit(size_t bytes);

/* One thread's contexts and scratch memory for chunks. */
typedef struct zstd_work zstd_work;
int zstd_work_new(zstd_work **out);
void zstd_work_free(zstd_work *w); /* accepts NULL */

/* Shuffle n values of `size` bytes (1, 2, 4 or 8) and compress them into one frame of exactly *bytes, owned by the
 * caller. */
int zstd_pack(zstd_work *w, const void *values, size_t n, size_t size, void **frame, size_t *bytes);

/* Undo that into values[n]. `skipped` is HDF5's filter mask of the chunk: bit 0 = it was not shuffled, bit 1 = not
 * compressed. The message says what is wrong with the frame; the caller says where. */
int zstd_unpack(zstd_work *w, const void *frame, size_t bytes, unsigned skipped, size_t n, size_t size, void *values);

/* The same for values of 2 bytes, leaving them shuffled: n low bytes, then n high bytes. */
int zstd_unpack_planes(zstd_work *w, const void *frame, size_t bytes, unsigned skipped, size_t n, void *planes);

/* Most bytes a frame of n bytes of content may take. */
size_t zstd_frame_bound(size_t n);

/* Does this frame end in a checksum? */
bool zstd_frame_has_checksum(const void *frame, size_t bytes);
