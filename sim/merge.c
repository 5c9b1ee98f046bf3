#include "sim/merge.h"
#include "base/csv.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/outfile.h"
#include "base/progress.h"
#include "sim/output.h"
#include "sim/part.h"

#include <stdlib.h>
#include <string.h>

static const char floored_line[] = "# floored: ";

/* A shard's CSV and blocks. */
typedef struct piece {
    const char *path;
    char *blocks_path;
    shard_note note;
    char *above, *below; /* comment lines before and behind "# floored", which all shards share */
    long long floored;
    text header; /* the line of column names */
    char **line; /* [note.n_rows] data rows with their ends, owned */
    size_t n_lines, capacity;
    blocks_data blocks;
} piece;

typedef struct merger {
    piece *piece;
    size_t n;
    size_t *taken; /* [total] which piece a row is in, from 1; 0: none */
    size_t *at;    /* [total] which of that piece's rows it is */
} merger;

/* ---- reading a shard -------------------------------------------------------------------------------------------- */

/* One comment line: ours, "# floored", or one that all shards share. */
static int read_comment(piece *p, const char *line, text *above, text *below, bool *floored) {
    bool mine;
    TRY(shard_note_read(&p->note, line, &mine));
    if (mine) return 0;
    if (strncmp(line, floored_line, sizeof floored_line - 1) == 0) {
        p->floored = strtoll(line + sizeof floored_line - 1, NULL, 10);
        *floored = true;
        return 0;
    }
    return text_add(*floored ? below : above, "%s\n", line);
}

static int read_comments(piece *p, const csv *c) {
    text above = {0}, below = {0};
    bool floored = false;
    int code = text_add(&above, "%s", "");
    if (!code) code = text_add(&below, "%s", "");
    for (const char *s = c->text; *s == '#' && !code;) {
        size_t n = strcspn(s, "\n");
        char *line = mem_string_n(s, n);
        code = line ? read_comment(p, line, &above, &below, &floored) : ERR_DATA;
        mem_free(line);
        s += n + (s[n] == '\n');
    }
    p->above = above.data;
    p->below = below.data;
    if (!code && !(p->note.part.n && p->note.work && floored))
        code = err_set(ERR_DATA, "is no shard (kvlag sim --shard k/n writes them)");
    return code;
}

/* A record as it stood in the file: fields are quoted only where they must be, as the writer does. */
static int compose_line(const char *const *field, size_t n, text *out) {
    for (size_t i = 0; i < n; i++) {
        if (i) TRY(text_add(out, ","));
        TRY(text_add_csv(out, field[i]));
    }
    return text_add(out, "\n");
}

static int read_lines(piece *p, csv *c) {
    TRY(compose_line(c->column, c->n_columns, &p->header));
    for (bool more;;) {
        text line = {0};
        TRY(csv_next(c, &more));
        if (!more) break;
        TRY(mem_grow((void **)&p->line, &p->capacity, p->n_lines + 1, sizeof *p->line, "rows"));
        int code = compose_line(c->field, c->n_columns, &line);
        p->line[p->n_lines++] = line.data;
        TRY(code);
    }
    if (p->n_lines == p->note.n_rows) return 0;
    return err_set(ERR_DATA, "%s: holds %zu rows and says that it has %zu", p->path, p->n_lines, p->note.n_rows);
}

static int read_blocks(piece *p) {
    if (!(p->blocks_path = blocks_path(p->path))) return ERR_DATA;
    TRY(blocks_read(p->blocks_path, &p->blocks));
    if (p->blocks.rows == p->note.n_rows) return 0;
    return err_set(ERR_DATA, "%s: holds %zu rows, %s %zu", p->blocks_path, p->blocks.rows, p->path, p->note.n_rows);
}

static int read_piece(piece *p) {
    csv c;
    int code = csv_open(p->path, "results", &c);
    if (!code && (code = read_comments(p, &c))) err_prefix(code, "%s", p->path);
    if (!code) code = read_lines(p, &c);
    csv_close(&c);
    return code ? code : read_blocks(p);
}

static void free_piece(piece *p) {
    for (size_t i = 0; i < p->n_lines; i++) mem_free(p->line[i]);
    mem_free(p->line);
    mem_free(p->above);
    mem_free(p->below);
    mem_free(p->blocks_path);
    text_free(&p->header);
    shard_note_free(&p->note);
    blocks_free(&p->blocks);
}

/* ---- do they belong together? ----------------------------------------------------------------------------------- */

/* Say the first line in which two texts differ. */
static int differ(const piece *p, const piece *first, const char *a, const char *b) {
    while (true) {
        int na = (int)strcspn(a, "\n"), nb = (int)strcspn(b, "\n");
        if (na != nb || strncmp(a, b, (size_t)na) != 0 || !*a)
            return err_set(ERR_DATA, "%s does not belong to %s: '%.*s' there, '%.*s' here", p->path, first->path, nb, b,
                           na, a);
        a += na + 1;
        b += nb + 1;
    }
}

static int check_pair(const piece *p, const piece *first) {
    const blocks_data *a = &p->blocks, *b = &first->blocks;
    if (strcmp(p->above, first->above) != 0) return differ(p, first, p->above, first->above);
    if (strcmp(p->below, first->below) != 0) return differ(p, first, p->below, first->below);
    if (strcmp(p->header.data, first->header.data) != 0) return differ(p, first, p->header.data, first->header.data);
    if (p->note.part.n != first->note.part.n)
        return err_set(ERR_DATA, "%s does not belong to %s: shards of %zu there, of %zu here", p->path, first->path,
                       first->note.part.n, p->note.part.n);
    if (strcmp(p->note.work, first->note.work) != 0)
        return err_set(ERR_DATA,
                       "%s does not belong to %s: other calibration, lifetimes or version ('%s' there, '%s' here)",
                       p->path, first->path, first->note.work, p->note.work);
    if (a->n_layer == b->n_layer && a->n_head == b->n_head && a->n_fisher == b->n_fisher && !a->first == !b->first)
        return 0;
    return err_set(ERR_DATA, "%s does not belong to %s: other shapes", p->blocks_path, first->blocks_path);
}

/* "shards 3, 7 of 8 are missing" */
static int say_missing(const size_t *have, size_t n) {
    text t = {0};
    size_t missing = 0;
    int code = 0;
    for (size_t k = 0; k < n && !code; k++)
        if (!have[k] && ++missing <= 20) code = text_add(&t, "%s%zu", missing > 1 ? ", " : "", k + 1);
    if (!code)
        code = err_set(ERR_DATA, "shard%s %s%s of %zu %s missing", missing > 1 ? "s" : "", t.data,
                       missing > 20 ? ", ..." : "", n, missing > 1 ? "are" : "is");
    text_free(&t);
    return code;
}

static int check_complete(const merger *m) {
    size_t n = m->piece[0].note.part.n;
    size_t *have = mem_new(n, sizeof *have, "shards"); /* which piece, from 1 */
    if (!have) return ERR_DATA;
    int code = 0;
    for (size_t i = 0; i < m->n && !code; i++) {
        const piece *p = &m->piece[i];
        size_t *slot = &have[p->note.part.k - 1];
        if (*slot)
            code = err_set(ERR_DATA, "shard %zu/%zu is given twice: %s and %s", p->note.part.k, n,
                           m->piece[*slot - 1].path, p->path);
        *slot = i + 1;
    }
    if (!code && m->n < n) code = say_missing(have, n);
    mem_free(have);
    return code;
}

/* Every row is in one shard. */
static int place_rows(merger *m) {
    size_t total = m->piece[0].note.total;
    m->taken = mem_new(total, sizeof *m->taken, "rows");
    m->at = mem_new(total, sizeof *m->at, "rows");
    if (!m->taken || !m->at) return ERR_DATA;
    for (size_t i = 0; i < m->n; i++) {
        const piece *p = &m->piece[i];
        for (size_t k = 0; k < p->note.n_rows; k++) {
            size_t row = p->note.row[k];
            if (m->taken[row])
                return err_set(ERR_DATA, "row %zu is in %s and in %s", row, m->piece[m->taken[row] - 1].path, p->path);
            m->taken[row] = i + 1;
            m->at[row] = k;
        }
    }
    for (size_t row = 0; row < total; row++)
        if (!m->taken[row]) return err_set(ERR_DATA, "row %zu of %zu is in no shard", row, total);
    return 0;
}

/* ---- writing ---------------------------------------------------------------------------------------------------- */

static int compose(const merger *m, text *out) {
    const piece *first = &m->piece[0];
    long long floored = 0;
    for (size_t i = 0; i < m->n; i++) floored += m->piece[i].floored;
    TRY(text_add(out, "%s", first->above));
    TRY(output_floored(out, floored, false));
    TRY(text_add(out, "%s%s", first->below, first->header.data));
    for (size_t row = 0; row < first->note.total; row++)
        TRY(text_add(out, "%s", m->piece[m->taken[row] - 1].line[m->at[row]]));
    return 0;
}

static int write_blocks(const merger *m, const char *csv_path, bool force) {
    const blocks_data *b = &m->piece[0].blocks;
    size_t total = m->piece[0].note.total;
    blocks_writer *w;
    char *path = blocks_path(csv_path);
    if (!path) return ERR_DATA;
    int code = blocks_writer_new(path, force, total, b->n_layer, b->n_head, b->n_fisher, b->first != NULL, &w);
    mem_free(path);
    TRY(code);
    for (size_t row = 0; row < total && !code; row++) {
        blocks_row r = blocks_get_row(&m->piece[m->taken[row] - 1].blocks, m->at[row]);
        code = blocks_write_row(w, row, b->n_layer, b->n_head, &r);
    }
    if (!code) return blocks_writer_finish(w);
    blocks_writer_abort(w);
    return code;
}

static int write_merged(const merger *m, const char *csv_path, bool force, outfile *out) {
    text all = {0};
    int code = compose(m, &all);
    if (!code) code = outfile_write(out, all.data, all.n);
    text_free(&all);
    if (!code) code = write_blocks(m, csv_path, force);
    return code ? code : outfile_commit(out);
}

/* Nothing that is read may be written. */
static int begin(const merger *m, const char *csv_path, bool force, outfile *out) {
    const char **inputs = mem_new(2 * m->n, sizeof *inputs, "inputs");
    if (!inputs) return ERR_DATA;
    for (size_t i = 0; i < m->n; i++) {
        inputs[2 * i] = m->piece[i].path;
        inputs[2 * i + 1] = m->piece[i].blocks_path;
    }
    int code = outfile_begin(out, csv_path, force, inputs, (int)(2 * m->n));
    if (!code) code = output_try_blocks(csv_path, force, inputs, (int)(2 * m->n));
    mem_free(inputs);
    return code;
}

static int merge(merger *m, const char *const *paths, const char *csv_path, bool force) {
    outfile out = {0};
    for (size_t i = 0; i < m->n; i++) {
        m->piece[i].path = paths[i];
        TRY(read_piece(&m->piece[i]));
        if (i) TRY(check_pair(&m->piece[i], &m->piece[0]));
    }
    TRY(check_complete(m));
    TRY(place_rows(m));
    int code = begin(m, csv_path, force, &out);
    if (!code) code = write_merged(m, csv_path, force, &out);
    outfile_abort(&out);
    if (!code) say("%s: %zu rows from %zu shard%s", csv_path, m->piece[0].note.total, m->n, m->n == 1 ? "" : "s");
    return code;
}

int merge_shards(const char *const *paths, size_t n, const char *csv_path, bool force) {
    merger m = {.piece = mem_new(n, sizeof *m.piece, "shards"), .n = n};
    int code = m.piece ? merge(&m, paths, csv_path, force) : ERR_DATA;
    for (size_t i = 0; m.piece && i < n; i++) free_piece(&m.piece[i]);
    mem_free(m.piece);
    mem_free(m.taken);
    mem_free(m.at);
    return code;
}
