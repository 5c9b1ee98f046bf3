#include "analyze/page.h"
#include "base/err.h"
#include "base/mem.h"

#include <stdbool.h>

typedef struct layout {
    const glyphs *g;
    int32_t n_tokens, width, line, column;
    bool broken; /* a line break was met, the next line is not begun yet */
    page *page;
} layout;

/* May a line end between token t-1 and token t? */
static bool may_break(const layout *l, int32_t t) {
    const glyph *last = &l->g->item[l->g->begin[t] - 1], *first = &l->g->item[l->g->begin[t]];
    return first->kind == GLYPH_SPACE || last->kind == GLYPH_SPACE || first->columns == 2 || last->columns == 2;
}

/* Columns from glyph `from` of the token to where a line may end, or must, which stands outside of the width. */
static int32_t word_columns(const layout *l, int32_t token, size_t from) {
    int32_t columns = 0;
    for (int32_t t = token; t < l->n_tokens && (t == token || !may_break(l, t)); t++)
        for (size_t i = t == token ? from : l->g->begin[t]; i < l->g->begin[t + 1]; i++) {
            if (l->g->item[i].kind == GLYPH_BREAK) return columns;
            columns += l->g->item[i].columns;
            if (columns > l->width) return columns;
        }
    return columns;
}

static void begin_line(layout *l) {
    l->line++;
    l->column = 0;
    l->broken = false;
}

static int place(layout *l, int32_t token, size_t i) {
    const glyph *c = &l->g->item[i];
    page *p = l->page;
    bool mark = c->kind == GLYPH_BREAK;
    if (l->broken && (!mark || l->column > l->width)) begin_line(l);
    if (!mark && l->column + c->columns > l->width) begin_line(l);
    page_segment *s = p->n ? &p->item[p->n - 1] : NULL;
    if (!s || s->token != token || s->line != l->line || s->to != i) {
        TRY(mem_grow((void **)&p->item, &p->capacity, p->n + 1, sizeof *p->item, "page"));
        s = &p->item[p->n++];
        *s = (page_segment){token, l->line, l->column, 0, i, i};
    }
    s->to = i + 1;
    s->columns += c->columns;
    l->column += c->columns;
    l->broken |= mark;
    return 0;
}

/* Where the token begins a word, the word goes to the next line if it fits there and not here; a blank before it is
 * then left out. */
static int place_token(layout *l, int32_t t, bool opens_word) {
    size_t i = l->g->begin[t], end = l->g->begin[t + 1];
    bool blank = l->g->item[i].kind == GLYPH_SPACE && end - i > 1;
    if (opens_word && !l->broken && l->column > 0) {
        int32_t columns = word_columns(l, t, i + blank), room = l->width - l->column - blank;
        if (columns > room && columns <= l->width) {
            begin_line(l);
            i += blank;
        }
    }
    for (; i < end; i++) TRY(place(l, t, i));
    return 0;
}

int page_lay_out(const glyphs *g, int32_t n_tokens, int32_t width, page *out) {
    layout l = {.g = g, .n_tokens = n_tokens, .width = width, .page = out};
    *out = (page){0};
    for (int32_t t = 0; t < n_tokens; t++) {
        int code = place_token(&l, t, t == 0 || may_break(&l, t));
        if (!code) continue;
        page_free(out);
        return code;
    }
    out->n_lines = l.line + 1;
    return 0;
}

void page_free(page *p) {
    mem_free(p->item);
    *p = (page){0};
}
