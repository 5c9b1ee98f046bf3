/* The elementwise parts of a layer, on f32 rows: 64-byte aligned, padded to a multiple of 16 (kernel_pad), with zeros
 * behind the last element. */
#pragma once

#include "tracer/arch.h"

#include <stddef.h>
#include <stdint.h>

/* out = x / sqrt(mean(x^2) + eps) * weight (RMSNorm, Zhang and Sennrich 2019). weight is padded too. */
void rows_rms_norm(const float *x, const float *weight, size_t n, float eps, float *out);

/* up = up * gate * sigmoid(gate), in place on `up`. */
void rows_silu_gate(const float *gate, float *up, size_t n);

/* Cosine and sine of pos * base^(-2i/dims) for i < dims/2: table[2i] and table[2i+1]. Computed in f64. */
void rows_rope_angles(int32_t position, int32_t dims, double base, float *table);

/* Turn the first `dims` dimensions of n_head heads, head_dim apart, by one position's table. No alignment needed. */
void rows_rope(float *heads, int n_head, int32_t head_dim, int32_t dims, arch_rope kind, const float *table);
