#include "sim/policy_check.h"
#include "base/err.h"
#include "sim/spec.h"

#include <ctype.h>
#include <string.h>

enum { NAME_LONGEST = 40, LINE_LONGEST = 400, FIELDS_MAX = 1 << 16, NEEDS_KNOWN = 2 * NEEDS_ROPE - 1 };

/* ---- texts ------------------------------------------------------------------------------------------------------ */

/* Small letters, digits and `joint`, a letter first. */
static bool is_name(const char *s, char joint) {
    if (!s || !islower((unsigned char)*s)) return false;
    size_t n = 1;
    while (n <= NAME_LONGEST && (islower((unsigned char)s[n]) || isdigit((unsigned char)s[n]) || s[n] == joint)) n++;
    return n <= NAME_LONGEST && !s[n];
}

/* One line of text that says something. */
static bool is_line(const char *s) {
    if (!s || !*s || strnlen(s, LINE_LONGEST + 1) > LINE_LONGEST) return false;
    for (; *s; s++)
        if (iscntrl((unsigned char)*s)) return false;
    return true;
}

/* "a|b|c", of characters that a spec leaves whole. */
static bool are_words(const char *s) {
    if (!is_line(s) || *s == '|' || strstr(s, "||") || s[strlen(s) - 1] == '|') return false;
    return !strpbrk(s, "(), ");
}

/* ---- parameters ------------------------------------------------------------------------------------------------- */

static int check_default(const policy *p, const policy_param *q) {
    char canonical[POLICY_TEXT_MAX];
    if (!q->initial) return 0;
    if (!*q->initial && (q->type == PARAM_COUNT || q->type == PARAM_NUMBER)) return 0;
    int code = spec_canonical(q, q->initial, canonical);
    if (code) {
        err_prefix(code, "%s: the default of '%s'", p->name, q->name);
        return ERR_DATA;
    }
    if (strcmp(canonical, q->initial) == 0) return 0;
    return err_set(ERR_DATA, "%s: the default of '%s' is spelt '%s', want '%s'", p->name, q->name, q->initial,
                   canonical);
}

static bool shares_a_name(const policy_param *a, const policy_param *b) {
    const char *of_a[] = {a->name, a->alias}, *of_b[] = {b->name, b->alias};
    for (int i = 0; i < 4; i++) {
        const char *x = of_a[i / 2], *y = of_b[i % 2];
        if (x && y && strcmp(x, y) == 0) return true;
    }
    return false;
}

static int check_param(const policy *p, int i) {
    const policy_param *q = &p->params[i];
    if (!is_name(q->name, '_'))
        return err_set(ERR_DATA, "%s: the name of parameter %d is not made of small letters, digits and _", p->name, i);
    if (q->alias && !is_name(q->alias, '_'))
        return err_set(ERR_DATA, "%s: the alias of '%s' is not made of small letters, digits and _", p->name, q->name);
    for (int k = 0; k < i; k++)
        if (shares_a_name(q, &p->params[k]))
            return err_set(ERR_DATA, "%s: two parameters are called '%s'", p->name, q->name);
    if ((int)q->type < PARAM_COUNT || (int)q->type > PARAM_POLICY)
        return err_set(ERR_DATA, "%s: '%s' has a type that does not exist (%d)", p->name, q->name, (int)q->type);
    if (!is_line(q->help)) return err_set(ERR_DATA, "%s: '%s' has no line of help", p->name, q->name);
    if (q->type == PARAM_WORD && !are_words(q->words))
        return err_set(ERR_DATA, "%s: the words of '%s' are not 'a|b|c'", p->name, q->name);
    if (!(q->min <= q->max))
        return err_set(ERR_DATA, "%s: '%s' lies between %g and %g, which nothing does", p->name, q->name, q->min,
                       q->max);
    return check_default(p, q);
}

/* What the engine looks up in every policy. */
static int check_guards(const policy *p) {
    static const policy_param guards[] = {POLICY_GUARDS("0", "0", "head", "")};
    for (const policy_param *g = guards; g->name; g++) {
        const policy_param *q = p->params;
        while (q->name && strcmp(q->name, g->name) != 0) q++;
        bool same = q->name && q->type == g->type && (!g->words || strcmp(q->words, g->words) == 0);
        if (!same)
            return err_set(ERR_DATA, "%s: the parameter '%s', which every policy has, is %s (POLICY_GUARDS lists them)",
                           p->name, g->name, q->name ? "of another kind" : "missing");
    }
    return 0;
}

static int check_params(const policy *p) {
    if (!p->params) return err_set(ERR_DATA, "%s: it has no list of parameters", p->name);
    int n = 0;
    for (; n <= POLICY_PARAMS_MAX && p->params[n].name; n++)
        if (n < POLICY_PARAMS_MAX) TRY(check_param(p, n));
    if (n > POLICY_PARAMS_MAX)
        return err_set(ERR_DATA, "%s: more than %d parameters, or no {.name = NULL} behind them", p->name,
                       POLICY_PARAMS_MAX);
    return check_guards(p);
}

/* ---- a policy --------------------------------------------------------------------------------------------------- */

int policy_check(const policy *p) {
    if (p->abi != POLICY_ABI)
        return err_set(ERR_DATA,
                       "a policy is made for version %d of the contract, this kvlag has version %d: build it with the "
                       "headers of this kvlag",
                       p->abi, POLICY_ABI);
    if (!is_name(p->name, '-'))
        return err_set(ERR_DATA,
                       "a policy's name is not made of small letters, digits and - (at most %d, a letter "
                       "first)",
                       NAME_LONGEST);
    if (!is_line(p->help)) return err_set(ERR_DATA, "%s: it has no line of help", p->name);
    if (!is_line(p->source)) return err_set(ERR_DATA, "%s: it names no source, a paper or code", p->name);
    if ((int)p->family < FAMILY_WINDOW || (int)p->family > FAMILY_ORACLE)
        return err_set(ERR_DATA, "%s: its family does not exist (%d)", p->name, (int)p->family);
    if ((p->evidence || p->memory) && !is_line(p->evidence))
        return err_set(ERR_DATA, "%s: of its axes, the evidence is empty", p->name);
    if (p->memory && !is_line(p->memory)) return err_set(ERR_DATA, "%s: of its axes, the memory is empty", p->name);
    const struct {
        const char *name;
        bool is_there;
    } verbs[] = {{"init", p->init}, {"fields", p->fields}, {"observe", p->observe}, {"score", p->score}};
    for (size_t i = 0; i < sizeof verbs / sizeof *verbs; i++)
        if (!verbs[i].is_there) return err_set(ERR_DATA, "%s: it has no function '%s'", p->name, verbs[i].name);
    return check_params(p);
}

int policy_set_up(policy_setup *s) {
    const policy *p = s->policy;
    err_set(ERR_NONE, "%s refuses its parameters", p->name); /* unless it says more */
    int code = p->init(s);
    if (code) return code == ERR_DATA ? ERR_DATA : ERR_USAGE;
    if (s->needs & ~(unsigned)NEEDS_KNOWN)
        return err_set(ERR_DATA, "%s: it needs something that does not exist (needs %#x)", p->name, s->needs);
    if ((s->needs & NEEDS_FUTURE) && !(s->horizon >= 0))
        return err_set(ERR_DATA, "%s: it looks %g rows ahead", p->name, s->horizon);
    int n = p->fields(s);
    if (n < 0 || n > FIELDS_MAX)
        return err_set(ERR_DATA, "%s: it keeps %d fields an entry, want 0 to %d", p->name, n, FIELDS_MAX);
    return 0;
}
