/* Byte-level BPE (Sennrich et al. 2016; GPT-2's byte alphabet), with the pre-tokenizers of the families that use it, as
 * regular expressions run by PCRE2. Ids equal those of the `tokenizers` library on the same vocabulary and merges with
 * the family's pre-tokenizer (tests/parity). Linear in time and flat in stack for any input: a run of 131072 equal
 * characters takes about a second. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What a model file says about its tokenizer; borrowed only during tokenizer_new. Texts are not NUL-terminated. */
typedef struct token_text {
    const char *text;
    size_t n;
} token_text;
typedef struct tokenizer_facts {
    const char *pre;          /* "gpt-2", "smollm", "llama-bpe", "qwen2"; anything else is refused by name */
    const token_text *tokens; /* [n_tokens] in GPT-2's byte alphabet */
    size_t n_tokens;
    const int64_t *types;     /* [n_tokens] GGUF token types (1 normal, 3 control, 4 user defined ...) or NULL */
    const token_text *merges; /* [n_merges] "left right", best first */
    size_t n_merges;
    int64_t bos, eos; /* -1 = none */
    bool add_bos;     /* exactly one BOS in front */
    const char *file; /* for messages */
} tokenizer_facts;

typedef struct tokenizer tokenizer;
int tokenizer_new(const tokenizer_facts *facts, tokenizer **out);
void tokenizer_free(tokenizer *t); /* accepts NULL */

typedef struct token_list {
    int32_t *id;     /* [n] */
    int64_t *offset; /* [n+1] token k covers bytes offset[k] .. offset[k+1]-1 of the text; BOS covers none */
    size_t n;
} token_list;
void token_list_free(token_list *l);

/* Text may hold any bytes (NUL too; invalid UTF-8 is encoded byte by byte, the valid stretches between as texts of
 * their own). Control tokens written in the text are text unless `special`, which turns each literal occurrence of a
 * control token into its id (the longest, where several begin at one place). User-defined tokens (type 4) are always
 * recognised. Empty text gives only BOS, if any; a text that `special` lets begin with BOS gets no second one.
 * Vocabularies may lack bytes (SmolLM2's lacks 21, 0xff among them): a text that needs one is ERR_DATA, naming the byte
 * and its place, where the `tokenizers` library would drop it in silence. */
int tokenizer_encode(const tokenizer *t, const char *text, size_t n, bool special, token_list *out);

/* The bytes of a token: *bytes points into the tokenizer. A control or user-defined token gives its literal text; an id
 * outside the vocabulary gives no bytes. */
void tokenizer_piece(const tokenizer *t, int32_t id, const char **bytes, size_t *n);
size_t tokenizer_size(const tokenizer *t);
