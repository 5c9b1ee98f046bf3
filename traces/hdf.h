/* A thin layer over HDF5 for the files of this folder: failures become err_ messages, no object carries a time, every
 * dataset goes through one filter pipeline (byte shuffle, then zstd, both mandatory: an optional filter that is not
 * there would be skipped in silence).
 *
 * Messages name the attribute or dataset and HDF5's own reason; callers put the file in front with err_prefix.
 * HDF5 is not thread-safe: the thread that opened a file uses it. */
#pragma once

#include <hdf5.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ---- files and groups ------------------------------------------------------------------------------------------- */

/* Replace `path` by an empty file. */
int hdf_create(const char *path, hid_t *out);
/* Open for reading, without file locks (they fail on some network file systems, and no reader needs them). Says
 * whether the file is absent, unreadable, no HDF5 at all, or broken. */
int hdf_open(const char *path, hid_t *out);
/* Flush and close a file that was written; the place where a full disk often shows. */
int hdf_finish(hid_t file);

int hdf_new_group(hid_t parent, const char *name, hid_t *out);
bool hdf_has(hid_t parent, const char *path); /* is there an object at parent/path? */
/* The number of entries called 0000, 0001, ... in a group; anything else in it is an error. */
int hdf_count_numbered(hid_t parent, const char *group, size_t *n);

/* err_set(ERR_DATA, "WHAT: reason of the innermost HDF5 error"), operating system's words first. */
int hdf_error(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* ---- attributes ------------------------------------------------------------------------------------------------- */

int hdf_put_text(hid_t object, const char *name, const char *value); /* scalar variable-length UTF-8 */
int hdf_put_int(hid_t object, const char *name, int64_t value);      /* scalar i64 */
int hdf_put_number(hid_t object, const char *name, double value);    /* scalar f64 */
int hdf_put_ints(hid_t object, const char *name, const int32_t *values, size_t n);

/* An absent attribute is an error if `required`, else *value stays as it was. Any integer (bool too), float or string
 * type is read; a number outside min .. max is an error. Texts are owned by the caller and replace *value, which is
 * freed; hdf_get_text also takes numbers. */
int hdf_get_int(hid_t object, const char *name, bool required, int64_t min, int64_t max, int64_t *value);
int hdf_get_number(hid_t object, const char *name, double *value);
int hdf_get_text(hid_t object, const char *name, bool required, char **value);
/* values[n], or one value for all of them. */
int hdf_get_ints(hid_t object, const char *name, int32_t *values, size_t n);
bool hdf_has_attribute(hid_t object, const char *name);

/* Is this a file of ours? Checks the root attributes `format` (must equal) and `version` (1 .. newest). */
int hdf_check_format(hid_t file, const char *format, int newest);

/* ---- datasets --------------------------------------------------------------------------------------------------- */

/* IEEE binary16, little endian, as h5py's float16. HDF5 1.10 has no name for it, and converts f32 into it wrongly, so
 * it is only ever used as both sides of a transfer. Never closed by callers. */
hid_t hdf_f16(void);

/* Create a dataset with our pipeline. chunk NULL: whole rows of the first dimensions up to 1 MiB. Datasets without
 * elements cannot be chunked and are stored bare. */
int hdf_new_dataset(hid_t parent, const char *name, hid_t type, int rank, const hsize_t *dims, const hsize_t *chunk,
                    hid_t *out);
/* Write the block `count` at `start`; `type` is the dataset's own. */
int hdf_write_block(hid_t set, hid_t type, int rank, const hsize_t *start, const hsize_t *count, const void *values);
/* Create, write whole and close. */
int hdf_write_all(hid_t parent, const char *name, hid_t type, int rank, const hsize_t *dims, const void *values);

typedef enum hdf_kind { HDF_INTEGER, HDF_FLOAT } hdf_kind;

/* Open parent/name, check that it holds integers (bool too) or floats, its rank, and that HDF5 has its filters; *dims
 * receives its shape. */
int hdf_open_dataset(hid_t parent, const char *name, hdf_kind kind, int rank, hsize_t *dims, hid_t *out);
/* The same, refusing any shape but dims, where -1 stands for any size and receives the one found. */
int hdf_open_shaped(hid_t parent, const char *name, hdf_kind kind, int rank, int64_t *dims, hid_t *out);
/* Read the block `count` at `start` of a dataset as `type`. */
int hdf_read_block(hid_t set, hid_t type, int rank, const hsize_t *start, const hsize_t *count, void *values);
/* hdf_open_shaped, allocate, read whole as `type`, close. *out is owned by the caller. */
int hdf_read_all(hid_t parent, const char *name, hdf_kind kind, hid_t type, int rank, int64_t *dims, void **out);

/* What a chunked dataset's storage looks like. */
typedef struct hdf_layout {
    int rank;
    hsize_t dims[H5S_MAX_RANK], chunk[H5S_MAX_RANK]; /* chunk = dims where the dataset is not chunked */
    size_t size;                                     /* bytes of a stored value */
    bool chunked;
    bool ours; /* exactly shuffle, zstd (or zstd alone for bytes): its chunks can be unpacked by zstd_unpack */
} hdf_layout;
int hdf_get_layout(hid_t set, hdf_layout *out);
int64_t hdf_chunk_bytes(const hdf_layout *layout);

/* Paths of all datasets below the root in strcmp order, without leading '/'. Owned by the caller: hdf_free_names. */
int hdf_list_datasets(hid_t file, char ***names, size_t *n);
void hdf_free_names(char **names, size_t n);
