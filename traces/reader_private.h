/* What the reader's files share: reader.c (opening and checking), reader_rows.c (attention),
 * reader_grad.c (gradients), facts.c and check.c. */
#pragma once

#include "traces/content_hash.h"
#include "traces/hdf.h"
#include "traces/tiles.h"
#include "traces/trace.h"

struct trace {
    char *path, *label;
    char hash[CONTENT_HASH_HEX];
    bool hash_stored; /* the hash comes from the file's own attribute, else from the file's bytes */
    hid_t h5;
    trace_model model;
    bool has_wo;
    trace_sequence *seq;
    size_t n_seq;

    char *spare[2]; /* the bands of a layer that was closed, for the next one */
    size_t spare_bytes;
};

/* One dataset of gradients of the layer being read. */
typedef struct grad_source {
    tiles tiles;
    int n;                      /* label sets in it */
    int32_t band, next_band;    /* which row of chunks is loaded, which read ahead; -1 = none */
    char *stored, *next_stored; /* [n][n_head][rows][dim] that band as stored */
    float *scale;               /* [n][n_head][n_tokens] */
} grad_source;

/* A band is one row of tiles of all query heads: of attn/probs as stored (half or f32, only the columns that its rows
 * can reach), or of attn/q in f32. Rows asked for in ascending order decode every chunk once. */
struct trace_layer {
    trace *t;
    size_t seq;
    int layer;
    bool dense;
    int32_t n_tokens, window;
    size_t dim;

    tiles source;            /* attn/probs or attn/q */
    int32_t band, next_band; /* which one is loaded, which read ahead; -1 = none */
    char *tile, *next_tile;  /* [n_head][tiles across][rows][cols] values as stored */
    size_t head_bytes, tile_bytes;
    float *q, *next_q; /* factored: [n_head][rows][dim] */
    float *row_q;      /* [n_head][n_row_q][dim] queries of the rows read last; NULL unless kept */
    int32_t n_row_q;

    float *keys; /* factored: of each kv head, packed */
    size_t keys_stride;
    float *v;                 /* [n_kv_head][n_tokens][dim], NULL if absent */
    float *plain_k, *plain_q; /* [n_kv_head][n_tokens][dim], [n_head][n_tokens][dim]; NULL until loaded */

    grad_source grad_of[2]; /* grad/loss, grad/fisher; n is 0 until trace_layer_read_grad */
    float *grad;            /* [1 + n_fisher][n_head][grad_rows][dim] */
    size_t grad_capacity;   /* floats */
    int32_t grad_rows;
};

void reader_close_grad(trace_layer *l);
/* trace_layer_prefetch, for the gradients. */
int reader_prefetch_grad(trace_layer *l, int32_t row);

/* Values as tiles hand them out (`size` 2: f16, 4: f32) as f32. */
void reader_widen(const void *from, size_t size, float *to, size_t n);
