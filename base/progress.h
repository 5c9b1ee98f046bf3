/* One progress line on a terminal (stderr), rewritten in place with rate and time left, no wider than the terminal;
 * nothing when piped. And the
 * process-wide verbosity: -q silences, -v explains. */
#pragma once

#include <stdbool.h>

typedef enum verbosity { SAY_QUIET = -1, SAY_NORMAL = 0, SAY_MORE = 1 } verbosity;
void say_level(verbosity level);

/* One line on stderr, unless -q. say_more: only with -v. */
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
void say_more(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* what: "trace"; unit: what `total` counts, e.g. "rows" (NULL: no rate is shown). Main thread only.
 *
 * Work that has parts: a progress that begins while another is on is a part of it, of the size that progress_next gave
 * last, and counts as done when it ends. The line shows the outermost's name and time left, and the rate of the
 * outermost that has a unit. */
void progress_begin(const char *what, const char *unit, double total);
void progress_next(double size); /* of the part that begins next, in the units of the one that is on */
void progress_at(double done);   /* cheap: redraws at most ten times a second */
void progress_clear(void);       /* before something is printed on stdout; the line comes back by itself */
void progress_end(void);         /* the outermost clears the line */

/* Wall clock in seconds, for closing lines and benchmarks only. */
double progress_seconds(void);
