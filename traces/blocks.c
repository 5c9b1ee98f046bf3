#include "traces/blocks.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/outfile.h"
#include "base/text.h"
#include "traces/hdf.h"

#include <math.h>
#include <string.h>

enum { BLOCKS_VERSION = 1 };

char *blocks_path(const char *csv_path) {
    size_t n = strlen(csv_path);
    if (n > 4 && strcmp(csv_path + n - 4, ".csv") == 0) n -= 4;
    text t = {0};
    return text_add_bytes(&t, csv_path, n) || text_add(&t, ".blocks.h5") ? NULL : t.data;
}

/* ---- writing ---------------------------------------------------------------------------------------------------- */

/* Rows are kept in memory and written by finish, so that the file does not depend on the order of the calls. */
struct blocks_writer {
    outfile file;
    size_t rows, n_layer, n_head, n_fisher;
    double *lost_mass, *first, *fisher;
    int32_t *steps;
    float *head_lost_mass, *head_first, *head_fisher;
};

static float *new_heads(const blocks_writer *w, const char *what) {
    size_t n = w->rows * w->n_layer * w->n_head;
    float *x = mem_new(n, sizeof *x, what);
    for (size_t i = 0; x && i < n; i++) x[i] = NAN;
    return x;
}

static int allocate(blocks_writer *w, bool has_first) {
    size_t blocks = w->rows * BLOCKS_PER_ROW;
    w->lost_mass = mem_new(blocks, sizeof *w->lost_mass, "blocks");
    w->steps = mem_new(blocks, sizeof *w->steps, "blocks");
    w->head_lost_mass = new_heads(w, "values per head");
    if (!w->lost_mass || !w->steps || !w->head_lost_mass) return ERR_DATA;
    if (has_first) {
        w->first = mem_new(blocks, sizeof *w->first, "blocks");
        w->head_first = new_heads(w, "values per head");
        if (!w->first || !w->head_first) return ERR_DATA;
    }
    if (w->n_fisher) {
        w->fisher = mem_new(blocks * w->n_fisher, sizeof *w->fisher, "blocks");
        w->head_fisher = new_heads(w, "values per head");
        if (!w->fisher || !w->head_fisher) return ERR_DATA;
    }
    return 0;
}

int blocks_writer_new(const char *path, bool force, size_t rows, int n_layer, int n_head, int n_fisher, bool has_first,
                      blocks_writer **out) {
    *out = NULL;
    blocks_writer *w = mem_new(1, sizeof *w, "blocks writer");
    if (!w) return ERR_DATA;
    w->rows = rows;
    w->n_layer = (size_t)n_layer;
    w->n_head = (size_t)n_head;
    w->n_fisher = (size_t)n_fisher;
    int code = outfile_begin(&w->file, path, force, NULL, 0);
    if (!code) code = allocate(w, has_first);
    if (code) blocks_writer_abort(w);
    else *out = w;
    return code;
}

static void set_heads(const blocks_writer *w, float *to, size_t row, int n_layer, int n_head, const float *from) {
    if (!to || !from) return;
    to += row * w->n_layer * w->n_head;
    for (size_t l = 0; l < (size_t)n_layer; l++)
        memcpy(to + l * w->n_head, from + l * (size_t)n_head, (size_t)n_head * sizeof *to);
}

int blocks_write_row(blocks_writer *w, size_t row, int n_layer, int n_head, const blocks_row *r) {
    if (row >= w->rows || (size_t)n_layer > w->n_layer || (size_t)n_head > w->n_head)
        return err_set(ERR_DATA, "internal error: blocks row %zu of %zu", row, w->rows);
    size_t at = row * BLOCKS_PER_ROW, bytes = BLOCKS_PER_ROW * sizeof(double);
    memcpy(w->lost_mass + at, r->lost_mass, bytes);
    memcpy(w->steps + at, r->steps, BLOCKS_PER_ROW * sizeof *r->steps);
    if (w->first && r->first) memcpy(w->first + at, r->first, bytes);
    if (w->fisher && r->fisher) memcpy(w->fisher + at * w->n_fisher, r->fisher, bytes * w->n_fisher);
    set_heads(w, w->head_lost_mass, row, n_layer, n_head, r->head_lost_mass);
    set_heads(w, w->head_first, row, n_layer, n_head, r->head_first);
    set_heads(w, w->head_fisher, row, n_layer, n_head, r->head_fisher);
    return 0;
}

static int write_all(const blocks_writer *w, hid_t h5) {
    hsize_t block[2] = {w->rows, BLOCKS_PER_ROW}, sample[3] = {w->rows, w->n_fisher, BLOCKS_PER_ROW};
    hsize_t head[3] = {w->rows, w->n_layer, w->n_head};
    TRY(hdf_put_text(h5, "format", "kvlag-blocks"));
    TRY(hdf_put_int(h5, "version", BLOCKS_VERSION));
    TRY(hdf_write_all(h5, "lost_mass", H5T_IEEE_F64LE, 2, block, w->lost_mass));
    TRY(hdf_write_all(h5, "steps", H5T_STD_I32LE, 2, block, w->steps));
    TRY(hdf_write_all(h5, "head_lost_mass", H5T_IEEE_F32LE, 3, head, w->head_lost_mass));
    if (w->first) {
        TRY(hdf_write_all(h5, "first", H5T_IEEE_F64LE, 2, block, w->first));
        TRY(hdf_write_all(h5, "head_first", H5T_IEEE_F32LE, 3, head, w->head_first));
    }
    if (w->fisher) {
        TRY(hdf_write_all(h5, "fisher", H5T_IEEE_F64LE, 3, sample, w->fisher));
        TRY(hdf_write_all(h5, "head_fisher", H5T_IEEE_F32LE, 3, head, w->head_fisher));
    }
    return 0;
}

static int write_file(const blocks_writer *w) {
    hid_t h5;
    TRY(hdf_create(w->file.temp, &h5));
    int code = write_all(w, h5);
    if (!code) return hdf_finish(h5);
    H5Fclose(h5);
    return code;
}

int blocks_writer_finish(blocks_writer *w) {
    int code = write_file(w);
    if (code) err_prefix(code, "%s", w->file.path);
    else code = outfile_commit(&w->file);
    blocks_writer_abort(w);
    return code;
}

void blocks_writer_abort(blocks_writer *w) {
    if (!w) return;
    outfile_abort(&w->file);
    void *array[] = {w->lost_mass, w->first, w->fisher, w->steps, w->head_lost_mass, w->head_first, w->head_fisher};
    for (size_t i = 0; i < sizeof array / sizeof *array; i++) mem_free(array[i]);
    mem_free(w);
}

/* ---- reading ---------------------------------------------------------------------------------------------------- */

static int read_numbers(hid_t h5, const char *name, int rank, int64_t *dims, double **out) {
    return hdf_has(h5, name) ? hdf_read_all(h5, name, HDF_FLOAT, H5T_NATIVE_DOUBLE, rank, dims, (void **)out) : 0;
}

static int read_heads(hid_t h5, const char *name, int64_t dims[3], float **out) {
    return hdf_has(h5, name) ? hdf_read_all(h5, name, HDF_FLOAT, H5T_NATIVE_FLOAT, 3, dims, (void **)out) : 0;
}

static int read_datasets(hid_t h5, blocks_data *b) {
    int64_t block[2] = {-1, BLOCKS_PER_ROW}, head[3] = {-1, -1, -1};
    TRY(hdf_check_format(h5, "kvlag-blocks", BLOCKS_VERSION));
    TRY(hdf_read_all(h5, "lost_mass", HDF_FLOAT, H5T_NATIVE_DOUBLE, 2, block, (void **)&b->lost_mass));
    TRY(hdf_read_all(h5, "steps", HDF_INTEGER, H5T_NATIVE_INT32, 2, block, (void **)&b->steps));
    head[0] = block[0];
    TRY(hdf_read_all(h5, "head_lost_mass", HDF_FLOAT, H5T_NATIVE_FLOAT, 3, head, (void **)&b->head_lost_mass));
    if (head[1] > INT32_MAX || head[2] > INT32_MAX) return err_set(ERR_DATA, "head_lost_mass: too large");
    TRY(read_numbers(h5, "first", 2, block, &b->first));
    TRY(read_heads(h5, "head_first", head, &b->head_first));
    int64_t sample[3] = {block[0], -1, BLOCKS_PER_ROW};
    TRY(read_numbers(h5, "fisher", 3, sample, &b->fisher));
    TRY(read_heads(h5, "head_fisher", head, &b->head_fisher));
    if (b->fisher && sample[1] > INT32_MAX) return err_set(ERR_DATA, "fisher: too large");
    b->rows = (size_t)block[0];
    b->n_layer = (int)head[1];
    b->n_head = (int)head[2];
    b->n_fisher = b->fisher ? (int)sample[1] : 0;
    return 0;
}

int blocks_read(const char *path, blocks_data *out) {
    hid_t h5;
    *out = (blocks_data){0};
    int code = hdf_open(path, &h5);
    if (!code) {
        code = read_datasets(h5, out);
        H5Fclose(h5);
    }
    return code ? err_prefix(code, "%s", path) : 0;
}

blocks_row blocks_get_row(const blocks_data *b, size_t row) {
    size_t at = row * BLOCKS_PER_ROW, heads = row * (size_t)b->n_layer * (size_t)b->n_head;
    return (blocks_row){
        .lost_mass = b->lost_mass + at,
        .steps = b->steps + at,
        .first = b->first ? b->first + at : NULL,
        .fisher = b->fisher ? b->fisher + at * (size_t)b->n_fisher : NULL,
        .head_lost_mass = b->head_lost_mass + heads,
        .head_first = b->head_first ? b->head_first + heads : NULL,
        .head_fisher = b->head_fisher ? b->head_fisher + heads : NULL,
    };
}

void blocks_free(blocks_data *b) {
    void *array[] = {b->lost_mass, b->first, b->fisher, b->steps, b->head_lost_mass, b->head_first, b->head_fisher};
    for (size_t i = 0; i < sizeof array / sizeof *array; i++) mem_free(array[i]);
    *b = (blocks_data){0};
}
