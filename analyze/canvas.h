/* What figures share: names, axes with their ticks, labels that keep apart, the look. */
#pragma once

#include "analyze/figures.h"

#include <stdbool.h>

/* Widths and heights in inches; fonts in points. A column of a two-column paper is 3.3 inches wide. */
#define CANVAS_WIDTH 3.3
#define CANVAS_PAGE_WIDTH 7.0 /* both columns */
#define CANVAS_LABEL_FONT 6.0
enum { CANVAS_COLOURS = 9 };

/* Append a figure named after the n parts ("lag", "rmm(signal=uniform)", "kl_est" make lag_rmm_signal_uniform_kl_est),
 * made different from the names in the list, with the head of its script: terminal, colours, grid. *out belongs to the
 * list and is valid until the next one is appended. */
int canvas_new(figure_list *list, const char *const *parts, size_t n, double height, figure **out);
int canvas_new_sized(figure_list *list, const char *const *parts, size_t n, double width, double height, figure **out);

/* Begin the next block of the data file: "# comment", then the columns' names. *index numbers it for gnuplot. */
int canvas_block(figure *f, const char *comment, const char *columns, size_t *index);

/* Append `word`, cut to at most `most` characters (UTF-8), the last of them an ellipsis; quoted for gnuplot. */
int canvas_cut(text *t, const char *word, size_t most);
int canvas_quote(text *t, const char *word, size_t most);

/* Cut so that both ends stay: "mix(evid…ct,memory=sum)". */
int canvas_cut_middle(text *t, const char *word, size_t most);

/* Inches that n characters of the label font take, at most. */
double canvas_label_width(size_t n);

/* "oracle(mass) on licence", or "..., mean of 3 sequences" where results average. */
int canvas_quote_title(text *t, const char *subject, const results *r);

/* The 90 % interval to draw around a configuration's metric: from resamples, which hold the calibration's error, too;
 * else the results' own, which is the calibration's alone; NaN where there is neither. *resampled becomes true where it
 * is from resamples. Returns 0 or ERR_DATA. */
int canvas_interval(const figure_input *in, const result *c, size_t metric, estimate *out, bool *resampled);

/* Append an interval as two columns of a data file, with a blank before each. */
int canvas_add_interval(figure *f, estimate e);

typedef struct axis {
    double lo, hi;
    bool log;
    double linear_to; /* > 0: places are asinh(value / linear_to), linear around 0 and logarithmic away from it */
} axis;

/* linear_to of axes that must show values of both signs: what a loss change (nats/token) must be to mean something. */
#define AXIS_LINEAR_TO 0.003

/* The axis that shows n values (NaN ignored). Logarithmic where all are positive, zeros apart, and they span a decade
 * or more; *left_out then counts the zeros, which it cannot show. Linear around 0 where some are negative and some ten
 * times AXIS_LINEAR_TO away from it. A linear one begins at 0 where that costs little. */
axis axis_over(const double *values, size_t n, size_t *left_out);

/* Where on the axis a value lies: 0 at lo, 1 at hi. */
double axis_place(axis a, double value);
double axis_value(axis a, double place); /* the inverse */

/* Make room for values from lo to hi beyond the axis, at either end at most `most` of its length. Unchanged where lo
 * is not <= hi. */
axis axis_widen(axis a, double lo, double hi, double most);

/* "set yrange ...", the scale, and ticks, with their numbers or without; `which` is 'x' or 'y'. */
int axis_add(text *t, char which, axis a, bool numbers);

/* Write what the y axis shows along the left edge, `middle` of the height up. Not as gnuplot's ylabel: each terminal
 * puts that elsewhere. A text terminal has no room for it. */
int axis_add_y_label(text *t, const char *words, double middle);

/* The x axis of lags up to the last one: each where lag_position puts it. `most` numbers have room; 0: ticks alone. */
int axis_add_lags(text *t, double last_lag, int most);

/* The step between about n round ticks (1, 2 or 5 times a power of ten). */
double axis_step(double span, double n);

/* Move n places so that neighbours are at least `gap` apart, each as little as possible, inside 0..1 where they fit.
 * Least squares: overlapping labels form a block around their mean (pool adjacent violators). 0 or ERR_DATA. */
int canvas_spread(double *places, size_t n, double gap);

/* Write budget `budget` of the results beside the panel's right edge, `at` of its height up, in the budget's colour. */
int canvas_add_budget(text *t, const results *r, size_t budget, double at);

/* Colours that remain apart for colour-blind readers: Okabe and Ito, "Color Universal Design" (2008), without the
 * yellow, which is lost on white, then two of Paul Tol's muted scheme. Repeats after CANVAS_COLOURS. */
const char *canvas_colour(size_t i);
