/* dump_blocks TYPE IN OUT.f32: the blocks of a raw file, dequantised, for tests/parity/blocks.py. Without arguments:
 * the types that can be. */
#include "tracer/dequant.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const dequant_type *find(const char *name) {
    for (uint32_t i = 0; i < 64; i++) {
        const dequant_type *t = dequant_find(i);
        if (t && t->run && strcmp(t->name, name) == 0) return t;
    }
    return NULL;
}

static int fail(const char *what) {
    fprintf(stderr, "%s\n", what);
    return 1;
}

int main(int argc, char **argv) {
    char list[256];
    if (argc == 1) return puts(dequant_supported(list, sizeof list)) < 0;
    const dequant_type *type = argc == 4 ? find(argv[1]) : NULL;
    if (!type) return fail("usage: dump_blocks TYPE IN OUT");
    unsigned char *block = malloc(type->block_bytes);
    float *values = malloc(type->block * sizeof *values);
    FILE *in = fopen(argv[2], "rb"), *out = fopen(argv[3], "wb");
    if (!block || !values || !in || !out) return fail("cannot be opened");
    while (fread(block, type->block_bytes, 1, in) == 1) {
        type->run(block, 1, values);
        fwrite(values, sizeof *values, type->block, out);
    }
    fclose(in);
    free(block);
    free(values);
    return fclose(out) ? fail("cannot be written") : 0;
}
