/* Tokenizers as the `tokenizers` library stores them: tokenizer.json (model type BPE; its normalizers, pre-tokenizers,
 * post-processors and added tokens as far as they are known; anything else is refused by name). */
#pragma once

#include "tracer/tokenizer.h"

/* `words`: the NUL-terminated text of tokenizer.json; `config`: that of tokenizer_config.json, or NULL (it names BOS
 * and EOS, and says whether a BOS stands in front where there is no post-processor that does). `path` is for messages.
 * n_vocab: rows of the embedding; a token of the vocabulary at or above it is refused, an added one (Gemma 3's image
 * token) is left out and so is text. The NFC normaliser is left out: tokens must cover the text as it is. Neither text
 * is needed afterwards. Returns 0 and *out, or ERR_DATA. */
int tokenizer_from_json(const char *words, const char *config, const char *path, size_t n_vocab, tokenizer **out);
