/* The endogenous-reuse task: roles, places, rows. Expected values are worked out by hand from reuse.h. */
#include "base/err.h"
#include "traces/reuse.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

static reuse_sequence *drawn(const reuse_task *task, int32_t number) {
    reuse_sequence *s;
    if (reuse_draw(task, number, &s)) fail_msg("%s", err_message());
    return s;
}

/* ---- places ----------------------------------------------------------------------------------------------------- */

/* 8 tokens and distance 4: places 0 1 2, all taken. Proofs at 1 2 3. Fact 2 can only be asked for at 6, which leaves 5
 * to fact 1, and 4 to fact 0. */
static void a_full_task_has_one_solution(void **state) {
    (void)state;
    reuse_task task = reuse_default;
    task.n_tokens = 8;
    task.n_facts = 3;
    task.proof = 1;
    task.distance = 4;
    for (task.seed = 0; task.seed < 20; task.seed++) {
        reuse_sequence *s = drawn(&task, 7);
        assert_memory_equal(s->probes, ((int32_t[]){0, 4, 1, 5, 2, 6}), 6 * sizeof(int32_t));
        assert_memory_equal(s->token, ((int32_t[]){2, 3, 4}), 3 * sizeof(int32_t));
        assert_memory_equal(s->target + 1, ((int32_t[]){0, 1, 2, 0, 1, 2}), 6 * sizeof(int32_t));
        assert_memory_equal(s->counted, ((uint8_t[]){0, 0, 0, 0, 1, 1, 1, 0}), 8);
        for (int t = 1; t < 7; t++) assert_int_equal(s->correct[t], 1);
        reuse_free(s);
    }
}

static void refused(const reuse_task *task, const char *words) {
    reuse_sequence *s;
    assert_int_equal(reuse_draw(task, 0, &s), ERR_USAGE);
    if (!strstr(err_message(), words)) fail_msg("'%s' is not in: %s", words, err_message());
    reuse_free(s);
}

static void what_does_not_fit_is_refused(void **state) {
    (void)state;
    reuse_task task = reuse_default;
    task.n_tokens = 8;
    task.n_facts = 4;
    task.proof = 1;
    task.distance = 4;
    refused(&task, "4 facts do not fit: 8 tokens have 3 places");
    /* Proofs at 3 4 5: fact 2 gets 6, and fact 1 could only have 5 or 6. */
    task.n_facts = 3;
    task.proof = 3;
    refused(&task, "3 facts find no answers: every step at least 4 after");
    task.distance = 20;
    refused(&task, "have 0 places");
}

/* ---- roles ------------------------------------------------------------------------------------------------------ */

static void roles_are_what_they_say(void **state) {
    (void)state;
    for (int32_t number = 0; number < 10; number++) {
        reuse_sequence *s = drawn(&reuse_default, number);
        int facts = 0, answers = 0, proofs = 0, distractor = -1;
        for (int32_t t = 0; t < 400; t++) {
            if (s->token[t] >= REUSE_FACT) {
                assert_int_equal(s->token[t], REUSE_FACT + facts);
                assert_int_equal(s->probes[2 * facts], t);
                assert_in_range(s->probes[2 * facts + 1], t + 100, 398);
                assert_int_equal(s->target[s->probes[2 * facts + 1]], t);
                assert_int_equal(s->counted[s->probes[2 * facts + 1]], 1);
                assert_int_equal(s->target[t + 6], t);
                facts++;
            }
            answers += s->counted[t];
            if (!s->correct[t]) assert_int_equal(s->target[t], distractor);
            else if (s->target[t] >= 0) {
                assert_true(s->token[s->target[t]] >= REUSE_FACT);
                proofs += t == s->target[t] + 6;
            }
            if (s->token[t] == REUSE_DISTRACTOR) distractor = t;
        }
        assert_int_equal(facts, 16);
        assert_int_equal(answers, 16);
        assert_int_equal(proofs, 16);
        reuse_free(s);
    }
}

/* Standard deviations of the shares: below .006. */
static void rates_are_what_they_say(void **state) {
    (void)state;
    reuse_task task = reuse_default;
    task.n_tokens = 8192;
    task.distractor_rate = 0.3;
    task.fail_rate = 0.6;
    reuse_sequence *s = drawn(&task, 0);
    double distractors = 0, failures = 0, p_right = 0, p_wrong = 0, entropy = 0;
    for (int t = 0; t < 8192; t++) {
        double p = exp((double)s->logprob[t]);
        distractors += s->token[t] == REUSE_DISTRACTOR;
        failures += !s->correct[t];
        assert_true(s->correct[t] ? p >= 0.5 && p < 1 : p > 0 && p <= 0.5);
        *(s->correct[t] ? &p_right : &p_wrong) += p;
        entropy += (double)s->entropy[t] / 8192;
    }
    assert_true(fabs(distractors / 8192 - 0.3) < 0.02);
    assert_true(fabs(failures / 8192 - 0.6) < 0.02);
    assert_true(fabs(p_right / (8192 - failures) - 0.75) < 0.02);
    assert_true(fabs(p_wrong / failures - 0.25) < 0.02);
    assert_true(fabs(entropy - 0.5) < 0.02); /* the mean of H(p) over p in 0 .. 1 is 1/2 nat */
    reuse_free(s);
}

static void the_signal_can_be_spoilt(void **state) {
    (void)state;
    reuse_task task = reuse_default, flipped = reuse_default, always = reuse_default;
    task.n_tokens = flipped.n_tokens = always.n_tokens = 8192;
    flipped.flip = 0.2;
    always.always_correct = true;
    reuse_sequence *s = drawn(&task, 0), *f = drawn(&flipped, 0), *a = drawn(&always, 0);
    assert_memory_equal(s->target, f->target, 8192 * sizeof(int32_t));
    assert_memory_equal(s->target, a->target, 8192 * sizeof(int32_t));
    int differ = 0;
    for (int t = 0; t < 8192; t++) {
        differ += s->correct[t] != f->correct[t];
        assert_int_equal(a->correct[t], 1);
    }
    assert_in_range(differ, 1500, 1780); /* 1638, standard deviation 36 */
    reuse_free(s);
    reuse_free(f);
    reuse_free(a);
}

/* ---- rows ------------------------------------------------------------------------------------------------------- */

/* The task of one solution, without noise and without failures: step 0 is plain, step 2 proves entry 1. */
static void rows_are_what_they_say(void **state) {
    (void)state;
    reuse_task task = reuse_default;
    float row[3];
    task.n_tokens = 8;
    task.n_facts = 3;
    task.proof = 1;
    task.distance = 4;
    task.noise = task.fail_rate = 0;
    task.fact_share = 0.3;
    reuse_sequence *s = drawn(&task, 0);
    reuse_row(s, 0, 0, row);
    assert_true(row[0] == 1);
    /* .7 are left: .35 near by as 1 : 2 : 4, that is .05 .1 .2, and .35 evenly, .116667 each. */
    static const double want[] = {0.166667, 0.516667, 0.316667};
    reuse_row(s, 0, 2, row);
    for (int i = 0; i < 3; i++) assert_true(fabs((double)row[i] - want[i]) < 1e-6);
    s->target[2] = -1; /* plain: the whole row as .5 near by and .5 evenly */
    static const double plain[] = {0.238095, 0.309524, 0.452381};
    reuse_row(s, 1, 2, row);
    for (int i = 0; i < 3; i++) assert_true(fabs((double)row[i] - plain[i]) < 1e-6);
    reuse_free(s);
}

static void failing_rows_give_the_distractor_its_share(void **state) {
    (void)state;
    reuse_task task = reuse_default;
    float row[400];
    task.noise = 0;
    reuse_sequence *s = drawn(&task, 0);
    for (int32_t t = 100, seen = 0; seen < 20; t++) {
        if (s->correct[t]) continue;
        seen++;
        reuse_row(s, 0, t, row);
        double near = 0.2 * pow(0.5, t - s->target[t] + 1), even = 0.2 / (t + 1);
        assert_true(fabs((double)row[s->target[t]] - (0.6 + near + even)) < 1e-6);
    }
    reuse_free(s);
}

/* Between two heads the logarithm of a weight differs with twice the variance of the noise, 2 * .49, around what the
 * sums of the two rows differ by. */
static void noise_is_log_normal_and_each_head_has_its_own(void **state) {
    (void)state;
    reuse_task task = reuse_default;
    float a[400], b[400];
    double variance = 0;
    task.noise = 0.7;
    reuse_sequence *s = drawn(&task, 3);
    for (int32_t t = 380; t < 400; t++) {
        double total = 0, sum = 0, square = 0;
        reuse_row(s, 0, t, a);
        reuse_row(s, 3, t, b);
        for (int32_t i = 0; i <= t; i++) {
            double d = log((double)a[i] / (double)b[i]);
            total += (double)a[i];
            sum += d;
            square += d * d;
        }
        assert_true(fabs(total - 1) < 1e-5);
        variance += (square - sum * sum / (t + 1)) / t / 20;
    }
    assert_true(fabs(variance - 0.98) < 0.06);
    reuse_free(s);
}

static void sequences_and_seeds_differ(void **state) {
    (void)state;
    reuse_task other = reuse_default;
    other.seed = 1;
    reuse_sequence *a = drawn(&reuse_default, 0), *b = drawn(&reuse_default, 1), *c = drawn(&other, 0),
                   *again = drawn(&reuse_default, 0);
    assert_memory_not_equal(a->probes, b->probes, 32 * sizeof(int32_t));
    assert_memory_not_equal(a->probes, c->probes, 32 * sizeof(int32_t));
    assert_memory_equal(a->probes, again->probes, 32 * sizeof(int32_t));
    reuse_free(a);
    reuse_free(b);
    reuse_free(c);
    reuse_free(again);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_full_task_has_one_solution),
        cmocka_unit_test(what_does_not_fit_is_refused),
        cmocka_unit_test(roles_are_what_they_say),
        cmocka_unit_test(rates_are_what_they_say),
        cmocka_unit_test(the_signal_can_be_spoilt),
        cmocka_unit_test(rows_are_what_they_say),
        cmocka_unit_test(failing_rows_give_the_distractor_its_share),
        cmocka_unit_test(noise_is_log_normal_and_each_head_has_its_own),
        cmocka_unit_test(sequences_and_seeds_differ),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
