/* What the files named on the command line hold, before it becomes tokens. */
#pragma once

#include "base/text.h"
#include "tracer/model.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum document_form {
    DOCUMENT_TEXT,  /* the file is the text */
    DOCUMENT_JSONL, /* one JSON object a line: "prompt" and what follows it, "text" or "completion"; or only "text"; or
                       "messages", a conversation */
    DOCUMENT_CHAT,  /* a conversation, as chat.h takes it */
    DOCUMENT_IDS    /* token ids, separated by white space, or a JSON array of them */
} document_form;

typedef struct document {
    char *name;   /* for messages: the path, "prompts.jsonl:17", "standard input" */
    char *source; /* for a trace: the file's name, with the line where it has several; "" is standard input as a text */
    text bytes;
    bool special;    /* control tokens in it are control tokens: conversations */
    bool has_prompt; /* the document says how far its prompt goes: */
    size_t prompt;   /* bytes */
    int32_t *id;     /* [n_id] DOCUMENT_IDS; bytes are empty then */
    size_t n_id;
} document;

typedef struct document_list {
    document *item;
    size_t n, capacity;
} document_list;
void document_list_free(document_list *l);

typedef struct document_ask {
    document_form form;
    bool to_continue;   /* a document ends with its prompt, where it names one */
    const model *model; /* its vocabulary bounds ids; its template writes conversations */
    const tokenizer *tokenizer;
    const char *date; /* for conversations: see chat_render */
} document_ask;

/* Add what a file, or standard input ("-"), holds: one document, of JSONL as many as there are lines that are not
 * blank. The prompt of a conversation goes up to its last message where the assistant wrote that. A prompt that nothing
 * follows is refused unless it is to be continued. ERR_DATA names the file, and the line or the id. */
int documents_read(const char *path, const document_ask *ask, document_list *out);
