/* The CPU forward pass: its parts against values worked out by hand, the whole against transformers' (the fixture,
 * which tests/parity/logits.py wrote), and what it promises about bits. The tiny model is built by the Makefile. */
#include "base/err.h"
#include "base/mem.h"
#include "base/progress.h"
#include "tests/unit/model_build.h"
#include "tracer/cpu/cpu.h"
#include "tracer/cpu/matmul.h"
#include "tracer/cpu/rows.h"
#include "traces/kernels.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "tests/parity/fixtures/tiny_forward.h"

#define TINY "build/tiny.gguf"

/* ---- a run with everything kept ---------------------------------------------------------------------------------- */

typedef struct kept {
    const model *m;
    size_t T;
    float *logits; /* [T][n_vocab] */
    float *rows;   /* [n_layer][n_head][T][T] */
    float *lse;    /* [n_layer][n_head][T] */
    float *qkv;    /* [n_layer][T][n_head + 2 n_kv_head][head_dim] */
    int padding_is_zero;
} kept;

static int keep_rows(void *context, int layer, int head, int32_t row0, int32_t n, const float *p, size_t stride) {
    kept *k = context;
    float *to = k->rows + ((size_t)layer * (size_t)k->m->n_head + (size_t)head) * k->T * k->T;
    size_t end = (size_t)(row0 + n);
    for (size_t r = 0; r < (size_t)n; r++) {
        for (size_t i = 0; i < end; i++) to[((size_t)row0 + r) * k->T + i] = p[r * stride + i];
        for (size_t i = (size_t)row0 + r + 1; i < kernel_pad(end); i++)
            if (p[r * stride + i] != 0) __atomic_store_n(&k->padding_is_zero, 0, __ATOMIC_RELAXED);
    }
    return 0;
}

static int keep_layer(void *context, int layer, const layer_capture *c) {
    kept *k = context;
    size_t q = (size_t)(k->m->n_head * k->m->head_dim), kv = (size_t)(k->m->n_kv_head * k->m->head_dim),
           row = q + 2 * kv;
    memcpy(k->lse + (size_t)layer * (size_t)k->m->n_head * k->T, c->lse, (size_t)k->m->n_head * k->T * sizeof(float));
    for (size_t t = 0; t < k->T; t++) {
        float *to = k->qkv + ((size_t)layer * k->T + t) * row;
        memcpy(to, c->q + t * c->stride, q * sizeof *to);
        memcpy(to + q, c->k + t * c->stride, kv * sizeof *to);
        memcpy(to + q + kv, c->v + t * c->stride, kv * sizeof *to);
    }
    return 0;
}

static int keep_logits(void *context, int32_t row0, int32_t n, float *logits, size_t stride) {
    kept *k = context;
    size_t n_vocab = (size_t)k->m->n_vocab;
    for (size_t r = 0; r < (size_t)n; r++)
        memcpy(k->logits + ((size_t)row0 + r) * n_vocab, logits + r * stride, n_vocab * sizeof *logits);
    return 0;
}

static size_t count_rows(const model *m, size_t T) {
    return (size_t)(m->n_layer * m->n_head) * T * T;
}

/* Code of the pass; *k is to be released with drop() either way. */
static int run(const model *m, int threads, const int32_t *tokens, size_t T, bool rows, kept *k) {
    size_t row = (size_t)((m->n_head + 2 * m->n_kv_head) * m->head_dim);
    *k = (kept){.m = m, .T = T, .padding_is_zero = 1};
    k->logits = mem_new(T * (size_t)m->n_vocab, sizeof(float), "logits");
    k->rows = mem_new(count_rows(m, T), sizeof(float), "rows");
    k->lse = mem_new((size_t)(m->n_layer * m->n_head) * T, sizeof(float), "lse");
    k->qkv = mem_new((size_t)m->n_layer * T * row, sizeof(float), "qkv");
    pool *p = NULL;
    backend_state *s = NULL;
    if (pool_new(threads, &p) || cpu_backend.load(m, p, &cpu_options, &s)) fail_msg("%s", err_message());
    forward_sink sink = {.context = k, .rows = rows ? keep_rows : NULL, .layer = keep_layer, .logits = keep_logits};
    int code = cpu_backend.forward(s, tokens, (int32_t)T, NULL, &sink);
    cpu_backend.unload(s);
    pool_free(p);
    return code;
}

static void drop(kept *k) {
    mem_free(k->logits);
    mem_free(k->rows);
    mem_free(k->lse);
    mem_free(k->qkv);
}

static void run_well(const model *m, int threads, const int32_t *tokens, size_t T, bool rows, kept *k) {
    if (run(m, threads, tokens, T, rows, k)) fail_msg("%s", err_message());
}

static model *open_tiny(void) {
    model *m;
    if (model_open(TINY, &m)) fail_msg("%s", err_message());
    return m;
}

static model *open_mini(mini m) {
    char path[32];
    model *out;
    int fd = mini_file(m, path);
    if (model_open(path, &out)) fail_msg("%s", err_message());
    close(fd);
    return out;
}

/* ---- parts ------------------------------------------------------------------------------------------------------- */

static void tiles_cover_a_result_once(void **state) {
    (void)state;
    const size_t shapes[][3] = {{1, 1, 16},       {1000, 960, 64},  {1024, 576, 16},
                                {257, 49152, 16}, {2048, 1536, 16}, {7, 100, 16}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        tile_grid g = tile_grid_new(shapes[i][0], shapes[i][1], shapes[i][2]);
        size_t n = tile_grid_count(&g), area = 0;
        for (size_t k = 0; k < n; k++) {
            tile t = tile_grid_at(&g, k), before = tile_grid_at(&g, k ? k - 1 : 0);
            area += t.n_rows * t.n_cols;
            assert_true(t.n_rows && t.n_cols && t.n_rows <= 256);
            assert_int_equal(t.col % shapes[i][2], 0);
            assert_true(t.row + t.n_rows <= g.rows && t.col + t.n_cols <= g.cols);
            if (k)
                assert_true(t.row == before.row ? t.col == before.col + before.n_cols
                                                : t.row == before.row + before.n_rows);
        }
        assert_int_equal(area, g.rows * g.cols);
    }
}

static void rms_norm_by_hand(void **state) {
    (void)state;
    /* Mean square of 3, 4 and 14 zeros of 16: 25/16; with eps 0 the root is 1.25. */
    _Alignas(64) float x[16] = {3, 4}, weight[16] = {1, 2, 3}, out[16];
    rows_norm(ARCH_NORM_RMS, x, weight, NULL, 16, 0, out);
    assert_float_equal(out[0], 2.4f, 1e-6f);
    assert_float_equal(out[1], 6.4f, 1e-6f);
    assert_float_equal(out[2], 0, 0);
    /* Five elements of padding do not count: mean square 25/11. eps 4 - 25/11 makes the root 2. */
    rows_norm(ARCH_NORM_RMS, x, weight, NULL, 11, 4.0f - 25.0f / 11.0f, out);
    assert_float_equal(out[0], 1.5f, 1e-6f);
}

static void silu_by_hand(void **state) {
    (void)state;
    /* x * sigmoid(x), sigmoid(ln 3) = 3/4, sigmoid(-ln 3) = 1/4. */
    const float ln3 = 1.0986123f;
    _Alignas(64) float gate[16] = {0, ln3, -ln3, 200, -200, 1, -1, 20}, up[16] = {1, 1, 2, 3, 4, 1, 1, 1};
    const float want[8] = {0, 0.75f * 1.0986123f, -0.5f * 1.0986123f, 600, 0, 0.7310586f, -0.26894142f, 20};
    rows_gate(ARCH_SILU, gate, up, 8);
    for (int i = 0; i < 8; i++) assert_float_equal(up[i], want[i], 1e-6f * (1 + fabsf(want[i])));
    for (int i = -2000; i < 2000; i++) {
        double x = i * 0.05, exact = x / (1 + exp(-x));
        gate[0] = (float)x, up[0] = 1;
        rows_gate(ARCH_SILU, gate, up, 1);
        assert_float_equal(up[0], (float)exact, 1e-6f * (float)(fabs(exact) + 1e-3));
    }
}

static void rope_by_hand(void **state) {
    (void)state;
    /* dims 4, base 100: angles pos and pos/10. Position 2. */
    float angles[4], a[6] = {1, 0, 0, 1, 5, 6}, b[6] = {1, 0, 0, 1, 5, 6};
    rows_rope_angles(2, 4, (const double[]){1, .1}, 1, angles);
    assert_float_equal(angles[0], -0.41614684f, 1e-6f);
    assert_float_equal(angles[1], 0.90929743f, 1e-6f);
    assert_float_equal(angles[2], 0.98006658f, 1e-6f);
    rows_rope(a, 1, 6, 4, ARCH_ROPE_INTERLEAVED, angles); /* pairs (1, 0) and (0, 1) */
    const float want_a[6] = {-0.41614684f, 0.90929743f, -0.19866933f, 0.98006658f, 5, 6};
    rows_rope(b, 1, 6, 4, ARCH_ROPE_HALVES, angles); /* pairs (1, 0) at 0, 2 and (0, 1) at 1, 3 */
    const float want_b[6] = {-0.41614684f, -0.19866933f, 0.90929743f, 0.98006658f, 5, 6};
    for (int i = 0; i < 6; i++) {
        assert_float_equal(a[i], want_a[i], 1e-6f);
        assert_float_equal(b[i], want_b[i], 1e-6f);
    }
}

/* ---- a model whose results are known ----------------------------------------------------------------------------- */

/* Token j's embedding is j+1 everywhere; norms are 1; q and k come from their biases alone, (1, 0) in every head. */
static float known_value(const char *name, size_t i) {
    if (strcmp(name, "token_embd.weight") == 0) return (float)(i / 4 + 1);
    if (strstr(name, "norm")) return 1;
    return strstr(name, "attn_q.bias") || strstr(name, "attn_k.bias") ? (float)(i % 2 == 0) : 0;
}

static const mini known = {.n_layer = 1, .n_embd = 4, .n_vocab = 3, .n_head = 2, .bias = true, .value = known_value};

static void biases_and_positions_by_hand(void **state) {
    (void)state;
    /* q at t is (cos t, sin t), k at i likewise: their product is cos(t - i), the score that over sqrt 2. The residual
     * stream stays (j+1)(1, 1, 1, 1), normed to (1, 1, 1, 1): the logits are 4, 8, 12 whatever the token. */
    model *m = open_mini(known);
    const int32_t tokens[6] = {2, 0, 1, 1, 0, 2};
    kept k;
    run_well(m, 1, tokens, 6, true, &k);
    for (int t = 0; t < 6; t++) {
        double z = 0;
        for (int i = 0; i <= t; i++) z += exp(cos(t - i) / sqrt(2.0));
        for (int h = 0; h < 2; h++) {
            assert_float_equal(k.lse[h * 6 + t], (float)log(z), 1e-6f);
            for (int i = 0; i < 6; i++)
                assert_float_equal(k.rows[(h * 6 + t) * 6 + i], i <= t ? (float)(exp(cos(t - i) / sqrt(2.0)) / z) : 0,
                                   1e-6f);
        }
        for (int j = 0; j < 3; j++) assert_float_equal(k.logits[t * 3 + j], 4.0f * (float)(j + 1), 1e-5f);
    }
    drop(&k);
    model_close(m);
}

/* 300 query heads of two dimensions: q, k and v together are 604 columns, more than one tile. */
static float numbered_value(const char *name, size_t i) {
    if (strstr(name, "attn_q.bias")) return (float)i;
    if (strstr(name, "attn_k.bias")) return (float)i + 1000;
    return strstr(name, "attn_v.bias") ? (float)i + 2000 : known_value(name, i);
}

static void every_column_has_its_own_bias(void **state) {
    (void)state;
    mini wide = known;
    wide.n_head = 300;
    wide.key_length = 2;
    wide.value = numbered_value;
    model *m = open_mini(wide);
    tile_grid g = tile_grid_new(2, 604, 2);
    assert_true(g.across > 1);
    kept k;
    run_well(m, 1, (const int32_t[]){0, 1}, 2, false, &k);
    for (int i = 0; i < 604; i++) {
        float bias = i < 600 ? (float)i : i < 602 ? (float)(i - 600 + 1000) : (float)(i - 602 + 2000);
        assert_float_equal(k.qkv[i], bias, 0); /* position 0 turns nothing */
        /* Position 1 turns q and k by one radian, and never v. */
        float mate = i % 2 ? bias - 1 : bias + 1, sine = i % 2 ? sinf(1) : -sinf(1);
        float want = i < 602 ? bias * cosf(1) + mate * sine : bias;
        assert_float_equal(k.qkv[604 + i], want, 1e-3f);
    }
    drop(&k);
    model_close(m);
}

static float infinite_value(const char *name, size_t i) {
    return strcmp(name, "token_embd.weight") == 0 && i == 8 ? INFINITY : known_value(name, i);
}

static void non_finite_values_are_named(void **state) {
    (void)state;
    mini broken = known;
    broken.value = infinite_value; /* in token 2 */
    model *m = open_mini(broken);
    kept k;
    assert_int_equal(run(m, 1, (const int32_t[]){0, 1, 1, 2, 0}, 5, false, &k), ERR_DATA);
    assert_non_null(strstr(err_message(), "non-finite logits at layer 0, token 3"));
    drop(&k);
    model_close(m);
}

/* ---- the tiny model ---------------------------------------------------------------------------------------------- */

static void tiny_equals_transformers(void **state) {
    (void)state;
    model *m = open_tiny();
    kept k;
    size_t T = FIXTURE_TOKENS, n_vocab = (size_t)m->n_vocab;
    run_well(m, 2, fixture_token, T, true, &k);
    for (size_t i = 0; i < FIXTURE_STEPS; i++)
        for (size_t j = 0; j < FIXTURE_IDS; j++)
            assert_float_equal(k.logits[(size_t)fixture_step[i] * n_vocab + (size_t)fixture_id[j]],
                               fixture_logits[i * FIXTURE_IDS + j], 2e-3f);
    const float *probs = fixture_probs;
    for (size_t i = 0; i < FIXTURE_ROWS; i++) {
        const int32_t *at = fixture_row[i];
        const float *row = k.rows + ((size_t)(at[0] * m->n_head + at[1]) * T + (size_t)at[2]) * T;
        for (int32_t j = 0; j <= at[2]; j++) assert_float_equal(row[j], *probs++, 1e-4f);
    }
    for (size_t t = 0; t + 1 < T; t++) {
        double z = 0;
        for (size_t j = 0; j < n_vocab; j++) z += exp((double)k.logits[t * n_vocab + j]);
        double logprob = (double)k.logits[t * n_vocab + (size_t)fixture_token[t + 1]] - log(z);
        assert_float_equal((float)logprob, fixture_target_logprob[t], 2e-3f);
    }
    drop(&k);
    model_close(m);
}

/* More than two row tiles, the last one not full. */
enum { LONG = 600 };

static const int32_t *long_text(void) {
    static int32_t tokens[LONG];
    for (int t = 0; t < LONG; t++) tokens[t] = (t * t + 7 * t) % 1021;
    return tokens;
}

static void rows_are_probabilities(void **state) {
    (void)state;
    model *m = open_tiny();
    kept k;
    run_well(m, 2, long_text(), LONG, true, &k);
    assert_true(k.padding_is_zero);
    for (size_t row = 0; row < count_rows(m, LONG) / LONG; row++) {
        double sum = 0;
        for (size_t i = 0; i < LONG; i++) {
            float p = k.rows[row * LONG + i];
            assert_true(p >= 0 && p <= 1);
            if (i > row % LONG) assert_true(p == 0);
            sum += (double)p;
        }
        assert_float_equal((float)sum, 1, 1e-5f);
    }
    drop(&k);
    model_close(m);
}

static void rows_follow_from_q_k_and_lse(void **state) {
    (void)state;
    model *m = open_tiny();
    kept k;
    run_well(m, 2, long_text(), LONG, true, &k);
    size_t dim = (size_t)m->head_dim, heads = (size_t)(m->n_head + 2 * m->n_kv_head),
           group = (size_t)(m->n_head / m->n_kv_head);
    for (size_t l = 0; l < (size_t)m->n_layer; l++)
        for (size_t h = 0; h < (size_t)m->n_head; h++)
            for (size_t t = 0; t < LONG; t += 37)
                for (size_t i = 0; i <= t; i += 11) {
                    const float *q = k.qkv + ((l * LONG + t) * heads + h) * dim;
                    const float *key = k.qkv + ((l * LONG + i) * heads + (size_t)m->n_head + h / group) * dim;
                    double score = 0;
                    for (size_t d = 0; d < dim; d++) score += (double)q[d] * (double)key[d];
                    size_t head = l * (size_t)m->n_head + h;
                    double p = exp(score / sqrt((double)dim) - (double)k.lse[head * LONG + t]);
                    assert_float_equal(k.rows[(head * LONG + t) * LONG + i], (float)p, 2e-5f);
                }
    drop(&k);
    model_close(m);
}

static void windows_and_soft_caps_are_obeyed(void **state) {
    (void)state;
    model *m = open_tiny();
    kept k;
    m->window[1] = 100;
    m->softcap = 2;
    run_well(m, 2, long_text(), LONG, true, &k);
    for (size_t t = 0; t < LONG; t++) {
        const float *full = k.rows + t * LONG, *windowed = k.rows + ((size_t)m->n_head * LONG + t) * LONG;
        double sum = 0;
        for (size_t i = 0; i <= t; i++) {
            assert_true(full[i] > 0);
            assert_true((windowed[i] > 0) == (i + 100 > t));
            sum += (double)windowed[i];
        }
        assert_float_equal((float)sum, 1, 1e-5f);
        /* Scores within -2 .. 2: no probability is more than e^4 times another. */
        float least = 1, most = 0;
        for (size_t i = 0; i <= t; i++) least = fminf(least, full[i]), most = fmaxf(most, full[i]);
        assert_true(most <= least * 54.6f);
    }
    drop(&k);
    model_close(m);
}

static bool same(const float *a, const float *b, size_t n) {
    return memcmp(a, b, n * sizeof *a) == 0;
}

static void bits_do_not_depend_on_threads_or_on_capture(void **state) {
    (void)state;
    model *m = open_tiny();
    kept first, again, three, bare;
    size_t n_logits = LONG * (size_t)m->n_vocab, n_lse = (size_t)(m->n_layer * m->n_head) * LONG;
    run_well(m, 1, long_text(), LONG, true, &first);
    run_well(m, 1, long_text(), LONG, true, &again);
    run_well(m, 3, long_text(), LONG, true, &three);
    run_well(m, 2, long_text(), LONG, false, &bare);
    const kept *others[] = {&again, &three, &bare};
    for (int i = 0; i < 3; i++) {
        assert_true(same(first.logits, others[i]->logits, n_logits));
        assert_true(same(first.lse, others[i]->lse, n_lse));
        if (i < 2) assert_true(same(first.rows, others[i]->rows, count_rows(m, LONG)));
    }
    drop(&first), drop(&again), drop(&three), drop(&bare);
    model_close(m);
}

static void later_tokens_change_no_earlier_bit(void **state) {
    (void)state;
    model *m = open_tiny();
    size_t n_vocab = (size_t)m->n_vocab;
    kept before, after;
    run_well(m, 2, long_text(), LONG, true, &before);
    const size_t places[] = {1, 255, 256, 300, LONG - 1};
    for (size_t p = 0; p < sizeof places / sizeof *places; p++) {
        int32_t tokens[LONG];
        memcpy(tokens, long_text(), sizeof tokens);
        tokens[places[p]] = (tokens[places[p]] + 1) % 1021;
        run_well(m, 2, tokens, LONG, true, &after);
        assert_true(same(before.logits, after.logits, places[p] * n_vocab));
        assert_false(same(before.logits, after.logits, (places[p] + 1) * n_vocab));
        for (size_t head = 0; head < (size_t)(m->n_layer * m->n_head); head++)
            assert_true(same(before.rows + head * LONG * LONG, after.rows + head * LONG * LONG, places[p] * LONG));
        drop(&after);
    }
    drop(&before);
    model_close(m);
}

int main(void) {
    say_level(SAY_QUIET);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tiles_cover_a_result_once),
        cmocka_unit_test(rms_norm_by_hand),
        cmocka_unit_test(silu_by_hand),
        cmocka_unit_test(rope_by_hand),
        cmocka_unit_test(biases_and_positions_by_hand),
        cmocka_unit_test(every_column_has_its_own_bias),
        cmocka_unit_test(non_finite_values_are_named),
        cmocka_unit_test(tiny_equals_transformers),
        cmocka_unit_test(rows_are_probabilities),
        cmocka_unit_test(rows_follow_from_q_k_and_lse),
        cmocka_unit_test(windows_and_soft_caps_are_obeyed),
        cmocka_unit_test(bits_do_not_depend_on_threads_or_on_capture),
        cmocka_unit_test(later_tokens_change_no_earlier_bit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
