#include "base/err.h"
#include "base/mem.h"
#include "base/progress.h"
#include "tracer/cpu/cpu.h"
#include "tracer/cpu/matmul.h"
#include "traces/kernels.h"

#include <stdint.h>

enum { ROWS_A_PART = 512 };
_Static_assert(SLOT_V == SLOT_Q + 2 && SLOT_Q_BIAS == SLOT_V + 1 && SLOT_V_BIAS == SLOT_Q_BIAS + 2,
               "q, k, v and their biases are neighbours");

typedef struct shape {
    size_t outputs, inputs;
} shape;

static shape shape_of(const model *m, int slot) {
    int64_t outputs, inputs;
    model_slot_shape(m, (arch_slot)slot, &outputs, &inputs);
    return (shape){(size_t)outputs, (size_t)inputs};
}

static bool is_matrix(const model *m, int slot) {
    return shape_of(m, slot).outputs > 1;
}

/* ---- memory ----------------------------------------------------------------------------------------------------- */

/* q, k and v, or their biases: no gap between them. */
static void carve_joint(mem_carver *c, const model *m, const model_layer *from, int first, cpu_layer *to) {
    size_t n = 0;
    bool any = false;
    for (int slot = first; slot < first + 3; slot++) {
        n += shape_of(m, slot).outputs * shape_of(m, slot).inputs;
        any |= from->weight[slot].tensor != NULL;
    }
    float *at = any ? mem_carve(c, kernel_pad(n), sizeof(float)) : NULL;
    for (int slot = first; slot < first + 3 && at; slot++) {
        to->at[slot] = at;
        at += shape_of(m, slot).outputs * shape_of(m, slot).inputs;
    }
}

/* The vectors of a layer, or its matrices. */
static void carve_layer(mem_carver *c, const model *m, const model_layer *from, bool matrices, cpu_layer *to) {
    carve_joint(c, m, from, matrices ? SLOT_Q : SLOT_Q_BIAS, to);
    for (int slot = 0; slot < SLOT_COUNT; slot++)
        if (from->weight[slot].tensor && (slot < SLOT_Q || slot > SLOT_V_BIAS) && is_matrix(m, slot) == matrices)
            to->at[slot] =
                mem_carve(c, kernel_pad(shape_of(m, slot).outputs * shape_of(m, slot).inputs), sizeof(float));
}

static size_t panel_floats(const model *m) {
    size_t most = TILE_COLS_MAX * (size_t)m->n_embd;
    for (int slot = 0; slot < SLOT_COUNT; slot++)
        if (is_matrix(m, slot) && CPU_STRIP_ROWS * shape_of(m, slot).inputs > most)
            most = CPU_STRIP_ROWS * shape_of(m, slot).inputs;
    return most;
}

/* Matrices come to lie at the same place for every layer: all are of one shape. */
static void carve(mem_carver *c, backend_state *s) {
    const model *m = s->m;
    size_t n_embd = (size_t)m->n_embd, threads = (size_t)pool_threads(s->p), matrices = 0;
    cpu_layer unplaced;
    s->layer = mem_carve(c, (size_t)m->n_layer, sizeof *s->layer);
    s->positions = m->positions.tensor ? mem_carve(c, (size_t)m->n_context * n_embd, sizeof(float)) : NULL;
    s->output_norm = mem_carve(c, kernel_pad(n_embd), sizeof(float));
    s->output_norm_bias = m->output_norm_bias.tensor ? mem_carve(c, kernel_pad(n_embd), sizeof(float)) : NULL;
    s->panel = mem_carve(c, threads, sizeof *s->panel);
    for (size_t i = 0; i < threads; i++) {
        float *panel = mem_carve(c, panel_floats(m), sizeof *panel);
        if (c->base) s->panel[i] = panel;
    }
    for (int32_t i = 0; i < m->n_layer; i++) {
        mem_carver shared = *c;
        carve_layer(&shared, m, &m->layer[i], true, c->base ? &s->layer[i] : &unplaced);
        if (shared.used > matrices) matrices = shared.used;
    }
    c->used = matrices;
    for (int32_t i = 0; i < m->n_layer; i++) carve_layer(c, m, &m->layer[i], false, c->base ? &s->layer[i] : &unplaced);
}

/* ---- what is read at once --------------------------------------------------------------------------------------- */

static int read_vectors(const backend_state *s, int32_t layer) {
    const model *m = s->m;
    for (int slot = 0; slot < SLOT_COUNT; slot++) {
        const model_weight *w = &m->layer[layer].weight[slot];
        if (!w->tensor) continue;
        if (is_matrix(m, slot)) TRY(tensor_check(w->tensor));
        else TRY(model_read(w, shape_of(m, slot).inputs, 0, 1, s->layer[layer].at[slot]));
    }
    return 0;
}

static int read_what_stays(const backend_state *s) {
    const model *m = s->m;
    size_t n_embd = (size_t)m->n_embd;
    TRY(tensor_check(m->embedding.tensor));
    TRY(tensor_check(m->output.tensor));
    if (s->positions) TRY(model_read(&m->positions, n_embd, 0, (size_t)m->n_context, s->positions));
    TRY(model_read(&m->output_norm, n_embd, 0, 1, s->output_norm));
    if (s->output_norm_bias) TRY(model_read(&m->output_norm_bias, n_embd, 0, 1, s->output_norm_bias));
    for (int32_t i = 0; i < m->n_layer; i++) TRY(read_vectors(s, i));
    return 0;
}

static int list_parts(backend_state *s) {
    size_t capacity = 0;
    for (int slot = 0; slot < SLOT_COUNT; slot++)
        for (size_t row = 0, rows = is_matrix(s->m, slot) ? shape_of(s->m, slot).outputs : 0; row < rows;
             row += ROWS_A_PART) {
            TRY(mem_grow((void **)&s->part, &capacity, s->n_parts + 1, sizeof *s->part, "weights"));
            size_t n = rows - row < ROWS_A_PART ? rows - row : ROWS_A_PART;
            s->part[s->n_parts++] = (cpu_part){(arch_slot)slot, row, n};
        }
    return 0;
}

int cpu_weights_new(backend_state *s) {
    mem_carver size = {0};
    carve(&size, s);
    say_more("weights in f32, a layer at a time: %.1f MiB", (double)size.used / (1 << 20));
    s->taken = -1;
    s->block = mem_new(size.used, 1, "weights");
    if (!s->block) return ERR_DATA;
    mem_carver c = {.base = s->block};
    carve(&c, s);
    TRY(list_parts(s));
    return read_what_stays(s);
}

void cpu_weights_free(backend_state *s) {
    mem_free(s->part);
    mem_free(s->block);
}

/* ---- what is read when it is needed ----------------------------------------------------------------------------- */

static int read_part(void *context, size_t task, int worker) {
    (void)worker;
    const backend_state *s = context;
    const cpu_part *p = &s->part[task];
    const model_weight *w = &s->m->layer[s->taken].weight[p->slot];
    size_t inputs = shape_of(s->m, p->slot).inputs;
    return w->tensor ? model_read(w, inputs, p->row0, p->n, s->layer[s->taken].at[p->slot] + p->row0 * inputs) : 0;
}

int cpu_take_layer(backend_state *s, int layer) {
    if (s->taken == layer) return 0;
    s->taken = layer;
    int code = pool_run(s->p, s->n_parts, read_part, s);
    if (code) s->taken = -1;
    return code;
}

cpu_matrix cpu_matrix_of(const model *m, int layer, arch_slot slot) {
    cpu_matrix w = {
        .weight = &m->layer[layer].weight[slot], .n = slot == SLOT_Q ? 3 : 1, .inputs = shape_of(m, slot).inputs};
    for (size_t i = 0; i < w.n; i++) w.outputs += w.part[i] = shape_of(m, (int)slot + (int)i).outputs;
    return w;
}

cpu_matrix cpu_output_matrix(const model *m) {
    size_t n_vocab = (size_t)m->n_vocab;
    return (cpu_matrix){&m->output, {n_vocab}, 1, n_vocab, (size_t)m->n_embd};
}

/* The rows as the file holds them, or NULL. */
static const float *as_they_lie(const model_weight *w, size_t inputs, size_t row0) {
    const tensor *t = w->tensor;
    const unsigned char *data = t->data;
    if (t->type != TENSOR_F32 || w->transposed || w->plus_one || t->dims[0] != inputs) return NULL;
    data += (w->row0 + row0) * inputs * sizeof(float);
    return (uintptr_t)data % sizeof(float) ? NULL : (const void *)data;
}

int cpu_rows(const cpu_matrix *w, size_t row0, size_t n, float *panel, const float **out) {
    size_t i = 0;
    while (row0 >= w->part[i]) row0 -= w->part[i++];
    *out = row0 + n <= w->part[i] ? as_they_lie(&w->weight[i], w->inputs, row0) : NULL;
    if (*out) return 0;
    *out = panel;
    for (; n; i++, row0 = 0) {
        size_t here = w->part[i] - row0 < n ? w->part[i] - row0 : n;
        TRY(model_read(&w->weight[i], w->inputs, row0, here, panel));
        panel += here * w->inputs;
        n -= here;
    }
    return 0;
}
