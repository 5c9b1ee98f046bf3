/* What lifetimes alone tell: how full the cache was and what left it. */
#pragma once

#include <stddef.h>
#include <stdint.h>

typedef struct footprint {
    double units;            /* units added so far */
    double visible;          /* visible entries summed over steps and units */
    double decoded;          /* the same over the steps after the prompt */
    double young;            /* of these, entries of ages below `hold` */
    double peak;             /* most visible entries in any step of any unit, the arriving one included */
    double evictions;        /* entries that left before their window or the end took them, over all units */
    double batches;          /* steps after which at least one was evicted, over all units */
    double expired;          /* entries that their window took, over all units */
    double probes, retained; /* probes (entry, later step) seen, and those whose entry was visible, over all units */
} footprint;

/* Add one unit's lifetimes evict_at [T], the first n_prompt steps being the prompt; window 0 = none; probes
 * [n_probes][2] or NULL. `scratch` holds T+2 i32. */
void footprint_add(footprint *f, const int32_t *evict_at, int32_t n_tokens, int32_t n_prompt, int32_t window,
                   int32_t hold, const int32_t *probes, size_t n_probes, int32_t *scratch);
