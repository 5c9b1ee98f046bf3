/* What `kvlag help TOPIC` explains, and kvlag.1 has as sections. */
#pragma once

typedef struct topic {
    const char *name;  /* NULL ends the list */
    const char *title; /* of the section */
    const char *help;  /* one line */
    /* Lines of at most 78 columns. Paragraphs are parted by empty lines; those that begin with two blanks are kept as
     * they are (72 columns, since man pages indent them), all others may be filled anew. */
    const char *body;
} topic;

extern const topic topics[];
