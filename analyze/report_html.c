/* The report as one HTML5 file: no script, nothing loaded from elsewhere. Figures are images whose SVG stands in the
 * file itself; as images, what gnuplot calls its elements cannot collide between two of them. */
#include "analyze/html_text.h"
#include "analyze/report.h"
#include "base/err.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

static const char style[] =
    "<style>\n"
    ":root { color-scheme: light dark; --ink: #1c2024; --soft: #5b6570; --page: #fff; --card: #f5f7f9; --line: "
    "#d9dee3;\n"
    "  --accent: #0072b2; }\n"
    "@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --soft: #9aa5b0; --page: #14181c; --card: #1d2329;\n"
    "  --line: #343c45; --accent: #56b4e9; } }\n"
    "* { box-sizing: border-box; }\n"
    "html { -webkit-text-size-adjust: 100%; }\n"
    "body { margin: 0 auto; padding: 1.5rem clamp(1rem, 4vw, 3rem) 3rem; max-width: 76rem; background: var(--page);\n"
    "  color: var(--ink); font: 1rem/1.55 system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif;\n"
    "  overflow-wrap: anywhere; }\n"
    "h1 { font-size: 1.35rem; line-height: 1.3; margin: 0 0 1rem; }\n"
    "h2 { font-size: 1.2rem; margin: 2.5rem 0 0.75rem; padding-top: 0.75rem; border-top: 1px solid var(--line); }\n"
    "h3 { font-size: 1rem; margin: 1.5rem 0 0.5rem; }\n"
    "p, li { max-width: 46rem; }\n"
    "p { margin: 0.5rem 0; }\n"
    "ul { margin: 0.5rem 0; padding-left: 1.25rem; }\n"
    "li + li { margin-top: 0.35rem; }\n"
    "nav ul { display: flex; flex-wrap: wrap; gap: 0.25rem 1.25rem; list-style: none; padding: 0; margin: 1rem 0 0; }\n"
    "nav li + li { margin: 0; }\n"
    "nav a, a { color: var(--accent); }\n"
    ".lead { max-width: none; margin: 0; padding: 1rem 1.25rem; background: var(--card); border-radius: 0.5rem;\n"
    "  border-left: 0.3rem solid var(--accent); font-size: 1.1rem; }\n"
    ".table { overflow-x: auto; margin: 1rem 0; border: 1px solid var(--line); border-radius: 0.5rem; }\n"
    ".table:focus-visible { outline: 2px solid var(--accent); }\n"
    "table { border-collapse: collapse; width: 100%; font-size: 0.9rem; font-variant-numeric: tabular-nums; }\n"
    "caption { text-align: left; padding: 0.6rem 0.75rem; font-weight: 600; background: var(--card); }\n"
    "th, td { padding: 0.4rem 0.75rem; text-align: left; white-space: nowrap; vertical-align: baseline; }\n"
    "thead th { color: var(--soft); font-weight: 600; border-bottom: 1px solid var(--line); white-space: normal;\n"
    "  min-width: 3.5rem; overflow-wrap: normal; vertical-align: bottom; }\n"
    "tbody th { font-weight: 500; }\n"
    "tbody tr + tr > * { border-top: 1px solid var(--line); }\n"
    ".r { text-align: right; }\n"
    ".figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1.25rem;\n"
    "  margin: 1rem 0; align-items: start; }\n"
    "figure { margin: 0; padding: 0.5rem; border: 1px solid var(--line); border-radius: 0.5rem; max-width: 40rem; }\n"
    "figure img { display: block; width: 100%; height: auto; background: #fff; border-radius: 0.25rem; }\n"
    "figcaption { padding: 0.5rem 0.25rem 0; font-size: 0.9rem; color: var(--soft); }\n"
    "pre { overflow-x: auto; padding: 0.75rem; background: var(--card); border-radius: 0.5rem; font: 0.8rem/1.5\n"
    "  ui-monospace, 'DejaVu Sans Mono', monospace; }\n"
    "@media (max-width: 40rem) { body { padding-top: 1rem; } .lead { padding: 0.75rem 1rem; font-size: 1.05rem; }\n"
    "  table { font-size: 0.85rem; } th, td { padding: 0.35rem 0.5rem; } }\n"
    "@media print { body { max-width: none; padding: 0; font-size: 10pt; } nav { display: none; }\n"
    "  .table, pre { overflow: visible; } pre { white-space: pre-wrap; } table { font-size: 7.5pt; }\n"
    "  th, td { white-space: normal; padding: 0.2rem 0.4rem; } .lead { font-size: 11pt; }\n"
    "  .lead, .kvlag-text span { print-color-adjust: exact; -webkit-print-color-adjust: exact; }\n"
    "  figure, tr, .lead { break-inside: avoid; } h2, h3 { break-after: avoid; } }\n"
    "</style>\n";

/* ---- base64 (RFC 4648) ------------------------------------------------------------------------------------------ */

static int add_base64(text *t, const uint8_t *bytes, size_t n) {
    static const char digit[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (size_t i = 0; i < n; i += 3) {
        uint32_t left = n - i < 3 ? (uint32_t)(n - i) : 3, v = 0;
        for (uint32_t k = 0; k < 3; k++) v = v << 8 | (k < left ? bytes[i + k] : 0);
        char out[4];
        for (uint32_t k = 0; k < 4; k++) out[k] = k <= left ? digit[v >> (18 - 6 * k) & 63] : '=';
        TRY(text_add_bytes(t, out, sizeof out));
    }
    return 0;
}

/* ---- parts ------------------------------------------------------------------------------------------------------ */

static int add_element(text *t, const char *open, const char *words, const char *close) {
    TRY(text_add(t, "%s", open));
    TRY(html_text_escape(t, words));
    return text_add(t, "%s\n", close);
}

static int add_cell(text *t, const report_part *p, size_t i, const char *cell) {
    size_t column = i % p->n_columns;
    bool header = i < p->n_columns;
    const char *element = header || column == 0 ? "th" : "td";
    if (column == 0) TRY(text_add(t, "<tr>"));
    TRY(text_add(t, "<%s%s%s>", element,
                 header        ? " scope=\"col\""
                 : column == 0 ? " scope=\"row\""
                               : "",
                 p->align[column] == 'r' ? " class=\"r\"" : ""));
    TRY(html_text_escape(t, cell));
    TRY(text_add(t, "</%s>", element));
    return column + 1 == p->n_columns ? text_add(t, "</tr>\n") : 0;
}

/* A table wider than the page scrolls in its box, also by keyboard. */
static int add_table(text *t, const report_part *p) {
    const char *cell = p->cells.data;
    TRY(text_add(t, "<div class=\"table\" role=\"region\" tabindex=\"0\" aria-label=\""));
    TRY(html_text_escape(t, p->words.data));
    TRY(text_add(t, "\">\n<table>\n"));
    TRY(add_element(t, "<caption>", p->words.data, "</caption>"));
    TRY(text_add(t, "<thead>\n"));
    for (size_t i = 0; i < p->n_cells; i++, cell += strlen(cell) + 1) {
        if (i == p->n_columns) TRY(text_add(t, "</thead>\n<tbody>\n"));
        TRY(add_cell(t, p, i, cell));
    }
    if (p->n_cells <= p->n_columns) TRY(text_add(t, "</thead>\n<tbody>\n"));
    return text_add(t, "</tbody>\n</table>\n</div>\n");
}

static int add_figure(text *t, const report_part *p) {
    TRY(text_add(t, "<figure>\n"));
    if (p->picture.n) {
        TRY(text_add(t, "<img alt=\""));
        TRY(html_text_escape(t, p->instead.data));
        TRY(text_add(t, "\" src=\"data:image/svg+xml;base64,"));
        TRY(add_base64(t, (const uint8_t *)p->picture.data, p->picture.n));
        TRY(text_add(t, "\">\n"));
    }
    TRY(add_element(t, "<figcaption>", p->words.data, p->picture.n ? "</figcaption>" : " (not drawn)</figcaption>"));
    return text_add(t, "</figure>\n");
}

static int add_part(text *t, const report_part *p, size_t section) {
    switch (p->kind) {
    case REPORT_SECTION:
        TRY(text_add(t, "<h2 id=\"s%zu\">", section));
        return add_element(t, "", p->words.data, "</h2>");
    case REPORT_GROUP:
        return add_element(t, "<h3>", p->words.data, "</h3>");
    case REPORT_LEAD:
        return add_element(t, "<p class=\"lead\">", p->words.data, "</p>");
    case REPORT_PARAGRAPH:
        return add_element(t, "<p>", p->words.data, "</p>");
    case REPORT_ITEM:
        return add_element(t, "<li>", p->words.data, "</li>");
    case REPORT_CODE:
        return add_element(t, "<pre><code>", p->words.data, "</code></pre>");
    case REPORT_TABLE:
        return add_table(t, p);
    case REPORT_FIGURE:
        return add_figure(t, p);
    case REPORT_FRAGMENT:
        return text_add_bytes(t, p->html.data, p->html.n);
    }
    return 0;
}

/* Neighbouring items form a list, neighbouring figures a grid. */
static int add_parts(text *t, const report_part *part, size_t n) {
    size_t section = 0;
    for (size_t i = 0; i < n; i++) {
        const report_part *p = &part[i];
        bool item = p->kind == REPORT_ITEM, figure = p->kind == REPORT_FIGURE;
        bool first = i == 0 || part[i - 1].kind != p->kind, last = i + 1 == n || part[i + 1].kind != p->kind;
        if (first && item) TRY(text_add(t, "<ul>\n"));
        if (first && figure) TRY(text_add(t, "<div class=\"figures\">\n"));
        section += p->kind == REPORT_SECTION;
        TRY(add_part(t, p, section));
        if (last && item) TRY(text_add(t, "</ul>\n"));
        if (last && figure) TRY(text_add(t, "</div>\n"));
    }
    return 0;
}

/* ---- the page --------------------------------------------------------------------------------------------------- */

static int add_contents(text *t, const report *r) {
    size_t section = 0;
    TRY(text_add(t, "<nav aria-label=\"Contents\">\n<ul>\n"));
    for (size_t i = 0; i < r->n; i++) {
        if (r->part[i].kind != REPORT_SECTION) continue;
        TRY(text_add(t, "<li><a href=\"#s%zu\">", ++section));
        TRY(add_element(t, "", r->part[i].words.data, "</a></li>"));
    }
    return text_add(t, "</ul>\n</nav>\n");
}

int report_write_html(const report *r, text *t) {
    TRY(text_add(t, "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
                    "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"));
    TRY(add_element(t, "<title>", r->title.data, "</title>"));
    TRY(text_add(t, "%s%s</head>\n<body>\n<header>\n", style, r->style.n ? r->style.data : ""));
    TRY(add_element(t, "<h1>", r->title.data, "</h1>"));
    TRY(text_add(t, "</header>\n<main>\n"));
    /* What comes before the first section is what the report is for; the contents stand behind it. */
    size_t first = 0;
    while (first < r->n && r->part[first].kind != REPORT_SECTION) first++;
    TRY(add_parts(t, r->part, first));
    TRY(add_contents(t, r));
    TRY(add_parts(t, r->part + first, r->n - first));
    return text_add(t, "</main>\n</body>\n</html>\n");
}
