#!/usr/bin/env python3
"""A trace of any causal language model that transformers runs, for the models that kvlag itself does not know.

MODEL is a folder, a name that transformers can load, or a GGUF file; TEXT a file or - for standard input, one sequence
each. The file is what traces/FORMAT.md describes and `kvlag info FILE --check` verifies. Needs torch, transformers (4.53
or newer), h5py and hdf5plugin.

Every family hands its queries and keys (after rotation and norms), values, scale, cap and window to one function that
transformers looks up by name. Ours is put there: it calls the family's own eager attention and keeps what went in and
came out. Gradients are those of that function's output, the heads before the output projection.
"""

import argparse
import json
import os
import re
import sys
import time

try:
    import h5py
    import hdf5plugin
    import numpy as np
    import torch
    import transformers
    from torch.utils.checkpoint import checkpoint
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
except ImportError as error:
    sys.exit(f"from_transformers.py: {error} (needs torch, transformers 4.53 or newer, h5py and hdf5plugin)")

TILE, TOPK = 256, 32  # rows and columns of a chunk; predictions kept of each step
COMPUTE = {"f32": torch.float32, "bf16": torch.bfloat16}
OFF = {"f32": 1e-3, "bf16": 0.2}  # how far a model's own rows may lie from the softmax of its q and k


class Refused(Exception):
    """What cannot be traced, and why."""


# ---- the model -------------------------------------------------------------------------------------------------------


class Subject:
    """A model whose attention is listened to, and the facts about it that a pass over a token or two shows."""

    def __init__(self, model, ids):
        ALL_ATTENTION_FUNCTIONS.register("kvlag", self.attend)
        ALL_MASK_ATTENTION_FUNCTIONS.register("kvlag", eager_mask)
        model.requires_grad_(False).eval().set_attn_implementation("kvlag")
        self.model, self.config, self.wo = model, model.config.get_text_config(), {}
        hooks = [m.register_forward_hook(self.find_projection) for m in model.modules() if not [*m.children()]]
        self.n_vocab = self.run(ids).shape[-1]
        for hook in hooks:
            hook.remove()
        self.n_layer = len(self.calls)
        if not self.calls:
            raise Refused(f"{type(model).__name__} does not call transformers' attention interface")
        shapes = {(q[1], v[1], q[3], v[3], more.get("softcap") or 0.0) for _, more, q, v in self.calls}
        if len(shapes) > 1:
            raise Refused(f"layers differ in heads, kv heads, size of keys, of values, or cap: {sorted(shapes)}")
        ((self.n_head, self.n_kv_head, self.key_dim, self.head_dim, self.softcap),) = shapes
        scales = [more.get("scaling") or self.key_dim**-0.5 for _, more, _, _ in self.calls]
        self.scale, self.factor = scales[0], [s / scales[0] for s in scales]  # queries take what the others' differ by
        windows = [more.get("sliding_window") or getattr(module, "sliding_window", 0) for module, more, _, _ in self.calls]
        self.window = np.array([w or 0 for w in windows], "i4")

    def run(self, ids, keep=None, gradients=False):
        """Logits [T, n_vocab]. keep(layer, query, key, value, rows) sees each layer's, [heads, T, ..] in f32."""
        self.keep, self.heads, self.calls = keep, [], []
        with torch.set_grad_enabled(gradients):
            return self.model(torch.tensor(ids[None], device=self.model.device), use_cache=False).logits[0]

    def attend(self, module, query, key, value, mask, **more):
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if eager is None:
            raise Refused(f"{type(module).__name__} has no eager attention to listen to")
        run = lambda q, k, v: eager(module, q, k, v, mask, **more)  # noqa: E731
        if torch.is_grad_enabled():  # rows are T x T: computed again on the way back, not kept
            out, rows = checkpoint(run, query, key, value, use_reentrant=False)
            out.requires_grad_()  # where gradients begin, in the first layer
        else:
            out, rows = run(query, key, value)
        self.calls.append((module, more, query.shape, value.shape))
        self.heads.append(out)
        if self.keep:
            with torch.no_grad():
                self.keep(len(self.heads) - 1, *(x.detach()[0].float() for x in (query, key, value, rows)))
        return out, None

    def find_projection(self, module, args, _):
        """What reads a layer's heads is its output projection; what it makes of unit vectors is the matrix."""
        layer = len(self.heads) - 1
        if layer < 0 or layer in self.wo or not args or not torch.is_tensor(args[0]):
            return
        heads = self.heads[layer].flatten(2)
        if args[0].shape == heads.shape and torch.equal(args[0], heads):
            unit = torch.eye(heads.shape[-1], dtype=heads.dtype, device=heads.device)
            self.wo[layer] = half(module.forward(unit) - module.forward(0 * unit[:1]), f"layer {layer}: output projection")

    def unreachable(self, layer, n, device):
        age = torch.arange(n, device=device)[:, None] - torch.arange(n, device=device)
        return (age < 0) | (age >= int(self.window[layer] or n))

    def softmax(self, q, k, unreachable):
        """Of one head's q and k: the rows, and the logarithm of what normalises them."""
        scores = q @ k.T * self.scale
        scores = self.softcap * torch.tanh(scores / self.softcap) if self.softcap else scores
        lse = torch.logsumexp(scores.masked_fill_(unreachable, -torch.inf), -1)
        return torch.exp(scores - lse[:, None]), lse

    def rope(self):
        """In the words that kvlag's policies understand where rotations are plain ones, else as the config has it."""
        facts = getattr(self.config, "rope_parameters", None) or {}
        turn = getattr(sys.modules[type(self.calls[0][0]).__module__], "rotate_half", None)
        kinds = [facts[k] for k in ("full_attention", "sliding_attention") if facts.get(k)] or [facts]
        if any(kind.get("rope_type") != "default" for kind in kinds) or turn is None:
            return json.dumps(facts, sort_keys=True) if facts else ""
        pairs = {-3: "neox", -2: "interleaved"}[int(turn(torch.tensor([[1.0, 2, 3, 4]]))[0, 0])]
        dims = [int(self.key_dim * kind.get("partial_rotary_factor", 1)) for kind in kinds]
        words = [f"base {kind['rope_theta']:.15g}, {pairs}, {n} dims" for kind, n in zip(kinds, dims)]
        none = [str(i) for i, used in enumerate(getattr(self.config, "no_rope_layers", None) or []) if not used]
        return "; with a window: ".join(words) + ("; none in layers " + ", ".join(none) if none else "")

    def facts(self):
        device = self.model.device
        device = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        same = "n_layer", "n_head", "n_kv_head", "head_dim", "n_vocab", "window", "scale", "softcap"
        return {**{name: getattr(self, name) for name in same}, "arch": self.config.model_type, "n_embd": self.config.hidden_size, "rope": self.rope(),
                "creator": f"from_transformers.py, transformers {transformers.__version__}",
                "backend": "transformers", "device": device}  # fmt: skip


# ---- text and predictions --------------------------------------------------------------------------------------------


def split(tokenizer, text):
    """Ids of a text that is text throughout, and the bytes of it at which pieces end (None where these are unknown)."""
    found = tokenizer(text, split_special_tokens=True, return_offsets_mapping=tokenizer.is_fast)
    ids, size = found["input_ids"], len(text.encode())
    added = tokenizer.get_special_tokens_mask(ids, already_has_special_tokens=True)
    length = [0 if a else len(word) for a, word in zip(added, tokenizer.convert_ids_to_tokens(ids))]
    if sum(length) == size:  # a vocabulary of bytes: each character of a token stands for one
        return np.array(ids), np.cumsum(length)
    if not tokenizer.is_fast:
        return np.array(ids), None
    at = np.cumsum([0] + [len(c.encode()) for c in text])
    ends, first = np.zeros(len(ids), "i8"), 0
    for t, (start, end) in enumerate(found["offset_mapping"]):  # tokens that share a character share its bytes
        first = first if t and (start, end) == found["offset_mapping"][t - 1] else t
        ends[first : t + 1] = at[start] + (at[end] - at[start]) * np.arange(1, t - first + 2) // (t - first + 1)
    return np.array(ids), np.maximum.accumulate(ends)


def philox(seed, counters):
    """First words of Philox4x32-10 at counters [n, 4], as uniforms: the numbers that kvlag draws its labels with."""
    a, b, c, d = np.array(counters, "u8").reshape(-1, 4).T
    s, low = np.uint64(32), np.uint64(2**32 - 1)
    for turn in range(10):
        k0, k1 = (np.uint64((k + turn * weyl) % 2**32) for k, weyl in ((seed, 0x9E3779B9), (seed >> 32, 0xBB67AE85)))
        left, right = np.uint64(0xD2511F53) * a, np.uint64(0xCD9E8D57) * c
        a, b, c, d = (right >> s) ^ b ^ k0, right & low, (left >> s) ^ d ^ k1, left & low
    return (a + 0.5) / 2**32


def predictions(logits, ids):
    """The datasets of logits/."""
    rows = []
    for t, row in enumerate(logits):
        logp = torch.log_softmax(row.double(), -1)
        top, index = (x.cpu().numpy() for x in logp.topk(min(TOPK, len(logp))))
        order = np.lexsort((index, -top))  # ties to the lowest id
        target = logp[ids[min(t + 1, len(ids) - 1)]].item()  # the last step has none, and is cut off
        rows.append((target, torch.special.entr(logp.exp()).sum().item(), index[order], top[order]))
    target, entropy, index, top = (np.array(x) for x in zip(*rows))
    return {"target_logprob": target[:-1].astype("f4"), "entropy": entropy[:-1].astype("f4"),
            "topk_logprob": top.astype("f4"), "topk_id": index.astype("i4"),
            "correct": (index[:-1, 0] == ids[1:]).astype("u1")}  # fmt: skip


def draw(logits, n_prompt, sample, sequence, seed):
    """Labels drawn from the model's own predictions at the steps that count, -1 elsewhere."""
    steps, label = range(n_prompt, len(logits) - 1), np.full(len(logits) - 1, -1)
    for t, u in zip(steps, philox(seed, [(t, sample, sequence, 2) for t in steps])):
        p = torch.softmax(logits[t].float(), -1).cpu().numpy()
        label[t] = min(np.searchsorted(p.cumsum(dtype="f8"), u, side="right"), np.flatnonzero(p)[-1])
    return label


def gradients(logits, heads, labels):
    """d(sum of -log p(label)) / d(heads) for each of labels: f16 [labels, layers, heads, T, dim], f32 scales of rows."""
    values, scales = [], []
    for label in labels:
        slope = torch.zeros_like(logits)
        for t in np.flatnonzero(label >= 0):
            slope[t] = torch.softmax(logits[t].detach().float(), -1)
            slope[t, label[t]] -= 1
        found = torch.autograd.grad(logits, heads, slope, retain_graph=True)
        found = torch.stack([g[0].transpose(0, 1).float() for g in found])
        scale = found.abs().amax(-1)
        values.append(half(found / scale.where(scale > 0, 1)[..., None], "gradients"))
        scales.append(scale.cpu().numpy())
    return np.stack(values), np.stack(scales)


# ---- the file --------------------------------------------------------------------------------------------------------


def half(values, what):
    out = values.float().cpu().numpy().astype("f2")
    if not np.isfinite(out).all():
        raise Refused(f"{what}: values that f16 cannot hold")
    return out


def create(group, name, shape, dtype, chunks=True):
    packed = {} if 0 in shape else {"chunks": chunks, "shuffle": True, **hdf5plugin.Zstd(clevel=3)}
    return group.create_dataset(name, shape, dtype, **packed)


def put(group, name, values, chunks=True):
    create(group, name, values.shape, values.dtype, chunks)[...] = values


def attention_writer(group, s, n, forms, off):
    """What writes the attention of a layer: the `keep` of Subject.run."""
    tile = min(TILE, n)
    shape = {"q": (s.n_head, s.key_dim), "k": (s.n_kv_head, s.key_dim), "v": (s.n_kv_head, s.head_dim)}
    stored = {name: create(group, name, (s.n_layer, heads, n, dim), "f2", (1, 1, tile, dim))
              for name, (heads, dim) in shape.items() if forms != "dense" or name == "v"}  # fmt: skip
    if forms != "factored":
        probs = create(group, "probs", (s.n_layer, s.n_head, n, n), "f2", (1, 1, tile, tile))
        row_sum = create(group, "row_sum", (s.n_layer, s.n_head, n), "f4")
    lse = create(group, "lse", (s.n_layer, s.n_head, n), "f4")

    def keep(layer, query, key, value, rows):
        query, unreachable = query * s.factor[layer], s.unreachable(layer, n, query.device)
        for name, values in zip("qkv", (query, key, value)):
            if name in stored:
                stored[name][layer] = half(values, f"layer {layer}: {name}")
        for h in range(s.n_head):
            place, row = f"layer {layer}, head {h}", rows[h]
            own, normaliser = s.softmax(query[h], key[h * s.n_kv_head // s.n_head], unreachable)
            lse[layer, h] = normaliser.cpu().numpy()
            if row[unreachable].any() or not (row.sum(-1) - 1).abs().max() <= 1e-2:
                raise Refused(f"{place}: rows reach later entries or beyond the window, or do not sum to 1, as with sinks")
            if forms != "dense" and not (row - own).abs().max() <= off:
                raise Refused(f"{place}: attention is {float((row - own).abs().max()):.2g} off the softmax of q and k at "
                              f"scale {s.scale:g}; what else is in it only --attention dense can keep")  # fmt: skip
            if forms != "factored":
                packed = half(row, place)
                row_sum[layer, h] = packed.sum(-1, dtype="f8")
                for t in range(0, n, tile):
                    probs[layer, h, t : t + tile, : t + tile] = packed[t : t + tile, : t + tile]

    return keep


def write_sequence(seq, number, subject, source, data, ids, ends, args):
    n, n_prompt = len(ids), args.prompt
    seq.attrs.update(n_tokens=n, n_prompt=n_prompt, source=source)
    put(seq, "tokens", ids.astype("i4"))
    if ends is not None:
        put(seq, "pieces", np.frombuffer(data[: ends[-1]], "u1"))
        put(seq, "piece_offset", np.r_[0, ends].astype("i8"))
    keep = attention_writer(seq.create_group("attn"), subject, n, args.attention, OFF[args.compute])
    logits = subject.run(ids, keep, args.gradients != "none")
    if not torch.isfinite(logits).all():
        raise Refused(f"sequence {number}: logits that are not finite")
    for name, values in predictions(logits.detach(), ids).items():
        put(seq.require_group("logits"), name, values)
    if args.gradients == "none":
        return
    labels = [np.where(np.arange(n - 1) < n_prompt, -1, ids[1:])]
    samples = int(args.gradients.partition(":")[2] or 0)
    labels += [draw(logits.detach(), n_prompt, s, number, args.seed) for s in range(samples)]
    values, scales = gradients(logits, subject.heads, labels)
    grad, chunk = seq.create_group("grad"), (1, 1, min(TILE, n), subject.head_dim)
    put(grad, "loss", values[0], chunk)
    put(grad, "loss_scale", scales[0])
    if samples:
        put(grad, "fisher", values[1:], (1, *chunk))
        put(grad, "fisher_scale", scales[1:])
        put(grad, "fisher_label", np.array(labels[1:], "i4"))


def capture(model, texts, path, args):
    """The trace of `texts`, each (source, bytes, ids, piece ends or None); `path` appears when it is whole."""
    subject, temporary = Subject(model, texts[0][2][:2]), f"{path}.{os.getpid()}.tmp"
    if subject.key_dim != subject.head_dim and args.attention != "dense":
        raise Refused(f"keys of {subject.key_dim}, values of {subject.head_dim}: only --attention dense can keep these")
    try:
        with h5py.File(temporary, "w") as f:
            f.attrs.update(format="kvlag-trace", version=1, command=args.command, name=args.name, compute=args.compute)
            f.attrs.update(subject.facts())
            if len(subject.wo) == subject.n_layer:
                put(f, "model/wo", np.stack([subject.wo[layer] for layer in range(subject.n_layer)]))
            for number, text in enumerate(texts):
                write_sequence(f.create_group(f"seq/{number:04d}"), number, subject, *text, args)
            f.attrs["complete"] = 1
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)


# ---- the command -----------------------------------------------------------------------------------------------------


def load(args):
    where, more = args.model, {}
    if os.path.isfile(where):
        where, more = os.path.dirname(where) or ".", {"gguf_file": os.path.basename(where)}
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(where, **more)
    more |= {"dtype": COMPUTE[args.compute], "attn_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(where, **more).to(args.device), tokenizer


def check_output(args):
    if any(os.path.exists(name) and os.path.exists(args.path) and os.path.samefile(name, args.path) for name in args.text):
        raise Refused(f"{args.path}: is an input; give -o another name")
    if os.path.exists(args.path) and not args.force:
        raise Refused(f"{args.path}: exists; --force overwrites it")
    if not os.path.isdir(os.path.dirname(args.path) or "."):
        raise Refused(f"{args.path}: there is no such folder")


def read(name, tokenizer, args, positions):
    data = sys.stdin.buffer.read() if name == "-" else open(name, "rb").read()
    try:
        ids, ends = split(tokenizer, data.decode())
    except UnicodeDecodeError as error:
        raise Refused(f"{name}: {error}") from None
    ids, ends = ids[: args.tokens], None if ends is None else ends[: args.tokens]
    if not 2 <= len(ids) <= (positions or len(ids)):
        raise Refused(f"{name}: {len(ids)} tokens; a trace takes 2 to {positions or 'any number'} (--tokens)")
    if not 0 <= args.prompt <= len(ids) - 2:
        raise Refused(f"{name}: --prompt {args.prompt} leaves no step to count in {len(ids)} tokens")
    return "" if name == "-" else os.path.basename(name), data, ids, ends


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("model", metavar="MODEL")
    option("text", metavar="TEXT", nargs="+")
    option("-o", required=True, metavar="FILE.h5", dest="path")
    option("--tokens", type=int, metavar="N", help="of each text at most")
    option("--prompt", type=int, default=0, metavar="N", help="the first N steps see everything")
    option("--attention", choices=["dense", "factored", "both"], default="factored")
    option("--gradients", default="fisher:1", metavar="none|loss|fisher:S")
    option("--seed", type=int, default=0, metavar="N", help="of the labels that are drawn")
    option("--compute", choices=COMPUTE, default="f32")
    option("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    option("--force", action="store_true", help="overwrite FILE.h5")
    args = parser.parse_args(argv)
    if not re.fullmatch(r"none|loss|fisher:[1-9]\d*", args.gradients):
        parser.error(f"--gradients: '{args.gradients}' is none of none, loss, fisher:S")
    args.name = os.path.basename(os.path.normpath(args.model))
    words = [(k, v) for k, v in vars(args).items() if k in ("tokens", "prompt", "attention", "gradients", "seed", "compute")]
    words = [f"--{k} {v}" for k, v in words if v != parser.get_default(k)]
    args.command = " ".join(["from_transformers.py", args.name, *map(os.path.basename, args.text), *words])
    start = time.monotonic()
    try:
        check_output(args)
        model, tokenizer = load(args)
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        texts = [read(name, tokenizer, args, positions) for name in args.text]
        capture(model, texts, args.path, args)
    except (Refused, ImportError, OSError, ValueError, RuntimeError) as error:
        sys.exit(f"from_transformers.py: {str(error).strip().splitlines()[0]}")
    n, size = sum(len(ids) for _, _, ids, _ in texts), os.path.getsize(args.path)
    print(f"{args.path}: {n} tokens in {time.monotonic() - start:.1f} s, {size / 2**20:.1f} MiB", file=sys.stderr)


if __name__ == "__main__":
    main()
