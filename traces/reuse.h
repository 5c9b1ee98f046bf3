/* The endogenous-reuse task as attention: will a policy keep what proved useful until it is needed again?
 *
 * After "Eviction as Estimation" (arXiv 2607.24667), its controlled task: facts prove useful shortly after they arrive,
 * in steps whose prediction is right; distractors draw more attention than facts, in steps whose prediction is wrong;
 * facts are needed again long after. Its numbers besides the budget of 40 and the 400 steps are ours: reuse_default.
 *
 * Entries and steps have roles that do not depend on each other. An entry is
 *   a fact       n_facts of them, at positions drawn without replacement from 0 .. n_tokens - 2 - distance
 *   a distractor any other entry, with probability distractor_rate
 *   a filler     else.
 * A step is
 *   a proof      proof steps after a fact's arrival; it attends to the fact, and is right
 *   an answer    one for each fact, drawn from the steps at least `distance` after its arrival that have no role yet
 *                (the latest fact, which has the least choice, draws first); it attends to the fact, and is right
 *   a failure    any other step, with probability fail_rate; it attends to the newest distractor before it, if there
 *                is one, and is wrong
 *   plain        else; it attends to nothing in particular, and is right.
 *
 * A step's row is share on its target and 1 - share on what is always there: half on the entries near by (1/2^d at a
 * distance of d), half evenly on all entries up to itself. Then every weight is multiplied by exp(noise * z), z
 * standard normal, of its own for every head, and the row divided by its sum.
 *
 * All values are pure functions of (seed, sequence, and head, row): tests hold a file against them. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

enum { REUSE_FILLER = 0, REUSE_DISTRACTOR = 1, REUSE_FACT = 2 /* token of the first fact; the others follow */ };

typedef struct reuse_task {
    uint64_t seed;
    int32_t n_tokens, n_facts, proof, distance; /* 1 <= proof < distance */
    double fact_share, distractor_share;        /* of a row, in 0 .. 1 */
    double distractor_rate, fail_rate;
    double noise;        /* standard deviation of a weight's logarithm */
    double flip;         /* probability that `correct` of a step says the opposite */
    bool always_correct; /* every prediction is right: attention stays what it is, and tells nothing apart */
} reuse_task;

/* 16 facts in 400 steps, proved after 6, needed after 100 or more; shares .4 and .6; a quarter of the entries
 * distracts, half of the steps fail; noise .5. */
extern const reuse_task reuse_default;

/* Arrays of one sequence, T = n_tokens. */
typedef struct reuse_sequence {
    const reuse_task *task;
    int32_t number;
    int32_t *token;  /* [T] an entry's role: REUSE_FILLER, REUSE_DISTRACTOR or REUSE_FACT + k, in order of arrival */
    int32_t *target; /* [T] the entry that a step attends to, or -1 */
    int32_t *probes; /* [n_facts][2] (arrival, answer) */
    uint8_t *counted, *correct; /* [T] 1 at answers; the prediction made at a step is right */
    /* [T] A prediction hesitates between two tokens: the true one has a probability uniform in (1/2, 1) where it is
     * right, in (0, 1/2) where it is wrong. Its logarithm and the entropy, in nats. */
    float *logprob, *entropy;
} reuse_sequence;

/* Draw a sequence. `task` must outlive it. ERR_USAGE where facts or answers find no place. Free either way. */
int reuse_draw(const reuse_task *task, int32_t number, reuse_sequence **out);
void reuse_free(reuse_sequence *s); /* accepts NULL */

/* Row t of a head, row[0 .. t]. */
void reuse_row(const reuse_sequence *s, int head, int32_t t, float *row);
