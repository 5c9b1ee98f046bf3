/* The subcommands of this folder. */
#pragma once

/* kvlag trace MODEL TEXT... -o FILE.h5 [options]. argv holds neither program nor command name. Returns the exit code
 * (0 fine, 1 bad data or failed work, 2 usage) with the message left in err_message(). */
int cmd_trace(int argc, char **argv);

/* kvlag verify MODEL TRACE -o TRUTH.csv (RESULTS.csv | --from-lifetimes FILE.h5 | -p SPEC...) [options]; the same
 * convention. */
int cmd_verify(int argc, char **argv);
