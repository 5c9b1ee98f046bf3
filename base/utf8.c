#include "base/utf8.h"

#include <string.h>

size_t utf8_length(const char *text, size_t n) {
    const unsigned char *s = (const unsigned char *)text;
    if (s[0] < 0x80) return 1;
    size_t length = s[0] < 0xe0 ? 2 : s[0] < 0xf0 ? 3 : 4;
    if (s[0] < 0xc2 || s[0] > 0xf4 || length > n) return 0;
    unsigned char low = s[0] == 0xe0 ? 0xa0 : s[0] == 0xf0 ? 0x90 : 0x80;  /* no overlong forms */
    unsigned char high = s[0] == 0xed ? 0x9f : s[0] == 0xf4 ? 0x8f : 0xbf; /* no surrogates, nothing above U+10FFFF */
    if (s[1] < low || s[1] > high) return 0;
    for (size_t i = 2; i < length; i++)
        if ((s[i] & 0xc0) != 0x80) return 0;
    return length;
}

size_t utf8_space(const char *text, size_t n) {
    static const char *const wide[] = {"\xc2\x85", "\u00a0", "\u1680", "\u2000", "\u2001", "\u2002", "\u2003",
                                       "\u2004",   "\u2005", "\u2006", "\u2007", "\u2008", "\u2009", "\u200a",
                                       "\u2028",   "\u2029", "\u202f", "\u205f", "\u3000"};
    if (n && (*text == ' ' || (*text >= '\t' && *text <= '\r'))) return 1;
    for (size_t i = 0; i < sizeof wide / sizeof *wide; i++) {
        size_t length = strlen(wide[i]);
        if (length <= n && memcmp(text, wide[i], length) == 0) return length;
    }
    return 0;
}

size_t utf8_space_before(const char *text, size_t n) {
    for (size_t length = 1; length <= 3 && length <= n; length++)
        if (utf8_space(text + n - length, length) == length) return length;
    return 0;
}
