#include "analyze/decide.h"
#include "analyze/statistics.h"
#include "base/err.h"
#include "base/mem.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { R = BOOTSTRAP_RESAMPLES };

/* ---- curves ----------------------------------------------------------------------------------------------------- */

double lag_position(double lag) {
    return lag == 0 ? 0 : lag < 1 ? lag : 1 + log2(lag);
}

static bool same_place(const result *a, const result *b) {
    return result_same_series(a, b) && strcmp(a->budget_asked, b->budget_asked) == 0 &&
           result_is_free(a) == result_is_free(b);
}

static bool in_a_curve(const result *c, size_t metric) {
    return c->lag >= 0 && !isnan(c->metric[metric]);
}

static int by_lag(const void *pa, const void *pb) {
    const result *a = *(const result *const *)pa, *b = *(const result *const *)pb;
    return (a->lag > b->lag) - (a->lag < b->lag);
}

static int add_curve(const results *r, size_t first, size_t metric, lag_curves *to) {
    size_t n = 0;
    for (size_t i = first; i < r->n_configs; i++)
        n += in_a_curve(&r->configs[i], metric) && same_place(&r->configs[first], &r->configs[i]);
    if (n < 2) return 0;
    TRY(mem_grow((void **)&to->item, &to->capacity, to->n + 1, sizeof *to->item, "lag curves"));
    lag_curve *c = &to->item[to->n];
    c->point = mem_new(n, sizeof *c->point, "lag curve");
    if (!c->point) return ERR_DATA;
    to->n++;
    for (size_t i = first; i < r->n_configs; i++)
        if (in_a_curve(&r->configs[i], metric) && same_place(&r->configs[first], &r->configs[i]))
            c->point[c->n++] = &r->configs[i];
    qsort(c->point, n, sizeof *c->point, by_lag);
    return 0;
}

int lag_curves_find(const results *r, size_t metric, lag_curves *out) {
    *out = (lag_curves){0};
    for (size_t i = 0; i < r->n_configs; i++) {
        bool first = in_a_curve(&r->configs[i], metric);
        for (size_t k = 0; k < i && first; k++)
            first = !in_a_curve(&r->configs[k], metric) || !same_place(&r->configs[k], &r->configs[i]);
        if (first) TRY(add_curve(r, i, metric, out));
    }
    return 0;
}

bool lag_curves_opens_series(const lag_curves *c, size_t i) {
    for (size_t k = 0; k < i; k++)
        if (result_same_series(c->item[i].point[0], c->item[k].point[0])) return false;
    return true;
}

void lag_curves_free(lag_curves *c) {
    for (size_t i = 0; i < c->n; i++) mem_free(c->item[i].point);
    mem_free(c->item);
    *c = (lag_curves){0};
}

/* A curve's values and replicates. */
typedef struct sampled {
    size_t n;
    double *value;            /* [n] */
    const double **replicate; /* [n]; whole is false where one of them is NULL */
    bool whole;
} sampled;

static void sampled_free(sampled *s) {
    mem_free(s->value);
    mem_free(s->replicate);
}

/* Release with sampled_free either way. */
static int sample_curve(bootstrap *b, const lag_curve *c, size_t metric, sampled *s) {
    *s = (sampled){.n = c->n, .whole = b != NULL};
    s->value = mem_new(c->n, sizeof *s->value, "curve");
    s->replicate = mem_new(c->n, sizeof *s->replicate, "curve");
    if (!s->value || !s->replicate) return ERR_DATA;
    for (size_t i = 0; i < c->n; i++) {
        s->value[i] = c->point[i]->metric[metric];
        if (b) TRY(bootstrap_replicates(b, c->point[i], metric, &s->replicate[i]));
        s->whole &= s->replicate[i] != NULL;
    }
    return 0;
}

/* ---- the knee --------------------------------------------------------------------------------------------------- */

/* Make y fall down to its lowest point by least squares, and stay level from there. */
static void fall(double *y, size_t n, statistics_pool *pool) {
    size_t lowest = 0;
    for (size_t i = 1; i < n; i++)
        if (y[i] < y[lowest]) lowest = i;
    statistics_fall(y, lowest + 1, pool);
    for (size_t i = lowest + 1; i < n; i++) y[i] = y[lowest];
}

/* Depth under the chord at point i, as a share of the fall. */
static double depth_at(const double *x, const double *y, size_t n, size_t i) {
    double range = y[0] - y[n - 1];
    return range > 0 ? 1 - (x[i] - x[0]) / (x[n - 1] - x[0]) - (y[i] - y[n - 1]) / range : 0;
}

static size_t deepest(const double *x, const double *y, size_t n) {
    size_t best = 0;
    for (size_t i = 1; i < n; i++)
        if (depth_at(x, y, n, i) > depth_at(x, y, n, best)) best = i;
    return best;
}

/* Room for the resampled curves of one knee. */
typedef struct knee_work {
    double *x, *y;         /* [n] positions of the lags; a curve */
    statistics_pool *pool; /* [n] */
    double *depth, *lag;   /* [R] */
} knee_work;

static int knee_work_new(size_t n, knee_work *w, void **block) {
    for (int pass = 0; pass < 2; pass++) {
        mem_carver m = {.base = *block};
        w->x = mem_carve(&m, n, sizeof *w->x);
        w->y = mem_carve(&m, n, sizeof *w->y);
        w->pool = mem_carve(&m, n, sizeof *w->pool);
        w->depth = mem_carve(&m, R, sizeof *w->depth);
        w->lag = mem_carve(&m, R, sizeof *w->lag);
        if (pass == 0 && !(*block = mem_new(m.used, 1, "knee"))) return ERR_DATA;
    }
    return 0;
}

static int find_knee(const lag_curve *c, const sampled *s, knee_work *w, knee *out) {
    size_t n = c->n;
    for (size_t i = 0; i < n; i++) w->x[i] = lag_position(c->point[i]->lag);
    memcpy(w->y, s->value, n * sizeof *w->y);
    fall(w->y, n, w->pool);
    size_t at = deepest(w->x, w->y, n);
    double depth = depth_at(w->x, w->y, n, at);
    for (size_t k = 0; k < R; k++) {
        for (size_t i = 0; i < n; i++) w->y[i] = s->replicate[i][k];
        fall(w->y, n, w->pool);
        w->depth[k] = depth_at(w->x, w->y, n, at);
        w->lag[k] = c->point[deepest(w->x, w->y, n)]->lag;
    }
    estimate lag;
    TRY(bootstrap_interval(depth, w->depth, &out->depth));
    TRY(bootstrap_interval(c->point[at]->lag, w->lag, &lag));
    out->found = out->depth.lo > DECIDE_LEAST_DEPTH;
    if (!out->found) {
        out->why = "no bend";
        return 0;
    }
    out->at = c->point[at];
    out->lag_lo = lag.lo;
    out->lag_hi = lag.hi;
    return 0;
}

int decide_knee(bootstrap *b, const lag_curve *c, size_t metric, knee *out) {
    *out = (knee){.lag_lo = NAN, .lag_hi = NAN, .depth = {NAN, NAN, NAN}};
    lag_choice choice;
    TRY(decide_lag(b, c, metric, &choice));
    out->why = !choice.recommended ? "no resamples" : choice.recommended == c->point[0] ? "flat" : "too few lags";
    if (!choice.recommended || choice.recommended == c->point[0] || c->n < 3) return 0;
    out->why = NULL;
    knee_work w;
    sampled s;
    void *block = NULL;
    int code = sample_curve(b, c, metric, &s);
    if (!code) code = knee_work_new(c->n, &w, &block);
    if (!code) code = find_knee(c, &s, &w, out);
    sampled_free(&s);
    mem_free(block);
    return code;
}

/* ---- the lag to recommend --------------------------------------------------------------------------------------- */

static size_t lowest(const sampled *s) {
    size_t best = 0;
    for (size_t i = 1; i < s->n; i++)
        if (s->value[i] < s->value[best]) best = i;
    return best;
}

/* The share of the n sorted values below x, equal ones counting half. */
static double share_below(const double *sorted, size_t n, double x) {
    size_t first = 0, last = n, end = n;
    while (first < last) {
        size_t middle = (first + last) / 2;
        if (sorted[middle] < x) first = middle + 1;
        else last = middle;
    }
    for (last = first; last < end;) {
        size_t middle = (last + end) / 2;
        if (sorted[middle] <= x) last = middle + 1;
        else end = middle;
    }
    return ((double)first + (double)(last - first) / 2) / (double)n;
}

/* Room for comparing lags with the best one. */
typedef struct lag_work {
    double *difference, *sorted, *least; /* [R] */
    double *p;                           /* [n] */
} lag_work;

static int lag_work_new(size_t n, lag_work *w, void **block) {
    for (int pass = 0; pass < 2; pass++) {
        mem_carver m = {.base = *block};
        w->difference = mem_carve(&m, R, sizeof *w->difference);
        w->sorted = mem_carve(&m, R, sizeof *w->sorted);
        w->least = mem_carve(&m, R, sizeof *w->least);
        w->p = mem_carve(&m, n, sizeof *w->p);
        if (pass == 0 && !(*block = mem_new(m.used, 1, "lags"))) return ERR_DATA;
    }
    return 0;
}

/* p[i]: the share of resamples in which lag i costs less than the best one. least[k]: the smallest, over lags, of the
 * shares of resamples that lie below the k-th. Both are places among resamples, so it does not matter how skewed a
 * difference is: calibration errors are factors, and a large loss has a long tail above it. */
static void compare_lags(const sampled *s, size_t best, lag_work *w) {
    for (size_t k = 0; k < R; k++) w->least[k] = 1;
    for (size_t i = 0; i < s->n; i++) {
        if (i == best) continue;
        for (size_t k = 0; k < R; k++) w->difference[k] = s->replicate[i][k] - s->replicate[best][k];
        memcpy(w->sorted, w->difference, R * sizeof *w->sorted);
        statistics_sort(w->sorted, R);
        w->p[i] = share_below(w->sorted, R, 0);
        for (size_t k = 0; k < R; k++) w->least[k] = fmin(w->least[k], share_below(w->sorted, R, w->difference[k]));
    }
    statistics_sort(w->least, R);
}

static size_t recommend(const sampled *s, size_t best, lag_work *w) {
    compare_lags(s, best, w);
    double level = w->least[(size_t)(DECIDE_LAG_LEVEL * R)];
    for (size_t i = 0; i < best; i++)
        if (w->p[i] >= level) return i;
    return best;
}

int decide_lag(bootstrap *b, const lag_curve *c, size_t metric, lag_choice *out) {
    sampled s;
    lag_work w;
    void *block = NULL;
    double p;
    int code = sample_curve(b, c, metric, &s);
    *out = (lag_choice){.excess = {NAN, NAN, NAN}};
    if (!code) code = lag_work_new(c->n, &w, &block);
    if (!code) {
        size_t best = lowest(&s);
        out->best = c->point[best];
        if (s.whole) out->recommended = c->point[recommend(&s, best, &w)];
    }
    if (!code && out->recommended)
        code = bootstrap_difference(b, out->recommended, out->best, metric, &out->excess, &p);
    sampled_free(&s);
    mem_free(block);
    return code;
}

/* ---- what waiting gains ----------------------------------------------------------------------------------------- */

static bool comparable(const result *a, const result *b) {
    return strcmp(a->budget_asked, b->budget_asked) == 0 && strcmp(a->schedule, b->schedule) == 0 &&
           strcmp(a->n_prompt, b->n_prompt) == 0 && strcmp(a->kv_bits, b->kv_bits) == 0;
}

/* The better oracle that holds entries as long, under the same conditions (DESIGN section 8). */
static bool is_bound(const result *o, const result *at) {
    return result_is_oracle(o) && o->lag == at->lag && comparable(o, at) && strcmp(o->sinks, at->sinks) == 0 &&
           strcmp(o->unit, at->unit) == 0 && result_is_free(o) == result_is_free(at) &&
           strcmp(o->pending_bits, at->pending_bits) == 0;
}

static bool is_filter(const result *f, const result *at) {
    return !result_is_oracle(f) && f->lag < 0 && comparable(f, at);
}

static const result *best_of(const results *r, const result *at, size_t metric,
                             bool (*of_kind)(const result *, const result *)) {
    const result *best = NULL;
    for (size_t i = 0; i < r->n_configs; i++) {
        const result *c = &r->configs[i];
        if (isnan(c->metric[metric]) || !of_kind(c, at)) continue;
        if (!best || c->metric[metric] < best->metric[metric]) best = c;
    }
    return best;
}

static int close_share(bootstrap *b, const result *zero, size_t metric, gain *g) {
    estimate whole;
    double p;
    TRY(bootstrap_difference(b, zero, g->oracle, metric, &whole, &p));
    if (isnan(whole.lo)) g->closed_why = "no resamples";
    else if (whole.lo <= 0 && whole.hi >= 0) g->closed_why = "lag 0 and the oracle cannot be told apart";
    if (g->closed_why) return 0;
    const double *from, *to, *bound;
    TRY(bootstrap_replicates(b, zero, metric, &from));
    TRY(bootstrap_replicates(b, g->at, metric, &to));
    TRY(bootstrap_replicates(b, g->oracle, metric, &bound));
    double *share = mem_new(R, sizeof *share, "shares");
    if (!share) return ERR_DATA;
    for (size_t k = 0; k < R; k++) share[k] = (from[k] - to[k]) / (from[k] - bound[k]);
    int code = bootstrap_interval(g->gain.value / whole.value, share, &g->closed);
    mem_free(share);
    return code;
}

/* Without a bootstrap differences have values only. */
static int difference(bootstrap *b, const result *a, const result *c, size_t metric, estimate *out, double *p) {
    *out = (estimate){a->metric[metric] - c->metric[metric], NAN, NAN};
    *p = NAN;
    return b ? bootstrap_difference(b, a, c, metric, out, p) : 0;
}

static int find_gain(bootstrap *b, const results *r, const result *zero, const result *at, size_t metric, gain *g) {
    double p;
    *g = (gain){.at = at, .p = NAN, .gain = {NAN, NAN, NAN}, .over_filter = {NAN, NAN, NAN}, .closed = {NAN, NAN, NAN}};
    g->filter = best_of(r, at, metric, is_filter);
    if (g->filter) TRY(difference(b, g->filter, at, metric, &g->over_filter, &p));
    if (!zero) g->closed_why = "no lag 0";
    else TRY(difference(b, zero, at, metric, &g->gain, &g->p));
    if (!result_is_oracle(at)) g->oracle = best_of(r, at, metric, is_bound);
    if (!g->closed_why && !b) g->closed_why = "no resamples";
    if (!g->closed_why && !g->oracle) g->closed_why = "no oracle(...,hold=lag) with these sinks at this lag";
    return g->closed_why ? 0 : close_share(b, zero, metric, g);
}

int decide_gains(bootstrap *b, const results *r, const lag_curve *c, size_t metric, gain **out) {
    gain *g = *out = mem_new(c->n, sizeof *g, "gains");
    if (!g) return ERR_DATA;
    const result *zero = c->point[0]->lag == 0 ? c->point[0] : NULL;
    int code = 0;
    for (size_t i = 0; i < c->n && !code; i++) code = find_gain(b, r, zero, c->point[i], metric, &g[i]);
    if (!code) return 0;
    mem_free(g);
    *out = NULL;
    return code;
}

/* ---- ranking ---------------------------------------------------------------------------------------------------- */

/* Of one series, is c the one to show at this budget: the best lag, pending charged? */
static bool stands_for_series(const results *r, const result *c, size_t metric) {
    for (size_t i = 0; i < r->n_configs; i++) {
        const result *o = &r->configs[i];
        if (o == c || !result_same_series(o, c) || strcmp(o->budget_asked, c->budget_asked) != 0 || result_is_free(o) ||
            isnan(o->metric[metric]))
            continue;
        if (o->metric[metric] < c->metric[metric] || (o->metric[metric] == c->metric[metric] && o < c)) return false;
    }
    return true;
}

static int by_loss(const void *pa, const void *pb) {
    const ranked *a = pa, *b = pb;
    if (a->loss.value != b->loss.value) return a->loss.value < b->loss.value ? -1 : 1;
    return (a->config > b->config) - (a->config < b->config);
}

static int rank_one(bootstrap *b, ranked *list, size_t at, size_t metric) {
    ranked *x = &list[at];
    const result *c = x->config;
    x->rank = 1;
    for (size_t i = 0; i < at; i++) {
        estimate d;
        double p;
        TRY(difference(b, c, list[i].config, metric, &d, &p));
        x->rank += isnan(d.lo) || d.lo > 0;
        if (i == 0) {
            x->behind = d;
            x->p = p;
        }
    }
    return 0;
}

int decide_ranking(bootstrap *b, const results *r, const char *budget_asked, size_t metric, bool oracles, ranked **out,
                   size_t *n) {
    *n = 0;
    ranked *list = *out = mem_new(r->n_configs + 1, sizeof *list, "ranking");
    if (!list) return ERR_DATA;
    int code = 0;
    for (size_t i = 0; i < r->n_configs && !code; i++) {
        const result *c = &r->configs[i];
        if (strcmp(c->budget_asked, budget_asked) != 0 || isnan(c->metric[metric]) || result_is_free(c) ||
            (result_is_oracle(c) && !oracles) || !stands_for_series(r, c, metric))
            continue;
        ranked *x = &list[(*n)++];
        *x = (ranked){.config = c, .loss = {c->metric[metric], NAN, NAN}, .behind = {0, NAN, NAN}, .p = NAN};
        if (b) code = bootstrap_estimate(b, c, metric, &x->loss);
    }
    qsort(list, *n, sizeof *list, by_loss);
    for (size_t i = 0; i < *n && !code; i++) code = rank_one(b, list, i, metric);
    if (!code) return 0;
    mem_free(list);
    *out = NULL;
    *n = 0;
    return code;
}
