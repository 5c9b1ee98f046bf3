#include "sim/part.h"
#include "base/err.h"
#include "base/mem.h"
#include "sim/merge.h"
#include "sim/results.h"

#include <unistd.h>

char *part_path(const char *csv_path, shard part) {
    text t = {0};
    return text_add(&t, "%s.%zu-of-%zu.csv", csv_path, part.k, part.n) ? NULL : t.data;
}

char *part_journal_path(const char *csv_path) {
    text t = {0};
    return text_add(&t, "%s.partial", csv_path) ? NULL : t.data;
}

static int join(char **path, const char *csv_path, size_t n, bool force) {
    for (size_t i = 0; i < n; i++)
        if (!(path[i] = part_path(csv_path, (shard){i + 1, n}))) return ERR_DATA;
    return merge_shards((const char *const *)path, n, csv_path, force);
}

int part_join(const char *csv_path, size_t n, bool force) {
    char **path = mem_new(n, sizeof *path, "shards");
    if (!path) return ERR_DATA;
    int code = join(path, csv_path, n, force);
    for (size_t i = 0; i < n; i++) mem_free(path[i]);
    mem_free(path);
    return code;
}

void part_remove(const char *csv_path, shard part, bool journal) {
    char *csv = part_path(csv_path, part);
    char *other[] = {csv ? blocks_path(csv) : NULL, csv && journal ? part_journal_path(csv) : NULL};
    if (csv) unlink(csv);
    for (int i = 0; i < 2; i++) {
        if (other[i]) unlink(other[i]);
        mem_free(other[i]);
    }
    mem_free(csv);
}
