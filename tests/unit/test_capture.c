/* From a forward pass to the trace file, on a model whose results are known: what is written, and what is refused with
 * nothing left behind. */
#include "base/err.h"
#include "base/progress.h"
#include "base/rng.h"
#include "tests/unit/model_build.h"
#include "tracer/capture.h"
#include "tracer/cpu/cpu.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

/* Token j's embedding is j+1 everywhere, norms are 1, and nothing is added to it: every step's logits are 4, 8, 12.
 * With biases, q and k are (1, 0) in every head, turned to (cos t, sin t). */
static float known_value(const char *name, size_t i) {
    if (strcmp(name, "token_embd.weight") == 0) return (float)(i / 4 + 1);
    if (strstr(name, "attn_q.bias") || strstr(name, "attn_k.bias")) return (float)(i % 2 == 0);
    return strstr(name, "norm") ? 1.0f : 0.0f;
}

/* Tokens 1 and 2 share their embedding, and so their logits. */
static float tied_value(const char *name, size_t i) {
    return strcmp(name, "token_embd.weight") == 0 ? (i < 4 ? 1.0f : 2.0f) : known_value(name, i);
}

static float infinite_output(const char *name, size_t i) {
    return strcmp(name, "output.weight") == 0 ? (i == 0 ? INFINITY : 1.0f) : known_value(name, i);
}

/* Values past f16's 65504 in the second kv head. */
static float large_v(const char *name, size_t i) {
    return strstr(name, "attn_v.bias") ? (i == 2 ? 70000.0f : 1.0f) : known_value(name, i);
}

typedef struct setup {
    char folder[32], path[64];
    capture c;
} setup;

static const mini shape = {.n_layer = 2, .n_embd = 4, .n_vocab = 3, .n_head = 2, .n_kv_head = 2, .value = known_value};
static const trace_plan plan = {.dense = true, .factored = true, .lse = true, .row_sum = true, .topk = 2};

static void begin(setup *s, mini m, trace_plan p, size_t n_sequences) {
    *s = (setup){.folder = "/tmp/capture_XXXXXX", .c = {.backend = &cpu_backend, .plan = p}};
    char file[32];
    int fd = mini_file(m, file);
    model *opened;
    assert_non_null(mkdtemp(s->folder));
    snprintf(s->path, sizeof s->path, "%s/t.h5", s->folder);
    if (model_open(file, &opened) || pool_new(2, &s->c.pool) ||
        cpu_backend.load(opened, s->c.pool, &cpu_options, &s->c.state))
        fail_msg("%s", err_message());
    close(fd);
    s->c.model = opened;
    trace_model facts = {.n_layer = opened->n_layer,
                         .n_head = opened->n_head,
                         .n_kv_head = opened->n_kv_head,
                         .head_dim = opened->head_dim,
                         .n_embd = opened->n_embd,
                         .n_vocab = opened->n_vocab,
                         .scale = opened->scale,
                         .window = opened->window};
    if (trace_writer_new(s->path, false, NULL, 0, &facts, "test", "test", n_sequences, &s->c.writer))
        fail_msg("%s", err_message());
}

static void finish(setup *s, trace **t) {
    int64_t bytes;
    int code = trace_writer_finish(s->c.writer, &bytes);
    s->c.writer = NULL;
    if (code || trace_open(s->path, t)) fail_msg("%s", err_message());
}

/* The folder must be empty but for the trace, if it was finished. */
static void end(setup *s) {
    trace_writer_abort(s->c.writer);
    cpu_backend.unload(s->c.state);
    model_close((model *)s->c.model);
    pool_free(s->c.pool);
    unlink(s->path);
    assert_int_equal(rmdir(s->folder), 0);
}

static void put(setup *s, const int32_t *tokens, int32_t n) {
    trace_sequence seq = {.n_tokens = n, .tokens = tokens};
    if (capture_sequence(&s->c, &seq)) fail_msg("%s", err_message());
}

static void predictions_by_hand(void **state) {
    (void)state;
    setup s;
    trace *t;
    begin(&s, shape, plan, 2);
    put(&s, (const int32_t[]){0, 2, 1, 0, 2}, 5);
    put(&s, (const int32_t[]){2, 2}, 2);
    finish(&s, &t);
    double lse = log(exp(4.0) + exp(8.0) + exp(12.0)), entropy = 0;
    for (int j = 1; j <= 3; j++) entropy -= exp(4.0 * j - lse) * (4.0 * j - lse);
    const int next[] = {2, 1, 0, 2};
    assert_int_equal(trace_n_sequences(t), 2);
    const trace_sequence *first = trace_get_sequence(t, 0);
    for (int i = 0; i < 4; i++) {
        assert_float_equal(first->target_logprob[i], (float)(4.0 * (next[i] + 1) - lse), 1e-5f);
        assert_float_equal(first->entropy[i], (float)entropy, 1e-5f);
        assert_int_equal(first->correct[i], next[i] == 2);
    }
    assert_int_equal(trace_get_sequence(t, 1)->correct[0], 1);
    assert_true(first->has_dense && first->has_factored && first->has_v && first->has_lse);
    trace_close(t);
    end(&s);
}

static void ties_go_to_the_lowest_id(void **state) {
    (void)state;
    setup s;
    trace *t;
    mini m = shape;
    m.value = tied_value;
    begin(&s, m, plan, 1);
    put(&s, (const int32_t[]){0, 1, 2, 1}, 4);
    finish(&s, &t);
    const uint8_t *correct = trace_get_sequence(t, 0)->correct;
    assert_int_equal(correct[0], 1); /* next is 1 */
    assert_int_equal(correct[1], 0); /* next is 2, as likely as 1 */
    assert_int_equal(correct[2], 1);
    trace_close(t);
    end(&s);
}

static void both_forms_give_the_same_rows(void **state) {
    (void)state;
    /* The score of step t on entry i is cos(t - i) over sqrt 2; two row tiles. */
    enum { T = 300, STRIDE = 304 };
    static int32_t tokens[T];
    static float rows[2 * T * STRIDE] __attribute__((aligned(64)));
    setup s;
    trace *t;
    mini m = shape;
    m.bias = true;
    begin(&s, m, plan, 1);
    put(&s, tokens, T);
    finish(&s, &t);
    const trace_form forms[] = {TRACE_DENSE, TRACE_FACTORED};
    for (int f = 0; f < 2; f++)
        for (int layer = 0; layer < 2; layer++) {
            trace_layer *l;
            if (trace_layer_open(t, 0, layer, forms[f], s.c.pool, &l)) fail_msg("%s", err_message());
            if (trace_layer_rows(l, 0, T, rows, STRIDE, s.c.pool)) fail_msg("%s", err_message());
            for (int r = 0; r < 2 * T; r++) {
                int step = r % T;
                double z = 0;
                for (int i = 0; i <= step; i++) z += exp(cos(step - i) / sqrt(2.0));
                for (int i = 0; i < T; i++) {
                    float want = i <= step ? (float)(exp(cos(step - i) / sqrt(2.0)) / z) : 0;
                    assert_float_equal(rows[(size_t)r * STRIDE + (size_t)i], want, 2e-3f * want);
                }
            }
            trace_layer_close(l);
        }
    trace_close(t);
    end(&s);
}

/* Numbers without a pattern, the same in every run. */
static float varied(const char *name, size_t i) {
    if (strstr(name, "norm")) return 1;
    return (float)(rng_uniform(rng_philox(strlen(name) + (uint64_t)name[4], (uint32_t)i, 0, 0, 0).v[0]) - 0.5) * 2;
}

enum { LONG = 300, DIM = 4, HEADS = 2, LAYERS = 3, SETS = 3 };

typedef struct gradients {
    float value[2][SETS][LAYERS][HEADS][LONG][DIM]; /* of two sequences */
    int sequence;
} gradients;

static int keep_gradients(void *context, int layer, const float *d_heads, size_t set_stride, size_t stride) {
    gradients *g = context;
    for (int set = 0; set < SETS; set++)
        for (int head = 0; head < HEADS; head++)
            for (size_t t = 0; t < LONG; t++)
                memcpy(g->value[g->sequence][set][layer][head][t],
                       d_heads + (size_t)set * set_stride + t * stride + (size_t)head * DIM, DIM * sizeof(float));
    return 0;
}

static void compare_gradients(const setup *s, trace *t, const gradients *g) {
    for (int i = 0; i < 2 * LAYERS; i++) {
        trace_layer *l;
        if (trace_layer_open(t, (size_t)(i % 2), i / 2, TRACE_AUTO, s->c.pool, &l) ||
            trace_layer_read_grad(l, 0, (int32_t)trace_get_sequence(t, 0)->n_tokens, s->c.pool))
            fail_msg("%s", err_message());
        for (int set = 0; set < SETS; set++)
            for (int head = 0; head < HEADS; head++)
                for (size_t step = 0; step < LONG; step++) {
                    const float *want = g->value[i % 2][set][i / 2][head][step];
                    const float *got = trace_layer_grad(l, set, head) + step * DIM;
                    float most = 0;
                    for (int d = 0; d < DIM; d++) most = fmaxf(most, fabsf(want[d]));
                    for (int d = 0; d < DIM; d++) assert_float_equal(got[d], want[d], most * 0x1p-11f);
                }
        trace_layer_close(l);
    }
}

static void gradients_are_those_of_the_counted_steps(void **state) {
    (void)state;
    /* Two sequences of the same tokens: the text's gradients are the same, the labels drawn are not. */
    static gradients g;
    int32_t tokens[LONG];
    uint8_t mask[LONG - 1], counted[LONG - 1];
    for (int i = 0; i < LONG; i++) tokens[i] = i * i % 11;
    for (int i = 0; i < LONG - 1; i++) mask[i] = i % 3 != 0, counted[i] = i >= 20 && mask[i];
    setup s;
    trace *t;
    mini m = {.n_layer = LAYERS, .n_embd = 8, .n_vocab = 11, .n_head = HEADS, .value = varied};
    trace_plan p = plan;
    p.grad_loss = true;
    p.n_fisher = SETS - 1;
    begin(&s, m, p, 2);
    s.c.seed = 5;
    for (int i = 0; i < 2; i++) {
        trace_sequence seq = {.n_tokens = LONG, .tokens = tokens, .n_prompt = 20, .counted = mask};
        const forward_sink nothing = {0};
        label_plan labels = {.counted = counted, .n_samples = SETS - 1, .seed = 5, .sequence = (uint32_t)i};
        const gradient_sink sink = {.context = &g, .layer = keep_gradients};
        g.sequence = i;
        if (capture_sequence(&s.c, &seq) ||
            cpu_backend.forward_backward(s.c.state, tokens, LONG, NULL, &nothing, &labels, &sink))
            fail_msg("%s", err_message());
    }
    assert_memory_equal(g.value[0][0], g.value[1][0], sizeof g.value[0][0]);
    assert_memory_not_equal(g.value[0][1], g.value[1][1], sizeof g.value[0][1]);
    assert_memory_not_equal(g.value[0][1], g.value[0][2], sizeof g.value[0][1]);
    finish(&s, &t);
    assert_true(trace_get_sequence(t, 0)->has_grad_loss);
    assert_int_equal(trace_get_sequence(t, 1)->n_fisher, SETS - 1);
    compare_gradients(&s, t, &g);
    trace_close(t);
    end(&s);
}

static void refuse(mini m, const char *message) {
    setup s;
    begin(&s, m, plan, 1);
    trace_sequence seq = {.n_tokens = 3, .tokens = (const int32_t[]){0, 1, 2}};
    assert_int_equal(capture_sequence(&s.c, &seq), ERR_DATA);
    if (!strstr(err_message(), message)) fail_msg("'%s' does not say '%s'", err_message(), message);
    end(&s);
}

static void bad_values_are_named_and_leave_nothing(void **state) {
    (void)state;
    mini m = shape;
    m.output = true;
    m.value = infinite_output;
    refuse(m, "non-finite logits at layer 2 (output), token 0");
    m = shape;
    m.bias = true;
    m.value = large_v;
    refuse(m, "v of layer 0, head 1: value 70000 does not fit f16");
}

int main(void) {
    say_level(SAY_QUIET);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(predictions_by_hand),
        cmocka_unit_test(ties_go_to_the_lowest_id),
        cmocka_unit_test(both_forms_give_the_same_rows),
        cmocka_unit_test(gradients_are_those_of_the_counted_steps),
        cmocka_unit_test(bad_values_are_named_and_leave_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
