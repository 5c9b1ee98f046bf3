/* What waiting is worth: a metric against the lag, for every policy with a cut-off. Colour says the budget, the line's
 * kind says whose line it is. The bounds that hold at the same budget stand beside it: the best policy without a lag
 * (a filter), the best oracle (hindsight), and the best oracle that must hold entries as long (hold=lag: the fair one).
 */
#include "analyze/canvas.h"
#include "analyze/decide.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/progress.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Inches, and the panels' edges as shares of the canvas. */
#define HEIGHT 2.6
#define BOTTOM 0.15
#define TOP 0.775
#define RECOMMENDED_LOOK "pointtype 7 pointsize 0.55"
#define KNEE_LOOK "pointtype 12 pointsize 0.95 linewidth 0.8"
enum { MOST_BUDGETS = 7, MOST_LEGEND = 24 };

/* The kinds of line, in the order in which they are drawn: the policy comes last and lies on top. A text terminal draws
 * each linetype with a letter of its own and knows neither dashes nor widths. */
typedef enum line_kind { HINDSIGHT, FILTER, FAIR_BOUND, POLICY, LINE_KINDS } line_kind;
static const char *const line_look[LINE_KINDS] = {
    [HINDSIGHT] = "linetype 3 dashtype (1.5,4) linewidth 1",
    [FILTER] = "linetype 2 dashtype (10,6) linewidth 0.8",
    [FAIR_BOUND] = "linetype 4 dashtype solid linewidth 0.5",
    [POLICY] = "linetype 1 dashtype solid linewidth 1.4",
};

static const char *const line_letters[LINE_KINDS] = {"$$", "##", "%%", "**"};

typedef struct line {
    line_kind kind;
    size_t budget; /* index in results.budgets */
    bool free;     /* panel */
    bool band;     /* some of its points have an interval */
    size_t index;  /* block of the data file */
    double end;    /* last value */
    lag_choice choice;
    knee knee;
} line;

typedef struct lag_plot {
    const figure_input *in;
    const result *series; /* one configuration of it */
    const char *name;
    size_t metric;
    figure *figure;
    line *lines;
    size_t n_lines, capacity;
    double *values; /* everything drawn, for the axis */
    size_t n_values, values_capacity;
    double lo, hi;  /* of the bands */
    bool resampled; /* the bands; else they are of the calibration alone */
    lag_curves curves;
    bool recommends, knees; /* some line has a lag to recommend, a knee */
    double last_lag;
    bool panel[2];                    /* which are drawn: charged, free */
    const result *filter, *hindsight; /* one of those drawn, for the legend; NULL if none */
    bool filter_varies, hindsight_varies;
} lag_plot;

static bool in_plot(const lag_plot *p, const result *c, size_t budget) {
    return strcmp(c->budget_asked, p->in->results->budgets[budget].asked) == 0 &&
           strcmp(c->schedule, p->series->schedule) == 0 && strcmp(c->n_prompt, p->series->n_prompt) == 0 &&
           strcmp(c->kv_bits, p->series->kv_bits) == 0 && !isnan(c->metric[p->metric]);
}

static bool of_kind(const lag_plot *p, const result *c, line_kind kind, bool is_free) {
    if (kind == HINDSIGHT) return result_is_oracle(c) && c->lag < 0;
    if (kind == FILTER) return !result_is_oracle(c) && c->lag < 0;
    if (c->lag < 0 || result_is_free(c) != is_free) return false;
    if (kind == POLICY) return result_same_series(c, p->series);
    return result_is_oracle(c) && strcmp(c->pending_bits, p->series->pending_bits) == 0;
}

/* The cheapest configuration of a kind at this budget and lag (-1: without one); NULL if there is none. */
static const result *best(const lag_plot *p, line_kind kind, size_t budget, bool is_free, double lag) {
    const results *r = p->in->results;
    const result *found = NULL;
    for (size_t i = 0; i < r->n_configs; i++) {
        const result *c = &r->configs[i];
        if (!in_plot(p, c, budget) || !of_kind(p, c, kind, is_free) || c->lag != lag) continue;
        if (!found || c->metric[p->metric] < found->metric[p->metric]) found = c;
    }
    return found;
}

/* The next larger lag that the series has at this budget, or INFINITY. */
static double next_lag(const lag_plot *p, size_t budget, bool is_free, double after) {
    const results *r = p->in->results;
    double next = INFINITY;
    for (size_t i = 0; i < r->n_configs; i++) {
        const result *c = &r->configs[i];
        if (in_plot(p, c, budget) && of_kind(p, c, POLICY, is_free) && c->lag > after) next = fmin(next, c->lag);
    }
    return next;
}

static int add_point(lag_plot *p, double lag, const result *c) {
    estimate value;
    TRY(canvas_interval(p->in, c, p->metric, &value, &p->resampled));
    TRY(mem_grow((void **)&p->values, &p->values_capacity, p->n_values + 1, sizeof *p->values, "values"));
    p->values[p->n_values++] = value.value;
    line *l = &p->lines[p->n_lines - 1];
    l->end = value.value;
    p->last_lag = fmax(p->last_lag, lag);
    if (l->kind == POLICY && !isnan(value.lo)) {
        l->band = true;
        p->lo = fmin(p->lo, value.lo);
        p->hi = fmax(p->hi, value.hi);
    }
    TRY(text_add(&p->figure->data, "%.10g %.10g %.10g", lag, lag_position(lag), value.value));
    TRY(canvas_add_interval(p->figure, value));
    return text_add(&p->figure->data, " %s%s \"%s\"\n",
                    c == l->choice.recommended ? "recommended"
                    : c == l->knee.at          ? ""
                                               : "-",
                    c == l->knee.at ? "knee" : "", strchr(c->spec, '"') ? "" : c->spec);
}

/* What is recommended, and where the knee is, on the curve of the line that was begun last. */
static int decide(lag_plot *p) {
    line *l = &p->lines[p->n_lines - 1];
    for (size_t i = 0; i < p->curves.n; i++) {
        const lag_curve *c = &p->curves.item[i];
        const result *first = c->point[0];
        if (!result_same_series(first, p->series) || result_is_free(first) != l->free ||
            strcmp(first->budget_asked, p->in->results->budgets[l->budget].asked) != 0)
            continue;
        TRY(decide_lag(p->in->bootstrap, c, p->metric, &l->choice));
        TRY(decide_knee(p->in->bootstrap, c, p->metric, &l->knee));
        p->recommends |= l->choice.recommended != NULL;
        p->knees |= l->knee.found;
    }
    return 0;
}

static int begin_line(lag_plot *p, line_kind kind, size_t budget, bool is_free) {
    static const char *const names[LINE_KINDS] = {"hindsight", "best filter", "fair bound", ""};
    TRY(mem_grow((void **)&p->lines, &p->capacity, p->n_lines + 1, sizeof *p->lines, "lines"));
    line *l = &p->lines[p->n_lines++];
    *l = (line){.kind = kind, .budget = budget, .free = is_free};
    text comment = {0}, columns = {0};
    int code = text_add(&comment, "%s, budget %s, pending %s", kind == POLICY ? p->name : names[kind],
                        p->in->results->budgets[budget].asked, is_free ? "free" : "charged");
    if (!code) code = text_add(&columns, "lag position %s lo hi mark spec", results_metrics[p->metric].column);
    if (!code) code = canvas_block(p->figure, comment.data, columns.data, &l->index);
    text_free(&comment);
    text_free(&columns);
    return code || kind != POLICY ? code : decide(p);
}

/* The policy's own curve, and the fair bound at the same lags. */
static int add_curve(lag_plot *p, line_kind kind, size_t budget, bool is_free) {
    bool begun = false;
    for (double lag = -1; isfinite(lag = next_lag(p, budget, is_free, lag));) {
        const result *c = best(p, kind, budget, is_free, lag);
        if (!c) continue;
        if (!begun) TRY(begin_line(p, kind, budget, is_free));
        begun = true;
        TRY(add_point(p, lag, c));
    }
    if (!begun && kind == POLICY)
        say("lag: %s, budget %s, pending %s: no values, curve skipped", p->name, p->in->results->budgets[budget].asked,
            is_free ? "free" : "charged");
    return 0;
}

static int add_level(lag_plot *p, line_kind kind, size_t budget, bool is_free) {
    const result *c = best(p, kind, budget, false, -1);
    if (!c) return 0;
    const result **one = kind == FILTER ? &p->filter : &p->hindsight;
    bool *varies = kind == FILTER ? &p->filter_varies : &p->hindsight_varies;
    *varies |= *one && strcmp((*one)->spec, c->spec) != 0;
    *one = c;
    TRY(begin_line(p, kind, budget, is_free));
    TRY(add_point(p, 0, c));
    return add_point(p, p->last_lag, c);
}

static int collect(lag_plot *p) {
    size_t budgets = p->in->results->n_budgets;
    for (int is_free = 0; is_free < 2; is_free++)
        for (size_t b = 0; p->panel[is_free] && b < budgets && b < MOST_BUDGETS; b++) {
            TRY(add_curve(p, POLICY, b, is_free));
            TRY(add_curve(p, FAIR_BOUND, b, is_free));
        }
    for (int is_free = 0; is_free < 2; is_free++)
        for (size_t b = 0; p->panel[is_free] && b < budgets && b < MOST_BUDGETS; b++) {
            TRY(add_level(p, FILTER, b, is_free));
            TRY(add_level(p, HINDSIGHT, b, is_free));
        }
    if (budgets > MOST_BUDGETS)
        say("lag: %s: the %d smallest of %zu budgets are drawn", p->name, MOST_BUDGETS, budgets);
    return 0;
}

/* ---- the script ------------------------------------------------------------------------------------------------- */

/* Budgets beside the right ends of the policy's curves of the last panel. */
static int add_budget_labels(lag_plot *p, axis y) {
    text *t = &p->figure->script;
    double at[MOST_BUDGETS];
    const line *labelled[MOST_BUDGETS];
    size_t n = 0;
    for (size_t i = 0; i < p->n_lines; i++)
        if (p->lines[i].kind == POLICY && p->lines[i].free == p->panel[1]) {
            labelled[n] = &p->lines[i];
            at[n++] = axis_place(y, p->lines[i].end);
        }
    TRY(canvas_spread(at, n, 0.075));
    for (size_t i = 0; i < n; i++) TRY(canvas_add_budget(t, p->in->results, labelled[i]->budget, at[i]));
    return 0;
}

static int legend_words(const lag_plot *p, line_kind kind, text *words) {
    if (kind == POLICY) return text_add(words, "%s", p->name);
    if (kind == FAIR_BOUND) return text_add(words, "oracle, hold=lag");
    bool varies = kind == FILTER ? p->filter_varies : p->hindsight_varies;
    const result *one = kind == FILTER ? p->filter : p->hindsight;
    return text_add(words, "%s: %s", kind == FILTER ? "no lag" : "hindsight", varies ? "the best" : one->spec);
}

/* Two by two above the panels, drawn by hand: a key belongs to one panel and takes its width. */
static int add_legend(lag_plot *p, double left, double right) {
    static const line_kind order[LINE_KINDS] = {POLICY, FAIR_BOUND, FILTER, HINDSIGHT};
    text *t = &p->figure->script;
    for (int k = 0; k < LINE_KINDS; k++) {
        text words = {0};
        bool drawn = false;
        for (size_t i = 0; i < p->n_lines; i++) drawn |= p->lines[i].kind == order[k];
        if (!drawn) continue;
        double x = k % 2 ? (left + right) / 2 : left, y = k / 2 ? 0.865 : 0.91;
        TRY(text_add(t,
                     "if (paper) set arrow from screen %.4f, screen %.4f to screen %.4f+0.07, screen %.4f nohead "
                     "%s linecolor '#404040'\n",
                     x, y, x, y, line_look[order[k]]));
        if (order[k] == POLICY)
            TRY(text_add(t,
                         "if (paper) set label '' at screen %.4f, screen %.4f point pointtype 7 pointsize 0.25 "
                         "linecolor '#404040'\n",
                         x + 0.035, y));
        int code = legend_words(p, order[k], &words);
        if (!code) code = text_add(t, "set label (paper ? '' : '%s ').", line_letters[order[k]]);
        if (!code) code = canvas_quote(t, words.data, MOST_LEGEND);
        if (!code)
            code = text_add(t, " at screen %.4f, screen %.4f left font ',%g'\n", x + 0.085, y, CANVAS_LABEL_FONT);
        text_free(&words);
        TRY(code);
    }
    return 0;
}

/* The policy's 90 % intervals, cut at the axis. A text terminal has no shades: the loop runs not once there. */
static int add_bands(lag_plot *p, bool is_free, const char **comma) {
    text *t = &p->figure->script;
    for (size_t i = 0; i < p->n_lines; i++) {
        const line *l = &p->lines[i];
        if (!l->band || l->free != is_free) continue;
        TRY(text_add(t,
                     "%sfor [k=1:paper] data index %zu using 'position':(cut(column('lo'))):(cut(column('hi'))) "
                     "with filledcurves fillstyle transparent solid 0.13 noborder linecolor '%s'",
                     *comma, l->index, canvas_colour(l->budget)));
        *comma = ", \\\n    ";
    }
    return 0;
}

/* Larger points over the curves' own. A text terminal has no sizes. */
static int add_marks(lag_plot *p, bool is_free) {
    static const char *const words[] = {"recommended", "knee"};
    for (size_t i = 0; i < p->n_lines; i++)
        for (int k = 0; k < 2; k++) {
            const line *l = &p->lines[i];
            if (l->free != is_free || !(k ? l->knee.at : l->choice.recommended)) continue;
            TRY(text_add(&p->figure->script,
                         ", \\\n    for [k=1:paper] data index %zu using 'position':(strstrt(strcol('mark'), '%s') ? "
                         "column('%s') : NaN) with points %s linecolor '%s'",
                         l->index, words[k], results_metrics[p->metric].column, k ? KNEE_LOOK : RECOMMENDED_LOOK,
                         canvas_colour(l->budget)));
        }
    return 0;
}

static int add_plot(lag_plot *p, bool is_free, axis y) {
    text *t = &p->figure->script;
    const char *comma = "plot ";
    TRY(text_add(t, "cut(v) = v < %.10g ? %.10g : v > %.10g ? %.10g : v\n", y.lo, y.lo, y.hi, y.hi));
    TRY(add_bands(p, is_free, &comma));
    for (line_kind kind = 0; kind < LINE_KINDS; kind++)
        for (size_t i = 0; i < p->n_lines; i++) {
            const line *l = &p->lines[i];
            if (l->kind != kind || l->free != is_free) continue;
            TRY(text_add(t, "%sdata index %zu using 'position':'%s' with %s %s linecolor '%s'", comma, l->index,
                         results_metrics[p->metric].column,
                         kind == POLICY ? "linespoints pointtype (paper ? 7 : 15) pointsize 0.25" : "lines",
                         line_look[kind], canvas_colour(l->budget)));
            comma = ", \\\n    ";
        }
    TRY(add_marks(p, is_free));
    return text_add(t, "\n");
}

static int add_panel(lag_plot *p, bool is_free, axis y, double left, double right) {
    text *t = &p->figure->script;
    TRY(text_add(t, "set lmargin at screen %.4f\nset rmargin at screen %.4f\n", left, right));
    TRY(text_add(t, "set title 'pending %s' font ',6.5' offset 0,-0.7\n", is_free ? "free" : "charged"));
    if (is_free == p->panel[1]) TRY(add_budget_labels(p, y));
    TRY(add_plot(p, is_free, y));
    TRY(axis_add(t, 'y', y, false)); /* a second panel shares the axis */
    return text_add(t, "unset label\nunset arrow\n");
}

/* Along the lower edge: what the marks are, and the bands. */
static int add_notes(lag_plot *p) {
    text *t = &p->figure->script;
    double x = 0.02;
    for (int k = 0; k < 2; k++) {
        if (!(k ? p->knees : p->recommends)) continue;
        TRY(text_add(t,
                     "if (paper) set label '' at screen %g, screen 0.04 point %s linecolor '#606060'\n"
                     "if (paper) set label '%s' at screen %g, screen 0.04 left font ',5.5' textcolor '#606060'\n",
                     x, k ? KNEE_LOOK : RECOMMENDED_LOOK, k ? "knee" : "recommended", x + 0.022));
        x += 0.25;
    }
    if (!(p->lo <= p->hi)) return 0;
    return text_add(t,
                    "if (paper) set label 'shaded: 90 %%, %s' at screen 0.985, screen 0.04 right font ',5.5' "
                    "textcolor '#606060'\n",
                    p->resampled ? "resampled" : "calibration");
}

static int write_script(lag_plot *p) {
    text *t = &p->figure->script;
    size_t left_out;
    axis y = axis_over(p->values, p->n_values, &left_out);
    y = axis_widen(y, p->lo, p->hi, 0.2);
    bool both = p->panel[0] && p->panel[1];
    double left = 0.15, right = 0.91, gap = 0.035, middle = (left + right) / 2;
    if (left_out) say("%s: %zu values are 0 and have no place on the logarithmic axis", p->figure->name, left_out);
    TRY(axis_add(t, 'y', y, true));
    TRY(axis_add_lags(t, p->last_lag, both ? 9 : 15));
    TRY(add_legend(p, left, right));
    TRY(axis_add_y_label(t, results_metrics[p->metric].axis, (BOTTOM + TOP) / 2));
    TRY(text_add(t,
                 "set tmargin at screen %g\nset bmargin at screen %g\n"
                 "set label 'lag (tokens)' at screen %g, screen 0.04 center font ',6.5'\n"
                 "set label (paper ? '' : '%s, ').",
                 TOP, BOTTOM, middle, results_metrics[p->metric].brief));
    TRY(canvas_quote_title(t, p->name, p->in->results));
    TRY(text_add(t, " at screen %g, screen 0.965 left font ',7'\n", left));
    TRY(add_notes(p));
    TRY(text_add(t, "set multiplot\n"));
    if (p->panel[0]) TRY(add_panel(p, false, y, left, both ? middle - gap / 2 : right));
    if (p->panel[1]) TRY(add_panel(p, true, y, both ? middle + gap / 2 : left, right));
    return text_add(t, "unset multiplot\n");
}

/* ---- which figures ---------------------------------------------------------------------------------------------- */

static int draw_metric(const figure_input *in, figure_list *list, const result *series, const char *name,
                       size_t metric) {
    const results *r = in->results;
    lag_plot p = {.in = in, .series = series, .name = name, .metric = metric, .lo = INFINITY, .hi = -INFINITY};
    for (size_t i = 0; i < r->n_configs; i++)
        if (result_same_series(&r->configs[i], series) && !isnan(r->configs[i].metric[metric]))
            p.panel[result_is_free(&r->configs[i])] = true;
    if (!p.panel[0] && !p.panel[1]) {
        say("lag: %s has no %s, figure skipped", name, results_metrics[metric].column);
        return 0;
    }
    int code = canvas_new(list, (const char *[]){"lag", name, results_metrics[metric].column}, 3, HEIGHT, &p.figure);
    if (!code) code = lag_curves_find(r, metric, &p.curves);
    if (!code) code = collect(&p);
    if (!code) code = write_script(&p);
    lag_curves_free(&p.curves);
    mem_free(p.lines);
    mem_free(p.values);
    return code;
}

static int draw_series(const figure_input *in, figure_list *list, const result *series) {
    const results *r = in->results;
    bool several = false;
    for (size_t i = 0; i < r->n_configs; i++)
        several |= result_same_series(&r->configs[i], series) && r->configs[i].lag != series->lag;
    char *name = result_series_name(r, series);
    if (!name) return ERR_DATA;
    int code = 0;
    if (!several) say("lag: %s has one lag only, figure skipped", name);
    for (size_t m = 0; several && m < in->n_metrics && !code; m++)
        code = draw_metric(in, list, series, name, in->metrics[m]);
    mem_free(name);
    return code;
}

int figure_lag(const figure_input *in, figure_list *list) {
    const results *r = in->results;
    bool any = false;
    for (size_t i = 0; i < r->n_configs; i++) {
        const result *c = &r->configs[i];
        bool first = c->lag >= 0 && !result_is_oracle(c);
        for (size_t k = 0; k < i && first; k++) first = !result_same_series(c, &r->configs[k]);
        if (!first) continue;
        any = true;
        TRY(draw_series(in, list, c));
    }
    if (!any) say("lag: no policy with a lag, figure skipped");
    return 0;
}
