#include "sim/policies/mix.h"
#include "base/err.h"
#include "base/options.h"
#include "base/rng.h"
#include "base/text.h"
#include "sim/policies/arrival.h"
#include "sim/policies/rows.h"
#include "traces/kernels.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef enum mix_evidence {
    EVIDENCE_ATTN,
    EVIDENCE_CORRECT,
    EVIDENCE_CONFIDENCE,
    EVIDENCE_AGREES,
    EVIDENCE_ENTROPY,
    EVIDENCE_FOCUS,
    EVIDENCE_TAU,
    EVIDENCE_OUT,
    EVIDENCE_LOSS,
    EVIDENCE_FISHER,
    EVIDENCE_POSITION,
    EVIDENCE_RANDOM,
    EVIDENCE_ARRIVAL, /* and those behind it, in the order of arrival_kind */
} mix_evidence;

typedef struct mix_plan {
    mix_evidence evidence;
    mix_memory memory;
    double argument; /* alpha, w or L */
    double tau;
    bool tau_per_resident;
    uint64_t seed;
} mix_plan;
_Static_assert(sizeof(mix_plan) <= POLICY_PLAN_BYTES, "plan");

static mix_plan *plan_of(policy_setup *s) {
    return (mix_plan *)(void *)s->plan;
}
static const mix_plan *plan_in(const policy_setup *s) {
    return (const mix_plan *)(const void *)s->plan;
}

/* ---- setting up ------------------------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    bool has_argument;
} memory_kinds[] = {
    [MEMORY_SUM] = {"sum", false},       [MEMORY_MEAN] = {"mean", false},    [MEMORY_EMA] = {"ema", true},
    [MEMORY_LAST] = {"last", false},     [MEMORY_RECENT] = {"recent", true}, [MEMORY_MAX] = {"max", true},
    [MEMORY_AGE] = {"age", false},       [MEMORY_FIRST] = {"first", true},   [MEMORY_PROMPT] = {"prompt", false},
    [MEMORY_STATIC] = {"static", false},
};

int mix_parse_memory(const char *source, mix_memory *kind, const char **argument) {
    const char *colon = strchr(source, ':');
    size_t n = colon ? (size_t)(colon - source) : strlen(source);
    for (size_t k = 0; k < sizeof memory_kinds / sizeof *memory_kinds; k++) {
        if (strlen(memory_kinds[k].name) != n || strncmp(memory_kinds[k].name, source, n) != 0) continue;
        if (memory_kinds[k].has_argument && (!colon || !colon[1]))
            return err_set(ERR_USAGE, "memory '%s' needs an argument, e.g. %s", source,
                           k == MEMORY_EMA || k == MEMORY_MAX ? "ema:0.98" : "first:32");
        if (!memory_kinds[k].has_argument && colon) return err_set(ERR_USAGE, "memory '%s' takes no argument", source);
        *kind = (mix_memory)k;
        *argument = colon ? colon + 1 : NULL;
        return 0;
    }
    static const char all[] = "sum, mean, ema:A, last, recent:W, max:A, age, first:L, prompt, static";
    char hint[OPT_HINT];
    return err_set(ERR_USAGE, "unknown memory '%s'%s (%s)", source, opt_did_you_mean(all, source, strlen(source), hint),
                   all);
}

int mix_check_memory(mix_memory kind, double argument) {
    if ((kind == MEMORY_EMA || kind == MEMORY_MAX) && !(argument >= 0 && argument <= 1))
        return err_set(ERR_USAGE, "memory %s: %g does not lie in 0..1", memory_kinds[kind].name, argument);
    if (kind == MEMORY_RECENT && !(argument >= 1 && argument <= 4096 && argument == floor(argument)))
        return err_set(ERR_USAGE, "memory recent: %g is not a whole number of rows in 1..4096", argument);
    if (kind == MEMORY_FIRST && !(argument >= 0 && argument <= 1e9 && argument == floor(argument)))
        return err_set(ERR_USAGE, "memory first: %g is not a whole number of rows in 0..1e9", argument);
    return 0;
}

/* A preset's memory text may name one of its parameters: "ema:alpha", "first:lag". */
static int init_memory(policy_setup *s, mix_plan *plan) {
    const policy_value *given = policy_get(s, "memory");
    if (given) {
        plan->memory = (mix_memory)given->word;
        plan->argument = given->number;
    } else {
        const char *argument;
        TRY(mix_parse_memory(s->policy->memory, &plan->memory, &argument));
        const policy_value *named = argument ? policy_get(s, argument) : NULL;
        if (argument) plan->argument = named ? named->number : strtod(argument, NULL);
    }
    return mix_check_memory(plan->memory, plan->argument);
}

/* The evidence of that name; attn where there is none, as for attn*signal. */
static mix_evidence evidence_named(const char *name) {
    int word = text_find_word(MIX_EVIDENCE_WORDS, name);
    return word < 0 ? EVIDENCE_ATTN : (mix_evidence)word;
}

static void init_evidence(policy_setup *s, mix_plan *plan) {
    const policy_value *given = policy_get(s, "evidence"), *signal = policy_get(s, "signal");
    static const mix_evidence of_signal[] = {EVIDENCE_CORRECT, EVIDENCE_ATTN, EVIDENCE_CONFIDENCE, EVIDENCE_AGREES,
                                             EVIDENCE_ENTROPY};
    plan->evidence = evidence_named(given ? given->text : s->policy->evidence);
    if (signal && plan->evidence == EVIDENCE_ATTN) plan->evidence = of_signal[signal->word];
}

static bool is_static(mix_evidence evidence) {
    return evidence >= EVIDENCE_POSITION;
}

bool mix_is_static(const char *evidence) {
    return is_static(evidence_named(evidence));
}

static unsigned evidence_needs(mix_evidence evidence) {
    if (evidence >= EVIDENCE_ARRIVAL) return arrival_needs((arrival_kind)(evidence - EVIDENCE_ARRIVAL));
    if (is_static(evidence)) return 0;
    static const unsigned needs[] = {
        [EVIDENCE_CORRECT] = NEEDS_CORRECT,   [EVIDENCE_CONFIDENCE] = NEEDS_CONFIDENCE,
        [EVIDENCE_AGREES] = NEEDS_CONFIDENCE, [EVIDENCE_ENTROPY] = NEEDS_ENTROPY,
        [EVIDENCE_OUT] = NEEDS_OUT,           [EVIDENCE_LOSS] = NEEDS_LOSS,
        [EVIDENCE_FISHER] = NEEDS_FISHER,
    };
    return NEEDS_ROW | needs[evidence];
}

int mix_init(policy_setup *s) {
    mix_plan *plan = plan_of(s);
    *plan = (mix_plan){0};
    init_evidence(s, plan);
    TRY(init_memory(s, plan));
    if (is_static(plan->evidence) != (plan->memory == MEMORY_STATIC))
        return err_set(ERR_USAGE,
                       "%s: evidence position, random, keynorm, valuenorm, outnorm and keysim go with "
                       "memory static, and only they",
                       s->policy->name);
    const policy_value *tau = policy_get(s, "tau");
    if (tau) {
        plan->tau = tau->number;
        plan->tau_per_resident = tau->per_resident;
    }
    const policy_value *seed = policy_get(s, "seed");
    if (seed) plan->seed = (uint64_t)seed->number;
    s->needs = evidence_needs(plan->evidence);
    return 0;
}

size_t mix_state(const policy_setup *s, const policy_shape *shape) {
    mix_evidence evidence = plan_in(s)->evidence;
    return evidence < EVIDENCE_ARRIVAL ? 0 : arrival_state((arrival_kind)(evidence - EVIDENCE_ARRIVAL), shape);
}

int mix_fields(const policy_setup *s) {
    const mix_plan *plan = plan_in(s);
    if (plan->memory == MEMORY_RECENT) return (int)plan->argument;
    return plan->memory == MEMORY_FIRST ? 2 : 1;
}

/* ---- observing -------------------------------------------------------------------------------------------------- */

static double tau_at(const mix_plan *plan, int32_t residents) {
    return plan->tau_per_resident ? plan->tau / residents : plan->tau;
}

static double focus(const policy_view *v) {
    if (v->n < 2) return 1;
    double entropy = 0;
    for (int32_t j = 0; j < v->n; j++) {
        double a = (double)v->row[j];
        if (a > 0) entropy -= a * log(a);
    }
    return 1 - entropy / log(v->n);
}

/* Would a token drawn from the prediction have been the text's? One draw for all units and configurations of a step;
 * the counter is none of those that `random` counts. */
static bool sample_agrees(const mix_plan *plan, const policy_view *v) {
    rng_block b = rng_philox(plan->seed, (uint32_t)v->t, UINT32_MAX, UINT32_MAX, (uint32_t)v->sequence);
    return rng_uniform(b.v[0]) < v->confidence;
}

/* The evidence is the row times a factor common to all entries, but for the threshold. */
static double row_factor(const mix_plan *plan, const policy_view *v) {
    switch (plan->evidence) {
    case EVIDENCE_CORRECT:
        return v->correct ? 1 : 0;
    case EVIDENCE_CONFIDENCE:
        return v->confidence;
    case EVIDENCE_AGREES:
        return sample_agrees(plan, v) ? 1 : 0;
    case EVIDENCE_ENTROPY:
        return exp(-v->entropy);
    case EVIDENCE_FOCUS:
        return focus(v);
    default:
        return 1;
    }
}

static double arrival_value(const mix_plan *plan, const policy_view *v) {
    int32_t i = v->entry[v->n - 1];
    if (plan->evidence == EVIDENCE_POSITION) return i;
    if (plan->evidence >= EVIDENCE_ARRIVAL) return arrival_score((arrival_kind)(plan->evidence - EVIDENCE_ARRIVAL), v);
    return rng_philox(plan->seed, (uint32_t)i, (uint32_t)v->kv_head, (uint32_t)v->layer, (uint32_t)v->sequence).v[0];
}

/* The full run's evidence by position, or NULL where the evidence comes from the unit's own row. */
static const float *evidence_of_full_run(const mix_plan *plan, const policy_view *v) {
    if (plan->evidence == EVIDENCE_OUT) return v->out;
    if (plan->evidence == EVIDENCE_LOSS) return v->loss;
    return plan->evidence == EVIDENCE_FISHER ? v->fisher : NULL;
}

/* First resident whose rows i+1 .. i+L include step t; the newest entry's own row is no such row. */
static int32_t first_open(const policy_view *v, double lag) {
    double guess = v->n - 1 - lag; /* where it stands if none of the younger ones is missing */
    if (guess >= 0 && (double)v->entry[(int32_t)guess] + lag == v->t) return (int32_t)guess;
    int32_t j = v->n;
    while (j > 0 && (double)v->entry[j - 1] + lag >= v->t) j--;
    return j;
}

/* first:L has closed its sums over older entries; the newest one's own row counts until the next comes. */
int32_t mix_first_wanted(const policy_setup *s, const policy_view *v) {
    const mix_plan *plan = plan_in(s);
    if (plan->memory != MEMORY_FIRST || plan->evidence == EVIDENCE_FOCUS) return 0;
    int32_t j = first_open(v, plan->argument);
    return j < v->n ? j : v->n - 1;
}

void mix_observe(const policy_setup *s, const policy_view *v) {
    const mix_plan *plan = plan_in(s);
    double *f = v->field[0], x = plan->argument;
    int32_t n = v->n;
    if (plan->memory == MEMORY_STATIC) {
        f[n - 1] = arrival_value(plan, v);
        return;
    }
    const float *a = v->row;
    double c = row_factor(plan, v), tau = tau_at(plan, n);
    const float *full = evidence_of_full_run(plan, v);
    bool threshold = plan->evidence == EVIDENCE_TAU, own = !threshold && !full; /* the row times a factor */
#define EVIDENCE(j) (threshold ? (double)((double)a[j] >= tau) : full ? (double)full[v->entry[j]] : c * (double)a[j])
    switch (plan->memory) {
    case MEMORY_PROMPT:
        if (v->t >= v->n_prompt) break;
        /* fall through */
    case MEMORY_SUM:
    case MEMORY_MEAN:
        if (own) kernels()->blend(f, a, 1, 1, c, (size_t)n);
        else
            for (int32_t j = 0; j < n; j++) f[j] += EVIDENCE(j);
        break;
    case MEMORY_EMA:
        if (own) kernels()->blend(f, a, x, 1 - x, c, (size_t)n);
        else
            for (int32_t j = 0; j < n; j++) f[j] = x * f[j] + (1 - x) * EVIDENCE(j);
        break;
    case MEMORY_LAST:
        for (int32_t j = 0; j < n; j++) f[j] = EVIDENCE(j);
        break;
    case MEMORY_MAX:
        for (int32_t j = 0; j < n; j++) f[j] = fmax(x * f[j], EVIDENCE(j));
        break;
    case MEMORY_RECENT: /* a ring of rows */
        f = v->field[v->t % (int32_t)x];
        for (int32_t j = 0; j < n; j++) f[j] = EVIDENCE(j);
        break;
    case MEMORY_AGE:
        for (int32_t j = 0; j < n; j++)
            if (j == n - 1 || (threshold ? (double)a[j] : EVIDENCE(j)) >= tau) f[j] = v->t;
        break;
    default: { /* MEMORY_FIRST: field 0 sums the rows after arrival, field 1 is their mean; before them, the own row */
        int32_t open = first_open(v, x);
        double *mean = v->field[1];
        if (own && open < n - 1)
            kernels()->add_mean(f + open, mean + open, a + open, v->entry + open, c, v->t, (size_t)(n - 1 - open));
        for (int32_t j = open; !own && j < n - 1; j++) {
            f[j] += EVIDENCE(j);
            mean[j] = f[j] / (v->t - v->entry[j]);
        }
        mean[n - 1] = (double)a[n - 1];
    }
    }
#undef EVIDENCE
}

/* ---- scoring ---------------------------------------------------------------------------------------------------- */

const double *mix_score(const policy_setup *s, const policy_view *v, double *scratch) {
    const mix_plan *plan = plan_in(s);
    const double *f = v->field[0];
    switch (plan->memory) {
    case MEMORY_MEAN:
        for (int32_t j = 0; j < v->n; j++) scratch[j] = f[j] / (v->t - v->entry[j] + 1);
        return scratch;
    case MEMORY_RECENT:
        rows_sum(v, (int)plan->argument, scratch);
        return scratch;
    case MEMORY_FIRST:
        return v->field[1];
    default:
        return f;
    }
}
