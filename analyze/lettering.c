#include "analyze/lettering.h"
#include "analyze/glyphs.h"
#include "analyze/gnuplot.h"
#include "base/err.h"
#include "base/mem.h"

#include <stdbool.h>
#include <string.h>

/* Every font has them: Latin with its two supplements. */
static bool everywhere(uint32_t c) {
    return c < 0x180;
}

/* Not drawn themselves: joiners and variation selectors. */
static bool silent(uint32_t c) {
    return (c >= 0x200c && c <= 0x200d) || (c >= 0xfe00 && c <= 0xfe0f) || (c >= 0xe0100 && c <= 0xe01ef);
}

/* Of UTF-8 that is right. */
static uint32_t next(const char *words, size_t *bytes) {
    const uint8_t *p = (const uint8_t *)words;
    *bytes = p[0] < 0x80 ? 1 : p[0] < 0xe0 ? 2 : p[0] < 0xf0 ? 3 : 4;
    uint32_t c = *bytes == 1 ? p[0] : p[0] & (0x7fu >> *bytes);
    for (size_t i = 1; i < *bytes; i++) c = c << 6 | (p[i] & 0x3f);
    return c;
}

static int add(lettering *l, uint32_t c) {
    size_t at = l->n;
    while (at > 0 && l->item[at - 1] > c) at--;
    if (at > 0 && l->item[at - 1] == c) return 0;
    TRY(mem_grow((void **)&l->item, &l->capacity, l->n + 1, sizeof *l->item, "characters"));
    memmove(l->item + at + 1, l->item + at, (l->n - at) * sizeof *l->item);
    l->item[at] = c;
    l->n++;
    return 0;
}

int lettering_note(lettering *l, const char *words, size_t bytes) {
    for (size_t at = 0, n; at < bytes; at += n) {
        uint32_t c = next(words + at, &n);
        if (!everywhere(c) && !silent(c)) TRY(add(l, c));
    }
    return 0;
}

int lettering_define(const lettering *l, text *script) {
    TRY(text_add(script, "# Is there a font with these characters? (lettering.h)\n"
                         "has(set) = format eq 'svg' || strlen(system(\"fc-list ':charset=\" . set . \"' family "
                         "2>/dev/null\")) > 0\n"
                         "box = has('25a1') ? '\xe2\x96\xa1' : '?'\n"));
    for (size_t i = 0; i < l->n; i++) {
        uint32_t block = l->item[i] >> 8;
        if (i == 0 || l->item[i - 1] >> 8 != block) TRY(text_add(script, "has_%x = has('", block));
        TRY(text_add(script, "%x", l->item[i]));
        TRY(text_add(script, i + 1 < l->n && l->item[i + 1] >> 8 == block ? " " : "')\n"));
    }
    return 0;
}

/* The bytes from `words` on that belong together: Latin, or of one block; and how many boxes stand for them. */
static size_t run_of(const char *words, uint32_t *block, size_t *boxes) {
    size_t bytes = 0, n;
    bool first = true, latin = false;
    for (*boxes = 0; words[bytes]; bytes += n) {
        uint32_t c = next(words + bytes, &n);
        if (silent(c)) continue;
        if (!first && (everywhere(c) != latin || (!latin && c >> 8 != *block))) break;
        latin = everywhere(c);
        *block = latin ? 0 : c >> 8;
        *boxes += glyph_columns(c) > 0;
        first = false;
    }
    return bytes;
}

int lettering_quote(text *script, const char *words) {
    text run = {0};
    int code = 0;
    uint32_t block = 0;
    size_t boxes, all = run_of(words, &block, &boxes);
    if (block == 0 && !words[all]) return gnuplot_quote(script, words);
    TRY(text_add(script, "("));
    for (const char *at = words; *at && !code; at += run.n) {
        run.n = 0;
        block = 0;
        code = text_add_bytes(&run, at, run_of(at, &block, &boxes));
        if (!code) code = text_add(script, at == words ? "" : ".");
        if (!code && block) code = text_add(script, "(has_%x ? ", block);
        if (!code) code = gnuplot_quote(script, run.data);
        if (!code && block) code = text_add(script, " : ''");
        for (size_t i = 0; i < boxes && block && !code; i++) code = text_add(script, ".box");
        if (!code && block) code = text_add(script, ")");
    }
    text_free(&run);
    return code ? code : text_add(script, ")");
}

void lettering_free(lettering *l) {
    mem_free(l->item);
    *l = (lettering){0};
}
