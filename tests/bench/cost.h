/* What a stretch of work cost: wall time, and processor time of all threads together, which other programs on a busy
 * machine disturb least. */
#pragma once

#include "base/progress.h"

#include <time.h>

typedef struct cost {
    double wall, processor; /* seconds */
} cost;

static inline cost cost_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (cost){progress_seconds(), (double)t.tv_sec + 1e-9 * (double)t.tv_nsec};
}

static inline cost cost_since(cost start) {
    cost end = cost_now();
    return (cost){end.wall - start.wall, end.processor - start.processor};
}
