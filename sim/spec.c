#include "sim/spec.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/text.h"
#include "sim/config.h"
#include "sim/policies/mix.h"
#include "sim/registry.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- values ----------------------------------------------------------------------------------------------------- */

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
    return err_set(ERR_USAGE, "unknown schedule '%s' (step, every:P, watermark:f, block:n, prompt)", source);
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

int spec_canonical(const policy_param *p, const char *value, char out[POLICY_TEXT_MAX]) {
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
    default:
        if (text_find_word(p->words, value) < 0)
            return err_set(ERR_USAGE, "%s=%s is not one of %s", p->name, value, p->words);
        snprintf(out, POLICY_TEXT_MAX, "%s", value);
        return 0;
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
    default:
        out->word = text_find_word(p->words, canonical);
        return 0;
    }
}

/* ---- the grammar ------------------------------------------------------------------------------------------------ */

static int add_value(spec *s, int index, const char *value) {
    char(*grown)[POLICY_TEXT_MAX] = s->param[index].value;
    if (!grown) grown = mem_new(SPEC_VALUES_MAX, sizeof *grown, "spec");
    if (!grown) return ERR_DATA;
    s->param[index].value = grown;
    if (s->param[index].n == SPEC_VALUES_MAX)
        return err_set(ERR_USAGE, "more than %d values in a list", SPEC_VALUES_MAX);
    return spec_canonical(&s->policy->params[index], value, grown[s->param[index].n++]);
}

static int find_param(const policy *p, const char *key, size_t n) {
    for (int i = 0; p->params[i].name; i++) {
        const char *names[2] = {p->params[i].name, p->params[i].alias};
        for (int k = 0; k < 2; k++)
            if (names[k] && strlen(names[k]) == n && strncmp(names[k], key, n) == 0) return i;
    }
    return -1;
}

static int unknown_key(const policy *p, const char *key, size_t n) {
    text keys = {0};
    for (int i = 0; p->params[i].name; i++) TRY(text_add(&keys, "%s%s", i ? ", " : "", p->params[i].name));
    int code = err_set(ERR_USAGE, "%s has no parameter '%.*s' (it has: %s)", p->name, (int)n, key,
                       keys.data ? keys.data : "none");
    text_free(&keys);
    return code;
}

/* The next positional parameter that has no value yet, or -1. */
static int next_positional(const spec *s) {
    for (int i = 0; s->policy->params[i].name; i++)
        if (s->policy->params[i].positional && !s->param[i].n) return i;
    return -1;
}

static int parse_argument(spec *s, const char *a, size_t n) {
    size_t key = 0;
    while (key < n && (islower((unsigned char)a[key]) || isdigit((unsigned char)a[key]) || a[key] == '_')) key++;
    int index;
    if (key < n && a[key] == '=') {
        index = find_param(s->policy, a, key);
        if (index < 0) return unknown_key(s->policy, a, key);
        if (s->param[index].n) return err_set(ERR_USAGE, "'%s' is given twice", s->policy->params[index].name);
        a += key + 1;
        n -= key + 1;
    } else {
        index = next_positional(s);
        if (index < 0) return err_set(ERR_USAGE, "'%.*s' is not KEY=VALUE", (int)n, a);
    }
    for (;;) {
        const char *bar = memchr(a, '|', n);
        size_t len = bar ? (size_t)(bar - a) : n;
        char value[POLICY_TEXT_MAX];
        if (len == 0) return err_set(ERR_USAGE, "'%s' has an empty value", s->policy->params[index].name);
        if (len >= sizeof value)
            return err_set(ERR_USAGE, "'%s': the value is too long", s->policy->params[index].name);
        snprintf(value, sizeof value, "%.*s", (int)len, a);
        TRY(add_value(s, index, value));
        if (!bar) return 0;
        a += len + 1;
        n -= len + 1;
    }
}

static int parse_arguments(spec *s, const char *a) {
    for (;;) {
        size_t n = strcspn(a, ",()");
        if (a[n] == '(' || a[n] == 0) return err_set(ERR_USAGE, a[n] ? "nested '('" : "')' is missing");
        if (n == 0) return err_set(ERR_USAGE, "empty argument");
        TRY(parse_argument(s, a, n));
        a += n + 1;
        if (a[-1] == ')') return *a ? err_set(ERR_USAGE, "'%s' after the closing ')'", a) : 0;
    }
}

static int parse(char *source, spec *out) {
    size_t n = strcspn(source, "(");
    if (n == 0 || n >= sizeof out->name) return err_set(ERR_USAGE, "no policy name");
    snprintf(out->name, sizeof out->name, "%.*s", (int)n, source);
    out->policy = policy_find(out->name);
    if (!out->policy) return ERR_USAGE;
    return source[n] ? parse_arguments(out, source + n + 1) : 0;
}

/* Without the blanks around names, values and punctuation; one inside a word stays, and is an error later. */
static void drop_blanks(char *s) {
    const char *punctuation = "(),=|";
    char *to = s;
    for (const char *c = s; *c; c++) {
        if (!isspace((unsigned char)*c)) {
            *to++ = *c;
            continue;
        }
        while (isspace((unsigned char)c[1])) c++;
        if (to > s && c[1] && !strchr(punctuation, to[-1]) && !strchr(punctuation, c[1])) *to++ = ' ';
    }
    *to = 0;
}

int spec_parse(const char *source, spec *out) {
    *out = (spec){0};
    char *compact = mem_string(source);
    if (!compact) return ERR_DATA;
    drop_blanks(compact);
    int code = parse(compact, out);
    mem_free(compact);
    return code ? err_prefix(code, "-p '%.200s'", source) : 0;
}

void spec_free(spec *s) {
    for (int i = 0; i < POLICY_PARAMS_MAX; i++) mem_free(s->param[i].value);
    *s = (spec){0};
}

int spec_family(const char *source) {
    spec s;
    int family = -1;
    if (spec_parse(source, &s) == 0) {
        family = (int)s.policy->family;
        for (int i = 0; s.policy->params[i].name; i++) {
            const char *value = s.param[i].n ? s.param[i].value[0] : "";
            if (strcmp(s.policy->params[i].name, "evidence") == 0 && mix_is_static(value)) family = FAMILY_STATIC;
        }
    }
    spec_free(&s);
    return family;
}
