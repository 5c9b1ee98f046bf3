#include "sim/shard.h"
#include "base/err.h"
#include "base/mem.h"

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SHARDS_MAX = 1000000, ROWS_MAX = 100000000 };

static const char part_line[] = "# shard: ", work_line[] = "# shard work: ", rows_line[] = "# shard rows: ";

/* Digits at *s as a number; steps over them. */
static bool take_number(const char **s, size_t *out) {
    if (**s < '0' || **s > '9') return false;
    char *end;
    errno = 0;
    unsigned long long x = strtoull(*s, &end, 10);
    if (errno || x > SIZE_MAX) return false;
    *out = (size_t)x;
    *s = end;
    return true;
}

static bool take_shard(const char *s, shard *out) {
    if (!take_number(&s, &out->k) || *s++ != '/' || !take_number(&s, &out->n) || *s) return false;
    return out->k >= 1 && out->k <= out->n && out->n <= SHARDS_MAX;
}

int shard_parse(const char *spec, shard *out) {
    if (take_shard(spec, out)) return 0;
    return err_set(ERR_USAGE, "--shard: '%s' is not k/n with 1 <= k <= n <= %d", spec, SHARDS_MAX);
}

bool shard_owns(shard s, size_t unit) {
    return unit % s.n == s.k - 1;
}

void shard_note_free(shard_note *note) {
    mem_free(note->work);
    mem_free(note->row);
    *note = (shard_note){0};
}

int shard_note_add_row(shard_note *note, size_t row) {
    TRY(mem_grow((void **)&note->row, &note->capacity, note->n_rows + 1, sizeof *note->row, "rows"));
    note->row[note->n_rows++] = row;
    return 0;
}

int shard_note_write(const shard_note *note, text *csv) {
    TRY(text_add(csv, "%s%zu/%zu\n%s%s\n%s", part_line, note->part.k, note->part.n, work_line, note->work, rows_line));
    for (size_t i = 0, last; i < note->n_rows; i = last + 1) {
        for (last = i; last + 1 < note->n_rows && note->row[last + 1] == note->row[last] + 1;) last++;
        TRY(text_add(csv, "%s%zu", i ? "," : "", note->row[i]));
        if (last > i) TRY(text_add(csv, "-%zu", note->row[last]));
    }
    return text_add(csv, "\n");
}

static int read_work(shard_note *note, const char *work) {
    const char *s = work;
    if (!take_number(&s, &note->total) || strncmp(s, " rows,", 6) != 0 || note->total > ROWS_MAX)
        return err_set(ERR_DATA, "'%s%s' is damaged", work_line, work);
    mem_free(note->work);
    note->work = mem_string(work);
    return note->work ? 0 : ERR_DATA;
}

/* "4" or "7-9" at *s; steps over it. */
static bool take_range(const char **s, size_t *from, size_t *to) {
    if (!take_number(s, from)) return false;
    *to = *from;
    if (**s != '-') return true;
    ++*s;
    return take_number(s, to) && *to > *from;
}

static int read_rows(shard_note *note, const char *rows) {
    for (const char *s = rows; *s;) {
        size_t from, to;
        bool good = take_range(&s, &from, &to) && to < note->total && (!*s || (*s == ',' && s[1]));
        if (!good || (note->n_rows && from <= note->row[note->n_rows - 1]))
            return err_set(ERR_DATA, "'%s%s' is damaged", rows_line, rows);
        for (size_t row = from; row <= to; row++) TRY(shard_note_add_row(note, row));
        s += *s == ',';
    }
    return 0;
}

/* What follows `start` in the line, or NULL. */
static const char *behind(const char *line, const char *start) {
    size_t n = strlen(start);
    return strncmp(line, start, n) == 0 ? line + n : NULL;
}

int shard_note_read(shard_note *note, const char *line, bool *mine) {
    const char *s;
    *mine = true;
    if ((s = behind(line, part_line)))
        return take_shard(s, &note->part) ? 0 : err_set(ERR_DATA, "'%s' is damaged", line);
    if ((s = behind(line, work_line))) return read_work(note, s);
    if ((s = behind(line, rows_line))) return read_rows(note, s);
    *mine = false;
    return 0;
}
