#include "sim/policy.h"

#include <string.h>

const policy_value *policy_get(const policy_setup *s, const char *name) {
    const policy_param *p = s->policy->params;
    for (int i = 0; p[i].name; i++)
        if (strcmp(p[i].name, name) == 0) return &s->value[i];
    return NULL;
}
