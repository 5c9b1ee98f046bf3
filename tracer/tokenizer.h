/* Tokenizers: byte-level BPE (Sennrich et al. 2016; GPT-2's byte alphabet), BPE over characters with byte fallback, and
 * SentencePiece's form of it (Kudo and Richardson 2018), in which scores choose what joins. One engine serves GGUF
 * files (tokenizer_gguf.h) and tokenizer.json (tokenizer_json.h): each says its facts, and a short list of steps that
 * prepare a text. Ids equal those of the `tokenizers` and `sentencepiece` libraries (tests/parity). Near-linear in time
 * and flat in stack for any input: a run of 131072 equal characters takes about a second. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Not NUL-terminated. */
typedef struct token_text {
    const char *text; /* NULL: there is none */
    size_t n;
} token_text;
typedef struct token_merge {
    token_text left, right;
} token_merge;

typedef enum tokenizer_kind {
    TOKENIZER_BYTES, /* words are bytes that merge; tokens are written in GPT-2's alphabet */
    TOKENIZER_CHARS, /* words are characters that merge; one outside the vocabulary becomes its bytes' tokens */
    TOKENIZER_SCORES /* the same, but any two neighbours that together make a token may join: the best score first */
} tokenizer_kind;

/* A token that is recognised in the text as it is written, before anything merges. */
typedef struct tokenizer_literal {
    token_text text;
    int32_t id;
    bool control;      /* recognised only where the caller of tokenizer_encode asks for `special` */
    bool normalized;   /* looked for at STEP_LITERALS, `text` being what the steps before it make of it */
    bool strip_before; /* white space before it, or behind it, belongs to it */
    bool strip_behind;
} tokenizer_literal;

/* What happens to a text before words merge, in order. Literals that are not `normalized` are taken out first; each
 * stretch between them, and between the parts that a step makes, goes through the remaining steps on its own. */
typedef enum tokenizer_step_kind {
    STEP_PREPEND,         /* `with` is put in front */
    STEP_PREPEND_MISSING, /* where the stretch does not begin with it */
    STEP_PREPEND_FIRST,   /* where it does not, and is the first of the text */
    STEP_REPLACE,         /* every `pattern`, a plain text, by `with` */
    STEP_NFC,             /* what Unicode's canonical composition makes of it */
    STEP_LITERALS,        /* `normalized` literals are taken out */
    STEP_SPLIT            /* cut at every match of `pattern`, a regular expression in Oniguruma's Ruby syntax */
} tokenizer_step_kind;

/* What becomes of the matches of STEP_SPLIT: parts of their own, nothing (the token before them covers their bytes),
 * the end of the part before, the beginning of the part behind, or one part with the matches beside them. */
typedef enum tokenizer_split {
    SPLIT_ISOLATED,
    SPLIT_REMOVED,
    SPLIT_WITH_PREVIOUS,
    SPLIT_WITH_NEXT,
    SPLIT_CONTIGUOUS
} tokenizer_split;

typedef struct tokenizer_step {
    tokenizer_step_kind kind;
    token_text pattern, with;
    tokenizer_split split;
    bool inverted; /* what lies between matches counts as matches */
} tokenizer_step;
enum { TOKENIZER_STEPS_MAX = 16, TOKENIZER_WITH_MAX = 64 }; /* steps; bytes of `with` */

/* All that is borrowed is borrowed only during tokenizer_new. */
typedef struct tokenizer_facts {
    const char *file; /* for messages */
    tokenizer_kind kind;
    const token_text *tokens; /* [n_tokens]; text NULL: no token has this id */
    size_t n_tokens;
    const bool *plain;         /* [n_tokens] merging may make it; NULL: all of them */
    const token_merge *merges; /* [n_merges], best first: BYTES, CHARS */
    size_t n_merges;
    const float *scores;  /* [n_tokens]: SCORES */
    const int32_t *bytes; /* [256] the token of a byte, -1 = none: CHARS, SCORES. NULL: no byte has one */
    token_text space;     /* what stands for a space inside tokens (U+2581), n 0 = nothing does: CHARS, SCORES */
    bool whole_words;     /* a word that is itself a plain token is taken without merging ("ignore_merges") */
    int64_t bos, eos;     /* -1 = none */
    bool add_bos;         /* exactly one BOS in front */
    const tokenizer_step *steps;
    size_t n_steps;
    const tokenizer_literal *literals;
    size_t n_literals;
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
/* How many of its tokens begin before byte `end` of the text: where that is the end of a prompt, the prompt's tokens.
 */
size_t token_list_before(const token_list *l, int64_t end);

/* Text may hold any bytes (NUL too; invalid UTF-8 is encoded byte by byte, the valid stretches between as texts of
 * their own). Control tokens written in the text are text unless `special`, which turns each occurrence of one into its
 * id (the longest, where several begin at one place). Empty text gives only BOS, if any; a text that `special` lets
 * begin with BOS gets no second one. What a step puts in front covers no bytes.
 * Vocabularies may lack bytes (SmolLM2's lacks 21, 0xff among them): a text that needs one is ERR_DATA, naming the byte
 * and its place, where the `tokenizers` library would drop it, or say "unknown", in silence. */
int tokenizer_encode(const tokenizer *t, const char *text, size_t n, bool special, token_list *out);

/* The bytes of a token: *bytes points into the tokenizer. A literal gives its text; an id without a token no bytes. */
void tokenizer_piece(const tokenizer *t, int32_t id, const char **bytes, size_t *n);
size_t tokenizer_size(const tokenizer *t);
int32_t tokenizer_bos(const tokenizer *t); /* -1 = none */
int32_t tokenizer_eos(const tokenizer *t);

/* ---- for loaders ------------------------------------------------------------------------------------------------ */

/* The byte that "<0xNN>" stands for, -1 for other texts. */
int tokenizer_byte_of(token_text token);
/* "left right", with one space: 0, or -1. */
int tokenizer_split_merge(token_text line, token_merge *out);
/* GPT-2's expression. */
extern const char tokenizer_gpt2_pattern[];
/* *t through steps that rewrite; *owned is its new text, for mem_free (NULL where nothing had to be made). */
int tokenizer_rewrite(const tokenizer_step *steps, size_t n, const char *file, token_text *t, char **owned);
