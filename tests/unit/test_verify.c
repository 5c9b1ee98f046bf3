/* True reruns: costs worked out by hand, steps against masked passes, closed loop against a slow one that runs the
 * whole prefix again for every token. The tiny model is built by the Makefile. */
#include "base/err.h"
#include "base/mem.h"
#include "base/progress.h"
#include "base/rng.h"
#include "tracer/cpu/cpu.h"
#include "tracer/verify.h"
#include "traces/kernels.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#define TINY "build/tiny.gguf"
enum { LAYERS = 3, HEADS = 6, KV_HEADS = 2, UNITS = LAYERS * KV_HEADS, VOCAB = 1024, MOST = 320 };

/* ---- the tiny model ---------------------------------------------------------------------------------------------- */

typedef struct bench {
    model *m;
    pool *p;
    backend_state *s;
    int32_t token[MOST];
} bench;

static bench *setup(int threads) {
    bench *b = mem_new(1, sizeof *b, "test");
    if (model_open(TINY, &b->m) || pool_new(threads, &b->p) || cpu_backend.load(b->m, b->p, &cpu_options, &b->s))
        fail_msg("%s", err_message());
    assert_int_equal(b->m->n_layer, LAYERS);
    assert_int_equal(b->m->n_head, HEADS);
    assert_int_equal(b->m->n_kv_head, KV_HEADS);
    assert_int_equal(b->m->n_vocab, VOCAB);
    for (uint32_t t = 0; t < MOST; t++) b->token[t] = (int32_t)(rng_philox(5, t, 0, 0, 0).v[0] % 300);
    return b;
}

static void teardown(bench *b) {
    cpu_backend.unload(b->s);
    pool_free(b->p);
    model_close(b->m);
    mem_free(b);
}

static verify_text text_of(bench *b, int32_t n_tokens, int32_t n_prompt) {
    return (verify_text){.backend = &cpu_backend,
                         .state = b->s,
                         .model = b->m,
                         .pool = b->p,
                         .tokens = b->token,
                         .n_tokens = n_tokens,
                         .n_prompt = n_prompt};
}

/* Lifetimes [UNITS][stride] of all kinds: some entries leave at once, some late, some never. */
static int32_t *random_lifetimes(int32_t T, size_t stride, uint32_t kind) {
    int32_t *e = mem_new(UNITS * stride, sizeof *e, "test");
    for (uint32_t u = 0; u < UNITS; u++)
        for (uint32_t i = 0; i < stride; i++) {
            rng_block r = rng_philox(9, i, u, kind, 0);
            int32_t end = (int32_t)i + 1 + (int32_t)(r.v[0] % (uint32_t)T);
            e[u * stride + i] = i >= (uint32_t)T || r.v[1] % 4 == 0 || end > T ? T + 1 : end;
        }
    return e;
}

typedef struct kept {
    int32_t T;
    float *logits; /* [T][VOCAB] */
    float *rows;   /* [LAYERS][HEADS][T][T] */
} kept;

static int keep_logits(void *context, int32_t row0, int32_t n, float *logits, size_t stride) {
    kept *k = context;
    for (int32_t r = 0; r < n; r++)
        memcpy(k->logits + (size_t)(row0 + r) * VOCAB, logits + (size_t)r * stride, VOCAB * sizeof *logits);
    return 0;
}

static int keep_rows(void *context, int layer, int head, int32_t row0, int32_t n, const float *p, size_t stride) {
    kept *k = context;
    size_t T = (size_t)k->T;
    float *to = k->rows + (size_t)(layer * HEADS + head) * T * T;
    for (size_t r = 0; r < (size_t)n; r++)
        memcpy(to + ((size_t)row0 + r) * T, p + r * stride, (size_t)(row0 + n) * sizeof *p);
    return 0;
}

/* A masked pass with everything kept; evict_at [UNITS][pad(T)] or NULL. */
static kept masked(bench *b, int32_t T, const int32_t *evict_at) {
    kept k = {.T = T};
    k.logits = mem_new((size_t)T * VOCAB, sizeof *k.logits, "test");
    k.rows = mem_new((size_t)(LAYERS * HEADS) * (size_t)T * (size_t)T, sizeof *k.rows, "test");
    forward_sink sink = {.context = &k, .rows = keep_rows, .logits = keep_logits};
    if (cpu_backend.forward(b->s, b->token, T, evict_at, &sink)) fail_msg("%s", err_message());
    return k;
}

static void drop(kept *k) {
    mem_free(k->logits);
    mem_free(k->rows);
}

/* ---- costs by hand ----------------------------------------------------------------------------------------------- */

static void a_step_by_hand(void **state) {
    (void)state;
    const float full[3] = {logf(.5f), logf(.3f), logf(.2f)};
    const float other[3] = {logf(.2f) + 7, logf(.5f) + 7, logf(.3f) + 7}; /* a shift of all logits costs nothing */
    float p[3];
    truth_full f;
    int32_t top;
    truth_of_full(full, 3, p, &f);
    assert_int_equal(f.top, 0);
    assert_float_equal(f.lse, 0, 1e-7);
    assert_float_equal(p[1], .3, 1e-7);
    double lse = truth_lse(other, 3, &top);
    truth_step s = truth_of_step(other, lse, top, 3, full, p, &f, 0);
    assert_int_equal(top, 1);
    assert_true(s.flip && !s.right);
    assert_float_equal(s.dloss, 0.9162907, 1e-6); /* ln(.5/.2) */
    assert_float_equal(s.kl, 0.2238045, 1e-6);    /* .5 ln(.5/.2) + .3 ln(.3/.5) + .2 ln(.2/.3) */
    lse = truth_lse(full, 3, &top);
    s = truth_of_step(full, lse, top, 3, full, p, &f, 2);
    assert_true(s.dloss == 0 && s.kl == 0 && !s.flip && !s.right);
    s = truth_of_step(full, lse, top, 3, full, p, &f, 0);
    assert_true(s.right && !s.begins);
}

static void ties_and_bad_logits(void **state) {
    (void)state;
    int32_t top;
    const float equal[4] = {1, 2, 2, 0}, bad[2] = {0, NAN}, infinite[2] = {0, INFINITY};
    truth_lse(equal, 4, &top);
    assert_int_equal(top, 1);
    assert_false(isfinite(truth_lse(bad, 2, &top)));
    assert_false(isfinite(truth_lse(infinite, 2, &top)));
}

static void means_and_percentile(void **state) {
    (void)state;
    const truth_step steps[4] = {
        {.dloss = 1, .kl = 4, .flip = true}, {.dloss = -2, .kl = 1}, {.dloss = 3, .kl = 3}, {.kl = 2}};
    truth t;
    assert_int_equal(truth_mean(steps, 4, &t), 0);
    assert_float_equal(t.dloss, .5, 0);
    assert_float_equal(t.kl, 2.5, 0);
    assert_float_equal(t.kl_p99, 3.97, 1e-12); /* .99 of the way from the first to the last of 1, 2, 3, 4 */
    assert_float_equal(t.top1_flips, .25, 0);
    assert_true(isnan(t.overlap));
    assert_int_equal(truth_mean(steps, 1, &t), 0);
    assert_float_equal(t.kl_p99, 4, 0);
}

/* Answers of three, one, two and two tokens: right throughout, wrong, wrong at its end, wrong at its start. */
static void answers_by_hand(void **state) {
    (void)state;
    const struct { bool begins, right; } of[8] = {{1, 1}, {0, 1}, {0, 1}, {1, 0}, {1, 1}, {0, 0}, {1, 0}, {0, 1}};
    truth_step steps[8] = {0};
    truth t;
    for (int i = 0; i < 8; i++) steps[i] = (truth_step){.begins = of[i].begins, .right = of[i].right};
    assert_int_equal(truth_mean(steps, 8, &t), 0);
    assert_float_equal(t.exact, 1. / 4, 0);
    assert_int_equal(truth_mean(steps, 3, &t), 0);
    assert_float_equal(t.exact, 1, 0);
    assert_int_equal(truth_mean(steps + 1, 3, &t), 0); /* what comes first begins an answer */
    assert_float_equal(t.exact, 1. / 2, 0);
}

static void overlap_by_hand(void **state) {
    (void)state;
    const int32_t a[4] = {5, 2, 5, 5}, b[4] = {5, 5, 3, 5};
    int32_t scratch[12];
    /* Shared of all: 1/1, 2/2, {0,2} of {0,1,2}, {0,3} of {0,1,2,3}. */
    assert_float_equal(truth_overlap(a, b, 4, 0, scratch), (1 + 1 + 2. / 3 + .5) / 4, 1e-15);
    assert_float_equal(truth_overlap(a, b, 4, 2, scratch), (2. / 3 + .5) / 2, 1e-15);
    assert_float_equal(truth_overlap(a, a, 4, 0, scratch), 1, 0);
}

/* ---- steps ------------------------------------------------------------------------------------------------------- */

/* Let copy `copy` lose what lifetimes e [UNITS][stride] say. */
static void forget(backend_steps *st, size_t copy, const int32_t *e, size_t stride) {
    for (int u = 0; u < UNITS; u++)
        cpu_backend.steps_forget(st, copy, u / KV_HEADS, u % KV_HEADS, e + (size_t)u * stride);
}

static double worst(const float *a, const float *b, size_t n) {
    double w = 0;
    for (size_t i = 0; i < n; i++) {
        double d = fabs((double)a[i] - (double)b[i]);
        if (!(d <= w)) w = d;
    }
    return w;
}

static double worst_row(const step_view *v, size_t copy, const kept *k, int32_t t) {
    double w = 0;
    size_t T = (size_t)k->T;
    for (size_t h = 0; h < LAYERS * HEADS; h++) {
        double d = worst(v->rows[copy] + h * v->ld_rows, k->rows + (h * T + (size_t)t) * T, (size_t)t + 1);
        if (d > w) w = d;
    }
    return w;
}

static void steps_equal_masked_passes(void **state) {
    (void)state;
    enum { T = 90 };
    bench *b = setup(2);
    size_t stride = kernel_pad(T);
    b->m->window[1] = 11; /* one layer sees its last 11 entries only */
    int32_t *e[2] = {random_lifetimes(T, stride, 0), random_lifetimes(T, stride, 1)};
    kept want[3] = {masked(b, T, NULL), masked(b, T, e[0]), masked(b, T, e[1])};
    assert_true(worst(want[0].logits, want[1].logits, (size_t)T * VOCAB) > .01);
    backend_steps *st;
    const bool rows[3] = {true, true, false};
    if (cpu_backend.steps_new(b->s, 3, rows, T, &st)) fail_msg("%s", err_message());
    for (int32_t t = 0; t < T; t++) {
        step_view v;
        if (cpu_backend.steps_next(st, b->token[t], &v)) fail_msg("%s", err_message());
        for (size_t c = 0; c < 3; c++) {
            double d = worst(v.logits + c * v.ld_logits, want[c].logits + (size_t)t * VOCAB, VOCAB);
            if (!(d < 1e-4)) fail_msg("copy %zu, step %d: logits differ by %g", c, t, d);
            if (rows[c] && !(worst_row(&v, c, &want[c], t) < 1e-5)) fail_msg("copy %zu, step %d: rows differ", c, t);
        }
        assert_null(v.rows[2]);
        for (size_t c = 1; c < 3; c++) forget(st, c, e[c - 1], stride);
    }
    cpu_backend.steps_free(st);
    for (int i = 0; i < 3; i++) drop(&want[i]);
    for (int i = 0; i < 2; i++) mem_free(e[i]);
    teardown(b);
}

/* Logits of every step of copy `at` among n, which loses entries; the others keep all. */
static float *copy_among(int threads, size_t n, size_t at, int32_t T) {
    bench *b = setup(threads);
    size_t stride = kernel_pad((size_t)T);
    int32_t *e = random_lifetimes(T, stride, 3);
    float *out = mem_new((size_t)T * VOCAB, sizeof *out, "test");
    bool rows[64] = {false};
    backend_steps *st;
    if (cpu_backend.steps_new(b->s, n, rows, T, &st)) fail_msg("%s", err_message());
    for (int32_t t = 0; t < T; t++) {
        step_view v;
        if (cpu_backend.steps_next(st, b->token[t], &v)) fail_msg("%s", err_message());
        memcpy(out + (size_t)t * VOCAB, v.logits + at * v.ld_logits, VOCAB * sizeof *out);
        forget(st, at, e, stride);
    }
    cpu_backend.steps_free(st);
    mem_free(e);
    teardown(b);
    return out;
}

static void copies_do_not_depend_on_each_other(void **state) {
    (void)state;
    enum { T = 40 };
    size_t bytes = (size_t)T * VOCAB * sizeof(float);
    float *alone = copy_among(1, 1, 0, T), *one_of_many = copy_among(3, 37, 36, T), *middle = copy_among(2, 19, 7, T);
    assert_memory_equal(alone, one_of_many, bytes);
    assert_memory_equal(alone, middle, bytes);
    mem_free(alone);
    mem_free(one_of_many);
    mem_free(middle);
}

/* ---- open loop --------------------------------------------------------------------------------------------------- */

static double plain_logprob(const float *x, int32_t i) {
    double sum = 0;
    for (int32_t k = 0; k < VOCAB; k++) sum += exp((double)x[k]);
    return (double)x[i] - log(sum);
}

static void open_loop_equals_plain_formulas(void **state) {
    (void)state;
    enum { T = MOST, PROMPT = 20 };
    bench *b = setup(2);
    size_t stride = kernel_pad(T);
    assert_int_equal(stride, T);
    int32_t *e = random_lifetimes(T, stride, 4);
    uint8_t counted[T - 1];
    for (int32_t t = 0; t < T - 1; t++) counted[t] = t % 3 != 1;
    kept full = masked(b, T, NULL), evicted = masked(b, T, e);
    double kl = 0, dloss = 0, nll = 0;
    int32_t n = 0;
    for (int32_t t = PROMPT; t < T - 1; t++) {
        if (!counted[t]) continue;
        const float *x = full.logits + (size_t)t * VOCAB, *y = evicted.logits + (size_t)t * VOCAB;
        for (int32_t k = 0; k < VOCAB; k++) {
            double p = plain_logprob(x, k);
            kl += k < VOCAB && p > -30 ? exp(p) * (p - plain_logprob(y, k)) : 0;
        }
        dloss += plain_logprob(x, b->token[t + 1]) - plain_logprob(y, b->token[t + 1]);
        nll -= plain_logprob(x, b->token[t + 1]);
        n++;
    }
    verify_text x = text_of(b, T, PROMPT);
    x.counted = counted;
    const int32_t *lifetimes[] = {e};
    truth got;
    verify_full f;
    if (verify_open(&x, lifetimes, 1, &got, &f)) fail_msg("%s", err_message());
    assert_int_equal(f.n_counted, n);
    assert_float_equal(f.nll, nll / n, 1e-5);
    assert_true(kl / n > .01);
    assert_float_equal(got.kl, kl / n, 1e-5);
    assert_float_equal(got.dloss, dloss / n, 1e-5);
    assert_true(got.kl_p99 > got.kl && got.top1_flips > 0 && got.top1_flips < 1 && isnan(got.overlap));
    drop(&full);
    drop(&evicted);
    mem_free(e);
    teardown(b);
}

static void full_lifetimes_cost_exactly_nothing(void **state) {
    (void)state;
    enum { T = 70 };
    bench *b = setup(2);
    int32_t *all = mem_new(UNITS * T, sizeof *all, "test"), *some = random_lifetimes(T, T, 5);
    for (size_t i = 0; i < UNITS * T; i++) all[i] = T + 1;
    const int32_t *lifetimes[] = {some, all};
    truth got[2];
    verify_full f;
    verify_text x = text_of(b, T, 0);
    if (verify_open(&x, lifetimes, 2, got, &f)) fail_msg("%s", err_message());
    assert_true(got[0].kl > 0);
    assert_true(got[1].kl == 0 && got[1].dloss == 0 && got[1].kl_p99 == 0 && got[1].top1_flips == 0);
    mem_free(all);
    mem_free(some);
    teardown(b);
}

static void difference_from_the_trace_is_seen(void **state) {
    (void)state;
    enum { T = 30 };
    bench *b = setup(1);
    kept full = masked(b, T, NULL);
    float logprob[T - 1];
    for (int32_t t = 0; t < T - 1; t++)
        logprob[t] = (float)plain_logprob(full.logits + (size_t)t * VOCAB, b->token[t + 1]);
    logprob[17] += .25f;
    int32_t *some = random_lifetimes(T, T, 5);
    const int32_t *lifetimes[] = {some};
    truth got;
    verify_full f;
    verify_text x = text_of(b, T, 0);
    x.target_logprob = logprob;
    if (verify_open(&x, lifetimes, 1, &got, &f)) fail_msg("%s", err_message());
    assert_float_equal(f.differs, .25, 1e-4);
    drop(&full);
    mem_free(some);
    teardown(b);
}

static void nothing_counted_is_an_error(void **state) {
    (void)state;
    bench *b = setup(1);
    verify_text x = text_of(b, 10, 9);
    int32_t *some = random_lifetimes(10, 10, 5);
    const int32_t *lifetimes[] = {some};
    truth got;
    verify_full f;
    assert_int_equal(verify_open(&x, lifetimes, 1, &got, &f), ERR_DATA);
    assert_non_null(strstr(err_message(), "no counted step in sequence 0 (10 tokens, prompt 9)"));
    mem_free(some);
    teardown(b);
}

/* ---- closed loop ------------------------------------------------------------------------------------------------- */

static sim_config config_of(const char *spec, const char *budget, int32_t T, int32_t n_prompt) {
    sim_flags flags = {.budgets = budget, .n_prompt = -1};
    sim_asks asks = {0};
    sim_config c = {0};
    if (sim_asks_build(&spec, 1, &flags, &asks) || sim_config_resolve(&asks.ask[0], &flags, T, n_prompt, &c))
        fail_msg("%s", err_message());
    sim_asks_free(&asks);
    return c;
}

/* In step t + 1 the window's B newest entries and the arriving one are visible. */
static void closed_window_is_open_window(void **state) {
    (void)state;
    enum { T = 80, B = 16, PROMPT = 30 };
    bench *b = setup(2);
    int32_t window[UNITS * T], all[UNITS * T];
    for (int32_t u = 0; u < UNITS; u++)
        for (int32_t i = 0; i < T; i++) {
            int32_t leaves = i + B + 1 < PROMPT ? PROMPT : i + B + 1;
            window[u * T + i] = leaves > T ? T + 1 : leaves;
            all[u * T + i] = T + 1;
        }
    for (int32_t u = 0; u < UNITS; u++) window[u * T + T - 1 - B] = T; /* gone after the last step */
    const int32_t *lifetimes[] = {window, all};
    sim_config configs[] = {config_of("window", "16", T, PROMPT), config_of("full", "16", T, PROMPT)};
    verify_text x = text_of(b, T, PROMPT);
    truth open[2], closed[2];
    verify_full f, g;
    if (verify_open(&x, lifetimes, 2, open, &f) || verify_closed(&x, configs, lifetimes, 2, closed, &g))
        fail_msg("%s", err_message());
    assert_true(closed[0].overlap == 1 && closed[1].overlap == 1); /* the same lifetimes */
    assert_true(fabs(open[0].dloss) > 1e-3);
    assert_float_equal(closed[0].dloss, open[0].dloss, 1e-4);
    assert_float_equal(closed[0].kl, open[0].kl, 1e-4);
    assert_float_equal(g.nll, f.nll, 1e-4);
    assert_true(closed[1].kl == 0 && closed[1].dloss == 0 && closed[1].top1_flips == 0);
    for (int i = 0; i < 2; i++) sim_config_free(&configs[i]);
    teardown(b);
}

/* H2O in closed loop the slow way: for every token the whole prefix again with the lifetimes so far; then each unit
 * adds its heads' mean row to the residents' sums and drops the lowest of those older than `recent`. e [UNITS][pad(T)].
 */
static void slow_h2o(bench *b, int32_t T, int32_t budget, int32_t recent, int32_t *e) {
    static double sum[UNITS][MOST];
    size_t stride = kernel_pad((size_t)T);
    memset(sum, 0, sizeof sum);
    for (size_t i = 0; i < UNITS * stride; i++) e[i] = T + 1;
    for (int32_t t = 0; t < T; t++) {
        size_t prefix = kernel_pad((size_t)t + 1);
        int32_t *now = mem_new(UNITS * prefix, sizeof *now, "test");
        for (size_t u = 0; u < UNITS; u++) memcpy(now + u * prefix, e + u * stride, prefix * sizeof *now);
        kept k = masked(b, t + 1, now);
        for (int u = 0; u < UNITS; u++) {
            int32_t n = 0, lowest = -1, group = HEADS / KV_HEADS, *end = e + (size_t)u * stride;
            for (int32_t i = 0; i <= t; i++) {
                if (end[i] <= t) continue;
                n++;
                for (int h = 0; h < group; h++) {
                    size_t head = (size_t)(u / KV_HEADS * HEADS + u % KV_HEADS * group + h);
                    sum[u][i] +=
                        (double)k.rows[(head * (size_t)(t + 1) + (size_t)t) * (size_t)(t + 1) + (size_t)i] / group;
                }
                if (t - i >= recent && (lowest < 0 || sum[u][i] < sum[u][lowest])) lowest = i;
            }
            if (n > budget) end[lowest] = t + 1;
        }
        drop(&k);
        mem_free(now);
    }
}

static void closed_h2o_equals_a_slow_one(void **state) {
    (void)state;
    enum { T = 64 }; /* a multiple of 16, so that padded and plain lifetimes are one */
    bench *b = setup(2);
    int32_t *e = mem_new(UNITS * T, sizeof *e, "test");
    slow_h2o(b, T, 12, 6, e);
    const int32_t *lifetimes[] = {e};
    sim_config c = config_of("h2o(recent=6)", "12", T, 0);
    verify_text x = text_of(b, T, 0);
    truth open, closed;
    verify_full f;
    if (verify_closed(&x, &c, lifetimes, 1, &closed, &f) || verify_open(&x, lifetimes, 1, &open, &f))
        fail_msg("%s", err_message());
    assert_true(closed.overlap == 1);
    assert_true(open.kl > 1e-3);
    assert_float_equal(closed.kl, open.kl, 1e-5);
    assert_float_equal(closed.dloss, open.dloss, 1e-5);
    sim_config_free(&c);
    mem_free(e);
    teardown(b);
}

static void hindsight_is_refused_in_closed_loop(void **state) {
    (void)state;
    sim_config oracle = config_of("oracle(mass)", "8", 64, 0), rmm = config_of("rmm(lag=4)", "8", 64, 0);
    assert_int_equal(verify_closed_allows(&oracle), ERR_USAGE);
    assert_non_null(strstr(err_message(), "oracle(mass)"));
    assert_int_equal(verify_closed_allows(&rmm), 0);
    sim_config_free(&oracle);
    sim_config_free(&rmm);
}

int main(void) {
    say_level(SAY_QUIET);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_step_by_hand),
        cmocka_unit_test(ties_and_bad_logits),
        cmocka_unit_test(means_and_percentile),
        cmocka_unit_test(answers_by_hand),
        cmocka_unit_test(overlap_by_hand),
        cmocka_unit_test(steps_equal_masked_passes),
        cmocka_unit_test(copies_do_not_depend_on_each_other),
        cmocka_unit_test(open_loop_equals_plain_formulas),
        cmocka_unit_test(full_lifetimes_cost_exactly_nothing),
        cmocka_unit_test(difference_from_the_trace_is_seen),
        cmocka_unit_test(nothing_counted_is_an_error),
        cmocka_unit_test(closed_window_is_open_window),
        cmocka_unit_test(closed_h2o_equals_a_slow_one),
        cmocka_unit_test(hindsight_is_refused_in_closed_loop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
