/* `kvlag info FILE [--check] [--json]`: what a trace, lifetimes or blocks file holds; `kvlag info --compare A.h5 B.h5`:
 * how far two traces lie apart. */
#pragma once

/* argv without the program's and the command's name. Prints to stdout. Returns 0 or an err code with its message. */
int cmd_info(int argc, char **argv);
