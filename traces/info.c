#include "traces/info.h"
#include "base/err.h"
#include "base/options.h"
#include "base/text.h"
#include "traces/compare.h"
#include "traces/facts.h"

#include <stdio.h>
#include <string.h>

/* ---- the facts as text ------------------------------------------------------------------------------------------ */

static const char *word(const cJSON *o, const char *key) {
    const char *s = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(o, key));
    return s ? s : "";
}

static double number(const cJSON *o, const char *key) {
    const cJSON *x = cJSON_GetObjectItemCaseSensitive(o, key);
    return cJSON_IsNumber(x) ? x->valuedouble : 0;
}

static const cJSON *member(const cJSON *o, const char *key) {
    return cJSON_GetObjectItemCaseSensitive(o, key);
}

/* "1.4 MB" in powers of 1000, as disks are sold. */
static const char *size_text(char out[32], double bytes) {
    static const char *const unit[] = {"B", "kB", "MB", "GB", "TB"};
    int u = 0;
    for (; bytes >= 1000 && u < 4; u++) bytes /= 1000;
    snprintf(out, 32, u ? "%.1f %s" : "%.0f %s", bytes, unit[u]);
    return out;
}

static void print_words(const char *label, const cJSON *list) {
    const cJSON *x;
    const char *comma = "";
    printf("%s", label);
    if (!cJSON_GetArraySize(list)) printf("none");
    cJSON_ArrayForEach(x, list) {
        printf("%s%s", comma, cJSON_GetStringValue(x));
        comma = ", ";
    }
}

/* Each layer's window; a run of equal ones as "512 x5", and "none" where no layer has one. */
static void print_windows(const cJSON *list) {
    const cJSON *x = list->child;
    while (x) {
        int run = 1;
        const cJSON *next = x->next;
        for (; next && next->valuedouble == x->valuedouble; next = next->next) run++;
        printf("%s", x == list->child ? "" : ", ");
        if (x->valuedouble > 0) printf("%.0f", x->valuedouble);
        else printf("none");
        if (run > 1 && (next || x != list->child || x->valuedouble > 0)) printf(" x%d", run);
        x = next;
    }
}

static void print_model(const cJSON *m) {
    char scale[32], cap[32];
    printf("  model      %s (%s): %.0f layers, %.0f heads over %.0f kv head%s of %.0f",
           *word(m, "name") ? word(m, "name") : "?", *word(m, "arch") ? word(m, "arch") : "?", number(m, "n_layer"),
           number(m, "n_head"), number(m, "n_kv_head"), number(m, "n_kv_head") == 1 ? "" : "s", number(m, "head_dim"));
    printf(", embedding %.0f, vocabulary %.0f\n", number(m, "n_embd"), number(m, "n_vocab"));
    printf("  scores     scale %s, softcap %s, window ", text_number(scale, number(m, "scale")),
           number(m, "softcap") > 0 ? text_number(cap, number(m, "softcap")) : "none");
    print_windows(member(m, "window"));
    printf(", rope %s\n", *word(m, "rope") ? word(m, "rope") : "?");
    if (*word(m, "backend"))
        printf("  backend    %s, %s, %s\n", word(m, "backend"), word(m, "device"), word(m, "compute"));
}

static void print_measured(const cJSON *s) {
    const cJSON *each = member(s, "bytes_per_entry"), *lost = member(s, "lost_to_f16"), *check = member(s, "check"), *x;
    cJSON_ArrayForEach(x, each) printf("             %.4g bytes an attention entry, %s\n", x->valuedouble, x->string);
    if (lost)
        printf("             lost to f16: mean %.3g, at most %.3g of a row\n", number(lost, "mean"),
               number(lost, "max"));
    if (!check) return;
    if (member(check, "sum_error")) printf("             rows sum to 1 within %.3g\n", number(check, "sum_error"));
    if (member(check, "difference"))
        printf("             dense against factored: at most %.3g apart\n", number(check, "difference"));
    if (member(check, "lse_error"))
        printf("             lse against factored: at most %.3g apart\n", number(check, "lse_error"));
    print_words("             verified ", member(check, "verified"));
    printf("\n");
}

static void print_sequence(const cJSON *s) {
    printf("  seq/%s   %.0f tokens, prompt %.0f", word(s, "name"), number(s, "tokens"), number(s, "prompt"));
    if (*word(s, "source")) printf(", from %s", word(s, "source"));
    if (*word(s, "text")) printf(": \"%s\"", word(s, "text"));
    print_words("\n             attention ", member(s, "attention"));
    print_words("; logits ", member(s, "logits"));
    print_words("; gradients ", member(s, "gradients"));
    if (number(s, "probes") > 0) printf("; %.0f probes", number(s, "probes"));
    printf("\n");
    print_measured(s);
}

static void print_shape(char *out, size_t size, const cJSON *shape) {
    size_t n = (size_t)snprintf(out, size, "[");
    const cJSON *x;
    cJSON_ArrayForEach(x, shape) if (n < size) {
        n += (size_t)snprintf(out + n, size - n, "%s%.0f", x == shape->child ? "" : ", ", x->valuedouble);
    }
    if (n < size) snprintf(out + n, size - n, "]");
}

static void print_datasets(const cJSON *list) {
    const cJSON *d;
    printf("\n  %-30s %-26s %-5s %10s %10s %7s  %s\n", "dataset", "shape", "type", "raw", "stored", "ratio",
           "checksum");
    cJSON_ArrayForEach(d, list) {
        char shape[128], raw[32], stored[32], ratio[32] = "-";
        const cJSON *sum = member(d, "checksum");
        print_shape(shape, sizeof shape, member(d, "shape"));
        if (cJSON_IsNumber(member(d, "ratio"))) snprintf(ratio, sizeof ratio, "%.2f", number(d, "ratio"));
        printf("  %-30s %-26s %-5s %10s %10s %7s  %s\n", word(d, "path"), shape, word(d, "type"),
               size_text(raw, number(d, "raw")), size_text(stored, number(d, "stored")), ratio,
               cJSON_IsNull(sum)   ? "-"
               : cJSON_IsTrue(sum) ? "yes"
                                   : "NO");
    }
}

static void print_config(const cJSON *c, int index) {
    const cJSON *s;
    printf("  config/%04d  %s, budget %s, lag %s, unit %s, schedule %s, pending %s\n", index, word(c, "spec"),
           *word(c, "budget_asked") ? word(c, "budget_asked") : "-", *word(c, "lag") ? word(c, "lag") : "-",
           *word(c, "unit") ? word(c, "unit") : "-", *word(c, "schedule") ? word(c, "schedule") : "-",
           *word(c, "pending") ? word(c, "pending") : "-");
    cJSON_ArrayForEach(s, member(c, "sequences")) {
        char shape[64];
        print_shape(shape, sizeof shape, member(s, "shape"));
        printf("               seq/%s %s%s%s\n", word(s, "name"), shape, *word(s, "budget") ? " budget " : "",
               word(s, "budget"));
    }
}

static void print_facts(const cJSON *f) {
    char size[32];
    const cJSON *x;
    int index = 0;
    printf("%s: %s version %.0f, %s\n", word(f, "file"), word(f, "format"), number(f, "version"),
           size_text(size, number(f, "bytes")));
    if (*word(f, "command")) printf("  command    %s (%s)\n", word(f, "command"), word(f, "creator"));
    if (member(f, "trace")) printf("  trace      %s\n", *word(f, "trace") ? word(f, "trace") : "?");
    if (*word(f, "content_hash"))
        printf("  content    %s%s\n", word(f, "content_hash"),
               strcmp(word(f, "hash_of"), "file") == 0 ? " (hash of the file: it carries none)" : "");
    if (member(f, "model")) print_model(member(f, "model"));
    if (member(f, "rows")) printf("  rows       %.0f\n", number(f, "rows"));
    cJSON_ArrayForEach(x, member(f, "sequences")) print_sequence(x);
    cJSON_ArrayForEach(x, member(f, "configs")) print_config(x, index++);
    if (member(f, "datasets")) print_datasets(member(f, "datasets"));
    if (!cJSON_IsTrue(member(f, "checked"))) return;
    if (member(f, "model"))
        printf("\n  verified   every value of %d datasets is readable and finite%s",
               cJSON_GetArraySize(member(f, "datasets")),
               strcmp(word(f, "hash_of"), "content") == 0 ? "; the content hash is that of the content" : "");
    printf("\n  check      passed\n");
}

/* ---- two traces ------------------------------------------------------------------------------------------------ */

static void print_comparison(const cJSON *d) {
    const char *path = word(d, "path");
    const cJSON *forms = member(d, "forms");
    printf("             %-24s", path);
    if (member(d, "agree")) printf(" %.4g %% agree", 100 * number(d, "agree"));
    if (member(d, "mean")) printf(" mean %.3g, at most %.3g", number(d, "mean"), number(d, "max"));
    if (member(d, "relative")) printf(", relative %.3g", number(d, "relative"));
    if (forms)
        printf(" (%s, %s)", cJSON_GetStringValue(cJSON_GetArrayItem(forms, 0)),
               cJSON_GetStringValue(cJSON_GetArrayItem(forms, 1)));
    if (member(d, "cosine"))
        printf(" norm ratio %.6g (worst: layer %.0f), cosine %.6f (layer %.0f)", number(d, "norm_ratio"),
               number(d, "norm_ratio_layer"), number(d, "cosine"), number(d, "cosine_layer"));
    printf("\n");
}

static void print_compared(const cJSON *f) {
    const cJSON *x, *d, *files = member(f, "files");
    const char *file[2];
    for (int side = 0; side < 2; side++) file[side] = cJSON_GetStringValue(cJSON_GetArrayItem(files, side));
    printf("%s\n%s\n", file[0], file[1]);
    cJSON_ArrayForEach(x, member(f, "differs"))
        printf("  %-10s %s\n  %-10s %s\n", word(x, "fact"), word(x, "a"), "", word(x, "b"));
    cJSON_ArrayForEach(x, member(f, "sequences")) {
        printf("  seq/%s   %.0f tokens\n", word(x, "name"), number(x, "tokens"));
        cJSON_ArrayForEach(d, member(x, "datasets")) print_comparison(d);
        for (int side = 0; side < 2; side++) {
            const cJSON *only = cJSON_GetArrayItem(member(x, "only"), side);
            if (!cJSON_GetArraySize(only)) continue;
            printf("             only in %s: ", file[side]);
            print_words("", only);
            printf("\n");
        }
    }
}

/* ---- the command ------------------------------------------------------------------------------------------------ */

static int print_json(const cJSON *facts) {
    char *s = cJSON_Print(facts);
    if (!s) return err_set(ERR_DATA, "out of memory");
    printf("%s\n", s);
    cJSON_free(s);
    return 0;
}

typedef struct info_options {
    bool check, all, json, compare;
} info_options;

static int gather(const info_options *o, const opt_list *file, cJSON **facts) {
    if (o->compare && (file->n != 2 || o->check))
        return err_set(ERR_USAGE, "info --compare: give two trace files, and no --check");
    if (o->compare) return compare_traces(file->item[0], file->item[1], facts);
    if (file->n != 1) return err_set(ERR_USAGE, "info: give one FILE (a trace, lifetimes or blocks file)");
    if (o->all && !o->check)
        return err_set(ERR_USAGE, "info --all: says how much --check computes, which is not given");
    return facts_of_file(file->item[0], o->all ? FACTS_CHECK_ALL : o->check ? FACTS_CHECK : FACTS_ONLY, facts);
}

int cmd_info(int argc, char **argv) {
    info_options o = {0};
    const opt table[] = {
        {.name = "check", .kind = OPT_FLAG, .target = &o.check, .help = "read everything and verify it"},
        {.name = "all",
         .kind = OPT_FLAG,
         .target = &o.all,
         .help = "with --check: compute every row of a long trace, not some 2048 of them, from q and k"},
        {.name = "compare", .kind = OPT_FLAG, .target = &o.compare, .help = "how far two traces of one text lie apart"},
        {.name = "json", .kind = OPT_FLAG, .target = &o.json, .help = "the same facts as JSON"},
        {.name = NULL},
    };
    opt_list file = {0};
    cJSON *facts = NULL;
    int code = opt_parse(table, argc, argv, &file);
    if (!code) code = gather(&o, &file, &facts);
    if (!code && o.json) code = print_json(facts);
    else if (!code && o.compare) print_compared(facts);
    else if (!code) print_facts(facts);
    cJSON_Delete(facts);
    opt_list_free(&file);
    return code;
}
