/* FILE.blocks.h5: beside every results CSV, row r for its r-th data row (DESIGN section 8): sums over 64 blocks of
 * steps for the bootstrap, and per-head values for heat maps.
 *
 *     lost_mass, first   f64 [rows, 64]           steps   i32 [rows, 64]
 *     fisher             f64 [rows, S, 64]
 *     head_lost_mass, head_first, head_fisher     f32 [rows, n_layer, n_head]
 *
 * Datasets of metrics that were not computed are absent. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { BLOCKS_PER_ROW = 64 };

/* "streaming.csv" -> "streaming.blocks.h5". Owned by the caller; NULL on failure. */
char *blocks_path(const char *csv_path);

typedef struct blocks_row {
    const double *lost_mass;     /* [64] sum over the block's counted steps of the mean over layers and heads */
    const int32_t *steps;        /* [64] counted steps in the block */
    const double *first;         /* [64] or NULL */
    const double *fisher;        /* [S][64] or NULL */
    const float *head_lost_mass; /* [n_layer][n_head] mean over counted steps */
    const float *head_first;     /* [n_layer][n_head] or NULL */
    const float *head_fisher;    /* [n_layer][n_head] or NULL */
} blocks_row;

typedef struct blocks_writer blocks_writer;

/* Rows of traces of different shape in one call: n_layer and n_head are the largest; the rest is NaN. */
int blocks_writer_new(const char *path, bool force, size_t rows, int n_layer, int n_head, int n_fisher, bool has_first,
                      blocks_writer **out);
int blocks_write_row(blocks_writer *w, size_t row, int n_layer, int n_head, const blocks_row *r);
int blocks_writer_finish(blocks_writer *w); /* frees w either way */
void blocks_writer_abort(blocks_writer *w);

/* A whole file in memory, as above; NULL where a dataset is absent. */
typedef struct blocks_data {
    size_t rows;
    int n_layer, n_head, n_fisher; /* n_fisher 0: no dataset fisher */
    double *lost_mass, *first, *fisher;
    int32_t *steps;
    float *head_lost_mass, *head_first, *head_fisher;
} blocks_data;

/* Refuses by name what is no blocks file and datasets that do not fit each other. Release with blocks_free either way.
 */
int blocks_read(const char *path, blocks_data *out);
blocks_row blocks_get_row(const blocks_data *b, size_t row); /* points into b */
void blocks_free(blocks_data *b);
