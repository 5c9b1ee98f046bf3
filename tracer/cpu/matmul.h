/* Matrix products in tiles. A tile's size follows from the shape of the product alone, never from the number of
 * threads, so results do not depend on it; OpenBLAS itself runs single-threaded. */
#pragma once

#include <stddef.h>

/* A rows x cols result cut into tiles, numbered row tile by row tile. */
typedef struct tile_grid {
    size_t rows, cols, tile_rows, tile_cols, across; /* across: tiles side by side */
} tile_grid;
typedef struct tile {
    size_t row, n_rows, col, n_cols;
} tile;

enum { TILE_COLS_MAX = 1536 };

/* Tiles of 256 rows, as wide as leaves some sixteen of them, cut at multiples of `quantum` columns (a divisor of
 * TILE_COLS_MAX, where no tile may be wider than that). */
tile_grid tile_grid_new(size_t rows, size_t cols, size_t quantum);
size_t tile_grid_count(const tile_grid *g);
tile tile_grid_at(const tile_grid *g, size_t index);

/* out[r][c] = (accumulate ? out[r][c] : 0) + sum over i < inner of a[r][i] * w[c][i]: a product with a weight matrix
 * stored [outputs][inputs]. `lda`, `ldw`, `ldo` are row strides. */
void matmul_weight(size_t rows, size_t cols, size_t inner, const float *a, size_t lda, const float *w, size_t ldw,
                   int accumulate, float *out, size_t ldo);

/* out[r][c] = (accumulate ? out[r][c] : 0) + sum over i < inner of a[r][i] * w[i][c]: a gradient going back through
 * the product with a weight matrix, from its outputs to its inputs. */
void matmul_weight_back(size_t rows, size_t cols, size_t inner, const float *a, size_t lda, const float *w, size_t ldw,
                        int accumulate, float *out, size_t ldo);

/* Make OpenBLAS single-threaded and compare one product with plain loops: some old OpenBLAS kernels compute wrongly on
 * new processors. Returns 0, or ERR_DATA naming OPENBLAS_CORETYPE. */
int matmul_start(void);
