/* bench_backward MODEL.gguf [TOKENS] [THREADS] [REPEATS] [SETS]: seconds of a forward and backward pass for SETS label
 * sets (default 2, what --gradients fisher:1 takes), beside the seconds of nothing but their matrix products, in the
 * same tiles on the same threads. Read it as bench_forward. */
#include "base/err.h"
#include "base/mem.h"
#include "tests/bench/cost.h"
#include "tracer/cpu/cpu.h"
#include "tracer/cpu/matmul.h"
#include "traces/kernels.h"

#include <cblas.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { STRIP = 128, LOGIT_ROWS = 256, SLICE = 8192 };

typedef struct bench {
    const model *m;
    pool *p;
    size_t T, sets, heads; /* heads: of q, k and v together */
    float *a, *w, *out, **scratch;
    tile_grid grid; /* current product */
    size_t inner;
    bool back; /* through a weight matrix from its outputs to its inputs */
} bench;

/* ---- products ---------------------------------------------------------------------------------------------------- */

static int product_tile(void *context, size_t task, int worker) {
    const bench *b = context;
    (void)worker;
    tile t = tile_grid_at(&b->grid, task);
    const float *a = b->a + t.row * b->inner;
    float *out = b->out + t.row * kernel_pad(b->grid.cols) + t.col;
    if (b->back)
        matmul_weight_back(t.n_rows, t.n_cols, b->inner, a, b->inner, b->w + t.col, b->grid.cols, 0, out,
                           kernel_pad(b->grid.cols));
    else
        matmul_weight(t.n_rows, t.n_cols, b->inner, a, b->inner, b->w + t.col * b->inner, b->inner, 0, out,
                      kernel_pad(b->grid.cols));
    return 0;
}

static int product(bench *b, size_t rows, size_t cols, size_t inner, bool back) {
    b->grid = tile_grid_new(rows, cols, KERNEL_LANES);
    b->inner = inner;
    b->back = back;
    return pool_run(b->p, tile_grid_count(&b->grid), product_tile, b);
}

/* n x inner times inner x cols. */
static void gemm(CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, size_t n, size_t cols, size_t inner, const float *a,
                 size_t lda, const float *w, size_t ldw, float beta, float *out, size_t ldo) {
    cblas_sgemm(CblasRowMajor, ta, tb, (blasint)n, (blasint)cols, (blasint)inner, 1, a, (blasint)lda, w, (blasint)ldw,
                beta, out, (blasint)ldo);
}

/* Scores and what they give; going back also the four products of each set. */
static int attention_strip(void *context, size_t task, int worker) {
    const bench *b = context;
    size_t strips = (b->T + STRIP - 1) / STRIP, row = task % strips * STRIP, head = task / strips;
    size_t n = b->T - row < STRIP ? b->T - row : STRIP, end = row + n, dim = (size_t)b->m->head_dim;
    size_t ld = b->heads * dim, ld_s = kernel_pad(b->T);
    const float *q = b->a + row * ld + head * dim;
    float *scores = b->scratch[worker], *sums = scores + STRIP * ld_s, *out = b->out + row * ld + head * dim;
    gemm(CblasNoTrans, CblasTrans, n, end, dim, q, ld, b->a, ld, 0, scores, ld_s);
    if (!b->back) gemm(CblasNoTrans, CblasNoTrans, n, dim, end, scores, ld_s, b->a, ld, 0, out, ld);
    for (size_t set = 0; b->back && set < b->sets; set++) {
        gemm(CblasNoTrans, CblasTrans, n, end, dim, q, ld, b->a, ld, 0, scores, ld_s);
        gemm(CblasNoTrans, CblasNoTrans, n, dim, end, scores, ld_s, b->a, ld, 0, out, ld);
        for (int k_and_v = 0; k_and_v < 2; k_and_v++)
            gemm(CblasTrans, CblasNoTrans, end, dim, n, scores, ld_s, q, ld, 1, sums, dim);
    }
    return 0;
}

static int attention(bench *b, bool back) {
    b->back = back;
    return pool_run(b->p, (b->T + STRIP - 1) / STRIP * (size_t)b->m->n_head, attention_strip, b);
}

static int products_of_logits(bench *b) {
    size_t n_vocab = (size_t)b->m->n_vocab, n_embd = (size_t)b->m->n_embd;
    for (size_t row = 0; row < b->T; row += LOGIT_ROWS) {
        size_t n = b->T - row < LOGIT_ROWS ? b->T - row : LOGIT_ROWS;
        TRY(product(b, n, n_vocab, n_embd, false));
        for (size_t id = 0; id < n_vocab; id += SLICE)
            TRY(product(b, n, n_embd, n_vocab - id < SLICE ? n_vocab - id : SLICE, true));
    }
    return 0;
}

static int products_of_a_pass(bench *b) {
    const model *m = b->m;
    size_t n_embd = (size_t)m->n_embd, n_ff = (size_t)m->n_ff, dim = (size_t)m->head_dim, q = (size_t)m->n_head * dim;
    size_t qkv = b->heads * dim, rows = b->sets * b->T;
    for (int32_t layer = 0; layer < m->n_layer; layer++) {
        for (int pass = 0; pass < 2; pass++) { /* the forward pass; then what is computed again */
            if (layer || !pass) TRY(product(b, b->T, qkv, n_embd, false));
            for (int twice = 0; twice < 2; twice++) TRY(product(b, b->T, n_ff, n_embd, false));
        }
        TRY(attention(b, false));
        TRY(product(b, b->T, n_embd, q, false));
        TRY(product(b, b->T, n_embd, n_ff, false));
        TRY(product(b, rows, n_ff, n_embd, true));
        for (int twice = 0; twice < 2; twice++) TRY(product(b, rows, n_embd, n_ff, true));
        TRY(product(b, rows, q, n_embd, true));
        if (layer) TRY(attention(b, true));
        if (layer) TRY(product(b, rows, n_embd, qkv, true));
    }
    return products_of_logits(b);
}

/* ---- the passes -------------------------------------------------------------------------------------------------- */

static int prepare(bench *b) {
    const model *m = b->m;
    b->heads = (size_t)(m->n_head + 2 * m->n_kv_head);
    size_t widest = (size_t)(m->n_ff > m->n_embd ? m->n_ff : m->n_embd), qkv = b->heads * (size_t)m->head_dim;
    if (qkv > widest) widest = qkv;
    if (SLICE > widest) widest = SLICE;
    size_t n_a = b->sets * b->T * kernel_pad(widest), n_w = (size_t)m->n_vocab * widest;
    size_t n_out = n_a + LOGIT_ROWS * kernel_pad((size_t)m->n_vocab);
    b->a = mem_new(n_a, sizeof(float), "bench");
    b->w = mem_new(n_w, sizeof(float), "bench");
    b->out = mem_new(n_out, sizeof(float), "bench");
    b->scratch = mem_new((size_t)pool_threads(b->p), sizeof *b->scratch, "bench");
    if (!b->a || !b->w || !b->out || !b->scratch) return ERR_DATA;
    for (size_t i = 0; i < n_a; i++) b->a[i] = (float)(i % 17) * 0.125f - 1;
    for (size_t i = 0; i < n_w; i++) b->w[i] = (float)(i % 13) * 0.125f - 1;
    size_t scratch = STRIP * kernel_pad(b->T) + b->T * (size_t)m->head_dim;
    for (int i = 0; i < pool_threads(b->p); i++)
        if (!(b->scratch[i] = mem_new(scratch, sizeof(float), "bench"))) return ERR_DATA;
    return 0;
}

static int take_layer(void *context, int layer, const float *d_heads, size_t set_stride, size_t stride) {
    (void)layer, (void)set_stride, (void)stride;
    *(double *)context += (double)d_heads[0];
    return 0;
}

static void keep_least(cost *best, cost c) {
    if (c.wall < best->wall) best->wall = c.wall;
    if (c.processor < best->processor) best->processor = c.processor;
}

static int measure(const char *path, size_t T, int threads, int repeats, int sets) {
    bench b = {.T = T, .sets = (size_t)sets};
    model *m;
    backend_state *s;
    double checksum = 0;
    cost backward = {1e9, 1e9}, products = {1e9, 1e9};
    const forward_sink nothing = {0};
    const gradient_sink sink = {.context = &checksum, .layer = take_layer};
    label_plan labels = {.n_samples = sets - 1};
    TRY(pool_new(threads, &b.p));
    TRY(model_open(path, &m));
    TRY(cpu_backend.load(m, b.p, &cpu_options, &s));
    b.m = m;
    int32_t *tokens = mem_new(T, sizeof *tokens, "tokens");
    uint8_t *counted = mem_new(T, sizeof *counted, "steps");
    if (!tokens || !counted) return ERR_DATA;
    memset(counted, 1, T);
    labels.counted = counted;
    for (size_t t = 0; t < T; t++) tokens[t] = (int32_t)((t * 2654435761u >> 7) % (size_t)m->n_vocab);
    TRY(prepare(&b));
    double gflop = (model_flops(m, (int32_t)T) + model_gradient_flops(m, (int32_t)T, sets)) * 1e-9;
    printf("%zu tokens, %d label sets, %d threads, OpenBLAS %s, kernels %s, %.0f GFLOP\n", T, sets, pool_threads(b.p),
           openblas_get_corename(), kernels()->name, gflop);
    for (int i = 0; i < repeats; i++) {
        cost start = cost_now();
        TRY(products_of_a_pass(&b));
        cost p = cost_since(start);
        start = cost_now();
        TRY(cpu_backend.forward_backward(s, tokens, (int32_t)T, NULL, &nothing, &labels, &sink));
        cost f = cost_since(start);
        keep_least(&products, p);
        keep_least(&backward, f);
        printf("repeat  products %.3f s (%.3f s)  backward %.3f s (%.3f s)\n", p.wall, p.processor, f.wall,
               f.processor);
    }
    printf("wall       products %.3f s (%.0f GFLOP/s)  backward %.3f s (%.0f GFLOP/s)  ratio %.3f\n", products.wall,
           gflop / products.wall, backward.wall, gflop / backward.wall, backward.wall / products.wall);
    printf("processor  products %.3f s  backward %.3f s  ratio %.3f\n", products.processor, backward.processor,
           backward.processor / products.processor);
    return 0;
}

int main(int argc, char **argv) {
    if (argc < 2) return fprintf(stderr, "usage: bench_backward MODEL.gguf [TOKENS] [THREADS] [REPEATS] [SETS]\n"), 2;
    int tokens = argc > 2 ? atoi(argv[2]) : 1024, threads = argc > 3 ? atoi(argv[3]) : 0;
    int code = measure(argv[1], (size_t)tokens, threads, argc > 4 ? atoi(argv[4]) : 5, argc > 5 ? atoi(argv[5]) : 2);
    if (code) fprintf(stderr, "bench_backward: %s\n", err_message());
    return code;
}
