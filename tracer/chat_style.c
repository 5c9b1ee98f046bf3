#include "tracer/chat_style.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/text.h"
#include "base/utf8.h"

#include <string.h>

/* ---- the families ----------------------------------------------------------------------------------------------- */

#define CHATML(role) \
    { "<|im_start|>" role "\n", "<|im_end|>\n" }
#define LLAMA3(role) \
    { "<|start_header_id|>" role "<|end_header_id|>\n\n", "<|eot_id|>" }
#define LLAMA3_EXPRESSION "'<|start_header_id|>'+message.role+'<|end_header_id|>\n\n'+message.content|trim+'<|eot_id|>'"
#define GEMMA(role) \
    { "<start_of_turn>" role "\n", "<end_of_turn>\n" }
#define PHI3(role) \
    { "<|" role "|>\n", "<|end|>\n" }
#define ANSWERS "add_generation_prompt"

/* Each template is spelt as `spell` below does: no white space outside strings, one kind of quotes, neighbouring
 * strings joined, message['role'] as message.role. The first row whose expressions are all there is the family. */
static const chat_style styles[] = {
    {.name = "Qwen3",
     .has = {"'<|im_start|>'+message.role+'\n<think>\n'+reasoning_content.strip('\n')+'\n</"
             "think>\n\n'+content.lstrip('\n')",
             "loop.index0>ns.last_query_index", ANSWERS},
     .lacks = {"render_content", "strftime_now", "{%setenable_thinking="},
     .system = CHATML("system"),
     .user = CHATML("user"),
     .assistant = CHATML("assistant"),
     .generation = "<|im_start|>assistant\n",
     .thinks = true},
    {.name = "ChatML",
     .has = {"'<|im_start|>'+message.role+'\n'+message.content+'<|im_end|>\n'", "'<|im_start|>assistant\n'", ANSWERS},
     .lacks = {"</think>", "strftime_now"},
     .system = CHATML("system"),
     .user = CHATML("user"),
     .assistant = CHATML("assistant"),
     .generation = "<|im_start|>assistant\n"},
    {.name = "ChatML",
     .has = {"'<|im_start|>'+message.role+'\n'+content+'<|im_end|>\n'", "{%setcontent=message.content%}", ANSWERS},
     .lacks = {"</think>", "strftime_now"},
     .system = CHATML("system"),
     .user = CHATML("user"),
     .assistant = CHATML("assistant"),
     .generation = "<|im_start|>assistant\n"},
    {.name = "SmolLM3",
     .has = {"'## Metadata\n\n'}}{{'Knowledge Cutoff Date: June 2025\n'}}{%settoday=strftime_now('%d %B %Y')%}{{'Today "
             "Date: '~today~'\n'}}{{'Reasoning Mode: '+reasoning_mode+'\n\n'}}{{'## Custom Instructions\n\n'}}",
             "system_message.replace('/no_think','').replace('/think','').rstrip()",
             "custom_instructions.replace('/system_override','').rstrip()",
             "'<|im_start|>'+message.role+'\n'+content+'<|im_end|>\n'",
             "'<|im_start|>assistant\n<think>\n\n</think>\n'+content.lstrip('\n')+'<|im_end|>\n'", ANSWERS},
     .system_place = SYSTEM_SWITCHES,
     .user = CHATML("user"),
     .assistant = CHATML("assistant"),
     .generation = "<|im_start|>assistant\n",
     .heading = "## Metadata\n\nKnowledge Cutoff Date: June 2025\nToday Date: \3\nReasoning Mode: ",
     .dates = true,
     .whole_months = true},
    {.name = "Phi-4",
     .has = {"'<|im_start|>user<|im_sep|>'+message.content+'<|im_end|><|im_start|>assistant<|im_sep|>'",
             "{{message.content+'<|im_end|>'}}"},
     .system = {"<|im_start|>system<|im_sep|>", "<|im_end|>"},
     .user = {"<|im_start|>user<|im_sep|>", "<|im_end|>"},
     .assistant = {"<|im_start|>assistant<|im_sep|>", "<|im_end|>"},
     .generation = "<|im_start|>assistant<|im_sep|>",
     .alternates = true},
    {.name = "Llama 3.1",
     .has = {LLAMA3_EXPRESSION, "'Cutting Knowledge Date: December 2023\n'", "'26 Jul 2024'", ANSWERS},
     .system_place = SYSTEM_HEADED,
     .system = LLAMA3("system"),
     .user = LLAMA3("user"),
     .assistant = LLAMA3("assistant"),
     .generation = "<|start_header_id|>assistant<|end_header_id|>\n\n",
     .heading = "Cutting Knowledge Date: December 2023\nToday Date: \3\n\n",
     .date = "26 Jul 2024",
     .dates = true,
     .trims = true},
    {.name = "Llama 3",
     .has = {LLAMA3_EXPRESSION, ANSWERS},
     .lacks = {"date_string", "strftime_now"},
     .system = LLAMA3("system"),
     .user = LLAMA3("user"),
     .assistant = LLAMA3("assistant"),
     .generation = "<|start_header_id|>assistant<|end_header_id|>\n\n",
     .trims = true},
    {.name = "Gemma 3",
     .has = {"'<start_of_turn>'+role+'\n'+(first_user_prefixifloop.firstelse'')", "messages[0].content+'\n\n'",
             ANSWERS},
     .system_place = SYSTEM_FIRST,
     .system = {"", "\n\n"},
     .user = GEMMA("user"),
     .assistant = GEMMA("model"),
     .generation = "<start_of_turn>model\n",
     .trims = true,
     .alternates = true},
    {.name = "Gemma",
     .has = {"'<start_of_turn>'+role+'\n'+message.content|trim+'<end_of_turn>\n'", "System role not supported",
             ANSWERS},
     .system_place = SYSTEM_REFUSED,
     .user = GEMMA("user"),
     .assistant = GEMMA("model"),
     .generation = "<start_of_turn>model\n",
     .trims = true,
     .alternates = true},
    {.name = "Llama 2",
     .has = {"bos_token+'[INST] '+content.strip()+' [/INST]'", "' '+content.strip()+' '+eos_token",
             "'<<SYS>>\n'+system_message+'\n<</SYS>>\n\n'+message.content"},
     .lacks = {"true==true", ANSWERS},
     .system_place = SYSTEM_FIRST,
     .system = {"<<SYS>>\n", "\n<</SYS>>\n\n"},
     .user = {"\1[INST] ", " [/INST]"},
     .assistant = {" ", " \2"},
     .generation = "",
     .trims = true,
     .trims_whole = true,
     .alternates = true},
    {.name = "Mistral v1",
     .has = {"' [INST] '+system_message+'\n\n'+message.content+' [/INST]'", "' '+message.content+eos_token"},
     .system_place = SYSTEM_FIRST,
     .system = {"", "\n\n"},
     .user = {" [INST] ", " [/INST]"},
     .assistant = {" ", "\2"},
     .generation = "",
     .alternates = true},
    {.name = "Mistral v3",
     .has = {"'[INST] '+system_message+'\n\n'+message.content+'[/INST]'", "' '+message.content|trim+eos_token",
             "loop.lastandsystem_messageisdefined"},
     .system_place = SYSTEM_LAST,
     .system = {"", "\n\n"},
     .user = {"[INST] ", "[/INST]"},
     .assistant = {" ", "\2"},
     .generation = "",
     .trims_answers = true,
     .alternates = true},
    {.name = "Mistral Nemo",
     .has = {"'[INST]'+system_message+'\n\n'+message.content+'[/INST]'", "{{message.content+eos_token}}",
             "loop.lastandsystem_messageisdefined"},
     .system_place = SYSTEM_LAST,
     .system = {"", "\n\n"},
     .user = {"[INST]", "[/INST]"},
     .assistant = {"", "\2"},
     .generation = "",
     .alternates = true},
    {.name = "Mistral 7B v0.1",
     .has = {"'[INST] '+message.content+' [/INST]'", "{{message.content+eos_token+' '}}"},
     .lacks = {"system_message", "<<SYS>>"},
     .system_place = SYSTEM_REFUSED,
     .user = {"[INST] ", " [/INST]"},
     .assistant = {"", "\2 "},
     .generation = "",
     .alternates = true},
    {.name = "Mistral 7B v0.2",
     .has = {"'[INST] '+message.content+' [/INST]'", "{{message.content+eos_token}}"},
     .lacks = {"system_message", "<<SYS>>"},
     .system_place = SYSTEM_REFUSED,
     .user = {"[INST] ", " [/INST]"},
     .assistant = {"", "\2"},
     .generation = "",
     .alternates = true},
    {.name = "Phi-3 of April 2024",
     .has = {"'<|user|>\n'+message.content+'<|end|>\n<|assistant|>\n'", "{{message.content+'<|end|>\n'}}"},
     .system_place = SYSTEM_REFUSED,
     .user = PHI3("user"),
     .assistant = PHI3("assistant"),
     .generation = "<|assistant|>\n",
     .alternates = true},
    {.name = "Phi-3",
     .has = {"'<|user|>\n'+message.content+'<|end|>\n'", "'<|assistant|>\n'+message.content+'<|end|>\n'",
             "'<|system|>\n'+message.content+'<|end|>\n'"},
     .system = PHI3("system"),
     .user = PHI3("user"),
     .assistant = PHI3("assistant"),
     .generation = "<|assistant|>\n"},
    {.name = "Phi-3",
     .has = {"'<|'+message.role+'|>\n'+message.content+'<|end|>\n'", "'<|assistant|>\n'", ANSWERS},
     .system = PHI3("system"),
     .user = PHI3("user"),
     .assistant = PHI3("assistant"),
     .generation = "<|assistant|>\n"},
    {.name = "Phi-4-mini",
     .has = {"'<|'+message.role+'|>'+message.content+'<|end|>'", "'<|assistant|>'", ANSWERS},
     .system = {"<|system|>", "<|end|>"},
     .user = {"<|user|>", "<|end|>"},
     .assistant = {"<|assistant|>", "<|end|>"},
     .generation = "<|assistant|>"},
    {.name = "OLMo 2",
     .has = {"'<|user|>\n'+message.content+'\n'", "'<|assistant|>\n'+message.content+eos_token+'\n'",
             "'<|system|>\n'+message.content+'\n'"},
     .system = {"<|system|>\n", "\n"},
     .user = {"<|user|>\n", "\n"},
     .assistant = {"<|assistant|>\n", "\2\n"},
     .generation = "<|assistant|>\n",
     .last_after = "\2"},
    {.name = "Zephyr",
     .has = {"'<|user|>\n'+message.content+eos_token", "'<|system|>\n'+message.content+eos_token",
             "'<|assistant|>\n'+message.content+eos_token"},
     .newlines = true,
     .system = {"<|system|>\n", "\2\n"},
     .user = {"<|user|>\n", "\2\n"},
     .assistant = {"<|assistant|>\n", "\2\n"},
     .generation = "<|assistant|>\n"},
};
enum { N_STYLES = sizeof styles / sizeof *styles };

/* ---- spelling --------------------------------------------------------------------------------------------------- */

/* A template read once: its expressions without white space, and what it writes by itself between them. */
typedef struct speller {
    const char *at;
    text out;
    size_t n_newlines, n_others; /* stretches of the template's own text: one newline each, or anything else */
    bool first, trim, block;     /* nothing came before; the tag before said so ("-"); it was no {{ }} */
    bool open;                   /* a tag, a comment or a string never ends */
} speller;

/* Stands for a quote within a string, and around the template's own text. */
enum { QUOTE = 4, OWN_TEXT = 3 };

static int put(speller *s, char c) {
    return text_add_bytes(&s->out, &c, 1);
}

static bool ends_with(const speller *s, const char *tail) {
    size_t n = strlen(tail);
    return s->out.n >= n && memcmp(s->out.data + s->out.n - n, tail, n) == 0;
}

/* A string; behind a string and "+" it is more of that string. */
static int spell_string(speller *s) {
    char quote = *s->at++;
    if (ends_with(s, "'+")) s->out.n -= 2;
    else TRY(put(s, '\''));
    for (; *s->at && *s->at != quote; s->at++) {
        char c = *s->at;
        if (c == '\\' && s->at[1]) {
            c = *++s->at;
            c = c == 'n' ? '\n' : c == 't' ? '\t' : c;
        }
        TRY(put(s, c == '\'' ? QUOTE : c));
    }
    if (*s->at) s->at++;
    else s->open = true;
    return put(s, '\'');
}

/* ['name'] as .name */
static int spell_bracket(speller *s) {
    size_t n = s->out.n, open = n;
    s->at++;
    if (!ends_with(s, "'")) return put(s, ']');
    for (open = n - 1; open > 0 && s->out.data[open - 1] != '\'' && s->out.data[open - 1] != '['; open--) continue;
    if (open < 2 || s->out.data[open - 1] != '\'' || s->out.data[open - 2] != '[') return put(s, ']');
    s->out.data[open - 2] = '.';
    memmove(s->out.data + open - 1, s->out.data + open, n - 1 - open);
    s->out.n = n - 2;
    return 0;
}

/* From "{{" or "{%" to its end. */
static int spell_tag(speller *s) {
    char close = s->at[1] == '{' ? '}' : '%';
    TRY(text_add_bytes(&s->out, s->at, 2));
    s->at += 2 + (s->at[2] == '-');
    while (*s->at) {
        bool dash = s->at[0] == '-' && s->at[1] == close && s->at[2] == '}';
        if (dash || (s->at[0] == close && s->at[1] == '}')) {
            s->at += 2 + dash;
            s->trim = dash;
            s->block = close == '%';
            return text_add(&s->out, "%c}", close);
        }
        if (*s->at == '\'' || *s->at == '"') TRY(spell_string(s));
        else if (*s->at == ']') TRY(spell_bracket(s));
        else if (strchr(" \t\r\n", *s->at)) s->at++;
        else TRY(put(s, *s->at++));
    }
    s->open = true;
    return 0;
}

static void skip_comment(speller *s) {
    const char *end = strstr(s->at + 2, "#}");
    s->trim = end && end[-1] == '-';
    s->block = true;
    s->open = s->open || !end;
    s->at = end ? end + 2 : s->at + strlen(s->at);
}

static bool is_space(char c) {
    return c && strchr(" \t\r\n", c);
}

/* The template's own text up to `end`, as transformers lets Jinja trim it: a newline behind a block goes, and so does
 * the white space before a block at the start of a line. */
static int spell_text(speller *s, const char *end) {
    const char *from = s->at, *to = end;
    bool dash = *end && end[2] == '-', block = *end && end[1] != '{';
    while (s->trim && from < to && is_space(*from)) from++;
    if (!s->trim && s->block && from < to && *from == '\n') from++;
    while (dash && to > from && is_space(to[-1])) to--;
    if (block && !dash) {
        const char *line = to;
        while (line > from && (line[-1] == ' ' || line[-1] == '\t')) line--;
        if (line > from ? line[-1] == '\n' : s->first || (s->block && from > s->at)) to = line;
    }
    s->first = false;
    s->at = end;
    if (from == to) return 0;
    if (to - from == 1 && *from == '\n') s->n_newlines++;
    else s->n_others++;
    return put(s, OWN_TEXT);
}

static const char *next_tag(const char *at) {
    for (; *at; at++)
        if (at[0] == '{' && (at[1] == '{' || at[1] == '%' || at[1] == '#')) break;
    return at;
}

/* Jinja drops one newline at the end of a template. */
static int spell(speller *s) {
    s->first = true;
    while (*s->at) {
        const char *tag = next_tag(s->at);
        if (!*tag && tag == s->at + 1 && *s->at == '\n') break;
        TRY(spell_text(s, tag));
        if (!*tag) break;
        if (tag[1] == '#') skip_comment(s);
        else TRY(spell_tag(s));
    }
    return put(s, 0);
}

/* ---- recognising ------------------------------------------------------------------------------------------------ */

static bool is_style(const chat_style *style, const speller *s) {
    for (size_t i = 0; i < sizeof style->has / sizeof *style->has; i++)
        if (style->has[i] && !strstr(s->out.data, style->has[i])) return false;
    for (size_t i = 0; i < sizeof style->lacks / sizeof *style->lacks; i++)
        if (style->lacks[i] && strstr(s->out.data, style->lacks[i])) return false;
    return !s->open && s->n_others == 0 && (s->n_newlines > 0) == style->newlines;
}

/* Part of a string as the template means it. */
static int copy_string(const char *from, const char *to, char **out) {
    *out = mem_string_n(from, (size_t)(to - from));
    if (!*out) return ERR_DATA;
    for (char *p = *out; *p; p++)
        if (*p == QUOTE) *p = '\'';
    return 0;
}

/* A ChatML template may bring the system message of conversations without one, as a string of its own. */
static int find_default_system(const speller *s, chat_template *out) {
    static const char opening[] = "'<|im_start|>system\n", ending[] = "<|im_end|>";
    for (const char *at = s->out.data; (at = strstr(at, opening));) {
        at += strlen(opening);
        const char *end = strstr(at, ending);
        if (end && (size_t)(end - at) < strcspn(at, "'")) return copy_string(at, end, &out->default_system);
    }
    return 0;
}

/* What SmolLM3's template says where no message does, with thoughts and without. */
static int find_personas(const speller *s, chat_template *out) {
    static const char with[] = "{%elifreasoning_mode=='/think'%}{{'", without[] = "'}}{%else%}{{'";
    const char *at = strstr(s->out.data, with), *end = at ? strchr(at + strlen(with), '\'') : NULL;
    if (!end || strncmp(end, without, strlen(without)) != 0) return 0;
    TRY(copy_string(at + strlen(with), end, &out->persona[true]));
    at = end + strlen(without);
    return copy_string(at, at + strcspn(at, "'"), &out->persona[false]);
}

/* Whole characters, at most 60 bytes of them. */
static int start_of(const char *template) {
    size_t n = 0, bytes = strlen(template);
    for (size_t step; n < bytes; n += step) {
        step = utf8_length(template + n, bytes - n);
        if (!step) step = 1;
        if (n + step > 60) break;
    }
    return (int)n;
}

static int refuse(const char *template, const char *path) {
    text known = {0};
    int code = 0;
    for (size_t i = 0; i < N_STYLES && !code; i++)
        if (i == 0 || strcmp(styles[i].name, styles[i - 1].name) != 0)
            code = text_add(&known, "%s%s", i ? ", " : "", styles[i].name);
    code = err_set(ERR_DATA, "%s: the chat template '%.*s...' is of no family that is known here (%s)", path,
                   start_of(template), template, known.data ? known.data : "");
    text_free(&known);
    return code;
}

static int recognise(const speller *s, const char *template, const char *path, chat_template *out) {
    for (size_t i = 0; i < N_STYLES && !out->style; i++)
        if (is_style(&styles[i], s)) out->style = &styles[i];
    if (!out->style) return refuse(template, path);
    out->bos = strstr(s->out.data, "bos_token") && out->style->user.before[0] != '\1';
    out->eos = strstr(s->out.data, "{%else%}{{eos_token}}{%endif%}") != NULL;
    if (out->style->system_place != SYSTEM_SWITCHES) return find_default_system(s, out);
    TRY(find_personas(s, out));
    return out->persona[false] ? 0 : refuse(template, path);
}

int chat_recognise(const char *template, const char *path, chat_template *out) {
    speller s = {.at = template};
    *out = (chat_template){0};
    int code = spell(&s);
    if (!code) code = recognise(&s, template, path, out);
    text_free(&s.out);
    return code;
}

void chat_template_free(chat_template *t) {
    mem_free(t->default_system);
    for (int i = 0; i < 2; i++) mem_free(t->persona[i]);
    *t = (chat_template){0};
}
