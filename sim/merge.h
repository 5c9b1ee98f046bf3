/* Shards of one call, put together into what one process would have written, byte for byte. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

/* n results files of `kvlag sim --shard`, in any order, with their blocks files beside them, into csv_path and its
 * blocks file. ERR_DATA by name: a file that is no shard, shards of different work (command, traces, calibration,
 * version, number of shards), one given twice, some missing. */
int merge_shards(const char *const *paths, size_t n, const char *csv_path, bool force);
