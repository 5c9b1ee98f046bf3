/* Conversations as text, written out by hand; tests/parity/chat.py compares with transformers. */
#include "base/err.h"
#include "base/mem.h"
#include "tracer/chat.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#define OK(call)                                 \
    do {                                         \
        if (call) fail_msg("%s", err_message()); \
    } while (0)

/* SmolLM2's, with its newlines as they stand in its GGUF file. */
static const char smollm2[] =
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou "
    "are "
    "a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + "
    "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|im_start|>assistant\n' }}{% endif %}";
/* The same kind in another hand: double quotes, dots, escaped newlines, no system message of its own. */
static const char chatml[] = "{%- for message in messages -%}\n  {{- \"<|im_start|>\" + message.role + \"\\n\" +\n"
                             "      message.content + \"<|im_end|>\\n\" -}}\n{%- endfor -%}\n"
                             "{%- if add_generation_prompt -%} {{- \"<|im_start|>assistant\\n\" -}} {%- endif -%}\n";
static const char gemma[] =
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif "
    "%}"
    "{% for message in messages %}{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + "
    "'<end_of_turn>\\n' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}";
static const char llama2[] =
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% endif %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{{ ' '  + content.strip() + ' ' + eos_token }}";
static const char nemo[] =
    "{{- bos_token }}{%- if loop.last and system_message is defined %}{{- \"[INST]\" + system_message + \"\\n\\n\" + "
    "message[\"content\"] + \"[/INST]\" }}{%- endif %}{{- message[\"content\"] + eos_token}}";

/* Llama 3.2's: it writes the day where somebody says which that is. */
static const char llama32[] =
    "{{- bos_token }}{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    "{%- set date_string = strftime_now(\"%d %b %Y\") %}{%- else %}{%- set date_string = \"26 Jul 2024\" %}{%- endif %}"
    "{%- endif %}{{- \"<|start_header_id|>system<|end_header_id|>\\n\\n\" }}"
    "{{- \"Cutting Knowledge Date: December 2023\\n\" }}{{- \"Today Date: \" + date_string + \"\\n\\n\" }}"
    "{{- system_message }}{{- \"<|eot_id|>\" }}{%- for message in messages %}{{- '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}";
/* SmolLM3's, without what tools need; in it, two personas. */
static const char smollm3[] =
    "{# defaults #}\n{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}\n"
    "{{- \"<|im_start|>system\\n\" -}}"
    "{%- set custom_instructions = system_message.replace(\"/no_think\", \"\").replace(\"/think\", \"\").rstrip() -%}"
    "{%- if \"/system_override\" in system_message -%}"
    "{{- custom_instructions.replace(\"/system_override\", \"\").rstrip() -}}{{- \"<|im_end|>\\n\" -}}{%- else -%}"
    "{{- \"## Metadata\\n\\n\" -}}{{- \"Knowledge Cutoff Date: June 2025\\n\" -}}"
    "{%- set today = strftime_now(\"%d %B %Y\") -%}{{- \"Today Date: \" ~ today ~ \"\\n\" -}}"
    "{{- \"Reasoning Mode: \" + reasoning_mode + \"\\n\\n\" -}}{{- \"## Custom Instructions\\n\\n\" -}}"
    "{%- if custom_instructions -%}{{- custom_instructions + \"\\n\\n\" -}}{%- elif reasoning_mode == \"/think\" -%}"
    "{{- \"It's for <think>.\\n\\n\" -}}{%- else -%}{{- \"Plain.\\n\\n\" -}}{%- endif -%}{%- endif -%}"
    "{%- for message in messages -%}{%- if message.role == \"user\" -%}"
    "{{ \"<|im_start|>\" + message.role + \"\\n\"  + content + \"<|im_end|>\\n\" }}{%- else -%}"
    "{{ \"<|im_start|>assistant\\n\" + \"<think>\\n\\n</think>\\n\" + content.lstrip(\"\\n\") + \"<|im_end|>\\n\" }}"
    "{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}{{ \"<|im_start|>assistant\\n\" }}{%- endif -%}";

static const token_text bos = {"<s>", 3}, eos = {"</s>", 4};

/* `answer`: what stands behind the prompt. */
static void check_on(const char *date, const char *template, const char *words, const char *prompt,
                     const char *answer) {
    chat_text c;
    char want[512];
    snprintf(want, sizeof want, "%s%s", prompt, answer);
    OK(chat_render(words, "chat.json", template, bos, eos, date, &c));
    assert_string_equal(c.text, want);
    assert_int_equal(c.n, strlen(want));
    assert_int_equal(c.prompt, strlen(prompt));
    chat_free(&c);
}

static void check(const char *template, const char *words, const char *prompt, const char *answer) {
    check_on(NULL, template, words, prompt, answer);
}

#define U(content) "{\"role\":\"user\",\"content\":\"" content "\"}"
#define A(content) "{\"role\":\"assistant\",\"content\":\"" content "\"}"
#define S(content) "{\"role\":\"system\",\"content\":\"" content "\"}"

static void test_chatml(void **state) {
    (void)state;
    check(smollm2, "[" U("Hi") "]",
          "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
          "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
          "");
    check(chatml, "{\"messages\":[" S("Be brief.") "," U("Hi\\n") "," A("Yes") "]}",
          "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi\n<|im_end|>\n<|im_start|>assistant\n",
          "Yes<|im_end|>\n");
}

static void test_other_families(void **state) {
    (void)state;
    check(gemma, "[" U(" Hi ") "," A("\\tYes\\n") "]",
          "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n", "Yes<end_of_turn>\n");
    check(llama2, "[" S("Short.") "," U(" Hi ") "," A("Yes") "," U("Why?") "]",
          "<s>[INST] <<SYS>>\nShort.\n<</SYS>>\n\n Hi [/INST] Yes </s><s>[INST] Why? [/INST]", "");
    check(llama2, "[" U(" Hi ") "," A(" Yes") "]", "<s>[INST] Hi [/INST]", " Yes </s>");
    check(nemo, "[" S("Short.") "," U("Hi") "," A("Yes") "," U("Why?") "]",
          "<s>[INST]Hi[/INST]Yes</s>[INST]Short.\n\nWhy?[/INST]", "");
}

static void refused(const char *template, const char *words, const char *message) {
    chat_text c;
    assert_int_equal(chat_render(words, "chat.json", template, bos, eos, NULL, &c), ERR_DATA);
    assert_null(c.text);
    assert_string_equal(err_message(), message);
}

#define LLAMA32(date)                                                                                \
    "<s><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday " \
    "Date: " date "\n\n<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"           \
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
#define SMOLLM3(date, mode, words)                                                                                     \
    "<|im_start|>system\n## Metadata\n\nKnowledge Cutoff Date: June 2025\nToday Date: " date "\nReasoning Mode: " mode \
    "\n\n## Custom Instructions\n\n" words "\n\n"
#define HI "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
#define NO_THOUGHT "<think>\n\n</think>\n"

/* The day that is given, in each template's form; never that of today. */
static void test_dates(void **state) {
    (void)state;
    check(llama32, "[" U("Hi") "]", LLAMA32("26 Jul 2024"), "");
    check_on("2028-02-29", llama32, "[" U("Hi") "]", LLAMA32("29 Feb 2028"), "");
    check_on("2026-11-05", smollm3, "[" U("Hi") "]", SMOLLM3("05 November 2026", "/think", "It's for <think>.") HI, "");
    static const char *const none[] = {
        "",           "2026",       "2026-1-05",   "2026-13-01",  "2026-00-01", "2026-02-29", "2100-02-29",
        "2026-04-31", "2026-01-00", "2026-01-01 ", "26 Jul 2024", "2026/01/01", "-026-01-01"};
    for (size_t i = 0; i < sizeof none / sizeof *none; i++) assert_int_equal(chat_check_date(none[i]), ERR_USAGE);
    assert_string_equal(err_message(), "--date: '-026-01-01' is no date (want YYYY-MM-DD)");
    OK(chat_check_date("2000-02-29"));
    chat_text c;
    assert_int_equal(chat_render("[" U("Hi") "]", "chat.json", smollm3, bos, eos, NULL, &c), ERR_USAGE);
    assert_string_equal(err_message(),
                        "chat.json: the chat template, SmolLM3, writes the day's date: give one with --date "
                        "YYYY-MM-DD");
    assert_int_equal(chat_render("[" U("Hi") "]", "chat.json", chatml, bos, eos, "2026-11-05", &c), ERR_USAGE);
    assert_string_equal(err_message(), "chat.json: the chat template, ChatML, writes no date: leave out --date");
}

/* SmolLM3's system message says whether it thinks; its answers begin with an empty thought where it does not. */
static void test_switches(void **state) {
    (void)state;
    const char *day = "2026-03-05";
    check_on(day, smollm3, "[" S("Be brief. /no_think ") "," U("Hi") "," A("\n\nYes\n") "]",
             SMOLLM3("05 March 2026", "/no_think", "Be brief.") HI NO_THOUGHT, "Yes\n<|im_end|>\n");
    check_on(day, smollm3, "[" S("/no_think") "," U("Hi") "]",
             SMOLLM3("05 March 2026", "/no_think", "Plain.") HI NO_THOUGHT, "");
    check_on(day, smollm3, "[" S("a/thinkb /think") "," U("Hi") "," A("\n<think>x</think>") "]",
             SMOLLM3("05 March 2026", "/think", "ab") HI, "<think>x</think><|im_end|>\n");
    check_on(day, smollm3, "[" S("Mine. /system_override/no_think") "," U("Hi") "]",
             "<|im_start|>system\nMine.<|im_end|>\n" HI NO_THOUGHT, "");
}

static void test_faults(void **state) {
    (void)state;
    static const char none[] = "chat.json: holds no messages (an array of objects with role and content, or an object "
                               "whose \"messages\" is one)";
    refused(chatml, "", "chat.json: no JSON at byte 0");
    refused(chatml, "[" U("\u00e9\xff") "]", "chat.json: byte 29 is no UTF-8");
    refused(chatml, "[" U("a\\u0000b") "]", "chat.json: a NUL (\\u0000) in a text is not supported");
    refused(chatml, "[]", none);
    refused(chatml, "{\"messages\":{}}", none);
    refused(chatml, "[1]", "chat.json: message 0 has no role");
    refused(chatml, "[" U("") ",{\"role\":\"tool\",\"content\":\"x\"}]",
            "chat.json: message 1: role 'tool' is not supported (system, user and assistant are)");
    refused(chatml, "[{\"role\":\"user\",\"content\":[\"x\"]}]", "chat.json: message 0: its content is no text");
    refused(chatml, "[{\"role\":\"user\"}]", "chat.json: message 0: its content is no text");
    refused(chatml, "[{\"role\":\"assistant\",\"content\":\"\",\"tool_calls\":[]}]",
            "chat.json: message 0: 'tool_calls' is not supported (role and content are)");
    refused(chatml, "{\"tools\":[],\"messages\":[" U("") "]}", "chat.json: 'tools' are not supported");
    refused(gemma, "[" S("x") "," U("y") "]", "chat.json: Gemma has no system messages");
    refused(gemma, "[" U("x") "," U("y") "]",
            "chat.json: message 1: in Gemma, user and assistant take turns, the user first");
    refused(gemma, "[" A("x") "]", "chat.json: message 0: in Gemma, user and assistant take turns, the user first");
    refused(llama2, "[" S("x") "]", "chat.json: holds a system message alone");
    refused(llama2, "[" U("x") "," S("y") "]",
            "chat.json: message 1: Llama 2 takes a system message only at the start");
    refused(
        nemo, "[" S("x") "," U("y") "," A("z") "]",
        "chat.json: Mistral Nemo writes the system message into the last turn, which is the assistant's: it would be "
        "lost");
}

#define KNOWN                                                                                                       \
    "(Qwen3, ChatML, SmolLM3, Phi-4, Llama 3.1, Llama 3, Gemma 3, Gemma, Llama 2, Mistral v1, Mistral v3, Mistral " \
    "Nemo, "                                                                                                        \
    "Mistral 7B v0.1, Mistral 7B v0.2, Phi-3 of April 2024, Phi-3, Phi-4-mini, OLMo 2, Zephyr)"

static void test_unknown_templates(void **state) {
    (void)state;
    char other[sizeof smollm2 + 64];
    refused("{{ messages }} and then a great many words that nobody knows anything about", "[" U("x") "]",
            "chat.json: the chat template '{{ messages }} and then a great many words that nobody knows...' is of no "
            "family "
            "that is known here " KNOWN);
    refused("", "[" U("x") "]", "chat.json: the chat template '...' is of no family that is known here " KNOWN);
    /* A family's expressions do not help a template that writes more than the family does. */
    static const char *const more[] = {"%s\n\nEND", "%s{{ strftime_now('%%d') }}", "%s{# </think> ",
                                       "%s{{ '</think>' }}", "x%s"};
    for (size_t i = 0; i < sizeof more / sizeof *more; i++) {
        chat_text c;
        snprintf(other, sizeof other, more[i], smollm2);
        assert_int_equal(chat_render("[" U("x") "]", "chat.json", other, bos, eos, NULL, &c), ERR_DATA);
        assert_non_null(strstr(err_message(), "is of no family that is known here"));
    }
}

static void test_prompt_tokens(void **state) {
    (void)state;
    int64_t offset[] = {0, 0, 4, 9, 12, 15}; /* BOS, then four tokens */
    token_list list = {.offset = offset, .n = 5};
    assert_int_equal(token_list_before(&list, 9), 3);
    assert_int_equal(token_list_before(&list, 10), 4); /* one that lies across */
    assert_int_equal(token_list_before(&list, 15), 5);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_chatml),        cmocka_unit_test(test_other_families),
        cmocka_unit_test(test_dates),         cmocka_unit_test(test_switches),
        cmocka_unit_test(test_faults),        cmocka_unit_test(test_unknown_templates),
        cmocka_unit_test(test_prompt_tokens),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
