/* The values of a synthetic trace: pure functions of (seed, layer, head, row), so that any thread may compute any tile.
 * Row t is the same whatever the number of tokens: a shorter trace is the beginning of a longer one.
 *
 * A score is a sum of four parts, each with coordinates of its own in q and k:
 *
 *   sink      the first SYNTHETIC_SINKS entries answer one coordinate. Its strength grows with what the other entries
 *             add up to (synthetic_background), so that a head's sink keeps its share at any length
 *   position  pairs (cos wi, sin wi) against (cos wt, sin wt), as rotary embedding has them. Equal weights on
 *             frequencies that lie evenly on a log scale add up to -near * ln(t - i): attention falls as a power of the
 *             distance, up to the head's reach
 *   topic     the text changes its topic every few dozen steps and comes back to old ones. An entry answers its topic
 *             with a strength that is exponentially distributed, which makes its weight a power law: a few entries are
 *             much used for a while
 *   noise     independent of everything
 *
 * Heads differ in the share of their sink, near, reach, and in the strength of topic and noise. */
#pragma once

#include <stddef.h>
#include <stdint.h>

enum { SYNTHETIC_SINKS = 4, SYNTHETIC_HEAD_DIM_LEAST = 8, SYNTHETIC_VOCAB = 32000 };

/* Scores are q.k / sqrt(head_dim). */
typedef struct synthetic_shape {
    uint64_t seed;
    int32_t n_head, n_kv_head, head_dim; /* head_dim >= SYNTHETIC_HEAD_DIM_LEAST, n_head a multiple of n_kv_head */
} synthetic_shape;

/* Rows row0 .. row0+n-1 of a head, out [n][head_dim]. */
void synthetic_key(const synthetic_shape *s, int layer, int kv_head, int32_t row0, int32_t n, float *out);
void synthetic_value(const synthetic_shape *s, int layer, int kv_head, int32_t row0, int32_t n, float *out);
/* `background` from synthetic_background, at least [row0 + n]. */
void synthetic_query(const synthetic_shape *s, int layer, int head, const float *background, int32_t row0, int32_t n,
                     float *out);
/* Gradients of label set `set` with respect to the head's output. */
void synthetic_gradient(const synthetic_shape *s, int set, int layer, int head, int32_t row0, int32_t n, float *out);

/* out[t]: log of the weight, in expectation, of all entries but the sink in row t < n. */
void synthetic_background(const synthetic_shape *s, int layer, int head, int32_t n, float *out);

int32_t synthetic_token(uint64_t seed, int32_t t);             /* 0 .. SYNTHETIC_VOCAB-1, Zipf's law */
int32_t synthetic_label(uint64_t seed, int sample, int32_t t); /* the same, for grad/fisher_label */
typedef struct synthetic_prediction {
    float target_logprob, entropy; /* nats */
    uint8_t correct;
} synthetic_prediction;
synthetic_prediction synthetic_predict(uint64_t seed, int32_t t);
