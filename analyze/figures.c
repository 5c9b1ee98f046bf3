#include "analyze/figures.h"
#include "base/mem.h"

const figure_kind figure_kinds[] = {
    {"lag", "loss against the lag, for each policy that has one",
     "One colour a budget. The policy's own line stands beside what holds at the same budget: the best "
     "policy that does not wait (dashed), and oracles, which see the future. A dot marks the recommended "
     "lag, a diamond the knee, where there is one. Pending charged counts the entries that wait against "
     "the budget; pending free does not, which shows what the information alone is worth.",
     figure_lag},
    {"budget", "loss against the budget, one curve a policy",
     "Every policy at its best lag at each budget. Bars are 90 % intervals of levels; differences between "
     "policies of one text are surer than these suggest.",
     figure_budget},
    {"gain", "what waiting gains, and the share of the way to hindsight that it closes",
     "Above, what a lag saves against lag 0; below, how much of the way from lag 0 to the oracle that must "
     "hold entries as long it goes: 1 would be as good as seeing the future.",
     figure_gain},
    {"measuring", "what measures against what accumulates, held for the same time",
     "At each lag, policies that judge an entry by the rows after its arrival and then never again "
     "(measuring) beside those that go on adding up (accumulating). Both hold entries for the lag, so that "
     "only the evidence differs. Open points cannot be told apart from the best measuring policy.",
     figure_measuring},
    {"pending", "what waiting brings against what its memory costs",
     "What waiting tells about entries (information), what the entries that wait take from the budget "
     "(memory), and what is left of the first after the second (net).",
     figure_pending},
    {"pareto", "loss against memory and decode time, and the configurations nothing beats",
     "Every point is a configuration that could be run. The numbered ones are those that no other beats in "
     "both.",
     figure_pareto},
    {"memory", "memory that each policy needs for equal loss",
     "How much memory a policy needs to lose no more than so much, interpolated between budgets, and in "
     "numbers the share of what the best policy that does not wait needs. Arrows lead beyond the memory "
     "that was run.",
     figure_memory},
    {"retention", "which entries stay visible (needs --lifetimes)",
     "A column is an entry of the cache, a row a step of the model. The brighter, the more layers and "
     "heads still see the entry. Vertical stripes are entries that are kept for long.",
     figure_retention},
    {"text", "how long each token stays visible, on the text (needs --lifetimes and --trace)",
     "The darker a token, the larger the share of later steps that still see it, over all layers and "
     "heads. Underlined are tokens that the oracle keeps much longer than the policy.",
     figure_text},
    {"lost", "tokens that an oracle keeps and the policy loses (needs --lifetimes and --trace)",
     "The tokens that the oracle keeps longest in comparison, in their context, and the share of later "
     "steps that see each under the policy and under the oracle.",
     figure_lost},
    {"fidelity", "estimates against true reruns (needs a truth file)",
     "Every point is a configuration that was estimated and then run for real. On the diagonal both agree.",
     figure_fidelity},
    {"heads", "what each layer and head loses, and its best lag",
     "What each query head's own disturbance costs. What heads do together is missing, so the cells do not "
     "add up to the loss; they show where it arises.",
     figure_heads},
    {"along", "loss along the text, by the step that is disturbed",
     "What the disturbance of each step adds to the loss, which falls at that step and later. Above step "
     "by step, smoothed; below added up, so that the last point is the configuration's mean.",
     figure_along},
    {NULL, NULL, NULL, NULL},
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
