/* kvlag: trace-driven simulation of KV-cache eviction. This file only picks the command, and is the only place that
 * prints an error and chooses the exit code. */
#include "analyze/analyze.h"
#include "base/err.h"
#include "base/options.h"
#include "base/outfile.h"
#include "sim/registry.h"
#include "sim/sim.h"
#include "tracer/tracer.h"
#include "traces/info.h"
#include "traces/make_trace.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

typedef struct command {
    const char *name, *usage, *help;
    int (*run)(int argc, char **argv);
    const char *example;
} command;

static int cmd_help(int argc, char **argv);

static const command commands[] = {
    {"trace", "MODEL TEXT... -o FILE.h5", "run a model once over texts and keep what replay needs", cmd_trace,
     "kvlag trace models/SmolLM2-135M-Instruct.Q4_1.gguf README.md -o out/t.h5 --tokens 512"},
    {"sim", "TRACE... -o FILE.csv", "replay eviction policies over traces and price them", cmd_sim,
     "kvlag sim out/t.h5 -o out/r.csv -p rmm -p h2o -b 10%,25% -L 0:64:x2"},
    {"verify", "MODEL TRACE -o TRUTH.csv", "rerun chosen configurations for real; calibrate the estimates", cmd_verify,
     "kvlag verify MODEL.gguf out/t.h5 -o out/truth.csv -p h2o -p rmm -b 64,128 --calibrate out/c.json"},
    {"analyze", "FILE.csv... -o DIR", "draw lag and budget curves, print the short table", cmd_analyze,
     "kvlag analyze out/r.csv -o out/fig --format png,svg"},
    {"merge", "SHARD.csv... -o FILE.csv", "put together what sim --shard k/n wrote on several machines", cmd_merge,
     "kvlag merge out/s1.csv out/s2.csv -o out/r.csv"},
    {"info", "FILE", "what a trace or lifetimes file holds; --check validates it, --compare A B compares two", cmd_info,
     "kvlag info out/t.h5 --check"},
    {"make-trace", "KIND -o FILE.h5", "write a trace that no model made: synthetic, of any size", cmd_make_trace,
     "kvlag make-trace random -o out/long.h5 --tokens 8192 --layers 2 --heads 8"},
    {"policies", "[NAME]", "the policies, their parameters and papers", cmd_policies, "kvlag policies rmm"},
    {"help", "[COMMAND]", "this page, or a command's options", cmd_help, NULL},
};
enum { N_COMMANDS = sizeof commands / sizeof *commands };

static const command *find(const char *name) {
    const char *names[N_COMMANDS];
    for (size_t i = 0; i < N_COMMANDS; i++) {
        if (strcmp(commands[i].name, name) == 0) return &commands[i];
        names[i] = commands[i].name;
    }
    const char *near = opt_nearest(name, names, N_COMMANDS);
    if (near) err_set(ERR_USAGE, "unknown command '%s' (did you mean %s?)", name, near);
    else err_set(ERR_USAGE, "unknown command '%s' (see kvlag help)", name);
    return NULL;
}

static void print_commands(void) {
    puts("kvlag " KVLAG_VERSION ": what would this KV cache have cost with another eviction policy, budget or lag?\n");
    for (size_t i = 0; i < N_COMMANDS; i++)
        printf("  kvlag %-10s %-26s %s\n", commands[i].name, commands[i].usage, commands[i].help);
    puts("\nA first round:\n");
    for (size_t i = 0; i < 3; i++) printf("  %s\n", commands[i].example);
    puts(
        "\nkvlag help COMMAND lists the options of a command. Exit codes: 0 fine, 1 bad data or failed work, 2 usage.");
}

static bool asks_help(const char *word) {
    return strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0;
}

static int cmd_help(int argc, char **argv) {
    if (argc == 0) {
        print_commands();
        return 0;
    }
    if (argc > 1) return err_set(ERR_USAGE, "help: at most one COMMAND, got %d", argc);
    if (asks_help(argv[0])) return cmd_help(0, NULL);
    const command *c = find(argv[0]);
    if (!c) return ERR_USAGE;
    printf("kvlag %s %s\n  %s\n\n", c->name, c->usage, c->help);
    if (c->run != cmd_help) c->run(1, (char *[]){"--help"});
    if (c->example) printf("\nExample:\n  %s\n", c->example);
    return 0;
}

static int run(int argc, char **argv) {
    if (argc < 2) return err_set(ERR_USAGE, "no command (see kvlag help)");
    if (strcmp(argv[1], "--version") == 0) {
        puts("kvlag " KVLAG_VERSION);
        return 0;
    }
    if (asks_help(argv[1])) return cmd_help(0, NULL);
    const command *c = find(argv[1]);
    if (!c) return ERR_USAGE;
    return c->run(argc - 2, argv + 2);
}

static void interrupted(int signal_number) {
    outfile_abort_all();
    _exit(128 + signal_number);
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

int main(int argc, char **argv) {
    occupy_standard_streams();
    clean_up_on(SIGINT);
    clean_up_on(SIGTERM);
    clean_up_on(SIGHUP);
    signal(SIGXFSZ, SIG_IGN);     /* a full quota is a failed write, not the end of the process */
    signal(SIGPIPE, interrupted); /* `| head` is no error; the gnuplot pipe guards itself */
    int code = run(argc, argv);
    if (code == OPT_HELPED) code = 0;
    if (!code) code = finish_output();
    if (code) fprintf(stderr, "kvlag: %s\n", err_message());
    return code;
}
