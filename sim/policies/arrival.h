/* Evidence of mix that is read off an entry's key and value once, when it arrives. For a unit of several kv heads it is
 * the mean over them.
 *
 *   keynorm     -|k|: keys of small norm draw attention (Devoto et al. 2024, arXiv:2406.11430). The rotation of RoPE
 *               keeps norms.
 *   valuenorm   |v|
 *   outnorm     |v Wo|, the mean over the unit's query heads, each with its own part of the output projection
 *   keysim      -cos(k, mean of the normalised keys that have arrived, its own included): KeyDiff's score (Park et al.
 *               2025, arXiv:2504.15364) frozen at arrival. The first entry is its own mean and gets -1, the lowest
 *               value there is; sinks keep it.
 *
 * A vector of zeros has no direction: its cosine counts as 0. */
#pragma once

#include "sim/policy.h"

typedef enum arrival_kind { ARRIVAL_KEYNORM, ARRIVAL_VALUENORM, ARRIVAL_OUTNORM, ARRIVAL_KEYSIM } arrival_kind;

unsigned arrival_needs(arrival_kind kind);
/* f64 of the unit's state that arrival_score keeps. */
size_t arrival_state(arrival_kind kind, const policy_shape *shape);
/* Of the newest resident. To be called once in every step. */
double arrival_score(arrival_kind kind, const policy_view *v);
