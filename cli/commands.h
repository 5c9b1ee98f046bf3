/* The only list of commands: dispatch, help, man pages, completion and their tests iterate it. */
#pragma once

#include <stdbool.h>

/* What a command takes besides options, for completion. */
typedef enum command_operand {
    OPERAND_FILE,
    OPERAND_POLICY,  /* a policy's or wrapper's name */
    OPERAND_COMMAND, /* a command's name */
    OPERAND_TOPIC,   /* the same, or a topic's */
    OPERAND_SECTION, /* what its --help lists as sections, each with options of its own */
    OPERAND_SHELL,   /* bash, zsh or fish */
} command_operand;

enum { COMMAND_EXAMPLES = 6 };

typedef struct command {
    const char *name;  /* NULL ends the list */
    const char *usage; /* what follows the name */
    const char *help;  /* one line, no capital, no full stop */
    const char *about; /* a paragraph: what it is for, what comes out */
    /* Takes what follows the command's name; 0, OPT_HELPED or an err code. */
    int (*run)(int argc, char **argv);
    command_operand operand;
    bool first_round; /* its first example belongs to the first round that the overview shows */
    /* Examples teach and are run by a test, those of all commands in one folder in the order of the list: they may use
     * files that earlier ones wrote. command == NULL ends them. */
    struct {
        const char *what, *command;
    } example[COMMAND_EXAMPLES + 1];
} command;

extern const command commands[];

/* NULL and an err_ message with the nearest name where there is none. */
const command *command_find(const char *name);

int cmd_help(int argc, char **argv);
int cmd_man(int argc, char **argv);
int cmd_completion(int argc, char **argv);

/* Run a command; where it is asked for --help, the whole page appears. */
int command_run(const command *c, int argc, char **argv);
