/* GGUF files, versions 2 and 3, little-endian (format: ggml's docs/gguf.md). Memory-mapped; every offset and length is
 * checked before use, by subtraction, so that a damaged file gets one line and never a signal.
 *
 * Split files ("-00001-of-00003.gguf"): any shard opens the set; a missing shard is named. */
#pragma once

#include "tracer/tensor.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct gguf gguf;

int gguf_open(const char *path, gguf **out);
void gguf_close(gguf *g); /* accepts NULL */
const char *gguf_path(const gguf *g);

/* ---- metadata --------------------------------------------------------------------------------------------------- */

/* Look a key up and convert. Absent: ERR_DATA "FILE: key 'k' is missing". Present with another type: ERR_DATA
 * "FILE: key 'k': expected float32, got string". gguf_has tells whether a key is there. Integers accept every integer
 * type whose value fits; numbers accept float32, float64 and integers. */
bool gguf_has(const gguf *g, const char *key);
int gguf_int(const gguf *g, const char *key, int64_t min, int64_t max, int64_t *out);
int gguf_number(const gguf *g, const char *key, double *out);
int gguf_bool(const gguf *g, const char *key, bool *out);
/* Points into the mapping, NOT NUL-terminated, *n bytes. */
int gguf_text(const gguf *g, const char *key, const char **text, size_t *n);

/* Arrays. */
typedef struct gguf_string {
    const char *text;
    size_t n;
} gguf_string;
int gguf_array_length(const gguf *g, const char *key, size_t *n);
int gguf_strings(const gguf *g, const char *key, gguf_string **out, size_t *n); /* caller frees with mem_free */
int gguf_ints(const gguf *g, const char *key, int64_t **out, size_t *n);        /* any integer type; caller frees */
int gguf_floats(const gguf *g, const char *key, float **out, size_t *n);        /* float32 only; caller frees */

/* ---- tensors ---------------------------------------------------------------------------------------------------- */

size_t gguf_n_tensors(const gguf *g);
const tensor *gguf_tensor_at(const gguf *g, size_t i);
const tensor *gguf_find(const gguf *g, const char *name); /* NULL if absent; no message */
