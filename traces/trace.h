/* The trace file: what one model run left behind (DESIGN section 7, traces/FORMAT.md). HDF5, byte shuffle, zstd.
 *
 * Shapes are written [a, b]: row-major, last index fastest. T = tokens of a sequence. Query head h reads kv head
 * h / (n_head / n_kv_head). Only one thread may be inside a function that takes a trace or trace_writer; they are
 * handed a pool where they can use more. HDF5 itself is not thread-safe: raw chunks are read by the calling thread, and
 * written by a thread of the writer's own while nobody else calls HDF5; they are compressed and decompressed by the
 * pool. While a trace_writer is open its caller must leave HDF5 alone: call nothing else of this folder that uses it.
 *
 * All functions return 0 or an error code with an err_ message that names file, dataset and place. */
#pragma once

#include "base/pool.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { TRACE_VERSION = 1, TRACE_TILE = 256 /* rows (and columns of attn/probs) in a chunk, at most */ };

/* ---- facts ------------------------------------------------------------------------------------------------------ */

typedef struct trace_model {
    char *name, *arch; /* "SmolLM2 135M", "llama"; "" where a foreign trace does not say */
    int32_t n_layer, n_head, n_kv_head, head_dim;
    int32_t n_embd, n_vocab; /* 0 where a foreign trace does not say */
    int32_t *window;         /* [n_layer] sliding window W: entry i is reachable by steps i .. i+W-1; 0 = no window */
    float scale;             /* scores = scale * q.k; default 1/sqrt(head_dim) */
    float softcap;           /* 0 = none; else cap * tanh(score / cap) */
    char *rope;              /* free text, e.g. "base 100000, neox, 64 dims"; "" = unknown */
    char *backend, *device, *compute; /* "cpu", processor name, "f32" */
} trace_model;

typedef struct trace_sequence {
    int32_t n_tokens;            /* T */
    int32_t n_prompt;            /* the first n_prompt steps see everything */
    char *source;                /* file name of the text, or "" */
    const int32_t *tokens;       /* [T], NULL if absent */
    const uint8_t *pieces;       /* the text's bytes; token t is pieces[piece_offset[t] .. piece_offset[t+1]-1] */
    const int64_t *piece_offset; /* [T+1], NULL if absent */
    const uint8_t *counted;      /* [T-1], NULL = all after the prompt */
    const int32_t *probes;       /* [n_probes, 2] (entry, later step that needs it), NULL if absent */
    size_t n_probes;
    const float *target_logprob; /* [T-1] log probability given to the next token, NULL if absent */
    const uint8_t *correct;      /* [T-1] 1 where the next token was the most likely one, NULL if absent */
    const float *entropy;        /* [T-1] nats, NULL if absent */
    bool has_dense, has_factored, has_v, has_lse; /* attn/probs; attn/q and attn/k; attn/v; attn/lse */
    bool has_grad_loss;                           /* grad/loss */
    int32_t n_fisher;                             /* samples in grad/fisher */
} trace_sequence;

/* ---- reading ---------------------------------------------------------------------------------------------------- */

typedef struct trace trace;

int trace_open(const char *path, trace **out);
void trace_close(trace *t); /* accepts NULL */

const trace_model *trace_get_model(const trace *t);
const char *trace_path(const trace *t);
const char *trace_label(const trace *t); /* file name without folder and without ".h5" */
const char *trace_hash(const trace *t);  /* content hash, hex; of foreign traces computed from the file's bytes */
size_t trace_n_sequences(const trace *t);
const trace_sequence *trace_get_sequence(const trace *t, size_t seq); /* arrays owned by the trace */

/* The first things an array lacks, by name, for "trace has no ...". */
bool trace_has_wo(const trace *t);

typedef enum trace_form { TRACE_AUTO, TRACE_FACTORED, TRACE_DENSE } trace_form;

/* One layer of one sequence, being read. Holds the layer's k (packed for kernels) and v in f32, or, dense, one chunk
 * row of probabilities of all heads. */
typedef struct trace_layer trace_layer;

/* form AUTO takes factored where present. Refused by name where the form is not in the file. v is read if present. */
int trace_layer_open(trace *t, size_t seq, int layer, trace_form form, pool *p, trace_layer **out);
void trace_layer_close(trace_layer *l); /* accepts NULL */

/* Renormalised f32 rows row0 .. row0+n-1 of all query heads: rows[(h*n + r)*stride + i] for i < stride, zero above the
 * diagonal, outside the layer's window and in the padding. stride >= row0 + n, a multiple of 16; rows
 * 64-byte aligned. Any order is allowed; ascending is fast, and a stride no longer than needed saves clearing. A row
 * that cannot be normalised (sum 0, not finite) is an error naming layer, head and row. */
int trace_layer_rows(trace_layer *l, int32_t row0, int32_t n, float *rows, size_t stride, pool *p);

/* Factored form only: from now on trace_layer_rows, for up to `rows` rows at a time, also keeps their queries. Adds
 * n_head * rows * head_dim f32. */
int trace_layer_keep_q(trace_layer *l, int32_t rows);
/* The queries of the rows read last, [n][head_dim] f32, owned by the layer. */
const float *trace_layer_row_q(const trace_layer *l, int head);

/* Read ahead what row `row`, and its gradients where some were read before, will need: on the calling thread, any one,
 * beside others that work on rows, gradients and values that they have already. A row behind the last one needs
 * nothing. */
int trace_layer_prefetch(trace_layer *l, int32_t row);

/* Read this layer's gradients with respect to the heads' outputs at steps row0 .. row0+n-1, n >= 1: set 0 is grad/loss
 * (the text's own labels), sets 1 .. n_fisher are the samples of grad/fisher. Any order is allowed; ascending is fast.
 * Refused by name where the trace has none. */
int trace_layer_read_grad(trace_layer *l, int32_t row0, int32_t n, pool *p);
/* d(sum of counted loss of that label set)/d(output of query head `head`), [n][head_dim] f32 of the rows read last,
 * owned by the layer. */
const float *trace_layer_grad(const trace_layer *l, int set, int head);

/* Values of a kv head, [T][head_dim] f32, or NULL if the trace has no attn/v. Owned by the layer. */
const float *trace_layer_v(const trace_layer *l, int kv_head);

/* Load the layer's keys, or its queries, as they were stored (after RoPE): for trace_layer_k and trace_layer_q. Refused
 * by name where the trace has none. Adds trace_layer_plain_bytes. */
int trace_layer_load_k(trace_layer *l, pool *p);
int trace_layer_load_q(trace_layer *l, pool *p);
const float *trace_layer_k(const trace_layer *l, int kv_head); /* [T][head_dim] f32, owned by the layer */
const float *trace_layer_q(const trace_layer *l, int head);    /* the same */
size_t trace_layer_plain_bytes(const trace *t, size_t seq, bool keys, bool queries);

/* model/wo of one layer as f32 [n_head*head_dim][n_embd] into `out`; refused by name if absent. */
int trace_read_wo(trace *t, int layer, float *out);

/* Bytes a trace_layer of this sequence and form will hold, for memory accounting. */
size_t trace_layer_bytes(const trace *t, size_t seq, trace_form form);
/* Bytes that trace_layer_read_grad of up to `rows` rows adds to that; 0 where there are no gradients. */
size_t trace_layer_grad_bytes(const trace *t, size_t seq, int32_t rows);

/* ---- writing ---------------------------------------------------------------------------------------------------- */

typedef struct trace_writer trace_writer;

/* Start PATH (through base/outfile: it appears only on trace_writer_finish). `model` is copied. `command` is the
 * canonical command, `creator` "kvlag 0.1.0". n_sequences must be known. */
int trace_writer_new(const char *path, bool force, const char *const *inputs, int n_inputs, const trace_model *model,
                     const char *creator, const char *command, size_t n_sequences, trace_writer **out);
/* Compute the content hash, write `complete`, close, sync, rename. Frees w either way. *bytes: size of the file. */
int trace_writer_finish(trace_writer *w, int64_t *bytes);
void trace_writer_abort(trace_writer *w); /* accepts NULL; removes the temporary file */

/* Layers in ascending order, before the first sequence. wo [n_head*head_dim][n_embd]. */
int trace_write_wo(trace_writer *w, int layer, const float *wo);

typedef struct trace_plan {
    bool dense, factored, lse, row_sum; /* factored: q, k and v */
    int32_t topk;                       /* 0 = none */
    bool full_logits;
    bool grad_loss;   /* grad/loss */
    int32_t n_fisher; /* samples in grad/fisher; needs grad_loss */
} trace_plan;

/* What --gradients asks for: "none", "loss" or "fisher:S". Returns 0, or ERR_USAGE that names the option. */
int trace_plan_gradients(const char *asked, trace_plan *plan);

/* Begin the next sequence. Uses of `s`: n_tokens, n_prompt, source, tokens, pieces, piece_offset, counted, probes. */
int trace_write_sequence(trace_writer *w, const trace_sequence *s, const trace_plan *plan);

/* Big arrays travel as packed chunks: packed by any thread, put by the main thread in index order. */
typedef enum trace_array { TRACE_PROBS, TRACE_Q, TRACE_K, TRACE_V } trace_array;
typedef struct trace_chunk {
    void *data; /* one zstd frame */
    size_t bytes;
    uint64_t hash; /* XXH3-64 of the f16 values, for the content hash */
} trace_chunk;

/* Convert rows x cols f32 values (row r at values + r*stride) to f16, pad with zeros to the array's chunk shape,
 * shuffle, compress. Thread-safe. For TRACE_PROBS entries above the diagonal must be 0. A value that overflows f16 is
 * an error: the caller names layer and head with err_prefix. `row_sum`, if not NULL, receives rows sums of the values
 * as stored (f64 sum, f32 result), added to what is there. */
int trace_pack(const trace_writer *w, trace_array array, const float *values, size_t rows, size_t cols, size_t stride,
               float *row_sum, trace_chunk *out);

/* The same from values that are f16 already, padded with zeros to the chunk's shape and byte-shuffled: its low bytes,
 * then its high bytes. rows x cols of them count. row_sum receives rows sums, not added to anything. */
int trace_pack_half(const trace_writer *w, trace_array array, const uint8_t *planes, size_t rows, size_t cols,
                    float *row_sum, trace_chunk *out);

/* Store chunk (layer, head, row tile, column tile (0 but for TRACE_PROBS)) and release it. Index order within each
 * array. */
int trace_put(trace_writer *w, trace_array array, int layer, int head, int row_tile, int column_tile, trace_chunk *c);
void trace_chunk_free(trace_chunk *c);

/* Gradients: set 0 is grad/loss, sets 1 .. n_fisher the samples. Pack up to TRACE_TILE rows of head_dim f32 values (row
 * r at values + r*stride) as f16 with one scale a row: scale[r] = the row's largest magnitude, or 0 for a row of zeros;
 * value = f16 * scale. Thread-safe. A value that is not finite is an error. */
int trace_pack_grad(const trace_writer *w, const float *values, size_t rows, size_t stride, float *scale,
                    trace_chunk *out);
/* The same from f16 values, divided by scale[rows], padded and shuffled as for trace_pack_half. */
int trace_pack_grad_half(const trace_writer *w, const uint8_t *planes, size_t rows, const float *scale,
                         trace_chunk *out);
/* Store one row tile and release it. Index order within grad/loss and within grad/fisher: set, layer, head, row tile.
 */
int trace_put_grad(trace_writer *w, int set, int layer, int head, int row_tile, trace_chunk *c);
/* Per (set, layer, head), in the same order: [T] scales. */
int trace_write_grad_scale(trace_writer *w, int set, int layer, int head, const float *scale);
/* grad/fisher_label [n_fisher][T-1]: the labels drawn, -1 at steps that are not counted. */
int trace_write_fisher_labels(trace_writer *w, const int32_t *label);

/* Per (layer, head), in order: [T] values. */
int trace_write_lse(trace_writer *w, int layer, int head, const float *lse);
int trace_write_row_sum(trace_writer *w, int layer, int head, const float *row_sum);

/* Whole arrays of the sequence, once: [T-1] each; top-k [T, k]. */
int trace_write_logits(trace_writer *w, const float *target_logprob, const uint8_t *correct, const float *entropy,
                       const int32_t *topk_id, const float *topk_logprob);
/* logits/full, rows row0 .. row0+n-1 in order, [n, n_vocab] f32. */
int trace_write_full_logits(trace_writer *w, int32_t row0, int32_t n, const float *logits);

/* Seconds so far: packing, summed over the threads that packed; writing, by the writer's own thread; and how long the
 * caller waited for that thread. */
typedef struct trace_times {
    double pack, write, wait;
} trace_times;
trace_times trace_writer_times(const trace_writer *w);

/* Bytes of attention before compression so far, and on disk so far, for the closing line. */
void trace_writer_sizes(const trace_writer *w, int64_t *raw, int64_t *stored);
