/* LazyEviction: how long did an entry ever rest between two uses, and has it rested longer than that by now?
 *
 * A use is a row with a_t(i) >= alpha. An entry keeps the step of its last use, at first the one before it arrived, and
 * the longest interval I between two uses, at first 0. After step t
 *
 *     score = 2 s(-(shift + (t - last)/I)) + 2 s(-(I - 1)),   s(x) = 1/(1 + exp(-x));   0 where I = 0
 *
 * (Zhang et al. 2025, arXiv:2506.15969: shift 0; the published code adds 1). The paper decides every W steps and keeps
 * the W newest: hold=W with schedule=every:W, W found from a model's intervals (52 for an 8B Llama on MATH). Its code
 * tracks uses from the first generated token on; here the prompt's rows count like any others. */
#include "sim/policies/presets.h"

#include <math.h>

enum { LAST, INTERVAL, N_FIELDS };

static int init(policy_setup *s) {
    s->needs = NEEDS_ROW;
    return 0;
}

static int fields(const policy_setup *s) {
    (void)s;
    return N_FIELDS;
}

static void observe(const policy_setup *s, const policy_view *v) {
    double alpha = policy_get(s, "alpha")->number, *last = v->field[LAST], *interval = v->field[INTERVAL];
    last[v->n - 1] = v->t - 1;
    for (int32_t j = 0; j < v->n; j++) {
        if ((double)v->row[j] < alpha) continue;
        interval[j] = fmax(interval[j], v->t - last[j]);
        last[j] = v->t;
    }
}

static double falling(double x) {
    return 2 / (1 + exp(x));
}

static const double *score(const policy_setup *s, const policy_view *v, double *scratch) {
    double shift = policy_get(s, "shift")->number;
    for (int32_t j = 0; j < v->n; j++) {
        double longest = v->field[INTERVAL][j], rested = v->t - v->field[LAST][j];
        scratch[j] = longest > 0 ? falling(shift + rested / longest) + falling(longest - 1) : 0;
    }
    return scratch;
}

#define LAZY(symbol, name_, shift_, help_, source_)                                                \
    const policy symbol = {                                                                        \
        .abi = POLICY_ABI,                                                                         \
        .name = name_,                                                                             \
        .help = help_,                                                                             \
        .source = source_,                                                                         \
        .family = FAMILY_ATTENTION,                                                                \
        .params = (const policy_param[]){{.name = "alpha",                                         \
                                          .type = PARAM_NUMBER,                                    \
                                          .initial = "0.0005",                                     \
                                          .max = 1,                                                \
                                          .help = "attention that counts as a use"},               \
                                         {.name = "shift",                                         \
                                          .type = PARAM_NUMBER,                                    \
                                          .initial = shift_,                                       \
                                          .max = 100,                                              \
                                          .help = "added to rest over interval: 0 paper, 1 code"}, \
                                         POLICY_GUARDS("0", "52", "head", "")},                    \
        .init = init,                                                                              \
        .fields = fields,                                                                          \
        .observe = observe,                                                                        \
        .score = score,                                                                            \
    }

LAZY(policy_lazy, "lazy", "0",
     "evict what has rested longer than ever between two uses; published with schedule=every:52",
     "Zhang et al. 2025, LazyEviction, arXiv:2506.15969");
LAZY(policy_lazy_code, "lazy-code", "1", "LazyEviction as its published code scores it",
     "Zhang et al. 2025, LazyEviction, arXiv:2506.15969 (the published code)");
