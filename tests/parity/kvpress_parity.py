"""Our presets against kvpress's own code on the same model and tokens: `kvpress_parity.py [--only PRESS]...`.

SmolLM2 runs in transformers over a real text with all presses in place at once: after each press's own hook we read
from the cache which positions it kept in every layer and kv head, and put the cache back for the next one. `kvlag sim`
then decides from a trace of the same tokens, which kvlag captured itself, at the end of the same prompt. The kept sets
must be equal. An entry may differ only where its score, as kvpress computed it, is within NEAR of a threshold that
decided about it; such entries are counted and printed. Equal scores on both sides of a threshold are counted apart:
kvpress takes any of them, we evict the oldest (LagKV gives all that it has not judged yet the same score).
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import NamedTuple

import h5py
import hdf5plugin  # noqa: F401  (registers the zstd filter)
import kvpress as kp
import numpy as np
import torch
from logits import ROOT, model_from_gguf
from transformers import DynamicCache

PROMPTS = [256, 700]
RATIOS = [0.25, 0.5, 0.75]
NEAR = 2e-3
AFTER = 8  # tokens of the trace after the prompt

# ---- what decides in a press -----------------------------------------------------------------------------------------
# A cut is (scores [n_layer, n_unit, n], how many of each unit stay: a number or [n_layer, n_unit]).


def plain_cuts(press, seen, kept):
    """The best n of every head; kept is bool [n_layer, n_kv, N]."""
    return [(seen.scores(press), kept.sum(axis=2))]


def lag_cuts(press, seen, kept):
    """LagKV ranks within partitions of its own size; equal ranks of different partitions tie."""
    cuts = plain_cuts(press, seen, kept)
    if id(press) in seen.states:
        raw = seen.partition_scores(press)  # [n_layer, n_kv, n_partition, size]
        n = press.n_sink + raw.shape[2] * raw.shape[3]
        inside = kept[:, :, press.n_sink : n].reshape(raw.shape).sum(axis=3)
        for p in range(raw.shape[2]):
            scores = np.full(kept.shape, np.nan)
            scores[:, :, press.n_sink + p * raw.shape[3] :][:, :, : raw.shape[3]] = raw[:, :, p]
            cuts.append((scores, inside[:, :, p]))
    return cuts


def critical_cuts(press, seen, kept):
    """First half of the budget by the inner score, the rest by the scaled one."""
    first = int((1 - press.compression_ratio) * kept.shape[2] * press.first_stage_ratio)
    return [(seen.scores(press.press), first), (seen.scores(press), kept.sum(axis=2))]


def ada_cuts(press, seen, kept):
    """Every head's floor, then all heads of the layer together."""
    scores = seen.scores(press.press)
    kept_each = int(kept.shape[2] * (1 - press.compression_ratio))
    floor = int(kept_each * press.alpha_safeguard)
    safe = np.argsort(np.argsort(-scores, axis=2), axis=2) < floor
    layer = np.where(safe, np.inf, scores).reshape(len(scores), 1, -1)
    return [(scores, floor), (layer, kept_each * scores.shape[1])]


def chunk_cuts(press, seen, kept):
    """Whole chunks by the mean score of their entries in all heads."""
    scores = seen.scores(press.press).mean(axis=1, keepdims=True)
    edges = range(0, kept.shape[2], press.chunk_length)
    lengths = np.diff([*edges, kept.shape[2]])
    means = np.stack([scores[:, :, i : i + press.chunk_length].mean(axis=2) for i in edges], axis=2)
    return [(np.repeat(means, lengths, axis=2).repeat(kept.shape[1], axis=1), kept.sum(axis=2))]


# ---- the presses and our specs ---------------------------------------------------------------------------------------


def ratio_budget(n_prompt, ratio):
    return int(n_prompt * (1 - ratio))


def chunk_budget(n_prompt, ratio):
    """As many entries as ChunkKV's chunks hold; where the last, shorter chunk stays, one chunk more must leave."""
    return 20 * int(-(-n_prompt // 20) * (1 - ratio))


class Case(NamedTuple):
    name: str
    press: Callable  # of the compression ratio
    spec: str
    rows: str = "factored"
    cuts: Callable = plain_cuts
    budget: Callable = ratio_budget


# What the trace's f16 does to scores should stay below NEAR. Presses that look at keys and values see them in f16, too.
# Rows of attention in f16 are good to 5e-4, rows made of q and k in f16 to 1e-2: what scores by attention takes the
# first ("dense"), which come from f32, and its press the keys as they were.
CASES = [
    Case("Knorm", kp.KnormPress, "knorm"),
    Case("KeyDiff", kp.KeyDiffPress, "keydiff"),
    Case("LagKV", kp.LagKVPress, "lagkv", cuts=lag_cuts),
    Case("CUR", kp.CURPress, "cur"),
    Case("StreamingLLM", kp.StreamingLLMPress, "streaming"),
    Case("ExpectedAttention", kp.ExpectedAttentionPress, "expected"),
    Case("ObservedAttention", kp.ObservedAttentionPress, "h2o-mean", "dense"),
    Case("TOVA", kp.TOVAPress, "tova(hold=1)", "dense"),
    Case("SnapKV", kp.SnapKVPress, "snapkv", "dense"),
    Case("PyramidKV", kp.PyramidKVPress, "pyramid(snapkv)", "dense"),
    Case("AdaKV", lambda r: kp.AdaKVPress(kp.SnapKVPress(r)), "ada(snapkv)", "dense", ada_cuts),
    Case("CriticalKV", lambda r: kp.CriticalKVPress(kp.SnapKVPress(r)), "critical", "dense", critical_cuts),
    Case("ChunkKV", lambda r: kp.ChunkKVPress(kp.TOVAPress(r)), "blocks(20,tova(hold=1))", "dense", chunk_cuts,
         chunk_budget),
]  # fmt: skip


# ---- kvpress ---------------------------------------------------------------------------------------------------------


class Seen:
    """What the presses computed, layer by layer."""

    def __init__(self):
        self.score, self.states, self.kept = {}, {}, {}

    def listen(self, press):
        """Keep a copy of all that score() of this press, and of one that it wraps, returns."""
        if hasattr(press, "press"):
            self.listen(press.press)
        if hasattr(press, "score"):
            self.copy(press, "score", self.score)
        if hasattr(press, "_get_states_score"):
            self.copy(press, "_get_states_score", self.states)

    @staticmethod
    def copy(press, method, into):
        inner = getattr(press, method)

        def outer(*args, **kwargs):
            result = inner(*args, **kwargs)
            into.setdefault(id(press), []).append(result[0].double().numpy().copy())
            return result

        setattr(press, method, outer)

    def scores(self, press):
        return np.stack(self.score[id(press)])

    def partition_scores(self, press):
        """LagKV scores a layer's keys, then its values."""
        states = np.stack(self.states[id(press)])
        return (states[0::2] + states[1::2]) / 2


def positions(rows, full):
    """Which rows [n, head_dim] of `full` [N, head_dim] are among `rows`, bool [N]."""
    place = {row.tobytes(): i for i, row in enumerate(full.numpy())}
    assert len(place) == len(full), "two positions have the same key"
    found = np.zeros(len(full), bool)
    found[[place[row.tobytes()] for row in rows.numpy()]] = True
    return found


def run_presses(model, tokens, presses, seen):
    """One forward pass with [(press, sees f16)]; fills seen.kept with lists of bool [n_kv, N], one for each layer."""
    full, offered = {}, {}

    def cache_of(module, kwargs):
        return kwargs["past_key_values"].layers[module.layer_idx]

    def remember(module, args, kwargs, output):
        layer = cache_of(module, kwargs)
        full.update(keys=layer.keys, values=layer.values)

    def offer(is_f16):
        def hook(module, args, kwargs, output):
            layer = cache_of(module, kwargs)
            offered.update({k: x.half().float() if is_f16 else x for k, x in full.items()})
            layer.keys, layer.values = offered["keys"], offered["values"]

        return hook

    def collect(press):
        def hook(module, args, kwargs, output):
            heads = zip(cache_of(module, kwargs).keys[0], offered["keys"][0], strict=True)
            kept = np.stack([positions(some, all_keys) for some, all_keys in heads])
            if (masked := getattr(module, "masked_key_indices", None)) is not None:
                _, head, position = masked
                kept[head.numpy(), position.numpy()] = False
                module.masked_key_indices = None
            seen.kept.setdefault(id(press), []).append(kept)

        return hook

    attentions = [layer.self_attn for layer in model.model.layers]
    with torch.no_grad(), contextlib.ExitStack() as stack:

        def everywhere(hook):
            for a in attentions:
                stack.callback(a.register_forward_hook(hook, with_kwargs=True).remove)

        everywhere(remember)
        for press, is_f16 in presses:
            seen.listen(press)
            everywhere(offer(is_f16))
            stack.enter_context(press(model))
            everywhere(collect(press))
        model.model(torch.from_numpy(tokens.astype(np.int64))[None], past_key_values=DynamicCache())


def kvpress_kept(model, tokens, cases):
    """{(name, ratio): press}, and what was seen. ObservedAttention needs eager attention, AdaKV and ChunkKV refuse
    it."""
    seen, presses = Seen(), {(c.name, r): c.press(r) for c in cases for r in RATIOS}
    for implementation in ("eager", "sdpa"):
        chosen = [(presses[c.name, r], c.rows == "factored") for c in cases for r in RATIOS
                  if (c.press is kp.ObservedAttentionPress) == (implementation == "eager")]  # fmt: skip
        if chosen:
            model.set_attn_implementation(implementation)
            run_presses(model, tokens, chosen, seen)
    return presses, seen


# ---- ours ------------------------------------------------------------------------------------------------------------


def kvlag(args, *words):
    done = subprocess.run([args.kvlag, *map(str, words), "-q", "--force"], capture_output=True, text=True)
    return done.stderr.strip() if done.returncode else ""


def our_kept(args, trace, case, n_prompt, folder):
    """{budget: bool [n_layer, n_kv, N]}, and what kvlag complained about."""
    lifetimes, results = os.path.join(folder, "lifetimes.h5"), os.path.join(folder, "results.csv")
    budgets = ",".join(str(case.budget(n_prompt, r)) for r in RATIOS)
    complaint = kvlag(args, "sim", trace, "-p", case.spec, "-b", budgets, "--prompt", n_prompt, "--schedule", "prompt",
                      "--attention", case.rows, "--metrics", "lost_mass", "--lifetimes", lifetimes,
                      "-o", results)  # fmt: skip
    if complaint:
        return {}, complaint
    with h5py.File(lifetimes) as f:
        found = {int(c.attrs["budget_asked"]): c["seq/0000/evict_at"][:, :, :n_prompt] for c in f["config"].values()}
    return {budget: evict_at > n_prompt for budget, evict_at in found.items()}, ""


# ---- comparison ------------------------------------------------------------------------------------------------------

failures = 0


def distance(scores, n):
    """How far each score is from the threshold between the n largest and the rest, relative to that threshold: kept
    ones from the best that is not, the others from the last that is. NaN takes no part."""
    ordered = -np.sort(-scores, axis=2)
    n = np.broadcast_to(n, scores.shape[:2])[..., None]
    last_in = np.take_along_axis(ordered, np.maximum(n - 1, 0), 2)
    best_out = np.take_along_axis(ordered, np.minimum(n, scores.shape[2] - 1), 2)
    edge = np.where(scores >= last_in, best_out, last_in)
    with np.errstate(all="ignore"):
        away = np.abs(scores - edge) / np.abs(edge)
    return np.where(np.isfinite(away), away, np.inf)


def compare(what, ours, kept, cuts):
    """Print what is wrong; returns what differs with good reason, as text."""
    global failures
    differs = ours != kept
    away = np.min([distance(*cut).reshape(kept.shape) for cut in cuts], axis=0)
    wrong = differs & (away > NEAR)
    if wrong.any():
        failures += 1
        layer, head, entry = (int(x[0]) for x in np.nonzero(wrong))
        print(
            f"  FAIL {what}: {wrong.sum()} of {kept.size} entries differ without a reason, in "
            f"{wrong.any(axis=(1, 2)).sum()} layers; the first in layer {layer}, kv head {head}, position {entry}, "
            f"{away[layer, head, entry]:.2g} from its threshold; kept {kept.sum()}, ours {ours.sum()}"
        )
    tied = int((differs & (away == 0)).sum())
    near = int((differs & ~wrong).sum()) - tied
    return f"{near} ({tied} tied)" if tied else str(near)


def run(model, args, cases, n_prompt, folder):
    global failures
    trace = os.path.join(folder, f"trace{n_prompt}.h5")
    complaint = kvlag(args, "trace", args.model, args.text, "--tokens", n_prompt + AFTER, "--prompt", n_prompt,
                      "--attention", "both", "--gradients", "none", "-o", trace)  # fmt: skip
    if complaint:
        sys.exit(complaint)
    with h5py.File(trace) as f:
        tokens = f["seq/0000/tokens"][:n_prompt]
    presses, seen = kvpress_kept(model, tokens, cases)
    config = model.config
    print(
        f"{n_prompt} prompt tokens, {config.num_hidden_layers} layers of {config.num_key_value_heads} kv heads, ratios "
        f"{RATIOS}: entries that differ within {NEAR:g} of a threshold"
    )
    for case in cases:
        what, near = f"{case.name} = {case.spec}", []
        ours, complaint = our_kept(args, trace, case, n_prompt, folder)
        for r in RATIOS:
            press, budget = presses[case.name, r], case.budget(n_prompt, r)
            kept = np.stack(seen.kept[id(press)])
            if budget in ours:
                near.append(compare(f"{what}, ratio {r}", ours[budget], kept, case.cuts(press, seen, kept)))
            else:
                failures += 1
                print(f"  FAIL {what}, ratio {r}: {complaint or f'no result for budget {budget}'}")
        print(f"  {what}: {', '.join(near)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvlag", default=os.path.join(ROOT, "kvlag"))
    parser.add_argument("--model", default=os.path.join(ROOT, "models/SmolLM2-135M-Instruct.Q4_1.gguf"))
    parser.add_argument("--text", default=os.path.join(ROOT, "tests/fidelity/texts/manual.txt"))
    parser.add_argument("--only", action="append", metavar="PRESS", help="these only, by name")
    args = parser.parse_args()
    cases = [c for c in CASES if not args.only or c.name in args.only]
    model = model_from_gguf(args.model)
    torch.set_num_threads(1)  # mostly small tensors, at which threads would wait for each other
    with tempfile.TemporaryDirectory() as folder:
        for n_prompt in PROMPTS:
            run(model, args, cases, n_prompt, folder)
    print("all kept sets equal but for these" if not failures else f"{failures} comparisons failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
