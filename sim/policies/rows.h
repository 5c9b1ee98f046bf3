/* What several policies do with rows of attention: remember the last few of a unit, and pool over neighbours. */
#pragma once

#include "sim/policy.h"

enum { ROWS_MAX = 4096, KERNEL_MAX = 63 };

/* Check the parameters `window` (1..ROWS_MAX) and, where there is one, `kernel` (1..KERNEL_MAX, odd): given as budget/n
 * they know their value only now. */
int rows_check(const policy_setup *s);
/* The same for `kernel` alone. */
int rows_check_kernel(const policy_setup *s);

/* Those parameters, to be listed in params[]. */
#define ROWS_WINDOW(initial_)                                                                  \
    {                                                                                          \
        .name = "window", .type = PARAM_COUNT, .initial = initial_, .min = 1, .max = ROWS_MAX, \
        .help = "recent queries that are asked"                                                \
    }
#define ROWS_KERNEL(initial_, help_) \
    { .name = "kernel", .type = PARAM_COUNT, .initial = initial_, .min = 1, .max = KERNEL_MAX, .help = help_ }

/* The last w rows as a ring of w fields. An entry that arrived less than w steps ago has only its own rows in it. */
void rows_observe(const policy_view *v, int w);
/* sum[j], j < n: the last w rows added up, the oldest first. */
void rows_sum(const policy_view *v, int w, double *sum);
/* Residents that are at least w steps old: the first of them, since positions ascend. */
int32_t rows_older(const policy_view *v, int w);

typedef enum pool_kind { POOL_AVG, POOL_MAX } pool_kind;
#define POOL_WORDS "avg|max"

/* out[j] = mean or maximum of x over the `kernel` (odd) neighbours centred on j, j < n. As in PyTorch's pooling with
 * padding kernel/2: beyond the ends the mean counts zeros, the maximum nothing. */
void pool_around(pool_kind kind, const double *x, int32_t n, int kernel, double *out);
/* In place: x[j] = maximum of x[j] .. x[j+length-1], as far as there are any. */
void pool_ahead(double *x, int32_t n, int length);
