/* The device seam on the CPU: malloc, memcpy, OpenBLAS. Device memory is plain host memory that begins as NaNs, so that
 * what is read before it was written shows.
 *
 * Work on one lane is done at once. The other is as late as it may be: its work waits until something that was ordered
 * behind it, by mark, needs it, so that a forgotten device_wait shows, or host memory that is used again too early. The
 * late one is the copy lane, so that tests of kernels find results at once; KVLAG_FIBERS_LATE=compute turns it round.
 * What a caller may never do ends the process with a line on stderr.
 *
 * Environment, for tests of what a real device may answer:
 *   KVLAG_FIBERS_ABSENT     set: there is no device
 *   KVLAG_FIBERS_MEMORY     bytes of device memory (4 GiB)
 *   KVLAG_FIBERS_COVERAGE   a file to which device_close appends "kernel launches" for each kernel
 *   KVLAG_FIBERS_ORDER      see fibers.h */
#include "tests/cuda/fibers.h"
#include "tracer/cuda/device.h"

extern "C" {
#include "base/err.h"
}

#include <cblas.h>
#include <functional>
#include <map>
#include <queue>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string>
#include <time.h>
#include <vector>

struct device_mark {
    device *owner;
    device_lane lane;
    size_t position; /* work of the lane that comes before; 0 where nothing was set */
};

struct device {
    size_t memory, used;
    std::string at;
    std::map<void *, size_t> blocks, pinned; /* bytes by address */
    std::map<std::string, size_t> launches;
    device_lane late;
    std::queue<std::function<void()>> later[N_STREAMS];
    size_t done[N_STREAMS]; /* work of the lane so far */
    double busy[N_STREAMS], since[N_STREAMS];
    bool open[N_STREAMS]; /* between device_busy_begin and device_busy_end */
};

static void misuse(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));
static void misuse(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("device: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    abort();
}

/* " (layer 3)", or nothing. */
static std::string place(const device *d) {
    return d->at.empty() ? "" : " (" + d->at + ")";
}

int device_open(const char *index, device **out) {
    if (getenv("KVLAG_FIBERS_ABSENT")) return err_set(ERR_DATA, "no CUDA device (driver not found); use --backend cpu");
    if (index[0] && strcmp(index, "0")) return err_set(ERR_DATA, "no CUDA device %s (1 found)", index);
    const char *memory = getenv("KVLAG_FIBERS_MEMORY");
    if (openblas_get_num_threads() != 1) openblas_set_num_threads(1);
    device *d = new device();
    const char *late = getenv("KVLAG_FIBERS_LATE");
    d->memory = memory ? strtoull(memory, nullptr, 10) : (size_t)4 << 30;
    d->late = late && !strcmp(late, "compute") ? STREAM_COMPUTE : STREAM_COPY;
    *out = d;
    return 0;
}

void device_close(device *d) {
    if (!d) return;
    device_sync(d);
    for (auto &block : d->blocks) free(block.first);
    for (auto &block : d->pinned) free(block.first);
    const char *path = getenv("KVLAG_FIBERS_COVERAGE");
    FILE *coverage = path ? fopen(path, "a") : nullptr;
    if (coverage) {
        for (auto &kernel : d->launches) fprintf(coverage, "%s %zu\n", kernel.first.c_str(), kernel.second);
        fclose(coverage);
    }
    delete d;
}

const char *device_name(const device *) {
    return "CPU fibers";
}

size_t device_free_bytes(const device *d) {
    return d->memory - d->used;
}

void device_at(device *d, const char *format, ...) {
    char text[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    d->at = text;
}

void *device_stream(const device *, device_lane) {
    return nullptr;
}

int device_launched(device *d, const char *kernel, const char *file, int line) {
    d->launches[kernel]++;
    const char *refused = fibers_refused();
    if (!refused) return 0;
    return err_set(ERR_DATA, "kernel %s failed at %s:%d: %s%s", kernel, file, line, refused, place(d).c_str());
}

/* ---- memory ----------------------------------------------------------------------------------------------------- */

static size_t mib(size_t bytes) {
    return (bytes + ((size_t)1 << 20) - 1) >> 20;
}

/* `bytes` and no more, so that AddressSanitizer sees what goes beyond. */
static void *aligned(size_t bytes, int fill) {
    void *p = nullptr;
    if (posix_memalign(&p, 256, bytes)) return nullptr;
    return memset(p, fill, bytes);
}

int device_new(device *d, size_t bytes, const char *what, void **out) {
    *out = nullptr;
    if (bytes == 0) return 0;
    void *p = bytes <= device_free_bytes(d) ? aligned(bytes, 0xff) : nullptr;
    if (!p)
        return err_set(ERR_DATA,
                       "out of device memory for %s: %zu MiB needed, %zu MiB free; use fewer --tokens, --precision "
                       "bf16, --weights blocks or --offload",
                       what, mib(bytes), device_free_bytes(d) >> 20);
    d->blocks[p] = bytes;
    d->used += bytes;
    *out = p;
    return 0;
}

static size_t forget(std::map<void *, size_t> &from, void *p, const char *call) {
    auto found = from.find(p);
    if (found == from.end()) misuse("%s of %p, which is not held", call, p);
    size_t bytes = found->second;
    from.erase(found);
    free(p);
    return bytes;
}

void device_release(device *d, void *p) {
    if (!p) return;
    device_sync(d);
    d->used -= forget(d->blocks, p, "device_release");
}

int device_pinned(device *d, size_t bytes, const char *what, void **out) {
    *out = nullptr;
    if (bytes == 0) return 0;
    *out = aligned(bytes, 0);
    if (!*out) return err_set(ERR_DATA, "out of page-locked host memory for %s: %zu MiB needed", what, mib(bytes));
    d->pinned[*out] = bytes;
    return 0;
}

void device_unpin(device *d, void *p) {
    if (!p) return;
    device_sync(d);
    forget(d->pinned, p, "device_unpin");
}

/* ---- order ------------------------------------------------------------------------------------------------------ */

/* A lane, up to a position. What waits for the other lane calls this, too. */
static void catch_up(device *d, device_lane lane, size_t position) {
    while (d->done[lane] < position) {
        d->later[lane].front()();
        d->later[lane].pop();
        d->done[lane]++;
    }
}

static size_t ordered(const device *d, device_lane lane) {
    return d->done[lane] + d->later[lane].size();
}

/* Order work on a lane. `must_wait`: as for copies from and to host memory that is not pinned. */
static int order(device *d, device_lane lane, bool must_wait, std::function<void()> work) {
    d->later[lane].push(work);
    if (must_wait || lane != d->late) catch_up(d, lane, ordered(d, lane));
    return 0;
}

void fibers_order(device *d, std::function<void()> work);
void fibers_order(device *d, std::function<void()> work) {
    order(d, STREAM_COMPUTE, false, work);
}

int device_mark_new(device *d, device_mark **out) {
    *out = new device_mark{d, STREAM_COMPUTE, 0};
    return 0;
}

void device_mark_free(device_mark *m) {
    delete m;
}

int device_mark_set(device *d, device_mark *m, device_lane lane) {
    if (m->owner != d) misuse("device_mark_set with another device's mark");
    m->lane = lane;
    m->position = ordered(d, lane);
    return 0;
}

static void own(const device *d, const device_mark *m) {
    if (m->owner != d) misuse("device_wait or device_reach with another device's mark");
}

/* A mark that was never set holds nobody up, as in CUDA. */
int device_reach(device *d, const device_mark *m) {
    own(d, m);
    catch_up(d, m->lane, m->position);
    return 0;
}

/* For the point where the mark is now: to set it anew changes nothing. */
int device_wait(device *d, device_lane lane, const device_mark *m) {
    own(d, m);
    device_lane of = m->lane;
    size_t position = m->position;
    return of == lane ? 0 : order(d, lane, false, [=] { catch_up(d, of, position); });
}

int device_sync(device *d) {
    for (device_lane lane : {STREAM_COMPUTE, STREAM_COPY}) catch_up(d, lane, ordered(d, lane));
    return 0;
}

static double seconds() {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int device_busy_begin(device *d, device_lane lane) {
    return order(d, lane, false, [=] {
        if (d->open[lane]) misuse("device_busy_begin twice");
        d->open[lane] = true;
        d->since[lane] = seconds();
    });
}

int device_busy_end(device *d, device_lane lane) {
    return order(d, lane, false, [=] {
        if (!d->open[lane]) misuse("device_busy_end without device_busy_begin");
        d->open[lane] = false;
        d->busy[lane] += seconds() - d->since[lane];
    });
}

double device_busy(device *d, device_lane lane) {
    device_sync(d);
    return d->busy[lane];
}

/* ---- copies ----------------------------------------------------------------------------------------------------- */

/* Is p .. p+bytes within one of these? */
static bool within(const std::map<void *, size_t> &blocks, const void *p, size_t bytes) {
    auto next = blocks.upper_bound((void *)p);
    if (next == blocks.begin()) return false;
    auto block = std::prev(next);
    size_t offset = (size_t)((const char *)p - (const char *)block->first);
    return offset <= block->second && bytes <= block->second - offset;
}

static void on_device(const device *d, const void *p, size_t bytes, const char *call) {
    if (bytes && !within(d->blocks, p, bytes)) misuse("%s: %zu bytes at %p are not device memory", call, bytes, p);
}

static void on_host(const device *d, const void *p, size_t bytes, const char *call) {
    if (bytes && within(d->blocks, p, 1)) misuse("%s: host memory expected, %p is the device's", call, p);
}

int device_to(device *d, device_lane lane, void *to, const void *from, size_t bytes) {
    on_device(d, to, bytes, "device_to");
    on_host(d, from, bytes, "device_to");
    return order(d, lane, !within(d->pinned, from, bytes), [=] { memcpy(to, from, bytes); });
}

int device_from(device *d, device_lane lane, void *to, const void *from, size_t bytes) {
    return device_from_rows(d, lane, to, bytes, from, bytes, bytes, 1);
}

int device_from_rows(device *d, device_lane lane, void *to, size_t ld_to, const void *from, size_t ld_from,
                     size_t width, size_t n) {
    if (n == 0 || width == 0) return 0;
    if (width > ld_to || width > ld_from) misuse("device_from_rows: rows of %zu bytes overlap", width);
    size_t bytes_to = (n - 1) * ld_to + width;
    on_device(d, from, (n - 1) * ld_from + width, "device_from");
    on_host(d, to, bytes_to, "device_from");
    return order(d, lane, !within(d->pinned, to, bytes_to), [=] {
        for (size_t i = 0; i < n; i++) memcpy((char *)to + i * ld_to, (const char *)from + i * ld_from, width);
    });
}

int device_copy(device *d, device_lane lane, void *to, const void *from, size_t bytes) {
    on_device(d, to, bytes, "device_copy");
    on_device(d, from, bytes, "device_copy");
    return order(d, lane, false, [=] { memcpy(to, from, bytes); });
}

int device_fill(device *d, device_lane lane, void *to, int byte, size_t bytes) {
    on_device(d, to, bytes, "device_fill");
    return order(d, lane, false, [=] { memset(to, byte, bytes); });
}

/* ---- products --------------------------------------------------------------------------------------------------- */

/* A matrix as f32, dense. */
static std::vector<float> from_bf16(const void *p, size_t ld, size_t rows, size_t cols) {
    std::vector<float> out(rows * cols);
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < cols; c++) {
            uint32_t bits = (uint32_t)((const uint16_t *)p)[r * ld + c] << 16;
            memcpy(&out[r * cols + c], &bits, sizeof bits);
        }
    return out;
}

static void multiply(const device_product *p) {
    size_t b_rows = p->back ? p->inner : p->cols, b_cols = p->back ? p->cols : p->inner;
    const float *a = (const float *)p->a, *b = (const float *)p->b;
    size_t lda = p->lda, ldb = p->ldb;
    std::vector<float> a_wide, b_wide;
    if (p->type == DTYPE_BF16) {
        a_wide = from_bf16(a, lda, p->rows, p->inner);
        b_wide = from_bf16(b, ldb, b_rows, b_cols);
        lda = p->inner;
        ldb = b_cols;
        a = a_wide.data();
        b = b_wide.data();
    }
    cblas_sgemm(CblasRowMajor, CblasNoTrans, p->back ? CblasNoTrans : CblasTrans, (blasint)p->rows, (blasint)p->cols,
                (blasint)p->inner, 1.0f, a, (blasint)lda, b, (blasint)ldb, p->accumulate ? 1.0f : 0.0f, p->out,
                (blasint)p->ldo);
}

int device_multiply(device *d, const device_product *p) {
    if (p->rows == 0 || p->cols == 0) return 0;
    size_t b_rows = p->back ? p->inner : p->cols, b_cols = p->back ? p->cols : p->inner;
    if (p->lda < p->inner || p->ldb < b_cols || p->ldo < p->cols)
        misuse("device_multiply: a stride is less than a row");
    if (p->inner) {
        on_device(d, p->a, ((p->rows - 1) * p->lda + p->inner) * dtype_size(p->type), "device_multiply: a");
        on_device(d, p->b, ((b_rows - 1) * p->ldb + b_cols) * dtype_size(p->type), "device_multiply: b");
    }
    on_device(d, p->out, ((p->rows - 1) * p->ldo + p->cols) * sizeof(float), "device_multiply: out");
    return order(d, STREAM_COMPUTE, false, [product = *p] { multiply(&product); });
}
