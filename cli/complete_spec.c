/* Completion inside specs: names, parameters, and the words a parameter takes. */
#include "cli/complete.h"
#include "sim/registry.h"
#include "sim/spec.h"
#include "sim/wrapper.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

enum { DEEPEST = 16 };

/* Where the cursor stands in a spec: in an argument of the innermost NAME( that is open. */
typedef struct place {
    size_t name, name_end; /* of NAME; name_end = 0: no parenthesis is open */
    size_t arguments;      /* begin here */
    size_t argument;       /* the one under the cursor begins here */
} place;

static bool in_name(char c) {
    return isalnum((unsigned char)c) || c == '-' || c == '_';
}

static bool find_place(const char *word, size_t from, place *out) {
    size_t open[DEEPEST], argument[DEEPEST + 1] = {from};
    int depth = 0;
    for (size_t i = from; word[i]; i++) {
        if (word[i] == '(' && depth == DEEPEST) return false;
        if (word[i] == '(') {
            open[depth++] = i;
            argument[depth] = i + 1;
        } else if (word[i] == ')') {
            if (!depth--) return false;
        } else if (word[i] == ',') {
            argument[depth] = i + 1;
        }
    }
    *out = (place){.argument = argument[depth]};
    if (!depth) return true;
    out->name = out->name_end = open[depth - 1];
    out->arguments = open[depth - 1] + 1;
    while (out->name > from && in_name(word[out->name - 1])) out->name--;
    return out->name < out->name_end;
}

/* Is NAME= among the arguments before the cursor's? */
static bool is_given(const char *word, const place *at, const char *name) {
    size_t n = strlen(name);
    int depth = 0;
    for (size_t i = at->arguments; i < at->argument; i++) {
        bool begins = depth == 0 && (i == at->arguments || word[i - 1] == ',');
        if (begins && strncmp(word + i, name, n) == 0 && word[i + n] == '=') return true;
        depth += (word[i] == '(') - (word[i] == ')');
    }
    return false;
}

static void offer_opening(candidates *c, size_t n, const char *name, const char *help) {
    char open[POLICY_TEXT_MAX];
    snprintf(open, sizeof open, "%s(", name);
    candidates_offer(c, n, open, help);
}

/* Wrappers go on with a parenthesis; so can a policy whose name is complete. */
static void offer_policies(candidates *c, size_t n) {
    for (size_t i = 0; i < policy_count(); i++) {
        const policy *p = policy_at(i);
        candidates_offer(c, n, p->name, p->help);
        if (p->params[0].name && strcmp(c->word + n, p->name) == 0) offer_opening(c, n, p->name, "with parameters");
    }
    for (const wrapper *w = wrappers; w->name; w++) offer_opening(c, n, w->name, w->help);
}

static void offer_value(candidates *c, const policy_param *p, size_t value) {
    const char *bar = strrchr(c->word + value, '|');
    if (bar) value = (size_t)(bar - c->word) + 1;
    candidates_offer_words(c, value, spec_words(p));
    if (p->type == PARAM_POLICY) offer_policies(c, value);
}

static void offer_parameters(candidates *c, const place *at, const policy *p) {
    const char *equals = strchr(c->word + at->argument, '=');
    for (const policy_param *q = p->params; q->name; q++) {
        char end[POLICY_TEXT_MAX], help[256];
        if (equals) {
            size_t n = (size_t)(equals - c->word) - at->argument;
            const char *key = c->word + at->argument;
            if ((strlen(q->name) == n && strncmp(q->name, key, n) == 0) ||
                (q->alias && strlen(q->alias) == n && strncmp(q->alias, key, n) == 0))
                offer_value(c, q, at->argument + n + 1);
            continue;
        }
        if (is_given(c->word, at, q->name)) continue;
        if (q->positional && q->words) candidates_offer_words(c, at->argument, q->words);
        snprintf(end, sizeof end, "%s=", q->name);
        snprintf(help, sizeof help, "%s%s%s%s", q->help, q->initial && *q->initial ? " (default " : "",
                 q->initial ? q->initial : "", q->initial && *q->initial ? ")" : "");
        candidates_offer(c, at->argument, end, help);
    }
}

static void offer_wrapped(candidates *c, const place *at, const wrapper *w) {
    char end[POLICY_TEXT_MAX];
    if (strchr(c->word + at->argument, '=')) return;
    if (w->argument_first || at->argument == at->arguments) offer_policies(c, at->argument);
    snprintf(end, sizeof end, "%s=", w->argument.name);
    if (!is_given(c->word, at, w->argument.name)) candidates_offer(c, at->argument, end, w->usage);
}

void complete_spec(candidates *c, size_t n) {
    place at;
    char name[POLICY_TEXT_MAX];
    if (!find_place(c->word, n, &at)) return;
    if (!at.name_end) {
        offer_policies(c, n);
        return;
    }
    size_t length = at.name_end - at.name;
    const wrapper *w = wrapper_find(c->word + at.name, length);
    snprintf(name, sizeof name, "%.*s", (int)length, c->word + at.name);
    if (w) offer_wrapped(c, &at, w);
    for (size_t i = 0; !w && i < policy_count(); i++)
        if (strcmp(policy_at(i)->name, name) == 0) offer_parameters(c, &at, policy_at(i));
}

void complete_policy(candidates *c) {
    for (size_t i = 0; i < policy_count(); i++) candidates_offer(c, 0, policy_at(i)->name, policy_at(i)->help);
    for (const wrapper *w = wrappers; w->name; w++) candidates_offer(c, 0, w->name, w->help);
}
