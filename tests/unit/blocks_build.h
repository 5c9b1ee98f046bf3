/* Results made up for a test, row by row, with all that blocks hold: written as FILE.csv and FILE.blocks.h5. */
#pragma once

#include "analyze/evidence.h"
#include "base/err.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { BUILD_MOST_HEADS = 12 };

typedef struct block_row {
    const char *seq, *spec, *budget, *lag, *pending; /* NULL: 0, h2o, 64, none, charged */
    double c;                                        /* kl_est = c * fisher */
    double lost_mass, first, fisher;                 /* of every step */
    int n_layer, n_head;                             /* 0: 1 and 1 */
    float head_mass[BUILD_MOST_HEADS], head_first[BUILD_MOST_HEADS], head_fisher[BUILD_MOST_HEADS];
} block_row;

/* What its blocks add up: the k-th block of n steps has floor((k+1)n/64) - floor(kn/64) of them. */
static inline int32_t block_steps_of(int n, int k) {
    return (k + 1) * n / BLOCKS_PER_ROW - k * n / BLOCKS_PER_ROW;
}

static inline const char *or_else(const char *word, const char *otherwise) {
    return word ? word : otherwise;
}

static inline void write_block_csv(const char *path, const char *trace, int n_prompt, const block_row *rows, size_t n) {
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    fputs("trace,seq,policy,spec,budget_asked,budget,lag,unit,schedule,pending,n_prompt,lost_mass,dloss_first,fisher,"
          "kl_est,dloss_est\n",
          f);
    for (size_t i = 0; i < n; i++) {
        const block_row *r = &rows[i];
        const char *spec = or_else(r->spec, "h2o"), *budget = or_else(r->budget, "64");
        fprintf(f, "%s,%s,%.*s,%s,%s,%s,%s,head,step,%s,%d,%.9g,%.9g,%.9g,%.9g,%.9g\n", trace, or_else(r->seq, "0"),
                (int)strcspn(spec, "("), spec, spec, budget, budget, or_else(r->lag, ""),
                or_else(r->pending, "charged"), n_prompt, r->lost_mass, r->first, r->fisher, r->c * r->fisher,
                r->first + r->c * r->fisher);
    }
    fclose(f);
}

/* Of two Fisher samples the first has all of it twice, the second none: their mean is what the row says. */
static inline void write_block_h5(const char *path, int steps, int n_layer, int n_head, const block_row *rows,
                                  size_t n) {
    blocks_writer *w;
    assert_int_equal(blocks_writer_new(path, true, n, n_layer, n_head, 2, true, &w), 0);
    for (size_t i = 0; i < n; i++) {
        const block_row *r = &rows[i];
        double mass[BLOCKS_PER_ROW], first[BLOCKS_PER_ROW], fisher[2 * BLOCKS_PER_ROW] = {0};
        int32_t counted[BLOCKS_PER_ROW];
        for (int k = 0; k < BLOCKS_PER_ROW; k++) {
            counted[k] = block_steps_of(steps, k);
            mass[k] = r->lost_mass * counted[k];
            first[k] = r->first * counted[k];
            fisher[k] = 2 * r->fisher * counted[k];
        }
        blocks_row row = {mass, counted, first, fisher, r->head_mass, r->head_first, r->head_fisher};
        assert_int_equal(blocks_write_row(w, i, r->n_layer ? r->n_layer : 1, r->n_head ? r->n_head : 1, &row), 0);
    }
    assert_int_equal(blocks_writer_finish(w), 0);
}
