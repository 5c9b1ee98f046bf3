/* Literals, found by narrowing a sorted list byte by byte: what a search costs depends on how long the literals are
 * that begin like the text, not on how many there are (Gemma has 6400). */
#include "base/err.h"
#include "base/mem.h"
#include "tracer/tokenizer_parts.h"

#include <stdlib.h>
#include <string.h>

static int compare(const void *x, const void *y) {
    const token_text *a = &((const tokenizer_literal *)x)->text, *b = &((const tokenizer_literal *)y)->text;
    int order = memcmp(a->text, b->text, a->n < b->n ? a->n : b->n);
    return order ? order : (a->n > b->n) - (a->n < b->n);
}

static int take(literal_set *set, const tokenizer_literal *from) {
    if (from->text.n == 0) return 0;
    tokenizer_literal *l = &set->literal[set->n];
    *l = *from;
    l->text.text = mem_string_n(from->text.text, from->text.n);
    if (!l->text.text) return ERR_DATA;
    set->n++;
    return 0;
}

int tokenizer_read_literals(literal_set *set, const tokenizer_facts *f, bool normalized) {
    set->literal = mem_new(f->n_literals, sizeof *set->literal, "literals");
    if (!set->literal) return ERR_DATA;
    for (size_t i = 0; i < f->n_literals; i++)
        if (f->literals[i].normalized == normalized) TRY(take(set, &f->literals[i]));
    qsort(set->literal, set->n, sizeof *set->literal, compare);
    for (size_t k = 0; k < set->n; k++) {
        const tokenizer_literal *l = &set->literal[k];
        if (k && compare(l - 1, l) == 0)
            return err_set(ERR_DATA, "%s: tokens %d and %d are both '%.*s'", f->file, (int)l[-1].id, (int)l->id,
                           (int)(l->text.n < 60 ? l->text.n : 60), l->text.text);
        set->first[(unsigned char)*l->text.text + 1]++;
    }
    for (int b = 0; b < 256; b++) set->first[b + 1] += set->first[b];
    return 0;
}

void tokenizer_free_literals(literal_set *set) {
    for (size_t i = 0; i < set->n; i++) mem_free((char *)set->literal[i].text.text);
    mem_free(set->literal);
}

/* The first of literals from..to-1, which agree in `depth` bytes and are longer, whose next byte is at least `byte`. */
static size_t lower(const literal_set *set, size_t from, size_t to, size_t depth, unsigned byte) {
    while (from < to) {
        size_t middle = from + (to - from) / 2;
        if ((unsigned char)set->literal[middle].text.text[depth] < byte) from = middle + 1;
        else to = middle;
    }
    return from;
}

const tokenizer_literal *tokenizer_literal_at(const literal_set *set, const char *text, size_t n, bool special) {
    const tokenizer_literal *found = NULL;
    size_t from = set->first[(unsigned char)*text], to = set->first[(unsigned char)*text + 1];
    for (size_t depth = 1; from < to; depth++) {
        const tokenizer_literal *l = &set->literal[from];
        if (l->text.n == depth) { /* the shortest comes first */
            if (special || !l->control) found = l;
            from++;
        }
        if (depth == n) break;
        unsigned byte = (unsigned char)text[depth];
        from = lower(set, from, to, depth, byte);
        to = lower(set, from, to, depth, byte + 1);
    }
    return found;
}
