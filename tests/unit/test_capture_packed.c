/* Capture from a backend that packs by itself: the CPU backend behind a mask that hands over what it computed as f16
 * tiles, in runs that respect no boundary. The file must be the one that the CPU backend alone gives. */
#include "base/err.h"
#include "base/half.h"
#include "base/mem.h"
#include "base/progress.h"
#include "base/rng.h"
#include "tests/unit/model_build.h"
#include "tracer/capture.h"
#include "tracer/cpu/cpu.h"
#include "traces/hdf.h"
#include "traces/kernels.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum { LAYERS = 2, HEADS = 3, KV_HEADS = 1, DIM = 4, VOCAB = 11, RUN = 4 /* chunks handed over together */ };

/* ---- the backend ------------------------------------------------------------------------------------------------ */

/* A pass on its way from one sink to the other. */
typedef struct mask {
    const forward_sink *to;
    const gradient_sink *gradients;
    size_t T, edge, tiles;
    uint8_t *probs; /* [HEADS][tiles*(tiles+1)/2][2*edge*edge] of the current layer */
    uint8_t *heads; /* [HEADS][tiles][2*edge*DIM] */
    float *scale;   /* [HEADS][T] */
} mask;

static bool spoil_scale; /* leave a gradient that is not finite */

/* rows x cols of `height` x `width` values, as the trace stores them before compression. */
static void pack_values(const float *x, size_t rows, size_t cols, size_t stride, size_t height, size_t width,
                        uint8_t *out) {
    half *tile = mem_new(height * width, sizeof *tile, "test");
    for (size_t r = 0; r < rows; r++) kernels()->f32_to_f16(x + r * stride, tile + r * width, cols);
    kernels()->shuffle2((const unsigned char *)tile, out, height * width);
    mem_free(tile);
}

static size_t triangle(size_t n) {
    return n * (n + 1) / 2;
}

static int keep_rows(void *context, int layer, int head, int32_t row0, int32_t n, const float *p, size_t stride) {
    (void)layer;
    mask *m = context;
    size_t tile = (size_t)row0 / TRACE_TILE, bytes = 2 * m->edge * m->edge;
    uint8_t *out = m->probs + ((size_t)head * triangle(m->tiles) + triangle(tile)) * bytes;
    for (size_t col = 0; col < (size_t)(row0 + n); col += TRACE_TILE, out += bytes) {
        size_t cols = (size_t)(row0 + n) - col < TRACE_TILE ? (size_t)(row0 + n) - col : TRACE_TILE;
        pack_values(p + col, (size_t)n, cols, stride, m->edge, m->edge, out);
    }
    return 0;
}

static int hand_over(const mask *m, trace_array array, int layer, size_t n, const uint8_t *bytes, size_t each) {
    for (size_t i = 0; i < n; i += RUN)
        TRY(m->to->tiles(m->to->context, array, layer, i, n - i < RUN ? n - i : RUN, bytes + i * each));
    return 0;
}

static void pack_heads(const mask *m, size_t heads, const float *x, size_t stride) {
    for (size_t h = 0; h < heads; h++)
        for (size_t tile = 0; tile < m->tiles; tile++) {
            size_t row = tile * TRACE_TILE, rows = m->T - row < TRACE_TILE ? m->T - row : TRACE_TILE;
            pack_values(x + row * stride + h * DIM, rows, DIM, stride, m->edge, DIM,
                        m->heads + (h * m->tiles + tile) * 2 * m->edge * DIM);
        }
}

static int mask_layer(void *context, int layer, const layer_capture *c) {
    mask *m = context;
    const struct {
        trace_array array;
        size_t heads;
        const float *values;
    } part[] = {{TRACE_Q, HEADS, c->q}, {TRACE_K, KV_HEADS, c->k}, {TRACE_V, KV_HEADS, c->v}};
    if (m->to->wants_probs)
        TRY(hand_over(m, TRACE_PROBS, layer, HEADS * triangle(m->tiles), m->probs, 2 * m->edge * m->edge));
    for (int i = 0; i < 3 && m->to->wants_qkv; i++) {
        pack_heads(m, part[i].heads, part[i].values, c->stride);
        TRY(hand_over(m, part[i].array, layer, part[i].heads * m->tiles, m->heads, 2 * m->edge * DIM));
    }
    return m->to->layer(m->to->context, layer, &(layer_capture){.lse = c->lse});
}

/* Numbers that nothing else makes. */
static int mask_logits(void *context, int32_t row0, int32_t n, float *logits, size_t stride) {
    mask *m = context;
    if (m->to->logits) return m->to->logits(m->to->context, row0, n, logits, stride);
    static float target[TRACE_TILE], entropy[TRACE_TILE], top[TRACE_TILE * 3];
    static uint8_t correct[TRACE_TILE];
    static int32_t id[TRACE_TILE * 3];
    assert_int_equal(m->to->n_topk, 3);
    for (int32_t r = 0; r < n; r++) {
        target[r] = -(float)(row0 + r) / 64;
        entropy[r] = (float)(row0 + r) / 128;
        correct[r] = (row0 + r) % 3 == 0;
        for (int i = 0; i < 3; i++)
            top[r * 3 + i] = -(float)(row0 + r + i) / 32, id[r * 3 + i] = (row0 + r + i) % VOCAB;
    }
    const step_stats s = {
        .target_logprob = target, .entropy = entropy, .correct = correct, .topk_id = id, .topk_logprob = top};
    return m->to->stats(m->to->context, row0, n, &s);
}

static void scale_row(float *x, float *scale) {
    *scale = 0;
    for (int d = 0; d < DIM; d++) *scale = fmaxf(*scale, fabsf(x[d]));
    for (int d = 0; d<DIM && * scale> 0; d++) x[d] /= *scale;
}

static int mask_gradient(void *context, int layer, const float *d_heads, size_t set_stride, size_t stride) {
    mask *m = context;
    float *x = mem_new(m->T * HEADS * DIM, sizeof *x, "test");
    int code = 0;
    for (int set = 0; set < 3 && !code; set++) {
        for (size_t i = 0; i < m->T * HEADS; i++) {
            size_t t = i / HEADS, h = i % HEADS;
            memcpy(x + i * DIM, d_heads + (size_t)set * set_stride + t * stride + h * DIM, DIM * sizeof *x);
            scale_row(x + i * DIM, &m->scale[h * m->T + t]);
        }
        if (spoil_scale) m->scale[m->T + 2] = INFINITY;
        pack_heads(m, HEADS, x, HEADS * DIM);
        code = m->gradients->packed(m->gradients->context, layer, set, m->heads, m->scale);
    }
    mem_free(x);
    return code;
}

static int mask_labels(void *context, const int32_t *label) {
    const mask *m = context;
    return m->gradients->labels(m->gradients->context, label);
}

static int run_masked(backend_state *s, const int32_t *tokens, int32_t n, const forward_sink *sink,
                      const label_plan *labels, const gradient_sink *gradients) {
    size_t T = (size_t)n, edge = T < TRACE_TILE ? T : TRACE_TILE, tiles = (T + TRACE_TILE - 1) / TRACE_TILE;
    mask m = {.to = sink, .gradients = gradients, .T = T, .edge = edge, .tiles = tiles};
    m.probs = mem_new(HEADS * triangle(tiles), 2 * edge * edge, "test");
    m.heads = mem_new(HEADS * tiles, 2 * edge * DIM, "test");
    m.scale = mem_new(HEADS * T, sizeof *m.scale, "test");
    const forward_sink mine = {.context = &m, .rows = keep_rows, .layer = mask_layer, .logits = mask_logits};
    const gradient_sink back = {.context = &m, .labels = mask_labels, .layer = mask_gradient};
    assert_null(sink->rows);
    int code = gradients ? cpu_forward_backward(s, tokens, n, NULL, &mine, labels, &back)
                         : cpu_forward(s, tokens, n, NULL, &mine);
    mem_free(m.probs);
    mem_free(m.heads);
    mem_free(m.scale);
    return code;
}

static int masked_forward(backend_state *s, const int32_t *tokens, int32_t n, const int32_t *evict_at,
                          const forward_sink *sink) {
    assert_null(evict_at);
    return run_masked(s, tokens, n, sink, NULL, NULL);
}

static int masked_backward(backend_state *s, const int32_t *tokens, int32_t n, const int32_t *evict_at,
                           const forward_sink *sink, const label_plan *labels, const gradient_sink *gradients) {
    assert_null(evict_at);
    assert_null(gradients->layer);
    return run_masked(s, tokens, n, sink, labels, gradients);
}

static int load(const model *m, pool *p, const backend_options *o, backend_state **out) {
    return cpu_backend.load(m, p, o, out);
}

static void unload(backend_state *s) {
    cpu_backend.unload(s);
}

static const backend packing = {.name = "mask",
                                .packs = true,
                                .load = load,
                                .unload = unload,
                                .forward = masked_forward,
                                .forward_backward = masked_backward};

/* ---- a trace ---------------------------------------------------------------------------------------------------- */

static float varied(const char *name, size_t i) {
    if (strstr(name, "norm")) return 1;
    return (float)(rng_uniform(rng_philox(strlen(name) + (uint64_t)name[4], (uint32_t)i, 0, 0, 0).v[0]) - 0.5) * 2;
}

static float large_v(const char *name, size_t i) {
    return strstr(name, "attn_v.bias") ? (i == 1 ? 70000.0f : 1.0f) : varied(name, i);
}

static const trace_plan everything = {
    .dense = true, .factored = true, .lse = true, .row_sum = true, .topk = 3, .grad_loss = true, .n_fisher = 2};

static int capture_with(const backend *b, const trace_plan *plan, mini shape, int32_t T, const char *path,
                        uint64_t *hash) {
    char file[32];
    int fd = mini_file(shape, file);
    model *m;
    int32_t tokens[600];
    capture c = {.backend = b, .plan = *plan};
    for (int i = 0; i < 600; i++) tokens[i] = i * i % VOCAB;
    if (model_open(file, &m) || pool_new(3, &c.pool) || b->load(m, c.pool, &cpu_options, &c.state))
        fail_msg("%s", err_message());
    close(fd);
    c.model = m;
    trace_model facts = {
        .n_layer = LAYERS, .n_head = HEADS, .n_kv_head = KV_HEADS, .head_dim = DIM, .n_embd = m->n_embd};
    facts.n_vocab = VOCAB;
    facts.scale = m->scale;
    facts.window = m->window;
    trace_sequence seq = {.n_tokens = T, .n_prompt = 1, .tokens = tokens};
    if (trace_writer_new(path, true, NULL, 0, &facts, "test", "test", 1, &c.writer)) fail_msg("%s", err_message());
    int code = capture_sequence(&c, &seq);
    if (code) trace_writer_abort(c.writer);
    else code = trace_writer_finish(c.writer, NULL);
    assert_string_equal(capture_hashed(&c), b->packs && !plan->full_logits ? "predictions" : "logits");
    *hash = c.logits_hash;
    b->unload(c.state);
    model_close(m);
    pool_free(c.pool);
    return code;
}

static const mini shape = {.n_layer = LAYERS,
                           .n_embd = HEADS * DIM,
                           .n_vocab = VOCAB,
                           .n_head = HEADS,
                           .n_kv_head = KV_HEADS,
                           .value = varied};

/* ---- comparing -------------------------------------------------------------------------------------------------- */

static size_t bytes_of(hid_t h5, const char *name, void **out) {
    hid_t set = H5Dopen2(h5, name, H5P_DEFAULT);
    hdf_layout l;
    hsize_t start[H5S_MAX_RANK] = {0};
    assert_int_equal(hdf_get_layout(set, &l), 0);
    size_t bytes = l.size;
    for (int d = 0; d < l.rank; d++) bytes *= (size_t)l.dims[d];
    *out = mem_new(bytes, 1, "test");
    hid_t type = H5Dget_type(set);
    assert_int_equal(hdf_read_block(set, type, l.rank, start, l.dims, *out), 0);
    H5Tclose(type);
    H5Dclose(set);
    return bytes;
}

static void same_datasets(const char *a, const char *b) {
    hid_t h5[2];
    char **name = NULL;
    size_t n = 0, compared = 0;
    if (hdf_open(a, &h5[0]) || hdf_open(b, &h5[1]) || hdf_list_datasets(h5[0], &name, &n))
        fail_msg("%s", err_message());
    for (size_t i = 0; i < n; i++) {
        void *values[2];
        if (strstr(name[i], "logits/")) continue;
        size_t bytes = bytes_of(h5[0], name[i], &values[0]);
        assert_int_equal(bytes_of(h5[1], name[i], &values[1]), bytes);
        if (memcmp(values[0], values[1], bytes) != 0) fail_msg("%s differs", name[i]);
        mem_free(values[0]);
        mem_free(values[1]);
        compared++;
    }
    assert_int_equal(compared, 12); /* tokens, 6 of attn, 5 of grad */
    hdf_free_names(name, n);
    H5Fclose(h5[0]);
    H5Fclose(h5[1]);
}

static void stats_are_those_handed_over(const char *path, int32_t T) {
    trace *t = NULL;
    hid_t h5;
    int64_t dims[2] = {T, 3};
    void *id;
    if (trace_open(path, &t)) fail_msg("%s", err_message());
    const trace_sequence *s = trace_get_sequence(t, 0);
    for (int32_t i = 0; i + 1 < T; i++) {
        assert_true(s->target_logprob[i] == -(float)i / 64 && s->entropy[i] == (float)i / 128);
        assert_int_equal(s->correct[i], i % 3 == 0);
    }
    trace_close(t);
    if (hdf_open(path, &h5) || hdf_read_all(h5, "seq/0000/logits/topk_id", HDF_INTEGER, H5T_NATIVE_INT32, 2, dims, &id))
        fail_msg("%s", err_message());
    for (int32_t i = 0; i < 3 * T; i++) assert_int_equal(((int32_t *)id)[i], (i / 3 + i % 3) % VOCAB);
    mem_free(id);
    H5Fclose(h5);
}

/* ---- tests ------------------------------------------------------------------------------------------------------ */

static char folder[32], plain[64], masked[64];

static int make_folder(void **state) {
    (void)state;
    snprintf(folder, sizeof folder, "/tmp/packed_XXXXXX");
    if (!mkdtemp(folder)) return 1;
    snprintf(plain, sizeof plain, "%s/plain.h5", folder);
    snprintf(masked, sizeof masked, "%s/masked.h5", folder);
    return 0;
}

static int remove_folder(void **state) {
    (void)state;
    unlink(plain);
    unlink(masked);
    return rmdir(folder);
}

static void the_file_is_that_of_the_cpu_backend(void **state) {
    (void)state;
    const int32_t length[] = {2, 31, 256, 600};
    for (size_t i = 0; i < sizeof length / sizeof *length; i++) {
        uint64_t hash[2];
        if (capture_with(&cpu_backend, &everything, shape, length[i], plain, &hash[0]) ||
            capture_with(&packing, &everything, shape, length[i], masked, &hash[1]))
            fail_msg("%s", err_message());
        assert_true(hash[0] != hash[1]);
        same_datasets(plain, masked);
        stats_are_those_handed_over(masked, length[i]);
    }
}

/* With the logits handed over as well every byte is the same. */
static void full_logits_pass_through(void **state) {
    (void)state;
    trace_plan plan = everything;
    plan.full_logits = true;
    uint64_t hash[2];
    trace *t[2] = {NULL, NULL};
    if (capture_with(&cpu_backend, &plan, shape, 300, plain, &hash[0]) ||
        capture_with(&packing, &plan, shape, 300, masked, &hash[1]) || trace_open(plain, &t[0]) ||
        trace_open(masked, &t[1]))
        fail_msg("%s", err_message());
    assert_true(hash[0] == hash[1]);
    assert_string_equal(trace_hash(t[0]), trace_hash(t[1]));
    trace_close(t[0]);
    trace_close(t[1]);
}

static void only_what_is_planned(void **state) {
    (void)state;
    trace_plan plan = {.factored = true, .lse = true, .topk = 3};
    uint64_t hash;
    trace *t = NULL;
    if (capture_with(&packing, &plan, shape, 40, masked, &hash) || trace_open(masked, &t))
        fail_msg("%s", err_message());
    const trace_sequence *s = trace_get_sequence(t, 0);
    assert_true(s->has_factored && !s->has_dense && !s->has_grad_loss);
    trace_close(t);
}

static void bad_values_are_named(void **state) {
    (void)state;
    mini m = shape;
    uint64_t hash;
    m.bias = true;
    m.value = large_v;
    assert_int_equal(capture_with(&packing, &everything, m, 9, masked, &hash), ERR_DATA);
    if (!strstr(err_message(), "v of layer 0, head 0: a value does not fit f16")) fail_msg("%s", err_message());
    spoil_scale = true;
    assert_int_equal(capture_with(&packing, &everything, shape, 9, masked, &hash), ERR_DATA);
    if (!strstr(err_message(), "gradient of layer 1, head 1, steps from 0: row 2 of a tile: a gradient that is not"))
        fail_msg("%s", err_message());
    spoil_scale = false;
}

int main(void) {
    say_level(SAY_QUIET);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_file_is_that_of_the_cpu_backend),
        cmocka_unit_test(full_logits_pass_through),
        cmocka_unit_test(only_what_is_planned),
        cmocka_unit_test(bad_values_are_named),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
