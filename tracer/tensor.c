#include "tracer/tensor.h"
#include "base/err.h"
#include "tracer/dequant.h"

int tensor_rows(const tensor *t, size_t row0, size_t n, float *out) {
    const dequant_type *type = dequant_find(t->type);
    size_t rows = t->dims[1] * t->dims[2] * t->dims[3], blocks = t->dims[0] / type->block;
    char list[256];
    if (!type->run)
        return err_set(ERR_DATA, "%s: tensor '%s': type %s is not supported (these are: %s)", t->file, t->name,
                       t->type_name, dequant_supported(list, sizeof list));
    if (row0 > rows || n > rows - row0)
        return err_set(ERR_DATA, "%s: tensor '%s': %zu rows from row %zu asked, it has %zu", t->file, t->name, n, row0,
                       rows);
    type->run((const unsigned char *)t->data + row0 * blocks * type->block_bytes, n * blocks, out);
    return 0;
}
