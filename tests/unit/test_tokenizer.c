#include "base/err.h"
#include "base/mem.h"
#include "base/text.h"
#include "tests/unit/long_runs.h"
#include "tracer/gguf.h"
#include "tracer/nfc.h"
#include "tracer/tokenizer_gguf.h"
#include "tracer/tokenizer_json.h"

#include <cjson/cJSON.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define SMOLLM2 "models/SmolLM2-135M-Instruct.Q4_1.gguf"
#define FIXTURES "tests/parity/fixtures/"

static const char *const all_pres[] = {"gpt-2",     "smollm", "llama-bpe", "qwen2",
                                       "smaug-bpe", "dbrx",   "gpt-4o",    "tekken"};
enum { N_PRES = sizeof all_pres / sizeof *all_pres };

#define OK(call)                                 \
    do {                                         \
        if (call) fail_msg("%s", err_message()); \
    } while (0)

/* ---- a vocabulary to compute by hand ---------------------------------------------------------------------------- */

/* Token b is byte b; token 256 + k is what merge k joins. Literals come last. */
typedef struct toy {
    tokenizer_facts facts;
    token_text tokens[300];
    token_merge merges[32];
    bool plain[300];
    tokenizer_literal literals[8];
    char letters[256][3], joined[32][32];
} toy;

/* The letter of byte b. The 68 bytes without a letter of their own are 0-32, 127-160 and 173. */
static void toy_letter(char out[3], int b) {
    int rune = b <= 32 ? 256 + b : b >= 127 && b <= 160 ? 256 + 33 + b - 127 : b == 173 ? 256 + 67 : b;
    if (rune < 0x80) snprintf(out, 3, "%c", rune);
    else snprintf(out, 3, "%c%c", 0xc0 | rune >> 6, 0x80 | (rune & 0x3f));
}

static void toy_add(toy *y, const char *token) {
    y->plain[y->facts.n_tokens] = true;
    y->tokens[y->facts.n_tokens++] = (token_text){token, strlen(token)};
}

static tokenizer_literal *toy_add_literal(toy *y, const char *token, bool control) {
    int32_t id = (int32_t)y->facts.n_tokens;
    toy_add(y, token);
    y->plain[id] = false;
    tokenizer_literal *l = &y->literals[y->facts.n_literals++];
    *l = (tokenizer_literal){.text = y->tokens[id], .id = id, .control = control};
    return l;
}

/* `merges` in the byte alphabet, separated by '|'. */
static void toy_make(toy *y, const char *pre, const char *merges) {
    *y = (toy){.facts = {.tokens = y->tokens,
                         .plain = y->plain,
                         .merges = y->merges,
                         .literals = y->literals,
                         .bos = -1,
                         .eos = -1,
                         .file = "toy.gguf"}};
    OK(tokenizer_pre(pre, strlen(pre), y->facts.file, &y->facts));
    y->facts.add_bos = false;
    for (int b = 0; b < 256; b++) {
        toy_letter(y->letters[b], b);
        toy_add(y, y->letters[b]);
    }
    for (size_t k = 0; *merges; k++) {
        size_t n = strcspn(merges, "|"), left = strcspn(merges, " ");
        OK(tokenizer_split_merge((token_text){merges, n}, &y->merges[y->facts.n_merges++]));
        snprintf(y->joined[k], sizeof y->joined[k], "%.*s%.*s", (int)left, merges, (int)(n - left - 1),
                 merges + left + 1);
        toy_add(y, y->joined[k]);
        merges += n + (merges[n] == '|');
    }
}

static tokenizer *toy_tokenizer(toy *y) {
    tokenizer *t;
    OK(tokenizer_new(&y->facts, &t));
    return t;
}

static void check_ids(const tokenizer *t, const char *source, size_t n, bool special, const char *want) {
    token_list list;
    OK(tokenizer_encode(t, source, n, special, &list));
    char got[512] = "";
    for (size_t k = 0, at = 0; k < list.n; k++)
        at += (size_t)snprintf(got + at, sizeof got - at, "%s%d", k ? " " : "", (int)list.id[k]);
    assert_string_equal(got, want);
    assert_int_equal(list.offset[list.n], n);
    token_list_free(&list);
}

static void check(const tokenizer *t, const char *source, const char *want) {
    check_ids(t, source, strlen(source), false, want);
}

/* ---- merging ---------------------------------------------------------------------------------------------------- */

static void test_merge_order(void **state) {
    (void)state;
    toy y;
    /* 256 = bc, 257 = ab, 258 = abc, 259 = aa, 260 = aaaa */
    toy_make(&y, "gpt-2", "b c|a b|a bc|a a|aa aa");
    tokenizer *t = toy_tokenizer(&y);
    check(t, "abc", "258");        /* bc goes first, then a+bc; ab+c is no merge */
    check(t, "abab", "257 257");   /* the same merge twice */
    check(t, "aaa", "259 97");     /* equal ranks: leftmost */
    check(t, "aaaaa", "260 97");   /* aa aa a, then aaaa a */
    check(t, "aabc", "97 258");    /* bc, then a+bc (rank 3) before a+a (rank 4) */
    check(t, "a bc", "97 32 256"); /* never across a cut: " bc" is a word */
    check(t, "", "");
    tokenizer_free(t);
}

/* Merges that join neighbours show where the expression cuts: 256 two spaces, 257 "1","2", 258 space "a", 259 newline
 * newline, 260 full stop newline, 261 "'s", 262 "'S", 263 space "1", 264 carriage return newline, 265 "(a", and a full
 * stop with the first byte of U+180E (266), of U+0085 and U+00A0, of U+3000; 269 "Da", 270 the last byte of U+017F, a
 * long s, and "a". */
#define ACROSS "Ġ Ġ|1 2|Ġ a|Ċ Ċ|. Ċ|' s|' S|Ġ 1|č Ċ|( a|. á|. Â|. ã|D a|¿ a"

typedef struct cut {
    const char *text, *gpt2, *smollm, *llama, *qwen2;
} cut;

static void test_cuts(void **state) {
    (void)state;
    static const cut cuts[] = {
        {"a  a", "97 32 258", "97 32 258", "97 32 258", "97 32 258"},
        {"a   a", "97 256 258", "97 256 258", "97 256 258", "97 256 258"},
        {"a  ", "97 256", "97 256", "97 256", "97 256"},
        /* smollm's digit ends the text before it, so both spaces stay together */
        {"a  1", "97 32 263", "97 256 49", "97 32 32 49", "97 32 32 49"},
        {"a 12", "97 32 257", "97 32 49 50", "97 32 257", "97 32 49 50"},
        {"12121", "257 257 49", "49 50 49 50 49", "257 49 50 49", "49 50 49 50 49"},
        {"a\n\n", "97 259", "97 259", "97 259", "97 259"},
        {"a\n\na", "97 10 10 97", "97 10 10 97", "97 259 97", "97 259 97"},
        {"a.\n", "97 46 10", "97 46 10", "97 260", "97 260"},
        {"a\r\n", "97 264", "97 264", "97 264", "97 264"},
        {"a\r\na", "97 13 10 97", "97 13 10 97", "97 264 97", "97 264 97"},
        {"a's", "97 261", "97 261", "97 261", "97 261"},
        /* ' before S: of no group in GPT-2, a contraction in the other two */
        {"1'S", "49 39 83", "49 39 83", "49 262", "49 262"},
        {"1'Da", "49 39 269", "49 39 269", "49 39 68 97", "49 39 68 97"},
        {"1'\u017fa", "49 39 197 270", "49 39 197 270", "49 39 197 191 97", "49 39 197 191 97"},
        {"(a", "40 97", "40 97", "265", "265"},
        /* U+180E is no space and goes with the full stop; U+0085, U+00A0 and U+3000 are spaces */
        {"a.\u180e", "97 266 160 142", "97 266 160 142", "97 266 160 142", "97 266 160 142"},
        {"a.\xc2\x85", "97 46 194 133", "97 46 194 133", "97 46 194 133", "97 46 194 133"},
        {"a.\u00a0", "97 46 194 160", "97 46 194 160", "97 46 194 160", "97 46 194 160"},
        {"a.\u3000", "97 46 227 128 128", "97 46 227 128 128", "97 46 227 128 128", "97 46 227 128 128"},
        {"a\u00a0  ", "97 194 160 256", "97 194 160 256", "97 194 160 256", "97 194 160 256"},
    };
    for (size_t p = 0; p < 4; p++) {
        toy y;
        toy_make(&y, all_pres[p], ACROSS);
        tokenizer *t = toy_tokenizer(&y);
        for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++)
            check(t, cuts[i].text, (const char *[]){cuts[i].gpt2, cuts[i].smollm, cuts[i].llama, cuts[i].qwen2}[p]);
        tokenizer_free(t);
    }
}

static void test_whole_words(void **state) {
    (void)state;
    for (size_t p = 0; p < N_PRES; p++) {
        toy y;
        toy_make(&y, all_pres[p], "a b");
        toy_add(&y, "abc"); /* no merge makes 257 */
        tokenizer *t = toy_tokenizer(&y);
        bool whole = strstr("llama-bpe smaug-bpe tekken", all_pres[p]) != NULL;
        check(t, "abc", whole ? "257" : "256 99");
        check(t, "abcd", "256 99 100");
        tokenizer_free(t);
    }
}

/* ---- literals, BOS, any bytes ----------------------------------------------------------------------------------- */

static void test_literals_and_bos(void **state) {
    (void)state;
    toy y;
    toy_make(&y, "gpt-2", "a b|e n|Ġ Ġ");
    toy_add_literal(&y, "<|x|>", true);  /* 259 */
    toy_add_literal(&y, "<|x|>>", true); /* 260: the longer one wins */
    toy_add_literal(&y, "  ", false);    /* 261: two spaces as written; 258 is the same bytes by merging */
    toy_add_literal(&y, "é", false);     /* 262: in the byte alphabet this would be byte 0xe9 */
    tokenizer *t = toy_tokenizer(&y);
    check(t, "<|x|>", "60 124 120 124 62");
    check_ids(t, "ab<|x|>b", 8, true, "256 259 98");
    check_ids(t, "<|x|>>>", 7, true, "260 62");
    check_ids(t, "<|x|", 4, true, "60 124 120 124");
    check(t, "a  b", "97 261 98");
    check(t, "é", "262");
    const char *bytes;
    size_t n;
    tokenizer_piece(t, 262, &bytes, &n);
    assert_int_equal(n, 2);
    assert_memory_equal(bytes, "é", 2);
    tokenizer_piece(t, 258, &bytes, &n);
    assert_int_equal(n, 2);
    assert_memory_equal(bytes, "  ", 2);
    tokenizer_piece(t, 0xe9, &bytes, &n);
    assert_int_equal(n, 1);
    assert_memory_equal(bytes, "\xe9", 1);
    assert_int_equal(tokenizer_size(t), 263);
    tokenizer_free(t);

    y.facts.bos = 259;
    y.facts.add_bos = true;
    t = toy_tokenizer(&y);
    check(t, "", "259");
    check(t, "ab", "259 256");
    check_ids(t, "<|x|>ab", 7, true, "259 256"); /* the text brings its own */
    check(t, "<|x|>", "259 60 124 120 124 62");
    token_list list;
    OK(tokenizer_encode(t, "ab", 2, false, &list));
    assert_int_equal(list.offset[0], 0); /* BOS covers nothing */
    assert_int_equal(list.offset[1], 0);
    assert_int_equal(list.offset[2], 2);
    token_list_free(&list);
    tokenizer_free(t);
}

static void test_any_bytes(void **state) {
    (void)state;
    toy y;
    /* 257 a4 a4, 258 é, 259 aa; then pairs that begin what looks like a character but is none, so never merge */
    toy_make(&y, "gpt-2", "Ġ Ġ|¤ ¤|Ã ©|a a|ä ½|í ł|À Ģ|à Ģ|ð Ģ|ô Ĳ");
    tokenizer *t = toy_tokenizer(&y);
    check_ids(t, "a\0b", 3, false, "97 0 98");
    check_ids(t, "\xa4\xa4", 2, false, "164 164");
    check_ids(t, "\xc3\xa9", 2, false, "258");
    check_ids(t, "\xc3\xc3\xa9", 3, false, "195 258");
    check_ids(t, "  \xff  a", 6, false, "256 255 32 32 97"); /* the first stretch ends at its own end */
    check_ids(t, "\xe4\xbd\xa0", 3, false, "260 160");
    check_ids(t, "aa\xe4\xbd", 4, false, "259 228 189");   /* cut short */
    check_ids(t, "\xe4\xbd  ", 4, false, "228 189 256");   /* cut short */
    check_ids(t, "\xed\xa0\x80", 3, false, "237 160 128"); /* a surrogate */
    check_ids(t, "\xc0\x80", 2, false, "192 128");         /* overlong forms */
    check_ids(t, "\xe0\x80\x80", 3, false, "224 128 128");
    check_ids(t, "\xf0\x80\x80\x80", 4, false, "240 128 128 128");
    check_ids(t, "\xf4\x90\x80\x80", 4, false, "244 144 128 128"); /* above U+10FFFF */
    tokenizer_free(t);
}

/* Qwen composes its texts. 256 is e with an acute. The bytes of what several characters became stand where
 * theirs do, and where there are more of them, at the last. Bytes that are no UTF-8 and control tokens part what would
 * merge. */
static void test_composed(void **state) {
    (void)state;
    toy y;
    toy_make(&y, "qwen2", "Ã ©|i Ì");
    toy_add_literal(&y, "<\u0301>", true); /* 258 */
    tokenizer *t = toy_tokenizer(&y);
    check(t, "\u00e9x", "256 120");
    check(t, "e\u0301x", "256 120");
    check(t, "i\u0301", "195 173");
    check(t, "i\u0323", "225 187 139");
    check_ids(t, "e\u0301\xff\u0301", 6, false, "256 255 204 129");
    check_ids(t, "e<\u0301>\u0301", 7, true, "101 258 204 129");
    token_list list;
    OK(tokenizer_encode(t, "\u00e9i\u0323z", 6, false, &list));
    assert_int_equal(list.n, 5);
    assert_memory_equal(list.offset, ((int64_t[]){0, 2, 3, 4, 5, 6}), 6 * sizeof *list.offset);
    token_list_free(&list);
    OK(tokenizer_encode(t, "\u0958a", 4, false, &list));
    assert_int_equal(list.n, 7); /* three bytes become six */
    assert_memory_equal(list.offset, ((int64_t[]){0, 1, 2, 2, 2, 2, 3, 4}), 8 * sizeof *list.offset);
    assert_int_equal(token_list_before(&list, 3), 6);
    token_list_free(&list);
    OK(tokenizer_encode(t, "ae\u0301\u00e9e\u0301", 9, false, &list));
    assert_int_equal(list.n, 4);
    assert_memory_equal(list.offset, ((int64_t[]){0, 1, 4, 6, 9}), 5 * sizeof *list.offset);
    token_list_free(&list);
    tokenizer_free(t);
}

/* ---- malformed facts -------------------------------------------------------------------------------------------- */

static void refused(toy *y, const char *message) {
    tokenizer *t;
    assert_int_equal(tokenizer_new(&y->facts, &t), ERR_DATA);
    assert_null(t);
    assert_string_equal(err_message(), message);
}

static void test_malformed(void **state) {
    (void)state;
    toy y;
    toy_make(&y, "gpt-2", "a b");
    assert_int_equal(tokenizer_pre("deepseek-llm", 12, "toy.gguf", &y.facts), ERR_DATA);
    assert_string_equal(err_message(), "toy.gguf: pre-tokenizer 'deepseek-llm' is not supported (gpt-2, smollm, "
                                       "llama-bpe, smaug-bpe, dbrx, qwen2, gpt-4o, tekken are)");
    assert_int_equal(tokenizer_pre("gpt-2\0x", 7, "toy.gguf", &y.facts), ERR_DATA);

    token_merge m;
    assert_int_equal(tokenizer_split_merge((token_text){"ab", 2}, &m), -1);
    assert_int_equal(tokenizer_split_merge((token_text){NULL, 0}, &m), -1);
    assert_int_equal(tokenizer_split_merge((token_text){" ab", 3}, &m), -1);
    assert_int_equal(tokenizer_split_merge((token_text){"a b c", 5}, &m), -1);
    y.merges[0].left = (token_text){NULL, 0};
    refused(&y, "toy.gguf: merge 0 ' b' is not two tokens in the byte alphabet");
    y.merges[0] = (token_merge){{"a", 1}, {"中", 3}};
    refused(&y, "toy.gguf: merge 0 'a 中' is not two tokens in the byte alphabet");
    y.merges[0].right = (token_text){"zz", 2};
    refused(&y, "toy.gguf: merge 0 'a zz': its right part is not in the vocabulary");
    y.merges[0].right = (token_text){"c", 1};
    refused(&y, "toy.gguf: merge 0 'a c': its result is not in the vocabulary");

    toy_make(&y, "gpt-2", "a b");
    toy_add(&y, "ab");
    refused(&y, "toy.gguf: tokens 256 and 257 are both 'ab'");
    toy_make(&y, "gpt-2", "");
    toy_add_literal(&y, "ab", true);
    toy_add_literal(&y, "ab", true);
    refused(&y, "toy.gguf: tokens 256 and 257 are both 'ab'");
    y.literals[1].id = 258;
    refused(&y, "toy.gguf: token 258 'ab' is outside the vocabulary of 258");

    toy_make(&y, "gpt-2", "a b");
    y.facts.bos = 257;
    refused(&y, "toy.gguf: BOS token 257 or EOS token -1 is outside the vocabulary of 257");
    y.facts.bos = -1;
    y.facts.add_bos = true;
    refused(&y, "toy.gguf: wants a BOS token in front but names none");
    y.facts.n_tokens = (size_t)1 << 31;
    refused(&y, "toy.gguf: a vocabulary of 2147483648 tokens (want 1 to 2147483646)");
    y.facts.n_tokens = 0;
    refused(&y, "toy.gguf: a vocabulary of 0 tokens (want 1 to 2147483646)");
}

/* Real vocabularies lack bytes (SmolLM2's lacks 21), so that is an error only of the text that needs one. */
static void test_missing_byte(void **state) {
    (void)state;
    toy y;
    toy_make(&y, "gpt-2", "");
    y.tokens['q'] = (token_text){"qq", 2};
    tokenizer *t = toy_tokenizer(&y);
    check(t, "abc", "97 98 99");
    token_list list;
    assert_int_equal(tokenizer_encode(t, "a q", 3, false, &list), ERR_DATA);
    assert_string_equal(err_message(), "toy.gguf: its vocabulary has no token for byte 0x71 (byte 2 of the text)");
    assert_null(list.id);
    assert_int_equal(list.n, 0);
    tokenizer_free(t);
}

/* ---- real vocabularies ------------------------------------------------------------------------------------------ */

static char *read_file(const char *path, size_t *n) {
    FILE *in = fopen(path, "rb");
    if (!in) fail_msg("cannot open %s", path);
    text t = {0};
    char block[4096];
    for (size_t got; (got = fread(block, 1, sizeof block, in)) > 0;) OK(text_add_bytes(&t, block, got));
    fclose(in);
    *n = t.n;
    return t.data;
}

/* The vocabulary, merges and added tokens of a tokenizer.json under another pre-tokenizer. */
static tokenizer *json_tokenizer(const char *path, const char *pre) {
    size_t n;
    char *source = read_file(path, &n);
    cJSON *json = cJSON_ParseWithLength(source, n), *model = cJSON_GetObjectItem(json, "model"), *item;
    assert_non_null(model);
    tokenizer_facts f = {.bos = -1, .eos = -1, .file = path};
    OK(tokenizer_pre(pre, strlen(pre), path, &f));
    f.add_bos = false;
    const cJSON *vocab = cJSON_GetObjectItem(model, "vocab"), *merges = cJSON_GetObjectItem(model, "merges");
    const cJSON *added = cJSON_GetObjectItem(json, "added_tokens");
    token_text *tokens = mem_new((size_t)cJSON_GetArraySize(vocab), sizeof *tokens, "t");
    token_merge *pairs = mem_new((size_t)cJSON_GetArraySize(merges), sizeof *pairs, "m");
    tokenizer_literal *literals = mem_new((size_t)cJSON_GetArraySize(added), sizeof *literals, "l");
    cJSON_ArrayForEach(item, merges) {
        const char *left = cJSON_GetArrayItem(item, 0)->valuestring, *right = cJSON_GetArrayItem(item, 1)->valuestring;
        pairs[f.n_merges++] = (token_merge){{left, strlen(left)}, {right, strlen(right)}};
    }
    cJSON_ArrayForEach(item, vocab) {
        tokens[item->valueint] = (token_text){item->string, strlen(item->string)};
        f.n_tokens++;
    }
    cJSON_ArrayForEach(item, added) {
        int32_t id = cJSON_GetObjectItem(item, "id")->valueint;
        literals[f.n_literals++] = (tokenizer_literal){.text = tokens[id], .id = id, .control = true};
    }
    f.tokens = tokens;
    f.merges = pairs;
    f.literals = literals;
    tokenizer *t;
    OK(tokenizer_new(&f, &t));
    mem_free(tokens);
    mem_free(pairs);
    mem_free(literals);
    cJSON_Delete(json);
    mem_free(source);
    return t;
}

static bool composes(const char *pre) {
    return strcmp(pre, "qwen2") == 0;
}

static char *composed(const char *source, size_t n, size_t *n_out) {
    nfc form = {0};
    char *out = malloc(3 * n + 1);
    *n_out = 0;
    for (size_t i = 0, length; i < n; i += length) {
        OK(nfc_next(&form, source + i, n - i, &length));
        memcpy(out + *n_out, form.text, form.n);
        *n_out += form.n;
    }
    nfc_free(&form);
    return out;
}

/* The pieces of the tokens are the text, or its composed form, and each begins where it stands in the text. */
static void check_covers(const tokenizer *t, const char *pre, const char *source, size_t n, const token_list *list) {
    size_t n_form, at = 0;
    char *form = composed(source, n, &n_form);
    bool same = !composes(pre) || (n_form == n && memcmp(form, source, n) == 0);
    const char *want = same ? source : form;
    n_form = same ? n : n_form;
    for (size_t k = 0; k < list->n; k++) {
        const char *bytes;
        size_t length;
        tokenizer_piece(t, list->id[k], &bytes, &length);
        if (same) assert_int_equal(list->offset[k], at);
        else assert_true(list->offset[k] <= list->offset[k + 1] && (k > 0 || list->offset[k] == 0));
        assert_true(length > 0 && length <= n_form - at);
        assert_memory_equal(want + at, bytes, length);
        at += length;
    }
    assert_int_equal(at, n_form);
    assert_int_equal(list->offset[list->n], n);
    free(form);
}

static void check_parity(const tokenizer *t, const char *vocabulary, const char *pre) {
    char path[128];
    snprintf(path, sizeof path, FIXTURES "tokens_%s_%s.ids", vocabulary, pre);
    size_t n, n_ids;
    char *source = read_file(FIXTURES "tokens.txt", &n), *ids = read_file(path, &n_ids), *next = ids;
    token_list list;
    OK(tokenizer_encode(t, source, n, false, &list));
    for (size_t k = 0; k < list.n; k++) {
        long want = strtol(next, &next, 10);
        if (list.id[k] != want)
            fail_msg("%s: token %zu, byte %lld of the text: want %ld, got %d", path, k, (long long)list.offset[k], want,
                     (int)list.id[k]);
    }
    assert_int_equal(next + 1 - ids, n_ids); /* all of them, then the last newline */
    check_covers(t, pre, source, n, &list);
    token_list_free(&list);
    mem_free(source);
    mem_free(ids);
}

static void test_parity_json(void **state) {
    (void)state;
    for (size_t p = 0; p < N_PRES; p++) {
        tokenizer *tiny = p < 4 ? json_tokenizer("tests/tiny/tokenizer.json", all_pres[p]) : NULL;
        if (tiny) check_parity(tiny, "tiny", all_pres[p]);
        tokenizer_free(tiny);
        tokenizer *cross = json_tokenizer(FIXTURES "cross.json", all_pres[p]);
        check_parity(cross, "cross", all_pres[p]);
        tokenizer_free(cross);
    }
}

static void test_parity_smollm2(void **state) {
    (void)state;
    FILE *in = fopen(SMOLLM2, "rb");
    if (!in) {
        print_message(SMOLLM2 " is not there\n");
        skip();
    }
    fclose(in);
    gguf *g;
    tokenizer *t;
    OK(gguf_open(SMOLLM2, &g));
    OK(tokenizer_from_gguf(g, SMOLLM2, 49152, false, &t));
    assert_int_equal(tokenizer_bos(t), 1);
    assert_int_equal(tokenizer_eos(t), 2);
    check_parity(t, "smollm2", "smollm");
    tokenizer_free(t);
    assert_int_equal(tokenizer_from_gguf(g, SMOLLM2, 49151, false, &t), ERR_DATA);
    assert_string_equal(err_message(), SMOLLM2 ": 49152 tokens in the vocabulary, 49151 rows in 'token_embd.weight'");
    gguf_close(g);
}

static void test_random_bytes(void **state) {
    (void)state;
    uint32_t x = 12345;
    for (size_t p = 0; p < N_PRES; p++) {
        tokenizer *t = json_tokenizer(FIXTURES "cross.json", all_pres[p]);
        for (int round = 0; round < 200; round++) {
            char source[300];
            size_t n = (size_t)round;
            for (size_t i = 0; i < n; i++) {
                x = x * 1664525u + 1013904223u;
                /* Every third round mostly text, so that valid and invalid stretches mix. */
                source[i] =
                    round % 3 || x >> 28 == 0 ? (char)(x >> 16) : "<|endoftext|> \n12'sa\xc3\xa9"[(x >> 16) % 22];
            }
            token_list list;
            OK(tokenizer_encode(t, source, n, round & 1, &list));
            check_covers(t, all_pres[p], source, n, &list);
            token_list_free(&list);
        }
        tokenizer_free(t);
    }
}

/* ---- long runs -------------------------------------------------------------------------------------------------- */

static void test_long_runs(void **state) {
    (void)state;
    static const char *const units[] = {"A",    "\n",  ".", " ",      "\u4e2d",  "1",
                                        "\r\n", " \n", "'", "\u3000", "e\u0301", "\xff"};
    for (size_t p = 0; p < N_PRES; p++) {
        tokenizer *t = json_tokenizer(FIXTURES "cross.json", all_pres[p]);
        for (size_t u = 0; u < sizeof units / sizeof *units; u++)
            assert_int_equal(long_run_of((long_run){.t = t, .unit = units[u], .end = "x"}), 0);
        tokenizer_free(t);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_merge_order),  cmocka_unit_test(test_cuts),
        cmocka_unit_test(test_whole_words),  cmocka_unit_test(test_literals_and_bos),
        cmocka_unit_test(test_any_bytes),    cmocka_unit_test(test_malformed),
        cmocka_unit_test(test_missing_byte), cmocka_unit_test(test_composed),
        cmocka_unit_test(test_parity_json),  cmocka_unit_test(test_parity_smollm2),
        cmocka_unit_test(test_random_bytes), cmocka_unit_test(test_long_runs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
