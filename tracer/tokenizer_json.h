/* Tokenizers as the `tokenizers` library stores them: tokenizer.json (model type BPE; its normalizers, pre-tokenizers,
 * post-processors and added tokens as far as they are known; anything else is refused by name). */
#pragma once

#include "tracer/tokenizer.h"

/* `words`: the NUL-terminated text of tokenizer.json; `config`: that of tokenizer_config.json, or NULL (it says whether
 * a BOS stands in front, where the post-processor does not). `path` is for messages. n_vocab: rows of the embedding;
 * ids at or above it are refused. Neither text is needed afterwards. Returns 0 and *out, or ERR_DATA. */
int tokenizer_from_json(const char *words, const char *config, const char *path, size_t n_vocab, tokenizer **out);
