/* The only list of policies: the command line, help, docs and tests iterate it. */
#pragma once

#include "sim/policy.h"

size_t policy_count(void);
const policy *policy_at(size_t i);
const policy *policy_find(const char *name); /* NULL and an err_ message with the nearest name */

const char *policy_family_name(policy_family f);

/* `kvlag policies [NAME] [--json]`; see kvlag.c for the convention of cmd_ functions. */
int cmd_policies(int argc, char **argv);
