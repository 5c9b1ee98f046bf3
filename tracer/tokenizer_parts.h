/* What the files of the tokenizer share: only tokenizer*.c use it. */
#pragma once

#include "tracer/tokenizer.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

/* ---- the tokenizer ---------------------------------------------------------------------------------------------- */

typedef struct merge {
    int32_t left, right, joined;
    uint32_t rank; /* from 1, best first; 0 marks an empty slot */
} merge;

/* Literals sorted by their bytes, a prefix before what it begins. */
typedef struct literal_set {
    tokenizer_literal *literal; /* texts owned */
    size_t n, first[257];       /* those that begin with byte b: first[b] .. first[b+1]-1 */
} literal_set;

typedef struct step {
    int kind;             /* a tokenizer_step_kind or STEP_UTF8 */
    char *pattern, *with; /* owned */
    size_t n_pattern, n_with;
    pcre2_code *regex;
    tokenizer_split split;
    bool inverted;
} step;

enum { STEP_UTF8 = STEP_SPLIT + 1 }; /* our own: cut at bytes that are no UTF-8 */

struct tokenizer {
    char *file;
    tokenizer_kind kind;
    bool whole_words, add_bos;
    int32_t bos, eos;

    size_t n_tokens, longest; /* bytes of the longest plain token */
    char *bytes;              /* the pieces, one after the other */
    size_t *start;            /* [n_tokens+1] */
    char *keys;               /* what merging sees of them: `bytes` of BYTES, otherwise as the vocabulary writes them */
    size_t *key_start;
    int32_t byte_id[256]; /* -1 = the vocabulary lacks this byte */

    /* Two hash tables with linear probing, sizes powers of two, at most half full. */
    int32_t *tokens; /* id + 1 of a token that merging may make; 0 = empty */
    size_t tokens_mask;
    merge *merges;
    size_t merges_mask;
    uint32_t *ranks; /* [n_tokens] of SCORES: from 1, best first; equal scores share one */

    literal_set raw, normalized;
    step steps[TOKENIZER_STEPS_MAX + 1];
    size_t n_steps;
    pcre2_match_context *limits;
};

/* The id of a plain token, -1 if there is none. */
int32_t tokenizer_find(const tokenizer *t, const char *key, size_t n);
merge *tokenizer_merge_slot(const tokenizer *t, int32_t left, int32_t right);

/* ---- encoding --------------------------------------------------------------------------------------------------- */

/* A stretch on its way through the steps: bytes, and where in the text each comes from. */
typedef struct span {
    const char *text;
    size_t n;
    const uint32_t *origin; /* [n+1], or NULL: base, base + 1, ... */
    uint32_t base;
} span;

/* One part of a word; `next` and `previous` of the ends is the sentinel behind the last part, whose id no merge has. */
typedef struct part {
    int32_t id; /* -1 once it was merged into the part before it */
    uint32_t previous, next;
} part;

typedef struct rewritten {
    char *text;
    uint32_t *origin;
    size_t n, text_capacity, origin_capacity;
} rewritten;

typedef struct encoder {
    const tokenizer *t;
    bool special;
    size_t n; /* bytes of the text */
    token_list *out;
    size_t id_capacity, offset_capacity, n_before; /* n_before: BOS */
    pcre2_match_data *match;
    rewritten work[TOKENIZER_STEPS_MAX + 1]; /* of each step */
    part *parts;                             /* part i begins at byte i of the word */
    size_t parts_capacity;
    uint64_t *heap; /* candidates: rank << 32 | part, so the best rank comes first and, of equals, the leftmost */
    size_t n_heap, heap_capacity;
} encoder;

static inline uint32_t span_origin(const span *s, size_t i) {
    return s->origin ? s->origin[i] : s->base + (uint32_t)i;
}

static inline span span_part(const span *s, size_t from, size_t to) {
    return (span){s->text + from, to - from, s->origin ? s->origin + from : NULL, s->base + (uint32_t)from};
}

int tokenizer_emit(encoder *e, int32_t id, size_t offset);

/* tokenizer_steps.c */
int tokenizer_read_steps(tokenizer *t, const tokenizer_facts *f);
void tokenizer_free_steps(tokenizer *t);
/* Take the raw literals out of the text and send what lies between through the steps. */
int tokenizer_run(encoder *e, const char *text, size_t n);

/* tokenizer_regex.c: compile an expression of Oniguruma's with its meaning kept, or refuse it by name. */
int tokenizer_compile(const char *pattern, size_t n, const char *file, pcre2_code **out);

/* tokenizer_literals.c */
int tokenizer_read_literals(literal_set *set, const tokenizer_facts *f, bool normalized);
void tokenizer_free_literals(literal_set *set);
/* The longest that begins at text, or NULL. */
const tokenizer_literal *tokenizer_literal_at(const literal_set *set, const char *text, size_t n, bool special);

/* tokenizer_merge.c: a word, to tokens. */
int tokenizer_merge_word(encoder *e, const span *word);
