/* The colours of a share: from nearly white for 0 to blue for 1, light enough for black letters. */
#pragma once

enum { SHADES = 10 };

/* "#rrggbb" of share i / SHADES. */
const char *shade_colour(int i);

/* The nearest i of a share from 0 to 1. */
int shade_of(double share);
