/* What the model says to each text, before anything is traced. */
#pragma once

#include "tracer/generate.h"
#include "tracer/resume.h"
#include "tracer/texts.h"

#include <stdbool.h>

typedef struct answers {
    const text_ask *ask;
    const generate_ask *generate;
    const model *model;
    const backend *backend;
    backend_state *state;
    const tokenizer *tokenizer;
    resume *journal; /* answers that it has are taken from it, the others are added; or NULL */
    bool show;       /* print them to stdout, a line for each */
} answers;

/* Add an answer to each text, and say on stderr how many tokens that were and how many answers ended by themselves.
 * Texts whose answer leaves no step to count are dropped and named; ERR_DATA where none is left. */
int answers_add(const answers *a, text_list *texts);
