/* Shards whose names and joining are taken care of: what a launcher (sim/mpi/) needs to run one `kvlag sim` command on
 * many processes. The parts of FILE.csv are FILE.csv.K-of-N.csv beside it, with journals under --resume. */
#pragma once

#include "sim/shard.h"

/* "FILE.csv.2-of-3.csv" and "FILE.csv.partial". Owned by the caller; NULL on failure. */
char *part_path(const char *csv_path, shard part);
char *part_journal_path(const char *csv_path);

/* The arguments of `kvlag sim`, one part of the work. *out (owned by the caller, NULL where none is given) and *force
 * are what the command says. Under --resume the part's journal stays until part_remove. */
int cmd_sim_part(int argc, char **argv, shard part, char **out, bool *force);

/* Merge the n parts into csv_path. */
int part_join(const char *csv_path, size_t n, bool force);

/* Remove a part's files, its journal too if `journal`. Silent where they are not there. */
void part_remove(const char *csv_path, shard part, bool journal);
