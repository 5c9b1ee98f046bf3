#include "sim/replay.h"
#include "base/err.h"
#include "base/mem.h"

#include <assert.h>
#include <string.h>

struct replay {
    const sim_config *c;
    int32_t n_tokens, capacity;
    int n_fields;
    replay_unit unit;
    int32_t *evict_at;
    int32_t first_missing, left_end; /* see replay_range */

    int32_t n;      /* residents */
    int32_t *entry; /* [capacity] ascending */
    uint16_t *mask; /* [n_tokens / 16, rounded up] bit i % 16 of mask[i / 16]: entry i is there */
    double **field; /* [n_fields][capacity] the policy's memory, parallel to entry */
    size_t n_state;
    double *state;    /* [n_state] the policy's memory of the unit */
    policy_view view; /* of the step at hand */
    float *row, *scratch;
    double *score;
    int32_t *victim; /* [capacity] indices into entry */
};

/* ---- memory ----------------------------------------------------------------------------------------------------- */

/* The most entries a unit can hold at once, the arriving one included. */
static int32_t most_residents(const sim_config *c, int32_t n_tokens) {
    int64_t most = (int64_t)c->budget + 1;
    if (c->pending_free) most += c->hold + (c->schedule == SCHEDULE_EVERY ? (int64_t)c->schedule_argument : 0);
    if (most < c->n_prompt + 1) most = c->n_prompt + 1;
    /* Growth after the prompt's only eviction, or until a block is whole, has no smaller bound. */
    if (c->schedule == SCHEDULE_PROMPT || c->schedule == SCHEDULE_BLOCK || most > n_tokens) most = n_tokens;
    return (int32_t)most;
}

static size_t mask_blocks(int32_t n_tokens) {
    return kernel_pad((size_t)n_tokens) / KERNEL_LANES;
}

static replay *carve(const sim_config *c, int32_t n_tokens, const policy_shape *shape, void *block, size_t *bytes) {
    mem_carver m = {.base = block};
    replay *r = mem_carve(&m, 1, sizeof *r);
    int32_t capacity = c->is_full ? 0 : most_residents(c, n_tokens);
    int n_fields = c->is_full ? 0 : c->setup.policy->fields(&c->setup);
    size_t padded = kernel_pad((size_t)capacity);
    replay made = {.c = c, .n_tokens = n_tokens, .capacity = capacity, .n_fields = n_fields};
    if (!c->is_full && c->setup.policy->state) made.n_state = c->setup.policy->state(&c->setup, shape);
    made.entry = mem_carve(&m, padded, sizeof *made.entry);
    made.mask = mem_carve(&m, capacity ? mask_blocks(n_tokens) : 0, sizeof *made.mask);
    made.row = mem_carve(&m, padded + KERNEL_LANES, sizeof *made.row); /* see kernels.h */
    made.scratch = mem_carve(&m, 4 * padded, sizeof *made.scratch);
    made.score = mem_carve(&m, padded, sizeof *made.score);
    made.victim = mem_carve(&m, padded, sizeof *made.victim);
    made.state = mem_carve(&m, made.n_state, sizeof *made.state);
    made.field = mem_carve(&m, (size_t)n_fields, sizeof *made.field);
    for (int k = 0; k < n_fields; k++) {
        double *field = mem_carve(&m, padded, sizeof *field);
        if (block) made.field[k] = field;
    }
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
    r->view = (policy_view){
        .entry = r->entry,
        .field = r->field,
        .state = r->state,
        .data = unit->data,
        .n_head = unit->n_head,
        .n_prompt = r->c->n_prompt,
        .sequence = unit->sequence,
        .layer = unit->layer,
        .kv_head = unit->kv_head,
    };
    for (size_t i = 0; i < kernel_pad((size_t)r->n_tokens); i++) evict_at[i] = r->n_tokens + 1;
    if (r->capacity) memset(r->mask, 0, mask_blocks(r->n_tokens) * sizeof *r->mask);
    if (r->n_state) memset(r->state, 0, r->n_state * sizeof *r->state);
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

const int32_t *replay_residents(const replay *r, int32_t *n) {
    *n = r->n;
    return r->entry;
}

/* ---- the resident set ------------------------------------------------------------------------------------------- */

static void append(replay *r, int32_t t) {
    assert(r->n < r->capacity);
    for (int k = 0; k < r->n_fields; k++) r->field[k][r->n] = 0;
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

static void close_gap(void *array, size_t size, int32_t gap, int32_t end) {
    char *at = (char *)array + (size_t)gap * size;
    memmove(at, at + size, (size_t)(end - gap - 1) * size);
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
    if (k == 1) {
        close_gap(r->entry, sizeof *r->entry, victim[0], r->n);
        for (int f = 0; f < r->n_fields; f++) close_gap(r->field[f], sizeof **r->field, victim[0], r->n);
    } else {
        int32_t to = victim[0], m = 0;
        for (int32_t j = to; j < r->n; j++) {
            if (m < k && victim[m] == j) {
                m++;
                continue;
            }
            r->entry[to] = r->entry[j];
            for (int f = 0; f < r->n_fields; f++) r->field[f][to] = r->field[f][j];
            to++;
        }
    }
    r->n -= k;
}

/* Entries that slide out of the layer's window leave free of charge: that is no eviction. */
static void expire(replay *r, int32_t t) {
    if (!r->unit.window) return;
    int32_t k = first_at(r, (int64_t)t - r->unit.window + 1);
    for (int32_t j = 0; j < k; j++) r->victim[j] = j;
    if (k) leave(r, r->victim, k, t);
}

/* ---- who leaves ------------------------------------------------------------------------------------------------- */

/* How many entries must leave after step t; `candidates_end`: residents before it are not held. */
static int32_t excess(const replay *r, int32_t t, int32_t candidates_end) {
    const sim_config *c = r->c;
    if (t < c->n_prompt - 1) return 0;
    int32_t counted = c->pending_free ? candidates_end : r->n, to = c->target;
    if (t != c->n_prompt - 1) switch (c->schedule) {
        case SCHEDULE_PROMPT:
            return 0;
        case SCHEDULE_EVERY:
            if ((t + 1) % (int32_t)c->schedule_argument != 0) return 0;
            break;
        default:
            if (counted <= c->budget) return 0;
        }
    return counted > to ? counted - to : 0;
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

/* The k first to leave among from .. to-1, as ascending indices in `victim`. */
static void choose(int32_t *victim, int32_t k, const double *score, int32_t from, int32_t to) {
    if (k == 1) {
        victim[0] = from + (int32_t)kernels()->lowest(score + from, (size_t)(to - from));
        return;
    }
    for (int32_t m = 0; m < k; m++) victim[m] = from + m;
    if (k == to - from) return;
    for (int32_t m = k / 2; m-- > 0;) sift(victim, k, m, score);
    for (int32_t j = from + k; j < to; j++)
        if (leaves_before(score, j, victim[0])) {
            victim[0] = j;
            sift(victim, k, 0, score);
        }
    /* The last to leave among them is the threshold: collect in order of index. */
    int32_t last = victim[0], m = 0;
    for (int32_t j = from; j < to; j++)
        if (j == last || leaves_before(score, j, last)) victim[m++] = j;
}

/* Block schedule: the whole block of positions with the lowest mean score; residents j0 .. j1-1. */
static bool choose_block(const replay *r, int32_t t, int32_t *j0, int32_t *j1) {
    int32_t n = (int32_t)r->c->schedule_argument;
    double best = 0;
    bool found = false;
    for (int32_t j = first_at(r, r->c->sinks); j < r->n;) {
        int64_t start = r->entry[j] / n * (int64_t)n;
        if (start + n - 1 > (int64_t)t - r->c->hold) break; /* not whole yet, or touches a held entry */
        int32_t end = first_at(r, start + n);
        if (start >= r->c->sinks) {
            double sum = 0;
            for (int32_t m = j; m < end; m++) sum += r->score[m];
            if (!found || sum / (end - j) < best) {
                best = sum / (end - j);
                *j0 = j;
                *j1 = end;
                found = true;
            }
        }
        j = end;
    }
    return found;
}

static void evict_blocks(replay *r, int32_t t, int32_t count) {
    int32_t j0, j1;
    while (count > 0 && choose_block(r, t, &j0, &j1)) {
        int32_t k = j1 - j0;
        for (int32_t m = 0; m < k; m++) r->victim[m] = j0 + m;
        leave(r, r->victim, k, t + 1);
        memmove(r->score + j0, r->score + j1, (size_t)(r->n - j0) * sizeof *r->score);
        count -= k;
    }
}

void replay_evict(replay *r) {
    if (r->c->is_full) return;
    int32_t t = r->view.t;
    int32_t from = first_at(r, r->c->sinks), to = first_at(r, (int64_t)t - r->c->hold + 1);
    int32_t k = excess(r, t, to);
    if (k > to - from && r->c->schedule != SCHEDULE_BLOCK) k = to - from;
    if (k <= 0) return;
    const double *score = r->c->setup.policy->score(&r->c->setup, &r->view, r->score);
    if (r->c->schedule == SCHEDULE_BLOCK) {
        if (score != r->score) memcpy(r->score, score, (size_t)r->n * sizeof *score);
        evict_blocks(r, t, k);
        return;
    }
    choose(r->victim, k, score, from, to);
    leave(r, r->victim, k, t + 1);
}

/* ---- a step ----------------------------------------------------------------------------------------------------- */

void replay_attend(replay *r, int32_t t, const float *const *heads, const replay_facts *facts) {
    const sim_config *c = r->c;
    if (c->is_full) {
        if (r->unit.window && t >= r->unit.window) r->evict_at[t - r->unit.window] = t;
        return;
    }
    r->view.t = t;
    expire(r, t);
    append(r, t);
    policy_view *v = &r->view;
    v->n = r->n;
    v->heads = heads;
    v->correct = facts->correct;
    v->confidence = facts->confidence;
    v->entropy = facts->entropy;
    v->counted = facts->counted;
    if (c->setup.needs & NEEDS_ROW) {
        const policy *p = c->setup.policy;
        size_t from = p->first_wanted ? (size_t)p->first_wanted(&c->setup, v) : 0;
        kernels()->resident_row(heads, r->unit.n_head, r->entry, r->mask, (size_t)r->n, from, c->take_max, r->scratch,
                                r->row);
        v->row = r->row;
    }
    c->setup.policy->observe(&c->setup, v);
}

void replay_step(replay *r, int32_t t, const float *const *heads, const replay_facts *facts) {
    replay_attend(r, t, heads, facts);
    replay_evict(r);
}

void replay_gone(const replay *r, uint16_t *gone) {
    int32_t t = r->view.t;
    if (r->first_missing > t) return;
    for (int32_t b = 0; b <= t / KERNEL_LANES; b++) gone[b] = (uint16_t)~r->mask[b];
}
