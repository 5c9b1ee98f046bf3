"""knorm, keydiff, lagkv, cur, expected and mix's evidence of keys and values, from the formulas."""
import re
from functools import lru_cache

import numpy as np

from specs import OWN, PRESETS, STATIC, Policy

PRESETS["knorm"] = Policy("knorm", "keynorm", "static")
PRESETS["keydiff"] = Policy("keydiff")
PRESETS["lagkv"] = Policy("lagkv", sinks=4, own=(("lag_size", "128"), ("cross_scoring", "no")))
PRESETS["lagkv-cross"] = Policy("lagkv-cross", sinks=4, own=(("lag_size", "128"), ("cross_scoring", "yes")))
PRESETS["cur"] = Policy("cur", sinks=4, own=(("leverage_type", "kv_product"), ("local_window_size", "16")))
PRESETS["expected"] = Policy("expected", sinks=4, own=(("n_future", "512"), ("use_covariance", "yes"),
                                                       ("use_vnorm", "yes"), ("epsilon", "0")))


def unit_length(x):
    """Each row divided by its norm; rows of zeros stay."""
    n = np.linalg.norm(x, axis=-1, keepdims=True)
    return np.divide(x, n, out=np.zeros_like(x), where=n > 0)


def cosines(x, y):
    return unit_length(x) @ unit_length(y)


def mean_over_kv(unit, one):
    return np.mean([one(l, kv) for l in unit.layers for kv in unit.kv_heads], axis=0)


# ---- fixed at arrival ------------------------------------------------------------------------------------------------


def outnorm(trace, s, unit):
    def one(l, kv):
        D, heads = trace.head_dim, range(kv * trace.group, (kv + 1) * trace.group)
        return np.mean([np.linalg.norm(s.v[l, kv] @ trace.wo[l, h * D:(h + 1) * D], axis=1) for h in heads], axis=0)
    return mean_over_kv(unit, one)


def keysim(trace, s, unit):
    def one(l, kv):
        k = s.k[l, kv]
        return np.array([-cosines(k[i], unit_length(k[:i + 1]).mean(axis=0)) for i in range(len(k))])
    return mean_over_kv(unit, one)


STATIC["keynorm"] = lambda trace, s, unit: mean_over_kv(unit, lambda l, kv: -np.linalg.norm(s.k[l, kv], axis=1))
STATIC["valuenorm"] = lambda trace, s, unit: mean_over_kv(unit, lambda l, kv: np.linalg.norm(s.v[l, kv], axis=1))
STATIC["outnorm"], STATIC["keysim"] = outnorm, keysim


# ---- of the residents ------------------------------------------------------------------------------------------------


class KeyScorer:
    """Keeps the resident sets; `table(t, entries)` gives one score for each resident after step t."""
    ties_are_exact = has_thresholds = False

    def __init__(self, trace, s, unit, config, signals, sequence, slack=0.0):
        self.trace, self.s, self.unit = trace, s, unit
        self.own, self.sinks = dict(config.policy.own), config.policy.sinks
        self.resident, self.scored = {}, (None, None)

    def observe(self, t, resident, row):
        self.resident[t] = np.flatnonzero(resident)

    def score(self, i, t):
        if self.scored[0] != t:
            self.scored = (t, dict(zip(self.resident[t], self.table(t, self.resident[t]))))
        return self.scored[1][i]


class KeyDiff(KeyScorer):
    def table(self, t, entries):
        def one(l, kv):
            k = self.s.k[l, kv, entries]
            return -cosines(k, unit_length(k).mean(axis=0))
        return mean_over_kv(self.unit, one)


class Cur(KeyScorer):
    def leverage(self, x):
        squares = (x ** 2).sum(axis=1)
        w = int(self.own["local_window_size"])
        for start in range(0, len(x), w) if w else ():
            run = squares[start:start + w]
            squares[start:start + w] = run / run.sum()
        return squares

    def table(self, t, entries):
        def one(l, kv):
            k, v = self.leverage(self.s.k[l, kv, entries]), self.leverage(self.s.v[l, kv, entries])
            joined = {"key": k, "value": v, "kv_avg": (k + v) / 2, "kv_product": k * v}[self.own["leverage_type"]]
            return joined / joined.sum()
        return mean_over_kv(self.unit, one)


class LagKV(KeyScorer):
    """Ranks are whole, so ties between parts are ties in any arithmetic."""
    ties_are_exact = True

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.judged, self.L = {}, int(self.own["lag_size"])

    def observe(self, t, resident, row):
        super().observe(t, resident, row)
        parts = (t + 1 - self.sinks) // self.L
        if parts < 2 or (t + 1 - self.sinks) % self.L:
            return
        start = self.sinks + (parts - 2) * self.L
        old, new = ([i for i in range(a, a + self.L) if resident[i]] for a in (start, start + self.L))
        if old:
            self.judged.update(zip(old, mean_over_kv(self.unit, lambda l, kv: self.judge(l, kv, old, new))))

    def judge(self, l, kv, old, new):
        total = np.zeros(len(old))
        for x in (self.s.k[l, kv], self.s.v[l, kv]):
            low, high = x[new].min(axis=0), x[new].max(axis=0)
            off = x[old] - low
            spread = np.divide(off, high - low, out=np.zeros_like(off), where=high > low).std(axis=1, ddof=1)
            total += np.exp(spread - spread.max()) / np.exp(spread - spread.max()).sum() / 2
        if self.own["cross_scoring"] == "yes":
            return total
        return np.argsort(np.argsort(total, kind="stable"), kind="stable") / self.L

    def table(self, t, entries):
        return [self.judged.get(i, 1.0) for i in entries]


@lru_cache(maxsize=None)
def rotation(rope, D, p):
    """The matrix that RoPE multiplies a column vector in position p with."""
    base, kind, dims = re.fullmatch(r"base (\S+), (\w+), (\d+) dims", rope).groups()
    half, R = int(dims) // 2, np.eye(D)
    for c in range(half):
        a, b = (2 * c, 2 * c + 1) if kind == "interleaved" else (c, c + half)
        angle = p * float(base) ** (-c / half)
        R[a, a] = R[b, b] = np.cos(angle)
        R[b, a], R[a, b] = np.sin(angle), -np.sin(angle)
    return R


class Expected(KeyScorer):
    def rope(self, l):
        everywhere, _, windowed = self.trace.rope.partition("; with a window: ")
        return windowed if windowed and self.trace.window[l] else everywhere

    def table(self, t, entries):
        trace, n_future = self.trace, int(self.own["n_future"])
        steps, behind = range(self.sinks, t + 1), entries[entries >= self.sinks]

        def attention(l, h, kv):
            R = np.mean([rotation(self.rope(l), trace.head_dim, p) for p in range(t + 1, t + 1 + n_future)], axis=0)
            q = np.array([rotation(self.rope(l), trace.head_dim, p).T @ self.s.q[l, h, p] for p in steps])
            mu, cov = R @ q.mean(axis=0), R @ np.cov(q.T, bias=True) @ R.T
            k = self.s.k[l, kv, behind]
            logit = trace.scale * k @ mu
            if self.own["use_covariance"] == "yes":
                logit += trace.scale ** 2 / 2 * np.array([x @ cov @ x for x in k])
            return np.exp(logit - logit.max()) / np.exp(logit - logit.max()).sum()

        def one(l, kv):
            a = np.mean([attention(l, kv * trace.group + g, kv) for g in range(trace.group)], axis=0)
            if self.own["use_vnorm"] == "yes":
                a = (a + float(self.own["epsilon"])) * np.linalg.norm(self.s.v[l, kv, behind], axis=1)
            return np.concatenate([np.zeros(len(entries) - len(behind)), a])
        return mean_over_kv(self.unit, one)


OWN.update({"keydiff": KeyDiff, "lagkv": LagKV, "lagkv-cross": LagKV, "cur": Cur, "expected": Expected})
