/* The composition behind most policies: policy = evidence x memory (x the engine's guards, unit and schedule).
 *
 * evidence, per step t and resident entry i, from the unit's renormalised row a:
 *   attn                 a_t(i)
 *   attn*correct         a_t(i) where the prediction made at step t was right, else 0
 *   attn*confidence      a_t(i) times the probability given to the true next token
 *   attn*agrees          a_t(i) where a token drawn from the model's distribution is the text's next one, else 0: word
 *                        0 of Philox(seed; t, -1, -1, sequence) as a uniform number is below that one's probability
 *   attn*entropy         a_t(i) exp(-entropy of the prediction)
 *   attn*focus           a_t(i) times 1 - entropy(a_t) / ln(residents)  (1 for a single resident)
 *   attn>=tau            1 where a_t(i) >= tau, else 0
 *   out, loss, fisher    of the full run, e = a/max(1-a, 1e-3) (o - v) for each query head: the mean of |e|, the signed
 *                        sum of g.e, half the mean square over samples of the sum of g_y.e. The last two look ahead
 *                        through the gradient: yardsticks, not policies a server could run.
 *   position             i        (static; memory `static`)
 *   random               word 0 of Philox(seed; i, kv head, layer, sequence)        (static; memory `static`)
 *   keynorm, valuenorm, outnorm, keysim      of the entry's key and value, see arrival.h     (static; memory `static`)
 *
 * memory, own row included except where said:
 *   sum                  s += e
 *   mean                 s / (t-i+1)
 *   ema:alpha            s = alpha s + (1-alpha) e, from 0
 *   last                 s = e
 *   recent:w             sum of the last w rows since arrival
 *   max:alpha            s = max(alpha s, e)
 *   age                  last step with e >= tau; arrival counts
 *   first:L              mean of the evidence over rows i+1 .. i+L that exist so far; an entry without any such row is
 *                        scored by its own row's plain a_i(i)
 *   prompt               the sum over the prompt's rows; what arrives later has 0
 *   static               the value at arrival
 */
#pragma once

#include "sim/policy.h"

typedef enum mix_memory {
    MEMORY_SUM,
    MEMORY_MEAN,
    MEMORY_EMA,
    MEMORY_LAST,
    MEMORY_RECENT,
    MEMORY_MAX,
    MEMORY_AGE,
    MEMORY_FIRST,
    MEMORY_PROMPT,
    MEMORY_STATIC,
} mix_memory;

/* Split "kind:argument". *argument points behind the colon, or is NULL. Returns 0, or ERR_USAGE for an unknown kind, a
 * missing or a surplus argument. */
int mix_parse_memory(const char *source, mix_memory *kind, const char **argument);
/* Check a resolved argument ("ema: alpha must lie in [0,1]" ...). */
int mix_check_memory(mix_memory kind, double argument);

/* Is the evidence of that name fixed when an entry arrives? */
bool mix_is_static(const char *evidence);

int mix_init(policy_setup *s);
int mix_fields(const policy_setup *s);
size_t mix_state(const policy_setup *s, const policy_shape *shape);
void mix_observe(const policy_setup *s, const policy_view *v);
int32_t mix_first_wanted(const policy_setup *s, const policy_view *v);
const double *mix_score(const policy_setup *s, const policy_view *v, double *scratch);

#define MIX_VERBS                                                                       \
    .init = mix_init, .fields = mix_fields, .state = mix_state, .observe = mix_observe, \
    .first_wanted = mix_first_wanted, .score = mix_score
#define MIX_MEMORY_WORDS "sum|mean|ema:|last|recent:|max:|age|first:|prompt|static" /* in the order of mix_memory */
#define MIX_EVIDENCE_WORDS                                                                             \
    "attn|attn*correct|attn*confidence|attn*agrees|attn*entropy|attn*focus|attn>=tau|out|loss|fisher|" \
    "position|random|keynorm|valuenorm|outnorm|keysim"
