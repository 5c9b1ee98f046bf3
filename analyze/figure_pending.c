/* What the information that waiting brings is worth against what the memory of waiting entries costs, for policies that
 * ran with pending entries both charged and free. At lag L, paired:
 *     information worth  loss(lag 0) - loss(free, L)
 *     memory price       loss(charged, L) - loss(free, L)
 *     net                loss(lag 0) - loss(charged, L), the difference of the two: what waiting gains */
#include "analyze/canvas.h"
#include "analyze/decide.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/progress.h"

#include <math.h>
#include <string.h>

/* Inches: a panel with its numbers, what is above all panels and below. */
#define PANEL 1.02
#define PANEL_GAP 0.17
#define ABOVE 0.19
#define BELOW 0.6
#define LEFT 0.15
#define RIGHT 0.805
enum { MOST_PANELS = 3, MOST_LAGS = 64 };

typedef enum part { WORTH, PRICE, NET, PARTS } part;
static const char *const part_names[PARTS] = {"information", "memory", "net"};
static const char *const part_columns[PARTS] = {"worth", "price", "net"};
static const char *const part_colours[PARTS] = {"#0072B2", "#D55E00", "#000000"};
static const char *const part_look[PARTS] = {"dashtype solid linewidth 1.2", "dashtype solid linewidth 1.2",
                                             "dashtype (5,3) linewidth 1.2"};

typedef struct point {
    double lag;
    estimate part[PARTS];
} point;

/* One budget. */
typedef struct panel {
    const char *budget;
    point point[MOST_LAGS];
    size_t n, index;
    axis y;
    bool band;
} panel;

typedef struct pending_plot {
    const figure_input *in;
    const lag_curves *curves;
    size_t metric;
    const char *name;
    figure *figure;
    panel panel[MOST_PANELS];
    size_t n_panels;
    double height, last_lag;
} pending_plot;

/* ---- what is shown ---------------------------------------------------------------------------------------------- */

static const lag_curve *curve_of(const lag_curves *all, const result *series, const char *budget, bool is_free) {
    for (size_t i = 0; i < all->n; i++) {
        const result *c = all->item[i].point[0];
        if (result_same_series(c, series) && strcmp(c->budget_asked, budget) == 0 && result_is_free(c) == is_free)
            return &all->item[i];
    }
    return NULL;
}

static const result *at_lag(const lag_curve *c, double lag) {
    for (size_t i = 0; i < c->n; i++)
        if (c->point[i]->lag == lag) return c->point[i];
    return NULL;
}

/* Both kinds are there, with lag 0 and another lag that both have. */
static bool is_complete(const lag_curve *charged, const lag_curve *is_free) {
    size_t n = 0;
    if (!charged || !is_free || charged->point[0]->lag != 0) return false;
    for (size_t i = 0; i < charged->n; i++) n += at_lag(is_free, charged->point[i]->lag) != NULL;
    return n >= 2;
}

static int fill(pending_plot *p, panel *to, const lag_curve *charged, const lag_curve *is_free) {
    bootstrap *b = p->in->bootstrap;
    const result *zero = charged->point[0];
    double chance;
    for (size_t i = 0; i < charged->n && to->n < MOST_LAGS; i++) {
        const result *paid = charged->point[i], *gratis = at_lag(is_free, paid->lag);
        if (!gratis) continue;
        point *at = &to->point[to->n++];
        at->lag = paid->lag;
        if (at->lag > 0) { /* nothing waits at lag 0: both kinds of pending are the same */
            TRY(bootstrap_difference(b, zero, gratis, p->metric, &at->part[WORTH], &chance));
            TRY(bootstrap_difference(b, paid, gratis, p->metric, &at->part[PRICE], &chance));
            TRY(bootstrap_difference(b, zero, paid, p->metric, &at->part[NET], &chance));
        }
        to->band |= at->lag > 0 && !isnan(at->part[NET].lo);
        p->last_lag = fmax(p->last_lag, at->lag);
    }
    return 0;
}

/* 0 and the values always, as much of the intervals as does not take the place from them. */
static axis axis_of(const panel *p) {
    double lo = 0, hi = 0, band_lo = 0, band_hi = 0;
    for (size_t i = 0; i < p->n; i++)
        for (part k = 0; k < PARTS; k++) {
            lo = fmin(lo, p->point[i].part[k].value);
            hi = fmax(hi, p->point[i].part[k].value);
            band_lo = fmin(band_lo, p->point[i].part[k].lo);
            band_hi = fmax(band_hi, p->point[i].part[k].hi);
        }
    if (!(hi > lo)) hi = lo + 1;
    return axis_widen((axis){.lo = lo - 0.05 * (hi - lo), .hi = hi + 0.05 * (hi - lo)}, band_lo, band_hi, 0.4);
}

/* The smallest, a middle and the largest of the budgets that are complete. */
static int collect(pending_plot *p, const result *series) {
    const results *r = p->in->results;
    size_t complete = 0, at = 0;
    for (size_t b = 0; b < r->n_budgets; b++)
        complete += is_complete(curve_of(p->curves, series, r->budgets[b].asked, false),
                                curve_of(p->curves, series, r->budgets[b].asked, true));
    size_t n = complete < MOST_PANELS ? complete : MOST_PANELS;
    for (size_t b = 0; b < r->n_budgets && p->n_panels < n; b++) {
        const char *budget = r->budgets[b].asked;
        const lag_curve *charged = curve_of(p->curves, series, budget, false);
        const lag_curve *is_free = curve_of(p->curves, series, budget, true);
        if (!is_complete(charged, is_free)) continue;
        if (at++ != (n > 1 ? p->n_panels * (complete - 1) / (n - 1) : 0)) continue;
        panel *to = &p->panel[p->n_panels++];
        *to = (panel){.budget = budget};
        TRY(fill(p, to, charged, is_free));
        to->y = axis_of(to);
    }
    if (n < complete) say("pending: %s: %zu of %zu budgets are drawn", p->name, n, complete);
    return 0;
}

static int write_panel(pending_plot *p, panel *from) {
    text *t = &p->figure->data, comment = {0};
    int code = text_add(&comment, "%s, budget %s", p->name, from->budget);
    if (!code)
        code = canvas_block(p->figure, comment.data,
                            "lag position worth worth_lo worth_hi price price_lo price_hi net net_lo net_hi",
                            &from->index);
    text_free(&comment);
    for (size_t i = 0; i < from->n && !code; i++) {
        const point *at = &from->point[i];
        code = text_add(t, "%.10g %.10g", at->lag, lag_position(at->lag));
        for (part k = 0; k < PARTS && !code; k++) {
            code = text_add(t, " %.10g", at->part[k].value);
            if (!code) code = canvas_add_interval(p->figure, at->part[k]);
        }
        if (!code) code = text_add(t, "\n");
    }
    return code;
}

/* ---- the script ------------------------------------------------------------------------------------------------- */

static int add_labels(pending_plot *p, const panel *from) {
    text *t = &p->figure->script;
    double at[PARTS], x = lag_position(from->point[from->n - 1].lag);
    for (part k = 0; k < PARTS; k++) at[k] = axis_place(from->y, from->point[from->n - 1].part[k].value);
    TRY(canvas_spread(at, PARTS, 0.25));
    for (part k = 0; k < PARTS; k++) {
        TRY(text_add(t,
                     "set label (paper ? '' : '%c ').'%s' at graph 1.05, graph %.4f left font ',%g' textcolor '%s'\n"
                     "if (paper) set arrow from %.10g,%.10g to graph 1.04, graph %.4f nohead linewidth 0.4 linecolor "
                     "'%s'\n",
                     'A' + (char)k, part_names[k], at[k], CANVAS_LABEL_FONT, part_colours[k], x,
                     from->point[from->n - 1].part[k].value, at[k], part_colours[k]));
    }
    return 0;
}

static int add_plot(pending_plot *p, const panel *from) {
    text *t = &p->figure->script;
    const char *comma = "plot ";
    TRY(text_add(t, "cut(v) = v < %.10g ? %.10g : v > %.10g ? %.10g : v\n", from->y.lo, from->y.lo, from->y.hi,
                 from->y.hi));
    for (part k = 0; from->band && k < NET; k++) { /* the net's would cover that of the information */
        TRY(text_add(t,
                     "%sfor [k=1:paper] data index %zu using 'position':(cut(column('%s_lo'))):(cut(column('%s_hi'))) "
                     "with filledcurves fillstyle transparent solid 0.13 noborder linecolor '%s'",
                     comma, from->index, part_columns[k], part_columns[k], part_colours[k]));
        comma = ", \\\n    ";
    }
    for (part k = 0; k < PARTS; k++) {
        TRY(text_add(t,
                     "%sdata index %zu using 'position':'%s' with linespoints %s pointtype (paper ? 7 : %d) pointsize "
                     "0.22 linecolor '%s'",
                     comma, from->index, part_columns[k], part_look[k], (int)k + 1, part_colours[k]));
        comma = ", \\\n    ";
    }
    return text_add(t, "\n");
}

static int add_panel(pending_plot *p, size_t i) {
    text *t = &p->figure->script;
    const panel *from = &p->panel[i];
    bool last = i + 1 == p->n_panels;
    double top = p->height - ABOVE - (double)i * PANEL;
    TRY(text_add(t, "set tmargin at screen %.4f\nset bmargin at screen %.4f\n", (top - PANEL_GAP) / p->height,
                 (top - PANEL) / p->height));
    TRY(axis_add_lags(t, p->last_lag, last ? 15 : 0));
    TRY(axis_add(t, 'y', from->y, true));
    TRY(text_add(t,
                 "if (paper) set arrow from graph 0, first 0 to graph 1, first 0 nohead back linewidth 0.6 linecolor "
                 "'#606060'\nset label 'budget '."));
    TRY(canvas_quote(t, from->budget, 12));
    TRY(text_add(t, " at graph 0.02, graph 1.07 left front font ',%g'\n", CANVAS_LABEL_FONT));
    TRY(add_labels(p, from));
    TRY(add_plot(p, from));
    return text_add(t, "unset label\nunset arrow\n");
}

static int write_script(pending_plot *p) {
    text *t = &p->figure->script, title = {0};
    bool band = false;
    for (size_t i = 0; i < p->n_panels; i++) band |= p->panel[i].band;
    int code = text_add(&title, "%s, %s", p->name, results_metrics[p->metric].brief);
    if (!code) code = text_add(t, "set lmargin at screen %g\nset rmargin at screen %g\nset label ", LEFT, RIGHT);
    if (!code) code = canvas_quote_title(t, title.data, p->in->results);
    text_free(&title);
    TRY(code);
    TRY(text_add(t, " at screen %g, screen %.4f left font ',7'\n", LEFT, 1 - 0.09 / p->height));
    TRY(text_add(t,
                 "set label 'lag (tokens)' at screen %g, screen (paper ? %.4f : 0) center font ',6.5'\n"
                 "if (paper) set label 'information: lag 0 less free; memory: charged less free%s' at screen 0.985, "
                 "screen %.4f right font ',5.5' textcolor '#606060'\n",
                 (LEFT + RIGHT) / 2, 0.215 / p->height, band ? "; shaded: 90 %" : "", 0.08 / p->height));
    TRY(axis_add_y_label(
        t, results_metrics[p->metric].kind == METRIC_LOSS ? "nats/token" : results_metrics[p->metric].brief,
        (p->height + BELOW - ABOVE) / 2 / p->height));
    TRY(text_add(t, "set multiplot\n"));
    for (size_t i = 0; i < p->n_panels; i++) TRY(add_panel(p, i));
    return text_add(t, "unset multiplot\n");
}

/* ---- which figures ---------------------------------------------------------------------------------------------- */

static int draw(pending_plot *p, figure_list *list, const result *series, size_t *drawn) {
    TRY(collect(p, series));
    if (!p->n_panels) return 0;
    p->height = ABOVE + BELOW - PANEL_GAP + PANEL * (double)p->n_panels;
    const char *parts[] = {"pending", p->name, results_metrics[p->metric].column};
    TRY(canvas_new(list, parts, 3, p->height, &p->figure));
    for (size_t i = 0; i < p->n_panels; i++) TRY(write_panel(p, &p->panel[i]));
    ++*drawn;
    return write_script(p);
}

static int draw_metric(const figure_input *in, figure_list *list, size_t metric, size_t *drawn) {
    lag_curves all;
    int code = lag_curves_find(in->results, metric, &all);
    for (size_t i = 0; i < all.n && !code; i++) {
        const result *c = all.item[i].point[0];
        if (result_is_oracle(c) || !lag_curves_opens_series(&all, i)) continue;
        char *name = result_series_name(in->results, c);
        pending_plot *p = mem_new(1, sizeof *p, "figure");
        code = name && p ? 0 : ERR_DATA;
        if (!code) {
            *p = (pending_plot){.in = in, .curves = &all, .metric = metric, .name = name};
            code = draw(p, list, c, drawn);
        }
        mem_free(p);
        mem_free(name);
    }
    lag_curves_free(&all);
    return code;
}

int figure_pending(const figure_input *in, figure_list *list) {
    size_t drawn = 0;
    for (size_t m = 0; m < in->n_metrics; m++) TRY(draw_metric(in, list, in->metrics[m], &drawn));
    if (!drawn)
        say("pending: no policy has lag 0 and more with pending entries both charged and free (kvlag sim --pending "
            "both), "
            "figure skipped");
    return 0;
}
