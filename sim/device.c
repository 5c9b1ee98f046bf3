#include "sim/device.h"
#include "base/err.h"
#include "base/text.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

/* "3.35TB" -> 3.35e12; negative if it is no number with a unit. */
static double parse_bytes(const char *s) {
    static const struct {
        const char *name;
        double bytes;
    } units[] = {{"kB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"TB", 1e12}, {"B", 1}};
    char number[64];
    size_t n = strlen(s);
    for (size_t k = 0; k < sizeof units / sizeof *units; k++) {
        size_t unit = strlen(units[k].name);
        double x;
        if (n <= unit || n >= sizeof number || strcmp(s + n - unit, units[k].name) != 0) continue;
        snprintf(number, sizeof number, "%.*s", (int)(n - unit), s);
        return text_parse_number(number, &x) == 0 && isfinite(x * units[k].bytes) ? x * units[k].bytes : -1;
    }
    return -1;
}

static int parse_hbm(const char *value, device *out) {
    size_t n = strlen(value);
    char rate[64] = "";
    if (n > 2 && n < sizeof rate && strcmp(value + n - 2, "/s") == 0)
        snprintf(rate, sizeof rate, "%.*s", (int)(n - 2), value);
    out->hbm = parse_bytes(rate);
    if (out->hbm > 0) return 0;
    return err_set(ERR_USAGE,
                   "--device: hbm=%s is no bandwidth above 0 (a number, B, kB, MB, GB or TB, and /s, such as 3.35TB/s)",
                   value);
}

static int parse_weights(const char *value, device *out) {
    out->weights = parse_bytes(value);
    if (out->weights >= 0) return 0;
    return err_set(ERR_USAGE, "--device: weights=%s is no size (a number and B, kB, MB, GB or TB, such as 270MB)",
                   value);
}

/* One KEY=VALUE. */
static int parse_item(const char *item, device *out, bool given[2]) {
    static const char *const names[2] = {"hbm", "weights"};
    size_t n = strcspn(item, "=");
    for (int k = 0; k < 2; k++) {
        if (strlen(names[k]) != n || strncmp(names[k], item, n) != 0 || !item[n]) continue;
        if (given[k]) return err_set(ERR_USAGE, "--device: %s is given twice", names[k]);
        given[k] = true;
        return k == 0 ? parse_hbm(item + n + 1, out) : parse_weights(item + n + 1, out);
    }
    return err_set(ERR_USAGE, "--device: '%s' is not one of hbm=BYTES/s, weights=BYTES", item);
}

int device_parse(const char *source, device *out) {
    bool given[2] = {false, false};
    char item[64];
    *out = (device){0};
    for (const char *s = source;; s++) {
        size_t n = strcspn(s, ",");
        if (n >= sizeof item) return err_set(ERR_USAGE, "--device: '%.*s...' is too long", 40, s);
        snprintf(item, sizeof item, "%.*s", (int)n, s);
        TRY(parse_item(item, out, given));
        s += n;
        if (!*s) break;
    }
    return given[0] ? 0 : err_set(ERR_USAGE, "--device '%s': hbm is missing (such as hbm=3.35TB/s)", source);
}

double device_decode_us(const device *d, double kv_bytes) {
    return (kv_bytes + d->weights) / d->hbm * 1e6;
}
