/* bench_reader TRACE.h5 [REPEATS]: how fast one thread reads the dense form, beside nothing but ZSTD_decompress.
 *
 * Layer by layer, four ways over the same chunks, in turn:
 *   zstd    the frames, held in memory, decompressed (their checksums verified) into one scratch chunk
 *   unpack  the same with the byte shuffle undone: frame to f16 values
 *   tiles   what the reader does for that: raw chunks through HDF5 from the page cache, each put in its place
 *   rows    trace_layer_rows: the same again, then f32, and every row divided by its sum
 * The seconds of a repeat (wall, in brackets processor) are sums over the layers; GB/s count decoded f16 values, 2
 * bytes each, padding included. */
#include "base/err.h"
#include "base/mem.h"
#include "tests/bench/cost.h"
#include "traces/kernels.h"
#include "traces/reader_private.h"
#include "traces/tiles.h"

#include <stdio.h>
#include <stdlib.h>
#include <zstd.h>

enum { ROWS = 64 };

typedef enum way { WAY_ZSTD, WAY_UNPACK, WAY_TILES, WAY_ROWS, N_WAYS } way;
static const char *const way_name[N_WAYS] = {"zstd", "unpack", "tiles", "rows"};

typedef struct frame {
    void *data;
    size_t bytes;
} frame;

typedef struct bench {
    trace *t;
    pool *p;
    tiles set;
    int n_head, layer;
    size_t T, across, content, stride; /* across: tiles in a row of tiles; content: bytes of a chunk */
    frame *frames;                     /* of the current layer */
    size_t n_frames;
    ZSTD_DCtx *zstd;
    zstd_work *work;
    char *scratch, *band; /* one chunk; one row of tiles of all heads */
    float *rows;
} bench;

/* ---- the ways --------------------------------------------------------------------------------------------------- */

static int way_zstd(bench *b) {
    for (size_t i = 0; i < b->n_frames; i++)
        if (ZSTD_decompressDCtx(b->zstd, b->scratch, b->content, b->frames[i].data, b->frames[i].bytes) != b->content)
            return err_set(ERR_DATA, "a frame that zstd cannot decompress");
    return 0;
}

static int way_unpack(bench *b) {
    for (size_t i = 0; i < b->n_frames; i++)
        TRY(zstd_unpack(b->work, b->frames[i].data, b->frames[i].bytes, 0, b->content / 2, 2, b->scratch));
    return 0;
}

static int way_tiles(bench *b) {
    tiles_block block = {.layer = b->layer, .n_heads = b->n_head, .n_rows = 1, .to = b->band};
    block.head_stride = b->across * b->content;
    for (block.row0 = 0; block.row0 < (int32_t)b->across; block.row0++) {
        block.n_cols = block.row0 + 1;
        TRY(tiles_read(&b->set, &block, b->p));
    }
    return 0;
}

static int way_rows(bench *b) {
    trace_layer *l;
    TRY(trace_layer_open(b->t, 0, b->layer, TRACE_DENSE, b->p, &l));
    int code = 0;
    for (size_t row = 0; row < b->T && !code; row += ROWS) {
        size_t n = b->T - row < ROWS ? b->T - row : ROWS;
        code = trace_layer_rows(l, (int32_t)row, (int32_t)n, b->rows, b->stride, b->p);
    }
    trace_layer_close(l);
    return code;
}

/* ---- measuring -------------------------------------------------------------------------------------------------- */

static int load_frames(bench *b) {
    size_t n = 0;
    for (size_t h = 0; h < (size_t)b->n_head; h++)
        for (size_t r = 0; r < b->across; r++)
            for (size_t c = 0; c <= r; c++, n++) {
                hsize_t at[4] = {(hsize_t)b->layer, h, r * (size_t)b->set.rows, c * (size_t)b->set.cols}, bytes = 0;
                uint32_t skipped = 0;
                frame *f = &b->frames[n];
                if (H5Dget_chunk_storage_size(b->set.set, at, &bytes) < 0) return hdf_error("attn/probs");
                mem_free(f->data);
                if (!(f->data = mem_new(bytes, 1, "frame"))) return ERR_DATA;
                f->bytes = bytes;
                if (H5Dread_chunk(b->set.set, H5P_DEFAULT, at, &skipped, f->data) < 0) return hdf_error("attn/probs");
                if (skipped) return err_set(ERR_DATA, "a chunk that was not compressed");
            }
    return 0;
}

static int repeat(bench *b, cost total[N_WAYS]) {
    static int (*const run[N_WAYS])(bench *) = {way_zstd, way_unpack, way_tiles, way_rows};
    for (b->layer = 0; b->layer < trace_get_model(b->t)->n_layer; b->layer++) {
        TRY(load_frames(b));
        for (int w = 0; w < N_WAYS; w++) {
            cost start = cost_now();
            TRY(run[w](b));
            cost c = cost_since(start);
            total[w].wall += c.wall;
            total[w].processor += c.processor;
        }
    }
    return 0;
}

static int prepare(bench *b, const char *path) {
    TRY(pool_new(1, &b->p));
    TRY(trace_open(path, &b->t));
    TRY(tiles_open(&b->set, b->t->h5, path, "seq/0000/attn/probs", 4, false));
    if (!b->set.packed || b->set.size != 2) return err_set(ERR_DATA, "%s: attn/probs is not in our own form", path);
    b->n_head = trace_get_model(b->t)->n_head;
    b->T = (size_t)trace_get_sequence(b->t, 0)->n_tokens;
    b->across = (b->T + (size_t)b->set.rows - 1) / (size_t)b->set.rows;
    b->content = (size_t)hdf_chunk_bytes(&b->set.layout);
    b->stride = kernel_pad(b->T);
    b->n_frames = (size_t)b->n_head * b->across * (b->across + 1) / 2;
    b->frames = mem_new(b->n_frames, sizeof *b->frames, "frames");
    b->zstd = ZSTD_createDCtx();
    TRY(zstd_work_new(&b->work));
    b->scratch = mem_new(b->content, 1, "chunk");
    b->band = mem_new((size_t)b->n_head * b->across, b->content, "band");
    b->rows = mem_new((size_t)b->n_head * ROWS * b->stride, sizeof *b->rows, "rows");
    return b->frames && b->zstd && b->scratch && b->band && b->rows ? 0 : err_set(ERR_DATA, "out of memory");
}

static int measure(const char *path, int repeats) {
    bench b = {0};
    double best[N_WAYS];
    TRY(prepare(&b, path));
    double bytes = (double)b.n_frames * (double)b.content * trace_get_model(b.t)->n_layer;
    printf("%zu tokens, kernels %s, %.0f MB of f16 in chunks of %zu KiB\n", b.T, kernels()->name, bytes * 1e-6,
           b.content >> 10);
    for (int i = 0; i < repeats; i++) {
        cost total[N_WAYS] = {0};
        TRY(repeat(&b, total));
        printf("repeat");
        for (int w = 0; w < N_WAYS; w++) {
            printf("  %s %.4f s (%.4f s)", way_name[w], total[w].wall, total[w].processor);
            if (!i || total[w].wall < best[w]) best[w] = total[w].wall;
        }
        printf("\n");
    }
    printf("least ");
    for (int w = 0; w < N_WAYS; w++)
        printf("  %s %.2f GB/s (%.3f of zstd)", way_name[w], bytes * 1e-9 / best[w], best[WAY_ZSTD] / best[w]);
    printf("\n");
    return 0;
}

int main(int argc, char **argv) {
    if (argc < 2) return fprintf(stderr, "usage: bench_reader TRACE.h5 [REPEATS]\n"), 2;
    int code = measure(argv[1], argc > 2 ? atoi(argv[2]) : 5);
    if (code) fprintf(stderr, "bench_reader: %s\n", err_message());
    return code;
}
