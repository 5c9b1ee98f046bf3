/* A tensor of a model file where it lies, and how its values are read. */
#pragma once

#include <stddef.h>
#include <stdint.h>

enum { TENSOR_NAME_MAX = 128, TENSOR_F32 = 0, TENSOR_OTHER_TYPE = INT32_MAX };

typedef struct tensor {
    char name[TENSOR_NAME_MAX];
    uint32_t type; /* ggml's number; TENSOR_OTHER_TYPE where ggml has none or nothing here reads it */
    const char *type_name;
    int n_dims;
    uint64_t dims[4]; /* ggml's order: dims[0] is the contiguous one (the row length); unused are 1 */
    const void *data; /* mapped; any alignment */
    size_t bytes;
    const char *file; /* for messages; belongs to the open file */
} tensor;

/* Dequantise rows row0 .. row0+n-1 (a row is dims[0] values) to f32. Thread-safe. ERR_DATA, naming file and tensor: a
 * type that is not supported, rows that it does not have. */
int tensor_rows(const tensor *t, size_t row0, size_t n, float *out);

/* Values col0 .. col0+n-1 of one row; of a type with blocks, whole ones. Thread-safe. Errors as tensor_rows. */
int tensor_columns(const tensor *t, size_t row, size_t col0, size_t n, float *out);

/* Refuse a type that cannot be read, before any work is done. */
int tensor_check(const tensor *t);
