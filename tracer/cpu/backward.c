#include "tracer/cpu/backward.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/rng.h"
#include "tracer/cpu/heads.h"
#include "tracer/cpu/matmul.h"
#include "tracer/cpu/rows.h"
#include "traces/kernels.h"

#include <math.h>
#include <string.h>

enum {
    NORM_ROWS = 64,   /* rows of one elementwise task */
    SLICE_IDS = 4096, /* ids of one task of the product with the output matrix */
    PANEL_IDS = 1024, /* of which so many are in f32 at once */
    LABEL_STREAM = 2  /* of the random numbers, see label_plan */
};
_Static_assert((int)PANEL_IDS <= (int)TILE_COLS_MAX, "a panel takes these rows of the output matrix");

/* ---- buffers ---------------------------------------------------------------------------------------------------- */

static bool norms_added(const model *m) {
    return m->arch->needs & (1u << SLOT_ATTN_POST_NORM | 1u << SLOT_FFN_POST_NORM);
}

/* What only some families ask for. */
static void carve_extras(cpu_back *b, mem_carver *c) {
    cpu_run *r = &b->run;
    const model *m = r->s->m;
    size_t threads = (size_t)pool_threads(r->s->p);
    if (norms_added(m)) {
        b->kept = mem_carve(c, 2 * (size_t)m->n_layer * r->T * r->ld_x, sizeof(float));
        b->d_added = mem_carve(c, b->sets * r->T * r->ld_x, sizeof(float));
    } else b->d_added = b->d_x;
    if (m->arch->qk_norm != ARCH_QK_NORM_NONE) r->raw = mem_carve(c, r->T * r->ld_qkv, sizeof(float));
    if (!(m->logit_softcap > 0)) return;
    b->slope = mem_carve(c, b->sets * r->T, sizeof(float));
    b->capped = mem_carve(c, threads, sizeof *b->capped);
    for (size_t i = 0; i < threads; i++) {
        float *row = mem_carve(c, r->ld_logits, sizeof *row);
        if (c->base) b->capped[i] = row;
    }
}

static void carve(cpu_back *b, mem_carver *c) {
    const cpu_run *r = &b->run;
    const model *m = r->s->m;
    size_t rows = b->sets * r->T;
    b->label = mem_carve(c, b->sets * (r->T - 1), sizeof *b->label);
    b->input = mem_carve(c, 2 * (size_t)m->n_layer * r->T * r->ld_x, sizeof(float));
    b->d_x = mem_carve(c, rows * r->ld_x, sizeof(float));
    b->d_normed = mem_carve(c, rows * r->ld_x, sizeof(float));
    b->d_mix = mem_carve(c, rows * r->ld_mix, sizeof(float));
    b->d_qkv = mem_carve(c, rows * r->ld_qkv, sizeof(float));
    b->d_gate = mem_carve(c, rows * r->ld_ff, sizeof(float));
    b->d_up = mem_carve(c, rows * r->ld_ff, sizeof(float));
    b->d_hidden = mem_carve(c, b->slices * r->logit_rows * r->ld_x, sizeof(float));
    size_t sums = (size_t)m->n_head * b->chunks * b->sets * 2;
    b->d_kv = mem_carve(c, sums * r->T * (size_t)m->head_dim, sizeof(float));
    carve_extras(b, c);
}

static void back_free(cpu_back *b) {
    cpu_run_free(&b->run);
    mem_free(b->block);
}

static int back_new(cpu_back *b) {
    const model *m = b->run.s->m;
    b->sets = 1 + (size_t)b->plan->n_samples;
    b->slices = ((size_t)m->n_vocab + SLICE_IDS - 1) / SLICE_IDS;
    b->chunks = cpu_back_chunks(m, b->run.T);
    mem_carver size = {0};
    carve(b, &size);
    b->block = mem_new(size.used, 1, "gradients");
    if (!b->block) return ERR_DATA;
    mem_carver c = {.base = b->block};
    carve(b, &c);
    return 0;
}

/* Of x, or of what is kept, before part 0 (attention) or 1 (feed-forward) of a layer. */
static float *part_of(const cpu_back *b, float *all, int layer, int part) {
    return all + (2 * (size_t)layer + (size_t)part) * b->run.T * b->run.ld_x;
}

static float *input_of(const cpu_back *b, int layer, int part) {
    return part_of(b, b->input, layer, part);
}

/* Keep x, and what is to be added to it. */
static void keep_input(cpu_back *b, int layer, int part) {
    memcpy(input_of(b, layer, part), b->run.x, b->run.T * b->run.ld_x * sizeof(float));
    if (b->kept) b->run.added = part_of(b, b->kept, layer, part);
}

/* ---- products --------------------------------------------------------------------------------------------------- */

/* out = in * w (or out += in * w) over the rows of all sets, tile by tile. w [inner][cols]. */
typedef struct product {
    tile_grid grid;
    size_t inner, ld_in, ld_out;
    const float *in, *w;
    float *out;
    int accumulate;
} product;

static int product_tile(void *context, size_t task, int worker) {
    (void)worker;
    const product *p = context;
    tile t = tile_grid_at(&p->grid, task);
    matmul_weight_back(t.n_rows, t.n_cols, p->inner, p->in + t.row * p->ld_in, p->ld_in, p->w + t.col, p->grid.cols,
                       p->accumulate, p->out + t.row * p->ld_out + t.col, p->ld_out);
    return 0;
}

static int multiply(const cpu_back *b, const float *in, size_t ld_in, size_t inner, const float *w, float *out,
                    size_t ld_out, size_t cols, int accumulate) {
    product p = {.grid = tile_grid_new(b->sets * b->run.T, cols, KERNEL_LANES),
                 .inner = inner,
                 .ld_in = ld_in,
                 .ld_out = ld_out,
                 .in = in,
                 .w = w,
                 .out = out,
                 .accumulate = accumulate};
    return pool_run(b->run.s->p, tile_grid_count(&p.grid), product_tile, &p);
}

/* ---- norms ------------------------------------------------------------------------------------------------------ */

/* d_in += what d_out asks of `in`; d_out is used up. */
typedef struct norm_job {
    cpu_back *b;
    const float *in, *weight;
    float *d_out, *d_in;
} norm_job;

static int norm_rows_back(void *context, size_t task, int worker) {
    (void)worker;
    const norm_job *j = context;
    const cpu_back *b = j->b;
    const cpu_run *r = &b->run;
    const model *m = r->s->m;
    size_t end = (task + 1) * NORM_ROWS;
    for (size_t row = task * NORM_ROWS; row < end && row < b->sets * r->T; row++)
        rows_norm_back(m->arch->norm, j->in + row % r->T * r->ld_x, j->weight, (size_t)m->n_embd, m->norm_eps,
                       j->d_out + row * r->ld_x, j->d_in + row * r->ld_x);
    return 0;
}

static int run_norm_back(norm_job *j) {
    const cpu_back *b = j->b;
    return pool_run(b->run.s->p, (b->sets * b->run.T + NORM_ROWS - 1) / NORM_ROWS, norm_rows_back, j);
}

/* d_x += what d_normed asks of run.x; without a norm, d_normed itself. */
static int norm_back(cpu_back *b, const float *weight) {
    norm_job j = {b, b->run.x, weight, b->d_normed, b->d_x};
    if (weight) return run_norm_back(&j);
    for (size_t i = 0; i < b->sets * b->run.T * b->run.ld_x; i++) b->d_x[i] += b->d_normed[i];
    return 0;
}

/* d_added = what d_x asks of what a half of a layer added. */
static int added_back(cpu_back *b, int part, arch_slot slot) {
    const cpu_run *r = &b->run;
    size_t bytes = b->sets * r->T * r->ld_x * sizeof(float);
    norm_job j = {.b = b, .weight = r->s->layer[r->layer].at[slot], .d_out = b->d_normed, .d_in = b->d_added};
    if (!b->kept) return 0; /* d_added is d_x */
    j.in = part_of(b, b->kept, r->layer, part);
    memcpy(j.weight ? b->d_normed : b->d_added, b->d_x, bytes);
    if (!j.weight) return 0;
    memset(b->d_added, 0, bytes);
    return run_norm_back(&j);
}

/* ---- logits ----------------------------------------------------------------------------------------------------- */

static int counts(const cpu_back *b, size_t t) {
    return t + 1 < b->run.T && b->plan->counted[t];
}

/* The first id whose running sum exceeds u. */
static int32_t draw(const float *p, int32_t n, double u) {
    int32_t last = 0;
    double sum = 0;
    for (int32_t i = 0; i < n; i++) {
        sum += (double)p[i];
        if (sum > u) return i;
        if (p[i] > 0) last = i;
    }
    return last;
}

static void set_labels(cpu_back *b, size_t t, const float *p) {
    const label_plan *plan = b->plan;
    size_t steps = b->run.T - 1;
    b->label[t] = b->run.tokens[t + 1];
    for (size_t i = 0; i + 1 < b->sets; i++) {
        int32_t *label = &b->label[(i + 1) * steps + t];
        if (plan->fixed) *label = plan->fixed[i * steps + t];
        else
            *label =
                draw(p, b->run.s->m->n_vocab,
                     rng_uniform(rng_philox(plan->seed, (uint32_t)t, (uint32_t)i, plan->sequence, LABEL_STREAM).v[0]));
    }
}

/* A row of capped logits becomes the probabilities' share of the slope before the cap; the labels' share follows. */
static void through_cap(const cpu_back *b, size_t t, const float *capped, float *p) {
    const model *m = b->run.s->m;
    for (size_t set = 0; set < b->sets; set++) {
        float x = capped[b->label[set * (b->run.T - 1) + t]] / m->logit_softcap;
        b->slope[set * b->run.T + t] = 1 - x * x;
    }
    rows_softcap_slope(capped, (size_t)m->n_vocab, m->logit_softcap, p);
}

static int probabilities_row(void *context, size_t task, int worker) {
    cpu_back *b = context;
    const cpu_run *r = &b->run;
    size_t t = b->logit_row + task, n_vocab = (size_t)r->s->m->n_vocab;
    float *row = r->logits + task * r->ld_logits;
    if (!counts(b, t)) return 0;
    if (b->slope) memcpy(b->capped[worker], row, n_vocab * sizeof *row);
    if (isnan(kernels()->softmax(row, 0, n_vocab - 1, 0, NULL)))
        return err_set(ERR_DATA, "non-finite logits at layer %d (output), token %zu", r->s->m->n_layer, t);
    set_labels(b, t, row);
    if (b->slope) through_cap(b, t, b->capped[worker], row);
    return 0;
}

typedef struct tiles_job {
    cpu_back *b;
    tile_grid grid;
} tiles_job;

/* A slice's share of p * W_out: sums over a large vocabulary are cut in pieces, for accuracy and for many threads. */
static int slice_of_logits(void *context, size_t task, int worker) {
    const tiles_job *j = context;
    const cpu_run *r = &j->b->run;
    const backend_state *s = r->s;
    cpu_matrix output = cpu_output_matrix(s->m);
    float *d_hidden = j->b->d_hidden + task * r->logit_rows * r->ld_x;
    size_t n_vocab = (size_t)s->m->n_vocab, n_embd = (size_t)s->m->n_embd, first = task * SLICE_IDS;
    for (size_t id = first; id < first + SLICE_IDS && id < n_vocab; id += PANEL_IDS) {
        size_t n = n_vocab - id < PANEL_IDS ? n_vocab - id : PANEL_IDS;
        const float *w;
        TRY(cpu_rows(&output, id, n, s->panel[worker], &w));
        for (size_t i = 0; i < tile_grid_count(&j->grid); i++) {
            tile t = tile_grid_at(&j->grid, i);
            matmul_weight_back(t.n_rows, t.n_cols, n, r->logits + t.row * r->ld_logits + id, r->ld_logits, w + t.col,
                               n_embd, id > first, d_hidden + t.row * r->ld_x + t.col, r->ld_x);
        }
    }
    return 0;
}

/* The loss's slope in the logits is p - (1 at the label): the product with p is the same for all sets. */
static int hidden_row(void *context, size_t task, int worker) {
    cpu_back *b = context;
    const cpu_run *r = &b->run;
    const model *m = r->s->m;
    cpu_matrix output = cpu_output_matrix(m);
    size_t t = b->logit_row + task, n_embd = (size_t)m->n_embd;
    if (!counts(b, t)) return 0;
    float *common = b->d_hidden + task * r->ld_x;
    for (size_t slice = 1; slice < b->slices; slice++)
        for (size_t i = 0; i < n_embd; i++) common[i] += common[slice * r->logit_rows * r->ld_x + i];
    for (size_t set = 0; set < b->sets; set++) {
        const float *w;
        TRY(cpu_rows(&output, (size_t)b->label[set * (r->T - 1) + t], 1, r->s->panel[worker], &w));
        float *d = b->d_normed + (set * r->T + t) * r->ld_x, slope = b->slope ? b->slope[set * r->T + t] : 1;
        for (size_t i = 0; i < n_embd; i++) d[i] = common[i] - slope * w[i];
        rows_norm_back(m->arch->norm, r->x + t * r->ld_x, r->s->output_norm, n_embd, m->norm_eps, d,
                       b->d_x + (set * r->T + t) * r->ld_x);
    }
    return 0;
}

/* Logits to their sink, labels, and d_x of the last layer's output; steps that do not count keep 0. */
static int logits_and_back(cpu_back *b) {
    cpu_run *r = &b->run;
    const forward_sink *sink = r->sink;
    TRY(cpu_run_hidden(r));
    for (size_t i = 0; i < b->sets * (r->T - 1); i++) b->label[i] = -1;
    for (size_t row = 0; row < r->T; row += r->logit_rows) {
        size_t n = r->T - row < r->logit_rows ? r->T - row : r->logit_rows;
        tiles_job j = {b, tile_grid_new(n, (size_t)r->s->m->n_embd, KERNEL_LANES)};
        b->logit_row = row;
        TRY(cpu_logits_tile(r, row, n));
        if (sink->logits) TRY(sink->logits(sink->context, (int32_t)row, (int32_t)n, r->logits, r->ld_logits));
        TRY(pool_run(r->s->p, n, probabilities_row, b));
        TRY(pool_run(r->s->p, b->slices, slice_of_logits, &j));
        TRY(pool_run(r->s->p, n, hidden_row, b));
    }
    return 0;
}

/* ---- layers ----------------------------------------------------------------------------------------------------- */

/* A tile of gate and up again, then of their gradients, for every set. */
static int gate_tile_back(void *context, size_t task, int worker) {
    const tiles_job *j = context;
    cpu_back *b = j->b;
    const cpu_run *r = &b->run;
    size_t n_embd = (size_t)r->s->m->n_embd, n_ff = (size_t)r->s->m->n_ff;
    tile t = tile_grid_at(&j->grid, task);
    float *gate = r->scratch[worker], *up = r->ff + t.row * r->ld_ff + t.col;
    const float *down = r->s->layer[r->layer].at[SLOT_DOWN];
    cpu_gate_tile(r, t, gate, up);
    for (size_t i = 0; i < t.n_rows; i++)
        rows_gate_slopes(r->s->m->arch->activation, gate + i * r->ld_gate, up + i * r->ld_ff, t.n_cols);
    for (size_t set = 0; set < b->sets; set++) {
        size_t row = set * r->T + t.row;
        float *d_gate = b->d_gate + row * r->ld_ff + t.col, *d_up = b->d_up + row * r->ld_ff + t.col;
        matmul_weight_back(t.n_rows, t.n_cols, n_embd, b->d_added + row * r->ld_x, r->ld_x, down + t.col, n_ff, 0, d_up,
                           r->ld_ff);
        for (size_t i = 0; i < t.n_rows; i++)
            rows_gate_back(gate + i * r->ld_gate, up + i * r->ld_ff, d_up + i * r->ld_ff, d_gate + i * r->ld_ff,
                           t.n_cols);
    }
    return 0;
}

static int feed_forward_back(cpu_back *b) {
    cpu_run *r = &b->run;
    const cpu_layer *w = &r->s->layer[r->layer];
    size_t n_embd = (size_t)r->s->m->n_embd, n_ff = (size_t)r->s->m->n_ff;
    bool gated = w->at[SLOT_GATE];
    TRY(cpu_take_layer(r->s, r->layer));
    TRY(added_back(b, 1, SLOT_FFN_POST_NORM));
    r->x = input_of(b, r->layer, 1);
    TRY(cpu_norm(r, w->at[SLOT_FFN_NORM], w->at[SLOT_FFN_NORM_BIAS]));
    tiles_job j = {b, cpu_gate_grid(r)};
    TRY(pool_run(r->s->p, tile_grid_count(&j.grid), gate_tile_back, &j));
    TRY(multiply(b, b->d_gate, r->ld_ff, n_ff, w->at[gated ? SLOT_GATE : SLOT_UP], b->d_normed, r->ld_x, n_embd, 0));
    if (gated) TRY(multiply(b, b->d_up, r->ld_ff, n_ff, w->at[SLOT_UP], b->d_normed, r->ld_x, n_embd, 1));
    return norm_back(b, w->at[SLOT_FFN_NORM]);
}

static int output_projection_back(cpu_back *b) {
    const cpu_run *r = &b->run;
    const model *m = r->s->m;
    TRY(added_back(b, 0, SLOT_ATTN_POST_NORM));
    return multiply(b, b->d_added, r->ld_x, (size_t)m->n_embd, r->s->layer[r->layer].at[SLOT_O], b->d_mix, r->ld_mix,
                    (size_t)m->n_head * (size_t)m->head_dim, 0);
}

static int attention_half_back(cpu_back *b) {
    cpu_run *r = &b->run;
    const model *m = r->s->m;
    const cpu_layer *w = &r->s->layer[r->layer];
    r->x = input_of(b, r->layer, 0);
    TRY(cpu_norm(r, w->at[SLOT_ATTN_NORM], w->at[SLOT_ATTN_NORM_BIAS]));
    TRY(cpu_project_qkv(r));
    TRY(cpu_attention_back(b));
    TRY(multiply(b, b->d_qkv, r->ld_qkv, (size_t)(m->n_head + 2 * m->n_kv_head) * (size_t)m->head_dim, w->at[SLOT_Q],
                 b->d_normed, r->ld_x, (size_t)m->n_embd, 0));
    return norm_back(b, w->at[SLOT_ATTN_NORM]);
}

/* ---- the pass --------------------------------------------------------------------------------------------------- */

static int forward_keeping(cpu_back *b) {
    cpu_run *r = &b->run;
    TRY(cpu_embed(r));
    for (int32_t layer = 0; layer < r->s->m->n_layer; layer++) {
        keep_input(b, layer, 0);
        TRY(cpu_run_attention(r, layer));
        TRY(cpu_add_mix(r));
        keep_input(b, layer, 1);
        TRY(cpu_run_feed_forward(r));
    }
    return 0;
}

static int run(cpu_back *b) {
    cpu_run *r = &b->run;
    const gradient_sink *sink = b->sink;
    TRY(forward_keeping(b));
    TRY(logits_and_back(b));
    if (sink->labels) TRY(sink->labels(sink->context, b->label + (r->T - 1)));
    for (r->layer = r->s->m->n_layer - 1; r->layer >= 0; r->layer--) {
        TRY(feed_forward_back(b));
        TRY(output_projection_back(b));
        TRY(sink->layer(sink->context, r->layer, b->d_mix, r->T * r->ld_mix, r->ld_mix));
        if (r->layer) TRY(attention_half_back(b));
    }
    return 0;
}

int cpu_forward_backward(backend_state *s, const int32_t *tokens, int32_t n, const int32_t *evict_at,
                         const forward_sink *sink, const label_plan *labels, const gradient_sink *gradients) {
    cpu_back b = {.plan = labels, .sink = gradients};
    TRY(cpu_run_new(s, tokens, n, sink, &b.run));
    b.run.evict_at = evict_at;
    int code = back_new(&b);
    if (!code) code = run(&b);
    back_free(&b);
    return code;
}
