#include "traces/hdf.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/text.h"
#include "traces/zstd_filter.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "values go to and from disk as they lie in memory");

/* ---- errors ----------------------------------------------------------------------------------------------------- */

static herr_t innermost(unsigned n, const H5E_error2_t *error, void *out) {
    if (n == 0) snprintf(out, ERR_MESSAGE_MAX, "%s", error->desc);
    return 0;
}

int hdf_error(const char *format, ...) {
    char what[ERR_MESSAGE_MAX], reason[ERR_MESSAGE_MAX] = "";
    H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, innermost, reason);
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    /* A failed system call is described as "..., error message = 'No space left on device', ...": keep the quote. */
    const char *mark = "error message = '", *said = strstr(reason, mark);
    if (said) {
        said += strlen(mark);
        return err_set(ERR_DATA, "%s: %.*s", what, (int)strcspn(said, "'"), said);
    }
    return err_set(ERR_DATA, "%s%s%s", what, *reason ? ": " : "", reason);
}

/* ---- files and groups ------------------------------------------------------------------------------------------- */

static hid_t f16_type = H5I_INVALID_HID; /* set by start(), lives as long as the library */

/* Once per process, before anything else: HDF5 must neither print errors nor, at exit, retry writes that failed. */
static int start(void) {
    if (f16_type >= 0) return 0;
    H5dont_atexit();
    if (H5open() < 0) return hdf_error("HDF5 does not start");
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
    TRY(zstd_filter_register());
    hid_t type = H5Tcopy(H5T_IEEE_F32LE);
    bool fine = type >= 0 && H5Tset_fields(type, 15, 10, 5, 0, 10) >= 0 && H5Tset_ebias(type, 15) >= 0 &&
                H5Tset_precision(type, 16) >= 0 && H5Tset_size(type, 2) >= 0;
    if (!fine) return hdf_error("HDF5 cannot describe float16");
    f16_type = type;
    return 0;
}

hid_t hdf_f16(void) {
    return start() ? H5I_INVALID_HID : f16_type;
}

static hid_t file_access(void) {
    hid_t access = H5Pcreate(H5P_FILE_ACCESS);
    H5Pset_libver_bounds(access, H5F_LIBVER_V110, H5F_LIBVER_V110);
    H5Pset_file_locking(access, false, true);
    return access;
}

int hdf_create(const char *path, hid_t *out) {
    TRY(start());
    hid_t creation = H5Pcreate(H5P_FILE_CREATE), access = file_access();
    H5Pset_obj_track_times(creation, false);
    *out = H5Fcreate(path, H5F_ACC_TRUNC, creation, access);
    H5Pclose(creation);
    H5Pclose(access);
    return *out < 0 ? hdf_error("cannot be created") : 0;
}

/* HDF5's signature stands at byte 0, 512, 1024, 2048, ... */
static bool has_signature(FILE *f) {
    char head[8];
    for (long at = 0; at <= 1 << 20; at = at ? at * 2 : 512)
        if (fseek(f, at, SEEK_SET) != 0 || fread(head, 1, 8, f) != 8) return false;
        else if (memcmp(head, "\x89HDF\r\n\x1a\n", 8) == 0) return true;
    return false;
}

int hdf_open(const char *path, hid_t *out) {
    *out = H5I_INVALID_HID;
    TRY(start());
    struct stat st;
    FILE *f = fopen(path, "rb");
    if (!f || fstat(fileno(f), &st) != 0) {
        int why = errno;
        if (f) fclose(f);
        return err_set(ERR_DATA, "cannot be opened: %s", strerror(why));
    }
    bool folder = S_ISDIR(st.st_mode), hdf = !folder && has_signature(f);
    fclose(f);
    if (folder) return err_set(ERR_DATA, "is a folder, not a file");
    if (!hdf) return err_set(ERR_DATA, "not a kvlag file (not HDF5)");
    hid_t access = file_access();
    *out = H5Fopen(path, H5F_ACC_RDONLY, access);
    H5Pclose(access);
    return *out < 0 ? hdf_error("cannot be opened, cut short or never finished") : 0;
}

int hdf_finish(hid_t file) {
    int code = H5Fflush(file, H5F_SCOPE_LOCAL) < 0 ? hdf_error("write failed") : 0;
    if (H5Fclose(file) < 0 && !code) code = hdf_error("write failed");
    return code;
}

int hdf_new_group(hid_t parent, const char *name, hid_t *out) {
    hid_t creation = H5Pcreate(H5P_GROUP_CREATE);
    H5Pset_obj_track_times(creation, false);
    *out = H5Gcreate2(parent, name, H5P_DEFAULT, creation, H5P_DEFAULT);
    H5Pclose(creation);
    return *out < 0 ? hdf_error("%s: write failed", name) : 0;
}

bool hdf_has(hid_t parent, const char *path) {
    char part[256];
    for (const char *slash = path; (slash = strchr(slash, '/')) != NULL; slash++) {
        snprintf(part, sizeof part, "%.*s", (int)(slash - path), path);
        if (H5Lexists(parent, part, H5P_DEFAULT) <= 0) return false;
    }
    return H5Lexists(parent, path, H5P_DEFAULT) > 0 && H5Oexists_by_name(parent, path, H5P_DEFAULT) > 0;
}

int hdf_count_numbered(hid_t parent, const char *group, size_t *n) {
    *n = 0;
    if (!hdf_has(parent, group)) return 0;
    hid_t g = H5Gopen2(parent, group, H5P_DEFAULT);
    H5G_info_t info;
    bool fine = g >= 0 && H5Gget_info(g, &info) >= 0;
    if (g >= 0) H5Gclose(g);
    if (!fine) return hdf_error("%s: is not a group", group);
    for (hsize_t i = 0; i < info.nlinks; i++) {
        char name[256];
        snprintf(name, sizeof name, "%s/%04llu", group, (unsigned long long)i);
        if (!hdf_has(parent, name))
            return err_set(ERR_DATA, "%s: holds %llu entries but no %s (they are named 0000, 0001, ...)", group,
                           (unsigned long long)info.nlinks, name);
    }
    *n = (size_t)info.nlinks;
    return 0;
}

/* ---- attributes ------------------------------------------------------------------------------------------------- */

static int put(hid_t object, const char *name, hid_t type, hid_t space, const void *value) {
    hid_t attribute = H5Acreate2(object, name, type, space, H5P_DEFAULT, H5P_DEFAULT);
    bool fine = attribute >= 0 && H5Awrite(attribute, type, value) >= 0;
    int code = fine ? 0 : hdf_error("attribute '%s': write failed", name);
    if (attribute >= 0) H5Aclose(attribute);
    H5Sclose(space);
    return code;
}

static hid_t text_type(void) {
    hid_t type = H5Tcopy(H5T_C_S1);
    H5Tset_size(type, H5T_VARIABLE);
    H5Tset_cset(type, H5T_CSET_UTF8);
    return type;
}

int hdf_put_text(hid_t object, const char *name, const char *value) {
    hid_t type = text_type();
    int code = put(object, name, type, H5Screate(H5S_SCALAR), &value);
    H5Tclose(type);
    return code;
}

int hdf_put_int(hid_t object, const char *name, int64_t value) {
    return put(object, name, H5T_STD_I64LE, H5Screate(H5S_SCALAR), &value);
}

int hdf_put_number(hid_t object, const char *name, double value) {
    return put(object, name, H5T_IEEE_F64LE, H5Screate(H5S_SCALAR), &value);
}

int hdf_put_ints(hid_t object, const char *name, const int32_t *values, size_t n) {
    return put(object, name, H5T_STD_I32LE, H5Screate_simple(1, (const hsize_t[]){n}, NULL), values);
}

bool hdf_has_attribute(hid_t object, const char *name) {
    return H5Aexists(object, name) > 0;
}

/* An attribute being read. */
typedef struct attribute {
    hid_t id, type;
    H5T_class_t class;
    hssize_t n;
} attribute;

static void close_attribute(attribute *a) {
    if (a->type >= 0) H5Tclose(a->type);
    if (a->id >= 0) H5Aclose(a->id);
}

static int open_attribute(hid_t object, const char *name, attribute *a) {
    *a = (attribute){.id = H5Aopen(object, name, H5P_DEFAULT), .type = H5I_INVALID_HID};
    if (a->id < 0) return hdf_error("attribute '%s'", name);
    a->type = H5Aget_type(a->id);
    a->class = H5Tget_class(a->type);
    hid_t space = H5Aget_space(a->id);
    a->n = H5Sget_simple_extent_npoints(space);
    H5Sclose(space);
    return 0;
}

static bool holds_integers(H5T_class_t class) {
    return class == H5T_INTEGER || class == H5T_ENUM; /* h5py stores numpy's bool as an enum */
}

static int absent(const char *name, bool required) {
    return required ? err_set(ERR_DATA, "attribute '%s' is missing", name) : 0;
}

static int read_int(const attribute *a, const char *name, int64_t *value) {
    if (a->n != 1 || !holds_integers(a->class))
        return err_set(ERR_DATA, "attribute '%s': expected one whole number", name);
    return H5Aread(a->id, H5T_NATIVE_INT64, value) < 0 ? hdf_error("attribute '%s'", name) : 0;
}

int hdf_get_int(hid_t object, const char *name, bool required, int64_t min, int64_t max, int64_t *value) {
    if (!hdf_has_attribute(object, name)) return absent(name, required);
    attribute a;
    int64_t x = 0;
    int code = open_attribute(object, name, &a);
    if (!code) code = read_int(&a, name, &x);
    close_attribute(&a);
    TRY(code);
    if (x < min || x > max)
        return err_set(ERR_DATA, "attribute '%s' is %lld (want %lld to %lld)", name, (long long)x, (long long)min,
                       (long long)max);
    *value = x;
    return 0;
}

static int read_number(const attribute *a, const char *name, double *value) {
    if (a->n != 1 || (a->class != H5T_FLOAT && !holds_integers(a->class)))
        return err_set(ERR_DATA, "attribute '%s': expected one number", name);
    return H5Aread(a->id, H5T_NATIVE_DOUBLE, value) < 0 ? hdf_error("attribute '%s'", name) : 0;
}

int hdf_get_number(hid_t object, const char *name, double *value) {
    if (!hdf_has_attribute(object, name)) return 0;
    attribute a;
    int code = open_attribute(object, name, &a);
    if (!code) code = read_number(&a, name, value);
    close_attribute(&a);
    return code;
}

/* Variable-length strings come as a pointer owned by HDF5 (NULL for ""), fixed ones as bytes. */
static int read_string(const attribute *a, const char *name, text *out) {
    if (H5Tis_variable_str(a->type) > 0) {
        hid_t type = text_type();
        H5Tset_cset(type, H5Tget_cset(a->type)); /* HDF5 converts no character sets */
        char *s = NULL;
        int code = H5Aread(a->id, type, &s) < 0 ? hdf_error("attribute '%s'", name) : 0;
        if (!code) code = text_add(out, "%s", s ? s : "");
        H5free_memory(s);
        H5Tclose(type);
        return code;
    }
    size_t size = H5Tget_size(a->type);
    char *bytes = mem_new(size + 1, 1, "attribute");
    if (!bytes) return ERR_DATA;
    int code = H5Aread(a->id, a->type, bytes) < 0 ? hdf_error("attribute '%s'", name) : 0;
    if (!code) code = text_add(out, "%s", bytes);
    mem_free(bytes);
    return code;
}

static int read_as_text(const attribute *a, const char *name, text *out) {
    int64_t whole;
    double number;
    char digits[32];
    if (a->n != 1) return err_set(ERR_DATA, "attribute '%s': expected one value", name);
    if (a->class == H5T_STRING) return read_string(a, name, out);
    if (holds_integers(a->class)) {
        TRY(read_int(a, name, &whole));
        return text_add(out, "%lld", (long long)whole);
    }
    if (a->class != H5T_FLOAT) return err_set(ERR_DATA, "attribute '%s': expected text", name);
    TRY(read_number(a, name, &number));
    return text_add(out, "%s", text_number(digits, number));
}

int hdf_get_text(hid_t object, const char *name, bool required, char **value) {
    if (!hdf_has_attribute(object, name)) return absent(name, required);
    attribute a;
    text out = {0};
    int code = open_attribute(object, name, &a);
    if (!code) code = read_as_text(&a, name, &out);
    close_attribute(&a);
    if (code) {
        text_free(&out);
        return code;
    }
    mem_free(*value);
    *value = out.data;
    return 0;
}

int hdf_get_ints(hid_t object, const char *name, int32_t *values, size_t n) {
    if (!hdf_has_attribute(object, name)) return 0;
    attribute a;
    int code = open_attribute(object, name, &a);
    if (!code && (!holds_integers(a.class) || (a.n != 1 && a.n != (hssize_t)n)))
        code = err_set(ERR_DATA, "attribute '%s': expected 1 or %zu whole numbers", name, n);
    if (!code && H5Aread(a.id, H5T_NATIVE_INT32, values) < 0) code = hdf_error("attribute '%s'", name);
    for (size_t i = 1; i < n && !code && a.n == 1; i++) values[i] = values[0];
    close_attribute(&a);
    return code;
}

int hdf_check_format(hid_t file, const char *format, int newest) {
    char *found = NULL;
    int64_t version = 0;
    if (!hdf_has_attribute(file, "format")) return err_set(ERR_DATA, "not a kvlag file (no attribute 'format')");
    TRY(hdf_get_text(file, "format", true, &found));
    int code = 0;
    if (strcmp(found, format) != 0) code = err_set(ERR_DATA, "format is '%s', expected '%s'", found, format);
    mem_free(found);
    TRY(code);
    TRY(hdf_get_int(file, "version", true, 1, INT64_MAX, &version));
    if (version > newest)
        return err_set(ERR_DATA, "version %lld of '%s' is newer than this program's %d; use a newer kvlag",
                       (long long)version, format, newest);
    return 0;
}
