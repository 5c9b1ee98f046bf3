/* One run's buffers and the steps of the forward pass, separate so that a layer can be run again from its input (a
 * backward pass that keeps only each layer's `x` recomputes the rest). */
#pragma once

#include "tracer/cpu/cpu.h"

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
    float *qkv;        /* [T][ld_qkv] q | k | v of the current layer, q and k after RoPE */
    float *mix;        /* [T][ld_mix] the heads' outputs side by side */
    float *ff;         /* [T][ld_ff] gated feed-forward activations */
    float *lse;        /* [n_head][T] */
    float *angles;     /* [T][rope_dims] */
    float *logits;     /* [logit_rows][ld_logits] */
    float **scratch;   /* [threads] score rows, or one tile of the gate */
    size_t ld_gate;
    int layer; /* current */
    void *block;
} cpu_run;

/* Buffers for n tokens; linear in n. */
int cpu_run_new(backend_state *s, const int32_t *tokens, int32_t n, const forward_sink *sink, cpu_run *r);
void cpu_run_free(cpu_run *r);

int cpu_embed(cpu_run *r);                /* x = embeddings */
int cpu_run_layer(cpu_run *r, int layer); /* x = layer(x), results of attention to the sink */
int cpu_attention(cpu_run *r);            /* qkv -> mix, lse; rows to the sink (attention.c) */
int cpu_run_logits(cpu_run *r);           /* output norm and logits, to the sink */
