/* lifetimes.h5: what a replay decided, as one integer an entry (DESIGN sections 1 and 8). Written by `kvlag sim
 * --lifetimes`, or by anybody's Python; read by sim and verify (--from-lifetimes) and by analyze.
 *
 *     /config/NNNN                  attributes policy, spec, budget_asked, lag, unit, schedule, pending, resolved
 *     /config/NNNN/seq/MMMM         attributes budget, hold, sinks
 *     /config/NNNN/seq/MMMM/evict_at   i32 [n_layer, n_kv_head, T]
 *
 * All attributes are scalar variable-length UTF-8 strings with the CSV's exact text ("" = empty). */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Texts of one configuration; "" where a foreign file does not give them (only spec is required). Owned by the
 * reader. */
typedef struct lifetimes_config {
    const char *policy, *spec, *budget_asked, *lag, *unit, *schedule, *pending, *resolved;
} lifetimes_config;
typedef struct lifetimes_seq {
    const char *budget, *hold, *sinks;
} lifetimes_seq;

typedef struct lifetimes_writer lifetimes_writer;

/* Through base/outfile. `label` and `hash` are the trace's. */
int lifetimes_writer_new(const char *path, bool force, const char *const *inputs, int n_inputs, const char *label,
                         const char *hash, lifetimes_writer **out);
int lifetimes_write_config(lifetimes_writer *w, size_t config, const lifetimes_config *c);
/* evict_at [n_layer][n_kv_head][T]; the config was written before. */
int lifetimes_write_seq(lifetimes_writer *w, size_t config, size_t seq, const lifetimes_seq *s, int n_layer,
                        int n_kv_head, int32_t n_tokens, const int32_t *evict_at);
int lifetimes_writer_finish(lifetimes_writer *w); /* frees w either way */
void lifetimes_writer_abort(lifetimes_writer *w);

typedef struct lifetimes lifetimes;

/* Refuses by name: wrong format, no config, a config without spec or sequence. */
int lifetimes_open(const char *path, lifetimes **out);
void lifetimes_close(lifetimes *l);
const char *lifetimes_label(const lifetimes *l); /* "" if absent */
const char *lifetimes_hash(const lifetimes *l);  /* "" if absent */
size_t lifetimes_n_configs(const lifetimes *l);
const lifetimes_config *lifetimes_get_config(const lifetimes *l, size_t config);
/* The sequences that a configuration holds, in ascending order: the number (of the trace) of the i-th one. */
size_t lifetimes_n_sequences(const lifetimes *l, size_t config);
size_t lifetimes_sequence_number(const lifetimes *l, size_t config, size_t i);
/* NULL if that configuration does not hold that sequence. */
const lifetimes_seq *lifetimes_get_seq(const lifetimes *l, size_t config, size_t seq);
/* The shape stored: n_layer, n_kv_head, T. */
int lifetimes_shape(const lifetimes *l, size_t config, size_t seq, int64_t shape[3]);
/* evict_at of all layers into out [n_layer][n_kv_head][T]. Refused: shape other than given, values outside
 * i+1 .. T+1 (an entry sees its own step), naming config, layer, head and entry. */
int lifetimes_read(const lifetimes *l, size_t config, size_t seq, int n_layer, int n_kv_head, int32_t n_tokens,
                   int32_t *out);
