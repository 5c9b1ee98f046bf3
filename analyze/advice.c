#include "analyze/advice.h"
#include "base/err.h"
#include "base/mem.h"

#include <math.h>
#include <string.h>

/* Cheaper to run means this share of the pick's score updates or less. */
#define CHEAPER 0.9
#define P_SMALLEST 0.001

/* ---- numbers ---------------------------------------------------------------------------------------------------- */

static int decimals_of(double size, int digits) {
    if (!(size > 0) || isinf(size)) return digits;
    int decimals = digits - 1 - (int)floor(log10(size) + 1e-9);
    return decimals < 0 ? 0 : decimals > 9 ? 9 : decimals;
}

/* No "-0.00". */
static double rounded(double value, int decimals) {
    double unit = pow(10, decimals);
    return fabs(value) * unit < 0.5 ? 0 : value;
}

static int add_number(text *t, double value, int decimals) {
    return text_add(t, "%.*f", decimals, rounded(value, decimals));
}

/* Two digits of a third of the interval's width, which is near the standard error, or three of a value without one. */
static int decimals_for(estimate e) {
    double width = e.hi - e.lo;
    return width > 0 ? decimals_of(width / 3, 2) : decimals_of(fabs(e.value), 3);
}

int advice_value(text *t, estimate e) {
    return add_number(t, e.value, decimals_for(e));
}

int advice_interval(text *t, estimate e) {
    int decimals = decimals_for(e);
    TRY(add_number(t, e.lo, decimals));
    TRY(text_add(t, " to "));
    return add_number(t, e.hi, decimals);
}

int advice_p(text *t, const char *before, const char *equal, double p) {
    return p < P_SMALLEST ? text_add(t, "%s< %g", before, P_SMALLEST) : text_add(t, "%s%s%.2g", before, equal, p);
}

/* ---- names ------------------------------------------------------------------------------------------------------ */

int advice_name(const results *r, const result *c, text *out) {
    char *name = result_series_name(r, c);
    if (!name) return ERR_DATA;
    int code = text_add(out, "%s", name);
    if (!code && c->lag >= 0) code = text_add(out, " with lag %.10g", c->lag);
    mem_free(name);
    return code;
}

int advice_budget_name(const results_budget *budget, text *out) {
    size_t n = strlen(budget->asked);
    if (n < 2 || budget->asked[n - 1] != '%') return text_add(out, "%.6g entries", budget->entries);
    return text_add(out, "%.*s %% (%.6g entries)", (int)n - 1, budget->asked, budget->entries);
}

/* ---- the choice ------------------------------------------------------------------------------------------------- */

typedef struct chooser {
    bootstrap *b;
    const results *r;
    size_t metric;
    double max_loss;
    lag_curves curves;
} chooser;

static const lag_curve *curve_of(const chooser *h, const result *c) {
    for (size_t i = 0; i < h->curves.n; i++)
        for (size_t k = 0; k < h->curves.item[i].n; k++)
            if (h->curves.item[i].point[k] == c) return &h->curves.item[i];
    return NULL;
}

/* The configuration of a ranked series at the recommended lag; itself where there is none. */
static int at_recommended_lag(chooser *h, const result *c, const result **out) {
    const lag_curve *curve = curve_of(h, c);
    lag_choice choice = {0};
    if (curve) TRY(decide_lag(h->b, curve, h->metric, &choice));
    *out = choice.recommended ? choice.recommended : c;
    return 0;
}

static int choose(chooser *h, advice *a) {
    if (!a->n) return 0;
    TRY(at_recommended_lag(h, a->ranking[0].config, &a->pick));
    bool ahead = a->n < 2 || a->pick->metric[h->metric] <= a->ranking[1].config->metric[h->metric];
    if (!ahead) a->pick = a->ranking[0].config;
    return 0;
}

static int keeps(chooser *h, const result *c, bool *out) {
    estimate e;
    TRY(bootstrap_estimate(h->b, c, h->metric, &e));
    *out = (isnan(e.hi) ? e.value : e.hi) <= h->max_loss;
    return 0;
}

/* The best policy that keeps max_loss, at its recommended lag if that does, else at its best one. */
static int choose_keeping(chooser *h, advice *a, bool *met) {
    *met = false;
    for (size_t i = 0; i < a->n && !*met; i++) {
        const result *candidate;
        TRY(at_recommended_lag(h, a->ranking[i].config, &candidate));
        TRY(keeps(h, candidate, met));
        if (!*met) TRY(keeps(h, candidate = a->ranking[i].config, met));
        if (*met) a->pick = candidate;
    }
    return 0;
}

static void find_rival(advice *a) {
    bool waits = a->pick->lag >= 0;
    a->rival_is = ADVICE_ALONE;
    for (size_t i = 0; i < a->n; i++) {
        const result *c = a->ranking[i].config;
        if (result_same_series(c, a->pick)) continue;
        bool other_kind = (c->lag >= 0) != waits;
        if (!other_kind && a->rival) continue;
        a->rival = c;
        a->rival_is = other_kind ? waits ? ADVICE_FILTER : ADVICE_WAITS : ADVICE_NEXT;
        if (other_kind) return;
    }
}

static int find_cheaper(chooser *h, advice *a) {
    double least = CHEAPER * a->pick->cost[COST_SCORE_UPDATES];
    for (size_t i = 0; i < a->n; i++) {
        const result *c = a->ranking[i].config;
        estimate d;
        double p;
        if (result_same_series(c, a->pick) || !(c->cost[COST_SCORE_UPDATES] <= least)) continue;
        TRY(bootstrap_difference(h->b, c, a->pick, h->metric, &d, &p));
        if (!(d.lo <= 0) || !(c->metric[h->metric] <= a->loss.hi)) continue;
        a->cheaper = c;
        a->cheaper_costs = d;
        least = nextafter(c->cost[COST_SCORE_UPDATES], 0); /* of equals the better one stays */
    }
    return 0;
}

/* What is known about lags: of the pick's series if it waits, else of the best that does. */
static int look_at_lags(chooser *h, advice *a) {
    const result *waits = a->pick->lag >= 0 ? a->pick : a->rival_is == ADVICE_WAITS ? a->rival : NULL;
    const lag_curve *curve = waits ? curve_of(h, waits) : NULL;
    a->has_curve = curve != NULL;
    if (!curve) return 0;
    a->first_lag = curve->point[0]->lag;
    a->last_lag = curve->point[curve->n - 1]->lag;
    TRY(decide_lag(h->b, curve, h->metric, &a->lag));
    return decide_knee(h->b, curve, h->metric, &a->knee);
}

static int fill(chooser *h, advice *a) {
    if (!a->pick) return 0;
    TRY(bootstrap_estimate(h->b, a->pick, h->metric, &a->loss));
    find_rival(a);
    if (a->rival) TRY(bootstrap_difference(h->b, a->rival, a->pick, h->metric, &a->over, &a->p));
    TRY(find_cheaper(h, a));
    return look_at_lags(h, a);
}

static int advise_all(chooser *h, advice_list *out) {
    const results *r = h->r;
    out->main = isnan(h->max_loss) || !r->n_budgets ? r->n_budgets / 2 : r->n_budgets - 1;
    for (size_t i = 0; i < r->n_budgets; i++) {
        advice *a = &out->item[out->n++];
        bool met = false;
        a->budget = &r->budgets[i];
        a->p = NAN;
        TRY(decide_ranking(h->b, r, a->budget->asked, h->metric, false, &a->ranking, &a->n));
        TRY(choose(h, a));
        if (!isnan(h->max_loss) && !out->met) TRY(choose_keeping(h, a, &met));
        if (met) out->main = i;
        out->met |= met;
        TRY(fill(h, a));
    }
    return 0;
}

/* Between two budgets: what the loss that was asked for takes of memory. */
static int interpolate(chooser *h, advice_list *out) {
    const result *pick = out->n ? out->item[out->main].pick : NULL;
    memory_curves all;
    out->measure = memory_pick_measure(h->r);
    out->memory = (estimate){NAN, NAN, NAN};
    if (isnan(h->max_loss) || !pick) return 0;
    int code = memory_curves_find(h->r, h->metric, &all);
    for (size_t i = 0; i < all.n && !code; i++)
        if (result_same_series(all.item[i].point[0], pick))
            code = memory_at_loss(h->b, &all.item[i], h->max_loss, &out->memory);
    if (isinf(out->memory.value)) out->memory.value = NAN;
    memory_curves_free(&all);
    return code;
}

static const char *why_no_resamples(bootstrap *b, const evidence *e, const results *r, size_t metric, int *code) {
    const double *x = NULL;
    for (size_t i = 0; i < r->n_configs && !*code && !x; i++)
        *code = bootstrap_replicates(b, &r->configs[i], metric, &x);
    if (x) return NULL;
    if (!e) return "no FILE.blocks.h5 stands beside the results, and there are fewer than 5 sequences";
    return "this metric has no sums over blocks of steps, and there are fewer than 5 sequences";
}

int advice_make(bootstrap *b, const evidence *e, const results *r, size_t metric, double max_loss, advice_list *out) {
    chooser h = {.b = b, .r = r, .metric = metric, .max_loss = max_loss};
    int code = 0;
    *out = (advice_list){.metric = metric, .max_loss = max_loss, .results = r, .whole = bootstrap_over_sequences(b)};
    out->item = mem_new(r->n_budgets + 1, sizeof *out->item, "advice");
    if (!out->item) return ERR_DATA;
    out->why_not = why_no_resamples(b, e, r, metric, &code);
    if (!code) code = lag_curves_find(r, metric, &h.curves);
    if (!code) code = advise_all(&h, out);
    if (!code) code = interpolate(&h, out);
    lag_curves_free(&h.curves);
    return code;
}

void advice_free(advice_list *list) {
    for (size_t i = 0; i < list->n; i++) mem_free(list->item[i].ranking);
    mem_free(list->item);
    *list = (advice_list){0};
}

/* ---- words ------------------------------------------------------------------------------------------------------ */

/* What stands around the number of a metric. */
static const struct {
    const char *before, *after;
} metric_words[RESULTS_METRICS] = {
    [DLOSS_EST] = {"it costs ", " nats/token"},       [KL_EST] = {"its KL to the full cache is ", " nats/token"},
    [OUT_ERR] = {"its output error is ", ""},         [LOST_MASS] = {"its lost attention mass is ", ""},
    [DLOSS_FIRST] = {"it costs ", " to first order"}, [FISHER] = {"its Fisher term is ", " nats/token"},
};

static bool has_interval(estimate e) {
    return !isnan(e.lo);
}

static bool holds_zero(estimate e) {
    return e.lo <= 0 && e.hi >= 0;
}

static bool is_uncalibrated(const advice_list *l) {
    return l->results->uncalibrated && (l->metric == DLOSS_EST || l->metric == KL_EST);
}

static int add_scope(const advice_list *l, text *t) {
    size_t n = l->results->n_sequences;
    if (l->whole) return text_add(t, "For texts like these %zu, ", n);
    return n == 1 ? text_add(t, "For this text, ") : text_add(t, "For these %zu texts, ", n);
}

static int add_budget(const advice_list *l, const advice *a, text *t) {
    bool main = a == &l->item[l->main];
    if (isnan(l->max_loss) || !main) {
        if (main) TRY(add_scope(l, t));
        TRY(text_add(t, main ? "at a budget of " : "At a budget of "));
        return advice_budget_name(a->budget, t);
    }
    if (!l->met) TRY(text_add(t, "No budget that was priced keeps the loss at %g or less. ", l->max_loss));
    TRY(add_scope(l, t));
    if (l->met) TRY(text_add(t, "to lose at most %g, take a budget of ", l->max_loss));
    else TRY(text_add(t, "at the largest one, "));
    return advice_budget_name(a->budget, t);
}

/* ": it costs 0.031 nats/token (90 % interval 0.022 to 0.043; uncalibrated)". */
static int add_loss(const advice_list *l, const advice *a, text *t) {
    TRY(text_add(t, "%s", metric_words[l->metric].before));
    TRY(advice_value(t, a->loss));
    TRY(text_add(t, "%s", metric_words[l->metric].after));
    const char *open = " (";
    if (has_interval(a->loss)) {
        TRY(text_add(t, " (90 %% interval "));
        TRY(advice_interval(t, a->loss));
        open = "; ";
    }
    if (is_uncalibrated(l)) TRY(text_add(t, "%suncalibrated", open));
    return has_interval(a->loss) || is_uncalibrated(l) ? text_add(t, ")") : 0;
}

static estimate negative(estimate e) {
    return (estimate){-e.value, -e.hi, -e.lo};
}

/* "0.012 less", for what something else costs more. */
static int add_amount(estimate d, text *t) {
    TRY(advice_value(t, d.value < 0 ? negative(d) : d));
    return text_add(t, " %s", d.value < 0 ? "more" : "less");
}

static int add_rival(const advice_list *l, const advice *a, text *t) {
    static const char *const who[] = {[ADVICE_ALONE] = "",
                                      [ADVICE_FILTER] = ", the best policy that does not wait",
                                      [ADVICE_WAITS] = ", the best policy that waits",
                                      [ADVICE_NEXT] = ", the next best"};
    if (!a->rival) return text_add(t, "; no other policy was priced there");
    bool tie = has_interval(a->over) && holds_zero(a->over);
    if (tie) {
        TRY(text_add(t, ", and cannot be told apart from "));
        TRY(advice_name(l->results, a->rival, t));
        TRY(text_add(t, "%s (", who[a->rival_is]));
        TRY(add_amount(a->over, t));
        TRY(text_add(t, ", "));
    } else {
        TRY(text_add(t, ", "));
        TRY(add_amount(a->over, t));
        TRY(text_add(t, " than "));
        TRY(advice_name(l->results, a->rival, t));
        TRY(text_add(t, "%s", who[a->rival_is]));
        if (!has_interval(a->over)) return 0;
        TRY(text_add(t, " ("));
    }
    TRY(advice_interval(t, a->over.value < 0 ? negative(a->over) : a->over));
    TRY(text_add(t, ", "));
    TRY(advice_p(t, "p ", "= ", a->p));
    return text_add(t, ")");
}

static int add_knee(const advice *a, text *t) {
    if (!a->knee.found) return text_add(t, "there is no knee (%s)", a->knee.why);
    TRY(text_add(t, "the knee is at lag %.10g", a->knee.at->lag));
    if (a->knee.lag_lo == a->knee.lag_hi) return 0;
    return text_add(t, " (%.10g to %.10g)", a->knee.lag_lo, a->knee.lag_hi);
}

/* The pick waits: is a longer or a shorter lag worth anything? */
static int add_own_lags(const advice *a, text *t) {
    double pick = a->pick->lag, best = a->lag.best->lag, recommended = a->lag.recommended->lag;
    if (recommended == 0 && pick == 0) {
        TRY(text_add(t, " Waiting brings nothing that these data can show; "));
    } else if (pick == recommended && pick < best) {
        TRY(text_add(t, " Waiting longer brings nothing that these data can show (lag %.10g: ", best));
        TRY(add_amount(a->lag.excess, t));
        TRY(text_add(t, ", "));
        TRY(advice_interval(t, a->lag.excess));
        TRY(text_add(t, "); "));
    } else if (pick > recommended) {
        TRY(text_add(t, " The lag is not settled: with this many compared, lag %.10g is not ruled out (", recommended));
        TRY(add_amount(negative(a->lag.excess), t));
        TRY(text_add(t, ", "));
        TRY(advice_interval(t, a->lag.excess));
        TRY(text_add(t, "); "));
    } else if (best == a->last_lag) {
        TRY(text_add(t, " The loss still falls at the longest lag that was tried; "));
    } else {
        TRY(text_add(t, " Shorter lags cost more, and longer ones bring nothing; "));
    }
    TRY(add_knee(a, t));
    return text_add(t, ".");
}

static int add_others_lags(const advice_list *l, const advice *a, text *t) {
    bool tie = holds_zero(a->over);
    TRY(text_add(t, tie ? " These data do not show that waiting pays" : " Waiting does not pay at this budget"));
    if (!a->has_curve) return text_add(t, ".");
    char *name = result_series_name(l->results, a->rival);
    int code = name ? text_add(t, "; of the lags of %s, %.10g is the shortest that is no worse than its best, and ",
                               name, a->lag.recommended->lag)
                    : ERR_DATA;
    mem_free(name);
    if (!code) code = add_knee(a, t);
    return code ? code : text_add(t, ".");
}

static int add_lags(const advice_list *l, const advice *a, text *t) {
    bool known = !a->has_curve || a->lag.recommended;
    if (a->pick->lag >= 0 && a->has_curve && known) return add_own_lags(a, t);
    if (a->pick->lag >= 0) return known ? text_add(t, " No other lag of it was priced.") : 0;
    if (a->rival_is == ADVICE_WAITS) return known && has_interval(a->over) ? add_others_lags(l, a, t) : 0;
    return text_add(t, " No policy that waits was priced at this budget.");
}

static int add_cheaper(const advice_list *l, const advice *a, text *t) {
    if (!a->cheaper) return 0;
    TRY(text_add(t, " The cheapest to run that these data cannot tell apart from it is "));
    TRY(advice_name(l->results, a->cheaper, t));
    TRY(text_add(t, " ("));
    TRY(add_amount(negative(a->cheaper_costs), t));
    TRY(text_add(t, ", "));
    TRY(advice_interval(t, a->cheaper_costs.value < 0 ? negative(a->cheaper_costs) : a->cheaper_costs));
    return text_add(t, "): it updates %.3g scores a step instead of %.3g.", a->cheaper->cost[COST_SCORE_UPDATES],
                    a->pick->cost[COST_SCORE_UPDATES]);
}

static int add_interpolated(const advice_list *l, const advice *a, text *t) {
    double priced = memory_of(a->pick, l->measure);
    if (isnan(l->memory.value) || fabs(l->memory.value - priced) < 0.01 * priced) return 0;
    char *name = result_series_name(l->results, a->pick);
    int code = name ? text_add(t, " By interpolation %s%s loses %g at ", name,
                               a->pick->lag >= 0 ? ", at its best lags," : "", l->max_loss)
                    : ERR_DATA;
    mem_free(name);
    if (!code) code = memory_add_words(t, l->measure, l->memory.value);
    return code ? code : text_add(t, ".");
}

int advice_words(const advice_list *l, size_t i, text *t) {
    const advice *a = &l->item[i];
    TRY(add_budget(l, a, t));
    if (!a->pick) return text_add(t, ": nothing to recommend, since no policy but oracles has a value there.");
    bool bounded = l->met && i == l->main;
    TRY(text_add(t, bounded ? " and " : l->why_not ? ", the lowest estimate is that of " : ", use "));
    TRY(advice_name(l->results, a->pick, t));
    TRY(text_add(t, ": "));
    TRY(add_loss(l, a, t));
    TRY(add_rival(l, a, t));
    TRY(text_add(t, "."));
    if (i != l->main) return 0;
    TRY(add_interpolated(l, a, t));
    if (l->why_not) TRY(text_add(t, " There are no intervals, so these differences may be chance: %s.", l->why_not));
    TRY(add_lags(l, a, t));
    return add_cheaper(l, a, t);
}
