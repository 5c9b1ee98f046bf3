/* Which backend computes: the CPU's, which is part of kvlag, or CUDA's, a shared object loaded on request, so that
 * kvlag runs where no CUDA is installed. */
#pragma once

#include "base/options.h"
#include "tracer/backend.h"

/* What the command line says. */
typedef struct plugin_choice {
    const char *backend; /* "auto", "cpu", "cuda" */
    backend_options options;
} plugin_choice;

/* A choice before its options are parsed, and its rows of a command's table: what can change results is recorded. */
/* clang-format off */
#define PLUGIN_CHOICE {.backend = "auto", .options = {.device = "", .precision = "f32", .weights = "auto"}}
#define PLUGIN_OPTIONS(c)                                                                                             \
    {"backend", 0, OPT_CHOICE, true, &(c).backend, "auto|cpu|cuda",                                                   \
     "what computes (auto: cuda where it can, else cpu)", 0, 0},                                                      \
    {"device", 0, OPT_TEXT, false, &(c).options.device, "N", "CUDA device (default: the first visible one)", 0, 0},   \
    {"precision", 0, OPT_CHOICE, true, &(c).options.precision, "f32|bf16",                                            \
     "of what matrix products take in (default f32)", 0, 0},                                                          \
    {"weights", 0, OPT_CHOICE, false, &(c).options.weights, "auto|dense|blocks",                                      \
     "in memory: dequantised, or as they stand in the file (auto: dense on cuda, blocks on cpu)", 0, 0},              \
    {"offload", 0, OPT_FLAG, false, &(c).options.offload, NULL,                                                       \
     "keep the layers in host memory, for models that exceed the device's", 0, 0}
/* clang-format on */

/* The backend of a name. CUDA's is kvlag-cuda.so: the file that the variable KVLAG_CUDA_PLUGIN names, else beside the
 * executable, else in ../lib/kvlag from there. It must hold `const backend kvlag_cuda_backend` and `const int
 * kvlag_plugin_version`, equal to BACKEND_PLUGIN_VERSION. "cuda" without it is an error; "auto" then takes the CPU, and
 * says why where the file is there. */
int plugin_backend(const char *name, const backend **out);

/* Load the model into the backend that was chosen. Where that fails and the choice was "auto", *b becomes the CPU
 * backend, with a note. *b and *out are 0 or match. */
int plugin_load(const plugin_choice *c, const backend **b, const model *m, pool *p, backend_state **out);
