/* From what was asked (specs, budgets, lags, flags) to configurations that can be replayed.
 *
 * An ask does not know T yet. It becomes a config for one sequence: shares, "budget/2", "lag" get numbers. A spec beats
 * a command-line flag, which beats the policy's default (DESIGN section 5). */
#pragma once

#include "base/text.h"
#include "sim/policy.h"

typedef enum schedule_kind {
    SCHEDULE_STEP,
    SCHEDULE_EVERY,
    SCHEDULE_WATERMARK,
    SCHEDULE_BLOCK,
    SCHEDULE_PROMPT
} schedule_kind;

typedef enum unit_kind { UNIT_HEAD, UNIT_LAYER, UNIT_MODEL } unit_kind;

/* Whose units compete for the sum of their budgets. */
typedef enum share_kind { SHARE_NONE, SHARE_LAYER, SHARE_MODEL } share_kind;

/* One configuration as asked. Texts are canonical: numbers in shortest form, aliases resolved. */
typedef struct sim_ask {
    const policy *policy;
    char param[POLICY_PARAMS_MAX][POLICY_TEXT_MAX]; /* every parameter's text, defaults filled in */
    char budget[POLICY_TEXT_MAX];                   /* "64", "25%"; "" for full */
    bool pending_free;
    bool in_grid;  /* one point of many: skipped, not refused, where it cannot run */
    bool optional; /* of the default set: left out where the trace lacks what it needs */
} sim_ask;

typedef struct sim_asks {
    sim_ask *ask;
    size_t n, capacity;
} sim_asks;

/* What the command line says beside the specs; NULL or empty = not said. */
typedef struct sim_flags {
    const char *budgets, *lags; /* "64,128,25%"; "0:64:x2,budget/2" */
    const char *schedule, *unit;
    const char *pending; /* "charged", "free", "both" */
    const char *seed;
    int32_t n_prompt; /* -1 = the trace's */
    bool is_shared;   /* entries may leave for others' sake (pool.h), even from a sequence within its budget */
} sim_flags;

/* Parse n specs and combine them with the flags; n = 0 gives the default set. Equal asks are kept once.
 * ERR_USAGE names the spec and what is wrong in it. Release with sim_asks_free. */
int sim_asks_build(const char *const *specs, size_t n, const sim_flags *flags, sim_asks *out);
void sim_asks_free(sim_asks *asks);

/* Entries that cannot leave: the first `sinks`, and ages 0 .. hold-1. */
typedef struct sim_guard {
    int32_t sinks, hold;
} sim_guard;

/* What a unit of one layer may hold. */
typedef struct sim_limits {
    int32_t budget;          /* entries after the evict phase */
    int32_t target;          /* residents after an eviction */
    int32_t least;           /* entries it keeps where it competes */
    sim_guard guard, prompt; /* prompt: of the eviction at the prompt's end, where another policy makes it */
} sim_limits;

/* The policy that makes the eviction at the prompt's end: its own evidence, memory, guard and row; unit, budget and
 * sharing are those of the policy that goes on. */
typedef struct sim_prompt {
    policy_setup setup;
    bool take_max;
} sim_prompt;

/* A configuration for one sequence. */
typedef struct sim_config {
    policy_setup setup;
    sim_prompt *prompt; /* owned; NULL = none */
    unsigned needs;     /* of both; 0 where nothing ever leaves */
    bool is_resolved;   /* everything below holds: sim_config_resolve returned 0 */
    bool is_full;       /* nothing ever leaves: policy full, or a budget of T and more */
    int32_t budget;     /* entries per unit after the evict phase, the mean over layers */
    int32_t lag;        /* -1 = none */
    int32_t cutoff;     /* rows after its arrival at which an entry's score is frozen; -1 = never */
    int32_t hold, sinks;
    int32_t n_prompt;
    bool pending_free;
    bool waits;                /* its hold is tied to its lag: entries younger than the hold pend */
    int kv_bits, pending_bits; /* an entry's, and one's that pends: 16 (after resolving, both), 8 or 4; see widths.h */
    bool take_max;
    unit_kind unit;
    share_kind share;
    double floor;       /* share of its target that a unit keeps where it competes */
    double first, last; /* budgets of the first and the last layer, before rounding */
    schedule_kind schedule;
    double schedule_argument; /* P, f or n */
    int32_t target;           /* residents after an eviction */

    char budget_asked[POLICY_TEXT_MAX];
    char schedule_text[POLICY_TEXT_MAX];
    char *spec;     /* owned */
    char *resolved; /* owned: every parameter with its value */
} sim_config;

/* "head", "layer", "model". */
const char *sim_unit_name(unit_kind unit);

/* What a configuration that is not full means in layer `layer` of n_layer. With a taper budgets fall in equal steps
 * from the first layer to the last, B on average; "budget/n" of hold and sinks goes by the layer's budget. */
sim_limits sim_config_limits(const sim_config *c, int layer, int n_layer);

/* Resolve for a sequence of n_tokens with the trace's n_prompt (raised by flags->n_prompt). ERR_USAGE where the point
 * cannot run (hold + sinks above the target, ...). Release with sim_config_free either way. */
int sim_config_resolve(const sim_ask *ask, const sim_flags *flags, int32_t n_tokens, int32_t n_prompt, sim_config *out);
void sim_config_free(sim_config *c);
/* Do two configurations of one sequence evict the same entries at the same times? What they keep them in is not asked.
 */
bool sim_config_same(const sim_config *a, const sim_config *b);

/* "rmm(signal=uniform) budget 25% lag 8": for messages. Owned by the caller. */
char *sim_ask_name(const sim_ask *ask);
/* The spec column of an ask: the policy's name and the parameters that differ from its defaults; lag and schedule,
 * which have columns of their own, are left out. */
int sim_ask_spec(const sim_ask *ask, text *out);
