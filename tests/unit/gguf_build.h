/* A tiny GGUF writer for tests: it writes what it is told, right or wrong. Bytes are appended in file order; a failure
 * to allocate or to write ends the test program. */
#pragma once

#include "base/text.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { BUILD_U8, BUILD_I8, BUILD_U16, BUILD_I16, BUILD_U32, BUILD_I32, BUILD_F32, BUILD_BOOL, BUILD_TEXT, BUILD_ARRAY };
enum { BUILD_U64 = 10, BUILD_I64, BUILD_F64 };

static inline void build_bytes(text *b, const void *bytes, size_t n) {
    if (text_add_bytes(b, bytes, n)) abort();
}

/* The low n bytes of `value`, little-endian. */
static inline void build_int(text *b, uint64_t value, int n) {
    for (int i = 0; i < n; i++) build_bytes(b, &(unsigned char){(unsigned char)(value >> 8 * i)}, 1);
}

static inline void build_f32(text *b, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    build_int(b, bits, 4);
}

static inline void build_f64(text *b, double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    build_int(b, bits, 8);
}

static inline void build_text(text *b, const char *s) {
    build_int(b, strlen(s), 8);
    build_bytes(b, s, strlen(s));
}

static inline void build_start(text *b, uint32_t version, uint64_t n_tensors, uint64_t n_keys) {
    build_bytes(b, "GGUF", 4);
    build_int(b, version, 4);
    build_int(b, n_tensors, 8);
    build_int(b, n_keys, 8);
}

/* A key and the type of its value, which the caller appends. */
static inline void build_key(text *b, const char *key, uint32_t type) {
    build_text(b, key);
    build_int(b, type, 4);
}

static inline void build_array(text *b, const char *key, uint32_t element, uint64_t n) {
    build_key(b, key, BUILD_ARRAY);
    build_int(b, element, 4);
    build_int(b, n, 8);
}

static inline void build_key_u32(text *b, const char *key, uint32_t value) {
    build_key(b, key, BUILD_U32);
    build_int(b, value, 4);
}

static inline void build_key_text(text *b, const char *key, const char *value) {
    build_key(b, key, BUILD_TEXT);
    build_text(b, value);
}

static inline void build_tensor(text *b, const char *name, uint32_t n_dims, const uint64_t *dims, uint32_t type,
                                uint64_t offset) {
    build_text(b, name);
    build_int(b, n_dims, 4);
    for (uint32_t i = 0; i < n_dims; i++) build_int(b, dims[i], 8);
    build_int(b, type, 4);
    build_int(b, offset, 8);
}

static inline void build_align(text *b, size_t alignment) {
    while (b->n % alignment) build_bytes(b, "", 1);
}

/* The first n bytes as a file without a folder; *path is good until the descriptor returned is closed. */
static inline int build_memory_file(const void *bytes, size_t n, char path[32]) {
    int fd = memfd_create("gguf", MFD_CLOEXEC);
    if (fd < 0 || write(fd, bytes, n) != (ssize_t)n) abort();
    snprintf(path, 32, "/proc/self/fd/%d", fd);
    return fd;
}

static inline void build_save(const char *path, const void *bytes, size_t n) {
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(bytes, 1, n, f) != n || fclose(f)) abort();
}
