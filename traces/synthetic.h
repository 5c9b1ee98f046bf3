/* Write a synthetic trace of any size (synthetic_values.h says what is in it), tile by tile: besides single numbers a
 * token, memory does not grow with its length unless rows are asked for. */
#pragma once

#include "traces/synthetic_values.h"
#include "traces/trace.h"

enum { SYNTHETIC_DENSE_MOST = 8192 /* tokens of a trace with attn/probs */ };

typedef struct synthetic {
    synthetic_shape shape;
    int32_t n_layer, n_tokens, n_prompt;
    trace_plan plan; /* used: dense, factored, grad_loss, n_fisher. lse and row_sum come with dense: they need rows */
} synthetic;

/* What the file says of its model; strings are constants, window is NULL. */
trace_model synthetic_model(const synthetic *s);

/* Write the only sequence of `w`, begun with synthetic_model. The same bytes for any number of threads. Shows progress.
 * Returns 0 or ERR_DATA. */
int synthetic_write(const synthetic *s, pool *p, trace_writer *w);
