#include "analyze/canvas.h"
#include "analyze/decide.h"
#include "analyze/gnuplot.h"
#include "base/err.h"
#include "base/mem.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NAME_MOST = 80, TITLE_MOST = 56 };

/* ---- figures and names ------------------------------------------------------------------------------------------ */

static int add_name(text *name, const char *part) {
    for (; *part && name->n < NAME_MOST; part++) {
        bool plain = isalnum((unsigned char)*part);
        if (plain) TRY(text_add_bytes(name, part, 1));
        else if (name->n && name->data[name->n - 1] != '_') TRY(text_add(name, "_"));
    }
    return 0;
}

static bool name_taken(const figure_list *list, const char *name) {
    for (size_t i = 0; i < list->n; i++)
        if (strcmp(list->item[i].name, name) == 0) return true;
    return false;
}

static int make_name(const figure_list *list, const char *const *parts, size_t n, text *name) {
    for (size_t i = 0; i < n; i++) {
        if (i) TRY(add_name(name, "_"));
        TRY(add_name(name, parts[i]));
    }
    size_t stem = name->n;
    for (int again = 2; name_taken(list, name->data); again++) {
        name->n = stem;
        TRY(text_add(name, "_%d", again));
    }
    return 0;
}

int canvas_new(figure_list *list, const char *const *parts, size_t n, double height, figure **out) {
    return canvas_new_sized(list, parts, n, CANVAS_WIDTH, height, out);
}

int canvas_new_sized(figure_list *list, const char *const *parts, size_t n, double width, double height, figure **out) {
    text name = {0};
    int code = make_name(list, parts, n, &name);
    if (!code) code = mem_grow((void **)&list->item, &list->capacity, list->n + 1, sizeof *list->item, "figures");
    if (code) {
        text_free(&name);
        return code;
    }
    figure *f = *out = &list->item[list->n++];
    *f = (figure){.name = name.data};
    TRY(gnuplot_header(&f->script, f->name, width, height));
    return text_add(&f->script, "set border 3 linecolor '#404040' linewidth 0.5\n"
                                "set tics nomirror out scale 0.4 font ',6' textcolor '#202020'\n"
                                "set xtics offset 0,0.3\nset ytics offset 0.4,0\n"
                                "set grid ytics linetype 1 linecolor '#e4e4e4' linewidth 0.4\n"
                                "set key off\nif (!paper) unset grid\n");
}

int canvas_block(figure *f, const char *comment, const char *columns, size_t *index) {
    *index = f->n_blocks++;
    if (*index) TRY(text_add(&f->data, "\n\n"));
    TRY(text_add(&f->data, "# "));
    for (; *comment; comment++) TRY(text_add(&f->data, "%c", iscntrl((unsigned char)*comment) ? '?' : *comment));
    return text_add(&f->data, "\n%s\n", columns);
}

static bool is_inside_character(char c) {
    return (c & 0xc0) == 0x80;
}

int canvas_cut(text *t, const char *word, size_t most) {
    size_t n = 0, cut = 0;
    for (size_t at = 0; word[at]; at++) {
        if (is_inside_character(word[at])) continue;
        if (++n == most) cut = at;
    }
    return n <= most ? text_add(t, "%s", word) : text_add(t, "%.*s…", (int)cut, word);
}

int canvas_cut_middle(text *t, const char *word, size_t most) {
    size_t n = 0, head = 0, tail = 0, keep = most * 3 / 8;
    for (size_t at = 0; word[at]; at++) n += !is_inside_character(word[at]);
    if (n <= most) return text_add(t, "%s", word);
    for (size_t at = 0, k = 0; word[at]; at++) {
        if (is_inside_character(word[at])) continue;
        if (k == keep) head = at;
        if (k++ == n - (most - 1 - keep)) tail = at;
    }
    return text_add(t, "%.*s…%s", (int)head, word, word + tail);
}

int canvas_quote(text *t, const char *word, size_t most) {
    text shorter = {0};
    int code = canvas_cut(&shorter, word, most);
    if (!code) code = gnuplot_quote(t, shorter.data);
    text_free(&shorter);
    return code;
}

double canvas_label_width(size_t n) {
    return 0.62 * CANVAS_LABEL_FONT / 72 * (double)n;
}

int canvas_quote_title(text *t, const char *subject, const results *r) {
    text title = {0};
    int code = r->n_sequences == 1 ? text_add(&title, "%s on %s", subject, r->rows[0].trace)
                                   : text_add(&title, "%s, mean of %zu sequences", subject, r->n_sequences);
    if (!code) code = canvas_quote(t, title.data, TITLE_MOST);
    text_free(&title);
    return code;
}

int canvas_interval(const figure_input *in, const result *c, size_t metric, estimate *out, bool *resampled) {
    TRY(bootstrap_estimate(in->bootstrap, c, metric, out));
    if (isnan(out->lo)) *out = (estimate){c->metric[metric], c->lo[metric], c->hi[metric]};
    else *resampled = true;
    return 0;
}

int canvas_add_interval(figure *f, estimate e) {
    return isnan(e.lo) ? text_add(&f->data, " nan nan") : text_add(&f->data, " %.10g %.10g", e.lo, e.hi);
}

/* ---- axes ------------------------------------------------------------------------------------------------------- */

axis axis_over(const double *values, size_t n, size_t *left_out) {
    double lo = INFINITY, hi = -INFINITY, least_positive = INFINITY;
    size_t zeros = 0;
    for (size_t i = 0; i < n; i++) {
        if (isnan(values[i])) continue;
        lo = fmin(lo, values[i]);
        hi = fmax(hi, values[i]);
        if (values[i] > 0) least_positive = fmin(least_positive, values[i]);
        zeros += values[i] == 0;
    }
    *left_out = 0;
    if (lo >= 0 && hi > 0 && hi / least_positive >= 10) {
        double pad = pow(hi / least_positive, 0.06);
        *left_out = zeros;
        return (axis){.lo = least_positive / pad, .hi = hi * pad, .log = true};
    }
    if (lo < 0 && fmax(hi, -lo) >= 10 * AXIS_LINEAR_TO) {
        axis a = {.lo = lo, .hi = fmax(hi, 0), .linear_to = AXIS_LINEAR_TO};
        return (axis){.lo = axis_value(a, -0.06), .hi = axis_value(a, 1.06), .linear_to = AXIS_LINEAR_TO};
    }
    if (!(hi > lo)) { /* one value, or none */
        double spread = isfinite(hi) && hi != 0 ? fabs(hi) / 2 : 1;
        return (axis){.lo = isfinite(lo) ? lo - spread : -1, .hi = isfinite(hi) ? hi + spread : 1};
    }
    if (lo >= 0 && lo < 0.4 * hi) return (axis){.lo = 0, .hi = hi * 1.06};
    return (axis){.lo = lo - 0.06 * (hi - lo), .hi = hi + 0.06 * (hi - lo)};
}

/* Along the paper, in any unit. */
static double scaled(axis a, double value) {
    return a.log ? log(value) : a.linear_to > 0 ? asinh(value / a.linear_to) : value;
}

double axis_place(axis a, double value) {
    return (scaled(a, value) - scaled(a, a.lo)) / (scaled(a, a.hi) - scaled(a, a.lo));
}

double axis_value(axis a, double place) {
    double at = scaled(a, a.lo) + place * (scaled(a, a.hi) - scaled(a, a.lo));
    return a.log ? exp(at) : a.linear_to > 0 ? a.linear_to * sinh(at) : at;
}

/* How far beyond the end the value lies, cut to 0..most. On a logarithmic axis 0 and less lie beyond any end. */
static double excess(double beyond, double most) {
    return beyond >= most || isnan(beyond) ? most : fmax(beyond, 0);
}

axis axis_widen(axis a, double lo, double hi, double most) {
    if (!(lo <= hi)) return a;
    double below = excess(-axis_place(a, lo), most), above = excess(axis_place(a, hi) - 1, most);
    axis wider = a;
    if (below > 0) wider.lo = axis_value(a, -below);
    if (above > 0) wider.hi = axis_value(a, 1 + above);
    return wider;
}

/* "1e-4", not "0.0001", which the y axis has no room for. */
static void tick_number(char out[32], double value) {
    double e = floor(log10(fabs(value)) + 1e-9);
    if (value != 0 && e < -3) snprintf(out, 32, "%ge%.0f", value / pow(10, e), e);
    else snprintf(out, 32, "%g", value);
}

static int add_tick(text *t, double value, bool number, bool minor) {
    const char *comma = t->data[t->n - 1] == '(' ? "" : ", ";
    char label[32] = "";
    if (number && !minor) tick_number(label, value);
    return text_add(t, "%s'%s' %.10g%s", comma, label, value, minor ? " 1" : "");
}

/* Numbers at 1, 2 and 5 of each decade; where that is too many, at the decades alone; where too few, at more. */
static int log_ticks(text *t, axis a, bool numbers) {
    double decades = log10(a.hi / a.lo);
    int every = decades > 8 ? (int)(decades / 4) : 1, first = (int)floor(log10(a.lo));
    for (int e = first; e <= (int)ceil(log10(a.hi)); e += every)
        for (int k = 1; k <= 9; k++) {
            double value = k * pow(10, e);
            bool more = decades < 0.8 && (k == 3 || k == 4 || k == 7);
            bool minor = k != 1 && !more && (decades > 1.7 || (k != 2 && k != 5));
            if (value >= a.lo * (1 - 1e-9) && value <= a.hi * (1 + 1e-9)) TRY(add_tick(t, value, numbers, minor));
        }
    return 0;
}

double axis_step(double span, double n) {
    double rough = span / n, unit = pow(10, floor(log10(rough)));
    return unit * (rough / unit > 5 ? 10 : rough / unit > 2 ? 5 : rough / unit > 1 ? 2 : 1);
}

static int linear_ticks(text *t, axis a, bool numbers) {
    double step = axis_step(a.hi - a.lo, 5);
    /* Adding 0 makes a negative zero positive. */
    for (double k = ceil(a.lo / step - 1e-9); k * step <= a.hi + 1e-9 * step; k++)
        TRY(add_tick(t, k * step + 0.0, numbers, false));
    return 0;
}

/* Numbers at 0 and the decades away from it, those below linear_to left out. */
static int symmetric_ticks(text *t, axis a, bool numbers) {
    TRY(add_tick(t, 0, numbers, false));
    for (int sign = -1; sign <= 1; sign += 2)
        for (int e = (int)ceil(log10(a.linear_to)); e <= (int)ceil(log10(fmax(a.hi, -a.lo))); e++)
            for (int k = 1; k <= 9; k++) {
                double value = sign * k * pow(10, e);
                if (value >= a.lo && value <= a.hi) TRY(add_tick(t, value, numbers, k > 1));
            }
    return 0;
}

int axis_add(text *t, char which, axis a, bool numbers) {
    TRY(text_add(t, "unset nonlinear %c\n%s logscale %c\n", which, a.log ? "set" : "unset", which));
    if (a.linear_to > 0)
        TRY(text_add(t, "set nonlinear %c via asinh(%c / %g) inverse %g * sinh(%c)\n", which, which, a.linear_to,
                     a.linear_to, which));
    TRY(text_add(t, "set %crange [%.10g:%.10g]\nset %ctics (", which, a.lo, a.hi, which));
    TRY(a.log             ? log_ticks(t, a, numbers)
        : a.linear_to > 0 ? symmetric_ticks(t, a, numbers)
                          : linear_ticks(t, a, numbers));
    return text_add(t, ")\n");
}

int axis_add_lags(text *t, double last_lag, int most) {
    double end = lag_position(last_lag);
    int step = most ? (int)ceil((end + 1) / most) : 1;
    TRY(text_add(t, "set xrange [-0.3:%g]\nset xtics ('%s' 0", end + 0.3, most ? "0" : ""));
    for (int k = 1; k <= end + 1e-9; k += step)
        TRY(most ? text_add(t, ", '%.0f' %d", exp2(k - 1), k) : text_add(t, ", '' %d", k));
    return text_add(t, ")\n");
}

int axis_add_y_label(text *t, const char *words, double middle) {
    TRY(text_add(t, "if (paper) set label "));
    TRY(gnuplot_quote(t, words));
    return text_add(t, " at screen 0.035, screen %.4f center rotate by 90 font ',6'\n", middle);
}

/* ---- labels and colours ----------------------------------------------------------------------------------------- */

typedef struct label_block {
    double middle;
    size_t first, n; /* in the sorted order */
} label_block;

typedef struct label_place {
    double at;
    size_t label;
} label_place;

static int compare_place(const void *pa, const void *pb) {
    const label_place *a = pa, *b = pb;
    if (a->at != b->at) return a->at < b->at ? -1 : 1;
    return (a->label > b->label) - (a->label < b->label);
}

static double keep_inside(double middle, double half) {
    if (middle + half > 1) middle = 1 - half;
    return middle - half < 0 ? half : middle;
}

static void spread_sorted(const label_place *sorted, size_t n, double gap, label_block *block, double *places) {
    size_t blocks = 0;
    for (size_t i = 0; i < n; i++) {
        block[blocks++] = (label_block){keep_inside(sorted[i].at, 0), i, 1};
        for (; blocks > 1; blocks--) {
            label_block *a = &block[blocks - 2], *b = &block[blocks - 1];
            size_t both = a->n + b->n;
            if (b->middle - a->middle >= gap * (double)both / 2 - 1e-12) break;
            double sum = 0;
            for (size_t k = a->first; k < a->first + both; k++) sum += sorted[k].at;
            a->middle = keep_inside(sum / (double)both, gap * (double)(both - 1) / 2);
            a->n = both;
        }
    }
    for (size_t b = 0; b < blocks; b++)
        for (size_t k = 0; k < block[b].n; k++)
            places[sorted[block[b].first + k].label] =
                block[b].middle + gap * ((double)k - (double)(block[b].n - 1) / 2);
}

int canvas_spread(double *places, size_t n, double gap) {
    if (n == 0) return 0;
    label_place *sorted = mem_new(n, sizeof *sorted, "labels");
    label_block *block = mem_new(n, sizeof *block, "labels");
    if (sorted && block) {
        for (size_t i = 0; i < n; i++) sorted[i] = (label_place){places[i], i};
        qsort(sorted, n, sizeof *sorted, compare_place);
        spread_sorted(sorted, n, gap, block, places);
    }
    int code = sorted && block ? 0 : ERR_DATA;
    mem_free(sorted);
    mem_free(block);
    return code;
}

int canvas_add_budget(text *t, const results *r, size_t budget, double at) {
    TRY(text_add(t, "set label "));
    TRY(canvas_quote(t, r->budgets[budget].asked, 8));
    return text_add(t, " at graph 1.02, graph %.4f left front font ',%g' textcolor '%s'\n", at, CANVAS_LABEL_FONT,
                    canvas_colour(budget));
}

const char *canvas_colour(size_t i) {
    static const char *const colours[CANVAS_COLOURS] = {"#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00",
                                                        "#56B4E9", "#000000", "#882255", "#999933"};
    return colours[i % CANVAS_COLOURS];
}
