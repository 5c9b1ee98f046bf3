/* kvlag trace: run a model over texts once and write down what every later question needs. */
#include "base/err.h"
#include "base/mem.h"
#include "base/options.h"
#include "base/outfile.h"
#include "base/progress.h"
#include "base/text.h"
#include "tracer/answers.h"
#include "tracer/capture.h"
#include "tracer/chat.h"
#include "tracer/model_files.h"
#include "tracer/plugin.h"
#include "tracer/resume.h"
#include "tracer/texts.h"
#include "tracer/tracer.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define MIB 1048576.0
enum { TOPK_DEFAULT = 32, TOPK_MAX = 4096, DENSE_LIMIT_MIB = 512 };

typedef struct settings {
    const char *out, *attention, *gradients, *logits, *date, *temperature, *top_p;
    long long tokens, skip, stride, windows, prompt, generate, threads, seed;
    bool jsonl, ids, chat, special, marked, show, resume, force, quiet, verbose;
    plugin_choice compute;
    opt_list files; /* MODEL TEXT... */
} settings;

typedef struct job {
    settings *set;
    text_ask ask;
    generate_ask answers;
    char *command;
    model *model;
    tokenizer *tokenizer;
    pool *pool;
    text_list texts;
    resume *journal;
    capture capture;
    size_t taken; /* sequences that were there already */
} job;

static int32_t tokens_of(const text_sequence *s) {
    return (int32_t)s->n;
}

static double all_tokens(const job *j, size_t first) {
    return texts_tokens(&j->texts, first);
}

static int inputs_of(const job *j, const char ***inputs, int *n) {
    *inputs = mem_new(j->set->files.n, sizeof **inputs, "inputs");
    *n = 0;
    if (!*inputs) return ERR_DATA;
    for (size_t i = 0; i < j->set->files.n; i++)
        if (strcmp(j->set->files.item[i], "-") != 0) (*inputs)[(*n)++] = j->set->files.item[i];
    return 0;
}

/* ---- texts ------------------------------------------------------------------------------------------------------ */

/* Ids need no tokenizer: a model whose tokenizer is not known can be traced by them, without pieces. */
static int read_texts(job *j) {
    int code = model_tokenizer(j->model, &j->tokenizer);
    bool without = code && j->set->ids && !j->set->generate;
    if (without) say("%s: no text is kept beside the ids", err_message());
    if (code && !without) return code;
    return texts_read(&j->ask, j->model, j->tokenizer, &j->texts);
}

/* An output that cannot be is found before any work is done. */
static int check_output(const job *j) {
    const char **inputs;
    int n;
    outfile out;
    TRY(inputs_of(j, &inputs, &n));
    int code = outfile_begin(&out, j->set->out, j->set->force, inputs, n);
    if (!code) outfile_abort(&out);
    mem_free(inputs);
    return code;
}

static int open_journal(job *j) {
    const backend *b = j->capture.backend;
    text place = {0};
    if (!j->set->resume) return resume_mention(j->set->out);
    int code = text_add(&place, "%s, %s, %s", b->name, b->device(j->capture.state), b->compute(j->capture.state));
    if (!code) code = resume_open(j->set->out, j->command, j->model, &j->texts, place.data, &j->journal);
    text_free(&place);
    return code;
}

static int answer_texts(job *j) {
    const answers how = {.ask = &j->ask,
                         .generate = &j->answers,
                         .model = j->model,
                         .backend = j->capture.backend,
                         .state = j->capture.state,
                         .tokenizer = j->tokenizer,
                         .journal = j->journal,
                         .show = j->set->show};
    if (!j->ask.generate) return 0;
    TRY(check_output(j));
    return answers_add(&how, &j->texts);
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
    for (size_t i = 0; i < j->texts.n; i++) {
        double n = (double)j->texts.item[i].n;
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
    double dim = m->head_dim, tokens = all_tokens(j, 0);
    double bytes = 1.8 * m->n_layer * m->n_head * dim * m->n_embd;
    if (plan->dense) bytes += 1.42 * attention_entries(j);
    if (plan->factored) bytes += 1.8 * tokens * m->n_layer * (m->n_head + 2 * m->n_kv_head) * dim;
    bytes += tokens * (plan->topk * 6.0 + 4.0 * m->n_layer * m->n_head);
    if (plan->grad_loss) bytes += (1.83 * dim + 3.3) * tokens * m->n_layer * m->n_head * (1 + plan->n_fisher);
    return plan->full_logits ? bytes + 1.8 * tokens * m->n_vocab : bytes;
}

static void announce(const job *j) {
    if (j->ask.stride)
        say("%zu windows of %lld tokens, one every %lld; %zu tokens at the end are in none", j->texts.n, j->set->tokens,
            j->set->stride, j->texts.left_out);
    say("%s: %zu %s, %.0f tokens, gradients %s, attention %s; the file will take about %.1f MiB", j->model->name,
        j->texts.n, j->texts.n == 1 ? "text" : "texts", all_tokens(j, 0), j->set->gradients,
        form_name(&j->capture.plan), estimated_bytes(j) / MIB);
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
    const char **inputs;
    int n_inputs;
    TRY(inputs_of(j, &inputs, &n_inputs));
    int code = trace_writer_new(j->set->out, j->set->force, inputs, n_inputs, &facts, "kvlag " KVLAG_VERSION,
                                j->command, j->texts.n, &j->capture.writer);
    mem_free(inputs);
    return code;
}

/* The next sequence is there already. */
static int take_up(job *j, const trace_sequence *facts) {
    capture *c = &j->capture;
    TRY(trace_write_sequence(c->writer, facts, &c->plan));
    TRY(resume_take_sequence(j->journal, c->writer, &c->logits_hash));
    c->sequence++;
    j->taken++;
    progress_at(c->done += capture_work(c->model, &c->plan, facts->n_tokens));
    return 0;
}

static int write_sequence(job *j, size_t i) {
    capture *c = &j->capture;
    const text_sequence *s = &j->texts.item[i];
    trace_sequence facts = {.n_tokens = tokens_of(s),
                            .n_prompt = s->n_prompt,
                            .source = s->source,
                            .tokens = s->id,
                            .pieces = (const uint8_t *)s->pieces.data,
                            .piece_offset = s->offset,
                            .counted = s->steps.counted,
                            .probes = s->steps.probes,
                            .n_probes = s->steps.n_probes};
    if (j->journal && i < resume_sequences(j->journal)) return take_up(j, &facts);
    if (j->journal) TRY(resume_begin_sequence(j->journal, c->writer));
    int code = capture_sequence(c, &facts);
    if (code) return err_prefix(code, "%s", s->name);
    return j->journal ? resume_end_sequence(j->journal, c->writer, c->logits_hash) : 0;
}

static int write_sequences(job *j) {
    double work = 0, tokens = 0;
    for (size_t i = 0; i < j->texts.n; i++) {
        work += capture_work(j->model, &j->capture.plan, tokens_of(&j->texts.item[i]));
        tokens += tokens_of(&j->texts.item[i]);
    }
    progress_begin("trace", "tokens", tokens);
    progress_next(tokens);
    progress_begin("trace", NULL, work);
    int code = capture_wo(&j->capture);
    for (size_t i = 0; i < j->texts.n && !code; i++) code = write_sequence(j, i);
    progress_end();
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

static double flops_of(const job *j, size_t first) {
    const trace_plan *plan = &j->capture.plan;
    double flops = 0;
    for (size_t i = first; i < j->texts.n; i++) {
        int32_t n = tokens_of(&j->texts.item[i]);
        flops += model_flops(j->model, n);
        if (plan->grad_loss) flops += model_gradient_flops(j->model, n, 1 + plan->n_fisher);
    }
    return flops;
}

/* " (100 of them generated)", where tokens are. */
static void name_generated(const job *j, char out[64]) {
    double n = 0;
    for (size_t i = 0; i < j->texts.n; i++) n += (double)(j->texts.item[i].n - j->texts.item[i].n_given);
    out[0] = 0;
    if (j->ask.generate) snprintf(out, 64, " (%.0f of them generated)", n);
}

static int finish_file(job *j, double seconds) {
    int64_t raw, stored, bytes;
    char generated[64];
    name_generated(j, generated);
    trace_writer_sizes(j->capture.writer, &raw, &stored);
    trace_writer *w = j->capture.writer;
    const trace_times spent = trace_writer_times(w);
    j->capture.writer = NULL;
    TRY(trace_writer_finish(w, &bytes));
    resume_remove(j->journal);
    j->journal = NULL;
    say("%s: %.0f tokens%s in %.2f s (%.0f tokens/s, %.0f GFLOP/s), %.1f MiB, attention %.2f to 1, %s XXH3 "
        "%016" PRIx64,
        text_base_name(j->set->out), all_tokens(j, 0), generated, seconds, all_tokens(j, j->taken) / seconds,
        flops_of(j, j->taken) * 1e-9 / seconds, (double)bytes / MIB, (double)raw / (double)stored,
        capture_hashed(&j->capture), j->capture.logits_hash);
    say_times(j, &spent, seconds);
    return 0;
}

static int compute(job *j) {
    capture *c = &j->capture;
    c->model = j->model;
    c->pool = j->pool;
    c->seed = (uint64_t)j->set->seed;
    TRY(open_journal(j));
    TRY(answer_texts(j));
    TRY(make_plan(j));
    TRY(begin_file(j));
    announce(j);
    if (j->journal && (resume_answers(j->journal) || resume_sequences(j->journal)))
        say("%zu of %zu texts are there already", resume_sequences(j->journal), j->texts.n);
    double start = progress_seconds();
    TRY(write_sequences(j));
    return finish_file(j, progress_seconds() - start);
}

static int run(job *j) {
    capture *c = &j->capture;
    TRY(model_check_output(j->set->files.item[0], j->set->out));
    TRY(plugin_backend(j->set->compute.backend, &c->backend));
    TRY(model_open(j->set->files.item[0], &j->model));
    TRY(read_texts(j));
    TRY(pool_new((int)j->set->threads, &j->pool));
    TRY(plugin_load(&j->set->compute, &c->backend, j->model, j->pool, &c->state));
    say_more("%s backend, %d threads, %s", c->backend->name, pool_threads(j->pool), c->backend->device(c->state));
    return compute(j);
}

static void free_job(job *j) {
    trace_writer_abort(j->capture.writer);
    resume_keep(j->journal);
    if (j->capture.backend) j->capture.backend->unload(j->capture.state);
    text_list_free(&j->texts);
    tokenizer_free(j->tokenizer);
    model_close(j->model);
    pool_free(j->pool);
    mem_free(j->command);
}

/* ---- the command line ------------------------------------------------------------------------------------------- */

/* Which of two options that exclude each other were given; NULL: not both. */
static int exclude(bool a, const char *a_name, bool b, const char *b_name, const char *why) {
    return a && b ? err_set(ERR_USAGE, "--%s and --%s: %s", a_name, b_name, why) : 0;
}

static int check_generation(const settings *s) {
    if (s->generate) return 0;
    const char *without = s->temperature ? "temperature" : s->top_p ? "top-p" : s->show ? "show" : NULL;
    return without ? err_set(ERR_USAGE, "--%s is for tokens that --generate makes", without) : 0;
}

static int check(const settings *s) {
    const char *whole = "a marked text is taken whole, as it is", *ids = "token ids are no text";
    if (s->files.n < 2)
        return err_set(ERR_USAGE, "trace needs a model and at least one text: kvlag trace MODEL TEXT... -o FILE.h5");
    if (!s->out) return err_set(ERR_USAGE, "trace needs -o FILE.h5");
    TRY(exclude(s->jsonl, "jsonl", s->ids, "ids", "texts are one or the other"));
    TRY(exclude(s->chat, "chat", s->ids, "ids", "texts are one or the other"));
    TRY(exclude(s->chat, "chat", s->jsonl, "jsonl", "lines that hold \"messages\" are conversations without it"));
    TRY(exclude(s->ids, "ids", s->marked, "marked", ids));
    TRY(exclude(s->ids, "ids", s->special, "special", ids));
    TRY(exclude(s->marked, "marked", s->jsonl, "jsonl", "marks are read in plain texts only"));
    TRY(exclude(s->marked, "marked", s->chat, "chat", "marks are read in plain texts only"));
    TRY(exclude(s->marked, "marked", s->skip, "skip", whole));
    TRY(exclude(s->marked, "marked", s->stride, "stride", whole));
    TRY(exclude(s->marked, "marked", s->generate, "generate", whole));
    if (s->stride && s->tokens < 2) return err_set(ERR_USAGE, "--stride needs --tokens N, the length of its windows");
    if (s->windows && !s->stride) return err_set(ERR_USAGE, "--windows needs --stride");
    if (s->date && !s->chat && !s->jsonl)
        return err_set(ERR_USAGE, "--date is for conversations: --chat, or --jsonl with \"messages\"");
    if (s->date) TRY(chat_check_date(s->date));
    return check_generation(s);
}

static int number(const char *name, const char *given, double least, double most, double *out) {
    if (!given) return 0;
    if (text_parse_number(given, out) || !(*out >= least && *out <= most))
        return err_set(ERR_USAGE, "--%s: '%s' is not a number from %g to %g", name, given, least, most);
    return 0;
}

static document_form form_of(const settings *s) {
    return s->jsonl ? DOCUMENT_JSONL : s->chat ? DOCUMENT_CHAT : s->ids ? DOCUMENT_IDS : DOCUMENT_TEXT;
}

/* What the options ask for, as texts.h and generate.h take it. */
static int resolve(job *j) {
    const settings *s = j->set;
    j->ask = (text_ask){.path = s->files.item + 1,
                        .n_paths = s->files.n - 1,
                        .form = form_of(s),
                        .date = s->date,
                        .marked = s->marked,
                        .special = s->special,
                        .prompt = s->prompt,
                        .skip = s->skip,
                        .tokens = s->tokens,
                        .stride = s->stride,
                        .windows = s->windows,
                        .generate = (int32_t)s->generate};
    j->answers = (generate_ask){.n = (int32_t)s->generate, .top_p = 1, .seed = (uint64_t)s->seed};
    TRY(number("temperature", s->temperature, 0, 100, &j->answers.temperature));
    if (j->answers.temperature > 0) TRY(number("temperature", s->temperature, 0.01, 100, &j->answers.temperature));
    TRY(number("top-p", s->top_p, 1e-6, 1, &j->answers.top_p));
    if (s->top_p && j->answers.temperature == 0)
        return err_set(ERR_USAGE, "--top-p needs a --temperature above 0; without one the most likely token is taken");
    return 0;
}

static int trace_with(const opt *table, settings *s, int argc, char **argv) {
    TRY(opt_parse(table, argc, argv, &s->files));
    say_level(s->quiet ? SAY_QUIET : s->verbose ? SAY_MORE : SAY_NORMAL);
    TRY(check(s));
    job j = {.set = s};
    TRY(resolve(&j));
    j.command = opt_command("trace", table, &s->files);
    int code = j.command ? run(&j) : ERR_DATA;
    free_job(&j);
    return code;
}

int cmd_trace(int argc, char **argv) {
    settings s = {
        .prompt = -1, .attention = "auto", .gradients = "fisher:1", .logits = "topk:32", .compute = PLUGIN_CHOICE};
    const opt table[] = {
        {"output", 'o', OPT_FILE, false, &s.out, "FILE.h5", "the trace to write", 0, 0},
        {"jsonl", 0, OPT_FLAG, true, &s.jsonl, NULL,
         "texts hold JSON objects, one a line, each a text of its own: \"prompt\" with \"text\" or \"completion\", "
         "\"text\" alone, or \"messages\"",
         0, 0},
        {"chat", 0, OPT_FLAG, true, &s.chat, NULL,
         "each text is a conversation in JSON, written as the model's chat template would; its prompt ends where the "
         "assistant's last answer begins",
         0, 0},
        {"date", 0, OPT_TEXT, true, &s.date, "YYYY-MM-DD",
         "the day that a chat template writes (default: the template's own, as in Llama 3; SmolLM3's needs one)", 0, 0},
        {"ids", 0, OPT_FLAG, true, &s.ids, NULL,
         "texts hold token ids, separated by white space or as a JSON array; no BOS is put in front", 0, 0},
        {"tokens", 0, OPT_INT, true, &s.tokens, "N", "only the first N tokens of each text", 1, INT32_MAX},
        {"skip", 0, OPT_INT, true, &s.skip, "N", "leave out the first N tokens of each text", 0, INT32_MAX},
        {"stride", 0, OPT_INT, true, &s.stride, "N",
         "cut each text into windows of --tokens tokens that begin N tokens apart; what fills none is left out", 1,
         INT32_MAX},
        {"windows", 0, OPT_INT, true, &s.windows, "N", "at most N windows of each text", 1, INT32_MAX},
        {"prompt", 0, OPT_INT, true, &s.prompt, "N",
         "the first N steps see everything (default: the prompt where a text has one, else 0)", 0, INT32_MAX},
        {"generate", 0, OPT_INT, true, &s.generate, "N",
         "let the model continue each text, or its prompt, by up to N tokens; the text so far is the prompt", 2,
         INT32_MAX},
        {"temperature", 0, OPT_TEXT, true, &s.temperature, "X",
         "draw the tokens generated (default 0: take the most likely one)", 0, 0},
        {"top-p", 0, OPT_TEXT, true, &s.top_p, "P",
         "draw only from the most likely tokens that together have probability P (default 1)", 0, 0},
        {"show", 0, OPT_FLAG, false, &s.show, NULL, "print what is generated", 0, 0},
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
        {"seed", 0, OPT_INT, true, &s.seed, "N",
         "of the labels drawn for fisher:S, and of the tokens drawn (default 0)", 0, 1LL << 53},
        {"resume", 0, OPT_FLAG, false, &s.resume, NULL,
         "keep finished texts in FILE.h5.partial, and take up what a stopped run left there", 0, 0},
        {"force", 0, OPT_FLAG, false, &s.force, NULL, "replace an existing file", 0, 0},
        {"quiet", 'q', OPT_FLAG, false, &s.quiet, NULL, "say nothing", 0, 0},
        {"verbose", 'v', OPT_FLAG, false, &s.verbose, NULL, "say more", 0, 0},
        {0}};
    int code = trace_with(table, &s, argc, argv);
    opt_list_free(&s.files);
    return code;
}
