/* Weights on the device, in one of three ways: dequantised once (dense); as the file's blocks, dequantised layer by
 * layer into one buffer (blocks); or as blocks in pinned host memory, from which two slots are filled in turn, so that
 * a layer's copy runs beside the work of the one before (offload). Vectors are always there in f32. */
#include "base/err.h"
#include "base/mem.h"
#include "base/progress.h"
#include "tracer/cuda/arena.h"
#include "tracer/cuda/cuda.h"
#include "tracer/cuda/kernels.h"
#include "traces/kernels.h"

#include <string.h>

enum {
    N_MATRICES = 7,
    SLICE_IDS = 16384 /* of the output matrix at a time */
};
#define UPLOAD_BYTES ((size_t)64 << 20)
static const arch_slot matrices[N_MATRICES] = {SLOT_Q, SLOT_K, SLOT_V, SLOT_O, SLOT_GATE, SLOT_UP, SLOT_DOWN};

/* A matrix as blocks at `raw`, on the device or the host. */
typedef struct raw_layer {
    char *raw; /* all matrices of the layer */
    size_t bytes, offset[N_MATRICES];
} raw_layer;

typedef struct vectors {
    float *attn_norm, *ffn_norm, *qkv_bias;
} vectors;

/* A slot for an offloaded layer's blocks. */
typedef struct stage {
    char *raw;
    int layer; /* -1: none */
    device_mark *copied, *used;
} stage;

/* A table of one row a token: the embedding, the output matrix. */
typedef struct table {
    uint32_t type;
    size_t row_bytes;
    char *at;
} table;

struct cuda_weights {
    enum { DENSE, BLOCKS, OFFLOAD } way;
    vectors *vec;   /* [n_layer] */
    raw_layer *raw; /* [n_layer]; BLOCKS: device memory, OFFLOAD: pinned */
    char **layer;   /* [n_layer] DENSE: each layer's matrices in the state's type; else all the same buffer */
    int ready;      /* BLOCKS, OFFLOAD: the layer in that buffer; -1: none */
    stage stage[2]; /* OFFLOAD */
    table embedding, output;
    char *output_matrix; /* DENSE: of the state's type */
    float *output_norm;
    void *slice;  /* not DENSE: SLICE_IDS rows of the output matrix */
    char *upload; /* while loading */
    void *block;  /* host memory of the arrays above */
};

/* ---- shapes ----------------------------------------------------------------------------------------------------- */

/* Elements before each matrix in a layer's buffer, and in all. q, k and v leave no gap. */
static size_t layer_offsets(const model *m, size_t offset[N_MATRICES]) {
    size_t at = 0;
    for (int i = 0; i < N_MATRICES; i++) {
        int64_t outputs, inputs;
        model_slot_shape(m, matrices[i], &outputs, &inputs);
        offset[i] = at;
        at += (size_t)outputs * (size_t)inputs;
        if (matrices[i] != SLOT_Q && matrices[i] != SLOT_K) at = (at + 127) / 128 * 128;
    }
    return at;
}

static size_t row_bytes(const tensor *t) {
    return t->bytes / (size_t)t->dims[1];
}

/* A slot's own rows: a fused tensor holds those of several. */
static tensor matrix_of(const model *m, int layer, arch_slot slot) {
    const model_weight *w = &m->layer[layer].weight[slot];
    tensor t = *w->tensor;
    size_t row = row_bytes(&t);
    int64_t outputs, inputs;
    model_slot_shape(m, slot, &outputs, &inputs);
    t.data = (const char *)t.data + (size_t)w->row0 * row;
    t.bytes = row * (size_t)outputs;
    t.dims[1] = (uint64_t)outputs;
    return t;
}

/* ---- loading ---------------------------------------------------------------------------------------------------- */

/* Rows of a tensor to the device in `type`, through the upload buffer; a type that the device does not read comes as
 * the host's f32. */
static int load_dense(backend_state *s, const tensor *t, dtype type, char *to) {
    cuda_weights *w = s->w;
    size_t n = (size_t)t->dims[0], rows = (size_t)t->dims[1];
    bool here = k_dequant_can(t->type);
    size_t each = here ? row_bytes(t) : n * sizeof(float), batch = UPLOAD_BYTES / each;
    if (!batch) return err_set(ERR_DATA, "tensor '%s': a row of %zu bytes is too long", t->name, each);
    float *host = here ? NULL : mem_new((rows < batch ? rows : batch) * n, sizeof *host, "weights");
    if (!here && !host) return ERR_DATA;
    int code = 0;
    for (size_t row = 0; row < rows && !code; row += batch) {
        size_t count = rows - row < batch ? rows - row : batch;
        if (!here) code = tensor_rows(t, row, count, host);
        const void *from = here ? (const void *)((const char *)t->data + row * each) : host;
        if (!code) code = device_to(s->d, STREAM_COMPUTE, w->upload, from, count * each);
        if (!code)
            code = k_dequant(s->d, here ? t->type : TENSOR_F32, w->upload, each, NULL, count, n, type,
                             to + row * n * dtype_size(type), n);
        if (!code) code = device_sync(s->d); /* the buffer is used again */
    }
    mem_free(host);
    return code ? err_prefix(code, "tensor '%s'", t->name) : 0;
}

static int new_vector(backend_state *s, size_t n, float **out) {
    void *p;
    TRY(device_new(s->d, kernel_pad(n) * sizeof(float), "weights", &p));
    *out = p;
    return 0;
}

static int load_vectors(backend_state *s, int layer) {
    const model *m = s->m;
    const model_layer *from = &m->layer[layer];
    vectors *v = &s->w->vec[layer];
    size_t n_embd = (size_t)m->n_embd, q = (size_t)m->n_head * (size_t)m->head_dim;
    size_t kv = (size_t)m->n_kv_head * (size_t)m->head_dim, place[3] = {0, q, q + kv};
    TRY(new_vector(s, n_embd, &v->attn_norm));
    TRY(new_vector(s, n_embd, &v->ffn_norm));
    TRY(load_dense(s, from->weight[SLOT_ATTN_NORM].tensor, DTYPE_F32, (char *)v->attn_norm));
    TRY(load_dense(s, from->weight[SLOT_FFN_NORM].tensor, DTYPE_F32, (char *)v->ffn_norm));
    if (!from->weight[SLOT_Q_BIAS].tensor && !from->weight[SLOT_K_BIAS].tensor && !from->weight[SLOT_V_BIAS].tensor)
        return 0;
    TRY(new_vector(s, q + 2 * kv, &v->qkv_bias));
    TRY(device_fill(s->d, STREAM_COMPUTE, v->qkv_bias, 0, (q + 2 * kv) * sizeof(float)));
    for (int i = 0; i < 3; i++) {
        const tensor *t = from->weight[SLOT_Q_BIAS + i].tensor;
        if (t) TRY(load_dense(s, t, DTYPE_F32, (char *)(v->qkv_bias + place[i])));
    }
    return 0;
}

static int load_layer_dense(backend_state *s, int layer) {
    size_t offset[N_MATRICES], n = layer_offsets(s->m, offset), size = dtype_size(s->type);
    void *p;
    TRY(device_new(s->d, n * size, "weights", &p));
    s->w->layer[layer] = p;
    for (int i = 0; i < N_MATRICES; i++) {
        tensor t = matrix_of(s->m, layer, matrices[i]);
        TRY(load_dense(s, &t, s->type, (char *)p + offset[i] * size));
    }
    return 0;
}

static int check_blocks(const tensor *t) {
    if (k_dequant_can(t->type)) return 0;
    return err_set(ERR_DATA, "tensor '%s': the CUDA backend does not dequantise %s on the device; use --weights dense",
                   t->name, t->type_name);
}

/* A layer's blocks side by side, in device or pinned memory. */
static int load_layer_raw(backend_state *s, int layer) {
    cuda_weights *w = s->w;
    raw_layer *r = &w->raw[layer];
    void *p;
    for (int i = 0; i < N_MATRICES; i++) {
        tensor t = matrix_of(s->m, layer, matrices[i]);
        TRY(check_blocks(&t));
        r->offset[i] = r->bytes;
        r->bytes += (t.bytes + 255) / 256 * 256;
    }
    if (w->way == OFFLOAD) TRY(device_pinned(s->d, r->bytes, "offloaded weights", &p));
    else TRY(device_new(s->d, r->bytes, "weights", &p));
    r->raw = p;
    for (int i = 0; i < N_MATRICES; i++) {
        tensor t = matrix_of(s->m, layer, matrices[i]);
        if (w->way == OFFLOAD) memcpy(r->raw + r->offset[i], t.data, t.bytes);
        else TRY(device_to(s->d, STREAM_COMPUTE, r->raw + r->offset[i], t.data, t.bytes));
    }
    return 0;
}

/* Rows by id come from the file's values, so that they have the same bits in all three ways. */
static int load_table(backend_state *s, const tensor *t, table *out) {
    void *p;
    bool here = k_dequant_can(t->type);
    size_t row = here ? row_bytes(t) : (size_t)t->dims[0] * sizeof(float);
    if (s->w->way != DENSE) TRY(check_blocks(t));
    TRY(device_new(s->d, row * (size_t)t->dims[1], "weights", &p));
    *out = (table){here ? t->type : TENSOR_F32, row, p};
    return here ? device_to(s->d, STREAM_COMPUTE, p, t->data, t->bytes) : load_dense(s, t, DTYPE_F32, p);
}

static int load_output_matrix(backend_state *s) {
    const tensor *t = s->m->output.tensor;
    void *p;
    TRY(device_new(s->d, (size_t)t->dims[0] * (size_t)t->dims[1] * dtype_size(s->type), "weights", &p));
    s->w->output_matrix = p;
    return load_dense(s, t, s->type, p);
}

/* What layers pass through where they are not dense. */
static int new_buffers(backend_state *s) {
    cuda_weights *w = s->w;
    size_t offset[N_MATRICES], most = 0;
    void *p;
    TRY(device_new(s->d, layer_offsets(s->m, offset) * dtype_size(s->type), "a layer's weights", &p));
    for (int32_t i = 0; i < s->m->n_layer; i++) {
        w->layer[i] = p;
        most = w->raw[i].bytes > most ? w->raw[i].bytes : most;
    }
    TRY(device_new(s->d, (size_t)SLICE_IDS * (size_t)s->m->n_embd * dtype_size(s->type), "output matrix", &w->slice));
    for (int i = 0; i < 2 && w->way == OFFLOAD; i++) {
        TRY(device_new(s->d, most, "a layer's weights", &p));
        w->stage[i].raw = p;
        w->stage[i].layer = -1;
        TRY(device_mark_new(s->d, &w->stage[i].copied));
        TRY(device_mark_new(s->d, &w->stage[i].used));
    }
    return 0;
}

static int load(backend_state *s) {
    cuda_weights *w = s->w;
    const model *m = s->m;
    void *p;
    TRY(device_new(s->d, UPLOAD_BYTES, "weights on their way", &p));
    w->upload = p;
    for (int32_t i = 0; i < m->n_layer; i++) {
        device_at(s->d, "weights of layer %d", i);
        TRY(load_vectors(s, i));
        TRY(w->way == DENSE ? load_layer_dense(s, i) : load_layer_raw(s, i));
    }
    device_at(s->d, "embedding and output matrix");
    TRY(new_vector(s, (size_t)m->n_embd, &w->output_norm));
    TRY(load_dense(s, m->output_norm.tensor, DTYPE_F32, (char *)w->output_norm));
    TRY(load_table(s, m->embedding.tensor, &w->embedding));
    if (m->output.tensor == m->embedding.tensor) w->output = w->embedding;
    else TRY(load_table(s, m->output.tensor, &w->output));
    TRY(w->way == DENSE ? load_output_matrix(s) : new_buffers(s));
    TRY(device_sync(s->d));
    device_release(s->d, w->upload);
    w->upload = NULL;
    return 0;
}

int cuda_weights_new(backend_state *s, const backend_options *o) {
    size_t n = (size_t)s->m->n_layer;
    mem_carver c = {0};
    cuda_weights *w = s->w = mem_new(1, sizeof *w, "weights");
    if (!w) return ERR_DATA;
    w->way = o->offload ? OFFLOAD : strcmp(o->weights, "blocks") == 0 ? BLOCKS : DENSE;
    w->ready = -1;
    for (int pass = 0; pass < 2; pass++) {
        w->vec = mem_carve(&c, n, sizeof *w->vec);
        w->raw = mem_carve(&c, n, sizeof *w->raw);
        w->layer = mem_carve(&c, n, sizeof *w->layer);
        if (!pass && !(w->block = mem_new(c.used, 1, "weights"))) return ERR_DATA;
        c = (mem_carver){.base = w->block};
    }
    return load(s);
}

/* Device memory goes with the device. */
void cuda_weights_free(backend_state *s) {
    cuda_weights *w = s->w;
    if (!w) return;
    for (int i = 0; i < 2; i++) {
        device_mark_free(w->stage[i].copied);
        device_mark_free(w->stage[i].used);
    }
    mem_free(w->block);
    mem_free(w);
    s->w = NULL;
}

/* ---- use -------------------------------------------------------------------------------------------------------- */

/* Start copying an offloaded layer into its slot, once what was there is used up. */
static int fetch(backend_state *s, int layer) {
    stage *g = &s->w->stage[layer & 1];
    if (g->layer == layer) return 0;
    if (g->layer >= 0) TRY(device_wait(s->d, STREAM_COPY, g->used));
    g->layer = -1;
    TRY(device_to(s->d, STREAM_COPY, g->raw, s->w->raw[layer].raw, s->w->raw[layer].bytes));
    TRY(device_mark_set(s->d, g->copied, STREAM_COPY));
    g->layer = layer;
    return 0;
}

/* The layer's blocks into the buffer that holds one layer. */
static int unpack(backend_state *s, int layer, const char *raw) {
    size_t offset[N_MATRICES], size = dtype_size(s->type);
    layer_offsets(s->m, offset);
    for (int i = 0; i < N_MATRICES; i++) {
        tensor t = matrix_of(s->m, layer, matrices[i]);
        size_t inputs = (size_t)t.dims[0];
        TRY(k_dequant(s->d, t.type, raw + s->w->raw[layer].offset[i], row_bytes(&t), NULL, (size_t)t.dims[1], inputs,
                      s->type, s->w->layer[layer] + offset[i] * size, inputs));
    }
    return 0;
}

static int make_ready(backend_state *s, int layer, int next) {
    cuda_weights *w = s->w;
    bool there = w->ready == layer;
    w->ready = -1; /* until all has been ordered */
    if (w->way == BLOCKS && !there) TRY(unpack(s, layer, w->raw[layer].raw));
    if (w->way == OFFLOAD && !there) {
        stage *g = &w->stage[layer & 1];
        TRY(fetch(s, layer));
        TRY(device_wait(s->d, STREAM_COMPUTE, g->copied));
        TRY(unpack(s, layer, g->raw));
        TRY(device_mark_set(s->d, g->used, STREAM_COMPUTE));
    }
    if (w->way == OFFLOAD && next >= 0) TRY(fetch(s, next));
    w->ready = layer;
    return 0;
}

int cuda_layer_get(backend_state *s, int layer, int next, cuda_layer *out) {
    size_t offset[N_MATRICES], size = dtype_size(s->type);
    layer_offsets(s->m, offset);
    TRY(make_ready(s, layer, next));
    const char *at = s->w->layer[layer];
    const vectors *v = &s->w->vec[layer];
    *out = (cuda_layer){.attn_norm = v->attn_norm,
                        .ffn_norm = v->ffn_norm,
                        .qkv_bias = v->qkv_bias,
                        .qkv = at + offset[0] * size,
                        .o = at + offset[3] * size,
                        .gate = at + offset[4] * size,
                        .up = at + offset[5] * size,
                        .down = at + offset[6] * size};
    return 0;
}

static int rows_of(backend_state *s, const table *t, const int32_t *ids, size_t rows, dtype type, void *out,
                   size_t ld) {
    return k_dequant(s->d, t->type, t->at, t->row_bytes, ids, rows, (size_t)s->m->n_embd, type, out, ld);
}

int cuda_embed(backend_state *s, const int32_t *ids, size_t rows, float *x, size_t ld) {
    return rows_of(s, &s->w->embedding, ids, rows, DTYPE_F32, x, ld);
}

int cuda_output_rows(backend_state *s, const int32_t *ids, size_t rows, float *out, size_t ld) {
    return rows_of(s, &s->w->output, ids, rows, DTYPE_F32, out, ld);
}

const float *cuda_output_norm(const backend_state *s) {
    return s->w->output_norm;
}

/* Slices of one size in all ways, so that sums over the vocabulary have the same bits. */
int cuda_output_slice(backend_state *s, size_t first, size_t *n, const void **w) {
    const table *t = &s->w->output;
    size_t left = (size_t)s->m->n_vocab - first, n_embd = (size_t)s->m->n_embd;
    *n = left < SLICE_IDS ? left : SLICE_IDS;
    *w = s->w->slice;
    if (s->w->way == DENSE) {
        *w = s->w->output_matrix + first * n_embd * dtype_size(s->type);
        return 0;
    }
    return k_dequant(s->d, t->type, t->at + first * t->row_bytes, t->row_bytes, NULL, *n, n_embd, s->type, s->w->slice,
                     n_embd);
}
