/* Chat templates and conversations: whatever they say, there is an error or a text with a place where the answer
 * begins.
 *
 * The template, a NUL, the conversation's JSON.
 *
 *     cc -fsanitize=address ... tests/fuzz/fuzz_chat.c && ./fuzz_chat tests/fuzz/corpus/chat
 *     clang -fsanitize=fuzzer,address -DLIBFUZZER ... && ./fuzz_chat tests/fuzz/corpus/chat */
#include "base/err.h"
#include "base/mem.h"
#include "tracer/chat.h"

#include <stdlib.h>
#include <string.h>

static void check(bool holds) {
    if (!holds) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const uint8_t *nul = size ? memchr(data, 0, size) : NULL;
    size_t n = nul ? (size_t)(nul - data) : size;
    char *template = mem_string_n(size ? (const char *)data : "", n);
    char *words = mem_string_n(nul ? (const char *)nul + 1 : "", nul ? size - n - 1 : 0);
    check(template && words);
    chat_text c;
    err_set(0, "%s", "");
    int code = chat_render(words, "fuzz.json", template, (token_text){"<s>", 3}, (token_text){"</s>", 4},
                           strstr(template, "strftime_now") ? "2026-03-05" : NULL, &c);
    if (code)
        check((code == ERR_DATA || code == ERR_USAGE) && !c.text && *err_message() && !strchr(err_message(), '\n'));
    else check(c.text && strlen(c.text) == c.n && c.prompt <= c.n);
    chat_free(&c);
    mem_free(template);
    mem_free(words);
    return 0;
}

#include "tests/fuzz/replay.h"
