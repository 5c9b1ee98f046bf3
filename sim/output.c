#include "sim/output.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/progress.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- what stands above the rows --------------------------------------------------------------------------------- */

static const char *form_read(const question *q, const trace *t) {
    if (q->options.form == TRACE_AUTO) return trace_get_sequence(t, 0)->has_factored ? "factored" : "dense";
    return q->options.form == TRACE_DENSE ? "dense" : "factored";
}

/* What differs between the reruns behind the calibration and a trace; "" if nothing does. */
static void mismatch(const calibration *c, const trace *t, char *out, size_t size) {
    const char *model = trace_get_model(t)->name;
    int32_t n_tokens = trace_get_sequence(t, 0)->n_tokens;
    *out = 0;
    if (strcmp(model, c->model) != 0) snprintf(out, size, "made with model '%s', not '%s'", c->model, model);
    else if (n_tokens != c->n_tokens) snprintf(out, size, "made with %d tokens, not %d", c->n_tokens, n_tokens);
}

static int add_calibration(const question *q, const calibration *c, const char *path, text *out) {
    if (!q->options.loss) return text_add(out, "# calibration: none\n");
    if (c->is_default) return text_add(out, "# calibration: uncalibrated (scale 1.5, spread a factor 1.5)\n");
    size_t from = out->n;
    TRY(text_add(out, "# calibration: %s, model %s, %d tokens, budgets %s, %d reruns, scale %.4g, spread a factor %.4g",
                 text_base_name(path), c->model, c->n_tokens, c->budgets, c->n, exp(c->log_c), exp(c->s)));
    TRY(plan_end_comment(out, from));
    for (size_t i = 0; i < q->n_traces; i++) {
        char why[512];
        mismatch(c, q->trace[i], why, sizeof why);
        if (!*why) continue;
        say("calibration %s: %s (%s)", path, why, trace_label(q->trace[i]));
        from = out->n;
        TRY(text_add(out, "# calibration mismatch: %s: %s", trace_label(q->trace[i]), why));
        TRY(plan_end_comment(out, from));
    }
    return 0;
}

int output_head(const question *q, const char *command, const calibration *scale, const char *calibration_path,
                text *out) {
    size_t from = out->n;
    TRY(text_add(out, "# command: %s", command));
    TRY(plan_end_comment(out, from));
    for (size_t i = 0; i < q->n_traces; i++) {
        from = out->n;
        TRY(text_add(out, "# trace: %s %s attention=%s", trace_label(q->trace[i]), trace_hash(q->trace[i]),
                     form_read(q, q->trace[i])));
        TRY(plan_end_comment(out, from));
    }
    TRY(add_calibration(q, scale, calibration_path, out));
    if (q->options.loss && !kv_bits_plain(&q->bits))
        TRY(text_add(out, "# calibration: made for evictions; rows whose kv_bits or pending_bits are below 16 are "
                          "uncalibrated\n"));
    const requests *r = q->requests;
    if (r)
        TRY(text_add(out, "# pool: %d entries, evicted down to %d, rule %s, %zu requests\n", r->entries, r->low,
                     pool_rule_name(r->rule), r->n));
    return text_add(out, "# positions: original positions, open loop\n");
}

int output_floored(text *csv, long long n, bool is_shard) {
    if (!n && !is_shard) return 0;
    return text_add(csv, "# floored: %lld times a head kept less than 1e-6 of its mass\n", n);
}

/* ---- rows ------------------------------------------------------------------------------------------------------- */

/* The result that a row takes, or NULL where another shard has it. */
static const sweep_result *result_of(const output *o, const plan_row *r) {
    return shard_owns(o->p->part, r->unit) ? &o->result[r->unit / o->p->part.n] : NULL;
}

static results_stay stay_of(const question *q, size_t unit) {
    const request *r = &q->requests->item[unit];
    return (results_stay){.arrival = r->arrival, .waited = r->start - r->arrival, .held = q->pooled[unit].held};
}

static int compose(const output *o, text *csv) {
    int64_t floored = 0;
    TRY(text_add(csv, "# kvlag results v1\n"));
    if (o->note) TRY(shard_note_write(o->note, csv));
    TRY(text_add_bytes(csv, o->head.data, o->head.n));
    for (size_t i = 0; i < o->p->n_rows; i++) {
        const sweep_result *r = result_of(o, &o->p->row[i]);
        if (r) floored += r->floored;
    }
    TRY(output_floored(csv, (long long)floored, o->note != NULL));
    TRY(text_add_bytes(csv, o->p->skipped.data, o->p->skipped.n));
    TRY(results_add_header(csv, o->q->requests != NULL));
    results_terms terms = {&o->q->options, o->scale, o->device};
    for (size_t i = 0; i < o->p->n_rows; i++) {
        const plan_row *row = &o->p->row[i];
        const sweep_result *r = result_of(o, row);
        if (!r) continue;
        const trace *t = o->q->trace[row->trace];
        results_stay stay;
        if (o->q->requests) stay = stay_of(o->q, row->unit);
        TRY(results_add_row(csv, &row->key, r, &terms, trace_get_model(t),
                            trace_get_sequence(t, row->key.seq)->n_tokens, o->q->requests ? &stay : NULL));
    }
    return 0;
}

static int write_csv(const output *o, const outfile *f) {
    text csv = {0};
    int code = compose(o, &csv);
    if (!code) code = outfile_write(f, csv.data, csv.n);
    text_free(&csv);
    return code;
}

/* ---- blocks ----------------------------------------------------------------------------------------------------- */

int output_try_blocks(const char *csv_path, bool force, const char *const *inputs, int n_inputs) {
    outfile f;
    char *path = blocks_path(csv_path);
    int code = path ? outfile_begin(&f, path, force, inputs, n_inputs) : ERR_DATA;
    if (!code) outfile_abort(&f);
    mem_free(path);
    return code;
}

static int open_blocks(const output *o, blocks_writer **out) {
    const question *q = o->q;
    int n_layer = 0, n_head = 0, n_fisher = q->options.loss ? trace_get_sequence(q->trace[0], 0)->n_fisher : 0;
    size_t rows = 0;
    for (size_t i = 0; i < q->n_traces; i++) {
        const trace_model *m = trace_get_model(q->trace[i]);
        if (m->n_layer > n_layer) n_layer = m->n_layer;
        if (m->n_head > n_head) n_head = m->n_head;
    }
    for (size_t i = 0; i < o->p->n_rows; i++) rows += result_of(o, &o->p->row[i]) != NULL;
    char *path = blocks_path(o->path);
    if (!path) return ERR_DATA;
    int code = blocks_writer_new(path, o->force, rows, n_layer, n_head, n_fisher, q->options.loss, out);
    mem_free(path);
    return code;
}

static int write_blocks(const output *o, blocks_writer *b) {
    size_t at = 0;
    for (size_t i = 0; i < o->p->n_rows; i++) {
        const plan_row *row = &o->p->row[i];
        const sweep_result *r = result_of(o, row);
        const trace_model *m = trace_get_model(o->q->trace[row->trace]);
        if (!r) continue;
        blocks_row block = {
            .lost_mass = r->block_lost_mass, .steps = r->block_steps, .head_lost_mass = r->head_lost_mass};
        if (o->q->options.loss) {
            block.first = r->block_first;
            block.fisher = r->block_fisher;
            block.head_first = r->head_first;
            block.head_fisher = r->head_fisher;
        }
        TRY(blocks_write_row(b, at++, m->n_layer, m->n_head, &block));
    }
    return 0;
}

/* ---- lifetimes -------------------------------------------------------------------------------------------------- */

/* Has a row before this one the same lifetimes, kept in other widths? */
static bool is_written(const plan *p, size_t row) {
    for (size_t i = 0; i < row; i++)
        if (p->row[i].config == p->row[row].config && p->row[i].key.seq == p->row[row].key.seq) return true;
    return false;
}

int output_lifetimes(const question *q, const plan *p, size_t own, const sweep_result *result, lifetimes_writer *w) {
    const trace_model *m = trace_get_model(q->trace[0]);
    size_t unit = own * p->part.n + p->part.k - 1;
    for (size_t i = 0; i < p->n_rows; i++) {
        const plan_row *r = &p->row[i];
        if (r->unit != unit || is_written(p, i)) continue;
        const results_key *k = &r->key;
        lifetimes_config c = {k->policy, k->spec,     k->budget_asked, k->lag,
                              k->unit,   k->schedule, k->pending,      k->resolved};
        lifetimes_seq s = {k->budget, k->hold, k->sinks};
        bool first = true;
        for (size_t b = 0; b < i; b++) first &= p->row[b].config != r->config;
        if (first) TRY(lifetimes_write_config(w, r->config, &c));
        TRY(lifetimes_write_seq(w, r->config, k->seq, &s, m->n_layer, m->n_kv_head,
                                trace_get_sequence(q->trace[0], k->seq)->n_tokens, result->evict_at));
    }
    return 0;
}

static int finish_lifetimes(lifetimes_writer **out) {
    lifetimes_writer *w = *out;
    *out = NULL;
    return w ? lifetimes_writer_finish(w) : 0;
}

/* ---- requests of a pool ----------------------------------------------------------------------------------------- */

double jain_index(const double *x, size_t n) {
    double sum = 0, squares = 0;
    for (size_t i = 0; i < n; i++) {
        sum += x[i];
        squares += x[i] * x[i];
    }
    return squares > 0 ? sum * sum / ((double)n * squares) : 1;
}

static int add_fairness(const output *o, const char *name, double spread, text *out) {
    const requests *q = o->q->requests;
    double *held = mem_new(q->n, sizeof *held, "requests");
    if (!held) return ERR_DATA;
    for (size_t i = 0; i < q->n; i++) held[i] = o->q->pooled[i].held;
    double jain = jain_index(held, q->n);
    mem_free(held);
    return text_add(out, "Jain's index of entries held %.4f, spread of %s %.6g\n", jain, name, spread);
}

int output_requests(const output *o, text *out) {
    const requests *q = o->q->requests;
    results_terms terms = {&o->q->options, o->scale, o->device};
    const char *name = "";
    double least = INFINITY, most = -INFINITY;
    TRY(text_add(out, "pool of %d entries, rule %s\n", q->entries, pool_rule_name(q->rule)));
    for (size_t i = 0; i < q->n; i++) {
        const results_key *k = &o->p->row[i].key;
        results_stay stay = stay_of(o->q, i);
        double loss = results_loss(k, &o->result[i], &terms, &name);
        least = fmin(least, loss);
        most = fmax(most, loss);
        if (!i) TRY(text_add(out, "%5s %8s %7s %9s %12s  %s\n", "seq", "arrival", "waited", "held", name, "spec"));
        TRY(text_add(out, "%5zu %8lld %7lld %9.2f %12.6g  %s%s%s\n", k->seq, (long long)stay.arrival,
                     (long long)stay.waited, stay.held, loss, k->spec, *k->lag ? " lag " : "", k->lag));
    }
    return add_fairness(o, name, most - least, out);
}

/* ---- all of them ------------------------------------------------------------------------------------------------ */

int output_write(const output *o, outfile *csv, lifetimes_writer **w) {
    blocks_writer *blocks;
    TRY(write_csv(o, csv));
    TRY(open_blocks(o, &blocks));
    int code = write_blocks(o, blocks);
    if (!code) code = finish_lifetimes(w);
    if (code) {
        blocks_writer_abort(blocks);
        return code;
    }
    TRY(blocks_writer_finish(blocks));
    return outfile_commit(csv);
}
