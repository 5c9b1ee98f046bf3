"""Awkward texts for the comparisons of tokenizers."""
import random
import unicodedata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

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
# What Unicode's normal forms change.
COMPOSING = ["\u0301", "\u0323", "\u0344", "\u0f73", "\u212b", "\u0958", "\u1100", "\u1161", "\u11a8", "\uac00", "\u0cc6", "\u0cc2",
             "\u0cd5", "\u09c7\u09be", "\U0001d15e", "e", "A\u030a"]


def characters(known=None):
    """Every character of Unicode 3.2 whose category is still what it was then: on later ones the two engines of regular
    expressions may differ. `known(c)` says which a vocabulary can write."""
    old = unicodedata.ucd_3_2_0
    for code in range(1, 0x110000):
        c = chr(code)
        if old.category(c) in ("Cn", "Cs") or unicodedata.category(c) != old.category(c):
            continue
        if known is None or known(c):
            yield c


def random_strings(n, rng, known, fragments=FRAGMENTS + COMPOSING):
    """(text, special): mostly awkward fragments side by side, now and then any of the characters `known`."""
    have = set(known)
    fragments = [f for f in fragments if set(f) <= have]
    for _ in range(n):
        parts = [rng.choice(known) if rng.random() < .15 else rng.choice(fragments) for _ in range(rng.randrange(25))]
        yield "".join(parts), rng.random() < .3


def mixed(size, known, seed=1):
    """`size` bytes of this project's own prose and code with random strings between: what a user's text looks like, and
    worse."""
    rng = random.Random(seed)
    have = set(known)
    files = sorted(p for ending in ("c", "h", "py", "md", "txt") for p in ROOT.glob(f"*/**/*.{ending}")
                   if not set(p.relative_to(ROOT).parts) & {"build", "out", "models", ".venv", ".venv-parity"})
    rng.shuffle(files)
    parts, n = [], 0
    while n < size:
        for path in files:
            text = path.read_text(errors="ignore")[:20000]
            parts.append("".join(c for c in text if c in have))
            parts += [s for s, _ in random_strings(20, rng, known)]
            n += sum(len(p.encode()) for p in parts[-21:])
            if n >= size:
                break
    return "".join(parts)
