#include "sim/replay.h"
#include "base/err.h"
#include "base/mem.h"
#include "sim/registry.h"

#include <assert.h>
#include <math.h>
#include <string.h>

/* A policy at work on a unit: what it was set up with, and what it remembers. */
typedef struct mind {
    const policy_setup *setup;
    bool take_max;
    bool is_foreign; /* of a plugin: its scores are looked at */
    int n_fields;
    double **field; /* [n_fields][capacity] by resident */
    size_t n_state;
    double *state; /* [n_state] of the unit */
} mind;

struct replay {
    const sim_config *c;
    int32_t n_tokens, capacity;
    int n_layer;
    replay_unit unit;
    sim_limits limits;
    int32_t *evict_at;
    int32_t first_missing, left_end; /* see replay_range */
    int64_t updates;                 /* see replay_updates */

    int32_t n;      /* residents */
    int32_t *entry; /* [capacity] ascending */
    uint16_t *mask; /* [n_tokens / 16, rounded up] bit i % 16 of mask[i / 16]: entry i is there */
    mind mind[2];   /* the policy, and until the prompt's end the one that evicts there */
    int n_minds;
    double *frozen;   /* [capacity] the score of an entry past the cut-off */
    policy_view view; /* of the step at hand, for the mind that took it in last */
    float *row, *scratch;
    const double *scores; /* [n] of this step, once they were asked for; NULL before */
    double *score;        /* [capacity] where they may lie */
    double unit_mean;     /* what they are taken over where units of several requests compete, else 1 */
    int32_t *victim;      /* [capacity] indices into entry */
    int32_t from, to;     /* residents that may leave in this step */
    int32_t n_chosen, n_taken;

    const policy *faulty; /* whose score was the first not to be finite; NULL: nobody's */
    int32_t faulty_step, faulty_entry;
    double faulty_score;
};

/* ---- memory ----------------------------------------------------------------------------------------------------- */

/* The most entries a unit can hold at once, the arriving one included. */
static int32_t most_residents(const sim_config *c, int32_t n_tokens, int n_layer) {
    sim_limits l = sim_config_limits(c, 0, n_layer); /* no layer may hold more than the first */
    int64_t most = (int64_t)l.budget + 1;
    if (c->pending_free) most += l.guard.hold + (c->schedule == SCHEDULE_EVERY ? (int64_t)c->schedule_argument : 0);
    if (most < c->n_prompt + 1) most = c->n_prompt + 1;
    /* Growth after the prompt's only eviction, or until a block is whole, and what a unit wins from others have no
     * smaller bound. */
    bool is_open = c->schedule == SCHEDULE_PROMPT || c->schedule == SCHEDULE_BLOCK || c->share != SHARE_NONE;
    return is_open || most > n_tokens ? n_tokens : (int32_t)most;
}

static size_t mask_blocks(int32_t n_tokens) {
    return kernel_pad((size_t)n_tokens) / KERNEL_LANES;
}

static mind carve_mind(const policy_setup *setup, bool take_max, const policy_shape *shape, size_t padded,
                       mem_carver *m) {
    const policy *p = setup->policy;
    mind made = {.setup = setup, .take_max = take_max, .n_fields = p->fields(setup)};
    made.is_foreign = registry_is_added(p);
    if (p->state) made.n_state = p->state(setup, shape);
    made.state = mem_carve(m, made.n_state, sizeof *made.state);
    made.field = mem_carve(m, (size_t)made.n_fields, sizeof *made.field);
    for (int k = 0; k < made.n_fields; k++) {
        double *field = mem_carve(m, padded, sizeof *field);
        if (m->base) made.field[k] = field;
    }
    return made;
}

static replay *carve(const sim_config *c, int32_t n_tokens, const policy_shape *shape, void *block, size_t *bytes) {
    mem_carver m = {.base = block};
    replay *r = mem_carve(&m, 1, sizeof *r);
    int32_t capacity = c->is_full ? 0 : most_residents(c, n_tokens, shape->n_layer);
    size_t padded = kernel_pad((size_t)capacity);
    replay made = {.c = c, .n_tokens = n_tokens, .capacity = capacity, .n_layer = shape->n_layer};
    made.entry = mem_carve(&m, padded, sizeof *made.entry);
    made.mask = mem_carve(&m, capacity ? mask_blocks(n_tokens) : 0, sizeof *made.mask);
    made.row = mem_carve(&m, padded + KERNEL_LANES, sizeof *made.row); /* see kernels.h */
    made.scratch = mem_carve(&m, 4 * padded, sizeof *made.scratch);
    made.score = mem_carve(&m, padded, sizeof *made.score);
    made.victim = mem_carve(&m, padded, sizeof *made.victim);
    made.frozen = mem_carve(&m, c->cutoff >= 0 ? padded : 0, sizeof *made.frozen);
    if (!c->is_full) made.mind[0] = carve_mind(&c->setup, c->take_max, shape, padded, &m);
    if (!c->is_full && c->prompt) made.mind[1] = carve_mind(&c->prompt->setup, c->prompt->take_max, shape, padded, &m);
    *bytes = m.used;
    if (block) *r = made;
    return r;
}

size_t replay_bytes(const sim_config *config, int32_t n_tokens, const policy_shape *shape) {
    size_t bytes;
    carve(config, n_tokens, shape, NULL, &bytes);
    return bytes;
}

int replay_new(const sim_config *config, int32_t n_tokens, const policy_shape *shape, replay **out) {
    size_t bytes = replay_bytes(config, n_tokens, shape);
    void *block = mem_new(bytes, 1, "replay state");
    *out = block ? carve(config, n_tokens, shape, block, &bytes) : NULL;
    return block ? 0 : ERR_DATA;
}

void replay_free(replay *r) {
    mem_free(r); /* the block it was carved from begins with it */
}

void replay_begin(replay *r, const replay_unit *unit, int32_t *evict_at) {
    r->unit = *unit;
    r->evict_at = evict_at;
    r->n = 0;
    r->first_missing = r->n_tokens + 1;
    r->left_end = 0;
    if (!r->c->is_full) r->limits = sim_config_limits(r->c, unit->layer, r->n_layer);
    r->n_minds = r->c->is_full ? 0 : r->c->prompt ? 2 : 1;
    r->updates = 0;
    r->unit_mean = 1;
    r->faulty = NULL;
    r->view = (policy_view){
        .entry = r->entry,
        .data = unit->data,
        .n_head = unit->n_head,
        .n_prompt = r->c->n_prompt,
        .sequence = unit->sequence,
        .layer = unit->layer,
        .kv_head = unit->kv_head,
    };
    for (size_t i = 0; i < kernel_pad((size_t)r->n_tokens); i++) evict_at[i] = r->n_tokens + 1;
    if (r->capacity) memset(r->mask, 0, mask_blocks(r->n_tokens) * sizeof *r->mask);
    for (int k = 0; k < r->n_minds; k++)
        if (r->mind[k].n_state) memset(r->mind[k].state, 0, r->mind[k].n_state * sizeof *r->mind[k].state);
}

void replay_offer(replay *r, const float *out, const float *loss, const float *fisher, const double *future) {
    r->view.out = out;
    r->view.loss = loss;
    r->view.fisher = fisher;
    r->view.future = future;
}

void replay_range(const replay *r, int32_t *first_missing, int32_t *left_end) {
    *first_missing = r->first_missing;
    *left_end = r->left_end;
}

int replay_check(const replay *r) {
    if (!r->faulty) return 0;
    return err_set(ERR_DATA,
                   "policy %s: the score of entry %d in step %d is %g (sequence %d, layer %d, kv head %d); scores must "
                   "be finite",
                   r->faulty->name, r->faulty_entry, r->faulty_step, r->faulty_score, r->unit.sequence, r->unit.layer,
                   r->unit.kv_head);
}

int64_t replay_updates(const replay *r) {
    return r->updates;
}

const int32_t *replay_residents(const replay *r, int32_t *n) {
    *n = r->n;
    return r->entry;
}

/* ---- the resident set ------------------------------------------------------------------------------------------- */

static void append(replay *r, int32_t t) {
    assert(r->n < r->capacity);
    for (int m = 0; m < r->n_minds; m++)
        for (int k = 0; k < r->mind[m].n_fields; k++) r->mind[m].field[k][r->n] = 0;
    r->entry[r->n++] = t;
    r->mask[t / KERNEL_LANES] |= (uint16_t)(1u << t % KERNEL_LANES);
}

/* Index of the first resident at or after position i. Often i is there, with all entries after it or all before it. */
static int32_t first_at(const replay *r, int64_t i) {
    if (i <= 0) return 0;
    if (i > r->view.t) return r->n;
    int64_t from_end = r->n - (r->view.t + 1 - i);
    if (from_end >= 0 && from_end < r->n && r->entry[from_end] == i) return (int32_t)from_end;
    if (i < r->n && r->entry[i] == i) return (int32_t)i;
    int32_t low = 0, high = r->n;
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if (r->entry[middle] < i) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* Close the gaps that k victims (ascending indices) leave in an array of n elements. */
static void close_gaps(void *array, size_t size, const int32_t *victim, int32_t k, int32_t n) {
    char *at = array;
    int32_t to = victim[0];
    for (int32_t m = 0; m < k; m++) {
        int32_t from = victim[m] + 1, end = m + 1 < k ? victim[m + 1] : n;
        memmove(at + (size_t)to * size, at + (size_t)from * size, (size_t)(end - from) * size);
        to += end - from;
    }
}

/* Remove residents victim[0..k-1] (ascending indices); their last visible step is left_at - 1. */
static void leave(replay *r, const int32_t *victim, int32_t k, int32_t left_at) {
    for (int32_t m = 0; m < k; m++) {
        int32_t i = r->entry[victim[m]];
        r->evict_at[i] = left_at;
        r->mask[i / KERNEL_LANES] &= (uint16_t) ~(1u << i % KERNEL_LANES);
    }
    int32_t last = r->entry[victim[k - 1]];
    if (left_at < r->first_missing) r->first_missing = left_at;
    if (last >= r->left_end) r->left_end = last + 1;
    close_gaps(r->entry, sizeof *r->entry, victim, k, r->n);
    for (int m = 0; m < r->n_minds; m++)
        for (int f = 0; f < r->mind[m].n_fields; f++)
            close_gaps(r->mind[m].field[f], sizeof **r->mind[m].field, victim, k, r->n);
    if (r->c->cutoff >= 0) close_gaps(r->frozen, sizeof *r->frozen, victim, k, r->n);
    if (r->scores == r->score) close_gaps(r->score, sizeof *r->score, victim, k, r->n);
    r->n -= k;
}

/* Entries that slide out of the layer's window leave free of charge: that is no eviction. */
static void expire(replay *r, int32_t t) {
    if (!r->unit.window) return;
    int32_t k = first_at(r, (int64_t)t - r->unit.window + 1);
    for (int32_t j = 0; j < k; j++) r->victim[j] = j;
    if (k) leave(r, r->victim, k, t);
}

/* ---- scores ----------------------------------------------------------------------------------------------------- */

/* What leaves is found by comparing: a score that cannot be compared counts as 0 and is remembered (replay_check). */
static void mend(replay *r, const policy *p) {
    int32_t j = 0;
    while (r->scores && j < r->n && isfinite(r->scores[j])) j++;
    if (j == r->n) return;
    if (!r->faulty) {
        r->faulty = p;
        r->faulty_step = r->view.t;
        r->faulty_entry = r->entry[j];
        r->faulty_score = r->scores ? r->scores[j] : NAN;
    }
    if (!r->scores) memset(r->score, 0, (size_t)r->n * sizeof *r->score);
    else if (r->scores != r->score) memcpy(r->score, r->scores, (size_t)r->n * sizeof *r->score);
    for (; j < r->n; j++)
        if (!isfinite(r->score[j])) r->score[j] = 0;
    r->scores = r->score;
}

/* Scores come from the policy that took the step in last: at the prompt's end, from the one that evicts there. */
static void ask(replay *r, const mind *m) {
    r->scores = m->setup->policy->score(m->setup, &r->view, r->score);
    if (m->is_foreign) mend(r, m->setup->policy);
}

/* Past the cut-off an entry's score is the one it had there. */
static void put_frozen(replay *r) {
    int32_t n = first_at(r, (int64_t)r->view.t - r->c->cutoff + 1);
    if (r->scores != r->score) memcpy(r->score, r->scores, (size_t)r->n * sizeof *r->score);
    memcpy(r->score, r->frozen, (size_t)n * sizeof *r->score);
    r->scores = r->score;
}

/* Keep the score of the entry that reaches the cut-off in this step, if it is still there. */
static void freeze(replay *r) {
    int64_t i = (int64_t)r->view.t - r->c->cutoff;
    int32_t j = first_at(r, i);
    if (i < 0 || j == r->n || r->entry[j] != i) return;
    ask(r, &r->mind[0]);
    r->frozen[j] = r->scores[j];
    put_frozen(r);
}

/* The residents' scores after this step; a policy is asked once. */
static const double *scores_of(replay *r) {
    if (r->scores) return r->scores;
    ask(r, &r->mind[r->n_minds - 1]);
    if (r->n_minds == 1 && r->c->cutoff >= 0) put_frozen(r);
    return r->scores;
}

/* ---- who leaves ------------------------------------------------------------------------------------------------- */

/* Residents that count against the target: not those that wait free of charge. */
static int32_t counted_of(const replay *r) {
    return r->c->pending_free ? first_at(r, (int64_t)r->view.t - r->limits.guard.hold + 1) : r->n;
}

/* How many entries must leave the units after the step at hand. */
static int64_t excess(replay *const *units, int n) {
    const sim_config *c = units[0]->c;
    int32_t t = units[0]->view.t;
    int64_t counted = 0, budget = 0, target = 0;
    if (t < c->n_prompt - 1) return 0;
    for (int u = 0; u < n; u++) {
        counted += counted_of(units[u]);
        budget += units[u]->limits.budget;
        target += units[u]->limits.target;
    }
    if (t != c->n_prompt - 1) switch (c->schedule) {
        case SCHEDULE_PROMPT:
            return 0;
        case SCHEDULE_EVERY:
            if ((t + 1) % (int32_t)c->schedule_argument != 0) return 0;
            break;
        default:
            if (counted <= budget) return 0;
        }
    return counted > target ? counted - target : 0;
}

/* Does resident a leave before resident b? Lowest score first, ties to the lowest index. */
static bool leaves_before(const double *score, int32_t a, int32_t b) {
    return score[a] < score[b] || (score[a] == score[b] && a < b);
}

/* Restore a max-heap (last to leave on top) of k victims below `at`. */
static void sift(int32_t *heap, int32_t k, int32_t at, const double *score) {
    for (;;) {
        int32_t top = at, left = 2 * at + 1, right = left + 1;
        if (left < k && leaves_before(score, heap[top], heap[left])) top = left;
        if (right < k && leaves_before(score, heap[top], heap[right])) top = right;
        if (top == at) return;
        int32_t swap = heap[at];
        heap[at] = heap[top];
        heap[top] = swap;
        at = top;
    }
}

/* The k first to leave among from .. to-1, in `victim` as a max-heap. */
static void gather(int32_t *victim, int32_t k, const double *score, int32_t from, int32_t to) {
    for (int32_t m = 0; m < k; m++) victim[m] = from + m;
    for (int32_t m = k / 2; m-- > 0;) sift(victim, k, m, score);
    for (int32_t j = from + k; j < to; j++)
        if (leaves_before(score, j, victim[0])) {
            victim[0] = j;
            sift(victim, k, 0, score);
        }
}

/* The residents from .. to-1 that leave no later than `last`, as ascending indices. */
static void collect(int32_t *victim, int32_t last, const double *score, int32_t from, int32_t to) {
    for (int32_t j = from; j < to; j++)
        if (j == last || leaves_before(score, j, last)) *victim++ = j;
}

/* The k first to leave among from .. to-1, as ascending indices. */
static void choose(int32_t *victim, int32_t k, const double *score, int32_t from, int32_t to) {
    if (k == 1) {
        victim[0] = from + (int32_t)kernels()->lowest(score + from, (size_t)(to - from));
        return;
    }
    gather(victim, k, score, from, to);
    collect(victim, victim[0], score, from, to);
}

/* The same, the first to leave first. */
static void choose_in_order(int32_t *victim, int32_t k, const double *score, int32_t from, int32_t to) {
    gather(victim, k, score, from, to);
    for (int32_t m = k - 1; m > 0; m--) {
        int32_t swap = victim[0];
        victim[0] = victim[m];
        victim[m] = swap;
        sift(victim, m, 0, score);
    }
}

/* ---- single entries --------------------------------------------------------------------------------------------- */

/* The most that may leave a unit: no sinks, none that are held, and its least stays. Sets its from and to. */
static int32_t candidates(replay *r) {
    const sim_guard *g = r->view.t == r->c->n_prompt - 1 ? &r->limits.prompt : &r->limits.guard;
    r->from = first_at(r, g->sinks);
    r->to = first_at(r, (int64_t)r->view.t - g->hold + 1);
    int32_t spare = counted_of(r) - r->limits.least, n = r->to - r->from;
    return spare < n ? spare : n;
}

static void evict_alone(replay *r, int64_t k) {
    int32_t most = candidates(r);
    if (k > most) k = most;
    if (k <= 0) return;
    choose(r->victim, (int32_t)k, scores_of(r), r->from, r->to);
    leave(r, r->victim, (int32_t)k, r->view.t + 1);
}

/* The unit whose next candidate leaves first; NULL where none has one left. */
static replay *next_to_lose(replay *const *units, int n) {
    replay *best = NULL;
    double lowest = 0;
    for (int u = 0; u < n; u++) {
        replay *r = units[u];
        if (r->n_taken == r->n_chosen) continue;
        double score = r->scores[r->victim[r->n_taken]] / r->unit_mean;
        if (best && !(score < lowest)) continue;
        best = r;
        lowest = score;
    }
    return best;
}

/* Units that compete: the lowest scores of all leave; ties go to the first unit, then to the lowest index. */
static void evict_shared(replay *const *units, int n, int64_t k) {
    for (int u = 0; u < n; u++) {
        replay *r = units[u];
        int32_t most = candidates(r);
        r->n_taken = 0;
        r->n_chosen = most < 0 ? 0 : k < most ? (int32_t)k : most;
        if (r->n_chosen) choose_in_order(r->victim, r->n_chosen, scores_of(r), r->from, r->to);
    }
    for (replay *r; k > 0 && (r = next_to_lose(units, n)); k--) r->n_taken++;
    for (int u = 0; u < n; u++) {
        replay *r = units[u];
        if (!r->n_taken) continue;
        collect(r->victim, r->victim[r->n_taken - 1], r->scores, r->from, r->to);
        leave(r, r->victim, r->n_taken, r->view.t + 1);
    }
}

/* ---- blocks ----------------------------------------------------------------------------------------------------- */

/* Residents of one unit that leave together. */
typedef struct block {
    replay *r;
    int32_t j0, j1; /* residents j0 .. j1-1 */
    double mean;    /* of their scores */
} block;

/* The whole block of positions with the lowest mean score, if it is lower than `best`. */
static void choose_block(replay *r, block *best) {
    const sim_guard *g = r->view.t == r->c->n_prompt - 1 ? &r->limits.prompt : &r->limits.guard;
    int32_t n = (int32_t)r->c->schedule_argument;
    for (int32_t j = first_at(r, g->sinks); j < r->n;) {
        int64_t start = r->entry[j] / n * (int64_t)n;
        if (start + n - 1 > (int64_t)r->view.t - g->hold) break; /* not whole yet, or touches a held entry */
        int32_t end = first_at(r, start + n);
        if (start >= g->sinks) {
            double sum = 0;
            for (int32_t m = j; m < end; m++) sum += r->score[m];
            if (!best->r || sum / (end - j) < best->mean) *best = (block){r, j, end, sum / (end - j)};
        }
        j = end;
    }
}

/* Whole blocks, until k entries are gone. A unit that has no more than its least loses none. */
static void evict_blocks(replay *const *units, int n, int64_t k) {
    for (int u = 0; u < n; u++) {
        replay *r = units[u];
        const double *score = scores_of(r);
        if (score != r->score) memcpy(r->score, score, (size_t)r->n * sizeof *score);
        r->scores = r->score;
    }
    while (k > 0) {
        block b = {.r = NULL};
        for (int u = 0; u < n; u++)
            if (counted_of(units[u]) > units[u]->limits.least) choose_block(units[u], &b);
        if (!b.r) return;
        int32_t size = b.j1 - b.j0;
        for (int32_t m = 0; m < size; m++) b.r->victim[m] = b.j0 + m;
        leave(b.r, b.r->victim, size, b.r->view.t + 1);
        k -= size;
    }
}

/* ---- a step ----------------------------------------------------------------------------------------------------- */

/* The policy looks at residents from .. n-1; those past the cut-off keep the score that they have. */
static void count_updates(replay *r, int32_t from) {
    int32_t open = r->c->cutoff >= 0 ? first_at(r, (int64_t)r->view.t - r->c->cutoff) : 0;
    if (r->view.t >= r->c->n_prompt) r->updates += r->n - (from > open ? from : open);
}

/* One policy takes the step in. */
static void take_in(replay *r, const mind *m) {
    const policy *p = m->setup->policy;
    policy_view *v = &r->view;
    v->field = m->field;
    v->state = m->state;
    if (m->setup->needs & NEEDS_ROW) {
        size_t from = p->first_wanted ? (size_t)p->first_wanted(m->setup, v) : 0;
        kernels()->resident_row(v->heads, r->unit.n_head, r->entry, r->mask, (size_t)r->n, from, m->take_max,
                                r->scratch, r->row);
        v->row = r->row;
        count_updates(r, (int32_t)from);
    }
    p->observe(m->setup, v);
}

void replay_attend(replay *r, int32_t t, const float *const *heads, const replay_facts *facts) {
    const sim_config *c = r->c;
    r->view.t = t;
    r->scores = NULL;
    if (c->is_full) {
        if (r->unit.window && t >= r->unit.window) r->evict_at[t - r->unit.window] = t;
        return;
    }
    if (t >= c->n_prompt) r->n_minds = 1; /* the prompt's policy has had its turn */
    expire(r, t);
    append(r, t);
    policy_view *v = &r->view;
    v->n = r->n;
    v->heads = heads;
    v->correct = facts->correct;
    v->confidence = facts->confidence;
    v->entropy = facts->entropy;
    v->counted = facts->counted;
    take_in(r, &r->mind[0]);
    if (c->cutoff >= 0) freeze(r);
    if (r->n_minds == 2) {
        take_in(r, &r->mind[1]);
        r->scores = NULL;
    }
}

void replay_evict_together(replay *const *units, int n) {
    const sim_config *c = units[0]->c;
    if (c->is_full) return;
    int64_t k = excess(units, n);
    if (k <= 0) return;
    if (c->schedule == SCHEDULE_BLOCK) evict_blocks(units, n, k);
    else if (n == 1) evict_alone(units[0], k);
    else evict_shared(units, n, k);
}

void replay_evict(replay *r) {
    replay_evict_together(&r, 1);
}

void replay_step(replay *r, int32_t t, const float *const *heads, const replay_facts *facts) {
    replay_attend(r, t, heads, facts);
    replay_evict(r);
}

/* ---- a memory shared with others -------------------------------------------------------------------------------- */

const sim_config *replay_config(const replay *r) {
    return r->c;
}

int32_t replay_held(const replay *r) {
    if (!r->c->is_full) return r->n;
    int32_t seen = r->view.t + 1;
    return r->unit.window && r->unit.window < seen ? r->unit.window : seen;
}

int32_t replay_spare(replay *r) {
    if (r->c->is_full) return 0;
    int32_t most = candidates(r);
    return most < 0 ? 0 : most;
}

int32_t replay_give(replay *r, int32_t k) {
    if (r->c->is_full || k <= 0) return 0;
    int32_t before = r->n;
    if (r->c->schedule == SCHEDULE_BLOCK) evict_blocks(&r, 1, k);
    else evict_alone(r, k);
    return before - r->n;
}

static double mean_magnitude(const double *score, int32_t n) {
    double sum = 0;
    for (int32_t j = 0; j < n; j++) sum += fabs(score[j]);
    return sum > 0 && isfinite(sum) ? sum / n : 1;
}

void replay_give_lowest(replay *const *units, int n, int64_t k) {
    for (int u = 0; u < n; u++)
        if (replay_spare(units[u])) units[u]->unit_mean = mean_magnitude(scores_of(units[u]), units[u]->n);
    evict_shared(units, n, k);
    for (int u = 0; u < n; u++) units[u]->unit_mean = 1;
}

void replay_gone(const replay *r, uint16_t *gone) {
    int32_t t = r->view.t;
    if (r->first_missing > t) return;
    for (int32_t b = 0; b <= t / KERNEL_LANES; b++) gone[b] = (uint16_t)~r->mask[b];
}
