/* Memory: checked, 64-byte aligned allocation and a carver for blocks of arrays.
 *
 * Everything comes back zeroed and aligned for AVX-512. Failure leaves an err_ message and returns NULL. */
#pragma once

#include <stddef.h>

/* count * size bytes, zeroed; count * size is checked for overflow. `what` names the thing in the message. */
void *mem_new(size_t count, size_t size, const char *what);
void mem_free(void *p); /* accepts NULL */
/* Blocks handed out so far, by all threads: for tests that nothing is allocated where nothing should be. */
size_t mem_handed_out(void);

/* A copy of `text` (or of its first n bytes), NUL-terminated, owned by the caller. */
char *mem_string(const char *text);
char *mem_string_n(const char *text, size_t n);

/* Grow an array for at least `need` elements, doubling; on failure *array and *capacity are unchanged. New elements
 * are zeroed. Returns 0 or ERR_DATA. Usage: mem_grow((void **)&list, &capacity, n + 1, sizeof *list, "list"). */
int mem_grow(void **array, size_t *capacity, size_t need, size_t size, const char *what);

/* One allocation, carved: size everything with a carver whose base is NULL, allocate, carve again.
 *
 *     for (int pass = 0; pass < 2; pass++) {
 *         mem_carver c = {.base = block};
 *         s->a = mem_carve(&c, n, sizeof *s->a);
 *         if (pass == 0) block = mem_new(c.used, 1, "state");
 *     }
 */
typedef struct mem_carver {
    char *base;
    size_t used;
} mem_carver;
void *mem_carve(mem_carver *c, size_t count, size_t size);
