"""Requests that share a pool, by the book (docs/pool.md): global step after global step, entry after entry.

Nothing here plans ahead: who is admitted is asked at every step, and who pays is asked again after every entry.
"""
from dataclasses import dataclass

import numpy as np

from replay import candidates_of, choose, excess, scorer_of, signals_of, unit_row, units_of


@dataclass
class Request:
    seq: int
    arrival: int
    config: object  # specs.Config; its budget is the pool's where the request has none
    capped: bool = False


@dataclass
class Outcome:
    start: int
    evict_at: np.ndarray  # [n_layer, n_kv_head, T]
    held: float  # entries after a step, mean over global steps and units


def reserve(r, T):
    """What a request keeps whatever others do: sinks, held entries and the one that arrives; whole blocks."""
    c = r.config
    sinks, kind, n = c.policy.sinks, *c.schedule.partition(":")[::2]
    if c.policy.name == "full":
        return T
    if kind == "block":
        sinks += -sinks % int(n) + int(n) - 1
    return min(sinks + c.hold + 1, c.budget, T)


def timetable(trace, requests, M):
    """Global step of admission of each request: first come, first served."""
    T = [trace.seqs[r.seq].T for r in requests]
    waiting = sorted(range(len(requests)), key=lambda i: (requests[i].arrival, i))
    start, left, g = {}, {}, 0
    while waiting:
        left = {i: n for i, n in left.items() if n > 0}
        taken = sum(reserve(requests[i], T[i]) for i in left)
        while waiting and requests[waiting[0]].arrival <= g:
            i = waiting[0]
            P = requests[i].config.n_prompt
            need = max(P, reserve(requests[i], T[i]))
            if taken + need > M:
                break
            taken += need
            start[i], left[i] = g, T[i] - max(P, 1) + 1
            waiting.pop(0)
        left = {i: n - 1 for i, n in left.items()}
        g += 1
    return start


class Member:
    """One unit of one request."""

    def __init__(self, trace, request, unit, start):
        self.s, self.config, self.unit, self.start = trace.seqs[request.seq], request.config, unit, start
        self.alone = request.capped or request.config.schedule != "step"
        self.is_full = request.config.policy.name == "full"
        signals = signals_of(self.s, self.config.n_prompt, self.config.seed, request.seq)
        self.scorer = scorer_of(trace, self.s, unit, self.config, signals, request.seq)
        self.resident = np.zeros(self.s.T, bool)
        self.evict_at = np.full(self.s.T, self.s.T + 1)
        self.t, self.counts = -1, []

    def step(self):
        t = self.t = self.t + 1
        W = self.unit.window
        if W and t >= W and self.resident[t - W]:
            self.evict_at[t - W], self.resident[t - W] = t, False
        self.resident[t] = True
        self.scorer.observe(t, self.resident, unit_row(self.unit, t, self.resident, self.config.policy.heads))

    def scores(self, groups):
        return [np.mean([self.scorer.score(i, self.t) for i in g]) for g in groups]

    def groups(self):
        return [] if self.is_full else candidates_of(self.config, self.t, self.resident)

    def evict(self, victims):
        victims = list(victims)
        self.resident[victims] = False
        self.evict_at[victims] = self.t + 1

    def evict_alone(self):
        surplus = 0 if self.is_full else excess(self.config, self.t, self.s.T, self.resident)
        groups = self.groups()
        self.evict(choose(groups, self.scores(groups), surplus))

    @property
    def held(self):
        return int(self.resident.sum())

    def lowest(self):
        """(score over the mean magnitude, members) of what leaves first, or None."""
        groups = self.groups()
        if not groups:
            return None
        scores = self.scores(groups)
        n = min(range(len(groups)), key=lambda n: (scores[n], n))
        return scores[n] / self.mean, groups[n]

    def weigh(self):
        mean = np.mean([abs(self.scorer.score(i, self.t)) for i in np.flatnonzero(self.resident)])
        self.mean = mean if mean > 0 else 1.0


def share(members, M, low, rule):
    if sum(m.held for m in members) <= M:
        return
    for m in members:
        m.weigh()
    while sum(m.held for m in members) > low:
        able = [m for m in members if m.groups()]
        if not able:
            return
        if rule == "fair":
            payer = max(able, key=lambda m: m.held - M / len(members))  # the first of equals
        else:
            payer = min(able, key=lambda m: m.lowest()[0])
        payer.evict(payer.lowest()[1])


def replay_unit(trace, requests, units, start, M, low, rule):
    order = sorted(range(len(requests)), key=lambda i: (start[i], requests[i].arrival, i))
    members = {i: Member(trace, requests[i], units[i], start[i]) for i in order}
    for g in range(10 ** 9):
        there = [members[i] for i in order if members[i].start <= g and members[i].t < members[i].s.T - 1]
        if not there and all(m.start <= g for m in members.values()):
            break
        for m in there:
            m.step()
            while m.t < m.config.n_prompt - 1:
                m.step()
            if m.alone:
                m.evict_alone()
        share(there, M, low, rule)
        assert sum(m.held for m in there) <= M
        for m in there:
            m.counts.append(m.held)
    return members


def replay_pool(trace, requests, M, low=None, rule="fair", unit="head"):
    start = timetable(trace, requests, M)
    shape = (trace.n_layer, trace.n_kv_head)
    lifetimes = [np.zeros(shape + (trace.seqs[r.seq].T,), np.int64) for r in requests]
    counts = [[] for _ in requests]
    units = [units_of(trace, trace.seqs[r.seq], unit) for r in requests]
    for u in range(len(units[0])):
        members = replay_unit(trace, requests, [all_[u] for all_ in units], start, M, M if low is None else low, rule)
        for i, m in members.items():
            lifetimes[i][np.ix_(m.unit.layers, m.unit.kv_heads)] = m.evict_at
            counts[i] += m.counts
    return [Outcome(start[i], lifetimes[i], float(np.mean(counts[i]))) for i in range(len(requests))]


def jain(x):
    x = np.asarray(x, float)
    return x.sum() ** 2 / (len(x) * (x ** 2).sum())
