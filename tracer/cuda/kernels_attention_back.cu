/* The way back through attention, in tiles (Dao et al. 2022, "FlashAttention", appendix B.4; the formulas stand in
 * tracer/cpu/attention_back.c). Three kernels own their outputs, dQ, dK and dV, and sum them in a fixed order: no
 * atomics. Each computes tiles of probabilities again from lse, once for the label sets it carries: two where head_dim
 * is at most 128, so that outputs stay in registers. */
#include "tracer/cuda/attention.cuh"
#include "tracer/cuda/reduce.cuh"

extern "C" {
#include "base/err.h"
}

/* What the kernels read: from the first set they carry on. */
struct back_sets {
    const float *lse, *d_o, *row_dot;
    size_t ld_o;
    float *d_qkv;
};

static __device__ inline strip strip_of_gradients(const attention_shape &s, const back_sets &b, int set, int head,
                                                  size_t row0) {
    return strip_of(b.d_o + (size_t)set * s.T * b.ld_o, b.ld_o, head, s.head_dim, row0, s.T);
}

/* d_o . o of one row: a warp each. */
static __global__ void row_dots(size_t rows, size_t T, int n_head, int head_dim, const float *o, const float *d_o,
                                size_t ld_o, float *row_dot) {
    size_t task = (size_t)blockIdx.x * (TILE_THREADS / WARP) + threadIdx.x / WARP, row = task / n_head;
    size_t head = task % n_head;
    if (row >= rows) return;
    const float *a = o + row % T * ld_o + head * head_dim, *b = d_o + row * ld_o + head * head_dim;
    float sum = 0;
    for (int i = (int)(threadIdx.x % WARP); i < head_dim; i += WARP) sum += a[i] * b[i];
    double total = warp_sum((double)sum);
    if (threadIdx.x % WARP == 0) row_dot[(row / T * n_head + head) * T + row % T] = (float)total;
}

/* exp(score - lse), times the softcap's slope there, 1 - tanh^2; inverse_cap 0 leaves the slope out. */
static __device__ inline float probability(float score, float lse, float inverse_cap) {
    float tanh_x = score * inverse_cap;
    return (1 - tanh_x * tanh_x) * expf(score - lse);
}
static __device__ inline float inverse_cap_of(const attention_shape &s) {
    return s.softcap > 0 ? 1 / s.softcap : 0;
}

/* dQ. A block: 64 steps of a head, walking over the key tiles that they see; otherwise as attention_rows. */
template <int UNITS, int SETS> static __global__ void queries_back(attention_shape s, back_sets b) {
    __shared__ tile_memory m;
    int head = (int)(blockIdx.x % s.n_head), kv_head = kv_head_of(s, head);
    size_t row0 = (size_t)((gridDim.x - 1 - blockIdx.x) / s.n_head) * TILE;
    const float *lse = b.lse + (size_t)head * s.T;
    float out[SETS][HEIGHT][2 * UNITS] = {}, factor[HEIGHT], inverse_cap = inverse_cap_of(s);
    for (size_t col0 = first_key_tile(s, row0); col0 <= row0; col0 += TILE) {
        strip k = strip_of_keys(s, kv_head, col0);
        tile_share p, d;
        scores(p, strip_of_queries(s, head, row0), k, s, m);
#pragma unroll
        for (int j = 0; j < 2 * TILE_UNITS; j++) {
            int col = (int)col0 + thread_column(j), gone = end_of_life(s, kv_head, col);
#pragma unroll
            for (int i = 0; i < HEIGHT; i++) {
                int t = (int)row0 + thread_row(i);
                p[i][j] = sees(s, t, col, gone) ? probability(p[i][j], lse[t], inverse_cap) : 0;
            }
        }
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            const float *row_dot = b.row_dot + ((size_t)set * s.n_head + head) * s.T;
            dot_products(d, strip_of_gradients(s, b, set, head, row0), strip_of_values(s, kv_head, col0), s.head_dim,
                         m);
#pragma unroll
            for (int i = 0; i < HEIGHT; i++) {
                int t = (int)row0 + thread_row(i);
                float mean = t < (int)s.T ? row_dot[t] : 0;
#pragma unroll
                for (int j = 0; j < 2 * TILE_UNITS; j++) d[i][j] = p[i][j] * (d[i][j] - mean);
            }
            put_weights(d, m);
            add_weighted<UNITS>(out[set], k, s.head_dim, m);
        }
    }
    for (int i = 0; i < HEIGHT; i++) factor[i] = s.scale;
#pragma unroll
    for (int set = 0; set < SETS; set++)
        write_rows<UNITS>(out[set], factor, b.d_qkv + set * s.T * s.ld, s.ld, head, s.head_dim, row0, s.T);
}

/* Probabilities of a tile whose rows are keys and whose columns are steps. */
static __device__ inline void probabilities_by_key(const attention_shape &s, const float *lse, int kv_head, size_t key0,
                                                   size_t step0, float inverse_cap, tile_share &p) {
    int gone[HEIGHT];
#pragma unroll
    for (int i = 0; i < HEIGHT; i++) gone[i] = end_of_life(s, kv_head, (int)key0 + thread_row(i));
#pragma unroll
    for (int j = 0; j < 2 * TILE_UNITS; j++) {
        int t = (int)step0 + thread_column(j);
        float of_step = t < (int)s.T ? lse[t] : 0;
#pragma unroll
        for (int i = 0; i < HEIGHT; i++)
            p[i][j] = sees(s, t, (int)key0 + thread_row(i), gone[i]) ? probability(p[i][j], of_step, inverse_cap) : 0;
    }
}

/* dK. A block: 64 entries of a kv head, walking over the group's heads and, of each, the steps that see any of them.
 * The longest walks start first. */
template <int UNITS, int SETS> static __global__ void keys_back(attention_shape s, back_sets b) {
    __shared__ tile_memory m;
    int kv_head = (int)(blockIdx.x % s.n_kv_head), group = s.n_head / s.n_kv_head;
    size_t key0 = (size_t)(blockIdx.x / s.n_kv_head) * TILE, end = end_of_queries(s, key0);
    float out[SETS][HEIGHT][2 * UNITS] = {}, factor[HEIGHT];
    for (int head = kv_head * group; head < (kv_head + 1) * group; head++)
        for (size_t step0 = key0; step0 < end; step0 += TILE) {
            strip q = strip_of_queries(s, head, step0);
            tile_share p, d;
            scores(p, strip_of_keys(s, kv_head, key0), q, s, m);
            probabilities_by_key(s, b.lse + (size_t)head * s.T, kv_head, key0, step0, inverse_cap_of(s), p);
#pragma unroll
            for (int set = 0; set < SETS; set++) {
                const float *row_dot = b.row_dot + ((size_t)set * s.n_head + head) * s.T;
                dot_products(d, strip_of_values(s, kv_head, key0), strip_of_gradients(s, b, set, head, step0),
                             s.head_dim, m);
#pragma unroll
                for (int j = 0; j < 2 * TILE_UNITS; j++) {
                    int t = (int)step0 + thread_column(j);
                    float mean = t < (int)s.T ? row_dot[t] : 0;
#pragma unroll
                    for (int i = 0; i < HEIGHT; i++) d[i][j] = p[i][j] * (d[i][j] - mean);
                }
                put_weights(d, m);
                add_weighted<UNITS>(out[set], q, s.head_dim, m);
            }
        }
    for (int i = 0; i < HEIGHT; i++) factor[i] = s.scale;
#pragma unroll
    for (int set = 0; set < SETS; set++)
        write_rows<UNITS>(out[set], factor, b.d_qkv + set * s.T * s.ld, s.ld, s.n_head + kv_head, s.head_dim, key0,
                          s.T);
}

/* dV, as dK: one tile of weights, the probabilities, serves all sets. */
template <int UNITS, int SETS> static __global__ void values_back(attention_shape s, back_sets b) {
    __shared__ tile_memory m;
    int kv_head = (int)(blockIdx.x % s.n_kv_head), group = s.n_head / s.n_kv_head;
    size_t key0 = (size_t)(blockIdx.x / s.n_kv_head) * TILE, end = end_of_queries(s, key0);
    float out[SETS][HEIGHT][2 * UNITS] = {}, factor[HEIGHT];
    for (int head = kv_head * group; head < (kv_head + 1) * group; head++)
        for (size_t step0 = key0; step0 < end; step0 += TILE) {
            tile_share p;
            scores(p, strip_of_keys(s, kv_head, key0), strip_of_queries(s, head, step0), s, m);
            probabilities_by_key(s, b.lse + (size_t)head * s.T, kv_head, key0, step0, 0, p);
            put_weights(p, m);
#pragma unroll
            for (int set = 0; set < SETS; set++)
                add_weighted<UNITS>(out[set], strip_of_gradients(s, b, set, head, step0), s.head_dim, m);
        }
    for (int i = 0; i < HEIGHT; i++) factor[i] = 1;
#pragma unroll
    for (int set = 0; set < SETS; set++)
        write_rows<UNITS>(out[set], factor, b.d_qkv + set * s.T * s.ld, s.ld, s.n_head + s.n_kv_head + kv_head,
                          s.head_dim, key0, s.T);
}

/* ---- launches --------------------------------------------------------------------------------------------------- */

template <int UNITS, int SETS> static int sets_back(device *d, const attention_shape &s, const back_sets &b) {
    size_t tiles = (s.T + TILE - 1) / TILE;
    dim3 of_heads((unsigned)(tiles * (size_t)s.n_head)), of_groups((unsigned)(tiles * (size_t)s.n_kv_head));
    dim3 block(TILE_THREADS);
    TRY(LAUNCH(d, (queries_back<UNITS, SETS>), of_heads, block, s, b));
    TRY(LAUNCH(d, (keys_back<UNITS, SETS>), of_groups, block, s, b));
    return LAUNCH(d, (values_back<UNITS, SETS>), of_groups, block, s, b);
}

template <int UNITS> static int all_sets_back(device *d, const attention_shape &s, size_t sets, back_sets b) {
    constexpr int most = UNITS > 4 ? 1 : 2;
    for (size_t done = 0, n; done < sets; done += n) {
        n = sets - done < most ? 1 : most;
        if (n == most) TRY((sets_back<UNITS, most>(d, s, b)));
        else TRY((sets_back<UNITS, 1>(d, s, b)));
        b.d_o += n * s.T * b.ld_o;
        b.row_dot += n * s.T * (size_t)s.n_head;
        b.d_qkv += n * s.T * s.ld;
    }
    return 0;
}

extern "C" int k_attention_back(device *d, const attention_shape *shape, size_t sets, const float *o, const float *lse,
                                const float *d_o, size_t ld_o, float *row_dot, float *d_qkv) {
    attention_shape s = *shape;
    size_t tasks = sets * s.T * (size_t)s.n_head, block = TILE_THREADS / WARP;
    TRY(LAUNCH(d, row_dots, dim3((unsigned)((tasks + block - 1) / block)), dim3(TILE_THREADS), sets * s.T, s.T,
               s.n_head, s.head_dim, o, d_o, ld_o, row_dot));
    back_sets b = {lse, d_o, row_dot, ld_o, d_qkv};
    if (s.head_dim <= 2 * UNIT) return all_sets_back<2>(d, s, sets, b);
    if (s.head_dim <= 4 * UNIT) return all_sets_back<4>(d, s, sets, b);
    return all_sets_back<8>(d, s, sets, b);
}
