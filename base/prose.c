#include "base/prose.h"
#include "base/terminal.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

void prose_print(const char *words, int indent) {
    int column = indent;
    for (const char *c = words; *c;) {
        int n = (int)strcspn(c, " \n");
        if (column > indent && column + 1 + n > PROSE_WIDTH) column = printf("\n%*s", indent, "") - 1;
        column += printf("%s%.*s", column > indent ? " " : "", n, c);
        c += n;
        if (*c == '\n') column = printf("\n%*s", indent, "") - 1;
        if (*c) c++;
    }
    printf("\n");
}

void prose_heading(const char *words, const char *about) {
    bool colours = terminal_colours(stdout);
    printf("%s%s:%s%s%s\n", colours ? "\033[1m" : "", words, colours ? "\033[m" : "", about ? " " : "",
           about ? about : "");
}

int prose_command_line(const char *command, int most) {
    int n = (int)strlen(command), at_option = 0, at_word = 0;
    bool quoted = false;
    if (n <= most) return n;
    for (int i = 0; i <= most - 2; i++) {
        if (command[i] == '\'') quoted = !quoted;
        if (command[i] != ' ' || quoted) continue;
        at_word = i;
        if (command[i + 1] == '-') at_option = i;
    }
    return at_option ? at_option : at_word ? at_word : n;
}

void prose_print_command(const char *command, int indent) {
    int n = prose_command_line(command, PROSE_WIDTH - indent);
    printf("%*s%.*s", indent, "", n, command);
    for (const char *rest = command + n; *rest; rest += n) {
        rest++;
        n = prose_command_line(rest, PROSE_WIDTH - indent - 4);
        printf(" \\\n%*s%.*s", indent + 4, "", n, rest);
    }
    printf("\n");
}
