#include "sim/registry.h"
#include "base/err.h"
#include "base/options.h"
#include "sim/policies/presets.h"
#include "sim/wrapper.h"

#include <string.h>

static const policy *const registry[] = {
    &policy_full,
    &policy_window,
    &policy_streaming,
    &policy_random,
    &policy_lru,
    &policy_ema,
    &policy_h2o,
    &policy_tova,
    &policy_tova_kvpress,
    &policy_rmm,
    &policy_rmm_uniform,
    &policy_rmm_confidence,
    &policy_rmm_sinks,
    &policy_mix,
    &policy_oracle,
    &policy_vatp,
    &policy_vatp_scissorhands,
    &policy_caote,
    &policy_caote_h2o,
    &policy_caote_fast,
    &policy_obcache,
    &policy_obcache_value,
    &policy_obcache_key,
    &policy_obcache_tova,
    &policy_critical,
    &policy_critical_h2o,
    &policy_knorm,
    &policy_keydiff,
    &policy_lagkv,
    &policy_lagkv_cross,
    &policy_cur,
    &policy_expected,
    &policy_lfu,
    &policy_h2o_mean,
    &policy_h2o_mean_sinks,
    &policy_h2o_openvino,
    &policy_h2o_prompt,
    &policy_h2o_last,
    &policy_scissorhands,
    &policy_scissorhands_sum,
    &policy_roco,
    &policy_snapkv,
    &policy_snapkv_w32_k5_avg,
    &policy_snapkv_w32_k7_max,
    &policy_snapkv_w8_k7_max,
    &policy_pyramidkv,
    &policy_gkv,
    &policy_rkv,
    &policy_lazy,
    &policy_lazy_code,
};
enum { N_BUILT_IN = sizeof registry / sizeof *registry };

/* What plugins brought, for the life of the process. */
static const policy *added[REGISTRY_ADDED_MAX];
static size_t n_added;

size_t policy_count(void) {
    return N_BUILT_IN + n_added;
}

const policy *policy_at(size_t i) {
    return i < N_BUILT_IN ? registry[i] : added[i - N_BUILT_IN];
}

static const policy *find(const char *name) {
    for (size_t i = 0; i < policy_count(); i++)
        if (strcmp(policy_at(i)->name, name) == 0) return policy_at(i);
    return NULL;
}

int registry_add(const policy *p) {
    if (find(p->name)) return err_set(ERR_DATA, "%s: the name is taken by another policy", p->name);
    if (wrapper_find(p->name, strlen(p->name)) || strcmp(p->name, "none") == 0)
        return err_set(ERR_DATA, "%s: the name has a meaning in specs", p->name);
    if (n_added == REGISTRY_ADDED_MAX) return err_set(ERR_DATA, "more than %d policies of plugins", REGISTRY_ADDED_MAX);
    added[n_added++] = p;
    return 0;
}

bool registry_is_added(const policy *p) {
    for (size_t i = 0; i < n_added; i++)
        if (added[i] == p) return true;
    return false;
}

const policy *policy_find(const char *name) {
    const char *names[N_BUILT_IN + REGISTRY_ADDED_MAX + WRAPPERS_MOST];
    size_t n = 0;
    const policy *found = find(name);
    if (found) return found;
    for (; n < policy_count(); n++) names[n] = policy_at(n)->name;
    for (const wrapper *w = wrappers; w->name; w++) names[n++] = w->name;
    const char *near = opt_nearest(name, names, n);
    if (near) err_set(ERR_USAGE, "unknown policy '%s' (did you mean %s?)", name, near);
    else err_set(ERR_USAGE, "unknown policy '%s' (kvlag policies lists them)", name);
    return NULL;
}

const char *policy_family_name(policy_family f) {
    static const char *const names[] = {"window", "static", "attention", "oracle"};
    return names[f];
}
