#include "base/outfile.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/text.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_OPEN = 16, NAME_MAX_BYTES = 4096 };

/* Fixed memory, so that a signal handler may read it. */
static char open_temps[MAX_OPEN][NAME_MAX_BYTES];

static int same_file(const struct stat *a, const char *path) {
    struct stat b;
    return stat(path, &b) == 0 && a->st_dev == b.st_dev && a->st_ino == b.st_ino;
}

static int check_target(const char *path, bool force, const char *const *inputs, int n_inputs) {
    struct stat st;
    if (!*path) return err_set(ERR_USAGE, "-o: the file name is empty");
    if (stat(path, &st) != 0) {
        if (errno == ENOENT) return 0;
        return err_set(ERR_DATA, "%s: %s", path, strerror(errno));
    }
    for (int i = 0; i < n_inputs; i++)
        if (same_file(&st, inputs[i]))
            return err_set(ERR_USAGE, "%s: is an input of this command; give -o another name", path);
    if (S_ISDIR(st.st_mode)) return err_set(ERR_USAGE, "%s: is a folder, not a file", path);
    if (!S_ISREG(st.st_mode)) return err_set(ERR_USAGE, "%s: is not a regular file", path);
    if (!force) return err_set(ERR_USAGE, "%s: already there (use --force to replace it)", path);
    return 0;
}

int outfile_begin(outfile *f, const char *path, bool force, const char *const *inputs, int n_inputs) {
    *f = (outfile){.slot = -1};
    TRY(check_target(path, force, inputs, n_inputs));
    for (int i = 0; i < MAX_OPEN && f->slot < 0; i++)
        if (!open_temps[i][0]) f->slot = i;
    if (f->slot < 0) return err_set(ERR_DATA, "%s: too many output files at once", path);
    text temp = {0};
    TRY(text_add(&temp, "%s.%ld.tmp", path, (long)getpid()));
    f->temp = temp.data;
    f->path = mem_string(path);
    if (!f->path || temp.n >= NAME_MAX_BYTES) {
        mem_free(f->path);
        mem_free(f->temp);
        *f = (outfile){.slot = -1};
        return err_set(ERR_DATA, "%s: name too long", path);
    }
    int fd = open(f->temp, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    if (fd < 0) {
        int why = errno;
        mem_free(f->path);
        mem_free(f->temp);
        *f = (outfile){.slot = -1};
        return err_set(ERR_DATA, "%s: cannot be created: %s", path, strerror(why));
    }
    close(fd);
    strcpy(open_temps[f->slot], f->temp);
    return 0;
}

static void release(outfile *f) {
    if (f->slot >= 0) open_temps[f->slot][0] = 0;
    mem_free(f->path);
    mem_free(f->temp);
    *f = (outfile){.slot = -1};
}

int outfile_commit(outfile *f) {
    int fd = open(f->temp, O_RDWR), code = 0;
    if (fd < 0 || fsync(fd) != 0) code = err_set(ERR_DATA, "%s: write failed: %s", f->path, strerror(errno));
    if (fd >= 0 && close(fd) != 0 && !code) code = err_set(ERR_DATA, "%s: write failed: %s", f->path, strerror(errno));
    if (!code && rename(f->temp, f->path) != 0)
        code = err_set(ERR_DATA, "%s: cannot be renamed into place: %s", f->path, strerror(errno));
    if (code) unlink(f->temp);
    release(f);
    return code;
}

void outfile_abort(outfile *f) {
    if (!f->temp) return;
    unlink(f->temp);
    release(f);
}

void outfile_abort_all(void) {
    for (int i = 0; i < MAX_OPEN; i++)
        if (open_temps[i][0]) unlink(open_temps[i]);
}

int outfile_make_folder(const char *path) {
    char *p = mem_string(path);
    if (!p) return ERR_DATA;
    int code = 0;
    for (char *c = p + 1;; c++) {
        if (*c && *c != '/') continue;
        char was = *c;
        *c = 0;
        if (mkdir(p, 0777) != 0 && errno != EEXIST)
            code = err_set(ERR_DATA, "%s: cannot be created: %s", p, strerror(errno));
        *c = was;
        if (!was || code) break;
    }
    struct stat st;
    if (!code && (stat(path, &st) != 0 || !S_ISDIR(st.st_mode))) code = err_set(ERR_USAGE, "%s: is not a folder", path);
    mem_free(p);
    return code;
}
