/* Datasets: the second half of hdf.h. */
#include "base/err.h"
#include "base/mem.h"
#include "base/text.h"
#include "traces/hdf.h"
#include "traces/zstd_filter.h"

#include <stdlib.h>
#include <string.h>

enum { CHUNK_BYTES = 1 << 20 };

/* ---- writing ---------------------------------------------------------------------------------------------------- */

/* Split the first dimensions until a chunk fits in CHUNK_BYTES, so that chunks are runs of the row-major array. */
static void default_chunk(int rank, const hsize_t *dims, size_t size, hsize_t *chunk) {
    hsize_t bytes = size;
    for (int d = rank - 1; d >= 0; d--) {
        hsize_t fit = bytes < CHUNK_BYTES ? CHUNK_BYTES / bytes : 1;
        chunk[d] = dims[d] < fit ? dims[d] : fit;
        bytes = chunk[d] < dims[d] ? CHUNK_BYTES : bytes * chunk[d];
    }
}

static hid_t new_creation(hid_t type, int rank, const hsize_t *dims, const hsize_t *chunk) {
    hid_t creation = H5Pcreate(H5P_DATASET_CREATE);
    hsize_t own[H5S_MAX_RANK], elements = 1;
    unsigned level = ZSTD_FILTER_LEVEL;
    H5Pset_obj_track_times(creation, false);
    for (int d = 0; d < rank; d++) elements *= dims[d];
    if (!elements) return creation;
    if (!chunk) default_chunk(rank, dims, H5Tget_size(type), own);
    bool fine = H5Pset_chunk(creation, rank, chunk ? chunk : own) >= 0 &&
                H5Pset_filter(creation, H5Z_FILTER_SHUFFLE, H5Z_FLAG_MANDATORY, 0, NULL) >= 0 &&
                H5Pset_filter(creation, ZSTD_FILTER_ID, H5Z_FLAG_MANDATORY, 1, &level) >= 0;
    if (fine) return creation;
    H5Pclose(creation);
    return H5I_INVALID_HID;
}

int hdf_new_dataset(hid_t parent, const char *name, hid_t type, int rank, const hsize_t *dims, const hsize_t *chunk,
                    hid_t *out) {
    *out = H5I_INVALID_HID;
    hid_t creation = new_creation(type, rank, dims, chunk);
    if (creation < 0) return hdf_error("%s: cannot be laid out", name);
    /* No chunk cache: a block that covers its chunks goes straight through the filters, in the order of the calls. */
    hid_t access = H5Pcreate(H5P_DATASET_ACCESS), space = H5Screate_simple(rank, dims, NULL);
    H5Pset_chunk_cache(access, 1, 0, 0);
    *out = H5Dcreate2(parent, name, type, space, H5P_DEFAULT, creation, access);
    int code = *out < 0 ? hdf_error("%s: write failed", name) : 0;
    H5Pclose(creation);
    H5Pclose(access);
    H5Sclose(space);
    return code;
}

static hid_t select_block(hid_t set, int rank, const hsize_t *start, const hsize_t *count) {
    hid_t space = H5Dget_space(set);
    if (space >= 0 && H5Sselect_hyperslab(space, H5S_SELECT_SET, start, NULL, count, NULL) >= 0 &&
        H5Sget_simple_extent_ndims(space) == rank)
        return space;
    if (space >= 0) H5Sclose(space);
    return H5I_INVALID_HID;
}

int hdf_write_block(hid_t set, hid_t type, int rank, const hsize_t *start, const hsize_t *count, const void *values) {
    hid_t space = select_block(set, rank, start, count), memory = H5Screate_simple(rank, count, NULL);
    bool fine = space >= 0 && H5Dwrite(set, type, memory, space, H5P_DEFAULT, values) >= 0;
    int code = fine ? 0 : hdf_error("write failed");
    if (space >= 0) H5Sclose(space);
    H5Sclose(memory);
    return code;
}

int hdf_write_all(hid_t parent, const char *name, hid_t type, int rank, const hsize_t *dims, const void *values) {
    hid_t set;
    hsize_t start[H5S_MAX_RANK] = {0}, elements = 1;
    TRY(hdf_new_dataset(parent, name, type, rank, dims, NULL, &set));
    for (int d = 0; d < rank; d++) elements *= dims[d];
    int code = elements ? hdf_write_block(set, type, rank, start, dims, values) : 0;
    if (H5Dclose(set) < 0 && !code) code = hdf_error("write failed");
    return code;
}

/* ---- reading ---------------------------------------------------------------------------------------------------- */

static const char *kind_fault(hid_t set, hdf_kind kind) {
    hid_t type = H5Dget_type(set);
    H5T_class_t class = H5Tget_class(type);
    H5Tclose(type);
    if (kind == HDF_FLOAT) return class == H5T_FLOAT ? NULL : "floating-point numbers";
    return class == H5T_INTEGER || class == H5T_ENUM ? NULL : "whole numbers";
}

static int check_filters(hid_t set, const char *name) {
    hid_t creation = H5Dget_create_plist(set);
    int n = H5Pget_nfilters(creation), code = 0;
    for (int i = 0; i < n && !code; i++) {
        char filter[64] = "?";
        unsigned flags, config;
        size_t n_values = 0;
        H5Z_filter_t id =
            H5Pget_filter2(creation, (unsigned)i, &flags, &n_values, NULL, sizeof filter, filter, &config);
        if (H5Zfilter_avail(id) <= 0)
            code =
                err_set(ERR_DATA, "%s: needs filter %d ('%s'), which is not there; use zstd or gzip", name, id, filter);
    }
    H5Pclose(creation);
    return code;
}

int hdf_open_dataset(hid_t parent, const char *name, hdf_kind kind, int rank, hsize_t *dims, hid_t *out) {
    *out = H5Dopen2(parent, name, H5P_DEFAULT);
    if (*out < 0) return hdf_error("%s: cannot be opened as a dataset", name);
    hid_t space = H5Dget_space(*out);
    int found = H5Sget_simple_extent_ndims(space);
    const char *want = kind_fault(*out, kind);
    int code = 0;
    if (want) code = err_set(ERR_DATA, "%s: holds no %s", name, want);
    else if (found != rank) code = err_set(ERR_DATA, "%s: has %d dimensions, expected %d", name, found, rank);
    else code = check_filters(*out, name);
    if (!code) H5Sget_simple_extent_dims(space, dims, NULL);
    H5Sclose(space);
    if (code) {
        H5Dclose(*out);
        *out = H5I_INVALID_HID;
    }
    return code;
}

static int shape_error(const char *name, int rank, const hsize_t *found, const int64_t *want) {
    text a = {0}, b = {0};
    int code = 0;
    for (int d = 0; d < rank && !code; d++) {
        const char *comma = d ? ", " : "";
        code = text_add(&a, "%s%llu", comma, (unsigned long long)found[d]);
        if (!code && want[d] < 0) code = text_add(&b, "%s*", comma);
        else if (!code) code = text_add(&b, "%s%lld", comma, (long long)want[d]);
    }
    if (!code) code = err_set(ERR_DATA, "%s: shape is [%s], expected [%s]", name, a.data, b.data);
    text_free(&a);
    text_free(&b);
    return code;
}

int hdf_open_shaped(hid_t parent, const char *name, hdf_kind kind, int rank, int64_t *dims, hid_t *out) {
    hsize_t found[H5S_MAX_RANK];
    TRY(hdf_open_dataset(parent, name, kind, rank, found, out));
    bool equal = true;
    for (int d = 0; d < rank; d++) equal = equal && (dims[d] < 0 || found[d] == (hsize_t)dims[d]);
    if (!equal) {
        H5Dclose(*out);
        *out = H5I_INVALID_HID;
        return shape_error(name, rank, found, dims);
    }
    for (int d = 0; d < rank; d++) dims[d] = (int64_t)found[d];
    return 0;
}

int hdf_read_block(hid_t set, hid_t type, int rank, const hsize_t *start, const hsize_t *count, void *values) {
    hdf_layout layout;
    TRY(hdf_get_layout(set, &layout));
    zstd_filter_limit(layout.chunked ? (size_t)hdf_chunk_bytes(&layout) : 0);
    hid_t space = select_block(set, rank, start, count), memory = H5Screate_simple(rank, count, NULL);
    bool fine = space >= 0 && H5Dread(set, type, memory, space, H5P_DEFAULT, values) >= 0;
    int code = fine ? 0 : hdf_error("corrupt or unreadable");
    if (space >= 0) H5Sclose(space);
    H5Sclose(memory);
    zstd_filter_limit(0);
    return code;
}

int hdf_read_all(hid_t parent, const char *name, hdf_kind kind, hid_t type, int rank, int64_t *dims, void **out) {
    hid_t set;
    hsize_t start[H5S_MAX_RANK] = {0}, count[H5S_MAX_RANK];
    size_t n = 1;
    *out = NULL;
    TRY(hdf_open_shaped(parent, name, kind, rank, dims, &set));
    int code = 0;
    for (int d = 0; d < rank && !code; d++) {
        count[d] = (hsize_t)dims[d];
        if (__builtin_mul_overflow(n, (size_t)dims[d], &n)) code = err_set(ERR_DATA, "%s: too large", name);
    }
    void *values = code ? NULL : mem_new(n, H5Tget_size(type), name);
    if (!values) code = ERR_DATA;
    if (!code && n && (code = hdf_read_block(set, type, rank, start, count, values))) err_prefix(code, "%s", name);
    H5Dclose(set);
    if (code) mem_free(values);
    else *out = values;
    return code;
}

/* ---- storage ---------------------------------------------------------------------------------------------------- */

static bool pipeline_is_ours(hid_t creation, size_t size) {
    int n = H5Pget_nfilters(creation);
    H5Z_filter_t id[2] = {0, 0};
    unsigned flags, config, width = 0;
    if (n < 1 || n > 2) return false;
    for (int i = 0; i < n; i++) {
        size_t n_values = 1;
        unsigned value = 0;
        id[i] = H5Pget_filter2(creation, (unsigned)i, &flags, &n_values, &value, 0, NULL, &config);
        if (i == 0) width = value;
    }
    if (n == 1) return size == 1 && id[0] == ZSTD_FILTER_ID;
    return id[0] == H5Z_FILTER_SHUFFLE && width == size && id[1] == ZSTD_FILTER_ID;
}

int hdf_get_layout(hid_t set, hdf_layout *out) {
    *out = (hdf_layout){0};
    hid_t space = H5Dget_space(set), type = H5Dget_type(set), creation = H5Dget_create_plist(set);
    bool fine = space >= 0 && type >= 0 && creation >= 0;
    if (fine) {
        out->rank = H5Sget_simple_extent_dims(space, out->dims, NULL);
        out->size = H5Tget_size(type);
        memcpy(out->chunk, out->dims, sizeof out->chunk);
        out->chunked = H5Pget_layout(creation) == H5D_CHUNKED;
        if (out->chunked) fine = H5Pget_chunk(creation, H5S_MAX_RANK, out->chunk) == out->rank;
        out->ours = out->chunked && pipeline_is_ours(creation, out->size);
    }
    int code = fine ? 0 : hdf_error("its layout cannot be read");
    if (space >= 0) H5Sclose(space);
    if (type >= 0) H5Tclose(type);
    if (creation >= 0) H5Pclose(creation);
    return code;
}

int64_t hdf_chunk_bytes(const hdf_layout *layout) {
    int64_t bytes = (int64_t)layout->size; /* HDF5 keeps chunks below 4 GiB */
    for (int d = 0; d < layout->rank; d++) bytes *= (int64_t)layout->chunk[d];
    return bytes;
}

/* ---- listing ---------------------------------------------------------------------------------------------------- */

typedef struct name_list {
    char **name;
    size_t n, capacity;
    int code;
} name_list;

static herr_t visit(hid_t root, const char *path, const H5L_info_t *info, void *context) {
    name_list *list = context;
    if (info->type != H5L_TYPE_HARD) return 0;
    hid_t object = H5Oopen(root, path, H5P_DEFAULT);
    bool dataset = object >= 0 && H5Iget_type(object) == H5I_DATASET;
    if (object >= 0) H5Oclose(object);
    if (!dataset) return 0;
    list->code = mem_grow((void **)&list->name, &list->capacity, list->n + 1, sizeof *list->name, "dataset names");
    if (list->code) return -1;
    char *copy = mem_string(path);
    if (!copy) list->code = ERR_DATA;
    else list->name[list->n++] = copy;
    return list->code ? -1 : 0;
}

static int by_name(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

int hdf_list_datasets(hid_t file, char ***names, size_t *n) {
    name_list list = {0};
    if (H5Lvisit(file, H5_INDEX_NAME, H5_ITER_INC, visit, &list) < 0) {
        hdf_free_names(list.name, list.n);
        return list.code ? list.code : hdf_error("its contents cannot be listed");
    }
    if (list.n) qsort(list.name, list.n, sizeof *list.name, by_name);
    *names = list.name;
    *n = list.n;
    return 0;
}

void hdf_free_names(char **names, size_t n) {
    for (size_t i = 0; i < n; i++) mem_free(names[i]);
    mem_free(names);
}
