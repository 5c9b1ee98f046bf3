#include "sim/footprint.h"

#include <stdbool.h>
#include <string.h>

/* First step that does not see entry i: eviction, window or end, whichever comes first. */
static int32_t gone_at(const int32_t *evict_at, int32_t i, int32_t n_tokens, int32_t window) {
    int64_t gone = evict_at[i];
    if (window && gone > (int64_t)i + window) gone = (int64_t)i + window;
    return (int32_t)(gone > n_tokens ? n_tokens : gone);
}

static void add_visible(footprint *f, const int32_t *evict_at, int32_t n_tokens, int32_t n_prompt, int32_t window,
                        int32_t *leaving) {
    memset(leaving, 0, ((size_t)n_tokens + 2) * sizeof *leaving);
    for (int32_t i = 0; i < n_tokens; i++) leaving[gone_at(evict_at, i, n_tokens, window)]++;
    int32_t visible = 0, peak = 0;
    for (int32_t t = 0; t < n_tokens; t++) {
        visible += 1 - leaving[t];
        f->visible += visible;
        if (t >= n_prompt) f->decoded += visible;
        if (visible > peak) peak = visible;
    }
    f->peak += peak;
}

/* An entry is evicted, or expires when its window closes, or is in reach to the end. */
static void add_leaving(footprint *f, const int32_t *evict_at, int32_t n_tokens, int32_t window, int32_t *batch) {
    memset(batch, 0, ((size_t)n_tokens + 2) * sizeof *batch);
    for (int32_t i = 0; i < n_tokens; i++) {
        int64_t closes = window ? (int64_t)i + window : INT64_MAX;
        bool told = evict_at[i] <= n_tokens;
        if (told && evict_at[i] < closes) {
            f->evictions++;
            batch[evict_at[i]] = 1;
        } else if (told || closes < n_tokens) {
            f->expired++;
        }
    }
    for (int32_t t = 0; t <= n_tokens; t++) f->batches += batch[t];
}

/* Steps after the prompt in which an entry is seen at an age below hold. */
static void add_young(footprint *f, const int32_t *evict_at, int32_t n_tokens, int32_t n_prompt, int32_t window,
                      int32_t hold) {
    for (int32_t i = 0; i < n_tokens; i++) {
        int64_t from = i > n_prompt ? i : n_prompt, to = gone_at(evict_at, i, n_tokens, window);
        if (to > (int64_t)i + hold) to = (int64_t)i + hold;
        if (to > from) f->young += (double)(to - from);
    }
}

void footprint_add(footprint *f, const int32_t *evict_at, int32_t n_tokens, int32_t n_prompt, int32_t window,
                   int32_t hold, const int32_t *probes, size_t n_probes, int32_t *scratch) {
    f->units++;
    add_visible(f, evict_at, n_tokens, n_prompt, window, scratch);
    add_young(f, evict_at, n_tokens, n_prompt, window, hold);
    add_leaving(f, evict_at, n_tokens, window, scratch);
    for (size_t k = 0; k < n_probes; k++) {
        int32_t entry = probes[2 * k], step = probes[2 * k + 1];
        f->probes++;
        if (entry <= step && step < evict_at[entry] && (!window || step - entry < window)) f->retained++;
    }
}
