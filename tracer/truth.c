#include "tracer/truth.h"
#include "base/err.h"
#include "base/mem.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

double truth_lse(const float *logits, size_t n, int32_t *top) {
    size_t best = 0;
    double sum = 0;
    for (size_t i = 1; i < n; i++)
        if (logits[i] > logits[best]) best = i;
    for (size_t i = 0; i < n; i++) sum += exp((double)logits[i] - (double)logits[best]);
    *top = (int32_t)best;
    return (double)logits[best] + log(sum);
}

double truth_entropy(const float *logits, double lse, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) {
        double logprob = (double)logits[i] - lse;
        sum -= exp(logprob) * logprob;
    }
    return sum;
}

void truth_of_full(const float *logits, size_t n, float *p, truth_full *out) {
    out->lse = truth_lse(logits, n, &out->top);
    out->mass = 0;
    for (size_t i = 0; i < n; i++) {
        p[i] = (float)exp((double)logits[i] - out->lse);
        out->mass += (double)p[i];
    }
}

truth_step truth_of_step(const float *logits, double lse, int32_t top, size_t n, const float *full_logits,
                         const float *p, const truth_full *full, int32_t next) {
    double moved = 0, shift = lse - full->lse;
    for (size_t i = 0; i < n; i++) moved += (double)p[i] * ((double)full_logits[i] - (double)logits[i]);
    return (truth_step){
        .dloss = shift + ((double)full_logits[next] - (double)logits[next]),
        /* Divided by the mass of the rounded probabilities, a shift of all logits costs nothing. */
        .kl = moved / full->mass + shift,
        .flip = top != full->top,
        .right = top == next,
    };
}

static int ascending(const void *pa, const void *pb) {
    double a = *(const double *)pa, b = *(const double *)pb;
    return (a > b) - (a < b);
}

/* Share of the answers that are right from their first to their last step. */
static double exact_match(const truth_step *steps, size_t n) {
    size_t answers = 0, exact = 0;
    for (size_t i = 0, end; i < n; i = end) {
        bool all = steps[i].right;
        for (end = i + 1; end < n && !steps[end].begins; end++) all = all && steps[end].right;
        answers++;
        exact += all;
    }
    return (double)exact / (double)answers;
}

int truth_mean(const truth_step *steps, size_t n, truth *out) {
    double *kl = mem_new(n, sizeof *kl, "steps");
    if (!kl) return ERR_DATA;
    *out = (truth){.exact = exact_match(steps, n), .overlap = NAN};
    for (size_t i = 0; i < n; i++) {
        out->dloss += steps[i].dloss;
        out->kl += steps[i].kl;
        out->top1_flips += steps[i].flip;
        kl[i] = steps[i].kl;
    }
    out->dloss /= (double)n;
    out->kl /= (double)n;
    out->top1_flips /= (double)n;
    qsort(kl, n, sizeof *kl, ascending);
    double place = 0.99 * (double)(n - 1);
    size_t below = (size_t)place, above = below + 1 < n ? below + 1 : below;
    out->kl_p99 = kl[below] + (place - (double)below) * (kl[above] - kl[below]);
    mem_free(kl);
    return 0;
}

/* Entry i is visible to steps i .. end-1: count its arrival and its departure. */
static void add_span(int32_t *change, int32_t from, int32_t to) {
    change[from]++;
    change[to]--;
}

double truth_overlap(const int32_t *a, const int32_t *b, int32_t n_tokens, int32_t n_prompt, int32_t *scratch) {
    int32_t *both = scratch, *either = scratch + n_tokens + 2, n_both = 0, n_either = 0;
    memset(scratch, 0, 2 * (size_t)(n_tokens + 2) * sizeof *scratch);
    for (int32_t i = 0; i < n_tokens; i++) {
        add_span(both, i, a[i] < b[i] ? a[i] : b[i]);
        add_span(either, i, a[i] < b[i] ? b[i] : a[i]);
    }
    double sum = 0;
    for (int32_t t = 0; t < n_tokens; t++) {
        n_both += both[t];
        n_either += either[t];
        if (t >= n_prompt) sum += (double)n_both / n_either; /* t itself is visible in both */
    }
    return sum / (n_tokens - n_prompt);
}
