/* Which entries stay: for every entry (across) and step (down) the share of units in which that step still sees that
 * entry, for up to four configurations of a lifetimes file, on one sequence. */
#include "analyze/canvas.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/progress.h"
#include "traces/lifetimes.h"
#include "traces/trace.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define SIDE 1.13 /* of a panel, inches */
enum { MOST_PANELS = 4, MOST_CELLS = 400, MOST_SEQUENCES = 10000 };

typedef struct panel {
    size_t config;
    size_t index; /* block of the data file */
} panel;

typedef struct retention_plot {
    lifetimes *file;
    size_t seq;
    int32_t n_tokens, n_prompt; /* n_prompt: -1 unless the trace was given */
    panel panels[MOST_PANELS];
    size_t n_panels;
    int32_t cell;   /* steps, and entries, in a cell */
    size_t n_cells; /* on a side */
    figure *figure;
} retention_plot;

/* ---- which configurations --------------------------------------------------------------------------------------- */

/* Unlike policies show the most; these four are the corners of the field. */
static const char *const wanted[MOST_PANELS] = {"streaming", "h2o", "rmm", "oracle"};

static const lifetimes_config *config_of(const retention_plot *p, size_t i) {
    return lifetimes_get_config(p->file, i);
}

static bool usable(const retention_plot *p, size_t config, const char *budget) {
    const lifetimes_config *c = config_of(p, config);
    return strcmp(c->policy, "full") != 0 && strcmp(c->budget_asked, budget) == 0 &&
           lifetimes_get_seq(p->file, config, p->seq) != NULL;
}

static bool spec_taken(const retention_plot *p, const char *spec) {
    for (size_t k = 0; k < p->n_panels; k++)
        if (strcmp(config_of(p, p->panels[k].config)->spec, spec) == 0) return true;
    return false;
}

/* The budget at which most specs can be seen side by side; the first of those that tie. */
static const char *pick_budget(const retention_plot *p) {
    const char *picked = "";
    size_t most = 0, n = lifetimes_n_configs(p->file);
    for (size_t i = 0; i < n; i++) {
        const char *budget = config_of(p, i)->budget_asked;
        size_t specs = 0, earlier = 0;
        while (earlier < i && strcmp(config_of(p, earlier)->budget_asked, budget) != 0) earlier++;
        for (size_t k = 0; earlier == i && k < n; k++) {
            bool fresh = usable(p, k, budget);
            for (size_t j = 0; j < k && fresh; j++)
                fresh = !usable(p, j, budget) || strcmp(config_of(p, j)->spec, config_of(p, k)->spec) != 0;
            specs += fresh;
        }
        if (specs > most) {
            most = specs;
            picked = budget;
        }
    }
    return picked;
}

/* Of the configurations of one spec the one in the middle: lags ascend in the file. Charged before free. */
static size_t middle_of(const retention_plot *p, size_t config, const char *budget) {
    size_t n = lifetimes_n_configs(p->file), same = 0, picked = config;
    for (int pass = 0; pass < 2; pass++) {
        size_t seen = 0;
        for (size_t i = config; i < n; i++) {
            const lifetimes_config *c = config_of(p, i);
            if (!usable(p, i, budget) || strcmp(c->spec, config_of(p, config)->spec) != 0) continue;
            if (strcmp(c->pending, config_of(p, config)->pending) != 0) continue;
            if (pass == 1 && seen == same / 2) picked = i;
            seen++;
        }
        same = seen;
    }
    return picked;
}

static void pick_panels(retention_plot *p) {
    const char *budget = pick_budget(p);
    for (size_t w = 0; w <= MOST_PANELS; w++) /* the last round takes whatever is left */
        for (size_t i = 0; i < lifetimes_n_configs(p->file) && p->n_panels < MOST_PANELS; i++) {
            const lifetimes_config *c = config_of(p, i);
            if (!usable(p, i, budget) || spec_taken(p, c->spec)) continue;
            if (w < MOST_PANELS && strcmp(c->policy, wanted[w]) != 0) continue;
            p->panels[p->n_panels++].config = middle_of(p, i, budget);
            if (w < MOST_PANELS) break;
        }
}

/* ---- the map ---------------------------------------------------------------------------------------------------- */

/* Sums over a column of cells, of intervals of steps, in constant time an interval: steps in the cells at both ends are
 * added there, whole cells between as a difference that is summed at the end. */
static void add_interval(double *sum, double *whole, int32_t cell, int32_t from, int32_t to) {
    if (from >= to) return;
    int32_t first = from / cell, last = (to - 1) / cell;
    if (first == last) {
        sum[first] += to - from;
        return;
    }
    sum[first] += (first + 1) * cell - from;
    sum[last] += to - last * cell;
    whole[first + 1] += cell;
    whole[last] -= cell;
}

/* share[row][column]: visible over possible (entry, step) pairs of the cell in all units; NaN where none is possible.
 * Scratch: sum and whole [2][cells + 1]. */
static void fill_column(const retention_plot *p, const int32_t *evict_at, size_t units, size_t column, double *scratch,
                        double *share) {
    size_t n = p->n_cells;
    double *seen = scratch, *seen_whole = seen + n + 1, *could = seen_whole + n + 1, *could_whole = could + n + 1;
    memset(scratch, 0, 4 * (n + 1) * sizeof *scratch);
    int32_t begin = (int32_t)column * p->cell, end = begin + p->cell < p->n_tokens ? begin + p->cell : p->n_tokens;
    for (int32_t i = begin; i < end; i++) {
        for (size_t u = 0; u < units; u++) {
            int32_t gone = evict_at[u * (size_t)p->n_tokens + (size_t)i];
            add_interval(seen, seen_whole, p->cell, i, gone < p->n_tokens ? gone : p->n_tokens);
        }
        add_interval(could, could_whole, p->cell, i, p->n_tokens);
    }
    double seen_running = 0, could_running = 0;
    for (size_t row = 0; row < n; row++) {
        seen_running += seen_whole[row];
        could_running += could_whole[row];
        double possible = (could[row] + could_running) * (double)units;
        share[row * n + column] = possible > 0 ? (seen[row] + seen_running) / possible : NAN;
    }
}

static int write_map(retention_plot *p, const double *share) {
    text *t = &p->figure->data;
    size_t n = p->n_cells;
    for (size_t row = 0; row < n; row++)
        for (size_t column = 0; column < n; column++) {
            double s = share[row * n + column];
            if (isnan(s)) TRY(text_add(t, "nan"));
            else TRY(text_add(t, "%.3g", s));
            TRY(text_add(t, column + 1 < n ? " " : "\n"));
        }
    return 0;
}

static int add_map(retention_plot *p, panel *at) {
    int64_t shape[3];
    TRY(lifetimes_shape(p->file, at->config, p->seq, shape));
    size_t units = (size_t)shape[0] * (size_t)shape[1], n = p->n_cells;
    int32_t *evict_at = mem_new(units * (size_t)p->n_tokens, sizeof *evict_at, "lifetimes");
    double *share = mem_new(n * n, sizeof *share, "retention map");
    double *scratch = mem_new(4 * (n + 1), sizeof *scratch, "retention map");
    int code = evict_at && share && scratch ? 0 : ERR_DATA;
    if (!code) code = lifetimes_read(p->file, at->config, p->seq, (int)shape[0], (int)shape[1], p->n_tokens, evict_at);
    for (size_t column = 0; column < n && !code; column++) fill_column(p, evict_at, units, column, scratch, share);
    if (!code)
        code = canvas_block(p->figure, config_of(p, at->config)->spec,
                            "# share visible: a row a step, a column an entry", &at->index);
    if (!code) code = write_map(p, share);
    mem_free(evict_at);
    mem_free(share);
    mem_free(scratch);
    return code;
}

/* ---- the script ------------------------------------------------------------------------------------------------- */

static int panel_title(const retention_plot *p, const panel *at, text *title) {
    const lifetimes_config *c = config_of(p, at->config);
    TRY(text_add(title, "%s", c->spec));
    if (*c->lag) TRY(text_add(title, ", lag %s", c->lag));
    return strcmp(c->pending, "free") ? 0 : text_add(title, ", free");
}

static int add_panel(retention_plot *p, size_t k, double height) {
    text *t = &p->figure->script, title = {0};
    bool two_rows = p->n_panels > 2, low = k >= 2 || !two_rows, leftmost = k % 2 == 0;
    double left = 0.42 + (SIDE + 0.17) * (double)(k % 2), bottom = low ? 0.38 : 0.38 + SIDE + 0.27;
    int code = panel_title(p, &p->panels[k], &title);
    if (!code)
        code = text_add(t,
                        "set lmargin at screen %.4f\nset rmargin at screen %.4f\n"
                        "set bmargin at screen %.4f\nset tmargin at screen %.4f\nset title ",
                        left / CANVAS_WIDTH, (left + SIDE) / CANVAS_WIDTH, bottom / height, (bottom + SIDE) / height);
    if (!code) code = canvas_quote(t, title.data, 30);
    const char *size = title.n > 22 ? "5.5" : "6.5"; /* a panel is narrower than a long name in the larger size */
    text_free(&title);
    TRY(code);
    TRY(text_add(t, " font ',%s' offset 0,-0.7\n", size));
    bool bottom_of_column = low || k + 2 >= p->n_panels;
    TRY(text_add(t, bottom_of_column ? "set format x '%%g'\nset xlabel 'entry' font ',6.5' offset 0,0.6\n"
                                     : "set format x ''\nunset xlabel\n"));
    TRY(text_add(t, leftmost ? "set format y '%%g'\n" : "set format y ''\n"));
    if (leftmost) TRY(axis_add_y_label(t, "step", (bottom + SIDE / 2) / height));
    TRY(text_add(t, "plot data index %zu matrix using (($1+0.5)*cell):(($2+0.5)*cell):3 with image",
                 p->panels[k].index));
    if (p->n_prompt > 0)
        TRY(text_add(t, ", %d with lines dashtype (4,3) linewidth 0.7 linecolor '#D55E00'", p->n_prompt));
    return text_add(t, "\nunset colorbox\nunset label\n");
}

/* Matplotlib's viridis (van der Walt and Smith, 2015) at nine points, from its dark end for "gone" to yellow. */
static const char palette[] =
    "set palette defined (0 '#440154', 1 '#472c7a', 2 '#3b518b', 3 '#2c718e', 4 '#21908d', 5 '#27ad81', 6 '#5cc863', "
    "7 '#aadc32', 8 '#fde725')\n";

static int write_script(retention_plot *p, double height) {
    text *t = &p->figure->script, title = {0};
    const lifetimes_config *first = config_of(p, p->panels[0].config);
    double step = axis_step(p->n_tokens, 2.5);
    double box_bottom = 0.38 / height, box_height = (p->n_panels > 2 ? 2 * SIDE + 0.27 : SIDE) / height;
    TRY(text_add(t, "%sset cbrange [0:1]\nset cbtics ('0' 0, '1' 1) scale 0 font ',6' offset -0.8,0\n", palette));
    TRY(text_add(t, "set colorbox user origin %.4f,%.4f size 0.022,%.4f noborder\n", 2.93 / CANVAS_WIDTH, box_bottom,
                 box_height));
    TRY(text_add(t,
                 "set cblabel 'share of units that still see the entry' font ',6.5' offset -0.8,0\n"
                 "unset grid\ncell = %d\nset xrange [0:%d]\nset yrange [%d:0]\nset xtics %g\nset ytics %g\nset "
                 "multiplot\nset label ",
                 p->cell, p->n_tokens, p->n_tokens, step, step));
    int code = text_add(&title, "Visible entries%s%s", *first->budget_asked ? ", budget " : "", first->budget_asked);
    if (!code && *lifetimes_label(p->file)) code = text_add(&title, ", %s", lifetimes_label(p->file));
    if (!code) code = canvas_quote(t, title.data, 50);
    text_free(&title);
    TRY(code);
    TRY(text_add(t, " at screen %.4f, screen %.4f left font ',7'\n", 0.42 / CANVAS_WIDTH, 1 - 0.09 / height));
    for (size_t k = 0; k < p->n_panels; k++) TRY(add_panel(p, k, height));
    return text_add(t, "unset multiplot\n");
}

/* ---- putting it together ---------------------------------------------------------------------------------------- */

/* The first sequence any configuration holds, and its length. */
static int pick_sequence(retention_plot *p, const char *path) {
    int64_t shape[3];
    for (p->seq = 0; p->seq < MOST_SEQUENCES; p->seq++)
        for (size_t i = 0; i < lifetimes_n_configs(p->file); i++) {
            if (!lifetimes_get_seq(p->file, i, p->seq)) continue;
            TRY(lifetimes_shape(p->file, i, p->seq, shape));
            p->n_tokens = (int32_t)shape[2];
            p->cell = (p->n_tokens + MOST_CELLS - 1) / MOST_CELLS;
            p->n_cells = (size_t)((p->n_tokens + p->cell - 1) / p->cell);
            return 0;
        }
    return err_set(ERR_DATA, "%s: holds no sequence", path);
}

/* The trace tells where the prompt ends; it must be the one that was replayed. */
static int read_prompt(retention_plot *p, const figure_input *in) {
    trace *t;
    if (!in->trace) return 0;
    TRY(trace_open(in->trace, &t));
    const char *hash = lifetimes_hash(p->file);
    int code = 0;
    if (*hash && strcmp(hash, trace_hash(t)) != 0)
        code = err_set(ERR_DATA, "%s: is not the trace that %s was made from", in->trace, in->lifetimes);
    else if (p->seq >= trace_n_sequences(t) || trace_get_sequence(t, p->seq)->n_tokens != p->n_tokens)
        code = err_set(ERR_DATA, "%s: has no sequence %zu of %d tokens", in->trace, p->seq, p->n_tokens);
    else p->n_prompt = trace_get_sequence(t, p->seq)->n_prompt;
    trace_close(t);
    return code;
}

static int draw(retention_plot *p, const figure_input *in, figure_list *list) {
    TRY(pick_sequence(p, in->lifetimes));
    TRY(read_prompt(p, in));
    pick_panels(p);
    if (!p->n_panels) {
        say("retention: %s holds only the full cache, figure skipped", in->lifetimes);
        return 0;
    }
    double height = 0.38 + SIDE + 0.4 + (p->n_panels > 2 ? SIDE + 0.27 : 0);
    TRY(canvas_new(list, (const char *[]){"retention"}, 1, height, &p->figure));
    p->figure->paper_only = true;
    for (size_t k = 0; k < p->n_panels; k++) TRY(add_map(p, &p->panels[k]));
    return write_script(p, height);
}

int figure_retention(const figure_input *in, figure_list *list) {
    if (!in->lifetimes) {
        say("retention: needs --lifetimes FILE.h5, figure skipped");
        return 0;
    }
    retention_plot p = {.n_prompt = -1};
    TRY(lifetimes_open(in->lifetimes, &p.file));
    int code = draw(&p, in, list);
    lifetimes_close(p.file);
    return code;
}
