/* One progress line on a terminal (stderr), rewritten in place with rate and time left; nothing when piped. And the
 * process-wide verbosity: -q silences, -v explains. */
#pragma once

#include <stdbool.h>

typedef enum verbosity { SAY_QUIET = -1, SAY_NORMAL = 0, SAY_MORE = 1 } verbosity;
void say_level(verbosity level);

/* One line on stderr, unless -q. say_more: only with -v. */
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
void say_more(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* what: "trace"; unit: "rows" (NULL: no rate). Only one progress at a time; main thread only. */
void progress_begin(const char *what, const char *unit, double total);
void progress_at(double done); /* cheap: redraws at most ten times a second */
void progress_end(void);       /* clears the line */

/* Wall clock in seconds, for closing lines and benchmarks only. */
double progress_seconds(void);
