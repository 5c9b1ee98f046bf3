#include "traces/reuse.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/rng.h"

#include <math.h>
#include <stddef.h>

/* Of what a row leaves to no target: the part that lies near by, and the ratio from one distance to the next. */
#define NEAR_PART 0.5
#define NEAR_RATIO 0.5

const reuse_task reuse_default = {
    .n_tokens = 400,
    .n_facts = 16,
    .proof = 6,
    .distance = 100,
    .fact_share = 0.4,
    .distractor_share = 0.6,
    .distractor_rate = 0.25,
    .fail_rate = 0.5,
    .noise = 0.5,
};

/* Random numbers of different use differ in their stream; a head's noise is stream STREAM_NOISE + head. */
enum { STREAM_ROLE, STREAM_SIGNAL, STREAM_ANSWER, STREAM_NOISE };

static rng_block draw(const reuse_sequence *s, uint32_t stream, int32_t a, int32_t b) {
    return rng_philox(s->task->seed, (uint32_t)a, (uint32_t)b, stream, (uint32_t)s->number);
}

/* ---- roles ------------------------------------------------------------------------------------------------------ */

/* Facts by selection sampling (Knuth, volume 2, 3.4.2, algorithm S): they come out in order of arrival. */
static void draw_entries(reuse_sequence *s) {
    const reuse_task *task = s->task;
    int32_t places = task->n_tokens - 1 - task->distance, k = 0;
    for (int32_t i = 0; i < task->n_tokens; i++) {
        rng_block r = draw(s, STREAM_ROLE, i, 0);
        if (i < places && rng_uniform(r.v[0]) * (places - i) < task->n_facts - k) {
            s->probes[2 * k] = i;
            s->token[i] = REUSE_FACT + k++;
        } else s->token[i] = rng_uniform(r.v[1]) < task->distractor_rate ? REUSE_DISTRACTOR : REUSE_FILLER;
    }
}

static int draw_answer(reuse_sequence *s, int32_t k) {
    int32_t first = s->probes[2 * k] + s->task->distance, end = s->task->n_tokens - 1, free = 0;
    for (int32_t t = first; t < end; t++) free += s->target[t] < 0;
    if (!free)
        return err_set(ERR_USAGE, "%d facts find no answers: every step at least %d after the arrival of one is taken",
                       s->task->n_facts, s->task->distance);
    int32_t skip = (int32_t)(rng_uniform(draw(s, STREAM_ANSWER, k, 0).v[0]) * free), t = first;
    for (;; t++)
        if (s->target[t] < 0 && skip-- == 0) break;
    s->target[t] = s->probes[2 * k];
    s->probes[2 * k + 1] = t;
    s->counted[t] = 1;
    return 0;
}

/* Targets of proofs and answers first: the steps that are left may fail. */
static int draw_steps(reuse_sequence *s) {
    const reuse_task *task = s->task;
    for (int32_t t = 0; t < task->n_tokens; t++) s->target[t] = -1;
    for (int32_t k = 0; k < task->n_facts; k++) s->target[s->probes[2 * k] + task->proof] = s->probes[2 * k];
    for (int32_t k = task->n_facts; k-- > 0;) TRY(draw_answer(s, k));
    int32_t distractor = -1; /* the newest before t */
    for (int32_t t = 0; t < task->n_tokens; t++) {
        s->correct[t] = s->target[t] >= 0 || rng_uniform(draw(s, STREAM_ROLE, t, 0).v[2]) >= task->fail_rate;
        if (!s->correct[t]) s->target[t] = distractor;
        if (s->token[t] == REUSE_DISTRACTOR) distractor = t;
    }
    return 0;
}

/* What the predictions say of all this. */
static void draw_signal(reuse_sequence *s) {
    for (int32_t t = 0; t < s->task->n_tokens; t++) {
        rng_block r = draw(s, STREAM_SIGNAL, t, 0);
        if (rng_uniform(r.v[0]) < s->task->flip) s->correct[t] ^= 1;
        if (s->task->always_correct) s->correct[t] = 1;
        double p = (rng_uniform(r.v[1]) + s->correct[t]) / 2;
        s->logprob[t] = (float)log(p);
        s->entropy[t] = (float)(-p * log(p) - (1 - p) * log1p(-p));
    }
}

/* ---- the sequence ----------------------------------------------------------------------------------------------- */

static reuse_sequence *carve(const reuse_task *task, mem_carver *c) {
    size_t T = (size_t)task->n_tokens;
    reuse_sequence *s = mem_carve(c, 1, sizeof *s), made = {.task = task};
    made.token = mem_carve(c, T, sizeof *made.token);
    made.target = mem_carve(c, T, sizeof *made.target);
    made.probes = mem_carve(c, 2 * (size_t)task->n_facts, sizeof *made.probes);
    made.counted = mem_carve(c, T, sizeof *made.counted);
    made.correct = mem_carve(c, T, sizeof *made.correct);
    made.logprob = mem_carve(c, T, sizeof *made.logprob);
    made.entropy = mem_carve(c, T, sizeof *made.entropy);
    if (c->base) *s = made;
    return s;
}

int reuse_draw(const reuse_task *task, int32_t number, reuse_sequence **out) {
    int32_t last = task->n_tokens - 1, places = last > task->distance ? last - task->distance : 0;
    *out = NULL;
    if (task->n_facts > places)
        return err_set(ERR_USAGE, "%d facts do not fit: %d tokens have %d places at least %d before an answer",
                       task->n_facts, task->n_tokens, places, task->distance);
    mem_carver size = {0};
    carve(task, &size);
    mem_carver place = {.base = mem_new(size.used, 1, "reuse task")};
    if (!place.base) return ERR_DATA;
    reuse_sequence *s = *out = carve(task, &place);
    s->number = number;
    draw_entries(s);
    TRY(draw_steps(s));
    draw_signal(s);
    return 0;
}

void reuse_free(reuse_sequence *s) {
    mem_free(s); /* the block it was carved from begins with it */
}

/* ---- rows ------------------------------------------------------------------------------------------------------- */

void reuse_row(const reuse_sequence *s, int head, int32_t t, float *row) {
    const reuse_task *task = s->task;
    int32_t target = s->target[t];
    double share = 0, sum = 0;
    if (target >= 0) share = s->token[target] >= REUSE_FACT ? task->fact_share : task->distractor_share;
    double rest = 1 - share, even = rest * (1 - NEAR_PART) / (t + 1);
    double near = rest * NEAR_PART * (1 - NEAR_RATIO) / (1 - pow(NEAR_RATIO, t + 1)); /* of itself */
    for (int32_t i = t; i >= 0; i--, near *= NEAR_RATIO) {
        double weight = even + near + (i == target ? share : 0);
        weight *= exp(task->noise * rng_normal(draw(s, STREAM_NOISE + (uint32_t)head, i, t)));
        row[i] = (float)weight;
        sum += weight;
    }
    for (int32_t i = 0; i <= t; i++) row[i] = (float)((double)row[i] / sum);
}
