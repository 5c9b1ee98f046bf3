/* H2O as OpenVINO GenAI's cache eviction has it: all heads of a layer together, pooled ahead, normalised by lifetime.
 *
 * Every row is max-pooled ahead (an entry gets the largest value among itself and the ahead-1 residents that follow)
 * and added up; with aggregate=norm the sum is divided by the number of rows it saw. The prompt's rows come as one, as
 * from one forward pass: only its last `window` rows are added up, then pooled once; window=0 takes all of them. The
 * engine adds: first 32 and newest 128 entries stay, and whole blocks leave by the sum of their scores,
 * schedule=block:16 (32 on CPUs; a block's mean is its sum over its size). */
#include "base/err.h"
#include "sim/policies/presets.h"
#include "sim/policies/rows.h"

enum { SUM, ROW, N_FIELDS }; /* ROW: the prompt's sum before pooling, then room for one row */
enum { NORM, PLAIN };

static int init(policy_setup *s) {
    s->needs = NEEDS_ROW;
    const policy_value *ahead = policy_get(s, "ahead");
    if (ahead->number < 1 || ahead->number > KERNEL_MAX)
        return err_set(ERR_USAGE, "h2o-openvino: ahead=%s is %g, want 1 to %d", ahead->text, ahead->number, KERNEL_MAX);
    return 0;
}

static int fields(const policy_setup *s) {
    (void)s;
    return N_FIELDS;
}

/* First row that counts for the entries of the prompt. */
static int32_t first_row(const policy_setup *s, const policy_view *v) {
    double window = policy_get(s, "window")->number;
    return window > 0 && window < v->n_prompt ? v->n_prompt - (int32_t)window : 0;
}

static void observe(const policy_setup *s, const policy_view *v) {
    bool in_prompt = v->t < v->n_prompt;
    double *row = v->field[ROW], *sum = v->field[SUM];
    if (in_prompt && v->t < first_row(s, v)) return;
    for (int32_t j = 0; j < v->n; j++) row[j] = (in_prompt ? row[j] : 0) + (double)v->row[j];
    if (v->t < v->n_prompt - 1) return;
    pool_ahead(row, v->n, (int)policy_get(s, "ahead")->number);
    for (int32_t j = 0; j < v->n; j++) sum[j] += row[j];
}

static const double *score(const policy_setup *s, const policy_view *v, double *scratch) {
    if (policy_get(s, "aggregate")->word == PLAIN) return v->field[SUM];
    int32_t first = first_row(s, v);
    for (int32_t j = 0; j < v->n; j++) {
        int32_t rows = v->t - (v->entry[j] < first ? first : v->entry[j]) + 1;
        scratch[j] = v->field[SUM][j] / (rows < 1 ? 1 : rows); /* a cut-off may ask before the first row */
    }
    return scratch;
}

const policy policy_h2o_openvino = {
    .abi = POLICY_ABI,
    .name = "h2o-openvino",
    .help = "heavy hitters of a layer, pooled ahead, by lifetime; published with schedule=block:16",
    .source = "OpenVINO GenAI cache_eviction.cpp (NORM_SUM), after H2O, arXiv:2306.14048",
    .family = FAMILY_ATTENTION,
    .params =
        (const policy_param[]){
            {.name = "ahead",
             .type = PARAM_COUNT,
             .initial = "7",
             .min = 1,
             .max = KERNEL_MAX,
             .help = "entries whose largest value one gets, itself included"},
            {.name = "window",
             .type = PARAM_COUNT,
             .initial = "8",
             .max = 1e9,
             .help = "last rows of the prompt that count; 0 = all"},
            {.name = "aggregate",
             .type = PARAM_WORD,
             .initial = "norm",
             .words = "norm|sum",
             .help = "sum over rows divided by their number, or not"},
            POLICY_GUARDS("32", "128", "layer", ""),
        },
    .init = init,
    .fields = fields,
    .observe = observe,
    .score = score,
};
