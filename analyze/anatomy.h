/* Where the loss of a configuration arises: by layer and query head, and along the text. Read from the blocks of its
 * rows (evidence.h); all values are means over its sequences.
 *
 * What a head or a step adds is, for kl_est, c times its Fisher term, c being the row's kl_est / fisher (0 where that
 * is 0); for dloss_est its first-order part besides; for lost_mass its lost mass. */
#pragma once

#include "analyze/evidence.h"
#include "analyze/results.h"

#include <stdbool.h>

/* dloss_est, kl_est and lost_mass can be told apart so; the others cannot. */
bool anatomy_tells(size_t metric);

/* What each query head's own disturbance costs in nats per token, or its lost mass. Its Fisher term is the square of
 * its own disturbance, without the products with other heads', so the values of kl_est and dloss_est do not add up to
 * the configuration's; lost masses average to it. */
typedef struct head_map {
    size_t n_layer, n_head; /* the largest of the configuration's rows */
    double *value;          /* [n_layer][n_head]; NaN where a sequence's model has no such head, or no such value */
} head_map;

/* Release with head_map_free either way. Returns 0 or ERR_DATA (memory). */
int head_map_new(const evidence *e, const result *config, size_t metric, head_map *out);
void head_map_free(head_map *map);
bool head_map_has_values(const head_map *map);

/* For every head of n maps of one shape the index of the map where its value is lowest, the first of equals; -1 where a
 * value is missing, or where none is lower than the highest by `least` of that. `out` [n_layer * n_head]. */
void head_map_lowest(const head_map *map, size_t n, double least, int *out);

/* Along the text, by the step that is disturbed (the loss itself falls there and later): what a step of each block
 * adds, such that the mean over steps is the configuration's metric. NaN: no step, or no such value. */
void anatomy_along(const evidence *e, const result *config, size_t metric, double value[BLOCKS_PER_ROW]);

/* Where the blocks begin and, at last, the last one ends. In steps (tokens), and true returned, where all sequences
 * have the same number of steps and prompt and count all of them; else as shares of what follows the prompt, in
 * percent. */
bool anatomy_bounds(const evidence *e, const result *config, double bound[BLOCKS_PER_ROW + 1]);

/* The mean of `width` neighbours, centred as far as possible; at the ends of those there are. NaN are no neighbours;
 * where a value is NaN, so is its mean. */
void anatomy_smooth(const double value[BLOCKS_PER_ROW], size_t width, double mean[BLOCKS_PER_ROW]);

/* ---- which configurations to look into -------------------------------------------------------------------------- */

typedef bool config_test(const result *c);
bool config_waits(const result *c);     /* a policy with a lag, oracles apart */
bool config_is_filter(const result *c); /* a policy without a lag, oracles apart */

/* Is a to be shown rather than b? Pending charged before free, since the budget is meant to be memory; then the lower
 * value. */
bool config_better(const result *a, const result *b, size_t metric);

/* The best at a budget of those that pass and have a value; NULL if there is none. */
const result *anatomy_best(const results *r, size_t metric, const char *budget_asked, config_test *passes);

/* The middle one, or the smaller of two, of the budgets at which a configuration passes; NULL if there is none. */
const char *anatomy_budget(const results *r, size_t metric, config_test *passes);

/* "rmm, lag 32" or "ema", at most `most` characters (20 or more): the series' name is cut, the lag is not. Owned by the
 * caller; NULL on failure. */
char *anatomy_name(const results *r, const result *c, size_t most);
