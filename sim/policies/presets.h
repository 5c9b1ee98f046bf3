/* Policies that are compositions (mix.h), by name. Only the registry includes this. */
#pragma once

#include "sim/policy.h"

extern const policy policy_full, policy_window, policy_streaming, policy_random, policy_lru, policy_h2o, policy_ema,
    policy_tova, policy_tova_kvpress, policy_rmm, policy_rmm_uniform, policy_rmm_confidence, policy_rmm_sinks,
    policy_mix;
extern const policy policy_oracle; /* oracle.c */
/* Of keys and values. */
extern const policy policy_knorm, policy_keydiff, policy_lagkv, policy_lagkv_cross, policy_cur, policy_expected;
/* Of the attention output, one file each. */
extern const policy policy_vatp, policy_vatp_scissorhands, policy_caote, policy_caote_h2o, policy_caote_fast,
    policy_obcache, policy_obcache_value, policy_obcache_key, policy_obcache_tova, policy_critical, policy_critical_h2o;
/* Of attention: compositions, and one file each. */
extern const policy policy_lfu, policy_h2o_mean, policy_h2o_mean_sinks, policy_h2o_prompt, policy_h2o_last,
    policy_scissorhands_sum;
extern const policy policy_h2o_openvino, policy_scissorhands, policy_roco, policy_lazy, policy_lazy_code, policy_rkv,
    policy_gkv;
extern const policy policy_snapkv, policy_snapkv_w32_k5_avg, policy_snapkv_w32_k7_max, policy_snapkv_w8_k7_max,
    policy_pyramidkv; /* snapkv.c */
