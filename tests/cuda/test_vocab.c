/* The kernels over the vocabulary against plain loops in f64, and drawn labels against the CPU backend's. */
#include "base/half.h"
#include "base/mem.h"
#include "base/rng.h"
#include "tracer/cuda/kernels.h"
#include "traces/kernels.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static device *dev;

/* ---- logits ----------------------------------------------------------------------------------------------------- */

typedef enum fill {
    FILL_NOISE,   /* normal, spread 3 */
    FILL_TIES,    /* few different values, 0 and -0 among them */
    FILL_EQUAL,   /* one value */
    FILL_RISING,  /* the likely ids side by side, at the end */
    FILL_FALLING, /* and at the start */
    FILL_CROWDED, /* 6048 of 49152 likely ids, all read by the same 63 threads */
    FILL_WIDE,    /* further apart than f32 can say */
    FILL_COUNT
} fill;

static float logit(fill f, size_t id, size_t n, uint32_t row) {
    float x = (float)rng_normal(rng_philox(11, (uint32_t)id, row, f, 0));
    switch (f) {
    case FILL_TIES:
        return copysignf(floorf(fabsf(x)), x);
    case FILL_EQUAL:
        return 7.25f;
    case FILL_RISING:
        return (float)id * 0.001f - 10;
    case FILL_FALLING:
        return (float)(n - id) * 0.001f;
    case FILL_CROWDED:
        return id / 4 % 512 < 63 ? 20 + x : x;
    case FILL_WIDE:
        return id % 5 ? x * 0x1p125f : copysignf(3e38f, x);
    default:
        return 3 * x;
    }
}

/* Behind each row stands what must not be read into a result. */
static float *logits_new(fill f, size_t rows, size_t n, size_t ld) {
    float *x = mem_new(rows * ld, sizeof *x, "test");
    for (size_t r = 0; r < rows; r++)
        for (size_t i = 0; i < ld; i++) x[r * ld + i] = i < n ? logit(f, i, n, (uint32_t)r) : i % 2 ? NAN : 1e30f;
    return x;
}

/* The largest logit, and the log of the sum of what is beside it: apart, as one may be 3e38 and the other 1. */
static double log_sum(const float *x, size_t n, double *max) {
    double sum = 0;
    *max = (double)x[0];
    for (size_t i = 0; i < n; i++) *max = fmax(*max, (double)x[i]);
    for (size_t i = 0; i < n; i++) sum += exp((double)x[i] - *max);
    return log(sum);
}

static double lse_of(const float *x, size_t n) {
    double max, sum = log_sum(x, n, &max);
    return max + sum;
}

static double entropy_of(const float *x, size_t n) {
    double max, log_of_sum = log_sum(x, n, &max), sum = 0;
    for (size_t i = 0; i < n; i++) {
        double log_p = (double)x[i] - max - log_of_sum, p = exp(log_p);
        if (p > 0) sum -= p * log_p;
    }
    return sum;
}

typedef struct ranked {
    float x;
    int32_t id;
} ranked;

static int by_rank(const void *a, const void *b) {
    const ranked *p = a, *q = b;
    if (p->x != q->x) return p->x > q->x ? -1 : 1;
    return p->id < q->id ? -1 : 1;
}

/* ---- statistics ------------------------------------------------------------------------------------------------- */

static vocab_stats stats_new(size_t rows, size_t k) {
    vocab_stats s = {.target_logprob = mem_new(rows, sizeof(float), "test"),
                     .correct = mem_new(rows, 1, "test"),
                     .entropy = mem_new(rows, sizeof(float), "test"),
                     .topk_id = mem_new(rows * k, sizeof(int32_t), "test"),
                     .topk_logprob = mem_new(rows * k, sizeof(float), "test"),
                     .lse = mem_new(rows, sizeof(float), "test"),
                     .k = (int)k};
    for (size_t r = 0; r < rows; r++) s.target_logprob[r] = 99, s.correct[r] = 99;
    return s;
}

static void stats_free(vocab_stats *s) {
    mem_free(s->target_logprob);
    mem_free(s->correct);
    mem_free(s->entropy);
    mem_free(s->topk_id);
    mem_free(s->topk_logprob);
    mem_free(s->lse);
}

static void near(double a, double b, double tolerance) {
    if (a == (double)(float)b || fabs(a - b) <= tolerance * (1 + fabs(b))) return; /* -inf is what is too far off */
    fail_msg("%.9g and %.9g differ", a, b);
}

static void check_row(const vocab_stats *s, size_t r, const float *x, size_t n, int32_t target) {
    size_t k = (size_t)s->k;
    double lse = lse_of(x, n);
    ranked *list = mem_new(n, sizeof *list, "test");
    for (size_t i = 0; i < n; i++) list[i] = (ranked){x[i], (int32_t)i};
    qsort(list, n, sizeof *list, by_rank);
    for (size_t i = 0; i < k; i++) {
        assert_int_equal(s->topk_id[r * k + i], list[i].id);
        near((double)s->topk_logprob[r * k + i], (double)list[i].x - lse, 5e-7);
    }
    near((double)s->lse[r], lse, 5e-7);
    near((double)s->entropy[r], entropy_of(x, n), 2e-6);
    if (target >= 0) {
        near((double)s->target_logprob[r], (double)x[target] - lse, 5e-7);
        assert_int_equal(s->correct[r], list[0].id == target);
    } else {
        assert_true(s->target_logprob[r] == 99);
        assert_int_equal(s->correct[r], 99);
    }
    mem_free(list);
}

static void check_stats(fill f, size_t rows, size_t n, size_t k) {
    size_t ld = kernel_pad(n) + 16;
    float *x = logits_new(f, rows, n, ld);
    vocab_stats s = stats_new(rows, k);
    int32_t target[8], bad = INT32_MAX;
    for (size_t r = 0; r < rows; r++) target[r] = r % 4 == 3 ? -1 : (int32_t)(r * 7919 % n);
    for (size_t i = 1; i < n; i++) /* one row is right about its target */
        if (x[i] > x[target[0]]) target[0] = (int32_t)i;
    assert_int_equal(k_vocab_stats(dev, x, ld, rows, n, target, &s, &bad), 0);
    assert_int_equal(bad, INT32_MAX);
    for (size_t r = 0; r < rows; r++) check_row(&s, r, x + r * ld, n, target[r]);
    stats_free(&s);
    mem_free(x);
}

static void statistics_of_short_rows(void **state) {
    (void)state;
    static const size_t sizes[] = {1, 2, 31, 33, 257, 1000};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (fill f = 0; f < FILL_COUNT; f++) {
            size_t n = sizes[i];
            check_stats(f, 5, n, 1);
            check_stats(f, 2, n, n < 32 ? n : 32);
            check_stats(f, 2, n, n);
        }
}

static void statistics_of_long_rows(void **state) {
    (void)state;
    for (fill f = 0; f < FILL_COUNT; f++) {
        check_stats(f, 2, 49152, 32);
        check_stats(f, 1, 49152, 64);
        check_stats(f, 1, 49151, 513);
    }
    check_stats(FILL_NOISE, 1, 49152, 4096);
    check_stats(FILL_TIES, 1, 49152, 4096);
    check_stats(FILL_NOISE, 1, 4096, 4096);
    check_stats(FILL_EQUAL, 1, 4097, 4096);
    check_stats(FILL_NOISE, 1, 262145, 32);
}

static void statistics_by_hand(void **state) {
    (void)state;
    float x[16] = {0, logf(2), 0, -0.0f}; /* probabilities 1/5, 2/5, 1/5, 1/5 */
    vocab_stats s = stats_new(1, 4);
    int32_t target = 3, bad = INT32_MAX;
    assert_int_equal(k_vocab_stats(dev, x, 16, 1, 4, &target, &s, &bad), 0);
    static const int32_t order[] = {1, 0, 2, 3};
    assert_memory_equal(s.topk_id, order, sizeof order);
    near((double)s.topk_logprob[0], -0.91629073, 1e-7);
    near((double)s.target_logprob[0], -1.60943791, 1e-7);
    near((double)s.entropy[0], 0.6 * 1.60943791 + 0.4 * 0.91629073, 1e-7);
    near((double)s.lse[0], 1.60943791, 1e-7);
    assert_int_equal(s.correct[0], 0);
    stats_free(&s);
}

static void values_that_are_not_finite_are_reported(void **state) {
    (void)state;
    static const float values[] = {NAN, INFINITY, -INFINITY};
    static const size_t sizes[] = {1, 33, 5000};
    enum { ROWS = 5 };
    for (size_t c = 0; c < 9; c++) {
        size_t n = sizes[c / 3], ld = kernel_pad(n) + 16;
        float *x = logits_new(FILL_NOISE, ROWS, n, ld);
        vocab_stats s = stats_new(ROWS, 1);
        int32_t target[ROWS] = {0}, bad = INT32_MAX;
        x[2 * ld + n - 1] = x[4 * ld] = values[c % 3];
        assert_int_equal(k_vocab_stats(dev, x, ld, ROWS, n, target, &s, &bad), 0);
        assert_int_equal(bad, 2);
        check_row(&s, 1, x + ld, n, 0);
        check_row(&s, 3, x + 3 * ld, n, 0);
        bad = 1; /* of an earlier call */
        assert_int_equal(k_vocab_stats(dev, x, ld, ROWS, n, target, &s, &bad), 0);
        assert_int_equal(bad, 1);
        bad = INT32_MAX;
        s.row0 = 1024; /* rows of a later tile */
        assert_int_equal(k_vocab_stats(dev, x, ld, ROWS, n, target, &s, &bad), 0);
        assert_int_equal(bad, 1026);
        stats_free(&s);
        mem_free(x);
    }
}

static void too_many_ids_are_refused(void **state) {
    (void)state;
    float x[16] = {0};
    vocab_stats s = {.k = 5};
    assert_int_not_equal(k_vocab_stats(dev, x, 16, 1, 4, NULL, &s, NULL), 0);
    s.k = 0;
    assert_int_not_equal(k_vocab_stats(dev, x, 16, 1, 4, NULL, &s, NULL), 0);
    s.k = 4097;
    assert_int_not_equal(k_vocab_stats(dev, x, 16, 1, 10000, NULL, &s, NULL), 0);
    assert_int_equal(k_vocab_stats(dev, x, 16, 0, 4, NULL, &(vocab_stats){.k = 1}, NULL), 0);
}

/* ---- probabilities ---------------------------------------------------------------------------------------------- */

static float *lse_new(const float *x, size_t rows, size_t n, size_t ld) {
    float *lse = mem_new(rows, sizeof *lse, "test");
    for (size_t r = 0; r < rows; r++) lse[r] = (float)lse_of(x + r * ld, n);
    return lse;
}

/* A row that does not count, and need not be finite, becomes 0; nothing is written behind a row's end. */
static void check_softmax(size_t n, dtype type, bool in_place) {
    enum { ROWS = 3 };
    size_t ld = kernel_pad(n) + 16, ld_out = in_place ? ld : kernel_pad(n) + 32;
    float *x = logits_new(FILL_NOISE, ROWS, n, ld), *lse = lse_new(x, ROWS, n, ld);
    float *kept = logits_new(FILL_NOISE, ROWS, n, ld);
    static const uint8_t counted[ROWS] = {1, 0, 1};
    void *p = in_place ? x : mem_new(ROWS * ld_out, sizeof(float), "test");
    x[ld] = NAN;
    assert_int_equal(k_vocab_softmax(dev, x, ld, ROWS, n, lse, counted, type, p, ld_out), 0);
    for (size_t r = 0; r < ROWS; r++)
        for (size_t i = 0; i < n; i++) {
            size_t at = r * ld_out + i;
            double got = type == DTYPE_F32 ? (double)((float *)p)[at] : (double)bf16_to_f32(((uint16_t *)p)[at]);
            double want = counted[r] ? exp((double)kept[r * ld + i] - (double)lse[r]) : 0;
            if (fabs(got - want) > want * (type == DTYPE_F32 ? 3e-6 : 0x1.01p-8))
                fail_msg("p[%zu][%zu] is %.9g, not %.9g", r, i, got, want);
        }
    if (!in_place && type == DTYPE_F32) assert_true(((float *)p)[n] == 0);
    if (!in_place && type == DTYPE_BF16) assert_int_equal(((uint16_t *)p)[n], 0);
    if (!in_place) mem_free(p);
    mem_free(kept);
    mem_free(x);
    mem_free(lse);
}

static void probabilities_follow_the_logits(void **state) {
    (void)state;
    static const size_t sizes[] = {1, 2, 31, 33, 257, 1000, 1025, 49152};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        check_softmax(sizes[i], DTYPE_F32, true);
        check_softmax(sizes[i], DTYPE_F32, false);
        check_softmax(sizes[i], DTYPE_BF16, false);
    }
}

/* ---- drawing ---------------------------------------------------------------------------------------------------- */

/* The first id whose running sum exceeds u, straight through, as tracer/cpu/backward.c draws. */
static int32_t draw_straight(const double *p, size_t n, double u) {
    int32_t last = 0;
    double sum = 0;
    for (size_t i = 0; i < n; i++) {
        sum += p[i];
        if (sum > u) return (int32_t)i;
        if (p[i] > 0) last = (int32_t)i;
    }
    return last;
}

/* Labels that are not those of exact probabilities, and not those of the CPU backend's f32 softmax. */
typedef struct tally {
    size_t drawn, not_exact, not_cpu;
} tally;

static void compare_row(tally *t, const float *x, size_t n, size_t samples, const double *u, size_t ld_u,
                        const int32_t *label, size_t ld_label) {
    float *softmax = mem_new(kernel_pad(n), sizeof *softmax, "test");
    double *exact = mem_new(n, sizeof *exact, "test"), *cpu = mem_new(n, sizeof *cpu, "test"), lse = lse_of(x, n);
    memcpy(softmax, x, n * sizeof *x);
    kernels()->softmax(softmax, 0, n - 1, 0, NULL);
    for (size_t i = 0; i < n; i++) exact[i] = exp((double)x[i] - lse), cpu[i] = (double)softmax[i];
    for (size_t s = 0; s < samples; s++) {
        int32_t got = label[s * ld_label];
        double at = u[s * ld_u], before = 0;
        assert_in_range(got, 0, n - 1);
        for (int32_t i = 0; i < got; i++) before += exact[i];
        assert_true(at > before - 1e-7 && at < before + exact[got] + 1e-7);
        t->drawn++;
        t->not_exact += got != draw_straight(exact, n, at);
        t->not_cpu += got != draw_straight(cpu, n, at);
    }
    mem_free(softmax);
    mem_free(exact);
    mem_free(cpu);
}

static void compare_draws(tally *t, fill f, float spread, size_t rows, size_t n, size_t samples) {
    size_t ld = kernel_pad(n) + 16, ld_label = rows + 3;
    float *x = logits_new(f, rows, n, ld);
    for (size_t i = 0; i < rows * ld; i++) x[i] *= spread;
    float *lse = lse_new(x, rows, n, ld);
    uint8_t *counted = mem_new(rows, 1, "test");
    double *u = mem_new(rows * samples, sizeof *u, "test");
    int32_t *label = mem_new(samples * ld_label, sizeof *label, "test");
    for (size_t r = 0; r < rows; r++) counted[r] = r % 5 != 1;
    for (size_t i = 0; i < rows * samples; i++)
        u[i] = i == 0 ? 0x1p-33 : i == 2 ? 1 - 0x1p-33 : rng_uniform(rng_philox(5, (uint32_t)i, f, 0, 2).v[0]);
    assert_int_equal(k_vocab_draw(dev, x, ld, rows, n, lse, counted, u, samples, label, ld_label), 0);
    for (size_t r = 0; r < rows; r++) {
        if (counted[r]) compare_row(t, x + r * ld, n, samples, u + r, rows, label + r, ld_label);
        else
            for (size_t s = 0; s < samples; s++) assert_int_equal(label[s * ld_label + r], -1);
    }
    mem_free(x);
    mem_free(lse);
    mem_free(counted);
    mem_free(u);
    mem_free(label);
}

static void say(const char *what, const tally *t) {
    print_message("    %s: of %zu labels %zu are not the exact ones, %zu not the CPU's\n", what, t->drawn, t->not_exact,
                  t->not_cpu);
}

/* The CPU's normaliser is a sum of f32 lanes, off by up to 1e-6 for 49152 ids of like size; that moves a few labels
 * where thousands of ids share the probability, as they do here, and next to none in a language model. */
static void drawn_labels_are_the_cpus(void **state) {
    (void)state;
    static const size_t sizes[] = {1, 2, 31, 33, 257, 1000};
    tally small = {0}, peaked = {0}, spread = {0}, flat = {0};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        compare_draws(&small, FILL_NOISE, 1, 40, sizes[i], 20);
        compare_draws(&small, FILL_EQUAL, 1, 40, sizes[i], 3);
    }
    compare_draws(&peaked, FILL_NOISE, 2, 6, 49152, 200);
    compare_draws(&spread, FILL_NOISE, 1, 6, 49152, 200);
    compare_draws(&flat, FILL_NOISE, 0.01f, 2, 49152, 200);
    compare_draws(&flat, FILL_NOISE, 0.01f, 1, 300001, 200);
    say("up to 1000 ids", &small);
    say("49152 ids, a few likely", &peaked);
    say("49152 ids, many likely", &spread);
    say("up to 300001 ids, flat", &flat);
    assert_int_equal(small.not_exact + small.not_cpu, 0);
    assert_in_range(peaked.not_exact, 0, 0);
    assert_in_range(peaked.not_cpu, 0, 2);
    assert_in_range(spread.not_exact, 0, 1);
    assert_in_range(flat.not_exact, 0, 4);
}

static void drawing_by_hand(void **state) {
    (void)state;
    enum { N = 600, LD = 608, SAMPLES = 10 };
    float *x = mem_new(LD, sizeof *x, "test"), lse = 0;
    for (int i = 0; i < LD; i++) x[i] = i < N ? -200 : 50; /* exp gives 0 */
    x[3] = logf(0.5f); /* probabilities 1/2, 1/4 and, in other chunks, 1/8, 1/16, 1/16 */
    x[40] = logf(0.25f);
    x[300] = logf(0.125f);
    x[588] = x[590] = logf(0.0625f);
    static const double u[SAMPLES] = {0x1p-33, 0.49, 0.51, 0.74, 0.76, 0.87, 0.88, 0.94, 1 - 0x1p-33, 1};
    static const int32_t want[SAMPLES] = {3, 3, 40, 40, 300, 300, 588, 590, 590, 590};
    int32_t label[SAMPLES];
    uint8_t counted = 1;
    assert_int_equal(k_vocab_draw(dev, x, LD, 1, N, &lse, &counted, u, SAMPLES, label, 1), 0);
    assert_memory_equal(label, want, sizeof want);
    counted = 0;
    assert_int_equal(k_vocab_draw(dev, x, LD, 1, N, &lse, &counted, u, SAMPLES, label, 1), 0);
    for (int s = 0; s < SAMPLES; s++) assert_int_equal(label[s], -1);
    counted = 1;
    /* A normaliser that is a little off, as rounding to f32 makes it, moves no label. */
    lse = -1e-3f;
    assert_int_equal(k_vocab_draw(dev, x, LD, 1, N, &lse, &counted, (double[]){0.4999, 0.5001, 0.9999}, 3, label, 1),
                     0);
    assert_int_equal(label[0], 3);
    assert_int_equal(label[1], 40);
    assert_int_equal(label[2], 590);
    /* A sum that is just u does not exceed it, within a chunk or at its end. */
    for (int i = 0; i < LD; i++) x[i] = 0;
    lse = 0;
    assert_int_equal(k_vocab_draw(dev, x, LD, 1, 512, &lse, &counted, (double[]){0.125, 0.5, 0.75}, 3, label, 1), 0);
    assert_int_equal(label[0], 64);
    assert_int_equal(label[1], 256);
    assert_int_equal(label[2], 384);
    mem_free(x);
}

/* ---- the way back ----------------------------------------------------------------------------------------------- */

static void hidden_gradients_are_differences(void **state) {
    (void)state;
    static const size_t sizes[] = {1, 31, 33, 257, 1000};
    enum { ROWS = 4 };
    static const uint8_t counted[ROWS] = {1, 0, 1, 1};
    for (size_t c = 0; c < sizeof sizes / sizeof *sizes; c++) {
        size_t n = sizes[c], ld = kernel_pad(n) + 16;
        float *a = logits_new(FILL_NOISE, ROWS, n, ld), *b = logits_new(FILL_TIES, ROWS, n, ld);
        float *out = mem_new(ROWS * ld, sizeof *out, "test");
        a[ld] = NAN; /* of a row that does not count */
        assert_int_equal(k_hidden_back(dev, a, b, counted, ROWS, n, ld, out), 0);
        for (size_t r = 0; r < ROWS; r++)
            for (size_t i = 0; i < ld; i++)
                assert_true(out[r * ld + i] == (counted[r] && i < n ? a[r * ld + i] - b[r * ld + i] : 0));
        mem_free(a);
        mem_free(b);
        mem_free(out);
    }
}

static int open_device(void **state) {
    (void)state;
    return device_open("", &dev);
}

static int close_device(void **state) {
    (void)state;
    device_close(dev);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(statistics_by_hand),
        cmocka_unit_test(statistics_of_short_rows),
        cmocka_unit_test(statistics_of_long_rows),
        cmocka_unit_test(values_that_are_not_finite_are_reported),
        cmocka_unit_test(too_many_ids_are_refused),
        cmocka_unit_test(probabilities_follow_the_logits),
        cmocka_unit_test(drawing_by_hand),
        cmocka_unit_test(drawn_labels_are_the_cpus),
        cmocka_unit_test(hidden_gradients_are_differences),
    };
    return cmocka_run_group_tests(tests, open_device, close_device);
}
