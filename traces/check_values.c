/* Every value of every dataset, and the content hash. */
#include "base/err.h"
#include "base/half.h"
#include "base/mem.h"
#include "base/text.h"
#include "traces/check_private.h"
#include "traces/tiles.h"

#include <math.h>
#include <string.h>
#include <xxhash.h>

static const size_t SLAB_BYTES = (size_t)64 << 20;

/* ---- values that are not finite --------------------------------------------------------------------------------- */

/* The first value that is not finite, or n. Bit patterns of IEEE numbers that lie in memory as they are stored. */
static size_t first_bad(const void *values, size_t n, size_t size) {
    const half *h = values;
    const float *f = values;
    const double *d = values;
    bool bad = false;
    if (size == 2) {
        for (size_t i = 0; i < n; i++) bad |= (h[i] & 0x7c00u) == 0x7c00u;
    } else if (size == 4) {
        for (size_t i = 0; i < n; i++) bad |= (half_bits_of(f[i]) & 0x7f800000u) == 0x7f800000u;
    } else {
        for (size_t i = 0; i < n; i++) bad |= !isfinite(d[i]);
    }
    if (!bad) return n;
    for (size_t i = 0; i < n; i++)
        if (size == 2 ? (h[i] & 0x7c00u) == 0x7c00u : !isfinite(size == 4 ? (double)f[i] : d[i])) return i;
    return n;
}

/* What a dataset's dimensions are; the first whose words are in its path. */
static const struct {
    const char *in, *dim[5];
} axes[] = {
    {"/grad/fisher_label", {"sample", "step"}},
    {"/grad/fisher", {"sample", "layer", "head", "step", "dimension"}},
    {"/attn/probs", {"layer", "head", "step", "entry"}},
    {"/attn/", {"layer", "head", "step", "dimension"}},
    {"/grad/", {"layer", "head", "step", "dimension"}},
    {"/logits/", {"step", "column"}},
    {"model/wo", {"layer", "row", "column"}},
};

/* The value number `index` of a block of dimensions `block` that begins at `start`. */
static int not_finite(const trace *t, const char *name, int rank, const hsize_t *start, const hsize_t *block,
                      size_t index) {
    text place = {0};
    size_t kind = 0, kinds = sizeof axes / sizeof *axes, inner = 1;
    while (kind < kinds && !strstr(name, axes[kind].in)) kind++;
    for (int d = 0; d < rank; d++) inner *= (size_t)block[d];
    int code = 0;
    for (int d = 0; d < rank && !code; d++) {
        inner /= (size_t)block[d];
        const char *word = kind < kinds && d < 5 && axes[kind].dim[d] ? axes[kind].dim[d] : "index";
        code = text_add(&place, "%s %s %zu", d ? "," : " at", word, (size_t)start[d] + index / inner);
        index %= inner;
    }
    if (!code) code = err_set(ERR_DATA, "%s: %s: holds a value that is not finite%s", t->path, name, place.data);
    text_free(&place);
    return code;
}

/* ---- reading ---------------------------------------------------------------------------------------------------- */

typedef struct scan {
    trace *t;
    const char *name;
    content_hash *hash; /* NULL: the file carries none */
    size_t digest;
    bool floats;
    hid_t type;  /* of values in memory: as stored, but for floats that first_bad does not know */
    size_t size; /* of such a value */
} scan;

/* By chunks: decoded in the pool, in index order over those that are there. */
typedef struct chunk_scan {
    scan *s;
    const hdf_layout *layout;
    tiles_job *job;
    size_t values, size;
    uint64_t hash[TILES_BATCH];
} chunk_scan;

static int scan_chunk(void *context, size_t i, int worker) {
    (void)worker;
    chunk_scan *c = context;
    if (!c->job[i].bytes) return 0;
    c->hash[i] = XXH3_64bits(c->job[i].to, c->values * c->size);
    size_t bad = first_bad(c->job[i].to, c->values, c->size);
    if (bad == c->values) return 0;
    return not_finite(c->s->t, c->s->name, c->layout->rank, c->job[i].offset, c->layout->chunk, bad);
}

static int scan_batch(scan *s, tiles *source, tiles_job *job, size_t n, pool *p) {
    chunk_scan c = {.s = s, .layout = &source->layout, .job = job, .size = source->size};
    c.values = (size_t)hdf_chunk_bytes(&source->layout) / source->size;
    TRY(tiles_run(source, job, n, p));
    TRY(pool_run(p, n, scan_chunk, &c));
    for (size_t i = 0; i < n; i++) {
        uint64_t place[TILES_RANK];
        for (int d = 0; d < source->layout.rank; d++) place[d] = job[i].offset[d];
        if (s->hash && job[i].bytes) content_hash_chunk(s->hash, s->digest, source->layout.rank, place, c.hash[i]);
    }
    return 0;
}

/* The next chunk in index order; false after the last. */
static bool next_chunk(const hdf_layout *l, hsize_t *offset) {
    for (int d = l->rank - 1; d >= 0; d--) {
        offset[d] += l->chunk[d];
        if (offset[d] < l->dims[d]) return true;
        offset[d] = 0;
    }
    return false;
}

static int scan_packed(scan *s, tiles *source, pool *p) {
    size_t bytes = (size_t)hdf_chunk_bytes(&source->layout), n = 0;
    char *values = mem_new(TILES_BATCH, bytes, s->name);
    if (!values) return ERR_DATA;
    tiles_job job[TILES_BATCH];
    hsize_t offset[TILES_RANK] = {0};
    int code = 0;
    bool more = true;
    while (more && !code) {
        job[n] = (tiles_job){.to = values + n * bytes, .may_be_absent = true};
        memcpy(job[n++].offset, offset, sizeof offset);
        more = next_chunk(&source->layout, offset);
        if (more && n < TILES_BATCH) continue;
        code = scan_batch(s, source, job, n, p);
        n = 0;
    }
    mem_free(values);
    return code;
}

/* As one row-major run, in slabs over the first dimensions. */
static int scan_slabs(scan *s, hid_t set, const hdf_layout *l) {
    hsize_t start[H5S_MAX_RANK] = {0}, count[H5S_MAX_RANK];
    size_t bytes = s->size, whole = (size_t)l->rank, n = 1; /* dimensions from `whole` on are read whole */
    for (; whole > 0 && (bytes * l->dims[whole - 1] <= SLAB_BYTES || whole == (size_t)l->rank); whole--)
        bytes *= (size_t)l->dims[whole - 1];
    for (size_t d = 0; d < (size_t)l->rank; d++) count[d] = d < whole ? 1 : l->dims[d];
    hdf_layout step = *l;
    memcpy(step.chunk, count, sizeof count);
    n = bytes / s->size;
    void *values = mem_new(n, s->size, s->name);
    if (!values) return ERR_DATA;
    int code = 0;
    do {
        code = hdf_read_block(set, s->type, l->rank, start, count, values);
        if (code) err_prefix(code, "%s: %s", s->t->path, s->name);
        else if (s->hash) content_hash_values(s->hash, s->digest, values, bytes);
        size_t bad = !code && s->floats ? first_bad(values, n, s->size) : n;
        if (bad < n) code = not_finite(s->t, s->name, l->rank, start, count, bad);
    } while (!code && next_chunk(&step, start));
    mem_free(values);
    return code;
}

static bool is_empty(const hdf_layout *l) {
    for (int d = 0; d < l->rank; d++)
        if (!l->dims[d]) return true;
    return false;
}

/* Returns whether there are numbers to scan. */
static bool set_types(scan *s, hid_t type, const hdf_layout *l) {
    H5T_class_t class = H5Tget_class(type);
    bool known =
        H5Tequal(type, hdf_f16()) > 0 || H5Tequal(type, H5T_IEEE_F32LE) > 0 || H5Tequal(type, H5T_IEEE_F64LE) > 0;
    s->floats = class == H5T_FLOAT;
    s->type = s->floats && !known ? H5T_NATIVE_DOUBLE : type;
    s->size = s->floats && !known ? sizeof(double) : l->size;
    return (class == H5T_INTEGER || class == H5T_FLOAT) && l->rank > 0 && !is_empty(l);
}

static int scan_numbers(scan *s, hid_t set, const hdf_layout *l, pool *p) {
    tiles source = {0};
    bool chunks = l->rank >= CONTENT_HASH_CHUNKED_RANK && l->rank <= TILES_RANK && s->floats;
    int code = chunks ? tiles_open(&source, s->t->h5, s->t->path, s->name, l->rank, false) : 0;
    if (!code) code = source.packed ? scan_packed(s, &source, p) : scan_slabs(s, set, l);
    tiles_close(&source);
    return code;
}

static int scan_dataset(scan *s, hid_t set, pool *p) {
    hdf_layout l;
    TRY(hdf_get_layout(set, &l));
    hid_t type = H5Dget_type(set);
    uint64_t dims[H5S_MAX_RANK];
    for (int d = 0; d < l.rank; d++) dims[d] = l.dims[d];
    int code = 0;
    if (s->hash) code = content_hash_dataset(s->hash, s->name, l.rank, dims, l.size, &s->digest);
    if (set_types(s, type, &l) && !code) code = scan_numbers(s, set, &l, p);
    H5Tclose(type);
    return code;
}

static int scan_all(trace *t, content_hash *hash, pool *p) {
    char **name;
    size_t n;
    TRY(hdf_list_datasets(t->h5, &name, &n));
    int code = 0;
    for (size_t i = 0; i < n && !code; i++) {
        hid_t set = H5Dopen2(t->h5, name[i], H5P_DEFAULT);
        scan s = {.t = t, .name = name[i], .hash = hash};
        code = set < 0 ? hdf_error("%s: %s", t->path, name[i]) : scan_dataset(&s, set, p);
        if (set >= 0) H5Dclose(set);
    }
    hdf_free_names(name, n);
    return code;
}

int check_values(trace *t, pool *p) {
    content_hash *hash = NULL;
    char hex[CONTENT_HASH_HEX];
    if (!t->hash_stored) return scan_all(t, NULL, p);
    int code = content_hash_new(&hash);
    if (!code) code = content_hash_model(hash, &t->model);
    for (size_t i = 0; i < t->n_seq && !code; i++) code = content_hash_sequence(hash, i, &t->seq[i]);
    if (!code) code = scan_all(t, hash, p);
    if (!code) code = content_hash_finish(hash, hex);
    content_hash_free(hash);
    if (!code && strcmp(hex, t->hash) != 0)
        code = err_set(ERR_DATA, "%s: content hash is %s, but the content's is %s: the file was changed", t->path,
                       t->hash, hex);
    return code;
}
