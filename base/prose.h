/* Text for people: filled lines, and commands broken where a shell lets them go on. Widths count bytes: help is ASCII.
 */
#pragma once

enum { PROSE_WIDTH = 100 };

/* Fill `words` to PROSE_WIDTH columns, every line but the first indented; '\n' ends a line. The cursor stands at
 * `indent`; ends in a newline. */
void prose_print(const char *words, int indent);

/* A line "WORDS: about" (about may be NULL), the words bold where stdout is a terminal with colours. */
void prose_heading(const char *words, const char *about);

/* How many bytes of `command` go on its next line of at most `most` columns, or all that is left; a blank follows where
 * it goes on, and the line then needs " \" at its end. */
int prose_command_line(const char *command, int most);

/* A whole command, indented. */
void prose_print_command(const char *command, int indent);
