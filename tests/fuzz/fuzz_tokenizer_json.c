/* tokenizer.json: whatever it says, there is an error or a tokenizer whose tokens cover any text, in order.
 *
 * The JSON, a NUL, the text to encode.
 *
 *     cc -fsanitize=address ... tests/fuzz/fuzz_tokenizer_json.c && ./fuzz_tokenizer_json
 * tests/fuzz/corpus/tokenizer_json clang -fsanitize=fuzzer,address -DLIBFUZZER ... && ./fuzz_tokenizer_json
 * tests/fuzz/corpus/tokenizer_json */
#include "base/err.h"
#include "base/mem.h"
#include "tracer/tokenizer_json.h"

#include <stdlib.h>
#include <string.h>

enum { N_VOCAB = 1000, MOST_TEXT = 200 };

static void check(bool holds) {
    if (!holds) abort();
}

static void check_error(int code) {
    check(code == ERR_DATA && *err_message() && !strchr(err_message(), '\n'));
}

static void encode(const tokenizer *t, const char *text, size_t n, bool special) {
    token_list list;
    int code = tokenizer_encode(t, text, n, special, &list);
    if (code) {
        check_error(code);
        check(!list.id && !list.offset);
        return;
    }
    for (size_t k = 0; k < list.n; k++) {
        const char *bytes;
        size_t length;
        check(list.id[k] >= 0 && (size_t)list.id[k] < tokenizer_size(t));
        check(list.offset[k] >= 0 && list.offset[k] <= list.offset[k + 1]);
        tokenizer_piece(t, list.id[k], &bytes, &length);
        for (size_t i = 0; i < length; i++) check(bytes[i] || !bytes[i]); /* every byte can be read */
    }
    check(list.offset[list.n] == (int64_t)n && (!list.n || list.offset[0] == 0));
    token_list_free(&list);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const uint8_t *nul = size ? memchr(data, 0, size) : NULL;
    size_t n_json = nul ? (size_t)(nul - data) : size, n = nul ? size - n_json - 1 : 0;
    char *words = mem_string_n(size ? (const char *)data : "", n_json);
    check(words != NULL);
    tokenizer *t;
    err_set(0, "%s", "");
    int code =
        tokenizer_from_json(words, "{\"bos_token\": \"<s>\", \"add_bos_token\": true}", "fuzz.json", N_VOCAB, &t);
    if (code == 0) {
        const char *text = nul ? (const char *)nul + 1 : "";
        check(tokenizer_size(t) > 0 && tokenizer_size(t) <= N_VOCAB);
        for (int special = 0; special < 2; special++) encode(t, text, n < MOST_TEXT ? n : MOST_TEXT, special);
    } else {
        check_error(code);
        check(!t);
    }
    tokenizer_free(t);
    mem_free(words);
    return 0;
}

#include "tests/fuzz/replay.h"
