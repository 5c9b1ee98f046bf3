/* Hindsight: score an entry by what will still be asked of it (Belady's rule with a price in place of the next use).
 *
 * The score of entry i after step t is the sum over the counted rows among t+1 .. t+horizon of the full run's mean row
 * (mass), or of its Fisher evidence (loss): what losing it would add to the KL divergence. The engine keeps these sums,
 * one for all configurations of a horizon (hindsight.c). Greedy future mass is optimal for a single eviction and a
 * strong heuristic otherwise. With horizon 0 nothing is known, all scores are 0 and the oldest entry leaves. */
#include "sim/policies/presets.h"

enum { OF_MASS, OF_LOSS };

static int init(policy_setup *s) {
    s->needs = NEEDS_FUTURE | (policy_get(s, "of")->word == OF_LOSS ? NEEDS_FISHER : 0);
    s->horizon = policy_get(s, "horizon")->number;
    return 0;
}

static int fields(const policy_setup *s) {
    (void)s;
    return 0;
}

static void observe(const policy_setup *s, const policy_view *v) {
    (void)s;
    (void)v;
}

static const double *score(const policy_setup *s, const policy_view *v, double *scratch) {
    (void)s;
    for (int32_t j = 0; j < v->n; j++) scratch[j] = v->future[v->entry[j]];
    return scratch;
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
            {.name = "horizon",
             .type = PARAM_COUNT,
             .initial = "inf",
             .max = 1e9,
             .infinite = true,
             .help = "how many rows ahead it looks; inf is to the end"},
            POLICY_GUARDS("0", "0", "head", ""),
        },
    .init = init,
    .fields = fields,
    .observe = observe,
    .score = score,
};
