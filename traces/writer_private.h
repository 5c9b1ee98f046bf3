/* What the writer's two files share: writer.c (the file, facts and small arrays) and writer_chunks.c (attention). */
#pragma once

#include "base/err.h"
#include "base/half.h"
#include "base/outfile.h"
#include "traces/content_hash.h"
#include "traces/hdf.h"
#include "traces/trace.h"

enum { N_ARRAYS = TRACE_V + 1 };

/* A dataset of the current sequence that is filled in several calls. */
typedef struct open_set {
    hid_t id; /* H5I_INVALID_HID: not planned */
    size_t digest;
    uint64_t next; /* index of the chunk, head or row that must come next */
} open_set;

typedef struct pack_list pack_list;

struct trace_writer {
    outfile file;
    hid_t h5, seq_group, seq, attn, logits_group;
    trace_model model;
    content_hash *hash;
    pack_list *packs;
    size_t n_sequences, n_written; /* n_written: sequences begun */
    int n_wo;                      /* layers of model/wo written */
    open_set wo;

    trace_plan plan;
    int32_t n_tokens;
    bool logits_written;
    open_set array[N_ARRAYS], lse, row_sum, full;
    half *full_row; /* [n_vocab] */

    int64_t raw, stored;
};

/* Put the file's name in front of the message of `code`; 0 stays 0. */
int writer_at_file(const trace_writer *w, int code);
/* Calls out of order are a fault of this program, not of a file. */
int writer_misuse(const char *what);

/* Shape and chunk of an array of the current sequence. */
void writer_array_shape(const trace_writer *w, trace_array a, hsize_t dims[4], hsize_t chunk[4]);
/* To f16; a value that does not fit, or is not finite, is an error. */
int writer_convert(const float *values, half *h, size_t n);

/* The memory that threads in trace_pack borrow. */
int writer_packs_new(int32_t head_dim, pack_list **out);
void writer_packs_free(pack_list *list); /* accepts NULL */
