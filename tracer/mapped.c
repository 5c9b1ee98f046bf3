#include "tracer/mapped.h"
#include "base/err.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#if __has_include(<sanitizer/asan_interface.h>)
#include <sanitizer/asan_interface.h> /* expands to nothing outside AddressSanitizer */
#else
#define ASAN_POISON_MEMORY_REGION(p, n) ((void)(p), (void)(n))
#define ASAN_UNPOISON_MEMORY_REGION(p, n) ((void)(p), (void)(n))
#endif

/* From the end of the file to the end of its page the mapping reads as zeros, so a read past the end would go
 * unnoticed; under AddressSanitizer those bytes are off limits. */
static size_t tail_bytes(const mapped *m) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return (page - m->size % page) % page;
}

int mapped_open(mapped *m, const char *path, const char *what) {
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* O_NONBLOCK: opening a FIFO must not wait */
    if (fd < 0) return err_set(ERR_DATA, "cannot be opened: %s", strerror(errno));
    int code = 0;
    void *base = NULL;
    if (fstat(fd, &st) != 0) code = err_set(ERR_DATA, "%s", strerror(errno));
    else if (S_ISDIR(st.st_mode)) code = err_set(ERR_DATA, "is a folder, not a %s", what);
    else if (!S_ISREG(st.st_mode)) code = err_set(ERR_DATA, "is not a regular file");
    else if (st.st_size == 0) code = err_set(ERR_DATA, "is empty");
    else {
        base = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (base == MAP_FAILED) code = err_set(ERR_DATA, "cannot be mapped: %s", strerror(errno));
    }
    close(fd);
    if (code) return code;
    *m = (mapped){base, (size_t)st.st_size};
    ASAN_POISON_MEMORY_REGION(m->base + m->size, tail_bytes(m));
    return 0;
}

void mapped_close(mapped *m) {
    if (!m->base) return;
    ASAN_UNPOISON_MEMORY_REGION(m->base + m->size, tail_bytes(m));
    munmap((void *)m->base, m->size);
    m->base = NULL;
}

static bool begins(const unsigned char *p, size_t n, const char *word) {
    return n >= strlen(word) && strncasecmp((const char *)p, word, strlen(word)) == 0;
}

int mapped_refuse(const mapped *m, const char *what) {
    const unsigned char *p = m->base;
    size_t n = m->size;
    if (begins(p, n, "version https://git-lfs"))
        return err_set(ERR_DATA, "looks like a Git LFS pointer, not weights (git lfs pull fetches them)");
    while (n > 0 && strchr(" \t\r\n", *p) && *p) p++, n--;
    if (begins(p, n, "<!doctype") || begins(p, n, "<html"))
        return err_set(ERR_DATA, "looks like an HTML page, not weights (was a download refused?)");
    return err_set(ERR_DATA, "not a %s", what);
}
