/* Renders conversations for tests/parity/chat.py: chat_main TEMPLATE-FILE BOS EOS [DATE] < CONVERSATIONS
 *
 * CONVERSATIONS: a line of JSON each. Prints a line of JSON each: {"text": ..., "prompt": BYTES} or {"error": ...}. */
#include "base/err.h"
#include "base/mem.h"
#include "base/text.h"
#include "tracer/chat.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void stop(const char *message) {
    fprintf(stderr, "chat_main: %s\n", message);
    exit(1);
}

static char *read_file(const char *path) {
    FILE *in = fopen(path, "rb");
    if (!in) stop("cannot open the template");
    text t = {0};
    char block[65536];
    for (size_t n; (n = fread(block, 1, sizeof block, in)) > 0;)
        if (text_add_bytes(&t, block, n)) stop(err_message());
    fclose(in);
    if (text_add(&t, "%s", "")) stop(err_message());
    return t.data;
}

int main(int argc, char **argv) {
    if (argc != 4 && argc != 5) stop("usage: chat_main TEMPLATE-FILE BOS EOS [DATE] < CONVERSATIONS");
    char *template = read_file(argv[1]), *line = NULL;
    size_t capacity = 0;
    while (getline(&line, &capacity, stdin) > 0) {
        chat_text c;
        cJSON *out = cJSON_CreateObject();
        if (chat_render(line, "stdin", template, (token_text){argv[2], strlen(argv[2])},
                        (token_text){argv[3], strlen(argv[3])}, argc == 5 ? argv[4] : NULL, &c)) {
            cJSON_AddStringToObject(out, "error", err_message());
        } else {
            cJSON_AddStringToObject(out, "text", c.text);
            cJSON_AddNumberToObject(out, "prompt", (double)c.prompt);
        }
        char *printed = cJSON_PrintUnformatted(out);
        puts(printed);
        free(printed);
        cJSON_Delete(out);
        chat_free(&c);
    }
    free(line);
    mem_free(template);
    return 0;
}
