/* What the full run knows of a tile's rows: evidence (DESIGN section 5), and what replays may look at. */
#include "base/err.h"
#include "sim/pass.h"

#include <math.h>
#include <string.h>

size_t full_run_units(const pass *w) {
    return (size_t)w->m->n_kv_head + w->layer_unit;
}

/* ---- evidence of the full run (DESIGN section 5) ---------------------------------------------------------------- */

/* Evidence of kind 0 out, 1 loss, 2 fisher for row r of a unit. */
static float *evidence_row(const pass *w, float *of_unit, int kind, int32_t r) {
    return of_unit + ((size_t)kind * (size_t)w->tile + (size_t)r) * w->stride;
}
static float *evidence_of_head(const pass *w, int kv) {
    return w->evidence_head + (size_t)kv * 3 * (size_t)w->tile * w->stride;
}
static float *gain_row(const pass *w, int kv, int set, int32_t r) {
    return w->gain + (((size_t)kv * (size_t)w->n_sets + (size_t)set) * (size_t)w->tile + (size_t)r) * w->stride;
}
static float *out_row(const pass *w, int kv, int32_t r) {
    return w->out_head + ((size_t)kv * (size_t)w->tile + (size_t)r) * w->stride;
}

static float over(float a) {
    float rest = 1.0f - a;
    return 1.0f / (rest > 1e-3f ? rest : 1e-3f);
}

/* gain += g.e for each label set, e = a / max(1-a, 1e-3) (o - v). */
static void add_gains(const pass *w, int kv, int head, int32_t from, int32_t to, int worker) {
    float *s = w->stream + (size_t)worker * w->stream_rows * w->stride;
    float *d = w->deviation + (size_t)worker * (size_t)w->n_sets * w->stride;
    step_streams(w, head, from, to, w->n_sets, s);
    for (int32_t r = from; r < to; r++) {
        const float *a = row_of(w, head, r), *stream[w->n_sets];
        estimate_row row;
        for (int k = 0; k < w->n_sets; k++) stream[k] = s + ((size_t)k * LAYER_ROWS + (size_t)(r - from)) * w->stride;
        estimate_prepare(a, w->row0 + r, stream, w->n_sets, w->stride, d, NULL, &row);
        for (int k = 0; k < w->n_sets; k++) {
            float *gain = gain_row(w, kv, k, r);
            for (int32_t i = 0; i <= row.t; i++) gain[i] += d[(size_t)k * w->stride + (size_t)i] * over(a[i]);
        }
    }
}

/* out += |e|. */
static void add_norms(const pass *w, int kv, int head, int32_t from, int32_t to) {
    size_t dim = (size_t)w->m->head_dim;
    const float *v = trace_layer_v(w->attention, kv);
    for (int32_t r = from; r < to; r++) {
        const float *a = row_of(w, head, r);
        float *out = out_row(w, kv, r);
        double o[dim];
        memset(o, 0, sizeof o);
        for (int32_t i = 0; i <= w->row0 + r; i++)
            for (size_t c = 0; c < dim; c++) o[c] += (double)a[i] * (double)v[(size_t)i * dim + c];
        for (int32_t i = 0; i <= w->row0 + r; i++) {
            double square = 0;
            for (size_t c = 0; c < dim; c++) {
                double x = o[c] - (double)v[(size_t)i * dim + c];
                square += x * x;
            }
            out[i] += a[i] * over(a[i]) * (float)sqrt(square);
        }
    }
}

/* One kv head, some rows: sums over its query heads. */
static int gather_evidence_task(void *context, size_t index, int worker) {
    pass *w = context;
    int kv = (int)(index / chunks_of(w));
    int32_t from, to;
    chunk_rows(w, index % chunks_of(w), &from, &to);
    size_t bytes = (size_t)(to - from) * w->stride * sizeof(float);
    for (int k = 0; k < w->n_sets; k++) memset(gain_row(w, kv, k, from), 0, bytes);
    if (w->evidence & NEEDS_OUT) memset(out_row(w, kv, from), 0, bytes);
    for (int h = kv * w->group; h < (kv + 1) * w->group; h++) {
        if (w->evidence & (NEEDS_LOSS | NEEDS_FISHER)) add_gains(w, kv, h, from, to, worker);
        if (w->evidence & NEEDS_OUT) add_norms(w, kv, h, from, to);
    }
    return 0;
}

/* The three kinds for one row of a unit that spans kv heads kv0 .. kv1-1. */
static void finish_evidence_row(const pass *w, int kv0, int kv1, int32_t r, float *of_unit) {
    float *out = evidence_row(w, of_unit, 0, r), *loss = evidence_row(w, of_unit, 1, r),
          *fisher = evidence_row(w, of_unit, 2, r);
    int samples = w->n_sets - 1;
    for (int32_t i = 0; i <= w->row0 + r; i++) {
        float norm = 0, gain = 0, squares = 0;
        for (int kv = kv0; kv < kv1 && (w->evidence & NEEDS_OUT); kv++) norm += out_row(w, kv, r)[i];
        for (int kv = kv0; kv < kv1 && w->n_sets > 0; kv++) gain += gain_row(w, kv, 0, r)[i];
        for (int k = 1; k <= samples; k++) {
            float sum = 0;
            for (int kv = kv0; kv < kv1; kv++) sum += gain_row(w, kv, k, r)[i];
            squares += sum * sum;
        }
        out[i] = norm / (float)((kv1 - kv0) * w->group);
        loss[i] = gain;
        fisher[i] = samples > 0 ? 0.5f * squares / (float)samples : 0;
    }
    if (w->row0 + r == 0) out[0] = loss[0] = fisher[0] = 0; /* a = 1: nothing else could be attended to */
}

static int finish_evidence_task(void *context, size_t index, int worker) {
    (void)worker;
    pass *w = context;
    int unit = (int)(index / chunks_of(w)), n_kv = w->m->n_kv_head;
    int32_t from, to;
    chunk_rows(w, index % chunks_of(w), &from, &to);
    for (int32_t r = from; r < to; r++)
        if (unit < n_kv) finish_evidence_row(w, unit, unit + 1, r, evidence_of_head(w, unit));
        else finish_evidence_row(w, 0, n_kv, r, w->evidence_layer);
    return 0;
}

int full_run_evidence(pass *w) {
    if (!w->evidence) return 0;
    TRY(pool_run(w->p, (size_t)w->m->n_kv_head * chunks_of(w), gather_evidence_task, w));
    return pool_run(w->p, full_run_units(w) * chunks_of(w), finish_evidence_task, w);
}

const float *full_run_fisher(const pass *w, int unit, int32_t r) {
    return evidence_row(w, unit == w->m->n_kv_head ? w->evidence_layer : evidence_of_head(w, unit), 2, r);
}

void full_run_offer(const pass *w, const run *r, int unit, int32_t row) {
    int place = r->c->unit == UNIT_LAYER ? w->m->n_kv_head : unit;
    const float *evidence[3] = {NULL};
    if (w->evidence) {
        float *of_unit = r->c->unit == UNIT_LAYER ? w->evidence_layer : evidence_of_head(w, unit);
        for (int kind = 0; kind < 3; kind++) evidence[kind] = evidence_row(w, of_unit, kind, row);
    }
    replay_offer(r->replay[unit], evidence[0], evidence[1], evidence[2],
                 r->future ? hindsight_after(w, r->future, place, row) : NULL);
}
