/* safetensors: what a header says, sets of files, and every kind of damage we know of. */
#include "base/err.h"
#include "tests/unit/gguf_build.h"
#include "tracer/safetensors.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <sys/stat.h>

#include <cmocka.h>

/* ---- building --------------------------------------------------------------------------------------------------- */

/* The length, the header and n bytes of data: 0, 1, 2 .. */
static text file_of(const char *header, size_t n) {
    text b = {0};
    build_int(&b, strlen(header), 8);
    build_bytes(&b, header, strlen(header));
    for (size_t i = 0; i < n; i++) build_int(&b, i, 1);
    return b;
}

static void assert_message_has(const char *part) {
    if (!strstr(err_message(), part)) fail_msg("'%s' does not hold '%s'", err_message(), part);
}

/* Frees b; the caller closes the result. */
static safetensors *open_built(text *b) {
    char path[32];
    int fd = build_memory_file(b->data, b->n, path);
    safetensors *s = NULL;
    int code = safetensors_open(path, &s);
    close(fd);
    text_free(b);
    if (code) fail_msg("%s", err_message());
    return s;
}

/* Opening the n bytes must fail with one line that holds `part`. */
static void refuse_bytes(const void *bytes, size_t n, const char *part) {
    char path[32];
    int fd = build_memory_file(bytes, n, path);
    safetensors *s = NULL;
    int code = safetensors_open(path, &s);
    close(fd);
    assert_int_equal(code, ERR_DATA);
    assert_null(s);
    assert_message_has(path);
    assert_message_has(part);
}

static void refuse(const char *header, size_t n, const char *part) {
    text b = file_of(header, n);
    refuse_bytes(b.data, b.n, part);
    text_free(&b);
}

/* ---- what a file says ------------------------------------------------------------------------------------------- */

/* Two tensors of which the second in the header lies first in the file, and one with more than four dimensions. */
static void tensors_are_found(void **state) {
    (void)state;
    text b = file_of("{\"__metadata__\":{\"format\":\"pt\"},"
                     "\"b.weight\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[12,36]},"
                     "\"a\":{\"dtype\":\"BF16\",\"shape\":[3,2],\"data_offsets\":[0,12]},"
                     "\"deep\":{\"dtype\":\"F16\",\"shape\":[2,1,3,1,1,2],\"data_offsets\":[36,60]},"
                     "\"one\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[60,64]}}   ",
                     64);
    safetensors *s = open_built(&b);
    assert_int_equal(safetensors_n_tensors(s), 4);
    assert_string_equal(safetensors_tensor_at(s, 0)->name, "a");
    assert_string_equal(safetensors_tensor_at(s, 1)->name, "b.weight");
    assert_null(safetensors_find(s, "b"));
    assert_null(safetensors_find(s, "__metadata__"));
    const tensor *t = safetensors_find(s, "b.weight");
    assert_ptr_equal(t, safetensors_tensor_at(s, 1));
    assert_true(t->n_dims == 2 && t->dims[0] == 3 && t->dims[1] == 2 && t->dims[2] == 1 && t->dims[3] == 1);
    assert_true(t->type == 0 && t->bytes == 24 && *(const unsigned char *)t->data == 12);
    assert_string_equal(t->type_name, "F32");
    t = safetensors_find(s, "deep");
    assert_true(t->n_dims == 4 && t->dims[0] == 2 && t->dims[1] == 1 && t->dims[2] == 1 && t->dims[3] == 6);
    t = safetensors_find(s, "one");
    assert_true(t->n_dims == 0 && t->dims[0] == 1 && t->dims[3] == 1);
    safetensors_close(s);
}

/* Values of all three types, by row; the bytes are those of the hand-computed values. */
static void rows_are_read(void **state) {
    (void)state;
    text b = file_of("{\"f\":{\"dtype\":\"F32\",\"shape\":[2,1],\"data_offsets\":[0,8]},"
                     "\"h\":{\"dtype\":\"F16\",\"shape\":[2,2],\"data_offsets\":[8,16]},"
                     "\"x\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[16,20]}}",
                     0);
    float out[4];
    build_f32(&b, 1.5f), build_f32(&b, -2);
    build_int(&b, 0x7bff0001c1003c00, 8); /* 1, -2.5, 2^-24, 65504 */
    build_int(&b, 0xc0203f80, 4);         /* 1, -2.5 */
    safetensors *s = open_built(&b);
    assert_int_equal(tensor_rows(safetensors_find(s, "f"), 1, 1, out), 0);
    assert_true(out[0] == -2);
    assert_int_equal(tensor_rows(safetensors_find(s, "h"), 0, 2, out), 0);
    assert_true(out[0] == 1 && out[1] == -2.5f && out[2] == 0x1p-24f && out[3] == 65504);
    assert_int_equal(tensor_rows(safetensors_find(s, "x"), 0, 1, out), 0);
    assert_true(out[0] == 1 && out[1] == -2.5f);
    assert_int_equal(tensor_rows(safetensors_find(s, "h"), 1, 2, out), ERR_DATA);
    safetensors_close(s);
}

static void other_types_are_refused_when_read(void **state) {
    (void)state;
    text b = file_of("{\"mask\":{\"dtype\":\"BOOL\",\"shape\":[4],\"data_offsets\":[0,4]},"
                     "\"n\":{\"dtype\":\"I64\",\"shape\":[1],\"data_offsets\":[4,12]},"
                     "\"four\":{\"dtype\":\"F4\",\"shape\":[2,4],\"data_offsets\":[12,16]}}",
                     16);
    safetensors *s = open_built(&b);
    float out[4];
    assert_int_equal(tensor_rows(safetensors_find(s, "mask"), 0, 1, out), ERR_DATA);
    assert_message_has("tensor 'mask': type BOOL is not supported (these are: F32, F16, BF16)");
    assert_int_equal(tensor_rows(safetensors_find(s, "n"), 0, 1, out), ERR_DATA);
    assert_message_has("tensor 'n': type I64 is not supported");
    assert_int_equal(tensor_rows(safetensors_find(s, "four"), 0, 1, out), ERR_DATA);
    assert_message_has("tensor 'four': type F4 is not supported");
    safetensors_close(s);
}

/* Whatever stands at the end of a name in JSON is read as JSON says. */
static void names_are_json(void **state) {
    (void)state;
    text b = file_of("{\"a\\u0041\\n\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1);
    safetensors *s = open_built(&b);
    assert_non_null(safetensors_find(s, "aA\n"));
    safetensors_close(s);
    b = file_of("{}", 0);
    s = open_built(&b);
    assert_int_equal(safetensors_n_tensors(s), 0);
    assert_null(safetensors_find(s, "a"));
    safetensors_close(s);
}

/* ---- damage ----------------------------------------------------------------------------------------------------- */

#define ONE(dtype, shape, offsets) "{\"t\":{\"dtype\":" dtype ",\"shape\":" shape ",\"data_offsets\":" offsets "}}"

static void other_files_are_named(void **state) {
    (void)state;
    static const char lfs[] =
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 98362432\n";
    safetensors *s = NULL;
    refuse_bytes(lfs, sizeof lfs - 1, "looks like a Git LFS pointer, not weights");
    refuse_bytes("<!DOCTYPE html><html>", 21, "looks like an HTML page, not weights");
    refuse_bytes("PK\3\4aaaaaaaaaaaaaaaaaaaaaaaaaaaa", 32, "not a safetensors file");
    refuse_bytes("GGUF\3\0\0\0aaaaaaaaaaaaaa", 22, "not a safetensors file");
    refuse_bytes("\0\0\0\0\0\0\0", 7, "not a safetensors file");
    refuse_bytes("", 0, "is empty");
    assert_int_equal(safetensors_open("/nowhere/x.safetensors", &s), ERR_DATA);
    assert_message_has("/nowhere/x.safetensors: cannot be opened: No such file or directory");
    assert_int_equal(safetensors_open("/dev/null", &s), ERR_DATA);
    assert_message_has("/dev/null: is not a regular file");
    assert_null(s);
}

static void lengths_are_checked(void **state) {
    (void)state;
    text b = {0};
    build_int(&b, UINT64_MAX, 8), build_bytes(&b, "{}", 2);
    refuse_bytes(b.data, b.n, "not a safetensors file");
    text_free(&b);
    build_int(&b, 3, 8), build_bytes(&b, "{}", 2);
    refuse_bytes(b.data, b.n, "header needs 3 bytes at byte 8, file has 10");
    text_free(&b);
    build_int(&b, 0, 8), build_bytes(&b, "{}", 2);
    refuse_bytes(b.data, b.n, "header does not begin with '{'");
    text_free(&b);
    refuse(" {}", 0, "header does not begin with '{'");
    refuse("[]", 0, "header does not begin with '{'");
}

/* A file of 200 MB (with nothing in it) may not say that its header has more than 100. */
static void headers_are_bounded(void **state) {
    (void)state;
    char path[32];
    uint64_t length = 100000001;
    safetensors *s = NULL;
    int fd = build_memory_file(&length, sizeof length, path);
    assert_int_equal(ftruncate(fd, 200000000), 0);
    assert_int_equal(safetensors_open(path, &s), ERR_DATA);
    assert_message_has("header of 100000001 bytes (at most 100000000)");
    close(fd);
}

static void json_is_checked(void **state) {
    (void)state;
    refuse("{\"t\":", 0, "header is no JSON at byte 4 of it");
    refuse("{} x", 0, "header is no JSON at byte 3 of it");
    refuse("{\"t\":3}", 0, "tensor 't': is no JSON object");
    refuse("{\"\":{}}", 0, "a tensor's name is empty");
    char deep[4096] = "{\"t\":";
    memset(deep + 5, '[', 4000);
    refuse(deep, 0, "header is no JSON at byte");
    text b = file_of("{}", 0);
    b.data[0] = 3; /* and a NUL behind the object */
    build_int(&b, 0, 1);
    refuse_bytes(b.data, b.n, "header is no JSON at byte 2 of it");
    text_free(&b);
}

static void fields_are_checked(void **state) {
    (void)state;
    refuse("{\"t\":{}}", 0, "tensor 't': dtype is missing or no text");
    refuse(ONE("1", "[1]", "[0,4]"), 4, "tensor 't': dtype is missing or no text");
    refuse(ONE("\"F31\"", "[1]", "[0,4]"), 4, "tensor 't': unknown dtype 'F31'");
    refuse("{\"t\":{\"dtype\":\"F32\"}}", 4, "tensor 't': shape is missing or no list");
    refuse(ONE("\"F32\"", "4", "[0,4]"), 4, "tensor 't': shape is missing or no list");
    refuse(ONE("\"F32\"", "[1,-1]", "[0,4]"), 4, "tensor 't': dimension 1 is no size");
    refuse(ONE("\"F32\"", "[1.5]", "[0,4]"), 4, "tensor 't': dimension 0 is no size");
    refuse(ONE("\"F32\"", "[1e300]", "[0,4]"), 4, "tensor 't': dimension 0 is no size");
    refuse(ONE("\"F32\"", "[1,null]", "[0,4]"), 4, "tensor 't': dimension 1 is no size");
    refuse(ONE("\"F32\"", "[2,0,1]", "[0,0]"), 0, "tensor 't': dimension 1 is 0");
    refuse(ONE("\"F32\"", "[1099511627776,1099511627776]", "[0,4]"), 4,
           "tensor 't': the values of its shape overflow 64 bits");
    refuse(ONE("\"F32\"", "[1099511627776,8388608]", "[0,0]"), 0,
           "tensor 't': 9223372036854775808 values of F32 do not fill 0 bytes");
    char name[256] = "{\"";
    memset(name + 2, 'n', 128);
    strcpy(name + 130, "\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}");
    refuse(name, 1, "name of 128 bytes (at most 127)");
}

static void offsets_are_checked(void **state) {
    (void)state;
    refuse("{\"t\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "tensor 't': data_offsets are no two sizes");
    refuse(ONE("\"F32\"", "[1]", "[0]"), 4, "tensor 't': data_offsets are no two sizes");
    refuse(ONE("\"F32\"", "[1]", "[0,4,8]"), 8, "tensor 't': data_offsets are no two sizes");
    refuse(ONE("\"F32\"", "[1]", "[0,\"4\"]"), 4, "tensor 't': data_offsets are no two sizes");
    refuse(ONE("\"F32\"", "[1]", "[8,4]"), 8, "tensor 't': data_offsets [8, 4] end before they begin");
    refuse(ONE("\"F32\"", "[2]", "[0,8]"), 7, "tensor 't': data_offsets reach to byte 8 of the data, file has 7");
    refuse(ONE("\"F32\"", "[2]", "[0,9007199254740992]"), 8, "reach to byte 9007199254740992 of the data, file has 8");
    refuse(ONE("\"F32\"", "[2]", "[0,4]"), 4, "tensor 't': 2 values of F32 do not fill 4 bytes");
    refuse(ONE("\"F4\"", "[3]", "[0,2]"), 2, "tensor 't': 3 values of F4 do not fill 2 bytes");
    refuse(ONE("\"F32\"", "[1]", "[4,8]"), 8, "4 bytes before tensor 't' belong to none");
    refuse(ONE("\"F32\"", "[1]", "[0,4]"), 6, "the last 2 bytes belong to no tensor");
    refuse("{}", 1, "the last 1 bytes belong to no tensor");
}

static void tensors_do_not_collide(void **state) {
    (void)state;
#define U8(name, from, to) "\"" name "\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[" from "," to "]}"
    refuse("{" U8("t", "0", "2") "," U8("u", "1", "3") "}", 3, "tensors 't' and 'u' overlap");
    refuse("{" U8("t", "0", "2") "," U8("t", "2", "4") "}", 4, "two tensors named 't'");
    refuse("{" U8("t", "0", "2") "," U8("u", "3", "5") "}", 5, "1 bytes before tensor 'u' belong to none");
}

/* Whatever the length, a cut file is an error. */
static void every_cut_is_an_error(void **state) {
    (void)state;
    text b = file_of("{" U8("t", "0", "2") "," U8("u", "2", "4") "}", 4);
    for (size_t n = 0; n < b.n; n++) refuse_bytes(b.data, n, "");
    refuse_bytes(b.data, b.n - 1, "tensor 'u': data_offsets reach to byte 4 of the data, file has 3");
    safetensors_close(open_built(&b));
}

/* ---- folders ---------------------------------------------------------------------------------------------------- */

static char folder[64];
static const char *const names[] = {"model.safetensors", "model.safetensors.index.json",
                                    "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"};
enum { SINGLE, INDEX, FIRST, SECOND, N_NAMES };

static int make_folder(void **state) {
    (void)state;
    strcpy(folder, "/tmp/test_safetensors.XXXXXX");
    return mkdtemp(folder) ? 0 : -1;
}

static const char *path_of(int which) {
    static char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, names[which]);
    return path;
}

static int remove_folder(void **state) {
    (void)state;
    for (int i = 0; i < N_NAMES; i++) unlink(path_of(i));
    return rmdir(folder);
}

static void save_shard(int which, const char *header, size_t n) {
    text b = file_of(header, n);
    build_save(path_of(which), b.data, b.n);
    text_free(&b);
}

static void save_index(const char *map) {
    char words[1024];
    snprintf(words, sizeof words, "{\"metadata\":{\"total_size\":6},\"weight_map\":%s}\n", map);
    build_save(path_of(INDEX), words, strlen(words));
}

#define IN_FIRST "model-00001-of-00002.safetensors"
#define IN_SECOND "model-00002-of-00002.safetensors"
#define MAP "{\"a\":\"" IN_FIRST "\",\"b\":\"" IN_SECOND "\",\"c\":\"" IN_FIRST "\"}"

/* 'c' and 'a' in the first file, 'b' in the second. */
static void save_set(void) {
    save_shard(FIRST, "{" U8("a", "0", "2") "," U8("c", "2", "4") "}", 4);
    save_shard(SECOND, "{" U8("b", "0", "2") "}", 2);
    save_index(MAP);
}

static void refuse_folder(const char *part) {
    safetensors *s = NULL;
    assert_int_equal(safetensors_open(folder, &s), ERR_DATA);
    assert_null(s);
    assert_message_has(folder);
    assert_message_has(part);
}

static void a_folder_opens(void **state) {
    (void)state;
    safetensors *s = NULL;
    save_set();
    if (safetensors_open(folder, &s)) fail_msg("%s", err_message());
    assert_int_equal(safetensors_n_tensors(s), 3);
    const tensor *b = safetensors_find(s, "b"), *c = safetensors_find(s, "c");
    assert_non_null(safetensors_find(s, "a"));
    assert_string_equal(b->file, path_of(SECOND));
    assert_string_equal(c->file, path_of(FIRST));
    assert_int_equal(*(const unsigned char *)c->data, 2);
    safetensors_close(s);
    /* One shard by its own name is one file. */
    if (safetensors_open(path_of(SECOND), &s)) fail_msg("%s", err_message());
    assert_int_equal(safetensors_n_tensors(s), 1);
    safetensors_close(s);
    /* Where both are there, the one file counts. */
    save_shard(SINGLE, "{" U8("only", "0", "2") "}", 2);
    strcat(folder, "/");
    if (safetensors_open(folder, &s)) fail_msg("%s", err_message());
    folder[strlen(folder) - 1] = 0;
    assert_int_equal(safetensors_n_tensors(s), 1);
    assert_non_null(safetensors_find(s, "only"));
    safetensors_close(s);
}

static void sets_are_checked(void **state) {
    (void)state;
    refuse_folder("no model.safetensors and no model.safetensors.index.json there");
    save_set();
    unlink(path_of(SECOND));
    refuse_folder(IN_SECOND ": is missing; ");
    build_save(path_of(SECOND), "12345678", 8);
    refuse_folder(IN_SECOND ": not a safetensors file");
    save_shard(SECOND, "{" U8("b", "0", "2") "," U8("d", "2", "4") "}", 4);
    refuse_folder("weight_map does not have tensor 'd' of ");
    save_shard(SECOND, "{" U8("z", "0", "2") "}", 2);
    refuse_folder("weight_map: tensor 'b' is not in '" IN_SECOND "'");
    save_shard(SECOND, "{" U8("a", "0", "2") "}", 2);
    refuse_folder("two tensors named 'a'");
    save_set();
    save_shard(FIRST, "{" U8("a", "0", "2") "}", 2);
    refuse_folder("weight_map: tensor 'c' is not in '" IN_FIRST "'");
    save_set();
    save_index("{\"a\":\"" IN_FIRST "\",\"b\":\"" IN_FIRST "\",\"c\":\"" IN_SECOND "\"}");
    refuse_folder("weight_map: tensor 'b' is in ");
}

static void indexes_are_checked(void **state) {
    (void)state;
    save_set();
    build_save(path_of(INDEX), "{\"weight_map\":", 14);
    refuse_folder("index.json: index is no JSON at byte");
    build_save(path_of(INDEX), "[]", 2);
    refuse_folder("index.json: index is no JSON object");
    build_save(path_of(INDEX), "{}", 2);
    refuse_folder("index.json: weight_map is missing or no JSON object");
    save_index("{}");
    refuse_folder("index.json: weight_map is empty");
    save_index("{\"a\":3}");
    refuse_folder("weight_map: 'a' has no file's name");
    save_index("{\"a\":\"../x.safetensors\"}");
    refuse_folder("weight_map: 'a' lies in '../x.safetensors', which is no file of this folder");
    save_index("{\"a\":\"/etc/passwd\"}");
    refuse_folder("which is no file of this folder");
    save_index("{\"a\":\"\"}");
    refuse_folder("which is no file of this folder");
    save_index("{\"a\":\"..\"}");
    refuse_folder("is a folder, not a safetensors file");
    save_index("{\"a\":\"" IN_FIRST "\",\"c\":\"" IN_FIRST "\",\"a\":\"" IN_FIRST "\"}");
    refuse_folder("weight_map has 'a' twice");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tensors_are_found),
        cmocka_unit_test(rows_are_read),
        cmocka_unit_test(other_types_are_refused_when_read),
        cmocka_unit_test(names_are_json),
        cmocka_unit_test(other_files_are_named),
        cmocka_unit_test(lengths_are_checked),
        cmocka_unit_test(headers_are_bounded),
        cmocka_unit_test(json_is_checked),
        cmocka_unit_test(fields_are_checked),
        cmocka_unit_test(offsets_are_checked),
        cmocka_unit_test(tensors_do_not_collide),
        cmocka_unit_test(every_cut_is_an_error),
        cmocka_unit_test_setup_teardown(a_folder_opens, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(sets_are_checked, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(indexes_are_checked, make_folder, remove_folder),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
