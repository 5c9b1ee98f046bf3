/* What the reader's files share: reader.c (opening and checking), reader_rows.c (attention), info.c and check.c. */
#pragma once

#include "traces/content_hash.h"
#include "traces/hdf.h"
#include "traces/trace.h"

struct trace {
    char *path, *label;
    char hash[CONTENT_HASH_HEX];
    bool hash_stored; /* the hash comes from the file's own attribute, else from the file's bytes */
    hid_t h5;
    trace_model model;
    bool has_wo;
    trace_sequence *seq;
    size_t n_seq;
};
