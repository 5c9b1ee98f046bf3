#include "tracer/cpu/forward.h"
#include "base/err.h"
#include "base/mem.h"
#include "tracer/cpu/heads.h"
#include "tracer/cpu/matmul.h"
#include "tracer/cpu/rows.h"
#include "traces/kernels.h"

#include <string.h>

enum {
    NORM_ROWS = 64,   /* rows of one elementwise task */
    LOGIT_ROWS = 256, /* rows of a tile of logits, fewer where the vocabulary is large */
    LOGIT_BYTES = 256 << 20
};

/* ---- buffers ---------------------------------------------------------------------------------------------------- */

static void set_strides(cpu_run *r) {
    const model *m = r->s->m;
    size_t heads = (size_t)m->n_head, kv_heads = (size_t)m->n_kv_head, dim = (size_t)m->head_dim;
    r->ld_x = kernel_pad((size_t)m->n_embd);
    r->ld_qkv = kernel_pad((heads + 2 * kv_heads) * dim);
    r->ld_mix = kernel_pad(heads * dim);
    r->ld_ff = kernel_pad((size_t)m->n_ff);
    r->ld_scores = kernel_pad(r->T);
    r->ld_logits = kernel_pad((size_t)m->n_vocab);
    size_t rows = LOGIT_BYTES / (r->ld_logits * sizeof(float));
    if (rows > LOGIT_ROWS) rows = LOGIT_ROWS;
    r->logit_rows = rows > r->T ? r->T : rows ? rows : 1;
    r->ld_gate = kernel_pad(cpu_gate_grid(r).tile_cols);
}

static size_t scratch_floats(const cpu_run *r) {
    size_t scores = BACKEND_ROW_TILE * r->ld_scores, gate = BACKEND_ROW_TILE * r->ld_gate;
    return scores > gate ? scores : gate;
}

static void carve(cpu_run *r, mem_carver *c) {
    const model *m = r->s->m;
    int threads = pool_threads(r->s->p);
    r->x = mem_carve(c, r->T * r->ld_x, sizeof(float));
    r->added = r->normed = mem_carve(c, r->T * r->ld_x, sizeof(float));
    r->qkv = mem_carve(c, r->T * r->ld_qkv, sizeof(float));
    r->mix = mem_carve(c, r->T * r->ld_mix, sizeof(float));
    r->ff = mem_carve(c, r->T * r->ld_ff, sizeof(float));
    r->lse = mem_carve(c, (size_t)m->n_head * r->T, sizeof(float));
    r->angles = mem_carve(c, (size_t)m->n_rope * r->T * (size_t)m->rope_dims, sizeof(float));
    r->logits = mem_carve(c, r->logit_rows * r->ld_logits, sizeof(float));
    r->scratch = mem_carve(c, (size_t)threads, sizeof *r->scratch);
    for (int i = 0; i < threads; i++) {
        float *scratch = mem_carve(c, scratch_floats(r), sizeof(float));
        if (c->base) r->scratch[i] = scratch;
    }
}

int cpu_run_new(backend_state *s, const int32_t *tokens, int32_t n, const forward_sink *sink, cpu_run *r) {
    *r = (cpu_run){.s = s, .tokens = tokens, .T = (size_t)n, .sink = sink};
    TRY(cpu_check_length(s, n));
    set_strides(r);
    mem_carver size = {0};
    carve(r, &size);
    r->block = mem_new(size.used, 1, "activations");
    if (!r->block) return ERR_DATA;
    mem_carver c = {.base = r->block};
    carve(r, &c);
    heads_angles(s->m, 0, r->T, r->angles);
    return 0;
}

void cpu_run_free(cpu_run *r) {
    mem_free(r->block);
    *r = (cpu_run){0};
}

/* ---- norms ------------------------------------------------------------------------------------------------------ */

typedef struct norm_job {
    cpu_run *r;
    const float *weight, *bias;
} norm_job;

static int norm_rows(void *context, size_t task, int worker) {
    (void)worker;
    const norm_job *j = context;
    const cpu_run *r = j->r;
    const model *m = r->s->m;
    size_t end = (task + 1) * NORM_ROWS;
    for (size_t t = task * NORM_ROWS; t < end && t < r->T; t++)
        rows_norm(m->arch->norm, r->x + t * r->ld_x, j->weight, j->bias, (size_t)m->n_embd, m->norm_eps,
                  r->normed + t * r->ld_x);
    return 0;
}

static int run_rows(const cpu_run *r, pool_task task, void *context) {
    return pool_run(r->s->p, (r->T + NORM_ROWS - 1) / NORM_ROWS, task, context);
}

int cpu_norm(cpu_run *r, const float *weight, const float *bias) {
    norm_job j = {r, weight, bias};
    if (weight) return run_rows(r, norm_rows, &j);
    memcpy(r->normed, r->x, r->T * r->ld_x * sizeof *r->x);
    return 0;
}

/* x += norm(added) */
static int norm_added_rows(void *context, size_t task, int worker) {
    (void)worker;
    const norm_job *j = context;
    const cpu_run *r = j->r;
    const model *m = r->s->m;
    size_t end = (task + 1) * NORM_ROWS;
    for (size_t t = task * NORM_ROWS; t < end && t < r->T; t++) {
        float *x = r->x + t * r->ld_x, *out = r->normed + t * r->ld_x;
        rows_norm(m->arch->norm, r->added + t * r->ld_x, j->weight, NULL, (size_t)m->n_embd, m->norm_eps, out);
        for (size_t i = 0; i < (size_t)m->n_embd; i++) x[i] += out[i];
    }
    return 0;
}

/* ---- products --------------------------------------------------------------------------------------------------- */

/* out = in * w^T (or out += in * w^T) and what belongs to it, tile by tile. */
typedef struct product {
    cpu_run *r;
    tile_grid grid;
    size_t inner, ld_in, ld_out;
    const float *in, *w, *bias; /* bias NULL: none */
    float *out;
    int accumulate;
} product;

static void add_bias(const float *bias, tile t, float *out, size_t ld) {
    for (size_t row = 0; row < t.n_rows; row++)
        for (size_t i = 0; i < t.n_cols; i++) out[row * ld + i] += bias[t.col + i];
}

/* w: the tile's rows of the weights. */
static void multiply(const product *p, tile t, const float *w) {
    float *out = p->out + t.row * p->ld_out + t.col;
    matmul_weight(t.n_rows, t.n_cols, p->inner, p->in + t.row * p->ld_in, p->ld_in, w, p->inner, p->accumulate, out,
                  p->ld_out);
    if (p->bias) add_bias(p->bias, t, out, p->ld_out);
}

static int product_tile(void *context, size_t task, int worker) {
    (void)worker;
    const product *p = context;
    tile t = tile_grid_at(&p->grid, task);
    multiply(p, t, p->w + t.col * p->inner);
    return 0;
}

/* What one half of a layer adds to the residual stream: x += in * w^T + bias as it comes out of the product, or the
 * norm of it where the layer has one. */
static int add_to_x(cpu_run *r, const float *in, size_t ld_in, size_t inner, arch_slot w, arch_slot bias,
                    arch_slot post_norm) {
    const cpu_layer *l = &r->s->layer[r->layer];
    norm_job j = {r, l->at[post_norm], NULL};
    product p = {.r = r,
                 .grid = tile_grid_new(r->T, (size_t)r->s->m->n_embd, KERNEL_LANES),
                 .inner = inner,
                 .ld_in = ld_in,
                 .ld_out = r->ld_x,
                 .in = in,
                 .w = l->at[w],
                 .bias = l->at[bias],
                 .out = j.weight ? r->added : r->x,
                 .accumulate = !j.weight};
    TRY(pool_run(r->s->p, tile_grid_count(&p.grid), product_tile, &p));
    return j.weight ? run_rows(r, norm_added_rows, &j) : 0;
}

/* q, k, v of whole heads; then rotation while the tile is in the cache, unless norms come between. */
static int qkv_tile(void *context, size_t task, int worker) {
    (void)worker;
    const product *p = context;
    const cpu_run *r = p->r;
    const model *m = r->s->m;
    tile t = tile_grid_at(&p->grid, task);
    multiply(p, t, p->w + t.col * p->inner);
    size_t turned = heads_turned(m), turn = t.col >= turned ? 0 : t.col + t.n_cols < turned ? t.n_cols : turned - t.col;
    for (size_t row = t.row; row < t.row + t.n_rows && m->arch->qk_norm == ARCH_QK_NORM_NONE; row++)
        heads_turn(m, p->out + row * p->ld_out + t.col, (int)(turn / (size_t)m->head_dim),
                   heads_angles_of(m, r->layer, r->angles, r->T, row));
    return 0;
}

/* Norms and rotation of whole rows. */
static int finish_heads_rows(void *context, size_t task, int worker) {
    (void)worker;
    cpu_run *r = context;
    const model *m = r->s->m;
    size_t end = (task + 1) * NORM_ROWS;
    for (size_t t = task * NORM_ROWS; t < end && t < r->T; t++) {
        float *row = r->qkv + t * r->ld_qkv;
        if (r->raw) memcpy(r->raw + t * r->ld_qkv, row, heads_turned(m) * sizeof *row);
        heads_norm(r->s, r->layer, row);
        heads_turn(m, row, m->n_head + m->n_kv_head, heads_angles_of(m, r->layer, r->angles, r->T, t));
    }
    return 0;
}

int cpu_project_qkv(cpu_run *r) {
    const model *m = r->s->m;
    const cpu_layer *l = &r->s->layer[r->layer];
    size_t cols = (size_t)(m->n_head + 2 * m->n_kv_head) * (size_t)m->head_dim;
    product p = {.r = r,
                 .grid = tile_grid_new(r->T, cols, (size_t)m->head_dim),
                 .inner = (size_t)m->n_embd,
                 .ld_in = r->ld_x,
                 .ld_out = r->ld_qkv,
                 .in = r->normed,
                 .w = l->at[SLOT_Q],
                 .bias = l->at[SLOT_Q_BIAS],
                 .out = r->qkv};
    TRY(pool_run(r->s->p, tile_grid_count(&p.grid), qkv_tile, &p));
    return m->arch->qk_norm == ARCH_QK_NORM_NONE ? 0 : run_rows(r, finish_heads_rows, r);
}

/* ---- feed-forward ----------------------------------------------------------------------------------------------- */

void cpu_gate_tile(const cpu_run *r, tile t, float *gate, float *up) {
    const cpu_layer *l = &r->s->layer[r->layer];
    size_t n_embd = (size_t)r->s->m->n_embd;
    const float *in = r->normed + t.row * r->ld_x, *bias = l->at[SLOT_UP_BIAS];
    bool gated = l->at[SLOT_GATE];
    matmul_weight(t.n_rows, t.n_cols, n_embd, in, r->ld_x, l->at[gated ? SLOT_GATE : SLOT_UP] + t.col * n_embd, n_embd,
                  0, gate, r->ld_gate);
    if (gated)
        matmul_weight(t.n_rows, t.n_cols, n_embd, in, r->ld_x, l->at[SLOT_UP] + t.col * n_embd, n_embd, 0, up,
                      r->ld_ff);
    for (size_t row = 0; row < t.n_rows && !gated; row++)
        for (size_t i = 0; i < t.n_cols; i++) up[row * r->ld_ff + i] = 1;
    if (bias) add_bias(bias, t, gated ? up : gate, gated ? r->ld_ff : r->ld_gate);
}

/* ff = up * activation(gate), the gate never leaving the worker's scratch. */
static int gate_tile(void *context, size_t task, int worker) {
    cpu_run *r = context;
    tile_grid g = cpu_gate_grid(r);
    tile t = tile_grid_at(&g, task);
    float *gate = r->scratch[worker], *up = r->ff + t.row * r->ld_ff + t.col;
    cpu_gate_tile(r, t, gate, up);
    for (size_t row = 0; row < t.n_rows; row++)
        rows_gate(r->s->m->arch->activation, gate + row * r->ld_gate, up + row * r->ld_ff, t.n_cols);
    return 0;
}

tile_grid cpu_gate_grid(const cpu_run *r) {
    return tile_grid_new(r->T, (size_t)r->s->m->n_ff, KERNEL_LANES);
}

/* ---- the pass --------------------------------------------------------------------------------------------------- */

int cpu_embed(cpu_run *r) {
    for (size_t t = 0; t < r->T; t++) TRY(cpu_embed_token(r->s, r->tokens[t], t, r->x + t * r->ld_x));
    return 0;
}

static int hand_out_layer(const cpu_run *r) {
    const model *m = r->s->m;
    const float *k = r->qkv + (size_t)m->n_head * (size_t)m->head_dim;
    layer_capture c = {
        .q = r->qkv, .k = k, .v = k + (size_t)m->n_kv_head * (size_t)m->head_dim, .stride = r->ld_qkv, .lse = r->lse};
    return r->sink->layer ? r->sink->layer(r->sink->context, r->layer, &c) : 0;
}

int cpu_run_attention(cpu_run *r, int layer) {
    r->layer = layer;
    TRY(cpu_take_layer(r->s, layer));
    TRY(cpu_norm(r, r->s->layer[layer].at[SLOT_ATTN_NORM], r->s->layer[layer].at[SLOT_ATTN_NORM_BIAS]));
    TRY(cpu_project_qkv(r));
    TRY(cpu_attention(r));
    return hand_out_layer(r);
}

int cpu_add_mix(cpu_run *r) {
    const model *m = r->s->m;
    return add_to_x(r, r->mix, r->ld_mix, (size_t)m->n_head * (size_t)m->head_dim, SLOT_O, SLOT_O_BIAS,
                    SLOT_ATTN_POST_NORM);
}

int cpu_run_feed_forward(cpu_run *r) {
    const cpu_layer *w = &r->s->layer[r->layer];
    tile_grid g = cpu_gate_grid(r);
    TRY(cpu_norm(r, w->at[SLOT_FFN_NORM], w->at[SLOT_FFN_NORM_BIAS]));
    TRY(pool_run(r->s->p, tile_grid_count(&g), gate_tile, r));
    return add_to_x(r, r->ff, r->ld_ff, (size_t)r->s->m->n_ff, SLOT_DOWN, SLOT_DOWN_BIAS, SLOT_FFN_POST_NORM);
}

int cpu_run_hidden(cpu_run *r) {
    TRY(cpu_norm(r, r->s->output_norm, r->s->output_norm_bias));
    return r->sink->hidden ? r->sink->hidden(r->sink->context, r->normed, r->ld_x) : 0;
}

/* The output matrix is too large to be put into f32 whole: each tile has its rows made. */
static int logits_tile(void *context, size_t task, int worker) {
    const product *p = context;
    const backend_state *s = p->r->s;
    cpu_matrix output = cpu_output_matrix(s->m);
    tile t = tile_grid_at(&p->grid, task);
    const float *w;
    TRY(cpu_rows(&output, t.col, t.n_cols, s->panel[worker], &w));
    multiply(p, t, w);
    for (size_t row = t.row; row < t.row + t.n_rows && s->m->logit_softcap > 0; row++)
        rows_softcap(p->out + row * p->ld_out + t.col, t.n_cols, s->m->logit_softcap);
    return 0;
}

int cpu_logits_tile(cpu_run *r, size_t row, size_t n_rows) {
    const model *m = r->s->m;
    product p = {.r = r,
                 .grid = tile_grid_new(n_rows, (size_t)m->n_vocab, KERNEL_LANES),
                 .inner = (size_t)m->n_embd,
                 .ld_in = r->ld_x,
                 .ld_out = r->ld_logits,
                 .in = r->normed + row * r->ld_x,
                 .out = r->logits};
    return pool_run(r->s->p, tile_grid_count(&p.grid), logits_tile, &p);
}

int cpu_run_logits(cpu_run *r) {
    if (r->sink->logits || r->sink->hidden) TRY(cpu_run_hidden(r));
    for (size_t row = 0; row < r->T && r->sink->logits; row += r->logit_rows) {
        size_t n = r->T - row < r->logit_rows ? r->T - row : r->logit_rows;
        TRY(cpu_logits_tile(r, row, n));
        TRY(r->sink->logits(r->sink->context, (int32_t)row, (int32_t)n, r->logits, r->ld_logits));
    }
    return 0;
}

static int run_pass(cpu_run *r) {
    TRY(cpu_embed(r));
    for (int32_t layer = 0; layer < r->s->m->n_layer; layer++) {
        TRY(cpu_run_attention(r, layer));
        TRY(cpu_add_mix(r));
        TRY(cpu_run_feed_forward(r));
    }
    return cpu_run_logits(r);
}

int cpu_forward(backend_state *s, const int32_t *tokens, int32_t n, const int32_t *evict_at, const forward_sink *sink) {
    cpu_run r;
    TRY(cpu_run_new(s, tokens, n, sink, &r));
    r.evict_at = evict_at;
    int code = run_pass(&r);
    cpu_run_free(&r);
    return code;
}
