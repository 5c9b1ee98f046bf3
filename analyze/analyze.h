/* kvlag analyze and kvlag compare: what results say (DESIGN sections 8 and 10). */
#pragma once

/* Arguments without the program's and the command's name. Returns the exit code; the message of a failure is left in
 * err_. The table and the list of files written go to stdout. */
int cmd_analyze(int argc, char **argv);

/* What changed between two results files. The same. */
int cmd_compare(int argc, char **argv);
