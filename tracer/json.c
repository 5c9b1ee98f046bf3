#include "tracer/json.h"
#include "base/err.h"
#include "base/utf8.h"

#include <string.h>

static bool holds_nul(const char *words) {
    for (const char *p = words; (p = strchr(p, '\\')) && p[1]; p += 2)
        if (strncmp(p, "\\u0000", 6) == 0) return true;
    return false;
}

/* Where the first byte is that is no UTF-8; n: nowhere. */
static size_t utf8_end(const char *words, size_t n) {
    size_t at = 0;
    for (size_t length; at < n && (length = utf8_length(words + at, n - at)) > 0; at += length) continue;
    return at;
}

int json_parse(const char *words, const char *path, cJSON **out) {
    const char *end = words;
    size_t n = strlen(words), wrong = utf8_end(words, n);
    *out = NULL;
    if (wrong < n) return err_set(ERR_DATA, "%s: byte %zu is no UTF-8", path, wrong);
    if (holds_nul(words)) return err_set(ERR_DATA, "%s: a NUL (\\u0000) in a text is not supported", path);
    cJSON *o = cJSON_ParseWithOpts(words, &end, 1);
    if (!o) return err_set(ERR_DATA, "%s: no JSON at byte %zu", path, (size_t)(end - words));
    if (cJSON_IsObject(o) || cJSON_IsArray(o)) {
        *out = o;
        return 0;
    }
    cJSON_Delete(o);
    return err_set(ERR_DATA, "%s: is neither a JSON object nor an array", path);
}

const cJSON *json_get(const cJSON *o, const char *key) {
    const cJSON *x = cJSON_GetObjectItemCaseSensitive(o, key);
    return cJSON_IsNull(x) ? NULL : x;
}

const char *json_word(const cJSON *o, const char *key) {
    const cJSON *x = json_get(o, key);
    return cJSON_IsString(x) ? x->valuestring : NULL;
}

bool json_flag(const cJSON *o, const char *key, bool fallback) {
    const cJSON *x = json_get(o, key);
    return x ? cJSON_IsTrue(x) : fallback;
}
