/* The eviction error in closed form: how far the attention output moves when one entry leaves and the row is
 * renormalised.
 *
 * With weights a, the score from rows alone divided by its sum over the residents, and o = sum of a v: losing entry i
 * moves o by a_i / (1 - a_i) |o - v_i|. For memory=last the weights are the unit's row itself and this is no estimate.
 * A unit of several kv heads has one row and the values of all its heads side by side. The fast form puts the plain
 * mean of the values in place of o. */
#include "sim/policies/output.h"
#include "sim/policies/presets.h"
#include "sim/policies/vectors.h"

#include <math.h>
#include <string.h>

enum { EXACT, FAST };

static int init(policy_setup *s) {
    return output_init(s, NEEDS_VALUES);
}

/* Distances follow the fields of mix. */
static int fields(const policy_setup *s) {
    return mix_fields(s) + 1;
}

static double sum_of(const double *x, int32_t n) {
    double sum = 0;
    for (int32_t j = 0; j < n; j++) sum += x[j];
    return sum;
}

/* The weighted mean of a kv head's values (weight NULL: the plain mean). */
static void mean_value(const policy_view *v, const float *values, const double *weight, double total, double *mean) {
    size_t dim = (size_t)v->data->shape.head_dim;
    memset(mean, 0, dim * sizeof *mean);
    for (int32_t j = 0; j < v->n; j++) vec_add(mean, values + (size_t)v->entry[j] * dim, weight ? weight[j] : 1, dim);
    for (size_t c = 0; c < dim; c++) mean[c] /= total;
}

/* square[j] += |mean - v_j|^2. Returns |mean|^2. */
static double add_squares(const policy_view *v, const float *values, const double *mean, double *square) {
    size_t dim = (size_t)v->data->shape.head_dim;
    double own = 0;
    for (int32_t j = 0; j < v->n; j++) {
        const float *x = values + (size_t)v->entry[j] * dim;
        for (size_t c = 0; c < dim; c++) square[j] += (mean[c] - (double)x[c]) * (mean[c] - (double)x[c]);
    }
    for (size_t c = 0; c < dim; c++) own += mean[c] * mean[c];
    return own;
}

static const double *score(const policy_setup *s, const policy_view *v, double *scratch) {
    const double *weight = mix_score(s, v, scratch);
    double *square = v->field[mix_fields(s)], total = sum_of(weight, v->n), own = 0;
    double mean[v->data->shape.head_dim];
    bool fast = policy_get(s, "form")->word == FAST;
    memset(square, 0, (size_t)v->n * sizeof *square);
    for (int kv = 0; kv < v->data->shape.n_kv && total > 0; kv++) {
        mean_value(v, v->data->v[kv], fast ? NULL : weight, fast ? v->n : total, mean);
        own += add_squares(v, v->data->v[kv], mean, square);
    }
    for (int32_t j = 0; j < v->n; j++) {
        /* An entry that has all the weight leaves nothing behind: all of the output is lost. */
        double rest = total - weight[j];
        scratch[j] = rest > 1e-9 * total ? weight[j] / rest * sqrt(square[j]) : sqrt(own);
    }
    return scratch;
}

#define CAOTE(symbol, name_, form_, memory_, hold_, help_, source_)                                \
    const policy symbol = {                                                                        \
        .abi = POLICY_ABI,                                                                         \
        .name = name_,                                                                             \
        .help = help_,                                                                             \
        .source = source_,                                                                         \
        .family = FAMILY_ATTENTION,                                                                \
        .evidence = "attn",                                                                        \
        .params =                                                                                  \
            (const policy_param[]){                                                                \
                {.name = "form",                                                                   \
                 .type = PARAM_WORD,                                                               \
                 .initial = form_,                                                                 \
                 .words = "exact|fast",                                                            \
                 .positional = true,                                                               \
                 .help = "distance of a value from the attention output, or from the mean value"}, \
                OUTPUT_MEMORY(memory_),                                                            \
                POLICY_GUARDS("0", hold_, "head", ""),                                             \
            },                                                                                     \
        .init = init,                                                                              \
        .fields = fields,                                                                          \
        .observe = mix_observe,                                                                    \
        .first_wanted = mix_first_wanted,                                                          \
        .score = score,                                                                            \
    }

#define PAPER "Goel et al. 2025, CAOTE and FastCAOTE, arXiv:2504.14051"
CAOTE(policy_caote, "caote", "exact", "last", "0",
      "how far the attention output would move if the entry left, in closed form", PAPER " (on TOVA)");
CAOTE(policy_caote_h2o, "caote-h2o", "exact", "sum", "budget/2",
      "how far the mean output under accumulated attention would move, and a recent half", PAPER " (on H2O)");
CAOTE(policy_caote_fast, "caote-fast", "fast", "last", "0",
      "caote with the mean value in place of the attention output", PAPER " (FastCAOTE, on TOVA)");
