/* Private to sweep.c, layer.c, full_run.c, hindsight.c and price.c: what one pass over a sequence holds. */
#pragma once

#include "base/mem.h"
#include "sim/estimate.h"
#include "sim/layer_data.h"
#include "sim/replay.h"
#include "sim/sample.h"
#include "sim/sweep.h"
#include "sim/widths.h"

#include <stdatomic.h>

/* What the full run's coming rows hold for an entry: of one kind, over one horizon (hindsight.c). Its units are the kv
 * heads, then the layer where some unit is one. */
typedef struct future {
    bool fisher;     /* of the Fisher evidence, else of the mean row */
    int32_t horizon; /* counted rows among t+1 .. t+horizon; T: all that follow */
    double *sum;     /* [units][T] sums of columns: of all rows less those seen, or of the rows up to t + horizon */
    double *after;   /* [units][tile][stride] what lies ahead of each row of the tile */
} future;

/* One configuration in flight. */
typedef struct run {
    const sim_config *c;
    sweep_result *out;
    bool is_given;                    /* its lifetimes are there before it is priced: handed in, or from together.h */
    const future *future;             /* what its policy looks at, or NULL */
    int32_t *given;                   /* [n_layer][n_kv_head][T] them */
    int n_units;                      /* units in a layer: n_kv_head or 1 */
    bool is_quantised;                /* delta comes from price_widths.c */
    replay **replay;                  /* [n_units] */
    int32_t *evict_at;                /* [n_units][stride] of the current layer */
    double *head_lost;                /* [n_layer][n_head] sums over counted steps */
    double *head_first, *head_fisher; /* [n_layer][n_head] sums over steps, with loss */
    double *fisher;                   /* [n_fisher][T] sum over layers and heads of g_y.delta so far */
    atomic_llong floored;
    double out_err;                 /* sum over layers and counted steps */
    double *step_lost, *step_first; /* [T] sums over layers and heads, where steps are sampled */
} run;

/* Where something is missing: see replay_range. */
typedef struct span {
    int32_t first_missing, left_end;
} span;

typedef struct task {
    run *r;
    int unit;
} task;

typedef struct pass {
    trace *t;
    size_t seq;
    const trace_model *m;
    const trace_sequence *s;
    const sweep_options *o;
    pool *p;
    int32_t n_tokens, n_prompt;
    size_t stride; /* of rows and lifetimes: T padded */
    int tile, group;
    /* Streams of a query head: first those that do not depend on the step (probes or values), then one a label set:
     * the text's own labels, then the n_fisher samples. */
    int n_fixed, n_sets, n_streams;
    int priced_sets;   /* of n_sets, those that are priced: 0 where only policies look at gradients */
    bool layer_unit;   /* some unit that looks at the full run is a whole layer */
    unsigned evidence; /* NEEDS_OUT | NEEDS_LOSS | NEEDS_FISHER of any policy */

    run *runs;
    size_t n_runs;
    /* Of the current tile. Runs stand side by side, since a row is priced for one after another. */
    span *spans;    /* [n_kv_head][n_runs] by unit */
    uint16_t *gone; /* [tile][n_kv_head][n_runs][stride / 16] what each row does not see, by unit */
    double *sums;   /* [tile][n_runs][n_head][1 + n_streams] */
    task *tasks;    /* replays of a layer, those of one kv head together */
    size_t n_tasks;

    uint8_t *counted;    /* [T] */
    sample steps;        /* which steps are priced, and how many each stands for */
    uint8_t *block;      /* [T] block of each step from n_prompt on */
    replay_facts *facts; /* [T] */
    float *rows;         /* [n_head][n_rows][row_stride] of the current tile */
    layer_data data;     /* what policies see of the layer beside rows */
    float *wo;           /* [n_head*head_dim][n_embd] */
    float *values;       /* [n_kv_head][stride*head_dim] packed for kernels, where streams or evidence need them */
    size_t stream_rows;  /* of `stream`, a worker */
    float *stream;       /* [threads][stream_rows][stride] streams of some rows of a kv head's query heads */
    float *deviation;    /* [threads][n_sets][stride] for evidence */
    float *mean;         /* [threads][LAYER_ROWS][group][n_streams] S of rows, where something is quantised */
    estimate_lost *lost; /* [threads][n_runs] */
    float *lanes;        /* [threads][estimate_lanes(n_runs)] */
    double *embd;        /* [threads][n_embd] exact output error */
    int32_t *scratch;    /* [threads][T+2] */
    future *future;      /* [n_futures] that some policy looks at */
    size_t n_futures;
    double *seen[2]; /* [units][T] mass, fisher: sums over the rows up to t, where a horizon ends before T */

    /* Where some cache is quantised and its delta is wanted. */
    widths width;
    int slot[KV_WIDTHS]; /* places of the wanted widths among each other */
    float *wide;         /* [threads][width.n][1 + n_streams][LAYER_ROWS][stride] a query head's rows at each width */
    uint16_t *sight;     /* [threads][2][stride / 16] */

    /* Evidence of the full run in the current tile (policy.h), where some policy looks at it. */
    float *gain;           /* [n_kv_head][n_sets][tile][stride] sum over the unit's heads of g.e, by label set */
    float *out_head;       /* [n_kv_head][tile][stride] sum over the unit's heads of |e| */
    float *evidence_head;  /* [n_kv_head][3][tile][stride] out, loss, fisher */
    float *evidence_layer; /* [3][tile][stride] */

    /* The layer being worked on. */
    int layer;
    trace_layer *attention;
    estimate_streams streams;
    int32_t row0, n_rows;
    size_t row_stride; /* of rows, in the current tile */
} pass;

enum { LAYER_ROWS = 8 /* rows of one task */ };

/* ---- layer.c: the open layer w->layer, tile by tile ------------------------------------------------------------- */

/* Replay and price it for all runs; `progress` rows were done before it. */
int layer_work(pass *w, double progress);

/* Read the tile that begins with row0: rows, and gradients where some stream or evidence wants them. */
int pass_read_tile(pass *w, int32_t row0);
/* Row r of the tile of a query head. */
const float *row_of(const pass *w, int head, int32_t r);
/* The tile in pieces of LAYER_ROWS rows: how many, and rows from .. to-1 of number `index`. */
size_t chunks_of(const pass *w);
void chunk_rows(const pass *w, size_t index, int32_t *from, int32_t *to);
/* s(t, i) = g_t . v_i of a query head for rows from .. to-1 of the tile and the first `sets` label sets: row r of set k
 * at out + (k * LAYER_ROWS + r - from) * stride. */
void step_streams(const pass *w, int head, int32_t from, int32_t to, int sets, float *out);

/* ---- full_run.c: evidence of the full run ----------------------------------------------------------------------- */

/* Units for which evidence and future of the full run are kept: the kv heads, then the layer where some unit is one. */
size_t full_run_units(const pass *w);
int full_run_evidence(pass *w); /* of the tile's rows, where some policy looks at any */
/* Fisher evidence [t+1] for row r of the tile; unit n_kv_head is the layer. */
const float *full_run_fisher(const pass *w, int unit, int32_t r);
/* Hand a replay what it may look at in row `row` of the tile. */
void full_run_offer(const pass *w, const run *r, int unit, int32_t row);

/* ---- hindsight.c: what the full run's coming rows hold ---------------------------------------------------------- */

/* Find the kinds and horizons that policies look at, w->future. Returns 0 or ERR_DATA; undone by hindsight_free. */
int hindsight_new(pass *w, const sim_config *configs, size_t n);
void hindsight_free(pass *w);
void hindsight_carve(pass *w, mem_carver *m);
const future *hindsight_of(const pass *w, const sim_config *c); /* NULL: the policy looks at none */

int hindsight_begin(pass *w);               /* before a layer's first tile */
int hindsight_ahead(pass *w, int32_t row0); /* before the tile from row0 on is read: reads others */
int hindsight_tile(pass *w);                /* after its evidence */
/* What lies ahead of row r of the tile, [t+1]; unit n_kv_head is the layer. */
const double *hindsight_after(const pass *w, const future *f, int unit, int32_t r);

/* ---- price.c: what lifetimes cost ------------------------------------------------------------------------------- */

/* Is something priced at step t? */
bool price_wanted(const pass *w, int32_t t);
/* The mask of what a unit lost before row r of the tile. */
uint16_t *price_gone_at(const pass *w, const run *r, int unit, int32_t row);
span *price_span(const pass *w, const run *r, int unit);
/* Its sums at row `row`, [n_head][1 + n_streams]. */
double *price_sums(const pass *w, const run *r, int32_t row);
/* Memory that a run takes for these. */
size_t price_run_bytes(const pass *w);
/* Get it for w->n_runs runs; price_close releases it, whatever was got. */
int price_open(pass *w);
void price_close(pass *w);

int price_tile(pass *w); /* after the tile's replays */
int price_finish(pass *w);

/* ---- price_widths.c: what quantised keys and values cost -------------------------------------------------------- */

/* x.delta of the configurations that quantise, into their sums, for rows from .. to-1 of the tile (at most LAYER_ROWS)
 * of a query head; row r of it is rows[(r - from) * group], prepared with its means. */
int price_widths(pass *w, int head, int32_t from, int32_t to, int worker, const estimate_row *rows);
