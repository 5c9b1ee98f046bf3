"""Wrapped policies by the book: units that compete, budgets that fall from layer to layer, another policy at the
prompt's end. Given lifetimes are checked step by step, for all units that belong together."""
import math
from dataclasses import replace

import numpy as np

from replay import TOLERANCE, Violation, candidates_of, scorer_of, signals_of, unit_row, units_of
from specs import expression, parse, possible, schedule_target


def with_budget(config, B):
    return replace(config, budget=B, hold=expression(config.policy.hold, B, config.policy.lag))


def first_of(config):
    """The policy that evicts at the prompt's end as a configuration, or None."""
    if config.policy.prompt == "none":
        return None
    return with_budget(replace(config, policy=parse(config.policy.prompt)), config.budget)


def taper_budgets(config, n_layer, T):
    """PyramidKV's budgets (arXiv:2406.02069): the last layer has B/beta, the first 2B - B/beta, in equal steps."""
    B, beta, uniform = config.budget, config.policy.taper, [config.budget] * n_layer
    rows = config.n_prompt if config.schedule == "prompt" else T
    low, high, most = B / beta, 2 * B - B / beta, rows - config.hold
    if high >= most:
        high, low = most, 2 * B - most
    smallest = with_budget(config, round(low))
    fits = low >= smallest.policy.sinks + smallest.hold and schedule_target(smallest) >= 1
    fits &= all(possible(c) for c in (smallest, first_of(smallest)) if c)
    if n_layer == 1 or not rows >= high > low or not fits:
        return uniform
    return [round(high - l * (high - low) / (n_layer - 1)) for l in range(n_layer)]


class Judge:
    """One unit with its own budget: who is resident, what they are worth, who may leave."""

    def __init__(self, trace, s, unit, config, sequence):
        self.unit, self.config = unit, config
        signals = signals_of(s, config.n_prompt, config.seed, sequence)
        self.scorer = scorer_of(trace, s, unit, config, signals, sequence)
        self.first = first_of(config)
        if self.first:
            self.prompt_scorer = scorer_of(trace, s, unit, self.first, signals, sequence)
        self.resident = np.zeros(s.T, bool)
        self.target = schedule_target(config)
        floor = config.policy.floor if config.policy.share != "none" else 0
        self.least = max(1, math.floor(floor * self.target + 1e-9)) if floor > 0 else 0

    def observe(self, t):
        self.resident[t] = True
        row = lambda p: unit_row(self.unit, t, self.resident, p.heads)  # noqa: E731
        self.scorer.observe(t, self.resident, row(self.config.policy))
        if self.first:
            self.prompt_scorer.observe(t, self.resident, row(self.first.policy))

    def candidates(self, t):
        """[(score, members)] by lowest index."""
        at_end = self.first and t == self.config.n_prompt - 1
        config, scorer = (self.first, self.prompt_scorer) if at_end else (self.config, self.scorer)
        if self.config.pending == "free" and at_end:
            config = replace(config, hold=max(config.hold, self.config.hold))
        groups = candidates_of(config, t, self.resident)
        return [(np.mean([scorer.score(i, t) for i in g]), g) for g in groups]

    def counted(self, t):
        held = self.config.hold if self.config.pending == "free" else 0
        return int(self.resident[:t + 1 - held].sum()) if t + 1 > held else 0


def surplus_of(judges, t):
    """How many entries of all units are too many after step t."""
    config = judges[0].config
    counted, budget = sum(j.counted(t) for j in judges), sum(j.config.budget for j in judges)
    kind, _, arg = config.schedule.partition(":")
    if t < config.n_prompt - 1:
        return 0
    acts = {"step": True, "block": True, "prompt": False, "every": kind == "every" and (t + 1) % int(arg) == 0,
            "watermark": counted > budget}[kind]
    if not acts and not (config.n_prompt and t == config.n_prompt - 1):
        return 0
    return max(0, counted - sum(j.target for j in judges))


def check_single(judges, leaving, t, fail):
    """One entry at a time, the lowest score of all units first; a unit at its least loses none."""
    surplus = surplus_of(judges, t)
    candidates = [j.candidates(t) for j in judges]
    spare = [min(len(c), j.counted(t) - j.least) for j, c in zip(judges, candidates)]
    if sum(map(len, leaving)) != min(surplus, sum(max(0, x) for x in spare)):
        fail(t, f"{sum(map(len, leaving))} leave, {surplus} must, {spare} may")
    score = [{g[0]: x for x, g in c} for c in candidates]
    for u, gone in enumerate(leaving):
        if not set(gone) <= set(score[u]):
            fail(t, f"unit {u}: {set(gone) - set(score[u])} may not leave")
        if len(gone) > max(0, spare[u]):
            fail(t, f"unit {u} falls below its least")
    # Who stays although he might have left is worth no less than any who left; within a unit, at any rate.
    for u, gone in enumerate(leaving):
        for w in range(len(judges)):
            if w != u and len(leaving[w]) == max(0, spare[w]):
                continue
            stay = [x for i, x in score[w].items() if i not in leaving[w]]
            if gone and stay:
                top, bar = max(score[u][i] for i in gone), min(stay)
                if top > bar + TOLERANCE * (1 + abs(bar)):
                    fail(t, f"a score of {top:.9g} leaves unit {u}, {bar:.9g} stays in unit {w}")


def check_blocks(judges, leaving, t, fail):
    """Whole blocks, lowest mean first, until nothing is too many."""
    surplus = surplus_of(judges, t)
    gone = [(u, x, g) for u, j in enumerate(judges) for x, g in j.candidates(t) if set(g) & set(leaving[u])]
    stay = [(u, x, g) for u, j in enumerate(judges) for x, g in j.candidates(t) if not set(g) & set(leaving[u])]
    if sum(len(g) for _, _, g in gone) != sum(map(len, leaving)):
        fail(t, "no whole blocks leave")
    size = sum(map(len, leaving))
    open_units = {u for u, j in enumerate(judges) if j.counted(t) - len(leaving[u]) > j.least}
    if size < surplus and any(u in open_units for u, _, _ in stay):
        fail(t, f"{size} leave, {surplus} must")
    if gone and size - len(max(gone, key=lambda b: b[1])[2]) >= surplus:
        fail(t, f"{size} leave, only {surplus} must")
    top = max((x for _, x, _ in gone), default=-math.inf)
    for u, x, _ in stay:
        if u in open_units and top > x + TOLERANCE * (1 + abs(x)):
            fail(t, f"a block of {top:.9g} leaves, {x:.9g} stays in unit {u}")


def audit_units(judges, lives, sequence):
    """(evictions, evicting steps), summed over the units."""
    T = len(lives[0])
    config = judges[0].config
    check = check_blocks if config.schedule.startswith("block") else check_single
    evictions = batches = 0

    def fail(t, what):
        raise Violation(f"sequence {sequence}, {judges[0].unit.name}, step {t}: {what} ({config})")

    for t in range(T):
        for j, life in zip(judges, lives):
            W = j.unit.window
            assert not W or len(judges) == 1
            if W and t >= W and j.resident[t - W]:
                if life[t - W] != t:
                    fail(t, f"{t - W} is outside the window")
                j.resident[t - W] = False
            j.observe(t)
            if not np.array_equal(j.resident[:t + 1], life[:t + 1] > t):
                fail(t, "lifetimes of entries that have left, or not arrived")
        leaving = []
        for j, life in zip(judges, lives):
            expiring = t + 1 - j.unit.window if j.unit.window and t + 1 < T else -1
            leaving.append([int(i) for i in np.flatnonzero(j.resident & (life == t + 1)) if i != expiring])
        if judges[0].config.budget < T:
            check(judges, leaving, t, fail)
        for j, gone in zip(judges, leaving):
            j.resident[gone] = False
            evictions += len(gone)
            batches += len(gone) > 0
    return evictions, batches


def audit_wrapped(trace, sequence, config, given, form="auto"):
    """As replay.audit. Units that do not compete are audited one by one."""
    s = trace.seqs[sequence]
    units, evictions, batches = units_of(trace, s, config.unit, form), 0, 0
    budgets = taper_budgets(config, trace.n_layer, s.T)
    judges, lives = [], []
    for unit in units:
        judges.append(Judge(trace, s, unit, with_budget(config, budgets[unit.layers[0]]), sequence))
        mine = given[np.ix_(unit.layers, unit.kv_heads)].reshape(-1, s.T)
        if (mine != mine[0]).any():
            raise Violation(f"{unit.name}: heads of one unit have different lifetimes")
        lives.append(mine[0])
    key = {"none": lambda u: u, "layer": lambda u: units[u].layers[0], "model": lambda u: 0}[config.policy.share]
    for group in sorted({key(u) for u in range(len(units))}):
        mine = [u for u in range(len(units)) if key(u) == group]
        e, b = audit_units([judges[u] for u in mine], [lives[u] for u in mine], sequence)
        evictions, batches = evictions + e, batches + b
    return given, evictions / len(units), batches / len(units)
