/* Scale, shrinkage, spread and interval of a calibration by hand, and its file. */
#include "base/err.h"
#include "sim/calibration.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static const calibration_point points[] = {
    {FAMILY_WINDOW, 1, 1},           {FAMILY_WINDOW, 1, 1},
    {FAMILY_ATTENTION, 1, M_E *M_E}, {FAMILY_ATTENTION, 0.01, 0.01 * M_E},
    {FAMILY_ATTENTION, .1, .1},      {FAMILY_ATTENTION, 2, 2 * M_E},
    {FAMILY_STATIC, 1, 0.0029},      {FAMILY_STATIC, 0, 1},
};

static void fit_by_hand(void **state) {
    (void)state;
    calibration c;
    assert_int_equal(calibration_fit(points, 8, &c), 0);
    /* Logs of the ratios: window 0 0, attention 2 1 0 1; the last two are left out. */
    assert_int_equal(c.n, 6);
    assert_true(fabs(c.log_c - 4.0 / 6) < 1e-12);
    assert_true(fabs(c.s - sqrt(2.0 / 4)) < 1e-12); /* squares 1 + 0 + 1 + 0 over 6 - 2 */
    assert_true(fabs(c.family[FAMILY_WINDOW].log_c - (2 * 4.0 / 6) / 4) < 1e-12);
    assert_true(fabs(c.family[FAMILY_ATTENTION].log_c - (4 + 2 * 4.0 / 6) / 6) < 1e-12);
    assert_true(fabs(c.family[FAMILY_ORACLE].log_c - c.log_c) < 1e-12);
    assert_int_equal(c.family[FAMILY_STATIC].n, 0);
    double est, lo, hi;
    calibration_apply(&c, FAMILY_WINDOW, 0.3, &est, &lo, &hi);
    /* t(.95, 5) = 2.015048 */
    double width = 2.015048373 * c.s * sqrt(1 + 1.0 / 6);
    assert_true(fabs(est - 0.3 * exp(1.0 / 3)) < 1e-9);
    assert_true(fabs(log(hi / est) - width) < 1e-7 && fabs(log(est / lo) - width) < 1e-7);
    calibration_apply(&c, -1, 0, &est, &lo, &hi);
    assert_true(est == 0 && lo == 0 && hi == 0);
}

static void too_few_points_are_refused(void **state) {
    (void)state;
    calibration c;
    assert_int_equal(calibration_fit(points, 5, &c), ERR_DATA);
    assert_non_null(strstr(err_message(), "5 reruns"));
}

static void the_default_says_so(void **state) {
    (void)state;
    calibration c;
    double est, lo, hi;
    calibration_none(&c);
    calibration_apply(&c, FAMILY_ORACLE, 2, &est, &lo, &hi);
    assert_true(c.is_default && fabs(est - 3) < 1e-12 && fabs(hi - 3 * pow(1.5, 1.6448536)) < 1e-6);
}

static void file_round_trip(void **state) {
    (void)state;
    char path[64];
    snprintf(path, sizeof path, "/tmp/calibration.%d.json", (int)getpid());
    calibration c, back;
    assert_int_equal(calibration_fit(points, 8, &c), 0);
    strcpy(c.model, "a \"model\"");
    strcpy(c.budgets, "64,25%");
    c.n_tokens = 512;
    assert_int_equal(calibration_write(path, false, &c), 0);
    assert_int_equal(calibration_write(path, false, &c), ERR_USAGE); /* already there */
    assert_int_equal(calibration_read(path, &back), 0);
    assert_string_equal(back.model, c.model);
    assert_string_equal(back.budgets, c.budgets);
    assert_int_equal(back.n, 6);
    assert_int_equal(back.n_tokens, 512);
    assert_true(!back.is_default && fabs(back.log_c - c.log_c) < 1e-14 && fabs(back.s - c.s) < 1e-14);
    for (int f = 0; f < CALIBRATION_FAMILIES; f++)
        assert_true(back.family[f].n == c.family[f].n && fabs(back.family[f].log_c - c.family[f].log_c) < 1e-14);
    static const char *const bad[] = {"", "{", "{}", "[1]", "{\"format\":\"kvlag-calibration\",\"version\":2}"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        FILE *f = fopen(path, "w");
        fputs(bad[i], f);
        fclose(f);
        assert_int_equal(calibration_read(path, &back), ERR_DATA);
        assert_non_null(strstr(err_message(), path));
    }
    unlink(path);
    assert_int_equal(calibration_read(path, &back), ERR_DATA);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fit_by_hand),
        cmocka_unit_test(too_few_points_are_refused),
        cmocka_unit_test(the_default_says_so),
        cmocka_unit_test(file_round_trip),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
