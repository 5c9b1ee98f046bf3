/* `kvlag info --check`: read a whole trace and verify what trace_open cannot see in its header. */
#pragma once

#include "base/pool.h"
#include "traces/trace.h"

#include <stdbool.h>

/* What was found on one sequence; figures of what it does not have are 0. */
typedef struct check_sequence {
    bool dense, factored;
    double sum_error;     /* dense: largest |sum of a stored row - 1| */
    int32_t n_rows;       /* factored: rows that were computed from q and k, of every head */
    double difference;    /* both forms: largest |dense - factored| over these rows, renormalised */
    double lse_error;     /* factored with attn/lse: largest difference over these rows */
    int32_t n_counted;    /* steps whose loss counts */
    int64_t n_topk;       /* logits/topk_id: ids a step */
    bool has_full_logits; /* logits/full */
} check_sequence;

/* Every stored value is readable and finite; the content hash, where the file carries one, is that of the content.
 *
 * Pieces begin at 0 and end with the text. Dense rows are >= 0, 0 above the diagonal and outside the window, sum to 1
 * within 1e-2 and to attn/row_sum. Rows can be computed from q and k, and agree with the dense ones and with attn/lse
 * as far as the rounding of q and k to f16 lets them (of a trace that says it was computed in bf16, to bf16). Top-k ids
 * lie in the vocabulary, each once in a row, largest first, their mass is at most 1; target_logprob, correct, entropy
 * and logits/full agree with them, with each other and with the tokens. Gradients times their scales are finite and 0
 * after the last step that counts; samples have labels at exactly the steps that count.
 *
 * Of a long sequence only some 2048 rows a head, spread evenly, are computed from q and k, unless `every_row`.
 * seq [trace_n_sequences]. The first fault is an error that names dataset, layer, head and step. Memory is bounded by
 * some 64 MiB, a chunk row of attn/probs, one layer's k and v, and the logits' statistics. */
int check_trace(trace *t, bool every_row, pool *p, check_sequence *seq);
