/* Where along the text the loss comes from: what a step of each block adds, and below it what has added up so far, at
 * the middle budget, for the best policy with a lag, the best without, and the best oracle. Steps are those that are
 * disturbed: the loss itself falls there and later (DESIGN section 6). */
#include "analyze/anatomy.h"
#include "analyze/canvas.h"
#include "analyze/gnuplot.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/progress.h"

#include <math.h>
#include <string.h>

/* Inches, and the panels' edges as shares of the canvas. */
#define HEIGHT 3.0
#define BOTTOM 0.18
#define LOWER_TOP 0.5
#define UPPER_BOTTOM 0.55
#define TOP 0.92
enum { CURVES = 3, SMOOTH = 4, MOST_LABEL = 21 };

typedef struct curve {
    const result *config;
    char *name;   /* owned */
    char *brief;  /* owned: with its lag, no longer than a label */
    size_t index; /* block of the data file */
    double bound[BLOCKS_PER_ROW + 1];
    double value[BLOCKS_PER_ROW], smooth[BLOCKS_PER_ROW];
    double so_far[BLOCKS_PER_ROW]; /* what blocks up to each one make up of the metric: all of it at the end */
} curve;

typedef struct along_plot {
    const figure_input *in;
    size_t metric;
    figure *figure;
    curve curves[CURVES];
    size_t n_curves;
    bool tokens; /* the axis shows steps, not shares of the text */
} along_plot;

/* ---- data ------------------------------------------------------------------------------------------------------- */

static void add_up(curve *c) {
    double width = c->bound[BLOCKS_PER_ROW] - c->bound[0], sum = 0;
    for (size_t k = 0; k < BLOCKS_PER_ROW; k++) {
        if (!isnan(c->value[k])) sum += c->value[k] * (c->bound[k + 1] - c->bound[k]) / width;
        c->so_far[k] = sum;
    }
}

static int add_curve(along_plot *p, const char *budget, config_test *passes) {
    const result *config = anatomy_best(p->in->results, p->metric, budget, passes);
    if (!config) return 0;
    curve *c = &p->curves[p->n_curves];
    *c = (curve){.config = config, .name = result_series_name(p->in->results, config)};
    c->brief = anatomy_name(p->in->results, config, MOST_LABEL + 4);
    p->n_curves++;
    if (!c->name || !c->brief) return ERR_DATA;
    anatomy_along(p->in->evidence, config, p->metric, c->value);
    anatomy_smooth(c->value, SMOOTH, c->smooth);
    p->tokens &= anatomy_bounds(p->in->evidence, config, c->bound);
    return 0;
}

static int write_curve(along_plot *p, curve *c) {
    text *t = &p->figure->data, columns = {0};
    const char *from = p->tokens ? "from" : "from_percent", *to = p->tokens ? "to" : "to_percent";
    int code = text_add(&columns, "%s %s %s smoothed so_far", from, to, results_metrics[p->metric].column);
    if (!code) code = canvas_block(p->figure, c->name, columns.data, &c->index);
    text_free(&columns);
    for (size_t k = 0; k < BLOCKS_PER_ROW && !code; k++) {
        if (c->bound[k + 1] <= c->bound[k]) continue; /* fewer steps than blocks */
        code = text_add(t, "%.10g %.10g", c->bound[k], c->bound[k + 1]);
        if (!code)
            code = isnan(c->value[k]) ? text_add(t, " nan nan") : text_add(t, " %.7g %.7g", c->value[k], c->smooth[k]);
        if (!code) code = text_add(t, " %.7g\n", c->so_far[k]);
    }
    return code;
}

/* Curves with unlike axes are shown as shares, all of them. */
static void use_shares(along_plot *p) {
    for (size_t i = 0; i < p->n_curves && !p->tokens; i++)
        for (size_t k = 0; k <= BLOCKS_PER_ROW; k++) p->curves[i].bound[k] = 100 * (double)k / (double)BLOCKS_PER_ROW;
}

static int collect(along_plot *p, const char *budget) {
    p->tokens = true;
    TRY(add_curve(p, budget, config_waits));
    TRY(add_curve(p, budget, config_is_filter));
    TRY(add_curve(p, budget, result_is_oracle));
    use_shares(p);
    for (size_t i = 0; i < p->n_curves; i++) {
        add_up(&p->curves[i]);
        TRY(write_curve(p, &p->curves[i]));
    }
    return 0;
}

/* ---- the script ------------------------------------------------------------------------------------------------- */

static const char *colour_of(const curve *c) {
    return result_is_oracle(c->config) ? "#606060" : canvas_colour(c->config->lag < 0);
}

static const char *dashes_of(const curve *c) {
    return result_is_oracle(c->config) ? "(1.5,3)" : c->config->lag < 0 ? "(8,4)" : "solid";
}

static int add_x_axis(along_plot *p) {
    double lo = INFINITY, hi = -INFINITY;
    for (size_t i = 0; i < p->n_curves; i++) {
        lo = fmin(lo, p->curves[i].bound[0]);
        hi = fmax(hi, p->curves[i].bound[BLOCKS_PER_ROW]);
    }
    return text_add(&p->figure->script, "set xrange [%.10g:%.10g]\nset xtics 0,%.10g\n", lo, hi, axis_step(hi - lo, 5));
}

/* Linear, from 0 or below: how much and where, not by what factor. At the top is room for words. */
static void widen(axis *a, const double values[BLOCKS_PER_ROW]) {
    for (size_t k = 0; k < BLOCKS_PER_ROW; k++) {
        a->lo = fmin(a->lo, values[k]);
        a->hi = fmax(a->hi, values[k]);
    }
}

static axis finish(axis a) {
    double span = a.hi > a.lo ? a.hi - a.lo : 1;
    return (axis){.lo = a.lo < 0 ? a.lo - 0.06 * span : 0, .hi = a.hi + 0.2 * span};
}

/* Beside the right ends of what has added up: the policy, and under it its lag; on one line of a text terminal. */
static int add_label(along_plot *p, size_t i, double place) {
    text *t = &p->figure->script;
    const curve *c = &p->curves[i];
    bool waits = c->config->lag >= 0;
    TRY(text_add(t, "set label paper ? "));
    TRY(canvas_quote(t, c->name, MOST_LABEL));
    TRY(text_add(t, " : '%c '.", 'A' + (char)i));
    TRY(gnuplot_quote(t, c->brief));
    TRY(text_add(t, " at graph 1.04, graph (paper ? %.4f : %.4f) left font ',%g' textcolor '%s'\n",
                 place + (waits ? 0.06 : 0), place, CANVAS_LABEL_FONT, colour_of(c)));
    if (!waits) return 0;
    return text_add(t, "if (paper) set label 'lag %.10g' at graph 1.04, graph %.4f left font ',%g' textcolor '%s'\n",
                    c->config->lag, place - 0.06, CANVAS_LABEL_FONT, colour_of(c));
}

static int add_labels(along_plot *p, axis y) {
    double at[CURVES];
    for (size_t i = 0; i < p->n_curves; i++) at[i] = axis_place(y, p->curves[i].so_far[BLOCKS_PER_ROW - 1]);
    TRY(canvas_spread(at, p->n_curves, 0.28));
    for (size_t i = 0; i < p->n_curves; i++) TRY(add_label(p, i, at[i]));
    return 0;
}

/* The first curve is drawn last and lies on top. On a text terminal points are the letters of the labels. */
/* What the panel says stands inside it, where a text terminal has no room for words. */
static int add_panel(along_plot *p, const char *says, double bottom, double top, axis y, const char *x,
                     const char *column) {
    text *t = &p->figure->script;
    const char *comma = "plot ";
    TRY(text_add(t,
                 "set bmargin at screen %g\nset tmargin at screen %g\nset label (paper ? '%s' : '') at graph 0.02, "
                 "graph 0.93 left "
                 "font ',5.5' textcolor '#606060'\n",
                 bottom, top, says));
    TRY(axis_add(t, 'y', y, true));
    for (size_t i = p->n_curves; i-- > 0;) {
        const curve *c = &p->curves[i];
        TRY(text_add(t,
                     "%sdata index %zu using (%s):'%s' with linespoints pointtype (paper ? 7 : %zu) pointsize 0.05 "
                     "dashtype %s linewidth 1.2 linecolor '%s'",
                     comma, c->index, x, column, i + 1, dashes_of(c), colour_of(c)));
        comma = ", \\\n    ";
    }
    return text_add(t, "\nunset label\n");
}

static int add_words(along_plot *p, const char *budget, double left) {
    static const char *const what[RESULTS_METRICS] = {[DLOSS_EST] = "Loss", [KL_EST] = "KL", [LOST_MASS] = "Lost mass"};
    text *t = &p->figure->script, subject = {0};
    TRY(axis_add_y_label(t, results_metrics[p->metric].axis, (BOTTOM + TOP) / 2));
    TRY(text_add(t, "set label "));
    int code = text_add(&subject, "%s along the text, budget %s", what[p->metric], budget);
    if (!code) code = canvas_quote_title(t, subject.data, p->in->results);
    text_free(&subject);
    TRY(code);
    TRY(text_add(t, " at screen %.4f, screen 0.965 left font ',7'\n", left));
    if (p->metric == LOST_MASS) return 0;
    return text_add(
        t, "if (paper) set label 'by the step that is disturbed: the loss itself falls there and later' at screen "
           "0.985, screen 0.03 right font ',5.5' textcolor '#606060'\n");
}

static int write_script(along_plot *p, const char *budget) {
    text *t = &p->figure->script;
    axis each = {.lo = 0}, sum = {.lo = 0};
    size_t longest = strlen("lag 1000");
    for (size_t i = 0; i < p->n_curves; i++) {
        widen(&each, p->curves[i].smooth);
        widen(&sum, p->curves[i].so_far);
        longest = longest > strlen(p->curves[i].name) ? longest : strlen(p->curves[i].name);
    }
    if (longest > MOST_LABEL) longest = MOST_LABEL;
    double left = 0.18, right = 0.95 - canvas_label_width(longest) / CANVAS_WIDTH;
    const char *middle =
        p->tokens ? "(column('from') + column('to')) / 2" : "(column('from_percent') + column('to_percent')) / 2";
    TRY(add_x_axis(p));
    TRY(add_words(p, budget, left));
    TRY(text_add(t, "set lmargin at screen %.4f\nset rmargin at screen %.4f\nset multiplot\nset format x ''\n", left,
                 right));
    TRY(add_panel(p, "each step (mean over 1/16 of the text)", UPPER_BOTTOM, TOP, finish(each), middle, "smoothed"));
    TRY(text_add(t, "set format x '%%g'\nset xlabel '%s' font ',6.5' offset 0,0.6\n",
                 p->tokens ? "step" : "share of the text after the prompt (%)"));
    TRY(add_labels(p, finish(sum)));
    TRY(add_panel(p, "adding up to the mean over all steps", BOTTOM, LOWER_TOP, finish(sum),
                  p->tokens ? "column('to')" : "column('to_percent')", "so_far"));
    return text_add(t, "unset multiplot\n");
}

/* ---- which figures ---------------------------------------------------------------------------------------------- */

static bool is_policy(const result *c) {
    return !result_is_oracle(c);
}

static int draw_metric(const figure_input *in, figure_list *list, size_t metric) {
    const char *column = results_metrics[metric].column, *budget = anatomy_budget(in->results, metric, is_policy);
    along_plot p = {.in = in, .metric = metric};
    if (!budget) {
        say("along: no policy has %s, figure skipped", column);
        return 0;
    }
    int code = canvas_new(list, (const char *[]){"along", column}, 2, HEIGHT, &p.figure);
    if (!code) code = collect(&p, budget);
    if (!code) code = write_script(&p, budget);
    for (size_t i = 0; i < p.n_curves; i++) {
        mem_free(p.curves[i].name);
        mem_free(p.curves[i].brief);
    }
    return code;
}

int figure_along(const figure_input *in, figure_list *list) {
    if (!in->evidence) {
        say("along: needs the blocks beside the results, figure skipped");
        return 0;
    }
    for (size_t m = 0; m < in->n_metrics; m++)
        if (anatomy_tells(in->metrics[m])) TRY(draw_metric(in, list, in->metrics[m]));
    return 0;
}
