#include "sim/wrapper.h"

#include <string.h>

const wrapper wrappers[] = {
    {
        .name = "lag",
        .usage = "lag(L, POLICY)",
        .help = "cut the evidence about an entry off at the L-th row after its arrival; left out, -L sweeps L",
        .source =
            "fixed-lag smoothing (Eviction as Estimation, arXiv:2607.24667) of any policy; the hold stays its own",
        .set = {{.param = "cutoff", .value = "lag"}},
        .argument = {.name = "lag", .param = "lag", .initial = "", .neutral = "inf"},
        .argument_first = true,
    },
    {
        .name = "ada",
        .usage = "ada(POLICY, floor=0.2)",
        .help = "the kv heads of a layer compete for the sum of their budgets; each keeps a share of its own",
        .source = "Feng et al. 2024, Ada-KV, arXiv:2407.11550 (floor: its safeguard alpha)",
        .set = {{.param = "share", .value = "layer"}, {.param = "unit", .value = "head", .yields = true}},
        .argument = {.name = "floor", .param = "floor", .initial = ""},
    },
    {
        .name = "flat",
        .usage = "flat(POLICY, floor=0)",
        .help = "the kv heads of the whole model compete for the sum of their budgets",
        .source = "Ada-KV's competition (arXiv:2407.11550) over all layers, without a safeguard",
        .set = {{.param = "share", .value = "model"}, {.param = "unit", .value = "head", .yields = true}},
        .argument = {.name = "floor", .param = "floor", .initial = "0"},
    },
    {
        .name = "pyramid",
        .usage = "pyramid(POLICY, beta=20)",
        .help = "budgets fall in equal steps from the first layer to the last, which gets budget/beta",
        .source = "Cai et al. 2024, PyramidKV, arXiv:2406.02069",
        .argument = {.name = "beta", .param = "taper", .initial = "20"},
    },
    {
        .name = "blocks",
        .usage = "blocks(n, POLICY)",
        .help = "whole blocks of n positions leave, the lowest mean score first",
        .source = "schedule block:n; the granularity of paged caches and of ChunkKV (arXiv:2502.00299)",
        .argument = {.name = "n", .param = "schedule", .prefix = "block:"},
        .argument_first = true,
    },
    {
        .name = "then",
        .usage = "then(FIRST, POLICY)",
        .help = "FIRST makes the eviction at the prompt's end, POLICY all later ones; both see every row",
        .source = "prompt compression followed by eviction while decoding, as servers combine them",
        .argument = {.name = "first", .param = "prompt"},
        .argument_first = true,
    },
    {.name = NULL},
};

_Static_assert(sizeof wrappers / sizeof *wrappers <= WRAPPERS_MOST + 1, "WRAPPERS_MOST");

const wrapper *wrapper_find(const char *name, size_t n) {
    for (const wrapper *w = wrappers; w->name; w++)
        if (strlen(w->name) == n && strncmp(w->name, name, n) == 0) return w;
    return NULL;
}
