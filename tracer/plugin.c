#include "tracer/plugin.h"
#include "base/err.h"
#include "base/progress.h"
#include "tracer/cpu/cpu.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PLUGIN_FILE "kvlag-cuda.so"

/* "/usr/local/bin" of the running executable; "." where the system does not say. */
static void own_folder(char *out, size_t size) {
    ssize_t n = readlink("/proc/self/exe", out, size - 1);
    out[n > 0 ? n : 0] = '\0';
    char *slash = strrchr(out, '/');
    if (slash) *slash = '\0';
    else snprintf(out, size, ".");
}

/* Is the plugin there? `path` receives where; if not, where it was looked for. */
static bool find(char *path, size_t size) {
    const char *named = getenv("KVLAG_CUDA_PLUGIN");
    char folder[PATH_MAX];
    if (named && *named) {
        snprintf(path, size, "%s", named);
        return access(path, F_OK) == 0;
    }
    own_folder(folder, sizeof folder);
    snprintf(path, size, "%s/" PLUGIN_FILE, folder);
    if (access(path, F_OK) == 0) return true;
    snprintf(path, size, "%s/../lib/kvlag/" PLUGIN_FILE, folder);
    if (access(path, F_OK) == 0) return true;
    snprintf(path, size, PLUGIN_FILE " in %s and %s/../lib/kvlag", folder, folder);
    return false;
}

/* The plugin stays loaded for the life of the process. */
static int open_plugin(const char *path, const backend **out) {
    char *full = realpath(path, NULL); /* a bare name would be looked up among the system's libraries */
    void *plugin = dlopen(full ? full : path, RTLD_NOW | RTLD_LOCAL);
    free(full);
    if (!plugin) return err_set(ERR_DATA, "%s; use --backend cpu", dlerror());
    const int *version = dlsym(plugin, "kvlag_plugin_version");
    const backend *b = dlsym(plugin, "kvlag_cuda_backend");
    if (!version || !b) return err_set(ERR_DATA, "%s: is no plugin of kvlag", path);
    if (*version != BACKEND_PLUGIN_VERSION)
        return err_set(ERR_DATA, "%s: plugin version %d, this kvlag needs %d: build both from one source (make cuda)",
                       path, *version, BACKEND_PLUGIN_VERSION);
    *out = b;
    return 0;
}

static void fall_back(const backend **b) {
    const char *why = err_message(), *advice = strstr(why, "; use --backend cpu");
    say("CUDA: %.*s; using the CPU", advice ? (int)(advice - why) : (int)strlen(why), why);
    *b = &cpu_backend;
}

int plugin_backend(const char *name, const backend **out) {
    char path[3 * PATH_MAX];
    bool automatic = strcmp(name, "auto") == 0;
    *out = &cpu_backend;
    if (strcmp(name, "cpu") == 0) return 0;
    if (!find(path, sizeof path)) {
        if (!automatic)
            return err_set(ERR_DATA, "--backend cuda: no %s (make cuda builds it); use --backend cpu", path);
        say_more("no %s: using the CPU", path);
        return 0;
    }
    int code = open_plugin(path, out);
    if (!code || !automatic) return code;
    fall_back(out);
    return 0;
}

int plugin_load(const plugin_choice *c, const backend **b, const model *m, pool *p, backend_state **out) {
    int code = (*b)->load(m, p, &c->options, out);
    if (!code || *b == &cpu_backend || strcmp(c->backend, "auto") != 0) return code;
    fall_back(b);
    return (*b)->load(m, p, &c->options, out);
}
