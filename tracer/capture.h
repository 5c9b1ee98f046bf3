/* One forward pass, and the way back where gradients are wanted, into a trace: what the backend pushes is packed by the
 * pool (compressed only, where the backend packs by itself) and put into the file in order, so that memory stays linear
 * in T and in the vocabulary. */
#pragma once

#include "base/pool.h"
#include "tracer/backend.h"
#include "traces/trace.h"

typedef struct capture {
    const model *model;
    const backend *backend;
    backend_state *state;
    pool *pool;
    trace_writer *writer;
    trace_plan plan;      /* of every sequence; topk 0 or more, lse always */
    uint64_t seed;        /* of the labels drawn */
    uint32_t sequence;    /* index of the next sequence */
    uint64_t logits_hash; /* XXH3 over all logits so far, in f32 (see capture_hashed); starts at 0 */
    double done;          /* for progress_at: capture_work() summed over what is done */
} capture;

/* What progress counts for a sequence of n tokens. */
double capture_work(const model *m, const trace_plan *plan, int32_t n);

/* What logits_hash covers: "logits", or "predictions" (top k and entropy) where the logits never left a backend. */
const char *capture_hashed(const capture *c);

/* model/wo of every layer; before the first sequence. */
int capture_wo(const capture *c);

/* Run the model over s->tokens (>= 2 of them) and write the sequence. */
int capture_sequence(capture *c, const trace_sequence *s);
