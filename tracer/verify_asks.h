/* Which configurations verify reruns: the rows of a results table as asks of their own. */
#pragma once

#include "sim/config.h"

typedef struct verify_ask {
    sim_ask ask;
    bool every_seq; /* of every sequence; else of `seq` */
    size_t seq;
    int32_t n_prompt; /* -1 = the trace's */
} verify_ask;

typedef struct verify_asks {
    verify_ask *ask;
    size_t n, capacity;
} verify_asks;
void verify_asks_free(verify_asks *asks);

/* Add an ask for every sequence. Returns 0 or ERR_DATA. */
int verify_asks_add(verify_asks *asks, const verify_ask *ask);

/* The rows of a results file (or of verify's own output) that belong to the trace `label`, in the file's order. `pick`
 * > 0 takes that many of them, without the full cache: one after another the row that is least like those taken so far,
 * that is with the fewest taken rows of the same family, then of the same family and budget, then of the same budget,
 * then of the same family and spec, then of the same family and lag; the earliest of equals. Returns 0, or ERR_DATA
 * naming file and line. Release with verify_asks_free either way. */
int verify_asks_of_results(const char *path, const char *label, size_t n_sequences, size_t pick, verify_asks *out);
