/* The vocabulary of a tokenizer, its pieces, and the way in and out of encoding. */
#include "tracer/tokenizer.h"
#include "base/err.h"
#include "base/mem.h"
#include "tracer/tokenizer_parts.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

/* ---- tables ----------------------------------------------------------------------------------------------------- */

static size_t table_mask(size_t n) {
    size_t size = 4;
    while (size < 2 * n) size *= 2;
    return size - 1;
}

/* Where a token stands in the table, or the empty slot where it would. */
static int32_t *token_slot(const tokenizer *t, const char *key, size_t n) {
    for (size_t i = XXH3_64bits(key, n) & t->tokens_mask;; i = (i + 1) & t->tokens_mask) {
        int32_t id = t->tokens[i] - 1;
        if (id < 0) return &t->tokens[i];
        if (t->key_start[id + 1] - t->key_start[id] == n && memcmp(t->keys + t->key_start[id], key, n) == 0)
            return &t->tokens[i];
    }
}

int32_t tokenizer_find(const tokenizer *t, const char *key, size_t n) {
    return *token_slot(t, key, n) - 1;
}

merge *tokenizer_merge_slot(const tokenizer *t, int32_t left, int32_t right) {
    uint64_t hash = ((uint64_t)(uint32_t)left << 32 | (uint32_t)right) * 0x9e3779b97f4a7c15u;
    for (size_t i = (hash >> 32) & t->merges_mask;; i = (i + 1) & t->merges_mask) {
        merge *m = &t->merges[i];
        if (!m->rank || (m->left == left && m->right == right)) return m;
    }
}

/* ---- the byte alphabet ------------------------------------------------------------------------------------------ */

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
static ssize_t alphabet_decode(const alphabet *a, token_text token, char *out) {
    const unsigned char *s = (const unsigned char *)token.text;
    ssize_t n_out = 0;
    for (size_t i = 0; i < token.n;) {
        unsigned rune = s[i++];
        if (rune >= 0x80) {
            if (rune < 0xc2 || rune > 0xdf || i == token.n || (s[i] & 0xc0) != 0x80) return -1;
            rune = (rune & 0x1f) << 6 | (s[i++] & 0x3f);
        }
        if (rune >= ALPHABET_END || a->byte_of[rune] < 0) return -1;
        out[n_out++] = (char)a->byte_of[rune];
    }
    return n_out;
}

/* ---- reading the facts ------------------------------------------------------------------------------------------ */

static int shown(size_t n) { /* how much of a text a message quotes */
    return n < 60 ? (int)n : 60;
}

static int hex_digit(char c) {
    return c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

int tokenizer_byte_of(token_text token) {
    if (token.n != 6 || memcmp(token.text, "<0x", 3) != 0 || token.text[5] != '>') return -1;
    int high = hex_digit(token.text[3]), low = hex_digit(token.text[4]);
    return high < 0 || low < 0 ? -1 : high << 4 | low;
}

int tokenizer_split_merge(token_text line, token_merge *out) {
    const char *space = line.n ? memchr(line.text, ' ', line.n) : NULL;
    if (!space) return -1;
    size_t left = (size_t)(space - line.text), right = line.n - left - 1;
    *out = (token_merge){{line.text, left}, {space + 1, right}};
    return left && right && !memchr(space + 1, ' ', right) ? 0 : -1;
}

/* A token as its text: U+2581 is a space, "<0xNN>" a byte. Returns the number of bytes, at most token.n. */
static size_t decode_piece(const tokenizer_facts *f, size_t id, char *out) {
    token_text token = f->tokens[id], space = f->space;
    int byte = f->bytes ? tokenizer_byte_of(token) : -1;
    size_t n = 0;
    if (byte >= 0 && f->bytes[byte] == (int32_t)id) {
        *out = (char)byte;
        return 1;
    }
    for (size_t i = 0; i < token.n;) {
        bool here = space.n && token.n - i >= space.n && memcmp(token.text + i, space.text, space.n) == 0;
        out[n++] = here ? ' ' : token.text[i];
        i += here ? space.n : 1;
    }
    return n;
}

/* A token of BYTES. One outside the alphabet is kept as it is written, but merging cannot make it; likewise a literal
 * that the alphabet would read as something else. */
static size_t decode_bytes(const alphabet *a, token_text token, bool literal, bool *plain, char *out) {
    ssize_t n = *plain ? alphabet_decode(a, token, out) : -1;
    if (n >= 0 && literal) *plain = (size_t)n == token.n && memcmp(out, token.text, token.n) == 0;
    if (n >= 0 && *plain) return (size_t)n;
    *plain = false;
    memcpy(out, token.text, token.n);
    return token.n;
}

static int enter_token(tokenizer *t, const tokenizer_facts *f, size_t i) {
    const char *key = t->keys + t->key_start[i];
    size_t n = t->key_start[i + 1] - t->key_start[i];
    if (n == 0) return 0;
    int32_t *slot = token_slot(t, key, n);
    if (*slot)
        return err_set(ERR_DATA, "%s: tokens %d and %zu are both '%.*s'", f->file, (int)(*slot - 1), i,
                       shown(f->tokens[i].n), f->tokens[i].text);
    *slot = (int32_t)i + 1;
    if (n > t->longest) t->longest = n;
    return 0;
}

static int new_vocabulary(tokenizer *t, const tokenizer_facts *f) {
    size_t total = 0;
    for (size_t i = 0; i < f->n_tokens; i++) total += f->tokens[i].n;
    t->n_tokens = f->n_tokens;
    t->tokens_mask = table_mask(f->n_tokens);
    t->bytes = mem_new(total, 1, "vocabulary");
    t->start = mem_new(f->n_tokens + 1, sizeof *t->start, "vocabulary");
    t->tokens = mem_new(t->tokens_mask + 1, sizeof *t->tokens, "vocabulary");
    if (!t->bytes || !t->start || !t->tokens) return ERR_DATA;
    t->keys = t->kind == TOKENIZER_BYTES ? t->bytes : mem_new(total, 1, "vocabulary");
    t->key_start = t->kind == TOKENIZER_BYTES ? t->start : mem_new(f->n_tokens + 1, sizeof *t->key_start, "vocabulary");
    return t->keys && t->key_start ? 0 : ERR_DATA;
}

static int read_tokens(tokenizer *t, const tokenizer_facts *f, const alphabet *a, const bool *literal) {
    TRY(new_vocabulary(t, f));
    for (size_t i = 0; i < f->n_tokens; i++) {
        token_text token = f->tokens[i];
        bool plain = token.n && (!f->plain || f->plain[i]);
        char *piece = t->bytes + t->start[i];
        if (t->kind == TOKENIZER_BYTES) {
            t->start[i + 1] = t->start[i] + (token.n ? decode_bytes(a, token, literal[i], &plain, piece) : 0);
        } else {
            t->start[i + 1] = t->start[i] + decode_piece(f, i, piece);
            t->key_start[i + 1] = t->key_start[i] + token.n;
            if (token.n) memcpy(t->keys + t->key_start[i], token.text, token.n);
        }
        if (plain) TRY(enter_token(t, f, i));
    }
    for (int b = 0; b < 256; b++)
        t->byte_id[b] = t->kind == TOKENIZER_BYTES ? tokenizer_find(t, (char[]){(char)b}, 1)
                        : f->bytes                 ? f->bytes[b]
                                                   : -1;
    return 0;
}

/* The bytes that merging sees of one side of a merge, at most text.n of them; -1: outside the alphabet. */
static ssize_t merge_key(const tokenizer *t, const alphabet *a, token_text text, char *out) {
    if (t->kind == TOKENIZER_BYTES) return alphabet_decode(a, text, out);
    if (text.n) memcpy(out, text.text, text.n);
    return (ssize_t)text.n;
}

/* `joined` has room for the longest merge. A pair that stands twice takes its last rank, as in the reference. */
static int read_merge(tokenizer *t, const tokenizer_facts *f, const alphabet *a, size_t k, char *joined) {
    const token_merge *m = &f->merges[k];
    int n_shown = shown(m->left.n), n_shown_right = shown(m->right.n);
    ssize_t n_left = merge_key(t, a, m->left, joined);
    ssize_t n_right = n_left > 0 ? merge_key(t, a, m->right, joined + n_left) : -1;
    if (n_right <= 0)
        return err_set(ERR_DATA, "%s: merge %zu '%.*s %.*s' is not two tokens%s", f->file, k, n_shown,
                       n_shown ? m->left.text : "", n_shown_right, n_shown_right ? m->right.text : "",
                       t->kind == TOKENIZER_BYTES ? " in the byte alphabet" : "");
    int32_t left = tokenizer_find(t, joined, (size_t)n_left);
    int32_t right = tokenizer_find(t, joined + n_left, (size_t)n_right);
    int32_t whole = tokenizer_find(t, joined, (size_t)(n_left + n_right));
    if (left < 0 || right < 0 || whole < 0)
        return err_set(ERR_DATA, "%s: merge %zu '%.*s %.*s': its %s is not in the vocabulary", f->file, k, n_shown,
                       m->left.text, n_shown_right, m->right.text,
                       left < 0    ? "left part"
                       : right < 0 ? "right part"
                                   : "result");
    *tokenizer_merge_slot(t, left, right) = (merge){left, right, whole, (uint32_t)k + 1};
    return 0;
}

static int read_merges(tokenizer *t, const tokenizer_facts *f, const alphabet *a) {
    size_t longest = 0;
    for (size_t k = 0; k < f->n_merges; k++) {
        size_t n = f->merges[k].left.n + f->merges[k].right.n;
        if (n > longest) longest = n;
    }
    t->merges_mask = table_mask(f->n_merges);
    t->merges = mem_new(t->merges_mask + 1, sizeof *t->merges, "merges");
    char *joined = mem_new(longest, 1, "merges");
    int code = t->merges && joined ? 0 : ERR_DATA;
    for (size_t k = 0; k < f->n_merges && !code; k++) code = read_merge(t, f, a, k, joined);
    mem_free(joined);
    return code;
}

/* Best first. */
static int compare_scores(const void *x, const void *y) {
    float a = *(const float *)x, b = *(const float *)y;
    return (a < b) - (a > b);
}

static int read_scores(tokenizer *t, const tokenizer_facts *f) {
    float *sorted = mem_new(f->n_tokens, sizeof *sorted, "scores");
    t->ranks = mem_new(f->n_tokens, sizeof *t->ranks, "scores");
    int code = sorted && t->ranks ? 0 : ERR_DATA;
    for (size_t i = 0; i < f->n_tokens && !code; i++) {
        sorted[i] = f->scores[i];
        if (isnan(f->scores[i])) code = err_set(ERR_DATA, "%s: the score of token %zu is no number", f->file, i);
    }
    size_t n = 0;
    if (!code) qsort(sorted, f->n_tokens, sizeof *sorted, compare_scores);
    for (size_t i = 0; i < f->n_tokens && !code; i++)
        if (i == 0 || sorted[i] != sorted[n - 1]) sorted[n++] = sorted[i];
    for (size_t i = 0; i < f->n_tokens && !code; i++) {
        const float *at = bsearch(&f->scores[i], sorted, n, sizeof *sorted, compare_scores);
        t->ranks[i] = (uint32_t)(at - sorted) + 1;
    }
    mem_free(sorted);
    return code;
}

static int check_facts(const tokenizer_facts *f) {
    if (!f->n_tokens || f->n_tokens >= INT32_MAX)
        return err_set(ERR_DATA, "%s: a vocabulary of %zu tokens (want 1 to %d)", f->file, f->n_tokens, INT32_MAX - 1);
    if (f->n_merges >= INT32_MAX) return err_set(ERR_DATA, "%s: %zu merges are too many", f->file, f->n_merges);
    int64_t n = (int64_t)f->n_tokens;
    if (f->bos < -1 || f->bos >= n || f->eos < -1 || f->eos >= n)
        return err_set(ERR_DATA, "%s: BOS token %lld or EOS token %lld is outside the vocabulary of %lld", f->file,
                       (long long)f->bos, (long long)f->eos, (long long)n);
    if (f->add_bos && f->bos < 0) return err_set(ERR_DATA, "%s: wants a BOS token in front but names none", f->file);
    for (size_t i = 0; i < f->n_literals; i++)
        if (f->literals[i].id < 0 || f->literals[i].id >= n)
            return err_set(ERR_DATA, "%s: token %d '%.*s' is outside the vocabulary of %lld", f->file,
                           (int)f->literals[i].id, shown(f->literals[i].text.n), f->literals[i].text.text,
                           (long long)n);
    return 0;
}

static int read_facts(tokenizer *t, const tokenizer_facts *f) {
    TRY(check_facts(f));
    t->kind = f->kind;
    t->whole_words = f->whole_words;
    t->bos = (int32_t)f->bos;
    t->eos = (int32_t)f->eos;
    t->add_bos = f->add_bos;
    t->file = mem_string(f->file);
    bool *literal = mem_new(f->n_tokens, sizeof *literal, "literals");
    int code = t->file && literal ? 0 : ERR_DATA;
    for (size_t i = 0; i < f->n_literals && literal; i++) literal[f->literals[i].id] = true;
    alphabet a;
    alphabet_fill(&a);
    if (!code) code = tokenizer_read_steps(t, f);
    if (!code) code = read_tokens(t, f, &a, literal);
    mem_free(literal);
    if (!code) code = tokenizer_read_literals(&t->raw, f, false);
    if (!code) code = tokenizer_read_literals(&t->normalized, f, true);
    if (!code) code = f->kind == TOKENIZER_SCORES ? read_scores(t, f) : read_merges(t, f, &a);
    return code;
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
    tokenizer_free_steps(t);
    tokenizer_free_literals(&t->raw);
    tokenizer_free_literals(&t->normalized);
    if (t->keys != t->bytes) mem_free(t->keys);
    if (t->key_start != t->start) mem_free(t->key_start);
    mem_free(t->file);
    mem_free(t->bytes);
    mem_free(t->start);
    mem_free(t->tokens);
    mem_free(t->merges);
    mem_free(t->ranks);
    mem_free(t);
}

/* ---- asking it -------------------------------------------------------------------------------------------------- */

void tokenizer_piece(const tokenizer *t, int32_t id, const char **bytes, size_t *n) {
    bool known = id >= 0 && (size_t)id < t->n_tokens;
    *bytes = known ? t->bytes + t->start[id] : "";
    *n = known ? t->start[id + 1] - t->start[id] : 0;
}

size_t tokenizer_size(const tokenizer *t) {
    return t->n_tokens;
}

int32_t tokenizer_bos(const tokenizer *t) {
    return t->bos;
}

int32_t tokenizer_eos(const tokenizer *t) {
    return t->eos;
}

/* ---- encoding --------------------------------------------------------------------------------------------------- */

void token_list_free(token_list *l) {
    mem_free(l->id);
    mem_free(l->offset);
    *l = (token_list){0};
}

size_t token_list_before(const token_list *l, int64_t end) {
    size_t k = 0;
    while (k < l->n && l->offset[k] < end) k++;
    return k;
}

static int reserve(encoder *e) {
    TRY(mem_grow((void **)&e->out->id, &e->id_capacity, e->out->n + 1, sizeof *e->out->id, "tokens"));
    return mem_grow((void **)&e->out->offset, &e->offset_capacity, e->out->n + 2, sizeof *e->out->offset, "tokens");
}

/* The first token of the text covers what a step may have removed before it. */
int tokenizer_emit(encoder *e, int32_t id, size_t offset) {
    TRY(reserve(e));
    e->out->id[e->out->n] = id;
    e->out->offset[e->out->n] = e->out->n == e->n_before ? 0 : (int64_t)offset;
    e->out->n++;
    return 0;
}

static int encode(encoder *e, const char *text, size_t n) {
    const tokenizer *t = e->t;
    if (n > INT32_MAX) return err_set(ERR_DATA, "a text of %zu bytes is too long (at most %d)", n, INT32_MAX);
    e->match = pcre2_match_data_create(1, NULL);
    if (!e->match) return err_set(ERR_DATA, "pre-tokenizer: out of memory");
    const tokenizer_literal *opening = n ? tokenizer_literal_at(&t->raw, text, n, e->special) : NULL;
    if (t->add_bos && !(opening && opening->id == t->bos)) {
        TRY(tokenizer_emit(e, t->bos, 0));
        e->n_before = 1;
    }
    TRY(tokenizer_run(e, text, n));
    TRY(reserve(e));
    e->out->offset[e->out->n] = (int64_t)n;
    return 0;
}

int tokenizer_encode(const tokenizer *t, const char *text, size_t n, bool special, token_list *out) {
    *out = (token_list){0};
    encoder e = {.t = t, .special = special, .out = out};
    int code = encode(&e, text, n);
    pcre2_match_data_free(e.match);
    mem_free(e.parts);
    mem_free(e.heap);
    for (size_t i = 0; i < sizeof e.work / sizeof *e.work; i++) {
        mem_free(e.work[i].text);
        mem_free(e.work[i].origin);
    }
    if (code) token_list_free(out);
    return code;
}
