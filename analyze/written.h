/* The folder of figures and reports: files that appear whole and harm nothing that was there, and the list of them. */
#pragma once

#include "base/outfile.h"
#include "base/text.h"

typedef struct written {
    const char *folder;
    bool force;
    const char *const *inputs; /* files that must not be written over, whatever `force` says */
    int n_inputs;
    text list; /* paths of what was written, one a line */
} written;

/* Append "FOLDER/NAME.ENDING". */
int written_path(const written *w, const char *name, const char *ending, text *path);

/* Begin FOLDER/NAME.ENDING; refused as outfile_begin does. */
int written_begin(const written *w, const char *name, const char *ending, outfile *out);
/* The same refusals, and nothing else: for checks before anything is written. */
int written_check(const written *w, const char *name, const char *ending);
/* Give the file its name and put it on the list. Releases `out` either way. */
int written_commit(written *w, outfile *out);

int written_text(written *w, const char *name, const char *ending, const text *content);
