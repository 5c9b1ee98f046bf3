#include "analyze/tokens.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/progress.h"
#include "traces/trace.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

const lifetimes_config *tokens_config(const tokens *t, size_t config) {
    return lifetimes_get_config(t->file, config);
}

int tokens_name(const tokens *t, size_t config, text *out) {
    const lifetimes_config *c = tokens_config(t, config);
    TRY(text_add(out, "%s", c->spec));
    if (*c->lag) TRY(text_add(out, ", lag %s", c->lag));
    return strcmp(c->pending, "free") ? 0 : text_add(out, ", pending free");
}

int tokens_add_subject(const tokens *t, size_t config, text *out) {
    const char *budget = tokens_config(t, config)->budget_asked, *label = lifetimes_label(t->file);
    if (*budget) TRY(text_add(out, ", budget %s", budget));
    if (*label) TRY(text_add(out, ", %s", label));
    return lifetimes_n_sequences(t->file, config) > 1 ? text_add(out, ", sequence %zu", t->seq) : 0;
}

/* ---- opening ---------------------------------------------------------------------------------------------------- */

/* The first sequence any configuration holds. */
static size_t first_sequence(const lifetimes *l) {
    size_t first = lifetimes_sequence_number(l, 0, 0);
    for (size_t i = 1; i < lifetimes_n_configs(l); i++) {
        size_t seq = lifetimes_sequence_number(l, i, 0);
        if (seq < first) first = seq;
    }
    return first;
}

static int copy_text(tokens *t, const trace *from) {
    const trace_sequence *s = trace_get_sequence(from, t->seq);
    const trace_model *m = trace_get_model(from);
    t->n_tokens = s->n_tokens;
    t->n_prompt = s->n_prompt;
    t->n_layer = m->n_layer;
    t->n_kv_head = m->n_kv_head;
    t->window = mem_new((size_t)m->n_layer, sizeof *t->window, "windows");
    if (!t->window) return ERR_DATA;
    memcpy(t->window, m->window, (size_t)m->n_layer * sizeof *t->window);
    return s->pieces ? glyphs_read(s->pieces, s->piece_offset, s->n_tokens, &t->glyphs) : 0;
}

static int read_trace(tokens *t, const char *path, const char *kept_in) {
    trace *from;
    TRY(trace_open(path, &from));
    const char *hash = lifetimes_hash(t->file);
    int code = 0;
    if (*hash && strcmp(hash, trace_hash(from)) != 0)
        code = err_set(ERR_DATA, "%s: is not the trace that %s was made from", path, kept_in);
    else if (t->seq >= trace_n_sequences(from)) code = err_set(ERR_DATA, "%s: has no sequence %zu", path, t->seq);
    else code = copy_text(t, from);
    trace_close(from);
    return code;
}

int tokens_open(const char *lifetimes_path, const char *trace_path, tokens *out) {
    *out = (tokens){0};
    TRY(lifetimes_open(lifetimes_path, &out->file));
    out->seq = first_sequence(out->file);
    int code = read_trace(out, trace_path, lifetimes_path);
    if (code) tokens_close(out);
    return code;
}

int tokens_open_for(const char *name, const char *lifetimes_path, const char *trace_path, tokens *out, bool *ready) {
    *ready = false;
    if (!lifetimes_path || !trace_path) {
        say("%s: needs --lifetimes FILE.h5 and --trace FILE.h5, skipped", name);
        return 0;
    }
    TRY(tokens_open(lifetimes_path, trace_path, out));
    *ready = out->glyphs.n > 0;
    if (*ready) return 0;
    say("%s: %s holds no text, skipped", name, trace_path);
    tokens_close(out);
    return 0;
}

void tokens_close(tokens *t) {
    lifetimes_close(t->file);
    mem_free(t->window);
    glyphs_free(&t->glyphs);
    *t = (tokens){0};
}

/* ---- shares ----------------------------------------------------------------------------------------------------- */

/* Later steps at which entry i can be seen (could) and is seen (returned), by one unit. */
static int64_t later_steps(const tokens *t, int32_t i, int32_t evict_at, int32_t window, int64_t *could) {
    int64_t end = t->n_tokens;
    if (window > 0 && (int64_t)i + window < end) end = (int64_t)i + window;
    *could += end - i - 1;
    return (evict_at < end ? evict_at : end) - i - 1;
}

static size_t count_units(const tokens *t) {
    return (size_t)t->n_layer * (size_t)t->n_kv_head;
}

static void share_out(const tokens *t, const int32_t *evict_at, token_shares *s) {
    size_t n = (size_t)t->n_tokens, units = count_units(t);
    for (int32_t i = 0; i < t->n_tokens; i++) {
        int64_t seen = 0, could = 0;
        size_t stay = 0;
        for (size_t u = 0; u < units; u++) {
            int32_t window = t->window[u / (size_t)t->n_kv_head], gone = evict_at[u * n + (size_t)i];
            seen += later_steps(t, i, gone, window, &could);
            stay += gone >= t->n_tokens && (window <= 0 || t->n_tokens - i <= window);
        }
        s->kept[i] = could ? (double)seen / (double)could : 1;
        s->at_end[i] = (double)stay / (double)units;
    }
}

int tokens_shares(const tokens *t, size_t config, token_shares *out) {
    size_t n = (size_t)t->n_tokens;
    *out = (token_shares){mem_new(n, sizeof *out->kept, "shares"), mem_new(n, sizeof *out->at_end, "shares")};
    int32_t *evict_at = mem_new(count_units(t) * n, sizeof *evict_at, "lifetimes");
    int code = out->kept && out->at_end && evict_at ? 0 : ERR_DATA;
    if (!code) code = lifetimes_read(t->file, config, t->seq, t->n_layer, t->n_kv_head, t->n_tokens, evict_at);
    if (!code) share_out(t, evict_at, out);
    else token_shares_free(out);
    mem_free(evict_at);
    return code;
}

void token_shares_free(token_shares *s) {
    mem_free(s->kept);
    mem_free(s->at_end);
    *s = (token_shares){0};
}

/* ---- which configurations --------------------------------------------------------------------------------------- */

static bool is_oracle(const lifetimes_config *c) {
    return strstr(c->spec, "oracle") != NULL;
}

static bool usable(const tokens *t, size_t config, const char *budget) {
    return strcmp(tokens_config(t, config)->budget_asked, budget) == 0 && lifetimes_get_seq(t->file, config, t->seq);
}

static bool is_policy(const tokens *t, size_t config, const char *budget) {
    const lifetimes_config *c = tokens_config(t, config);
    return usable(t, config, budget) && !is_oracle(c) && strcmp(c->policy, "full") != 0 && strcmp(c->spec, "full") != 0;
}

/* Is it the first of its spec at this budget? */
static bool opens_spec(const tokens *t, size_t config, const char *budget) {
    if (!is_policy(t, config, budget)) return false;
    for (size_t i = 0; i < config; i++)
        if (is_policy(t, i, budget) && strcmp(tokens_config(t, i)->spec, tokens_config(t, config)->spec) == 0)
            return false;
    return true;
}

static const char *pick_budget(const tokens *t) {
    const char *picked = "";
    size_t most = 0, n = lifetimes_n_configs(t->file);
    for (size_t i = 0; i < n; i++) {
        const char *budget = tokens_config(t, i)->budget_asked;
        size_t specs = 0, earlier = 0;
        while (earlier < i && strcmp(tokens_config(t, earlier)->budget_asked, budget) != 0) earlier++;
        if (earlier < i) continue;
        for (size_t k = 0; k < n; k++) specs += opens_spec(t, k, budget);
        if (specs > most) {
            most = specs;
            picked = budget;
        }
    }
    return picked;
}

static double loss_of(const results *r, const lifetimes_config *c, size_t metric) {
    for (size_t i = 0; r && i < r->n_configs; i++) {
        const result *x = &r->configs[i];
        double lag = -1;
        if (*c->lag && text_parse_number(c->lag, &lag)) continue;
        if (strcmp(x->spec, c->spec) == 0 && strcmp(x->budget_asked, c->budget_asked) == 0 && x->lag == lag &&
            strcmp(x->pending, c->pending) == 0 && strcmp(x->unit, c->unit) == 0 &&
            strcmp(x->schedule, c->schedule) == 0)
            return x->metric[metric];
    }
    return NAN;
}

/* Of the configurations like `config` but for the lag: the one of least loss, or that in the middle (lags ascend). */
static token_pair best_lag(const tokens *t, size_t config, const char *budget, const results *r, size_t metric) {
    const lifetimes_config *like = tokens_config(t, config);
    token_pair best = {config, TOKENS_NONE, NAN};
    size_t same = 0, n = lifetimes_n_configs(t->file), middle = config;
    for (int pass = 0; pass < 2; pass++) {
        size_t seen = 0;
        for (size_t i = config; i < n; i++) {
            const lifetimes_config *c = tokens_config(t, i);
            if (!is_policy(t, i, budget) || strcmp(c->spec, like->spec) != 0 || strcmp(c->pending, like->pending) != 0)
                continue;
            if (pass == 1 && seen == same / 2) middle = i;
            double loss = loss_of(r, c, metric);
            if (pass == 0 && (loss < best.loss || (isnan(best.loss) && !isnan(loss)))) best = (token_pair){i, 0, loss};
            seen++;
        }
        same = seen;
    }
    if (isnan(best.loss)) best.config = middle;
    return best;
}

/* Charged memory where there is a choice. */
static size_t charged(const tokens *t, size_t config, const char *budget) {
    for (size_t i = config; i < lifetimes_n_configs(t->file); i++)
        if (is_policy(t, i, budget) && strcmp(tokens_config(t, i)->spec, tokens_config(t, config)->spec) == 0 &&
            strcmp(tokens_config(t, i)->pending, "free") != 0)
            return i;
    return config;
}

static size_t oracle_for(const tokens *t, size_t config) {
    const lifetimes_config *c = tokens_config(t, config);
    const lifetimes_seq *s = lifetimes_get_seq(t->file, config, t->seq);
    size_t picked = TOKENS_NONE;
    int most = -1;
    for (size_t i = 0; i < lifetimes_n_configs(t->file); i++) {
        const lifetimes_config *o = tokens_config(t, i);
        if (!is_oracle(o) || !usable(t, i, c->budget_asked)) continue;
        int alike = 8 * (strcmp(o->unit, c->unit) == 0 && strcmp(o->schedule, c->schedule) == 0) +
                    4 * (strcmp(o->lag, c->lag) == 0) +
                    2 * (strcmp(lifetimes_get_seq(t->file, i, t->seq)->hold, s->hold) == 0) +
                    (strcmp(o->pending, c->pending) == 0);
        if (alike > most) {
            most = alike;
            picked = i;
        }
    }
    return picked;
}

static int compare_pair(const void *pa, const void *pb) {
    const token_pair *a = pa, *b = pb;
    if (isnan(a->loss) != isnan(b->loss)) return isnan(a->loss) ? 1 : -1;
    if (a->loss < b->loss || a->loss > b->loss) return a->loss < b->loss ? -1 : 1;
    return (a->config > b->config) - (a->config < b->config);
}

int tokens_pairs(const tokens *t, const results *r, size_t metric, token_pairs *out) {
    const char *budget = pick_budget(t);
    *out = (token_pairs){0};
    for (size_t i = 0; i < lifetimes_n_configs(t->file); i++) {
        if (!opens_spec(t, i, budget)) continue;
        int code = mem_grow((void **)&out->item, &out->capacity, out->n + 1, sizeof *out->item, "configurations");
        if (code) {
            token_pairs_free(out);
            return code;
        }
        token_pair pair = best_lag(t, charged(t, i, budget), budget, r, metric);
        pair.oracle = oracle_for(t, pair.config);
        out->item[out->n++] = pair;
    }
    if (out->n) qsort(out->item, out->n, sizeof *out->item, compare_pair);
    return 0;
}

void token_pairs_free(token_pairs *p) {
    mem_free(p->item);
    *p = (token_pairs){0};
}

int32_t tokens_too_new(const tokens *t) {
    return (t->n_tokens + 9) / 10;
}

/* ---- what was lost ---------------------------------------------------------------------------------------------- */

typedef struct ranked {
    double gap;
    int32_t position;
} ranked;

static int compare_ranked(const void *pa, const void *pb) {
    const ranked *a = pa, *b = pb;
    if (a->gap < b->gap || a->gap > b->gap) return a->gap > b->gap ? -1 : 1;
    return (a->position > b->position) - (a->position < b->position);
}

static int copy(const glyphs *g, size_t from, size_t to, char **out) {
    text words = {0};
    int code = text_add(&words, "%s", "");
    if (!code) code = glyphs_add(g, from, to, &words);
    *out = words.data;
    return code;
}

static int describe(const tokens *t, size_t context, lost_token *l) {
    const glyphs *g = &t->glyphs;
    size_t begin = g->begin[l->position], end = g->begin[l->position + 1], from = begin, to = end, columns = 0;
    while (from > 0 && columns + g->item[from - 1].columns <= context) columns += g->item[--from].columns;
    columns = 0;
    while (to < g->n && columns + g->item[to].columns <= context) columns += g->item[to++].columns;
    TRY(copy(g, from, begin, &l->before));
    TRY(copy(g, begin, end, &l->piece));
    return copy(g, end, to, &l->after);
}

static size_t rank(const tokens *t, const token_shares *policy, const token_shares *oracle, ranked *out) {
    size_t n = 0;
    for (int32_t i = 0; i < t->n_tokens - tokens_too_new(t); i++) {
        double gap = oracle->kept[i] - policy->kept[i];
        if (gap > 0) out[n++] = (ranked){gap, i};
    }
    qsort(out, n, sizeof *out, compare_ranked);
    return n;
}

int tokens_lost(const tokens *t, const token_shares *policy, const token_shares *oracle, size_t most, size_t context,
                lost_tokens *out) {
    *out = (lost_tokens){0};
    ranked *order = mem_new((size_t)t->n_tokens, sizeof *order, "tokens");
    out->item = mem_new(most, sizeof *out->item, "tokens");
    int code = order && out->item ? 0 : ERR_DATA;
    size_t n = code ? 0 : rank(t, policy, oracle, order);
    for (; out->n < n && out->n < most && !code; out->n++) {
        int32_t i = order[out->n].position;
        lost_token *l = &out->item[out->n];
        *l = (lost_token){i, policy->kept[i], oracle->kept[i], policy->at_end[i], oracle->at_end[i], NULL, NULL, NULL};
        code = describe(t, context, l);
    }
    mem_free(order);
    if (code) lost_tokens_free(out);
    return code;
}

void lost_tokens_free(lost_tokens *l) {
    for (size_t i = 0; i < l->n; i++) {
        mem_free(l->item[i].before);
        mem_free(l->item[i].piece);
        mem_free(l->item[i].after);
    }
    mem_free(l->item);
    *l = (lost_tokens){0};
}
