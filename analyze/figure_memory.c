/* Memory at equal loss: what each policy needs for a few round losses, with intervals, and that as a share of what the
 * best policy without a lag needs (memory.h). A bar with a head goes on beyond what was run. */
#include "analyze/canvas.h"
#include "analyze/gnuplot.h"
#include "analyze/memory.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/progress.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Inches: what is above the rows, a group's heading, a row, and what is below. */
#define ABOVE 0.2
#define HEADING 0.16
#define ROW 0.105
#define BELOW 0.5
#define SHARES 0.27 /* of the width, right of the panel */
#define BOUND_COLOUR "#707070"
enum { MOST_ROWS = 12, FEW_ROWS = 6, MOST_GROUPS = 4, MOST_NAME = 24 };

typedef struct memory_row {
    const memory_curve *curve;
    char *name;
    const char *colour;
    double order; /* mean log(memory) */
    estimate memory[MOST_GROUPS], share[MOST_GROUPS];
} memory_row;

typedef struct memory_plot {
    const figure_input *in;
    size_t metric;
    memory_measure measure;
    double unit; /* of the x axis */
    figure *figure;
    memory_row *row; /* best first */
    size_t n_rows;
    const memory_curve *reference; /* or NULL */
    const char *reference_name;
    double loss[MOST_GROUPS];
    size_t n_losses;
    double height;
    bool bars, open;
} memory_plot;

/* ---- what is shown ---------------------------------------------------------------------------------------------- */

/* What lies beyond the ends of a curve counts as a tenth more. */
static double finite_log(const memory_curve *c, double memory) {
    if (isinf(memory)) return memory < 0 ? log(memory_least(c) / 1.1) : log(memory_most(c) * 1.1);
    return log(memory);
}

static int fill_row(memory_plot *p, memory_row *row, const memory_curve *c) {
    bootstrap *b = p->in->bootstrap;
    *row = (memory_row){.curve = c, .name = result_series_name(p->in->results, c->point[0])};
    if (!row->name) return ERR_DATA;
    for (size_t k = 0; k < p->n_losses; k++) {
        TRY(memory_at_loss(b, c, p->loss[k], &row->memory[k]));
        row->share[k] = (estimate){NAN, NAN, NAN};
        if (p->reference) TRY(memory_share(b, c, p->reference, p->loss[k], &row->share[k]));
        row->order += finite_log(c, row->memory[k].value);
        p->bars |= !isnan(row->memory[k].lo);
    }
    return 0;
}

static int by_need(const void *pa, const void *pb) {
    const memory_row *a = pa, *b = pb;
    if (a->order != b->order) return a->order < b->order ? -1 : 1;
    return (a->curve > b->curve) - (a->curve < b->curve);
}

static bool is_bound(const memory_row *row) {
    return result_is_oracle(row->curve->point[0]);
}

/* Best first; what has no room goes, but not the reference. */
static void cut_rows(memory_plot *p) {
    if (p->n_rows <= MOST_ROWS) return;
    for (size_t i = MOST_ROWS; i < p->n_rows; i++)
        if (p->row[i].curve == p->reference) {
            memory_row last = p->row[MOST_ROWS - 1];
            p->row[MOST_ROWS - 1] = p->row[i];
            p->row[i] = last;
        }
    say("memory: %d of %zu policies are drawn", MOST_ROWS, p->n_rows);
    for (size_t i = MOST_ROWS; i < p->n_rows; i++) mem_free(p->row[i].name);
    p->n_rows = MOST_ROWS;
}

static int collect(memory_plot *p, const memory_curves *all) {
    size_t colour = 0;
    p->row = mem_new(all->n, sizeof *p->row, "policies");
    if (!p->row) return ERR_DATA;
    for (; p->n_rows < all->n; p->n_rows++) {
        memory_row *row = &p->row[p->n_rows];
        TRY(fill_row(p, row, &all->item[p->n_rows]));
        row->colour = is_bound(row) ? BOUND_COLOUR : canvas_colour(colour++);
    }
    qsort(p->row, p->n_rows, sizeof *p->row, by_need);
    cut_rows(p);
    for (size_t i = 0; i < p->n_rows; i++)
        if (p->row[i].curve == p->reference) p->reference_name = p->row[i].name;
    return 0;
}

/* ---- the data file ---------------------------------------------------------------------------------------------- */

/* Inches below the upper edge of the panel. */
static double place_of(const memory_plot *p, size_t group, size_t row) {
    return (double)group * (HEADING + ROW * (double)p->n_rows) + HEADING + ROW * ((double)row + 0.5);
}

static int write_row(memory_plot *p, const memory_row *row, size_t group, double place) {
    text *t = &p->figure->data;
    const memory_curve *c = row->curve;
    estimate m = row->memory[group], share = row->share[group];
    double least = memory_least(c), most = memory_most(c);
    double lo = isnan(m.lo) ? m.value : m.lo, hi = isnan(m.hi) ? m.value : m.hi;
    bool below = lo == -INFINITY, above = hi == INFINITY;
    double from = below ? least : fmin(lo, most), to = above ? most : fmax(hi, least);
    /* Wholly beyond an end: something must be there to carry the head. */
    if (below && to <= least) to = least * 1.06;
    if (above && from >= most) from = most / 1.06;
    p->open |= below || above;
    TRY(text_add(t, "%.10g %.10g %.10g %.10g %.10g %.10g %.10g %d", place, m.value, m.lo, m.hi,
                 isinf(m.value) ? NAN : m.value, from, to, below + 2 * above));
    TRY(text_add(t, " %.10g %.10g %.10g %ld \"%s\"\n", share.value, share.lo, share.hi,
                 strtol(row->colour + 1, NULL, 16), strchr(row->name, '"') ? "" : row->name));
    return 0;
}

static int write_data(memory_plot *p) {
    for (size_t k = 0; k < p->n_losses; k++) {
        text comment = {0};
        size_t index;
        int code = text_add(&comment, "%s at most %g", results_metrics[p->metric].column, p->loss[k]);
        if (!code)
            code = canvas_block(p->figure, comment.data,
                                "place memory lo hi at from to open share share_lo share_hi colour name", &index);
        text_free(&comment);
        for (size_t i = 0; i < p->n_rows && !code; i++) code = write_row(p, &p->row[i], k, place_of(p, k, i));
        TRY(code);
    }
    return 0;
}

/* ---- the script ------------------------------------------------------------------------------------------------- */

/* "43 (30..60)"; an end that is not known is left out. */
static int add_share(text *t, estimate e) {
    if (isnan(e.value) && !(e.lo > 0) && !isfinite(e.hi)) return text_add(t, "–");
    if (!isnan(e.value)) TRY(text_add(t, "%.0f", 100 * e.value));
    if (isnan(e.lo)) return 0;
    TRY(text_add(t, isnan(e.value) ? "(" : " ("));
    if (e.lo > 0) TRY(text_add(t, "%.0f", 100 * e.lo));
    TRY(text_add(t, ".."));
    if (!isinf(e.hi)) TRY(text_add(t, "%.0f", 100 * e.hi));
    return text_add(t, ")");
}

static int add_row_words(memory_plot *p, size_t group, size_t i, double right) {
    text *t = &p->figure->script, name = {0}, share = {0};
    const memory_row *row = &p->row[i];
    double y = 1 - (ABOVE + place_of(p, group, i)) / p->height;
    int code = canvas_cut_middle(&name, row->name, MOST_NAME);
    if (!code) code = text_add(t, "set label ");
    if (!code) code = gnuplot_quote(t, name.data);
    text_free(&name);
    TRY(code);
    TRY(text_add(t, " at graph -0.03, screen %.4f right font ',%g' textcolor '%s'\n", y, CANVAS_LABEL_FONT,
                 row->colour));
    if (!p->reference || row->curve == p->reference) return 0;
    code = add_share(&share, row->share[group]);
    if (!code)
        code =
            text_add(t, "set label '%s' at screen %.4f, screen %.4f left font ',5.5'\n", share.data, right + 0.02, y);
    text_free(&share);
    return code;
}

static int add_words(memory_plot *p, double right) {
    text *t = &p->figure->script;
    for (size_t k = 0; k < p->n_losses; k++) {
        double y = 1 - (ABOVE + place_of(p, k, 0) - ROW / 2 - HEADING / 2) / p->height;
        TRY(text_add(t, "set label '%s at most %g%s' at screen 0.03, screen %.4f left font ',6'\n",
                     results_metrics[p->metric].brief, p->loss[k],
                     results_metrics[p->metric].kind == METRIC_LOSS ? " nats/token" : "", y));
        if (k)
            TRY(text_add(t,
                         "set arrow from screen 0.03, screen %.4f to screen 0.985, screen %.4f nohead linewidth 0.4 "
                         "linecolor '#c0c0c0'\n",
                         y + HEADING / 2 / p->height, y + HEADING / 2 / p->height));
        for (size_t i = 0; i < p->n_rows; i++) TRY(add_row_words(p, k, i, right));
    }
    if (!p->reference_name) return 0;
    TRY(text_add(t, "set label '%% of '."));
    TRY(canvas_quote(t, p->reference_name, 14));
    return text_add(t, " at screen %.4f, screen %.4f left font ',5.5' textcolor '#606060'\n", right + 0.02,
                    1 - (ABOVE + HEADING / 2) / p->height);
}

static int add_plot(memory_plot *p) {
    static const char *const heads[] = {"nohead", "backhead", "head", "heads"};
    text *t = &p->figure->script;
    const char *comma = "plot ";
    size_t last = p->n_losses - 1;
    for (int open = 0; open < 4; open++) {
        TRY(text_add(t,
                     "%sfor [i=0:%zu] data index i using (column('open') == %d ? column('from') / %g : NaN):'place':"
                     "((column('to') - column('from')) / %g):(0):'colour' with vectors %s size screen 0.011,25 filled "
                     "linewidth 0.8 linecolor rgb variable",
                     comma, last, open, p->unit, p->unit, heads[open]));
        comma = ", \\\n    ";
    }
    return text_add(t,
                    "%sfor [i=0:%zu] data index i using (column('at') / %g):'place':'colour' with points pointtype 7 "
                    "pointsize 0.42 linecolor rgb variable\n",
                    comma, last, p->unit);
}

static axis x_axis(const memory_plot *p) {
    double lo = INFINITY, hi = 0;
    for (size_t i = 0; i < p->n_rows; i++) {
        lo = fmin(lo, memory_least(p->row[i].curve) / p->unit);
        hi = fmax(hi, memory_most(p->row[i].curve) / p->unit);
    }
    double pad = pow(hi / lo, 0.04);
    return (axis){.lo = lo / pad, .hi = hi * pad, .log = true};
}

static int add_notes(memory_plot *p) {
    if (!p->bars && !p->open) return 0;
    return text_add(&p->figure->script,
                    "set label '%s%s%s' at screen 0.985, screen %.4f right font ',5.5' textcolor '#606060'\n",
                    p->bars ? "90 %, resampled" : "", p->bars && p->open ? "; " : "",
                    p->open ? "arrows: beyond what was run" : "", 0.08 / p->height);
}

static int write_script(memory_plot *p, const char *axis_words) {
    text *t = &p->figure->script, title = {0};
    size_t longest = 0;
    for (size_t i = 0; i < p->n_rows; i++) {
        size_t n = strlen(p->row[i].name);
        longest = n > longest ? n : longest;
    }
    longest = longest < MOST_NAME ? longest : MOST_NAME;
    double left = 0.04 + canvas_label_width(longest) / CANVAS_WIDTH, right = p->reference ? 1 - SHARES : 0.97;
    double rows = p->height - ABOVE - BELOW;
    int code = text_add(&title, "memory at equal %s", results_metrics[p->metric].brief);
    if (!code) code = text_add(t, "set label ");
    if (!code) code = canvas_quote_title(t, title.data, p->in->results);
    text_free(&title);
    TRY(code);
    TRY(text_add(t, " at screen 0.03, screen %.4f left font ',7'\n", 1 - 0.1 / p->height));
    TRY(text_add(t,
                 "set lmargin at screen %.4f\nset rmargin at screen %.4f\nset tmargin at screen %.4f\n"
                 "set bmargin at screen %.4f\nset border 1\nunset ytics\nset yrange [%.4f:0]\n"
                 "set grid noytics xtics linetype 1 linecolor '#e4e4e4' linewidth 0.4\n",
                 left, right, 1 - ABOVE / p->height, BELOW / p->height, rows));
    TRY(axis_add(t, 'x', x_axis(p), true));
    TRY(text_add(t, "set label '%s' at screen %.4f, screen %.4f center font ',6.5'\n", axis_words, 0.5,
                 0.23 / p->height));
    TRY(add_words(p, right));
    TRY(add_notes(p));
    return add_plot(p);
}

/* ---- which figures ---------------------------------------------------------------------------------------------- */

static const char *choose_unit(memory_plot *p, const memory_curves *all) {
    double most = 0;
    for (size_t i = 0; i < all->n; i++) most = fmax(most, memory_most(&all->item[i]));
    p->measure = all->item[0].measure;
    return memory_axis(p->measure, most, &p->unit);
}

static int draw(memory_plot *p, figure_list *list, const memory_curves *all) {
    const char *parts[] = {"memory", results_metrics[p->metric].column};
    const char *axis_words = choose_unit(p, all);
    TRY(memory_find_reference(p->in->results, all, NULL, &p->reference));
    p->n_losses = memory_round_losses(all, all->n <= FEW_ROWS ? MOST_GROUPS : MOST_GROUPS - 1, p->loss);
    if (!p->n_losses) {
        say("memory: no round loss lies on a policy's curve of %s, figure skipped", results_metrics[p->metric].column);
        return 0;
    }
    TRY(collect(p, all));
    p->height = ABOVE + BELOW + (double)p->n_losses * (HEADING + ROW * (double)p->n_rows);
    TRY(canvas_new(list, parts, 2, p->height, &p->figure));
    p->figure->paper_only = true;
    TRY(write_data(p));
    return write_script(p, axis_words);
}

static int draw_metric(const figure_input *in, figure_list *list, size_t metric, bool *any) {
    memory_plot p = {.in = in, .metric = metric};
    memory_curves all;
    int code = memory_curves_find(in->results, metric, &all);
    *any |= all.n > 0;
    if (!code && all.n) code = draw(&p, list, &all);
    for (size_t i = 0; i < p.n_rows; i++) mem_free(p.row[i].name);
    mem_free(p.row);
    memory_curves_free(&all);
    return code;
}

int figure_memory(const figure_input *in, figure_list *list) {
    bool any = false;
    for (size_t m = 0; m < in->n_metrics; m++) TRY(draw_metric(in, list, in->metrics[m], &any));
    if (!any) say("memory: no policy with two budgets, figure skipped");
    return 0;
}
