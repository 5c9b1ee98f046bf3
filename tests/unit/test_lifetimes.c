/* lifetimes.h5 and blocks.h5: written, read back, and refused by name. */
#include "base/err.h"
#include "base/mem.h"
#include "traces/blocks.h"
#include "traces/hdf.h"
#include "traces/lifetimes.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { LAYERS = 2, HEADS = 3, T = 5 };
static char path[64];

static void ok(int code) {
    if (code) fail_msg("%s", err_message());
}

static void expect(const char *part) {
    if (!strstr(err_message(), part)) fail_msg("message is '%s', expected '%s' in it", err_message(), part);
}

/* Entry i leaves at i+1 + (i*7 + c) mod (T-i+1): anything from i+1 to T+1. */
static void fill(int32_t *evict_at, int c) {
    for (int h = 0; h < LAYERS * HEADS; h++)
        for (int i = 0; i < T; i++) evict_at[h * T + i] = i + 1 + (i * 7 + h + c) % (T - i + 1);
}

static const lifetimes_config config[2] = {
    {"rmm", "rmm(lag=8)", "10%", "8", "head", "step", "charged", "hold=lag, \"quoted\" \xc3\xa9"},
    {"h2o", "h2o", "64", "", "layer", "every:4", "", ""},
};

static void write_two(int32_t bad) {
    lifetimes_writer *w;
    int32_t evict_at[LAYERS * HEADS * T];
    ok(lifetimes_writer_new(path, true, NULL, 0, "trace", "0123", &w));
    for (size_t c = 0; c < 2; c++) {
        ok(lifetimes_write_config(w, c, &config[c]));
        for (size_t s = 0; s < 2; s++) {
            if (c == 1 && s == 0) continue; /* a configuration may lack a sequence */
            fill(evict_at, (int)(c + s));
            if (bad) evict_at[1 * HEADS * T + 2 * T + 3] = bad;
            ok(lifetimes_write_seq(w, c, s, &(lifetimes_seq){"6", "8", s ? "0" : "4"}, LAYERS, HEADS, T, evict_at));
        }
    }
    ok(lifetimes_writer_finish(w));
}

static void round_trip(void **state) {
    (void)state;
    lifetimes *l;
    int32_t got[LAYERS * HEADS * T], want[LAYERS * HEADS * T];
    int64_t shape[3];
    write_two(0);
    ok(lifetimes_open(path, &l));
    assert_string_equal(lifetimes_label(l), "trace");
    assert_string_equal(lifetimes_hash(l), "0123");
    assert_int_equal(lifetimes_n_configs(l), 2);
    const lifetimes_config *c = lifetimes_get_config(l, 0);
    assert_string_equal(c->policy, "rmm");
    assert_string_equal(c->spec, "rmm(lag=8)");
    assert_string_equal(c->budget_asked, "10%");
    assert_string_equal(c->lag, "8");
    assert_string_equal(c->unit, "head");
    assert_string_equal(c->schedule, "step");
    assert_string_equal(c->pending, "charged");
    assert_string_equal(c->resolved, "hold=lag, \"quoted\" \xc3\xa9");
    assert_string_equal(lifetimes_get_config(l, 1)->lag, "");
    assert_string_equal(lifetimes_get_seq(l, 0, 0)->sinks, "4");
    assert_string_equal(lifetimes_get_seq(l, 0, 1)->sinks, "0");
    assert_null(lifetimes_get_seq(l, 1, 0));
    assert_null(lifetimes_get_seq(l, 0, 2));
    assert_int_equal(lifetimes_n_sequences(l, 0), 2);
    assert_int_equal(lifetimes_n_sequences(l, 1), 1);
    assert_int_equal(lifetimes_sequence_number(l, 1, 0), 1);
    ok(lifetimes_shape(l, 1, 1, shape));
    assert_true(shape[0] == LAYERS && shape[1] == HEADS && shape[2] == T);
    ok(lifetimes_read(l, 1, 1, LAYERS, HEADS, T, got));
    fill(want, 2);
    assert_memory_equal(got, want, sizeof got);
    assert_int_not_equal(lifetimes_read(l, 1, 1, LAYERS, HEADS, T + 1, got), 0);
    expect("config/0001/seq/0001/evict_at: shape is [2, 3, 5], expected [2, 3, 6]");
    lifetimes_close(l);
}

static void values_out_of_range(void **state) {
    (void)state;
    const int32_t bad[] = {3, T + 2, -1, INT32_MAX}; /* entry 3 sees its own step, so it leaves at 4 or later */
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        lifetimes *l;
        char part[64];
        int32_t got[LAYERS * HEADS * T];
        write_two(bad[i]);
        ok(lifetimes_open(path, &l));
        assert_int_not_equal(lifetimes_read(l, 0, 1, LAYERS, HEADS, T, got), 0);
        snprintf(part, sizeof part, "layer 1, kv head 2, entry 3 leaves at %d (want 4 to 6)", bad[i]);
        expect(part);
        expect("config/0000/seq/0001");
        lifetimes_close(l);
    }
}

/* A file by somebody else, with one thing missing at a time; `stage` 4 is whole. */
static void foreign(int stage) {
    hid_t h5, group, seq;
    int32_t evict_at[T] = {6, 6, 6, 6, 6};
    ok(hdf_create(path, &h5));
    ok(hdf_put_text(h5, "format", stage == 0 ? "something" : "kvlag-lifetimes"));
    ok(hdf_put_int(h5, "version", 1));
    if (stage > 1) {
        ok(hdf_new_group(h5, "config", &group));
        H5Gclose(group);
        ok(hdf_new_group(h5, "config/0000", &group));
        if (stage > 2) ok(hdf_put_text(group, "spec", "my own"));
        if (stage > 3) {
            ok(hdf_put_int(group, "lag", 12)); /* a number where a text belongs is taken as its text */
            ok(hdf_new_group(group, "seq", &seq));
            H5Gclose(seq);
            ok(hdf_new_group(group, "seq/0003", &seq));
            ok(hdf_write_all(seq, "evict_at", H5T_STD_I32LE, 3, (hsize_t[]){1, 1, T}, evict_at));
            H5Gclose(seq);
        }
        H5Gclose(group);
    }
    ok(hdf_finish(h5));
}

static void foreign_files(void **state) {
    (void)state;
    static const char *const part[] = {"format is 'something', expected 'kvlag-lifetimes'", "holds no configuration",
                                       "config/0000: attribute 'spec' is missing", "config/0000: has no sequence"};
    lifetimes *l;
    for (int stage = 0; stage < 4; stage++) {
        foreign(stage);
        if (lifetimes_open(path, &l) == 0) fail_msg("stage %d was accepted", stage);
        expect(part[stage]);
        expect(path);
    }
    foreign(4);
    int32_t got[T];
    ok(lifetimes_open(path, &l));
    assert_string_equal(lifetimes_get_config(l, 0)->spec, "my own");
    assert_string_equal(lifetimes_get_config(l, 0)->policy, "");
    assert_string_equal(lifetimes_get_config(l, 0)->lag, "12");
    assert_non_null(lifetimes_get_seq(l, 0, 3));
    assert_string_equal(lifetimes_get_seq(l, 0, 3)->budget, "");
    ok(lifetimes_read(l, 0, 3, 1, 1, T, got));
    assert_int_equal(got[4], 6);
    lifetimes_close(l);
}

static void same_bytes(void **state) {
    (void)state;
    char *bytes[2];
    long n[2];
    for (int i = 0; i < 2; i++) {
        write_two(0);
        FILE *f = fopen(path, "rb");
        fseek(f, 0, SEEK_END);
        n[i] = ftell(f);
        rewind(f);
        bytes[i] = mem_new((size_t)n[i], 1, "test");
        assert_int_equal(fread(bytes[i], 1, (size_t)n[i], f), n[i]);
        fclose(f);
        if (i == 0) sleep(1);
    }
    assert_int_equal(n[0], n[1]);
    assert_memory_equal(bytes[0], bytes[1], (size_t)n[0]);
    mem_free(bytes[0]);
    mem_free(bytes[1]);
}

/* Two rows in the wrong order, of traces of 1 x 2 and 2 x 1 heads, with two fisher samples. */
static void blocks(void **state) {
    (void)state;
    blocks_writer *w;
    double mass[2][BLOCKS_PER_ROW], fisher[2][2 * BLOCKS_PER_ROW];
    int32_t steps[BLOCKS_PER_ROW];
    float head[2] = {1, 2};
    for (int i = 0; i < BLOCKS_PER_ROW; i++) {
        steps[i] = i;
        for (int r = 0; r < 2; r++) {
            mass[r][i] = r + i;
            fisher[r][i] = r + 10 * i;
            fisher[r][BLOCKS_PER_ROW + i] = r + 100 * i;
        }
    }
    ok(blocks_writer_new(path, true, 2, 2, 2, 2, false, &w));
    for (int r = 1; r >= 0; r--)
        ok(blocks_write_row(w, (size_t)r, r ? 2 : 1, r ? 1 : 2,
                            &(blocks_row){.lost_mass = mass[r],
                                          .steps = steps,
                                          .fisher = fisher[r],
                                          .head_lost_mass = head,
                                          .head_fisher = head}));
    assert_int_not_equal(blocks_write_row(w, 2, 1, 1, &(blocks_row){.lost_mass = mass[0], .steps = steps}), 0);
    ok(blocks_writer_finish(w));
    hid_t h5;
    void *values;
    ok(hdf_open(path, &h5));
    ok(hdf_check_format(h5, "kvlag-blocks", 1));
    assert_false(hdf_has(h5, "first") || hdf_has(h5, "head_first"));
    ok(hdf_read_all(h5, "fisher", HDF_FLOAT, H5T_NATIVE_DOUBLE, 3, (int64_t[]){2, 2, 64}, &values));
    assert_true(((double *)values)[(1 * 2 + 1) * 64 + 5] == 501);
    mem_free(values);
    ok(hdf_read_all(h5, "head_lost_mass", HDF_FLOAT, H5T_NATIVE_FLOAT, 3, (int64_t[]){2, 2, 2}, &values));
    const float *h = values;
    assert_true(h[0] == 1 && h[1] == 2 && isnan(h[2]) && isnan(h[3])); /* row 0: one layer, two heads */
    assert_true(h[4] == 1 && isnan(h[5]) && h[6] == 2 && isnan(h[7])); /* row 1: two layers, one head */
    mem_free(values);
    ok(hdf_read_all(h5, "steps", HDF_INTEGER, H5T_NATIVE_INT32, 2, (int64_t[]){2, 64}, &values));
    assert_int_equal(((int32_t *)values)[64 + 63], 63);
    mem_free(values);
    H5Fclose(h5);
    ok(blocks_writer_new(path, true, 0, 2, 2, 0, true, &w)); /* no rows at all */
    ok(blocks_writer_finish(w));
}

static int remove_file(void **state) {
    (void)state;
    return unlink(path);
}

int main(void) {
    snprintf(path, sizeof path, "/tmp/kvlag_test_%ld.h5", (long)getpid());
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(round_trip, remove_file),
        cmocka_unit_test_teardown(values_out_of_range, remove_file),
        cmocka_unit_test_teardown(foreign_files, remove_file),
        cmocka_unit_test_teardown(same_bytes, remove_file),
        cmocka_unit_test_teardown(blocks, remove_file),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
