/* Value-aware token pruning: the score from rows alone times |v|_1.
 *
 * The first entries are exempt (sinks): their values are small, but the model leans on them. vatp-scissorhands is the
 * paper's variant on Scissorhands, as far as its one eviction after the prompt goes (schedule=prompt). */
#include "sim/policies/output.h"
#include "sim/policies/presets.h"

static int init(policy_setup *s) {
    return output_init(s, NEEDS_VALUES);
}

/* The norms follow the fields of mix. */
static int fields(const policy_setup *s) {
    return mix_fields(s) + 1;
}

static void observe(const policy_setup *s, const policy_view *v) {
    mix_observe(s, v);
    v->field[mix_fields(s)][v->n - 1] = output_value_norm(v, v->t);
}

static const double *score(const policy_setup *s, const policy_view *v, double *scratch) {
    const double *attention = mix_score(s, v, scratch), *norm = v->field[mix_fields(s)];
    for (int32_t j = 0; j < v->n; j++) scratch[j] = attention[j] * norm[j];
    return scratch;
}

#define VATP(symbol, name_, memory_, hold_, help_, source_) \
    const policy symbol = {                                 \
        .abi = POLICY_ABI,                                  \
        .name = name_,                                      \
        .help = help_,                                      \
        .source = source_,                                  \
        .family = FAMILY_ATTENTION,                         \
        .evidence = "attn",                                 \
        .params =                                           \
            (const policy_param[]){                         \
                OUTPUT_MEMORY(memory_),                     \
                POLICY_GUARDS("20", hold_, "head", ""),     \
            },                                              \
        .init = init,                                       \
        .fields = fields,                                   \
        .observe = observe,                                 \
        .first_wanted = mix_first_wanted,                   \
        .score = score,                                     \
    }

#define PAPER "Guo et al. 2024, VATP, arXiv:2406.12335"
VATP(policy_vatp, "vatp", "sum", "budget/2", "accumulated attention times the size of the value; sinks are exempt",
     PAPER " (on H2O; 20 sinks)");
VATP(policy_vatp_scissorhands, "vatp-scissorhands", "recent:400", "10",
     "attention of the last 400 rows times the size of the value; published with schedule=prompt",
     PAPER " (on Scissorhands; 20 sinks)");
