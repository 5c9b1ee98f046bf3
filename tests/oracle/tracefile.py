"""Traces and lifetimes as the oracle sees them: read with h5py, everything in f64 (DESIGN sections 1, 7 and 8)."""
from dataclasses import dataclass, field

import h5py
import hdf5plugin  # noqa: F401 (registers zstd with HDF5)
import numpy as np


@dataclass
class Sequence:
    """One text. Arrays are None where the file has none: dense [L, H, T, T], q, k, v [L, heads, T, D]."""
    T: int
    n_prompt: int = 0
    source: str = ""
    counted: np.ndarray = None
    probes: np.ndarray = None
    correct: np.ndarray = None
    target_logprob: np.ndarray = None
    entropy: np.ndarray = None
    dense: np.ndarray = None
    q: np.ndarray = None
    k: np.ndarray = None
    v: np.ndarray = None
    grad_loss: np.ndarray = None
    grad_fisher: np.ndarray = None
    cache: dict = field(default_factory=dict, repr=False)


@dataclass
class Trace:
    n_layer: int
    n_head: int
    n_kv_head: int
    head_dim: int
    window: list
    scale: float
    softcap: float = 0.0
    n_embd: int = 0
    wo: np.ndarray = None
    rope: str = ""
    seqs: list = field(default_factory=list)

    @property
    def group(self):
        return self.n_head // self.n_kv_head


def visible_mask(T, window):
    """[t, i]: may step t attend to entry i in the full run?"""
    age = np.arange(T)[:, None] - np.arange(T)[None, :]
    return (age >= 0) & ((age < window) if window else True)


def softmax_rows(q, k, scale, softcap, window):
    """Rows [heads, T, T] of one layer from q [n_head, T, D] and k [n_kv_head, T, D]."""
    group = len(q) // len(k)
    mask = visible_mask(q.shape[1], window)
    rows = []
    for h in range(len(q)):
        score = scale * (q[h] @ k[h // group].T)
        if softcap:
            score = softcap * np.tanh(score / softcap)
        score = np.where(mask, score, -np.inf)
        p = np.exp(score - score.max(axis=1, keepdims=True))
        rows.append(p / p.sum(axis=1, keepdims=True))
    return np.array(rows)


def rows_of(trace, s, layer, form="auto"):
    """The full run's renormalised rows [n_head, T, T] of one layer in f64; the factored form wins where both exist."""
    if form == "auto":
        form = "factored" if s.q is not None else "dense"
    key = ("rows", layer, form)
    if key not in s.cache:
        if form == "factored":
            rows = softmax_rows(s.q[layer], s.k[layer], trace.scale, trace.softcap, trace.window[layer])
        else:
            rows = np.where(visible_mask(s.T, trace.window[layer]), s.dense[layer], 0.0)
            rows = rows / rows.sum(axis=2, keepdims=True)
        s.cache[key] = rows
    return s.cache[key]


def counted_steps(s, n_prompt):
    """[T] bool: n_prompt <= t <= T-2 and not masked out."""
    counted = np.zeros(s.T, bool)
    counted[:s.T - 1] = True if s.counted is None else s.counted != 0
    counted[:n_prompt] = False
    return counted


def read_trace(path):
    f64 = lambda group, name: np.array(group[name]).astype(np.float64) if name in group else None  # noqa: E731
    with h5py.File(path, "r") as f:
        a = f.attrs
        n_layer, head_dim = int(a["n_layer"]), int(a["head_dim"])
        trace = Trace(n_layer, int(a["n_head"]), int(a["n_kv_head"]), head_dim,
                      [int(w) for w in a["window"]] if "window" in a else [0] * n_layer,
                      float(a.get("scale", head_dim ** -0.5)), float(a.get("softcap", 0)), int(a.get("n_embd", 0)),
                      f64(f, "model/wo"), str(a.get("rope", "")))
        for name in sorted(f["seq"]):
            g = f["seq"][name]
            s = Sequence(int(g.attrs["n_tokens"]), int(g.attrs["n_prompt"]), str(g.attrs.get("source", "")))
            s.counted, s.probes = f64(g, "counted"), f64(g, "probes")
            s.correct, s.target_logprob = f64(g, "logits/correct"), f64(g, "logits/target_logprob")
            s.entropy, s.dense = f64(g, "logits/entropy"), f64(g, "attn/probs")
            s.q, s.k, s.v = (f64(g, "attn/" + x) for x in "qkv")
            for kind in ("loss", "fisher"):
                if f"grad/{kind}" in g:
                    setattr(s, f"grad_{kind}", f64(g, f"grad/{kind}") * f64(g, f"grad/{kind}_scale")[..., None])
            trace.seqs.append(s)
    return trace


def write_lifetimes(path, configs):
    """configs: list of (attributes of the configuration, {sequence: (its attributes, evict_at [L, KV, T])})."""
    with h5py.File(path, "w") as f:
        f.attrs["format"], f.attrs["version"] = "kvlag-lifetimes", 1
        for n, (attributes, seqs) in enumerate(configs):
            g = f.create_group(f"config/{n:04d}")
            for key, value in attributes.items():
                g.attrs[key] = str(value)
            for m, (seq_attributes, evict_at) in seqs.items():
                h = g.create_group(f"seq/{m:04d}")
                for key, value in seq_attributes.items():
                    h.attrs[key] = str(value)
                h.create_dataset("evict_at", data=np.asarray(evict_at, np.int32))


def read_lifetimes(path):
    """The same list as write_lifetimes takes."""
    text = lambda x: x.decode() if isinstance(x, bytes) else str(x)  # noqa: E731
    configs = []
    with h5py.File(path, "r") as f:
        assert text(f.attrs["format"]) == "kvlag-lifetimes"
        for name in sorted(f["config"]):
            g = f["config"][name]
            seqs = {int(m): ({k: text(v) for k, v in h.attrs.items()}, h["evict_at"][:].astype(np.int64))
                    for m, h in g["seq"].items()}
            configs.append(({k: text(v) for k, v in g.attrs.items()}, seqs))
    return configs
