/* Does a policy keep to the contract of policy.h? What comes from elsewhere is asked before it is used. */
#pragma once

#include "sim/policy.h"

/* Its version, texts, parameters with their defaults, the engine's own parameters, its functions. ERR_DATA names the
 * policy and what is wrong. Only pointers that lead nowhere go unseen. Policies that keep everything (no parameters at
 * all) are not for plugins and refused. */
int policy_check(const policy *p);

/* Call s->policy->init, and see that what it leaves behind can be worked with. Returns 0 or the code of a message. */
int policy_set_up(policy_setup *s);
