/* kvlag make-trace reuse: the endogenous-reuse task (reuse.h), one layer, a sequence for every repetition. */
#include "base/err.h"
#include "base/mem.h"
#include "base/options.h"
#include "base/progress.h"
#include "base/text.h"
#include "traces/kernels.h"
#include "traces/make_trace.h"
#include "traces/reuse.h"
#include "traces/trace.h"

#include <stdio.h>
#include <string.h>

#define MIB 1048576.0
enum { TOKENS_MOST = 8192, HEADS_MOST = 256, SEQUENCES_MOST = 10000 };

typedef struct settings {
    const char *out, *correct;
    const char *fact_share, *distractor_share, *distractor_rate, *fail_rate, *noise, *flip; /* decimals as given */
    long long tokens, facts, proof, distance, heads, kv_heads, sequences, seed;
    bool force, quiet;
    opt_list others;
} settings;

/* ---- writing ---------------------------------------------------------------------------------------------------- */

/* `rows`: [TRACE_TILE][stride], zero above the diagonal from one head to the next. */
static int write_head(trace_writer *w, const reuse_sequence *s, int head, float *rows, size_t stride) {
    int32_t T = s->task->n_tokens;
    for (int32_t row0 = 0; row0 < T; row0 += TRACE_TILE) {
        int32_t n = T - row0 < TRACE_TILE ? T - row0 : TRACE_TILE;
        for (int32_t r = 0; r < n; r++) {
            float *row = rows + (size_t)r * stride;
            reuse_row(s, head, row0 + r, row);
            memset(row + row0 + r + 1, 0, (stride - (size_t)(row0 + r + 1)) * sizeof *row);
        }
        for (int32_t column = 0; column <= row0; column += TRACE_TILE) {
            trace_chunk chunk = {0};
            int32_t wide = T - column < TRACE_TILE ? T - column : TRACE_TILE;
            TRY(trace_pack(w, TRACE_PROBS, rows + column, (size_t)n, (size_t)wide, stride, NULL, &chunk));
            int code = trace_put(w, TRACE_PROBS, 0, head, row0 / TRACE_TILE, column / TRACE_TILE, &chunk);
            trace_chunk_free(&chunk);
            TRY(code);
        }
    }
    return 0;
}

static int write_sequence(trace_writer *w, const reuse_sequence *s, int heads, float *rows, size_t stride) {
    char source[32];
    snprintf(source, sizeof source, "reuse %d", s->number);
    trace_sequence facts = {.n_tokens = s->task->n_tokens,
                            .source = source,
                            .tokens = s->token,
                            .counted = s->counted,
                            .probes = s->probes,
                            .n_probes = (size_t)s->task->n_facts};
    TRY(trace_write_sequence(w, &facts, &(trace_plan){.dense = true}));
    for (int head = 0; head < heads; head++) TRY(write_head(w, s, head, rows, stride));
    return trace_write_logits(w, s->logprob, s->correct, s->entropy, NULL, NULL);
}

static int write_sequences(trace_writer *w, const settings *set, const reuse_task *task) {
    size_t stride = kernel_pad((size_t)task->n_tokens);
    float *rows = mem_new(TRACE_TILE * stride, sizeof *rows, "reuse task");
    int code = rows ? 0 : ERR_DATA;
    progress_begin("make-trace", "sequences", (double)set->sequences);
    for (int32_t n = 0; n < set->sequences && !code; n++) {
        reuse_sequence *s;
        code = reuse_draw(task, n, &s);
        if (code) err_prefix(code, "sequence %d", n);
        else code = write_sequence(w, s, (int)set->heads, rows, stride);
        reuse_free(s);
        progress_at(n + 1);
    }
    progress_end();
    mem_free(rows);
    return code;
}

static int write_file(const settings *set, const reuse_task *task, const char *command) {
    double start = progress_seconds();
    /* Nothing has a size that only q, k and v would have. */
    trace_model model = {.name = "endogenous reuse",
                         .arch = "",
                         .n_layer = 1,
                         .n_head = (int32_t)set->heads,
                         .n_kv_head = (int32_t)set->kv_heads,
                         .head_dim = 1,
                         .n_vocab = REUSE_FACT + task->n_facts,
                         .scale = 1,
                         .rope = "",
                         .backend = "",
                         .device = "",
                         .compute = "f32"};
    trace_writer *w;
    int64_t bytes;
    TRY(trace_writer_new(set->out, set->force, NULL, 0, &model, "kvlag " KVLAG_VERSION, command, (size_t)set->sequences,
                         &w));
    int code = write_sequences(w, set, task);
    if (code) {
        trace_writer_abort(w);
        return code;
    }
    TRY(trace_writer_finish(w, &bytes));
    say("%s: %lld sequences of %d tokens with %d facts, %lld heads over %lld, %.1f MiB in %.2f s",
        text_base_name(set->out), set->sequences, task->n_tokens, task->n_facts, set->heads, set->kv_heads,
        (double)bytes / MIB, progress_seconds() - start);
    return 0;
}

/* ---- options ---------------------------------------------------------------------------------------------------- */

/* A decimal in 0 .. most; NULL leaves what is there. */
static int decimal(const char *option, const char *given, double most, double *value) {
    double x;
    if (!given) return 0;
    if (text_parse_number(given, &x) || !(x >= 0 && x <= most))
        return err_set(ERR_USAGE, "--%s: '%s' is not a number in 0..%g", option, given, most);
    *value = x;
    return 0;
}

static int plan_task(const settings *set, reuse_task *task) {
    TRY(make_trace_check("reuse", &set->others, set->out, set->heads, set->kv_heads));
    if (set->proof >= set->distance)
        return err_set(ERR_USAGE, "--lag-of-proof %lld must come before --distance %lld", set->proof, set->distance);
    *task = reuse_default;
    task->seed = (uint64_t)set->seed;
    task->n_tokens = (int32_t)set->tokens;
    task->n_facts = (int32_t)set->facts;
    task->proof = (int32_t)set->proof;
    task->distance = (int32_t)set->distance;
    task->always_correct = strcmp(set->correct, "always") == 0;
    if (task->always_correct && set->flip) return err_set(ERR_USAGE, "--flip and --correct always do not go together");
    TRY(decimal("fact-attention", set->fact_share, 1, &task->fact_share));
    TRY(decimal("distractor-attention", set->distractor_share, 1, &task->distractor_share));
    TRY(decimal("distractors", set->distractor_rate, 1, &task->distractor_rate));
    TRY(decimal("failing", set->fail_rate, 1, &task->fail_rate));
    TRY(decimal("flip", set->flip, 1, &task->flip));
    return decimal("noise", set->noise, 4, &task->noise);
}

static int run(const opt *table, settings *set, int argc, char **argv) {
    reuse_task task;
    TRY(opt_parse(table, argc, argv, &set->others));
    say_level(set->quiet ? SAY_QUIET : SAY_NORMAL);
    if (!opt_given(table, &set->kv_heads)) set->kv_heads = set->heads % 2 ? set->heads : set->heads / 2;
    TRY(plan_task(set, &task));
    char *command = opt_command("make-trace reuse", table, &set->others);
    int code = command ? write_file(set, &task, command) : ERR_DATA;
    mem_free(command);
    return code;
}

int make_reuse(int argc, char **argv) {
    settings s = {.correct = "task",
                  .tokens = reuse_default.n_tokens,
                  .facts = reuse_default.n_facts,
                  .proof = reuse_default.proof,
                  .distance = reuse_default.distance,
                  .heads = 4,
                  .kv_heads = 2,
                  .sequences = 20};
    const opt table[] = {
        {"output", 'o', OPT_TEXT, false, &s.out, "FILE.h5", "the trace to write", 0, 0},
        {"sequences", 0, OPT_INT, true, &s.sequences, "N", "repetitions, each drawn anew (default 20)", 1,
         SEQUENCES_MOST},
        {"tokens", 0, OPT_INT, true, &s.tokens, "N", "length of each (default 400)", 4, TOKENS_MOST},
        {"facts", 'K', OPT_INT, true, &s.facts, "K", "facts that are needed later (default 16)", 1, TOKENS_MOST},
        {"lag-of-proof", 0, OPT_INT, true, &s.proof, "N", "steps from a fact to its proof (default 6)", 1, TOKENS_MOST},
        {"distance", 0, OPT_INT, true, &s.distance, "N", "steps to the later use, at least (default 100)", 2,
         TOKENS_MOST},
        {"distractors", 0, OPT_TEXT, true, &s.distractor_rate, "X", "share of the other entries (default 0.25)", 0, 0},
        {"failing", 0, OPT_TEXT, true, &s.fail_rate, "X", "share of the other steps (default 0.5)", 0, 0},
        {"fact-attention", 0, OPT_TEXT, true, &s.fact_share, "X", "in a proof and a later use (default 0.4)", 0, 0},
        {"distractor-attention", 0, OPT_TEXT, true, &s.distractor_share, "X", "in a failing step (default 0.6)", 0, 0},
        {"noise", 0, OPT_TEXT, true, &s.noise, "X", "standard deviation of log weights (default 0.5)", 0, 0},
        {"correct", 0, OPT_CHOICE, true, &s.correct, "task|always", "always: nothing tells proofs from failures", 0, 0},
        {"flip", 0, OPT_TEXT, true, &s.flip, "X", "how often `correct` says the opposite (default 0)", 0, 0},
        {"heads", 0, OPT_INT, true, &s.heads, "N", "query heads (default 4)", 1, HEADS_MOST},
        {"kv-heads", 0, OPT_INT, true, &s.kv_heads, "N", "kv heads (default: half of the heads, or as many)", 1,
         HEADS_MOST},
        {"seed", 0, OPT_INT, true, &s.seed, "N", "of all random numbers (default 0)", 0, 1LL << 53},
        {"force", 0, OPT_FLAG, false, &s.force, NULL, "replace an existing file", 0, 0},
        {"quiet", 'q', OPT_FLAG, false, &s.quiet, NULL, "say nothing", 0, 0},
        {0}};
    int code = run(table, &s, argc, argv);
    opt_list_free(&s.others);
    return code;
}
