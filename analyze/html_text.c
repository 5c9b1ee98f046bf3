#include "analyze/html_text.h"
#include "analyze/shade.h"
#include "base/err.h"

int html_text_escape(text *html, const char *words) {
    for (; *words; words++) {
        char c = *words;
        TRY(c == '&'    ? text_add(html, "&amp;")
            : c == '<'  ? text_add(html, "&lt;")
            : c == '>'  ? text_add(html, "&gt;")
            : c == '"'  ? text_add(html, "&quot;")
            : c == '\'' ? text_add(html, "&#39;")
                        : text_add_bytes(html, &c, 1));
    }
    return 0;
}

int html_text_style(text *html) {
    TRY(text_add(html, "<style>\n"
                       ".kvlag-text { color: #000; font: 0.85rem/1.6 ui-monospace, 'DejaVu Sans Mono', monospace; }\n"
                       ".kvlag-text p { margin: 0 0 0.5em; padding: 0.4em; background: #fff; }\n"
                       ".kvlag-text .words { white-space: pre-wrap; overflow-wrap: anywhere; }\n"
                       ".kvlag-text span { padding: 0.15em 0; box-shadow: inset -1px 0 #fff; color: #000; }\n"
                       ".kvlag-text .key span { padding: 0.15em 0.5em; }\n"));
    for (int i = 0; i <= SHADES; i++) TRY(text_add(html, ".kvlag-text .r%d { background: %s; }\n", i, shade_colour(i)));
    return text_add(html, "</style>\n");
}

static int add_key(text *html, const tokens *t, int32_t first, int32_t end) {
    TRY(text_add(html, "<p class=\"key\">Kept for "));
    for (int i = 0; i <= SHADES; i++) TRY(text_add(html, "<span class=\"r%d\">%d</span>", i, 100 / SHADES * i));
    TRY(text_add(html, " %% of the later steps, mean over layers and heads. "));
    if (t->n_prompt > 0) TRY(text_add(html, "The first %d tokens are the prompt. ", t->n_prompt));
    if (end - first < t->n_tokens) TRY(text_add(html, "Tokens %d to %d of %d are shown.", first, end - 1, t->n_tokens));
    else TRY(text_add(html, "All %d tokens are shown.", t->n_tokens));
    return text_add(html, "</p>\n");
}

static int add_token(text *html, const tokens *t, const token_shares *s, int32_t i) {
    const glyphs *g = &t->glyphs;
    text words = {0};
    int code = text_add(html, "<span class=\"r%d\" title=\"token %d: %.0f %% of later steps, at the end in %.0f %%\">",
                        shade_of(s->kept[i]), i, 100 * s->kept[i], 100 * s->at_end[i]);
    for (size_t k = g->begin[i]; k < g->begin[i + 1] && !code; k++) {
        words.n = 0;
        code = glyphs_add(g, k, k + 1, &words);
        if (!code) code = html_text_escape(html, words.data);
        if (!code && g->item[k].kind == GLYPH_BREAK) code = text_add(html, "\n");
    }
    text_free(&words);
    return code ? code : text_add(html, "</span>");
}

int html_text_add(text *html, const tokens *t, const token_shares *s, int32_t first, int32_t most) {
    int32_t end = t->n_tokens - first > most ? first + most : t->n_tokens;
    TRY(text_add(html, "<div class=\"kvlag-text\">\n"));
    TRY(add_key(html, t, first, end));
    TRY(text_add(html, "<p class=\"words\" dir=\"auto\">"));
    for (int32_t i = first; i < end; i++) TRY(add_token(html, t, s, i));
    return text_add(html, "</p>\n</div>\n");
}
