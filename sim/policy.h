/* The contract of an eviction policy (DESIGN section 5): a const struct and a row in the registry.
 *
 * A policy only scores. The engine (replay.h) owns the resident set, the guards (sinks, hold), budgets, schedules and
 * the evictions; the lowest score leaves first. Call order, for each unit on its own:
 *
 *     init      once per configuration, after its parameters are resolved
 *     observe   in every step, after the new entry was appended and the unit's row was taken over the residents
 *     score     after observe of the same step, once at most: when something must leave, or when the score of an entry
 *               is frozen (cutoff), which may be within the prompt
 *
 * A policy keeps its per-entry memory in `fields`: arrays of f64 parallel to the residents, which the engine shifts
 * when entries leave and zeroes when one arrives; and what belongs to the unit as a whole (a mean key, a count) in
 * `state`, zeroed when the unit begins. It must not keep state anywhere else: units are replayed by several threads at
 * once, in no fixed order.
 *
 * Policies come from the registry, or from a plugin: a shared object that defines `kvlag_policies` (below) and is named
 * by --plugin. Of kvlag's functions a plugin may call policy_get, and err_set of base/err.h in `init`: kvlag exports
 * both, so it is linked with nothing. docs/adding-a-policy.md builds one. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { POLICY_ABI = 2, POLICY_PARAMS_MAX = 24, POLICY_PLAN_BYTES = 64, POLICY_TEXT_MAX = 64 };

/* ---- parameters ------------------------------------------------------------------------------------------------- */

typedef enum param_type {
    PARAM_COUNT,    /* integer >= min; or "lag", "budget/n"; "" where the default is none */
    PARAM_NUMBER,   /* decimal in [min, max]; or "c/resident" where per_resident is allowed */
    PARAM_WORD,     /* one of `words` "a|b|c" */
    PARAM_MEMORY,   /* a memory kind of mix: "sum", "ema:0.98", "first:lag" ... */
    PARAM_SCHEDULE, /* "step", "every:P", "watermark:f", "block:n", "prompt" */
    PARAM_POLICY,   /* "none", or a policy: "snapkv", "ema(alpha=0.9)" */
} param_type;

typedef struct policy_param {
    const char *name;
    const char *alias; /* another spelling, resolved to `name`; NULL = none */
    param_type type;
    const char *initial; /* default text; NULL = must be given */
    const char *words;   /* PARAM_WORD */
    double min, max;
    bool per_resident; /* PARAM_NUMBER: "1/resident" is allowed */
    bool infinite;     /* PARAM_COUNT: "inf" is allowed */
    bool positional;   /* may be given without its name, in declared order */
    const char *help;
} policy_param;

/* A parameter's value once budget and lag are known. */
typedef struct policy_value {
    char text[POLICY_TEXT_MAX]; /* as written, in canonical form */
    double number;              /* COUNT, NUMBER; the argument of MEMORY and SCHEDULE (0 if it has none) */
    bool per_resident;          /* number is to be divided by the number of residents */
    bool tied_to_lag;           /* was written as "lag" (or "first:lag") */
    int word;                   /* index into words; kind of MEMORY or SCHEDULE */
} policy_value;

/* ---- what a policy sees ----------------------------------------------------------------------------------------- */

typedef enum policy_needs {
    NEEDS_ROW = 1,        /* the unit's renormalised row; without it the engine takes none */
    NEEDS_CORRECT = 2,    /* logits/correct */
    NEEDS_CONFIDENCE = 4, /* logits/target_logprob */
    NEEDS_FUTURE = 8,     /* sums of the full run's coming rows (with NEEDS_FISHER: of that evidence) */
    NEEDS_OUT = 16,       /* evidence `out` of the full run; like FUTURE, these are not for closed loop */
    NEEDS_LOSS = 32,      /* evidence `loss` */
    NEEDS_FISHER = 64,    /* evidence `fisher` */
    NEEDS_ENTROPY = 128,  /* logits/entropy */
    NEEDS_KEYS = 256,     /* policy_layer.k; like the next four, not for closed loop */
    NEEDS_VALUES = 512,   /* policy_layer.v */
    NEEDS_QUERIES = 1024, /* policy_layer.q */
    NEEDS_WO = 2048,      /* policy_layer.wo and n_embd */
    NEEDS_ROPE = 4096,    /* policy_layer.rope_base and rope_dims */
} policy_needs;

/* Sizes of a unit: a kv head with its query heads, a layer, or a whole model. */
typedef struct policy_shape {
    int32_t n_layer;      /* of the model */
    int32_t n_head, n_kv; /* of the unit; query head h reads kv head h / (n_head / n_kv) */
    int32_t head_dim, n_embd;
} policy_shape;

/* What the trace holds of the unit's layer: f32, owned by the engine, NULL where not asked for by `needs`. A policy
 * looks at positions 0 .. t only. */
typedef struct policy_layer {
    policy_shape shape;
    const float *const *k;  /* [n_kv] -> [T][head_dim] keys, after RoPE */
    const float *const *v;  /* [n_kv] -> [T][head_dim] values */
    const float *const *q;  /* [n_head] -> [T][head_dim] queries, after RoPE */
    const float *const *wo; /* [n_head] -> [head_dim][n_embd] the head's part of the output projection */
    double scale;           /* scores are scale * q.k */
    double rope_base;       /* rotation of pair c in position p by p * rope_base^(-2c/rope_dims) */
    int32_t rope_dims;
    bool rope_interleaved; /* pairs are (2c, 2c+1), else (c, c + rope_dims/2) */
} policy_layer;

typedef struct policy_setup {
    const struct policy *policy;
    policy_value value[POLICY_PARAMS_MAX]; /* parallel to policy->params */
    unsigned needs;
    double horizon; /* with NEEDS_FUTURE: how many rows ahead it looks, INFINITY = all of them; set by init */
    double plan[POLICY_PLAN_BYTES / sizeof(double)]; /* private to the policy, filled by init */
} policy_setup;

/* One unit in step t. Arrays have n elements unless said otherwise; the newest entry (t itself) is the last. */
typedef struct policy_view {
    int32_t t, n;
    const int32_t *entry; /* resident positions, ascending */
    const float *row;     /* renormalised over the residents, mean (or max) over query heads; NULL without NEEDS_ROW */
    double *const *field; /* [n_fields][n] the policy's memory */
    const float *const *heads; /* [n_head][t+1] the full rows of the unit's query heads */
    int n_head;
    const policy_layer *data; /* keys, values ...: see its members and `needs` */
    double *state;            /* the policy's memory of the unit */
    int32_t n_prompt;         /* steps before it are the prompt */
    double entropy;           /* nats, of the prediction made at step t; 0 at the last step */
    bool correct;             /* the prediction made at step t was right; false at the last step */
    double confidence;        /* probability given to the true next token; 0 at the last step */
    bool counted;             /* step t is counted */
    /* [t+1] by position: what the full run's mean row (with NEEDS_FISHER: its evidence `fisher`) adds up to over the
     * counted rows among t+1 .. t+horizon. Meaningful with NEEDS_FUTURE only. */
    const double *future;
    /* [t+1] evidence of the full run's row, by position (DESIGN section 5); meaningful with NEEDS_OUT, NEEDS_LOSS,
     * NEEDS_FISHER only. */
    const float *out, *loss, *fisher;
    int32_t sequence, layer, kv_head; /* kv_head is 0 where the unit spans several */
} policy_view;

typedef enum policy_family { FAMILY_WINDOW, FAMILY_STATIC, FAMILY_ATTENTION, FAMILY_ORACLE } policy_family;

typedef struct policy {
    int abi; /* POLICY_ABI */
    const char *name;
    const char *help;   /* one line */
    const char *source; /* paper or code it follows */
    policy_family family;
    const char *evidence, *memory; /* its axes, for mix_init and `kvlag policies`; NULL for policies of another kind */
    const policy_param *params;    /* name == NULL ends the list */

    /* Fill s->plan and s->needs from s->value. Returns 0 or ERR_USAGE for values that do not go together. */
    int (*init)(policy_setup *s);
    /* Number of per-entry arrays. */
    int (*fields)(const policy_setup *s);
    /* Number of f64 in the unit's state. NULL = none. */
    size_t (*state)(const policy_setup *s, const policy_shape *shape);
    void (*observe)(const policy_setup *s, const policy_view *v);
    /* The first resident, below n, whose value in the coming row `observe` will look at: what is before is not
     * computed. NULL = all are. */
    int32_t (*first_wanted)(const policy_setup *s, const policy_view *v);
    /* The scores of all residents: one of the policy's fields, or computed into `scratch` [n]. Must be finite. */
    const double *(*score)(const policy_setup *s, const policy_view *v, double *scratch);
} policy;

/* What a plugin defines: its policies, then NULL. */
extern const policy *const kvlag_policies[] __attribute__((visibility("default")));

/* The value of a parameter by name; NULL if the policy has none of that name. */
const policy_value *policy_get(const policy_setup *s, const char *name);

#define POLICY_SEED \
    { .name = "seed", .type = PARAM_COUNT, .initial = "0", .max = 9007199254740992.0, .help = "of the random numbers" }

/* Parameters every policy has (the engine's guards, unit, sharing and schedule), to close a params[] array with. A
 * policy whose lag_ is "" has a lag only where hold or cutoff is tied to it. The wrappers of specs (wrapper.h) are
 * other spellings of cutoff, share, floor, taper, prompt and schedule. */
#define POLICY_GUARDS(sinks_, hold_, unit_, lag_) POLICY_GUARDS_ROW(sinks_, hold_, unit_, lag_, "mean")
#define POLICY_GUARDS_ROW(sinks_, hold_, unit_, lag_, row_)                                                          \
    {.name = "sinks", .type = PARAM_COUNT, .initial = sinks_, .max = 1e9, .help = "first entries that never leave"}, \
        {.name = "hold",                                                                                             \
         .alias = "recent",                                                                                          \
         .type = PARAM_COUNT,                                                                                        \
         .initial = hold_,                                                                                           \
         .max = 1e9,                                                                                                 \
         .help = "ages 0..hold-1 cannot leave; hold=lag ties it to the lag"},                                        \
        {.name = "lag",                                                                                              \
         .type = PARAM_COUNT,                                                                                        \
         .initial = lag_,                                                                                            \
         .max = 1e9,                                                                                                 \
         .help = "rows after an entry's arrival before it is judged"},                                               \
        {.name = "cutoff",                                                                                           \
         .type = PARAM_COUNT,                                                                                        \
         .initial = "",                                                                                              \
         .max = 1e9,                                                                                                 \
         .help = "rows after an entry's arrival at which its score is frozen; cutoff=lag ties it to the lag"},       \
        {.name = "unit",                                                                                             \
         .type = PARAM_WORD,                                                                                         \
         .initial = unit_,                                                                                           \
         .words = "head|layer|model",                                                                                \
         .help = "what evicts on its own: a kv head, or all heads of a layer or of the model together"},             \
        {.name = "share",                                                                                            \
         .type = PARAM_WORD,                                                                                         \
         .initial = "none",                                                                                          \
         .words = "none|layer|model",                                                                                \
         .help = "units that compete for the sum of their budgets"},                                                 \
        {.name = "floor",                                                                                            \
         .type = PARAM_NUMBER,                                                                                       \
         .initial = "0.2",                                                                                           \
         .max = 1,                                                                                                   \
         .help = "share of its own budget that a unit keeps where it competes"},                                     \
        {.name = "row",                                                                                              \
         .type = PARAM_WORD,                                                                                         \
         .initial = row_,                                                                                            \
         .words = "mean|max",                                                                                        \
         .help = "how the query heads of a unit join into one row"},                                                 \
        {.name = "taper",                                                                                            \
         .type = PARAM_NUMBER,                                                                                       \
         .initial = "1",                                                                                             \
         .min = 1,                                                                                                   \
         .max = 1e9,                                                                                                 \
         .help = "budgets fall from the first to the last layer, which gets budget/taper"},                          \
        {.name = "prompt",                                                                                           \
         .type = PARAM_POLICY,                                                                                       \
         .initial = "none",                                                                                          \
         .help = "another policy, which makes the eviction at the prompt's end"},                                    \
        {.name = "schedule",                                                                                         \
         .type = PARAM_SCHEDULE,                                                                                     \
         .initial = "step",                                                                                          \
         .help = "when to evict: step, every:P, watermark:f, block:n, prompt"},                                      \
    {                                                                                                                \
        .name = NULL                                                                                                 \
    }
