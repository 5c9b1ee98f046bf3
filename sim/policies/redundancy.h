/* R-KV's redundancy of a key among the residents' keys (Cai et al. 2025, arXiv:2505.24133), also G-KV's. */
#pragma once

#include "sim/policy.h"

typedef struct redundancy_rule {
    double similar;      /* a cosine above this makes two keys similar */
    bool excuse_nothing; /* a key without a similar one excuses the first resident (R-KV's code), or nobody (G-KV's) */
} redundancy_rule;

#define REDUNDANCY_SIMILAR                                                              \
    {                                                                                   \
        .name = "similar", .type = PARAM_NUMBER, .initial = "0.5", .min = -1, .max = 1, \
        .help = "cosine above which two keys say the same"                              \
    }

/* f64 of the unit's state that redundancy_of uses while it works. */
size_t redundancy_state(const policy_setup *s, const policy_shape *shape);

/* out[i], i < n: softmax over i of the mean over residents j of cos(k_j, k_i), where i = j counts as 0, and so does for
 * every j the newest i that is similar to it: the latest of a family of like keys is excused. Keys of kv head `kv` of
 * the unit; a key of zeros is like no other. inverse [n] is room to work. */
void redundancy_of(const policy_view *v, int32_t kv, const redundancy_rule *rule, double *inverse, double *out);
