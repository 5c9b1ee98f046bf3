#include "base/progress.h"

#include <stdarg.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

static verbosity level = SAY_NORMAL;
static struct {
    const char *what, *unit;
    double total, start, drawn;
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
    line.what = what;
    line.unit = unit;
    line.total = total;
    line.start = progress_seconds();
    line.drawn = 0;
    line.on = level >= SAY_NORMAL && isatty(STDERR_FILENO) && total > 0;
}

void progress_at(double done) {
    if (!line.on) return;
    double now = progress_seconds(), spent = now - line.start;
    if (now - line.drawn < 0.1 || spent < 0.3) return;
    line.drawn = now;
    double share = done / line.total, left = share > 0 ? spent * (1 - share) / share : 0;
    fprintf(stderr, "\r\033[K%s %3.0f %%", line.what, 100 * share);
    if (line.unit) fprintf(stderr, "  %.3g %s/s", done / spent, line.unit);
    fprintf(stderr, "  %d:%02d left", (int)left / 60, (int)left % 60);
    fflush(stderr);
}

void progress_end(void) {
    wipe();
    line.on = false;
}
