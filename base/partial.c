#include "base/partial.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/progress.h"
#include "base/text.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

struct partial {
    const partial_kind *kind;
    char *path;
    int fd;
    partial_place place;
    bool is_new;   /* held nothing when it was opened */
    bool complete; /* all records there were are read */
    char *buffer;
    size_t capacity;
};

typedef struct record_head {
    uint64_t number, bytes, hash;
} record_head;

/* ---- opening ---------------------------------------------------------------------------------------------------- */

static int fail(const partial *p, const char *what) {
    return err_set(ERR_DATA, "%s: %s: %s", p->path, what, strerror(errno));
}

/* Whoever had the lock may have finished and removed the file while we waited: then the name is free again. */
static bool is_current(const partial *p) {
    struct stat ours, named;
    return fstat(p->fd, &ours) == 0 && stat(p->path, &named) == 0 && ours.st_dev == named.st_dev &&
           ours.st_ino == named.st_ino;
}

static int lock(const partial *p) {
    if (flock(p->fd, LOCK_EX | LOCK_NB) == 0) return 0;
    if (errno == EWOULDBLOCK)
        return err_set(ERR_USAGE, "%s: another process is at work on it; wait for it, or give -o another name",
                       p->path);
    say("%s: cannot be locked (%s): take care that one process alone works on it", p->path, strerror(errno));
    return 0;
}

static int open_locked(partial *p) {
    do {
        if (p->fd >= 0) close(p->fd);
        p->fd = open(p->path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
        if (p->fd < 0) return fail(p, "cannot be opened");
        TRY(lock(p));
    } while (!is_current(p));
    struct stat st;
    if (fstat(p->fd, &st) != 0) return fail(p, "cannot be opened");
    return S_ISREG(st.st_mode) ? 0 : err_set(ERR_USAGE, "%s: is not a regular file", p->path);
}

/* As many of n bytes as there are; -1 with errno. */
static ssize_t read_some(int fd, void *to, size_t n) {
    size_t got = 0;
    while (got < n) {
        ssize_t k = read(fd, (char *)to + got, n - got);
        if (k < 0 && errno != EINTR) return -1;
        if (k == 0) break;
        if (k > 0) got += (size_t)k;
    }
    return (ssize_t)got;
}

static int write_all(partial *p, const void *from, size_t n) {
    for (size_t done = 0; done < n;) {
        ssize_t k = write(p->fd, (const char *)from + done, n - done);
        if (k > 0) done += (size_t)k;
        else if (k == 0 || errno != EINTR) return fail(p, "write failed");
    }
    return 0;
}

/* Go back to what is whole. */
static int cut(partial *p) {
    if (ftruncate(p->fd, p->place.at) != 0 || lseek(p->fd, p->place.at, SEEK_SET) < 0) return fail(p, "write failed");
    return 0;
}

static int refuse(const partial *p, const char *found, const char *want) {
    size_t skip = strlen(p->kind->magic), n;
    if (strncmp(found, p->kind->magic, skip) != 0)
        return err_set(ERR_USAGE, "%s: is no journal of kvlag; give -o another name", p->path);
    n = strcspn(found + skip, "\n");
    if (strncmp(found + skip, want + skip, n + 1) != 0)
        return err_set(
            ERR_USAGE,
            "%s: unfinished work of another command; finish that one, or remove the file to give it up: %.*s", p->path,
            (int)n, found + skip);
    return err_set(ERR_USAGE, "%s: unfinished work of the same command, but of other %s; remove the file to give it up",
                   p->path, p->kind->bound_to);
}

/* Compare the file's header with ours; write ours where the file is empty or was torn inside the header. */
static int begin(partial *p, const text *header) {
    char *found = mem_new(header->n + 1, 1, "journal");
    if (!found) return ERR_DATA;
    ssize_t got = read_some(p->fd, found, header->n);
    int code = got < 0 ? fail(p, "cannot be read") : 0;
    bool same = !code && memcmp(found, header->data, (size_t)got) == 0, whole = (size_t)got == header->n;
    if (!code && !same) code = refuse(p, found, header->data);
    mem_free(found);
    if (!code && !whole) {
        p->is_new = true;
        code = cut(p);
        if (!code) code = write_all(p, header->data, header->n);
    }
    if (!code) p->place.at = (long long)header->n;
    return code;
}

static int compose_header(const partial_kind *kind, const char *command, const char *binding, text *header) {
    TRY(text_add(header, "%s%s\n", kind->magic, command));
    for (char *c = header->data + strlen(kind->magic); c < header->data + header->n - 1; c++)
        if ((unsigned char)*c < 0x20) *c = '?';
    return text_add(header, "%s\n", binding);
}

static void release(partial *p) {
    if (p->fd >= 0) close(p->fd);
    mem_free(p->path);
    mem_free(p->buffer);
    mem_free(p);
}

int partial_open(const char *path, const partial_kind *kind, const char *command, const char *binding, partial **out) {
    *out = NULL;
    partial *p = mem_new(1, sizeof *p, "journal");
    if (!p) return ERR_DATA;
    p->kind = kind;
    p->fd = -1;
    p->path = mem_string(path);
    text header = {0};
    int code = p->path ? compose_header(kind, command, binding, &header) : ERR_DATA;
    if (!code) code = open_locked(p);
    if (!code) code = begin(p, &header);
    text_free(&header);
    if (code) release(p);
    else *out = p;
    return code;
}

const char *partial_path(const partial *p) {
    return p->path;
}

partial_place partial_tell(const partial *p) {
    return p->place;
}

/* ---- records ---------------------------------------------------------------------------------------------------- */

static int reserve(partial *p, size_t bytes) {
    return mem_grow((void **)&p->buffer, &p->capacity, bytes ? bytes : 1, 1, "journal");
}

/* Does the file hold that many more bytes? A damaged size must not be believed. */
static bool holds(const partial *p, uint64_t bytes) {
    struct stat st;
    uint64_t from = (uint64_t)p->place.at + sizeof(record_head);
    return fstat(p->fd, &st) == 0 && (uint64_t)st.st_size >= from && bytes <= (uint64_t)st.st_size - from;
}

/* Read the next record into the buffer. *whole = false: there is none, or it is torn or damaged. */
static int read_record(partial *p, size_t want, size_t *n, bool *whole) {
    record_head head;
    ssize_t got = read_some(p->fd, &head, sizeof head), more = 0;
    bool fits = got == (ssize_t)sizeof head && head.number == p->place.n && holds(p, head.bytes) &&
                (!want || head.bytes == want);
    *n = fits ? (size_t)head.bytes : 0;
    if (fits) {
        TRY(reserve(p, *n));
        more = read_some(p->fd, p->buffer, *n);
    }
    if (got < 0 || more < 0) return fail(p, "cannot be read");
    *whole = fits && more == (ssize_t)*n && head.hash == XXH3_64bits_withSeed(p->buffer, *n, head.number);
    if (got && !*whole)
        say("%s: record %zu is torn or damaged; its %s and what follows is computed again", p->path, p->place.n,
            p->kind->piece);
    return 0;
}

int partial_read(partial *p, size_t want, const void **bytes, size_t *n) {
    bool whole = false;
    *bytes = NULL;
    *n = 0;
    if (p->complete) return 0;
    TRY(read_record(p, want, n, &whole));
    if (!whole) {
        p->complete = true;
        return cut(p);
    }
    p->place.at += (long long)(sizeof(record_head) + *n);
    p->place.n++;
    *bytes = p->buffer;
    return 0;
}

int partial_go(partial *p, partial_place place, bool give_up) {
    p->place = place;
    p->complete = give_up;
    if (give_up) return cut(p);
    return lseek(p->fd, place.at, SEEK_SET) < 0 ? fail(p, "cannot be read") : 0;
}

int partial_append(partial *p, const partial_part *parts, size_t n) {
    size_t bytes = 0, at = sizeof(record_head);
    for (size_t i = 0; i < n; i++) bytes += parts[i].n;
    TRY(reserve(p, sizeof(record_head) + bytes));
    for (size_t i = 0; i < n; at += parts[i++].n)
        if (parts[i].n) memcpy(p->buffer + at, parts[i].bytes, parts[i].n);
    const char *payload = p->buffer + sizeof(record_head);
    record_head head = {p->place.n, bytes, XXH3_64bits_withSeed(payload, bytes, p->place.n)};
    memcpy(p->buffer, &head, sizeof head);
    int code = write_all(p, p->buffer, sizeof head + bytes);
    if (code) {
        char why[ERR_MESSAGE_MAX];
        strcpy(why, err_message());
        cut(p); /* should this fail too, the torn record is dropped when the file is read */
        return err_set(code, "%s", why);
    }
    p->place.at += (long long)(sizeof head + bytes);
    p->place.n++;
    return 0;
}

int partial_sync(partial *p) {
    return fsync(p->fd) == 0 ? 0 : fail(p, "write failed");
}

/* ---- closing ---------------------------------------------------------------------------------------------------- */

/* Removed before the lock is given back, so that nobody takes up what is finished. */
void partial_remove(partial *p) {
    if (!p) return;
    unlink(p->path);
    release(p);
}

void partial_keep(partial *p) {
    if (!p) return;
    if (!p->place.n && (p->is_new || p->complete)) unlink(p->path);
    release(p);
}
