/* From documents to the sequences that are traced: tokens, cut into windows where that is asked for, with the bytes of
 * each token and the length of the prompt. */
#pragma once

#include "base/text.h"
#include "tracer/documents.h"
#include "tracer/marks.h"
#include "tracer/model.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct text_sequence {
    char *name;      /* for messages: the document's, and "@512" where its first 512 tokens are left out */
    char *source;    /* for the trace, the same way */
    int32_t *id;     /* [n] */
    int64_t *offset; /* [n+1] token k has bytes offset[k] .. offset[k+1]-1 of pieces; NULL: nobody knows (ids alone) */
    size_t n, n_given; /* n_given: without what texts_append added */
    text pieces;
    int32_t n_prompt;
    marked_steps steps; /* nothing, where texts are not marked */
} text_sequence;

typedef struct text_list {
    text_sequence *item;
    size_t n, capacity;
    size_t left_out; /* tokens behind the last windows of their documents */
} text_list;
void text_list_free(text_list *l);
void text_list_drop(text_list *l, size_t i);
double texts_tokens(const text_list *l, size_t first); /* of sequences first, first+1 ... together */

typedef struct text_ask {
    const char *const *path;
    size_t n_paths;
    document_form form;
    const char *date;     /* chat_render; NULL: none */
    bool marked, special; /* marks.h; tokenizer_encode */
    int64_t prompt;       /* steps that see everything; -1: as the document says, else 0 */
    int64_t skip;         /* tokens left out at the start, a BOS in front not counted */
    int64_t tokens;       /* of a sequence at most, a BOS in front counted; 0: all */
    int64_t stride;       /* a window of `tokens` tokens begins every so many; 0: one sequence a document */
    int64_t windows;      /* of a document at most; 0: all */
    int32_t generate;     /* tokens that will be added to each sequence; 0: none */
} text_ask;

/* Read and tokenise. Windows are whole: tokens at the end that fill none are left out; a document shorter than one is
 * one sequence as it is. Where the tokenizer puts a BOS in front, every window of a text begins with one;
 * token ids are taken as they are. A token that holds bytes of a document's prompt belongs to the prompt.
 * `t` may be NULL for DOCUMENT_IDS: there are no pieces then. Lengths are checked against the model, and, unless more
 * tokens will come, against n_prompt (texts_check). */
int texts_read(const text_ask *ask, const model *m, const tokenizer *t, text_list *out);

/* Add tokens, with their pieces, behind the others; the sequence so far becomes the prompt unless ask->prompt says
 * otherwise. */
int texts_append(const text_ask *ask, const tokenizer *t, const int32_t *id, size_t n, text_sequence *s);

/* Two tokens at least, and a step after n_prompt that may count. */
int texts_check(const text_ask *ask, const text_sequence *s);

/* XXH3 of all that becomes part of a trace. */
uint64_t texts_hash(const text_list *l);
