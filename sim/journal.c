#include "sim/journal.h"
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

struct journal {
    char *path;
    int fd;
    off_t good; /* bytes that are whole: the header and n records */
    size_t n;
    bool is_new;   /* held nothing when it was opened */
    bool complete; /* all records there were are taken */
    char *buffer;
    size_t capacity;
};

typedef struct record_head {
    uint64_t number, bytes, hash;
} record_head;

static const char magic[] = "kvlag journal v1\n";

/* ---- opening ---------------------------------------------------------------------------------------------------- */

static int fail(const journal *j, const char *what) {
    return err_set(ERR_DATA, "%s: %s: %s", j->path, what, strerror(errno));
}

/* Whoever had the lock may have finished and removed the file while we waited: then the name is free again. */
static bool is_current(const journal *j) {
    struct stat ours, named;
    return fstat(j->fd, &ours) == 0 && stat(j->path, &named) == 0 && ours.st_dev == named.st_dev &&
           ours.st_ino == named.st_ino;
}

static int lock(const journal *j) {
    if (flock(j->fd, LOCK_EX | LOCK_NB) == 0) return 0;
    if (errno == EWOULDBLOCK)
        return err_set(ERR_USAGE, "%s: another process is at work on it; wait for it, or give -o another name",
                       j->path);
    say("%s: cannot be locked (%s): take care that one process alone works on it", j->path, strerror(errno));
    return 0;
}

static int open_locked(journal *j) {
    do {
        if (j->fd >= 0) close(j->fd);
        j->fd = open(j->path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
        if (j->fd < 0) return fail(j, "cannot be opened");
        TRY(lock(j));
    } while (!is_current(j));
    struct stat st;
    if (fstat(j->fd, &st) != 0) return fail(j, "cannot be opened");
    return S_ISREG(st.st_mode) ? 0 : err_set(ERR_USAGE, "%s: is not a regular file", j->path);
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

static int write_all(journal *j, const void *from, size_t n) {
    for (size_t done = 0; done < n;) {
        ssize_t k = write(j->fd, (const char *)from + done, n - done);
        if (k > 0) done += (size_t)k;
        else if (k == 0 || errno != EINTR) return fail(j, "write failed");
    }
    return 0;
}

/* Go back to what is whole. */
static int rewind_to_good(journal *j) {
    if (ftruncate(j->fd, j->good) != 0 || lseek(j->fd, j->good, SEEK_SET) < 0) return fail(j, "write failed");
    return 0;
}

static int refuse(const journal *j, const char *found, const char *want) {
    size_t skip = sizeof magic - 1, n;
    if (strncmp(found, magic, skip) != 0)
        return err_set(ERR_USAGE, "%s: is no journal of kvlag; give -o another name", j->path);
    n = strcspn(found + skip, "\n");
    if (strncmp(found + skip, want + skip, n + 1) != 0)
        return err_set(
            ERR_USAGE,
            "%s: unfinished work of another command; finish that one, or remove the file to give it up: %.*s", j->path,
            (int)n, found + skip);
    return err_set(ERR_USAGE,
                   "%s: unfinished work of the same command, but of other traces, calibration, lifetimes, shard or "
                   "version; remove the file to give it up",
                   j->path);
}

/* Compare the file's header with ours; write ours where the file is empty or was torn inside the header. */
static int begin(journal *j, const text *header) {
    char *found = mem_new(header->n + 1, 1, "journal");
    if (!found) return ERR_DATA;
    ssize_t got = read_some(j->fd, found, header->n);
    int code = got < 0 ? fail(j, "cannot be read") : 0;
    bool same = !code && memcmp(found, header->data, (size_t)got) == 0, whole = (size_t)got == header->n;
    if (!code && !same) code = refuse(j, found, header->data);
    mem_free(found);
    if (!code && !whole) {
        j->is_new = true;
        code = rewind_to_good(j);
        if (!code) code = write_all(j, header->data, header->n);
    }
    if (!code) j->good = (off_t)header->n;
    return code;
}

static int compose_header(const char *command, const char *binding, text *header) {
    TRY(text_add(header, "%s%s\n", magic, command));
    for (char *c = header->data + sizeof magic - 1; c < header->data + header->n - 1; c++)
        if ((unsigned char)*c < 0x20) *c = '?';
    return text_add(header, "%s\n", binding);
}

static void release(journal *j) {
    if (j->fd >= 0) close(j->fd);
    mem_free(j->path);
    mem_free(j->buffer);
    mem_free(j);
}

int journal_open(const char *path, const char *command, const char *binding, journal **out) {
    *out = NULL;
    journal *j = mem_new(1, sizeof *j, "journal");
    if (!j) return ERR_DATA;
    j->fd = -1;
    j->path = mem_string(path);
    text header = {0};
    int code = j->path ? compose_header(command, binding, &header) : ERR_DATA;
    if (!code) code = open_locked(j);
    if (!code) code = begin(j, &header);
    text_free(&header);
    if (code) release(j);
    else *out = j;
    return code;
}

/* ---- records ---------------------------------------------------------------------------------------------------- */

typedef struct span {
    void **at; /* the result's pointer */
    size_t bytes;
} span;
enum { SPANS = 5 };

/* The arrays that a result owns: a new one in sweep_result belongs here too; plain fields travel by themselves. */
static void list_spans(const journal_shape *s, sweep_result *r, span out[SPANS]) {
    size_t priced = s->loss ? s->heads * sizeof(float) : 0, samples = s->loss ? s->n_fisher * BLOCKS_PER_ROW : 0;
    out[0] = (span){(void **)&r->head_lost_mass, s->heads * sizeof(float)};
    out[1] = (span){(void **)&r->head_first, priced};
    out[2] = (span){(void **)&r->head_fisher, priced};
    out[3] = (span){(void **)&r->block_fisher, samples * sizeof(double)};
    out[4] = (span){(void **)&r->evict_at, s->lifetimes * sizeof(int32_t)};
}

static size_t payload_bytes(const span spans[SPANS]) {
    size_t bytes = sizeof(sweep_result);
    for (int i = 0; i < SPANS; i++) bytes += spans[i].bytes;
    return bytes;
}

/* Room for a record in the buffer. */
static int reserve(journal *j, size_t bytes) {
    return mem_grow((void **)&j->buffer, &j->capacity, sizeof(record_head) + bytes, 1, "journal");
}

/* Read the next record into the buffer. *whole = false: there is none, or it is torn or damaged. */
static int read_record(journal *j, size_t bytes, bool *whole) {
    record_head head;
    TRY(reserve(j, bytes));
    ssize_t got = read_some(j->fd, &head, sizeof head), more = 0;
    if (got == (ssize_t)sizeof head) more = read_some(j->fd, j->buffer, bytes);
    if (got < 0 || more < 0) return fail(j, "cannot be read");
    *whole = got == (ssize_t)sizeof head && more == (ssize_t)bytes && head.number == j->n && head.bytes == bytes &&
             head.hash == XXH3_64bits_withSeed(j->buffer, bytes, j->n);
    if (got && !*whole)
        say("%s: record %zu is torn or damaged; its configuration and what follows is computed again", j->path, j->n);
    return 0;
}

/* From the buffer. */
static int unpack(const journal *j, const span spans[SPANS], sweep_result *out) {
    const char *from = j->buffer;
    memcpy(out, from, sizeof *out);
    from += sizeof *out;
    for (int i = 0; i < SPANS; i++) *spans[i].at = NULL;
    for (int i = 0; i < SPANS; i++) {
        if (!spans[i].bytes) continue;
        if (!(*spans[i].at = mem_new(spans[i].bytes, 1, "results"))) return ERR_DATA;
        memcpy(*spans[i].at, from, spans[i].bytes);
        from += spans[i].bytes;
    }
    return 0;
}

int journal_take(journal *j, const journal_shape *shape, sweep_result *out, bool *found) {
    span spans[SPANS];
    list_spans(shape, out, spans);
    size_t bytes = payload_bytes(spans);
    *out = (sweep_result){0};
    *found = false;
    if (j->complete) return 0;
    TRY(read_record(j, bytes, found));
    if (!*found) {
        j->complete = true;
        return rewind_to_good(j);
    }
    j->good += (off_t)(sizeof(record_head) + bytes);
    j->n++;
    return unpack(j, spans, out);
}

int journal_append(journal *j, const journal_shape *shape, const sweep_result *r) {
    sweep_result copy = *r;
    span spans[SPANS];
    list_spans(shape, &copy, spans);
    size_t bytes = payload_bytes(spans);
    TRY(reserve(j, bytes));
    char *payload = j->buffer + sizeof(record_head), *to = payload + sizeof copy;
    for (int i = 0; i < SPANS; i++) {
        if (spans[i].bytes) memcpy(to, *spans[i].at, spans[i].bytes);
        to += spans[i].bytes;
        *spans[i].at = NULL; /* addresses mean nothing to whoever reads this */
    }
    memcpy(payload, &copy, sizeof copy);
    record_head head = {j->n, bytes, XXH3_64bits_withSeed(payload, bytes, j->n)};
    memcpy(j->buffer, &head, sizeof head);
    int code = write_all(j, j->buffer, sizeof head + bytes);
    if (code) {
        char why[ERR_MESSAGE_MAX];
        strcpy(why, err_message());
        rewind_to_good(j); /* should this fail too, the torn record is dropped when the journal is read */
        return err_set(code, "%s; %zu finished configurations stay in it for --resume", why, j->n);
    }
    j->good += (off_t)(sizeof head + bytes);
    j->n++;
    return 0;
}

int journal_sync(journal *j) {
    return fsync(j->fd) == 0 ? 0 : fail(j, "write failed");
}

/* ---- closing ---------------------------------------------------------------------------------------------------- */

/* Removed before the lock is given back, so that nobody takes up what is finished. */
void journal_remove(journal *j) {
    if (!j) return;
    unlink(j->path);
    release(j);
}

void journal_keep(journal *j) {
    if (!j) return;
    if (!j->n && (j->is_new || j->complete)) unlink(j->path);
    release(j);
}
