/* SentencePiece vocabularies from GGUF, computed by hand, and what tokenizer.json may say. */
#include "base/err.h"
#include "base/mem.h"
#include "base/text.h"
#include "tests/unit/gguf_build.h"
#include "tests/unit/long_runs.h"
#include "tracer/tokenizer_gguf.h"
#include "tracer/tokenizer_json.h"

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

#define OK(call)                                 \
    do {                                         \
        if (call) fail_msg("%s", err_message()); \
    } while (0)

/* ---- a vocabulary to compute by hand ---------------------------------------------------------------------------- */

enum { UNK, BOS, EOS, BYTE0, PIECE0 = BYTE0 + 256, N_SPECIAL = 3 };
typedef struct piece {
    const char *text;
    float score;
    int32_t type;
} piece;
static const piece pieces[] = {
    {"\u2581", -10, 1},  /* 259 */
    {"a", -11, 1},       /* 260 */
    {"b", -12, 1},       /* 261 */
    {"c", -13, 1},       /* 262 */
    {"ab", -1, 1},       /* 263 */
    {"bc", -1, 1},       /* 264 */
    {"\u2581a", -3, 1},  /* 265 */
    {"abc", -4, 1},      /* 266 */
    {"Xa", -2, 1},       /* 267: X itself is none */
    {"aa", -1.5f, 1},    /* 268 */
    {"aaaa", -1.7f, 1},  /* 269 */
    {"\n\n", -1000, 4},  /* 270 */
    {"  ", -1000, 4},    /* 271 */
    {"\u2581ab", -9, 1}, /* 272 */
    {"<b>", -1000, 4},   /* 273 */
    {"cc", -1, 5},       /* 274: unused */
};
enum { N_PIECES = sizeof pieces / sizeof *pieces, N_TOKENS = PIECE0 + N_PIECES };

typedef struct options {
    const char *model, *flag; /* flag: a key that is set to `value` */
    bool value, bytes_as_text, u8_scores;
} options;

static void build_token(text *b, int i, bool bytes_as_text) {
    static const char *const special[] = {"<unk>", "<s>", "</s>"};
    char byte[8];
    snprintf(byte, sizeof byte, bytes_as_text ? "byte%02X" : "<0x%02X>", (unsigned)(i - BYTE0) & 0xff);
    build_text(b, i < N_SPECIAL ? special[i] : i < PIECE0 ? byte : pieces[i - PIECE0].text);
}

static int open_pieces(const options *o, bool strip_behind, tokenizer **t) {
    text b = {0};
    char path[32];
    gguf *g;
    build_start(&b, 3, 0, 7u + (o->flag != NULL));
    build_key_text(&b, "tokenizer.ggml.model", o->model ? o->model : "llama");
    build_key_text(&b, "tokenizer.ggml.pre", "default");
    build_array(&b, "tokenizer.ggml.tokens", BUILD_TEXT, N_TOKENS);
    for (int i = 0; i < N_TOKENS; i++) build_token(&b, i, o->bytes_as_text);
    build_array(&b, "tokenizer.ggml.scores", o->u8_scores ? BUILD_U8 : BUILD_F32, N_TOKENS);
    for (int i = 0; i < N_TOKENS; i++) {
        if (o->u8_scores) build_int(&b, 0, 1);
        else build_f32(&b, i < PIECE0 ? 0 : pieces[i - PIECE0].score);
    }
    build_array(&b, "tokenizer.ggml.token_type", BUILD_I32, N_TOKENS);
    for (int i = 0; i < N_TOKENS; i++)
        build_int(&b, (uint64_t)(i == UNK ? 2 : i < N_SPECIAL ? 3 : i < PIECE0 ? 6 : pieces[i - PIECE0].type), 4);
    build_key_u32(&b, "tokenizer.ggml.bos_token_id", BOS);
    build_key_u32(&b, "tokenizer.ggml.eos_token_id", EOS);
    if (o->flag) {
        build_key(&b, o->flag, BUILD_BOOL);
        build_int(&b, o->value, 1);
    }
    build_align(&b, 32);
    int fd = build_memory_file(b.data, b.n, path);
    OK(gguf_open(path, &g));
    int code = tokenizer_from_gguf(g, "toy.gguf", N_TOKENS, strip_behind, t);
    gguf_close(g);
    close(fd);
    text_free(&b);
    return code;
}

static void check_offsets(const token_list *l, size_t n) {
    for (size_t k = 0; k < l->n; k++) assert_true(l->offset[k] <= l->offset[k + 1]);
    assert_int_equal(l->offset[l->n], n);
}

static void check_ids(const tokenizer *t, const char *source, size_t n, bool special, const char *want) {
    token_list list;
    OK(tokenizer_encode(t, source, n, special, &list));
    char got[512] = "";
    for (size_t k = 0, at = 0; k < list.n; k++)
        at += (size_t)snprintf(got + at, sizeof got - at, "%s%d", k ? " " : "", (int)list.id[k]);
    assert_string_equal(got, want);
    check_offsets(&list, n);
    token_list_free(&list);
}

static void check(const tokenizer *t, const char *source, const char *want) {
    check_ids(t, source, strlen(source), false, want);
}

static void check_piece(const tokenizer *t, int32_t id, const char *want) {
    const char *bytes;
    size_t n;
    tokenizer_piece(t, id, &bytes, &n);
    assert_int_equal(n, strlen(want));
    assert_memory_equal(bytes, want, n);
}

/* ---- merging by scores ------------------------------------------------------------------------------------------ */

static void test_scores(void **state) {
    (void)state;
    tokenizer *t;
    OK(open_pieces(&(options){.flag = "tokenizer.ggml.add_bos_token"}, false, &t));
    check(t, "", "");
    check(t, "abc", "259 266"); /* ab and bc are equal: the left one; then ab+c (-4) before U+2581+ab (-9) */
    check(t, "bc", "259 264");
    check(t, "ab", "272"); /* ab first, then U+2581 joins it */
    check(t, "a", "265");
    check(t, "aaa", "259 268 260"); /* the left aa */
    check(t, "aaaa", "259 269");
    check(t, "Xa", "259 267"); /* what is no token may be half of one */
    check(t, "X", "259 91");   /* alone it is its byte, 3 + 88 */
    check(t, "\u00e9", "259 198 172");
    check(t, "cc", "259 262 262"); /* 274 is unused */
    check(t, "a  b", "265 271 261");
    check(t, " a", "271 260"); /* the space in front and the text's own are the symbol of two */
    check(t, "\u2581a", "271 260");
    check(t, "a\n\nb", "265 270 261");
    check(t, "<b>a", "259 273 260");
    check(t, "<0x41>", "259 63 51 123 55 52 65"); /* written in the text it is text */
    check_ids(t,
              "a\xff"
              "b",
              3, false, "265 258 261");
    check_ids(t, "a\0", 2, false, "265 3");
    check_piece(t, 265, " a");
    check_piece(t, 271, "  ");
    check_piece(t, 91, "X");
    check_piece(t, BOS, "<s>");
    check_piece(t, N_TOKENS, "");
    tokenizer_free(t);
}

static void test_prefix_and_control(void **state) {
    (void)state;
    tokenizer *t;
    OK(open_pieces(&(options){0}, false, &t)); /* a BOS and a space in front where no key says otherwise */
    check(t, "", "1");
    check(t, "ab", "1 272");
    check(t, "<s>a", "1 259 63 118 65 260");
    check_ids(t, "<s>a", 4, true, "1 265"); /* the text's own BOS; what follows begins like a text */
    check_ids(t, "a</s>\nb", 7, true, "1 265 2 259 13 261");
    token_list list;
    OK(tokenizer_encode(t, "ab c", 4, false, &list));
    assert_int_equal(list.n, 4); /* 1, 272, 259, 262 */
    assert_int_equal(list.offset[1], 0);
    assert_int_equal(list.offset[2], 2);
    assert_int_equal(list.offset[3], 3);
    assert_int_equal(list.offset[4], 4);
    token_list_free(&list);
    tokenizer_free(t);

    OK(open_pieces(&(options){.flag = "tokenizer.ggml.add_space_prefix"}, false, &t));
    check(t, "ab", "1 263");
    check(t, " ab", "1 272");
    tokenizer_free(t);

    OK(open_pieces(&(options){0}, true, &t)); /* Phi-3 */
    check_ids(t, "a</s> \n\tb", 9, true, "1 265 2 259 261");
    check_ids(t, "a<s>\nb", 6, true, "1 265 1 259 13 261");
    tokenizer_free(t);
}

/* Whatever the bytes (U+2581 apart, which tokens write as a space), the pieces are the text, and each stands where it
 * says. */
static void test_round_trip(void **state) {
    (void)state;
    static const char *const fragments[] = {"a",        "ab", "abc",  " ",      "  ",      "\n",     "\n\n",
                                            "X",        "Xa", "<b>",  "<s>",    "\u00e9",  "\u4e2d", "\xff",
                                            "\xe4\xbd", "c",  "aaaa", "<0x41>", "\xe2\x96"};
    tokenizer *t;
    uint32_t x = 1;
    OK(open_pieces(&(options){.flag = "tokenizer.ggml.add_space_prefix"}, false, &t));
    for (int round = 0; round < 500; round++) {
        text source = {0}, joined = {0};
        token_list list;
        for (int i = 0; i < round % 20; i++) {
            x = x * 1664525u + 1013904223u;
            OK(text_add(&source, "%s", fragments[(x >> 16) % (sizeof fragments / sizeof *fragments)]));
        }
        OK(tokenizer_encode(t, source.data ? source.data : "", source.n, false, &list));
        assert_int_equal(list.id[0], BOS);
        for (size_t k = 1; k < list.n; k++) {
            const char *bytes;
            size_t n;
            tokenizer_piece(t, list.id[k], &bytes, &n);
            assert_int_equal(list.offset[k], joined.n);
            OK(text_add_bytes(&joined, bytes, n));
        }
        assert_int_equal(joined.n, source.n);
        if (source.n) assert_memory_equal(joined.data, source.data, source.n);
        token_list_free(&list);
        text_free(&source);
        text_free(&joined);
    }
    tokenizer_free(t);
}

static void refused(const options *o, const char *message) {
    tokenizer *t;
    assert_int_equal(open_pieces(o, false, &t), ERR_DATA);
    assert_null(t);
    const char *got = strstr(err_message(), "key '"); /* gguf's own messages begin with the file's name */
    assert_string_equal(strncmp(message, "key", 3) == 0 && got ? got : err_message(), message);
}

static void test_malformed(void **state) {
    (void)state;
    refused(&(options){.model = "bert"}, "toy.gguf: tokenizer 'bert' is not supported (gpt2 and llama are)");
    refused(&(options){.model = "gpt2"},
            "toy.gguf: pre-tokenizer 'default' is not supported (gpt-2, smollm, llama-bpe, "
            "smaug-bpe, dbrx, qwen2, gpt-4o, tekken are)");
    refused(&(options){.u8_scores = true}, "key 'tokenizer.ggml.scores': expected float32 array, got uint8 array");
    refused(&(options){.bytes_as_text = true}, "toy.gguf: byte token 3 is 'byte00', want <0xNN>");
    refused(&(options){.flag = "tokenizer.ggml.remove_extra_whitespaces", .value = true},
            "key 'tokenizer.ggml.remove_extra_whitespaces' is set, which is not supported");
    refused(&(options){.flag = "tokenizer.ggml.add_eos_token", .value = true},
            "key 'tokenizer.ggml.add_eos_token' is set, which is not supported");
}

/* ---- tokenizer.json --------------------------------------------------------------------------------------------- */

#define MODEL \
    "\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"ab\":2,\"\u0120\":3,\"1\":4,\"\u0120a\":5},\"merges\":"
#define MERGES "[\"a b\",[\"\u0120\",\"a\"]]}"
#define SPLIT(pattern) \
    "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"" pattern "\"},\"behavior\":\"Isolated\",\"invert\":false}"
#define BYTES "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":true}"

static tokenizer *open_json(const char *words, const char *config) {
    tokenizer *t;
    OK(tokenizer_from_json(words, config, "t.json", 100, &t));
    return t;
}

static void test_json(void **state) {
    (void)state;
    tokenizer *t = open_json("{" MODEL MERGES ",\"pre_tokenizer\":" BYTES "}", NULL);
    check(t, "ab a", "2 5"); /* both spellings of merges */
    assert_int_equal(tokenizer_bos(t), -1);
    tokenizer_free(t);

    t = open_json(
        "{\"added_tokens\":[{\"id\":9,\"content\":\"<x>\",\"special\":true},"
        "{\"id\":7,\"content\":\"bb\",\"rstrip\":true},{\"id\":100,\"content\":\"<image>\"}]," MODEL MERGES
        ",\"pre_tokenizer\":" BYTES
        ",\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"<x>\"}},"
        "{\"Sequence\":{\"id\":\"A\"}}],\"special_tokens\":{\"<x>\":{\"ids\":[9]}}}}",
        "{\"eos_token\":{\"content\":\"bb\"}}");
    assert_int_equal(tokenizer_size(t), 10);
    assert_int_equal(tokenizer_bos(t), 9);
    assert_int_equal(tokenizer_eos(t), 7);
    check(t, "abb  a", "9 0 7 0"); /* bb takes the spaces along */
    check_piece(t, 8, "");
    check_ids(t, "<x>ab", 5, true, "9 2");
    tokenizer_free(t);

    t = open_json("{" MODEL MERGES ",\"pre_tokenizer\":" BYTES "}",
                  "{\"bos_token\":\"1\",\"add_bos_token\":true,\"eos_token\":null}");
    check(t, "ab", "4 2");
    assert_int_equal(tokenizer_eos(t), -1);
    tokenizer_free(t);
}

typedef struct fault {
    const char *words, *message;
} fault;

#define WITH(key, value) "{" MODEL MERGES ",\"" key "\":" value "}"
#define KNOWN_STEPS "(ByteLevel, Split, Metaspace, Digits and Sequence are)"

static void test_json_faults(void **state) {
    (void)state;
    static const fault faults[] = {
        {"", "t.json: no JSON at byte 0"},
        {"{\"model\":", "t.json: no JSON at byte 9"},
        {"[]", "t.json: 'model' is not as tokenizer.json has it"},
        {"7", "t.json: is neither a JSON object nor an array"},
        {"{\"model\":{\"type\":\"Unigram\"}}",
         "t.json: tokenizer model 'Unigram' is not supported (those of type BPE are)"},
        {"{\"model\":{\"type\":\"WordPiece\"}}",
         "t.json: tokenizer model 'WordPiece' is not supported (those of type BPE are)"},
        {"{\"model\":{\"type\":\"WordLevel\"}}",
         "t.json: tokenizer model 'WordLevel' is not supported (those of type BPE are)"},
        {"{\"model\":{\"type\":\"BPE\",\"vocab\":[]}}",
         "t.json: 'model.vocab' or 'model.merges' is not as tokenizer.json has it"},
        {"{" MODEL "[\"ab\"]}}", "t.json: merge 0 is not two parts"},
        {"{" MODEL "[\"a b\",[\"a\"]]}}", "t.json: merge 1 is not two parts"},
        {"{" MODEL "[[\"a\",\"b\",\"a\"]]}}", "t.json: merge 0 is not two parts"},
        {"{" MODEL "[\"b a\"]},\"pre_tokenizer\":" BYTES "}",
         "t.json: merge 0 'b a': its result is not in the vocabulary"},
        {"{\"model\":{\"vocab\":{\"a\":0,\"b\":0},\"merges\":[]}}", "t.json: tokens 'a' and 'b' both have id 0"},
        {"{\"model\":{\"vocab\":{\"a\":100},\"merges\":[]}}", "t.json: token 'a' has id 100, the embedding 100 rows"},
        {"{\"model\":{\"vocab\":{\"a\":1.5},\"merges\":[]}}", "t.json: the id of token 'a' is no whole number"},
        {"{\"model\":{\"vocab\":{\"a\":-1},\"merges\":[]}}", "t.json: the id of token 'a' is no whole number"},
        {"{\"model\":{\"vocab\":{\"a\":\"0\"},\"merges\":[]}}", "t.json: the id of token 'a' is no whole number"},
        {"{\"model\":{\"vocab\":{\"a\":1e300},\"merges\":[]}}", "t.json: the id of token 'a' is no whole number"},
        {"{\"model\":{\"vocab\":{},\"merges\":[]}}", "t.json: a vocabulary of 0 tokens (want 1 to 2147483646)"},
        {"{\"model\":{\"vocab\":{\"\\u0000\":1},\"merges\":[]}}", "t.json: a NUL (\\u0000) in a text is not supported"},
        {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[],\"end_of_word_suffix\":\"</w>\"}}",
         "t.json: end_of_word_suffix '</w>' is not supported"},
        {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[],\"dropout\":0.1}}", "t.json: dropout is not supported"},
        {WITH("added_tokens", "[{\"id\":0}]"), "t.json: added_tokens is not as tokenizer.json has it"},
        {WITH("added_tokens", "[{\"id\":0,\"content\":\"x\"}]"), "t.json: tokens 'a' and 'x' both have id 0"},
        {WITH("added_tokens", "[{\"id\":8,\"content\":\"x\",\"single_word\":true}]"),
         "t.json: added token 'x' with single_word is not supported"},
        {WITH("added_tokens", "[{\"id\":8,\"content\":\"x\"},{\"id\":9,\"content\":\"x\"}]"),
         "t.json: tokens 8 and 9 are both 'x'"},
        {WITH("normalizer", "{\"type\":\"Lowercase\"}"),
         "t.json: normalizer 'Lowercase' is not supported (Sequence, Prepend, Replace of a String and NFC are)"},
        {WITH("normalizer", "{\"type\":\"Replace\",\"pattern\":{\"Regex\":\"x\"},\"content\":\"\"}"),
         "t.json: normalizer 'Replace' is not supported (Sequence, Prepend, Replace of a String and NFC are)"},
        {WITH("normalizer", "{\"type\":\"Replace\",\"pattern\":{\"String\":\"\"},\"content\":\"\"}"),
         "t.json: a replacement of 0 bytes by 0 is not supported"},
        {WITH("added_tokens", "[{\"id\":8,\"content\":\"x\",\"normalized\":true}],\"normalizer\":{\"type\":"
                              "\"Replace\",\"pattern\":{\"String\":\"\"},\"content\":\"b\"}"),
         "t.json: a replacement of 0 bytes by 1 is not supported"},
        {WITH("pre_tokenizer", "{\"type\":\"Whitespace\"}"),
         "t.json: pre-tokenizer 'Whitespace' is not supported " KNOWN_STEPS},
        {WITH("pre_tokenizer", "{\"type\":\"Sequence\",\"pretokenizers\":[" BYTES "," BYTES "]}"),
         "t.json: a pre-tokenizer behind ByteLevel is not supported"},
        {WITH("pre_tokenizer", "{\"type\":\"Sequence\",\"pretokenizers\":[" SPLIT("a") ",{\"type\":\"ByteLevel\"}]}"),
         "t.json: ByteLevel that puts a space in front, behind another pre-tokenizer, is not supported"},
        {WITH("pre_tokenizer", "{\"type\":\"Split\",\"pattern\":{\"String\":\"a\"},\"behavior\":\"Odd\"}"),
         "t.json: Split with behavior 'Odd' is not supported (Isolated, Removed, Merged..., Contiguous are)"},
        {WITH("pre_tokenizer", SPLIT("(")), "t.json: the expression '(' is not supported: "},
        {WITH("pre_tokenizer", SPLIT("\\\\bx")), "t.json: the expression '\\bx' holds \\b, which is not supported"},
        {WITH("pre_tokenizer", SPLIT("[a[bc]]")),
         "t.json: the expression '[a[bc]]' holds a class within a class, which is not supported"},
        {WITH("pre_tokenizer", SPLIT("[a-z&&[^b]]")),
         "t.json: the expression '[a-z&&[^b]]' holds an intersection of classes (&&), which is not supported"},
        {WITH("pre_tokenizer", SPLIT("(?m).")),
         "t.json: the expression '(?m).' holds a kind of group, which is not supported"},
        {WITH("pre_tokenizer", SPLIT("a{2}+")),
         "t.json: the expression 'a{2}+' holds a kind of repetition, which is not supported"},
        {WITH("pre_tokenizer", SPLIT("a{,2}")),
         "t.json: the expression 'a{,2}' holds a kind of repetition, which is not supported"},
        {WITH("pre_tokenizer", SPLIT("\\\\p{Nothing}")), "t.json: the expression '\\p{Nothing}' is not supported: "},
        {WITH("decoder", "{\"type\":\"WordPiece\"}"), "t.json: decoder 'WordPiece' is not supported (Sequence, "
                                                      "Replace, Metaspace, ByteLevel, ByteFallback, Fuse and "
                                                      "Strip are)"},
        {WITH("post_processor", "{\"type\":\"BertProcessing\"}"),
         "t.json: post-processor 'BertProcessing' is not supported (TemplateProcessing, ByteLevel and Sequence are)"},
        {WITH("post_processor",
              "{\"type\":\"TemplateProcessing\",\"single\":[{\"Sequence\":{}},{\"SpecialToken\":{}}]}"),
         "t.json: TemplateProcessing of anything but one token and the text is not supported"},
        {WITH("post_processor", "{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"x\"}},"
                                "{\"Sequence\":{}}],\"special_tokens\":{\"x\":{\"ids\":[99]}}}"),
         "t.json: BOS token 99 or EOS token -1 is outside the vocabulary of 6"},
    };
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        tokenizer *t;
        if (tokenizer_from_json(faults[i].words, NULL, "t.json", 100, &t) != ERR_DATA)
            fail_msg("not refused: %s", faults[i].words);
        assert_null(t);
        size_t n = strlen(faults[i].message); /* PCRE2's own words are its own */
        if (n && faults[i].message[n - 1] == ' ') assert_memory_equal(err_message(), faults[i].message, n);
        else assert_string_equal(err_message(), faults[i].message);
    }
    tokenizer *t;
    assert_int_equal(tokenizer_from_json(WITH("decoder", "null"), "{", "t.json", 100, &t), ERR_DATA);
    assert_string_equal(err_message(), "tokenizer_config.json beside: t.json: no JSON at byte 1");
    assert_int_equal(tokenizer_from_json(WITH("decoder", "null"), "{\"add_eos_token\":true}", "t.json", 100, &t),
                     ERR_DATA);
    assert_string_equal(err_message(), "t.json: an EOS behind the text (add_eos_token) is not supported");
}

#define DOUBLE "{\"type\":\"Replace\",\"pattern\":{\"String\":\"a\"},\"content\":\"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\"}"

/* Steps that each make a text 32 times as long are an error before memory is. */
static void test_json_growth(void **state) {
    (void)state;
    tokenizer *t = open_json(WITH("normalizer", "{\"type\":\"Sequence\",\"normalizers\":[" DOUBLE "," DOUBLE "," DOUBLE
                                                "," DOUBLE "," DOUBLE "," DOUBLE "," DOUBLE "," DOUBLE "]}"),
                             NULL);
    token_list list;
    assert_int_equal(tokenizer_encode(t, "aaaa", 4, false, &list), ERR_DATA);
    assert_string_equal(err_message(), "t.json: its steps make more than 16 times as much of a text");
    tokenizer_free(t);
}

static void test_json_missing(void **state) {
    (void)state;
    tokenizer *t = open_json("{" MODEL MERGES "}", NULL);
    token_list list;
    check(t, "ab1", "2 4");
    assert_int_equal(tokenizer_encode(t, "ab\u00e9", 4, false, &list), ERR_DATA);
    assert_string_equal(err_message(), "t.json: its vocabulary has no token for byte 0xc3 (byte 2 of the text)");
    tokenizer_free(t);
}

/* ---- long runs -------------------------------------------------------------------------------------------------- */

/* A whole text is one word here. */
static void test_long_runs(void **state) {
    (void)state;
    static const char *const units[] = {"a", "ab", " ", "\n", "X", "\u4e2d", "<s>", "<b", "\u2581", "abc "};
    tokenizer *t;
    OK(open_pieces(&(options){0}, true, &t));
    for (size_t u = 0; u < sizeof units / sizeof *units; u++)
        assert_int_equal(long_run_of((long_run){.t = t, .unit = units[u], .end = "", .special = true}), 0);
    tokenizer_free(t);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_scores),
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_prefix_and_control),
        cmocka_unit_test(test_malformed),
        cmocka_unit_test(test_json),
        cmocka_unit_test(test_json_faults),
        cmocka_unit_test(test_json_missing),
        cmocka_unit_test(test_json_growth),
        cmocka_unit_test(test_long_runs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
