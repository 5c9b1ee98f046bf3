/* Results made up for a test: rows with values for every step, written as FILE.csv and FILE.blocks.h5 the way sim does,
 * and read again. */
#pragma once

#include "analyze/bootstrap.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/rng.h"
#include "base/text.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct made_row {
    const char *seq, *spec, *budget, *pending;
    double lag;          /* -1: none */
    double entries;      /* of the budget; 0: 64 */
    const double *first; /* [n_steps] by step: what dloss_first sums up; lost_mass is given the same values */
    const double *kl;    /* [n_steps] or NULL for zeros: kl_est = fisher, its interval a factor e^spread either way */
    double updates;      /* score_updates; 0: none in the file */
    double spread;       /* half-width of the row's 90 % interval of log kl_est; 0: none */
} made_row;

typedef struct made {
    size_t n_steps, n, capacity;
    struct made_sums {
        double first[BLOCKS_PER_ROW], fisher[BLOCKS_PER_ROW];
        int32_t steps[BLOCKS_PER_ROW];
    } * sums;
    text csv;
    char path[64], blocks[64];
    const char *paths[1];
    results *r;
    evidence *e;
    bootstrap *b;
} made;

static inline void made_begin(made *m, const char *name, size_t n_steps, bool calibrated) {
    *m = (made){.n_steps = n_steps};
    snprintf(m->path, sizeof m->path, "/tmp/kvlag_%s_%ld.csv", name, (long)getpid());
    snprintf(m->blocks, sizeof m->blocks, "/tmp/kvlag_%s_%ld.blocks.h5", name, (long)getpid());
    m->paths[0] = m->path;
    assert_int_equal(
        text_add(&m->csv,
                 "# kvlag results v1\n%strace,seq,policy,spec,budget_asked,budget,lag,sinks,unit,schedule,"
                 "pending,lost_mass,dloss_first,fisher,dloss_est,dloss_lo,dloss_hi,kl_est,kl_lo,kl_hi,score_updates\n",
                 calibrated ? "" : "# calibration: uncalibrated\n"),
        0);
}

static inline void made_add(made *m, made_row row) {
    assert_int_equal(mem_grow((void **)&m->sums, &m->capacity, m->n + 1, sizeof *m->sums, "rows"), 0);
    struct made_sums *s = &m->sums[m->n++];
    double first = 0, fisher = 0, n = (double)m->n_steps;
    for (size_t b = 0; b < BLOCKS_PER_ROW; b++)
        for (size_t t = b * m->n_steps / BLOCKS_PER_ROW; t < (b + 1) * m->n_steps / BLOCKS_PER_ROW; t++) {
            s->steps[b]++;
            s->first[b] += row.first[t];
            s->fisher[b] += row.kl ? row.kl[t] : 0;
            first += row.first[t] / n;
            fisher += row.kl ? row.kl[t] / n : 0;
        }
    char lag[32] = "", updates[32] = "";
    if (row.updates > 0) snprintf(updates, sizeof updates, "%g", row.updates);
    if (row.lag >= 0) snprintf(lag, sizeof lag, "%g", row.lag);
    size_t policy = strcspn(row.spec, "(");
    double lo = fisher * exp(-row.spread), hi = fisher * exp(row.spread);
    assert_int_equal(text_add(&m->csv,
                              "t,%s,%.*s,\"%s\",%s,%g,%s,0,head,step,%s,%.12g,%.12g,%.12g,%.12g,%.12g,%.12g,"
                              "%.12g,%.12g,%.12g,%s\n",
                              row.seq, (int)policy, row.spec, row.spec, row.budget ? row.budget : "64",
                              row.entries > 0 ? row.entries : 64, lag, row.pending ? row.pending : "charged", first,
                              first, fisher, first + fisher, first + lo, first + hi, fisher, lo, hi, updates),
                     0);
}

/* Write, read, resample. */
static inline void made_read(made *m, uint64_t seed) {
    FILE *f = fopen(m->path, "wb");
    assert_non_null(f);
    fputs(m->csv.data, f);
    fclose(f);
    blocks_writer *w;
    float head = 0;
    assert_int_equal(blocks_writer_new(m->blocks, true, m->n, 1, 1, 1, true, &w), 0);
    for (size_t i = 0; i < m->n; i++) {
        struct made_sums *s = &m->sums[i];
        blocks_row row = {s->first, s->steps, s->first, s->fisher, &head, &head, &head};
        assert_int_equal(blocks_write_row(w, i, 1, 1, &row), 0);
    }
    assert_int_equal(blocks_writer_finish(w), 0);
    if (results_read(m->paths, 1, &m->r) || evidence_read(m->r, &m->e) || bootstrap_new(m->r, m->e, seed, &m->b))
        fail_msg("%s", err_message());
    assert_non_null(m->e);
}

static inline void made_free(made *m) {
    bootstrap_free(m->b);
    evidence_free(m->e);
    results_free(m->r);
    mem_free(m->sums);
    text_free(&m->csv);
    unlink(m->path);
    unlink(m->blocks);
}

/* Normal number k of a stream. */
static inline double made_normal(uint32_t stream, size_t k) {
    return rng_normal(rng_philox(20261130, stream, (uint32_t)k, 0, 77));
}

/* Fill x[n] with a process of mean 0 and variance 1 in which neighbours correlate by `phi`. */
static inline void made_correlated(double *x, size_t n, double phi, uint32_t stream) {
    for (size_t t = 0; t < n; t++)
        x[t] = t ? phi * x[t - 1] + sqrt(1 - phi * phi) * made_normal(stream, t) : made_normal(stream, 0);
}
