"""What a quantised cache changes (docs/design.md, "Precision"): q8_0 and q4_0 written from llama.cpp's description of the
formats, and delta = o' - o with o' made from what such a cache gives back. In f64 but for the quantiser itself."""
import numpy as np

from tracefile import rows_of, visible_mask

SMALLEST_VISIBLE = 1e-6  # of all mass, see metrics.py


def stored(x, bits):
    """x [..., D] as the cache gives it back: blocks of 32 along the last axis, the last one may be shorter."""
    if bits == 16:
        return np.asarray(x, np.float64)
    x, out = np.asarray(x, np.float32), []
    for a in range(0, x.shape[-1], 32):
        block = x[..., a:a + 32]
        peak = np.take_along_axis(block, np.abs(block).argmax(axis=-1)[..., None], axis=-1)
        d = np.abs(peak) / np.float32(127) if bits == 8 else peak / np.float32(-8)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            y = np.where(d != 0, block * (np.float32(1) / d), np.float32(0)).astype(np.float32)
        if bits == 8:
            q = np.sign(y) * np.floor(np.abs(y).astype(np.float64) + 0.5)
        else:
            q = np.minimum(np.trunc(y + np.float32(8.5)), 15).astype(np.float64) - 8
        out.append(d.astype(np.float16).astype(np.float64) * q)
    return np.concatenate(out, axis=-1)


def output_change(trace, s, evict_at, kv, pending, hold):
    """delta [L, H, T, D]. Entries younger than `hold` are stored in `pending` bits, the others in `kv` bits."""
    t = np.arange(s.T)
    young = (t[:, None] - t[None, :]) < hold
    delta = np.zeros((trace.n_layer, trace.n_head, s.T, trace.head_dim))
    for l in range(trace.n_layer):
        reach = visible_mask(s.T, trace.window[l])
        for h in range(trace.n_head):
            head = h // trace.group
            k, v = ([stored(x[l, head], bits) for bits in (kv, pending)] for x in (s.k, s.v))
            score = [trace.scale * (s.q[l, h] @ x.T) for x in k]
            score = np.where(young, score[1], score[0])
            if trace.softcap:
                score = trace.softcap * np.tanh(score / trace.softcap)
            score = np.where(reach, score, -np.inf)
            e = np.exp(score - score.max(axis=1, keepdims=True))
            seen = e * (t[:, None] < evict_at[l, head][None, :])
            mass = np.maximum(seen.sum(axis=1), SMALLEST_VISIBLE * e.sum(axis=1))
            o = rows_of(trace, s, l, "factored")[h] @ s.v[l, head]
            sums = (seen * ~young) @ v[0] + (seen * young) @ v[1]
            delta[l, h] = (sums - seen.sum(axis=1)[:, None] * o) / mass[:, None]
    return delta


def stored_bytes(bits, D):
    """Bytes of a vector: an f16 scale for each block beside its values."""
    return 2 * D if bits == 16 else sum(2 + -(-min(32, D - a) * bits // 8) for a in range(0, D, 32))


def kv_bytes(trace, evict_at, n_prompt, kv=16, pending=16, hold=0):
    """Mean over the steps after the prompt of what all heads read: k and v of every visible entry."""
    T, total = evict_at.shape[-1], 0
    for life in evict_at.reshape(-1, T):
        for t in range(n_prompt, T):
            seen = np.flatnonzero(life[:t + 1] > t)
            young = (t - seen < hold).sum()
            total += 2 * (young * stored_bytes(pending, trace.head_dim) + (len(seen) - young) * stored_bytes(kv, trace.head_dim))
    return total / (T - n_prompt)
