/* The elementwise parts of a layer, on f32 rows: 64-byte aligned, padded to a multiple of 16 (kernel_pad), with zeros
 * behind the last element. */
#pragma once

#include "tracer/arch.h"

#include <stddef.h>
#include <stdint.h>

/* out = x / sqrt(mean(x^2) + eps) * weight (RMSNorm, Zhang and Sennrich 2019). weight is padded too. */
void rows_rms_norm(const float *x, const float *weight, size_t n, float eps, float *out);

/* A gradient on its way back through rows_rms_norm: d_x += d_out * d(out)/d(x). d_out becomes d_out * weight. */
void rows_rms_norm_back(const float *x, const float *weight, size_t n, float eps, float *d_out, float *d_x);

/* up = up * gate * sigmoid(gate), in place on `up`. */
void rows_silu_gate(const float *gate, float *up, size_t n);

/* The slopes of out = up * gate * sigmoid(gate): `gate` becomes d(out)/d(up), `up` becomes d(out)/d(gate). */
void rows_silu_gate_slopes(float *gate, float *up, size_t n);

/* d_up, which holds the gradient of `out`, becomes that of `up`; d_gate that of `gate`. */
void rows_silu_gate_back(const float *slope_up, const float *slope_gate, float *d_up, float *d_gate, size_t n);

/* Cosine and sine of position * inverse[i], both times `scale`, for i < dims/2: table[2i] and table[2i+1]. Computed in
 * f64. */
void rows_rope_angles(int32_t position, int32_t dims, const double *inverse, double scale, float *table);

/* Turn the first `dims` dimensions of n_head heads, head_dim apart, by one position's table. No alignment needed. */
void rows_rope(float *heads, int n_head, int32_t head_dim, int32_t dims, arch_rope kind, const float *table);

/* Turn them the other way: the inverse, and a gradient's way back. */
void rows_rope_back(float *heads, int n_head, int32_t head_dim, int32_t dims, arch_rope kind, const float *table);
