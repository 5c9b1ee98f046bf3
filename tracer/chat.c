#include "tracer/chat.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/text.h"
#include "tracer/chat_style.h"
#include "tracer/json.h"
#include "tracer/utf8.h"

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

/* A string of the style, with BOS and EOS for their signs. */
static int add_mark(writer *w, const char *s) {
    for (; *s; s++) {
        if (*s == '\1') TRY(add(w, w->bos));
        else if (*s == '\2') TRY(add(w, w->eos));
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
    if (last) w->prompt = w->out.n + strlen(style->generation);
    TRY(add_mark(w, style->assistant.before));
    if (style->thinks) TRY(add_thinking(w, i));
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
    if (w->t.bos) TRY(add(w, w->bos));
    if (c->message[0].role != SYSTEM) {
        const char *standard = w->t.default_system;
        if (standard) TRY(add_system(w, (token_text){standard, strlen(standard)}, true));
        else if (style->system_place == SYSTEM_HEADED) TRY(add_system(w, none, true));
    }
    for (size_t i = 0; i < c->n; i++) TRY(add_message(w, i));
    if (c->message[c->n - 1].role == ASSISTANT) return w->t.eos ? add(w, w->eos) : 0;
    TRY(add_mark(w, style->generation));
    w->prompt = w->out.n;
    return 0;
}

/* ---- all of it -------------------------------------------------------------------------------------------------- */

int chat_render(const char *words, const char *path, const char *template, token_text bos, token_text eos,
                chat_text *out) {
    *out = (chat_text){0};
    conversation c = {.path = path};
    writer w = {.c = &c, .bos = bos, .eos = eos};
    cJSON *root;
    int code = json_parse(words, path, &root);
    if (!code) code = read_messages(&c, root);
    if (!code) code = chat_recognise(template, path, &w.t);
    if (!code) code = write_all(&w);
    if (!code) code = text_add_bytes(&w.out, "", 1);
    if (code) text_free(&w.out);
    else *out = (chat_text){w.out.data, w.out.n - 1, w.prompt};
    mem_free(w.t.default_system);
    mem_free(c.message);
    cJSON_Delete(root);
    return code;
}

static token_text piece(const tokenizer *t, int32_t id) {
    token_text p;
    tokenizer_piece(t, id, &p.text, &p.n);
    return p;
}

int chat_render_for(const tokenizer *t, const char *words, const char *path, const char *template, chat_text *out) {
    return chat_render(words, path, template, piece(t, tokenizer_bos(t)), piece(t, tokenizer_eos(t)), out);
}

void chat_free(chat_text *c) {
    mem_free(c->text);
    *c = (chat_text){0};
}
