"""`kvlag sim` with wrapped policies against policies_wrappers.py, and what must be the same as something simpler."""
import subprocess

import numpy as np
import pytest

from make_traces import write_trace
from policies_wrappers import audit_wrapped, taper_budgets
from replay import Violation, audit
from specs import parse, resolve
from test_sim import KVLAG, Results, check_all, config_of, metrics_for, pytestmark, simulate  # noqa: F401
from tracefile import read_trace

SHARED = ["ada(h2o)", "ada(ema(alpha=0.8,hold=1),floor=0.5)", "flat(h2o(hold=2))", "flat(lru,floor=0.3)",
          "ada(streaming(sinks=2))", "flat(tova(unit=layer))", "ada(random(hold=3),floor=0)", "lag(3,ada(h2o))",
          "pyramid(ada(h2o),beta=4)", "pyramid(flat(ema(hold=1)),beta=3)"]
LONE = ["pyramid(h2o)", "pyramid(window,beta=3)", "pyramid(h2o(hold=2),beta=5)", "pyramid(tova,beta=2)",
        "lag(0|3|9,h2o)", "lag(4,lru)", "lag(5,ema(hold=1))", "h2o(unit=model)", "tova(unit=model,row=max)",
        "lag(2,random(unit=model))", "lag(3,mix(evidence=attn,memory=mean,hold=2))",
        "lag(3,mix(evidence=attn,memory=recent:4,hold=1))", "lag(6,mix(evidence=attn,memory=last,hold=1))"]
PROMPT = ["then(ema(alpha=0.5),h2o)", "then(streaming(sinks=2),lru)", "then(tova,lag(3,h2o))", "ada(then(h2o(hold=2),ema))",
          "flat(then(random(seed=7),tova(unit=layer)))", "then(tova(row=max),h2o(unit=model))"]


@pytest.mark.parametrize("name, schedule, budgets", [
    ("dense16", "step", "9,25%"), ("dense16", "every:4", "12,50%"), ("dense16", "watermark:0.75", "12"),
    ("dense16", "block:3", "9,13"), ("both", "step", "10,50%"), ("both", "every:2", "11"), ("both", "block:2", "12"),
    ("dense32", "prompt", "1,2"), ("dense32", "step", "8,13")])
def test_wrappers(traces, tmp_path, name, schedule, budgets):
    path, trace = traces[name]
    specs = SHARED + LONE + (PROMPT if name == "dense32" else [])
    results = simulate(tmp_path, path, specs, "-b", budgets, "--schedule", schedule, "--metrics",
                       metrics_for(path, trace))
    assert check_all(results, trace) == len(results.rows) > len(specs)


@pytest.mark.parametrize("schedule", ["step", "prompt", "every:3", "watermark:0.8", "block:2"])
def test_at_the_prompts_end(tmp_path, schedule):
    path = str(tmp_path / "two.h5")
    write_trace(path, 17, n_layer=3, n_head=4, n_kv_head=2,
                seqs=[dict(T=36, n_prompt=15, forms=("factored",), counted=0.8)])
    trace = read_trace(path)
    results = simulate(tmp_path, path, PROMPT + SHARED, "-b", "9,12", "--schedule", schedule)
    assert check_all(results, trace) == len(results.rows) > 20


def test_pending_entries_of_competing_units_are_free(tmp_path, traces):
    path, trace = traces["both"]
    results = simulate(tmp_path, path, ["ada(rmm)", "flat(h2o(hold=lag),floor=0.4)"], "-b", "8", "-L", "0,2,5",
                       "--pending", "both")
    assert check_all(results, trace) == len(results.rows) == 2 * 3 * 2 * 2


def lifetimes(tmp_path, path, spec, *options):
    results = simulate(tmp_path, path, [spec], *options)
    return [results.evict_at(row) for row in results.rows]


def same(a, b):
    assert len(a) == len(b) > 0 and all(np.array_equal(x, y) for x, y in zip(a, b))


@pytest.mark.parametrize("schedule", ["step", "every:3", "watermark:0.8"])
@pytest.mark.parametrize("one, other", [
    ("ada(h2o,floor=1)", "h2o"), ("flat(ema,floor=1)", "ema"), ("pyramid(lru,beta=1)", "lru"), ("lag(inf,h2o)", "h2o"),
    ("lag(500,h2o)", "h2o"), ("lag(500,lru)", "lru"), ("lag(4,rmm)", "rmm(lag=4)"), ("lag(0,window)", "window"),
    ("then(h2o,h2o)", "h2o")])
def test_wrappers_that_change_nothing(traces, tmp_path, schedule, one, other):
    path, _ = traces["both"]
    options = ["-b", "9,50%", "--prompt", "12", "--schedule", schedule]
    same(lifetimes(tmp_path, path, one, *options), lifetimes(tmp_path, path, other, *options))


def test_blocks_are_a_schedule(traces, tmp_path):
    path, _ = traces["both"]
    same(lifetimes(tmp_path, path, "blocks(3,h2o)", "-b", "12"),
         lifetimes(tmp_path, path, "h2o", "-b", "12", "--schedule", "block:3"))


@pytest.mark.parametrize("one, other", [("h2o(unit=model)", "h2o(unit=layer)"), ("h2o(share=model)", "h2o(share=layer)"),
                                        ("keydiff(unit=model)", "keydiff(unit=layer)"),
                                        ("flat(lag(3,ema),floor=0.3)", "ada(lag(3,ema),floor=0.3)")])
def test_a_model_of_one_layer_is_a_layer(traces, tmp_path, one, other):
    path, _ = traces["long"]
    options = ["-b", "40,30%", "--metrics", "lost_mass"]
    same(lifetimes(tmp_path, path, one, *options), lifetimes(tmp_path, path, other, *options))


def test_competition_is_for_something(traces, tmp_path):
    path, trace = traces["both"]
    made = {spec: lifetimes(tmp_path, path, spec, "-b", "10") for spec in
            ("h2o", "ada(h2o)", "ada(h2o,floor=0.9)", "flat(h2o)", "flat(h2o,floor=0.9)", "pyramid(h2o(hold=1),beta=2)",
             "pyramid(h2o(hold=1),beta=4)", "lag(1,h2o)", "h2o(unit=model)")}
    kinds = {b"".join(x.tobytes() for x in made[spec]) for spec in made}
    assert len(kinds) == len(made)


def test_the_audit_fails_what_is_wrong(traces, tmp_path):
    path, trace = traces["both"]
    results = simulate(tmp_path, path, ["ada(h2o)", "pyramid(window,beta=3)", "flat(ema)"], "-b", "10")
    caught = 0
    for row in results.rows:
        n = int(row["seq"])
        T, evict_at = trace.seqs[n].T, results.evict_at(row)
        config = config_of(row, trace, trace.seqs[n].n_prompt)
        audit(trace, n, config, evict_at)
        for l, kv, i in [tuple(x) for x in np.argwhere(evict_at <= T)][::25]:
            broken = evict_at.copy()
            broken[l, kv, i] += 1
            with pytest.raises(Violation):
                audit_wrapped(trace, n, config, broken)
            caught += 1
    assert caught > 10


def test_taper_by_hand():
    """B 12, beta 3: the last layer has 4, the first 20, in five layers by steps of 4."""
    config = resolve(parse("window(taper=3)"), 12)
    assert taper_budgets(config, 5, 100) == [20, 16, 12, 8, 4]
    assert taper_budgets(config, 5, 16) == [16, 14, 12, 10, 8]
    assert taper_budgets(config, 1, 100) == [12]
    assert taper_budgets(resolve(parse("h2o(hold=6,taper=3)"), 12), 5, 100) == [12] * 5
    assert taper_budgets(resolve(parse("h2o(taper=3)"), 12), 5, 100) == [20, 16, 12, 8, 4]


@pytest.mark.parametrize("spec, message", [
    ("h2o(unit=model)", "one window"), ("flat(oracle(mass))", "full run"), ("oracle(mass,unit=model)", "full run"),
    ("tova(share=layer)", "nobody to compete"), ("h2o(unit=model,taper=2)", "one budget"),
    ("lag(3,oracle(mass))", "looks ahead"), ("h2o(floor=0.5)", "floor goes with"), ("ada(full)", "no parameter")])
def test_refused_by_name(traces, tmp_path, spec, message):
    path, _ = traces["factored"]
    done = subprocess.run([KVLAG, "sim", path, "-o", tmp_path / "r.csv", "-p", spec, "-b", "12"], capture_output=True,
                          text=True)
    assert done.returncode in (1, 2) and message in done.stderr and not (tmp_path / "r.csv").exists(), done.stderr


def test_the_same_bytes(traces, tmp_path):
    """Any number of threads, any number of passes, by shards, and from lifetimes."""
    path, _ = traces["both"]
    specs = [x for s in ("ada(h2o)", "flat(ema)", "h2o(unit=model)", "pyramid(lru)", "window", "lag(3,flat(h2o))")
             for x in ("-p", s)]
    run = lambda *a: subprocess.run([KVLAG, *map(str, a)], check=True, capture_output=True, text=True)  # noqa: E731
    out = lambda name: tmp_path / (name + ".csv")  # noqa: E731
    options = [path, *specs, "-b", "9,40%"]
    run("sim", *options, "-o", out("one"), "--threads", 1, "--lifetimes", tmp_path / "one.h5")
    run("sim", *options, "-o", out("three"), "--threads", 3, "--lifetimes", tmp_path / "three.h5")
    assert (tmp_path / "one.h5").read_bytes() == (tmp_path / "three.h5").read_bytes()
    said = run("sim", *options, "-o", out("few"), "--memory", "3M").stderr
    assert " pass" in said
    for k in (1, 2, 3):
        run("sim", *options, "-o", out(f"part{k}"), "--shard", f"{k}/3")
    run("merge", *(out(f"part{k}") for k in (1, 2, 3)), "-o", out("merged"))
    run("sim", *options, "-o", out("resumed"), "--resume")
    for name in ("three", "few", "merged", "resumed"):
        for suffix in (".csv", ".blocks.h5"):
            assert (tmp_path / (name + suffix)).read_bytes() == (tmp_path / ("one" + suffix)).read_bytes(), name
    run("sim", path, "-o", out("back"), "--from-lifetimes", tmp_path / "one.h5")
    rows = lambda name: [{k: v for k, v in row.items() if k != "score_updates"}  # noqa: E731  (lifetimes do not tell)
                         for row in Results(out(name)).rows]
    assert rows("back") == rows("one")
