"""vatp, caote, obcache and critical by the book: what losing an entry does to the attention output, from the formulas."""
from dataclasses import replace

import numpy as np

from replay import Scorer
from specs import OWN, PRESETS, Policy, expression, memory_of

PRESETS["vatp"] = Policy("vatp", sinks=20, hold="budget/2", own=(("memory", "sum"),))
PRESETS["caote"] = Policy("caote", own=(("form", "exact"), ("memory", "last")))
PRESETS["obcache"] = Policy("obcache", hold="budget/2",
                            own=(("prune", "joint"), ("p", "2"), ("vnorm", "yes"), ("memory", "sum"),
                                 ("window", "budget/2"), ("pool", "none"), ("kernel", "7")))
PRESETS["critical"] = Policy("critical", own=(("memory", "recent:64"), ("window", "64"), ("kernel", "5"),
                                              ("first", "budget/2"), ("epsilon", "0.0001")))
# Flavours: who of the above, and what differs.
FLAVOURS = {"vatp-scissorhands": ("vatp", dict(memory="recent:400"), dict(hold="10")),
            "caote-h2o": ("caote", dict(memory="sum"), dict(hold="budget/2")), "caote-fast": ("caote", dict(form="fast"), {}),
            "obcache-value": ("obcache", dict(prune="value"), {}), "obcache-key": ("obcache", dict(prune="key"), {}),
            "obcache-tova": ("obcache", dict(memory="last"), dict(hold="0")),
            "critical-h2o": ("critical", dict(memory="mean", window="0", kernel="1"), {})}
for name, (base, own, guards) in FLAVOURS.items():
    PRESETS[name] = replace(PRESETS[base], name=name, own=tuple((dict(PRESETS[base].own) | own).items()), **guards)


def pooled(x, kernel, join):
    """Smooth a list over its neighbours: `join` of the kernel's values, of which there are fewer at the ends."""
    half = kernel // 2
    return np.array([join(x[max(0, j - half):j + half + 1]) for j in range(len(x))])


class OutputScorer:
    """Keeps the resident sets; `table(t, entries)` gives the scores of all residents after step t."""
    ties_are_exact = True
    has_thresholds = False

    def __init__(self, trace, s, unit, config, signals, sequence, slack=0.0):
        self.trace, self.s, self.unit, self.config, self.slack = trace, s, unit, config, slack
        self.own = dict(config.policy.own)
        self.resident, self.scored = {}, (None, None)
        # [kv heads of the unit][T][D]
        self.v = [s.v[l, kv] for l in unit.layers for kv in unit.kv_heads] if s.v is not None else None
        if self.own["memory"] not in ("sum", "last", "recent"):  # of the rows alone, as in a mix
            self.rows_alone = Scorer(trace, s, unit, replace(
                config, policy=memory_of(replace(config.policy, evidence="attn"), self.own["memory"])), signals, sequence)
        else:
            plain = replace(config.policy, evidence="attn", memory=self.own["memory"])
            self.rows_alone = Scorer(trace, s, unit, replace(config, policy=plain), signals, sequence)

    def count(self, name):
        return expression(self.own[name], self.config.budget, self.config.policy.lag)

    def observe(self, t, resident, row):
        self.resident[t] = resident.copy()
        self.rows_alone.observe(t, resident, row)

    def score(self, i, t):
        if self.scored[0] != t:
            entries = np.flatnonzero(self.resident[t])
            self.scored = (t, dict(zip(entries, self.table(t, entries))))
        return self.scored[1][i]

    def pairs(self):
        """(query head within the unit, its layer, its head in the layer, its kv head in the layer)"""
        g = self.trace.group
        heads = [(l, kv * g + h, kv) for l in self.unit.layers for kv in self.unit.kv_heads for h in range(g)]
        return [(n, *x) for n, x in enumerate(heads)]


class Vatp(OutputScorer):
    def table(self, t, entries):
        return [self.rows_alone.score(i, t) * np.mean([np.abs(v[i]).sum() for v in self.v]) for i in entries]


class Caote(OutputScorer):
    def table(self, t, entries):
        w = np.array([self.rows_alone.score(i, t) for i in entries])
        v = np.concatenate([x[entries] for x in self.v], axis=1)  # the heads' values side by side
        if w.sum() <= 0:
            return np.zeros(len(entries))
        a = w / w.sum()
        before = a @ v
        scores = []
        for n in range(len(entries)):
            left = np.delete(w, n)
            if left.sum() <= 1e-9 * w.sum():
                scores.append(np.linalg.norm(v.mean(axis=0) if self.own["form"] == "fast" else before))
            elif self.own["form"] == "fast":
                scores.append(a[n] / (1 - a[n]) * np.linalg.norm(v.mean(axis=0) - v[n]))
            else:  # take it away and look
                scores.append(np.linalg.norm(left / left.sum() @ np.delete(v, n, axis=0) - before))
        return scores


class Obcache(OutputScorer):
    def observe(self, t, resident, row):
        super().observe(t, resident, row)
        if not hasattr(self, "saliency"):
            self.saliency = np.zeros((self.s.T, self.s.T))
        entries, p, prune = np.flatnonzero(resident), int(self.own["p"]), self.own["prune"]
        of_heads = []
        for n, l, h, kv in self.pairs():
            a = self.unit.rows[n, t, entries]
            a = a / a.sum()
            if self.own["vnorm"] == "no":
                of_heads.append(a ** p)
                continue
            v = self.s.v[l, kv, entries]
            if prune == "value":
                of_heads.append(a ** p * (np.abs(v) ** p).sum(axis=1))
                continue
            x = self.trace.scale * self.s.k[l, kv, entries] @ self.s.q[l, h, t]
            by_value = a[:, None] * v  # what the output loses, to first order, when v, k or both become zero
            by_key = (a * x)[:, None] * (v - a @ v)
            square = lambda moved: (moved ** 2).sum(axis=1)  # noqa: E731
            of_heads.append({"key": square(by_key), "joint": square(by_value + by_key),
                             "nocross": square(by_value) + square(by_key)}[prune])
        join = np.max if self.config.policy.heads == "max" else np.mean
        self.saliency[t, entries] = join(of_heads, axis=0)

    def table(self, t, entries):
        window, memory = self.count("window"), self.own["memory"]
        from_row = {"last": t, "recent": t - window + 1,
                    "sum": self.config.n_prompt - window if window else 0}[memory]
        x = np.array([self.saliency[max(i, from_row, 0):t + 1, i].sum() for i in entries])
        old = sum(t - i >= window for i in entries)
        if self.own["pool"] != "none":
            kernel = int(self.own["kernel"])
            join = np.max if self.own["pool"] == "max" else lambda some: sum(some) / kernel
            x[:old] = pooled(x[:old], kernel, join)
        return x


class Critical(OutputScorer):
    has_thresholds = True  # an entry that nearly made the first stage may have made it in f32

    def projected(self, i):
        """|v Wo|_1, mean over query heads."""
        D = self.trace.head_dim
        wo = [self.trace.wo[l, h * D:(h + 1) * D] for _, l, h, _ in self.pairs()]
        return np.mean([np.abs(self.s.v[l, kv, i] @ w).sum() for (_, l, _, kv), w in zip(self.pairs(), wo)])

    def table(self, t, entries):
        kind, _, rows = self.own["memory"].partition(":")
        kernel, window = int(self.own["kernel"]), self.count("window")
        x = np.array([self.rows_alone.score(i, t) for i in entries]) / (int(rows) if kind == "recent" else 1)
        old = sum(t - i >= window for i in entries)
        x[:old] = pooled(x[:old], kernel, lambda some: sum(some) / kernel)
        x[old:] = (x[:old].max() if old else 0) + 1
        first = self.count("first")
        if self.own["first"].startswith("budget"):
            first = max(first, 1)
        order = sorted(range(len(x)), key=lambda j: (-x[j], -j))  # of equal ones the newest
        chosen = set(order[:first])
        if self.slack and 0 < first < len(x):
            bar = x[order[first - 1]] if self.slack > 0 else x[order[first]]
            near = {j for j in range(len(x)) if x[j] != bar and abs(x[j] - bar) <= abs(self.slack) * abs(bar)}
            chosen = chosen | near if self.slack > 0 else chosen - near
        return [1e300 if j in chosen else (x[j] + float(self.own["epsilon"])) * self.projected(i)
                for j, i in enumerate(entries)]


OWN.update(vatp=Vatp, caote=Caote, obcache=Obcache, critical=Critical)
OWN.update({name: OWN[base] for name, (base, _, _) in FLAVOURS.items()})
