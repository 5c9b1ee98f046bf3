/* Requests that share a pool, by hand: who is admitted when, who pays, Jain's index (docs/pool.md). */
#include "base/err.h"
#include "base/mem.h"
#include "sim/output.h"
#include "sim/pool.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { T_MAX = 16 };

/* ---- admission -------------------------------------------------------------------------------------------------- */

static request waiting(int64_t arrival, int32_t n_tokens, int32_t n_prompt, int32_t need, int32_t least) {
    int32_t lead = n_prompt > 1 ? n_prompt - 1 : 0;
    return (request){.arrival = arrival, .n_tokens = n_tokens, .lead = lead, .need = need, .least = least};
}

static void first_come_first_served(void **state) {
    (void)state;
    request item[] = {
        waiting(2, 3, 0, 3, 3), /* D: the last to come, the first in the file */
        waiting(0, 5, 0, 4, 4), /* A */
        waiting(1, 8, 6, 6, 3), /* B: a prompt of 6 in one step, then 2 steps */
        waiting(1, 9, 0, 2, 2), /* C */
        waiting(2, 1, 0, 1, 1), /* E would fit at once, but does not overtake D */
    };
    requests q = {.item = item, .n = 5, .entries = 10};
    assert_int_equal(requests_admit(&q), 0);
    assert_int_equal(item[1].start, 0);
    assert_int_equal(item[1].end, 5);
    assert_int_equal(item[2].start, 1); /* 4 + 6 */
    assert_int_equal(item[2].end, 4);   /* steps 0..5, 6, 7 */
    assert_int_equal(item[3].start, 2); /* not beside B's prompt; then 4 + 3 + 2 */
    assert_int_equal(item[3].end, 11);
    assert_int_equal(item[0].start, 4); /* when B has gone: 4 + 2 + 3 */
    assert_int_equal(item[0].end, 7);
    assert_int_equal(item[4].start, 4); /* 4 + 2 + 3 + 1 */
    assert_int_equal(q.queue[0], 1);
    assert_int_equal(q.queue[3], 0);
    mem_free(q.queue);
}

static void nobody_is_there(void **state) {
    (void)state;
    request item[] = {waiting(0, 3, 0, 2, 2), waiting(7, 3, 3, 3, 1)};
    requests q = {.item = item, .n = 2, .entries = 3};
    assert_int_equal(requests_admit(&q), 0);
    assert_int_equal(item[1].start, 7);
    assert_int_equal(item[1].end, 8); /* all of it is prompt: one step */
    mem_free(q.queue);
}

/* ---- who pays --------------------------------------------------------------------------------------------------- */

/* Two requests of one head each. */
typedef struct pair {
    int32_t n_prompt;
    sim_flags flags;
    sim_asks asks[2];
    sim_config c[2];
    replay *r[2];
    int32_t evict_at[2][T_MAX];
    requests q;
} pair;

static void begin(pair *p, const char *spec_a, const char *spec_b, const char *budget, int32_t n_tokens) {
    const char *spec[] = {spec_a, spec_b};
    p->flags = (sim_flags){.budgets = budget, .n_prompt = p->n_prompt, .is_shared = true};
    for (int i = 0; i < 2; i++) {
        if (sim_asks_build(&spec[i], 1, &p->flags, &p->asks[i])) fail_msg("%s", err_message());
        if (sim_config_resolve(p->asks[i].ask, &p->flags, n_tokens, 0, &p->c[i])) fail_msg("%s", err_message());
        policy_shape shape = {.n_layer = 1, .n_head = 1, .n_kv = 1};
        assert_int_equal(replay_new(&p->c[i], n_tokens, &shape, &p->r[i]), 0);
        replay_begin(p->r[i], &(replay_unit){.n_head = 1}, p->evict_at[i]);
    }
    p->q.entries = p->q.low = atoi(budget);
}

static void end(pair *p) {
    for (int i = 0; i < 2; i++) {
        replay_free(p->r[i]);
        sim_config_free(&p->c[i]);
        sim_asks_free(&p->asks[i]);
    }
}

static void attend(pair *p, int i, int32_t t, const float *row) {
    float uniform[T_MAX];
    for (int32_t k = 0; k <= t; k++) uniform[k] = 1.0f / (float)(t + 1);
    const float *heads[] = {row ? row : uniform};
    replay_attend(p->r[i], t, heads, &(replay_facts){.correct = true, .counted = true});
}

static void both(pair *p, int32_t t) {
    attend(p, 0, t, NULL);
    attend(p, 1, t, NULL);
    kv_pool_evict(&p->q, p->r, 2);
}

#define ASSERT_RESIDENTS(replay_, ...)                        \
    do {                                                      \
        const int32_t want_[] = {__VA_ARGS__};                \
        int32_t n_;                                           \
        const int32_t *got_ = replay_residents(replay_, &n_); \
        assert_int_equal(n_, sizeof want_ / sizeof *want_);   \
        assert_memory_equal(got_, want_, sizeof want_);       \
    } while (0)

/* M = 3, both a window. Step 0 holds 1 + 1. After step 1 one of 2 + 2 must go: a tie, the first pays. After step 2 two
 * of 2 + 3: the second pays, then there is a tie again. */
static void fair_by_hand(void **state) {
    (void)state;
    pair p = {0};
    begin(&p, "window", "window", "3", 8);
    both(&p, 0);
    both(&p, 1);
    ASSERT_RESIDENTS(p.r[0], 1);
    ASSERT_RESIDENTS(p.r[1], 0, 1);
    both(&p, 2);
    ASSERT_RESIDENTS(p.r[0], 2);
    ASSERT_RESIDENTS(p.r[1], 1, 2);
    assert_int_equal(p.evict_at[0][0], 2);
    assert_int_equal(p.evict_at[0][1], 3);
    assert_int_equal(p.evict_at[1][0], 3);
    assert_int_equal(p.evict_at[1][1], 9); /* it stays */
    end(&p);
}

/* The same with a second request that cannot give: its sinks and what it holds are 3 entries. */
static void who_cannot_pay_does_not(void **state) {
    (void)state;
    pair p = {0};
    begin(&p, "window", "streaming(sinks=2,hold=1)", "4", 8);
    both(&p, 0);
    both(&p, 1);
    both(&p, 2);
    ASSERT_RESIDENTS(p.r[0], 2);
    ASSERT_RESIDENTS(p.r[1], 0, 1, 2);
    both(&p, 3); /* 2 + 4: entry 2 of the second, then entry 2 of the first */
    ASSERT_RESIDENTS(p.r[0], 3);
    ASSERT_RESIDENTS(p.r[1], 0, 1, 3);
    end(&p);
}

static void watermark_goes_lower(void **state) {
    (void)state;
    pair p = {0};
    begin(&p, "window", "window", "5", 8);
    p.q.low = 3;
    both(&p, 0);
    both(&p, 1);
    both(&p, 2); /* 6 > 5: down to 3, the first pays at 3 + 3, 2 + 2 */
    ASSERT_RESIDENTS(p.r[0], 2);
    ASSERT_RESIDENTS(p.r[1], 1, 2);
    end(&p);
}

/* Blocks of 2 leave whole: 6 > 5 asks for one entry, the first gives its block 0..1. */
static void blocks_by_hand(void **state) {
    (void)state;
    pair p = {0};
    begin(&p, "window(schedule=block:2)", "window(schedule=block:2)", "5", 8);
    both(&p, 0);
    both(&p, 1);
    both(&p, 2);
    ASSERT_RESIDENTS(p.r[0], 2);
    ASSERT_RESIDENTS(p.r[1], 0, 1, 2);
    end(&p);
}

/* The first holds 2 entries with .7 and .3 of its row, the second 4 with .25 .25 .28 .22. Of all, .22 is the least, but
 * over their means of .5 and .25 it is .3 (.6 against .88). */
static void lowest_by_hand(void **state) {
    (void)state;
    static const float row[] = {.7f, .3f}, long_row[] = {.25f, .25f, .28f, .22f};
    pair p = {0};
    begin(&p, "tova(unit=head)", "tova(unit=head)", "5", 8);
    p.q.rule = POOL_LOWEST;
    for (int32_t t = 0; t < 3; t++) attend(&p, 1, t, NULL);
    attend(&p, 0, 0, NULL);
    attend(&p, 0, 1, row);
    attend(&p, 1, 3, long_row);
    kv_pool_evict(&p.q, p.r, 2);
    ASSERT_RESIDENTS(p.r[0], 0);
    ASSERT_RESIDENTS(p.r[1], 0, 1, 2, 3);
    end(&p);
}

/* A cap of its own comes first: the scores that it was decided by are at hand for the pool, too. */
static void after_its_own_eviction(void **state) {
    (void)state;
    static const float row[] = {.1f, .5f, .2f, .2f};
    pair p = {0};
    begin(&p, "tova(unit=head)", "tova(unit=head)", "3", 8);
    for (int32_t t = 0; t < 3; t++) attend(&p, 0, t, NULL);
    attend(&p, 0, 3, row);
    replay_evict(p.r[0]); /* 4 > 3: entry 0 */
    ASSERT_RESIDENTS(p.r[0], 1, 2, 3);
    attend(&p, 1, 0, NULL);
    kv_pool_evict(&p.q, p.r, 2); /* 3 + 1 > 3: entry 2, a tie with 3 */
    ASSERT_RESIDENTS(p.r[0], 1, 3);
    assert_int_equal(p.evict_at[0][0], 4);
    assert_int_equal(p.evict_at[0][2], 4);
    end(&p);
}

/* Prompts of 3 and nothing yet of the other: at the prompt's end the prompt's policy says who leaves, 1 beside the
 * sink 0. A step later the other does, and 0 goes. */
static void the_prompts_policy_evicts_at_its_end(void **state) {
    (void)state;
    pair p = {.n_prompt = 3};
    begin(&p, "window(prompt=streaming(sinks=1))", "window", "3", 8);
    for (int32_t t = 0; t < 3; t++) attend(&p, 0, t, NULL);
    attend(&p, 1, 0, NULL);
    kv_pool_evict(&p.q, p.r, 2);
    ASSERT_RESIDENTS(p.r[0], 0, 2);
    attend(&p, 0, 3, NULL);
    attend(&p, 1, 1, NULL); /* 3 + 2: the first pays 0, then a tie, 2 */
    kv_pool_evict(&p.q, p.r, 2);
    ASSERT_RESIDENTS(p.r[0], 3);
    ASSERT_RESIDENTS(p.r[1], 0, 1);
    end(&p);
}

static void jain_by_hand(void **state) {
    (void)state;
    const double equal[] = {3, 3, 3}, one[] = {0, 8, 0, 0}, some[] = {1, 2, 3};
    assert_true(jain_index(equal, 3) == 1);
    assert_true(jain_index(one, 4) == .25);
    assert_true(fabs(jain_index(some, 3) - 36.0 / 42) < 1e-15);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(first_come_first_served),
        cmocka_unit_test(nobody_is_there),
        cmocka_unit_test(fair_by_hand),
        cmocka_unit_test(who_cannot_pay_does_not),
        cmocka_unit_test(watermark_goes_lower),
        cmocka_unit_test(blocks_by_hand),
        cmocka_unit_test(lowest_by_hand),
        cmocka_unit_test(after_its_own_eviction),
        cmocka_unit_test(the_prompts_policy_evicts_at_its_end),
        cmocka_unit_test(jain_by_hand),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
