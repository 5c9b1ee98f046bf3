"""The policies that look at the attention output, against policies_output.py; what must be equal, and what must not."""
import h5py
import numpy as np
import pytest

from specs import parse
from test_sim import KVLAG, Results, check_all, os, run, simulate

pytestmark = pytest.mark.skipif(not os.path.exists(KVLAG), reason=f"no {KVLAG}")

SPECS = ["vatp(sinks=2)", "vatp(memory=recent:6,sinks=0,hold=2)", "vatp(memory=mean,sinks=1,row=max,hold=1)",
         "caote", "caote(fast)", "caote(memory=sum,hold=1)", "caote(fast,memory=recent:4,row=max)",
         "caote(memory=first:3,hold=1)",
         "obcache", "obcache(value)", "obcache(key,memory=last,hold=0)", "obcache(nocross,window=3,hold=3)",
         "obcache(value,p=1,window=0,row=max)", "obcache(value,vnorm=no,pool=max,window=2,hold=2)",
         "obcache(joint,memory=recent,window=5,hold=2,pool=avg,kernel=3,row=max)",
         "critical", "critical(memory=recent:4,window=4,kernel=3)", "critical(memory=mean,window=0,kernel=1,first=3)",
         "critical(memory=sum,window=1,first=0,epsilon=0.1,row=max)"]
FLAVOURS = ["vatp-scissorhands(sinks=2,hold=3)", "caote-h2o", "caote-fast", "obcache-value", "obcache-key", "obcache-tova",
            "critical-h2o"]


@pytest.mark.parametrize("name, schedule, unit, budgets", [
    ("factored", "step", "head", "9,13"), ("factored", "prompt", "layer", "6,9"), ("factored", "block:3", "head", "11"),
    ("both", "every:3", "layer", "9,14"), ("both", "step", "head", "7")])
def test_against_the_formulas(traces, tmp_path, name, schedule, unit, budgets):
    path, trace = traces[name]
    results = simulate(tmp_path, path, SPECS + FLAVOURS, "-b", budgets + ",24", "--schedule", schedule, "--unit", unit)
    found = {row["spec"].split("(")[0] for row in results.rows}
    assert found == {"vatp", "caote", "obcache", "critical"} | {x.split("(")[0] for x in FLAVOURS}
    assert check_all(results, trace) == len(results.rows)


def lifetimes(tmp_path, path, spec, *options):
    results = simulate(tmp_path, path, [spec], *options)
    return [results.evict_at(row) for row in results.rows]


def same(a, b):
    return len(a) == len(b) > 0 and all(np.array_equal(x, y) for x, y in zip(a, b))


EQUAL = [("obcache(value,p=1,vnorm=no,window=0)", "h2o"),
         ("obcache(value,p=1,vnorm=no,window=0,hold=3,row=max)", "h2o(hold=3,row=max)"),
         ("obcache(value,p=1,vnorm=no,memory=last,hold=0,unit=layer)", "tova"),
         ("obcache(value,p=1,vnorm=no,memory=recent,window=4,hold=4)",
          "mix(evidence=attn,memory=recent:4,hold=4)"),
         ("obcache(value,p=1,vnorm=no,window=5,hold=5)", "obcache(value,p=1,vnorm=no,memory=recent,window=5,hold=5)"),
         ("obcache(value,p=1,vnorm=no,memory=recent,window=4,hold=4,pool=avg,kernel=5)", "snapkv(window=4,hold=4)"),
         ("obcache(value,p=1,vnorm=no,memory=recent,window=4,hold=4,pool=max)", "snapkv(window=4,hold=4,kernel=7,pool=max)"),
         ("critical(memory=last,window=0,kernel=1,first=budget)", "tova(unit=head)"),
         ("rmm(lag=3)", "rmm(lag=3,signal=correct,evidence=attn)"),
         ("rmm(lag=3,signal=agrees)", "mix(evidence=attn*agrees,memory=first:3,hold=3)"),
         ("rmm(lag=3,signal=entropy)", "mix(evidence=attn*entropy,memory=first:3,hold=3)"),
         ("rmm(lag=3,hold=5,evidence=out)", "mix(evidence=out,memory=first:3,hold=5)"),
         ("rmm(lag=3,evidence=loss,hold=1)", "mix(evidence=loss,memory=first:3,hold=1)"),
         ("rmm(lag=3,evidence=fisher,hold=1)", "mix(evidence=fisher,memory=first:3,hold=1)")]


@pytest.mark.parametrize("a, b", EQUAL)
@pytest.mark.parametrize("name", ["factored", "both"])
def test_identities(traces, tmp_path, name, a, b):
    path, trace = traces[name]
    options = ["-b", "11,16"]
    if "window=5" in a:  # where rows before the window do not count, and none comes after
        if not all(s.n_prompt for s in trace.seqs):
            pytest.skip("needs a prompt")
        options += ["--schedule", "prompt"]
    assert same(lifetimes(tmp_path, path, a, *options), lifetimes(tmp_path, path, b, *options))


DIFFERENT = ["caote|caote(fast)|caote(memory=sum,hold=1)|caote(row=max)",
             "vatp(sinks=0)|vatp(sinks=3)|vatp(sinks=0,memory=last)|vatp(sinks=0,hold=1)|h2o",
             "obcache|obcache(value)|obcache(key)|obcache(nocross)|obcache(value,p=1)|obcache(value,vnorm=no)|"
             "obcache(value,p=1,vnorm=no)|obcache(memory=last)|obcache(memory=recent)|obcache(window=2)|obcache(pool=max)|"
             "obcache(pool=avg)|obcache(pool=max,kernel=3)|obcache(row=max)",
             "critical(window=4)|critical(window=2)|critical(window=4,memory=mean)|critical(window=4,kernel=1)|"
             "critical(window=4,first=budget)|critical(window=4,epsilon=1)|critical(window=4,row=max)",
             "rmm(lag=4)|rmm(lag=4,signal=agrees)|rmm(lag=4,signal=agrees,seed=8)|rmm(lag=4,signal=entropy)|"
             "rmm(lag=4,signal=uniform)|rmm(lag=4,signal=confidence)|rmm(lag=4,evidence=out)|rmm(lag=4,evidence=loss)|"
             "rmm(lag=4,evidence=fisher)|rmm(lag=8)|rmm(lag=4,hold=8)|rmm(lag=8,hold=4)"]


@pytest.mark.parametrize("specs", DIFFERENT)
def test_every_parameter_changes_some_result(traces, tmp_path, specs):
    path, _ = traces["factored"]
    made = {spec: lifetimes(tmp_path, path, spec, "-b", "12") for spec in specs.split("|")}
    for a in made:
        for b in made:
            assert a == b or not same(made[a], made[b]), (a, b)


REFUSED = [("caote(exakt)", "exact|fast"), ("caote(memory=age)", "age"), ("vatp(memory=static)", "static"),
           ("obcache(key,p=1)", "value only"), ("obcache(joint,vnorm=no)", "value only"),
           ("obcache(memory=recent,window=0)", "1..4096"), ("obcache(kernel=4)", "odd"), ("obcache(p=3)", "2|1"),
           ("critical(kernel=0)", "1 to 63"), ("critical(kernel=budget/2)", "odd"), ("critical(epsilon=2)", "0 to 1"),
           ("rmm(signal=maybe)", "correct|uniform|confidence|agrees|entropy"), ("rmm(evidence=all)", "attn|out|loss|fisher")]


@pytest.mark.parametrize("spec, message", REFUSED)
def test_what_is_out_of_range_is_refused(traces, tmp_path, spec, message):
    done = run("sim", traces["factored"][0], "-o", tmp_path / "r.csv", "-p", spec, "-b", "12", fine=(2,))
    assert message in done.stderr, done.stderr


@pytest.mark.parametrize("spec, dataset", [("vatp(sinks=0)", "attn/v"), ("caote", "attn/v"), ("obcache(value)", "attn/v"),
                                           ("obcache(key)", "attn/"), ("critical", "model/wo"),
                                           ("rmm(lag=1,evidence=out)", "attn/v"), ("rmm(lag=1,evidence=loss)", "attn/v")])
def test_a_missing_dataset_is_named(traces, tmp_path, spec, dataset):
    done = run("sim", traces["dense32"][0], "-o", tmp_path / "r.csv", "-p", spec, "-b", "12", fine=(1,))
    assert dataset in done.stderr and spec.split("(")[0] in done.stderr, done.stderr


def test_entropy_is_missed_by_name(traces, tmp_path):
    path = tmp_path / "bare.h5"
    path.write_bytes(open(traces["factored"][0], "rb").read())
    with h5py.File(path, "a") as f:
        del f["seq/0000/logits/entropy"]
    done = run("sim", path, "-o", tmp_path / "r.csv", "-p", "rmm(lag=2,signal=entropy)", "-b", "12", fine=(1,))
    assert "logits/entropy" in done.stderr, done.stderr


def test_signals_of_a_server(traces, tmp_path):
    """Audited: rows weighed by a sampled token that agrees, and by the entropy; lag and hold apart."""
    path, trace = traces["both"]
    specs = ["rmm(lag=5,signal=agrees)", "rmm(lag=5,signal=entropy)", "rmm(lag=2,hold=6,signal=agrees)",
             "rmm(lag=6,hold=2)", "mix(evidence=attn*agrees,memory=sum,hold=2)", "mix(evidence=attn*entropy,memory=sum,hold=2)",
             "rmm(lag=4,evidence=out)", "rmm(lag=4,evidence=loss,hold=2)", "rmm(lag=4,evidence=fisher,hold=2)",
             "rmm-uniform(lag=5)", "rmm-confidence(lag=5)", "rmm-sinks(lag=4)"]
    results = simulate(tmp_path, path, specs, "-b", "8,13", "--pending", "both")
    assert check_all(results, trace) == len(results.rows) >= 2 * 2 * len(specs)
    assert any("seed=7" in row["spec"] for row in results.rows) and parse("rmm").evidence == "attn*correct"


def test_the_seed_draws_the_sampled_tokens_only(traces, tmp_path):
    path, _ = traces["both"]
    lost = []
    for seed in (1, 2):
        out = tmp_path / f"{seed}.csv"
        run("sim", path, "-o", out, "-p", "rmm(lag=5,signal=agrees)", "-p", "rmm(lag=5)", "-b", "8", "--seed", seed)
        lost.append({row["spec"] == "rmm": row["lost_mass"] for row in Results(out).rows if row["seq"] == "0"})
    assert len(lost[0]) == 2 and lost[0][False] != lost[1][False] and lost[0][True] == lost[1][True]
