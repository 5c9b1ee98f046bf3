#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "analyze/fidelity.h"
#include "base/err.h"
#include "base/text.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define KEYS "trace,seq,policy,spec,budget_asked,budget,lag,unit,schedule,pending,n_prompt"
#define KEY(seq, spec, budget, lag) "t," seq "," spec "," spec "," budget "," budget "," lag ",head,step,,0"
#define LINE(seq, spec, budget, lag, values) KEY(seq, spec, budget, lag) "," values "\n"
#define ROWS KEYS ",lost_mass,kl_est,kl_lo,kl_hi,dloss_est\n"
#define TRUTHS KEYS ",mode,true_dloss,true_kl\n"

static char paths[2][64];

static int setup(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++)
        snprintf(paths[i], sizeof paths[i], "/tmp/kvlag_fidelity_%ld_%d.csv", (long)getpid(), i);
    return 0;
}

static int teardown(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++) unlink(paths[i]);
    return 0;
}

static int join_texts(const char *rows, const char *truths, results **r, fidelity_list *list) {
    static const char *names[2];
    const char *texts[] = {rows, truths};
    for (int i = 0; i < 2; i++) {
        names[i] = paths[i];
        FILE *f = fopen(paths[i], "wb");
        assert_non_null(f);
        fputs(texts[i], f);
        fclose(f);
    }
    if (results_read(names, 2, r) != 0) fail_msg("%s", err_message());
    return fidelity_join(*r, list);
}

/* Six pairs, one of them with a true KL below .003, and an estimate without a truth. The statistics expected of them
 * were computed with numpy and scipy 1.17.1. */
static const struct {
    const char *seq, *spec, *budget;
    const char *estimate; /* lost_mass, kl_est, kl_lo, kl_hi, dloss_est */
    const char *truth;    /* true_dloss, true_kl */
} six[] = {
    {"0", "window", "64", ".5,1.0,.5,2,.9", ".7,.8"},
    {"0", "window", "128", ".4,.4,.2,.8,.35", ".5,.4"},
    {"0", "h2o", "64", ".3,.05,.025,.09,.06", ".12,.1"},
    {"0", "h2o", "128", ".2,.125,.06,.25,.13", ".15,.2"},
    {"1", "oracle", "64", ".1,.02,.01,.04,.03", "-.01,.01"},
    {"1", "oracle", "128", ".05,.004,.002,.008,.001", ".002,.001"},
    {"1", "lru", "64", ".3,.1,.05,.2,.1", NULL},
};

/* The truths are in another order than the estimates. */
static int join_six(results **r, fidelity_list *list) {
    size_t n = sizeof six / sizeof *six;
    text rows = {0}, truths = {0};
    text_add(&rows, ROWS);
    text_add(&truths, TRUTHS);
    for (size_t i = 0; i < n; i++) {
        size_t k = n - 1 - i;
        text_add(&rows, "t,%s,%s,%s,%s,%s,,head,step,,0,%s\n", six[i].seq, six[i].spec, six[i].spec, six[i].budget,
                 six[i].budget, six[i].estimate);
        if (six[k].truth)
            text_add(&truths, "t,%s,%s,%s,%s,%s,,head,step,,0,open,%s\n", six[k].seq, six[k].spec, six[k].spec,
                     six[k].budget, six[k].budget, six[k].truth);
    }
    int code = join_texts(rows.data, truths.data, r, list);
    text_free(&rows);
    text_free(&truths);
    return code;
}

static void near(double got, double want) {
    if (!(fabs(got - want) <= 1e-9 * fabs(want))) fail_msg("%.12g, not %.12g", got, want);
}

static void test_statistics(void **state) {
    (void)state;
    results *r = NULL;
    fidelity_list list;
    fidelity_correlation c;
    fidelity_ratio ratio;
    if (join_six(&r, &list) != 0) fail_msg("%s", err_message());
    assert_int_equal(list.n, 1);
    const fidelity *f = &list.item[0];
    assert_string_equal(f->mode, "open");
    assert_true(f->n == 6 && f->n_sequences == 2);
    assert_int_equal(f->pairs[0].family, FIDELITY_ORACLE);

    assert_int_equal(fidelity_correlate(f, KL_EST, &c), 0);
    assert_int_equal(c.n, 6);
    near(c.kl_spearman, 1);
    near(c.kl_pearson, 0.944802781972); /* of logarithms, without the smallest */
    near(c.dloss_spearman, 0.942857142857);
    near(c.dloss_pearson, 0.950726310092);

    assert_int_equal(fidelity_compare(f, KL_EST, FIDELITY_ALL, &ratio), 0);
    assert_int_equal(ratio.n, 5);
    near(ratio.scale, 1.05061112176);
    near(ratio.spread, 1.73695835932);
    assert_int_equal(fidelity_compare(f, KL_EST, FIDELITY_ATTENTION, &ratio), 0);
    assert_int_equal(ratio.n, 2);
    near(ratio.scale, sqrt(2 * 1.6)); /* .1/.05 and .2/.125 */
    assert_int_equal(fidelity_compare(f, KL_EST, FIDELITY_ORACLE, &ratio), 0);
    near(ratio.scale, 0.5);
    assert_true(isnan(ratio.spread));
    assert_int_equal(fidelity_compare(f, KL_EST, FIDELITY_WITHIN, &ratio), 0);
    near(ratio.spread, 1.17091596467);
    assert_int_equal(fidelity_compare(f, KL_EST, FIDELITY_STATIC, &ratio), 0);
    assert_true(ratio.n == 0 && isnan(ratio.scale));

    fidelity_free(&list);
    results_free(r);
}

/* Held: .8, .4, .2, .01 (at its very end) of the five large ones; .1 is above .09. */
static void test_coverage(void **state) {
    (void)state;
    results *r = NULL;
    fidelity_list list;
    assert_int_equal(join_six(&r, &list), 0);
    fidelity_coverage c = fidelity_cover(&list.item[0], KL_EST, FIDELITY_LEAST_KL);
    assert_true(c.held == 4 && c.n == 5 && c.stands);
    near(c.too_low, 0.5562946875);
    near(c.too_high, 0.9774075);
    c = fidelity_cover(&list.item[0], KL_EST, -INFINITY);
    assert_true(c.held == 4 && c.n == 6); /* .001 lies below .002 */
    c = fidelity_cover(&list.item[0], DLOSS_EST, -INFINITY);
    assert_int_equal(c.n, 0); /* no interval */
    fidelity_free(&list);
    results_free(r);
}

/* P(X <= k | .85) falls below .005 with 3 of 8 held, P(X >= k | .95) with 200 of 200 (.95^200 = 3.5e-5). */
static void test_verdict(void **state) {
    (void)state;
    static result hit, miss;
    static fidelity_pair pairs[200];
    hit.lo[KL_EST] = miss.lo[KL_EST] = 0.5;
    hit.hi[KL_EST] = 2;
    miss.hi[KL_EST] = 0.75;
    for (size_t i = 0; i < 200; i++) pairs[i] = (fidelity_pair){&hit, 0, 1, FIDELITY_OTHER};
    fidelity f = {.mode = "", .pairs = pairs, .n = 200};
    fidelity_coverage c = fidelity_cover(&f, KL_EST, 0);
    assert_true(c.held == 200 && !c.stands && c.too_high < 0.005 && c.too_low > 0.999);
    for (size_t i = 0; i < 5; i++) pairs[i].row = &miss;
    f.n = 8;
    c = fidelity_cover(&f, KL_EST, 0);
    assert_true(c.held == 3 && !c.stands && c.too_low < 0.005);
    f.n = 200; /* 195 of 200 */
    assert_true(fidelity_cover(&f, KL_EST, 0).stands);
}

static void test_join(void **state) {
    (void)state;
    results *r = NULL;
    fidelity_list list;
    /* The same lag written otherwise; two modes; a full cache that lost nothing; a truth without an estimate. */
    const char *rows = ROWS LINE("0", "rmm", "64", "8", ".1,1,,,1") LINE("0", "rmm", "512", "8", "0,0,0,0,0");
    const char *truths = TRUTHS LINE("0", "rmm", "64", "8.0", "open,1,1") LINE("0", "rmm", "64", "8", "closed,2,2")
        LINE("0", "rmm", "512", "8", "open,0,0") LINE("0", "rmm", "64", "", "open,1,1");
    assert_int_equal(join_texts(rows, truths, &r, &list), 0);
    assert_true(list.n == 2 && list.item[0].n == 1 && list.item[1].n == 1);
    assert_string_equal(list.item[1].mode, "closed");
    assert_true(list.item[1].pairs[0].true_kl == 2);
    fidelity_free(&list);
    results_free(r);
}

static void test_nothing_in_common(void **state) {
    (void)state;
    results *r = NULL;
    fidelity_list list;
    char want[512];
    const char *rows = ROWS LINE("0", "full", "512", "", "0,0,0,0,0") LINE("0", "rmm", "64", "8", ".1,1,,,1");
    assert_int_equal(join_texts(rows, TRUTHS LINE("0", "rmm", "64", "", "open,1,1"), &r, &list), ERR_DATA);
    snprintf(want, sizeof want,
             "%s and %s have no configuration in common: trace t, seq 0, rmm, budget 64, lag 8, unit head, schedule "
             "step, pending , prompt 0; trace t, seq 0, rmm, budget 64, no lag, unit head, schedule step, pending , "
             "prompt 0",
             paths[0], paths[1]);
    assert_string_equal(err_message(), want);
    fidelity_free(&list);
    results_free(r);
}

static void test_truth_given_twice(void **state) {
    (void)state;
    results *r = NULL;
    fidelity_list list;
    char want[256];
    const char *truths = TRUTHS LINE("0", "h2o", "64", "", "open,1,1") LINE("0", "h2o", "64", "", "open,1,1");
    assert_int_equal(join_texts(ROWS LINE("0", "h2o", "64", "", ".1,1,,,1"), truths, &r, &list), ERR_DATA);
    snprintf(want, sizeof want, "%s:3: the same true rerun as %s:2 (h2o, budget 64, trace t, seq 0)", paths[1],
             paths[1]);
    assert_string_equal(err_message(), want);
    fidelity_free(&list);
    results_free(r);
}

static void test_families(void **state) {
    (void)state;
    assert_int_equal(fidelity_family_of("window"), FIDELITY_WINDOW);
    assert_int_equal(fidelity_family_of("random"), FIDELITY_STATIC);
    assert_int_equal(fidelity_family_of("mix"), FIDELITY_ATTENTION);
    assert_int_equal(fidelity_family_of("somebody's"), FIDELITY_OTHER);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_statistics),        cmocka_unit_test(test_coverage),
        cmocka_unit_test(test_verdict),           cmocka_unit_test(test_join),
        cmocka_unit_test(test_nothing_in_common), cmocka_unit_test(test_truth_given_twice),
        cmocka_unit_test(test_families),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
