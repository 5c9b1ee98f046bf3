/* Precision of the cache (--kv-bits, --pending-bits): which widths are asked for, and what the open layer's keys and
 * values are at each of them (quantise.h). Entries pend while their age is below a hold that is tied to a lag. */
#pragma once

#include "base/mem.h"
#include "sim/config.h"
#include "sim/estimate.h"

/* ---- what is asked ---------------------------------------------------------------------------------------------- */

enum { KV_WIDTHS = 3 }; /* 16, 8 and 4 bits, in this order */

/* Bits of an entry, and of one that pends. */
typedef struct kv_bits {
    int entry, pending;
} kv_bits;

typedef struct kv_bits_list {
    kv_bits item[KV_WIDTHS * KV_WIDTHS];
    size_t n;
} kv_bits_list;

/* "16,8,4" each, every pair of them; `pending` NULL: as `entry`, which NULL is 16. ERR_USAGE names the option. */
int kv_bits_parse(const char *entry, const char *pending, kv_bits_list *out);

/* Is it 16 bits throughout? */
bool kv_bits_plain(const kv_bits_list *list);

/* Give a configuration item `index` of the list. False where it is to be left out: nothing in it pends, and an item
 * before this one has the same bits an entry. */
bool kv_bits_apply(const kv_bits_list *list, size_t index, sim_config *c);

/* Is anything in the cache quantised? */
bool kv_bits_quantised(const sim_config *c);
/* Do two configurations keep entries of every age in the same bits? */
bool kv_bits_same(const sim_config *a, const sim_config *b);
/* Can the trace's keys and values be quantised, its attention read in that form? 0, or ERR_ and what is missing. */
int kv_bits_check(const trace *t, size_t seq, trace_form form, const sim_config *c);

/* ---- the open layer --------------------------------------------------------------------------------------------- */

/* The layer's cache at one width. */
typedef struct layer_width {
    bool wanted;
    float *keys;            /* [n_kv_head][stride * head_dim] packed for kernels */
    float *values;          /* the same, where gradients are priced */
    estimate_streams fixed; /* as those of the layer itself */
} layer_width;

typedef struct widths {
    const trace_model *m;
    int32_t n_tokens;
    size_t stride;
    bool gradients;
    layer_width of[KV_WIDTHS];
    int n;        /* widths wanted */
    float *plain; /* [n_kv_head][n_tokens][head_dim] */
} widths;

/* The place of a width in the arrays. */
static inline int kv_width(int bits) {
    return bits == 16 ? 0 : bits == 8 ? 1 : 2;
}

/* Note what a configuration needs. */
void widths_want(widths *w, const sim_config *c);
/* Carve its arrays. */
void widths_carve(mem_carver *m, widths *w);
/* Fill them from an open layer; with `fixed`, streams like those of the layer are made by the caller's function. */
int widths_open(widths *w, trace_layer *l, int (*fixed)(void *context, const float *v, estimate_streams *out),
                void *context, pool *p);
void widths_close(widths *w); /* what widths_open allocated */
