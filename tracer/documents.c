#include "tracer/documents.h"
#include "base/err.h"
#include "base/mem.h"
#include "tracer/chat.h"
#include "tracer/json.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

void document_list_free(document_list *l) {
    for (size_t i = 0; i < l->n; i++) {
        mem_free(l->item[i].name);
        mem_free(l->item[i].source);
        text_free(&l->item[i].bytes);
        mem_free(l->item[i].id);
    }
    mem_free(l->item);
    *l = (document_list){0};
}

/* A file, or standard input, being read. */
typedef struct reader {
    const document_ask *ask;
    const char *path;
    text file;
    char *template; /* of the model, once a conversation needed it */
} reader;

/* ---- files ------------------------------------------------------------------------------------------------------ */

static int read_all(int fd, const char *path, text *out) {
    static char buffer[1 << 16];
    ssize_t n;
    while ((n = read(fd, buffer, sizeof buffer)) != 0) {
        if (n < 0 && errno == EINTR) continue;
        if (n < 0)
            return err_set(ERR_DATA, "%s: %s", path, errno == EISDIR ? "is a folder, not a text" : strerror(errno));
        TRY(text_add_bytes(out, buffer, (size_t)n));
    }
    return text_add_bytes(out, "", 0);
}

static int read_file(reader *r) {
    if (strcmp(r->path, "-") == 0) return read_all(STDIN_FILENO, "standard input", &r->file);
    int fd = open(r->path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return err_set(ERR_DATA, "%s: %s", r->path, strerror(errno));
    int code = read_all(fd, r->path, &r->file);
    close(fd);
    return code;
}

/* A new last document; line 0: the file is the document. */
static int add(document_list *l, const char *path, size_t line, document **out) {
    bool is_stdin = strcmp(path, "-") == 0;
    text name = {0}, source = {0};
    int code = mem_grow((void **)&l->item, &l->capacity, l->n + 1, sizeof *l->item, "texts");
    if (!code) code = text_add(&name, "%s", is_stdin ? "standard input" : path);
    if (!code) code = text_add(&source, "%s", is_stdin && !line ? "" : text_base_name(path));
    if (!code && line) code = text_add(&name, ":%zu", line);
    if (!code && line) code = text_add(&source, ":%zu", line);
    if (code) {
        text_free(&name);
        text_free(&source);
        return code;
    }
    *out = &l->item[l->n++];
    **out = (document){.name = name.data, .source = source.data};
    return 0;
}

static int nothing_follows(const document *d) {
    return err_set(ERR_DATA, "%s: nothing follows the prompt (--generate lets the model write it)", d->name);
}

/* ---- conversations ---------------------------------------------------------------------------------------------- */

static int take_rendered(const reader *r, document *d, const chat_text *c) {
    d->special = d->has_prompt = true;
    d->prompt = c->prompt;
    if (!r->ask->to_continue && c->prompt == c->n) return nothing_follows(d);
    return text_add_bytes(&d->bytes, c->text, r->ask->to_continue ? c->prompt : c->n);
}

/* `words`: its JSON, NUL-terminated. */
static int read_conversation(reader *r, document *d, const char *words) {
    chat_text c;
    if (!r->template) TRY(model_chat_template(r->ask->model, &r->template));
    if (!r->template)
        return err_set(ERR_DATA, "%s: is a conversation, but %s has no chat template", d->name, r->ask->model->path);
    TRY(chat_render_for(r->ask->tokenizer, words, d->name, r->template, r->ask->date, &c));
    int code = take_rendered(r, d, &c);
    chat_free(&c);
    return code;
}

/* ---- JSONL ------------------------------------------------------------------------------------------------------ */

/* The text of a field, or NULL; absent and null are the same. */
static int field(const document *d, const cJSON *o, const char *name, const char **out) {
    *out = json_word(o, name);
    return *out || !json_get(o, name) ? 0 : err_set(ERR_DATA, "%s: '%s' is not a text", d->name, name);
}

static int take_fields(const reader *r, document *d, const cJSON *o) {
    const char *prompt, *words, *completion;
    TRY(field(d, o, "prompt", &prompt));
    TRY(field(d, o, "text", &words));
    TRY(field(d, o, "completion", &completion));
    if (words && completion) return err_set(ERR_DATA, "%s: has both 'text' and 'completion'", d->name);
    if (completion && !prompt) return err_set(ERR_DATA, "%s: has a 'completion' without a 'prompt'", d->name);
    if (!words) words = completion;
    if (!prompt && !words) return err_set(ERR_DATA, "%s: has none of 'text', 'prompt' and 'messages'", d->name);
    if (!words && !r->ask->to_continue) return nothing_follows(d);
    d->has_prompt = prompt != NULL;
    if (prompt) TRY(text_add(&d->bytes, "%s", prompt));
    d->prompt = d->bytes.n;
    return prompt && r->ask->to_continue ? 0 : text_add(&d->bytes, "%s", words);
}

/* `line`: NUL-terminated, without a NUL in it. */
static int read_object(reader *r, document *d, const cJSON *o, const char *line) {
    if (!cJSON_IsObject(o)) return err_set(ERR_DATA, "%s: is not a JSON object", d->name);
    if (!json_get(o, "messages")) return take_fields(r, d, o);
    return read_conversation(r, d, line);
}

static int read_line(reader *r, document *d, char *line, size_t n) {
    cJSON *o;
    if (memchr(line, 0, n)) return err_set(ERR_DATA, "%s: is not JSON", d->name);
    line[n] = 0;
    TRY(json_parse(line, d->name, &o));
    int code = read_object(r, d, o, line);
    cJSON_Delete(o);
    return code;
}

static bool is_blank(const char *line, size_t n) {
    while (n && isspace((unsigned char)line[n - 1])) n--;
    return n == 0;
}

static int read_jsonl(reader *r, document_list *out) {
    char *line = r->file.data, *end = line + r->file.n;
    size_t before = out->n;
    for (size_t number = 1; line < end; number++) {
        char *next = memchr(line, '\n', (size_t)(end - line));
        size_t n = (size_t)((next ? next : end) - line);
        document *d;
        if (!is_blank(line, n)) {
            TRY(add(out, r->path, number, &d));
            TRY(read_line(r, d, line, n));
        }
        line += n + 1;
    }
    return out->n > before ? 0 : err_set(ERR_DATA, "%s: holds no line", r->path);
}

/* ---- ids -------------------------------------------------------------------------------------------------------- */

static const char *skip_blanks(const char *at, const char *end) {
    while (at < end && isspace((unsigned char)*at)) at++;
    return at;
}

static int read_id(const document *d, const char **at, const char *end, int32_t n_vocab, int32_t *id) {
    const char *from = *at;
    long long value = 0;
    for (; *at < end && isdigit((unsigned char)**at); ++*at)
        value = value > n_vocab ? value : 10 * value + (**at - '0');
    if (*at == from || (*at < end && !isspace((unsigned char)**at) && **at != ',' && **at != ']')) {
        size_t shown = strcspn(from, " \t\r\n");
        return err_set(ERR_DATA, "%s: id %zu: '%.*s' is not a token id", d->name, d->n_id,
                       (int)(shown < 24 ? shown : 24), from);
    }
    if (value >= n_vocab)
        return err_set(ERR_DATA, "%s: id %zu: %.*s is outside the vocabulary of %d", d->name, d->n_id,
                       (int)(*at - from < 24 ? *at - from : 24), from, n_vocab);
    *id = (int32_t)value;
    return 0;
}

/* Separated by white space; in a JSON array by commas. */
static int read_ids(document *d, const text *file, int32_t n_vocab) {
    const char *end = file->data + file->n, *at = skip_blanks(file->data, end);
    bool array = at < end && *at == '[';
    size_t capacity = 0;
    if (array) at = skip_blanks(at + 1, end);
    for (bool more = at < end && *at != ']'; more; d->n_id++) {
        TRY(mem_grow((void **)&d->id, &capacity, d->n_id + 1, sizeof *d->id, "token ids"));
        TRY(read_id(d, &at, end, n_vocab, &d->id[d->n_id]));
        at = skip_blanks(at, end);
        more = at < end && (!array || *at == ',');
        if (array && more) at = skip_blanks(at + 1, end);
    }
    bool closed = !array || (at < end && *at == ']');
    if (!closed || skip_blanks(at + array, end) < end)
        return err_set(ERR_DATA, "%s: after %zu ids: neither numbers nor one JSON array of them", d->name, d->n_id);
    return d->n_id ? 0 : err_set(ERR_DATA, "%s: holds no token ids", d->name);
}

/* ---- reading ---------------------------------------------------------------------------------------------------- */

static int read_document(reader *r, document *d) {
    switch (r->ask->form) {
    case DOCUMENT_CHAT:
        if (memchr(r->file.data, 0, r->file.n)) return err_set(ERR_DATA, "%s: is not JSON", d->name);
        return read_conversation(r, d, r->file.data);
    case DOCUMENT_IDS:
        return read_ids(d, &r->file, r->ask->model->n_vocab);
    default:
        d->bytes = r->file;
        r->file = (text){0};
        return 0;
    }
}

static int read_any(reader *r, document_list *out) {
    document *d;
    TRY(read_file(r));
    if (r->ask->form == DOCUMENT_JSONL) return read_jsonl(r, out);
    TRY(add(out, r->path, 0, &d));
    return read_document(r, d);
}

int documents_read(const char *path, const document_ask *ask, document_list *out) {
    reader r = {.ask = ask, .path = path};
    int code = read_any(&r, out);
    text_free(&r.file);
    mem_free(r.template);
    return code;
}
