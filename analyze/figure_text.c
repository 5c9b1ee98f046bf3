/* The text, each token on a background that says for how long it was kept: by a policy, and beside it by an oracle. */
#include "analyze/canvas.h"
#include "analyze/gnuplot.h"
#include "analyze/lettering.h"
#include "analyze/page.h"
#include "analyze/shade.h"
#include "analyze/tokens.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/progress.h"

#include <math.h>
#include <string.h>

/* Inches and points. A column of the font is 0.602 of its size wide. */
#define FONT 5.5
#define COLUMN (0.602 * FONT / 72)
#define LINE 0.112
#define MARGIN 0.06
#define TOP 0.33
#define LOST 0.25 /* of the later steps: tokens that the oracle sees in as many more are underlined */
enum { COLUMNS = 72, GUTTER = 3, MOST_LINES = 48, PANELS = 2 };

typedef struct text_plot {
    tokens *tokens;
    token_pair pair;
    token_shares shares[PANELS];
    int n_panels;
    page page;
    int32_t first_line, n_lines, first_token, last_token;
    double width, height;
    figure *figure;
} text_plot;

static size_t config_of(const text_plot *p, int panel) {
    return panel ? p->pair.oracle : p->pair.config;
}

static int32_t left_of(int panel) {
    return panel * (COLUMNS + 1 + GUTTER);
}

/* Room for the key and, in one column, the note under it. */
static double bottom_of(const text_plot *p) {
    return p->n_panels == 2 ? 0.36 : 0.43;
}

/* ---- which part of the text ------------------------------------------------------------------------------------- */

/* The lines in which the two differ most; the first ones where there are no two, or no choice. */
static int choose_lines(text_plot *p) {
    int32_t n = p->page.n_lines;
    p->n_lines = n < MOST_LINES ? n : MOST_LINES;
    double *differ = mem_new((size_t)n + 1, sizeof *differ, "lines"), most = 0;
    if (!differ) return ERR_DATA;
    for (size_t i = 0; i < p->page.n && p->n_panels == 2; i++) {
        const page_segment *s = &p->page.item[i];
        differ[s->line + 1] += fabs(p->shares[1].kept[s->token] - p->shares[0].kept[s->token]);
    }
    for (int32_t line = 0; line < n; line++) differ[line + 1] += differ[line];
    for (int32_t line = 0; line + p->n_lines <= n; line++) {
        double here = differ[line + p->n_lines] - differ[line];
        if (here <= most) continue;
        most = here;
        p->first_line = line;
    }
    mem_free(differ);
    return 0;
}

static bool shown(const text_plot *p, const page_segment *s) {
    return s->line >= p->first_line && s->line < p->first_line + p->n_lines;
}

/* ---- the data --------------------------------------------------------------------------------------------------- */

/* In double quotes, a quote or backslash behind a backslash. */
static int add_quoted(const text_plot *p, const page_segment *s, text *t) {
    text words = {0};
    int code = glyphs_add(&p->tokens->glyphs, s->from, s->to, &words);
    if (!code) code = text_add(t, "\"");
    for (const char *c = words.data; !code && *c; c++) code = text_add(t, *c == '"' || *c == '\\' ? "\\%c" : "%c", *c);
    text_free(&words);
    return code ? code : text_add(t, "\"\n");
}

static int write_data(text_plot *p) {
    text *t = &p->figure->data, comment = {0};
    size_t index;
    int code = text_add(&comment, "share of later steps that see the token under ");
    if (!code) code = tokens_name(p->tokens, p->pair.config, &comment);
    if (!code && p->n_panels == 2) code = text_add(&comment, " (kept) and ");
    if (!code && p->n_panels == 2) code = tokens_name(p->tokens, p->pair.oracle, &comment);
    if (!code && p->n_panels == 2) code = text_add(&comment, " (oracle)");
    if (!code)
        code = canvas_block(p->figure, comment.data,
                            p->n_panels == 2 ? "position line column columns kept oracle text"
                                             : "position line column columns kept text",
                            &index);
    text_free(&comment);
    TRY(code);
    p->first_token = p->tokens->n_tokens;
    for (size_t i = 0; i < p->page.n; i++) {
        const page_segment *s = &p->page.item[i];
        if (!shown(p, s)) continue;
        if (s->token < p->first_token) p->first_token = s->token;
        p->last_token = s->token;
        TRY(text_add(t, "%d %d %d %d %.4g ", s->token, s->line - p->first_line, s->column, s->columns,
                     p->shares[0].kept[s->token]));
        if (p->n_panels == 2) TRY(text_add(t, "%.4g ", p->shares[1].kept[s->token]));
        TRY(add_quoted(p, s, t));
    }
    return 0;
}

/* ---- the script ------------------------------------------------------------------------------------------------- */

/* Blanks are not drawn: the letters after them stand where they belong. */
static int add_words(text_plot *p, const page_segment *s, int32_t left) {
    const glyphs *g = &p->tokens->glyphs;
    size_t from = s->from, to = s->to;
    int32_t column = left + s->column;
    for (; from < to && g->item[from].kind == GLYPH_SPACE; from++) column += g->item[from].columns;
    while (to > from && g->item[to - 1].kind == GLYPH_SPACE) to--;
    if (from == to) return 0;
    text *t = &p->figure->script, words = {0};
    int code = glyphs_add(g, from, to, &words);
    if (!code) code = text_add(t, "set label ");
    if (!code) code = lettering_quote(t, words.data);
    text_free(&words);
    return code ? code : text_add(t, " at %d,%d.5 left font mono front\n", column, s->line - p->first_line);
}

/* Of all that is shown. */
static int define_letters(text_plot *p) {
    const glyphs *g = &p->tokens->glyphs;
    lettering l = {0};
    int code = 0;
    for (size_t i = 0; i < p->page.n && !code; i++) {
        const page_segment *s = &p->page.item[i];
        if (!shown(p, s)) continue;
        size_t begin = g->item[s->from].at, end = g->item[s->to - 1].at + g->item[s->to - 1].bytes;
        code = lettering_note(&l, g->text.data + begin, end - begin);
    }
    if (!code) code = lettering_define(&l, &p->figure->script);
    lettering_free(&l);
    return code;
}

static int add_panel_title(text_plot *p, int panel, int32_t left) {
    text *t = &p->figure->script, title = {0};
    int code = tokens_name(p->tokens, config_of(p, panel), &title);
    if (!code) code = text_add(t, "set label ");
    if (!code) code = canvas_quote(t, title.data, 56);
    text_free(&title);
    return code ? code : text_add(t, " at %d,-0.7 left font ',6.5'\n", left);
}

static int add_title(text_plot *p) {
    text *t = &p->figure->script, title = {0};
    int code = text_add(&title, "How long tokens stay visible");
    if (!code) code = tokens_add_subject(p->tokens, p->pair.config, &title);
    if (!code) code = text_add(t, "set label ");
    if (!code) code = canvas_quote(t, title.data, p->n_panels == 2 ? 110 : 57);
    text_free(&title);
    return code ? code
                : text_add(t, " at screen %.4f, screen %.4f left font ',7'\n", MARGIN / p->width, 1 - 0.1 / p->height);
}

static int add_note(text_plot *p, const char *words, double y) {
    text *t = &p->figure->script;
    bool two = p->n_panels == 2;
    TRY(text_add(t, "set label "));
    TRY(gnuplot_quote(t, words));
    return text_add(t, " at screen %.4f, screen %.4f %s font ',5.5'\n", two ? 1 - MARGIN / p->width : MARGIN / p->width,
                    y / p->height, two ? "right" : "left");
}

/* Which tokens these are, and what the lines under them mean. */
static int add_notes(text_plot *p, double y) {
    const tokens *k = p->tokens;
    text note = {0};
    int code = text_add(&note, "tokens %d to %d of %d", p->first_token, p->last_token, k->n_tokens);
    if (!code && k->n_prompt > p->first_token) code = text_add(&note, ", the first %d are the prompt", k->n_prompt);
    if (!code) code = add_note(p, note.data, p->n_panels == 2 ? y : 0.08);
    note.n = 0;
    if (!code) code = text_add(&note, "underlined: the oracle's share is higher by %g or more", LOST);
    if (!code && p->n_panels == 2) code = add_note(p, note.data, y - 0.105);
    text_free(&note);
    return code;
}

static int add_key(text_plot *p) {
    text *t = &p->figure->script;
    double y = bottom_of(p) - 0.135;
    TRY(text_add(t, "set cbrange [0:1]\nset palette defined ("));
    for (int i = 0; i <= SHADES; i++) TRY(text_add(t, "%s%d '%s'", i ? ", " : "", i, shade_colour(i)));
    TRY(text_add(t,
                 ")\nset cbtics ('0' 0, '0.5' 0.5, '1' 1) scale 0 font ',5.5' offset 0,0.7\n"
                 "set colorbox horizontal user origin %.4f,%.4f size %.4f,%.4f noborder\n"
                 "set label 'share of later steps that see it, mean over all heads' at screen %.4f, "
                 "screen %.4f left font ',5.5'\n",
                 (MARGIN + 0.05) / p->width, (y - 0.035) / p->height, 0.7 / p->width, 0.07 / p->height,
                 (MARGIN + 0.83) / p->width, y / p->height));
    return add_notes(p, y);
}

static int write_script(text_plot *p) {
    text *t = &p->figure->script;
    int32_t columns = p->n_panels * (COLUMNS + 1) + (p->n_panels - 1) * GUTTER;
    TRY(text_add(t,
                 "mono = 'monospace,%g'\nunset border\nunset tics\nunset grid\n"
                 "set lmargin at screen %.4f\nset rmargin at screen %.4f\n"
                 "set bmargin at screen %.4f\nset tmargin at screen %.4f\n"
                 "set xrange [0:%d]\nset yrange [%d:0]\n",
                 FONT, MARGIN / p->width, MARGIN / p->width + columns * COLUMN / p->width, bottom_of(p) / p->height,
                 1 - TOP / p->height, columns, p->n_lines));
    TRY(add_title(p));
    TRY(add_key(p));
    TRY(define_letters(p));
    for (int panel = 0; panel < p->n_panels; panel++) {
        int32_t left = left_of(panel);
        TRY(add_panel_title(p, panel, left));
        for (size_t i = 0; i < p->page.n; i++)
            if (shown(p, &p->page.item[i])) TRY(add_words(p, &p->page.item[i], left));
    }
    TRY(text_add(t,
                 "set style fill solid 1 noborder\nset palette maxcolors 256\n"
                 "lost(value) = column('oracle') - column('kept') >= %g && column('position') < %d ? value : "
                 "NaN\nx0(left) = left + "
                 "column('column') + 0.04\n"
                 "x1(left) = left + column('column') + column('columns') - 0.04\n"
                 "y0(a) = column('line') + a\nplot ",
                 LOST, p->tokens->n_tokens - tokens_too_new(p->tokens)));
    for (int panel = 0; panel < p->n_panels; panel++)
        TRY(text_add(t,
                     "%sdata index 0 using (x0(%d)):(y0(0.5)):(x0(%d)):(x1(%d)):(y0(0.05)):(y0(0.95)):(column('%s')) "
                     "with boxxyerror linecolor palette",
                     panel ? ", " : "", left_of(panel), left_of(panel), left_of(panel), panel ? "oracle" : "kept"));
    if (p->n_panels == 2)
        TRY(text_add(t, ", data index 0 using (x0(0)):(y0(0.94)):(lost(x1(0) - x0(0))):(0) with vectors nohead "
                        "linewidth 1.2 linecolor '#D55E00'"));
    return text_add(t, "\n");
}

/* ---- putting it together ---------------------------------------------------------------------------------------- */

static int draw(text_plot *p, figure_list *list) {
    TRY(tokens_shares(p->tokens, p->pair.config, &p->shares[0]));
    if (p->n_panels == 2) TRY(tokens_shares(p->tokens, p->pair.oracle, &p->shares[1]));
    TRY(page_lay_out(&p->tokens->glyphs, p->tokens->n_tokens, COLUMNS, &p->page));
    TRY(choose_lines(p));
    p->width = p->n_panels == 2 ? CANVAS_PAGE_WIDTH : CANVAS_WIDTH;
    p->height = TOP + LINE * p->n_lines + bottom_of(p);
    TRY(canvas_new_sized(list, (const char *[]){"text"}, 1, p->width, p->height, &p->figure));
    p->figure->paper_only = true;
    TRY(write_data(p));
    return write_script(p);
}

static int draw_best(const figure_input *in, tokens *k, figure_list *list) {
    token_pairs pairs;
    TRY(tokens_pairs(k, in->results, in->n_metrics ? in->metrics[0] : 0, &pairs));
    int code = 0;
    if (!pairs.n) say("text: %s holds no policy, figure skipped", in->lifetimes);
    else {
        text_plot p = {.tokens = k, .pair = pairs.item[0]};
        p.n_panels = p.pair.oracle == TOKENS_NONE ? 1 : 2;
        code = draw(&p, list);
        for (int i = 0; i < PANELS; i++) token_shares_free(&p.shares[i]);
        page_free(&p.page);
    }
    token_pairs_free(&pairs);
    return code;
}

int figure_text(const figure_input *in, figure_list *list) {
    tokens k;
    bool ready;
    TRY(tokens_open_for("text", in->lifetimes, in->trace, &k, &ready));
    if (!ready) return 0;
    int code = draw_best(in, &k, list);
    tokens_close(&k);
    return code;
}
