/* How far the estimates can be trusted, and how everything was made. */
#include "analyze/report_parts.h"
#include "base/err.h"

#include <math.h>
#include <string.h>

/* ---- truths ----------------------------------------------------------------------------------------------------- */

static int cell_number(report *out, double value) {
    return isnan(value) ? report_cell(out, "n/a") : report_cell(out, "%.3f", value);
}

static int add_truth(const fidelity *f, report *out) {
    static const size_t shown[] = {DLOSS_EST, KL_EST, FISHER, OUT_ERR, LOST_MASS};
    static const char *const column[] = {
        "estimate", "reruns", "Spearman with true KL", "Spearman with true loss change", "true KL over it", "spread"};
    text caption = {0};
    int code = text_add(&caption, "%zu reruns of %zu sequence%s%s%s", f->n, f->n_sequences,
                        f->n_sequences == 1 ? "" : "s", *f->mode ? ", mode " : "", f->mode);
    if (!code) code = report_add_table(out, caption.data, "lrrrrr", column);
    text_free(&caption);
    TRY(code);
    for (size_t i = 0; i < sizeof shown / sizeof *shown; i++) {
        fidelity_correlation c;
        fidelity_ratio ratio;
        TRY(fidelity_correlate(f, shown[i], &c));
        TRY(fidelity_compare(f, shown[i], FIDELITY_ALL, &ratio));
        if (!c.n) continue;
        TRY(report_cell(out, "%s", results_metrics[shown[i]].column));
        TRY(report_cell(out, "%zu", c.n));
        TRY(cell_number(out, c.kl_spearman));
        TRY(cell_number(out, c.dloss_spearman));
        bool factor = shown[i] == KL_EST || shown[i] == FISHER;
        TRY(factor ? cell_number(out, ratio.scale) : report_cell(out, "%s", ""));
        TRY(factor ? cell_number(out, ratio.spread) : report_cell(out, "%s", ""));
    }
    return 0;
}

static int add_coverage(const fidelity *f, size_t metric, report *out) {
    fidelity_coverage c = fidelity_cover(f, metric, FIDELITY_LEAST_KL);
    if (!c.n) return 0;
    return report_add(out, REPORT_ITEM,
                      "The stated 90 %% intervals of %s hold %zu of %zu truths with a KL of %g or more; a coverage of "
                      "85 to 95 %% is %s at the 1 %% level.",
                      results_metrics[metric].column, c.held, c.n, FIDELITY_LEAST_KL,
                      c.stands                 ? "not rejected"
                      : c.too_low < c.too_high ? "rejected (too few)"
                                               : "rejected (too many)");
}

int report_add_truths(const report_input *in, report *out) {
    const fidelity_list *list = in->in->fidelity;
    if (!list->n) return 0;
    TRY(report_add(out, REPORT_SECTION, "Estimates against true reruns"));
    for (size_t i = 0; i < list->n; i++) {
        TRY(add_truth(&list->item[i], out));
        TRY(add_coverage(&list->item[i], KL_EST, out));
        TRY(add_coverage(&list->item[i], DLOSS_EST, out));
    }
    return 0;
}

/* ---- method ----------------------------------------------------------------------------------------------------- */

static int add_resampling(const report_input *in, report *out) {
    const advice_list *a = in->advice;
    size_t n = in->in->results->n_sequences;
    if (!a || a->why_not)
        return report_add(out, REPORT_ITEM, "Nothing was resampled%s%s, so there are no intervals from it.",
                          a ? ": " : "", a ? a->why_not : "");
    if (a->whole)
        return report_add(out, REPORT_ITEM,
                          "Intervals and p values: %d bootstrap resamples of the %zu sequences (Efron and Tibshirani "
                          "1993), paired between configurations. They speak of texts like these.",
                          BOOTSTRAP_RESAMPLES, n);
    return report_add(
        out, REPORT_ITEM,
        "Intervals and p values: %d resamples of runs of %d of 64 blocks of steps of each sequence, around "
        "a circle (Künsch 1989; Politis and Romano 1992), paired between configurations. They speak of "
        "%s, not of others; with %d sequences or more, sequences are resampled instead.",
        BOOTSTRAP_RESAMPLES, BOOTSTRAP_RUN, n == 1 ? "this text" : "these texts", BOOTSTRAP_LEAST_SEQUENCES);
}

static int add_limits(const report_input *in, report *out) {
    const results *r = in->in->results;
    size_t metric = in->advice ? in->advice->metric : RESULTS_METRICS;
    if (metric == DLOSS_EST || metric == KL_EST)
        TRY(report_add(out, REPORT_ITEM,
                       "Losses are estimates from one run of the model without evictions: a second-order expansion, "
                       "scaled by a calibration. They were not measured; kvlag verify does that for chosen rows."));
    if (metric == OUT_ERR || metric == LOST_MASS)
        TRY(report_add(out, REPORT_ITEM,
                       "The metric is a disturbance, not a loss: the trace holds no gradients to price losses with "
                       "(kvlag trace records them)."));
    if (r->uncalibrated && (metric == DLOSS_EST || metric == KL_EST))
        TRY(report_add(out, REPORT_ITEM,
                       "The estimates are uncalibrated: levels may be off by a factor of about 1.5, and intervals say "
                       "so. Differences between policies on one text are surer. kvlag verify --calibrate narrows it."));
    if (r->n_sequences == 1)
        TRY(report_add(out, REPORT_ITEM, "One sequence was priced. Other texts may order policies differently."));
    if (r->n_incomplete)
        TRY(report_add(out, REPORT_ITEM, "%zu configurations lack a sequence and are left out.", r->n_incomplete));
    return 0;
}

static int add_methods(const report_input *in, report *out) {
    TRY(add_resampling(in, out));
    TRY(report_add(out, REPORT_ITEM,
                   "Knee: Kneedle (Satopää, Albrecht, Irwin and Raghavan 2011) on the falling curve, lags on a "
                   "logarithmic axis, found only if resamples agree."));
    TRY(report_add(out, REPORT_ITEM,
                   "Recommended lag: multiple comparisons with the best (Hsu 1984) on resamples, at the 5 %% level."));
    return report_add(out, REPORT_ITEM,
                      "Memory at equal loss: interpolated between budgets in the logarithm of memory, after least "
                      "squares made each curve fall (pool adjacent violators).");
}

static int add_file(const provenance_file *f, report *out) {
    TRY(report_add(out, REPORT_GROUP, "%s (%s)", text_base_name(f->path), f->role));
    TRY(report_add(out, REPORT_PARAGRAPH, "XXH3-128 of the file: %s", f->hash));
    return f->comments.n ? report_add(out, REPORT_CODE, "%s", f->comments.data) : 0;
}

int report_add_method(const report_input *in, report *out) {
    TRY(report_add(out, REPORT_SECTION, "How to read this"));
    TRY(add_limits(in, out));
    TRY(add_methods(in, out));
    TRY(report_add(out, REPORT_SECTION, "How this was made"));
    TRY(report_add(out, REPORT_PARAGRAPH, "kvlag " KVLAG_VERSION ", by"));
    TRY(report_add(out, REPORT_CODE, "%s\n", in->command));
    TRY(report_add(out, REPORT_PARAGRAPH, "from these files, which say of themselves how they were made:"));
    for (size_t i = 0; i < in->files->n; i++) TRY(add_file(&in->files->item[i], out));
    return 0;
}
