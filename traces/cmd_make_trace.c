#include "base/err.h"
#include "base/options.h"
#include "traces/make_trace.h"

#include <string.h>

typedef struct kind {
    const char *name, *help;
    int (*run)(int argc, char **argv);
} kind;

static const kind kinds[] = {
    {"random", "any size, with attention that looks real: sinks, locality, a heavy tail", make_random},
    {"reuse", "facts that prove useful soon and are needed long after, among distractors", make_reuse},
};
enum { N_KINDS = sizeof kinds / sizeof *kinds };

int make_trace_check(const char *name, const opt_list *others, const char *out, long long heads, long long kv_heads) {
    if (others->n) return err_set(ERR_USAGE, "make-trace %s takes options only, got '%s'", name, others->item[0]);
    if (!out) return err_set(ERR_USAGE, "make-trace %s needs -o FILE.h5", name);
    if (heads % kv_heads)
        return err_set(ERR_USAGE, "--kv-heads: %lld heads cannot be shared out among %lld", heads, kv_heads);
    return 0;
}

static int help(void) {
    for (size_t i = 0; i < N_KINDS; i++) {
        opt_section(kinds[i].name, kinds[i].help);
        kinds[i].run(1, (char *[]){"--help"});
    }
    return OPT_HELPED;
}

int cmd_make_trace(int argc, char **argv) {
    const char *names[N_KINDS];
    if (argc > 0 && (strcmp(argv[0], "--help") == 0 || strcmp(argv[0], "-h") == 0)) return help();
    if (argc == 0 || argv[0][0] == '-')
        return err_set(ERR_USAGE, "make-trace begins with a KIND: kvlag make-trace random -o FILE.h5");
    for (size_t i = 0; i < N_KINDS; i++) {
        if (strcmp(argv[0], kinds[i].name) == 0) return kinds[i].run(argc - 1, argv + 1);
        names[i] = kinds[i].name;
    }
    const char *near = opt_nearest(argv[0], names, N_KINDS);
    if (near) return err_set(ERR_USAGE, "make-trace: unknown kind '%s' (did you mean %s?)", argv[0], near);
    return err_set(ERR_USAGE, "make-trace: unknown kind '%s' (see kvlag help make-trace)", argv[0]);
}
