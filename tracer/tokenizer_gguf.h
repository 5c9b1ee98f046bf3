/* Tokenizers as GGUF files store them (keys tokenizer.ggml.*): model "gpt2", byte-level BPE whose pre-tokenizer has a
 * name, and "llama", SentencePiece's BPE. */
#pragma once

#include "tracer/gguf.h"
#include "tracer/tokenizer.h"

/* `file` is for messages. n_vocab: rows of the embedding, at least as many as tokens. strip_behind: white space behind
 * control tokens belongs to them, which no key says (Phi-3). Other models and pre-tokenizers are refused by name. */
int tokenizer_from_gguf(const gguf *g, const char *file, size_t n_vocab, bool strip_behind, tokenizer **out);

/* The steps of a named pre-tokenizer, and whether its words are looked up whole and a BOS stands in front where no key
 * says so. `name` has n bytes. ERR_DATA, listing those that are known, for any other. */
int tokenizer_pre(const char *name, size_t n, const char *file, tokenizer_facts *facts);
