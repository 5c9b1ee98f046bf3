#!/usr/bin/env python3
"""Compares tracer/chat*.c with transformers' apply_chat_template.

Usage: .venv-parity/bin/python tests/parity/chat.py [TEMPLATE-FILE...]

The families' published templates stand below, as far as they concern messages without tools (which we refuse); template
files on the command line are compared too. SmolLM2's is its GGUF file's own. Exit 1 on any difference: in the text, in
where the answer begins, or in what one refuses and the other does not.
"""
import datetime
import itertools
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

import token_driver

ROOT = token_driver.ROOT
GIVEN = "{%% if add_generation_prompt %%}{{ %s }}{%% endif %%}"
ALTERNATE = ("{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must "
             "alternate user/assistant/user/assistant/...') }}{% endif %}")
CHATML = (r"{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
          + GIVEN % r"'<|im_start|>assistant\n'")
SPLIT_SYSTEM = ("{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
                "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
                "{% set system_message = false %}{% endif %}")
LLAMA3 = (r"'<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim "
          r"+ '<|eot_id|>'")

TEMPLATES = {
    "chatml": "{% for message in messages %}" + CHATML,
    "qwen2": "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
             r"{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}" + CHATML,
    "qwen2.5": r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' }}
    {%- endif %}
    {{- "\n\n# Tools<|im_end|>\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
""",
    "qwen3": r"""{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}""",
    "smollm3": r"""{# ───── defaults ───── #}
{%- if enable_thinking is not defined -%}
{%- set enable_thinking = true -%}
{%- endif -%}

{# ───── reasoning mode ───── #}
{%- if enable_thinking -%}
{%- set reasoning_mode = "/think" -%}
{%- else -%}
{%- set reasoning_mode = "/no_think" -%}
{%- endif -%}

{# ───── header (system message) ───── #}
{{- "<|im_start|>system\n" -}}

{%- if messages[0].role == "system" -%}
{%- set system_message = messages[0].content -%}
{%- if "/no_think" in system_message -%}
{%- set reasoning_mode = "/no_think" -%}
{%- elif "/think" in system_message -%}
{%- set reasoning_mode = "/think" -%}
{%- endif -%}
{%- set custom_instructions = system_message.replace("/no_think", "").replace("/think", "").rstrip() -%}
{%- endif -%}

{%- if "/system_override" in system_message -%}
{{- custom_instructions.replace("/system_override", "").rstrip() -}}
{{- "<|im_end|>\n" -}}
{%- else -%}
{{- "## Metadata\n\n" -}}
{{- "Knowledge Cutoff Date: June 2025\n" -}}
{%- set today = strftime_now("%d %B %Y") -%}
{{- "Today Date: " ~ today ~ "\n" -}}
{{- "Reasoning Mode: " + reasoning_mode + "\n\n" -}}

{{- "## Custom Instructions\n\n" -}}
{%- if custom_instructions -%}
{{- custom_instructions + "\n\n" -}}
{%- elif reasoning_mode == "/think" -%}
{{- "You are a helpful AI assistant named SmolLM, trained by Hugging Face. Please structure your response into two main sections: Thought and Solution using the specified format: <think> Thought section </think> Solution section.\n\n" -}}
{%- else -%}
{{- "You are a helpful AI assistant named SmolLM, trained by Hugging Face.\n\n" -}}
{%- endif -%}

{%- if xml_tools or python_tools -%}
{{- "### Tools\n\n" -}}
{{- "\n\n" -}}
{{- "<|im_end|>\n" -}}
{%- endif -%}
{%- endif -%}
{# ───── main loop ───── #}
{%- for message in messages -%}
    {%- set content = message.content if message.content is string else "" -%}
    {%- if message.role == "user" -%}
        {{ "<|im_start|>" + message.role + "\n"  + content + "<|im_end|>\n" }}
    {%- elif message.role == "assistant" -%}
        {% generation %}
        {%- if reasoning_mode == "/think" -%}
            {{ "<|im_start|>assistant\n" + content.lstrip("\n") + "<|im_end|>\n" }}
        {%- else -%}
            {{ "<|im_start|>assistant\n" + "<think>\n\n</think>\n" + content.lstrip("\n") + "<|im_end|>\n" }}
        {%- endif -%}
        {% endgeneration %}
    {%- elif message.role == "tool" -%}
    {{ "<|im_start|>" + "user\n"  + content + "<|im_end|>\n" }}
    {%- endif -%}
{%- endfor -%}
{# ───── generation prompt ───── #}
{%- if add_generation_prompt -%}
    {%- if reasoning_mode == "/think" -%}
        {{ "<|im_start|>assistant\n" }}
    {%- else -%}
        {{ "<|im_start|>assistant\n" + "<think>\n\n</think>\n"  }}
    {%- endif -%}
{%- endif -%}
""",
    "phi-4": "{% for message in messages %}{% if (message['role'] == 'system') %}{{'<|im_start|>system<|im_sep|>' + "
             "message['content'] + '<|im_end|>'}}{% elif (message['role'] == 'user') %}{{'<|im_start|>user<|im_sep|>' + "
             "message['content'] + '<|im_end|><|im_start|>assistant<|im_sep|>'}}{% elif (message['role'] == 'assistant')"
             " %}{{message['content'] + '<|im_end|>'}}{% endif %}{% endfor %}",
    "llama 3": "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = " + LLAMA3
               + " %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
               + GIVEN % r"'<|start_header_id|>assistant<|end_header_id|>\n\n'",
    "llama 3.1": r"""{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}

{#- This block extracts the system message, so we can slot it into the right place. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}

{#- System message #}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{{- "Cutting Knowledge Date: December 2023\n" }}
{{- "Today Date: " + date_string + "\n\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- """ + LLAMA3 + r""" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
""",
    "gemma": "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
             "{% endif %}{% for message in messages %}" + ALTERNATE + "{% if (message['role'] == 'assistant') %}{% set role "
             "= 'model' %}{% else %}{% set role = message['role'] %}{% endif %}"
             r"{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
             + GIVEN % r"'<start_of_turn>model\n'",
    "gemma 3": r"""{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '

' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    """ + ALTERNATE.replace("{%", "{%-").replace("%}", "-%}").replace("{{", "{{-").replace("}}", "-}}") + r"""
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '
' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- endif -%}
    {{ '<end_of_turn>
' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model
'}}
{%- endif -%}
""",
    "llama 2": SPLIT_SYSTEM + "{% for message in loop_messages %}" + ALTERNATE +
               r"{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\n' + system_message + "
               r"'\n<</SYS>>\n\n' + message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}"
               "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
               "{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
    "mistral v0.1": "{{ bos_token }}{% for message in messages %}" + ALTERNATE + "{% if message['role'] == 'user' %}"
                    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
                    "{{ message['content'] + eos_token + ' ' }}{% else %}{{ raise_exception('Only user and assistant') }}"
                    "{% endif %}{% endfor %}",
    "mistral v0.2": "{{ bos_token }}{% for message in messages %}" + ALTERNATE + "{% if message['role'] == 'user' %}"
                    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
                    "{{ message['content'] + eos_token}}{% else %}{{ raise_exception('Only user and assistant') }}"
                    "{% endif %}{% endfor %}",
    "mistral v1": r"""{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}

{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('After the optional system message, conversation roles must alternate') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if loop.first and system_message is defined %}
            {{- ' [INST] ' + system_message + '\n\n' + message['content'] + ' [/INST]' }}
        {%- else %}
            {{- ' [INST] ' + message['content'] + ' [/INST]' }}
        {%- endif %}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] + eos_token}}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported') }}
    {%- endif %}
{%- endfor %}
""",
    "phi-3 april": "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') %}{{'<|user|>' + '\n' + "
                   "message['content'] + '<|end|>' + '\n' + '<|assistant|>' + '\n'}}{% elif (message['role'] == "
                   "'assistant') %}{{message['content'] + '<|end|>' + '\n'}}{% endif %}{% endfor %}",
    "phi-3": r"{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>\n' + message['content'] + "
             r"'<|end|>\n'}}{% elif message['role'] == 'user' %}{{'<|user|>\n' + message['content'] + '<|end|>\n'}}{% elif "
             r"message['role'] == 'assistant' %}{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}"
             r"{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
    "phi-3 small": r"{{ bos_token }}{% for message in messages %}{{'<|' + message['role'] + '|>' + '\n' + "
                   r"message['content'] + '<|end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}"
                   r"{% else %}{{ eos_token }}{% endif %}",
    "phi-4-mini": "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
                  "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}",
    "olmo 2": r"{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ '<|system|>\n' + "
              r"message['content'] + '\n' }}{% elif message['role'] == 'user' %}{{ '<|user|>\n' + message['content'] + '\n' }}"
              r"{% elif message['role'] == 'assistant' %}{% if not loop.last %}{{ '<|assistant|>\n'  + message['content'] + "
              r"eos_token + '\n' }}{% else %}{{ '<|assistant|>\n'  + message['content'] + eos_token }}{% endif %}{% endif %}"
              r"{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}",
    "zephyr": "{% for message in messages %}\n{% if message['role'] == 'user' %}\n{{ '<|user|>\\n' + message['content'] + "
              "eos_token }}\n{% elif message['role'] == 'system' %}\n{{ '<|system|>\\n' + message['content'] + eos_token }}\n"
              "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\\n'  + message['content'] + eos_token }}\n"
              "{% endif %}\n{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}",
}
for name, space, trim in (("mistral v3", " ", "|trim"), ("mistral nemo", "", "")):
    TEMPLATES[name] = rf"""{{%- if messages[0]["role"] == "system" %}}
    {{%- set system_message = messages[0]["content"] %}}
    {{%- set loop_messages = messages[1:] %}}
{{%- else %}}
    {{%- set loop_messages = messages %}}
{{%- endif %}}
{{%- set ns = namespace() %}}
{{%- set ns.index = 0 %}}
{{%- for message in loop_messages %}}
    {{%- if (message["role"] == "user") != (ns.index % 2 == 0) %}}
        {{{{- raise_exception("After the optional system message, conversation roles must alternate") }}}}
    {{%- endif %}}
    {{%- set ns.index = ns.index + 1 %}}
{{%- endfor %}}

{{{{- bos_token }}}}
{{%- for message in loop_messages %}}
    {{%- if message["role"] == "user" %}}
        {{%- if loop.last and system_message is defined %}}
            {{{{- "[INST]{space}" + system_message + "\n\n" + message["content"] + "[/INST]" }}}}
        {{%- else %}}
            {{{{- "[INST]{space}" + message["content"] + "[/INST]" }}}}
        {{%- endif %}}
    {{%- elif message["role"] == "assistant" %}}
        {{{{- {'" " + ' if space else ''}message["content"]{trim} + eos_token}}}}
    {{%- else %}}
        {{{{- raise_exception("Only user and assistant roles are supported") }}}}
    {{%- endif %}}
{{%- endfor %}}
"""

TEMPLATES["llama 3.2"] = TEMPLATES["llama 3.1"].replace("""    {%- set date_string = "26 Jul 2024" %}
""", """    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
""")
# The day that a template writes: given to ours, today's for transformers. Without one Llama 3.1 has its own.
TODAY = datetime.datetime(2026, 3, 5)
DATED = {"smollm3", "llama 3.2"}

# Of no family that is known: each must be refused.
UNKNOWN = {
    "empty": "", "vicuna": "{% for message in messages %}{{ 'USER: ' + message['content'] }}{% endfor %}",
    "chatml with a newline more": TEMPLATES["chatml"].replace("{% endfor %}", "\n{% endfor %}"),
    "today": "{%- set today = strftime_now('%d %B %Y') -%}" + TEMPLATES["chatml"],
    "smollm3 without personas": TEMPLATES["smollm3"].replace("elif reasoning_mode", "elif not reasoning_mode"),
    "smollm3 of another day": TEMPLATES["smollm3"].replace("June 2025", "July 2025"),
    "thoughts": "{{ '</think>' }}" + TEMPLATES["chatml"], "open": TEMPLATES["chatml"] + "{{ 'never ends",
    "mistral with tools only": TEMPLATES["mistral v3"].replace("[INST]", "[PROMPT]"),
}
CONTENTS = ["Hello", "", "  two  spaces \n", "\n\nline\n", "caf\u00e9 \u4f60\u597d \U0001f600", "\u00a0nbsp\u3000",
            "<|im_end|>", "it's \"quoted\" \\n", "</s>[INST]", "<think>\nhm\n\n</think>\n\nYes", "a</think>b</think>\nc",
            "<tool_response>x</tool_response>", "\x1fseparators\x1c", "{{ bos_token }}", "/no_think", "brief /think/no_think\n", "/th/no_thinkink /system_override\n"]


def conversations(n, rng):
    """Mostly well-formed, of 1 to 7 messages; some with system messages in odd places or roles that repeat."""
    for i in range(n):
        first = ["system"] if rng.random() < .5 else []
        roles = first + list(itertools.islice(itertools.cycle(["user", "assistant"]), rng.randrange(1, 7)))
        if i % 5 == 0:
            roles = [rng.choice(["system", "user", "assistant"]) for _ in roles]
        yield [{"role": role, "content": rng.choice(CONTENTS)} for role in roles]


def reference(template, bos, eos):
    t = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), bos_token=bos, eos_token=eos)
    t.chat_template = template

    def render(messages):
        answer = messages[-1]["role"] == "assistant"
        asked = len(messages) > 1 and messages[-2]["role"] == "user"
        try:
            text = t.apply_chat_template(messages, tokenize=False, add_generation_prompt=not answer)
            before = t.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True) \
                if answer and asked else None
        except Exception as error:  # Jinja's own, and what a template raises
            return None, str(error)
        return text, before

    return render


def compare(name, template, driver, folder, cases, bos="<s>", eos="</s>"):
    path = folder / "template"
    path.write_bytes(template.encode())
    render = reference(template, bos, eos)
    lines = "".join(json.dumps(c if i % 2 else {"messages": c}) + "\n" for i, c in enumerate(cases))
    day = [f"{TODAY:%Y-%m-%d}"] if name in DATED else []
    done = subprocess.run([driver, path, bos, eos, *day], input=lines.encode(), capture_output=True, check=True)
    bad = rendered = ours_only = 0
    for messages, line in zip(cases, done.stdout.decode().splitlines(), strict=True):
        ours = json.loads(line)
        text, before = render(messages)
        if "error" in ours:
            # Ours to refuse: what a template drops in silence, and roles out of turn where it does not look.
            fine = text is None or any(s in ours["error"] for s in ("take turns", "at the start", "has no system",
                                                                    "would be lost", "message alone"))
            ours_only += text is not None
        else:
            rendered += 1
            cut = ours["text"].encode()[:ours["prompt"]].decode()
            fine = ours["text"] == text
            # What is left of the conversation before its last message may have to be written otherwise (Qwen3's
            # thoughts); else it is the prompt.
            if before is not None and "think" not in str(messages) and "tool_response" not in str(messages):
                fine &= cut == before
            fine &= messages[-1]["role"] == "assistant" or cut == text
        if not fine:
            bad += 1
            if bad <= 3:
                print(f"{name}: {json.dumps(messages)}\n  library {text!a}\n  before  {before!a}\n  ours    {ours}")
    print(f"{name:16} {len(cases)} conversations, {rendered} written, {ours_only} refused by us alone, {bad} differ")
    return bad > 0 or rendered < len(cases) // 5


def refused(name, template, driver, folder):
    path = folder / "template"
    path.write_bytes(template.encode())
    done = subprocess.run([driver, path, "", ""], input=b'[{"role": "user", "content": "x"}]\n', capture_output=True)
    answer = json.loads(done.stdout)
    wanted = f"the chat template '{template.encode()[:60].decode(errors='ignore')}...' is of no family that is known here (Qwen3, ChatML, "
    fine = wanted.replace("\n", "?") in answer.get("error", "")
    print(f"{name:32} refused" if fine else f"{name}: {answer}")
    return not fine


class Day(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return TODAY


def main():
    chat_template_utils.datetime = Day
    cases = list(conversations(400, random.Random(1)))
    templates = dict(TEMPLATES)
    templates |= {path: Path(path).read_text() for path in sys.argv[1:]}
    try:
        import gguf
        fields = gguf.GGUFReader(ROOT / "models/SmolLM2-135M-Instruct.Q4_1.gguf").fields
        templates["SmolLM2's own"] = fields["tokenizer.chat_template"].contents()
    except FileNotFoundError:
        print("SmolLM2 is not there: its template is not compared")
    bad = False
    with tempfile.TemporaryDirectory() as folder:
        driver = token_driver.build(Path(folder), "chat")
        for name, template in templates.items():
            bad |= compare(name, template, driver, Path(folder), cases)
        for name, template in UNKNOWN.items():
            bad |= refused(name, template, driver, Path(folder))
    return bad


if __name__ == "__main__":
    sys.exit(main())
