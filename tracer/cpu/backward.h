/* The backward pass: from the losses of all label sets to the heads' outputs of every layer. Only activations flow
 * back; weights get no gradient. Sets are rows: set g of step t is row g*T + t of every gradient, so that each product
 * serves all of them. */
#pragma once

#include "tracer/cpu/forward.h"

typedef struct cpu_back {
    cpu_run run;
    const label_plan *plan;
    const gradient_sink *sink;
    size_t sets;      /* 1 + plan->n_samples */
    int32_t *label;   /* [sets][T-1], -1 where the loss does not count */
    float *input;     /* [2 n_layer][T][ld_x] x before each half of each layer: attention, feed-forward */
    float *kept;      /* like input: what each half adds to x, before its norm; NULL where nothing is normed there */
    float *d_x;       /* [sets][T][ld_x] gradient of the residual stream */
    float *d_added;   /* [sets][T][ld_x] of what a half adds, before its norm; == d_x where it has none */
    float *d_normed;  /* [sets][T][ld_x] of a norm's output */
    float *d_mix;     /* [sets][T][ld_mix] of the heads' outputs */
    float *d_qkv;     /* [sets][T][ld_qkv] */
    float *d_gate;    /* [sets][T][ld_ff] of what is activated */
    float *d_up;      /* [sets][T][ld_ff] */
    float *d_hidden;  /* [slices][logit_rows][ld_x]: a tile of logits times the output matrix, by slices of ids */
    size_t logit_row; /* first row of the current tile of logits */
    size_t slices;
    float *slope;   /* [sets][T] of the logits' soft-cap at each label; NULL: no cap */
    float **capped; /* [threads][ld_logits] a row of capped logits */
    float *d_kv;    /* [n_head][chunks][sets][2][T][head_dim] of k and v, before they are summed over a group's heads */
    size_t chunks;  /* runs of rows of a head, one task each (attention_back.c) */
    void *block;
} cpu_back;

/* d_mix -> d_qkv, q and k before RoPE; run.qkv holds the layer's q, k and v. cpu_back_chunks: how many chunks; it sets
 * the size of d_kv. */
int cpu_attention_back(cpu_back *b);
size_t cpu_back_chunks(const model *m, size_t T);
