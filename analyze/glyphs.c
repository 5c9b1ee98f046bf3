#include "analyze/glyphs.h"
#include "base/err.h"
#include "base/mem.h"

#include <stdbool.h>

#define NO_CHARACTER "\xef\xbf\xbd"
#define DOTTED_CIRCLE "\xe2\x97\x8c"
#define EMPTY_BOX "\xe2\x96\xaf"

/* ---- classes of characters -------------------------------------------------------------------------------------- */

typedef struct range {
    uint32_t first, last;
} range;

/* Of two columns: Unicode's East Asian Width W and F, rounded to blocks, and emoji shown as pictures. */
static const range wide[] = {
    {0x1100, 0x115f},   {0x231a, 0x231b},   {0x2329, 0x232a},   {0x23e9, 0x23ec},   {0x23f0, 0x23f0},
    {0x23f3, 0x23f3},   {0x25fd, 0x25fe},   {0x2614, 0x2615},   {0x2648, 0x2653},   {0x267f, 0x267f},
    {0x2693, 0x2693},   {0x26a1, 0x26a1},   {0x26aa, 0x26ab},   {0x26bd, 0x26be},   {0x26c4, 0x26c5},
    {0x26ce, 0x26ce},   {0x26d4, 0x26d4},   {0x26ea, 0x26ea},   {0x26f2, 0x26f3},   {0x26f5, 0x26f5},
    {0x26fa, 0x26fa},   {0x26fd, 0x26fd},   {0x2705, 0x2705},   {0x270a, 0x270b},   {0x2728, 0x2728},
    {0x274c, 0x274c},   {0x274e, 0x274e},   {0x2753, 0x2755},   {0x2757, 0x2757},   {0x2795, 0x2797},
    {0x27b0, 0x27b0},   {0x27bf, 0x27bf},   {0x2b1b, 0x2b1c},   {0x2b50, 0x2b50},   {0x2b55, 0x2b55},
    {0x2e80, 0x303e},   {0x3041, 0x3098},   {0x309b, 0xa4cf},   {0xa960, 0xa97f},   {0xac00, 0xd7a3},
    {0xf900, 0xfaff},   {0xfe10, 0xfe19},   {0xfe30, 0xfe6f},   {0xff01, 0xff60},   {0xffe0, 0xffe6},
    {0x16fe0, 0x18dff}, {0x1aff0, 0x1b2ff}, {0x1f004, 0x1f004}, {0x1f0cf, 0x1f0cf}, {0x1f18e, 0x1f18e},
    {0x1f191, 0x1f19a}, {0x1f1e6, 0x1f320}, {0x1f32d, 0x1f335}, {0x1f337, 0x1f37c}, {0x1f37e, 0x1f393},
    {0x1f3a0, 0x1f3ca}, {0x1f3cf, 0x1f3d3}, {0x1f3e0, 0x1f3fa}, {0x1f400, 0x1f4fc}, {0x1f4ff, 0x1f53d},
    {0x1f54b, 0x1f567}, {0x1f57a, 0x1f57a}, {0x1f595, 0x1f596}, {0x1f5a4, 0x1f5a4}, {0x1f5fb, 0x1f64f},
    {0x1f680, 0x1f6ff}, {0x1f7e0, 0x1f7eb}, {0x1f90c, 0x1f9ff}, {0x1fa70, 0x1faff}, {0x20000, 0x3fffd},
};

/* Drawn over or into the character before them: combining marks of the common scripts, variation selectors, the joiner
 * of emoji and their skin tones. */
static const range joining[] = {
    {0x0300, 0x036f}, {0x0483, 0x0489}, {0x0591, 0x05bd}, {0x05bf, 0x05bf}, {0x05c1, 0x05c2},   {0x05c4, 0x05c5},
    {0x05c7, 0x05c7}, {0x0610, 0x061a}, {0x064b, 0x065f}, {0x0670, 0x0670}, {0x06d6, 0x06dc},   {0x06df, 0x06e4},
    {0x06e7, 0x06e8}, {0x06ea, 0x06ed}, {0x0900, 0x0903}, {0x093a, 0x093c}, {0x093e, 0x094f},   {0x0951, 0x0957},
    {0x0981, 0x0983}, {0x09bc, 0x09bc}, {0x09be, 0x09cd}, {0x0b82, 0x0b82}, {0x0bbe, 0x0bcd},   {0x0e31, 0x0e31},
    {0x0e34, 0x0e3a}, {0x0e47, 0x0e4e}, {0x1ab0, 0x1aff}, {0x1dc0, 0x1dff}, {0x200c, 0x200d},   {0x20d0, 0x20ff},
    {0x302a, 0x302f}, {0x3099, 0x309a}, {0xfe00, 0xfe0f}, {0xfe20, 0xfe2f}, {0x1f3fb, 0x1f3ff}, {0xe0100, 0xe01ef},
};

/* Nothing to see, and the characters that turn the direction of a text. */
static const range invisible[] = {
    {0x00ad, 0x00ad}, {0x034f, 0x034f}, {0x061c, 0x061c}, {0x180e, 0x180e}, {0x200b, 0x200b},   {0x200e, 0x200f},
    {0x202a, 0x202e}, {0x2060, 0x206f}, {0xfeff, 0xfeff}, {0xfff9, 0xfffb}, {0xe0000, 0xe007f},
};

static bool among(uint32_t c, const range *r, size_t n) {
    for (size_t i = 0; i < n && r[i].first <= c; i++)
        if (c <= r[i].last) return true;
    return false;
}
#define AMONG(c, ranges) among(c, ranges, sizeof(ranges) / sizeof *(ranges))

int glyph_columns(uint32_t c) {
    return AMONG(c, joining) ? 0 : AMONG(c, wide) ? 2 : 1;
}

/* ---- UTF-8 ------------------------------------------------------------------------------------------------------ */

/* The character at p, of n bytes: its length and *c; 0 where there is none. */
static size_t decode(const uint8_t *p, size_t n, uint32_t *c) {
    if (p[0] < 0x80) {
        *c = p[0];
        return 1;
    }
    size_t length = p[0] >= 0xf0 ? 4 : p[0] >= 0xe0 ? 3 : 2;
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    if (p[0] < 0xc2 || p[0] > 0xf4 || n < length) return 0;
    *c = p[0] & (0xffu >> (length + 1));
    for (size_t i = 1; i < length; i++) {
        if ((p[i] & 0xc0) != 0x80) return 0;
        *c = *c << 6 | (p[i] & 0x3f);
    }
    return *c < least[length] || *c > 0x10ffff || (*c >= 0xd800 && *c < 0xe000) ? 0 : length;
}

/* XML and HTML have no room for these. */
static bool no_character(uint32_t c) {
    return (c >= 0x80 && c < 0xa0) || (c >= 0xfdd0 && c < 0xfdf0) || (c & 0xfffe) == 0xfffe || c == 0x2028 ||
           c == 0x2029;
}

/* ---- glyphs ----------------------------------------------------------------------------------------------------- */

static int add(glyphs *g, const void *bytes, size_t n, glyph_kind kind, uint8_t columns) {
    TRY(mem_grow((void **)&g->item, &g->capacity, g->n + 1, sizeof *g->item, "characters"));
    g->item[g->n++] = (glyph){g->text.n, (uint8_t)n, columns, (uint8_t)kind};
    return text_add_bytes(&g->text, bytes, n);
}

static int add_mark(glyphs *g, const char *mark) {
    return add(g, mark, 3, GLYPH_PLAIN, 1);
}

/* The sign is broader than one column in many fonts. */
static int add_broken(glyphs *g) {
    return add(g, NO_CHARACTER, 3, GLYPH_PLAIN, 2);
}

static int join(glyphs *g, const uint8_t *bytes, size_t n, bool first_of_token) {
    if (first_of_token || g->item[g->n - 1].kind != GLYPH_PLAIN || g->item[g->n - 1].bytes > 64)
        TRY(add_mark(g, DOTTED_CIRCLE));
    g->item[g->n - 1].bytes += (uint8_t)n;
    return text_add_bytes(&g->text, bytes, n);
}

static int add_character(glyphs *g, uint32_t c, const uint8_t *bytes, size_t n, bool first_of_token) {
    if (c == '\n') return add(g, GLYPH_LINE_BREAK, 3, GLYPH_BREAK, 1);
    if (c == '\t') return add_mark(g, "\xe2\x86\x92");
    if (c < 0x20 || c == 0x7f) return add(g, (const char[]){'^', (char)(c ^ 0x40)}, 2, GLYPH_PLAIN, 2);
    if (c == ' ' || c == 0xa0 || c == 0x3000)
        return add(g, "  ", c == 0x3000 ? 2 : 1, GLYPH_SPACE, c == 0x3000 ? 2 : 1);
    if (no_character(c)) return add_broken(g);
    if (AMONG(c, invisible)) return 0;
    int columns = glyph_columns(c);
    if (columns == 0) return join(g, bytes, n, first_of_token);
    return add(g, bytes, n, GLYPH_PLAIN, (uint8_t)columns);
}

static int read_all(const uint8_t *pieces, const int64_t *offset, int32_t n_tokens, glyphs *g) {
    int64_t at = offset[0], end = offset[n_tokens];
    for (int32_t t = 0; t < n_tokens; t++) {
        size_t first = g->begin[t] = g->n;
        bool continued = offset[t] < offset[t + 1] && at >= offset[t + 1];
        while (at < offset[t + 1]) {
            uint32_t c = 0;
            size_t length = decode(pieces + at, (size_t)(end - at), &c);
            TRY(length ? add_character(g, c, pieces + at, length, g->n == first) : add_broken(g));
            at += length ? (int64_t)length : 1;
        }
        if (g->n == first) TRY(add_mark(g, continued ? GLYPH_CONTINUED : EMPTY_BOX));
    }
    g->begin[n_tokens] = g->n;
    return 0;
}

int glyphs_read(const uint8_t *pieces, const int64_t *offset, int32_t n_tokens, glyphs *out) {
    *out = (glyphs){.begin = mem_new((size_t)n_tokens + 1, sizeof *out->begin, "characters")};
    int code = out->begin ? read_all(pieces, offset, n_tokens, out) : ERR_DATA;
    if (code) glyphs_free(out);
    return code;
}

void glyphs_free(glyphs *g) {
    text_free(&g->text);
    mem_free(g->item);
    mem_free(g->begin);
    *g = (glyphs){0};
}

size_t glyphs_columns(const glyphs *g, size_t from, size_t to) {
    size_t columns = 0;
    for (size_t i = from; i < to; i++) columns += g->item[i].columns;
    return columns;
}

int glyphs_add(const glyphs *g, size_t from, size_t to, text *out) {
    if (from >= to) return 0;
    size_t begin = g->item[from].at, end = g->item[to - 1].at + g->item[to - 1].bytes;
    return text_add_bytes(out, g->text.data + begin, end - begin);
}
