#include "traces/tiles.h"
#include "base/err.h"
#include "base/mem.h"
#include "traces/trace.h"

#include <stdio.h>
#include <string.h>

/* HDF5's chunk cache is asked to hold one row of tiles of all heads, so that rows in ascending order decode each
 * chunk once; within reason. */
static const int64_t CACHE_MAX = INT64_C(512) << 20;

static int64_t up_to(hsize_t n, hsize_t multiple) {
    return (int64_t)((n + multiple - 1) / multiple * multiple);
}

static int64_t wanted_cache(const hdf_layout *l, int32_t rows) {
    if (!l->chunked || l->rank < 4) return 0;
    int r = l->rank;
    int64_t bytes = (int64_t)l->size, high = up_to((hsize_t)rows, l->chunk[r - 2]);
    if ((hsize_t)rows % l->chunk[r - 2]) high += (int64_t)l->chunk[r - 2]; /* a band may straddle one chunk more */
    for (int d = 0; d < r - 3; d++) bytes *= (int64_t)l->chunk[d];
    bytes = bytes * up_to(l->dims[r - 3], l->chunk[r - 3]);
    if (__builtin_mul_overflow(bytes, high, &bytes)) return CACHE_MAX;
    if (__builtin_mul_overflow(bytes, up_to(l->dims[r - 1], l->chunk[r - 1]), &bytes)) return CACHE_MAX;
    return bytes < CACHE_MAX ? bytes : CACHE_MAX;
}

/* Open again with a chunk cache of the right size. */
static int open_cached(tiles *t, hid_t h5, const char *name) {
    t->cache = wanted_cache(&t->layout, t->rows);
    if (t->cache <= 1 << 20) return 0;
    hid_t access = H5Pcreate(H5P_DATASET_ACCESS);
    H5Pset_chunk_cache(access, 12421, (size_t)t->cache, 1.0);
    H5Dclose(t->set);
    t->set = H5Dopen2(h5, name, access);
    H5Pclose(access);
    return t->set < 0 ? hdf_error("%s: cannot be opened", name) : 0;
}

/* float16 and float32 are handed out as they are stored; everything else as HDF5 converts it to float32. */
static bool stored_as(hid_t set, size_t *size) {
    hid_t type = H5Dget_type(set);
    bool f16 = H5Tequal(type, hdf_f16()) > 0, f32 = H5Tequal(type, H5T_IEEE_F32LE) > 0;
    H5Tclose(type);
    *size = f16 ? 2 : 4;
    return f16 || f32;
}

static int open_set(tiles *t, hid_t h5, const char *name, int rank, bool whole_rows) {
    hsize_t dims[H5S_MAX_RANK];
    TRY(hdf_open_dataset(h5, name, HDF_FLOAT, rank, dims, &t->set));
    TRY(hdf_get_layout(t->set, &t->layout));
    const hdf_layout *l = &t->layout;
    bool plain = stored_as(t->set, &t->size), one_tile = rank >= 2;
    for (int d = 0; d < rank - 2; d++) one_tile = one_tile && l->chunk[d] == 1;
    t->packed = l->ours && plain && one_tile && (!whole_rows || l->chunk[rank - 1] == l->dims[rank - 1]);
    hsize_t rows = l->dims[rank - 2];
    t->rows = (int32_t)(t->packed ? l->chunk[rank - 2] : rows < TRACE_TILE ? rows : TRACE_TILE);
    t->cols = (int32_t)(t->packed ? l->chunk[rank - 1] : l->dims[rank - 1]);
    return t->packed ? 0 : open_cached(t, h5, name);
}

int tiles_open(tiles *t, hid_t h5, const char *file, const char *name, int rank, bool whole_rows) {
    *t = (tiles){.file = file, .set = H5I_INVALID_HID};
    snprintf(t->name, sizeof t->name, "%s", name);
    int code = open_set(t, h5, name, rank, whole_rows);
    if (!code) return 0;
    err_prefix(code, "%s", file);
    tiles_close(t);
    return code;
}

void tiles_close(tiles *t) {
    if (!t->file) return;
    if (t->set >= 0) H5Dclose(t->set);
    for (int i = 0; i < t->n_work; i++) zstd_work_free(t->work[i]);
    mem_free(t->work);
    for (int i = 0; i < TILES_BATCH; i++) mem_free(t->frame[i]);
    *t = (tiles){0};
}

/* Enough to keep the threads busy, few enough to stay in their caches between being read and being unpacked. */
static int tiles_batch(int threads) {
    return 4 * threads < TILES_BATCH ? 4 * threads : TILES_BATCH;
}

size_t tiles_bytes(const tiles *t, int threads) {
    if (!t->packed) return (size_t)t->cache;
    size_t chunk = (size_t)hdf_chunk_bytes(&t->layout);
    return (size_t)tiles_batch(threads) * zstd_frame_bound(chunk) + 2 * (size_t)threads * chunk;
}

/* ---- raw chunks ------------------------------------------------------------------------------------------------- */

static int corrupt(const tiles *t, const hsize_t *offset, const char *why) {
    int r = t->layout.rank;
    char reason[ERR_MESSAGE_MAX];
    snprintf(reason, sizeof reason, "%s", why); /* it may be the message that err_set is about to replace */
    if (r < 4) return err_set(ERR_DATA, "%s: %s: corrupt chunk: %s", t->file, t->name, reason);
    return err_set(ERR_DATA, "%s: corrupt chunk at (layer %llu, head %llu, row %llu) of %s: %s", t->file,
                   (unsigned long long)offset[r - 4], (unsigned long long)offset[r - 3],
                   (unsigned long long)offset[r - 2], t->name, reason);
}

static int fetch(tiles *t, tiles_job *job, int slot) {
    size_t bound = zstd_frame_bound((size_t)hdf_chunk_bytes(&t->layout));
    hsize_t bytes = 0;
    uint32_t skipped = 0;
    job->bytes = 0;
    /* HDF5 reports a chunk that was never written as a failure. */
    if (H5Dget_chunk_storage_size(t->set, job->offset, &bytes) < 0 || !bytes) {
        if (job->may_be_absent) return 0;
        hdf_error("it is not there");
        return corrupt(t, job->offset, err_message());
    }
    job->bytes = (size_t)bytes;
    if (bytes > bound) return corrupt(t, job->offset, "its stored size is impossible");
    if (!t->frame[slot] && !(t->frame[slot] = mem_new(bound, 1, "chunk"))) return ERR_DATA;
    if (H5Dread_chunk(t->set, H5P_DEFAULT, job->offset, &skipped, t->frame[slot]) < 0) {
        hdf_error("cannot be read");
        return corrupt(t, job->offset, err_message());
    }
    job->skipped = skipped;
    return 0;
}

typedef struct batch {
    tiles *t;
    tiles_job *job;
} batch;

static int unpack(void *context, size_t i, int worker) {
    batch *b = context;
    tiles *t = b->t;
    tiles_job *job = &b->job[i];
    size_t bytes = (size_t)hdf_chunk_bytes(&t->layout);
    if (!job->bytes) {
        memset(job->to, 0, bytes);
        return 0;
    }
    zstd_work *w = t->work[worker];
    int code = t->planes ? zstd_unpack_planes(w, t->frame[i], job->bytes, job->skipped, bytes / 2, job->to)
                         : zstd_unpack(w, t->frame[i], job->bytes, job->skipped, bytes / t->size, t->size, job->to);
    return code ? corrupt(t, job->offset, err_message()) : 0;
}

static int need_workers(tiles *t, int n) {
    if (n <= t->n_work) return 0;
    zstd_work **more = mem_new((size_t)n, sizeof *more, "zstd scratch");
    if (!more) return ERR_DATA;
    if (t->n_work) memcpy(more, t->work, (size_t)t->n_work * sizeof *more);
    mem_free(t->work);
    t->work = more;
    for (; t->n_work < n; t->n_work++) TRY(zstd_work_new(&t->work[t->n_work]));
    return 0;
}

int tiles_run(tiles *t, tiles_job *job, size_t n, pool *p) {
    batch b = {t, job};
    TRY(need_workers(t, p ? pool_threads(p) : 1));
    for (size_t i = 0; i < n; i++) TRY(fetch(t, &job[i], (int)i));
    for (size_t i = 0; i < n && !p; i++) TRY(unpack(&b, i, 0));
    return p ? pool_run(p, n, unpack, &b) : 0;
}

/* ---- blocks ----------------------------------------------------------------------------------------------------- */

/* Coordinates of an element of a head. */
static void element(const tiles *t, const tiles_block *b, int head, hsize_t row, hsize_t col, hsize_t *out) {
    hsize_t at[5] = {(hsize_t)b->sample, (hsize_t)b->layer, (hsize_t)(b->head0 + head), row, col};
    size_t rank = (size_t)t->layout.rank;
    memcpy(out, at + 5 - rank, rank * sizeof *out);
}

static int read_packed(tiles *t, const tiles_block *b, pool *p) {
    tiles_job job[TILES_BATCH];
    size_t n = 0, batch_size = (size_t)tiles_batch(p ? pool_threads(p) : 1),
           tile_bytes = (size_t)hdf_chunk_bytes(&t->layout);
    for (int h = 0; h < b->n_heads; h++)
        for (int32_t r = 0; r < b->n_rows; r++)
            for (int32_t c = b->col0; c < b->col0 + b->n_cols; c++) {
                char *to = b->to + (size_t)h * b->head_stride + (size_t)r * b->row_stride + (size_t)c * tile_bytes;
                job[n] = (tiles_job){.to = to, .may_be_absent = b->sparse};
                element(t, b, h, (hsize_t)(b->row0 + r) * (hsize_t)t->rows, (hsize_t)c * (hsize_t)t->cols,
                        job[n].offset);
                if (++n < batch_size) continue;
                TRY(tiles_run(t, job, n, p));
                n = 0;
            }
    return n ? tiles_run(t, job, n, p) : 0;
}

static int read_through_hdf5(tiles *t, const tiles_block *b) {
    hid_t type = t->size == 2 ? hdf_f16() : H5T_NATIVE_FLOAT;
    int rank = t->layout.rank;
    hsize_t height = t->layout.dims[rank - 2], start[5], count[5] = {1, 1, 1, 1, 1};
    count[rank - 1] = t->layout.dims[rank - 1];
    for (int h = 0; h < b->n_heads; h++)
        for (int32_t r = 0; r < b->n_rows; r++) {
            hsize_t row = (hsize_t)(b->row0 + r) * (hsize_t)t->rows, left = height - row;
            element(t, b, h, row, 0, start);
            count[rank - 2] = left < (hsize_t)t->rows ? left : (hsize_t)t->rows;
            char *to = b->to + (size_t)h * b->head_stride + (size_t)r * b->row_stride;
            int code = hdf_read_block(t->set, type, rank, start, count, to);
            if (code) return corrupt(t, start, err_message());
        }
    return 0;
}

int tiles_read(tiles *t, const tiles_block *b, pool *p) {
    return t->packed ? read_packed(t, b, p) : read_through_hdf5(t, b);
}
