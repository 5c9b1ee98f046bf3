#include "tracer/tensor.h"
#include "base/err.h"
#include "tracer/dequant.h"

static int refuse_type(const tensor *t) {
    char list[256] = "F32, F16, BF16";
    if (t->type != TENSOR_OTHER_TYPE) dequant_supported(list, sizeof list);
    return err_set(ERR_DATA, "%s: tensor '%s': type %s is not supported (these are: %s)", t->file, t->name,
                   t->type_name, list);
}

static int find_type(const tensor *t, const dequant_type **out) {
    *out = dequant_find(t->type);
    return *out && (*out)->run ? 0 : refuse_type(t);
}

int tensor_check(const tensor *t) {
    const dequant_type *type;
    return find_type(t, &type);
}

/* Whole blocks: `first` and `n` count them. */
static void read_blocks(const tensor *t, const dequant_type *type, size_t first, size_t n, float *out) {
    type->run((const unsigned char *)t->data + first * type->block_bytes, n, out);
}

int tensor_rows(const tensor *t, size_t row0, size_t n, float *out) {
    const dequant_type *type;
    TRY(find_type(t, &type));
    size_t rows = t->dims[1] * t->dims[2] * t->dims[3], blocks = t->dims[0] / type->block;
    if (row0 > rows || n > rows - row0)
        return err_set(ERR_DATA, "%s: tensor '%s': %zu rows from row %zu asked, it has %zu", t->file, t->name, n, row0,
                       rows);
    read_blocks(t, type, row0 * blocks, n * blocks, out);
    return 0;
}

int tensor_columns(const tensor *t, size_t row, size_t col0, size_t n, float *out) {
    const dequant_type *type;
    TRY(find_type(t, &type));
    size_t width = t->dims[0], rows = t->dims[1] * t->dims[2] * t->dims[3];
    if (row >= rows || col0 > width || n > width - col0 || col0 % type->block || n % type->block)
        return err_set(ERR_DATA, "%s: tensor '%s': %zu values from %zu of row %zu asked, in blocks of %u", t->file,
                       t->name, n, col0, row, type->block);
    read_blocks(t, type, (row * width + col0) / type->block, n / type->block, out);
    return 0;
}
