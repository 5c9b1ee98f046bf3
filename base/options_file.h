/* Options from a file, for sweeps that are worth keeping: lines of `key = value`, keys being the long names of a
 * command's options.
 *
 *     # what the paper shows
 *     policy = rmm(lag=0|8|64)
 *     policy = h2o
 *     budget = 10%,25%
 *     output = results/paper.csv
 *
 * A '#' at the start of a line or behind a blank begins a comment. Keys of options that may repeat may repeat; any
 * other must not. Flags are `true` or `false`. Relative names of files start from the file's own folder. What the
 * command line says goes before the file: an option that is given there replaces all of the file's values for it. */
#pragma once

#include "base/options.h"

typedef struct opt_file {
    const char *path; /* NULL = none; points into argv */
    char **owned;     /* what targets point to */
    size_t n, capacity;
} opt_file;

/* A row of a command's table; `file` is an opt_file. */
#define OPT_GRID(file)                                                          \
    {                                                                           \
        "grid", 0, OPT_FILE, false, &(file).path, "FILE",                       \
            "options from a file, lines of key = value (kvlag help grid)", 0, 0 \
    }

/* After opt_parse: set from f->path, if there is one, what the command line does not give. ERR_DATA: it cannot be read;
 * ERR_USAGE "FILE:LINE: ...". Release with opt_file_free when the targets are no longer used. */
int opt_file_read(opt_file *f, const opt *table);
void opt_file_free(opt_file *f);
