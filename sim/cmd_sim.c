/* kvlag sim: replay configurations over traces and write what they cost. */
#include "base/err.h"
#include "base/mem.h"
#include "base/options_file.h"
#include "base/outfile.h"
#include "base/progress.h"
#include "sim/journal.h"
#include "sim/output.h"
#include "sim/part.h"
#include "sim/plan.h"
#include "sim/policy_plugin.h"
#include "sim/sim.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

/* With a journal, passes are bounded, so that little is lost: this many configurations, and twice as many after each
 * pass that was over sooner than this. Rows are produced again for each pass. */
enum { JOURNAL_PASS = 32, JOURNAL_SECONDS = 60 };

typedef struct job {
    /* the command line */
    opt_list traces, specs, plugins;
    opt_file grid;
    const char *out, *budgets, *lags, *schedule, *unit, *pending, *metrics, *sample, *attention, *lifetimes,
        *from_lifetimes, *calibration, *device, *shard, *rule, *kv_bits, *pending_bits;
    long long n_prompt, memory, threads, seed;
    pool_ask pool_ask; /* entries 0: no pool */
    bool force, resume, quiet, verbose;
    char seed_text[24];
    char *command;

    shard part;        /* {1, 1} without --shard */
    char *part_out;    /* where a launcher's part goes instead of `out`; NULL otherwise */
    const char **file; /* inputs */
    int n_files;
    question q;
    requests requests;
    pooled *pooled; /* [requests.n] */
    calibration scale;
    device decoder;
    plan p;
    pool *pool;
    text head;
    shard_note note;

    outfile csv;
    lifetimes_writer *lifetimes_out;
    journal *journal;
    sweep_result *result; /* [p.n_own] */
    size_t n_done;
    sweep_cost cost; /* of the sequence that took most memory */
} job;

/* ---- the command line ------------------------------------------------------------------------------------------- */

static int parse(job *j, int argc, char **argv) {
    opt table[] = {
        {"output", 'o', OPT_FILE, false, &j->out, "FILE.csv", "where results go (and FILE.blocks.h5 beside it)", 0, 0},
        {"policy", 'p', OPT_LIST, true, &j->specs, "SPEC", "a policy, e.g. 'rmm(lag=0|8|64)'; may repeat", 0, 0},
        POLICY_PLUGIN_OPTION(j->plugins),
        {"budget", 'b', OPT_TEXT, true, &j->budgets, "LIST", "budgets: tokens or shares, e.g. 64,128,25%", 0, 0},
        {"lag", 'L', OPT_TEXT, true, &j->lags, "LIST", "lags: 8,16 or 0:64:8 or 0:256:x2 or budget/2", 0, 0},
        {"schedule", 0, OPT_TEXT, true, &j->schedule, "step|every:P|watermark:F|block:N|prompt",
         "when to evict (default: as the policy says, or step)", 0, 0},
        {"unit", 0, OPT_CHOICE, true, &j->unit, "head|layer|model", "what evicts on its own", 0, 0},
        {"pending", 0, OPT_CHOICE, true, &j->pending, "charged|free|both",
         "do entries held for the lag count in the budget", 0, 0},
        {"kv-bits", 0, OPT_TEXT, true, &j->kv_bits, "LIST",
         "width of keys and values: 16, 8 (q8_0), 4 (q4_0); each is priced", 0, 0},
        {"pending-bits", 0, OPT_TEXT, true, &j->pending_bits, "LIST",
         "width of entries held for the lag (default: --kv-bits)", 0, 0},
        {"prompt", 0, OPT_INT, true, &j->n_prompt, "N", "steps that see everything (default: the trace's)", 0, 1 << 30},
        {"metrics", 0, OPT_WORDS, true, &j->metrics, "lost_mass,loss,out_err,out_err=exact",
         "what to compute (default: lost_mass and loss where the trace has gradients, else out_err)", 0, 0},
        {"attention", 0, OPT_CHOICE, true, &j->attention, "dense|factored", "which stored form to read", 0, 0},
        {"lifetimes", 0, OPT_FILE, false, &j->lifetimes, "FILE.h5", "write when each entry left", 0, 0},
        {"from-lifetimes", 0, OPT_FILE, true, &j->from_lifetimes, "FILE.h5",
         "price these lifetimes instead of policies", 0, 0},
        {"calibration", 0, OPT_FILE, true, &j->calibration, "FILE.json",
         "what verify --calibrate wrote: scale and error bar", 0, 0},
        {"device", 0, OPT_TEXT, true, &j->device, "hbm=X/s[,weights=Y]",
         "fill decode_us, a model: bytes read over bandwidth, e.g. hbm=3.35TB/s,weights=270MB", 0, 0},
        {"memory", 0, OPT_SIZE, false, &j->memory, "N", "bound on memory, e.g. 512M (default 1G)", 1 << 20, 1LL << 46},
        {"threads", 0, OPT_INT, false, &j->threads, "N", "worker threads (default: all processors)", 1, 4096},
        {"sample", 0, OPT_TEXT, true, &j->sample, "steps:R", "price R steps only, drawn by strata: a quick look", 0, 0},
        {"seed", 0, OPT_INT, true, &j->seed, "N", "of policies that draw random numbers, and of --sample", 0,
         1LL << 53},
        {"pool", 0, OPT_INT, true, &j->pool_ask.entries, "M",
         "sequences are requests that share M entries a layer and kv head (docs/pool.md)", 1, 1 << 30},
        {"requests", 0, OPT_FILE, true, &j->pool_ask.file, "FILE.csv",
         "of the pool: seq, arrival, policy, budget (default: all sequences, policies in turn)", 0, 0},
        {"arrivals", 0, OPT_INT, true, &j->pool_ask.between, "N", "a request every N steps (default 0: all at once)", 0,
         1 << 30},
        {"pool-rule", 0, OPT_CHOICE, true, &j->rule, "fair|lowest",
         "who pays: who holds most (default), or the lowest score of all", 0, 0},
        {"pool-watermark", 0, OPT_TEXT, true, &j->pool_ask.watermark, "F", "evict down to F of the pool (default 1)", 0,
         0},
        {"shard", 0, OPT_TEXT, false, &j->shard, "k/n", "the k-th of n parts of the work (kvlag merge joins them)", 0,
         0},
        {"resume", 0, OPT_FLAG, false, &j->resume, NULL, "keep what is finished in FILE.csv.partial, and take it up", 0,
         0},
        OPT_GRID(j->grid),
        {"force", 0, OPT_FLAG, false, &j->force, NULL, "replace existing output files", 0, 0},
        {"quiet", 'q', OPT_FLAG, false, &j->quiet, NULL, "say nothing but errors", 0, 0},
        {"verbose", 'v', OPT_FLAG, false, &j->verbose, NULL, "explain", 0, 0},
        {.name = NULL},
    };
    TRY(opt_parse(table, argc, argv, &j->traces));
    TRY(opt_file_read(&j->grid, table));
    if (!opt_given(table, &j->n_prompt)) j->n_prompt = -1;
    if (opt_given(table, &j->seed)) snprintf(j->seed_text, sizeof j->seed_text, "%lld", j->seed);
    TRY(kv_bits_parse(j->kv_bits, j->pending_bits, &j->q.bits));
    for (opt *o = table; o->name; o++) /* asking for 16 bits is asking for nothing */
        if (o->target == &j->kv_bits || o->target == &j->pending_bits) o->recorded = !kv_bits_plain(&j->q.bits);
    j->command = opt_command("sim", table, &j->traces);
    return j->command ? 0 : ERR_DATA;
}

/* What goes with a pool, and with nothing else. */
static int check_pool(const job *j) {
    const pool_ask *a = &j->pool_ask;
    if (!a->entries && (a->file || a->between || a->watermark || j->rule))
        return err_set(ERR_USAGE, "--requests, --arrivals, --pool-rule and --pool-watermark go with --pool M");
    if (!a->entries) return 0;
    if (j->traces.n > 1) return err_set(ERR_USAGE, "--pool takes one trace, got %zu", j->traces.n);
    if (j->shard || j->part_out)
        return err_set(ERR_USAGE, "--pool cannot be split into shards: its requests depend on each other");
    if (j->resume) return err_set(ERR_USAGE, "--pool: --resume does not apply, its requests are replayed in one piece");
    if (j->from_lifetimes) return err_set(ERR_USAGE, "--pool: --from-lifetimes does not apply, it makes its own");
    if (!kv_bits_plain(&j->q.bits)) return err_set(ERR_USAGE, "--pool: --kv-bits and --pending-bits do not apply");
    if (j->pending) return err_set(ERR_USAGE, "--pool: --pending does not apply, every entry takes its place");
    if (a->file && (j->specs.n || j->budgets || a->between))
        return err_set(ERR_USAGE, "--requests brings policies, budgets and arrivals: -p, -b and --arrivals do not "
                                  "apply");
    if (!a->file && !j->specs.n) return err_set(ERR_USAGE, "--pool: say which policies, by -p or --requests");
    if (j->budgets && strchr(j->budgets, ','))
        return err_set(ERR_USAGE, "--pool: -b caps each request and takes one budget, got '%s'", j->budgets);
    return 0;
}

static int check_command(const job *j) {
    if (!j->traces.n) return err_set(ERR_USAGE, "sim: no TRACE given (kvlag help sim)");
    if (!j->out) return err_set(ERR_USAGE, "sim: -o FILE.csv is missing");
    TRY(check_pool(j));
    if (j->lifetimes && j->traces.n > 1) return err_set(ERR_USAGE, "--lifetimes takes one trace, got %zu", j->traces.n);
    if (j->lifetimes && (j->shard || j->part_out))
        return err_set(ERR_USAGE,
                       "--lifetimes cannot be split into shards, since its file is written in one piece; run "
                       "the configurations that it is wanted for in one process");
    if (!j->from_lifetimes) return 0;
    if (j->traces.n > 1) return err_set(ERR_USAGE, "--from-lifetimes takes one trace, got %zu", j->traces.n);
    if (j->specs.n || j->budgets || j->lags || j->schedule || j->unit || j->pending)
        return err_set(
            ERR_USAGE,
            "--from-lifetimes brings its configurations: -p, -b, -L, --schedule, --unit and --pending do not apply");
    return 0;
}

static bool can_out_err(const trace *t) {
    bool can = trace_has_wo(t);
    for (size_t seq = 0; seq < trace_n_sequences(t); seq++) can &= trace_get_sequence(t, seq)->has_v;
    return can;
}

/* Blocks files have one number of samples for all rows. */
static int check_samples(const question *q) {
    int32_t samples = trace_get_sequence(q->trace[0], 0)->n_fisher;
    for (size_t i = 0; i < q->n_traces && q->options.loss; i++)
        for (size_t seq = 0; seq < trace_n_sequences(q->trace[i]); seq++)
            if (trace_get_sequence(q->trace[i], seq)->n_fisher != samples)
                return err_set(ERR_USAGE, "%s has %d samples in grad/fisher, %s has %d: price them in separate calls",
                               trace_path(q->trace[0]), samples, trace_path(q->trace[i]),
                               trace_get_sequence(q->trace[i], seq)->n_fisher);
    return 0;
}

static bool can_loss(const trace *t) {
    for (size_t seq = 0; seq < trace_n_sequences(t); seq++) {
        const trace_sequence *s = trace_get_sequence(t, seq);
        if (!s->has_grad_loss || !s->has_v) return false;
    }
    return true;
}

static void choose_metrics(job *j) {
    question *q = &j->q;
    if (!j->metrics) {
        q->options.loss = q->options.out_err = true;
        for (size_t i = 0; i < q->n_traces; i++) {
            q->options.loss &= can_loss(q->trace[i]);
            q->options.out_err &= can_out_err(q->trace[i]);
        }
        q->options.out_err &= !q->options.loss;
        return;
    }
    q->options.loss = opt_has_word(j->metrics, "loss");
    q->options.out_err_exact = opt_has_word(j->metrics, "out_err=exact");
    q->options.out_err = q->options.out_err_exact || opt_has_word(j->metrics, "out_err");
}

/* steps:R */
static int choose_sample(job *j) {
    static const char name[] = "steps:";
    const char *digits = j->sample + sizeof name - 1;
    if (strncmp(j->sample, name, sizeof name - 1) != 0 || !*digits || digits[strspn(digits, "0123456789")] ||
        strlen(digits) > 9 || atoi(digits) < 4)
        return err_set(ERR_USAGE, "--sample: '%s' is not steps:R with R a number of steps, at least 4", j->sample);
    j->q.options.sample_steps = atoi(digits);
    j->q.options.seed = (uint64_t)j->seed;
    return 0;
}

/* A line for what is missing, once the call is known to be a good one. */
static void say_what_is_left_out(const job *j) {
    const question *q = &j->q;
    if (j->metrics || q->options.out_err || q->options.loss) return;
    size_t i = 0;
    while (can_out_err(q->trace[i])) i++;
    say("out_err is left out: %s has no attn/v or model/wo", trace_path(q->trace[i]));
}

/* ---- inputs ----------------------------------------------------------------------------------------------------- */

static int list_inputs(job *j) {
    j->file = mem_new(j->traces.n + 4, sizeof *j->file, "inputs");
    if (!j->file) return ERR_DATA;
    for (size_t i = 0; i < j->traces.n; i++) j->file[j->n_files++] = j->traces.item[i];
    if (j->from_lifetimes) j->file[j->n_files++] = j->from_lifetimes;
    if (j->calibration) j->file[j->n_files++] = j->calibration;
    if (j->grid.path) j->file[j->n_files++] = j->grid.path;
    if (j->pool_ask.file) j->file[j->n_files++] = j->pool_ask.file;
    return 0;
}

/* One trace given twice is read once. */
static int open_trace(question *q, const char *path) {
    trace *t;
    TRY(trace_open(path, &t));
    q->trace[q->n_traces++] = t;
    for (size_t k = 0; k + 1 < q->n_traces; k++) {
        if (strcmp(trace_label(t), trace_label(q->trace[k])) != 0) continue;
        if (strcmp(trace_hash(t), trace_hash(q->trace[k])) != 0)
            return err_set(ERR_USAGE, "%s and %s have the same name but different content; rename one",
                           trace_path(q->trace[k]), trace_path(t));
        trace_close(q->trace[--q->n_traces]);
        return 0;
    }
    return 0;
}

static int open_traces(job *j) {
    j->q.trace = mem_new(j->traces.n, sizeof *j->q.trace, "traces");
    if (!j->q.trace) return ERR_DATA;
    for (size_t i = 0; i < j->traces.n; i++) TRY(open_trace(&j->q, j->traces.item[i]));
    return 0;
}

static int read_calibration(job *j) {
    calibration_none(&j->scale);
    if (!j->calibration) return 0;
    if (!j->q.options.loss)
        return err_set(ERR_USAGE, "--calibration: no loss is estimated (--metrics loss, and a trace with gradients)");
    return calibration_read(j->calibration, &j->scale);
}

/* ---- what the work is ------------------------------------------------------------------------------------------- */

static int add_file(XXH3_state_t *hash, const char *path) {
    char buffer[65536];
    FILE *f = fopen(path, "rb");
    if (!f) return err_set(ERR_DATA, "%s: %s", path, strerror(errno));
    for (size_t n; (n = fread(buffer, 1, sizeof buffer, f)) > 0;) XXH3_64bits_update(hash, buffer, n);
    int code = ferror(f) ? err_set(ERR_DATA, "%s: cannot be read", path) : 0;
    fclose(f);
    return code;
}

/* Everything that results depend on, beside the files above. */
static int describe(const job *j, text *t) {
    const calibration *c = &j->scale;
    TRY(text_add(t, "kvlag " KVLAG_VERSION "\n%s%s", j->head.data, j->p.skipped.data ? j->p.skipped.data : ""));
    TRY(text_add(t, "%a %a", c->log_c, c->s));
    for (int f = 0; f < CALIBRATION_FAMILIES; f++) TRY(text_add(t, " %d %a", c->family[f].n, c->family[f].log_c));
    for (size_t i = 0; i < j->p.n_rows; i++) {
        TRY(text_add(t, "\n%zu,", j->p.row[i].unit));
        TRY(results_add_key(t, &j->p.row[i].key));
    }
    return 0;
}

/* Name the work in j->note, and this shard's rows. Only shards and journals need it. */
static int note_work(job *j) {
    text t = {0};
    XXH3_state_t *hash = XXH3_createState();
    if (!hash) return err_set(ERR_DATA, "out of memory");
    XXH3_64bits_reset(hash);
    int code = describe(j, &t);
    if (!code) XXH3_64bits_update(hash, t.data, t.n);
    if (!code && j->from_lifetimes) code = add_file(hash, j->from_lifetimes);
    text_free(&t);
    if (!code)
        code = text_add(&t, "%zu rows, kvlag " KVLAG_VERSION ", XXH3 %016llx", j->p.n_rows,
                        (unsigned long long)XXH3_64bits_digest(hash));
    XXH3_freeState(hash);
    j->note = (shard_note){.part = j->part, .total = j->p.n_rows, .work = t.data};
    for (size_t i = 0; i < j->p.n_rows && !code; i++)
        if (shard_owns(j->part, j->p.row[i].unit)) code = shard_note_add_row(&j->note, i);
    return code;
}

static int make_requests(job *j) {
    j->pool_ask.rule = j->rule && strcmp(j->rule, "lowest") == 0 ? POOL_LOWEST : POOL_FAIR;
    j->pool_ask.spec = j->specs.item;
    j->pool_ask.n_specs = j->specs.n;
    TRY(requests_make(&j->pool_ask, &j->q.flags, j->q.trace[0], &j->requests));
    j->q.requests = &j->requests;
    return 0;
}

static int prepare(job *j) {
    question *q = &j->q;
    say_level(j->quiet ? SAY_QUIET : j->verbose ? SAY_MORE : SAY_NORMAL);
    TRY(check_command(j));
    if (j->shard) TRY(shard_parse(j->shard, &j->part));
    if (j->device) TRY(device_parse(j->device, &j->decoder));
    TRY(policy_plugins_load(&j->plugins));
    q->flags = (sim_flags){.budgets = j->budgets,
                           .lags = j->lags,
                           .schedule = j->schedule,
                           .unit = j->unit,
                           .pending = j->pending,
                           .seed = *j->seed_text ? j->seed_text : NULL,
                           .n_prompt = (int32_t)j->n_prompt};
    if (!j->from_lifetimes && !j->pool_ask.entries) TRY(sim_asks_build(j->specs.item, j->specs.n, &q->flags, &q->asks));
    TRY(pool_new((int)j->threads, &j->pool));
    TRY(list_inputs(j));
    TRY(open_traces(j));
    q->options.keep_lifetimes = j->lifetimes != NULL;
    q->options.memory = (size_t)j->memory;
    if (j->attention) q->options.form = strcmp(j->attention, "dense") == 0 ? TRACE_DENSE : TRACE_FACTORED;
    choose_metrics(j);
    if (j->sample) TRY(choose_sample(j));
    TRY(check_samples(q));
    TRY(read_calibration(j));
    if (j->from_lifetimes) TRY(results_open_given(j->from_lifetimes, q->trace[0], &q->given));
    if (j->pool_ask.entries) TRY(make_requests(j));
    TRY(question_check(q));
    say_what_is_left_out(j);
    TRY(plan_make(q, j->part, &j->p));
    TRY(output_head(q, j->command, &j->scale, j->calibration, &j->head));
    TRY(policy_plugins_note(&j->plugins, &j->head));
    return j->shard || j->part_out || j->resume ? note_work(j) : 0;
}

/* ---- output ----------------------------------------------------------------------------------------------------- */

static const char *target(const job *j) {
    return j->part_out ? j->part_out : j->out;
}

static int open_outputs(job *j) {
    const char *const *in = j->file;
    bool force = j->force || j->part_out; /* a launcher's own files are in nobody's way */
    if (j->part_out && j->part.k == 1) {  /* the file that the parts will make must be possible too */
        TRY(outfile_begin(&j->csv, j->out, j->force, in, j->n_files));
        outfile_abort(&j->csv);
        TRY(output_try_blocks(j->out, j->force, in, j->n_files));
    }
    TRY(outfile_begin(&j->csv, target(j), force, in, j->n_files));
    if (j->lifetimes)
        TRY(lifetimes_writer_new(j->lifetimes, force, in, j->n_files, trace_label(j->q.trace[0]),
                                 trace_hash(j->q.trace[0]), &j->lifetimes_out));
    return output_try_blocks(target(j), force, in, j->n_files);
}

static int open_journal(job *j) {
    char *path = part_journal_path(target(j));
    if (!path) return ERR_DATA;
    int code = 0;
    text binding = {0};
    if (j->resume) {
        code = text_add(&binding, "%s, shard %zu/%zu, %s lifetimes, %zu bytes", j->note.work, j->part.k, j->part.n,
                        j->lifetimes ? "with" : "without", sizeof(sweep_result));
        if (!code) code = journal_open(path, j->command, binding.data, &j->journal);
    } else if (access(path, F_OK) == 0) {
        say("%s: unfinished work of an earlier run stays there; --resume takes it up", path);
    }
    text_free(&binding);
    mem_free(path);
    return code;
}

/* ---- sweeping --------------------------------------------------------------------------------------------------- */

static journal_shape shape_of(const job *j, const plan_run *run) {
    const trace *t = j->q.trace[run->trace];
    const trace_model *m = trace_get_model(t);
    const trace_sequence *s = trace_get_sequence(t, run->seq);
    size_t layers = (size_t)m->n_layer, entries = layers * (size_t)m->n_kv_head * (size_t)s->n_tokens;
    return (journal_shape){.heads = layers * (size_t)m->n_head,
                           .loss = j->q.options.loss,
                           .n_fisher = (size_t)s->n_fisher,
                           .lifetimes = j->lifetimes ? entries : 0};
}

/* A call of sweep_sequence: what its callbacks need to know. */
typedef struct sweep_call {
    job *j;
    size_t first; /* its first own unit */
    journal_shape shape;
} sweep_call;

static int done(void *context, size_t index, const sweep_result *result) {
    const sweep_call *c = context;
    job *j = c->j;
    if (j->lifetimes_out) TRY(output_lifetimes(&j->q, &j->p, c->first + index, result, j->lifetimes_out));
    return j->journal ? journal_append(j->journal, &c->shape, result) : 0;
}

/* Lifetimes that were handed in have one row a unit, in order. */
static int read_given(void *context, size_t index, int32_t *out) {
    const sweep_call *c = context;
    const question *q = &c->j->q;
    const trace_model *m = trace_get_model(q->trace[0]);
    const plan_row *r = &c->j->p.row[(c->first + index) * c->j->part.n + c->j->part.k - 1];
    return lifetimes_read(q->given, r->config, r->key.seq, m->n_layer, m->n_kv_head,
                          trace_get_sequence(q->trace[0], r->key.seq)->n_tokens, out);
}

/* Requests of a pool are units, in order. */
static int read_pooled(void *context, size_t index, int32_t *out) {
    const sweep_call *c = context;
    const job *j = c->j;
    const trace_model *m = trace_get_model(j->q.trace[0]);
    size_t i = c->first + index;
    size_t cells = (size_t)m->n_layer * (size_t)m->n_kv_head * (size_t)j->requests.item[i].n_tokens;
    memcpy(out, j->pooled[i].evict_at, cells * sizeof *out);
    return 0;
}

/* Take up what the journal holds of a sequence. */
static int restore_run(job *j, const plan_run *run) {
    journal_shape shape = shape_of(j, run);
    for (bool found; j->n_done < run->first + run->n; j->n_done++) {
        sweep_result *r = &j->result[j->n_done];
        TRY(journal_take(j->journal, &shape, r, &found));
        if (!found) return 0;
        if (j->lifetimes_out) TRY(output_lifetimes(&j->q, &j->p, j->n_done, r, j->lifetimes_out));
        mem_free(r->evict_at);
        r->evict_at = NULL;
    }
    return 0;
}

static int restore(job *j) {
    for (size_t i = 0; i < j->p.n_runs && j->n_done == j->p.run[i].first; i++) TRY(restore_run(j, &j->p.run[i]));
    if (j->n_done) say("%zu of %zu configurations are there already", j->n_done, j->p.n_own);
    return 0;
}

static int sweep_some(job *j, const plan_run *run, size_t n, sweep_cost *total) {
    sweep_call call = {.j = j, .first = j->n_done, .shape = shape_of(j, run)};
    sweep_given given = {.read = j->pooled ? read_pooled : read_given, .context = &call};
    sweep_options options = j->q.options;
    sweep_cost cost;
    options.done = done;
    options.context = &call;
    if (j->pooled) options.memory -= kv_pool_result_bytes(&j->requests, j->q.trace[0]);
    TRY(sweep_sequence(j->q.trace[run->trace], run->seq, j->p.config + j->n_done, n,
                       j->q.given || j->pooled ? &given : NULL, &options, j->pool, j->result + j->n_done, &cost));
    for (size_t i = j->n_done; j->pooled && i < j->n_done + n; i++) j->result[i].updates = j->pooled[i].updates;
    j->n_done += n;
    cost.passes += total->passes;
    if (cost.planned > total->planned) *total = cost;
    else total->passes = cost.passes;
    return j->journal ? journal_sync(j->journal) : 0;
}

/* Rows of attention that a sequence has. */
static double rows_of(const job *j, const plan_run *run) {
    const trace *t = j->q.trace[run->trace];
    return (double)trace_get_model(t)->n_layer * trace_get_sequence(t, run->seq)->n_tokens;
}

static double rows_left(const job *j) {
    double rows = 0;
    for (size_t i = 0; i < j->p.n_runs; i++) {
        const plan_run *run = &j->p.run[i];
        size_t done = j->n_done > run->first ? j->n_done - run->first : 0;
        if (done < run->n) rows += rows_of(j, run) * (double)(run->n - done) / (double)run->n;
    }
    return rows;
}

static int sweep_run(job *j, const plan_run *run, size_t *at_once) {
    sweep_cost total = {0};
    for (size_t end = run->first + run->n; j->n_done < end;) {
        double start = progress_seconds();
        size_t n = end - j->n_done;
        if (j->journal && n > *at_once) n = *at_once;
        progress_next(rows_of(j, run) * (double)n / (double)run->n);
        TRY(sweep_some(j, run, n, &total));
        if (n == *at_once && progress_seconds() - start < JOURNAL_SECONDS) *at_once *= 2;
    }
    if (total.planned > j->cost.planned) j->cost = total;
    return 0;
}

/* All requests of the pool, before the first is priced. */
static int replay_pool(job *j) {
    size_t need = kv_pool_bytes(&j->requests, j->q.trace[0], j->q.options.form);
    if (need > j->q.options.memory)
        return err_set(ERR_USAGE, "--memory: %zu MiB are not enough for the requests of the pool (%zu MiB needed)",
                       j->q.options.memory >> 20, (need + (1 << 20) - 1) >> 20);
    j->pooled = mem_new(j->requests.n, sizeof *j->pooled, "requests");
    if (!j->pooled) return ERR_DATA;
    j->q.pooled = j->pooled;
    j->cost = (sweep_cost){.fixed = need, .planned = need, .passes = 1};
    return kv_pool_replay(&j->requests, j->q.trace[0], j->q.options.form, j->pool, j->pooled);
}

static int sweep_all(job *j) {
    size_t at_once = JOURNAL_PASS;
    j->result = mem_new(j->p.n_own, sizeof *j->result, "results");
    if (!j->result) return ERR_DATA;
    if (j->journal) TRY(restore(j));
    if (j->q.requests) TRY(replay_pool(j));
    int code = 0;
    progress_begin("sim", "rows", rows_left(j));
    for (size_t i = 0; i < j->p.n_runs && !code; i++) code = sweep_run(j, &j->p.run[i], &at_once);
    progress_end();
    return code;
}

/* ---- the command ------------------------------------------------------------------------------------------------ */

static void say_what_was_done(const job *j, double seconds) {
    char which[64] = "";
    size_t n = j->p.n_own, rows = j->p.n_rows;
    if (j->shard || j->part_out) {
        snprintf(which, sizeof which, " (shard %zu/%zu)", j->part.k, j->part.n);
        rows = j->note.n_rows;
    }
    say("%s: %zu rows from %zu configurations%s in %.2f s (%.3f s each), memory planned %.1f MiB (%.1f fixed, up to "
        "%.2f a configuration, %d pass%s)",
        target(j), rows, n, which, seconds, n ? seconds / (double)n : 0, (double)j->cost.planned / 1048576,
        (double)j->cost.fixed / 1048576, (double)j->cost.per_config / 1048576, j->cost.passes,
        j->cost.passes == 1 ? "" : "es");
}

static int work(job *j) {
    double start = progress_seconds();
    TRY(open_journal(j)); /* first, since under its lock nobody else comes to the same output */
    TRY(open_outputs(j));
    TRY(sweep_all(j));
    output o = {.path = target(j),
                .force = j->force || j->part_out,
                .q = &j->q,
                .p = &j->p,
                .result = j->result,
                .scale = &j->scale,
                .device = &j->decoder,
                .head = j->head,
                .note = j->shard || j->part_out ? &j->note : NULL};
    text table = {0};
    if (j->q.requests && !j->quiet) TRY(output_requests(&o, &table));
    int code = output_write(&o, &j->csv, &j->lifetimes_out);
    if (!code && table.data) fputs(table.data, stdout);
    text_free(&table);
    TRY(code);
    if (!j->part_out) {
        journal_remove(j->journal);
        j->journal = NULL;
    }
    say_what_was_done(j, progress_seconds() - start);
    return 0;
}

static void release(job *j) {
    journal_keep(j->journal);
    outfile_abort(&j->csv);
    if (j->lifetimes_out) lifetimes_writer_abort(j->lifetimes_out);
    for (size_t i = 0; j->result && i < j->p.n_own; i++) sweep_result_free(&j->result[i]);
    plan_free(&j->p);
    for (size_t i = 0; i < j->q.n_traces; i++) trace_close(j->q.trace[i]);
    if (j->q.given) lifetimes_close(j->q.given);
    sim_asks_free(&j->q.asks);
    for (size_t i = 0; j->pooled && i < j->requests.n; i++) pooled_free(&j->pooled[i]);
    mem_free(j->pooled);
    requests_free(&j->requests);
    pool_free(j->pool);
    text_free(&j->head);
    shard_note_free(&j->note);
    mem_free(j->result);
    mem_free(j->q.trace);
    mem_free(j->file);
    mem_free(j->part_out);
    mem_free(j->command);
    opt_list_free(&j->traces);
    opt_list_free(&j->specs);
    opt_list_free(&j->plugins);
    opt_file_free(&j->grid);
}

static int run(job *j) {
    int code = prepare(j);
    if (!code) code = work(j);
    release(j);
    return code;
}

int cmd_sim(int argc, char **argv) {
    job j = {.memory = 1LL << 30, .part = {1, 1}};
    int code = parse(&j, argc, argv);
    if (!code) return run(&j);
    release(&j);
    return code;
}

int cmd_sim_part(int argc, char **argv, shard part, char **out, bool *force) {
    job j = {.memory = 1LL << 30, .part = part};
    int code = parse(&j, argc, argv);
    if (!code && j.shard) code = err_set(ERR_USAGE, "--shard: the launcher splits the work itself");
    if (!code && j.out && (!(*out = mem_string(j.out)) || !(j.part_out = part_path(j.out, part)))) code = ERR_DATA;
    *force = j.force;
    if (!code) return run(&j);
    release(&j);
    return code;
}
