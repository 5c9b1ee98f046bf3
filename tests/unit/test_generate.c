/* Choosing tokens, by values worked out by hand, and answers of a model that follows a script. */
#include "base/err.h"
#include "tracer/generate.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

enum { N = 5, END = 4 };

static tokenizer *words(void) {
    static const token_text names[N] = {{"a", 1}, {"b", 1}, {"c", 1}, {"d", 1}, {"<|im_end|>", 10}};
    const tokenizer_facts facts = {
        .file = "toy", .kind = TOKENIZER_BYTES, .tokens = names, .n_tokens = N, .bos = -1, .eos = 3};
    tokenizer *t;
    if (tokenizer_new(&facts, &t)) fail_msg("%s", err_message());
    return t;
}

/* ---- one choice ------------------------------------------------------------------------------------------------- */

/* What is taken of tokens with these probabilities. */
static int32_t pick(double temperature, double top_p, double u, const double p[N]) {
    const generate_ask ask = {.n = 1, .temperature = temperature, .top_p = top_p};
    const model m = {.n_vocab = N};
    float logits[N];
    tokenizer *t = words();
    generator *g;
    int32_t id = -1;
    for (int i = 0; i < N; i++) logits[i] = (float)(p[i] > 0 ? 7 + log(p[i]) : -1000);
    assert_int_equal(generator_new(&ask, &m, NULL, NULL, t, &g), 0);
    assert_int_equal(generate_pick(g, logits, u, &id), 0);
    generator_free(g);
    tokenizer_free(t);
    return id;
}

static void test_the_most_likely(void **state) {
    (void)state;
    assert_int_equal(pick(0, 1, .99, (double[N]){.1, .2, .4, .3}), 2);
    assert_int_equal(pick(0, 1, .99, (double[N]){.1, .4, .1, .4}), 1);
}

static void test_drawn(void **state) {
    (void)state;
    const double p[N] = {.15, .5, .05, .3, 0}; /* in order: 1 up to .5, 3 up to .8, 0 up to .95, 2 */
    const double u[] = {.001, .499, .501, .799, .801, .949, .951, .9999};
    const int32_t want[] = {1, 1, 3, 3, 0, 0, 2, 2};
    for (size_t i = 0; i < sizeof u / sizeof *u; i++) assert_int_equal(pick(1, 1, u[i], p), want[i]);
}

static void test_temperature(void **state) {
    (void)state;
    /* At temperature 2 probabilities are as the roots of .5, .3, .15 and .05: .3790, .2936, .2076, .1198. */
    const double p[N] = {.15, .5, .05, .3, 0};
    const double u[] = {.378, .380, .672, .673, .880, .881};
    const int32_t want[] = {1, 3, 3, 0, 0, 2};
    for (size_t i = 0; i < sizeof u / sizeof *u; i++) assert_int_equal(pick(2, 1, u[i], p), want[i]);
}

static void test_nucleus(void **state) {
    (void)state;
    const double p[N] = {.15, .5, .05, .3, 0};
    /* .5 and .3 reach .7, and share what is drawn as .625 to .375. */
    assert_int_equal(pick(1, .7, .624, p), 1);
    assert_int_equal(pick(1, .7, .626, p), 3);
    assert_int_equal(pick(1, .7, .9999, p), 3);
    assert_int_equal(pick(1, .49, .9999, p), 1);
    assert_int_equal(pick(1, .81, .9999, p), 0);
    assert_int_equal(pick(1, 1e-6, .9999, p), 1);
}

static void test_ties_go_by_id(void **state) {
    (void)state;
    const double p[N] = {.25, .25, .25, .25, 0};
    assert_int_equal(pick(1, 1, .3, p), 1);
    assert_int_equal(pick(1, 1, .8, p), 3);
    assert_int_equal(pick(1, .49, .49, p), 0);
    assert_int_equal(pick(1, .49, .51, p), 1);
}

static void test_numbers_that_are_none(void **state) {
    (void)state;
    const model m = {.n_vocab = N};
    tokenizer *t = words();
    for (int i = 0; i < 2; i++) {
        const generate_ask ask = {.n = 1, .temperature = i, .top_p = 1};
        generator *g;
        int32_t id;
        assert_int_equal(generator_new(&ask, &m, NULL, NULL, t, &g), 0);
        assert_int_equal(generate_pick(g, (float[N]){1, NAN, 0, 0, 0}, .5, &id), ERR_DATA);
        assert_string_equal(err_message(), "non-finite logits");
        assert_int_equal(generate_pick(g, (float[N]){1, 2, INFINITY, 0, 0}, .5, &id), ERR_DATA);
        generator_free(g);
    }
    tokenizer_free(t);
}

/* ---- answers ---------------------------------------------------------------------------------------------------- */

/* After token i the most likely one is next[i]. Keeps what it was given. */
struct backend_steps {
    int32_t next[N], given[16];
    size_t n;
    float logits[N];
};
static struct backend_steps script;

static int script_new(backend_state *s, size_t n, const bool *wants_rows, int32_t n_tokens, backend_steps **out) {
    (void)s;
    assert_int_equal(n, 1);
    assert_false(wants_rows[0]);
    assert_in_range(n_tokens, 1, 16);
    script.n = 0;
    *out = &script;
    return 0;
}

static void script_free(backend_steps *steps) {
    (void)steps;
}

static int script_next(backend_steps *st, int32_t token, step_view *out) {
    st->given[st->n++] = token;
    for (int i = 0; i < N; i++) st->logits[i] = i == st->next[token];
    *out = (step_view){.logits = st->logits};
    return 0;
}

static void check_answer(int32_t most, const int32_t *want, size_t n_want) {
    const backend b = {.steps_new = script_new, .steps_free = script_free, .steps_next = script_next};
    const generate_ask ask = {.n = most, .top_p = 1};
    const model m = {.n_vocab = N};
    tokenizer *t = words();
    generator *g;
    int32_t answer[16];
    size_t n;
    double done = 0;
    assert_int_equal(generator_new(&ask, &m, &b, NULL, t, &g), 0);
    assert_int_equal(generate_answer(g, (int32_t[]){2, 0}, 2, 0, answer, &n, &done), 0);
    assert_int_equal(n, n_want);
    assert_memory_equal(answer, want, n * sizeof *want);
    /* The last token of an answer is given to nobody. */
    assert_int_equal(script.n, 2 + n - 1);
    assert_int_equal((int)done, 2 + n - 1);
    assert_memory_equal(script.given, ((int32_t[]){2, 0}), 2 * sizeof(int32_t));
    assert_memory_equal(script.given + 2, want, (n - 1) * sizeof *want);
    generator_free(g);
    tokenizer_free(t);
}

static void test_answers(void **state) {
    (void)state;
    memcpy(script.next, (int32_t[]){1, 2, 1, 0, 0}, sizeof script.next);
    check_answer(5, (int32_t[]){1, 2, 1, 2, 1}, 5);
    check_answer(1, (int32_t[]){1}, 1);
    memcpy(script.next, (int32_t[]){1, 2, END, 0, 0}, sizeof script.next); /* the end of a turn, by its name */
    check_answer(9, (int32_t[]){1, 2, END}, 3);
    memcpy(script.next, (int32_t[]){1, 3, 0, 0, 0}, sizeof script.next); /* the tokenizer's EOS */
    check_answer(9, (int32_t[]){1, 3}, 2);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_most_likely), cmocka_unit_test(test_drawn),
        cmocka_unit_test(test_temperature),     cmocka_unit_test(test_nucleus),
        cmocka_unit_test(test_ties_go_by_id),   cmocka_unit_test(test_numbers_that_are_none),
        cmocka_unit_test(test_answers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
