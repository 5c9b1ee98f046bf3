/* Streams and masked sums: what lifetimes cost at one row (DESIGN section 6).
 *
 * A stream is s(t, i) = x_t . v_i for a query head: the value of entry i seen through a vector x. With a row a of
 * attention, S = (sum of a s) / Z, and for a set of lost entries
 *     x.delta = (sum over lost of a (S - s)) / Z_visible,    lost mass m = Z_lost / Z.
 * a (S - s) is computed once a row and shared by all configurations; each then pays a compare and a masked sum. Where
 * more than half is lost the visible side is summed, so that nothing cancels; where nothing is lost the result is
 * exactly 0. */
#pragma once

#include "traces/kernels.h"
#include "traces/trace.h"

enum { ESTIMATE_PROBES = 4 };
#define ESTIMATE_PROBE_SEED 0x6b766c6167ull /* "kvlag" */
/* E|N(0,1)| correction for sqrt(mean of 4 squares): the mean of a chi with 4 degrees of freedom over 2. */
#define ESTIMATE_PROBE_MEAN 0.93999

/* Streams of one layer that do not depend on t. */
typedef struct estimate_streams {
    int n_streams; /* per query head */
    size_t stride;
    float *s; /* [n_head][n_streams][stride], zero beyond T; owned */
} estimate_streams;

/* r.Wo.delta needs only x = Wo_h^T r for the fixed probes r ~ N(0,1): probe p, layer l, output dimension j comes from
 * Philox(ESTIMATE_PROBE_SEED; j, p, l, 0). v [n_kv_head][n_tokens][head_dim], wo [n_head*head_dim][n_embd]. */
int estimate_probe_streams(const trace_model *m, int layer, const float *v, int32_t n_tokens, const float *wo,
                           estimate_streams *out);
/* x = unit vectors, so that x.delta are the components of delta itself: for the exact output error. */
int estimate_value_streams(const trace_model *m, const float *v, int32_t n_tokens, estimate_streams *out);
void estimate_streams_free(estimate_streams *e);

/* One query head's row, prepared for any number of configurations. */
typedef struct estimate_row {
    int32_t t;
    int n_streams;
    double z;       /* sum of a */
    const float *a; /* [pad(t+1)] */
    const float *d; /* n_streams rows `stride` apart: a (S - s) */
    size_t stride;
    float *mean; /* [n_streams] S, where it is wanted */
} estimate_row;

/* `a` padded with zeros; s[k] points to stream k, [pad(t+1)]; d [n_streams] rows `stride` apart, kept by *out: s[k] may
 * be its row k. `mean` [n_streams] receives S and is kept, too; NULL: not wanted. */
void estimate_prepare(const float *a, int32_t t, const float *const *s, int n_streams, size_t stride, float *d,
                      float *mean, estimate_row *out);

/* What one configuration lost, and what it cost. */
typedef struct estimate_lost {
    const uint16_t *gone; /* bit i % 16 of gone[i / 16]: entry i is not visible (of those at or after `end` all are) */
    int32_t end;
    double *out; /* [n_heads][1 + n_streams]: m, then x_k.delta */
    size_t id;   /* the caller's own */
    int floored; /* heads whose visible mass was floored */
} estimate_lost;

/* Rows of the query heads of one unit at one step, for n configurations: the masks are of the unit, and the entries
 * are taken in pieces that stay in the first-level cache while the configurations pass. `lanes` holds
 * estimate_lanes(n) f32, 64-byte aligned. Returns how many were floored in all. */
int estimate_masked(const estimate_row *rows, int n_heads, estimate_lost *lost, size_t n, float *lanes);
size_t estimate_lanes(size_t n);
