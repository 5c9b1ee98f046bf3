/* Attention forward: a text at once without a row of probabilities in memory (Dao et al. 2022, "FlashAttention"), its
 * probabilities as tiles for the trace, and one step over caches. */
#include "tracer/cuda/attention.cuh"
#include "tracer/cuda/reduce.cuh"
#include "traces/trace.h"

/* Over the half warp that shares rows. */
static __device__ inline float row_max(float x) {
    for (int apart = UNIT / 4; apart > 0; apart /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, apart));
    return x;
}
static __device__ inline double row_sum(double x) {
    for (int apart = UNIT / 4; apart > 0; apart /= 2) x += __shfl_xor_sync(0xffffffffu, x, apart);
    return x;
}

/* ---- a text at once --------------------------------------------------------------------------------------------- */

/* A thread's rows so far: exp(score - max) summed over the thread's own columns, and the first with a score that is not
 * finite. */
struct row_state {
    float max[HEIGHT], sum[HEIGHT];
    int bad;
};

/* Scores become exp(score - max), 0 where not seen; fade[i] is what earlier sums and outputs of row i shrink by. */
static __device__ inline void softmax_tile(const attention_shape &s, int kv_head, size_t row0, size_t col0,
                                           tile_share &p, row_state &r, float (&fade)[HEIGHT]) {
    int gone[2 * TILE_UNITS];
#pragma unroll
    for (int j = 0; j < 2 * TILE_UNITS; j++) gone[j] = end_of_life(s, kv_head, (int)col0 + thread_column(j));
#pragma unroll
    for (int i = 0; i < HEIGHT; i++) {
        int t = (int)row0 + thread_row(i);
        float top = r.max[i];
#pragma unroll
        for (int j = 0; j < 2 * TILE_UNITS; j++) {
            bool seen = sees(s, t, (int)col0 + thread_column(j), gone[j]);
            if (seen && !is_finite(p[i][j])) r.bad = min(r.bad, t);
            p[i][j] = seen ? p[i][j] : -INFINITY;
            top = fmaxf(top, p[i][j]);
        }
        top = row_max(top);
        float shift = top == -INFINITY ? 0 : top; /* a row may see nothing of a tile */
        fade[i] = expf(r.max[i] - shift);
        r.max[i] = top;
        r.sum[i] *= fade[i];
#pragma unroll
        for (int j = 0; j < 2 * TILE_UNITS; j++) r.sum[i] += p[i][j] = expf(p[i][j] - shift);
    }
}

/* A block: 64 rows of a head, which keep their sums and outputs in registers while the block walks over the key tiles
 * that any of them sees. The longest walks start first, and heads that share keys run side by side. */
template <int UNITS>
static __global__ void __launch_bounds__(TILE_THREADS, UNITS > 4 ? 2 : 3)
    attention_rows(attention_shape s, float *o, size_t ld_o, float *lse, int32_t *bad) {
    __shared__ tile_memory m;
    int head = (int)(blockIdx.x % s.n_head), kv_head = kv_head_of(s, head);
    size_t row0 = (size_t)((gridDim.x - 1 - blockIdx.x) / s.n_head) * TILE;
    strip q = strip_of_queries(s, head, row0);
    float out[HEIGHT][2 * UNITS] = {}, fade[HEIGHT];
    row_state r = {{}, {}, INT32_MAX};
#pragma unroll
    for (int i = 0; i < HEIGHT; i++) r.max[i] = -INFINITY;
    for (size_t col0 = first_key_tile(s, row0); col0 <= row0; col0 += TILE) {
        tile_share p;
        scores(p, q, strip_of_keys(s, kv_head, col0), s, m);
        softmax_tile(s, kv_head, row0, col0, p, r, fade);
        put_weights(p, m);
#pragma unroll
        for (int i = 0; i < HEIGHT; i++)
#pragma unroll
            for (int j = 0; j < 2 * UNITS; j++) out[i][j] *= fade[i];
        add_weighted<UNITS>(out, strip_of_values(s, kv_head, col0), s.head_dim, m);
    }
#pragma unroll
    for (int i = 0; i < HEIGHT; i++) {
        size_t t = row0 + thread_row(i);
        double sum = row_sum(r.sum[i]);
        fade[i] = (float)(1 / sum);
        if (t < s.T && thread_column(0) == 0) lse[(size_t)head * s.T + t] = (float)((double)r.max[i] + log(sum));
    }
    if (r.bad != INT32_MAX) atomicMin(bad, r.bad * s.n_head + head);
    write_rows<UNITS>(out, fade, o, ld_o, head, s.head_dim, row0, s.T);
}

/* ---- probabilities ---------------------------------------------------------------------------------------------- */

/* A tile of the trace: head, and its place. */
struct trace_place {
    int head;
    size_t row, column;
};

/* Tile number `index` by head, row tile, column tile. The root is a guess that the loops put right. */
static __device__ inline trace_place place_of(size_t index, size_t row_tiles) {
    size_t of_head = row_tiles * (row_tiles + 1) / 2, left = index % of_head;
    size_t row = (size_t)((sqrt(8 * (double)left + 1) - 1) / 2);
    while (row * (row + 1) / 2 > left) row--;
    while ((row + 1) * (row + 2) / 2 <= left) row++;
    return {(int)(index / of_head), row, left - row * (row + 1) / 2};
}

/* Two neighbours of a row, of which the second may lie beyond the edge, to the planes of low and high bytes. Sixteen
 * threads write 32 bytes. */
static __device__ inline void put_halves(uint8_t *low, size_t edge, size_t at, bool both, float x, float y) {
    uint32_t a = f16_of(x), b = f16_of(y);
    uint8_t *high = low + edge * edge;
    if (edge % 2 == 0) {
        *(uint16_t *)(low + at) = (uint16_t)((a & 255) | b << 8);
        *(uint16_t *)(high + at) = (uint16_t)(a >> 8 | (b & 0xff00));
        return;
    }
    low[at] = (uint8_t)a;
    high[at] = (uint8_t)(a >> 8);
    if (!both) return;
    low[at + 1] = (uint8_t)b;
    high[at + 1] = (uint8_t)(b >> 8);
}

/* A block: 64 x 64 entries of a tile of edge e. Scores are computed again, as attention_rows has them. */
static __global__ void attention_tiles(attention_shape s, const float *lse, size_t first, size_t edge, uint8_t *out) {
    __shared__ tile_memory m;
    size_t across = (edge + TILE - 1) / TILE, part = blockIdx.x % (across * across), n = blockIdx.x / (across * across);
    trace_place place = place_of(first + n, (s.T + edge - 1) / edge);
    size_t row_in = part / across * TILE, col_in = part % across * TILE; /* in the tile */
    size_t row0 = place.row * edge + row_in, col0 = place.column * edge + col_in;
    int kv_head = kv_head_of(s, place.head);
    bool any = row0 < s.T && col0 <= row0 && col0 >= first_key_tile(s, row0);
    tile_share p = {};
    if (any) scores(p, strip_of_queries(s, place.head, row0), strip_of_keys(s, kv_head, col0), s, m);
    int gone[2 * TILE_UNITS];
#pragma unroll
    for (int j = 0; j < 2 * TILE_UNITS; j++) gone[j] = end_of_life(s, kv_head, (int)col0 + thread_column(j));
#pragma unroll
    for (int i = 0; i < HEIGHT; i++) {
        size_t r = row_in + thread_row(i);
        int t = (int)row0 + thread_row(i);
        if (r >= edge) continue;
        float of_row = t < (int)s.T ? lse[(size_t)place.head * s.T + t] : 0;
#pragma unroll
        for (int j = 0; j < 2 * TILE_UNITS; j++) {
            bool seen = sees(s, t, (int)col0 + thread_column(j), gone[j]);
            p[i][j] = seen ? expf(p[i][j] - of_row) : 0;
        }
#pragma unroll
        for (int j = 0; j < 2 * TILE_UNITS; j += 2) {
            size_t c = col_in + thread_column(j);
            if (c < edge) put_halves(out + n * 2 * edge * edge, edge, r * edge + c, c + 1 < edge, p[i][j], p[i][j + 1]);
        }
    }
}

/* ---- one step --------------------------------------------------------------------------------------------------- */

enum { STEP_WARPS = 16, STEP_KEYS = 4 /* of a warp at a time: that many loads are under way */ };

/* What a warp, or the block, has seen so far. */
struct step_memory {
    float out[STEP_WARPS][256], max[STEP_WARPS], sum[STEP_WARPS];
};

/* Memory bound: a block is one head of one copy; each warp takes every 16th handful of entries, a lane every 32nd value
 * of their keys and values, and keeps a softmax of its own. Entries not seen are not read. At the end the warps' sums
 * are put together in order. */
template <int UNITS>
static __global__ void __launch_bounds__(STEP_WARPS *WARP)
    attention_step(step_shape s, const float *qkv, size_t ld, const float *keys, const float *values,
                   const int32_t *evict_at, float *o, size_t ld_o, float *probs, size_t ld_probs, int32_t *bad) {
    __shared__ step_memory m;
    int lane = (int)(threadIdx.x % WARP), warp = (int)(threadIdx.x / WARP), dim = s.head_dim;
    size_t copy = blockIdx.x / s.n_head, head = blockIdx.x % s.n_head, t = s.t, window = (size_t)s.window;
    size_t cache = (copy * s.n_kv_head + head / (s.n_head / s.n_kv_head)) * s.capacity;
    size_t first = window && t >= window ? t - window + 1 : 0;
    const float *query = qkv + copy * ld + head * dim;
    float *row = probs ? probs + blockIdx.x * ld_probs : NULL;
    float q[UNITS], out[UNITS] = {}, max = -INFINITY, sum = 0;
#pragma unroll
    for (int u = 0; u < UNITS; u++) q[u] = WARP * u + lane < dim ? query[WARP * u + lane] : 0;

    for (size_t i0 = first + (size_t)warp * STEP_KEYS; i0 <= t; i0 += STEP_WARPS * STEP_KEYS) {
        float x[STEP_KEYS], top = max;
        bool seen[STEP_KEYS];
#pragma unroll
        for (int k = 0; k < STEP_KEYS; k++) {
            size_t i = i0 + k;
            seen[k] = i <= t && (i == t || !evict_at || evict_at[cache + i] > (int32_t)t);
            x[k] = 0;
#pragma unroll
            for (int u = 0; u < UNITS; u++)
                if (seen[k] && WARP * u + lane < dim) x[k] += q[u] * keys[(cache + i) * dim + WARP * u + lane];
        }
#pragma unroll
        for (int k = 0; k < STEP_KEYS; k++) {
            x[k] = s.scale * warp_sum(x[k]);
            if (lane == 0 && seen[k] && !is_finite(x[k])) atomicMin(bad, (int32_t)blockIdx.x);
            x[k] = seen[k] ? capped(x[k], s.softcap) : -INFINITY;
            if (row && lane == 0 && i0 + k <= t) row[i0 + k] = x[k];
            top = fmaxf(top, x[k]);
        }
        if (top == -INFINITY) continue;
        float fade = expf(max - top);
        max = top;
        sum *= fade;
#pragma unroll
        for (int u = 0; u < UNITS; u++) out[u] *= fade;
#pragma unroll
        for (int k = 0; k < STEP_KEYS; k++) {
            float p = expf(x[k] - top);
            sum += p;
#pragma unroll
            for (int u = 0; u < UNITS; u++)
                if (seen[k] && WARP * u + lane < dim) out[u] += p * values[(cache + i0 + k) * dim + WARP * u + lane];
        }
    }

#pragma unroll
    for (int u = 0; u < UNITS; u++) m.out[warp][WARP * u + lane] = out[u];
    if (lane == 0) m.max[warp] = max, m.sum[warp] = sum;
    __syncthreads();
    double total = 0, value = 0;
    for (int w = 0; w < STEP_WARPS; w++) max = fmaxf(max, m.max[w]);
    for (int w = 0; w < STEP_WARPS; w++) {
        double share = expf(m.max[w] - max);
        total += share * m.sum[w];
        if ((int)threadIdx.x < dim) value += share * m.out[w][threadIdx.x];
    }
    if ((int)threadIdx.x < dim) o[copy * ld_o + head * dim + threadIdx.x] = (float)(value / total);
    if (!row) return;
    float inverse = (float)(1 / total);
    for (size_t i = threadIdx.x; i <= t; i += STEP_WARPS * WARP) row[i] = i < first ? 0 : expf(row[i] - max) * inverse;
}

/* ---- launches --------------------------------------------------------------------------------------------------- */

extern "C" {

int k_attention(device *d, const attention_shape *shape, float *o, size_t ld_o, float *lse, int32_t *bad) {
    attention_shape s = *shape;
    dim3 grid((unsigned)((s.T + TILE - 1) / TILE * (size_t)s.n_head)), block(TILE_THREADS);
    if (s.head_dim <= 2 * UNIT) return LAUNCH(d, attention_rows<2>, grid, block, s, o, ld_o, lse, bad);
    if (s.head_dim <= 3 * UNIT) return LAUNCH(d, attention_rows<3>, grid, block, s, o, ld_o, lse, bad);
    if (s.head_dim <= 4 * UNIT) return LAUNCH(d, attention_rows<4>, grid, block, s, o, ld_o, lse, bad);
    return LAUNCH(d, attention_rows<8>, grid, block, s, o, ld_o, lse, bad);
}

int k_attention_tiles(device *d, const attention_shape *shape, const float *lse, size_t first, size_t n, uint8_t *out) {
    attention_shape s = *shape;
    size_t most = TRACE_TILE, edge = s.T < most ? s.T : most, across = (edge + TILE - 1) / TILE;
    dim3 grid((unsigned)(n * across * across)), block(TILE_THREADS);
    return LAUNCH(d, attention_tiles, grid, block, s, lse, first, edge, out);
}

int k_attention_step(device *d, const step_shape *shape, const float *qkv, size_t ld, const float *keys,
                     const float *values, const int32_t *evict_at, float *o, size_t ld_o, float *probs, size_t ld_probs,
                     int32_t *bad) {
    step_shape s = *shape;
    dim3 grid((unsigned)(s.copies * (size_t)s.n_head)), block(STEP_WARPS * WARP);
    if (s.head_dim <= 2 * UNIT)
        return LAUNCH(d, attention_step<2>, grid, block, s, qkv, ld, keys, values, evict_at, o, ld_o, probs, ld_probs,
                      bad);
    if (s.head_dim <= 4 * UNIT)
        return LAUNCH(d, attention_step<4>, grid, block, s, qkv, ld, keys, values, evict_at, o, ld_o, probs, ld_probs,
                      bad);
    return LAUNCH(d, attention_step<8>, grid, block, s, qkv, ld, keys, values, evict_at, o, ld_o, probs, ld_probs, bad);
}
}
