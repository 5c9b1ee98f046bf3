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

static const token_text bos = {"<s>", 3}, eos = {"</s>", 4};

/* `answer`: what stands behind the prompt. */
static void check(const char *template, const char *words, const char *prompt, const char *answer) {
    chat_text c;
    char want[512];
    snprintf(want, sizeof want, "%s%s", prompt, answer);
    OK(chat_render(words, "chat.json", template, bos, eos, &c));
    assert_string_equal(c.text, want);
    assert_int_equal(c.n, strlen(want));
    assert_int_equal(c.prompt, strlen(prompt));
    chat_free(&c);
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
    assert_int_equal(chat_render(words, "chat.json", template, bos, eos, &c), ERR_DATA);
    assert_null(c.text);
    assert_string_equal(err_message(), message);
}

static void test_faults(void **state) {
    (void)state;
    static const char none[] = "chat.json: holds no messages (an array of objects with role and content, or an object "
                               "whose \"messages\" is one)";
    refused(chatml, "", "chat.json: no JSON at byte 0");
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

#define KNOWN                                                                                                    \
    "(Qwen3, ChatML, Phi-4, Llama 3.1, Llama 3, Gemma 3, Gemma, Llama 2, Mistral v1, Mistral v3, Mistral Nemo, " \
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
        assert_int_equal(chat_render("[" U("x") "]", "chat.json", other, bos, eos, &c), ERR_DATA);
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
        cmocka_unit_test(test_faults),        cmocka_unit_test(test_unknown_templates),
        cmocka_unit_test(test_prompt_tokens),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
