/* Scissorhands, the count: evict what was below the mean share most often among the last `window` rows.
 *
 * Entry i is charged one for every row t of the last w in which a_t(i) < tau, tau = 1/residents; the most often charged
 * leaves first (Liu et al. 2023, arXiv:2305.17118, algorithm 2: history window 400, recent window 10 held back, half of
 * the budget dropped at once, which is schedule=watermark:0.5). A young entry has had few rows to be charged in. The
 * sum of the same rows is the preset scissorhands-sum. */
#include "sim/policies/presets.h"
#include "sim/policies/rows.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

/* The ring holds one bit for each row: 48 to a field, which an f64 holds exactly. */
enum { BITS = 48 };

static int window_of(const policy_setup *s) {
    return (int)policy_get(s, "window")->number;
}

static int init(policy_setup *s) {
    s->needs = NEEDS_ROW;
    return rows_check(s);
}

static int fields(const policy_setup *s) {
    return (window_of(s) + BITS - 1) / BITS;
}

static void observe(const policy_setup *s, const policy_view *v) {
    const policy_value *tau = policy_get(s, "tau");
    double threshold = tau->per_resident ? tau->number / v->n : tau->number;
    int slot = v->t % window_of(s);
    uint64_t bit = (uint64_t)1 << slot % BITS;
    double *f = v->field[slot / BITS];
    for (int32_t j = 0; j < v->n; j++) {
        uint64_t history = (uint64_t)f[j] & ~bit;
        f[j] = (double)((double)v->row[j] < threshold ? history | bit : history);
    }
}

static const double *score(const policy_setup *s, const policy_view *v, double *scratch) {
    int n_fields = fields(s);
    memset(scratch, 0, (size_t)v->n * sizeof *scratch);
    for (int k = 0; k < n_fields; k++)
        for (int32_t j = 0; j < v->n; j++) scratch[j] -= __builtin_popcountll((uint64_t)v->field[k][j]);
    return scratch;
}

const policy policy_scissorhands = {
    .abi = POLICY_ABI,
    .name = "scissorhands",
    .help = "evict what was below the mean share most often in a window of rows",
    .source = "Liu et al. 2023, Scissorhands, arXiv:2305.17118 (algorithm 2)",
    .family = FAMILY_ATTENTION,
    .params =
        (const policy_param[]){
            {.name = "window",
             .type = PARAM_COUNT,
             .initial = "400",
             .min = 1,
             .max = ROWS_MAX,
             .help = "rows of history"},
            {.name = "tau",
             .type = PARAM_NUMBER,
             .initial = "1/resident",
             .max = 1,
             .per_resident = true,
             .help = "attention below this counts against an entry; 1/resident is the mean share"},
            POLICY_GUARDS("0", "10", "head", ""),
        },
    .init = init,
    .fields = fields,
    .observe = observe,
    .score = score,
};
