/* Replay: one unit of one configuration, step by step, to lifetimes (DESIGN sections 1 and 4). The only place where
 * entries are evicted; sim feeds it rows of a trace, closed-loop verify (later) rows of a running model.
 *
 * A replay is reused for one unit after another of the same configuration and sequence. */
#pragma once

#include "sim/config.h"
#include "traces/kernels.h"

typedef struct replay replay;

/* What is known about step t apart from attention. */
typedef struct replay_facts {
    bool correct;      /* the prediction made at step t was right; false at step T-1 */
    double confidence; /* exp(target_logprob[t]); 0 at step T-1 */
    double entropy;    /* of the prediction, nats; 0 at step T-1 or where the trace does not say */
    bool counted;
} replay_facts;

/* Where a unit stands in the model. */
typedef struct replay_unit {
    int32_t sequence, layer, kv_head; /* kv_head 0 where the unit is a layer, layer 0 too where a model */
    int32_t window;                   /* 0 = none */
    int n_head;                       /* query heads of the unit */
    const policy_layer *data;         /* for policies that need it, else may be NULL; outlives the unit's replay */
} replay_unit;

/* For units of one shape. `config` must outlive the replay. Returns 0 or ERR_DATA. */
int replay_new(const sim_config *config, int32_t n_tokens, const policy_shape *shape, replay **out);
void replay_free(replay *r);                                                                /* accepts NULL */
size_t replay_bytes(const sim_config *config, int32_t n_tokens, const policy_shape *shape); /* of replay_new */

/* Start a unit. evict_at [kernel_pad(T)] is filled with T+1 and then written as entries leave. */
void replay_begin(replay *r, const replay_unit *unit, int32_t *evict_at);

/* What the full run knows of the coming step (see policy_view), [t+1] each: needed where the policy has NEEDS_OUT,
 * _LOSS, _FISHER or _FUTURE. */
void replay_offer(replay *r, const float *out, const float *loss, const float *fisher, const double *future);

/* Step t (0, 1, ... in order), in two halves: up to what the policy takes in, then what leaves. heads[h] points to
 * query head h's full row, [t+1] f32, and stays as it is until replay_evict. */
void replay_attend(replay *r, int32_t t, const float *const *heads, const replay_facts *facts);
void replay_evict(replay *r);
/* The same for units that compete (share): what leaves them leaves from the sum of their budgets. All have taken in the
 * same step. One unit alone is replay_evict. */
void replay_evict_together(replay *const *units, int n);
/* replay_attend and replay_evict. */
void replay_step(replay *r, int32_t t, const float *const *heads, const replay_facts *facts);

/* Between the halves of step t: what its row does not see, as bit i % 16 of gone[i / 16], for i < pad(t + 1). Nothing
 * is written while nothing is missing. */
void replay_gone(const replay *r, uint16_t *gone);

/* So far: the lowest step that misses an entry (T+1 if none does), and one past the highest entry that left (0). */
void replay_range(const replay *r, int32_t *first_missing, int32_t *left_end);

/* So far, over the steps after the prompt: how many entries' memory the policy brought up to date, which are those
 * whose value in the unit's row it looked at; 0 for policies that look at no row. */
int64_t replay_updates(const replay *r);

/* So far: were all scores of policies from plugins finite? ERR_DATA names the first that was not; it counted as 0. */
int replay_check(const replay *r);

/* Residents after the last step, ascending. */
const int32_t *replay_residents(const replay *r, int32_t *n);

/* ---- a memory shared with others (pool.h), after replay_evict of the step at hand ------------------------------- */

const sim_config *replay_config(const replay *r);
/* Entries held, and how many of them may leave: no sinks, none that are held. Under schedule block the latter is an
 * upper bound. */
int32_t replay_held(const replay *r);
int32_t replay_spare(replay *r);
/* The k lowest leave, whole blocks under schedule block; scores are those of the step. Returns how many did. */
int32_t replay_give(replay *r, int32_t k);
/* The k lowest of several units leave, each score taken over the mean magnitude of its unit's scores at that moment
 * (over 1 where that is 0); ties go to the first unit, then to the lowest index. Not for schedule block. */
void replay_give_lowest(replay *const *units, int n, int64_t k);
