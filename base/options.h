/* Command-line options as a table: parsing, help and the recorded command all come from the same rows.
 *
 * Accepted: --name VALUE, --name=VALUE, -n VALUE, -nVALUE, bundled flags, "--" ends options, "-" is a positional;
 * -h and --help in every table. Options may stand anywhere. An unknown option, a missing value, a repeated
 * single-valued option, trailing junk in a number are errors (ERR_USAGE) that name the option and suggest the nearest
 * one. */
#pragma once

#include "base/text.h"

#include <stdbool.h>
#include <stddef.h>

typedef enum opt_kind {
    OPT_FLAG,   /* target: bool */
    OPT_INT,    /* target: long long, between min and max */
    OPT_SIZE,   /* target: long long bytes; suffixes K, M, G (1024) */
    OPT_TEXT,   /* target: const char *, points into argv */
    OPT_FILE,   /* the same, naming a file: recorded without its folder */
    OPT_CHOICE, /* target: const char *; `arg` lists the choices: "auto|cpu|cuda" */
    OPT_WORDS,  /* target: const char *; a comma-separated list out of those in `arg`: "png,svg,pdf" */
    OPT_LIST,   /* target: opt_list, may repeat */
    OPT_FILES   /* the same, naming files: recorded without their folders */
} opt_kind;

typedef struct opt_list {
    const char **item; /* pointers into argv; the array is freed by opt_list_free */
    size_t n, capacity;
} opt_list;
void opt_list_free(opt_list *list);

typedef struct opt {
    const char *name; /* without "--"; NULL ends the table */
    char letter;      /* 0 = none */
    opt_kind kind;
    bool recorded;    /* changes the result: belongs into the recorded command */
    void *target;     /* holds the default before opt_parse */
    const char *arg;  /* name of the value in the help text */
    const char *help; /* a sentence or two; a line break starts a line */
    long long min, max;
} opt;

enum { OPT_MOST = 64 }; /* rows of a table */

enum { OPT_HELPED = -1 }; /* not an error: --help was asked for and shown; nothing else is to be done */

/* What --help does with a table, and with the sections of a command that has several tables. At first both are printed;
 * help pages, man pages and completion look at the same rows by taking this place. */
typedef struct opt_viewer {
    void (*section)(void *context, const char *name, const char *help); /* of the tables that follow */
    void (*table)(void *context, const opt *table);
    void *context;
} opt_viewer;
opt_viewer opt_show_with(opt_viewer viewer); /* returns the one before */
void opt_section(const char *name, const char *help);
void opt_print_table(const opt *table);
/* What a page shows of a row: the name of its value (NULL: a flag), and its help with the words of a list. */
const char *opt_value_name(const opt *row);
int opt_explain(const opt *row, text *out); /* 0 or ERR_DATA */

/* Parse argv[0..argc-1] (no program or command name in it). Returns 0, ERR_USAGE, or OPT_HELPED. */
int opt_parse(const opt *table, int argc, char **argv, opt_list *positional);

/* Was the option given on the command line that opt_parse saw last, or by opt_set since? (By its target.) */
bool opt_given(const opt *table, const void *target);

/* For options that come from elsewhere. The row of that name, or NULL. Set a row as the command line does (a flag:
 * "true" or "false"); ERR_USAGE as there. ERR_USAGE "unknown KIND'NAME'" with the nearest name of the table. */
const opt *opt_find(const opt *table, const char *name);
int opt_set(const opt *table, const opt *row, const char *value);
int opt_unknown(const opt *table, const char *kind, const char *name);

/* "kvlag sim a.h5 -p 'rmm(lag=8)'": the canonical command, only recorded options, in table order, as given; files
 * (positionals and OPT_FILE) without their folders, so that the same work gives the same text anywhere. Owned by the
 * caller; NULL on failure. */
char *opt_command(const char *command, const opt *table, const opt_list *positional);

/* Is `word` in a comma-separated list? */
bool opt_has_word(const char *list, const char *word);

/* The nearest of `names` (n of them) to `word` by edit distance, or NULL if none is near. */
const char *opt_nearest(const char *word, const char *const *names, size_t n);

/* For the end of a message about `word` [n], which is none of `words` ("a|b:N|c" or "a, b:N, c"; what stands behind a
 * colon does not matter): " (did you mean b:N?)", or "" where none is near. Returns out. */
enum { OPT_HINT = 96 };
const char *opt_did_you_mean(const char *words, const char *word, size_t n, char out[OPT_HINT]);
