/* The commands of sim/. A cmd_ function takes the arguments after the command's name, returns the exit code (0, or the
 * ERR_ code with its err_ message set) and prints results, never errors. */
#pragma once

int cmd_sim(int argc, char **argv);
int cmd_merge(int argc, char **argv);
