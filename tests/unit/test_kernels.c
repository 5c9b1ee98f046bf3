/* Every instruction set against plain loops, and against each other bit for bit. */
#include "base/mem.h"
#include "base/rng.h"
#include "traces/kernels.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { N = 333, DIM = 40, ROWS = 11 };

static float noise(uint32_t i, uint32_t stream) {
    return (float)rng_normal(rng_philox(7, i, stream, 0, 0));
}

static float *array(size_t n, uint32_t stream) {
    float *a = mem_new(kernel_pad(n), sizeof *a, "test");
    for (size_t i = 0; i < n; i++) a[i] = noise((uint32_t)i, stream);
    return a;
}

static void half_conversion_is_round_to_nearest_even(void **state) {
    (void)state;
    assert_int_equal(half_from_f32(1.5249285751529568e-05f), 0x0100); /* 2^-16: HDF5 1.10.8 halves it */
    assert_int_equal(half_from_f32(65504.0f), 0x7bff);
    assert_int_equal(half_from_f32(65519.996f), 0x7bff);
    assert_int_equal(half_from_f32(65520.0f), 0x7c00);
    assert_int_equal(half_from_f32(1.0f + 0x1p-11f), 0x3c00); /* tie to even */
    assert_int_equal(half_from_f32(1.0f + 0x3p-11f), 0x3c02);
    assert_int_equal(half_from_f32(0x1p-25f), 0x0000);
    assert_int_equal(half_from_f32(0x1.8p-25f), 0x0001);
    assert_int_equal(half_from_f32(-0.0f), 0x8000);
    assert_true(half_to_f32(0x0001) == 0x1p-24f);
    assert_true(half_to_f32(0xfbff) == -65504.0f);
    for (uint32_t h = 0; h < 0x10000; h++) {
        if ((h & 0x7c00) == 0x7c00 && (h & 0x3ff)) continue; /* NaN */
        assert_int_equal(half_from_f32(half_to_f32((half)h)), h);
    }
}

static void conversions_agree(void **state) {
    (void)state;
    const kernel_table *list[3];
    int n_tables = kernels_available(list);
    enum { M = 100003 };
    float *f = mem_new(M, sizeof *f, "test"), *back = mem_new(M, sizeof *back, "test");
    half *h = mem_new(M, sizeof *h, "test");
    uint8_t *planes = mem_new(M, 2, "test");
    for (uint32_t i = 0; i < M; i++) {
        float x = half_from_bits(rng_philox(3, i, 0, 0, 0).v[0]);
        f[i] = isnan(x) ? 0.5f : x;
        if (i & 1) f[i] = ldexpf(noise(i, 1), -(int)(i % 30));
    }
    for (int k = 0; k < n_tables; k++) {
        list[k]->f32_to_f16(f, h, M);
        for (int i = 0; i < M; i++) assert_int_equal(h[i], half_from_f32(f[i]));
        list[k]->f16_to_f32(h, back, M);
        for (int i = 0; i < M; i++) assert_true(back[i] == half_to_f32(h[i]));
        memset(back, 0xff, M * sizeof *back);
        list[k]->shuffle2(h, planes, M);
        for (size_t at = 0, n = 0; at < M; at += n, n++) { /* parts of every length from 0 on */
            n = n < M - at ? n : M - at;
            list[k]->unshuffle2_to_f32(planes + at, planes + M + at, back + at, n);
        }
        for (int i = 0; i < M; i++) assert_true(back[i] == half_to_f32(h[i]));
        half s[7], u[7];
        list[k]->shuffle2(h, s, 7);
        for (int i = 0; i < 7; i++) {
            assert_int_equal(((uint8_t *)s)[i], h[i] & 0xff);
            assert_int_equal(((uint8_t *)s)[7 + i], h[i] >> 8);
        }
        list[k]->unshuffle2(s, u, 7);
        assert_memory_equal(u, h, sizeof u);
    }
    mem_free(f);
    mem_free(back);
    mem_free(h);
    mem_free(planes);
}

static void rows_are_divided_by_their_sums(void **state) {
    (void)state;
    const kernel_table *list[3];
    int n_tables = kernels_available(list);
    float row[48] __attribute__((aligned(64)));
    for (int k = 0; k < n_tables; k++) {
        memset(row, 0, sizeof row);
        row[20] = 1;
        row[33] = 5;
        row[34] = 2;
        assert_true(list[k]->normalise(row, 20, 35) == 8);
        assert_true(row[20] == 0.125f && row[33] == 0.625f && row[34] == 0.25f && row[19] == 0 && row[35] == 0);
        row[33] = -0.25f;
        assert_true(isnan(list[k]->normalise(row, 20, 35)) && row[34] == 0.25f && row[33] == -0.25f);
        const float bad[] = {NAN, INFINITY, 0};
        for (int i = 0; i < 3; i++) {
            memset(row, 0, sizeof row);
            row[7] = bad[i];
            assert_true(isnan(list[k]->normalise(row, 0, 8)));
        }
        float *x = array(N, 9), *y = array(N, 9);
        for (int i = 0; i < N; i++) x[i] = y[i] = fabsf(x[i]);
        float by = (float)(1 / list[k]->sum(x, N));
        assert_true(list[k]->normalise(x, 0, N) == list[k]->sum(y, N));
        for (int i = 0; i < N; i++) assert_true(x[i] == y[i] * by);
        mem_free(x);
        mem_free(y);
    }
}

static void scores_are_dot_products(void **state) {
    (void)state;
    const kernel_table *list[3];
    int n_tables = kernels_available(list);
    float *q = array(ROWS * DIM, 1), *k = array(N * DIM, 2);
    size_t stride = kernel_pad(N);
    float *packed = mem_new(stride * DIM, 4, "test"), *first = NULL;
    for (int table = 0; table < n_tables; table++) {
        float *out = mem_new(ROWS * stride, 4, "test");
        list[table]->pack_keys(k, N, DIM, packed);
        list[table]->scores(q, ROWS, packed, N, DIM, 0.125f, out, stride);
        for (size_t r = 0; r < ROWS; r++)
            for (size_t i = 0; i < N; i++) {
                double want = 0;
                for (size_t d = 0; d < DIM; d++) want += (double)q[r * DIM + d] * (double)k[i * DIM + d];
                assert_true(fabs(0.125 * want - (double)out[r * stride + i]) < 2e-6);
            }
        if (!first) first = out;
        else {
            assert_memory_equal(first, out, ROWS * stride * 4);
            mem_free(out);
        }
    }
    mem_free(first);
    mem_free(q);
    mem_free(k);
    mem_free(packed);
}

static void softmax_matches_plain(void **state) {
    (void)state;
    const kernel_table *list[3];
    int n_tables = kernels_available(list);
    for (int table = 1; table < n_tables; table++)
        for (int cap = 0; cap <= 20; cap += 20) {
            float *a = array(N, 9), *b = array(N, 9);
            double lse = list[0]->softmax(a, 3, N - 2, (float)cap, NULL);
            assert_true(lse == list[table]->softmax(b, 3, N - 2, (float)cap, NULL));
            assert_memory_equal(a, b, N * sizeof *a);
            mem_free(a);
            mem_free(b);
        }
    for (int table = 0; table < n_tables; table++) {
        for (size_t first = 0; first < 40; first += 13)
            for (size_t last = first; last < N; last += 29) {
                float *row = array(N, 5), *want = array(N, 5);
                double max = -1e300, z = 0, sum = 0;
                for (size_t i = 0; i < N; i++) row[i] = want[i] *= 6;
                for (size_t i = first; i <= last; i++) max = fmax(max, (double)want[i]);
                for (size_t i = first; i <= last; i++) z += exp((double)want[i] - max);
                double lse = list[table]->softmax(row, first, last, 0, NULL);
                assert_true(fabs(lse - (max + log(z))) < 1e-5);
                for (size_t i = 0; i < kernel_pad(last + 1); i++) {
                    double p = i < first || i > last ? 0 : exp((double)want[i] - max) / z;
                    assert_true(fabs(p - (double)row[i]) <= 1e-9 + 4e-7 * p);
                    sum += (double)row[i];
                }
                assert_true(fabs(sum - 1) < 1e-6);
                mem_free(row);
                mem_free(want);
            }
        /* Entry 1 has left before step 2. */
        float seen[16] __attribute__((aligned(64))) = {1, 9, 1},
                       unseen[16] __attribute__((aligned(64))) = {1, INFINITY, 1};
        int32_t evict_at[16] __attribute__((aligned(64))) = {3, 2, 4};
        assert_true(fabs(list[table]->softmax(seen, 0, 2, 0, evict_at) - (1 + log(2))) < 1e-6);
        assert_true(seen[0] == 0.5f && seen[1] == 0 && seen[2] == 0.5f);
        assert_true(fabs(list[table]->softmax(unseen, 0, 2, 0, evict_at) - (1 + log(2))) < 1e-6);
        /* CASES.md */
        float big[16] __attribute__((aligned(64))) = {-245000, -245000},
                      far[16] __attribute__((aligned(64))) = {3e4f, -3e4f};
        list[table]->softmax(big, 0, 1, 0, NULL);
        assert_true(big[0] == 0.5f && big[1] == 0.5f && big[2] == 0);
        list[table]->softmax(far, 0, 1, 0, NULL);
        assert_true(far[0] == 1.0f && far[1] == 0.0f);
        float cap[16] __attribute__((aligned(64))) = {100, 0}; /* soft-cap 50: 48.2014 against 0 */
        assert_true(fabs(list[table]->softmax(cap, 0, 1, 50, NULL) - 48.2014) < 1e-4);
        float bad[16] __attribute__((aligned(64))) = {1, INFINITY}, nan[16] __attribute__((aligned(64))) = {NAN, 1};
        assert_true(isnan(list[table]->softmax(bad, 0, 1, 0, NULL)));
        assert_true(isnan(list[table]->softmax(nan, 0, 1, 0, NULL)));
        float beyond[16] __attribute__((aligned(64))) = {1, 1, NAN, INFINITY}; /* not reachable: does not matter */
        list[table]->softmax(beyond, 0, 1, 0, NULL);
        assert_true(beyond[0] == 0.5f && beyond[2] == 0 && beyond[3] == 0);
    }
}

static void exponentials_match_plain(void **state) {
    (void)state;
    const kernel_table *list[3];
    int n_tables = kernels_available(list);
    for (int table = 0; table < n_tables; table++) {
        /* exp(-1), 1, exp(-3); entries 0 and 4 are out of reach. */
        float by_hand[16] __attribute__((aligned(64))) = {9, 1, 2, -1, 9}, top;
        double z = list[table]->exponentials(by_hand, 1, 3, 0, &top);
        assert_true(top == 2 && fabs(z - (1 + exp(-1) + exp(-3))) < 1e-6);
        assert_true(by_hand[0] == 0 && by_hand[2] == 1 && fabs((double)by_hand[3] - exp(-3)) < 1e-7 && by_hand[4] == 0);
        float bad[16] __attribute__((aligned(64))) = {1, NAN};
        assert_true(isnan(list[table]->exponentials(bad, 0, 1, 0, &top)));
        for (int cap = 0; cap <= 20; cap += 20) {
            float *a = array(N, 9), *b = array(N, 9), *p = array(N, 9), top_b;
            z = list[0]->exponentials(a, 3, N - 2, (float)cap, &top);
            assert_true(z == list[table]->exponentials(b, 3, N - 2, (float)cap, &top_b) && top == top_b);
            assert_memory_equal(a, b, N * sizeof *a);
            list[table]->softmax(p, 3, N - 2, (float)cap, NULL);
            for (size_t i = 0; i < N; i++) assert_true(p[i] == a[i] * (float)(1 / z));
            mem_free(a);
            mem_free(b);
            mem_free(p);
        }
    }
}

static void sums_match_plain(void **state) {
    (void)state;
    const kernel_table *list[3];
    int n_tables = kernels_available(list);
    size_t padded = kernel_pad(N);
    float *a = array(N, 1), *s = array(N, 2), *x[KERNEL_STREAMS_MAX];
    int32_t *evict_at = mem_new(padded, sizeof *evict_at, "test");
    for (size_t i = 0; i < N; i++) evict_at[i] = (int32_t)(rng_philox(1, (uint32_t)i, 0, 0, 0).v[0] % 100);
    for (int k = 0; k < KERNEL_STREAMS_MAX; k++) x[k] = array(N, 10 + (uint32_t)k);
    double reference[2][KERNEL_STREAMS_MAX] = {{0}};
    for (int table = 0; table < n_tables; table++) {
        double want = 0, product = 0, out[KERNEL_STREAMS_MAX];
        for (size_t i = 0; i < N; i++) {
            want += (double)a[i];
            product += (double)a[i] * (double)s[i];
        }
        assert_true(fabs(list[table]->sum(a, N) - want) < 1e-4);
        assert_true(fabs(list[table]->dot(a, s, N) - product) < 1e-4);
        float *d = mem_new(padded, 4, "test");
        list[table]->deviation(a, s, 0.25f, d, N);
        for (size_t i = 0; i < N; i++) assert_true(d[i] == a[i] * (0.25f - s[i]));
        mem_free(d);
        uint16_t gone[kernel_pad(N) / KERNEL_LANES];
        list[table]->gone_mask(evict_at, 50, N, gone);
        for (size_t i = 0; i < N; i++) assert_int_equal(gone[i / 16] >> i % 16 & 1, evict_at[i] <= 50);
        for (int n_x = 1; n_x <= KERNEL_STREAMS_MAX; n_x++)
            for (int evicted = 0; evicted < 2; evicted++) {
                float lanes[KERNEL_STREAMS_MAX][KERNEL_LANES] __attribute__((aligned(64))) = {{0}};
                const float *rest[KERNEL_STREAMS_MAX]; /* in two pieces */
                for (int k = 0; k < n_x; k++) rest[k] = x[k] + 160;
                list[table]->masked_lanes((const float *const *)x, n_x, gone, !evicted, 160, lanes);
                list[table]->masked_lanes(rest, n_x, gone + 10, !evicted, N - 160, lanes);
                list[table]->totals((const float(*)[KERNEL_LANES])lanes, n_x, out);
                for (int k = 0; k < n_x; k++) {
                    double m = 0;
                    for (size_t i = 0; i < N; i++)
                        if ((evict_at[i] <= 50) == (evicted != 0)) m += (double)x[k][i];
                    assert_true(fabs(out[k] - m) < 1e-4);
                    if (table == 0) reference[evicted][k] = out[k];
                    assert_true(out[k] == reference[evicted][k]);
                }
            }
    }
    for (int k = 0; k < KERNEL_STREAMS_MAX; k++) mem_free(x[k]);
    mem_free(a);
    mem_free(s);
    mem_free(evict_at);
}

static void lowest_is_the_first_of_equals(void **state) {
    (void)state;
    const kernel_table *list[3];
    int n_tables = kernels_available(list);
    double x[101];
    for (int table = 0; table < n_tables; table++)
        for (size_t n = 1; n <= 100; n++)
            for (size_t at = 0; at < n; at++) {
                for (size_t i = 0; i < n; i++) x[1 + i] = i == at || i == at + 3 ? -7.5 : (double)i;
                assert_int_equal(list[table]->lowest(x + 1, n), at);
            }
}

static void means_add_up(void **state) {
    (void)state;
    const kernel_table *list[3];
    int n_tables = kernels_available(list);
    enum { M = 21 };
    float *a = array(M + 1, 30);
    for (int table = 0; table < n_tables; table++) {
        double f[M], mean[M];
        int32_t entry[M];
        for (int j = 0; j < M; j++) {
            f[j] = j;
            entry[j] = 2 * j;
        }
        list[table]->add_mean(f + 1, mean + 1, a + 2, entry + 1, 0.3, 50, M - 1); /* at any alignment */
        assert_true(f[0] == 0);
        for (int j = 1; j < M; j++) {
            double sum = j + 0.3 * (double)a[j + 1];
            assert_true(f[j] == sum && mean[j] == sum / (50 - 2 * j));
        }
    }
    mem_free(a);
}

static double plain_resident(float *const *a, int count, const int32_t *entry, size_t n, int max, size_t j) {
    double out = 0;
    for (int h = 0; h < count; h++) {
        double mass = 0;
        for (size_t i = 0; i < n; i++) mass += (double)a[h][entry[i]];
        double share = (double)a[h][entry[j]] / mass;
        out = max ? fmax(out, share) : out + share / count;
    }
    return out;
}

/* Long sets of every step-th entry or so, one head to more than are gathered at once: near plain sums, and every table
 * the same bits. */
static void long_sets(const kernel_table **list, int n_tables, int step) {
    enum { HEADS = 9 };
    float *a[HEADS], *row[3] = {NULL}, *scratch = mem_new(4 * kernel_pad(N), 4, "test");
    int32_t *all = mem_new(N, 4, "test");
    uint16_t *mask = mem_new(kernel_pad(N) / 16, 2, "test");
    size_t n = 0;
    for (int h = 0; h < HEADS; h++) a[h] = array(N, (uint64_t)h);
    for (int32_t i = 0; i < N; i++) {
        for (int h = 0; h < HEADS; h++) a[h][i] = fabsf(a[h][i]);
        if (i % step && (step > 50 || i % 5)) continue;
        all[n++] = i;
        mask[i / 16] |= (uint16_t)(1u << i % 16);
    }
    for (int table = 0; table < n_tables; table++) row[table] = mem_new(kernel_pad(n) + 16, 4, "test");
    for (int count = 1; count <= HEADS; count++)
        for (int max = 0; max < 2; max++)
            for (size_t from = 0; from < n; from += n / 3 + 1)
                for (int table = 0; table < n_tables; table++) {
                    list[table]->resident_row((const float *const *)a, count, all, mask, n, from, max, scratch,
                                              row[table]);
                    assert_memory_equal(row[table] + from, row[0] + from, (n - from) * 4);
                    for (size_t j = from; j < n && table == 0; j += 3)
                        assert_float_equal(row[0][j], plain_resident(a, count, all, n, max, j), 1e-6);
                }
    for (int table = 0; table < n_tables; table++) mem_free(row[table]);
    for (int h = 0; h < HEADS; h++) mem_free(a[h]);
    mem_free(mask);
    mem_free(scratch);
    mem_free(all);
}

static void blend_by_hand(void **state) {
    (void)state;
    const kernel_table *list[3];
    int n_tables = kernels_available(list);
    for (int table = 0; table < n_tables; table++) {
        double f[16] __attribute__((aligned(64)));
        float a[12];
        for (int j = 0; j < 12; j++) f[j] = j + 0.5, a[j] = (float)(j * j);
        f[11] = 7;
        list[table]->blend(f, a, 0.75, 0.25, 2, 11);
        for (int j = 0; j < 11; j++) assert_true(f[j] == 0.75 * (j + 0.5) + 0.25 * (2.0 * j * j));
        assert_true(f[11] == 7);
    }
}

static void resident_row_by_hand(void **state) {
    (void)state;
    const kernel_table *list[3];
    int n_tables = kernels_available(list);
    /* DESIGN section 4, two heads, step 3 with {0, 2, 3} visible. */
    float one[16] __attribute__((aligned(64))) = {.1f, .6f, .2f, .1f},
                  two[16] __attribute__((aligned(64))) = {.3f, .1f, .4f, .2f};
    const float *heads[2] = {one, two};
    int32_t entry[3] = {0, 2, 3};
    uint16_t mask[1] = {1 | 4 | 8};
    for (int table = 0; table < n_tables; table++) {
        float row[32] __attribute__((aligned(64))), scratch[64] __attribute__((aligned(64)));
        list[table]->resident_row(heads, 2, entry, mask, 3, 0, 0, scratch, row);
        assert_true(fabsf(row[0] - .291667f) < 1e-6f && fabsf(row[1] - .472222f) < 1e-6f &&
                    fabsf(row[2] - .236111f) < 1e-6f);
        list[table]->resident_row(heads, 2, entry, mask, 3, 0, 1, scratch, row);
        assert_true(fabsf(row[0] - 1 / 3.0f) < 1e-6f && fabsf(row[1] - .5f) < 1e-6f && fabsf(row[2] - .25f) < 1e-6f);
        list[table]->resident_row(heads, 1, entry, mask, 3, 0, 0, scratch, row);
        assert_true(fabsf(row[0] - .25f) < 1e-6f && fabsf(row[1] - .5f) < 1e-6f && fabsf(row[2] - .25f) < 1e-6f);
    }
    for (int step = 1; step < 200; step += 33) long_sets(list, n_tables, step);
}

static void philox_known_answers(void **state) {
    (void)state;
    /* Random123 kat_vectors, philox4x32 10 rounds. */
    rng_block zero = rng_philox(0, 0, 0, 0, 0);
    assert_int_equal(zero.v[0], 0x6627e8d5);
    assert_int_equal(zero.v[1], 0xe169c58d);
    assert_int_equal(zero.v[2], 0xbc57ac4c);
    assert_int_equal(zero.v[3], 0x9b00dbd8);
    rng_block ones = rng_philox(UINT64_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX);
    assert_int_equal(ones.v[0], 0x408f276d);
    rng_block pi = rng_philox(0x299f31d0a4093822ULL, 0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344);
    assert_int_equal(pi.v[0], 0xd16cfe09);
    assert_int_equal(pi.v[1], 0x94fdcceb);
    assert_int_equal(pi.v[2], 0x5001e420);
    assert_int_equal(pi.v[3], 0x24126ea1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(half_conversion_is_round_to_nearest_even),
        cmocka_unit_test(conversions_agree),
        cmocka_unit_test(rows_are_divided_by_their_sums),
        cmocka_unit_test(scores_are_dot_products),
        cmocka_unit_test(softmax_matches_plain),
        cmocka_unit_test(exponentials_match_plain),
        cmocka_unit_test(sums_match_plain),
        cmocka_unit_test(lowest_is_the_first_of_equals),
        cmocka_unit_test(means_add_up),
        cmocka_unit_test(resident_row_by_hand),
        cmocka_unit_test(blend_by_hand),
        cmocka_unit_test(philox_known_answers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
