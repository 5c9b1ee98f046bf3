/* What policies see of a layer beside its rows: keys, values, queries, the output projection (policy_layer). */
#pragma once

#include "sim/config.h"
#include "traces/trace.h"

typedef struct layer_data {
    const trace_model *m;
    unsigned needs;      /* NEEDS_KEYS ... of any policy */
    int n_layers;        /* 1, or all of the model */
    policy_layer whole;  /* all of them together */
    policy_layer *head;  /* [n_layers][n_kv_head]; owned, with all below */
    policy_layer *layer; /* [n_layers] */
    const float **k, **v, **q, **wo;
} layer_data;

/* Bytes beyond the layer's own that the open layer will hold. */
size_t layer_data_bytes(const trace *t, size_t seq, unsigned needs);
/* Refuses needs that a sequence cannot meet, naming `spec` and the dataset. */
int layer_data_check(const trace *t, size_t seq, unsigned needs, const char *spec);

policy_shape layer_data_shape(const trace_model *m, unit_kind unit);

/* With `needs` 0 nothing is held but shapes. Returns 0 or ERR_DATA. */
int layer_data_new(const trace_model *m, unsigned needs, int n_layers, layer_data *out);
void layer_data_free(layer_data *d);
/* Take the arrays of open layer `layer` of the model, into the only place where d holds one layer. `wo`
 * [n_head*head_dim][n_embd] is read by the caller where NEEDS_WO. */
int layer_data_open(layer_data *d, int layer, trace_layer *l, const float *wo, pool *p);
