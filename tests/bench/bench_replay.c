/* bench_replay TRACE.h5 [REPEATS] [BUDGET[,BUDGET...]] [SPEC...]: replay alone, on one thread.
 *
 * The rows of the first kv head of the first layer are computed once and kept; then every configuration (default: a few
 * policies) replays them, REPEATS times in turn. Nothing is read, computed or priced in the seconds that are printed
 * (wall, in brackets processor). A step is what a request is to a cache simulator: one entry arrives, is looked for
 * room, and one leaves; but here every resident's score is updated, where an LRU list touches one. */
#include "base/err.h"
#include "base/mem.h"
#include "sim/config.h"
#include "sim/replay.h"
#include "tests/bench/cost.h"
#include "traces/trace.h"

#include <stdio.h>
#include <stdlib.h>

enum { ROWS = 64, HEADS_MOST = 64 };

typedef struct bench {
    pool *p;
    trace *t;
    const trace_sequence *s;
    int n_head; /* of the unit */
    int32_t T;
    size_t stride;
    float *rows; /* [n_head][T][stride] */
    replay_facts *facts;
    int32_t *evict_at;
    sim_asks asks;
    sim_flags flags;
} bench;

/* Copy a tile's rows of the unit's heads to their place. */
static void keep_rows(bench *b, const float *tile, int32_t row0, int32_t n) {
    for (int h = 0; h < b->n_head; h++)
        for (int32_t r = 0; r < n; r++)
            for (size_t i = 0; i < b->stride; i++)
                b->rows[((size_t)h * (size_t)b->T + (size_t)(row0 + r)) * b->stride + i] =
                    tile[((size_t)h * (size_t)n + (size_t)r) * b->stride + i];
}

static int compute_rows(bench *b) {
    trace_layer *l;
    size_t heads = (size_t)trace_get_model(b->t)->n_head;
    float *tile = mem_new(heads * ROWS * b->stride, sizeof *tile, "rows");
    if (!tile) return ERR_DATA;
    TRY(trace_layer_open(b->t, 0, 0, TRACE_AUTO, b->p, &l));
    int code = 0;
    for (int32_t row = 0; row < b->T && !code; row += ROWS) {
        int32_t n = b->T - row < ROWS ? b->T - row : ROWS;
        code = trace_layer_rows(l, row, n, tile, b->stride, b->p);
        if (!code) keep_rows(b, tile, row, n);
    }
    trace_layer_close(l);
    mem_free(tile);
    return code;
}

static int prepare(bench *b, const char *path, const char *budgets, const char *const *specs, size_t n) {
    static const char *const usual[] = {"streaming", "h2o", "ema", "tova(unit=head)", "rmm(lag=16)"};
    TRY(pool_new(1, &b->p));
    TRY(trace_open(path, &b->t));
    const trace_model *m = trace_get_model(b->t);
    b->s = trace_get_sequence(b->t, 0);
    b->n_head = m->n_head / m->n_kv_head;
    if (b->n_head > HEADS_MOST) return err_set(ERR_DATA, "%s: more than %d heads a kv head", path, HEADS_MOST);
    b->T = b->s->n_tokens;
    b->stride = kernel_pad((size_t)b->T);
    b->rows = mem_new((size_t)b->n_head * (size_t)b->T * b->stride, sizeof *b->rows, "rows");
    b->facts = mem_new((size_t)b->T, sizeof *b->facts, "facts");
    b->evict_at = mem_new(b->stride, sizeof *b->evict_at, "lifetimes");
    if (!b->rows || !b->facts || !b->evict_at) return ERR_DATA;
    for (int32_t t = 0; t + 1 < b->T; t++)
        b->facts[t] = (replay_facts){.correct = b->s->correct && b->s->correct[t], .confidence = 0.5, .counted = true};
    b->flags = (sim_flags){.budgets = budgets, .n_prompt = -1};
    TRY(sim_asks_build(n ? specs : usual, n ? n : sizeof usual / sizeof *usual, &b->flags, &b->asks));
    return compute_rows(b);
}

static int replay_all(bench *b, const sim_config *c, cost *spent) {
    replay *r;
    const float *heads[HEADS_MOST];
    TRY(replay_new(c, b->T, &(policy_shape){.n_layer = 1, .n_head = b->n_head, .n_kv = 1}, &r));
    replay_unit unit = {.n_head = b->n_head};
    cost start = cost_now();
    replay_begin(r, &unit, b->evict_at);
    for (int32_t t = 0; t < b->T; t++) {
        for (int h = 0; h < b->n_head; h++) heads[h] = b->rows + ((size_t)h * (size_t)b->T + (size_t)t) * b->stride;
        replay_step(r, t, heads, &b->facts[t]);
    }
    *spent = cost_since(start);
    replay_free(r);
    return 0;
}

/* One ask, named "1", "2", ... in the repeats and in full above them. */
static int replay_ask(bench *b, const sim_ask *ask, cost *spent) {
    sim_config c;
    int code = sim_config_resolve(ask, &b->flags, b->T, b->s->n_prompt, &c);
    if (!code && (c.setup.needs & (NEEDS_FUTURE | NEEDS_OUT | NEEDS_LOSS | NEEDS_FISHER)))
        code = err_set(ERR_USAGE, "%s looks at the full run, which is not here", c.spec);
    if (!code) code = replay_all(b, &c, spent);
    sim_config_free(&c);
    return code;
}

static int measure(bench *b, int repeats) {
    printf("%d tokens, %d heads a unit, kernels %s\n", b->T, b->n_head, kernels()->name);
    for (size_t i = 0; i < b->asks.n; i++) {
        char *name = sim_ask_name(&b->asks.ask[i]);
        if (!name) return ERR_DATA;
        printf("configuration c%zu: %s\n", i, name);
        mem_free(name);
    }
    for (int k = 0; k < repeats; k++) {
        printf("repeat");
        for (size_t i = 0; i < b->asks.n; i++) {
            cost c;
            TRY(replay_ask(b, &b->asks.ask[i], &c));
            printf("  c%zu %.6f s (%.6f s)", i, c.wall, c.processor);
        }
        printf("\n");
    }
    return 0;
}

int main(int argc, char **argv) {
    if (argc < 2) return fprintf(stderr, "usage: bench_replay TRACE.h5 [REPEATS] [BUDGETS] [SPEC...]\n"), 2;
    bench b = {0};
    const char *const *specs = argc > 4 ? (const char *const *)argv + 4 : NULL;
    int code = prepare(&b, argv[1], argc > 3 ? argv[3] : "64,256,1024", specs, argc > 4 ? (size_t)argc - 4 : 0);
    if (!code) code = measure(&b, argc > 2 ? atoi(argv[2]) : 5);
    if (code) fprintf(stderr, "bench_replay: %s\n", err_message());
    sim_asks_free(&b.asks);
    mem_free(b.rows);
    mem_free(b.facts);
    mem_free(b.evict_at);
    trace_close(b.t);
    pool_free(b.p);
    return code;
}
