#include "tracer/capture_grad.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/progress.h"

#include <string.h>

/* One sequence under way. Layers come last to first, the file wants them set by set from the first: what is packed is
 * kept until all are there. */
typedef struct pass {
    capture *c;
    size_t T, tiles, sets, n_layer, n_head;
    trace_chunk *chunk; /* [sets][n_layer][n_head][tiles] */
    float *scale;       /* [sets][n_layer][n_head][T] */
    int32_t *label;     /* [sets-1][T-1] */
    uint8_t *counted;   /* [T-1] */
    int layer;          /* current */
    const float *d_heads;
    size_t set_stride, stride;
    int set; /* current where the backend packs, with all heads' chunks */
    const uint8_t *bytes;
    void *block;
} pass;

static void carve(pass *p, mem_carver *c) {
    size_t heads = p->sets * p->n_layer * p->n_head;
    p->chunk = mem_carve(c, heads * p->tiles, sizeof *p->chunk);
    p->scale = mem_carve(c, heads * p->T, sizeof *p->scale);
    p->label = mem_carve(c, (p->sets - 1) * (p->T - 1), sizeof *p->label);
    p->counted = mem_carve(c, p->T - 1, sizeof *p->counted);
}

static int take_labels(void *context, const int32_t *label) {
    pass *p = context;
    memcpy(p->label, label, (p->sets - 1) * (p->T - 1) * sizeof *label);
    return 0;
}

static int pack_tile(void *context, size_t task, int worker) {
    (void)worker;
    pass *p = context;
    size_t tile = task % p->tiles, head = task / p->tiles % p->n_head, set = task / p->tiles / p->n_head;
    size_t row = tile * TRACE_TILE, n = p->T - row < TRACE_TILE ? p->T - row : TRACE_TILE;
    size_t index = (set * p->n_layer + (size_t)p->layer) * p->n_head + head;
    const float *values = p->d_heads + set * p->set_stride + row * p->stride + head * (size_t)p->c->model->head_dim;
    int code = trace_pack_grad(p->c->writer, values, n, p->stride, p->scale + index * p->T + row,
                               &p->chunk[index * p->tiles + tile]);
    return code ? err_prefix(code, "gradient of layer %d, head %zu, steps from %zu", p->layer, head, row) : 0;
}

static int take_layer(void *context, int layer, const float *d_heads, size_t set_stride, size_t stride) {
    pass *p = context;
    p->layer = layer;
    p->d_heads = d_heads;
    p->set_stride = set_stride;
    p->stride = stride;
    TRY(pool_run(p->c->pool, p->sets * p->n_head * p->tiles, pack_tile, p));
    progress_at(p->c->done += (double)(p->T * (1 + p->sets)));
    return 0;
}

/* A tile of one head of the current set. */
static int compress_tile(void *context, size_t task, int worker) {
    (void)worker;
    pass *p = context;
    size_t tile = task % p->tiles, head = task / p->tiles, row = tile * TRACE_TILE;
    size_t n = p->T - row < TRACE_TILE ? p->T - row : TRACE_TILE, height = p->T < TRACE_TILE ? p->T : TRACE_TILE;
    size_t index = ((size_t)p->set * p->n_layer + (size_t)p->layer) * p->n_head + head;
    const uint8_t *bytes = p->bytes + task * height * (size_t)p->c->model->head_dim * 2;
    int code =
        trace_pack_grad_half(p->c->writer, bytes, n, p->scale + index * p->T + row, &p->chunk[index * p->tiles + tile]);
    return code ? err_prefix(code, "gradient of layer %d, head %zu, steps from %zu", p->layer, head, row) : 0;
}

static int take_packed(void *context, int layer, int set, const uint8_t *bytes, const float *scale) {
    pass *p = context;
    size_t index = ((size_t)set * p->n_layer + (size_t)layer) * p->n_head;
    p->layer = layer;
    p->set = set;
    p->bytes = bytes;
    memcpy(p->scale + index * p->T, scale, p->n_head * p->T * sizeof *scale);
    TRY(pool_run(p->c->pool, p->n_head * p->tiles, compress_tile, p));
    progress_at(p->c->done += (double)(p->T * (set == 0 ? 2 : 1)));
    return 0;
}

static int put(pass *p) {
    trace_writer *w = p->c->writer;
    trace_chunk *chunk = p->chunk;
    const float *scale = p->scale;
    for (size_t i = 0; i < p->sets * p->n_layer * p->n_head; i++, scale += p->T) {
        int set = (int)(i / p->n_head / p->n_layer), layer = (int)(i / p->n_head % p->n_layer);
        int head = (int)(i % p->n_head);
        for (size_t tile = 0; tile < p->tiles; tile++) TRY(trace_put_grad(w, set, layer, head, (int)tile, chunk++));
        TRY(trace_write_grad_scale(w, set, layer, head, scale));
    }
    return p->sets > 1 ? trace_write_fisher_labels(w, p->label) : 0;
}

static int run(pass *p, const trace_sequence *s, const forward_sink *sink) {
    const capture *c = p->c;
    for (size_t t = 0; t + 1 < p->T; t++) p->counted[t] = (int32_t)t >= s->n_prompt && (!s->counted || s->counted[t]);
    const label_plan labels = {
        .counted = p->counted, .n_samples = c->plan.n_fisher, .seed = c->seed, .sequence = c->sequence};
    const gradient_sink gradients = {.context = p,
                                     .labels = take_labels,
                                     .layer = c->backend->packs ? NULL : take_layer,
                                     .packed = c->backend->packs ? take_packed : NULL};
    TRY(c->backend->forward_backward(c->state, s->tokens, s->n_tokens, NULL, sink, &labels, &gradients));
    return put(p);
}

int capture_gradients(capture *c, const trace_sequence *s, const forward_sink *sink) {
    size_t T = (size_t)s->n_tokens;
    pass p = {.c = c,
              .T = T,
              .tiles = (T + TRACE_TILE - 1) / TRACE_TILE,
              .sets = 1 + (size_t)c->plan.n_fisher,
              .n_layer = (size_t)c->model->n_layer,
              .n_head = (size_t)c->model->n_head};
    mem_carver size = {0};
    carve(&p, &size);
    p.block = mem_new(size.used, 1, "packed gradients");
    if (!p.block) return ERR_DATA;
    mem_carver place = {.base = p.block};
    carve(&p, &place);
    int code = run(&p, s, sink);
    /* After a failure some chunks are packed and not put. */
    for (size_t i = 0; i < p.sets * p.n_layer * p.n_head * p.tiles; i++) trace_chunk_free(&p.chunk[i]);
    mem_free(p.block);
    return code;
}
