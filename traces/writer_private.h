/* What the writer's files share: writer.c (the file, facts and small arrays), writer_chunks.c (attention),
 * writer_grad.c (gradients), writer_calls.c (calls kept and repeated) and writer_queue.c (the thread that writes).
 *
 * What is written in many parts goes through the queue: writer_later. All other calls of HDF5 come after a
 * write_queue_drain in the same function of the writer. */
#pragma once

#include "base/err.h"
#include "base/half.h"
#include "base/outfile.h"
#include "traces/content_hash.h"
#include "traces/hdf.h"
#include "traces/trace.h"
#include "traces/writer_calls.h"
#include "traces/zstd_filter.h"

enum { N_ARRAYS = TRACE_V + 1, WRITER_RANK = 5 /* dimensions, at most */ };

/* A dataset of the current sequence that is filled in several calls. */
typedef struct open_set {
    hid_t id; /* H5I_INVALID_HID: not planned */
    hid_t type;
    int rank;
    size_t digest;
    uint64_t next; /* index of the chunk, head or row that must come next */
} open_set;

typedef struct pack_list pack_list;

/* ---- the thread that writes ------------------------------------------------------------------------------------- */

/* One block on its way into a dataset. */
typedef struct write_block {
    hid_t set, type;
    int rank;
    bool frame;                                     /* data is a packed chunk, at `start` */
    hsize_t start[WRITER_RANK], count[WRITER_RANK]; /* count: of values, where it is not */
    void *data;                                     /* owned by the queue */
    size_t bytes;
} write_block;

typedef struct write_queue write_queue;
int write_queue_new(write_queue **out);
void write_queue_free(write_queue *q); /* accepts NULL; blocks that wait are dropped */
/* Hand over a block, waiting while the queue holds too many. Blocks are written in order. The code and message of the
 * first failure come back from this and every later call. */
int write_queue_add(write_queue *q, const write_block *b);
int write_queue_drain(write_queue *q); /* wait until nothing is under way: HDF5 is free for the caller */
/* Seconds spent writing, and seconds that callers waited for it. */
void write_queue_times(write_queue *q, double *busy, double *waited);

/* ---- the writer ------------------------------------------------------------------------------------------------- */

struct trace_writer {
    outfile file;
    hid_t h5, seq_group, seq, attn, logits_group, grad_group;
    trace_model model;
    content_hash *hash;
    pack_list *packs;
    write_queue *queue;
    size_t n_sequences, n_written; /* n_written: sequences begun */
    int n_wo;                      /* layers of model/wo written */
    open_set wo;

    trace_plan plan;
    int32_t n_tokens;
    bool logits_written, labels_written;
    open_set array[N_ARRAYS], lse, row_sum, full;
    open_set grad[2], grad_scale[2]; /* grad/loss, grad/fisher */

    int64_t raw, stored;
    const trace_tap *tap; /* NULL: calls are not kept */
};

/* Put the file's name in front of the message of `code`; 0 stays 0. */
int writer_at_file(const trace_writer *w, int code);
/* Calls out of order are a fault of this program, not of a file. */
int writer_misuse(const char *what);

/* Create a dataset of the current sequence (or of the model), `name` its path there; values follow. */
int writer_start_set(trace_writer *w, hid_t group, const char *name, hid_t type, int rank, const hsize_t *dims,
                     const hsize_t *chunk, open_set *s);
/* Write values, `data` of this many bytes, at `start`; without `count` data is a packed chunk. data is freed. */
int writer_later(trace_writer *w, const open_set *s, const hsize_t *start, const hsize_t *count, void *data,
                 size_t bytes);
/* The same with a copy of the values. */
int writer_later_copy(trace_writer *w, const open_set *s, const hsize_t *start, const hsize_t *count,
                      const void *values, size_t bytes);
/* A dataset written whole; its values lie in memory as they are stored. */
int writer_put_whole(trace_writer *w, hid_t group, const char *name, hid_t type, int rank, const hsize_t *dims,
                     const void *values);

/* A call of the writer as a record begins, before its values. */
typedef enum writer_call_kind {
    CALL_PUT,      /* at: array, layer, head, row tile, column tile; a chunk's frame and hash */
    CALL_PUT_GRAD, /* set, layer, head, row tile; the same */
    CALL_SCALE,    /* set, layer, head */
    CALL_LABELS,   /* nothing */
    CALL_LSE,      /* layer, head */
    CALL_ROW_SUM,  /* layer, head */
    CALL_LOGITS,   /* nothing; target_logprob, entropy, topk_id, topk_logprob, correct */
    CALL_FULL      /* row0, n */
} writer_call_kind;
typedef struct writer_call {
    int32_t kind, at[5];
    uint64_t hash;
} writer_call;
/* Hand a call to the tap, if there is one; sizes follow from the call. `chunk` of CALL_PUT..., else values[]. */
int writer_tell(const trace_writer *w, writer_call call, const trace_chunk *chunk, const void *const *values);

/* The datasets of the gradients, by the sequence's plan. */
int writer_start_grad(trace_writer *w);
/* Were all of them filled? */
int writer_finish_grad(const trace_writer *w);

/* Shape and chunk of an array of the current sequence. */
void writer_array_shape(const trace_writer *w, trace_array a, hsize_t dims[4], hsize_t chunk[4]);
/* To f16; a value that does not fit, or is not finite, is an error. */
int writer_convert(const float *values, half *h, size_t n);

/* One thread's memory for packing a chunk. */
typedef struct pack_work {
    struct pack_work *next;
    zstd_work *zstd;
    double since;                         /* borrowed */
    half values[TRACE_TILE * TRACE_TILE]; /* also holds TRACE_TILE x head_dim up to head_dim 256 */
    half *large;                          /* for a larger head_dim */
    float row[TRACE_TILE] __attribute__((aligned(64)));
} pack_work;
half *writer_chunk_values(pack_work *p);
/* A chunk of n shuffled f16 values: n low bytes, then n high bytes. The values lie in writer_chunk_values afterwards.
 */
int writer_pack_planes(pack_work *p, const uint8_t *planes, size_t n, trace_chunk *out);

/* Threads borrow their memory for the time of one chunk. */
int writer_borrow(pack_list *list, pack_work **out);
void writer_give_back(pack_list *list, pack_work *p);
double writer_pack_seconds(pack_list *list); /* between the two, summed over threads */
int writer_packs_new(int32_t head_dim, pack_list **out);
void writer_packs_free(pack_list *list); /* accepts NULL */
