/* What `kvlag info` says about a file, gathered once as JSON and printed from there in either form. */
#pragma once

#include "traces/trace.h"

#include <cjson/cJSON.h>

/* How much is verified beside: nothing, the whole content, or that with every row of a long trace (traces/check.h). */
typedef enum facts_check { FACTS_ONLY, FACTS_CHECK, FACTS_CHECK_ALL } facts_check;

/* Read the file at `path`, whichever of our formats it has, and verify its content as `check` says.
 *
 * All formats:  file, format, version, bytes, datasets [{path, shape, type, raw, stored, ratio, checksum}] (ratio and
 *               checksum null where they do not apply)
 * Traces:       creator, command, content_hash, hash_of ("content" or "file"), model {..}, sequences [{name, tokens,
 *               prompt, source, text, attention [..], logits [..], gradients [..], entries, bytes_per_entry {dense,
 *               factored}, lost_to_f16 {mean, max}, check {sum_error, difference, lse_error, verified [..]}}]
 * Lifetimes:    trace, content_hash, configs [{spec, ..., sequences [{name, shape, budget, hold, sinks}]}]
 * Blocks:       rows
 *
 * *out is the caller's (cJSON_Delete). Refused: files that are not ours, naming the path. */
int facts_of_file(const char *path, facts_check check, cJSON **out);
