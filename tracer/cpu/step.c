#include "tracer/cpu/step.h"
#include "base/err.h"
#include "base/mem.h"
#include "tracer/cpu/heads.h"
#include "tracer/cpu/matmul.h"
#include "tracer/cpu/rows.h"
#include "traces/kernels.h"

#include <math.h>
#include <string.h>

/* In a step a tile of weights is read from memory for the first group of rows and from the cache for the others. Many
 * rows at once want wider tiles, since every tile packs its rows anew. */
enum { GROUP_ROWS = 16, STEP_COLS = CPU_STRIP_ROWS, PROJECT_ROWS = 256, PROJECT_COLS = 1024 };
_Static_assert((int)PROJECT_COLS <= (int)TILE_COLS_MAX, "a panel takes a strip of the output matrix");

typedef float v4f __attribute__((vector_size(16)));

/* The entries of one kv head that a copy still has. Keys and values stay in their slots; slots of entries that left
 * wait behind the residents' for the next ones. */
typedef struct cache {
    int32_t n, used, capacity;
    int32_t *entry; /* [capacity] residents in [0, n), ascending */
    int32_t *slot;  /* [capacity] slots of the residents in [0, n), free ones in [n, used) */
    float *k, *v;   /* [capacity][ld_kv], zero behind head_dim */
    void *block;
} cache;

struct backend_steps {
    backend_state *s;
    size_t n, n_rows; /* copies; rows of the buffers: whole groups */
    int32_t t, n_tokens;
    size_t ld_x, ld_qkv, ld_mix, ld_ff, ld_logits, ld_rows, ld_kv;
    float *x, *normed, *qkv, *mix, *ff, *gate, *logits; /* [n_rows][ld_...]; as in cpu_run */
    float *angles;                                      /* [n_rope][rope_dims] of step t */
    float **rows;                                       /* [n] see step_view */
    float **scores;                                     /* [threads][ld_rows] */
    float **query;                                      /* [threads][ld_kv] a head's q, then its output */
    cache *caches;                                      /* [n][n_layer][n_kv_head] */
    int layer;                                          /* current */
    void *block;
};

/* ---- products --------------------------------------------------------------------------------------------------- */

/* out = in * w^T (or out += in * w^T) and what belongs to it, all rows of one strip of columns after another. */
typedef struct product {
    const backend_state *s;
    size_t n_rows, group, strip, ld_in, ld_out;
    cpu_matrix w;
    const float *in;
    float *out;
    int accumulate;
    const float *bias; /* NULL: none */
    float softcap;     /* 0: none */
} product;

static int multiply(const product *p, size_t index, int worker) {
    size_t col = index * p->strip, left = p->w.outputs - col, n_cols = left < p->strip ? left : p->strip;
    const float *w;
    TRY(cpu_rows(&p->w, col, n_cols, p->s->panel[worker], &w));
    for (size_t row = 0; row < p->n_rows; row += p->group) {
        size_t n = p->n_rows - row < p->group ? p->n_rows - row : p->group;
        matmul_weight(n, n_cols, p->w.inputs, p->in + row * p->ld_in, p->ld_in, w, p->w.inputs, p->accumulate,
                      p->out + row * p->ld_out + col, p->ld_out);
    }
    for (size_t row = 0; row < p->n_rows && (p->bias || p->softcap > 0); row++) {
        float *out = p->out + row * p->ld_out + col;
        for (size_t i = 0; p->bias && i < n_cols; i++) out[i] += p->bias[col + i];
        if (p->softcap > 0) rows_softcap(out, n_cols, p->softcap);
    }
    return 0;
}

static int product_strip(void *context, size_t task, int worker) {
    return multiply(context, task, worker);
}

static size_t strips(const product *p) {
    return (p->w.outputs + p->strip - 1) / p->strip;
}

int cpu_project(backend_state *s, const float *hidden, size_t n, size_t stride, float *out, size_t stride_out) {
    product p = {.s = s,
                 .n_rows = n,
                 .group = PROJECT_ROWS,
                 .strip = PROJECT_COLS,
                 .ld_in = stride,
                 .ld_out = stride_out,
                 .in = hidden,
                 .w = cpu_output_matrix(s->m),
                 .out = out,
                 .softcap = s->m->logit_softcap};
    return pool_run(s->p, strips(&p), product_strip, &p);
}

/* One step's product with a matrix; what belongs to it is for the caller. */
static product product_of(const backend_steps *st, const float *in, size_t ld_in, cpu_matrix w, float *out,
                          size_t ld_out) {
    return (product){.s = st->s,
                     .n_rows = st->n_rows,
                     .group = GROUP_ROWS,
                     .strip = STEP_COLS,
                     .w = w,
                     .ld_in = ld_in,
                     .ld_out = ld_out,
                     .in = in,
                     .out = out};
}

static int run_product(const backend_steps *st, product *p) {
    return pool_run(st->s->p, strips(p), product_strip, p);
}

/* ---- buffers ---------------------------------------------------------------------------------------------------- */

static void set_strides(backend_steps *st) {
    const model *m = st->s->m;
    size_t dim = (size_t)m->head_dim, heads = (size_t)m->n_head;
    st->ld_x = kernel_pad((size_t)m->n_embd);
    st->ld_qkv = kernel_pad((heads + 2 * (size_t)m->n_kv_head) * dim);
    st->ld_mix = kernel_pad(heads * dim);
    st->ld_ff = kernel_pad((size_t)m->n_ff);
    st->ld_logits = kernel_pad((size_t)m->n_vocab);
    st->ld_rows = kernel_pad((size_t)st->n_tokens);
    st->ld_kv = kernel_pad(dim);
    st->n_rows = (st->n + GROUP_ROWS - 1) / GROUP_ROWS * GROUP_ROWS;
}

static void carve(backend_steps *st, const bool *wants_rows, mem_carver *c) {
    const model *m = st->s->m;
    size_t threads = (size_t)pool_threads(st->s->p), layers = (size_t)m->n_layer, heads = (size_t)m->n_head;
    struct {
        float **at;
        size_t stride;
    } all[] = {{&st->x, st->ld_x},   {&st->normed, st->ld_x}, {&st->qkv, st->ld_qkv},      {&st->mix, st->ld_mix},
               {&st->ff, st->ld_ff}, {&st->gate, st->ld_ff},  {&st->logits, st->ld_logits}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        *all[i].at = mem_carve(c, st->n_rows * all[i].stride, sizeof(float));
    st->angles = mem_carve(c, (size_t)m->n_rope * (size_t)m->rope_dims, sizeof(float));
    st->caches = mem_carve(c, st->n * layers * (size_t)m->n_kv_head, sizeof *st->caches);
    st->rows = mem_carve(c, st->n, sizeof *st->rows);
    st->scores = mem_carve(c, threads, sizeof *st->scores);
    st->query = mem_carve(c, threads, sizeof *st->query);
    for (size_t i = 0; i < st->n; i++) {
        float *rows = mem_carve(c, wants_rows[i] ? layers * heads * st->ld_rows : 0, sizeof *rows);
        if (c->base) st->rows[i] = wants_rows[i] ? rows : NULL;
    }
    for (size_t i = 0; i < threads; i++) {
        float *scores = mem_carve(c, st->ld_rows, sizeof *scores), *query = mem_carve(c, st->ld_kv, sizeof *query);
        if (c->base) st->scores[i] = scores, st->query[i] = query;
    }
}

int cpu_steps_new(backend_state *s, size_t n, const bool *wants_rows, int32_t n_tokens, backend_steps **out) {
    *out = NULL;
    TRY(cpu_check_length(s, n_tokens));
    backend_steps *st = *out = mem_new(1, sizeof *st, "steps");
    if (!st) return ERR_DATA;
    *st = (backend_steps){.s = s, .n = n, .n_tokens = n_tokens};
    set_strides(st);
    mem_carver size = {0};
    carve(st, wants_rows, &size);
    st->block = mem_new(size.used, 1, "steps");
    if (!st->block) {
        mem_free(st);
        *out = NULL;
        return ERR_DATA;
    }
    mem_carver c = {.base = st->block};
    carve(st, wants_rows, &c);
    return 0;
}

void cpu_steps_free(backend_steps *st) {
    if (!st) return;
    size_t n = st->n * (size_t)st->s->m->n_layer * (size_t)st->s->m->n_kv_head;
    for (size_t i = 0; i < n; i++) mem_free(st->caches[i].block);
    mem_free(st->block);
    mem_free(st);
}

/* ---- caches ----------------------------------------------------------------------------------------------------- */

static cache *cache_of(const backend_steps *st, size_t copy, int layer, int kv_head) {
    const model *m = st->s->m;
    return st->caches + (copy * (size_t)m->n_layer + (size_t)layer) * (size_t)m->n_kv_head + (size_t)kv_head;
}

static int cache_grow(const backend_steps *st, cache *c) {
    int32_t most = st->n_tokens, capacity = c->capacity ? 2 * c->capacity : 32;
    cache bigger = *c;
    mem_carver m = {0};
    bigger.capacity = capacity < most ? capacity : most;
    for (int pass = 0; pass < 2; pass++) {
        size_t n = (size_t)bigger.capacity;
        bigger.k = mem_carve(&m, n * st->ld_kv, sizeof *c->k);
        bigger.v = mem_carve(&m, n * st->ld_kv, sizeof *c->v);
        bigger.entry = mem_carve(&m, n, sizeof *c->entry);
        bigger.slot = mem_carve(&m, n, sizeof *c->slot);
        if (pass) break;
        bigger.block = mem_new(m.used, 1, "KV cache");
        if (!bigger.block) return ERR_DATA;
        m = (mem_carver){.base = bigger.block};
    }
    if (c->block) {
        memcpy(bigger.k, c->k, (size_t)c->used * st->ld_kv * sizeof *c->k);
        memcpy(bigger.v, c->v, (size_t)c->used * st->ld_kv * sizeof *c->v);
        memcpy(bigger.entry, c->entry, (size_t)c->n * sizeof *c->entry);
        memcpy(bigger.slot, c->slot, (size_t)c->used * sizeof *c->slot);
    }
    mem_free(c->block);
    *c = bigger;
    return 0;
}

/* Keep the entries from `first` on, and of them only those with evict_at > t (NULL: all). */
static void cache_keep(cache *c, int32_t first, const int32_t *evict_at, int32_t t) {
    int32_t to = 0;
    for (int32_t j = 0; j < c->n; j++) {
        int32_t entry = c->entry[j], slot = c->slot[j];
        if (entry < first || (evict_at && evict_at[entry] <= t)) continue;
        c->entry[to] = entry;
        c->slot[j] = c->slot[to]; /* a free one, or its own */
        c->slot[to++] = slot;
    }
    c->n = to;
}

static int cache_append(const backend_steps *st, cache *c, int32_t t, const float *k, const float *v) {
    size_t bytes = (size_t)st->s->m->head_dim * sizeof *k;
    if (c->n == c->capacity) TRY(cache_grow(st, c));
    if (c->n == c->used) c->slot[c->used] = c->used, c->used++;
    size_t at = (size_t)c->slot[c->n] * st->ld_kv;
    memcpy(c->k + at, k, bytes);
    memcpy(c->v + at, v, bytes);
    c->entry[c->n++] = t;
    return 0;
}

void cpu_steps_forget(backend_steps *st, size_t copy, int layer, int kv_head, const int32_t *evict_at) {
    cache_keep(cache_of(st, copy, layer, kv_head), 0, evict_at, st->t); /* t is the next step already */
}

/* ---- attention -------------------------------------------------------------------------------------------------- */

/* out [ld_kv] = sum over residents of p v. */
static void mix_values(const backend_steps *st, const cache *c, const float *p, float *out) {
    memset(out, 0, st->ld_kv * sizeof *out);
    for (int32_t j = 0; j < c->n; j++) {
        const float *v = c->v + (size_t)c->slot[j] * st->ld_kv;
        v4f weight = p[j] - (v4f){0};
        for (size_t d = 0; d < st->ld_kv; d += 4) *(v4f *)(out + d) += weight * *(const v4f *)(v + d);
    }
}

static int attend(backend_steps *st, size_t copy, const cache *c, int head, int worker) {
    const model *m = st->s->m;
    size_t dim = (size_t)m->head_dim;
    float *q = st->query[worker], *p = st->scores[worker];
    memset(q + dim, 0, (st->ld_kv - dim) * sizeof *q);
    memcpy(q, st->qkv + copy * st->ld_qkv + (size_t)head * dim, dim * sizeof *q);
    for (int32_t j = 0; j < c->n; j++)
        p[j] = (float)((double)m->scale * kernels()->dot(q, c->k + (size_t)c->slot[j] * st->ld_kv, dim));
    if (isnan(kernels()->softmax(p, 0, (size_t)c->n - 1, m->softcap, NULL)))
        return err_set(ERR_DATA, "non-finite logits at layer %d, token %d (attention head %d)", st->layer, st->t, head);
    mix_values(st, c, p, q);
    memcpy(st->mix + copy * st->ld_mix + (size_t)head * dim, q, dim * sizeof *q);
    if (!st->rows[copy]) return 0;
    float *row = st->rows[copy] + ((size_t)st->layer * (size_t)m->n_head + (size_t)head) * st->ld_rows;
    memset(row, 0, (size_t)(st->t + 1) * sizeof *row);
    for (int32_t j = 0; j < c->n; j++) row[c->entry[j]] = p[j];
    return 0;
}

/* One kv head of one copy, and the query heads that read it. */
static int attend_task(void *context, size_t task, int worker) {
    backend_steps *st = context;
    const model *m = st->s->m;
    size_t dim = (size_t)m->head_dim, n_kv = (size_t)m->n_kv_head, copy = task / n_kv, kv = task % n_kv;
    size_t k_head = (size_t)m->n_head + kv, v_head = k_head + n_kv;
    int group = m->n_head / m->n_kv_head, window = m->window[st->layer];
    float *qkv = st->qkv + copy * st->ld_qkv;
    cache *c = cache_of(st, copy, st->layer, (int)kv);
    const float *angles = heads_angles_of(m, st->layer, st->angles, 1, 0);
    heads_turn(m, qkv + kv * (size_t)group * dim, group, angles);
    heads_turn(m, qkv + k_head * dim, 1, angles);
    if (window) cache_keep(c, st->t - window + 1, NULL, 0);
    TRY(cache_append(st, c, st->t, qkv + k_head * dim, qkv + v_head * dim));
    for (int h = 0; h < group; h++) TRY(attend(st, copy, c, (int)kv * group + h, worker));
    return 0;
}

/* ---- a step ----------------------------------------------------------------------------------------------------- */

/* normed = norm(x), or x where there is none. */
static void norm(backend_steps *st, const float *weight, const float *bias) {
    const model *m = st->s->m;
    if (!weight) memcpy(st->normed, st->x, st->n * st->ld_x * sizeof *st->x);
    for (size_t i = 0; weight && i < st->n; i++)
        rows_norm(m->arch->norm, st->x + i * st->ld_x, weight, bias, (size_t)m->n_embd, m->norm_eps,
                  st->normed + i * st->ld_x);
}

/* What one half of the layer adds to x: in * w^T + bias, or the norm of it where the layer has one. */
static int add_to_x(backend_steps *st, const float *in, size_t ld_in, arch_slot w, arch_slot bias,
                    arch_slot post_norm) {
    const model *m = st->s->m;
    const cpu_layer *l = &st->s->layer[st->layer];
    const float *weight = l->at[post_norm];
    product p = product_of(st, in, ld_in, cpu_matrix_of(m, st->layer, w), weight ? st->normed : st->x, st->ld_x);
    p.bias = l->at[bias];
    p.accumulate = !weight;
    TRY(run_product(st, &p));
    for (size_t i = 0; i < st->n && weight; i++) {
        float *x = st->x + i * st->ld_x, *added = st->normed + i * st->ld_x;
        rows_norm(m->arch->norm, added, weight, NULL, (size_t)m->n_embd, m->norm_eps, added);
        for (size_t k = 0; k < (size_t)m->n_embd; k++) x[k] += added[k];
    }
    return 0;
}

/* ff = up * activation(gate) in one strip of columns. Without a gate it is `up` that is activated. */
static int gate_strip(void *context, size_t task, int worker) {
    const backend_steps *st = context;
    const model *m = st->s->m;
    const cpu_layer *l = &st->s->layer[st->layer];
    bool gated = l->at[SLOT_GATE];
    product up = product_of(st, st->normed, st->ld_x, cpu_matrix_of(m, st->layer, SLOT_UP), st->ff, st->ld_ff);
    up.bias = l->at[SLOT_UP_BIAS];
    product gate = up;
    gate.out = st->gate;
    if (gated) gate.w = cpu_matrix_of(m, st->layer, SLOT_GATE), gate.bias = NULL;
    TRY(multiply(&gate, task, worker));
    if (gated) TRY(multiply(&up, task, worker));
    size_t col = task * up.strip, left = up.w.outputs - col, n = left < up.strip ? left : up.strip;
    for (size_t i = 0; i < st->n; i++) {
        float *ff = st->ff + i * st->ld_ff + col;
        for (size_t k = 0; k < n && !gated; k++) ff[k] = 1;
        rows_gate(m->arch->activation, st->gate + i * st->ld_ff + col, ff, n);
    }
    return 0;
}

static int run_layer(backend_steps *st, int layer) {
    const model *m = st->s->m;
    const cpu_layer *w = &st->s->layer[layer];
    st->layer = layer;
    norm(st, w->at[SLOT_ATTN_NORM], w->at[SLOT_ATTN_NORM_BIAS]);
    product qkv = product_of(st, st->normed, st->ld_x, cpu_matrix_of(m, layer, SLOT_Q), st->qkv, st->ld_qkv);
    qkv.bias = w->at[SLOT_Q_BIAS];
    TRY(run_product(st, &qkv));
    for (size_t i = 0; i < st->n; i++) heads_norm(st->s, layer, st->qkv + i * st->ld_qkv);
    TRY(pool_run(st->s->p, st->n * (size_t)m->n_kv_head, attend_task, st));
    TRY(add_to_x(st, st->mix, st->ld_mix, SLOT_O, SLOT_O_BIAS, SLOT_ATTN_POST_NORM));
    norm(st, w->at[SLOT_FFN_NORM], w->at[SLOT_FFN_NORM_BIAS]);
    product up = product_of(st, st->normed, st->ld_x, cpu_matrix_of(m, layer, SLOT_UP), st->ff, st->ld_ff);
    TRY(pool_run(st->s->p, strips(&up), gate_strip, st));
    return add_to_x(st, st->ff, st->ld_ff, SLOT_DOWN, SLOT_DOWN_BIAS, SLOT_FFN_POST_NORM);
}

int cpu_steps_next(backend_steps *st, int32_t token, step_view *out) {
    const backend_state *s = st->s;
    const model *m = s->m;
    for (size_t i = 0; i < st->n; i++) TRY(cpu_embed_token(s, token, (size_t)st->t, st->x + i * st->ld_x));
    heads_angles(m, st->t, 1, st->angles);
    for (int layer = 0; layer < m->n_layer; layer++) TRY(run_layer(st, layer));
    norm(st, s->output_norm, s->output_norm_bias);
    product p = product_of(st, st->normed, st->ld_x, cpu_output_matrix(m), st->logits, st->ld_logits);
    p.softcap = m->logit_softcap;
    TRY(run_product(st, &p));
    st->t++;
    *out = (step_view){st->logits, st->ld_logits, st->rows, st->ld_rows};
    return 0;
}

/* ---- many steps at once ----------------------------------------------------------------------------------------- */

/* A layer's keys and values into the caches, but for those that its window has passed. */
static int fill_layer(void *context, int layer, const layer_capture *c) {
    backend_steps *st = context;
    const model *m = st->s->m;
    size_t n_kv = (size_t)m->n_kv_head, dim = (size_t)m->head_dim;
    int32_t window = m->window[layer], first = window && window < st->t ? st->t - window : 0;
    for (size_t i = 0; i < st->n * n_kv; i++)
        for (int32_t t = first; t < st->t; t++) {
            size_t at = (size_t)t * c->stride + i % n_kv * dim;
            TRY(cache_append(st, cache_of(st, i / n_kv, layer, (int)(i % n_kv)), t, c->k + at, c->v + at));
        }
    return 0;
}

int cpu_steps_fill(backend_steps *st, const int32_t *tokens, int32_t n) {
    forward_sink sink = {.context = st, .layer = fill_layer};
    st->t = n;
    return cpu_forward(st->s, tokens, n, NULL, &sink);
}
