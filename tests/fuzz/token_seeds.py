"""Write the seeds of fuzz_tokenizer_json and fuzz_chat: small tokenizers that between them hold every step, and a
conversation for each kind of template."""
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SPACE = "\u2581"


def vocabulary(*tokens):
    return {t: i for i, t in enumerate(tokens)}


def added(i, content, **flags):
    return {"id": i, "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
            "special": True, **flags}


def tokenizer(vocab, merges, **parts):
    return {"version": "1.0", "added_tokens": parts.pop("added_tokens", []), "normalizer": parts.pop("normalizer", None),
            "pre_tokenizer": parts.pop("pre_tokenizer", None), "post_processor": parts.pop("post_processor", None),
            "decoder": parts.pop("decoder", None), "model": {"type": "BPE", "vocab": vocab, "merges": merges, **parts}}


def split(pattern, behavior="Isolated", invert=False, kind="Regex"):
    return {"type": "Split", "pattern": {kind: pattern}, "behavior": behavior, "invert": invert}


def sequence(key, *parts):
    return {"type": "Sequence", key: list(parts)}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
LETTERS = vocabulary("<s>", "\u0120", "a", "b", "c", "1", "2", "\u010a", "'", "s", "ab", "\u0120a", "\u010a\u010a", "12")
MERGES = ["a b", ["\u0120", "a"], "\u010a \u010a", ["1", "2"]]
CHARS = vocabulary("<unk>", "<s>", SPACE, "a", "b", SPACE + "a", "ab", "<0x0A>", "<0xC3>", "<0xA9>", "<0x20>")
DECODER = sequence("decoders", {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"},
                   {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0})
TEMPLATE = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                                                     {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}}

TOKENIZERS = {
    "gpt2": (tokenizer(LETTERS, MERGES, pre_tokenizer={**BYTES, "use_regex": True, "add_prefix_space": True},
                       added_tokens=[added(0, "<s>", normalized=True)], decoder=BYTES), "ab a\n\nb's 12<s>"),
    "llama3": (tokenizer(LETTERS, MERGES, ignore_merges=True, normalizer={"type": "NFC"}, pre_tokenizer=sequence(
        "pretokenizers", split("(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+"
                               "[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"), BYTES)), "ab  a\n 12's\n\n"),
    "splits": (tokenizer(LETTERS, MERGES, pre_tokenizer=sequence(
        "pretokenizers", {"type": "Digits", "individual_digits": True}, split("[^\\S\\n]+|(?<=a)b", "MergedWithNext"),
        split("a", "MergedWithPrevious", True, "String"), split("\\W*", "Contiguous"), split("c", "Removed"), BYTES)),
        "abc abc  a1b2\n"),
    "legacy": (tokenizer(CHARS, [f"{SPACE} a", "a b"], byte_fallback=True, fuse_unk=True, unk_token="<unk>",
                         normalizer=sequence("normalizers", {"type": "NFC"}, {"type": "Prepend", "prepend": SPACE},
                                             {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}),
                         added_tokens=[added(1, "<s>", rstrip=True), added(0, "<unk>", normalized=True),
                                       added(12, "aa", special=False, lstrip=True, normalized=True)],
                         post_processor=TEMPLATE, decoder=DECODER), "ab <s> \u00e9aae\u0301\n"),
    "metaspace": (tokenizer(CHARS, [[SPACE, "a"]], byte_fallback=True, pre_tokenizer={
        "type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": True},
        decoder={"type": "Metaspace", "replacement": SPACE}), "a  ab a"),
}
CHATML = ("{%- for message in messages %}\n{{- '<|im_start|>' + message['role'] + \"\\n\" + message.content + "
          "'<|im_end|>' + '\\n' }}\n{%- endfor %}{# x #}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
          "{% endif %}")
CHATS = {
    "chatml": CHATML, "default": "{{ '<|im_start|>system\\nIt\\'s me<|im_end|>\\n' }}" + CHATML,
    "qwen3": "{{ '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + "
             "content.lstrip('\\n') }}{% if loop.index0 > ns.last_query_index and add_generation_prompt %}{% endif %}",
    "llama2": "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{{ ' ' + content.strip() + ' ' + eos_token }}"
              "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}",
    "smollm3": "{{ '## Metadata\\n\\n' }}{{ 'Knowledge Cutoff Date: June 2025\\n' }}{% set today = strftime_now('%d %B %Y') %}"
               "{{ 'Today Date: ' ~ today ~ '\\n' }}{{ 'Reasoning Mode: ' + reasoning_mode + '\\n\\n' }}"
               "{{ '## Custom Instructions\\n\\n' }}{% elif reasoning_mode == '/think' %}{{ 'a' }}{% else %}{{ 'b' }}"
               "{% set c = system_message.replace('/no_think', '').replace('/think', '').rstrip() %}"
               "{{ custom_instructions.replace('/system_override', '').rstrip() }}"
               "{{ '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}{% if add_generation_prompt %}"
               "{{ '<|im_start|>assistant\\n<think>\\n\\n</think>\\n' + content.lstrip('\\n') + '<|im_end|>\\n' }}",
    "zephyr": "".join("{{ '<|%s|>\\n' + message['content'] + eos_token }}\n{%% if x %%}" % r
                      for r in ("user", "system", "assistant")),
}
CONVERSATION = [{"role": "system", "content": "s"}, {"role": "user", "content": " a\n"},
                {"role": "assistant", "content": "<think>x</think>b"}]


def main():
    for name, seeds in (("tokenizer_json", TOKENIZERS), ("chat", CHATS)):
        folder = HERE / "corpus" / name
        folder.mkdir(parents=True, exist_ok=True)
        for n, (seed, content) in enumerate(seeds.items()):
            first, second = (json.dumps(content[0], ensure_ascii=False), content[1]) if name != "chat" else (
                content, json.dumps({"messages": CONVERSATION} if n % 2 else CONVERSATION))
            (folder / seed).write_bytes(first.encode() + b"\0" + second.encode())


if __name__ == "__main__":
    sys.exit(main())
