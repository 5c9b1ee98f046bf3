#include "analyze/shade.h"

/* Lightness falls from 98 to 58, in steps that look equal (CIELAB), so that order survives any colour vision and grey
 * paper; the hues are those of ColorBrewer's YlGnBu. Black on the darkest has a contrast of 6 to 1. */
const char *shade_colour(int i) {
    static const char *const colours[SHADES + 1] = {"#fffbe6", "#eff5d0", "#dceec0", "#bfe4c0", "#a2d9c2", "#84cfc4",
                                                    "#71c4c9", "#5fbacf", "#4dafd3", "#44a0d1", "#3a92cf"};
    return colours[i];
}

int shade_of(double share) {
    return (int)(share * SHADES + 0.5);
}
