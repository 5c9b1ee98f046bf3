/* What policies see of a layer beside its rows: keys, values, queries, the output projection (policy_layer). */
#pragma once

#include "sim/policy.h"
#include "traces/trace.h"

typedef struct layer_data {
    const trace_model *m;
    unsigned needs; /* NEEDS_KEYS ... of any policy */
    policy_layer whole;
    policy_layer *head; /* [n_kv_head]; owned, with all below */
    const float **k, **v, **q, **wo;
} layer_data;

/* Bytes beyond the layer's own that the open layer will hold. */
size_t layer_data_bytes(const trace *t, size_t seq, unsigned needs);
/* Refuses needs that a sequence cannot meet, naming `spec` and the dataset. */
int layer_data_check(const trace *t, size_t seq, unsigned needs, const char *spec);

/* Shape of a kv head's unit, or of the layer as one. */
policy_shape layer_data_shape(const trace_model *m, bool whole);

/* With `needs` 0 nothing is held but shapes. Returns 0 or ERR_DATA. */
int layer_data_new(const trace_model *m, unsigned needs, layer_data *out);
void layer_data_free(layer_data *d);
/* Take the open layer's arrays. `wo` [n_head*head_dim][n_embd] is read by the caller where NEEDS_WO. */
int layer_data_open(layer_data *d, trace_layer *l, const float *wo, pool *p);
