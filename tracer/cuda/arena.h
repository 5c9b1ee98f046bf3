/* One device allocation, carved: the device's counterpart of mem_carver. Sizes first with base NULL, then places. */
#pragma once

#include <stddef.h>

typedef struct arena {
    char *base;
    size_t used;
} arena;

/* count * size bytes, 256-byte aligned. */
static inline void *arena_take(arena *a, size_t count, size_t size) {
    void *p = a->base ? a->base + a->used : NULL;
    a->used += (count * size + 255) / 256 * 256;
    return p;
}
