/* The contract of policies, as far as it is checked: every built-in policy keeps it, and each breach is found. */
#include "base/err.h"
#include "sim/policy_check.h"
#include "sim/registry.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static unsigned init_needs;
static int init_code, n_fields;
static double init_horizon;

static int init(policy_setup *s) {
    s->needs = init_needs;
    s->horizon = init_horizon;
    return init_code;
}
static int fields(const policy_setup *s) {
    (void)s;
    return n_fields;
}
static void observe(const policy_setup *s, const policy_view *v) {
    (void)s;
    (void)v;
}
static const double *score(const policy_setup *s, const policy_view *v, double *scratch) {
    (void)s;
    (void)v;
    return scratch;
}

/* One parameter of its own, in front of the guards. */
static policy_param params[] = {{.name = "x"}, POLICY_GUARDS("0", "1", "head", "")};
enum { N_PARAMS = sizeof params / sizeof *params };
static const policy_param good_param = {
    .name = "x", .type = PARAM_NUMBER, .initial = "0.5", .max = 1, .help = "a number"};

static policy good(void) {
    static const policy_param guards[] = {POLICY_GUARDS("0", "1", "head", "")};
    params[0] = good_param;
    memcpy(params + 1, guards, sizeof guards);
    return (policy){.abi = POLICY_ABI,
                    .name = "good-1",
                    .help = "nothing but a test",
                    .source = "none",
                    .family = FAMILY_STATIC,
                    .params = params,
                    .init = init,
                    .fields = fields,
                    .observe = observe,
                    .score = score};
}

static void refused(const policy *p, const char *words) {
    assert_int_equal(policy_check(p), ERR_DATA);
    if (!strstr(err_message(), words)) fail_msg("'%s' is not in: %s", words, err_message());
}

static void built_in_policies_keep_the_contract(void **state) {
    (void)state;
    assert_true(policy_count() > 40);
    for (size_t i = 0; i < policy_count(); i++) {
        int code = policy_check(policy_at(i));
        bool keeps_everything = !policy_at(i)->params[0].name;
        if (!keeps_everything && code) fail_msg("%s", err_message());
        if (keeps_everything) assert_int_equal(code, ERR_DATA);
        assert_false(registry_is_added(policy_at(i)));
    }
}

static void a_good_one_passes(void **state) {
    (void)state;
    policy p = good();
    if (policy_check(&p)) fail_msg("%s", err_message());
    p.evidence = "attn";
    p.memory = "sum";
    params[0].initial = NULL; /* must be given */
    assert_int_equal(policy_check(&p), 0);
    params[0].initial = ""; /* none */
    assert_int_equal(policy_check(&p), 0);
}

#define BREACH(words, ...)  \
    do {                    \
        policy p = good();  \
        __VA_ARGS__;        \
        refused(&p, words); \
    } while (0)

static void breaches_are_named(void **state) {
    (void)state;
    char longest[500];
    memset(longest, 'a', sizeof longest);
    longest[sizeof longest - 1] = 0;
    BREACH("version 1 of the contract", p.abi = 1);
    BREACH("a policy's name", p.name = NULL);
    BREACH("a policy's name", p.name = "");
    BREACH("a policy's name", p.name = "Lrfu");
    BREACH("a policy's name", p.name = "a(b)");
    BREACH("a policy's name", p.name = "1st");
    BREACH("a policy's name", p.name = longest);
    BREACH("no line of help", p.help = NULL);
    BREACH("no line of help", p.help = "two\nlines");
    BREACH("no line of help", p.help = longest);
    BREACH("names no source", p.source = "");
    BREACH("family does not exist (4)", p.family = (policy_family)4);
    BREACH("of its axes, the evidence is empty", p.memory = "sum");
    BREACH("of its axes, the evidence is empty", p.evidence = "");
    BREACH("of its axes, the memory is empty", p.evidence = "attn"; p.memory = "");
    BREACH("no function 'init'", p.init = NULL);
    BREACH("no function 'fields'", p.fields = NULL);
    BREACH("no function 'observe'", p.observe = NULL);
    BREACH("no function 'score'", p.score = NULL);
    BREACH("no list of parameters", p.params = NULL);
    BREACH("'sinks', which every policy has, is missing", p.params = params + N_PARAMS - 1);
}

static void breaches_of_parameters_are_named(void **state) {
    (void)state;
    BREACH("the name of parameter 0", params[0].name = "a-b");
    BREACH("the alias of 'x'", params[0].alias = "X");
    BREACH("two parameters are called 'sinks'", params[0].name = "sinks");
    BREACH("two parameters are called 'hold'", params[0].alias = "recent");
    BREACH("a type that does not exist", params[0].type = (param_type)6);
    BREACH("'x' has no line of help", params[0].help = NULL);
    BREACH("the words of 'x'", params[0].type = PARAM_WORD);
    BREACH("the words of 'x'", params[0].type = PARAM_WORD; params[0].words = "a||b");
    BREACH("the words of 'x'", params[0].type = PARAM_WORD; params[0].words = "a|b,c");
    BREACH("x=0.5 is not one of a|b", params[0].type = PARAM_WORD; params[0].words = "a|b");
    BREACH("lies between 0 and -1", params[0].max = -1);
    BREACH("lies between 0 and nan", params[0].max = NAN);
    BREACH("out of range (0 to 0.25)", params[0].max = 0.25);
    BREACH("is spelt '.50', want '0.5'", params[0].initial = ".50");
    BREACH("'unit', which every policy has, is of another kind", params[5].words = "head|layer");
    BREACH("'hold', which every policy has, is of another kind", params[2].type = PARAM_NUMBER);
    policy p = good();
    policy_param many[POLICY_PARAMS_MAX + 2] = {{.name = NULL}};
    char names[POLICY_PARAMS_MAX + 1][8];
    for (int i = 0; i <= POLICY_PARAMS_MAX; i++) {
        snprintf(names[i], sizeof names[i], "p%d", i);
        many[i] = good_param;
        many[i].name = names[i];
    }
    p.params = many;
    refused(&p, "more than 24 parameters");
}

static void names_that_are_taken(void **state) {
    (void)state;
    static policy taken, wrapped, none;
    taken = wrapped = none = good();
    taken.name = "h2o";
    wrapped.name = "ada";
    none.name = "none";
    size_t before = policy_count();
    assert_int_equal(registry_add(&taken), ERR_DATA);
    assert_non_null(strstr(err_message(), "h2o: the name is taken"));
    assert_int_equal(registry_add(&wrapped), ERR_DATA);
    assert_non_null(strstr(err_message(), "ada: the name has a meaning"));
    assert_int_equal(registry_add(&none), ERR_DATA);
    assert_int_equal(policy_count(), before);
}

static void what_is_added_is_found(void **state) {
    (void)state;
    static policy many[REGISTRY_ADDED_MAX + 1];
    static char names[REGISTRY_ADDED_MAX + 1][16];
    size_t before = policy_count();
    assert_null(policy_find("extra-0"));
    for (int i = 0; i <= REGISTRY_ADDED_MAX; i++) {
        many[i] = good();
        many[i].name = names[i];
        snprintf(names[i], sizeof names[i], "extra-%d", i);
        assert_int_equal(registry_add(&many[i]), i < REGISTRY_ADDED_MAX ? 0 : ERR_DATA);
    }
    assert_int_equal(policy_count(), before + REGISTRY_ADDED_MAX);
    assert_ptr_equal(policy_find("extra-0"), &many[0]);
    assert_ptr_equal(policy_at(before + 63), &many[63]);
    assert_true(registry_is_added(&many[63]));
    assert_false(registry_is_added(&many[64]));
    assert_int_equal(registry_add(&many[0]), ERR_DATA);
    assert_null(policy_find("extra-99"));
    assert_non_null(strstr(err_message(), "did you mean extra-9?"));
}

static void set_up(const char *words) {
    policy p = good();
    policy_setup s = {.policy = &p};
    int code = policy_set_up(&s);
    assert_int_equal(code, words ? (init_code > 0 ? ERR_USAGE : ERR_DATA) : 0);
    if (words && !strstr(err_message(), words)) fail_msg("'%s' is not in: %s", words, err_message());
}

static void setting_up_is_checked(void **state) {
    (void)state;
    set_up(NULL);
    init_needs = NEEDS_ROPE | NEEDS_ROW;
    set_up(NULL);
    init_needs = 8192;
    set_up("something that does not exist");
    init_needs = NEEDS_FUTURE;
    init_horizon = NAN;
    set_up("looks nan rows ahead");
    init_needs = 0;
    n_fields = -1;
    set_up("keeps -1 fields");
    n_fields = 70000;
    set_up("keeps 70000 fields");
    n_fields = 0;
    init_code = 7; /* no code of ours, and no message */
    set_up("good-1 refuses its parameters");
    init_code = 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(built_in_policies_keep_the_contract),
        cmocka_unit_test(a_good_one_passes),
        cmocka_unit_test(breaches_are_named),
        cmocka_unit_test(breaches_of_parameters_are_named),
        cmocka_unit_test(names_that_are_taken),
        cmocka_unit_test(setting_up_is_checked),
        cmocka_unit_test(what_is_added_is_found),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
