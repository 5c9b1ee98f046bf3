#include "tracer/tokenizer_json.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/text.h"
#include "tracer/json.h"

#include <stdio.h>
#include <string.h>

typedef struct reader {
    const char *path;
    size_t n_vocab;
    cJSON *root, *config;
    tokenizer_facts f;
    /* What the facts borrow beside the JSON's own words. */
    token_text *tokens;
    bool *plain;
    token_merge *merges;
    int32_t bytes[256];
    tokenizer_literal *literals;
    char **rewritten; /* [n_literals] NULL where the token's own text is looked for */
    tokenizer_step steps[TOKENIZER_STEPS_MAX];
    text patterns[TOKENIZER_STEPS_MAX];
    size_t n_patterns;
    bool split; /* a step has cut already: what comes now cannot put anything in front */
} reader;

/* ---- reading JSON ----------------------------------------------------------------------------------------------- */

static token_text as_text(const char *s) {
    return (token_text){s, strlen(s)};
}

static int malformed(const reader *r, const char *what) {
    return err_set(ERR_DATA, "%s: %s is not as tokenizer.json has it", r->path, what);
}

static int refuse(const reader *r, const char *what, const char *type, const char *known) {
    return err_set(ERR_DATA, "%s: %s '%.60s' is not supported (%s are)", r->path, what, type ? type : "", known);
}

/* An id: a whole number from 0. */
static int read_id(const reader *r, const cJSON *x, const char *token, int32_t *out) {
    *out = 0;
    if (!cJSON_IsNumber(x) || x->valuedouble < 0 || x->valuedouble >= INT32_MAX || x->valuedouble != x->valueint)
        return err_set(ERR_DATA, "%s: the id of token '%.60s' is no whole number", r->path, token);
    *out = x->valueint;
    return 0;
}

/* ---- the vocabulary --------------------------------------------------------------------------------------------- */

/* tokens[] has a place for every id below n_vocab that either list names. */
static int count_ids(reader *r, const cJSON *vocab, const cJSON *added) {
    const cJSON *x;
    int32_t id;
    size_t n = 0;
    cJSON_ArrayForEach(x, vocab) {
        TRY(read_id(r, x, x->string, &id));
        if ((size_t)id >= r->n_vocab)
            return err_set(ERR_DATA, "%s: token '%.60s' has id %d, the embedding %zu rows", r->path, x->string, id,
                           r->n_vocab);
        if ((size_t)id >= n) n = (size_t)id + 1;
    }
    cJSON_ArrayForEach(x, added) {
        const char *content = json_word(x, "content");
        if (!content) return malformed(r, "added_tokens");
        TRY(read_id(r, json_get(x, "id"), content, &id));
        if ((size_t)id >= n && (size_t)id < r->n_vocab) n = (size_t)id + 1;
    }
    r->f.n_tokens = n;
    return 0;
}

static int read_vocabulary(reader *r, const cJSON *vocab) {
    const cJSON *x;
    cJSON_ArrayForEach(x, vocab) {
        token_text *token = &r->tokens[x->valueint];
        if (token->text)
            return err_set(ERR_DATA, "%s: tokens '%.60s' and '%.60s' both have id %d", r->path, token->text, x->string,
                           x->valueint);
        *token = as_text(x->string);
        r->plain[x->valueint] = true;
        int byte = r->f.bytes ? tokenizer_byte_of(*token) : -1;
        if (byte >= 0) r->bytes[byte] = x->valueint;
    }
    return 0;
}

static int read_added(reader *r, const cJSON *x) {
    const char *content = json_word(x, "content");
    int32_t id = json_get(x, "id")->valueint;
    if ((size_t)id >= r->n_vocab || !*content) return 0;
    token_text *token = &r->tokens[id];
    if (token->text && strcmp(token->text, content) != 0)
        return err_set(ERR_DATA, "%s: tokens '%.60s' and '%.60s' both have id %d", r->path, token->text, content, id);
    if (json_flag(x, "single_word", false))
        return err_set(ERR_DATA, "%s: added token '%.60s' with single_word is not supported", r->path, content);
    *token = as_text(content);
    r->literals[r->f.n_literals++] = (tokenizer_literal){.text = *token,
                                                         .id = id,
                                                         .control = json_flag(x, "special", false),
                                                         .normalized = json_flag(x, "normalized", false),
                                                         .strip_before = json_flag(x, "lstrip", false),
                                                         .strip_behind = json_flag(x, "rstrip", false)};
    return 0;
}

/* "left right", or [left, right]: both are in use. */
static int read_merge(const reader *r, const cJSON *x, size_t k, token_merge *out) {
    const cJSON *left = cJSON_IsArray(x) ? x->child : NULL, *right = left ? left->next : NULL;
    if (cJSON_IsString(left) && cJSON_IsString(right) && !right->next) {
        *out = (token_merge){as_text(left->valuestring), as_text(right->valuestring)};
        return 0;
    }
    if (cJSON_IsString(x) && tokenizer_split_merge(as_text(x->valuestring), out) == 0) return 0;
    return err_set(ERR_DATA, "%s: merge %zu is not two parts", r->path, k);
}

static int read_merges(reader *r, const cJSON *merges) {
    const cJSON *x;
    r->f.merges = r->merges = mem_new((size_t)cJSON_GetArraySize(merges), sizeof *r->merges, "merges");
    if (!r->merges) return ERR_DATA;
    cJSON_ArrayForEach(x, merges) {
        TRY(read_merge(r, x, r->f.n_merges, &r->merges[r->f.n_merges]));
        r->f.n_merges++;
    }
    return 0;
}

/* What the model does to words beside merging, and is not known here. */
static int check_model(const reader *r, const cJSON *model) {
    static const char *const marks[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    const char *type = json_word(model, "type");
    if (!cJSON_IsObject(model)) return malformed(r, "'model'");
    if (type ? strcmp(type, "BPE") != 0 : !json_get(model, "merges"))
        return refuse(r, "tokenizer model", type, "those of type BPE");
    if (!cJSON_IsObject(json_get(model, "vocab")) || !cJSON_IsArray(json_get(model, "merges")))
        return malformed(r, "'model.vocab' or 'model.merges'");
    for (size_t i = 0; i < sizeof marks / sizeof *marks; i++) {
        const char *mark = json_word(model, marks[i]);
        if (mark && *mark) return err_set(ERR_DATA, "%s: %s '%.60s' is not supported", r->path, marks[i], mark);
    }
    const cJSON *dropout = json_get(model, "dropout");
    if (dropout && dropout->valuedouble != 0) return err_set(ERR_DATA, "%s: dropout is not supported", r->path);
    return 0;
}

static int read_model(reader *r) {
    const cJSON *model = json_get(r->root, "model"), *added = json_get(r->root, "added_tokens"), *x;
    TRY(check_model(r, model));
    if (added && !cJSON_IsArray(added)) return malformed(r, "'added_tokens'");
    r->f.whole_words = json_flag(model, "ignore_merges", false);
    if (json_flag(model, "byte_fallback", false)) r->f.bytes = r->bytes;
    TRY(count_ids(r, json_get(model, "vocab"), added));
    size_t n_added = (size_t)cJSON_GetArraySize(added);
    r->f.tokens = r->tokens = mem_new(r->f.n_tokens, sizeof *r->tokens, "vocabulary");
    r->f.plain = r->plain = mem_new(r->f.n_tokens, sizeof *r->plain, "vocabulary");
    r->f.literals = r->literals = mem_new(n_added, sizeof *r->literals, "added tokens");
    r->rewritten = mem_new(n_added, sizeof *r->rewritten, "added tokens");
    if (!r->tokens || !r->plain || !r->literals || !r->rewritten) return ERR_DATA;
    TRY(read_vocabulary(r, json_get(model, "vocab")));
    cJSON_ArrayForEach(x, added) TRY(read_added(r, x));
    return read_merges(r, json_get(model, "merges"));
}

/* ---- steps ------------------------------------------------------------------------------------------------------ */

static int add_step(reader *r, tokenizer_step s) {
    if (r->f.n_steps == TOKENIZER_STEPS_MAX)
        return err_set(ERR_DATA, "%s: more than %d normalisers and pre-tokenizers", r->path, TOKENIZER_STEPS_MAX);
    r->steps[r->f.n_steps++] = s;
    r->split = r->split || s.kind == STEP_SPLIT;
    return 0;
}

static int add_split(reader *r, token_text regex, tokenizer_split split, bool inverted) {
    return add_step(r, (tokenizer_step){.kind = STEP_SPLIT, .pattern = regex, .split = split, .inverted = inverted});
}

static int add_prefix(reader *r, tokenizer_step_kind kind, const char *with, const char *who) {
    if (r->split)
        return err_set(ERR_DATA, "%s: %s that puts a space in front, behind another pre-tokenizer, is not supported",
                       r->path, who);
    return add_step(r, (tokenizer_step){.kind = kind, .with = as_text(with)});
}

static int add_replace(reader *r, const char *from, const char *to) {
    return add_step(r, (tokenizer_step){.kind = STEP_REPLACE, .pattern = as_text(from), .with = as_text(to)});
}

/* A plain text as an expression. */
static int escaped(reader *r, const char *plain, token_text *out) {
    if (r->n_patterns == TOKENIZER_STEPS_MAX) return malformed(r, "'pre_tokenizer'");
    text *t = &r->patterns[r->n_patterns++];
    for (const char *p = plain; *p; p++) TRY(text_add(t, strchr("\\^$.|?*+()[]{}", *p) ? "\\%c" : "%c", *p));
    *out = (token_text){t->data ? t->data : "", t->n};
    return 0;
}

/* ---- normalizer ------------------------------------------------------------------------------------------------- */

static int read_normalizer(reader *r, const cJSON *o, bool in_sequence) {
    static const char known[] = "Sequence, Prepend, Replace of a String and NFC";
    const char *type = json_word(o, "type");
    const cJSON *x, *list = json_get(o, "normalizers");
    if (!o) return 0;
    if (!type) return malformed(r, "'normalizer'");
    if (strcmp(type, "NFC") == 0) return add_step(r, (tokenizer_step){.kind = STEP_NFC});
    if (strcmp(type, "Sequence") == 0 && cJSON_IsArray(list) && !in_sequence) {
        cJSON_ArrayForEach(x, list) TRY(read_normalizer(r, x, true));
        return 0;
    }
    if (strcmp(type, "Prepend") == 0 && json_word(o, "prepend"))
        return add_prefix(r, STEP_PREPEND, json_word(o, "prepend"), "a normaliser");
    const char *from = json_word(json_get(o, "pattern"), "String"), *to = json_word(o, "content");
    if (strcmp(type, "Replace") == 0 && from && to) return add_replace(r, from, to);
    return refuse(r, "normalizer", type, known);
}

/* Added tokens that are looked for in the normalised text are normalised themselves, prefix and all. */
static int normalize_literals(reader *r) {
    bool any = false;
    for (size_t i = 0; i < r->f.n_literals; i++) {
        if (!r->literals[i].normalized) continue;
        TRY(tokenizer_rewrite(r->steps, r->f.n_steps, r->path, &r->literals[i].text, &r->rewritten[i]));
        any = true;
    }
    return any ? add_step(r, (tokenizer_step){.kind = STEP_LITERALS}) : 0;
}

/* ---- pre-tokenizer ---------------------------------------------------------------------------------------------- */

static int read_byte_level(reader *r, const cJSON *o) {
    r->f.kind = TOKENIZER_BYTES;
    if (json_flag(o, "add_prefix_space", true)) TRY(add_prefix(r, STEP_PREPEND_MISSING, " ", "ByteLevel"));
    return json_flag(o, "use_regex", true) ? add_split(r, as_text(tokenizer_gpt2_pattern), SPLIT_ISOLATED, false) : 0;
}

static int read_split(reader *r, const cJSON *o) {
    static const char behaviors[] = "Isolated|Removed|MergedWithPrevious|MergedWithNext|Contiguous";
    const cJSON *pattern = json_get(o, "pattern");
    const char *regex = json_word(pattern, "Regex"), *plain = json_word(pattern, "String");
    const char *behavior = json_word(o, "behavior");
    int split = behavior ? text_find_word(behaviors, behavior) : -1;
    if (split < 0) return refuse(r, "Split with behavior", behavior, "Isolated, Removed, Merged..., Contiguous");
    if (!regex && !plain) return malformed(r, "the pattern of a Split");
    token_text expression = as_text(regex ? regex : "");
    if (!regex) TRY(escaped(r, plain, &expression));
    return add_split(r, expression, (tokenizer_split)split, json_flag(o, "invert", false));
}

static int read_metaspace(reader *r, const cJSON *o) {
    const char *with = json_word(o, "replacement"), *scheme = json_word(o, "prepend_scheme");
    if (!with || !*with) return malformed(r, "Metaspace");
    if (!scheme) scheme = json_flag(o, "add_prefix_space", true) ? "always" : "never";
    int which = text_find_word("always|first|never", scheme);
    if (which < 0) return refuse(r, "Metaspace with prepend_scheme", scheme, "always, first, never");
    if (r->split) return err_set(ERR_DATA, "%s: Metaspace behind another pre-tokenizer is not supported", r->path);
    TRY(add_replace(r, " ", with));
    if (which == 0) TRY(add_prefix(r, STEP_PREPEND_MISSING, with, "Metaspace"));
    if (which == 1) TRY(add_prefix(r, STEP_PREPEND_FIRST, with, "Metaspace"));
    token_text expression;
    if (!json_flag(o, "split", true)) return 0;
    TRY(escaped(r, with, &expression));
    return add_split(r, expression, SPLIT_WITH_NEXT, false);
}

static int read_pre_tokenizer(reader *r, const cJSON *o, bool in_sequence) {
    static const char types[] = "ByteLevel|Split|Metaspace|Digits|Sequence";
    const char *type = json_word(o, "type");
    const cJSON *x, *list = json_get(o, "pretokenizers");
    if (!o) return 0;
    int which = type ? text_find_word(types, type) : -1;
    if (which >= 0 && r->f.kind == TOKENIZER_BYTES)
        return err_set(ERR_DATA, "%s: a pre-tokenizer behind ByteLevel is not supported", r->path);
    switch (which) {
    case 0:
        return read_byte_level(r, o);
    case 1:
        return read_split(r, o);
    case 2:
        return read_metaspace(r, o);
    case 3:
        return add_split(r, as_text(json_flag(o, "individual_digits", false) ? "\\p{N}" : "\\p{N}+"), SPLIT_ISOLATED,
                         false);
    case 4:
        if (!cJSON_IsArray(list) || in_sequence) return malformed(r, "a Sequence of pre-tokenizers");
        cJSON_ArrayForEach(x, list) TRY(read_pre_tokenizer(r, x, true));
        return 0;
    default:
        return refuse(r, "pre-tokenizer", type, "ByteLevel, Split, Metaspace, Digits and Sequence");
    }
}

/* ---- decoder ---------------------------------------------------------------------------------------------------- */

/* Only what it says about single tokens: what stands for a space. */
static int read_decoder(reader *r, const cJSON *o, bool in_sequence) {
    static const char types[] = "ByteLevel|ByteFallback|Fuse|Strip|Metaspace|Replace|Sequence";
    const char *type = json_word(o, "type"), *from = json_word(json_get(o, "pattern"), "String"),
               *to = json_word(o, "content");
    const cJSON *x, *list = json_get(o, "decoders");
    if (!o) return 0;
    int which = type ? text_find_word(types, type) : -1;
    if (which == 6 && cJSON_IsArray(list) && !in_sequence) {
        cJSON_ArrayForEach(x, list) TRY(read_decoder(r, x, true));
        return 0;
    }
    if (which == 4) from = json_word(o, "replacement"), to = " ";
    if (which == 4 || which == 5) {
        if (!from || !*from || !to || strcmp(to, " ") != 0 || r->f.space.n)
            return refuse(r, "decoder", type, "Metaspace and Replace, of one text by a space,");
        r->f.space = as_text(from);
        return 0;
    }
    if (which >= 0 && which != 6) return 0;
    return refuse(r, "decoder", type, "Sequence, Replace, Metaspace, ByteLevel, ByteFallback, Fuse and Strip");
}

/* ---- BOS and EOS ------------------------------------------------------------------------------------------------ */

/* One special token in front of the text, nothing behind it. */
static int read_template(reader *r, const cJSON *o) {
    const cJSON *item = json_get(o, "single"), *specials = json_get(o, "special_tokens");
    if (!cJSON_IsArray(item)) return malformed(r, "TemplateProcessing");
    item = item->child;
    const char *front = json_word(json_get(item, "SpecialToken"), "id");
    if (front) item = item->next;
    if (!json_get(item, "Sequence") || item->next)
        return err_set(ERR_DATA, "%s: TemplateProcessing of anything but one token and the text is not supported",
                       r->path);
    if (!front) return 0;
    const cJSON *ids = json_get(json_get(specials, front), "ids");
    int32_t id;
    if (!cJSON_IsArray(ids) || cJSON_GetArraySize(ids) != 1) return malformed(r, "TemplateProcessing");
    TRY(read_id(r, ids->child, front, &id));
    r->f.bos = id;
    r->f.add_bos = true;
    return 0;
}

static int read_post_processor(reader *r, const cJSON *o, bool in_sequence, bool *decides) {
    const char *type = json_word(o, "type");
    const cJSON *x, *list = json_get(o, "processors");
    if (!o) return 0;
    if (type && strcmp(type, "ByteLevel") == 0) return 0; /* offsets only */
    if (type && strcmp(type, "TemplateProcessing") == 0) {
        *decides = true;
        return read_template(r, o);
    }
    if (type && strcmp(type, "Sequence") == 0 && cJSON_IsArray(list) && !in_sequence) {
        cJSON_ArrayForEach(x, list) TRY(read_post_processor(r, x, true, decides));
        return 0;
    }
    return refuse(r, "post-processor", type, "TemplateProcessing, ByteLevel and Sequence");
}

/* The token that tokenizer_config.json names under `key`, as a text or as an object; -1 for none. */
static int64_t named_token(const reader *r, const char *key) {
    const cJSON *x = json_get(r->config, key);
    const char *name = cJSON_IsObject(x) ? json_word(x, "content") : json_word(r->config, key);
    for (size_t i = 0; name && i < r->f.n_tokens; i++)
        if (r->tokens[i].text && strcmp(r->tokens[i].text, name) == 0) return (int64_t)i;
    return -1;
}

static int read_ends(reader *r) {
    bool decides = false;
    r->f.bos = -1;
    TRY(read_post_processor(r, json_get(r->root, "post_processor"), false, &decides));
    r->f.eos = named_token(r, "eos_token");
    if (r->f.bos < 0) r->f.bos = named_token(r, "bos_token");
    if (decides || !r->config) return 0;
    r->f.add_bos = json_flag(r->config, "add_bos_token", false);
    if (json_flag(r->config, "add_eos_token", false))
        return err_set(ERR_DATA, "%s: an EOS behind the text (add_eos_token) is not supported", r->path);
    return 0;
}

/* ---- all of it -------------------------------------------------------------------------------------------------- */

static int read_all(reader *r) {
    TRY(read_model(r));
    TRY(read_normalizer(r, json_get(r->root, "normalizer"), false));
    TRY(normalize_literals(r));
    r->f.kind = TOKENIZER_CHARS;
    TRY(read_pre_tokenizer(r, json_get(r->root, "pre_tokenizer"), false));
    TRY(read_decoder(r, json_get(r->root, "decoder"), false));
    return read_ends(r);
}

int tokenizer_from_json(const char *words, const char *config, const char *path, size_t n_vocab, tokenizer **out) {
    *out = NULL;
    reader r = {.path = path, .n_vocab = n_vocab, .f.file = path};
    r.f.steps = r.steps;
    for (int b = 0; b < 256; b++) r.bytes[b] = -1;
    int code = json_parse(words, path, &r.root);
    if (!code && config && json_parse(config, path, &r.config))
        code = err_prefix(ERR_DATA, "tokenizer_config.json beside");
    if (!code) code = read_all(&r);
    if (!code) code = tokenizer_new(&r.f, out);
    cJSON_Delete(r.root);
    cJSON_Delete(r.config);
    mem_free(r.tokens);
    mem_free(r.plain);
    mem_free(r.merges);
    for (size_t i = 0; r.rewritten && i < r.f.n_literals; i++) mem_free(r.rewritten[i]);
    mem_free(r.rewritten);
    mem_free(r.literals);
    for (size_t i = 0; i < r.n_patterns; i++) text_free(&r.patterns[i]);
    return code;
}
