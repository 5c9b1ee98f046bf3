/* The whole CUDA backend, its kernels run as fibers, against the CPU backend on the tiny model: logits within 2e-3,
 * probabilities within 1e-4, gradients within 1 % (norm of the difference, layer by layer), with the CPU's labels. */
#include "base/err.h"
#include "base/half.h"
#include "base/mem.h"
#include "tests/unit/family_build.h"
#include "tracer/backend.h"
#include "tracer/cpu/cpu.h"
#include "traces/kernels.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define TINY "build/tiny.gguf"
extern const backend kvlag_cuda_backend; /* cuda.h has a backend_state of its own */
enum { SAMPLES = 2, SETS = 1 + SAMPLES, TOPK = 5 };

/* Everything that one run gave. Arrays are [..][T].. of the run's own T. */
typedef struct result {
    const model *m;
    size_t T, width;
    float *logits;                                  /* [T][n_vocab] */
    float *probs;                                   /* [n_layer][n_head][T][T] */
    float *heads;                                   /* [n_layer][T][n_head + 2 n_kv_head][head_dim] q, k, v */
    float *lse;                                     /* [n_layer][n_head][T] */
    float *gradient;                                /* [SETS][n_layer][T][width] */
    float *target_logprob, *entropy, *topk_logprob; /* of stats */
    int32_t *topk_id;
    uint8_t *correct;
    float *hidden;  /* [T][n_embd] */
    int32_t *label; /* [SAMPLES][T-1] */
    int layers_seen, gradients_seen;
} result;

static void *room(size_t n, size_t size) {
    void *p = mem_new(n ? n : 1, size, "test");
    if (!p) fail_msg("%s", err_message());
    return p;
}

static size_t n_heads(const model *m) {
    return (size_t)m->n_head + 2 * (size_t)m->n_kv_head;
}

static result result_new(const model *m, size_t T) {
    size_t L = (size_t)m->n_layer, H = (size_t)m->n_head, dim = (size_t)m->head_dim;
    result r = {.m = m, .T = T, .width = H * dim};
    r.logits = room(T * (size_t)m->n_vocab, sizeof(float));
    r.probs = room(L * H * T * T, sizeof(float));
    r.heads = room(L * T * n_heads(m) * dim, sizeof(float));
    r.lse = room(L * H * T, sizeof(float));
    r.gradient = room(SETS * L * T * r.width, sizeof(float));
    r.target_logprob = room(T, sizeof(float));
    r.entropy = room(T, sizeof(float));
    r.topk_logprob = room(T * TOPK, sizeof(float));
    r.topk_id = room(T * TOPK, sizeof(int32_t));
    r.correct = room(T, 1);
    r.hidden = room(T * (size_t)m->n_embd, sizeof(float));
    r.label = room(SAMPLES * T, sizeof(int32_t));
    return r;
}

static void result_free(result *r) {
    void *all[] = {r->logits,  r->probs,        r->heads,   r->lse,     r->gradient, r->target_logprob,
                   r->entropy, r->topk_logprob, r->topk_id, r->correct, r->hidden,   r->label};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) mem_free(all[i]);
}

/* ---- the CPU's sinks --------------------------------------------------------------------------------------------- */

static int keep_rows(void *context, int layer, int head, int32_t row0, int32_t n, const float *p, size_t stride) {
    result *r = context;
    float *to = r->probs + ((size_t)layer * (size_t)r->m->n_head + (size_t)head) * r->T * r->T;
    for (int32_t i = 0; i < n; i++)
        memcpy(to + (size_t)(row0 + i) * r->T, p + (size_t)i * stride, (size_t)(row0 + n) * sizeof *p);
    return 0;
}

static int keep_layer(void *context, int layer, const layer_capture *c) {
    result *r = context;
    size_t H = (size_t)r->m->n_head, row = n_heads(r->m) * (size_t)r->m->head_dim;
    assert_int_equal(layer, r->layers_seen++);
    memcpy(r->lse + (size_t)layer * H * r->T, c->lse, H * r->T * sizeof(float));
    for (size_t t = 0; c->q && t < r->T; t++)
        memcpy(r->heads + ((size_t)layer * r->T + t) * row, c->q + t * c->stride, row * sizeof(float));
    return 0;
}

static int keep_logits(void *context, int32_t row0, int32_t n, float *logits, size_t stride) {
    result *r = context;
    size_t V = (size_t)r->m->n_vocab;
    for (int32_t i = 0; i < n; i++)
        memcpy(r->logits + (size_t)(row0 + i) * V, logits + (size_t)i * stride, V * sizeof(float));
    return 0;
}

static int keep_hidden(void *context, const float *x, size_t stride) {
    result *r = context;
    size_t n = (size_t)r->m->n_embd;
    for (size_t t = 0; t < r->T; t++) memcpy(r->hidden + t * n, x + t * stride, n * sizeof *x);
    return 0;
}

static int keep_labels(void *context, const int32_t *label) {
    result *r = context;
    memcpy(r->label, label, SAMPLES * (r->T - 1) * sizeof *label);
    return 0;
}

static float *gradient_row(const result *r, size_t set, int layer, size_t t) {
    return r->gradient + ((set * (size_t)r->m->n_layer + (size_t)layer) * r->T + t) * r->width;
}

static int keep_gradients(void *context, int layer, const float *d, size_t set_stride, size_t stride) {
    result *r = context;
    for (size_t set = 0; set < SETS; set++)
        for (size_t t = 0; t < r->T; t++)
            memcpy(gradient_row(r, set, layer, t), d + set * set_stride + t * stride, r->width * sizeof *d);
    return 0;
}

/* ---- the sinks of a backend that packs ----------------------------------------------------------------------------
 */

static float value_of(const uint8_t *chunk, size_t n, size_t i) {
    return half_to_f32((half)(chunk[i] | chunk[n + i] << 8));
}

static void unpack_probs(result *r, int layer, size_t index, const uint8_t *chunk) {
    size_t edge = r->T < TRACE_TILE ? r->T : TRACE_TILE, tiles = (r->T + edge - 1) / edge,
           each = tiles * (tiles + 1) / 2;
    size_t head = index / each, row = 0, col = index % each;
    while (col > row) col -= ++row;
    float *to = r->probs + ((size_t)layer * (size_t)r->m->n_head + head) * r->T * r->T;
    for (size_t i = 0; i < edge; i++)
        for (size_t j = 0; j < edge; j++) {
            float v = value_of(chunk, edge * edge, i * edge + j);
            size_t t = row * edge + i, k = col * edge + j;
            if (t < r->T && k < r->T) to[t * r->T + k] = v;
            else assert_true(v == 0);
        }
}

static void unpack_heads(result *r, int layer, size_t head0, size_t index, const uint8_t *chunk) {
    size_t dim = (size_t)r->m->head_dim, edge = r->T < TRACE_TILE ? r->T : TRACE_TILE, tiles = (r->T + edge - 1) / edge;
    size_t head = head0 + index / tiles, row = index % tiles * edge;
    for (size_t i = 0; i < edge; i++)
        for (size_t d = 0; d < dim; d++) {
            float v = value_of(chunk, edge * dim, i * dim + d);
            if (row + i < r->T) r->heads[(((size_t)layer * r->T + row + i) * n_heads(r->m) + head) * dim + d] = v;
            else assert_true(v == 0);
        }
}

static int keep_tiles(void *context, trace_array array, int layer, size_t first, size_t n, const uint8_t *bytes) {
    result *r = context;
    size_t edge = r->T < TRACE_TILE ? r->T : TRACE_TILE, dim = (size_t)r->m->head_dim, H = (size_t)r->m->n_head;
    size_t size = 2 * edge * (array == TRACE_PROBS ? edge : dim), K = (size_t)r->m->n_kv_head;
    for (size_t i = 0; i < n; i++)
        if (array == TRACE_PROBS) unpack_probs(r, layer, first + i, bytes + i * size);
        else unpack_heads(r, layer, array == TRACE_Q ? 0 : array == TRACE_K ? H : H + K, first + i, bytes + i * size);
    return 0;
}

static int keep_stats(void *context, int32_t row0, int32_t n, const step_stats *s) {
    result *r = context;
    size_t at = (size_t)row0, count = (size_t)n;
    memcpy(r->target_logprob + at, s->target_logprob, count * sizeof(float));
    memcpy(r->entropy + at, s->entropy, count * sizeof(float));
    memcpy(r->correct + at, s->correct, count);
    memcpy(r->topk_id + at * TOPK, s->topk_id, count * TOPK * sizeof(int32_t));
    memcpy(r->topk_logprob + at * TOPK, s->topk_logprob, count * TOPK * sizeof(float));
    return 0;
}

static int keep_packed(void *context, int layer, int set, const uint8_t *tiles, const float *scale) {
    result *r = context;
    size_t dim = (size_t)r->m->head_dim, edge = r->T < TRACE_TILE ? r->T : TRACE_TILE, n = (r->T + edge - 1) / edge;
    r->gradients_seen++;
    for (size_t h = 0; h < (size_t)r->m->n_head; h++)
        for (size_t t = 0; t < r->T; t++)
            for (size_t d = 0; d < dim; d++)
                gradient_row(r, (size_t)set, layer, t)[h * dim + d] =
                    scale[h * r->T + t] *
                    value_of(tiles + (h * n + t / edge) * edge * dim * 2, edge * dim, t % edge * dim + d);
    return 0;
}

/* ---- runs -------------------------------------------------------------------------------------------------------- */

typedef struct bench {
    model *m;
    family *f; /* whose model it is; NULL: a file's */
    pool *p;
    backend_state *cpu, *cuda;
} bench;

static bench bench_load(bench b, const backend_options *cuda_options) {
    if (pool_new(1, &b.p) || cpu_backend.load(b.m, b.p, &cpu_options, &b.cpu) ||
        kvlag_cuda_backend.load(b.m, b.p, cuda_options, &b.cuda))
        fail_msg("%s", err_message());
    return b;
}

static bench bench_new(const backend_options *cuda_options) {
    bench b = {0};
    if (model_open(TINY, &b.m)) fail_msg("%s", err_message());
    return bench_load(b, cuda_options);
}

static void bench_free(bench *b) {
    cpu_backend.unload(b->cpu);
    kvlag_cuda_backend.unload(b->cuda);
    pool_free(b->p);
    if (b->f) family_free(b->f);
    else model_close(b->m);
}

static int32_t *text(const model *m, size_t T) {
    int32_t *tokens = room(T, sizeof *tokens);
    for (size_t t = 0; t < T; t++) tokens[t] = (int32_t)((t * t + 7 * t) % (size_t)m->n_vocab);
    return tokens;
}

static uint8_t *counted(size_t T) {
    uint8_t *c = room(T, 1);
    for (size_t t = 0; t + 1 < T; t++) c[t] = t % 5 != 3;
    return c;
}

/* fixed: the labels to use, NULL = draw. */
static result run(bench *b, bool cuda, size_t T, const int32_t *evict_at, const int32_t *fixed) {
    result r = result_new(b->m, T);
    int32_t *tokens = text(b->m, T);
    uint8_t *counts = counted(T);
    label_plan plan = {.counted = counts, .n_samples = SAMPLES, .fixed = fixed, .seed = 7, .sequence = 3};
    forward_sink sink = {.context = &r, .layer = keep_layer, .hidden = keep_hidden};
    gradient_sink back = {.context = &r, .labels = keep_labels};
    if (cuda) {
        sink.tiles = keep_tiles;
        sink.wants_probs = sink.wants_qkv = true;
        sink.stats = keep_stats;
        sink.n_topk = TOPK;
        back.packed = keep_packed;
    } else {
        sink.rows = keep_rows;
        back.layer = keep_gradients;
    }
    sink.logits = keep_logits;
    const backend *k = cuda ? &kvlag_cuda_backend : &cpu_backend;
    if (k->forward_backward(cuda ? b->cuda : b->cpu, tokens, (int32_t)T, evict_at, &sink, &plan, &back))
        fail_msg("%s", err_message());
    mem_free(tokens);
    mem_free(counts);
    return r;
}

static double worst(const float *a, const float *b, size_t n) {
    double most = 0;
    for (size_t i = 0; i < n; i++) {
        double d = fabs((double)a[i] - (double)b[i]);
        if (!(d <= most)) most = d;
    }
    return most;
}

/* The same of values that were kept in f16, beyond half a unit in their last place. */
static double worst_kept(const float *exact, const float *kept, size_t n) {
    double most = 0;
    for (size_t i = 0; i < n; i++) {
        double d = fabs((double)exact[i] - (double)kept[i]) - fabs((double)exact[i]) * 0x1p-11 - 0x1p-25;
        if (!(d <= most)) most = d;
    }
    return most;
}

/* Norm of the difference over the norm, of one layer of one set. */
static double relative(const result *a, const result *b, size_t set, int layer) {
    double difference = 0, norm = 0;
    const float *x = gradient_row(a, set, layer, 0), *y = gradient_row(b, set, layer, 0);
    for (size_t i = 0; i < a->T * a->width; i++) {
        difference += ((double)x[i] - (double)y[i]) * ((double)x[i] - (double)y[i]);
        norm += (double)x[i] * (double)x[i];
    }
    return norm > 0 ? sqrt(difference / norm) : sqrt(difference);
}

static double worst_gradient(const result *a, const result *b) {
    double most = 0;
    for (size_t set = 0; set < SETS; set++)
        for (int layer = 0; layer < a->m->n_layer; layer++) {
            double d = relative(a, b, set, layer);
            if (!(d <= most)) most = d;
        }
    return most;
}

static void check_stats(const result *cpu, const result *cuda) {
    size_t V = (size_t)cpu->m->n_vocab;
    int32_t *tokens = text(cpu->m, cpu->T);
    for (size_t t = 0; t < cpu->T; t++) {
        const float *x = cuda->logits + t * V;
        double most = x[0], sum = 0, entropy = 0;
        size_t top = 0;
        for (size_t i = 1; i < V; i++)
            if ((double)x[i] > most) most = x[i], top = i;
        for (size_t i = 0; i < V; i++) sum += exp((double)x[i] - most);
        double lse = most + log(sum);
        for (size_t i = 0; i < V; i++) entropy -= exp((double)x[i] - lse) * ((double)x[i] - lse);
        assert_int_equal(cuda->topk_id[t * TOPK], top);
        assert_float_equal(cuda->topk_logprob[t * TOPK], most - lse, 1e-5);
        assert_float_equal(cuda->entropy[t], entropy, 1e-4);
        if (t + 1 == cpu->T) continue;
        assert_float_equal(cuda->target_logprob[t], (double)x[tokens[t + 1]] - lse, 1e-5);
        assert_int_equal(cuda->correct[t], (int32_t)top == tokens[t + 1]);
    }
    mem_free(tokens);
}

typedef struct bounds {
    double logits, probs, heads, gradient;
} bounds;

static const bounds f32_bounds = {2e-3, 1e-4, 2e-3, 0.01}, bf16_bounds = {0.5, 0.2, 1, 0.6};

static void compare(bench *b, size_t T, const int32_t *evict_at, bounds most, const char *what) {
    const model *m = b->m;
    size_t L = (size_t)m->n_layer, H = (size_t)m->n_head, V = (size_t)m->n_vocab;
    result cpu = run(b, false, T, evict_at, NULL), drawn = run(b, true, T, evict_at, NULL);
    result cuda = run(b, true, T, evict_at, cpu.label);
    size_t same = 0, labels = SAMPLES * (T - 1);
    for (size_t i = 0; i < labels; i++) same += cpu.label[i] == drawn.label[i];
    double logits = worst(cpu.logits, cuda.logits, T * V), probs = worst_kept(cpu.probs, cuda.probs, L * H * T * T);
    double heads = worst_kept(cpu.heads, cuda.heads, L * T * n_heads(m) * (size_t)m->head_dim);
    double gradient = worst_gradient(&cpu, &cuda);
    printf("# %s, %zu tokens: logits %.2g, probabilities %.2g, q k v %.2g, gradients %.2g, labels %zu of %zu\n", what,
           T, logits, probs, heads, gradient, same, labels);
    assert_true(logits <= most.logits);
    assert_true(probs <= most.probs);
    assert_true(heads <= most.heads);
    assert_true(gradient <= most.gradient);
    assert_true(worst(cpu.lse, cuda.lse, L * H * T) <= 100 * most.probs);
    assert_memory_equal(cpu.label, cuda.label, labels * sizeof(int32_t));
    assert_int_equal(cuda.layers_seen, m->n_layer);
    assert_int_equal(cuda.gradients_seen, SETS * m->n_layer);
    check_stats(&cpu, &cuda);
    result_free(&cpu);
    result_free(&cuda);
    result_free(&drawn);
}

static void equals_cpu(void **state) {
    (void)state;
    static const size_t lengths[] = {2, 31, 33, 257, 300};
    bench b = bench_new(&(backend_options){.device = "", .precision = "f32", .weights = "dense"});
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) compare(&b, lengths[i], NULL, f32_bounds, "f32");
    bench_free(&b);
}

static int32_t *lifetimes(const model *m, size_t T) {
    size_t units = (size_t)m->n_layer * (size_t)m->n_kv_head, pad = kernel_pad(T);
    int32_t *e = room(units * pad, sizeof *e);
    for (size_t u = 0; u < units; u++)
        for (size_t i = 0; i < pad; i++) e[u * pad + i] = (int32_t)(i + 1 + (i * 31 + u * 17) % 40);
    return e;
}

static void masked_equals_cpu(void **state) {
    (void)state;
    bench b = bench_new(&(backend_options){.device = "", .precision = "f32", .weights = "dense"});
    int32_t *e = lifetimes(b.m, 100);
    compare(&b, 100, e, f32_bounds, "masked");
    mem_free(e);
    bench_free(&b);
}

/* Weights that are dequantised on the fly, or that stay in host memory, are the same weights. */
static void ways_are_equal(void **state) {
    (void)state;
    bench dense = bench_new(&(backend_options){.device = "", .precision = "f32", .weights = "dense"});
    bench blocks = bench_new(&(backend_options){.device = "", .precision = "f32", .weights = "blocks"});
    bench offload =
        bench_new(&(backend_options){.device = "", .precision = "f32", .weights = "blocks", .offload = true});
    size_t T = 70, L = (size_t)dense.m->n_layer;
    result a = run(&dense, true, T, NULL, NULL), b = run(&blocks, true, T, NULL, NULL),
           c = run(&offload, true, T, NULL, NULL);
    assert_memory_equal(a.logits, b.logits, T * (size_t)dense.m->n_vocab * sizeof(float));
    assert_memory_equal(a.logits, c.logits, T * (size_t)dense.m->n_vocab * sizeof(float));
    assert_memory_equal(a.gradient, b.gradient, SETS * L * T * a.width * sizeof(float));
    assert_memory_equal(a.gradient, c.gradient, SETS * L * T * a.width * sizeof(float));
    result_free(&a);
    result_free(&b);
    result_free(&c);
    bench_free(&dense);
    bench_free(&blocks);
    bench_free(&offload);
}

static void bf16_is_near(void **state) {
    (void)state;
    bench b = bench_new(&(backend_options){.device = "", .precision = "bf16", .weights = "dense"});
    size_t T = 120;
    assert_string_equal(kvlag_cuda_backend.compute(b.cuda), "bf16");
    compare(&b, T, NULL, bf16_bounds, "bf16");
    result cpu = run(&b, false, T, NULL, NULL), cuda = run(&b, true, T, NULL, cpu.label);
    int32_t *tokens = text(b.m, T);
    double sum = 0;
    for (size_t t = 0; t + 1 < T; t++) {
        const float *x = cpu.logits + t * (size_t)b.m->n_vocab;
        double total = 0;
        for (int32_t i = 0; i < b.m->n_vocab; i++) total += exp((double)x[i]);
        sum += fabs((double)cuda.target_logprob[t] - ((double)x[tokens[t + 1]] - log(total)));
    }
    printf("# bf16: mean difference of the target's log probability %.3g\n", sum / (double)(T - 1));
    assert_true(sum / (double)(T - 1) <= 0.05);
    mem_free(tokens);
    result_free(&cpu);
    result_free(&cuda);
    bench_free(&b);
}

/* Equal input, equal bits. */
static void twice_is_equal(void **state) {
    (void)state;
    bench b = bench_new(&(backend_options){.device = "", .precision = "f32", .weights = "dense"});
    result x = run(&b, true, 65, NULL, NULL), y = run(&b, true, 65, NULL, NULL);
    assert_memory_equal(x.gradient, y.gradient, SETS * (size_t)b.m->n_layer * 65 * x.width * sizeof(float));
    assert_memory_equal(x.label, y.label, SAMPLES * 64 * sizeof(int32_t));
    result_free(&x);
    result_free(&y);
    bench_free(&b);
}

/* A device whose compute lane is late, so that the host and the copy lane run ahead of it as far as they may. */
static bench late_bench_new(const backend_options *options) {
    setenv("KVLAG_FIBERS_LATE", "compute", 1);
    bench b = bench_new(options);
    unsetenv("KVLAG_FIBERS_LATE");
    return b;
}

static const backend_options offloaded = {.device = "", .precision = "f32", .weights = "blocks", .offload = true};

/* Layers that come from the host, results that go there, labels drawn on the way: nobody overtakes. A layer sends more
 * packets than a pipe has slots. */
static void a_late_device_gives_the_same(void **state) {
    (void)state;
    size_t T = 70;
    bench b = bench_new(&offloaded), late = late_bench_new(&offloaded);
    size_t L = (size_t)b.m->n_layer, H = (size_t)b.m->n_head;
    result x = run(&b, true, T, NULL, NULL), y = run(&late, true, T, NULL, NULL);
    assert_memory_equal(x.logits, y.logits, T * (size_t)b.m->n_vocab * sizeof(float));
    assert_memory_equal(x.probs, y.probs, L * H * T * T * sizeof(float));
    assert_memory_equal(x.heads, y.heads, L * T * n_heads(b.m) * (size_t)b.m->head_dim * sizeof(float));
    assert_memory_equal(x.lse, y.lse, L * H * T * sizeof(float));
    assert_memory_equal(x.gradient, y.gradient, SETS * L * T * x.width * sizeof(float));
    assert_memory_equal(x.label, y.label, SAMPLES * (T - 1) * sizeof(int32_t));
    check_stats(&x, &y);
    result_free(&x);
    result_free(&y);
    bench_free(&b);
    bench_free(&late);
}

/* verify's open loop takes hidden states and projects them later. */
static void project_gives_logits(void **state) {
    (void)state;
    enum { T = 40 };
    bench b = bench_new(&(backend_options){.device = "", .precision = "f32", .weights = "dense"});
    result r = run(&b, true, T, NULL, NULL);
    size_t n = (size_t)b.m->n_embd, ld = kernel_pad(n), V = (size_t)b.m->n_vocab, ld_out = kernel_pad(V);
    float *x = room(T * ld, sizeof *x), *out = room(T * ld_out, sizeof *out);
    for (size_t t = 0; t < T; t++) memcpy(x + t * ld, r.hidden + t * n, n * sizeof *x);
    if (kvlag_cuda_backend.project(b.cuda, x, T, ld, out, ld_out)) fail_msg("%s", err_message());
    for (size_t t = 0; t < T; t++) assert_true(worst(out + t * ld_out, r.logits + t * V, V) <= 1e-4);
    mem_free(x);
    mem_free(out);
    result_free(&r);
    bench_free(&b);
}

/* Closed loop: a full copy and one that forgets, against the CPU's. */
static void check_steps(bench *at) {
    enum { T = 50, COPIES = 2 };
    bench b = *at;
    const backend *k[2] = {&cpu_backend, &kvlag_cuda_backend};
    backend_state *s[2] = {b.cpu, b.cuda};
    backend_steps *st[2];
    static const bool wants[COPIES] = {false, true};
    int32_t *tokens = text(b.m, T), *e = lifetimes(b.m, T);
    for (int i = 0; i < 2; i++)
        if (k[i]->steps_new(s[i], COPIES, wants, T, &st[i])) fail_msg("%s", err_message());
    for (int32_t t = 0; t < T; t++) {
        step_view view[2];
        for (int i = 0; i < 2; i++)
            if (k[i]->steps_next(st[i], tokens[t], &view[i])) fail_msg("%s", err_message());
        for (size_t c = 0; c < COPIES; c++)
            assert_true(worst(view[0].logits + c * view[0].ld_logits, view[1].logits + c * view[1].ld_logits,
                              (size_t)b.m->n_vocab) <= 2e-3);
        assert_null(view[1].rows[0]);
        for (size_t h = 0; h < (size_t)(b.m->n_layer * b.m->n_head); h++)
            assert_true(worst(view[0].rows[1] + h * view[0].ld_rows, view[1].rows[1] + h * view[1].ld_rows,
                              (size_t)t + 1) <= 1e-4);
        for (int i = 0; i < 2; i++)
            for (int layer = 0; layer < b.m->n_layer; layer++)
                for (int h = 0; h < b.m->n_kv_head; h++)
                    k[i]->steps_forget(st[i], 1, layer, h, e + (size_t)(layer * b.m->n_kv_head + h) * kernel_pad(T));
    }
    for (int i = 0; i < 2; i++) k[i]->steps_free(st[i]);
    mem_free(tokens);
    mem_free(e);
}

static void steps_equal_cpu(void **state) {
    (void)state;
    bench dense = bench_new(&(backend_options){.device = "", .precision = "f32", .weights = "dense"});
    bench late = late_bench_new(&offloaded);
    check_steps(&dense);
    check_steps(&late);
    bench_free(&dense);
    bench_free(&late);
}

/* ---- families ---------------------------------------------------------------------------------------------------- */

static family *family_of(const char *name) {
    family *f = family_new(arch_find(name, strlen(name)));
    for (int layer = 0; layer < FAMILY_LAYERS; layer++) f->m.layer[layer].weight[SLOT_O_BIAS].tensor = NULL;
    return f;
}

/* What they need, and with it windows, capped scores, a RoPE that scales, and a layer without any. */
static void families_equal_cpu(void **state) {
    (void)state;
    static const char *const names[] = {"llama", "qwen2", "phi3", "smollm3"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        for (int way = 0; way < 2; way++) {
            bench b = {.f = family_of(names[i])};
            b.m = &b.f->m;
            b.m->window[1] = 20;
            b.m->softcap = 3;
            b.m->rope[0].scale = 1.2;
            b.m->layer[2].rope = -1;
            b = bench_load(b,
                           way ? &offloaded : &(backend_options){.device = "", .precision = "f32", .weights = "dense"});
            compare(&b, 70, NULL, f32_bounds, names[i]);
            check_steps(&b);
            bench_free(&b);
        }
}

static void check_refused(const family *f, const char *what) {
    backend_state *s;
    const backend_options plain = {.device = "", .precision = "f32", .weights = "dense"};
    assert_int_equal(kvlag_cuda_backend.load(&f->m, NULL, &plain, &s), ERR_DATA);
    assert_null(s);
    char want[200];
    snprintf(want, sizeof want, "family (%s): the CUDA backend does not compute %s; use --backend cpu", f->m.arch->name,
             what);
    assert_string_equal(err_message(), want);
}

static void what_is_not_computed_is_named(void **state) {
    (void)state;
    static const struct {
        const char *arch, *what;
    } all[] = {{"gemma", "GELU"},     {"gemma2", "GELU"},
               {"gemma3", "GELU"},    {"qwen3", "norms of queries"},
               {"gpt2", "LayerNorm"}, {"olmo2", "layers without a norm before attention"}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        family *f = family_of(all[i].arch);
        check_refused(f, all[i].what);
        family_free(f);
    }
}

/* Each on its own, on a model that is served otherwise. */
static void every_refusal_has_its_reason(void **state) {
    (void)state;
    family *f = family_of("llama");
    model *m = &f->m;
    const model_weight some = m->layer[0].weight[SLOT_FFN_NORM], none = {0};
    const struct {
        arch_slot slot;
        model_weight becomes;
        const char *what;
    } slots[] = {{SLOT_ATTN_NORM, none, "layers without a norm before attention"},
                 {SLOT_FFN_NORM, none, "layers without a norm before the feed-forward"},
                 {SLOT_ATTN_POST_NORM, some, "norms behind attention"},
                 {SLOT_FFN_POST_NORM, some, "norms behind the feed-forward"},
                 {SLOT_Q_NORM, some, "norms of queries"},
                 {SLOT_K_NORM, some, "norms of keys"},
                 {SLOT_GATE, none, "feed-forwards without a gate"},
                 {SLOT_O_BIAS, some, "biases of the output projection"},
                 {SLOT_UP_BIAS, some, "biases of the feed-forward"},
                 {SLOT_DOWN_BIAS, some, "biases of the feed-forward"}};
    for (size_t i = 0; i < sizeof slots / sizeof *slots; i++) {
        model_weight *w = &m->layer[1].weight[slots[i].slot], was = *w;
        *w = slots[i].becomes;
        check_refused(f, slots[i].what);
        *w = was;
    }
    m->layer[2].weight[SLOT_UP].transposed = true;
    check_refused(f, "transposed weights");
    m->layer[2].weight[SLOT_UP].transposed = false;
    m->output_norm.plus_one = true;
    check_refused(f, "norm weights that are stored less 1");
    m->n_rope = 2;
    check_refused(f, "more than one RoPE");
    m->logit_softcap = 30;
    check_refused(f, "soft-capped logits");
    m->embedding_scale = 4;
    check_refused(f, "scaled embeddings");
    family_free(f);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(equals_cpu),
                                       cmocka_unit_test(masked_equals_cpu),
                                       cmocka_unit_test(ways_are_equal),
                                       cmocka_unit_test(bf16_is_near),
                                       cmocka_unit_test(twice_is_equal),
                                       cmocka_unit_test(a_late_device_gives_the_same),
                                       cmocka_unit_test(project_gives_logits),
                                       cmocka_unit_test(steps_equal_cpu),
                                       cmocka_unit_test(families_equal_cpu),
                                       cmocka_unit_test(what_is_not_computed_is_named),
                                       cmocka_unit_test(every_refusal_has_its_reason)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
