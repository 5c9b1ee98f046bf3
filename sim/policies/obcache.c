/* Optimal Brain Cache: the second-order saliency of an entry, how far pruning its value, its key, or both moves the
 * attention output, added up over queries.
 *
 * For a query head with weight a, logit x = scale q.k and output o, to first order in what is set to zero:
 *   value    the output moves by a v:              a^p |v|_p^p
 *   key      by a x (v - o):                       a^2 x^2 |v - o|^2
 *   joint    by both:                              a^2 |v + x (v - o)|^2
 *   nocross  as if they were independent:          the sum of the first two
 * joined over the unit's query heads as `row` says. With p=1 and vnorm=no, `value` is the attention that h2o, tova and
 * snapkv add up.
 *
 * As in the published code, memory=sum adds up the last `window` rows of the prompt and every row after it (h2o,
 * snapkv), memory=last has the latest row only (tova). memory=recent goes on with the last `window` rows. Pooling, as
 * snapkv does it, is over entries that are older than the window. */
#include "base/err.h"
#include "sim/policies/output.h"
#include "sim/policies/presets.h"
#include "sim/policies/vectors.h"

#include <math.h>
#include <string.h>

enum { VALUE, KEY, JOINT, NOCROSS };
enum { SUM, LAST, RECENT };
enum { NO_POOL, POOL_MEAN };

typedef struct plan {
    int flavour, memory, pool, kernel;
    double window; /* 0 = all rows */
    bool squared, vnorm, take_max;
} plan;
_Static_assert(sizeof(plan) <= POLICY_PLAN_BYTES, "plan");

static const plan *plan_in(const policy_setup *s) {
    return (const plan *)(const void *)s->plan;
}

static int init(policy_setup *s) {
    plan *p = (plan *)(void *)s->plan;
    *p = (plan){
        .flavour = policy_get(s, "prune")->word,
        .memory = policy_get(s, "memory")->word,
        .pool = policy_get(s, "pool")->word,
        .kernel = (int)policy_get(s, "kernel")->number,
        .window = policy_get(s, "window")->number,
        .squared = policy_get(s, "p")->word == 0,
        .vnorm = policy_get(s, "vnorm")->word == 0,
        .take_max = policy_get(s, "row")->word == 1,
    };
    TRY(rows_check_kernel(s));
    if (p->flavour != VALUE && !(p->squared && p->vnorm))
        return err_set(ERR_USAGE, "%s: p=1 and vnorm=no go with value only", s->policy->name);
    if (p->memory == RECENT && !(p->window >= 1 && p->window <= ROWS_MAX))
        return err_set(ERR_USAGE, "%s: memory=recent: window=%s is no number of rows in 1..%d", s->policy->name,
                       policy_get(s, "window")->text, ROWS_MAX);
    s->needs = NEEDS_ROW | (p->vnorm ? NEEDS_VALUES : 0) | (p->flavour != VALUE ? NEEDS_KEYS | NEEDS_QUERIES : 0);
    return 0;
}

/* Sums, or a ring of rows; then the saliencies of the current row. */
static int fields(const policy_setup *s) {
    const plan *p = plan_in(s);
    return (p->memory == RECENT ? (int)p->window : 1) + 1;
}

/* ---- saliencies of one row -------------------------------------------------------------------------------------- */

/* What one query head sees. */
typedef struct head_view {
    const float *row, *q, *k, *v; /* k, v: [T][dim] of its kv head; q: of the step */
    double mass;                  /* of the row over the residents */
    double oo;                    /* squared norm of the output */
    size_t dim;
} head_view;

static head_view head_of(const policy_setup *s, const policy_view *v, int h) {
    head_view x = {.row = v->heads[h]};
    for (int32_t j = 0; j < v->n; j++) x.mass += (double)x.row[v->entry[j]];
    if (!(s->needs & NEEDS_VALUES)) return x;
    const policy_layer *l = v->data;
    int kv = h / (l->shape.n_head / l->shape.n_kv);
    x.dim = (size_t)l->shape.head_dim;
    x.v = l->v[kv];
    if (!(s->needs & NEEDS_KEYS)) return x;
    x.k = l->k[kv];
    x.q = l->q[h] + (size_t)v->t * x.dim;
    return x;
}

static double value_saliency(const plan *p, const head_view *x, int32_t i, double a) {
    const float *v = x->v + (size_t)i * x->dim;
    if (p->squared) return a * a * (p->vnorm ? vec_dot(v, v, x->dim) : 1);
    double norm = 0;
    for (size_t c = 0; c < x->dim; c++) norm += fabs((double)v[c]);
    return a * norm;
}

/* By inner products: |v - o|^2 = v.v - 2 v.o + o.o and v.(v - o) = v.v - v.o. */
static double key_saliency(const plan *p, const head_view *x, int32_t i, double a, const double *o, double scale) {
    const float *k = x->k + (size_t)i * x->dim, *v = x->v + (size_t)i * x->dim;
    double logit = scale * vec_dot(x->q, k, x->dim), vv = vec_dot(v, v, x->dim), vo = vec_dot_f64(v, o, x->dim);
    double key = logit * logit * fmax(vv - 2 * vo + x->oo, 0);
    if (p->flavour == KEY) return a * a * key;
    return a * a * fmax(vv + key + (p->flavour == JOINT ? 2 * logit * (vv - vo) : 0), 0);
}

static void head_output(const policy_view *v, head_view *x, double *o) {
    memset(o, 0, x->dim * sizeof *o);
    for (int32_t j = 0; j < v->n; j++) {
        int32_t i = v->entry[j];
        vec_add(o, x->v + (size_t)i * x->dim, (double)x->row[i] / x->mass, x->dim);
    }
    double norm = vec_norm_f64(o, x->dim);
    x->oo = norm * norm;
}

/* e[j]: of the current row, the mean or the maximum over query heads. */
static void saliencies(const policy_setup *s, const policy_view *v, double *e) {
    const plan *p = plan_in(s);
    if (!p->squared && !p->vnorm) { /* attention itself */
        for (int32_t j = 0; j < v->n; j++) e[j] = (double)v->row[j];
        return;
    }
    memset(e, 0, (size_t)v->n * sizeof *e);
    for (int h = 0; h < v->n_head; h++) {
        head_view x = head_of(s, v, h);
        if (!(x.mass > 0)) continue;
        double o[x.dim + 1];
        if (p->flavour != VALUE) head_output(v, &x, o);
        for (int32_t j = 0; j < v->n; j++) {
            int32_t i = v->entry[j];
            double a = (double)x.row[i] / x.mass;
            double one =
                p->flavour == VALUE ? value_saliency(p, &x, i, a) : key_saliency(p, &x, i, a, o, v->data->scale);
            e[j] = p->take_max ? fmax(e[j], one) : e[j] + one / v->n_head;
        }
    }
}

/* ---- over rows -------------------------------------------------------------------------------------------------- */

static void observe(const policy_setup *s, const policy_view *v) {
    const plan *p = plan_in(s);
    double *e = v->field[fields(s) - 1], *f = v->field[p->memory == RECENT ? v->t % (int32_t)p->window : 0];
    if (p->memory != LAST && p->window > 0 && v->t < v->n_prompt - p->window) return;
    saliencies(s, v, e);
    if (p->memory == SUM)
        for (int32_t j = 0; j < v->n; j++) f[j] += e[j];
    else memcpy(f, e, (size_t)v->n * sizeof *f);
}

static const double *score(const policy_setup *s, const policy_view *v, double *scratch) {
    const plan *p = plan_in(s);
    double *sum = v->field[0];
    if (p->memory == RECENT) {
        sum = v->field[fields(s) - 1];
        rows_sum(v, (int)p->window, sum);
    }
    if (p->pool == NO_POOL) return sum;
    int32_t older = rows_older(v, (int)p->window);
    pool_around(p->pool == POOL_MEAN ? POOL_AVG : POOL_MAX, sum, older, p->kernel, scratch);
    for (int32_t j = older; j < v->n; j++) scratch[j] = sum[j];
    return scratch;
}

#define OBCACHE(symbol, name_, prune_, memory_, hold_, help_, source_)                                               \
    const policy symbol = {                                                                                          \
        .abi = POLICY_ABI,                                                                                           \
        .name = name_,                                                                                               \
        .help = help_,                                                                                               \
        .source = source_,                                                                                           \
        .family = FAMILY_ATTENTION,                                                                                  \
        .evidence = "attn",                                                                                          \
        .params =                                                                                                    \
            (const policy_param[]){                                                                                  \
                {.name = "prune",                                                                                    \
                 .type = PARAM_WORD,                                                                                 \
                 .initial = prune_,                                                                                  \
                 .words = "value|key|joint|nocross",                                                                 \
                 .positional = true,                                                                                 \
                 .help = "what is pruned; nocross is joint without the mixed term"},                                 \
                {.name = "p",                                                                                        \
                 .type = PARAM_WORD,                                                                                 \
                 .initial = "2",                                                                                     \
                 .words = "2|1",                                                                                     \
                 .help = "norm, and power of the weight"},                                                           \
                {.name = "vnorm",                                                                                    \
                 .type = PARAM_WORD,                                                                                 \
                 .initial = "yes",                                                                                   \
                 .words = "yes|no",                                                                                  \
                 .help = "no: the power of the weight alone"},                                                       \
                {.name = "memory",                                                                                   \
                 .type = PARAM_WORD,                                                                                 \
                 .initial = memory_,                                                                                 \
                 .words = "sum|last|recent",                                                                         \
                 .help = "the prompt's last window rows and all after it, the last row, or the last window rows"},   \
                {.name = "window",                                                                                   \
                 .type = PARAM_COUNT,                                                                                \
                 .initial = "budget/2",                                                                              \
                 .max = 1e9,                                                                                         \
                 .help = "rows of the prompt that count, and its newest entries that are not pooled; 0 = all rows"}, \
                {.name = "pool",                                                                                     \
                 .type = PARAM_WORD,                                                                                 \
                 .initial = "none",                                                                                  \
                 .words = "none|" POOL_WORDS,                                                                        \
                 .help = "smoothing over neighbours"},                                                               \
                ROWS_KERNEL("7", "neighbours that pool looks at; odd"),                                              \
                POLICY_GUARDS("0", hold_, "head", ""),                                                               \
            },                                                                                                       \
        .init = init,                                                                                                \
        .fields = fields,                                                                                            \
        .observe = observe,                                                                                          \
        .score = score,                                                                                              \
    }

#define PAPER "Gu et al. 2025, OBCache, arXiv:2510.07651"
OBCACHE(policy_obcache, "obcache", "joint", "sum", "budget/2",
        "how far pruning an entry's value, key or both moves the attention output, added up over queries",
        PAPER " (on H2O; memory=last: on TOVA; pool=max: on SnapKV)");
OBCACHE(policy_obcache_value, "obcache-value", "value", "sum", "budget/2",
        "how far pruning an entry's value moves the attention output, added up over queries",
        PAPER " (value pruning, on H2O)");
OBCACHE(policy_obcache_key, "obcache-key", "key", "sum", "budget/2",
        "how far pruning an entry's key moves the attention output, added up over queries",
        PAPER " (key pruning, on H2O)");
OBCACHE(policy_obcache_tova, "obcache-tova", "joint", "last", "0",
        "how far pruning an entry's value and key moves the attention output of the last query",
        PAPER " (joint pruning, on TOVA)");
