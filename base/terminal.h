/* What the terminal that a stream goes to can do. */
#pragma once

#include <stdbool.h>
#include <stdio.h>

/* Is it a terminal whose user wants colours? Not where TERM is dumb or unset, or NO_COLOR (no-color.org) is set and not
 * empty. */
bool terminal_colours(FILE *f);

/* Its columns; 80 where they are not known. */
int terminal_width(FILE *f);
