/* One run's memory on the device and the steps of a layer, separate so that the backward pass can compute a layer again
 * from its input. */
#pragma once

#include "tracer/cuda/arena.h"
#include "tracer/cuda/cuda.h"
#include "tracer/cuda/kernels.h"
#include "tracer/cuda/pipe.h"

static inline size_t least(size_t a, size_t b) {
    return a < b ? a : b;
}

/* Kinds of packets. */
enum { PACKET_CHECK, PACKET_LSE, PACKET_TILES, PACKET_LOGITS, PACKET_STATS, PACKET_GRADIENTS };

typedef struct cuda_run {
    backend_state *s;
    const forward_sink *sink;
    const gradient_sink *gradients; /* NULL: forward only */
    const int32_t *tokens;          /* [T] host */
    size_t T;
    size_t ld_x, ld_qkv, ld_mix, ld_ff, ld_logits;
    size_t edge, row_tiles; /* of the trace's chunks */
    size_t ff_rows;         /* rows of the feed-forward at a time */
    size_t logit_rows;
    /* Device memory. */
    int32_t *ids;      /* [T] tokens */
    int32_t *target;   /* [T] the next token; -1 at the end */
    int32_t *evict_at; /* [n_layer][n_kv_head][pad(T)], NULL = nothing is evicted */
    int32_t *bad;      /* [n_layer + 1] see k_attention; the last one is the logits' */
    float *x;          /* [T][ld_x] the residual stream */
    void *normed;      /* [T][ld_x] x after a norm, of the state's type (or f32 for the last one) */
    float *qkv;        /* [T][ld_qkv] */
    float *mix;        /* [T][ld_mix] the heads' outputs */
    float *lse;        /* [n_head][T] */
    float *gate, *up;  /* [ff_rows][ld_ff] */
    void *ff;          /* [ff_rows][ld_ff], of the state's type */
    float *angles;     /* [T][rope_dims] */
    float *logits;     /* [logit_rows][ld_logits] */
    float *logit_lse;  /* [logit_rows] */
    vocab_stats stats; /* of a tile */
    arena memory;
    pipe *pipe; /* what goes to the host; NULL: nothing does */
    int layer;  /* current */
    cuda_layer w;
} cuda_run;

int cuda_run_new(backend_state *s, const int32_t *tokens, int32_t n, const int32_t *evict_at, const forward_sink *sink,
                 const gradient_sink *gradients, cuda_run *r);
void cuda_run_free(cuda_run *r);

/* Attention of layer r->layer (weights in r->w): x -> qkv, mix, lse. */
int cuda_attend(cuda_run *r);
/* out += output projection of mix. */
int cuda_add_mix(cuda_run *r, float *out);
/* x += feed-forward(x). */
int cuda_feed_forward(cuda_run *r);
/* gate and up of rows row0 .. row0+n-1 of x. */
int cuda_gate_up(cuda_run *r, const float *x, size_t row0, size_t n);
int cuda_embed_tokens(cuda_run *r);
/* One layer forward, its results sent to the sink. */
int cuda_run_layer(cuda_run *r, int layer, int next);
/* normed (f32) = output norm of x; to the sink. */
int cuda_hidden(cuda_run *r);
/* logits of rows row .. row+n-1, their statistics, and both to the sink. */
int cuda_logits_tile(cuda_run *r, size_t row, size_t n);

attention_shape cuda_attention_shape(const cuda_run *r);
head_shape cuda_head_shape(const cuda_run *r);
/* What `bad` holds where nothing is. */
enum { CUDA_FINE = 0x7f7f7f7f };
/* Refuse what is not finite, once the device is done. */
int cuda_check(cuda_run *r);
