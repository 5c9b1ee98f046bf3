/* The device seam over the CUDA runtime, cuBLAS and cuBLASLt. */
#include "tracer/cuda/device.h"

extern "C" {
#include "base/err.h"
#include "base/mem.h"
}

#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_runtime.h>

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    MIN_ARCH = 75,        /* what this CUDA still serves */
    WORKSPACE = 32 << 20, /* bytes; what cuBLAS advises for Hopper, plenty for the others */
    CHOICES = 256,        /* of algorithms kept, by shape */
    SPANS = 4096,         /* of a lane that may wait to be summed */
    NAME_MAX_BYTES = 320,
    AT_MAX_BYTES = 160
};

/* A device_new or device_pinned that has not been given back. */
typedef struct block {
    void *p;
    bool pinned;
} block;

/* Two events on a lane; the time between them is busy. */
typedef struct span {
    cudaEvent_t begin, end;
} span;

typedef struct lane_clock {
    span *spans; /* [n] measured, behind them [n_made - n] whose events are there to be used again */
    size_t n, n_made, capacity;
    double seconds; /* of the spans folded so far */
} lane_clock;

/* All that cuBLASLt's choice of an algorithm may depend on. Compared byte by byte, so it has no padding. */
typedef struct shape {
    uint64_t rows, cols, inner, lda, ldb, ldo;
    uint32_t back, accumulate, align_a, align_b, align_out, found; /* found: 0 = empty, else a choice */
} shape;

typedef struct choice {
    shape of;
    bool has_algorithm; /* false: cuBLASLt offers none, cublasGemmEx must do */
    cublasLtMatmulAlgo_t algorithm;
} choice;

struct device {
    char name[NAME_MAX_BYTES], at[AT_MAX_BYTES];
    cudaStream_t stream[N_STREAMS];
    cublasHandle_t blas;
    cublasLtHandle_t lt;
    void *workspace;
    choice choices[CHOICES]; /* direct-mapped by shape */
    lane_clock clock[N_STREAMS];
    block *blocks;
    size_t n_blocks, block_capacity;
};

struct device_mark {
    cudaEvent_t event;
};

/* ---- errors ----------------------------------------------------------------------------------------------------- */

/* "cudaMemcpyAsync failed at FILE:LINE: an illegal memory access was encountered (layer 3, 8192 tokens)". `call` is the
 * source text of the call: its name ends at the bracket. */
static int failed(const device *d, const char *call, const char *file, int line, const char *why) {
    const char *at = d ? d->at : "";
    return err_set(ERR_DATA, "%.*s failed at %s:%d: %s%s%s%s", (int)strcspn(call, "("), call, file, line, why,
                   *at ? " (" : "", at, *at ? ")" : "");
}

static int check(const device *d, cudaError_t code, const char *call, const char *file, int line) {
    if (code == cudaSuccess) return 0;
    cudaGetLastError(); /* else the next launch would report it once more */
    return failed(d, call, file, line, cudaGetErrorString(code));
}

static int check(const device *d, cublasStatus_t code, const char *call, const char *file, int line) {
    return code == CUBLAS_STATUS_SUCCESS ? 0 : failed(d, call, file, line, cublasGetStatusString(code));
}

#define CALL(d, call) TRY(check((d), (call), #call, __FILE__, __LINE__))

void device_at(device *d, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(d->at, sizeof d->at, format, args);
    va_end(args);
}

int device_launched(device *d, const char *kernel, const char *file, int line) {
    cudaError_t code = cudaGetLastError();
    if (code == cudaSuccess) return 0;
    char what[128];
    snprintf(what, sizeof what, "kernel %s", kernel);
    return failed(d, what, file, line, cudaGetErrorString(code));
}

/* ---- opening ---------------------------------------------------------------------------------------------------- */

/* Why there is no device, in words that say what to do. */
static int no_device(cudaError_t code) {
    int driver = 0, runtime = 0;
    if (code == cudaErrorNoDevice) return err_set(ERR_DATA, "no CUDA device; use --backend cpu");
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    if (!driver) return err_set(ERR_DATA, "no CUDA device (driver not found); use --backend cpu");
    if (code == cudaErrorInsufficientDriver)
        return err_set(ERR_DATA,
                       "no CUDA device (the driver serves CUDA %d.%d, this program needs %d.%d: update it); use "
                       "--backend cpu",
                       driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    return err_set(ERR_DATA, "no CUDA device (%s); use --backend cpu", cudaGetErrorString(code));
}

static int pick(const char *text, int *index) {
    int n = 0;
    cudaError_t code = cudaGetDeviceCount(&n);
    if (code != cudaSuccess) return no_device(code);
    if (!n) return no_device(cudaErrorNoDevice);
    char *end;
    long asked = strtol(text, &end, 10);
    if (*end || asked < 0 || asked >= n) return err_set(ERR_DATA, "no CUDA device %s (%d found)", text, n);
    *index = (int)asked;
    return 0;
}

static int describe(device *d, int index) {
    cudaDeviceProp prop;
    int runtime = 0, blas = (int)cublasLtGetVersion();
    CALL(d, cudaGetDeviceProperties(&prop, index));
    CALL(d, cudaRuntimeGetVersion(&runtime));
    int arch = prop.major * 10 + prop.minor;
    if (arch < MIN_ARCH)
        return err_set(ERR_DATA, "CUDA device %d, %s, is of sm_%d; sm_%d or later is needed; use --backend cpu", index,
                       prop.name, arch, MIN_ARCH);
    snprintf(d->name, sizeof d->name, "%s (sm_%d, CUDA %d.%d, cuBLAS %d.%d.%d)", prop.name, arch, runtime / 1000,
             runtime % 1000 / 10, blas / 10000, blas % 10000 / 100, blas % 100);
    return 0;
}

/* cuBLAS gives the same bits every time when it has one stream and a workspace of its own. The stream is set first:
 * setting it takes the workspace away again. */
static int open_blas(device *d) {
    CALL(d, cublasCreate(&d->blas));
    CALL(d, cublasLtCreate(&d->lt));
    TRY(device_new(d, WORKSPACE, "cuBLAS", &d->workspace));
    CALL(d, cublasSetStream(d->blas, d->stream[STREAM_COMPUTE]));
    CALL(d, cublasSetWorkspace(d->blas, d->workspace, WORKSPACE));
    CALL(d, cublasSetAtomicsMode(d->blas, CUBLAS_ATOMICS_NOT_ALLOWED));
    return 0;
}

static int open_index(device *d, int index) {
    TRY(describe(d, index));
    CALL(d, cudaSetDevice(index));
    for (cudaStream_t &s : d->stream) CALL(d, cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    return open_blas(d);
}

int device_open(const char *index_text, device **out) {
    int index = 0;
    *out = NULL;
    TRY(pick(index_text, &index));
    device *d = (device *)mem_new(1, sizeof *d, "the CUDA device");
    if (!d) return ERR_DATA;
    int code = open_index(d, index);
    if (code) device_close(d);
    else *out = d;
    return code;
}

static void release(block b) {
    if (b.pinned) cudaFreeHost(b.p);
    else cudaFree(b.p);
}

/* Errors are past caring about here: whoever caused them has reported them. */
void device_close(device *d) {
    if (!d) return;
    cudaDeviceSynchronize();
    if (d->lt) cublasLtDestroy(d->lt);
    if (d->blas) cublasDestroy(d->blas);
    for (lane_clock &c : d->clock) {
        for (size_t i = 0; i < c.n_made; i++) {
            cudaEventDestroy(c.spans[i].begin);
            cudaEventDestroy(c.spans[i].end);
        }
        mem_free(c.spans);
    }
    for (size_t i = 0; i < d->n_blocks; i++) release(d->blocks[i]);
    mem_free(d->blocks);
    for (cudaStream_t s : d->stream)
        if (s) cudaStreamDestroy(s);
    mem_free(d);
}

const char *device_name(const device *d) {
    return d->name;
}

size_t device_free_bytes(const device *d) {
    (void)d;
    size_t left = 0, total = 0;
    return cudaMemGetInfo(&left, &total) == cudaSuccess ? left : 0;
}

void *device_stream(const device *d, device_lane lane) {
    return d->stream[lane];
}

/* ---- memory ----------------------------------------------------------------------------------------------------- */

static size_t mib(size_t bytes) {
    return (bytes + (1 << 20) - 1) >> 20;
}

static int remember(device *d, void *p, bool pinned) {
    block b = {p, pinned};
    int code =
        mem_grow((void **)&d->blocks, &d->block_capacity, d->n_blocks + 1, sizeof b, "the list of device memory");
    if (code) release(b);
    else d->blocks[d->n_blocks++] = b;
    return code;
}

static void give_back(device *d, void *p) {
    if (!p) return;
    cudaDeviceSynchronize();
    for (size_t i = d->n_blocks; i-- > 0;)
        if (d->blocks[i].p == p) {
            release(d->blocks[i]);
            d->blocks[i] = d->blocks[--d->n_blocks];
            return;
        }
}

int device_new(device *d, size_t bytes, const char *what, void **out) {
    *out = NULL;
    cudaError_t code = cudaMalloc(out, bytes ? bytes : 1);
    if (code == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        return err_set(ERR_DATA,
                       "out of device memory for %s: %zu MiB needed, %zu MiB free; use fewer --tokens, --precision "
                       "bf16, --weights blocks or --offload",
                       what, mib(bytes), device_free_bytes(d) >> 20);
    }
    TRY(check(d, code, "cudaMalloc", __FILE__, __LINE__));
    TRY(remember(d, *out, false));
    return 0;
}

int device_pinned(device *d, size_t bytes, const char *what, void **out) {
    *out = NULL;
    cudaError_t code = cudaHostAlloc(out, bytes ? bytes : 1, cudaHostAllocDefault);
    if (code == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        return err_set(ERR_DATA, "out of page-locked host memory for %s: %zu MiB needed", what, mib(bytes));
    }
    TRY(check(d, code, "cudaHostAlloc", __FILE__, __LINE__));
    memset(*out, 0, bytes);
    return remember(d, *out, true);
}

void device_release(device *d, void *p) {
    give_back(d, p);
}

void device_unpin(device *d, void *p) {
    give_back(d, p);
}

/* After a copy: wait where the host's memory is not pinned. CUDA says only that it "might be synchronous" then; where
 * the device reads the host's pages by itself it need not be. */
static int settle(device *d, device_lane lane, const void *host) {
    cudaPointerAttributes of;
    CALL(d, cudaPointerGetAttributes(&of, host));
    if (of.type == cudaMemoryTypeUnregistered) CALL(d, cudaStreamSynchronize(d->stream[lane]));
    return 0;
}

int device_to(device *d, device_lane lane, void *to, const void *from, size_t bytes) {
    if (!bytes) return 0;
    CALL(d, cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, d->stream[lane]));
    return settle(d, lane, from);
}

int device_from(device *d, device_lane lane, void *to, const void *from, size_t bytes) {
    if (!bytes) return 0;
    CALL(d, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, d->stream[lane]));
    return settle(d, lane, to);
}

int device_from_rows(device *d, device_lane lane, void *to, size_t ld_to, const void *from, size_t ld_from,
                     size_t width, size_t n) {
    if (!width || !n) return 0;
    CALL(d, cudaMemcpy2DAsync(to, ld_to, from, ld_from, width, n, cudaMemcpyDeviceToHost, d->stream[lane]));
    return settle(d, lane, to);
}

int device_copy(device *d, device_lane lane, void *to, const void *from, size_t bytes) {
    CALL(d, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, d->stream[lane]));
    return 0;
}

int device_fill(device *d, device_lane lane, void *to, int byte, size_t bytes) {
    CALL(d, cudaMemsetAsync(to, byte, bytes, d->stream[lane]));
    return 0;
}

/* ---- order ------------------------------------------------------------------------------------------------------ */

/* Waiting for a mark sleeps rather than spins: the processor's cores have rows to compress. */
int device_mark_new(device *d, device_mark **out) {
    device_mark *m = *out = (device_mark *)mem_new(1, sizeof *m, "a CUDA event");
    if (!m) return ERR_DATA;
    int code = check(d, cudaEventCreateWithFlags(&m->event, cudaEventDisableTiming | cudaEventBlockingSync),
                     "cudaEventCreateWithFlags", __FILE__, __LINE__);
    if (code) {
        mem_free(m);
        *out = NULL;
    }
    return code;
}

void device_mark_free(device_mark *m) {
    if (!m) return;
    cudaEventDestroy(m->event);
    mem_free(m);
}

int device_mark_set(device *d, device_mark *m, device_lane lane) {
    CALL(d, cudaEventRecord(m->event, d->stream[lane]));
    return 0;
}

int device_wait(device *d, device_lane lane, const device_mark *m) {
    CALL(d, cudaStreamWaitEvent(d->stream[lane], m->event, 0));
    return 0;
}

int device_reach(device *d, const device_mark *m) {
    CALL(d, cudaEventSynchronize(m->event));
    return 0;
}

int device_sync(device *d) {
    CALL(d, cudaDeviceSynchronize());
    return 0;
}

static int span_new(device *d, span *out) {
    CALL(d, cudaEventCreate(&out->begin));
    int code = check(d, cudaEventCreate(&out->end), "cudaEventCreate", __FILE__, __LINE__);
    if (code) cudaEventDestroy(out->begin);
    return code;
}

int device_busy_begin(device *d, device_lane lane) {
    lane_clock *c = &d->clock[lane];
    if (c->n == SPANS) device_busy(d, lane); /* waits for the lane, but seldom */
    if (c->n == c->n_made) {
        TRY(mem_grow((void **)&c->spans, &c->capacity, c->n + 1, sizeof *c->spans, "the list of CUDA events"));
        TRY(span_new(d, &c->spans[c->n]));
        c->n_made++;
    }
    CALL(d, cudaEventRecord(c->spans[c->n].begin, d->stream[lane]));
    return 0;
}

int device_busy_end(device *d, device_lane lane) {
    lane_clock *c = &d->clock[lane];
    CALL(d, cudaEventRecord(c->spans[c->n].end, d->stream[lane]));
    c->n++;
    return 0;
}

/* Folds the spans into the sum and frees their events for the next ones. A device that has failed adds nothing. */
double device_busy(device *d, device_lane lane) {
    lane_clock *c = &d->clock[lane];
    for (size_t i = 0; i < c->n; i++) {
        float ms = 0;
        if (cudaEventSynchronize(c->spans[i].end) == cudaSuccess &&
            cudaEventElapsedTime(&ms, c->spans[i].begin, c->spans[i].end) == cudaSuccess)
            c->seconds += (double)ms / 1000;
    }
    c->n = 0;
    return c->seconds;
}

/* ---- products --------------------------------------------------------------------------------------------------- */

/* cuBLAS counts by columns: a row-major matrix is its transpose there, so we ask for out^T = b' a^T, with b in the
 * place of cuBLAS's A. Weights stand as [cols][inner], which is cuBLAS's [inner x cols]: transposed; `back` as they
 * are. */
static cublasOperation_t op_of(const device_product *p) {
    return p->back ? CUBLAS_OP_N : CUBLAS_OP_T;
}

/* Pedantic f32: no TF32, no emulation, whatever the environment says. */
static int multiply_gemm(device *d, const device_product *p) {
    bool f32 = p->type == DTYPE_F32;
    cudaDataType type = f32 ? CUDA_R_32F : CUDA_R_16BF;
    const float one = 1, beta = p->accumulate ? 1 : 0;
    CALL(d,
         cublasGemmEx_64(d->blas, op_of(p), CUBLAS_OP_N, (int64_t)p->cols, (int64_t)p->rows, (int64_t)p->inner, &one,
                         p->b, type, (int64_t)p->ldb, p->a, type, (int64_t)p->lda, &beta, p->out, CUDA_R_32F,
                         (int64_t)p->ldo, f32 ? CUBLAS_COMPUTE_32F_PEDANTIC : CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
    return 0;
}

/* A bf16 product in cuBLASLt's terms. */
typedef struct lt_product {
    cublasLtMatmulDescOpaque_t operation;
    cublasLtMatrixLayoutOpaque_t a, b, out; /* of the device_product, not of cuBLAS */
} lt_product;

static int describe_product(device *d, const device_product *p, lt_product *l) {
    cublasOperation_t op = op_of(p);
    uint64_t rows = p->rows, cols = p->cols, inner = p->inner;
    CALL(d, cublasLtMatmulDescInit(&l->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    CALL(d, cublasLtMatmulDescSetAttribute(&l->operation, CUBLASLT_MATMUL_DESC_TRANSA, &op, sizeof op));
    CALL(d,
         cublasLtMatrixLayoutInit(&l->b, CUDA_R_16BF, p->back ? cols : inner, p->back ? inner : cols, (int64_t)p->ldb));
    CALL(d, cublasLtMatrixLayoutInit(&l->a, CUDA_R_16BF, inner, rows, (int64_t)p->lda));
    CALL(d, cublasLtMatrixLayoutInit(&l->out, CUDA_R_32F, cols, rows, (int64_t)p->ldo));
    return 0;
}

/* The largest power of two, up to 256, that divides an address. */
static uint32_t alignment(const void *p) {
    uint32_t low = (uint32_t)(uintptr_t)p & 255;
    return low ? low & -low : 256;
}

static shape shape_of(const device_product *p) {
    return {p->rows,         p->cols,         p->inner,          p->lda, p->ldb, p->ldo, p->back, p->accumulate,
            alignment(p->a), alignment(p->b), alignment(p->out), 1};
}

/* Ask for the best algorithm within our workspace. Sums that are split must be joined in f32 in a step of their own. */
static int ask_heuristic(device *d, const shape *s, lt_product *l, choice *out) {
    cublasLtMatmulPreferenceOpaque_t preference;
    uint64_t workspace = WORKSPACE;
    uint32_t joins = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    const struct {
        cublasLtMatmulPreferenceAttributes_t attribute;
        const void *value;
        size_t size;
    } wish[] = {{CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace},
                {CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &joins, sizeof joins},
                {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &s->align_b, sizeof s->align_b},
                {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &s->align_a, sizeof s->align_a},
                {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &s->align_out, sizeof s->align_out},
                {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &s->align_out, sizeof s->align_out}};
    CALL(d, cublasLtMatmulPreferenceInit(&preference));
    for (const auto &w : wish) CALL(d, cublasLtMatmulPreferenceSetAttribute(&preference, w.attribute, w.value, w.size));

    cublasLtMatmulHeuristicResult_t result = {};
    int n = 0;
    cublasStatus_t code = cublasLtMatmulAlgoGetHeuristic(d->lt, &l->operation, &l->b, &l->a, &l->out, &l->out,
                                                         &preference, 1, &result, &n);
    if (code != CUBLAS_STATUS_NOT_SUPPORTED) TRY(check(d, code, "cublasLtMatmulAlgoGetHeuristic", __FILE__, __LINE__));
    out->of = *s;
    out->has_algorithm = code == CUBLAS_STATUS_SUCCESS && n && result.state == CUBLAS_STATUS_SUCCESS;
    out->algorithm = result.algo;
    return 0;
}

/* The choice for a shape: equal shapes get equal algorithms, and with them equal bits. */
static int choose(device *d, const device_product *p, lt_product *l, const choice **out) {
    shape s = shape_of(p);
    const unsigned char *byte = (const unsigned char *)&s;
    uint32_t hash = 2166136261u; /* FNV-1a */
    for (size_t i = 0; i < sizeof s; i++) hash = (hash ^ byte[i]) * 16777619u;
    choice *c = &d->choices[(hash ^ hash >> 16) % CHOICES];
    if (memcmp(&c->of, &s, sizeof s) != 0) TRY(ask_heuristic(d, &s, l, c));
    *out = c;
    return 0;
}

static int multiply_lt(device *d, const device_product *p) {
    lt_product l;
    const choice *c;
    const float one = 1, beta = p->accumulate ? 1 : 0;
    TRY(describe_product(d, p, &l));
    TRY(choose(d, p, &l, &c));
    if (!c->has_algorithm) return multiply_gemm(d, p);
    CALL(d, cublasLtMatmul(d->lt, &l.operation, &one, p->b, &l.b, p->a, &l.a, &beta, p->out, &l.out, p->out, &l.out,
                           &c->algorithm, d->workspace, WORKSPACE, d->stream[STREAM_COMPUTE]));
    return 0;
}

int device_multiply(device *d, const device_product *p) {
    if (!p->rows || !p->cols) return 0;
    int code = p->type == DTYPE_BF16 ? multiply_lt(d, p) : multiply_gemm(d, p);
    return code ? err_prefix(code, "product of %zu x %zu by %zu x %zu, %s", p->rows, p->inner, p->inner, p->cols,
                             p->type == DTYPE_BF16 ? "bf16" : "f32")
                : 0;
}
