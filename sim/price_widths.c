/* Pricing of a cache that does not give back what was put in: delta = o' - o where o' is made from quantised keys and
 * values (docs/design.md, "Precision"). With E_w(i) = exp(score of entry i's key at width w - the row's largest, M_w),
 *
 *     x.delta = sum over visible of f_w E_w(i) (x.v_w(i) - S) / sum over visible of f_w E_w(i),    S = x.o,
 *
 * where w is the width of entry i at its age, and f_w = exp(M_w - max of the M in play) brings both widths to one
 * scale. E and E (S - x.v) are made once a row and width, and shared by all configurations. */
#include "base/err.h"
#include "sim/pass.h"

#include <math.h>
#include <string.h>

/* One row of a query head at all widths that are wanted. */
typedef struct wide_row {
    float top[KV_WIDTHS];               /* M */
    double z[KV_WIDTHS];                /* sum of E over all that can be reached */
    double scale[KV_WIDTHS][KV_WIDTHS]; /* [a][b]: exp(M_a - the larger of M_a and M_b) */
} wide_row;

/* E (k = 0) or E (S - s) of stream k - 1, in row r of the rows at hand. */
static float *wide(const pass *w, int worker, int width, int k, int32_t r) {
    size_t row =
        ((size_t)worker * (size_t)w->width.n + (size_t)w->slot[width]) * (size_t)(1 + w->n_streams) + (size_t)k;
    return w->wide + (row * LAYER_ROWS + (size_t)r) * w->stride;
}

/* exp(x) for x <= 0, from operations that give the same bits on every machine. */
static double exp_down(double x) {
    if (x < -700) return 0;
    double n = rint(x * 0x1.71547652b82fep+0), p = 1;
    double rest = (x - n * 0x1.62e42feep-1) - n * 0x1.a39ef35793c76p-33;
    for (int k = 13; k > 0; k--) p = 1 + p * rest / k;
    return ldexp(p, (int)n);
}

/* ---- rows ------------------------------------------------------------------------------------------------------- */

/* The oldest entry that step t can reach. */
static int32_t reach(const pass *w, int32_t t) {
    int32_t window = w->m->window[w->layer];
    return window > 0 && t >= window ? t - window + 1 : 0;
}

/* E of rows from .. to-1. */
static int exponentials(const pass *w, int head, int width, int32_t from, int32_t to, int worker, wide_row *rows) {
    size_t dim = (size_t)w->m->head_dim, start = (size_t)reach(w, w->row0 + from) / KERNEL_LANES * KERNEL_LANES;
    const float *keys = w->width.of[width].keys + ((size_t)(head / w->group) * w->stride + start) * dim;
    const float *q = trace_layer_row_q(w->attention, head) + (size_t)from * dim;
    kernels()->scores(q, (size_t)(to - from), keys, (size_t)(w->row0 + to) - start, dim, w->m->scale,
                      wide(w, worker, width, 0, 0) + start, w->stride);
    for (int32_t r = from; r < to; r++) {
        int32_t t = w->row0 + r;
        wide_row *row = &rows[r - from];
        row->z[width] = kernels()->exponentials(wide(w, worker, width, 0, r - from), (size_t)reach(w, t), (size_t)t,
                                                w->m->softcap, &row->top[width]);
        if (!isfinite(row->z[width]))
            return err_set(ERR_DATA, "%s: quantised keys give scores that are not finite at layer %d, head %d, row %d",
                           trace_path(w->t), w->layer, head, t);
    }
    return 0;
}

/* E (S - s) of all streams. */
static void deviations(const pass *w, int head, int width, int32_t from, int32_t to, int worker,
                       const estimate_row *rows) {
    size_t dim = (size_t)w->m->head_dim, fixed = (size_t)w->n_fixed;
    const layer_width *of = &w->width.of[width];
    for (int k = 0; k < w->priced_sets; k++)
        kernels()->scores(trace_layer_grad(w->attention, k, head) + (size_t)from * dim, (size_t)(to - from),
                          of->values + (size_t)(head / w->group) * w->stride * dim, (size_t)(w->row0 + to), dim, 1.0f,
                          wide(w, worker, width, 1 + w->n_fixed + k, 0), w->stride);
    for (int32_t r = 0; r < to - from; r++)
        for (int k = 0; k < w->n_streams; k++) {
            float *d = wide(w, worker, width, 1 + k, r);
            const float *s = k < w->n_fixed ? of->fixed.s + ((size_t)head * fixed + (size_t)k) * w->stride : d;
            kernels()->deviation(wide(w, worker, width, 0, r), s, rows[r * w->group].mean[k], d,
                                 (size_t)(w->row0 + from + r) + 1);
        }
}

static void make_scales(const pass *w, wide_row *row) {
    for (int a = 0; a < KV_WIDTHS; a++)
        for (int b = 0; b < KV_WIDTHS; b++)
            if (w->width.of[a].wanted && w->width.of[b].wanted)
                row->scale[a][b] = exp_down(fmin(0, (double)row->top[a] - (double)row->top[b]));
}

/* ---- sums ------------------------------------------------------------------------------------------------------- */

/* What a configuration sees at a step: those before entry `border`, and from it on, as bit i % 16 of [i / 16]. */
typedef struct seen {
    int old, young; /* widths */
    int32_t border;
    uint16_t *mask_old, *mask_young;
    size_t first, middle, end; /* words: the first that can be reached, the one of the border, one past the last */
} seen;

static seen look(const pass *w, const sim_config *c, int32_t t, int worker) {
    size_t words = w->stride / KERNEL_LANES;
    seen s = {.old = kv_width(c->kv_bits), .young = kv_width(c->hold > 0 ? c->pending_bits : c->kv_bits)};
    s.border = s.old == s.young ? t + 1 : t < c->hold ? 0 : t - c->hold + 1;
    s.mask_old = w->sight + (size_t)worker * 2 * words;
    s.mask_young = s.mask_old + words;
    s.first = (size_t)reach(w, t) / KERNEL_LANES;
    s.end = kernel_pad((size_t)t + 1) / KERNEL_LANES;
    s.middle = (size_t)s.border / KERNEL_LANES;
    if (s.middle < s.first) s.middle = s.first;
    return s;
}

/* Fill the masks. `gone` has n_gone words; NULL: all are visible. */
static void see(const seen *s, const uint16_t *gone, size_t n_gone) {
    for (size_t b = s->first; b < s->end; b++) {
        uint16_t here = gone && b < n_gone ? (uint16_t)~gone[b] : 0xffff, below = 0xffff;
        int32_t left = s->border - (int32_t)(b * KERNEL_LANES);
        if (left < KERNEL_LANES) below = left <= 0 ? 0 : (uint16_t)((1u << left) - 1);
        s->mask_old[b] = here & below;
        s->mask_young[b] = here & (uint16_t)~below;
    }
}

/* out[k] = sum of row k of a width, k < n, over the entries of a mask in words from .. to-1. */
static void sum_words(const pass *w, int worker, int width, int32_t r, int n, const uint16_t *mask, size_t from,
                      size_t to, double *out) {
    memset(out, 0, (size_t)n * sizeof *out);
    for (int done = 0; done < n && from < to; done += KERNEL_STREAMS_MAX) {
        _Alignas(64) float lanes[KERNEL_STREAMS_MAX][KERNEL_LANES] = {{0}};
        const float *x[KERNEL_STREAMS_MAX];
        int take = n - done < KERNEL_STREAMS_MAX ? n - done : KERNEL_STREAMS_MAX;
        for (int k = 0; k < take; k++) x[k] = wide(w, worker, width, done + k, r) + from * KERNEL_LANES;
        kernels()->masked_lanes(x, take, mask + from, 0, (to - from) * KERNEL_LANES, lanes);
        kernels()->totals((const float(*)[KERNEL_LANES])lanes, take, out + done);
    }
}

/* out[k] = sum of row k, k < n, over what is seen, both widths on one scale. */
static void sum_seen(const pass *w, int worker, const seen *s, int32_t r, const wide_row *at, int n, double *out) {
    double young[n];
    size_t old_end = s->middle < s->end ? s->middle + 1 : s->end;
    sum_words(w, worker, s->old, r, n, s->mask_old, s->first, old_end, out);
    if (s->old == s->young) return;
    sum_words(w, worker, s->young, r, n, s->mask_young, s->middle, s->end, young);
    for (int k = 0; k < n; k++) out[k] = at->scale[s->old][s->young] * out[k] + at->scale[s->young][s->old] * young[k];
}

/* The least visible mass to divide by: 1e-6 of all there is. */
static double floor_of(const pass *w, int worker, const seen *s, int32_t r, const wide_row *at) {
    double all;
    see(s, NULL, 0);
    sum_seen(w, worker, s, r, at, 1, &all);
    return all > 0 ? 1e-6 * all : 1; /* 0: the widths are so far apart that f32 holds one of them only */
}

/* One configuration at row `row` of the tile, row r of those at hand. out [1 + n_streams]: x.delta from 1 on. */
static void price_one(const pass *w, run *c, int unit, int32_t row, int32_t r, const wide_row *at, int worker,
                      double *out) {
    int32_t t = w->row0 + row;
    int n = 1 + w->n_streams;
    seen s = look(w, c->c, t, worker);
    double sum[n];
    if (s.young == 0 && s.border <= reach(w, t)) return; /* nothing is quantised yet */
    const span *missing = price_span(w, c, unit);
    see(&s, t < missing->first_missing ? NULL : price_gone_at(w, c, unit, row),
        kernel_pad((size_t)missing->left_end) / KERNEL_LANES);
    sum_seen(w, worker, &s, r, at, n, sum);
    double visible = sum[0], most = s.old == s.young ? at->z[s.old] : at->z[s.old] + at->z[s.young];
    if (visible < 1e-6 * most) {
        double least = floor_of(w, worker, &s, r, at);
        if (visible < least) {
            visible = least;
            atomic_fetch_add_explicit(&c->floored, 1, memory_order_relaxed);
        }
    }
    for (int k = 1; k < n; k++) out[k] = -sum[k] / visible;
}

int price_widths(pass *w, int head, int32_t from, int32_t to, int worker, const estimate_row *rows) {
    wide_row at[LAYER_ROWS];
    int kv = head / w->group;
    for (int width = 0; width < KV_WIDTHS; width++) {
        if (!w->width.of[width].wanted) continue;
        TRY(exponentials(w, head, width, from, to, worker, at));
        deviations(w, head, width, from, to, worker, rows);
    }
    for (int32_t r = 0; r < to - from; r++) {
        if (!price_wanted(w, w->row0 + from + r)) continue;
        make_scales(w, &at[r]);
        size_t place = (size_t)head * (size_t)(1 + w->n_streams);
        for (size_t i = 0; i < w->n_runs; i++) {
            run *c = &w->runs[i];
            if (c->is_quantised)
                price_one(w, c, c->n_units == 1 ? 0 : kv, from + r, r, &at[r], worker,
                          price_sums(w, c, from + r) + place);
        }
    }
    return 0;
}
