#include "base/outfile.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/text.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
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
    if (!*path) return err_set(ERR_USAGE, "the name of an output file is empty");
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

static void release(outfile *f) {
    if (f->slot >= 0) open_temps[f->slot][0] = 0;
    mem_free(f->path);
    mem_free(f->temp);
    *f = (outfile){.slot = -1};
}

static int choose_names(outfile *f, const char *path) {
    text temp = {0};
    TRY(text_add(&temp, "%s.%ld.tmp", path, (long)getpid()));
    f->temp = temp.data;
    f->path = mem_string(path);
    if (!f->path) return ERR_DATA;
    if (temp.n >= NAME_MAX_BYTES) return err_set(ERR_DATA, "%s: name too long", path);
    /* One target under two spellings has one temporary file. */
    struct stat st;
    for (int i = 0; i < MAX_OPEN && stat(f->temp, &st) == 0; i++)
        if (open_temps[i][0] && same_file(&st, open_temps[i]))
            return err_set(ERR_USAGE, "%s: this command writes it twice; give its outputs different names", path);
    return 0;
}

static int create(outfile *f) {
    int slot = 0;
    while (slot < MAX_OPEN && open_temps[slot][0]) slot++;
    if (slot == MAX_OPEN) return err_set(ERR_DATA, "%s: too many output files at once", f->path);
    f->slot = slot;
    /* A signal may come at any time: the name is listed before the file is there, and its first byte last, so that the
     * handler never sees half a name. */
    memcpy(open_temps[slot] + 1, f->temp + 1, strlen(f->temp));
    atomic_signal_fence(memory_order_seq_cst);
    open_temps[slot][0] = f->temp[0];
    int fd = open(f->temp, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    if (fd < 0) return err_set(ERR_DATA, "%s: cannot be created: %s", f->path, strerror(errno));
    close(fd);
    return 0;
}

int outfile_begin(outfile *f, const char *path, bool force, const char *const *inputs, int n_inputs) {
    *f = (outfile){.slot = -1};
    TRY(check_target(path, force, inputs, n_inputs));
    int code = choose_names(f, path);
    if (!code) code = create(f);
    f->force = force;
    if (code) release(f);
    return code;
}

int outfile_write(const outfile *f, const void *bytes, size_t n) {
    FILE *out = fopen(f->temp, "wb");
    int why = out ? 0 : errno;
    if (out && fwrite(bytes, 1, n, out) != n) why = errno;
    if (out && fclose(out) != 0 && !why) why = errno;
    return why ? err_set(ERR_DATA, "%s: write failed: %s", f->path, strerror(why)) : 0;
}

/* A file that came up while we worked is another process's: it stays, unless the user asked to replace what is there.
 * File systems that cannot tell replace it. */
static int name_it(const outfile *f) {
    if (f->force) return rename(f->temp, f->path);
    int code = renameat2(AT_FDCWD, f->temp, AT_FDCWD, f->path, RENAME_NOREPLACE);
    return code && (errno == EINVAL || errno == ENOSYS) ? rename(f->temp, f->path) : code;
}

int outfile_commit(outfile *f) {
    int fd = open(f->temp, O_RDWR), code = 0;
    if (fd < 0 || fsync(fd) != 0) code = err_set(ERR_DATA, "%s: write failed: %s", f->path, strerror(errno));
    if (fd >= 0 && close(fd) != 0 && !code) code = err_set(ERR_DATA, "%s: write failed: %s", f->path, strerror(errno));
    if (!code && name_it(f) != 0)
        code = errno == EEXIST
                   ? err_set(ERR_DATA, "%s: another process wrote it meanwhile; it is left as it is", f->path)
                   : err_set(ERR_DATA, "%s: cannot be renamed into place: %s", f->path, strerror(errno));
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
