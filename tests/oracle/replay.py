"""Lifetimes by the book: straight loops over steps, every score computed anew from its definition (DESIGN 1, 4, 5).

`replay` chooses the victims itself. `audit` is given lifetimes made elsewhere and checks, with that cache's own
resident sets, that each step evicts as many as it must and only what it may. Both are one loop, `run_unit`.
"""
import math
from dataclasses import dataclass

import numpy as np

from philox import words
from specs import OWN, STATIC, schedule_target
from tracefile import counted_steps, rows_of

TOLERANCE = 1e-5  # f32 against f64: scores closer than this times (1 + |score|) are a tie


class Violation(AssertionError):
    """Lifetimes that no cache obeying the configuration could have."""


@dataclass
class Unit:
    """What evicts on its own: lifetimes[layers, kv_heads] are one and the same row."""
    layers: list
    kv_heads: list
    rows: np.ndarray  # [query heads of the unit, T, T], the full run's
    window: int
    name: str


@dataclass
class Signals:
    """Per step, [T]; at step T-1 the prediction counts as wrong."""
    correct: np.ndarray
    confidence: np.ndarray
    counted: np.ndarray
    agrees: np.ndarray = None  # a token drawn from the prediction is the text's
    certainty: np.ndarray = None  # exp(-entropy)


def units_of(trace, s, unit, form="auto"):
    group, every_kv = trace.group, list(range(trace.n_kv_head))
    if unit == "model":
        assert len(set(trace.window)) == 1, "unit model needs equal windows"
        rows = np.concatenate([rows_of(trace, s, l, form) for l in range(trace.n_layer)])
        return [Unit(list(range(trace.n_layer)), every_kv, rows, trace.window[0], "model")]
    units = []
    for l in range(trace.n_layer):
        rows = rows_of(trace, s, l, form)
        if unit == "layer":
            units.append(Unit([l], every_kv, rows, trace.window[l], f"layer {l}"))
            continue
        for kv in every_kv:
            mine = rows[kv * group:(kv + 1) * group]
            units.append(Unit([l], [kv], mine, trace.window[l], f"layer {l}, kv head {kv}"))
    return units


def signals_of(s, n_prompt, seed=0, sequence=0):
    extend = lambda x: None if x is None else np.append(x, 0.0)  # noqa: E731
    confidence = None if s.target_logprob is None else np.exp(s.target_logprob)
    agrees = None if confidence is None else [
        (words(seed, t, 2**32 - 1, 2**32 - 1, sequence)[0] + 0.5) / 2**32 < c for t, c in enumerate(confidence)]
    certainty = None if s.entropy is None else np.exp(-np.append(s.entropy, 0.0))
    return Signals(extend(s.correct), extend(confidence), counted_steps(s, n_prompt), extend(agrees), certainty)


# ---- evidence and scores ---------------------------------------------------------------------------------------------


def unit_row(unit, t, resident, heads):
    """The unit's row over the residents: each query head's row renormalised, then the mean (or max) over heads."""
    row = np.zeros(len(resident))
    a = unit.rows[:, t, resident]
    a = a / a.sum(axis=1, keepdims=True)
    row[resident] = a.max(axis=0) if heads == "max" else a.mean(axis=0)
    return row


def evidence_of(kind, row, t, resident, signals, slack):
    """The policy's evidence about every resident at step t, from the unit's row."""
    if kind.startswith("attn>="):
        return (row >= float(kind[6:]) * (1 - slack)) * resident * 1.0
    if kind == "attn*correct":
        return row * signals.correct[t]
    if kind == "attn*confidence":
        return row * signals.confidence[t]
    if kind == "attn*agrees":
        return row * signals.agrees[t]
    if kind == "attn*entropy":
        return row * signals.certainty[t]
    if kind == "attn*focus":
        a = row[row > 0]
        n = resident.sum()
        return row * (1 + (a * np.log(a)).sum() / math.log(n)) if n > 1 else row
    assert kind == "attn", kind
    return row


def full_run_evidence(trace, s, unit, kind):
    """[T, T] evidence that does not depend on the cache: mass, out, loss or fisher of DESIGN section 5."""
    if kind == "mass":
        return unit.rows.mean(axis=0)
    total = None
    pairs = [(l, kv * trace.group + g) for l in unit.layers for kv in unit.kv_heads for g in range(trace.group)]
    for (l, h), a in zip(pairs, unit.rows):
        v = s.v[l, h // trace.group]
        e = (a / np.maximum(1 - a, 1e-3))[:, :, None] * ((a @ v)[:, None, :] - v[None, :, :])
        if kind == "out":
            term = np.linalg.norm(e, axis=2) / len(pairs)
        elif kind == "loss":
            term = (e * s.grad_loss[l, h][:, None, :]).sum(axis=2)
        else:
            term = np.einsum("tid,std->sti", e, s.grad_fisher[:, l, h])
        total = term if total is None else total + term
    if kind == "fisher":
        total = 0.5 * (total ** 2).mean(axis=0)
    total[0, 0] = 0
    return total


def static_scores(trace, s, unit, kind, seed, sequence):
    """[T] scores that are fixed at arrival."""
    if kind == "position":
        return np.arange(s.T, dtype=float)
    if kind == "random":
        kv = unit.kv_heads[0] if len(unit.kv_heads) == 1 else 0
        layer = unit.layers[0] if len(unit.layers) == 1 else 0
        return np.array([words(seed, i, kv, layer, sequence)[0] for i in range(s.T)], float)
    return STATIC[kind](trace, s, unit)


class Scorer:
    """Keeps every row a unit ever saw and answers what an entry is worth after step t. `slack` widens thresholds, so
    that f32 and f64 may disagree about a value that lies on one."""

    def __init__(self, trace, s, unit, config, signals, sequence, slack=0.0):
        p, T = config.policy, s.T
        self.policy, self.signals, self.slack, self.n_prompt = p, signals, slack, config.n_prompt
        self.row, self.evidence, self.tau = np.zeros((T, T)), np.zeros((T, T)), np.zeros(T)
        self.static = self.given = None
        if p.memory == "static":
            self.static = static_scores(trace, s, unit, p.evidence, config.seed, sequence)
        elif p.memory == "future":
            self.given = full_run_evidence(trace, s, unit, {"mass": "mass", "loss": "fisher"}[p.evidence])
            self.given = self.given * signals.counted[:, None]
        elif p.evidence in ("out", "loss", "fisher"):
            self.given = full_run_evidence(trace, s, unit, p.evidence)

    @property
    def ties_are_exact(self):
        """Zero is zero in any arithmetic, but for sums that were subtracted down to it."""
        return self.policy.memory != "future"

    @property
    def has_thresholds(self):
        """Can a value that lies on a threshold change a score by more than TOLERANCE?"""
        return self.policy.memory == "age" or ">=" in self.policy.evidence

    def observe(self, t, resident, row):
        self.row[t] = row
        tau = self.policy.tau
        self.tau[t] = (1 / resident.sum() if tau == "1/resident" else float(tau)) * (1 - self.slack)
        if self.static is not None or self.policy.memory == "future":
            return
        if self.policy.evidence == "attn>=tau":
            self.evidence[t] = (row >= self.tau[t]) * resident
            return
        self.evidence[t] = self.given[t] * resident if self.given is not None else evidence_of(
            self.policy.evidence, row, t, resident, self.signals, self.slack)

    def score(self, i, t):
        p = self.policy
        if p.memory == "static":
            return self.static[i]
        if p.memory == "future":
            last = len(self.row) if p.horizon == math.inf else min(len(self.row), t + 1 + int(p.horizon))
            return self.given[t + 1:last, i].sum()
        end = min(t, i + p.lag) if p.cut else t
        seen = self.evidence[i:end + 1, i]  # own row first
        if p.memory == "sum":
            return seen.sum()
        if p.memory == "prompt":
            return self.evidence[i:max(i, min(end + 1, self.n_prompt)), i].sum()
        if p.memory == "mean":
            return seen.sum() / len(seen)
        if p.memory == "ema":
            return ((1 - p.arg) * p.arg ** np.arange(len(seen) - 1, -1, -1) * seen).sum()
        if p.memory == "last":
            return seen[-1]
        if p.memory == "recent":
            return seen[-int(p.arg):].sum()
        if p.memory == "max":
            return (p.arg ** np.arange(len(seen) - 1, -1, -1) * seen).max()
        if p.memory == "age":
            used = np.flatnonzero(self.row[i:end + 1, i] >= self.tau[i:end + 1])
            return float(i + (used[-1] if len(used) else 0))
        assert p.memory == "first", p.memory
        after = self.evidence[i + 1:min(end, i + p.lag) + 1, i]
        return after.mean() if len(after) else self.row[i, i]


def scorer_of(trace, s, unit, config, signals, sequence, slack=0.0):
    return OWN.get(config.policy.name, Scorer)(trace, s, unit, config, signals, sequence, slack)


# ---- eviction --------------------------------------------------------------------------------------------------------


def excess(config, t, T, resident):
    """How many counted entries are too many after step t; 0 where the schedule does not act."""
    B = config.budget
    if B >= T or t < config.n_prompt - 1:
        return 0
    counted = resident.copy()
    if config.pending == "free":
        counted[max(0, t - config.hold + 1):] = False
    n = int(counted.sum())
    kind, _, arg = config.schedule.partition(":")
    first = config.n_prompt > 0 and t == config.n_prompt - 1
    acts = first or {"step": True, "block": True, "prompt": False, "every": kind == "every" and (t + 1) % int(arg) == 0,
                     "watermark": n > B}[kind]
    return max(0, n - schedule_target(config)) if acts else 0


def candidates_of(config, t, resident):
    """Residents that are neither sinks nor held, in groups that leave together: (members, ...) by lowest index."""
    free = [i for i in np.flatnonzero(resident) if i >= config.policy.sinks and t - i >= config.hold]
    kind, _, arg = config.schedule.partition(":")
    if kind != "block":
        return [(i,) for i in free]
    n, allowed, groups = int(arg), set(free), []
    for start in range(0, t + 2 - n, n):  # whole blocks only: the last position is at most t
        members = tuple(i for i in range(start, start + n) if resident[i])
        guarded = any(i < config.policy.sinks or t - i < config.hold for i in range(start, start + n))
        if members and not guarded:
            assert set(members) <= allowed
            groups.append(members)
    return groups


def choose(groups, scores, surplus):
    """Lowest score first, ties to the lowest index, until nothing is in excess or nobody is left to go."""
    victims = []
    for n in sorted(range(len(groups)), key=lambda n: (scores[n], n)):
        if len(victims) >= surplus:
            break
        victims += groups[n]
    return victims


def complaint(victims, groups, low, high, surplus, exact):
    """What is wrong with evicting `victims`, or None. low <= score <= high per group."""
    victims = set(victims)
    if victims and not surplus:
        return min(victims), "it leaves where the schedule evicts nothing"
    gone = [n for n, g in enumerate(groups) if victims & set(g)]
    stay = [n for n in range(len(groups)) if n not in gone]
    stray = victims - {i for n in gone for i in groups[n]}
    if stray:
        return min(stray), "it is a sink, held or in no whole block"
    for n in gone:
        if not set(groups[n]) <= victims:
            return min(set(groups[n]) - victims), "its block leaves, it stays"
    if len(victims) < surplus and stay:
        return groups[stay[0]][0], f"{len(victims)} leave, {surplus} must"
    close = lambda a, b: a <= b + TOLERANCE * (1 + abs(b))  # noqa: E731
    if gone:
        top = max(low[n] for n in gone)
        last = max(len(groups[n]) for n in gone if close(top, high[n]))
        if len(victims) - last >= surplus:
            return max(victims), f"{len(victims)} leave, only {surplus} must"
    if gone and stay:
        bar = min(stay, key=lambda n: high[n])
        for n in gone:
            if not close(low[n], high[bar]):
                return groups[n][0], (f"its score {low[n]:.9g} is above {high[bar]:.9g} of entry {groups[bar][0]}, "
                                      "which stays")
            for m in stay:
                if m < n and low[n] == high[n] == low[m] == high[m] and exact(low[n]):
                    return groups[n][0], f"ties with entry {groups[m][0]} at {low[n]:.9g}, which has the lower index"
    return None


def run_unit(trace, s, unit, config, signals, sequence, given=None):
    """(evict_at [T], evictions, steps that evicted). With `given` lifetimes: check them, raise Violation."""
    T, W = s.T, unit.window
    evict_at = np.full(T, T + 1) if given is None else given
    resident = np.zeros(T, bool)
    at = scorer_of(trace, s, unit, config, signals, sequence)
    above = at if given is None else scorer_of(trace, s, unit, config, signals, sequence, slack=TOLERANCE)
    below = at if given is None else scorer_of(trace, s, unit, config, signals, sequence, slack=-TOLERANCE)
    thresholds = given is not None and at.has_thresholds
    watch = [at] if not thresholds else [above, below]
    low, high = (below, above) if thresholds else (at, at)
    evictions = batches = 0

    def fail(t, entry, what):
        raise Violation(f"sequence {sequence}, {unit.name}, step {t}, entry {entry}: {what} ({config})")

    for t in range(T):
        if W and t >= W and resident[t - W]:  # expire
            if given is None:
                evict_at[t - W] = t
            elif evict_at[t - W] != t:
                fail(t, t - W, f"outside the window, but evict_at is {evict_at[t - W]}")
            resident[t - W] = False
        resident[t] = True  # append
        if given is not None and not np.array_equal(resident[:t + 1], given[:t + 1] > t):
            fail(t, int(np.flatnonzero(resident[:t + 1] != (given[:t + 1] > t))[0]), "evict_at before it arrived")
        row = unit_row(unit, t, resident, config.policy.heads)  # attend
        for scorer in watch:  # observe
            scorer.observe(t, resident, row)

        surplus = excess(config, t, T, resident)  # evict
        if given is None and not surplus:
            continue
        if given is None:
            groups = candidates_of(config, t, resident)
            victims = choose(groups, [np.mean([at.score(i, t) for i in g]) for g in groups], surplus)
            evict_at[victims] = t + 1
        else:
            leaving = [int(i) for i in np.flatnonzero(resident & (given == t + 1))]
            # Expiry at t+1 and eviction after t look alike; an entry whose window ends with the text is resident.
            expiring = [i for i in leaving if W and i == t + 1 - W and t + 1 < T]
            if not leaving and not surplus:
                continue
            groups = candidates_of(config, t, resident) if surplus else []
            lows = [np.mean([low.score(i, t) for i in g]) for g in groups]
            highs = [np.mean([high.score(i, t) for i in g]) for g in groups]
            exact = lambda score: at.ties_are_exact and (score == 0 or config.policy.memory == "age")  # noqa: E731
            for victims in ([i for i in leaving if i not in expiring], leaving):
                problem = complaint(victims, groups, lows, highs, surplus, exact)
                if problem is None:
                    break
            if problem is not None:
                fail(t, *problem)
        resident[victims] = False
        evictions += len(victims)
        batches += len(victims) > 0
    if given is not None and not set(given[resident]) <= {T + 1}:
        fail(T, int(np.flatnonzero(resident & (given != T + 1))[0]), "resident at the end, but evict_at is not T+1")
    return evict_at, evictions, batches


def replay(trace, sequence, config, form="auto"):
    """evict_at [n_layer, n_kv_head, T], mean evictions per unit, mean evicting steps per unit."""
    return _all_units(trace, sequence, config, form, None)


def audit(trace, sequence, config, evict_at, form="auto"):
    """Check lifetimes made elsewhere; raises Violation at the first fault, else returns what replay returns."""
    assert evict_at.shape == (trace.n_layer, trace.n_kv_head, trace.seqs[sequence].T), evict_at.shape
    return _all_units(trace, sequence, config, form, np.asarray(evict_at))


def _all_units(trace, sequence, config, form, given):
    if config.wrapped:
        assert given is not None, "wrapped policies are only audited"
        from policies_wrappers import audit_wrapped
        return audit_wrapped(trace, sequence, config, given, form)
    s = trace.seqs[sequence]
    signals = signals_of(s, config.n_prompt, config.seed, sequence)
    out = np.zeros((trace.n_layer, trace.n_kv_head, s.T), np.int64)
    units = units_of(trace, s, config.unit, form)
    evictions = batches = 0
    for unit in units:
        mine = None if given is None else given[np.ix_(unit.layers, unit.kv_heads)].reshape(-1, s.T)
        if mine is not None and (mine != mine[0]).any():
            raise Violation(f"{unit.name}: heads of one unit have different lifetimes")
        evict_at, e, b = run_unit(trace, s, unit, config, signals, sequence, None if mine is None else mine[0])
        out[np.ix_(unit.layers, unit.kv_heads)] = evict_at
        evictions, batches = evictions + e, batches + b
    return out, evictions / len(units), batches / len(units)
