#include "base/options.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/prose.h"
#include "base/text.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HELP_COLUMN = 38 };
#define WORD_ENDS "|, "

/* Which rows of the last parsed table were given, for opt_given and opt_command. One command line per process. */
static bool given[OPT_MOST];

void opt_list_free(opt_list *list) {
    mem_free(list->item);
    *list = (opt_list){0};
}

static int push(opt_list *list, const char *word) {
    TRY(mem_grow((void **)&list->item, &list->capacity, list->n + 1, sizeof *list->item, "arguments"));
    list->item[list->n++] = word;
    return 0;
}

static size_t table_size(const opt *table) {
    size_t n = 0;
    while (table[n].name) n++;
    return n;
}

static size_t edit_distance(const char *a, const char *b) {
    size_t row[64], la = strlen(a), lb = strlen(b);
    if (la > 60 || lb > 60) return 99;
    for (size_t j = 0; j <= lb; j++) row[j] = j;
    for (size_t i = 1; i <= la; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= lb; j++) {
            size_t best = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            if (row[j] + 1 < best) best = row[j] + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            row[j] = best;
        }
    }
    return row[lb];
}

const char *opt_nearest(const char *word, const char *const *names, size_t n) {
    const char *best = NULL;
    size_t best_distance = 1 + strlen(word) / 3;
    for (size_t i = 0; i < n; i++) {
        size_t d = edit_distance(word, names[i]);
        if (d <= best_distance && (!best || d < best_distance)) {
            best = names[i];
            best_distance = d;
        }
    }
    return best;
}

static const char *nearest_option(const opt *table, const char *word, const char *also) {
    const char *names[OPT_MOST + 1];
    size_t n = table_size(table);
    for (size_t i = 0; i < n; i++) names[i] = table[i].name;
    if (also) names[n++] = also;
    return opt_nearest(word, names, n);
}

static int unknown(const opt *table, const char *word) {
    const char *near = nearest_option(table, word, "help");
    if (near) return err_set(ERR_USAGE, "unknown option '--%s' (did you mean --%s?)", word, near);
    return err_set(ERR_USAGE, "unknown option '%s%s' (see kvlag help)", strlen(word) == 1 ? "-" : "--", word);
}

int opt_unknown(const opt *table, const char *kind, const char *name) {
    const char *near = nearest_option(table, name, NULL);
    return err_set(ERR_USAGE, "unknown %s'%s'%s%s%s", kind, name, near ? " (did you mean " : "", near ? near : "",
                   near ? "?)" : "");
}

static int set_number(const opt *o, const char *value) {
    char *end;
    errno = 0;
    long long x = strtoll(value, &end, 10), unit = 1;
    if (o->kind == OPT_SIZE && *end) {
        const char *units = "KMG", *u = strchr(units, toupper((unsigned char)*end));
        if (u) {
            unit = 1LL << (10 * (u - units + 1));
            end++;
            if ((end[0] | 0x20) == 'b' || (end[0] == 'i' && end[1] == 'B')) end += end[0] == 'i' ? 2 : 1;
        }
    }
    if (end == value || *end || isspace((unsigned char)value[0]))
        return err_set(ERR_USAGE, "--%s: '%s' is not a whole number", o->name, value);
    if (errno || __builtin_mul_overflow(x, unit, &x) || x < o->min || x > o->max)
        return err_set(ERR_USAGE, "--%s: %s is out of range (%lld to %lld)", o->name, value, o->min, o->max);
    *(long long *)o->target = x;
    return 0;
}

/* Is `word` [n] among `words`, "a|b|c" or "a,b,c"? */
static bool is_among(const char *words, char separator, const char *word, size_t n) {
    for (const char *c = words; c; c = strchr(c, separator) ? strchr(c, separator) + 1 : NULL)
        if (n && strncmp(c, word, n) == 0 && (c[n] == separator || c[n] == 0)) return true;
    return false;
}

bool opt_has_word(const char *list, const char *word) {
    return list && is_among(list, ',', word, strlen(word));
}

const char *opt_did_you_mean(const char *words, const char *word, size_t n, char out[OPT_HINT]) {
    enum { MOST = 64 };
    char typed[64], key[MOST][32];
    const char *keys[MOST], *whole[MOST];
    size_t count = 0, colon = strcspn(word, ":");
    snprintf(typed, sizeof typed, "%.*s", (int)(colon < n ? colon : n), word);
    for (const char *c = words; *c && count < MOST; c += strcspn(c, WORD_ENDS)) {
        c += strspn(c, WORD_ENDS);
        snprintf(key[count], sizeof key[count], "%.*s", (int)strcspn(c, ":" WORD_ENDS), c);
        whole[count] = c;
        keys[count] = key[count];
        count++;
    }
    const char *near = opt_nearest(typed, keys, count);
    *out = 0;
    for (size_t i = 0; i < count && near; i++)
        if (near == keys[i])
            snprintf(out, OPT_HINT, " (did you mean %.*s?)", (int)strcspn(whole[i], WORD_ENDS), whole[i]);
    return out;
}

static int set_choice(const opt *o, const char *value) {
    char hint[OPT_HINT];
    size_t n = strlen(value);
    if (!is_among(o->arg, '|', value, n))
        return err_set(ERR_USAGE, "--%s: '%s' is not one of %s%s", o->name, value, o->arg,
                       opt_did_you_mean(o->arg, value, n, hint));
    *(const char **)o->target = value;
    return 0;
}

static int set_words(const opt *o, const char *value) {
    char hint[OPT_HINT];
    for (const char *word = value;; word++) {
        size_t n = strcspn(word, ",");
        if (!is_among(o->arg, ',', word, n))
            return err_set(ERR_USAGE, "--%s: '%.*s' is not one of %s%s", o->name, (int)n, word, o->arg,
                           opt_did_you_mean(o->arg, word, n, hint));
        word += n;
        if (!*word) break;
    }
    *(const char **)o->target = value;
    return 0;
}

static int set_value(const opt *table, const opt *o, const char *value) {
    bool again = given[o - table];
    given[o - table] = true;
    if (o->kind == OPT_LIST || o->kind == OPT_FILES) return push(o->target, value);
    if (again) return err_set(ERR_USAGE, "--%s is given twice", o->name);
    if (o->kind == OPT_INT || o->kind == OPT_SIZE) return set_number(o, value);
    if (o->kind == OPT_CHOICE) return set_choice(o, value);
    if (o->kind == OPT_WORDS) return set_words(o, value);
    *(const char **)o->target = value;
    return 0;
}

const opt *opt_find(const opt *table, const char *name) {
    const opt *o = table;
    while (o->name && strcmp(o->name, name) != 0) o++;
    return o->name ? o : NULL;
}

int opt_set(const opt *table, const opt *row, const char *value) {
    if (row->kind != OPT_FLAG) return set_value(table, row, value);
    bool on = strcmp(value, "true") == 0;
    if (!on && strcmp(value, "false") != 0)
        return err_set(ERR_USAGE, "%s: '%s' is not true or false", row->name, value);
    given[row - table] |= on;
    *(bool *)row->target = on;
    return 0;
}

/* ---- help ------------------------------------------------------------------------------------------------------- */

const char *opt_value_name(const opt *o) {
    return o->kind == OPT_WORDS ? "LIST" : o->arg;
}

int opt_explain(const opt *o, text *out) {
    TRY(text_add(out, "%s", o->help));
    if (o->kind != OPT_WORDS) return 0;
    for (const char *c = o->arg; *c; c += strcspn(c, ","), c += *c == ',')
        TRY(text_add(out, "%s%.*s", c == o->arg ? ": " : ", ", (int)strcspn(c, ","), c));
    return 0;
}

void opt_print_table(const opt *table) {
    for (const opt *o = table; o->name; o++) {
        text help = {0};
        char left[80], letter[4] = "   ";
        const char *value = opt_value_name(o);
        if (o->letter) snprintf(letter, sizeof letter, "-%c,", o->letter);
        snprintf(left, sizeof left, "%s --%s %s", letter, o->name, value ? value : "");
        int n = printf("  %s", left);
        if (n + 2 > HELP_COLUMN) n = printf("\n") - 1;
        printf("%*s", HELP_COLUMN - n, "");
        prose_print(opt_explain(o, &help) ? o->help : help.data, HELP_COLUMN);
        text_free(&help);
    }
}

static void print_section(void *context, const char *name, const char *about) {
    (void)context;
    printf("%s: %s\n", name, about);
}

static void print_table(void *context, const opt *table) {
    (void)context;
    opt_print_table(table);
}

static opt_viewer shown_by = {.section = print_section, .table = print_table};

opt_viewer opt_show_with(opt_viewer viewer) {
    opt_viewer before = shown_by;
    shown_by = viewer;
    return before;
}

void opt_section(const char *name, const char *about) {
    shown_by.section(shown_by.context, name, about);
}

static int help(const opt *table) {
    shown_by.table(shown_by.context, table);
    return OPT_HELPED;
}

/* ---- parsing ---------------------------------------------------------------------------------------------------- */

static int parse_long(const opt *table, int argc, char **argv, int *i) {
    const char *word = argv[*i] + 2, *equals = strchr(word, '=');
    size_t n = equals ? (size_t)(equals - word) : strlen(word);
    for (const opt *o = table; o->name; o++) {
        if (strlen(o->name) != n || strncmp(o->name, word, n) != 0) continue;
        if (o->kind == OPT_FLAG) {
            if (equals) return err_set(ERR_USAGE, "--%s takes no value", o->name);
            given[o - table] = true;
            *(bool *)o->target = true;
            return 0;
        }
        if (equals) return set_value(table, o, equals + 1);
        if (++*i >= argc) return err_set(ERR_USAGE, "--%s needs a value (%s)", o->name, o->arg);
        return set_value(table, o, argv[*i]);
    }
    char name[64];
    snprintf(name, sizeof name, "%.*s", (int)(n < 60 ? n : 60), word);
    return unknown(table, name);
}

static int parse_short(const opt *table, int argc, char **argv, int *i) {
    for (const char *c = argv[*i] + 1; *c; c++) {
        const opt *o = table;
        while (o->name && o->letter != *c) o++;
        if (!o->name && *c == 'h') return help(table);
        if (!o->name) return unknown(table, (char[]){*c, 0});
        if (o->kind == OPT_FLAG) {
            given[o - table] = true;
            *(bool *)o->target = true;
            continue;
        }
        if (c[1]) return set_value(table, o, c + 1);
        if (++*i >= argc) return err_set(ERR_USAGE, "-%c needs a value (%s)", *c, o->arg);
        return set_value(table, o, argv[*i]);
    }
    return 0;
}

int opt_parse(const opt *table, int argc, char **argv, opt_list *positional) {
    memset(given, 0, sizeof given);
    bool options = true;
    for (int i = 0; i < argc; i++) {
        const char *a = argv[i];
        if (options && strcmp(a, "--help") == 0) return help(table);
        if (options && strcmp(a, "--") == 0) options = false;
        else if (options && a[0] == '-' && a[1] == '-') TRY(parse_long(table, argc, argv, &i));
        else if (options && a[0] == '-' && a[1]) TRY(parse_short(table, argc, argv, &i));
        else TRY(push(positional, a));
    }
    return 0;
}

bool opt_given(const opt *table, const void *target) {
    for (const opt *o = table; o->name; o++)
        if (o->target == target) return given[o - table];
    return false;
}

static int add_option(text *t, const opt *o, const char *value) {
    if (o->letter) TRY(text_add(t, " -%c", o->letter));
    else TRY(text_add(t, " --%s", o->name));
    if (!value) return 0;
    TRY(text_add(t, " "));
    return text_add_shell(t, value);
}

char *opt_command(const char *command, const opt *table, const opt_list *positional) {
    text t = {0};
    int bad = text_add(&t, "kvlag %s", command);
    for (size_t i = 0; i < positional->n && !bad; i++) {
        bad = text_add(&t, " ");
        if (!bad) bad = text_add_shell(&t, text_base_name(positional->item[i]));
    }
    for (const opt *o = table; o->name && !bad; o++) {
        if (!o->recorded || !given[o - table]) continue;
        char number[32];
        if (o->kind == OPT_LIST || o->kind == OPT_FILES) {
            const opt_list *list = o->target;
            for (size_t i = 0; i < list->n && !bad; i++)
                bad = add_option(&t, o, o->kind == OPT_FILES ? text_base_name(list->item[i]) : list->item[i]);
        } else if (o->kind == OPT_FLAG) {
            bad = add_option(&t, o, NULL);
        } else if (o->kind == OPT_INT || o->kind == OPT_SIZE) {
            snprintf(number, sizeof number, "%lld", *(long long *)o->target);
            bad = add_option(&t, o, number);
        } else {
            const char *value = *(const char **)o->target;
            bad = add_option(&t, o, o->kind == OPT_FILE ? text_base_name(value) : value);
        }
    }
    if (!bad) return t.data;
    text_free(&t);
    return NULL;
}
