/* kvlag man: pages in roff (the man macros), from the tables that --help shows. */
#include "base/err.h"
#include "base/mem.h"
#include "base/options.h"
#include "base/outfile.h"
#include "base/prose.h"
#include "base/text.h"
#include "cli/commands.h"
#include "cli/topics.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

/* A terminal of 80 columns less man's margins. */
enum { COLUMNS = 70 };

/* ---- roff ------------------------------------------------------------------------------------------------------- */

/* Nothing in `words` means anything to roff after this; also at the beginning of a line. */
static int add_escaped(text *t, const char *words, size_t n) {
    static const struct {
        char plain;
        const char *roff;
    } special[] = {{'\\', "\\e"}, {'-', "\\-"}, {'\'', "\\(aq"}, {'`', "\\(ga"}, {'^', "\\(ha"}, {'~', "\\(ti"}};
    if (n && words[0] == '.') TRY(text_add(t, "\\&"));
    for (size_t i = 0; i < n; i++) {
        size_t k = 0;
        while (k < sizeof special / sizeof *special && special[k].plain != words[i]) k++;
        if (k < sizeof special / sizeof *special) TRY(text_add(t, "%s", special[k].roff));
        else TRY(text_add_bytes(t, words + i, 1));
    }
    return 0;
}

static int add_words(text *t, const char *words) {
    return add_escaped(t, words, strlen(words));
}

static int add_font(text *t, char font, const char *words, size_t n) {
    TRY(text_add(t, "\\f%c", font));
    TRY(add_escaped(t, words, n));
    return text_add(t, "\\fR");
}

/* "MODEL [NAME] -o FILE.h5": options bold, what stands for something else slanted. */
static int add_usage(text *t, const char *usage) {
    for (const char *c = usage; *c;) {
        size_t n = 1;
        if (*c == '-') n = strspn(c, "-abcdefghijklmnopqrstuvwxyz");
        else if (isupper((unsigned char)*c)) {
            while (isalnum((unsigned char)c[n]) || (c[n] == '.' && c[n + 1] != '.')) n++;
        }
        if (*c == '-' || isupper((unsigned char)*c)) TRY(add_font(t, *c == '-' ? 'B' : 'I', c, n));
        else TRY(add_escaped(t, c, n));
        c += n;
    }
    return 0;
}

static int add_heading(text *t, const char *title) {
    TRY(text_add(t, ".SH \""));
    for (const char *c = title; *c; c++) TRY(text_add(t, "%c", toupper((unsigned char)*c)));
    return text_add(t, "\"\n");
}

/* name: "KVLAG-SIM" is spelt with the page's own name. */
static int begin_page(text *t, const char *name, const char *help) {
    TRY(text_add(t, ".\\\" Made by kvlag man.\n.TH \""));
    for (const char *c = name; *c; c++) TRY(text_add(t, "%c", toupper((unsigned char)*c)));
    TRY(text_add(t, "\" 1 \"\" \"kvlag " KVLAG_VERSION "\" \"User Commands\"\n"));
    TRY(add_heading(t, "Name"));
    TRY(text_add(t, "%s \\- ", name)); /* what whatis reads */
    TRY(add_words(t, help));
    return text_add(t, "\n");
}

/* ---- pieces ----------------------------------------------------------------------------------------------------- */

typedef struct options {
    text *t;
    int code;
} options;

/* Line breaks stay. */
static int add_lines(text *t, const char *lines) {
    for (const char *line = lines; line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL) {
        if (line != lines) TRY(text_add(t, ".br\n"));
        TRY(add_escaped(t, line, strcspn(line, "\n")));
        TRY(text_add(t, "\n"));
    }
    return 0;
}

static int add_option(text *t, const opt *o) {
    TRY(text_add(t, ".TP\n"));
    if (o->letter) TRY(text_add(t, "\\fB\\-%c\\fR, ", o->letter));
    TRY(text_add(t, "\\fB\\-\\-"));
    TRY(add_words(t, o->name));
    TRY(text_add(t, "\\fR"));
    const char *value = opt_value_name(o);
    if (value) {
        TRY(text_add(t, " "));
        TRY(add_font(t, 'I', value, strlen(value)));
    }
    text help = {0};
    int code = text_add(t, "\n");
    if (!code) code = opt_explain(o, &help);
    if (!code) code = add_lines(t, help.data);
    text_free(&help);
    return code;
}

static int add_subheading(text *t, const char *name, const char *help) {
    TRY(text_add(t, ".SS \""));
    TRY(add_words(t, name));
    TRY(text_add(t, "\"\n"));
    TRY(add_words(t, help));
    return text_add(t, "\n");
}

static void take_section(void *context, const char *name, const char *help) {
    options *o = context;
    if (!o->code) o->code = add_subheading(o->t, name, help);
}

static void take_table(void *context, const opt *table) {
    options *o = context;
    for (const opt *row = table; row->name && !o->code; row++) o->code = add_option(o->t, row);
}

/* The command shows its tables to us instead of printing them. */
static int add_options(text *t, const command *c) {
    text rows = {0};
    options o = {.t = &rows};
    opt_viewer before = opt_show_with((opt_viewer){take_section, take_table, &o});
    c->run(1, (char *[]){"--help"});
    opt_show_with(before);
    if (!o.code && rows.n) o.code = add_heading(t, "Options");
    if (!o.code && rows.n) o.code = text_add_bytes(t, rows.data, rows.n);
    text_free(&rows);
    return o.code;
}

static int add_command(text *t, const char *line) {
    int n = prose_command_line(line, COLUMNS);
    TRY(add_escaped(t, line, (size_t)n));
    for (line += n; *line; line += n) {
        line++;
        n = prose_command_line(line, COLUMNS - 4);
        TRY(text_add(t, " \\e\n    "));
        TRY(add_escaped(t, line, (size_t)n));
    }
    return text_add(t, "\n");
}

static int add_example(text *t, const command *c, size_t i) {
    TRY(text_add(t, "# "));
    TRY(add_words(t, c->example[i].what));
    TRY(text_add(t, "\n"));
    return add_command(t, c->example[i].command);
}

static int add_exit_status(text *t) {
    TRY(add_heading(t, "Exit status"));
    return text_add(t, "0 where all went well, 1 for bad data or failed work, 2 for a wrong command line. "
                       "A failure leaves one line on standard error, and no output.\n");
}

/* A topic's paragraphs: those that begin with two blanks stay as they are. */
static int add_topic(text *t, const topic *about) {
    TRY(add_heading(t, about->title));
    for (const char *line = about->body; *line;) {
        bool kept = strncmp(line, "  ", 2) == 0;
        if (kept) TRY(text_add(t, ".EX\n"));
        for (; *line && *line != '\n'; line += strcspn(line, "\n") + 1) {
            TRY(add_escaped(t, line, strcspn(line, "\n")));
            TRY(text_add(t, "\n"));
        }
        if (kept) TRY(text_add(t, ".EE\n"));
        if (*line && *++line) TRY(text_add(t, ".PP\n"));
    }
    return 0;
}

/* ---- pages ------------------------------------------------------------------------------------------------------ */

static int add_command_page(text *t, const command *c) {
    char name[32];
    snprintf(name, sizeof name, "kvlag-%s", c->name);
    TRY(begin_page(t, name, c->help));
    TRY(add_heading(t, "Synopsis"));
    TRY(text_add(t, "\\fBkvlag "));
    TRY(add_words(t, c->name));
    TRY(text_add(t, "\\fR "));
    TRY(add_usage(t, c->usage));
    TRY(text_add(t, " [\\fIOPTION\\fR...]\n"));
    TRY(add_heading(t, "Description"));
    TRY(add_words(t, c->about));
    TRY(text_add(t, "\n"));
    TRY(add_options(t, c));
    TRY(add_exit_status(t));
    if (c->example[0].command) TRY(add_heading(t, "Examples"));
    TRY(text_add(t, ".EX\n"));
    for (size_t i = 0; c->example[i].command; i++) {
        if (i) TRY(text_add(t, "\n"));
        TRY(add_example(t, c, i));
    }
    TRY(text_add(t, ".EE\n"));
    TRY(add_heading(t, "See also"));
    return text_add(t, ".BR kvlag (1)\n");
}

static int add_overview(text *t) {
    TRY(begin_page(t, "kvlag", "what a KV cache costs under another eviction policy, budget or lag"));
    TRY(add_heading(t, "Synopsis"));
    TRY(text_add(t, "\\fBkvlag\\fR \\fICOMMAND\\fR [\\fIOPTION\\fR...]\n.br\n"
                    "\\fBkvlag help\\fR [\\fICOMMAND\\fR]\n.br\n\\fBkvlag \\-\\-version\\fR\n"));
    TRY(add_heading(t, "Description"));
    TRY(text_add(t,
                 "\\fBkvlag\\fR runs a language model over a text once and keeps its attention and gradients. Every "
                 "eviction policy, budget and lag is then replayed over that trace, and its price in nats per token is "
                 "estimated, with an interval that was measured against true reruns.\n"));
    TRY(add_heading(t, "Commands"));
    for (const command *c = commands; c->name; c++) {
        TRY(text_add(t, ".TP\n\\fBkvlag\\-"));
        TRY(add_words(t, c->name));
        TRY(text_add(t, "\\fR(1)\n"));
        TRY(add_words(t, c->help));
        TRY(text_add(t, "\n"));
    }
    for (const topic *about = topics; about->name; about++) TRY(add_topic(t, about));
    TRY(add_exit_status(t));
    TRY(add_heading(t, "Examples"));
    TRY(text_add(t, ".EX\n"));
    for (const command *c = commands; c->name; c++)
        if (c->first_round) TRY(add_example(t, c, 0));
    TRY(text_add(t, ".EE\n"));
    TRY(add_heading(t, "See also"));
    for (const command *c = commands; c->name; c++) {
        TRY(text_add(t, ".BR kvlag\\-"));
        TRY(add_words(t, c->name));
        TRY(text_add(t, " (1)%s\n", c[1].name ? "," : ""));
    }
    return 0;
}

/* c == NULL: the overview. */
static int make_page(const command *c, text *t) {
    return c ? add_command_page(t, c) : add_overview(t);
}

static int print_page(const command *c) {
    text t = {0};
    int code = make_page(c, &t);
    if (!code) fputs(t.data, stdout);
    text_free(&t);
    return code;
}

static int write_page(const command *c, const char *folder, bool force) {
    text t = {0}, path = {0};
    outfile file = {0};
    int code = text_add(&path, "%s/kvlag%s%s.1", folder, c ? "-" : "", c ? c->name : "");
    if (!code) code = make_page(c, &t);
    if (!code) code = outfile_begin(&file, path.data, force, NULL, 0);
    if (!code) code = outfile_write(&file, t.data, t.n);
    if (!code) code = outfile_commit(&file);
    outfile_abort(&file);
    text_free(&path);
    text_free(&t);
    return code;
}

static int write_pages(const char *folder, bool force) {
    TRY(outfile_make_folder(folder));
    TRY(write_page(NULL, folder, force));
    for (const command *c = commands; c->name; c++) TRY(write_page(c, folder, force));
    return 0;
}

static int man(const opt_list *names, const char *folder, bool force) {
    if (names->n > 1) return err_set(ERR_USAGE, "man: at most one COMMAND, got %zu", names->n);
    if (names->n && folder) return err_set(ERR_USAGE, "man: -o DIR takes all pages, and no COMMAND");
    if (folder) return write_pages(folder, force);
    const command *c = names->n ? command_find(names->item[0]) : NULL;
    return names->n && !c ? ERR_USAGE : print_page(c);
}

int cmd_man(int argc, char **argv) {
    const char *folder = NULL;
    bool force = false;
    opt_list names = {0};
    const opt table[] = {
        {"output", 'o', OPT_FILE, false, &folder, "DIR", "write all pages into a folder", 0, 0},
        {"force", 0, OPT_FLAG, false, &force, NULL, "replace existing files", 0, 0},
        {.name = NULL},
    };
    int code = opt_parse(table, argc, argv, &names);
    if (!code) code = man(&names, folder, force);
    opt_list_free(&names);
    return code;
}
