/* kvlag analyze FILE.csv... -o DIR: figures and a short table from results (DESIGN sections 8 and 10). */
#pragma once

/* Arguments without the program's and the command's name. Returns the exit code; the message of a failure is left in
 * err_. The table and the list of files written go to stdout. */
int cmd_analyze(int argc, char **argv);
