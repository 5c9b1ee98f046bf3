/* Policy specs and what the command line says beside them: build the asks, resolve them, replay a few. Whatever the
 * text, there is an error or a configuration that keeps its own promises.
 *
 * One word a line, its first letter says what it is: p SPEC, b budgets, L lags, s schedule, u unit, d pending, S seed,
 * n prompt, T tokens.
 *
 *     cc -fsanitize=address ... tests/fuzz/fuzz_spec.c && ./fuzz_spec tests/fuzz/corpus/spec
 *     clang -fsanitize=fuzzer,address -DLIBFUZZER ... && ./fuzz_spec -max_total_time=60 tests/fuzz/corpus/spec */
#include "base/err.h"
#include "base/mem.h"
#include "base/progress.h"
#include "sim/config.h"
#include "sim/replay.h"
#include "sim/spec.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_SPECS = 8, MOST_TOKENS = 64, MOST_RESOLVED = 64, MOST_REPLAYED = 8, HEADS = 2, WINDOW = 24 };

typedef struct call {
    const char *spec[MOST_SPECS];
    size_t n_specs;
    sim_flags flags;
    int32_t n_prompt, n_tokens;
} call;

static void check(bool holds) {
    if (!holds) abort();
}

static int32_t small_number(const char *digits, int32_t most) {
    long x = strtol(digits, NULL, 10);
    return x < 0 ? 0 : x > most ? most : (int32_t)x;
}

static void read_word(call *c, char *word) {
    const char *value = word + 1 + (word[1] == ' ');
    switch (word[0]) {
    case 'p':
        if (c->n_specs < MOST_SPECS) c->spec[c->n_specs++] = value;
        break;
    case 'b':
        c->flags.budgets = value;
        break;
    case 'L':
        c->flags.lags = value;
        break;
    case 's':
        c->flags.schedule = value;
        break;
    case 'u':
        c->flags.unit = value;
        break;
    case 'd':
        c->flags.pending = value;
        break;
    case 'S':
        c->flags.seed = value;
        break;
    case 'n':
        c->n_prompt = small_number(value, c->n_tokens);
        break;
    case 'T':
        c->n_tokens = small_number(value, MOST_TOKENS);
        if (c->n_tokens < 1) c->n_tokens = 1;
        if (c->n_prompt > c->n_tokens) c->n_prompt = c->n_tokens;
    }
}

static call read_call(char *lines) {
    call c = {.flags = {.n_prompt = -1}, .n_tokens = MOST_TOKENS};
    for (char *line = lines, *end; line; line = end) {
        end = strchr(line, '\n');
        if (end) *end++ = 0;
        if (*line) read_word(&c, line);
    }
    return c;
}

/* What stands in the results must be a spec again, of the same policy, and mean the same. */
static void check_spec_again(const sim_config *c) {
    spec s;
    check(spec_parse(c->spec, &s) == 0 && s.policy == c->setup.policy);
    spec_free(&s);
}

static void check_config(const sim_config *c, int32_t n_tokens) {
    check(c->budget >= 1 && c->lag >= -1 && c->hold >= 0 && c->sinks >= 0);
    check_spec_again(c);
    if (c->is_full) return;
    check(c->budget < n_tokens && c->target >= 1 && c->target <= c->budget);
    check(c->sinks + (c->pending_free ? 0 : (int64_t)c->hold) <= c->target);
}

/* Entries see their own step; nobody held or a sink leaves; from the end of the prompt on no more stay than may. */
static void check_step(const sim_config *c, const replay *r, const int32_t *evict_at, int32_t t, int32_t window) {
    int32_t n;
    const int32_t *entry = replay_residents(r, &n);
    sim_limits l = sim_config_limits(c, 0, 1);
    sim_guard now = t == c->n_prompt - 1 ? l.prompt : l.guard;
    for (int32_t i = 0; i <= t; i++) {
        bool expired = window && evict_at[i] == i + window;
        check(evict_at[i] > i);
        if (evict_at[i] == t + 1 && !expired) check(t - i >= now.hold && i >= now.sinks);
    }
    for (int32_t j = 1; j < n; j++) check(entry[j - 1] < entry[j]);
    bool step = c->schedule == SCHEDULE_STEP || c->schedule == SCHEDULE_WATERMARK || c->schedule == SCHEDULE_BLOCK;
    if (step && !c->pending_free && t >= c->n_prompt - 1) check(n <= c->budget);
}

static float pseudo_random(uint32_t *state) {
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 8) / (1 << 24);
}

enum { DIM = 4, WIDTH = 6 };

/* Random keys, values and queries: the same for every unit. */
static const policy_layer *random_layer(void) {
    static float x[MOST_TOKENS][DIM], wo[DIM][WIDTH];
    static const float *const one[HEADS] = {x[0], x[0]}, *const out[HEADS] = {wo[0], wo[0]};
    static const policy_layer layer = {.shape = {1, HEADS, 1, DIM, WIDTH},
                                       .k = one,
                                       .v = one,
                                       .q = one,
                                       .wo = out,
                                       .scale = 0.5,
                                       .rope_base = 1e4,
                                       .rope_dims = DIM};
    uint32_t state = 7;
    for (int i = 0; i < MOST_TOKENS; i++)
        for (int c = 0; c < DIM; c++) x[i][c] = pseudo_random(&state) - 0.5f;
    for (int c = 0; c < DIM; c++)
        for (int j = 0; j < WIDTH; j++) wo[c][j] = pseudo_random(&state) - 0.5f;
    return &layer;
}

static void replay_one(const sim_config *c, int32_t n_tokens, int32_t window) {
    float row[HEADS][MOST_TOKENS + KERNEL_LANES] = {0}, evidence[MOST_TOKENS + KERNEL_LANES] = {0};
    double future[MOST_TOKENS];
    int32_t evict_at[MOST_TOKENS + KERNEL_LANES];
    const float *heads[HEADS] = {row[0], row[1]};
    uint32_t state = 1;
    replay *r;
    for (int32_t i = 0; i < n_tokens; i++) future[i] = (double)pseudo_random(&state);
    const policy_layer *layer = random_layer();
    check(replay_new(c, n_tokens, &layer->shape, &r) == 0);
    replay_begin(r, &(replay_unit){.window = window, .n_head = HEADS, .data = layer}, evict_at);
    for (int32_t t = 0; t < n_tokens; t++) {
        for (int32_t i = 0; i <= t; i++) {
            for (int h = 0; h < HEADS; h++) row[h][i] = pseudo_random(&state);
            evidence[i] = pseudo_random(&state) - 0.5f;
        }
        replay_offer(r, evidence, evidence, evidence, future);
        replay_step(r, t, heads,
                    &(replay_facts){.correct = t % 3 == 0, .confidence = 0.5, .entropy = 1, .counted = true});
        if (!c->is_full) check_step(c, r, evict_at, t, window);
    }
    replay_free(r);
}

static void resolve(const call *c, const sim_asks *asks) {
    int replayed = 0;
    for (size_t i = 0; i < asks->n && i < MOST_RESOLVED; i++) {
        sim_config config;
        char *name = sim_ask_name(&asks->ask[i]);
        check(name && *name);
        mem_free(name);
        if (sim_config_resolve(&asks->ask[i], &c->flags, c->n_tokens, c->n_prompt, &config) == 0) {
            check_config(&config, c->n_tokens);
            if (replayed++ < MOST_REPLAYED) replay_one(&config, c->n_tokens, replayed % 2 ? 0 : WINDOW);
        } else {
            check(*err_message());
        }
        sim_config_free(&config);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char *lines = mem_string_n((const char *)data, size);
    check(lines != NULL);
    say_level(SAY_QUIET);
    call c = read_call(lines);
    sim_asks asks;
    err_set(0, "%s", "");
    if (sim_asks_build(c.spec, c.n_specs, &c.flags, &asks) == 0) resolve(&c, &asks);
    else check(*err_message() && !strchr(err_message(), '\n') && !asks.n);
    sim_asks_free(&asks);
    mem_free(lines);
    return 0;
}

#include "tests/fuzz/replay.h"
