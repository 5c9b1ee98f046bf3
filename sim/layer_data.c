#include "sim/layer_data.h"
#include "base/err.h"
#include "base/mem.h"

#include <stdio.h>
#include <string.h>

/* "base 100000, interleaved, 64 dims": the tracer's words for a plain rotation. Moves behind them. */
static bool parse_rotation(const char **at, int head_dim, policy_layer *out) {
    char kind[16];
    int used = 0;
    if (sscanf(*at, "base %lf, %15[a-z], %d dims%n", &out->rope_base, kind, &out->rope_dims, &used) != 3 || !used)
        return false;
    *at += used;
    out->rope_interleaved = strcmp(kind, "interleaved") == 0;
    return (out->rope_interleaved || strcmp(kind, "neox") == 0) && out->rope_base > 0 && out->rope_dims > 0 &&
           out->rope_dims % 2 == 0 && out->rope_dims <= head_dim;
}

/* The rotation of layers with or without a window, which may have one of their own; false where it is no plain one. */
static bool parse_rope(const trace_model *m, bool windowed, policy_layer *out) {
    static const char second[] = "; with a window: ";
    const char *at = m->rope;
    if (!parse_rotation(&at, m->head_dim, out)) return false;
    if (strncmp(at, second, strlen(second)) != 0) return *at == 0;
    policy_layer own = *out;
    at += strlen(second);
    if (!parse_rotation(&at, m->head_dim, &own)) return false;
    if (windowed) *out = own;
    return *at == 0;
}

size_t layer_data_bytes(const trace *t, size_t seq, unsigned needs) {
    return trace_layer_plain_bytes(t, seq, (needs & NEEDS_KEYS) != 0, (needs & NEEDS_QUERIES) != 0);
}

int layer_data_check(const trace *t, size_t seq, unsigned needs, const char *spec) {
    const trace_sequence *s = trace_get_sequence(t, seq);
    const trace_model *m = trace_get_model(t);
    const char *lacks = NULL;
    policy_layer rope = {0};
    if ((needs & NEEDS_KEYS) && !s->has_factored) lacks = "attn/k (trace again with --attention factored)";
    if ((needs & NEEDS_QUERIES) && !s->has_factored) lacks = "attn/q (trace again with --attention factored)";
    if ((needs & NEEDS_VALUES) && !s->has_v) lacks = "attn/v (trace again with --attention factored)";
    if ((needs & NEEDS_WO) && (!trace_has_wo(t) || !m->n_embd)) lacks = "model/wo (kvlag trace writes it)";
    if ((needs & NEEDS_ROPE) && !parse_rope(m, true, &rope)) lacks = "a known rotation in the attribute rope";
    if (!lacks) return 0;
    return err_set(ERR_DATA, "%s: %s needs %s", trace_path(t), spec, lacks);
}

policy_shape layer_data_shape(const trace_model *m, unit_kind unit) {
    int heads = m->n_head, kv = m->n_kv_head;
    if (unit == UNIT_HEAD) {
        heads /= kv;
        kv = 1;
    } else if (unit == UNIT_MODEL) {
        heads *= m->n_layer;
        kv *= m->n_layer;
    }
    return (policy_shape){m->n_layer, heads, kv, m->head_dim, m->n_embd};
}

/* What a unit sees whose first kv head is number `kv` of all layers here. */
static policy_layer part(const layer_data *d, unit_kind unit, size_t kv) {
    policy_layer l = {.shape = layer_data_shape(d->m, unit), .scale = (double)d->m->scale};
    size_t head = kv * (size_t)(d->m->n_head / d->m->n_kv_head);
    if (d->needs & NEEDS_KEYS) l.k = d->k + kv;
    if (d->needs & NEEDS_VALUES) l.v = d->v + kv;
    if (d->needs & NEEDS_QUERIES) l.q = d->q + head;
    if (d->needs & NEEDS_WO) l.wo = d->wo + head;
    return l;
}

int layer_data_new(const trace_model *m, unsigned needs, int n_layers, layer_data *out) {
    size_t layers = (size_t)n_layers, kv = layers * (size_t)m->n_kv_head, heads = layers * (size_t)m->n_head;
    *out = (layer_data){.m = m, .needs = needs, .n_layers = n_layers};
    out->head = mem_new(kv + layers, sizeof *out->head, "layer data");
    out->k = mem_new(2 * kv + 2 * heads, sizeof *out->k, "layer data");
    if (!out->head || !out->k) return ERR_DATA;
    out->layer = out->head + kv;
    out->v = out->k + kv;
    out->q = out->v + kv;
    out->wo = out->q + heads;
    out->whole = part(out, n_layers == m->n_layer ? UNIT_MODEL : UNIT_LAYER, 0);
    for (size_t u = 0; u < kv; u++) out->head[u] = part(out, UNIT_HEAD, u);
    for (size_t l = 0; l < layers; l++) out->layer[l] = part(out, UNIT_LAYER, l * (size_t)m->n_kv_head);
    return 0;
}

void layer_data_free(layer_data *d) {
    mem_free(d->head);
    mem_free(d->k);
    *d = (layer_data){0};
}

/* What is seen of a layer and of its kv heads; and of the whole, whose layers all have the same window. */
static void take_rope(layer_data *d, int layer, size_t at) {
    bool windowed = d->m->window[layer] > 0;
    for (int u = 0; u < d->m->n_kv_head; u++)
        parse_rope(d->m, windowed, &d->head[at * (size_t)d->m->n_kv_head + (size_t)u]);
    parse_rope(d->m, windowed, &d->layer[at]);
    parse_rope(d->m, windowed, &d->whole);
}

int layer_data_open(layer_data *d, int layer, trace_layer *l, const float *wo, pool *p) {
    size_t at = d->n_layers == 1 ? 0 : (size_t)layer;
    size_t kv = at * (size_t)d->m->n_kv_head, head = at * (size_t)d->m->n_head;
    if (d->needs & NEEDS_ROPE) take_rope(d, layer, at);
    if (d->needs & NEEDS_KEYS) TRY(trace_layer_load_k(l, p));
    if (d->needs & NEEDS_QUERIES) TRY(trace_layer_load_q(l, p));
    for (int u = 0; u < d->m->n_kv_head; u++, kv++) {
        if (d->needs & NEEDS_KEYS) d->k[kv] = trace_layer_k(l, u);
        if (d->needs & NEEDS_VALUES) d->v[kv] = trace_layer_v(l, u);
    }
    for (int h = 0; h < d->m->n_head; h++, head++) {
        if (d->needs & NEEDS_QUERIES) d->q[head] = trace_layer_q(l, h);
        if (d->needs & NEEDS_WO) d->wo[head] = wo + (size_t)h * (size_t)d->m->head_dim * (size_t)d->m->n_embd;
    }
    return 0;
}
