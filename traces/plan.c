#include "base/err.h"
#include "base/text.h"
#include "traces/trace.h"

#include <string.h>

enum { FISHER_MOST = 256 };

int trace_plan_gradients(const char *asked, trace_plan *plan) {
    if (strcmp(asked, "none") == 0) return 0;
    plan->grad_loss = true;
    if (strcmp(asked, "loss") == 0) return 0;
    long samples = text_counted_word(asked, "fisher", 1, FISHER_MOST);
    if (samples < 0)
        return err_set(ERR_USAGE, "--gradients: '%s' is neither none, loss nor fisher:S (S from 1 to %d)", asked,
                       FISHER_MOST);
    plan->n_fisher = (int32_t)samples;
    return 0;
}
