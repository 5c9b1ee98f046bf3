#include "traces/zstd_filter.h"
#include "base/err.h"
#include "base/mem.h"
#include "traces/kernels.h"

#include <hdf5.h>
#include <stdint.h>
#include <string.h>
#include <zstd.h>

/* ---- the filter, as HDF5 calls it ------------------------------------------------------------------------------- */

static _Thread_local size_t content_limit;

void zstd_filter_limit(size_t bytes) {
    content_limit = bytes;
}

/* What is wrong with a frame that must hold at most (or exactly) this much; NULL = nothing. */
static const char *frame_fault(const void *frame, size_t bytes, size_t limit, bool exactly) {
    unsigned long long content = ZSTD_getFrameContentSize(frame, bytes);
    if (content == ZSTD_CONTENTSIZE_ERROR) return "not a zstd frame";
    if (content == ZSTD_CONTENTSIZE_UNKNOWN) return "the zstd frame does not state its content size";
    if (content > limit) return "the zstd frame claims more bytes than the chunk holds";
    if (exactly && content != limit) return "the zstd frame holds fewer bytes than the chunk";
    return NULL;
}

static ZSTD_CCtx *new_compressor(int level) {
    ZSTD_CCtx *c = ZSTD_createCCtx();
    if (!c) return NULL;
    ZSTD_CCtx_setParameter(c, ZSTD_c_compressionLevel, level);
    ZSTD_CCtx_setParameter(c, ZSTD_c_checksumFlag, 1);
    ZSTD_CCtx_setParameter(c, ZSTD_c_contentSizeFlag, 1);
    return c;
}

static size_t filter_fault(const char *what) {
    H5Epush2(H5E_DEFAULT, __FILE__, __func__, __LINE__, H5E_ERR_CLS, H5E_PLINE, H5E_CANTFILTER, "%s", what);
    return 0;
}

static size_t replace_buffer(void *with, size_t n, size_t capacity, size_t *buffer_size, void **buffer) {
    H5free_memory(*buffer);
    *buffer = with;
    *buffer_size = capacity;
    return n;
}

static size_t filter_decode(size_t n, size_t *buffer_size, void **buffer) {
    const char *fault = frame_fault(*buffer, n, content_limit ? content_limit : UINT32_MAX, false);
    if (fault) return filter_fault(fault);
    size_t content = (size_t)ZSTD_getFrameContentSize(*buffer, n);
    void *to = H5allocate_memory(content ? content : 1, false);
    if (!to) return filter_fault("out of memory");
    size_t got = ZSTD_decompress(to, content, *buffer, n);
    if (ZSTD_isError(got)) {
        H5free_memory(to);
        return filter_fault(ZSTD_getErrorName(got));
    }
    return replace_buffer(to, got, content, buffer_size, buffer);
}

static size_t filter_encode(int level, size_t n, size_t *buffer_size, void **buffer) {
    size_t bound = ZSTD_compressBound(n), got = 0;
    void *to = H5allocate_memory(bound, false);
    ZSTD_CCtx *c = new_compressor(level);
    if (to && c) got = ZSTD_compress2(c, to, bound, *buffer, n);
    ZSTD_freeCCtx(c);
    if (!to || !c || ZSTD_isError(got)) {
        H5free_memory(to);
        return filter_fault("zstd cannot compress");
    }
    return replace_buffer(to, got, bound, buffer_size, buffer);
}

static size_t filter(unsigned flags, size_t n_values, const unsigned values[], size_t n, size_t *buffer_size,
                     void **buffer) {
    if (flags & H5Z_FLAG_REVERSE) return filter_decode(n, buffer_size, buffer);
    return filter_encode(n_values > 0 ? (int)values[0] : ZSTD_FILTER_LEVEL, n, buffer_size, buffer);
}

int zstd_filter_register(void) {
    static const H5Z_class2_t class = {
        .version = H5Z_CLASS_T_VERS,
        .id = ZSTD_FILTER_ID,
        .encoder_present = 1,
        .decoder_present = 1,
        .name = "zstd",
        .filter = filter,
    };
    if (H5Zregister(&class) < 0) return err_set(ERR_DATA, "HDF5 does not accept the zstd filter");
    return 0;
}

/* ---- the same form, by our own threads -------------------------------------------------------------------------- */

struct zstd_work {
    ZSTD_CCtx *compressor;
    ZSTD_DCtx *decompressor;
    unsigned char *shuffled, *frame;
    size_t shuffled_capacity, frame_capacity;
};

int zstd_work_new(zstd_work **out) {
    *out = NULL;
    zstd_work *w = mem_new(1, sizeof *w, "zstd scratch");
    if (!w) return ERR_DATA;
    w->compressor = new_compressor(ZSTD_FILTER_LEVEL);
    w->decompressor = ZSTD_createDCtx();
    if (!w->compressor || !w->decompressor) {
        zstd_work_free(w);
        return err_set(ERR_DATA, "out of memory for zstd");
    }
    *out = w;
    return 0;
}

void zstd_work_free(zstd_work *w) {
    if (!w) return;
    ZSTD_freeCCtx(w->compressor);
    ZSTD_freeDCtx(w->decompressor);
    mem_free(w->shuffled);
    mem_free(w->frame);
    mem_free(w);
}

static void shuffle(const unsigned char *from, unsigned char *to, size_t n, size_t size) {
    if (size == 2) kernels()->shuffle2(from, to, n);
    else
        for (size_t b = 0; b < size; b++)
            for (size_t i = 0; i < n; i++) to[b * n + i] = from[i * size + b];
}

static void unshuffle(const unsigned char *from, unsigned char *to, size_t n, size_t size) {
    if (size == 2) kernels()->unshuffle2(from, to, n);
    else
        for (size_t b = 0; b < size; b++)
            for (size_t i = 0; i < n; i++) to[i * size + b] = from[b * n + i];
}

int zstd_pack(zstd_work *w, const void *values, size_t n, size_t size, void **frame, size_t *bytes) {
    *frame = NULL;
    size_t content = n * size, bound = ZSTD_compressBound(content);
    TRY(mem_grow((void **)&w->shuffled, &w->shuffled_capacity, content, 1, "chunk"));
    TRY(mem_grow((void **)&w->frame, &w->frame_capacity, bound, 1, "chunk"));
    const void *from = values;
    if (size > 1) {
        shuffle(values, w->shuffled, n, size);
        from = w->shuffled;
    }
    size_t got = ZSTD_compress2(w->compressor, w->frame, w->frame_capacity, from, content);
    if (ZSTD_isError(got)) return err_set(ERR_DATA, "zstd cannot compress: %s", ZSTD_getErrorName(got));
    void *copy = mem_new(got, 1, "packed chunk");
    if (!copy) return ERR_DATA;
    memcpy(copy, w->frame, got);
    *frame = copy;
    *bytes = got;
    return 0;
}

static int decompress(zstd_work *w, const void *frame, size_t bytes, void *to, size_t content) {
    const char *fault = frame_fault(frame, bytes, content, true);
    if (fault) return err_set(ERR_DATA, "%s", fault);
    size_t got = ZSTD_decompressDCtx(w->decompressor, to, content, frame, bytes);
    if (ZSTD_isError(got)) return err_set(ERR_DATA, "%s", ZSTD_getErrorName(got));
    if (got != content) return err_set(ERR_DATA, "the zstd frame holds fewer bytes than the chunk");
    return 0;
}

/* Undo the compression only. */
static int inflate(zstd_work *w, const void *frame, size_t bytes, unsigned skipped, size_t content, void *to) {
    if (!(skipped & 2)) return decompress(w, frame, bytes, to, content);
    if (bytes != content)
        return err_set(ERR_DATA, "an uncompressed chunk of %zu bytes where %zu belong", bytes, content);
    memcpy(to, frame, content);
    return 0;
}

int zstd_unpack(zstd_work *w, const void *frame, size_t bytes, unsigned skipped, size_t n, size_t size, void *values) {
    if ((skipped & 1) || size == 1) return inflate(w, frame, bytes, skipped, n * size, values);
    TRY(mem_grow((void **)&w->shuffled, &w->shuffled_capacity, n * size, 1, "chunk"));
    TRY(inflate(w, frame, bytes, skipped, n * size, w->shuffled));
    unshuffle(w->shuffled, values, n, size);
    return 0;
}

int zstd_unpack_planes(zstd_work *w, const void *frame, size_t bytes, unsigned skipped, size_t n, void *planes) {
    if (!(skipped & 1)) return inflate(w, frame, bytes, skipped, 2 * n, planes);
    TRY(mem_grow((void **)&w->shuffled, &w->shuffled_capacity, 2 * n, 1, "chunk"));
    TRY(inflate(w, frame, bytes, skipped, 2 * n, w->shuffled));
    shuffle(w->shuffled, planes, n, 2);
    return 0;
}

size_t zstd_frame_bound(size_t n) {
    return ZSTD_compressBound(n);
}

bool zstd_frame_has_checksum(const void *frame, size_t bytes) {
    /* RFC 8878, section 3.1.1.1.1: the descriptor follows the 4 magic bytes; bit 2 is Content_Checksum_Flag. */
    return bytes > 4 && (((const unsigned char *)frame)[4] & 4) != 0;
}
