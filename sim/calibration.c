#include "sim/calibration.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/outfile.h"
#include "base/student.h"
#include "base/text.h"
#include "sim/registry.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LEAST_POINTS = 6, FILE_BYTES_MAX = 1 << 20 };

/* ---- fitting ---------------------------------------------------------------------------------------------------- */

void calibration_none(calibration *out) {
    *out = (calibration){.is_default = true, .log_c = log(1.5), .s = log(1.5)};
    for (int f = 0; f < CALIBRATION_FAMILIES; f++) out->family[f].log_c = out->log_c;
}

static bool usable(const calibration_point *p) {
    return p->true_kl >= CALIBRATION_LEAST_KL && p->fisher > 0;
}

static double ratio(const calibration_point *p) {
    return log(p->true_kl / p->fisher);
}

/* Points of no known family form a group of their own. */
static int group(const calibration_point *p) {
    return p->family < 0 ? CALIBRATION_FAMILIES : p->family;
}

int calibration_fit(const calibration_point *points, size_t n, calibration *out) {
    double sum[CALIBRATION_FAMILIES + 1] = {0}, total = 0, squares = 0;
    int count[CALIBRATION_FAMILIES + 1] = {0}, groups = 0;
    *out = (calibration){0};
    for (size_t i = 0; i < n; i++) {
        if (!usable(&points[i])) continue;
        out->n++;
        total += ratio(&points[i]);
        sum[group(&points[i])] += ratio(&points[i]);
        count[group(&points[i])]++;
    }
    if (out->n < LEAST_POINTS)
        return err_set(ERR_DATA,
                       "calibration: %d reruns with a true KL of %g or more, %d are needed (more or smaller budgets)",
                       out->n, CALIBRATION_LEAST_KL, LEAST_POINTS);
    out->log_c = total / out->n;
    for (int g = 0; g <= CALIBRATION_FAMILIES; g++) groups += count[g] > 0;
    for (size_t i = 0; i < n; i++) {
        if (!usable(&points[i])) continue;
        int g = group(&points[i]);
        double off = ratio(&points[i]) - sum[g] / count[g];
        squares += off * off;
    }
    out->s = sqrt(squares / (out->n > groups ? out->n - groups : 1));
    for (int f = 0; f < CALIBRATION_FAMILIES; f++) {
        out->family[f].n = count[f];
        out->family[f].log_c = (sum[f] + 2 * out->log_c) / (count[f] + 2);
    }
    return 0;
}

/* ---- applying --------------------------------------------------------------------------------------------------- */

void calibration_apply(const calibration *c, int family, double fisher, double *est, double *lo, double *hi) {
    double log_c = family < 0 ? c->log_c : c->family[family].log_c;
    /* Without reruns nothing is known of s: take the normal quantile. */
    double width = c->is_default ? 1.6448536269514722 * c->s : student_95(c->n - 1) * c->s * sqrt(1 + 1.0 / c->n);
    *est = exp(log_c) * fisher;
    *lo = *est * exp(-width);
    *hi = *est * exp(width);
}

/* ---- files ------------------------------------------------------------------------------------------------------ */

static char *print(const calibration *c) {
    cJSON *o = cJSON_CreateObject(), *families = cJSON_CreateObject();
    cJSON_AddStringToObject(o, "format", "kvlag-calibration");
    cJSON_AddNumberToObject(o, "version", 1);
    cJSON_AddStringToObject(o, "model", c->model);
    cJSON_AddNumberToObject(o, "n_tokens", c->n_tokens);
    cJSON_AddStringToObject(o, "budgets", c->budgets);
    cJSON_AddNumberToObject(o, "n", c->n);
    cJSON_AddNumberToObject(o, "log_c", c->log_c);
    cJSON_AddNumberToObject(o, "s", c->s);
    cJSON_AddItemToObject(o, "families", families);
    for (int f = 0; f < CALIBRATION_FAMILIES; f++) {
        cJSON *one = cJSON_AddObjectToObject(families, policy_family_name((policy_family)f));
        cJSON_AddNumberToObject(one, "n", c->family[f].n);
        cJSON_AddNumberToObject(one, "log_c", c->family[f].log_c);
    }
    char *printed = cJSON_Print(o);
    cJSON_Delete(o);
    return printed;
}

int calibration_write(const char *path, bool force, const calibration *c) {
    outfile f;
    TRY(outfile_begin(&f, path, force, NULL, 0));
    char *printed = print(c);
    int code = printed ? outfile_write(&f, printed, strlen(printed)) : err_set(ERR_DATA, "%s: out of memory", path);
    free(printed);
    if (!code) return outfile_commit(&f);
    outfile_abort(&f);
    return code;
}

static int read_text(const char *path, char **out) {
    FILE *f = fopen(path, "rb");
    if (!f) return err_set(ERR_DATA, "%s: cannot be opened: %s", path, strerror(errno));
    *out = mem_new(FILE_BYTES_MAX + 1, 1, "calibration");
    size_t n = *out ? fread(*out, 1, FILE_BYTES_MAX + 1, f) : 0;
    bool good = *out && !ferror(f) && n <= FILE_BYTES_MAX;
    fclose(f);
    if (good) {
        (*out)[n] = 0;
        return 0;
    }
    if (!*out) return ERR_DATA;
    mem_free(*out);
    return err_set(ERR_DATA, "%s: cannot be read, or no calibration file", path);
}

static int number(const char *path, const cJSON *o, const char *key, double least, double most, double *out) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(o, key);
    if (!cJSON_IsNumber(item)) return err_set(ERR_DATA, "%s: '%s' is missing or no number", path, key);
    if (!(item->valuedouble >= least && item->valuedouble <= most))
        return err_set(ERR_DATA, "%s: '%s' is out of range (%g to %g)", path, key, least, most);
    *out = item->valuedouble;
    return 0;
}

static int string(const char *path, const cJSON *o, const char *key, char *out, size_t size) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(o, key);
    if (!cJSON_IsString(item)) return err_set(ERR_DATA, "%s: '%s' is missing or no text", path, key);
    snprintf(out, size, "%s", item->valuestring);
    return 0;
}

static int read_fields(const char *path, const cJSON *o, calibration *c) {
    char format[32];
    double x;
    TRY(string(path, o, "format", format, sizeof format));
    if (strcmp(format, "kvlag-calibration") != 0) return err_set(ERR_DATA, "%s: not a calibration file", path);
    TRY(number(path, o, "version", 1, 1, &x));
    TRY(string(path, o, "model", c->model, sizeof c->model));
    TRY(string(path, o, "budgets", c->budgets, sizeof c->budgets));
    TRY(number(path, o, "n_tokens", 0, 1e9, &x));
    c->n_tokens = (int32_t)x;
    TRY(number(path, o, "n", 2, 1e9, &x));
    c->n = (int)x;
    TRY(number(path, o, "log_c", -50, 50, &c->log_c));
    TRY(number(path, o, "s", 0, 50, &c->s));
    const cJSON *families = cJSON_GetObjectItemCaseSensitive(o, "families");
    for (int f = 0; f < CALIBRATION_FAMILIES; f++) {
        const cJSON *one = cJSON_GetObjectItemCaseSensitive(families, policy_family_name((policy_family)f));
        if (!cJSON_IsObject(one))
            return err_set(ERR_DATA, "%s: family '%s' is missing", path, policy_family_name((policy_family)f));
        TRY(number(path, one, "n", 0, 1e9, &x));
        c->family[f].n = (int)x;
        TRY(number(path, one, "log_c", -50, 50, &c->family[f].log_c));
    }
    return 0;
}

int calibration_read(const char *path, calibration *out) {
    char *content = NULL;
    *out = (calibration){0};
    TRY(read_text(path, &content));
    cJSON *o = cJSON_Parse(content);
    mem_free(content);
    int code = o ? read_fields(path, o, out) : err_set(ERR_DATA, "%s: not valid JSON", path);
    cJSON_Delete(o);
    return code;
}
