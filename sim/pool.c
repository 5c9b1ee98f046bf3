#include "sim/pool.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/progress.h"
#include "sim/layer_data.h"
#include "sim/sweep.h"

#include <string.h>

/* Rows of a request at a time: as many as fit into so many bytes, within these bounds. */
enum { ROWS_MOST = 64, ROWS_BYTES = 8 << 20 };

/* A request at work on the layer at hand. */
typedef struct seat {
    const request *q;
    pooled *out;
    trace_layer *layer;
    layer_data data;
    replay **unit;       /* [n_units] */
    int32_t *evict_at;   /* [n_units][stride] */
    int64_t *held;       /* [n_units] summed over its global steps */
    replay_facts *facts; /* [T] */
    const float **heads; /* [n_head] rows of the step at hand */
    float *rows;         /* [n_head][n_rows][row_stride] of the current tile */
    size_t stride, row_stride;
    int32_t tile, row0, n_rows;
} seat;

typedef struct work {
    const requests *q;
    trace *t;
    const trace_model *m;
    trace_form form;
    pool *p;
    pooled *out;
    int n_units, heads_each, kv_each; /* units of a layer, and what one spans */
    float *wo;                        /* [n_head*head_dim][n_embd] of the layer, where some policy looks at it */
    int layer;
    seat **seats; /* [n_seats] in the order of admission */
    int n_seats;
    int64_t from, to; /* global steps of the span at hand */
    double rows_done;
} work;

/* ---- who pays --------------------------------------------------------------------------------------------------- */

/* The first of those that hold most and have something to spare; -1: nobody. */
static int richest(const int32_t *held, const int32_t *spare, int n) {
    int best = -1;
    for (int i = 0; i < n; i++)
        if (spare[i] > 0 && (best < 0 || held[i] > held[best])) best = i;
    return best;
}

/* Entry by entry, or block by block, whoever is furthest above the equal share pays. Scores do not change meanwhile, so
 * that entries that leave one request can leave it at once. */
static void evict_fair(replay *const *units, int n, int64_t k) {
    int32_t held[n], spare[n], owes[n];
    for (int i = 0; i < n; i++) {
        held[i] = replay_held(units[i]);
        spare[i] = replay_spare(units[i]);
        owes[i] = 0;
    }
    for (int payer; k > 0 && (payer = richest(held, spare, n)) >= 0;) {
        int32_t paid = 1;
        if (replay_config(units[payer])->schedule == SCHEDULE_BLOCK) paid = replay_give(units[payer], 1);
        else owes[payer]++;
        held[payer] -= paid;
        spare[payer] = paid ? spare[payer] - paid : 0; /* no whole block is left that may leave */
        k -= paid;
    }
    for (int i = 0; i < n; i++) replay_give(units[i], owes[i]);
}

void kv_pool_evict(const requests *q, replay *const *units, int n) {
    int64_t held = 0;
    for (int i = 0; i < n; i++) held += replay_held(units[i]);
    if (held <= q->entries) return;
    if (q->rule == POOL_LOWEST) replay_give_lowest(units, n, held - q->low);
    else evict_fair(units, n, held - q->low);
}

/* ---- memory ----------------------------------------------------------------------------------------------------- */

static int32_t tile_of(const trace_model *m, int32_t n_tokens) {
    size_t rows = ROWS_BYTES / ((size_t)m->n_head * kernel_pad((size_t)n_tokens) * sizeof(float));
    return rows > ROWS_MOST ? ROWS_MOST : rows >= 8 ? (int32_t)(rows / 8 * 8) : rows < 1 ? 1 : (int32_t)rows;
}

static int units_of(const requests *q, const trace_model *m) {
    return q->unit == UNIT_LAYER ? 1 : m->n_kv_head;
}

/* Carve a seat, itself included, out of `block` (NULL: only count). */
static size_t carve(const request *r, const trace_model *m, int n_units, void *block, seat **out) {
    mem_carver c = {.base = block};
    size_t units = (size_t)n_units, tokens = (size_t)r->n_tokens, heads = (size_t)m->n_head;
    seat made = {.q = r, .stride = kernel_pad(tokens), .tile = tile_of(m, r->n_tokens)};
    seat *s = mem_carve(&c, 1, sizeof *s);
    made.unit = mem_carve(&c, units, sizeof *made.unit);
    made.evict_at = mem_carve(&c, units * made.stride, sizeof *made.evict_at);
    made.held = mem_carve(&c, units, sizeof *made.held);
    made.facts = mem_carve(&c, tokens, sizeof *made.facts);
    made.heads = mem_carve(&c, heads, sizeof *made.heads);
    made.rows = mem_carve(&c, heads * (size_t)made.tile * made.stride, sizeof *made.rows);
    if (block) *s = made;
    *out = s;
    return c.used;
}

static size_t seat_bytes(const requests *q, const request *r, const trace *t, trace_form form) {
    const trace_model *m = trace_get_model(t);
    policy_shape shape = layer_data_shape(m, q->unit);
    seat *s;
    size_t bytes = carve(r, m, units_of(q, m), NULL, &s);
    bytes += (size_t)units_of(q, m) * replay_bytes(&r->config, r->n_tokens, &shape);
    return bytes + trace_layer_bytes(t, r->seq, form) + layer_data_bytes(t, r->seq, r->config.needs);
}

static size_t wo_bytes(const requests *q, const trace_model *m) {
    unsigned needs = 0;
    for (size_t i = 0; i < q->n; i++) needs |= q->item[i].config.needs;
    return needs & NEEDS_WO ? (size_t)m->n_head * (size_t)m->head_dim * (size_t)m->n_embd * sizeof(float) : 0;
}

/* Most is held when somebody has just come. */
size_t kv_pool_bytes(const requests *q, const trace *t, trace_form form) {
    size_t most = 0;
    for (size_t i = 0; i < q->n; i++) {
        size_t together = 0;
        for (size_t k = 0; k <= i; k++) {
            const request *r = &q->item[q->queue[k]];
            if (r->end > q->item[q->queue[i]].start) together += seat_bytes(q, r, t, form);
        }
        if (together > most) most = together;
    }
    return most + wo_bytes(q, trace_get_model(t)) + kv_pool_result_bytes(q, t);
}

static size_t lifetimes_of(const request *r, const trace_model *m) {
    return (size_t)m->n_layer * (size_t)m->n_kv_head * (size_t)r->n_tokens;
}

size_t kv_pool_result_bytes(const requests *q, const trace *t) {
    size_t cells = 0;
    for (size_t i = 0; i < q->n; i++) cells += lifetimes_of(&q->item[i], trace_get_model(t));
    return cells * sizeof(int32_t);
}

void pooled_free(pooled *p) {
    mem_free(p->evict_at);
    *p = (pooled){0};
}

/* ---- coming and going ------------------------------------------------------------------------------------------- */

static void leave(const work *w, seat *s) {
    trace_layer_close(s->layer);
    layer_data_free(&s->data);
    for (int u = 0; u < w->n_units; u++) replay_free(s->unit[u]);
    mem_free(s);
}

static int read_layer(work *w, seat *s) {
    TRY(trace_layer_open(w->t, s->q->seq, w->layer, w->form, w->p, &s->layer));
    TRY(layer_data_new(w->m, s->q->config.needs, 1, &s->data));
    return layer_data_open(&s->data, w->layer, s->layer, w->wo, w->p);
}

static int begin_units(const work *w, seat *s) {
    bool whole = w->q->unit == UNIT_LAYER;
    policy_shape shape = layer_data_shape(w->m, w->q->unit);
    for (int u = 0; u < w->n_units; u++) {
        replay_unit unit = {.sequence = (int32_t)s->q->seq,
                            .layer = w->layer,
                            .kv_head = whole ? 0 : u,
                            .window = w->m->window[w->layer],
                            .n_head = w->heads_each,
                            .data = whole ? &s->data.whole : &s->data.head[u]};
        TRY(replay_new(&s->q->config, s->q->n_tokens, &shape, &s->unit[u]));
        replay_begin(s->unit[u], &unit, s->evict_at + (size_t)u * s->stride);
    }
    return 0;
}

/* A request takes its seat; it is in the list, to be released, whatever happens. */
static int take_seat(work *w, size_t item) {
    const request *r = &w->q->item[item];
    seat *s;
    void *block = mem_new(carve(r, w->m, w->n_units, NULL, &s), 1, "request");
    if (!block) return ERR_DATA;
    carve(r, w->m, w->n_units, block, &s);
    w->seats[w->n_seats++] = s;
    s->out = &w->out[item];
    sweep_facts(trace_get_sequence(w->t, r->seq), r->config.n_prompt, s->facts);
    TRY(read_layer(w, s));
    return begin_units(w, s);
}

static void hand_over(const work *w, const seat *s) {
    size_t tokens = (size_t)s->q->n_tokens;
    for (int u = 0; u < w->n_units; u++) {
        s->out->updates += w->kv_each * replay_updates(s->unit[u]);
        s->out->held += (double)s->held[u];
    }
    for (int kv = 0; kv < w->m->n_kv_head; kv++)
        memcpy(s->out->evict_at + ((size_t)w->layer * (size_t)w->m->n_kv_head + (size_t)kv) * tokens,
               s->evict_at + (size_t)(kv / w->kv_each) * s->stride, tokens * sizeof *s->evict_at);
}

/* Those whose last step is behind them free what they hold. */
static void retire(work *w, int64_t g) {
    int kept = 0;
    for (int i = 0; i < w->n_seats; i++) {
        seat *s = w->seats[i];
        if (s->q->end > g) {
            w->seats[kept++] = s;
            continue;
        }
        hand_over(w, s);
        leave(w, s);
    }
    w->n_seats = kept;
}

/* ---- steps ------------------------------------------------------------------------------------------------------ */

/* A request's own step at global step g. */
static int32_t step_of(const seat *s, int64_t g) {
    return s->q->lead + (int32_t)(g - s->q->start);
}

static int read_tile(work *w, seat *s, int32_t t) {
    if (t < s->row0 + s->n_rows) return 0;
    s->row0 = t / s->tile * s->tile;
    s->n_rows = s->q->n_tokens - s->row0 < s->tile ? s->q->n_tokens - s->row0 : s->tile;
    s->row_stride = kernel_pad((size_t)(s->row0 + s->n_rows));
    progress_at(w->rows_done += s->n_rows);
    return trace_layer_rows(s->layer, s->row0, s->n_rows, s->rows, s->row_stride, w->p);
}

static void attend(const work *w, seat *s, int unit, int32_t t) {
    const float **heads = s->heads + (size_t)unit * (size_t)w->heads_each;
    for (int h = 0; h < w->heads_each; h++) {
        size_t head = (size_t)(unit * w->heads_each + h);
        heads[h] = s->rows + (head * (size_t)s->n_rows + (size_t)(t - s->row0)) * s->row_stride;
    }
    replay_attend(s->unit[unit], t, heads, &s->facts[t]);
}

/* One unit of the newest request takes in its prompt but for the last step: nothing leaves meanwhile. */
static int prompt_task(void *context, size_t index, int worker) {
    (void)worker;
    const work *w = context;
    seat *s = w->seats[w->n_seats - 1];
    for (int32_t t = s->row0; t < s->row0 + s->n_rows && t < s->q->lead; t++) attend(w, s, (int)index, t);
    return 0;
}

static int take_in_prompt(work *w) {
    seat *s = w->seats[w->n_seats - 1];
    for (int32_t t = 0; t < s->q->lead; t += s->tile) {
        TRY(read_tile(w, s, t));
        TRY(pool_run(w->p, (size_t)w->n_units, prompt_task, w));
    }
    return 0;
}

/* One unit of all requests goes through the span, step by step. */
static int span_task(void *context, size_t index, int worker) {
    (void)worker;
    const work *w = context;
    int unit = (int)index, n = w->n_seats;
    replay *units[n];
    for (int i = 0; i < n; i++) units[i] = w->seats[i]->unit[unit];
    for (int64_t g = w->from; g < w->to; g++) {
        for (int i = 0; i < n; i++) {
            attend(w, w->seats[i], unit, step_of(w->seats[i], g));
            if (w->seats[i]->q->evicts_alone) replay_evict(units[i]);
        }
        kv_pool_evict(w->q, units, n);
        for (int i = 0; i < n; i++) w->seats[i]->held[unit] += replay_held(units[i]);
    }
    for (int i = 0; i < n; i++) TRY(replay_check(units[i]));
    return 0;
}

/* From global step w->from on: until somebody comes or goes, or has no rows left. `coming`: the next start. */
static int span(work *w, int64_t coming) {
    w->to = coming;
    for (int i = 0; i < w->n_seats; i++) {
        seat *s = w->seats[i];
        int32_t t = step_of(s, w->from);
        TRY(read_tile(w, s, t));
        int64_t rows = w->from + s->row0 + s->n_rows - t, end = s->q->end < rows ? s->q->end : rows;
        if (end < w->to) w->to = end;
    }
    return pool_run(w->p, (size_t)w->n_units, span_task, w);
}

static int work_layer(work *w) {
    const requests *q = w->q;
    size_t next = 0;
    for (w->from = 0; next < q->n || w->n_seats; w->from = w->to) {
        if (!w->n_seats) w->from = q->item[q->queue[next]].start;
        for (; next < q->n && q->item[q->queue[next]].start == w->from; next++) {
            TRY(take_seat(w, q->queue[next]));
            TRY(take_in_prompt(w));
        }
        TRY(span(w, next < q->n ? q->item[q->queue[next]].start : INT64_MAX));
        retire(w, w->to);
    }
    return 0;
}

/* ---- all of it -------------------------------------------------------------------------------------------------- */

static int start(work *w) {
    size_t wo = wo_bytes(w->q, w->m);
    w->seats = mem_new(w->q->n, sizeof *w->seats, "requests");
    if (!w->seats) return ERR_DATA;
    if (wo && !(w->wo = mem_new(wo, 1, "output projection"))) return ERR_DATA;
    for (size_t i = 0; i < w->q->n; i++) {
        w->out[i].evict_at = mem_new(lifetimes_of(&w->q->item[i], w->m), sizeof(int32_t), "lifetimes");
        if (!w->out[i].evict_at) return ERR_DATA;
    }
    return 0;
}

static int work_layers(work *w) {
    for (w->layer = 0; w->layer < w->m->n_layer; w->layer++) {
        if (w->wo) TRY(trace_read_wo(w->t, w->layer, w->wo));
        TRY(work_layer(w));
    }
    for (size_t i = 0; i < w->q->n; i++)
        w->out[i].held /= (double)(w->q->item[i].end - w->q->item[i].start) * w->n_units * w->m->n_layer;
    return 0;
}

int kv_pool_replay(const requests *q, trace *t, trace_form form, pool *p, pooled *out) {
    work w = {.q = q, .t = t, .m = trace_get_model(t), .form = form, .p = p, .out = out};
    policy_shape shape = layer_data_shape(w.m, q->unit);
    double rows = 0;
    w.n_units = units_of(q, w.m);
    w.heads_each = shape.n_head;
    w.kv_each = shape.n_kv;
    for (size_t i = 0; i < q->n; i++) rows += (double)q->item[i].n_tokens * w.m->n_layer;
    progress_begin("pool", "rows", rows);
    int code = start(&w);
    if (!code) code = work_layers(&w);
    for (int i = 0; i < w.n_seats; i++) leave(&w, w.seats[i]);
    progress_end();
    mem_free(w.seats);
    mem_free(w.wo);
    return code;
}
