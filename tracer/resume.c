#include "tracer/resume.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/partial.h"
#include "base/progress.h"
#include "base/text.h"
#include "traces/writer_calls.h"

#include <inttypes.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

typedef enum record_kind { RECORD_ANSWER, RECORD_CALL, RECORD_END } record_kind;

struct resume {
    partial *file;
    partial_place finished; /* behind the last answer or sequence that is whole */
    size_t answers, sequences;
    trace_tap tap;
};

/* ---- what it is bound to ---------------------------------------------------------------------------------------- */

/* Weights are hashed where they lie; rows of one tensor that several weights share, once. */
static uint64_t hash_weight(const model_weight *w, uint64_t hash) {
    return w->tensor && !w->row0 ? XXH3_64bits_withSeed(w->tensor->data, w->tensor->bytes, hash) : hash;
}

static uint64_t hash_model(const model *m) {
    const double numbers[] = {m->n_layer, m->n_head,    m->n_kv_head, m->head_dim,       m->n_embd,        m->n_ff,
                              m->n_vocab, m->norm_eps,  m->scale,     m->softcap,        m->logit_softcap, m->rope_dims,
                              m->n_rope,  m->n_context, m->rope_kind, m->embedding_scale};
    uint64_t hash = XXH3_64bits(numbers, sizeof numbers);
    hash = XXH3_64bits_withSeed(m->rope_text, strlen(m->rope_text), hash);
    hash = XXH3_64bits_withSeed(m->arch->name, strlen(m->arch->name), hash);
    hash = XXH3_64bits_withSeed(m->name, strlen(m->name), hash);
    hash = XXH3_64bits_withSeed(m->window, (size_t)m->n_layer * sizeof *m->window, hash);
    const model_weight *outside[] = {&m->embedding, &m->positions, &m->output_norm, &m->output_norm_bias, &m->output};
    for (size_t i = 0; i < sizeof outside / sizeof *outside; i++)
        if (i == 0 || outside[i]->tensor != m->embedding.tensor) hash = hash_weight(outside[i], hash);
    for (int32_t i = 0; i < m->n_rope; i++)
        hash = XXH3_64bits_withSeed(m->rope[i].inverse, (size_t)(m->rope_dims / 2) * sizeof(double), hash);
    for (int32_t layer = 0; layer < m->n_layer; layer++)
        for (int slot = 0; slot < SLOT_COUNT; slot++) hash = hash_weight(&m->layer[layer].weight[slot], hash);
    return hash;
}

static int path_of(const char *out, text *path) {
    return text_add(path, "%s.partial", out);
}

/* ---- opening ---------------------------------------------------------------------------------------------------- */

/* Find what is finished and give up the rest. */
static int scan(resume *r) {
    partial_place start = partial_tell(r->file);
    r->finished = start;
    for (;;) {
        const void *record;
        size_t n;
        uint64_t kind;
        TRY(partial_read(r->file, 0, &record, &n));
        if (!record || n < sizeof kind) break;
        memcpy(&kind, record, sizeof kind);
        r->answers += kind == RECORD_ANSWER;
        r->sequences += kind == RECORD_END;
        if (kind != RECORD_CALL) r->finished = partial_tell(r->file);
    }
    TRY(partial_go(r->file, r->finished, true));
    return partial_go(r->file, start, false);
}

static int open_file(resume *r, const char *path, const char *command, const model *m, const text_list *texts,
                     const char *place) {
    static const partial_kind kind = {.magic = "kvlag trace journal v1\n",
                                      .piece = "text",
                                      .bound_to = "texts, weights, backend, processor or version"};
    text binding = {0};
    int code = text_add(&binding, "kvlag " KVLAG_VERSION ", %zu texts %016" PRIx64 ", model %016" PRIx64 ", %s",
                        texts->n, texts_hash(texts), hash_model(m), place);
    if (!code) code = partial_open(path, &kind, command, binding.data, &r->file);
    text_free(&binding);
    return code ? code : scan(r);
}

int resume_open(const char *out, const char *command, const model *m, const text_list *texts, const char *place,
                resume **r) {
    text path = {0};
    *r = mem_new(1, sizeof **r, "journal");
    if (!*r) return ERR_DATA;
    int code = path_of(out, &path);
    if (!code) code = open_file(*r, path.data, command, m, texts, place);
    text_free(&path);
    if (!code) return 0;
    partial_keep((*r)->file);
    mem_free(*r);
    *r = NULL;
    return code;
}

int resume_mention(const char *out) {
    text path = {0};
    int code = path_of(out, &path);
    if (!code && access(path.data, F_OK) == 0)
        say("%s: unfinished work of an earlier run stays there; --resume takes it up", path.data);
    text_free(&path);
    return code;
}

size_t resume_answers(const resume *r) {
    return r->answers;
}

size_t resume_sequences(const resume *r) {
    return r->sequences;
}

/* ---- taking up -------------------------------------------------------------------------------------------------- */

/* The next record and what follows its kind. */
static int take(resume *r, uint64_t *kind, const char **bytes, size_t *n) {
    const void *record;
    TRY(partial_read(r->file, 0, &record, n));
    if (!record || *n < sizeof *kind) return err_set(ERR_DATA, "%s: it changed meanwhile", partial_path(r->file));
    memcpy(kind, record, sizeof *kind);
    *bytes = (const char *)record + sizeof *kind;
    *n -= sizeof *kind;
    return 0;
}

static int out_of_order(const resume *r) {
    return err_set(ERR_DATA, "%s: its records are of other work; remove it", partial_path(r->file));
}

int resume_take_answer(resume *r, int32_t *id, size_t room, size_t *n) {
    uint64_t kind;
    const char *bytes;
    size_t size;
    TRY(take(r, &kind, &bytes, &size));
    *n = size / sizeof *id;
    if (kind != RECORD_ANSWER || *n > room) return out_of_order(r);
    memcpy(id, bytes, *n * sizeof *id);
    return 0;
}

int resume_take_sequence(resume *r, trace_writer *w, uint64_t *logits_hash) {
    for (;;) {
        uint64_t kind;
        const char *bytes;
        size_t n;
        TRY(take(r, &kind, &bytes, &n));
        if (kind == RECORD_END && n == sizeof *logits_hash) {
            memcpy(logits_hash, bytes, n);
            return 0;
        }
        if (kind != RECORD_CALL) return out_of_order(r);
        TRY(trace_writer_repeat(w, bytes, n));
    }
}

/* ---- adding ----------------------------------------------------------------------------------------------------- */

static int add(resume *r, record_kind kind, const partial_part *parts, size_t n) {
    uint64_t what = kind;
    partial_part all[1 + TRACE_TAP_PARTS] = {{&what, sizeof what}};
    for (size_t i = 0; i < n; i++) all[i + 1] = parts[i];
    int code = partial_append(r->file, all, n + 1);
    if (!code) return 0;
    char why[ERR_MESSAGE_MAX];
    strcpy(why, err_message());
    return err_set(code, "%s; %zu finished answers and %zu texts stay in it for --resume", why, r->answers,
                   r->sequences);
}

int resume_add_answer(resume *r, const int32_t *id, size_t n) {
    TRY(partial_go(r->file, r->finished, true));
    TRY(add(r, RECORD_ANSWER, &(partial_part){id, n * sizeof *id}, 1));
    r->answers++;
    r->finished = partial_tell(r->file);
    return partial_sync(r->file);
}

static int add_call(void *context, const partial_part *parts, size_t n) {
    return add(context, RECORD_CALL, parts, n);
}

int resume_begin_sequence(resume *r, trace_writer *w) {
    r->tap = (trace_tap){add_call, r};
    trace_writer_tap(w, &r->tap);
    return partial_go(r->file, r->finished, true);
}

int resume_end_sequence(resume *r, trace_writer *w, uint64_t logits_hash) {
    trace_writer_tap(w, NULL);
    TRY(add(r, RECORD_END, &(partial_part){&logits_hash, sizeof logits_hash}, 1));
    r->sequences++;
    r->finished = partial_tell(r->file);
    return partial_sync(r->file);
}

/* ---- closing ---------------------------------------------------------------------------------------------------- */

void resume_remove(resume *r) {
    if (!r) return;
    partial_remove(r->file);
    mem_free(r);
}

void resume_keep(resume *r) {
    if (!r) return;
    partial_go(r->file, r->finished, true);
    partial_keep(r->file);
    mem_free(r);
}
