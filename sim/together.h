/* Units that span layers: the model as one unit, or heads of all layers that compete (unit=model, share=model).
 *
 * What leaves after a step depends on that step's rows in all layers, so all layers of the sequence are open at once
 * and advance row by row. Only replay happens here; the lifetimes are then priced layer by layer like any others. */
#pragma once

#include "sim/layer_data.h"
#include "sim/replay.h"

/* Is the configuration one of these? */
bool together_wanted(const sim_config *c);
/* Refuses, by name, what a trace's layers cannot do together. */
int together_check(const trace *t, const sim_config *c);

typedef struct together_run {
    const sim_config *config;
    int32_t *evict_at; /* [n_layer][n_kv_head][T] to be filled */
    int64_t *updates;  /* what replay_updates says is added here, for each kv head of a unit */
} together_run;

/* facts [T]. Results do not depend on the number of threads or on the other runs. */
int together_replay(trace *t, size_t seq, trace_form form, const replay_facts *facts, pool *p, const together_run *runs,
                    size_t n);

/* Bytes: for the open layers and their rows, of which policies look at `needs`; and for one configuration. */
size_t together_fixed_bytes(const trace *t, size_t seq, trace_form form, unsigned needs);
size_t together_bytes(const sim_config *c, const trace_model *m, int32_t n_tokens);
