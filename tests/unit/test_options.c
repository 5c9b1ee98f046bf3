/* Tables of options: what is accepted, what is recorded, which one was meant; and how text is filled and broken. */
#include "base/err.h"
#include "base/mem.h"
#include "base/options.h"
#include "base/prose.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

typedef struct targets {
    const char *out, *unit, *words, *text;
    long long n, size;
    bool flag, other;
    opt_list list, files, rest;
} targets;

#define TABLE(t)                                                                             \
    {                                                                                        \
        {"output", 'o', OPT_FILE, true, &(t).out, "FILE", "where", 0, 0},                    \
            {"unit", 'u', OPT_CHOICE, true, &(t).unit, "head|layer|model", "what", 0, 0},    \
            {"words", 0, OPT_WORDS, true, &(t).words, "one,two,three=exact", "which", 0, 0}, \
            {"text", 0, OPT_TEXT, false, &(t).text, "S", "text", 0, 0},                      \
            {"number", 'n', OPT_INT, true, &(t).n, "N", "number", 0, 100},                   \
            {"size", 0, OPT_SIZE, true, &(t).size, "N", "size", 0, 1LL << 40},               \
            {"flag", 'f', OPT_FLAG, true, &(t).flag, NULL, "flag", 0, 0},                    \
            {"other", 'g', OPT_FLAG, false, &(t).other, NULL, "flag", 0, 0},                 \
            {"list", 'l', OPT_LIST, true, &(t).list, "X", "list", 0, 0},                     \
            {"file", 0, OPT_FILES, true, &(t).files, "FILE", "files", 0, 0}, {.name = NULL}, \
    }

static int parse(targets *t, const char *line, char *copy) {
    char *argv[32], *word;
    int argc = 0;
    strcpy(copy, line);
    while ((word = strsep(&copy, " "))) argv[argc++] = word;
    *t = (targets){0};
    const opt table[] = TABLE(*t);
    return opt_parse(table, *line ? argc : 0, argv, &t->rest);
}

static void release(targets *t) {
    opt_list_free(&t->list);
    opt_list_free(&t->files);
    opt_list_free(&t->rest);
}

static void test_forms(void **state) {
    (void)state;
    targets t;
    char copy[256];
    assert_int_equal(parse(&t, "a --output=x -u layer -n5 -fg --size 2K -l 1 b -l2 --words two,one -- -c", copy), 0);
    assert_string_equal(t.out, "x");
    assert_string_equal(t.unit, "layer");
    assert_string_equal(t.words, "two,one");
    assert_true(t.n == 5 && t.size == 2048 && t.flag && t.other);
    assert_true(t.list.n == 2 && t.rest.n == 3);
    assert_string_equal(t.list.item[1], "2");
    assert_string_equal(t.rest.item[2], "-c");
    assert_true(opt_has_word(t.words, "one") && !opt_has_word(t.words, "on") && !opt_has_word(NULL, "one"));
    release(&t);
}

static void test_recorded(void **state) {
    (void)state;
    targets t;
    char copy[256];
    assert_int_equal(parse(&t, "dir/a.h5 -l x(1|2) --file d/p.so --file q.so -f -g --text t -n 7 -o sub/r.csv", copy),
                     0);
    const opt table[] = TABLE(t);
    char *command = opt_command("do", table, &t.rest);
    assert_string_equal(command, "kvlag do a.h5 -o r.csv -n 7 -f -l 'x(1|2)' --file p.so --file q.so");
    mem_free(command);
    assert_true(opt_given(table, &t.n) && !opt_given(table, &t.size));
    release(&t);
}

static void refuses(const char *line, const char *message) {
    targets t;
    char copy[256];
    assert_int_equal(parse(&t, line, copy), ERR_USAGE);
    assert_string_equal(err_message(), message);
    release(&t);
}

static void test_refusals(void **state) {
    (void)state;
    refuses("--ouput x", "unknown option '--ouput' (did you mean --output?)");
    refuses("--zzzzzzz", "unknown option '--zzzzzzz' (see kvlag help)");
    refuses("-z", "unknown option '-z' (see kvlag help)");
    refuses("--unit haed", "--unit: 'haed' is not one of head|layer|model (did you mean head?)");
    refuses("--unit hea", "--unit: 'hea' is not one of head|layer|model (did you mean head?)");
    refuses("--unit xyzzy", "--unit: 'xyzzy' is not one of head|layer|model");
    refuses("--unit=", "--unit: '' is not one of head|layer|model");
    refuses("--words one,tow", "--words: 'tow' is not one of one,two,three=exact (did you mean two?)");
    refuses("--words one,", "--words: '' is not one of one,two,three=exact");
    refuses("--words three", "--words: 'three' is not one of one,two,three=exact");
    refuses("-n 101", "--number: 101 is out of range (0 to 100)");
    refuses("-n 1x", "--number: '1x' is not a whole number");
    refuses("-n 1 --number 2", "--number is given twice");
    refuses("--output", "--output needs a value (FILE)");
    refuses("--flag=yes", "--flag takes no value");
}

static void test_set(void **state) {
    (void)state;
    targets t;
    char copy[8];
    assert_int_equal(parse(&t, "", copy), 0);
    const opt table[] = TABLE(t);
    assert_int_equal(opt_set(table, opt_find(table, "flag"), "false"), 0);
    assert_true(!t.flag && !opt_given(table, &t.flag));
    assert_int_equal(opt_set(table, opt_find(table, "flag"), "true"), 0);
    assert_true(t.flag && opt_given(table, &t.flag));
    assert_int_equal(opt_set(table, opt_find(table, "flag"), "yes"), ERR_USAGE);
    assert_int_equal(opt_set(table, opt_find(table, "list"), "a"), 0);
    assert_int_equal(opt_set(table, opt_find(table, "list"), "b"), 0);
    assert_int_equal((int)t.list.n, 2);
    assert_null(opt_find(table, "lis"));
    assert_int_equal(opt_unknown(table, "key ", "lst"), ERR_USAGE);
    assert_string_equal(err_message(), "unknown key 'lst' (did you mean list?)");
    release(&t);
}

static void test_hints(void **state) {
    (void)state;
    char hint[OPT_HINT];
    assert_string_equal(opt_did_you_mean("step|every:P|prompt", "evry:8", 6, hint), " (did you mean every:P?)");
    assert_string_equal(opt_did_you_mean("sum, mean, ema:A", "emma:0.5", 8, hint), " (did you mean ema:A?)");
    assert_string_equal(opt_did_you_mean("sum, mean, ema:A", "meanxx", 4, hint), " (did you mean mean?)");
    assert_string_equal(opt_did_you_mean("sum, mean", "position", 8, hint), "");
    assert_string_equal(opt_did_you_mean("", "x", 1, hint), "");
}

static void see_section(void *context, const char *name, const char *help) {
    snprintf(context, 64, "%s/%s", name, help);
}

static void see_table(void *context, const opt *table) {
    size_t n = strlen(context);
    snprintf((char *)context + n, 64 - n, "+%s", table[1].name);
}

static void test_viewer(void **state) {
    (void)state;
    char shown[64] = "";
    targets t;
    char copy[64];
    opt_viewer before = opt_show_with((opt_viewer){see_section, see_table, shown});
    opt_section("a", "b");
    assert_int_equal(parse(&t, "x --words one --help --nonsense", copy), OPT_HELPED);
    release(&t);
    assert_int_equal(parse(&t, "-fh", copy), OPT_HELPED);
    release(&t);
    opt_show_with(before);
    assert_string_equal(shown, "a/b+unit+unit");
    const opt table[] = TABLE(t);
    text help = {0};
    assert_int_equal(opt_explain(&table[2], &help), 0);
    assert_string_equal(help.data, "which: one, two, three=exact");
    assert_string_equal(opt_value_name(&table[2]), "LIST");
    assert_null(opt_value_name(opt_find(table, "flag")));
    text_free(&help);
}

/* A command is broken before an option, else before a word, never within quotes. */
static void test_commands(void **state) {
    (void)state;
    assert_int_equal(prose_command_line("run a -b c", 10), 10);
    assert_int_equal(prose_command_line("run a -b c", 9), 5);
    assert_int_equal(prose_command_line("run 'a -b' -c", 12), 10);
    assert_int_equal(prose_command_line("run aaaa bbbb", 11), 8);
    assert_int_equal(prose_command_line("'quoted all of it'", 9), 18);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forms),    cmocka_unit_test(test_recorded), cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_set),      cmocka_unit_test(test_hints),    cmocka_unit_test(test_viewer),
        cmocka_unit_test(test_commands),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
