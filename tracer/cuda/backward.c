/* The backward pass: the input of every layer is kept, the rest computed again on the way back, layer by layer. Sets of
 * labels are blocks of T rows; row r of a gradient belongs to row r % T of the text. */
#include "base/err.h"
#include "base/mem.h"
#include "base/rng.h"
#include "tracer/cuda/forward.h"
#include "traces/kernels.h"

#include <string.h>

enum { LABEL_STREAM = 2 /* of the random numbers, see label_plan */ };

typedef struct cuda_back {
    cuda_run run;
    const label_plan *plan;
    const gradient_sink *sink;
    size_t sets;
    /* Device memory. */
    float *input;    /* [n_layer][T][ld_x] x before each layer */
    float *middle;   /* [T][ld_x] x between a layer's halves */
    float *d_x;      /* [sets][T][ld_x] */
    float *d_normed; /* [sets][T][ld_x] */
    float *d_mix;    /* [sets][T][ld_mix] */
    float *d_qkv;    /* [sets][T][ld_qkv] */
    float *row_dot;  /* [sets][n_head][T] */
    float *d_ff;     /* [ff_rows][ld_ff] of the gated activations */
    void *d_gate;    /* [ff_rows][ld_ff] of the state's type, as is d_up */
    void *d_up;
    void *p;          /* [logit_rows][ld_logits] of the state's type */
    float *common;    /* [logit_rows][ld_x] p times the output matrix */
    float *label_row; /* [logit_rows][ld_x] */
    int32_t *label;   /* [sets][T], -1 where the loss does not count */
    double *u;        /* [T][n_samples] in tiles: of the n rows from `row` on, [n_samples][n] at u + row * n_samples */
    uint8_t *counted; /* [T] */
    void *memory;
    double *host_u; /* as u */
    int32_t *host_label;
} cuda_back;

/* ---- memory ----------------------------------------------------------------------------------------------------- */

static void carve(cuda_back *b, arena *a) {
    const cuda_run *r = &b->run;
    const model *m = r->s->m;
    size_t rows = b->sets * r->T, size = dtype_size(r->s->type);
    b->input = arena_take(a, (size_t)m->n_layer * r->T * r->ld_x, sizeof(float));
    b->middle = arena_take(a, r->T * r->ld_x, sizeof(float));
    b->d_x = arena_take(a, rows * r->ld_x, sizeof(float));
    b->d_normed = arena_take(a, rows * r->ld_x, sizeof(float));
    b->d_mix = arena_take(a, rows * r->ld_mix, sizeof(float));
    b->d_qkv = arena_take(a, rows * r->ld_qkv, sizeof(float));
    b->row_dot = arena_take(a, b->sets * (size_t)m->n_head * r->T, sizeof(float));
    b->d_ff = arena_take(a, r->ff_rows * r->ld_ff, sizeof(float));
    b->d_gate = arena_take(a, r->ff_rows * r->ld_ff, size);
    b->d_up = arena_take(a, r->ff_rows * r->ld_ff, size);
    b->p = arena_take(a, r->logit_rows * r->ld_logits, size);
    b->common = arena_take(a, r->logit_rows * r->ld_x, sizeof(float));
    b->label_row = arena_take(a, r->logit_rows * r->ld_x, sizeof(float));
    b->label = arena_take(a, rows, sizeof *b->label);
    b->u = arena_take(a, (b->sets - 1) * r->T, sizeof *b->u);
    b->counted = arena_take(a, r->T, 1);
}

static int back_new(cuda_back *b) {
    cuda_run *r = &b->run;
    arena size = {0};
    carve(b, &size);
    device_at(r->s->d, "gradients of %zu label sets, %zu tokens", b->sets, r->T);
    TRY(device_new(r->s->d, size.used, "gradients", &b->memory));
    arena place = {.base = b->memory};
    carve(b, &place);
    b->host_u = mem_new((b->sets - 1) * r->T, sizeof *b->host_u, "labels");
    b->host_label = mem_new(b->sets * r->T, sizeof *b->host_label, "labels");
    if (!b->host_u || !b->host_label) return ERR_DATA;
    TRY(device_fill(r->s->d, STREAM_COMPUTE, b->d_x, 0, b->sets * r->T * r->ld_x * sizeof *b->d_x));
    TRY(device_fill(r->s->d, STREAM_COMPUTE, b->counted, 0, r->T)); /* the last step never counts */
    return device_to(r->s->d, STREAM_COMPUTE, b->counted, b->plan->counted, r->T - 1);
}

static void back_free(cuda_back *b) {
    device_release(b->run.s->d, b->memory);
    mem_free(b->host_u);
    mem_free(b->host_label);
    cuda_run_free(&b->run);
}

/* ---- logits ----------------------------------------------------------------------------------------------------- */

/* Labels of the text, and those handed in; -1 where the loss does not count. */
static int known_labels(cuda_back *b) {
    const cuda_run *r = &b->run;
    size_t steps = r->T - 1;
    for (size_t set = 0; set < b->sets; set++)
        for (size_t t = 0; t < r->T; t++) {
            bool counts = t < steps && b->plan->counted[t];
            int32_t fixed = set && b->plan->fixed && counts ? b->plan->fixed[(set - 1) * steps + t] : -1;
            b->host_label[set * r->T + t] = !counts ? -1 : set ? fixed : r->tokens[t + 1];
        }
    return device_to(r->s->d, STREAM_COMPUTE, b->label, b->host_label, b->sets * r->T * sizeof *b->label);
}

/* The numbers that all labels are drawn with. */
static int draw_numbers(cuda_back *b) {
    const cuda_run *r = &b->run;
    size_t samples = b->sets - 1;
    for (size_t row = 0; row < r->T; row += r->logit_rows)
        for (size_t i = 0, n = least(r->logit_rows, r->T - row); i < samples; i++)
            for (size_t t = 0; t < n; t++)
                b->host_u[row * samples + i * n + t] = rng_uniform(
                    rng_philox(b->plan->seed, (uint32_t)(row + t), (uint32_t)i, b->plan->sequence, LABEL_STREAM).v[0]);
    return device_to(r->s->d, STREAM_COMPUTE, b->u, b->host_u, samples * r->T * sizeof *b->u);
}

static int draw_labels(cuda_back *b, size_t row, size_t n) {
    const cuda_run *r = &b->run;
    return k_vocab_draw(r->s->d, r->logits, r->ld_logits, n, (size_t)r->s->m->n_vocab, r->logit_lse, b->counted + row,
                        b->u + row * (b->sets - 1), b->sets - 1, b->label + r->T + row, r->T);
}

/* From a tile of logits to d_x of these steps, all sets. The loss's slope in the logits is p - (1 at the label): the
 * product with p is the same for all sets. */
static int tile_back(cuda_back *b, size_t row, size_t n) {
    const cuda_run *r = &b->run;
    const model *m = r->s->m;
    device *d = r->s->d;
    size_t n_embd = (size_t)m->n_embd;
    TRY(k_vocab_softmax(d, r->logits, r->ld_logits, n, (size_t)m->n_vocab, r->logit_lse, b->counted + row, r->s->type,
                        b->p, r->ld_logits));
    TRY(cuda_logits_back(r->s, b->p, r->ld_logits, n, b->common, r->ld_x));
    for (size_t set = 0; set < b->sets; set++) {
        size_t at = (set * r->T + row) * r->ld_x;
        TRY(cuda_output_rows(r->s, b->label + set * r->T + row, n, b->label_row, r->ld_x));
        TRY(k_hidden_back(d, b->common, b->label_row, b->counted + row, n, n_embd, r->ld_x, b->d_normed + at));
        TRY(k_norm_back(d, r->x + row * r->ld_x, n, cuda_output_norm(r->s), n, n_embd, m->norm_eps, b->d_normed + at,
                        b->d_x + at, r->ld_x));
    }
    return 0;
}

static int hand_out_labels(cuda_back *b) {
    const cuda_run *r = &b->run;
    size_t T = r->T;
    if (!b->sink->labels) return 0;
    TRY(device_from(r->s->d, STREAM_COMPUTE, b->host_label, b->label, b->sets * T * sizeof *b->label));
    TRY(device_sync(r->s->d));
    for (size_t set = 1; set < b->sets; set++) /* rows of T become rows of T-1 */
        memmove(b->host_label + (set - 1) * (T - 1), b->host_label + set * T, (T - 1) * sizeof *b->host_label);
    return b->sink->labels(b->sink->context, b->host_label);
}

static int logits_and_back(cuda_back *b) {
    cuda_run *r = &b->run;
    bool draws = b->sets > 1 && !b->plan->fixed;
    TRY(cuda_hidden(r));
    TRY(known_labels(b));
    if (draws) TRY(draw_numbers(b));
    for (size_t row = 0; row < r->T; row += r->logit_rows) {
        size_t n = least(r->logit_rows, r->T - row);
        TRY(cuda_logits_tile(r, row, n));
        TRY(device_busy_begin(r->s->d, STREAM_COMPUTE));
        if (draws) TRY(draw_labels(b, row, n));
        TRY(tile_back(b, row, n));
        TRY(device_busy_end(r->s->d, STREAM_COMPUTE));
    }
    return hand_out_labels(b);
}

/* ---- layers ----------------------------------------------------------------------------------------------------- */

static float *input_of(const cuda_back *b, int layer) {
    return b->input + (size_t)layer * b->run.T * b->run.ld_x;
}

/* Some steps of one set; gate and up hold their rows. */
static int feed_forward_set_back(cuda_back *b, size_t set, size_t row, size_t n) {
    cuda_run *r = &b->run;
    const model *m = r->s->m;
    size_t at = (set * r->T + row) * r->ld_x, n_embd = (size_t)m->n_embd, n_ff = (size_t)m->n_ff;
    cuda_product down = {.rows = n,
                         .inner = n_embd,
                         .cols = n_ff,
                         .in = b->d_x + at,
                         .ld_in = r->ld_x,
                         .w = r->w.down,
                         .out = b->d_ff,
                         .ld_out = r->ld_ff,
                         .back = true};
    cuda_product gate = {.rows = n,
                         .inner = n_ff,
                         .cols = n_embd,
                         .in = b->d_gate,
                         .ld_in = r->ld_ff,
                         .w = r->w.gate,
                         .out = b->d_normed + at,
                         .ld_out = r->ld_x,
                         .back = true};
    cuda_product up = gate;
    up.in = b->d_up;
    up.w = r->w.up;
    up.accumulate = true;
    TRY(cuda_multiply_f32(r->s, &down));
    TRY(k_gate_back(r->s->d, r->gate, r->up, r->ld_ff, n, n, n_ff, b->d_ff, r->s->type, b->d_gate, b->d_up, r->ld_ff));
    TRY(cuda_multiply(r->s, &gate));
    TRY(cuda_multiply(r->s, &up));
    return k_norm_back(r->s->d, b->middle + row * r->ld_x, n, r->w.ffn_norm, n, n_embd, m->norm_eps, b->d_normed + at,
                       b->d_x + at, r->ld_x);
}

static int feed_forward_back(cuda_back *b) {
    cuda_run *r = &b->run;
    for (size_t row = 0; row < r->T; row += r->ff_rows) {
        size_t n = least(r->ff_rows, r->T - row);
        TRY(cuda_gate_up(r, b->middle, row, n));
        for (size_t set = 0; set < b->sets; set++) TRY(feed_forward_set_back(b, set, row, n));
    }
    return 0;
}

static int output_projection_back(cuda_back *b) {
    const cuda_run *r = &b->run;
    const model *m = r->s->m;
    cuda_product p = {.rows = b->sets * r->T,
                      .inner = (size_t)m->n_embd,
                      .cols = (size_t)m->n_head * (size_t)m->head_dim,
                      .in = b->d_x,
                      .ld_in = r->ld_x,
                      .w = r->w.o,
                      .out = b->d_mix,
                      .ld_out = r->ld_mix,
                      .back = true};
    return cuda_multiply_f32(r->s, &p);
}

static int attention_half_back(cuda_back *b) {
    cuda_run *r = &b->run;
    const model *m = r->s->m;
    attention_shape a = cuda_attention_shape(r);
    head_shape h = cuda_head_shape(r);
    size_t rows = b->sets * r->T;
    cuda_product p = {.rows = rows,
                      .inner = (size_t)(m->n_head + 2 * m->n_kv_head) * (size_t)m->head_dim,
                      .cols = (size_t)m->n_embd,
                      .in = b->d_qkv,
                      .ld_in = r->ld_qkv,
                      .w = r->w.qkv,
                      .out = b->d_normed,
                      .ld_out = r->ld_x,
                      .back = true};
    TRY(k_attention_back(r->s->d, &a, b->sets, r->mix, r->lse, b->d_mix, r->ld_mix, b->row_dot, b->d_qkv));
    TRY(k_heads_back(r->s->d, &h, r->angles, rows, b->d_qkv));
    TRY(cuda_multiply_f32(r->s, &p));
    return k_norm_back(r->s->d, r->x, r->T, r->w.attn_norm, rows, (size_t)m->n_embd, m->norm_eps, b->d_normed, b->d_x,
                       r->ld_x);
}

static int send_gradients(cuda_back *b) {
    cuda_run *r = &b->run;
    head_shape h = cuda_head_shape(r);
    size_t heads = (size_t)r->s->m->n_head, scales = (heads * r->T * sizeof(float) + 255) / 256 * 256;
    size_t tiles = heads * r->row_tiles * r->edge * (size_t)r->s->m->head_dim * 2;
    for (size_t set = 0; set < b->sets; set++) {
        void *room;
        TRY(pipe_room(r->pipe, &room));
        TRY(k_pack_gradients(r->s->d, &h, b->d_mix + set * r->T * r->ld_mix, r->ld_mix, (uint8_t *)room + scales,
                             room));
        TRY(pipe_send(r->pipe, scales + tiles,
                      &(pipe_note){.kind = PACKET_GRADIENTS, .layer = r->layer, .set = (int)set}));
    }
    return 0;
}

/* The layer again from its input, then back through it. */
static int layer_back(cuda_back *b, int layer) {
    cuda_run *r = &b->run;
    device *d = r->s->d;
    size_t bytes = r->T * r->ld_x * sizeof *r->x;
    r->layer = layer;
    device_at(d, "gradients of layer %d, %zu label sets, %zu tokens", layer, b->sets, r->T);
    TRY(device_busy_begin(d, STREAM_COMPUTE));
    TRY(cuda_layer_get(r->s, layer, layer - 1, &r->w));
    r->x = input_of(b, layer);
    TRY(cuda_attend(r));
    TRY(device_copy(d, STREAM_COMPUTE, b->middle, r->x, bytes));
    TRY(cuda_add_mix(r, b->middle));
    TRY(feed_forward_back(b));
    TRY(output_projection_back(b));
    TRY(device_busy_end(d, STREAM_COMPUTE));
    TRY(send_gradients(b));
    if (layer == 0) return 0;
    TRY(device_busy_begin(d, STREAM_COMPUTE));
    TRY(attention_half_back(b));
    return device_busy_end(d, STREAM_COMPUTE);
}

/* ---- the pass --------------------------------------------------------------------------------------------------- */

static int run(cuda_back *b) {
    cuda_run *r = &b->run;
    int n_layer = r->s->m->n_layer;
    size_t bytes = r->T * r->ld_x * sizeof *r->x;
    TRY(cuda_embed_tokens(r));
    for (int layer = 0; layer < n_layer; layer++) {
        TRY(device_copy(r->s->d, STREAM_COMPUTE, input_of(b, layer), r->x, bytes));
        TRY(cuda_run_layer(r, layer, layer + 1 < n_layer ? layer + 1 : -1));
    }
    TRY(logits_and_back(b));
    for (int layer = n_layer - 1; layer >= 0; layer--) TRY(layer_back(b, layer));
    TRY(pipe_drain(r->pipe));
    return cuda_check(r);
}

int cuda_forward_backward(backend_state *s, const int32_t *tokens, int32_t n, const int32_t *evict_at,
                          const forward_sink *sink, const label_plan *labels, const gradient_sink *gradients) {
    cuda_back b = {.plan = labels, .sink = gradients, .sets = 1 + (size_t)labels->n_samples};
    int code = cuda_run_new(s, tokens, n, evict_at, sink, gradients, &b.run);
    if (!code) code = back_new(&b);
    if (!code) code = run(&b);
    back_free(&b);
    return code;
}
