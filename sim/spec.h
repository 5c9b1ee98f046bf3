/* The grammar of policy specs: NAME, or NAME(ARGUMENT,...) where ARGUMENT is KEY=VALUE or a positional VALUE, and VALUE
 * may be a list a|b|c; or a wrapper around a spec (wrapper.h), which ends up as parameters of the policy inside.
 * `rmm(lag=0|8|64,signal=uniform)`, `oracle(mass)`, `mix(evidence=attn,memory=ema:0.98,hold=16)`, `lag(8,ada(h2o))`.
 */
#pragma once

#include "sim/policy.h"

enum { SPEC_VALUES_MAX = 64 };

typedef struct spec {
    const policy *policy;
    /* Values given for each parameter, in canonical form; n = 0 where none was given. */
    struct {
        char (*value)[POLICY_TEXT_MAX];
        size_t n;
    } param[POLICY_PARAMS_MAX];
} spec;

/* Returns 0 or ERR_USAGE. Release with spec_free either way. */
int spec_parse(const char *source, spec *out);
void spec_free(spec *s);

/* Bring one value of a parameter into canonical form, checking syntax and range as far as they do not depend on budget
 * and lag. ERR_USAGE names the parameter. */
int spec_canonical(const policy_param *p, const char *value, char out[POLICY_TEXT_MAX]);

/* Words that a parameter's value can be or, where one ends in ':', begin with: "step|every:|watermark:"; also
 * expressions that are worth a hint. "" where there are none but numbers. */
const char *spec_words(const policy_param *p);

/* Evaluate a canonical value, or "" for a parameter that has none. `lag` < 0 = none: "lag" is then an error. */
int spec_evaluate(const policy_param *p, const char *canonical, int32_t budget, int32_t lag, policy_value *out);

/* The family (policy_family) whose calibration applies to a spec, or -1 for one that is not ours. */
int spec_family(const char *source);

/* Does a spec of ours tie its hold to its lag? False for one that is not ours. */
bool spec_hold_is_lag(const char *source);

#define SPEC_SCHEDULE_WORDS "step|every:|watermark:|block:|prompt"
/* "every:8" -> kind and argument. */
int spec_parse_schedule(const char *source, int *kind, double *argument);
