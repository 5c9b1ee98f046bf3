"""The policies of attention against policies_attention.py; what must be equal, and what must not."""
import h5py
import numpy as np
import pytest

from specs import parse
from test_policies_output import lifetimes, same
from test_sim import KVLAG, check_all, os, run, simulate

pytestmark = pytest.mark.skipif(not os.path.exists(KVLAG), reason=f"no {KVLAG}")

ROWS_ONLY = ["lfu", "lfu(tau=0.1,hold=2)", "h2o-mean", "h2o-mean(hold=3,row=max)", "h2o-prompt", "h2o-prompt(hold=2)",
             "h2o-last", "mix(memory=prompt,hold=1)", "tova-kvpress", "h2o-mean-sinks(sinks=2,hold=3)",
             "h2o-openvino(sinks=1,hold=2)", "h2o-openvino(ahead=3,window=0,aggregate=sum,sinks=0,hold=3)",
             "h2o-openvino(ahead=1,window=2,sinks=0,hold=1)",
             "scissorhands(hold=2)", "scissorhands(window=5,hold=1)", "scissorhands(window=50,tau=0.02,hold=3)",
             "scissorhands-sum(hold=2)", "scissorhands-sum(window=3,hold=3)",
             "roco(young=2)", "roco(protect=0.6,young=1,row=max)", "roco(protect=0,young=0)", "roco(protect=1,hold=1)",
             "snapkv(window=4,kernel=3,hold=4)", "snapkv(window=3,kernel=5,pool=max,hold=3)",
             "snapkv(window=4,kernel=1,hold=1,row=max)", "snapkv-w8-k7-max(hold=2)", "pyramidkv(window=2,hold=2)",
             "lazy(hold=3,alpha=0.02)", "lazy-code(hold=2,alpha=0.05)", "lazy(hold=1,alpha=0.1,shift=0.3)"]
WITH_KEYS = ["rkv(window=3,hold=3)", "rkv(window=2,kernel=1,lambda=0.6,similar=0.2,hold=2)", "rkv(window=4,lambda=1,hold=4)",
             "gkv(window=3,hold=3)", "gkv(window=4,alpha=0.5,lambda=0.9,similar=0.1,hold=4)", "gkv(window=2,row=mean,hold=2)"]


@pytest.mark.parametrize("name, schedule, unit, budgets", [
    ("factored", "step", "head", "9,13"), ("factored", "prompt", "layer", "6,9"), ("factored", "block:3", "head", "11"),
    ("factored", "every:4", "layer", "9,14"), ("both", "every:3", "layer", "9,14"), ("both", "step", "head", "7,24"),
    ("both", "watermark:0.7", "head", "10,24"), ("dense16", "step", "head", "8,12"), ("dense32", "prompt", "head", "2,24"),
    ("dense32", "step", "layer", "9")])
def test_against_the_formulas(traces, tmp_path, name, schedule, unit, budgets):
    path, trace = traces[name]
    specs = ROWS_ONLY + (WITH_KEYS if trace.seqs[0].k is not None else [])
    results = simulate(tmp_path, path, specs, "-b", budgets, "--schedule", schedule, "--unit", unit)
    assert {row["policy"] for row in results.rows} == {parse(spec).name for spec in specs}
    assert check_all(results, trace) == len(results.rows)


DEFAULTS = ["lfu", "tova-kvpress", "h2o-mean", "h2o-mean-sinks", "h2o-prompt", "h2o-last", "h2o-openvino", "scissorhands", "scissorhands-sum", "roco", "snapkv",
            "snapkv-w32-k5-avg", "snapkv-w32-k7-max", "snapkv-w8-k7-max", "pyramidkv", "gkv", "rkv", "lazy", "lazy-code"]


@pytest.mark.parametrize("schedule", ["prompt", "every:64", "block:16"])
def test_published_settings(traces, tmp_path, schedule):
    """The presets as they are, with room for all their windows."""
    path, trace = traces["long"]
    results = simulate(tmp_path, path, DEFAULTS, "-b", "225", "--schedule", schedule, "--prompt", "280")
    assert [row["spec"] for row in results.rows] == DEFAULTS
    assert check_all(results, trace, n_prompt=280) == len(DEFAULTS)


EQUAL = [("tova", "mix(evidence=attn,memory=last,unit=layer)"), ("tova", "h2o-last(unit=layer,hold=0)"),
         ("h2o", "mix(evidence=attn,memory=sum,hold=budget/2)"),
         ("h2o-mean(hold=2)", "mix(evidence=attn,memory=mean,hold=2)"),
         ("snapkv(window=4,kernel=1,hold=4)", "mix(evidence=attn,memory=recent:4,hold=4)"),
         ("snapkv(window=4,kernel=1,hold=4,pool=max)", "scissorhands-sum(window=4,hold=4)"),
         ("snapkv(window=8,kernel=7,hold=5,pool=max)", "pyramidkv(hold=5)"),
         ("snapkv-w32-k5-avg(window=3,hold=3)", "snapkv(window=3,hold=3)"),
         ("scissorhands-sum(hold=budget/2)", "h2o"), ("scissorhands-sum(window=4096,hold=3)", "h2o(hold=3)"),
         ("lfu", "mix(evidence=attn>=tau,memory=sum,hold=1)"),
         ("scissorhands(tau=0,hold=1)", "window"), ("roco(protect=0,young=0)", "h2o-mean"),
         ("h2o-openvino(ahead=1,window=0,aggregate=sum,sinks=0,hold=3)", "h2o(unit=layer,hold=3)"),
         ("h2o-openvino(ahead=1,window=0,sinks=0,hold=3)", "h2o-mean(unit=layer,hold=3)"),
         ("lazy(shift=1,hold=2)", "lazy-code(hold=2)"),
         ("gkv(window=4,alpha=0,lambda=1,hold=4)", "mix(evidence=attn,memory=recent:4,hold=4,row=max)")]


@pytest.mark.parametrize("a, b", EQUAL)
@pytest.mark.parametrize("name", ["factored", "both"])
def test_identities(traces, tmp_path, name, a, b):
    path, _ = traces[name]
    assert same(lifetimes(tmp_path, path, a, "-b", "11,16"), lifetimes(tmp_path, path, b, "-b", "11,16"))


@pytest.mark.parametrize("a, b", [("h2o-prompt(hold=4)", "h2o(hold=4)")])
def test_identities_at_the_end_of_the_prompt(traces, tmp_path, a, b):
    path, _ = traces["factored"]
    options = ["-b", "8", "--schedule", "prompt"]
    assert same(lifetimes(tmp_path, path, a, *options), lifetimes(tmp_path, path, b, *options))


DIFFERENT = ["lfu|lfu(tau=0.1)|lfu(hold=3)|lru", "h2o|h2o-mean(hold=budget/2)|h2o-prompt(hold=budget/2)|h2o-last",
             "h2o-openvino(sinks=0,hold=2)|h2o-openvino(sinks=4,hold=2)|h2o-openvino(sinks=0,hold=2,ahead=2)|"
             "h2o-openvino(sinks=0,hold=2,window=3)|h2o-openvino(sinks=0,hold=2,aggregate=sum)",
             "scissorhands|scissorhands(window=4)|scissorhands(tau=0.02)|scissorhands-sum|scissorhands-sum(window=4)",
             "roco|roco(protect=0.5)|roco(young=3)|roco(row=max)",
             "snapkv(window=4,hold=4)|snapkv(window=6,hold=4)|snapkv(window=4,hold=4,kernel=3)|"
             "snapkv(window=4,hold=4,pool=max)|snapkv(window=4,hold=4,row=max)",
             "lazy(hold=2,alpha=0.05)|lazy(hold=2,alpha=0.1)|lazy(hold=2,alpha=0.05,shift=1)",
             "rkv(window=3,hold=3)|rkv(window=5,hold=3)|rkv(window=3,hold=3,kernel=3,lambda=0.9)|"
             "rkv(window=3,hold=3,lambda=0.9)|rkv(window=3,hold=3,similar=0.2)",
             "gkv(window=3,hold=3)|gkv(window=5,hold=3)|gkv(window=3,hold=3,alpha=0.95)|gkv(window=3,hold=3,lambda=0.9)|"
             "gkv(window=3,hold=3,similar=0.1)|gkv(window=3,hold=3,row=mean)"]


@pytest.mark.parametrize("specs", DIFFERENT)
def test_every_parameter_changes_some_result(traces, tmp_path, specs):
    path, _ = traces["factored"]
    made = {spec: lifetimes(tmp_path, path, spec, "-b", "12,16") for spec in specs.split("|")}
    for a in made:
        for b in made:
            assert a == b or not same(made[a], made[b]), (a, b)


REFUSED = [("snapkv(kernel=4)", "odd"), ("snapkv(kernel=65)", "1 to 63"), ("snapkv(window=0)", "1 to 4096"),
           ("snapkv(window=budget/99)", "1 to 4096"), ("snapkv(pool=min)", "avg|max"), ("gkv(alpha=1.5)", "0 to 1"),
           ("gkv(window=5000)", "1 to 4096"), ("rkv(lambda=-1)", "0 to 1"), ("rkv(similar=2)", "-1 to 1"),
           ("rkv(kernel=2)", "odd"), ("scissorhands(window=budget/99)", "1 to 4096"), ("scissorhands(tau=2)", "0 to 1"),
           ("scissorhands-sum(window=budget/99)", "1..4096"), ("roco(protect=2)", "0 to 1"), ("roco(young=-1)", "out of range"),
           ("lazy(alpha=2)", "0 to 1"), ("lazy(shift=-1)", "0 to 100"), ("h2o-openvino(ahead=0)", "1 to 63"),
           ("h2o-openvino(ahead=budget/99)", "1 to 63"), ("h2o-openvino(aggregate=max)", "norm|sum"), ("lfu(tau=2)", "0 to 1")]


@pytest.mark.parametrize("spec, message", REFUSED)
def test_what_is_out_of_range_is_refused(traces, tmp_path, spec, message):
    done = run("sim", traces["factored"][0], "-o", tmp_path / "r.csv", "-p", spec, "-b", "12", fine=(2,))
    assert message in done.stderr, done.stderr


@pytest.mark.parametrize("spec", ["rkv", "gkv"])
def test_missing_keys_are_named(traces, tmp_path, spec):
    done = run("sim", traces["dense16"][0], "-o", tmp_path / "r.csv", "-p", spec, "-b", "20", fine=(1,))
    assert "attn/" in done.stderr and spec in done.stderr and "--attention factored" in done.stderr, done.stderr


def test_zero_rows_and_keys_score_finite(traces, tmp_path):
    """Rows and keys of zeros: every policy still evicts down to its budget."""
    path = tmp_path / "zero.h5"
    path.write_bytes(open(traces["factored"][0], "rb").read())
    with h5py.File(path, "a") as f:
        for name in "qk":
            data = f[f"seq/0000/attn/{name}"]
            data[...] = np.zeros(data.shape, data.dtype)
    results = simulate(tmp_path, path, ROWS_ONLY + WITH_KEYS, "-b", "10", "--metrics", "lost_mass")
    assert len(results.rows) == len(ROWS_ONLY + WITH_KEYS)
    for row in results.rows:
        assert float(row["peak"]) <= 14 and 0 < float(row["lost_mass"]) < 1, row
