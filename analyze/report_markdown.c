#include "analyze/report.h"
#include "base/err.h"

#include <stdbool.h>
#include <string.h>

/* Characters that would format something stand behind a backslash; a line break becomes a blank. */
static int add_words(text *t, const char *words) {
    for (; *words; words++)
        if (strchr("\\`*_[]<>|#~&", *words)) TRY(text_add(t, "\\%c", *words));
        else TRY(text_add_bytes(t, *words == '\n' ? " " : words, 1));
    return 0;
}

static int add_line(text *t, const char *before, const char *words, const char *after) {
    TRY(text_add(t, "%s", before));
    TRY(add_words(t, words));
    return text_add(t, "%s\n", after);
}

static int add_rule(text *t, const report_part *p) {
    for (size_t i = 0; i < p->n_columns; i++) TRY(text_add(t, "|%s", p->align[i] == 'r' ? "---:" : "---"));
    return text_add(t, "|\n");
}

static int add_table(text *t, const report_part *p) {
    const char *cell = p->cells.data;
    if (p->words.n) TRY(add_line(t, "**", p->words.data, "**\n"));
    for (size_t i = 0; i < p->n_cells; i++, cell += strlen(cell) + 1) {
        bool last = (i + 1) % p->n_columns == 0;
        TRY(text_add(t, "| "));
        TRY(add_words(t, cell));
        TRY(text_add(t, last ? " |\n" : " "));
        if (i + 1 == p->n_columns) TRY(add_rule(t, p));
    }
    return 0;
}

static int add_figure(text *t, const report_part *p) {
    if (!p->link.n) return add_line(t, "(Figure in report.html: ", p->words.data, ")");
    TRY(text_add(t, "!["));
    TRY(add_words(t, p->instead.data));
    return text_add(t, "](%s)\n", p->link.data);
}

static int add_code(text *t, const char *lines) {
    for (; *lines; lines += *lines == '\n') {
        int n = (int)strcspn(lines, "\n");
        TRY(text_add(t, "    %.*s\n", n, lines));
        lines += n;
    }
    return 0;
}

static int add_part(text *t, const report_part *p) {
    switch (p->kind) {
    case REPORT_SECTION:
        return add_line(t, "## ", p->words.data, "");
    case REPORT_GROUP:
        return add_line(t, "### ", p->words.data, "");
    case REPORT_LEAD:
        return add_line(t, "> **", p->words.data, "**");
    case REPORT_PARAGRAPH:
        return add_line(t, "", p->words.data, "");
    case REPORT_ITEM:
        return add_line(t, "- ", p->words.data, "");
    case REPORT_CODE:
        return add_code(t, p->words.data);
    case REPORT_TABLE:
        return add_table(t, p);
    case REPORT_FIGURE:
        return add_figure(t, p);
    case REPORT_FRAGMENT:
        return text_add(t, "*(report.html shows it in colour.)*\n");
    }
    return 0;
}

int report_write_markdown(const report *r, text *t) {
    TRY(add_line(t, "# ", r->title.data, ""));
    for (size_t i = 0; i < r->n; i++) {
        bool in_list = i && r->part[i].kind == REPORT_ITEM && r->part[i - 1].kind == REPORT_ITEM;
        if (!in_list) TRY(text_add(t, "\n"));
        TRY(add_part(t, &r->part[i]));
    }
    return 0;
}
