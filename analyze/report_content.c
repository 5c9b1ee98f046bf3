#include "analyze/report_content.h"
#include "analyze/memory.h"
#include "analyze/report_parts.h"
#include "base/err.h"
#include "base/mem.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { MOST_LOSSES = 4 };

typedef struct maker {
    const report_input *in;
    const results *r;
    bootstrap *b;
    size_t metric;
    report *out;
} maker;

/* ---- cells ------------------------------------------------------------------------------------------------------ */

static int cell_estimate(maker *m, estimate e) {
    text t = {0};
    if (isnan(e.value)) return report_cell(m->out, "n/a");
    int code = advice_value(&t, e);
    if (!code && !isnan(e.lo)) {
        code = text_add(&t, " (");
        if (!code) code = advice_interval(&t, e);
        if (!code) code = text_add(&t, ")");
    }
    return report_cell_text(m->out, &t, code);
}

static int cell_p(maker *m, double p) {
    text t = {0};
    return isnan(p) ? report_cell(m->out, "%s", "") : report_cell_text(m->out, &t, advice_p(&t, "", "", p));
}

static int cell_lag(maker *m, const result *c) {
    return c && c->lag >= 0 ? report_cell(m->out, "%.10g", c->lag) : report_cell(m->out, "%s", "");
}

static int cell_series(maker *m, const result *c) {
    char *name = result_series_name(m->r, c);
    int code = name ? report_cell(m->out, "%s", name) : ERR_DATA;
    mem_free(name);
    return code;
}

static int cell_cost(maker *m, double cost) {
    return isnan(cost) ? report_cell(m->out, "%s", "") : report_cell(m->out, "%.3g", cost);
}

/* ---- the top ---------------------------------------------------------------------------------------------------- */

static int add_title(maker *m) {
    const char *first = NULL;
    size_t n = 0;
    for (size_t i = 0; i < m->r->n_rows; i++) {
        bool seen = false;
        for (size_t k = 0; k < i && !seen; k++) seen = strcmp(m->r->rows[k].trace, m->r->rows[i].trace) == 0;
        if (!seen && n++ == 0) first = m->r->rows[i].trace;
    }
    if (n == 1) return text_add(&m->out->title, "What eviction costs: %s", first);
    return text_add(&m->out->title, "What eviction costs: %s and %zu other trace%s", first, n - 1, n == 2 ? "" : "s");
}

static int add_recommendation(maker *m) {
    const advice_list *a = m->in->advice;
    for (size_t k = 0; k < a->n; k++) {
        size_t i = k == 0 ? a->main : k - (k <= a->main); /* the main one, then the others in order */
        text words = {0};
        int code = advice_words(a, i, &words);
        if (!code && k == 1) code = report_add(m->out, REPORT_PARAGRAPH, "At other budgets:");
        if (!code) code = report_add(m->out, k ? REPORT_ITEM : REPORT_LEAD, "%s", words.data);
        text_free(&words);
        TRY(code);
    }
    return 0;
}

/* ---- policies by budget ----------------------------------------------------------------------------------------- */

static int add_ranked(maker *m, const ranked *x, bool bound) {
    const figure_input *in = m->in->in;
    TRY(cell_series(m, x->config));
    TRY(cell_estimate(m, x->loss));
    TRY(bound ? report_cell(m->out, "bound") : report_cell(m->out, "%zu", x->rank));
    TRY(cell_lag(m, x->config));
    TRY(!isnan(x->p) && !bound ? cell_estimate(m, x->behind) : report_cell(m->out, "%s", ""));
    TRY(bound ? report_cell(m->out, "%s", "") : cell_p(m, x->p));
    for (size_t k = 1; k < in->n_metrics; k++) {
        estimate e;
        TRY(bootstrap_estimate(m->b, x->config, in->metrics[k], &e));
        TRY(cell_estimate(m, e));
    }
    return cell_cost(m, x->config->cost[COST_SCORE_UPDATES]);
}

static int add_budget(maker *m, const advice *a) {
    const figure_input *in = m->in->in;
    const char *column[6 + RESULTS_METRICS + 1] = {
        "policy", results_metrics[m->metric].brief, "rank", "lag", "behind the first", "p"};
    static const char *const align[] = {"lrrrrrr", "lrrrrrrr", "lrrrrrrrr"};
    size_t n = 6;
    for (size_t k = 1; k < in->n_metrics; k++) column[n++] = results_metrics[in->metrics[k]].brief;
    column[n] = "score updates";
    text caption = {0};
    int code = text_add(&caption, "Budget ");
    if (!code) code = advice_budget_name(a->budget, &caption);
    if (!code) code = report_add_table(m->out, caption.data, align[in->n_metrics - 1], column);
    text_free(&caption);
    for (size_t i = 0; i < a->n && !code; i++) code = add_ranked(m, &a->ranking[i], false);
    TRY(code);
    ranked *all = NULL;
    TRY(decide_ranking(m->b, m->r, a->budget->asked, m->metric, true, &all, &n));
    for (size_t i = 0; i < n && !code; i++)
        if (result_is_oracle(all[i].config)) code = add_ranked(m, &all[i], true);
    mem_free(all);
    return code;
}

static int add_budgets(maker *m) {
    const advice_list *a = m->in->advice;
    TRY(report_add(m->out, REPORT_SECTION, "Policies by budget"));
    TRY(report_add(
        m->out, REPORT_PARAGRAPH,
        "The %s, less being better. Policies that wait stand at their best lag, with the memory of waiting charged. "
        "The rank is 1 plus the number of policies that are better by a paired 90 %% interval without 0, so policies "
        "that cannot be told apart from the same ones share a rank. Oracles see the future: they are bounds, not "
        "choices. Brackets hold 90 %% intervals.",
        results_metrics[m->metric].axis));
    for (size_t i = 0; i < a->n; i++) TRY(add_budget(m, &a->item[i]));
    return 0;
}

/* ---- lags ------------------------------------------------------------------------------------------------------- */

static int cell_knee(maker *m, const knee *k) {
    if (!k->found) return report_cell(m->out, "none (%s)", k->why);
    if (k->lag_lo == k->lag_hi) return report_cell(m->out, "%.10g", k->at->lag);
    return report_cell(m->out, "%.10g (%.10g to %.10g)", k->at->lag, k->lag_lo, k->lag_hi);
}

static int cell_closed(maker *m, const gain *g) {
    return g->closed_why ? report_cell(m->out, "n/a (%s)", g->closed_why) : cell_estimate(m, g->closed);
}

static int add_curve_row(maker *m, const lag_curve *c, const lag_choice *choice, const knee *k, const gain *g) {
    TRY(cell_series(m, c->point[0]));
    TRY(report_cell(m->out, "%s", c->point[0]->budget_asked));
    TRY(report_cell(m->out, "%s", c->point[0]->pending));
    TRY(cell_lag(m, choice->best));
    TRY(cell_lag(m, choice->recommended));
    TRY(cell_knee(m, k));
    TRY(cell_estimate(m, g->gain));
    TRY(cell_p(m, g->p));
    TRY(cell_estimate(m, g->over_filter));
    return cell_closed(m, g);
}

static const gain *gain_at(const lag_curve *c, const gain *g, const lag_choice *choice) {
    const result *at = choice->recommended ? choice->recommended : choice->best;
    size_t i = 0;
    while (c->point[i] != at) i++;
    return &g[i];
}

static int add_curve(maker *m, const lag_curve *c) {
    lag_choice choice;
    knee k;
    gain *g;
    TRY(decide_lag(m->b, c, m->metric, &choice));
    TRY(decide_knee(m->b, c, m->metric, &k));
    TRY(decide_gains(m->b, m->r, c, m->metric, &g));
    int code = add_curve_row(m, c, &choice, &k, gain_at(c, g, &choice));
    mem_free(g);
    return code;
}

static int add_lags(maker *m) {
    static const char *const column[] = {"policy",          "budget",      "pending",
                                         "best lag",        "recommended", "knee",
                                         "gain over lag 0", "p",           "less than the best that does not wait",
                                         "closed share"};
    lag_curves curves;
    int code = lag_curves_find(m->r, m->metric, &curves);
    size_t policies = 0;
    for (size_t i = 0; i < curves.n; i++) policies += !result_is_oracle(curves.item[i].point[0]);
    if (!code && policies) {
        code = report_add(m->out, REPORT_SECTION, "Lags");
        if (!code)
            code = report_add(
                m->out, REPORT_PARAGRAPH,
                "The recommended lag is the smallest whose loss is statistically no worse than that of the best lag; "
                "gains are those of the recommended lag (of the best one where there are no resamples). The knee is "
                "where waiting longer begins to bring little. The closed share is how much of the way from lag 0 to "
                "the oracle that holds entries as long the policy goes. Pending free is no policy that could be run "
                "in the same memory: it shows what the information is worth without the price of waiting for it.");
        if (!code) code = report_add_table(m->out, "What waiting brings", "lrlrrrrrrr", column);
        for (size_t i = 0; i < curves.n && !code; i++)
            if (!result_is_oracle(curves.item[i].point[0])) code = add_curve(m, &curves.item[i]);
    }
    lag_curves_free(&curves);
    return code;
}

/* ---- memory ----------------------------------------------------------------------------------------------------- */

static int cell_memory(maker *m, const memory_curve *c, double loss) {
    estimate e;
    text t = {0};
    TRY(memory_at_loss(m->b, c, loss, &e));
    return report_cell_text(m->out, &t, memory_add_estimate(&t, c, e));
}

static int cell_share(maker *m, const memory_curve *c, const memory_curve *reference, double loss) {
    estimate e;
    text t = {0};
    TRY(memory_share(m->b, c, reference, loss, &e));
    if (isnan(e.value)) return report_cell(m->out, "n/a");
    int code = text_add(&t, "%.0f %%", 100 * e.value);
    if (!code && !isnan(e.lo)) code = text_add(&t, " (%.0f to ", 100 * e.lo);
    if (!code && !isnan(e.lo)) code = isinf(e.hi) ? text_add(&t, "?)") : text_add(&t, "%.0f)", 100 * e.hi);
    return report_cell_text(m->out, &t, code);
}

/* One column a loss: the memory, or, where there is a reference, the share of what that needs. */
static int add_by_loss(maker *m, const char *caption, const memory_curves *all, const memory_curve *reference,
                       const double *loss, size_t n) {
    static const char *const align[MOST_LOSSES + 1] = {"l", "lr", "lrr", "lrrr", "lrrrr"};
    char words[MOST_LOSSES][32];
    const char *column[MOST_LOSSES + 1] = {"policy"};
    for (size_t k = 0; k < n; k++) {
        snprintf(words[k], sizeof words[k], "loss %g", loss[k]);
        column[k + 1] = words[k];
    }
    TRY(report_add_table(m->out, caption, align[n], column));
    for (size_t i = 0; i < all->n; i++) {
        const memory_curve *c = &all->item[i];
        if (c == reference) continue;
        TRY(cell_series(m, c->point[0]));
        for (size_t k = 0; k < n; k++)
            TRY(reference ? cell_share(m, c, reference, loss[k]) : cell_memory(m, c, loss[k]));
    }
    return 0;
}

static int add_shares(maker *m, const memory_curves *all, const memory_curve *reference, const double *loss, size_t n) {
    char *name = result_series_name(m->r, reference->point[0]);
    text caption = {0};
    int code = name ? text_add(&caption, "The same as a share of what %s needs", name) : ERR_DATA;
    if (!code) code = add_by_loss(m, caption.data, all, reference, loss, n);
    text_free(&caption);
    mem_free(name);
    return code;
}

static int add_equal_loss(maker *m, const memory_curves *all) {
    double loss[MOST_LOSSES];
    const memory_curve *reference;
    size_t n = memory_round_losses(all, MOST_LOSSES, loss);
    TRY(memory_find_reference(m->r, all, NULL, &reference));
    TRY(report_add(m->out, REPORT_PARAGRAPH,
                   "How much memory a policy needs to lose no more than so much; memory is %s. Between budgets it is "
                   "interpolated, and nothing is said beyond what was run: < and > mark ends of that, ? an end that is "
                   "not known.%s",
                   memory_pick_measure(m->r) == MEMORY_KV_BYTES ? "what a step reads of keys and values"
                                                                : "the budget in entries",
                   reference ? " Shares are held against the best policy that does not wait." : ""));
    TRY(add_by_loss(m, "Memory at equal loss", all, NULL, loss, n));
    return reference && all->n > 1 ? add_shares(m, all, reference, loss, n) : 0;
}

static int add_front(maker *m) {
    static const char *const column[] = {"policy", "budget", "lag", "memory", "loss"};
    memory_measure measure = memory_pick_measure(m->r);
    double *cost = mem_new(m->r->n_configs + 1, sizeof *cost, "costs");
    const result **front = NULL;
    size_t n = 0;
    if (!cost) return ERR_DATA;
    for (size_t i = 0; i < m->r->n_configs; i++)
        cost[i] = memory_is_real(&m->r->configs[i]) ? memory_of(&m->r->configs[i], measure) : NAN;
    int code = memory_pareto(m->r, cost, m->metric, &front, &n);
    mem_free(cost);
    if (!code) code = report_add_table(m->out, "Nothing that was priced beats these in both", "lrrrr", column);
    for (size_t i = 0; i < n && !code; i++) {
        estimate e;
        text t = {0};
        code = cell_series(m, front[i]);
        if (!code) code = report_cell(m->out, "%s", front[i]->budget_asked);
        if (!code) code = cell_lag(m, front[i]);
        if (!code) code = report_cell_text(m->out, &t, memory_add_words(&t, measure, memory_of(front[i], measure)));
        if (!code) code = bootstrap_estimate(m->b, front[i], m->metric, &e);
        if (!code) code = cell_estimate(m, e);
    }
    mem_free(front);
    return code;
}

static int add_memory(maker *m) {
    memory_curves all;
    TRY(report_add(m->out, REPORT_SECTION, "Memory"));
    int code = memory_curves_find(m->r, m->metric, &all);
    if (!code && all.n) code = add_equal_loss(m, &all);
    else if (!code)
        code = report_add(m->out, REPORT_PARAGRAPH,
                          "No policy was priced at two budgets, so memory at equal loss is not known.");
    if (!code) code = add_front(m);
    memory_curves_free(&all);
    return code;
}

/* ---- figures ---------------------------------------------------------------------------------------------------- */

/* "loss against the lag (needs --x)" -> "Loss against the lag". */
static int heading(const char *help, text *out) {
    const char *end = strstr(help, " (needs");
    TRY(text_add(out, "%.*s", (int)(end ? end - help : (long)strlen(help)), help));
    out->data[0] = (char)toupper((unsigned char)out->data[0]);
    return 0;
}

static int add_picture(maker *m, report_picture *p, const figure_kind **kind) {
    text words = {0};
    int code = heading(p->kind->help, &words);
    if (!code && *kind != p->kind) code = report_add(m->out, REPORT_GROUP, "%s", words.data);
    if (!code && *kind != p->kind) code = report_add(m->out, REPORT_PARAGRAPH, "%s", p->kind->reading);
    *kind = p->kind;
    if (!code) code = text_add(&words, ": %s", p->figure->name);
    if (!code) code = report_add_figure(m->out, &p->svg, p->link.n ? p->link.data : "", p->figure->name, words.data);
    text_free(&words);
    return code;
}

static int add_figures(maker *m) {
    const figure_kind *kind = NULL;
    if (m->in->n_pictures) TRY(report_add(m->out, REPORT_SECTION, "Figures"));
    for (size_t i = 0; i < m->in->n_pictures; i++) TRY(add_picture(m, &m->in->picture[i], &kind));
    return 0;
}

int report_make(const report_input *in, report *out) {
    maker m = {.in = in, .r = in->in->results, .b = in->in->bootstrap, .out = out};
    *out = (report){0};
    TRY(add_title(&m));
    if (in->advice) {
        m.metric = in->advice->metric;
        TRY(add_recommendation(&m));
        TRY(add_budgets(&m));
        TRY(add_lags(&m));
        TRY(add_memory(&m));
    }
    TRY(add_figures(&m));
    TRY(report_add_text(in, out));
    TRY(report_add_truths(in, out));
    return report_add_method(in, out);
}
