/* Oniguruma's expressions (Ruby syntax, UTF-8), as the `tokenizers` library runs them, for PCRE2. What the two read
 * differently is translated, or refused by name where no translation keeps the meaning. */
#include "base/err.h"
#include "base/text.h"
#include "tracer/tokenizer_parts.h"

#include <string.h>

/* Unicode White_Space, to stand inside a class. PCRE2's own \s also takes U+180E, which is none since Unicode 6.3. */
#define SPACE "\\t-\\r\\x{85}\\p{Z}"
/* Oniguruma's \w, in a class and alone: only there it takes the fractions and raised digits of Latin-1. */
#define WORD "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}"
#define WORD_ALONE WORD "\\x{b2}\\x{b3}\\x{b9}\\x{bc}-\\x{be}"

typedef struct translation {
    const char *pattern, *file;
    size_t n, at;
    text out;
} translation;

static int refuse(const translation *t, const char *what) {
    return err_set(ERR_DATA, "%s: the expression '%.*s' holds %s, which is not supported", t->file,
                   (int)(t->n < 60 ? t->n : 60), t->pattern, what);
}

static int copy(translation *t, size_t n) {
    if (n > t->n - t->at) n = t->n - t->at;
    t->at += n;
    return text_add_bytes(&t->out, t->pattern + t->at - n, n);
}

static int replace(translation *t, const char *by) {
    t->at += 2;
    return text_add(&t->out, "%s", by);
}

static char peek(const translation *t, size_t ahead) {
    return t->n - t->at > ahead ? t->pattern[t->at + ahead] : 0;
}

/* \p{...} or a single letter. */
static int property(translation *t) {
    const char *end = peek(t, 2) == '{' ? memchr(t->pattern + t->at, '}', t->n - t->at) : NULL;
    return copy(t, end ? (size_t)(end - t->pattern) + 1 - t->at : 3);
}

/* A backslash and what follows it. */
static int escape(translation *t, bool in_class) {
    char c = peek(t, 1), next = peek(t, 2);
    char what[] = {'\\', c, 0};
    switch (c) {
    case 0:
        return refuse(t, "a backslash without what it escapes");
    case 's':
        return replace(t, in_class ? SPACE : "[" SPACE "]");
    case 'S':
        return replace(t, in_class ? "\\S\\x{180e}" : "[^" SPACE "]");
    case 'w':
        return replace(t, in_class ? WORD : "[" WORD_ALONE "]");
    case 'W':
        return in_class ? refuse(t, "\\W in a class") : replace(t, "[^" WORD_ALONE "]");
    case 'p':
    case 'P':
        return property(t);
    case 'v':
        return replace(t, "\\x0b");
    case 'x': /* two digits are a byte, not a character */
        return next == '{' || (next >= '0' && next <= '7') ? copy(t, 2) : refuse(t, "\\x80 or above");
    case 'b':
    case 'B':
    case 'h':
    case 'H':
    case 'R':
    case 'X':
    case 'K':
    case 'G':
    case 'C':
    case 'N':
    case 'O':
    case 'Q':
    case 'E':
    case 'M':
    case 'g':
    case 'k':
    case 'y':
    case 'Y':
        return refuse(t, what);
    default:
        return copy(t, 2);
    }
}

/* From '[' to its ']'. Oniguruma has classes within classes and intersections; PCRE2 would read their signs as
 * themselves. A ']' that comes first is itself in both. */
static int class(translation *t) {
    TRY(copy(t, 1));
    if (peek(t, 0) == '^') TRY(copy(t, 1));
    if (peek(t, 0) == ']') TRY(copy(t, 1));
    while (t->at < t->n && peek(t, 0) != ']') {
        if (peek(t, 0) == '\\') TRY(escape(t, true));
        else if (peek(t, 0) == '[') return refuse(t, "a class within a class");
        else if (peek(t, 0) == '&' && peek(t, 1) == '&') return refuse(t, "an intersection of classes (&&)");
        else TRY(copy(t, 1));
    }
    return copy(t, 1);
}

/* Groups: (?m) lets the dot take newlines in Ruby; names, conditions, calls, comments and verbs are left alone by no
 * published tokenizer. */
static int group(translation *t) {
    size_t flags = 2;
    if (peek(t, 1) == '*') return refuse(t, "(*");
    if (peek(t, 1) != '?') return copy(t, 1);
    while (peek(t, flags) == 'i' || peek(t, flags) == '-') flags++;
    char kind = peek(t, 2), behind = peek(t, 3), last = peek(t, flags);
    bool known = kind == ':' || kind == '=' || kind == '!' || kind == '>' ||
                 (kind == '<' && (behind == '=' || behind == '!')) || (flags > 2 && (last == ':' || last == ')'));
    return known ? copy(t, 2) : refuse(t, "a kind of group");
}

/* {n,m}: "{,m}" is nothing in PCRE2; "{n,m}+" and "{n}?" repeat once more in Ruby, where in PCRE2 they say how. */
static int interval(translation *t) {
    size_t n = 1;
    bool range = false;
    for (char c; (c = peek(t, n)) == ',' || (c >= '0' && c <= '9'); n++) range = range || c == ',';
    if (peek(t, n) != '}' || n == 1) return copy(t, 1);
    char first = peek(t, 1), next = peek(t, n + 1);
    if (first == ',' || next == '+' || (next == '?' && !range)) return refuse(t, "a kind of repetition");
    return copy(t, n + 1);
}

static int translate(translation *t) {
    while (t->at < t->n) {
        switch (t->pattern[t->at]) {
        case 0:
            return refuse(t, "a NUL");
        case '\\':
            TRY(escape(t, false));
            break;
        case '[':
            TRY(class(t));
            break;
        case '(':
            TRY(group(t));
            break;
        case '{':
            TRY(interval(t));
            break;
        default:
            TRY(copy(t, 1));
        }
    }
    return 0;
}

static int compile(const translation *t, pcre2_code **out) {
    int error;
    PCRE2_SIZE at;
    pcre2_compile_context *context = pcre2_compile_context_create(NULL);
    if (!context) return err_set(ERR_DATA, "pre-tokenizer: out of memory");
    pcre2_set_newline(context, PCRE2_NEWLINE_LF);
    *out = pcre2_compile((PCRE2_SPTR)(t->out.data ? t->out.data : ""), t->out.n,
                         PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE, &error, &at, context);
    pcre2_compile_context_free(context);
    if (*out) {
        pcre2_jit_compile(*out, PCRE2_JIT_COMPLETE);
        return 0;
    }
    char why[128] = "";
    pcre2_get_error_message(error, (PCRE2_UCHAR *)why, sizeof why);
    return err_set(ERR_DATA, "%s: the expression '%.*s' is not supported: %s", t->file, (int)(t->n < 60 ? t->n : 60),
                   t->pattern, why);
}

int tokenizer_compile(const char *pattern, size_t n, const char *file, pcre2_code **out) {
    translation t = {.pattern = pattern, .file = file, .n = n};
    int code = translate(&t);
    if (!code) code = compile(&t, out);
    text_free(&t.out);
    return code;
}
