/* GGUF: open the input as a file, ask every question of every key the seeds have, and read the first rows of every
 * tensor. Whatever the bytes, there is an error or an answer.
 *
 *     cc -fsanitize=address ... tests/fuzz/fuzz_gguf.c && ./fuzz_gguf tests/fuzz/corpus/gguf
 *     clang -fsanitize=fuzzer,address -DLIBFUZZER ... && ./fuzz_gguf -max_total_time=60 tests/fuzz/corpus/gguf */
#include "base/err.h"
#include "base/mem.h"
#include "tracer/gguf.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MOST_VALUES = 1 << 16 };

/* Read every byte, so that a sanitizer sees a span that leaves the file. */
static unsigned touch(const void *p, size_t n) {
    unsigned sum = 0;
    for (size_t i = 0; i < n; i++) sum += ((const unsigned char *)p)[i];
    return sum;
}

static volatile unsigned sink;

static void ask_arrays(const gguf *g, const char *key) {
    gguf_string *strings;
    int64_t *ints;
    float *floats;
    size_t n;
    (void)gguf_array_length(g, key, &n);
    if (gguf_strings(g, key, &strings, &n) == 0) {
        for (size_t i = 0; i < n; i++) sink += touch(strings[i].text, strings[i].n);
        mem_free(strings);
    }
    if (gguf_ints(g, key, &ints, &n) == 0) {
        sink += touch(ints, n * sizeof *ints);
        mem_free(ints);
    }
    if (gguf_floats(g, key, &floats, &n) == 0) {
        sink += touch(floats, n * sizeof *floats);
        mem_free(floats);
    }
}

static void ask_key(const gguf *g, const char *key) {
    int64_t i;
    double d;
    bool b;
    const char *s;
    size_t n;
    if (!gguf_has(g, key)) return;
    (void)gguf_int(g, key, 0, 100, &i);
    (void)gguf_number(g, key, &d);
    (void)gguf_bool(g, key, &b);
    if (gguf_text(g, key, &s, &n) == 0) sink += touch(s, n);
    ask_arrays(g, key);
}

static void read_tensor(const gguf *g, const tensor *t) {
    size_t rows = t->dims[1] * t->dims[2] * t->dims[3], n = MOST_VALUES / t->dims[0];
    if (n > rows) n = rows;
    if (gguf_find(g, t->name) != t) abort(); /* found by its name, whatever the name */
    sink += touch(t->data, t->bytes);
    float *out = mem_new(n * t->dims[0], sizeof *out, "rows");
    if (!out) abort();
    if (tensor_rows(t, 0, n, out) == 0 && tensor_rows(t, rows - n, n, out)) abort();
    mem_free(out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const char *const keys[] = {"general.alignment",
                                       "general.architecture",
                                       "u8",
                                       "i16",
                                       "i64",
                                       "f32",
                                       "f64",
                                       "yes",
                                       "words",
                                       "kinds",
                                       "scores",
                                       "nested",
                                       "split.no"};
    char path[32];
    int fd = memfd_create("gguf", MFD_CLOEXEC);
    if (fd < 0 || write(fd, data, size) != (ssize_t)size) abort();
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    gguf *g = NULL;
    int code = gguf_open(path, &g);
    close(fd);
    if (code) {
        if (!*err_message() || g) abort();
        return 0;
    }
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) ask_key(g, keys[i]);
    for (size_t i = 0; i < gguf_n_tensors(g); i++) read_tensor(g, gguf_tensor_at(g, i));
    gguf_close(g);
    return 0;
}

#include "tests/fuzz/replay.h"
