/* Policies from shared objects, through the contract of policy.h: `--plugin FILE.so` of sim, verify and policies
 * (docs/adding-a-policy.md). They are added to the registry, which stays the only list; everything that holds of a
 * built-in policy holds of them, and their scores are checked to be finite besides. Code of a plugin runs as kvlag's
 * own: what it does to memory or files nobody checks. */
#pragma once

#include "base/options.h"
#include "base/text.h"

/* A row of a command's table; `list` is an opt_list. */
#define POLICY_PLUGIN_OPTION(list)                                             \
    {                                                                          \
        "plugin", 0, OPT_FILES, true, &(list), "FILE.so",                      \
            "policies of your own (docs/adding-a-policy.md); may repeat", 0, 0 \
    }

/* Load the files and add their policies, in order; they stay for the life of the process. A command calls it once,
 * before it looks at a spec. ERR_DATA names the file: it cannot be loaded, exports no kvlag_policies, holds a policy of
 * another version or one that breaks the contract, or a name is taken. */
int policy_plugins_load(const opt_list *files);

/* "# plugin: lrfu.so XXH3 0123456789abcdef", a line for each file with the hash of its bytes: what stands above results
 * that depend on it. Returns 0 or ERR_DATA. */
int policy_plugins_note(const opt_list *files, text *out);
