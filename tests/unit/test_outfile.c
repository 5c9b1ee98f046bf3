/* Output files: what happens to a name that somebody else takes while a file is being written. */
#include "base/err.h"
#include "base/outfile.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static char path[64];

static void put(const char *content) {
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_true(fputs(content, f) >= 0);
    assert_int_equal(fclose(f), 0);
}

static void expect_content(const char *want) {
    char got[32] = "";
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    got[fread(got, 1, sizeof got - 1, f)] = 0;
    fclose(f);
    assert_string_equal(got, want);
}

static void begin(outfile *f, bool force) {
    assert_int_equal(outfile_begin(f, path, force, NULL, 0), 0);
    assert_int_equal(outfile_write(f, "ours", 4), 0);
}

static void a_name_taken_meanwhile(void **state) {
    (void)state;
    outfile f;
    char temp[128];
    begin(&f, false);
    snprintf(temp, sizeof temp, "%s", f.temp);
    put("theirs");
    assert_int_equal(outfile_commit(&f), ERR_DATA);
    assert_non_null(strstr(err_message(), "another process wrote it meanwhile"));
    expect_content("theirs");
    assert_int_not_equal(access(temp, F_OK), 0);
}

static void a_name_taken_meanwhile_and_force(void **state) {
    (void)state;
    outfile f;
    begin(&f, true);
    put("theirs");
    assert_int_equal(outfile_commit(&f), 0);
    expect_content("ours");
}

static void a_free_name(void **state) {
    (void)state;
    outfile f;
    begin(&f, false);
    assert_int_not_equal(access(path, F_OK), 0);
    assert_int_equal(outfile_commit(&f), 0);
    expect_content("ours");
}

static int remove_file(void **state) {
    (void)state;
    return unlink(path);
}

int main(void) {
    snprintf(path, sizeof path, "/tmp/kvlag_outfile_%ld", (long)getpid());
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(a_name_taken_meanwhile, remove_file),
        cmocka_unit_test_teardown(a_name_taken_meanwhile_and_force, remove_file),
        cmocka_unit_test_teardown(a_free_name, remove_file),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
