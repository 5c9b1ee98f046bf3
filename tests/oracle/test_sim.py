"""`kvlag sim` against the oracle: its lifetimes audited step by step, its numbers computed again from them.

The program under test is $KVLAG, else ./kvlag; without one these tests are skipped.
"""
import csv
import functools
import itertools
import json
import math
import os
import shutil
import subprocess
from dataclasses import replace

import h5py
import numpy as np
import pytest

from metrics import evictions_of, measure
from replay import audit, replay
from specs import OWN, STATIC, Unknown, budget_tokens, parse, possible, resolve
from test_oracle import best_subset_gap
from tracefile import read_lifetimes, read_trace, write_lifetimes
from make_traces import write_trace

KVLAG = os.path.abspath(os.environ.get("KVLAG", "kvlag"))
pytestmark = pytest.mark.skipif(not os.path.exists(KVLAG), reason=f"no {KVLAG}")

SEED = 7
NUMBERS = ["n_counted", "lost_mass", "out_err", "dloss_first", "fisher", "retained", "footprint", "peak", "expired",
           "resident", "kv_bytes"]
BLOCKS = {"lost_mass": "block_lost_mass", "steps": "block_steps", "head_lost_mass": "head_lost_mass",
          "first": "block_first", "fisher": "block_fisher", "head_first": "head_first", "head_fisher": "head_fisher"}
PRESETS = ["full", "window", "streaming", "random", "lru", "ema", "h2o", "tova", "rmm", "oracle(mass)"]
BUILT_IN = ["streaming(sinks=2)", "random(hold=3)", "h2o(recent=3,sinks=2)", "ema(alpha=0.8,hold=1)", "lru(tau=0.05)",
            "rmm(lag=5)", "rmm(lag=0)", "rmm(lag=4,signal=uniform)", "oracle(mass,hold=2)", 
            "mix(evidence=attn,memory=mean,hold=2)", "mix(evidence=attn,memory=recent:4,hold=1)",
            "mix(evidence=attn,memory=max:0.9,hold=1)", "mix(evidence=attn,memory=ema:0.5,hold=16)",
            "mix(evidence=attn*correct,memory=sum,hold=3)", "mix(evidence=attn,memory=last,hold=1)",
            "rmm(lag=5,signal=confidence)", "mix(evidence=attn*focus,memory=sum,hold=3)",
            "mix(evidence=attn>=tau,tau=0.1,memory=sum,hold=1)"]
LATER = ["lag(3,h2o(recent=2))", "lag(5,lru)"]
GRADIENTS = ["mix(evidence=out,memory=sum,hold=2)", "mix(evidence=loss,memory=recent:4,hold=2)",
             "mix(evidence=fisher,memory=ema:0.9,hold=1)", "oracle(loss)", "oracle(loss,hold=2)"]
NO_PREDICTIONS_NEEDED = lambda spec: "rmm" not in spec and "*" not in spec  # noqa: E731


def run(*args, fine=(0,)):
    done = subprocess.run([KVLAG, *map(str, args)], capture_output=True, text=True, timeout=120)
    assert done.returncode in fine, f"{' '.join(map(str, args))}\n{done.returncode}: {done.stderr}"
    return done


@functools.lru_cache(maxsize=None)
def registered():
    """Names in the program's registry; the presets where it cannot list them."""
    done = run("policies", "--json", fine=(0, 1, 2))
    if done.returncode:
        return PRESETS
    listed = json.loads(done.stdout)
    if isinstance(listed, dict):
        listed = next(v for v in listed.values() if isinstance(v, list))
    names = [p["name"] for p in listed if p.get("family") != "wrapper"]
    return ["oracle(mass)" if n == "oracle" else n for n in names if n not in ("mix", "lag")]


@functools.lru_cache(maxsize=None)
def understood(path, spec):
    """May be refused, with a usage error, until its issue is done; the presets and BUILT_IN may not."""
    out = path + ".probe.csv"
    done = run("sim", path, "-o", out, "--force", "-p", spec, "-b", "20,21", fine=(0, 1, 2))
    return done.returncode == 0


def metrics_for(path, trace, exact=False):
    names = ["lost_mass"]
    s = trace.seqs[0]
    if s.v is not None and trace.wo is not None:
        names.append("out_err=exact" if exact else "out_err")
    if s.grad_loss is not None and s.v is not None:
        names.append("loss")
    return ",".join(names)


class Results:
    """The CSV rows of one run, their blocks and their lifetimes."""

    def __init__(self, path, lifetimes=None):
        with open(path, newline="") as f:
            lines = f.read().splitlines()
        self.comments = [x for x in lines if x.startswith("#")]
        assert self.comments[0] == "# kvlag results v1"
        self.rows = list(csv.DictReader(x for x in lines if not x.startswith("#")))
        with h5py.File(str(path)[:-4] + ".blocks.h5") as f:
            self.blocks = {name: f[name][:] for name in f if isinstance(f[name], h5py.Dataset)}
        self.configs = read_lifetimes(lifetimes) if lifetimes else []

    def evict_at(self, row):
        """The lifetimes of a row, found by its key."""
        key = ("policy", "spec", "budget_asked", "lag", "unit", "schedule", "pending", "resolved")
        found = [seqs for attributes, seqs in self.configs if all(attributes[k] == row[k] for k in key)]
        assert len(found) == 1, f"{len(found)} lifetimes for {[row[k] for k in key]}"
        attributes, evict_at = found[0][int(row["seq"])]
        for k in ("budget", "hold", "sinks"):
            assert attributes[k] == row[k], (k, attributes[k], row[k])
        return evict_at


def config_of(row, trace, n_prompt):
    """The configuration that a row claims, checked against its resolved columns."""
    s = trace.seqs[int(row["seq"])]
    policy = parse(row["spec"], row["lag"])
    budget = s.T if policy.name == "full" else budget_tokens(row["budget_asked"], s.T)
    if not (budget >= s.T and int(row["budget"] or s.T) >= s.T):
        assert int(row["budget"]) == budget, row
    config = resolve(policy, budget, row["unit"], row["schedule"], row["pending"], n_prompt, SEED)
    assert config.pending == row["pending"] and int(row["sinks"]) == policy.sinks, row
    assert int(row["hold"]) == config.hold, row
    return config


def close(theirs, ours, scale=0.0):
    theirs, ours = np.asarray(theirs, float), np.asarray(ours, float)
    return theirs.shape == ours.shape and np.all(np.abs(theirs - ours) <= 1e-7 + 1e-4 * np.maximum(np.abs(ours), scale))


def check_numbers(results, r, trace, evict_at, counts, form="auto", exact=False, n_prompt=None, bits=None):
    """Row r and its blocks against metrics.py. counts: the (evictions, batches) that may stand there."""
    row, sequence = results.rows[r], int(results.rows[r]["seq"])
    ours = measure(trace, sequence, evict_at, n_prompt, row["unit"], form, exact, bits)
    for name in NUMBERS:
        if row.get(name, "") == "":
            assert name not in ours or name in ("out_err", "dloss_first", "fisher"), f"{name} is empty in {row}"
            continue
        scale = ours.get("first_scale", 0) if name == "dloss_first" else 0
        assert close(float(row[name]), ours[name], scale), f"{name}: theirs {row[name]}, ours {ours[name]} in {row}"
    theirs = (float(row["evictions"]), float(row["evict_batches"]))
    assert any(close(theirs, c) for c in counts), f"evictions, batches: theirs {theirs}, ours {counts} in {row}"
    for name, block in BLOCKS.items():
        needed = name in ("lost_mass", "steps", "head_lost_mass")
        if name not in results.blocks or block not in ours or (not needed and row["fisher"] == ""):
            assert not needed, f"blocks lack {name}"
            continue
        scale = np.abs(ours[block]).max() if "first" in name else 0
        assert close(results.blocks[name][r], ours[block], scale), \
            f"{name}: theirs {results.blocks[name][r]}, ours {ours[block]} in {row}"
    if row.get("kl_est") and row["fisher"] and any("uncalibrated" in c for c in results.comments):
        assert close(float(row["kl_est"]), 1.5 * float(row["fisher"]))
        assert close(float(row["dloss_est"]), float(row["dloss_first"]) + float(row["kl_est"]))
        check_intervals(row, ours["block_first"])


def check_intervals(row, block_first):
    """The 90 % intervals without a calibration: a factor of 1.5 at one standard deviation for KL; for the loss, in
    quadrature, the standard error of the first-order part as the bootstrap over its 64 blocks would find it."""
    kl, normal = float(row["kl_est"]), 1.6448536269514722
    low, high = kl / 1.5 ** normal, kl * 1.5 ** normal
    assert close(float(row["kl_lo"]), low) and close(float(row["kl_hi"]), high), row
    n = len(block_first)
    noise = normal * math.sqrt(n * np.var(block_first, ddof=1)) / int(row["n_counted"])
    est = float(row["dloss_est"])
    assert close(float(row["dloss_lo"]), est - math.hypot(kl - low, noise), abs(est)), row
    assert close(float(row["dloss_hi"]), est + math.hypot(high - kl, noise), abs(est)), row


def simulate(tmp_path, path, specs, *options):
    """One run in an empty folder; its Results."""
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    (tmp_path / "run").mkdir()
    out, life = tmp_path / "run" / "r.csv", tmp_path / "run" / "l.h5"
    policies = itertools.chain(*(("-p", s) for s in specs))
    run("sim", path, "-o", out, "--lifetimes", life, "--seed", SEED, *policies, *options)
    return Results(out, life)


def check_all(results, trace, form="auto", exact=False, n_prompt=None):
    """Every row: lifetimes audited, numbers computed again. Policies the oracle does not know are only priced."""
    audited = 0
    for r, row in enumerate(results.rows):
        prompt = trace.seqs[int(row["seq"])].n_prompt if n_prompt is None else n_prompt
        evict_at = results.evict_at(row)
        counts = [evictions_of(trace, evict_at, row["unit"])]
        try:
            config = config_of(row, trace, prompt)
        except Unknown:
            config = None
        if config is not None:
            counts.append(audit(trace, int(row["seq"]), config, evict_at, form)[1:])
            audited += 1
        check_numbers(results, r, trace, evict_at, counts, form, exact, prompt)
    assert audited
    return audited


def bare(policy):
    return replace(policy, unit=None)


def check_presence(results, trace, specs, budgets, schedule):
    """Exactly the configurations that are possible have a row."""
    for n, s in enumerate(trace.seqs):
        found = set()
        for row in results.rows:
            if int(row["seq"]) == n:
                try:
                    policy = bare(parse(row["spec"], row["lag"]))
                    tokens = None if policy.name == "full" else budget_tokens(row["budget_asked"], s.T)
                    found.add((policy, tokens, row["pending"]))
                except Unknown:
                    pass
        wanted = set()
        for spec, budget, pending in itertools.product(specs, budgets, ("charged", "free")):
            try:
                policy = bare(parse(spec))
            except Unknown:
                continue
            config = resolve(policy, budget_tokens(budget, s.T), "head", schedule, pending, s.n_prompt)
            if policy.name == "full":
                wanted.add((policy, None, "charged"))
            elif possible(config):
                wanted.add((policy, config.budget, config.pending))
        assert found == wanted, f"missing {wanted - found}, unasked {found - wanted}"


CASES = [("dense16", "step", None, "9,25%"), ("dense16", "every:4", "layer", "12,50%"),
         ("dense16", "watermark:0.75", "layer", "8,13"), ("dense16", "block:3", None, "8,13"),
         ("factored", "step", "layer", "9,13"), ("factored", "every:3", None, "10,50%"),
         ("factored", "watermark:0.6", None, "10,20"), ("factored", "block:4", "layer", "9,25%"),
         ("factored", "prompt", None, "6,10"), ("factored", "prompt", "layer", "6,9"),
         ("both", "step", "layer", "9,50%"), ("both", "every:2", None, "8,12"), ("both", "block:2", "layer", "7,12"),
         ("both", "watermark:0.9", "layer", "7,12"), ("dense32", "step", None, "8,12"),
         ("dense32", "block:5", "layer", "8,12"), ("dense32", "every:5", None, "10,16"),
         ("dense32", "prompt", None, "1,2")]


@pytest.mark.parametrize("name, schedule, unit, budgets", CASES)
def test_every_policy(traces, tmp_path, name, schedule, unit, budgets):
    path, trace = traces[name]
    gradients = GRADIENTS if trace.seqs[0].grad_fisher is not None else []
    specs = list(dict.fromkeys(registered() + BUILT_IN + gradients +
                               [s for s in LATER if understood(traces["factored"][0], s)]))
    if trace.seqs[0].correct is None:
        specs = [s for s in specs if NO_PREDICTIONS_NEEDED(s)]
    specs = [s for s in specs if known_to_need_nothing_else(path, trace, s)]
    options = ["-b", budgets, "--schedule", schedule, "--pending", "both", "--metrics", metrics_for(path, trace)]
    results = simulate(tmp_path, path, specs, *options, *(["--unit", unit] if unit else []))
    check_all(results, trace)
    check_presence(results, trace, specs, budgets.split(","), schedule)


def known_to_need_nothing_else(path, trace, spec):
    """Policies that want gradients, keys or values are left out where the trace has none; others must work."""
    try:
        policy = parse(spec)
    except Unknown:
        return understood(path, spec)
    if policy.name in OWN or STATIC.get(policy.evidence):  # tested where the trace has all they need: test_policies_*.py
        return understood(path, spec)
    return policy.evidence != "loss" or trace.seqs[0].grad_fisher is not None


@pytest.mark.parametrize("name", ["factored", "both"])
def test_lags_from_the_command_line(traces, tmp_path, name):
    path, trace = traces[name]
    results = simulate(tmp_path, path, ["rmm", "oracle(mass,hold=lag)", "h2o(hold=lag)"], "-b", "10,20", "-L", "0,1,5",
                       "--pending", "both")
    assert {row["lag"] for row in results.rows} == {"0", "1", "5"}
    assert check_all(results, trace) == len(results.rows) == 3 * 2 * 3 * 2 * len(trace.seqs)


def test_a_long_trace_with_tiles(traces, tmp_path):
    path, trace = traces["long"]
    metrics = metrics_for(path, trace)
    results = simulate(tmp_path, path, ["h2o", "rmm(lag=16)", "lru"], "-b", "10%,64", "--metrics", metrics)
    check_all(results, trace)


def test_both_forms_of_attention(traces, tmp_path):
    path, trace = traces["both"]
    for form in ("dense", "factored"):
        results = simulate(tmp_path, path, ["h2o", "tova", "ema"], "-b", "7,12", "--attention", form)
        check_all(results, trace, form)


def test_exact_output_error(traces, tmp_path):
    path, trace = traces["factored"]
    metrics = metrics_for(path, trace, exact=True)
    results = simulate(tmp_path, path, ["h2o", "window"], "-b", "10,20", "--metrics", metrics)
    check_all(results, trace, exact=True)


def test_a_longer_prompt(traces, tmp_path):
    path, trace = traces["factored"]
    results = simulate(tmp_path, path, ["h2o", "window", "oracle(mass)"], "-b", "10,20", "--prompt", "21",
                       "--schedule", "prompt")
    check_all(results, trace, n_prompt=21)


def test_whole_cache_costs_exactly_nothing(traces, tmp_path):
    path, trace = traces["factored"]
    results = simulate(tmp_path, path, ["full", "h2o", "window"], "-b", "44,100%,60", "--metrics",
                       metrics_for(path, trace))
    for row in results.rows:
        zero = ("lost_mass", "out_err", "evictions", "dloss_first", "fisher", "kl_est", "dloss_est", "dloss_lo", "kl_hi")
        assert all(float(row[name]) == 0 for name in zero), row
    check_all(results, trace)


def test_lifetimes_come_back(traces, tmp_path):
    """--from-lifetimes of the program's own file gives the same rows and blocks."""
    path, trace = traces["factored"]
    results = simulate(tmp_path, path, ["h2o", "rmm(lag=3)", "random"], "-b", "8,12", "--pending", "both")
    again = tmp_path / "again.csv"
    run("sim", path, "-o", again, "--from-lifetimes", tmp_path / "run" / "l.h5", "--seed", SEED)
    back = Results(again)
    assert all(row.pop("score_updates") == "" for row in back.rows)  # nobody scored
    assert all(float(row.pop("score_updates")) >= 0 for row in results.rows)
    assert back.rows == results.rows
    for name, block in results.blocks.items():
        assert np.array_equal(block, back.blocks[name]), name


def test_foreign_lifetimes_are_priced(traces, tmp_path):
    """A file that holds only `spec`, written by the oracle."""
    path, trace = traces["factored"]
    configs = [resolve(parse(spec), B, n_prompt=13) for spec in ("h2o", "window", "oracle(mass)") for B in (7, 11)]
    made = [replay(trace, 0, c)[0] for c in configs]
    write_lifetimes(tmp_path / "mine.h5", [({"spec": f"mine{n}"}, {0: ({}, m)}) for n, m in enumerate(made)])
    out = tmp_path / "r.csv"
    run("sim", path, "-o", out, "--from-lifetimes", tmp_path / "mine.h5", "--metrics", metrics_for(path, trace))
    results = Results(out)
    assert len(results.rows) == len(made)
    for r, row in enumerate(results.rows):
        evict_at = made[int(row["spec"][4:])]
        row["unit"] = row["unit"] or "head"
        check_numbers(results, r, trace, evict_at, [evictions_of(trace, evict_at, "head")], n_prompt=13)


def test_hindsight_is_best_at_one_eviction(tmp_path):
    path = str(tmp_path / "tiny.h5")
    write_trace(path, 11, n_layer=2, n_head=4, n_kv_head=2,
                seqs=[dict(T=14, n_prompt=8, forms=("factored",), counted=0.8)])
    trace = read_trace(path)
    results = simulate(tmp_path, path, ["oracle(mass)"], "-b", "3,5", "--schedule", "prompt")
    assert len(results.rows) == 2
    for row in results.rows:
        assert best_subset_gap(trace, 0, results.evict_at(row), int(row["budget"]), 8) < 1e-5


def test_threads_do_not_change_a_byte(traces, tmp_path):
    path, _ = traces["both"]
    for threads in (1, 3):
        run("sim", path, "-o", tmp_path / f"{threads}.csv", "--lifetimes", tmp_path / f"{threads}.h5",
            "--threads", threads, "-p", "h2o", "-p", "random", "-p", "rmm(lag=4)", "-b", "8,50%", "--seed", SEED)
    for suffix in (".csv", ".blocks.h5", ".h5"):
        assert (tmp_path / ("1" + suffix)).read_bytes() == (tmp_path / ("3" + suffix)).read_bytes(), suffix


def test_a_seed_changes_only_what_draws(traces, tmp_path):
    path, _ = traces["dense16"]
    rows = []
    for seed in (1, 2):
        out = tmp_path / f"s{seed}.csv"
        run("sim", path, "-o", out, "-p", "random", "-p", "h2o", "-b", "8", "--seed", seed)
        rows.append({r["policy"]: r["lost_mass"] for r in Results(out).rows})
    assert rows[0]["random"] != rows[1]["random"] and rows[0]["h2o"] == rows[1]["h2o"]
