/* One pass over a sequence of a trace for many configurations: replay and estimate together (DESIGN sections 1, 6, 9).
 *
 * Rows are produced once, tile by tile, and every configuration consumes them: first its policy, then the masked sums.
 * Results do not depend on the number of threads, on the other configurations, or on how many passes memory allows. */
#pragma once

#include "sim/config.h"
#include "sim/footprint.h"
#include "sim/replay.h"
#include "traces/blocks.h"
#include "traces/trace.h"

enum { SWEEP_PROBES = 4 };

/* What a pass will hold, for the memory line. */
typedef struct sweep_cost {
    size_t fixed;      /* the layer being read and one row block */
    size_t per_config; /* the largest configuration */
    size_t planned;    /* fixed + the configurations of the largest pass */
    int passes;
} sweep_cost;

typedef struct sweep_result sweep_result;

typedef struct sweep_options {
    trace_form form;
    bool out_err, out_err_exact; /* exact implies out_err */
    bool loss;                   /* first order and Fisher term, from the trace's gradients */
    bool keep_lifetimes;         /* fill sweep_result.evict_at until `done` has seen it */
    int32_t sample_steps;        /* price so many steps only, drawn by strata (sim/sample.h); 0 = all of them */
    uint64_t seed;               /* of that draw */
    size_t memory;               /* bytes for everything this pass allocates */
    /* Called by the main thread for each finished configuration, in order; may be NULL. Returns 0 or an error. */
    int (*done)(void *context, size_t index, const sweep_result *result);
    void *context;
} sweep_options;

/* What pricing a sample of the steps adds to the variance of the means; zeros where all steps are priced. */
typedef struct sweep_sampling {
    double lost_mass, first, fisher; /* variances */
    double first_fisher;             /* covariance */
} sweep_sampling;

struct sweep_result {
    int64_t n_counted;
    sweep_sampling sampling;
    double lost_mass, out_err;
    double block_lost_mass[BLOCKS_PER_ROW];
    int32_t block_steps[BLOCKS_PER_ROW];
    float *head_lost_mass; /* [n_layer][n_head], owned */
    /* With options.loss; block and head values as in traces/blocks.h. Set n_fisher = 0: no samples in the trace. */
    double dloss_first, fisher;
    double block_first[BLOCKS_PER_ROW];
    int n_fisher;
    double *block_fisher;            /* [n_fisher][BLOCKS_PER_ROW], owned */
    float *head_first, *head_fisher; /* [n_layer][n_head], owned */
    int64_t floored;                 /* rows whose visible mass was below 1e-6 and was floored */
    footprint use;
    int64_t
        updates; /* of entries' memory over the steps after the prompt and all units; -1: the lifetimes were given */
    int32_t *evict_at; /* [n_layer][n_kv_head][T] while `done` runs, if lifetimes are kept */
};

void sweep_result_free(sweep_result *r);

/* Lifetimes to price instead of a policy's; configurations then only carry n_prompt. */
typedef struct sweep_given {
    /* Fill out [n_layer][n_kv_head][T] with those of configuration `index`. Called by the main thread, in order, when
     * the configuration's turn comes. Returns 0 or an error. */
    int (*read)(void *context, size_t index, int32_t *out);
    void *context;
} sweep_given;

/* `configs` [n] resolved for this sequence; `given` NULL replays their policies. `results` [n] are filled. Fails by
 * name where the trace lacks something or `memory` is too small for even one configuration. */
int sweep_sequence(trace *t, size_t seq, const sim_config *configs, size_t n, const sweep_given *given,
                   const sweep_options *options, pool *p, sweep_result *results, sweep_cost *cost);

/* What is known about the steps of a sequence apart from attention: facts [T]. */
void sweep_facts(const trace_sequence *s, int32_t n_prompt, replay_facts *facts);

/* Can these metrics be computed from this sequence, with n_prompt steps that see everything? 0, or ERR_DATA "trace has
 * no attn/v ...". */
int sweep_check_sequence(const trace *t, size_t seq, int32_t n_prompt, const sweep_options *options);

/* Has the trace what the configuration's policy looks at? 0, or ERR_DATA "trace has no logits/correct ...". */
int sweep_check_policy(const trace *t, size_t seq, const sim_config *config);
