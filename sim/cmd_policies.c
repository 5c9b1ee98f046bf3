/* kvlag policies: what the registry and the table of wrappers hold, for people and for programs. */
#include "base/err.h"
#include "base/options.h"
#include "sim/policy_plugin.h"
#include "sim/policy_tables.h"
#include "sim/registry.h"
#include "sim/wrapper.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void print_one(const policy *p) {
    printf("%s: %s\n  source: %s\n  family: %s\n", p->name, p->help, p->source, policy_family_name(p->family));
    if (p->memory) printf("  axes:   %s x %s\n", p->evidence, p->memory);
    if (p->params[0].name) printf("  parameters (default):\n");
    for (const policy_param *q = p->params; q->name; q++) {
        char left[96];
        const char *initial = !q->initial ? "required" : *q->initial ? q->initial : "none";
        snprintf(left, sizeof left, "%s%s%s%s (%s)", q->name, q->alias ? " or " : "", q->alias ? q->alias : "",
                 q->positional ? ", by position" : "", initial);
        printf("    %-28s %s%s%s\n", left, q->help, q->words ? ": " : "", q->words ? q->words : "");
    }
}

/* "cutoff=lag", "lag": what a wrapper is short for. */
static void print_wrapper(const wrapper *w) {
    printf("%s: %s\n  source: %s\n  short for:", w->usage, w->help, w->source);
    for (int i = 0; i < WRAPPER_SETS && w->set[i].param; i++)
        printf(" %s=%s%s,", w->set[i].param, w->set[i].value, w->set[i].yields ? " (unless it is given)" : "");
    printf(" %s=%s%s\n", w->argument.param, w->argument.prefix ? w->argument.prefix : "", w->argument.name);
    if (w->argument.neutral) printf("  %s=%s leaves the policy as it is\n", w->argument.name, w->argument.neutral);
}

static cJSON *json_wrapper(const wrapper *w) {
    cJSON *o = cJSON_CreateObject();
    cJSON_AddStringToObject(o, "name", w->name);
    cJSON_AddStringToObject(o, "help", w->help);
    cJSON_AddStringToObject(o, "source", w->source);
    cJSON_AddStringToObject(o, "family", "wrapper");
    cJSON_AddStringToObject(o, "usage", w->usage);
    cJSON *argument = cJSON_AddObjectToObject(o, "argument");
    cJSON_AddStringToObject(argument, "name", w->argument.name);
    cJSON_AddStringToObject(argument, "param", w->argument.param);
    if (w->argument.initial) cJSON_AddStringToObject(argument, "default", w->argument.initial);
    return o;
}

static cJSON *json_one(const policy *p) {
    cJSON *o = cJSON_CreateObject(), *params = cJSON_AddArrayToObject(o, "params");
    cJSON_AddStringToObject(o, "name", p->name);
    cJSON_AddStringToObject(o, "help", p->help);
    cJSON_AddStringToObject(o, "source", p->source);
    cJSON_AddStringToObject(o, "family", policy_family_name(p->family));
    if (p->memory) {
        cJSON_AddStringToObject(o, "evidence", p->evidence);
        cJSON_AddStringToObject(o, "memory", p->memory);
    }
    for (const policy_param *q = p->params; q->name; q++) {
        cJSON *one = cJSON_CreateObject();
        cJSON_AddStringToObject(one, "name", q->name);
        if (q->alias) cJSON_AddStringToObject(one, "alias", q->alias);
        if (q->initial) cJSON_AddStringToObject(one, "default", q->initial);
        if (q->words) cJSON_AddStringToObject(one, "words", q->words);
        cJSON_AddStringToObject(one, "help", q->help);
        cJSON_AddItemToArray(params, one);
    }
    return o;
}

static int print_json(const char *only) {
    cJSON *all = cJSON_CreateArray();
    for (size_t i = 0; i < policy_count(); i++)
        if (!only || strcmp(only, policy_at(i)->name) == 0) cJSON_AddItemToArray(all, json_one(policy_at(i)));
    for (const wrapper *w = wrappers; w->name; w++)
        if (!only || strcmp(only, w->name) == 0) cJSON_AddItemToArray(all, json_wrapper(w));
    char *printed = cJSON_Print(all);
    cJSON_Delete(all);
    if (!printed) return err_set(ERR_DATA, "policies: out of memory");
    puts(printed);
    free(printed);
    return 0;
}

static void print_all(void) {
    for (size_t i = 0; i < policy_count(); i++) printf("%-18s  %s\n", policy_at(i)->name, policy_at(i)->help);
    printf("\nAround any of them, nested as you like:\n\n");
    for (const wrapper *w = wrappers; w->name; w++) printf("%-24s  %s\n", w->usage, w->help);
}

static int print_policies(const opt_list *names, bool json, bool markdown) {
    if (names->n > 1) return err_set(ERR_USAGE, "policies: at most one NAME, got %zu", names->n);
    if (markdown && (names->n || json)) return err_set(ERR_USAGE, "policies: --markdown takes no NAME and no --json");
    if (markdown) {
        policy_tables_print();
        return 0;
    }
    const char *name = names->n ? names->item[0] : NULL;
    const wrapper *around = name ? wrapper_find(name, strlen(name)) : NULL;
    const policy *only = name && !around ? policy_find(name) : NULL;
    if (name && !around && !only) return ERR_USAGE;
    if (json) return print_json(name);
    if (around) print_wrapper(around);
    else if (only) print_one(only);
    else print_all();
    return 0;
}

int cmd_policies(int argc, char **argv) {
    bool json = false, markdown = false;
    opt_list names = {0}, plugins = {0};
    const opt table[] = {
        {.name = "json", .kind = OPT_FLAG, .target = &json, .help = "print as JSON"},
        {.name = "markdown", .kind = OPT_FLAG, .target = &markdown, .help = "print tables, as in docs/policies.md"},
        POLICY_PLUGIN_OPTION(plugins),
        {.name = NULL},
    };
    int code = opt_parse(table, argc, argv, &names);
    if (!code) code = policy_plugins_load(&plugins);
    if (!code) code = print_policies(&names, json, markdown);
    opt_list_free(&plugins);
    opt_list_free(&names);
    return code;
}
