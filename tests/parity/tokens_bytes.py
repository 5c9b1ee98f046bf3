"""Byte-level BPE under the pre-tokenizers of all families, from GGUF and from tokenizer.json.

Three vocabularies: the tiny model's, SmolLM2's (from its GGUF file), and `cross`, trained here without any pre-tokenizer,
so that its merges reach across every kind of boundary and a wrong cut cannot hide (no merge of the other two joins
digits, or a full stop and a newline). What stays out: characters whose bytes SmolLM2's vocabulary lacks (the library
drops them in silence, we refuse the text)."""
import json
import random

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, trainers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

from token_driver import CONTROL, NORMAL, ROOT, compare, write_gguf
from token_texts import FRAGMENTS, TEXT, characters, mixed, random_strings

FIXTURES = ROOT / "tests/parity/fixtures"

# As published in the tokenizer.json of Llama 3, Qwen2, GPT-4o and Mistral Nemo.
CL100K = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
LLAMA3, QWEN2 = CL100K % r"\p{N}{1,3}", CL100K % r"\p{N}"
GPT4O = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
TEKKEN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?"
          r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")


def split(regex, behavior="isolated", invert=False):
    return Sequence([Split(Regex(regex), behavior, invert), ByteLevel(add_prefix_space=False, use_regex=False)])


PRE_TOKENIZERS = {
    "gpt-2": ByteLevel(add_prefix_space=False, use_regex=True),
    "smollm": Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]),
    "llama-bpe": split(LLAMA3),
    "smaug-bpe": split(LLAMA3),
    "dbrx": split(LLAMA3, "removed", True),
    "qwen2": split(QWEN2),
    "gpt-4o": split(GPT4O, "removed", True),
    "tekken": split(TEKKEN),
}
WHOLE_WORDS = ("llama-bpe", "smaug-bpe", "tekken")
IN_FIXTURES = {"tiny": ("gpt-2", "smollm", "llama-bpe", "qwen2"), "cross": tuple(PRE_TOKENIZERS),
               "smollm2": ("smollm",)}


class Vocabulary:
    def __init__(self, name, tokens, types, merges):
        self.name, self.tokens, self.types, self.merges = name, tokens, types, merges
        self.control = [t for t, kind in zip(tokens, types) if kind == CONTROL]
        to_byte = set(ByteLevel.alphabet())
        single = set(tokens) & to_byte
        encoder = ByteLevel(add_prefix_space=False, use_regex=False)
        self.known = list(characters(lambda c: set(encoder.pre_tokenize_str(c)[0][0]) <= single))

    def tokenizer(self, pre, special):
        """The reference; `special` makes it recognise control tokens in the text."""
        vocab = {t: i for i, t in enumerate(self.tokens)}
        t = Tokenizer(models.BPE(vocab, self.merges, ignore_merges=pre in WHOLE_WORDS))
        t.pre_tokenizer = PRE_TOKENIZERS[pre]
        if pre == "qwen2":
            t.normalizer = normalizers.NFC()
        t.add_special_tokens([AddedToken(c, special=True, normalized=False) for c in self.control])
        t.encode_special_tokens = not special
        return t


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
        return True
    return False


def stored_ids(v, pre):
    ids = v.tokenizer(pre, special=False).encode(TEXT, add_special_tokens=False).ids
    lines = [" ".join(map(str, ids[i:i + 24])) for i in range(0, len(ids), 24)]
    return ("\n".join(lines) + "\n").encode()


def fixtures(vocabularies, check):
    """What tests/unit/test_tokenizer.c reads."""
    bad = write_or_check(FIXTURES / "tokens.txt", TEXT.encode(), check)
    for v in vocabularies:
        for pre in IN_FIXTURES[v.name]:
            bad |= write_or_check(FIXTURES / f"tokens_{v.name}_{pre}.ids", stored_ids(v, pre), check)
    return bad


def composed(t, text):
    """What Qwen2's tokenizer.json makes of it."""
    return t.normalizer.normalize_str(text) if t.normalizer else text


def compare_families(v, args, driver, folder):
    bad, known = False, set(v.known)
    cases = list(random_strings(args.random, random.Random(args.seed), v.known))
    long = mixed(args.bytes if v.name != "tiny" else 1 << 16, v.known)
    for pre in PRE_TOKENIZERS:
        reference = [v.tokenizer(pre, special) for special in (False, True)]
        gguf_file, json_file = folder / f"{v.name}_{pre}.gguf", folder / f"{v.name}_{pre}.json"
        write_gguf(gguf_file, v.tokens, v.types, pre=pre, merges=v.merges, add_bos_token=False)
        reference[0].save(str(json_file))
        writes = lambda text: known.issuperset(composed(reference[0], text))
        these = [c for c in cases if writes(c[0])] + [("".join(filter(writes, long.splitlines(True))), False)]
        ids = lambda text, special: reference[special].encode(text, add_special_tokens=False).ids
        for name, file in (("GGUF", gguf_file), ("JSON", json_file)):
            bad |= compare(f"{v.name} {pre} {name}", driver, [file], these, ids)
    return bad


def run(args, driver, folder):
    cross = FIXTURES / "cross.json"
    if not args.check:
        FIXTURES.mkdir(exist_ok=True)
        train_cross(cross)
    vocabularies = [from_json("tiny", ROOT / "tests/tiny/tokenizer.json"), from_json("cross", cross),
                    smollm2(args.model)]
    bad = fixtures(vocabularies, args.check)
    for v in vocabularies:
        bad |= compare_families(v, args, driver, folder)
    return bad
