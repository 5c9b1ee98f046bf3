#include "tracer/tokenizer_gguf.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/text.h"

#include <stdio.h>
#include <string.h>

/* GGUF token types. */
enum { NORMAL = 1, UNKNOWN = 2, CONTROL = 3, USER_DEFINED = 4, BYTE = 6 };

#define UNDERSCORE "\u2581" /* SentencePiece's space */

/* ---- pre-tokenizers --------------------------------------------------------------------------------------------- */

typedef struct family {
    const char *names; /* "a|b" */
    const tokenizer_step *steps;
    size_t n_steps;
    bool whole_words, add_bos;
} family;

/* The published expressions. */
#define GPT2 "'(?:[sdmt]|ll|ve|re)| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
#define CONTRACTIONS "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define CL100K(digits)                                    \
    CONTRACTIONS "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|" digits \
                 "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define UPPER "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define LOWER "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
#define O200K(contractions, digits)                                                                     \
    "[^\\r\\n\\p{L}\\p{N}]?" UPPER "*" LOWER "+" contractions "|[^\\r\\n\\p{L}\\p{N}]?" UPPER "+" LOWER \
    "*" contractions "|" digits "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define SPLIT(regex)                                               \
    {                                                              \
        .kind = STEP_SPLIT, .pattern = { regex, sizeof regex - 1 } \
    }

static const tokenizer_step gpt2[] = {SPLIT(GPT2)};
static const tokenizer_step smollm[] = {SPLIT("\\p{N}"), SPLIT(GPT2)};
static const tokenizer_step llama3[] = {SPLIT(CL100K("\\p{N}{1,3}"))};
static const tokenizer_step qwen2[] = {{.kind = STEP_NFC}, SPLIT(CL100K("\\p{N}"))};
static const tokenizer_step gpt4o[] = {SPLIT(O200K(CONTRACTIONS "?", "\\p{N}{1,3}"))};
static const tokenizer_step tekken[] = {SPLIT(O200K("", "\\p{N}"))};

/* smaug-bpe is SmolLM3's: Llama 3's vocabulary without its BOS. dbrx is OLMo 2's and Phi-4's, gpt-4o Phi-4-mini's,
 * tekken Mistral Nemo's. Qwen's tokenizer.json composes what it reads (NFC), which no key of the file says and
 * llama.cpp leaves out. */
static const family families[] = {
    {"gpt-2", gpt2, 1, false, false},
    {"smollm", smollm, 2, false, false},
    {"llama-bpe|llama3|llama-v3", llama3, 1, true, true},
    {"smaug-bpe", llama3, 1, true, false},
    {"dbrx", llama3, 1, false, false},
    {"qwen2|deepseek-r1-qwen", qwen2, 2, false, false},
    {"gpt-4o", gpt4o, 1, false, false},
    {"tekken", tekken, 1, true, true},
};
const char tokenizer_gpt2_pattern[] = GPT2;

enum { N_FAMILIES = sizeof families / sizeof *families };

int tokenizer_pre(const char *name, size_t n, const char *file, tokenizer_facts *facts) {
    char word[32], known[256] = "";
    snprintf(word, sizeof word, "%.*s", (int)(n < sizeof word ? n : sizeof word - 1), name);
    for (size_t i = 0; i < N_FAMILIES; i++) {
        const family *f = &families[i];
        if (strlen(word) == n && text_find_word(f->names, word) >= 0) {
            facts->kind = TOKENIZER_BYTES;
            facts->steps = f->steps;
            facts->n_steps = f->n_steps;
            facts->whole_words = f->whole_words;
            facts->add_bos = f->add_bos;
            return 0;
        }
        size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, "%s%.*s", i ? ", " : "", (int)strcspn(f->names, "|"), f->names);
    }
    return err_set(ERR_DATA, "%s: pre-tokenizer '%.*s' is not supported (%s are)", file, (int)(n < 60 ? n : 60), name,
                   known);
}

/* ---- the vocabulary --------------------------------------------------------------------------------------------- */

/* The facts, with the arrays that tokenizer_new borrows. */
typedef struct vocabulary {
    const gguf *g;
    tokenizer_facts f;
    token_text *tokens;
    token_merge *merges;
    int64_t *types;
    float *scores;
    bool *plain;
    int32_t bytes[256];
    tokenizer_literal *literals;
    char **rewritten; /* [n_literals] texts of literals, where they differ from the tokens' */
    tokenizer_step steps[3], spaces;
} vocabulary;

static int read_tokens(vocabulary *v, size_t n_vocab) {
    gguf_string *strings;
    tokenizer_facts *f = &v->f;
    TRY(gguf_strings(v->g, "tokenizer.ggml.tokens", &strings, &f->n_tokens));
    v->tokens = mem_new(f->n_tokens, sizeof *v->tokens, "vocabulary");
    for (size_t i = 0; v->tokens && i < f->n_tokens; i++) v->tokens[i] = (token_text){strings[i].text, strings[i].n};
    mem_free(strings);
    f->tokens = v->tokens;
    if (!v->tokens) return ERR_DATA;
    if (f->n_tokens == 0 || f->n_tokens > n_vocab)
        return err_set(ERR_DATA, "%s: %zu tokens in the vocabulary, %zu rows in '%s'", f->file, f->n_tokens, n_vocab,
                       "token_embd.weight");
    return 0;
}

static int read_merges(vocabulary *v) {
    gguf_string *strings;
    tokenizer_facts *f = &v->f;
    TRY(gguf_strings(v->g, "tokenizer.ggml.merges", &strings, &f->n_merges));
    f->merges = v->merges = mem_new(f->n_merges, sizeof *v->merges, "merges");
    int code = v->merges ? 0 : ERR_DATA;
    for (size_t k = 0; k < f->n_merges && !code; k++)
        if (tokenizer_split_merge((token_text){strings[k].text, strings[k].n}, &v->merges[k]))
            code = err_set(ERR_DATA, "%s: merge %zu '%.*s' is not two parts with a space between", f->file, k,
                           (int)(strings[k].n < 60 ? strings[k].n : 60), strings[k].text);
    mem_free(strings);
    return code;
}

static int read_types(vocabulary *v) {
    size_t n;
    tokenizer_facts *f = &v->f;
    if (!gguf_has(v->g, "tokenizer.ggml.token_type")) return 0;
    TRY(gguf_ints(v->g, "tokenizer.ggml.token_type", &v->types, &n));
    if (n == f->n_tokens) return 0;
    return err_set(ERR_DATA, "%s: %zu token types for %zu tokens", f->file, n, f->n_tokens);
}

static int read_scores(vocabulary *v) {
    size_t n;
    tokenizer_facts *f = &v->f;
    TRY(gguf_floats(v->g, "tokenizer.ggml.scores", &v->scores, &n));
    f->scores = v->scores;
    return n == f->n_tokens ? 0 : err_set(ERR_DATA, "%s: %zu scores for %zu tokens", f->file, n, f->n_tokens);
}

/* Of Phi-3's control tokens all but these. */
static bool strips(token_text token) {
    static const char *const others[] = {"<s>", "<unk>", "<|endoftext|>"};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (token.n == strlen(others[i]) && memcmp(token.text, others[i], token.n) == 0) return false;
    return true;
}

static int add_literal(vocabulary *v, size_t i, bool strip_behind) {
    bool pieces = v->f.kind == TOKENIZER_SCORES, control = v->types[i] != USER_DEFINED;
    if (v->tokens[i].n == 0) return 0;
    tokenizer_literal *l = &v->literals[v->f.n_literals];
    *l = (tokenizer_literal){v->tokens[i],       (int32_t)i, control,
                             pieces && !control, false,      control && strip_behind && strips(v->tokens[i])};
    v->f.n_literals++;
    /* SentencePiece looks for user-defined symbols in the text whose spaces are U+2581 already; files write them with
     * spaces. */
    if (!l->normalized) return 0;
    return tokenizer_rewrite(&v->spaces, 1, v->f.file, &l->text, &v->rewritten[v->f.n_literals - 1]);
}

/* What merging may make, what is recognised as it is written, and what stands for a byte. */
static int sort_tokens(vocabulary *v, bool strip_behind) {
    tokenizer_facts *f = &v->f;
    bool pieces = f->kind == TOKENIZER_SCORES;
    if (!v->types) return 0;
    f->plain = v->plain = mem_new(f->n_tokens, sizeof *v->plain, "token types");
    f->literals = v->literals = mem_new(f->n_tokens, sizeof *v->literals, "token types");
    v->rewritten = mem_new(f->n_tokens, sizeof *v->rewritten, "token types");
    if (!v->plain || !v->literals || !v->rewritten) return ERR_DATA;
    for (size_t i = 0; i < f->n_tokens; i++) {
        int64_t type = v->types[i];
        bool literal = type == CONTROL || type == USER_DEFINED || (pieces && type == UNKNOWN);
        v->plain[i] = pieces ? type == NORMAL : !literal;
        if (literal) TRY(add_literal(v, i, strip_behind));
        if (!pieces || type != BYTE) continue;
        int byte = tokenizer_byte_of(v->tokens[i]);
        if (byte < 0)
            return err_set(ERR_DATA, "%s: byte token %zu is '%.*s', want <0xNN>", f->file, i,
                           (int)(v->tokens[i].n < 60 ? v->tokens[i].n : 60), v->tokens[i].text);
        v->bytes[byte] = (int32_t)i;
    }
    return 0;
}

static int read_special(const vocabulary *v, const char *key, int64_t *out) {
    *out = -1;
    return gguf_has(v->g, key) ? gguf_int(v->g, key, 0, (int64_t)v->f.n_tokens - 1, out) : 0;
}

/* `fallback` where the key is absent. */
static int read_flag(const vocabulary *v, const char *key, bool fallback, bool *out) {
    *out = fallback;
    return gguf_has(v->g, key) ? gguf_bool(v->g, key, out) : 0;
}

static int refuse_flag(const vocabulary *v, const char *key) {
    bool set;
    TRY(read_flag(v, key, false, &set));
    return set ? err_set(ERR_DATA, "%s: key '%s' is set, which is not supported", v->f.file, key) : 0;
}

/* ---- the two models --------------------------------------------------------------------------------------------- */

static int read_bpe(vocabulary *v, bool strip_behind) {
    const char *pre;
    size_t n;
    TRY(gguf_text(v->g, "tokenizer.ggml.pre", &pre, &n));
    TRY(tokenizer_pre(pre, n, v->f.file, &v->f));
    TRY(read_merges(v));
    return sort_tokens(v, strip_behind);
}

/* SentencePiece: a space in front where the file does not say otherwise, spaces as U+2581, the whole text one word. As
 * llama.cpp has it, each stretch behind a control token begins like the text itself. */
static int read_pieces(vocabulary *v, bool strip_behind) {
    tokenizer_facts *f = &v->f;
    const char *pre = "default";
    size_t n = 7;
    bool prefix;
    if (gguf_has(v->g, "tokenizer.ggml.pre")) TRY(gguf_text(v->g, "tokenizer.ggml.pre", &pre, &n));
    if (n != 7 || memcmp(pre, "default", 7) != 0)
        return err_set(ERR_DATA, "%s: pre-tokenizer '%.*s' beside tokenizer 'llama' is not supported (default is)",
                       f->file, (int)(n < 60 ? n : 60), pre);
    if (gguf_has(v->g, "tokenizer.ggml.precompiled_charsmap"))
        return err_set(ERR_DATA, "%s: key 'tokenizer.ggml.precompiled_charsmap' is not supported", f->file);
    TRY(refuse_flag(v, "tokenizer.ggml.remove_extra_whitespaces"));
    f->kind = TOKENIZER_SCORES;
    f->space = (token_text){UNDERSCORE, strlen(UNDERSCORE)};
    f->bytes = v->bytes;
    f->add_bos = true;
    f->steps = v->steps;
    for (int b = 0; b < 256; b++) v->bytes[b] = -1;
    TRY(read_flag(v, "tokenizer.ggml.add_space_prefix", true, &prefix));
    if (prefix) v->steps[f->n_steps++] = (tokenizer_step){.kind = STEP_PREPEND, .with = f->space};
    v->spaces = (tokenizer_step){.kind = STEP_REPLACE, .pattern = {" ", 1}, .with = f->space};
    v->steps[f->n_steps++] = v->spaces;
    v->steps[f->n_steps++] = (tokenizer_step){.kind = STEP_LITERALS};
    TRY(read_scores(v));
    return sort_tokens(v, strip_behind);
}

static int read_vocabulary(vocabulary *v, size_t n_vocab, bool strip_behind) {
    const char *kind;
    size_t n;
    TRY(gguf_text(v->g, "tokenizer.ggml.model", &kind, &n));
    bool bpe = n == 4 && memcmp(kind, "gpt2", 4) == 0, pieces = n == 5 && memcmp(kind, "llama", 5) == 0;
    if (!bpe && !pieces)
        return err_set(ERR_DATA, "%s: tokenizer '%.*s' is not supported (gpt2 and llama are)", v->f.file,
                       (int)(n < 60 ? n : 60), kind);
    TRY(read_tokens(v, n_vocab));
    TRY(read_types(v));
    TRY(bpe ? read_bpe(v, strip_behind) : read_pieces(v, strip_behind));
    TRY(read_special(v, "tokenizer.ggml.bos_token_id", &v->f.bos));
    TRY(read_special(v, "tokenizer.ggml.eos_token_id", &v->f.eos));
    TRY(refuse_flag(v, "tokenizer.ggml.add_eos_token"));
    return read_flag(v, "tokenizer.ggml.add_bos_token", v->f.add_bos, &v->f.add_bos);
}

int tokenizer_from_gguf(const gguf *g, const char *file, size_t n_vocab, bool strip_behind, tokenizer **out) {
    *out = NULL;
    vocabulary v = {.g = g, .f.file = file};
    int code = read_vocabulary(&v, n_vocab, strip_behind);
    if (!code) code = tokenizer_new(&v.f, out);
    for (size_t i = 0; v.rewritten && i < v.f.n_literals; i++) mem_free(v.rewritten[i]);
    mem_free(v.rewritten);
    mem_free(v.tokens);
    mem_free(v.merges);
    mem_free(v.types);
    mem_free(v.scores);
    mem_free(v.plain);
    mem_free(v.literals);
    return code;
}
