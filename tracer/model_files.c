#include "tracer/model_files.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/text.h"

#include <stdbool.h>
#include <string.h>
#include <sys/stat.h>

static bool is_folder(const char *path) {
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

/* The folder in which a file stands; the caller frees it (mem_free). NULL: no memory. */
static char *folder_of(const char *path) {
    const char *name = text_base_name(path);
    return name == path ? mem_string(".") : mem_string_n(path, (size_t)(name - path));
}

static bool same(const char *a, const char *b) {
    struct stat x, y;
    return a && b && stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

static bool is_of_folder(const char *name) {
    static const char names[] = "config.json|tokenizer.json|tokenizer_config.json|model.safetensors.index.json";
    const char *dot = strrchr(name, '.');
    return text_find_word(names, name) >= 0 || (dot && text_find_word(".safetensors|.jinja|.gguf", dot) >= 0);
}

/* "model-00001-of-00003.gguf" and "model-00002-of-00003.gguf". */
static bool is_shard(const char *a, const char *b) {
    static const char digits[] = "0123456789", form[] = "-00001-of-00003.gguf";
    enum { TAIL = sizeof form - 1 };
    size_t n = strlen(a);
    if (n != strlen(b) || n < TAIL) return false;
    const char *tail = a + n - TAIL;
    for (size_t i = 0; i < TAIL; i++)
        if (strchr(digits, form[i]) ? !strchr(digits, tail[i]) : tail[i] != form[i]) return false;
    size_t number = n - TAIL + 1;
    return memcmp(a, b, number) == 0 && strcmp(a + number + 5, b + number + 5) == 0;
}

int model_check_output(const char *path, const char *out) {
    struct stat st;
    if (stat(out, &st) != 0) return 0;
    char *theirs = is_folder(path) ? mem_string(path) : folder_of(path), *ours = folder_of(out);
    const char *name = text_base_name(out);
    bool there = same(theirs, ours);
    mem_free(theirs);
    mem_free(ours);
    if (!there || !(is_folder(path) ? is_of_folder(name) : is_shard(text_base_name(path), name))) return 0;
    return err_set(ERR_USAGE, "%s: is a file of the model %s; give -o another name", out, path);
}
