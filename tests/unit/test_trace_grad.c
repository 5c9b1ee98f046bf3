/* Gradients in a trace: f16 rows with a scale each, written and read back. */
#include "tests/unit/trace_build.h"
#include "traces/check.h"

#include <stdint.h>

static void expect(const char *part) {
    if (!strstr(err_message(), part)) fail_msg("message is '%s', expected '%s' in it", err_message(), part);
}

static void compare_rows(const trace_layer *l, const built *b, int set, int layer, int head) {
    const float *got = trace_layer_grad(l, set, head);
    for (int32_t t = 0; t < b->T; t++) {
        float most = 0;
        for (int d = 0; d < 8; d++) most = fmaxf(most, fabsf(build_gradient(b, set, layer, head, t, d)));
        for (int d = 0; d < 8; d++) {
            float want = build_gradient(b, set, layer, head, t, d);
            if (!(fabsf(got[t * 8 + d] - want) <= most * 0x1p-11f))
                fail_msg("set %d layer %d head %d row %d value %d: %.9g, want %.9g", set, layer, head, t, d,
                         (double)got[t * 8 + d], (double)want);
        }
    }
}

/* Rows in parts, in any order, are the rows of the whole layer. */
static void compare_parts(trace_layer *l, int32_t T, int32_t n_fisher, pool *p) {
    size_t each = (size_t)T * 8, all = (size_t)(1 + n_fisher) * 4 * each;
    float *whole = mem_new(all, sizeof *whole, "test");
    int32_t starts[] = {T / 2, 0, T - 1, T / 3};
    memcpy(whole, trace_layer_grad(l, 0, 0), all * sizeof *whole);
    for (size_t i = 0; i < sizeof starts / sizeof *starts; i++) {
        int32_t n = T - starts[i] < 100 ? T - starts[i] : 100;
        BUILD_OK(trace_layer_prefetch(l, starts[i] + (i % 2 ? n : 0))); /* used at once, later, or not at all */
        BUILD_OK(trace_layer_read_grad(l, starts[i], n, p));
        for (int set = 0; set <= n_fisher; set++)
            for (int h = 0; h < 4; h++)
                assert_memory_equal(trace_layer_grad(l, set, h),
                                    whole + (size_t)(set * 4 + h) * each + (size_t)starts[i] * 8,
                                    (size_t)n * 8 * sizeof *whole);
    }
    mem_free(whole);
    assert_int_not_equal(trace_layer_read_grad(l, T - 1, 2, p), 0);
    expect("internal error: gradients of rows");
}

/* Rows that were read ahead are the same rows. */
static void compare_prefetched(trace_layer *l, int32_t T, pool *p) {
    size_t stride = kernel_pad((size_t)T), all = 4 * (size_t)T * stride;
    float *whole = mem_new(all, sizeof *whole, "test"), *part = mem_new(4 * stride * 64, sizeof *part, "test");
    int32_t starts[] = {0, T / 2, T / 40, T - 1, T / 3};
    BUILD_OK(trace_layer_rows(l, 0, T, whole, stride, p));
    for (size_t i = 0; i < sizeof starts / sizeof *starts; i++) {
        int32_t n = T - starts[i] < 64 ? T - starts[i] : 64;
        BUILD_OK(trace_layer_prefetch(l, starts[(i + 1) % 5]));
        BUILD_OK(trace_layer_rows(l, starts[i], n, part, stride, p));
        for (size_t h = 0; h < 4; h++)
            assert_memory_equal(part + h * (size_t)n * stride, whole + (h * (size_t)T + (size_t)starts[i]) * stride,
                                (size_t)n * stride * sizeof *part);
    }
    BUILD_OK(trace_layer_prefetch(l, T)); /* behind the last one: nothing */
    mem_free(whole);
    mem_free(part);
}

static void round_trip(int32_t T, int32_t n_fisher, trace_form form, int threads) {
    built b = build(T, false);
    trace *t;
    pool *p;
    trace_layer *l;
    trace_plan plan = {.dense = form == TRACE_DENSE, .factored = form == TRACE_FACTORED, .grad_loss = true};
    plan.n_fisher = n_fisher;
    BUILD_OK(build_write(&b, b.path, NULL, &plan, 1));
    BUILD_OK(pool_new(threads, &p));
    BUILD_OK(trace_open(b.path, &t));
    assert_true(trace_get_sequence(t, 0)->has_grad_loss);
    assert_int_equal(trace_get_sequence(t, 0)->n_fisher, n_fisher);
    assert_true(trace_layer_grad_bytes(t, 0, T) >= (size_t)(1 + n_fisher) * 4 * 8 * 4 * (size_t)T);
    for (int layer = 0; layer < 2; layer++) {
        BUILD_OK(trace_layer_open(t, 0, layer, form, p, &l));
        BUILD_OK(trace_layer_read_grad(l, 0, T, p));
        BUILD_OK(trace_layer_read_grad(l, 0, T, p)); /* again: nothing new */
        for (int set = 0; set <= n_fisher; set++)
            for (int h = 0; h < 4; h++) compare_rows(l, &b, set, layer, h);
        compare_parts(l, T, n_fisher, p);
        compare_prefetched(l, T, p);
        trace_layer_close(l);
    }
    check_sequence checked;
    BUILD_OK(check_trace(t, false, p, &checked));
    trace_close(t);
    pool_free(p);
    build_free(&b);
}

static void all_sets_at_the_edges_of_a_chunk(void **state) {
    (void)state;
    round_trip(1, 1, TRACE_DENSE, 1);
    round_trip(2, 0, TRACE_FACTORED, 1);
    round_trip(256, 1, TRACE_FACTORED, 2);
    round_trip(300, 3, TRACE_DENSE, 3);
}

/* Tiles packed by hand: one layer, one head of `dim` values, `T` rows of `values`. */
static int write_rows(const char *path, const float *values, int32_t T, int32_t dim) {
    trace_writer *w;
    int32_t window = 0;
    trace_model m = {.n_layer = 1, .n_head = 1, .n_kv_head = 1, .head_dim = dim, .n_vocab = 9, .scale = 1};
    trace_chunk c;
    float *scale = mem_new((size_t)T, sizeof *scale, "test"), *one = mem_new((size_t)(T * dim), sizeof *one, "test");
    m.window = &window;
    BUILD_OK(trace_writer_new(path, true, NULL, 0, &m, "t", "t", 1, &w));
    BUILD_OK(
        trace_write_sequence(w, &(trace_sequence){.n_tokens = T}, &(trace_plan){.factored = true, .grad_loss = true}));
    int code = trace_pack_grad(w, values, (size_t)T, (size_t)dim, scale, &c);
    if (!code) {
        BUILD_OK(trace_put_grad(w, 0, 0, 0, 0, &c));
        BUILD_OK(trace_write_grad_scale(w, 0, 0, 0, scale));
        for (trace_array a = TRACE_Q; a <= TRACE_V; a++) {
            BUILD_OK(trace_pack(w, a, one, (size_t)T, (size_t)dim, (size_t)dim, NULL, &c));
            BUILD_OK(trace_put(w, a, 0, 0, 0, 0, &c));
        }
        BUILD_OK(trace_writer_finish(w, NULL));
    } else trace_writer_abort(w);
    mem_free(scale);
    mem_free(one);
    return code;
}

static void read_rows(const char *path, float *out, size_t n) {
    trace *t;
    pool *p;
    trace_layer *l;
    BUILD_OK(pool_new(1, &p));
    BUILD_OK(trace_open(path, &t));
    BUILD_OK(trace_layer_open(t, 0, 0, TRACE_AUTO, p, &l));
    BUILD_OK(trace_layer_read_grad(l, 0, trace_get_sequence(t, 0)->n_tokens, p));
    memcpy(out, trace_layer_grad(l, 0, 0), n * sizeof *out);
    trace_layer_close(l);
    trace_close(t);
    pool_free(p);
}

static void values_by_hand(void **state) {
    (void)state;
    /* Powers of two of the largest are exact, however small it is; 1/3 is 1365 * 2^-12 in f16, times 3 is 4095/4096;
     * 1e-8 of the largest is below half of f16's least step of 2^-24. */
    const float rows[5][4] = {
        {1, -0.5f, 0.125f, 0}, {0x1p-140f, -0x1p-141f, 0, 0}, {0, 0, -0.0f, 0}, {3, 1, -1, 0}, {-1e30f, 1e22f, 0, 0}};
    const float want[5][4] = {{1, -0.5f, 0.125f, 0},
                              {0x1p-140f, -0x1p-141f, 0, 0},
                              {0, 0, 0, 0},
                              {3, 4095.0f / 4096, -4095.0f / 4096, 0},
                              {-1e30f, 0, 0, 0}};
    float got[5][4];
    built b = build(2, false);
    BUILD_OK(write_rows(b.path, rows[0], 5, 4));
    read_rows(b.path, got[0], 20);
    for (int r = 0; r < 5; r++)
        for (int d = 0; d < 4; d++) assert_true(got[r][d] == want[r][d]);
    build_free(&b);
}

static void heads_wider_than_a_tile(void **state) {
    (void)state;
    enum { DIM = 600 };
    float rows[2 * DIM], got[2 * DIM];
    for (int i = 0; i < 2 * DIM; i++) rows[i] = ldexpf((float)(i % 16), -4);
    rows[7] = rows[DIM + 599] = 1; /* the largest: all others are exact */
    built b = build(2, false);
    BUILD_OK(write_rows(b.path, rows, 2, DIM));
    read_rows(b.path, got, 2 * DIM);
    assert_memory_equal(got, rows, sizeof rows);
    build_free(&b);
}

static void what_is_not_finite_is_refused(void **state) {
    (void)state;
    const float bad[] = {NAN, INFINITY, -INFINITY};
    built b = build(2, false);
    for (int i = 0; i < 3; i++) {
        float rows[8] = {1, 2, 3, 4, 5, 6, bad[i], 8};
        assert_int_not_equal(write_rows(b.path, rows, 2, 4), 0);
        expect("row 1 of a tile: a gradient that is not finite");
        assert_int_not_equal(access(b.path, F_OK), 0);
    }
    build_free(&b);
}

/* ---- order and wholeness ---------------------------------------------------------------------------------------- */

static trace_writer *start(built *b, const trace_plan *plan) {
    static int32_t window[2];
    trace_writer *w;
    b->model.window = window;
    BUILD_OK(trace_writer_new(b->path, true, NULL, 0, &b->model, "t", "t", 1, &w));
    BUILD_OK(trace_write_sequence(w, &(trace_sequence){.n_tokens = b->T}, plan));
    return w;
}

static int put_one(trace_writer *w, int set, int layer, int head, int tile) {
    float rows[8] = {1}, scale[1];
    trace_chunk c;
    BUILD_OK(trace_pack_grad(w, rows, 1, 8, scale, &c));
    return trace_put_grad(w, set, layer, head, tile, &c);
}

static void index_order(void **state) {
    (void)state;
    built b = build(257, false);
    const trace_plan plan = {.grad_loss = true, .n_fisher = 2};
    float scale[257] = {0};
    trace_writer *w = start(&b, &plan);
    assert_int_not_equal(put_one(w, 0, 0, 0, 1), 0);
    expect("gradients out of order");
    BUILD_OK(put_one(w, 0, 0, 0, 0));
    BUILD_OK(put_one(w, 1, 0, 0, 0)); /* each dataset has its own order */
    assert_int_not_equal(put_one(w, 0, 0, 1, 0), 0);
    BUILD_OK(put_one(w, 0, 0, 0, 1));
    BUILD_OK(put_one(w, 0, 0, 1, 0));
    assert_int_not_equal(put_one(w, 2, 0, 0, 0), 0);
    BUILD_OK(trace_write_grad_scale(w, 0, 0, 0, scale));
    assert_int_not_equal(trace_write_grad_scale(w, 0, 1, 0, scale), 0);
    expect("scales out of order");
    assert_int_not_equal(trace_writer_finish(w, NULL), 0);
    expect("ended before its gradients were whole");
    assert_int_not_equal(access(b.path, F_OK), 0);
    w = start(&b, &(trace_plan){.grad_loss = true});
    assert_int_not_equal(put_one(w, 1, 0, 0, 0), 0);
    trace_writer_abort(w);
    build_free(&b);
}

static void plans_and_labels(void **state) {
    (void)state;
    built b = build(3, false);
    const trace_plan plan = {.grad_loss = true, .n_fisher = 1};
    trace_writer *w = start(&b, &plan);
    for (int set = 0; set < 2; set++)
        for (int l = 0; l < 2; l++)
            for (int h = 0; h < 4; h++) BUILD_OK(build_put_gradients(w, &b, set, l, h));
    assert_int_not_equal(trace_write_fisher_labels(w, (int32_t[]){4, 50}), 0);
    expect("grad/fisher_label: sample 0, step 1 is 50, outside the vocabulary of 50");
    assert_int_not_equal(trace_write_fisher_labels(w, (int32_t[]){-2, 4}), 0);
    BUILD_OK(trace_write_fisher_labels(w, (int32_t[]){-1, 49}));
    assert_int_not_equal(trace_write_fisher_labels(w, (int32_t[]){-1, 49}), 0);
    expect("twice");
    BUILD_OK(trace_writer_finish(w, NULL));
    w = start(&b, &plan);
    for (int set = 0; set < 2; set++)
        for (int l = 0; l < 2; l++)
            for (int h = 0; h < 4; h++) BUILD_OK(build_put_gradients(w, &b, set, l, h));
    assert_int_not_equal(trace_writer_finish(w, NULL), 0);
    expect("ended without grad/fisher_label");
    BUILD_OK(trace_writer_new(b.path, true, NULL, 0, &b.model, "t", "t", 1, &w));
    assert_int_not_equal(trace_write_sequence(w, &(trace_sequence){.n_tokens = 3}, &(trace_plan){.n_fisher = 1}), 0);
    expect("grad/fisher without grad/loss");
    trace_writer_abort(w);
    build_free(&b);
}

static void a_trace_without_gradients(void **state) {
    (void)state;
    built b = build(3, false);
    trace *t;
    pool *p;
    trace_layer *l;
    BUILD_OK(build_write(&b, b.path, NULL, &(trace_plan){.factored = true}, 1));
    BUILD_OK(pool_new(1, &p));
    BUILD_OK(trace_open(b.path, &t));
    assert_false(trace_get_sequence(t, 0)->has_grad_loss);
    assert_int_equal(trace_layer_grad_bytes(t, 0, 1), 0);
    BUILD_OK(trace_layer_open(t, 0, 0, TRACE_AUTO, p, &l));
    assert_int_not_equal(trace_layer_read_grad(l, 0, 1, p), 0);
    expect("seq/0000 has no grad/loss");
    expect(b.path);
    trace_layer_close(l);
    trace_close(t);
    pool_free(p);
    build_free(&b);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_sets_at_the_edges_of_a_chunk),
        cmocka_unit_test(values_by_hand),
        cmocka_unit_test(heads_wider_than_a_tile),
        cmocka_unit_test(what_is_not_finite_is_refused),
        cmocka_unit_test(index_order),
        cmocka_unit_test(plans_and_labels),
        cmocka_unit_test(a_trace_without_gradients),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
