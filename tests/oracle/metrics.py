"""What lifetimes cost, in f64 and without cleverness (DESIGN sections 3, 6 and 8)."""
import functools

import numpy as np

import kv_bits
from philox import normal
from tracefile import counted_steps, rows_of, visible_mask

PROBE_SEED, N_PROBES, PROBE_MEAN, N_BLOCKS = 0x6B766C6167, 4, 0.93999, 64
SMALLEST_VISIBLE = 1e-6  # Z_vis is floored at this share of Z


def evicted_mask(evict_at):
    """[t, i]: entry i has arrived, but step t no longer sees it."""
    t = np.arange(len(evict_at))[:, None]
    return (t >= np.arange(len(evict_at))) & (t >= evict_at[None, :])


def lost_mass(trace, s, evict_at, form="auto"):
    """m [L, H, T] of every step."""
    return np.array([[(rows_of(trace, s, l, form)[h] * evicted_mask(evict_at[l, h // trace.group])).sum(axis=1)
                      for h in range(trace.n_head)] for l in range(trace.n_layer)])


def output_change(trace, s, evict_at, form="auto"):
    """delta = o' - o, [L, H, T, D]."""
    delta = np.zeros((trace.n_layer, trace.n_head, s.T, trace.head_dim))
    for l in range(trace.n_layer):
        for h in range(trace.n_head):
            a, v = rows_of(trace, s, l, form)[h], s.v[l, h // trace.group]
            gone = evicted_mask(evict_at[l, h // trace.group])
            kept_mass = np.maximum((a * ~gone).sum(axis=1), SMALLEST_VISIBLE)
            o = a @ v
            delta[l, h] = ((a * gone).sum(axis=1)[:, None] * o - (a * gone) @ v) / kept_mass[:, None]
    return delta


@functools.lru_cache(maxsize=None)
def probe(p, layer, n_embd):
    return np.array([normal(PROBE_SEED, j, p, layer, 0) for j in range(n_embd)])


def out_err(trace, s, delta, n_prompt, exact=False):
    """Mean over layers and counted steps of |Wo delta|, all heads of a layer together."""
    counted, norms = counted_steps(s, n_prompt), []
    for l in range(trace.n_layer):
        y = delta[l].transpose(1, 0, 2).reshape(s.T, -1) @ trace.wo[l]
        if exact:
            norm = np.linalg.norm(y, axis=1)
        else:
            seen = np.array([y @ probe(p, l, y.shape[1]) for p in range(N_PROBES)])
            norm = np.sqrt((seen ** 2).mean(axis=0)) / PROBE_MEAN
        norms.append(norm[counted])
    return float(np.mean(norms))


def first_terms(s, delta):
    """g . delta, [L, H, T]; dloss_first is its sum over layers, heads and steps t >= n_prompt, divided by N."""
    return (s.grad_loss * delta).sum(axis=-1)


def fisher_terms(s, delta):
    """g_y . delta, [S, L, H, T]."""
    return (s.grad_fisher * delta[None]).sum(axis=-1)


def block_of_steps(T, n_prompt):
    """[(first step, one past the last)] of the 64 blocks of the steps n_prompt..T-2."""
    n = T - 1 - n_prompt
    return [(n_prompt + b * n // N_BLOCKS, n_prompt + (b + 1) * n // N_BLOCKS) for b in range(N_BLOCKS)]


def block_sums(per_step, T, n_prompt):
    return np.array([per_step[..., a:b].sum(axis=-1) for a, b in block_of_steps(T, n_prompt)]).T


def loss_metrics(s, delta, n_prompt):
    """The first-order and the Fisher estimate with their blocks and heads. `first_scale` is the same sum over absolute
    values, which is what rounding errors are proportional to."""
    counted = counted_steps(s, n_prompt)
    N, later = counted.sum(), np.arange(s.T) >= n_prompt
    first, fisher = first_terms(s, delta) * later, fisher_terms(s, delta) * later
    half_square = 0.5 * fisher.sum(axis=(1, 2)) ** 2  # [S, T]
    return {
        "dloss_first": first.sum() / N, "first_scale": np.abs(first).sum() / N,
        "fisher": half_square.sum(axis=1).mean() / N,
        "block_first": block_sums(first.sum(axis=(0, 1)), s.T, n_prompt),
        "block_fisher": block_sums(half_square, s.T, n_prompt),
        "head_first": first.sum(axis=-1) / N,
        "head_fisher": 0.5 * (fisher ** 2).sum(axis=-1).mean(axis=0) / N,
    }


def unit_lifetimes(evict_at, unit):
    """[units, T]: one row of lifetimes for each unit."""
    T = evict_at.shape[-1]
    return {"head": evict_at.reshape(-1, T), "layer": evict_at[:, 0], "model": evict_at[:1, 0]}[unit or "head"]


def leavings(trace, evict_at, unit):
    """(evicted, expired) of each unit, the steps of these entries as the lifetimes alone tell them: leaving at i+W is
    expiry."""
    T = evict_at.shape[-1]
    layer_of = {"head": lambda n: n // trace.n_kv_head, "layer": lambda n: n, "model": lambda n: 0}[unit]
    for n, life in enumerate(unit_lifetimes(evict_at, unit)):
        W = trace.window[layer_of(n)]
        closes = [bool(W) and e == i + W for i, e in enumerate(life)]
        yield ([e for e, c in zip(life, closes) if e <= T and not c], [e for e, c in zip(life, closes) if e <= T and c])


def evictions_of(trace, evict_at, unit):
    """(evictions, evicting steps) per unit."""
    evicted = [e for e, _ in leavings(trace, evict_at, unit)]
    return sum(map(len, evicted)) / len(evicted), sum(len(set(e)) for e in evicted) / len(evicted)


def measure(trace, sequence, evict_at, n_prompt, unit="head", form="auto", exact=False, bits=None):
    """Every number of a results row and its blocks that lifetimes determine; what the trace cannot give is absent.
    bits: (kv_bits, pending_bits, hold) of a quantised cache."""
    s = trace.seqs[sequence]
    counted = counted_steps(s, n_prompt)
    if not counted.any():
        raise ValueError("no counted step")
    m = lost_mass(trace, s, evict_at, form)
    units = unit_lifetimes(evict_at, unit)
    sizes = np.array([(visible_mask(s.T, 0) & ~evicted_mask(life)).sum(axis=1) for life in units])
    evictions, batches = evictions_of(trace, evict_at, unit)
    out = {
        "n_counted": int(counted.sum()),
        "lost_mass": m[:, :, counted].mean(),
        "footprint": (sizes.sum(axis=1) / (s.T * (s.T + 1) / 2)).mean(),
        "peak": sizes.max(axis=1).mean(),
        "evictions": evictions, "evict_batches": batches,
        "expired": np.mean([len(gone) for _, gone in leavings(trace, evict_at, unit)]),
        "resident": sizes[:, n_prompt:].mean(),
        "kv_bytes": kv_bits.kv_bytes(trace, evict_at, n_prompt, *(bits or ())),
        "block_lost_mass": block_sums(m.mean(axis=(0, 1)) * counted, s.T, n_prompt),
        "block_steps": block_sums(counted.astype(int), s.T, n_prompt),
        "head_lost_mass": m[:, :, counted].mean(axis=2),
    }
    if s.probes is not None:
        out["retained"] = np.mean([[step < life[int(i)] for i, step in s.probes] for life in units])
    if s.v is not None:
        delta = kv_bits.output_change(trace, s, evict_at, *bits) if bits else output_change(trace, s, evict_at, form)
        if trace.wo is not None:
            out["out_err"] = out_err(trace, s, delta, n_prompt, exact)
        if s.grad_loss is not None and s.grad_fisher is not None:
            out.update(loss_metrics(s, delta, n_prompt))
    return out
