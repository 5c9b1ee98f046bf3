/* Conversations as text: JSON messages, written the way a model's chat template would.
 *
 * Templates are programs in Jinja; none is run here. A template is recognised by the expressions that it is made of, as
 * one of the families of chat_style.c, whose few strings then write the turns. The text equals that of transformers'
 * apply_chat_template (tests/parity/chat.py). Every other template is refused. */
#pragma once

#include "tracer/tokenizer.h"

typedef struct chat_text {
    char *text; /* with special tokens as they are written: for tokenizer_encode with `special` */
    size_t n;
    size_t prompt; /* bytes before the last message's content, where the assistant wrote it; otherwise n */
} chat_text;

/* `words`: the NUL-terminated JSON, an array of {"role": ..., "content": ...} or an object with such "messages"; roles
 * are system, user and assistant, contents texts. `template`: what model_chat_template gave. `bos`, `eos`: the texts of
 * these tokens (n 0 where there is none). `path` is for messages.
 * Where the assistant did not write the last message, what makes it answer stands at the end. `date`, "2026-11-30" or
 * NULL: for templates that write the day's date. Never that of today, so that a conversation gives one text on every
 * day: without `date` it is the template's own (Llama 3: "26 Jul 2024"), and where that has none (SmolLM3) ERR_USAGE.
 * ERR_DATA, naming its first 60 characters and the families, for an unknown template; and for whatever the template
 * itself would refuse (roles that do not alternate, a system message where there is no place for one). */
int chat_render(const char *words, const char *path, const char *template, token_text bos, token_text eos,
                const char *date, chat_text *out);

/* ERR_USAGE unless it is a day as `date` is written. */
int chat_check_date(const char *date);

/* The same with the two tokens of `t`. */
int chat_render_for(const tokenizer *t, const char *words, const char *path, const char *template, const char *date,
                    chat_text *out);
void chat_free(chat_text *c);
