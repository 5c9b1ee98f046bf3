#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "analyze/canvas.h"
#include "analyze/gnuplot.h"

#include <math.h>

#define CLOSE 1e-9

static void test_labels_keep_apart(void **state) {
    (void)state;
    double pair[] = {0.5, 0.5}, far[] = {0.8, 0.2}, low[] = {0.02, 0}, high[] = {1, 0.97, 0.3};
    assert_int_equal(canvas_spread(pair, 2, 0.1), 0);
    assert_float_equal(pair[0], 0.45, CLOSE);
    assert_float_equal(pair[1], 0.55, CLOSE);
    assert_int_equal(canvas_spread(far, 2, 0.1), 0);
    assert_float_equal(far[0], 0.8, CLOSE);
    assert_float_equal(far[1], 0.2, CLOSE);
    assert_int_equal(canvas_spread(low, 2, 0.1), 0);
    assert_float_equal(low[0], 0.1, CLOSE);
    assert_float_equal(low[1], 0, CLOSE);
    assert_int_equal(canvas_spread(high, 3, 0.2), 0);
    assert_float_equal(high[0], 1, CLOSE);
    assert_float_equal(high[1], 0.8, CLOSE);
    assert_float_equal(high[2], 0.3, CLOSE);
}

/* A block that grows must look back at the one below it. */
static void test_labels_cascade(void **state) {
    (void)state;
    double at[] = {0.40, 0.52, 0.52, 0.52};
    assert_int_equal(canvas_spread(at, 4, 0.1), 0);
    for (int i = 0; i < 4; i++) assert_float_equal(at[i], 0.49 - 0.15 + 0.1 * i, CLOSE);
}

static void test_axis(void **state) {
    (void)state;
    size_t left_out;
    double decade[] = {0.01, NAN, 0.1}, zero[] = {0, 0.01, 1}, near[] = {5, 8}, below[] = {-1, 100};
    axis a = axis_over(decade, 3, &left_out);
    assert_true(a.log && a.lo < 0.01 && a.hi > 0.1);
    assert_int_equal(left_out, 0);
    assert_float_equal(axis_place(a, sqrt(a.lo * a.hi)), 0.5, CLOSE);
    a = axis_over(zero, 3, &left_out);
    assert_true(a.log && a.lo > 0);
    assert_int_equal(left_out, 1);
    a = axis_over(near, 2, &left_out);
    assert_true(!a.log && a.lo > 4 && a.lo < 5);
    assert_float_equal(axis_place(a, 6.5), 0.5, CLOSE);
    a = axis_over(below, 2, &left_out);
    assert_true(!a.log && a.lo < -1);
    assert_true(a.linear_to == AXIS_LINEAR_TO);
    double small[] = {-0.001, 0.029};
    a = axis_over(small, 2, &left_out);
    assert_true(!a.log && a.linear_to == 0 && a.lo < -0.001);
    double even[] = {3, 3}, none[] = {NAN};
    a = axis_over(even, 2, &left_out);
    assert_true(a.lo < 3 && a.hi > 3);
    a = axis_over(none, 1, &left_out);
    assert_true(a.lo < a.hi);
    assert_float_equal(axis_step(1000, 2.5), 500, CLOSE);
    assert_float_equal(axis_step(0.9, 5), 0.2, CLOSE);
}

/* asinh(v / s) is half way between 0 and asinh(x / s) at s sinh(asinh(x / s) / 2); s = .003, x = .3: v = .0211118. */
static void test_axis_of_both_signs(void **state) {
    (void)state;
    axis a = {.lo = 0, .hi = 0.3, .linear_to = 0.003};
    assert_float_equal(axis_place(a, 0.0211074), 0.5, 1e-6);
    assert_float_equal(axis_value(a, 0.5), 0.0211074, 1e-7);
    assert_float_equal(axis_place(a, -0.0211074), -0.5, 1e-6);
}

static void test_widen(void **state) {
    (void)state;
    axis log_axis = {.lo = 1, .hi = 100, .log = true}, linear = {.lo = 0, .hi = 10};
    axis a = axis_widen(log_axis, 0.5, 120, 0.2);
    assert_float_equal(a.lo, 0.5, CLOSE);
    assert_float_equal(a.hi, 120, 1e-9);
    a = axis_widen(log_axis, -3, 1e9, 0.25); /* a quarter of two decades at most */
    assert_float_equal(a.lo, pow(10, -0.5), CLOSE);
    assert_float_equal(a.hi, pow(10, 2.5), 1e-9);
    a = axis_widen(linear, 2, 11, 0.2);
    assert_true(a.lo == 0);
    assert_float_equal(a.hi, 11, CLOSE);
    a = axis_widen(linear, INFINITY, -INFINITY, 0.2); /* no intervals at all */
    assert_true(a.lo == 0 && a.hi == 10);
}

static void test_ticks(void **state) {
    (void)state;
    text t = {0};
    axis_add(&t, 'x', (axis){.lo = -0.02, .hi = 0.4, .linear_to = 0.003}, true);
    assert_string_equal(t.data, "unset nonlinear x\nunset logscale x\n"
                                "set nonlinear x via asinh(x / 0.003) inverse 0.003 * sinh(x)\n"
                                "set xrange [-0.02:0.4]\n"
                                "set xtics ('0' 0, '-0.01' -0.01, '' -0.02 1, '0.01' 0.01, '' 0.02 1, '' 0.03 1, "
                                "'' 0.04 1, '' 0.05 1, '' 0.06 1, '' 0.07 1, '' 0.08 1, '' 0.09 1, '0.1' 0.1, "
                                "'' 0.2 1, '' 0.3 1, '' 0.4 1)\n");
    text_free(&t);
    axis_add(&t, 'y', (axis){.lo = 0, .hi = 1}, true);
    assert_string_equal(t.data, "unset nonlinear y\nunset logscale y\nset yrange [0:1]\n"
                                "set ytics ('0' 0, '0.2' 0.2, '0.4' 0.4, '0.6' 0.6, '0.8' 0.8, '1' 1)\n");
    text_free(&t);
    axis_add(&t, 'y', (axis){.lo = 0.9, .hi = 6, .log = true}, true);
    assert_string_equal(t.data, "unset nonlinear y\nset logscale y\nset yrange [0.9:6]\n"
                                "set ytics ('' 0.9 1, '1' 1, '2' 2, '' 3 1, '' 4 1, '5' 5, '' 6 1)\n");
    text_free(&t);
}

static void test_words(void **state) {
    (void)state;
    text t = {0};
    gnuplot_quote(&t, "it's {x_\\ $`\n");
    assert_string_equal(t.data, "'it''s {x_\\ $`?'");
    text_free(&t);
    gnuplot_quote(&t, "'a''b'");
    assert_string_equal(t.data, "''.\"'\".'a'''.\"'\".'b'''");
    text_free(&t);
    canvas_quote(&t, "αβγδ", 4);
    assert_string_equal(t.data, "'αβγδ'");
    text_free(&t);
    canvas_quote(&t, "αβγδ", 3);
    assert_string_equal(t.data, "'αβ…'");
    text_free(&t);
}

static void test_names(void **state) {
    (void)state;
    figure_list list = {0};
    figure *f;
    const char *parts[] = {"lag", "rmm(signal=uniform)", "kl_est"}, *same[] = {"lag", "rmm[signal=uniform]", "kl_est"};
    assert_int_equal(canvas_new(&list, parts, 3, 2, &f), 0);
    assert_string_equal(f->name, "lag_rmm_signal_uniform_kl_est");
    assert_int_equal(canvas_new(&list, same, 3, 2, &f), 0);
    assert_string_equal(f->name, "lag_rmm_signal_uniform_kl_est_2");
    figure_list_free(&list);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_labels_keep_apart),
        cmocka_unit_test(test_labels_cascade),
        cmocka_unit_test(test_axis),
        cmocka_unit_test(test_axis_of_both_signs),
        cmocka_unit_test(test_widen),
        cmocka_unit_test(test_ticks),
        cmocka_unit_test(test_words),
        cmocka_unit_test(test_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
