/* What waiting gains: the smoothing gain across lags, with its paired interval, and below it which share of the way
 * from lag 0 to hindsight (an oracle that holds entries as long) it closes. Colour says the budget; where pending
 * entries are free the line is dashed. */
#include "analyze/canvas.h"
#include "analyze/decide.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/progress.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Inches: with both panels, with one, and the line at the lower edge that says what is missing. */
#define HEIGHT 3.37
#define HEIGHT_ONE 2.17
#define FOOT 0.13
#define LEFT 0.15
#define RIGHT 0.91
enum { MOST_BUDGETS = 7 };

typedef struct gain_curve {
    size_t budget; /* index in results.budgets */
    bool free;
    const lag_curve *lags;
    gain *gains;  /* [lags->n] */
    size_t index; /* block of the data file */
    bool band;
} gain_curve;

typedef struct gain_plot {
    const figure_input *in;
    size_t metric;
    const char *name;
    figure *figure;
    double height, foot;
    gain_curve curve[2 * MOST_BUDGETS];
    size_t n_curves, n_closed; /* points with a closed share */
    double last_lag;
    const char *why; /* a closed share is missing for this reason first, so often */
    size_t n_missing, n_why;
    axis gain, closed;
} gain_plot;

/* ---- what is shown ---------------------------------------------------------------------------------------------- */

static size_t budget_of(const results *r, const result *c) {
    size_t b = 0;
    while (strcmp(r->budgets[b].asked, c->budget_asked) != 0) b++;
    return b;
}

static void count_missing(gain_plot *p, const char *why) {
    p->n_missing++;
    if (!p->why) p->why = why;
    p->n_why += strcmp(p->why, why) == 0;
}

static int add_curve(gain_plot *p, const lag_curve *lags) {
    const results *r = p->in->results;
    const result *first = lags->point[0];
    if (budget_of(r, first) >= MOST_BUDGETS) return 0;
    gain_curve *c = &p->curve[p->n_curves];
    *c = (gain_curve){.budget = budget_of(r, first), .free = result_is_free(first), .lags = lags};
    TRY(decide_gains(p->in->bootstrap, r, lags, p->metric, &c->gains));
    p->n_curves++;
    for (size_t i = 0; i < lags->n; i++) {
        const gain *g = &c->gains[i];
        p->last_lag = fmax(p->last_lag, g->at->lag);
        c->band |= !isnan(g->gain.lo);
        p->n_closed += g->closed_why == NULL;
        if (g->closed_why) count_missing(p, g->closed_why);
    }
    return 0;
}

static int collect(gain_plot *p, const lag_curves *all, const result *series) {
    for (size_t i = 0; i < all->n; i++) {
        const lag_curve *c = &all->item[i];
        if (!result_same_series(c->point[0], series)) continue;
        if (c->point[0]->lag == 0) TRY(add_curve(p, c));
        else
            say("gain: %s, budget %s, pending %s: no lag 0, curve skipped", p->name, c->point[0]->budget_asked,
                c->point[0]->pending);
    }
    return 0;
}

static int add_text(text *t, const char *word) {
    return text_add(t, " \"%s\"", strchr(word, '"') ? "" : word);
}

static int write_curve(gain_plot *p, gain_curve *c) {
    text *t = &p->figure->data, comment = {0};
    int code = text_add(&comment, "%s, budget %s, pending %s", p->name, p->in->results->budgets[c->budget].asked,
                        c->free ? "free" : "charged");
    if (!code)
        code = canvas_block(p->figure, comment.data,
                            "lag position gain gain_lo gain_hi p closed closed_lo closed_hi over_filter over_filter_lo "
                            "over_filter_hi filter oracle not_closed_because",
                            &c->index);
    text_free(&comment);
    for (size_t i = 0; i < c->lags->n && !code; i++) {
        const gain *g = &c->gains[i];
        code = text_add(t, "%.10g %.10g %.10g", g->at->lag, lag_position(g->at->lag), g->gain.value);
        if (!code) code = canvas_add_interval(p->figure, g->gain);
        if (!code) code = text_add(t, isnan(g->p) ? " nan" : " %.4g", g->p);
        if (!code) code = text_add(t, isnan(g->closed.value) ? " nan" : " %.10g", g->closed.value);
        if (!code) code = canvas_add_interval(p->figure, g->closed);
        if (!code) code = text_add(t, isnan(g->over_filter.value) ? " nan" : " %.10g", g->over_filter.value);
        if (!code) code = canvas_add_interval(p->figure, g->over_filter);
        if (!code) code = add_text(t, g->filter ? g->filter->spec : "");
        if (!code) code = add_text(t, g->oracle ? g->oracle->spec : "");
        if (!code) code = add_text(t, g->closed_why ? g->closed_why : "");
        if (!code) code = text_add(t, "\n");
    }
    return code;
}

/* ---- the script ------------------------------------------------------------------------------------------------- */

/* 0 and the values always, as much of the intervals as does not take the place from them. */
static axis axis_of(const gain_plot *p, bool closed) {
    double lo = 0, hi = 0, band_lo = 0, band_hi = 0;
    for (size_t k = 0; k < p->n_curves; k++)
        for (size_t i = 0; i < p->curve[k].lags->n; i++) {
            const gain *g = &p->curve[k].gains[i];
            estimate e = closed ? g->closed : g->gain;
            lo = fmin(lo, e.value);
            hi = fmax(hi, e.value);
            if (p->curve[k].free) continue;
            band_lo = fmin(band_lo, e.lo);
            band_hi = fmax(band_hi, e.hi);
        }
    if (closed) hi = fmax(hi, 1);
    if (!(hi > lo)) hi = lo + 1;
    axis a = {.lo = lo < 0 ? lo - 0.04 * (hi - lo) : 0, .hi = hi + 0.04 * (hi - lo)};
    return axis_widen(a, band_lo, band_hi, 0.5);
}

/* Beside the right ends of the curves of one kind of pending: charged where there are any. */
static int add_budget_labels(gain_plot *p, bool is_free, bool closed, axis y) {
    text *t = &p->figure->script;
    double at[MOST_BUDGETS];
    const gain_curve *labelled[MOST_BUDGETS];
    size_t n = 0;
    for (size_t k = 0; k < p->n_curves; k++) {
        const gain_curve *c = &p->curve[k];
        size_t last = c->lags->n;
        while (last && isnan(closed ? c->gains[last - 1].closed.value : c->gains[last - 1].gain.value)) last--;
        if (c->free != is_free || !last) continue;
        labelled[n] = c;
        at[n++] = axis_place(y, closed ? c->gains[last - 1].closed.value : c->gains[last - 1].gain.value);
    }
    TRY(canvas_spread(at, n, 0.1));
    for (size_t i = 0; i < n; i++) TRY(canvas_add_budget(t, p->in->results, labelled[i]->budget, at[i]));
    return 0;
}

static int add_plot(gain_plot *p, bool closed, axis y) {
    text *t = &p->figure->script;
    const char *column = closed ? "closed" : "gain", *comma = "plot ";
    TRY(text_add(t, "cut(v) = v < %.10g ? %.10g : v > %.10g ? %.10g : v\n", y.lo, y.lo, y.hi, y.hi));
    for (size_t k = 0; k < p->n_curves; k++) {
        const gain_curve *c = &p->curve[k];
        if (c->free || !c->band) continue;
        TRY(text_add(t,
                     "%sfor [k=1:paper] data index %zu using 'position':(cut(column('%s_lo'))):(cut(column('%s_hi'))) "
                     "with filledcurves fillstyle transparent solid 0.13 noborder linecolor '%s'",
                     comma, c->index, column, column, canvas_colour(c->budget)));
        comma = ", \\\n    ";
    }
    for (size_t k = 0; k < p->n_curves; k++) {
        const gain_curve *c = &p->curve[k];
        TRY(text_add(t,
                     "%sdata index %zu using 'position':'%s' with linespoints %s pointtype (paper ? 7 : %zu) pointsize "
                     "0.25 linecolor '%s'",
                     comma, c->index, column, c->free ? "dashtype (6,4) linewidth 0.7" : "dashtype solid linewidth 1.4",
                     c->index + 1, canvas_colour(c->budget)));
        comma = ", \\\n    ";
    }
    return text_add(t, "\n");
}

static bool has(const gain_plot *p, bool is_free) {
    for (size_t k = 0; k < p->n_curves; k++)
        if (p->curve[k].free == is_free) return true;
    return false;
}

/* One panel between two edges, in inches from below. */
static int add_panel(gain_plot *p, bool closed, double bottom, double top) {
    text *t = &p->figure->script;
    axis y = closed ? p->closed : p->gain;
    TRY(text_add(t, "set tmargin at screen %.4f\nset bmargin at screen %.4f\n", top / p->height, bottom / p->height));
    TRY(axis_add(t, 'y', y, true));
    TRY(text_add(t,
                 "if (paper) set label '%s' at screen 0.035, screen %.4f center rotate by 90 font ',6'\n"
                 "if (!paper) set label '%s' at graph 0.02, graph 0.98 left\n",
                 closed                                           ? "closed share"
                 : results_metrics[p->metric].kind == METRIC_LOSS ? "gain (nats/token)"
                                                                  : "gain",
                 (top + bottom) / 2 / p->height, closed ? "closed share" : "smoothing gain"));
    if (closed)
        TRY(text_add(t, "set arrow from graph 0, first 1 to graph 1, first 1 nohead back dashtype (1.5,3) "
                        "linewidth 0.6 linecolor '#606060'\n"));
    TRY(add_budget_labels(p, !has(p, false), closed, y));
    TRY(add_plot(p, closed, y));
    return text_add(t, "unset label\nunset arrow\nunset title\n");
}

/* What the lines are. */
static int add_legend(gain_plot *p) {
    text *t = &p->figure->script;
    static const char *const words[] = {"pending charged", "pending free"};
    double x = LEFT, y = 1 - 0.215 / p->height;
    for (int k = 0; k < 2; k++) {
        if (!has(p, k)) continue;
        TRY(text_add(t,
                     "if (paper) set arrow from screen %.4f, screen %.4f to screen %.4f, screen %.4f nohead %s "
                     "linecolor '#404040'\n"
                     "if (paper) set label '%s' at screen %.4f, screen %.4f left font ',%g'\n",
                     x, y, x + 0.07, y, k ? "dashtype (6,4) linewidth 0.7" : "dashtype solid linewidth 1.4", words[k],
                     x + 0.085, y, CANVAS_LABEL_FONT));
        x += 0.38;
    }
    return 0;
}

/* Along the lower edge: what is not there and why, what the bands are. */
static int add_notes(gain_plot *p) {
    text *t = &p->figure->script, missing = {0};
    bool band = false;
    for (size_t k = 0; k < p->n_curves; k++) band |= p->curve[k].band && !p->curve[k].free;
    if (band)
        TRY(text_add(t,
                     "if (paper) set label 'shaded: 90 %%, resampled' at screen 0.985, screen %.4f right font ',5.5' "
                     "textcolor '#606060'\n",
                     (0.08 + p->foot) / p->height));
    if (!p->n_missing) return 0;
    int code = p->n_closed ? text_add(&missing, "no closed share at %zu points", p->n_missing)
                           : text_add(&missing, "no closed share");
    if (!code) code = text_add(&missing, ": %s%s", p->why, p->n_why < p->n_missing ? ", ..." : "");
    if (!code) code = text_add(t, "set label ");
    if (!code) code = canvas_quote(t, missing.data, 74);
    if (!code)
        code = text_add(t, " at screen 0.985, screen %.4f right font ',5.5' textcolor '#606060'\n", 0.08 / p->height);
    text_free(&missing);
    return code;
}

static int write_script(gain_plot *p) {
    text *t = &p->figure->script, title = {0};
    bool two = p->n_closed > 0;
    p->gain = axis_of(p, false);
    p->closed = axis_of(p, true);
    TRY(axis_add_lags(t, p->last_lag, two ? 0 : 15));
    TRY(text_add(t, "set lmargin at screen %g\nset rmargin at screen %g\n", LEFT, RIGHT));
    int code = text_add(&title, "%s, %s", p->name, results_metrics[p->metric].brief);
    if (!code) code = text_add(t, "set label ");
    if (!code) code = canvas_quote_title(t, title.data, p->in->results);
    text_free(&title);
    TRY(code);
    TRY(text_add(t, " at screen %g, screen %.4f left font ',7'\n", LEFT, 1 - 0.09 / p->height));
    TRY(text_add(t, "set label 'lag (tokens)' at screen %g, screen (paper ? %.4f : 0) center font ',6.5'\n",
                 (LEFT + RIGHT) / 2, (0.08 + p->foot) / p->height));
    TRY(add_legend(p));
    TRY(add_notes(p));
    TRY(text_add(t, "set multiplot\n"));
    TRY(add_panel(p, false, p->foot + (two ? 1.82 : 0.39), p->height - 0.32));
    if (two) TRY(axis_add_lags(t, p->last_lag, 15));
    if (two) TRY(add_panel(p, true, p->foot + 0.39, p->foot + 1.62));
    return text_add(t, "unset multiplot\n");
}

/* ---- which figures ---------------------------------------------------------------------------------------------- */

static int draw(gain_plot *p, figure_list *list, const lag_curves *all, const result *series) {
    TRY(collect(p, all, series));
    if (!p->n_curves) return 0;
    p->foot = p->n_missing ? FOOT : 0;
    p->height = p->foot + (p->n_closed ? HEIGHT : HEIGHT_ONE);
    const char *parts[] = {"gain", p->name, results_metrics[p->metric].column};
    TRY(canvas_new(list, parts, 3, p->height, &p->figure));
    for (size_t k = 0; k < p->n_curves; k++) TRY(write_curve(p, &p->curve[k]));
    return write_script(p);
}

static int draw_series(const figure_input *in, figure_list *list, size_t metric, const lag_curves *all,
                       const result *series) {
    char *name = result_series_name(in->results, series);
    if (!name) return ERR_DATA;
    gain_plot p = {.in = in, .metric = metric, .name = name};
    int code = draw(&p, list, all, series);
    for (size_t k = 0; k < p.n_curves; k++) mem_free(p.curve[k].gains);
    mem_free(name);
    return code;
}

static int draw_metric(const figure_input *in, figure_list *list, size_t metric, bool *any) {
    lag_curves all;
    int code = lag_curves_find(in->results, metric, &all);
    for (size_t i = 0; i < all.n && !code; i++) {
        const result *c = all.item[i].point[0];
        if (result_is_oracle(c) || !lag_curves_opens_series(&all, i)) continue;
        *any = true;
        code = draw_series(in, list, metric, &all, c);
    }
    lag_curves_free(&all);
    return code;
}

int figure_gain(const figure_input *in, figure_list *list) {
    bool any = false;
    for (size_t m = 0; m < in->n_metrics; m++) TRY(draw_metric(in, list, in->metrics[m], &any));
    if (!any) say("gain: no policy with two lags, figure skipped");
    return 0;
}
