#include "base/terminal.h"

#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

bool terminal_colours(FILE *f) {
    const char *no = getenv("NO_COLOR"), *kind = getenv("TERM");
    return isatty(fileno(f)) && !(no && *no) && kind && *kind && strcmp(kind, "dumb") != 0;
}

int terminal_width(FILE *f) {
    struct winsize size;
    return ioctl(fileno(f), TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}
