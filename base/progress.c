#include "base/progress.h"
#include "base/terminal.h"

#include <stdarg.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

static verbosity level = SAY_NORMAL;
enum { DEEPEST = 4, WIDEST = 160 };
typedef struct span {
    const char *what, *unit;
    double total, done, next, start;
} span;
static struct {
    span span[DEEPEST];
    int depth; /* may be more than DEEPEST; what is deeper is not shown */
    double drawn;
    bool on;
} line;

void say_level(verbosity to) {
    level = to;
}

double progress_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void wipe(void) {
    if (line.on && line.drawn > 0) fputs("\r\033[K", stderr);
}

static void vsay(const char *format, va_list args) {
    wipe();
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
}

void say(const char *format, ...) {
    if (level < SAY_NORMAL) return;
    va_list args;
    va_start(args, format);
    vsay(format, args);
    va_end(args);
}

void say_more(const char *format, ...) {
    if (level < SAY_MORE) return;
    va_list args;
    va_start(args, format);
    vsay(format, args);
    va_end(args);
}

void progress_begin(const char *what, const char *unit, double total) {
    if (line.depth == 0) {
        line.on = level >= SAY_NORMAL && isatty(STDERR_FILENO) && total > 0;
        line.drawn = 0;
    }
    if (line.depth < DEEPEST)
        line.span[line.depth] = (span){.what = what, .unit = unit, .total = total, .start = progress_seconds()};
    line.depth++;
}

void progress_next(double size) {
    if (line.depth > 0 && line.depth <= DEEPEST) line.span[line.depth - 1].next = size;
}

/* How much of span k is done, the parts that are on included. */
static double share_of(int k) {
    double share = 0;
    for (int i = (line.depth < DEEPEST ? line.depth : DEEPEST) - 1; i >= k; i--) {
        const span *s = &line.span[i];
        share = s->total > 0 ? (s->done + s->next * share) / s->total : 0;
    }
    return share < 0 ? 0 : share > 1 ? 1 : share;
}

static int add_rate(char *text, size_t size, double now) {
    for (int k = 0; k < line.depth && k < DEEPEST; k++) {
        const span *s = &line.span[k];
        if (s->unit && now > s->start)
            return snprintf(text, size, "  %.3g %s/s", share_of(k) * s->total / (now - s->start), s->unit);
    }
    return 0;
}

static void add_time(char *text, size_t size, double seconds) {
    long s = seconds < 1e7 ? (long)(seconds + 0.5) : 0;
    if (s >= 3600) snprintf(text, size, "  %ld:%02ld:%02ld left", s / 3600, s / 60 % 60, s % 60);
    else snprintf(text, size, "  %ld:%02ld left", s / 60, s % 60);
}

void progress_at(double done) {
    if (!line.on || line.depth > DEEPEST) return;
    double now = progress_seconds(), spent = now - line.span[0].start;
    line.span[line.depth - 1].done = done;
    if (now - line.drawn < 0.1 || spent < 0.3) return;
    line.drawn = now;
    double share = share_of(0);
    char text[WIDEST];
    int width = terminal_width(stderr) - 1,
        n = snprintf(text, sizeof text, "%s %3.0f %%", line.span[0].what, 100 * share);
    n += add_rate(text + n, sizeof text - (size_t)n, now);
    if (share > 0) add_time(text + n, sizeof text - (size_t)n, spent * (1 - share) / share);
    fprintf(stderr, "\r\033[K%.*s", width, text);
    fflush(stderr);
}

void progress_clear(void) {
    wipe();
}

void progress_end(void) {
    if (line.depth > 0) line.depth--;
    if (line.depth > 0 && line.depth <= DEEPEST) {
        line.span[line.depth - 1].done += line.span[line.depth - 1].next;
        line.span[line.depth - 1].next = 0;
        return;
    }
    if (line.depth) return;
    wipe();
    line.on = false;
}
