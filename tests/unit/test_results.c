#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "analyze/results.h"
#include "base/err.h"
#include "base/mem.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define HEADER "trace,seq,policy,spec,budget_asked,budget,lag,unit,schedule,pending,out_err,lost_mass\n"
#define ROW(seq, spec, budget, lag, pending, err) \
    "t," seq "," spec "," spec ",10%," budget "," lag ",head,step," pending "," err ",\n"

#define TRUTH_HEADER "trace,seq,policy,spec,budget_asked,budget,lag,unit,schedule,pending,mode,true_dloss,true_kl\n"
#define TRUTH(seq, spec, mode, dloss, kl) "t," seq "," spec "," spec ",10%,64,,head,step,," mode "," dloss "," kl "\n"

static char paths[2][64];

static int setup(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++) snprintf(paths[i], sizeof paths[i], "/tmp/kvlag_results_%ld_%d.csv", (long)getpid(), i);
    return 0;
}

static int teardown(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++) unlink(paths[i]);
    return 0;
}

static int read_texts(const char *first, const char *second, results **out) {
    const char *texts[] = {first, second}, *names[] = {paths[0], paths[1]};
    for (int i = 0; i < 2; i++) {
        FILE *f = fopen(paths[i], "wb");
        assert_non_null(f);
        if (texts[i]) fputs(texts[i], f);
        fclose(f);
    }
    return results_read(names, second ? 2 : 1, out);
}

static results *read_good(const char *text) {
    results *r = NULL;
    if (read_texts(text, NULL, &r) != 0) fail_msg("%s", err_message());
    return r;
}

/* The file is refused; the message is PATH followed by `message`. */
static void refuse(const char *text, const char *message) {
    results *r = NULL;
    assert_int_equal(read_texts(text, NULL, &r), ERR_DATA);
    assert_null(r);
    assert_memory_equal(err_message(), paths[0], strlen(paths[0]));
    assert_string_equal(err_message() + strlen(paths[0]), message);
}

static void test_columns_by_name(void **state) {
    (void)state;
    results *r = read_good("\xef\xbb\xbf# kvlag results v1\r\n# skipped: \"a,b\r\n"
                           "lost_mass,extra,spec,policy,seq,trace,pending,schedule,unit,lag,budget,budget_asked\r\n"
                           ".25,\"two\nlines\",\"mix(\"\"a\"\",b)\",mix,3,\"x, y\",charged,step,head,8,64,64\r\n"
                           ",,h2o,h2o,3,\"x, y\",,step,head,,64,64");
    assert_int_equal(r->n_rows, 2);
    assert_string_equal(r->rows[0].trace, "x, y");
    assert_string_equal(r->rows[0].spec, "mix(\"a\",b)");
    assert_string_equal(r->rows[0].seed, "");
    assert_true(r->rows[0].lag == 8 && r->rows[0].budget == 64);
    assert_int_equal(r->rows[0].line, 4);
    assert_int_equal(r->rows[1].line, 6); /* the quoted field holds a line break */
    assert_true(r->rows[1].lag == -1);
    assert_string_equal(results_metrics[LOST_MASS].column, "lost_mass");
    assert_true(r->rows[0].metric[LOST_MASS] == 0.25 && isnan(r->rows[1].metric[LOST_MASS]));
    assert_true(isnan(r->rows[0].metric[OUT_ERR]));
    assert_false(r->uncalibrated);
    results_free(r);
}

static void test_refusals(void **state) {
    (void)state;
    refuse("", ": no header line");
    refuse("# kvlag results v1\n", ": no header line");
    refuse("# kvlag results v2\n" HEADER, ":1: '# kvlag results v2' is not supported (want v1)");
    refuse("# kvlag results v10\n" HEADER, ":1: '# kvlag results v10' is not supported (want v1)");
    refuse(HEADER, ": no data rows");
    refuse("trace,seq,policy\n", ":1: no column 'spec'");
    refuse("#\ntrace,seq,policy,spec,budget_asked,budget,unit,schedule,pending\n", ":2: no column 'lag'");
    refuse("trace,seq,trace\n", ":1: two columns 'trace'");
    refuse(HEADER "t,0,h2o\n", ":2: 3 fields, the header has 12");
    refuse(HEADER ROW("0", "h2o", "64", "", "", "1") "\n", ":3: 1 fields, the header has 12");
    refuse(HEADER "\"t,0\n", ":2: a quoted field is not closed");
    refuse(HEADER "\"t\"x,0\n", ":2: text after a closing quote");
    refuse(HEADER "t\"x\",0\n", ":2: a quote inside a field that is not quoted");
    refuse(HEADER ROW("0", "h2o", "many", "", "", "1"), ":2: budget 'many' is not a number");
    refuse(HEADER ROW("0", "h2o", "0", "", "", "1"), ":2: budget 0 is below 1");
    refuse(HEADER ROW("0", "rmm", "64", "-1", "", "1"), ":2: lag -1 is below 0");
    refuse(HEADER ROW("0", "h2o", "64", "", "", "0,5"), ":2: 13 fields, the header has 12");
    refuse(HEADER ROW("0", "h2o", "64", "", "", "1x"), ":2: out_err '1x' is not a number");
    refuse("kl_lo,kl_hi," HEADER "2,1," ROW("0", "h2o", "64", "", "", "1"), ":2: kl_lo 2 is above kl_hi 1");
    refuse("# kvlag truth v2\n" TRUTH_HEADER, ":1: '# kvlag truth v2' is not supported (want v1)");
    refuse("# kvlag truth v1\n" HEADER, ":2: no column 'true_dloss'");
    refuse("true_kl," HEADER, ":1: no column 'true_dloss'");
    refuse(TRUTH_HEADER, ": no data rows");
    refuse(TRUTH_HEADER TRUTH("0", "h2o", "open", "x", "1"), ":2: true_dloss 'x' is not a number");
    refuse(TRUTH_HEADER TRUTH("0", "h2o", "open", "1", "1"),
           ": true reruns only; give the results of kvlag sim beside them");
}

static void test_duplicates(void **state) {
    (void)state;
    results *r = NULL;
    const char *a = HEADER ROW("0", "full", "640", "", "", "0") ROW("0", "rmm", "64", "8", "charged", "1");
    const char *b = HEADER ROW("0", "full", "640", "", "", "0") ROW("0", "rmm", "64", "8", "free", "1")
        ROW("0", "rmm", "64", "8.0", "charged", "2");
    assert_int_equal(read_texts(a, b, &r), ERR_DATA);
    char want[256];
    snprintf(want, sizeof want, "%s:4: the same configuration as %s:3 (rmm, budget 10%%, trace t, seq 0)", paths[1],
             paths[0]);
    assert_string_equal(err_message(), want);
}

static void test_mean_over_sequences(void **state) {
    (void)state;
    results *r = read_good(HEADER ROW("0", "full", "640", "", "", "0") ROW("0", "h2o", "64", "", "", "1") ROW(
        "0", "rmm", "64", "8", "charged", "4") ROW("1", "h2o", "96", "", "", "3") ROW("1", "full", "960", "", "", "0"));
    assert_int_equal(r->n_sequences, 2);
    assert_int_equal(r->n_configs, 1); /* full is no choice; rmm lacks sequence 1 */
    assert_int_equal(r->n_incomplete, 1);
    assert_true(r->configs[0].metric[OUT_ERR] == 2 && r->configs[0].budget == 80);
    assert_int_equal(r->n_budgets, 1);
    results_free(r);
}

static void test_budgets_ascend(void **state) {
    (void)state;
    results *r = read_good(HEADER "t,0,h2o,h2o,50%,500,,head,step,,1,\nt,0,h2o,h2o,64,64,,head,step,,1,\n"
                                  "t,0,lru,lru,64,64,,head,step,,1,\n");
    assert_int_equal(r->n_budgets, 2);
    assert_string_equal(r->budgets[0].asked, "64");
    assert_string_equal(r->budgets[1].asked, "50%");
    assert_string_equal(r->configs[2].spec, "lru"); /* the file's order */
    bool share;
    assert_true(result_budget_asked(&r->configs[0], &share) == 50 && share);
    assert_true(result_budget_asked(&r->configs[1], &share) == 64 && !share);
    results_free(r);
}

static void test_metrics(void **state) {
    (void)state;
    size_t m[RESULTS_METRICS];
    results *r = read_good(HEADER ROW("0", "h2o", "64", "", "", "1"));
    assert_int_equal(results_pick_metrics(r, m), 1); /* lost_mass is there, but empty */
    assert_string_equal(results_metrics[m[0]].column, "out_err");
    results_free(r);
    r = read_good("kl_est,dloss_est," HEADER ",," ROW("0", "h2o", "64", "", "", "1"));
    assert_int_equal(results_pick_metrics(r, m), 1);
    results_free(r);
    r = read_good("kl_est,dloss_est," HEADER "1,2," ROW("0", "h2o", "64", "", "", "1"));
    assert_int_equal(results_pick_metrics(r, m), 2);
    assert_string_equal(results_metrics[m[0]].column, "dloss_est");
    assert_string_equal(results_metrics[m[1]].column, "kl_est");
    results_free(r);
    r = read_good(HEADER ROW("0", "h2o", "64", "", "", ""));
    assert_int_equal(results_pick_metrics(r, m), 0);
    results_free(r);
}

/* The ends of an interval are averaged like the value between them; an interval with one end is none. */
static void test_intervals(void **state) {
    (void)state;
    results *r = read_good("kl_est,kl_lo,kl_hi," HEADER "2,1,4," ROW("0", "h2o", "64", "", "", "") "4,3,8," ROW(
        "1", "h2o", "64", "", "", "") "2,1,," ROW("0", "lru", "64", "", "", "") "4,3,8," ROW("1", "lru", "64", "", "",
                                                                                             ""));
    assert_int_equal(r->n_configs, 2);
    assert_true(r->configs[0].metric[KL_EST] == 3 && r->configs[0].lo[KL_EST] == 2 && r->configs[0].hi[KL_EST] == 6);
    assert_true(r->configs[1].metric[KL_EST] == 3 && isnan(r->configs[1].lo[KL_EST]));
    assert_true(isnan(r->rows[2].hi[KL_EST]) && isnan(r->rows[0].lo[OUT_ERR]));
    results_free(r);
}

/* Truths stand beside the rows and are no configurations; the full cache's says nothing. */
static void test_truths(void **state) {
    (void)state;
    results *r = NULL;
    const char *rows =
        "# kvlag results v1\n# calibration: uncalibrated (x)\n" HEADER ROW("0", "h2o", "64", "", "", "1");
    const char *truths = "# kvlag truth v1\n" TRUTH_HEADER TRUTH("0", "full", "open", "0", "0")
        TRUTH("0", "h2o", "open", "-0.5", "0.25") TRUTH("0", "h2o", "closed", "0.5", "0.75");
    assert_int_equal(read_texts(truths, rows, &r), 0);
    assert_true(r->n_rows == 1 && r->n_configs == 1 && r->n_truths == 2 && r->n_sequences == 1);
    assert_true(r->uncalibrated);
    assert_true(r->truths[0].dloss == -0.5 && r->truths[0].kl == 0.25 && r->truths[1].kl == 0.75);
    assert_string_equal(r->truths[0].mode, "open");
    assert_int_equal(result_compare(&r->truths[0].key, &r->rows[0]), 0);
    results_free(r);
}

static void test_series(void **state) {
    (void)state;
    results *r = read_good(HEADER "t,0,tova,tova,64,64,,head,step,,1,\nt,0,tova,tova,64,64,,layer,step,,1,\n"
                                  "t,0,rmm,rmm,64,64,1,head,step,free,1,\nt,0,rmm,rmm,32,32,2,head,step,charged,1,\n");
    const char *want[] = {"tova, unit head", "tova, unit layer", "rmm", "rmm"};
    for (size_t i = 0; i < 4; i++) {
        char *name = result_series_name(r, &r->configs[i]);
        assert_string_equal(name, want[i]);
        mem_free(name);
    }
    assert_false(result_same_series(&r->configs[0], &r->configs[1]));
    assert_true(result_same_series(&r->configs[2], &r->configs[3]));
    assert_true(result_is_free(&r->configs[2]) && !result_is_free(&r->configs[3]));
    results_free(r);
}

#define BITS_HEADER \
    "trace,seq,policy,spec,budget_asked,budget,lag,unit,schedule,pending,kv_bits,pending_bits,out_err,lost_mass\n"
#define BITS_ROW(spec, budget, kv, pending, err) \
    "t,0," spec "," spec "," budget ",64,,head,step,charged," kv "," pending "," err ",\n"

/* At low precision the full cache is a configuration, once however many files have it, and without a budget. */
static void test_precision(void **state) {
    (void)state;
    const char *one = BITS_HEADER BITS_ROW("full", "", "16", "16", "0") BITS_ROW("full", "", "8", "8", "1")
        BITS_ROW("h2o", "64", "16", "16", "2") BITS_ROW("h2o", "64", "8", "8", "3")
            BITS_ROW("h2o", "64", "8", "4", "4");
    const char *two = BITS_HEADER BITS_ROW("full", "", "8", "8", "1") BITS_ROW("full", "", "16", "16", "0")
        BITS_ROW("tova", "64", "16", "8", "5");
    const char *want[] = {"full, kv_bits 8", "h2o", "h2o, kv_bits 8", "h2o, kv_bits 8, pending_bits 4",
                          "tova, pending_bits 8"};
    results *r = NULL;
    assert_int_equal(read_texts(one, two, &r), 0);
    assert_int_equal(r->n_configs, 5);
    for (size_t i = 0; i < 5; i++) {
        char *name = result_series_name(r, &r->configs[i]);
        assert_string_equal(name, want[i]);
        assert_true(result_evicts(&r->configs[i]) == (i > 0));
        assert_float_equal(r->configs[i].metric[OUT_ERR], (double)(i + 1), 0);
        mem_free(name);
    }
    assert_int_equal(r->n_incomplete, 0);
    assert_int_equal(r->n_budgets, 1);
    assert_string_equal(r->budgets[0].asked, "64");
    results_free(r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_columns_by_name), cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_duplicates),      cmocka_unit_test(test_mean_over_sequences),
        cmocka_unit_test(test_budgets_ascend),  cmocka_unit_test(test_metrics),
        cmocka_unit_test(test_intervals),       cmocka_unit_test(test_truths),
        cmocka_unit_test(test_series),          cmocka_unit_test(test_precision),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
