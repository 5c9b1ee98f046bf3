#include "tracer/chat.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/text.h"
#include "base/utf8.h"
#include "tracer/chat_style.h"
#include "tracer/json.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum role { SYSTEM, USER, ASSISTANT } role;

typedef struct message {
    role role;
    token_text content;
} message;

typedef struct conversation {
    const char *path;
    message *message;
    size_t n, capacity;
} conversation;

typedef struct writer {
    const conversation *c;
    chat_template t;
    token_text bos, eos;
    char date[32];
    bool silent; /* SYSTEM_SWITCHES: without thoughts */
    text out;
    size_t prompt;
} writer;

/* ---- reading ---------------------------------------------------------------------------------------------------- */

static int read_message(conversation *c, const cJSON *x) {
    const char *name = json_word(x, "role"), *content = json_word(x, "content");
    int which = name ? text_find_word("system|user|assistant", name) : -1;
    if (!cJSON_IsObject(x) || !name) return err_set(ERR_DATA, "%s: message %zu has no role", c->path, c->n);
    if (which < 0)
        return err_set(ERR_DATA, "%s: message %zu: role '%.60s' is not supported (system, user and assistant are)",
                       c->path, c->n, name);
    if (!content) return err_set(ERR_DATA, "%s: message %zu: its content is no text", c->path, c->n);
    for (const cJSON *key = x->child; key; key = key->next)
        if (strcmp(key->string, "role") != 0 && strcmp(key->string, "content") != 0 && !cJSON_IsNull(key))
            return err_set(ERR_DATA, "%s: message %zu: '%.60s' is not supported (role and content are)", c->path, c->n,
                           key->string);
    TRY(mem_grow((void **)&c->message, &c->capacity, c->n + 1, sizeof *c->message, "messages"));
    c->message[c->n++] = (message){(role)which, {content, strlen(content)}};
    return 0;
}

static int read_messages(conversation *c, const cJSON *root) {
    const cJSON *list = cJSON_IsArray(root) ? root : json_get(root, "messages"), *x;
    if (json_get(root, "tools")) return err_set(ERR_DATA, "%s: 'tools' are not supported", c->path);
    if (!cJSON_IsArray(list) || !list->child)
        return err_set(ERR_DATA,
                       "%s: holds no messages (an array of objects with role and content, or an object whose "
                       "\"messages\" is one)",
                       c->path);
    cJSON_ArrayForEach(x, list) TRY(read_message(c, x));
    return 0;
}

/* ---- what the templates refuse ---------------------------------------------------------------------------------- */

static int check_system(const conversation *c, const chat_style *style) {
    bool alone = style->system_place != SYSTEM_TURN && style->system_place != SYSTEM_HEADED;
    for (size_t i = 0; i < c->n; i++) {
        if (c->message[i].role != SYSTEM) continue;
        if (style->system_place == SYSTEM_REFUSED)
            return err_set(ERR_DATA, "%s: %s has no system messages", c->path, style->name);
        if (i > 0 && (alone || style->alternates))
            return err_set(ERR_DATA, "%s: message %zu: %s takes a system message only at the start", c->path, i,
                           style->name);
        if (style->system_place == SYSTEM_LAST && c->message[c->n - 1].role == ASSISTANT)
            return err_set(ERR_DATA,
                           "%s: %s writes the system message into the last turn, which is the assistant's: it "
                           "would be lost",
                           c->path, style->name);
        if ((alone || style->alternates) && c->n == 1)
            return err_set(ERR_DATA, "%s: holds a system message alone", c->path);
    }
    return 0;
}

static int check_roles(const conversation *c, const chat_style *style) {
    TRY(check_system(c, style));
    size_t first = c->message[0].role == SYSTEM;
    for (size_t i = first; i < c->n && style->alternates; i++)
        if (c->message[i].role != ((i - first) % 2 ? ASSISTANT : USER))
            return err_set(ERR_DATA, "%s: message %zu: in %s, user and assistant take turns, the user first", c->path,
                           i, style->name);
    return 0;
}

/* ---- writing ---------------------------------------------------------------------------------------------------- */

static int add(writer *w, token_text t) {
    return t.n ? text_add_bytes(&w->out, t.text, t.n) : 0;
}

/* A string of the style, with BOS, EOS and the date for their signs. */
static int add_mark(writer *w, const char *s) {
    for (; *s; s++) {
        if (*s == '\1') TRY(add(w, w->bos));
        else if (*s == '\2') TRY(add(w, w->eos));
        else if (*s == '\3') TRY(text_add(&w->out, "%s", w->date));
        else TRY(text_add_bytes(&w->out, s, 1));
    }
    return 0;
}

/* Python's white space is Unicode's and four separators. */
static size_t space_at(const char *s, size_t n) {
    return n && *s >= 0x1c && *s <= 0x1f ? 1 : utf8_space(s, n);
}

static size_t space_before(const char *s, size_t n) {
    return n && s[n - 1] >= 0x1c && s[n - 1] <= 0x1f ? 1 : utf8_space_before(s, n);
}

static token_text trim_end(token_text t) {
    for (size_t n; (n = space_before(t.text, t.n)) > 0; t.n -= n) continue;
    return t;
}

static token_text trim(token_text t) {
    for (size_t n; (n = space_at(t.text, t.n)) > 0; t.n -= n) t.text += n;
    return trim_end(t);
}

static token_text trim_newlines(token_text t, bool start, bool end) {
    for (; start && t.n && *t.text == '\n'; t.n--) t.text++;
    while (end && t.n && t.text[t.n - 1] == '\n') t.n--;
    return t;
}

static const char *find(token_text t, const char *what) {
    return t.n ? memmem(t.text, t.n, what, strlen(what)) : NULL;
}

/* What lies behind the last `what`; the whole if there is none. */
static token_text behind_last(token_text t, const char *what) {
    for (const char *at; (at = find(t, what));) {
        size_t skip = (size_t)(at - t.text) + strlen(what);
        t = (token_text){t.text + skip, t.n - skip};
    }
    return t;
}

/* Qwen3 keeps an answer's thoughts only behind the last question, and writes an empty thought into a last answer that
 * has none. */
static int add_thinking(writer *w, size_t i) {
    static const char opening[] = "<tool_response>", ending[] = "</tool_response>";
    const conversation *c = w->c;
    token_text content = c->message[i].content, thought = {"", 0};
    const char *end = find(content, "</think>");
    size_t query = c->n - 1;
    for (size_t k = c->n; k-- > 0;) {
        token_text t = c->message[k].content;
        bool tool = t.n >= sizeof ending - 1 && strncmp(t.text, opening, sizeof opening - 1) == 0 &&
                    strcmp(t.text + t.n - (sizeof ending - 1), ending) == 0;
        if (c->message[k].role != USER || tool) continue;
        query = k;
        break;
    }
    if (end) {
        thought = trim_newlines((token_text){content.text, (size_t)(end - content.text)}, false, true);
        thought = trim_newlines(behind_last(thought, "<think>"), true, false);
        content = trim_newlines(behind_last(content, "</think>"), true, false);
    }
    if (i > query && (i == c->n - 1 || thought.n)) {
        TRY(add_mark(w, "<think>\n"));
        TRY(add(w, trim_newlines(thought, true, true)));
        TRY(add_mark(w, "\n</think>\n\n"));
        content = trim_newlines(content, true, false);
    }
    return add(w, content);
}

/* ---- switches in the system message ------------------------------------------------------------------------------ */

/* t without any `what`, and without white space at its end; *out is empty. */
static int leave_out(token_text t, const char *what, text *out) {
    for (const char *at; (at = find(t, what));) {
        size_t before = (size_t)(at - t.text), taken = before + strlen(what);
        TRY(text_add_bytes(out, t.text, before));
        t = (token_text){t.text + taken, t.n - taken};
    }
    TRY(text_add_bytes(out, t.text, t.n));
    out->n = trim_end((token_text){out->data, out->n}).n;
    return 0;
}

/* `words`: what was given, without /think and /no_think. */
static int write_switched(writer *w, token_text given, token_text words) {
    static const char override[] = "/system_override";
    if (find(given, override)) {
        text rest = {0};
        int code = leave_out(words, override, &rest);
        if (!code) code = add(w, (token_text){rest.data, rest.n});
        text_free(&rest);
        return code ? code : add_mark(w, "<|im_end|>\n");
    }
    TRY(add_mark(w, w->t.style->heading));
    TRY(add_mark(w, w->silent ? "/no_think" : "/think"));
    TRY(add_mark(w, "\n\n## Custom Instructions\n\n"));
    if (!words.n) return add_mark(w, w->t.persona[!w->silent]);
    TRY(add(w, words));
    return add_mark(w, "\n\n");
}

/* SmolLM3's head, which its template leaves open unless the message overrides it. */
static int add_switched(writer *w) {
    const message *first = &w->c->message[0];
    token_text given = first->role == SYSTEM ? first->content : (token_text){"", 0};
    text once = {0}, twice = {0};
    w->silent = find(given, "/no_think") != NULL;
    TRY(add_mark(w, "<|im_start|>system\n"));
    int code = leave_out(given, "/no_think", &once);
    if (!code) code = leave_out((token_text){once.data, once.n}, "/think", &twice);
    if (!code) code = write_switched(w, given, (token_text){twice.data, twice.n});
    text_free(&once);
    text_free(&twice);
    return code;
}

/* What stands between the assistant's mark and its words. */
static const char *empty_thought(const writer *w) {
    return w->silent ? "<think>\n\n</think>\n" : "";
}

/* ---- turns ------------------------------------------------------------------------------------------------------- */

/* A system message that goes into turn i, or one without text. */
static token_text system_in(const writer *w, size_t i) {
    const conversation *c = w->c;
    chat_system place = w->t.style->system_place;
    bool here =
        c->message[0].role == SYSTEM && ((place == SYSTEM_FIRST && i == 1) || (place == SYSTEM_LAST && i == c->n - 1));
    return here ? c->message[0].content : (token_text){NULL, 0};
}

static int add_user(writer *w, size_t i) {
    const chat_style *style = w->t.style;
    token_text content = w->c->message[i].content, system = system_in(w, i);
    TRY(add_mark(w, style->user.before));
    if (system.text) {
        TRY(add_mark(w, style->system.before));
        TRY(add(w, system));
        TRY(add_mark(w, style->system.after));
    }
    bool whole = style->trims_whole && system.text;
    TRY(add(w, style->trims && !whole ? trim(content) : content));
    if (whole) w->out.n = trim_end((token_text){w->out.data, w->out.n}).n;
    return add_mark(w, style->user.after);
}

static int add_system(writer *w, token_text content, bool first) {
    const chat_style *style = w->t.style;
    TRY(add_mark(w, style->system.before));
    if (first && style->heading) TRY(add_mark(w, style->heading));
    TRY(add(w, style->trims ? trim(content) : content));
    return add_mark(w, style->system.after);
}

static int add_answer(writer *w, size_t i) {
    const chat_style *style = w->t.style;
    bool last = i == w->c->n - 1;
    token_text content = w->c->message[i].content;
    if (last) w->prompt = w->out.n + strlen(style->generation) + strlen(empty_thought(w));
    TRY(add_mark(w, style->assistant.before));
    TRY(add_mark(w, empty_thought(w)));
    if (style->thinks) TRY(add_thinking(w, i));
    else if (style->system_place == SYSTEM_SWITCHES) TRY(add(w, trim_newlines(content, true, false)));
    else TRY(add(w, style->trims || style->trims_answers ? trim(content) : content));
    return add_mark(w, last && style->last_after ? style->last_after : style->assistant.after);
}

static int add_message(writer *w, size_t i) {
    const chat_style *style = w->t.style;
    const message *m = &w->c->message[i];
    bool turn = style->system_place == SYSTEM_TURN || style->system_place == SYSTEM_HEADED;
    if (m->role == USER) return add_user(w, i);
    if (m->role == ASSISTANT) return add_answer(w, i);
    return turn ? add_system(w, m->content, i == 0) : 0;
}

static int write_all(writer *w) {
    const chat_style *style = w->t.style;
    const conversation *c = w->c;
    token_text none = {"", 0};
    TRY(check_roles(c, style));
    if (style->system_place == SYSTEM_SWITCHES) TRY(add_switched(w));
    if (w->t.bos) TRY(add(w, w->bos));
    if (c->message[0].role != SYSTEM) {
        const char *standard = w->t.default_system;
        if (standard) TRY(add_system(w, (token_text){standard, strlen(standard)}, true));
        else if (style->system_place == SYSTEM_HEADED) TRY(add_system(w, none, true));
    }
    for (size_t i = 0; i < c->n; i++) TRY(add_message(w, i));
    if (c->message[c->n - 1].role == ASSISTANT) return w->t.eos ? add(w, w->eos) : 0;
    TRY(add_mark(w, style->generation));
    TRY(add_mark(w, empty_thought(w)));
    w->prompt = w->out.n;
    return 0;
}

/* ---- dates ------------------------------------------------------------------------------------------------------- */

static bool digits(const char *s, size_t n) {
    return strspn(s, "0123456789") >= n;
}

/* Year, month, day; false: it is none. */
static bool split_date(const char *s, int part[3]) {
    static const int days[] = {31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31};
    if (strlen(s) != 10 || !digits(s, 4) || s[4] != '-' || !digits(s + 5, 2) || s[7] != '-' || !digits(s + 8, 2))
        return false;
    for (int i = 0; i < 3; i++) part[i] = atoi(s + (const int[]){0, 5, 8}[i]);
    if (part[1] < 1 || part[1] > 12) return false;
    bool leap = (part[0] % 4 == 0 && part[0] % 100 != 0) || part[0] % 400 == 0;
    return part[2] >= 1 && part[2] <= days[part[1] - 1] + (part[1] == 2 && leap);
}

static int read_date(const char *date, int part[3]) {
    return split_date(date, part) ? 0 : err_set(ERR_USAGE, "--date: '%.40s' is no date (want YYYY-MM-DD)", date);
}

int chat_check_date(const char *date) {
    int part[3];
    return read_date(date, part);
}

/* The date as the template writes it; in English, whatever the locale. */
static int choose_date(writer *w, const char *date) {
    static const char *const months[] = {"January", "February", "March",     "April",   "May",      "June",
                                         "July",    "August",   "September", "October", "November", "December"};
    const chat_style *style = w->t.style;
    int part[3];
    if (!style->dates)
        return date ? err_set(ERR_USAGE, "%s: the chat template, %s, writes no date: leave out --date", w->c->path,
                              style->name)
                    : 0;
    if (!date && !style->date)
        return err_set(ERR_USAGE, "%s: the chat template, %s, writes the day's date: give one with --date YYYY-MM-DD",
                       w->c->path, style->name);
    if (!date) {
        snprintf(w->date, sizeof w->date, "%s", style->date);
        return 0;
    }
    TRY(read_date(date, part));
    snprintf(w->date, sizeof w->date, "%02d %.*s %04d", part[2], style->whole_months ? 9 : 3, months[part[1] - 1],
             part[0]);
    return 0;
}

/* ---- all of it -------------------------------------------------------------------------------------------------- */

int chat_render(const char *words, const char *path, const char *template, token_text bos, token_text eos,
                const char *date, chat_text *out) {
    *out = (chat_text){0};
    conversation c = {.path = path};
    writer w = {.c = &c, .bos = bos, .eos = eos};
    cJSON *root;
    int code = json_parse(words, path, &root);
    if (!code) code = read_messages(&c, root);
    if (!code) code = chat_recognise(template, path, &w.t);
    if (!code) code = choose_date(&w, date);
    if (!code) code = write_all(&w);
    if (!code) code = text_add_bytes(&w.out, "", 1);
    if (code) text_free(&w.out);
    else *out = (chat_text){w.out.data, w.out.n - 1, w.prompt};
    chat_template_free(&w.t);
    mem_free(c.message);
    cJSON_Delete(root);
    return code;
}

static token_text piece(const tokenizer *t, int32_t id) {
    token_text p;
    tokenizer_piece(t, id, &p.text, &p.n);
    return p;
}

int chat_render_for(const tokenizer *t, const char *words, const char *path, const char *template, const char *date,
                    chat_text *out) {
    return chat_render(words, path, template, piece(t, tokenizer_bos(t)), piece(t, tokenizer_eos(t)), date, out);
}

void chat_free(chat_text *c) {
    mem_free(c->text);
    *c = (chat_text){0};
}
