#!/usr/bin/env python3
"""Compares tracer/tokenizer.c with the `tokenizers` library.

Usage: .venv-parity/bin/python tests/parity/tokens.py [--check] [--random N] [--seed N] [--model FILE.gguf]

Three vocabularies, each under the real pre-tokenizer of every family: the tiny model's, SmolLM2's (from the GGUF file),
and `cross`, trained here without any pre-tokenizer, so that its merges reach across every kind of boundary and a wrong
cut cannot hide (no merge of the other two joins digits, or a full stop and a newline).

Without --check: writes fixtures/cross.json, tokens.txt and tokens_VOCABULARY_PRE.ids, which tests/unit/test_tokenizer.c
reads. With --check: computes the ids anew and compares with the files. Either way N random strings per combination then
go through both tokenizers (tokenize_main.c, built here). Exit 1 on any difference.

What stays out: characters whose bytes SmolLM2's vocabulary lacks (the library drops them in silence, we refuse the
text), Qwen2's NFC normaliser (our tokens cover the text as it is), and code points that Unicode assigned after 3.2, on
whose category the two regular-expression engines may differ.
"""
import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import unicodedata
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, models, trainers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
FIXTURES = HERE / "fixtures"
NORMAL, CONTROL = 1, 3

# As published in the tokenizer.json of Llama 3 and of Qwen2.
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
QWEN2 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
         r"|\s+(?!\S)|\s+")


def split(regex):
    return Sequence([Split(Regex(regex), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)])


PRE_TOKENIZERS = {
    "gpt-2": ByteLevel(add_prefix_space=False, use_regex=True),
    "smollm": Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]),
    "llama-bpe": split(LLAMA3),
    "qwen2": split(QWEN2),
}


class Vocabulary:
    def __init__(self, name, tokens, types, merges):
        self.name, self.tokens, self.types, self.merges = name, tokens, types, merges
        self.control = [t for t, kind in zip(tokens, types) if kind == CONTROL]

    def tokenizer(self, pre, special):
        """The reference; `special` makes it recognise control tokens in the text."""
        vocab = {t: i for i, t in enumerate(self.tokens)}
        t = Tokenizer(models.BPE(vocab, self.merges, ignore_merges=pre == "llama-bpe"))
        t.pre_tokenizer = PRE_TOKENIZERS[pre]
        if special:
            t.add_special_tokens([AddedToken(c, special=True, normalized=False) for c in self.control])
        return t

    def write_facts(self, pre, path):
        lines = [f"{pre} {len(self.tokens)} {len(self.merges)}"]
        lines += [f"{kind} {token}" for token, kind in zip(self.tokens, self.types)]
        lines += [" ".join(m) for m in self.merges]
        path.write_bytes("".join(line + "\n" for line in lines).encode())

    def characters(self):
        """Every character of Unicode 3.2 whose UTF-8 bytes the vocabulary has."""
        to_byte = ByteLevel.alphabet()
        known = set(self.tokens) & set(to_byte)
        encoder = ByteLevel(add_prefix_space=False, use_regex=False)
        old = unicodedata.ucd_3_2_0
        for code in range(0x110000):
            c = chr(code)
            if old.category(c) in ("Cn", "Cs") or unicodedata.category(c) != old.category(c):
                continue
            if set(encoder.pre_tokenize_str(c)[0][0]) <= known:
                yield c


def from_json(name, path):
    facts = json.loads(path.read_text())
    vocab = facts["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.get)
    control = {t["content"] for t in facts["added_tokens"]}
    types = [CONTROL if t in control else NORMAL for t in tokens]
    return Vocabulary(name, tokens, types, [tuple(m) for m in facts["model"]["merges"]])


def smollm2(path):
    import gguf
    fields = gguf.GGUFReader(path).fields
    read = lambda key: fields["tokenizer.ggml." + key].contents()
    return Vocabulary("smollm2", read("tokens"), read("token_type"), [tuple(m.split(" ")) for m in read("merges")])


TEXT = "".join([
    "Hello  World, it's O'Neill's: WE'LL, they've, I'M, you'd, can'T, we'Re, he'D, 'sword, '\u017f, 'tis, ''ll.\n\n",
    "for (int i = 0; i < 1024; i++) {\n\tif (a[i] != 0x7fff)\n\t\treturn -1; /* 3.14159e-10 */\n}\r\n\r\n",
    "def f(x):\n    return {'key': x ** 2, \"b\": [1, 22, 333, 4444, 55555, 666666]}\n        \n  # end   \n",
    "tabs\t\tand \t mixed  \t\n\n\n next\r\nline\rold\r\n  indented\n \n  \n",
    "na\u00efve caf\u00e9 \u00e9t\u00e9; e\u0301 a\u0308o\u0323\u0302 \u0928\u092e\u0938\u094d\u0924\u0947 "
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35\n",
    "\u4f60\u597d\uff0c\u4e16\u754c\uff01\u3000\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8\u3002"
    "\ud55c\uad6d\uc5b4 \ud14d\uc2a4\ud2b8\n",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f44d\U0001f3fd \u2764\ufe0f \U0001f1eb\U0001f1f7\u20ac\n",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645 \u0661\u0662\u0663 "
    "\u05e9\u05dc\u05d5\u05dd \u041f\u0440\u0438\u0432\u0435\u0442\n",
    "nbsp\u00a0\u00a0x \u00a0y\u00a0 z; \u3000wide\u3000\u3000 w; nel\u0085\u0085x; \u180emvs\u180e; "
    "zw\u200b\u200b sp; ls\u2028ps\u2029\u202fx\u1680y\u205f\u2003 z\u001c\u001e\n",
    "\u00bd\u00b2\u2167\u2462\u0967 7 42  123   1234 12345678901234567890 1,000.5 v2.0b3\n",
    "<|endoftext|>text<|im_start|><|im_end |>\n",
    "control \u0000\u0001\u007f\u0080\u200e\ufeff\ufffd\n",
    "supercalifragilisticexpialidocious" * 8, " ", "=" * 70, "\n", "A" * 300, " ", "\u4e2d" * 100, "." * 33, " " * 257,
    "x", "\n" * 41, "\t" * 19, "end  \t  ",
])

FRAGMENTS = [
    " ", "  ", "   ", " " * 9, "\t", "\n", "\n\n", "\r", "\r\n", "\u00a0", "\u3000", "\u0085", "\u180e", "\u2028",
    "\u000b", "\u200b", "\u202f", "\u001c", "'s", "'S", "'ll", "'LL", "'Ve", "'t", "'", "'\u017f", "'re", "'D",
    "\u017f", "a", "the", "The", " the", "Hello", "A", "0", "7", "12", "3456", "\u00bd", "\u0663", "\u2167", ".",
    "...", ",", "-", "_", "/*", "*/", "(", "{", "e\u0301", "\u0301", "\u00e9", "\u4e2d", "\u65e5\u672c", "\ud55c",
    "\u0645", "\U0001f468\u200d\U0001f469", "\u200d", "\ufe0f", "<|endoftext|>", "<|im_start|>", "<|", "|>",
    "endoftext", "\u0000", "\u007f", "\ufeff", "\U00020000", "\U0001d54f",
]


def train_cross(path):
    """A tokenizer.json of the parts that we read. Every eighth merge is left out: its token then comes only as a whole
    word of a family that looks these up (llama-bpe)."""
    rng = random.Random(0)
    corpus = ["".join(rng.choice(FRAGMENTS) for _ in range(12)) for _ in range(3000)]
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    t.train_from_iterator([TEXT, *corpus], trainers.BpeTrainer(
        vocab_size=1024, special_tokens=["<|endoftext|>", "<|im_start|>"], initial_alphabet=ByteLevel.alphabet(),
        max_token_length=12, show_progress=False))
    model = json.loads(t.to_str())["model"]
    facts = {"added_tokens": [{"id": 0, "content": "<|endoftext|>"}, {"id": 1, "content": "<|im_start|>"}],
             "model": {"vocab": model["vocab"], "merges": [m for i, m in enumerate(model["merges"]) if i % 8 != 7]}}
    path.write_text(json.dumps(facts, ensure_ascii=False, separators=(",", ":")) + "\n")


def write_or_check(path, content, check):
    if not check:
        path.write_bytes(content)
    elif not path.exists() or path.read_bytes() != content:
        print(f"{path.relative_to(ROOT)}: differs from what the library gives now")
        return 1
    return 0


def fixtures(vocabularies, check):
    bad = write_or_check(FIXTURES / "tokens.txt", TEXT.encode(), check)
    for v in vocabularies:
        for pre in PRE_TOKENIZERS:
            ids = v.tokenizer(pre, special=False).encode(TEXT, add_special_tokens=False).ids
            lines = [" ".join(map(str, ids[i:i + 24])) for i in range(0, len(ids), 24)]
            bad |= write_or_check(FIXTURES / f"tokens_{v.name}_{pre}.ids", ("\n".join(lines) + "\n").encode(), check)
    return bad


def build_driver(folder):
    driver = folder / "tokenize_main"
    sources = ["tests/parity/tokenize_main.c", "tracer/tokenizer.c", "base/err.c", "base/mem.c"]
    subprocess.run([os.environ.get("CC", "gcc"), "-std=c17", "-O2", "-D_GNU_SOURCE", "-I.", "-o", driver, *sources,
                    "-lpcre2-8", "-lxxhash"], cwd=ROOT, check=True)
    return driver


def random_strings(v, n, rng):
    """(text, special): mostly awkward fragments side by side, now and then any character."""
    known = list(v.characters())
    fragments = [f for f in FRAGMENTS if set(f) <= set(known)]
    for _ in range(n):
        parts = [rng.choice(known) if rng.random() < .15 else rng.choice(fragments) for _ in range(rng.randrange(25))]
        yield "".join(parts), rng.random() < .3


def compare(v, pre, cases, driver, folder):
    facts = folder / f"{v.name}_{pre}"
    v.write_facts(pre, facts)
    records = b"".join(b"%d %d\n%s" % (len(text.encode()), special, text.encode()) for text, special in cases)
    lines = subprocess.run([driver, facts], input=records, capture_output=True, check=True).stdout.decode().split("\n")
    reference = [v.tokenizer(pre, special) for special in (False, True)]
    bad = 0
    for (text, special), line in zip(cases, lines, strict=False):
        want = " ".join(map(str, reference[special].encode(text, add_special_tokens=False).ids))
        if line != want:
            bad += 1
            if bad <= 3:
                print(f"{v.name} {pre}: {text!a} special={special}\n  library {want}\n  ours    {line}")
    if len(lines) != len(cases) + 1:
        print(f"{v.name} {pre}: {len(lines) - 1} answers to {len(cases)} strings")
        bad += 1
    print(f"{v.name:8} {pre:10} {len(cases)} random strings, {bad} differ")
    return bad > 0


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--check", action="store_true", help="compare with the fixtures instead of writing them")
    p.add_argument("--random", type=int, default=2000, metavar="N", help="random strings per combination")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--model", default=ROOT / "models/SmolLM2-135M-Instruct.Q4_1.gguf")
    args = p.parse_args()

    cross = FIXTURES / "cross.json"
    if not args.check:
        FIXTURES.mkdir(exist_ok=True)
        train_cross(cross)
    vocabularies = [from_json("tiny", ROOT / "tests/tiny/tokenizer.json"), from_json("cross", cross),
                    smollm2(args.model)]
    bad = fixtures(vocabularies, args.check)
    with tempfile.TemporaryDirectory() as folder:
        driver = build_driver(Path(folder))
        for v in vocabularies:
            cases = list(random_strings(v, args.random, random.Random(args.seed)))
            for pre in PRE_TOKENIZERS:
                bad |= compare(v, pre, cases, driver, Path(folder))
    return bad


if __name__ == "__main__":
    sys.exit(main())
