/* What the report says: from results, decisions and figures to its parts. */
#pragma once

#include "analyze/advice.h"
#include "analyze/figures.h"
#include "analyze/provenance.h"
#include "analyze/report.h"

/* A figure as it was drawn. */
typedef struct report_picture {
    const figure_kind *kind;
    const figure *figure;
    text svg;  /* empty where it could not be drawn; taken over by the report */
    text link; /* a file beside the report that shows it; empty if there is none */
} report_picture;

typedef struct report_input {
    const figure_input *in;
    const advice_list *advice; /* NULL where there is nothing to decide: truths without a metric */
    const provenance *files;
    report_picture *picture;
    size_t n_pictures;
    const char *command; /* that makes the report */
} report_input;

/* Release with report_free either way. */
int report_make(const report_input *in, report *out);

/* summary.json (docs/report.md). */
int summary_write(const report_input *in, text *out);
