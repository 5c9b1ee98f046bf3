/* kvlag merge: shards of one sweep into the files that one process would have written. */
#include "base/err.h"
#include "base/options.h"
#include "base/progress.h"
#include "sim/merge.h"
#include "sim/sim.h"

int cmd_merge(int argc, char **argv) {
    opt_list shards = {0};
    const char *out = NULL;
    bool force = false, quiet = false;
    const opt table[] = {
        {"output", 'o', OPT_FILE, false, &out, "FILE.csv", "where results go (and FILE.blocks.h5 beside it)", 0, 0},
        {"force", 0, OPT_FLAG, false, &force, NULL, "replace existing output files", 0, 0},
        {"quiet", 'q', OPT_FLAG, false, &quiet, NULL, "say nothing but errors", 0, 0},
        {.name = NULL},
    };
    int code = opt_parse(table, argc, argv, &shards);
    if (!code) say_level(quiet ? SAY_QUIET : SAY_NORMAL);
    if (!code && !shards.n) code = err_set(ERR_USAGE, "merge: no SHARD.csv given (kvlag help merge)");
    if (!code && !out) code = err_set(ERR_USAGE, "merge: -o FILE.csv is missing");
    if (!code) code = merge_shards(shards.item, shards.n, out, force);
    opt_list_free(&shards);
    return code;
}
