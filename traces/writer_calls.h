/* What a writer was told, for those who take up a trace that was interrupted. */
#pragma once

#include "base/partial.h"
#include "traces/trace.h"

/* A sequence's work, kept and done again. From now on, until it is NULL, every call of trace.h that gives values to the
 * current sequence first hands them to `take`, as up to TRACE_TAP_PARTS parts that make up one record; a code other
 * than 0 stops the call. `tap` must outlive its use. */
enum { TRACE_TAP_PARTS = 6 };
typedef struct trace_tap {
    int (*take)(void *context, const partial_part *parts, size_t n);
    void *context;
} trace_tap;
void trace_writer_tap(trace_writer *w, const trace_tap *tap);
/* Repeat the call that a record of n bytes was made of, 8-byte aligned: after trace_write_sequence with the same facts
 * and plan, in the same order, the file gets the same bytes. The record is not handed to a tap. */
int trace_writer_repeat(trace_writer *w, const void *record, size_t n);
