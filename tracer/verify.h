/* True reruns: what lifetimes, or a policy that decides while the model runs, cost in loss (DESIGN sections 3 and 6).
 *
 * Open loop: one forward pass with the lifetimes as masks. Closed loop: token by token, the policy deciding from the
 * rows of the model that already lost entries, through the same replay as sim. Either computes its full-cache baseline
 * in the same run and by the same code, so that nothing but eviction tells the two apart. Memory does not grow with
 * T*n_vocab. */
#pragma once

#include "base/pool.h"
#include "sim/config.h"
#include "tracer/backend.h"
#include "tracer/truth.h"

/* The text and what runs it; counted and target_logprob may be NULL. */
typedef struct verify_text {
    const backend *backend;
    backend_state *state;
    const model *model;
    pool *pool;
    const int32_t *tokens; /* [n_tokens], ids below n_vocab */
    int32_t n_tokens, n_prompt, sequence;
    const uint8_t *counted;      /* [n_tokens-1], as in trace_sequence */
    const float *target_logprob; /* [n_tokens-1] of the trace, to compare the full run with */
} verify_text;

/* The full cache. */
typedef struct verify_full {
    int32_t n_counted;
    double nll;      /* mean over the counted steps; its exp is the perplexity */
    double differs;  /* largest difference from the trace's target_logprob over the counted steps */
    double seconds;  /* of the full run; 0 in closed loop, where it shares every step with the reruns */
    double reruns_s; /* of all reruns */
} verify_full;

/* n configurations; evict_at[i] [n_layer][n_kv_head][n_tokens] lifetimes. `out` [n]. At least one step must be counted.
 */
int verify_open(const verify_text *x, const int32_t *const *evict_at, size_t n, truth *out, verify_full *full);

/* n configurations resolved for this text. `open` [n] lifetimes of the open loop, for truth.overlap: its mean over
 * layers and kv heads. Refuses policies that need the full run's future or its gradients, by name. */
int verify_closed(const verify_text *x, const sim_config *configs, const int32_t *const *open, size_t n, truth *out,
                  verify_full *full);

/* May this configuration run in closed loop? 0 or ERR_USAGE. */
int verify_closed_allows(const sim_config *config);
