#include "tracer/capture.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/progress.h"
#include "tracer/capture_grad.h"
#include "tracer/capture_tiles.h"
#include "traces/kernels.h"

#include <math.h>
#include <string.h>
#include <xxhash.h>

_Static_assert((int)BACKEND_ROW_TILE == (int)TRACE_TILE, "a backend's row tile is a chunk row of the trace");

/* One sequence under way. */
typedef struct pass {
    capture *c;
    const trace_sequence *s;
    size_t T, tiles;             /* tiles: row tiles of TRACE_TILE */
    trace_chunk *probs;          /* [n_head][tiles*(tiles+1)/2] packed, not yet put, of the current layer */
    size_t next_head, next_tile; /* the row tile that is put next */
    float *row_sum;              /* [n_head][T] */
    trace_chunk *heads;          /* [n_head + 2 n_kv_head][tiles] packed q, k, v of the current layer */
    capture_tiles packed;        /* in place of probs and heads where the backend packs */
    const layer_capture *layer;
    int layer_index;
    const float *logits; /* the current tile */
    size_t ld_logits;
    int32_t logits_row0;
    float *target_logprob, *entropy; /* [T], the last one unused */
    uint8_t *correct;                /* [T] */
    int32_t *topk_id;                /* [T][k], k = max(1, plan.topk) */
    float *topk_logprob;
    uint64_t *row_hash; /* [T] XXH3 of each row of logits, or of what the backend made of it */
    float **row;        /* [threads][pad(n_vocab)] */
    void *block;
} pass;

static size_t triangle(size_t tile) {
    return tile * (tile + 1) / 2;
}

static size_t heads_of_layer(const model *m) {
    return (size_t)m->n_head + 2 * (size_t)m->n_kv_head;
}

static size_t topk_of(const pass *p) {
    return p->c->plan.topk ? (size_t)p->c->plan.topk : 1;
}

/* Chunks that wait, of probabilities and of q, k and v. */
static size_t n_probs(const pass *p) {
    bool here = p->c->plan.dense && !p->c->backend->packs;
    return here ? (size_t)p->c->model->n_head * triangle(p->tiles) : 0;
}

static size_t n_heads(const pass *p) {
    return p->c->backend->packs ? 0 : heads_of_layer(p->c->model) * p->tiles;
}

static void carve(pass *p, mem_carver *c) {
    const model *m = p->c->model;
    size_t threads = (size_t)pool_threads(p->c->pool);
    p->probs = mem_carve(c, n_probs(p), sizeof *p->probs);
    p->row_sum = mem_carve(c, (size_t)m->n_head * p->T, sizeof *p->row_sum);
    p->heads = mem_carve(c, n_heads(p), sizeof *p->heads);
    p->target_logprob = mem_carve(c, p->T, sizeof *p->target_logprob);
    p->entropy = mem_carve(c, p->T, sizeof *p->entropy);
    p->correct = mem_carve(c, p->T, sizeof *p->correct);
    p->topk_id = mem_carve(c, p->T * topk_of(p), sizeof *p->topk_id);
    p->topk_logprob = mem_carve(c, p->T * topk_of(p), sizeof *p->topk_logprob);
    p->row_hash = mem_carve(c, p->T, sizeof *p->row_hash);
    p->row = mem_carve(c, threads, sizeof *p->row);
    for (size_t i = 0; i < threads; i++) {
        float *row = mem_carve(c, kernel_pad((size_t)m->n_vocab), sizeof *row);
        if (c->base) p->row[i] = row;
    }
}

/* ---- attention -------------------------------------------------------------------------------------------------- */

static int pack_rows(void *context, int layer, int head, int32_t row0, int32_t n, const float *values, size_t stride) {
    pass *p = context;
    size_t tile = (size_t)row0 / TRACE_TILE, end = (size_t)(row0 + n);
    trace_chunk *chunk = p->probs + (size_t)head * triangle(p->tiles) + triangle(tile);
    float *row_sum = p->row_sum + (size_t)head * p->T + row0;
    for (size_t col = 0; col < end; col += TRACE_TILE) {
        size_t cols = end - col < TRACE_TILE ? end - col : TRACE_TILE;
        int code = trace_pack(p->c->writer, TRACE_PROBS, values + col, (size_t)n, cols, stride, row_sum, chunk++);
        if (code) return err_prefix(code, "attention probabilities of layer %d, head %d", layer, head);
    }
    return 0;
}

/* Put what the batch packed: row tiles in order up to the first one that is not there yet. */
static int put_rows(void *context, int layer) {
    pass *p = context;
    size_t heads = (size_t)p->c->model->n_head;
    while (p->next_head < heads) {
        trace_chunk *chunk = p->probs + p->next_head * triangle(p->tiles) + triangle(p->next_tile);
        if (!chunk->data) return 0;
        for (size_t col = 0; col <= p->next_tile; col++)
            TRY(trace_put(p->c->writer, TRACE_PROBS, layer, (int)p->next_head, (int)p->next_tile, (int)col,
                          chunk + col));
        p->next_tile = (p->next_tile + 1) % p->tiles;
        p->next_head += p->next_tile == 0;
    }
    return 0;
}

/* Which array the h-th of q | k | v belongs to, and which head of it. */
static trace_array array_of(const model *m, size_t h, size_t *head) {
    size_t q = (size_t)m->n_head, kv = (size_t)m->n_kv_head;
    *head = h < q ? h : (h - q) % kv;
    return h < q ? TRACE_Q : h < q + kv ? TRACE_K : TRACE_V;
}

static int pack_head(void *context, size_t task, int worker) {
    (void)worker;
    pass *p = context;
    static const char *const name[] = {[TRACE_Q] = "q", [TRACE_K] = "k", [TRACE_V] = "v"};
    size_t head, row = task % p->tiles * TRACE_TILE, n = p->T - row < TRACE_TILE ? p->T - row : TRACE_TILE;
    trace_array array = array_of(p->c->model, task / p->tiles, &head);
    const layer_capture *l = p->layer;
    const float *values = array == TRACE_Q ? l->q : array == TRACE_K ? l->k : l->v;
    size_t dim = (size_t)p->c->model->head_dim;
    int code = trace_pack(p->c->writer, array, values + row * l->stride + head * dim, n, dim, l->stride, NULL,
                          &p->heads[task]);
    return code ? err_prefix(code, "%s of layer %d, head %zu", name[array], p->layer_index, head) : 0;
}

static int put_heads(pass *p) {
    size_t n = heads_of_layer(p->c->model) * p->tiles, head;
    TRY(pool_run(p->c->pool, n, pack_head, p));
    for (size_t i = 0; i < n; i++) {
        trace_array array = array_of(p->c->model, i / p->tiles, &head);
        TRY(trace_put(p->c->writer, array, p->layer_index, (int)head, (int)(i % p->tiles), 0, &p->heads[i]));
    }
    return 0;
}

static int take_tiles(void *context, trace_array array, int layer, size_t first, size_t n, const uint8_t *bytes) {
    pass *p = context;
    return capture_tiles_take(&p->packed, array, layer, first, n, bytes);
}

static int take_layer(void *context, int layer, const layer_capture *l) {
    pass *p = context;
    const trace_plan *plan = &p->c->plan;
    p->layer = l;
    p->layer_index = layer;
    if (plan->factored && !p->c->backend->packs) TRY(put_heads(p));
    for (int32_t h = 0; h < p->c->model->n_head; h++) {
        if (plan->lse) TRY(trace_write_lse(p->c->writer, layer, h, l->lse + (size_t)h * p->T));
        if (plan->row_sum) TRY(trace_write_row_sum(p->c->writer, layer, h, p->row_sum + (size_t)h * p->T));
    }
    memset(p->row_sum, 0, (size_t)p->c->model->n_head * p->T * sizeof *p->row_sum);
    p->next_head = 0;
    progress_at(p->c->done += (double)p->T);
    return 0;
}

/* ---- logits ----------------------------------------------------------------------------------------------------- */

/* The k largest of n values, largest first, ties to the lowest id: a list kept sorted, entered only by what beats its
 * last; whole blocks without such a value are passed over. */
static void top_k(const float *x, size_t n, size_t k, int32_t *id, float *value) {
    enum { BLOCK = 64 };
    size_t have = 0;
    for (size_t b = 0; b < n; b += BLOCK) {
        size_t end = b + BLOCK < n ? b + BLOCK : n;
        unsigned any = have < k;
        for (size_t i = b; i < end && have == k; i++) any |= x[i] > value[k - 1];
        for (size_t i = b; any && i < end; i++) {
            if (have == k && !(x[i] > value[k - 1])) continue;
            size_t at = have < k ? have++ : k - 1;
            for (; at && x[i] > value[at - 1]; at--) value[at] = value[at - 1], id[at] = id[at - 1];
            value[at] = x[i];
            id[at] = (int32_t)i;
        }
    }
}

static int logits_row(void *context, size_t task, int worker) {
    pass *p = context;
    size_t n_vocab = (size_t)p->c->model->n_vocab, t = (size_t)p->logits_row0 + task, k = topk_of(p);
    const float *x = p->logits + task * p->ld_logits;
    float *prob = p->row[worker], *top = p->topk_logprob + t * k;
    int32_t *id = p->topk_id + t * k;
    memcpy(prob, x, n_vocab * sizeof *prob);
    double lse = kernels()->softmax(prob, 0, n_vocab - 1, 0, NULL);
    if (isnan(lse))
        return err_set(ERR_DATA, "non-finite logits at layer %d (output), token %zu", p->c->model->n_layer, t);
    top_k(x, n_vocab, k, id, top);
    for (size_t i = 0; i < k; i++) top[i] = (float)((double)top[i] - lse);
    p->row_hash[t] = XXH3_64bits(x, n_vocab * sizeof *x);
    p->entropy[t] = (float)(lse - kernels()->dot(prob, x, n_vocab));
    if (t + 1 == p->T) return 0;
    int32_t next = p->s->tokens[t + 1];
    p->target_logprob[t] = (float)((double)x[next] - lse);
    p->correct[t] = id[0] == next;
    return 0;
}

static int take_logits(void *context, int32_t row0, int32_t n, float *logits, size_t stride) {
    pass *p = context;
    p->logits = logits;
    p->ld_logits = stride;
    p->logits_row0 = row0;
    TRY(pool_run(p->c->pool, (size_t)n, logits_row, p));
    for (int32_t r = 0; r < n && p->c->plan.full_logits; r++)
        TRY(trace_write_full_logits(p->c->writer, row0 + r, 1, logits + (size_t)r * stride));
    progress_at(p->c->done += (double)n);
    return 0;
}

/* The backend has made of its logits what is kept. */
static int take_stats(void *context, int32_t row0, int32_t n, const step_stats *s) {
    pass *p = context;
    size_t k = topk_of(p), bytes = sizeof(float), at = (size_t)row0, rows = (size_t)n;
    memcpy(p->target_logprob + at, s->target_logprob, rows * bytes);
    memcpy(p->entropy + at, s->entropy, rows * bytes);
    memcpy(p->correct + at, s->correct, rows);
    memcpy(p->topk_id + at * k, s->topk_id, rows * k * sizeof *s->topk_id);
    memcpy(p->topk_logprob + at * k, s->topk_logprob, rows * k * bytes);
    for (size_t t = at; t < at + rows; t++) {
        uint64_t hash = XXH3_64bits_withSeed(p->topk_id + t * k, k * sizeof *p->topk_id, t);
        hash = XXH3_64bits_withSeed(p->topk_logprob + t * k, k * bytes, hash);
        p->row_hash[t] = XXH3_64bits_withSeed(p->entropy + t, bytes, hash);
    }
    progress_at(p->c->done += (double)n);
    return 0;
}

/* ---- a sequence ------------------------------------------------------------------------------------------------- */

static void free_pass(pass *p) {
    /* After a failure some chunks are packed and not put. */
    for (size_t i = 0; i < n_probs(p); i++) trace_chunk_free(&p->probs[i]);
    for (size_t i = 0; i < n_heads(p); i++) trace_chunk_free(&p->heads[i]);
    capture_tiles_free(&p->packed);
    mem_free(p->block);
}

static forward_sink sink_of(pass *p) {
    const trace_plan *plan = &p->c->plan;
    if (!p->c->backend->packs)
        return (forward_sink){.context = p,
                              .rows = plan->dense ? pack_rows : NULL,
                              .rows_done = plan->dense ? put_rows : NULL,
                              .layer = take_layer,
                              .logits = take_logits};
    return (forward_sink){.context = p,
                          .tiles = take_tiles,
                          .wants_probs = plan->dense,
                          .wants_qkv = plan->factored,
                          .layer = take_layer,
                          .logits = plan->full_logits ? take_logits : NULL,
                          .stats = plan->full_logits ? NULL : take_stats,
                          .n_topk = (int32_t)topk_of(p)};
}

const char *capture_hashed(const capture *c) {
    return c->backend->packs && !c->plan.full_logits ? "predictions" : "logits";
}

static int run_pass(pass *p) {
    capture *c = p->c;
    forward_sink sink = sink_of(p);
    TRY(trace_write_sequence(c->writer, p->s, &c->plan));
    if (c->plan.grad_loss) TRY(capture_gradients(c, p->s, &sink));
    else TRY(c->backend->forward(c->state, p->s->tokens, p->s->n_tokens, NULL, &sink));
    c->sequence++;
    c->logits_hash = XXH3_64bits_withSeed(p->row_hash, p->T * sizeof *p->row_hash, c->logits_hash);
    return trace_write_logits(c->writer, p->target_logprob, p->correct, p->entropy, c->plan.topk ? p->topk_id : NULL,
                              c->plan.topk ? p->topk_logprob : NULL);
}

int capture_sequence(capture *c, const trace_sequence *s) {
    size_t T = (size_t)s->n_tokens;
    pass p = {.c = c, .s = s, .T = T, .tiles = (T + TRACE_TILE - 1) / TRACE_TILE};
    mem_carver size = {0};
    carve(&p, &size);
    p.block = mem_new(size.used, 1, "capture");
    if (!p.block) return ERR_DATA;
    mem_carver place = {.base = p.block};
    carve(&p, &place);
    p.packed = (capture_tiles){.c = c, .T = T, .row_sum = c->plan.row_sum ? p.row_sum : NULL};
    int code = run_pass(&p);
    free_pass(&p);
    return code;
}

/* In layers of a forward pass. On the way back a layer costs one to compute it again and one for each label set. */
double capture_work(const model *m, const trace_plan *plan, int32_t n) {
    int32_t back = plan->grad_loss ? m->n_layer * (2 + plan->n_fisher) : 0;
    return (double)n * (m->n_layer + 1 + back);
}

int capture_wo(const capture *c) {
    const model *m = c->model;
    size_t n_embd = (size_t)m->n_embd, inputs = (size_t)m->n_head * (size_t)m->head_dim;
    float *w = mem_new(2 * n_embd * inputs, sizeof *w, "model/wo");
    if (!w) return ERR_DATA;
    float *turned = w + n_embd * inputs;
    int code = 0;
    for (int32_t layer = 0; layer < m->n_layer && !code; layer++) {
        code = model_read(&m->layer[layer].weight[SLOT_O], inputs, 0, n_embd, w);
        for (size_t e = 0; e < n_embd && !code; e++)
            for (size_t i = 0; i < inputs; i++) turned[i * n_embd + e] = w[e * inputs + i];
        if (!code) code = trace_write_wo(c->writer, layer, turned);
    }
    mem_free(w);
    return code;
}
