/* Work that has to be linear in the length of a text. Nothing is timed: what is quadratic in these lengths takes
 * minutes of processor time, what is linear a fraction of a second, and a guard ends the program in between. */
#pragma once

#include "base/mem.h"
#include "tracer/tokenizer.h"

#include <pthread.h>
#include <string.h>
#include <sys/time.h>

enum { LONG_RUN = 1 << 18, GUARD_SECONDS = 20 };

/* SIGPROF after so many seconds of processor time, unless the guard is lifted before. */
static inline void long_run_guard(int seconds) {
    setitimer(ITIMER_PROF, &(struct itimerval){.it_value.tv_sec = seconds}, NULL);
}

typedef struct long_run {
    const tokenizer *t;
    const char *unit;
    const char *end; /* what follows the last unit: something for a lookahead to fail on, or "" */
    bool special;
    int code;
} long_run;

static inline void *long_run_encode(void *context) {
    long_run *r = context;
    size_t n_unit = strlen(r->unit), n = n_unit * LONG_RUN, n_end = strlen(r->end);
    char *source = mem_new(n + n_end + 1, 1, "run");
    token_list list;
    for (size_t i = 0; i < n; i++) source[i] = r->unit[i % n_unit];
    memcpy(source + n, r->end, n_end);
    r->code = tokenizer_encode(r->t, source, n + n_end, r->special, &list);
    token_list_free(&list);
    mem_free(source);
    return NULL;
}

/* LONG_RUN units as one text, on a stack far too small for a frame per character. Returns the code of encoding. */
static inline int long_run_of(long_run r) {
    pthread_attr_t attributes;
    pthread_t thread;
    long_run_guard(GUARD_SECONDS);
    pthread_attr_init(&attributes);
    if (pthread_attr_setstacksize(&attributes, 256 << 10) || pthread_create(&thread, &attributes, long_run_encode, &r))
        return -1;
    pthread_join(thread, NULL);
    pthread_attr_destroy(&attributes);
    long_run_guard(0);
    return r.code;
}
