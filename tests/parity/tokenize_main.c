/* Tokenizes records for tests/parity/tokens.py: tokenize_main FACTS < RECORDS
 *
 * FACTS: a line "PRE N_TOKENS N_MERGES", then a line "TYPE TOKEN" a token, then a line "LEFT RIGHT" a merge.
 * RECORDS: a line "BYTES SPECIAL" (SPECIAL 0 or 1), then that many bytes; again until the end of the input.
 * Prints one line of ids a record, or "error: MESSAGE". */
#include "base/err.h"
#include "base/mem.h"
#include "tracer/tokenizer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void stop(const char *message) {
    fprintf(stderr, "tokenize_main: %s\n", message);
    exit(1);
}

/* A line without its end, never released: the program is short-lived. */
static token_text read_line(FILE *in) {
    char *line = NULL;
    size_t capacity = 0;
    ssize_t n = getline(&line, &capacity, in);
    if (n <= 0 || line[n - 1] != '\n') stop("the facts end early");
    return (token_text){line, (size_t)n - 1};
}

static tokenizer *read_facts(const char *path) {
    FILE *in = fopen(path, "r");
    if (!in) stop("cannot open the facts");
    char pre[32];
    size_t n_tokens, n_merges;
    if (sscanf(read_line(in).text, "%31s %zu %zu", pre, &n_tokens, &n_merges) != 3) stop("bad first line of the facts");
    token_text *tokens = mem_new(n_tokens, sizeof *tokens, "tokens"),
               *merges = mem_new(n_merges, sizeof *merges, "merges");
    int64_t *types = mem_new(n_tokens, sizeof *types, "types");
    if (!tokens || !merges || !types) stop(err_message());
    for (size_t i = 0; i < n_tokens; i++) {
        token_text line = read_line(in);
        char *token;
        types[i] = strtol(line.text, &token, 10);
        token++;
        tokens[i] = (token_text){token, line.n - (size_t)(token - line.text)};
    }
    for (size_t i = 0; i < n_merges; i++) merges[i] = read_line(in);
    fclose(in);

    tokenizer_facts facts = {pre, tokens, n_tokens, types, merges, n_merges, -1, -1, false, path};
    tokenizer *t;
    if (tokenizer_new(&facts, &t)) stop(err_message());
    return t;
}

int main(int argc, char **argv) {
    if (argc != 2) stop("usage: tokenize_main FACTS < RECORDS");
    tokenizer *t = read_facts(argv[1]);
    size_t n;
    int special;
    while (scanf("%zu %d", &n, &special) == 2 && getchar() == '\n') {
        char *text = mem_new(n, 1, "record");
        if (!text || fread(text, 1, n, stdin) != n) stop("the records end early");
        token_list list;
        if (tokenizer_encode(t, text, n, special, &list)) printf("error: %s", err_message());
        for (size_t i = 0; i < list.n; i++) printf("%s%d", i ? " " : "", (int)list.id[i]);
        printf("\n");
        token_list_free(&list);
        mem_free(text);
    }
    tokenizer_free(t);
    return 0;
}
