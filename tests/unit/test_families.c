/* Every row of the table of architectures through the CPU backend, on random models of a few numbers: against a slow
 * forward pass in f64 that stands below, gradients against that one's central differences, steps against whole passes,
 * and what is promised about bits. What the table's families have one by one all of them have here: windows, two RoPEs
 * and none, capped scores and logits. */
#include "base/err.h"
#include "base/progress.h"
#include "tests/unit/family_build.h"
#include "tracer/cpu/cpu.h"
#include "traces/kernels.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

/* Two strips of rows of the backward pass. */
enum { T = 150, L = FAMILY_LAYERS, H = 4, KV = 2, DIM = 6, E = 20, FF = 28, V = 50, HEADS = H + 2 * KV, SETS = 2 };

static const int32_t *text(void) {
    static int32_t tokens[T];
    for (int t = 0; t < T; t++) tokens[t] = (t * t + 3 * t + 1) % 47;
    return tokens;
}

/* ---- the slow pass ----------------------------------------------------------------------------------------------- */

/* A change of one number of the heads' outputs. */
typedef struct nudge {
    int layer, t, i;
    double by;
} nudge;

typedef struct slow {
    const family *f;
    double x[T][E], qkv[T][HEADS * DIM], mix[T][H * DIM];
    double probs[L][H][T][T], logits[T][V];
} slow;

static void times(const float *w, const float *bias, const double *in, int n_in, double *out, int n_out) {
    for (int o = 0; o < n_out; o++) {
        out[o] = bias ? (double)bias[o] : 0;
        for (int i = 0; i < n_in; i++) out[o] += (double)w[o * n_in + i] * in[i];
    }
}

static void slow_norm(arch_norm kind, const float *w, const float *bias, double *x, int n) {
    double mean = 0, square = 0;
    for (int i = 0; i < n; i++) mean += kind == ARCH_NORM_LAYER ? x[i] / n : 0;
    for (int i = 0; i < n; i++) square += (x[i] - mean) * (x[i] - mean) / n;
    for (int i = 0; i < n; i++)
        x[i] = (x[i] - mean) / sqrt(square + (double)1e-5f) * (double)w[i] + (bias ? (double)bias[i] : 0);
}

static void slow_heads_norm(const family *f, const float *w, double *x, int heads) {
    if (f->m.arch->qk_norm == ARCH_QK_NORM_WHOLE) slow_norm(ARCH_NORM_RMS, w, NULL, x, heads * DIM);
    for (int h = 0; h < heads && f->m.arch->qk_norm == ARCH_QK_NORM_HEADS; h++)
        slow_norm(ARCH_NORM_RMS, w, NULL, x + h * DIM, DIM);
}

static void slow_turn(const family *f, int layer, int t, double *head) {
    int rope = f->m.layer[layer].rope, dims = f->m.rope_dims;
    bool next = f->m.rope_kind == ARCH_ROPE_INTERLEAVED;
    for (int i = 0; rope >= 0 && i < dims / 2; i++) {
        double angle = t * f->m.rope[rope].inverse[i], s = f->m.rope[rope].scale;
        double *a = &head[next ? 2 * i : i], *b = &head[next ? 2 * i + 1 : i + dims / 2], was = *a;
        *a = s * (was * cos(angle) - *b * sin(angle));
        *b = s * (was * sin(angle) + *b * cos(angle));
    }
}

static double capped(double x, double cap) {
    return cap > 0 ? cap * tanh(x / cap) : x;
}

static void slow_attention(slow *s, int layer) {
    const model *m = &s->f->m;
    for (int h = 0; h < H; h++)
        for (int t = 0; t < T; t++) {
            int k = H + h / (H / KV), window = m->window[layer];
            double sum = 0, *p = s->probs[layer][h][t];
            for (int i = 0; i < T; i++) p[i] = 0;
            for (int i = window && t >= window ? t - window + 1 : 0; i <= t; i++) {
                double score = 0;
                for (int d = 0; d < DIM; d++) score += s->qkv[t][h * DIM + d] * s->qkv[i][k * DIM + d];
                sum += p[i] = exp(capped((double)m->scale * score, (double)m->softcap));
            }
            for (int d = 0; d < DIM; d++) s->mix[t][h * DIM + d] = 0;
            for (int i = 0; i <= t; i++) {
                p[i] /= sum;
                for (int d = 0; d < DIM; d++) s->mix[t][h * DIM + d] += p[i] * s->qkv[i][(k + KV) * DIM + d];
            }
        }
}

static void slow_qkv(slow *s, int layer) {
    float *const *w = s->f->w[layer];
    for (int t = 0; t < T; t++) {
        double in[E], *row = s->qkv[t];
        memcpy(in, s->x[t], sizeof in);
        if (w[SLOT_ATTN_NORM]) slow_norm(s->f->m.arch->norm, w[SLOT_ATTN_NORM], w[SLOT_ATTN_NORM_BIAS], in, E);
        times(w[SLOT_Q], w[SLOT_Q_BIAS], in, E, row, H * DIM);
        times(w[SLOT_K], w[SLOT_K_BIAS], in, E, row + H * DIM, KV * DIM);
        times(w[SLOT_V], w[SLOT_V_BIAS], in, E, row + (H + KV) * DIM, KV * DIM);
        slow_heads_norm(s->f, w[SLOT_Q_NORM], row, H);
        slow_heads_norm(s->f, w[SLOT_K_NORM], row + H * DIM, KV);
        for (int h = 0; h < H + KV; h++) slow_turn(s->f, layer, t, row + h * DIM);
    }
}

static void slow_add(slow *s, int layer, int t, arch_slot post_norm, double *added) {
    const float *w = s->f->w[layer][post_norm];
    if (w) slow_norm(s->f->m.arch->norm, w, NULL, added, E);
    for (int i = 0; i < E; i++) s->x[t][i] += added[i];
}

static double activate(arch_activation kind, double x) {
    if (kind == ARCH_SILU) return x / (1 + exp(-x));
    return x / 2 * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

static void slow_rest(slow *s, int layer) {
    float *const *w = s->f->w[layer];
    const arch *a = s->f->m.arch;
    for (int t = 0; t < T; t++) {
        double added[E], in[E], up[FF], gate[FF];
        times(w[SLOT_O], w[SLOT_O_BIAS], s->mix[t], H * DIM, added, E);
        slow_add(s, layer, t, SLOT_ATTN_POST_NORM, added);
        memcpy(in, s->x[t], sizeof in);
        if (w[SLOT_FFN_NORM]) slow_norm(a->norm, w[SLOT_FFN_NORM], w[SLOT_FFN_NORM_BIAS], in, E);
        times(w[SLOT_UP], w[SLOT_UP_BIAS], in, E, up, FF);
        if (w[SLOT_GATE]) times(w[SLOT_GATE], NULL, in, E, gate, FF);
        for (int i = 0; i < FF; i++)
            up[i] = w[SLOT_GATE] ? activate(a->activation, gate[i]) * up[i] : activate(a->activation, up[i]);
        times(w[SLOT_DOWN], w[SLOT_DOWN_BIAS], up, FF, added, E);
        slow_add(s, layer, t, SLOT_FFN_POST_NORM, added);
    }
}

static void slow_pass(slow *s, const int32_t *tokens, const nudge *n) {
    const family *f = s->f;
    for (int t = 0; t < T; t++)
        for (int i = 0; i < E; i++)
            s->x[t][i] = (double)f->embedding[tokens[t] * E + i] * (double)f->m.embedding_scale +
                         (f->positions ? (double)f->positions[t * E + i] : 0);
    for (int layer = 0; layer < L; layer++) {
        slow_qkv(s, layer);
        slow_attention(s, layer);
        if (n && n->layer == layer) s->mix[n->t][n->i] += n->by;
        slow_rest(s, layer);
    }
    for (int t = 0; t < T; t++) {
        slow_norm(f->m.arch->norm, f->output_norm, f->output_norm_bias, s->x[t], E);
        times(f->output, NULL, s->x[t], E, s->logits[t], V);
        for (int i = 0; i < V; i++) s->logits[t][i] = capped(s->logits[t][i], (double)f->m.logit_softcap);
    }
}

/* ---- the CPU backend --------------------------------------------------------------------------------------------- */

typedef struct kept {
    float probs[L][H][T][T], logits[T][V], gradient[SETS][L][T][H * DIM];
    int32_t label[T - 1];
} kept;

static int keep_rows(void *context, int layer, int head, int32_t row0, int32_t n, const float *p, size_t stride) {
    kept *k = context;
    for (int32_t r = 0; r < n; r++)
        memcpy(k->probs[layer][head][row0 + r], p + (size_t)r * stride, (size_t)(row0 + n) * sizeof *p);
    return 0;
}

static int keep_logits(void *context, int32_t row0, int32_t n, float *logits, size_t stride) {
    kept *k = context;
    for (int32_t r = 0; r < n; r++) memcpy(k->logits[row0 + r], logits + (size_t)r * stride, sizeof k->logits[0]);
    return 0;
}

static int keep_labels(void *context, const int32_t *label) {
    kept *k = context;
    memcpy(k->label, label, sizeof k->label);
    return 0;
}

static int keep_gradient(void *context, int layer, const float *d, size_t set_stride, size_t stride) {
    kept *k = context;
    for (size_t set = 0; set < SETS; set++)
        for (size_t t = 0; t < T; t++)
            memcpy(k->gradient[set][layer][t], d + set * set_stride + t * stride, sizeof k->gradient[0][0][0]);
    return 0;
}

typedef struct bench {
    family *f;
    pool *p;
    backend_state *s;
    kept *k;
} bench;

static void bench_new(bench *b, const arch *a, int threads) {
    b->f = family_new(a);
    model *m = &b->f->m;
    m->window[1] = 20;
    m->softcap = 3;
    m->logit_softcap = 4;
    if (!a->learned_positions) {
        m->n_rope = 2;
        m->layer[1].rope = 1;
        m->layer[2].rope = -1;
    }
    if (pool_new(threads, &b->p) || cpu_backend.load(m, b->p, &cpu_options, &b->s)) fail_msg("%s", err_message());
    b->k = mem_new(1, sizeof *b->k, "test");
    assert_non_null(b->k);
}

static void bench_free(bench *b) {
    cpu_backend.unload(b->s);
    pool_free(b->p);
    family_free(b->f);
    mem_free(b->k);
}

static void counted_steps(uint8_t *counted) {
    for (int t = 0; t < T - 1; t++) counted[t] = t % 29 == 5 || t > 140;
}

static void run(bench *b, const int32_t *tokens) {
    uint8_t counted[T - 1];
    counted_steps(counted);
    label_plan plan = {.counted = counted, .n_samples = SETS - 1, .seed = 3};
    forward_sink sink = {.context = b->k, .rows = keep_rows, .logits = keep_logits};
    gradient_sink back = {.context = b->k, .labels = keep_labels, .layer = keep_gradient};
    if (cpu_backend.forward_backward(b->s, tokens, T, NULL, &sink, &plan, &back)) fail_msg("%s", err_message());
}

/* ---- against the slow pass --------------------------------------------------------------------------------------- */

static void forward_equals_the_slow_pass(void **state) {
    (void)state;
    slow *s = mem_new(1, sizeof *s, "test");
    for (size_t i = 0; i < arch_count(); i++) {
        bench b;
        bench_new(&b, arch_at(i), 2);
        run(&b, text());
        s->f = b.f;
        slow_pass(s, text(), NULL);
        double logits = 0, probs = 0, least = 0;
        for (int t = 0; t < T; t++)
            for (int v = 0; v < V; v++) {
                logits = fmax(logits, fabs(s->logits[t][v] - (double)b.k->logits[t][v]));
                least = fmax(least, fabs(s->logits[t][v]));
            }
        for (size_t n = 0; n < sizeof s->probs / sizeof(double); n++)
            probs = fmax(probs, fabs((&s->probs[0][0][0][0])[n] - (double)(&b.k->probs[0][0][0][0])[n]));
        print_message("# %s: logits %.1e (of %.1f), probabilities %.1e\n", arch_at(i)->name, logits, least, probs);
        assert_true(least > 1); /* the cap of 4 bends them */
        assert_true(logits <= 1e-4 && probs <= 2e-5);
        bench_free(&b);
    }
    mem_free(s);
}

/* Losses of both sets at the counted steps. */
static void losses(const slow *s, const int32_t *tokens, const int32_t *label, double loss[SETS]) {
    uint8_t counted[T - 1];
    counted_steps(counted);
    loss[0] = loss[1] = 0;
    for (int t = 0; t < T - 1; t++) {
        double z = 0;
        for (int v = 0; v < V && counted[t]; v++) z += exp(s->logits[t][v]);
        if (counted[t]) loss[0] += log(z) - s->logits[t][tokens[t + 1]];
        if (counted[t]) loss[1] += log(z) - s->logits[t][label[t]];
    }
}

static double largest(const float *x, size_t n) {
    double most = 0;
    for (size_t i = 0; i < n; i++) most = fmax(most, fabs((double)x[i]));
    return most;
}

static void check_slope(const bench *b, slow *s, nudge n) {
    const double step = 1e-5;
    double up[SETS], down[SETS];
    n.by = step;
    slow_pass(s, text(), &n);
    losses(s, text(), b->k->label, up);
    n.by = -step;
    slow_pass(s, text(), &n);
    losses(s, text(), b->k->label, down);
    for (int set = 0; set < SETS; set++) {
        double want = (up[set] - down[set]) / (2 * step), got = (double)b->k->gradient[set][n.layer][n.t][n.i];
        double scale = largest(&b->k->gradient[set][n.layer][0][0], T * H * DIM);
        if (!(fabs(want - got) <= 2e-4 * scale))
            fail_msg("%s, layer %d, step %d, output %d, set %d: %g by differences, %g by the backward pass (of %g)",
                     b->f->m.arch->name, n.layer, n.t, n.i, set, want, got, scale);
    }
}

static void gradients_equal_differences(void **state) {
    (void)state;
    slow *s = mem_new(1, sizeof *s, "test");
    for (size_t i = 0; i < arch_count(); i++) {
        bench b;
        bench_new(&b, arch_at(i), 2);
        run(&b, text());
        s->f = b.f;
        for (int layer = 0; layer < L; layer++)
            for (uint32_t n = 0; n < 4; n++) {
                rng_block r = rng_philox(5, n, (uint32_t)layer, 0, 0);
                /* Of the last layer only steps whose own loss counts have a gradient. */
                int t = layer == L - 1 ? 141 + (int)(r.v[0] % 8) : (int)(n % 2 * 75 + r.v[0] % 66);
                check_slope(&b, s, (nudge){layer, t, (int)(r.v[1] % (H * DIM)), 0});
            }
        bench_free(&b);
    }
    mem_free(s);
}

/* ---- steps ------------------------------------------------------------------------------------------------------- */

static void check_step(const bench *b, const step_view *v, size_t t) {
    for (size_t i = 0; i < V; i++) assert_float_equal(v->logits[v->ld_logits + i], b->k->logits[t][i], 2e-4);
    for (size_t l = 0; l < L; l++)
        for (size_t h = 0; h < H; h++)
            for (size_t i = 0; i <= t; i++)
                assert_float_equal(v->rows[1][(l * H + h) * v->ld_rows + i], b->k->probs[l][h][t][i], 2e-5);
}

/* Two copies of every architecture, `filled` tokens in one pass, then step by step up to `end`. */
static void check_steps(size_t filled, size_t end) {
    const bool rows[2] = {false, true};
    for (size_t i = 0; i < arch_count(); i++) {
        bench b;
        backend_steps *st;
        step_view v;
        bench_new(&b, arch_at(i), 2);
        run(&b, text());
        if (cpu_backend.steps_new(b.s, 2, rows, T, &st)) fail_msg("%s", err_message());
        if (filled && cpu_backend.steps_fill(st, text(), (int32_t)filled)) fail_msg("%s", err_message());
        for (size_t t = filled; t < end; t++) {
            if (cpu_backend.steps_next(st, text()[t], &v)) fail_msg("%s", err_message());
            assert_memory_equal(v.logits, v.logits + v.ld_logits, V * sizeof(float));
            check_step(&b, &v, t);
        }
        cpu_backend.steps_free(st);
        bench_free(&b);
    }
}

static void steps_equal_whole_passes(void **state) {
    (void)state;
    check_steps(0, T);
}

/* A prompt in one pass: the steps after it are those of one token after another. */
static void filled_caches_go_on_alike(void **state) {
    (void)state;
    check_steps(90, 120);
}

static int keep_projected(void *context, const float *x, size_t stride) {
    const bench *b = context;
    size_t ld = kernel_pad(V);
    float *out = mem_new(T * ld, sizeof *out, "test");
    if (cpu_backend.project(b->s, x, T, stride, out, ld)) fail_msg("%s", err_message());
    for (size_t t = 0; t < T; t++)
        for (size_t i = 0; i < V; i++) assert_float_equal(out[t * ld + i], b->k->logits[t][i], 1e-5);
    mem_free(out);
    return 0;
}

static void projected_states_are_logits(void **state) {
    (void)state;
    bench b;
    bench_new(&b, arch_find("gemma2", 6), 2);
    run(&b, text());
    forward_sink sink = {.context = &b, .hidden = keep_projected};
    if (cpu_backend.forward(b.s, text(), T, NULL, &sink)) fail_msg("%s", err_message());
    bench_free(&b);
}

/* ---- promises ---------------------------------------------------------------------------------------------------- */

static void bits_do_not_depend_on_threads(void **state) {
    (void)state;
    for (size_t i = 0; i < arch_count(); i++) {
        bench one, three;
        bench_new(&one, arch_at(i), 1);
        bench_new(&three, arch_at(i), 3);
        run(&one, text());
        run(&three, text());
        assert_memory_equal(one.k, three.k, sizeof *one.k);
        bench_free(&one);
        bench_free(&three);
    }
}

static void later_tokens_change_no_earlier_bit(void **state) {
    (void)state;
    enum { AT = 90 };
    int32_t tokens[T];
    memcpy(tokens, text(), sizeof tokens);
    tokens[AT] = (tokens[AT] + 1) % V;
    for (size_t i = 0; i < arch_count(); i++) {
        bench before, after;
        bench_new(&before, arch_at(i), 2);
        bench_new(&after, arch_at(i), 2);
        run(&before, text());
        run(&after, tokens);
        assert_memory_equal(before.k->logits, after.k->logits, AT * sizeof before.k->logits[0]);
        assert_memory_not_equal(before.k->logits[AT], after.k->logits[AT], sizeof before.k->logits[0]);
        for (int h = 0; h < L * H; h++)
            assert_memory_equal(before.k->probs[h / H][h % H], after.k->probs[h / H][h % H], AT * T * sizeof(float));
        bench_free(&before);
        bench_free(&after);
    }
}

/* A cap would turn an infinite logit into one like any other. */
static void a_cap_hides_nothing_that_is_not_finite(void **state) {
    (void)state;
    bench b;
    bench_new(&b, arch_find("gemma2", 6), 1);
    b.f->output[7 * E] = INFINITY;
    uint8_t counted[T - 1];
    counted_steps(counted);
    label_plan plan = {.counted = counted};
    forward_sink sink = {.context = b.k};
    gradient_sink back = {.context = b.k};
    assert_int_equal(cpu_backend.forward_backward(b.s, text(), T, NULL, &sink, &plan, &back), ERR_DATA);
    assert_non_null(strstr(err_message(), "non-finite logits at layer 3 (output), token 5"));
    bench_free(&b);
}

static void positions_end_where_their_table_does(void **state) {
    (void)state;
    const char *want = "family has embeddings of 200 positions; the text has 201 tokens";
    int32_t tokens[FAMILY_CONTEXT + 1] = {0};
    bench b;
    backend_steps *st;
    bench_new(&b, arch_find("gpt2", 4), 1);
    forward_sink nothing = {0};
    assert_int_equal(cpu_backend.forward(b.s, tokens, FAMILY_CONTEXT, NULL, &nothing), 0);
    assert_int_equal(cpu_backend.forward(b.s, tokens, FAMILY_CONTEXT + 1, NULL, &nothing), ERR_DATA);
    assert_non_null(strstr(err_message(), want));
    assert_int_equal(cpu_backend.steps_new(b.s, 1, &(bool){false}, FAMILY_CONTEXT + 1, &st), ERR_DATA);
    assert_null(st);
    assert_non_null(strstr(err_message(), want));
    bench_free(&b);
}

int main(void) {
    say_level(SAY_QUIET);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(forward_equals_the_slow_pass),
        cmocka_unit_test(gradients_equal_differences),
        cmocka_unit_test(steps_equal_whole_passes),
        cmocka_unit_test(projected_states_are_logits),
        cmocka_unit_test(bits_do_not_depend_on_threads),
        cmocka_unit_test(later_tokens_change_no_earlier_bit),
        cmocka_unit_test(a_cap_hides_nothing_that_is_not_finite),
        cmocka_unit_test(filled_caches_go_on_alike),
        cmocka_unit_test(positions_end_where_their_table_does),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
