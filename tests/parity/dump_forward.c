/* dump_forward MODEL.gguf TOKENS.i32 OUT.f32 [EVICT.i32]: one forward pass over the token ids of a raw file, masked by
 * the lifetimes [n_layer][n_kv_head][T] of another, and what it computed before anything is packed, for
 * tests/parity/logits.py and masked.py: logits [T][n_vocab], attention rows [n_layer][n_head][T][T], lse
 * [n_layer][n_head][T], one behind the other. For short texts: everything is held in memory. */
#include "base/err.h"
#include "base/mem.h"
#include "tracer/cpu/cpu.h"
#include "traces/kernels.h"

#include <stdio.h>
#include <string.h>

typedef struct dump {
    const model *m;
    size_t T;
    float *logits, *rows, *lse;
} dump;

static int take_rows(void *context, int layer, int head, int32_t row0, int32_t n, const float *p, size_t stride) {
    const dump *d = context;
    float *to = d->rows + ((size_t)layer * (size_t)d->m->n_head + (size_t)head) * d->T * d->T;
    size_t cols = (size_t)(row0 + n);
    for (size_t r = 0; r < (size_t)n; r++) memcpy(to + ((size_t)row0 + r) * d->T, p + r * stride, cols * sizeof *to);
    return 0;
}

static int take_layer(void *context, int layer, const layer_capture *c) {
    const dump *d = context;
    size_t n = (size_t)d->m->n_head * d->T;
    memcpy(d->lse + (size_t)layer * n, c->lse, n * sizeof *d->lse);
    return 0;
}

static int take_logits(void *context, int32_t row0, int32_t n, float *logits, size_t stride) {
    const dump *d = context;
    size_t n_vocab = (size_t)d->m->n_vocab;
    for (size_t r = 0; r < (size_t)n; r++)
        memcpy(d->logits + ((size_t)row0 + r) * n_vocab, logits + r * stride, n_vocab * sizeof *logits);
    return 0;
}

static int read_tokens(const char *path, const model *m, int32_t **tokens, size_t *n) {
    FILE *in = fopen(path, "rb");
    if (!in) return err_set(ERR_DATA, "%s: cannot be opened", path);
    size_t capacity = 1 << 20;
    *tokens = mem_new(capacity, sizeof **tokens, "tokens");
    *n = *tokens ? fread(*tokens, sizeof **tokens, capacity, in) : 0;
    fclose(in);
    for (size_t i = 0; i < *n; i++)
        if ((*tokens)[i] < 0 || (*tokens)[i] >= m->n_vocab) return err_set(ERR_DATA, "%s: token %zu", path, i);
    return *n ? 0 : err_set(ERR_DATA, "%s: no tokens", path);
}

/* Lifetimes, padded as the backend wants them. */
static int read_lifetimes(const char *path, const model *m, size_t T, int32_t **evict_at) {
    size_t units = (size_t)m->n_layer * (size_t)m->n_kv_head, stride = kernel_pad(T), n = 0;
    FILE *in = fopen(path, "rb");
    *evict_at = mem_new(units * stride, sizeof **evict_at, "lifetimes");
    if (!in || !*evict_at) return err_set(ERR_DATA, "%s: cannot be opened", path);
    for (size_t u = 0; u < units; u++) n += fread(*evict_at + u * stride, sizeof **evict_at, T, in);
    fclose(in);
    return n == units * T ? 0 : err_set(ERR_DATA, "%s: %zu lifetimes, want %zu", path, n, units * T);
}

static int run(char **argv) {
    dump d;
    pool *p;
    model *m;
    backend_state *s;
    int32_t *tokens = NULL, *evict_at = NULL;
    TRY(pool_new(0, &p));
    TRY(model_open(argv[1], &m));
    TRY(cpu_backend.load(m, p, &cpu_options, &s));
    TRY(read_tokens(argv[2], m, &tokens, &d.T));
    if (argv[4]) TRY(read_lifetimes(argv[4], m, d.T, &evict_at));
    size_t heads = (size_t)m->n_layer * (size_t)m->n_head, n_logits = d.T * (size_t)m->n_vocab;
    size_t n = n_logits + heads * d.T * d.T + heads * d.T;
    d.m = m;
    d.logits = mem_new(n, sizeof(float), "dump");
    if (!d.logits) return ERR_DATA;
    d.rows = d.logits + n_logits;
    d.lse = d.rows + heads * d.T * d.T;
    forward_sink sink = {.context = &d, .rows = take_rows, .layer = take_layer, .logits = take_logits};
    TRY(cpu_backend.forward(s, tokens, (int32_t)d.T, evict_at, &sink));
    FILE *out = fopen(argv[3], "wb");
    if (!out || fwrite(d.logits, sizeof(float), n, out) != n || fclose(out))
        return err_set(ERR_DATA, "%s: cannot be written", argv[3]);
    return 0;
}

int main(int argc, char **argv) {
    if (argc != 4 && argc != 5)
        return fprintf(stderr, "usage: dump_forward MODEL.gguf TOKENS.i32 OUT.f32 [EVICT.i32]\n"), 2;
    int code = run(argv);
    if (code) fprintf(stderr, "dump_forward: %s\n", err_message());
    return code;
}
