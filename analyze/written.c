#include "analyze/written.h"
#include "base/err.h"

#include <string.h>

int written_path(const written *w, const char *name, const char *ending, text *path) {
    TRY(text_add_path(path, w->folder, name));
    return text_add(path, ".%s", ending);
}

int written_begin(const written *w, const char *name, const char *ending, outfile *out) {
    text path = {0};
    int code = written_path(w, name, ending, &path);
    if (!code) code = outfile_begin(out, path.data, w->force, w->inputs, w->n_inputs);
    text_free(&path);
    return code;
}

int written_check(const written *w, const char *name, const char *ending) {
    outfile out = {0};
    TRY(written_begin(w, name, ending, &out));
    outfile_abort(&out);
    return 0;
}

int written_commit(written *w, outfile *out) {
    text path = {0};
    int code = text_add(&path, "%s\n", out->path);
    if (code) outfile_abort(out);
    else code = outfile_commit(out);
    if (!code) code = text_add(&w->list, "%s", path.data);
    text_free(&path);
    return code;
}

int written_text(written *w, const char *name, const char *ending, const text *content) {
    outfile out = {0};
    TRY(written_begin(w, name, ending, &out));
    int code = outfile_write(&out, content->data, content->n);
    if (!code) return written_commit(w, &out);
    outfile_abort(&out);
    return code;
}
