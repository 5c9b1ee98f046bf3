/* What queries and keys go through between their product and attention: norms and rotation. A row is q | k | v of one
 * token. */
#pragma once

#include "tracer/cpu/cpu.h"

/* Values of q and k in a row, which norms and rotation concern. */
size_t heads_turned(const model *m);

/* Angles of positions t0 .. t0+n-1 by every RoPE of the model: [n_rope][n][rope_dims]. */
void heads_angles(const model *m, int32_t t0, size_t n, float *angles);

/* Those of one layer: position t0 + t, of tables for n positions. NULL: the layer does not turn. */
const float *heads_angles_of(const model *m, int layer, const float *angles, size_t n, size_t t);

/* The layer's norms of q and k, in place; and a gradient's way back, `raw` being q and k before. Nothing happens where
 * the architecture has none. */
void heads_norm(const backend_state *s, int layer, float *row);
void heads_norm_back(const backend_state *s, int layer, const float *raw, float *d_row);

/* Turn n_head neighbouring heads; angles NULL: nothing happens. */
void heads_turn(const model *m, float *heads, int n_head, const float *angles);
void heads_turn_back(const model *m, float *heads, int n_head, const float *angles);
