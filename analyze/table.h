/* The short table: what each policy costs, best first within each budget. */
#pragma once

#include "analyze/bootstrap.h"

/* Print it to stdout: `metric` [n_metrics] are the metrics to show, sorted by the first, whose 90 % interval stands
 * beside it where there is one, and the ranks that decide_ranking gives where there are resamples. Of a policy with a
 * lag only the best lag is shown. Returns 0 or ERR_DATA (memory). */
int table_print(const results *r, bootstrap *b, const size_t *metric, size_t n_metrics);
