"""Random traces in kvlag's format (DESIGN section 7) whose attention looks real: sinks, locality, a heavy tail.

Run as a program it writes the tests' set: python make_traces.py FOLDER
"""
import os
import sys

import h5py
import hdf5plugin
import numpy as np

from tracefile import softmax_rows


def real_looking_qk(rng, T, n_head, n_kv_head, D):
    """q [n_head, T, D], k [n_kv_head, T, D] (scale 1/sqrt(D)). Dimension 0 is a sink that the first entries answer,
    1 a heavy tail of popular keys, 2..7 three rotating pairs (locality), the rest content that recurs."""
    k = rng.normal(0, 1.2, (n_kv_head, T, D))
    q = rng.normal(0, 1.2, (n_head, T, D))
    topics = rng.normal(0, 1.6, (6, D - 8))
    said = rng.integers(0, 6, T)
    t = np.arange(T)
    k[:, :, 0] = np.where(t < 3, [4.0 - x if x < 3 else -1.0 for x in t], -1.0)
    k[:, :, 1] = np.minimum(rng.pareto(1.7, (n_kv_head, T)), 6.0)
    q[:, :, 0] = rng.uniform(0.5, 3.0, (n_head, 1)) * rng.uniform(0.7, 1.3, (n_head, T))
    q[:, :, 1] = rng.uniform(0.3, 2.0, (n_head, 1)) * rng.uniform(0.5, 1.5, (n_head, T))
    k[:, :, 8:] += topics[said]
    q[:, :, 8:] += np.roll(topics[said], rng.integers(1, 5), axis=0)
    near = rng.uniform(0.5, 3.0, n_head)
    for pair, frequency in enumerate((1.0, 0.23, 0.05)):
        c, s = np.cos(frequency * t), np.sin(frequency * t)
        k[:, :, 2 + 2 * pair], k[:, :, 3 + 2 * pair] = 1.5 * c, 1.5 * s
        for h in range(n_head):
            q[h, :, 2 + 2 * pair], q[h, :, 3 + 2 * pair] = near[h] * c, near[h] * s
    return q, k


def packed(group, name, array, chunks):
    group.create_dataset(name, data=array, chunks=chunks, shuffle=True, **hdf5plugin.Zstd(clevel=3))


def write_grad(g, kind, grad):
    scale = np.abs(grad).max(axis=-1)
    scale = np.where(scale > 0, scale, 1.0).astype(np.float32)
    g[f"grad/{kind}"] = (grad / scale[..., None]).astype(np.float16)
    g[f"grad/{kind}_scale"] = scale


def write_sequence(g, rng, model, seq):
    """One /seq/NNNN. `model` and `seq` are the dicts of write_trace."""
    L, H, KV, D, E = (model[x] for x in ("n_layer", "n_head", "n_kv_head", "head_dim", "n_embd"))
    T, forms, real = seq["T"], seq.get("forms", ("dense",)), seq.get("type", np.float16)
    g.attrs["n_tokens"], g.attrs["n_prompt"], g.attrs["source"] = T, seq.get("n_prompt", 0), seq.get("source", "random")
    pieces = [b"w%d " % x for x in rng.integers(0, 500, T)]
    g["tokens"] = rng.integers(0, model["n_vocab"], T).astype(np.int32)
    g["pieces"] = np.frombuffer(b"".join(pieces), np.uint8)
    g["piece_offset"] = np.cumsum([0] + [len(p) for p in pieces]).astype(np.int64)
    if seq.get("counted"):
        g["counted"] = (rng.random(T - 1) < seq["counted"]).astype(np.uint8)
    if seq.get("probes"):
        later = rng.integers(1, T, seq["probes"])
        g["probes"] = np.array([[rng.integers(0, s), s] for s in later], np.int32)
    if seq.get("logits", True):
        g["logits/correct"] = (rng.random(T - 1) < seq.get("right", 0.6)).astype(np.uint8)
        g["logits/target_logprob"] = -rng.exponential(1.5, T - 1).astype(np.float32)
        g["logits/entropy"] = rng.exponential(1.5, T - 1).astype(np.float32)

    qk = [real_looking_qk(rng, T, H, KV, D) for _ in range(L)]
    q, k = (np.array([x[i] for x in qk]) for i in (0, 1))
    v = rng.normal(0, 1, (L, KV, T, D)) * np.where(np.arange(T) == 0, 0.1, 1.0)[None, None, :, None]
    tile = min(256, T)
    if "dense" in forms:
        probs = np.array([softmax_rows(q[l], k[l], model["scale"], model["softcap"], model["window"][l])
                          for l in range(L)])
        d = g.create_dataset("attn/probs", (L, H, T, T), real, chunks=(1, 1, tile, tile), shuffle=True,
                             **hdf5plugin.Zstd(clevel=3))
        for a in range(0, T, tile):  # tiles above the diagonal are never written
            d[:, :, a:a + tile, :min(a + tile, T)] = probs[:, :, a:a + tile, :min(a + tile, T)].astype(real)
    if "factored" in forms:
        for name, array in (("q", q), ("k", k)):
            packed(g, "attn/" + name, array.astype(real), (1, 1, tile, D))
    if "factored" in forms or seq.get("values"):
        packed(g, "attn/v", v.astype(real), (1, 1, tile, D))

    samples = seq.get("fisher", 0)
    if samples:
        for kind, shape in (("loss", (L, H, T, D)), ("fisher", (samples, L, H, T, D))):
            grad = rng.normal(0, 0.05, shape) * rng.lognormal(0, 1, shape[:-1])[..., None]
            grad[..., T - 1, :] = 0  # the last row predicts nothing, so no loss depends on it
            write_grad(g, kind, grad)
        g["grad/fisher_label"] = rng.integers(0, model["n_vocab"], (samples, T - 1)).astype(np.int32)


def write_trace(path, seed, n_layer=2, n_head=4, n_kv_head=2, head_dim=16, n_embd=24, window=None, softcap=0.0, wo=True,
                rope="", seqs=()):
    """Write a random trace; `seqs` is a list of dicts: T, n_prompt, forms, type, counted (share), probes (how many),
    logits, right (share of correct predictions), values (v beside dense), fisher (samples)."""
    rng = np.random.default_rng(seed)
    model = dict(n_layer=n_layer, n_head=n_head, n_kv_head=n_kv_head, head_dim=head_dim, n_embd=n_embd, n_vocab=500,
                 window=np.array(window or [0] * n_layer, np.int32), scale=head_dim ** -0.5, softcap=softcap)
    with h5py.File(path, "w") as f:
        f.attrs["format"], f.attrs["version"] = "kvlag-trace", np.int32(1)
        f.attrs["creator"], f.attrs["command"], f.attrs["name"], f.attrs["arch"] = "tests/oracle", "", "random", "none"
        for key, value in model.items():
            real = isinstance(value, float)
            f.attrs[key] = value if isinstance(value, np.ndarray) else np.float32(value) if real else np.int32(value)
        if rope:
            f.attrs["rope"] = rope
        if wo:
            f["model/wo"] = rng.normal(0, (n_head * head_dim) ** -0.5,
                                       (n_layer, n_head * head_dim, n_embd)).astype(np.float16)
        for n, seq in enumerate(seqs):
            write_sequence(f.create_group(f"seq/{n:04d}"), rng, model, seq)
        f.attrs["complete"] = np.int32(1)
    return path


# The tests' set: every shape a reader or a policy could trip over, small enough for a loop in Python.
TRACES = {
    "dense16": dict(seed=1, n_head=4, n_kv_head=2, seqs=[dict(T=40, forms=("dense",), values=True, probes=9)]),
    "factored": dict(seed=2, n_head=3, n_kv_head=1, window=[0, 14],
                     seqs=[dict(T=44, n_prompt=13, forms=("factored",), counted=0.7, fisher=2, probes=5)]),
    "both": dict(seed=3, n_layer=3, n_head=3, n_kv_head=3, softcap=12.0,
                 seqs=[dict(T=32, forms=("dense", "factored"), type=np.float32, fisher=1),
                       dict(T=37, n_prompt=9, forms=("dense", "factored"), right=0.15, counted=0.5, fisher=1)]),
    "dense32": dict(seed=4, n_layer=1, n_head=2, n_kv_head=1, wo=False,
                    seqs=[dict(T=36, n_prompt=1, forms=("dense",), type=np.float32, right=0.0)]),
    "long": dict(seed=5, n_layer=1, n_head=4, n_kv_head=2, window=[0],
                 seqs=[dict(T=300, n_prompt=40, forms=("dense", "factored"), fisher=1)]),
}


def write_all(folder):
    for name, facts in TRACES.items():
        write_trace(os.path.join(folder, name + ".h5"), **facts)


if __name__ == "__main__":
    write_all(sys.argv[1])
