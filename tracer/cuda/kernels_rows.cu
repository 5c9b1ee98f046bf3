/* What happens to rows between the products: norms, rotary embedding, the gate, conversion. Memory bounds all of it: a
 * thread moves four neighbouring values at a time, and every value crosses the memory bus once each way. */
#include "tracer/cuda/kernels.h"
#include "tracer/cuda/lanes.cuh"
#include "tracer/cuda/reduce.cuh"

/* Gradient rows are sets of T, and row t of each set needs row t of the activations. Blocks that need the same one
 * follow each other, so that it comes from memory once and from the cache after that. The last set may be short. */
struct gradient_rows {
    size_t T, sets, rows;
};
static gradient_rows gradients(size_t T, size_t rows) {
    return gradient_rows{T, (rows + T - 1) / T, rows};
}
static __device__ inline size_t position_of(const gradient_rows &g) {
    return blockIdx.x / (unsigned)g.sets;
}
static __device__ inline size_t row_of(const gradient_rows &g) {
    return blockIdx.x % (unsigned)g.sets * g.T + position_of(g);
}

/* ---- norm ------------------------------------------------------------------------------------------------------- */

/* A block per row, with threads for about two quads each; long rows take more turns. */
static dim3 norm_block(size_t n) {
    size_t warps = (n + 8 * WARP - 1) / (8 * WARP);
    return dim3((unsigned)(warps > 16 ? 16 : warps) * WARP);
}

static __device__ inline float inverse_root(double squares, size_t n, float eps) {
    return 1.0f / sqrtf((float)squares / (float)n + eps);
}

/* Twice over the row: the second time it comes from the first-level cache. */
template <typename OUT>
static __global__ void norm(const float *x, size_t ld_x, const float *weight, size_t n, float eps, OUT *out,
                            size_t ld_out) {
    x += blockIdx.x * ld_x;
    out += blockIdx.x * ld_out;
    float squares = 0;
    for (size_t i = 4 * threadIdx.x; i < n; i += 4 * blockDim.x) {
        quad a = load_quad(x, i, n);
        for (int k = 0; k < 4; k++) squares += a.v[k] * a.v[k];
    }
    float inverse = inverse_root(block_sum(squares), n, eps);
    for (size_t i = 4 * threadIdx.x; i < n; i += 4 * blockDim.x) {
        quad a = load_quad(x, i, n), w = load_quad(weight, i, n);
        for (int k = 0; k < 4; k++) a.v[k] *= inverse * w.v[k];
        store_quad(out, i, n, a);
    }
}

/* With g = d_out * weight: d_x += (g - x (g.x) / (n (mean(x^2) + eps))) / sqrt(mean(x^2) + eps). A block per gradient
 * row, twice over it as above. */
static __global__ void norm_back(gradient_rows at, const float *x, const float *weight, size_t n, float eps,
                                 const float *d_out, float *d_x, size_t ld) {
    size_t row = row_of(at);
    if (row >= at.rows) return;
    x += position_of(at) * ld;
    d_out += row * ld;
    d_x += row * ld;
    float squares = 0, products = 0;
    for (size_t i = 4 * threadIdx.x; i < n; i += 4 * blockDim.x) {
        quad a = load_quad(x, i, n), w = load_quad(weight, i, n), g = load_quad(d_out, i, n);
        for (int k = 0; k < 4; k++) {
            squares += a.v[k] * a.v[k];
            products += g.v[k] * w.v[k] * a.v[k];
        }
    }
    float inverse = inverse_root(block_sum(squares), n, eps);
    float along = (float)block_sum(products) * inverse * inverse / (float)n;
    for (size_t i = 4 * threadIdx.x; i < n; i += 4 * blockDim.x) {
        quad a = load_quad(x, i, n), w = load_quad(weight, i, n), g = load_quad(d_out, i, n), d = load_quad(d_x, i, n);
        for (int k = 0; k < 4; k++) d.v[k] += inverse * (g.v[k] * w.v[k] - along * a.v[k]);
        store_quad(d_x, i, n, d);
    }
}

int k_norm(device *d, const float *x, size_t ld_x, const float *weight, size_t rows, size_t n, float eps, dtype type,
           void *out, size_t ld_out) {
    if (rows == 0) return 0;
    dim3 grid((unsigned)rows), block = norm_block(n);
    if (type == DTYPE_BF16)
        return LAUNCH(d, norm<uint16_t>, grid, block, x, ld_x, weight, n, eps, (uint16_t *)out, ld_out);
    return LAUNCH(d, norm<float>, grid, block, x, ld_x, weight, n, eps, (float *)out, ld_out);
}

int k_norm_back(device *d, const float *x, size_t T, const float *weight, size_t rows, size_t n, float eps,
                const float *d_out, float *d_x, size_t ld) {
    if (rows == 0) return 0;
    gradient_rows at = gradients(T, rows);
    dim3 grid((unsigned)(at.T * at.sets)), block = norm_block(n);
    return LAUNCH(d, norm_back, grid, block, at, x, weight, n, eps, d_out, d_x, ld);
}

/* ---- heads ------------------------------------------------------------------------------------------------------ */

/* The pairs that turn together, among two runs of W values laid end to end. */
template <arch_rope ROPE, int W>
static __device__ inline void turn(lanes<float, W> x[2], const float *table, float way) {
    typedef lanes<float, W> run;
    const run by[2] = {*(const run *)table, *(const run *)(table + W)}; /* cosine, sine, cosine, ... */
#pragma unroll
    for (int k = 0; k < W; k++) {
        const int i = ROPE == ARCH_ROPE_HALVES ? k : 2 * k, j = ROPE == ARCH_ROPE_HALVES ? k + W : 2 * k + 1;
        float a = x[i / W].v[i % W], b = x[j / W].v[j % W];
        float cosine = by[2 * k / W].v[2 * k % W], sine = way * by[(2 * k + 1) / W].v[(2 * k + 1) % W];
        x[i / W].v[i % W] = a * cosine - b * sine;
        x[j / W].v[j % W] = a * sine + b * cosine;
    }
}

/* A thread takes 2*W values of one head in one row, as two runs of W. The runs are neighbours, but where halves turn
 * together they lie half the turning part apart. What does not turn only gets its bias: v, and the end of each head
 * where rope_dims < head_dim. way = -1 turns back. */
template <arch_rope ROPE, int W>
static __global__ void turn_heads(gradient_rows at, head_shape s, const float *bias, const float *angles, float way,
                                  float *qkv) {
    typedef lanes<float, W> run;
    size_t row = row_of(at);
    unsigned dim = (unsigned)s.head_dim, turning = (unsigned)s.rope_dims, per_head = (dim + 2 * W - 1) / (2 * W);
    unsigned item = (unsigned)lane_item(), head = item / per_head, pair = item % per_head * W;
    unsigned turned_heads = (unsigned)(s.n_head + s.n_kv_head), heads = turned_heads + (unsigned)s.n_kv_head;
    bool turns = head < turned_heads && 2 * pair < turning;
    if (row >= at.rows || head >= heads || (!turns && !bias)) return;

    bool apart = turns && ROPE == ARCH_ROPE_HALVES;
    unsigned one = apart ? pair : 2 * pair, two = apart ? pair + turning / 2 : one + W;
    bool both = two < dim; /* a head of an odd number of runs ends with a single one */
    float *to = qkv + row * s.ld + head * dim;
    run x[2] = {*(const run *)(to + one), both ? *(const run *)(to + two) : run()};
    if (bias) {
        bias += head * dim;
        const run b[2] = {*(const run *)(bias + one), both ? *(const run *)(bias + two) : run()};
        for (int k = 0; k < 2 * W; k++) x[k / W].v[k % W] += b[k / W].v[k % W];
    }
    if (turns) turn<ROPE, W>(x, angles + position_of(at) * turning + 2 * pair, way);
    *(run *)(to + one) = x[0];
    if (both) *(run *)(to + two) = x[1];
}

static bool in_quads(const head_shape *s, const float *bias, const float *angles, const float *qkv) {
    return s->rope_dims % 8 == 0 && s->head_dim % 4 == 0 && s->ld % 4 == 0 &&
           ((uintptr_t)bias | (uintptr_t)angles | (uintptr_t)qkv) % sizeof(quad) == 0;
}

static int launch_turn(device *d, const head_shape *s, const float *bias, const float *angles, float way, size_t rows,
                       float *qkv) {
    if (rows == 0) return 0;
    bool quads = in_quads(s, bias, angles, qkv), halves = s->rope == ARCH_ROPE_HALVES;
    gradient_rows at = gradients(s->T, rows);
    size_t each = quads ? 8 : 2, per_head = ((size_t)s->head_dim + each - 1) / each;
    cover c(at.T * at.sets, per_head * (size_t)(s->n_head + s->n_kv_head + (bias ? s->n_kv_head : 0)));
    if (quads && halves)
        return LAUNCH(d, (turn_heads<ARCH_ROPE_HALVES, 4>), c.grid, c.block, at, *s, bias, angles, way, qkv);
    if (quads)
        return LAUNCH(d, (turn_heads<ARCH_ROPE_INTERLEAVED, 4>), c.grid, c.block, at, *s, bias, angles, way, qkv);
    if (halves) return LAUNCH(d, (turn_heads<ARCH_ROPE_HALVES, 1>), c.grid, c.block, at, *s, bias, angles, way, qkv);
    return LAUNCH(d, (turn_heads<ARCH_ROPE_INTERLEAVED, 1>), c.grid, c.block, at, *s, bias, angles, way, qkv);
}

int k_heads_finish(device *d, const head_shape *s, const float *bias, const float *angles, float *qkv) {
    return launch_turn(d, s, bias, angles, 1, s->T, qkv);
}

int k_heads_back(device *d, const head_shape *s, const float *angles, size_t rows, float *d_qkv) {
    return launch_turn(d, s, NULL, angles, -1, rows, d_qkv);
}

/* ---- gate ------------------------------------------------------------------------------------------------------- */

/* 1 / (1 + exp(-g)), where exp never overflows. */
static __device__ inline float sigmoid(float g) {
    float z = expf(-fabsf(g));
    return (g < 0 ? z : 1.0f) / (1.0f + z);
}

template <typename OUT>
static __global__ void gate_rows(const float *gate, const float *up, size_t ld, size_t n, OUT *out, size_t ld_out) {
    size_t row = blockIdx.x, i = 4 * lane_item();
    if (i >= n) return;
    quad g = load_quad(gate + row * ld, i, n), u = load_quad(up + row * ld, i, n);
    for (int k = 0; k < 4; k++) u.v[k] *= g.v[k] * sigmoid(g.v[k]);
    store_quad(out + row * ld_out, i, n, u);
}

/* d_gate or d_up may be d_out: a thread reads its quad before it writes there. */
template <typename OUT>
static __global__ void gate_rows_back(gradient_rows at, const float *gate, const float *up, size_t ld, size_t n,
                                      const float *d_out, OUT *d_gate, OUT *d_up, size_t ld_out) {
    size_t row = row_of(at), from = position_of(at) * ld, i = 4 * lane_item();
    if (row >= at.rows || i >= n) return;
    quad g = load_quad(gate + from, i, n), u = load_quad(up + from, i, n), d = load_quad(d_out + row * ld, i, n);
    for (int k = 0; k < 4; k++) {
        float s = sigmoid(g.v[k]), silu = g.v[k] * s;
        g.v[k] = d.v[k] * u.v[k] * (s + silu * (1.0f - s));
        u.v[k] = d.v[k] * silu;
    }
    store_quad(d_gate + row * ld_out, i, n, g);
    store_quad(d_up + row * ld_out, i, n, u);
}

int k_gate(device *d, const float *gate, const float *up, size_t ld, size_t rows, size_t n, dtype type, void *out,
           size_t ld_out) {
    if (rows == 0) return 0;
    cover c(rows, (n + 3) / 4);
    if (type == DTYPE_BF16)
        return LAUNCH(d, gate_rows<uint16_t>, c.grid, c.block, gate, up, ld, n, (uint16_t *)out, ld_out);
    return LAUNCH(d, gate_rows<float>, c.grid, c.block, gate, up, ld, n, (float *)out, ld_out);
}

int k_gate_back(device *d, const float *gate, const float *up, size_t ld, size_t T, size_t rows, size_t n,
                const float *d_out, dtype type, void *d_gate, void *d_up, size_t ld_out) {
    if (rows == 0) return 0;
    gradient_rows at = gradients(T, rows);
    cover c(at.T * at.sets, (n + 3) / 4);
    if (type == DTYPE_BF16)
        return LAUNCH(d, gate_rows_back<uint16_t>, c.grid, c.block, at, gate, up, ld, n, d_out, (uint16_t *)d_gate,
                      (uint16_t *)d_up, ld_out);
    return LAUNCH(d, gate_rows_back<float>, c.grid, c.block, at, gate, up, ld, n, d_out, (float *)d_gate, (float *)d_up,
                  ld_out);
}

/* ---- conversion ------------------------------------------------------------------------------------------------- */

static __global__ void cast_rows(const float *in, size_t ld_in, size_t n, uint16_t *out, size_t ld_out) {
    size_t i = 4 * lane_item();
    if (i < n) store_quad(out + blockIdx.x * ld_out, i, n, load_quad(in + blockIdx.x * ld_in, i, n));
}

int k_cast(device *d, const float *in, size_t ld_in, size_t rows, size_t n, void *out, size_t ld_out) {
    if (rows == 0) return 0;
    cover c(rows, (n + 3) / 4);
    return LAUNCH(d, cast_rows, c.grid, c.block, in, ld_in, n, (uint16_t *)out, ld_out);
}
