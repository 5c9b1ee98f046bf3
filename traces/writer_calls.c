/* Calls of a writer as records, and records as calls. */
#include "base/mem.h"
#include "traces/writer_calls.h"
#include "traces/writer_private.h"

#include <string.h>

enum { PARTS_MAX = TRACE_TAP_PARTS - 1 /* arrays of values, behind the call */ };

void trace_writer_tap(trace_writer *w, const trace_tap *tap) {
    w->tap = tap;
}

/* Bytes of each part of a call's values; returns the number of parts. Chunks have a size of their own. */
static size_t sizes_of(const trace_writer *w, const writer_call *c, size_t size[PARTS_MAX]) {
    size_t T = (size_t)w->n_tokens, top = T * (size_t)w->plan.topk * 4, n_vocab = (size_t)w->model.n_vocab;
    switch ((writer_call_kind)c->kind) {
    case CALL_PUT:
    case CALL_PUT_GRAD:
        return 0;
    case CALL_SCALE:
    case CALL_LSE:
    case CALL_ROW_SUM:
        size[0] = T * 4;
        return 1;
    case CALL_LABELS:
        size[0] = (size_t)w->plan.n_fisher * (T - 1) * 4;
        return 1;
    case CALL_FULL:
        size[0] = (size_t)c->at[1] * n_vocab * 4;
        return 1;
    case CALL_LOGITS:
        size[0] = size[1] = (T - 1) * 4;
        size[2] = size[3] = top;
        size[4] = T - 1;
        return PARTS_MAX;
    }
    return 0;
}

int writer_tell(const trace_writer *w, writer_call call, const trace_chunk *chunk, const void *const *values) {
    if (!w->tap) return 0;
    size_t size[PARTS_MAX], n_values = sizes_of(w, &call, size), n = 1;
    partial_part parts[1 + PARTS_MAX] = {{&call, sizeof call}};
    for (size_t i = 0; i < n_values; i++) parts[n++] = (partial_part){values[i], size[i]};
    if (chunk) parts[n++] = (partial_part){chunk->data, chunk->bytes};
    return w->tap->take(w->tap->context, parts, n);
}

static int repeat_chunk(trace_writer *w, const writer_call *c, const void *frame, size_t n) {
    const int32_t *at = c->at;
    if (c->kind == CALL_PUT && (at[0] < 0 || at[0] >= N_ARRAYS)) return writer_misuse("a record of an unknown array");
    trace_chunk chunk = {.data = mem_new(n, 1, "chunk"), .bytes = n, .hash = c->hash};
    if (!chunk.data) return ERR_DATA;
    memcpy(chunk.data, frame, n);
    if (c->kind == CALL_PUT) return trace_put(w, (trace_array)at[0], at[1], at[2], at[3], at[4], &chunk);
    return trace_put_grad(w, at[0], at[1], at[2], at[3], &chunk);
}

static int repeat(trace_writer *w, const writer_call *c, const char *values, size_t n) {
    size_t size[PARTS_MAX], parts = sizes_of(w, c, size), sum = 0;
    const void *part[PARTS_MAX] = {0};
    const int32_t *at = c->at;
    for (size_t i = 0; i < parts; sum += size[i++]) part[i] = values + sum;
    if (parts && sum != n) return writer_misuse("a record of another size");
    switch ((writer_call_kind)c->kind) {
    case CALL_PUT:
    case CALL_PUT_GRAD:
        return repeat_chunk(w, c, values, n);
    case CALL_SCALE:
        return trace_write_grad_scale(w, at[0], at[1], at[2], part[0]);
    case CALL_LABELS:
        return trace_write_fisher_labels(w, part[0]);
    case CALL_LSE:
        return trace_write_lse(w, at[0], at[1], part[0]);
    case CALL_ROW_SUM:
        return trace_write_row_sum(w, at[0], at[1], part[0]);
    case CALL_LOGITS:
        return trace_write_logits(w, part[0], part[4], part[1], part[2], part[3]);
    case CALL_FULL:
        return trace_write_full_logits(w, at[0], at[1], part[0]);
    }
    return writer_misuse("a record of an unknown call");
}

int trace_writer_repeat(trace_writer *w, const void *record, size_t n) {
    writer_call c;
    if (n < sizeof c) return writer_misuse("a record that is too short");
    memcpy(&c, record, sizeof c);
    const trace_tap *tap = w->tap;
    w->tap = NULL;
    int code = repeat(w, &c, (const char *)record + sizeof c, n - sizeof c);
    w->tap = tap;
    return code;
}
