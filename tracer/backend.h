/* The seam between the model and what computes it. A backend is one const struct of functions over a state of its own;
 * a run pushes what it computes into a sink, so that nothing of size T^2 or T*n_vocab is ever held at once.
 *
 * Order of calls: load, then any number of forward, then unload; all from one thread. */
#pragma once

#include "base/pool.h"
#include "tracer/model.h"
#include "traces/trace.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { BACKEND_ROW_TILE = 256 /* attention rows handed out together; the tile of the trace file */ };

/* What one layer's attention worked with and came to, for all T tokens. q, k, v are after RoPE: head h of token t
 * starts at q[t*stride + h*head_dim]. */
typedef struct layer_capture {
    const float *q, *k, *v;
    size_t stride;
    const float *lse; /* [n_head][T] log of the softmax normaliser, of the same softmax as the rows */
} layer_capture;

/* Predictions of n steps, as a trace keeps them. The last step of the text has no target: its target_logprob and
 * correct mean nothing. */
typedef struct step_stats {
    const float *target_logprob, *entropy; /* [n] */
    const uint8_t *correct;                /* [n] */
    const int32_t *topk_id;                /* [n][n_topk] largest first, ties to the lowest id */
    const float *topk_logprob;             /* [n][n_topk] */
} step_stats;

/* Where a run's results go; a member that is NULL is not wanted, and not computed where that saves work. Memory passed
 * in belongs to the backend and is valid during the call only. A code other than 0 stops the run and is returned. */
typedef struct forward_sink {
    void *context;
    /* Probabilities of head `head`, steps row0 .. row0+n-1 (row0 a multiple of BACKEND_ROW_TILE, n = that many or up to
     * T): row r at p + r*stride, columns 0 .. row0+n-1, zero above the diagonal; rows 64-byte aligned and padded with
     * zeros to a multiple of 16. Called from any thread, several at once. */
    int (*rows)(void *context, int layer, int head, int32_t row0, int32_t n, const float *p, size_t stride);
    /* Row tiles since the last call are complete: they form a run in (head, row tile) order, bounded in size. Called
     * on the caller's thread while no `rows` is running, and at least once per layer. */
    int (*rows_done)(void *context, int layer);
    /* After the layer's rows. On the caller's thread, layers ascending. */
    int (*layer)(void *context, int layer, const layer_capture *c);
    /* Logits of steps row0 .. row0+n-1, ascending: row r at logits + r*stride, n_vocab values, 64-byte aligned, padded
     * to a multiple of 16. On the caller's thread; in `forward` the values may be overwritten. */
    int (*logits)(void *context, int32_t row0, int32_t n, float *logits, size_t stride);
    /* The final hidden states after the output norm, of all T tokens: row t at x + t*stride, n_embd values. Once, on
     * the caller's thread, before any logits; what backend.project takes. */
    int (*hidden)(void *context, const float *x, size_t stride);

    /* Backends that pack by themselves (backend.packs) call these in place of rows and rows_done, of q, k and v in
     * `layer` (which then are NULL), and of logits where `logits` is NULL; others never do. All on the caller's thread,
     * who may use the pool; memory is valid during the call.
     *
     * `n` chunks of an array from number `first` on, one after another: the values of trace_pack before compression
     * (f16, padded, byte-shuffled). PROBS count by head, row tile, column tile <= row tile; Q, K, V by head, row tile.
     * Ascending within a layer and array. */
    int (*tiles)(void *context, trace_array array, int layer, size_t first, size_t n, const uint8_t *bytes);
    bool wants_probs, wants_qkv; /* which arrays `tiles` wants */
    /* What a trace keeps of the predictions of steps row0 .. row0+n-1, ascending. */
    int (*stats)(void *context, int32_t row0, int32_t n, const step_stats *stats);
    int32_t n_topk; /* of stats, 1 or more */
} forward_sink;

/* The losses to differentiate. A label set names one token for every step whose loss counts; its loss is the sum of
 * -log p[t][label[t]] over these steps. Set 0 is the text: label[t] = token t+1. Sets 1 .. n_samples hold labels drawn
 * from the model's own predictions: with u = rng_uniform(rng_philox(seed, t, sample, sequence, 2).v[0]), sample from 0,
 * the first id whose running sum of the f32 softmax, in f64 and ascending ids, exceeds u (should rounding leave the
 * whole sum below u, the last id that has a probability). */
typedef struct label_plan {
    const uint8_t *counted; /* [n-1] 1 where the loss of step t counts */
    int32_t n_samples;      /* 0 or more */
    const int32_t *fixed;   /* [n_samples][n-1] labels to use in place of drawn ones; NULL = draw */
    uint64_t seed;
    uint32_t sequence;
} label_plan;

/* Where gradients go; memory passed in belongs to the backend and is valid during the call only. A code other than 0
 * stops the run and is returned. Both on the caller's thread. */
typedef struct gradient_sink {
    void *context;
    /* The labels of the samples, [n_samples][n-1], -1 where the loss does not count; before the first layer. NULL = not
     * wanted. */
    int (*labels)(void *context, const int32_t *label);
    /* d(loss of set g) / d(output of head h at step t, before the output projection): head_dim values at
     * d_heads + g*set_stride + t*stride + h*head_dim, for all 1 + n_samples sets. Layers descending. */
    int (*layer)(void *context, int layer, const float *d_heads, size_t set_stride, size_t stride);
    /* Backends that pack by themselves call this in place of `layer`, set by set: all heads' chunks before compression
     * (as trace_pack_grad makes them), and the rows' scales [n_head][n]. */
    int (*packed)(void *context, int layer, int set, const uint8_t *tiles, const float *scale);
} gradient_sink;

typedef struct backend_state backend_state;

/* Copies of the model that read the same text side by side, token by token, each with a cache of its own that may lose
 * entries: closed loop. Entries keep their original positions. */
typedef struct backend_steps backend_steps;

/* What step t came to. Memory of the steps, valid until the next call. */
typedef struct step_view {
    const float *logits; /* copy c at logits + c*ld_logits, n_vocab values */
    size_t ld_logits;
    /* Probabilities of copy c, layer l, head h: [t+1] at rows[c] + (l*n_head + h)*ld_rows, 0 at entries that are out of
     * reach or forgotten. rows[c] is NULL for a copy that wants none. */
    float *const *rows;
    size_t ld_rows;
} step_view;

/* How to run; what a backend cannot do it refuses by name. */
typedef struct backend_options {
    const char *device;    /* "" = the first */
    const char *precision; /* "f32" or "bf16": of the products' inputs */
    const char *weights;   /* "dense": dequantised once; "blocks": as in the file, dequantised layer by layer; "auto":
                              what suits it */
    bool offload;          /* layers stay in host memory and come to the device one by one */
} backend_options;

/* Where the time went, in seconds since load; a backend that does not measure leaves zeros. */
typedef struct backend_times {
    double compute, copy;
} backend_times;

enum { BACKEND_PLUGIN_VERSION = 3 /* changes with any struct of these headers */ };

typedef struct backend {
    const char *name; /* "cpu", "cuda" */
    bool packs;       /* calls forward_sink.tiles and the like */
    /* Take the weights from the model's file; `m` and `p` must outlive the state. */
    int (*load)(const model *m, pool *p, const backend_options *o, backend_state **out);
    void (*unload)(backend_state *s); /* accepts NULL */
    /* The processor, for the trace: traces are byte-identical on one kind only. Owned by the state. */
    const char *(*device)(const backend_state *s);
    const char *(*compute)(const backend_state *s); /* "f32", "bf16" */
    backend_times (*times)(backend_state *s);
    /* One causal pass over tokens 0 .. n-1 at positions 0 .. n-1; ids below n_vocab. Values that are not finite are an
     * error naming layer, head and token. `evict_at` [n_layer][n_kv_head][kernel_pad(n)] are lifetimes: at step t an
     * entry i with evict_at <= t is masked out before the softmax; NULL = nothing is. Equal input gives equal bits for
     * any number of threads, and changing token t changes no bit of earlier rows. */
    int (*forward)(backend_state *s, const int32_t *tokens, int32_t n, const int32_t *evict_at,
                   const forward_sink *sink);
    /* The same pass with the same bits to the same sink (but for the logits, which must be left as they are), and then
     * backwards from the losses of `labels` to every head's output, all sets in one go. Each layer's input is kept and
     * the rest computed again, so memory is linear in n. Gradients too have equal bits for any number of threads. */
    int (*forward_backward)(backend_state *s, const int32_t *tokens, int32_t n, const int32_t *evict_at,
                            const forward_sink *sink, const label_plan *labels, const gradient_sink *gradients);
    /* Logits of n rows of final hidden states: row r at out + r*stride_out, n_vocab values. Strides are multiples of
     * 16, rows 64-byte aligned. The bits of a row do not depend on the other rows, only on n and its place. */
    int (*project)(backend_state *s, const float *hidden, size_t n, size_t stride, float *out, size_t stride_out);

    /* n copies for a text of up to n_tokens; wants_rows [n]. Memory follows what the caches hold. */
    int (*steps_new)(backend_state *s, size_t n, const bool *wants_rows, int32_t n_tokens, backend_steps **out);
    void (*steps_free)(backend_steps *steps); /* accepts NULL */
    /* The next token for every copy: its keys and values enter each cache, then each copy attends over what it has.
     * Values that are not finite are an error naming layer, head and token. What a copy computes does not depend on the
     * other copies, nor on the number of threads. */
    int (*steps_next)(backend_steps *steps, int32_t token, step_view *out);
    /* In place of n first calls of steps_next whose views are not wanted: the same caches up to rounding, far sooner.
     * NULL where a backend has no such way. */
    int (*steps_fill)(backend_steps *steps, const int32_t *tokens, int32_t n);
    /* After step t: copy `copy` drops the entries of one kv head with evict_at <= t+1. Thread-safe for different kv
     * heads, layers or copies. Windows need no call. */
    void (*steps_forget)(backend_steps *steps, size_t copy, int layer, int kv_head, const int32_t *evict_at);
} backend;
