/* What the files of check_trace share: check.c (who is asked what), check_values.c (every value), check_rows.c
 * (attention), check_steps.c (text, predictions, gradients). */
#pragma once

#include "traces/check.h"
#include "traces/reader_private.h"

/* Every value of every dataset is readable and finite, and the content hash is that of the content. */
int check_values(trace *t, pool *p);

/* attn/probs as it is stored; and the rows that q and k give, against it and against attn/lse. */
int check_dense(trace *t, size_t seq, pool *p, check_sequence *c);
int check_factored(trace *t, size_t seq, bool every_row, pool *p, check_sequence *c);

int check_pieces(trace *t, size_t seq);
int check_predictions(trace *t, size_t seq, check_sequence *c);
int check_gradients(trace *t, size_t seq, pool *p, check_sequence *c);

/* Does the loss of step t count? */
static inline bool check_counts(const trace_sequence *s, int32_t t) {
    return t >= s->n_prompt && t < s->n_tokens - 1 && (!s->counted || s->counted[t]);
}
