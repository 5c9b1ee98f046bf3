/* kvlag help: the overview, and a page for each command, which `kvlag COMMAND --help` shows too. */
#include "base/err.h"
#include "base/options.h"
#include "base/prose.h"
#include "cli/commands.h"
#include "cli/topics.h"

#include <stdio.h>
#include <string.h>

static void heading(const char *words) {
    printf("\n");
    prose_heading(words, NULL);
}

/* ---- a command's page ------------------------------------------------------------------------------------------- */

typedef struct page {
    const command *of;
    bool begun, in_options;
} page;

static void begin(page *p) {
    if (p->begun) return;
    p->begun = true;
    printf("kvlag %s %s\n\n", p->of->name, p->of->usage);
    printf("  ");
    prose_print(p->of->about, 2);
}

static void show_section(void *context, const char *name, const char *help) {
    begin(context);
    printf("\n");
    prose_heading(name, help);
    ((page *)context)->in_options = true;
}

static void show_table(void *context, const opt *table) {
    page *p = context;
    begin(p);
    if (table->name && !p->in_options) heading("Options");
    opt_print_table(table);
    p->in_options = false;
}

int command_run(const command *c, int argc, char **argv) {
    page p = {.of = c};
    opt_viewer before = opt_show_with((opt_viewer){.section = show_section, .table = show_table, .context = &p});
    int code = c->run(argc, argv);
    opt_show_with(before);
    if (!p.begun) return code;
    if (c->example[0].command) heading("Examples");
    for (size_t i = 0; c->example[i].command; i++) {
        printf("%s  # %s\n", i ? "\n" : "", c->example[i].what);
        prose_print_command(c->example[i].command, 2);
    }
    return code;
}

/* ---- the overview ----------------------------------------------------------------------------------------------- */

static void print_overview(void) {
    puts("kvlag " KVLAG_VERSION ": what would this KV cache have cost with another eviction policy, budget or lag?\n");
    puts("  kvlag COMMAND [OPTION...]");
    heading("Commands");
    for (const command *c = commands; c->name; c++) printf("  %-12s %s\n", c->name, c->help);
    heading("Topics");
    for (const topic *t = topics; t->name; t++) printf("  %-12s %s\n", t->name, t->help);
    heading("A first round");
    for (const command *c = commands; c->name; c++) {
        if (!c->first_round) continue;
        printf("  # %s\n", c->example[0].what);
        prose_print_command(c->example[0].command, 2);
    }
    puts("\nkvlag help NAME explains a command or topic; -h or --help behind a command does the same.\n"
         "kvlag --version prints the version. Exit codes: 0 fine, 1 bad data or failed work, 2 usage.");
}

static int unknown_name(const char *name) {
    enum { MOST = 64 };
    const char *names[MOST];
    size_t n = 0;
    for (const command *c = commands; c->name && n < MOST; c++) names[n++] = c->name;
    for (const topic *t = topics; t->name && n < MOST; t++) names[n++] = t->name;
    const char *near = opt_nearest(name, names, n);
    if (near) return err_set(ERR_USAGE, "no command or topic '%s' (did you mean %s?)", name, near);
    return err_set(ERR_USAGE, "no command or topic '%s' (kvlag help lists them)", name);
}

static int explain(const char *name) {
    for (const topic *t = topics; t->name; t++)
        if (strcmp(t->name, name) == 0) {
            prose_heading(t->title, t->help);
            printf("\n%s", t->body);
            return 0;
        }
    for (const command *c = commands; c->name; c++)
        if (strcmp(c->name, name) == 0) return command_run(c, 1, (char *[]){"--help"});
    return unknown_name(name);
}

int cmd_help(int argc, char **argv) {
    const opt none[] = {{.name = NULL}};
    opt_list names = {0};
    int code = opt_parse(none, argc, argv, &names);
    if (!code && names.n > 1) code = err_set(ERR_USAGE, "help: at most one COMMAND or TOPIC, got %zu", names.n);
    if (!code && names.n) code = explain(names.item[0]);
    else if (!code) print_overview();
    opt_list_free(&names);
    return code;
}
