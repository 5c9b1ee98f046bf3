/* Weights are mapped, not read: files of 16 GiB of which a few pages are ever looked at. */
#include "base/err.h"
#include "tests/unit/model_build.h"
#include "tracer/gguf.h"
#include "tracer/mapped.h"
#include "tracer/model.h"
#include "tracer/safetensors.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum { EMBD = 4096, VOCAB = 1 << 20 }; /* times 4 bytes: 16 GiB */

/* Pages of a tensor's data that memory holds. */
static size_t pages_in_memory(const tensor *t) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), n = (t->bytes + page - 1) / page, count = 0;
    char *from = (char *)((uintptr_t)t->data / page * page + page); /* the header may share the first one */
    unsigned char *there = calloc(n, 1);
    assert_non_null(there);
    assert_int_equal(mincore(from, (n - 1) * page, there), 0);
    for (size_t i = 0; i < n; i++) count += there[i] & 1;
    free(there);
    return count;
}

/* The count is one of what was read: a row of 16 KiB is 4 pages of 4 KiB, or 5 where it does not begin with one. */
static void check_counting(const tensor *t) {
    static float row[EMBD];
    assert_int_equal(t->bytes, 1ull << 34);
    assert_int_equal(pages_in_memory(t), 0);
    row[EMBD - 1] = 1;
    assert_int_equal(tensor_rows(t, VOCAB / 2, 1, row), 0);
    assert_true(row[0] == 0 && row[EMBD - 1] == 0);
    assert_in_range(pages_in_memory(t), 1, 5);
}

static void opening_gguf_reads_no_weights(void **state) {
    (void)state;
    char path[32];
    model *m = NULL;
    gguf *g = NULL;
    int fd = mini_file((mini){.n_embd = EMBD, .n_vocab = VOCAB, .hollow = true}, path);
    if (gguf_open(path, &g)) fail_msg("%s", err_message());
    assert_int_equal(pages_in_memory(gguf_find(g, "token_embd.weight")), 0);
    gguf_close(g);
    if (model_open(path, &m)) fail_msg("%s", err_message());
    assert_int_equal(m->n_vocab, VOCAB);
    check_counting(m->embedding.tensor);
    model_close(m);
    close(fd);
}

static void opening_safetensors_reads_no_weights(void **state) {
    (void)state;
    static const char header[] =
        "{\"t\":{\"dtype\":\"F32\",\"shape\":[1048576,4096],\"data_offsets\":[0,17179869184]}}";
    char path[32];
    safetensors *s = NULL;
    text b = {0};
    build_int(&b, sizeof header - 1, 8);
    build_bytes(&b, header, sizeof header - 1);
    int fd = build_memory_file(b.data, b.n, path);
    assert_int_equal(ftruncate(fd, (off_t)(b.n + (1ull << 34))), 0);
    text_free(&b);
    if (safetensors_open(path, &s)) fail_msg("%s", err_message());
    check_counting(safetensors_find(s, "t"));
    safetensors_close(s);
    close(fd);
}

static void a_map_is_the_file(void **state) {
    (void)state;
    char path[32];
    mapped m = {0};
    mapped_close(&m);
    int fd = build_memory_file("abc", 3, path);
    assert_int_equal(mapped_open(&m, path, "word"), 0);
    assert_int_equal(m.size, 3);
    assert_memory_equal(m.base, "abc", 3);
    assert_int_equal(mapped_refuse(&m, "word"), ERR_DATA);
    assert_string_equal(err_message(), "not a word");
    mapped_close(&m);
    assert_null(m.base);
    close(fd);
    assert_int_equal(mapped_open(&m, "/", "word"), ERR_DATA);
    assert_string_equal(err_message(), "is a folder, not a word");
    assert_null(m.base);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_map_is_the_file),
        cmocka_unit_test(opening_gguf_reads_no_weights),
        cmocka_unit_test(opening_safetensors_reads_no_weights),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
