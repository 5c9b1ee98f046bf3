#include "tracer/gguf.h"
#include "base/err.h"
#include "base/mem.h"
#include "tracer/dequant.h"
#include "tracer/mapped.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Numbers are copied out of the mapping as they stand. */
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "GGUF is read on little-endian machines only");

typedef unsigned char byte;

enum {
    TYPE_UINT8,
    TYPE_INT8,
    TYPE_UINT16,
    TYPE_INT16,
    TYPE_UINT32,
    TYPE_INT32,
    TYPE_FLOAT32,
    TYPE_BOOL,
    TYPE_STRING,
    TYPE_ARRAY,
    TYPE_UINT64,
    TYPE_INT64,
    TYPE_FLOAT64,
    N_TYPES
};
static const struct {
    const char *name, *array_name;
    size_t size; /* 0: not fixed */
} types[N_TYPES] = {
    [TYPE_UINT8] = {"uint8", "uint8 array", 1},       [TYPE_INT8] = {"int8", "int8 array", 1},
    [TYPE_UINT16] = {"uint16", "uint16 array", 2},    [TYPE_INT16] = {"int16", "int16 array", 2},
    [TYPE_UINT32] = {"uint32", "uint32 array", 4},    [TYPE_INT32] = {"int32", "int32 array", 4},
    [TYPE_FLOAT32] = {"float32", "float32 array", 4}, [TYPE_BOOL] = {"bool", "bool array", 1},
    [TYPE_STRING] = {"string", "string array", 0},    [TYPE_ARRAY] = {"array", "nested array", 0},
    [TYPE_UINT64] = {"uint64", "uint64 array", 8},    [TYPE_INT64] = {"int64", "int64 array", 8},
    [TYPE_FLOAT64] = {"float64", "float64 array", 8},
};

enum {
    MAX_NESTING = 4, /* arrays in arrays; no known model has any */
    MAX_KEY = 65535, /* bytes, by the specification */
    MAX_ALIGNMENT = 1 << 20,
    NAME_MOST = 64,              /* bytes of a tensor's name, by the format */
    MAX_SHARDS = 65535,          /* split.count is a uint16 */
    LEAST_KEY = 8 + 4 + 1,       /* bytes of a key with an empty name and a uint8 value */
    LEAST_TENSOR = 8 + 4 + 4 + 8 /* bytes of a tensor with an empty name and no dimensions */
};

typedef struct entry {
    gguf_string key;
    uint32_t type, element; /* element: of an array */
    uint64_t n;             /* elements of an array, bytes of a string */
    const byte *data;       /* the number, the string's text, or an array's first element */
} entry;

typedef struct shard {
    char *path;
    mapped file;
    entry *entries; /* sorted by key */
    size_t n_entries, capacity;
    size_t n_tensors, tensors_at; /* tensors_at: where the list of tensors begins in the file */
} shard;

typedef struct placed {
    tensor tensor;
    uint64_t offset; /* from the start of its shard's tensor data */
} placed;

struct gguf {
    char *path;
    shard *shards; /* the first one holds the metadata */
    size_t n_shards;
    placed *tensors; /* shard by shard, in file order */
    size_t n_tensors, capacity;
    const tensor **by_name; /* sorted */
};

/* ---- reading bytes ---------------------------------------------------------------------------------------------- */

typedef struct cursor {
    const byte *base;
    size_t size, at; /* at <= size always */
} cursor;

/* The next n bytes, or NULL and a message. */
static const byte *take(cursor *c, uint64_t n, const char *what) {
    if (n > c->size - c->at) {
        err_set(ERR_DATA, "%s needs %" PRIu64 " bytes at byte %zu, file has %zu", what, n, c->at, c->size);
        return NULL;
    }
    c->at += n;
    return c->base + c->at - n;
}

static int take_u32(cursor *c, const char *what, uint32_t *out) {
    const byte *p = take(c, 4, what);
    if (!p) return ERR_DATA;
    memcpy(out, p, 4);
    return 0;
}

static int take_u64(cursor *c, const char *what, uint64_t *out) {
    const byte *p = take(c, 8, what);
    if (!p) return ERR_DATA;
    memcpy(out, p, 8);
    return 0;
}

static int take_string(cursor *c, const char *what, gguf_string *out) {
    uint64_t n;
    TRY(take_u64(c, what, &n));
    const byte *p = take(c, n, what);
    if (!p) return ERR_DATA;
    *out = (gguf_string){(const char *)p, n};
    return 0;
}

/* ---- one file: mapping and metadata ----------------------------------------------------------------------------- */

static int check_version(uint32_t version) {
    if (version == 2 || version == 3) return 0;
    if (version && !(version & 0xffff)) return err_set(ERR_DATA, "big-endian GGUF is not supported");
    return err_set(ERR_DATA, "GGUF version %" PRIu32 " is not supported (want 2 or 3)", version);
}

static int check_count(const cursor *c, uint64_t n, size_t least, const char *what) {
    if (n <= (c->size - c->at) / least) return 0;
    return err_set(ERR_DATA, "claims %" PRIu64 " %s, file has %zu bytes", n, what, c->size);
}

static int skip_array(cursor *c, uint32_t element, uint64_t n, int nesting);

static int skip_value(cursor *c, uint32_t type, int nesting) {
    gguf_string s;
    uint32_t element;
    uint64_t n;
    if (type >= N_TYPES) return err_set(ERR_DATA, "unknown value type %" PRIu32, type);
    if (type == TYPE_STRING) return take_string(c, "string", &s);
    if (type != TYPE_ARRAY) return take(c, types[type].size, types[type].name) ? 0 : ERR_DATA;
    TRY(take_u32(c, "array type", &element));
    TRY(take_u64(c, "array length", &n));
    return skip_array(c, element, n, nesting + 1);
}

static int skip_array(cursor *c, uint32_t element, uint64_t n, int nesting) {
    uint64_t bytes;
    if (element >= N_TYPES) return err_set(ERR_DATA, "unknown array type %" PRIu32, element);
    if (nesting > MAX_NESTING) return err_set(ERR_DATA, "arrays nested deeper than %d", MAX_NESTING);
    if (types[element].size) {
        if (__builtin_mul_overflow(n, types[element].size, &bytes)) bytes = UINT64_MAX;
        return take(c, bytes, types[element].array_name) ? 0 : ERR_DATA;
    }
    for (uint64_t i = 0; i < n; i++) TRY(skip_value(c, element, nesting)); /* each takes bytes, so n is no danger */
    return 0;
}

/* Fill e from the value at the cursor and step over it. */
static int read_value(cursor *c, entry *e) {
    TRY(take_u32(c, "value type", &e->type));
    cursor at = *c;
    TRY(skip_value(c, e->type, 0));
    if (e->type == TYPE_STRING) TRY(take_u64(&at, "string", &e->n));
    if (e->type == TYPE_ARRAY) {
        TRY(take_u32(&at, "array type", &e->element));
        TRY(take_u64(&at, "array length", &e->n));
    }
    e->data = at.base + at.at;
    return 0;
}

static int compare_strings(gguf_string a, gguf_string b) {
    int order = memcmp(a.text, b.text, a.n < b.n ? a.n : b.n);
    return order ? order : (a.n > b.n) - (a.n < b.n);
}

static int compare_entries(const void *a, const void *b) {
    return compare_strings(((const entry *)a)->key, ((const entry *)b)->key);
}

static int read_entries(shard *s, cursor *c, uint64_t n) {
    TRY(check_count(c, n, LEAST_KEY, "keys"));
    for (uint64_t i = 0; i < n; i++) {
        TRY(mem_grow((void **)&s->entries, &s->capacity, i + 1, sizeof *s->entries, "keys"));
        entry *e = &s->entries[i];
        int code = take_string(c, "name", &e->key);
        if (code) return err_prefix(code, "key %" PRIu64, i + 1);
        if (e->key.n == 0) return err_set(ERR_DATA, "key %" PRIu64 " has an empty name", i + 1);
        if (e->key.n > MAX_KEY)
            return err_set(ERR_DATA, "key %" PRIu64 ": name of %zu bytes (at most %d)", i + 1, e->key.n, MAX_KEY);
        code = read_value(c, e);
        if (code) return err_prefix(code, "key '%.*s'", (int)e->key.n, e->key.text);
        s->n_entries++;
    }
    if (n > 0) qsort(s->entries, n, sizeof *s->entries, compare_entries);
    for (uint64_t i = 1; i < n; i++)
        if (compare_entries(&s->entries[i - 1], &s->entries[i]) == 0)
            return err_set(ERR_DATA, "two keys named '%.*s'", (int)s->entries[i].key.n, s->entries[i].key.text);
    return 0;
}

/* A safetensors file: 8 bytes of length, of which no more than four are used, and JSON. */
static int refuse_other(const mapped *m) {
    static const byte none[4];
    if (m->size > 8 && m->base[8] == '{' && memcmp(m->base + 4, none, 4) == 0)
        return err_set(ERR_DATA, "looks like a safetensors file: give the folder that holds it and config.json");
    return mapped_refuse(m, "GGUF file");
}

static int parse_shard(shard *s) {
    TRY(mapped_open(&s->file, s->path, "GGUF file"));
    cursor c = {.base = s->file.base, .size = s->file.size};
    if (memcmp(c.base, "GGUF", c.size < 4 ? c.size : 4) != 0) return refuse_other(&s->file);
    uint32_t magic, version;
    uint64_t n_tensors, n_entries;
    TRY(take_u32(&c, "magic", &magic));
    TRY(take_u32(&c, "version", &version));
    TRY(check_version(version));
    TRY(take_u64(&c, "tensor count", &n_tensors));
    TRY(take_u64(&c, "key count", &n_entries));
    TRY(check_count(&c, n_tensors, LEAST_TENSOR, "tensors"));
    TRY(read_entries(s, &c, n_entries));
    s->n_tensors = n_tensors;
    s->tensors_at = c.at;
    return 0;
}

/* Map the file and read its metadata. Whatever happens, `s` can be released afterwards. */
static int shard_open(shard *s, const char *path) {
    s->path = mem_string(path);
    if (!s->path) return ERR_DATA;
    int code = parse_shard(s);
    return code ? err_prefix(code, "%s", path) : 0;
}

static void shard_close(shard *s) {
    mapped_close(&s->file);
    mem_free(s->entries);
    mem_free(s->path);
}

/* ---- metadata look-ups ------------------------------------------------------------------------------------------ */

static const entry *shard_entry(const shard *s, const char *key) {
    entry wanted = {.key = {key, strlen(key)}};
    if (s->n_entries == 0) return NULL;
    return bsearch(&wanted, s->entries, s->n_entries, sizeof wanted, compare_entries);
}

static int refuse_type(const shard *s, const char *key, const entry *e, const char *want) {
    const char *got = e->type == TYPE_ARRAY ? types[e->element].array_name : types[e->type].name;
    return err_set(ERR_DATA, "%s: key '%s': expected %s, got %s", s->path, key, want, got);
}

static int require(const shard *s, const char *key, const entry **out) {
    *out = shard_entry(s, key);
    return *out ? 0 : err_set(ERR_DATA, "%s: key '%s' is missing", s->path, key);
}

static bool is_integer(uint32_t type) {
    return type <= TYPE_INT32 || type == TYPE_UINT64 || type == TYPE_INT64;
}

/* The integer at p; false (and *out its 64 bits) when it is above INT64_MAX. */
static bool integer_at(uint32_t type, const byte *p, int64_t *out) {
    uint64_t u = 0;
    memcpy(&u, p, types[type].size);
    if (type == TYPE_INT8) *out = (int8_t)u;
    else if (type == TYPE_INT16) *out = (int16_t)u;
    else if (type == TYPE_INT32) *out = (int32_t)u;
    else *out = (int64_t)u;
    return type != TYPE_UINT64 || u <= INT64_MAX;
}

static int shard_int(const shard *s, const char *key, int64_t min, int64_t max, int64_t *out) {
    const entry *e;
    int64_t value;
    TRY(require(s, key, &e));
    if (!is_integer(e->type)) return refuse_type(s, key, e, "integer");
    bool fits = integer_at(e->type, e->data, &value);
    if (!fits)
        return err_set(ERR_DATA, "%s: key '%s' is %" PRIu64 " (want %" PRId64 "..%" PRId64 ")", s->path, key,
                       (uint64_t)value, min, max);
    if (value < min || value > max)
        return err_set(ERR_DATA, "%s: key '%s' is %" PRId64 " (want %" PRId64 "..%" PRId64 ")", s->path, key, value,
                       min, max);
    *out = value;
    return 0;
}

static int require_array(const gguf *g, const char *key, const entry **out) {
    TRY(require(g->shards, key, out));
    return (*out)->type == TYPE_ARRAY ? 0 : refuse_type(g->shards, key, *out, "array");
}

bool gguf_has(const gguf *g, const char *key) {
    return shard_entry(g->shards, key) != NULL;
}

int gguf_int(const gguf *g, const char *key, int64_t min, int64_t max, int64_t *out) {
    return shard_int(g->shards, key, min, max, out);
}

int gguf_number(const gguf *g, const char *key, double *out) {
    const entry *e;
    float f;
    int64_t i;
    TRY(require(g->shards, key, &e));
    if (e->type == TYPE_FLOAT64) memcpy(out, e->data, sizeof *out);
    else if (e->type == TYPE_FLOAT32) {
        memcpy(&f, e->data, sizeof f);
        *out = (double)f;
    } else if (is_integer(e->type)) *out = integer_at(e->type, e->data, &i) ? (double)i : (double)(uint64_t)i;
    else return refuse_type(g->shards, key, e, "number");
    return 0;
}

int gguf_bool(const gguf *g, const char *key, bool *out) {
    const entry *e;
    TRY(require(g->shards, key, &e));
    if (e->type != TYPE_BOOL) return refuse_type(g->shards, key, e, "bool");
    if (*e->data > 1)
        return err_set(ERR_DATA, "%s: key '%s': bool is %d (want 0 or 1)", g->shards->path, key, *e->data);
    *out = *e->data;
    return 0;
}

int gguf_text(const gguf *g, const char *key, const char **text, size_t *n) {
    const entry *e;
    TRY(require(g->shards, key, &e));
    if (e->type != TYPE_STRING) return refuse_type(g->shards, key, e, "string");
    *text = (const char *)e->data;
    *n = e->n;
    return 0;
}

int gguf_array_length(const gguf *g, const char *key, size_t *n) {
    const entry *e;
    TRY(require_array(g, key, &e));
    *n = e->n;
    return 0;
}

int gguf_strings(const gguf *g, const char *key, gguf_string **out, size_t *n) {
    const entry *e;
    TRY(require(g->shards, key, &e));
    if (e->type != TYPE_ARRAY || e->element != TYPE_STRING) return refuse_type(g->shards, key, e, "string array");
    gguf_string *list = mem_new(e->n, sizeof *list, key);
    if (!list) return ERR_DATA;
    const byte *p = e->data; /* the lengths were checked when the file was opened */
    for (uint64_t i = 0; i < e->n; i++) {
        uint64_t bytes;
        memcpy(&bytes, p, 8);
        list[i] = (gguf_string){(const char *)p + 8, bytes};
        p += 8 + bytes;
    }
    *out = list;
    *n = e->n;
    return 0;
}

int gguf_ints(const gguf *g, const char *key, int64_t **out, size_t *n) {
    const entry *e;
    TRY(require(g->shards, key, &e));
    if (e->type != TYPE_ARRAY || !is_integer(e->element)) return refuse_type(g->shards, key, e, "integer array");
    int64_t *list = mem_new(e->n, sizeof *list, key);
    if (!list) return ERR_DATA;
    for (uint64_t i = 0; i < e->n; i++)
        if (!integer_at(e->element, e->data + i * types[e->element].size, &list[i])) {
            int code = err_set(ERR_DATA, "%s: key '%s': element %" PRIu64 " is %" PRIu64 ", above 2^63-1",
                               g->shards->path, key, i, (uint64_t)list[i]);
            mem_free(list);
            return code;
        }
    *out = list;
    *n = e->n;
    return 0;
}

int gguf_floats(const gguf *g, const char *key, float **out, size_t *n) {
    const entry *e;
    TRY(require(g->shards, key, &e));
    if (e->type != TYPE_ARRAY || e->element != TYPE_FLOAT32) return refuse_type(g->shards, key, e, "float32 array");
    float *list = mem_new(e->n, sizeof *list, key);
    if (!list) return ERR_DATA;
    memcpy(list, e->data, e->n * sizeof *list);
    *out = list;
    *n = e->n;
    return 0;
}

/* ---- tensors ---------------------------------------------------------------------------------------------------- */

/* The bytes of dims[0] x .. x dims[3] values of the tensor's type. */
static int measure(tensor *t, const dequant_type *type) {
    uint64_t n = 1;
    bool overflow = false;
    for (int i = 0; i < t->n_dims; i++) {
        if (t->dims[i] == 0) return err_set(ERR_DATA, "tensor '%s': dimension %d is 0", t->name, i);
        overflow |= __builtin_mul_overflow(n, t->dims[i], &n);
    }
    if (t->dims[0] % type->block)
        return err_set(ERR_DATA, "tensor '%s': rows of %" PRIu64 " values are not a multiple of %s's block of %" PRIu32,
                       t->name, t->dims[0], type->name, type->block);
    overflow |= __builtin_mul_overflow(n / type->block, (uint64_t)type->block_bytes, &t->bytes);
    /* Values are f32 once read, and these must have a size too. */
    if (overflow || n > SIZE_MAX / sizeof(float))
        return err_set(ERR_DATA,
                       "tensor '%s': %" PRIu64 " x %" PRIu64 " x %" PRIu64 " x %" PRIu64 " values overflow 64 bits",
                       t->name, t->dims[0], t->dims[1], t->dims[2], t->dims[3]);
    return 0;
}

static int read_name(cursor *c, tensor *t) {
    gguf_string name;
    TRY(take_string(c, "name", &name));
    if (name.n == 0) return err_set(ERR_DATA, "the name is empty");
    if (name.n > NAME_MOST) return err_set(ERR_DATA, "name of %zu bytes (at most %d)", name.n, NAME_MOST);
    if (memchr(name.text, 0, name.n)) return err_set(ERR_DATA, "the name holds a NUL byte");
    memcpy(t->name, name.text, name.n);
    return 0;
}

/* After this only the place of the data is open. */
static int read_tensor(cursor *c, placed *p) {
    tensor *t = &p->tensor;
    uint32_t n_dims;
    TRY(read_name(c, t));
    TRY(take_u32(c, "number of dimensions", &n_dims));
    if (n_dims < 1 || n_dims > 4)
        return err_set(ERR_DATA, "tensor '%s': %" PRIu32 " dimensions (want 1..4)", t->name, n_dims);
    t->n_dims = (int)n_dims;
    for (int i = 0; i < 4; i++) {
        t->dims[i] = 1;
        if (i < t->n_dims) TRY(take_u64(c, "dimension", &t->dims[i]));
    }
    TRY(take_u32(c, "type", &t->type));
    TRY(take_u64(c, "offset", &p->offset));
    const dequant_type *type = dequant_find(t->type);
    if (!type) return err_set(ERR_DATA, "tensor '%s': unknown type %" PRIu32, t->name, t->type);
    t->type_name = type->name;
    return measure(t, type);
}

static int read_alignment(const shard *s, uint32_t *out) {
    const entry *e = shard_entry(s, "general.alignment");
    *out = 32;
    if (!e) return 0;
    if (e->type != TYPE_UINT32)
        return err_set(ERR_DATA, "invalid general.alignment of type %s (want a uint32, a power of two, 1..1 MiB)",
                       types[e->type].name);
    memcpy(out, e->data, 4);
    if (*out == 0 || *out > MAX_ALIGNMENT || (*out & (*out - 1)))
        return err_set(ERR_DATA, "invalid general.alignment %" PRIu32 " (want a power of two, 1..1 MiB)", *out);
    return 0;
}

static int place_tensor(const shard *s, placed *p, size_t data_at, uint32_t alignment) {
    tensor *t = &p->tensor;
    uint64_t from, to;
    if (p->offset % alignment)
        return err_set(ERR_DATA, "tensor '%s': offset %" PRIu64 " is not a multiple of the alignment %" PRIu32, t->name,
                       p->offset, alignment);
    if (__builtin_add_overflow(data_at, p->offset, &from) || __builtin_add_overflow(from, t->bytes, &to))
        return err_set(ERR_DATA, "tensor '%s': offset %" PRIu64 " is past the end, file has %zu", t->name, p->offset,
                       s->file.size);
    if (to > s->file.size)
        return err_set(ERR_DATA, "tensor '%s' needs bytes %" PRIu64 "..%" PRIu64 ", file has %zu", t->name, from, to,
                       s->file.size);
    t->data = s->file.base + from;
    t->file = s->path;
    return 0;
}

static int parse_tensors(gguf *g, const shard *s) {
    cursor c = {.base = s->file.base, .size = s->file.size, .at = s->tensors_at};
    size_t first = g->n_tensors;
    uint32_t alignment;
    TRY(read_alignment(s, &alignment));
    for (size_t i = 0; i < s->n_tensors; i++) {
        TRY(mem_grow((void **)&g->tensors, &g->capacity, g->n_tensors + 1, sizeof *g->tensors, "tensors"));
        placed *p = &g->tensors[g->n_tensors++];
        int code = read_tensor(&c, p);
        if (code && !p->tensor.n_dims) return err_prefix(code, "tensor %zu", i + 1);
        TRY(code);
    }
    size_t data_at = (c.at + alignment - 1) & ~(size_t)(alignment - 1);
    for (size_t i = first; i < g->n_tensors; i++) TRY(place_tensor(s, &g->tensors[i], data_at, alignment));
    return 0;
}

static int add_tensors(gguf *g, const shard *s) {
    int code = parse_tensors(g, s);
    return code ? err_prefix(code, "%s", s->path) : 0;
}

static int compare_names(const void *a, const void *b) {
    return strcmp((*(const tensor *const *)a)->name, (*(const tensor *const *)b)->name);
}

static int compare_places(const void *a, const void *b) {
    const tensor *x = *(const tensor *const *)a, *y = *(const tensor *const *)b;
    return ((const byte *)x->data > (const byte *)y->data) - ((const byte *)x->data < (const byte *)y->data);
}

/* No two tensors may share a name or a byte; the list sorted by name stays for gguf_find. */
static int index_tensors(gguf *g) {
    size_t n = g->n_tensors;
    if (n == 0) return 0;
    const tensor **list = g->by_name = mem_new(n, sizeof *g->by_name, "tensor names");
    if (!list) return ERR_DATA;
    for (size_t i = 0; i < n; i++) list[i] = &g->tensors[i].tensor;
    qsort(list, n, sizeof *list, compare_places);
    for (size_t i = 1; i < n; i++)
        if ((const byte *)list[i]->data - (const byte *)list[i - 1]->data < (ptrdiff_t)list[i - 1]->bytes)
            return err_set(ERR_DATA, "%s: tensors '%s' and '%s' overlap", g->path, list[i - 1]->name, list[i]->name);
    qsort(list, n, sizeof *list, compare_names);
    for (size_t i = 1; i < n; i++)
        if (compare_names(&list[i - 1], &list[i]) == 0)
            return err_set(ERR_DATA, "%s: two tensors named '%s'", g->path, list[i]->name);
    return 0;
}

size_t gguf_n_tensors(const gguf *g) {
    return g->n_tensors;
}

const tensor *gguf_tensor_at(const gguf *g, size_t i) {
    return &g->tensors[i].tensor;
}

const tensor *gguf_find(const gguf *g, const char *name) {
    for (size_t low = 0, high = g->n_tensors; low < high;) {
        size_t middle = low + (high - low) / 2;
        int order = strcmp(name, g->by_name[middle]->name);
        if (order == 0) return g->by_name[middle];
        if (order < 0) high = middle;
        else low = middle + 1;
    }
    return NULL;
}

/* ---- split files ------------------------------------------------------------------------------------------------ */

/* The place in a set of n, as the metadata has it; a file without split keys is 0 of 1. */
static int read_place(const shard *s, size_t *no, size_t *n) {
    int64_t count = 1, at = 0;
    if (shard_entry(s, "split.count")) TRY(shard_int(s, "split.count", 0, MAX_SHARDS, &count));
    if (count > 1) TRY(shard_int(s, "split.no", 0, count - 1, &at));
    *n = count > 1 ? (size_t)count : 1;
    *no = (size_t)at;
    return 0;
}

enum { SUFFIX_MAX = 64 };

static void shard_suffix(char out[SUFFIX_MAX], size_t no, size_t n) {
    snprintf(out, SUFFIX_MAX, "-%05zu-of-%05zu.gguf", no + 1, n);
}

static int open_sibling(gguf *g, size_t no) {
    size_t their_no, their_n, stem = strlen(g->path);
    char suffix[SUFFIX_MAX];
    shard_suffix(suffix, no, g->n_shards);
    char *path = mem_string(g->path);
    if (!path) return ERR_DATA;
    memcpy(path + stem - strlen(suffix), suffix, strlen(suffix));
    int code = access(path, F_OK) == 0
                   ? shard_open(&g->shards[no], path)
                   : err_set(ERR_DATA, "%s: shard %zu of %zu is missing", path, no + 1, g->n_shards);
    mem_free(path);
    TRY(code);
    const shard *s = &g->shards[no];
    TRY(read_place(s, &their_no, &their_n));
    if (their_no != no || their_n != g->n_shards)
        return err_set(ERR_DATA, "%s: is shard %zu of %zu by its metadata, not %zu of %zu as '%s' wants", s->path,
                       their_no + 1, their_n, no + 1, g->n_shards, g->path);
    return 0;
}

/* Open every shard of the set that `given`, shard `no` of g->n_shards, belongs to. The shards' own names differ in the
 * number only, so the set is found from any of them. */
static int open_siblings(gguf *g, size_t no) {
    char suffix[SUFFIX_MAX];
    shard_suffix(suffix, no, g->n_shards);
    size_t n = strlen(g->path), tail = strlen(suffix);
    if (n < tail || strcmp(g->path + n - tail, suffix) != 0)
        return err_set(ERR_DATA, "%s: is shard %zu of %zu, but its name does not end in %s: the others cannot be found",
                       g->path, no + 1, g->n_shards, suffix);
    for (size_t i = 0; i < g->n_shards; i++)
        if (i != no) TRY(open_sibling(g, i));
    return 0;
}

static int check_total(const gguf *g) {
    int64_t total;
    if (g->n_shards == 1 || !gguf_has(g, "split.tensors.count")) return 0;
    TRY(gguf_int(g, "split.tensors.count", 0, INT64_MAX, &total));
    if ((uint64_t)total == g->n_tensors) return 0;
    return err_set(ERR_DATA, "%s: split.tensors.count is %" PRId64 ", the %zu shards hold %zu tensors", g->shards->path,
                   total, g->n_shards, g->n_tensors);
}

static int open_set(gguf *g, const char *path) {
    size_t no, n;
    g->path = mem_string(path);
    g->shards = mem_new(1, sizeof *g->shards, "shards");
    if (!g->path || !g->shards) return ERR_DATA;
    g->n_shards = 1;
    TRY(shard_open(g->shards, path));
    TRY(read_place(g->shards, &no, &n));
    if (n > 1) {
        shard *set = mem_new(n, sizeof *set, "shards");
        if (!set) return ERR_DATA;
        set[no] = g->shards[0];
        mem_free(g->shards);
        g->shards = set;
        g->n_shards = n;
        TRY(open_siblings(g, no));
    }
    for (size_t i = 0; i < n; i++) TRY(add_tensors(g, &g->shards[i]));
    TRY(check_total(g));
    return index_tensors(g);
}

int gguf_open(const char *path, gguf **out) {
    gguf *g = mem_new(1, sizeof *g, "GGUF file");
    if (!g) return ERR_DATA;
    int code = open_set(g, path);
    if (code) gguf_close(g);
    else *out = g;
    return code;
}

void gguf_close(gguf *g) {
    if (!g) return;
    for (size_t i = 0; i < g->n_shards; i++) shard_close(&g->shards[i]);
    mem_free(g->shards);
    mem_free(g->tensors);
    mem_free(g->by_name);
    mem_free(g->path);
    mem_free(g);
}

const char *gguf_path(const gguf *g) {
    return g->path;
}
