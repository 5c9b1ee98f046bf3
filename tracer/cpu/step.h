/* Copies of the model side by side, token by token (backend.steps_*), and logits of single rows (backend.project).
 *
 * A step reads each weight matrix once for all copies. Products run on groups of a fixed number of rows, so that the
 * bits of a copy do not depend on how many others there are. */
#pragma once

#include "tracer/cpu/cpu.h"

int cpu_project(backend_state *s, const float *hidden, size_t n, size_t stride, float *out, size_t stride_out);

int cpu_steps_new(backend_state *s, size_t n, const bool *wants_rows, int32_t n_tokens, backend_steps **out);
void cpu_steps_free(backend_steps *steps);
int cpu_steps_next(backend_steps *steps, int32_t token, step_view *out);
int cpu_steps_fill(backend_steps *steps, const int32_t *tokens, int32_t n);
void cpu_steps_forget(backend_steps *steps, size_t copy, int layer, int kv_head, const int32_t *evict_at);
