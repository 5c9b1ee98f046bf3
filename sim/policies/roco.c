/* RoCo: the lowest mean attention leaves, but not what is still attended to unsteadily.
 *
 * Of every resident's rows since arrival come mean and standard deviation. Those with the largest deviations are
 * protected: all but k = (n-1) - floor(protect (n-1)), where n-1 stands for the budget, which one arrival exceeds; the
 * `young` newest count as having the largest of all. Among the others the lowest mean leaves (Ren and Zhu 2024,
 * arXiv:2402.06262, and EasyKV: protect .3, young 10). Where more must leave than the k others, protected entries
 * follow, again by their mean. Ties in the deviation are no protection to the older one. */
#include "sim/policies/presets.h"

#include <float.h>
#include <math.h>
#include <string.h>

enum { SUM, SQUARES, DEVIATION, SORTED, N_FIELDS };

static int init(policy_setup *s) {
    s->needs = NEEDS_ROW;
    return 0;
}

static int fields(const policy_setup *s) {
    (void)s;
    return N_FIELDS;
}

static void observe(const policy_setup *s, const policy_view *v) {
    (void)s;
    double *sum = v->field[SUM], *squares = v->field[SQUARES];
    for (int32_t j = 0; j < v->n; j++) {
        double a = (double)v->row[j];
        sum[j] += a;
        squares[j] += a * a;
    }
}

static void swap(double *x, int32_t i, int32_t j) {
    double kept = x[i];
    x[i] = x[j];
    x[j] = kept;
}

/* The k-th smallest (from 0) of n values; reorders them. */
static double smallest(double *x, int32_t n, int32_t k) {
    int32_t from = 0, to = n - 1;
    while (from < to) {
        double pivot = x[from + (to - from) / 2];
        int32_t i = from, j = to;
        while (i <= j) {
            while (x[i] < pivot) i++;
            while (x[j] > pivot) j--;
            if (i <= j) swap(x, i++, j--);
        }
        if (k <= j) to = j;
        else if (k >= i) from = i;
        else break;
    }
    return x[k];
}

static void deviations(const policy_setup *s, const policy_view *v, double *mean) {
    double *deviation = v->field[DEVIATION], young = policy_get(s, "young")->number;
    for (int32_t j = 0; j < v->n; j++) {
        int32_t rows = v->t - v->entry[j] + 1;
        mean[j] = v->field[SUM][j] / rows;
        deviation[j] = sqrt(fmax(0, v->field[SQUARES][j] / rows - mean[j] * mean[j]));
        if (v->n - j <= young) deviation[j] = DBL_MAX;
    }
}

static const double *score(const policy_setup *s, const policy_view *v, double *scratch) {
    deviations(s, v, scratch);
    int32_t n = v->n, k = n - 1 - (int32_t)floor(policy_get(s, "protect")->number * (n - 1));
    if (k < 1) k = 1;
    const double *deviation = v->field[DEVIATION];
    memcpy(v->field[SORTED], deviation, (size_t)n * sizeof *deviation);
    double bar = smallest(v->field[SORTED], n, k - 1);
    for (int32_t j = 0; j < n; j++) k -= deviation[j] < bar; /* what is left are ties with the bar */
    for (int32_t j = 0; j < n; j++)
        if (deviation[j] > bar || (deviation[j] == bar && k-- <= 0)) scratch[j] += 2; /* above any mean */
    return scratch;
}

const policy policy_roco = {
    .abi = POLICY_ABI,
    .name = "roco",
    .help = "evict the lowest mean attention among entries whose attention is steady",
    .source = "Ren and Zhu 2024, RoCo, arXiv:2402.06262 (EasyKV, decoding)",
    .family = FAMILY_ATTENTION,
    .params =
        (const policy_param[]){
            {.name = "protect",
             .type = PARAM_NUMBER,
             .initial = "0.3",
             .max = 1,
             .help = "share of the residents whose attention varies most: they stay"},
            {.name = "young",
             .type = PARAM_COUNT,
             .initial = "10",
             .max = 1e9,
             .help = "newest entries that count as varying most"},
            POLICY_GUARDS("0", "0", "head", ""),
        },
    .init = init,
    .fields = fields,
    .observe = observe,
    .score = score,
};
