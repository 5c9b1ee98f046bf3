/* Requests that share one memory (docs/pool.md): who they are, when they are admitted, what they reserve. All of it
 * follows from lengths and policies' guards, before any attention is looked at.
 *
 * Time is in decode steps of the batch. At global step g every admitted request goes one step of its own further; its
 * prompt is one global step, the one in which it is admitted. */
#pragma once

#include "sim/config.h"
#include "traces/trace.h"

typedef enum pool_rule { POOL_FAIR, POOL_LOWEST } pool_rule;

/* What the command line says. */
typedef struct pool_ask {
    long long entries;     /* M of each (layer, kv head); of each layer where units are layers */
    const char *file;      /* a requests file, or NULL: sequence i takes spec i mod n */
    long long between;     /* steps between arrivals without a file */
    const char *watermark; /* "0.9", or NULL = 1 */
    pool_rule rule;
    const char *const *spec; /* [n_specs] without a file */
    size_t n_specs;
} pool_ask;

typedef struct request {
    size_t seq;
    int32_t n_tokens;
    sim_config config;   /* budget M where the request has none of its own; owned */
    bool evicts_alone;   /* has a budget of its own or a schedule: first it evicts as in sim, then the pool does */
    int32_t lead;        /* its own step at global step g is lead + g - start */
    int32_t need, least; /* entries to be had for its admission; and what is left to it from the next step on */
    int64_t arrival;     /* global step from which it waits */
    int64_t start, end;  /* it is there at global steps start .. end-1 */
} request;

typedef struct requests {
    request *item; /* in order of the file, or of sequences */
    size_t n;
    size_t *queue;   /* [n] items in the order in which they are served: by arrival, then as above */
    int32_t entries; /* M: more may not be held after a step */
    int32_t low;     /* where the pool's evictions stop */
    pool_rule rule;
    unit_kind unit; /* of all of them */
} requests;

/* Read, resolve and admit them. `flags` without budgets where a file brings its own. ERR_USAGE or ERR_DATA, by line and
 * column of the file, for what makes no sense in a pool. Release with requests_free either way. */
int requests_make(const pool_ask *ask, const sim_flags *flags, const trace *t, requests *out);
void requests_free(requests *q);

/* The steps and guards alone: fills queue, start and end from arrival, lead, n_tokens, need and least. */
int requests_admit(requests *q);

/* "fair", "lowest". */
const char *pool_rule_name(pool_rule rule);
