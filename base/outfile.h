/* An output file that appears under its name only when it is whole: written under a temporary name in the same
 * folder, synced, renamed. An existing file is never harmed unless the user asked (--force), and then only by the
 * final rename. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

typedef struct outfile {
    char *path; /* where it will appear */
    char *temp; /* write here */
    bool force; /* replace what is there when it appears */
    int slot;   /* in the list of files to remove when the process is interrupted */
} outfile;

/* Check that `path` may be written (it does not exist, or `force`; its folder exists and is writable; it is none of
 * the n `inputs` and no output begun before, compared as files, not as names) and choose a temporary name. Creates the
 * empty temporary file. Returns 0, or ERR_DATA / ERR_USAGE with nothing to release. */
int outfile_begin(outfile *f, const char *path, bool force, const char *const *inputs, int n_inputs);

/* Make `bytes` the whole content of the temporary file. Returns 0 or ERR_DATA "PATH: write failed: ...". */
int outfile_write(const outfile *f, const void *bytes, size_t n);

/* Sync the temporary file and give it its name. ERR_DATA where, without force, another process took that name since
 * outfile_begin. On failure the temporary file is gone. Releases f either way. */
int outfile_commit(outfile *f);

/* Remove the temporary file, if it is there. Safe on a zeroed f and after commit. */
void outfile_abort(outfile *f);

/* Remove every temporary file still open; async-signal-safe, for the handler of SIGINT and SIGTERM. */
void outfile_abort_all(void);

/* mkdir -p. Returns 0 or ERR_DATA. */
int outfile_make_folder(const char *path);
