/* The kernel ladder: `ladder [NAME=VALUE ...]` times each kernel of tracer/cuda/kernels.h by itself, and the matrix
 * products, at the shapes of one layer of a model, and prints a Markdown table: time, GB/s or TFLOP/s, and the share of
 * the device's peak.
 *
 * Bytes are those that must move: what is read, read once, and what is written. Multiply-adds count two; attention is
 * the triangle it is, and what a kernel computes again is not counted. Data that fit the device's cache make GB/s
 * larger than its memory gives. Names and defaults: see `names`. With products=1 only the sums over the products of a
 * layer are printed: "f32 SECONDS FLOP", "bf16 SECONDS FLOP". */
#include "base/err.h"
#include "base/mem.h"
#include "base/rng.h"
#include "tracer/cuda/kernels.h"
#include "traces/kernels.h"
#include "traces/trace.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCKS = 24, PATTERN = 1 << 16, SETS = 2, TOPK = 32, ATTENTION_GOAL = 50 /* percent */ };

typedef struct ladder {
    device *d;
    size_t T, embd, heads, kv_heads, dim, ff, vocab; /* of the model; dim = embd / heads */
    size_t logit_rows, copies;                       /* at a time; of a closed loop */
    size_t repeat;
    double memory, fma; /* the device's peaks in GB/s and f32 TFLOP/s; 0 = measured by the first two lines */
    bool products;      /* print nothing but the products' sums */
    void *block[BLOCKS];
    size_t n_blocks;
    float *pattern; /* [PATTERN] normal values, which fill all arrays */
    double seconds; /* of the last line */
} ladder;

/* ---- device memory: a group of lines takes what it needs and gives all of it back ------------------------------- */

static int take(ladder *l, size_t bytes, void *out) {
    if (l->n_blocks == BLOCKS) return err_set(ERR_DATA, "internal error: a group takes more than %d arrays", BLOCKS);
    TRY(device_new(l->d, bytes, "an array of the ladder", &l->block[l->n_blocks]));
    memcpy(out, &l->block[l->n_blocks++], sizeof(void *));
    return 0;
}

static void give_back(ladder *l) {
    while (l->n_blocks) device_release(l->d, l->block[--l->n_blocks]);
}

/* `bytes` from a pattern on the host, over and over. */
static int take_filled(ladder *l, size_t bytes, const void *pattern, size_t pattern_bytes, void *out) {
    char *to;
    TRY(take(l, bytes, &to));
    memcpy(out, &to, sizeof to);
    size_t done = bytes < pattern_bytes ? bytes : pattern_bytes;
    TRY(device_to(l->d, STREAM_COMPUTE, to, pattern, done));
    for (size_t n; done < bytes; done += n) {
        n = bytes - done < done ? bytes - done : done;
        TRY(device_copy(l->d, STREAM_COMPUTE, to + done, to, n));
    }
    return device_sync(l->d);
}

static int floats(ladder *l, size_t n, float **out) {
    return take_filled(l, n * sizeof(float), l->pattern, PATTERN * sizeof(float), out);
}

/* Of a type: bf16 by cutting off what does not fit. */
static int values(ladder *l, dtype type, size_t n, void *out) {
    if (type == DTYPE_F32) return floats(l, n, out);
    uint16_t *cut = mem_new(PATTERN, sizeof *cut, "the pattern");
    if (!cut) return ERR_DATA;
    for (size_t i = 0; i < PATTERN; i++) memcpy(&cut[i], (const char *)&l->pattern[i] + 2, sizeof *cut);
    int code = take_filled(l, n * sizeof *cut, cut, PATTERN * sizeof *cut, out);
    mem_free(cut);
    return code;
}

/* `value` where period is 0, else i % period. */
static int integers(ladder *l, size_t n, int32_t value, size_t period, int32_t **out) {
    int32_t *host = mem_new(n, sizeof *host, "integers");
    if (!host) return ERR_DATA;
    for (size_t i = 0; i < n; i++) host[i] = period ? (int32_t)(i % period) : value;
    int code = take_filled(l, n * sizeof *host, host, n * sizeof *host, out);
    mem_free(host);
    return code;
}

static int bytes_of_ones(ladder *l, size_t n, uint8_t **out) {
    TRY(take(l, n, out));
    return device_fill(l->d, STREAM_COMPUTE, *out, 1, n);
}

/* ---- lines ------------------------------------------------------------------------------------------------------ */

/* What a line does: bytes or multiply-adds that count. */
typedef struct work {
    const char *name;
    double bytes, flop;
    bool tensor_cores; /* there is no f32 peak to compare with */
    double goal;       /* share of the peak in percent; 0 = none */
} work;

static void print_line(ladder *l, const work *w, double seconds) {
    double gb = w->bytes * 1e-9 / seconds, tflop = w->flop * 1e-12 / seconds;
    double share = w->flop > 0 ? tflop / l->fma : gb / l->memory;
    printf("| %s | %.4f | ", w->name, seconds * 1e3);
    if (w->bytes > 0) printf("%.1f", gb);
    printf(" | ");
    if (w->flop > 0) printf("%.3f", tflop);
    printf(" | ");
    if (!w->tensor_cores && share > 0) printf("%.1f %%", 100 * share);
    if (w->goal > 0) printf(" (goal %.0f %%: %s)", w->goal, 100 * share >= w->goal ? "met" : "missed");
    printf(" |\n");
    fflush(stdout);
}

static int begin(ladder *l, double *before) {
    TRY(device_sync(l->d));
    *before = device_busy(l->d, STREAM_COMPUTE);
    return device_busy_begin(l->d, STREAM_COMPUTE);
}

static int end(ladder *l, const work *w, double before) {
    TRY(device_busy_end(l->d, STREAM_COMPUTE));
    l->seconds = (device_busy(l->d, STREAM_COMPUTE) - before) / (double)l->repeat;
    TRY(device_sync(l->d)); /* what failed while it ran shows here */
    if (!l->products) print_line(l, w, l->seconds);
    return 0;
}

/* Run `call` once to warm up and then `repeat` times by the clock; `...` is a work. */
#define LINE(l, call, ...)                                           \
    do {                                                             \
        double before_;                                              \
        const work work_ = {__VA_ARGS__};                            \
        device_at((l)->d, "%s, %zu tokens", work_.name, (l)->T);     \
        TRY(call);                                                   \
        TRY(begin((l), &before_));                                   \
        for (size_t run_ = 0; run_ < (l)->repeat; run_++) TRY(call); \
        TRY(end((l), &work_, before_));                              \
    } while (0)

static double triangle(const ladder *l) {
    return (double)l->T * ((double)l->T + 1) / 2;
}

/* ---- groups ------------------------------------------------------------------------------------------------------ */

static int memory(ladder *l) {
    size_t bytes = l->T * l->ff * sizeof(float);
    void *from, *to;
    TRY(floats(l, l->T * l->ff, (float **)&from));
    TRY(take(l, bytes, &to));
    double given = l->memory;
    if (given <= 0) l->memory = INFINITY;
    LINE(l, device_copy(l->d, STREAM_COMPUTE, to, from, bytes), "device_copy", .bytes = 2.0 * (double)bytes);
    if (given <= 0) l->memory = 2.0 * (double)bytes * 1e-9 / l->seconds;
    return 0;
}

/* One product of a layer: out[T][cols] (+)= in[T][inner] w. */
static int product(ladder *l, const char *name, dtype type, size_t cols, size_t inner, bool back) {
    device_product p = {.rows = l->T, .cols = cols, .inner = inner, .type = type, .lda = inner, .back = back};
    p.ldb = back ? cols : inner;
    p.ldo = kernel_pad(cols);
    double flop = 2.0 * (double)l->T * (double)cols * (double)inner;
    void *a, *b;
    TRY(values(l, type, l->T * inner, &a));
    TRY(values(l, type, cols * inner, &b));
    TRY(take(l, l->T * p.ldo * sizeof(float), &p.out));
    p.a = a;
    p.b = b;
    LINE(l, device_multiply(l->d, &p), name, .flop = flop, .tensor_cores = type == DTYPE_BF16);
    give_back(l);
    return 0;
}

/* All of a layer forward; seconds and flop are added up. */
static int layer_products(ladder *l, dtype type, double *seconds, double *flop) {
    size_t q = l->heads * l->dim, kv = l->kv_heads * l->dim;
    const struct {
        const char *name[2];
        size_t cols, inner;
    } of[] = {{{"cuBLAS q k v, f32", "cuBLAS q k v, bf16"}, q + 2 * kv, l->embd},
              {{"cuBLAS o, f32", "cuBLAS o, bf16"}, l->embd, q},
              {{"cuBLAS gate, f32", "cuBLAS gate, bf16"}, l->ff, l->embd},
              {{"cuBLAS up, f32", "cuBLAS up, bf16"}, l->ff, l->embd},
              {{"cuBLAS down, f32", "cuBLAS down, bf16"}, l->embd, l->ff}};
    for (size_t i = 0; i < sizeof of / sizeof *of; i++) {
        TRY(product(l, of[i].name[type == DTYPE_BF16], type, of[i].cols, of[i].inner, false));
        *seconds += l->seconds;
        *flop += 2.0 * (double)l->T * (double)of[i].cols * (double)of[i].inner;
    }
    return 0;
}

static int products_f32(ladder *l) {
    double seconds = 0, flop = 0, given = l->fma;
    if (given <= 0) l->fma = INFINITY;
    TRY(layer_products(l, DTYPE_F32, &seconds, &flop));
    if (given <= 0) l->fma = flop * 1e-12 / seconds;
    return product(l, "cuBLAS down, back, f32", DTYPE_F32, l->ff, l->embd, true);
}

static int products_bf16(ladder *l) {
    double seconds = 0, flop = 0;
    TRY(layer_products(l, DTYPE_BF16, &seconds, &flop));
    return product(l, "cuBLAS down, back, bf16", DTYPE_BF16, l->ff, l->embd, true);
}

static int dequant(ladder *l) {
    static const struct {
        const char *name[2];
        uint32_t type;
        size_t block, block_bytes;
    } of[] = {{{"k_dequant F16 to f32", "k_dequant F16 to bf16"}, 1, 1, 2},
              {{"k_dequant Q8_0 to f32", "k_dequant Q8_0 to bf16"}, 8, 32, 34},
              {{"k_dequant Q4_0 to f32", "k_dequant Q4_0 to bf16"}, 2, 32, 18},
              {{"k_dequant Q4_1 to f32", "k_dequant Q4_1 to bf16"}, 3, 32, 20}};
    size_t rows = l->ff, n = l->embd / 32 * 32;
    uint8_t *blocks;
    int32_t *ids;
    void *out;
    TRY(floats(l, rows * n, (float **)&blocks));
    TRY(integers(l, l->T, 0, rows, &ids));
    TRY(take(l, (rows > l->T ? rows : l->T) * n * sizeof(float), &out));
    for (size_t i = 0; i < sizeof of / sizeof *of; i++)
        for (int type = DTYPE_F32; type <= DTYPE_BF16; type++) {
            size_t row_bytes = n / of[i].block * of[i].block_bytes;
            LINE(l, k_dequant(l->d, of[i].type, blocks, row_bytes, NULL, rows, n, (dtype)type, out, n),
                 of[i].name[type], .bytes = (double)rows * (double)(row_bytes + n * dtype_size((dtype)type)));
        }
    LINE(l, k_dequant(l->d, 1, blocks, 2 * n, ids, l->T, n, DTYPE_F32, out, n), "k_dequant F16 by ids (embedding)",
         .bytes = (double)(l->T * n * 6));
    return 0;
}

static int norms(ladder *l) {
    size_t ld = kernel_pad(l->embd), n = l->T * l->embd;
    float *x, *weight, *d_out, *d_x;
    void *out;
    TRY(floats(l, l->T * ld, &x));
    TRY(floats(l, ld, &weight));
    TRY(take(l, l->T * ld * sizeof(float), &out));
    LINE(l, k_norm(l->d, x, ld, weight, l->T, l->embd, 1e-5f, DTYPE_F32, out, ld), "k_norm to f32",
         .bytes = 8 * (double)n);
    LINE(l, k_norm(l->d, x, ld, weight, l->T, l->embd, 1e-5f, DTYPE_BF16, out, ld), "k_norm to bf16",
         .bytes = 6 * (double)n);
    LINE(l, k_cast(l->d, x, ld, l->T, l->embd, out, ld), "k_cast", .bytes = 6 * (double)n);
    TRY(floats(l, SETS * l->T * ld, &d_out));
    TRY(floats(l, SETS * l->T * ld, &d_x));
    LINE(l, k_norm_back(l->d, x, l->T, weight, SETS * l->T, l->embd, 1e-5f, d_out, d_x, ld), "k_norm_back, 2 sets",
         .bytes = (double)n * (4 + SETS * 12));
    return 0;
}

static int gates(ladder *l) {
    size_t ld = kernel_pad(l->ff), n = l->T * l->ff;
    float *gate, *up, *d_out;
    void *out, *d_gate, *d_up;
    TRY(floats(l, l->T * ld, &gate));
    TRY(floats(l, l->T * ld, &up));
    TRY(take(l, l->T * ld * sizeof(float), &out));
    LINE(l, k_gate(l->d, gate, up, ld, l->T, l->ff, DTYPE_F32, out, ld), "k_gate to f32", .bytes = 12 * (double)n);
    LINE(l, k_gate(l->d, gate, up, ld, l->T, l->ff, DTYPE_BF16, out, ld), "k_gate to bf16", .bytes = 10 * (double)n);
    TRY(floats(l, l->T * ld, &d_out));
    TRY(take(l, l->T * ld * sizeof(float), &d_gate));
    TRY(take(l, l->T * ld * sizeof(float), &d_up));
    LINE(l, k_gate_back(l->d, gate, up, ld, l->T, l->T, l->ff, d_out, DTYPE_F32, d_gate, d_up, ld),
         "k_gate_back to f32", .bytes = 20 * (double)n);
    LINE(l, k_gate_back(l->d, gate, up, ld, l->T, l->T, l->ff, d_out, DTYPE_BF16, d_gate, d_up, ld),
         "k_gate_back to bf16", .bytes = 16 * (double)n);
    return 0;
}

static head_shape heads_of(const ladder *l) {
    return (head_shape){.T = l->T,
                        .n_head = (int)l->heads,
                        .n_kv_head = (int)l->kv_heads,
                        .head_dim = (int)l->dim,
                        .rope_dims = (int)(l->dim / 2 * 2),
                        .rope = ARCH_ROPE_INTERLEAVED,
                        .ld = kernel_pad((l->heads + 2 * l->kv_heads) * l->dim)};
}

static int turns(ladder *l) {
    head_shape s = heads_of(l);
    double turned = 8.0 * (double)(l->T * (l->heads + l->kv_heads) * l->dim);
    float *qkv, *d_qkv, *angles, *bias;
    TRY(floats(l, l->T * s.ld, &qkv));
    TRY(floats(l, SETS * l->T * s.ld, &d_qkv));
    TRY(floats(l, l->T * l->dim, &angles));
    TRY(floats(l, s.ld, &bias));
    LINE(l, k_heads_finish(l->d, &s, NULL, angles, qkv), "k_heads_finish", .bytes = turned);
    LINE(l, k_heads_finish(l->d, &s, bias, angles, qkv), "k_heads_finish with bias",
         .bytes = 8.0 * (double)(l->T * (l->heads + 2 * l->kv_heads) * l->dim));
    LINE(l, k_heads_back(l->d, &s, angles, SETS * l->T, d_qkv), "k_heads_back, 2 sets", .bytes = SETS * turned);
    return 0;
}

static int packs(ladder *l) {
    head_shape s = heads_of(l);
    size_t edge = l->T < TRACE_TILE ? l->T : TRACE_TILE, rows = (l->T + edge - 1) / edge * edge;
    size_t all = l->heads + 2 * l->kv_heads, ld_o = kernel_pad(l->heads * l->dim);
    float *qkv, *d_o, *scale;
    uint8_t *out;
    TRY(floats(l, l->T * s.ld, &qkv));
    TRY(floats(l, l->T * ld_o, &d_o));
    TRY(take(l, l->heads * l->T * sizeof(float), &scale));
    TRY(take(l, all * rows * l->dim * 2, &out));
    LINE(l, k_pack_heads(l->d, &s, qkv, 0, (int)all, out), "k_pack_heads",
         .bytes = (double)(all * l->dim) * (double)(4 * l->T + 2 * rows));
    LINE(l, k_pack_gradients(l->d, &s, d_o, ld_o, out, scale), "k_pack_gradients",
         .bytes = (double)(l->heads * l->dim) * (double)(4 * l->T + 2 * rows));
    return 0;
}

static int attention(ladder *l) {
    head_shape h = heads_of(l);
    attention_shape s = {.T = l->T,
                         .n_head = h.n_head,
                         .n_kv_head = h.n_kv_head,
                         .head_dim = h.head_dim,
                         .scale = 1 / sqrtf((float)h.head_dim),
                         .ld = h.ld};
    size_t edge = l->T < TRACE_TILE ? l->T : TRACE_TILE, side = (l->T + edge - 1) / edge;
    size_t tiles = l->heads * side * (side + 1) / 2, ld_o = kernel_pad(l->heads * l->dim);
    double product = 2 * triangle(l) * (double)(l->heads * l->dim); /* a product over the triangle, all heads */
    float *qkv, *o, *lse, *d_o, *row_dot, *d_qkv;
    int32_t *bad, *evict_at;
    uint8_t *out;
    TRY(floats(l, l->T * s.ld, &qkv));
    TRY(floats(l, l->T * ld_o, &o));
    TRY(take(l, l->heads * l->T * sizeof(float), &lse));
    TRY(integers(l, 1, INT32_MAX, 0, &bad));
    s.qkv = qkv;
    LINE(l, k_attention(l->d, &s, o, ld_o, lse, bad), "k_attention", .flop = 2 * product, .goal = ATTENTION_GOAL);
    TRY(take(l, tiles * edge * edge * 2, &out));
    LINE(l, k_attention_tiles(l->d, &s, lse, 0, tiles, out), "k_attention_tiles", .flop = product,
         .goal = ATTENTION_GOAL, .bytes = 2.0 * (double)(tiles * edge * edge));
    TRY(floats(l, SETS * l->T * ld_o, &d_o));
    TRY(take(l, SETS * l->heads * l->T * sizeof(float), &row_dot));
    TRY(take(l, SETS * l->T * s.ld * sizeof(float), &d_qkv));
    LINE(l, k_attention_back(l->d, &s, 1, o, lse, d_o, ld_o, row_dot, d_qkv), "k_attention_back, 1 set",
         .flop = 5 * product, .goal = ATTENTION_GOAL);
    LINE(l, k_attention_back(l->d, &s, SETS, o, lse, d_o, ld_o, row_dot, d_qkv), "k_attention_back, 2 sets",
         .flop = 9 * product, .goal = ATTENTION_GOAL);
    TRY(integers(l, l->kv_heads * kernel_pad(l->T), INT32_MAX, 0, &evict_at));
    s.evict_at = evict_at;
    LINE(l, k_attention(l->d, &s, o, ld_o, lse, bad), "k_attention with lifetimes", .flop = 2 * product,
         .goal = ATTENTION_GOAL);
    return 0;
}

static int steps(ladder *l) {
    step_shape s = {.copies = l->copies,
                    .t = l->T - 1,
                    .capacity = l->T,
                    .n_head = (int)l->heads,
                    .n_kv_head = (int)l->kv_heads,
                    .head_dim = (int)l->dim,
                    .scale = 1 / sqrtf((float)l->dim)};
    size_t cached = l->copies * l->kv_heads * l->T, ld = kernel_pad((l->heads + 2 * l->kv_heads) * l->dim);
    size_t ld_o = kernel_pad(l->heads * l->dim), ld_probs = kernel_pad(l->T);
    double read = (double)cached * (8.0 * (double)l->dim + 4), rows = 4.0 * (double)(l->copies * l->heads * l->T);
    float *qkv, *keys, *value, *o, *probs;
    int32_t *evict_at, *bad;
    TRY(floats(l, l->copies * ld, &qkv));
    TRY(floats(l, cached * l->dim, &keys));
    TRY(floats(l, cached * l->dim, &value));
    TRY(integers(l, cached, INT32_MAX, 0, &evict_at));
    TRY(integers(l, 1, INT32_MAX, 0, &bad));
    TRY(take(l, l->copies * ld_o * sizeof(float), &o));
    TRY(take(l, l->copies * l->heads * ld_probs * sizeof(float), &probs));
    LINE(l, k_append(l->d, &s, qkv, ld, keys, value), "k_append", .bytes = 16.0 * (double)(cached / l->T * l->dim));
    LINE(l, k_attention_step(l->d, &s, qkv, ld, keys, value, evict_at, o, ld_o, NULL, 0, bad), "k_attention_step",
         .bytes = read);
    LINE(l, k_attention_step(l->d, &s, qkv, ld, keys, value, evict_at, o, ld_o, probs, ld_probs, bad),
         "k_attention_step with rows", .bytes = read + rows);
    return 0;
}

static int take_stats(ladder *l, vocab_stats *s) {
    size_t rows = l->logit_rows;
    *s = (vocab_stats){.k = (int)(l->vocab < TOPK ? l->vocab : TOPK)};
    TRY(take(l, rows * sizeof(float), &s->target_logprob));
    TRY(take(l, rows, &s->correct));
    TRY(take(l, rows * sizeof(float), &s->entropy));
    TRY(take(l, rows * (size_t)s->k * sizeof(int32_t), &s->topk_id));
    TRY(take(l, rows * (size_t)s->k * sizeof(float), &s->topk_logprob));
    return take(l, rows * sizeof(float), &s->lse);
}

static int vocabulary(ladder *l) {
    size_t rows = l->logit_rows, ld = kernel_pad(l->vocab), ld_x = kernel_pad(l->embd);
    double all = (double)rows * (double)l->vocab, hidden = (double)rows * (double)l->embd;
    vocab_stats stats;
    float *logits, *common, *label_row, *out;
    int32_t *target, *bad, *label;
    uint8_t *counted;
    double *u, middle = 0.5;
    void *p;
    TRY(floats(l, rows * ld, &logits));
    TRY(integers(l, rows, 0, l->vocab, &target));
    TRY(integers(l, 1, INT32_MAX, 0, &bad));
    TRY(bytes_of_ones(l, rows, &counted));
    TRY(take_filled(l, rows * sizeof *u, &middle, sizeof middle, &u));
    TRY(take(l, rows * sizeof *label, &label));
    TRY(take(l, rows * ld * sizeof(float), &p));
    TRY(take_stats(l, &stats));
    LINE(l, k_vocab_stats(l->d, logits, ld, rows, l->vocab, target, &stats, bad), "k_vocab_stats", .bytes = 4 * all);
    LINE(l, k_vocab_draw(l->d, logits, ld, rows, l->vocab, stats.lse, counted, u, 1, label, rows),
         "k_vocab_draw, 1 sample", .bytes = 4 * all);
    LINE(l, k_vocab_softmax(l->d, logits, ld, rows, l->vocab, stats.lse, counted, DTYPE_F32, p, ld),
         "k_vocab_softmax to f32", .bytes = 8 * all);
    LINE(l, k_vocab_softmax(l->d, logits, ld, rows, l->vocab, stats.lse, counted, DTYPE_BF16, p, ld),
         "k_vocab_softmax to bf16", .bytes = 6 * all);
    TRY(floats(l, rows * ld_x, &common));
    TRY(floats(l, rows * ld_x, &label_row));
    TRY(take(l, rows * ld_x * sizeof(float), &out));
    LINE(l, k_hidden_back(l->d, common, label_row, counted, rows, l->embd, ld_x, out), "k_hidden_back",
         .bytes = 12 * hidden);
    return 0;
}

/* ---- the ladder -------------------------------------------------------------------------------------------------- */

/* A group that fails is named, and the next one is tried. */
static int climb(ladder *l) {
    int (*const group[])(ladder *) = {memory, products_f32, products_bf16, dequant, norms,     gates,
                                      turns,  packs,        attention,     steps,   vocabulary};
    int failed = 0;
    printf("%s; %zu tokens, embedding %zu, %zu heads over %zu of %zu, feed-forward %zu, %zu rows of %zu logits, %zu "
           "copies in the closed loop; mean of %zu runs.\n\n",
           device_name(l->d), l->T, l->embd, l->heads, l->kv_heads, l->dim, l->ff, l->logit_rows, l->vocab, l->copies,
           l->repeat);
    printf("| kernel | ms | GB/s | TFLOP/s | of the peak |\n|---|---|---|---|---|\n");
    for (size_t i = 0; i < sizeof group / sizeof *group; i++) {
        if (group[i](l)) printf("| FAILED: %s | | | | |\n", err_message()), failed = 1;
        give_back(l);
    }
    printf("\nPeaks: %.0f GB/s, %.1f TFLOP/s in f32.\n", l->memory, l->fma);
    return failed;
}

static int only_products(ladder *l) {
    for (int type = DTYPE_F32; type <= DTYPE_BF16; type++) {
        double seconds = 0, flop = 0;
        TRY(layer_products(l, (dtype)type, &seconds, &flop));
        printf("%s %.9f %.0f\n", type == DTYPE_F32 ? "f32" : "bf16", seconds, flop);
    }
    return 0;
}

static int set(ladder *l, const char *argument) {
    const struct {
        const char *name;
        size_t *count;
        double *peak;
    } names[] = {{"tokens", &l->T, NULL},        {"embd", &l->embd, NULL},     {"heads", &l->heads, NULL},
                 {"kv", &l->kv_heads, NULL},     {"ff", &l->ff, NULL},         {"vocab", &l->vocab, NULL},
                 {"rows", &l->logit_rows, NULL}, {"copies", &l->copies, NULL}, {"repeat", &l->repeat, NULL},
                 {"memory", NULL, &l->memory},   {"fma", NULL, &l->fma}};
    size_t n = strcspn(argument, "=");
    for (size_t i = 0; i < sizeof names / sizeof *names && argument[n]; i++) {
        if (strlen(names[i].name) != n || strncmp(names[i].name, argument, n) != 0) continue;
        double value = atof(argument + n + 1);
        if (names[i].peak) *names[i].peak = value;
        else *names[i].count = (size_t)value;
        return value >= 1 && value < 1e9 ? 0 : err_set(ERR_USAGE, "%s: is not from 1 to 1e9", argument);
    }
    l->products = l->products || strcmp(argument, "products=1") == 0;
    return l->products ? 0 : err_set(ERR_USAGE, "'%s': unknown", argument);
}

static int prepare(ladder *l, int argc, char **argv) {
    for (int i = 1; i < argc; i++) TRY(set(l, argv[i]));
    l->dim = l->embd / l->heads;
    if (l->dim == 0 || l->dim > 256 || l->heads % l->kv_heads || l->embd < 32)
        return err_set(ERR_USAGE, "no such model: embd >= 32, embd / heads from 1 to 256, heads a multiple of kv");
    l->pattern = mem_new(PATTERN, sizeof *l->pattern, "the pattern");
    if (!l->pattern) return ERR_DATA;
    for (uint32_t i = 0; i < PATTERN; i++) l->pattern[i] = (float)rng_normal(rng_philox(1, i, 0, 0, 0));
    return device_open("", &l->d);
}

int main(int argc, char **argv) {
    ladder l = {.T = 8192,
                .embd = 2048,
                .heads = 32,
                .kv_heads = 8,
                .ff = 8192,
                .vocab = 128256,
                .logit_rows = 1024,
                .copies = 16,
                .repeat = 10};
    int code = prepare(&l, argc, argv), failed = 0;
    if (!code && l.products) code = only_products(&l);
    else if (!code) failed = climb(&l);
    if (code) fprintf(stderr, "ladder: %s\n", err_message());
    give_back(&l);
    device_close(l.d);
    mem_free(l.pattern);
    return code ? code : failed;
}
