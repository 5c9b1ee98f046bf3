/* Measuring against accumulating: at each lag the loss of policies that judge an entry by the L rows after its arrival
 * and then never again (rmm, memory=first, cutoff=lag) beside those that go on adding up. Entries of both are held for
 * the lag, so that only the evidence differs. Thin lines: policies without a lag. Points are open where the paired 90 %
 * interval of the difference to the best measuring policy at that lag holds 0. */
#include "analyze/canvas.h"
#include "analyze/decide.h"
#include "analyze/gnuplot.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/progress.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Inches, and the panel's edges as shares of the canvas. */
#define HEIGHT 2.68
#define BOTTOM 0.187
#define TOP 0.858
#define LEGEND 0.912
#define LEFT 0.15
enum { MOST_BUDGETS = 3, MOST_LINES = 16, MOST_LABEL = 23 };

typedef enum camp { MEASURING, ACCUMULATING, NO_LAG, SIDES } camp;
static const char *const side_names[SIDES] = {"measuring", "accumulating", "no lag"};
static const char *const side_look[SIDES] = {
    "dashtype solid linewidth 1.4",
    "dashtype (6,3) linewidth 1.1",
    "dashtype (2,3) linewidth 0.8",
};

typedef struct line {
    camp side;
    const lag_curve *lags;     /* NULL: no lag */
    const result *const *only; /* then its one configuration */
    size_t colour, index;
    double end;
} line;

typedef struct measuring_plot {
    const figure_input *in;
    const lag_curves *curves;
    size_t metric;
    const char *budget;
    bool free;
    figure *figure;
    line line[MOST_LINES];
    const result *level[MOST_LINES]; /* of the lines without a lag */
    size_t n_lines, n_left_out;
    double *values; /* everything drawn, for the axis */
    size_t n_values, capacity;
    double last_lag;
    bool open; /* some point is */
} measuring_plot;

/* ---- what is compared ------------------------------------------------------------------------------------------- */

static bool measures(const result *c) {
    return strncmp(c->policy, "rmm", 3) == 0 || strstr(c->spec, "memory=first") || strstr(c->spec, "cutoff=lag");
}

/* A curve of this budget whose entries are held for the lag, and for no other time. */
static bool is_held(const lag_curve *c) {
    if (result_is_oracle(c->point[0])) return false;
    for (size_t i = 0; i < c->n; i++)
        if (!*c->point[i]->hold || strtod(c->point[i]->hold, NULL) != c->point[i]->lag) return false;
    return true;
}

static bool takes_part(const measuring_plot *p, const lag_curve *c) {
    return strcmp(c->point[0]->budget_asked, p->budget) == 0 && result_is_free(c->point[0]) == p->free && is_held(c);
}

static bool has(const measuring_plot *p, camp side) {
    for (size_t i = 0; i < p->curves->n; i++)
        if (takes_part(p, &p->curves->item[i]) && measures(p->curves->item[i].point[0]) == (side == MEASURING))
            return true;
    return false;
}

/* The best measuring configuration at a lag, or NULL. */
static const result *best_measuring(const measuring_plot *p, double lag) {
    const result *best = NULL;
    for (size_t k = 0; k < p->n_lines; k++)
        for (size_t i = 0; p->line[k].side == MEASURING && i < p->line[k].lags->n; i++) {
            const result *c = p->line[k].lags->point[i];
            if (c->lag == lag && (!best || c->metric[p->metric] < best->metric[p->metric])) best = c;
        }
    return best;
}

static line *add_line(measuring_plot *p, camp side) {
    if (p->n_lines == MOST_LINES) {
        p->n_left_out++;
        return NULL;
    }
    line *l = &p->line[p->n_lines];
    *l = (line){.side = side, .colour = p->n_lines++};
    return l;
}

static void collect(measuring_plot *p) {
    const results *r = p->in->results;
    for (camp side = MEASURING; side <= ACCUMULATING; side++)
        for (size_t i = 0; i < p->curves->n; i++) {
            const lag_curve *c = &p->curves->item[i];
            if (!takes_part(p, c) || measures(c->point[0]) != (side == MEASURING)) continue;
            line *l = add_line(p, side);
            if (!l) continue;
            l->lags = c;
            p->last_lag = fmax(p->last_lag, c->point[c->n - 1]->lag);
        }
    for (size_t i = 0; i < r->n_configs; i++) {
        const result *c = &r->configs[i];
        if (c->lag >= 0 || result_is_oracle(c) || strcmp(c->budget_asked, p->budget) != 0 ||
            isnan(c->metric[p->metric]))
            continue;
        line *l = add_line(p, NO_LAG);
        if (!l) continue;
        p->level[l->colour] = c;
        l->only = &p->level[l->colour];
    }
}

/* ---- the data file ---------------------------------------------------------------------------------------------- */

static int add_point(measuring_plot *p, line *l, double lag, const result *c) {
    estimate value, behind = {NAN, NAN, NAN};
    double chance;
    bool resampled = false;
    const result *best = best_measuring(p, lag);
    TRY(canvas_interval(p->in, c, p->metric, &value, &resampled));
    if (best) TRY(bootstrap_difference(p->in->bootstrap, c, best, p->metric, &behind, &chance));
    bool open = l->side != MEASURING && behind.lo <= 0 && behind.hi >= 0;
    TRY(mem_grow((void **)&p->values, &p->capacity, p->n_values + 1, sizeof *p->values, "values"));
    p->values[p->n_values++] = l->end = value.value;
    p->open |= open && l->side == ACCUMULATING;
    TRY(text_add(&p->figure->data, "%.10g %.10g %.10g", lag, lag_position(lag), value.value));
    TRY(canvas_add_interval(p->figure, value));
    TRY(text_add(&p->figure->data, isnan(behind.value) ? " nan" : " %.10g", behind.value));
    TRY(canvas_add_interval(p->figure, behind));
    return text_add(&p->figure->data, " %d\n", open);
}

static int write_line(measuring_plot *p, line *l) {
    const result *first = l->lags ? l->lags->point[0] : l->only[0];
    char *name = result_series_name(p->in->results, first);
    text comment = {0}, columns = {0};
    int code = name ? text_add(&comment, "%s, %s", name, side_names[l->side]) : ERR_DATA;
    if (!code)
        code = text_add(&columns, "lag position %s lo hi behind behind_lo behind_hi open",
                        results_metrics[p->metric].column);
    if (!code) code = canvas_block(p->figure, comment.data, columns.data, &l->index);
    for (size_t i = 0; l->lags && i < l->lags->n && !code; i++)
        code = add_point(p, l, l->lags->point[i]->lag, l->lags->point[i]);
    if (!l->lags && !code) code = add_point(p, l, 0, first);
    if (!l->lags && !code) code = add_point(p, l, p->last_lag, first);
    text_free(&comment);
    text_free(&columns);
    mem_free(name);
    return code;
}

/* ---- the script ------------------------------------------------------------------------------------------------- */

static const char *colour_of(const line *l) {
    return l->side == NO_LAG ? "#707070" : canvas_colour(l->colour);
}

/* Without what all have in common. */
static int short_name(const measuring_plot *p, const line *l, text *out) {
    static const char *const common[] = {",hold=lag", "(hold=lag)", "hold=lag,"};
    char *name = result_series_name(p->in->results, l->lags ? l->lags->point[0] : l->only[0]);
    if (!name) return ERR_DATA;
    for (size_t i = 0; l->lags && i < 3; i++) {
        char *at = strstr(name, common[i]);
        if (at) memmove(at, at + strlen(common[i]), strlen(at + strlen(common[i])) + 1);
    }
    int code = canvas_cut_middle(out, name, MOST_LABEL);
    mem_free(name);
    return code;
}

static int add_labels(measuring_plot *p, axis y, size_t *longest) {
    text *t = &p->figure->script;
    double at[MOST_LINES];
    *longest = 0;
    for (size_t i = 0; i < p->n_lines; i++) {
        double place = axis_place(y, p->line[i].end);
        at[i] = isfinite(place) ? place : 0;
    }
    TRY(canvas_spread(at, p->n_lines, 0.062));
    for (size_t i = 0; i < p->n_lines; i++) {
        const line *l = &p->line[i];
        text name = {0};
        int code = short_name(p, l, &name);
        if (!code && name.n > *longest) *longest = name.n;
        if (!code) code = text_add(t, "set label (paper ? '' : '%c ').", 'A' + (char)l->index);
        if (!code) code = gnuplot_quote(t, name.data);
        text_free(&name);
        TRY(code);
        TRY(text_add(t, " at graph 1.06, graph %.4f left font ',%g' textcolor '%s'\n", at[i], CANVAS_LABEL_FONT,
                     colour_of(l)));
        if (y.log && l->end <= 0) continue;
        double x = l->lags ? lag_position(l->lags->point[l->lags->n - 1]->lag) : lag_position(p->last_lag) + 0.3;
        TRY(text_add(t,
                     "if (paper) set arrow from %.10g,%.10g to graph 1.05, graph %.4f nohead linewidth 0.4 "
                     "linecolor '%s'\n",
                     x, l->end, at[i], colour_of(l)));
    }
    return 0;
}

static int add_legend(measuring_plot *p) {
    text *t = &p->figure->script;
    double x = LEFT;
    for (camp side = 0; side < SIDES; side++) {
        bool drawn = false;
        for (size_t i = 0; i < p->n_lines; i++) drawn |= p->line[i].side == side;
        if (!drawn) continue;
        TRY(text_add(t,
                     "if (paper) set arrow from screen %.4f, screen %g to screen %.4f, screen %g nohead %s "
                     "linecolor '#404040'\n"
                     "if (paper) set label '%s' at screen %.4f, screen %g left font ',%g'\n",
                     x, LEGEND, x + 0.07, LEGEND, side_look[side], side_names[side], x + 0.085, LEGEND,
                     CANVAS_LABEL_FONT));
        x += 0.125 + canvas_label_width(strlen(side_names[side])) / CANVAS_WIDTH;
    }
    if (!p->open) return 0;
    return text_add(t,
                    "if (paper) set label 'open points: no different from measuring (paired, 90 %%)' at screen 0.985, "
                    "screen 0.03 right font ',5.5' textcolor '#606060'\n");
}

static int add_plot(measuring_plot *p) {
    text *t = &p->figure->script;
    const char *column = results_metrics[p->metric].column, *comma = "plot ";
    for (size_t k = p->n_lines; k-- > 0;) {
        const line *l = &p->line[k];
        TRY(text_add(t, "%sdata index %zu using (%s):'%s' with lines %s linecolor '%s'", comma, l->index,
                     l->lags ? "column('position')" : "column('lag') > 0 ? column('position') + 0.3 : -0.3", column,
                     side_look[l->side], colour_of(l)));
        comma = ", \\\n    ";
    }
    for (size_t k = 0; k < p->n_lines; k++) {
        const line *l = &p->line[k];
        if (!l->lags) continue;
        TRY(text_add(
            t,
            "%sdata index %zu using 'position':'%s' with points pointtype (paper ? 7 : %zu) pointsize 0.4 "
            "linecolor '%s'%sfor [k=1:paper] data index %zu using 'position':(column('open') == 1 ? column('%s') : "
            "NaN) with points pointtype 7 pointsize 0.22 linecolor 'white'",
            comma, l->index, column, l->index + 1, colour_of(l), comma, l->index, column));
    }
    return text_add(t, "\n");
}

static int write_script(measuring_plot *p) {
    text *t = &p->figure->script, title = {0};
    size_t left_out, longest;
    axis y = axis_over(p->values, p->n_values, &left_out);
    if (left_out) say("%s: %zu values are 0 and have no place on the logarithmic axis", p->figure->name, left_out);
    TRY(axis_add(t, 'y', y, true));
    TRY(axis_add_lags(t, p->last_lag, 12));
    TRY(add_labels(p, y, &longest));
    TRY(add_legend(p));
    TRY(axis_add_y_label(t, results_metrics[p->metric].axis, (BOTTOM + TOP) / 2));
    double right = 0.955 - canvas_label_width(longest) / CANVAS_WIDTH;
    TRY(text_add(t,
                 "set lmargin at screen %g\nset rmargin at screen %.4f\nset tmargin at screen %g\n"
                 "set bmargin at screen %g\nset label 'lag (tokens)' at screen %.4f, screen (paper ? 0.08 : 0) center "
                 "font ',6.5'\n",
                 LEFT, right, TOP, BOTTOM, (LEFT + right) / 2));
    int code = text_add(&title, "%s, budget %s%s", results_metrics[p->metric].brief, p->budget,
                        p->free ? ", pending free" : "");
    if (!code) code = text_add(t, "set label ");
    if (!code) code = canvas_quote_title(t, title.data, p->in->results);
    if (!code) code = text_add(t, " at screen %g, screen 0.965 left font ',7'\n", LEFT);
    text_free(&title);
    return code ? code : add_plot(p);
}

/* ---- which figures ---------------------------------------------------------------------------------------------- */

static int draw(const figure_input *in, figure_list *list, const lag_curves *curves, size_t metric, const char *budget,
                bool is_free) {
    measuring_plot p = {.in = in, .curves = curves, .metric = metric, .budget = budget, .free = is_free};
    const char *parts[] = {"measuring", budget, results_metrics[metric].column};
    collect(&p);
    int code = canvas_new(list, parts, 3, HEIGHT, &p.figure);
    for (size_t i = 0; i < p.n_lines && !code; i++) code = write_line(&p, &p.line[i]);
    if (!code) code = write_script(&p);
    if (p.n_left_out && !code)
        say("%s: %zu of %zu policies are left out", p.figure->name, p.n_left_out, p.n_left_out + p.n_lines);
    mem_free(p.values);
    return code;
}

/* Which of the budgets, and with which pending, hold both sides. */
typedef struct sides_found {
    const char *budget[64];
    size_t n;
    bool measuring, accumulating; /* anywhere */
} sides_found;

static sides_found find_sides(const figure_input *in, const lag_curves *curves, size_t metric, bool is_free) {
    sides_found found = {0};
    const results *r = in->results;
    for (size_t b = 0; b < r->n_budgets && found.n < 64; b++) {
        measuring_plot p = {
            .in = in, .curves = curves, .metric = metric, .budget = r->budgets[b].asked, .free = is_free};
        bool one = has(&p, MEASURING), other = has(&p, ACCUMULATING);
        found.measuring |= one;
        found.accumulating |= other;
        if (one && other) found.budget[found.n++] = p.budget;
    }
    return found;
}

static int draw_metric(const figure_input *in, figure_list *list, size_t metric, const lag_curves *curves,
                       sides_found *said) {
    bool is_free = false;
    sides_found found = find_sides(in, curves, metric, false);
    if (!found.n) {
        sides_found other = find_sides(in, curves, metric, true);
        is_free = other.n > 0;
        if (is_free) found = other;
    }
    said->measuring |= found.measuring;
    said->accumulating |= found.accumulating;
    said->n += found.n;
    size_t n = found.n < MOST_BUDGETS ? found.n : MOST_BUDGETS;
    for (size_t i = 0; i < n; i++) {
        size_t at = n > 1 ? i * (found.n - 1) / (n - 1) : 0;
        TRY(draw(in, list, curves, metric, found.budget[at], is_free));
    }
    if (n < found.n) say("measuring: %zu of %zu budgets are drawn", n, found.n);
    return 0;
}

int figure_measuring(const figure_input *in, figure_list *list) {
    sides_found said = {0};
    for (size_t m = 0; m < in->n_metrics; m++) {
        lag_curves curves;
        int code = lag_curves_find(in->results, in->metrics[m], &curves);
        if (!code) code = draw_metric(in, list, in->metrics[m], &curves, &said);
        lag_curves_free(&curves);
        TRY(code);
    }
    if (said.n) return 0;
    say("measuring: no %s, figure skipped",
        said.measuring      ? "accumulating policy held for the lag beside a measuring one (add -p 'h2o(hold=lag)' -p "
                              "'ema(hold=lag)')"
        : said.accumulating ? "measuring policy beside accumulating ones (add -p rmm)"
                            : "policy held for a lag (add -p rmm -p 'h2o(hold=lag)' -p 'ema(hold=lag)')");
    return 0;
}
