#include "analyze/analyze.h"
#include "analyze/advice.h"
#include "analyze/bootstrap.h"
#include "analyze/evidence.h"
#include "analyze/fidelity.h"
#include "analyze/figures.h"
#include "analyze/gnuplot.h"
#include "analyze/report_content.h"
#include "analyze/results.h"
#include "analyze/table.h"
#include "analyze/written.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/options.h"
#include "base/outfile.h"
#include "base/progress.h"
#include "base/prose.h"
#include "base/text.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_FORMATS = 8, MOST_KINDS = 32 };

typedef struct analyze {
    opt_list files;
    const char *folder, *figures, *formats, *lifetimes, *trace, *report, *max_loss_text;
    bool force, quiet, verbose, json;
    double max_loss; /* NaN: not asked */
    char *command;
    const gnuplot_format *format[MOST_FORMATS];
    size_t n_formats;
    const figure_kind *kind[MOST_KINDS];
    size_t n_kinds;
    results *results;
    evidence *evidence;
    bootstrap *bootstrap;
    size_t metric[RESULTS_METRICS], n_metrics;
    fidelity_list fidelity;
    advice_list advice;
    provenance sources;
    figure_list list;
    report_picture *picture; /* [list.n] */
    written written;
    text failure; /* the first drawing that failed; the rest goes on */
} analyze;

static bool reports(const analyze *a) {
    return strcmp(a->report, "yes") == 0;
}

/* ---- the command line ------------------------------------------------------------------------------------------- */

/* The parser has seen to it that the words are known. */
static int read_formats(analyze *a) {
    char *words = mem_string(a->formats), *rest = words;
    int code = words ? 0 : ERR_DATA;
    for (char *word; !code && (word = strsep(&rest, ","));) {
        const gnuplot_format *f = gnuplot_formats;
        while (f[1].name && strcmp(f->name, word) != 0) f++;
        for (size_t i = 0; i < a->n_formats; i++)
            if (!code && a->format[i] == f) code = err_set(ERR_USAGE, "--format: '%s' is given twice", word);
        if (!code) a->format[a->n_formats++] = f;
    }
    mem_free(words);
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
        while (k[1].name && strcmp(k->name, word) != 0) k++;
        for (size_t i = 0; i < a->n_kinds; i++)
            if (!code && a->kind[i] == k) code = err_set(ERR_USAGE, "--figures: '%s' is given twice", word);
        if (!code) a->kind[a->n_kinds++] = k;
    }
    mem_free(words);
    return code;
}

static int list_names(text *formats, text *figures) {
    for (const gnuplot_format *f = gnuplot_formats; f->name; f++)
        TRY(text_add(formats, "%s%s", f == gnuplot_formats ? "" : ",", f->name));
    for (const figure_kind *k = figure_kinds; k->name; k++)
        TRY(text_add(figures, "%s%s", k == figure_kinds ? "" : ",", k->name));
    return 0;
}

static int parse(analyze *a, const char *formats, const char *figures, int argc, char **argv) {
    const opt table[] = {
        {"output", 'o', OPT_FILE, false, &a->folder, "DIR",
         "folder for the report and the figures, made if it is not there", 0, 0},
        {"figures", 0, OPT_WORDS, true, &a->figures, figures, "which figures (default: all)", 0, 0},
        {"format", 0, OPT_WORDS, true, &a->formats, formats, "kinds of pictures (default: png)", 0, 0},
        {"lifetimes", 0, OPT_FILE, true, &a->lifetimes, "FILE.h5", "what sim --lifetimes wrote: retention, text, lost",
         0, 0},
        {"trace", 0, OPT_FILE, true, &a->trace, "FILE.h5", "the trace, for its text and where the prompt ends", 0, 0},
        {"report", 0, OPT_CHOICE, false, &a->report, "yes|no", "report.html, report.md and summary.json (default: yes)",
         0, 0},
        {"max-loss", 0, OPT_TEXT, true, &a->max_loss_text, "X",
         "put first the smallest budget at which a policy loses at most X", 0, 0},
        {"json", 0, OPT_FLAG, false, &a->json, NULL, "print summary.json instead of the tables", 0, 0},
        {"force", 0, OPT_FLAG, false, &a->force, NULL, "replace files that are already there", 0, 0},
        {"quiet", 'q', OPT_FLAG, false, &a->quiet, NULL, "say nothing on stderr", 0, 0},
        {"verbose", 'v', OPT_FLAG, false, &a->verbose, NULL, "say more", 0, 0},
        {0},
    };
    TRY(opt_parse(table, argc, argv, &a->files));
    a->command = opt_command("analyze", table, &a->files);
    return a->command ? 0 : ERR_DATA;
}

static int read_max_loss(analyze *a) {
    if (!a->max_loss_text) return 0;
    if (text_parse_number(a->max_loss_text, &a->max_loss) == 0 && isfinite(a->max_loss)) return 0;
    return err_set(ERR_USAGE, "--max-loss: '%s' is not a number", a->max_loss_text);
}

static int read_options(analyze *a, int argc, char **argv) {
    text formats = {0}, figures = {0};
    int code = list_names(&formats, &figures);
    if (!code) code = parse(a, formats.data, figures.data, argc, argv);
    text_free(&formats);
    text_free(&figures);
    TRY(code);
    say_level(a->quiet ? SAY_QUIET : a->verbose ? SAY_MORE : SAY_NORMAL);
    if (!a->files.n) return err_set(ERR_USAGE, "analyze: no results file (kvlag analyze FILE.csv... -o DIR)");
    if (!a->folder || !*a->folder) return err_set(ERR_USAGE, "analyze: no folder for the figures (-o DIR)");
    a->written =
        (written){.folder = a->folder, .force = a->force, .inputs = a->files.item, .n_inputs = (int)a->files.n};
    TRY(read_max_loss(a));
    TRY(read_formats(a));
    for (size_t k = 0; k < a->n_formats; k++)
        if (a->json && strcmp(a->format[k]->name, "term") == 0)
            return err_set(ERR_USAGE, "--json: --format term would print into it");
    return read_figures(a);
}

/* ---- files ------------------------------------------------------------------------------------------------------ */

static bool to_screen(const gnuplot_format *format) {
    return strcmp(format->name, "term") == 0;
}

static bool has_format(const analyze *a, const char *name) {
    for (size_t k = 0; k < a->n_formats; k++)
        if (strcmp(a->format[k]->name, name) == 0) return true;
    return false;
}

/* Refuse what would overwrite something before anything is written. */
static int check_files(const analyze *a) {
    const written *w = &a->written;
    for (size_t i = 0; i < a->list.n; i++) {
        const figure *f = &a->list.item[i];
        TRY(written_check(w, f->name, "dat"));
        TRY(written_check(w, f->name, "gp"));
        for (size_t k = 0; k < a->n_formats; k++) TRY(written_check(w, f->name, a->format[k]->name));
    }
    if (!reports(a)) return 0;
    TRY(written_check(w, "report", "html"));
    TRY(written_check(w, "report", "md"));
    return written_check(w, "summary", "json");
}

static int show_file(const char *path) {
    FILE *f = fopen(path, "rb");
    if (!f) return err_set(ERR_DATA, "%s: %s", path, strerror(errno));
    progress_clear();
    for (int c; (c = getc(f)) != EOF;)
        if (c != '\f') putchar(c); /* gnuplot begins a page */
    fclose(f);
    return 0;
}

static int read_bytes(const char *path, text *out) {
    char buffer[65536];
    FILE *f = fopen(path, "rb");
    if (!f) return err_set(ERR_DATA, "%s: %s", path, strerror(errno));
    int code = 0;
    for (size_t n; !code && (n = fread(buffer, 1, sizeof buffer, f)) > 0;) code = text_add_bytes(out, buffer, n);
    fclose(f);
    return code;
}

/* Draw into a file that will be NAME.ENDING, or that only lends its temporary name. *drawn: there is a picture. */
static int draw_into(analyze *a, const figure *f, const char *format, const outfile *out, bool *drawn) {
    text data = {0};
    int code = written_path(&a->written, f->name, "dat", &data);
    *drawn = !code && gnuplot_draw(&f->script, format, data.data, out->temp) == 0;
    if (!code && !*drawn && !a->failure.n) code = text_add(&a->failure, "%s", err_message());
    else if (!code && !*drawn) say("%s", err_message());
    text_free(&data);
    return code;
}

static int draw(analyze *a, const figure *f, const gnuplot_format *format, text *svg) {
    if (f->paper_only && to_screen(format)) {
        say("%s: cannot be drawn on a text terminal, skipped", f->name);
        return 0;
    }
    outfile out = {0};
    bool drawn = false;
    TRY(written_begin(&a->written, f->name, format->name, &out));
    int code = draw_into(a, f, format->name, &out, &drawn);
    if (!code && drawn && reports(a) && strcmp(format->name, "svg") == 0) code = read_bytes(out.temp, svg);
    if (!code && drawn) code = to_screen(format) ? show_file(out.temp) : written_commit(&a->written, &out);
    outfile_abort(&out);
    return code;
}

/* For the report alone: nothing stays. */
static int draw_for_report(analyze *a, const figure *f, text *svg) {
    outfile out = {0};
    bool drawn = false;
    TRY(written_begin(&a->written, f->name, "report-svg", &out));
    int code = draw_into(a, f, "svg", &out, &drawn);
    if (!code && drawn) code = read_bytes(out.temp, svg);
    outfile_abort(&out);
    return code;
}

static int write_figure(analyze *a, report_picture *p) {
    const figure *f = p->figure;
    TRY(written_text(&a->written, f->name, "dat", &f->data));
    TRY(written_text(&a->written, f->name, "gp", &f->script));
    for (size_t k = 0; k < a->n_formats; k++) TRY(draw(a, f, a->format[k], &p->svg));
    if (!reports(a) || has_format(a, "svg")) return 0;
    return draw_for_report(a, f, &p->svg);
}

static int write_figures(analyze *a) {
    int code = 0;
    progress_begin("analyze", "figures", (double)a->list.n);
    for (size_t i = 0; i < a->list.n && !code; i++) {
        code = write_figure(a, &a->picture[i]);
        progress_at((double)(i + 1));
    }
    progress_end();
    return code;
}

/* ---- the report ------------------------------------------------------------------------------------------------- */

/* What Markdown can show of a figure. */
static int link_picture(const analyze *a, report_picture *p) {
    const char *ending = has_format(a, "svg") ? "svg" : has_format(a, "png") ? "png" : NULL;
    return ending ? text_add(&p->link, "%s.%s", p->figure->name, ending) : 0;
}

static int write_as(analyze *a, const char *name, const char *ending, const report *r,
                    int (*write)(const report *, text *)) {
    text content = {0};
    int code = write(r, &content);
    if (!code) code = written_text(&a->written, name, ending, &content);
    text_free(&content);
    return code;
}

static int write_report(analyze *a, const report_input *in, const text *summary) {
    report r;
    int code = report_make(in, &r);
    if (!code) code = write_as(a, "report", "html", &r, report_write_html);
    if (!code) code = write_as(a, "report", "md", &r, report_write_markdown);
    report_free(&r);
    return code ? code : written_text(&a->written, "summary", "json", summary);
}

static int make_report(analyze *a, const figure_input *figures) {
    report_input in = {.in = figures,
                       .advice = a->n_metrics ? &a->advice : NULL,
                       .files = &a->sources,
                       .picture = a->picture,
                       .n_pictures = a->list.n,
                       .command = a->command};
    text summary = {0};
    int code = provenance_read(a->results, a->lifetimes, a->trace, &a->sources);
    for (size_t i = 0; i < a->list.n && !code; i++) code = link_picture(a, &a->picture[i]);
    if (!code) code = summary_write(&in, &summary);
    if (!code && a->json) fputs(summary.data, stdout);
    if (!code && reports(a)) code = write_report(a, &in, &summary);
    text_free(&summary);
    return code;
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
    if (a->n_metrics) TRY(advice_make(a->bootstrap, a->evidence, r, a->metric[0], a->max_loss, &a->advice));
    if (a->n_metrics || a->fidelity.n) return 0;
    if (!r->n_configs)
        return err_set(ERR_DATA,
                       "%s: no configuration to compare (the full cache alone is no answer, "
                       "and a configuration must be there for every sequence)",
                       a->files.item[0]);
    return err_set(ERR_DATA, "%s: none of the columns dloss_est, kl_est, out_err and lost_mass holds a value",
                   a->files.item[0]);
}

/* The recommendation, one sentence after the other, and the tables. */
static int print_results(const analyze *a) {
    if (a->n_metrics && reports(a)) {
        text words = {0};
        int code = a->advice.n ? advice_words(&a->advice, a->advice.main, &words) : 0;
        if (!code && words.n) prose_print(words.data, 0);
        text_free(&words);
        TRY(code);
        printf("\n");
    }
    if (a->n_metrics) TRY(table_print(a->results, a->bootstrap, a->metric, a->n_metrics));
    for (size_t i = 0; i < a->fidelity.n; i++) TRY(fidelity_print(&a->fidelity.item[i], a->results));
    return 0;
}

static int collect_figures(analyze *a, const figure_input *in) {
    size_t first[MOST_KINDS + 1] = {0};
    for (size_t k = 0; k < a->n_kinds; k++) {
        TRY(a->kind[k]->collect(in, &a->list));
        first[k + 1] = a->list.n;
    }
    a->picture = mem_new(a->list.n + 1, sizeof *a->picture, "figures");
    if (!a->picture) return ERR_DATA;
    for (size_t k = 0; k < a->n_kinds; k++)
        for (size_t i = first[k]; i < first[k + 1]; i++)
            a->picture[i] = (report_picture){.kind = a->kind[k], .figure = &a->list.item[i]};
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
    TRY(collect_figures(a, &in));
    TRY(outfile_make_folder(a->folder));
    TRY(check_files(a));
    if (!a->json) TRY(print_results(a));
    TRY(write_figures(a));
    if (reports(a) || a->json) TRY(make_report(a, &in));
    if (a->written.list.n && !a->json) printf("\n%s", a->written.list.data);
    return a->failure.n ? err_set(ERR_DATA, "%s", a->failure.data) : 0;
}

int cmd_analyze(int argc, char **argv) {
    analyze a = {.report = "yes", .formats = "png", .max_loss = NAN};
    int code = work(&a, argc, argv);
    if (!code && (fflush(stdout) != 0 || ferror(stdout)))
        code = err_set(ERR_DATA, "stdout: write failed: %s", strerror(errno));
    for (size_t i = 0; a.picture && i < a.list.n; i++) {
        text_free(&a.picture[i].svg);
        text_free(&a.picture[i].link);
    }
    mem_free(a.picture);
    mem_free(a.command);
    opt_list_free(&a.files);
    provenance_free(&a.sources);
    advice_free(&a.advice);
    fidelity_free(&a.fidelity);
    bootstrap_free(a.bootstrap);
    evidence_free(a.evidence);
    results_free(a.results);
    figure_list_free(&a.list);
    text_free(&a.written.list);
    text_free(&a.failure);
    return code == OPT_HELPED ? 0 : code;
}
