/* The progress line, as a terminal gets it: a pseudo-terminal stands in for stderr. */
#include "base/progress.h"
#include "base/terminal.h"

#include <fcntl.h>
#include <poll.h>
#include <pty.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

static int leader, real_stderr;

static void begin(int columns) {
    struct winsize size = {.ws_row = 24, .ws_col = (unsigned short)columns};
    int follower;
    assert_int_equal(openpty(&leader, &follower, NULL, NULL, &size), 0);
    real_stderr = dup(STDERR_FILENO);
    dup2(follower, STDERR_FILENO);
    close(follower);
}

/* What was written since. The system hands it over when it finds the time, so a mark goes behind it and is waited for.
 */
static void seen(char out[1024]) {
    static const char mark = '\001';
    size_t n = 0;
    assert_int_equal(write(STDERR_FILENO, &mark, 1), 1);
    do {
        assert_int_equal(poll(&(struct pollfd){.fd = leader, .events = POLLIN}, 1, 10000), 1);
        ssize_t more = read(leader, out + n, 1023 - n);
        assert_true(more > 0);
        n += (size_t)more;
    } while (out[n - 1] != mark);
    out[n - 1] = 0;
}

static bool begins(const char *text, const char *with) {
    return strncmp(text, with, strlen(with)) == 0;
}

static void end(void) {
    dup2(real_stderr, STDERR_FILENO);
    close(real_stderr);
    close(leader);
}

static void wait_ms(long ms) {
    nanosleep(&(struct timespec){.tv_nsec = ms * 1000000}, NULL);
}

static void test_plain(void **state) {
    (void)state;
    char out[1024];
    begin(80);
    progress_begin("work", "rows", 200);
    wait_ms(350);
    progress_at(50);
    seen(out);
    assert_true(begins(out, "\r\033[Kwork  25 %  "));
    assert_non_null(strstr(out, " rows/s  0:"));
    assert_non_null(strstr(out, " left"));
    say("a line");
    seen(out);
    assert_string_equal(out, "\r\033[Ka line\r\n");
    progress_end();
    seen(out);
    assert_string_equal(out, "\r\033[K");
    end();
}

/* Half of the first part of two (1 : 3) is an eighth of all; then all of the first and a third of the second is half.
 */
static void test_parts(void **state) {
    (void)state;
    char out[1024];
    begin(80);
    progress_begin("all", NULL, 4);
    progress_next(1);
    progress_begin("part", "rows", 10);
    wait_ms(350);
    progress_at(5);
    seen(out);
    assert_true(begins(out, "\r\033[Kall  12 %  "));
    assert_non_null(strstr(out, " rows/s  0:"));
    progress_end();
    progress_next(3);
    progress_begin("part", NULL, 3);
    wait_ms(120);
    progress_at(1);
    seen(out);
    assert_true(begins(out, "\r\033[Kall  50 %  0:"));
    progress_end();
    wait_ms(120);
    progress_at(4);
    seen(out);
    assert_string_equal(out, "\r\033[Kall 100 %  0:00 left");
    progress_end();
    seen(out);
    assert_string_equal(out, "\r\033[K");
    end();
}

static void test_width(void **state) {
    (void)state;
    char out[1024];
    begin(12);
    assert_int_equal(terminal_width(stderr), 12);
    progress_begin("work", "rows", 1e9);
    wait_ms(350);
    progress_at(5e8);
    seen(out);
    assert_true(begins(out, "\r\033[Kwork  50 %"));
    assert_int_equal(strlen(out), strlen("\r\033[K") + 11);
    progress_end();
    end();
}

/* 1 % in more than .35 s leaves more than 34 s; a millionth leaves more than 97 hours. */
static void test_time(void **state) {
    (void)state;
    char out[1024];
    int hours, minutes, seconds, n = 0;
    begin(80);
    progress_begin("work", NULL, 1e6);
    wait_ms(350);
    progress_at(1);
    seen(out);
    assert_int_equal(sscanf(out, "\r\033[Kwork 0 %% %d:%2d:%2d left%n", &hours, &minutes, &seconds, &n), 3);
    assert_int_equal(n, (int)strlen(out));
    assert_true(hours >= 97 && hours < 9700 && minutes < 60 && seconds < 60);
    progress_end();
    end();
}

static void test_quiet(void **state) {
    (void)state;
    char out[1024];
    begin(80);
    say_level(SAY_QUIET);
    progress_begin("work", NULL, 2);
    wait_ms(350);
    progress_at(1);
    say("nothing");
    progress_end();
    seen(out);
    assert_string_equal(out, "");
    say_level(SAY_NORMAL);
    end();
}

static void test_colours(void **state) {
    (void)state;
    begin(80);
    unsetenv("NO_COLOR");
    setenv("TERM", "xterm", 1);
    assert_true(terminal_colours(stderr));
    setenv("NO_COLOR", "", 1);
    assert_true(terminal_colours(stderr));
    setenv("NO_COLOR", "0", 1);
    assert_false(terminal_colours(stderr));
    unsetenv("NO_COLOR");
    setenv("TERM", "dumb", 1);
    assert_false(terminal_colours(stderr));
    end();
    int null = open("/dev/null", O_WRONLY);
    FILE *f = fdopen(null, "w");
    setenv("TERM", "xterm", 1);
    assert_false(terminal_colours(f));
    assert_int_equal(terminal_width(f), 80);
    fclose(f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plain), cmocka_unit_test(test_parts), cmocka_unit_test(test_width),
        cmocka_unit_test(test_time),  cmocka_unit_test(test_quiet), cmocka_unit_test(test_colours),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
