"""SentencePiece's BPE: GGUF's model "llama" against the `sentencepiece` library, and the same vocabularies with merges as
tokenizer.json against `tokenizers`, in the three forms that transformers writes (legacy Llama, Llama, Gemma).

Vocabularies: two that are trained here, with a space in front (Llama) and with user-defined symbols and none (Gemma), and
Gemma 3's own from its GGUF file. The libraries differ on some texts; each of our readers follows its own."""
import io
import random

import sentencepiece as spm
from sentencepiece import sentencepiece_model_pb2 as proto
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from token_driver import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, compare, write_gguf
from token_texts import FRAGMENTS, TEXT, characters, mixed, random_strings

SPACE = "\u2581"
SYMBOLS = ["\n", "\n\n", "\n\n\n", SPACE * 2, SPACE * 3, SPACE * 4, SPACE * 8, "\t", "\t\t", "<b>", "</b>", "[multi]"]
MORE = [SPACE, SPACE * 2, "<s>", "</s>", "<unk>", "<bos>", "<eos>", "<0x0A>", "<0xE2>", "<b>", "</b>", "[multi]", "<b>\n",
        "\n<s>", " <s> ", "<|user|>", "<|end|>\n", "\u20ac", "\U0001f680", "\x01", "\u0e2a"]


class Pieces:
    """A SentencePiece model; `prefix`: a space goes in front."""

    def __init__(self, name, model):
        self.name = name
        self.processor = spm.SentencePieceProcessor(model_proto=model.SerializeToString())
        self.prefix = model.normalizer_spec.add_dummy_prefix
        self.tokens = [p.piece for p in model.pieces]
        self.scores = [p.score for p in model.pieces]
        self.types = [p.type for p in model.pieces]
        self.control = [t for t, kind in zip(self.tokens, self.types) if kind in (CONTROL, UNKNOWN)]
        self.id = {t: i for i, t in enumerate(self.tokens)}

    def write_gguf(self, path):
        """As converters do: user-defined symbols with spaces."""
        texts = [t.replace(SPACE, " ") if kind == USER_DEFINED else t for t, kind in zip(self.tokens, self.types)]
        write_gguf(path, texts, self.types, model="llama", scores=self.scores, add_bos_token=False,
                   add_space_prefix=self.prefix)

    def encode(self, text, special):
        """Control tokens are no text for the library: what lies between them is encoded by itself."""
        ids = []
        for part, control in self.parts(text) if special else [(text, False)]:
            ids += [self.id[part]] if control else self.processor.encode(part)
        return ids

    def parts(self, text):
        plain = at = 0
        by_length = sorted(self.control, key=len, reverse=True)
        while at < len(text):
            found = next((c for c in by_length if text[at] == c[0] and text.startswith(c, at)), None)
            if found:
                yield from [(text[plain:at], False)] if at > plain else []
                yield found, True
                plain = at = at + len(found)
            else:
                at += 1
        yield from [(text[plain:], False)] if at > plain else []

    def merges(self):
        """Every way to cut a piece in two that are pieces, the best score first: what transformers converts to."""
        plain = {t for t, kind in zip(self.tokens, self.types) if kind in (NORMAL, USER_DEFINED)}
        found = []
        for t, score in zip(self.tokens, self.scores):
            if t in plain:
                cuts = [(t[:i], t[i:]) for i in range(1, len(t)) if t[:i] in plain and t[i:] in plain]
                found += [(*c, score) for c in sorted(cuts, key=lambda c: (self.id[c[0]], self.id[c[1]]))]
        return [m[:2] for m in sorted(found, key=lambda m: (m[2], len(m[0]), len(m[1])), reverse=True)]

    def library(self, form, merges):
        """The tokenizers library's, in a form that transformers writes."""
        t = Tokenizer(models.BPE(self.id, merges, fuse_unk=True, byte_fallback=True, unk_token="<unk>"))
        decode = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if form == "legacy":
            t.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
        elif form == "llama":
            t.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="first", split=False)
        elif form == "gemma":
            t.normalizer = normalizers.Replace(" ", SPACE)
            t.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        t.decoder = decoders.Sequence(decode)
        t.add_special_tokens([AddedToken(c, special=True, normalized=False, rstrip=c == "<|end|>") for c in self.control])
        t.add_tokens([AddedToken(c, special=False, normalized=form == "legacy")
                      for c, kind in zip(self.tokens, self.types) if kind == USER_DEFINED])
        bos = next(c for c in self.control if c in ("<s>", "<bos>"))
        t.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, self.id[bos])])
        return t


def trained(name, **options):
    """On texts in which anything may stand beside anything."""
    rng = random.Random(0)
    lines = ["".join(rng.choice(FRAGMENTS + MORE) for _ in range(12)) for _ in range(1500)]
    lines += [line for line in TEXT.split("\n")] + mixed(1 << 17, list(characters()), seed=2).split("\n")
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(line.replace("\0", "") for line in lines if line), model_writer=model, model_type="bpe",
        vocab_size=1500, byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        split_digits=True, allow_whitespace_only_pieces=True, split_by_whitespace=name != "gemma-like",
        character_coverage=.995, num_threads=1, minloglevel=2, **options)
    out = proto.ModelProto()
    out.ParseFromString(model.getvalue())
    return Pieces(name, out)


def from_gguf(path):
    import gguf
    fields = gguf.GGUFReader(path).fields
    read = lambda key: fields["tokenizer.ggml." + key].contents()
    model = proto.ModelProto()
    model.trainer_spec.model_type = proto.TrainerSpec.BPE
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.unk_id, model.trainer_spec.bos_id = read("unknown_token_id"), read("bos_token_id")
    model.trainer_spec.eos_id, model.trainer_spec.pad_id = read("eos_token_id"), read("padding_token_id")
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = read("add_space_prefix")
    model.normalizer_spec.remove_extra_whitespaces = False
    for i, (text, score, kind) in enumerate(zip(read("tokens"), read("scores"), read("token_type"))):
        kind = UNKNOWN if i == model.trainer_spec.unk_id else kind
        text = text.replace(" ", SPACE) if kind == USER_DEFINED else text
        model.pieces.add(piece=text, score=score, type=kind)
    return Pieces("gemma3", model)


def compare_json(v, form, cases, driver, folder):
    library = v.library(form, v.merges())
    path = folder / f"{v.name}_{form}.json"
    library.save(str(path))

    def ids(text, special):
        library.encode_special_tokens = not special
        got = library.encode(text).ids
        return got[1:] if special and got[1:2] == got[:1] else got  # one BOS is enough for us

    return compare(f"{v.name} {form} JSON", driver, [path], cases, ids)


def run(args, driver, folder):
    known = list(characters())
    control = ["<|user|>", "<|end|>"]
    vocabularies = [trained("llama-like", control_symbols=control),
                    trained("gemma-like", add_dummy_prefix=False, user_defined_symbols=SYMBOLS, pad_id=0, eos_id=1,
                            bos_id=2, unk_id=3, bos_piece="<bos>", eos_piece="<eos>", control_symbols=control)]
    try:
        vocabularies.append(from_gguf(args.gemma))
    except FileNotFoundError:
        print(f"{args.gemma} is not there: its vocabulary is not compared")
    bad = False
    for v in vocabularies:
        cases = list(random_strings(args.random, random.Random(args.seed), known + ["\0"], FRAGMENTS + MORE))
        cases = [(text.replace("\0", ""), special) for text, special in cases]
        cases.append((mixed(args.bytes, known, seed=3), False))
        path = folder / f"{v.name}.gguf"
        v.write_gguf(path)
        bad |= compare(f"{v.name} GGUF", driver, [path], cases, v.encode)
        for form in ("legacy", "llama", "gemma"):
            bad |= compare_json(v, form, cases, driver, folder)
    return bad
