#include "tracer/tensor.h"
#include "base/err.h"
#include "tracer/dequant.h"

static int refuse_type(const tensor *t) {
    char list[256] = "F32, F16, BF16";
    if (t->type != TENSOR_OTHER_TYPE) dequant_supported(list, sizeof list);
    return err_set(ERR_DATA, "%s: tensor '%s': type %s is not supported (these are: %s)", t->file, t->name,
                   t->type_name, list);
}

int tensor_rows(const tensor *t, size_t row0, size_t n, float *out) {
    const dequant_type *type = dequant_find(t->type);
    if (!type || !type->run) return refuse_type(t);
    size_t rows = t->dims[1] * t->dims[2] * t->dims[3], blocks = t->dims[0] / type->block;
    if (row0 > rows || n > rows - row0)
        return err_set(ERR_DATA, "%s: tensor '%s': %zu rows from row %zu asked, it has %zu", t->file, t->name, n, row0,
                       rows);
    type->run((const unsigned char *)t->data + row0 * blocks * type->block_bytes, n * blocks, out);
    return 0;
}
