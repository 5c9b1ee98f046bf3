/* Replay of requests that share one memory: each unit's residents of all requests together never exceed M after a step
 * (docs/pool.md). What comes out is lifetimes, which are priced like any others. */
#pragma once

#include "base/pool.h"
#include "sim/replay.h"
#include "sim/requests.h"

/* What a request leaves behind. */
typedef struct pooled {
    int32_t *evict_at; /* [n_layer][n_kv_head][T], owned */
    int64_t updates;   /* as replay_updates, of all kv heads */
    double held;       /* entries held after a step, mean over its global steps and all units */
} pooled;

/* Bytes: while it works, at most; and of all results. */
size_t kv_pool_bytes(const requests *q, const trace *t, trace_form form);
size_t kv_pool_result_bytes(const requests *q, const trace *t);

/* Fill out[i] for each item of q. Results do not depend on the number of threads. Release each with pooled_free, also
 * after a failure. */
int kv_pool_replay(const requests *q, trace *t, trace_form form, pool *p, pooled *out);
void pooled_free(pooled *p);

/* What entries must leave n units, one of each request, after a step in which each has evicted for itself. */
void kv_pool_evict(const requests *q, replay *const *units, int n);
