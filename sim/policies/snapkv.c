/* SnapKV: what a window of recent queries looked at, pooled so that neighbours of a needed entry stay with it.
 *
 * For residents older than the window the last `window` rows are added up and pooled over `kernel` neighbours: their
 * neighbours among the residents, once others have left, as in a cache that closes its gaps. Entries of the window
 * itself rank above all others (the published code sets them aside: hold=window). The query heads of a unit are
 * averaged before the pooling; the original, made for models without groups, lets every query head choose for itself.
 * The paper compresses once, after the prompt: schedule=prompt. In decode the same formula runs on the residents at
 * hand, with rows as they were served, renormalised over the residents of their step. */
#include "sim/policies/presets.h"
#include "sim/policies/rows.h"

static int window_of(const policy_setup *s) {
    return (int)policy_get(s, "window")->number;
}

static int init(policy_setup *s) {
    s->needs = NEEDS_ROW;
    return rows_check(s);
}

static int fields(const policy_setup *s) {
    return window_of(s) + 1; /* the ring, and room for its sum */
}

static void observe(const policy_setup *s, const policy_view *v) {
    rows_observe(v, window_of(s));
}

static const double *score(const policy_setup *s, const policy_view *v, double *scratch) {
    int w = window_of(s);
    double *sum = v->field[w];
    rows_sum(v, w, sum);
    int32_t older = rows_older(v, w);
    pool_around((pool_kind)policy_get(s, "pool")->word, sum, older, (int)policy_get(s, "kernel")->number, scratch);
    for (int32_t j = older; j < v->n; j++) scratch[j] = w + 1; /* no sum of w rows is as large */
    return scratch;
}

#define SNAPKV(symbol, name_, window_, kernel_, pool_, help_, source_)                             \
    const policy symbol = {                                                                        \
        .abi = POLICY_ABI,                                                                         \
        .name = name_,                                                                             \
        .help = help_,                                                                             \
        .source = source_,                                                                         \
        .family = FAMILY_ATTENTION,                                                                \
        .params = (const policy_param[]){ROWS_WINDOW(window_),                                     \
                                         ROWS_KERNEL(kernel_, "neighbours that are pooled (odd)"), \
                                         {.name = "pool",                                          \
                                          .type = PARAM_WORD,                                      \
                                          .initial = pool_,                                        \
                                          .words = POOL_WORDS,                                     \
                                          .help = "mean or maximum of the neighbours"},            \
                                         POLICY_GUARDS("0", window_, "head", "")},                 \
        .init = init,                                                                              \
        .fields = fields,                                                                          \
        .observe = observe,                                                                        \
        .score = score,                                                                            \
    }

#define PAPER "Li et al. 2024, SnapKV, arXiv:2404.14469"
SNAPKV(policy_snapkv, "snapkv", "64", "5", "avg",
       "what the last queries looked at, pooled; published after the prompt (schedule=prompt)",
       PAPER " (the code's class and kvpress: window 64, kernel 5, average)");
SNAPKV(policy_snapkv_w32_k5_avg, "snapkv-w32-k5-avg", "32", "5", "avg",
       "SnapKV as its code sets a model up that says nothing", PAPER " (init_snapkv)");
SNAPKV(policy_snapkv_w32_k7_max, "snapkv-w32-k7-max", "32", "7", "max", "SnapKV as in its LongBench experiments",
       PAPER " (configurations w32_k7_maxpool)");
SNAPKV(policy_snapkv_w8_k7_max, "snapkv-w8-k7-max", "8", "7", "max",
       "SnapKV as KVCache-Factory and R-KV run it as a baseline", PAPER " (KVCache-Factory's run scripts)");
SNAPKV(policy_pyramidkv, "pyramidkv", "8", "7", "max",
       "PyramidKV's scores, which are SnapKV's; taper=20 adds its budgets by layer",
       "Cai et al. 2024, PyramidKV, arXiv:2406.02069 (KVCache-Factory's run scripts)");
