/* Expected attention: what coming queries will ask for, if they are like those so far (Devoto et al. 2025,
 * arXiv:2510.00636; kvpress ExpectedAttentionPress).
 *
 * The queries before RoPE, those of the sinks left out, have a mean mu and a covariance C. A coming query stands at any
 * of the next n_future positions, so mu and C are turned by the mean R of the rotations there: a query then draws the
 * logit scale k.R mu + scale^2/2 k.(R C R^T) k from a key, the log of the mean of exp(scale q.k) over a normal
 * distribution. Its softmax over the residents behind the sinks, averaged over the query heads of a kv head, is the
 * expected attention a; the score is (a + epsilon) |v|. Larger units: the mean over their kv heads.
 *
 * In a stream mu and C are of all queries so far, since sums of queries can be kept where queries are not. The sinks
 * are outside the statistics, which is why this policy looks at their number. */
#include "sim/policies/presets.h"
#include "sim/policies/vectors.h"
#include "traces/kernels.h"

#include <string.h>

typedef struct expected_plan {
    int32_t sinks, n_future;
    bool covariance, vnorm;
    double epsilon;
} expected_plan;
_Static_assert(sizeof(expected_plan) <= POLICY_PLAN_BYTES, "plan");

enum { LOGIT, ATTENTION, N_FIELDS };

static int init(policy_setup *s) {
    expected_plan *plan = (expected_plan *)(void *)s->plan;
    plan->sinks = (int32_t)policy_get(s, "sinks")->number;
    plan->n_future = (int32_t)policy_get(s, "n_future")->number;
    plan->covariance = policy_get(s, "use_covariance")->word == 0;
    plan->vnorm = policy_get(s, "use_vnorm")->word == 0;
    plan->epsilon = policy_get(s, "epsilon")->number;
    s->needs = NEEDS_KEYS | NEEDS_QUERIES | NEEDS_ROPE | (plan->vnorm ? NEEDS_VALUES : 0);
    return 0;
}

static int fields(const policy_setup *s) {
    (void)s;
    return N_FIELDS;
}

/* ---- the unit's state ------------------------------------------------------------------------------------------- */

typedef struct parts {
    size_t dim, rows; /* rows of the form below */
    double *turn;     /* [dim/2][2] mean of cos, sin over angles 0 .. n_future-1 times a pair's frequency */
    double *query;    /* [dim] before RoPE */
    double *sums;     /* [n_head][rows][dim] row 0: sum of queries, the others: sum of their products */
    double *form;     /* [rows][dim] row 0: R mu, the others: R C R^T */
    float *form_f32;  /* the same */
    float *keys, *packed, *products; /* [16][dim] a few keys, [dim][16] the same, [rows][16] form times keys */
    size_t used;                     /* f64 in all */
} parts;

static void *part(double *state, parts *p, size_t bytes) {
    void *at = state ? state + p->used : NULL;
    p->used += (bytes + 63) / 64 * 8; /* the kernels want 64-byte alignment */
    return at;
}

static parts parts_of(const expected_plan *plan, const policy_shape *shape, double *state) {
    size_t dim = (size_t)shape->head_dim, rows = plan->covariance ? dim + 1 : 1;
    parts p = {.dim = dim, .rows = rows};
    p.turn = part(state, &p, (dim + 1) * sizeof *p.turn);
    p.query = part(state, &p, dim * sizeof *p.query);
    p.sums = part(state, &p, (size_t)shape->n_head * rows * dim * sizeof *p.sums);
    p.form = part(state, &p, rows * dim * sizeof *p.form);
    p.form_f32 = part(state, &p, rows * dim * sizeof *p.form_f32);
    p.keys = part(state, &p, KERNEL_LANES * dim * sizeof *p.keys);
    p.packed = part(state, &p, KERNEL_LANES * dim * sizeof *p.packed);
    p.products = part(state, &p, rows * KERNEL_LANES * sizeof *p.products);
    return p;
}

static const expected_plan *plan_of(const policy_setup *s) {
    return (const expected_plan *)(const void *)s->plan;
}

static size_t state(const policy_setup *s, const policy_shape *shape) {
    return parts_of(plan_of(s), shape, NULL).used;
}

/* ---- rotations -------------------------------------------------------------------------------------------------- */

static double frequency(const policy_layer *d, int32_t pair) {
    return pow(d->rope_base, -2.0 * pair / d->rope_dims);
}

/* The two channels of a pair, as offsets. */
static void pair_at(const policy_layer *d, int32_t pair, size_t *a, size_t *b) {
    *a = (size_t)(d->rope_interleaved ? 2 * pair : pair);
    *b = (size_t)(d->rope_interleaved ? 2 * pair + 1 : pair + d->rope_dims / 2);
}

/* Turn (*a, *b) by a rotation, or a mean of rotations, given as cosine and sine. */
static void turn(double *a, double *b, double cosine, double sine) {
    double was = *a;
    *a = cosine * was - sine * *b;
    *b = sine * was + cosine * *b;
}

static void mean_turns(const policy_layer *d, int32_t n_future, double *out) {
    for (int32_t pair = 0; pair < d->rope_dims / 2; pair++) {
        double angle = frequency(d, pair), cosine = 0, sine = 0;
        for (int32_t k = 0; k < n_future; k++) {
            cosine += cos(k * angle);
            sine += sin(k * angle);
        }
        out[2 * pair] = cosine / n_future;
        out[2 * pair + 1] = sine / n_future;
    }
}

/* ---- what is known of queries ----------------------------------------------------------------------------------- */

static void observe(const policy_setup *s, const policy_view *v) {
    const expected_plan *plan = plan_of(s);
    const policy_layer *d = v->data;
    parts p = parts_of(plan, &d->shape, v->state);
    if (v->t == 0) mean_turns(d, plan->n_future, p.turn);
    if (v->t < plan->sinks) return;
    for (int32_t h = 0; h < d->shape.n_head; h++) {
        const float *q = d->q[h] + (size_t)v->t * p.dim;
        double *sum = p.sums + (size_t)h * p.rows * p.dim;
        for (size_t c = 0; c < p.dim; c++) p.query[c] = (double)q[c];
        for (int32_t pair = 0; pair < d->rope_dims / 2; pair++) {
            size_t a, b;
            double angle = v->t * frequency(d, pair);
            pair_at(d, pair, &a, &b);
            turn(p.query + a, p.query + b, cos(angle), -sin(angle));
        }
        for (size_t c = 0; c < p.dim; c++) sum[c] += p.query[c];
        for (size_t r = 1; r < p.rows; r++)
            for (size_t c = 0; c < p.dim; c++) sum[r * p.dim + c] += p.query[r - 1] * p.query[c];
    }
}

/* Mean and covariance of head h's queries, turned to where the next ones will stand. */
static void make_form(const expected_plan *plan, const policy_view *v, const parts *p, int32_t h) {
    const policy_layer *d = v->data;
    const double *sum = p->sums + (size_t)h * p->rows * p->dim;
    double *form = p->form, *first = form + p->dim, n = v->t + 1 > plan->sinks ? v->t + 1 - plan->sinks : 1;
    for (size_t i = 0; i < p->rows * p->dim; i++) form[i] = sum[i] / n;
    for (size_t r = 1; r < p->rows; r++)
        for (size_t c = 0; c < p->dim; c++) form[r * p->dim + c] -= form[r - 1] * form[c];
    for (int32_t pair = 0; pair < d->rope_dims / 2; pair++) {
        size_t a, b;
        double angle = (v->t + 1) * frequency(d, pair), cosine = p->turn[2 * pair], sine = p->turn[2 * pair + 1];
        turn(&cosine, &sine, cos(angle), sin(angle));
        pair_at(d, pair, &a, &b);
        for (size_t r = 0; r < p->rows; r++) turn(form + r * p->dim + a, form + r * p->dim + b, cosine, sine);
        for (size_t c = 0; c < p->dim && p->rows > 1; c++)
            turn(first + a * p->dim + c, first + b * p->dim + c, cosine, sine);
    }
    for (size_t i = 0; i < p->rows * p->dim; i++) p->form_f32[i] = (float)form[i];
}

/* ---- scores ----------------------------------------------------------------------------------------------------- */

/* Logits of residents j .. j+n-1, n <= 16. */
static void few_logits(const policy_view *v, const parts *p, const float *k, int32_t j, int32_t n) {
    double scale = v->data->scale, square[KERNEL_LANES] = {0};
    for (int32_t i = 0; i < n; i++)
        memcpy(p->keys + (size_t)i * p->dim, k + (size_t)v->entry[j + i] * p->dim, p->dim * sizeof *k);
    kernels()->pack_keys(p->keys, (size_t)n, p->dim, p->packed);
    kernels()->scores(p->form_f32, p->rows, p->packed, (size_t)n, p->dim, 1.0f, p->products, KERNEL_LANES);
    for (size_t r = 1; r < p->rows; r++)
        for (size_t i = 0; i < KERNEL_LANES; i++)
            square[i] += (double)p->packed[(r - 1) * KERNEL_LANES + i] * (double)p->products[r * KERNEL_LANES + i];
    for (int32_t i = 0; i < n; i++) {
        double logit = scale * (double)p->products[i] + scale * scale / 2 * square[i];
        v->field[LOGIT][j + i] = fmin(fmax(logit, -1e300), 1e300); /* finite, should f32 have overflowed */
    }
}

/* Head h's expected attention, a share of a kv head, is added to ATTENTION. */
static void add_attention(const policy_view *v, const parts *p, const float *k, int32_t from, double share) {
    double *logit = v->field[LOGIT], most = -1e300, sum = 0;
    for (int32_t j = from; j < v->n; j += KERNEL_LANES)
        few_logits(v, p, k, j, v->n - j < KERNEL_LANES ? v->n - j : KERNEL_LANES);
    for (int32_t j = from; j < v->n; j++) most = fmax(most, logit[j]);
    for (int32_t j = from; j < v->n; j++) sum += logit[j] = exp(logit[j] - most);
    for (int32_t j = from; j < v->n; j++) v->field[ATTENTION][j] += logit[j] / sum * share;
}

static const double *score(const policy_setup *s, const policy_view *v, double *scratch) {
    const expected_plan *plan = plan_of(s);
    const policy_layer *d = v->data;
    parts p = parts_of(plan, &d->shape, v->state);
    int32_t n_kv = d->shape.n_kv, group = d->shape.n_head / n_kv, from = 0;
    while (from < v->n && v->entry[from] < plan->sinks) from++;
    memset(scratch, 0, (size_t)v->n * sizeof *scratch);
    for (int32_t kv = 0; kv < n_kv; kv++) {
        memset(v->field[ATTENTION], 0, (size_t)v->n * sizeof *scratch);
        for (int32_t h = kv * group; h < (kv + 1) * group; h++) {
            make_form(plan, v, &p, h);
            add_attention(v, &p, d->k[kv], from, 1.0 / group);
        }
        for (int32_t j = from; j < v->n; j++) {
            double a = v->field[ATTENTION][j];
            if (plan->vnorm) a = (a + plan->epsilon) * vec_norm(d->v[kv] + (size_t)v->entry[j] * p.dim, p.dim);
            scratch[j] += a / n_kv;
        }
    }
    return scratch;
}

#define YES_OR_NO(name_, help_) \
    { .name = name_, .type = PARAM_WORD, .initial = "yes", .words = "yes|no", .help = help_ }

const policy policy_expected = {
    .abi = POLICY_ABI,
    .name = "expected",
    .help = "expected attention of coming queries, from the mean and covariance of those so far",
    .source = "Devoto et al. 2025, Expected Attention, arXiv:2510.00636",
    .family = FAMILY_ATTENTION,
    .params =
        (const policy_param[]){
            {.name = "n_future",
             .type = PARAM_COUNT,
             .initial = "512",
             .min = 1,
             .max = 65536,
             .help = "next positions over which the rotation is averaged"},
            YES_OR_NO("use_covariance", "let the queries' covariance count, beside their mean"),
            YES_OR_NO("use_vnorm", "weigh expected attention by |v|"),
            {.name = "epsilon",
             .type = PARAM_NUMBER,
             .initial = "0",
             .max = 1,
             .help = "added to expected attention before it is weighed by |v|"},
            POLICY_GUARDS("4", "0", "head", ""),
        },
    .init = init,
    .fields = fields,
    .state = state,
    .observe = observe,
    .score = score,
};
