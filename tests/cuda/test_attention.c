/* Attention forward against slow loops in f64: outputs, normalisers, the trace's tiles, single steps, and what is said
 * of scores that are not finite. */
#include "base/mem.h"
#include "tests/cuda/attention_case.h"
#include "traces/trace.h"

static const sizes all_sizes[] = {
    {.T = 1, .n_head = 1, .n_kv_head = 1, .head_dim = 32},
    {.T = 31, .n_head = 3, .n_kv_head = 1, .head_dim = 64, .evict = true},
    {.T = 33, .n_head = 8, .n_kv_head = 1, .head_dim = 32, .window = 5},
    {.T = 64, .n_head = 2, .n_kv_head = 2, .head_dim = 80, .softcap = 2},
    {.T = 65, .n_head = 3, .n_kv_head = 1, .head_dim = 96, .window = 1},
    {.T = 67, .n_head = 2, .n_kv_head = 1, .head_dim = 7, .evict = true, .softcap = 3},
    {.T = 70, .n_head = 1, .n_kv_head = 1, .head_dim = 256, .evict = true, .window = 64},
    {.T = 66, .n_head = 2, .n_kv_head = 1, .head_dim = 130},
    {.T = 257, .n_head = 1, .n_kv_head = 1, .head_dim = 128, .window = 66},
    {.T = 300, .n_head = 3, .n_kv_head = 1, .head_dim = 64, .evict = true},
};
enum { N_SIZES = sizeof all_sizes / sizeof *all_sizes };

typedef struct result {
    float *o, *lse;
    int32_t *bad;
} result;

static result run(const attention_case *c) {
    result r = {.o = device_floats(d, c->s.T * c->ld_o),
                .lse = device_floats(d, (size_t)c->s.n_head * c->s.T),
                .bad = device_memory(d, sizeof(int32_t))};
    *r.bad = INT32_MAX;
    OK(k_attention(d, &c->s, r.o, c->ld_o, r.lse, r.bad));
    return r;
}

static void outputs_and_normalisers(void **state) {
    (void)state;
    for (int i = 0; i < N_SIZES; i++) {
        attention_case c;
        case_begin(&c, d, all_sizes + i);
        result r = run(&c);
        check_rows(r.o, c.ld_o, c.o, c.s.T, c.width, 1e-6);
        check_rows(r.lse, c.s.T, c.lse, (size_t)c.s.n_head, c.s.T, 1e-6);
        assert_int_equal(*r.bad, INT32_MAX);
        case_end(&c);
    }
}

/* Scores around 100: exp of them alone would overflow. */
static void large_scores(void **state) {
    (void)state;
    attention_case c;
    case_begin(&c, d, &(sizes){.T = 130, .n_head = 1, .n_kv_head = 1, .head_dim = 32});
    for (size_t t = 0; t < 130; t++)
        for (int k = 0; k < 32; k++) c.qkv[t * c.s.ld + (size_t)k] *= 50;
    case_solve(&c);
    result r = run(&c);
    check_rows(r.o, c.ld_o, c.o, c.s.T, c.width, 1e-4);
    check_rows(r.lse, c.s.T, c.lse, 1, c.s.T, 1e-6);
    case_end(&c);
}

/* Rows of a head as the CPU backend has them: its own softmax, then f16. */
static void cpu_rows(const attention_case *c, int head, half *rows) {
    size_t T = c->s.T, kv_head = (size_t)(head / (c->s.n_head / c->s.n_kv_head)), window = (size_t)c->s.window;
    const int32_t *evict_at = c->evict_at ? c->evict_at + kv_head * kernel_pad(T) : NULL;
    int32_t *masks = mem_new(kernel_pad(T), sizeof *masks, "test");
    float *row = mem_new(kernel_pad(T), sizeof *row, "test");
    for (size_t t = 0; t < T; t++) {
        for (size_t i = 0; i <= t; i++) {
            double x = dot64(case_row(c, head, t), case_row(c, case_key_head(c, head), i), c->s.head_dim);
            row[i] = (float)((double)c->s.scale * x);
            masks[i] = evict_at && i < t ? evict_at[i] : INT32_MAX;
        }
        kernels()->softmax(row, window && t >= window ? t - window + 1 : 0, t, c->s.softcap, masks);
        for (size_t i = 0; i < T; i++) rows[t * T + i] = i <= t ? half_from_f32(row[i]) : 0;
    }
    mem_free(row);
    mem_free(masks);
}

/* One tile: equal to the CPU's but for the last bit, and zero around. Gives how many values differ at all. */
static size_t check_tile(const uint8_t *tile, size_t edge, const half *rows, size_t T, size_t row0, size_t col0) {
    size_t differ = 0;
    for (size_t r = 0; r < edge; r++)
        for (size_t c = 0; c < edge; c++) {
            int got = tile[r * edge + c] | tile[edge * edge + r * edge + c] << 8;
            int want = row0 + r < T && col0 + c < T ? rows[(row0 + r) * T + col0 + c] : 0;
            if (!got || !want) assert_true(got + want <= 1); /* of what is not seen, nothing; else the last bit */
            assert_true(abs(got - want) <= 1);
            differ += got != want;
        }
    return differ;
}

static void tiles_of_the_trace(void **state) {
    (void)state;
    for (int i = 0; i < N_SIZES; i++) {
        attention_case c;
        case_begin(&c, d, all_sizes + i);
        result r = run(&c);
        size_t T = c.s.T, edge = T < TRACE_TILE ? T : TRACE_TILE, bytes = 2 * edge * edge;
        size_t row_tiles = (T + edge - 1) / edge, of_head = row_tiles * (row_tiles + 1) / 2, differ = 0;
        half *rows = malloc(T * T * sizeof *rows);
        assert_non_null(rows);
        size_t n = of_head * (size_t)c.s.n_head, cut = n / 2; /* in two calls: any tile may be the first */
        uint8_t *tiles = device_memory(d, n * bytes);
        if (cut) OK(k_attention_tiles(d, &c.s, r.lse, 0, cut, tiles));
        OK(k_attention_tiles(d, &c.s, r.lse, cut, n - cut, tiles + cut * bytes));
        const uint8_t *tile = tiles;
        for (int head = 0; head < c.s.n_head; head++) {
            cpu_rows(&c, head, rows);
            for (size_t row = 0; row < row_tiles; row++)
                for (size_t column = 0; column <= row; column++, tile += bytes)
                    differ += check_tile(tile, edge, rows, T, row * edge, column * edge);
        }
        assert_true(differ <= n * edge * edge / 50);
        free(rows);
        case_end(&c);
    }
}

/* The place of a tile among many, where T itself would be too long a text to compute. */
static void a_tile_far_down(void **state) {
    (void)state;
    attention_case c;
    case_begin(&c, d, &(sizes){.T = 5 * TRACE_TILE - 9, .n_head = 1, .n_kv_head = 1, .head_dim = 4, .window = 90});
    result r = run(&c);
    enum { ROW = 4, COLUMN = 3, INDEX = ROW * (ROW + 1) / 2 + COLUMN };
    size_t T = c.s.T, bytes = 2 * TRACE_TILE * TRACE_TILE, seen = 0;
    uint8_t *tile = device_memory(d, bytes);
    OK(k_attention_tiles(d, &c.s, r.lse, INDEX, 1, tile));
    for (size_t i = 0; i < bytes / 2; i++) {
        size_t t = ROW * TRACE_TILE + i / TRACE_TILE, entry = COLUMN * TRACE_TILE + i % TRACE_TILE;
        double got = (double)half_to_f32((half)(tile[i] | tile[bytes / 2 + i] << 8));
        double want = t < T ? c.p[t * T + entry] : 0;
        assert_true(fabs(got - want) <= want * 5e-4 + 1e-7);
        seen += want > 0;
    }
    assert_int_equal(seen, 89 * 90 / 2); /* 89 entries of the first step, one fewer of each that follows */
    case_end(&c);
}

static void scores_that_are_not_finite(void **state) {
    (void)state;
    attention_case c;
    case_begin(&c, d, &(sizes){.T = 100, .n_head = 4, .n_kv_head = 2, .head_dim = 32, .softcap = 5});
    size_t ld = c.s.ld;
    c.qkv[71 * ld + 3 * 32] = INFINITY;
    assert_int_equal(*run(&c).bad, 71 * 4 + 3);
    c.qkv[70 * ld + 3 * 32 + 31] = NAN;
    assert_int_equal(*run(&c).bad, 70 * 4 + 3);
    c.qkv[70 * ld + 1 * 32] = NAN;
    assert_int_equal(*run(&c).bad, 70 * 4 + 1);
    /* Too large a product of finite values; heads 2 and 3 read this key, first by its own step. */
    for (size_t h = 2; h < 6; h++) c.qkv[30 * ld + h * 32] = 1e30f;
    assert_int_equal(*run(&c).bad, 30 * 4 + 2);
    case_end(&c);
}

/* No order of blocks or threads changes a bit. */
static void equal_bits_in_any_order(void **state) {
    (void)state;
    attention_case c;
    case_begin(&c, d, &(sizes){.T = 130, .n_head = 2, .n_kv_head = 1, .head_dim = 64, .window = 100, .evict = true});
    result a = run(&c);
    setenv("KVLAG_FIBERS_ORDER", "reverse", 1);
    result b = run(&c);
    unsetenv("KVLAG_FIBERS_ORDER");
    assert_memory_equal(a.o, b.o, 130 * c.ld_o * sizeof(float));
    assert_memory_equal(a.lse, b.lse, 2 * 130 * sizeof(float));
    case_end(&c);
}

/* ---- one step --------------------------------------------------------------------------------------------------- */

typedef struct step_case {
    step_shape s;
    size_t ld, ld_o, ld_probs;
    float *qkv, *keys, *values;
    int32_t *evict_at;
    double *o, *probs;
    int32_t *bad;
} step_case;

static bool step_sees(const step_case *c, size_t cache, size_t i) {
    if (i == c->s.t) return true;
    if (c->s.window && c->s.t - i >= (size_t)c->s.window) return false;
    return c->evict_at[cache * c->s.capacity + i] > (int32_t)c->s.t;
}

static void solve_step(const step_case *c, size_t copy, int head) {
    const step_shape *s = &c->s;
    size_t dim = (size_t)s->head_dim, heads = (size_t)s->n_head, at = copy * heads + (size_t)head;
    size_t cache = copy * (size_t)s->n_kv_head + (size_t)(head / (s->n_head / s->n_kv_head));
    double sum = 0, *p = c->probs + at * (s->t + 1), *o = c->o + at * dim;
    for (size_t i = 0; i <= s->t; i++) {
        if (!step_sees(c, cache, i)) continue;
        double x = (double)s->scale * dot64(c->qkv + copy * c->ld + (size_t)head * dim,
                                            c->keys + (cache * s->capacity + i) * dim, s->head_dim);
        sum += p[i] = exp(s->softcap > 0 ? (double)s->softcap * tanh(x / (double)s->softcap) : x);
    }
    for (size_t i = 0; i <= s->t; i++) {
        p[i] /= sum;
        for (size_t k = 0; k < dim && p[i] > 0; k++)
            o[k] += p[i] * (double)c->values[(cache * s->capacity + i) * dim + k];
    }
}

/* Entries that are not seen are NaN: they are not even read. */
static void begin_step(step_case *c, const step_shape *s) {
    size_t dim = (size_t)s->head_dim, heads = (size_t)s->n_head, caches = s->copies * (size_t)s->n_kv_head;
    *c = (step_case){.s = *s, .ld = kernel_pad((heads + 2) * dim), .ld_o = kernel_pad(heads * dim)};
    c->ld_probs = kernel_pad(s->capacity);
    c->qkv = random_rows(d, 2, s->copies, heads * dim, c->ld);
    c->keys = random_rows(d, 3, caches * s->capacity, dim, dim);
    c->values = random_rows(d, 4, caches * s->capacity, dim, dim);
    c->evict_at = device_memory(d, caches * s->capacity * sizeof(int32_t));
    c->bad = device_memory(d, sizeof(int32_t));
    c->o = calloc(s->copies * heads * dim, sizeof *c->o);
    c->probs = calloc(s->copies * heads * (s->t + 1), sizeof *c->probs);
    assert_true(c->o && c->probs);
    for (size_t i = 0; i < caches * s->capacity; i++) {
        size_t entry = i % s->capacity;
        c->evict_at[i] = rng_philox(7, (uint32_t)i, 0, 0, 0).v[0] % 2 ? (int32_t)s->t : (int32_t)s->t + 1;
        for (size_t k = 0; k < dim && (entry > s->t || !step_sees(c, i / s->capacity, entry)); k++)
            c->keys[i * dim + k] = c->values[i * dim + k] = NAN;
    }
    for (size_t copy = 0; copy < s->copies; copy++)
        for (int head = 0; head < s->n_head; head++) solve_step(c, copy, head);
    *c->bad = INT32_MAX;
}

static void end_step(step_case *c) {
    free(c->o);
    free(c->probs);
}

static float *run_step(const step_case *c, float *probs) {
    float *o = device_floats(d, c->s.copies * c->ld_o);
    OK(k_attention_step(d, &c->s, c->qkv, c->ld, c->keys, c->values, c->evict_at, o, c->ld_o, probs, c->ld_probs,
                        c->bad));
    return o;
}

static void single_steps(void **state) {
    (void)state;
    const step_shape all[] = {
        {.copies = 1, .t = 0, .capacity = 1, .n_head = 1, .n_kv_head = 1, .head_dim = 32},
        {.copies = 3, .t = 30, .capacity = 33, .n_head = 3, .n_kv_head = 1, .head_dim = 80, .softcap = 2},
        {.copies = 2, .t = 256, .capacity = 300, .n_head = 2, .n_kv_head = 2, .head_dim = 64, .window = 100},
        {.copies = 1, .t = 299, .capacity = 300, .n_head = 8, .n_kv_head = 1, .head_dim = 7},
        {.copies = 2, .t = 65, .capacity = 70, .n_head = 1, .n_kv_head = 1, .head_dim = 256, .window = 1},
        {.copies = 1, .t = 70, .capacity = 71, .n_head = 2, .n_kv_head = 1, .head_dim = 130},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        step_case c;
        step_shape s = all[i];
        s.scale = 1 / sqrtf((float)s.head_dim);
        begin_step(&c, &s);
        size_t rows = s.copies * (size_t)s.n_head, width = (size_t)(s.n_head * s.head_dim);
        float *probs = device_floats(d, rows * c.ld_probs), *o = run_step(&c, probs), *alone = run_step(&c, NULL);
        check_rows(o, c.ld_o, c.o, s.copies, width, 1e-6);
        check_rows(probs, c.ld_probs, c.probs, rows, s.t + 1, 1e-6);
        for (size_t k = 0; k < rows * (s.t + 1); k++)
            if (c.probs[k] == 0) assert_true(probs[k / (s.t + 1) * c.ld_probs + k % (s.t + 1)] == 0);
        for (size_t copy = 0; copy < s.copies; copy++)
            assert_memory_equal(o + copy * c.ld_o, alone + copy * c.ld_o, width * sizeof *o);
        assert_int_equal(*c.bad, INT32_MAX);
        end_step(&c);
    }
}

static void steps_that_are_not_finite(void **state) {
    (void)state;
    step_case c;
    begin_step(&c, &(step_shape){.copies = 3,
                                 .t = 9,
                                 .capacity = 10,
                                 .n_head = 4,
                                 .n_kv_head = 2,
                                 .head_dim = 32,
                                 .softcap = 5,
                                 .scale = 1});
    c.qkv[2 * c.ld] = INFINITY;
    run_step(&c, NULL);
    assert_int_equal(*c.bad, 2 * 4);
    c.keys[(3 * 10 + 9) * 32] = NAN; /* copy 1, kv head 1: heads 2 and 3 */
    run_step(&c, NULL);
    assert_int_equal(*c.bad, 1 * 4 + 2);
    end_step(&c);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(outputs_and_normalisers),
        TEST(large_scores),
        TEST(tiles_of_the_trace),
        TEST(a_tile_far_down),
        TEST(scores_that_are_not_finite),
        TEST(equal_bits_in_any_order),
        TEST(single_steps),
        TEST(steps_that_are_not_finite),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
