"""The oracle against worked examples and itself: if these fail, believe nothing it says about the program."""
import itertools
from dataclasses import replace

import numpy as np
import pytest

from metrics import evicted_mask, measure, probe
from philox import normal, philox
from replay import Violation, audit, replay, units_of
from specs import Config, Policy, budget_tokens, parse, possible, resolve
from tracefile import Sequence, Trace, counted_steps, read_lifetimes, rows_of, write_lifetimes

SCHEDULES = ["step", "every:4", "watermark:0.75", "block:3", "prompt"]
SPECS = ["full", "window", "streaming", "streaming(sinks=2)", "random", "h2o", "h2o(recent=3,sinks=2)",
         "h2o(heads=max)", "ema", "ema(alpha=0.8,hold=1)", "tova", "lru", "lru(tau=0.05)", "rmm(lag=5)", "rmm(lag=0)",
         "rmm(lag=4,signal=uniform)", "rmm(lag=5,signal=confidence)", "oracle(mass)", "oracle(mass,horizon=6)",
         "oracle(mass,hold=2)", "oracle(mass,hold=lag,lag=4)", "lag(3,h2o(recent=2))", "lag(5,lru)",
         "mix(evidence=attn,memory=mean,hold=2)", "mix(evidence=attn,memory=recent:4,hold=1)",
         "mix(evidence=attn,memory=max:0.9,hold=1)", "mix(evidence=attn*correct,memory=sum,hold=3)",
         "mix(evidence=attn*focus,memory=sum,hold=3)", "mix(evidence=attn>=0.1,memory=sum,hold=1)",
         "mix(evidence=attn,memory=first:4,hold=6)"]


def bare_trace(heads):
    """One layer, one kv head, the given lower-triangular rows for each query head."""
    T = len(heads[0])
    dense = np.array([[r + [0] * (T - len(r)) for r in rows] for rows in heads], float)
    trace = Trace(1, len(heads), 1, 1, [0], 1.0)
    trace.seqs.append(Sequence(T, dense=dense[None]))
    return trace


def random_trace(T, heads=2, seed=0, n_prompt=0):
    rng = np.random.default_rng(seed)
    trace = bare_trace([[list(rng.dirichlet(np.full(t + 1, 0.4))) for t in range(T)] for _ in range(heads)])
    trace.seqs[0].n_prompt = n_prompt
    return trace


def seen_at(evict_at, t):
    """What the query of step t sees."""
    return [i for i in range(t + 1) if evict_at[0, 0, i] > t]


def resident_after(evict_at, t):
    return [i for i in range(t + 1) if evict_at[0, 0, i] > t + 1]


# ---- known answers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counter, key, expected", [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
])
def test_philox_gives_the_known_answers_of_random123(counter, key, expected):
    assert philox(counter, key) == expected


def test_normals_look_normal():
    x = np.array([normal(5, i, 0, 0, 0) for i in range(4000)])
    assert abs(x.mean()) < 0.06 and abs(x.std() - 1) < 0.04 and abs((np.abs(x) < 1).mean() - 0.6827) < 0.03


def test_mean_of_four_squares_under_the_root_is_what_the_probes_divide_by():
    # E sqrt(chi2_4 / 4) = Gamma(2.5) / (sqrt(2) Gamma(2)) = .9399856
    from math import gamma, sqrt
    from metrics import PROBE_MEAN
    assert abs(gamma(2.5) / (sqrt(2) * gamma(2)) - PROBE_MEAN) < 1e-5


def test_streaming_worked_example():
    evict_at, evictions, batches = replay(random_trace(24), 0, resolve(parse("streaming"), 8))
    assert resident_after(evict_at, 20) == [0, 1, 2, 3, 17, 18, 19, 20]
    assert evictions == batches == 24 - 8


ONE = [[1.0], [.6, .4], [.5, .3, .2], [.1, .6, .2, .1]]
TWO = [[1.0], [.2, .8], [.1, .8, .1], [.3, .1, .4, .2]]


def test_h2o_worked_example_one_head():
    trace = bare_trace([ONE])
    evict_at, _, _ = replay(trace, 0, resolve(parse("h2o(recent=1)"), 2))
    assert resident_after(evict_at, 2) == [0, 2] and seen_at(evict_at, 3) == [0, 2, 3]
    lost = trace.seqs[0].dense[0, 0, 3] * evicted_mask(evict_at[0, 0])[3]
    assert lost.sum() == pytest.approx(0.6)


def test_h2o_worked_example_two_heads():
    from replay import unit_row
    trace = bare_trace([ONE, TWO])
    evict_at, _, _ = replay(trace, 0, resolve(parse("h2o(recent=1)"), 2))
    assert seen_at(evict_at, 3) == [0, 2, 3]
    seen = np.array([True, False, True, True])
    row = unit_row(units_of(trace, trace.seqs[0], "head")[0], 3, seen, "mean")
    assert row[seen] == pytest.approx([.2917, .4722, .2361], abs=5e-5)
    from metrics import lost_mass
    assert lost_mass(trace, trace.seqs[0], evict_at)[0, :, 3].mean() == pytest.approx(0.35)


def test_memories_by_hand():
    """Entry 1 of ONE sees .4, .3, .6: every memory has one right answer after step 3."""
    from replay import Scorer, signals_of
    trace = bare_trace([ONE])
    s = trace.seqs[0]
    s.correct = np.array([1.0, 0.0, 1.0])
    s.target_logprob = np.log(np.array([.5, .25, .5]))
    unit = units_of(trace, s, "head")[0]
    for text, t, expected in [
            ("mix(evidence=attn,memory=sum)", 3, 1.3), ("mix(evidence=attn,memory=mean)", 3, 1.3 / 3),
            ("mix(evidence=attn,memory=ema:0.5)", 3, .05 + .075 + .3), ("mix(evidence=attn,memory=last)", 3, .6),
            ("mix(evidence=attn,memory=recent:2)", 3, .9), ("mix(evidence=attn,memory=recent:9)", 3, 1.3),
            ("mix(evidence=attn,memory=max:0.5)", 2, .3), ("mix(evidence=attn,memory=max:0.9)", 2, .36),
            ("lru", 3, 3.0), ("lru(tau=0.35)", 2, 1.0), ("mix(evidence=attn>=0.35,memory=sum)", 3, 2.0),
            ("mix(evidence=attn*correct,memory=sum)", 3, .3), ("mix(evidence=attn*confidence,memory=sum)", 2, .25),
            ("rmm(lag=2)", 3, .15), ("rmm(lag=1)", 3, .3), ("rmm(lag=0)", 3, .4), ("rmm(lag=2)", 1, .4),
            ("rmm(lag=8,signal=uniform)", 3, .45), ("lag(1,h2o)", 3, .7),
            ("lag(1,mix(evidence=attn,memory=mean))", 3, .35), ("lag(1,lru(tau=0.35))", 3, 1.0),
            ("lag(1,mix(evidence=attn,memory=last))", 3, .3),
            ("oracle(mass)", 1, .3), ("oracle(mass)", 2, 0.0), ("window", 3, 1.0)]:
        scorer = Scorer(trace, s, unit, resolve(parse(text), 9), signals_of(s, 0), 0)
        for step in range(t + 1):
            row = s.dense[0, 0, step]
            scorer.observe(step, np.arange(4) <= step, row)
        assert scorer.score(1, t) == pytest.approx(expected), text


# ---- equalities ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_streaming_without_sinks_is_the_window(schedule):
    trace, prompt = random_trace(30), 6
    a, b = (replay(trace, 0, resolve(parse(p), 9, schedule=schedule, n_prompt=prompt))[0]
            for p in ("window", "streaming(sinks=0)"))
    assert np.array_equal(a, b)
    if schedule == "step":  # a query sees B entries and itself: ages 0..B
        assert [int(x) for x in a[0, 0, :21]] [:20] == [i + 10 for i in range(20)]


def test_schedules_by_hand():
    """The window makes the sizes visible: what is resident after each step."""
    trace = random_trace(12)
    sizes = lambda schedule, n_prompt=0: [  # noqa: E731
        len(resident_after(replay(trace, 0, resolve(parse("window"), 5, schedule=schedule, n_prompt=n_prompt))[0], t))
        for t in range(12)]
    assert sizes("step") == [1, 2, 3, 4] + [5] * 8
    assert sizes("every:3") == [1, 2, 3, 4, 5, 3, 4, 5, 3, 4, 5, 3]
    assert sizes("watermark:0.6") == [1, 2, 3, 4, 5, 3, 4, 5, 3, 4, 5, 3]
    assert sizes("block:2") == [1, 2, 3, 4, 5, 4, 5, 4, 5, 4, 5, 4]
    assert sizes("prompt", 8) == [1, 2, 3, 4, 5, 6, 7, 5, 6, 7, 8, 9]
    assert sizes("every:3", 8) == [1, 2, 3, 4, 5, 6, 7, 3, 3, 4, 5, 3]


def test_pending_entries_are_free_of_charge():
    trace = random_trace(30)
    trace.seqs[0].correct = np.ones(29)
    config = resolve(parse("rmm(lag=4)"), 6, pending="free")
    evict_at = replay(trace, 0, config)[0]
    for t in range(10, 30):
        kept = resident_after(evict_at, t)
        assert len(kept) == 6 + 4 and kept[-4:] == [t - 3, t - 2, t - 1, t]
    charged = replay(trace, 0, replace(config, pending="charged"))[0]
    assert len(resident_after(charged, 20)) == 6


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_budget_of_all_tokens_costs_exactly_nothing(traces, schedule):
    _, trace = traces["factored"]
    for spec in ("h2o", "rmm(lag=3)", "window"):
        config = resolve(parse(spec), 44, schedule=schedule, n_prompt=13)
        result = measure(trace, 0, replay(trace, 0, config)[0], 13)
        assert [result[name] for name in ("lost_mass", "out_err", "fisher", "dloss_first")] == [0, 0, 0, 0]


def test_sliding_windows_expire_and_lose_no_mass(traces):
    _, trace = traces["factored"]
    evict_at = replay(trace, 0, resolve(parse("full"), 44))[0]
    assert [int(x) for x in evict_at[1, 0]] == [i + 14 if i + 14 < 44 else 45 for i in range(44)]
    result = measure(trace, 0, evict_at, 13)
    assert result["lost_mass"] == 0 and result["evictions"] == 0 and result["peak"] == (44 + 14) / 2


def test_whole_rows_of_mass_are_lost_and_kept(traces):
    """Lost mass against a direct count, and delta against o' - o of the renormalised row."""
    _, trace = traces["factored"]
    s = trace.seqs[0]
    evict_at = replay(trace, 0, resolve(parse("h2o"), 8, n_prompt=13))[0]
    from metrics import lost_mass, output_change
    m, delta = lost_mass(trace, s, evict_at), output_change(trace, s, evict_at)
    for l, h, t in itertools.product(range(2), range(3), (14, 30, 43)):
        a, v = rows_of(trace, s, l)[h, t], s.v[l, 0]
        kept = [i for i in range(t + 1) if evict_at[l, 0, i] > t]
        assert m[l, h, t] == pytest.approx(1 - a[kept].sum(), abs=1e-12)
        assert delta[l, h, t] == pytest.approx(a[kept] @ v[kept] / a[kept].sum() - a @ v, abs=1e-12)


def test_blocks_add_up_to_the_means(traces):
    _, trace = traces["factored"]
    result = measure(trace, 0, replay(trace, 0, resolve(parse("h2o"), 8, n_prompt=13))[0], 13)
    N = counted_steps(trace.seqs[0], 13).sum()
    assert result["block_steps"].sum() == N == result["n_counted"]
    assert result["block_lost_mass"].sum() / N == pytest.approx(result["lost_mass"])
    assert result["block_first"].sum() / N == pytest.approx(result["dloss_first"])
    assert result["block_fisher"].sum(axis=1).mean() / N == pytest.approx(result["fisher"])
    assert result["head_first"].sum() == pytest.approx(result["dloss_first"])
    assert result["head_lost_mass"].mean() == pytest.approx(result["lost_mass"])


def test_probes_estimate_the_exact_output_error(traces):
    _, trace = traces["factored"]
    evict_at = replay(trace, 0, resolve(parse("window"), 6, n_prompt=13))[0]
    guess, exact = (measure(trace, 0, evict_at, 13, exact=e)["out_err"] for e in (False, True))
    assert 0.7 < guess / exact < 1.4 and guess != exact
    assert not np.array_equal(probe(0, 0, 24), probe(1, 0, 24))


def test_hindsight_is_best_at_one_eviction():
    """At a single eviction the kept entries of oracle(mass) hold the most future mass of all subsets."""
    for seed in range(5):
        trace = random_trace(11, seed=seed, n_prompt=7)
        trace.seqs[0].counted = np.random.default_rng(seed).integers(0, 2, 10)
        trace.seqs[0].counted[8] = 1
        evict_at = replay(trace, 0, resolve(parse("oracle(mass)"), 3, schedule="prompt", n_prompt=7))[0]
        assert best_subset_gap(trace, 0, evict_at, 3, 7) < 1e-12


def best_subset_gap(trace, sequence, evict_at, B, n_prompt):
    """By how much the best choice of B of the prompt's entries beats the made one, summed over units."""
    s, gap = trace.seqs[sequence], 0.0
    counted = counted_steps(s, n_prompt)
    for unit in units_of(trace, s, "head"):
        future = unit.rows.mean(axis=0)[counted].sum(axis=0)
        life = evict_at[unit.layers[0], unit.kv_heads[0]]
        kept = [i for i in range(n_prompt) if life[i] > n_prompt]
        assert len(kept) == B
        gap += max(future[list(c)].sum() for c in itertools.combinations(range(n_prompt), B)) - future[kept].sum()
    return gap


# ---- specs -----------------------------------------------------------------------------------------------------------


def test_specs():
    assert parse("h2o(recent=32,sinks=4)") == Policy("h2o", hold="32", sinks=4)
    assert parse("rmm", lag="8") == parse("rmm(lag=8)")
    assert parse("oracle(mass,horizon=inf)") == parse("oracle(mass)") == parse("oracle")
    assert parse("mix(evidence=attn,memory=ema:0.98,hold=16)") == Policy("mix", "attn", "ema", 0.98, hold="16")
    assert parse("lag(4,h2o(recent=2))").cut and parse("lag(4,h2o(recent=2))").lag == 4
    assert resolve(parse("h2o"), 7) == Config(parse("h2o"), 7, hold=3)
    assert resolve(parse("h2o"), 8, pending="free").pending == "charged"
    assert [budget_tokens(b, 50) for b in ("12", "25%", "1%", "0.5")] == [12, 12, 1, 25]
    assert not possible(resolve(parse("streaming"), 3)) and not possible(resolve(parse("window"), 9, schedule="prompt"))
    assert possible(resolve(parse("rmm(lag=30)"), 8, pending="free"))
    assert not possible(resolve(parse("rmm(lag=6)"), 8, schedule="every:4"))


# ---- the audit must pass what is right and fail what is wrong --------------------------------------------------------


def own_configs(trace, sequence, n):
    """A rotating choice of n configurations a trace allows."""
    s, rng = trace.seqs[sequence], np.random.default_rng(100 + n)
    units = ["head", "layer"] + (["model"] if len(set(trace.window)) == 1 else [])
    wanted = [resolve(parse(spec), B, unit, schedule, pending, s.n_prompt, seed=3)
              for spec in SPECS for B in (7, 12) for unit in units for schedule in SCHEDULES
              for pending in ("charged", "free")]
    able = [c for c in wanted if possible(c) and (s.correct is not None or "*" not in c.policy.evidence)]
    return [able[i] for i in rng.permutation(len(able))[:n]]


def corruptions(evict_at, T, rng):
    """Lifetimes with one fault each: an entry that leaves earlier, later, before it came; two that swap fates."""
    gone = np.argwhere(evict_at <= T)
    stay = np.argwhere(evict_at == T + 1)
    for l, k, i in gone[rng.permutation(len(gone))[:2]]:
        for value in (evict_at[l, k, i] + 1, T + 1, i):
            broken = evict_at.copy()
            broken[l, k, i] = value
            yield broken
    for l, k, i in stay[rng.permutation(len(stay))[:1]]:
        broken = evict_at.copy()
        broken[l, k, i] = max(i + 1, T - 3)
        yield broken


@pytest.mark.parametrize("name, sequence", [("dense16", 0), ("factored", 0), ("both", 0), ("both", 1), ("dense32", 0)])
def test_audit_passes_replay_and_fails_a_corrupted_copy(traces, tmp_path, name, sequence):
    _, trace = traces[name]
    T, rng, caught = trace.seqs[sequence].T, np.random.default_rng(1), 0
    configs = own_configs(trace, sequence, 40)
    made = [replay(trace, sequence, c) for c in configs]
    write_lifetimes(tmp_path / "l.h5", [({"spec": c.policy.name}, {sequence: ({"budget": c.budget}, m[0])})
                                        for c, m in zip(configs, made)])
    stored = read_lifetimes(tmp_path / "l.h5")
    for config, (evict_at, evictions, batches), (_, seqs) in zip(configs, made, stored):
        assert np.array_equal(seqs[sequence][1], evict_at)
        _, e, b = audit(trace, sequence, config, seqs[sequence][1])
        assert (e, b) == (evictions, batches)
    for config, (evict_at, _, _) in list(zip(configs, made))[:8]:
        for broken in corruptions(evict_at, T, rng):
            with pytest.raises(Violation):
                audit(trace, sequence, config, broken)
            caught += 1
    assert caught > 20


def test_audit_sees_a_victim_that_should_have_stayed():
    """Swap a victim with an entry that stays: the number is right, the choice is not."""
    trace = random_trace(20, seed=4)
    config = resolve(parse("h2o(recent=2)"), 8)
    evict_at = replay(trace, 0, config)[0]
    first = int(np.argmin(evict_at[0, 0]))
    best = max((i for i in range(7) if i != first), key=lambda i: evict_at[0, 0, i])
    broken = evict_at.copy()
    broken[0, 0, [first, best]] = broken[0, 0, [best, first]]
    with pytest.raises(Violation, match="above"):
        audit(trace, 0, config, broken)


def test_audit_wants_exact_ties_to_go_to_the_lowest_index():
    trace = random_trace(20)
    trace.seqs[0].correct = np.zeros(19)  # every score of rmm is 0
    config = resolve(parse("rmm(lag=3)"), 8)
    evict_at = replay(trace, 0, config)[0]
    assert [int(x) for x in evict_at[0, 0, :3]] == [9, 10, 11]
    broken = evict_at.copy()
    broken[0, 0, [0, 1]] = broken[0, 0, [1, 0]]
    with pytest.raises(Violation, match="lower index"):
        audit(trace, 0, config, broken)


def test_audit_spares_sinks_and_held_entries():
    trace = random_trace(20)
    config = resolve(parse("streaming(sinks=2)"), 8)
    evict_at = replay(trace, 0, config)[0]
    broken = evict_at.copy()
    broken[0, 0, [1, 2]] = broken[0, 0, [2, 1]]
    with pytest.raises(Violation, match="sink"):
        audit(trace, 0, config, broken)


def test_audit_forgives_near_ties_only():
    trace = bare_trace([[[1.0], [.5, .5], [.4, .3, .3], [.25, .25, .25, .25]]])
    config = resolve(parse("tova"), 2)
    assert resident_after(replay(trace, 0, config)[0], 2) == [0, 2]
    for nudge, fine in ((1e-6, True), (1e-3, False)):
        trace = bare_trace([[[1.0], [.5, .5], [.4, .3 - nudge, .3 + nudge], [.25, .25, .25, .25]]])
        other = np.array([[[4, 5, 3, 5]]])  # entry 2 leaves in place of entry 1
        if fine:
            audit(trace, 0, config, other)
        else:
            with pytest.raises(Violation, match="step 2"):
                audit(trace, 0, config, other)
