/* What a configuration costs beside loss: the device's model and the entries that decoding reads, by hand. */
#include "base/err.h"
#include "sim/device.h"
#include "sim/footprint.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static device parsed(const char *source) {
    device d;
    if (device_parse(source, &d)) fail_msg("%s", err_message());
    return d;
}

static void units_are_decimal(void **state) {
    (void)state;
    device d = parsed("hbm=3.35TB/s");
    assert_true(fabs(d.hbm - 3.35e12) <= 1);
    assert_true(d.weights == 0);
    d = parsed("weights=270MB,hbm=900GB/s");
    assert_true(d.hbm == 900e9 && d.weights == 270e6);
    d = parsed("hbm=1e3kB/s,weights=12B");
    assert_true(d.hbm == 1e6 && d.weights == 12);
    assert_true(parsed("hbm=7B/s,weights=0GB").hbm == 7);
}

/* 30 MB of keys and values and 270 MB of weights at 3 TB/s take 100 us. */
static void bytes_become_time(void **state) {
    (void)state;
    device d = parsed("hbm=3TB/s,weights=270MB");
    assert_true(fabs(device_decode_us(&d, 30e6) - 100) <= 1e-9);
    d = parsed("hbm=2MB/s");
    assert_true(fabs(device_decode_us(&d, 1) - 0.5) <= 1e-12);
}

static void refuse(const char *source, const char *what) {
    device d;
    assert_int_equal(device_parse(source, &d), ERR_USAGE);
    if (!strstr(err_message(), what)) fail_msg("'%s' says: %s", source, err_message());
}

static void what_is_wrong_is_named(void **state) {
    (void)state;
    refuse("", "'' is not one of hbm=BYTES/s, weights=BYTES");
    refuse("hbm", "'hbm' is not one of");
    refuse("HBM=1TB/s", "'HBM=1TB/s' is not one of");
    refuse("hbm=1TB/s,", "'' is not one of");
    refuse("hbm=1TB/s,clock=2", "'clock=2' is not one of");
    refuse("hbm=1TB/s,hbm=2TB/s", "hbm is given twice");
    refuse("weights=1GB", "hbm is missing");
    const char *const no_bandwidth[] = {"",       "1",       "1TB",       "TB/s",   "/s",     "3.35 TB/s",
                                        "1KB/s",  "1TiB/s",  "1tb/s",     "0TB/s",  "-1TB/s", "nanB/s",
                                        "infB/s", "1TB/s/s", "1e300TB/s", "0x1TB/s"};
    for (size_t i = 0; i < sizeof no_bandwidth / sizeof *no_bandwidth; i++) {
        char source[64] = "hbm=";
        strcat(source, no_bandwidth[i]);
        refuse(source, source);
        assert_non_null(strstr(err_message(), "is no bandwidth above 0"));
    }
    refuse("hbm=1TB/s,weights=1GB/s", "weights=1GB/s is no size");
    refuse("hbm=1TB/s,weights=-1GB", "weights=-1GB is no size");
    refuse("hbm=1TB/s,weights=", "weights= is no size");
    refuse("hbm=1000000000000000000000000000000000000000000000000000000000000000000TB/s", "too long");
}

/* Four steps, entry 0 leaves before step 3, entry 1 before step 2: the steps see 1, 2, 2, 2 entries. */
static void decoding_begins_after_the_prompt(void **state) {
    (void)state;
    const int32_t evict_at[] = {3, 2, 5, 5};
    const double decoded[] = {7, 6, 4, 2};
    int32_t scratch[6];
    for (int32_t n_prompt = 0; n_prompt < 4; n_prompt++) {
        footprint f = {0};
        footprint_add(&f, evict_at, 4, n_prompt, 0, 0, NULL, 0, scratch);
        assert_true(f.visible == 7 && f.decoded == decoded[n_prompt]);
        footprint_add(&f, evict_at, 4, n_prompt, 0, 0, NULL, 0, scratch);
        assert_true(f.decoded == 2 * decoded[n_prompt] && f.units == 2);
    }
}

/* Five steps, window 2: entry i is out of reach from step i+2. In `plain` entry 1 is evicted before that, entries 0 and
 * 2 expire although their lifetimes do not say so, 3 and 4 are in reach to the end. `windowed` says it, and entry 3
 * leaves after the last step, where its window would close too: that counts as expired. In `late` only entry 4 is
 * evicted. */
static void what_leaves_a_window_is_not_evicted(void **state) {
    (void)state;
    const int32_t windowed[] = {2, 2, 4, 5, 6}, plain[] = {6, 2, 6, 6, 6}, late[] = {2, 3, 4, 6, 5};
    int32_t scratch[7];
    footprint f = {0};
    footprint_add(&f, windowed, 5, 0, 2, 0, NULL, 0, scratch);
    assert_true(f.evictions == 1 && f.batches == 1 && f.expired == 3 && f.peak == 2);
    f = (footprint){0};
    footprint_add(&f, plain, 5, 0, 2, 0, NULL, 0, scratch);
    assert_true(f.evictions == 1 && f.expired == 2);
    footprint_add(&f, plain, 5, 0, 0, 0, NULL, 0, scratch);
    assert_true(f.evictions == 2 && f.expired == 2 && f.units == 2);
    f = (footprint){0};
    footprint_add(&f, late, 5, 0, 2, 0, NULL, 0, scratch);
    assert_true(f.evictions == 1 && f.expired == 3);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(units_are_decimal),
        cmocka_unit_test(bytes_become_time),
        cmocka_unit_test(what_is_wrong_is_named),
        cmocka_unit_test(decoding_begins_after_the_prompt),
        cmocka_unit_test(what_leaves_a_window_is_not_evicted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
