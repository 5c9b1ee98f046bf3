/* Small traces with known attention, for the tests of the trace format: q, k, v drawn from the counter RNG, the
 * attention computed here in plain double precision from the values that f16 keeps of them. */
#pragma once

#include "base/err.h"
#include "base/half.h"
#include "base/mem.h"
#include "base/pool.h"
#include "base/rng.h"
#include "traces/kernels.h"
#include "traces/trace.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#define BUILD_OK(call) build_ok((call), #call)

static inline void build_ok(int code, const char *what) {
    if (code) fail_msg("%s: %s", what, err_message());
}

typedef struct built {
    trace_model model;
    int32_t window[8];
    int32_t T;
    float *q, *k, *v; /* [n_layer][heads][T][dim] */
    double *p;        /* [n_layer][n_head][T][T] */
    char path[64];
} built;

static inline float build_normal(uint32_t stream, uint32_t i) {
    return half_to_f32(half_from_f32((float)rng_normal(rng_philox(11, i, stream, 0, 0))));
}

static inline float *build_array(size_t n, uint32_t stream) {
    float *x = mem_new(n, sizeof *x, "test");
    for (size_t i = 0; i < n; i++) x[i] = build_normal(stream, (uint32_t)i);
    return x;
}

/* One row of attention: softmax over the reachable entries, in double. */
static inline void build_row(const built *b, int layer, int head, int32_t t, double *row) {
    const trace_model *m = &b->model;
    size_t dim = (size_t)m->head_dim, T = (size_t)b->T, kv = (size_t)(head / (m->n_head / m->n_kv_head));
    const float *q = b->q + (((size_t)layer * (size_t)m->n_head + (size_t)head) * T + (size_t)t) * dim;
    const float *k = b->k + ((size_t)layer * (size_t)m->n_kv_head + kv) * T * dim;
    int32_t W = b->window[layer], first = W && t >= W ? t - W + 1 : 0;
    double most = -INFINITY, sum = 0;
    for (int32_t i = 0; i < b->T; i++) row[i] = 0;
    for (int32_t i = first; i <= t; i++) {
        double s = 0;
        for (size_t d = 0; d < dim; d++) s += (double)q[d] * (double)k[(size_t)i * dim + d];
        s *= (double)m->scale;
        row[i] = m->softcap > 0 ? (double)m->softcap * tanh(s / (double)m->softcap) : s;
        most = fmax(most, row[i]);
    }
    for (int32_t i = first; i <= t; i++) sum += row[i] = exp(row[i] - most);
    for (int32_t i = first; i <= t; i++) row[i] /= sum;
}

static inline const double *build_truth(const built *b, int layer, int head, int32_t t) {
    return b->p + (((size_t)layer * (size_t)b->model.n_head + (size_t)head) * (size_t)b->T + (size_t)t) * (size_t)b->T;
}

static inline void build_attention(built *b) {
    const trace_model *m = &b->model;
    for (int l = 0; l < m->n_layer; l++)
        for (int h = 0; h < m->n_head; h++)
            for (int32_t t = 0; t < b->T; t++) build_row(b, l, h, t, (double *)(uintptr_t)build_truth(b, l, h, t));
}

/* Two layers, four heads over two kv heads of eight; the second layer has a window of 4 if `window`. */
static inline built build(int32_t T, bool window) {
    built b = {.T = T};
    b.model = (trace_model){.name = "tiny",
                            .arch = "test",
                            .rope = "none",
                            .backend = "cpu",
                            .device = "x",
                            .compute = "f32",
                            .n_layer = 2,
                            .n_head = 4,
                            .n_kv_head = 2,
                            .head_dim = 8,
                            .n_embd = 12,
                            .n_vocab = 50,
                            .scale = 0.35355339f};
    size_t t = (size_t)T;
    b.q = build_array(2 * 4 * t * 8, 1);
    b.k = build_array(2 * 2 * t * 8, 2);
    b.v = build_array(2 * 2 * t * 8, 3);
    b.p = mem_new(2 * 4 * t * t, sizeof *b.p, "test");
    b.window[1] = window ? 4 : 0;
    build_attention(&b);
    snprintf(b.path, sizeof b.path, "/tmp/kvlag_test_%ld_%d.h5", (long)getpid(), (int)T);
    return b;
}

static inline void build_free(built *b) {
    mem_free(b->q);
    mem_free(b->k);
    mem_free(b->v);
    mem_free(b->p);
    unlink(b->path);
}

/* ---- writing it ------------------------------------------------------------------------------------------------- */

typedef struct build_task {
    trace_writer *w;
    trace_array array;
    const float *values; /* [rows][width] of one head */
    size_t T, width, n_cols;
    float *row_sum; /* [T] or NULL */
    trace_chunk *chunk;
} build_task;

/* Task = row tile; its column tiles one after the other, so that the row sums add up in order. */
static inline int build_pack(void *context, size_t tile, int worker) {
    (void)worker;
    build_task *b = context;
    size_t row = tile * TRACE_TILE, n = b->T - row < TRACE_TILE ? b->T - row : TRACE_TILE;
    for (size_t c = 0; c < (b->array == TRACE_PROBS ? tile + 1 : 1); c++) {
        size_t col = c * TRACE_TILE, cols = b->width;
        if (b->array == TRACE_PROBS) cols = b->T - col < TRACE_TILE ? b->T - col : TRACE_TILE;
        TRY(trace_pack(b->w, b->array, b->values + row * b->width + col, n, cols, b->width,
                       b->row_sum ? b->row_sum + row : NULL, &b->chunk[tile * b->n_cols + c]));
    }
    return 0;
}

static inline int build_put_head(trace_writer *w, pool *p, trace_array array, int layer, int head, const float *values,
                                 size_t T, size_t width, float *row_sum) {
    size_t tiles = (T + TRACE_TILE - 1) / TRACE_TILE;
    build_task task = {w, array, values, T, width, tiles, row_sum, mem_new(tiles * tiles, sizeof(trace_chunk), "test")};
    int code = pool_run(p, tiles, build_pack, &task);
    for (size_t r = 0; r < tiles && !code; r++)
        for (size_t c = 0; c < (array == TRACE_PROBS ? r + 1 : 1) && !code; c++)
            code = trace_put(w, array, layer, head, (int)r, (int)c, &task.chunk[r * tiles + c]);
    for (size_t i = 0; i < tiles * tiles; i++) trace_chunk_free(&task.chunk[i]);
    mem_free(task.chunk);
    return code;
}

static inline int build_put_dense(trace_writer *w, pool *p, const built *b, int layer, int head, bool row_sum) {
    size_t T = (size_t)b->T;
    float *values = mem_new(T * T, sizeof *values, "test"), *sum = mem_new(T, sizeof *sum, "test");
    for (size_t i = 0; i < T * T; i++) values[i] = (float)build_truth(b, layer, head, 0)[i];
    int code = build_put_head(w, p, TRACE_PROBS, layer, head, values, T, T, sum);
    if (!code && row_sum) code = trace_write_row_sum(w, layer, head, sum);
    mem_free(values);
    mem_free(sum);
    return code;
}

/* The logarithm of what normalises a row: the score of the step's own entry over its probability. */
static inline float build_lse(const built *b, int layer, int head, int32_t t) {
    const trace_model *m = &b->model;
    size_t dim = (size_t)m->head_dim, T = (size_t)b->T, kv = (size_t)(head / (m->n_head / m->n_kv_head));
    const float *q = b->q + (((size_t)layer * (size_t)m->n_head + (size_t)head) * T + (size_t)t) * dim;
    const float *k = b->k + (((size_t)layer * (size_t)m->n_kv_head + kv) * T + (size_t)t) * dim;
    double score = 0;
    for (size_t d = 0; d < dim; d++) score += (double)q[d] * (double)k[d];
    return (float)(score * (double)m->scale - log(build_truth(b, layer, head, t)[t]));
}

static inline int build_put_layer(trace_writer *w, pool *p, const built *b, const trace_plan *plan, int layer) {
    const trace_model *m = &b->model;
    size_t T = (size_t)b->T, dim = (size_t)m->head_dim, each = T * dim;
    float *lse = mem_new(T, sizeof *lse, "test");
    int code = 0;
    for (int h = 0; h < m->n_head && !code; h++) {
        const float *q = b->q + ((size_t)layer * (size_t)m->n_head + (size_t)h) * each;
        if (plan->dense) code = build_put_dense(w, p, b, layer, h, plan->row_sum);
        if (plan->factored && !code) code = build_put_head(w, p, TRACE_Q, layer, h, q, T, dim, NULL);
        for (int32_t t = 0; t < b->T && plan->lse; t++) lse[t] = build_lse(b, layer, h, t);
        if (plan->lse && !code) code = trace_write_lse(w, layer, h, lse);
    }
    for (int h = 0; h < m->n_kv_head && plan->factored && !code; h++) {
        size_t at = ((size_t)layer * (size_t)m->n_kv_head + (size_t)h) * each;
        code = build_put_head(w, p, TRACE_K, layer, h, b->k + at, T, dim, NULL);
        if (!code) code = build_put_head(w, p, TRACE_V, layer, h, b->v + at, T, dim, NULL);
    }
    mem_free(lse);
    return code;
}

static inline float build_logit(int32_t t, int id) {
    return build_normal(4, (uint32_t)(t * 64 + id));
}

static inline double build_logprob(const built *b, int32_t t, int id) {
    double sum = 0;
    for (int i = 0; i < b->model.n_vocab; i++) sum += exp((double)build_logit(t, i));
    return (double)build_logit(t, id) - log(sum);
}

/* The k most likely ids of a step, largest first. */
static inline void build_top(const built *b, int32_t t, int k, int32_t *id, float *logprob) {
    bool taken[64] = {false};
    for (int place = 0; place < k; place++) {
        int best = -1;
        for (int i = 0; i < b->model.n_vocab; i++)
            if (!taken[i] && (best < 0 || build_logit(t, i) > build_logit(t, best))) best = i;
        taken[best] = true;
        id[place] = best;
        logprob[place] = (float)build_logprob(b, t, best);
    }
}

static inline int build_put_logits(trace_writer *w, const built *b, const int32_t *tokens, const trace_plan *plan) {
    size_t T = (size_t)b->T, k = (size_t)plan->topk, V = (size_t)b->model.n_vocab;
    float *logprob = mem_new(T, sizeof *logprob, "test"), *entropy = mem_new(T, sizeof *entropy, "test");
    float *top = mem_new(T * (k + 1), sizeof *top, "test"), *full = mem_new(T * V, sizeof *full, "test");
    uint8_t *correct = mem_new(T, 1, "test");
    int32_t *id = mem_new(T * (k + 1), sizeof *id, "test");
    for (int32_t t = 0; t < b->T; t++) {
        int32_t first, target = t + 1 < b->T ? tokens[t + 1] : 0;
        float likely;
        build_top(b, t, 1, &first, &likely);
        build_top(b, t, (int)k, id + (size_t)t * k, top + (size_t)t * k);
        logprob[t] = (float)build_logprob(b, t, target);
        correct[t] = first == target;
        for (int i = 0; i < (int)V; i++) {
            double x = build_logprob(b, t, i);
            entropy[t] -= (float)(exp(x) * x);
            full[(size_t)t * V + (size_t)i] = build_logit(t, i);
        }
    }
    int code = trace_write_logits(w, logprob, correct, entropy, k ? id : NULL, k ? top : NULL);
    if (!code && plan->full_logits) code = trace_write_full_logits(w, 0, b->T, full);
    mem_free(logprob);
    mem_free(entropy);
    mem_free(top);
    mem_free(full);
    mem_free(correct);
    mem_free(id);
    return code;
}

/* Gradients whose rows differ in size by up to 2^39; every fifth row is zero, and the last one, which no loss follows.
 * Set 0 is grad/loss. */
static inline float build_gradient(const built *b, int set, int layer, int head, int32_t t, int d) {
    uint32_t i = (uint32_t)(((set * 8 + layer) * 8 + head) * 4096 + t) * 8 + (uint32_t)d;
    return t % 5 == 3 || t == b->T - 1 ? 0 : ldexpf((float)rng_normal(rng_philox(12, i, 6, 0, 0)), t % 40 - 35);
}

static inline int build_put_gradients(trace_writer *w, const built *b, int set, int layer, int head) {
    int dim = b->model.head_dim;
    float *rows = mem_new((size_t)(b->T * dim), sizeof *rows, "test");
    float *scale = mem_new((size_t)b->T, sizeof *scale, "test");
    for (int32_t t = 0; t < b->T; t++)
        for (int d = 0; d < dim; d++) rows[t * dim + d] = build_gradient(b, set, layer, head, t, d);
    int code = 0;
    for (int32_t t = 0; t < b->T && !code; t += TRACE_TILE) {
        size_t n = (size_t)(b->T - t < TRACE_TILE ? b->T - t : TRACE_TILE);
        trace_chunk c;
        code = trace_pack_grad(w, rows + t * dim, n, (size_t)dim, scale + t, &c);
        if (!code) code = trace_put_grad(w, set, layer, head, t / TRACE_TILE, &c);
    }
    if (!code) code = trace_write_grad_scale(w, set, layer, head, scale);
    mem_free(rows);
    mem_free(scale);
    return code;
}

static inline int build_put_all_gradients(trace_writer *w, const built *b, int32_t n_prompt, const trace_plan *plan) {
    int code = 0;
    for (int set = 0; set <= plan->n_fisher; set++)
        for (int l = 0; l < b->model.n_layer; l++)
            for (int h = 0; h < b->model.n_head && !code; h++) code = build_put_gradients(w, b, set, l, h);
    if (code || !plan->n_fisher) return code;
    int32_t steps = b->T - 1, *label = mem_new((size_t)(plan->n_fisher * steps), sizeof *label, "test");
    for (int s = 0; s < plan->n_fisher; s++)
        for (int32_t t = 0; t < steps; t++) label[s * steps + t] = t < n_prompt ? -1 : (t * 3 + s) % 50;
    code = trace_write_fisher_labels(w, label);
    mem_free(label);
    return code;
}

static inline int build_fill(trace_writer *w, pool *p, const built *b, const trace_sequence *s,
                             const trace_plan *plan) {
    size_t wo = (size_t)(b->model.n_head * b->model.head_dim * b->model.n_embd);
    float *o = build_array(wo, 5);
    int code = 0;
    for (int l = 0; l < b->model.n_layer && !code; l++) code = trace_write_wo(w, l, o);
    mem_free(o);
    if (!code) code = trace_write_sequence(w, s, plan);
    for (int l = 0; l < b->model.n_layer && !code; l++) code = build_put_layer(w, p, b, plan, l);
    if (!code && plan->grad_loss) code = build_put_all_gradients(w, b, s->n_prompt, plan);
    return code ? code : build_put_logits(w, b, s->tokens, plan);
}

/* `s` NULL: a sequence of tokens t % 50 without text. */
static inline int build_write(const built *b, const char *path, const trace_sequence *s, const trace_plan *plan,
                              int threads) {
    trace_writer *w;
    pool *p;
    int32_t *tokens = mem_new((size_t)b->T, sizeof *tokens, "test");
    for (int32_t t = 0; t < b->T; t++) tokens[t] = t % 50;
    trace_sequence plain = {.n_tokens = b->T, .source = (char[]){"a.txt"}, .tokens = tokens};
    trace_model model = b->model;
    int32_t window[8];
    memcpy(window, b->window, sizeof window);
    model.window = window;
    BUILD_OK(pool_new(threads, &p));
    int code = trace_writer_new(path, true, NULL, 0, &model, "test 1", "kvlag trace m a.txt", 1, &w);
    if (!code && (code = build_fill(w, p, b, s ? s : &plain, plan)) != 0) trace_writer_abort(w);
    else if (!code) code = trace_writer_finish(w, NULL);
    pool_free(p);
    mem_free(tokens);
    return code;
}

static const trace_plan build_everything = {.dense = true,
                                            .factored = true,
                                            .lse = true,
                                            .row_sum = true,
                                            .topk = 3,
                                            .full_logits = true,
                                            .grad_loss = true,
                                            .n_fisher = 2};
