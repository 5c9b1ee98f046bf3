#include "base/err.h"
#include "base/mem.h"
#include "tracer/cpu/cpu.h"
#include "tracer/cpu/matmul.h"
#include "tracer/cpu/step.h"
#include "traces/kernels.h"

#include <cblas.h>
#include <stdio.h>
#include <string.h>

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
    if (strcmp(o->weights, "dense") == 0)
        return err_set(ERR_USAGE, "--weights dense: the CPU backend leaves its weights in the file (blocks)");
    return o->offload ? err_set(ERR_USAGE, "--offload: the CPU backend has its weights in host memory already") : 0;
}

static void unload(backend_state *s) {
    if (!s) return;
    cpu_weights_free(s);
    mem_free(s);
}

static int load(const model *m, pool *p, const backend_options *o, backend_state **out) {
    *out = NULL;
    TRY(check_options(o));
    TRY(matmul_start());
    backend_state *s = mem_new(1, sizeof *s, "model");
    if (!s) return ERR_DATA;
    *s = (backend_state){.m = m, .p = p};
    name_device(s);
    int code = cpu_weights_new(s);
    if (code) unload(s);
    else *out = s;
    return code;
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

const backend_options cpu_options = {.device = "", .precision = "f32", .weights = "auto"};

const backend cpu_backend = {.name = "cpu",
                             .load = load,
                             .unload = unload,
                             .device = device,
                             .compute = compute,
                             .times = times,
                             .forward = cpu_forward,
                             .forward_backward = cpu_forward_backward,
                             .project = cpu_project,
                             .steps_new = cpu_steps_new,
                             .steps_free = cpu_steps_free,
                             .steps_next = cpu_steps_next,
                             .steps_fill = cpu_steps_fill,
                             .steps_forget = cpu_steps_forget};
