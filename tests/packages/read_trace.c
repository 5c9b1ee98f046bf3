/* A program of somebody else: reads a trace through libkvlag, says what is in it, and writes a policy's lifetimes.
 *
 *     read_trace TRACE.h5 LAYER STEP WINDOW LIFETIMES.h5 */
#include "base/err.h"
#include "sim/policy.h"
#include "traces/lifetimes.h"
#include "traces/trace.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* The rows of one step, and the keys, of all heads of a layer. */
static int say_layer(trace *t, int layer, int32_t step, pool *p) {
    const trace_model *m = trace_get_model(t);
    int32_t n_tokens = trace_get_sequence(t, 0)->n_tokens;
    size_t stride = ((size_t)step + 16) / 16 * 16;
    float *rows = aligned_alloc(64, (size_t)m->n_head * stride * sizeof *rows);
    trace_layer *l;
    if (!rows) return err_set(ERR_DATA, "out of memory");
    TRY(trace_layer_open(t, 0, layer, TRACE_AUTO, p, &l));
    TRY(trace_layer_load_k(l, p));
    TRY(trace_layer_rows(l, step, 1, rows, stride, p));
    for (int h = 0; h < m->n_head; h++) {
        double moment = 0;
        for (int32_t i = 0; i <= step; i++) moment += (i + 1) * (double)rows[(size_t)h * stride + (size_t)i];
        printf("row %d %.9g\n", h, moment);
    }
    for (int kv = 0; kv < m->n_kv_head; kv++) {
        const float *k = trace_layer_k(l, kv);
        double sum = 0;
        for (int32_t i = 0; i < n_tokens * m->head_dim; i++) sum += fabs((double)k[i]);
        printf("keys %d %.9g\n", kv, sum);
    }
    trace_layer_close(l);
    free(rows);
    return 0;
}

/* A sliding window, as evict_at says it. */
static int write_window(const trace *t, int32_t window, const char *path) {
    const trace_model *m = trace_get_model(t);
    int32_t n_tokens = trace_get_sequence(t, 0)->n_tokens;
    int units = m->n_layer * m->n_kv_head;
    int32_t *evict_at = malloc((size_t)units * (size_t)n_tokens * sizeof *evict_at);
    lifetimes_writer *w;
    if (!evict_at) return err_set(ERR_DATA, "out of memory");
    for (int u = 0; u < units; u++)
        for (int32_t i = 0; i < n_tokens; i++)
            evict_at[u * n_tokens + i] = i + window < n_tokens ? i + window + 1 : n_tokens + 1;
    TRY(lifetimes_writer_new(path, true, NULL, 0, trace_label(t), trace_hash(t), &w));
    TRY(lifetimes_write_config(w, 0, &(lifetimes_config){"mine", "mine", "", "", "head", "step", "charged", ""}));
    TRY(lifetimes_write_seq(w, 0, 0, &(lifetimes_seq){"", "0", "0"}, m->n_layer, m->n_kv_head, n_tokens, evict_at));
    free(evict_at);
    return lifetimes_writer_finish(w);
}

static int work(char **argv) {
    trace *t;
    pool *p;
    TRY(trace_open(argv[1], &t));
    TRY(pool_new(2, &p));
    const trace_model *m = trace_get_model(t);
    const trace_sequence *s = trace_get_sequence(t, 0);
    long long sum = 0;
    for (int32_t i = 0; i < s->n_tokens; i++) sum += s->tokens[i];
    printf("trace %s %d %d %d %d\n", trace_label(t), m->n_layer, m->n_head, m->n_kv_head, m->head_dim);
    printf("tokens %d %lld\n", s->n_tokens, sum);
    TRY(say_layer(t, atoi(argv[2]), atoi(argv[3]), p));
    TRY(write_window(t, atoi(argv[4]), argv[5]));
    pool_free(p);
    trace_close(t);
    return 0;
}

/* The part of the contract that is a function. */
static const char *default_of(void) {
    static const policy_param params[] = {POLICY_GUARDS("7", "1", "head", "")};
    static const policy p = {.abi = POLICY_ABI, .params = params};
    policy_setup s = {.policy = &p};
    for (int i = 0; params[i].name; i++) snprintf(s.value[i].text, sizeof s.value[i].text, "%s", params[i].initial);
    return policy_get(&s, "none-such") ? "?" : policy_get(&s, "sinks") == &s.value[0] ? params[0].initial : "?";
}

int main(int argc, char **argv) {
    if (argc != 6) return 2;
    printf("policy %s\n", default_of());
    int code = work(argv);
    if (code) fprintf(stderr, "read_trace: %s\n", err_message());
    return code;
}
