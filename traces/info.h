/* `kvlag info FILE [--check] [--json]`: what a trace, lifetimes or blocks file holds. */
#pragma once

/* argv without the program's and the command's name. Prints to stdout. Returns 0 or an err code with its message. */
int cmd_info(int argc, char **argv);
