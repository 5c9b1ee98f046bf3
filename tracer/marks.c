#include "tracer/marks.h"
#include "base/err.h"
#include "base/mem.h"

#include <ctype.h>
#include <string.h>

void marks_free(marks *m) {
    mem_free(m->mark);
    *m = (marks){0};
}

void marked_steps_free(marked_steps *s) {
    mem_free(s->counted);
    mem_free(s->probes);
    *s = (marked_steps){0};
}

/* ---- reading ---------------------------------------------------------------------------------------------------- */

/* One mark as it stands in the text: {{NAME=words}} or {{NAME?words}}. */
typedef struct place {
    const char *open, *name, *words, *end; /* the first brace, what follows it, after '=' or '?', past the last brace */
} place;

static size_t name_length(const place *p) {
    return (size_t)(p->words - 1 - p->name);
}

static size_t line_of(const char *bytes, const char *at) {
    size_t line = 1;
    for (; bytes < at; bytes++) line += *bytes == '\n';
    return line;
}

static const char *find(const char *from, const char *end, const char *pair) {
    return from < end ? memmem(from, (size_t)(end - from), pair, 2) : NULL;
}

/* The next mark from `from` on; p->open is NULL where there is none. */
static int next_place(const char *bytes, const char *from, const char *end, place *p) {
    *p = (place){.open = find(from, end, "{{")};
    if (!p->open) return 0;
    size_t line = line_of(bytes, p->open);
    const char *at = p->name = p->open + 2;
    while (at < end && (isalnum((unsigned char)*at) || *at == '_' || *at == '-')) at++;
    if (at == end || (*at != '=' && *at != '?') || (*at == '=' && at == p->name))
        return err_set(ERR_DATA, "line %zu: a mark is {{NAME=words}}, {{NAME?words}} or {{?words}}", line);
    p->words = at + 1;
    const char *close = find(p->words, end, "}}"), *inner = find(p->words, close ? close : end, "{{");
    if (!close) return err_set(ERR_DATA, "line %zu: a mark has no end", line);
    if (inner) return err_set(ERR_DATA, "line %zu: a mark stands within another", line);
    if (close == p->words) return err_set(ERR_DATA, "line %zu: a mark holds no words", line);
    p->end = close + 2;
    return 0;
}

/* The fact of this name among the places read so far, or MARK_NONE. */
static int32_t find_fact(const marks *m, const place *places, const place *p) {
    size_t n = name_length(p);
    for (size_t k = 0; k < m->n && n; k++)
        if (!m->mark[k].is_answer && name_length(&places[k]) == n && memcmp(places[k].name, p->name, n) == 0)
            return (int32_t)k;
    return MARK_NONE;
}

static int add_mark(const char *bytes, const place *places, const place *p, text *plain, marks *m) {
    bool is_answer = p->words[-1] == '?';
    int32_t fact = find_fact(m, places, p);
    int name_n = (int)name_length(p);
    if (is_answer && fact == MARK_NONE && name_n)
        return err_set(ERR_DATA, "line %zu: the answer needs '%.*s', which is not stated before it",
                       line_of(bytes, p->open), name_n, p->name);
    if (!is_answer && fact != MARK_NONE)
        return err_set(ERR_DATA, "line %zu: '%.*s' is stated a second time", line_of(bytes, p->open), name_n, p->name);
    int64_t begin = (int64_t)plain->n;
    TRY(text_add_bytes(plain, p->words, (size_t)(p->end - 2 - p->words)));
    TRY(mem_grow((void **)&m->mark, &m->capacity, m->n + 1, sizeof *m->mark, "marks"));
    m->mark[m->n++] = (mark){begin, (int64_t)plain->n, is_answer, is_answer ? fact : MARK_NONE};
    return 0;
}

int marks_take(const char *bytes, size_t n, text *plain, marks *out) {
    const char *from = bytes, *end = bytes + n;
    place *places = NULL, p;
    size_t capacity = 0;
    int code;
    while (!(code = next_place(bytes, from, end, &p)) && p.open) {
        code = text_add_bytes(plain, from, (size_t)(p.open - from));
        if (!code) code = mem_grow((void **)&places, &capacity, out->n + 1, sizeof *places, "marks");
        if (!code) code = add_mark(bytes, places, &p, plain, out);
        if (code) break;
        places[out->n - 1] = p;
        from = p.end;
    }
    if (!code) code = text_add_bytes(plain, from, (size_t)(end - from));
    mem_free(places);
    return code;
}

/* ---- steps ------------------------------------------------------------------------------------------------------ */

static bool holds(const int64_t *offset, int32_t token, const mark *m) {
    return offset[token] < m->end && m->begin < offset[token + 1];
}

static int add_probe(marked_steps *s, int32_t entry, int32_t step) {
    TRY(mem_grow((void **)&s->probes, &s->capacity, 2 * (s->n_probes + 1), sizeof *s->probes, "probes"));
    s->probes[2 * s->n_probes] = entry;
    s->probes[2 * s->n_probes + 1] = step;
    s->n_probes++;
    return 0;
}

/* Count an answer's steps and have the first one need its fact's entries. */
static int add_answer(const marks *m, const mark *answer, const int64_t *offset, int32_t n_tokens, marked_steps *s) {
    int32_t first = -1;
    for (int32_t t = 0; t < n_tokens - 1; t++) {
        if (!holds(offset, t + 1, answer)) continue;
        s->counted[t] = 1;
        if (first < 0) first = t;
    }
    for (int32_t i = 0; i < first && answer->fact != MARK_NONE; i++)
        if (holds(offset, i, &m->mark[answer->fact])) TRY(add_probe(s, i, first));
    return 0;
}

int marks_steps(const marks *m, const int64_t *offset, int32_t n_tokens, int32_t n_prompt, marked_steps *out) {
    out->counted = mem_new((size_t)n_tokens, sizeof *out->counted, "counted steps");
    if (!out->counted) return ERR_DATA;
    for (size_t i = 0; i < m->n; i++)
        if (m->mark[i].is_answer) TRY(add_answer(m, &m->mark[i], offset, n_tokens, out));
    for (int32_t t = n_prompt; t < n_tokens - 1; t++)
        if (out->counted[t]) return 0;
    return err_set(ERR_DATA, "no answer is marked, such as {{NAME?words}} or {{?words}}, in the %d tokens after %s",
                   n_tokens - n_prompt, n_prompt ? "the prompt" : "the start");
}
