/* The steps that a text goes through before its words merge. Each works on one stretch at a time and hands what it
 * makes of it to the next, so depth is bounded by the number of steps. */
#include "base/err.h"
#include "base/mem.h"
#include "base/utf8.h"
#include "tracer/nfc.h"
#include "tracer/tokenizer_parts.h"

#include <string.h>

static int run(encoder *e, size_t k, const span *s);

/* ---- reading them ----------------------------------------------------------------------------------------------- */

static int check_rewrite(const tokenizer_step *s, const char *file) {
    if (s->with.n <= TOKENIZER_WITH_MAX && (s->kind != STEP_REPLACE || s->pattern.n)) return 0;
    return err_set(ERR_DATA, "%s: a replacement of %zu bytes by %zu is not supported", file, s->pattern.n, s->with.n);
}

static int read_step(tokenizer *t, const tokenizer_step *from, const char *file) {
    step *to = &t->steps[t->n_steps++];
    to->kind = from->kind;
    to->split = from->split;
    to->inverted = from->inverted;
    if (from->kind == STEP_LITERALS || from->kind == STEP_NFC) return 0;
    if (from->kind == STEP_SPLIT) return tokenizer_compile(from->pattern.text, from->pattern.n, file, &to->regex);
    TRY(check_rewrite(from, file));
    to->n_pattern = from->pattern.n;
    to->n_with = from->with.n;
    to->pattern = mem_string_n(to->n_pattern ? from->pattern.text : "", to->n_pattern);
    to->with = mem_string_n(to->n_with ? from->with.text : "", to->n_with);
    return to->pattern && to->with ? 0 : ERR_DATA;
}

/* Expressions want UTF-8: what is none is cut out before the first of them. */
int tokenizer_read_steps(tokenizer *t, const tokenizer_facts *f) {
    if (f->n_steps > TOKENIZER_STEPS_MAX)
        return err_set(ERR_DATA, "%s: %zu steps before words merge (at most %d)", f->file, f->n_steps,
                       TOKENIZER_STEPS_MAX);
    t->limits = pcre2_match_context_create(NULL);
    if (!t->limits) return err_set(ERR_DATA, "pre-tokenizer: out of memory");
    pcre2_set_match_limit(t->limits, 1u << 24);
    pcre2_set_depth_limit(t->limits, UINT32_MAX);
    pcre2_set_heap_limit(t->limits, 1u << 20); /* KiB */
    bool cut = false;
    for (size_t i = 0; i <= f->n_steps; i++) {
        if (!cut && (i == f->n_steps || f->steps[i].kind == STEP_SPLIT)) {
            t->steps[t->n_steps++].kind = STEP_UTF8;
            cut = true;
        }
        if (i < f->n_steps) TRY(read_step(t, &f->steps[i], f->file));
    }
    return 0;
}

void tokenizer_free_steps(tokenizer *t) {
    for (size_t i = 0; i < t->n_steps; i++) {
        pcre2_code_free(t->steps[i].regex);
        mem_free(t->steps[i].pattern);
        mem_free(t->steps[i].with);
    }
    pcre2_match_context_free(t->limits);
}

/* ---- literals --------------------------------------------------------------------------------------------------- */

/* Where the white space that ends at `at` begins, `from` at the earliest. */
static size_t space_before(const span *s, size_t from, size_t at) {
    for (size_t n; at > from && (n = utf8_space_before(s->text + from, at - from)) > 0; at -= n) continue;
    return at;
}

static size_t space_behind(const span *s, size_t at) {
    for (size_t n; (n = utf8_space(s->text + at, s->n - at)) > 0; at += n) continue;
    return at;
}

/* A literal within the white space that the one before it took along is taken too, as the library has it. */
static int take_literals(encoder *e, const literal_set *set, size_t next, const span *s) {
    size_t plain = 0;
    for (size_t i = 0; i < s->n;) {
        const tokenizer_literal *l = tokenizer_literal_at(set, s->text + i, s->n - i, e->special);
        if (!l) {
            i++;
            continue;
        }
        size_t from = l->strip_before ? space_before(s, plain, i) : i, to = i + l->text.n;
        if (l->strip_behind) to = space_behind(s, to);
        span before = span_part(s, plain, from > plain ? from : plain);
        TRY(run(e, next, &before));
        TRY(tokenizer_emit(e, l->id, span_origin(s, from)));
        plain = to;
        i += l->text.n;
    }
    span rest = span_part(s, plain, s->n);
    return run(e, next, &rest);
}

/* ---- rewriting -------------------------------------------------------------------------------------------------- */

/* Steps may make a text longer, one after the other; no more than so many times, all together. */
enum { MOST_GROWTH = 16, MOST_MORE = 4096 };

static int check_growth(const rewritten *r, size_t n, const char *file) {
    if (r->n <= MOST_MORE || r->n - MOST_MORE <= MOST_GROWTH * n) return 0;
    return err_set(ERR_DATA, "%s: its steps make more than %d times as much of a text", file, MOST_GROWTH);
}

static int add(rewritten *r, const char *bytes, size_t n, uint32_t first, uint32_t others) {
    if (n == 0) return 0;
    TRY(mem_grow((void **)&r->text, &r->text_capacity, r->n + n, 1, "text"));
    TRY(mem_grow((void **)&r->origin, &r->origin_capacity, r->n + n + 1, sizeof *r->origin, "text"));
    memcpy(r->text + r->n, bytes, n);
    for (size_t i = 0; i < n; i++) r->origin[r->n + i] = i ? others : first;
    r->n += n;
    return 0;
}

static bool at_pattern(const step *p, const span *s, size_t i) {
    return s->n - i >= p->n_pattern && memcmp(s->text + i, p->pattern, p->n_pattern) == 0;
}

/* The first byte of a replacement stands where the match began, so that its first token covers the match. */
static int replace(rewritten *r, const step *p, const span *s) {
    for (size_t i = 0; i < s->n;) {
        if (at_pattern(p, s, i)) {
            TRY(add(r, p->with, p->n_with, span_origin(s, i), span_origin(s, i + p->n_pattern)));
            i += p->n_pattern;
        } else {
            TRY(add(r, s->text + i, 1, span_origin(s, i), 0));
            i++;
        }
    }
    return 0;
}

/* What became of a stretch stands, byte by byte, where the stretch does; where it has become longer, the rest at its
 * last byte. */
static int compose(rewritten *r, const span *s) {
    nfc form = {0};
    int code = 0;
    for (size_t i = 0, n; i < s->n && !code; i += n) {
        code = nfc_next(&form, s->text + i, s->n - i, &n);
        if (code) break;
        for (size_t k = 0; k < form.n && !code; k++)
            code = add(r, form.text + k, 1, span_origin(s, i + (k < n ? k : n - 1)), 0);
    }
    nfc_free(&form);
    return code;
}

static int rewrite(rewritten *r, const step *p, const span *s) {
    r->n = 0;
    if (p->kind == STEP_REPLACE) {
        TRY(replace(r, p, s));
    } else if (p->kind == STEP_NFC) {
        TRY(compose(r, s));
    } else {
        bool there = s->n >= p->n_with && memcmp(s->text, p->with, p->n_with) == 0;
        bool wanted = p->kind == STEP_PREPEND || (p->kind == STEP_PREPEND_MISSING && !there) ||
                      (p->kind == STEP_PREPEND_FIRST && !there && span_origin(s, 0) == 0);
        uint32_t start = span_origin(s, 0);
        if (wanted) TRY(add(r, p->with, p->n_with, start, start));
        for (size_t i = 0; i < s->n; i++) TRY(add(r, s->text + i, 1, span_origin(s, i), 0));
    }
    if (r->n) r->origin[r->n] = span_origin(s, s->n);
    return 0;
}

int tokenizer_rewrite(const tokenizer_step *steps, size_t n, const char *file, token_text *t, char **owned) {
    size_t before = t->n;
    *owned = NULL;
    for (size_t i = 0; i < n && t->n; i++) {
        TRY(check_rewrite(&steps[i], file));
        step p = {.kind = steps[i].kind,
                  .pattern = (char *)steps[i].pattern.text,
                  .with = (char *)steps[i].with.text,
                  .n_pattern = steps[i].pattern.n,
                  .n_with = steps[i].with.n};
        rewritten r = {0};
        int code = rewrite(&r, &p, &(span){.text = t->text, .n = t->n});
        if (!code) code = check_growth(&r, before, file);
        mem_free(r.origin);
        mem_free(*owned);
        *owned = r.text;
        *t = (token_text){r.text, r.n};
        TRY(code);
    }
    return 0;
}

/* ---- cutting ---------------------------------------------------------------------------------------------------- */

/* Each longest stretch of valid UTF-8 is a text of its own for the expressions: their lookaheads see the end there.
 * Each byte between the stretches is a word of its own, so nothing merges across it. */
static int cut_utf8(encoder *e, size_t next, const span *s) {
    for (size_t from = 0; from < s->n;) {
        size_t end = from, length = 0;
        while (end < s->n && (length = utf8_length(s->text + end, s->n - end))) end += length;
        span valid = span_part(s, from, end);
        TRY(run(e, next, &valid));
        if (end < s->n) {
            span byte = span_part(s, end, end + 1);
            TRY(tokenizer_merge_word(e, &byte));
            end++;
        }
        from = end;
    }
    return 0;
}

/* The part that is being put together from matches and what lies between them. */
typedef struct group {
    size_t from, to;
    bool any, match; /* match: of the last piece in it */
} group;

static bool joins(tokenizer_split split, bool last, bool match) {
    switch (split) {
    case SPLIT_CONTIGUOUS:
        return last == match;
    case SPLIT_WITH_PREVIOUS:
        return match && !last;
    case SPLIT_WITH_NEXT:
        return last && !match;
    default:
        return false;
    }
}

static int flush_group(encoder *e, size_t k, const span *s, const group *g) {
    if (!g->any || (g->match && e->t->steps[k].split == SPLIT_REMOVED)) return 0;
    span whole = span_part(s, g->from, g->to);
    return run(e, k + 1, &whole);
}

static int add_piece(encoder *e, size_t k, const span *s, group *g, size_t to, bool match) {
    const step *p = &e->t->steps[k];
    match = match != p->inverted;
    if (g->any && joins(p->split, g->match, match)) {
        g->to = to;
        g->match = match;
        return 0;
    }
    TRY(flush_group(e, k, s, g));
    *g = (group){g->to, to, true, match};
    return 0;
}

/* An expression that needs more of the JIT's stack than there is goes through the interpreter, which has a heap. */
static int find_match(encoder *e, const step *p, const span *s, size_t from, size_t *start, size_t *end) {
    PCRE2_SPTR subject = (PCRE2_SPTR)s->text;
    int found = pcre2_match(p->regex, subject, s->n, from, PCRE2_NO_UTF_CHECK, e->match, e->t->limits);
    if (found == PCRE2_ERROR_JIT_STACKLIMIT)
        found = pcre2_match(p->regex, subject, s->n, from, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, e->match, e->t->limits);
    const PCRE2_SIZE *at = pcre2_get_ovector_pointer(e->match);
    *start = *end = s->n;
    if (found == PCRE2_ERROR_NOMATCH) return 0;
    if (found < 0)
        return err_set(ERR_DATA, "%s: pre-tokenizer: PCRE2 error %d at byte %u of the text", e->t->file, found,
                       span_origin(s, from));
    *start = at[0];
    *end = at[1];
    return 0;
}

/* Matches one after another; an empty one right behind another match is none. */
static int cut(encoder *e, size_t k, const span *s) {
    const step *p = &e->t->steps[k];
    group g = {0};
    size_t behind = SIZE_MAX, start, end; /* behind: the end of the match before */
    for (size_t from = 0;;) {
        TRY(find_match(e, p, s, from, &start, &end));
        if (start == s->n) break;
        if (start == end && end == behind) {
            from += utf8_length(s->text + from, s->n - from);
            continue;
        }
        if (start > g.to) TRY(add_piece(e, k, s, &g, start, false));
        TRY(add_piece(e, k, s, &g, end, true));
        from = behind = end;
    }
    if (s->n > g.to) TRY(add_piece(e, k, s, &g, s->n, false));
    return flush_group(e, k, s, &g);
}

/* ---- running them ----------------------------------------------------------------------------------------------- */

static int run_rewritten(encoder *e, size_t k, const span *s) {
    rewritten *r = &e->work[k];
    TRY(rewrite(r, &e->t->steps[k], s));
    TRY(check_growth(r, e->n, e->t->file));
    span out = {r->text, r->n, r->origin, 0};
    return run(e, k + 1, &out);
}

static int run(encoder *e, size_t k, const span *s) {
    if (s->n == 0) return 0;
    if (k == e->t->n_steps) return tokenizer_merge_word(e, s);
    switch (e->t->steps[k].kind) {
    case STEP_LITERALS:
        return take_literals(e, &e->t->normalized, k + 1, s);
    case STEP_UTF8:
        return cut_utf8(e, k + 1, s);
    case STEP_SPLIT:
        return cut(e, k, s);
    default:
        return run_rewritten(e, k, s);
    }
}

int tokenizer_run(encoder *e, const char *text, size_t n) {
    span whole = {text, n, NULL, 0};
    e->n = n;
    return take_literals(e, &e->t->raw, 0, &whole);
}
