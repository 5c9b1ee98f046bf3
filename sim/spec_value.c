/* Values of parameters: canonical form, and what they come to once budget and lag are known. */
#include "base/err.h"
#include "base/options.h"
#include "base/text.h"
#include "sim/config.h"
#include "sim/policies/mix.h"
#include "sim/spec.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* "budget/2" -> 2; "budget" -> 1; 0 if it is no such expression. */
static double budget_divisor(const char *value) {
    double n;
    if (strcmp(value, "budget") == 0) return 1;
    if (strncmp(value, "budget/", 7) != 0 || text_parse_number(value + 7, &n) != 0) return 0;
    return n >= 1 && n <= 1e9 && n == floor(n) ? n : 0;
}

/* "1/resident" -> 1; negative if it is no such expression. */
static double resident_factor(const char *value) {
    const char *slash = strchr(value, '/');
    char number[POLICY_TEXT_MAX];
    double c;
    if (!slash || strcmp(slash, "/resident") != 0 || slash == value || slash - value >= POLICY_TEXT_MAX) return -1;
    snprintf(number, sizeof number, "%.*s", (int)(slash - value), value);
    return text_parse_number(number, &c) == 0 && c >= 0 ? c : -1;
}

static int out_of_range(const policy_param *p, const char *value) {
    return err_set(ERR_USAGE, "%s=%s is out of range (%g to %g)", p->name, value, p->min, p->max);
}

static int count_canonical(const policy_param *p, const char *value, char *out) {
    double x;
    if ((strcmp(value, "lag") == 0 && strcmp(p->name, "lag") != 0) || budget_divisor(value) > 0) {
        snprintf(out, POLICY_TEXT_MAX, "%s", value);
        return 0;
    }
    if (p->infinite && strcmp(value, "inf") == 0) {
        snprintf(out, POLICY_TEXT_MAX, "%s", value);
        return 0;
    }
    if (text_parse_number(value, &x) != 0 || x != floor(x))
        return err_set(ERR_USAGE, "%s=%s is not a whole number (or an expression such as budget/2)", p->name, value);
    if (x < p->min || x > p->max) return out_of_range(p, value);
    snprintf(out, POLICY_TEXT_MAX, "%.0f", x + 0.0); /* -0 becomes 0 */
    return 0;
}

static int number_canonical(const policy_param *p, const char *value, char *out) {
    double x = resident_factor(value);
    char number[32];
    if (p->per_resident && x >= 0) {
        snprintf(out, POLICY_TEXT_MAX, "%s/resident", text_number(number, x));
        return 0;
    }
    if (text_parse_number(value, &x) != 0) return err_set(ERR_USAGE, "%s=%s is not a number", p->name, value);
    if (x < p->min || x > p->max) return out_of_range(p, value);
    snprintf(out, POLICY_TEXT_MAX, "%s", text_number(number, x));
    return 0;
}

static int memory_canonical(const char *value, char *out) {
    mix_memory kind;
    const char *argument;
    double x;
    char number[32];
    TRY(mix_parse_memory(value, &kind, &argument));
    if (!argument || strcmp(argument, "lag") == 0 || budget_divisor(argument) > 0) {
        snprintf(out, POLICY_TEXT_MAX, "%s", value);
        return 0;
    }
    if (text_parse_number(argument, &x) != 0)
        return err_set(ERR_USAGE, "memory=%s: '%s' is not a number", value, argument);
    TRY(mix_check_memory(kind, x));
    snprintf(out, POLICY_TEXT_MAX, "%.*s:%s", (int)(argument - value - 1), value, text_number(number, x));
    return 0;
}

int spec_parse_schedule(const char *source, int *kind, double *argument) {
    static const struct {
        const char *name;
        bool has_argument, whole;
        double min, max;
    } kinds[] = {
        [SCHEDULE_STEP] = {"step", false, false, 0, 0},          [SCHEDULE_EVERY] = {"every", true, true, 1, 1e9},
        [SCHEDULE_WATERMARK] = {"watermark", true, false, 0, 1}, [SCHEDULE_BLOCK] = {"block", true, true, 1, 1e9},
        [SCHEDULE_PROMPT] = {"prompt", false, false, 0, 0},
    };
    const char *colon = strchr(source, ':');
    size_t n = colon ? (size_t)(colon - source) : strlen(source);
    for (int k = 0; k < (int)(sizeof kinds / sizeof *kinds); k++) {
        if (strlen(kinds[k].name) != n || strncmp(kinds[k].name, source, n) != 0) continue;
        *kind = k;
        *argument = 0;
        if (!kinds[k].has_argument && !colon) return 0;
        if (kinds[k].has_argument && colon && text_parse_number(colon + 1, argument) == 0 &&
            *argument >= kinds[k].min && *argument <= kinds[k].max && *argument > 0 &&
            (!kinds[k].whole || *argument == floor(*argument)))
            return 0;
        return err_set(ERR_USAGE, "schedule '%s': want step, every:P, watermark:f (0 < f <= 1), block:n or prompt",
                       source);
    }
    char hint[OPT_HINT];
    return err_set(ERR_USAGE, "unknown schedule '%s'%s (step, every:P, watermark:f, block:n, prompt)", source,
                   opt_did_you_mean("step|every:P|watermark:f|block:n|prompt", source, strlen(source), hint));
}

static int schedule_canonical(const char *value, char *out) {
    int kind;
    double x;
    char number[32];
    TRY(spec_parse_schedule(value, &kind, &x));
    if (!strchr(value, ':')) snprintf(out, POLICY_TEXT_MAX, "%s", value);
    else snprintf(out, POLICY_TEXT_MAX, "%.*s:%s", (int)strcspn(value, ":"), value, text_number(number, x));
    return 0;
}

/* The policy that goes on brings what has to hold for both. */
static bool is_of_the_whole(const char *param) {
    static const char *const names[] = {"cutoff", "unit", "share", "floor", "taper", "prompt", "schedule"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(names[i], param) == 0) return true;
    return false;
}

static int write_policy(const spec *s, text *out) {
    int written = 0;
    if (!s->policy->params[0].name) return err_set(ERR_USAGE, "'%s' evicts nothing", s->policy->name);
    TRY(text_add(out, "%s", s->policy->name));
    for (int i = 0; s->policy->params[i].name; i++) {
        const policy_param *p = &s->policy->params[i];
        if (!s->param[i].n && !p->initial) return err_set(ERR_USAGE, "%s needs %s", s->policy->name, p->name);
        if (!s->param[i].n) continue;
        if (s->param[i].n > 1) return err_set(ERR_USAGE, "%s: a list cannot stand in it", p->name);
        if (is_of_the_whole(p->name)) return err_set(ERR_USAGE, "%s is a matter of the policy that goes on", p->name);
        if (p->initial && strcmp(p->initial, s->param[i].value[0]) == 0) continue;
        TRY(text_add(out, "%c%s%s%s", written++ ? ',' : '(', p->positional ? "" : p->name, p->positional ? "" : "=",
                     s->param[i].value[0]));
    }
    return written ? text_add(out, ")") : 0;
}

static int policy_canonical(const policy_param *p, const char *value, char *out) {
    spec s;
    text t = {0};
    if (strcmp(value, "none") == 0) {
        snprintf(out, POLICY_TEXT_MAX, "%s", value);
        return 0;
    }
    int code = spec_parse(value, &s);
    if (!code) code = write_policy(&s, &t);
    if (!code && t.n >= POLICY_TEXT_MAX) code = err_set(ERR_USAGE, "the value is too long");
    if (!code) snprintf(out, POLICY_TEXT_MAX, "%s", t.data);
    text_free(&t);
    spec_free(&s);
    return code ? err_prefix(code, "%s=%s", p->name, value) : 0;
}

int spec_canonical(const policy_param *p, const char *value, char out[POLICY_TEXT_MAX]) {
    char hint[OPT_HINT];
    if (strlen(value) >= POLICY_TEXT_MAX - 16) return err_set(ERR_USAGE, "%s: the value is too long", p->name);
    switch (p->type) {
    case PARAM_COUNT:
        return count_canonical(p, value, out);
    case PARAM_NUMBER:
        return number_canonical(p, value, out);
    case PARAM_MEMORY:
        return memory_canonical(value, out);
    case PARAM_SCHEDULE:
        return schedule_canonical(value, out);
    case PARAM_POLICY:
        return policy_canonical(p, value, out);
    default:
        if (text_find_word(p->words, value) < 0)
            return err_set(ERR_USAGE, "%s=%s is not one of %s%s", p->name, value, p->words,
                           opt_did_you_mean(p->words, value, strlen(value), hint));
        snprintf(out, POLICY_TEXT_MAX, "%s", value);
        return 0;
    }
}

const char *spec_words(const policy_param *p) {
    switch (p->type) {
    case PARAM_COUNT:
        return strcmp(p->name, "lag") == 0 ? "budget/2" : p->infinite ? "inf|lag|budget/2" : "lag|budget/2";
    case PARAM_NUMBER:
        return p->per_resident ? "1/resident" : "";
    case PARAM_MEMORY:
        return MIX_MEMORY_WORDS;
    case PARAM_SCHEDULE:
        return SPEC_SCHEDULE_WORDS;
    case PARAM_POLICY:
        return "none";
    default:
        return p->words;
    }
}

static int evaluate_count(const policy_param *p, const char *value, int32_t budget, int32_t lag, policy_value *out) {
    double n = budget_divisor(value);
    if (n > 0) {
        out->number = floor(budget / n);
    } else if (strcmp(value, "lag") == 0) {
        if (lag < 0) return err_set(ERR_USAGE, "%s=lag needs a lag (lag=N in the spec, or -L)", p->name);
        out->number = lag;
        out->tied_to_lag = true;
    } else {
        TRY(text_parse_number(value, &out->number) ? err_set(ERR_USAGE, "%s=%s is not a number", p->name, value) : 0);
    }
    return 0;
}

int spec_evaluate(const policy_param *p, const char *canonical, int32_t budget, int32_t lag, policy_value *out) {
    *out = (policy_value){0};
    snprintf(out->text, sizeof out->text, "%s", canonical);
    switch (p->type) {
    case PARAM_COUNT:
        return *canonical ? evaluate_count(p, canonical, budget, lag, out) : 0;
    case PARAM_NUMBER: {
        double c = resident_factor(canonical);
        if (!*canonical) return 0;
        out->per_resident = c >= 0;
        out->number = c;
        return c < 0 && text_parse_number(canonical, &out->number) ? err_set(ERR_USAGE, "%s: not a number", p->name)
                                                                   : 0;
    }
    case PARAM_MEMORY: {
        mix_memory kind;
        const char *argument;
        TRY(mix_parse_memory(canonical, &kind, &argument));
        out->word = (int)kind;
        return argument ? evaluate_count(p, argument, budget, lag, out) : 0;
    }
    case PARAM_SCHEDULE:
        return spec_parse_schedule(canonical, &out->word, &out->number);
    case PARAM_POLICY:
        out->word = strcmp(canonical, "none") != 0;
        return 0;
    default:
        out->word = text_find_word(p->words, canonical);
        return 0;
    }
}
