#include "traces/synthetic.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/progress.h"
#include "traces/kernels.h"

#include <math.h>
#include <string.h>

enum { BATCH = 64 /* packed tiles that wait to be put */ };

typedef struct job {
    const synthetic *s;
    pool *p;
    trace_writer *w;
    size_t T, dim, tiles; /* tiles: row tiles of TRACE_TILE */
    int layer, set;       /* being written; set: of gradients */
    trace_array array;
    size_t first; /* tile of the batch */
    int head;     /* whose rows are being written */
    double done;
    float *background;   /* [n_head][T] of the layer */
    float *scale;        /* [n_head][T] of the layer's gradients */
    float *tile;         /* [threads][TRACE_TILE][dim] */
    trace_chunk *chunk;  /* [BATCH], with rows at least [tiles*(tiles+1)/2] */
    float *key, *packed; /* [T][dim], [pad(T)][dim] a kv head's keys as they are stored; with rows */
    float *rows;         /* [threads][TRACE_TILE][pad(T)] */
    float *lse, *sum;    /* [T] of a head */
    /* Single numbers a token. */
    int32_t *token, *label; /* [T], [n_fisher][T-1] */
    float *logprob, *entropy;
    uint8_t *correct;
    void *block;
} job;

static size_t triangle(size_t tile) {
    return tile * (tile + 1) / 2;
}

static size_t chunks_waiting(const job *j) {
    size_t rows = j->s->plan.dense ? triangle(j->tiles) : 0;
    return rows > BATCH ? rows : BATCH;
}

static void carve(job *j, mem_carver *c) {
    size_t threads = (size_t)pool_threads(j->p), heads = (size_t)j->s->shape.n_head, T = j->T, dim = j->dim;
    size_t dense = j->s->plan.dense, padded = kernel_pad(T);
    j->chunk = mem_carve(c, chunks_waiting(j), sizeof *j->chunk);
    j->background = mem_carve(c, heads * T, sizeof *j->background);
    j->scale = mem_carve(c, j->s->plan.grad_loss ? heads * T : 0, sizeof *j->scale);
    j->tile = mem_carve(c, threads * TRACE_TILE * dim, sizeof *j->tile);
    j->key = mem_carve(c, dense * T * dim, sizeof *j->key);
    j->packed = mem_carve(c, dense * padded * dim, sizeof *j->packed);
    j->rows = mem_carve(c, dense * threads * TRACE_TILE * padded, sizeof *j->rows);
    j->lse = mem_carve(c, dense * T, sizeof *j->lse);
    j->sum = mem_carve(c, dense * T, sizeof *j->sum);
    j->token = mem_carve(c, T, sizeof *j->token);
    j->label = mem_carve(c, (size_t)j->s->plan.n_fisher * (T - 1), sizeof *j->label);
    j->logprob = mem_carve(c, T, sizeof *j->logprob);
    j->entropy = mem_carve(c, T, sizeof *j->entropy);
    j->correct = mem_carve(c, T, sizeof *j->correct);
}

static int32_t rows_of_tile(const job *j, size_t tile) {
    size_t left = j->T - tile * TRACE_TILE;
    return (int32_t)(left < TRACE_TILE ? left : TRACE_TILE);
}

static float *tile_of(const job *j, int worker) {
    return j->tile + (size_t)worker * TRACE_TILE * j->dim;
}

static void advance(job *j, size_t tiles) {
    progress_at(j->done += (double)tiles);
}

/* ---- q, k, v ---------------------------------------------------------------------------------------------------- */

static int background_task(void *context, size_t head, int worker) {
    (void)worker;
    job *j = context;
    synthetic_background(&j->s->shape, j->layer, (int)head, j->s->n_tokens, j->background + head * j->T);
    return 0;
}

static void fill(const job *j, trace_array array, int head, size_t tile, float *out) {
    const synthetic_shape *s = &j->s->shape;
    int32_t row0 = (int32_t)(tile * TRACE_TILE), n = rows_of_tile(j, tile);
    if (array == TRACE_Q) synthetic_query(s, j->layer, head, j->background + (size_t)head * j->T, row0, n, out);
    else if (array == TRACE_K) synthetic_key(s, j->layer, head, row0, n, out);
    else synthetic_value(s, j->layer, head, row0, n, out);
}

static int pack_task(void *context, size_t task, int worker) {
    job *j = context;
    size_t index = j->first + task, tile = index % j->tiles;
    float *values = tile_of(j, worker);
    fill(j, j->array, (int)(index / j->tiles), tile, values);
    return trace_pack(j->w, j->array, values, (size_t)rows_of_tile(j, tile), j->dim, j->dim, NULL, &j->chunk[task]);
}

static int write_array(job *j, trace_array array) {
    const synthetic_shape *s = &j->s->shape;
    size_t n = (size_t)(array == TRACE_Q ? s->n_head : s->n_kv_head) * j->tiles;
    j->array = array;
    for (j->first = 0; j->first < n; j->first += BATCH) {
        size_t batch = n - j->first < BATCH ? n - j->first : BATCH;
        TRY(pool_run(j->p, batch, pack_task, j));
        for (size_t i = 0; i < batch; i++)
            TRY(trace_put(j->w, array, j->layer, (int)((j->first + i) / j->tiles), (int)((j->first + i) % j->tiles), 0,
                          &j->chunk[i]));
        advance(j, batch);
    }
    return 0;
}

/* ---- rows ------------------------------------------------------------------------------------------------------- */

/* Rows are those of q and k as f16 keeps them, so that both forms of a trace agree. */
static void round_to_half(float *x, size_t n) {
    for (size_t i = 0; i < n; i++) x[i] = half_to_f32(half_from_f32(x[i]));
}

static int rows_task(void *context, size_t tile, int worker) {
    job *j = context;
    size_t row0 = tile * TRACE_TILE, n = (size_t)rows_of_tile(j, tile), stride = kernel_pad(j->T);
    float *q = tile_of(j, worker), *rows = j->rows + (size_t)worker * TRACE_TILE * stride;
    fill(j, TRACE_Q, j->head, tile, q);
    round_to_half(q, n * j->dim);
    kernels()->scores(q, n, j->packed, row0 + n, j->dim, 1.0f / sqrtf((float)j->dim), rows, stride);
    for (size_t r = 0; r < n; r++) {
        size_t end = kernel_pad(row0 + r + 1);
        float *row = rows + r * stride;
        j->lse[row0 + r] = (float)kernels()->softmax(row, 0, row0 + r, 0, NULL);
        memset(row + end, 0, (kernel_pad(row0 + n) - end) * sizeof *row);
    }
    for (size_t column = 0; column <= tile; column++)
        TRY(trace_pack(j->w, TRACE_PROBS, rows + column * TRACE_TILE, n, (size_t)rows_of_tile(j, column), stride,
                       j->sum + row0, &j->chunk[triangle(tile) + column]));
    return 0;
}

static void load_keys(job *j, int kv_head) {
    for (size_t tile = 0; tile < j->tiles; tile++) fill(j, TRACE_K, kv_head, tile, j->key + tile * TRACE_TILE * j->dim);
    round_to_half(j->key, j->T * j->dim);
    kernels()->pack_keys(j->key, j->T, j->dim, j->packed);
}

static int write_rows(job *j) {
    int group = j->s->shape.n_head / j->s->shape.n_kv_head;
    for (j->head = 0; j->head < j->s->shape.n_head; j->head++) {
        if (j->head % group == 0) load_keys(j, j->head / group);
        memset(j->sum, 0, j->T * sizeof *j->sum);
        TRY(pool_run(j->p, j->tiles, rows_task, j));
        for (size_t tile = 0; tile < j->tiles; tile++)
            for (size_t column = 0; column <= tile; column++)
                TRY(trace_put(j->w, TRACE_PROBS, j->layer, j->head, (int)tile, (int)column,
                              &j->chunk[triangle(tile) + column]));
        TRY(trace_write_lse(j->w, j->layer, j->head, j->lse));
        TRY(trace_write_row_sum(j->w, j->layer, j->head, j->sum));
        advance(j, j->tiles);
    }
    return 0;
}

/* ---- gradients -------------------------------------------------------------------------------------------------- */

static int gradient_task(void *context, size_t task, int worker) {
    job *j = context;
    size_t index = j->first + task, head = index / j->tiles, tile = index % j->tiles, row0 = tile * TRACE_TILE;
    int32_t n = rows_of_tile(j, tile);
    float *values = tile_of(j, worker);
    synthetic_gradient(&j->s->shape, j->set, j->layer, (int)head, (int32_t)row0, n, values);
    /* Nothing is predicted after the last step. */
    if (tile == j->tiles - 1) memset(values + (size_t)(n - 1) * j->dim, 0, j->dim * sizeof *values);
    return trace_pack_grad(j->w, values, (size_t)n, j->dim, j->scale + head * j->T + row0, &j->chunk[task]);
}

/* One label set of one layer. */
static int write_gradients(job *j) {
    size_t heads = (size_t)j->s->shape.n_head, n = heads * j->tiles;
    for (j->first = 0; j->first < n; j->first += BATCH) {
        size_t batch = n - j->first < BATCH ? n - j->first : BATCH;
        TRY(pool_run(j->p, batch, gradient_task, j));
        for (size_t i = 0; i < batch; i++)
            TRY(trace_put_grad(j->w, j->set, j->layer, (int)((j->first + i) / j->tiles),
                               (int)((j->first + i) % j->tiles), &j->chunk[i]));
        advance(j, batch);
    }
    for (size_t head = 0; head < heads; head++)
        TRY(trace_write_grad_scale(j->w, j->set, j->layer, (int)head, j->scale + head * j->T));
    return 0;
}

static int write_labels(job *j) {
    size_t steps = j->T - 1;
    if (!j->s->plan.n_fisher) return 0;
    for (int k = 0; k < j->s->plan.n_fisher; k++)
        for (size_t t = 0; t < steps; t++)
            j->label[(size_t)k * steps + t] =
                (int32_t)t < j->s->n_prompt ? -1 : synthetic_label(j->s->shape.seed, k, (int32_t)t);
    return trace_write_fisher_labels(j->w, j->label);
}

/* ---- the sequence ----------------------------------------------------------------------------------------------- */

static int write_layer(job *j) {
    TRY(pool_run(j->p, (size_t)j->s->shape.n_head, background_task, j));
    if (j->s->plan.dense) TRY(write_rows(j));
    for (int a = TRACE_Q; a <= TRACE_V && j->s->plan.factored; a++) TRY(write_array(j, (trace_array)a));
    return 0;
}

static int write_all(job *j) {
    const trace_plan *plan = &j->s->plan;
    int32_t sets = plan->grad_loss ? 1 + plan->n_fisher : 0;
    for (j->layer = 0; j->layer < j->s->n_layer; j->layer++) TRY(write_layer(j));
    for (j->set = 0; j->set < sets; j->set++)
        for (j->layer = 0; j->layer < j->s->n_layer; j->layer++) TRY(write_gradients(j));
    TRY(write_labels(j));
    for (size_t t = 0; t + 1 < j->T; t++) {
        synthetic_prediction made = synthetic_predict(j->s->shape.seed, (int32_t)t);
        j->logprob[t] = made.target_logprob;
        j->entropy[t] = made.entropy;
        j->correct[t] = made.correct;
    }
    return trace_write_logits(j->w, j->logprob, j->correct, j->entropy, NULL, NULL);
}

static int begin(job *j) {
    trace_plan plan = {.dense = j->s->plan.dense,
                       .factored = j->s->plan.factored,
                       .lse = j->s->plan.dense,
                       .row_sum = j->s->plan.dense,
                       .grad_loss = j->s->plan.grad_loss,
                       .n_fisher = j->s->plan.n_fisher};
    for (size_t t = 0; t < j->T; t++) j->token[t] = synthetic_token(j->s->shape.seed, (int32_t)t);
    trace_sequence facts = {.n_tokens = j->s->n_tokens, .n_prompt = j->s->n_prompt, .source = "", .tokens = j->token};
    return trace_write_sequence(j->w, &facts, &plan);
}

/* In tiles of one head. */
static double work_of(const job *j) {
    const synthetic_shape *s = &j->s->shape;
    const trace_plan *plan = &j->s->plan;
    int32_t heads = plan->factored ? s->n_head + 2 * s->n_kv_head : 0;
    if (plan->dense) heads += s->n_head;
    if (plan->grad_loss) heads += s->n_head * (1 + plan->n_fisher);
    return (double)j->s->n_layer * (double)j->tiles * heads;
}

trace_model synthetic_model(const synthetic *s) {
    return (trace_model){.name = "synthetic",
                         .arch = "",
                         .n_layer = s->n_layer,
                         .n_head = s->shape.n_head,
                         .n_kv_head = s->shape.n_kv_head,
                         .head_dim = s->shape.head_dim,
                         .n_vocab = SYNTHETIC_VOCAB,
                         .scale = 1.0f / sqrtf((float)s->shape.head_dim),
                         .rope = "",
                         .backend = "",
                         .device = "",
                         .compute = "f32"};
}

int synthetic_write(const synthetic *s, pool *p, trace_writer *w) {
    size_t T = (size_t)s->n_tokens;
    job j = {.s = s, .p = p, .w = w, .T = T, .dim = (size_t)s->shape.head_dim};
    j.tiles = (T + TRACE_TILE - 1) / TRACE_TILE;
    mem_carver size = {0};
    carve(&j, &size);
    j.block = mem_new(size.used, 1, "synthetic trace");
    if (!j.block) return ERR_DATA;
    mem_carver place = {.base = j.block};
    carve(&j, &place);
    progress_begin("make-trace", NULL, work_of(&j));
    int code = begin(&j);
    if (!code) code = write_all(&j);
    progress_end();
    /* After a failure some chunks are packed and not put. */
    for (size_t i = 0; i < chunks_waiting(&j); i++) trace_chunk_free(&j.chunk[i]);
    mem_free(j.block);
    return code;
}
