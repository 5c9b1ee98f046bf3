/* The proof: what was estimated against what a true rerun cost, KL and loss change side by side, a point a
 * configuration and sequence. A perfect estimate lies on the diagonal; hollow points are too small to judge. */
#include "analyze/canvas.h"
#include "analyze/fidelity.h"
#include "analyze/gnuplot.h"
#include "analyze/statistics.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/progress.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* Inches: a panel, its left edges, its bottom, the canvas, the legend's two lines. */
#define SIDE 1.18
#define LEFT_KL 0.42
#define LEFT_DLOSS 2.06
#define BOTTOM 0.36
#define HEIGHT 2.13
#define LEGEND_TOP 1.86
#define LEGEND_BOTTOM 1.72
/* The KL axis shows no less: values far below FIDELITY_LEAST_KL are noise and would take half the picture. */
#define LEAST_SHOWN 1e-4
#define STRIP_COLOUR "#dfe3ea"

typedef struct fidelity_plot {
    const fidelity *f;
    bool uncalibrated;
    figure *figure;
    bool there[FIDELITY_FAMILIES], hollow;
    size_t index[FIDELITY_FAMILIES]; /* block of the data file */
    axis kl, dloss;                  /* of both directions */
    bool strip;                      /* the intervals of KL are the same factors everywhere: */
    double above, below;             /* log(hi / est) and log(est / lo) */
    bool bars;                       /* they differ: a bar a point */
} fidelity_plot;

static const struct {
    const char *colour;
    int full, hollow; /* gnuplot's point types */
} looks[FIDELITY_FAMILIES] = {
    [FIDELITY_WINDOW] = {"#CC79A7", 5, 4},    [FIDELITY_STATIC] = {"#0072B2", 9, 8},
    [FIDELITY_ATTENTION] = {"#D55E00", 7, 6}, [FIDELITY_ORACLE] = {"#009E73", 13, 12},
    [FIDELITY_OTHER] = {"#606060", 11, 10},
};

/* ---- the data --------------------------------------------------------------------------------------------------- */

static int add_number(text *t, double value) {
    return isnan(value) ? text_add(t, "nan ") : text_add(t, "%.10g ", value);
}

static int add_pair(text *t, const fidelity_pair *p) {
    const result *r = p->row;
    const double value[] = {p->true_kl,    r->metric[KL_EST],    r->lo[KL_EST],    r->hi[KL_EST],
                            p->true_dloss, r->metric[DLOSS_EST], r->lo[DLOSS_EST], r->hi[DLOSS_EST]};
    text name = {0};
    for (size_t i = 0; i < sizeof value / sizeof *value; i++) TRY(add_number(t, value[i]));
    int code = text_add(&name, "%s %s %s budget %s", r->trace, r->seq, r->spec, r->budget_asked);
    if (!code && r->lag >= 0) code = text_add(&name, " lag %g", r->lag);
    if (!code) code = text_add(t, "\"%s\"\n", strpbrk(name.data, "\"\n\\") ? "" : name.data);
    text_free(&name);
    return code;
}

static int add_data(fidelity_plot *p) {
    for (int k = 0; k < FIDELITY_FAMILIES; k++)
        for (size_t i = 0; i < p->f->n; i++) {
            const fidelity_pair *pair = &p->f->pairs[i];
            if ((int)pair->family != k || isnan(pair->row->metric[KL_EST])) continue;
            if (!p->there[k])
                TRY(canvas_block(p->figure, fidelity_families[k],
                                 "true_kl kl_est kl_lo kl_hi true_dloss dloss_est dloss_lo dloss_hi configuration",
                                 &p->index[k]));
            p->there[k] = true;
            p->hollow |= pair->true_kl < FIDELITY_LEAST_KL;
            TRY(add_pair(&p->figure->data, pair));
        }
    return 0;
}

/* ---- axes and intervals ----------------------------------------------------------------------------------------- */

static void fit_kl(fidelity_plot *p) {
    double lo = INFINITY, hi = LEAST_SHOWN * 10;
    size_t outside = 0;
    for (size_t i = 0; i < p->f->n; i++) {
        const fidelity_pair *pair = &p->f->pairs[i];
        double est = pair->row->metric[KL_EST], least = fmin(pair->true_kl, est);
        if (isnan(est)) continue;
        hi = fmax(hi, fmax(pair->true_kl, est));
        if (least < LEAST_SHOWN) outside++;
        else lo = fmin(lo, least);
    }
    if (outside) say("%s: %zu points with a KL below %g are not shown", p->figure->name, outside, LEAST_SHOWN);
    lo = fmin(outside ? LEAST_SHOWN : lo, hi / 10);
    p->kl = (axis){.lo = lo / 1.3, .hi = hi * 1.3, .log = true};
}

/* Logarithmic where nothing comes near 0 or below it. */
static void fit_dloss(fidelity_plot *p) {
    double lo = INFINITY, hi = 10 * AXIS_LINEAR_TO;
    for (size_t i = 0; i < p->f->n; i++) {
        const fidelity_pair *pair = &p->f->pairs[i];
        double est = pair->row->metric[DLOSS_EST];
        if (isnan(est)) continue;
        lo = fmin(lo, fmin(pair->true_dloss, est));
        hi = fmax(hi, fmax(pair->true_dloss, est));
    }
    bool log_axis = lo >= AXIS_LINEAR_TO;
    axis a = {.lo = log_axis ? fmin(lo, hi / 10) : fmin(lo, 0),
              .hi = hi,
              .log = log_axis,
              .linear_to = log_axis ? 0 : AXIS_LINEAR_TO};
    p->dloss = a;
    p->dloss.lo = axis_value(a, -0.05);
    p->dloss.hi = axis_value(a, 1.05);
}

/* One strip around the diagonal stands for all intervals where their factors are alike (within a tenth of the median);
 * else each point shows its own. */
static int fit_intervals(fidelity_plot *p) {
    double *above = mem_new(2 * p->f->n, sizeof *above, "intervals"), *below = above + p->f->n;
    size_t n = 0;
    if (!above) return ERR_DATA;
    for (size_t i = 0; i < p->f->n; i++) {
        const result *r = p->f->pairs[i].row;
        if (!(r->lo[KL_EST] > 0) || !(r->metric[KL_EST] > 0)) continue;
        above[n] = log(r->hi[KL_EST] / r->metric[KL_EST]);
        below[n++] = log(r->metric[KL_EST] / r->lo[KL_EST]);
    }
    p->above = statistics_median(above, n);
    p->below = statistics_median(below, n);
    p->strip = n > 0 && above[n - 1] - above[0] <= 0.2 * p->above && below[n - 1] - below[0] <= 0.2 * p->below;
    p->bars = n > 0 && !p->strip;
    mem_free(above);
    return 0;
}

/* ---- the script ------------------------------------------------------------------------------------------------- */

/* A panel: which truth and which estimate. */
typedef struct panel {
    const char *truth, *x_words, *y_words;
    size_t metric;
    double left;
} panel;

static const panel panels[2] = {
    {"true_kl", "true KL", "estimated KL", KL_EST, LEFT_KL},
    {"true_dloss", "true loss change", "estimated loss change", DLOSS_EST, LEFT_DLOSS},
};

/* x and y in inches. */
static int add_label(text *t, double x, double y, const char *how, const char *words) {
    TRY(text_add(t, "set label "));
    TRY(gnuplot_quote(t, words));
    return text_add(t, " at screen %.4f, screen %.4f %s\n", x / CANVAS_WIDTH, y / HEIGHT, how);
}

/* The upper left corner is empty in a picture whose points lie along the diagonal. */
static int add_corner(text *t, const panel *at, int line, const char *format, double value) {
    char words[64];
    snprintf(words, sizeof words, format, value);
    return isnan(value)
               ? 0
               : add_label(t, at->left + 0.05, BOTTOM + SIDE - 0.07 - 0.1 * line, "left front font ',5.5'", words);
}

static int add_figures(fidelity_plot *p, const panel *at) {
    text *t = &p->figure->script;
    fidelity_correlation c;
    fidelity_ratio r;
    TRY(fidelity_correlate(p->f, at->metric, &c));
    TRY(fidelity_compare(p->f, KL_EST, FIDELITY_ALL, &r));
    TRY(add_corner(t, at, 0, "n %.0f", (double)c.n));
    if (at->metric == DLOSS_EST) return add_corner(t, at, 1, "Spearman %.3f", c.dloss_spearman);
    TRY(add_corner(t, at, 1, "Spearman %.3f", c.kl_spearman));
    return add_corner(t, at, 2, "spread ×%.2f", r.spread);
}

static int begin_panel(fidelity_plot *p, const panel *at, axis a) {
    text *t = &p->figure->script;
    TRY(text_add(t,
                 "set lmargin at screen %.4f\nset rmargin at screen %.4f\nset bmargin at screen %.4f\n"
                 "set tmargin at screen %.4f\ncut(v) = v < %.10g ? %.10g : v > %.10g ? %.10g : v\n",
                 at->left / CANVAS_WIDTH, (at->left + SIDE) / CANVAS_WIDTH, BOTTOM / HEIGHT, (BOTTOM + SIDE) / HEIGHT,
                 a.lo, a.lo, a.hi, a.hi));
    for (const char *which = "xy"; *which; which++) TRY(axis_add(t, *which, a, true));
    TRY(add_label(t, at->left + SIDE / 2, 0.09, "center font ',6.5'", at->x_words));
    TRY(add_label(t, at->left - 0.34, BOTTOM + SIDE / 2, "center rotate by 90 font ',6.5'", at->y_words));
    return add_figures(p, at);
}

/* Behind the points: the intervals, then the diagonal. */
static int add_ground(fidelity_plot *p, const panel *at) {
    text *t = &p->figure->script;
    const results_metric *m = &results_metrics[at->metric];
    TRY(text_add(t, "plot "));
    if (at->metric == KL_EST && p->strip)
        TRY(text_add(t,
                     "'+' using 1:(cut($1 * %.10g)):(cut($1 * %.10g)) with filledcurves fillstyle solid 1 noborder "
                     "linecolor '%s', \\\n    ",
                     exp(-p->above), exp(p->below), STRIP_COLOUR));
    for (int k = 0; k < FIDELITY_FAMILIES; k++) {
        if (!p->there[k] || (at->metric == KL_EST && !p->bars)) continue;
        TRY(text_add(t,
                     "data index %zu using (column('%s')):(cut(column('%s'))):(0):"
                     "(cut(column('%s')) - cut(column('%s'))) with vectors nohead linewidth 0.4 "
                     "linecolor '#a0%s', \\\n    ",
                     p->index[k], at->truth, m->lo, m->hi, m->lo, looks[k].colour + 1));
    }
    return text_add(t, "x with lines linewidth 0.6 linecolor '#404040'");
}

static int add_panel(fidelity_plot *p, const panel *at, axis a) {
    text *t = &p->figure->script;
    TRY(begin_panel(p, at, a));
    TRY(add_ground(p, at));
    for (int hollow = 1; hollow >= 0; hollow--)
        for (int k = 0; k < FIDELITY_FAMILIES; k++) {
            if (!p->there[k]) continue;
            TRY(text_add(t,
                         ", \\\n    data index %zu using (column('true_kl') %s %g ? column('%s') : NaN):"
                         "(column('%s')) with points pointtype %d pointsize 0.22 linewidth 0.5 linecolor '%s'",
                         p->index[k], hollow ? "<" : ">=", FIDELITY_LEAST_KL, at->truth,
                         results_metrics[at->metric].column, hollow ? looks[k].hollow : looks[k].full,
                         looks[k].colour));
        }
    return text_add(t, "\nunset label\nunset object\n");
}

/* A mark and words; *x moves on behind them. */
static int add_legend_item(text *t, double *x, double y, int point, const char *colour, const char *words) {
    TRY(text_add(t,
                 "set label '' at screen %.4f, screen %.4f point pointtype %d pointsize 0.3 linewidth 0.5 "
                 "linecolor '%s'\n",
                 (*x + 0.03) / CANVAS_WIDTH, y / HEIGHT, point, colour));
    TRY(add_label(t, *x + 0.09, y, "left font ',6'", words));
    *x += 0.09 + canvas_label_width(strlen(words)) + 0.09;
    return 0;
}

static int add_interval_item(fidelity_plot *p, double *x, double y) {
    text *t = &p->figure->script;
    const char *words = p->uncalibrated ? "90 % interval, uncalibrated" : "90 % interval";
    if (p->strip)
        TRY(text_add(t,
                     "set object rectangle from screen %.4f, screen %.4f to screen %.4f, screen %.4f fillstyle solid 1 "
                     "noborder fillcolor '%s'\n",
                     *x / CANVAS_WIDTH, (y - 0.03) / HEIGHT, (*x + 0.14) / CANVAS_WIDTH, (y + 0.03) / HEIGHT,
                     STRIP_COLOUR));
    else
        TRY(text_add(t,
                     "set arrow from screen %.4f, screen %.4f to screen %.4f, screen %.4f nohead linewidth 0.4 "
                     "linecolor '#606060'\n",
                     (*x + 0.07) / CANVAS_WIDTH, (y - 0.04) / HEIGHT, (*x + 0.07) / CANVAS_WIDTH, (y + 0.04) / HEIGHT));
    TRY(add_label(t, *x + 0.17, y, "left font ',6'", words));
    *x += 0.17 + canvas_label_width(strlen(words)) + 0.09;
    return 0;
}

static int add_legend(fidelity_plot *p) {
    text *t = &p->figure->script;
    double x = LEFT_KL;
    for (int k = 0; k < FIDELITY_FAMILIES; k++)
        if (p->there[k]) TRY(add_legend_item(t, &x, LEGEND_TOP, looks[k].full, looks[k].colour, fidelity_families[k]));
    x = LEFT_KL;
    if (p->strip || p->bars) TRY(add_interval_item(p, &x, LEGEND_BOTTOM));
    return p->hollow ? add_legend_item(t, &x, LEGEND_BOTTOM, 6, "#606060", "true KL < 0.003") : 0;
}

static int add_title(fidelity_plot *p) {
    text title = {0};
    const fidelity *f = p->f;
    int code = text_add(&title, "Estimate and truth%s%s%s, nats/token, ", *f->mode ? " (" : "", f->mode,
                        *f->mode ? " loop)" : "");
    if (!code)
        code = f->n_sequences == 1 ? text_add(&title, "%s", f->pairs[0].row->trace)
                                   : text_add(&title, "%zu texts", f->n_sequences);
    if (!code) code = text_add(&p->figure->script, "set label ");
    if (!code) code = canvas_quote(&p->figure->script, title.data, 56);
    if (!code)
        code = text_add(&p->figure->script, " at screen %.4f, screen %.4f left font ',7'\n", LEFT_KL / CANVAS_WIDTH,
                        1 - 0.09 / HEIGHT);
    text_free(&title);
    return code;
}

static int write_script(fidelity_plot *p) {
    text *t = &p->figure->script;
    TRY(text_add(t, "set grid xtics ytics linetype 1 linecolor '#e4e4e4' linewidth 0.4\n"
                    "set samples 200\nset multiplot\n"));
    TRY(add_title(p));
    TRY(add_legend(p));
    TRY(add_panel(p, &panels[0], p->kl));
    TRY(add_panel(p, &panels[1], p->dloss));
    return text_add(t, "unset multiplot\n");
}

/* ---- putting it together ---------------------------------------------------------------------------------------- */

static int draw(const figure_input *in, figure_list *list, const fidelity *f) {
    fidelity_plot p = {.f = f, .uncalibrated = in->results->uncalibrated};
    bool any = false;
    for (size_t i = 0; i < f->n && !any; i++) any = !isnan(f->pairs[i].row->metric[KL_EST]);
    if (!any) {
        say("fidelity: no row with a truth has a kl_est (trace with --gradients fisher:1), figure skipped");
        return 0;
    }
    TRY(canvas_new(list, (const char *[]){"fidelity", f->mode}, in->fidelity->n > 1 ? 2 : 1, HEIGHT, &p.figure));
    p.figure->paper_only = true;
    TRY(add_data(&p));
    fit_kl(&p);
    fit_dloss(&p);
    TRY(fit_intervals(&p));
    return write_script(&p);
}

int figure_fidelity(const figure_input *in, figure_list *list) {
    if (!in->fidelity->n) say("fidelity: needs a truth file of kvlag verify, figure skipped");
    for (size_t i = 0; i < in->fidelity->n; i++) TRY(draw(in, list, &in->fidelity->item[i]));
    return 0;
}
