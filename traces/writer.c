/* Writing a trace: the file, its facts and the arrays written whole or row by row. */
#include "base/mem.h"
#include "traces/kernels.h"
#include "traces/writer_private.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

enum { LSE_CHUNK = 1 << 16 };

static const char *const array_name[N_ARRAYS] = {"probs", "q", "k", "v"};

/* ---- beginning and end ------------------------------------------------------------------------------------------ */

static int copy_model(trace_model *to, const trace_model *from) {
    *to = *from;
    to->name = mem_string(from->name ? from->name : "");
    to->arch = mem_string(from->arch ? from->arch : "");
    to->rope = mem_string(from->rope ? from->rope : "");
    to->backend = mem_string(from->backend ? from->backend : "");
    to->device = mem_string(from->device ? from->device : "");
    to->compute = mem_string(from->compute ? from->compute : "");
    to->window = mem_new((size_t)from->n_layer, sizeof *to->window, "windows");
    if (!to->name || !to->arch || !to->rope || !to->backend || !to->device || !to->compute || !to->window)
        return ERR_DATA;
    if (from->window) memcpy(to->window, from->window, (size_t)from->n_layer * sizeof *to->window);
    return 0;
}

static int write_model(hid_t h5, const trace_model *m, const char *creator, const char *command) {
    TRY(hdf_put_text(h5, "format", "kvlag-trace"));
    TRY(hdf_put_int(h5, "version", TRACE_VERSION));
    TRY(hdf_put_text(h5, "creator", creator));
    TRY(hdf_put_text(h5, "command", command));
    TRY(hdf_put_text(h5, "name", m->name));
    TRY(hdf_put_text(h5, "arch", m->arch));
    TRY(hdf_put_int(h5, "n_layer", m->n_layer));
    TRY(hdf_put_int(h5, "n_head", m->n_head));
    TRY(hdf_put_int(h5, "n_kv_head", m->n_kv_head));
    TRY(hdf_put_int(h5, "head_dim", m->head_dim));
    TRY(hdf_put_int(h5, "n_embd", m->n_embd));
    TRY(hdf_put_int(h5, "n_vocab", m->n_vocab));
    TRY(hdf_put_ints(h5, "window", m->window, (size_t)m->n_layer));
    TRY(hdf_put_number(h5, "scale", m->scale));
    TRY(hdf_put_number(h5, "softcap", m->softcap));
    TRY(hdf_put_text(h5, "rope", m->rope));
    TRY(hdf_put_text(h5, "backend", m->backend));
    TRY(hdf_put_text(h5, "device", m->device));
    return hdf_put_text(h5, "compute", m->compute);
}

static int begin(trace_writer *w, const trace_model *model, const char *creator, const char *command) {
    TRY(copy_model(&w->model, model));
    TRY(content_hash_new(&w->hash));
    TRY(content_hash_model(w->hash, &w->model));
    TRY(writer_packs_new(model->head_dim, &w->packs));
    TRY(hdf_create(w->file.temp, &w->h5));
    TRY(write_model(w->h5, &w->model, creator, command));
    TRY(hdf_new_group(w->h5, "seq", &w->seq_group));
    return write_queue_new(&w->queue);
}

int trace_writer_new(const char *path, bool force, const char *const *inputs, int n_inputs, const trace_model *model,
                     const char *creator, const char *command, size_t n_sequences, trace_writer **out) {
    *out = NULL;
    trace_writer *w = mem_new(1, sizeof *w, "trace writer");
    if (!w) return ERR_DATA;
    w->h5 = w->seq_group = w->seq = w->attn = w->logits_group = w->grad_group = H5I_INVALID_HID;
    w->wo.id = w->lse.id = w->row_sum.id = w->full.id = H5I_INVALID_HID;
    for (int a = 0; a < N_ARRAYS; a++) w->array[a].id = H5I_INVALID_HID;
    for (int g = 0; g < 2; g++) w->grad[g].id = w->grad_scale[g].id = H5I_INVALID_HID;
    w->n_sequences = n_sequences;
    int code = outfile_begin(&w->file, path, force, inputs, n_inputs);
    if (code) {
        mem_free(w);
        return code;
    }
    code = writer_at_file(w, begin(w, model, creator, command));
    if (code) trace_writer_abort(w);
    else *out = w;
    return code;
}

static int close_set(open_set *s) {
    hid_t id = s->id;
    s->id = H5I_INVALID_HID;
    return id >= 0 && H5Dclose(id) < 0 ? hdf_error("write failed") : 0;
}

static void close_group(hid_t *group) {
    if (*group >= 0) H5Gclose(*group);
    *group = H5I_INVALID_HID;
}

static int close_sets(trace_writer *w) {
    int code = close_set(&w->wo), bad;
    for (int a = 0; a < N_ARRAYS; a++)
        if ((bad = close_set(&w->array[a])) != 0) code = bad;
    for (int g = 0; g < 2; g++) {
        if ((bad = close_set(&w->grad[g])) != 0) code = bad;
        if ((bad = close_set(&w->grad_scale[g])) != 0) code = bad;
    }
    if ((bad = close_set(&w->lse)) != 0) code = bad;
    if ((bad = close_set(&w->row_sum)) != 0) code = bad;
    if ((bad = close_set(&w->full)) != 0) code = bad;
    close_group(&w->attn);
    close_group(&w->logits_group);
    close_group(&w->grad_group);
    close_group(&w->seq);
    return code;
}

static void free_writer(trace_writer *w) {
    write_queue_free(w->queue);
    writer_packs_free(w->packs);
    content_hash_free(w->hash);
    mem_free(w->model.name);
    mem_free(w->model.arch);
    mem_free(w->model.rope);
    mem_free(w->model.backend);
    mem_free(w->model.device);
    mem_free(w->model.compute);
    mem_free(w->model.window);
    mem_free(w);
}

void trace_writer_abort(trace_writer *w) {
    if (!w) return;
    write_queue_free(w->queue);
    w->queue = NULL;
    close_sets(w);
    close_group(&w->seq_group);
    if (w->h5 >= 0) H5Fclose(w->h5);
    outfile_abort(&w->file);
    free_writer(w);
}

/* ---- datasets --------------------------------------------------------------------------------------------------- */

/* Path inside the file: "seq/0003/attn/q". */
static int start_digest(trace_writer *w, const char *name, int rank, const hsize_t *dims, size_t size, size_t *id) {
    char path[128];
    uint64_t shape[8];
    for (int d = 0; d < rank; d++) shape[d] = dims[d];
    if (strncmp(name, "model/", 6) == 0) snprintf(path, sizeof path, "%s", name);
    else snprintf(path, sizeof path, "seq/%04zu/%s", w->n_written - 1, name);
    return content_hash_dataset(w->hash, path, rank, shape, size, id);
}

static const char *last_part(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

int writer_start_set(trace_writer *w, hid_t group, const char *name, hid_t type, int rank, const hsize_t *dims,
                     const hsize_t *chunk, open_set *s) {
    s->next = 0;
    s->type = type;
    s->rank = rank;
    TRY(start_digest(w, name, rank, dims, H5Tget_size(type), &s->digest));
    return hdf_new_dataset(group, last_part(name), type, rank, dims, chunk, &s->id);
}

int writer_later(trace_writer *w, const open_set *s, const hsize_t *start, const hsize_t *count, void *data,
                 size_t bytes) {
    write_block b = {.set = s->id, .type = s->type, .rank = s->rank, .frame = !count, .data = data, .bytes = bytes};
    memcpy(b.start, start, (size_t)s->rank * sizeof *start);
    if (count) memcpy(b.count, count, (size_t)s->rank * sizeof *count);
    return write_queue_add(w->queue, &b);
}

int writer_later_copy(trace_writer *w, const open_set *s, const hsize_t *start, const hsize_t *count,
                      const void *values, size_t bytes) {
    void *copy = mem_new(bytes, 1, "values to write");
    if (!copy) return ERR_DATA;
    memcpy(copy, values, bytes);
    return writer_later(w, s, start, count, copy, bytes);
}

int writer_put_whole(trace_writer *w, hid_t group, const char *name, hid_t type, int rank, const hsize_t *dims,
                     const void *values) {
    size_t digest, bytes = H5Tget_size(type);
    for (int d = 0; d < rank; d++) bytes *= (size_t)dims[d];
    TRY(start_digest(w, name, rank, dims, H5Tget_size(type), &digest));
    content_hash_values(w->hash, digest, values, bytes);
    return hdf_write_all(group, last_part(name), type, rank, dims, values);
}

static int start_wo(trace_writer *w) {
    hsize_t rows = (hsize_t)w->model.n_head * (hsize_t)w->model.head_dim, cols = (hsize_t)w->model.n_embd;
    hsize_t dims[3] = {(hsize_t)w->model.n_layer, rows, cols}, chunk[3] = {1, (1 << 19) / cols, cols};
    if (chunk[1] < 1) chunk[1] = 1;
    if (chunk[1] > rows) chunk[1] = rows;
    hid_t group;
    TRY(hdf_new_group(w->h5, "model", &group));
    int code = writer_start_set(w, group, "model/wo", hdf_f16(), 3, dims, chunk, &w->wo);
    H5Gclose(group);
    return code;
}

static int put_wo(trace_writer *w, int layer, const float *wo) {
    if (w->n_written || layer != w->n_wo || w->model.n_embd < 1) return writer_misuse("model/wo out of order");
    if (layer == 0) TRY(start_wo(w));
    hsize_t rows = (hsize_t)w->model.n_head * (hsize_t)w->model.head_dim, cols = (hsize_t)w->model.n_embd;
    half *h = mem_new(rows * cols, sizeof *h, "model/wo");
    if (!h) return ERR_DATA;
    int code = writer_convert(wo, h, rows * cols);
    if (code) {
        mem_free(h);
        return err_prefix(code, "model/wo: layer %d", layer);
    }
    content_hash_values(w->hash, w->wo.digest, h, rows * cols * sizeof *h);
    w->n_wo++;
    return writer_later(w, &w->wo, (hsize_t[]){(hsize_t)layer, 0, 0}, (hsize_t[]){1, rows, cols}, h,
                        rows * cols * sizeof *h);
}

int trace_write_wo(trace_writer *w, int layer, const float *wo) {
    return writer_at_file(w, put_wo(w, layer, wo));
}

/* ---- sequences -------------------------------------------------------------------------------------------------- */

/* How many chunks of an array are stored: those of attn/probs above the diagonal are not. */
static uint64_t chunks_of_array(const trace_writer *w, trace_array a) {
    hsize_t dims[4], chunk[4];
    writer_array_shape(w, a, dims, chunk);
    uint64_t tiles = (dims[2] + chunk[2] - 1) / chunk[2];
    if (a == TRACE_PROBS) tiles = tiles * (tiles + 1) / 2;
    return dims[0] * dims[1] * tiles;
}

static int finish_sequence(trace_writer *w) {
    TRY(write_queue_drain(w->queue));
    if (!w->n_written) return close_set(&w->wo);
    for (int a = 0; a < N_ARRAYS; a++)
        if (w->array[a].id >= 0 && w->array[a].next != chunks_of_array(w, (trace_array)a))
            return writer_misuse("a sequence ended before its attention was whole");
    uint64_t heads = (uint64_t)w->model.n_layer * (uint64_t)w->model.n_head;
    if ((w->lse.id >= 0 && w->lse.next != heads) || (w->row_sum.id >= 0 && w->row_sum.next != heads))
        return writer_misuse("a sequence ended before attn/lse or attn/row_sum was whole");
    if (w->full.id >= 0 && w->full.next != (uint64_t)w->n_tokens)
        return writer_misuse("a sequence ended before logits/full was whole");
    TRY(writer_finish_grad(w));
    if (w->plan.topk && !w->logits_written) return writer_misuse("a sequence ended without its logits");
    return close_sets(w);
}

static int write_tokens(trace_writer *w, const trace_sequence *s) {
    hsize_t T = (hsize_t)s->n_tokens;
    if (s->tokens) TRY(writer_put_whole(w, w->seq, "tokens", H5T_STD_I32LE, 1, &T, s->tokens));
    if (s->piece_offset) {
        hsize_t bytes = (hsize_t)s->piece_offset[T], offsets = T + 1;
        TRY(writer_put_whole(w, w->seq, "pieces", H5T_STD_U8LE, 1, &bytes, s->pieces));
        TRY(writer_put_whole(w, w->seq, "piece_offset", H5T_STD_I64LE, 1, &offsets, s->piece_offset));
    }
    hsize_t steps = T - 1, probes[2] = {s->n_probes, 2};
    if (s->counted) TRY(writer_put_whole(w, w->seq, "counted", H5T_STD_U8LE, 1, &steps, s->counted));
    return s->probes ? writer_put_whole(w, w->seq, "probes", H5T_STD_I32LE, 2, probes, s->probes) : 0;
}

static int start_attention(trace_writer *w) {
    hsize_t dims[4], chunk[4];
    for (int a = 0; a < N_ARRAYS; a++) {
        if (a == TRACE_PROBS ? !w->plan.dense : !w->plan.factored) continue;
        char name[16];
        snprintf(name, sizeof name, "attn/%s", array_name[a]);
        writer_array_shape(w, (trace_array)a, dims, chunk);
        TRY(writer_start_set(w, w->attn, name, hdf_f16(), 4, dims, chunk, &w->array[a]));
    }
    writer_array_shape(w, TRACE_Q, dims, chunk);
    chunk[2] = dims[2] < LSE_CHUNK ? dims[2] : LSE_CHUNK;
    if (w->plan.lse) TRY(writer_start_set(w, w->attn, "attn/lse", H5T_IEEE_F32LE, 3, dims, chunk, &w->lse));
    if (w->plan.row_sum) TRY(writer_start_set(w, w->attn, "attn/row_sum", H5T_IEEE_F32LE, 3, dims, chunk, &w->row_sum));
    return 0;
}

static int begin_sequence(trace_writer *w, const trace_sequence *s, const trace_plan *plan) {
    if (w->n_written == w->n_sequences) return writer_misuse("more sequences than announced");
    if (s->n_tokens < 1 || s->n_prompt < 0 || s->n_prompt > s->n_tokens) return writer_misuse("n_tokens or n_prompt");
    if (plan->n_fisher < 0 || (plan->n_fisher && !plan->grad_loss))
        return writer_misuse("grad/fisher without grad/loss");
    TRY(finish_sequence(w));
    w->plan = *plan;
    w->n_tokens = s->n_tokens;
    w->logits_written = w->labels_written = false;
    char name[24];
    snprintf(name, sizeof name, "%04zu", w->n_written++);
    trace_sequence facts = *s;
    char none[1] = "";
    if (!facts.source) facts.source = none;
    TRY(content_hash_sequence(w->hash, w->n_written - 1, &facts));
    TRY(hdf_new_group(w->seq_group, name, &w->seq));
    TRY(hdf_put_int(w->seq, "n_tokens", s->n_tokens));
    TRY(hdf_put_int(w->seq, "n_prompt", s->n_prompt));
    TRY(hdf_put_text(w->seq, "source", facts.source));
    TRY(write_tokens(w, s));
    if (plan->dense || plan->factored || plan->lse || plan->row_sum) TRY(hdf_new_group(w->seq, "attn", &w->attn));
    TRY(start_attention(w));
    hsize_t dims[2] = {(hsize_t)s->n_tokens, (hsize_t)w->model.n_vocab}, chunk[2] = {1, dims[1]};
    TRY(hdf_new_group(w->seq, "logits", &w->logits_group));
    if (plan->full_logits)
        TRY(writer_start_set(w, w->logits_group, "logits/full", hdf_f16(), 2, dims, chunk, &w->full));
    return plan->grad_loss ? writer_start_grad(w) : 0;
}

int trace_write_sequence(trace_writer *w, const trace_sequence *s, const trace_plan *plan) {
    return writer_at_file(w, begin_sequence(w, s, plan));
}

/* ---- rows of facts ---------------------------------------------------------------------------------------------- */

static int put_head_row(trace_writer *w, open_set *s, int layer, int head, const float *values) {
    hsize_t T = (hsize_t)w->n_tokens, start[3] = {(hsize_t)layer, (hsize_t)head, 0};
    if (s->id < 0 || s->next != (uint64_t)layer * (uint64_t)w->model.n_head + (uint64_t)head)
        return writer_misuse("attn/lse or attn/row_sum out of order");
    TRY(writer_later_copy(w, s, start, (hsize_t[]){1, 1, T}, values, (size_t)T * sizeof *values));
    content_hash_values(w->hash, s->digest, values, (size_t)T * sizeof *values);
    s->next++;
    return 0;
}

int trace_write_lse(trace_writer *w, int layer, int head, const float *lse) {
    TRY(writer_tell(w, (writer_call){CALL_LSE, {layer, head}, 0}, NULL, (const void *[]){lse}));
    return writer_at_file(w, put_head_row(w, &w->lse, layer, head, lse));
}

int trace_write_row_sum(trace_writer *w, int layer, int head, const float *row_sum) {
    TRY(writer_tell(w, (writer_call){CALL_ROW_SUM, {layer, head}, 0}, NULL, (const void *[]){row_sum}));
    return writer_at_file(w, put_head_row(w, &w->row_sum, layer, head, row_sum));
}

static int put_logits(trace_writer *w, const float *target_logprob, const uint8_t *correct, const float *entropy,
                      const int32_t *topk_id, const float *topk_logprob) {
    if (w->logits_group < 0 || w->logits_written) return writer_misuse("logits twice, or before a sequence");
    hsize_t steps = (hsize_t)w->n_tokens - 1, top[2] = {(hsize_t)w->n_tokens, (hsize_t)w->plan.topk};
    hid_t g = w->logits_group;
    w->logits_written = true;
    TRY(write_queue_drain(w->queue));
    TRY(writer_put_whole(w, g, "logits/target_logprob", H5T_IEEE_F32LE, 1, &steps, target_logprob));
    TRY(writer_put_whole(w, g, "logits/correct", H5T_STD_U8LE, 1, &steps, correct));
    TRY(writer_put_whole(w, g, "logits/entropy", H5T_IEEE_F32LE, 1, &steps, entropy));
    if (!w->plan.topk) return 0;
    TRY(writer_put_whole(w, g, "logits/topk_id", H5T_STD_I32LE, 2, top, topk_id));
    return writer_put_whole(w, g, "logits/topk_logprob", H5T_IEEE_F32LE, 2, top, topk_logprob);
}

int trace_write_logits(trace_writer *w, const float *target_logprob, const uint8_t *correct, const float *entropy,
                       const int32_t *topk_id, const float *topk_logprob) {
    TRY(writer_tell(w, (writer_call){.kind = CALL_LOGITS}, NULL,
                    (const void *[]){target_logprob, entropy, topk_id, topk_logprob, correct}));
    return writer_at_file(w, put_logits(w, target_logprob, correct, entropy, topk_id, topk_logprob));
}

static int put_full_row(trace_writer *w, int32_t row, const float *logits) {
    size_t n = (size_t)w->model.n_vocab;
    if (w->full.id < 0 || (uint64_t)row != w->full.next) return writer_misuse("logits/full out of order");
    half *h = mem_new(n, sizeof *h, "logits/full");
    if (!h) return ERR_DATA;
    int code = writer_convert(logits, h, n);
    if (code) {
        mem_free(h);
        return err_prefix(code, "logits/full: token %d", row);
    }
    content_hash_values(w->hash, w->full.digest, h, n * sizeof *h);
    w->full.next++;
    return writer_later(w, &w->full, (hsize_t[]){(hsize_t)row, 0}, (hsize_t[]){1, n}, h, n * sizeof *h);
}

int trace_write_full_logits(trace_writer *w, int32_t row0, int32_t n, const float *logits) {
    TRY(writer_tell(w, (writer_call){CALL_FULL, {row0, n}, 0}, NULL, (const void *[]){logits}));
    for (int32_t r = 0; r < n; r++)
        TRY(writer_at_file(w, put_full_row(w, row0 + r, logits + (size_t)r * (size_t)w->model.n_vocab)));
    return 0;
}

/* ---- finishing -------------------------------------------------------------------------------------------------- */

static int finish(trace_writer *w) {
    char hex[CONTENT_HASH_HEX];
    TRY(finish_sequence(w));
    if (w->n_written != w->n_sequences) return writer_misuse("fewer sequences than announced");
    if (w->n_wo && w->n_wo != w->model.n_layer) return writer_misuse("model/wo is not whole");
    close_group(&w->seq_group);
    TRY(content_hash_finish(w->hash, hex));
    TRY(hdf_put_text(w->h5, "content_hash", hex));
    /* Everything must be on its way to the disk before the file calls itself complete. */
    if (H5Fflush(w->h5, H5F_SCOPE_LOCAL) < 0) return hdf_error("write failed");
    TRY(hdf_put_int(w->h5, "complete", 1));
    hid_t h5 = w->h5;
    w->h5 = H5I_INVALID_HID;
    return hdf_finish(h5);
}

int trace_writer_finish(trace_writer *w, int64_t *bytes) {
    struct stat st = {0};
    int code = writer_at_file(w, finish(w));
    if (code) {
        trace_writer_abort(w);
        return code;
    }
    if (bytes && stat(w->file.temp, &st) == 0) *bytes = (int64_t)st.st_size;
    code = outfile_commit(&w->file);
    free_writer(w);
    return code;
}

trace_times trace_writer_times(const trace_writer *w) {
    trace_times t = {.pack = writer_pack_seconds(w->packs)};
    write_queue_times(w->queue, &t.write, &t.wait);
    return t;
}

void trace_writer_sizes(const trace_writer *w, int64_t *raw, int64_t *stored) {
    *raw = w->raw;
    *stored = w->stored;
}
