/* What memory is worth: a metric against the budget, one curve a policy. A policy with a lag is shown at the best one
 * of each budget. Pending entries are charged where that was run, since the budget is meant to be memory. Oracles that
 * hold entries for a lag are left out: at their best lag, 0, they are the plain oracles. */
#include "analyze/canvas.h"
#include "analyze/gnuplot.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/progress.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Inches, and the panel's edges as shares of the canvas. */
#define HEIGHT 2.6
#define BOTTOM 0.17
#define TOP 0.92
#define LANE_STEP 0.009 /* of the x axis */
enum { MOST_CURVES = 18, MOST_LABEL = 22 };

typedef struct curve {
    const result *series; /* one configuration of it */
    char *name;
    size_t index;               /* block of the data file */
    size_t look;                /* counts policies and oracles apart */
    double last_x, last_y;      /* its right end */
    double least_lag, most_lag; /* chosen; -1: none */
    size_t n_points;
    bool bars;   /* some of its points have an interval */
    size_t lane; /* of its error bars: how many steps to the left of its points */
} curve;

/* An error bar. */
typedef struct bar {
    size_t curve;
    double x, lo, hi;
} bar;

typedef struct budget_plot {
    const figure_input *in;
    size_t metric;
    figure *figure;
    curve *curves;
    size_t n_curves, capacity;
    double *values; /* everything drawn, for the axis */
    size_t n_values, values_capacity;
    bar *bars;
    size_t n_bars, bars_capacity;
    double lo, hi; /* of the bars */
    size_t lanes;
    bool resampled; /* the bars; else they are of the calibration alone */
    bool share;     /* the axis shows shares of the sequence, not entries */
} budget_plot;

static double budget_x(const budget_plot *p, const result *c) {
    bool share;
    double asked = result_budget_asked(c, &share);
    return p->share ? asked : c->budget;
}

static bool all_shares(const results *r) {
    bool share = true;
    for (size_t i = 0; i < r->n_configs && share; i++)
        if (result_evicts(&r->configs[i])) result_budget_asked(&r->configs[i], &share);
    return share;
}

/* Is a better to show than b at one budget? */
static bool better(const budget_plot *p, const result *a, const result *b) {
    if (result_is_free(a) != result_is_free(b)) return !result_is_free(a);
    return a->metric[p->metric] < b->metric[p->metric];
}

static const result *best(const budget_plot *p, const result *series, const char *asked) {
    const results *r = p->in->results;
    const result *found = NULL;
    for (size_t i = 0; i < r->n_configs; i++) {
        const result *c = &r->configs[i];
        if (strcmp(c->budget_asked, asked) != 0 || isnan(c->metric[p->metric]) || !result_same_series(c, series))
            continue;
        if (!found || better(p, c, found)) found = c;
    }
    return found;
}

static int add_bar(budget_plot *p, curve *c, estimate e) {
    if (isnan(e.lo)) return 0;
    TRY(mem_grow((void **)&p->bars, &p->bars_capacity, p->n_bars + 1, sizeof *p->bars, "intervals"));
    p->bars[p->n_bars++] = (bar){(size_t)(c - p->curves), c->last_x, e.lo, e.hi};
    c->bars = true;
    p->lo = fmin(p->lo, e.lo);
    p->hi = fmax(p->hi, e.hi);
    return 0;
}

static int add_point(budget_plot *p, curve *c, const result *at) {
    estimate value;
    TRY(canvas_interval(p->in, at, p->metric, &value, &p->resampled));
    TRY(mem_grow((void **)&p->values, &p->values_capacity, p->n_values + 1, sizeof *p->values, "values"));
    p->values[p->n_values++] = value.value;
    c->last_x = budget_x(p, at);
    c->last_y = value.value;
    c->least_lag = c->n_points ? fmin(c->least_lag, at->lag) : at->lag;
    c->most_lag = c->n_points ? fmax(c->most_lag, at->lag) : at->lag;
    c->n_points++;
    TRY(add_bar(p, c, value));
    TRY(text_add(&p->figure->data, "%.10g %.10g ", c->last_x, at->budget));
    TRY(at->lag < 0 ? text_add(&p->figure->data, "-") : text_add(&p->figure->data, "%.10g", at->lag));
    TRY(text_add(&p->figure->data, " %.10g", value.value));
    TRY(canvas_add_interval(p->figure, value));
    return text_add(&p->figure->data, "\n");
}

static int begin_curve(budget_plot *p, curve *c) {
    text columns = {0};
    int code = text_add(&columns, "%s budget lag %s lo hi", p->share ? "percent" : "entries",
                        results_metrics[p->metric].column);
    if (!code) code = canvas_block(p->figure, c->name, columns.data, &c->index);
    text_free(&columns);
    return code;
}

static int add_curve(budget_plot *p, const result *series, size_t look) {
    const results *r = p->in->results;
    TRY(mem_grow((void **)&p->curves, &p->capacity, p->n_curves + 1, sizeof *p->curves, "curves"));
    curve *c = &p->curves[p->n_curves];
    *c = (curve){.series = series, .look = look};
    c->name = result_series_name(r, series);
    if (!c->name) return ERR_DATA;
    p->n_curves++;
    for (size_t b = 0; b < r->n_budgets; b++) {
        const result *at = best(p, series, r->budgets[b].asked);
        if (!at) continue;
        if (!c->n_points) TRY(begin_curve(p, c));
        TRY(add_point(p, c, at));
    }
    if (c->n_points) return 0;
    say("%s: %s has no values, curve skipped", p->figure->name, c->name);
    mem_free(c->name);
    p->n_curves--;
    return 0;
}

static int collect(budget_plot *p) {
    const results *r = p->in->results;
    size_t seen[2] = {0}; /* policies, oracles */
    for (size_t i = 0; i < r->n_configs; i++) {
        const result *c = &r->configs[i];
        bool first = result_evicts(c) && (c->lag < 0 || !result_is_oracle(c));
        for (size_t k = 0; k < i && first; k++) first = !result_same_series(c, &r->configs[k]);
        if (!first) continue;
        if (p->n_curves == MOST_CURVES) {
            say("%s: the first %d policies are drawn", p->figure->name, MOST_CURVES);
            break;
        }
        TRY(add_curve(p, c, seen[result_is_oracle(c)]++));
    }
    return 0;
}

/* ---- the script ------------------------------------------------------------------------------------------------- */

/* "rmm, lag 16–64" (the lags chosen over the budgets); a long name is cut, its lag is not. */
static int add_label(text *t, const curve *c, size_t *length) {
    text lag = {0}, whole = {0};
    size_t dashes = 0, most = MOST_LABEL;
    int code = text_add(&lag, "%s", c->most_lag < 0 ? "" : ", lag ");
    if (!code && c->most_lag >= 0 && c->least_lag < c->most_lag) {
        code = text_add(&lag, "%g–", c->least_lag);
        dashes = strlen("–") - 1;
    }
    if (!code && c->most_lag >= 0) code = text_add(&lag, "%g", c->most_lag);
    if (!code) code = canvas_cut(&whole, c->name, most - (lag.n - dashes));
    if (!code) code = text_add(&whole, "%s", lag.data);
    if (!code) code = gnuplot_quote(t, whole.data);
    *length = whole.n < most ? whole.n : most;
    text_free(&lag);
    text_free(&whole);
    return code;
}

/* Ticks stand at the budgets that were run, smallest first, each only where its number has room. */
static int add_budget_axis(budget_plot *p) {
    text *t = &p->figure->script;
    double lo = INFINITY, hi = 0, last = -1;
    for (size_t i = 0; i < p->n_curves; i++) hi = fmax(hi, p->curves[i].last_x);
    const results *r = p->in->results;
    for (size_t i = 0; i < r->n_configs; i++)
        if (result_evicts(&r->configs[i])) lo = fmin(lo, budget_x(p, &r->configs[i]));
    axis x = {.lo = lo, .hi = hi > lo ? hi : lo + 1, .log = hi >= 4 * lo};
    TRY(text_add(t, x.log ? "left(v, share) = v / %.10g ** share\n" : "left(v, share) = v - %.10g * share\n",
                 x.log ? x.hi / x.lo : x.hi - x.lo));
    TRY(text_add(t, "%s logscale x\nset xrange [%.10g:%.10g]\nset xtics (", x.log ? "set" : "unset",
                 axis_value(x, -fmax(0.04, LANE_STEP * (double)p->lanes)), x.hi));
    for (size_t b = 0; b < r->n_budgets; b++)
        for (size_t i = 0; i < r->n_configs; i++) {
            if (strcmp(r->configs[i].budget_asked, r->budgets[b].asked) != 0) continue;
            double at = budget_x(p, &r->configs[i]), place = axis_place(x, at);
            if (last >= 0 && place - last < 0.08) break;
            TRY(text_add(t, "%s'%.4g' %.10g", last < 0 ? "" : ", ", at, at));
            last = place;
            break;
        }
    return text_add(t, ")\nset xlabel 'budget (%s)' font ',6.5' offset 0,0.6\n",
                    p->share ? "% of the sequence" : "entries");
}

/* Colours first, then dashes. Oracles are no policies a server could run: they are grey. On a text terminal points are
 * letters, which stand before the labels. */
static int add_look(text *t, const curve *c) {
    static const char *const dashes[] = {"solid", "(6,3)", "(2,2)"};
    static const char *const greys[] = {"#404040", "#8c8c8c"};
    static const int points[] = {7, 5, 9, 11, 13, 4, 6, 8};
    bool oracle = result_is_oracle(c->series);
    return text_add(t, "dashtype %s linewidth %g pointtype (paper ? %d : %zu) pointsize 0.25 linecolor '%s'",
                    oracle ? "(1.5,3)" : dashes[c->look / CANVAS_COLOURS % 3], c->most_lag < 0 ? 0.9 : 1.3,
                    oracle ? 6 : points[c->look % 8], c->index + 1,
                    oracle ? greys[c->look % 2] : canvas_colour(c->look));
}

static const char *colour_of(const curve *c) {
    return result_is_oracle(c->series) ? "#606060" : canvas_colour(c->look);
}

/* Each label stands beside its curve's right end, moved up or down where others are near; a thin line leads to it. */
static int add_labels(budget_plot *p, axis y, size_t *longest) {
    text *t = &p->figure->script;
    double at[MOST_CURVES];
    *longest = 0;
    for (size_t i = 0; i < p->n_curves; i++) {
        double place = axis_place(y, p->curves[i].last_y);
        at[i] = isfinite(place) ? place : 0;
    }
    TRY(canvas_spread(at, p->n_curves, fmin(0.062, 1.0 / MOST_CURVES)));
    for (size_t i = 0; i < p->n_curves; i++) {
        const curve *c = &p->curves[i];
        size_t length;
        TRY(text_add(t, "set label (paper ? '' : '%c ').", 'A' + (char)c->index));
        TRY(add_label(t, c, &length));
        TRY(text_add(t, " at graph 1.06, graph %.4f left font ',%g' textcolor '%s'\n", at[i], CANVAS_LABEL_FONT,
                     colour_of(c)));
        if (length > *longest) *longest = length;
        if (y.log && c->last_y <= 0) continue;
        TRY(text_add(t,
                     "if (paper) set arrow from %.10g,%.10g to graph 1.05, graph %.4f nohead linewidth 0.4 "
                     "linecolor '%s'\n",
                     c->last_x, c->last_y, at[i], colour_of(c)));
    }
    return 0;
}

/* Is a bar of curve i in the way of one of an earlier curve in this lane? */
static bool lane_taken(const budget_plot *p, size_t i, size_t lane) {
    for (size_t a = 0; a < p->n_bars; a++)
        for (size_t b = 0; p->bars[a].curve == i && b < p->n_bars; b++) {
            const bar *one = &p->bars[a], *other = &p->bars[b];
            if (other->curve < i && p->curves[other->curve].lane == lane && one->x == other->x &&
                one->lo <= other->hi && other->lo <= one->hi)
                return true;
        }
    return false;
}

/* Bars stand at their points where they can, else to the left of them, so that no two overlap. */
static void choose_lanes(budget_plot *p) {
    for (size_t i = 0; i < p->n_curves; i++) {
        curve *c = &p->curves[i];
        while (lane_taken(p, i, c->lane)) c->lane++;
        if (c->lane >= p->lanes) p->lanes = c->lane + 1;
    }
}

/* 90 % intervals, cut at the axis. A text terminal has no room for them: the loop runs not once there. */
static int add_bars(budget_plot *p, axis y, const char **comma) {
    text *t = &p->figure->script;
    TRY(text_add(t, "cut(v) = v < %.10g ? %.10g : v > %.10g ? %.10g : v\n", y.lo, y.lo, y.hi, y.hi));
    for (size_t i = 0; i < p->n_curves; i++) {
        const curve *c = &p->curves[i];
        if (!c->bars) continue;
        TRY(text_add(t,
                     "%sfor [k=1:paper] data index %zu using (left(column('%s'), %g)):(cut(column('lo'))):(0):"
                     "(cut(column('hi')) - cut(column('lo'))) with vectors nohead linewidth 0.5 linecolor '%s'",
                     *comma, c->index, p->share ? "percent" : "entries", LANE_STEP * (double)c->lane, colour_of(c)));
        *comma = ", \\\n    ";
    }
    return 0;
}

static int add_note(budget_plot *p) {
    bool lag = false;
    for (size_t i = 0; i < p->n_curves; i++) lag |= p->curves[i].most_lag >= 0;
    if (!lag && !p->n_bars) return 0;
    TRY(text_add(&p->figure->script, "set label (paper ? '%s' : '').'%s%s' ",
                 !p->n_bars     ? ""
                 : p->resampled ? "bars: 90 %, resampled"
                                : "bars: 90 %, calibration alone",
                 p->n_bars && lag ? "; " : "", lag ? "lag: the best at each budget" : ""));
    return text_add(&p->figure->script, "at screen 0.985, screen 0.022 right font ',5.5' textcolor '#606060'\n");
}

static int write_script(budget_plot *p) {
    text *t = &p->figure->script;
    const char *x = p->share ? "percent" : "entries";
    size_t left_out, longest;
    axis y = axis_over(p->values, p->n_values, &left_out);
    if (left_out) say("%s: %zu values are 0 and have no place on the logarithmic axis", p->figure->name, left_out);
    y = axis_widen(y, p->lo, p->hi, 0.2);
    TRY(axis_add(t, 'y', y, true));
    TRY(add_budget_axis(p));
    TRY(add_labels(p, y, &longest));
    TRY(axis_add_y_label(t, results_metrics[p->metric].axis, (BOTTOM + TOP) / 2));
    double left = 0.15, right = 0.955 - canvas_label_width(longest) / CANVAS_WIDTH;
    TRY(text_add(t,
                 "set lmargin at screen %.4f\nset rmargin at screen %.4f\nset tmargin at screen %g\n"
                 "set bmargin at screen %g\nset label ",
                 left, right, TOP, BOTTOM));
    TRY(canvas_quote_title(t, results_metrics[p->metric].brief, p->in->results));
    TRY(text_add(t, " at screen %.4f, screen 0.965 left font ',7'\n", left));
    TRY(add_note(p));
    const char *comma = "plot ";
    TRY(add_bars(p, y, &comma));
    for (size_t i = 0; i < p->n_curves; i++) {
        TRY(text_add(t, "%sdata index %zu using '%s':'%s' with linespoints ", comma, p->curves[i].index, x,
                     results_metrics[p->metric].column));
        TRY(add_look(t, &p->curves[i]));
        comma = ", \\\n    ";
    }
    return text_add(t, "\n");
}

static int draw_metric(const figure_input *in, figure_list *list, size_t metric) {
    budget_plot p = {.in = in, .metric = metric, .lo = INFINITY, .hi = -INFINITY, .share = all_shares(in->results)};
    int code = canvas_new(list, (const char *[]){"budget", results_metrics[metric].column}, 2, HEIGHT, &p.figure);
    if (!code) code = collect(&p);
    if (!code) choose_lanes(&p);
    if (!code) code = write_script(&p);
    for (size_t i = 0; i < p.n_curves; i++) mem_free(p.curves[i].name);
    mem_free(p.curves);
    mem_free(p.values);
    mem_free(p.bars);
    return code;
}

int figure_budget(const figure_input *in, figure_list *list) {
    for (size_t m = 0; m < in->n_metrics; m++) TRY(draw_metric(in, list, in->metrics[m]));
    return 0;
}
