/* Tokenizes records for tests/parity/tokens.py:
 * tokenize_main (FILE.gguf | tokenizer.json [tokenizer_config.json]) < RECORDS
 *
 * RECORDS: a line "BYTES SPECIAL" (SPECIAL 0 or 1), then that many bytes; again until the end of the input. Prints one
 * line of ids a record, or "error: MESSAGE". */
#include "base/err.h"
#include "base/mem.h"
#include "base/text.h"
#include "tracer/gguf.h"
#include "tracer/tokenizer_gguf.h"
#include "tracer/tokenizer_json.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N_VOCAB = 1 << 20 };

static void stop(const char *message) {
    fprintf(stderr, "tokenize_main: %s\n", message);
    exit(1);
}

static char *read_file(const char *path) {
    FILE *in = fopen(path, "rb");
    if (!in) stop("cannot open a file");
    text t = {0};
    char block[65536];
    for (size_t n; (n = fread(block, 1, sizeof block, in)) > 0;)
        if (text_add_bytes(&t, block, n)) stop(err_message());
    fclose(in);
    return t.data;
}

static tokenizer *open_tokenizer(const char *path, const char *config_path) {
    tokenizer *t = NULL;
    size_t n = strlen(path);
    if (n > 5 && strcmp(path + n - 5, ".gguf") == 0) {
        gguf *g;
        if (gguf_open(path, &g) || tokenizer_from_gguf(g, path, N_VOCAB, false, &t)) stop(err_message());
        gguf_close(g);
        return t;
    }
    char *words = read_file(path), *config = config_path ? read_file(config_path) : NULL;
    if (tokenizer_from_json(words, config, path, N_VOCAB, &t)) stop(err_message());
    mem_free(words);
    mem_free(config);
    return t;
}

/* Offsets tile the text, whatever the tokens are. */
static void check_offsets(const token_list *list, size_t n) {
    for (size_t i = 0; i < list->n; i++)
        if (list->offset[i] > list->offset[i + 1]) stop("offsets go back");
    if (list->offset[list->n] != (int64_t)n || (list->n && list->offset[0] != 0)) stop("offsets do not cover the text");
}

int main(int argc, char **argv) {
    if (argc != 2 && argc != 3) stop("usage: tokenize_main (FILE.gguf | tokenizer.json [CONFIG]) < RECORDS");
    tokenizer *t = open_tokenizer(argv[1], argc == 3 ? argv[2] : NULL);
    size_t n;
    int special;
    while (scanf("%zu %d", &n, &special) == 2 && getchar() == '\n') {
        char *bytes = mem_new(n, 1, "record");
        if (!bytes || fread(bytes, 1, n, stdin) != n) stop("the records end early");
        token_list list;
        if (tokenizer_encode(t, bytes, n, special, &list)) printf("error: %s", err_message());
        else check_offsets(&list, n);
        for (size_t i = 0; i < list.n; i++) printf("%s%d", i ? " " : "", (int)list.id[i]);
        printf("\n");
        token_list_free(&list);
        mem_free(bytes);
    }
    tokenizer_free(t);
    return 0;
}
