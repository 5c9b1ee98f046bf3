#include "tracer/texts.h"
#include "base/err.h"
#include "base/mem.h"

#include <string.h>
#include <xxhash.h>

static void free_sequence(text_sequence *s) {
    mem_free(s->name);
    mem_free(s->source);
    mem_free(s->id);
    mem_free(s->offset);
    text_free(&s->pieces);
    marked_steps_free(&s->steps);
}

void text_list_free(text_list *l) {
    for (size_t i = 0; i < l->n; i++) free_sequence(&l->item[i]);
    mem_free(l->item);
    *l = (text_list){0};
}

void text_list_drop(text_list *l, size_t i) {
    free_sequence(&l->item[i]);
    memmove(l->item + i, l->item + i + 1, (--l->n - i) * sizeof *l->item);
}

double texts_tokens(const text_list *l, size_t first) {
    double tokens = 0;
    for (size_t i = first; i < l->n; i++) tokens += (double)l->item[i].n;
    return tokens;
}

/* ---- tokens ----------------------------------------------------------------------------------------------------- */

/* A document as tokens, before it is cut. */
typedef struct tokenised {
    const document *d;
    text bytes; /* what offsets count */
    marks marks;
    token_list tokens; /* offset NULL: unknown */
    bool has_bos;      /* the first token is a BOS that belongs in front of every window */
} tokenised;

/* Pieces of ids one behind the other. */
static int add_pieces(const tokenizer *t, const int32_t *id, size_t n, text *bytes, int64_t *offset) {
    for (size_t i = 0; i < n; i++) {
        const char *piece;
        size_t length;
        tokenizer_piece(t, id[i], &piece, &length);
        TRY(text_add_bytes(bytes, piece, length));
        offset[i + 1] = (int64_t)bytes->n;
    }
    return 0;
}

static int take_ids(const tokenizer *t, tokenised *k) {
    token_list *l = &k->tokens;
    l->n = k->d->n_id;
    l->id = mem_new(l->n, sizeof *l->id, "token ids");
    if (!l->id) return ERR_DATA;
    memcpy(l->id, k->d->id, l->n * sizeof *l->id);
    if (!t) return 0;
    l->offset = mem_new(l->n + 1, sizeof *l->offset, "token ids");
    return l->offset ? add_pieces(t, l->id, l->n, &k->bytes, l->offset) : ERR_DATA;
}

/* What the tokenizer puts in front of any text; -1: nothing. */
static int added_bos(const tokenizer *t, int32_t *bos) {
    token_list none;
    TRY(tokenizer_encode(t, "", 0, false, &none));
    *bos = none.n ? none.id[0] : -1;
    token_list_free(&none);
    return 0;
}

static int encode(const text_ask *ask, const tokenizer *t, tokenised *k) {
    const text *words = &k->d->bytes;
    int32_t bos;
    if (ask->form == DOCUMENT_IDS) return take_ids(t, k);
    if (ask->marked) TRY(marks_take(words->data, words->n, &k->bytes, &k->marks));
    else TRY(text_add_bytes(&k->bytes, words->data, words->n));
    if (k->bytes.n == 0) return err_set(ERR_DATA, "the text is empty");
    TRY(added_bos(t, &bos));
    TRY(tokenizer_encode(t, k->bytes.data, k->bytes.n, ask->special || k->d->special, &k->tokens));
    k->has_bos = bos >= 0 && k->tokens.n && k->tokens.id[0] == bos;
    return 0;
}

static void free_tokenised(tokenised *k) {
    text_free(&k->bytes);
    marks_free(&k->marks);
    token_list_free(&k->tokens);
}

/* ---- windows ---------------------------------------------------------------------------------------------------- */

/* Tokens that hold bytes of the document's prompt. */
static int32_t prompt_tokens(const tokenised *k) {
    return k->d->has_prompt ? (int32_t)token_list_before(&k->tokens, (int64_t)k->d->prompt) : 0;
}

/* "name@512", where tokens are left out or windows made. */
static int add_name(const text_ask *ask, const char *name, int64_t first, char **out) {
    text t = {0};
    bool is_window = first || ask->stride;
    int code = text_add(&t, "%s", *name || !is_window ? name : "-");
    if (!code && is_window) code = text_add(&t, "@%lld", (long long)first);
    *out = t.data;
    return code;
}

/* A sequence of tokens begin .. begin+n-1, with a BOS that covers nothing in front where bos is one. */
static int copy_tokens(const tokenised *k, size_t begin, size_t n, int32_t bos, text_sequence *s) {
    size_t more = bos >= 0;
    s->n = s->n_given = n + more;
    s->id = mem_new(s->n, sizeof *s->id, "tokens");
    if (!s->id) return ERR_DATA;
    if (more) s->id[0] = bos;
    memcpy(s->id + more, k->tokens.id + begin, n * sizeof *s->id);
    if (!k->tokens.offset) return 0;
    s->offset = mem_new(s->n + 1, sizeof *s->offset, "tokens");
    if (!s->offset) return ERR_DATA;
    const int64_t *from = k->tokens.offset + begin;
    for (size_t i = 0; i <= n; i++) s->offset[i + more] = from[i] - from[0];
    return text_add_bytes(&s->pieces, k->bytes.data + from[0], (size_t)(from[n] - from[0]));
}

/* The sequence that begins with the document's token `first`, a BOS not counted, and has up to n more. */
static int add_sequence(const text_ask *ask, const tokenised *k, size_t first, size_t n, text_list *out) {
    TRY(mem_grow((void **)&out->item, &out->capacity, out->n + 1, sizeof *out->item, "texts"));
    text_sequence *s = &out->item[out->n++];
    *s = (text_sequence){.n_prompt = ask->prompt >= 0 ? (int32_t)ask->prompt : prompt_tokens(k)};
    TRY(add_name(ask, k->d->name, (int64_t)first, &s->name));
    TRY(add_name(ask, k->d->source, (int64_t)first, &s->source));
    if (first) TRY(copy_tokens(k, first + k->has_bos, n, k->has_bos ? k->tokens.id[0] : -1, s));
    else TRY(copy_tokens(k, 0, n + k->has_bos, -1, s));
    return 0;
}

static int cut_windows(const text_ask *ask, const tokenised *k, size_t body, size_t room, text_list *out) {
    size_t first = (size_t)ask->skip, n = 0, end = first;
    if (body - first < room) return add_sequence(ask, k, first, body - first, out);
    for (; first + room <= body && (!ask->windows || n < (size_t)ask->windows); first += (size_t)ask->stride, n++) {
        TRY(add_sequence(ask, k, first, room, out));
        end = first + room;
    }
    out->left_out += body - end;
    return 0;
}

static int cut(const text_ask *ask, const tokenised *k, text_list *out) {
    size_t body = k->tokens.n - k->has_bos, room = SIZE_MAX;
    if (ask->tokens) room = (size_t)ask->tokens > k->has_bos ? (size_t)ask->tokens - k->has_bos : 0;
    if (k->d->has_prompt && (ask->skip || ask->stride))
        return err_set(ERR_USAGE, "its prompt would be cut: --skip and --stride take texts without one");
    if (k->d->has_prompt && ask->generate && ask->tokens && body > room)
        return err_set(ERR_USAGE, "--tokens %lld would cut its prompt of %zu tokens", (long long)ask->tokens,
                       k->tokens.n);
    if (ask->skip && (size_t)ask->skip >= body)
        return err_set(ERR_USAGE, "--skip %lld leaves none of its %zu tokens", (long long)ask->skip, body);
    if (ask->stride) return cut_windows(ask, k, body, room, out);
    size_t left = body - (size_t)ask->skip;
    return add_sequence(ask, k, (size_t)ask->skip, left < room ? left : room, out);
}

/* ---- lengths ---------------------------------------------------------------------------------------------------- */

int texts_check(const text_ask *ask, const text_sequence *s) {
    if (s->n < 2) return err_set(ERR_DATA, "%s: %zu token; a trace needs at least 2", s->name, s->n);
    if (s->n_prompt <= (long long)s->n - 2) return 0;
    if (ask->prompt < 0)
        return err_set(ERR_DATA, "%s: a prompt of %d tokens leaves no step to count in %zu tokens", s->name,
                       s->n_prompt, s->n);
    return err_set(ERR_USAGE, "%s: --prompt %d leaves no step to count in %zu tokens (at most %zu)", s->name,
                   s->n_prompt, s->n, s->n - 2);
}

static int check_room(const text_ask *ask, const model *m, const text_sequence *s) {
    if (s->n + (size_t)ask->generate <= (size_t)m->n_context) return 0;
    if (ask->generate)
        return err_set(ERR_DATA, "%s: a prompt of %zu tokens and %d generated ones exceed this model's %d positions",
                       s->name, s->n, ask->generate, m->n_context);
    return err_set(ERR_DATA, "%s: %zu tokens exceed this model's %d positions (--tokens %d takes the first ones)",
                   s->name, s->n, m->n_context, m->n_context);
}

/* ---- documents -------------------------------------------------------------------------------------------------- */

static int mark_steps(const text_ask *ask, const tokenised *k, text_sequence *s) {
    if (!ask->marked) return 0;
    int code = marks_steps(&k->marks, s->offset, (int32_t)s->n, s->n_prompt, &s->steps);
    return code ? err_prefix(code, "%s", s->name) : 0;
}

static int take_document(const text_ask *ask, const model *m, const tokenizer *t, const document *d, text_list *out) {
    tokenised k = {.d = d};
    size_t before = out->n;
    int code = encode(ask, t, &k);
    if (!code) code = cut(ask, &k, out);
    if (code) err_prefix(code, "%s", d->name);
    for (size_t i = before; i < out->n && !code; i++) {
        code = check_room(ask, m, &out->item[i]);
        if (!code && !ask->generate) code = texts_check(ask, &out->item[i]);
        if (!code) code = mark_steps(ask, &k, &out->item[i]);
    }
    free_tokenised(&k);
    return code;
}

static int check_stdin(const text_ask *ask) {
    int times = 0;
    for (size_t i = 0; i < ask->n_paths; i++) times += strcmp(ask->path[i], "-") == 0;
    return times < 2 ? 0 : err_set(ERR_USAGE, "standard input ('-') can be only one of the texts");
}

int texts_read(const text_ask *ask, const model *m, const tokenizer *t, text_list *out) {
    TRY(check_stdin(ask));
    for (size_t i = 0; i < ask->n_paths; i++) {
        const document_ask what = {ask->form, ask->generate > 0, m, t, ask->date};
        document_list docs = {0};
        int code = documents_read(ask->path[i], &what, &docs);
        for (size_t k = 0; k < docs.n && !code; k++) code = take_document(ask, m, t, &docs.item[k], out);
        document_list_free(&docs);
        TRY(code);
    }
    return 0;
}

int texts_append(const text_ask *ask, const tokenizer *t, const int32_t *id, size_t n, text_sequence *s) {
    size_t ids = s->n, offsets = s->n + 1;
    if (ask->prompt < 0) s->n_prompt = (int32_t)s->n;
    TRY(mem_grow((void **)&s->id, &ids, s->n + n, sizeof *s->id, "tokens"));
    TRY(mem_grow((void **)&s->offset, &offsets, s->n + n + 1, sizeof *s->offset, "tokens"));
    if (n) memcpy(s->id + s->n, id, n * sizeof *id);
    TRY(add_pieces(t, id, n, &s->pieces, s->offset + s->n));
    s->n += n;
    return 0;
}

/* ---- their hash ------------------------------------------------------------------------------------------------- */

uint64_t texts_hash(const text_list *l) {
    uint64_t hash = l->n;
    for (size_t i = 0; i < l->n; i++) {
        const text_sequence *s = &l->item[i];
        const struct {
            const void *bytes;
            size_t n;
        } parts[] = {
            {&s->n_prompt, sizeof s->n_prompt},
            {s->source, strlen(s->source)},
            {s->id, s->n * sizeof *s->id},
            {s->offset, s->offset ? (s->n + 1) * sizeof *s->offset : 0},
            {s->pieces.data, s->pieces.n},
            {s->steps.counted, s->steps.counted ? s->n - 1 : 0},
            {s->steps.probes, 2 * s->steps.n_probes * sizeof *s->steps.probes},
        };
        for (size_t k = 0; k < sizeof parts / sizeof *parts; k++)
            hash = XXH3_64bits_withSeed(parts[k].bytes ? parts[k].bytes : "", parts[k].n, hash ^ parts[k].n);
    }
    return hash;
}
