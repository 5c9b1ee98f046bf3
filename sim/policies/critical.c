/* Two stages: a share of the cache goes to the highest scores s, the rest to the highest (s + epsilon) |v Wo|_1, which
 * bounds what an entry adds to the layer's output.
 *
 * s is SnapKV's as kvpress has it: the mean over the last `window` rows (memory=recent:64), averaged over `kernel`
 * neighbours, the window itself above all others; or, with window=0, kernel=1 and another memory, any score from rows.
 * The first stage counts entries, held or not: first=budget/2 is half of what is to be kept, at least one. |v Wo|_1 is
 * the mean over the unit's query heads. In decode the stages are chosen anew among the residents at each eviction,
 * whose neighbours are the residents beside them. The paper compresses once, after the prompt: schedule=prompt. */
#include "base/err.h"
#include "sim/policies/output.h"
#include "sim/policies/presets.h"

#include <math.h>
#include <string.h>

static const double chosen = 1e300; /* above any other score; a block's worth of them still has a sum */
enum { COLUMNS = 64 };

static int init(policy_setup *s) {
    TRY(output_init(s, NEEDS_VALUES | NEEDS_WO));
    return rows_check_kernel(s);
}

/* Behind the fields of mix: the norms, and room for the first stage. */
static int fields(const policy_setup *s) {
    return mix_fields(s) + 2;
}

/* |v Wo|_1 of one query head, some columns at a time. */
static double projected_norm(const policy_layer *l, int head, int32_t i) {
    size_t dim = (size_t)l->shape.head_dim, n_embd = (size_t)l->shape.n_embd;
    const float *x = l->v[head / (l->shape.n_head / l->shape.n_kv)] + (size_t)i * dim;
    double norm = 0;
    for (size_t from = 0; from < n_embd; from += COLUMNS) {
        double y[COLUMNS] = {0};
        size_t n = n_embd - from < COLUMNS ? n_embd - from : COLUMNS;
        for (size_t c = 0; c < dim; c++) {
            const float *w = l->wo[head] + c * n_embd + from;
            for (size_t j = 0; j < n; j++) y[j] += (double)x[c] * (double)w[j];
        }
        for (size_t j = 0; j < n; j++) norm += fabs(y[j]);
    }
    return norm;
}

static void observe(const policy_setup *s, const policy_view *v) {
    double norm = 0;
    int n_head = v->data->shape.n_head;
    mix_observe(s, v);
    for (int h = 0; h < n_head; h++) norm += projected_norm(v->data, h, v->t);
    v->field[mix_fields(s)][v->n - 1] = norm / n_head;
}

/* The scores from rows alone, pooled, the window's above all others; `room` as long. */
static void first_scores(const policy_setup *s, const policy_view *v, double *x, double *room) {
    const policy_value *memory = policy_get(s, "memory");
    const double *score = mix_score(s, v, x);
    double rows = memory->word == MEMORY_RECENT ? memory->number : 1, most = 0;
    int32_t old = rows_older(v, (int)policy_get(s, "window")->number);
    for (int32_t j = 0; j < old; j++) room[j] = score[j] / rows;
    pool_around(POOL_AVG, room, old, (int)policy_get(s, "kernel")->number, x);
    for (int32_t j = 0; j < old; j++) most = fmax(most, x[j]);
    for (int32_t j = old; j < v->n; j++) x[j] = most + 1;
}

/* The k-th highest of n values (1 <= k <= n), which are reordered: Hoare's selection. */
static double highest(double *x, int32_t n, int32_t k) {
    for (int32_t low = 0, high = n - 1;;) {
        if (low == high) return x[low];
        double pivot = x[low + (high - low) / 2];
        int32_t i = low, j = high;
        while (i <= j) {
            while (x[i] > pivot) i++;
            while (x[j] < pivot) j--;
            if (i > j) break;
            double swap = x[i];
            x[i++] = x[j];
            x[j--] = swap;
        }
        if (k - 1 <= j) high = j;
        else if (k - 1 >= i) low = i;
        else return pivot;
    }
}

static const double *score(const policy_setup *s, const policy_view *v, double *scratch) {
    const policy_value *first = policy_get(s, "first");
    const double *norm = v->field[mix_fields(s)];
    double *room = v->field[mix_fields(s) + 1], epsilon = policy_get(s, "epsilon")->number;
    int32_t n = v->n, k = first->number < n ? (int32_t)first->number : n;
    if (k == 0 && strcmp(first->text, "0") != 0) k = 1; /* half of a budget of one */
    first_scores(s, v, scratch, room);
    memcpy(room, scratch, (size_t)n * sizeof *room);
    double bar = k ? highest(room, n, k) : INFINITY;
    int32_t at_bar = k; /* how many of those that lie on the bar are among the first k: the newest */
    for (int32_t j = 0; j < n; j++) at_bar -= scratch[j] > bar;
    for (int32_t j = n - 1; j >= 0; j--) {
        bool is_first = scratch[j] > bar || (scratch[j] == bar && at_bar-- > 0);
        scratch[j] = is_first ? chosen : (scratch[j] + epsilon) * norm[j];
    }
    return scratch;
}

#define CRITICAL(symbol, name_, memory_, window_, kernel_, help_, source_)         \
    const policy symbol = {                                                        \
        .abi = POLICY_ABI,                                                         \
        .name = name_,                                                             \
        .help = help_,                                                             \
        .source = source_,                                                         \
        .family = FAMILY_ATTENTION,                                                \
        .evidence = "attn",                                                        \
        .params =                                                                  \
            (const policy_param[]){                                                \
                OUTPUT_MEMORY(memory_),                                            \
                {.name = "window",                                                 \
                 .type = PARAM_COUNT,                                              \
                 .initial = window_,                                               \
                 .max = 1e9,                                                       \
                 .help = "newest entries that come first"},                        \
                ROWS_KERNEL(kernel_, "neighbours whose scores are averaged; odd"), \
                {.name = "first",                                                  \
                 .type = PARAM_COUNT,                                              \
                 .initial = "budget/2",                                            \
                 .max = 1e9,                                                       \
                 .help = "entries that the first stage keeps"},                    \
                {.name = "epsilon",                                                \
                 .type = PARAM_NUMBER,                                             \
                 .initial = "0.0001",                                              \
                 .max = 1,                                                         \
                 .help = "added to a score before it is multiplied"},              \
                POLICY_GUARDS("0", "0", "head", ""),                               \
            },                                                                     \
        .init = init,                                                              \
        .fields = fields,                                                          \
        .observe = observe,                                                        \
        .first_wanted = mix_first_wanted,                                          \
        .score = score,                                                            \
    }

#define PAPER "Feng et al. 2025, CriticalKV, arXiv:2502.03805"
CRITICAL(policy_critical, "critical", "recent:64", "64", "5",
         "half of the cache by attention, half by attention times the size of the projected value",
         PAPER " (on SnapKV w64 k5, as in kvpress)");
CRITICAL(policy_critical_h2o, "critical-h2o", "mean", "0", "1",
         "critical by mean attention over an entry's lifetime; published with schedule=prompt",
         PAPER " (kvpress CriticalKVPress on ObservedAttentionPress)");
