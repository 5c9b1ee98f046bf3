/* The text under the policies: what each token says, and for how long each configuration of a lifetimes file kept it.
 * What the figures `text` and `lost` and the report show of it comes from here. */
#pragma once

#include "analyze/glyphs.h"
#include "analyze/results.h"
#include "base/text.h"
#include "traces/lifetimes.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TOKENS_NONE ((size_t)-1)

/* One sequence: the first that the lifetimes file holds. */
typedef struct tokens {
    lifetimes *file;
    size_t seq;
    int32_t n_tokens, n_prompt;
    int32_t n_layer, n_kv_head, *window; /* [n_layer] as in the trace's model */
    glyphs glyphs;                       /* of all tokens; not read (n = 0) where the trace holds no text */
} tokens;

/* Refused by name: a trace with another content hash than the lifetimes', or without that sequence. */
int tokens_open(const char *lifetimes_path, const char *trace_path, tokens *out);
void tokens_close(tokens *t);

/* What a figure or report can be made of: opens both and returns 0 with *ready true, or says on stderr, after
 * "NAME: ", what is lacking (a path that is NULL, a trace without text) and returns 0 with *ready false. */
int tokens_open_for(const char *name, const char *lifetimes_path, const char *trace_path, tokens *out, bool *ready);

/* How long a configuration kept each token. A (layer, kv head) can see an entry at its own step, at all later ones, and
 * at no more than `window` in a layer with a sliding window. */
typedef struct token_shares {
    double *kept;   /* [T] of the later steps that could see it, in all units together, those that did; 1 where none
                     * could (the last token) */
    double *at_end; /* [T] of all units those in which the last step still sees it */
} token_shares;
/* Refused by name: a configuration that does not hold the sequence, or in another shape than the trace's. */
int tokens_shares(const tokens *t, size_t config, token_shares *out);
void token_shares_free(token_shares *s);

/* A configuration and the oracle to hold it against: of the same budget asked for and, where there is one, of the same
 * unit and schedule, lag, hold and pending, in this order of weight. */
typedef struct token_pair {
    size_t config, oracle; /* numbers in the lifetimes file; oracle is TOKENS_NONE where no such budget has one */
    double loss;           /* of the metric asked for, from the results; NaN where they do not have the configuration */
} token_pair;
typedef struct token_pairs {
    token_pair *item;
    size_t n, capacity;
} token_pairs;
/* One pair for each spec but the full cache and oracles, at the budget that has most specs (the first of several), with
 * the lag of least loss (the middle one where there are no results), memory charged where there is a choice. Sorted by
 * loss, best first, then as in the file. `r` may be NULL; metric is an index into results_metrics. */
int tokens_pairs(const tokens *t, const results *r, size_t metric, token_pairs *out);
void token_pairs_free(token_pairs *p);

/* ", budget 25%, licence, sequence 0": what the configurations of a pair share, each part where it is known or needed.
 */
int tokens_add_subject(const tokens *t, size_t config, text *out);
/* "rmm, lag 16, pending free" */
int tokens_name(const tokens *t, size_t config, text *out);
const lifetimes_config *tokens_config(const tokens *t, size_t config);

/* A token that the oracle kept longer than the policy. */
typedef struct lost_token {
    int32_t position;
    double policy, oracle, policy_at_end, oracle_at_end; /* shares, as above */
    char *before, *piece, *after;                        /* as glyphs show them */
} lost_token;
typedef struct lost_tokens {
    lost_token *item;
    size_t n;
} lost_tokens;
/* The last tokens of the text, a tenth of it, whose later steps are too few to compare. */
int32_t tokens_too_new(const tokens *t);
/* The tokens, at most `most`, with the largest kept(oracle) - kept(policy) > 0, largest first, then in the order of the
 * text. None is too new. `context` is how many
 * columns of text stand before and after each; the piece itself is whole. */
int tokens_lost(const tokens *t, const token_shares *policy, const token_shares *oracle, size_t most, size_t context,
                lost_tokens *out);
void lost_tokens_free(lost_tokens *l);
