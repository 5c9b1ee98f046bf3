/* The backward pass: its parts against values worked out by hand, the whole against finite differences of the loss, and
 * what it promises about bits, labels and zeros. tests/parity/gradients.py compares it with PyTorch's autograd. */
#include "base/err.h"
#include "base/mem.h"
#include "base/progress.h"
#include "base/rng.h"
#include "tests/unit/model_build.h"
#include "tracer/cpu/backward.h"
#include "tracer/cpu/rows.h"
#include "traces/kernels.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#define TINY "build/tiny.gguf"

/* Three strips, the last one not full, and more than one row tile. */
enum { T = 300, STEPS = T - 1, SAMPLES = 2, SETS = 1 + SAMPLES };

/* ---- a run with everything kept ---------------------------------------------------------------------------------- */

typedef struct kept {
    const model *m;
    size_t width;    /* n_head * head_dim */
    float *gradient; /* [SETS][n_layer][T][width] */
    float *logits;   /* [T][n_vocab] */
    int32_t label[SAMPLES * STEPS];
    int next_layer, labels_first;
} kept;

static float *gradient_of(const kept *k, size_t set, int layer, size_t t) {
    return k->gradient + ((set * (size_t)k->m->n_layer + (size_t)layer) * T + t) * k->width;
}

static int keep_labels(void *context, const int32_t *label) {
    kept *k = context;
    k->labels_first = k->next_layer == k->m->n_layer - 1;
    memcpy(k->label, label, sizeof k->label);
    return 0;
}

static int keep_layer(void *context, int layer, const float *d_heads, size_t set_stride, size_t stride) {
    kept *k = context;
    assert_int_equal(layer, k->next_layer--);
    for (size_t set = 0; set < SETS; set++)
        for (size_t t = 0; t < T; t++)
            memcpy(gradient_of(k, set, layer, t), d_heads + set * set_stride + t * stride, k->width * sizeof(float));
    return 0;
}

static int keep_logits(void *context, int32_t row0, int32_t n, float *logits, size_t stride) {
    const kept *k = context;
    size_t n_vocab = (size_t)k->m->n_vocab;
    for (size_t r = 0; r < (size_t)n; r++)
        memcpy(k->logits + ((size_t)row0 + r) * n_vocab, logits + r * stride, n_vocab * sizeof *logits);
    return 0;
}

typedef struct setup {
    model *m;
    pool *p;
    backend_state *s;
    int32_t tokens[T];
    uint8_t counted[STEPS];
    label_plan plan;
    int32_t *evict_at;
    kept k;
} setup;

static void begin(setup *s, int threads) {
    *s = (setup){.plan = {.n_samples = SAMPLES, .seed = 7, .sequence = 3}};
    if (model_open(TINY, &s->m) || pool_new(threads, &s->p) || cpu_backend.load(s->m, s->p, &cpu_options, &s->s))
        fail_msg("%s", err_message());
    for (int t = 0; t < T; t++) s->tokens[t] = (t * t + 7 * t) % 1021;
    memset(s->counted, 1, sizeof s->counted);
    s->plan.counted = s->counted;
    s->k.m = s->m;
    s->k.width = (size_t)(s->m->n_head * s->m->head_dim);
    s->k.gradient = mem_new(SETS * (size_t)s->m->n_layer * T * s->k.width, sizeof(float), "gradients");
    s->k.logits = mem_new(T * (size_t)s->m->n_vocab, sizeof(float), "logits");
}

static void end(setup *s) {
    cpu_backend.unload(s->s);
    pool_free(s->p);
    model_close(s->m);
    mem_free(s->evict_at);
    mem_free(s->k.gradient);
    mem_free(s->k.logits);
}

static void run(setup *s) {
    forward_sink sink = {.context = &s->k, .logits = keep_logits};
    gradient_sink gradients = {.context = &s->k, .labels = keep_labels, .layer = keep_layer};
    s->k.next_layer = s->m->n_layer - 1;
    if (cpu_backend.forward_backward(s->s, s->tokens, T, s->evict_at, &sink, &s->plan, &gradients))
        fail_msg("%s", err_message());
    assert_int_equal(s->k.next_layer, -1);
    assert_true(s->k.labels_first);
}

/* Gradients of all layers from step `from` up to step `to`: the largest difference, and the largest value of `a`. */
static double difference(const kept *a, const kept *b, size_t set, size_t from, size_t to, double *largest) {
    double worst = 0;
    *largest = 0;
    for (int layer = 0; layer < a->m->n_layer; layer++)
        for (size_t t = from; t < to; t++)
            for (size_t i = 0; i < a->width; i++) {
                double x = (double)gradient_of(a, set, layer, t)[i];
                worst = fmax(worst, fabs(x - (double)gradient_of(b, set, layer, t)[i]));
                *largest = fmax(*largest, fabs(x));
            }
    return worst;
}

/* ---- parts ------------------------------------------------------------------------------------------------------- */

static void rms_norm_back_by_hand(void **state) {
    (void)state;
    /* 16 elements, mean square 25/16, so 1/root = .8. Of (1, 0) the part along x = (3, 4) is 3 * .64 / 16 = .12 times
     * x: .8 * (1 - .36, -.48). */
    _Alignas(64) float x[16] = {3, 4}, weight[16] = {1, 2, 3}, d_out[16] = {1}, d_x[16] = {10, 20};
    rows_norm_back(ARCH_NORM_RMS, x, weight, 16, 0, d_out, d_x);
    assert_float_equal(d_x[0], 10.512f, 1e-5f);
    assert_float_equal(d_x[1], 19.616f, 1e-5f);
    /* With weight 2 at the second element, and eps making 1/root 1/2: along = 2 * 4 / 4 / 16 = .125. */
    _Alignas(64) float d_second[16] = {0, 1}, d_again[16] = {0};
    rows_norm_back(ARCH_NORM_RMS, x, weight, 16, 4 - 25.0f / 16, d_second, d_again);
    assert_float_equal(d_again[0], -0.1875f, 1e-6f);
    assert_float_equal(d_again[1], 0.75f, 1e-6f);
}

static void silu_gate_back_by_hand(void **state) {
    (void)state;
    /* sigmoid(ln 3) = 3/4: silu = .75 ln 3, silu' = .75 + ln 3 * .75 * .25; at 0: 0 and 1/2; far out: x and 1, 0 and 0.
     */
    const float ln3 = 1.0986123f;
    _Alignas(64) float gate[16] = {ln3, 0, -ln3, 80, -80}, up[16] = {2, 3, 1, 5, 5};
    _Alignas(64) float d_up[16] = {10, 1, 1, 1, 1}, d_gate[16];
    const float by_up[5] = {0.8239592f, 0, -0.2746531f, 80, 0};
    const float by_gate[5] = {2 * 0.9559898f, 1.5f, 0.25f - 0.2059898f, 5, 0};
    rows_gate_slopes(ARCH_SILU, gate, up, 5);
    rows_gate_back(gate, up, d_up, d_gate, 5);
    for (int i = 0; i < 5; i++) {
        assert_float_equal(gate[i], by_up[i], 1e-6f);
        assert_float_equal(up[i], by_gate[i], 1e-6f);
        assert_float_equal(d_up[i], by_up[i] * (i ? 1 : 10), 1e-5f);
        assert_float_equal(d_gate[i], by_gate[i] * (i ? 1 : 10), 1e-5f);
    }
}

static void rope_back_is_the_inverse(void **state) {
    (void)state;
    float angles[4], x[6] = {1, -2, 3, 4, 5, 6};
    rows_rope_angles(9, 4, (const double[]){1, .1}, 1, angles);
    for (int kind = 0; kind < 2; kind++) {
        rows_rope(x, 1, 6, 4, kind ? ARCH_ROPE_HALVES : ARCH_ROPE_INTERLEAVED, angles);
        assert_true(fabsf(x[0] - 1) > 0.1f);
        rows_rope_back(x, 1, 6, 4, kind ? ARCH_ROPE_HALVES : ARCH_ROPE_INTERLEAVED, angles);
        for (int i = 0; i < 6; i++) assert_float_equal(x[i], ((float[]){1, -2, 3, 4, 5, 6})[i], 1e-6f);
    }
}

/* ---- finite differences ------------------------------------------------------------------------------------------ */

/* Losses of the first two sets with `delta` added to one number of the heads' outputs, by running the layers by hand.
 */
static void losses(setup *s, int at_layer, size_t at_t, size_t at_i, float delta, double loss[2]) {
    cpu_run r;
    forward_sink sink = {.context = &s->k, .logits = keep_logits};
    int code = cpu_run_new(s->s, s->tokens, T, &sink, &r);
    r.evict_at = s->evict_at;
    if (!code) code = cpu_embed(&r);
    for (int layer = 0; layer < s->m->n_layer && !code; layer++) {
        code = cpu_run_attention(&r, layer);
        if (layer == at_layer) r.mix[at_t * r.ld_mix + at_i] += delta;
        if (!code) code = cpu_add_mix(&r);
        if (!code) code = cpu_run_feed_forward(&r);
    }
    if (!code) code = cpu_run_logits(&r);
    if (code) fail_msg("%s", err_message());
    cpu_run_free(&r);
    loss[0] = loss[1] = 0;
    for (size_t t = 0; t < STEPS; t++) {
        const float *x = s->k.logits + t * (size_t)s->m->n_vocab;
        double z = 0;
        for (int32_t i = 0; i < s->m->n_vocab && s->counted[t]; i++) z += exp((double)x[i]);
        if (s->counted[t]) loss[0] += log(z) - (double)x[s->tokens[t + 1]];
        if (s->counted[t]) loss[1] += log(z) - (double)x[s->k.label[t]];
    }
}

/* By the central five-point rule, whose error falls with the fourth power of the step. */
static double slope(setup *s, int set, int layer, size_t t, size_t i) {
    const double step = 0.1;
    double loss[4][2];
    for (int n = 0; n < 4; n++) losses(s, layer, t, i, (float)((n < 2 ? n - 2 : n - 1) * step), loss[n]);
    return (8 * (loss[2][set] - loss[1][set]) - (loss[3][set] - loss[0][set])) / (12 * step);
}

/* In every layer and strip of rows, the number on which the loss of a set depends most. */
static void check_slopes(setup *s) {
    /* Few losses, so that a small change of one of them is not lost among the others. */
    for (size_t t = 0; t < STEPS; t++) s->counted[t] = t % 43 == 7 || t >= 296;
    run(s);
    for (int where = 0; where < 2 * 3 * s->m->n_layer; where++) {
        int set = where % 2, layer = where / 6;
        size_t strip = (size_t)where / 2 % 3 * 128, at_t = 0, at_i = 0;
        float most = 0;
        for (size_t t = strip; t < strip + 128 && t < T; t++)
            for (size_t i = 0; i < s->k.width; i++) {
                float g = gradient_of(&s->k, (size_t)set, layer, t)[i];
                if (fabsf(g) > fabsf(most)) most = g, at_t = t, at_i = i;
            }
        double want = slope(s, set, layer, at_t, at_i);
        if (!(fabs(want - (double)most) <= 0.002 * fabs(want)))
            fail_msg("layer %d, step %zu, output %zu, set %d: %g by differences, %g by the backward pass", layer, at_t,
                     at_i, set, want, (double)most);
    }
}

static void finite_differences(void **state) {
    (void)state;
    setup s;
    begin(&s, 2);
    check_slopes(&s);
    end(&s);
}

/* A sliding window, a soft-cap, and lifetimes of their own for every kv head. */
static void finite_differences_under_masks(void **state) {
    (void)state;
    setup s;
    begin(&s, 2);
    size_t stride = kernel_pad(T), units = (size_t)(s.m->n_layer * s.m->n_kv_head);
    s.evict_at = mem_new(units * stride, sizeof *s.evict_at, "lifetimes");
    for (size_t unit = 0; unit < units; unit++)
        for (size_t i = 0; i < T; i++)
            s.evict_at[unit * stride + i] = (int32_t)(i + 1 + (i * 37 + unit * 11) % (i % 5 ? 60 : T));
    s.m->window[1] = 100;
    s.m->softcap = 2;
    check_slopes(&s);
    end(&s);
}

/* ---- promises ---------------------------------------------------------------------------------------------------- */

static void bits_do_not_depend_on_threads(void **state) {
    (void)state;
    setup one, three;
    begin(&one, 1);
    begin(&three, 3);
    run(&one);
    run(&three);
    size_t n = SETS * (size_t)one.m->n_layer * T * one.k.width;
    assert_memory_equal(one.k.gradient, three.k.gradient, n * sizeof(float));
    assert_memory_equal(one.k.label, three.k.label, sizeof one.k.label);
    end(&one);
    end(&three);
}

static void the_forward_pass_stays_the_same(void **state) {
    (void)state;
    setup s;
    kept plain = {0};
    begin(&s, 2);
    run(&s);
    size_t n = T * (size_t)s.m->n_vocab;
    plain.m = s.m;
    plain.logits = mem_new(n, sizeof(float), "logits");
    forward_sink sink = {.context = &plain, .logits = keep_logits};
    assert_int_equal(cpu_backend.forward(s.s, s.tokens, T, NULL, &sink), 0);
    assert_memory_equal(plain.logits, s.k.logits, n * sizeof(float));
    mem_free(plain.logits);
    end(&s);
}

static void labels_are_drawn_from_the_predictions(void **state) {
    (void)state;
    setup s;
    begin(&s, 2);
    for (size_t t = 0; t < STEPS; t++) s.counted[t] = t >= 20;
    run(&s);
    size_t n_vocab = (size_t)s.m->n_vocab, different = 0;
    for (size_t i = 0; i < SAMPLES; i++)
        for (size_t t = 0; t < STEPS; t++) {
            int32_t label = s.k.label[i * STEPS + t];
            if (t < 20) assert_int_equal(label, -1);
            if (t < 20) continue;
            assert_in_range(label, 0, n_vocab - 1);
            const float *x = s.k.logits + t * n_vocab;
            double z = 0, before = 0, u = rng_uniform(rng_philox(7, (uint32_t)t, (uint32_t)i, 3, 2).v[0]);
            for (size_t j = 0; j < n_vocab; j++) z += exp((double)x[j]);
            for (int32_t j = 0; j < label; j++) before += exp((double)x[j]) / z;
            assert_true(before <= u + 1e-5 && u <= before + exp((double)x[label]) / z + 1e-5);
            different += label != s.k.label[t];
        }
    assert_true(different > STEPS / 4);
    end(&s);
}

static void labels_can_be_given(void **state) {
    (void)state;
    setup drawn, given;
    double largest;
    begin(&drawn, 2);
    begin(&given, 2);
    run(&drawn);
    given.plan.fixed = drawn.k.label;
    given.plan.seed = 99;
    run(&given);
    for (size_t set = 0; set < SETS; set++)
        assert_true(difference(&drawn.k, &given.k, set, 0, T, &largest) == 0 && largest > 0);
    /* The text's own labels as a sample: all sets are treated alike. */
    for (size_t t = 0; t < STEPS; t++) drawn.k.label[t] = drawn.tokens[t + 1];
    given.plan.fixed = drawn.k.label;
    run(&given);
    size_t n = (size_t)given.m->n_layer * T * given.k.width;
    for (size_t i = 0; i < n; i++) assert_float_equal(given.k.gradient[i], given.k.gradient[n + i], 1e-6f);
    end(&drawn);
    end(&given);
}

static void losses_move_only_what_came_before(void **state) {
    (void)state;
    enum { AT = 140 };
    setup one, other;
    double largest;
    begin(&one, 2);
    begin(&other, 2);
    /* A label at one step changes the gradients up to there, and no bit behind. */
    run(&one);
    memcpy(other.k.label, one.k.label, sizeof one.k.label);
    other.k.label[AT] = (other.k.label[AT] + 1) % 1000;
    int32_t fixed[SAMPLES * STEPS];
    memcpy(fixed, other.k.label, sizeof fixed);
    other.plan.fixed = fixed;
    run(&other);
    assert_true(difference(&one.k, &other.k, 1, AT + 1, T, &largest) == 0 && largest > 0);
    assert_true(difference(&one.k, &other.k, 1, AT, AT + 1, &largest) > 0);
    assert_true(difference(&one.k, &other.k, 1, 0, AT, &largest) > 0);
    assert_true(difference(&one.k, &other.k, 2, 0, T, &largest) == 0);
    end(&one);
    end(&other);
}

static void only_counted_steps_contribute(void **state) {
    (void)state;
    enum { AT = 140 };
    setup s;
    begin(&s, 2);
    memset(s.counted, 0, sizeof s.counted);
    s.counted[AT] = 1;
    run(&s);
    int last = s.m->n_layer - 1;
    for (size_t set = 0; set < SETS; set++)
        for (int layer = 0; layer <= last; layer++)
            for (size_t t = 0; t < T; t++) {
                bool zero = true;
                for (size_t i = 0; i < s.k.width; i++) zero &= gradient_of(&s.k, set, layer, t)[i] == 0;
                /* The last layer's outputs reach only their own step's loss. */
                assert_int_equal(zero, t > AT || (layer == last && t < AT));
            }
    end(&s);
}

static void losses_add_up(void **state) {
    (void)state;
    setup all, even, odd;
    double largest;
    begin(&all, 2);
    begin(&even, 2);
    begin(&odd, 2);
    for (size_t t = 0; t < STEPS; t++) even.counted[t] = !(odd.counted[t] = t % 2);
    run(&all);
    run(&even);
    run(&odd);
    size_t n = SETS * (size_t)all.m->n_layer * T * all.k.width;
    for (size_t i = 0; i < n; i++) even.k.gradient[i] += odd.k.gradient[i];
    for (size_t set = 0; set < SETS; set++)
        assert_true(difference(&all.k, &even.k, set, 0, T, &largest) < 2e-5 * largest);
    /* The last step predicts nothing. */
    for (int layer = 0; layer < all.m->n_layer; layer++)
        for (size_t i = 0; i < all.k.width; i++) assert_float_equal(gradient_of(&all.k, 0, layer, T - 1)[i], 0, 0);
    end(&all), end(&even), end(&odd);
}

static int stop(void *context, int layer, const float *d_heads, size_t set_stride, size_t stride) {
    (void)context, (void)d_heads, (void)set_stride, (void)stride;
    return layer == 1 ? err_set(ERR_USAGE, "enough") : 0;
}

static void a_sink_can_stop_the_run(void **state) {
    (void)state;
    setup s;
    begin(&s, 1);
    const forward_sink nothing = {0};
    const gradient_sink gradients = {.layer = stop};
    s.plan.n_samples = 0;
    assert_int_equal(cpu_backend.forward_backward(s.s, s.tokens, T, NULL, &nothing, &s.plan, &gradients), ERR_USAGE);
    assert_string_equal(err_message(), "enough");
    end(&s);
}

int main(void) {
    say_level(SAY_QUIET);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rms_norm_back_by_hand),
        cmocka_unit_test(silu_gate_back_by_hand),
        cmocka_unit_test(rope_back_is_the_inverse),
        cmocka_unit_test(finite_differences),
        cmocka_unit_test(finite_differences_under_masks),
        cmocka_unit_test(bits_do_not_depend_on_threads),
        cmocka_unit_test(the_forward_pass_stays_the_same),
        cmocka_unit_test(labels_are_drawn_from_the_predictions),
        cmocka_unit_test(labels_can_be_given),
        cmocka_unit_test(losses_move_only_what_came_before),
        cmocka_unit_test(only_counted_steps_contribute),
        cmocka_unit_test(losses_add_up),
        cmocka_unit_test(a_sink_can_stop_the_run),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
