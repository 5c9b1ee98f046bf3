#include "tracer/generate.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/progress.h"
#include "base/rng.h"
#include "traces/kernels.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct candidate {
    float p;
    int32_t id;
} candidate;

struct generator {
    generate_ask ask;
    const model *m;
    const backend *backend;
    backend_state *state;
    float *prob;           /* [pad(n_vocab)] */
    candidate *candidates; /* [n_vocab] */
    bool *ends;            /* [n_vocab] does this token end an answer? */
    void *block;
};

/* ---- ends ------------------------------------------------------------------------------------------------------- */

/* Names that stand for the end of a turn or of a text in every vocabulary that has them. */
static bool is_end(const char *piece, size_t n) {
    static const char *const names[] = {"<|im_end|>",    "<|eot_id|>",    "<|eom_id|>",     "<|end|>",
                                        "<|endoftext|>", "<end_of_turn>", "<|end_of_text|>"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strlen(names[i]) == n && memcmp(names[i], piece, n) == 0) return true;
    return false;
}

static void find_ends(generator *g, const tokenizer *t) {
    for (int32_t id = 0; id < g->m->n_vocab; id++) {
        const char *piece;
        size_t n;
        tokenizer_piece(t, id, &piece, &n);
        g->ends[id] = id == tokenizer_eos(t) || is_end(piece, n);
    }
}

bool generate_ends(const generator *g, int32_t id) {
    return g->ends[id];
}

/* ---- the generator ---------------------------------------------------------------------------------------------- */

int generator_new(const generate_ask *ask, const model *m, const backend *b, backend_state *state, const tokenizer *t,
                  generator **out) {
    size_t n_vocab = (size_t)m->n_vocab;
    generator *g = *out = mem_new(1, sizeof *g, "generator");
    if (!g) return ERR_DATA;
    *g = (generator){.ask = *ask, .m = m, .backend = b, .state = state};
    for (int pass = 0; pass < 2; pass++) {
        mem_carver c = {.base = g->block};
        g->prob = mem_carve(&c, kernel_pad(n_vocab), sizeof *g->prob);
        g->candidates = mem_carve(&c, n_vocab, sizeof *g->candidates);
        g->ends = mem_carve(&c, n_vocab, sizeof *g->ends);
        if (pass == 0) g->block = mem_new(c.used, 1, "generator");
        if (!g->block) return ERR_DATA;
    }
    find_ends(g, t);
    return 0;
}

void generator_free(generator *g) {
    if (!g) return;
    mem_free(g->block);
    mem_free(g);
}

/* ---- one choice ------------------------------------------------------------------------------------------------- */

static int find_largest(const float *x, size_t n, int32_t *id) {
    bool finite = true;
    *id = 0;
    for (size_t i = 0; i < n; i++) {
        finite &= isfinite(x[i]) != 0;
        if (x[i] > x[*id]) *id = (int32_t)i;
    }
    return finite ? 0 : err_set(ERR_DATA, "non-finite logits");
}

static int by_probability(const void *a, const void *b) {
    const candidate *x = a, *y = b;
    if (x->p != y->p) return x->p > y->p ? -1 : 1;
    return (x->id > y->id) - (x->id < y->id);
}

/* What may be in the nucleus, sorted. Tokens below (1 - top_p) / n_vocab have together less than 1 - top_p, so that the
 * nucleus is full before the first of them. */
static size_t sort_candidates(generator *g) {
    size_t n = 0, n_vocab = (size_t)g->m->n_vocab;
    float least = (float)((1 - g->ask.top_p) / (double)n_vocab);
    for (size_t i = 0; i < n_vocab; i++)
        if (g->prob[i] > 0 && g->prob[i] >= least) g->candidates[n++] = (candidate){g->prob[i], (int32_t)i};
    qsort(g->candidates, n, sizeof *g->candidates, by_probability);
    return n;
}

int generate_pick(generator *g, const float *logits, double u, int32_t *id) {
    size_t n_vocab = (size_t)g->m->n_vocab, n, i = 0;
    int32_t top;
    double mass = 0, sum = 0;
    TRY(find_largest(logits, n_vocab, &top));
    *id = top;
    if (g->ask.temperature == 0) return 0;
    for (size_t k = 0; k < n_vocab; k++) g->prob[k] = (float)((logits[k] - logits[top]) / g->ask.temperature);
    kernels()->softmax(g->prob, 0, n_vocab - 1, 0, NULL);
    n = sort_candidates(g);
    while (i < n && mass < g->ask.top_p) mass += (double)g->candidates[i++].p;
    for (n = i, i = 0; i < n; i++) {
        sum += (double)g->candidates[i].p;
        *id = g->candidates[i].id; /* should rounding leave the whole sum below it, the last one */
        if (sum > u * mass) break;
    }
    return 0;
}

/* ---- an answer -------------------------------------------------------------------------------------------------- */

static int run_steps(generator *g, backend_steps *steps, const int32_t *prompt, size_t n_prompt, uint32_t number,
                     int32_t *answer, size_t *n, double *done) {
    step_view view;
    size_t filled = g->backend->steps_fill ? n_prompt - 1 : 0;
    if (filled) TRY(g->backend->steps_fill(steps, prompt, (int32_t)filled));
    progress_at(*done += (double)filled);
    for (size_t t = filled; t < n_prompt; t++) {
        TRY(g->backend->steps_next(steps, prompt[t], &view));
        progress_at(++*done);
    }
    for (size_t t = n_prompt - 1;; t++) {
        double u = rng_uniform(rng_philox(g->ask.seed, (uint32_t)t, 0, number, GENERATE_STREAM).v[0]);
        int code = generate_pick(g, view.logits, u, &answer[*n]);
        if (code) return err_prefix(code, "token %zu", t);
        if (g->ends[answer[(*n)++]] || *n == (size_t)g->ask.n) return 0;
        TRY(g->backend->steps_next(steps, answer[*n - 1], &view));
        progress_at(++*done);
    }
}

int generate_answer(generator *g, const int32_t *prompt, size_t n_prompt, uint32_t number, int32_t *answer, size_t *n,
                    double *done) {
    backend_steps *steps;
    *n = 0;
    TRY(g->backend->steps_new(g->state, 1, (bool[]){false}, (int32_t)n_prompt + g->ask.n, &steps));
    int code = run_steps(g, steps, prompt, n_prompt, number, answer, n, done);
    g->backend->steps_free(steps);
    return code;
}
