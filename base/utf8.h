/* UTF-8 and white space, of texts that may hold any bytes. */
#pragma once

#include <stddef.h>

/* Length of the UTF-8 character (RFC 3629) at text, 0 if there is none; n > 0. */
size_t utf8_length(const char *text, size_t n);

/* Length of the white space character (Unicode's White_Space) at text, 0 if there is none. */
size_t utf8_space(const char *text, size_t n);
/* The same for the one that ends at text + n. */
size_t utf8_space_before(const char *text, size_t n);
