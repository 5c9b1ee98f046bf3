/* Kernels over the vocabulary: rows of logits, as long as 256k ids and more. */
#include "tracer/cuda/kernels.h"
#include "tracer/cuda/lanes.cuh"
#include "tracer/cuda/reduce.cuh"

extern "C" {
#include "base/err.h"
}

#include <float.h>
#include <math.h>

/* ---- statistics ------------------------------------------------------------------------------------------------- */

enum {
    STATS_THREADS = 512, /* a power of two */
    CANDIDATES = 4096,   /* the largest k, and what a block can sort; a power of two */
    DIGIT_BITS = 8,
    DIGITS = 1 << DIGIT_BITS
};

typedef unsigned long long sort_key;

/* A logit and its id as one number: larger logits first, of equal ones the lower id. No two ids have equal keys, so
 * "the k largest" leaves nothing to chance. 0 is below every key of a finite logit. */
static __device__ inline sort_key key_of(float x, size_t id) {
    unsigned bits = __float_as_uint(x + 0.0f); /* -0 is 0 */
    bits ^= bits >> 31 ? 0xffffffffu : 0x80000000u;
    return (sort_key)bits << 32 | (unsigned)~id;
}
static __device__ inline int32_t id_of(sort_key key) {
    return (int32_t) ~(unsigned)key;
}
static __device__ inline float logit_of(sort_key key) {
    unsigned bits = (unsigned)(key >> 32);
    return __uint_as_float(bits ^ (bits >> 31 ? 0x80000000u : 0xffffffffu));
}

/* A block's scratch memory: keys to sort, or counts of digits. */
typedef union vocab_scratch {
    sort_key key[CANDIDATES];
    unsigned count[DIGITS];
} vocab_scratch;

/* What one thread has seen of a row, in one pass: its largest logit, the first id that has it, and with that logit as
 * the origin the sums of exp(x) and x * exp(x). */
typedef struct running {
    float max, sum, weighted;
    size_t id;
    bool bad;
} running;

/* Move the origin of both sums up to `max`. Without terms so far (the old origin is -inf), or none that count any more,
 * nothing is left of them. */
static __device__ inline void raise(running *r, float max) {
    float shift = r->max - max, factor = expf(shift);
    r->weighted = factor > 0 ? factor * (r->weighted + r->sum * shift) : 0.0f;
    r->sum = factor > 0 ? factor * r->sum : 0.0f;
    r->max = max;
}

static __device__ inline running run_over(const float *row, size_t n) {
    running r = {-INFINITY, 0, 0, 0, false};
    for (size_t i = 4 * threadIdx.x; i < n; i += 4 * STATS_THREADS) {
        quad x = load_quad(row, i, n);
        float max = x.v[0];
        size_t at = 0;
        for (size_t j = 1; j < 4 && i + j < n; j++)
            if (x.v[j] > max) {
                max = x.v[j];
                at = j;
            }
        if (max > r.max) {
            raise(&r, max);
            r.id = i + at;
        }
        for (size_t j = 0; j < 4 && i + j < n; j++) {
            float shift = x.v[j] - r.max, e = expf(shift);
            r.bad |= !(fabsf(x.v[j]) <= FLT_MAX);
            r.sum += e;
            r.weighted += e > 0 ? e * shift : 0.0f;
        }
    }
    return r;
}

/* key[0 .. size-1] descending; size is a power of two. Bitonic (Batcher 1968). Ends with a barrier. */
static __device__ void sort_keys(sort_key *key, unsigned size) {
    for (unsigned run = 2; run <= size; run *= 2)
        for (unsigned apart = run / 2; apart > 0; apart /= 2) {
            for (unsigned i = threadIdx.x; i < size / 2; i += STATS_THREADS) {
                unsigned low = 2 * i - (i & (apart - 1)), high = low + apart;
                sort_key a = key[low], b = key[high];
                bool descending = !(low & run);
                if ((a < b) == descending) {
                    key[low] = b;
                    key[high] = a;
                }
            }
            __syncthreads();
        }
}

/* Put the keys of `floor` and above into s->key, in any order, as far as they fit; gives how many there are. */
static __device__ unsigned gather(const float *row, size_t n, sort_key floor, vocab_scratch *s) {
    __shared__ unsigned found;
    __syncthreads();
    if (threadIdx.x == 0) found = 0;
    __syncthreads();
    for (size_t i = 4 * threadIdx.x; i < n; i += 4 * STATS_THREADS) {
        quad x = load_quad(row, i, n);
        for (size_t j = 0; j < 4 && i + j < n; j++) {
            sort_key key = key_of(x.v[j], i + j);
            if (key < floor) continue;
            unsigned at = atomicAdd(&found, 1u);
            if (at < CANDIDATES) s->key[at] = key;
        }
    }
    __syncthreads();
    return found;
}

/* Count the keys of `floor` and above that agree with `prefix` in all bits from `shift` + DIGIT_BITS on, by their digit
 * at `shift`. */
static __device__ void count_digits(const float *row, size_t n, sort_key floor, sort_key prefix, int shift,
                                    unsigned *count) {
    __syncthreads();
    for (unsigned i = threadIdx.x; i < DIGITS; i += STATS_THREADS) count[i] = 0;
    __syncthreads();
    for (size_t i = 4 * threadIdx.x; i < n; i += 4 * STATS_THREADS) {
        quad x = load_quad(row, i, n);
        for (size_t j = 0; j < 4 && i + j < n; j++) {
            sort_key key = key_of(x.v[j], i + j);
            if (key >= floor && ((key ^ prefix) >> shift) < DIGITS) atomicAdd(&count[key >> shift & (DIGITS - 1)], 1u);
        }
    }
    __syncthreads();
}

/* A higher floor that at least k, but no more than CANDIDATES, of the keys reach: digit by digit from the top, follow
 * the digit in which the k-th largest key lies. `floor` is one that more keys reach. */
static __device__ sort_key raise_floor(const float *row, size_t n, unsigned k, sort_key floor, vocab_scratch *s) {
    __shared__ sort_key prefix;
    __shared__ unsigned above, reached; /* keys above all that agree with the prefix; those and the agreeing ones */
    if (threadIdx.x == 0) prefix = above = 0;
    __syncthreads();
    for (int shift = 64 - DIGIT_BITS; shift >= 0; shift -= DIGIT_BITS) {
        count_digits(row, n, floor, prefix, shift, s->count);
        if (threadIdx.x == 0) {
            unsigned digit = DIGITS - 1;
            for (; above + s->count[digit] < k; digit--) above += s->count[digit];
            reached = above + s->count[digit];
            prefix |= (sort_key)digit << shift;
        }
        __syncthreads();
        if (reached <= CANDIDATES) break;
    }
    return prefix > floor ? prefix : floor;
}

/* The k largest keys, sorted, in s->key. `best` is the calling thread's largest (0: it has none): where k is no more
 * than the threads, at least k keys reach the k-th largest of these, and hardly more do if the likely ids are
 * scattered. Otherwise, or where they are not, the floor comes from the keys' digits. */
static __device__ void largest(const float *row, size_t n, unsigned k, sort_key best, vocab_scratch *s) {
    sort_key floor = 0;
    if (k <= STATS_THREADS) {
        s->key[threadIdx.x] = best;
        __syncthreads();
        sort_keys(s->key, STATS_THREADS);
        floor = s->key[k - 1];
    }
    unsigned found = gather(row, n, floor, s), size = 1;
    if (found > CANDIDATES) found = gather(row, n, raise_floor(row, n, k, floor, s), s);
    while (size < found) size *= 2;
    for (unsigned i = found + threadIdx.x; i < size; i += STATS_THREADS) s->key[i] = 0;
    __syncthreads();
    sort_keys(s->key, size);
}

/* A block a row, which it reads twice: once for the sums (each thread keeps four neighbours of every 2048), once for
 * the likeliest ids; more often only for a large k or many ids in a row that are likely. Shared: 32 KiB of keys. */
static __global__ void __launch_bounds__(STATS_THREADS)
    vocab_stats_row(const float *logits, size_t ld, size_t n, const int32_t *target, vocab_stats out, int32_t *bad) {
    __shared__ vocab_scratch scratch;
    size_t r = blockIdx.x, k = (size_t)out.k;
    const float *row = logits + r * ld;
    running mine = run_over(row, n);
    if (__syncthreads_or(mine.bad)) {
        if (threadIdx.x == 0) atomicMin(bad, out.row0 + (int32_t)r);
        return;
    }
    float max = block_max(mine.max);
    bool some = mine.sum > 0; /* in a short row not every thread has seen a value */
    double shift = some ? (double)mine.max - (double)max : 0.0, factor = some ? exp(shift) : 0.0;
    double sum = block_sum(factor * (double)mine.sum);
    double weighted = block_sum(factor * ((double)mine.weighted + (double)mine.sum * shift));
    double lse = (double)max + log(sum);

    largest(row, n, (unsigned)k, some ? key_of(mine.max, mine.id) : 0, &scratch);
    for (size_t i = threadIdx.x; i < k; i += STATS_THREADS) {
        out.topk_id[r * k + i] = id_of(scratch.key[i]);
        out.topk_logprob[r * k + i] = (float)((double)logit_of(scratch.key[i]) - lse);
    }
    if (threadIdx.x > 0) return;
    out.lse[r] = (float)lse;
    out.entropy[r] = (float)(log(sum) - weighted / sum);
    if (target[r] < 0) return;
    out.target_logprob[r] = (float)((double)row[target[r]] - lse);
    out.correct[r] = id_of(scratch.key[0]) == target[r];
}

extern "C" int k_vocab_stats(device *d, const float *logits, size_t ld, size_t rows, size_t n_vocab,
                             const int32_t *target, const vocab_stats *out, int32_t *bad) {
    if (!rows) return 0;
    if (out->k < 1 || out->k > CANDIDATES || (size_t)out->k > n_vocab)
        return err_set(ERR_DATA, "the %d most likely ids of %zu asked for: 1 to %d can be had", out->k, n_vocab,
                       CANDIDATES);
    return LAUNCH(d, vocab_stats_row, dim3((unsigned)rows), dim3(STATS_THREADS), logits, ld, n_vocab, target, *out,
                  bad);
}

/* ---- probabilities ---------------------------------------------------------------------------------------------- */

/* Four neighbours a thread, which may be written where they were read. */
template <typename T>
static __global__ void vocab_softmax_row(const float *logits, size_t ld, size_t n, const float *lse,
                                         const uint8_t *counted, T *p, size_t ld_out) {
    size_t r = blockIdx.x, i = 4 * lane_item();
    if (i >= n) return;
    quad x = {};
    if (counted[r]) {
        x = load_quad(logits + r * ld, i, n);
        for (float &v : x.v) v = expf(v - lse[r]);
    }
    store_quad(p + r * ld_out, i, n, x);
}

extern "C" int k_vocab_softmax(device *d, const float *logits, size_t ld, size_t rows, size_t n_vocab, const float *lse,
                               const uint8_t *counted, dtype type, void *p, size_t ld_out) {
    if (!rows) return 0;
    cover c(rows, (n_vocab + 3) / 4);
    if (type == DTYPE_BF16)
        return LAUNCH(d, vocab_softmax_row, c.grid, c.block, logits, ld, n_vocab, lse, counted, (uint16_t *)p, ld_out);
    return LAUNCH(d, vocab_softmax_row, c.grid, c.block, logits, ld, n_vocab, lse, counted, (float *)p, ld_out);
}

/* ---- drawing ---------------------------------------------------------------------------------------------------- */

enum {
    DRAW_THREADS = 256,
    CHUNK_MIN = 256, /* ids of a chunk, a multiple of 4 * WARP; doubled while a row has more than CHUNKS_MAX chunks */
    CHUNKS_MAX = 1024
};

/* The sum of a warp's values up to and including the lane's own. */
static __device__ inline double warp_running_sum(double x) {
    unsigned lane = threadIdx.x % WARP;
    for (unsigned apart = 1; apart < WARP; apart *= 2) {
        double before = __shfl_up_sync(0xffffffffu, x, apart);
        if (lane >= apart) x += before;
    }
    return x;
}

/* A warp's sum of exp(x - lse) over ids first .. end-1. */
static __device__ inline double chunk_sum(const float *row, size_t first, size_t end, float lse) {
    double sum = 0;
    for (size_t i = first + 4 * (threadIdx.x % WARP); i < end; i += 4 * WARP) {
        quad x = load_quad(row, i, end);
        for (size_t j = 0; j < 4 && i + j < end; j++) sum += (double)expf(x.v[j] - lse);
    }
    return warp_sum(sum);
}

/* A warp looks through a chunk for the first id at which the sum, `sum` before the chunk, exceeds `aim`; else the last
 * id of positive probability (-1: it has none). */
static __device__ inline int32_t draw_in(const float *row, size_t first, size_t end, float lse, double sum,
                                         double aim) {
    int32_t last = -1;
    for (size_t i = first; i < end; i += WARP) {
        size_t id = i + threadIdx.x % WARP;
        double p = id < end ? (double)expf(row[id] - lse) : 0.0, run = sum + warp_running_sum(p);
        unsigned positive = __ballot_sync(0xffffffffu, p > 0), beyond = __ballot_sync(0xffffffffu, p > 0 && run > aim);
        if (beyond) return (int32_t)i + __ffs((int)beyond) - 1;
        if (positive) last = (int32_t)i + 31 - __clz((int)positive);
        sum = __shfl_sync(0xffffffffu, run, WARP - 1);
    }
    return last;
}

/* A block a row: its warps sum the chunks, one thread runs over the sums, and then each warp draws samples, looking up
 * the chunk and going through that alone. u is measured by the whole sum, so that lse, which is rounded to f32, moves
 * no sample. Shared: 8 KiB of running sums. */
static __global__ void vocab_draw_row(const float *logits, size_t ld, size_t n, size_t chunk, const float *lse,
                                      const uint8_t *counted, const double *u, size_t samples, int32_t *label,
                                      size_t ld_label) {
    __shared__ double upto[CHUNKS_MAX]; /* the sum of all chunks up to and including this one */
    size_t r = blockIdx.x, warp = threadIdx.x / WARP, chunks = (n + chunk - 1) / chunk;
    const float *row = logits + r * ld;
    if (!counted[r]) {
        for (size_t s = threadIdx.x; s < samples; s += DRAW_THREADS) label[s * ld_label + r] = -1;
        return;
    }
    for (size_t c = warp; c < chunks; c += DRAW_THREADS / WARP) {
        double sum = chunk_sum(row, c * chunk, min(n, (c + 1) * chunk), lse[r]);
        if (threadIdx.x % WARP == 0) upto[c] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0)
        for (size_t c = 1; c < chunks; c++) upto[c] += upto[c - 1];
    __syncthreads();
    for (size_t s = warp; s < samples; s += DRAW_THREADS / WARP) {
        double whole = upto[chunks - 1], aim = u[s * gridDim.x + r] * whole;
        size_t low = 0, high = chunks - 1; /* the first chunk whose sum exceeds aim, or is the whole, lies within */
        while (low < high) {
            size_t middle = (low + high) / 2;
            if (upto[middle] > aim || upto[middle] == whole) high = middle;
            else low = middle + 1;
        }
        int32_t id = draw_in(row, low * chunk, min(n, (low + 1) * chunk), lse[r], low ? upto[low - 1] : 0.0, aim);
        if (threadIdx.x % WARP == 0) label[s * ld_label + r] = id;
    }
}

extern "C" int k_vocab_draw(device *d, const float *logits, size_t ld, size_t rows, size_t n_vocab, const float *lse,
                            const uint8_t *counted, const double *u, size_t samples, int32_t *label, size_t ld_label) {
    if (!rows || !samples) return 0;
    size_t chunk = CHUNK_MIN;
    while (n_vocab > chunk * CHUNKS_MAX) chunk *= 2;
    return LAUNCH(d, vocab_draw_row, dim3((unsigned)rows), dim3(DRAW_THREADS), logits, ld, n_vocab, chunk, lse, counted,
                  u, samples, label, ld_label);
}

/* ---- the way back ----------------------------------------------------------------------------------------------- */

/* A value a thread. */
static __global__ void hidden_back_row(const float *common, const float *label_row, const uint8_t *counted, size_t n,
                                       size_t ld, float *out) {
    size_t r = blockIdx.x, i = lane_item();
    if (i < n) out[r * ld + i] = counted[r] ? common[r * ld + i] - label_row[r * ld + i] : 0.0f;
}

extern "C" int k_hidden_back(device *d, const float *common, const float *label_row, const uint8_t *counted,
                             size_t rows, size_t n, size_t ld, float *out) {
    if (!rows) return 0;
    cover c(rows, n);
    return LAUNCH(d, hidden_back_row, c.grid, c.block, common, label_row, counted, n, ld, out);
}
