/* True costs from logits (DESIGN section 6): what an evicting run predicted, step by step, against the full cache.
 *
 *     dloss = -log q(y) + log p(y)      y the next token of the text, p the full run's distribution, q the evicting
 * one's KL    = sum over tokens of p (log p - log q)
 *
 * in f64. Equal logits give exactly 0. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* One step of the full run. */
typedef struct truth_full {
    double lse;  /* log of the softmax normaliser */
    double mass; /* sum of the f32 probabilities beside it */
    int32_t top; /* most likely token, the lowest of equal ones */
} truth_full;

/* One counted step of an evicting run. */
typedef struct truth_step {
    double dloss, kl; /* nats */
    bool flip;        /* another token is the most likely one */
    bool right;       /* the text's own token is the most likely one */
    bool begins;      /* an answer: the step before is not counted */
} truth_step;

/* Means over the counted steps, and over the answers: the runs of consecutive counted steps. */
typedef struct truth {
    double dloss, kl;
    double kl_p99;     /* 99th percentile over the counted steps, linear between order statistics */
    double top1_flips; /* share of the counted steps */
    double exact;      /* share of the answers whose every token is the most likely one */
    double overlap;    /* see truth_overlap; NaN where it does not apply */
} truth;

/* log sum exp of n logits; NaN or infinite where they are not all finite. *top as above. */
double truth_lse(const float *logits, size_t n, int32_t *top);

/* Entropy in nats of the distribution that n logits with that log sum exp stand for. */
double truth_entropy(const float *logits, double lse, size_t n);

/* A step of the full run; `p` [n] receives its probabilities. */
void truth_of_full(const float *logits, size_t n, float *p, truth_full *out);

/* A step of an evicting run whose log sum exp and top token are known, against the full run's. `next` is the text's
 * token. `begins` is left false. */
truth_step truth_of_step(const float *logits, double lse, int32_t top, size_t n, const float *full_logits,
                         const float *p, const truth_full *full, int32_t next);

/* Means over n >= 1 steps, of which the first begins an answer in any case; overlap is set to NaN. Returns 0 or
 * ERR_DATA (memory). */
int truth_mean(const truth_step *steps, size_t n, truth *out);

/* Mean over steps n_prompt .. T-1 of |A visible and B visible| / |A or B visible|, for two lifetimes of one unit, each
 * [T]. `scratch` holds 2(T+2) values. */
double truth_overlap(const int32_t *a, const int32_t *b, int32_t n_tokens, int32_t n_prompt, int32_t *scratch);
