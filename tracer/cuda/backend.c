#include "base/err.h"
#include "base/mem.h"
#include "tracer/cuda/cuda.h"

#include <string.h>

static void unload(backend_state *s) {
    if (!s) return;
    cuda_weights_free(s);
    device_close(s->d);
    mem_free(s);
}

static int load(const model *m, pool *p, const backend_options *o, backend_state **out) {
    *out = NULL;
    TRY(cuda_check_model(m));
    backend_state *s = mem_new(1, sizeof *s, "model");
    if (!s) return ERR_DATA;
    *s = (backend_state){.m = m, .p = p, .type = strcmp(o->precision, "bf16") == 0 ? DTYPE_BF16 : DTYPE_F32};
    int code = device_open(o->device, &s->d);
    if (!code) code = cuda_weights_new(s, o);
    if (code) unload(s);
    else *out = s;
    return code;
}

static const char *name_of_device(const backend_state *s) {
    return device_name(s->d);
}

static const char *compute(const backend_state *s) {
    return s->type == DTYPE_BF16 ? "bf16" : "f32";
}

static backend_times times(backend_state *s) {
    return (backend_times){.compute = device_busy(s->d, STREAM_COMPUTE), .copy = device_busy(s->d, STREAM_COPY)};
}

const int kvlag_plugin_version = BACKEND_PLUGIN_VERSION;
const backend kvlag_cuda_backend = {.name = "cuda",
                                    .packs = true,
                                    .load = load,
                                    .unload = unload,
                                    .device = name_of_device,
                                    .compute = compute,
                                    .times = times,
                                    .forward = cuda_forward,
                                    .forward_backward = cuda_forward_backward,
                                    .project = cuda_project,
                                    .steps_new = cuda_steps_new,
                                    .steps_free = cuda_steps_free,
                                    .steps_next = cuda_steps_next,
                                    .steps_forget = cuda_steps_forget};
