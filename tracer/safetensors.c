#include "tracer/safetensors.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/text.h"
#include "tracer/mapped.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Numbers are copied out of the mapping as they stand. */
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "safetensors are read on little-endian machines only");

typedef unsigned char byte;

enum { HEADER_MOST = 100 * 1000 * 1000, LENGTH_BYTES = 8 };

typedef struct shard {
    char *path;
    mapped file;
} shard;

struct safetensors {
    char *path; /* as given */
    shard *shards;
    size_t n_shards, shard_capacity;
    tensor *tensors; /* shard by shard, as they lie there */
    size_t n_tensors, capacity;
    const tensor **by_name; /* sorted */
};

/* What safetensors knows; `bits` of a value. */
static const struct dtype {
    const char *name;
    unsigned bits;
    uint32_t type;
} dtypes[] = {
    {"F32", 32, 0},
    {"F16", 16, 1},
    {"BF16", 16, 30},
    {"F64", 64, TENSOR_OTHER_TYPE},
    {"BOOL", 8, TENSOR_OTHER_TYPE},
    {"I8", 8, TENSOR_OTHER_TYPE},
    {"U8", 8, TENSOR_OTHER_TYPE},
    {"I16", 16, TENSOR_OTHER_TYPE},
    {"U16", 16, TENSOR_OTHER_TYPE},
    {"I32", 32, TENSOR_OTHER_TYPE},
    {"U32", 32, TENSOR_OTHER_TYPE},
    {"I64", 64, TENSOR_OTHER_TYPE},
    {"U64", 64, TENSOR_OTHER_TYPE},
    {"C64", 64, TENSOR_OTHER_TYPE},
    {"F8_E4M3", 8, TENSOR_OTHER_TYPE},
    {"F8_E5M2", 8, TENSOR_OTHER_TYPE},
    {"F8_E8M0", 8, TENSOR_OTHER_TYPE},
    {"F8_E4M3FNUZ", 8, TENSOR_OTHER_TYPE},
    {"F8_E5M2FNUZ", 8, TENSOR_OTHER_TYPE},
    {"F6_E2M3", 6, TENSOR_OTHER_TYPE},
    {"F6_E3M2", 6, TENSOR_OTHER_TYPE},
    {"F4", 4, TENSOR_OTHER_TYPE},
};
enum { N_DTYPES = sizeof dtypes / sizeof *dtypes };

/* ---- JSON ------------------------------------------------------------------------------------------------------- */

/* An object that fills the n bytes, but for white space behind it. */
static int parse_object(const byte *words, size_t n, const char *what, cJSON **out) {
    const char *end = (const char *)words;
    *out = cJSON_ParseWithLengthOpts((const char *)words, n, &end, false);
    size_t at = (size_t)(end - (const char *)words);
    while (*out && at < n && words[at] && strchr(" \t\r\n", words[at])) at++;
    if (*out && at == n && cJSON_IsObject(*out)) return 0;
    bool whole = *out && at == n;
    cJSON_Delete(*out);
    *out = NULL;
    if (whole) return err_set(ERR_DATA, "%s is no JSON object", what);
    return err_set(ERR_DATA, "%s is no JSON at byte %zu of it", what, at);
}

static bool read_whole(const cJSON *x, uint64_t *out) {
    if (!cJSON_IsNumber(x) || !(x->valuedouble >= 0 && x->valuedouble <= 0x1p53)) return false;
    *out = (uint64_t)x->valuedouble;
    return (double)*out == x->valuedouble;
}

/* ---- one tensor of a header ------------------------------------------------------------------------------------- */

static int want(const tensor *t, const char *what) {
    return err_set(ERR_DATA, "tensor '%s': %s", t->name, what);
}

static int read_name(const char *name, tensor *t) {
    size_t n = strlen(name);
    if (n == 0) return err_set(ERR_DATA, "a tensor's name is empty");
    if (n >= TENSOR_NAME_MAX)
        return err_set(ERR_DATA, "tensor '%.*s...': name of %zu bytes (at most %d)", 40, name, n, TENSOR_NAME_MAX - 1);
    memcpy(t->name, name, n);
    return 0;
}

static int read_dtype(const cJSON *o, tensor *t, unsigned *bits) {
    const cJSON *x = cJSON_GetObjectItemCaseSensitive(o, "dtype");
    if (!cJSON_IsString(x)) return want(t, "dtype is missing or no text");
    for (size_t i = 0; i < N_DTYPES; i++) {
        if (strcmp(dtypes[i].name, x->valuestring) != 0) continue;
        t->type = dtypes[i].type;
        t->type_name = dtypes[i].name;
        *bits = dtypes[i].bits;
        return 0;
    }
    return err_set(ERR_DATA, "tensor '%s': unknown dtype '%.40s'", t->name, x->valuestring);
}

/* The last dimension is the contiguous one and comes first here. What goes beyond four is counted with the fourth: no
 * tensor of a language model has that many, but towers for images beside one do. */
static int read_shape(const cJSON *o, tensor *t, uint64_t *count) {
    const cJSON *shape = cJSON_GetObjectItemCaseSensitive(o, "shape"), *x;
    if (!cJSON_IsArray(shape)) return want(t, "shape is missing or no list");
    int n = cJSON_GetArraySize(shape), i = n;
    bool overflow = false;
    uint64_t d;
    *count = 1;
    t->n_dims = n < 4 ? n : 4;
    for (int k = 0; k < 4; k++) t->dims[k] = 1;
    cJSON_ArrayForEach(x, shape) {
        if (!read_whole(x, &d)) return err_set(ERR_DATA, "tensor '%s': dimension %d is no size", t->name, n - i);
        if (d == 0) return err_set(ERR_DATA, "tensor '%s': dimension %d is 0", t->name, n - i);
        i--;
        overflow |= __builtin_mul_overflow(*count, d, count);
        if (!overflow) t->dims[i < 4 ? i : 3] *= d;
    }
    return overflow ? want(t, "the values of its shape overflow 64 bits") : 0;
}

static int read_place(const cJSON *o, const shard *s, size_t data_at, tensor *t) {
    const cJSON *x = cJSON_GetObjectItemCaseSensitive(o, "data_offsets");
    uint64_t from, to;
    size_t room = s->file.size - data_at;
    if (!cJSON_IsArray(x) || cJSON_GetArraySize(x) != 2 || !read_whole(x->child, &from) ||
        !read_whole(x->child->next, &to))
        return want(t, "data_offsets are no two sizes");
    if (from > to)
        return err_set(ERR_DATA, "tensor '%s': data_offsets [%" PRIu64 ", %" PRIu64 "] end before they begin", t->name,
                       from, to);
    if (to > room)
        return err_set(ERR_DATA, "tensor '%s': data_offsets reach to byte %" PRIu64 " of the data, file has %zu",
                       t->name, to, room);
    t->data = s->file.base + data_at + from;
    t->bytes = to - from;
    t->file = s->path;
    return 0;
}

static int read_tensor(const cJSON *o, const shard *s, size_t data_at, tensor *t) {
    unsigned bits = 0;
    uint64_t count = 0, total;
    TRY(read_name(o->string, t));
    if (!cJSON_IsObject(o)) return want(t, "is no JSON object");
    TRY(read_dtype(o, t, &bits));
    TRY(read_shape(o, t, &count));
    TRY(read_place(o, s, data_at, t));
    if (!__builtin_mul_overflow(count, (uint64_t)bits, &total) && total % 8 == 0 && total / 8 == t->bytes) return 0;
    return err_set(ERR_DATA, "tensor '%s': %" PRIu64 " values of %s do not fill %zu bytes", t->name, count,
                   t->type_name, t->bytes);
}

/* ---- one file --------------------------------------------------------------------------------------------------- */

static int compare_places(const void *a, const void *b) {
    const byte *x = ((const tensor *)a)->data, *y = ((const tensor *)b)->data;
    return (x > y) - (x < y);
}

/* Every byte of the data belongs to exactly one of the shard's tensors, which begin with number `first`. */
static int check_places(const safetensors *f, size_t first, const shard *s, size_t data_at) {
    const byte *at = s->file.base + data_at, *end = s->file.base + s->file.size;
    size_t n = f->n_tensors;
    tensor *list = f->tensors;
    if (n > first) qsort(list + first, n - first, sizeof *list, compare_places);
    for (size_t i = first; i < n; i++) {
        const byte *data = list[i].data;
        if (data < at) return err_set(ERR_DATA, "tensors '%s' and '%s' overlap", list[i - 1].name, list[i].name);
        if (data > at)
            return err_set(ERR_DATA, "%zu bytes before tensor '%s' belong to none", (size_t)(data - at), list[i].name);
        at = data + list[i].bytes;
    }
    return at == end ? 0 : err_set(ERR_DATA, "the last %zu bytes belong to no tensor", (size_t)(end - at));
}

static int read_list(safetensors *f, const shard *s, const cJSON *header, size_t data_at) {
    size_t first = f->n_tensors;
    const cJSON *o;
    cJSON_ArrayForEach(o, header) {
        if (strcmp(o->string, "__metadata__") == 0) continue;
        TRY(mem_grow((void **)&f->tensors, &f->capacity, f->n_tensors + 1, sizeof *f->tensors, "tensors"));
        TRY(read_tensor(o, s, data_at, &f->tensors[f->n_tensors++]));
    }
    return check_places(f, first, s, data_at);
}

/* 8 bytes of length, so much JSON, and the data. */
static int read_header(safetensors *f, const shard *s) {
    uint64_t length = 0;
    const byte *base = s->file.base, *words = base + LENGTH_BYTES;
    size_t size = s->file.size;
    cJSON *header;
    memcpy(&length, base, size < LENGTH_BYTES ? size : LENGTH_BYTES);
    if (size < LENGTH_BYTES || (length > HEADER_MOST && length > size))
        return mapped_refuse(&s->file, "safetensors file");
    if (length > HEADER_MOST) return err_set(ERR_DATA, "header of %" PRIu64 " bytes (at most %d)", length, HEADER_MOST);
    if (length > size - LENGTH_BYTES)
        return err_set(ERR_DATA, "header needs %" PRIu64 " bytes at byte 8, file has %zu", length, size);
    if (length == 0 || *words != '{') return err_set(ERR_DATA, "header does not begin with '{'");
    TRY(parse_object(words, length, "header", &header));
    int code = read_list(f, s, header, LENGTH_BYTES + length);
    cJSON_Delete(header);
    return code;
}

/* Takes the path over. */
static int add_shard(safetensors *f, char *path) {
    int code = mem_grow((void **)&f->shards, &f->shard_capacity, f->n_shards + 1, sizeof *f->shards, "shards");
    if (code) mem_free(path);
    TRY(code);
    shard *s = &f->shards[f->n_shards++];
    s->path = path;
    code = mapped_open(&s->file, path, "safetensors file");
    if (!code) code = read_header(f, s);
    return code ? err_prefix(code, "%s", path) : 0;
}

/* ---- names ------------------------------------------------------------------------------------------------------ */

static int compare_names(const void *a, const void *b) {
    return strcmp((*(const tensor *const *)a)->name, (*(const tensor *const *)b)->name);
}

static int index_names(safetensors *f) {
    if (f->n_tensors == 0) return 0;
    f->by_name = mem_new(f->n_tensors, sizeof *f->by_name, "tensor names");
    if (!f->by_name) return ERR_DATA;
    for (size_t i = 0; i < f->n_tensors; i++) f->by_name[i] = &f->tensors[i];
    qsort(f->by_name, f->n_tensors, sizeof *f->by_name, compare_names);
    for (size_t i = 1; i < f->n_tensors; i++)
        if (compare_names(&f->by_name[i - 1], &f->by_name[i]) == 0)
            return err_set(ERR_DATA, "%s: two tensors named '%s'", f->by_name[i]->file, f->by_name[i]->name);
    return 0;
}

size_t safetensors_n_tensors(const safetensors *s) {
    return s->n_tensors;
}

const tensor *safetensors_tensor_at(const safetensors *s, size_t i) {
    return &s->tensors[i];
}

const tensor *safetensors_find(const safetensors *s, const char *name) {
    for (size_t low = 0, high = s->n_tensors; low < high;) {
        size_t middle = low + (high - low) / 2;
        int order = strcmp(name, s->by_name[middle]->name);
        if (order == 0) return s->by_name[middle];
        if (order < 0) high = middle;
        else low = middle + 1;
    }
    return NULL;
}

/* ---- several files ---------------------------------------------------------------------------------------------- */

/* The weight_map says of every tensor which file of the folder holds it. */
typedef struct mapping {
    const char *name, *file;
} mapping;

static int compare_files(const void *a, const void *b) {
    return strcmp(((const mapping *)a)->file, ((const mapping *)b)->file);
}

static int compare_mappings(const void *a, const void *b) {
    return strcmp(((const mapping *)a)->name, ((const mapping *)b)->name);
}

static int read_map(const cJSON *index, mapping **list, size_t *n) {
    const cJSON *map = cJSON_GetObjectItemCaseSensitive(index, "weight_map"), *x;
    size_t capacity = 0;
    if (!cJSON_IsObject(map)) return err_set(ERR_DATA, "weight_map is missing or no JSON object");
    cJSON_ArrayForEach(x, map) {
        if (!cJSON_IsString(x)) return err_set(ERR_DATA, "weight_map: '%.80s' has no file's name", x->string);
        if (!*x->valuestring || strchr(x->valuestring, '/'))
            return err_set(ERR_DATA, "weight_map: '%.80s' lies in '%.80s', which is no file of this folder", x->string,
                           x->valuestring);
        TRY(mem_grow((void **)list, &capacity, *n + 1, sizeof **list, "weight_map"));
        (*list)[(*n)++] = (mapping){x->string, x->valuestring};
    }
    return *n ? 0 : err_set(ERR_DATA, "weight_map is empty");
}

static int open_shards(safetensors *f, const char *index_path, mapping *list, size_t n) {
    qsort(list, n, sizeof *list, compare_files);
    for (size_t i = 0; i < n; i++) {
        char *path;
        if (i > 0 && compare_files(&list[i - 1], &list[i]) == 0) continue;
        TRY(text_path(f->path, list[i].file, &path));
        if (access(path, F_OK) == 0) {
            TRY(add_shard(f, path));
            continue;
        }
        int code = err_set(ERR_DATA, "%s: is missing; %s names it", path, index_path);
        mem_free(path);
        return code;
    }
    return 0;
}

/* Both lists are sorted by name. */
static int compare_with_map(const safetensors *f, const mapping *list, size_t n) {
    for (size_t i = 0; i < n || i < f->n_tensors; i++) {
        const tensor *t = i < f->n_tensors ? f->by_name[i] : NULL;
        int order = !t ? 1 : i == n ? -1 : strcmp(t->name, list[i].name);
        if (order < 0) return err_set(ERR_DATA, "weight_map does not have tensor '%s' of %s", t->name, t->file);
        if (order > 0)
            return err_set(ERR_DATA, "weight_map: tensor '%.*s' is not in '%.80s'", TENSOR_NAME_MAX, list[i].name,
                           list[i].file);
        if (strcmp(text_base_name(t->file), list[i].file) != 0)
            return err_set(ERR_DATA, "weight_map: tensor '%s' is in %s, not in '%.80s'", t->name, t->file,
                           list[i].file);
    }
    return 0;
}

static int open_mapped_set(safetensors *f, const char *index_path, const cJSON *index) {
    mapping *list = NULL;
    size_t n = 0;
    int code = read_map(index, &list, &n);
    if (code) err_prefix(code, "%s", index_path);
    if (!code) code = open_shards(f, index_path, list, n);
    if (!code) code = index_names(f);
    if (!code) {
        qsort(list, n, sizeof *list, compare_mappings);
        for (size_t i = 1; i < n && !code; i++)
            if (compare_mappings(&list[i - 1], &list[i]) == 0)
                code = err_set(ERR_DATA, "weight_map has '%.*s' twice", TENSOR_NAME_MAX, list[i].name);
        if (!code) code = compare_with_map(f, list, n);
        if (code) err_prefix(code, "%s", index_path);
    }
    mem_free(list);
    return code;
}

static int open_index(safetensors *f, const char *index_path) {
    mapped file = {0};
    cJSON *index = NULL;
    int code = mapped_open(&file, index_path, "safetensors index");
    if (!code && file.size > HEADER_MOST)
        code = err_set(ERR_DATA, "index of %zu bytes (at most %d)", file.size, HEADER_MOST);
    if (!code) code = parse_object(file.base, file.size, "index", &index);
    mapped_close(&file);
    if (code) return err_prefix(code, "%s", index_path);
    code = open_mapped_set(f, index_path, index);
    cJSON_Delete(index);
    return code;
}

/* ---- opening ---------------------------------------------------------------------------------------------------- */

static int open_file(safetensors *f, char *path) {
    TRY(add_shard(f, path));
    return index_names(f);
}

/* As transformers does: the one file goes before the index. */
static int open_folder(safetensors *f) {
    char *path;
    TRY(text_path(f->path, "model.safetensors", &path));
    if (access(path, F_OK) == 0) return open_file(f, path);
    mem_free(path);
    TRY(text_path(f->path, "model.safetensors.index.json", &path));
    int code = access(path, F_OK) == 0
                   ? open_index(f, path)
                   : err_set(ERR_DATA,
                             "%s: no model.safetensors and no model.safetensors.index.json there (other "
                             "formats, as pytorch_model.bin, are not read)",
                             f->path);
    mem_free(path);
    return code;
}

static int open_any(safetensors *f, const char *path) {
    struct stat st;
    f->path = mem_string(path);
    if (!f->path) return ERR_DATA;
    if (stat(path, &st) == 0 && S_ISDIR(st.st_mode)) return open_folder(f);
    char *file = mem_string(path);
    return file ? open_file(f, file) : ERR_DATA;
}

int safetensors_open(const char *folder, safetensors **out) {
    safetensors *f = mem_new(1, sizeof *f, "safetensors");
    if (!f) return ERR_DATA;
    int code = open_any(f, folder);
    if (code) safetensors_close(f);
    else *out = f;
    return code;
}

void safetensors_close(safetensors *s) {
    if (!s) return;
    for (size_t i = 0; i < s->n_shards; i++) {
        mapped_close(&s->shards[i].file);
        mem_free(s->shards[i].path);
    }
    mem_free(s->shards);
    mem_free(s->tensors);
    mem_free(s->by_name);
    mem_free(s->path);
    mem_free(s);
}
