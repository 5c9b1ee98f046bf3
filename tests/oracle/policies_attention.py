"""Scores of policies that look at attention, from their formulas, every time anew from all rows ever seen.

Each scorer fills in `scores(t)`: the worth of every resident after step t. Rows are f64; `slack` moves thresholds, so
that f32 and f64 may disagree about a value that lies on one.
"""
import math

import numpy as np

from specs import OWN, PRESETS, Policy


class RowScorer:
    """Keeps all rows and who was resident; scores once a step, when first asked."""
    has_thresholds = False
    ties_are_exact = True

    def __init__(self, trace, s, unit, config, signals, sequence, slack=0.0):
        self.s, self.trace, self.unit, self.config, self.slack = s, trace, unit, config, slack
        self.p = dict(config.policy.own)
        self.kv_heads = [(layer, kv) for layer in unit.layers for kv in unit.kv_heads]
        self.row = np.zeros((s.T, s.T))
        self.n = np.zeros(s.T)
        self.scored = None

    def number(self, name):
        return float(self.p[name])

    def observe(self, t, resident, row):
        self.row[t], self.n[t] = row, resident.sum()
        self.resident = np.flatnonzero(resident)

    def score(self, i, t):
        if self.scored is None or self.scored[0] != t:
            self.scored = t, dict(zip(self.resident, self.scores(t)))
        return self.scored[1][i]

    def last_rows(self, t, w):
        return self.row[max(0, t - w + 1):t + 1]


def pooled(x, kernel, kind):
    """PyTorch's avg_pool1d or max_pool1d with padding kernel // 2."""
    side = kernel // 2
    if kind == "avg":
        return np.array([np.pad(x, side)[j:j + kernel].sum() / kernel for j in range(len(x))])
    return np.array([x[max(0, j - side):j + side + 1].max() for j in range(len(x))])


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


class SnapKV(RowScorer):
    def scores(self, t):
        w = int(self.p["window"])
        older = self.resident[t - self.resident >= w]
        attention = self.last_rows(t, w)[:, older].sum(axis=0)
        values = pooled(attention, int(self.p["kernel"]), self.p["pool"])
        return np.append(values, np.full(len(self.resident) - len(older), w + 1.0))


class Scissorhands(RowScorer):
    has_thresholds = True

    def scores(self, t):
        tau = 1 / np.maximum(self.n, 1) if self.p["tau"] == "1/resident" else np.full(len(self.n), float(self.p["tau"]))
        first = max(0, t - int(self.p["window"]) + 1)
        low = 0.0
        for step in range(first, t + 1):  # more slack: fewer charges, a higher score
            arrived = self.resident <= step
            low += arrived * (self.row[step, self.resident] < tau[step] * (1 - self.slack))
        return -low


class OpenVINO(RowScorer):
    def scores(self, t):
        P, window, length = self.config.n_prompt, int(self.p["window"]), int(self.p["ahead"])
        first = max(0, P - window) if window else 0
        ahead = lambda x: np.array([x[j:j + length].max() for j in range(len(x))])  # noqa: E731
        # Who follows whom is a matter of who was resident in that step.
        total = dict.fromkeys(self.resident, 0.0)
        steps = [(P - 1, self.row[first:P].sum(axis=0))] if P else []
        for step, row in steps + [(step, self.row[step]) for step in range(P, t + 1)]:
            there = self.seen[step]
            for i, x in zip(there, ahead(row[there])):
                if i in total:
                    total[i] += x
        if self.p["aggregate"] == "sum":
            return np.array([total[i] for i in self.resident])
        return np.array([total[i] / (t - max(i, first if i < P else i) + 1) for i in self.resident])

    def observe(self, t, resident, row):
        super().observe(t, resident, row)
        self.seen = getattr(self, "seen", {})
        self.seen[t] = self.resident


class Lazy(RowScorer):
    def scores(self, t):
        return np.array([self.one(i, t) for i in self.resident])

    def one(self, i, t):
        uses = [step for step in range(i, t + 1) if self.row[step, i] >= self.number("alpha")]
        if not uses:
            return 0.0
        longest = np.diff([i - 1] + uses).max()
        falling = lambda x: 2 / (1 + math.exp(min(x, 700)))  # noqa: E731
        return falling(self.number("shift") + (t - uses[-1]) / longest) + falling(longest - 1)


class RoCo(RowScorer):
    has_thresholds = True

    def scores(self, t):
        n = len(self.resident)
        rows = [self.row[i:t + 1, i] for i in self.resident]
        mean, deviation = np.array([r.mean() for r in rows]), np.array([r.std() for r in rows])
        deviation[max(0, n - int(self.p["young"])):] = np.inf
        k = max(1, n - 1 - math.floor(self.number("protect") * (n - 1)))
        order = sorted(range(n), key=lambda j: (deviation[j], j))
        protected = np.ones(n, bool)
        protected[order[:k]] = False
        # Deviations as near as this to the last unprotected one may fall on either side of it.
        bar = deviation[order[k - 1]]
        if self.slack and np.isfinite(bar):
            protected[np.abs(deviation - bar) <= 10 * abs(self.slack) * bar + 1e-7] = self.slack > 0
        return mean + 2 * protected


def redundancy(keys, similar, excuse_first):
    """R-KV's: keys [n, D]."""
    n = len(keys)
    norm = np.linalg.norm(keys, axis=1, keepdims=True)
    unit = np.divide(keys, norm, out=np.zeros_like(keys), where=norm > 0)
    cosine = unit @ unit.T
    np.fill_diagonal(cosine, 0)
    for j in range(n):
        alike = np.flatnonzero(cosine[j] > similar)
        alike = alike[alike != j]
        if len(alike):
            excused = alike[-1]
        elif excuse_first:
            excused = 0
        else:
            continue
        cosine[j, excused] = 0
    return softmax(cosine.mean(axis=0))


class RKV(RowScorer):
    def scores(self, t):
        w, lam = int(self.p["window"]), self.number("lambda")
        older = self.resident[t - self.resident >= w]
        if not len(older):
            return np.full(len(self.resident), 2.0)
        group, total = self.trace.group, 0.0
        for layer, kv in self.kv_heads:
            q = self.s.q[layer, kv * group:(kv + 1) * group, max(0, t - w + 1):t + 1]
            logits = self.trace.scale * (q @ self.s.k[layer, kv][older].T)
            importance = np.mean([softmax(x) for x in logits.max(axis=0)], axis=0)
            importance = pooled(importance, int(self.p["kernel"]), "max")
            alike = redundancy(self.s.k[layer, kv][self.resident], self.number("similar"), True)[:len(older)]
            total = total + lam * importance - (1 - lam) * alike
        return np.append(total / len(self.kv_heads), np.full(len(self.resident) - len(older), 2.0))


class GKV(RowScorer):
    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.remembered = np.zeros(self.s.T)

    def observe(self, t, resident, row):
        super().observe(t, resident, row)
        from replay import candidates_of, excess
        config = self.config
        scored = excess(config, t, self.s.T, resident) > 0
        if scored and (config.schedule.startswith("block") or candidates_of(config, t, resident)):
            self.score(self.resident[0], t)

    def scores(self, t):
        w, lam = int(self.p["window"]), self.number("lambda")
        older = self.resident[t - self.resident >= w]
        if not len(older):
            return np.full(len(self.resident), 2.0)
        local = self.last_rows(t, w)[:, older].mean(axis=0)
        if local.max() > 0:
            local = local / local.max()
        self.remembered[older] = np.maximum(self.number("alpha") * self.remembered[older], local)
        total = lam * self.remembered[older]
        for layer, kv in self.kv_heads:
            keys = self.s.k[layer, kv][self.resident]
            alike = redundancy(keys, self.number("similar"), False)[:len(older)]
            total = total - (1 - lam) * alike / alike.max() / len(self.kv_heads)
        return np.append(total, np.full(len(self.resident) - len(older), 2.0))


def add(name, scorer, hold, unit=None, sinks=0, heads="mean", **own):
    PRESETS[name] = Policy(name, hold=hold, unit=unit, sinks=sinks, heads=heads, own=tuple(own.items()))
    OWN[name] = scorer


PRESETS["lfu"] = Policy("lfu", "attn>=tau", hold="1")
PRESETS["h2o-mean"] = Policy("h2o-mean", memory="mean")
PRESETS["h2o-mean-sinks"] = Policy("h2o-mean-sinks", memory="mean", sinks=4, hold="11")
PRESETS["h2o-prompt"] = Policy("h2o-prompt", memory="prompt", hold="8")
PRESETS["h2o-last"] = Policy("h2o-last", memory="last", hold="budget/2")
for name, window, kernel, pool in (("snapkv", 64, 5, "avg"), ("snapkv-w32-k5-avg", 32, 5, "avg"),
                                   ("snapkv-w32-k7-max", 32, 7, "max"), ("snapkv-w8-k7-max", 8, 7, "max"),
                                   ("pyramidkv", 8, 7, "max")):
    add(name, SnapKV, str(window), window=str(window), kernel=str(kernel), pool=pool)
add("scissorhands", Scissorhands, "10", window="400", tau="1/resident")
add("h2o-openvino", OpenVINO, "128", "layer", 32, ahead="7", window="8", aggregate="norm")
add("lazy", Lazy, "52", alpha="0.0005", shift="0")
add("lazy-code", Lazy, "52", alpha="0.0005", shift="1")
add("roco", RoCo, "0", protect="0.3", young="10")
add("rkv", RKV, "8", window="8", kernel="7", similar="0.5", **{"lambda": "0.1"})
add("gkv", GKV, "16", heads="max", window="16", alpha="0.8", similar="0.5", **{"lambda": "0.5"})


class ScissorhandsSum(RowScorer):
    def scores(self, t):
        return self.last_rows(t, int(self.p["window"]))[:, self.resident].sum(axis=0)


add("scissorhands-sum", ScissorhandsSum, "10", window="400")
