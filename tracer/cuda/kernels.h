/* Our own kernels, as functions that order them on the compute lane. Pointers are device memory unless "host" stands;
 * strides (ld_*) are in elements. Row strides of f32 arrays are multiples of 16 (kernel_pad), and what lies behind a
 * row's end is never read into a result. No result depends on the order in which blocks run: no floating-point atomics,
 * so equal input gives equal bits. Sums over a row are f32 per thread, then f64.
 *
 * Each has its slow twin in the CPU backend, and a test under tests/cuda that compares the two over odd sizes. */
#pragma once

#include "tracer/arch.h"
#include "tracer/cuda/device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- weights (kernels_dequant.cu) ------------------------------------------------------------------------------- */

/* Does the device read this ggml type? Those of tracer/dequant.c: F32, F16, BF16, Q8_0, Q4_0, Q4_1. */
bool k_dequant_can(uint32_t ggml_type);
/* Rows of a GGUF tensor to f32 or bf16 (round to nearest even): row r is blocks + ids[r] * row_bytes (ids NULL: r
 * itself), n values, of which each becomes bit-equal to tensor_rows (before rounding to bf16). Embedding is this, too.
 * blocks has any alignment. A negative id gives a row of zeros. */
int k_dequant(device *d, uint32_t ggml_type, const void *blocks, size_t row_bytes, const int32_t *ids, size_t rows,
              size_t n, dtype type, void *out, size_t ld_out);

/* ---- rows (kernels_rows.cu) ------------------------------------------------------------------------------------- */

/* out = x / sqrt(mean(x^2) + eps) * weight, n values a row. out f32 or bf16. */
int k_norm(device *d, const float *x, size_t ld_x, const float *weight, size_t rows, size_t n, float eps, dtype type,
           void *out, size_t ld_out);
/* d_x += what d_out, the gradient of the norm's output, asks of its input. Gradients have `rows` rows = sets * T; row r
 * belongs to row r % T of x. (rows_norm_back of the CPU backend.) All three share ld. */
int k_norm_back(device *d, const float *x, size_t T, const float *weight, size_t rows, size_t n, float eps,
                const float *d_out, float *d_x, size_t ld);

/* Shapes of a layer's q | k | v rows: head h of q at h*head_dim, then k's heads, then v's. */
typedef struct head_shape {
    size_t T;
    int n_head, n_kv_head, head_dim, rope_dims;
    arch_rope rope;
    size_t ld; /* row stride of q | k | v */
} head_shape;
/* In place: add bias (NULL = none; all of q | k | v), then turn q's and k's heads by the row's position. angles
 * [T][rope_dims] as rows_rope_angles makes them: cosine, sine, cosine, ... */
int k_heads_finish(device *d, const head_shape *s, const float *bias, const float *angles, float *qkv);
/* In place on `rows` gradient rows (row r at position r % T): turn q's and k's heads back. */
int k_heads_back(device *d, const head_shape *s, const float *angles, size_t rows, float *d_qkv);

/* out = up * gate * sigmoid(gate), f32 or bf16. gate and up share ld. */
int k_gate(device *d, const float *gate, const float *up, size_t ld, size_t rows, size_t n, dtype type, void *out,
           size_t ld_out);
/* From d_out, the gradient of k_gate's output, to d_gate and d_up (f32 or bf16, sharing ld_out). Row r of the gradients
 * belongs to row r % T of gate and up. d_out has stride ld. d_up or d_gate may be the same memory as d_out when type is
 * F32 and ld_out == ld. */
int k_gate_back(device *d, const float *gate, const float *up, size_t ld, size_t T, size_t rows, size_t n,
                const float *d_out, dtype type, void *d_gate, void *d_up, size_t ld_out);

/* f32 to bf16, round to nearest even, NaN stays NaN. */
int k_cast(device *d, const float *in, size_t ld_in, size_t rows, size_t n, void *out, size_t ld_out);

/* ---- attention (kernels_attention.cu, kernels_attention_back.cu) ------------------------------------------------- */

/* Everything here is f32 whatever the precision of the products. */
typedef struct attention_shape {
    size_t T;
    int n_head, n_kv_head, head_dim; /* head_dim: any up to 256; query head h reads kv head h / (n_head / n_kv_head) */
    float scale, softcap;            /* as in `model`; softcap 0 = none */
    int window;                      /* 0 = none; else step t sees entries t-window+1 .. t */
    const int32_t *evict_at;         /* [n_kv_head][kernel_pad(T)]: step t does not see i with evict_at <= t; NULL */
    const float *qkv;                /* [T][ld], finished */
    size_t ld;
} attention_shape;

/* o[t*ld_o + h*head_dim ..] = output of head h, lse[h*T + t] = log of the softmax normaliser, both over what step t
 * sees, never holding a row of probabilities. Scores that are not finite: *bad becomes min(*bad, t * n_head + h) (it
 * was set to INT32_MAX before), and what o and lse hold then does not matter. */
int k_attention(device *d, const attention_shape *s, float *o, size_t ld_o, float *lse, int32_t *bad);

/* Probability tiles in the form of the trace's chunks before compression: f16, edge e = min(TRACE_TILE, T), padded with
 * zeros, zero where the step does not see, and byte-shuffled: e*e low bytes, then e*e high bytes. Tiles are numbered by
 * head, row tile, column tile (column <= row); `n` of them from `first` on, one after another at `out`. */
int k_attention_tiles(device *d, const attention_shape *s, const float *lse, size_t first, size_t n, uint8_t *out);

/* The way back, all sets together (the formulas stand in tracer/cpu/attention_back.c). d_o [sets][T][ld_o] gradients of
 * o; d_qkv [sets][T][ld of qkv] receives those of q, k, v (after RoPE; k and v summed over the group's heads). A tile
 * of probabilities is computed again once for all sets, or for as many as fit. `row_dot` [sets][n_head][T] is scratch:
 * it receives d_o . o. */
int k_attention_back(device *d, const attention_shape *s, size_t sets, const float *o, const float *lse,
                     const float *d_o, size_t ld_o, float *row_dot, float *d_qkv);

/* One step of several copies with caches of their own. Copy c's keys of kv head j: keys + (c*n_kv_head + j) * capacity *
 * head_dim, entry i at i*head_dim; values alike; entries 0 .. t, of which those with evict_at[(c*n_kv_head + j) *
 * capacity + i] <= t, and those outside the window, are not seen. q row c at qkv + c*ld (k and v of step t stand in the
 * caches already). o row c at o + c*ld_o. probs, if not NULL: [copies][n_head][ld_probs], entries 0 .. t, 0 where not
 * seen. bad: as above, with c in place of t. */
typedef struct step_shape {
    size_t copies, t, capacity;
    int n_head, n_kv_head, head_dim, window;
    float scale, softcap;
} step_shape;
int k_attention_step(device *d, const step_shape *s, const float *qkv, size_t ld, const float *keys,
                     const float *values, const int32_t *evict_at, float *o, size_t ld_o, float *probs,
                     size_t ld_probs, int32_t *bad);

/* Before it: the step's keys and values, which follow q in the rows of qkv, become entry t of the caches
 * (kernels_steps.cu). */
int k_append(device *d, const step_shape *s, const float *qkv, size_t ld, float *keys, float *values);

/* ---- packing (kernels_pack.cu) ---------------------------------------------------------------------------------- */

/* Heads `head0` .. head0+n-1 of q | k | v (counted through q, k, v) as chunks before compression: f16 (a value beyond
 * its range becomes infinity, which the writer refuses by name), height e = min(TRACE_TILE, T) rows of head_dim, padded
 * with zeros, byte-shuffled; ceil(T/e) tiles a head, head after head, at `out`. */
int k_pack_heads(device *d, const head_shape *s, const float *qkv, int head0, int n, uint8_t *out);
/* Gradients: rows divided by their largest magnitude, f16, shuffled, in tiles as above for all n_head heads of one set
 * d_o [T][ld_o]; scale [n_head][T] receives the magnitudes (0 where a row is zero). A value that is not finite leaves a
 * scale that is not finite. */
int k_pack_gradients(device *d, const head_shape *s, const float *d_o, size_t ld_o, uint8_t *out, float *scale);

/* ---- vocabulary (kernels_vocab.cu) ------------------------------------------------------------------------------ */

/* What the trace keeps of `rows` rows of logits: log probability of target[r] (-1: none, left alone), whether the most
 * likely id (the lowest of equal ones) is the target, entropy in nats, the k most likely ids with their log
 * probabilities (largest first, ties to the lower id; k >= 1), and the normaliser. Logits that are not finite: *bad
 * becomes min(*bad, row0 + r). */
typedef struct vocab_stats {
    float *target_logprob; /* [rows] */
    uint8_t *correct;      /* [rows] */
    float *entropy;        /* [rows] */
    int32_t *topk_id;      /* [rows][k] */
    float *topk_logprob;   /* [rows][k] */
    float *lse;            /* [rows] */
    int k;
    int32_t row0; /* the first row's number, for *bad */
} vocab_stats;
int k_vocab_stats(device *d, const float *logits, size_t ld, size_t rows, size_t n_vocab, const int32_t *target,
                  const vocab_stats *out, int32_t *bad);
/* p = exp(logit - lse) where counted[r], else 0; f32 or bf16; p may be the same memory as logits where type is F32 and
 * ld_out == ld. */
int k_vocab_softmax(device *d, const float *logits, size_t ld, size_t rows, size_t n_vocab, const float *lse,
                    const uint8_t *counted, dtype type, void *p, size_t ld_out);
/* label[s*ld_label + r] = the first id whose running sum of exp(logit - lse), in f64 over ascending ids, exceeds
 * u[s*rows + r] times the whole sum (else the last id of positive probability); -1 where not counted. The sum is cut in
 * chunks of a fixed size, so it may differ in the last bits from one that runs straight through; the whole sum is 1 but
 * for the rounding of lse, which thus moves no label. */
int k_vocab_draw(device *d, const float *logits, size_t ld, size_t rows, size_t n_vocab, const float *lse,
                 const uint8_t *counted, const double *u, size_t samples, int32_t *label, size_t ld_label);
/* d[r] = common[r] - label_row[r] where counted[r], else 0: the gradient of the last norm's output, n values, stride ld
 * for all three. */
int k_hidden_back(device *d, const float *common, const float *label_row, const uint8_t *counted, size_t rows, size_t n,
                  size_t ld, float *out);

#ifdef __cplusplus
}
#endif
