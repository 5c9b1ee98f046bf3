#include "analyze/report.h"
#include "base/err.h"
#include "base/mem.h"

#include <string.h>

void report_free(report *r) {
    for (size_t i = 0; i < r->n; i++) {
        report_part *p = &r->part[i];
        text_free(&p->words);
        text_free(&p->cells);
        text_free(&p->picture);
        text_free(&p->link);
        text_free(&p->instead);
        text_free(&p->html);
    }
    mem_free(r->part);
    text_free(&r->title);
    text_free(&r->style);
    *r = (report){0};
}

static int new_part(report *r, report_kind kind, report_part **out) {
    TRY(mem_grow((void **)&r->part, &r->capacity, r->n + 1, sizeof *r->part, "report"));
    *out = &r->part[r->n++];
    **out = (report_part){.kind = kind};
    return 0;
}

int report_add(report *r, report_kind kind, const char *format, ...) {
    report_part *p;
    TRY(new_part(r, kind, &p));
    va_list args;
    va_start(args, format);
    int code = text_add_list(&p->words, format, args);
    va_end(args);
    return code;
}

int report_add_table(report *r, const char *caption, const char *align, const char *const *column) {
    report_part *p;
    TRY(new_part(r, REPORT_TABLE, &p));
    p->align = align;
    p->n_columns = strlen(align);
    TRY(text_add(&p->words, "%s", caption));
    for (size_t i = 0; i < p->n_columns; i++) TRY(report_cell(r, "%s", column[i]));
    return 0;
}

int report_cell(report *r, const char *format, ...) {
    report_part *p = &r->part[r->n - 1];
    va_list args;
    va_start(args, format);
    int code = text_add_list(&p->cells, format, args);
    va_end(args);
    p->n_cells++;
    return code ? code : text_add_bytes(&p->cells, "", 1);
}

int report_cell_text(report *r, text *words, int code) {
    if (!code) code = report_cell(r, "%s", words->n ? words->data : "");
    text_free(words);
    return code;
}

int report_add_figure(report *r, text *picture, const char *link, const char *words, const char *instead) {
    report_part *p;
    TRY(new_part(r, REPORT_FIGURE, &p));
    p->picture = *picture;
    *picture = (text){0};
    TRY(text_add(&p->link, "%s", link));
    TRY(text_add(&p->instead, "%s", instead));
    return text_add(&p->words, "%s", words);
}

int report_add_fragment(report *r, text *html) {
    report_part *p;
    TRY(new_part(r, REPORT_FRAGMENT, &p));
    p->html = *html;
    *html = (text){0};
    return 0;
}
