/* The elementwise parts of a layer, on f32 rows: 64-byte aligned, padded to a multiple of 16 (kernel_pad), with zeros
 * behind the last element. */
#pragma once

#include "tracer/arch.h"

#include <stddef.h>
#include <stdint.h>

/* out = norm(x), see arch_norm. weight and bias are padded too; bias NULL: none. out may be x. */
void rows_norm(arch_norm kind, const float *x, const float *weight, const float *bias, size_t n, float eps, float *out);

/* A gradient on its way back through rows_norm: d_x += d_out * d(out)/d(x). d_out becomes d_out * weight. */
void rows_norm_back(arch_norm kind, const float *x, const float *weight, size_t n, float eps, float *d_out, float *d_x);

/* RMS norm in place on n values of any alignment, with nothing behind them that is ours: heads. And a gradient on its
 * way back, in place on d; x is what the norm was given. */
void rows_head_norm(float *x, const float *weight, size_t n, float eps);
void rows_head_norm_back(const float *x, const float *weight, size_t n, float eps, float *d);

/* up = up * activation(gate), in place on `up`. */
void rows_gate(arch_activation kind, const float *gate, float *up, size_t n);

/* The slopes of out = up * activation(gate): `gate` becomes d(out)/d(up), `up` becomes d(out)/d(gate). */
void rows_gate_slopes(arch_activation kind, float *gate, float *up, size_t n);

/* d_up, which holds the gradient of `out`, becomes that of `up`; d_gate that of `gate`. */
void rows_gate_back(const float *slope_up, const float *slope_gate, float *d_up, float *d_gate, size_t n);

/* x = cap * tanh(x / cap), in place; what is not finite becomes NaN. And p *= 1 - (capped / cap)^2, the slope of it. */
void rows_softcap(float *x, size_t n, float cap);
void rows_softcap_slope(const float *capped, size_t n, float cap, float *p);

/* Cosine and sine of position * inverse[i], both times `scale`, for i < dims/2: table[2i] and table[2i+1]. Computed in
 * f64. */
void rows_rope_angles(int32_t position, int32_t dims, const double *inverse, double scale, float *table);

/* Turn the first `dims` dimensions of n_head heads, head_dim apart, by one position's table. No alignment needed. */
void rows_rope(float *heads, int n_head, int32_t head_dim, int32_t dims, arch_rope kind, const float *table);

/* Turn them the other way: the inverse where the table has no scale, and a gradient's way back in any case. */
void rows_rope_back(float *heads, int n_head, int32_t head_dim, int32_t dims, arch_rope kind, const float *table);
