/* `kvlag make-trace KIND -o FILE.h5`: traces that no model made, for benchmarks and experiments. Each kind is a row of
 * the table in cmd_make_trace.c, with a function and options of its own. */
#pragma once

#include "base/options.h"

/* argv without the program's and the command's name. Returns 0, OPT_HELPED or an err code with its message. */
int cmd_make_trace(int argc, char **argv);

/* The kinds; argv without the kind's name, otherwise the same. */
int make_random(int argc, char **argv);
int make_reuse(int argc, char **argv);

/* What every kind (`name`) asks of its options: no other words, an output, query heads that kv heads share out evenly.
 * Returns 0 or ERR_USAGE. */
int make_trace_check(const char *name, const opt_list *others, const char *out, long long heads, long long kv_heads);
