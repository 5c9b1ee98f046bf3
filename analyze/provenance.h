/* Where results come from: the files that were read, what they say of themselves, and their hashes. */
#pragma once

#include "analyze/results.h"
#include "base/text.h"

typedef struct provenance_file {
    const char *path, *role; /* "results", "truths", "lifetimes" or "trace" */
    char hash[33];           /* XXH3-128 of its bytes, in hex */
    text comments;           /* the lines that stand above the header of a CSV file, without "# "; empty otherwise */
} provenance_file;

typedef struct provenance {
    provenance_file *item;
    size_t n;
} provenance;

/* lifetimes and trace may be NULL. Returns 0 or ERR_DATA. Release with provenance_free either way. */
int provenance_read(const results *r, const char *lifetimes, const char *trace, provenance *out);
void provenance_free(provenance *p);

/* Append the values of the comments "KEY: value" of a file, one a line. */
int provenance_values(const provenance_file *f, const char *key, text *out);
