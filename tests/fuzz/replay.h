/* main() for a fuzz entry where there is no libFuzzer: `fuzz_NAME [-n MUTATIONS] FILE|FOLDER...` runs the entry on
 * every file, then on MUTATIONS damaged copies of them (default 20000). The damage is a function of the mutation's
 * number, so a run repeats exactly; `-m NUMBER` runs one mutation alone, for a debugger.
 *
 * Include this once, at the end of the file that defines LLVMFuzzerTestOneInput. With -fsanitize=fuzzer define
 * LIBFUZZER, since libFuzzer brings its own main. */
#pragma once

#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#ifndef LIBFUZZER
#include "base/rng.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { REPLAY_FILES = 1024, REPLAY_GROWTH = 64, REPLAY_STEPS = 4 };

typedef struct replay_file {
    unsigned char *bytes;
    size_t n;
} replay_file;

typedef struct replay_corpus {
    replay_file file[REPLAY_FILES];
    size_t n;
} replay_corpus;

static void replay_fail(const char *path) {
    fprintf(stderr, "%s: %s\n", path, errno ? strerror(errno) : "cannot be read");
    exit(1);
}

static void replay_load(replay_corpus *c, const char *path) {
    FILE *f = fopen(path, "rb");
    struct stat st;
    if (!f || fstat(fileno(f), &st) || c->n == REPLAY_FILES) replay_fail(path);
    replay_file *r = &c->file[c->n++];
    r->n = (size_t)st.st_size;
    r->bytes = malloc(r->n + 1);
    if (!r->bytes || fread(r->bytes, 1, r->n, f) != r->n) replay_fail(path);
    fclose(f);
}

/* A file, or the files of a folder in the order of their names. */
static void replay_add(replay_corpus *c, const char *path) {
    struct dirent **names;
    struct stat st;
    char inside[4096];
    if (stat(path, &st)) replay_fail(path);
    if (!S_ISDIR(st.st_mode)) {
        replay_load(c, path);
        return;
    }
    int n = scandir(path, &names, NULL, alphasort);
    if (n < 0) replay_fail(path);
    for (int i = 0; i < n; i++) {
        snprintf(inside, sizeof inside, "%s/%s", path, names[i]->d_name);
        if (names[i]->d_name[0] != '.') replay_load(c, inside);
        free(names[i]);
    }
    free(names);
}

/* Damage the n bytes at p once; there is room for REPLAY_GROWTH more. Returns the new length. */
static size_t replay_damage(unsigned char *p, size_t n, rng_block r) {
    static const uint64_t numbers[] = {0,      1,        3,          8,          0x7f,       0xff,
                                       0xffff, 1u << 31, UINT32_MAX, 1ull << 60, 1ull << 63, UINT64_MAX};
    if (n == 0) return n;
    size_t at = r.v[1] % n, width = (size_t)1 << r.v[2] % 4, run = 1 + r.v[2] % REPLAY_GROWTH;
    uint64_t number = numbers[r.v[3] % (sizeof numbers / sizeof *numbers)];
    if (run > n - at) run = n - at;
    switch (r.v[0] % 7) {
    case 0:
        p[at] ^= (unsigned char)(1u << r.v[2] % 8);
        break;
    case 1:
        p[at] = (unsigned char)r.v[2];
        break;
    case 2:
        memcpy(p + at, &number, width < n - at ? width : n - at);
        break;
    case 3:
        p[at] = (unsigned char)(p[at] + (r.v[2] & 1 ? 1 : -1));
        break;
    case 4:
        return at; /* cut */
    case 5:        /* drop a run */
        memmove(p + at, p + at + run, n - at - run);
        return n - run;
    case 6: /* double a run */
        memmove(p + at + run, p + at, n - at);
        return n + run;
    }
    return n;
}

/* A copy of its exact size, so that a sanitizer sees every byte read past the end. */
static void replay_mutation(const replay_corpus *c, uint32_t number) {
    const replay_file *f = &c->file[number % c->n];
    size_t n = f->n;
    unsigned char *work = malloc(n + REPLAY_STEPS * REPLAY_GROWTH);
    if (!work) abort();
    memcpy(work, f->bytes, n);
    uint32_t steps = 1 + rng_philox(0, number, 0, 0, 0).v[0] % REPLAY_STEPS;
    for (uint32_t s = 1; s <= steps; s++) n = replay_damage(work, n, rng_philox(0, number, s, 0, 0));
    unsigned char *exact = malloc(n ? n : 1);
    if (!exact) abort();
    memcpy(exact, work, n);
    free(work);
    LLVMFuzzerTestOneInput(exact, n);
    free(exact);
}

int main(int argc, char **argv) {
    static replay_corpus corpus;
    uint32_t first = 0, end = 20000;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "-n") == 0 && i + 1 < argc) end = (uint32_t)strtoul(argv[++i], NULL, 10);
        else if (strcmp(argv[i], "-m") == 0 && i + 1 < argc) end = (first = (uint32_t)strtoul(argv[++i], NULL, 10)) + 1;
        else replay_add(&corpus, argv[i]);
    }
    if (corpus.n == 0) {
        fprintf(stderr, "usage: %s [-n MUTATIONS | -m NUMBER] FILE|FOLDER...\n", argv[0]);
        return 2;
    }
    for (size_t i = 0; i < corpus.n; i++) LLVMFuzzerTestOneInput(corpus.file[i].bytes, corpus.file[i].n);
    for (uint32_t m = first; m < end; m++) replay_mutation(&corpus, m);
    printf("%s: %zu files, %u mutations\n", argv[0], corpus.n, end - first);
    for (size_t i = 0; i < corpus.n; i++) free(corpus.file[i].bytes);
    return 0;
}
#endif
