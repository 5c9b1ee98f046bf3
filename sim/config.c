#include "sim/config.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/progress.h"
#include "sim/policies/mix.h"
#include "sim/policy_check.h"
#include "sim/registry.h"
#include "sim/spec.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LIST_MAX = 256, ASKS_MAX = 10000 };

static const char *const default_specs[] = {
    "full",         "window",       "streaming", "random", "lru", "ema", "h2o", "tova", "rmm", "oracle(mass,hold=lag)",
    "oracle(mass)", "oracle(loss)",
};
static const char default_budgets[] = "10%,25%,50%", default_lags[] = "0:64:x2";

typedef struct text_list {
    char item[LIST_MAX][POLICY_TEXT_MAX];
    size_t n;
} text_list;

static int push(text_list *list, const char *option, const char *item) {
    if (list->n == LIST_MAX) return err_set(ERR_USAGE, "%s: more than %d values", option, LIST_MAX);
    snprintf(list->item[list->n++], POLICY_TEXT_MAX, "%s", item);
    return 0;
}

/* Call `one` for each comma-separated item, blanks around it removed. */
static int each_item(const char *option, const char *source, int (*one)(text_list *, const char *), text_list *out) {
    char item[POLICY_TEXT_MAX];
    for (const char *s = source;; s++) {
        s += strspn(s, " ");
        size_t whole = strcspn(s, ","), n = whole;
        while (n && s[n - 1] == ' ') n--;
        if (n == 0) return err_set(ERR_USAGE, "%s '%s': empty item", option, source);
        if (n >= sizeof item) return err_set(ERR_USAGE, "%s: an item is too long", option);
        snprintf(item, sizeof item, "%.*s", (int)n, s);
        TRY(one(out, item));
        s += whole;
        if (!*s) return 0;
    }
}

/* ---- budgets ---------------------------------------------------------------------------------------------------- */

static int add_budget(text_list *out, const char *item) {
    char number[POLICY_TEXT_MAX], shortest[32], canonical[POLICY_TEXT_MAX];
    size_t n = strlen(item);
    bool share = item[n - 1] == '%';
    snprintf(number, sizeof number, "%.*s", (int)(n - share), item);
    double x;
    if (text_parse_number(number, &x) != 0 || (!share && x != floor(x)))
        return err_set(ERR_USAGE, "-b '%s': want tokens (64) or a share (25%%)", item);
    if (share && !(x > 0 && x <= 100))
        return err_set(ERR_USAGE, "-b '%s': a share is above 0%% and at most 100%%", item);
    if (!share && !(x >= 1 && x <= 1e9)) return err_set(ERR_USAGE, "-b '%s': a budget is 1 to 1e9 tokens", item);
    snprintf(canonical, sizeof canonical, "%s%s",
             share ? text_number(shortest, x) : (snprintf(shortest, 32, "%.0f", x), shortest), share ? "%" : "");
    return push(out, "-b", canonical);
}

static int32_t budget_tokens(const char *asked, int32_t n_tokens) {
    double x = strtod(asked, NULL);
    if (asked[strlen(asked) - 1] == '%') x = fmax(1, floor(x * n_tokens / 100 + 1e-9));
    return (int32_t)x;
}

/* ---- lags ------------------------------------------------------------------------------------------------------- */

static const policy_param lag_param = {.name = "lag", .type = PARAM_COUNT, .max = 1e9};

static int add_range(text_list *out, const char *item) {
    double from, to, step;
    char a[POLICY_TEXT_MAX], b[POLICY_TEXT_MAX], c[POLICY_TEXT_MAX], one[POLICY_TEXT_MAX];
    bool times;
    int used = 0;
    if (sscanf(item, "%63[^:]:%63[^:]:%63[^:]%n", a, b, c, &used) != 3 || item[used])
        return err_set(ERR_USAGE, "-L '%s': want FROM:TO:STEP or FROM:TO:xFACTOR", item);
    times = c[0] == 'x';
    if (text_parse_number(a, &from) || text_parse_number(b, &to) || text_parse_number(c + times, &step) || from < 0 ||
        to < from || to > 1e9 || from != floor(from) || to != floor(to) ||
        !(times ? step > 1 : step >= 1 && step == floor(step)))
        return err_set(ERR_USAGE, "-L '%s': want whole numbers FROM <= TO and STEP >= 1 or xFACTOR > x1", item);
    for (double x = from; x <= to;) {
        snprintf(one, sizeof one, "%.0f", floor(x));
        TRY(push(out, "-L", one));
        if (!times) x += step;
        else x = x < 1 ? 1 : fmax(floor(x * step), floor(x) + 1);
    }
    return 0;
}

static int add_lag(text_list *out, const char *item) {
    char canonical[POLICY_TEXT_MAX];
    if (strchr(item, ':')) return add_range(out, item);
    int code = spec_canonical(&lag_param, item, canonical);
    return code ? err_prefix(code, "-L") : push(out, "-L", canonical);
}

/* ---- asks ------------------------------------------------------------------------------------------------------- */

static int param_index(const policy *p, const char *name) {
    for (int i = 0; p->params[i].name; i++)
        if (strcmp(p->params[i].name, name) == 0) return i;
    return -1;
}

static const char *ask_text(const sim_ask *ask, const char *name) {
    int i = param_index(ask->policy, name);
    return i < 0 ? "" : ask->param[i];
}

/* Does anything in it wait for the lag? */
static bool uses_lag(const sim_ask *ask) {
    if (ask->policy->memory && strstr(ask->policy->memory, ":lag")) return true;
    for (int i = 0; ask->policy->params[i].name; i++) {
        const char *value = ask->param[i], *colon = strchr(value, ':');
        if (strcmp(value, "lag") == 0 || (colon && strcmp(colon, ":lag") == 0)) return true;
    }
    return false;
}

/* Budgets, lags and flags of one sim_asks_build call, parsed. */
typedef struct grid {
    const sim_flags *flags;
    text_list *budgets, *lags;
    bool is_default;
    sim_asks *out;
} grid;

static bool same_ask(const sim_ask *a, const sim_ask *b) {
    if (a->policy != b->policy || strcmp(a->budget, b->budget) != 0 || a->pending_free != b->pending_free) return false;
    for (int i = 0; a->policy->params[i].name; i++)
        if (strcmp(a->param[i], b->param[i]) != 0) return false;
    return true;
}

static int push_ask(grid *g, const sim_ask *ask) {
    for (size_t i = 0; i < g->out->n; i++)
        if (same_ask(&g->out->ask[i], ask)) return 0;
    if (g->out->n == ASKS_MAX) return err_set(ERR_USAGE, "more than %d configurations in one call", ASKS_MAX);
    TRY(mem_grow((void **)&g->out->ask, &g->out->capacity, g->out->n + 1, sizeof *ask, "configurations"));
    g->out->ask[g->out->n++] = *ask;
    return 0;
}

static int expand_pending(grid *g, sim_ask *ask) {
    bool tied = strcmp(ask_text(ask, "hold"), "lag") == 0;
    const char *pending = g->flags->pending ? g->flags->pending : "charged";
    if (g->is_default && !g->flags->pending) pending = "both";
    ask->pending_free = false;
    if (!tied || strcmp(pending, "free") != 0) TRY(push_ask(g, ask));
    if (!tied || strcmp(pending, "charged") == 0) return 0;
    ask->pending_free = true;
    return push_ask(g, ask);
}

static int expand_lags(grid *g, sim_ask *ask, bool lag_given) {
    int lag = param_index(ask->policy, "lag");
    if (lag < 0) return expand_pending(g, ask);
    if (!uses_lag(ask)) {
        if (lag_given)
            return err_set(ERR_USAGE, "%s has no lag to fix (hold=lag would give it one, or lag(L,%s))",
                           ask->policy->name, ask->policy->name);
        ask->param[lag][0] = 0;
        return expand_pending(g, ask);
    }
    if (lag_given || !g->lags->n) {
        if (!ask->param[lag][0])
            return err_set(ERR_USAGE, "%s: %s=lag needs a lag (lag=N in the spec, or -L)", ask->policy->name,
                           strcmp(ask_text(ask, "cutoff"), "lag") == 0 ? "cutoff" : "hold");
        return expand_pending(g, ask);
    }
    sim_ask one = *ask;
    if (g->lags->n > 1) one.in_grid = true;
    for (size_t i = 0; i < g->lags->n; i++) {
        snprintf(one.param[lag], POLICY_TEXT_MAX, "%s", g->lags->item[i]);
        TRY(expand_pending(g, &one));
    }
    return 0;
}

static int expand_budgets(grid *g, sim_ask *ask, bool lag_given) {
    if (!ask->policy->params[0].name) return push_ask(g, ask); /* full: no budget, no parameters */
    if (g->budgets->n > 1) ask->in_grid = true;
    for (size_t i = 0; i < g->budgets->n; i++) {
        snprintf(ask->budget, sizeof ask->budget, "%s", g->budgets->item[i]);
        TRY(expand_lags(g, ask, lag_given));
    }
    return 0;
}

/* The command-line flag that stands between a spec and a policy's default, or NULL. Parameters declared before it are
 * already in the ask. */
static const char *flag_for(const sim_flags *f, const char *param, const sim_ask *ask) {
    if (strcmp(param, "schedule") == 0) return f->schedule;
    if (strcmp(param, "unit") == 0) return f->unit;
    if (strcmp(param, "seed") != 0) return NULL;
    /* A mix draws numbers for some kinds of evidence only, rmm for one signal. */
    const char *evidence = ask_text(ask, "evidence");
    bool samples = strcmp(evidence, "attn") == 0 && strcmp(ask_text(ask, "signal"), "agrees") == 0;
    bool draws = samples || !*evidence || strcmp(evidence, "random") == 0 || strcmp(evidence, "attn*agrees") == 0;
    return draws ? f->seed : NULL;
}

/* An entry that just arrived has the smallest sum of all: without a hold it is the one that leaves. */
static void warn_of_newest(const sim_ask *ask) {
    const char *memory = ask->policy->memory ? ask->policy->memory : ask_text(ask, "memory");
    if (strcmp(memory, "sum") == 0 && strcmp(ask_text(ask, "hold"), "0") == 0)
        say("%s: with hold=0 the newest entry is always the lowest and leaves at once (hold=1 keeps it)",
            ask->policy->name);
}

/* A floor is there for units that compete, and only for them. */
static int settle_floor(const spec *s, sim_ask *ask) {
    int floor_index = param_index(s->policy, "floor");
    if (floor_index < 0 || strcmp(ask_text(ask, "share"), "none") != 0) return 0;
    if (s->param[floor_index].n)
        return err_set(ERR_USAGE, "%s: floor goes with share=layer or share=model", s->policy->name);
    ask->param[floor_index][0] = 0;
    return 0;
}

static int expand_whole(grid *g, const spec *s, sim_ask *ask) {
    int lag = param_index(s->policy, "lag");
    warn_of_newest(ask);
    TRY(settle_floor(s, ask));
    return expand_budgets(g, ask, lag >= 0 && s->param[lag].n > 0);
}

/* Lists in the spec: every combination, the first parameter outermost. */
static int expand_params(grid *g, const spec *s, int index, sim_ask *ask) {
    const policy_param *p = &s->policy->params[index];
    if (!p->name) return expand_whole(g, s, ask);
    const char *flag = flag_for(g->flags, p->name, ask);
    if (s->param[index].n == 0) {
        if (flag) TRY(spec_canonical(p, flag, ask->param[index]));
        else if (p->initial) snprintf(ask->param[index], POLICY_TEXT_MAX, "%s", p->initial);
        else return err_set(ERR_USAGE, "%s needs %s=%s", s->policy->name, p->name, p->words ? p->words : "...");
        return expand_params(g, s, index + 1, ask);
    }
    sim_ask one = *ask;
    if (s->param[index].n > 1) one.in_grid = true;
    for (size_t i = 0; i < s->param[index].n; i++) {
        snprintf(one.param[index], POLICY_TEXT_MAX, "%s", s->param[index].value[i]);
        sim_ask rest = one;
        TRY(expand_params(g, s, index + 1, &rest));
    }
    return 0;
}

static int expand_spec(grid *g, const char *source) {
    spec s;
    int code = spec_parse(source, &s);
    if (!code) {
        sim_ask *ask = mem_new(1, sizeof *ask, "configuration");
        code = ask ? 0 : ERR_DATA;
        if (ask) {
            ask->policy = s.policy;
            ask->in_grid = ask->optional = g->is_default;
            code = expand_params(g, &s, 0, ask);
        }
        mem_free(ask);
    }
    spec_free(&s);
    return code ? err_prefix(code, "-p '%.200s'", source) : 0;
}

static int expand_all(grid *g, const char *const *specs, size_t n) {
    const sim_flags *f = g->flags;
    const char *budgets = f->budgets ? f->budgets : default_budgets;
    const char *lags = f->lags ? f->lags : g->is_default ? default_lags : NULL;
    TRY(each_item("-b", budgets, add_budget, g->budgets));
    if (lags) TRY(each_item("-L", lags, add_lag, g->lags));
    if (!f->budgets) say_more("budgets: %s (-b chooses others)", default_budgets);
    if (g->is_default) {
        specs = default_specs;
        n = sizeof default_specs / sizeof *default_specs;
    }
    for (size_t i = 0; i < n; i++) TRY(expand_spec(g, specs[i]));
    return 0;
}

int sim_asks_build(const char *const *specs, size_t n, const sim_flags *flags, sim_asks *out) {
    *out = (sim_asks){0};
    grid g = {.flags = flags, .is_default = n == 0, .out = out};
    g.budgets = mem_new(2, sizeof *g.budgets, "lists");
    if (!g.budgets) return ERR_DATA;
    g.lags = g.budgets + 1;
    int code = expand_all(&g, specs, n);
    mem_free(g.budgets);
    if (code) sim_asks_free(out);
    return code;
}

void sim_asks_free(sim_asks *asks) {
    mem_free(asks->ask);
    *asks = (sim_asks){0};
}

/* ---- names ------------------------------------------------------------------------------------------------------ */

int sim_ask_spec(const sim_ask *ask, text *out) {
    int written = 0;
    TRY(text_add(out, "%s", ask->policy->name));
    for (int i = 0; ask->policy->params[i].name; i++) {
        const policy_param *p = &ask->policy->params[i];
        bool own_column = strcmp(p->name, "lag") == 0 || strcmp(p->name, "schedule") == 0;
        bool is_default = p->initial && strcmp(p->initial, ask->param[i]) == 0;
        if (own_column || is_default || !*ask->param[i]) continue;
        TRY(text_add(out, "%c", written++ ? ',' : '('));
        TRY(p->positional ? text_add(out, "%s", ask->param[i]) : text_add(out, "%s=%s", p->name, ask->param[i]));
    }
    return written ? text_add(out, ")") : 0;
}

char *sim_ask_name(const sim_ask *ask) {
    text t = {0};
    const char *lag = ask_text(ask, "lag");
    int code = sim_ask_spec(ask, &t);
    if (!code && *ask->budget) code = text_add(&t, " budget %s", ask->budget);
    if (!code && *lag) code = text_add(&t, " lag %s", lag);
    if (!code && ask->pending_free) code = text_add(&t, " pending free");
    if (!code) return t.data;
    text_free(&t);
    return NULL;
}

const char *sim_unit_name(unit_kind unit) {
    static const char *const names[] = {"head", "layer", "model"};
    return names[unit];
}

/* ---- resolving -------------------------------------------------------------------------------------------------- */

static int add_resolved(text *t, const policy_param *p, const policy_value *v, int index) {
    char number[32];
    TRY(text_add(t, "%s%s=", index ? "," : "", p->name));
    if (p->type == PARAM_COUNT && *v->text) return text_add(t, "%.0f", v->number);
    const char *colon = strchr(v->text, ':');
    if (p->type == PARAM_MEMORY && colon)
        return text_add(t, "%.*s:%s", (int)(colon - v->text), v->text, text_number(number, v->number));
    return text_add(t, "%s", v->text);
}

static int write_resolved(sim_config *c) {
    text t = {0};
    int code = text_add(&t, "%s", "");
    for (int i = 0; c->setup.policy->params[i].name && !code; i++)
        code = add_resolved(&t, &c->setup.policy->params[i], &c->setup.value[i], i);
    c->resolved = t.data;
    return code;
}

/* Values and plan of a policy from the texts of its parameters. *lag: -1 = none. */
static int set_up(const sim_ask *ask, int32_t budget, int32_t *lag, policy_setup *out) {
    const policy *p = ask->policy;
    const char *lag_text = ask_text(ask, "lag");
    *out = (policy_setup){.policy = p};
    *lag = -1;
    if (*lag_text) {
        policy_value v;
        TRY(spec_evaluate(&lag_param, lag_text, budget, -1, &v));
        *lag = (int32_t)v.number;
    }
    for (int i = 0; p->params[i].name; i++)
        TRY(spec_evaluate(&p->params[i], ask->param[i], budget, *lag, &out->value[i]));
    return policy_set_up(out);
}

/* What each look at of the future must mean the same to both. */
static bool disagree(unsigned one, unsigned other) {
    return (one & NEEDS_FUTURE) && ((one ^ (one | other)) & NEEDS_FISHER);
}

/* The policy that evicts at the prompt's end; its parameters stand in `source` (spec_canonical). */
static int resolve_prompt(const char *source, sim_config *c) {
    int32_t lag;
    spec s;
    c->prompt = mem_new(1, sizeof *c->prompt, "configuration");
    if (!c->prompt) return ERR_DATA;
    int code = spec_parse(source, &s);
    sim_ask ask = {.policy = s.policy};
    for (int i = 0; !code && s.policy->params[i].name; i++)
        snprintf(ask.param[i], POLICY_TEXT_MAX, "%s", s.param[i].n ? s.param[i].value[0] : s.policy->params[i].initial);
    if (!code) code = set_up(&ask, c->budget, &lag, &c->prompt->setup);
    spec_free(&s);
    if (code) return err_prefix(code, "prompt=%s", source);
    c->prompt->take_max = policy_get(&c->prompt->setup, "row")->word == 1;
    unsigned own = c->setup.needs, other = c->prompt->setup.needs;
    bool apart = (own & other & NEEDS_FUTURE) && c->setup.horizon != c->prompt->setup.horizon;
    if (apart || disagree(own, other) || disagree(other, own))
        return err_set(ERR_USAGE, "prompt=%s: the two policies look at different futures", source);
    c->needs |= other;
    if (c->n_prompt == 0) return err_set(ERR_USAGE, "prompt=%s needs a prompt (--prompt N)", source);
    return 0;
}

/* Residents right after an eviction. */
static int32_t schedule_target(const sim_config *c, int32_t budget) {
    if (c->pending_free) return budget;
    if (c->schedule == SCHEDULE_EVERY) return budget - (int32_t)fmin(c->schedule_argument, 1e9) + 1;
    if (c->schedule == SCHEDULE_WATERMARK) return (int32_t)floor(c->schedule_argument * budget);
    return budget;
}

/* A guard's value where the unit's budget is not the configuration's: "budget/n" goes by the unit's. */
static int32_t guard_of(const policy_setup *s, const char *name, int32_t budget) {
    const policy_value *v = policy_get(s, name);
    policy_value again;
    if (strncmp(v->text, "budget", 6) != 0 || spec_evaluate(&lag_param, v->text, budget, -1, &again) != 0)
        return (int32_t)v->number;
    return (int32_t)again.number;
}

static sim_limits limits_of(const sim_config *c, int32_t budget) {
    sim_limits l = {.budget = budget, .target = schedule_target(c, budget)};
    l.guard = l.prompt = (sim_guard){guard_of(&c->setup, "sinks", budget), guard_of(&c->setup, "hold", budget)};
    if (c->prompt) {
        l.prompt =
            (sim_guard){guard_of(&c->prompt->setup, "sinks", budget), guard_of(&c->prompt->setup, "hold", budget)};
        /* What is free of charge is not the other policy's to take. */
        if (c->pending_free && l.prompt.hold < l.guard.hold) l.prompt.hold = l.guard.hold;
    }
    if (c->share != SHARE_NONE && c->floor > 0) l.least = (int32_t)fmax(1, floor(c->floor * l.target));
    return l;
}

sim_limits sim_config_limits(const sim_config *c, int layer, int n_layer) {
    if (n_layer < 2 || c->first == c->last) return limits_of(c, c->budget);
    double step = (c->first - c->last) / (n_layer - 1);
    return limits_of(c, (int32_t)rint(c->first - layer * step)); /* half to even */
}

static int check_guard(const sim_config *c, const sim_limits *l, const sim_guard *g) {
    int64_t held = c->pending_free ? 0 : g->hold, needed = g->sinks + held;
    if (c->schedule == SCHEDULE_BLOCK) { /* blocks that touch a sink or a held entry stay whole */
        int64_t n = (int64_t)c->schedule_argument;
        needed = (g->sinks + n - 1) / n * n + held + n - 1;
    }
    if (l->target < 1)
        return err_set(ERR_USAGE, "schedule %s leaves %d entries of a budget of %d", c->schedule_text, l->target,
                       l->budget);
    if (needed > l->target)
        return err_set(ERR_USAGE, "sinks %d + hold %lld%s exceed the %d entries that schedule %s leaves", g->sinks,
                       (long long)held, c->schedule == SCHEDULE_BLOCK ? " in whole blocks" : "", l->target,
                       c->schedule_text);
    return 0;
}

static int check_limits(const sim_config *c, const sim_limits *l) {
    TRY(check_guard(c, l, &l->guard));
    return check_guard(c, l, &l->prompt);
}

/* PyramidKV's budgets (arXiv:2406.02069) as kvpress 0.5.5 computes them: the last layer gets B/beta, the first as much
 * above B as the last is below it, but no more than there is to keep. Where the last layer could not hold its guarded
 * entries all layers get B. */
static void resolve_taper(sim_config *c, int32_t n_tokens) {
    policy_value *taper = &c->setup.value[param_index(c->setup.policy, "taper")];
    double all = c->schedule == SCHEDULE_PROMPT ? c->n_prompt : n_tokens, most = all - c->hold, b = c->budget;
    double last = b / taper->number, first = 2 * b - last;
    if (first >= most) {
        first = most;
        last = 2 * b - first;
    }
    sim_limits l = limits_of(c, (int32_t)rint(last));
    bool fits = first <= all && first > last && last >= l.guard.sinks + l.guard.hold && check_limits(c, &l) == 0;
    c->first = fits ? first : b;
    c->last = fits ? last : b;
    if (!fits) spec_evaluate(&c->setup.policy->params[taper - c->setup.value], "1", 0, -1, taper);
}

/* Do unit, sharing and what the policies look at go together? */
static int check_units(const sim_config *c, double taper) {
    const unsigned of_full_run = NEEDS_FUTURE | NEEDS_OUT | NEEDS_LOSS | NEEDS_FISHER;
    bool whole = c->unit == UNIT_MODEL || c->share == SHARE_MODEL;
    if (c->share != SHARE_NONE && (int)c->unit >= (int)c->share)
        return err_set(ERR_USAGE, "share=%s: a unit=%s has nobody to compete with", sim_unit_name((unit_kind)c->share),
                       sim_unit_name(c->unit));
    if (c->unit == UNIT_MODEL && taper > 1)
        return err_set(ERR_USAGE, "taper: a unit of the whole model has one budget (unit=head or unit=layer)");
    if (whole && (c->needs & of_full_run))
        return err_set(ERR_USAGE,
                       "%s=model: %s looks at the full run (its future, outputs or gradients), which is at hand for "
                       "one layer at a time",
                       c->unit == UNIT_MODEL ? "unit" : "share", c->setup.policy->name);
    if (c->cutoff >= 0 && (c->setup.needs & NEEDS_FUTURE))
        return err_set(ERR_USAGE, "cutoff: %s looks ahead; it gathers no evidence that could be cut off",
                       c->setup.policy->name);
    return 0;
}

static int resolve_guards(const sim_ask *ask, int32_t n_tokens, sim_config *c) {
    const policy_value *memory = policy_get(&c->setup, "memory"), *schedule = policy_get(&c->setup, "schedule");
    const policy_value *cutoff = policy_get(&c->setup, "cutoff");
    double taper = policy_get(&c->setup, "taper")->number;
    c->sinks = (int32_t)policy_get(&c->setup, "sinks")->number;
    c->hold = (int32_t)policy_get(&c->setup, "hold")->number;
    c->pending_free = ask->pending_free;
    c->cutoff = *cutoff->text ? (int32_t)cutoff->number : -1;
    c->unit = (unit_kind)policy_get(&c->setup, "unit")->word;
    c->share = (share_kind)policy_get(&c->setup, "share")->word;
    c->floor = c->share == SHARE_NONE ? 0 : policy_get(&c->setup, "floor")->number;
    c->take_max = policy_get(&c->setup, "row")->word == 1;
    c->schedule = (schedule_kind)schedule->word;
    c->schedule_argument = schedule->number;
    snprintf(c->schedule_text, sizeof c->schedule_text, "%s", schedule->text);
    /* mix(memory=first:8) cuts its evidence off at row i+8, cutoff=8 all of it: that is a lag, fixed by the spec. */
    if (c->lag < 0 && memory && memory->word == MEMORY_FIRST) c->lag = (int32_t)memory->number;
    if (c->lag < 0) c->lag = c->cutoff;
    c->target = schedule_target(c, c->budget);
    if (c->take_max && !(c->setup.needs & NEEDS_ROW))
        return err_set(ERR_USAGE, "row=max: %s does not look at its own row", ask->policy->name);
    if (c->schedule == SCHEDULE_PROMPT && c->n_prompt == 0)
        return err_set(ERR_USAGE, "schedule prompt needs a prompt (--prompt N)");
    TRY(check_units(c, taper));
    c->first = c->last = c->budget;
    if (taper > 1) resolve_taper(c, n_tokens);
    sim_limits l = limits_of(c, c->budget);
    return check_limits(c, &l);
}

static int resolve_all(const sim_ask *ask, bool is_shared, int32_t n_tokens, sim_config *c) {
    TRY(set_up(ask, c->budget, &c->lag, &c->setup));
    c->needs = c->setup.needs;
    if (!ask->policy->params[0].name) {
        snprintf(c->schedule_text, sizeof c->schedule_text, "step"); /* any would do: nothing leaves */
        c->is_full = true;
        return 0;
    }
    const policy_value *prompt = policy_get(&c->setup, "prompt");
    if (prompt->word) TRY(resolve_prompt(prompt->text, c));
    TRY(resolve_guards(ask, n_tokens, c));
    if (c->budget >= n_tokens && !is_shared) { /* nothing will ever leave, under any schedule */
        c->is_full = true;
        c->needs = c->setup.needs = 0;
    }
    return 0;
}

int sim_config_resolve(const sim_ask *ask, const sim_flags *flags, int32_t n_tokens, int32_t n_prompt,
                       sim_config *out) {
    *out = (sim_config){.setup = {.policy = ask->policy}, .lag = -1, .cutoff = -1, .kv_bits = 16, .pending_bits = 16};
    out->waits = strcmp(ask_text(ask, "hold"), "lag") == 0;
    out->n_prompt = flags->n_prompt >= 0 ? flags->n_prompt : n_prompt;
    out->budget = ask->policy->params[0].name ? budget_tokens(ask->budget, n_tokens) : n_tokens;
    snprintf(out->budget_asked, sizeof out->budget_asked, "%s", ask->budget);
    text spec_text = {0};
    TRY(sim_ask_spec(ask, &spec_text));
    out->spec = spec_text.data;
    TRY(resolve_all(ask, flags->is_shared, n_tokens, out));
    TRY(write_resolved(out));
    out->is_resolved = true;
    return 0;
}

void sim_config_free(sim_config *c) {
    mem_free(c->prompt);
    mem_free(c->spec);
    mem_free(c->resolved);
    *c = (sim_config){0};
}

bool sim_config_same(const sim_config *a, const sim_config *b) {
    if (a->is_full || b->is_full) return a->is_full && b->is_full;
    return a->setup.policy == b->setup.policy && a->budget == b->budget && a->lag == b->lag &&
           a->pending_free == b->pending_free && strcmp(a->resolved, b->resolved) == 0;
}
