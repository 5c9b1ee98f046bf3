/* dump_gradients MODEL.gguf TOKENS.i32 N_PROMPT SAMPLES OUT: the gradients of one pass over the token ids of a raw file
 * before anything is packed, for tests/parity/gradients.py: labels i32 [SAMPLES][T-1], then gradients f32
 * [1 + SAMPLES][n_layer][T][n_head * head_dim]. Seed 0, sequence 0. */
#include "base/err.h"
#include "base/mem.h"
#include "tracer/cpu/cpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS_MAX = 1 << 16 };

typedef struct dump {
    const model *m;
    size_t T, sets, width;
    int32_t tokens[TOKENS_MAX], *label;
    uint8_t counted[TOKENS_MAX];
    float *gradient;
} dump;

static int take_labels(void *context, const int32_t *label) {
    const dump *d = context;
    memcpy(d->label, label, (d->sets - 1) * (d->T - 1) * sizeof *label);
    return 0;
}

static int take_layer(void *context, int layer, const float *d_heads, size_t set_stride, size_t stride) {
    const dump *d = context;
    for (size_t set = 0; set < d->sets; set++)
        for (size_t t = 0; t < d->T; t++)
            memcpy(d->gradient + ((set * (size_t)d->m->n_layer + (size_t)layer) * d->T + t) * d->width,
                   d_heads + set * set_stride + t * stride, d->width * sizeof *d_heads);
    return 0;
}

static int read_tokens(dump *d, const char *path) {
    FILE *in = fopen(path, "rb");
    if (!in) return err_set(ERR_DATA, "%s: cannot be opened", path);
    d->T = fread(d->tokens, sizeof *d->tokens, TOKENS_MAX, in);
    fclose(in);
    for (size_t i = 0; i < d->T; i++)
        if (d->tokens[i] < 0 || d->tokens[i] >= d->m->n_vocab) return err_set(ERR_DATA, "%s: token %zu", path, i);
    return d->T > 1 ? 0 : err_set(ERR_DATA, "%s: too short", path);
}

static int run(char **argv) {
    static dump d;
    pool *p;
    model *m;
    backend_state *s;
    TRY(pool_new(0, &p));
    TRY(model_open(argv[1], &m));
    TRY(cpu_backend.load(m, p, &cpu_options, &s));
    d.m = m;
    TRY(read_tokens(&d, argv[2]));
    d.sets = 1 + (size_t)atoi(argv[4]);
    d.width = (size_t)m->n_head * (size_t)m->head_dim;
    for (size_t t = 0; t + 1 < d.T; t++) d.counted[t] = t >= (size_t)atoi(argv[3]);
    size_t n_label = (d.sets - 1) * (d.T - 1), n = d.sets * (size_t)m->n_layer * d.T * d.width;
    d.label = mem_new(n_label + n, 4, "dump");
    if (!d.label) return ERR_DATA;
    d.gradient = (float *)(d.label + n_label);
    const forward_sink nothing = {0};
    const label_plan labels = {.counted = d.counted, .n_samples = (int32_t)d.sets - 1};
    const gradient_sink sink = {.context = &d, .labels = take_labels, .layer = take_layer};
    TRY(cpu_backend.forward_backward(s, d.tokens, (int32_t)d.T, NULL, &nothing, &labels, &sink));
    FILE *out = fopen(argv[5], "wb");
    if (!out || fwrite(d.label, 4, n_label + n, out) != n_label + n || fclose(out))
        return err_set(ERR_DATA, "%s: cannot be written", argv[5]);
    return 0;
}

int main(int argc, char **argv) {
    if (argc != 6) return fprintf(stderr, "usage: dump_gradients MODEL.gguf TOKENS.i32 N_PROMPT SAMPLES OUT\n"), 2;
    int code = run(argv);
    if (code) fprintf(stderr, "dump_gradients: %s\n", err_message());
    return code;
}
