#include "tracer/cpu/matmul.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/rng.h"

#include <cblas.h>
#include <math.h>

enum { TILE_ROWS = 256, WANTED_TILES = 16, NARROWEST = 288 };

static size_t divide_up(size_t a, size_t b) {
    return (a + b - 1) / b;
}

tile_grid tile_grid_new(size_t rows, size_t cols, size_t quantum) {
    /* Every tile packs its operands anew, so wide tiles waste less: 256 x 96 runs at 80 % of 256 x 576. */
    size_t down = divide_up(rows, TILE_ROWS), across = divide_up(WANTED_TILES, down);
    if (across > cols / NARROWEST) across = cols / NARROWEST;
    if (across < divide_up(cols, TILE_COLS_MAX)) across = divide_up(cols, TILE_COLS_MAX);
    size_t width = divide_up(divide_up(cols, across), quantum) * quantum;
    return (tile_grid){rows, cols, TILE_ROWS, width, divide_up(cols, width)};
}

size_t tile_grid_count(const tile_grid *g) {
    return divide_up(g->rows, g->tile_rows) * g->across;
}

tile tile_grid_at(const tile_grid *g, size_t index) {
    tile t = {.row = index / g->across * g->tile_rows, .col = index % g->across * g->tile_cols};
    t.n_rows = g->rows - t.row < g->tile_rows ? g->rows - t.row : g->tile_rows;
    t.n_cols = g->cols - t.col < g->tile_cols ? g->cols - t.col : g->tile_cols;
    return t;
}

void matmul_weight(size_t rows, size_t cols, size_t inner, const float *a, size_t lda, const float *w, size_t ldw,
                   int accumulate, float *out, size_t ldo) {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (blasint)rows, (blasint)cols, (blasint)inner, 1.0f, a,
                (blasint)lda, w, (blasint)ldw, accumulate ? 1.0f : 0.0f, out, (blasint)ldo);
}

void matmul_weight_back(size_t rows, size_t cols, size_t inner, const float *a, size_t lda, const float *w, size_t ldw,
                        int accumulate, float *out, size_t ldo) {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (blasint)rows, (blasint)cols, (blasint)inner, 1.0f, a,
                (blasint)lda, w, (blasint)ldw, accumulate ? 1.0f : 0.0f, out, (blasint)ldo);
}

/* Shapes with remainders in every direction, large enough for the blocked kernels. */
enum { CHECK_ROWS = 133, CHECK_COLS = 301, CHECK_INNER = 515 };

static double worst_error(const float *a, const float *w, const float *out) {
    double worst = 0;
    for (size_t r = 0; r < CHECK_ROWS; r++)
        for (size_t c = 0; c < CHECK_COLS; c++) {
            double sum = 1;
            for (size_t i = 0; i < CHECK_INNER; i++)
                sum += (double)a[r * CHECK_INNER + i] * (double)w[c * CHECK_INNER + i];
            double error = fabs(sum - (double)out[r * CHECK_COLS + c]);
            if (!(error <= worst)) worst = error;
        }
    return worst;
}

int matmul_start(void) {
    openblas_set_num_threads(1);
    size_t n_a = CHECK_ROWS * CHECK_INNER, n_w = CHECK_COLS * CHECK_INNER, n_out = CHECK_ROWS * CHECK_COLS;
    float *a = mem_new(n_a + n_w + n_out, sizeof *a, "sgemm check");
    if (!a) return ERR_DATA;
    float *w = a + n_a, *out = w + n_w;
    for (size_t i = 0; i < n_a + n_w; i++) a[i] = (float)rng_uniform(rng_philox(1, (uint32_t)i, 0, 0, 0).v[0]) - 0.5f;
    for (size_t i = 0; i < n_out; i++) out[i] = 1;
    matmul_weight(CHECK_ROWS, CHECK_COLS, CHECK_INNER, a, CHECK_INNER, w, CHECK_INNER, 1, out, CHECK_COLS);
    double worst = worst_error(a, w, out);
    mem_free(a);
    if (worst <= 1e-4) return 0;
    return err_set(
        ERR_DATA,
        "OpenBLAS (kernel '%s') computes matrix products wrongly on this processor (error %.3g): set another "
        "kernel in the environment, such as OPENBLAS_CORETYPE=Haswell, and try again",
        openblas_get_corename(), worst);
}
