#include "base/err.h"
#include "base/mem.h"
#include "base/progress.h"
#include "tracer/cpu/cpu.h"
#include "tracer/cpu/matmul.h"
#include "tracer/cpu/step.h"
#include "traces/kernels.h"

#include <cblas.h>
#include <stdio.h>
#include <string.h>

/* A few rows of one tensor on their way to f32: one task of loading. */
typedef struct load_job {
    const model_weight *weight;
    size_t inputs, row0, n_rows;
    float *to;
} load_job;

typedef struct loader {
    load_job *job;
    size_t n, capacity;
} loader;

enum { ROWS_A_JOB = 512 };

/* A transposed weight is one job: every part of it would read the whole tensor. */
static int add_jobs(loader *l, const model_weight *w, size_t outputs, size_t inputs, float *to) {
    size_t most = w->transposed ? outputs : ROWS_A_JOB;
    for (size_t row = 0; row < outputs; row += most) {
        TRY(mem_grow((void **)&l->job, &l->capacity, l->n + 1, sizeof *l->job, "weights"));
        size_t left = outputs - row;
        l->job[l->n++] = (load_job){w, inputs, row, left < most ? left : most, to + row * inputs};
    }
    return 0;
}

static int run_job(void *context, size_t task, int worker) {
    (void)worker;
    const loader *l = context;
    const load_job *j = &l->job[task];
    return model_read(j->weight, j->inputs, j->row0, j->n_rows, j->to);
}

/* Vectors are padded for the row operations. */
static float *carve_vector(mem_carver *c, const model_weight *w, size_t n) {
    return w->tensor ? mem_carve(c, kernel_pad(n), sizeof(float)) : NULL;
}

static size_t values_of(const model *m, int slot) {
    int64_t outputs, inputs;
    model_slot_shape(m, (arch_slot)slot, &outputs, &inputs);
    return (size_t)outputs * (size_t)inputs;
}

/* q, k and v, or their biases: no gap between them. */
static void carve_joint(mem_carver *c, const model *m, const model_layer *from, int first, cpu_layer *to) {
    size_t n = 0;
    bool any = false;
    for (int slot = first; slot < first + 3; slot++) {
        n += values_of(m, slot);
        any |= from->weight[slot].tensor != NULL;
    }
    float *at = any ? mem_carve(c, kernel_pad(n), sizeof(float)) : NULL;
    for (int slot = first; slot < first + 3 && at; slot++) {
        to->at[slot] = at;
        at += values_of(m, slot);
    }
}

static void carve_layer(mem_carver *c, const model *m, const model_layer *from, cpu_layer *to) {
    carve_joint(c, m, from, SLOT_Q, to);
    carve_joint(c, m, from, SLOT_Q_BIAS, to);
    for (int slot = 0; slot < SLOT_COUNT; slot++)
        if (from->weight[slot].tensor && (slot < SLOT_Q || slot > SLOT_V_BIAS))
            to->at[slot] = mem_carve(c, kernel_pad(values_of(m, slot)), sizeof(float));
}
_Static_assert(SLOT_V == SLOT_Q + 2 && SLOT_Q_BIAS == SLOT_V + 1 && SLOT_V_BIAS == SLOT_Q_BIAS + 2,
               "q, k, v and their biases are neighbours");

static void carve_weights(mem_carver *c, backend_state *s) {
    const model *m = s->m;
    size_t n_embd = (size_t)m->n_embd, table = (size_t)m->n_vocab * n_embd;
    s->layer = mem_carve(c, (size_t)m->n_layer, sizeof *s->layer);
    s->embedding = mem_carve(c, table, sizeof(float));
    s->positions = m->positions.tensor ? mem_carve(c, (size_t)m->n_context * n_embd, sizeof(float)) : NULL;
    s->output_norm = carve_vector(c, &m->output_norm, n_embd);
    s->output_norm_bias = carve_vector(c, &m->output_norm_bias, n_embd);
    s->output = m->output.tensor == m->embedding.tensor ? s->embedding : mem_carve(c, table, sizeof(float));
    cpu_layer unplaced;
    for (int32_t i = 0; i < m->n_layer; i++) carve_layer(c, m, &m->layer[i], c->base ? &s->layer[i] : &unplaced);
}

static int list_layer(loader *l, const model *m, const model_layer *from, const cpu_layer *to) {
    for (int slot = 0; slot < SLOT_COUNT; slot++) {
        int64_t outputs, inputs;
        model_slot_shape(m, (arch_slot)slot, &outputs, &inputs);
        if (from->weight[slot].tensor)
            TRY(add_jobs(l, &from->weight[slot], (size_t)outputs, (size_t)inputs, to->at[slot]));
    }
    return 0;
}

static int list_weights(loader *l, const backend_state *s) {
    const model *m = s->m;
    size_t n_embd = (size_t)m->n_embd, n_vocab = (size_t)m->n_vocab;
    TRY(add_jobs(l, &m->embedding, n_vocab, n_embd, s->embedding));
    if (s->positions) TRY(add_jobs(l, &m->positions, (size_t)m->n_context, n_embd, s->positions));
    TRY(add_jobs(l, &m->output_norm, 1, n_embd, s->output_norm));
    if (s->output_norm_bias) TRY(add_jobs(l, &m->output_norm_bias, 1, n_embd, s->output_norm_bias));
    if (s->output != s->embedding) TRY(add_jobs(l, &m->output, n_vocab, n_embd, s->output));
    for (int32_t i = 0; i < m->n_layer; i++) TRY(list_layer(l, m, &m->layer[i], &s->layer[i]));
    return 0;
}

static int load_weights(backend_state *s) {
    mem_carver size = {0};
    carve_weights(&size, s);
    say_more("weights in f32: %.1f MiB", (double)size.used / (1 << 20));
    s->block = mem_new(size.used, 1, "weights");
    if (!s->block) return ERR_DATA;
    mem_carver c = {.base = s->block};
    carve_weights(&c, s);
    loader l = {0};
    int code = list_weights(&l, s);
    if (!code) code = pool_run(s->p, l.n, run_job, &l);
    mem_free(l.job);
    return code;
}

/* "Intel(R) Xeon(R) ... (OpenBLAS SkylakeX)": the kernel decides the order of sums, so it belongs to the name. */
static void name_device(backend_state *s) {
    char line[256], processor[100] = "unknown processor";
    FILE *f = fopen("/proc/cpuinfo", "r");
    while (f && fgets(line, sizeof line, f)) {
        if (strncmp(line, "model name", 10) != 0 || !strchr(line, ':')) continue;
        const char *name = strchr(line, ':') + 1;
        name += strspn(name, " \t");
        snprintf(processor, sizeof processor, "%.*s", (int)strcspn(name, "\n"), name);
        break;
    }
    if (f) fclose(f);
    snprintf(s->device, sizeof s->device, "%s (OpenBLAS %s, %s)", processor, openblas_get_corename(), kernels()->name);
}

static int check_options(const backend_options *o) {
    if (*o->device) return err_set(ERR_USAGE, "--device %s: the CPU backend knows no devices", o->device);
    if (strcmp(o->precision, cpu_options.precision) != 0)
        return err_set(ERR_USAGE, "--precision %s: the CPU backend computes in f32", o->precision);
    if (strcmp(o->weights, cpu_options.weights) != 0)
        return err_set(ERR_USAGE, "--weights %s: the CPU backend keeps its weights dequantised (dense)", o->weights);
    return o->offload ? err_set(ERR_USAGE, "--offload: the CPU backend has its weights in host memory already") : 0;
}

int cpu_load(const model *m, pool *p, const backend_options *o, backend_state **out) {
    *out = NULL;
    TRY(check_options(o));
    TRY(matmul_start());
    backend_state *s = mem_new(1, sizeof *s, "model");
    if (!s) return ERR_DATA;
    s->m = m;
    s->p = p;
    name_device(s);
    int code = load_weights(s);
    if (code) cpu_unload(s);
    else *out = s;
    return code;
}

void cpu_unload(backend_state *s) {
    if (!s) return;
    mem_free(s->block);
    mem_free(s);
}

static const char *device(const backend_state *s) {
    return s->device;
}

static const char *compute(const backend_state *s) {
    (void)s;
    return cpu_options.precision;
}

static backend_times times(backend_state *s) {
    (void)s;
    return (backend_times){0};
}

const backend_options cpu_options = {.device = "", .precision = "f32", .weights = "dense"};

const backend cpu_backend = {.name = "cpu",
                             .load = cpu_load,
                             .unload = cpu_unload,
                             .device = device,
                             .compute = compute,
                             .times = times,
                             .forward = cpu_forward,
                             .forward_backward = cpu_forward_backward,
                             .project = cpu_project,
                             .steps_new = cpu_steps_new,
                             .steps_free = cpu_steps_free,
                             .steps_next = cpu_steps_next,
                             .steps_forget = cpu_steps_forget};
