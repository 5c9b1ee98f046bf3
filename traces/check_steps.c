/* What belongs to steps: the text, predictions, gradients. */
#include "base/err.h"
#include "base/mem.h"
#include "traces/check_private.h"
#include "traces/kernels.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

static const double TIE = 1e-5, NATS = 1e-2, MASS = 1e-3; /* slack: equal ones, log probabilities, their sum */

static int fault(const trace *t, size_t seq, const char *what, ...) __attribute__((format(printf, 3, 4)));
static int fault(const trace *t, size_t seq, const char *what, ...) {
    char line[256];
    va_list words;
    va_start(words, what);
    vsnprintf(line, sizeof line, what, words);
    va_end(words);
    return err_set(ERR_DATA, "%s: seq/%04zu/%s", t->path, seq, line);
}

static void name_of(char name[64], size_t seq, const char *array) {
    snprintf(name, 64, "seq/%04zu/%s", seq, array);
}

/* ---- the text --------------------------------------------------------------------------------------------------- */

int check_pieces(trace *t, size_t seq) {
    const trace_sequence *s = &t->seq[seq];
    char name[64];
    hsize_t bytes = 0;
    hid_t set;
    if (!s->piece_offset) return 0;
    name_of(name, seq, "pieces");
    TRY(hdf_open_dataset(t->h5, name, HDF_INTEGER, 1, &bytes, &set));
    H5Dclose(set);
    long long first = (long long)s->piece_offset[0], last = (long long)s->piece_offset[s->n_tokens];
    if (first) return fault(t, seq, "piece_offset: the first piece begins at byte %lld, not 0", first);
    if (last != (long long)bytes)
        return fault(t, seq, "piece_offset: the last piece ends at byte %lld, pieces at %llu", last,
                     (unsigned long long)bytes);
    return 0;
}

/* ---- predictions ------------------------------------------------------------------------------------------------ */

typedef struct predictions {
    const trace *t;
    const trace_sequence *s;
    size_t seq;
    int64_t k;      /* 0 = no top-k */
    int32_t *id;    /* [T][k] */
    float *logprob; /* [T][k]; NULL where only the ids are there */
    int32_t *order; /* [k] scratch: a row's ids, sorted */
} predictions;

static int compare_ids(const void *a, const void *b) {
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return x < y ? -1 : x > y;
}

static int check_ids(const predictions *p, int32_t step) {
    const int32_t *id = p->id + step * p->k, n_vocab = p->t->model.n_vocab;
    for (int64_t i = 0; i < p->k; i++) {
        if (id[i] < 0 || (n_vocab && id[i] >= n_vocab))
            return fault(p->t, p->seq, "logits/topk_id: step %d has id %d, outside the vocabulary of %d", step, id[i],
                         n_vocab);
        p->order[i] = id[i];
    }
    qsort(p->order, (size_t)p->k, sizeof *p->order, compare_ids);
    for (int64_t i = 1; i < p->k; i++)
        if (p->order[i] == p->order[i - 1])
            return fault(p->t, p->seq, "logits/topk_id: step %d has id %d twice", step, p->order[i]);
    return 0;
}

/* Descending, at most 0, together at most 1; and what they say of the entropy. */
static int check_top(const predictions *p, int32_t step) {
    const float *logprob = p->logprob + step * p->k;
    double mass = 0, entropy = 0, n_vocab = p->t->model.n_vocab;
    for (int64_t i = 0; i < p->k; i++) {
        double x = (double)logprob[i];
        if (i && x > (double)logprob[i - 1] + TIE)
            return fault(p->t, p->seq, "logits/topk_logprob: step %d rises from %.6g to %.6g at place %lld", step,
                         (double)logprob[i - 1], x, (long long)i);
        mass += exp(x);
        entropy -= exp(x) * x;
    }
    if (mass > 1 + MASS)
        return fault(p->t, p->seq, "logits/topk_logprob: step %d adds up to a probability of %.6g", step, mass);
    if (!p->s->entropy || step == p->s->n_tokens - 1) return 0;
    double said = (double)p->s->entropy[step], rest = fmax(1 - mass, 0);
    if (said < entropy - NATS)
        return fault(p->t, p->seq, "logits/entropy: step %d is %.6g, but its top %lld alone have %.6g", step, said,
                     (long long)p->k, entropy);
    double most = entropy + (rest > 0 && n_vocab > (double)p->k ? rest * log((n_vocab - (double)p->k) / rest) : 0);
    if (n_vocab > 0 && rest > MASS && said > most + NATS)
        return fault(p->t, p->seq, "logits/entropy: step %d is %.6g, but its top %lld leave room for %.6g", step, said,
                     (long long)p->k, most);
    return 0;
}

/* The next token against the top-k: its log probability, and whether it was the first. */
static int check_target_in_top(const predictions *p, int32_t step) {
    const int32_t *id = p->id + step * p->k, target = p->s->tokens[step + 1];
    const float *logprob = p->logprob ? p->logprob + step * p->k : NULL;
    int64_t place = 0;
    while (place < p->k && id[place] != target) place++;
    if (p->s->correct) {
        int64_t other = place == 0 ? 1 : place; /* what must tie with the first one for `correct` to differ */
        bool tied = logprob && other < p->k && (double)logprob[0] - (double)logprob[other] <= TIE;
        if ((place == 0) != (p->s->correct[step] == 1) && !tied)
            return fault(p->t, p->seq, "logits/correct: step %d is %d, but the next token is %d and the most likely %d",
                         step, p->s->correct[step], target, id[0]);
    }
    if (!logprob || !p->s->target_logprob) return 0;
    double said = (double)p->s->target_logprob[step], there = (double)logprob[place < p->k ? place : p->k - 1];
    if (place < p->k && fabs(said - there) > NATS)
        return fault(p->t, p->seq,
                     "logits/target_logprob: step %d is %.6g, but the next token, %d, has %.6g in its top %lld", step,
                     said, target, there, (long long)p->k);
    if (place == p->k && said > there + NATS)
        return fault(p->t, p->seq,
                     "logits/target_logprob: step %d is %.6g, above the last of its top %lld, where %d is not", step,
                     said, (long long)p->k, target);
    return 0;
}

/* What holds without a top-k: the most likely token has at least exp(-entropy), any other at most a half. */
static int check_target(const predictions *p, int32_t step) {
    const trace_sequence *s = p->s;
    double n_vocab = p->t->model.n_vocab, slack = NATS;
    if (s->entropy && n_vocab > 0 && (double)s->entropy[step] > log(n_vocab) + slack)
        return fault(p->t, p->seq, "logits/entropy: step %d is %.6g, above the logarithm of the vocabulary, %.6g", step,
                     (double)s->entropy[step], log(n_vocab));
    if (!s->correct || !s->target_logprob) return 0;
    double target = (double)s->target_logprob[step];
    if (!s->correct[step] && target > log(0.5) + slack)
        return fault(p->t, p->seq, "logits/correct: step %d is 0, but the next token has a probability of %.6g", step,
                     exp(target));
    if (s->correct[step] && s->entropy && target < -(double)s->entropy[step] - slack)
        return fault(p->t, p->seq,
                     "logits/correct: step %d is 1, but at an entropy of %.6g the most likely token has more than %.6g",
                     step, (double)s->entropy[step], exp(target));
    return 0;
}

static int check_steps(const predictions *p) {
    for (int32_t step = 0; step < p->s->n_tokens; step++) {
        bool last = step == p->s->n_tokens - 1;
        if (p->k) TRY(check_ids(p, step));
        if (p->logprob) TRY(check_top(p, step));
        if (p->k && !last && p->s->tokens) TRY(check_target_in_top(p, step));
        if (!last) TRY(check_target(p, step));
    }
    return 0;
}

/* ---- logits/full ------------------------------------------------------------------------------------------------ */

static int check_token(const predictions *p, int32_t step, int32_t token, size_t n) {
    if ((size_t)token < n) return 0;
    return fault(p->t, p->seq, "logits/full: step %d has %zu logits, none for token %d", step, n, token);
}

/* A row of logits in f16 against what was kept of its predictions: off by the rounding of the largest. */
static int check_full_row(const predictions *p, int32_t step, const float *logit, size_t n) {
    double top = -INFINITY, size = 0, sum = 0;
    for (size_t i = 0; i < n; i++) {
        top = fmax(top, (double)logit[i]);
        size = fmax(size, fabs((double)logit[i]));
    }
    for (size_t i = 0; i < n; i++) sum += exp((double)logit[i] - top);
    double lse = top + log(sum), slack = NATS + size * 0x1p-10;
    if (p->s->target_logprob && p->s->tokens && step < p->s->n_tokens - 1) {
        TRY(check_token(p, step, p->s->tokens[step + 1], n));
        double is = (double)logit[p->s->tokens[step + 1]] - lse, said = (double)p->s->target_logprob[step];
        if (fabs(is - said) > slack)
            return fault(p->t, p->seq, "logits/full: step %d gives the next token %.6g, target_logprob is %.6g", step,
                         is, said);
    }
    for (int64_t i = 0; p->logprob && i < p->k; i++) {
        TRY(check_token(p, step, p->id[step * p->k + i], n));
        double is = (double)logit[p->id[step * p->k + i]] - lse, said = (double)p->logprob[step * p->k + i];
        if (fabs(is - said) > slack)
            return fault(p->t, p->seq, "logits/full: step %d gives token %d %.6g, topk_logprob is %.6g", step,
                         p->id[step * p->k + i], is, said);
    }
    return 0;
}

static int check_full(const predictions *p, const char *name) {
    hsize_t dims[2];
    hid_t set;
    TRY(hdf_open_dataset(p->t->h5, name, HDF_FLOAT, 2, dims, &set));
    hid_t type = H5Dget_type(set);
    bool f16 = H5Tequal(type, hdf_f16()) > 0;
    H5Tclose(type);
    size_t n = (size_t)dims[1];
    float *row = mem_new(n, sizeof *row, name);
    half *stored = mem_new(n, sizeof *stored, name);
    int code = row && stored ? 0 : ERR_DATA;
    for (int32_t step = 0; step < p->s->n_tokens && !code; step++) {
        code = hdf_read_block(set, f16 ? hdf_f16() : H5T_NATIVE_FLOAT, 2, (hsize_t[]){(hsize_t)step, 0},
                              (hsize_t[]){1, dims[1]}, f16 ? (void *)stored : row);
        if (code) err_prefix(code, "%s: %s", p->t->path, name);
        else if (f16) kernels()->f16_to_f32(stored, row, n);
        if (!code) code = check_full_row(p, step, row, n);
    }
    mem_free(row);
    mem_free(stored);
    H5Dclose(set);
    return code;
}

static int read_top(trace *t, size_t seq, const char *array, hdf_kind kind, hid_t type, int64_t *k, void **out) {
    char name[64];
    int64_t dims[2] = {-1, -1};
    name_of(name, seq, array);
    if (!hdf_has(t->h5, name)) return 0;
    int code = hdf_read_all(t->h5, name, kind, type, 2, dims, out);
    *k = dims[1];
    return code ? err_prefix(code, "%s", t->path) : 0;
}

int check_predictions(trace *t, size_t seq, check_sequence *c) {
    char name[64];
    void *id = NULL, *logprob = NULL;
    predictions p = {.t = t, .s = &t->seq[seq], .seq = seq};
    int code = read_top(t, seq, "logits/topk_id", HDF_INTEGER, H5T_NATIVE_INT32, &p.k, &id);
    p.id = id;
    if (!code && id) code = read_top(t, seq, "logits/topk_logprob", HDF_FLOAT, H5T_NATIVE_FLOAT, &p.k, &logprob);
    p.logprob = logprob;
    p.order = mem_new((size_t)p.k, sizeof *p.order, "ids");
    if (!code) code = p.order ? check_steps(&p) : ERR_DATA;
    name_of(name, seq, "logits/full");
    c->n_topk = p.k;
    c->has_full_logits = hdf_has(t->h5, name);
    if (!code && c->has_full_logits) code = check_full(&p, name);
    mem_free(id);
    mem_free(logprob);
    mem_free(p.order);
    return code;
}

/* ---- gradients -------------------------------------------------------------------------------------------------- */

static int32_t last_counted(const trace_sequence *s) {
    int32_t t = s->n_tokens - 2;
    while (t >= 0 && !check_counts(s, t)) t--;
    return t;
}

/* A step's output moves no loss before it: after the last loss that counts, gradients are 0. Rows row0 .. row0+n-1 of
 * what was read. */
static int check_zeros(const trace_layer *l, int32_t row0, int32_t n) {
    const trace_model *m = &l->t->model;
    const trace_sequence *s = &l->t->seq[l->seq];
    int32_t last = last_counted(s);
    for (int set = 0; set <= s->n_fisher && last >= 0; set++)
        for (int head = 0; head < m->n_head; head++)
            for (int32_t r = last < row0 ? 0 : last + 1 - row0; r < n; r++) {
                const float *g = trace_layer_grad(l, set, head) + (size_t)r * l->dim;
                for (size_t d = 0; d < l->dim; d++)
                    if (g[d] != 0)
                        return fault(l->t, l->seq,
                                     "grad/%s: %.6g at layer %d, head %d, step %d, after the last step that counts, %d",
                                     set ? "fisher" : "loss", (double)g[d], l->layer, head, row0 + r, last);
            }
    return 0;
}

static int check_gradient_layer(trace_layer *l, int32_t n_tokens, pool *p) {
    for (int32_t row = 0; row < n_tokens; row += TRACE_TILE) {
        int32_t n = n_tokens - row < TRACE_TILE ? n_tokens - row : TRACE_TILE;
        TRY(trace_layer_read_grad(l, row, n, p));
        TRY(check_zeros(l, row, n));
    }
    return 0;
}

static int check_labels(trace *t, size_t seq) {
    const trace_sequence *s = &t->seq[seq];
    char name[64];
    void *values;
    int64_t dims[2] = {-1, -1};
    name_of(name, seq, "grad/fisher_label");
    if (!hdf_has(t->h5, name)) return 0;
    int code = hdf_read_all(t->h5, name, HDF_INTEGER, H5T_NATIVE_INT32, 2, dims, &values);
    if (code) return err_prefix(code, "%s", t->path);
    const int32_t *label = values;
    for (int64_t i = 0; i < dims[0] * dims[1] && !code; i++) {
        int32_t step = (int32_t)(i % dims[1]);
        if ((label[i] >= 0) != check_counts(s, step))
            code = fault(t, seq, "grad/fisher_label: sample %lld, step %d is %d, but that step %s",
                         (long long)(i / dims[1]), step, label[i], label[i] < 0 ? "counts" : "does not count");
    }
    mem_free(values);
    return code;
}

int check_gradients(trace *t, size_t seq, pool *p, check_sequence *c) {
    const trace_sequence *s = &t->seq[seq];
    if (s->n_fisher && !s->has_grad_loss)
        return fault(t, seq, "grad/fisher is there without grad/loss, beside which alone it is read");
    if (s->n_fisher) TRY(check_labels(t, seq));
    if (!s->has_grad_loss || !(c->dense || c->factored)) return 0;
    int code = 0;
    for (int layer = 0; layer < t->model.n_layer && !code; layer++) {
        trace_layer *l;
        code = trace_layer_open(t, seq, layer, TRACE_AUTO, p, &l);
        if (code) return code;
        code = check_gradient_layer(l, s->n_tokens, p);
        trace_layer_close(l);
    }
    return code;
}
