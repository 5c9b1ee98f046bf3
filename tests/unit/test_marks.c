/* Marked texts: what is left of them, which steps count, what an answer needs, and what is refused. */
#include "base/err.h"
#include "tracer/marks.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <string.h>

/* "ab cd ef cd cdf" and where its words lie. */
#define TEXT "ab {{x=cd}} ef {{x?cd}} {{?cd}}f"

static void words_stay(void **state) {
    (void)state;
    text plain = {0};
    marks m = {0};
    assert_int_equal(marks_take(TEXT, strlen(TEXT), &plain, &m), 0);
    assert_string_equal(plain.data, "ab cd ef cd cdf");
    const mark want[] = {{3, 5, false, MARK_NONE}, {9, 11, true, 0}, {12, 14, true, MARK_NONE}};
    assert_int_equal(m.n, 3);
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(m.mark[i].begin, want[i].begin);
        assert_int_equal(m.mark[i].end, want[i].end);
        assert_int_equal(m.mark[i].is_answer, want[i].is_answer);
        assert_int_equal(m.mark[i].fact, want[i].fact);
    }
    text_free(&plain);
    marks_free(&m);
}

static void a_text_without_marks_is_left_alone(void **state) {
    (void)state;
    const char bytes[] = "{ } a}} \0 {b";
    text plain = {0};
    marks m = {0};
    assert_int_equal(marks_take(bytes, sizeof bytes, &plain, &m), 0);
    assert_int_equal(plain.n, sizeof bytes);
    assert_memory_equal(plain.data, bytes, sizeof bytes);
    assert_int_equal(m.n, 0);
    text_free(&plain);
}

/* Tokens "", "ab", " c", "d", " ef", " ", "c", "d ", "cdf" of the text above; the first is a begin of text. */
static const int64_t offset[] = {0, 0, 2, 4, 5, 8, 9, 10, 12, 15};

static void steps_by_hand(void **state) {
    (void)state;
    text plain = {0};
    marks m = {0};
    marked_steps s = {0};
    assert_int_equal(marks_take(TEXT, strlen(TEXT), &plain, &m), 0);
    assert_int_equal(marks_steps(&m, offset, 9, 0, &s), 0);
    /* Answers hold tokens 6, 7 and 8; the fact tokens 2 and 3, needed at step 5, which predicts token 6. */
    const uint8_t counted[8] = {0, 0, 0, 0, 0, 1, 1, 1};
    const int32_t probes[4] = {2, 5, 3, 5};
    assert_memory_equal(s.counted, counted, sizeof counted);
    assert_int_equal(s.n_probes, 2);
    assert_memory_equal(s.probes, probes, sizeof probes);
    marked_steps_free(&s);

    /* Cut off within the first answer, which is the last token then. */
    assert_int_equal(marks_steps(&m, offset, 7, 5, &s), 0);
    assert_memory_equal(s.counted, counted, 6);
    assert_int_equal(s.n_probes, 2);
    marked_steps_free(&s);

    assert_int_equal(marks_steps(&m, offset, 6, 0, &s), ERR_DATA);
    assert_non_null(strstr(err_message(), "no answer is marked"));
    marked_steps_free(&s);
    assert_int_equal(marks_steps(&m, offset, 7, 6, &s), ERR_DATA);
    assert_non_null(strstr(err_message(), "in the 1 tokens after the prompt"));
    marked_steps_free(&s);
    text_free(&plain);
    marks_free(&m);
}

static void refusals(void **state) {
    (void)state;
    const struct {
        const char *bytes, *message;
    } bad[] = {
        {"a\nb {{x=c", "line 2: a mark has no end"},
        {"{{x", "line 1: a mark is {{NAME=words}}"},
        {"{{=c}}", "line 1: a mark is {{NAME=words}}"},
        {"{{x y=c}}", "line 1: a mark is {{NAME=words}}"},
        {"{{", "line 1: a mark is {{NAME=words}}"},
        {"{{x=}}", "line 1: a mark holds no words"},
        {"{{x={{y=c}}}}", "line 1: a mark stands within another"},
        {"{{x=c {{y=c}}", "line 1: a mark stands within another"},
        {"{{x?c}} {{x=c}}", "line 1: the answer needs 'x', which is not stated before it"},
        {"{{x=c}} {{xy?c}}", "needs 'xy'"},
        {"{{x=c}}\n\n{{x=d}}", "line 3: 'x' is stated a second time"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        text plain = {0};
        marks m = {0};
        assert_int_equal(marks_take(bad[i].bytes, strlen(bad[i].bytes), &plain, &m), ERR_DATA);
        if (!strstr(err_message(), bad[i].message)) fail_msg("%s: %s", bad[i].bytes, err_message());
        text_free(&plain);
        marks_free(&m);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(words_stay),
        cmocka_unit_test(a_text_without_marks_is_left_alone),
        cmocka_unit_test(steps_by_hand),
        cmocka_unit_test(refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
