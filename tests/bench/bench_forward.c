/* bench_forward MODEL.gguf [TOKENS] [THREADS] [REPEATS]: seconds of a whole forward pass, logits included, beside the
 * seconds of nothing but its matrix products, in the same tiles on the same threads.
 *
 * The two are run in turn, REPEATS times (each is printed: wall time, in brackets processor time), and the smallest is
 * kept for each. A pass contains its products, so a wall ratio below 1 says only that the machine was busy with
 * something else: then believe the processor time, and repeat the run. */
#include "base/err.h"
#include "base/mem.h"
#include "tests/bench/cost.h"
#include "tracer/cpu/cpu.h"
#include "tracer/cpu/matmul.h"
#include "traces/kernels.h"

#include <cblas.h>
#include <stdio.h>
#include <stdlib.h>

enum { STRIP = 128, LOGIT_ROWS = 256 };

typedef struct bench {
    const model *m;
    pool *p;
    size_t T;
    float *a, *w, *out, **scratch;
    tile_grid grid; /* current product */
    size_t inner, heads;
} bench;

static int product_tile(void *context, size_t task, int worker) {
    const bench *b = context;
    (void)worker;
    tile t = tile_grid_at(&b->grid, task);
    matmul_weight(t.n_rows, t.n_cols, b->inner, b->a + t.row * b->inner, b->inner, b->w + t.col * b->inner, b->inner, 0,
                  b->out + t.row * kernel_pad(b->grid.cols) + t.col, kernel_pad(b->grid.cols));
    return 0;
}

static int product(bench *b, size_t rows, size_t cols, size_t inner, size_t quantum) {
    b->grid = tile_grid_new(rows, cols, quantum);
    b->inner = inner;
    return pool_run(b->p, tile_grid_count(&b->grid), product_tile, b);
}

static int attention_strip(void *context, size_t task, int worker) {
    const bench *b = context;
    size_t strips = (b->T + STRIP - 1) / STRIP, row = task % strips * STRIP, head = task / strips;
    size_t n = b->T - row < STRIP ? b->T - row : STRIP, dim = (size_t)b->m->head_dim, ld = b->heads * dim;
    float *scores = b->scratch[worker];
    int i_n = (int)n, i_end = (int)(row + n), i_dim = (int)dim, i_ld = (int)ld, i_t = (int)kernel_pad(b->T);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, i_n, i_end, i_dim, 1, b->a + row * ld + head * dim, i_ld, b->a,
                i_ld, 0, scores, i_t);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, i_n, i_dim, i_end, 1, scores, i_t, b->a, i_ld, 0,
                b->out + row * ld + head * dim, i_ld);
    return 0;
}

static int products_of_a_pass(bench *b) {
    const model *m = b->m;
    size_t n_embd = (size_t)m->n_embd, n_ff = (size_t)m->n_ff, dim = (size_t)m->head_dim, q = (size_t)m->n_head * dim;
    for (int32_t layer = 0; layer < m->n_layer; layer++) {
        TRY(product(b, b->T, b->heads * dim, n_embd, dim));
        TRY(pool_run(b->p, (b->T + STRIP - 1) / STRIP * (size_t)m->n_head, attention_strip, b));
        TRY(product(b, b->T, n_embd, q, KERNEL_LANES));
        for (int twice = 0; twice < 2; twice++) TRY(product(b, b->T, n_ff, n_embd, KERNEL_LANES));
        TRY(product(b, b->T, n_embd, n_ff, KERNEL_LANES));
    }
    for (size_t row = 0; row < b->T; row += LOGIT_ROWS)
        TRY(product(b, b->T - row < LOGIT_ROWS ? b->T - row : LOGIT_ROWS, (size_t)m->n_vocab, n_embd, KERNEL_LANES));
    return 0;
}

static int prepare(bench *b) {
    const model *m = b->m;
    b->heads = (size_t)(m->n_head + 2 * m->n_kv_head);
    size_t widest = (size_t)(m->n_ff > m->n_embd ? m->n_ff : m->n_embd), qkv = b->heads * (size_t)m->head_dim;
    if (qkv > widest) widest = qkv;
    size_t n_a = b->T * widest, n_w = (size_t)m->n_vocab * widest;
    size_t n_out = n_a + LOGIT_ROWS * kernel_pad((size_t)m->n_vocab);
    b->a = mem_new(n_a, sizeof(float), "bench");
    b->w = mem_new(n_w, sizeof(float), "bench");
    b->out = mem_new(n_out, sizeof(float), "bench");
    b->scratch = mem_new((size_t)pool_threads(b->p), sizeof *b->scratch, "bench");
    if (!b->a || !b->w || !b->out || !b->scratch) return ERR_DATA;
    for (size_t i = 0; i < n_a; i++) b->a[i] = (float)(i % 17) * 0.125f - 1;
    for (size_t i = 0; i < n_w; i++) b->w[i] = (float)(i % 13) * 0.125f - 1;
    for (int i = 0; i < pool_threads(b->p); i++)
        if (!(b->scratch[i] = mem_new(STRIP * kernel_pad(b->T), sizeof(float), "bench"))) return ERR_DATA;
    return 0;
}

static int take_logits(void *context, int32_t row0, int32_t n, float *logits, size_t stride) {
    (void)row0, (void)n, (void)stride;
    *(double *)context += (double)logits[0];
    return 0;
}

static void keep_least(cost *best, cost c) {
    if (c.wall < best->wall) best->wall = c.wall;
    if (c.processor < best->processor) best->processor = c.processor;
}

static int measure(const char *path, size_t T, int threads, int repeats) {
    bench b = {.T = T};
    model *m;
    backend_state *s;
    double checksum = 0;
    cost forward = {1e9, 1e9}, products = {1e9, 1e9};
    forward_sink sink = {.context = &checksum, .logits = take_logits};
    TRY(pool_new(threads, &b.p));
    TRY(model_open(path, &m));
    TRY(cpu_backend.load(m, b.p, &cpu_options, &s));
    b.m = m;
    int32_t *tokens = mem_new(T, sizeof *tokens, "tokens");
    if (!tokens) return ERR_DATA;
    for (size_t t = 0; t < T; t++) tokens[t] = (int32_t)((t * 2654435761u >> 7) % (size_t)m->n_vocab);
    TRY(prepare(&b));
    double gflop = model_flops(m, (int32_t)T) * 1e-9;
    printf("%zu tokens, %d threads, OpenBLAS %s, kernels %s, %.0f GFLOP\n", T, pool_threads(b.p),
           openblas_get_corename(), kernels()->name, gflop);
    for (int i = 0; i < repeats; i++) {
        cost start = cost_now();
        TRY(products_of_a_pass(&b));
        cost p = cost_since(start);
        start = cost_now();
        TRY(cpu_backend.forward(s, tokens, (int32_t)T, NULL, &sink));
        cost f = cost_since(start);
        keep_least(&products, p);
        keep_least(&forward, f);
        printf("repeat  products %.3f s (%.3f s)  forward %.3f s (%.3f s)\n", p.wall, p.processor, f.wall, f.processor);
    }
    printf("wall       products %.3f s (%.0f GFLOP/s)  forward %.3f s (%.0f GFLOP/s)  ratio %.3f\n", products.wall,
           gflop / products.wall, forward.wall, gflop / forward.wall, forward.wall / products.wall);
    printf("processor  products %.3f s  forward %.3f s  ratio %.3f\n", products.processor, forward.processor,
           forward.processor / products.processor);
    return 0;
}

int main(int argc, char **argv) {
    if (argc < 2) return fprintf(stderr, "usage: bench_forward MODEL.gguf [TOKENS] [THREADS] [REPEATS]\n"), 2;
    int tokens = argc > 2 ? atoi(argv[2]) : 1024, threads = argc > 3 ? atoi(argv[3]) : 0;
    int code = measure(argv[1], (size_t)tokens, threads, argc > 4 ? atoi(argv[4]) : 5);
    if (code) fprintf(stderr, "bench_forward: %s\n", err_message());
    return code;
}
