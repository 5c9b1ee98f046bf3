/* FILE.h5.partial: answers and sequences of a trace as they are finished, so that a killed run can be taken up (trace
 * --resume). base/partial.h has the format; a record begins with a u64 that says what it is: an answer (token ids); a
 * call that gave values to the trace (traces/trace.h); the end of a sequence, with the hash of all logits so far. What
 * does not end is given up. */
#pragma once

#include "tracer/model.h"
#include "tracer/texts.h"
#include "traces/trace.h"

#include <stddef.h>
#include <stdint.h>

typedef struct resume resume;

/* Open or create FILE.h5.partial. Work on other texts, another model, backend or processor is refused (partial_open).
 * `place` names what computes: backend, device and its type of numbers. */
int resume_open(const char *out, const char *command, const model *m, const text_list *texts, const char *place,
                resume **r);
/* Say, where there is one, that unfinished work is left alone. */
int resume_mention(const char *out);

size_t resume_answers(const resume *r);   /* finished, whether taken or not */
size_t resume_sequences(const resume *r); /* the same */

/* The next answer: `id` [room]; ERR_DATA where it has more. All answers come before the first sequence. */
int resume_take_answer(resume *r, int32_t *id, size_t room, size_t *n);
int resume_add_answer(resume *r, const int32_t *id, size_t n);

/* The next sequence into the trace, after its trace_write_sequence. */
int resume_take_sequence(resume *r, trace_writer *w, uint64_t *logits_hash);
/* What the trace is given from here on belongs to the next sequence, which the second call ends: it survives the
 * process then, and the machine. */
int resume_begin_sequence(resume *r, trace_writer *w);
int resume_end_sequence(resume *r, trace_writer *w, uint64_t logits_hash);

/* The work is done: remove the file. Or it is not: keep what is finished. Both free r; r may be NULL. */
void resume_remove(resume *r);
void resume_keep(resume *r);
