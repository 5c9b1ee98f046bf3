/* JSON from outside, on top of cJSON: parsed with a place in the message, and read with null as absent. */
#pragma once

#include <cjson/cJSON.h>
#include <stdbool.h>

/* The NUL-terminated text of one object or array; *out for cJSON_Delete, NULL on failure. A text that holds an escaped
 * NUL, where cJSON would end a string, and bytes that are no UTF-8 are refused. `path` is for messages. Returns 0 or
 * ERR_DATA. */
int json_parse(const char *words, const char *path, cJSON **out);

const cJSON *json_get(const cJSON *o, const char *key);         /* NULL where it is absent or null */
const char *json_word(const cJSON *o, const char *key);         /* NULL where it is no text */
bool json_flag(const cJSON *o, const char *key, bool fallback); /* `fallback` where it is absent or null */
