#include "sim/journal.h"
#include "base/err.h"
#include "base/mem.h"

#include <string.h>

int journal_open(const char *path, const char *command, const char *binding, journal **out) {
    static const partial_kind kind = {.magic = "kvlag journal v1\n",
                                      .piece = "configuration",
                                      .bound_to = "traces, calibration, lifetimes, shard or version"};
    return partial_open(path, &kind, command, binding, out);
}

/* ---- records ---------------------------------------------------------------------------------------------------- */

typedef struct span {
    void **at; /* the result's pointer */
    size_t bytes;
} span;
enum { SPANS = 5 };

/* The arrays that a result owns: a new one in sweep_result belongs here too; plain fields travel by themselves. */
static void list_spans(const journal_shape *s, sweep_result *r, span out[SPANS]) {
    size_t priced = s->loss ? s->heads * sizeof(float) : 0, samples = s->loss ? s->n_fisher * BLOCKS_PER_ROW : 0;
    out[0] = (span){(void **)&r->head_lost_mass, s->heads * sizeof(float)};
    out[1] = (span){(void **)&r->head_first, priced};
    out[2] = (span){(void **)&r->head_fisher, priced};
    out[3] = (span){(void **)&r->block_fisher, samples * sizeof(double)};
    out[4] = (span){(void **)&r->evict_at, s->lifetimes * sizeof(int32_t)};
}

static size_t record_bytes(const span spans[SPANS]) {
    size_t bytes = sizeof(sweep_result);
    for (int i = 0; i < SPANS; i++) bytes += spans[i].bytes;
    return bytes;
}

static int unpack(const char *from, const span spans[SPANS], sweep_result *out) {
    memcpy(out, from, sizeof *out);
    from += sizeof *out;
    for (int i = 0; i < SPANS; i++) *spans[i].at = NULL;
    for (int i = 0; i < SPANS; i++) {
        if (!spans[i].bytes) continue;
        if (!(*spans[i].at = mem_new(spans[i].bytes, 1, "results"))) return ERR_DATA;
        memcpy(*spans[i].at, from, spans[i].bytes);
        from += spans[i].bytes;
    }
    return 0;
}

int journal_take(journal *j, const journal_shape *shape, sweep_result *out, bool *found) {
    span spans[SPANS];
    const void *bytes;
    size_t n;
    list_spans(shape, out, spans);
    *out = (sweep_result){0};
    *found = false;
    TRY(partial_read(j, record_bytes(spans), &bytes, &n));
    *found = bytes != NULL;
    return bytes ? unpack(bytes, spans, out) : 0;
}

int journal_append(journal *j, const journal_shape *shape, const sweep_result *r) {
    sweep_result copy = *r;
    span spans[SPANS];
    partial_part parts[1 + SPANS] = {{&copy, sizeof copy}};
    list_spans(shape, &copy, spans);
    for (int i = 0; i < SPANS; i++) {
        parts[1 + i] = (partial_part){*spans[i].at, spans[i].bytes};
        *spans[i].at = NULL; /* addresses mean nothing to whoever reads this */
    }
    int code = partial_append(j, parts, 1 + SPANS);
    if (!code) return 0;
    char why[ERR_MESSAGE_MAX];
    strcpy(why, err_message());
    return err_set(code, "%s; %zu finished configurations stay in it for --resume", why, partial_tell(j).n);
}

int journal_sync(journal *j) {
    return partial_sync(j);
}

/* ---- closing ---------------------------------------------------------------------------------------------------- */

void journal_remove(journal *j) {
    partial_remove(j);
}

void journal_keep(journal *j) {
    partial_keep(j);
}
