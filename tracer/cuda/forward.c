#include "tracer/cuda/forward.h"
#include "base/err.h"
#include "base/mem.h"
#include "tracer/cpu/rows.h"
#include "traces/kernels.h"

#include <string.h>

enum { FF_ROWS = 4096, LOGIT_ROWS = 1024, TILES_BYTES = 64 << 20 };
#define LOGIT_BYTES ((size_t)512 << 20)
#define SENT_LOGIT_BYTES ((size_t)64 << 20)

static size_t triangle(size_t n) {
    return n * (n + 1) / 2;
}

/* ---- shapes ----------------------------------------------------------------------------------------------------- */

attention_shape cuda_attention_shape(const cuda_run *r) {
    const model *m = r->s->m;
    size_t unit = (size_t)m->n_kv_head * kernel_pad(r->T);
    return (attention_shape){.T = r->T,
                             .n_head = m->n_head,
                             .n_kv_head = m->n_kv_head,
                             .head_dim = m->head_dim,
                             .scale = m->scale,
                             .softcap = m->softcap,
                             .window = m->window[r->layer],
                             .evict_at = r->evict_at ? r->evict_at + (size_t)r->layer * unit : NULL,
                             .qkv = r->qkv,
                             .ld = r->ld_qkv};
}

head_shape cuda_head_shape(const cuda_run *r) {
    const model *m = r->s->m;
    return (head_shape){.T = r->T,
                        .n_head = m->n_head,
                        .n_kv_head = m->n_kv_head,
                        .head_dim = m->head_dim,
                        .rope_dims = m->layer[r->layer].rope < 0 ? 0 : m->rope_dims,
                        .rope = m->rope_kind,
                        .ld = r->ld_qkv};
}

static void set_shape(cuda_run *r) {
    const model *m = r->s->m;
    size_t dim = (size_t)m->head_dim, heads = (size_t)m->n_head;
    r->ld_x = kernel_pad((size_t)m->n_embd);
    r->ld_qkv = kernel_pad((heads + 2 * (size_t)m->n_kv_head) * dim);
    r->ld_mix = kernel_pad(heads * dim);
    r->ld_ff = kernel_pad((size_t)m->n_ff);
    r->ld_logits = kernel_pad((size_t)m->n_vocab);
    r->edge = least(r->T, TRACE_TILE);
    r->row_tiles = (r->T + r->edge - 1) / r->edge;
    r->ff_rows = least(r->T, FF_ROWS);
    size_t most = (r->sink->logits ? SENT_LOGIT_BYTES : LOGIT_BYTES) / (r->ld_logits * sizeof(float));
    r->logit_rows = least(least(r->T, LOGIT_ROWS), most ? most : 1);
}

static void carve(cuda_run *r, arena *a, bool masked) {
    const model *m = r->s->m;
    size_t size = dtype_size(r->s->type), T = r->T, rows = r->logit_rows, k = (size_t)r->stats.k;
    r->ids = arena_take(a, T, sizeof *r->ids);
    r->target = arena_take(a, T, sizeof *r->target);
    size_t lifetimes = (size_t)m->n_layer * (size_t)m->n_kv_head * kernel_pad(T);
    r->evict_at = masked ? arena_take(a, lifetimes, sizeof *r->evict_at) : NULL;
    r->bad = arena_take(a, (size_t)m->n_layer + 1, sizeof *r->bad);
    r->x = arena_take(a, T * r->ld_x, sizeof(float));
    r->normed = arena_take(a, T * r->ld_x, sizeof(float));
    r->qkv = arena_take(a, T * r->ld_qkv, sizeof(float));
    r->mix = arena_take(a, T * r->ld_mix, sizeof(float));
    r->lse = arena_take(a, (size_t)m->n_head * T, sizeof(float));
    r->gate = arena_take(a, r->ff_rows * r->ld_ff, sizeof(float));
    r->up = arena_take(a, r->ff_rows * r->ld_ff, sizeof(float));
    r->ff = arena_take(a, r->ff_rows * r->ld_ff, size);
    r->angles = arena_take(a, T * (size_t)m->rope_dims, sizeof(float));
    r->logits = arena_take(a, rows * r->ld_logits, sizeof(float));
    r->stats.target_logprob = arena_take(a, rows, sizeof(float));
    r->stats.correct = arena_take(a, rows, 1);
    r->stats.entropy = arena_take(a, rows, sizeof(float));
    r->stats.topk_id = arena_take(a, rows * k, sizeof(int32_t));
    r->stats.topk_logprob = arena_take(a, rows * k, sizeof(float));
    r->logit_lse = r->stats.lse = arena_take(a, rows, sizeof(float));
}

/* ---- results arriving on the host ------------------------------------------------------------------------------- */

static size_t tile_bytes(const cuda_run *r, int array) {
    size_t width = array == TRACE_PROBS ? r->edge : (size_t)r->s->m->head_dim;
    return r->edge * width * 2;
}

static int not_finite(const cuda_run *r, int layer, int32_t bad) {
    int heads = r->s->m->n_head;
    if (bad == CUDA_FINE) return 0;
    if (layer == r->s->m->n_layer)
        return err_set(ERR_DATA, "non-finite logits at layer %d (output), token %d", layer, bad);
    return err_set(ERR_DATA, "non-finite logits at layer %d, token %d (attention head %d)", layer, bad / heads,
                   bad % heads);
}

/* The parts of a packet of statistics, one behind the other. */
static size_t stats_parts(const cuda_run *r, size_t n, size_t offset[5]) {
    size_t k = (size_t)r->stats.k, size[5] = {4 * n, 4 * n, 4 * n * k, 4 * n * k, n}, at = 256; /* bad comes first */
    for (int i = 0; i < 5; i++) {
        offset[i] = at;
        at += (size[i] + 255) / 256 * 256;
    }
    return at;
}

static int take_stats(const cuda_run *r, const pipe_note *note, const uint8_t *bytes) {
    size_t offset[5];
    stats_parts(r, note->n, offset);
    step_stats stats = {.target_logprob = (const float *)(bytes + offset[0]),
                        .entropy = (const float *)(bytes + offset[1]),
                        .topk_id = (const int32_t *)(bytes + offset[2]),
                        .topk_logprob = (const float *)(bytes + offset[3]),
                        .correct = bytes + offset[4]};
    TRY(not_finite(r, r->s->m->n_layer, *(const int32_t *)bytes));
    return r->sink->stats(r->sink->context, (int32_t)note->first, (int32_t)note->n, &stats);
}

static int take_gradients(const cuda_run *r, const pipe_note *note, const uint8_t *bytes) {
    size_t scales = (size_t)r->s->m->n_head * r->T * sizeof(float);
    const gradient_sink *g = r->gradients;
    return g->packed(g->context, note->layer, note->set, bytes + (scales + 255) / 256 * 256, (const float *)bytes);
}

static int take_packet(void *context, const pipe_note *note, const uint8_t *bytes) {
    const cuda_run *r = context;
    const forward_sink *sink = r->sink;
    layer_capture layer = {.lse = (const float *)bytes};
    switch (note->kind) {
    case PACKET_CHECK:
        return not_finite(r, note->layer, *(const int32_t *)bytes);
    case PACKET_LSE:
        return sink->layer(sink->context, note->layer, &layer);
    case PACKET_TILES:
        return sink->tiles(sink->context, (trace_array)note->set, note->layer, note->first, note->n, bytes);
    case PACKET_STATS:
        return take_stats(r, note, bytes);
    case PACKET_GRADIENTS:
        return take_gradients(r, note, bytes);
    default: /* the sink may write over logits: pinned memory is as good as any */
        return sink->logits(sink->context, (int32_t)note->first, (int32_t)note->n, (float *)(uintptr_t)bytes,
                            r->ld_logits);
    }
}

/* A slot for packets of many parts: TILES_BYTES, but no more than all of them take, and at least one. */
static size_t slot_for(size_t part, size_t n) {
    return least(part * n, TILES_BYTES > part ? TILES_BYTES : part);
}

/* The largest packet of the run; 0: none is sent. */
static size_t largest_packet(const cuda_run *r) {
    const forward_sink *sink = r->sink;
    const model *m = r->s->m;
    size_t heads = (size_t)m->n_head, head = r->row_tiles * tile_bytes(r, TRACE_Q), n[6] = {0}, most = 0, part[5];
    size_t scales = (heads * r->T * sizeof(float) + 255) / 256 * 256;
    if (sink->layer) n[0] = scales;
    if (sink->tiles && sink->wants_probs) n[1] = slot_for(tile_bytes(r, TRACE_PROBS), heads * triangle(r->row_tiles));
    if (sink->tiles && sink->wants_qkv) n[2] = slot_for(head, heads);
    if (sink->logits) n[3] = r->logit_rows * r->ld_logits * sizeof(float);
    if (sink->stats) n[4] = stats_parts(r, r->logit_rows, part);
    if (r->gradients) n[5] = scales + heads * head;
    for (int i = 0; i < 6; i++) most = n[i] > most ? n[i] : most;
    return most;
}

/* ---- a run ------------------------------------------------------------------------------------------------------ */

static int upload(cuda_run *r, const int32_t *evict_at) {
    const model *m = r->s->m;
    size_t dims = (size_t)m->rope_dims, T = r->T;
    size_t lifetimes = (size_t)m->n_layer * (size_t)m->n_kv_head * kernel_pad(T);
    float *angles = mem_new(T * dims, sizeof *angles, "angles");
    int32_t *target = mem_new(T, sizeof *target, "targets");
    int code = angles && target ? 0 : ERR_DATA;
    for (size_t t = 0; t < T && !code; t++) {
        rows_rope_angles((int32_t)t, m->rope_dims, m->rope[0].inverse, m->rope[0].scale, angles + t * dims);
        target[t] = t + 1 < T ? r->tokens[t + 1] : -1;
    }
    if (!code) code = device_to(r->s->d, STREAM_COMPUTE, r->angles, angles, T * dims * sizeof *angles);
    if (!code) code = device_to(r->s->d, STREAM_COMPUTE, r->target, target, T * sizeof *target);
    if (!code) code = device_to(r->s->d, STREAM_COMPUTE, r->ids, r->tokens, T * sizeof *r->ids);
    if (!code && evict_at)
        code = device_to(r->s->d, STREAM_COMPUTE, r->evict_at, evict_at, lifetimes * sizeof *evict_at);
    if (!code) code = device_fill(r->s->d, STREAM_COMPUTE, r->bad, 0x7f, ((size_t)m->n_layer + 1) * sizeof *r->bad);
    if (!code) code = device_sync(r->s->d); /* the host's copies go */
    mem_free(angles);
    mem_free(target);
    return code;
}

int cuda_run_new(backend_state *s, const int32_t *tokens, int32_t n, const int32_t *evict_at, const forward_sink *sink,
                 const gradient_sink *gradients, cuda_run *r) {
    *r = (cuda_run){.s = s, .tokens = tokens, .T = (size_t)n, .sink = sink, .gradients = gradients};
    r->stats.k = sink->stats ? sink->n_topk : 1;
    set_shape(r);
    arena size = {0};
    carve(r, &size, evict_at);
    void *memory;
    device_at(s->d, "activations of %d tokens", n);
    TRY(device_new(s->d, size.used, "activations", &memory));
    r->memory.base = memory;
    arena place = r->memory;
    carve(r, &place, evict_at);
    size_t packet = largest_packet(r);
    if (packet) TRY(pipe_new(s->d, packet, take_packet, r, &r->pipe));
    return upload(r, evict_at);
}

void cuda_run_free(cuda_run *r) {
    pipe_free(r->pipe);
    device_release(r->s->d, r->memory.base);
    *r = (cuda_run){0};
}

int cuda_check(cuda_run *r) {
    int32_t n = r->s->m->n_layer + 1;
    int32_t *bad = mem_new((size_t)n, sizeof *bad, "checks");
    if (!bad) return ERR_DATA;
    int code = device_from(r->s->d, STREAM_COMPUTE, bad, r->bad, (size_t)n * sizeof *bad);
    if (!code) code = device_sync(r->s->d);
    for (int32_t i = 0; i < n && !code; i++) code = not_finite(r, i, bad[i]);
    mem_free(bad);
    return code;
}

/* ---- a layer ---------------------------------------------------------------------------------------------------- */

int cuda_embed_tokens(cuda_run *r) {
    return cuda_embed(r->s, r->ids, r->T, r->x, r->ld_x);
}

int cuda_attend(cuda_run *r) {
    const model *m = r->s->m;
    attention_shape a = cuda_attention_shape(r);
    head_shape h = cuda_head_shape(r);
    cuda_product qkv = {.rows = r->T,
                        .inner = (size_t)m->n_embd,
                        .cols = (size_t)(m->n_head + 2 * m->n_kv_head) * (size_t)m->head_dim,
                        .in = r->normed,
                        .ld_in = r->ld_x,
                        .w = r->w.qkv,
                        .out = r->qkv,
                        .ld_out = r->ld_qkv};
    TRY(k_norm(r->s->d, r->x, r->ld_x, r->w.attn_norm, r->T, (size_t)m->n_embd, m->norm_eps, r->s->type, r->normed,
               r->ld_x));
    TRY(cuda_multiply(r->s, &qkv));
    TRY(k_heads_finish(r->s->d, &h, r->w.qkv_bias, r->angles, r->qkv));
    return k_attention(r->s->d, &a, r->mix, r->ld_mix, r->lse, r->bad + r->layer);
}

int cuda_add_mix(cuda_run *r, float *out) {
    const model *m = r->s->m;
    cuda_product p = {.rows = r->T,
                      .inner = (size_t)m->n_head * (size_t)m->head_dim,
                      .cols = (size_t)m->n_embd,
                      .in = r->mix,
                      .ld_in = r->ld_mix,
                      .w = r->w.o,
                      .out = out,
                      .ld_out = r->ld_x,
                      .accumulate = true};
    return cuda_multiply_f32(r->s, &p);
}

int cuda_gate_up(cuda_run *r, const float *x, size_t row0, size_t n) {
    const model *m = r->s->m;
    TRY(k_norm(r->s->d, x + row0 * r->ld_x, r->ld_x, r->w.ffn_norm, n, (size_t)m->n_embd, m->norm_eps, r->s->type,
               r->normed, r->ld_x));
    cuda_product p = {.rows = n,
                      .inner = (size_t)m->n_embd,
                      .cols = (size_t)m->n_ff,
                      .in = r->normed,
                      .ld_in = r->ld_x,
                      .w = r->w.gate,
                      .out = r->gate,
                      .ld_out = r->ld_ff};
    TRY(cuda_multiply(r->s, &p));
    p.w = r->w.up;
    p.out = r->up;
    return cuda_multiply(r->s, &p);
}

int cuda_feed_forward(cuda_run *r) {
    const model *m = r->s->m;
    for (size_t row = 0; row < r->T; row += r->ff_rows) {
        size_t n = least(r->ff_rows, r->T - row);
        cuda_product down = {.rows = n,
                             .inner = (size_t)m->n_ff,
                             .cols = (size_t)m->n_embd,
                             .in = r->ff,
                             .ld_in = r->ld_ff,
                             .w = r->w.down,
                             .out = r->x + row * r->ld_x,
                             .ld_out = r->ld_x,
                             .accumulate = true};
        TRY(cuda_gate_up(r, r->x, row, n));
        TRY(k_gate(r->s->d, r->gate, r->up, r->ld_ff, n, (size_t)m->n_ff, r->s->type, r->ff, r->ld_ff));
        TRY(cuda_multiply(r->s, &down));
    }
    return 0;
}

/* ---- results leaving the device ---------------------------------------------------------------------------------- */

static int send(cuda_run *r, pipe_note note, const void *from, size_t bytes) {
    void *room;
    TRY(pipe_room(r->pipe, &room));
    TRY(device_copy(r->s->d, STREAM_COMPUTE, room, from, bytes));
    return pipe_send(r->pipe, bytes, &note);
}

static int send_probs(cuda_run *r) {
    attention_shape a = cuda_attention_shape(r);
    size_t total = (size_t)r->s->m->n_head * triangle(r->row_tiles), size = tile_bytes(r, TRACE_PROBS);
    size_t batch = pipe_slot_bytes(r->pipe) / size;
    for (size_t first = 0; first < total; first += batch) {
        size_t n = least(batch, total - first);
        void *room;
        TRY(pipe_room(r->pipe, &room));
        TRY(device_busy_begin(r->s->d, STREAM_COMPUTE));
        TRY(k_attention_tiles(r->s->d, &a, r->lse, first, n, room));
        TRY(device_busy_end(r->s->d, STREAM_COMPUTE));
        TRY(pipe_send(
            r->pipe, n * size,
            &(pipe_note){.kind = PACKET_TILES, .set = TRACE_PROBS, .layer = r->layer, .first = first, .n = n}));
    }
    return 0;
}

/* One array's heads, as many at a time as fit. */
static int send_heads(cuda_run *r, trace_array array, int head0, int heads) {
    head_shape h = cuda_head_shape(r);
    size_t each = r->row_tiles * tile_bytes(r, array);
    int batch = (int)least(pipe_slot_bytes(r->pipe) / each, (size_t)heads);
    for (int head = 0; head < heads; head += batch) {
        int n = heads - head < batch ? heads - head : batch;
        pipe_note note = {.kind = PACKET_TILES,
                          .set = (int)array,
                          .layer = r->layer,
                          .first = (size_t)head * r->row_tiles,
                          .n = (size_t)n * r->row_tiles};
        void *room;
        TRY(pipe_room(r->pipe, &room));
        TRY(k_pack_heads(r->s->d, &h, r->qkv, head0 + head, n, room));
        TRY(pipe_send(r->pipe, (size_t)n * each, &note));
    }
    return 0;
}

static int send_layer(cuda_run *r) {
    const model *m = r->s->m;
    const forward_sink *sink = r->sink;
    bool tiles = sink->tiles && (sink->wants_probs || sink->wants_qkv);
    if (tiles) TRY(send(r, (pipe_note){.kind = PACKET_CHECK, .layer = r->layer}, r->bad + r->layer, sizeof *r->bad));
    if (tiles && sink->wants_probs) TRY(send_probs(r));
    if (tiles && sink->wants_qkv) {
        TRY(send_heads(r, TRACE_Q, 0, m->n_head));
        TRY(send_heads(r, TRACE_K, m->n_head, m->n_kv_head));
        TRY(send_heads(r, TRACE_V, m->n_head + m->n_kv_head, m->n_kv_head));
    }
    if (!sink->layer) return 0;
    return send(r, (pipe_note){.kind = PACKET_LSE, .layer = r->layer}, r->lse,
                (size_t)m->n_head * r->T * sizeof *r->lse);
}

int cuda_run_layer(cuda_run *r, int layer, int next) {
    device *d = r->s->d;
    r->layer = layer;
    device_at(d, "layer %d, %zu tokens", layer, r->T);
    TRY(device_busy_begin(d, STREAM_COMPUTE));
    TRY(cuda_layer_get(r->s, layer, next, &r->w));
    TRY(cuda_attend(r));
    TRY(device_busy_end(d, STREAM_COMPUTE));
    TRY(send_layer(r));
    TRY(device_busy_begin(d, STREAM_COMPUTE));
    TRY(cuda_add_mix(r, r->x));
    TRY(cuda_feed_forward(r));
    return device_busy_end(d, STREAM_COMPUTE);
}

/* ---- logits ----------------------------------------------------------------------------------------------------- */

int cuda_hidden(cuda_run *r) {
    const model *m = r->s->m;
    const forward_sink *sink = r->sink;
    device_at(r->s->d, "logits, %zu tokens", r->T);
    TRY(k_norm(r->s->d, r->x, r->ld_x, cuda_output_norm(r->s), r->T, (size_t)m->n_embd, m->norm_eps, DTYPE_F32,
               r->normed, r->ld_x));
    if (!sink->hidden) return 0;
    float *hidden = mem_new(r->T * r->ld_x, sizeof *hidden, "hidden states");
    if (!hidden) return ERR_DATA;
    int code = device_from(r->s->d, STREAM_COMPUTE, hidden, r->normed, r->T * r->ld_x * sizeof *hidden);
    if (!code) code = device_sync(r->s->d);
    if (!code) code = sink->hidden(sink->context, hidden, r->ld_x);
    mem_free(hidden);
    return code;
}

static int send_stats(cuda_run *r, size_t row, size_t n) {
    device *d = r->s->d;
    size_t offset[5], bytes = stats_parts(r, n, offset), k = (size_t)r->stats.k;
    const void *from[5] = {r->stats.target_logprob, r->stats.entropy, r->stats.topk_id, r->stats.topk_logprob,
                           r->stats.correct};
    size_t size[5] = {4 * n, 4 * n, 4 * n * k, 4 * n * k, n};
    void *room;
    TRY(pipe_room(r->pipe, &room));
    TRY(device_copy(d, STREAM_COMPUTE, room, r->bad + r->s->m->n_layer, sizeof *r->bad));
    for (int i = 0; i < 5; i++) TRY(device_copy(d, STREAM_COMPUTE, (char *)room + offset[i], from[i], size[i]));
    return pipe_send(r->pipe, bytes, &(pipe_note){.kind = PACKET_STATS, .first = row, .n = n});
}

int cuda_logits_tile(cuda_run *r, size_t row, size_t n) {
    device *d = r->s->d;
    const float *hidden = (const float *)r->normed + row * r->ld_x;
    TRY(device_busy_begin(d, STREAM_COMPUTE));
    TRY(cuda_logits(r->s, hidden, r->ld_x, n, r->logits, r->ld_logits));
    r->stats.row0 = (int32_t)row;
    if (r->sink->stats || r->gradients)
        TRY(k_vocab_stats(d, r->logits, r->ld_logits, n, (size_t)r->s->m->n_vocab, r->target + row, &r->stats,
                          r->bad + r->s->m->n_layer));
    TRY(device_busy_end(d, STREAM_COMPUTE));
    if (r->sink->stats) TRY(send_stats(r, row, n));
    if (!r->sink->logits) return 0;
    return send(r, (pipe_note){.kind = PACKET_LOGITS, .first = row, .n = n}, r->logits,
                n * r->ld_logits * sizeof *r->logits);
}

static int run_pass(cuda_run *r) {
    int n_layer = r->s->m->n_layer;
    const forward_sink *sink = r->sink;
    TRY(cuda_embed_tokens(r));
    for (int layer = 0; layer < n_layer; layer++) TRY(cuda_run_layer(r, layer, layer + 1 < n_layer ? layer + 1 : -1));
    if (sink->hidden || sink->logits || sink->stats) TRY(cuda_hidden(r));
    for (size_t row = 0; row < r->T && (sink->logits || sink->stats); row += r->logit_rows)
        TRY(cuda_logits_tile(r, row, least(r->logit_rows, r->T - row)));
    if (r->pipe) TRY(pipe_drain(r->pipe));
    return cuda_check(r);
}

int cuda_forward(backend_state *s, const int32_t *tokens, int32_t n, const int32_t *evict_at,
                 const forward_sink *sink) {
    cuda_run r;
    int code = cuda_run_new(s, tokens, n, evict_at, sink, NULL, &r);
    if (!code) code = run_pass(&r);
    cuda_run_free(&r);
    return code;
}

int cuda_project(backend_state *s, const float *hidden, size_t n, size_t stride, float *out, size_t stride_out) {
    size_t ld_logits = kernel_pad((size_t)s->m->n_vocab), values = n ? (n - 1) * stride + (size_t)s->m->n_embd : 0;
    arena a = {0};
    void *memory;
    device_at(s->d, "logits of %zu rows", n);
    TRY(device_new(s->d, n * (stride + ld_logits) * sizeof(float) + 512, "logits", &memory));
    a.base = memory;
    float *in = arena_take(&a, n * stride, sizeof *in), *logits = arena_take(&a, n * ld_logits, sizeof *logits);
    int code = device_to(s->d, STREAM_COMPUTE, in, hidden, values * sizeof *in);
    if (!code) code = cuda_logits(s, in, stride, n, logits, ld_logits);
    if (!code)
        code = device_from_rows(s->d, STREAM_COMPUTE, out, stride_out * sizeof *out, logits, ld_logits * sizeof *out,
                                (size_t)s->m->n_vocab * sizeof *out, n);
    if (!code) code = device_sync(s->d);
    device_release(s->d, memory);
    return code;
}
