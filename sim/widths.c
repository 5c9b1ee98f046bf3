#include "sim/widths.h"
#include "base/err.h"
#include "sim/quantise.h"

#include <string.h>

/* ---- what is asked ---------------------------------------------------------------------------------------------- */

/* A list of widths without repetition. */
static int parse_bits(const char *option, const char *source, int out[KV_WIDTHS], size_t *n) {
    static const int known[KV_WIDTHS] = {16, 8, 4};
    static const char *const names[KV_WIDTHS] = {"16", "8", "4"};
    *n = 0;
    for (const char *s = source;; s++) {
        size_t length = strcspn(s, ","), k = 0, i = 0;
        while (k < KV_WIDTHS && (strlen(names[k]) != length || strncmp(s, names[k], length) != 0)) k++;
        if (k == KV_WIDTHS)
            return err_set(ERR_USAGE, "--%s: '%.*s' is not one of 16, 8 (q8_0), 4 (q4_0)", option, (int)length, s);
        while (i < *n && out[i] != known[k]) i++;
        if (i == *n) out[(*n)++] = known[k];
        s += length;
        if (!*s) return 0;
    }
}

int kv_bits_parse(const char *entry, const char *pending, kv_bits_list *out) {
    int entries[KV_WIDTHS], pendings[KV_WIDTHS];
    size_t n_entries, n_pendings = 0;
    out->n = 0;
    TRY(parse_bits("kv-bits", entry ? entry : "16", entries, &n_entries));
    if (pending) TRY(parse_bits("pending-bits", pending, pendings, &n_pendings));
    for (size_t i = 0; i < n_entries; i++) {
        if (!pending) out->item[out->n++] = (kv_bits){entries[i], entries[i]};
        for (size_t k = 0; k < n_pendings; k++) out->item[out->n++] = (kv_bits){entries[i], pendings[k]};
    }
    return 0;
}

bool kv_bits_plain(const kv_bits_list *list) {
    return list->n == 1 && list->item[0].entry == 16 && list->item[0].pending == 16;
}

bool kv_bits_apply(const kv_bits_list *list, size_t index, sim_config *c) {
    const kv_bits *item = &list->item[index];
    c->kv_bits = item->entry;
    c->pending_bits = c->waits ? item->pending : item->entry;
    for (size_t i = 0; i < index && !c->waits; i++)
        if (list->item[i].entry == item->entry) return false;
    return true;
}

/* Bits of the youngest entries. */
static int young_bits(const sim_config *c) {
    return c->hold > 0 ? c->pending_bits : c->kv_bits;
}

bool kv_bits_quantised(const sim_config *c) {
    return c->kv_bits != 16 || young_bits(c) != 16;
}

bool kv_bits_same(const sim_config *a, const sim_config *b) {
    if (a->kv_bits != b->kv_bits || young_bits(a) != young_bits(b)) return false;
    return young_bits(a) == a->kv_bits || a->hold == b->hold;
}

int kv_bits_check(const trace *t, size_t seq, trace_form form, const sim_config *c) {
    const trace_sequence *s = trace_get_sequence(t, seq);
    if (!kv_bits_quantised(c)) return 0;
    if (form == TRACE_DENSE)
        return err_set(ERR_USAGE, "--kv-bits and --pending-bits quantise keys and values: they need the factored form");
    if (!s->has_factored || !s->has_v)
        return err_set(ERR_DATA, "%s: trace has no %s, which %d bits need (trace again with --attention factored)",
                       trace_path(t), s->has_factored ? "attn/v" : "attn/q and attn/k",
                       c->kv_bits != 16 ? c->kv_bits : c->pending_bits);
    return 0;
}

/* ---- the open layer --------------------------------------------------------------------------------------------- */

void widths_want(widths *w, const sim_config *c) {
    if (!kv_bits_quantised(c)) return;
    w->of[kv_width(c->kv_bits)].wanted = w->of[kv_width(young_bits(c))].wanted = true;
    w->n = 0;
    for (int k = 0; k < KV_WIDTHS; k++) w->n += w->of[k].wanted;
}

void widths_carve(mem_carver *m, widths *w) {
    size_t kv = (size_t)w->m->n_kv_head, dim = (size_t)w->m->head_dim, cells = kv * w->stride * dim;
    for (int k = 0; k < KV_WIDTHS; k++) {
        layer_width *of = &w->of[k];
        of->keys = mem_carve(m, of->wanted ? cells : 0, sizeof *of->keys);
        of->values = mem_carve(m, of->wanted && w->gradients ? cells : 0, sizeof *of->values);
    }
    w->plain = mem_carve(m, w->n ? kv * (size_t)w->n_tokens * dim : 0, sizeof *w->plain);
}

typedef struct fill_job {
    widths *w;
    const trace_layer *l;
    int width;
} fill_job;

/* A head's vectors as they read at a width, plainly. */
static int quantise_head(const fill_job *j, const char *what, const float *from, size_t head) {
    static const int bits[KV_WIDTHS] = {16, 8, 4};
    const widths *w = j->w;
    size_t dim = (size_t)w->m->head_dim, tokens = (size_t)w->n_tokens;
    float *to = w->plain + head * tokens * dim;
    for (size_t i = 0; i < tokens; i++)
        if (!quantise(bits[j->width], from + i * dim, dim, to + i * dim))
            return err_set(ERR_DATA, "attn/%s: kv head %zu, row %zu: the scale of %d bits overflows f16", what, head, i,
                           bits[j->width]);
    return 0;
}

static int fill_task(void *context, size_t head, int worker) {
    (void)worker;
    const fill_job *j = context;
    const widths *w = j->w;
    const layer_width *of = &w->of[j->width];
    size_t dim = (size_t)w->m->head_dim, tokens = (size_t)w->n_tokens;
    const float *plain = w->plain + head * tokens * dim;
    TRY(quantise_head(j, "k", trace_layer_k(j->l, (int)head), head));
    kernels()->pack_keys(plain, tokens, dim, of->keys + head * w->stride * dim);
    TRY(quantise_head(j, "v", trace_layer_v(j->l, (int)head), head));
    if (w->gradients) kernels()->pack_keys(plain, tokens, dim, of->values + head * w->stride * dim);
    return 0;
}

int widths_open(widths *w, trace_layer *l, int (*fixed)(void *context, const float *v, estimate_streams *out),
                void *context, pool *p) {
    if (!w->n) return 0;
    TRY(trace_layer_load_k(l, p));
    for (int k = 0; k < KV_WIDTHS; k++) {
        if (!w->of[k].wanted) continue;
        fill_job j = {w, l, k};
        TRY(pool_run(p, (size_t)w->m->n_kv_head, fill_task, &j));
        TRY(fixed(context, w->plain, &w->of[k].fixed));
    }
    return 0;
}

void widths_close(widths *w) {
    for (int k = 0; k < KV_WIDTHS; k++) estimate_streams_free(&w->of[k].fixed);
}
