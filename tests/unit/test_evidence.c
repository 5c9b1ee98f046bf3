#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/progress.h"
#include "tests/unit/blocks_build.h"

#include <stdlib.h>

enum { STEPS = 128 };
static char csv[2][64], h5[2][64];
static const char *const paths[2] = {csv[0], csv[1]};

static int setup(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++) {
        snprintf(csv[i], sizeof csv[i], "/tmp/kvlag_evidence_%ld_%d.csv", (long)getpid(), i);
        snprintf(h5[i], sizeof h5[i], "/tmp/kvlag_evidence_%ld_%d.blocks.h5", (long)getpid(), i);
    }
    say_level(SAY_QUIET);
    return 0;
}

static int teardown(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++) {
        unlink(csv[i]);
        unlink(h5[i]);
    }
    return 0;
}

static const block_row two[] = {
    {.spec = "h2o", .c = 1, .lost_mass = 0.5, .first = -0.25, .fisher = 0.125, .head_mass = {0.5}},
    {.spec = "ema", .c = 1, .lost_mass = 0.75, .first = 0.5, .fisher = 2, .head_mass = {0.75}},
};

static results *read_results(size_t n_files) {
    results *r = NULL;
    if (results_read(paths, n_files, &r)) fail_msg("%s", err_message());
    return r;
}

/* evidence_read refuses; the message is PATH's blocks file followed by `message`. */
static void refuse(const char *message) {
    results *r = read_results(1);
    evidence *e = (evidence *)&e;
    assert_int_equal(evidence_read(r, &e), ERR_DATA);
    assert_null(e);
    assert_memory_equal(err_message(), h5[0], strlen(h5[0]));
    assert_string_equal(err_message() + strlen(h5[0]), message);
    results_free(r);
}

static void test_reading(void **state) {
    (void)state;
    write_block_csv(csv[0], "t", 0, two, 2);
    write_block_h5(h5[0], STEPS, 1, 1, two, 2);
    results *r = read_results(1);
    evidence *e;
    assert_int_equal(evidence_read(r, &e), 0);
    assert_non_null(e);
    for (size_t i = 0; i < 2; i++) {
        blocks_row b = evidence_row(e, r->configs[i].part[0]);
        assert_true(b.steps[5] == 2 && b.lost_mass[5] == 2 * two[i].lost_mass && b.first[63] == 2 * two[i].first);
        assert_true(b.fisher[63] == 4 * two[i].fisher && b.fisher[64] == 0);
        assert_true(b.head_lost_mass[0] == two[i].head_mass[0]);
    }
    evidence_shape shape = evidence_get_shape(e, &r->rows[0]);
    assert_true(shape.n_layer == 1 && shape.n_head == 1 && shape.n_fisher == 2);
    evidence_free(e);
    results_free(r);
}

/* Rows are found in their own file, also those of a configuration that stands in both. */
static void test_two_files(void **state) {
    (void)state;
    const block_row other[] = {
        {.seq = "1",
         .spec = "ema",
         .c = 1,
         .lost_mass = 0.25,
         .head_mass = {0, 0, 0, 0, 0, 7},
         .n_layer = 2,
         .n_head = 3},
        {.seq = "1", .spec = "h2o", .c = 1, .lost_mass = 0.125, .head_mass = {1, 2, 3}, .n_layer = 1, .n_head = 3},
    };
    write_block_csv(csv[0], "t", 0, two, 2);
    write_block_h5(h5[0], STEPS, 1, 1, two, 2);
    write_block_csv(csv[1], "t", 0, other, 2);
    write_block_h5(h5[1], STEPS, 2, 3, other, 2);
    results *r = read_results(2);
    evidence *e;
    assert_int_equal(evidence_read(r, &e), 0);
    assert_int_equal(r->n_configs, 2);
    const result *ema = &r->configs[1];
    assert_string_equal(ema->spec, "ema");
    assert_true(evidence_row(e, ema->part[0]).lost_mass[0] == 1.5);
    assert_true(evidence_row(e, ema->part[1]).lost_mass[0] == 0.5);
    assert_true(evidence_row(e, ema->part[1]).head_lost_mass[5] == 7);
    assert_int_equal(evidence_get_shape(e, ema->part[0]).n_head, 1);
    assert_int_equal(evidence_get_shape(e, ema->part[1]).n_head, 3);
    blocks_row h2o = evidence_row(e, r->configs[0].part[1]);
    assert_true(h2o.head_lost_mass[2] == 3 && h2o.head_lost_mass[3] != h2o.head_lost_mass[3]);
    evidence_free(e);
    results_free(r);
}

static void test_absent(void **state) {
    (void)state;
    write_block_csv(csv[0], "t", 0, two, 2);
    unlink(h5[0]);
    results *r = read_results(1);
    evidence *e = (evidence *)&e;
    assert_int_equal(evidence_read(r, &e), 0);
    assert_null(e);
    results_free(r);
}

static void test_refusals(void **state) {
    (void)state;
    char words[160];
    write_block_csv(csv[0], "t", 0, two, 2);
    write_block_h5(h5[0], STEPS, 1, 1, two, 1);
    snprintf(words, sizeof words, " does not belong to %s: 2 rows there, 1 here", csv[0]);
    refuse(words);

    const block_row swapped[] = {two[1], two[0]};
    write_block_h5(h5[0], STEPS, 1, 1, swapped, 2);
    snprintf(words, sizeof words, " does not belong to %s: line 2 there says other sums", csv[0]);
    refuse(words);

    block_row altered[] = {two[0], two[1]}; /* the lost mass is right, the first-order part is not */
    altered[1].first += 0.001;
    write_block_h5(h5[0], STEPS, 1, 1, altered, 2);
    snprintf(words, sizeof words, " does not belong to %s: line 3 there says other sums", csv[0]);
    refuse(words);
}

static void test_no_blocks_file(void **state) {
    (void)state;
    write_block_csv(csv[0], "t", 0, two, 2);
    FILE *f = fopen(h5[0], "wb");
    assert_non_null(f);
    fputs("trace,seq\n", f);
    fclose(f);
    results *r = read_results(1);
    evidence *e;
    assert_int_equal(evidence_read(r, &e), ERR_DATA);
    assert_null(e);
    assert_memory_equal(err_message(), h5[0], strlen(h5[0]));
    results_free(r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reading),  cmocka_unit_test(test_two_files),      cmocka_unit_test(test_absent),
        cmocka_unit_test(test_refusals), cmocka_unit_test(test_no_blocks_file),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
