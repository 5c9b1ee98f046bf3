/* safetensors: open the input as a file and read the first and last rows of every tensor. Whatever the bytes, there is
 * an error or an answer. Input that begins with '{' without a length is an index, to a folder with two small files.
 *
 *     cc -fsanitize=address ... tests/fuzz/fuzz_safetensors.c && ./fuzz_safetensors tests/fuzz/corpus/safetensors
 *     clang -fsanitize=fuzzer,address -DLIBFUZZER ... && ./fuzz_safetensors tests/fuzz/corpus/safetensors */
#include "base/err.h"
#include "base/mem.h"
#include "tracer/safetensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MOST_VALUES = 1 << 16 };

static volatile unsigned sink;

/* Read every byte, so that a sanitizer sees a span that leaves the file. */
static unsigned touch(const void *p, size_t n) {
    unsigned sum = 0;
    for (size_t i = 0; i < n; i++) sum += ((const unsigned char *)p)[i];
    return sum;
}

static void read_tensor(const safetensors *s, const tensor *t) {
    size_t rows = t->dims[1] * t->dims[2] * t->dims[3], n = MOST_VALUES / t->dims[0];
    if (n > rows) n = rows;
    if (safetensors_find(s, t->name) != t) abort(); /* found by its name, whatever the name */
    sink += touch(t->data, t->bytes);
    float *out = mem_new(n * t->dims[0], sizeof *out, "rows");
    if (!out) abort();
    if (tensor_rows(t, 0, n, out) == 0 && tensor_rows(t, rows - n, n, out)) abort();
    mem_free(out);
}

static void open_path(const char *path) {
    safetensors *s = NULL;
    if (safetensors_open(path, &s)) {
        if (!*err_message() || s) abort();
        return;
    }
    for (size_t i = 0; i < safetensors_n_tensors(s); i++) read_tensor(s, safetensors_tensor_at(s, i));
    safetensors_close(s);
}

static void save(const char *folder, const char *name, const void *bytes, size_t n) {
    char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(bytes, 1, n, f) != n || fclose(f)) abort();
}

static char folder[32];

static void remove_folder(void) {
    static const char *const names[] = {"a.safetensors", "b.safetensors", "model.safetensors.index.json"};
    char path[128];
    for (int i = 0; i < 3; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        unlink(path);
    }
    rmdir(folder);
}

/* Tensor 'a' in a.safetensors, 'b' in b.safetensors. */
static void make_folder(void) {
    strcpy(folder, "/tmp/fuzz_safetensors.XXXXXX");
    if (!mkdtemp(folder)) abort();
    atexit(remove_folder);
    for (char c = 'a'; c <= 'b'; c++) {
        char bytes[128] = {0}, name[] = "a.safetensors";
        int n = snprintf(bytes + 8, sizeof bytes - 8,
                         "{\"%c\":{\"dtype\":\"F16\",\"shape\":[1],\"data_offsets\":[0,2]}}", c);
        bytes[0] = (char)n;
        name[0] = c;
        save(folder, name, bytes, 8 + (size_t)n + 2);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char path[32];
    if (size > 1 && data[0] == '{' && data[1]) {
        if (!*folder) make_folder();
        save(folder, "model.safetensors.index.json", data, size);
        open_path(folder);
        return 0;
    }
    int fd = memfd_create("safetensors", MFD_CLOEXEC);
    if (fd < 0 || write(fd, data, size) != (ssize_t)size) abort();
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    open_path(path);
    close(fd);
    return 0;
}

#include "tests/fuzz/replay.h"
