#include "analyze/changes.h"
#include "analyze/provenance.h"
#include "analyze/statistics.h"
#include "base/err.h"
#include "base/mem.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

int changes_read(const char *const *path, uint64_t seed, changes_side *out) {
    *out = (changes_side){0};
    TRY(results_read(path, 1, &out->results));
    TRY(evidence_read(out->results, &out->evidence));
    return bootstrap_new(out->results, out->evidence, seed, &out->bootstrap);
}

void changes_side_free(changes_side *s) {
    bootstrap_free(s->bootstrap);
    evidence_free(s->evidence);
    results_free(s->results);
    *s = (changes_side){0};
}

/* ---- can they be paired? ---------------------------------------------------------------------------------------- */

/* "LABEL HASH attention=FORM" of every trace. */
static int trace_lines(const changes_side *s, text *out) {
    provenance p;
    int code = provenance_read(s->results, NULL, NULL, &p);
    for (size_t i = 0; i < p.n && !code; i++) code = provenance_values(&p.item[i], "trace", out);
    provenance_free(&p);
    return code;
}

/* The content hash that stands behind a label in such lines; n = 0 where there is none. */
static const char *hash_of(const char *lines, const char *label, size_t *n) {
    size_t length = strlen(label);
    *n = 0;
    for (const char *line = lines; line && *line; line += strcspn(line, "\n") + 1) {
        const char *end = line + strcspn(line, "\n"), *last = end;
        while (last > line && *last != ' ') last--;
        const char *hash = last;
        while (hash > line && hash[-1] != ' ') hash--;
        if (last == line || hash <= line + 1 || (size_t)(hash - 1 - line) != length ||
            strncmp(line, label, length) != 0)
            continue;
        *n = (size_t)(last - hash);
        return hash;
    }
    return "";
}

static int compare_traces(const changes_side *a, const char *in_a, const char *in_b, text *why) {
    const results *r = a->results;
    for (size_t i = 0; i < r->n_rows && !why->n; i++) {
        size_t n_a, n_b;
        const char *label = r->rows[i].trace, *x = hash_of(in_a, label, &n_a), *y = hash_of(in_b, label, &n_b);
        if (n_a && n_b && (n_a != n_b || memcmp(x, y, n_a) != 0))
            TRY(text_add(why, "trace %s is %.*s in one and %.*s in the other", label, (int)n_a, x, (int)n_b, y));
    }
    return 0;
}

/* Configurations are there for all sequences, so one of them shows which these are. */
static int compare_sequences(const changes_side *a, const changes_side *b, text *why) {
    const results *x = a->results, *y = b->results;
    if (!x->n_configs || !y->n_configs) return 0;
    const result *c = &x->configs[0], *d = &y->configs[0];
    for (size_t i = 0; i < c->n_parts && i < d->n_parts && !why->n; i++) {
        const result *p = c->part[i], *q = d->part[i];
        if (strcmp(p->trace, q->trace) != 0 || strcmp(p->seq, q->seq) != 0)
            TRY(text_add(why, "one is about trace %s, sequence %s, the other about %s, %s", p->trace, p->seq, q->trace,
                         q->seq));
    }
    if (!why->n && c->n_parts != d->n_parts)
        return text_add(why, "one is about %zu sequences, the other about %zu", c->n_parts, d->n_parts);
    return 0;
}

int changes_can_pair(const changes_side *a, const changes_side *b, char **why) {
    text words = {0}, in_a = {0}, in_b = {0};
    int code = compare_sequences(a, b, &words);
    if (!code) code = trace_lines(a, &in_a);
    if (!code) code = trace_lines(b, &in_b);
    if (!code && !words.n) code = compare_traces(a, in_a.data, in_b.data, &words);
    text_free(&in_a);
    text_free(&in_b);
    *why = code ? NULL : words.data;
    if (code) text_free(&words);
    return code;
}

/* ---- matching --------------------------------------------------------------------------------------------------- */

static int by_key(const void *pa, const void *pb) {
    return result_compare(*(const result *const *)pa, *(const result *const *)pb);
}

static const result **sort_configs(const results *r) {
    const result **sorted = mem_new(r->n_configs + 1, sizeof *sorted, "configurations");
    for (size_t i = 0; sorted && i < r->n_configs; i++) sorted[i] = &r->configs[i];
    if (sorted) qsort(sorted, r->n_configs, sizeof *sorted, by_key);
    return sorted;
}

static const result *find(const result *key, const result *const *sorted, size_t n) {
    const result *const *found = n ? bsearch(&key, sorted, n, sizeof *sorted, by_key) : NULL;
    return found ? *found : NULL;
}

static int match(const results *a, const results *b, const result *const *in_a, const result *const *in_b,
                 changes *out) {
    for (size_t i = 0; i < a->n_configs; i++) {
        const result *c = &a->configs[i], *other = find(c, in_b, b->n_configs);
        if (!other) out->only_a[out->n_only_a++] = c;
        if (!other) continue;
        TRY(mem_grow((void **)&out->item, &out->capacity, out->n + 1, sizeof *out->item, "changes"));
        out->item[out->n++] = (change){.a = c, .b = other};
    }
    for (size_t i = 0; i < b->n_configs; i++)
        if (!find(&b->configs[i], in_a, a->n_configs)) out->only_b[out->n_only_b++] = &b->configs[i];
    return 0;
}

static int match_all(const results *a, const results *b, changes *out) {
    const result **in_a = sort_configs(a), **in_b = sort_configs(b);
    out->only_a = mem_new(a->n_configs + 1, sizeof *out->only_a, "configurations");
    out->only_b = mem_new(b->n_configs + 1, sizeof *out->only_b, "configurations");
    int code = in_a && in_b && out->only_a && out->only_b ? match(a, b, in_a, in_b, out) : ERR_DATA;
    mem_free(in_a);
    mem_free(in_b);
    if (!code && !out->n)
        code = err_set(ERR_DATA, "%s and %s have no configuration in common", a->paths[0], b->paths[0]);
    return code;
}

static bool has_metric(const results *r, size_t m) {
    for (size_t i = 0; i < r->n_configs; i++)
        if (!isnan(r->configs[i].metric[m])) return true;
    return false;
}

static int choose_metrics(const results *a, const results *b, changes *out) {
    static const size_t order[] = {DLOSS_EST, KL_EST, OUT_ERR, LOST_MASS};
    for (size_t i = 0; i < sizeof order / sizeof *order; i++)
        if (has_metric(a, order[i]) && has_metric(b, order[i])) out->shown[out->n_shown++] = order[i];
    out->metric = out->shown[0];
    return out->n_shown ? 0
                        : err_set(ERR_DATA, "%s and %s have none of dloss_est, kl_est, out_err and lost_mass in common",
                                  a->paths[0], b->paths[0]);
}

/* ---- testing ---------------------------------------------------------------------------------------------------- */

static bool same_values(const change *c) {
    for (size_t m = 0; m < RESULTS_METRICS; m++)
        if (c->a->metric[m] != c->b->metric[m] && !(isnan(c->a->metric[m]) && isnan(c->b->metric[m]))) return false;
    for (size_t m = 0; m < RESULTS_METRICS; m++)
        if (c->a->hi[m] != c->b->hi[m] && !(isnan(c->a->hi[m]) && isnan(c->b->hi[m]))) return false;
    for (size_t k = 0; k < RESULTS_COSTS; k++)
        if (c->a->cost[k] != c->b->cost[k] && !(isnan(c->a->cost[k]) && isnan(c->b->cost[k]))) return false;
    return true;
}

double changes_threshold(const double *sorted, size_t n, double share) {
    for (size_t k = n; k > 0; k--)
        if (sorted[k - 1] <= share * (double)k / (double)n) return sorted[k - 1];
    return -1;
}

/* What is equal to the last digit needs no test, and would only make the others' harder. */
static bool is_equal(const changes *c, const change *x) {
    return x->by[c->metric].value == 0;
}

static bool is_tested(const changes *c, const change *x) {
    return !is_equal(c, x) && !isnan(x->p[c->metric]);
}

static int test_all(changes *c) {
    double *p = mem_new(c->n + 1, sizeof *p, "p values");
    if (!p) return ERR_DATA;
    for (size_t i = 0; i < c->n; i++)
        if (is_tested(c, &c->item[i])) p[c->tested++] = c->item[i].p[c->metric];
    statistics_sort(p, c->tested);
    double most = changes_threshold(p, c->tested, CHANGES_FALSE);
    mem_free(p);
    for (size_t i = 0; i < c->n; i++) {
        change *x = &c->item[i];
        c->unknown += !is_equal(c, x) && !is_tested(c, x);
        x->significant = is_tested(c, x) && x->p[c->metric] <= most;
        c->better += x->significant && x->by[c->metric].value < 0;
        c->worse += x->significant && x->by[c->metric].value > 0;
    }
    return 0;
}

int changes_find(changes_side *a, changes_side *b, changes *out) {
    *out = (changes){0};
    TRY(match_all(a->results, b->results, out));
    TRY(choose_metrics(a->results, b->results, out));
    out->same = !out->n_only_a && !out->n_only_b;
    for (size_t i = 0; i < out->n; i++) {
        change *c = &out->item[i];
        c->same = same_values(c);
        out->same &= c->same;
        out->n_same += c->same;
        for (size_t k = 0; k < out->n_shown; k++) {
            size_t m = out->shown[k];
            TRY(bootstrap_difference_between(b->bootstrap, c->b, a->bootstrap, c->a, m, &c->by[m], &c->p[m]));
        }
    }
    return test_all(out);
}

void changes_free(changes *c) {
    mem_free(c->item);
    mem_free(c->only_a);
    mem_free(c->only_b);
    *c = (changes){0};
}
