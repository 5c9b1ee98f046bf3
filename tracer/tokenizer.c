#include "tracer/tokenizer.h"
#include "base/err.h"
#include "base/mem.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

enum { CONTROL = 3, USER_DEFINED = 4 }; /* GGUF token types */

/* ---- the families ----------------------------------------------------------------------------------------------- */

typedef struct family {
    const char *name;
    const char *regex;
    bool whole_words; /* ignore_merges: a word that is itself in the vocabulary is taken without merging */
} family;

/* Unicode White_Space, to stand inside a class. PCRE2's own \s would also take U+180E, which is none since Unicode 6.3
 * and which the reference leaves out. */
#define WS "\\t-\\r\\x{85}\\p{Z}"
#define SPACES "[" WS "]+(?![^" WS "])|[" WS "]+" /* of a run before a word, all but the last character */
#define CONTRACTIONS "(?i:'s|'t|'re|'ve|'m|'ll|'d)"

/* The published expressions, with \s written out. Every character matches some alternative, so a text is cut into
 * words without gaps. smollm splits single digits off before it applies GPT-2's expression to what lies between them:
 * a digit then ends the text for the lookahead, which one expression says by sparing \p{N} there. The NFC normaliser
 * of Qwen2's tokenizer.json is left out, as in llama.cpp: tokens must cover the bytes of the text as it is. */
static const family families[] = {
    {"gpt-2", "'(?:[sdmt]|ll|ve|re)| ?\\p{L}+| ?\\p{N}+| ?[^" WS "\\p{L}\\p{N}]+|" SPACES, false},
    {"smollm", "\\p{N}|'(?:[sdmt]|ll|ve|re)| ?\\p{L}+| ?[^" WS "\\p{L}\\p{N}]+|[" WS "]+(?![^" WS "\\p{N}])|[" WS "]+",
     false},
    {"llama-bpe",
     CONTRACTIONS "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^" WS "\\p{L}\\p{N}]+[\\r\\n]*|[" WS
                  "]*[\\r\\n]+|" SPACES,
     true},
    {"qwen2",
     CONTRACTIONS "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^" WS "\\p{L}\\p{N}]+[\\r\\n]*|[" WS "]*[\\r\\n]+|" SPACES,
     false},
};

/* ---- the tokenizer ---------------------------------------------------------------------------------------------- */

typedef struct merge {
    int32_t left, right, joined;
    uint32_t rank; /* from 1, best first; 0 marks an empty slot */
} merge;

/* A token that is recognised in the text as it is written. */
typedef struct literal {
    const char *text;
    size_t n;
    int32_t id;
    bool control;
} literal;

struct tokenizer {
    char *file;
    const family *family;
    pcre2_code *regex;
    pcre2_match_context *limits;

    size_t n_tokens;
    char *bytes;          /* the pieces, one after the other */
    size_t *start;        /* [n_tokens+1] */
    int32_t byte_id[256]; /* -1 = the vocabulary lacks this byte */
    int32_t bos;
    bool add_bos;

    /* Two hash tables with linear probing, sizes powers of two, at most half full. */
    int32_t *tokens; /* id + 1 of a token that merging may produce; 0 = empty */
    size_t tokens_mask;
    merge *merges;
    size_t merges_mask;

    literal *literals; /* by first byte, then longest first */
    size_t n_literals, first_literal[257];
};

static size_t table_mask(size_t n) {
    size_t size = 4;
    while (size < 2 * n) size *= 2;
    return size - 1;
}

/* Where a token stands in the table, or the empty slot where it would. */
static int32_t *token_slot(const tokenizer *t, const char *bytes, size_t n) {
    for (size_t i = XXH3_64bits(bytes, n) & t->tokens_mask;; i = (i + 1) & t->tokens_mask) {
        int32_t id = t->tokens[i] - 1;
        if (id < 0) return &t->tokens[i];
        if (t->start[id + 1] - t->start[id] == n && memcmp(t->bytes + t->start[id], bytes, n) == 0)
            return &t->tokens[i];
    }
}

static merge *merge_slot(const tokenizer *t, int32_t left, int32_t right) {
    uint64_t hash = ((uint64_t)(uint32_t)left << 32 | (uint32_t)right) * 0x9e3779b97f4a7c15u;
    for (size_t i = (hash >> 32) & t->merges_mask;; i = (i + 1) & t->merges_mask) {
        merge *m = &t->merges[i];
        if (!m->rank || (m->left == left && m->right == right)) return m;
    }
}

/* ---- reading the facts ------------------------------------------------------------------------------------------ */

/* GPT-2's alphabet writes each byte as one printable character: those that print in Latin-1 as themselves, the other
 * 68, in order, as U+0100 and on. */
enum { ALPHABET_END = 256 + 68 };
typedef struct alphabet {
    int16_t byte_of[ALPHABET_END]; /* -1 = no character of the alphabet */
} alphabet;

static void alphabet_fill(alphabet *a) {
    int other = 256;
    for (int rune = 0; rune < ALPHABET_END; rune++) a->byte_of[rune] = -1;
    for (int b = 0; b < 256; b++) {
        bool prints = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
        a->byte_of[prints ? b : other++] = (int16_t)b;
    }
}

/* Writes at most n bytes and returns their number, or -1 if a character is not of the alphabet. */
static ssize_t alphabet_decode(const alphabet *a, const char *text, size_t n, char *out) {
    const unsigned char *s = (const unsigned char *)text;
    ssize_t n_out = 0;
    for (size_t i = 0; i < n;) {
        unsigned rune = s[i++];
        if (rune >= 0x80) {
            if (rune < 0xc2 || rune > 0xdf || i == n || (s[i] & 0xc0) != 0x80) return -1;
            rune = (rune & 0x1f) << 6 | (s[i++] & 0x3f);
        }
        if (rune >= ALPHABET_END || a->byte_of[rune] < 0) return -1;
        out[n_out++] = (char)a->byte_of[rune];
    }
    return n_out;
}

static int shown(size_t n) { /* how much of a text a message quotes */
    return n < 60 ? (int)n : 60;
}

static bool is_literal(const tokenizer_facts *f, size_t i) {
    return f->types && f->tokens[i].n && (f->types[i] == CONTROL || f->types[i] == USER_DEFINED);
}

/* A normal token outside the alphabet is kept as it is written, but merging cannot produce it. */
static int read_tokens(tokenizer *t, const tokenizer_facts *f, const alphabet *a) {
    size_t total = 0, end = 0;
    for (size_t i = 0; i < f->n_tokens; i++) total += f->tokens[i].n;
    t->n_tokens = f->n_tokens;
    t->tokens_mask = table_mask(f->n_tokens);
    t->bytes = mem_new(total, 1, "vocabulary");
    t->start = mem_new(f->n_tokens + 1, sizeof *t->start, "vocabulary");
    t->tokens = mem_new(t->tokens_mask + 1, sizeof *t->tokens, "vocabulary");
    if (!t->bytes || !t->start || !t->tokens) return ERR_DATA;

    for (size_t i = 0; i < f->n_tokens; i++) {
        const token_text *token = &f->tokens[i];
        char *piece = t->bytes + end;
        ssize_t n = is_literal(f, i) ? -1 : alphabet_decode(a, token->text, token->n, piece);
        if (n < 0) memcpy(piece, token->text, token->n);
        end += n < 0 ? token->n : (size_t)n;
        t->start[i + 1] = end;
        if (n <= 0) continue;
        int32_t *slot = token_slot(t, piece, (size_t)n);
        if (*slot)
            return err_set(ERR_DATA, "%s: tokens %d and %zu are both '%.*s'", f->file, (int)(*slot - 1), i,
                           shown(token->n), token->text);
        *slot = (int32_t)i + 1;
    }
    for (int b = 0; b < 256; b++) t->byte_id[b] = *token_slot(t, (char[]){(char)b}, 1) - 1;
    return 0;
}

static int compare_literals(const void *x, const void *y) {
    const literal *a = x, *b = y;
    if (*a->text != *b->text) return (unsigned char)*a->text < (unsigned char)*b->text ? -1 : 1;
    if (a->n != b->n) return a->n > b->n ? -1 : 1;
    return memcmp(a->text, b->text, a->n);
}

static int read_literals(tokenizer *t, const tokenizer_facts *f) {
    for (size_t i = 0; i < f->n_tokens; i++) t->n_literals += is_literal(f, i);
    t->literals = mem_new(t->n_literals, sizeof *t->literals, "control tokens");
    if (!t->literals) return ERR_DATA;
    literal *l = t->literals;
    for (size_t i = 0; i < f->n_tokens; i++) {
        if (!is_literal(f, i)) continue;
        *l++ = (literal){t->bytes + t->start[i], f->tokens[i].n, (int32_t)i, f->types[i] == CONTROL};
    }
    qsort(t->literals, t->n_literals, sizeof *t->literals, compare_literals);
    for (size_t k = 1; k < t->n_literals; k++)
        if (compare_literals(&t->literals[k - 1], &t->literals[k]) == 0)
            return err_set(ERR_DATA, "%s: tokens %d and %d are both '%.*s'", f->file, (int)t->literals[k - 1].id,
                           (int)t->literals[k].id, shown(t->literals[k].n), t->literals[k].text);
    for (size_t k = 0; k < t->n_literals; k++) t->first_literal[(unsigned char)*t->literals[k].text + 1]++;
    for (int b = 0; b < 256; b++) t->first_literal[b + 1] += t->first_literal[b];
    return 0;
}

/* `joined` has room for the longest merge. A pair that stands twice takes its last rank, as in the reference. */
static int read_merge(tokenizer *t, const tokenizer_facts *f, const alphabet *a, size_t k, char *joined) {
    const token_text *m = &f->merges[k];
    const char *space = m->n ? memchr(m->text, ' ', m->n) : NULL;
    if (!space)
        return err_set(ERR_DATA, "%s: merge %zu '%.*s' has no space between its two parts", f->file, k, shown(m->n),
                       m->n ? m->text : "");
    size_t at = (size_t)(space - m->text);
    ssize_t n_left = alphabet_decode(a, m->text, at, joined), n_right = -1;
    if (n_left > 0) n_right = alphabet_decode(a, space + 1, m->n - at - 1, joined + n_left);
    if (n_right <= 0)
        return err_set(ERR_DATA, "%s: merge %zu '%.*s' is not two tokens in the byte alphabet", f->file, k, shown(m->n),
                       m->text);
    int32_t left = *token_slot(t, joined, (size_t)n_left) - 1;
    int32_t right = *token_slot(t, joined + n_left, (size_t)n_right) - 1;
    int32_t whole = *token_slot(t, joined, (size_t)(n_left + n_right)) - 1;
    if (left < 0 || right < 0 || whole < 0)
        return err_set(ERR_DATA, "%s: merge %zu '%.*s': its %s is not in the vocabulary", f->file, k, shown(m->n),
                       m->text,
                       left < 0    ? "left part"
                       : right < 0 ? "right part"
                                   : "result");
    *merge_slot(t, left, right) = (merge){left, right, whole, (uint32_t)k + 1};
    return 0;
}

static int read_merges(tokenizer *t, const tokenizer_facts *f, const alphabet *a) {
    size_t longest = 0;
    for (size_t k = 0; k < f->n_merges; k++)
        if (f->merges[k].n > longest) longest = f->merges[k].n;
    char *joined = mem_new(longest, 1, "merges");
    t->merges_mask = table_mask(f->n_merges);
    t->merges = mem_new(t->merges_mask + 1, sizeof *t->merges, "merges");
    int code = joined && t->merges ? 0 : ERR_DATA;
    for (size_t k = 0; k < f->n_merges && !code; k++) code = read_merge(t, f, a, k, joined);
    mem_free(joined);
    return code;
}

/* Only ever retried from the end of the last word, so the expression is anchored. It repeats single characters, never
 * groups: backtracking is a counter, not a stack, and one call costs time linear in the word it finds. The limit on
 * matching steps must not cut a long run of spaces short. A machine that forbids JIT gets PCRE2's interpreter. */
static int compile(tokenizer *t, const char *pre, const char *file) {
    for (size_t i = 0; i < sizeof families / sizeof *families; i++)
        if (pre && strcmp(pre, families[i].name) == 0) t->family = &families[i];
    if (!t->family)
        return err_set(ERR_DATA, "%s: pre-tokenizer '%.60s' is not supported (gpt-2, smollm, llama-bpe, qwen2 are)",
                       file, pre ? pre : "");
    int error;
    PCRE2_SIZE at;
    t->regex = pcre2_compile((PCRE2_SPTR)t->family->regex, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_ANCHORED, &error,
                             &at, NULL);
    if (!t->regex)
        return err_set(ERR_DATA, "pre-tokenizer %s: PCRE2 error %d at %zu (was PCRE2 built without Unicode?)",
                       t->family->name, error, (size_t)at);
    pcre2_jit_compile(t->regex, PCRE2_JIT_COMPLETE);
    t->limits = pcre2_match_context_create(NULL);
    if (!t->limits) return err_set(ERR_DATA, "pre-tokenizer: out of memory");
    pcre2_set_match_limit(t->limits, UINT32_MAX);
    pcre2_set_depth_limit(t->limits, UINT32_MAX);
    return 0;
}

static int read_facts(tokenizer *t, const tokenizer_facts *f) {
    if (!f->n_tokens || f->n_tokens >= INT32_MAX)
        return err_set(ERR_DATA, "%s: a vocabulary of %zu tokens (want 1 to %d)", f->file, f->n_tokens, INT32_MAX - 1);
    if (f->n_merges >= INT32_MAX) return err_set(ERR_DATA, "%s: %zu merges are too many", f->file, f->n_merges);
    int64_t n = (int64_t)f->n_tokens;
    if (f->bos < -1 || f->bos >= n || f->eos < -1 || f->eos >= n)
        return err_set(ERR_DATA, "%s: BOS token %lld or EOS token %lld is outside the vocabulary of %lld", f->file,
                       (long long)f->bos, (long long)f->eos, (long long)n);
    if (f->add_bos && f->bos < 0) return err_set(ERR_DATA, "%s: wants a BOS token in front but names none", f->file);
    t->bos = (int32_t)f->bos;
    t->add_bos = f->add_bos;
    t->file = mem_string(f->file);
    if (!t->file) return ERR_DATA;
    alphabet a;
    alphabet_fill(&a);
    TRY(compile(t, f->pre, f->file));
    TRY(read_tokens(t, f, &a));
    TRY(read_literals(t, f));
    return read_merges(t, f, &a);
}

int tokenizer_new(const tokenizer_facts *facts, tokenizer **out) {
    *out = NULL;
    tokenizer *t = mem_new(1, sizeof *t, "tokenizer");
    if (!t) return ERR_DATA;
    int code = read_facts(t, facts);
    if (code) tokenizer_free(t);
    else *out = t;
    return code;
}

void tokenizer_free(tokenizer *t) {
    if (!t) return;
    pcre2_code_free(t->regex);
    pcre2_match_context_free(t->limits);
    mem_free(t->file);
    mem_free(t->bytes);
    mem_free(t->start);
    mem_free(t->tokens);
    mem_free(t->merges);
    mem_free(t->literals);
    mem_free(t);
}

void tokenizer_piece(const tokenizer *t, int32_t id, const char **bytes, size_t *n) {
    bool known = id >= 0 && (size_t)id < t->n_tokens;
    *bytes = known ? t->bytes + t->start[id] : "";
    *n = known ? t->start[id + 1] - t->start[id] : 0;
}

size_t tokenizer_size(const tokenizer *t) {
    return t->n_tokens;
}

/* ---- encoding --------------------------------------------------------------------------------------------------- */

/* One part of a word; `next` and `previous` of the ends is the sentinel behind the last part, whose id no merge has. */
typedef struct part {
    int32_t id; /* -1 once it was merged into the part before it */
    uint32_t previous, next;
} part;

typedef struct encoder {
    const tokenizer *t;
    const char *text;
    token_list *out;
    size_t id_capacity, offset_capacity;
    pcre2_match_data *match;
    part *parts; /* part i begins at byte i of the word */
    size_t parts_capacity;
    uint64_t *heap; /* candidates: rank << 32 | part, so the best rank comes first and, of equals, the leftmost */
    size_t n_heap, heap_capacity;
} encoder;

void token_list_free(token_list *l) {
    mem_free(l->id);
    mem_free(l->offset);
    *l = (token_list){0};
}

static int reserve(encoder *e) {
    TRY(mem_grow((void **)&e->out->id, &e->id_capacity, e->out->n + 1, sizeof *e->out->id, "tokens"));
    return mem_grow((void **)&e->out->offset, &e->offset_capacity, e->out->n + 2, sizeof *e->out->offset, "tokens");
}

static int emit(encoder *e, int32_t id, size_t offset) {
    TRY(reserve(e));
    e->out->id[e->out->n] = id;
    e->out->offset[e->out->n++] = (int64_t)offset;
    return 0;
}

static int heap_push(encoder *e, uint64_t candidate) {
    TRY(mem_grow((void **)&e->heap, &e->heap_capacity, e->n_heap + 1, sizeof *e->heap, "merge candidates"));
    size_t i = e->n_heap++;
    for (size_t up; i && e->heap[up = (i - 1) / 2] > candidate; i = up) e->heap[i] = e->heap[up];
    e->heap[i] = candidate;
    return 0;
}

static uint64_t heap_pop(encoder *e) {
    uint64_t *heap = e->heap, best = heap[0], last = heap[--e->n_heap];
    size_t i = 0;
    for (size_t down; (down = 2 * i + 1) < e->n_heap; i = down) {
        if (down + 1 < e->n_heap && heap[down + 1] < heap[down]) down++;
        if (heap[down] >= last) break;
        heap[i] = heap[down];
    }
    heap[i] = last;
    return best;
}

static const merge *pair_at(const encoder *e, uint32_t at) {
    return merge_slot(e->t, e->parts[at].id, e->parts[e->parts[at].next].id);
}

static int push_pair(encoder *e, uint32_t at) {
    const merge *m = pair_at(e, at);
    return m->rank ? heap_push(e, (uint64_t)m->rank << 32 | at) : 0;
}

/* Apply the best merge until none is left. A candidate whose parts changed meanwhile no longer has its rank. */
static int merge_parts(encoder *e, uint32_t n) {
    part *parts = e->parts;
    for (uint32_t i = 0; i + 1 < n; i++) TRY(push_pair(e, i));
    while (e->n_heap) {
        uint64_t candidate = heap_pop(e);
        uint32_t at = (uint32_t)candidate, next = parts[at].next;
        const merge *m = pair_at(e, at);
        if (m->rank != candidate >> 32) continue;
        parts[at].id = m->joined;
        parts[at].next = parts[next].next;
        parts[parts[next].next].previous = at;
        parts[next].id = -1;
        TRY(push_pair(e, at));
        TRY(push_pair(e, parts[at].previous));
    }
    return 0;
}

static int encode_word(encoder *e, size_t from, size_t to) {
    const tokenizer *t = e->t;
    uint32_t n = (uint32_t)(to - from);
    if (t->family->whole_words) {
        int32_t id = *token_slot(t, e->text + from, n) - 1;
        if (id >= 0) return emit(e, id, from);
    }
    TRY(mem_grow((void **)&e->parts, &e->parts_capacity, (size_t)n + 1, sizeof *e->parts, "word"));
    for (uint32_t i = 0; i < n; i++) {
        unsigned char byte = (unsigned char)e->text[from + i];
        if (t->byte_id[byte] < 0)
            return err_set(ERR_DATA, "%s: its vocabulary has no token for byte 0x%02x (byte %zu of the text)", t->file,
                           byte, from + i);
        e->parts[i] = (part){t->byte_id[byte], i ? i - 1 : n, i + 1};
    }
    e->parts[n] = (part){-1, n, n};
    TRY(merge_parts(e, n));
    for (uint32_t i = 0; i < n; i = e->parts[i].next) TRY(emit(e, e->parts[i].id, from + i));
    return 0;
}

/* Valid UTF-8, cut into words by the family's expression. */
static int encode_words(encoder *e, size_t from, size_t to) {
    while (from < to) {
        int found = pcre2_match(e->t->regex, (PCRE2_SPTR)e->text + from, to - from, 0, PCRE2_NO_UTF_CHECK, e->match,
                                e->t->limits);
        if (found < 1) return err_set(ERR_DATA, "pre-tokenizer: PCRE2 error %d at byte %zu of the text", found, from);
        size_t end = from + pcre2_get_ovector_pointer(e->match)[1];
        TRY(encode_word(e, from, end));
        from = end;
    }
    return 0;
}

/* Length of the UTF-8 character (RFC 3629) at s, 0 if there is none. */
static size_t utf8_length(const char *text, size_t n) {
    const unsigned char *s = (const unsigned char *)text;
    if (s[0] < 0x80) return 1;
    size_t length = s[0] < 0xe0 ? 2 : s[0] < 0xf0 ? 3 : 4;
    if (s[0] < 0xc2 || s[0] > 0xf4 || length > n) return 0;
    unsigned char low = s[0] == 0xe0 ? 0xa0 : s[0] == 0xf0 ? 0x90 : 0x80;  /* no overlong forms */
    unsigned char high = s[0] == 0xed ? 0x9f : s[0] == 0xf4 ? 0x8f : 0xbf; /* no surrogates, nothing above U+10FFFF */
    if (s[1] < low || s[1] > high) return 0;
    for (size_t i = 2; i < length; i++)
        if ((s[i] & 0xc0) != 0x80) return 0;
    return length;
}

/* Text without literals, of any bytes. Each longest stretch of valid UTF-8 is a text of its own for the expression: its
 * lookahead sees the end there. Each byte between the stretches is a word of its own, so nothing merges across it. */
static int encode_bytes(encoder *e, size_t from, size_t to) {
    while (from < to) {
        size_t end = from, length = 0;
        while (end < to && (length = utf8_length(e->text + end, to - end))) end += length;
        TRY(encode_words(e, from, end));
        from = end;
        if (from < to) {
            TRY(encode_word(e, from, from + 1));
            from++;
        }
    }
    return 0;
}

/* The longest literal that begins at `text`, or NULL. */
static const literal *literal_at(const tokenizer *t, const char *text, size_t n, bool special) {
    unsigned char first = (unsigned char)*text;
    for (size_t k = t->first_literal[first]; k < t->first_literal[first + 1]; k++) {
        const literal *l = &t->literals[k];
        if ((special || !l->control) && l->n <= n && memcmp(l->text, text, l->n) == 0) return l;
    }
    return NULL;
}

static int encode(encoder *e, size_t n, bool special) {
    const tokenizer *t = e->t;
    if (n > INT32_MAX) return err_set(ERR_DATA, "a text of %zu bytes is too long (at most %d)", n, INT32_MAX);
    e->match = pcre2_match_data_create(1, NULL);
    if (!e->match) return err_set(ERR_DATA, "pre-tokenizer: out of memory");
    const literal *opening = n ? literal_at(t, e->text, n, special) : NULL;
    if (t->add_bos && !(opening && opening->id == t->bos)) TRY(emit(e, t->bos, 0));
    size_t plain = 0;
    for (size_t i = 0; i < n;) {
        const literal *l = literal_at(t, e->text + i, n - i, special);
        if (!l) {
            i++;
            continue;
        }
        TRY(encode_bytes(e, plain, i));
        TRY(emit(e, l->id, i));
        plain = i += l->n;
    }
    TRY(encode_bytes(e, plain, n));
    TRY(reserve(e));
    e->out->offset[e->out->n] = (int64_t)n;
    return 0;
}

int tokenizer_encode(const tokenizer *t, const char *text, size_t n, bool special, token_list *out) {
    *out = (token_list){0};
    encoder e = {.t = t, .text = text, .out = out};
    int code = encode(&e, n, special);
    pcre2_match_data_free(e.match);
    mem_free(e.parts);
    mem_free(e.heap);
    if (code) token_list_free(out);
    return code;
}
