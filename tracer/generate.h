/* The model continues a text, token by token, with a KV cache (backend.h's steps): the most likely token, or one drawn
 * at a temperature from the nucleus (Holtzman et al. 2020). Equal input gives equal tokens for any number of threads.
 */
#pragma once

#include "tracer/backend.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { GENERATE_STREAM = 3 /* of the uniform numbers; labels have 2 (backend.h) */ };

typedef struct generate_ask {
    int32_t n;          /* tokens, at most */
    double temperature; /* 0: the most likely token, the lowest id of several */
    double top_p;       /* the nucleus: as few tokens as together have this probability; 1: all */
    uint64_t seed;
} generate_ask;

typedef struct generator generator;

/* `m`, `state` and `t` must outlive the generator. */
int generator_new(const generate_ask *ask, const model *m, const backend *b, backend_state *state, const tokenizer *t,
                  generator **out);
void generator_free(generator *g); /* accepts NULL */

/* What follows `prompt` [n_prompt >= 1]: up to ask->n tokens into `answer`, *n of them. It ends with a token that
 * generate_ends, which is part of the answer. Token t+1 is drawn with
 *     u = rng_uniform(rng_philox(seed, t, 0, number, GENERATE_STREAM).v[0])
 * where `number` is the text's. progress_at follows *done, which grows by one a step. */
int generate_answer(generator *g, const int32_t *prompt, size_t n_prompt, uint32_t number, int32_t *answer, size_t *n,
                    double *done);

/* Does this token end a text or a turn: the tokenizer's EOS, or one of the known names (<|im_end|>, <|eot_id|>,
 * <end_of_turn> ...)? */
bool generate_ends(const generator *g, int32_t id);

/* One choice. Probabilities are the f32 softmax of (x - max) / temperature; in the order of falling probability, then
 * rising id, the nucleus ends with the first token at which their running f64 sum reaches top_p, and the first one
 * whose running sum exceeds u times the nucleus's sum is taken. ERR_DATA where a logit is not finite. */
int generate_pick(generator *g, const float *logits, double u, int32_t *id);
