/* Which files a model is made of, beside the one that is named. */
#pragma once

/* ERR_USAGE where `out` is there and is one of them: a file of the folder `path` that weights, a tokenizer or a template
 * may stand in, or a shard of the split file `path`. An output must not take its place, --force or not. */
int model_check_output(const char *path, const char *out);
