/* Marked texts: which words state a fact, and which ask for it again.
 *
 *     The gate opens with {{gate=copper}}. Rain fell all day. The gate opens with {{gate?copper}}.
 *
 * {{NAME=words}} states a fact, {{NAME?words}} is an answer that needs it, {{?words}} an answer that needs none. Names
 * are letters, digits, '_' and '-'. The marks are taken out, the words stay: the model reads the text without them. In
 * the trace, answers are the counted steps, facts and their uses the probes (FORMAT.md). */
#pragma once

#include "base/text.h"

#include <stdbool.h>
#include <stdint.h>

enum { MARK_NONE = -1 };

typedef struct mark {
    int64_t begin, end; /* bytes of the plain text, begin < end */
    bool is_answer;
    int32_t fact; /* of an answer: the mark that it needs, an earlier one, or MARK_NONE */
} mark;

typedef struct marks {
    mark *mark; /* in the order of the text; they do not overlap */
    size_t n, capacity;
} marks;
void marks_free(marks *m);

/* Take the marks out of `bytes` [n]; what is left is added to `plain`. Returns 0, or ERR_DATA naming the line of a mark
 * that is not well formed, states a fact again, or asks for one that was not stated before it. Release both either way.
 */
int marks_take(const char *bytes, size_t n, text *plain, marks *out);

/* What marks say of a trace's steps. A step is counted where the token after it holds bytes of an answer; an answer's
 * first step needs every entry that holds bytes of its fact. */
typedef struct marked_steps {
    uint8_t *counted; /* [T-1] */
    int32_t *probes;  /* [n_probes][2] (entry, later step) */
    size_t n_probes, capacity;
} marked_steps;
void marked_steps_free(marked_steps *s);

/* `offset` [n_tokens+1]: token k covers bytes offset[k] .. offset[k+1]-1 of the plain text. What lies beyond the last
 * token is left out. Steps before n_prompt are marked as others are. Returns 0, or ERR_DATA where no step that may
 * count is left, or memory is short. */
int marks_steps(const marks *m, const int64_t *offset, int32_t n_tokens, int32_t n_prompt, marked_steps *out);
