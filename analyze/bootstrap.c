#include "analyze/bootstrap.h"
#include "analyze/statistics.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/rng.h"
#include "base/student.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define NORMAL_95 1.6448536269514722
enum { R = BOOTSTRAP_RESAMPLES };

/* What the third counter of the random numbers says they are for. */
enum { DRAW_RUNS = 1, DRAW_MODEL, DRAW_SEQUENCE, DRAW_SERIES, DRAW_CONFIG };

struct bootstrap {
    const results *r;
    const evidence *e;
    uint64_t seed;
    size_t n_sequences, per_resample;
    bool whole;
    uint16_t *times; /* [R][n_sequences] or [R][n_sequences][64]: how often each is drawn */
    double widen;    /* deviations from the estimate, by this factor */
    double **kept;   /* [n_configs][RESULTS_METRICS] replicates, or NULL */
};

/* ---- drawing ---------------------------------------------------------------------------------------------------- */

static uint32_t draw(const bootstrap *b, size_t resample, size_t sequence, size_t k) {
    return rng_philox(b->seed, (uint32_t)resample, (uint32_t)sequence, (uint32_t)k, DRAW_RUNS).v[0];
}

static size_t below(uint32_t word, size_t n) {
    return (size_t)(((uint64_t)word * n) >> 32);
}

static void draw_blocks(bootstrap *b, size_t resample, size_t sequence, uint16_t *times) {
    for (size_t k = 0; k < BLOCKS_PER_ROW / BOOTSTRAP_RUN; k++) {
        size_t first = below(draw(b, resample, sequence, k), BLOCKS_PER_ROW);
        for (size_t i = 0; i < BOOTSTRAP_RUN; i++) times[(first + i) % BLOCKS_PER_ROW]++;
    }
}

static void draw_all(bootstrap *b) {
    for (size_t i = 0; i < R; i++)
        for (size_t s = 0; s < b->n_sequences; s++)
            if (b->whole) b->times[i * b->per_resample + below(draw(b, i, 0, s), b->n_sequences)]++;
            else draw_blocks(b, i, s, b->times + i * b->per_resample + s * BLOCKS_PER_ROW);
}

int bootstrap_new(const results *r, const evidence *e, uint64_t seed, bootstrap **out) {
    bootstrap *b = *out = mem_new(1, sizeof *b, "bootstrap");
    if (!b) return ERR_DATA;
    *b = (bootstrap){.r = r, .e = e, .seed = seed, .n_sequences = r->n_sequences};
    b->whole = r->n_sequences >= BOOTSTRAP_LEAST_SEQUENCES;
    b->per_resample = r->n_sequences * (b->whole ? 1 : BLOCKS_PER_ROW);
    double units = (double)(b->whole ? 1 : BLOCKS_PER_ROW / BOOTSTRAP_RUN); /* of each sequence */
    double n = (double)r->n_sequences, freedom = b->whole ? n - 1 : n * (units - 1);
    b->widen = student_95(freedom) / NORMAL_95 * sqrt(b->whole ? n / (n - 1) : units / (units - 1));
    b->times = mem_new(R * b->per_resample, sizeof *b->times, "resamples");
    b->kept = mem_new(r->n_configs * RESULTS_METRICS + 1, sizeof *b->kept, "replicates");
    if (!b->times || !b->kept) {
        bootstrap_free(b);
        *out = NULL;
        return ERR_DATA;
    }
    draw_all(b);
    return 0;
}

void bootstrap_free(bootstrap *b) {
    if (!b) return;
    for (size_t i = 0; b->kept && i < b->r->n_configs * RESULTS_METRICS; i++) mem_free(b->kept[i]);
    mem_free(b->kept);
    mem_free(b->times);
    mem_free(b);
}

bool bootstrap_over_sequences(const bootstrap *b) {
    return b->whole;
}

/* ---- replicates ------------------------------------------------------------------------------------------------- */

/* A row's sums over blocks of what a metric adds up from; false where there are none. */
static bool block_sums(const bootstrap *b, const result *row, size_t metric, double sums[BLOCKS_PER_ROW]) {
    if (!b->e) return false;
    blocks_row at = evidence_row(b->e, row);
    const double *from = metric == LOST_MASS ? at.lost_mass : metric == DLOSS_FIRST ? at.first : at.fisher;
    if (!from || metric == OUT_ERR) return false;
    size_t samples = metric == FISHER ? evidence_get_shape(b->e, row).n_fisher : 1;
    for (size_t k = 0; k < BLOCKS_PER_ROW; k++) {
        sums[k] = 0;
        for (size_t s = 0; s < samples; s++) sums[k] += from[s * BLOCKS_PER_ROW + k] / (double)samples;
    }
    return true;
}

/* Add scale times the metric's mean over the resampled blocks of one sequence to every replicate. */
static bool add_blocks(const bootstrap *b, const result *row, size_t sequence, size_t metric, double scale,
                       double *replicate) {
    double sums[BLOCKS_PER_ROW];
    if (!block_sums(b, row, metric, sums)) return false;
    const int32_t *steps = evidence_row(b->e, row).steps;
    for (size_t i = 0; i < R; i++) {
        const uint16_t *times = b->times + i * b->per_resample + sequence * BLOCKS_PER_ROW;
        double sum = 0, n = 0;
        for (size_t k = 0; k < BLOCKS_PER_ROW; k++) {
            sum += times[k] * sums[k];
            n += times[k] * (double)steps[k];
        }
        replicate[i] += scale * sum / n;
    }
    return true;
}

static void add_whole(const bootstrap *b, size_t sequence, double value, double *replicate) {
    for (size_t i = 0; i < R; i++) replicate[i] += b->times[i * b->per_resample + sequence] * value;
}

/* Mean over sequences of the metric (of KL_EST: kl_est / fisher times the fisher of the blocks) as resampled. */
static bool resample(const bootstrap *b, const result *c, size_t metric, double *replicate) {
    memset(replicate, 0, R * sizeof *replicate);
    for (size_t s = 0; s < c->n_parts; s++) {
        const result *row = c->part[s];
        double value = row->metric[metric];
        if (isnan(value)) return false;
        if (b->whole) {
            add_whole(b, s, value, replicate);
            continue;
        }
        double fisher = row->metric[FISHER], scale = metric != KL_EST ? 1 : fisher > 0 ? value / fisher : 0;
        if (!add_blocks(b, row, s, metric == KL_EST ? FISHER : metric, scale, replicate)) return false;
    }
    for (size_t i = 0; i < R; i++) replicate[i] /= (double)c->n_parts;
    return true;
}

static void widen(const bootstrap *b, double value, bool positive, double *replicate) {
    for (size_t i = 0; i < R; i++) {
        if (!positive) replicate[i] = value + b->widen * (replicate[i] - value);
        else if (replicate[i] > 0) replicate[i] = value * pow(replicate[i] / value, b->widen);
    }
}

static double normal(const bootstrap *b, size_t resample, size_t sequence, uint32_t k, uint32_t what) {
    return rng_normal(rng_philox(b->seed, (uint32_t)resample, (uint32_t)sequence, k, what));
}

static bool is_calibrated(const bootstrap *b, const result *row) {
    return !b->r->uncalibrated && strcmp(row->kv_bits, "16") == 0 && strcmp(row->pending_bits, "16") == 0;
}

/* Multiply every replicate of a KL by what the calibration may be off. */
static void add_calibration(const bootstrap *b, const result *c, double *replicate) {
    uint32_t config = result_hash(c), series = result_series_hash(c);
    double total = 0;
    for (size_t s = 0; s < c->n_parts; s++) total += c->part[s]->metric[KL_EST];
    if (!(total > 0)) return;
    for (size_t i = 0; i < R; i++) {
        double off = 0, model = normal(b, i, 0, 0, DRAW_MODEL);
        for (size_t s = 0; s < c->n_parts; s++) {
            const result *row = c->part[s];
            double kl = row->metric[KL_EST], spread = log(row->hi[KL_EST] / kl) / NORMAL_95;
            if (!(kl > 0) || !(spread > 0)) {
                off += kl;
                continue;
            }
            double own = is_calibrated(b, row) ? spread : fmin(spread, BOOTSTRAP_OWN_SPREAD);
            double e =
                sqrt(BOOTSTRAP_SHARE_SEQUENCE) * normal(b, i, s, 0, DRAW_SEQUENCE) +
                sqrt(BOOTSTRAP_SHARE_SERIES) * normal(b, i, s, series, DRAW_SERIES) +
                sqrt(1 - BOOTSTRAP_SHARE_SEQUENCE - BOOTSTRAP_SHARE_SERIES) * normal(b, i, s, config, DRAW_CONFIG);
            off += kl * exp(own * e + sqrt(spread * spread - own * own) * model);
        }
        replicate[i] *= off / total;
    }
}

static bool replicate_metric(bootstrap *b, const result *c, size_t metric, const double *kl, double *out) {
    if (metric == DLOSS_EST) {
        if (!kl || !resample(b, c, DLOSS_FIRST, out)) return false;
        widen(b, c->metric[DLOSS_FIRST], false, out);
        for (size_t i = 0; i < R; i++) out[i] += kl[i];
        return true;
    }
    if (!resample(b, c, metric, out)) return false;
    widen(b, c->metric[metric], metric != DLOSS_FIRST, out);
    if (metric == KL_EST) add_calibration(b, c, out);
    return true;
}

int bootstrap_replicates(bootstrap *b, const result *config, size_t metric, const double **out) {
    const double *kl = NULL;
    double **kept = &b->kept[(size_t)(config - b->r->configs) * RESULTS_METRICS + metric];
    *out = *kept;
    if (*kept || isnan(config->metric[metric])) return 0;
    if (metric == DLOSS_EST) TRY(bootstrap_replicates(b, config, KL_EST, &kl));
    double *x = mem_new(R, sizeof *x, "replicates");
    if (!x) return ERR_DATA;
    if (replicate_metric(b, config, metric, kl, x)) *out = *kept = x;
    else mem_free(x);
    return 0;
}

/* ---- questions -------------------------------------------------------------------------------------------------- */

/* The p point of n sorted values, between neighbours in proportion. */
static double point(const double *sorted, size_t n, double p) {
    double at = p * (double)(n - 1);
    size_t k = (size_t)at;
    return k + 1 < n ? sorted[k] + (at - (double)k) * (sorted[k + 1] - sorted[k]) : sorted[n - 1];
}

int bootstrap_interval(double value, const double *replicate, estimate *out) {
    *out = (estimate){value, NAN, NAN};
    for (size_t i = 0; replicate && i < R; i++)
        if (isnan(replicate[i])) replicate = NULL;
    if (!replicate) return 0;
    double *sorted = mem_new(R, sizeof *sorted, "replicates");
    if (!sorted) return ERR_DATA;
    memcpy(sorted, replicate, R * sizeof *sorted);
    statistics_sort(sorted, R);
    out->lo = point(sorted, R, (1 - BOOTSTRAP_LEVEL) / 2);
    out->hi = point(sorted, R, (1 + BOOTSTRAP_LEVEL) / 2);
    mem_free(sorted);
    return 0;
}

int bootstrap_estimate(bootstrap *b, const result *config, size_t metric, estimate *out) {
    const double *x;
    TRY(bootstrap_replicates(b, config, metric, &x));
    return bootstrap_interval(config->metric[metric], x, out);
}

static double p_value(const double *difference) {
    size_t above = 0, below_zero = 0;
    for (size_t i = 0; i < R; i++) {
        above += difference[i] > 0;
        below_zero += difference[i] < 0;
    }
    size_t least = above < below_zero ? above : below_zero, ties = R - above - below_zero;
    return fmin(1, fmax(2 * ((double)least + (double)ties / 2), 1) / R);
}

int bootstrap_difference_between(bootstrap *b_a, const result *a, bootstrap *b_c, const result *c, size_t metric,
                                 estimate *out, double *p) {
    const double *x, *y;
    *out = (estimate){a->metric[metric] - c->metric[metric], NAN, NAN};
    *p = NAN;
    TRY(bootstrap_replicates(b_a, a, metric, &x));
    TRY(bootstrap_replicates(b_c, c, metric, &y));
    if (!x || !y) return 0;
    double *difference = mem_new(R, sizeof *difference, "replicates");
    if (!difference) return ERR_DATA;
    for (size_t i = 0; i < R; i++) difference[i] = x[i] - y[i];
    int code = bootstrap_interval(out->value, difference, out);
    *p = p_value(difference);
    mem_free(difference);
    return code;
}

int bootstrap_difference(bootstrap *b, const result *a, const result *c, size_t metric, estimate *out, double *p) {
    return bootstrap_difference_between(b, a, b, c, metric, out, p);
}
