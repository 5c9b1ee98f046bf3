/* Value-aware token pruning: the score from rows alone times |v|_1.
 *
 * The first entries are exempt (sinks): their values are small, but the model leans on them. With memory=recent:400 and
 * hold=10 it is the paper's variant on Scissorhands, as far as its one eviction after the prompt goes
 * (schedule=prompt); the default is the one on H2O. */
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

const policy policy_vatp = {
    .abi = POLICY_ABI,
    .name = "vatp",
    .help = "accumulated attention times the size of the value; sinks are exempt",
    .source = "Guo et al. 2024, VATP, arXiv:2406.12335 (on H2O; 20 sinks)",
    .family = FAMILY_ATTENTION,
    .evidence = "attn",
    .params =
        (const policy_param[]){
            OUTPUT_MEMORY("sum"),
            POLICY_GUARDS("20", "budget/2", "head", ""),
        },
    .init = init,
    .fields = fields,
    .observe = observe,
    .first_wanted = mix_first_wanted,
    .score = score,
};
