/* Gradients in a trace being written: rows of f16 with a scale each, packed by any thread, put by one in index order.
 */
#include "traces/kernels.h"
#include "traces/writer_private.h"

#include <math.h>
#include <string.h>
#include <xxhash.h>

static const char *const grad_name[2] = {"grad/loss", "grad/fisher"};
static const char *const scale_name[2] = {"grad/loss_scale", "grad/fisher_scale"};

/* Shape and chunk of grad/loss (which = 0) or grad/fisher (1); without their last dimension those of the scales. */
static int grad_shape(const trace_writer *w, int which, hsize_t dims[WRITER_RANK], hsize_t chunk[WRITER_RANK]) {
    hsize_t one[4], one_chunk[4];
    writer_array_shape(w, TRACE_Q, one, one_chunk);
    dims[0] = (hsize_t)w->plan.n_fisher;
    chunk[0] = 1;
    memcpy(dims + which, one, sizeof one);
    memcpy(chunk + which, one_chunk, sizeof one_chunk);
    return 4 + which;
}

int writer_start_grad(trace_writer *w) {
    hsize_t dims[WRITER_RANK], chunk[WRITER_RANK];
    TRY(hdf_new_group(w->seq, "grad", &w->grad_group));
    for (int which = 0; which < (w->plan.n_fisher ? 2 : 1); which++) {
        int rank = grad_shape(w, which, dims, chunk);
        TRY(writer_start_set(w, w->grad_group, grad_name[which], hdf_f16(), rank, dims, chunk, &w->grad[which]));
        chunk[rank - 2] = dims[rank - 2]; /* a chunk is one head's scales */
        TRY(writer_start_set(w, w->grad_group, scale_name[which], H5T_IEEE_F32LE, rank - 1, dims, chunk,
                             &w->grad_scale[which]));
    }
    return 0;
}

int writer_finish_grad(const trace_writer *w) {
    for (int which = 0; which < 2; which++) {
        hsize_t dims[WRITER_RANK], chunk[WRITER_RANK];
        int rank = grad_shape(w, which, dims, chunk);
        uint64_t heads = 1, tiles = (dims[rank - 2] + chunk[rank - 2] - 1) / chunk[rank - 2];
        for (int d = 0; d < rank - 2; d++) heads *= dims[d];
        if ((w->grad[which].id >= 0 && w->grad[which].next != heads * tiles) ||
            (w->grad_scale[which].id >= 0 && w->grad_scale[which].next != heads))
            return writer_misuse("a sequence ended before its gradients were whole");
    }
    if (w->plan.n_fisher && !w->labels_written) return writer_misuse("a sequence ended without grad/fisher_label");
    return 0;
}

/* ---- rows ------------------------------------------------------------------------------------------------------- */

static float largest(const float *x, size_t n, bool *finite) {
    float most = 0;
    uint32_t bad = 0;
    for (size_t i = 0; i < n; i++) {
        float a = fabsf(x[i]);
        bad |= (half_bits_of(a) >= 0x7f800000u);
        most = a > most ? a : most;
    }
    *finite = !bad;
    return most;
}

/* Divided by its largest magnitude a row lies within -1 .. 1, where f16 keeps 11 bits of the largest values. */
static int pack_row(pack_work *p, const float *values, size_t n, half *row, float *scale) {
    bool finite;
    *scale = largest(values, n, &finite);
    if (!finite) return err_set(ERR_DATA, "a gradient that is not finite");
    if (*scale == 0) {
        memset(row, 0, n * sizeof *row);
        return 0;
    }
    for (size_t i = 0; i < n; i += TRACE_TILE) {
        size_t m = n - i < TRACE_TILE ? n - i : TRACE_TILE;
        for (size_t j = 0; j < m; j++) p->row[j] = values[i + j] / *scale;
        kernels()->f32_to_f16(p->row, row + i, m);
    }
    return 0;
}

static int pack_rows(pack_work *p, const float *values, size_t rows, size_t height, size_t dim, size_t stride,
                     float *scale, trace_chunk *out) {
    half *tile = writer_chunk_values(p);
    for (size_t r = 0; r < rows; r++) {
        int code = pack_row(p, values + r * stride, dim, tile + r * dim, &scale[r]);
        if (code) return err_prefix(code, "row %zu of a tile", r);
    }
    memset(tile + rows * dim, 0, (height - rows) * dim * sizeof *tile);
    out->hash = XXH3_64bits(tile, height * dim * sizeof *tile);
    return zstd_pack(p->zstd, tile, height * dim, sizeof *tile, &out->data, &out->bytes);
}

int trace_pack_grad(const trace_writer *w, const float *values, size_t rows, size_t stride, float *scale,
                    trace_chunk *out) {
    hsize_t dims[WRITER_RANK], chunk[WRITER_RANK];
    pack_work *p;
    *out = (trace_chunk){0};
    grad_shape(w, 0, dims, chunk);
    if (rows > chunk[2]) return writer_misuse("chunk too large");
    TRY(writer_borrow(w->packs, &p));
    int code = pack_rows(p, values, rows, (size_t)chunk[2], (size_t)chunk[3], stride, scale, out);
    writer_give_back(w->packs, p);
    return code;
}

int trace_pack_grad_half(const trace_writer *w, const uint8_t *planes, size_t rows, const float *scale,
                         trace_chunk *out) {
    hsize_t dims[WRITER_RANK], chunk[WRITER_RANK];
    pack_work *p;
    *out = (trace_chunk){0};
    grad_shape(w, 0, dims, chunk);
    if (rows > chunk[2]) return writer_misuse("chunk too large");
    for (size_t r = 0; r < rows; r++)
        if (!isfinite(scale[r])) return err_set(ERR_DATA, "row %zu of a tile: a gradient that is not finite", r);
    TRY(writer_borrow(w->packs, &p));
    int code = writer_pack_planes(p, planes, (size_t)(chunk[2] * chunk[3]), out);
    writer_give_back(w->packs, p);
    return code;
}

/* ---- putting ---------------------------------------------------------------------------------------------------- */

/* Element coordinates of row 0 of a head within the dataset of `set`. */
static void head_place(int set, int layer, int head, hsize_t place[WRITER_RANK]) {
    hsize_t at[3] = {(hsize_t)set - 1, (hsize_t)layer, (hsize_t)head};
    memset(place, 0, WRITER_RANK * sizeof *place);
    memcpy(place, set ? at : at + 1, (set ? 3 : 2) * sizeof *place);
}

/* The place of a head in the order in which heads must come. */
static uint64_t head_index(const trace_writer *w, int set, int layer, int head) {
    uint64_t L = (uint64_t)w->model.n_layer, H = (uint64_t)w->model.n_head, sample = set ? (uint64_t)set - 1 : 0;
    return (sample * L + (uint64_t)layer) * H + (uint64_t)head;
}

static int put_grad(trace_writer *w, int set, int layer, int head, int row_tile, trace_chunk *c) {
    int which = set > 0;
    open_set *s = &w->grad[which];
    hsize_t dims[WRITER_RANK], chunk[WRITER_RANK], offset[WRITER_RANK];
    uint64_t place[WRITER_RANK];
    int rank = grad_shape(w, which, dims, chunk);
    uint64_t tiles = (dims[rank - 2] + chunk[rank - 2] - 1) / chunk[rank - 2];
    if (s->id < 0 || head_index(w, set, layer, head) * tiles + (uint64_t)row_tile != s->next)
        return writer_misuse("gradients out of order");
    head_place(set, layer, head, offset);
    offset[rank - 2] = (hsize_t)row_tile * chunk[rank - 2];
    for (int d = 0; d < rank; d++) place[d] = offset[d];
    content_hash_chunk(w->hash, s->digest, rank, place, c->hash);
    s->next++;
    void *frame = c->data;
    c->data = NULL;
    return writer_later(w, s, offset, NULL, frame, c->bytes);
}

int trace_put_grad(trace_writer *w, int set, int layer, int head, int row_tile, trace_chunk *c) {
    int code = writer_tell(w, (writer_call){CALL_PUT_GRAD, {set, layer, head, row_tile}, c->hash}, c, NULL);
    if (!code) code = put_grad(w, set, layer, head, row_tile, c);
    trace_chunk_free(c);
    return writer_at_file(w, code);
}

static int put_scale(trace_writer *w, int set, int layer, int head, const float *scale) {
    int which = set > 0, rank = 3 + which;
    open_set *s = &w->grad_scale[which];
    hsize_t start[WRITER_RANK], count[WRITER_RANK] = {1, 1, 1, 1, 1};
    size_t T = (size_t)w->n_tokens, bytes = T * sizeof *scale;
    if (s->id < 0 || head_index(w, set, layer, head) != s->next) return writer_misuse("gradients' scales out of order");
    head_place(set, layer, head, start);
    count[rank - 1] = T;
    TRY(writer_later_copy(w, s, start, count, scale, bytes));
    uint64_t place[WRITER_RANK];
    for (int d = 0; d < rank; d++) place[d] = start[d];
    if (rank >= CONTENT_HASH_CHUNKED_RANK)
        content_hash_chunk(w->hash, s->digest, rank, place, XXH3_64bits(scale, bytes));
    else content_hash_values(w->hash, s->digest, scale, bytes);
    s->next++;
    return 0;
}

int trace_write_grad_scale(trace_writer *w, int set, int layer, int head, const float *scale) {
    TRY(writer_tell(w, (writer_call){CALL_SCALE, {set, layer, head}, 0}, NULL, (const void *[]){scale}));
    return writer_at_file(w, put_scale(w, set, layer, head, scale));
}

static int put_labels(trace_writer *w, const int32_t *label) {
    hsize_t dims[2] = {(hsize_t)w->plan.n_fisher, (hsize_t)w->n_tokens - 1};
    if (w->grad[1].id < 0 || w->labels_written) return writer_misuse("grad/fisher_label twice, or not planned");
    for (size_t i = 0; i < dims[0] * dims[1]; i++)
        if (label[i] < -1 || label[i] >= w->model.n_vocab)
            return err_set(ERR_DATA, "grad/fisher_label: sample %zu, step %zu is %d, outside the vocabulary of %d",
                           i / (size_t)dims[1], i % (size_t)dims[1], label[i], w->model.n_vocab);
    w->labels_written = true;
    TRY(write_queue_drain(w->queue));
    return writer_put_whole(w, w->grad_group, "grad/fisher_label", H5T_STD_I32LE, 2, dims, label);
}

int trace_write_fisher_labels(trace_writer *w, const int32_t *label) {
    TRY(writer_tell(w, (writer_call){.kind = CALL_LABELS}, NULL, (const void *[]){label}));
    return writer_at_file(w, put_labels(w, label));
}
