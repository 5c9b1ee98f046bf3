/* kvlag make-trace random: a synthetic trace of any size (synthetic.h). */
#include "base/err.h"
#include "base/mem.h"
#include "base/options.h"
#include "base/progress.h"
#include "base/text.h"
#include "traces/make_trace.h"
#include "traces/synthetic.h"

#include <stdlib.h>
#include <string.h>

#define MIB 1048576.0
enum { TOKENS_MOST = 1 << 20, LAYERS_MOST = 1024, HEADS_MOST = 1024, HEAD_DIM_MOST = 512 };

typedef struct settings {
    const char *out, *gradients, *attention;
    long long tokens, layers, heads, kv_heads, head_dim, prompt, seed, threads;
    bool force, quiet;
    opt_list others;
} settings;

static int plan_trace(const settings *set, synthetic *s) {
    TRY(make_trace_check("random", &set->others, set->out, set->heads, set->kv_heads));
    if (set->prompt > set->tokens - 2)
        return err_set(ERR_USAGE, "--prompt %lld leaves no step to count in %lld tokens (at most %lld)", set->prompt,
                       set->tokens, set->tokens - 2);
    *s = (synthetic){.n_layer = (int32_t)set->layers,
                     .n_tokens = (int32_t)set->tokens,
                     .n_prompt = (int32_t)set->prompt,
                     .shape = {.seed = (uint64_t)set->seed,
                               .n_head = (int32_t)set->heads,
                               .n_kv_head = (int32_t)set->kv_heads,
                               .head_dim = (int32_t)set->head_dim}};
    s->plan.dense = strcmp(set->attention, "factored") != 0;
    s->plan.factored = strcmp(set->attention, "dense") != 0;
    if (s->plan.dense && set->tokens > SYNTHETIC_DENSE_MOST)
        return err_set(ERR_USAGE, "--attention %s: probabilities are stored for at most %d tokens", set->attention,
                       SYNTHETIC_DENSE_MOST);
    return trace_plan_gradients(set->gradients, &s->plan);
}

static int write_file(const settings *set, const synthetic *s, const char *command, pool *p) {
    double start = progress_seconds();
    trace_model model = synthetic_model(s);
    trace_writer *w;
    int64_t bytes;
    TRY(trace_writer_new(set->out, set->force, NULL, 0, &model, "kvlag " KVLAG_VERSION, command, 1, &w));
    int code = synthetic_write(s, p, w);
    if (code) {
        trace_writer_abort(w);
        return code;
    }
    TRY(trace_writer_finish(w, &bytes));
    say("%s: %d tokens, %d layers, %d heads over %d, gradients %s, attention %s, %.1f MiB in %.2f s",
        text_base_name(set->out), s->n_tokens, s->n_layer, s->shape.n_head, s->shape.n_kv_head, set->gradients,
        set->attention, (double)bytes / MIB, progress_seconds() - start);
    return 0;
}

static int run(const opt *table, settings *set, int argc, char **argv) {
    synthetic s;
    pool *p = NULL;
    TRY(opt_parse(table, argc, argv, &set->others));
    say_level(set->quiet ? SAY_QUIET : SAY_NORMAL);
    if (!opt_given(table, &set->kv_heads)) set->kv_heads = set->heads % 4 ? set->heads : set->heads / 4;
    TRY(plan_trace(set, &s));
    char *command = opt_command("make-trace random", table, &set->others);
    int code = command ? pool_new((int)set->threads, &p) : ERR_DATA;
    if (!code) code = write_file(set, &s, command, p);
    pool_free(p);
    mem_free(command);
    return code;
}

int make_random(int argc, char **argv) {
    settings s = {.tokens = 2048,
                  .layers = 1,
                  .heads = 8,
                  .kv_heads = 2,
                  .head_dim = 64,
                  .gradients = "none",
                  .attention = "factored"};
    const opt table[] = {
        {"output", 'o', OPT_TEXT, false, &s.out, "FILE.h5", "the trace to write", 0, 0},
        {"tokens", 0, OPT_INT, true, &s.tokens, "N", "its length (default 2048)", 2, TOKENS_MOST},
        {"layers", 0, OPT_INT, true, &s.layers, "N", "layers (default 1)", 1, LAYERS_MOST},
        {"heads", 0, OPT_INT, true, &s.heads, "N", "query heads (default 8)", 1, HEADS_MOST},
        {"kv-heads", 0, OPT_INT, true, &s.kv_heads, "N", "kv heads (default: a quarter of the heads, or as many)", 1,
         HEADS_MOST},
        {"head-dim", 0, OPT_INT, true, &s.head_dim, "N", "size of a head (default 64)", SYNTHETIC_HEAD_DIM_LEAST,
         HEAD_DIM_MOST},
        {"gradients", 0, OPT_TEXT, true, &s.gradients, "none|loss|fisher:S",
         "for the text's own labels, and for S samples (default none)", 0, 0},
        {"attention", 0, OPT_CHOICE, true, &s.attention, "factored|dense|both",
         "q, k and v (default), or probabilities of up to 8192 tokens", 0, 0},
        {"prompt", 0, OPT_INT, true, &s.prompt, "N", "the first N steps see everything (default 0)", 0, TOKENS_MOST},
        {"seed", 0, OPT_INT, true, &s.seed, "N", "of all random numbers (default 0)", 0, 1LL << 53},
        {"threads", 0, OPT_INT, false, &s.threads, "N", "threads (default: one per processor)", 1, 1024},
        {"force", 0, OPT_FLAG, false, &s.force, NULL, "replace an existing file", 0, 0},
        {"quiet", 'q', OPT_FLAG, false, &s.quiet, NULL, "say nothing", 0, 0},
        {0}};
    int code = run(table, &s, argc, argv);
    opt_list_free(&s.others);
    return code;
}
