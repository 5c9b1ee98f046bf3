/* Conversations as text: JSON messages, written the way a model's chat template would.
 *
 * Templates are programs in Jinja; none is run here. A template is recognised by the expressions that it is made of, as
 * one of the families below, whose few strings then write the turns: ChatML (Qwen, SmolLM2), Qwen3, Phi-4, Llama 2, 3
 * and 3.1, Mistral (five forms), Gemma and Gemma 3, Phi-3 (three forms), OLMo 2, Zephyr. The text equals that of
 * transformers' apply_chat_template (tests/parity/chat.py). Every other template is refused. */
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
 * Where the assistant did not write the last message, what makes it answer stands at the end. Templates that write
 * today's date get their own fallback (Llama 3: "26 Jul 2024"), so that a conversation gives one text on every day.
 * ERR_DATA, naming its first 60 characters and the families, for an unknown template; and for whatever the template
 * itself would refuse (roles that do not alternate, a system message where there is no place for one). */
int chat_render(const char *words, const char *path, const char *template, token_text bos, token_text eos,
                chat_text *out);

/* The same with the two tokens of `t`. */
int chat_render_for(const tokenizer *t, const char *words, const char *path, const char *template, chat_text *out);
void chat_free(chat_text *c);
