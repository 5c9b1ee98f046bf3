#include "sim/spec.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/options.h"
#include "base/text.h"
#include "sim/policies/mix.h"
#include "sim/registry.h"
#include "sim/wrapper.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

/* Each wrapper can be there once; what goes deeper is a mistake. */
enum { NESTED_MOST = 16 };

/* Part of a spec's text. */
typedef struct slice {
    const char *at;
    size_t n;
} slice;

/* Take what stands before the next `separator` outside parentheses. False where nothing is left. */
static bool next(slice *rest, char separator, slice *out) {
    size_t n = 0;
    if (!rest->at) return false;
    for (int depth = 0; n < rest->n && (depth > 0 || rest->at[n] != separator); n++)
        depth += (rest->at[n] == '(') - (rest->at[n] == ')');
    *out = (slice){rest->at, n};
    *rest = n < rest->n ? (slice){rest->at + n + 1, rest->n - n - 1} : (slice){NULL, 0};
    return true;
}

/* "KEY=VALUE" -> key and value; a key is made of small letters, digits and '_'. */
static bool split_key(slice argument, slice *key, slice *value) {
    size_t n = 0;
    while (n < argument.n &&
           (islower((unsigned char)argument.at[n]) || isdigit((unsigned char)argument.at[n]) || argument.at[n] == '_'))
        n++;
    if (n == argument.n || argument.at[n] != '=') return false;
    *key = (slice){argument.at, n};
    *value = (slice){argument.at + n + 1, argument.n - n - 1};
    return true;
}

/* ---- values of parameters --------------------------------------------------------------------------------------- */

static int find_param(const policy *p, slice key) {
    for (int i = 0; p->params[i].name; i++) {
        const char *names[2] = {p->params[i].name, p->params[i].alias};
        for (int k = 0; k < 2; k++)
            if (names[k] && strlen(names[k]) == key.n && strncmp(names[k], key.at, key.n) == 0) return i;
    }
    return -1;
}

static int unknown_key(const policy *p, slice key) {
    text keys = {0};
    const char *names[2 * POLICY_PARAMS_MAX];
    char typed[POLICY_TEXT_MAX];
    size_t n = 0;
    for (int i = 0; p->params[i].name; i++) {
        TRY(text_add(&keys, "%s%s", i ? ", " : "", p->params[i].name));
        names[n++] = p->params[i].name;
        if (p->params[i].alias) names[n++] = p->params[i].alias;
    }
    snprintf(typed, sizeof typed, "%.*s", (int)key.n, key.at);
    const char *near = opt_nearest(typed, names, n);
    int code =
        err_set(ERR_USAGE, "%s has no parameter '%s'%s%s%s (it has: %s)", p->name, typed, near ? " (did you mean " : "",
                near ? near : "", near ? "?)" : "", keys.data ? keys.data : "none");
    text_free(&keys);
    return code;
}

static int add_value(spec *s, int index, const char *prefix, slice value) {
    const char *name = s->policy->params[index].name;
    char(*grown)[POLICY_TEXT_MAX] = s->param[index].value, whole[POLICY_TEXT_MAX];
    if (!grown) grown = mem_new(SPEC_VALUES_MAX, sizeof *grown, "spec");
    if (!grown) return ERR_DATA;
    s->param[index].value = grown;
    if (value.n == 0) return err_set(ERR_USAGE, "'%s' has an empty value", name);
    if (s->param[index].n == SPEC_VALUES_MAX)
        return err_set(ERR_USAGE, "more than %d values in a list", SPEC_VALUES_MAX);
    if (strlen(prefix) + value.n >= sizeof whole) return err_set(ERR_USAGE, "'%s': the value is too long", name);
    snprintf(whole, sizeof whole, "%s%.*s", prefix, (int)value.n, value.at);
    return spec_canonical(&s->policy->params[index], whole, grown[s->param[index].n++]);
}

/* Give a parameter that has no values yet the list `values`, each behind `prefix`. */
static int set_param(spec *s, int index, const char *prefix, slice values) {
    slice one;
    if (s->param[index].n) return err_set(ERR_USAGE, "'%s' is given twice", s->policy->params[index].name);
    do {
        next(&values, '|', &one);
        TRY(add_value(s, index, prefix, one));
    } while (values.at);
    return 0;
}

/* ---- policies --------------------------------------------------------------------------------------------------- */

/* The next positional parameter that has no value yet, or -1. */
static int next_positional(const spec *s) {
    for (int i = 0; s->policy->params[i].name; i++)
        if (s->policy->params[i].positional && !s->param[i].n) return i;
    return -1;
}

static int parse_argument(spec *s, slice argument) {
    slice key, value;
    int index;
    if (argument.n == 0) return err_set(ERR_USAGE, "empty argument");
    if (split_key(argument, &key, &value)) {
        index = find_param(s->policy, key);
        if (index < 0) return unknown_key(s->policy, key);
        return set_param(s, index, "", value);
    }
    index = next_positional(s);
    if (index < 0) return err_set(ERR_USAGE, "'%.*s' is not KEY=VALUE", (int)argument.n, argument.at);
    return set_param(s, index, "", argument);
}

static int parse_policy(spec *s, slice name, slice arguments) {
    slice one;
    if (name.n == 0 || name.n >= POLICY_TEXT_MAX) return err_set(ERR_USAGE, "no policy name");
    char whole[POLICY_TEXT_MAX];
    snprintf(whole, sizeof whole, "%.*s", (int)name.n, name.at);
    s->policy = policy_find(whole);
    if (!s->policy) return ERR_USAGE;
    while (next(&arguments, ',', &one)) TRY(parse_argument(s, one));
    return 0;
}

/* ---- wrappers --------------------------------------------------------------------------------------------------- */

static int parse(spec *s, slice source, int depth);

/* Which of a wrapper's arguments is which. */
static int sort_arguments(const wrapper *w, slice arguments, slice *inner, slice *argument) {
    slice one, key, value, positional[2] = {{0}};
    int n = 0;
    while (next(&arguments, ',', &one)) {
        if (one.n == 0) return err_set(ERR_USAGE, "%s: empty argument (%s)", w->name, w->usage);
        if (split_key(one, &key, &value)) {
            bool known = strlen(w->argument.name) == key.n && strncmp(w->argument.name, key.at, key.n) == 0;
            char hint[OPT_HINT];
            if (!known)
                return err_set(ERR_USAGE, "%s has no '%.*s'%s: %s", w->name, (int)key.n, key.at,
                               opt_did_you_mean(w->argument.name, key.at, key.n, hint), w->usage);
            if (argument->at) return err_set(ERR_USAGE, "%s: '%s' is given twice", w->name, w->argument.name);
            *argument = value;
        } else if (n == 2) {
            return err_set(ERR_USAGE, "%s: too many arguments (%s)", w->name, w->usage);
        } else {
            positional[n++] = one;
        }
    }
    if (n == 0) return err_set(ERR_USAGE, "%s: no policy is given (%s)", w->name, w->usage);
    if (n == 2 && argument->at) return err_set(ERR_USAGE, "%s: '%s' is given twice", w->name, w->argument.name);
    if (n == 2) *argument = positional[w->argument_first ? 0 : 1];
    *inner = positional[n == 2 && w->argument_first ? 1 : 0];
    return 0;
}

static int set_by_name(spec *s, const char *name, const char *prefix, slice values, bool yields) {
    slice key = {name, strlen(name)};
    int index = find_param(s->policy, key);
    if (index < 0) return unknown_key(s->policy, key);
    return yields && s->param[index].n ? 0 : set_param(s, index, prefix, values);
}

static int parse_wrapped(spec *s, const wrapper *w, slice arguments, int depth) {
    slice inner = {0}, argument = {0};
    const char *initial = w->argument.initial, *neutral = w->argument.neutral;
    TRY(sort_arguments(w, arguments, &inner, &argument));
    if (!argument.at && !initial)
        return err_set(ERR_USAGE, "%s: %s is missing (%s)", w->name, w->argument.name, w->usage);
    if (!argument.at && *initial) argument = (slice){initial, strlen(initial)};
    TRY(parse(s, inner, depth + 1));
    if (neutral && strlen(neutral) == argument.n && strncmp(neutral, argument.at, argument.n) == 0) return 0;
    int code = 0;
    for (int i = 0; i < WRAPPER_SETS && w->set[i].param && !code; i++)
        code = set_by_name(s, w->set[i].param, "", (slice){w->set[i].value, strlen(w->set[i].value)}, w->set[i].yields);
    if (!code && argument.at)
        code = set_by_name(s, w->argument.param, w->argument.prefix ? w->argument.prefix : "", argument, false);
    return code ? err_prefix(code, "%s", w->name) : 0;
}

/* ---- a spec ----------------------------------------------------------------------------------------------------- */

static int parse(spec *s, slice source, int depth) {
    slice name = {source.at, 0}, arguments = {NULL, 0};
    if (depth > NESTED_MOST) return err_set(ERR_USAGE, "nested too deeply");
    while (name.n < source.n && source.at[name.n] != '(') name.n++;
    if (name.n < source.n) {
        int open = 1;
        arguments = (slice){source.at + name.n + 1, 0};
        size_t most = source.n - name.n - 1;
        for (; arguments.n < most && open; arguments.n++)
            open += (arguments.at[arguments.n] == '(') - (arguments.at[arguments.n] == ')');
        if (open) return err_set(ERR_USAGE, "')' is missing");
        if (arguments.n < most)
            return err_set(ERR_USAGE, "'%.*s' after the closing ')'", (int)(most - arguments.n),
                           arguments.at + arguments.n);
        arguments.n--; /* not the ')' */
    }
    const wrapper *w = wrapper_find(name.at, name.n);
    if (w && !arguments.at) return err_set(ERR_USAGE, "%s goes around a policy: %s", w->name, w->usage);
    return w ? parse_wrapped(s, w, arguments, depth) : parse_policy(s, name, arguments);
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
    int code = parse(out, (slice){compact, strlen(compact)}, 0);
    mem_free(compact);
    return code;
}

void spec_free(spec *s) {
    for (int i = 0; i < POLICY_PARAMS_MAX; i++) mem_free(s->param[i].value);
    *s = (spec){0};
}

bool spec_hold_is_lag(const char *source) {
    spec s;
    bool tied = false;
    if (spec_parse(source, &s) == 0)
        for (int i = 0; s.policy->params[i].name; i++) {
            const char *value = s.param[i].n ? s.param[i].value[0] : s.policy->params[i].initial;
            if (strcmp(s.policy->params[i].name, "hold") == 0) tied = value && strcmp(value, "lag") == 0;
        }
    spec_free(&s);
    return tied;
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
