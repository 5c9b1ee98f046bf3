#include "cli/complete.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/options.h"
#include "cli/commands.h"
#include "cli/topics.h"
#include "sim/policy_plugin.h"

#include <stdio.h>
#include <string.h>

/* ---- candidates ------------------------------------------------------------------------------------------------- */

void candidates_offer(candidates *c, size_t n, const char *end, const char *help) {
    size_t typed = strlen(c->word) - n;
    if (c->code || strncmp(end, c->word + n, typed) != 0) return;
    c->code = text_add(&c->out, "%.*s%s\t%.*s\n", (int)n, c->word, end, help ? (int)strcspn(help, "\n") : 0,
                       help ? help : "");
}

void candidates_offer_words(candidates *c, size_t n, const char *words) {
    while (*words) {
        char one[64];
        size_t length = strcspn(words, "|,"), colon = strcspn(words, ":|,");
        bool open = words[colon] == ':'; /* "every:P": P is up to whoever types */
        snprintf(one, sizeof one, "%.*s", (int)(open ? colon + 1 : length), words);
        candidates_offer(c, n, one, NULL);
        words += length + (words[length] != 0);
    }
}

static void offer_files(candidates *c) {
    if (!c->code) c->code = text_add(&c->out, ":files\n");
}

/* ---- the line --------------------------------------------------------------------------------------------------- */

/* The words of a line, quotes and backslashes taken away; the last is the one under the cursor. */
typedef struct words {
    char *bytes;
    const char **item;
    size_t n, capacity;
} words;

static int split(const char *line, words *out) {
    char quote = 0, *to = out->bytes = mem_new(2 * strlen(line) + 2, 1, "line");
    if (!to) return ERR_DATA;
    for (const char *c = line;;) {
        while (*c == ' ' || *c == '\t' || *c == '\n') c++;
        TRY(mem_grow((void **)&out->item, &out->capacity, out->n + 1, sizeof *out->item, "words"));
        out->item[out->n++] = to;
        for (; *c && (quote || !strchr(" \t\n", *c)); c++) {
            if (quote ? *c == quote : *c == '\'' || *c == '"') quote = quote ? 0 : *c;
            else if (*c == '\\' && quote != '\'' && c[1]) *to++ = *++c;
            else *to++ = *c;
        }
        *to++ = 0;
        if (!*c) return 0;
    }
}

/* ---- a command's options ---------------------------------------------------------------------------------------- */

typedef struct request {
    const command *of;
    const char *const *before; /* the words between the command and the cursor */
    size_t n;
    candidates *to;
    bool elsewhere; /* the tables that come belong to a section that the line does not name */
} request;

static const opt *find_long(const opt *table, const char *name, size_t n) {
    const opt *o = table;
    while (o->name && (strlen(o->name) != n || strncmp(o->name, name, n) != 0)) o++;
    return o->name ? o : NULL;
}

/* The option of "-ab" that takes a value; *value is what stands behind it. */
static const opt *find_short(const opt *table, const char *letters, const char **value) {
    for (const char *c = letters; *c; c++) {
        const opt *o = table;
        while (o->name && o->letter != *c) o++;
        if (!o->name) return NULL;
        *value = c + 1;
        if (o->kind != OPT_FLAG) return o;
    }
    return NULL;
}

/* The option whose value a word holds or, where *value is empty, the next word does. */
static const opt *option_of(const opt *table, const char *word, const char **value) {
    if (word[0] != '-' || !word[1]) return NULL;
    if (word[1] != '-') return find_short(table, word + 1, value);
    size_t n = strcspn(word + 2, "=");
    const opt *o = find_long(table, word + 2, n);
    *value = word + 2 + n + (word[2 + n] == '=');
    return o && o->kind != OPT_FLAG ? o : NULL;
}

/* A plugin that the line names brings policies; one that is not there yet brings none. */
static void take_value(const opt *o, const char *value) {
    const char *item[] = {value};
    if (strcmp(o->name, "plugin") == 0) policy_plugins_load(&(opt_list){.item = item, .n = 1});
}

/* What stands before the cursor. */
typedef struct stand {
    const opt *waits; /* for its value, or NULL */
    size_t operands;
    bool ended; /* by "--": no options follow */
} stand;

static stand walk(const request *r, const opt *table) {
    stand b = {0};
    for (size_t i = 0; i < r->n; i++) {
        const char *word = r->before[i], *value = "";
        if (b.waits) {
            take_value(b.waits, word);
            b.waits = NULL;
        } else if (b.ended || word[0] != '-' || !word[1]) {
            b.operands++;
        } else if (strcmp(word, "--") == 0) {
            b.ended = true;
        } else {
            const opt *o = option_of(table, word, &value);
            if (o && (*value || strchr(word, '='))) take_value(o, value);
            else b.waits = o;
        }
    }
    return b;
}

static void offer_value(candidates *c, const opt *o, size_t n) {
    if (o->kind == OPT_FILE || o->kind == OPT_FILES) offer_files(c);
    else if (strcmp(o->arg, "SPEC") == 0) complete_spec(c, n);
    else if (o->kind == OPT_WORDS) {
        const char *comma = strrchr(c->word + n, ',');
        candidates_offer_words(c, comma ? (size_t)(comma - c->word) + 1 : n, o->arg);
    } else if (strchr(o->arg, '|')) candidates_offer_words(c, n, o->arg);
}

static bool is_among(const request *r, const opt *o) {
    for (size_t i = 0; i < r->n; i++)
        if ((strncmp(r->before[i], "--", 2) == 0 && strcmp(r->before[i] + 2, o->name) == 0) ||
            (o->letter && r->before[i][0] == '-' && r->before[i][1] == o->letter))
            return true;
    return false;
}

static void offer_options(const request *r, const opt *table) {
    candidates_offer(r->to, 0, "--help", "show what there is");
    for (const opt *o = table; o->name; o++) {
        char name[64] = "--";
        strncat(name, o->name, sizeof name - 3);
        if (o->kind == OPT_LIST || o->kind == OPT_FILES || !is_among(r, o)) candidates_offer(r->to, 0, name, o->help);
    }
}

static void offer_commands(candidates *c) {
    for (const command *x = commands; x->name; x++) candidates_offer(c, 0, x->name, x->help);
}

static void offer_operand(const request *r, size_t operands) {
    switch (r->of->operand) {
    case OPERAND_FILE:
        offer_files(r->to);
        break;
    case OPERAND_POLICY:
        if (operands == 0) complete_policy(r->to);
        break;
    case OPERAND_TOPIC:
        for (const topic *t = topics; t->name && operands == 0; t++) candidates_offer(r->to, 0, t->name, t->help);
        /* fall through */
    case OPERAND_COMMAND:
        if (operands == 0) offer_commands(r->to);
        break;
    case OPERAND_SHELL:
        if (operands == 0) candidates_offer_words(r->to, 0, "bash|zsh|fish");
        break;
    case OPERAND_SECTION:
        break; /* see take_section */
    }
}

static void take_section(void *context, const char *name, const char *help) {
    request *r = context;
    if (r->n == 0) candidates_offer(r->to, 0, name, help);
    r->elsewhere = r->n == 0 || strcmp(r->before[0], name) != 0;
}

static void take_table(void *context, const opt *table) {
    request *r = context;
    const char *word = r->to->word, *value = "";
    if (r->elsewhere) return;
    stand b = walk(r, table);
    const opt *attached = b.waits || b.ended ? NULL : option_of(table, word, &value);
    if (b.waits) offer_value(r->to, b.waits, 0);
    else if (attached && (*value || value[-1] == '=')) offer_value(r->to, attached, (size_t)(value - word));
    else if (!b.ended && word[0] == '-') offer_options(r, table);
    else offer_operand(r, b.operands);
}

/* ---- a line ----------------------------------------------------------------------------------------------------- */

static const command *find_command(const char *name) {
    const command *c = commands;
    while (c->name && strcmp(c->name, name) != 0) c++;
    return c->name ? c : NULL;
}

/* item[0] is the program's name. */
static void complete_words(const char *const *item, size_t n, candidates *to) {
    to->word = item[n - 1];
    if (strpbrk(to->word, "\t\n")) return;
    to->code = text_add(&to->out, ":word\t%s\n", to->word);
    if (n == 2) {
        offer_commands(to);
        candidates_offer(to, 0, "--help", "show the commands");
        candidates_offer(to, 0, "--version", "print the version");
    }
    request r = {.of = n > 2 ? find_command(item[1]) : NULL, .before = item + 2, .n = n > 2 ? n - 3 : 0, .to = to};
    if (!r.of) return;
    opt_viewer before = opt_show_with((opt_viewer){take_section, take_table, &r});
    r.of->run(1, (char *[]){"--help"});
    opt_show_with(before);
}

int complete_line(const char *line, text *out) {
    words w = {0};
    candidates c = {0};
    int code = split(line, &w);
    if (!code && w.n > 1) complete_words(w.item, w.n, &c);
    if (!code) code = c.code;
    *out = c.out;
    mem_free(w.bytes);
    mem_free(w.item);
    return code;
}
