#include "base/prose.h"

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

int prose_command_line(const char *command, int most) {
    int n = (int)strlen(command), fits = 0;
    if (n <= most) return n;
    for (int i = 1; i <= most - 2; i++)
        if (command[i] == ' ' && command[i + 1] == '-') fits = i;
    return fits ? fits : n;
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
