/* GGUF: look-ups, dequantisation by hand-computed values, split sets, and every kind of damage we know of. */
#include "base/err.h"
#include "base/mem.h"
#include "tests/unit/gguf_build.h"
#include "tracer/gguf.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <sys/stat.h>

#include <cmocka.h>

enum { F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q8_0 = 8, IQ2_XXS = 16, BF16 = 30 };

/* Open what was built; the caller closes the result. */
static gguf *open_built(text *b) {
    char path[32];
    int fd = build_memory_file(b->data, b->n, path);
    gguf *g = NULL;
    int code = gguf_open(path, &g);
    close(fd);
    text_free(b);
    if (code) fail_msg("%s", err_message());
    return g;
}

static void assert_message_has(const char *part) {
    if (!strstr(err_message(), part)) fail_msg("'%s' does not hold '%s'", err_message(), part);
}

/* Opening the n bytes must fail with one line that holds `part`. */
static void refuse_bytes(const void *bytes, size_t n, const char *part) {
    char path[32];
    int fd = build_memory_file(bytes, n, path);
    gguf *g = NULL;
    int code = gguf_open(path, &g);
    close(fd);
    assert_int_equal(code, ERR_DATA);
    assert_null(g);
    assert_message_has(path);
    assert_message_has(part);
}

static void refuse(text *b, const char *part) {
    refuse_bytes(b->data, b->n, part);
    text_free(b);
}

static text started(uint64_t n_tensors, uint64_t n_keys) {
    text b = {0};
    build_start(&b, 3, n_tensors, n_keys);
    return b;
}

/* ---- metadata --------------------------------------------------------------------------------------------------- */

static gguf *open_metadata(void) {
    text b = started(0, 13);
    build_key(&b, "u8", BUILD_U8), build_int(&b, 200, 1);
    build_key(&b, "i8", BUILD_I8), build_int(&b, 0xfe, 1);
    build_key(&b, "i16", BUILD_I16), build_int(&b, 0x8000, 2);
    build_key(&b, "i32", BUILD_I32), build_int(&b, 0xffffffff, 4);
    build_key(&b, "u64", BUILD_U64), build_int(&b, 1ull << 63, 8);
    build_key(&b, "f32", BUILD_F32), build_f32(&b, 0.5f);
    build_key(&b, "f64", BUILD_F64), build_f64(&b, 1e300);
    build_key(&b, "yes", BUILD_BOOL), build_int(&b, 1, 1);
    build_key(&b, "odd", BUILD_BOOL), build_int(&b, 2, 1);
    build_key_text(&b, "name", "tiny");
    build_array(&b, "words", BUILD_TEXT, 3), build_text(&b, "a"), build_text(&b, ""), build_text(&b, "ccc");
    build_array(&b, "kinds", BUILD_U8, 2), build_int(&b, 3, 1), build_int(&b, 255, 1);
    build_array(&b, "scores", BUILD_F32, 2), build_f32(&b, -1.5f), build_f32(&b, 2.0f);
    return open_built(&b);
}

static void numbers_are_converted(void **state) {
    (void)state;
    gguf *g = open_metadata();
    int64_t i;
    double d;
    bool yes = false;
    assert_true(gguf_has(g, "u8"));
    assert_false(gguf_has(g, "u"));
    assert_int_equal(gguf_int(g, "u8", 0, 255, &i), 0);
    assert_int_equal(i, 200);
    assert_int_equal(gguf_int(g, "i8", -10, 10, &i), 0);
    assert_int_equal(i, -2);
    assert_int_equal(gguf_int(g, "i16", INT64_MIN, 0, &i), 0);
    assert_int_equal(i, -32768);
    assert_int_equal(gguf_int(g, "i32", -1, -1, &i), 0);
    assert_int_equal(i, -1);
    assert_int_equal(gguf_number(g, "f32", &d), 0);
    assert_true(d == 0.5);
    assert_int_equal(gguf_number(g, "f64", &d), 0);
    assert_true(d == 1e300);
    assert_int_equal(gguf_number(g, "i8", &d), 0);
    assert_true(d == -2);
    assert_int_equal(gguf_number(g, "u64", &d), 0);
    assert_true(d == 0x1p63);
    assert_int_equal(gguf_bool(g, "yes", &yes), 0);
    assert_true(yes);
    gguf_close(g);
}

static void text_and_arrays_are_read(void **state) {
    (void)state;
    gguf *g = open_metadata();
    const char *name;
    size_t n;
    assert_int_equal(gguf_text(g, "name", &name, &n), 0);
    assert_int_equal(n, 4);
    assert_memory_equal(name, "tiny", 4);
    gguf_string *words;
    assert_int_equal(gguf_strings(g, "words", &words, &n), 0);
    assert_int_equal(n, 3);
    assert_memory_equal(words[0].text, "a", 1);
    assert_int_equal(words[1].n, 0);
    assert_int_equal(words[2].n, 3);
    assert_memory_equal(words[2].text, "ccc", 3);
    mem_free(words);
    int64_t *kinds;
    assert_int_equal(gguf_ints(g, "kinds", &kinds, &n), 0);
    assert_int_equal(n, 2);
    assert_int_equal(kinds[0], 3);
    assert_int_equal(kinds[1], 255);
    mem_free(kinds);
    float *scores;
    assert_int_equal(gguf_floats(g, "scores", &scores, &n), 0);
    assert_int_equal(n, 2);
    assert_true(scores[0] == -1.5f && scores[1] == 2.0f);
    mem_free(scores);
    assert_int_equal(gguf_array_length(g, "words", &n), 0);
    assert_int_equal(n, 3);
    gguf_close(g);
}

static void wrong_types_are_named(void **state) {
    (void)state;
    gguf *g = open_metadata();
    int64_t i, *ints;
    double d;
    bool yes;
    const char *name;
    size_t n;
    float *floats;
    gguf_string *strings;
    assert_int_equal(gguf_int(g, "none", 0, 1, &i), ERR_DATA);
    assert_message_has(": key 'none' is missing");
    assert_int_equal(gguf_int(g, "u8", 0, 199, &i), ERR_DATA);
    assert_message_has(": key 'u8' is 200 (want 0..199)");
    assert_int_equal(gguf_int(g, "i8", 0, 199, &i), ERR_DATA);
    assert_message_has("is -2 (want 0..199)");
    assert_int_equal(gguf_int(g, "u64", 0, INT64_MAX, &i), ERR_DATA);
    assert_message_has("is 9223372036854775808 (want 0..9223372036854775807)");
    assert_int_equal(gguf_int(g, "name", 0, 1, &i), ERR_DATA);
    assert_message_has(": key 'name': expected integer, got string");
    assert_int_equal(gguf_int(g, "yes", 0, 1, &i), ERR_DATA);
    assert_message_has("expected integer, got bool");
    assert_int_equal(gguf_number(g, "name", &d), ERR_DATA);
    assert_message_has("expected number, got string");
    assert_int_equal(gguf_bool(g, "u8", &yes), ERR_DATA);
    assert_message_has("expected bool, got uint8");
    assert_int_equal(gguf_bool(g, "odd", &yes), ERR_DATA);
    assert_message_has("key 'odd': bool is 2 (want 0 or 1)");
    assert_int_equal(gguf_text(g, "f64", &name, &n), ERR_DATA);
    assert_message_has("expected string, got float64");
    assert_int_equal(gguf_floats(g, "kinds", &floats, &n), ERR_DATA);
    assert_message_has("expected float32 array, got uint8");
    assert_int_equal(gguf_floats(g, "f32", &floats, &n), ERR_DATA);
    assert_message_has("expected float32 array, got float32");
    assert_int_equal(gguf_ints(g, "scores", &ints, &n), ERR_DATA);
    assert_message_has("expected integer array, got float32 array");
    assert_int_equal(gguf_strings(g, "scores", &strings, &n), ERR_DATA);
    assert_message_has("expected string array, got float32 array");
    assert_int_equal(gguf_array_length(g, "name", &n), ERR_DATA);
    assert_message_has("expected array, got string");
    gguf_close(g);
}

static void large_array_elements_are_refused(void **state) {
    (void)state;
    text b = started(0, 1);
    build_array(&b, "big", BUILD_U64, 2), build_int(&b, 7, 8), build_int(&b, UINT64_MAX, 8);
    gguf *g = open_built(&b);
    int64_t *ints;
    size_t n;
    assert_int_equal(gguf_ints(g, "big", &ints, &n), ERR_DATA);
    assert_message_has("key 'big': element 1 is 18446744073709551615, above 2^63-1");
    gguf_close(g);
}

/* Arrays of arrays are in the format, though no known model uses them: they are stepped over. */
static void nested_arrays_are_stepped_over(void **state) {
    (void)state;
    text b = started(0, 2);
    build_array(&b, "nested", BUILD_ARRAY, 2);
    build_int(&b, BUILD_U16, 4), build_int(&b, 2, 8), build_int(&b, 0, 4);
    build_int(&b, BUILD_TEXT, 4), build_int(&b, 1, 8), build_text(&b, "x");
    build_key_u32(&b, "after", 5);
    gguf *g = open_built(&b);
    int64_t i;
    size_t n;
    gguf_string *strings;
    assert_int_equal(gguf_int(g, "after", 0, 9, &i), 0);
    assert_int_equal(i, 5);
    assert_int_equal(gguf_array_length(g, "nested", &n), 0);
    assert_int_equal(n, 2);
    assert_int_equal(gguf_strings(g, "nested", &strings, &n), ERR_DATA);
    assert_message_has("expected string array, got nested array");
    gguf_close(g);
}

/* ---- tensors ---------------------------------------------------------------------------------------------------- */

/* One tensor 't' of `rows` rows of `columns` values. */
static gguf *open_tensor(uint32_t type, uint64_t columns, uint64_t rows, const text *data) {
    text b = started(1, 0);
    build_tensor(&b, "t", 2, (uint64_t[]){columns, rows}, type, 0);
    build_align(&b, 32);
    build_bytes(&b, data->data, data->n);
    return open_built(&b);
}

static void assert_values(const float *got, const float *want, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (got[i] != want[i]) fail_msg("value %zu is %g, not %g", i, (double)got[i], (double)want[i]);
}

/* Frees `data`. */
static void assert_rows(uint32_t type, text *data, uint64_t columns, uint64_t rows, const float *want) {
    gguf *g = open_tensor(type, columns, rows, data);
    const tensor *t = gguf_find(g, "t");
    float got[64];
    assert_non_null(t);
    assert_int_equal(t->bytes, data->n);
    assert_true(columns * rows <= 64);
    assert_int_equal(tensor_rows(t, 0, rows, got), 0);
    assert_values(got, want, columns * rows);
    assert_int_equal(tensor_rows(t, rows - 1, 1, got), 0);
    assert_values(got, want + (rows - 1) * columns, columns);
    assert_int_equal(tensor_columns(t, rows - 1, 0, columns, got), 0);
    assert_values(got, want + (rows - 1) * columns, columns);
    assert_int_equal(tensor_columns(t, rows, 0, columns, got), ERR_DATA);
    assert_int_equal(tensor_columns(t, 0, columns, columns, got), ERR_DATA);
    assert_int_equal(tensor_rows(t, rows, 1, got), ERR_DATA);
    assert_int_equal(tensor_rows(t, 1, SIZE_MAX, got), ERR_DATA);
    gguf_close(g);
    text_free(data);
}

static void plain_types_have_these_values(void **state) {
    (void)state;
    text f32 = {0}, f16 = {0}, bf16 = {0};
    build_f32(&f32, 1.25f), build_f32(&f32, -3e38f), build_f32(&f32, 0), build_f32(&f32, 1e-40f);
    assert_rows(F32, &f32, 2, 2, (float[]){1.25f, -3e38f, 0, 1e-40f});
    /* 0x3c00 = 1, 0xc100 = -2.5, 0x0001 = 2^-24 (the smallest subnormal), 0x7bff = 65504 (the largest). */
    build_int(&f16, 0x7bff0001c1003c00, 8);
    assert_rows(F16, &f16, 2, 2, (float[]){1, -2.5f, 0x1p-24f, 65504});
    /* 0x3f80 = 1, 0xc020 = -2.5, 0x4049 = 3.140625, 0x0080 = 2^-126. */
    build_int(&bf16, 0x00804049c0203f80, 8);
    assert_rows(BF16, &bf16, 2, 2, (float[]){1, -2.5f, 3.140625f, 0x1p-126f});
}

/* Two blocks of Q8_0 in one row, then four plain values. */
static void parts_of_rows_are_whole_blocks(void **state) {
    (void)state;
    text b = {0}, f32 = {0};
    float got[32];
    for (int block = 0; block < 2; block++) {
        build_int(&b, 0x3400, 2);
        for (int j = 0; j < 32; j++) build_int(&b, (uint8_t)(block + j), 1);
    }
    gguf *g = open_tensor(Q8_0, 64, 1, &b);
    assert_int_equal(tensor_columns(gguf_find(g, "t"), 0, 32, 32, got), 0);
    assert_true(got[0] == 0.25f && got[31] == 8);
    assert_int_equal(tensor_columns(gguf_find(g, "t"), 0, 16, 32, got), ERR_DATA);
    assert_int_equal(tensor_columns(gguf_find(g, "t"), 0, 32, 16, got), ERR_DATA);
    gguf_close(g);
    for (int j = 0; j < 4; j++) build_f32(&f32, (float)j);
    g = open_tensor(F32, 4, 1, &f32);
    assert_int_equal(tensor_columns(gguf_find(g, "t"), 0, 1, 2, got), 0);
    assert_true(got[0] == 1 && got[1] == 2);
    gguf_close(g);
    text_free(&b);
    text_free(&f32);
}

/* d = 0.25 (0x3400) with q from -128 to 127, then d = -2 (0xc000). */
static void q8_0_has_these_values(void **state) {
    (void)state;
    text b = {0};
    float want[64];
    build_int(&b, 0x3400, 2);
    for (int j = 0; j < 32; j++) {
        int q = j == 31 ? 127 : j * 8 - 128; /* -128, -120 .. 112, 127 */
        build_int(&b, (uint8_t)q, 1);
        want[j] = (float)q * 0.25f;
    }
    build_int(&b, 0xc000, 2);
    for (int j = 0; j < 32; j++) build_int(&b, j == 1 ? 3 : 0, 1), want[32 + j] = j == 1 ? -6.0f : 0.0f;
    assert_true(want[0] == -32.0f && want[31] == 31.75f);
    assert_rows(Q8_0, &b, 32, 2, want);
}

/* Byte j holds value j in its low half and value j+16 in its high half: bytes 0xf0, 0xe1, .. 0x0f give q = 0..15 and
 * then 15..0. */
static void nibbles_counting_up_and_down(text *b) {
    for (int j = 0; j < 16; j++) build_int(b, (uint64_t)((15 - j) << 4 | j), 1);
}

static void q4_0_has_these_values(void **state) {
    (void)state;
    text b = {0};
    build_int(&b, 0x3800, 2); /* d = 0.5; values (q - 8) / 2 */
    nibbles_counting_up_and_down(&b);
    assert_rows(Q4_0, &b, 32, 1,
                (float[]){-4, -3.5f, -3, -2.5f, -2, -1.5f, -1, -0.5f, 0,  0.5f,  1,  1.5f,  2,  2.5f,  3, 3.5f, 3.5f,
                          3,  2.5f,  2,  1.5f,  1,  0.5f,  0,  -0.5f, -1, -1.5f, -2, -2.5f, -3, -3.5f, -4});
}

static void q4_1_has_these_values(void **state) {
    (void)state;
    text b = {0};
    build_int(&b, 0x4000, 2); /* d = 2 */
    build_int(&b, 0xbc00, 2); /* m = -1; values 2q - 1 */
    nibbles_counting_up_and_down(&b);
    assert_rows(Q4_1, &b, 32, 1, (float[]){-1, 1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29,
                                           29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9,  7,  5,  3,  1,  -1});
}

static void other_types_are_refused_by_name(void **state) {
    (void)state;
    text data = {0};
    for (int i = 0; i < 66; i++) build_int(&data, 0, 1);
    gguf *g = open_tensor(IQ2_XXS, 256, 1, &data);
    const tensor *t = gguf_tensor_at(g, 0);
    float out[256];
    assert_string_equal(t->type_name, "IQ2_XXS");
    assert_int_equal(tensor_rows(t, 0, 1, out), ERR_DATA);
    assert_message_has("tensor 't': type IQ2_XXS is not supported (these are: F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, "
                       "Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, BF16, MXFP4)");
    gguf_close(g);
    text_free(&data);
}

/* Keys u32 alignment 8, tensors 'b' [2,3] at 8 and 'a' [4] at 32, F32 with values 0, 1, 2 .. in file order. */
static text valid_file(uint32_t version) {
    text b = {0};
    build_start(&b, version, 2, 3);
    build_key_u32(&b, "general.alignment", 8);
    build_key_text(&b, "general.architecture", "llama");
    build_array(&b, "words", BUILD_TEXT, 2), build_text(&b, "one"), build_text(&b, "two");
    build_tensor(&b, "b", 2, (uint64_t[]){2, 3}, F32, 8);
    build_tensor(&b, "a", 1, (uint64_t[]){4}, F32, 32);
    build_align(&b, 8);
    for (int i = 0; i < 12; i++) build_f32(&b, (float)i);
    return b;
}

static void tensors_are_found(void **state) {
    (void)state;
    for (uint32_t version = 2; version <= 3; version++) {
        text b = valid_file(version);
        gguf *g = open_built(&b);
        const tensor *t = gguf_find(g, "a");
        float out[6];
        assert_int_equal(gguf_n_tensors(g), 2);
        assert_string_equal(gguf_tensor_at(g, 0)->name, "b");
        assert_ptr_equal(gguf_tensor_at(g, 1), t);
        assert_null(gguf_find(g, "c"));
        assert_int_equal(t->n_dims, 1);
        assert_int_equal(t->dims[0], 4);
        assert_int_equal(t->dims[1], 1);
        assert_int_equal(t->dims[3], 1);
        assert_int_equal(t->bytes, 16);
        assert_int_equal(tensor_rows(t, 0, 1, out), 0);
        assert_true(out[0] == 8 && out[3] == 11);
        t = gguf_find(g, "b");
        assert_int_equal(t->dims[1], 3);
        assert_int_equal(tensor_rows(t, 1, 2, out), 0);
        assert_true(out[0] == 4 && out[3] == 7);
        gguf_close(g);
    }
}

/* Whatever the length, a cut file is an error; the bytes after the cut are not there to be read by mistake. */
static void every_cut_is_an_error(void **state) {
    (void)state;
    text b = valid_file(3);
    for (size_t n = 0; n < b.n; n++) refuse_bytes(b.data, n, n == 0 ? "is empty" : "file has");
    refuse_bytes(b.data, b.n - 1, "tensor 'a' needs bytes 264..280, file has 279");
    refuse_bytes(b.data, b.n - 17, "tensor 'b' needs bytes 240..264, file has 263");
    assert_int_equal(b.n, 280);
    gguf_close(open_built(&b));
}

/* ---- damage ----------------------------------------------------------------------------------------------------- */

static void other_files_are_named(void **state) {
    (void)state;
    static const char lfs[] =
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 98362432\n";
    static const char html[] = "\n <!DOCTYPE html><html><head><title>401</title></head></html>";
    gguf *g = NULL;
    refuse_bytes(lfs, sizeof lfs - 1, "looks like a Git LFS pointer, not weights");
    refuse_bytes(html, sizeof html - 1, "looks like an HTML page, not weights");
    refuse_bytes("<HTML>", 6, "looks like an HTML page");
    refuse_bytes("PK\3\4aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", 32, "not a GGUF file");
    refuse_bytes("    ", 4, "not a GGUF file");
    refuse_bytes("\2\0\0\0\0\0\0\0{}", 10, "looks like a safetensors file: give the folder that holds it");
    refuse_bytes("\2\0\0\0\0\0\0\0", 8, "not a GGUF file");
    refuse_bytes("", 0, "is empty");
    assert_int_equal(gguf_open("/", &g), ERR_DATA);
    assert_message_has("/: is a folder, not a GGUF file");
    assert_int_equal(gguf_open("/dev/null", &g), ERR_DATA);
    assert_message_has("/dev/null: is not a regular file");
    assert_int_equal(gguf_open("/nowhere/x.gguf", &g), ERR_DATA);
    assert_message_has("/nowhere/x.gguf: cannot be opened: No such file or directory");
}

static void versions_are_checked(void **state) {
    (void)state;
    static const struct {
        uint32_t version;
        const char *part;
    } cases[] = {
        {0x03000000, "big-endian GGUF is not supported"},
        {0x02000000, "big-endian GGUF is not supported"},
        {0, "GGUF version 0 is not supported (want 2 or 3)"},
        {1, "GGUF version 1 is not supported (want 2 or 3)"},
        {99, "GGUF version 99 is not supported"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        text b = {0};
        build_start(&b, cases[i].version, 0, 0);
        refuse(&b, cases[i].part);
    }
}

static void counts_are_checked(void **state) {
    (void)state;
    text b = started(1ull << 60, 0);
    refuse(&b, "claims 1152921504606846976 tensors, file has 24 bytes");
    b = started(0, 1ull << 60);
    refuse(&b, "claims 1152921504606846976 keys, file has 24 bytes");
    b = started(0, UINT64_MAX);
    refuse(&b, "claims 18446744073709551615 keys");
}

static void strings_are_checked(void **state) {
    (void)state;
    text b = started(0, 1);
    build_int(&b, 1ull << 63, 8), build_int(&b, 0, 8);
    refuse(&b, "key 1: name needs 9223372036854775808 bytes at byte 32, file has 40");
    b = started(0, 1);
    build_key(&b, "k", BUILD_TEXT), build_int(&b, UINT64_MAX, 8);
    refuse(&b, "key 'k': string needs 18446744073709551615 bytes at byte 45, file has 45");
    b = started(0, 1);
    build_array(&b, "k", BUILD_TEXT, 2), build_text(&b, "fine"), build_int(&b, 1ull << 63, 8);
    refuse(&b, "key 'k': string needs 9223372036854775808 bytes");
}

static void keys_are_checked(void **state) {
    (void)state;
    text b = started(0, 2);
    build_key_u32(&b, "first", 1), build_key_u32(&b, "", 1);
    refuse(&b, "key 2 has an empty name");
    b = started(0, 3);
    build_key_u32(&b, "same", 1), build_key_u32(&b, "other", 1), build_key_text(&b, "same", "x");
    refuse(&b, "two keys named 'same'");
    b = started(0, 1);
    build_int(&b, 65536, 8);
    for (int i = 0; i < 65536; i++) build_bytes(&b, "k", 1);
    build_int(&b, BUILD_U8, 4), build_int(&b, 0, 1);
    refuse(&b, "key 1: name of 65536 bytes (at most 65535)");
    b = started(0, 1);
    build_key(&b, "k", 13), build_int(&b, 0, 8);
    refuse(&b, "key 'k': unknown value type 13");
}

static void arrays_are_checked(void **state) {
    (void)state;
    text b = started(0, 1);
    build_array(&b, "k", 13, 1), build_int(&b, 0, 8);
    refuse(&b, "key 'k': unknown array type 13");
    b = started(0, 1);
    build_array(&b, "k", BUILD_U64, 1ull << 61); /* times 8 is 0 in 64 bits */
    refuse(&b, "key 'k': uint64 array needs 18446744073709551615 bytes");
    b = started(0, 1);
    build_array(&b, "k", BUILD_F32, 2), build_f32(&b, 1);
    refuse(&b, "key 'k': float32 array needs 8 bytes at byte 49, file has 53");
    b = started(0, 1);
    build_array(&b, "k", BUILD_ARRAY, UINT64_MAX);
    refuse(&b, "key 'k': array type needs 4 bytes");
}

static text nested(int depth) {
    text b = started(0, 1);
    build_array(&b, "k", depth > 1 ? BUILD_ARRAY : BUILD_U8, 1);
    for (int i = 2; i <= depth; i++) build_int(&b, i < depth ? BUILD_ARRAY : BUILD_U8, 4), build_int(&b, 1, 8);
    build_int(&b, 0, 1);
    return b;
}

static void nesting_is_bounded(void **state) {
    (void)state;
    text b = nested(4);
    gguf_close(open_built(&b));
    b = nested(5);
    refuse(&b, "key 'k': arrays nested deeper than 4");
    b = nested(100000);
    refuse(&b, "key 'k': arrays nested deeper than 4");
}

static void refuse_alignment(uint32_t type, uint64_t value, int n, const char *part) {
    text b = started(0, 1);
    build_key(&b, "general.alignment", type), build_int(&b, value, n);
    refuse(&b, part);
}

static void alignment_is_checked(void **state) {
    (void)state;
    refuse_alignment(BUILD_U32, 0, 4, "invalid general.alignment 0 (want a power of two, 1..1 MiB)");
    refuse_alignment(BUILD_U32, 3, 4, "invalid general.alignment 3 (want a power of two, 1..1 MiB)");
    refuse_alignment(BUILD_U32, 1u << 31, 4, "invalid general.alignment 2147483648 (want a power of two, 1..1 MiB)");
    refuse_alignment(BUILD_I32, 32, 4, "invalid general.alignment of type int32");
    refuse_alignment(BUILD_U64, 32, 8, "invalid general.alignment of type uint64");
    text b = started(1, 1);
    build_key_u32(&b, "general.alignment", 1u << 20);
    build_tensor(&b, "t", 1, (uint64_t[]){1}, F32, 0);
    build_align(&b, 1 << 20);
    build_f32(&b, 1);
    gguf_close(open_built(&b));
    b = started(1, 1);
    build_key_u32(&b, "general.alignment", 1);
    build_tensor(&b, "t", 1, (uint64_t[]){1}, F32, 0); /* ends at byte 90 */
    assert_int_equal(b.n, 90);                         /* so the value lies unaligned */
    build_f32(&b, 7);
    gguf *g = open_built(&b);
    float out;
    assert_int_equal(tensor_rows(gguf_find(g, "t"), 0, 1, &out), 0);
    assert_true(out == 7);
    gguf_close(g);
}

/* One tensor with these facts and `room` bytes of data. */
static void refuse_tensor(const char *name, uint32_t n_dims, const uint64_t *dims, uint32_t type, uint64_t offset,
                          int room, const char *part) {
    text b = started(1, 0);
    build_tensor(&b, name, n_dims, dims, type, offset);
    build_align(&b, 32);
    for (int i = 0; i < room; i++) build_int(&b, 0, 1);
    refuse(&b, part);
}

static void dimensions_are_checked(void **state) {
    (void)state;
    static const uint64_t none[5] = {32, 0, 1, 1, 1}, zero[1] = {0}, one[5] = {1, 1, 1, 1, 1};
    static const uint64_t huge[2] = {1ull << 40, 1ull << 40}, wide[1] = {1ull << 63}, odd[2] = {48, 2};
    refuse_tensor("t", 2, none, F32, 0, 64, "tensor 't': dimension 1 is 0");
    refuse_tensor("t", 1, zero, F32, 0, 64, "tensor 't': dimension 0 is 0");
    refuse_tensor("t", 0, one, F32, 0, 64, "tensor 't': 0 dimensions (want 1..4)");
    refuse_tensor("t", 5, one, F32, 0, 64, "tensor 't': 5 dimensions (want 1..4)");
    refuse_tensor("t", 2, huge, F32, 0, 64,
                  "tensor 't': 1099511627776 x 1099511627776 x 1 x 1 values overflow 64 bits");
    refuse_tensor("t", 1, wide, F32, 0, 64, "tensor 't': 9223372036854775808 x 1 x 1 x 1 values overflow 64 bits");
    refuse_tensor("t", 1, wide, Q4_0, 0, 64, "values overflow 64 bits");
    refuse_tensor("t", 2, odd, Q4_0, 0, 64, "tensor 't': rows of 48 values are not a multiple of Q4_0's block of 32");
    refuse_tensor("t", 1, one, 77, 0, 64, "tensor 't': unknown type 77");
}

static void names_are_checked(void **state) {
    (void)state;
    static const uint64_t one[1] = {1};
    char name[66];
    memset(name, 'n', 65);
    name[65] = 0;
    refuse_tensor(name, 1, one, F32, 0, 64, "tensor 1: name of 65 bytes (at most 64)");
    refuse_tensor("", 1, one, F32, 0, 64, "tensor 1: the name is empty");
    text b = started(1, 0);
    build_int(&b, 3, 8), build_bytes(&b, "a\0b", 3);
    build_int(&b, 1, 4), build_int(&b, 1, 8), build_int(&b, F32, 4), build_int(&b, 0, 8), build_align(&b, 64);
    refuse(&b, "tensor 1: the name holds a NUL byte");
    name[64] = 0;
    b = started(1, 0);
    build_tensor(&b, name, 1, one, F32, 0);
    build_align(&b, 32);
    build_f32(&b, 1);
    gguf *g = open_built(&b);
    assert_non_null(gguf_find(g, name));
    gguf_close(g);
}

static void offsets_are_checked(void **state) {
    (void)state;
    static const uint64_t eight[1] = {8};
    /* The list of tensors ends at byte 24 + 8+21 + 4 + 8 + 4 + 8 = 77, so the data begins at 96. */
    const char *name = "blk.1.ffn_down.weight";
    refuse_tensor(name, 1, eight, F32, 4, 64,
                  "tensor 'blk.1.ffn_down.weight': offset 4 is not a multiple of the alignment 32");
    refuse_tensor(name, 1, eight, F32, 0, 31, "tensor 'blk.1.ffn_down.weight' needs bytes 96..128, file has 127");
    refuse_tensor(name, 1, eight, F32, 64, 64, "tensor 'blk.1.ffn_down.weight' needs bytes 160..192, file has 160");
    refuse_tensor(name, 1, eight, F32, 1ull << 62, 64,
                  "needs bytes 4611686018427388000..4611686018427388032, file has");
    refuse_tensor(name, 1, eight, F32, UINT64_MAX - 31, 64,
                  "offset 18446744073709551584 is past the end, file has 160");
}

static void refuse_pair(const char *first, const char *second, uint64_t second_offset, const char *part) {
    text b = started(2, 0);
    build_tensor(&b, first, 1, (uint64_t[]){16}, F32, 0);
    build_tensor(&b, second, 1, (uint64_t[]){8}, F32, second_offset);
    build_align(&b, 32);
    for (int i = 0; i < 24; i++) build_f32(&b, 0);
    refuse(&b, part);
}

static void tensors_do_not_collide(void **state) {
    (void)state;
    refuse_pair("t", "t", 64, "two tensors named 't'");
    refuse_pair("t", "u", 32, "tensors 't' and 'u' overlap");
}

/* ---- split sets ------------------------------------------------------------------------------------------------- */

static char folder[64];

static int make_folder(void **state) {
    (void)state;
    strcpy(folder, "/tmp/test_gguf.XXXXXX");
    return mkdtemp(folder) ? 0 : -1;
}

static const char *shard_path(int no, int count) {
    static char path[128];
    snprintf(path, sizeof path, "%s/m-%05d-of-%05d.gguf", folder, no, count);
    return path;
}

static int remove_folder(void **state) {
    (void)state;
    char odd[128];
    snprintf(odd, sizeof odd, "%s/odd.gguf", folder);
    unlink(odd);
    for (int i = 1; i <= 3; i++) unlink(shard_path(i, 3));
    return rmdir(folder);
}

/* Shard `no` (from 0) of 3 holds tensor 't<no>' with the single value no + 0.5; the first also holds key 'name'. */
static text shard_bytes(int no, int count, int total) {
    text b = started(1, no == 0 ? 4 : 3);
    char name[16];
    snprintf(name, sizeof name, "t%d", no);
    if (no == 0) build_key_text(&b, "name", "set");
    build_key(&b, "split.no", BUILD_U16), build_int(&b, (uint64_t)no, 2);
    build_key(&b, "split.count", BUILD_U16), build_int(&b, (uint64_t)count, 2);
    build_key(&b, "split.tensors.count", BUILD_I32), build_int(&b, (uint64_t)total, 4);
    build_tensor(&b, name, 1, (uint64_t[]){1}, F32, 0);
    build_align(&b, 32);
    build_f32(&b, (float)no + 0.5f);
    return b;
}

static void save_shard(int file, int no, int count, int total) {
    text b = shard_bytes(no, count, total);
    build_save(shard_path(file + 1, 3), b.data, b.n);
    text_free(&b);
}

static void save_set(void) {
    for (int i = 0; i < 3; i++) save_shard(i, i, 3, 3);
}

static void any_shard_opens_the_set(void **state) {
    (void)state;
    save_set();
    for (int given = 1; given <= 3; given++) {
        gguf *g = NULL;
        const char *name;
        size_t n;
        if (gguf_open(shard_path(given, 3), &g)) fail_msg("%s", err_message());
        assert_string_equal(gguf_path(g), shard_path(given, 3));
        assert_int_equal(gguf_n_tensors(g), 3);
        assert_int_equal(gguf_text(g, "name", &name, &n), 0);
        for (int i = 0; i < 3; i++) {
            const tensor *t = gguf_tensor_at(g, (size_t)i);
            float out;
            assert_int_equal(t->name[1], '0' + i);
            assert_int_equal(tensor_rows(t, 0, 1, &out), 0);
            assert_true(out == (float)i + 0.5f);
        }
        gguf_close(g);
    }
}

static void refuse_set(int given, const char *part) {
    gguf *g = NULL;
    assert_int_equal(gguf_open(shard_path(given, 3), &g), ERR_DATA);
    assert_null(g);
    assert_message_has(part);
}

static void broken_sets_are_refused(void **state) {
    (void)state;
    char odd[128];
    save_set();
    unlink(shard_path(2, 3));
    refuse_set(3, "m-00002-of-00003.gguf: shard 2 of 3 is missing");
    refuse_set(1, "m-00002-of-00003.gguf: shard 2 of 3 is missing");
    build_save(shard_path(2, 3), "GGUF", 4);
    refuse_set(1, "m-00002-of-00003.gguf: version needs 4 bytes");
    save_shard(1, 0, 3, 3);
    refuse_set(1, "m-00002-of-00003.gguf: is shard 1 of 3 by its metadata, not 2 of 3");
    save_shard(1, 1, 4, 3);
    refuse_set(1, "m-00002-of-00003.gguf: is shard 2 of 4 by its metadata, not 2 of 3");
    save_set();
    save_shard(0, 0, 3, 4);
    refuse_set(2, "split.tensors.count is 4, the 3 shards hold 3 tensors");
    snprintf(odd, sizeof odd, "%s/odd.gguf", folder);
    save_set();
    assert_int_equal(rename(shard_path(1, 3), odd), 0);
    gguf *g = NULL;
    assert_int_equal(gguf_open(odd, &g), ERR_DATA);
    assert_message_has("odd.gguf: is shard 1 of 3, but its name does not end in -00001-of-00003.gguf");
    text b = shard_bytes(5, 3, 3);
    refuse(&b, "key 'split.no' is 5 (want 0..2)");
}

/* The name of a tensor may not come twice in the whole set either. */
static void a_set_shares_its_names(void **state) {
    (void)state;
    save_set();
    text b = started(1, 2);
    build_key(&b, "split.no", BUILD_U16), build_int(&b, 1, 2);
    build_key(&b, "split.count", BUILD_U16), build_int(&b, 3, 2);
    build_tensor(&b, "t0", 1, (uint64_t[]){1}, F32, 0);
    build_align(&b, 32);
    build_f32(&b, 1);
    build_save(shard_path(2, 3), b.data, b.n);
    text_free(&b);
    refuse_set(1, "two tensors named 't0'");
}

/* A set of one is one file, whatever its name. */
static void a_set_of_one_is_a_file(void **state) {
    (void)state;
    text b = shard_bytes(0, 1, 1);
    gguf *g = open_built(&b);
    assert_int_equal(gguf_n_tensors(g), 1);
    gguf_close(g);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(numbers_are_converted),
        cmocka_unit_test(text_and_arrays_are_read),
        cmocka_unit_test(wrong_types_are_named),
        cmocka_unit_test(large_array_elements_are_refused),
        cmocka_unit_test(nested_arrays_are_stepped_over),
        cmocka_unit_test(plain_types_have_these_values),
        cmocka_unit_test(parts_of_rows_are_whole_blocks),
        cmocka_unit_test(q8_0_has_these_values),
        cmocka_unit_test(q4_0_has_these_values),
        cmocka_unit_test(q4_1_has_these_values),
        cmocka_unit_test(other_types_are_refused_by_name),
        cmocka_unit_test(tensors_are_found),
        cmocka_unit_test(every_cut_is_an_error),
        cmocka_unit_test(other_files_are_named),
        cmocka_unit_test(versions_are_checked),
        cmocka_unit_test(counts_are_checked),
        cmocka_unit_test(strings_are_checked),
        cmocka_unit_test(keys_are_checked),
        cmocka_unit_test(arrays_are_checked),
        cmocka_unit_test(nesting_is_bounded),
        cmocka_unit_test(alignment_is_checked),
        cmocka_unit_test(dimensions_are_checked),
        cmocka_unit_test(names_are_checked),
        cmocka_unit_test(offsets_are_checked),
        cmocka_unit_test(tensors_do_not_collide),
        cmocka_unit_test_setup_teardown(any_shard_opens_the_set, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(broken_sets_are_refused, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(a_set_shares_its_names, make_folder, remove_folder),
        cmocka_unit_test(a_set_of_one_is_a_file),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
