/* bench_rows TRACE.h5 [THREADS] [REPEATS] [WAY...]: what a sweep must do before it prices anything, and nothing else.
 *
 * Every layer of the first sequence is read whole, each way in turn:
 *   factored   rows from q and k, in tiles as sim takes them
 *   dense      the same rows from attn/probs
 *   gradients  the tiles of grad/loss and grad/fisher
 * All, or the given WAYs; what the trace lacks is left out. The seconds of a repeat (wall, in brackets processor) are
 * sums over the layers; opening the layer is in, and is taken off the gradients. */
#include "base/err.h"
#include "base/mem.h"
#include "tests/bench/cost.h"
#include "traces/kernels.h"
#include "traces/trace.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TILE_MOST = 64, TILE_LEAST = 8, TILE_BYTES = 8 << 20 };

typedef enum way { WAY_FACTORED, WAY_DENSE, WAY_GRADIENTS, N_WAYS } way;
static const char *const way_name[N_WAYS] = {"factored", "dense", "gradients"};

typedef struct bench {
    trace *t;
    pool *p;
    const trace_sequence *s;
    int n_layer, n_head;
    int32_t T, tile;
    size_t stride;
    float *rows;
    bool has[N_WAYS];
} bench;

/* As sim cuts a layer. */
static int32_t tile_rows(const bench *b) {
    size_t row = (size_t)b->n_head * b->stride * sizeof(float), rows = TILE_BYTES / row;
    return rows > TILE_MOST ? TILE_MOST : rows < TILE_LEAST ? TILE_LEAST : (int32_t)(rows / 8 * 8);
}

static int read_rows(bench *b, trace_layer *l) {
    for (int32_t row = 0; row < b->T; row += b->tile)
        TRY(trace_layer_rows(l, row, b->T - row < b->tile ? b->T - row : b->tile, b->rows, b->stride, b->p));
    return 0;
}

static int read_gradients(bench *b, trace_layer *l) {
    for (int32_t row = 0; row < b->T; row += b->tile)
        TRY(trace_layer_read_grad(l, row, b->T - row < b->tile ? b->T - row : b->tile, b->p));
    return 0;
}

static int read_layer(bench *b, way w, int layer, cost *spent) {
    trace_layer *l;
    cost start = cost_now();
    TRY(trace_layer_open(b->t, 0, layer, w == WAY_DENSE ? TRACE_DENSE : TRACE_AUTO, b->p, &l));
    if (w == WAY_GRADIENTS) start = cost_now();
    int code = w == WAY_GRADIENTS ? read_gradients(b, l) : read_rows(b, l);
    cost c = cost_since(start);
    trace_layer_close(l);
    spent->wall += c.wall;
    spent->processor += c.processor;
    return code;
}

static bool asked(way w, char **names, int n) {
    for (int i = 0; i < n; i++)
        if (strcmp(names[i], way_name[w]) == 0) return true;
    return n <= 0;
}

static int prepare(bench *b, const char *path, int threads, char **ways, int n_ways) {
    TRY(pool_new(threads, &b->p));
    TRY(trace_open(path, &b->t));
    const trace_model *m = trace_get_model(b->t);
    b->s = trace_get_sequence(b->t, 0);
    b->n_layer = m->n_layer;
    b->n_head = m->n_head;
    b->T = b->s->n_tokens;
    b->stride = kernel_pad((size_t)b->T);
    b->tile = tile_rows(b);
    b->has[WAY_FACTORED] = b->s->has_factored;
    b->has[WAY_DENSE] = b->s->has_dense;
    b->has[WAY_GRADIENTS] = b->s->has_grad_loss;
    for (int w = 0; w < N_WAYS; w++) b->has[w] &= asked((way)w, ways, n_ways);
    b->rows = mem_new((size_t)b->n_head * (size_t)b->tile * b->stride, sizeof *b->rows, "rows");
    return b->rows ? 0 : ERR_DATA;
}

static int measure(const char *path, int threads, int repeats, char **ways, int n_ways) {
    bench b = {0};
    TRY(prepare(&b, path, threads, ways, n_ways));
    double entries = (double)b.T * (b.T + 1.0) / 2 * b.n_head * b.n_layer;
    printf("%d tokens, %.0f row entries, %d threads, kernels %s\n", b.T, entries, pool_threads(b.p), kernels()->name);
    for (int i = 0; i < repeats; i++) {
        cost total[N_WAYS] = {0};
        for (int layer = 0; layer < b.n_layer; layer++)
            for (int w = 0; w < N_WAYS; w++)
                if (b.has[w]) TRY(read_layer(&b, (way)w, layer, &total[w]));
        printf("repeat");
        for (int w = 0; w < N_WAYS; w++)
            if (b.has[w]) printf("  %s %.4f s (%.4f s)", way_name[w], total[w].wall, total[w].processor);
        printf("\n");
    }
    mem_free(b.rows);
    trace_close(b.t);
    pool_free(b.p);
    return 0;
}

int main(int argc, char **argv) {
    if (argc < 2) return fprintf(stderr, "usage: bench_rows TRACE.h5 [THREADS] [REPEATS] [WAY...]\n"), 2;
    int code = measure(argv[1], argc > 2 ? atoi(argv[2]) : 0, argc > 3 ? atoi(argv[3]) : 5, argv + 4, argc - 4);
    if (code) fprintf(stderr, "bench_rows: %s\n", err_message());
    return code;
}
