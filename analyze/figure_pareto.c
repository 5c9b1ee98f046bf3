/* Loss against memory, and against modelled decode time: every configuration that a server could run, and the front of
 * those that no other beats in both. Numbers along the front refer to the list below the panel; the shape of a point
 * says its precision. */
#include "analyze/canvas.h"
#include "analyze/memory.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/progress.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Inches: the panel's edges from the canvas's upper and lower end, and a row of the list below it. */
#define PANEL 1.85
#define ABOVE 0.22
#define AXIS 0.42
#define ROW 0.098
#define LEFT 0.15
#define RIGHT 0.97
#define LIST_FONT 5.5
enum { MOST_LISTED = 20, MOST_WORDS = 37, SHAPES = 4 };

static const int shapes[SHAPES] = {7, 5, 9, 13}; /* 16 bits, 8, 4, others: gnuplot's filled ones */
static const char *const shape_names[SHAPES] = {"16 bits", "8 bits", "4 bits", "mixed"};

typedef struct pareto_plot {
    const figure_input *in;
    size_t metric;
    const char *axis_words;
    double unit; /* of the x axis */
    figure *figure;
    double *cost; /* [n_configs], NaN: takes no part */
    double *x, *y;
    size_t n;
    const result **front;
    size_t n_front;
    size_t index[SHAPES + 1]; /* blocks: all by shape; the front last */
    bool shape[SHAPES];
    double lo, hi, height;
    bool resampled, bars;
} pareto_plot;

static size_t shape_of(const result *c) {
    if (strcmp(c->kv_bits, c->pending_bits) != 0) return 3;
    return strcmp(c->kv_bits, "16") == 0 ? 0 : strcmp(c->kv_bits, "8") == 0 ? 1 : strcmp(c->kv_bits, "4") == 0 ? 2 : 3;
}

/* ---- the data file ---------------------------------------------------------------------------------------------- */

/* "25%: h2o(hold=lag), lag 16" */
static int add_words(const pareto_plot *p, const result *c, text *words) {
    char *name = result_series_name(p->in->results, c);
    int code = name ? 0 : ERR_DATA;
    if (!code && *c->budget_asked) code = text_add(words, "%s: ", c->budget_asked);
    if (!code) code = text_add(words, "%s", name);
    if (!code && c->lag >= 0) code = text_add(words, ", lag %g", c->lag);
    mem_free(name);
    return code;
}

static int add_row(pareto_plot *p, const result *c, size_t number) {
    text *t = &p->figure->data, words = {0};
    estimate e;
    TRY(canvas_interval(p->in, c, p->metric, &e, &p->resampled));
    if (number && !isnan(e.lo)) {
        p->bars = true;
        p->lo = fmin(p->lo, e.lo);
        p->hi = fmax(p->hi, e.hi);
    }
    if (number) TRY(text_add(t, "%zu ", number));
    TRY(text_add(t, "%.10g %.10g", p->cost[c - p->in->results->configs], e.value));
    TRY(canvas_add_interval(p->figure, e));
    int code = add_words(p, c, &words);
    if (!code)
        code = text_add(t, " %s %s %d \"%s\"\n", c->kv_bits, c->pending_bits, shapes[shape_of(c)],
                        strchr(words.data, '"') ? "" : words.data);
    text_free(&words);
    return code;
}

static int write_data(pareto_plot *p) {
    const results *r = p->in->results;
    text columns = {0};
    const char *metric = results_metrics[p->metric].column;
    for (size_t s = 0; s < SHAPES; s++) {
        bool begun = false;
        for (size_t i = 0; i < r->n_configs; i++) {
            const result *c = &r->configs[i];
            if (isnan(p->cost[i]) || isnan(c->metric[p->metric]) || shape_of(c) != s) continue;
            int code = begun ? 0 : text_add(&columns, "cost %s lo hi kv_bits pending_bits shape name", metric);
            if (!code && !begun) code = canvas_block(p->figure, shape_names[s], columns.data, &p->index[s]);
            text_free(&columns);
            columns = (text){0};
            begun = p->shape[s] = true;
            if (!code) code = add_row(p, c, 0);
            TRY(code);
        }
    }
    int code = text_add(&columns, "number cost %s lo hi kv_bits pending_bits shape name", metric);
    if (!code) code = canvas_block(p->figure, "front", columns.data, &p->index[SHAPES]);
    text_free(&columns);
    for (size_t i = 0; i < p->n_front && !code; i++) code = add_row(p, p->front[i], i + 1);
    return code;
}

/* ---- the script ------------------------------------------------------------------------------------------------- */

static double x_of(const pareto_plot *p, const result *c) {
    return p->cost[c - p->in->results->configs] / p->unit;
}

static axis x_axis(const pareto_plot *p) {
    size_t left_out;
    double lo = INFINITY, hi = -INFINITY;
    for (size_t i = 0; i < p->n; i++) {
        lo = fmin(lo, p->x[i]);
        hi = fmax(hi, p->x[i]);
    }
    if (hi < 4 * lo) return axis_over(p->x, p->n, &left_out);
    double pad = pow(hi / lo, 0.06);
    return (axis){.lo = lo / pad, .hi = hi * pad, .log = true};
}

/* Below and to the left of a point on the front there is no other. */
static int add_numbers(pareto_plot *p) {
    text *t = &p->figure->script;
    for (size_t i = 0; i < p->n_front && i < MOST_LISTED; i++)
        TRY(text_add(t, "set label '%zu' at %.10g,%.10g right offset -0.35,-0.4 front font ',%g' textcolor '#0072B2'\n",
                     i + 1, x_of(p, p->front[i]), p->front[i]->metric[p->metric], LIST_FONT));
    return 0;
}

/* Below the panel in two columns, read downwards. */
static int add_list(pareto_plot *p) {
    text *t = &p->figure->script;
    size_t n = p->n_front < MOST_LISTED ? p->n_front : MOST_LISTED, rows = (n + 1) / 2;
    for (size_t i = 0; i < n; i++) {
        text words = {0};
        double x = i < rows ? 0.03 : 0.515, y = (0.06 + ROW * (double)(rows - 1 - i % rows)) / p->height;
        int code = add_words(p, p->front[i], &words);
        if (!code)
            code = text_add(
                t, "set label '%zu' at screen %.4f, screen %.4f right font ',%g' textcolor '#0072B2'\nset label ",
                i + 1, x + 0.018, y, LIST_FONT);
        if (!code) code = canvas_quote(t, words.data, MOST_WORDS);
        if (!code) code = text_add(t, " at screen %.4f, screen %.4f left font ',%g'\n", x + 0.033, y, LIST_FONT);
        text_free(&words);
        TRY(code);
    }
    return 0;
}

/* What the shapes are where there are several, and the bars. */
static int add_notes(pareto_plot *p) {
    text *t = &p->figure->script;
    size_t n = 0;
    for (size_t s = 0; s < SHAPES; s++) n += p->shape[s];
    double x = RIGHT - 0.02, y = (p->height - ABOVE - 0.06) / p->height, row = 0.1 / p->height;
    for (size_t s = 0; s < SHAPES && n > 1; s++) {
        if (!p->shape[s]) continue;
        TRY(text_add(t,
                     "set label '%s' at screen %.4f, screen %.4f right font ',%g'\n"
                     "set label '' at screen %.4f, screen %.4f point pointtype %d pointsize 0.4 linecolor '#808080'\n",
                     shape_names[s], x, y, LIST_FONT, x - 0.11, y, shapes[s]));
        y -= row;
    }
    if (!p->bars) return 0;
    return text_add(t, "set label 'bars: 90 %%, %s' at graph 0.02, graph 0.05 left font ',%g' textcolor '#606060'\n",
                    p->resampled ? "resampled" : "calibration", LIST_FONT);
}

static int add_plot(pareto_plot *p, axis y) {
    text *t = &p->figure->script;
    const char *metric = results_metrics[p->metric].column, *comma = "plot ";
    TRY(text_add(t, "cut(v) = v < %.10g ? %.10g : v > %.10g ? %.10g : v\n", y.lo, y.lo, y.hi, y.hi));
    for (size_t s = 0; s < SHAPES; s++) {
        if (!p->shape[s]) continue;
        TRY(text_add(t,
                     "%sdata index %zu using (column('cost') / %g):'%s' with points pointtype %d pointsize 0.28 "
                     "linecolor '#b0b0b0'",
                     comma, p->index[s], p->unit, metric, shapes[s]));
        comma = ", \\\n    ";
    }
    size_t front = p->index[SHAPES];
    if (p->bars)
        TRY(text_add(t,
                     "%sdata index %zu using (column('cost') / %g):(cut(column('lo'))):(0):(cut(column('hi')) - "
                     "cut(column('lo'))) with vectors nohead linewidth 0.5 linecolor '#0072B2'",
                     comma, front, p->unit));
    return text_add(
        t,
        "%sdata index %zu using (column('cost') / %g):'%s' with lines linewidth 1 linecolor '#0072B2'"
        "%sdata index %zu using (column('cost') / %g):'%s':'shape' with points pointtype variable pointsize 0.42 "
        "linecolor '#0072B2'\n",
        comma, front, p->unit, metric, comma, front, p->unit, metric);
}

static int write_script(pareto_plot *p) {
    text *t = &p->figure->script;
    size_t left_out;
    axis y = axis_over(p->y, p->n, &left_out);
    if (left_out) say("%s: %zu values are 0 and have no place on the logarithmic axis", p->figure->name, left_out);
    y = axis_widen(y, p->lo, p->hi, 0.15);
    double bottom = (p->height - ABOVE - PANEL) / p->height, top = 1 - ABOVE / p->height;
    TRY(axis_add(t, 'y', y, true));
    TRY(axis_add(t, 'x', x_axis(p), true));
    TRY(axis_add_y_label(t, results_metrics[p->metric].axis, (bottom + top) / 2));
    TRY(text_add(
        t,
        "set lmargin at screen %g\nset rmargin at screen %g\nset bmargin at screen %.4f\nset tmargin at screen %.4f\n"
        "set label '%s' at screen %g, screen %.4f center font ',6.5'\nset label ",
        LEFT, RIGHT, bottom, top, p->axis_words, (LEFT + RIGHT) / 2, bottom - 0.27 / p->height));
    TRY(canvas_quote_title(t, results_metrics[p->metric].brief, p->in->results));
    TRY(text_add(t, " at screen %g, screen %.4f left font ',7'\n", LEFT, 1 - 0.09 / p->height));
    TRY(add_numbers(p));
    TRY(add_list(p));
    TRY(add_notes(p));
    return add_plot(p, y);
}

/* ---- which figures ---------------------------------------------------------------------------------------------- */

static int collect(pareto_plot *p) {
    const results *r = p->in->results;
    for (size_t i = 0; i < r->n_configs; i++) {
        double value = r->configs[i].metric[p->metric];
        if (isnan(p->cost[i]) || isnan(value)) continue;
        p->x[p->n] = p->cost[i] / p->unit;
        p->y[p->n++] = value;
    }
    return memory_pareto(r, p->cost, p->metric, &p->front, &p->n_front);
}

static int draw(pareto_plot *p, figure_list *list, const char *what) {
    const char *parts[] = {"pareto", what, results_metrics[p->metric].column};
    TRY(collect(p));
    if (!p->n) return 0;
    size_t listed = p->n_front < MOST_LISTED ? p->n_front : MOST_LISTED;
    p->height = ABOVE + PANEL + AXIS + ROW * (double)((listed + 1) / 2);
    TRY(canvas_new(list, parts, 3, p->height, &p->figure));
    p->figure->paper_only = true;
    if (listed < p->n_front)
        say("%s: %zu of %zu configurations on the front are named", p->figure->name, listed, p->n_front);
    TRY(write_data(p));
    return write_script(p);
}

/* Fill in what the configurations cost; false where they do not differ in it. */
static bool find_costs(pareto_plot *p, bool time) {
    const results *r = p->in->results;
    memory_measure measure = memory_pick_measure(r);
    double lo = INFINITY, hi = -INFINITY;
    for (size_t i = 0; i < r->n_configs; i++) {
        const result *c = &r->configs[i];
        bool real = memory_is_real(c) && !isnan(c->metric[p->metric]);
        p->cost[i] = !real ? NAN : time ? c->cost[COST_DECODE_US] : memory_of(c, measure);
        lo = fmin(lo, p->cost[i]);
        hi = fmax(hi, p->cost[i]);
    }
    p->axis_words = memory_axis(measure, hi, &p->unit);
    if (time) {
        p->axis_words = "modelled decode time (µs a step)";
        p->unit = 1;
    }
    return hi > lo;
}

static int draw_metric(const figure_input *in, figure_list *list, size_t metric, bool time, bool *drawn) {
    const results *r = in->results;
    pareto_plot p = {.in = in, .metric = metric, .lo = INFINITY, .hi = -INFINITY};
    p.cost = mem_new(r->n_configs + 1, sizeof *p.cost, "costs");
    p.x = mem_new(r->n_configs + 1, sizeof *p.x, "costs");
    p.y = mem_new(r->n_configs + 1, sizeof *p.y, "losses");
    int code = p.cost && p.x && p.y ? 0 : ERR_DATA;
    if (!code && find_costs(&p, time)) {
        *drawn = true;
        code = draw(&p, list, time ? "decode_us" : "memory");
    }
    mem_free(p.cost);
    mem_free(p.x);
    mem_free(p.y);
    mem_free(p.front);
    return code;
}

int figure_pareto(const figure_input *in, figure_list *list) {
    bool drawn = false;
    for (size_t m = 0; m < in->n_metrics; m++) {
        TRY(draw_metric(in, list, in->metrics[m], false, &drawn));
        TRY(draw_metric(in, list, in->metrics[m], true, &drawn));
    }
    if (!drawn) say("pareto: all configurations need the same memory, figure skipped");
    return 0;
}
