#include "sim/policy_plugin.h"
#include "base/err.h"
#include "sim/plan.h"
#include "sim/policy_check.h"
#include "sim/registry.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#define SYMBOL "kvlag_policies"

/* Names that mean something in a composition (policies/mix.h), and there only. */
static int check_names(const policy *p) {
    static const char *const of_mix[] = {"evidence", "memory", "signal"};
    for (const policy_param *q = p->params; q->name; q++)
        for (size_t i = 0; i < sizeof of_mix / sizeof *of_mix; i++)
            if (strcmp(q->name, of_mix[i]) == 0)
                return err_set(ERR_DATA, "%s: a parameter of a plugin cannot be called '%s'", p->name, q->name);
    return 0;
}

static int add_all(const policy *const *list) {
    if (!*list) return err_set(ERR_DATA, "its list " SYMBOL " is empty");
    for (; *list; list++) {
        TRY(policy_check(*list));
        TRY(check_names(*list));
        TRY(registry_add(*list));
    }
    return 0;
}

/* A bare name would be looked up among the system's libraries. */
static int load(const char *path) {
    char *full = realpath(path, NULL);
    if (!full) return err_set(ERR_DATA, "--plugin %s: %s", path, strerror(errno));
    void *plugin = dlopen(full, RTLD_NOW | RTLD_LOCAL);
    free(full);
    if (!plugin) return err_set(ERR_DATA, "--plugin %s", dlerror());
    const policy *const *list = dlsym(plugin, SYMBOL);
    if (!list) return err_set(ERR_DATA, "--plugin %s: it exports no " SYMBOL " (docs/adding-a-policy.md)", path);
    int code = add_all(list);
    return code ? err_prefix(code, "--plugin %s", path) : 0;
}

int policy_plugins_load(const opt_list *files) {
    for (size_t i = 0; i < files->n; i++) TRY(load(files->item[i]));
    return 0;
}

static int hash_file(const char *path, XXH64_hash_t *out) {
    char buffer[65536];
    FILE *f = fopen(path, "rb");
    if (!f) return err_set(ERR_DATA, "--plugin %s: %s", path, strerror(errno));
    XXH3_state_t *state = XXH3_createState();
    int code = state ? 0 : err_set(ERR_DATA, "out of memory");
    if (state) XXH3_64bits_reset(state);
    for (size_t n; state && (n = fread(buffer, 1, sizeof buffer, f)) > 0;) XXH3_64bits_update(state, buffer, n);
    if (ferror(f)) code = err_set(ERR_DATA, "--plugin %s: cannot be read", path);
    if (state) *out = XXH3_64bits_digest(state);
    XXH3_freeState(state);
    fclose(f);
    return code;
}

int policy_plugins_note(const opt_list *files, text *out) {
    for (size_t i = 0; i < files->n; i++) {
        XXH64_hash_t hash;
        size_t from = out->n;
        TRY(hash_file(files->item[i], &hash));
        TRY(text_add(out, "# plugin: %s XXH3 %016llx", text_base_name(files->item[i]), (unsigned long long)hash));
        TRY(plan_end_comment(out, from));
    }
    return 0;
}
