/* One run's buffers and the steps of the forward pass, separate so that a layer can be run again from its input (a
 * backward pass that keeps only each layer's `x` recomputes the rest). */
#pragma once

#include "tracer/cpu/cpu.h"
#include "tracer/cpu/matmul.h"

typedef struct cpu_run {
    backend_state *s;
    const forward_sink *sink;
    const int32_t *tokens;
    const int32_t *evict_at; /* see backend.forward */
    size_t T;
    /* Row strides, in floats; all multiples of 16. */
    size_t ld_x, ld_qkv, ld_mix, ld_ff, ld_scores, ld_logits;
    size_t logit_rows; /* rows in a tile of logits */
    float *x;          /* [T][ld_x] the residual stream */
    float *normed;     /* [T][ld_x] x after a norm */
    float *added;      /* [T][ld_x] what a half of a layer adds to x, before its norm; == normed unless it is kept */
    float *qkv;        /* [T][ld_qkv] q | k | v of the current layer, q and k after their norms and RoPE */
    float *raw;        /* [T][ld_qkv] q | k before their norms; NULL unless it is kept */
    float *mix;        /* [T][ld_mix] the heads' outputs side by side */
    float *ff;         /* [T][ld_ff] feed-forward activations */
    float *lse;        /* [n_head][T] */
    float *angles;     /* [n_rope][T][rope_dims] */
    float *logits;     /* [logit_rows][ld_logits] */
    float **scratch;   /* [threads] BACKEND_ROW_TILE score rows, or one tile of the gate */
    size_t ld_gate;
    int layer; /* current */
    void *block;
} cpu_run;

/* Buffers for n tokens; linear in n. */
int cpu_run_new(backend_state *s, const int32_t *tokens, int32_t n, const forward_sink *sink, cpu_run *r);
void cpu_run_free(cpu_run *r);

int cpu_embed(cpu_run *r); /* x = embeddings, and positions where they are learned */

/* x = layer(x), in three steps. */
int cpu_run_attention(cpu_run *r, int layer); /* x -> qkv, mix, lse; results of attention to the sink */
int cpu_add_mix(cpu_run *r);                  /* x += output projection of mix, normed where the layer does so */
int cpu_run_feed_forward(cpu_run *r);         /* x += feed-forward(x) */

int cpu_run_logits(cpu_run *r); /* output norm and logits, to the sink */

/* What the steps are made of. */
int cpu_norm(cpu_run *r, const float *weight, const float *bias); /* normed = norm(x), or x where weight is NULL */
int cpu_project_qkv(cpu_run *r);                                  /* normed -> qkv */
/* gate and up of one tile of cpu_gate_grid, `gate` with rows ld_gate apart and `up` ld_ff. Without a gate it is `up`
 * (the matrix) that is activated: its product comes as gate, and up is 1. */
tile_grid cpu_gate_grid(const cpu_run *r);
void cpu_gate_tile(const cpu_run *r, tile t, float *gate, float *up);
int cpu_attention(cpu_run *r);                              /* qkv -> mix, lse; rows to the sink (attention.c) */
int cpu_run_hidden(cpu_run *r);                             /* normed = output norm of x, to the sink */
int cpu_logits_tile(cpu_run *r, size_t row, size_t n_rows); /* normed -> logits, at most logit_rows of them */

/* Probabilities of head `head`, rows row0 .. row0+n-1, into `scores` (n rows of ld_scores): columns 0 .. cols-1, cols
 * padded and at least row0+n, zero where the row's step does not see. Sets their lse. */
int cpu_attention_rows(const cpu_run *r, int head, size_t row0, size_t n, size_t cols, float *scores);
