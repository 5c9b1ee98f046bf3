#include "sim/policy_tables.h"
#include "sim/registry.h"
#include "sim/wrapper.h"

#include <stdio.h>
#include <string.h>

static const policy_param *find(const policy *p, const char *name) {
    for (const policy_param *q = p->params; q->name; q++)
        if (strcmp(q->name, name) == 0) return q;
    return NULL;
}

static bool same(const char *a, const char *b) {
    return a == b || (a && b && strcmp(a, b) == 0);
}

/* Does every policy that evicts have it? */
static bool is_shared(const char *name) {
    for (size_t i = 0; i < policy_count(); i++)
        if (policy_at(i)->params[0].name && !find(policy_at(i), name)) return false;
    return true;
}

static size_t policies_with(const char *name, const char *initial) {
    size_t n = 0;
    for (size_t i = 0; i < policy_count(); i++) {
        const policy_param *q = find(policy_at(i), name);
        n += q && same(q->initial, initial);
    }
    return n;
}

/* The default that most policies have. */
static const char *usual(const char *name) {
    const char *best = NULL;
    size_t most = 0;
    for (size_t i = 0; i < policy_count(); i++) {
        const policy_param *q = find(policy_at(i), name);
        size_t n = q ? policies_with(name, q->initial) : 0;
        if (n <= most) continue;
        best = q->initial;
        most = n;
    }
    return best;
}

/* A cell's text: a bar would end the cell. */
static void print_cell(const char *words) {
    for (; *words; words++) printf(*words == '|' ? "\\|" : "%c", *words);
}

static void print_code(const char *words) {
    printf("`");
    print_cell(words);
    printf("`");
}

static void print_default(const policy_param *q) {
    char both[128];
    if (!q->initial || !*q->initial) snprintf(both, sizeof both, "%s", q->name);
    else snprintf(both, sizeof both, "%s=%s", q->name, q->initial);
    print_code(both);
}

static void print_policy(const policy *p) {
    int n = 0;
    printf("| ");
    print_code(p->name);
    printf(" | %s | ", policy_family_name(p->family));
    print_cell(p->help);
    printf(" | ");
    if (p->memory) {
        char axes[128];
        snprintf(axes, sizeof axes, "%s x %s", p->evidence, p->memory);
        print_code(axes);
    }
    printf(" | ");
    for (const policy_param *q = p->params; q->name; q++) {
        if (is_shared(q->name) && same(q->initial, usual(q->name))) continue;
        if (n++) printf(", ");
        print_default(q);
    }
    printf(" | ");
    print_cell(p->source);
    printf(" |\n");
}

static void print_shared(void) {
    const policy *any = policy_at(0);
    for (size_t i = 0; i < policy_count() && !any->params[0].name; i++) any = policy_at(i);
    for (const policy_param *q = any->params; q->name; q++) {
        if (!is_shared(q->name)) continue;
        const char *initial = usual(q->name);
        printf("| ");
        print_code(q->name);
        if (q->alias) printf(" or `%s`", q->alias);
        printf(" | ");
        if (initial && *initial) print_code(initial);
        printf(" | ");
        print_cell(q->help);
        if (q->words) printf(": ");
        if (q->words) print_code(q->words);
        printf(" |\n");
    }
}

static void print_wrapper(const wrapper *w) {
    printf("| ");
    print_code(w->usage);
    printf(" | ");
    for (int i = 0; i < WRAPPER_SETS && w->set[i].param; i++) printf("`%s=%s`, ", w->set[i].param, w->set[i].value);
    printf("`%s=%s%s` | ", w->argument.param, w->argument.prefix ? w->argument.prefix : "", w->argument.name);
    print_cell(w->help);
    printf(" | ");
    print_cell(w->source);
    printf(" |\n");
}

void policy_tables_print(void) {
    puts("Parameters are those of the policy's own, and shared ones whose default differs from the usual.\n");
    puts("| policy | family | what it does | axes | parameters | source |\n|---|---|---|---|---|---|");
    for (size_t i = 0; i < policy_count(); i++) print_policy(policy_at(i));
    puts("\nEvery policy that evicts has these parameters:\n");
    puts("| parameter | usual default | |\n|---|---|---|");
    print_shared();
    puts("\nWrappers:\n");
    puts("| wrapper | short for | what it does | source |\n|---|---|---|---|");
    for (const wrapper *w = wrappers; w->name; w++) print_wrapper(w);
}
