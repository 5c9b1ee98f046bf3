/* What could come next on a command line: commands, options, choices, policies and their parameters, all from the
 * tables that run them, so that completion knows what this binary knows. */
#pragma once

#include "base/text.h"

typedef struct candidates {
    const char *word; /* the word under the cursor, without its quotes; "" = a new one */
    text out;
    int code; /* of the first failure */
} candidates;

/* Offer the word's first n bytes followed by `end`, if what is typed can become that. help may be NULL. */
void candidates_offer(candidates *c, size_t n, const char *end, const char *help);
/* The same for each of "a|b|c" or "a,b,c". */
void candidates_offer_words(candidates *c, size_t n, const char *words);

/* A spec begins at the word's n-th byte. */
void complete_spec(candidates *c, size_t n);
/* The word is the name of a policy or wrapper. */
void complete_policy(candidates *c);

/* Complete `line`, a command line up to the cursor with the program's name in it, quoted as for a shell. *out gets
 * lines: first ":word", a tab and the word under the cursor without its quotes, then candidates, each a whole word, a
 * tab and a help text; ":files" where file names are candidates too. A line that makes no sense has none. Returns 0 or
 * ERR_DATA; release with text_free either way. */
int complete_line(const char *line, text *out);
