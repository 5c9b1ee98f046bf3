"""Masked passes and `kvlag verify` against transformers with the same masks: `masked.py`.

Each kv head of each layer gets a mask of its own, so attention is computed by a function of ours that transformers
calls (AttentionInterface) in place of its eager one. Compared are the logits of every step, and the figures that
`kvlag verify` makes of them: loss difference, KL divergence, its 99th percentile, top-1 flips. Lifetimes are those of
policies, from `kvlag sim --lifetimes`, and random ones, written by h5py.
"""

import argparse
import csv
import os
import subprocess
import sys
import tempfile

import h5py
import hdf5plugin  # noqa: F401  (registers the zstd filter)
import logits as common
import numpy as np
import torch
from transformers import AttentionInterface

LOGITS = 2e-3  # what we promise
FIGURES = 1e-3
BUDGET = "24"


def masked_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, visible=None, **_):
    """Softmax over what each query head may see; visible: bool [n_layer][n_kv_head][T][T]."""
    group = query.shape[1] // key.shape[1]
    mask = visible[module.layer_idx].repeat_interleave(group, 0)[None]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = (query @ key.transpose(2, 3) * scaling).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


def reference(model, tokens, evict_at):
    """Logits [T][n_vocab] with entry i visible to steps i .. evict_at[i]-1."""
    T = len(tokens)
    step, entry = np.arange(T)[:, None], np.arange(T)[None]
    visible = torch.from_numpy((entry <= step) & (step < evict_at[:, :, None, :]))
    model.set_attn_implementation("kvlag_masked")
    with torch.no_grad():
        return model(torch.tensor(tokens[None].astype(np.int64)), visible=visible).logits[0].numpy()


def figures(full, evicted, tokens):
    """dloss, KL, its 99th percentile, top-1 flips over all steps that predict a token."""
    p, q, step = common.log_softmax(full)[:-1], common.log_softmax(evicted)[:-1], np.arange(len(tokens) - 1)
    kl = (np.exp(p) * (p - q)).sum(axis=1)
    dloss = p[step, tokens[1:]] - q[step, tokens[1:]]
    return dict(true_dloss=dloss.mean(), true_kl=kl.mean(), kl_p99=np.percentile(kl, 99),
                top1_flips=(p.argmax(axis=1) != q.argmax(axis=1)).mean())  # fmt: skip


def write_random(path, shape):
    """Lifetimes of all kinds: an entry leaves right after its own step, or late, or never."""
    rng = np.random.default_rng(7)
    T = shape[2]
    end = np.arange(T) + 1 + rng.integers(0, T, shape)
    end[(rng.random(shape) < 0.25) | (end > T)] = T + 1
    with h5py.File(path, "w") as f:
        f.attrs.update(format="kvlag-lifetimes", version=1)
        config = f.create_group("config/0000")
        config.attrs["spec"] = "drawn"
        config.create_dataset("seq/0000/evict_at", data=end.astype(np.int32))
    return end


def lifetimes(path):
    with h5py.File(path) as f:
        return [(c.attrs["spec"], c["seq/0000/evict_at"][:]) for c in f["config"].values()]


def kvlag(args, *words):
    subprocess.run([args.kvlag, *map(str, words), "-q", "--force"], check=True)


def compare(model, path, source, args, folder):
    out, tokens_file, evict_file = (os.path.join(folder, n) for n in ("dump.f32", "tokens.i32", "evict.i32"))
    truth = os.path.join(folder, "truth.csv")
    with h5py.File(os.path.join(folder, "trace.h5")) as f:
        tokens = f["seq/0000/tokens"][:]
    tokens.astype(np.int32).tofile(tokens_file)
    kvlag(args, "verify", path, os.path.join(folder, "trace.h5"), "--from-lifetimes", source, "-o", truth)
    with open(truth) as f:
        rows = list(csv.DictReader(line for line in f if line[0] != "#"))
    full = None
    for row, (spec, evict_at) in zip(rows, lifetimes(source), strict=True):
        assert row["spec"] == spec
        if full is None:
            full = reference(model, tokens, np.full_like(evict_at, len(tokens) + 1))
        evicted = reference(model, tokens, evict_at)
        evict_at.astype(np.int32).tofile(evict_file)
        subprocess.run([args.dump, path, tokens_file, out, evict_file], check=True)
        ours = np.fromfile(out, np.float32, evicted.size).reshape(evicted.shape)
        common.within(f"{spec}: masked logits", ours - evicted, LOGITS)
        for name, want in figures(full, evicted, tokens).items():
            common.within(f"{spec}: {name} {want:.5f}", float(row[name]) - want, FIGURES)


def run(name, path, text, n_tokens, args):
    with tempfile.TemporaryDirectory() as folder:
        common.trace(args.kvlag, path, text, n_tokens, folder).close()
        trace, policies, drawn = (os.path.join(folder, n) for n in ("trace.h5", "policies.h5", "drawn.h5"))
        kvlag(args, "sim", trace, "-o", os.path.join(folder, "r.csv"), "-p", "h2o", "-p", "rmm(lag=8)", "-p", "tova",
              "-p", "window", "-b", BUDGET, "--lifetimes", policies)  # fmt: skip
        write_random(drawn, lifetimes(policies)[0][1].shape)
        model = common.model_from_gguf(path)
        print(f"{name}, {n_tokens} tokens, a mask for each kv head")
        for source in (policies, drawn):
            compare(model, path, source, args, folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root = common.ROOT
    parser.add_argument("--kvlag", default=os.path.join(root, "kvlag"))
    build = os.path.join(root, os.environ.get("BUILD", "build/gcc-release"))
    parser.add_argument("--dump", default=os.path.join(build, "tests/parity/dump_forward"))
    parser.add_argument("--tiny", default=os.path.join(root, "build/tiny.gguf"))
    parser.add_argument("--smollm2", default=os.path.join(root, "models/SmolLM2-135M-Instruct.Q4_1.gguf"))
    args = parser.parse_args()
    AttentionInterface.register("kvlag_masked", masked_attention)
    run("tiny", args.tiny, common.TEXT, 64, args)
    with open(os.path.join(root, "tests/tiny/train.py")) as f:
        code = f.read()
    run("SmolLM2-135M Q4_1", args.smollm2, common.TEXT + code, 200, args)
    print("all within their limits" if not common.failures else f"{common.failures} comparisons failed")
    return 1 if common.failures else 0


if __name__ == "__main__":
    sys.exit(main())
