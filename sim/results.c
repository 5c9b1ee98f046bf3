#include "sim/results.h"
#include "base/err.h"
#include "base/mem.h"
#include "sim/quantise.h"
#include "sim/spec.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- keys ------------------------------------------------------------------------------------------------------- */

void results_key_free(results_key *k) {
    char *owned[] = {k->trace, k->policy, k->spec,  k->resolved, k->budget_asked, k->budget,
                     k->lag,   k->hold,   k->sinks, k->unit,     k->schedule,     k->pending};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) mem_free(owned[i]);
    *k = (results_key){0};
}

static char *number(long long x) {
    char buffer[24];
    snprintf(buffer, sizeof buffer, "%lld", x);
    return mem_string(buffer);
}

int results_key_of(const char *label, size_t seq, const sim_config *c, results_key *out) {
    *out = (results_key){.seq = seq, .n_prompt = c->n_prompt, .kv_bits = c->kv_bits, .pending_bits = c->pending_bits};
    out->trace = mem_string(label);
    out->policy = mem_string(c->setup.policy->name);
    out->spec = mem_string(c->spec);
    out->resolved = mem_string(c->resolved);
    out->budget_asked = mem_string(c->budget_asked);
    out->budget = number(c->budget);
    out->lag = c->lag < 0 ? mem_string("") : number(c->lag);
    out->hold = number(c->hold);
    out->sinks = number(c->sinks);
    out->unit = mem_string(sim_unit_name(c->unit));
    out->schedule = mem_string(c->schedule_text);
    out->pending = mem_string(c->pending_free ? "free" : "charged");
    if (out->trace && out->policy && out->spec && out->resolved && out->budget_asked && out->budget && out->lag &&
        out->hold && out->sinks && out->unit && out->schedule && out->pending && out->kv_bits && out->pending_bits)
        return 0;
    results_key_free(out);
    return ERR_DATA;
}

int results_open_given(const char *path, const trace *t, lifetimes **out) {
    TRY(lifetimes_open(path, out));
    const char *hash = lifetimes_hash(*out);
    if (*hash && strcmp(hash, trace_hash(t)) != 0)
        return err_set(ERR_DATA, "%s: made from another trace (%s, content %s) than %s (content %s)", path,
                       lifetimes_label(*out), hash, trace_path(t), trace_hash(t));
    for (size_t i = 0; i < lifetimes_n_configs(*out); i++) {
        size_t last = lifetimes_sequence_number(*out, i, lifetimes_n_sequences(*out, i) - 1);
        if (last >= trace_n_sequences(t))
            return err_set(ERR_DATA, "%s: configuration %zu has sequence %zu, but %s has %zu", path, i, last,
                           trace_path(t), trace_n_sequences(t));
    }
    return 0;
}

int results_key_of_given(const char *label, const lifetimes *given, size_t config, size_t seq, const sim_config *priced,
                         results_key *out) {
    const lifetimes_config *c = lifetimes_get_config(given, config);
    const lifetimes_seq *s = lifetimes_get_seq(given, config, seq);
    *out = (results_key){
        .seq = seq, .n_prompt = priced->n_prompt, .kv_bits = priced->kv_bits, .pending_bits = priced->pending_bits};
    const char *from[] = {label,  c->policy, c->spec,  c->resolved, c->budget_asked, s->budget,
                          c->lag, s->hold,   s->sinks, c->unit,     c->schedule,     c->pending};
    char **to[] = {&out->trace, &out->policy, &out->spec,  &out->resolved, &out->budget_asked, &out->budget,
                   &out->lag,   &out->hold,   &out->sinks, &out->unit,     &out->schedule,     &out->pending};
    for (size_t i = 0; i < sizeof from / sizeof *from; i++)
        if (!(*to[i] = mem_string(from[i]))) return ERR_DATA;
    return 0;
}

sim_config results_config_of_given(const lifetimes *given, size_t config, size_t seq, int32_t n_prompt) {
    double hold;
    sim_config c = {.n_prompt = n_prompt, .kv_bits = 16, .pending_bits = 16};
    c.waits = spec_hold_is_lag(lifetimes_get_config(given, config)->spec);
    if (text_parse_number(lifetimes_get_seq(given, config, seq)->hold, &hold) == 0)
        c.hold = (int32_t)fmax(0, fmin(hold, INT32_MAX));
    return c;
}

/* ---- rows ------------------------------------------------------------------------------------------------------- */

int results_add_header(text *csv, bool has_stay) {
    TRY(text_add(csv, "trace,seq,policy,spec,resolved,budget_asked,budget,lag,hold,sinks,unit,schedule,pending,"
                      "kv_bits,pending_bits,n_prompt,n_counted,lost_mass,out_err,dloss_first,fisher,dloss_est,dloss_lo,"
                      "dloss_hi,kl_est,kl_lo,kl_hi,"
                      "retained,footprint,peak,evictions,evict_batches,expired,resident,kv_bytes,"
                      "score_updates,decode_us"));
    return text_add(csv, has_stay ? ",arrival,waited,held\n" : "\n");
}

static int add_text(text *csv, const char *field) {
    TRY(text_add_csv(csv, field));
    return text_add(csv, ",");
}

static int add_number(text *csv, double x, bool known) {
    return known ? text_add(csv, "%.9g,", x) : text_add(csv, ",");
}

/* Standard error of dloss_first: that of the mean over blocks of steps, which the block bootstrap tends to. */
static double first_error(const sweep_result *r) {
    double mean = r->dloss_first * (double)r->n_counted / BLOCKS_PER_ROW, squares = 0;
    for (int b = 0; b < BLOCKS_PER_ROW; b++) squares += (r->block_first[b] - mean) * (r->block_first[b] - mean);
    return sqrt(squares * BLOCKS_PER_ROW / (BLOCKS_PER_ROW - 1)) / (double)r->n_counted;
}

#define NORMAL_95 1.6448536269514722

/* A 90 % interval on log scale around kl, widened by what the sampling of steps adds. */
static void widen(double kl, double relative_error, double *lo, double *hi) {
    if (!(kl > 0 && *hi > kl)) return;
    double by = exp(hypot(log(*hi / kl), NORMAL_95 * relative_error));
    *lo = kl / by;
    *hi = kl * by;
}

/* dloss_first, fisher, dloss_est, dloss_lo, dloss_hi, kl_est, kl_lo, kl_hi. */
static int add_loss(text *csv, const results_key *k, const sweep_result *r, const sweep_options *o,
                    const calibration *c) {
    double kl = 0, lo = 0, hi = 0, q = NORMAL_95 * first_error(r);
    const sweep_sampling *s = &r->sampling;
    bool has_fisher = o->loss && r->n_fisher > 0;
    if (has_fisher) calibration_apply(c, spec_family(k->spec), r->fisher, &kl, &lo, &hi);
    double scale = r->fisher > 0 ? kl / r->fisher : 0;
    double sampled = fmax(s->first + 2 * scale * s->first_fisher + scale * scale * s->fisher, 0);
    q = hypot(q, NORMAL_95 * sqrt(sampled));
    double est = r->dloss_first + kl, down = hypot(kl - lo, q), up = hypot(hi - kl, q);
    if (r->fisher > 0) widen(kl, sqrt(s->fisher) / r->fisher, &lo, &hi);
    const double value[] = {r->dloss_first, r->fisher, est, est - down, est + up, kl, lo, hi};
    for (int i = 0; i < 8; i++) TRY(add_number(csv, value[i], i == 0 ? o->loss : has_fisher));
    return 0;
}

double results_loss(const results_key *k, const sweep_result *r, const results_terms *terms, const char **name) {
    double kl = 0, lo, hi;
    const sweep_options *o = terms->options;
    *name = o->out_err ? "out_err" : "lost_mass";
    if (!o->loss) return o->out_err ? r->out_err : r->lost_mass;
    *name = r->n_fisher > 0 ? "dloss_est" : "dloss_first";
    if (r->n_fisher > 0) calibration_apply(terms->scale, spec_family(k->spec), r->fisher, &kl, &lo, &hi);
    return r->dloss_first + kl;
}

int results_add_key(text *csv, const results_key *k) {
    const char *field[] = {k->policy, k->spec,  k->resolved, k->budget_asked, k->budget, k->lag,
                           k->hold,   k->sinks, k->unit,     k->schedule,     k->pending};
    TRY(add_text(csv, k->trace));
    TRY(text_add(csv, "%zu,", k->seq));
    for (size_t i = 0; i < sizeof field / sizeof *field; i++) TRY(add_text(csv, field[i]));
    return text_add(csv, "%d,%d,%d,", k->kv_bits, k->pending_bits, k->n_prompt);
}

/* resident, kv_bytes, score_updates, decode_us: means over the steps after the prompt (docs/costs.md). */
static int add_costs(text *csv, const results_key *k, const sweep_result *r, const device *d, const trace_model *m,
                     int32_t n_tokens) {
    double steps = (double)(n_tokens - k->n_prompt) * r->use.units, resident = r->use.decoded / steps;
    double young = r->use.young / steps, old_bytes = (double)quantise_bytes(k->kv_bits, (size_t)m->head_dim);
    double young_bytes = (double)quantise_bytes(k->pending_bits, (size_t)m->head_dim);
    double kv_bytes = ((resident - young) * old_bytes + young * young_bytes) * m->n_layer * m->n_kv_head * 2;
    TRY(add_number(csv, resident, true));
    TRY(add_number(csv, kv_bytes, true));
    TRY(add_number(csv, (double)r->updates / steps, r->updates >= 0));
    return d->hbm > 0 ? text_add(csv, "%.9g", device_decode_us(d, kv_bytes)) : 0;
}

int results_add_row(text *csv, const results_key *k, const sweep_result *r, const results_terms *terms,
                    const trace_model *m, int32_t n_tokens, const results_stay *stay) {
    const footprint *u = &r->use;
    const sweep_options *o = terms->options;
    double all = (double)n_tokens * ((double)n_tokens + 1) / 2 * u->units;
    TRY(results_add_key(csv, k));
    TRY(text_add(csv, "%lld,", (long long)r->n_counted));
    TRY(add_number(csv, r->lost_mass, true));
    TRY(add_number(csv, r->out_err, o->out_err));
    TRY(add_loss(csv, k, r, o, terms->scale));
    TRY(add_number(csv, u->probes > 0 ? u->retained / u->probes : 0, u->probes > 0));
    TRY(text_add(csv, "%.9g,%.9g,%.9g,%.9g,%.9g,", u->visible / all, u->peak / u->units, u->evictions / u->units,
                 u->batches / u->units, u->expired / u->units));
    TRY(add_costs(csv, k, r, terms->device, m, n_tokens));
    if (stay) TRY(text_add(csv, ",%lld,%lld,%.9g", (long long)stay->arrival, (long long)stay->waited, stay->held));
    return text_add(csv, "\n");
}
