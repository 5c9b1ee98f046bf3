/* Errors are values: a function that can fail returns 0 or a code, and leaves one message behind.
 *
 * The message says what is wrong, where (file, dataset, layer, head, step) and, where possible, what to do.
 * It is kept per thread; pool_run() carries a worker's message to its caller. Only main() prints it. */
#pragma once

enum {
    ERR_NONE = 0,
    ERR_DATA = 1, /* bad data or failed work: exit code 1 */
    ERR_USAGE = 2 /* the command was wrong: exit code 2 */
};

#define ERR_MESSAGE_MAX 1024

/* Return the code of `call` to our caller unless it is 0. */
#define TRY(call)                        \
    do {                                 \
        int try_code_ = (call);          \
        if (try_code_) return try_code_; \
    } while (0)

/* Set this thread's message (truncated to ERR_MESSAGE_MAX) and return `code`. Control bytes become '?', so that a
 * message stays one line whatever a file contains. */
int err_set(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Put "context: " in front of this thread's message and return `code`. */
int err_prefix(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* This thread's message; "" if none was set. Valid until the next err_ call of this thread. */
const char *err_message(void);
