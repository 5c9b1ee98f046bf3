#include "analyze/analyze.h"
#include "analyze/bootstrap.h"
#include "analyze/evidence.h"
#include "analyze/fidelity.h"
#include "analyze/figures.h"
#include "analyze/gnuplot.h"
#include "analyze/results.h"
#include "analyze/table.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/options.h"
#include "base/outfile.h"
#include "base/progress.h"
#include "base/text.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_FORMATS = 8, MOST_KINDS = 32, HELP_WIDTH = 78 };

typedef struct analyze {
    opt_list files;
    const char *folder, *figures, *formats, *lifetimes, *trace;
    bool force, quiet, verbose;
    const gnuplot_format *format[MOST_FORMATS];
    size_t n_formats;
    const figure_kind *kind[MOST_KINDS];
    size_t n_kinds;
    results *results;
    evidence *evidence;
    bootstrap *bootstrap;
    size_t metric[RESULTS_METRICS], n_metrics;
    fidelity_list fidelity;
    figure_list list;
    text written; /* paths, one a line */
    text failure; /* the first drawing that failed; the rest goes on */
} analyze;

/* ---- the command line ------------------------------------------------------------------------------------------- */

static int read_formats(analyze *a) {
    char *words = mem_string(a->formats), *rest = words;
    int code = words ? 0 : ERR_DATA;
    for (char *word; !code && (word = strsep(&rest, ","));) {
        const gnuplot_format *f = gnuplot_formats;
        while (f->name && strcmp(f->name, word) != 0) f++;
        if (!f->name) code = err_set(ERR_USAGE, "--format: '%s' is not one of png, svg, pdf, term", word);
        for (size_t i = 0; i < a->n_formats; i++)
            if (!code && a->format[i] == f) code = err_set(ERR_USAGE, "--format: '%s' is given twice", word);
        if (!code) a->format[a->n_formats++] = f;
    }
    mem_free(words);
    return code;
}

/* "lag, budget, ..., fidelity (default: all)" in lines of at most HELP_WIDTH. */
static int figures_help(text *t) {
    size_t line = 0;
    for (const figure_kind *k = figure_kinds; k->name; k++) {
        bool first = k == figure_kinds, fits = t->n + 1 + strlen(k->name) - line < HELP_WIDTH;
        if (!fits) line = t->n + 2;
        TRY(text_add(t, "%s%s%s", first ? "" : ",", first ? "" : fits ? " " : "\n", k->name));
    }
    return text_add(t, "%s(default: all)", t->n + strlen(" (default: all)") - line < HELP_WIDTH ? " " : "\n");
}

static int unknown_figure(const char *word) {
    const char *names[MOST_KINDS];
    size_t n = 0;
    text all = {0};
    int code = 0;
    for (; figure_kinds[n].name; n++) {
        names[n] = figure_kinds[n].name;
        if (!code) code = text_add(&all, "%s%s", n ? ", " : "", names[n]);
    }
    const char *near = opt_nearest(word, names, n);
    if (!code && near) code = err_set(ERR_USAGE, "--figures: no figure '%s' (did you mean %s?)", word, near);
    else if (!code) code = err_set(ERR_USAGE, "--figures: no figure '%s' (there are %s)", word, all.data);
    text_free(&all);
    return code;
}

static int read_figures(analyze *a) {
    if (!a->figures) {
        while (figure_kinds[a->n_kinds].name) {
            a->kind[a->n_kinds] = &figure_kinds[a->n_kinds];
            a->n_kinds++;
        }
        return 0;
    }
    char *words = mem_string(a->figures), *rest = words;
    int code = words ? 0 : ERR_DATA;
    for (char *word; !code && (word = strsep(&rest, ","));) {
        const figure_kind *k = figure_kinds;
        while (k->name && strcmp(k->name, word) != 0) k++;
        if (!k->name) code = unknown_figure(word);
        for (size_t i = 0; i < a->n_kinds; i++)
            if (!code && a->kind[i] == k) code = err_set(ERR_USAGE, "--figures: '%s' is given twice", word);
        if (!code) a->kind[a->n_kinds++] = k;
    }
    mem_free(words);
    return code;
}

static int parse(analyze *a, const char *figures, int argc, char **argv) {
    const opt table[] = {
        {"output", 'o', OPT_TEXT, false, &a->folder, "DIR", "folder for the figures, made if it is not there", 0, 0},
        {"figures", 0, OPT_TEXT, true, &a->figures, "LIST", figures, 0, 0},
        {"format", 0, OPT_TEXT, true, &a->formats, "LIST", "png, svg, pdf, term (default: png)", 0, 0},
        {"lifetimes", 0, OPT_TEXT, true, &a->lifetimes, "FILE.h5", "what sim --lifetimes wrote: retention, text, lost",
         0, 0},
        {"trace", 0, OPT_TEXT, true, &a->trace, "FILE.h5", "the trace, for its text and where the prompt ends", 0, 0},
        {"force", 0, OPT_FLAG, false, &a->force, NULL, "replace files that are already there", 0, 0},
        {"quiet", 'q', OPT_FLAG, false, &a->quiet, NULL, "say nothing on stderr", 0, 0},
        {"verbose", 'v', OPT_FLAG, false, &a->verbose, NULL, "say more", 0, 0},
        {0},
    };
    return opt_parse(table, argc, argv, &a->files);
}

static int read_options(analyze *a, int argc, char **argv) {
    text figures = {0};
    a->formats = "png";
    int code = figures_help(&figures);
    if (!code) code = parse(a, figures.data, argc, argv);
    text_free(&figures);
    TRY(code);
    say_level(a->quiet ? SAY_QUIET : a->verbose ? SAY_MORE : SAY_NORMAL);
    if (!a->files.n) return err_set(ERR_USAGE, "analyze: no results file (kvlag analyze FILE.csv... -o DIR)");
    if (!a->folder || !*a->folder) return err_set(ERR_USAGE, "analyze: no folder for the figures (-o DIR)");
    TRY(read_formats(a));
    return read_figures(a);
}

/* ---- files ------------------------------------------------------------------------------------------------------ */

static int path_of(const analyze *a, const figure *f, const char *ending, text *path) {
    return text_add(path, "%s%s%s.%s", a->folder, a->folder[strlen(a->folder) - 1] == '/' ? "" : "/", f->name, ending);
}

static bool to_screen(const gnuplot_format *format) {
    return strcmp(format->name, "term") == 0;
}

static int begin_file(const analyze *a, const figure *f, const char *ending, outfile *out) {
    text path = {0};
    int code = path_of(a, f, ending, &path);
    if (!code) code = outfile_begin(out, path.data, a->force, a->files.item, (int)a->files.n);
    text_free(&path);
    return code;
}

/* Refuse what would overwrite something before anything is written. */
static int check_file(const analyze *a, const figure *f, const char *ending) {
    outfile out = {0};
    TRY(begin_file(a, f, ending, &out));
    outfile_abort(&out);
    return 0;
}

static int check_files(const analyze *a) {
    for (size_t i = 0; i < a->list.n; i++) {
        const figure *f = &a->list.item[i];
        TRY(check_file(a, f, "dat"));
        TRY(check_file(a, f, "gp"));
        for (size_t k = 0; k < a->n_formats; k++) TRY(check_file(a, f, a->format[k]->name));
    }
    return 0;
}

static int commit(analyze *a, outfile *out) {
    text path = {0};
    int code = text_add(&path, "%s\n", out->path);
    if (code) outfile_abort(out);
    else code = outfile_commit(out);
    if (!code) code = text_add(&a->written, "%s", path.data);
    text_free(&path);
    return code;
}

static int write_text(analyze *a, const figure *f, const char *ending, const text *content) {
    outfile out = {0};
    TRY(begin_file(a, f, ending, &out));
    int code = outfile_write(&out, content->data, content->n);
    if (!code) return commit(a, &out);
    outfile_abort(&out);
    return code;
}

static int show_file(const char *path) {
    FILE *f = fopen(path, "rb");
    if (!f) return err_set(ERR_DATA, "%s: %s", path, strerror(errno));
    for (int c; (c = getc(f)) != EOF;)
        if (c != '\f') putchar(c); /* gnuplot begins a page */
    fclose(f);
    return 0;
}

static int draw(analyze *a, const figure *f, const gnuplot_format *format) {
    if (f->paper_only && to_screen(format)) {
        say("%s: cannot be drawn on a text terminal, skipped", f->name);
        return 0;
    }
    outfile out = {0};
    text data = {0};
    int code = path_of(a, f, "dat", &data);
    if (!code) code = begin_file(a, f, format->name, &out);
    if (!code) {
        int drawn = gnuplot_draw(&f->script, format->name, data.data, out.temp);
        if (drawn && !a->failure.n) code = text_add(&a->failure, "%s", err_message());
        else if (drawn) say("%s", err_message());
        else if (to_screen(format)) code = show_file(out.temp);
        else code = commit(a, &out);
    }
    outfile_abort(&out);
    text_free(&data);
    return code;
}

static int write_figure(analyze *a, const figure *f) {
    TRY(write_text(a, f, "dat", &f->data));
    TRY(write_text(a, f, "gp", &f->script));
    for (size_t k = 0; k < a->n_formats; k++) TRY(draw(a, f, a->format[k]));
    return 0;
}

/* ---- the command ------------------------------------------------------------------------------------------------ */

static int read_inputs(analyze *a) {
    TRY(results_read(a->files.item, a->files.n, &a->results));
    const results *r = a->results;
    if (r->n_incomplete)
        say("%zu configurations are not there for all %zu sequences and are left out", r->n_incomplete, r->n_sequences);
    TRY(evidence_read(r, &a->evidence));
    TRY(bootstrap_new(r, a->evidence, 0, &a->bootstrap));
    TRY(fidelity_join(r, &a->fidelity));
    a->n_metrics = results_pick_metrics(r, a->metric);
    if (a->n_metrics || a->fidelity.n) return 0;
    if (!r->n_configs)
        return err_set(ERR_DATA,
                       "%s: no configuration to compare (the full cache alone is no answer, "
                       "and a configuration must be there for every sequence)",
                       a->files.item[0]);
    return err_set(ERR_DATA, "%s: none of the columns dloss_est, kl_est, out_err and lost_mass holds a value",
                   a->files.item[0]);
}

static int print_tables(const analyze *a) {
    if (a->n_metrics) TRY(table_print(a->results, a->bootstrap, a->metric, a->n_metrics));
    for (size_t i = 0; i < a->fidelity.n; i++) TRY(fidelity_print(&a->fidelity.item[i], a->results));
    return 0;
}

static int work(analyze *a, int argc, char **argv) {
    TRY(read_options(a, argc, argv));
    TRY(read_inputs(a));
    figure_input in = {
        .results = a->results,
        .evidence = a->evidence,
        .bootstrap = a->bootstrap,
        .fidelity = &a->fidelity,
        .metrics = a->metric,
        .n_metrics = a->n_metrics,
        .lifetimes = a->lifetimes,
        .trace = a->trace,
    };
    for (size_t k = 0; k < a->n_kinds; k++) TRY(a->kind[k]->collect(&in, &a->list));
    TRY(outfile_make_folder(a->folder));
    TRY(check_files(a));
    TRY(print_tables(a));
    for (size_t i = 0; i < a->list.n; i++) TRY(write_figure(a, &a->list.item[i]));
    if (a->written.n) printf("\n%s", a->written.data);
    return a->failure.n ? err_set(ERR_DATA, "%s", a->failure.data) : 0;
}

int cmd_analyze(int argc, char **argv) {
    analyze a = {0};
    int code = work(&a, argc, argv);
    if (!code && (fflush(stdout) != 0 || ferror(stdout)))
        code = err_set(ERR_DATA, "stdout: write failed: %s", strerror(errno));
    opt_list_free(&a.files);
    fidelity_free(&a.fidelity);
    bootstrap_free(a.bootstrap);
    evidence_free(a.evidence);
    results_free(a.results);
    figure_list_free(&a.list);
    text_free(&a.written);
    text_free(&a.failure);
    return code == OPT_HELPED ? 0 : code;
}
