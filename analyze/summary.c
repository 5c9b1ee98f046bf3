/* summary.json: what the report says, for programs (docs/report.md). */
#include "analyze/memory.h"
#include "analyze/report_content.h"
#include "base/err.h"
#include "base/mem.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_LOSSES = 8 };

typedef struct summary {
    const report_input *in;
    const results *r;
    bootstrap *b;
    size_t metric;
    const char *no_interval; /* why there are none; NULL where there are */
} summary;

/* ---- values ----------------------------------------------------------------------------------------------------- */

static int out_of_memory(void) {
    return err_set(ERR_DATA, "out of memory for summary.json");
}

/* Hand `item` to the object; NULL is a lack of memory. */
static int put(cJSON *object, const char *key, cJSON *item) {
    if (item && cJSON_AddItemToObject(object, key, item)) return 0;
    cJSON_Delete(item);
    return out_of_memory();
}

static int push(cJSON *array, cJSON *item) {
    if (item && cJSON_AddItemToArray(array, item)) return 0;
    cJSON_Delete(item);
    return out_of_memory();
}

/* JSON has no infinity and no NaN. */
static cJSON *number(double value) {
    return isfinite(value) ? cJSON_CreateNumber(value) : cJSON_CreateNull();
}

static cJSON *string_or_null(const char *words) {
    return words ? cJSON_CreateString(words) : cJSON_CreateNull();
}

static int put_number(cJSON *to, const char *key, double value) {
    return put(to, key, number(value));
}

static int put_string(cJSON *to, const char *key, const char *words) {
    return put(to, key, string_or_null(words));
}

static int put_new(cJSON *to, const char *key, bool array, cJSON **out) {
    *out = array ? cJSON_CreateArray() : cJSON_CreateObject();
    return put(to, key, *out);
}

static int push_new(cJSON *to, cJSON **out) {
    *out = cJSON_CreateObject();
    return push(to, *out);
}

/* {"value", "lo", "hi"}, and "why" where one of them is null. */
static int put_estimate(const summary *s, cJSON *to, const char *key, estimate e, const char *why) {
    cJSON *o;
    TRY(put_new(to, key, false, &o));
    TRY(put_number(o, "value", e.value));
    TRY(put_number(o, "lo", e.lo));
    TRY(put_number(o, "hi", e.hi));
    if (isfinite(e.value) && isfinite(e.lo) && isfinite(e.hi)) return 0;
    return put_string(o, "why", why ? why : s->no_interval ? s->no_interval : "not available");
}

/* A number that may be missing, and then why. */
static int put_maybe(cJSON *to, const char *key, double value, const char *why) {
    TRY(put_number(to, key, value));
    if (isfinite(value)) return 0;
    char name[64];
    snprintf(name, sizeof name, "%s_why", key);
    return put_string(to, name, why);
}

static int put_config(const summary *s, cJSON *to, const char *key, const result *c) {
    cJSON *o;
    estimate e;
    if (!c) return put(to, key, cJSON_CreateNull());
    TRY(put_new(to, key, false, &o));
    char *name = result_series_name(s->r, c);
    int code = name ? put_string(o, "name", name) : ERR_DATA;
    mem_free(name);
    TRY(code);
    TRY(put_string(o, "policy", c->policy));
    TRY(put_string(o, "spec", c->spec));
    TRY(put_string(o, "budget_asked", c->budget_asked));
    TRY(put_number(o, "budget", c->budget));
    TRY(put_maybe(o, "lag", c->lag < 0 ? NAN : c->lag, "the policy has no lag"));
    TRY(put_string(o, "unit", c->unit));
    TRY(put_string(o, "schedule", c->schedule));
    TRY(put_string(o, "pending", c->pending));
    TRY(put_string(o, "kv_bits", c->kv_bits));
    TRY(put_string(o, "pending_bits", c->pending_bits));
    for (size_t i = 0; i < s->in->in->n_metrics; i++) {
        size_t m = s->in->in->metrics[i];
        TRY(bootstrap_estimate(s->b, c, m, &e));
        TRY(put_estimate(s, o, results_metrics[m].column, e, NULL));
    }
    for (size_t i = 0; i < RESULTS_COSTS; i++)
        TRY(put_maybe(o, results_costs[i], c->cost[i], "the results do not have it"));
    return 0;
}

/* ---- the choice ------------------------------------------------------------------------------------------------- */

static int put_words(const summary *s, cJSON *to, size_t i) {
    text words = {0};
    int code = advice_words(s->in->advice, i, &words);
    if (!code) code = put_string(to, "words", words.data);
    text_free(&words);
    return code;
}

static int put_ranking(const summary *s, cJSON *to, const char *key, const ranked *list, size_t n, bool oracles) {
    cJSON *array, *o;
    TRY(put_new(to, key, true, &array));
    for (size_t i = 0; i < n; i++) {
        if (result_is_oracle(list[i].config) != oracles) continue;
        TRY(push_new(array, &o));
        TRY(put_config(s, o, "config", list[i].config));
        if (oracles) continue;
        TRY(put_number(o, "rank", (double)list[i].rank));
        TRY(put_estimate(s, o, "behind", list[i].behind, i ? NULL : "the first is behind nobody"));
        TRY(put_maybe(o, "p", list[i].p, i ? s->no_interval : "the first is behind nobody"));
    }
    return 0;
}

static int put_bounds(const summary *s, cJSON *to, const advice *a) {
    ranked *all;
    size_t n;
    TRY(decide_ranking(s->b, s->r, a->budget->asked, s->metric, true, &all, &n));
    int code = put_ranking(s, to, "bounds", all, n, true);
    mem_free(all);
    return code;
}

static int put_rival(const summary *s, cJSON *to, const advice *a) {
    static const char *const kinds[] = {[ADVICE_ALONE] = "none",
                                        [ADVICE_FILTER] = "best without a lag",
                                        [ADVICE_WAITS] = "best with a lag",
                                        [ADVICE_NEXT] = "next best"};
    TRY(put_config(s, to, "rival", a->rival));
    TRY(put_string(to, "rival_is", kinds[a->rival_is]));
    if (!a->rival) return 0;
    TRY(put_estimate(s, to, "rival_costs_more", a->over, NULL));
    return put_maybe(to, "p", a->p, s->no_interval);
}

static int put_advice(const summary *s, cJSON *to, size_t i) {
    const advice *a = &s->in->advice->item[i];
    TRY(put_words(s, to, i));
    TRY(put_string(to, "budget_asked", a->budget->asked));
    TRY(put_number(to, "budget", a->budget->entries));
    TRY(put_config(s, to, "use", a->pick));
    if (!a->pick) return put_string(to, "use_why", "no policy but oracles has a value at this budget");
    TRY(put_rival(s, to, a));
    TRY(put_config(s, to, "cheaper_to_run", a->cheaper));
    return a->cheaper ? put_estimate(s, to, "cheaper_to_run_costs_more", a->cheaper_costs, NULL) : 0;
}

static int put_budgets(const summary *s, cJSON *root) {
    cJSON *array, *o;
    TRY(put_new(root, "budgets", true, &array));
    for (size_t i = 0; i < s->in->advice->n; i++) {
        const advice *a = &s->in->advice->item[i];
        TRY(push_new(array, &o));
        TRY(put_advice(s, o, i));
        TRY(put_ranking(s, o, "ranking", a->ranking, a->n, false));
        TRY(put_bounds(s, o, a));
    }
    return 0;
}

/* ---- curves ----------------------------------------------------------------------------------------------------- */

static int put_knee(const summary *s, cJSON *to, const knee *k) {
    cJSON *o;
    TRY(put_new(to, "knee", false, &o));
    TRY(put_maybe(o, "lag", k->found ? k->at->lag : NAN, k->why));
    TRY(put_number(o, "lo", k->lag_lo));
    TRY(put_number(o, "hi", k->lag_hi));
    return put_estimate(s, o, "depth", k->depth, k->why);
}

static int put_gain(const summary *s, cJSON *array, const gain *g) {
    cJSON *o;
    TRY(push_new(array, &o));
    TRY(put_config(s, o, "config", g->at));
    TRY(put_estimate(s, o, "gain", g->gain, isnan(g->gain.value) ? "no lag 0" : NULL));
    TRY(put_maybe(o, "p", g->p, isnan(g->gain.value) ? "no lag 0" : s->no_interval));
    TRY(put_estimate(s, o, "less_than_best_without_lag", g->over_filter,
                     g->filter ? NULL : "no policy without a lag at this budget"));
    return put_estimate(s, o, "closed_share", g->closed, g->closed_why);
}

static int put_curve(const summary *s, cJSON *array, const lag_curve *c) {
    cJSON *o, *points;
    lag_choice choice;
    knee k;
    gain *g;
    TRY(push_new(array, &o));
    char *name = result_series_name(s->r, c->point[0]);
    int code = name ? put_string(o, "name", name) : ERR_DATA;
    mem_free(name);
    TRY(code);
    TRY(put_string(o, "budget_asked", c->point[0]->budget_asked));
    TRY(put_string(o, "pending", c->point[0]->pending));
    TRY(put(o, "is_bound", cJSON_CreateBool(result_is_oracle(c->point[0]))));
    TRY(decide_lag(s->b, c, s->metric, &choice));
    TRY(decide_knee(s->b, c, s->metric, &k));
    TRY(put_number(o, "best_lag", choice.best->lag));
    TRY(put_maybe(o, "recommended_lag", choice.recommended ? choice.recommended->lag : NAN, s->no_interval));
    TRY(put_estimate(s, o, "recommended_costs_more_than_best", choice.excess, NULL));
    TRY(put_knee(s, o, &k));
    TRY(put_new(o, "points", true, &points));
    TRY(decide_gains(s->b, s->r, c, s->metric, &g));
    for (size_t i = 0; i < c->n && !code; i++) code = put_gain(s, points, &g[i]);
    mem_free(g);
    return code;
}

static int put_curves(const summary *s, cJSON *root) {
    cJSON *array;
    lag_curves curves;
    TRY(put_new(root, "curves", true, &array));
    int code = lag_curves_find(s->r, s->metric, &curves);
    for (size_t i = 0; i < curves.n && !code; i++) code = put_curve(s, array, &curves.item[i]);
    lag_curves_free(&curves);
    return code;
}

/* ---- memory ----------------------------------------------------------------------------------------------------- */

static int put_at_loss(const summary *s, cJSON *array, const memory_curve *c, const memory_curve *reference,
                       double loss) {
    static const char outside[] = "beyond the memory that was run, or no resamples";
    cJSON *o;
    estimate e;
    TRY(push_new(array, &o));
    char *name = result_series_name(s->r, c->point[0]);
    int code = name ? put_string(o, "name", name) : ERR_DATA;
    mem_free(name);
    TRY(code);
    TRY(put_number(o, "loss", loss));
    TRY(memory_at_loss(s->b, c, loss, &e));
    TRY(put_estimate(s, o, "memory", e, outside));
    if (!reference) return 0;
    TRY(memory_share(s->b, c, reference, loss, &e));
    return put_estimate(s, o, "share_of_reference", e, outside);
}

static int put_equal_loss(const summary *s, cJSON *memory, const memory_curves *all) {
    cJSON *array;
    double loss[MOST_LOSSES];
    const memory_curve *reference = NULL;
    TRY(memory_find_reference(s->r, all, NULL, &reference));
    char *name = reference ? result_series_name(s->r, reference->point[0]) : NULL;
    int code = reference && !name ? ERR_DATA : put_string(memory, "reference", name);
    mem_free(name);
    TRY(code);
    TRY(put_new(memory, "at_equal_loss", true, &array));
    size_t n = memory_round_losses(all, MOST_LOSSES, loss);
    for (size_t k = 0; k < n; k++)
        for (size_t i = 0; i < all->n; i++) TRY(put_at_loss(s, array, &all->item[i], reference, loss[k]));
    return 0;
}

static int put_front(const summary *s, cJSON *memory, memory_measure measure) {
    cJSON *array, *o;
    double *cost = mem_new(s->r->n_configs + 1, sizeof *cost, "costs");
    const result **front = NULL;
    size_t n = 0;
    if (!cost) return ERR_DATA;
    for (size_t i = 0; i < s->r->n_configs; i++)
        cost[i] = memory_is_real(&s->r->configs[i]) ? memory_of(&s->r->configs[i], measure) : NAN;
    int code = memory_pareto(s->r, cost, s->metric, &front, &n);
    mem_free(cost);
    if (!code) code = put_new(memory, "pareto", true, &array);
    for (size_t i = 0; i < n && !code; i++) {
        code = push_new(array, &o);
        if (!code) code = put_number(o, "memory", memory_of(front[i], measure));
        if (!code) code = put_config(s, o, "config", front[i]);
    }
    mem_free(front);
    return code;
}

static int put_memory(const summary *s, cJSON *root) {
    cJSON *memory;
    memory_curves all;
    memory_measure measure = memory_pick_measure(s->r);
    TRY(put_new(root, "memory", false, &memory));
    TRY(put_string(memory, "measure", measure == MEMORY_KV_BYTES ? "kv_bytes" : "entries"));
    int code = memory_curves_find(s->r, s->metric, &all);
    if (!code) code = put_equal_loss(s, memory, &all);
    if (!code) code = put_front(s, memory, measure);
    memory_curves_free(&all);
    return code;
}

/* ---- the rest --------------------------------------------------------------------------------------------------- */

static int put_truths(const summary *s, cJSON *root) {
    cJSON *array, *o;
    TRY(put_new(root, "truths", true, &array));
    for (size_t i = 0; i < s->in->in->fidelity->n; i++) {
        const fidelity *f = &s->in->in->fidelity->item[i];
        fidelity_correlation c;
        fidelity_ratio ratio;
        fidelity_coverage held = fidelity_cover(f, KL_EST, FIDELITY_LEAST_KL);
        TRY(fidelity_correlate(f, KL_EST, &c));
        TRY(fidelity_compare(f, KL_EST, FIDELITY_ALL, &ratio));
        TRY(push_new(array, &o));
        TRY(put_string(o, "mode", f->mode));
        TRY(put_number(o, "reruns", (double)f->n));
        TRY(put_maybe(o, "kl_spearman", c.kl_spearman, "too few reruns with an estimate"));
        TRY(put_maybe(o, "true_kl_over_kl_est", ratio.scale, "too few reruns with an estimate"));
        TRY(put_maybe(o, "spread", ratio.spread, "too few reruns with an estimate"));
        TRY(put_number(o, "intervals_that_hold", (double)held.held));
        TRY(put_number(o, "intervals", (double)held.n));
    }
    return 0;
}

static int put_lines(cJSON *to, const char *key, const char *line) {
    cJSON *array;
    TRY(put_new(to, key, true, &array));
    for (; line && *line; line += strcspn(line, "\n") + 1) {
        char *words = mem_string_n(line, strcspn(line, "\n"));
        int code = words ? push(array, cJSON_CreateString(words)) : ERR_DATA;
        mem_free(words);
        TRY(code);
    }
    return 0;
}

static int put_files(const summary *s, cJSON *root) {
    cJSON *array, *o;
    TRY(put_new(root, "files", true, &array));
    for (size_t i = 0; i < s->in->files->n; i++) {
        const provenance_file *f = &s->in->files->item[i];
        TRY(push_new(array, &o));
        TRY(put_string(o, "name", text_base_name(f->path)));
        TRY(put_string(o, "role", f->role));
        TRY(put_string(o, "xxh3_128", f->hash));
        TRY(put_lines(o, "comments", f->comments.data));
    }
    return 0;
}

static int put_figures(const summary *s, cJSON *root) {
    cJSON *array, *o;
    TRY(put_new(root, "figures", true, &array));
    for (size_t i = 0; i < s->in->n_pictures; i++) {
        const report_picture *p = &s->in->picture[i];
        TRY(push_new(array, &o));
        TRY(put_string(o, "name", p->figure->name));
        TRY(put_string(o, "kind", p->kind->name));
        TRY(put_string(o, "file", p->link.data));
        if (!p->link.n) TRY(put_string(o, "file_why", "only inside report.html"));
    }
    return 0;
}

static int put_settings(const summary *s, cJSON *root) {
    const advice_list *a = s->in->advice;
    TRY(put_string(root, "format", "kvlag-summary"));
    TRY(put_number(root, "version", 1));
    TRY(put_string(root, "kvlag", KVLAG_VERSION));
    TRY(put_string(root, "command", s->in->command));
    TRY(put_number(root, "sequences", (double)s->r->n_sequences));
    TRY(put(root, "calibrated", cJSON_CreateBool(!s->r->uncalibrated)));
    TRY(put_number(root, "level", BOOTSTRAP_LEVEL));
    TRY(put_number(root, "resamples", s->no_interval ? 0 : BOOTSTRAP_RESAMPLES));
    TRY(put_string(root, "resampled", s->no_interval ? NULL : a->whole ? "sequences" : "blocks"));
    return s->no_interval ? put_string(root, "resampled_why", s->no_interval) : 0;
}

static int put_decisions(const summary *s, cJSON *root) {
    const advice_list *a = s->in->advice;
    cJSON *o;
    TRY(put_string(root, "metric", results_metrics[s->metric].column));
    TRY(put_string(root, "metric_name", results_metrics[s->metric].axis));
    TRY(put_maybe(root, "max_loss", a->max_loss, "not asked"));
    if (!isnan(a->max_loss)) TRY(put(root, "max_loss_met", cJSON_CreateBool(a->met)));
    if (!isnan(a->max_loss))
        TRY(put_estimate(s, root, "max_loss_memory", a->memory, "not between the budgets that were priced"));
    TRY(put_new(root, "recommendation", false, &o));
    if (a->n) TRY(put_advice(s, o, a->main));
    TRY(put_budgets(s, root));
    TRY(put_curves(s, root));
    return put_memory(s, root);
}

static int fill(const summary *s, cJSON *root) {
    TRY(put_settings(s, root));
    if (s->in->advice) TRY(put_decisions(s, root));
    TRY(put_truths(s, root));
    TRY(put_figures(s, root));
    return put_files(s, root);
}

int summary_write(const report_input *in, text *out) {
    summary s = {.in = in,
                 .r = in->in->results,
                 .b = in->in->bootstrap,
                 .metric = in->advice ? in->advice->metric : 0,
                 .no_interval = in->advice ? in->advice->why_not : "nothing to decide: no metric has a value"};
    cJSON *root = cJSON_CreateObject();
    int code = root ? fill(&s, root) : out_of_memory();
    char *json = code ? NULL : cJSON_Print(root);
    if (!code && !json) code = out_of_memory();
    if (!code) code = text_add(out, "%s\n", json);
    free(json);
    cJSON_Delete(root);
    return code;
}
