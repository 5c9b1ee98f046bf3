#include "base/err.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char message[ERR_MESSAGE_MAX];

static void keep_one_line(void) {
    for (char *c = message; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f) *c = '?';
}

int err_set(int code, const char *format, ...) {
    va_list args;
    char text[ERR_MESSAGE_MAX]; /* an argument may be the old message itself */
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    memcpy(message, text, sizeof text);
    keep_one_line();
    return code;
}

int err_prefix(int code, const char *format, ...) {
    va_list args;
    char text[ERR_MESSAGE_MAX];
    va_start(args, format);
    int n = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (n < 0 || n >= (int)sizeof text) n = (int)sizeof text - 1;
    snprintf(text + n, sizeof text - (size_t)n, ": %.*s", ERR_MESSAGE_MAX - 3, message);
    memcpy(message, text, sizeof text);
    keep_one_line();
    return code;
}

const char *err_message(void) {
    return message;
}
