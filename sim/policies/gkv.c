/* G-KV: R-KV's trade with an importance that remembers.
 *
 * For residents older than the window: the mean of the last `window` rows, the largest of the unit's query heads
 * (row=max), divided by its largest value, is the local score; the global one is F = max(alpha F, local), renewed
 * whenever something must leave, from 0. score = lambda F - (1-lambda) redundancy, the latter divided by its largest
 * value, too (redundancy.h). Entries of the window rank above all others (hold=window sets them aside, as published).
 * Liao et al. 2025, arXiv:2512.00504, and its inference script: window 16, alpha .8, lambda .5, every 128 tokens. alpha
 * is a loss for each decision, so with schedule=step it is one for each step: use schedule=every:128. Rows are those
 * that were served; the published code asks the last queries again, which is the same while nothing left in between. */
#include "sim/policies/presets.h"
#include "sim/policies/redundancy.h"
#include "sim/policies/rows.h"

#include <math.h>
#include <string.h>

static int window_of(const policy_setup *s) {
    return (int)policy_get(s, "window")->number;
}

static int init(policy_setup *s) {
    s->needs = NEEDS_ROW | NEEDS_KEYS;
    return rows_check(s);
}

/* Behind the ring of rows: F, and room for two rows of work. */
static int fields(const policy_setup *s) {
    return window_of(s) + 3;
}

static void observe(const policy_setup *s, const policy_view *v) {
    rows_observe(v, window_of(s));
}

static void divide_by_largest(double *x, int32_t n) {
    double most = 0;
    for (int32_t j = 0; j < n; j++) most = fmax(most, x[j]);
    for (int32_t j = 0; j < n && most > 0; j++) x[j] /= most;
}

static const double *score(const policy_setup *s, const policy_view *v, double *scratch) {
    int w = window_of(s);
    double alpha = policy_get(s, "alpha")->number, lambda = policy_get(s, "lambda")->number;
    double *global = v->field[w], *local = v->field[w + 1], *work = v->field[w + 2];
    int32_t older = rows_older(v, w), n_kv = v->data->shape.n_kv;
    rows_sum(v, w, local);
    divide_by_largest(local, older);
    for (int32_t j = 0; j < older; j++) {
        global[j] = fmax(alpha * global[j], local[j]);
        scratch[j] = lambda * global[j];
    }
    redundancy_rule rule = {.similar = policy_get(s, "similar")->number, .excuse_nothing = true};
    for (int32_t kv = 0; kv < n_kv && older; kv++) {
        redundancy_of(v, kv, &rule, work, local);
        divide_by_largest(local, older);
        for (int32_t j = 0; j < older; j++) scratch[j] -= (1 - lambda) * local[j] / n_kv;
    }
    for (int32_t j = older; j < v->n; j++) scratch[j] = 2; /* F is at most 1 */
    return scratch;
}

const policy policy_gkv = {
    .abi = POLICY_ABI,
    .name = "gkv",
    .help = "local attention with a memory, less redundancy among keys; published with schedule=every:128",
    .source = "Liao et al. 2025, G-KV, arXiv:2512.00504",
    .family = FAMILY_ATTENTION,
    .params =
        (const policy_param[]){
            ROWS_WINDOW("16"),
            {.name = "alpha",
             .type = PARAM_NUMBER,
             .initial = "0.8",
             .max = 1,
             .help = "share of the global score kept at each decision"},
            {.name = "lambda",
             .type = PARAM_NUMBER,
             .initial = "0.5",
             .max = 1,
             .help = "weight of the global score; the rest is that of redundancy"},
            REDUNDANCY_SIMILAR,
            POLICY_GUARDS_ROW("0", "16", "head", "", "max"),
        },
    .init = init,
    .fields = fields,
    .state = redundancy_state,
    .observe = observe,
    .score = score,
};
