/* `kvlag info --check`: read a whole trace and verify what trace_open cannot see in its header. */
#pragma once

#include "base/pool.h"
#include "traces/trace.h"

#include <stdbool.h>

/* What was measured on one sequence. */
typedef struct check_sequence {
    bool dense, factored;
    double sum_error;  /* dense: largest |sum of a stored row - 1| */
    double difference; /* both forms: largest |dense - factored| over all renormalised entries */
} check_sequence;

/* Every stored value is readable and finite; the content hash, where the file carries one, is that of the content;
 * dense rows are >= 0, 0 above the diagonal and outside the window, sum to 1 within 1e-2 and to attn/row_sum; factored
 * rows can be computed; both forms agree within 0.05; gradients times their scales are finite; top-k ids lie in the
 * vocabulary. seq [trace_n_sequences]. The first fault is an error that names its place. */
int check_trace(trace *t, pool *p, check_sequence *seq);
