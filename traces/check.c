#include "traces/check.h"
#include "base/err.h"
#include "traces/check_private.h"

static int check_one(trace *t, size_t i, bool every_row, pool *p, check_sequence *c) {
    const trace_sequence *s = &t->seq[i];
    *c = (check_sequence){.dense = s->has_dense, .factored = s->has_factored};
    for (int32_t step = 0; step < s->n_tokens; step++) c->n_counted += check_counts(s, step);
    TRY(check_pieces(t, i));
    TRY(check_predictions(t, i, c));
    if (c->dense) TRY(check_dense(t, i, p, c));
    if (c->factored) TRY(check_factored(t, i, every_row, p, c));
    return check_gradients(t, i, p, c);
}

int check_trace(trace *t, bool every_row, pool *p, check_sequence *seq) {
    TRY(check_values(t, p));
    for (size_t i = 0; i < t->n_seq; i++) TRY(check_one(t, i, every_row, p, &seq[i]));
    return 0;
}
