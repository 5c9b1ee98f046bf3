/* Closed loop: copies of the model side by side, one token at a time. Every copy's caches hold all entries; what it has
 * forgotten is masked, so memory is that of full caches. */
#include "base/err.h"
#include "base/mem.h"
#include "tracer/cpu/rows.h"
#include "tracer/cuda/arena.h"
#include "tracer/cuda/cuda.h"
#include "tracer/cuda/kernels.h"
#include "traces/kernels.h"

#include <string.h>

struct backend_steps {
    backend_state *s;
    size_t n;
    int32_t t, n_tokens;
    size_t ld_x, ld_qkv, ld_mix, ld_ff, ld_logits, ld_rows;
    bool any_rows;
    /* Device memory; rows are copies. */
    int32_t *ids, *bad /* [n_layer] */, *gone /* [n_layer][n][n_kv_head][n_tokens] step at which an entry left */;
    float *x, *qkv, *mix, *gate, *up, *angles, *logits;
    void *normed, *ff;
    float *keys, *values; /* [n_layer][n][n_kv_head][n_tokens][head_dim] */
    float *probs;         /* [n_layer][n][n_head][ld_rows] */
    void *memory;
    /* Pinned host memory; between steps no copy is under way. */
    int32_t *host_ids, *host_bad, *host_gone;
    float *host_angles, *host_logits;
    float **rows; /* [n], NULL where not wanted */
    void *block;
};

/* ---- memory ----------------------------------------------------------------------------------------------------- */

static size_t units(const backend_steps *st) {
    return (size_t)st->s->m->n_layer * st->n * (size_t)st->s->m->n_kv_head;
}

static size_t unit_of(const backend_steps *st, int layer, size_t copy, int kv_head) {
    return ((size_t)layer * st->n + copy) * (size_t)st->s->m->n_kv_head + (size_t)kv_head;
}

static void carve_device(backend_steps *st, arena *a) {
    const model *m = st->s->m;
    size_t n = st->n, caches = units(st) * (size_t)st->n_tokens * (size_t)m->head_dim, size = dtype_size(st->s->type);
    st->ids = arena_take(a, n, sizeof *st->ids);
    st->bad = arena_take(a, (size_t)m->n_layer, sizeof *st->bad);
    st->gone = arena_take(a, units(st) * (size_t)st->n_tokens, sizeof *st->gone);
    st->x = arena_take(a, n * st->ld_x, sizeof(float));
    st->normed = arena_take(a, n * st->ld_x, sizeof(float));
    st->qkv = arena_take(a, n * st->ld_qkv, sizeof(float));
    st->mix = arena_take(a, n * st->ld_mix, sizeof(float));
    st->gate = arena_take(a, n * st->ld_ff, sizeof(float));
    st->up = arena_take(a, n * st->ld_ff, sizeof(float));
    st->ff = arena_take(a, n * st->ld_ff, size);
    st->angles = arena_take(a, n * (size_t)m->rope_dims, sizeof(float));
    st->logits = arena_take(a, n * st->ld_logits, sizeof(float));
    st->keys = arena_take(a, caches, sizeof(float));
    st->values = arena_take(a, caches, sizeof(float));
    size_t probs = st->any_rows ? (size_t)m->n_layer * n * (size_t)m->n_head * st->ld_rows : 0;
    st->probs = arena_take(a, probs, sizeof(float));
}

static void carve_host(backend_steps *st, const bool *wants_rows, mem_carver *c) {
    const model *m = st->s->m;
    st->host_ids = mem_carve(c, st->n, sizeof *st->host_ids);
    st->host_bad = mem_carve(c, (size_t)m->n_layer, sizeof *st->host_bad);
    st->host_gone = mem_carve(c, units(st) * (size_t)st->n_tokens, sizeof *st->host_gone);
    st->host_angles = mem_carve(c, st->n * (size_t)m->rope_dims, sizeof *st->host_angles);
    st->host_logits = mem_carve(c, st->n * st->ld_logits, sizeof *st->host_logits);
    st->rows = mem_carve(c, st->n, sizeof *st->rows);
    for (size_t i = 0; i < st->n; i++) {
        size_t size = wants_rows[i] ? (size_t)m->n_layer * (size_t)m->n_head * st->ld_rows : 0;
        float *rows = mem_carve(c, size, sizeof *rows);
        if (c->base) st->rows[i] = wants_rows[i] ? rows : NULL;
    }
}

static int allocate(backend_steps *st, const bool *wants_rows) {
    arena size = {0};
    mem_carver host_size = {0};
    carve_device(st, &size);
    carve_host(st, wants_rows, &host_size);
    device_at(st->s->d, "closed loop, %zu copies, %d tokens", st->n, st->n_tokens);
    TRY(device_new(st->s->d, size.used, "caches of all copies", &st->memory));
    TRY(device_pinned(st->s->d, host_size.used, "steps", &st->block));
    carve_device(st, &(arena){.base = st->memory});
    carve_host(st, wants_rows, &(mem_carver){.base = st->block});
    for (size_t i = 0; i < units(st) * (size_t)st->n_tokens; i++) st->host_gone[i] = INT32_MAX;
    return device_fill(st->s->d, STREAM_COMPUTE, st->bad, 0x7f, (size_t)st->s->m->n_layer * sizeof *st->bad);
}

int cuda_steps_new(backend_state *s, size_t n, const bool *wants_rows, int32_t n_tokens, backend_steps **out) {
    const model *m = s->m;
    size_t dim = (size_t)m->head_dim, heads = (size_t)m->n_head;
    backend_steps *st = mem_new(1, sizeof *st, "steps");
    *out = NULL;
    if (!st) return ERR_DATA;
    *st = (backend_steps){.s = s,
                          .n = n,
                          .n_tokens = n_tokens,
                          .ld_x = kernel_pad((size_t)m->n_embd),
                          .ld_qkv = kernel_pad((heads + 2 * (size_t)m->n_kv_head) * dim),
                          .ld_mix = kernel_pad(heads * dim),
                          .ld_ff = kernel_pad((size_t)m->n_ff),
                          .ld_logits = kernel_pad((size_t)m->n_vocab),
                          .ld_rows = kernel_pad((size_t)n_tokens)};
    for (size_t i = 0; i < n; i++) st->any_rows |= wants_rows[i];
    int code = allocate(st, wants_rows);
    if (code) cuda_steps_free(st);
    else *out = st;
    return code;
}

void cuda_steps_free(backend_steps *st) {
    if (!st) return;
    device_release(st->s->d, st->memory);
    device_unpin(st->s->d, st->block);
    mem_free(st);
}

void cuda_steps_forget(backend_steps *st, size_t copy, int layer, int kv_head, const int32_t *evict_at) {
    int32_t *gone = st->host_gone + unit_of(st, layer, copy, kv_head) * (size_t)st->n_tokens;
    for (int32_t i = 0; i < st->t; i++)
        if (evict_at[i] <= st->t) gone[i] = 0; /* t is the next step already */
}

/* ---- a step ----------------------------------------------------------------------------------------------------- */

static int multiply(const backend_steps *st, bool f32, const void *in, size_t ld_in, size_t inner, const void *w,
                    size_t cols, bool accumulate, float *out, size_t ld_out) {
    cuda_product p = {.rows = st->n,
                      .inner = inner,
                      .cols = cols,
                      .in = in,
                      .w = w,
                      .ld_in = ld_in,
                      .ld_out = ld_out,
                      .out = out,
                      .accumulate = accumulate};
    return f32 ? cuda_multiply_f32(st->s, &p) : cuda_multiply(st->s, &p);
}

static int attend(backend_steps *st, int layer, const cuda_layer *w) {
    const model *m = st->s->m;
    device *d = st->s->d;
    size_t unit = unit_of(st, layer, 0, 0), capacity = (size_t)st->n_tokens, at = unit * capacity * (size_t)m->head_dim;
    head_shape h = {.T = st->n,
                    .n_head = m->n_head,
                    .n_kv_head = m->n_kv_head,
                    .head_dim = m->head_dim,
                    .rope_dims = m->layer[layer].rope < 0 ? 0 : m->rope_dims,
                    .rope = m->rope_kind,
                    .ld = st->ld_qkv};
    step_shape s = {.copies = st->n,
                    .t = (size_t)st->t,
                    .capacity = capacity,
                    .n_head = m->n_head,
                    .n_kv_head = m->n_kv_head,
                    .head_dim = m->head_dim,
                    .window = m->window[layer],
                    .scale = m->scale,
                    .softcap = m->softcap};
    float *probs = st->any_rows ? st->probs + (size_t)layer * st->n * (size_t)m->n_head * st->ld_rows : NULL;
    TRY(k_heads_finish(d, &h, w->qkv_bias, st->angles, st->qkv));
    TRY(k_append(d, &s, st->qkv, st->ld_qkv, st->keys + at, st->values + at));
    return k_attention_step(d, &s, st->qkv, st->ld_qkv, st->keys + at, st->values + at, st->gone + unit * capacity,
                            st->mix, st->ld_mix, probs, st->ld_rows, st->bad + layer);
}

static int run_layer(backend_steps *st, int layer) {
    const model *m = st->s->m;
    device *d = st->s->d;
    size_t n_embd = (size_t)m->n_embd, dim = (size_t)m->head_dim, q = (size_t)m->n_head * dim, n_ff = (size_t)m->n_ff;
    cuda_layer w;
    TRY(cuda_layer_get(st->s, layer, (layer + 1) % m->n_layer, &w));
    TRY(k_norm(d, st->x, st->ld_x, w.attn_norm, st->n, n_embd, m->norm_eps, st->s->type, st->normed, st->ld_x));
    TRY(multiply(st, false, st->normed, st->ld_x, n_embd, w.qkv, q + 2 * (size_t)m->n_kv_head * dim, false, st->qkv,
                 st->ld_qkv));
    TRY(attend(st, layer, &w));
    TRY(multiply(st, true, st->mix, st->ld_mix, q, w.o, n_embd, true, st->x, st->ld_x));
    TRY(k_norm(d, st->x, st->ld_x, w.ffn_norm, st->n, n_embd, m->norm_eps, st->s->type, st->normed, st->ld_x));
    TRY(multiply(st, false, st->normed, st->ld_x, n_embd, w.gate, n_ff, false, st->gate, st->ld_ff));
    TRY(multiply(st, false, st->normed, st->ld_x, n_embd, w.up, n_ff, false, st->up, st->ld_ff));
    TRY(k_gate(d, st->gate, st->up, st->ld_ff, st->n, n_ff, st->s->type, st->ff, st->ld_ff));
    return multiply(st, false, st->ff, st->ld_ff, n_ff, w.down, n_embd, true, st->x, st->ld_x);
}

/* The token and its angles for every copy, and what the copies have forgotten. */
static int bring(backend_steps *st, int32_t token) {
    const model *m = st->s->m;
    device *d = st->s->d;
    size_t dims = (size_t)m->rope_dims;
    for (size_t i = 0; i < st->n; i++) {
        st->host_ids[i] = token;
        rows_rope_angles(st->t, m->rope_dims, m->rope[0].inverse, m->rope[0].scale, st->host_angles + i * dims);
    }
    TRY(device_to(d, STREAM_COMPUTE, st->ids, st->host_ids, st->n * sizeof *st->ids));
    TRY(device_to(d, STREAM_COMPUTE, st->angles, st->host_angles, st->n * dims * sizeof *st->angles));
    return device_to(d, STREAM_COMPUTE, st->gone, st->host_gone, units(st) * (size_t)st->n_tokens * sizeof *st->gone);
}

static int bring_back(backend_steps *st) {
    const model *m = st->s->m;
    device *d = st->s->d;
    size_t heads = (size_t)m->n_head, stride = st->ld_rows * sizeof(float), width = (size_t)(st->t + 1) * sizeof(float);
    for (int layer = 0; layer < m->n_layer && st->any_rows; layer++)
        for (size_t c = 0; c < st->n; c++)
            if (st->rows[c])
                TRY(device_from_rows(d, STREAM_COMPUTE, st->rows[c] + (size_t)layer * heads * st->ld_rows, stride,
                                     st->probs + ((size_t)layer * st->n + c) * heads * st->ld_rows, stride, width,
                                     heads));
    TRY(device_from(d, STREAM_COMPUTE, st->host_bad, st->bad, (size_t)m->n_layer * sizeof *st->bad));
    TRY(device_from(d, STREAM_COMPUTE, st->host_logits, st->logits, st->n * st->ld_logits * sizeof *st->logits));
    TRY(device_sync(d));
    for (int layer = 0; layer < m->n_layer; layer++)
        if (st->host_bad[layer] < (int32_t)(st->n * heads))
            return err_set(ERR_DATA, "non-finite logits at layer %d, token %d (attention head %d)", layer, st->t,
                           st->host_bad[layer] % m->n_head);
    return 0;
}

int cuda_steps_next(backend_steps *st, int32_t token, step_view *out) {
    const backend_state *s = st->s;
    const model *m = s->m;
    device_at(s->d, "closed loop, step %d, %zu copies", st->t, st->n);
    TRY(bring(st, token));
    TRY(cuda_embed(st->s, st->ids, st->n, st->x, st->ld_x));
    for (int layer = 0; layer < m->n_layer; layer++) TRY(run_layer(st, layer));
    TRY(k_norm(s->d, st->x, st->ld_x, cuda_output_norm(s), st->n, (size_t)m->n_embd, m->norm_eps, DTYPE_F32, st->normed,
               st->ld_x));
    TRY(cuda_logits(st->s, st->normed, st->ld_x, st->n, st->logits, st->ld_logits));
    TRY(bring_back(st));
    st->t++;
    *out = (step_view){st->host_logits, st->ld_logits, st->rows, st->ld_rows};
    return 0;
}
