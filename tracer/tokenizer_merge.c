/* One word to tokens: the best pair of neighbours joins, again and again. Candidates wait in a heap and the parts are a
 * linked list, so a word of n characters takes n log n steps, whatever stands in it. */
#include "base/err.h"
#include "base/mem.h"
#include "base/utf8.h"
#include "tracer/tokenizer_parts.h"

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

/* The rank at which the part at `at` joins the next one, 0 if it does not, and the token that it becomes. Scores care
 * only for the text of both together: its characters need not be tokens themselves. */
static uint32_t pair_rank(const encoder *e, const span *word, uint32_t at, int32_t *joined) {
    const tokenizer *t = e->t;
    const part *p = &e->parts[at];
    if (t->kind != TOKENIZER_SCORES) {
        const merge *m = tokenizer_merge_slot(t, p->id, e->parts[p->next].id);
        *joined = m->joined;
        return m->rank;
    }
    if (p->id < 0 || p->next == word->n) return 0;
    size_t n = e->parts[p->next].next - at;
    *joined = n > t->longest ? -1 : tokenizer_find(t, word->text + at, n);
    return *joined < 0 ? 0 : t->ranks[*joined];
}

static int push_pair(encoder *e, const span *word, uint32_t at) {
    int32_t joined;
    uint32_t rank = pair_rank(e, word, at, &joined);
    return rank ? heap_push(e, (uint64_t)rank << 32 | at) : 0;
}

/* Apply the best merge until none is left. A candidate whose parts changed meanwhile no longer has its rank. */
static int merge_parts(encoder *e, const span *word) {
    part *parts = e->parts;
    for (uint32_t i = 0; i < word->n; i = parts[i].next) TRY(push_pair(e, word, i));
    while (e->n_heap) {
        uint64_t candidate = heap_pop(e);
        uint32_t at = (uint32_t)candidate, next = parts[at].next;
        int32_t joined;
        if (pair_rank(e, word, at, &joined) != candidate >> 32) continue;
        parts[at].id = joined;
        parts[at].next = parts[next].next;
        parts[parts[next].next].previous = at;
        parts[next].id = -1;
        TRY(push_pair(e, word, at));
        TRY(push_pair(e, word, parts[at].previous));
    }
    return 0;
}

static int byte_token(const encoder *e, const span *word, size_t i, int32_t *id) {
    unsigned char byte = (unsigned char)word->text[i];
    *id = e->t->byte_id[byte];
    if (*id >= 0) return 0;
    return err_set(ERR_DATA, "%s: its vocabulary has no token for byte 0x%02x (byte %u of the text)", e->t->file, byte,
                   span_origin(word, i));
}

/* Parts of `length` bytes each, from byte i on. */
static void add_part(encoder *e, uint32_t i, uint32_t length, int32_t id, uint32_t *last, uint32_t n) {
    e->parts[i] = (part){id, *last, i + length};
    *last = i;
    e->parts[n].previous = i;
}

/* Bytes; or characters, and of those that the vocabulary lacks the bytes. With scores such a character is a part, since
 * it may be half of a token, and becomes bytes only where it stays alone. */
static int first_parts(encoder *e, const span *word) {
    const tokenizer *t = e->t;
    uint32_t n = (uint32_t)word->n, last = n;
    e->parts[n] = (part){-1, n, n};
    for (uint32_t i = 0; i < n;) {
        uint32_t length = t->kind == TOKENIZER_BYTES ? 1 : (uint32_t)utf8_length(word->text + i, n - i);
        int32_t id = -1;
        if (t->kind == TOKENIZER_SCORES) id = 0;
        else if (t->kind == TOKENIZER_CHARS && length) id = tokenizer_find(t, word->text + i, length);
        if (id >= 0) add_part(e, i, length ? length : 1, id, &last, n);
        for (uint32_t k = i; id < 0 && k < i + (length ? length : 1); k++) {
            int32_t byte;
            TRY(byte_token(e, word, k, &byte));
            add_part(e, k, 1, byte, &last, n);
        }
        i += length ? length : 1;
    }
    return 0;
}

static int emit_part(encoder *e, const span *word, uint32_t from, uint32_t to) {
    int32_t id = e->parts[from].id;
    if (e->t->kind == TOKENIZER_SCORES) id = tokenizer_find(e->t, word->text + from, to - from);
    if (id >= 0) return tokenizer_emit(e, id, span_origin(word, from));
    for (uint32_t i = from; i < to; i++) {
        TRY(byte_token(e, word, i, &id));
        TRY(tokenizer_emit(e, id, span_origin(word, i)));
    }
    return 0;
}

int tokenizer_merge_word(encoder *e, const span *word) {
    if (word->n >= UINT32_MAX) return err_set(ERR_DATA, "a word of %zu bytes is too long", word->n);
    if (e->t->whole_words) {
        int32_t id = tokenizer_find(e->t, word->text, word->n);
        if (id >= 0) return tokenizer_emit(e, id, span_origin(word, 0));
    }
    TRY(mem_grow((void **)&e->parts, &e->parts_capacity, word->n + 1, sizeof *e->parts, "word"));
    TRY(first_parts(e, word));
    TRY(merge_parts(e, word));
    for (uint32_t i = 0; i < word->n; i = e->parts[i].next) TRY(emit_part(e, word, i, e->parts[i].next));
    return 0;
}
