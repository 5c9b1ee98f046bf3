#include "base/err.h"
#include "tracer/cuda/cuda.h"
#include "tracer/cuda/kernels.h"
#include "traces/kernels.h"

/* Rows rounded to bf16 at a time, so that the scratch memory stays small beside a long text's activations. */
enum { CAST_BYTES = 256 << 20 };

int cuda_multiply(backend_state *s, const cuda_product *p) {
    device_product q = {.rows = p->rows,
                        .cols = p->cols,
                        .inner = p->inner,
                        .type = s->type,
                        .a = p->in,
                        .b = p->w,
                        .lda = p->ld_in,
                        .ldb = p->back ? p->cols : p->inner,
                        .back = p->back,
                        .accumulate = p->accumulate,
                        .out = p->out,
                        .ldo = p->ld_out};
    return device_multiply(s->d, &q);
}

static int need_cast(backend_state *s, size_t bytes) {
    if (bytes <= s->cast_bytes) return 0;
    device_release(s->d, s->cast);
    s->cast = NULL;
    s->cast_bytes = 0;
    TRY(device_new(s->d, bytes, "bf16 rows", &s->cast));
    s->cast_bytes = bytes;
    return 0;
}

int cuda_multiply_f32(backend_state *s, const cuda_product *p) {
    if (s->type == DTYPE_F32) return cuda_multiply(s, p);
    size_t ld = kernel_pad(p->inner), most = CAST_BYTES / (2 * ld), rows = p->rows < most ? p->rows : most;
    TRY(need_cast(s, rows * ld * 2));
    for (size_t row = 0; row < p->rows; row += rows) {
        cuda_product part = *p;
        part.rows = p->rows - row < rows ? p->rows - row : rows;
        part.in = s->cast;
        part.ld_in = ld;
        part.out = p->out + row * p->ld_out;
        TRY(k_cast(s->d, (const float *)p->in + row * p->ld_in, p->ld_in, part.rows, p->inner, s->cast, ld));
        TRY(cuda_multiply(s, &part));
    }
    return 0;
}

int cuda_logits(backend_state *s, const float *hidden, size_t ld, size_t n, float *logits, size_t ld_logits) {
    size_t n_vocab = (size_t)s->m->n_vocab, ids = 0;
    for (size_t id = 0; id < n_vocab; id += ids) {
        cuda_product p = {.rows = n,
                          .inner = (size_t)s->m->n_embd,
                          .in = hidden,
                          .ld_in = ld,
                          .out = logits + id,
                          .ld_out = ld_logits};
        TRY(cuda_output_slice(s, id, &ids, &p.w));
        p.cols = ids;
        TRY(cuda_multiply_f32(s, &p));
    }
    return 0;
}

int cuda_logits_back(backend_state *s, const void *grad, size_t ld_grad, size_t n, float *out, size_t ld) {
    size_t n_vocab = (size_t)s->m->n_vocab, ids = 0, size = dtype_size(s->type);
    for (size_t id = 0; id < n_vocab; id += ids) {
        cuda_product p = {.rows = n,
                          .cols = (size_t)s->m->n_embd,
                          .in = (const char *)grad + id * size,
                          .ld_in = ld_grad,
                          .out = out,
                          .ld_out = ld,
                          .back = true,
                          .accumulate = id > 0};
        TRY(cuda_output_slice(s, id, &ids, &p.w));
        p.inner = ids;
        TRY(cuda_multiply(s, &p));
    }
    return 0;
}
