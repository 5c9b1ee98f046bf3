"""What a tokenizer.json may say that the families' own do not: every kind of split, digits, prefixes, replacements and
added tokens, over two small vocabularies, byte-level and of characters."""
import json
import random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Metaspace, Sequence, Split

from token_driver import compare
from token_texts import COMPOSING, FRAGMENTS, TEXT, characters, random_strings
from tokens_bytes import FIXTURES, from_json
from tokens_pieces import SPACE

BEHAVIORS = ("isolated", "removed", "merged_with_previous", "merged_with_next", "contiguous")
PLAIN = ByteLevel(add_prefix_space=False, use_regex=False)
PATTERNS = [Regex(p) for p in (
    r"\s+", r"\p{L}*", r"\d{2,3}", r"[^\S\n]+", r"(?<=[a-z])\d|\W", r"(?i:THE|'ll)|[\s'.]", r"^ *|\n$", r"\p{Lu}(?!\p{Ll})",
    r"(?>\s+)x|\w{3}", r"[\]\[\\^-]|[^\w\s]", r"\n\z|\A.", "e\u0301|\u4e2d+", r".")] + [" ", "...", "|>", "\n"]


def splits():
    for i, pattern in enumerate(PATTERNS):
        for invert in (False, True):
            for behavior in BEHAVIORS:
                yield f"{i}/{behavior}/{invert}", [
                    Split(pattern, behavior, invert)]


def byte_level():
    """(name, pre-tokenizer)"""
    yield "prefix", ByteLevel(add_prefix_space=True, use_regex=True)
    yield "prefix, whole", ByteLevel(add_prefix_space=True, use_regex=False)
    for each in (False, True):
        yield f"digits {each}", Sequence([Digits(each), PLAIN])
    for name, steps in splits():
        yield name, Sequence([*steps, PLAIN])
    yield "three splits", Sequence([Split(Regex(r"\p{N}{1,3}"), "isolated"), Split(Regex("[\u4e00-\u9fa5]+"), "isolated"),
                                    Split(Regex(r"\s+(?!\S)|\s+"), "isolated"), PLAIN])
    yield "digits then gpt-2", Sequence([Digits(True), ByteLevel(add_prefix_space=False)])


ADDED = [AddedToken("<|endoftext|>", special=True, normalized=True, lstrip=True, rstrip=True),
         AddedToken("<|im_start|>", special=True, normalized=False, rstrip=True),
         AddedToken("Hello", normalized=True, lstrip=True), AddedToken("\n\n", normalized=False),
         AddedToken("the the", normalized=True), AddedToken(" a", normalized=True, rstrip=True),
         AddedToken("e\u0301", normalized=True)]


def byte_tokenizers(v):
    vocab = {t: i for i, t in enumerate(v.tokens)}
    for n, (name, pre) in enumerate(byte_level()):
        t = Tokenizer(models.BPE(vocab, v.merges, ignore_merges=n % 3 == 0))
        t.pre_tokenizer = pre
        t.decoder = decoders.ByteLevel()
        t.add_tokens(ADDED[n % 2:])
        yield f"bytes {name}", t


def train_characters():
    """Characters as they are, spaces as U+2581, no byte tokens but for a few: unknown ones are avoided."""
    rng = random.Random(0)
    corpus = ["".join(rng.choice(FRAGMENTS) for _ in range(12)).replace("\0", "") for _ in range(2000)]
    t = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    t.normalizer = normalizers.Replace(" ", SPACE)
    t.train_from_iterator([TEXT.replace("\0", ""), *corpus], trainers.BpeTrainer(
        vocab_size=1400, special_tokens=["<unk>", "<s>", *(f"<0x{b:02X}>" for b in range(256))], max_token_length=8,
        show_progress=False))
    model = json.loads(t.to_str())["model"]
    return model["vocab"], [tuple(m) for m in model["merges"]]


def character_level():
    """(name, normalizer, pre-tokenizer)"""
    space = normalizers.Replace(" ", SPACE)
    for scheme in ("always", "first", "never"):
        for split in (False, True):
            yield f"metaspace {scheme} {split}", None, Metaspace(SPACE, scheme, split)
            yield f"both {scheme} {split}", normalizers.Prepend(SPACE), Metaspace(SPACE, scheme, split)
    yield "prepend", normalizers.Prepend("\u00e9"), None
    yield "nothing", None, None
    yield "shrink", normalizers.Sequence([normalizers.Replace("  ", ""), space, normalizers.Replace("the", "a")]), None
    yield "grow", normalizers.Sequence([normalizers.Replace("a", "the the"), space, normalizers.Prepend("The")]), None
    yield "composed", normalizers.Sequence([normalizers.NFC(), space, normalizers.Prepend(SPACE)]), None
    yield "composed last", normalizers.Sequence([normalizers.Replace("a", "e\u0301"), normalizers.NFC()]), Metaspace(SPACE)
    yield "digits", space, Sequence([Digits(True), Split(Regex(r"\s"), "merged_with_next")])
    for name, steps in splits():
        yield name, space, steps[0]


def character_tokenizers():
    vocab, merges = train_characters()
    for n, (name, normalizer, pre) in enumerate(character_level()):
        t = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True,
                                 ignore_merges=n % 3 == 1))
        if normalizer:
            t.normalizer = normalizer
        if pre:
            t.pre_tokenizer = pre
        t.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(),
                                       decoders.Strip(" ", 1, 0)])
        t.add_tokens(ADDED[n % 2:])
        t.add_special_tokens(["<s>"])
        yield f"characters {name}", t


def save(t, path, old):
    """`old`: merges as "a b", as tokenizers wrote them before 0.20."""
    if not old:
        t.save(str(path))
        return
    facts = json.loads(t.to_str())
    merges = facts["model"]["merges"]
    if not any(" " in part for m in merges for part in m):
        facts["model"]["merges"] = [" ".join(m) for m in merges]
    path.write_text(json.dumps(facts, ensure_ascii=len(merges) % 2 == 0))



def run(args, driver, folder):
    v = from_json("cross", FIXTURES / "cross.json")
    bad = False
    for n, (name, t) in enumerate([*byte_tokenizers(v), *character_tokenizers()]):
        known = v.known if name.startswith("bytes") else list(characters())
        cases = list(random_strings(max(200, args.random // 8), random.Random(args.seed + n), known,
                                    FRAGMENTS + COMPOSING + ["Hello", " a", "the the", "<s>", SPACE, "<0x41>"]))
        cases.append((TEXT.replace("\0", ""), n % 2 == 0))
        path = folder / f"json{n}.json"
        save(t, path, old=n % 2 == 1)

        def ids(text, special):
            t.encode_special_tokens = not special
            return t.encode(text, add_special_tokens=False).ids

        bad |= compare(f"{name} JSON", driver, [path], cases, ids)
    return bad
