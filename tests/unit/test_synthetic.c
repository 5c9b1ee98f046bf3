/* Synthetic traces: values that do not depend on tiles, threads or length, and attention of the shape that is promised.
 */
#include "tests/unit/trace_build.h"
#include "traces/synthetic.h"

static const synthetic_shape SHAPE = {.seed = 3, .n_head = 8, .n_kv_head = 2, .head_dim = 64};
enum { T = 512, DIM = 64 };

/* ---- values ----------------------------------------------------------------------------------------------------- */

static void rows_do_not_depend_on_tiles(void **state) {
    (void)state;
    static float background[T], tile[T * DIM], row[DIM];
    synthetic_background(&SHAPE, 1, 5, T, background);
    for (int what = 0; what < 4; what++)
        for (int32_t t = 100; t < 400; t += 37) {
            if (what == 0) synthetic_query(&SHAPE, 1, 5, background, 90, T - 90, tile);
            if (what == 0) synthetic_query(&SHAPE, 1, 5, background, t, 1, row);
            if (what == 1) synthetic_key(&SHAPE, 1, 1, 90, T - 90, tile);
            if (what == 1) synthetic_key(&SHAPE, 1, 1, t, 1, row);
            if (what == 2) synthetic_value(&SHAPE, 1, 1, 90, T - 90, tile);
            if (what == 2) synthetic_value(&SHAPE, 1, 1, t, 1, row);
            if (what == 3) synthetic_gradient(&SHAPE, 2, 1, 5, 90, T - 90, tile);
            if (what == 3) synthetic_gradient(&SHAPE, 2, 1, 5, t, 1, row);
            assert_memory_equal(row, tile + (t - 90) * DIM, sizeof row);
            assert_memory_not_equal(row, tile + (t - 91) * DIM, sizeof row);
        }
}

static void sinks_answer_one_coordinate(void **state) {
    (void)state;
    static const float want[] = {1.0f, 0.6f, 0.5f, 0.4f, 0, 0};
    float k[6 * DIM];
    synthetic_key(&SHAPE, 0, 0, 0, 6, k);
    for (int i = 0; i < 6; i++) {
        float rest = 0;
        for (int c = 1; c < DIM; c++) rest += k[i * DIM + c] * k[i * DIM + c];
        assert_true(k[i * DIM] == want[i]);
        if (i < SYNTHETIC_SINKS) assert_true(rest == 0);
        else assert_true(rest > 16); /* 16 pairs of position alone, each of length 1 */
    }
}

/* A head's rows from the middle on, in plain double precision. */
typedef struct measured {
    double sink, near, top; /* shares of the first 4, the last 64, the largest 5 % of the entries */
    double background;      /* mean log of what all but the sinks weigh, less what was expected */
} measured;

static int descending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x < y) - (x > y);
}

static measured measure(int head) {
    static float background[T], q[T * DIM], k[T * DIM];
    measured m = {0};
    synthetic_background(&SHAPE, 0, head, T, background);
    synthetic_query(&SHAPE, 0, head, background, 0, T, q);
    synthetic_key(&SHAPE, 0, head / 4, 0, T, k);
    for (int t = T / 2; t < T; t++) {
        double a[T], sum = 0, sink = 0, near = 0, top = 0;
        for (int i = 0; i <= t; i++) {
            double score = 0;
            for (int c = 0; c < DIM; c++) score += (double)q[t * DIM + c] * (double)k[i * DIM + c];
            sum += a[i] = exp(score / 8);
            if (i < SYNTHETIC_SINKS) sink += a[i];
            if (i > t - 64) near += a[i];
        }
        qsort(a, (size_t)t + 1, sizeof *a, descending);
        for (int i = 0; i < (t + 1) / 20; i++) top += a[i];
        m.sink += sink / sum * 2 / T;
        m.near += near / sum * 2 / T;
        m.top += top / sum * 2 / T;
        m.background += (log(sum - sink) - (double)background[t]) * 2 / T;
    }
    return m;
}

static void attention_looks_real(void **state) {
    (void)state;
    measured mean = {0};
    double least = 1, most = 0;
    for (int h = 0; h < SHAPE.n_head; h++) {
        measured m = measure(h);
        assert_true(fabs(m.background) < 0.8);
        least = fmin(least, m.sink);
        most = fmax(most, m.sink);
        mean.sink += m.sink / SHAPE.n_head;
        mean.near += m.near / SHAPE.n_head;
        mean.top += m.top / SHAPE.n_head;
    }
    print_message("# first 4: %.3f (%.3f to %.3f), last 64: %.3f, largest 5 %%: %.3f\n", mean.sink, least, most,
                  mean.near, mean.top);
    /* Uniform attention would give .011, .17 and .05. */
    assert_true(mean.sink > 0.2 && mean.sink < 0.45 && most - least > 0.1);
    assert_true(mean.near > 0.25 && mean.near < 0.6);
    assert_true(mean.top > 0.6 && mean.top < 0.95);
}

/* Zipf's law gives rank 1 a share of ln 2 / ln 32001. A loss of 1.2 x^2, x exponential, has mean 2.4; it is below
 * ln 2 with 1 - exp(-.7600) and below ln 10 with 1 - exp(-1.3852), half of which are right. */
static void text_has_the_shape_it_says(void **state) {
    (void)state;
    enum { N = 100000 };
    double first = 0, correct = 0, loss = 0;
    for (int32_t t = 0; t < N; t++) {
        int32_t token = synthetic_token(1, t);
        synthetic_prediction p = synthetic_predict(1, t);
        assert_in_range(token, 0, SYNTHETIC_VOCAB - 1);
        assert_true(p.entropy > 0 && p.target_logprob <= 0);
        first += token == 0;
        correct += p.correct;
        loss -= (double)p.target_logprob;
    }
    assert_true(fabs(first / N - 0.06682) < 0.004);
    assert_true(fabs(loss / N - 2.4) < 0.1);
    assert_true(fabs(correct / N - 0.6411) < 0.006);
}

/* ---- files ------------------------------------------------------------------------------------------------------ */

static void write_file(const synthetic *s, int threads, const char *path) {
    trace_model model = synthetic_model(s);
    trace_writer *w;
    pool *p;
    BUILD_OK(pool_new(threads, &p));
    BUILD_OK(trace_writer_new(path, true, NULL, 0, &model, "test", "test", 1, &w));
    BUILD_OK(synthetic_write(s, p, w));
    BUILD_OK(trace_writer_finish(w, NULL));
    pool_free(p);
}

static trace *file_of(const synthetic *s, int threads) {
    char path[64];
    trace *t;
    snprintf(path, sizeof path, "/tmp/test_synthetic.%d.h5", (int)getpid());
    write_file(s, threads, path);
    BUILD_OK(trace_open(path, &t));
    unlink(path);
    return t;
}

static synthetic plan_of(int32_t n_tokens, bool dense) {
    return (synthetic){.shape = {.seed = 7, .n_head = 4, .n_kv_head = 2, .head_dim = 16},
                       .n_layer = 2,
                       .n_tokens = n_tokens,
                       .n_prompt = 10,
                       .plan = {.factored = true, .dense = dense, .grad_loss = true, .n_fisher = 2}};
}

static void threads_and_seeds(void **state) {
    (void)state;
    synthetic s = plan_of(600, true), other = s;
    other.shape.seed++;
    trace *a = file_of(&s, 1), *b = file_of(&s, 3), *c = file_of(&other, 1);
    assert_string_equal(trace_hash(a), trace_hash(b));
    assert_string_not_equal(trace_hash(a), trace_hash(c));
    trace_close(a);
    trace_close(b);
    trace_close(c);
}

static void compare_layers(trace *a, trace *b, int layer, pool *p, size_t n) {
    trace_layer *x, *y;
    enum { STRIDE = 304, ROWS = 44, AT = 256 }; /* rows of the second tile, up to the end of the shorter trace */
    static float rows[2][4 * ROWS * STRIDE] __attribute__((aligned(64)));
    BUILD_OK(trace_layer_open(a, 0, layer, TRACE_FACTORED, p, &x));
    BUILD_OK(trace_layer_open(b, 0, layer, TRACE_FACTORED, p, &y));
    BUILD_OK(trace_layer_rows(x, AT, ROWS, rows[0], STRIDE, p));
    BUILD_OK(trace_layer_rows(y, AT, ROWS, rows[1], STRIDE, p));
    assert_memory_equal(rows[0], rows[1], sizeof rows[0]);
    assert_memory_equal(trace_layer_v(x, 1), trace_layer_v(y, 1), n * 16 * sizeof(float));
    trace_layer_close(x);
    trace_layer_close(y);
}

static void a_shorter_trace_is_the_beginning(void **state) {
    (void)state;
    synthetic s = plan_of(300, false), l = plan_of(700, false);
    trace *a = file_of(&s, 2), *b = file_of(&l, 2);
    const trace_sequence *x = trace_get_sequence(a, 0), *y = trace_get_sequence(b, 0);
    pool *p;
    BUILD_OK(pool_new(1, &p));
    assert_memory_equal(x->tokens, y->tokens, 300 * sizeof *x->tokens);
    assert_memory_equal(x->correct, y->correct, 299);
    assert_memory_equal(x->target_logprob, y->target_logprob, 299 * sizeof *x->target_logprob);
    for (int layer = 0; layer < 2; layer++) compare_layers(a, b, layer, p, 300);
    trace_close(a);
    trace_close(b);
    pool_free(p);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_do_not_depend_on_tiles), cmocka_unit_test(sinks_answer_one_coordinate),
        cmocka_unit_test(attention_looks_real),        cmocka_unit_test(text_has_the_shape_it_says),
        cmocka_unit_test(threads_and_seeds),           cmocka_unit_test(a_shorter_trace_is_the_beginning),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
