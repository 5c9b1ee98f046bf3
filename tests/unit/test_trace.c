/* Traces written and read back: both forms of attention against a plain double-precision softmax. */
#include "tests/unit/trace_build.h"
#include "traces/check.h"
#include "traces/hdf.h"
#include "traces/zstd_filter.h"

/* Rows of one layer in blocks of `step`, against the truth; the rest of each row must be zero. */
static void compare_layer(trace_layer *l, const built *b, int layer, int32_t step, double tolerance, pool *p) {
    size_t stride = kernel_pad((size_t)b->T) + 16, H = (size_t)b->model.n_head;
    float *rows = mem_new(H * (size_t)step * stride, sizeof *rows, "test");
    for (int32_t row = 0; row < b->T; row += step) {
        int32_t n = b->T - row < step ? b->T - row : step;
        memset(rows, 0xff, H * (size_t)step * stride * sizeof *rows);
        BUILD_OK(trace_layer_rows(l, row, n, rows, stride, p));
        for (size_t h = 0; h < H; h++)
            for (int32_t r = 0; r < n; r++) {
                const float *got = rows + (h * (size_t)n + (size_t)r) * stride;
                const double *want = build_truth(b, layer, (int)h, row + r);
                double sum = 0;
                for (size_t i = 0; i < stride; i++) {
                    double truth = i < (size_t)b->T ? want[i] : 0;
                    if (truth == 0 ? got[i] != 0 : !(fabs((double)got[i] - truth) <= tolerance))
                        fail_msg("layer %d head %zu row %d entry %zu: %.9g, want %.9g", layer, h, row + r, i,
                                 (double)got[i], truth);
                    sum += (double)got[i];
                }
                assert_true(fabs(sum - 1) < 1e-5);
            }
    }
    mem_free(rows);
}

static void compare_form(trace *t, const built *b, trace_form form, double tolerance, pool *p) {
    for (int layer = 0; layer < 2; layer++) {
        trace_layer *l;
        BUILD_OK(trace_layer_open(t, 0, layer, form, p, &l));
        compare_layer(l, b, layer, 7, tolerance, p);
        compare_layer(l, b, layer, b->T, tolerance, p);
        assert_true(trace_layer_bytes(t, 0, form) > (size_t)b->T * 8 * 4);
        for (int kv = 0; kv < 2; kv++)
            assert_memory_equal(trace_layer_v(l, kv), b->v + (size_t)(layer * 2 + kv) * (size_t)b->T * 8,
                                (size_t)b->T * 8 * sizeof(float));
        trace_layer_close(l);
    }
}

static void round_trip(int32_t T, bool window) {
    built b = build(T, window);
    trace *t;
    pool *p;
    BUILD_OK(build_write(&b, b.path, NULL, &build_everything, 2));
    BUILD_OK(pool_new(2, &p));
    BUILD_OK(trace_open(b.path, &t));
    const trace_sequence *s = trace_get_sequence(t, 0);
    assert_int_equal(s->n_tokens, T);
    assert_true(s->has_dense && s->has_factored && s->has_v && s->has_lse && s->has_grad_loss && s->n_fisher == 2);
    assert_string_equal(s->source, "a.txt");
    assert_int_equal(s->tokens[T - 1], (T - 1) % 50);
    for (int32_t i = 0; i < T - 1; i++)
        assert_true(s->target_logprob[i] == (float)build_logprob(&b, i, s->tokens[i + 1]));
    assert_int_equal(trace_get_model(t)->window[1], window ? 4 : 0);
    assert_true(trace_get_model(t)->scale == 0.35355339f);
    compare_form(t, &b, TRACE_FACTORED, 2e-6, p);
    compare_form(t, &b, TRACE_DENSE, 6e-4, p);
    check_sequence checked;
    BUILD_OK(check_trace(t, false, p, &checked));
    assert_true(checked.sum_error < 3e-3 && checked.difference < 6e-4);
    trace_close(t);
    pool_free(p);
    build_free(&b);
}

static void both_forms_at_the_edges_of_a_chunk(void **state) {
    (void)state;
    const int32_t edge[] = {1, 2, 255, 256, 257};
    for (size_t i = 0; i < sizeof edge / sizeof *edge; i++) round_trip(edge[i], false);
}

static void windows(void **state) {
    (void)state;
    round_trip(3, true);
    round_trip(40, true);
    round_trip(530, true); /* tiles that lie outside the window altogether */
}

static void rows_come_in_any_order(void **state) {
    (void)state;
    built b = build(600, false);
    trace *t;
    trace_layer *l;
    pool *p;
    BUILD_OK(build_write(&b, b.path, NULL, &build_everything, 1));
    BUILD_OK(pool_new(1, &p));
    BUILD_OK(trace_open(b.path, &t));
    for (trace_form form = TRACE_FACTORED; form <= TRACE_DENSE; form++) {
        BUILD_OK(trace_layer_open(t, 0, 1, form, p, &l));
        float *rows = mem_new(4 * 608, sizeof *rows, "test");
        for (int32_t row = 599; row >= 0; row -= 41) {
            BUILD_OK(trace_layer_rows(l, row, 1, rows, 608, p));
            for (int h = 0; h < 4; h++)
                assert_true(fabs((double)rows[h * 608 + row] - build_truth(&b, 1, h, row)[row]) < 6e-4);
        }
        mem_free(rows);
        trace_layer_close(l);
    }
    trace_close(t);
    pool_free(p);
    build_free(&b);
}

/* One layer, one head, dim 1: the scores of step 1 are scale*q*k0 and scale*q*k1. */
static void two_scores(float q, float k0, float k1, float softcap, float want0) {
    built b = build(2, false);
    trace *t;
    trace_layer *l;
    pool *p;
    float rows[16] __attribute__((aligned(64)));
    b.model.n_layer = b.model.n_head = b.model.n_kv_head = b.model.head_dim = 1;
    b.model.scale = 1;
    b.model.softcap = softcap;
    b.q[0] = b.q[1] = q;
    b.k[0] = k0;
    b.k[1] = k1;
    BUILD_OK(build_write(&b, b.path, NULL, &(trace_plan){.factored = true}, 1));
    BUILD_OK(pool_new(1, &p));
    BUILD_OK(trace_open(b.path, &t));
    BUILD_OK(trace_layer_open(t, 0, 0, TRACE_AUTO, p, &l));
    BUILD_OK(trace_layer_rows(l, 1, 1, rows, 16, p));
    assert_true(fabsf(rows[0] - want0) <= 2e-6f && fabsf(rows[0] + rows[1] - 1) <= 2e-7f);
    trace_layer_close(l);
    trace_close(t);
    pool_free(p);
    build_free(&b);
}

static void extreme_scores(void **state) {
    (void)state;
    two_scores(-490, 500, 500, 0, 0.5f); /* -245000 twice */
    two_scores(300, 100, -100, 0, 1.0f); /* 3e4, -3e4 */
    /* 100 and 95 under cap 50: 50 tanh(2) = 48.2014, 50 tanh(1.9) = 47.8119; 1/(1+exp(-.389505)) = .596164 */
    two_scores(10, 10, 9.5f, 50, 0.596164f);
    two_scores(10, 10, 9.5f, 0, 0.993307f); /* without it: 1/(1+exp(-5)) */
}

static void text_with_nuls_and_66000_bytes(void **state) {
    (void)state;
    enum { T = 300, BYTES = 66000 };
    built b = build(T, false);
    trace *t;
    uint8_t *pieces = mem_new(BYTES, 1, "test"), counted[T - 1] = {0, 1};
    int64_t offset[T + 1];
    int32_t tokens[T] = {49}, probes[] = {0, 299, 5, 6};
    for (int i = 0; i < BYTES; i++) pieces[i] = (uint8_t)(i % 7 ? i : 0);
    for (int i = 0; i <= T; i++) offset[i] = (int64_t)i * 220;
    trace_sequence s = {.n_tokens = T,
                        .n_prompt = 17,
                        .source = (char[]){"x"},
                        .tokens = tokens,
                        .pieces = pieces,
                        .piece_offset = offset,
                        .counted = counted,
                        .probes = probes,
                        .n_probes = 2};
    BUILD_OK(build_write(&b, b.path, &s, &(trace_plan){.factored = true}, 1));
    BUILD_OK(trace_open(b.path, &t));
    const trace_sequence *got = trace_get_sequence(t, 0);
    assert_int_equal(got->n_prompt, 17);
    assert_int_equal(got->piece_offset[T], BYTES);
    assert_memory_equal(got->pieces, pieces, BYTES);
    assert_memory_equal(got->counted, counted, sizeof counted);
    assert_int_equal(got->n_probes, 2);
    assert_memory_equal(got->probes, probes, sizeof probes);
    assert_false(got->has_dense);
    trace_close(t);
    mem_free(pieces);
    build_free(&b);
}

static void output_projection(void **state) {
    (void)state;
    built b = build(2, false);
    trace *t;
    float *want = build_array(32 * 12, 5), got[32 * 12];
    BUILD_OK(build_write(&b, b.path, NULL, &build_everything, 1));
    BUILD_OK(trace_open(b.path, &t));
    assert_true(trace_has_wo(t));
    BUILD_OK(trace_read_wo(t, 1, got));
    assert_memory_equal(got, want, sizeof got);
    trace_close(t);
    mem_free(want);
    build_free(&b);
}

static char *slurp(const char *path, size_t *n) {
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    fseek(f, 0, SEEK_END);
    *n = (size_t)ftell(f);
    rewind(f);
    char *bytes = mem_new(*n, 1, "test");
    assert_int_equal(fread(bytes, 1, *n, f), *n);
    fclose(f);
    return bytes;
}

static void same_bytes_twice_and_for_any_threads(void **state) {
    (void)state;
    built b = build(300, true);
    size_t n[3];
    char *bytes[3];
    for (int i = 0; i < 3; i++) {
        BUILD_OK(build_write(&b, b.path, NULL, &build_everything, i == 2 ? 4 : 1));
        bytes[i] = slurp(b.path, &n[i]);
        if (i == 0) sleep(1); /* an object time would now differ */
    }
    for (int i = 1; i < 3; i++) {
        assert_int_equal(n[i], n[0]);
        assert_memory_equal(bytes[i], bytes[0], n[0]);
    }
    for (int i = 0; i < 3; i++) mem_free(bytes[i]);
    build_free(&b);
}

/* The content hash follows the content: it is the same for the same content, and changes with a single f16 value. */
static void content_hash_follows_the_content(void **state) {
    (void)state;
    built b = build(20, false);
    trace *t;
    char hash[2][40];
    for (int i = 0; i < 2; i++) {
        BUILD_OK(build_write(&b, b.path, NULL, &build_everything, 1));
        BUILD_OK(trace_open(b.path, &t));
        assert_int_equal(strlen(trace_hash(t)), 32);
        strcpy(hash[i], trace_hash(t));
        trace_close(t);
        b.v[5] += 0.5f;
    }
    assert_string_not_equal(hash[0], hash[1]);
    build_free(&b);
}

/* An optional filter that is missing would be skipped in silence: every filter of every dataset must be mandatory. */
static void filters_are_mandatory(void **state) {
    (void)state;
    built b = build(300, false);
    hid_t h5;
    char **name;
    size_t n;
    int chunked = 0;
    BUILD_OK(build_write(&b, b.path, NULL, &build_everything, 1));
    BUILD_OK(hdf_open(b.path, &h5));
    BUILD_OK(hdf_list_datasets(h5, &name, &n));
    for (size_t i = 0; i < n; i++) {
        hid_t set = H5Dopen2(h5, name[i], H5P_DEFAULT), creation = H5Dget_create_plist(set);
        unsigned flags = 99;
        size_t values = 0;
        if (H5Pget_layout(creation) == H5D_CHUNKED) {
            chunked++;
            assert_true(H5Pget_filter_by_id2(creation, ZSTD_FILTER_ID, &flags, &values, NULL, 0, NULL, NULL) >= 0);
            assert_int_equal(flags & H5Z_FLAG_OPTIONAL, 0);
            hsize_t offset[H5S_MAX_RANK] = {0};
            uint32_t mask = 99;
            unsigned char frame[1 << 18];
            assert_true(H5Dread_chunk(set, H5P_DEFAULT, offset, &mask, frame) >= 0);
            assert_int_equal(mask, 0);
            assert_memory_equal(frame, "\x28\xb5\x2f\xfd", 4); /* RFC 8878: the magic number of a zstd frame */
            assert_true(frame[4] & 4);                         /* ... with a checksum */
        }
        H5Pclose(creation);
        H5Dclose(set);
    }
    assert_int_equal(chunked, 19); /* 6 of attn, 6 of logits, 5 of grad, tokens, model/wo */
    hdf_free_names(name, n);
    H5Fclose(h5);
    build_free(&b);
}

/* Far more blocks than the writer's queue holds, handed over faster than they are written. */
static void many_blocks_come_in_order(void **state) {
    (void)state;
    enum { LAYERS = 8, HEADS = 400, T = 5 };
    built b = build(2, false);
    trace_writer *w;
    hid_t h5;
    int32_t window[LAYERS] = {0}, tokens[T] = {0};
    int64_t dims[3] = {LAYERS, HEADS, T};
    void *values;
    b.model.n_layer = LAYERS;
    b.model.n_head = HEADS;
    b.model.window = window;
    BUILD_OK(trace_writer_new(b.path, true, NULL, 0, &b.model, "test", "test", 1, &w));
    BUILD_OK(trace_write_sequence(w, &(trace_sequence){.n_tokens = T, .tokens = tokens}, &(trace_plan){.lse = true}));
    for (int i = 0; i < LAYERS * HEADS; i++)
        BUILD_OK(trace_write_lse(w, i / HEADS, i % HEADS, (float[T]){(float)i, 1, 2, 3, -(float)i}));
    trace_times times = trace_writer_times(w);
    assert_true(times.wait > 0 && times.write > 0 && times.pack == 0);
    BUILD_OK(trace_writer_finish(w, NULL));
    BUILD_OK(hdf_open(b.path, &h5));
    BUILD_OK(hdf_read_all(h5, "seq/0000/attn/lse", HDF_FLOAT, H5T_NATIVE_FLOAT, 3, dims, &values));
    const float *lse = values;
    for (int i = 0; i < LAYERS * HEADS; i++)
        assert_true(lse[i * T] == (float)i && lse[i * T + 2] == 2 && lse[i * T + 4] == -(float)i);
    mem_free(values);
    H5Fclose(h5);
    build_free(&b);
}

static void shuffle_and_pack_undo_each_other(void **state) {
    (void)state;
    zstd_work *w;
    BUILD_OK(zstd_work_new(&w));
    for (size_t size = 1; size <= 8; size *= 2)
        for (size_t n = 1; n < 300; n += 37) {
            unsigned char from[8 * 300], to[8 * 300];
            void *frame;
            size_t bytes;
            for (size_t i = 0; i < n * size; i++) from[i] = (unsigned char)(i * i);
            BUILD_OK(zstd_pack(w, from, n, size, &frame, &bytes));
            BUILD_OK(zstd_unpack(w, frame, bytes, 0, n, size, to));
            assert_memory_equal(from, to, n * size);
            assert_int_not_equal(zstd_unpack(w, frame, bytes, 0, n + 1, size, to), 0);
            mem_free(frame);
        }
    zstd_work_free(w);
}

/* HDF5 lets a chunk skip either filter: bit 0 of its mask is the shuffle, bit 1 the compression. */
static void chunks_may_skip_a_filter(void **state) {
    (void)state;
    const half values[3] = {0x0201, 0x0403, 0x0605};
    const uint8_t shuffled[6] = {1, 3, 5, 2, 4, 6};
    zstd_work *w;
    BUILD_OK(zstd_work_new(&w));
    for (unsigned skipped = 0; skipped < 4; skipped++) {
        const void *stored = skipped & 1 ? (const void *)values : shuffled;
        void *frame = NULL;
        size_t bytes = 6;
        uint8_t planes[6];
        half got[3];
        if (!(skipped & 2)) BUILD_OK(zstd_pack(w, stored, 6, 1, &frame, &bytes));
        const void *chunk = frame ? frame : stored;
        BUILD_OK(zstd_unpack(w, chunk, bytes, skipped, 3, 2, got));
        assert_memory_equal(got, values, 6);
        BUILD_OK(zstd_unpack_planes(w, chunk, bytes, skipped, 3, planes));
        assert_memory_equal(planes, shuffled, 6);
        assert_int_not_equal(zstd_unpack_planes(w, chunk, bytes, skipped, 2, planes), 0);
        mem_free(frame);
    }
    zstd_work_free(w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(both_forms_at_the_edges_of_a_chunk),
        cmocka_unit_test(windows),
        cmocka_unit_test(rows_come_in_any_order),
        cmocka_unit_test(extreme_scores),
        cmocka_unit_test(text_with_nuls_and_66000_bytes),
        cmocka_unit_test(output_projection),
        cmocka_unit_test(same_bytes_twice_and_for_any_threads),
        cmocka_unit_test(content_hash_follows_the_content),
        cmocka_unit_test(filters_are_mandatory),
        cmocka_unit_test(many_blocks_come_in_order),
        cmocka_unit_test(shuffle_and_pack_undo_each_other),
        cmocka_unit_test(chunks_may_skip_a_filter),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
