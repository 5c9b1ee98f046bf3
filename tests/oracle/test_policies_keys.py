"""The policies that score keys and values, against policies_keys.py; what must be equal, and what is refused."""
import numpy as np
import pytest

from make_traces import write_trace
from test_sim import KVLAG, check_all, os, read_trace, run, simulate

pytestmark = pytest.mark.skipif(not os.path.exists(KVLAG), reason=f"no {KVLAG}")

STATIC = ["knorm", "knorm(sinks=2,hold=3)"] + [f"mix(evidence={e},memory=static,hold=1)" for e in
                                               ("keynorm", "valuenorm", "outnorm", "keysim")]
SPECS = STATIC + [
    "keydiff", "keydiff(hold=2,sinks=1)",
    "lagkv", "lagkv(lag_size=3,sinks=1)", "lagkv(lag_size=2,cross_scoring=yes)", "lagkv(lag_size=1,sinks=0)", "lagkv-cross(lag_size=3)",
    "cur", "cur(leverage_type=kv_avg,local_window_size=3)", "cur(leverage_type=key,sinks=0,hold=1)",
    "cur(leverage_type=value,local_window_size=0,sinks=1)",
    "expected", "expected(n_future=7,use_covariance=no)", "expected(use_vnorm=no,sinks=0)",
    "expected(epsilon=0.02,n_future=1,hold=1)"]
TRACES = {
    "interleaved": dict(seed=31, n_head=4, n_kv_head=2, rope="base 10000, interleaved, 16 dims",
                        seqs=[dict(T=36, forms=("factored",)), dict(T=30, n_prompt=17, forms=("factored",))]),
    # Rotated in part, one kv head, a sliding window, f32.
    "neox": dict(seed=32, n_head=3, n_kv_head=1, window=[0, 15], rope="base 500, neox, 10 dims",
                 seqs=[dict(T=38, n_prompt=20, forms=("factored",), type=np.float32)]),
    # Layers with a window have a rotation of their own.
    "two": dict(seed=33, n_head=2, n_kv_head=1, window=[0, 15], seqs=[dict(T=34, forms=("factored",))],
                rope="base 500, neox, 10 dims; with a window: base 30, neox, 16 dims"),
}


@pytest.fixture(scope="module")
def turned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("turned")
    paths = {name: write_trace(str(folder / (name + ".h5")), **facts) for name, facts in TRACES.items()}
    return {name: (path, read_trace(path)) for name, path in paths.items()}


@pytest.mark.parametrize("name, schedule, unit, budgets", [
    ("interleaved", "step", "head", "8,13"), ("interleaved", "every:3", "layer", "11"),
    ("interleaved", "step", "model", "9"), ("neox", "step", "layer", "9"), ("neox", "prompt", "head", "7,12"),
    ("neox", "prompt", "layer", "9"), ("neox", "block:3", "head", "12"), ("two", "step", "head", "8,13"),
    ("two", "step", "layer", "11")])
def test_against_the_formulas(turned, tmp_path, name, schedule, unit, budgets):
    path, trace = turned[name]
    results = simulate(tmp_path, path, SPECS, "-b", budgets, "--schedule", schedule, "--unit", unit)
    assert {row["policy"] for row in results.rows} == {"knorm", "mix", "keydiff", "lagkv", "lagkv-cross", "cur", "expected"}
    assert check_all(results, trace) == len(results.rows) >= len(SPECS)


@pytest.mark.parametrize("a, b", [
    ("knorm(hold=2)", "mix(evidence=keynorm,memory=static,hold=2)"),
    ("cur(leverage_type=value,local_window_size=0,sinks=0)", "mix(evidence=valuenorm,memory=static)"),
    ("lagkv", "streaming"),  # no part is ever whole
    ("lagkv(lag_size=18,sinks=0)", "window"),  # a part is judged when all of it has left
    ("cur(local_window_size=1)", "streaming"),  # every share is 1: ties go to the oldest
    ("expected(use_vnorm=no,epsilon=0)", "expected(use_vnorm=no,epsilon=0.5)"),
])
def test_identities(turned, tmp_path, a, b):
    for path, _ in turned.values():
        one, two = ([results.evict_at(row) for row in results.rows] for results in
                    (simulate(tmp_path, path, [spec], "-b", "9,14", "--unit", "head") for spec in (a, b)))
        assert len(one) == len(two) > 0
        assert all(np.array_equal(x, y) for x, y in zip(one, two)), path


@pytest.mark.parametrize("spec", ["lagkv(lag_size=0)", "lagkv(lag_size=4097)", "lagkv(cross_scoring=1)",
                                  "cur(leverage_type=both)", "cur(local_window_size=-1)", "expected(n_future=0)",
                                  "expected(n_future=65537)", "expected(epsilon=1.5)", "expected(use_vnorm=maybe)",
                                  "mix(evidence=keynorm,memory=sum)", "mix(evidence=attn,memory=static)",
                                  "keydiff(row=max)"])
def test_values_out_of_range(turned, tmp_path, spec):
    said = run("sim", turned["neox"][0], "-o", tmp_path / "r.csv", "-p", spec, "-b", "9", fine=(2,)).stderr
    assert spec.partition("(")[2].partition("=")[0] in said, said


@pytest.mark.parametrize("facts, spec, lacks", [
    (dict(seqs=[dict(T=20, values=True)]), "keydiff", "attn/k"),
    (dict(seqs=[dict(T=20)]), "mix(evidence=valuenorm,memory=static)", "attn/v"),
    (dict(wo=False, seqs=[dict(T=20, values=True)]), "mix(evidence=outnorm,memory=static)", "model/wo"),
    (dict(seqs=[dict(T=20, forms=("factored",))]), "expected", "rope"),
    (dict(rope="yarn 40", seqs=[dict(T=20, forms=("factored",))]), "expected", "rope"),
    (dict(rope="base 10000, neox, 16 dims; none in layers 1", seqs=[dict(T=20, forms=("factored",))]), "expected", "rope"),
    (dict(rope="base 9, neox, 16 dims; with a window: base 9, neox, 18 dims", seqs=[dict(T=20, forms=("factored",))]),
     "expected", "rope"),
    (dict(rope="base 10000, neox, 18 dims", seqs=[dict(T=20, forms=("factored",))]), "expected", "rope"),
])
def test_a_trace_that_lacks_something(tmp_path, facts, spec, lacks):
    path = write_trace(str(tmp_path / "t.h5"), 5, **facts)
    said = run("sim", path, "-o", tmp_path / "r.csv", "-p", spec, "-b", "9", fine=(1,)).stderr
    assert lacks in said and spec.partition("(")[0] in said, said
    assert not (tmp_path / "r.csv").exists()
