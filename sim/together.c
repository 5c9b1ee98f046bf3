#include "sim/together.h"
#include "base/err.h"
#include "base/mem.h"

#include <string.h>

/* Rows of all layers at a time: as many as fit into so many bytes, within these bounds. */
enum { ROWS_MOST = 64, ROWS_BYTES = 64 << 20 };

/* One configuration's units: the model, or the layers', or the kv heads'. */
typedef struct group {
    const together_run *run;
    int n_units, kv_each, heads_each; /* kv heads and query heads of a unit */
    replay **replay;                  /* [n_units] */
    int32_t *evict_at;                /* [n_units][stride] */
    const float **heads;              /* [heads of the model] rows of the step at hand */
} group;

typedef struct together {
    const trace_model *m;
    const replay_facts *facts;
    int32_t n_tokens, row0, n_rows, tile;
    size_t stride, row_stride;
    int n_layers, n_heads, n_kv; /* of the model: all layers' heads */
    trace_layer **layer;         /* [n_layers] */
    float *rows;                 /* [n_layers][n_head][n_rows][row_stride] of the current tile */
    float *wo;                   /* [n_layers][n_head*head_dim][n_embd], or NULL */
    layer_data data;
    group *groups;
    size_t n;
} together;

bool together_wanted(const sim_config *c) {
    return !c->is_full && (c->unit == UNIT_MODEL || c->share == SHARE_MODEL);
}

int together_check(const trace *t, const sim_config *c) {
    const trace_model *m = trace_get_model(t);
    for (int l = 1; l < m->n_layer && c->unit == UNIT_MODEL; l++)
        if (m->window[l] != m->window[0])
            return err_set(ERR_DATA,
                           "%s: %s: unit=model needs one window for all layers, but layer 0 has %d, layer %d %d",
                           trace_path(t), c->spec, m->window[0], l, m->window[l]);
    return 0;
}

/* ---- memory ----------------------------------------------------------------------------------------------------- */

static int32_t tile_of(const trace_model *m, int32_t n_tokens) {
    size_t row = (size_t)m->n_layer * (size_t)m->n_head * kernel_pad((size_t)n_tokens) * sizeof(float);
    size_t rows = ROWS_BYTES / row;
    return rows > ROWS_MOST ? ROWS_MOST : rows >= 8 ? (int32_t)(rows / 8 * 8) : rows < 1 ? 1 : (int32_t)rows;
}

static size_t wo_cells(const trace_model *m) {
    return (size_t)m->n_head * (size_t)m->head_dim * (size_t)m->n_embd;
}

/* Carve what all configurations share (NULL: only count). */
static size_t carve(together *w, const trace_model *m, int32_t n_tokens, unsigned needs, void *block) {
    mem_carver c = {.base = block};
    size_t layers = (size_t)m->n_layer, stride = kernel_pad((size_t)n_tokens);
    size_t rows = layers * (size_t)m->n_head * (size_t)tile_of(m, n_tokens);
    w->layer = mem_carve(&c, layers, sizeof *w->layer);
    w->rows = mem_carve(&c, rows * stride, sizeof *w->rows);
    w->wo = mem_carve(&c, needs & NEEDS_WO ? layers * wo_cells(m) : 0, sizeof *w->wo);
    return c.used;
}

size_t together_fixed_bytes(const trace *t, size_t seq, trace_form form, unsigned needs) {
    const trace_model *m = trace_get_model(t);
    together w;
    size_t layer = trace_layer_bytes(t, seq, form) + layer_data_bytes(t, seq, needs);
    return carve(&w, m, trace_get_sequence(t, seq)->n_tokens, needs, NULL) + (size_t)m->n_layer * layer;
}

static group group_of(const sim_config *c, const trace_model *m) {
    policy_shape shape = layer_data_shape(m, c->unit);
    return (group){
        .n_units = m->n_layer * m->n_kv_head / shape.n_kv, .kv_each = shape.n_kv, .heads_each = shape.n_head};
}

static size_t carve_group(group *g, const trace_model *m, int32_t n_tokens, void *block) {
    mem_carver c = {.base = block};
    g->replay = mem_carve(&c, (size_t)g->n_units, sizeof *g->replay);
    g->evict_at = mem_carve(&c, (size_t)g->n_units * kernel_pad((size_t)n_tokens), sizeof *g->evict_at);
    g->heads = mem_carve(&c, (size_t)m->n_layer * (size_t)m->n_head, sizeof *g->heads);
    return c.used;
}

size_t together_bytes(const sim_config *c, const trace_model *m, int32_t n_tokens) {
    group g = group_of(c, m);
    policy_shape shape = layer_data_shape(m, c->unit);
    return carve_group(&g, m, n_tokens, NULL) + (size_t)g.n_units * replay_bytes(c, n_tokens, &shape);
}

/* ---- units ------------------------------------------------------------------------------------------------------ */

static replay_unit place_of(const together *w, const group *g, int sequence, int unit) {
    const sim_config *c = g->run->config;
    int kv = unit * g->kv_each, layer = kv / w->m->n_kv_head;
    const policy_layer *data = &w->data.head[kv];
    if (c->unit == UNIT_LAYER) data = &w->data.layer[layer];
    if (c->unit == UNIT_MODEL) data = &w->data.whole;
    return (replay_unit){.sequence = sequence,
                         .layer = layer,
                         .kv_head = kv % w->m->n_kv_head,
                         .window = w->m->window[layer],
                         .n_head = g->heads_each,
                         .data = data};
}

static int start_group(const together *w, group *g, const together_run *run, int sequence) {
    policy_shape shape = layer_data_shape(w->m, run->config->unit);
    *g = group_of(run->config, w->m);
    void *block = mem_new(carve_group(g, w->m, w->n_tokens, NULL), 1, "configuration");
    if (!block) {
        g->n_units = 0;
        return ERR_DATA;
    }
    carve_group(g, w->m, w->n_tokens, block);
    g->run = run;
    for (int u = 0; u < g->n_units; u++) {
        TRY(replay_new(run->config, w->n_tokens, &shape, &g->replay[u]));
        replay_unit place = place_of(w, g, sequence, u);
        replay_begin(g->replay[u], &place, g->evict_at + (size_t)u * w->stride);
    }
    return 0;
}

static void end_group(group *g) {
    for (int u = 0; u < g->n_units; u++) replay_free(g->replay[u]);
    if (g->n_units) mem_free(g->replay); /* the block begins with it */
}

/* One configuration goes through the tile. */
static int replay_task(void *context, size_t index, int worker) {
    (void)worker;
    together *w = context;
    group *g = &w->groups[index];
    for (int32_t row = 0; row < w->n_rows; row++) {
        int32_t t = w->row0 + row;
        for (size_t h = 0; h < (size_t)w->n_heads; h++)
            g->heads[h] = w->rows + (h * (size_t)w->n_rows + (size_t)row) * w->row_stride;
        for (int u = 0; u < g->n_units; u++)
            replay_attend(g->replay[u], t, g->heads + (size_t)u * (size_t)g->heads_each, &w->facts[t]);
        replay_evict_together(g->replay, g->n_units);
    }
    for (int u = 0; u < g->n_units; u++) TRY(replay_check(g->replay[u]));
    return 0;
}

/* Lifetimes of units become those of kv heads. */
static void hand_over(const together *w, const group *g) {
    for (int u = 0; u < g->n_units; u++) *g->run->updates += g->kv_each * replay_updates(g->replay[u]);
    for (int kv = 0; kv < w->n_kv; kv++)
        memcpy(g->run->evict_at + (size_t)kv * (size_t)w->n_tokens, g->evict_at + (size_t)(kv / g->kv_each) * w->stride,
               (size_t)w->n_tokens * sizeof *g->evict_at);
}

/* ---- layers ----------------------------------------------------------------------------------------------------- */

static int open_layers(together *w, trace *t, size_t seq, trace_form form, pool *p) {
    for (int l = 0; l < w->n_layers; l++) {
        float *wo = w->data.needs & NEEDS_WO ? w->wo + (size_t)l * wo_cells(w->m) : NULL;
        TRY(trace_layer_open(t, seq, l, form, p, &w->layer[l]));
        if (wo) TRY(trace_read_wo(t, l, wo));
        TRY(layer_data_open(&w->data, l, w->layer[l], wo, p));
    }
    return 0;
}

static int read_tile(together *w, int32_t row0, pool *p) {
    w->row0 = row0;
    w->n_rows = w->n_tokens - row0 < w->tile ? w->n_tokens - row0 : w->tile;
    w->row_stride = kernel_pad((size_t)(row0 + w->n_rows));
    size_t of_layer = (size_t)w->m->n_head * (size_t)w->n_rows * w->row_stride;
    for (int l = 0; l < w->n_layers; l++)
        TRY(trace_layer_rows(w->layer[l], row0, w->n_rows, w->rows + (size_t)l * of_layer, w->row_stride, p));
    return 0;
}

static int work(together *w, trace *t, size_t seq, trace_form form, pool *p, const together_run *runs) {
    TRY(open_layers(w, t, seq, form, p));
    for (size_t i = 0; i < w->n; i++) TRY(start_group(w, &w->groups[i], &runs[i], (int)seq));
    for (int32_t row0 = 0; row0 < w->n_tokens; row0 += w->tile) {
        TRY(read_tile(w, row0, p));
        TRY(pool_run(p, w->n, replay_task, w));
    }
    for (size_t i = 0; i < w->n; i++) hand_over(w, &w->groups[i]);
    return 0;
}

int together_replay(trace *t, size_t seq, trace_form form, const replay_facts *facts, pool *p, const together_run *runs,
                    size_t n) {
    const trace_model *m = trace_get_model(t);
    together w = {.m = m, .facts = facts, .n_tokens = trace_get_sequence(t, seq)->n_tokens, .n_layers = m->n_layer};
    w.n_heads = m->n_layer * m->n_head;
    w.n_kv = m->n_layer * m->n_kv_head;
    w.stride = kernel_pad((size_t)w.n_tokens);
    w.tile = tile_of(m, w.n_tokens);
    w.n = n;
    unsigned needs = 0;
    for (size_t i = 0; i < n; i++) needs |= runs[i].config->needs;
    void *block = mem_new(carve(&w, m, w.n_tokens, needs, NULL), 1, "rows of all layers");
    w.groups = mem_new(n, sizeof *w.groups, "configurations");
    int code = block && w.groups ? layer_data_new(m, needs, m->n_layer, &w.data) : ERR_DATA;
    if (!code) {
        carve(&w, m, w.n_tokens, needs, block);
        code = work(&w, t, seq, form, p, runs);
    }
    for (int l = 0; block && l < m->n_layer; l++) trace_layer_close(w.layer[l]);
    for (size_t i = 0; w.groups && i < n; i++) end_group(&w.groups[i]);
    layer_data_free(&w.data);
    mem_free(w.groups);
    mem_free(block);
    return code;
}
