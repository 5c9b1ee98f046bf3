/* Weights from the file's blocks to f32 or bf16, with the bits that tracer/dequant.c gives. Writing the values is most
 * of the work: a thread makes one or two quads of neighbours, from quantised bytes that no other thread reads. */
#include "tracer/cuda/kernels.h"
#include "tracer/cuda/lanes.cuh"

extern "C" {
#include "base/err.h"
}

/* Little-endian, from any address. Whether `p` is aligned is the same for a whole tensor, or nearly. */
static __device__ inline unsigned read16(const uint8_t *p) {
    if ((uintptr_t)p % 2 == 0) return *(const uint16_t *)p;
    return p[0] | (unsigned)p[1] << 8;
}
static __device__ inline unsigned read32(const uint8_t *p) {
    if ((uintptr_t)p % 4 == 0) return *(const uint32_t *)p;
    return read16(p) | read16(p + 2) << 16;
}

/* A type says how many quads a thread makes, how many such items n values are, and makes item `i` of a row: quads at
 * columns column[], values in made[]. Columns from n on do not count. Block layouts stand in tracer/dequant.c. */

struct plain_item {
    enum { QUADS = 1 };
    static size_t items(size_t n) { return (n + 3) / 4; }
};

/* Values i .. i+3 of type T of a row of n, at any address; 0 behind its end. */
template <typename T> static __device__ inline lanes<T, 4> read_quad(const uint8_t *row, size_t i, size_t n) {
    const uint8_t *from = row + i * sizeof(T);
    if (i + 4 <= n && (uintptr_t)from % sizeof(lanes<T, 4>) == 0) return *(const lanes<T, 4> *)from;
    lanes<T, 4> q = {};
    for (unsigned k = 0; k < 4 && i + k < n; k++)
        for (unsigned b = 0; b < sizeof(T); b++) q.v[k] |= (T)(from[k * sizeof(T) + b] << 8 * b);
    return q;
}

struct type_f32 : plain_item {
    static __device__ void make(const uint8_t *row, size_t i, size_t n, size_t column[], quad made[]) {
        column[0] = 4 * i;
        lanes<uint32_t, 4> bits = read_quad<uint32_t>(row, 4 * i, n);
        for (int k = 0; k < 4; k++) made[0].v[k] = __uint_as_float(bits.v[k]);
    }
};

struct type_f16 : plain_item {
    static __device__ void make(const uint8_t *row, size_t i, size_t n, size_t column[], quad made[]) {
        column[0] = 4 * i;
        lanes<uint16_t, 4> bits = read_quad<uint16_t>(row, 4 * i, n);
        for (int k = 0; k < 4; k++) made[0].v[k] = of_f16(bits.v[k]);
    }
};

struct type_bf16 : plain_item {
    static __device__ void make(const uint8_t *row, size_t i, size_t n, size_t column[], quad made[]) {
        column[0] = 4 * i;
        lanes<uint16_t, 4> bits = read_quad<uint16_t>(row, 4 * i, n);
        for (int k = 0; k < 4; k++) made[0].v[k] = __uint_as_float((unsigned)bits.v[k] << 16);
    }
};

/* Eight threads a block of 34 bytes. */
struct type_q8_0 : plain_item {
    static __device__ void make(const uint8_t *row, size_t i, size_t, size_t column[], quad made[]) {
        const uint8_t *block = row + i / 8 * 34;
        float d = of_f16((uint16_t)read16(block));
        unsigned q = read32(block + 2 + i % 8 * 4);
        column[0] = 4 * i;
        for (int k = 0; k < 4; k++) made[0].v[k] = (float)(int8_t)(q >> 8 * k) * d;
    }
};

/* Four threads a block: four bytes hold a quad of its first half and one of its second. */
struct nibble_item {
    enum { QUADS = 2 };
    static size_t items(size_t n) { return n / 8; }
    static __device__ void place(size_t i, size_t column[]) {
        column[0] = i / 4 * 32 + i % 4 * 4;
        column[1] = column[0] + 16;
    }
    static __device__ int nibble(unsigned q, int half, int k) { return (int)(q >> (8 * k + 4 * half) & 15); }
};

struct type_q4_0 : nibble_item {
    static __device__ void make(const uint8_t *row, size_t i, size_t, size_t column[], quad made[]) {
        const uint8_t *block = row + i / 4 * 18;
        float d = of_f16((uint16_t)read16(block));
        unsigned q = read32(block + 2 + i % 4 * 4);
        place(i, column);
        for (int half = 0; half < 2; half++)
            for (int k = 0; k < 4; k++) made[half].v[k] = (float)(nibble(q, half, k) - 8) * d;
    }
};

struct type_q4_1 : nibble_item {
    static __device__ void make(const uint8_t *row, size_t i, size_t, size_t column[], quad made[]) {
        const uint8_t *block = row + i / 4 * 20;
        float d = of_f16((uint16_t)read16(block)), m = of_f16((uint16_t)read16(block + 2));
        unsigned q = read32(block + 4 + i % 4 * 4);
        place(i, column);
        /* Two roundings, as on the CPU: no fused multiply-add. */
        for (int half = 0; half < 2; half++)
            for (int k = 0; k < 4; k++) made[half].v[k] = __fadd_rn(__fmul_rn((float)nibble(q, half, k), d), m);
    }
};

template <typename TYPE, typename OUT>
static __global__ void dequant(const uint8_t *blocks, size_t row_bytes, const int32_t *ids, size_t n, OUT *out,
                               size_t ld_out) {
    size_t row = blockIdx.x, from = ids ? (size_t)ids[row] : row, item = lane_item(), column[TYPE::QUADS];
    quad made[TYPE::QUADS] = {};
    bool absent = ids && ids[row] < 0;
    if (TYPE::QUADS * 4 * item >= n) return;
    TYPE::make(blocks + (absent ? 0 : from) * row_bytes, item, n, column, made); /* sets the columns, too */
    for (int j = 0; absent && j < TYPE::QUADS; j++) made[j] = {};
    for (int j = 0; j < TYPE::QUADS; j++) store_quad(out + row * ld_out, column[j], n, made[j]);
}

struct tensor_rows {
    const uint8_t *blocks;
    size_t row_bytes;
    const int32_t *ids;
    size_t rows, n;
};

template <typename TYPE> static int launch(device *d, const tensor_rows &r, dtype type, void *out, size_t ld_out) {
    if (r.rows == 0) return 0;
    cover c(r.rows, TYPE::items(r.n));
    if (type == DTYPE_BF16)
        return LAUNCH(d, (dequant<TYPE, uint16_t>), c.grid, c.block, r.blocks, r.row_bytes, r.ids, r.n, (uint16_t *)out,
                      ld_out);
    return LAUNCH(d, (dequant<TYPE, float>), c.grid, c.block, r.blocks, r.row_bytes, r.ids, r.n, (float *)out, ld_out);
}

/* By number in GGUF files; NULL where the device cannot. */
typedef int launcher(device *d, const tensor_rows &r, dtype type, void *out, size_t ld_out);
static launcher *launcher_of(uint32_t ggml_type) {
    switch (ggml_type) {
    case 0:
        return launch<type_f32>;
    case 1:
        return launch<type_f16>;
    case 2:
        return launch<type_q4_0>;
    case 3:
        return launch<type_q4_1>;
    case 8:
        return launch<type_q8_0>;
    case 30:
        return launch<type_bf16>;
    default:
        return NULL;
    }
}

bool k_dequant_can(uint32_t ggml_type) {
    return launcher_of(ggml_type) != NULL;
}

int k_dequant(device *d, uint32_t ggml_type, const void *blocks, size_t row_bytes, const int32_t *ids, size_t rows,
              size_t n, dtype type, void *out, size_t ld_out) {
    launcher *run = launcher_of(ggml_type);
    if (!run) return err_set(ERR_DATA, "internal error: the device does not read tensors of type %u", ggml_type);
    return run(d, {(const uint8_t *)blocks, row_bytes, ids, rows, n}, type, out, ld_out);
}
