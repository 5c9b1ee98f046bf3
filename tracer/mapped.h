/* A file mapped for reading: nothing of it is read until it is looked at. */
#pragma once

#include <stddef.h>

typedef struct mapped {
    const unsigned char *base; /* NULL: not open */
    size_t size;
} mapped;

/* Map a regular file that is not empty. `what` names what it should be in messages ("GGUF file"); these do not name the
 * path: callers put it in front.
 *
 * A file that is cut while it is mapped raises SIGBUS on the next access. We do not guard against that: it needs
 * somebody to truncate a model in use, and copying gigabytes of weights to survive it would cost every other run. */
int mapped_open(mapped *m, const char *path, const char *what);
void mapped_close(mapped *m); /* accepts one that is not open */

/* ERR_DATA for a file that does not begin as it should, with what people really have in hand then: Git LFS pointers,
 * HTML pages. Else "not a `what`". */
int mapped_refuse(const mapped *m, const char *what);
