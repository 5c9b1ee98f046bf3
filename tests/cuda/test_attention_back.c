/* The way back through attention against slow loops in f64, which are themselves checked by differences of a loss. */
#include "tests/cuda/attention_case.h"

/* Gradients of several sets, and what they ask of q, k and v. */
typedef struct back_case {
    attention_case c;
    size_t sets, width;  /* of q | k | v */
    float *d_o;          /* [sets][T][ld_o] */
    double *d_qkv, *dot; /* [sets][T][width], [sets][n_head][T] */
} back_case;

/* One step of one head: d_score = p * (d_p - d_o . o) * slope, on to q, k and v. */
static void solve_row(const back_case *b, size_t set, int head, size_t t) {
    const attention_case *c = &b->c;
    size_t T = c->s.T, dim = (size_t)c->s.head_dim, at = ((size_t)head * T + t) * T;
    int key_head = case_key_head(c, head), value_head = key_head + c->s.n_kv_head;
    const float *d_o = b->d_o + (set * T + t) * c->ld_o + (size_t)head * dim, *q = case_row(c, head, t);
    double *out = b->d_qkv + set * T * b->width, dot = 0;
    for (size_t k = 0; k < dim; k++) dot += (double)d_o[k] * c->o[t * c->width + (size_t)head * dim + k];
    b->dot[(set * (size_t)c->s.n_head + (size_t)head) * T + t] = dot;
    for (size_t i = 0; i <= t; i++) {
        double p = c->p[at + i], d_p = dot64(d_o, case_row(c, value_head, i), c->s.head_dim);
        double d_score = (double)c->s.scale * p * (d_p - dot) * c->slope[at + i];
        const float *key = case_row(c, key_head, i);
        double *d_q = out + t * b->width + (size_t)head * dim, *d_k = out + i * b->width + (size_t)key_head * dim;
        double *d_v = out + i * b->width + (size_t)value_head * dim;
        for (size_t k = 0; k < dim; k++) {
            d_q[k] += d_score * (double)key[k];
            d_k[k] += d_score * (double)q[k];
            d_v[k] += p * (double)d_o[k];
        }
    }
}

static void begin(back_case *b, const sizes *z, size_t sets) {
    *b = (back_case){.sets = sets, .width = (size_t)((z->n_head + 2 * z->n_kv_head) * z->head_dim)};
    case_begin(&b->c, d, z);
    size_t heads = (size_t)z->n_head;
    b->d_o = random_rows(d, 8, sets * z->T, b->c.width, b->c.ld_o);
    b->d_qkv = calloc(sets * z->T * b->width, sizeof *b->d_qkv);
    b->dot = calloc(sets * heads * z->T, sizeof *b->dot);
    assert_true(b->d_qkv && b->dot);
    for (size_t set = 0; set < sets; set++)
        for (int head = 0; head < z->n_head; head++)
            for (size_t t = 0; t < z->T; t++) solve_row(b, set, head, t);
}

static void end(back_case *b) {
    free(b->d_qkv);
    free(b->dot);
    case_end(&b->c);
}

/* What the kernels make of it, from an o and an lse that the kernel forward made. */
static float *run(const back_case *b, float **row_dot) {
    const attention_shape *s = &b->c.s;
    size_t heads = (size_t)s->n_head;
    float *o = device_floats(d, s->T * b->c.ld_o), *lse = device_floats(d, heads * s->T);
    float *d_qkv = device_floats(d, b->sets * s->T * s->ld);
    int32_t *bad = device_memory(d, sizeof *bad);
    *row_dot = device_floats(d, b->sets * heads * s->T);
    *bad = INT32_MAX;
    OK(k_attention(d, s, o, b->c.ld_o, lse, bad));
    OK(k_attention_back(d, s, b->sets, o, lse, b->d_o, b->c.ld_o, *row_dot, d_qkv));
    return d_qkv;
}

static void gradients(void **state) {
    (void)state;
    const struct {
        sizes z;
        size_t sets;
    } all[] = {
        {{.T = 1, .n_head = 1, .n_kv_head = 1, .head_dim = 32}, 1},
        {{.T = 31, .n_head = 3, .n_kv_head = 1, .head_dim = 64, .evict = true}, 2},
        {{.T = 33, .n_head = 8, .n_kv_head = 1, .head_dim = 32, .window = 5}, 3},
        {{.T = 64, .n_head = 2, .n_kv_head = 2, .head_dim = 80, .softcap = 2}, 2},
        {{.T = 65, .n_head = 3, .n_kv_head = 1, .head_dim = 96, .window = 1}, 1},
        {{.T = 67, .n_head = 2, .n_kv_head = 1, .head_dim = 7, .evict = true, .softcap = 3}, 3},
        {{.T = 70, .n_head = 2, .n_kv_head = 1, .head_dim = 256, .evict = true, .window = 64}, 2},
        {{.T = 130, .n_head = 2, .n_kv_head = 1, .head_dim = 128, .window = 66}, 3},
        {{.T = 66, .n_head = 1, .n_kv_head = 1, .head_dim = 130}, 1},
        {{.T = 257, .n_head = 1, .n_kv_head = 1, .head_dim = 32, .softcap = 5, .evict = true}, 1},
        {{.T = 300, .n_head = 3, .n_kv_head = 1, .head_dim = 32, .window = 100}, 2},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        back_case b;
        begin(&b, &all[i].z, all[i].sets);
        size_t T = b.c.s.T, heads = (size_t)b.c.s.n_head, q = heads * (size_t)b.c.s.head_dim;
        float *row_dot, *d_qkv = run(&b, &row_dot);
        check_rows(row_dot, T, b.dot, b.sets * heads, T, 1e-6);
        /* Queries, keys and values differ in size, so each is held to its own. */
        size_t kv = (b.width - q) / 2, from[] = {0, q, q + kv, b.width};
        for (int part = 0; part < 3; part++) {
            size_t n = from[part + 1] - from[part];
            double *want = calloc(b.sets * T * n, sizeof *want);
            float *got = device_floats(d, b.sets * T * n);
            assert_non_null(want);
            for (size_t r = 0; r < b.sets * T; r++)
                for (size_t k = 0; k < n; k++) {
                    want[r * n + k] = b.d_qkv[r * b.width + from[part] + k];
                    got[r * n + k] = d_qkv[r * b.c.s.ld + from[part] + k];
                }
            check_rows(got, n, want, b.sets * T, n, 5e-6);
            free(want);
        }
        for (size_t r = 0; r < b.sets * T; r++)
            for (size_t k = b.width; k < b.c.s.ld; k++) assert_true(isnan(d_qkv[r * b.c.s.ld + k]));
        end(&b);
    }
}

static double loss(back_case *b) {
    const attention_case *c = &b->c;
    double sum = 0;
    case_solve(&b->c);
    for (size_t t = 0; t < c->s.T; t++)
        for (size_t i = 0; i < c->width; i++) sum += (double)b->d_o[t * c->ld_o + i] * c->o[t * c->width + i];
    return sum;
}

/* The formulas above, against the difference that moving one value of q, k or v makes. */
static void formulas_are_slopes(void **state) {
    (void)state;
    back_case b;
    begin(&b, &(sizes){.T = 7, .n_head = 2, .n_kv_head = 1, .head_dim = 4, .window = 4, .softcap = 1, .evict = true},
          1);
    for (size_t r = 0; r < 7; r++)
        for (size_t k = 0; k < b.width; k++) {
            float *x = b.c.qkv + r * b.c.s.ld + k, here = *x;
            *x = here + 0x1p-10f;
            double above = loss(&b), step = (double)*x;
            *x = here - 0x1p-10f;
            double below = loss(&b), want = (above - below) / (step - (double)*x);
            *x = here;
            assert_true(fabs(b.d_qkv[r * b.width + k] - want) < 1e-5);
        }
    end(&b);
}

/* No order of blocks or threads changes a bit, and a set's bits do not depend on those that it runs with. */
static void equal_bits(void **state) {
    (void)state;
    back_case b;
    begin(&b, &(sizes){.T = 130, .n_head = 2, .n_kv_head = 1, .head_dim = 64, .evict = true}, 3);
    size_t ld = b.c.s.ld, width = b.width * sizeof(float);
    float *row_dot, *all = run(&b, &row_dot);
    setenv("KVLAG_FIBERS_ORDER", "reverse", 1);
    float *reverse = run(&b, &row_dot);
    unsetenv("KVLAG_FIBERS_ORDER");
    for (size_t r = 0; r < 3 * 130; r++) assert_memory_equal(all + r * ld, reverse + r * ld, width);
    b.sets = 1;
    for (size_t set = 0; set < 3; set++) {
        float *one = run(&b, &row_dot);
        for (size_t r = 0; r < 130; r++) assert_memory_equal(all + (set * 130 + r) * ld, one + r * ld, width);
        b.d_o += 130 * b.c.ld_o;
    }
    end(&b);
}

int main(void) {
    const struct CMUnitTest tests[] = {TEST(gradients), TEST(formulas_are_slopes), TEST(equal_bits)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
