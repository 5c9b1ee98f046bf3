#include "advise/advise.h"
#include "analyze/analyze.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/options.h"
#include "base/outfile.h"
#include "base/progress.h"
#include "base/text.h"
#include "sim/policy_plugin.h"
#include "sim/sim.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* Where a loss is asked and no budget, the smallest that keeps it is looked for among these. */
static const char search_budgets[] = "5%,10%,15%,25%,35%,50%,75%", usual_budgets[] = "10%,25%,50%";

/* Whose lifetimes the figures of the text show, where -p names no policies. */
static const char *const shown_specs[] = {"h2o", "rmm(lag=16)", "oracle(mass)"};
static const char shown_budget[] = "25%";

typedef struct advise {
    opt_list traces, specs, plugins;
    const char *folder, *budgets, *lags, *max_loss, *calibration, *sample, *device, *formats, *pending;
    long long memory, threads;
    bool force, quiet, verbose, json;
    char *results, *lifetimes, *lifetimes_csv;
    char memory_text[24], threads_text[24];
} advise;

/* ---- the command line ------------------------------------------------------------------------------------------- */

static int parse(advise *a, int argc, char **argv) {
    a->formats = "svg";
    const opt table[] = {
        {"output", 'o', OPT_TEXT, false, &a->folder, "DIR", "folder for results, report and figures", 0, 0},
        {"budget", 'b', OPT_TEXT, true, &a->budgets, "LIST", "budgets to compare (default: 10%,25%,50%)", 0, 0},
        {"max-loss", 0, OPT_TEXT, true, &a->max_loss, "X",
         "find the smallest budget that loses at most X (budgets from 5 to 75 %)", 0, 0},
        {"policy", 'p', OPT_LIST, true, &a->specs, "SPEC", "policies to compare (default: sim's default set)", 0, 0},
        {"lag", 'L', OPT_TEXT, true, &a->lags, "LIST", "lags (default: 0:64:x2)", 0, 0},
        {"pending", 0, OPT_CHOICE, true, &a->pending, "charged|free|both",
         "do entries held for the lag count in the budget (default: both)", 0, 0},
        {"calibration", 0, OPT_FILE, true, &a->calibration, "FILE.json", "what verify --calibrate wrote", 0, 0},
        {"device", 0, OPT_TEXT, true, &a->device, "hbm=X/s[,weights=Y]", "a model of decode time, as in sim", 0, 0},
        {"sample", 0, OPT_TEXT, true, &a->sample, "steps:R", "price R steps only: a quick look", 0, 0},
        {"format", 0, OPT_TEXT, false, &a->formats, "LIST", "figures: png, svg, pdf, term (default: svg)", 0, 0},
        {"memory", 0, OPT_SIZE, false, &a->memory, "N", "bound on sim's memory, e.g. 512M (default 1G)", 1 << 20,
         1LL << 46},
        {"threads", 0, OPT_INT, false, &a->threads, "N", "worker threads (default: all processors)", 1, 4096},
        POLICY_PLUGIN_OPTION(a->plugins),
        {"json", 0, OPT_FLAG, false, &a->json, NULL, "print summary.json instead of the tables", 0, 0},
        {"force", 0, OPT_FLAG, false, &a->force, NULL, "replace files that are already there", 0, 0},
        {"quiet", 'q', OPT_FLAG, false, &a->quiet, NULL, "say nothing on stderr", 0, 0},
        {"verbose", 'v', OPT_FLAG, false, &a->verbose, NULL, "say more", 0, 0},
        {0},
    };
    TRY(opt_parse(table, argc, argv, &a->traces));
    say_level(a->quiet ? SAY_QUIET : a->verbose ? SAY_MORE : SAY_NORMAL);
    if (!a->traces.n) return err_set(ERR_USAGE, "advise: no TRACE given (kvlag advise TRACE... -o DIR)");
    if (!a->folder || !*a->folder) return err_set(ERR_USAGE, "advise: no folder for the report (-o DIR)");
    snprintf(a->memory_text, sizeof a->memory_text, "%lld", a->memory);
    snprintf(a->threads_text, sizeof a->threads_text, "%lld", a->threads);
    return 0;
}

/* The sweep takes a while: what would be refused after it is refused before. */
static int check_folder(advise *a) {
    TRY(text_path(a->folder, "results.csv", &a->results));
    TRY(text_path(a->folder, "lifetimes.h5", &a->lifetimes));
    TRY(text_path(a->folder, "lifetimes.csv", &a->lifetimes_csv));
    TRY(outfile_make_folder(a->folder));
    static const char *const names[] = {"results.csv", "report.html", "report.md", "summary.json"};
    for (size_t i = 0; i < sizeof names / sizeof *names && !a->force; i++) {
        char *path;
        TRY(text_path(a->folder, names[i], &path));
        int code =
            access(path, F_OK) == 0 ? err_set(ERR_USAGE, "%s: already there (use --force to replace it)", path) : 0;
        mem_free(path);
        TRY(code);
    }
    return 0;
}

/* ---- calls ------------------------------------------------------------------------------------------------------ */

typedef struct words {
    const char **item;
    size_t n, capacity;
} words;

static int add(words *w, const char *word) {
    TRY(mem_grow((void **)&w->item, &w->capacity, w->n + 1, sizeof *w->item, "arguments"));
    w->item[w->n++] = word;
    return 0;
}

/* An option and its value, where there is one. */
static int add_option(words *w, const char *name, const char *value) {
    if (!value) return 0;
    TRY(add(w, name));
    return add(w, value);
}

static int add_common(const advise *a, words *w) {
    if (a->force) TRY(add(w, "--force"));
    if (a->quiet) TRY(add(w, "-q"));
    return a->verbose ? add(w, "-v") : 0;
}

static int add_sim(const advise *a, words *w) {
    TRY(add_option(w, "--memory", a->memory ? a->memory_text : NULL));
    TRY(add_option(w, "--threads", a->threads ? a->threads_text : NULL));
    return add_common(a, w);
}

static int sweep(const advise *a) {
    words w = {0};
    int code = 0;
    for (size_t i = 0; i < a->traces.n && !code; i++) code = add(&w, a->traces.item[i]);
    for (size_t i = 0; i < a->specs.n && !code; i++) code = add_option(&w, "-p", a->specs.item[i]);
    for (size_t i = 0; i < a->plugins.n && !code; i++) code = add_option(&w, "--plugin", a->plugins.item[i]);
    if (!code) code = add_option(&w, "-o", a->results);
    const char *budgets = a->budgets ? a->budgets : a->max_loss ? search_budgets : usual_budgets;
    if (!code) code = add_option(&w, "-b", budgets);
    if (!code) code = add_option(&w, "-L", a->lags ? a->lags : "0:64:x2");
    if (!code) code = add_option(&w, "--pending", a->pending ? a->pending : "both");
    if (!code) code = add_option(&w, "--calibration", a->calibration);
    if (!code) code = add_option(&w, "--device", a->device);
    if (!code) code = add_option(&w, "--sample", a->sample);
    if (!code) code = add_sim(a, &w);
    if (!code) code = cmd_sim((int)w.n, (char **)w.item);
    mem_free(w.item);
    return code;
}

/* What a few policies keep of the text, for the figures that show it. Where the trace cannot give them, the report does
 * without. */
static int keep_lifetimes(const advise *a) {
    words w = {0};
    int code = add(&w, a->traces.item[0]);
    for (size_t i = 0; i < sizeof shown_specs / sizeof *shown_specs && !code; i++)
        code = add_option(&w, "-p", shown_specs[i]);
    if (!code) code = add_option(&w, "-b", shown_budget);
    if (!code) code = add_option(&w, "-o", a->lifetimes_csv);
    if (!code) code = add_option(&w, "--lifetimes", a->lifetimes);
    if (!code) code = add_sim(a, &w);
    if (!code) code = cmd_sim((int)w.n, (char **)w.item);
    mem_free(w.item);
    return code;
}

static int analyze(const advise *a, bool has_lifetimes) {
    words w = {0};
    int code = add(&w, a->results);
    if (!code) code = add_option(&w, "-o", a->folder);
    if (!code) code = add_option(&w, "--format", a->formats);
    if (!code) code = add_option(&w, "--max-loss", a->max_loss);
    if (!code) code = add_option(&w, "--lifetimes", has_lifetimes ? a->lifetimes : NULL);
    if (!code) code = add_option(&w, "--trace", has_lifetimes ? a->traces.item[0] : NULL);
    if (!code && a->json) code = add(&w, "--json");
    if (!code) code = add_common(a, &w);
    if (!code) code = cmd_analyze((int)w.n, (char **)w.item);
    mem_free(w.item);
    return code;
}

static int work(advise *a, int argc, char **argv) {
    TRY(parse(a, argc, argv));
    TRY(check_folder(a));
    TRY(sweep(a));
    bool has_lifetimes = a->traces.n == 1;
    if (has_lifetimes && keep_lifetimes(a)) {
        say("%s: the figures of the text are left out", err_message());
        has_lifetimes = false;
    }
    return analyze(a, has_lifetimes);
}

int cmd_advise(int argc, char **argv) {
    advise a = {0};
    int code = work(&a, argc, argv);
    opt_list_free(&a.traces);
    opt_list_free(&a.specs);
    opt_list_free(&a.plugins);
    mem_free(a.results);
    mem_free(a.lifetimes);
    mem_free(a.lifetimes_csv);
    return code;
}
