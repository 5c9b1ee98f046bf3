/* The only list of policies: the command line, help, docs and tests iterate it. */
#pragma once

#include "sim/policy.h"

size_t policy_count(void);
const policy *policy_at(size_t i);
const policy *policy_find(const char *name); /* NULL and an err_ message with the nearest name */

enum { REGISTRY_ADDED_MAX = 64 };

/* Append a policy that is not built in (and passed policy_check), for the life of the process. ERR_DATA, and it is left
 * out: its name is taken by a policy or has a meaning in specs, or there are too many. */
int registry_add(const policy *p);
bool registry_is_added(const policy *p);

const char *policy_family_name(policy_family f);

/* `kvlag policies [NAME] [--json] [--plugin FILE.so]`; see kvlag.c for the convention of cmd_ functions. */
int cmd_policies(int argc, char **argv);
