#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "analyze/anatomy.h"
#include "base/mem.h"
#include "tests/unit/blocks_build.h"

#include <math.h>
#include <stdlib.h>

#define CLOSE 1e-7 /* heads are f32 */

static char csv[64], h5[64];
static const char *const paths[1] = {csv};

static int setup(void **state) {
    (void)state;
    snprintf(csv, sizeof csv, "/tmp/kvlag_anatomy_%ld.csv", (long)getpid());
    snprintf(h5, sizeof h5, "/tmp/kvlag_anatomy_%ld.blocks.h5", (long)getpid());
    return 0;
}

static int teardown(void **state) {
    (void)state;
    unlink(csv);
    unlink(h5);
    return 0;
}

static void read_made(int steps, int n_prompt, const block_row *rows, size_t n, results **r, evidence **e) {
    write_block_csv(csv, "t", n_prompt, rows, n);
    write_block_h5(h5, steps, 2, 3, rows, n);
    if (results_read(paths, 1, r) || evidence_read(*r, e)) fail_msg("%s", err_message());
    assert_non_null(*e);
}

/* Two sequences: c is 2 in the first and 4 in the second. Head (0,1): first -1 and 3, Fisher 1 and .5: KL 2 and 2, mean
 * 2; with the first-order parts 1 and 5, mean 3. The second sequence's model has one layer. */
static void test_heads(void **state) {
    (void)state;
    const block_row rows[] = {
        {.seq = "0",
         .spec = "ema",
         .c = 2,
         .lost_mass = 0.5,
         .first = 1,
         .fisher = 1,
         .n_layer = 2,
         .n_head = 3,
         .head_mass = {0.25, 0.5, 0.75, 1, 0, 0.5},
         .head_first = {0, -1, 0, 0, 0, 4},
         .head_fisher = {0, 1, 3, 0, 0, 8}},
        {.seq = "1",
         .spec = "ema",
         .c = 4,
         .lost_mass = 0.5,
         .first = 1,
         .fisher = 1,
         .n_layer = 1,
         .n_head = 3,
         .head_mass = {0.75, 0.5, 0.25},
         .head_first = {2, 3, 0},
         .head_fisher = {0, 0.5, 0}},
    };
    results *r;
    evidence *e;
    read_made(128, 0, rows, 2, &r, &e);
    const struct {
        size_t metric;
        double want[3];
    } cases[] = {{KL_EST, {0, 2, 3}}, {DLOSS_EST, {1, 3, 3}}, {LOST_MASS, {0.5, 0.5, 0.5}}};
    for (size_t i = 0; i < 3; i++) {
        head_map map;
        assert_true(anatomy_tells(cases[i].metric));
        assert_int_equal(head_map_new(e, &r->configs[0], cases[i].metric, &map), 0);
        assert_true(map.n_layer == 2 && map.n_head == 3 && head_map_has_values(&map));
        for (size_t h = 0; h < 3; h++) {
            assert_float_equal(map.value[h], cases[i].want[h], CLOSE);
            assert_true(isnan(map.value[3 + h]));
        }
        head_map_free(&map);
    }
    assert_false(anatomy_tells(OUT_ERR));
    assert_false(anatomy_tells(FISHER));
    evidence_free(e);
    results_free(r);
}

/* A row whose Fisher term is 0 has no c: its KL is 0, not NaN. */
static void test_no_fisher(void **state) {
    (void)state;
    const block_row rows[] = {{.spec = "ema", .c = 2, .lost_mass = 0.5, .first = 1, .head_first = {0.5}}};
    results *r;
    evidence *e;
    head_map map;
    double value[BLOCKS_PER_ROW];
    read_made(128, 0, rows, 1, &r, &e);
    assert_int_equal(head_map_new(e, &r->configs[0], DLOSS_EST, &map), 0);
    assert_float_equal(map.value[0], 0.5, CLOSE);
    head_map_free(&map);
    anatomy_along(e, &r->configs[0], KL_EST, value);
    assert_true(value[0] == 0 && value[63] == 0);
    evidence_free(e);
    results_free(r);
}

static void test_lowest(void **state) {
    (void)state;
    double values[3][6] = {
        {5, 1, 2, 0, NAN, 1.00}, {3, 1, 4, 0, 1, 0.99}, {3, -1, 6, 0, 0, 0.96}, /* falls of 2, 2, 4, 0, -, 4 % */
    };
    head_map maps[3];
    int lowest[6];
    for (size_t i = 0; i < 3; i++) maps[i] = (head_map){2, 3, values[i]};
    head_map_lowest(maps, 3, 0.05, lowest);
    const int want[6] = {1, 2, 0, -1, -1, -1};
    for (size_t i = 0; i < 6; i++) assert_int_equal(lowest[i], want[i]);
    head_map_lowest(maps, 3, 0.03, lowest);
    assert_int_equal(lowest[5], 2);
}

/* 100 steps in 64 blocks: of 1 or 2 steps. Every step loses the same, so every block's value is that. */
static void test_along(void **state) {
    (void)state;
    const block_row rows[] = {
        {.seq = "0", .spec = "ema", .c = 2, .lost_mass = 0.25, .first = -1, .fisher = 0.5},
        {.seq = "1", .spec = "ema", .c = 4, .lost_mass = 0.75, .first = 3, .fisher = 0.25},
    };
    results *r;
    evidence *e;
    double value[BLOCKS_PER_ROW], bound[BLOCKS_PER_ROW + 1];
    read_made(100, 20, rows, 2, &r, &e);
    const struct {
        size_t metric;
        double want;
    } cases[] = {{KL_EST, 1}, {DLOSS_EST, 2}, {LOST_MASS, 0.5}};
    for (size_t i = 0; i < 3; i++) {
        anatomy_along(e, &r->configs[0], cases[i].metric, value);
        for (size_t k = 0; k < BLOCKS_PER_ROW; k++) assert_float_equal(value[k], cases[i].want, CLOSE);
    }
    assert_true(anatomy_bounds(e, &r->configs[0], bound));
    assert_true(bound[0] == 20 && bound[1] == 21 && bound[2] == 23 && bound[64] == 120);
    evidence_free(e);
    results_free(r);
}

/* 10 steps: most blocks have none, and no value. */
static void test_short_text(void **state) {
    (void)state;
    const block_row rows[] = {{.spec = "ema", .c = 2, .lost_mass = 0.25, .first = -1, .fisher = 0.5}};
    results *r;
    evidence *e;
    double value[BLOCKS_PER_ROW];
    read_made(10, 0, rows, 1, &r, &e);
    anatomy_along(e, &r->configs[0], KL_EST, value);
    assert_true(isnan(value[0]) && isnan(value[5]) && value[6] == 1 && isnan(value[7]) && value[63] == 1);
    evidence_free(e);
    results_free(r);
}

/* Where some steps do not count, nothing says where blocks end: shares, and each block stands for an equal share of the
 * 96 counted steps. Blocks hold 1 counted step or 2, each with a first-order part of 3. */
static void test_uncounted(void **state) {
    (void)state;
    const block_row rows[] = {{.spec = "ema", .c = 1, .lost_mass = 0.5, .first = 3}};
    write_block_csv(csv, "t", 0, rows, 1);
    double mass[BLOCKS_PER_ROW], first[BLOCKS_PER_ROW], fisher[BLOCKS_PER_ROW] = {0};
    int32_t counted[BLOCKS_PER_ROW];
    for (int k = 0; k < BLOCKS_PER_ROW; k++) {
        counted[k] = k < 32 ? 1 : 2;
        mass[k] = 0.5 * counted[k];
        first[k] = 3 * counted[k];
    }
    float head = 0;
    blocks_writer *w;
    blocks_row row = {mass, counted, first, fisher, &head, &head, &head};
    assert_int_equal(blocks_writer_new(h5, true, 1, 1, 1, 1, true, &w), 0);
    assert_int_equal(blocks_write_row(w, 0, 1, 1, &row), 0);
    assert_int_equal(blocks_writer_finish(w), 0);
    results *r;
    evidence *e;
    double value[BLOCKS_PER_ROW], bound[BLOCKS_PER_ROW + 1];
    assert_int_equal(results_read(paths, 1, &r), 0);
    assert_int_equal(evidence_read(r, &e), 0);
    anatomy_along(e, &r->configs[0], DLOSS_EST, value);
    assert_float_equal(value[0], 2, CLOSE);
    assert_float_equal(value[63], 4, CLOSE);
    anatomy_along(e, &r->configs[0], LOST_MASS, value);
    assert_float_equal(value[0], 0.5, CLOSE);
    assert_false(anatomy_bounds(e, &r->configs[0], bound));
    assert_true(bound[0] == 0 && bound[16] == 25 && bound[64] == 100);
    evidence_free(e);
    results_free(r);
}

static void test_smooth(void **state) {
    (void)state;
    double value[BLOCKS_PER_ROW] = {8, 4, NAN, 6}, mean[BLOCKS_PER_ROW];
    value[62] = 10;
    anatomy_smooth(value, 4, mean); /* the two before, itself, the one after */
    assert_float_equal(mean[0], 6, CLOSE);
    assert_float_equal(mean[1], 6, CLOSE);
    assert_true(isnan(mean[2]));
    assert_float_equal(mean[3], 10.0 / 3, CLOSE);
    assert_float_equal(mean[63], 10.0 / 3, CLOSE);
    anatomy_smooth(value, 1, mean);
    assert_true(mean[0] == 8 && mean[62] == 10);
}

static bool any(const result *c) {
    (void)c;
    return true;
}

static void test_choice(void **state) {
    (void)state;
    const block_row rows[] = {
        {.spec = "rmm", .budget = "64", .lag = "0", .c = 1, .fisher = 3},
        {.spec = "rmm", .budget = "64", .lag = "8", .c = 1, .fisher = 2},
        {.spec = "rmm", .budget = "64", .lag = "8", .pending = "free", .c = 1, .fisher = 1},
        {.spec = "h2o", .budget = "64", .c = 1, .fisher = 4},
        {.spec = "ema", .budget = "64", .c = 1, .fisher = 3.5},
        {.spec = "oracle(mass)", .budget = "64", .c = 1, .fisher = 0.5},
        {.spec = "oracle(mass)", .budget = "32", .c = 1, .fisher = 0.5},
        {.spec = "h2o", .budget = "128", .c = 1, .fisher = 1},
        {.spec = "h2o", .budget = "256", .c = 1, .fisher = 1},
    };
    results *r;
    evidence *e;
    read_made(128, 0, rows, sizeof rows / sizeof *rows, &r, &e);
    assert_ptr_equal(anatomy_best(r, KL_EST, "64", config_waits), &r->configs[1]);
    assert_ptr_equal(anatomy_best(r, KL_EST, "64", config_is_filter), &r->configs[4]);
    assert_ptr_equal(anatomy_best(r, KL_EST, "64", result_is_oracle), &r->configs[5]);
    assert_null(anatomy_best(r, KL_EST, "128", config_waits));
    assert_null(anatomy_best(r, OUT_ERR, "64", any));
    assert_string_equal(anatomy_budget(r, KL_EST, any), "64");               /* of 32, 64, 128, 256 */
    assert_string_equal(anatomy_budget(r, KL_EST, config_is_filter), "128"); /* of 64, 128, 256 */
    assert_null(anatomy_budget(r, OUT_ERR, any));
    char *whole = anatomy_name(r, &r->configs[1], 20), *cut = anatomy_name(r, &r->configs[5], 8);
    assert_string_equal(whole, "rmm, lag 8");
    assert_string_equal(cut, "oracle(…");
    mem_free(whole);
    mem_free(cut);
    evidence_free(e);
    results_free(r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_heads),  cmocka_unit_test(test_no_fisher),  cmocka_unit_test(test_lowest),
        cmocka_unit_test(test_along),  cmocka_unit_test(test_short_text), cmocka_unit_test(test_uncounted),
        cmocka_unit_test(test_smooth), cmocka_unit_test(test_choice),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
