/* What memory buys: loss at equal memory, memory at equal loss, and the configurations that nothing beats in both.
 *
 * Memory is what the model reads of the cache in a decode step, kv_bytes (docs/costs.md), where all configurations have
 * it: it knows about precision and about units that hold different amounts. Else it is the budget in entries. Pending
 * entries are memory: configurations that do not charge them are left out everywhere here.
 *
 * Between two budgets that were run a curve is a line in log(memory) and in asinh(loss / AXIS_LINEAR_TO), a scale that
 * is logarithmic for losses and linear around 0. Nothing is said beyond the memory that was run. Intervals interpolate
 * every resample by itself (bootstrap.h) and have the level of BOOTSTRAP_LEVEL; without resamples they are NaN, as they
 * are where `b` is NULL. Functions return 0 or ERR_DATA (memory). */
#pragma once

#include "analyze/bootstrap.h"
#include "base/text.h"

typedef enum memory_measure { MEMORY_KV_BYTES, MEMORY_ENTRIES } memory_measure;

/* One series over budgets, each at the lag that is best there, as figure_budget shows it. That choice is not part of
 * the intervals. */
typedef struct memory_curve {
    memory_measure measure;
    size_t metric;
    size_t n;             /* at least 2 */
    const result **point; /* [n] by ascending memory, no two equal */
} memory_curve;

/* All of them, in the order of the results; oracles without a lag are curves, too. Release with memory_curves_free
 * either way. */
typedef struct memory_curves {
    memory_curve *item;
    size_t n, capacity;
} memory_curves;
int memory_curves_find(const results *r, size_t metric, memory_curves *out);
void memory_curves_free(memory_curves *c);

memory_measure memory_pick_measure(const results *r);
double memory_of(const result *c, memory_measure m);
double memory_least(const memory_curve *c);
double memory_most(const memory_curve *c);

/* Loss at a memory. Outside of the curve all of *out is NaN and, unless `why` is NULL, words are added to it that say
 * so: "outside of 64..512 entries". */
int memory_loss_at(bootstrap *b, const memory_curve *c, double memory, estimate *out, text *why);

/* The least memory at which the loss is no more than `loss`, along the curve made to fall (least squares on its scale:
 * pool adjacent violators). -INFINITY: less than the curve's least; INFINITY: more than its most. Both may be ends of
 * the interval of a finite value, and the value itself. */
int memory_at_loss(bootstrap *b, const memory_curve *c, double loss, estimate *out);

/* The memory that `c` needs for a loss, as a share of what `reference` needs for it, paired: .4 is 60 % saved. An end
 * is 0 or INFINITY where it lies beyond what was run; the value is NaN where one of the two does not come to the loss
 * in its range. */
int memory_share(bootstrap *b, const memory_curve *c, const memory_curve *reference, double loss, estimate *out);

/* What others are held against: the curve of the series with this name (result_series_name), or, with NULL, the best
 * policy without a lag: the lowest loss in the middle (of log(memory)) of the range that all of them share, those of 16
 * bits alone where there are any, no oracles. NULL: there is none. */
int memory_find_reference(const results *r, const memory_curves *all, const char *name, const memory_curve **out);

/* Up to `most` round losses (1, 2 or 5 times a power of ten) between the ends of as many policies' curves as possible
 * (no oracles), or of fewer, down to two, where that makes them three; ascending, spread over them where there are
 * more. Returns how many. */
size_t memory_round_losses(const memory_curves *all, size_t most, double *out);

/* A configuration that a server could run: no oracle, and all its memory counts. */
bool memory_is_real(const result *c);

/* The Pareto front: the configurations that no other has at most the cost and at most the loss of. cost:
 * [r->n_configs], NaN for those that take no part, as takes none whose metric is NaN. Of equals the first is in it.
 * *out [*n] by ascending cost, owned by the caller (mem_free). */
int memory_pareto(const results *r, const double *cost, size_t metric, const result ***out, size_t *n);

/* What an axis up to `most` says, and the unit that values on it are divided by. */
const char *memory_axis(memory_measure m, double most, double *unit);

/* "2.6 MB", "128 entries"; of a curve's estimate "2.6 MB (<1.1 MB..3.1 MB)" with open ends marked. */
int memory_add_words(text *t, memory_measure m, double memory);
int memory_add_estimate(text *t, const memory_curve *c, estimate e);
