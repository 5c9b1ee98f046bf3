/* Chunks of the trace before compression: f16 tiles of one head, padded with zeros, all low bytes and then all high
 * bytes. A thread packs four neighbouring values, so that a warp writes whole lines of both planes. */
#include "tracer/cuda/kernels.h"
#include "tracer/cuda/lanes.cuh"
#include "traces/trace.h"

/* How T rows of a head are cut: tile blockIdx.x, counted through the heads, is `height` rows of `dim`. */
struct tiling {
    size_t T, height, per_head, dim;
};
static tiling tiles_of(const head_shape *s) {
    size_t height = s->T < TRACE_TILE ? s->T : (size_t)TRACE_TILE;
    return tiling{s->T, height, (s->T + height - 1) / height, (size_t)s->head_dim};
}

/* Elements at .. at+W-1 of a tile of `size`. */
template <int W>
static __device__ inline void store_planes(uint8_t *tile, size_t size, size_t at, const lanes<float, W> &x) {
    lanes<uint8_t, W> low, high;
    for (int k = 0; k < W; k++) {
        uint16_t h = f16_of(x.v[k]);
        low.v[k] = (uint8_t)h;
        high.v[k] = (uint8_t)(h >> 8);
    }
    *(lanes<uint8_t, W> *)(tile + at) = low;
    *(lanes<uint8_t, W> *)(tile + size + at) = high;
}

/* blockIdx.y and the thread choose W elements of the tile; W divides dim, so they are of one row. x: row 0 of the first
 * head. */
template <int W> static __global__ void pack_heads(tiling c, const float *x, size_t ld, uint8_t *out) {
    size_t head = blockIdx.x / (unsigned)c.per_head, row0 = blockIdx.x % (unsigned)c.per_head * c.height;
    size_t size = c.height * c.dim, at = W * lane_item();
    if (at >= size) return;
    size_t row = row0 + (unsigned)at / (unsigned)c.dim, column = (unsigned)at % (unsigned)c.dim;
    lanes<float, W> v = {};
    if (row < c.T) v = *(const lanes<float, W> *)(x + row * ld + head * c.dim + column);
    store_planes<W>(out + 2 * size * blockIdx.x, size, at, v);
}

/* A row is the work of `team` lanes of a warp, which find its largest magnitude together; then they read it again, from
 * the first-level cache. Magnitudes are compared as integers: in that order infinity and NaN are the largest. */
template <int W>
static __global__ void pack_gradients(tiling c, unsigned team, const float *x, size_t ld, uint8_t *out, float *scale) {
    size_t head = blockIdx.x / (unsigned)c.per_head, row0 = blockIdx.x % (unsigned)c.per_head * c.height;
    size_t row = (size_t)lane_item() / team, t = row0 + row, size = c.height * c.dim, first = W * (threadIdx.x % team);
    bool inside = row < c.height && t < c.T;
    x += t * ld + head * c.dim;

    unsigned most = 0;
    for (size_t i = first; inside && i < c.dim; i += W * team) {
        lanes<float, W> v = *(const lanes<float, W> *)(x + i);
        for (int k = 0; k < W; k++) most = max(most, __float_as_uint(v.v[k]) & 0x7fffffffu);
    }
    for (unsigned apart = team / 2; apart > 0; apart /= 2)
        most = max(most, __shfl_xor_sync(0xffffffffu, most, (int)apart));
    float largest = __uint_as_float(most);
    if (inside && first == 0) scale[head * c.T + t] = largest;

    for (size_t i = first; row < c.height && i < c.dim; i += W * team) {
        lanes<float, W> v = {};
        if (inside && most) v = *(const lanes<float, W> *)(x + i);
        for (int k = 0; k < W && most; k++) v.v[k] = __fdiv_rn(v.v[k], largest);
        store_planes<W>(out + 2 * size * blockIdx.x, size, row * c.dim + i, v);
    }
}

static bool in_quads(size_t dim, size_t ld, const float *x, const uint8_t *out) {
    return dim % 4 == 0 && ld % 4 == 0 && (uintptr_t)x % sizeof(quad) == 0 && (uintptr_t)out % 4 == 0;
}

int k_pack_heads(device *d, const head_shape *s, const float *qkv, int head0, int n, uint8_t *out) {
    tiling c = tiles_of(s);
    const float *x = qkv + (size_t)head0 * c.dim;
    size_t tiles = (size_t)n * c.per_head;
    if (tiles == 0) return 0;
    bool quads = in_quads(c.dim, s->ld, x, out);
    cover all(tiles, c.height * c.dim / (quads ? 4 : 1));
    if (quads) return LAUNCH(d, pack_heads<4>, all.grid, all.block, c, x, s->ld, out);
    return LAUNCH(d, pack_heads<1>, all.grid, all.block, c, x, s->ld, out);
}

int k_pack_gradients(device *d, const head_shape *s, const float *d_o, size_t ld_o, uint8_t *out, float *scale) {
    tiling c = tiles_of(s);
    bool quads = in_quads(c.dim, ld_o, d_o, out);
    unsigned team = WARP, each = quads ? 4 : 1;
    while (team > 1 && team / 2 * each >= c.dim) team /= 2;
    cover all((size_t)s->n_head * c.per_head, c.height * team);
    if (quads) return LAUNCH(d, pack_gradients<4>, all.grid, all.block, c, team, d_o, ld_o, out, scale);
    return LAUNCH(d, pack_gradients<1>, all.grid, all.block, c, team, d_o, ld_o, out, scale);
}
