/* The named compositions: each row is a name, a line of help, the paper it follows, its axes and its defaults. */
#include "sim/policies/presets.h"
#include "sim/policies/mix.h"

#define ATTENTION .family = FAMILY_ATTENTION, MIX_VERBS
#define TAU(initial_)                                                                             \
    {                                                                                             \
        .name = "tau", .type = PARAM_NUMBER, .initial = initial_, .max = 1, .per_resident = true, \
        .help = "attention that counts as a use; 1/resident is the mean share"                    \
    }
#define ALPHA                                                               \
    {                                                                       \
        .name = "alpha", .type = PARAM_NUMBER, .initial = "0.98", .max = 1, \
        .help = "share of the old score kept each step"                     \
    }

static int none_init(policy_setup *s) {
    s->needs = 0;
    return 0;
}
static int none_fields(const policy_setup *s) {
    (void)s;
    return 0;
}

const policy policy_full = {
    .abi = POLICY_ABI,
    .name = "full",
    .help = "keep everything: the full cache",
    .source = "no eviction",
    .family = FAMILY_WINDOW,
    .params = (const policy_param[]){{.name = NULL}},
    .init = none_init,
    .fields = none_fields,
};

const policy policy_window = {
    .abi = POLICY_ABI,
    .name = "window",
    .help = "keep the newest entries",
    .source = "Beltagy et al. 2020, arXiv:2004.05150 (sliding window)",
    .family = FAMILY_WINDOW,
    .evidence = "position",
    .memory = "static",
    .params = (const policy_param[]){POLICY_GUARDS("0", "0", "head", "")},
    MIX_VERBS,
};

const policy policy_streaming = {
    .abi = POLICY_ABI,
    .name = "streaming",
    .help = "keep the first entries (attention sinks) and the newest",
    .source = "Xiao et al. 2023, StreamingLLM, arXiv:2309.17453",
    .family = FAMILY_STATIC,
    .evidence = "position",
    .memory = "static",
    .params = (const policy_param[]){POLICY_GUARDS("4", "0", "head", "")},
    MIX_VERBS,
};

const policy policy_random = {
    .abi = POLICY_ABI,
    .name = "random",
    .help = "keep a random set: the floor any policy must beat",
    .source = "baseline; Philox of seed, sequence, layer, kv head and entry",
    .family = FAMILY_STATIC,
    .evidence = "random",
    .memory = "static",
    .params = (const policy_param[]){POLICY_SEED, POLICY_GUARDS("0", "1", "head", "")},
    MIX_VERBS,
};

const policy policy_knorm = {
    .abi = POLICY_ABI,
    .name = "knorm",
    .help = "keep keys of small norm",
    .source = "Devoto et al. 2024, arXiv:2406.11430 (L2 norm of keys)",
    .family = FAMILY_STATIC,
    .evidence = "keynorm",
    .memory = "static",
    .params = (const policy_param[]){POLICY_GUARDS("0", "0", "head", "")},
    MIX_VERBS,
};

const policy policy_lru = {
    .abi = POLICY_ABI,
    .name = "lru",
    .help = "evict the entry whose last use (attention >= tau) is longest ago",
    .source = "least recently used, on attention",
    ATTENTION,
    .evidence = "attn",
    .memory = "age",
    .params = (const policy_param[]){TAU("1/resident"), POLICY_GUARDS("0", "1", "head", "")},
};

const policy policy_lfu = {
    .abi = POLICY_ABI,
    .name = "lfu",
    .help = "evict the entry with the fewest uses (attention >= tau)",
    .source = "least frequently used, on attention",
    ATTENTION,
    .evidence = "attn>=tau",
    .memory = "sum",
    .params = (const policy_param[]){TAU("1/resident"), POLICY_GUARDS("0", "1", "head", "")},
};

const policy policy_h2o = {
    .abi = POLICY_ABI,
    .name = "h2o",
    .help = "heavy hitters by accumulated attention, and a recent half",
    .source = "Zhang et al. 2023, H2O, arXiv:2306.14048 (per kv head, sum over prompt and decode)",
    ATTENTION,
    .evidence = "attn",
    .memory = "sum",
    .params = (const policy_param[]){POLICY_GUARDS("0", "budget/2", "head", "")},
};

const policy policy_h2o_mean = {
    .abi = POLICY_ABI,
    .name = "h2o-mean",
    .help = "heavy hitters by mean attention over an entry's lifetime",
    .source = "H2O, arXiv:2306.14048, by lifetime; kvpress ObservedAttentionPress (hold=0, schedule=prompt)",
    ATTENTION,
    .evidence = "attn",
    .memory = "mean",
    .params = (const policy_param[]){POLICY_GUARDS("0", "0", "head", "")},
};

const policy policy_h2o_mean_sinks = {
    .abi = POLICY_ABI,
    .name = "h2o-mean-sinks",
    .help = "heavy hitters by mean attention over an entry's lifetime, the first four and the newest ten",
    .source = "H2O, arXiv:2306.14048, by lifetime; cold-compress heavy_hitter.yaml (ten beside the one that arrives)",
    ATTENTION,
    .evidence = "attn",
    .memory = "mean",
    .params = (const policy_param[]){POLICY_GUARDS("4", "11", "head", "")},
};

const policy policy_h2o_prompt = {
    .abi = POLICY_ABI,
    .name = "h2o-prompt",
    .help = "heavy hitters of the prompt: the sum over its rows, frozen after; published with schedule=prompt",
    .source = "H2O, arXiv:2306.14048, once after the prompt; KVCache-Factory H2OKVCluster",
    ATTENTION,
    .evidence = "attn",
    .memory = "prompt",
    .params = (const policy_param[]){POLICY_GUARDS("0", "8", "head", "")},
};

const policy policy_h2o_last = {
    .abi = POLICY_ABI,
    .name = "h2o-last",
    .help = "what the last query attended to, per kv head, and a recent half",
    .source = "H2O, arXiv:2306.14048, with the last row in place of the sum",
    ATTENTION,
    .evidence = "attn",
    .memory = "last",
    .params = (const policy_param[]){POLICY_GUARDS("0", "budget/2", "head", "")},
};

const policy policy_scissorhands_sum = {
    .abi = POLICY_ABI,
    .name = "scissorhands-sum",
    .help = "attention summed over a window of rows",
    .source = "Liu et al. 2023, Scissorhands, arXiv:2305.17118, summed as in cold-compress",
    ATTENTION,
    .evidence = "attn",
    .memory = "recent:window",
    .params =
        (const policy_param[]){
            {.name = "window", .type = PARAM_COUNT, .initial = "400", .min = 1, .max = 4096, .help = "rows of history"},
            POLICY_GUARDS("0", "10", "head", ""),
        },
};

const policy policy_ema = {
    .abi = POLICY_ABI,
    .name = "ema",
    .help = "exponentially forgetting heavy hitters, and a recent half",
    .source = "H2O with an exponential moving average instead of the sum",
    ATTENTION,
    .evidence = "attn",
    .memory = "ema:alpha",
    .params = (const policy_param[]){ALPHA, POLICY_GUARDS("0", "budget/2", "head", "")},
};

const policy policy_tova = {
    .abi = POLICY_ABI,
    .name = "tova",
    .help = "evict what the last query attended to least, all heads of a layer together",
    .source = "Oren et al. 2024, TOVA, arXiv:2401.06104",
    ATTENTION,
    .evidence = "attn",
    .memory = "last",
    .params = (const policy_param[]){POLICY_GUARDS("0", "0", "layer", "")},
};

const policy policy_tova_kvpress = {
    .abi = POLICY_ABI,
    .name = "tova-kvpress",
    .help = "TOVA that never evicts the last token; published with schedule=prompt",
    .source = "Oren et al. 2024, TOVA, arXiv:2401.06104, as in kvpress TOVAPress",
    ATTENTION,
    .evidence = "attn",
    .memory = "last",
    .params = (const policy_param[]){POLICY_GUARDS("0", "1", "layer", "")},
};

#define RMM(symbol, name_, signal_, sinks_, help_, source_)                                                           \
    const policy symbol = {                                                                                           \
        .abi = POLICY_ABI,                                                                                            \
        .name = name_,                                                                                                \
        .help = help_,                                                                                                \
        .source = source_,                                                                                            \
        ATTENTION,                                                                                                    \
        .evidence = "attn*signal",                                                                                    \
        .memory = "first:lag",                                                                                        \
        .params =                                                                                                     \
            (const policy_param[]){                                                                                   \
                {.name = "signal",                                                                                    \
                 .type = PARAM_WORD,                                                                                  \
                 .initial = signal_,                                                                                  \
                 .words = "correct|uniform|confidence|agrees|entropy",                                                \
                 .help =                                                                                              \
                     "weight of a row of attention: prediction right (0/1), none, probability of the true token, a "  \
                     "sampled token is the true one (0/1), exp(-entropy)"},                                           \
                {.name = "evidence",                                                                                  \
                 .type = PARAM_WORD,                                                                                  \
                 .initial = "attn",                                                                                   \
                 .words = "attn|out|loss|fisher",                                                                     \
                 .help = "what is measured: attention by signal, or evidence of the full run (see mix) without one"}, \
                POLICY_SEED,                                                                                          \
                POLICY_GUARDS(sinks_, "lag", "head", "32"),                                                           \
            },                                                                                                        \
    }

#define RMM_PAPER "Eviction as Estimation, arXiv:2607.24667"
RMM(policy_rmm, "rmm", "correct", "0",
    "wait lag steps, measure how useful an entry was while predictions were right, then judge it",
    RMM_PAPER " (demonstrated utility)");
RMM(policy_rmm_uniform, "rmm-uniform", "uniform", "0",
    "wait lag steps, measure the attention to an entry whatever the predictions were, then judge it",
    RMM_PAPER " (signal=uniform: H2O's mean over lag rows, without an entry's own)");
RMM(policy_rmm_confidence, "rmm-confidence", "confidence", "0",
    "wait lag steps, measure the attention to an entry by the probability of the true token, then judge it",
    RMM_PAPER " (signal=confidence)");
RMM(policy_rmm_sinks, "rmm-sinks", "correct", "4", "rmm that keeps the first entries (attention sinks)",
    RMM_PAPER " (demonstrated utility), with the four sinks of StreamingLLM, arXiv:2309.17453");

const policy policy_mix = {
    .abi = POLICY_ABI,
    .name = "mix",
    .help = "any evidence with any memory",
    .source = "composition (DESIGN: policy = evidence x memory x guard x unit x schedule)",
    ATTENTION,
    .params =
        (const policy_param[]){
            {.name = "evidence",
             .type = PARAM_WORD,
             .initial = "attn",
             .words = MIX_EVIDENCE_WORDS,
             .help = "what a step tells about an entry"},
            {.name = "memory",
             .type = PARAM_MEMORY,
             .help = "how evidence adds up: sum, mean, ema:A, last, recent:W, max:A, age, first:L, prompt, static"},
            TAU("1/resident"),
            POLICY_SEED,
            POLICY_GUARDS("0", "0", "head", ""),
        },
};
