/* The weight types of ggml: their numbers, names and sizes, and how the supported ones become f32 (block layouts:
 * ggml's ggml-common.h and dequantize_row_* in ggml-quants.c). Every known type has a row, so that a message can name
 * what it refuses. */
#pragma once

#include <stddef.h>
#include <stdint.h>

typedef struct dequant_type {
    uint32_t number; /* enum ggml_type, as in GGUF files */
    const char *name;
    uint32_t block;       /* values in a block */
    uint32_t block_bytes; /* bytes in a block */
    /* n blocks at src (any alignment) to n * block values at out; NULL where the type is not supported. */
    void (*run)(const void *src, size_t n, float *out);
} dequant_type;

/* NULL for a number that ggml does not know. */
const dequant_type *dequant_find(uint32_t number);

/* "F32, F16, ...": the supported types, for messages. Writes at most `size` bytes, NUL included; returns out. */
const char *dequant_supported(char *out, size_t size);
