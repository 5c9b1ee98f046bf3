/* The replay loop allocates nothing: a sweep over a long sequence takes as many blocks as one over a short sequence. */
#include "sim/sweep.h"
#include "tests/unit/trace_build.h"

enum { CONFIGS = 6 };

/* Blocks that a sweep of all kinds of work takes over a trace of T tokens. */
static size_t blocks_of(int32_t T, trace_form form, int threads) {
    static const char *const specs[CONFIGS] = {"h2o",
                                               "tova",
                                               "streaming",
                                               "mix(evidence=fisher,memory=mean)",
                                               "mix(evidence=attn,memory=recent:4,schedule=every:4)",
                                               "oracle(loss)"};
    built b = build(T, false);
    trace_plan plan = {.dense = true, .factored = true, .grad_loss = true, .n_fisher = 2};
    sweep_options options = {.form = form, .loss = true, .memory = (size_t)1 << 30};
    sim_config config[CONFIGS];
    sim_flags flags = {.budgets = "16", .n_prompt = -1};
    sim_asks asks[CONFIGS];
    sweep_result result[CONFIGS];
    sweep_cost cost;
    trace *t;
    pool *p;
    BUILD_OK(build_write(&b, b.path, NULL, &plan, 1));
    BUILD_OK(trace_open(b.path, &t));
    BUILD_OK(pool_new(threads, &p));
    for (int i = 0; i < CONFIGS; i++) {
        BUILD_OK(sim_asks_build(&specs[i], 1, &flags, &asks[i]));
        BUILD_OK(sim_config_resolve(&asks[i].ask[0], &flags, T, 0, &config[i]));
    }
    size_t before = mem_handed_out();
    BUILD_OK(sweep_sequence(t, 0, config, CONFIGS, NULL, &options, p, result, &cost));
    size_t after = mem_handed_out();
    for (int i = 0; i < CONFIGS; i++) {
        assert_true(result[i].use.evictions > 0);
        sweep_result_free(&result[i]);
        sim_config_free(&config[i]);
        sim_asks_free(&asks[i]);
    }
    pool_free(p);
    trace_close(t);
    build_free(&b);
    return after - before;
}

static void same_blocks(trace_form form, int threads) {
    size_t brief = blocks_of(1030, form, threads), lengthy = blocks_of(1270, form, threads); /* as many chunks */
    if (brief != lengthy) fail_msg("%zu blocks for 1030 tokens, %zu for 1270", brief, lengthy);
    assert_true(brief > 0);
}

static void factored_sweeps_allocate_once(void **state) {
    (void)state;
    same_blocks(TRACE_FACTORED, 1);
}

static void dense_sweeps_allocate_once(void **state) {
    (void)state;
    same_blocks(TRACE_DENSE, 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(factored_sweeps_allocate_once),
                                       cmocka_unit_test(dense_sweeps_allocate_once)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
