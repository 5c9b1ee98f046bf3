/* Which tokens an oracle keeps that the policy lost: each in its context, and beside it the share of later steps that
 * see it under both. */
#include "analyze/canvas.h"
#include "analyze/gnuplot.h"
#include "analyze/lettering.h"
#include "analyze/tokens.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/progress.h"

#include <stdlib.h>
#include <string.h>

/* Inches and points, as in figure_text.c. */
#define FONT 5.0
#define COLUMN (0.602 * FONT / 72)
#define LINE 0.115
#define NUMBER_RIGHT 0.3
#define WORDS_LEFT 0.35
#define AXIS_LEFT (WORDS_LEFT + COLUMNS * COLUMN + 0.08)
#define AXIS_RIGHT (CANVAS_WIDTH - 0.09)
#define TOP 0.36
#define BOTTOM 0.34
enum { COLUMNS = 40, BEFORE = 14, MOST_PIECE = 14, MOST_ROWS = 20, MOST_FIGURES = 6, CONTEXT = 30 };

static const char policy_colour[] = "#D55E00", oracle_colour[] = "#0072B2";

typedef struct lost_plot {
    const tokens *tokens;
    token_pair pair;
    lost_tokens lost;
    double height;
    figure *figure;
} lost_plot;

/* ---- the data --------------------------------------------------------------------------------------------------- */

/* In double quotes, a quote or backslash behind a backslash. */
static int add_quoted(text *t, const char *words, const char *after) {
    TRY(text_add(t, "\""));
    for (; *words; words++) TRY(text_add(t, *words == '"' || *words == '\\' ? "\\%c" : "%c", *words));
    return text_add(t, "\"%s", after);
}

static int write_data(lost_plot *p) {
    text *t = &p->figure->data, comment = {0};
    size_t index;
    int code = text_add(&comment, "share of later steps that see the token under ");
    if (!code) code = tokens_name(p->tokens, p->pair.config, &comment);
    if (!code) code = text_add(&comment, " (kept) and ");
    if (!code) code = tokens_name(p->tokens, p->pair.oracle, &comment);
    if (!code) code = text_add(&comment, " (oracle), and share of units that see it at the end");
    if (!code)
        code = canvas_block(p->figure, comment.data,
                            "row position kept oracle kept_at_end oracle_at_end before token after", &index);
    text_free(&comment);
    TRY(code);
    for (size_t i = 0; i < p->lost.n; i++) {
        const lost_token *l = &p->lost.item[i];
        TRY(text_add(t, "%zu %d %.4g %.4g %.4g %.4g ", i, l->position, l->policy, l->oracle, l->policy_at_end,
                     l->oracle_at_end));
        TRY(add_quoted(t, l->before, " "));
        TRY(add_quoted(t, l->piece, " "));
        TRY(add_quoted(t, l->after, "\n"));
    }
    return 0;
}

/* ---- the script ------------------------------------------------------------------------------------------------- */

/* Words on row `row`, which begin (or, right, end) at a column of the context. Blanks are not drawn. */
static int add_words(lost_plot *p, size_t from, size_t to, size_t row, double column, bool right) {
    const glyphs *g = &p->tokens->glyphs;
    for (; from < to && g->item[from].kind == GLYPH_SPACE; from++) column += right ? 0 : g->item[from].columns;
    for (; to > from && g->item[to - 1].kind == GLYPH_SPACE; to--) column -= right ? g->item[to - 1].columns : 0;
    if (from == to) return 0;
    text *t = &p->figure->script, words = {0};
    int code = glyphs_add(g, from, to, &words);
    if (!code) code = text_add(t, "set label ");
    if (!code) code = lettering_quote(t, words.data);
    text_free(&words);
    return code ? code
                : text_add(t, " at screen %.4f, first %zu %s font mono front\n",
                           (WORDS_LEFT + column * COLUMN) / CANVAS_WIDTH, row, right ? "right" : "left");
}

/* How many of the glyphs from `at` on, in steps of `step`, fit into so many columns. */
static size_t fitting(const glyphs *g, size_t at, size_t end, int columns) {
    size_t n = 0;
    for (; at + n < end && columns >= g->item[at + n].columns; n++) columns -= g->item[at + n].columns;
    return n;
}

static size_t fitting_before(const glyphs *g, size_t at, int columns) {
    size_t n = 0;
    for (; n < at && columns >= g->item[at - n - 1].columns; n++) columns -= g->item[at - n - 1].columns;
    return n;
}

/* The token on a tinted ground, words before it that end there and words after it. */
static int add_row(lost_plot *p, size_t row) {
    text *t = &p->figure->script;
    const glyphs *g = &p->tokens->glyphs;
    int32_t position = p->lost.item[row].position;
    size_t begin = g->begin[position], end = g->begin[position + 1];
    size_t shown = fitting(g, begin, end, MOST_PIECE), columns = glyphs_columns(g, begin, begin + shown);
    double left = (WORDS_LEFT + BEFORE * COLUMN) / CANVAS_WIDTH;
    TRY(text_add(t,
                 "set label '%d' at screen %.4f, first %zu right font mono textcolor '#606060'\n"
                 "set object rectangle from screen %.4f, first %zu-0.45 to screen %.4f, first %zu+0.45 "
                 "fillcolor '#f9cfae' fillstyle solid 1 noborder behind\n",
                 position, NUMBER_RIGHT / CANVAS_WIDTH, row, left, row, left + (double)columns * COLUMN / CANVAS_WIDTH,
                 row));
    TRY(add_words(p, begin - fitting_before(g, begin, BEFORE), begin, row, BEFORE, true));
    TRY(add_words(p, begin, begin + shown, row, BEFORE, false));
    if (begin + shown < end) /* the rest of a long token, then, does not fit */
        return text_add(t, "set label '…' at screen %.4f, first %zu left font mono\n",
                        left + (double)columns * COLUMN / CANVAS_WIDTH, row);
    size_t after = fitting(g, end, g->n, COLUMNS - BEFORE - (int)columns);
    return add_words(p, end, end + after, row, BEFORE + (double)columns, false);
}

/* Of all that is shown, and a little more. */
static int define_letters(lost_plot *p) {
    lettering letters = {0};
    int code = 0;
    for (size_t i = 0; i < p->lost.n && !code; i++) {
        const lost_token *l = &p->lost.item[i];
        code = lettering_note(&letters, l->before, strlen(l->before));
        if (!code) code = lettering_note(&letters, l->piece, strlen(l->piece));
        if (!code) code = lettering_note(&letters, l->after, strlen(l->after));
    }
    if (!code) code = lettering_define(&letters, &p->figure->script);
    lettering_free(&letters);
    return code;
}

static int add_titles(lost_plot *p) {
    text *t = &p->figure->script, words = {0};
    int code = text_add(&words, "Tokens kept longer by the oracle");
    if (!code) code = tokens_add_subject(p->tokens, p->pair.config, &words);
    if (!code) code = text_add(t, "set label ");
    if (!code) code = canvas_quote(t, words.data, 54);
    if (!code)
        code = text_add(t, " at screen %.4f, screen %.4f left font ',7'\n", 0.06 / CANVAS_WIDTH, 1 - 0.1 / p->height);
    for (int oracle = 0; oracle < 2 && !code; oracle++) {
        words.n = 0;
        code = tokens_name(p->tokens, oracle ? p->pair.oracle : p->pair.config, &words);
        if (!code) code = text_add(t, "set label ");
        if (!code) code = canvas_quote(t, words.data, 31);
        if (!code)
            code = text_add(t,
                            " at screen %.4f, screen %.4f left font ',6' textcolor '%s' point pointtype 7 "
                            "pointsize 0.4 linecolor '%s' offset 0.6,-0.1\n",
                            (oracle ? 1.75 : 0.12) / CANVAS_WIDTH, 1 - 0.25 / p->height,
                            oracle ? oracle_colour : policy_colour, oracle ? oracle_colour : policy_colour);
    }
    text_free(&words);
    return code;
}

static int write_script(lost_plot *p) {
    text *t = &p->figure->script;
    TRY(text_add(t,
                 "mono = 'monospace,%g'\nset lmargin at screen %.4f\nset rmargin at screen %.4f\n"
                 "set bmargin at screen %.4f\nset tmargin at screen %.4f\n"
                 "set border 1\nset xrange [0:1]\nset yrange [%zu-0.4:-0.6]\nunset ytics\nunset grid\n"
                 "set grid xtics linetype 1 linecolor '#e4e4e4' linewidth 0.4\n"
                 "set xtics ('0' 0, '' 0.25, '0.5' 0.5, '' 0.75, '1' 1) offset 0,0.5\n"
                 "set label 'share of later steps that see it' at screen %.4f, screen %.4f right font ',6'\n"
                 "set label 'the last %d tokens are too new to compare' at screen %.4f, screen %.4f left font ',5.5' "
                 "textcolor '#606060'\n",
                 FONT, AXIS_LEFT / CANVAS_WIDTH, AXIS_RIGHT / CANVAS_WIDTH, BOTTOM / p->height, 1 - TOP / p->height,
                 p->lost.n, AXIS_RIGHT / CANVAS_WIDTH, 0.1 / p->height, tokens_too_new(p->tokens), 0.06 / CANVAS_WIDTH,
                 0.1 / p->height));
    TRY(add_titles(p));
    TRY(define_letters(p));
    for (size_t i = 0; i < p->lost.n; i++) TRY(add_row(p, i));
    return text_add(t,
                    "plot data index 0 using (column('kept')):(column('row')):(column('oracle')-column('kept')):(0) "
                    "with vectors nohead linewidth 1.2 linecolor '#b0b0b0', "
                    "data index 0 using (column('kept')):(column('row')) with points pointtype 7 pointsize 0.4 "
                    "linecolor '%s', "
                    "data index 0 using (column('oracle')):(column('row')) with points pointtype 7 pointsize 0.4 "
                    "linecolor '%s'\n",
                    policy_colour, oracle_colour);
}

/* ---- putting it together ---------------------------------------------------------------------------------------- */

static int rank(lost_plot *p) {
    token_shares policy = {0}, oracle = {0};
    int code = tokens_shares(p->tokens, p->pair.config, &policy);
    if (!code) code = tokens_shares(p->tokens, p->pair.oracle, &oracle);
    if (!code) code = tokens_lost(p->tokens, &policy, &oracle, MOST_ROWS, CONTEXT, &p->lost);
    token_shares_free(&policy);
    token_shares_free(&oracle);
    return code;
}

static int draw(lost_plot *p, figure_list *list) {
    const char *spec = tokens_config(p->tokens, p->pair.config)->spec;
    TRY(rank(p));
    if (!p->lost.n) {
        say("lost: the oracle keeps no token longer than %s, figure skipped", spec);
        return 0;
    }
    p->height = TOP + LINE * (double)p->lost.n + BOTTOM;
    TRY(canvas_new(list, (const char *[]){"lost", spec}, 2, p->height, &p->figure));
    p->figure->paper_only = true;
    TRY(write_data(p));
    return write_script(p);
}

static int draw_pairs(const figure_input *in, const tokens *k, figure_list *list) {
    token_pairs pairs;
    TRY(tokens_pairs(k, in->results, in->n_metrics ? in->metrics[0] : 0, &pairs));
    int code = 0;
    size_t drawn = 0, left = 0;
    for (size_t i = 0; i < pairs.n && !code; i++) {
        if (pairs.item[i].oracle == TOKENS_NONE) continue;
        if (drawn++ >= MOST_FIGURES) {
            left++;
            continue;
        }
        lost_plot p = {.tokens = k, .pair = pairs.item[i]};
        code = draw(&p, list);
        lost_tokens_free(&p.lost);
    }
    if (!code && !drawn) say("lost: %s holds no policy with an oracle at its budget, figure skipped", in->lifetimes);
    if (!code && left) say("lost: the %d policies of least loss are shown, %zu left out", MOST_FIGURES, left);
    token_pairs_free(&pairs);
    return code;
}

int figure_lost(const figure_input *in, figure_list *list) {
    tokens k;
    bool ready;
    TRY(tokens_open_for("lost", in->lifetimes, in->trace, &k, &ready));
    if (!ready) return 0;
    int code = draw_pairs(in, &k, list);
    tokens_close(&k);
    return code;
}
