/* kvlag: trace-driven simulation of KV-cache eviction. This file runs the command that cli/commands.c lists, and is the
 * only place that prints an error and chooses the exit code. */
#include "base/err.h"
#include "base/options.h"
#include "base/outfile.h"
#include "base/terminal.h"
#include "cli/commands.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static int run(int argc, char **argv) {
    if (argc < 2) return err_set(ERR_USAGE, "no command (see kvlag help)");
    if (strcmp(argv[1], "--version") == 0) {
        puts("kvlag " KVLAG_VERSION);
        return 0;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0) return cmd_help(0, NULL);
    const command *c = command_find(argv[1]);
    return c ? command_run(c, argc - 2, argv + 2) : ERR_USAGE;
}

static void interrupted(int signal_number) {
    outfile_abort_all();
    _exit(128 + signal_number);
}

/* A page of a mapped file that is no longer there: someone cut the file short. */
static void cut_short(int signal_number) {
    static const char said[] = "kvlag: a file was cut short while it was read (start again once it is whole)\n";
    (void)signal_number;
    outfile_abort_all();
    ssize_t written = write(STDERR_FILENO, said, sizeof said - 1);
    (void)written; /* there is nowhere else to say it */
    _exit(ERR_DATA);
}

static void clean_up_on(int signal_number) {
    if (signal(signal_number, SIG_IGN) != SIG_IGN) signal(signal_number, interrupted); /* nohup stays in force */
}

/* A closed standard stream would lend its number to the next file that is opened, and a message would land in it. */
static void occupy_standard_streams(void) {
    for (int fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDONLY) < 0) _exit(ERR_DATA);
}

static int finish_output(void) {
    if (fflush(stdout) == 0 && !ferror(stdout)) return 0;
    return err_set(ERR_DATA, "standard output: %s", errno ? strerror(errno) : "write failed");
}

static void print_error(void) {
    bool colours = terminal_colours(stderr);
    fprintf(stderr, "%skvlag:%s %s\n", colours ? "\033[1;31m" : "", colours ? "\033[m" : "", err_message());
}

int main(int argc, char **argv) {
    occupy_standard_streams();
    clean_up_on(SIGINT);
    clean_up_on(SIGTERM);
    clean_up_on(SIGHUP);
    signal(SIGBUS, cut_short);
    signal(SIGXFSZ, SIG_IGN);     /* a full quota is a failed write, not the end of the process */
    signal(SIGPIPE, interrupted); /* `| head` is no error; the gnuplot pipe guards itself */
    int code = run(argc, argv);
    if (code == OPT_HELPED) code = 0;
    if (!code) code = finish_output();
    if (code) print_error();
    return code;
}
