/* Which layers and query heads the loss comes from, and which lag suits each of them, as heat maps.
 *
 * Two kinds, both at the middle budget. heads_METRIC shows the best policy with a lag beside the best one without.
 * heads_lag shows, for the policy with at least LEAST_LAGS lags that is best there, the lag at which each head's own
 * value is lowest: by kl_est where there is one, and by lost mass. Not by dloss_est: a head's own first-order part is
 * of either sign and cancels against others'. */
#include "analyze/anatomy.h"
#include "analyze/canvas.h"
#include "analyze/decide.h"
#include "analyze/gnuplot.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/progress.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Inches. */
#define LEFT 0.42
#define RIGHT 0.62 /* for the colour box */
#define BOTTOM 0.62
#define ABOVE 0.36
#define SECOND_LINE 0.1 /* of the title */
#define GAP 0.14
#define LAYER_HEIGHT 0.068
#define LEAST_FALL 0.05 /* a head whose values differ less over the lags, relative to the highest, has no best one */
enum { MOST_PANELS = 2, LEAST_LAGS = 3, TITLE_MOST = 22 };

typedef struct panel {
    char *title;  /* owned */
    head_map map; /* owned: what is drawn */
    size_t index; /* block of the data file */
} panel;

typedef struct heads_plot {
    const results *r;
    figure *figure;
    const char *column; /* what the cells hold */
    const char *unit;   /* stands above the colour box */
    const char *second; /* line of the title, or NULL */
    panel panels[MOST_PANELS];
    size_t n_panels;
    size_t n_layer, n_head; /* the largest */
    double lo, hi;          /* of all cells */
    bool blank;             /* some cell has no value */
} heads_plot;

static void heads_plot_free(heads_plot *p) {
    for (size_t k = 0; k < p->n_panels; k++) {
        mem_free(p->panels[k].title);
        head_map_free(&p->panels[k].map);
    }
}

/* Takes both. */
static int add_map(heads_plot *p, char *title, head_map map) {
    p->panels[p->n_panels++] = (panel){.title = title, .map = map};
    for (size_t i = 0; i < map.n_layer * map.n_head; i++) {
        p->blank |= isnan(map.value[i]);
        p->lo = fmin(p->lo, map.value[i]);
        p->hi = fmax(p->hi, map.value[i]);
    }
    if (map.n_layer > p->n_layer) p->n_layer = map.n_layer;
    if (map.n_head > p->n_head) p->n_head = map.n_head;
    return title ? 0 : ERR_DATA;
}

/* ---- data and script -------------------------------------------------------------------------------------------- */

static int write_data(heads_plot *p, panel *at) {
    text *t = &p->figure->data, columns = {0};
    int code = text_add(&columns, "layer head %s", p->column);
    if (!code) code = canvas_block(p->figure, at->title, columns.data, &at->index);
    text_free(&columns);
    for (size_t l = 0; l < at->map.n_layer && !code; l++)
        for (size_t h = 0; h < at->map.n_head && !code; h++) {
            double value = at->map.value[l * at->map.n_head + h];
            code = isnan(value) ? text_add(t, "%zu %zu nan\n", l, h) : text_add(t, "%zu %zu %.7g\n", l, h, value);
        }
    return code;
}

static double panel_height(const heads_plot *p) {
    return fmin(fmax(LAYER_HEIGHT * (double)p->n_layer, 0.9), 2.6);
}

static double panel_width(const heads_plot *p) {
    double n = (double)p->n_panels;
    return (CANVAS_WIDTH - LEFT - RIGHT - GAP * (n - 1)) / n;
}

static double height_of(const heads_plot *p) {
    return BOTTOM + panel_height(p) + ABOVE + (p->second ? SECOND_LINE : 0);
}

static int new_figure(heads_plot *p, figure_list *list, const char *const *parts, size_t n) {
    TRY(canvas_new(list, parts, n, height_of(p), &p->figure));
    p->figure->paper_only = true;
    for (size_t k = 0; k < p->n_panels; k++) TRY(write_data(p, &p->panels[k]));
    return 0;
}

static int add_ticks(text *t, char which, size_t n, double room) {
    return text_add(t, "set %crange [-0.5:%g]\nset %ctics 0,%g,%zu\n", which, (double)n - 0.5, which,
                    fmax(axis_step((double)n, room), 1), n - 1);
}

static int add_panel(heads_plot *p, size_t k) {
    text *t = &p->figure->script;
    double wide = panel_width(p), left = LEFT + (wide + GAP) * (double)k;
    TRY(text_add(t, "set lmargin at screen %.4f\nset rmargin at screen %.4f\nset title ", left / CANVAS_WIDTH,
                 (left + wide) / CANVAS_WIDTH));
    TRY(canvas_quote(t, p->panels[k].title, TITLE_MOST));
    return text_add(t,
                    " font ',6' offset 0,-0.7\nset format y '%s'\n"
                    "plot data index %zu using (drawn(column('%s'))):'layer':(half):(half):(place(column('%s'))) with "
                    "boxxyerror palette fillstyle solid noborder\nunset colorbox\nunset label\n",
                    k ? "" : "%g", p->panels[k].index, p->column, p->column);
}

/* What to be careful about, in two lines; the second begins with what a grey cell means. */
static int add_notes(heads_plot *p, const char *const notes[2], const char *grey) {
    text *t = &p->figure->script, second = {0};
    int code = p->blank ? text_add(&second, "grey: %s%s", grey, *notes[1] ? "; " : "") : 0;
    if (!code) code = text_add(&second, "%s", notes[1]);
    for (int i = 0; i < 2 && !code; i++) {
        code = text_add(t, "set label ");
        if (!code) code = gnuplot_quote(t, i ? second.data : notes[0]);
        if (!code)
            code = text_add(t, " at screen 0.985, screen %.4f right font ',5.5' textcolor '#606060'\n",
                            (0.19 - 0.11 * i) / height_of(p));
    }
    text_free(&second);
    return code;
}

static int add_words(heads_plot *p, const char *subject) {
    text *t = &p->figure->script;
    double height = height_of(p);
    TRY(axis_add_y_label(t, "layer", (BOTTOM + panel_height(p) / 2) / height));
    TRY(text_add(t, "set label "));
    TRY(canvas_quote_title(t, subject, p->r));
    TRY(text_add(t, " at screen %.4f, screen %.4f left font ',7'\n", LEFT / CANVAS_WIDTH, 1 - 0.1 / height));
    if (p->second) {
        TRY(text_add(t, "set label "));
        TRY(canvas_quote(t, p->second, 60));
        TRY(text_add(t, " at screen %.4f, screen %.4f left font ',6'\n", LEFT / CANVAS_WIDTH, 1 - 0.22 / height));
    }
    return text_add(t, "set label '%s' at screen 0.985, screen %.4f right font ',6'\n", p->unit,
                    (BOTTOM + panel_height(p) + 0.075) / height);
}

/* The panels, once palette, ticks of the colours and place(value) are set. Cells overlap a little: where edges only
 * touch, viewers show seams. */
static int add_panels(heads_plot *p) {
    text *t = &p->figure->script;
    double height = height_of(p), tall = panel_height(p);
    TRY(text_add(t,
                 "set colorbox user origin %.4f,%.4f size 0.022,%.4f noborder\nset bmargin at screen %.4f\n"
                 "set tmargin at screen %.4f\nhalf = 0.52\ndrawn(v) = v == v ? column('head') : NaN\n",
                 (CANVAS_WIDTH - RIGHT + 0.06) / CANVAS_WIDTH, BOTTOM / height, tall / height, BOTTOM / height,
                 (BOTTOM + tall) / height));
    TRY(add_ticks(t, 'x', p->n_head, panel_width(p) / 0.2));
    TRY(add_ticks(t, 'y', p->n_layer, tall / 0.25));
    TRY(text_add(t, "unset grid\nset border 15\nset xlabel 'query head' font ',6.5' offset 0,0.8\n"
                    "set object rectangle from graph 0, graph 0 to graph 1, graph 1 behind fillcolor '#b8b8b8' "
                    "fillstyle solid noborder\nset multiplot\n"));
    for (size_t k = 0; k < p->n_panels; k++) TRY(add_panel(p, k));
    return text_add(t, "unset multiplot\n");
}

/* ---- loss by head ----------------------------------------------------------------------------------------------- */

/* Light for little, dark for much: ColorBrewer's YlGnBu (Brewer, 2003). */
static const char *const light_dark[] = {"#ffffd9", "#edf8b1", "#c7e9b4", "#7fcdbb", "#41b6c4",
                                         "#1d91c0", "#225ea8", "#253494", "#081d58"};
/* Blue below, orange above: ends of its RdBu and PuOr. */
static const char *const blue_orange[] = {"#053061", "#2166ac", "#67a9cf", "#d1e5f0", "#f7f7f7",
                                          "#fee0b6", "#f1a340", "#b35806", "#7f3b08"};
/* For steps: matplotlib's viridis (van der Walt and Smith, 2015), turned round. */
static const char *const viridis[] = {"#fde725", "#aadc32", "#5cc863", "#27ad81", "#21908d",
                                      "#2c718e", "#3b518b", "#472c7a", "#440154"};
enum { SHADES = 9 };

static int add_palette(text *t, const char *const colours[SHADES]) {
    TRY(text_add(t, "set palette defined ("));
    for (int i = 0; i < SHADES; i++) TRY(text_add(t, "%s%d '%s'", i ? ", " : "", i, colours[i]));
    return text_add(t, ")\n");
}

/* A few heads lose much and most lose little: colours are logarithmic over the two largest decades (those of both
 * signs, whose small values are noise, over one) and linear below, alike on both sides of 0. */
static int add_loss_colours(const heads_plot *p) {
    text *t = &p->figure->script;
    double most = fmax(p->hi, -p->lo), largest = most > 0 ? pow(10, floor(log10(most))) : 1;
    axis a = {.lo = p->lo < 0 ? -most : 0, .hi = most > 0 ? most : 1, .linear_to = largest / (p->lo < 0 ? 10 : 100)};
    TRY(add_palette(t, p->lo < 0 ? blue_orange : light_dark));
    TRY(text_add(t, "place(v) = asinh(v / %g)\nset cbrange [place(%.7g):place(%.7g)]\nset cbtics ('0' 0", a.linear_to,
                 a.lo, a.hi));
    for (int sign = p->lo < 0 ? -1 : 1; sign <= 1; sign += 2)
        for (double v = a.linear_to; v < 1.0001 * largest; v *= 10)
            TRY(text_add(t, ", '%g' place(%g)", sign * v, sign * v));
    return text_add(t, ") scale 0.3 font ',6' offset -0.5,0\n");
}

/* Attention mass is a share: plain. */
static int add_mass_colours(const heads_plot *p) {
    text *t = &p->figure->script;
    double hi = p->hi > 0 ? p->hi : 1;
    TRY(add_palette(t, light_dark));
    return text_add(t,
                    "place(v) = v\nset cbrange [0:%.7g]\nset cbtics 0,%g scale 0.3 font ',6' offset -0.5,0\n"
                    "set format cb '%%g'\n",
                    hi, axis_step(hi, 5));
}

static int add_policy(heads_plot *p, const evidence *e, size_t metric, const char *budget, config_test *passes) {
    head_map map;
    const result *c = anatomy_best(p->r, metric, budget, passes);
    if (!c) return 0;
    int code = head_map_new(e, c, metric, &map);
    if (code || head_map_has_values(&map)) return code ? code : add_map(p, anatomy_name(p->r, c, TITLE_MOST), map);
    say("heads: %s has no %s by head, left out", c->spec, p->column);
    head_map_free(&map);
    return 0;
}

static int write_losses(heads_plot *p, size_t metric, const char *budget) {
    static const char *const notes[RESULTS_METRICS][2] = {
        [DLOSS_EST] = {"each head alone: first-order + Fisher term of its own disturbance;",
                       "what heads do together is missing, so values do not add up"},
        [KL_EST] = {"each head alone: Fisher term of its own disturbance;",
                    "what heads do together is missing, so values do not add up"},
        [LOST_MASS] = {"the mean over all layers and heads is the policy''s lost mass", ""},
    };
    text subject = {0};
    int code = text_add(&subject, "%s by head, budget %s",
                        metric == DLOSS_EST ? "Loss change"
                        : metric == KL_EST  ? "KL"
                                            : "Lost mass",
                        budget);
    if (!code) code = metric == LOST_MASS ? add_mass_colours(p) : add_loss_colours(p);
    if (!code) code = add_words(p, subject.data);
    if (!code) code = add_notes(p, notes[metric], "no such head");
    if (!code) code = add_panels(p);
    text_free(&subject);
    return code;
}

static bool is_policy(const result *c) {
    return !result_is_oracle(c);
}

static int draw_losses(const figure_input *in, figure_list *list, size_t metric) {
    const char *column = results_metrics[metric].column, *budget = anatomy_budget(in->results, metric, is_policy);
    const char *unit = metric == LOST_MASS ? "lost mass" : "nats/token";
    heads_plot p = {.r = in->results, .column = column, .unit = unit, .lo = INFINITY, .hi = -INFINITY};
    if (!budget) {
        say("heads: no policy has %s, figure skipped", column);
        return 0;
    }
    int code = add_policy(&p, in->evidence, metric, budget, config_waits);
    if (!code) code = add_policy(&p, in->evidence, metric, budget, config_is_filter);
    if (!code && p.n_panels) code = new_figure(&p, list, (const char *[]){"heads", column}, 2);
    if (!code && p.n_panels) code = write_losses(&p, metric, budget);
    heads_plot_free(&p);
    return code;
}

/* ---- the best lag of each head ---------------------------------------------------------------------------------- */

static const result *best_point(const lag_curve *c, size_t metric) {
    const result *best = c->point[0];
    for (size_t i = 1; i < c->n; i++)
        if (c->point[i]->metric[metric] < best->metric[metric]) best = c->point[i];
    return best;
}

/* At a budget, the curve of the best policy that has enough lags; NULL if there is none. */
static const lag_curve *best_curve(const lag_curves *curves, size_t metric, const char *budget) {
    const lag_curve *best = NULL;
    for (size_t i = 0; i < curves->n; i++) {
        const lag_curve *c = &curves->item[i];
        if (c->n < LEAST_LAGS || !is_policy(c->point[0]) || strcmp(c->point[0]->budget_asked, budget) != 0) continue;
        if (!best || config_better(best_point(c, metric), best_point(best, metric), metric)) best = c;
    }
    return best;
}

/* At the middle one, or the smaller of two, of the budgets that have such a curve. */
static const lag_curve *middle_curve(const results *r, const lag_curves *curves, size_t metric) {
    size_t n = 0, seen = 0;
    for (size_t b = 0; b < r->n_budgets; b++) n += best_curve(curves, metric, r->budgets[b].asked) != NULL;
    for (size_t b = 0; b < r->n_budgets; b++) {
        const lag_curve *c = best_curve(curves, metric, r->budgets[b].asked);
        if (c && seen++ == (n - 1) / 2) return c;
    }
    return NULL;
}

/* The map of each head's best lag; *any: some head has one. */
static int best_lags(const evidence *e, const lag_curve *c, size_t metric, head_map *out, bool *any) {
    *out = (head_map){0};
    *any = false;
    head_map *map = mem_new(c->n, sizeof *map, "values by head");
    int *lowest = NULL, code = map ? 0 : ERR_DATA;
    for (size_t i = 0; i < c->n && !code; i++) code = head_map_new(e, c->point[i], metric, &map[i]);
    if (!code) lowest = mem_new(map[0].n_layer * map[0].n_head + 1, sizeof *lowest, "lags by head");
    if (!code && !lowest) code = ERR_DATA;
    if (!code) {
        head_map_lowest(map, c->n, LEAST_FALL, lowest);
        *out = map[0];
        map[0] = (head_map){0};
        for (size_t i = 0; i < out->n_layer * out->n_head; i++) {
            out->value[i] = lowest[i] < 0 ? NAN : c->point[lowest[i]]->lag;
            *any |= lowest[i] >= 0;
        }
    }
    for (size_t i = 0; map && i < c->n; i++) head_map_free(&map[i]);
    mem_free(map);
    mem_free(lowest);
    return code;
}

/* Of n colours along viridis the i-th. */
static unsigned long viridis_step(size_t i, size_t n) {
    double at = n > 1 ? (double)i * (SHADES - 1) / (double)(n - 1) : 0;
    size_t low = at < SHADES - 1 ? (size_t)at : SHADES - 2;
    unsigned long from = strtoul(viridis[low] + 1, NULL, 16), to = strtoul(viridis[low + 1] + 1, NULL, 16), mixed = 0;
    for (int shift = 16; shift >= 0; shift -= 8) {
        double a = (double)(from >> shift & 255), b = (double)(to >> shift & 255);
        mixed |= (unsigned long)lround(a + (at - (double)low) * (b - a)) << shift;
    }
    return mixed;
}

/* One colour a lag, in the order of the lags. */
static int add_lag_colours(const heads_plot *p, const lag_curve *c) {
    text *t = &p->figure->script;
    TRY(text_add(t, "set palette defined ("));
    for (size_t i = 0; i < c->n; i++) {
        unsigned long colour = viridis_step(i, c->n);
        TRY(text_add(t, "%s%zu '#%06lx', %zu '#%06lx'", i ? ", " : "", i, colour, i + 1, colour));
    }
    TRY(text_add(t, ")\nset cbrange [0:%zu]\nplace(v) = ", c->n));
    for (size_t i = 0; i < c->n; i++) TRY(text_add(t, "v == %.10g ? %zu.5 : ", c->point[i]->lag, i));
    TRY(text_add(t, "NaN\nset cbtics ("));
    for (size_t i = 0; i < c->n; i++) TRY(text_add(t, "%s'%.10g' %zu.5", i ? ", " : "", c->point[i]->lag, i));
    return text_add(t, ") scale 0 font ',6' offset -0.8,0\n");
}

static int add_lag_map(heads_plot *p, const evidence *e, const lag_curve *c, size_t metric) {
    head_map map;
    bool any;
    text title = {0};
    int code = best_lags(e, c, metric, &map, &any);
    if (!code && any) {
        code = text_add(&title, "by %s", metric == KL_EST ? "its own KL" : "its lost mass");
        if (!code) return add_map(p, title.data, map);
    }
    head_map_free(&map);
    return code;
}

static int draw_lags_of(heads_plot *p, const figure_input *in, figure_list *list, const lag_curve *c, size_t metric) {
    static const char *const notes[2] = {
        "the lag at which the head alone loses least, as if no other head lost anything", ""};
    if (metric != LOST_MASS) TRY(add_lag_map(p, in->evidence, c, metric));
    TRY(add_lag_map(p, in->evidence, c, LOST_MASS));
    if (!p->n_panels) return 0;
    text subject = {0};
    char *name = result_series_name(p->r, c->point[0]);
    p->second = name;
    int code = name ? new_figure(p, list, (const char *[]){"heads", "lag"}, 2) : ERR_DATA;
    if (!code) code = text_add(&subject, "Best lag by head, budget %s", c->point[0]->budget_asked);
    if (!code) code = add_lag_colours(p, c);
    if (!code) code = add_words(p, subject.data);
    if (!code) code = add_notes(p, notes, "the lag changes less than 5 %, or no such head");
    if (!code) code = add_panels(p);
    mem_free(name);
    text_free(&subject);
    return code;
}

static int draw_lags(const figure_input *in, figure_list *list, size_t metric) {
    heads_plot p = {.r = in->results, .column = "lag", .unit = "lag (tokens)", .lo = INFINITY, .hi = -INFINITY};
    lag_curves curves;
    int code = lag_curves_find(in->results, metric, &curves);
    const lag_curve *c = code ? NULL : middle_curve(in->results, &curves, metric);
    if (!code && !c) say("heads: no policy with %d lags at one budget, best lags skipped", LEAST_LAGS);
    if (c) code = draw_lags_of(&p, in, list, c, metric);
    heads_plot_free(&p);
    lag_curves_free(&curves);
    return code;
}

int figure_heads(const figure_input *in, figure_list *list) {
    size_t by = LOST_MASS;
    bool any = false;
    if (!in->evidence) {
        say("heads: needs the blocks beside the results, figure skipped");
        return 0;
    }
    for (size_t m = 0; m < in->n_metrics; m++) {
        if (!anatomy_tells(in->metrics[m])) continue;
        any = true;
        if (in->metrics[m] == KL_EST) by = KL_EST;
        TRY(draw_losses(in, list, in->metrics[m]));
    }
    if (any) return draw_lags(in, list, by);
    say("heads: no value of dloss_est, kl_est or lost_mass, figure skipped");
    return 0;
}
