/* Shared by policies that ask what losing an entry does to the attention output: a score from rows alone (any memory
 * kind of mix.h, parameter `memory`), made aware of the values. */
#pragma once

#include "sim/policies/mix.h"
#include "sim/policies/rows.h"

#define OUTPUT_MEMORY(initial_)                                                                                  \
    {                                                                                                            \
        .name = "memory", .type = PARAM_MEMORY, .initial = initial_,                                             \
        .help = "the score from rows alone: sum (as h2o), last (as tova), recent:W, mean, ema:A, max:A, first:L" \
    }

/* mix_init for evidence attn, refusing memory kinds that are no amount of attention; `needs` beside the row. */
int output_init(policy_setup *s, unsigned needs);

/* Sum of |x| over v_i, mean over the unit's kv heads. */
double output_value_norm(const policy_view *v, int32_t i);
