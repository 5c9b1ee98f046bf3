/* Plugins with one fault each, chosen by -DFAULT=n: what kvlag must refuse or report (tests/cli/test_packages.py). */
#include "base/err.h"
#include "sim/policy.h"

#include <math.h>

enum {
    NO_FAULT,
    OLD_ABI,
    TAKEN_NAME,
    NO_SCORE,
    NAN_SCORE,
    NO_SCORES_AT_ALL,
    REFUSES,
    MANY_FIELDS,
    NAME_OF_MIX,
    EMPTY_LIST
};

int no_such_function(void);

static int init(policy_setup *s) {
    s->needs = NEEDS_ROW;
#ifdef UNDEFINED
    return no_such_function();
#endif
    return FAULT == REFUSES ? err_set(ERR_USAGE, "faulty: no thanks") : 0;
}

static int fields(const policy_setup *s) {
    (void)s;
    return FAULT == MANY_FIELDS ? -3 : 1;
}

static void observe(const policy_setup *s, const policy_view *v) {
    (void)s;
    for (int32_t j = 0; j < v->n; j++) v->field[0][j] += (double)v->row[j];
    if (FAULT == NAN_SCORE && v->t == 40 && v->layer == 1) v->field[0][3] = NAN;
}

static const double *score(const policy_setup *s, const policy_view *v, double *scratch) {
    (void)s;
    (void)scratch;
    return FAULT == NO_SCORES_AT_ALL ? NULL : v->field[0];
}

static const policy_param params[] = {
    {.name = FAULT == NAME_OF_MIX ? "evidence" : "x", .type = PARAM_COUNT, .initial = "", .max = 9, .help = "nothing"},
    POLICY_GUARDS("0", "0", "head", ""),
};

static const policy faulty = {
    .abi = FAULT == OLD_ABI ? POLICY_ABI - 1 : POLICY_ABI,
    .name = FAULT == TAKEN_NAME ? "h2o" : "faulty",
    .help = "has a fault",
    .source = "tests",
    .family = FAMILY_ATTENTION,
    .params = params,
    .init = init,
    .fields = fields,
    .observe = observe,
    .score = FAULT == NO_SCORE ? NULL : score,
};

#ifndef UNNAMED
const policy *const kvlag_policies[] = {FAULT == EMPTY_LIST ? NULL : &faulty, NULL};
#endif
