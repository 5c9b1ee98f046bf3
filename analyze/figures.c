#include "analyze/figures.h"
#include "base/mem.h"

const figure_kind figure_kinds[] = {
    {"lag", "loss against the lag, for each policy that has one", figure_lag},
    {"budget", "loss against the budget, one curve a policy", figure_budget},
    {"gain", "what waiting gains, and the share of the way to hindsight that it closes", figure_gain},
    {"measuring", "what measures against what accumulates, held for the same time", figure_measuring},
    {"pending", "what waiting brings against what its memory costs", figure_pending},
    {"pareto", "loss against memory and decode time, and the configurations nothing beats", figure_pareto},
    {"memory", "memory that each policy needs for equal loss", figure_memory},
    {"retention", "which entries stay visible (needs --lifetimes)", figure_retention},
    {"text", "how long each token stays visible, on the text (needs --lifetimes and --trace)", figure_text},
    {"lost", "tokens that an oracle keeps and the policy loses (needs --lifetimes and --trace)", figure_lost},
    {"fidelity", "estimates against true reruns (needs a truth file)", figure_fidelity},
    {"heads", "what each layer and head loses, and its best lag", figure_heads},
    {"along", "loss along the text, by the step that is disturbed", figure_along},
    {NULL, NULL, NULL},
};

void figure_list_free(figure_list *list) {
    for (size_t i = 0; i < list->n; i++) {
        mem_free(list->item[i].name);
        text_free(&list->item[i].data);
        text_free(&list->item[i].script);
    }
    mem_free(list->item);
    *list = (figure_list){0};
}
