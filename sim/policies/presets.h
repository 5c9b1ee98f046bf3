/* Policies that are compositions (mix.h), by name. Only the registry includes this. */
#pragma once

#include "sim/policy.h"

extern const policy policy_full, policy_window, policy_streaming, policy_random, policy_lru, policy_h2o, policy_ema,
    policy_tova, policy_rmm, policy_mix;
extern const policy policy_oracle; /* oracle.c */
/* Of keys and values. */
extern const policy policy_knorm, policy_keydiff, policy_lagkv, policy_cur, policy_expected;
