#include "base/mem.h"
#include "base/err.h"

#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { ALIGN = 64 };

static atomic_size_t handed_out;

void *mem_new(size_t count, size_t size, const char *what) {
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes) || bytes > SIZE_MAX - ALIGN) {
        err_set(ERR_DATA, "%s: %zu x %zu bytes do not fit an address space", what, count, size);
        return NULL;
    }
    bytes = (bytes + ALIGN) & ~(size_t)(ALIGN - 1);
    void *p = aligned_alloc(ALIGN, bytes);
    if (!p) {
        err_set(ERR_DATA, "%s: out of memory (%zu bytes)", what, bytes);
        return NULL;
    }
    atomic_fetch_add_explicit(&handed_out, 1, memory_order_relaxed);
    return memset(p, 0, bytes);
}

size_t mem_handed_out(void) {
    return atomic_load(&handed_out);
}

void mem_free(void *p) {
    free(p);
}

char *mem_string_n(const char *text, size_t n) {
    char *copy = mem_new(n + 1, 1, "text");
    if (copy) memcpy(copy, text, n);
    return copy;
}

char *mem_string(const char *text) {
    return mem_string_n(text, strlen(text));
}

int mem_grow(void **array, size_t *capacity, size_t need, size_t size, const char *what) {
    if (need <= *capacity) return 0;
    size_t grown = *capacity ? *capacity : 8;
    while (grown < need) {
        if (grown > SIZE_MAX / 2) return err_set(ERR_DATA, "%s: too large", what);
        grown *= 2;
    }
    void *bigger = mem_new(grown, size, what);
    if (!bigger) return ERR_DATA;
    if (*array) memcpy(bigger, *array, *capacity * size);
    mem_free(*array);
    *array = bigger;
    *capacity = grown;
    return 0;
}

void *mem_carve(mem_carver *c, size_t count, size_t size) {
    size_t at = c->used;
    c->used = (at + count * size + ALIGN - 1) & ~(size_t)(ALIGN - 1);
    return c->base ? c->base + at : NULL;
}
