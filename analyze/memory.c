#include "analyze/memory.h"
#include "analyze/canvas.h"
#include "analyze/statistics.h"
#include "base/err.h"
#include "base/mem.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { R = BOOTSTRAP_RESAMPLES };

/* ---- curves ----------------------------------------------------------------------------------------------------- */

bool memory_is_real(const result *c) {
    return !result_is_oracle(c) && !result_is_free(c);
}

memory_measure memory_pick_measure(const results *r) {
    for (size_t i = 0; i < r->n_configs; i++)
        if (!(r->configs[i].cost[COST_KV_BYTES] > 0)) return MEMORY_ENTRIES;
    return MEMORY_KV_BYTES;
}

double memory_of(const result *c, memory_measure m) {
    return m == MEMORY_KV_BYTES ? c->cost[COST_KV_BYTES] : c->budget;
}

double memory_least(const memory_curve *c) {
    return memory_of(c->point[0], c->measure);
}

double memory_most(const memory_curve *c) {
    return memory_of(c->point[c->n - 1], c->measure);
}

static bool takes_part(const result *c, size_t metric) {
    return result_evicts(c) && !result_is_free(c) && !isnan(c->metric[metric]) && !(result_is_oracle(c) && c->lag >= 0);
}

/* Put a configuration where it belongs. Of two that ask for the same budget, or need the same memory, the better stays.
 */
static void insert(memory_curve *to, const result *c) {
    size_t at = 0;
    double memory = memory_of(c, to->measure);
    for (size_t i = 0; i < to->n; i++)
        if (strcmp(to->point[i]->budget_asked, c->budget_asked) == 0 ||
            memory_of(to->point[i], to->measure) == memory) {
            if (to->point[i]->metric[to->metric] <= c->metric[to->metric]) return;
            memmove(&to->point[i], &to->point[i + 1], (--to->n - i) * sizeof *to->point);
            i--;
        }
    while (at < to->n && memory_of(to->point[at], to->measure) < memory) at++;
    memmove(&to->point[at + 1], &to->point[at], (to->n++ - at) * sizeof *to->point);
    to->point[at] = c;
}

static int add_curve(const results *r, size_t first, memory_curve c, memory_curves *to) {
    size_t n = 0;
    for (size_t i = first; i < r->n_configs; i++)
        n += takes_part(&r->configs[i], c.metric) && result_same_series(&r->configs[first], &r->configs[i]);
    if (n < 2) return 0;
    TRY(mem_grow((void **)&to->item, &to->capacity, to->n + 1, sizeof *to->item, "memory curves"));
    c.point = mem_new(n, sizeof *c.point, "memory curve");
    if (!c.point) return ERR_DATA;
    for (size_t i = first; i < r->n_configs; i++)
        if (takes_part(&r->configs[i], c.metric) && result_same_series(&r->configs[first], &r->configs[i]))
            insert(&c, &r->configs[i]);
    if (c.n < 2) mem_free(c.point);
    else to->item[to->n++] = c;
    return 0;
}

int memory_curves_find(const results *r, size_t metric, memory_curves *out) {
    memory_curve blank = {.measure = memory_pick_measure(r), .metric = metric};
    *out = (memory_curves){0};
    for (size_t i = 0; i < r->n_configs; i++) {
        bool first = takes_part(&r->configs[i], metric);
        for (size_t k = 0; k < i && first; k++)
            first = !takes_part(&r->configs[k], metric) || !result_same_series(&r->configs[k], &r->configs[i]);
        if (first) TRY(add_curve(r, i, blank, out));
    }
    return 0;
}

void memory_curves_free(memory_curves *c) {
    for (size_t i = 0; i < c->n; i++) mem_free(c->item[i].point);
    mem_free(c->item);
    *c = (memory_curves){0};
}

/* ---- resampled curves ------------------------------------------------------------------------------------------- */

static double scaled(double loss) {
    return asinh(loss / AXIS_LINEAR_TO);
}

/* A curve on its scales, its replicates, and room for one of them. */
typedef struct sampled {
    size_t n;
    double *x;                /* [n] log(memory) */
    double *value;            /* [n] loss */
    const double **replicate; /* [n] */
    bool whole;               /* there are replicates */
    double *y;                /* [n] one resample's losses, scaled */
    statistics_pool *pool;    /* [n] */
    double *from, *to;        /* [R] ends of what resamples say; equal where they say a number */
    void *block;
} sampled;

static void sampled_free(sampled *s) {
    mem_free(s->block);
}

/* Release with sampled_free either way. */
static int sample(bootstrap *b, const memory_curve *c, sampled *s) {
    *s = (sampled){.n = c->n, .whole = b != NULL};
    for (int pass = 0; pass < 2; pass++) {
        mem_carver m = {.base = s->block};
        s->x = mem_carve(&m, c->n, sizeof *s->x);
        s->value = mem_carve(&m, c->n, sizeof *s->value);
        s->replicate = mem_carve(&m, c->n, sizeof *s->replicate);
        s->y = mem_carve(&m, c->n, sizeof *s->y);
        s->pool = mem_carve(&m, c->n, sizeof *s->pool);
        s->from = mem_carve(&m, R, sizeof *s->from);
        s->to = mem_carve(&m, R, sizeof *s->to);
        if (pass == 0 && !(s->block = mem_new(m.used, 1, "memory curve"))) return ERR_DATA;
    }
    for (size_t i = 0; i < c->n; i++) {
        s->x[i] = log(memory_of(c->point[i], c->measure));
        s->value[i] = c->point[i]->metric[c->metric];
        if (b) TRY(bootstrap_replicates(b, c->point[i], c->metric, &s->replicate[i]));
        s->whole &= s->replicate[i] != NULL;
    }
    return 0;
}

/* The curve of resample k, or, with R, of the results themselves. */
static void take(sampled *s, size_t k) {
    for (size_t i = 0; i < s->n; i++) s->y[i] = scaled(k < R ? s->replicate[i][k] : s->value[i]);
}

/* ---- loss at a memory ------------------------------------------------------------------------------------------- */

static double loss_at(const sampled *s, double x) {
    size_t i = 1;
    while (i + 1 < s->n && s->x[i] < x) i++;
    double part = (x - s->x[i - 1]) / (s->x[i] - s->x[i - 1]);
    return AXIS_LINEAR_TO * sinh(s->y[i - 1] + part * (s->y[i] - s->y[i - 1]));
}

int memory_loss_at(bootstrap *b, const memory_curve *c, double memory, estimate *out, text *why) {
    *out = (estimate){NAN, NAN, NAN};
    if (!(memory >= memory_least(c) && memory <= memory_most(c))) {
        if (!why) return 0;
        TRY(text_add(why, "outside of "));
        if (c->measure == MEMORY_ENTRIES) TRY(text_add(why, "%.4g", memory_least(c)));
        else TRY(memory_add_words(why, c->measure, memory_least(c)));
        TRY(text_add(why, ".."));
        return memory_add_words(why, c->measure, memory_most(c));
    }
    sampled s;
    int code = sample(b, c, &s);
    if (!code) {
        for (size_t k = 0; s.whole && k < R; k++) {
            take(&s, k);
            s.from[k] = loss_at(&s, log(memory));
        }
        take(&s, R);
        code = bootstrap_interval(loss_at(&s, log(memory)), s.whole ? s.from : NULL, out);
    }
    sampled_free(&s);
    return code;
}

/* ---- memory at a loss ------------------------------------------------------------------------------------------- */

/* log(memory) at which resample k comes down to a scaled loss. */
static double crossing(sampled *s, size_t k, double level) {
    take(s, k);
    statistics_fall(s->y, s->n, s->pool);
    if (s->y[0] < level) return -INFINITY;
    for (size_t i = 0; i < s->n; i++) {
        if (s->y[i] > level) continue;
        double part = i ? (s->y[i - 1] - level) / (s->y[i - 1] - s->y[i]) : 0;
        return i ? s->x[i - 1] + part * (s->x[i] - s->x[i - 1]) : s->x[0];
    }
    return INFINITY;
}

/* The 5 % point of `from` and the 95 % point of `to`, logarithms between lo and hi or infinite. Where infinite ones
 * begin, an end is infinite, too: they are put one beyond, and what then lies beyond is infinite again. */
static int open_interval(double *from, double *to, double lo, double hi, estimate *out) {
    estimate low, high;
    for (size_t k = 0; k < R; k++) {
        from[k] = fmin(fmax(from[k], lo - 1), hi + 1);
        to[k] = fmin(fmax(to[k], lo - 1), hi + 1);
    }
    TRY(bootstrap_interval(0, from, &low));
    TRY(bootstrap_interval(0, to, &high));
    out->lo = low.lo < lo ? -INFINITY : low.lo > hi ? INFINITY : low.lo;
    out->hi = high.hi < lo ? -INFINITY : high.hi > hi ? INFINITY : high.hi;
    return 0;
}

/* Infinite ends stay, others become memory. */
static double from_log(double x) {
    return isinf(x) ? x : exp(x);
}

int memory_at_loss(bootstrap *b, const memory_curve *c, double loss, estimate *out) {
    sampled s;
    *out = (estimate){NAN, NAN, NAN};
    int code = sample(b, c, &s);
    for (size_t k = 0; !code && s.whole && k < R; k++) s.from[k] = s.to[k] = crossing(&s, k, scaled(loss));
    if (!code && s.whole) code = open_interval(s.from, s.to, s.x[0], s.x[s.n - 1], out);
    if (!code) *out = (estimate){from_log(crossing(&s, R, scaled(loss))), from_log(out->lo), from_log(out->hi)};
    sampled_free(&s);
    return code;
}

/* What is known of a memory that lies below the curve's least is that it is between none and that. */
static double at_least(const sampled *s, double crossing) {
    return crossing == INFINITY ? s->x[s->n - 1] : crossing;
}

static double at_most(const sampled *s, double crossing) {
    return crossing == -INFINITY ? s->x[0] : crossing;
}

static int share_of(sampled *s, sampled *ref, double level, estimate *out) {
    bool whole = s->whole && ref->whole;
    for (size_t k = 0; whole && k < R; k++) {
        double x = crossing(s, k, level), y = crossing(ref, k, level);
        s->from[k] = at_least(s, x) - at_most(ref, y);
        s->to[k] = at_most(s, x) - at_least(ref, y);
    }
    if (whole) TRY(open_interval(s->from, s->to, s->x[0] - ref->x[ref->n - 1], s->x[s->n - 1] - ref->x[0], out));
    double value = crossing(s, R, level) - crossing(ref, R, level);
    *out = (estimate){isfinite(value) ? exp(value) : NAN, exp(out->lo), exp(out->hi)};
    return 0;
}

int memory_share(bootstrap *b, const memory_curve *c, const memory_curve *reference, double loss, estimate *out) {
    sampled s, ref = {0};
    *out = (estimate){NAN, NAN, NAN};
    int code = sample(b, c, &s);
    if (!code) code = sample(b, reference, &ref);
    if (!code) code = share_of(&s, &ref, scaled(loss), out);
    sampled_free(&s);
    sampled_free(&ref);
    return code;
}

/* ---- comparisons ------------------------------------------------------------------------------------------------ */

static int named(const results *r, const memory_curves *all, const char *name, const memory_curve **out) {
    for (size_t i = 0; i < all->n && !*out; i++) {
        char *this = result_series_name(r, all->item[i].point[0]);
        if (!this) return ERR_DATA;
        if (strcmp(this, name) == 0) *out = &all->item[i];
        mem_free(this);
    }
    return 0;
}

static bool may_be_reference(const memory_curve *c, bool coarse) {
    const result *first = c->point[0];
    return memory_is_real(first) && first->lag < 0 && (coarse || strcmp(first->kv_bits, "16") == 0);
}

static int best_without_lag(const memory_curves *all, bool coarse, const memory_curve **out) {
    double lo = 0, hi = INFINITY, least = INFINITY;
    for (size_t i = 0; i < all->n; i++) {
        if (!may_be_reference(&all->item[i], coarse)) continue;
        lo = fmax(lo, memory_least(&all->item[i]));
        hi = fmin(hi, memory_most(&all->item[i]));
    }
    for (size_t i = 0; i < all->n; i++) {
        const memory_curve *c = &all->item[i];
        estimate loss;
        if (!may_be_reference(c, coarse)) continue;
        TRY(memory_loss_at(NULL, c, fmin(fmax(sqrt(lo * hi), memory_least(c)), memory_most(c)), &loss, NULL));
        if (loss.value < least) *out = c;
        least = fmin(least, loss.value);
    }
    return 0;
}

int memory_find_reference(const results *r, const memory_curves *all, const char *name, const memory_curve **out) {
    *out = NULL;
    if (name) return named(r, all, name, out);
    TRY(best_without_lag(all, false, out));
    return *out ? 0 : best_without_lag(all, true, out);
}

static size_t curves_at(const memory_curves *all, double loss) {
    size_t n = 0;
    for (size_t i = 0; i < all->n; i++) {
        const memory_curve *c = &all->item[i];
        estimate memory;
        if (!memory_is_real(c->point[0]) || memory_at_loss(NULL, c, loss, &memory)) continue;
        n += isfinite(memory.value);
    }
    return n;
}

size_t memory_round_losses(const memory_curves *all, size_t most, double *out) {
    enum { LOSSES = 28 }; /* 1e-6 .. 1000 */
    static const double digits[] = {1, 2, 5};
    double round[LOSSES];
    size_t curves[LOSSES], need = 1, n = 0;
    for (size_t k = 0; k < LOSSES; k++) {
        round[k] = digits[k % 3] * pow(10, (double)(k / 3) - 6);
        curves[k] = curves_at(all, round[k]);
        need = curves[k] > need ? curves[k] : need;
    }
    for (;; need--) {
        n = 0;
        for (size_t k = 0; k < LOSSES; k++) n += curves[k] >= need;
        if (n >= 3 || need <= 2) break;
    }
    n = 0;
    for (size_t k = 0; k < LOSSES; k++)
        if (curves[k] >= need) round[n++] = round[k];
    size_t take = n < most ? n : most;
    for (size_t i = 0; i < take; i++) out[i] = round[take > 1 ? i * (n - 1) / (take - 1) : n / 2];
    return take;
}

typedef struct placed {
    const result *config;
    double cost, loss;
} placed;

static int by_cost(const void *pa, const void *pb) {
    const placed *a = pa, *b = pb;
    if (a->cost != b->cost) return a->cost < b->cost ? -1 : 1;
    if (a->loss != b->loss) return a->loss < b->loss ? -1 : 1;
    return (a->config > b->config) - (a->config < b->config);
}

int memory_pareto(const results *r, const double *cost, size_t metric, const result ***out, size_t *n) {
    placed *all = mem_new(r->n_configs + 1, sizeof *all, "front");
    *out = mem_new(r->n_configs + 1, sizeof **out, "front");
    *n = 0;
    if (all && *out) {
        size_t placed_n = 0;
        for (size_t i = 0; i < r->n_configs; i++)
            if (!isnan(cost[i]) && !isnan(r->configs[i].metric[metric]))
                all[placed_n++] = (placed){&r->configs[i], cost[i], r->configs[i].metric[metric]};
        qsort(all, placed_n, sizeof *all, by_cost);
        double least = INFINITY;
        for (size_t i = 0; i < placed_n; i++) {
            if (all[i].loss < least) (*out)[(*n)++] = all[i].config;
            least = fmin(least, all[i].loss);
        }
    }
    int code = all && *out ? 0 : ERR_DATA;
    mem_free(all);
    if (code) {
        mem_free(*out);
        *out = NULL;
    }
    return code;
}

/* ---- words ------------------------------------------------------------------------------------------------------ */

const char *memory_axis(memory_measure m, double most, double *unit) {
    *unit = m == MEMORY_ENTRIES || most < 1e3 ? 1 : most < 1e6 ? 1e3 : most < 1e9 ? 1e6 : 1e9;
    return m == MEMORY_ENTRIES ? "memory: budget (entries)"
           : *unit == 1        ? "memory: keys and values read a step (B)"
           : *unit == 1e3      ? "memory: keys and values read a step (kB)"
           : *unit == 1e6      ? "memory: keys and values read a step (MB)"
                               : "memory: keys and values read a step (GB)";
}

int memory_add_words(text *t, memory_measure m, double memory) {
    if (m == MEMORY_ENTRIES) return text_add(t, "%.4g entries", memory);
    static const char *const units[] = {"B", "kB", "MB", "GB", "TB"};
    size_t u = 0;
    for (; u + 1 < sizeof units / sizeof *units && memory >= 999.5; u++) memory /= 1000;
    return text_add(t, "%.3g %s", memory, units[u]);
}

static int add_end(text *t, const memory_curve *c, double memory) {
    if (isinf(memory)) TRY(text_add(t, memory < 0 ? "<" : ">"));
    return memory_add_words(t, c->measure,
                            memory == -INFINITY  ? memory_least(c)
                            : memory == INFINITY ? memory_most(c)
                                                 : memory);
}

int memory_add_estimate(text *t, const memory_curve *c, estimate e) {
    if (isnan(e.value)) return text_add(t, "n/a");
    TRY(add_end(t, c, e.value));
    if (isnan(e.lo)) return 0;
    TRY(text_add(t, " ("));
    TRY(add_end(t, c, e.lo));
    TRY(text_add(t, ".."));
    TRY(add_end(t, c, e.hi));
    return text_add(t, ")");
}
