/* Hindsight: score an entry by what will still be asked of it (Belady's rule with a price in place of the next use).
 *
 * The score of entry i after step t is the sum over the counted rows s > t of the full run's mean row (mass), or of its
 * Fisher evidence (loss): what losing it would add to the KL divergence. The field holds what is left of the column's
 * total: total - rows seen, so memory is O(residents) and the T x T matrix never exists. Greedy future mass is optimal
 * for a single eviction and a strong heuristic otherwise. */
#include "sim/policies/presets.h"

#include <string.h>

enum { OF_MASS, OF_LOSS };

static int init(policy_setup *s) {
    s->needs = NEEDS_FUTURE | (policy_get(s, "of")->word == OF_LOSS ? NEEDS_FISHER : 0);
    return 0;
}

static int fields(const policy_setup *s) {
    (void)s;
    return 1;
}

static double mean_full(const policy_view *v, int32_t i) {
    double sum = 0;
    for (int h = 0; h < v->n_head; h++) sum += (double)v->heads[h][i];
    return sum / v->n_head;
}

static void observe(const policy_setup *s, const policy_view *v) {
    double *left = v->field[0];
    left[v->n - 1] = v->future_total[v->t];
    if (!v->counted) return;
    if (s->needs & NEEDS_FISHER)
        for (int32_t j = 0; j < v->n; j++) left[j] -= (double)v->fisher[v->entry[j]];
    else
        for (int32_t j = 0; j < v->n; j++) left[j] -= mean_full(v, v->entry[j]);
}

static void score(const policy_setup *s, const policy_view *v, double *out) {
    (void)s;
    memcpy(out, v->field[0], (size_t)v->n * sizeof *out);
}

const policy policy_oracle = {
    .abi = POLICY_ABI,
    .name = "oracle",
    .help = "hindsight: evict the entry that will be missed least",
    .source = "Belady 1966, with the full run's future attention mass or Fisher evidence",
    .family = FAMILY_ORACLE,
    .params =
        (const policy_param[]){
            {.name = "of",
             .type = PARAM_WORD,
             .words = "mass|loss",
             .positional = true,
             .help = "what is summed over the future: attention mass, or the Fisher evidence of loss"},
            POLICY_GUARDS("0", "0", "head", ""),
        },
    .init = init,
    .fields = fields,
    .observe = observe,
    .score = score,
};
