#include "analyze/evidence.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/progress.h"
#include "base/text.h"

#include <math.h>
#include <unistd.h>

struct evidence {
    blocks_data *file; /* by index of the path; those of truth files are empty */
    size_t n;
};

/* CSV columns carry nine digits. */
#define CLOSE_ENOUGH 1e-6

static double mean(const double *sums, const int32_t *steps) {
    double sum = 0, n = 0;
    for (size_t b = 0; b < BLOCKS_PER_ROW; b++) {
        sum += sums[b];
        n += steps[b];
    }
    return sum / n;
}

static bool close_to(double csv, double blocks) {
    return isnan(csv) || fabs(csv - blocks) <= CLOSE_ENOUGH * fmax(fabs(csv), 1e-3);
}

static int check_row(const evidence *e, const result *row, const char *csv, const char *blocks) {
    blocks_row b = evidence_row(e, row);
    if (close_to(row->metric[LOST_MASS], mean(b.lost_mass, b.steps)) &&
        (!b.first || close_to(row->metric[DLOSS_FIRST], mean(b.first, b.steps))))
        return 0;
    return err_set(ERR_DATA, "%s does not belong to %s: line %zu there says other sums", blocks, csv, row->line);
}

static bool has_rows(const results *r, size_t file) {
    for (size_t i = 0; i < r->n_rows; i++)
        if (r->rows[i].file == file) return true;
    return false;
}

static int read_file(evidence *e, const results *r, size_t file, const char *path) {
    blocks_data *b = &e->file[file];
    size_t rows = 0;
    TRY(blocks_read(path, b));
    for (size_t i = 0; i < r->n_rows; i++) rows += r->rows[i].file == file;
    if (rows != b->rows)
        return err_set(ERR_DATA, "%s does not belong to %s: %zu rows there, %zu here", path, r->paths[file], rows,
                       b->rows);
    for (size_t i = 0; i < r->n_rows; i++)
        if (r->rows[i].file == file) TRY(check_row(e, &r->rows[i], r->paths[file], path));
    return 0;
}

/* *there: it has one, or needs none. */
static int read_beside(evidence *e, const results *r, size_t file, bool *there) {
    *there = true;
    if (!has_rows(r, file)) return 0;
    char *path = blocks_path(r->paths[file]);
    if (!path) return ERR_DATA;
    *there = access(path, F_OK) == 0;
    int code = *there ? read_file(e, r, file, path) : 0;
    if (!*there)
        say("%s: there is no %s beside it: no intervals from resampling, no knee, no ranking, nothing by head",
            r->paths[file], text_base_name(path));
    mem_free(path);
    return code;
}

int evidence_read(const results *r, evidence **out) {
    *out = NULL;
    evidence *e = mem_new(1, sizeof *e, "blocks");
    if (!e) return ERR_DATA;
    e->n = r->n_files;
    e->file = mem_new(e->n, sizeof *e->file, "blocks");
    int code = e->file ? 0 : ERR_DATA;
    bool there = true;
    for (size_t i = 0; i < e->n && !code && there; i++) code = read_beside(e, r, i, &there);
    if (!code && there) *out = e;
    else evidence_free(e);
    return code;
}

void evidence_free(evidence *e) {
    if (!e) return;
    for (size_t i = 0; e->file && i < e->n; i++) blocks_free(&e->file[i]);
    mem_free(e->file);
    mem_free(e);
}

blocks_row evidence_row(const evidence *e, const result *row) {
    return blocks_get_row(&e->file[row->file], row->row);
}

evidence_shape evidence_get_shape(const evidence *e, const result *row) {
    const blocks_data *b = &e->file[row->file];
    return (evidence_shape){(size_t)b->n_layer, (size_t)b->n_head, (size_t)b->n_fisher};
}
