/* The figures: each turns results (or lifetimes) into a data file and a gnuplot script that draws it. Nothing here
 * touches the disk or runs gnuplot, so all names are known before the first byte is written. */
#pragma once

#include "analyze/bootstrap.h"
#include "analyze/evidence.h"
#include "analyze/fidelity.h"
#include "analyze/results.h"
#include "base/text.h"

#include <stdbool.h>
#include <stddef.h>

typedef struct figure {
    char *name;  /* of its files, without folder and ending: letters, digits and '_' */
    text data;   /* NAME.dat: blocks with a comment and a line of column names each, two empty lines between */
    text script; /* NAME.gp, begun with gnuplot_header */
    size_t n_blocks;
    bool paper_only; /* means nothing in letters: not drawn on a text terminal */
} figure;

typedef struct figure_list {
    figure *item;
    size_t n, capacity;
} figure_list;
void figure_list_free(figure_list *list);

typedef struct figure_input {
    const results *results;
    const evidence *evidence;      /* blocks of the results; NULL where some have none: said already */
    bootstrap *bootstrap;          /* resamples of the results; without blocks they may have no replicates */
    const fidelity_list *fidelity; /* empty without truths */
    const size_t *metrics;         /* n_metrics indices into results_metrics, the most telling first */
    size_t n_metrics;
    const char *lifetimes; /* path, or NULL */
    const char *trace;     /* path, or NULL */
} figure_input;

/* A kind of figure. collect appends any number of figures; what it must leave out it names on stderr. 0 or a code. */
typedef struct figure_kind {
    const char *name, *help;
    const char *reading; /* what its lines and marks are, for who has not seen one before */
    int (*collect)(const figure_input *in, figure_list *list);
} figure_kind;
extern const figure_kind figure_kinds[]; /* ends with a NULL name */

/* Loss against lag, one figure for each policy that has at least two lags; pending charged and free side by side. */
int figure_lag(const figure_input *in, figure_list *list);

/* Loss against budget, one curve a policy, those with a lag at their best one. */
int figure_budget(const figure_input *in, figure_list *list);

/* Smoothing gain and closed share across lags, one figure for each policy that has lag 0 and more. */
int figure_gain(const figure_input *in, figure_list *list);

/* Policies that judge by the rows after an entry's arrival against those that go on adding up, entries held for the lag
 * in both: loss against the lag, one figure for each of up to three budgets. */
int figure_measuring(const figure_input *in, figure_list *list);

/* What the information of waiting is worth, what its memory costs and what is left, across lags: one figure for each
 * policy that has pending entries both charged and free. */
int figure_pending(const figure_input *in, figure_list *list);

/* Loss against memory, and against modelled decode time where it is known, with the Pareto front. */
int figure_pareto(const figure_input *in, figure_list *list);

/* Memory that each policy needs for a few round losses, and that as a share of what the best filter needs. */
int figure_memory(const figure_input *in, figure_list *list);

/* Which entries stay visible, for up to four configurations of a lifetimes file. */
int figure_retention(const figure_input *in, figure_list *list);

/* Estimates against truths, one figure for each mode of the true reruns. */
int figure_fidelity(const figure_input *in, figure_list *list);

/* The text, each token shaded by how long the policy of least loss kept it, and beside it the oracle: one page. */
int figure_text(const figure_input *in, figure_list *list);

/* Which tokens the oracle of the same budget keeps longer, in their context: one figure for each policy, up to six. */
int figure_lost(const figure_input *in, figure_list *list);

/* Heat maps by layer and query head: what each loses alone, and the lag that suits it. */
int figure_heads(const figure_input *in, figure_list *list);

/* Loss along the text, by the step that is disturbed, of the best configurations at one budget. */
int figure_along(const figure_input *in, figure_list *list);
