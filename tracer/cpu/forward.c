#include "tracer/cpu/forward.h"
#include "base/err.h"
#include "base/mem.h"
#include "tracer/cpu/matmul.h"
#include "tracer/cpu/rows.h"
#include "traces/kernels.h"

#include <string.h>

enum {
    NORM_ROWS = 64,   /* rows of one elementwise task */
    LOGIT_ROWS = 256, /* rows of a tile of logits, fewer where the vocabulary is large */
    LOGIT_BYTES = 64 << 20
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
    r->logit_rows = rows > LOGIT_ROWS ? LOGIT_ROWS : rows ? rows : 1;
    tile_grid gate = tile_grid_new(r->T, (size_t)m->n_ff, KERNEL_LANES);
    r->ld_gate = kernel_pad(gate.tile_cols);
}

static size_t scratch_floats(const cpu_run *r) {
    size_t scores = BACKEND_ROW_TILE * r->ld_scores, gate = BACKEND_ROW_TILE * r->ld_gate;
    return scores > gate ? scores : gate;
}

static void carve(cpu_run *r, mem_carver *c) {
    const model *m = r->s->m;
    int threads = pool_threads(r->s->p);
    r->x = mem_carve(c, r->T * r->ld_x, sizeof(float));
    r->normed = mem_carve(c, r->T * r->ld_x, sizeof(float));
    r->qkv = mem_carve(c, r->T * r->ld_qkv, sizeof(float));
    r->mix = mem_carve(c, r->T * r->ld_mix, sizeof(float));
    r->ff = mem_carve(c, r->T * r->ld_ff, sizeof(float));
    r->lse = mem_carve(c, (size_t)m->n_head * r->T, sizeof(float));
    r->angles = mem_carve(c, r->T * (size_t)m->rope_dims, sizeof(float));
    r->logits = mem_carve(c, r->logit_rows * r->ld_logits, sizeof(float));
    r->scratch = mem_carve(c, (size_t)threads, sizeof *r->scratch);
    for (int i = 0; i < threads; i++) {
        float *scratch = mem_carve(c, scratch_floats(r), sizeof(float));
        if (c->base) r->scratch[i] = scratch;
    }
}

int cpu_run_new(backend_state *s, const int32_t *tokens, int32_t n, const forward_sink *sink, cpu_run *r) {
    *r = (cpu_run){.s = s, .tokens = tokens, .T = (size_t)n, .sink = sink};
    set_strides(r);
    mem_carver size = {0};
    carve(r, &size);
    r->block = mem_new(size.used, 1, "activations");
    if (!r->block) return ERR_DATA;
    mem_carver c = {.base = r->block};
    carve(r, &c);
    for (int32_t t = 0; t < n; t++)
        rows_rope_angles(t, s->m->rope_dims, s->m->rope[0].inverse, s->m->rope[0].scale,
                         r->angles + (size_t)t * (size_t)s->m->rope_dims);
    return 0;
}

void cpu_run_free(cpu_run *r) {
    mem_free(r->block);
    *r = (cpu_run){0};
}

/* ---- norms ------------------------------------------------------------------------------------------------------ */

typedef struct norm_job {
    cpu_run *r;
    const float *weight;
} norm_job;

static int norm_rows(void *context, size_t task, int worker) {
    (void)worker;
    const norm_job *j = context;
    const cpu_run *r = j->r;
    const model *m = r->s->m;
    size_t end = (task + 1) * NORM_ROWS;
    for (size_t t = task * NORM_ROWS; t < end && t < r->T; t++)
        rows_rms_norm(r->x + t * r->ld_x, j->weight, (size_t)m->n_embd, m->norm_eps, r->normed + t * r->ld_x);
    return 0;
}

int cpu_norm(cpu_run *r, const float *weight) {
    norm_job j = {r, weight};
    return pool_run(r->s->p, (r->T + NORM_ROWS - 1) / NORM_ROWS, norm_rows, &j);
}

/* ---- products --------------------------------------------------------------------------------------------------- */

/* out = in * w^T (or out += in * w^T), tile by tile. */
typedef struct product {
    cpu_run *r;
    tile_grid grid;
    size_t inner, ld_in, ld_out;
    const float *in, *w;
    float *out;
    int accumulate;
} product;

static void multiply(const product *p, tile t) {
    matmul_weight(t.n_rows, t.n_cols, p->inner, p->in + t.row * p->ld_in, p->ld_in, p->w + t.col * p->inner, p->inner,
                  p->accumulate, p->out + t.row * p->ld_out + t.col, p->ld_out);
}

static int product_tile(void *context, size_t task, int worker) {
    (void)worker;
    const product *p = context;
    multiply(p, tile_grid_at(&p->grid, task));
    return 0;
}

/* The residual stream takes a product's result as it comes out of the product: x += in * w^T. */
static int add_to_x(cpu_run *r, const float *in, size_t ld_in, size_t inner, const float *w) {
    product p = {.r = r,
                 .grid = tile_grid_new(r->T, (size_t)r->s->m->n_embd, KERNEL_LANES),
                 .inner = inner,
                 .ld_in = ld_in,
                 .ld_out = r->ld_x,
                 .in = in,
                 .w = w,
                 .out = r->x,
                 .accumulate = 1};
    return pool_run(r->s->p, tile_grid_count(&p.grid), product_tile, &p);
}

/* q, k, v of whole heads; then bias and rotation while the tile is in the cache. */
static int qkv_tile(void *context, size_t task, int worker) {
    (void)worker;
    const product *p = context;
    const cpu_run *r = p->r;
    const model *m = r->s->m;
    const float *bias = r->s->layer[r->layer].qkv_bias;
    tile t = tile_grid_at(&p->grid, task);
    multiply(p, t);
    size_t turned = (size_t)(m->n_head + m->n_kv_head) * (size_t)m->head_dim;
    size_t turn = t.col >= turned ? 0 : t.col + t.n_cols < turned ? t.n_cols : turned - t.col;
    for (size_t row = t.row; row < t.row + t.n_rows; row++) {
        float *x = p->out + row * p->ld_out + t.col;
        for (size_t i = 0; bias && i < t.n_cols; i++) x[i] += bias[t.col + i];
        rows_rope(x, (int)(turn / (size_t)m->head_dim), m->head_dim, m->rope_dims, m->rope_kind,
                  r->angles + row * (size_t)m->rope_dims);
    }
    return 0;
}

int cpu_project_qkv(cpu_run *r) {
    const model *m = r->s->m;
    size_t cols = (size_t)(m->n_head + 2 * m->n_kv_head) * (size_t)m->head_dim;
    product p = {.r = r,
                 .grid = tile_grid_new(r->T, cols, (size_t)m->head_dim),
                 .inner = (size_t)m->n_embd,
                 .ld_in = r->ld_x,
                 .ld_out = r->ld_qkv,
                 .in = r->normed,
                 .w = r->s->layer[r->layer].qkv,
                 .out = r->qkv};
    return pool_run(r->s->p, tile_grid_count(&p.grid), qkv_tile, &p);
}

/* ff = up * silu(gate), the gate never leaving the worker's scratch. */
static int gated_tile(void *context, size_t task, int worker) {
    const product *up = context;
    const cpu_run *r = up->r;
    tile t = tile_grid_at(&up->grid, task);
    float *gate = r->scratch[worker];
    matmul_weight(t.n_rows, t.n_cols, up->inner, up->in + t.row * up->ld_in, up->ld_in,
                  r->s->layer[r->layer].gate + t.col * up->inner, up->inner, 0, gate, r->ld_gate);
    multiply(up, t);
    for (size_t row = 0; row < t.n_rows; row++)
        rows_silu_gate(gate + row * r->ld_gate, up->out + (t.row + row) * up->ld_out + t.col, t.n_cols);
    return 0;
}

static int gated_feed_forward(cpu_run *r) {
    const model *m = r->s->m;
    product p = {.r = r,
                 .grid = tile_grid_new(r->T, (size_t)m->n_ff, KERNEL_LANES),
                 .inner = (size_t)m->n_embd,
                 .ld_in = r->ld_x,
                 .ld_out = r->ld_ff,
                 .in = r->normed,
                 .w = r->s->layer[r->layer].up,
                 .out = r->ff};
    return pool_run(r->s->p, tile_grid_count(&p.grid), gated_tile, &p);
}

/* ---- the pass --------------------------------------------------------------------------------------------------- */

int cpu_embed(cpu_run *r) {
    size_t n_embd = (size_t)r->s->m->n_embd;
    for (size_t t = 0; t < r->T; t++)
        memcpy(r->x + t * r->ld_x, r->s->embedding + (size_t)r->tokens[t] * n_embd, n_embd * sizeof *r->x);
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
    TRY(cpu_norm(r, r->s->layer[layer].attn_norm));
    TRY(cpu_project_qkv(r));
    TRY(cpu_attention(r));
    return hand_out_layer(r);
}

int cpu_add_mix(cpu_run *r) {
    const model *m = r->s->m;
    return add_to_x(r, r->mix, r->ld_mix, (size_t)m->n_head * (size_t)m->head_dim, r->s->layer[r->layer].o);
}

int cpu_run_feed_forward(cpu_run *r) {
    const cpu_layer *w = &r->s->layer[r->layer];
    TRY(cpu_norm(r, w->ffn_norm));
    TRY(gated_feed_forward(r));
    return add_to_x(r, r->ff, r->ld_ff, (size_t)r->s->m->n_ff, w->down);
}

int cpu_run_hidden(cpu_run *r) {
    TRY(cpu_norm(r, r->s->output_norm));
    return r->sink->hidden ? r->sink->hidden(r->sink->context, r->normed, r->ld_x) : 0;
}

int cpu_logits_tile(cpu_run *r, size_t row, size_t n_rows) {
    const model *m = r->s->m;
    product p = {.r = r,
                 .grid = tile_grid_new(n_rows, (size_t)m->n_vocab, KERNEL_LANES),
                 .inner = (size_t)m->n_embd,
                 .ld_in = r->ld_x,
                 .ld_out = r->ld_logits,
                 .in = r->normed + row * r->ld_x,
                 .w = r->s->output,
                 .out = r->logits};
    return pool_run(r->s->p, tile_grid_count(&p.grid), product_tile, &p);
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
