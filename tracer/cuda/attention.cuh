/* What the attention kernels share: tiles of products in registers.
 *
 * A block of 128 threads works on tiles of 64 x 64: 64 rows of an output that it owns, against 64 rows at a time of
 * what it walks over. Thread (down, across) holds the 8 rows from 8*down on and, of every 32 columns, the two from
 * 2*across on: 8 x 4 scores of a tile, and 8 x 2*UNITS values of an output that is up to 32*UNITS wide. So the 16
 * threads that share rows are half a warp, rows are reduced by shuffles, and a step of a product reads 8 + 2*UNITS
 * values from shared memory for 16*UNITS multiply-adds, all of it broadcasts or whole lines.
 *
 * Both kinds of product bring their operands through one chunk of shared memory, and load the next chunk into registers
 * while they work on this one; so shared memory does not grow with head_dim. */
#pragma once

#include "tracer/cuda/kernels.h"
#include "tracer/cuda/port.h"

#include <float.h>
#include <math.h>

enum {
    TILE = 64,
    TILE_THREADS = 128,
    HEIGHT = 8,         /* rows of a thread */
    UNIT = 32,          /* columns that 16 threads cover, two each */
    TILE_UNITS = 2,     /* of a tile of scores */
    CHUNK = 16,         /* values of head_dim at a time */
    LD_TILE = TILE + 4, /* keeps rows on 16 bytes, and most stores of columns on different banks */
    PAD = 16            /* kernel_pad, as a row of evict_at has it */
};

struct alignas(16) quad {
    float v[4];
};
struct alignas(8) pair {
    float v[2];
};

/* 26 KiB. */
struct alignas(16) tile_memory {
    float weights[TILE][LD_TILE];     /* [row walked over][row owned] */
    float chunk[2 * CHUNK * LD_TILE]; /* of both operands of scores, or of the rows to be summed */
};

/* One thread's share of a tile of scores. */
typedef float tile_share[HEIGHT][2 * TILE_UNITS];

/* Up to TILE rows of one head in global memory. Rows from n on read as zeros. */
struct strip {
    const float *at;
    size_t ld;
    int n;
};

static __device__ inline int thread_row(int i) {
    return HEIGHT * (int)(threadIdx.x / (UNIT / 2)) + i;
}

static __device__ inline int thread_column(int j) {
    return UNIT * (j / 2) + 2 * (int)(threadIdx.x % (UNIT / 2)) + j % 2;
}

/* Rows row0 .. of a head of x, T rows in all. */
static __device__ inline strip strip_of(const float *x, size_t ld, int head, int head_dim, size_t row0, size_t T) {
    size_t left = T - row0;
    return {x + row0 * ld + (size_t)head * head_dim, ld, left < TILE ? (int)left : (int)TILE};
}

/* Four values of a row, of which those from dim on are zero. Where head_dim is a multiple of 4, so are all places. */
static __device__ inline quad load_quad(const strip &x, int dim, int row, int column) {
    quad q = {{0, 0, 0, 0}};
    if (row >= x.n || column >= dim) return q;
    const float *from = x.at + (size_t)row * x.ld + column;
    if (dim % 4 == 0) return *(const quad *)from;
    for (int i = 0; i < 4; i++)
        if (column + i < dim) q.v[i] = from[i];
    return q;
}

/* acc[i][j] += sum over k < N of a[k][row i] * b[k][column j], both in shared memory. */
template <int UNITS, int N, int LD_B>
static __device__ inline void multiply(float (&acc)[HEIGHT][2 * UNITS], const float *a, const float *b) {
    a += thread_row(0);
    b += thread_column(0);
#pragma unroll 4
    for (int k = 0; k < N; k++, a += LD_TILE, b += LD_B) {
        quad x[2] = {*(const quad *)a, *(const quad *)(a + 4)};
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            pair y = *(const pair *)(b + UNIT * u);
#pragma unroll
            for (int i = 0; i < HEIGHT; i++) {
                acc[i][2 * u] += x[i / 4].v[i % 4] * y.v[0];
                acc[i][2 * u + 1] += x[i / 4].v[i % 4] * y.v[1];
            }
        }
    }
}

/* out[i][j] = dot product of row i of a and row j of b. CHUNK values of all rows at a time, stored by columns; the loop
 * begins one chunk early, with a load alone. The first barrier lets all that was read of `m` before come to its end. */
static __device__ inline void dot_products(tile_share &out, const strip &a, const strip &b, int dim, tile_memory &m) {
    enum { ROW_QUADS = CHUNK / 4, LOADS = TILE * ROW_QUADS / TILE_THREADS };
    quad next[2][LOADS];
    auto load = [&](int d) {
#pragma unroll
        for (int l = 0; l < LOADS; l++) {
            int q = (int)threadIdx.x + TILE_THREADS * l, row = q / ROW_QUADS, column = d + q % ROW_QUADS * 4;
            next[0][l] = load_quad(a, dim, row, column);
            next[1][l] = load_quad(b, dim, row, column);
        }
    };
    auto store = [&] {
#pragma unroll
        for (int l = 0; l < LOADS; l++) {
            int q = (int)threadIdx.x + TILE_THREADS * l;
            float *to = m.chunk + q % ROW_QUADS * 4 * LD_TILE + q / ROW_QUADS;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                to[i * LD_TILE] = next[0][l].v[i];
                to[(CHUNK + i) * LD_TILE] = next[1][l].v[i];
            }
        }
    };
#pragma unroll
    for (int i = 0; i < HEIGHT; i++)
#pragma unroll
        for (int j = 0; j < 2 * TILE_UNITS; j++) out[i][j] = 0;
#pragma unroll 1
    for (int d = -CHUNK; d < dim; d += CHUNK) {
        if (d >= 0) {
            __syncthreads();
            store();
            __syncthreads();
        }
        if (d + CHUNK < dim) load(d + CHUNK);
        if (d >= 0) multiply<TILE_UNITS, CHUNK, LD_TILE>(out, m.chunk, m.chunk + CHUNK * LD_TILE);
    }
}

/* Hand a tile of weights to add_weighted. A barrier must lie between the last add_weighted and this; that of
 * dot_products does. */
static __device__ inline void put_weights(const tile_share &w, tile_memory &m) {
#pragma unroll
    for (int j = 0; j < 2 * TILE_UNITS; j++) {
        float *to = m.weights[thread_column(j)] + thread_row(0);
        *(quad *)to = {{w[0][j], w[1][j], w[2][j], w[3][j]}};
        *(quad *)(to + 4) = {{w[4][j], w[5][j], w[6][j], w[7][j]}};
    }
}

/* acc[i] += sum over rows r of x of weight[i][r] * row r: the weights as put, values up to 32*UNITS >= dim. Some rows
 * at a time, at most 8 KiB of them. */
template <int UNITS>
static __device__ inline void add_weighted(float (&acc)[HEIGHT][2 * UNITS], const strip &x, int dim, tile_memory &m) {
    enum { ROWS = UNITS > 4 ? 8 : 16, ROW_QUADS = UNITS * UNIT / 4, LOADS = ROWS * ROW_QUADS / TILE_THREADS };
    static_assert(ROWS * UNITS * UNIT * sizeof(float) <= sizeof m.chunk, "the rows fit the chunk");
    quad next[LOADS];
    auto load = [&](int row0) {
#pragma unroll
        for (int l = 0; l < LOADS; l++) {
            int q = (int)threadIdx.x + TILE_THREADS * l;
            next[l] = load_quad(x, dim, row0 + q / ROW_QUADS, q % ROW_QUADS * 4);
        }
    };
#pragma unroll 1
    for (int row0 = -ROWS; row0 < x.n; row0 += ROWS) {
        if (row0 >= 0) {
            __syncthreads();
#pragma unroll
            for (int l = 0; l < LOADS; l++) *(quad *)(m.chunk + 4 * (threadIdx.x + TILE_THREADS * l)) = next[l];
            __syncthreads();
        }
        if (row0 + ROWS < x.n) load(row0 + ROWS);
        if (row0 >= 0) multiply<UNITS, ROWS, UNITS * UNIT>(acc, m.weights[row0], m.chunk);
    }
}

/* Write factor[i] * acc[i] to rows row0 + i of a head, up to row T. */
template <int UNITS>
static __device__ inline void write_rows(const float (&acc)[HEIGHT][2 * UNITS], const float (&factor)[HEIGHT],
                                         float *out, size_t ld, int head, int dim, size_t row0, size_t T) {
#pragma unroll
    for (int i = 0; i < HEIGHT; i++) {
        size_t row = row0 + (size_t)thread_row(i);
        if (row >= T) continue;
        float *to = out + row * ld + (size_t)head * dim;
#pragma unroll
        for (int j = 0; j < 2 * UNITS; j++)
            if (thread_column(j) < dim) to[thread_column(j)] = factor[i] * acc[i][j];
    }
}

/* ---- scores and masks ------------------------------------------------------------------------------------------- */

static __device__ inline int kv_head_of(const attention_shape &s, int head) {
    return head / (s.n_head / s.n_kv_head);
}

/* Heads of q, k and v count through. */
static __device__ inline strip strip_of_queries(const attention_shape &s, int head, size_t row0) {
    return strip_of(s.qkv, s.ld, head, s.head_dim, row0, s.T);
}
static __device__ inline strip strip_of_keys(const attention_shape &s, int kv_head, size_t row0) {
    return strip_of(s.qkv, s.ld, s.n_head + kv_head, s.head_dim, row0, s.T);
}
static __device__ inline strip strip_of_values(const attention_shape &s, int kv_head, size_t row0) {
    return strip_of(s.qkv, s.ld, s.n_head + s.n_kv_head + kv_head, s.head_dim, row0, s.T);
}

/* The tile of the first entry that any of the steps from row0 on sees. */
static __device__ inline size_t first_key_tile(const attention_shape &s, size_t row0) {
    size_t window = (size_t)s.window;
    return window && row0 >= window ? (row0 - window + 1) / TILE * TILE : 0;
}

/* One past the last step that sees any of the TILE entries from col0 on. */
static __device__ inline size_t end_of_queries(const attention_shape &s, size_t col0) {
    size_t end = col0 + TILE - 1 + (size_t)s.window;
    return s.window && end < s.T ? end : s.T;
}

/* The step from which on entry i is not seen. */
static __device__ inline int end_of_life(const attention_shape &s, int kv_head, int i) {
    size_t padded = (s.T + PAD - 1) / PAD * PAD;
    return s.evict_at && i < (int)s.T ? s.evict_at[(size_t)kv_head * padded + i] : INT32_MAX;
}

/* Does step t see entry i, which is gone from step `gone` on? A step always sees itself. */
static __device__ inline bool sees(const attention_shape &s, int t, int i, int gone) {
    bool in_window = i <= t && (s.window == 0 || t - i < s.window);
    return t < (int)s.T && in_window && (gone > t || i == t);
}

static __device__ inline bool is_finite(float x) {
    return fabsf(x) <= FLT_MAX;
}

static __device__ inline float capped(float x, float softcap) {
    return softcap > 0 && is_finite(x) ? softcap * tanhf(x / softcap) : x;
}

/* Scaled and capped products of q's rows and k's, or k's and q's; what is not finite stays so. The cap's loop goes
 * through the thread's own places among the weights, so that the code of tanh, which few models need, is there once. */
static __device__ inline void scores(tile_share &out, const strip &a, const strip &b, const attention_shape &s,
                                     tile_memory &m) {
    dot_products(out, a, b, s.head_dim, m);
#pragma unroll
    for (int i = 0; i < HEIGHT; i++)
#pragma unroll
        for (int j = 0; j < 2 * TILE_UNITS; j++) out[i][j] *= s.scale;
    if (s.softcap <= 0) return;
    put_weights(out, m);
#pragma unroll 1
    for (int e = 0; e < HEIGHT * 2 * TILE_UNITS; e++) {
        float *x = &m.weights[thread_column(e / HEIGHT)][thread_row(e % HEIGHT)];
        *x = capped(*x, s.softcap);
    }
#pragma unroll
    for (int i = 0; i < HEIGHT; i++)
#pragma unroll
        for (int j = 0; j < 2 * TILE_UNITS; j++) out[i][j] = m.weights[thread_column(j)][thread_row(i)];
}
