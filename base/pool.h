/* A thread pool for loops whose iterations are independent. */
#pragma once

#include <stddef.h>

typedef struct pool pool;

/* One iteration. `worker` is 0 .. pool_threads()-1 and picks per-thread scratch memory; a result must not depend on
 * it. Returns 0 or an error code with its err_ message set. */
typedef int (*pool_task)(void *context, size_t task, int worker);

/* `threads` >= 1 workers, the calling thread included; 0 = one for each processor this process may use.
 * Returns 0 or ERR_DATA. */
int pool_new(int threads, pool **out);
void pool_free(pool *p); /* accepts NULL */
int pool_threads(const pool *p);

/* Run tasks 0 .. n-1, handed out in order. Returns 0, or the code of the lowest failing task with its message; tasks
 * after a failure may not have run. Not re-entrant: a task must not call pool_run on the same pool. */
int pool_run(pool *p, size_t n, pool_task run, void *context);
