/* Canonical composition, by the examples of Unicode's UAX #15 and its exceptions, and stretch by stretch. */
#include "base/err.h"
#include "tests/unit/long_runs.h"
#include "tracer/nfc.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* The form of a text, and the bytes of its stretches as "1,2,3". */
static void compose(const char *text, size_t n, char *out, size_t *n_out, char *stretches) {
    nfc f = {0};
    *n_out = 0;
    for (size_t i = 0, length; i < n; i += length) {
        if (nfc_next(&f, text + i, n - i, &length)) fail_msg("%s", err_message());
        assert_true(length > 0 && i + length <= n);
        memcpy(out + *n_out, f.text, f.n);
        *n_out += f.n;
        if (stretches) stretches += sprintf(stretches, "%s%zu", i ? "," : "", length);
    }
    nfc_free(&f);
}

static void expect(const char *text, const char *form, const char *stretches) {
    char out[256], lengths[256] = "";
    size_t n;
    compose(text, strlen(text), out, &n, lengths);
    if (n != strlen(form) || memcmp(out, form, n) != 0) fail_msg("'%s' became '%.*s'", text, (int)n, out);
    assert_string_equal(lengths, stretches);
}

static void marks_merge_in_their_order(void **state) {
    (void)state;
    expect("plain", "plain", "1,1,1,1,1");
    expect("e\u0301x", "\u00e9x", "3,1");
    expect("\u00e9\u00e9", "\u00e9\u00e9", "2,2");
    expect("\u212b\u2126", "\u00c5\u03a9", "3,3");
    expect("\u1e0a\u0323", "\u1e0c\u0307", "5");
    expect("D\u0307\u0323", "\u1e0c\u0307", "5");
    expect("q\u0307\u0323q\u0323\u0307", "q\u0323\u0307q\u0323\u0307", "5,5");
    expect("\u1e9b\u0323", "\u1e9b\u0323", "5");
    expect("a\u0315\u0300\u05aeb", "\u00e0\u05ae\u0315b", "7,1");
    expect("\u0301e", "\u0301e", "2,1");
}

/* Characters that never appear in composed texts: exclusions, singletons, and those that begin with a mark. */
static void exceptions_stay_apart(void **state) {
    (void)state;
    expect("\u0958", "\u0915\u093c", "3");
    expect("\ufb1d", "\u05d9\u05b4", "3");
    expect("\u2adc", "\u2add\u0338", "3");
    expect("\u0344", "\u0308\u0301", "2");
    expect("a\u0344", "\u00e4\u0301", "3");
    expect("\U0001d15e", "\U0001d157\U0001d165", "4");
    expect("x\u0f73\u093cy", "x\u093c\u0f71\u0f72y", "7,1");
}

/* Characters that are no marks, and merge all the same. */
static void letters_merge(void **state) {
    (void)state;
    expect("\u1100\u1161\u11a8", "\uac01", "9");
    expect("\uac00\u11a8\u1100", "\uac01\u1100", "6,3");
    expect("\uac00\u11a7", "\uac00\u11a7", "3,3");
    expect("\uac01\u11a8", "\uac01\u11a8", "3,3");
    expect("\u1161\u11a8", "\u1161\u11a8", "3,3");
    expect("\u0dd9\u0dcf\u0dca", "\u0ddd", "9");
    expect("\u0cc6\u0cc2\u0cd5z", "\u0ccbz", "9,1");
    expect("\u0cc6\u0301\u0cc2", "\u0cc6\u0301\u0cc2", "5,3");
    expect("\u4f60\u597d", "\u4f60\u597d", "3,3");
}

static void other_bytes_stay(void **state) {
    (void)state;
    expect("e\xcc\xff\u0301", "e\xcc\xff\u0301", "1,1,1,2");
    expect("\xff\u0344", "\xff\u0308\u0301", "1,2");
    char out[8], lengths[32] = "";
    size_t n;
    compose("e\0\u0301", 4, out, &n, lengths);
    assert_true(n == 4 && memcmp(out, "e\0\u0301", 4) == 0);
    assert_string_equal(lengths, "1,3");
}

/* Two kinds of marks in turn: all of the one kind come first. */
static void long_runs_are_sorted_fast(void **state) {
    (void)state;
    enum { PAIRS = 1 << 19 };
    char *text = malloc(1 + 4 * PAIRS), *out = malloc(2 + 4 * PAIRS);
    size_t n;
    *text = 'q';
    for (size_t i = 0; i < PAIRS; i++) memcpy(text + 1 + 4 * i, "\u0301\u0323", 4);
    long_run_guard(GUARD_SECONDS);
    compose(text, 1 + 4 * PAIRS, out, &n, NULL);
    assert_true(n == 1 + 4 * PAIRS);
    for (size_t i = 0; i < 2 * PAIRS; i++) assert_memory_equal(out + 1 + 2 * i, i < PAIRS ? "\u0323" : "\u0301", 2);
    long_run_guard(0);
    free(text);
    free(out);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(marks_merge_in_their_order),
        cmocka_unit_test(exceptions_stay_apart),
        cmocka_unit_test(letters_merge),
        cmocka_unit_test(other_bytes_stay),
        cmocka_unit_test(long_runs_are_sorted_fast),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
