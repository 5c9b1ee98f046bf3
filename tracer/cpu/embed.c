#include "base/err.h"
#include "tracer/cpu/cpu.h"

int cpu_embed_token(const backend_state *s, int32_t token, size_t t, float *x) {
    size_t n = (size_t)s->m->n_embd;
    const float *place = s->positions ? s->positions + t * n : NULL;
    TRY(model_read(&s->m->embedding, n, (size_t)token, 1, x));
    for (size_t i = 0; i < n; i++) x[i] *= s->m->embedding_scale;
    for (size_t i = 0; place && i < n; i++) x[i] += place[i];
    return 0;
}

int cpu_check_length(const backend_state *s, int32_t n) {
    if (!s->positions || n <= s->m->n_context) return 0;
    return err_set(ERR_DATA, "%s has embeddings of %d positions; the text has %d tokens (--tokens takes fewer)",
                   s->m->name, s->m->n_context, n);
}
