/* kvlag trace: run a model over texts once and write down what every later question needs. */
#include "base/err.h"
#include "base/mem.h"
#include "base/options.h"
#include "base/progress.h"
#include "base/text.h"
#include "tracer/capture.h"
#include "tracer/marks.h"
#include "tracer/plugin.h"
#include "tracer/tracer.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MIB 1048576.0
enum { TOPK_DEFAULT = 32, TOPK_MAX = 4096, DENSE_LIMIT_MIB = 512 };

typedef struct settings {
    const char *out, *attention, *gradients, *logits;
    long long tokens, prompt, threads, seed;
    bool special, marked, force, quiet, verbose;
    plugin_choice compute;
    opt_list files; /* MODEL TEXT... */
} settings;

/* One text and what became of it. */
typedef struct sequence {
    const char *path; /* "-": standard input */
    text bytes;       /* without marks */
    token_list tokens;
    marked_steps steps; /* nothing, where texts are not marked */
} sequence;

typedef struct job {
    settings *set;
    char *command;
    model *model;
    tokenizer *tokenizer;
    pool *pool;
    sequence *seq;
    size_t n_seq;
    capture capture;
} job;

/* ---- texts ------------------------------------------------------------------------------------------------------ */

static int read_all(int fd, const char *path, text *out) {
    static char buffer[1 << 16];
    ssize_t n;
    while ((n = read(fd, buffer, sizeof buffer)) != 0) {
        if (n < 0 && errno == EINTR) continue;
        if (n < 0)
            return err_set(ERR_DATA, "%s: %s", path, errno == EISDIR ? "is a folder, not a text" : strerror(errno));
        TRY(text_add_bytes(out, buffer, (size_t)n));
    }
    return 0;
}

static int read_text(const sequence *s, text *out) {
    if (strcmp(s->path, "-") == 0) return read_all(STDIN_FILENO, "standard input", out);
    int fd = open(s->path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return err_set(ERR_DATA, "%s: %s", s->path, strerror(errno));
    int code = read_all(fd, s->path, out);
    close(fd);
    return code;
}

static int32_t tokens_of(const sequence *s) {
    return (int32_t)s->tokens.n;
}

static int check_length(const job *j, const sequence *s, const char *name) {
    size_t n = s->tokens.n;
    long long prompt = j->set->prompt;
    if (s->bytes.n == 0) return err_set(ERR_DATA, "%s: the text is empty", name);
    if (n < 2) return err_set(ERR_DATA, "%s: %zu token; a trace needs at least 2", name, n);
    if (n > (size_t)j->model->n_context)
        return err_set(ERR_DATA, "%s: %zu tokens exceed this model's %d positions (--tokens %d takes the first ones)",
                       name, n, j->model->n_context, j->model->n_context);
    if (prompt > (long long)n - 2)
        return err_set(ERR_USAGE, "%s: --prompt %lld leaves no step to count in %zu tokens (at most %zu)", name, prompt,
                       n, n - 2);
    return 0;
}

static int tokenize(const job *j, sequence *s, const char *name) {
    TRY(tokenizer_encode(j->tokenizer, s->bytes.data ? s->bytes.data : "", s->bytes.n, j->set->special, &s->tokens));
    if (j->set->tokens && s->tokens.n > (size_t)j->set->tokens) s->tokens.n = (size_t)j->set->tokens;
    return check_length(j, s, name);
}

static int tokenize_marked(const job *j, sequence *s, const char *name) {
    text marked = {0};
    marks found = {0};
    int code = read_text(s, &marked);
    if (!code) {
        code = marks_take(marked.data ? marked.data : "", marked.n, &s->bytes, &found);
        if (code) err_prefix(code, "%s", name);
    }
    if (!code) code = tokenize(j, s, name);
    if (!code) {
        code = marks_steps(&found, s->tokens.offset, tokens_of(s), (int32_t)j->set->prompt, &s->steps);
        if (code) err_prefix(code, "%s", name);
    }
    text_free(&marked);
    marks_free(&found);
    return code;
}

static int take_text(const job *j, sequence *s) {
    const char *name = strcmp(s->path, "-") == 0 ? "standard input" : s->path;
    if (j->set->marked) return tokenize_marked(j, s, name);
    TRY(read_text(s, &s->bytes));
    return tokenize(j, s, name);
}

static int read_sequences(job *j) {
    const opt_list *files = &j->set->files;
    j->n_seq = files->n - 1;
    j->seq = mem_new(j->n_seq, sizeof *j->seq, "texts");
    if (!j->seq) return ERR_DATA;
    for (size_t i = 0; i < j->n_seq; i++) {
        j->seq[i].path = files->item[i + 1];
        for (size_t k = 0; k < i; k++)
            if (strcmp(j->seq[i].path, "-") == 0 && strcmp(j->seq[k].path, "-") == 0)
                return err_set(ERR_USAGE, "standard input ('-') can be only one of the texts");
        TRY(take_text(j, &j->seq[i]));
    }
    return 0;
}

/* ---- the plan --------------------------------------------------------------------------------------------------- */

static int plan_logits(const char *asked, int32_t n_vocab, trace_plan *plan) {
    plan->topk = TOPK_DEFAULT < n_vocab ? TOPK_DEFAULT : n_vocab;
    if (strcmp(asked, "full") == 0) {
        plan->full_logits = true;
        return 0;
    }
    int32_t most = TOPK_MAX < n_vocab ? TOPK_MAX : n_vocab;
    long k = text_counted_word(asked, "topk", 0, most);
    if (k < 0) return err_set(ERR_USAGE, "--logits: '%s' is neither topk:K (K from 0 to %d) nor full", asked, most);
    plan->topk = (int32_t)k;
    return 0;
}

/* Entries on and below the diagonal, of all heads, layers and texts. */
static double attention_entries(const job *j) {
    double entries = 0;
    for (size_t i = 0; i < j->n_seq; i++) {
        double n = tokens_of(&j->seq[i]);
        entries += n * (n + 1) / 2 * j->model->n_layer * j->model->n_head;
    }
    return entries;
}

static int make_plan(job *j) {
    const char *asked = j->set->attention;
    trace_plan *plan = &j->capture.plan;
    bool both = strcmp(asked, "both") == 0, automatic = strcmp(asked, "auto") == 0;
    bool small = 2 * attention_entries(j) <= DENSE_LIMIT_MIB * MIB;
    plan->dense = both || strcmp(asked, "dense") == 0 || (automatic && small);
    plan->factored = both || automatic || strcmp(asked, "factored") == 0;
    plan->row_sum = plan->dense;
    plan->lse = true;
    TRY(trace_plan_gradients(j->set->gradients, plan));
    return plan_logits(j->set->logits, j->model->n_vocab, plan);
}

static const char *form_name(const trace_plan *plan) {
    return plan->dense && plan->factored ? "dense and factored" : plan->dense ? "dense" : "factored";
}

/* Bytes of the file: f16 probabilities pack to 1.42 bytes an entry, other f16 values to about nine tenths. */
static double estimated_bytes(const job *j) {
    const model *m = j->model;
    const trace_plan *plan = &j->capture.plan;
    double dim = m->head_dim, tokens = 0;
    for (size_t i = 0; i < j->n_seq; i++) tokens += tokens_of(&j->seq[i]);
    double bytes = 1.8 * m->n_layer * m->n_head * dim * m->n_embd;
    if (plan->dense) bytes += 1.42 * attention_entries(j);
    if (plan->factored) bytes += 1.8 * tokens * m->n_layer * (m->n_head + 2 * m->n_kv_head) * dim;
    bytes += tokens * (plan->topk * 6.0 + 4.0 * m->n_layer * m->n_head);
    if (plan->grad_loss) bytes += (1.83 * dim + 3.3) * tokens * m->n_layer * m->n_head * (1 + plan->n_fisher);
    return plan->full_logits ? bytes + 1.8 * tokens * m->n_vocab : bytes;
}

static void announce(const job *j) {
    double tokens = 0;
    for (size_t i = 0; i < j->n_seq; i++) tokens += tokens_of(&j->seq[i]);
    say("%s: %zu %s, %.0f tokens, gradients %s, attention %s; the file will take about %.1f MiB", j->model->name,
        j->n_seq, j->n_seq == 1 ? "text" : "texts", tokens, j->set->gradients, form_name(&j->capture.plan),
        estimated_bytes(j) / MIB);
}

/* ---- the trace -------------------------------------------------------------------------------------------------- */

static int begin_file(job *j) {
    const model *m = j->model;
    trace_model facts = {.name = m->name,
                         .arch = (char *)m->arch->name,
                         .n_layer = m->n_layer,
                         .n_head = m->n_head,
                         .n_kv_head = m->n_kv_head,
                         .head_dim = m->head_dim,
                         .n_embd = m->n_embd,
                         .n_vocab = m->n_vocab,
                         .window = m->window,
                         .scale = m->scale,
                         .softcap = m->softcap,
                         .rope = m->rope_text,
                         .backend = (char *)j->capture.backend->name,
                         .device = (char *)j->capture.backend->device(j->capture.state),
                         .compute = (char *)j->capture.backend->compute(j->capture.state)};
    const char **inputs = mem_new(j->set->files.n, sizeof *inputs, "inputs");
    int n_inputs = 0;
    if (!inputs) return ERR_DATA;
    for (size_t i = 0; i < j->set->files.n; i++)
        if (strcmp(j->set->files.item[i], "-") != 0) inputs[n_inputs++] = j->set->files.item[i];
    int code = trace_writer_new(j->set->out, j->set->force, inputs, n_inputs, &facts, "kvlag " KVLAG_VERSION,
                                j->command, j->n_seq, &j->capture.writer);
    mem_free(inputs);
    return code;
}

static int write_sequences(job *j) {
    double work = 0;
    for (size_t i = 0; i < j->n_seq; i++) work += capture_work(j->model, &j->capture.plan, tokens_of(&j->seq[i]));
    progress_begin("trace", NULL, work);
    int code = capture_wo(&j->capture);
    for (size_t i = 0; i < j->n_seq && !code; i++) {
        sequence *s = &j->seq[i];
        bool named = strcmp(s->path, "-") != 0;
        trace_sequence facts = {.n_tokens = tokens_of(s),
                                .n_prompt = (int32_t)j->set->prompt,
                                .source = (char *)(named ? text_base_name(s->path) : ""),
                                .tokens = s->tokens.id,
                                .pieces = (const uint8_t *)s->bytes.data,
                                .piece_offset = s->tokens.offset,
                                .counted = s->steps.counted,
                                .probes = s->steps.probes,
                                .n_probes = s->steps.n_probes};
        code = capture_sequence(&j->capture, &facts);
        if (code) err_prefix(code, "%s", named ? s->path : "standard input");
    }
    progress_end();
    return code;
}

/* Where the time went. A backend that does not measure itself works on the threads that also pack, and alone on them
 * where nothing else is known. */
static void say_times(const job *j, const trace_times *spent, double seconds) {
    const capture *c = &j->capture;
    backend_times of = c->backend->times(c->state);
    bool measured = of.compute > 0 || of.copy > 0;
    int threads = pool_threads(j->pool);
    double pack = spent->pack / threads;
    if (!measured) of.compute = fmax(seconds - pack - spent->wait, 0);
    const char *bound = "computation";
    double most = of.compute;
    if (of.copy > most) most = of.copy, bound = "copies";
    if (pack > most) most = pack, bound = "compression";
    if (spent->write > most) bound = "writing";
    (measured ? say : say_more)("time: compute %.3f s, copy %.3f s, compress %.3f s (%d threads), write %.3f s of "
                                "%.3f s; bound by %s",
                                of.compute, of.copy, pack, threads, spent->write, seconds, bound);
}

static int finish_file(job *j, double seconds) {
    const trace_plan *plan = &j->capture.plan;
    int64_t raw, stored, bytes;
    double flops = 0, tokens = 0;
    for (size_t i = 0; i < j->n_seq; i++) {
        tokens += tokens_of(&j->seq[i]);
        flops += model_flops(j->model, tokens_of(&j->seq[i]));
        if (plan->grad_loss) flops += model_gradient_flops(j->model, tokens_of(&j->seq[i]), 1 + plan->n_fisher);
    }
    trace_writer_sizes(j->capture.writer, &raw, &stored);
    trace_writer *w = j->capture.writer;
    const trace_times spent = trace_writer_times(w);
    j->capture.writer = NULL;
    TRY(trace_writer_finish(w, &bytes));
    say("%s: %.0f tokens in %.2f s (%.0f tokens/s, %.0f GFLOP/s), %.1f MiB, attention %.2f to 1, %s XXH3 "
        "%016" PRIx64,
        text_base_name(j->set->out), tokens, seconds, tokens / seconds, flops * 1e-9 / seconds, (double)bytes / MIB,
        (double)raw / (double)stored, capture_hashed(&j->capture), j->capture.logits_hash);
    say_times(j, &spent, seconds);
    return 0;
}

static int run(job *j) {
    capture *c = &j->capture;
    TRY(plugin_backend(j->set->compute.backend, &c->backend));
    TRY(model_open(j->set->files.item[0], &j->model));
    TRY(model_tokenizer(j->model, &j->tokenizer));
    TRY(read_sequences(j));
    TRY(make_plan(j));
    TRY(pool_new((int)j->set->threads, &j->pool));
    TRY(plugin_load(&j->set->compute, &c->backend, j->model, j->pool, &c->state));
    say_more("%s backend, %d threads, %s", c->backend->name, pool_threads(j->pool), c->backend->device(c->state));
    c->model = j->model;
    c->pool = j->pool;
    c->seed = (uint64_t)j->set->seed;
    TRY(begin_file(j));
    announce(j);
    double start = progress_seconds();
    TRY(write_sequences(j));
    return finish_file(j, progress_seconds() - start);
}

static void free_job(job *j) {
    trace_writer_abort(j->capture.writer);
    if (j->capture.backend) j->capture.backend->unload(j->capture.state);
    for (size_t i = 0; i < j->n_seq && j->seq; i++) {
        text_free(&j->seq[i].bytes);
        token_list_free(&j->seq[i].tokens);
        marked_steps_free(&j->seq[i].steps);
    }
    mem_free(j->seq);
    tokenizer_free(j->tokenizer);
    model_close(j->model);
    pool_free(j->pool);
    mem_free(j->command);
}

/* ---- the command line ------------------------------------------------------------------------------------------- */

static int check(const settings *s) {
    if (s->files.n < 2)
        return err_set(ERR_USAGE, "trace needs a model and at least one text: kvlag trace MODEL TEXT... -o FILE.h5");
    if (!s->out) return err_set(ERR_USAGE, "trace needs -o FILE.h5");
    return 0;
}

static int trace_with(const opt *table, settings *s, int argc, char **argv) {
    TRY(opt_parse(table, argc, argv, &s->files));
    say_level(s->quiet ? SAY_QUIET : s->verbose ? SAY_MORE : SAY_NORMAL);
    TRY(check(s));
    job j = {.set = s};
    j.command = opt_command("trace", table, &s->files);
    int code = j.command ? run(&j) : ERR_DATA;
    free_job(&j);
    return code;
}

int cmd_trace(int argc, char **argv) {
    settings s = {.attention = "auto", .gradients = "fisher:1", .logits = "topk:32", .compute = PLUGIN_CHOICE};
    const opt table[] = {
        {"output", 'o', OPT_TEXT, false, &s.out, "FILE.h5", "the trace to write", 0, 0},
        {"tokens", 0, OPT_INT, true, &s.tokens, "N", "only the first N tokens of each text", 1, INT32_MAX},
        {"prompt", 0, OPT_INT, true, &s.prompt, "N", "the first N steps see everything (default 0)", 0, INT32_MAX},
        {"attention", 0, OPT_CHOICE, true, &s.attention, "auto|dense|factored|both",
         "probabilities, or q, k and v; auto: both up to 512 MiB of probabilities, else factored", 0, 0},
        {"gradients", 0, OPT_TEXT, true, &s.gradients, "none|loss|fisher:S",
         "of the text's own loss, and of S samples of the model's labels (default fisher:1)", 0, 0},
        {"logits", 0, OPT_TEXT, true, &s.logits, "topk:K|full", "predictions to keep (default topk:32)", 0, 0},
        {"marked", 0, OPT_FLAG, true, &s.marked, NULL,
         "texts hold marks: {{NAME=words}} is a fact, {{NAME?words}} an answer; only answers count", 0, 0},
        {"special", 0, OPT_FLAG, true, &s.special, NULL, "control tokens written in a text are control tokens", 0, 0},
        PLUGIN_OPTIONS(s.compute),
        {"threads", 0, OPT_INT, false, &s.threads, "N", "threads (default: one per processor)", 1, 1024},
        {"seed", 0, OPT_INT, true, &s.seed, "N", "of the labels drawn for fisher:S (default 0)", 0, 1LL << 53},
        {"force", 0, OPT_FLAG, false, &s.force, NULL, "replace an existing file", 0, 0},
        {"quiet", 'q', OPT_FLAG, false, &s.quiet, NULL, "say nothing", 0, 0},
        {"verbose", 'v', OPT_FLAG, false, &s.verbose, NULL, "say more", 0, 0},
        {0}};
    int code = trace_with(table, &s, argc, argv);
    opt_list_free(&s.files);
    return code;
}
